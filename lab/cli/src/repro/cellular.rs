//! The four cellular networks of the DRWA paper: scenario files, and what was measured of a run.

use super::measured::by_bench;
use anyhow::Context;
use cedos_lab_scenario::{Scenario, ScenarioFault, ScenarioFlow};
use cedos_lab_sim::{Ends, run_between};
use serde::{Deserialize, Serialize};

/// A network, as `lab/scenarios/bloat-….toml` has it.
pub struct CellularNetwork {
    /// Its name in reports.
    pub name: &'static str,
    files: Files,
    /// Its shortest round trip (the paper's figure 18).
    pub rtt_ms: f64,
    /// How much less the paper's round trips were with DRWA: for the reader.
    pub paper_rtt_less: f64,
    /// Round trips of the paper's figure 17, and how much more it got there.
    pub far: [(f64, f64); 5],
    /// What a sender is shaped to beside it: nine tenths of the mean, if one knew it.
    pub shaped_kbps: u64,
    /// The fixed most that a phone's receive buffer could be. // assumed, see docs/repro/D1-D2.md
    pub rmem_max: u64,
}

struct Files {
    scenario: &'static str,
    trace: &'static str,
    trace_name: &'static str,
}

/// The files of a network.
macro_rules! files {
    ($name:literal) => {
        Files {
            scenario: include_str!(concat!("../../../scenarios/bloat-", $name, ".toml")),
            trace: include_str!(concat!("../../../traces/cell-", $name, ".csv")),
            trace_name: concat!("cell-", $name, ".csv"),
        }
    };
}

/// Every network.
pub static NETWORKS: [CellularNetwork; 4] = [
    CellularNetwork {
        name: "hspa",
        files: files!("hspa"),
        rtt_ms: 74.0,
        paper_rtt_less: 0.49,
        far: [
            (265.0, -0.01),
            (347.0, -0.01),
            (451.0, 0.06),
            (570.0, 0.26),
            (677.0, 0.41),
        ],
        shaped_kbps: 3_450,
        rmem_max: 262_144,
    },
    CellularNetwork {
        name: "lte",
        files: files!("lte"),
        rtt_ms: 32.0,
        paper_rtt_less: 0.35,
        far: [
            (131.0, -0.01),
            (219.0, 0.39),
            (351.0, 0.37),
            (439.0, 0.26),
            (533.0, 0.31),
        ],
        shaped_kbps: 14_200,
        rmem_max: 484_848,
    },
    CellularNetwork {
        name: "evdo_verizon",
        files: files!("evdo-a"),
        rtt_ms: 120.0,
        paper_rtt_less: 0.49,
        far: [
            (326.0, -0.03),
            (433.0, -0.003),
            (550.0, 0.04),
            (653.0, 0.29),
            (798.0, 0.51),
        ],
        shaped_kbps: 820,
        rmem_max: 87_380,
    },
    CellularNetwork {
        name: "evdo_sprint",
        files: files!("evdo-b"),
        rtt_ms: 133.0,
        paper_rtt_less: 0.24,
        far: [
            (312.0, 0.04),
            (448.0, 0.05),
            (536.0, 0.37),
            (625.0, 0.45),
            (754.0, 0.51),
        ],
        shaped_kbps: 780,
        rmem_max: 87_380,
    },
];

impl CellularNetwork {
    /// Its scenario, at its own round trip or a longer one.
    pub fn scenario(&self, rtt_ms: f64) -> Result<Scenario, ScenarioFault> {
        let mut scenario = Scenario::parse(self.name, self.files.scenario, &mut |_| {
            Ok(self.files.trace.to_owned())
        })?;
        scenario.links[0].rtt_ms = Some(rtt_ms);
        Ok(scenario)
    }
}

/// A bulk download over a network.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CellularDownload {
    /// Payload that arrived.
    pub mbps: f64,
    /// What packets had, on average.
    pub rtt_ms: f64,
    /// By the shortest.
    pub rtt_by_min: f64,
}

