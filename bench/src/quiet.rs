//! `cedos-bench quiet`: the activity of idle devices and servers: packets on the wire and wake-ups
//! of the processes.
//!
//! ```text
//!  for each case: a namespace ── lo ── counts packets
//!                   ├─ server process ┐ threads' context switches: each is a time it ran again
//!                   └─ device process ┘
//! ```
//!
//! Both are read from outside, so that counting wakes neither. Counting begins when both are quiet:
//! half a minute after the last action, or after the configured time.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cedos_lab_scenario::TextTable;
use cedos_terminal::print_stdout;
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, FlowSettings, LinkUse, ProvidedLink, ProvidedLinks,
    SecretKey, ServerAddress,
};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::handshake_server::HandshakeServerProcess;
use crate::network::{self, BenchNetwork, BenchNetworkKind};
use crate::placement::ProcessPlacement as _;

/// Options of `bench quiet`.
#[derive(clap::Args)]
pub struct QuietOptions {
    /// How long each case is observed; all run at the same time
    #[arg(long, default_value_t = 2.0)]
    minutes: f64,
    /// Seconds before counting begins: a server becomes silent 15 s after the last packet that it
    /// received
    #[arg(long, default_value_t = 30.0)]
    settle_s: f64,
    /// One JSON object on standard output instead of a table
    #[arg(long)]
    json: bool,
}

/// Options of the hidden verb that runs a device at rest.
#[derive(clap::Args)]
pub struct DeviceArgs {
    #[arg(long)]
    server: SocketAddr,
    #[arg(long)]
    case: QuietCase,
}

/// The state of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum QuietCase {
    /// Established, with a path, without a flow.
    Idle,
    /// An idle session whose device wants to stay reachable: a packet every 25 s for the NAT.
    Reachable,
    /// A flow is open and its bytes do not arrive: the device probes whether the path works.
    Waiting,
    /// A flow is open and the device has no link.
    Suspended,
    /// An idle session that the server has hibernated.
    Hibernated,
}

const CASES: [QuietCase; 5] = [
    QuietCase::Idle,
    QuietCase::Reachable,
    QuietCase::Waiting,
    QuietCase::Suspended,
    QuietCase::Hibernated,
];

#[derive(Clone, Copy, Debug, Serialize)]
struct QuietCounts {
    packets: u64,
    device_wakeups: u64,
    server_wakeups: u64,
}

#[derive(Debug, Serialize)]
struct QuietRow {
    case: QuietCase,
    #[serde(flatten)]
    counts: QuietCounts,
    packets_per_minute: f64,
    device_wakeups_per_minute: f64,
    server_wakeups_per_minute: f64,
}

#[derive(Debug, Serialize)]
struct QuietOutcome {
    minutes: f64,
    settle_s: f64,
    rows: Vec<QuietRow>,
}

/// Two processes and their namespace.
struct QuietPair {
    case: QuietCase,
    device: Device1,
    serving: HandshakeServerProcess,
    _network: BenchNetwork,
    _dir: tempfile::TempDir,
}

/// The device's process; ended when this is dropped.
struct Device1(Child);

