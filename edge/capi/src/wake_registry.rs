//! What the sockets of an engine need of a machine that may sleep, while the process holds a
//! D-Lock.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use d2tp_sched::WakeNeeds;
use d2tp_time::{Span, Time};
use tokio::sync::Notify;

use crate::dlock;

/// How often sockets are checked while there is one for which the machine may be woken.
pub(crate) const ASK_EVERY: Duration = Duration::from_secs(5); // the same as in the agent

/// How recently a socket must have moved a byte to keep the machine awake.
const RUNS_WITHIN: Span = Span::from_secs(30); // the same as in the agent

/// How long a socket must have been without a link to count as waiting for one: a new session finds its
/// first link sooner.
const LACKS_FOR: Span = Span::from_secs(2); // a guess

/// What a socket needs of the machine while it may sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SocketWakeState {
    /// The socket has a link and is idle, or needs nothing.
    #[default]
    Rests,
    /// The socket waits for a better link, until it must begin on a metered one.
    Waits {
        start: Option<Time>,
    },
    Runs,
}

/// All sockets of an engine for which the machine may be woken.
#[derive(Default)]
pub(crate) struct WakeRegistry {
    all: RefCell<BTreeMap<u64, SocketWakeState>>,
    next: Cell<u64>,
    /// Notified when a socket's state changes, or a D-Lock is acquired or released.
    pub(crate) changed: Notify,
    reconsider_notify: Notify,
}

impl WakeRegistry {
    /// Triggers a new decision for every socket.
    pub(crate) fn reconsider(&self) {
        self.reconsider_notify.notify_waiters();
    }

    /// Waits for a trigger of new decisions: the machine was asleep, or a D-Lock was acquired or
    /// released.
    pub(crate) async fn reconsidered(&self) {
        self.reconsider_notify.notified().await;
    }

    /// Whether the registry has no socket.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.borrow().is_empty()
    }

    /// What the sockets need of the machine.
    pub(crate) fn wake_needs(&self) -> WakeNeeds {
        let mut sum = WakeNeeds::default();
        for stand in self.all.borrow().values() {
            match stand {
                SocketWakeState::Rests => {}
                SocketWakeState::Runs => sum.runs = true,
                SocketWakeState::Waits { start } => {
                    sum.waits = true;
                    let earlier = sum.latest_start.into_iter().chain(*start).min();
                    sum.latest_start = earlier;
                }
            }
        }
        sum
    }
}

/// A socket in the registry, until it is dropped.
pub(crate) struct WakeEntry {
    registry: Rc<WakeRegistry>,
    number: u64,
    /// Bytes moved so far, and when the last one moved, while a D-Lock is held.
    moved: Option<(u64, Option<Time>)>,
    lacks_since: Option<Time>,
}

impl WakeEntry {
    pub(crate) fn new(stands: &Rc<WakeRegistry>) -> WakeEntry {
        let number = stands.next.get();
        stands.next.set(number + 1);
        WakeEntry {
            registry: stands.clone(),
            number,
            moved: None,
            lacks_since: None,
        }
    }

    /// Records that the socket has moved `moved` bytes in all, and whether it `lacks` a link that it
    /// may use; `start`: when it must begin on a metered one. Without `asked`, the socket needs nothing
    /// of the machine.
    pub(crate) fn update(
        &mut self,
        now: Time,
        moved: u64,
        lacks: bool,
        start: impl FnOnce() -> Option<Time>,
    ) {
        self.lacks_since = lacks.then(|| self.lacks_since.unwrap_or(now));
        if !dlock::is_held() {
            self.moved = None;
            return self.set(SocketWakeState::Rests);
        }
        let moved_at = match self.moved {
            // It is unknown when earlier bytes moved.
            None => None,
            Some((before, at)) if before == moved => at,
            Some(_) => Some(now),
        };
        self.moved = Some((moved, moved_at));
        let waits = |since: Time| now.since(since) >= LACKS_FOR;
        let moves = moved_at.is_some_and(|at| now.since(at) < RUNS_WITHIN);
        let stand = match self.lacks_since {
            Some(since) if waits(since) => SocketWakeState::Waits { start: start() },
            None if moves => SocketWakeState::Runs,
            Some(_) | None => SocketWakeState::Rests,
        };
        self.set(stand);
    }

    pub(crate) fn set(&self, stand: SocketWakeState) {
        let before = self.registry.all.borrow_mut().insert(self.number, stand);
        if before.unwrap_or_default() != stand {
            self.registry.changed.notify_one();
        }
    }
}

impl Drop for WakeEntry {
    fn drop(&mut self) {
        if self
            .registry
            .all
            .borrow_mut()
            .remove(&self.number)
            .is_some()
        {
            self.registry.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dlock::{acquire, is_held, release};
    use crate::errno::Errno;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Span::from_secs(seconds)
    }

    // A single test, because the count belongs to the process.
    #[test]
    fn sockets_count_while_a_d_lock_is_held_and_as_they_stand() {
        let stands: Rc<WakeRegistry> = Rc::default();
        let (mut one, mut other) = (WakeEntry::new(&stands), WakeEntry::new(&stands));
        let never = || unreachable!("nobody asks when a flow without a D-Lock must begin");
        one.update(at(0), 10, true, never);
        other.update(at(0), 10, true, never);
        assert_eq!(stands.wake_needs(), WakeNeeds::default());
        assert_eq!(release(), Err(Errno(libc::EINVAL)));
        assert_eq!(acquire().map(|change| change.held), Ok(1));
        assert!(is_held());
        one.update(at(2), 10, true, || Some(at(50)));
        other.update(at(2), 10, true, || Some(at(40)));
        let waits = WakeNeeds {
            waits: true,
            latest_start: Some(at(40)),
            ..WakeNeeds::default()
        };
        assert_eq!(stands.wake_needs(), waits);
        drop(other);
        one.update(at(3), 10, true, || None);
        let waits = WakeNeeds {
            waits: true,
            ..WakeNeeds::default()
        };
        assert_eq!(stands.wake_needs(), waits);
        // The socket has a link: it runs from when it moves data until it has not for a while.
        let runs = WakeNeeds {
            runs: true,
            ..WakeNeeds::default()
        };
        for (now, moved, is) in [
            (4, 11, runs),
            (33, 11, runs),
            (34, 11, WakeNeeds::default()),
            (35, 12, runs),
        ] {
            one.update(at(now), moved, false, || None);
            assert_eq!(stands.wake_needs(), is, "at {now} s");
        }
        assert_eq!(release().map(|change| change.held), Ok(0));
        one.update(at(36), 13, false, || None);
        assert_eq!(stands.wake_needs(), WakeNeeds::default());
        // Bytes moved before the next D-Lock do not count.
        assert_eq!(acquire().map(|change| change.held), Ok(1));
        for (now, moved, is) in [(37, 14, WakeNeeds::default()), (42, 15, runs)] {
            one.update(at(now), moved, false, || None);
            assert_eq!(stands.wake_needs(), is, "at {now} s");
        }
        assert_eq!(release().map(|change| change.held), Ok(0));
    }
}
