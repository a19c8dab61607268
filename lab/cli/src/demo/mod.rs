//! The demonstration: one scenario, twice at the same time, in two worlds of their own.
//!
//! ```text
//!  world 1: origin ── proxy ══ wlan0, wwan0 ══ `cedos get --prox`      D2TP
//!  world 2: origin ─────────── wlan0, wwan0 ── a plain GET             TCP
//!               same links, same losses, same times      └─▶ view ─▶ summary
//! ```
//!
//! The worlds are network namespaces; where the system forbids those, sockets on the loopback
//! interface with the same link models between them (`loopback.rs`). What happens to the links is
//! in `lab/scenarios/demo.toml`, which `cedos lab run` runs too.

mod loopback;
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
use cedos_lab_emu::{Forbidden, Happening, Seen, World, content, enter};
use cedos_lab_link::Time;
use cedos_lab_scenario::{EventKind, Scenario, ScenarioFault};
use serde_json::Value;

use crate::verbs::lab;
use plain::Plain;
pub use summary::Summary;
use summary::{Baseline, DemoSpread};
use view::View;

/// What happens to the links, and what is downloaded.
const SCENARIO: &str = include_str!("../../../scenarios/demo.toml");
/// How often the view is brought up to date.
const LOOK: Duration = Duration::from_millis(50);
/// How long after the deadline the plain download may go on.
const GRACE_S: f64 = 10.0;

/// The worlds are namespaces.
const NAMESPACES: &str = "namespaces";
/// The worlds are sockets on the loopback interface.
const LOOPBACK: &str = "loopback";

/// What the download told so far.
#[derive(Default)]
struct DemoProgress {
    last: Value,
    bytes: u64,
    /// Something worth a line, not shown yet.
    news: Vec<String>,
}

impl DemoProgress {
    /// Takes in what `cedos get --json` tells.
    fn hear(&mut self, event: Value) {
        if let Some(bytes) = event["bytes"].as_u64() {
            self.bytes = bytes;
        }
        self.news.extend(view::news(&event));
        if event["bytes_by_link"].is_object() {
            self.last = event;
        }
    }
}

/// What a demonstration is about.
struct Matter {
    scenario: Scenario,
    bytes: u64,
    deadline_s: f64,
    wanted: [u8; 32],
    folder: tempfile::TempDir,
    file: PathBuf,
}

impl Matter {
    fn new(scenario: Scenario) -> anyhow::Result<Matter> {
        let flow = scenario.flows.first().context("the scenario has no flow")?;
        let (bytes, deadline_s) = (
            flow.bytes.context("the flow has no size")?,
            flow.deadline_s.context("the flow has no deadline")?,
        );
        let folder = tempfile::tempdir().context("no temporary folder")?;
        Ok(Matter {
            bytes,
            deadline_s,
            // Making the object's digest takes as long as a handover: before time begins.
            wanted: content::sha256(scenario.seed, bytes),
            file: folder.path().join("object"),
            folder,
            scenario,
        })
    }
}

/// Where our download runs.
trait DemoSetting {
    fn now(&self) -> Time;
    fn idle(&self);
    fn fault(&self) -> Option<String>;
    fn seen(&self) -> Option<Seen>;
    /// Whether the download is over, and whether it succeeded.
    fn ended(&mut self) -> anyhow::Result<Option<bool>>;
}

/// Runs the demonstration: in namespaces unless told otherwise, or forbidden.
///
/// # Errors
/// What kept it from being one.
pub fn run(without_namespaces: bool, file: Option<&Path>) -> anyhow::Result<Summary> {
    let scenario = match file {
        Some(file) => Scenario::load(file)?,
        None => scenario()?,
    };
    if without_namespaces {
        lab::heed_interrupts()?;
        return loopback::run(Matter::new(scenario)?);
    }
    match enter() {
        Ok(()) => {}
        Err(error @ Forbidden::Threads { .. }) => return Err(error.into()),
        Err(refused) => {
            eprintln!(
                "No network namespaces here, so the links are emulated between loopback sockets of \
                 this program: the same models and events, without interfaces and routes.\n\
                 ({refused})"
            );
            lab::heed_interrupts()?;
            return loopback::run(Matter::new(scenario)?);
        }
    }
    lab::heed_interrupts()?;
    run_in_namespaces(Matter::new(scenario)?)
}

