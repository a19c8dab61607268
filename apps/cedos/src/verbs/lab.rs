//! `cedos lab run FILE [--json] [-- CMD…]`: a scenario in real time, between namespaces.
//!
//! ```text
//!   origin: built-in server          proxy: cedos prox            device: cedos get per flow, or CMD
//!                                      │ prints d2tp://…              ▲
//!                                      └──────────────────────────────┘
//! ```
//!
//! Without CMD each `[[flow]]` is a `cedos get` started at its `start_s`. With CMD that runs on the
//! device instead, with `CEDOS_LAB_ORIGIN`, `CEDOS_LAB_PROX` and `CEDOS_LINK_CLASS`
//! (`wlan0=free,wwan0=metered`) in its environment. Both get `CEDOS_KEY_FILE` (the device's key). Call
//! [`run`] before the program starts any thread: only then may an ordinary user build the lab.

use anyhow::{Context, anyhow, bail};
use cedos_lab_emu::{Happening, World, content, enter, plan};
use cedos_lab_link::Time;
use cedos_lab_scenario::{Direction, EventKind, Family, Flow, FlowReport, Report, Scenario};
use clap::{Args, Subcommand};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// Port of the proxy in the lab.
const PROXY_PORT: u16 = 4433;
/// How long the proxy may take to print its address.
const PROXY_START: Duration = Duration::from_secs(10);
/// Exit code of a run that was interrupted.
const CANCELLED: u8 = 3;
/// How often children are looked after.
const LOOK: Duration = Duration::from_millis(2);
/// How long children may take to end after being asked to.
const FAREWELL: Duration = Duration::from_secs(2);

/// Emulate networks on this machine, in real time.
#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    verb: LabVerb,
}

#[derive(Debug, Subcommand)]
enum LabVerb {
    /// Run a scenario: its flows through D2TP, or a command on its device.
    Run(RunArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// The scenario file; see docs/scenarios.md.
    file: PathBuf,
    /// Print one JSON object at the end.
    #[arg(long)]
    json: bool,
    /// Fetch straight from the origin, without a proxy.
    #[arg(long)]
    direct: bool,
    /// Run this on the device instead of the scenario's flows.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Carry out `cedos lab …`. The exit code is 0 if CMD succeeds; without CMD, if every expectation
/// holds.
///
/// # Errors
/// What kept the run from being one.
pub fn run(args: LabArgs) -> anyhow::Result<ExitCode> {
    let LabVerb::Run(args) = args.verb;
    enter()?;
    heed_interrupts()?;
    let mut world = World::build(Scenario::load(&args.file)?)?;
    world.start_origin().context("the origin cannot start")?;
    let folder = tempfile::tempdir().context("no temporary folder")?;
    let program = std::env::current_exe().context("this program's own file is not known")?;
    // With a command the proxy is a courtesy: the command may need none.
    let prox = match (args.direct, start_prox(&world, &program, folder.path())) {
        (true, _) => None,
        (false, Ok(prox)) => Some(prox),
        (false, Err(error)) if !args.command.is_empty() => {
            eprintln!("lab: no proxy: {error:#}");
            None
        }
        (false, Err(error)) => {
            return Err(error.context("the proxy cannot start (--direct does without)"));
        }
    };
    world.start(tell)?;
    let (flows, succeeded) = if args.command.is_empty() {
        (
            run_flows(&world, &program, folder.path(), prox.as_ref())?,
            true,
        )
    } else {
        (
            Vec::new(),
            run_command(&world, &args.command, prox.as_ref())?,
        )
    };
    if INTERRUPTED.load(Ordering::Relaxed) {
        eprintln!("lab: interrupted");
        if let Some(mut prox) = prox {
            end(&mut prox.child);
        }
        return Ok(ExitCode::from(CANCELLED));
    }
    if let Some(fault) = world.fault() {
        bail!("the lab could not follow its scenario, so the run shows nothing: {fault}");
    }
    let seen = world.seen();
    let mut report = Report {
        flows,
        links: seen.links,
        switches: seen.switches,
        expectations: Vec::new(),
    };
    world.scenario().judge(&mut report);
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    }
    summarise(&report);
    if let Some(mut prox) = prox {
        end(&mut prox.child);
    }
    Ok(
        if succeeded && (!args.command.is_empty() || report.holds()) {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        },
    )
}

/// Set by SIGINT and SIGTERM: the run then ends as it would by itself, and removes its files.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupt(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Whether the user asked for the end.
pub fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Takes SIGINT and SIGTERM as a wish to end in order.
///
/// # Errors
/// The system refused.
pub fn heed_interrupts() -> anyhow::Result<()> {
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
    let handler = SigHandler::Handler(interrupt);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler does nothing but store to an atomic.
        unsafe { sigaction(signal, &action) }.context("no handler for signals")?;
    }
    Ok(())
}

