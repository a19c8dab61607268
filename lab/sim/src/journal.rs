//! The journal of an end, which survives a crash.
//!
//! ```text
//!   commit ──sync takes a moment──▶ safe ──▶ applications say DURABLE
//!     └── crash before: lost          └── crash after: found, unless the disk is faulty (lost_commits)
//! ```
//!
//! A commit contains the session's record and the application's state at the same time, so that the
//! two never contradict each other. One commit is written at a time: the next one begins when the
//! previous one is durable, as with one writer and one file.

use std::collections::VecDeque;

use cedos_lab_link::{Span, Time};
use d2tp_session::{RecordError, SessionRecord};

/// The time from a commit until it is durable. // a guess: an fsync on flash
const SYNC_TAKES: Span = Span::from_millis(15);
/// The number of durable commits that are kept, for disks that lose the last ones.
pub(crate) const COMMITS_KEPT: usize = 8;

/// One state of an end.
#[derive(Clone, Debug)]
pub(crate) struct Commit<S> {
    /// When the commit was made.
    pub made_at: Time,
    /// The session's record, if there was a session.
    pub record: Option<Vec<u8>>,
    /// The application's state.
    pub state: S,
}

/// The journal of an end whose application state is `S`.
#[derive(Clone, Debug)]
pub(crate) struct SimJournal<S> {
    safe: VecDeque<Commit<S>>,
    syncing: Option<(Time, Commit<S>)>,
    /// A newer state, which waits until the current sync is done.
    waiting: Option<Commit<S>>,
}

impl<S: Clone> SimJournal<S> {
    /// An empty journal.
    pub(crate) fn new() -> SimJournal<S> {
        SimJournal {
            safe: VecDeque::new(),
            syncing: None,
            waiting: None,
        }
    }

    /// Begins to write a commit, at once or when the current one is durable.
    pub(crate) fn commit(&mut self, commit: Commit<S>) {
        if self.syncing.is_some() {
            self.waiting = Some(commit);
        } else {
            self.syncing = Some((commit.made_at + SYNC_TAKES, commit));
        }
    }

    /// When the current commit becomes durable.
    pub(crate) fn next_at(&self) -> Time {
        self.syncing.as_ref().map_or(Time::NEVER, |(at, _)| *at)
    }

    /// The commit that has become durable by now, if there is one.
    pub(crate) fn on_time(&mut self, now: Time) -> Option<&Commit<S>> {
        let (at, _) = self.syncing.as_ref()?;
        if *at > now {
            return None;
        }
        let (_, done) = self.syncing.take()?;
        if let Some(next) = self.waiting.take() {
            self.syncing = Some((now + SYNC_TAKES, next));
        }
        if self.safe.len() == COMMITS_KEPT {
            self.safe.pop_front();
        }
        self.safe.push_back(done);
        self.safe.back()
    }

    /// Handles a crash. Returns what a new process finds; `lost` durable commits are lost as well.
    pub(crate) fn crash(&mut self, lost: u32) -> Option<Commit<S>> {
        (self.syncing, self.waiting) = (None, None);
        for _ in 0..lost {
            self.safe.pop_back();
        }
        self.safe.back().cloned()
    }
}

/// A record whose deadlines are advanced by `by`, because they approach while the session is
/// hibernated.
pub(crate) fn aged(record: &[u8], by: Span) -> Result<Vec<u8>, RecordError> {
    let mut record = SessionRecord::decode(record)?;
    for flow in &mut record.flows {
        flow.deadline_left = flow.deadline_left.map(|left| left.saturating_sub(by));
    }
    Ok(record.encode())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    fn commit(journal: &mut SimJournal<u32>, ms: u64, state: u32) {
        journal.commit(Commit {
            made_at: at(ms),
            record: None,
            state,
        });
    }

    #[test]
    fn what_was_not_safe_at_the_crash_is_gone() {
        let mut journal = SimJournal::new();
        commit(&mut journal, 0, 1);
        assert!(journal.on_time(at(14)).is_none());
        assert_eq!(journal.on_time(at(15)).unwrap().state, 1);
        commit(&mut journal, 20, 2);
        assert_eq!(journal.crash(0).unwrap().state, 1);
        assert_eq!(journal.next_at(), Time::NEVER);
    }

    #[test]
    fn of_commits_made_during_a_sync_the_last_one_counts() {
        let mut journal = SimJournal::new();
        for n in 0..5 {
            commit(&mut journal, n, n as u32);
        }
        assert_eq!(journal.on_time(at(15)).unwrap().state, 0);
        assert_eq!(journal.next_at(), at(30));
        assert_eq!(journal.on_time(at(30)).unwrap().state, 4);
        assert_eq!(journal.next_at(), Time::NEVER);
    }

    #[test]
    fn a_disk_that_lies_loses_the_last_commits() {
        let mut journal = SimJournal::new();
        for n in 0..20 {
            commit(&mut journal, n * 100, n as u32);
            journal.on_time(at(n * 100 + 50));
        }
        assert_eq!(journal.crash(3).unwrap().state, 16);
        assert!(journal.crash(20).is_none());
    }
}
