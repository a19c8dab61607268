//! `cedos lab run FILE [--json] [--client CLIENT [--bridge BITS] | --over WHO] [--at-origin CMD] [-- CMD…]`: a
//! scenario in real time, between namespaces.
//!
//! A scenario with podcasts has an agent on the device (lab/podcasts.rs). Without CMD each `[[flow]]` is a process of the client, started at its `start_s`: by default a
//! `cedos get` or `cedos put`, or with `--over` a `cedos lab fetch`, which uses the kernel. With
//! CMD that runs on the device instead; [`environment`] sets its variables. Call [`run`] before the
//! program starts any thread: only then may an ordinary user build the lab.

use anyhow::{Context, bail};
use cedos_lab_emu::{World, WorldEvent, enter};
use cedos_lab_link::Time;
use cedos_lab_scenario::{EventKind, OriginKind, RunReport, Scenario};
use cedos_terminal::{print_stderr, print_stdout};
use clap::{Args, Subcommand};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};

use crate::lab::bridge::LabBridge;
use crate::lab::client::{DeviceClient, INNER_NET, LabClient};
use crate::lab::kill::{self, KillArgs};
use crate::lab::offspring::ChildTracker;
use crate::lab::over::{self, FetchArgs, KernelTransport};
use crate::lab::podcasts::LabPodcasts;
use crate::lab::prox::tcp_port;
pub use crate::lab::prox::{LabProx, start_prox, stop_prox, through};
use crate::lab::socket_transfer::{self, SocketTransferArgs};
use crate::lab::transfers::{self, FlowCarrier};
use crate::lab::udp_stream::{self, UdpReceiveArgs, UdpSendArgs};
use crate::lab::{LOOK, link_classes, origin_named};
pub use crate::lab::{classes, end, file_sha256, heed_interrupts, is_interrupted, origin_url};

/// Exit code of a run that was interrupted.
pub const CANCELLED: u8 = 3;

/// Emulate networks on this machine, in real time.
#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    verb: LabVerb,
}

#[derive(Debug, Subcommand)]
enum LabVerb {
    /// Run a scenario: its flows through D2TP, or a command on its device.
    ///
    /// Exit codes: 0 every expectation holds, or the command succeeded; 1 not; 2 usage; 3 interrupted.
    Run(LabRunArgs),
    /// Kill a download and its proxy at system calls, and check that nothing is lost.
    ///
    /// Exit codes: 0 every point was reached and nothing lost; 1 not; 2 usage.
    Kill(KillArgs),
    /// What `--over` runs on the device
    #[command(hide = true)]
    Fetch(FetchArgs),
    /// What `--client socket` runs on the device
    #[command(hide = true)]
    Socket(SocketTransferArgs),
    /// What E2 runs as a call
    #[command(hide = true)]
    UdpSend(UdpSendArgs),
    /// What E2 runs as the other end of a call
    #[command(hide = true)]
    UdpReceive(UdpReceiveArgs),
}

#[derive(Debug, Args)]
struct LabRunArgs {
    /// The scenario file; see docs/scenarios.md.
    file: PathBuf,
    /// Print one JSON object at the end.
    #[arg(long)]
    json: bool,
    /// Fetch straight from the origin, without a proxy.
    #[arg(long)]
    direct: bool,
    /// Have another client of D2TP carry the flows: cedos run with curl, curl through an agent's local proxy,
    /// sockets of libd2tp, or curl through a VPN; with CMD only a VPN, which carries what CMD sends to the origin
    #[arg(long, value_enum, default_value_t, conflicts_with_all = ["direct", "over"])]
    client: LabClient,
    /// With --client vpn: a radio beside the links, which carries so many bits per second each way behind a serial line
    /// of 115,200, and a cedos bridge at its other end
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(u32).range(80..=115_200))]
    bridge: Option<u32>,
    /// Use the kernel's TCP instead of D2TP: tcp:LINK over one link, tcp-first:LINK,LINK over the first one
    /// that is up, mptcp over all, all three directly from the origin; mptcp-prox over all to the proxy
    #[arg(long, value_name = "WHO", conflicts_with_all = ["direct", "command"])]
    over: Option<KernelTransport>,
    /// Keep what the run writes in this new directory: files, and what each process says, in a log of its own
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Run this shell command at the origin, from before the scenario until its end, for example a server
    #[arg(long, value_name = "CMD")]
    at_origin: Option<String>,
    /// Run this on the device instead of the scenario's flows.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Carries out `cedos lab …`. The exit code is 0 if CMD succeeds or, without CMD, if every
