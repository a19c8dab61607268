//! `cedos-bench fairness`: many flows on one bottleneck, all ending on one device.
//!
//! Congestion controllers compete: TCP connections and D2TP sessions, regardless of the number of
//! flows (docs/decisions/0007). So Jain's index is taken over those, and if a session carries many
//! flows, also over its flows.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use cedos_lab_scenario::TextTable;
use cedos_terminal::{print_stderr, print_stdout};
use serde::Serialize;

use crate::bottleneck::{BottleneckShape, Bottlenecks};
use crate::fairness_flows::{FlowBytes, SourceCard};
use crate::jain;
use crate::median::{median, spread};
use crate::process::{Process, own_program};

/// How much longer than its plan a process may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// The competitors on the bottleneck.
#[derive(Clone, Copy, Debug)]
struct FairnessCase {
    name: &'static str,
    /// The number of flows in ten that are TCP.
    tcp_tenths: usize,
    one_session: bool,
    /// Paths of each session, all over the bottleneck.
    paths: usize,
}

const CASES: [FairnessCase; 6] = [
    FairnessCase {
        name: "tcp",
        tcp_tenths: 10,
        one_session: false,
        paths: 1,
    },
    FairnessCase {
        name: "d2tp",
        tcp_tenths: 0,
        one_session: false,
        paths: 1,
    },
    FairnessCase {
        name: "mixed",
        tcp_tenths: 5,
        one_session: false,
        paths: 1,
    },
    FairnessCase {
        name: "d2tp-one-session",
        tcp_tenths: 0,
        one_session: true,
        paths: 1,
    },
    FairnessCase {
        name: "mixed-one-session",
        tcp_tenths: 5,
        one_session: true,
        paths: 1,
    },
    FairnessCase {
        name: "mixed-two-paths",
        tcp_tenths: 5,
        one_session: false,
        paths: 2,
    },
];

/// Options of `bench fairness`.
#[derive(clap::Args)]
pub struct FairnessOptions {
    /// Cases, separated by commas: tcp, d2tp, mixed, d2tp-one-session, mixed-one-session,
    /// mixed-two-paths, or all
    #[arg(long, value_delimiter = ',', default_value = "all")]
    cases: Vec<String>,
    /// The total number of flows; in mixed cases half of them are TCP
    #[arg(long, default_value_t = 100)]
    flows: usize,
    /// Times each case is measured; the table gives medians
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// How long flows are counted
    #[arg(long, default_value_t = 30.0)]
    seconds: f64,
    /// The time between the last opening and the counting
    #[arg(long, default_value_t = 10.0)]
    warm_up: f64,
    /// Rate of the bottleneck
    #[arg(long, default_value_t = 100.0)]
    mbps: f64,
    /// Round trip without queueing
    #[arg(long, default_value_t = 40.0)]
    rtt_ms: f64,
    /// Queue, in bandwidth-delay products
    #[arg(long, default_value_t = 1.0)]
    queue_bdp: f64,
    /// Write a log of the senders' sessions into this folder (docs/qlog.md)
    #[arg(long, value_name = "DIR")]
    qlog: Option<std::path::PathBuf>,
    /// One JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
}

/// The results of one round of a case.
#[derive(Clone, Debug)]
struct FairnessRound {
    jain: f64,
    jain_in_session: Option<f64>,
    tcp_share: f64,
    mbps: f64,
    queue_full: f64,
}

#[derive(Debug, Serialize)]
struct FairnessRow {
    case: &'static str,
    /// Jain's index over the congestion controllers: connections and sessions. Median.
    jain: f64,
    /// The share of TCP in all bytes. Median.
    tcp_share: f64,
    /// Jain's index over the flows of the one session that carries many.
    #[serde(skip_serializing_if = "Option::is_none")]
    jain_in_session: Option<f64>,
    jain_range: (f64, f64),
    tcp_share_range: (f64, f64),
    /// The payload rate of all flows together.
    mbps: f64,
    /// The share of offered data packets that the full queue dropped.
    queue_full: f64,
    tcp: usize,
    sessions: usize,
    d2tp_flows: usize,
    paths_per_session: usize,
    rounds: usize,
}

#[derive(Debug, Serialize)]
struct FairnessRows {
    rows: Vec<FairnessRow>,
    network: String,
    conditions: String,
}

