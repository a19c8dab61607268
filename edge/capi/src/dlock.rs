//! D-Lock, which a program holds while it has transfers that the machine may be woken for.
//!
//! ```text
//!  d2tp_dlock_acquire ─▶ HELD ─┬─ sockets that an agent carries: it is told, and keeps its own vigil
//!                              └─ this engine's ─▶ Stand of each ─▶ Lock ─▶ Keeper ─▶ alarms, inhibitor
//!                                                    decides anew ◀─ looks for links ◀─┘
//! ```
//!
//! It is a process's: a child of `fork` holds none, and it ends with the process.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use d2tp_links::{LinkKind, NetworkManager};
use d2tp_power::{LinuxMachine, PowerEvent, WakeController};
use d2tp_sched::{ScanPeriods, WakeNeeds, WakePlanner};
use d2tp_time::{Span, Time};
use libc::c_int;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::engine;
use crate::engine_state::EngineState;
use crate::errno::{CallResult, Errno};
use crate::options::since_boot;

/// How often it is looked how sockets stand while there is one that the machine may be woken for.
pub(crate) const ASK_EVERY: Duration = Duration::from_secs(5); // as of the agent

/// A socket that moved a byte within this keeps the machine awake.
const RUNS_WITHIN: Span = Span::from_secs(30); // as of the agent

/// A socket that has had no link for so long waits for one: a new session finds its first sooner.
const LACKS_FOR: Span = Span::from_secs(2); // a guess

/// Between looks: an engine knows nothing of how links come and go, so it is the paper's.
const LOOK_EVERY: Span = Span::from_secs(120);

/// The system's bus answers within this, or counts as not there.
const BUS_ANSWERS: Duration = Duration::from_secs(5); // as of the agent

/// The process, and below it how many it holds.
static HELD: AtomicU64 = AtomicU64::new(0);

const COUNT_BITS: u32 = 32;

fn count(held: u64) -> u32 {
    match held >> COUNT_BITS {
        of if of == u64::from(std::process::id()) => held as u32,
        // A parent's.
        _ => 0,
    }
}

/// Whether this process holds one.
pub(crate) fn is_held() -> bool {
    count(HELD.load(Ordering::Relaxed)) > 0
}

/// Takes one; says how many there are now.
pub(crate) fn acquire() -> CallResult<c_int> {
    change(|held| {
        held.checked_add(1)
            .filter(|held| c_int::try_from(*held).is_ok())
    })
    .map_err(|()| Errno(libc::ENOLCK))
}

/// Gives one back; says how many there are now.
pub(crate) fn release() -> CallResult<c_int> {
    change(|held| held.checked_sub(1)).map_err(|()| Errno(libc::EINVAL))
}

fn change(to: impl Fn(u32) -> Option<u32>) -> Result<c_int, ()> {
    let of = u64::from(std::process::id()) << COUNT_BITS;
    let changed = HELD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
        Some(of | u64::from(to(count(held))?))
    });
    let before = count(changed.map_err(drop)?);
    let now = to(before).ok_or(())?;
    if (before == 0) != (now == 0)
        && let Some(engine) = engine::running()
    {
        // As it is by then: who takes and gives back at once is told the same twice.
        engine.post(|home| {
            for handed in home.agent_connections.borrow().values() {
                handed.send_dlock();
            }
            home.wake_registry.reconsider();
            home.wake_registry.changed.notify_one();
        });
    }
    Ok(now as c_int)
}

/// How a socket of this engine stands towards the machine's sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SocketWakeState {
    /// The socket has a link and does not move, or nothing is asked for.
    #[default]
    Rests,
    /// For another link than those it may use, until it must begin on one that costs.
    Waits {
        start: Option<Time>,
    },
    Runs,
}

/// All sockets of an engine that the machine may be woken for.
#[derive(Default)]
pub(crate) struct WakeRegistry {
    all: RefCell<BTreeMap<u64, SocketWakeState>>,
    next: Cell<u64>,
    changed: Notify,
    reconsider_notify: Notify,
}

impl WakeRegistry {
    fn reconsider(&self) {
        self.reconsider_notify.notify_waiters();
    }

    /// Returns when it is to be decided anew: the machine was asleep, or a D-Lock is taken or given
    /// back.
    pub(crate) async fn reconsidered(&self) {
        self.reconsider_notify.notified().await;
    }

