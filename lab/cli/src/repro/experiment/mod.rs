//! Rows of the papers that are data: a scenario, its variants, the metrics, and the marks.
//!
//! ```text
//!  lab/repro/ID.toml ─▶ row_file.rs ─▶ cases.rs: every combination of the axes
//!                                          │        template.rs: the scenario of each case and variant
//!                                          ▼
//!                                      runs.rs: simulator, lab or bench ─▶ metrics of each run
//!                                          │
//!                                          ▼
//!                       figures.rs: ours, baseline, marks of all runs ─▶ Measured
//! ```
//!
//! `docs/repro.md` describes the files. Computed values are expressions in the language of scenario
//! files (`cedos_lab_scenario::Expression`).

mod cases;
pub mod chart_template;
mod figures;
pub mod row_file;
mod runs;
pub mod source_files;
mod template;
#[cfg(test)]
mod tests;

use super::over_seeds;
use super::runner::{Measured, RowVenue};
use anyhow::Context;
use row_file::{ConditionTemplate, RowExperiment};
use runs::PlannedRun;
use serde_json::{Value, json};
use source_files::SourceFiles;

/// Runs every variant of every case, and computes the row's figures.
///
/// # Errors
/// A run failed, or an expression does not match the measurements.
pub fn measure(
    experiment: &RowExperiment,
    venue: RowVenue,
    files: &SourceFiles,
) -> anyhow::Result<Measured> {
    let reports = |planned: &[PlannedRun<'_>]| runs::reports(experiment, venue, files, planned);
    if experiment.seeds == 1 {
        return measured(experiment, files, None, reports);
    }
    let mut each = Vec::new();
    for seed in 1..=experiment.seeds {
        let one = measured(experiment, files, Some(seed), reports);
        each.push(one.with_context(|| format!("seed {seed}"))?);
    }
    Ok(over_seeds::combined(each))
}

/// Computes the row's figures from runs that `reports` carries out, with this seed in place of the scenario's.
fn measured(
    experiment: &RowExperiment,
    files: &SourceFiles,
    seed: Option<u32>,
    reports: impl FnOnce(&[PlannedRun<'_>]) -> anyhow::Result<Vec<Value>>,
) -> anyhow::Result<Measured> {
    let cases = cases::cases(experiment, files)?;
    let seeds = cases::seeds(&cases);
    let run = runs::carried_out(experiment, cases, seed, reports)?;
    let scope = figures::CaseScope::all(experiment, &run);
    let figures = |name: &str, template: Option<&toml::Value>| -> anyhow::Result<Value> {
        let Some(template) = template else {
            return Ok(Value::Null);
        };
        let value = scope.figures(template).context(name.to_owned())?;
        Ok(value.unwrap_or(Value::Null))
    };
    let facts = Value::Object(scope.facts());
    Ok(Measured {
        ours: figures("ours", experiment.ours.as_ref())?,
        baseline: figures("baseline", experiment.baseline.as_ref())?,
        mark: scope.marks(&experiment.marks)?,
        conditions: sentences(&experiment.conditions, &facts)?,
        seeds,
        ours_by_seed: Vec::new(),
    })
}

/// The sentences about conditions that apply, with the values of their expressions.
///
/// # Errors
/// An expression is invalid, or names a value that `facts` does not have.
pub fn sentences(conditions: &[ConditionTemplate], facts: &Value) -> anyhow::Result<Vec<String>> {
    let all = conditions.iter().map(|condition| condition.sentence(facts));
    all.filter_map(anyhow::Result::transpose).collect()
}

/// The values that a row's marks and charts can refer to.
pub fn facts_of(ours: &Value, baseline: &Value) -> Value {
    json!({"ours": ours, "baseline": baseline})
}
