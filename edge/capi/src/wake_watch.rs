//! Wakes the machine and keeps it awake for an engine's sockets, while the process holds a D-Lock.

use std::rc::Rc;
use std::time::Duration;

use d2tp_links::{LinkKind, NetworkManager};
use d2tp_power::{LinuxMachine, Logind, LogindError, PowerEvent, WakeController};
use d2tp_sched::{ScanPeriods, WakePlanner};
use d2tp_time::Span;
use tokio::time::timeout;

use crate::clock::now;
use crate::dlock::is_held;
use crate::engine_state::EngineState;
use crate::wake_registry::ASK_EVERY;

/// The interval between scans, as in the paper: an engine has no forecast of links.
const LOOK_EVERY: Span = Span::from_secs(120);

/// How long the system's bus is waited for before the machine is only woken, and not kept awake, until it answers.
const BUS_ANSWERS: Duration = Duration::from_secs(5); // the same as in the agent

/// Plans wake-ups while the engine runs. Nothing is requested of the machine before the first D-Lock.
pub(crate) async fn run(engine: Rc<EngineState>) {
    let stands = engine.wake_registry.clone();
    while !is_held() || stands.is_empty() {
        stands.changed.notified().await;
    }
    let mut connecting = Box::pin(Logind::system());
    let logind = timeout(BUS_ANSWERS, &mut connecting).await;
    // Alarms need no bus.
    let mut is_bus_late = logind.is_err();
    let logind = logind.unwrap_or_else(|_| Err(LogindError::unanswered()));
    // There are no timers or no descriptors, so the machine is not woken.
    let Ok(machine) = LinuxMachine::with(logind) else {
        return;
    };
    let mut keeper = WakeController::new(machine);
    let mut lock = WakePlanner::new(ScanPeriods::fixed(LOOK_EVERY));
    let mut waited = false;
    loop {
        let standby = stands.wake_needs();
        if standby.waits && !waited {
            lock.on_scan(now());
            look_for_links(&engine).await;
        }
        waited = standby.waits;
        let plan = lock.plan(now(), &standby, |_| 0.0);
        let _ = timeout(BUS_ANSWERS, keeper.apply(now(), plan, &why())).await;
        let is_idle = !standby.waits && !standby.runs;
        tokio::select! {
            notice = keeper.next_event() => match notice {
                PowerEvent::Suspending => {}
                PowerEvent::AlarmFired(_) | PowerEvent::Resumed => {
                    stands.reconsider();
                    if waited {
                        lock.on_scan(now());
                        look_for_links(&engine).await;
                    }
                }
            },
            logind = &mut connecting, if is_bus_late => {
                is_bus_late = false;
                keeper.change_machine(|machine| machine.set_logind(logind));
            }
            () = stands.changed.notified() => {}
            () = tokio::time::sleep(ASK_EVERY), if !is_idle => {}
        }
    }
}

/// Why the machine is kept awake, for users.
fn why() -> String {
    let program = std::env::current_exe().ok();
    let name = program.as_deref().and_then(|path| path.file_name());
    let name = name.map_or("a program".into(), |name| name.to_string_lossy());
    format!("{name} has a transfer running")
}

/// Tries every link at once, and scans for access points.
async fn look_for_links(engine: &EngineState) {
    engine.try_links();
    let Some(links) = engine.links().await else {
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
        // The result is used only minutes later.
        let Ok(manager) = NetworkManager::start().await else {
            return;
        };
        for device in wireless {
            // NetworkManager refuses if it has just scanned by itself.
            let _ = manager.scan(&device).await;
        }
    };
    let _ = timeout(BUS_ANSWERS, scan).await;
}
