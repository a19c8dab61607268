//! `cedos-bench throughput`: the selection of peers and networks, the number of rounds, and their
//! order.
//!
//! Rounds are interleaved: every peer once, then every peer again. If the machine slows down for a
//! while, all peers slow down, and the ratios stay the same.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use cedos_terminal::{print_stderr, print_stdout};
use clap::ValueEnum;

use crate::meter::{GRACE_ON_ONE_MACHINE, MeterPlan};
use crate::network::{self, BenchNetwork, BenchNetworkKind};
use crate::peers::{self, BenchPeer};
use crate::placement::{RECEIVER_CORE, SENDER_CORE};
use crate::process;
use crate::table::{BenchRound, BenchTable};

/// From the first byte to the measuring window: slow start and path MTU discovery are over by then
/// on networks whose round trip is far below a millisecond.
const WARM_UP: Duration = Duration::from_secs(1);
/// A shorter window measures the scheduler.
const WINDOW_MIN: Duration = Duration::from_millis(100);

/// Options of `bench throughput`.
#[derive(clap::Args)]
pub struct ThroughputOptions {
    /// Networks, separated by commas; `all` for every one
    #[arg(long, value_delimiter = ',', default_value = "all")]
    net: Vec<String>,
    /// Times each peer is measured on each network; the table gives the median and the spread
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Length of the measuring window; a second of warm-up comes before it
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Peers, separated by commas; `all`, or nothing, for every one of this build
    #[arg(long, value_delimiter = ',', num_args = 0..=1, default_value = "all", default_missing_value = "all")]
    peers: Vec<String>,
    /// One JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
///
/// # Errors
/// A network cannot be made, or a peer fails in every round; the error names them. A single failed
/// round is a line below the table.
pub fn run(options: &ThroughputOptions) -> Result<()> {
    let kinds = chosen_networks(&options.net)?;
    let peers = chosen_peers(&options.peers)?;
    if options.rounds == 0 {
        bail!("--rounds 0 measures nothing");
    }
    let window = Duration::try_from_secs_f64(options.seconds).context("--seconds")?;
    if window < WINDOW_MIN {
        bail!("--seconds must be at least {}", WINDOW_MIN.as_secs_f64());
    }
    let cores = std::thread::available_parallelism()?.get();
    if cores < 2 {
        bail!("the two processes need two cores (0 and 1) and this machine offers {cores}");
    }
    network::enter_user_namespace()?;

    let plan = MeterPlan {
        warm_up: WARM_UP,
        window,
        grace: GRACE_ON_ONE_MACHINE,
        end_bytes: None,
    };
    let mut table = BenchTable::new(format!(
        "one flow, two processes: sender on core {SENDER_CORE}, receiver on core {RECEIVER_CORE}; \
         {} round(s) of {} s after {} s of warm-up, interleaved",
        options.rounds,
        options.seconds,
        WARM_UP.as_secs(),
    ));
    for kind in kinds {
        let network = BenchNetwork::make(kind)?;
        table.note_network(kind.name(), network.notes.clone());
        for round in 1..=options.rounds {
            for peer in &peers {
                let (sent, received) = match process::measure(peer.as_ref(), &network, plan) {
                    Ok(reports) => reports,
                    Err(error) => {
                        print_stderr(&format!(
                            "{} round {round}/{}: {:<9} FAILED: {error:#}",
                            kind.name(),
                            options.rounds,
                            peer.name(),
                        ));
                        table.add_failure(peer.name(), kind.name(), format!("{error:#}"));
                        continue;
                    }
                };
                print_stderr(&format!(
                    "{} round {round}/{}: {:<9} {:6.2} Gb/s",
                    kind.name(),
                    options.rounds,
                    peer.name(),
                    received.gbps()
                ));
                table.add(peer.name(), kind.name(), BenchRound { sent, received });
            }
        }
    }
    if options.json {
        print_stdout(&serde_json::to_string(&table.rows())?);
    } else {
        print_stdout(table.to_string().trim_end());
    }
    match table.never_measured() {
        absent if absent.is_empty() => Ok(()),
        absent => bail!("no round succeeded for {}", absent.join(", ")),
    }
}

fn chosen_networks(names: &[String]) -> Result<Vec<BenchNetworkKind>> {
    let every = BenchNetworkKind::value_variants();
    if names.iter().any(|name| name == "all") {
        return Ok(every.to_vec());
    }
    names
        .iter()
        .map(|name| {
            every
                .iter()
                .find(|kind| kind.name() == name)
                .copied()
                .with_context(|| {
                    let known: Vec<_> = every.iter().map(|kind| kind.name()).collect();
                    format!("no network is called {name:?}: {} or all", known.join(", "))
                })
        })
        .collect()
}

fn chosen_peers(names: &[String]) -> Result<Vec<Box<dyn BenchPeer>>> {
    if names.iter().any(|name| name == "all") {
        let (able, unable): (Vec<_>, Vec<_>) = peers::all()
            .into_iter()
            .partition(|peer| peer.missing().is_none());
        for peer in unable {
            print_stderr(&format!(
                "{} left out: {}",
                peer.name(),
                peer.missing().unwrap_or_default()
            ));
        }
        return Ok(able);
    }
    let chosen: Vec<_> = names
        .iter()
        .map(|name| peers::named(name))
        .collect::<Result<_>>()?;
    match chosen.iter().find_map(|peer| peer.missing()) {
        Some(reason) => bail!(reason),
        None => Ok(chosen),
    }
}
