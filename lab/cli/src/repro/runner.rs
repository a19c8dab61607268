//! The results of a row's runner, and the venues.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The venue of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowVenue {
    /// Virtual time, with the real core.
    Sim,
    /// Real sockets between network namespaces.
    Lab,
    /// Real sockets between network namespaces, by kernel TCP of a server and a program that know nothing of D2TP, through
    /// `cedos vpn up --tcp packets`.
    Tunnel,
}

impl RowVenue {
    /// The name on the command line.
    pub fn word(self) -> &'static str {
        match self {
            RowVenue::Sim => "sim",
            RowVenue::Lab => "lab",
            RowVenue::Tunnel => "tunnel",
        }
    }
}

/// The measurements of a runner.
#[derive(Debug, Default)]
pub struct Measured {
    /// The figures that we measured.
    pub ours: Value,
    /// The figures for comparison; `null` if nothing was compared.
    pub baseline: Value,
    /// Conditions on `ours`: comparisons for [`super::mark::holds`].
    pub mark: Vec<String>,
    /// The conditions of the measurement, and assumptions.
    pub conditions: Vec<String>,
    /// The number of seeds, days, trips or rounds behind the figures; 1 for a single run.
    pub seeds: usize,
    /// `ours` with each seed, where it is the mean of these.
    pub ours_by_seed: Vec<Value>,
}

/// How a mark fared with several seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MarkBySeed {
    /// With how many seeds it held.
    pub held: usize,
    /// The least and the most that its left side came to.
    pub least: Option<f64>,
    /// See `least`.
    pub most: Option<f64>,
}

impl Measured {
    /// The figures of a row whose file has all other texts.
    pub fn figures(ours: Value, baseline: Value, seeds: usize) -> Measured {
        Measured {
            ours,
            baseline,
            mark: Vec::new(),
            conditions: Vec::new(),
            seeds,
            ours_by_seed: Vec::new(),
        }
    }
}
