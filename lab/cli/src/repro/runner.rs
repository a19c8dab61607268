//! What a runner of a row returns, and where it runs.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Where a row is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowVenue {
    /// Virtual time around the real core.
    Sim,
    /// Real sockets between network namespaces.
    Lab,
}

impl RowVenue {
    /// The name that the user writes.
    pub fn word(self) -> &'static str {
        match self {
            RowVenue::Sim => "sim",
            RowVenue::Lab => "lab",
        }
    }
}

/// What a runner measured.
#[derive(Debug)]
pub struct Measured {
    /// Our figures.
    pub ours: Value,
    /// The figures of what we compare with; `null` where nothing was run beside it.
    pub baseline: Value,
    /// What must hold of `ours`: comparisons as [`super::mark::holds`] reads them.
    pub mark: Vec<String>,
    /// Under what conditions, and what had to be assumed.
    pub conditions: Vec<String>,
    /// How many seeds, days, trips or rounds its figures are of; 1 where chance was drawn once.
    pub seeds: usize,
}

impl Measured {
    /// Figures of which the row's file says all else.
    pub fn figures(ours: Value, baseline: Value, seeds: usize) -> Measured {
        Measured {
            ours,
            baseline,
            mark: Vec::new(),
            conditions: Vec::new(),
            seeds,
        }
    }
}