    fn wake_needs(&self) -> WakeNeeds {
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
    /// Bytes, and when it last moved one, since a D-Lock is held.
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

    /// Records that the socket has moved `moved` bytes in all, and whether it `lacks` a link that
    /// it may use; `start`: when it must begin on one that costs. Without `asked`, nothing is asked
    /// of the machine for it.
    pub(crate) fn update(
        &mut self,
        now: Time,
        moved: u64,
        lacks: bool,
        start: impl FnOnce() -> Option<Time>,
    ) {
        self.lacks_since = lacks.then(|| self.lacks_since.unwrap_or(now));
        if !is_held() {
            self.moved = None;
            return self.set(SocketWakeState::Rests);
        }
        let moved_at = match self.moved {
            // Nobody saw when it moved what it has moved.
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

/// Keeps watch for as long as the engine runs. A machine is asked for nothing before the first D-Lock.
pub(crate) async fn run(home: Rc<EngineState>) {
    let stands = home.wake_registry.clone();
    while !is_held() || stands.all.borrow().is_empty() {
        stands.changed.notified().await;
    }
    // No timers or no descriptors: nobody is woken.
    let Ok(Ok(machine)) = timeout(BUS_ANSWERS, LinuxMachine::open()).await else {
        return;
    };
    let mut keeper = WakeController::new(machine);
    let mut lock = WakePlanner::new(ScanPeriods::fixed(LOOK_EVERY));
    let mut waited = false;
    loop {
        let standby = stands.wake_needs();
        if standby.waits && !waited {
            lock.on_scan(now());
            look_for_links(&home).await;
        }
        waited = standby.waits;
        let vigil = lock.plan(now(), &standby, |_| 0.0);
        let _ = timeout(BUS_ANSWERS, keeper.apply(now(), vigil, &why())).await;
        let is_idle = !standby.waits && !standby.runs;
        tokio::select! {
            notice = keeper.next_event() => match notice {
                PowerEvent::Suspending => {}
                PowerEvent::AlarmFired(_) | PowerEvent::Resumed => {
                    stands.reconsider();
                    if waited {
                        lock.on_scan(now());
                        look_for_links(&home).await;
                    }
                }
            },
            () = stands.changed.notified() => {}
            () = tokio::time::sleep(ASK_EVERY), if !is_idle => {}
        }
    }
}

/// Why the machine is kept awake, for people.
fn why() -> String {
    let program = std::env::current_exe().ok();
    let name = program.as_deref().and_then(|path| path.file_name());
    let name = name.map_or("a program".into(), |name| name.to_string_lossy());
    format!("{name} has a transfer running")
}

/// Tries every link at once, and has access points looked for.
async fn look_for_links(home: &EngineState) {
    home.try_links();
    let Some(links) = home.links().await else {
        return;
    };
    let wireless: Vec<String> = {
        let links = links.borrow();
        let wireless = links.iter().filter(|link| link.kind == LinkKind::Wifi);
        wireless.map(|link| link.name.clone()).collect()
    };
    if wireless.is_empty() {
        return;
    }
    let scan = async {
        // For minutes to come nobody asks again.
        let Ok(manager) = NetworkManager::start().await else {
            return;
        };
        for device in wireless {
            // It refuses when it has just looked by itself.
            let _ = manager.scan(&device).await;
        }
    };
    let _ = timeout(BUS_ANSWERS, scan).await;
}

fn now() -> Time {
    Time::from_nanos(u64::try_from(since_boot().as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Span::from_secs(seconds)
    }

    // One test: the count is the process's.
    #[test]
    fn sockets_count_while_a_d_lock_is_held_and_as_they_stand() {
        let stands: Rc<WakeRegistry> = Rc::default();
        let (mut one, mut other) = (WakeEntry::new(&stands), WakeEntry::new(&stands));
        let never = || unreachable!("nobody asks when a flow without a D-Lock must begin");
        one.update(at(0), 10, true, never);
        other.update(at(0), 10, true, never);
        assert_eq!(stands.wake_needs(), WakeNeeds::default());
        assert_eq!(release(), Err(Errno(libc::EINVAL)));
        assert_eq!(acquire(), Ok(1));
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
        // It has a link: it runs from when it moves until it has not for a while.
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
        assert_eq!(release(), Ok(0));
        one.update(at(36), 13, false, || None);
        assert_eq!(stands.wake_needs(), WakeNeeds::default());
        // What it moved before the next one does not count.
        assert_eq!(acquire(), Ok(1));
        for (now, moved, is) in [(37, 14, WakeNeeds::default()), (42, 15, runs)] {
            one.update(at(now), moved, false, || None);
            assert_eq!(stands.wake_needs(), is, "at {now} s");
        }
        assert_eq!(release(), Ok(0));
    }
}