/// Measures and prints.
///
/// # Errors
/// The network cannot be made, or a case failed.
pub fn run(options: &FairnessOptions) -> Result<()> {
    if options.rounds == 0 || options.flows < 2 {
        bail!("there must be a round, and two flows at least");
    }
    let cases = chosen(&options.cases)?;
    // Before any thread exists.
    cedos_lab_emu::enter()?;
    let shape = BottleneckShape {
        mbps: options.mbps,
        rtt_ms: options.rtt_ms,
        loss: 0.0,
        queue_bdp: options.queue_bdp,
    };
    let mut measured: Vec<Vec<FairnessRound>> = vec![Vec::new(); cases.len()];
    for round in 1..=options.rounds {
        for (case, rounds) in cases.iter().zip(&mut measured) {
            let got = measure(case, options, &shape)
                .with_context(|| format!("case {}, round {round}", case.name))?;
            print_stderr(&format!(
                "round {round}/{}: {:18} jain {:.3}  tcp share {:.3}  {:.1} Mb/s",
                options.rounds, case.name, got.jain, got.tcp_share, got.mbps
            ));
            rounds.push(got);
        }
    }
    let rows = FairnessRows {
        rows: (cases.iter().zip(&measured))
            .map(|(case, rounds)| FairnessRow::of(case, options, rounds))
            .collect(),
        network: shape.in_words(),
        conditions: format!(
            "counted for {} s after {} s; TCP and D2TP with CUBIC; connections opened within 2 s, \
             kinds in turn; jain over congestion controllers (a TCP connection, a D2TP session)",
            options.seconds, options.warm_up
        ),
    };
    if options.json {
        print_stdout(&serde_json::to_string(&rows)?);
    } else {
        print(&rows);
    }
    Ok(())
}

fn chosen(names: &[String]) -> Result<Vec<FairnessCase>> {
    if names.iter().any(|name| name == "all") {
        return Ok(CASES.to_vec());
    }
    let known = || CASES.map(|case| case.name).join(", ");
    names
        .iter()
        .map(|name| {
            CASES
                .into_iter()
                .find(|case| case.name == name)
                .with_context(|| format!("no case is called {name:?}: {} or all", known()))
        })
        .collect()
}

impl FairnessCase {
    fn tcp(&self, flows: usize) -> usize {
        flows * self.tcp_tenths / 10
    }
    fn d2tp(&self, flows: usize) -> usize {
        flows - self.tcp(flows)
    }
    fn sessions(&self, flows: usize) -> usize {
        if self.one_session {
            1
        } else {
            self.d2tp(flows)
        }
    }
}

fn measure(
    case: &FairnessCase,
    options: &FairnessOptions,
    shape: &BottleneckShape,
) -> Result<FairnessRound> {
    let bottleneck = Bottlenecks::make(shape, 1, 1)?;
    let mut source = own_program("fairness-source")?;
    source.args(["--address", &Bottlenecks::sender_address().to_string()]);
    if let Some(folder) = &options.qlog {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        source.arg("--qlog").arg(folder);
    }
    let source = Process::new(bottleneck.senders().spawn(source)?, "source")?;
    let card: SourceCard = source.hear(PATIENCE)?;
    let (tcp, sessions) = (case.tcp(options.flows), case.sessions(options.flows));
    let per_session = case.d2tp(options.flows) / sessions.max(1);
    let mut sink = own_program("fairness-sink")?;
    sink.args(["--card", &serde_json::to_string(&card)?])
        .args(["--tcp", &tcp.to_string()])
        .args(["--sessions", &sessions.to_string()])
        .args(["--flows-per-session", &per_session.to_string()])
        .args(["--paths-per-session", &case.paths.to_string()])
        .args(["--warm-up-s", &options.warm_up.to_string()])
        .args(["--seconds", &options.seconds.to_string()]);
    let sink = Process::new(bottleneck.receivers().spawn(sink)?, "sink")?;
    let plan = Duration::try_from_secs_f64(options.warm_up + options.seconds)?;
    let shares: FlowBytes = sink.hear(plan + PATIENCE)?;
    bottleneck.check()?;
    let (offered, queue_full, _) = bottleneck.dropped();
    FairnessRound::of(case, &shares, queue_full as f64 / offered.max(1) as f64)
}