/// In virtual time.
pub fn simulate(scenario: &Scenario, ends: &Ends) -> anyhow::Result<CellularDownload> {
    let report = run_between(scenario, ends, None)?.report;
    let (link, bulk) = (&report.links[0], &report.flows[0]);
    let rtt_ms = scenario.rtt_ms() + link.wait_down_ms + link.wait_up_ms;
    Ok(CellularDownload {
        mbps: bulk.bytes as f64 * 8e-6 / scenario.duration_s,
        rtt_ms,
        rtt_by_min: rtt_ms / scenario.rtt_ms(),
    })
}

/// Objects of a web page, fetched one at a time beside the bulk download.
pub const OBJECTS: u32 = 20;
/// Their size. // assumed: the paper's text that says it is not in what we have
pub const OBJECT_BYTES: u64 = 32_768;
const OBJECTS_FROM_S: f64 = 15.0;
const OBJECTS_EVERY_S: f64 = 2.0;

/// How long an object took on average, in milliseconds.
pub fn simulate_objects(scenario: &Scenario, ends: &Ends) -> anyhow::Result<f64> {
    let mut scenario = scenario.clone();
    for n in 0..OBJECTS {
        let bulk = &scenario.flows[0];
        let object = ScenarioFlow {
            id: format!("object-{n}"),
            bytes: Some(OBJECT_BYTES),
            start_s: OBJECTS_FROM_S + f64::from(n) * OBJECTS_EVERY_S,
            ..bulk.clone()
        };
        scenario.flows.push(object);
    }
    let report = run_between(&scenario, ends, None)?.report;
    let took = scenario.flows[1..]
        .iter()
        .zip(&report.flows[1..])
        .map(|(asked, got)| {
            // One that never came took what was left of the run at least.
            got.finished_s.unwrap_or(scenario.duration_s) - asked.start_s
        });
    Ok(took.sum::<f64>() * 1e3 / f64::from(OBJECTS))
}

/// What the bench measured of one peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CellularRow {
    peer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<String>,
    /// Payload that arrived.
    pub mbps: Option<f64>,
    /// What the link's packets had, on average.
    pub rtt_ms: Option<f64>,
    /// By the shortest.
    pub rtt_by_min: Option<f64>,
    /// How long an object took beside it, on average.
    pub object_ms: Option<f64>,
}

/// What the bench measured of all.
#[derive(Debug, Deserialize)]
pub struct CellularRows {
    rows: Vec<CellularRow>,
}

impl CellularRows {
    /// The row of this peer.
    pub fn of(&self, peer: &str) -> anyhow::Result<&CellularRow> {
        (self.rows.iter())
            .find(|row| row.peer == peer)
            .with_context(|| format!("the bench has no row of {peer}"))
    }

    /// How long objects took beside this one.
    pub fn object_ms(&self, peer: &str) -> anyhow::Result<f64> {
        (self.of(peer)?.object_ms).with_context(|| format!("no object came beside {peer}"))
    }

    /// The rows of all peers but these.
    pub fn but(&self, ours: &[&str]) -> Vec<&CellularRow> {
        (self.rows.iter())
            .filter(|row| !ours.contains(&row.peer.as_str()))
            .collect()
    }
}

/// On real sockets: these peers at once, each over a link of its own.
pub fn emulate(
    network: &CellularNetwork,
    rtt_ms: f64,
    peers: &[&str],
    seconds: u32,
    objects: u32,
) -> anyhow::Result<CellularRows> {
    let folder = tempfile::tempdir()?;
    let (scenarios, traces) = (
        folder.path().join("scenarios"),
        folder.path().join("traces"),
    );
    std::fs::create_dir(&scenarios)?;
    std::fs::create_dir(&traces)?;
    let file = scenarios.join("bloat.toml");
    std::fs::write(&file, network.files.scenario)?;
    std::fs::write(traces.join(network.files.trace_name), network.files.trace)?;
    let file = file
        .to_str()
        .context("the folder for temporary files has an odd name")?;
    by_bench(&[
        "bloat",
        "--scenario",
        file,
        "--rtt-ms",
        &rtt_ms.to_string(),
        "--peers",
        &peers.join(","),
        "--seconds",
        &seconds.to_string(),
        "--objects",
        &objects.to_string(),
        "--object-bytes",
        &OBJECT_BYTES.to_string(),
    ])
}