/// expectation holds.
///
/// # Errors
/// The run was not possible.
pub fn run(args: LabArgs) -> anyhow::Result<ExitCode> {
    let args = match args.verb {
        LabVerb::Run(args) => args,
        LabVerb::Kill(args) => return strike(&args),
        LabVerb::Fetch(args) => return over::fetch(&args),
        LabVerb::Socket(args) => return socket_transfer::transfer(&args),
        LabVerb::UdpSend(args) => return udp_stream::send(&args),
        LabVerb::UdpReceive(args) => return udp_stream::receive(&args),
    };
    let has_vpn = args.client.vpn_mode().is_some();
    if !args.command.is_empty() && !has_vpn && args.client != LabClient::Get {
        bail!("a command has no client of D2TP but a VPN: --client vpn or vpn-flows, or none");
    }
    if args.bridge.is_some() && !has_vpn {
        bail!("--bridge is for --client vpn");
    }
    enter()?;
    heed_interrupts()?;
    let mut world = build(&args)?;
    let web = world.start_web().context("the origin cannot start")?;
    print_stderr(&format!("lab: the origin is {}", web.what));
    let temporary = tempfile::tempdir().context("no temporary folder")?;
    let folder = match &args.keep {
        Some(kept) => {
            std::fs::create_dir(kept)
                .with_context(|| format!("{} cannot be made", kept.display()))?;
            // Processes of the lab may have other current directories.
            std::fs::canonicalize(kept)?
        }
        None => temporary.path().to_owned(),
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    // With a command the proxy is optional, because the command may not need it.
    let needs_proxy = !args.direct && matches!(args.over, None | Some(KernelTransport::MptcpProx));
    let inner_net = has_vpn.then_some(INNER_NET);
    let proxy = needs_proxy.then(|| start_prox(&world, &program, &folder, inner_net));
    let mut prox = match proxy.transpose() {
        Ok(prox) => prox,
        Err(error) if !args.command.is_empty() && !has_vpn => {
            print_stderr(&format!("lab: no proxy: {error:#}"));
            None
        }
        Err(error) => return Err(error.context("the proxy cannot start (--direct does without)")),
    };
    let servers = args.at_origin.as_deref();
    let servers = servers.map(|script| Servers::begin(&world, script));
    let servers = servers.transpose()?;
    let bridge = args.bridge;
    let bridge = bridge.map(|bits| LabBridge::start(&world, &program, &folder, bits));
    let bridge = bridge.transpose()?;
    let client = match &prox {
        Some(prox) if (args.command.is_empty() || has_vpn) && args.over.is_none() => {
            let (client, bridge) = (args.client, bridge.as_ref());
            Some(DeviceClient::start(
                client, &world, &program, &folder, prox, bridge,
            )?)
        }
        _ => None,
    };
    let podcasts = world.scenario().podcasts.clone();
    let podcasts = podcasts.filter(|_| args.command.is_empty());
    if podcasts.is_some() && !world.scenario().flows.is_empty() {
        bail!("the scenario has podcasts and flows; keep one");
    }
    if podcasts.is_some() && (args.over.is_some() || args.client != LabClient::Get) {
        bail!("podcasts are fetched by an agent: --over and --client are for flows");
    }
    let listener = podcasts
        .as_ref()
        .map(|podcasts| LabPodcasts::start(podcasts, &world, &program, &folder, prox.as_ref()));
    let listener = listener.transpose()?;
    world.start(tell)?;
    let mut heard = None;
    let (flows, succeeded) = if let (Some(podcasts), Some(listener)) = (&podcasts, &listener) {
        heard = Some(listener.run(podcasts, &world)?);
        (Vec::new(), true)
    } else if args.command.is_empty() {
        let by = match (&args.over, prox.as_mut(), &client) {
            (Some(over), prox, _) => FlowCarrier::Kernel(over, prox),
            (None, Some(prox), Some(client)) => FlowCarrier::Prox(prox, client),
            (None, ..) => FlowCarrier::Direct,
        };
        let flows = transfers::run(&world, &program, &folder, by, args.keep.is_some())?;
        (flows, true)
    } else {
        let succeeded = run_command(&world, &args.command, prox.as_ref())?;
        (Vec::new(), succeeded)
    };
    drop((servers, client, listener));
    let over_bridge = bridge.as_ref().map(LabBridge::report);
    drop(bridge);
    if is_interrupted() {
        print_stderr("lab: interrupted");
        prox.into_iter().for_each(stop_prox);
        return Ok(ExitCode::from(CANCELLED));
    }
    if let Some(fault) = world.fault() {
        bail!("the lab could not follow its scenario, so the run shows nothing: {fault}");
    }
    let seen = world.seen();
    let bytes = flows.iter().map(|flow| flow.bytes).sum();
    let mut report = RunReport {
        energy: seen.energy.map(|meter| meter.report(world.now(), bytes)),
        flows,
        links: seen.links.into_iter().chain(over_bridge).collect(),
        switches: seen.switches,
        origin_requests_twice: world.web().and_then(|web| web.requests_twice()),
        sessions_taken_over: prox.as_ref().and_then(LabProx::sessions_taken_over),
        packets_to_payload: None,
        podcasts: heard,
        expectations: Vec::new(),
    };
    world.scenario().judge(&mut report);
    for (object, begun) in world.web().iter().flat_map(|web| web.repeated_requests()) {
        print_stderr(&format!(
            "lab: the origin was asked for {object} from bytes {begun:?}"
        ));
    }
    if args.json {
        print_stdout(&serde_json::to_string(&report)?);
    }
    summarise(&report, !args.command.is_empty());
    prox.into_iter().for_each(stop_prox);
    Ok(
        if succeeded && (!args.command.is_empty() || report.holds()) {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        },
    )
}

fn build(args: &LabRunArgs) -> anyhow::Result<World> {
    let mut scenario = Scenario::load(&args.file)?;
    let held = |link: &&cedos_lab_scenario::Link| {
        let repeated = link.repeat.iter().map(|repeat| repeat.tcp);
        let mut all = link.at.iter().map(|at| at.tcp).chain(repeated);
        all.any(|passage| passage.is_some())
    };
    if let Some(link) = scenario.links.iter().find(held) {
        let (name, file) = (&link.name, args.file.display());
        bail!("link {name}: the lab knows no `tcp`; use `cedos sim run {file}`");
    }
    match &args.over {
        Some(over) if over.is_multipath() => {
            if *over == KernelTransport::Mptcp {
                if scenario.origin == OriginKind::Nginx {
                    bail!("nginx takes TCP alone; for --over mptcp say origin = \"builtin\"");
                }
                scenario.origin = OriginKind::Builtin;
            }
            let world = World::build(scenario)?;
            world.use_multipath()?;
            Ok(world)
        }
        Some(KernelTransport::Tcp(link)) if !has_link(&scenario, link) => {
            bail!("the scenario has no link {link}");
        }
        Some(KernelTransport::First(links)) => {
            if let Some(link) = links.iter().find(|l| !has_link(&scenario, l)) {
                bail!("the scenario has no link {link}");
            }
            World::build(scenario)
        }
        _ => World::build(scenario),
    }
}

fn has_link(scenario: &Scenario, name: &str) -> bool {
    scenario.links.iter().any(|link| link.name == name)
}

/// The exit code is 0 if every point was reached and held.
fn strike(args: &KillArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start")?;
    Ok(match runtime.block_on(kill::run(args))? {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn tell(happening: &WorldEvent) {
    let what = match (happening.event.kind, happening.addresses) {
        (EventKind::Changed, _) => return, // A trace has too many of these.
        (EventKind::Up { .. }, Some(at)) => format!("up, {} {}", at.v4, at.v6),
        (EventKind::NewAddress { .. }, Some(at)) => format!("new address, {} {}", at.v4, at.v6),
        (EventKind::Attaching, _) => "attaching".to_owned(),
        (EventKind::Rebind, _) => "NAT rebinds".to_owned(),
        _ => "down".to_owned(),
    };
    print_stderr(&format!(
        "{:9.3} s  {:8} {what}",
        happening.at.as_secs_f64(),
        happening.link
    ));
}

/// Sets the environment of a command on the device: the origin's URLs for HTTP and HTTPS, the
/// authority for the latter, the proxy's address, the device's key, and the link classes.
fn environment(command: &mut Command, world: &World, prox: Option<&LabProx>) {
    let origin = origin_named(world);
    command
        .env("CEDOS_LINK_CLASS", link_classes(world.scenario()))
        .env("CEDOS_LAB_ORIGIN", &origin)
        .env(
            "CEDOS_LAB_ORIGIN_TLS",
            origin.replacen("http:", "https:", 1),
        );
    if let Some(web) = world.web() {
        command.env("CEDOS_LAB_CA", &web.ca);
    }
    if let Some(prox) = prox {
        command
            .env("CEDOS_LAB_PROX", prox.reached_by(world))
            .env(
                "CEDOS_LAB_HTTP_PROXY",
                format!("http://{}", tcp_port(world)),
            )
            .env("CEDOS_KEY_FILE", prox.key());
    }
}

fn run_command(world: &World, command: &[String], prox: Option<&LabProx>) -> anyhow::Result<bool> {
    let [program, arguments @ ..] = command else {
        bail!("no command")
    };
    let mut command = Command::new(program);
    command.args(arguments);
    environment(&mut command, world, prox);
    let offspring = ChildTracker::watch().context("what the command begins cannot be watched")?;
    let mut child = world.device().spawn(command)?;
    let end_at = Time::from_secs_f64(world.scenario().duration_s);
    let succeeded = loop {
        if let Some(status) = child.try_wait()? {
            break status.success();
        }
        if world.now() >= end_at || is_interrupted() {
            print_stderr(
                "lab: duration_s is over, or the run was interrupted; stopping the command",
            );
            end(&mut child);
            break false;
        }
        std::thread::sleep(LOOK);
    };
    offspring.end();
    Ok(succeeded)
}

/// The processes of `--at-origin`: a shell and its descendants, which are ended together.
struct Servers(Child);

impl Servers {
    fn begin(world: &World, script: &str) -> anyhow::Result<Servers> {
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0);
        // Standard output is for the report.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Ok(Servers(world.origin().spawn(command)?))
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        use nix::sys::signal::{Signal, killpg};
        let group = nix::unistd::Pid::from_raw(self.0.id() as i32);
        let _ = killpg(group, Signal::SIGTERM);
        end(&mut self.0);
        let _ = killpg(group, Signal::SIGKILL);
    }
}

/// Prints a summary. `by_command`: a command ran instead of the flows.
fn summarise(report: &RunReport, by_command: bool) {
    for link in &report.links {
        print_stderr(&format!(
            "link {:8} {:8} {:>12} bytes down {:>12} up   {} packets while down",
            link.name, link.class, link.bytes_down, link.bytes_up, link.packets_while_down
        ));
    }
    for switch in &report.switches {
        print_stderr(&format!(
            "switch at {:.3} s  {} to {}  silent for {:.1} ms",
            switch.at_s, switch.from, switch.to, switch.silence_ms
        ));
    }
    for flow in &report.flows {
        let when = flow
            .finished_s
            .map_or("not finished".to_owned(), |at| format!("done at {at:.3} s"));
        let seconds = |at: Option<f64>| at.map_or("not seen".to_owned(), |s| format!("{s:.3} s"));
        print_stderr(&format!(
            "flow {:8} {:>12} bytes  {when}, first byte {}, longest silence {}",
            flow.id,
            flow.bytes,
            seconds(flow.first_byte_s),
            seconds(flow.silence_max_s),
        ));
    }
    if let Some(podcasts) = &report.podcasts {
        let percent =
            |share: Option<f64>| share.map_or("-".to_owned(), |s| format!("{:.1} %", 100.0 * s));
        print_stderr(&format!(
            "podcasts {}: {} episodes, {} in time, {} of the played whole; by free links {}, the optimum {}; {} \
             switches, {} fetched again by a client that begins anew",
            podcasts.policy,
            podcasts.episodes.len(),
            percent(podcasts.in_time_share),
            percent(podcasts.heard_whole_share),
            percent(podcasts.free_share),
            percent(podcasts.optimum_free_share),
            podcasts.switches,
            percent(podcasts.restart_share),
        ));
    }
    for expectation in &report.expectations {
        let (mark, why) = if by_command && expectation.text.contains("flows") {
            ("not judged", "a command ran, and no flows")
        } else if expectation.holds {
            ("holds", "")
        } else {
            ("FAILS", &*expectation.why)
        };
        print_stderr(&format!("{mark}  {}  {why}", expectation.text));
    }
}