fn tell(happening: &Happening) {
    let what = match (happening.event.kind, happening.addresses) {
        (EventKind::Changed, _) => return, // A trace has too many of these.
        (EventKind::Up { .. }, Some(at)) => format!("up, {} {}", at.v4, at.v6),
        (EventKind::NewAddress { .. }, Some(at)) => format!("new address, {} {}", at.v4, at.v6),
        (EventKind::Attaching, _) => "attaching".to_owned(),
        (EventKind::Rebind, _) => "NAT rebinds".to_owned(),
        _ => "down".to_owned(),
    };
    eprintln!(
        "{:9.3} s  {:8} {what}",
        happening.at.as_secs_f64(),
        happening.link
    );
}

/// A running proxy.
pub struct Prox {
    child: Child,
    /// `d2tp://host:port/KEY`.
    address: String,
    /// The device's key file.
    key: PathBuf,
}

/// Asks a proxy to end, and ends it if it does not.
pub fn stop_prox(mut prox: Prox) {
    end(&mut prox.child);
}

/// `cedos key gen` for the device, then `cedos prox` that lets it in.
///
/// # Errors
/// The proxy did not start, and what it said.
pub fn start_prox(world: &World, program: &Path, folder: &Path) -> anyhow::Result<Prox> {
    let key = folder.join("device.key");
    let mut key_gen = Command::new(program);
    key_gen
        .args(["key", "gen", "--out"])
        .arg(&key)
        .args(["--json"]);
    let made = key_gen.output().context("`cedos key gen` cannot be run")?;
    let told = String::from_utf8_lossy(&made.stdout);
    let public = told
        .lines()
        .find_map(|line| {
            let value: Value = serde_json::from_str(line).ok()?;
            ["public", "public_key", "key"]
                .iter()
                .find_map(|k| value[*k].as_str().map(str::to_owned))
        })
        .ok_or_else(|| {
            anyhow!(
                "`cedos key gen` told no public key: {}",
                String::from_utf8_lossy(&made.stderr).trim()
            )
        })?;
    // One address for both families where there is IPv6.
    let listen = SocketAddr::new(IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), PROXY_PORT);
    let mut command = Command::new(program);
    command
        .args([
            "prox",
            "--listen",
            &listen.to_string(),
            "--allow-private",
            "--allow-client",
            &public,
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::from(File::create(folder.join("prox.log"))?));
    let mut child = world.proxy().spawn(command)?;
    let (tell, told) = mpsc::channel();
    let out = child.stdout.take().context("the proxy's output")?;
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            if let Some(at) = line.find("d2tp://") {
                let address = line[at..].split(['"', ' ', ',']).next().unwrap_or_default();
                let _ = tell.send(address.to_owned());
            }
        }
    });
    match told.recv_timeout(PROXY_START) {
        Ok(address) => Ok(Prox {
            child,
            address,
            key,
        }),
        Err(_) => {
            end(&mut child);
            let log = std::fs::read_to_string(folder.join("prox.log")).unwrap_or_default();
            bail!("`cedos prox` printed no d2tp:// address: {}", log.trim());
        }
    }
}

impl Prox {
    /// The proxy's address as the device reaches it: the same key, the host of its family.
    fn reached_by(&self, world: &World) -> String {
        let families: Vec<Family> = world
            .scenario()
            .links
            .iter()
            .map(|link| link.family)
            .collect();
        let host = if families.iter().all(|f| f.has_v4()) {
            IpAddr::V4(plan::PROXY_V4)
        } else if families.iter().all(|f| f.has_v6()) {
            IpAddr::V6(plan::PROXY_V6)
        } else {
            // IPv4 for some and IPv6 for the others; those translate it themselves.
            IpAddr::V4(plan::PROXY_V4)
        };
        let key = self.address.rsplit('/').next().unwrap_or_default();
        format!("d2tp://{}/{key}", SocketAddr::new(host, PROXY_PORT))
    }
}

/// Has a `cedos get` on the device go through `prox`.
pub fn through(command: &mut Command, prox: &Prox, world: &World) {
    command
        .args(["--prox", &prox.reached_by(world)])
        .env("CEDOS_KEY_FILE", &prox.key);
}