/// A world of namespaces with a download in it.
struct Namespaces {
    world: World,
    child: Child,
}

impl DemoSetting for Namespaces {
    fn now(&self) -> Time {
        self.world.now()
    }
    fn idle(&self) {
        self.world.idle();
    }
    fn fault(&self) -> Option<String> {
        self.world.fault()
    }
    fn seen(&self) -> Option<Seen> {
        Some(self.world.seen())
    }
    fn ended(&mut self) -> anyhow::Result<Option<bool>> {
        Ok(self.child.try_wait()?.map(|status| status.success()))
    }
}

fn run_in_namespaces(matter: Matter) -> anyhow::Result<Summary> {
    let scenario = &matter.scenario;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let mut ours = World::build(scenario.clone())?;
    let mut theirs = World::build(scenario.clone())?;
    ours.start_origin()?;
    theirs.start_origin()?;
    let prox = lab::start_prox(&ours, &program, matter.folder.path())?;

    let view = Arc::new(View::new(matter.bytes, matter.deadline_s));
    let happenings: Arc<Mutex<Vec<Happening>>> = Arc::default();
    let (seen, shown) = (happenings.clone(), view.clone());
    theirs.start(|_| {})?;
    ours.start(move |happening| {
        shown.happened(happening);
        lock(&seen).push(happening.clone());
    })?;

    let folder = matter.folder.path();
    let mut child = download(&ours, &program, &prox, scenario, &matter.file, folder)?;
    let told = follow(&mut child)?;
    let plain = Plain::start_in(&theirs, matter.bytes)?;
    let mut stage = Namespaces { world: ours, child };
    let run = watch(&matter, &mut stage, &view, &told, &plain)?;
    if let Some(fault) = theirs.fault() {
        return Err(no_run(&fault));
    }
    if run.finished.is_none() {
        lab::end(&mut stage.child);
    }
    let summary = summarise(&matter, &stage, run, &told, &plain, &lock(&happenings));
    lab::stop_prox(prox);
    summary.map(|summary| Summary {
        mode: NAMESPACES,
        ..summary
    })
}

/// When the two downloads ended, if they did.
struct DemoRun {
    finished: Option<(f64, bool)>,
    plain_finished: Option<f64>,
}

/// Looks on until both downloads are over or nobody waits for them any longer.
fn watch(
    matter: &Matter,
    ours: &mut impl DemoSetting,
    view: &View,
    told: &Mutex<DemoProgress>,
    plain: &Plain,
) -> anyhow::Result<DemoRun> {
    let end_at = Time::from_secs_f64(matter.deadline_s + GRACE_S);
    let mut run = DemoRun {
        finished: None,
        plain_finished: None,
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
    plain.stop();
    view.end();
    match ours.fault() {
        Some(fault) => Err(no_run(&fault)),
        None => Ok(run),
    }
}

fn no_run(fault: &str) -> anyhow::Error {
    anyhow!("the emulated links could not keep up, so the run shows nothing: {fault}")
}

fn summarise(
    matter: &Matter,
    ours: &impl DemoSetting,
    run: DemoRun,
    told: &Mutex<DemoProgress>,
    plain: &Plain,
    happened: &[Happening],
) -> anyhow::Result<Summary> {
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
    let again = last["duplicate_bytes"].as_u64().unwrap_or(u64::MAX);
    let sha256_ok = lab::file_sha256(&matter.file) == Some(matter.wanted);
    let finished_s = run.finished.filter(|(_, ok)| *ok).map(|(at, _)| at);
    let deadline_s = matter.deadline_s;
    Ok(Summary {
        mode: LOOPBACK,
        sha256_ok,
        bytes: std::fs::metadata(&matter.file).map_or(0, |file| file.len()),
        wifi_bytes,
        cell_bytes,
        // Two counts of the same thing; the larger one cannot flatter.
        wasted_bytes: carried.saturating_sub(matter.bytes).max(again),
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
    prox: &lab::LabProx,
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
fn follow(child: &mut Child) -> anyhow::Result<Arc<Mutex<DemoProgress>>> {
    let out = child.stdout.take().context("the download's output")?;
    let told: Arc<Mutex<DemoProgress>> = Arc::default();
    let tell = told.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let Ok(event) = serde_json::from_str::<Value>(&line) else {
                continue;
            };
            lock(&tell).hear(event);
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
