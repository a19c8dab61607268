//! One run of the demonstration: its setup, its progress and its result.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow};
use cedos_lab_emu::{WorldEvent, WorldObservations, content};
use cedos_lab_link::Time;
use cedos_lab_scenario::{EventKind, Scenario};
use serde_json::Value;

use super::plain::PlainDownload;
use super::summary::{Baseline, DemoSpread, DemoSummary, LOOPBACK};
use super::view::{self, DemoView};
use crate::verbs::lab;

/// The interval at which the view is updated.
const LOOK: Duration = Duration::from_millis(50);

/// How long after the deadline the plain download may go on.
pub(super) const GRACE_S: f64 = 10.0;

/// The progress that the download has reported.
#[derive(Default)]
pub(super) struct DemoProgress {
    pub(super) last: Value,
    pub(super) bytes: u64,
    /// Events to be shown as a line, which were not shown yet.
    pub(super) news: Vec<String>,
}

impl DemoProgress {
    /// Handles an event that `cedos get --json` prints.
    pub(super) fn hear(&mut self, event: Value) {
        if let Some(bytes) = event["bytes"].as_u64() {
            self.bytes = bytes;
        }
        self.news.extend(view::news(&event));
        if event["bytes_by_link"].is_object() {
            self.last = event;
        }
    }
}

/// The setup of a demonstration.
pub(super) struct DemoSetup {
    pub(super) scenario: Scenario,
    pub(super) bytes: u64,
    pub(super) deadline_s: f64,
    pub(super) wanted: [u8; 32],
    pub(super) folder: tempfile::TempDir,
    pub(super) file: PathBuf,
}

impl DemoSetup {
    pub(super) fn new(scenario: Scenario) -> anyhow::Result<DemoSetup> {
        let flow = scenario.flows.first().context("the scenario has no flow")?;
        let (bytes, deadline_s) = (
            flow.bytes.context("the flow has no size")?,
            flow.deadline_s.context("the flow has no deadline")?,
        );
        let folder = tempfile::tempdir().context("no temporary folder")?;
        Ok(DemoSetup {
            bytes,
            deadline_s,
            // Computing the object's digest takes as long as a handover, so it is done before time
            // begins.
            wanted: content::sha256(scenario.seed, bytes),
            file: folder.path().join("object"),
            folder,
            scenario,
        })
    }
}

/// The environment in which the D2TP download runs.
pub(super) trait DemoSetting {
    fn now(&self) -> Time;
    fn idle(&self);
    fn fault(&self) -> Option<String>;
    fn seen(&self) -> Option<WorldObservations>;
    /// Whether the download is over, and whether it succeeded.
    fn ended(&mut self) -> anyhow::Result<Option<bool>>;
}

/// The ends of the two downloads: when, in seconds, and whether ours succeeded. `None` while they
/// run.
pub(super) struct DemoRun {
    pub(super) finished: Option<(f64, bool)>,
    pub(super) plain_finished: Option<f64>,
    /// Whether the user ended the demonstration before both downloads had ended.
    pub(super) interrupted: bool,
}

/// Shows the run until both downloads are over, or the user ends it.
pub(super) fn watch(
    matter: &DemoSetup,
    ours: &mut impl DemoSetting,
    view: &DemoView,
    told: &Mutex<DemoProgress>,
    plain: &PlainDownload,
) -> anyhow::Result<DemoRun> {
    let end_at = Time::from_secs_f64(matter.deadline_s + GRACE_S);
    let mut run = DemoRun {
        finished: None,
        plain_finished: None,
        interrupted: false,
    };
    while ours.now() < end_at && !lab::is_interrupted() {
        let now_s = ours.now().as_secs_f64();
        if run.finished.is_none()
            && let Some(succeeded) = ours.ended()?
        {
            ours.idle();
            run.finished = Some((now_s, succeeded));
        }
        if run.plain_finished.is_none() && plain.is_whole() {
            run.plain_finished = Some(now_s);
        }
        {
            let mut told = lock(told);
            for news in told.news.drain(..) {
                view.say(now_s, &news);
            }
            view.update(now_s, told.bytes, &told.last, plain.held());
        }
        if run.finished.is_some() && run.plain_finished.is_some() {
            break;
        }
        std::thread::sleep(LOOK);
    }
    run.interrupted = lab::is_interrupted();
    plain.stop();
    view.end();
    match ours.fault() {
        Some(fault) => Err(no_run(&fault)),
        None => Ok(run),
    }
}