impl FairnessRound {
    fn of(case: &FairnessCase, shares: &FlowBytes, queue_full: f64) -> Result<FairnessRound> {
        let tcp: Vec<f64> = shares.tcp.iter().map(|b| *b as f64).collect();
        let d2tp: Vec<f64> = shares.d2tp.iter().map(|b| *b as f64).collect();
        let total = |of: &[f64]| of.iter().fold(0.0, |sum, bytes| sum + bytes);
        let (of_tcp, of_d2tp) = (total(&tcp), total(&d2tp));
        let mut contenders = tcp;
        if case.one_session {
            contenders.push(of_d2tp);
        } else {
            contenders.extend(&d2tp);
        }
        let nothing = || "nothing came through";
        // Alone on the bottleneck, the session's own flows are the competitors.
        let alone = case.one_session && contenders.len() == 1;
        let over = if alone { &d2tp } else { &contenders };
        Ok(FairnessRound {
            jain: jain::index(over).with_context(nothing)?,
            jain_in_session: if case.one_session {
                jain::index(&d2tp)
            } else {
                None
            },
            tcp_share: of_tcp / (of_tcp + of_d2tp),
            mbps: (of_tcp + of_d2tp) * 8.0 / 1e6 / shares.seconds,
            queue_full,
        })
    }
}

impl FairnessRow {
    fn of(case: &FairnessCase, options: &FairnessOptions, rounds: &[FairnessRound]) -> FairnessRow {
        let over = |f: fn(&FairnessRound) -> f64| rounds.iter().map(f);
        FairnessRow {
            case: case.name,
            jain: median(over(|r| r.jain)),
            tcp_share: median(over(|r| r.tcp_share)),
            jain_in_session: case
                .one_session
                .then(|| median(rounds.iter().filter_map(|r| r.jain_in_session))),
            jain_range: spread(over(|r| r.jain)),
            tcp_share_range: spread(over(|r| r.tcp_share)),
            mbps: median(over(|r| r.mbps)),
            queue_full: median(over(|r| r.queue_full)),
            tcp: case.tcp(options.flows),
            sessions: if case.d2tp(options.flows) == 0 {
                0
            } else {
                case.sessions(options.flows)
            },
            d2tp_flows: case.d2tp(options.flows),
            paths_per_session: case.paths,
            rounds: rounds.len(),
        }
    }
}

fn print(rows: &FairnessRows) {
    print_stdout(&format!("{}\n{}\n", rows.network, rows.conditions));
    let mut table = TextTable::new([
        "case",
        "TCP",
        "sessions",
        "flows",
        "paths",
        "jain",
        "(min … max)",
        "TCP share",
        "(min … max)",
        "Mb/s",
        "drops",
        "in session",
    ]);
    for row in &rows.rows {
        let range = |(low, high): (f64, f64)| format!("({low:.3} … {high:.3})");
        table.row([
            row.case.to_string(),
            row.tcp.to_string(),
            row.sessions.to_string(),
            row.d2tp_flows.to_string(),
            row.paths_per_session.to_string(),
            format!("{:.3}", row.jain),
            range(row.jain_range),
            format!("{:.3}", row.tcp_share),
            range(row.tcp_share_range),
            format!("{:.1}", row.mbps),
            format!("{:.1}%", row.queue_full * 100.0),
            row.jain_in_session
                .map_or("-".to_owned(), |j| format!("{j:.3}")),
        ]);
    }
    print_stdout(&table.to_text());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(tcp: &[u64], d2tp: &[u64]) -> FlowBytes {
        FlowBytes {
            tcp: tcp.to_vec(),
            d2tp: d2tp.to_vec(),
            seconds: 8.0,
            tcp_control: "cubic".to_owned(),
        }
    }

    fn case(name: &str) -> FairnessCase {
        chosen(&[name.to_owned()]).unwrap()[0]
    }

    #[test]
    fn a_session_of_many_flows_counts_as_one_contender() {
        // Three connections and a session with equal shares, and the session's three flows with a
        // third each.
        let even = shares(&[3_000_000; 3], &[1_000_000; 3]);
        let round = FairnessRound::of(&case("mixed-one-session"), &even, 0.0).unwrap();
        assert_eq!((round.jain, round.jain_in_session), (1.0, Some(1.0)));
        assert_eq!(round.tcp_share, 0.75);
        assert_eq!(round.mbps, 12.0);
        let apart = FairnessRound::of(&case("mixed"), &even, 0.0).unwrap();
        assert!(apart.jain < 0.9, "{apart:?}");
    }

    #[test]
    fn in_every_case_all_flows_are_there() {
        for case in CASES {
            let d2tp = case.d2tp(100);
            assert_eq!(case.tcp(100) + d2tp, 100, "{}", case.name);
            assert_eq!(d2tp % case.sessions(100).max(1), 0, "{}", case.name);
        }
    }

    #[test]
    fn nothing_is_no_fair_share() {
        assert!(FairnessRound::of(&case("tcp"), &shares(&[0; 4], &[]), 0.0).is_err());
    }
}
