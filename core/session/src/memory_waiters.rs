//! Sessions whose writers found no room in memory, and which are checked again in turn.
//!
//! Memory becomes free elsewhere, without an event of the session that waits, so it is checked at
//! intervals.

use std::collections::BTreeSet;
use std::ops::Bound;

use d2tp_time::{Span, Time};

/// The interval at which sessions whose writers wait for memory are checked.
const MEMORY_CHECK_EVERY: Span = Span::from_millis(25); // a guess
/// The most sessions that are checked at once.
const CHECKED_AT_ONCE: usize = 64; // a guess

/// Sessions whose writers wait for room in memory.
#[derive(Debug)]
pub(crate) struct MemoryWaiters<Id> {
    waiting: BTreeSet<Id>,
    /// The session that was checked last, so that all have their turn.
    last: Option<Id>,
    check_at: Time,
}

impl<Id: Copy + Ord> MemoryWaiters<Id> {
    pub(crate) fn new() -> Self {
        MemoryWaiters {
            waiting: BTreeSet::new(),
            last: None,
            check_at: Time::ZERO,
        }
    }

    pub(crate) fn push(&mut self, id: Id) {
        self.waiting.insert(id);
    }

    pub(crate) fn remove(&mut self, id: Id) {
        self.waiting.remove(&id);
    }

    pub(crate) fn next_timeout(&self) -> Time {
        if self.waiting.is_empty() {
            Time::NEVER
        } else {
            self.check_at
        }
    }

    /// The sessions to be checked now.
    pub(crate) fn due(&mut self, now: Time) -> Vec<Id> {
        if self.waiting.is_empty() || now < self.check_at {
            return Vec::new();
        }
        self.check_at = now + MEMORY_CHECK_EVERY;
        let after = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let behind = self.waiting.range((after, Bound::Unbounded));
        let due: Vec<Id> = behind
            .chain(&self.waiting)
            .take(CHECKED_AT_ONCE.min(self.waiting.len()))
            .copied()
            .collect();
        self.last = due.last().copied();
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_who_wait_are_asked_in_turn_and_not_too_often() {
        let mut waiters = MemoryWaiters::new();
        assert_eq!(waiters.next_timeout(), Time::NEVER);
        let count = CHECKED_AT_ONCE + 10;
        (0..count).for_each(|id| waiters.push(id));
        let now = Time::ZERO + Span::from_secs(1);
        let first = waiters.due(now);
        assert_eq!(first.len(), CHECKED_AT_ONCE);
        assert!(waiters.due(now).is_empty());
        assert_eq!(waiters.next_timeout(), now + MEMORY_CHECK_EVERY);
        let second = waiters.due(waiters.next_timeout());
        assert!((CHECKED_AT_ONCE..count).all(|id| second.contains(&id)));
        (0..count).for_each(|id| waiters.remove(id));
        assert_eq!(waiters.next_timeout(), Time::NEVER);
    }
}
