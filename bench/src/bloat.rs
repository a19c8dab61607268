//! `cedos-bench bloat`: one bulk flow of each peer over a link with a deep queue, and how long
//! packets wait in it.
//!
//! ```text
//!  sender of peer n ──▶ net0 ─TUN─▶ lane n: queue, varying rate, delay ─TUN─▶ receiver of peer n
//!  server of objects ─────────────▶ the same queue ────────────────────────▶ fetches one after another
//! ```
//!
//! Every peer has its own link, like the first one of the scenario file. All have the same trace at
//! the same time, so they are measured at once. The round trip is that of the link's packets: the
//! link's own round trip, and the wait in both queues, from the first packet to the last.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cedos_lab_scenario::{Scenario, TextTable};
use cedos_terminal::print_stdout;
use serde::Serialize;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::bottleneck::Bottlenecks;
use crate::meter::MeterPlan;
use crate::peers::{self, BenchPeer};
use crate::placement::ProcessPlacement;
use crate::process::{self, Process, own_program};

/// Both processes of a flow start within this. // a guess: round trips of up to 0.8 s
const GRACE: Duration = Duration::from_secs(3);
/// An object that takes longer is given up.
const OBJECT_MAX: Duration = Duration::from_secs(30);

/// Options of `bench bloat`.
#[derive(clap::Args)]
pub struct BloatOptions {
    /// The scenario file whose first link is used
    #[arg(long)]
    scenario: PathBuf,
    /// A round trip instead of the file's
    #[arg(long)]
    rtt_ms: Option<f64>,
    /// Peers, separated by commas: those of `throughput`, and tcp-drwa, tcp-bbr-drwa, tcp-vegas,
    /// tcp-fixed-BYTES (receive buffer), tcp-shaped-KBPS, d2tp-drwa
    #[arg(long, value_delimiter = ',')]
    peers: Vec<String>,
    /// How long flows are counted, from the first byte
    #[arg(long, default_value_t = 40.0)]
    seconds: f64,
    /// Objects fetched over TCP beside each flow, at most one per second, begun between half and
    /// five sixths of the time; 0: none
    #[arg(long, default_value_t = 0)]
    objects: u32,
    /// Size of an object
    #[arg(long, default_value_t = 32_768)]
    object_bytes: u64,
    /// One JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
}

/// The results of one peer.
#[derive(Debug, Serialize)]
struct BloatRow {
    peer: String,
    /// Why there is no result.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<String>,
    mbps: Option<f64>,
    rtt_ms: Option<f64>,
    rtt_by_min: Option<f64>,
    object_ms: Option<f64>,
}

#[derive(Serialize)]
struct BloatRows {
    rtt_min_ms: f64,
    rows: Vec<BloatRow>,
}

/// Measures and prints.
///
/// # Errors
/// The scenario cannot be read, the network cannot be made, or a peer failed.
pub fn run(options: &BloatOptions) -> Result<()> {
    let peers: Vec<Box<dyn BenchPeer>> = (options.peers.iter())
        .map(|name| peers::named(name))
        .collect::<Result<_>>()?;
    let (present, missing): (Vec<_>, Vec<_>) =
        peers.into_iter().partition(|peer| peer.missing().is_none());
    ensure!(!present.is_empty(), "no peer is left");
    let scenario = scenario(options, present.len())?;
    let rtt_min_ms = scenario.rtt_ms();
    cedos_lab_emu::enter()?;
    let mut rows = measure(options, scenario, &present)?;
    rows.extend(missing.iter().map(|peer| BloatRow {
        peer: peer.name().to_owned(),
        missing: peer.missing(),
        mbps: None,
        rtt_ms: None,
        rtt_by_min: None,
        object_ms: None,
    }));
    if options.json {
        print_stdout(&serde_json::to_string(&BloatRows { rtt_min_ms, rows })?);
    } else {
        print(&rows);
    }
    Ok(())
}

/// A scenario with a link like the file's first one for each peer.
fn scenario(options: &BloatOptions, peers: usize) -> Result<Scenario> {
    let mut scenario = Scenario::load(&options.scenario)?;
    scenario.duration_s = 86_400.0;
    scenario.links.truncate(1);
    if let Some(rtt_ms) = options.rtt_ms {
        scenario.links[0].rtt_ms = Some(rtt_ms);
    }
    for lane in 1..peers {
        let mut link = scenario.links[0].clone();
        link.name = format!("lane{lane}");
        scenario.links.push(link);
    }
    Ok(scenario)
}

