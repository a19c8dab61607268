//! The scenario's flows in the lab: each is a process of a client (client.rs), through the crashes
//! of the scenario, or a `cedos lab fetch`, for which the kernel carries it.
//!
//! A crash of the device is SIGKILL for all of them; after `for_s` the same commands run again and
//! continue if they can. A crash of the proxy is SIGKILL for it, and the same command later.

use anyhow::{Context, bail};
use cedos_lab_emu::{World, content, web};
use cedos_lab_link::Time;
use cedos_lab_scenario::{CrashKind, CrashedEnd, Direction, FlowReport, ScenarioFlow, StoreStop};
use cedos_terminal::print_stderr;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::arrival_meter::ArrivalMeter;
use super::client::{self, DeviceClient};
use super::over::KernelTransport;
use super::prox::{LabProx, tcp_port};
use super::{LOOK, end, file_sha256, is_interrupted, origin_named};

/// A flow's process, and what is known of earlier ones.
struct LabTransfer<'a> {
    flow: &'a ScenarioFlow,
    url: String,
    /// The file of a download, or the one that an upload sends.
    file: PathBuf,
    /// One log file for each process.
    logs: Vec<PathBuf>,
    /// When the current process was started.
    begun: Time,
    /// The flow's process; `None` while it is crashed, and at the end.
    child: Option<Child>,
    finished: Option<(Time, bool)>,
    arrivals: ArrivalMeter,
}

/// A crash or a restart of processes.
#[derive(Clone, Copy)]
enum ProcessFault {
    Crash(CrashedEnd),
    Return(CrashedEnd),
    /// A new process takes the proxy over.
    Upgrade,
    /// The devices of the proxy's first node are asked to go on at the other one.
    Drain,
    /// The store of the proxy's nodes stops.
    StoreStop(StoreStop),
    /// The store of the proxy's nodes is back.
    StoreReturn(StoreStop),
}

/// The crashes and restarts of a scenario, the last one first.
fn blows(world: &World) -> Vec<(Time, ProcessFault)> {
    let mut blows = Vec::new();
    for crash in &world.scenario().crashes {
        let at = |s| Time::from_secs_f64(s);
        if crash.how == CrashKind::Upgrade {
            blows.push((at(crash.t_s), ProcessFault::Upgrade));
            continue;
        }
        if crash.how == CrashKind::Drain {
            blows.push((at(crash.t_s), ProcessFault::Drain));
            continue;
        }
        blows.push((at(crash.t_s), ProcessFault::Crash(crash.who)));
        blows.push((at(crash.t_s + crash.for_s), ProcessFault::Return(crash.who)));
    }
    for outage in &world.scenario().store_outages {
        let at = |s| Time::from_secs_f64(s);
        blows.push((at(outage.t_s), ProcessFault::StoreStop(outage.how)));
        let back = at(outage.t_s + outage.for_s);
        blows.push((back, ProcessFault::StoreReturn(outage.how)));
    }
    blows.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    blows
}

/// What carries the flows.
pub enum FlowCarrier<'a> {
    /// A client of D2TP, through the lab's proxy.
    Prox(&'a mut LabProx, &'a DeviceClient),
    /// `cedos get` without a proxy.
    Direct,
    /// The kernel, perhaps through the proxy's TCP port.
    Kernel(&'a KernelTransport, Option<&'a mut LabProx>),
}

impl FlowCarrier<'_> {
    /// Whether the processes print JSON about what they carried and the origin's answer.
    fn reports(&self) -> bool {
        match self {
            FlowCarrier::Prox(_, client) => client.reports(),
            FlowCarrier::Direct | FlowCarrier::Kernel(..) => true,
        }
    }
}

