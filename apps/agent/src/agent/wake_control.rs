//! D-Lock on this machine: alarms wake it while a transfer waits, and an inhibitor keeps it awake
//! while one moves.
//!
//! ```text
//!  transfers, by their standing ─▶ WakePlanner ─▶ WakeController ─▶ alarms, inhibitor
//!                    scans for links ◀─ look ─┤
//!                            begins ◀─ start ┘
//! ```

use std::sync::Arc;
use std::time::Duration;

use d2tp_links::LinkKind;
use d2tp_power::{LinuxMachine, PowerEvent, WakeController, WakeReason};
use d2tp_sched::{ScanPeriods, WakeNeeds, WakePlanner};
use d2tp_time::Span;

use super::state::{Agent, lock};
use super::wake_status::time;

/// The interval between updates while there are transfers: latest starts change with the links.
const ASK_EVERY: Duration = Duration::from_secs(5); // a guess

/// The intervals of scans: fixed, or adapted to the forecast.
pub(super) fn scan_periods(fixed: Option<Duration>) -> ScanPeriods {
    fixed.map_or(ScanPeriods::DEFAULT, |span| ScanPeriods::fixed(span.into()))
}

/// Plans wake-ups while the agent runs.
pub(super) async fn run(agent: Arc<Agent>, machine: LinuxMachine, periods: ScanPeriods) {
    lock(&agent.wake_status).lacks = machine.limitations();
    let mut keeper = WakeController::new(machine);
    let mut dlock = WakePlanner::new(periods);
    let mut stirred = agent.scheduler.changes();
    let mut links = agent.link_view.links();
    let mut dark_since = None;
    let mut waited = false;
    loop {
        stirred.borrow_and_update();
        let is_dark = {
            let links = links.borrow_and_update();
            !links
                .iter()
                .any(|link| link.kind != LinkKind::Loopback && link.is_usable())
        };
        dark_since = is_dark.then(|| dark_since.unwrap_or_else(time));
        let waits = agent.scheduler.waking_clients();
        let standby = WakeNeeds {
            waits: !waits.waiting.is_empty(),
            runs: !waits.running.is_empty(),
            latest_start: agent
                .scheduler
                .latest_start()
                .map(|span| time() + Span::from(span)),
            dark_since,
        };
        if standby.waits && !waited {
            // It is awake now: that look costs no alarm.
            dlock.on_scan(time());
            agent.look_for_links().await;
        }
        waited = standby.waits;
        let comes = |span| agent.scheduler.free_link_chance(span);
        let mut vigil = dlock.plan(time(), &standby, comes);
        // A run that begins while the machine sleeps would miss its deadline.
        let recurs = agent.next_recurring_run();
        let recurs = recurs.map(|left| time() + Span::from(left));
        vigil.start_at = vigil.start_at.into_iter().chain(recurs).min();
        keeper
            .apply(time(), vigil, &agent.who_runs(&waits.running))
            .await;
        lock(&agent.wake_status).vigil = vigil;
        let is_idle = !standby.waits && !standby.runs && recurs.is_none();
        let ask_again = async {
            match is_idle {
                true => std::future::pending().await,
                false => tokio::time::sleep(ASK_EVERY).await,
            }
        };
        tokio::select! {
            notice = keeper.next_event() => match notice {
                PowerEvent::AlarmFired(WakeReason::ScanLinks) => {
                    lock(&agent.meter).woke("look");
                    dlock.on_scan(time());
                    agent.look_for_links().await;
                }
                // The transfer itself finds that its time has come.
                PowerEvent::AlarmFired(WakeReason::StartFlow) => lock(&agent.meter).woke("start"),
                PowerEvent::Suspending => {}
                PowerEvent::Resumed => {
                    dlock.on_scan(time());
                    agent.look_for_links().await;
                }
            },
            changed = stirred.changed() => if changed.is_err() { return },
            changed = links.changed() => if changed.is_err() { return },
            () = ask_again => {}
        }
    }
}

impl Agent {
    /// Reads the kernel's links again, and scans for access points.
    async fn look_for_links(&self) {
        self.link_view.refresh();
        let Some(manager) = self.link_view.manager() else {
            return;
        };
        let wireless: Vec<String> = {
            let links = self.link_view.links();
            let links = links.borrow();
            let wireless = links.iter().filter(|link| link.kind == LinkKind::Wifi);
            wireless.map(|link| link.name.clone()).collect()
        };
        for device in wireless {
            // It refuses when it has just looked by itself.
            if let Err(error) = manager.scan(&device).await {
                tracing::debug!(device, %error, "no scan");
            }
        }
    }

    /// Why the machine is kept awake, for users.
    fn who_runs(&self, ids: &[u64]) -> String {
        let tasks = lock(&self.tasks);
        let names = ids.iter().filter_map(|id| {
            let task = tasks.get(id)?;
            let name = task
                .request
                .file
                .file_name()?
                .to_string_lossy()
                .into_owned();
            match task.event["link"].as_str().filter(|link| !link.is_empty()) {
                Some(link) => Some(format!("{name} is on {link}")),
                None => Some(format!("{name} is running")),
            }
        });
        let names: Vec<String> = names.take(3).collect();
        match names.is_empty() {
            true => "a transfer is running".to_owned(),
            false => names.join(", "),
        }
    }
}
