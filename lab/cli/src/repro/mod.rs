//! The papers' results, each as a run that anybody can repeat.
//!
//! ```text
//!  rows.rs: every row of the papers ──▶ its runner (switching.rs, …) ──▶ measured figures
//!                                       measured.rs: by the bench program
//!                                       emulated.rs: by `cedos lab run`
//!                                                                          │
//!                                  mark.rs: what must hold of them ────────┴──▶ one JSON object
//! ```
//!
//! A row that has no runner yet is listed as such; a run never invents a figure. Whether a row holds
//! is computed from `ours` and `mark` in the printed object and from nothing else, so that anybody
//! can compute it again.

pub mod applications;
mod blackouts;
mod bufferbloat;
mod bulk;
mod cellular;
mod emulated;
mod energy;
mod fairness;
mod far;
pub mod figures;
mod holes;
mod losses;
pub mod mark;
mod measured;
mod mobility;
mod offload;
mod plane;
pub mod plot;
mod podcasts;
pub mod prediction;
mod proxy;
pub mod rows;
pub mod runner;
mod schedules;
mod spread;
mod subway;
mod switching;
mod two_paths;
pub mod unmodified;
mod video;
mod waiting;
mod walk;

use serde::Serialize;
use serde_json::Value;

use runner::{Measured, RowVenue};

/// One row, run: the object `cedos repro ID --json` prints.
#[derive(Debug, Serialize)]
pub struct Reproduced {
    /// The row's name: `C3`.
    pub id: &'static str,
    /// Where it was run.
    pub r#where: RowVenue,
    /// What the authors claim.
    pub claim: &'static str,
    /// What they measured.
    pub paper: &'static str,
    /// What we measured.
    pub ours: Value,
    /// What others do on the same links.
    pub baseline: Value,
    /// What must hold of `ours`.
    pub mark: Vec<String>,
    /// Whether it does.
    pub holds: bool,
    /// Conditions and assumptions.
    pub conditions: Vec<String>,
}

/// Runs a row.
///
/// # Errors
/// It has no runner there, or the run failed.
pub fn run(row: &rows::PaperRow, place: RowVenue) -> anyhow::Result<Reproduced> {
    let Some((_, runner)) = row.runners.iter().find(|(at, _)| *at == place) else {
        let elsewhere: Vec<_> = row.runners.iter().map(|(at, _)| at.word()).collect();
        if elsewhere.is_empty() {
            anyhow::bail!("{} is not reproduced yet", row.id);
        }
        anyhow::bail!(
            "{} runs only with --where {}",
            row.id,
            elsewhere.join(" or ")
        );
    };
    judge(row, place, runner()?)
}

/// What was measured, with what it says of its row.
///
/// # Errors
/// A mark is no comparison.
pub fn judge(
    row: &rows::PaperRow,
    place: RowVenue,
    measured: Measured,
) -> anyhow::Result<Reproduced> {
    let holds = mark::holds(&measured.mark, &measured.ours)?;
    Ok(Reproduced {
        id: row.id,
        r#where: place,
        claim: row.claim,
        paper: row.paper,
        ours: measured.ours,
        baseline: measured.baseline,
        mark: measured.mark,
        holds,
        conditions: measured.conditions,
    })
}