/// Runs all flows until they end or the scenario does. `has_logs`: what each process says goes into a file of its own.
///
/// # Errors
/// A flow could not be started.
pub fn run(
    world: &World,
    program: &Path,
    folder: &Path,
    mut by: FlowCarrier,
    has_logs: bool,
) -> anyhow::Result<Vec<FlowReport>> {
    let scenario = world.scenario();
    let uploads = |flow: &&ScenarioFlow| flow.direction == Direction::Up;
    if let Some(flow) = scenario
        .flows
        .iter()
        .find(uploads)
        .filter(|_| !matches!(by, FlowCarrier::Prox(..)))
    {
        bail!("flow {}: uploads go through a proxy", flow.id);
    }
    let end_at = Time::from_secs_f64(scenario.duration_s);
    let mut waiting: Vec<&ScenarioFlow> = scenario.flows.iter().collect();
    waiting.sort_by(|a, b| b.start_s.total_cmp(&a.start_s));
    let mut blows = blows(world);
    let mut device_is_there = true;
    let mut transfers: Vec<LabTransfer> = Vec::new();
    while world.now() < end_at && world.fault().is_none() && !is_interrupted() {
        while let Some((_, blow)) = blows.pop_if(|(at, _)| *at <= world.now()) {
            print_stderr(&format!(
                "{:9.3} s  {}",
                world.now().as_secs_f64(),
                told(blow)
            ));
            match (blow, &mut by) {
                (
                    ProcessFault::Crash(CrashedEnd::Proxy),
                    FlowCarrier::Prox(prox, _) | FlowCarrier::Kernel(_, Some(prox)),
                ) => {
                    prox.crash();
                }
                (
                    ProcessFault::Return(CrashedEnd::Proxy),
                    FlowCarrier::Prox(prox, _) | FlowCarrier::Kernel(_, Some(prox)),
                ) => {
                    prox.begin(world)?;
                }
                (
                    ProcessFault::Upgrade,
                    FlowCarrier::Prox(prox, _) | FlowCarrier::Kernel(_, Some(prox)),
                ) => {
                    prox.upgrade(world)?;
                }
                (
                    ProcessFault::Drain,
                    FlowCarrier::Prox(prox, _) | FlowCarrier::Kernel(_, Some(prox)),
                ) => {
                    prox.drain()?;
                }
                (
                    ProcessFault::StoreStop(_) | ProcessFault::StoreReturn(_),
                    FlowCarrier::Prox(prox, _) | FlowCarrier::Kernel(_, Some(prox)),
                ) => {
                    if let Some(store) = prox.store() {
                        match blow {
                            ProcessFault::StoreStop(StoreStop::Kill) => store.kill(),
                            ProcessFault::StoreStop(StoreStop::Pause) => store.pause(),
                            ProcessFault::StoreReturn(StoreStop::Kill) => store.begin()?,
                            _ => store.resume(),
                        }
                    }
                }
                (_, _) if matches!(blow, ProcessFault::Crash(CrashedEnd::Device)) => {
                    device_is_there = false;
                    for child in transfers.iter_mut().filter_map(|t| t.child.as_mut()) {
                        let _ = child.kill();
                        let _ = child.wait();
                    }
                    for transfer in transfers.iter_mut().filter(|t| t.finished.is_none()) {
                        transfer.child = None;
                    }
                }
                (_, by) if matches!(blow, ProcessFault::Return(CrashedEnd::Device)) => {
                    device_is_there = true;
                    for transfer in transfers.iter_mut().filter(|t| t.finished.is_none()) {
                        transfer.begin(world, program, by, has_logs)?;
                    }
                }
                _ => {} // Without a proxy there is nothing to crash.
            }
        }
        while device_is_there
            && let Some(flow) =
                waiting.pop_if(|flow| Time::from_secs_f64(flow.start_s) <= world.now())
        {
            let mut transfer = LabTransfer::new(world, folder, flow)?;
            transfer.begin(world, program, &by, has_logs)?;
            transfers.push(transfer);
        }
        let mut active = !device_is_there;
        for transfer in transfers.iter_mut().filter(|t| t.finished.is_none()) {
            transfer.look(world, &by);
            match transfer
                .child
                .as_mut()
                .map(Child::try_wait)
                .transpose()?
                .flatten()
            {
                Some(status) => transfer.finished = Some((world.now(), status.success())),
                None => active = true,
            }
        }
        if !active {
            world.idle();
            if waiting.is_empty() {
                break;
            }
        }
        std::thread::sleep(LOOK);
    }
    for transfer in transfers.iter_mut().filter(|t| t.finished.is_none()) {
        if let Some(child) = &mut transfer.child {
            end(child);
        }
    }
    let report = |flow: &ScenarioFlow| {
        let transfer = transfers.iter().find(|t| t.flow.id == flow.id);
        transfer.map_or_else(|| never_started(flow), |t| t.report(world, &by))
    };
    Ok(scenario.flows.iter().map(report).collect())
}