impl Drop for Device1 {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Counts and prints.
///
/// # Errors
/// A process or a namespace fails.
pub fn run(options: &QuietOptions) -> Result<()> {
    network::enter_user_namespace()?;
    let watched: Vec<QuietPair> = CASES.into_iter().map(begin).collect::<Result<_>>()?;
    std::thread::sleep(Duration::try_from_secs_f64(options.settle_s)?);
    let before: Vec<QuietCounts> = watched.iter().map(count).collect::<Result<_>>()?;
    std::thread::sleep(Duration::try_from_secs_f64(options.minutes * 60.0)?);
    let mut rows = Vec::new();
    for (watched, before) in watched.iter().zip(before) {
        let after = count(watched)?;
        let counts = QuietCounts {
            packets: after.packets - before.packets,
            device_wakeups: after.device_wakeups - before.device_wakeups,
            server_wakeups: after.server_wakeups - before.server_wakeups,
        };
        let per_minute = |n: u64| n as f64 / options.minutes;
        rows.push(QuietRow {
            case: watched.case,
            counts,
            packets_per_minute: per_minute(counts.packets),
            device_wakeups_per_minute: per_minute(counts.device_wakeups),
            server_wakeups_per_minute: per_minute(counts.server_wakeups),
        });
    }
    // Check that all still run: an ended process has no wake-ups.
    for mut watched in watched {
        let figures = watched.serving.figures()?;
        let asleep = usize::from(watched.case == QuietCase::Hibernated);
        let as_meant = (figures.awake, figures.asleep) == (1 - asleep, asleep);
        ensure!(
            as_meant,
            "{:?} is not what it should be: {figures:?}",
            watched.case
        );
        ensure!(
            watched.device.0.try_wait()?.is_none(),
            "the device of {:?} ended",
            watched.case
        );
    }
    let outcome = QuietOutcome {
        minutes: options.minutes,
        settle_s: options.settle_s,
        rows,
    };
    if options.json {
        print_stdout(&serde_json::to_string(&outcome)?);
    } else {
        print_stdout(&format!("in {} min\n", outcome.minutes));
        let mut table = TextTable::new(["", "packets", "wake-ups: device", "server"]);
        for row in &outcome.rows {
            let counts = row.counts;
            table.row([
                format!("{:?}", row.case).to_lowercase(),
                counts.packets.to_string(),
                counts.device_wakeups.to_string(),
                counts.server_wakeups.to_string(),
            ]);
        }
        print_stdout(&table.to_text());
    }
    Ok(())
}

fn begin(case: QuietCase) -> Result<QuietPair> {
    let network = BenchNetwork::make(BenchNetworkKind::Lo1500)?;
    let dir = tempfile::tempdir()?;
    let sleep_after = match case {
        QuietCase::Hibernated => Duration::from_secs(1),
        _ => Duration::from_secs(24 * 3600),
    };
    let serving = HandshakeServerProcess::start_as(
        |command| network.start_receiver(command),
        &dir.path().join("journal"),
        "127.0.0.1:0".parse()?,
        sleep_after,
        d2tp_session::EndpointConfig::default().cookie_above,
    )?;
    let mut command = Command::new(std::env::current_exe()?);
    let case_name = format!("{case:?}").to_lowercase();
    command
        .arg("quiet-device")
        .args(["--server", &serving.address.to_string()])
        .args(["--case", &case_name])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = network.start_sender(command)?;
    let mut line = String::new();
    let stdout = child.stdout.take().expect("piped above");
    let device = Device1(child);
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(
        line == "quiet\n",
        "the device of {case:?} ended; its error is above"
    );
    Ok(QuietPair {
        case,
        device,
        serving,
        _network: network,
        _dir: dir,
    })
}

fn count(watched: &QuietPair) -> Result<QuietCounts> {
    let device = watched.device.0.id();
    Ok(QuietCounts {
        packets: packets(device)?,
        device_wakeups: wakeups(device)?,
        server_wakeups: wakeups(watched.serving.pid())?,
    })
}

/// Packets that `lo` of the process's namespace carried.
fn packets(pid: u32) -> Result<u64> {
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/dev"))?;
    let lo = table.lines().find_map(|l| l.trim().strip_prefix("lo:"));
    let carried = lo.and_then(|l| l.split_whitespace().nth(1));
    Ok(carried.context("no lo in /proc/PID/net/dev")?.parse()?)
}

/// The number of times that threads of the process gave up the processor, which equals the times
/// they got it.
fn wakeups(pid: u32) -> Result<u64> {
    let mut all = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(task?.path().join("status"))?;
        let counts = status
            .lines()
            .filter_map(|l| l.split_once("voluntary_ctxt_switches:"));
        for (_, count) in counts {
            all += count.trim().parse::<u64>()?;
        }
    }
    Ok(all)
}

/// The device's process: performs the actions of the case, then nothing.
///
/// # Errors
/// The server cannot be reached.
pub fn device(args: &DeviceArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let links = ProvidedLinks::new();
        let options = DeviceOptions {
            server: ServerAddress::new(
                args.server.ip().to_string(),
                args.server.port(),
                HandshakeServerProcess::key(),
            ),
            key: SecretKey::from_bytes([7; 32]),
            config: EndpointConfig::default(),
        };
        let mut device = Device::with_attach(options, links.clone()).await?;
        device.follow_links(links.subscribe(), |_| LinkUse::Free);
        links.add(ProvidedLink::new("wifi", args.server.ip()));
        let mut flow = device.open(FlowSettings {
            within: Some(Duration::from_secs(6 * 3600)),
            reachable: args.case == QuietCase::Reachable,
            ..FlowSettings::default()
        })?;
        match args.case {
            // Sends an unfinished request: the server has nothing to send and the flow stays open.
            QuietCase::Reachable | QuietCase::Waiting => flow.write_all(&[0; 4]).await?,
            QuietCase::Idle => {
                flow.write_all(&1_u64.to_be_bytes()).await?;
                flow.shutdown().await?;
                let mut all = Vec::new();
                flow.read_to_end(&mut all).await?;
            }
            QuietCase::Suspended | QuietCase::Hibernated => {
                flow.write_all(&1_u64.to_be_bytes()).await?;
                flow.shutdown().await?;
                let mut first = [0; 64];
                flow.read_exact(&mut first).await?;
                links.remove("wifi");
            }
        }
        print_stdout("quiet");
        std::io::stdout().flush()?;
        // Wait until the parent ends this process.
        std::future::pending::<()>().await;
        drop((flow, device));
        Ok(())
    })
}
