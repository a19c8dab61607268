//! The demonstration: one scenario, twice at the same time, in two worlds of their own.
//!
//! ```text
//!  world 1: origin ── proxy ══ wlan0, wwan0 ══ `cedos get --prox`      D2TP
//!  world 2: origin ─────────── wlan0, wwan0 ── a plain GET             TCP
//!               same links, same losses, same times      └─▶ view ─▶ summary
//! ```
//!
//! What happens to the links is in `lab/scenarios/demo.toml`, which `cedos lab run` runs too.

mod plain;
mod summary;
mod view;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow};
use cedos_lab_emu::{Happening, World, content, enter};
use cedos_lab_link::Time;
use cedos_lab_scenario::{EventKind, Scenario, ScenarioFault};
use serde_json::Value;

use crate::verbs::lab;
use plain::Plain;
pub use summary::Summary;
use summary::{Baseline, Spread};
use view::View;

/// What happens to the links, and what is downloaded.
const SCENARIO: &str = include_str!("../../../../lab/scenarios/demo.toml");
/// How often the view is brought up to date.
const LOOK: Duration = Duration::from_millis(50);
/// How long after the deadline the plain download may go on.
const GRACE_S: f64 = 10.0;

/// What the download told so far.
#[derive(Default)]
struct Told {
    last: Value,
    bytes: u64,
    /// Something worth a line, not shown yet.
    news: Vec<String>,
}

/// Runs the demonstration.
///
/// # Errors
/// What kept it from being one.
pub fn run() -> anyhow::Result<Summary> {
    enter().context(
        "the demonstration needs network namespaces of its own, which this system refuses",
    )?;
    lab::heed_interrupts()?;
    let scenario = scenario()?;
    let flow = scenario.flows.first().context("the scenario has no flow")?;
    let (bytes, deadline_s) = (
        flow.bytes.context("the flow has no size")?,
        flow.deadline_s.context("the flow has no deadline")?,
    );
    let seed = scenario.seed;
    let program = std::env::current_exe().context("this program's own file is not known")?;
    let folder = tempfile::tempdir().context("no temporary folder")?;
    let mut ours = World::build(scenario.clone())?;
    let mut theirs = World::build(scenario.clone())?;
    ours.start_origin()?;
    theirs.start_origin()?;
    let prox = lab::start_prox(&ours, &program, folder.path())?;
    // Making the object's digest takes as long as a handover: before time begins.
    let wanted = content::sha256(seed, bytes);

    let view = Arc::new(View::new(bytes, deadline_s));
    let happenings: Arc<Mutex<Vec<Happening>>> = Arc::default();
    let (seen, shown) = (happenings.clone(), view.clone());
    theirs.start(|_| {})?;
    ours.start(move |happening| {
        shown.happened(happening);
        lock(&seen).push(happening.clone());
    })?;

    let file = folder.path().join("object");
    let mut child = download(&ours, &program, &prox, &scenario, &file, folder.path())?;
    let told = follow(&mut child)?;
    let plain = Plain::start(&theirs, bytes)?;

    let end_at = Time::from_secs_f64(deadline_s + GRACE_S);
    let mut finished: Option<(f64, bool)> = None;
    let mut plain_finished: Option<f64> = None;
    while ours.now() < end_at && !lab::is_interrupted() {
        if finished.is_none()
            && let Some(status) = child.try_wait()?
        {
            ours.idle();
            finished = Some((ours.now().as_secs_f64(), status.success()));
        }
        if plain_finished.is_none() && plain.is_whole() {
            plain_finished = Some(theirs.now().as_secs_f64());
        }
        {
            let mut told = lock(&told);
            for news in told.news.drain(..) {
                view.say(ours.now().as_secs_f64(), &news);
            }
            view.update(
                ours.now().as_secs_f64(),
                told.bytes,
                &told.last,
                plain.held(),
            );
        }
        if finished.is_some() && plain_finished.is_some() {
            break;
        }
        std::thread::sleep(LOOK);
    }
    plain.stop();
    view.end();
    for world in [&ours, &theirs] {
        if let Some(fault) = world.fault() {
            return Err(anyhow!(
                "the emulated links could not keep up, so the run shows nothing: {fault}"
            ));
        }
    }
    if finished.is_none() {
        lab::end(&mut child);
    }
    let seen = ours.seen();
    lab::stop_prox(prox);
    let last = lock(&told).last.clone();
    let of_link = |name: &str| last["bytes_by_link"][name].as_u64().unwrap_or(0);
    let carried = of_link("wlan0") + of_link("wwan0");
    let again = last["duplicate_bytes"].as_u64().unwrap_or(u64::MAX);
    let sha256_ok = lab::file_sha256(&file) == Some(wanted);
    let finished_s = finished.filter(|(_, ok)| *ok).map(|(at, _)| at);
    let happened = lock(&happenings);
    Ok(Summary {
        sha256_ok,
        bytes: std::fs::metadata(&file).map_or(0, |file| file.len()),
        wifi_bytes: of_link("wlan0"),
        cell_bytes: of_link("wwan0"),
        // Two counts of the same thing; the larger one cannot flatter.
        wasted_bytes: carried.saturating_sub(bytes).max(again),
        handovers: seen.switches.len(),
        address_changes: address_changes(&happened),
        outage_s: outage_s(&happened, &scenario, finished_s.unwrap_or(deadline_s)),
        deadline_s,
        finished_s,
        deadline_met: sha256_ok && finished_s.is_some_and(|at| at <= deadline_s),
        switch_ms: Spread::of(seen.switches.iter().map(|switch| switch.silence_ms)),
        packets_while_down: seen.links.iter().map(|link| link.packets_while_down).sum(),
        tcp_baseline: Baseline {
            completed: plain_finished.is_some_and(|at| at <= deadline_s),
            finished_s: plain_finished,
            bytes_refetched: plain.refetched(),
            starts: plain.starts(),
        },
    })
}

