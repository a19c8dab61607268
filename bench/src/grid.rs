//! `cedos-bench grid`: one flow over round trips, random losses and queues, with every congestion
//! control of D2TP, the kernel's TCP, and quinn.
//!
//! In a cell every peer has its own bottleneck and all run at the same time, so that other load of
//! the machine affects all of them. The next round gives them other bottlenecks, because random
//! losses belong to the bottlenecks.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use cedos_terminal::{print_stderr, print_stdout};

use crate::bottleneck::{BottleneckShape, Bottlenecks};
use crate::grid_report::{Grid, GridCell};
use crate::meter::MeterPlan;
use crate::peers::{self, BenchPeer};
use crate::process;

/// The peers of the grid, D2TP first.
const PEERS: [&str; 6] = [
    "d2tp",
    "d2tp-newreno",
    "d2tp-bbr",
    "tcp",
    "tcp-bbr",
    "quinn",
];

/// How long both ends continue after their window: the longest round trip with the deepest queue
/// full is a second.
const GRACE: Duration = Duration::from_millis(1500);

/// Options of `bench grid`.
#[derive(clap::Args)]
pub struct GridOptions {
    /// Round trips without queueing, in milliseconds
    #[arg(long, value_delimiter = ',', default_value = "10,50,200")]
    rtt_ms: Vec<f64>,
    /// Random losses of data packets, in per cent
    #[arg(long, value_delimiter = ',', default_value = "0,0.1,1,3")]
    loss: Vec<f64>,
    /// Queues, in bandwidth-delay products
    #[arg(long, value_delimiter = ',', default_value = "0.5,1,4")]
    queue_bdp: Vec<f64>,
    /// Rate of each bottleneck
    #[arg(long, default_value_t = 20.0)]
    mbps: f64,
    /// How long is counted
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// The time between a flow's first byte and the counting
    #[arg(long, default_value_t = 2.0)]
    warm_up: f64,
    /// Times each cell is measured; the table gives medians
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// The number of the first round, which determines the random losses
    #[arg(long, default_value_t = 1)]
    first_round: usize,
    /// Peers, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = PEERS.map(String::from))]
    peers: Vec<String>,
    /// Earlier results of the same grid (from --json) to put in the same table
    #[arg(long)]
    with: Vec<std::path::PathBuf>,
    /// One JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
///
/// # Errors
/// The network cannot be made, or a peer failed.
pub fn run(options: &GridOptions) -> Result<()> {
    let peers: Vec<Box<dyn BenchPeer>> = (options.peers.iter())
        .map(|name| peers::named(name))
        .collect::<Result<_>>()?;
    let (peers, missing): (Vec<_>, Vec<_>) =
        peers.into_iter().partition(|peer| peer.missing().is_none());
    for peer in &missing {
        let why = peer.missing().unwrap_or_default();
        print_stderr(&format!("{} left out: {why}", peer.name()));
    }
    if peers.is_empty() && options.rounds > 0 {
        bail!("no peer is left");
    }
    cedos_lab_emu::enter()?;
    let plan = MeterPlan {
        warm_up: Duration::try_from_secs_f64(options.warm_up).context("--warm-up")?,
        window: Duration::try_from_secs_f64(options.seconds).context("--seconds")?,
        grace: GRACE,
        end_bytes: None,
    };
    let mut grid = Grid::new(options.mbps, options.seconds, options.warm_up);
    for file in &options.with {
        let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
        grid.take_in(serde_json::from_str(&text).with_context(|| file.display().to_string())?)?;
    }
    let cells: Vec<BottleneckShape> = shapes(options);
    for round in options.first_round..options.first_round + options.rounds {
        for (number, shape) in cells.iter().enumerate() {
            let rates = measure(shape, &peers, plan, round).with_context(|| shape.in_words())?;
            let said: Vec<_> = (peers.iter().zip(&rates))
                .map(|(peer, mbps)| format!("{} {mbps:.2}", peer.name()))
                .collect();
            print_stderr(&format!(
                "round {round}, cell {}/{}: RTT {} ms, loss {} %, queue {} BDP: {}",
                number + 1,
                cells.len(),
                shape.rtt_ms,
                shape.loss * 100.0,
                shape.queue_bdp,
                said.join(", ")
            ));
            let cell = GridCell::of(shape);
            for (peer, mbps) in peers.iter().zip(rates) {
                grid.add(cell, peer.name(), mbps);
            }
        }
    }
    if options.json {
        print_stdout(&serde_json::to_string(&grid.to_json())?);
    } else {
        print_stdout(grid.to_string().trim_end());
    }
    Ok(())
}

fn shapes(options: &GridOptions) -> Vec<BottleneckShape> {
    let mut all = Vec::new();
    for rtt_ms in &options.rtt_ms {
        for loss in &options.loss {
            for queue_bdp in &options.queue_bdp {
                all.push(BottleneckShape {
                    mbps: options.mbps,
                    rtt_ms: *rtt_ms,
                    loss: loss / 100.0,
                    queue_bdp: *queue_bdp,
                });
            }
        }
    }
    all
}

/// Measures the payload rates of all peers at once, in Mb/s.
fn measure(
    shape: &BottleneckShape,
    peers: &[Box<dyn BenchPeer>],
    plan: MeterPlan,
    round: usize,
) -> Result<Vec<f64>> {
    let bottlenecks = Bottlenecks::make(shape, peers.len(), round as u64)?;
    let mut running = Vec::new();
    for (number, peer) in peers.iter().enumerate() {
        let lane = bottlenecks.lane((number + round) % peers.len());
        let flow = process::start(peer.as_ref(), &lane, plan);
        running.push(flow.with_context(|| peer.name())?);
    }
    let mut rates = Vec::new();
    // Senders are not asked: a sender that has written much to a slow path may find that its
    // receiver has ended.
    for ((_, receiver), peer) in running.iter().zip(peers) {
        let received = receiver
            .report(plan.patience())
            .with_context(|| peer.name())?;
        rates.push(received.gbps() * 1e3);
    }
    bottlenecks.check()?;
    Ok(rates)
}