/// Tells a `cedos get` what the lab's links stand for: they are none of them radios.
pub fn classes(command: &mut Command, scenario: &Scenario) {
    for link in &scenario.links {
        command.args(["--link", &format!("{}={}", link.name, link.class.word())]);
    }
}

/// `http://origin` as the proxy and the device reach it.
pub fn origin_url() -> String {
    format!("http://{}", plan::ORIGIN_V4)
}

/// The lab's devices are all TUN: `wlan0=free,wwan0=metered` says what they stand for.
fn link_classes(world: &World) -> String {
    let links = &world.scenario().links;
    let class = |link: &cedos_lab_scenario::Link| format!("{}={}", link.name, link.class.word());
    links.iter().map(class).collect::<Vec<_>>().join(",")
}

fn run_command(world: &World, command: &[String], prox: Option<&Prox>) -> anyhow::Result<bool> {
    let [program, arguments @ ..] = command else {
        bail!("no command")
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("CEDOS_LAB_ORIGIN", origin_url())
        .env("CEDOS_LINK_CLASS", link_classes(world));
    if let Some(prox) = prox {
        command
            .env("CEDOS_LAB_PROX", prox.reached_by(world))
            .env("CEDOS_KEY_FILE", &prox.key);
    }
    let mut child = world.device().spawn(command)?;
    let end_at = Time::from_secs_f64(world.scenario().duration_s);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if world.now() >= end_at || INTERRUPTED.load(Ordering::Relaxed) {
            eprintln!("lab: duration_s is over or the run was interrupted; the command is ended");
            end(&mut child);
            return Ok(false);
        }
        std::thread::sleep(LOOK);
    }
}

/// A flow's download in progress.
struct Download<'a> {
    flow: &'a Flow,
    url: String,
    child: Child,
    file: PathBuf,
    log: PathBuf,
    finished: Option<(Time, bool)>,
}

fn run_flows(
    world: &World,
    program: &Path,
    folder: &Path,
    prox: Option<&Prox>,
) -> anyhow::Result<Vec<FlowReport>> {
    let scenario = world.scenario();
    if let Some(flow) = scenario
        .flows
        .iter()
        .find(|flow| flow.direction == Direction::Up)
    {
        bail!(
            "flow {}: the lab has no uploads yet (`cedos put`); the simulator may",
            flow.id
        );
    }
    let end_at = Time::from_secs_f64(scenario.duration_s);
    let mut waiting: Vec<&Flow> = scenario.flows.iter().collect();
    waiting.sort_by(|a, b| b.start_s.total_cmp(&a.start_s));
    let mut downloads: Vec<Download> = Vec::new();
    while world.now() < end_at && world.fault().is_none() && !INTERRUPTED.load(Ordering::Relaxed) {
        while let Some(flow) =
            waiting.pop_if(|flow| Time::from_secs_f64(flow.start_s) <= world.now())
        {
            downloads.push(start_download(world, program, folder, prox, flow)?);
        }
        let mut active = false;
        for download in downloads
            .iter_mut()
            .filter(|download| download.finished.is_none())
        {
            match download.child.try_wait()? {
                Some(status) => download.finished = Some((world.now(), status.success())),
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
    for download in &mut downloads {
        if download.finished.is_none() {
            end(&mut download.child);
        }
    }
    let report = |flow: &Flow| {
        let download = downloads
            .iter()
            .find(|download| download.flow.id == flow.id);
        download.map_or_else(
            || never_started(flow),
            |download| download.report(scenario.seed),
        )
    };
    Ok(scenario.flows.iter().map(report).collect())
}

fn start_download<'a>(
    world: &World,
    program: &Path,
    folder: &Path,
    prox: Option<&Prox>,
    flow: &'a Flow,
) -> anyhow::Result<Download<'a>> {
    let file = folder.join(format!("flow-{}", flow.id.replace('/', "_")));
    let log = file.with_extension("json");
    let url = match (&flow.url, flow.bytes) {
        (Some(url), _) => url.replace("http://origin", &origin_url()),
        (None, bytes) => format!("{}/bytes/{}", origin_url(), bytes.unwrap_or(0)),
    };
    let mut command = Command::new(program);
    command.arg("get").arg(&url).arg("-o").arg(&file).args([
        "--json",
        "--policy",
        flow.policy.word(),
    ]);
    if let Some(prox) = prox {
        through(&mut command, prox, world);
    }
    if let Some(deadline_s) = flow.deadline_s {
        // What is left of it by now.
        let left_s = (deadline_s - world.now().as_secs_f64()).max(0.0);
        command.args(["--within", &format!("{}s", left_s.floor().max(1.0))]);
    }
    if let Some(bytes) = flow.metered_bytes_max {
        command.args(["--max-cell", &bytes.to_string()]);
    }
    classes(&mut command, world.scenario());
    command
        .stdout(Stdio::from(File::create(&log)?))
        .stderr(Stdio::inherit());
    let child = world.device().spawn(command)?;
    Ok(Download {
        flow,
        url,
        child,
        file,
        log,
        finished: None,
    })
}

impl Download<'_> {
    fn report(&self, seed: u64) -> FlowReport {
        let told = last_object(&self.log);
        let bytes = std::fs::metadata(&self.file).map_or(0, |file| file.len());
        let sha256_ok = match self.flow.bytes {
            Some(expected) => {
                file_sha256(&self.file).is_some_and(|got| got == content::sha256(seed, expected))
            }
            // For other people's objects the download's own word is all there is.
            None => told["sha256_ok"].as_bool().unwrap_or(false),
        };
        let finished = self
            .finished
            .filter(|(_, success)| *success && sha256_ok)
            .map(|(at, _)| at.as_secs_f64());
        if finished.is_none() {
            eprintln!(
                "lab: flow {} ({}) did not finish: {told}",
                self.flow.id, self.url
            );
        }
        let by_link = told["bytes_by_link"].as_object();
        let count = |(name, bytes): (&String, &Value)| Some((name.clone(), bytes.as_u64()?));
        FlowReport {
            id: self.flow.id.clone(),
            bytes,
            sha256_ok,
            finished_s: finished,
            deadline_s: self.flow.deadline_s,
            deadline_met: finished.is_some_and(|at| self.flow.deadline_s.is_none_or(|by| at <= by)),
            bytes_by_link: by_link
                .map(|links| links.iter().filter_map(count).collect())
                .unwrap_or_default(),
            duplicate_bytes: ["duplicate_bytes", "wasted_bytes"]
                .iter()
                .find_map(|key| told[*key].as_u64())
                .unwrap_or(0),
        }
    }
}