pub(super) fn no_run(fault: &str) -> anyhow::Error {
    anyhow!("the emulated links could not keep up, so the run shows nothing: {fault}")
}

pub(super) fn summarise(
    matter: &DemoSetup,
    ours: &impl DemoSetting,
    run: DemoRun,
    told: &Mutex<DemoProgress>,
    plain: &PlainDownload,
    happened: &[WorldEvent],
) -> anyhow::Result<DemoSummary> {
    let seen = ours.seen().context("the emulated links are gone")?;
    let last = lock(told).last.clone();
    let links = &matter.scenario.links;
    let of_class = |free: bool| -> u64 {
        links
            .iter()
            .filter(|link| (link.class == cedos_lab_scenario::Class::Free) == free)
            .map(|link| last["bytes_by_link"][&link.name].as_u64().unwrap_or(0))
            .sum()
    };
    let (wifi_bytes, cell_bytes) = (of_class(true), of_class(false));
    let carried = wifi_bytes + cell_bytes;
    let held = lock(told).bytes.min(matter.bytes);
    let sha256_ok = lab::file_sha256(&matter.file) == Some(matter.wanted);
    let finished_s = run.finished.filter(|(_, ok)| *ok).map(|(at, _)| at);
    let deadline_s = matter.deadline_s;
    Ok(DemoSummary {
        mode: LOOPBACK,
        sha256_ok,
        bytes: std::fs::metadata(&matter.file).map_or(0, |file| file.len()),
        wifi_bytes,
        cell_bytes,
        interrupted: run.interrupted,
        wasted_bytes: wasted_bytes(carried, held, last["duplicate_bytes"].as_u64()),
        handovers: seen.switches.len(),
        address_changes: address_changes(happened),
        outage_s: outage_s(happened, &matter.scenario, finished_s.unwrap_or(deadline_s)),
        deadline_s,
        finished_s,
        deadline_met: sha256_ok && finished_s.is_some_and(|at| at <= deadline_s),
        switch_ms: DemoSpread::of(seen.switches.iter().map(|switch| switch.silence_ms)),
        packets_while_down: seen.links.iter().map(|link| link.packets_while_down).sum(),
        tcp_baseline: Baseline {
            completed: run.plain_finished.is_some_and(|at| at <= deadline_s),
            finished_s: run.plain_finished,
            bytes_refetched: plain.refetched(),
            starts: plain.starts(),
        },
    })
}

/// Payload bytes beyond one copy of the file: by the links' counters, and by the download's own
/// count, which it reports only at its end. The larger value is used.
fn wasted_bytes(carried: u64, held: u64, counted: Option<u64>) -> u64 {
    carried.saturating_sub(held).max(counted.unwrap_or(0))
}

/// How often a link came up with an address that no link had before.
fn address_changes(happenings: &[WorldEvent]) -> usize {
    let given = happenings.iter().filter(|happening| {
        matches!(
            happening.event.kind,
            EventKind::Up { address } | EventKind::NewAddress { address } if address > 0
        )
    });
    given.count()
}

/// Seconds until `end_s` without any address.
fn outage_s(happenings: &[WorldEvent], scenario: &Scenario, end_s: f64) -> f64 {
    let mut up = vec![false; scenario.links.len()];
    let (mut dark_since, mut dark) = (None, 0.0);
    let mut begun = false;
    for happening in happenings {
        let at = happening.at.as_secs_f64().min(end_s);
        match happening.event.kind {
            EventKind::Up { .. } => up[happening.event.link] = true,
            EventKind::Down => up[happening.event.link] = false,
            _ => continue,
        }
        let any = up.contains(&true);
        begun |= any;
        match (any, dark_since) {
            (false, None) if begun => dark_since = Some(at),
            (true, Some(since)) => {
                dark += at - since;
                dark_since = None;
            }
            _ => {}
        }
    }
    dark + dark_since.map_or(0.0, |since| end_s - since)
}

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_download_that_was_interrupted_wasted_no_more_than_was_carried() {
        assert_eq!(wasted_bytes(40_000_000, 39_900_000, None), 100_000);
        assert_eq!(wasted_bytes(0, 0, None), 0);
        assert_eq!(wasted_bytes(1_000, 2_000, Some(30)), 30);
    }
}