fn scenario() -> anyhow::Result<Scenario> {
    let mut no_traces = |name: &str| {
        Err(ScenarioFault {
            file: name.into(),
            fault: "the demonstration has no traces".into(),
        })
    };
    Ok(Scenario::parse("demo.toml", SCENARIO, &mut no_traces)?)
}

fn download(
    world: &World,
    program: &Path,
    prox: &lab::Prox,
    scenario: &Scenario,
    file: &Path,
    folder: &Path,
) -> anyhow::Result<Child> {
    let flow = &scenario.flows[0];
    let url = format!("{}/bytes/{}", lab::origin_url(), flow.bytes.unwrap_or(0));
    let mut command = Command::new(program);
    command.args(["get", &url, "--json", "--policy", flow.policy.word(), "-o"]);
    command.arg(file);
    lab::through(&mut command, prox, world);
    lab::classes(&mut command, scenario);
    let within = flow.deadline_s.unwrap_or(0.0) - world.now().as_secs_f64();
    command.args(["--within", &format!("{}s", within.floor().max(1.0))]);
    let log: PathBuf = folder.join("get.log");
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::from(File::create(log)?));
    world.device().spawn(command)
}

/// Reads what a download tells, on a thread of its own.
fn follow(child: &mut Child) -> anyhow::Result<Arc<Mutex<Told>>> {
    let out = child.stdout.take().context("the download's output")?;
    let told: Arc<Mutex<Told>> = Arc::default();
    let tell = told.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let Ok(event) = serde_json::from_str::<Value>(&line) else {
                continue;
            };
            let mut told = lock(&tell);
            if let Some(bytes) = event["bytes"].as_u64() {
                told.bytes = bytes;
            }
            told.news.extend(view::news(&event));
            if event["bytes_by_link"].is_object() {
                told.last = event;
            }
        }
    });
    Ok(told)
}

/// Times a link came up with another address than it, or any other, had before.
fn address_changes(happenings: &[Happening]) -> usize {
    let given = happenings.iter().filter(|happening| {
        matches!(
            happening.event.kind,
            EventKind::Up { address } | EventKind::NewAddress { address } if address > 0
        )
    });
    given.count()
}

/// Seconds until `end_s` without any address.
fn outage_s(happenings: &[Happening], scenario: &Scenario, end_s: f64) -> f64 {
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

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scenario_has_all_that_the_demonstration_promises() {
        let scenario = scenario().unwrap();
        assert_eq!(scenario.flows[0].bytes, Some(100_000_000));
        assert!(scenario.flows[0].deadline_s.unwrap() + GRACE_S <= scenario.duration_s);
        let names: Vec<&str> = scenario.links.iter().map(|l| l.name.as_str()).collect();
        assert_eq!(names, ["wlan0", "wwan0"]);
    }
}