fn told(blow: ProcessFault) -> &'static str {
    match blow {
        ProcessFault::Crash(CrashedEnd::Device) => "device   crashes",
        ProcessFault::Crash(CrashedEnd::Proxy) => "proxy    crashes",
        ProcessFault::Return(CrashedEnd::Device) => "device   is back",
        ProcessFault::Return(CrashedEnd::Proxy) => "proxy    is back",
        ProcessFault::StoreStop(StoreStop::Kill) => "store    is killed",
        ProcessFault::StoreStop(StoreStop::Pause) => "store    is paused",
        ProcessFault::StoreReturn(_) => "store    is back",
        ProcessFault::Upgrade => "proxy    is taken over by a new process",
        ProcessFault::Drain => "proxy    is drained",
    }
}

impl<'a> LabTransfer<'a> {
    fn new(
        world: &World,
        folder: &Path,
        flow: &'a ScenarioFlow,
    ) -> anyhow::Result<LabTransfer<'a>> {
        let file = folder.join(format!("flow-{}", flow.id.replace('/', "_")));
        let origin = origin_named(world);
        let url = match (&flow.url, flow.bytes, flow.direction) {
            (Some(url), ..) if world.has_names() => url.clone(),
            (Some(url), ..) => url.replace(
                "://origin",
                &format!("://{}", cedos_lab_emu::plan::ORIGIN_V4),
            ),
            // An object of its own, so that requests of other flows are not taken for repeated ones.
            (None, bytes, Direction::Down) if world.scenario().store => {
                let bytes = bytes.unwrap_or(0);
                format!("{origin}/bytes/{bytes}?flow={}", upload_name(flow))
            }
            (None, bytes, Direction::Down) => format!("{origin}/bytes/{}", bytes.unwrap_or(0)),
            (None, _, Direction::Up) => format!("{origin}/upload/{}", upload_name(flow)),
        };
        if flow.direction == Direction::Up {
            let bytes = flow.bytes.context("an upload needs bytes")?;
            web::write_content(&file, world.scenario().seed, bytes)?;
        }
        Ok(LabTransfer {
            flow,
            url,
            file,
            logs: Vec::new(),
            begun: Time::ZERO,
            child: None,
            finished: None,
            arrivals: ArrivalMeter::default(),
        })
    }

    /// Starts the flow's process, for the first time or after a crash.
    fn begin(
        &mut self,
        world: &World,
        program: &Path,
        by: &FlowCarrier,
        has_log: bool,
    ) -> anyhow::Result<()> {
        let log = self
            .file
            .with_extension(format!("{}.json", self.logs.len()));
        let mut command = Command::new(program);
        match by {
            FlowCarrier::Kernel(over, prox) => {
                command.args(["lab", "fetch", "--over", &over.word(), &self.url]);
                command.arg("-o").arg(&self.file);
                if prox.is_some() {
                    command.args(["--through", &tcp_port(world)]);
                }
            }
            FlowCarrier::Prox(prox, by) => {
                command = by.command(program, world, prox, self.flow, &self.url, &self.file)?;
            }
            FlowCarrier::Direct => {
                client::ask(&mut command, world, self.flow, &self.url, &self.file);
            }
        }
        command
            .stdout(Stdio::from(File::create(&log)?))
            .stderr(match has_log {
                true => Stdio::from(File::create(log.with_extension("log"))?),
                false => Stdio::inherit(),
            });
        self.begun = world.now();
        self.child = Some(world.device().spawn(command)?);
        self.logs.push(log);
        Ok(())
    }

    /// Records how much of the content has arrived: for a download the size of its file, under
    /// whatever name while it is incomplete, for an upload the bytes at the origin.
    fn look(&mut self, world: &World, by: &FlowCarrier) {
        let bytes = match self.flow.direction {
            Direction::Down => {
                let size = |file: &Path| std::fs::metadata(file).map_or(0, |file| file.len());
                let mut part = self.file.clone().into_os_string();
                part.push(".part");
                Some(size(&self.file).max(size(Path::new(&part))))
            }
            // The proxy stores a `cedos put` completely before it informs the origin.
            Direction::Up if by.reports() => None,
            Direction::Up => world
                .web()
                .and_then(|web| web.upload_arrived(&upload_name(self.flow))),
        };
        if let Some(bytes) = bytes {
            self.arrivals.on_bytes(world.now(), bytes);
        }
    }

    /// Checks whether the content is complete at its destination, and how much of it there is.
    fn judge(&self, world: &World, by: &FlowCarrier, last: &Value) -> (u64, bool) {
        let seed = world.scenario().seed;
        let named = || {
            let (_, bytes) = self.flow.url.as_ref()?.split_once("://origin/bytes/")?;
            bytes.parse().ok()
        };
        let expected = self.flow.bytes.or_else(named);
        let digest = |bytes| content::sha256(seed, bytes);
        if self.flow.direction == Direction::Down {
            // An incomplete download has no file of that name.
            let partial = || last["bytes"].as_u64().unwrap_or(0);
            let bytes = std::fs::metadata(&self.file).map_or_else(|_| partial(), |file| file.len());
            return match expected {
                Some(expected) => (bytes, file_sha256(&self.file) == Some(digest(expected))),
                // For external objects only the download's own report is available.
                None => (bytes, last["event"] == "done"),
            };
        }
        // The origin's copy: a file of nginx's, or the digest in the built-in server's answer.
        let wanted = expected.map(digest);
        let said: Value = if by.reports() {
            serde_json::from_str(last["answer"].as_str().unwrap_or_default())
        } else {
            serde_json::from_str(&self.logs.last().map(read).unwrap_or_default())
        }
        .unwrap_or(Value::Null);
        let bytes = last["bytes"].as_u64().or(said["bytes"].as_u64());
        let bytes = bytes.unwrap_or(0);
        let has = match said["sha256"].as_str() {
            Some(said) => hex::decode(said).ok(),
            None => {
                let file = world
                    .web()
                    .and_then(|web| web.upload(&upload_name(self.flow)));
                file.and_then(|file| file_sha256(&file)).map(Vec::from)
            }
        };
        let ok = wanted.is_some_and(|wanted| has.as_deref() == Some(wanted.as_slice()));
        (bytes, ok)
    }

    fn report(&self, world: &World, by: &FlowCarrier) -> FlowReport {
        let told: Vec<Value> = self.logs.iter().map(|log| last_carried(log)).collect();
        let null = Value::Null;
        let last = told.last().unwrap_or(&null);
        let (bytes, sha256_ok) = self.judge(world, by, last);
        let finished = self
            .finished
            .filter(|(_, success)| *success && sha256_ok)
            .map(|(at, _)| at.as_secs_f64());
        if finished.is_none() {
            print_stderr(&format!(
                "lab: flow {} ({}) did not finish: {last}",
                self.flow.id, self.url
            ));
        }
        let mut bytes_by_link = BTreeMap::new();
        for links in told
            .iter()
            .filter_map(|told| told["bytes_by_link"].as_object())
        {
            for (name, bytes) in links {
                *bytes_by_link.entry(name.clone()).or_default() += bytes.as_u64().unwrap_or(0);
            }
        }
        // The program counts from its own start. Events before a crash are not in the last report.
        let came = |which: &str| {
            let at = last[which].as_f64().filter(|_| self.logs.len() == 1)?;
            Some(self.begun.as_secs_f64() + at)
        };
        let (until, whole) = match self.finished {
            Some((at, _)) => (at, finished.is_some()),
            None => (world.now(), false),
        };
        let duplicate = last["duplicate_bytes"].as_u64().unwrap_or(0);
        let carried: u64 = bytes_by_link.values().sum();
        FlowReport {
            id: self.flow.id.clone(),
            bytes,
            sha256_ok,
            finished_s: finished,
            first_byte_s: came("first_byte_s").or(self.arrivals.first_byte_s()),
            last_byte_s: came("last_byte_s").or(self.arrivals.last_byte_s()),
            silence_max_s: self.arrivals.silence_max_s(until, whole),
            deadline_s: self.flow.deadline_s,
            deadline_met: finished.is_some_and(|at| self.flow.deadline_s.is_none_or(|by| at <= by)),
            bytes_by_link,
            // Bytes lost in a crash were carried twice, and no process knows that.
            duplicate_bytes: if self.logs.len() > 1 {
                duplicate.max(carried.saturating_sub(bytes))
            } else {
                duplicate
            },
        }
    }
}

/// The name of a flow's upload at the origin.
fn upload_name(flow: &ScenarioFlow) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    flow.id.chars().map(safe).collect()
}

fn never_started(flow: &ScenarioFlow) -> FlowReport {
    FlowReport {
        id: flow.id.clone(),
        deadline_s: flow.deadline_s,
        ..FlowReport::default()
    }
}

fn read(log: impl AsRef<Path>) -> String {
    std::fs::read_to_string(log).unwrap_or_default()
}

/// The last JSON object that a program printed about its links; `null` if there is none.
fn last_carried(log: &Path) -> Value {
    let text = read(log);
    let mut objects = text
        .lines()
        .rev()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    objects
        .find(|object| object["bytes_by_link"].is_object())
        .unwrap_or(Value::Null)
}
