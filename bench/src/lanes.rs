//! `cedos-bench lanes`: a flow over each link of a scenario, all at once.
//!
//! ```text
//!  sender of flow n ──▶ net0 ─TUN─▶ link n, with the events of the scenario ─TUN─▶ receiver of flow n
//! ```
//!
//! The events of a link begin with the run; flows begin one after another, as fast as processes
//! start; the result of each has the time of its first byte.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cedos_lab_scenario::Scenario;
use cedos_terminal::print_stdout;
use serde::Serialize;

use crate::bottleneck::Bottlenecks;
use crate::meter::MeterPlan;
use crate::peers;
use crate::process::{self, Process};

/// How long a sender continues after its receiver's window: the first byte takes at most that long.
const GRACE: Duration = Duration::from_secs(3); // a guess
/// How long to wait for a first byte: processes start one after another.
const FIRST_BYTE_MAX: Duration = Duration::from_secs(30);

/// Options of `bench lanes`.
#[derive(clap::Args)]
pub struct LinkFlowsOptions {
    /// The scenario file; its links are without a NAT
    #[arg(long)]
    scenario: PathBuf,
    /// The peer of each link, in the file's order, separated by commas: those of `throughput` and `bloat`
    #[arg(long, value_delimiter = ',')]
    peers: Vec<String>,
    /// How long flows are counted, from the first byte
    #[arg(long, default_value_t = 40.0)]
    seconds: f64,
    /// One JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
}

/// The results of one flow.
#[derive(Debug, Serialize)]
struct LinkFlowRow {
    link: String,
    peer: String,
    /// When the flow's first byte arrived, in the run's time.
    from_s: f64,
    mbps: f64,
    /// The average round trip of the link's packets, with the link's round trip at the start.
    rtt_ms: f64,
}

#[derive(Serialize)]
struct LinkFlowRows {
    rows: Vec<LinkFlowRow>,
}

/// Measures one flow on each link of a scenario, and prints the results.
///
/// # Errors
/// The scenario cannot be read, the network cannot be made, or a peer failed.
pub fn run(options: &LinkFlowsOptions) -> Result<()> {
    let mut scenario = Scenario::load(&options.scenario)?;
    ensure!(
        options.peers.len() == scenario.links.len(),
        "{} peers for {} links",
        options.peers.len(),
        scenario.links.len()
    );
    scenario.duration_s = 86_400.0;
    cedos_lab_emu::enter()?;
    let rows = measure(options, scenario)?;
    if options.json {
        print_stdout(&serde_json::to_string(&LinkFlowRows { rows })?);
    } else {
        for row in rows {
            print_stdout(&format!(
                "  {:16} {:16} {:8.3} Mb/s",
                row.link, row.peer, row.mbps
            ));
        }
    }
    Ok(())
}

fn measure(options: &LinkFlowsOptions, scenario: Scenario) -> Result<Vec<LinkFlowRow>> {
    let plan = MeterPlan {
        warm_up: Duration::ZERO,
        window: Duration::try_from_secs_f64(options.seconds).context("--seconds")?,
        grace: GRACE,
        end_bytes: None,
    };
    let (names, rtt_ms): (Vec<_>, Vec<_>) = (scenario.links.iter())
        .map(|link| (link.name.clone(), link.rtt_ms.unwrap_or(0.0)))
        .unzip();
    let lanes = Bottlenecks::of(scenario)?;
    let begun = Instant::now();
    let mut running = Vec::new();
    for (number, name) in options.peers.iter().enumerate() {
        let peer = peers::named(name)?;
        let flow = process::start(peer.as_ref(), &lanes.lane(number), plan).context(peer.name())?;
        running.push(flow);
    }
    // Each has its own thread: the time of its report shows when its first byte came.
    let reports: Vec<_> = thread::scope(|scope| {
        let hear = |(sender, receiver): (Process, Process)| {
            scope.spawn(move || {
                let report = receiver.report(plan.patience() + FIRST_BYTE_MAX);
                drop(sender);
                (report, begun.elapsed())
            })
        };
        let heard: Vec<_> = running.into_iter().map(hear).collect();
        let join = |heard: thread::ScopedJoinHandle<'_, _>| heard.join().expect("no panics");
        heard.into_iter().map(join).collect()
    });
    let mut rows = Vec::new();
    for (number, (report, at)) in reports.into_iter().enumerate() {
        let peer = &options.peers[number];
        let report = report.with_context(|| peer.clone())?;
        rows.push(LinkFlowRow {
            link: names[number].clone(),
            peer: peer.clone(),
            from_s: at.saturating_sub(plan.window + plan.grace).as_secs_f64(),
            mbps: report.gbps() * 1e3,
            rtt_ms: rtt_ms[number] + lanes.waited_ms(number),
        });
    }
    lanes.check()?;
    Ok(rows)
}