fn measure(
    options: &BloatOptions,
    scenario: Scenario,
    peers: &[Box<dyn BenchPeer>],
) -> Result<Vec<BloatRow>> {
    let rtt_min_ms = scenario.rtt_ms();
    let seconds = Duration::try_from_secs_f64(options.seconds).context("--seconds")?;
    let plan = MeterPlan {
        warm_up: Duration::ZERO,
        window: seconds,
        grace: GRACE,
        end_bytes: None,
    };
    let lanes = Bottlenecks::of(scenario)?;
    let server = (options.objects > 0)
        .then(|| serve_objects(options, &lanes))
        .transpose()?;
    let mut running = Vec::new();
    for (number, peer) in peers.iter().enumerate() {
        let lane = lanes.lane(number);
        let flow = process::start(peer.as_ref(), &lane, plan).with_context(|| peer.name())?;
        let objects = match &server {
            Some((_, at)) => Some(fetch_objects(options, &lane, *at)?),
            None => None,
        };
        running.push((flow, objects));
    }
    let mut rows = Vec::new();
    for (number, (((_, receiver), objects), peer)) in running.iter().zip(peers).enumerate() {
        let report = receiver
            .report(plan.patience())
            .with_context(|| peer.name())?;
        let objects: Option<Vec<f64>> = match objects {
            Some(process) => Some(process.hear(plan.patience() + OBJECT_MAX)?),
            None => None,
        };
        let rtt_ms = rtt_min_ms + lanes.waited_ms(number);
        rows.push(BloatRow {
            peer: peer.name().to_owned(),
            missing: None,
            mbps: Some(report.gbps() * 1e3),
            rtt_ms: Some(rtt_ms),
            rtt_by_min: Some(rtt_ms / rtt_min_ms),
            object_ms: objects
                .filter(|took| !took.is_empty())
                .map(|took| took.iter().sum::<f64>() / took.len() as f64),
        });
    }
    lanes.check()?;
    Ok(rows)
}

fn serve_objects(options: &BloatOptions, lanes: &Bottlenecks) -> Result<(Process, SocketAddr)> {
    let mut command = own_program("object-server")?;
    command
        .args(["--address", &Bottlenecks::sender_address().to_string()])
        .args(["--bytes", &options.object_bytes.to_string()]);
    let server = Process::new(lanes.senders().spawn(command)?, "server of objects")?;
    let at = server.hear(Duration::from_secs(10))?;
    Ok((server, at))
}

fn fetch_objects(
    options: &BloatOptions,
    lane: &dyn ProcessPlacement,
    server: SocketAddr,
) -> Result<Process> {
    let mut command = own_program("object-fetch")?;
    command
        .args(["--from", &lane.receiver_address().to_string()])
        .args(["--server", &server.to_string()])
        .args(["--bytes", &options.object_bytes.to_string()])
        .args(["--count", &options.objects.to_string()])
        .args(["--after-s", &(options.seconds / 2.0).to_string()])
        .args(["--until-s", &(options.seconds * 5.0 / 6.0).to_string()])
        .stderr(Stdio::inherit());
    Process::new(lane.start_receiver(command)?, "fetcher of objects")
}

/// Options of the server of objects.
#[derive(clap::Args)]
pub struct BloatServerOptions {
    #[arg(long)]
    address: IpAddr,
    #[arg(long)]
    bytes: u64,
}

/// Sends an object to each client that requests it with one byte.
pub fn serve(options: &BloatServerOptions) -> Result<()> {
    let listener = TcpListener::bind((options.address, 0))?;
    SockRef::from(&listener).set_tcp_congestion(b"cubic")?;
    process::tell(&listener.local_addr()?)?;
    let object = vec![0x5a; usize::try_from(options.bytes)?];
    for stream in listener.incoming() {
        let (mut stream, object) = (stream?, object.clone());
        std::thread::spawn(move || {
            // A client that disconnects early is ignored.
            let _ = stream
                .read_exact(&mut [0])
                .and_then(|()| stream.write_all(&object));
        });
    }
    Ok(())
}

/// Options of the client of the server of objects.
#[derive(clap::Args)]
pub struct FetchOptions {
    #[arg(long)]
    from: IpAddr,
    #[arg(long)]
    server: SocketAddr,
    #[arg(long)]
    bytes: u64,
    #[arg(long)]
    count: u32,
    #[arg(long)]
    after_s: f64,
    #[arg(long)]
    until_s: f64,
}

/// Fetches objects, each over its own connection, and prints how long each took, in milliseconds.
pub fn fetch(options: &FetchOptions) -> Result<()> {
    std::thread::sleep(Duration::try_from_secs_f64(options.after_s)?);
    let begun = Instant::now();
    let mut took = Vec::new();
    for n in 0..options.count {
        std::thread::sleep(Duration::from_secs(u64::from(n)).saturating_sub(begun.elapsed()));
        if options.after_s + begun.elapsed().as_secs_f64() >= options.until_s {
            break;
        }
        let asked = Instant::now();
        let got = fetch_one(options).with_context(|| format!("object {n}"))?;
        ensure!(got == options.bytes, "object {n} has {got} bytes");
        took.push(asked.elapsed().as_secs_f64() * 1e3);
    }
    process::tell(&took)
}

fn fetch_one(options: &FetchOptions) -> Result<u64> {
    let socket = Socket::new(
        Domain::for_address(options.server),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.bind(&SocketAddr::new(options.from, 0).into())?;
    socket.connect_timeout(&options.server.into(), OBJECT_MAX)?;
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(OBJECT_MAX))?;
    stream.set_nodelay(true)?;
    stream.write_all(&[1])?;
    Ok(std::io::copy(&mut stream, &mut std::io::sink())?)
}

fn print(rows: &[BloatRow]) {
    let mut table = TextTable::with_notes(["", "Mb/s", "RTT ms", "by min", "object ms", ""]);
    let cell = |figure: Option<f64>, digits: usize| {
        figure.map_or("-".to_owned(), |figure| format!("{figure:.digits$}"))
    };
    for row in rows {
        table.row([
            row.peer.to_owned(),
            cell(row.mbps, 2),
            cell(row.rtt_ms, 0),
            cell(row.rtt_by_min, 2),
            cell(row.object_ms, 0),
            row.missing.clone().unwrap_or_default(),
        ]);
    }
    print_stdout(&table.to_text());
}
