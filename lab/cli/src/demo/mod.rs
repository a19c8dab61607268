//! The demonstration: one scenario, run twice at the same time, in two separate worlds.
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
mod run;
mod summary;
mod view;

use cedos_terminal::print_stderr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use cedos_lab_emu::{Forbidden, World, WorldEvent, WorldObservations, enter};
use cedos_lab_link::Time;
use cedos_lab_scenario::{Scenario, ScenarioFault};
use serde_json::Value;

use crate::verbs::lab;
use plain::PlainDownload;
use run::{DemoProgress, DemoSetting, DemoSetup, lock, no_run, summarise, watch};
pub use summary::DemoSummary;
use summary::NAMESPACES;
use view::DemoView;

/// The scenario: its links and events, and the download.
const SCENARIO: &str = include_str!("../../../scenarios/demo.toml");

/// Runs the demonstration: in namespaces, unless requested otherwise or forbidden.
///
/// # Errors
/// The demonstration could not be set up.
pub fn run(without_namespaces: bool, file: Option<&Path>) -> anyhow::Result<DemoSummary> {
    let scenario = match file {
        Some(file) => Scenario::load(file)?,
        None => scenario()?,
    };
    if without_namespaces {
        lab::heed_interrupts()?;
        return loopback::run(DemoSetup::new(scenario)?);
    }
    match enter() {
        Ok(()) => {}
        Err(error @ Forbidden::Threads { .. }) => return Err(error.into()),
        Err(refused) => {
            print_stderr(&format!(
                "No network namespaces here, so the links are emulated between loopback sockets of \
                 this program: the same models and events, without interfaces and routes.\n\
                 ({refused})"
            ));
            lab::heed_interrupts()?;
            return loopback::run(DemoSetup::new(scenario)?);
        }
    }
    lab::heed_interrupts()?;
    run_in_namespaces(DemoSetup::new(scenario)?)
}

/// A world made of namespaces, with a download in it.
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
    fn seen(&self) -> Option<WorldObservations> {
        Some(self.world.seen())
    }
    fn ended(&mut self) -> anyhow::Result<Option<bool>> {
        Ok(self.child.try_wait()?.map(|status| status.success()))
    }
}

fn run_in_namespaces(matter: DemoSetup) -> anyhow::Result<DemoSummary> {
    let scenario = &matter.scenario;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let mut ours = World::build(scenario.clone())?;
    let mut theirs = World::build(scenario.clone())?;
    ours.start_origin()?;
    theirs.start_origin()?;
    let prox = lab::start_prox(&ours, &program, matter.folder.path(), None)?;

    let view = Arc::new(DemoView::new(matter.bytes, matter.deadline_s));
    let happenings: Arc<Mutex<Vec<WorldEvent>>> = Arc::default();
    let (seen, shown) = (happenings.clone(), view.clone());
    theirs.start(|_| {})?;
    ours.start(move |happening| {
        shown.happened(happening);
        lock(&seen).push(happening.clone());
    })?;

    let folder = matter.folder.path();
    let mut child = download(&ours, &program, &prox, scenario, &matter.file, folder)?;
    let told = follow(&mut child)?;
    let plain = PlainDownload::start_in(&theirs, matter.bytes)?;
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
    summary.map(|summary| DemoSummary {
        mode: NAMESPACES,
        ..summary
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

/// Reads the events that a download prints, on a separate thread.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::run::GRACE_S;

    #[test]
    fn the_scenario_has_all_that_the_demonstration_promises() {
        let scenario = scenario().unwrap();
        assert_eq!(scenario.flows[0].bytes, Some(100_000_000));
        assert!(scenario.flows[0].deadline_s.unwrap() + GRACE_S <= scenario.duration_s);
        let names: Vec<&str> = scenario.links.iter().map(|l| l.name.as_str()).collect();
        assert_eq!(names, ["wlan0", "wwan0"]);
    }
}