fn never_started(flow: &Flow) -> FlowReport {
    FlowReport {
        id: flow.id.clone(),
        deadline_s: flow.deadline_s,
        bytes_by_link: BTreeMap::new(),
        ..FlowReport::default()
    }
}

/// The last JSON object a program printed, `null` if it printed none.
fn last_object(log: &Path) -> Value {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let mut objects = text
        .lines()
        .rev()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    objects.find(Value::is_object).unwrap_or(Value::Null)
}

/// The digest of a file; none if it cannot be read.
pub fn file_sha256(path: &Path) -> Option<[u8; 32]> {
    use sha2::{Digest, Sha256};
    let mut digest = Sha256::new();
    std::io::copy(&mut File::open(path).ok()?, &mut digest).ok()?;
    Some(digest.finalize().into())
}

/// Ask a child to end, and end it if it does not.
pub fn end(child: &mut Child) {
    use nix::sys::signal::{Signal, kill};
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    let _ = kill(pid, Signal::SIGTERM);
    let mut left = FAREWELL;
    while child.try_wait().is_ok_and(|ended| ended.is_none()) {
        if left.is_zero() {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        std::thread::sleep(LOOK);
        left = left.saturating_sub(LOOK);
    }
}

fn summarise(report: &Report) {
    for link in &report.links {
        eprintln!(
            "link {:8} {:8} {:>12} bytes down {:>12} up   {} packets while down",
            link.name, link.class, link.bytes_down, link.bytes_up, link.packets_while_down
        );
    }
    for switch in &report.switches {
        eprintln!(
            "switch at {:.3} s  {} to {}  silent for {:.1} ms",
            switch.at_s, switch.from, switch.to, switch.silence_ms
        );
    }
    for flow in &report.flows {
        let when = flow
            .finished_s
            .map_or("not finished".to_owned(), |at| format!("done at {at:.3} s"));
        eprintln!("flow {:8} {:>12} bytes  {when}", flow.id, flow.bytes);
    }
    for expectation in &report.expectations {
        let (mark, why) = if expectation.holds {
            ("holds", "")
        } else {
            ("FAILS", &*expectation.why)
        };
        eprintln!("{mark}  {}  {why}", expectation.text);
    }
}
