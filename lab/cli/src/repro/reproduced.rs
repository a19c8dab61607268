//! The result of running one row.

use super::experiment::row_file::{ResultRow, RowExperiment};
use super::experiment::source_files::SourceFiles;
use super::experiment::{self, facts_of};
use super::mark::{self, RowVerdict};
use super::over_seeds::mark_by_seed;
use super::plot::{Chart, Series};
use super::runner::{MarkBySeed, Measured, RowVenue};
use super::runners;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The result of a row: the object that `cedos repro ID --json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reproduced {
    /// The row's id, such as `C3`.
    pub id: String,
    /// The venue where it was run.
    pub r#where: RowVenue,
    /// Whether its figures are those of a model, without the protocol's code.
    #[serde(default)]
    pub model: bool,
    /// The authors' claim.
    pub claim: String,
    /// The authors' measurements.
    pub paper: String,
    /// Our measurements.
    pub ours: Value,
    /// The figures of others on the same links.
    pub baseline: Value,
    /// The marks: conditions on `ours`.
    pub mark: Vec<String>,
    /// Whether all marks hold.
    pub holds: bool,
    /// The verdict on the claim.
    pub verdict: RowVerdict,
    /// The number of seeds, days, trips or rounds behind the figures.
    pub seeds: usize,
    /// How each of `mark` fared with the seeds, in the same order; empty unless the figures are means over seeds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marks_by_seed: Vec<MarkBySeed>,
    /// Conditions and assumptions.
    pub conditions: Vec<String>,
}

impl Reproduced {
    /// The source of its figures: `lab`, `sim` or `model`.
    pub fn source(&self) -> &'static str {
        match self.model {
            true => "model",
            false => self.r#where.word(),
        }
    }
}

/// The measurement of a row in a venue.
///
/// # Errors
/// The row cannot be run there; the error says where it can.
pub fn experiment(row: &ResultRow, venue: RowVenue) -> anyhow::Result<&RowExperiment> {
    row.at(venue).with_context(|| {
        let elsewhere: Vec<_> = row.venues.iter().map(|(at, _)| at.word()).collect();
        if elsewhere.is_empty() {
            return format!("{} is not reproduced yet", row.id);
        }
        format!(
            "{} runs only with --where {}",
            row.id,
            elsewhere.join(" or ")
        )
    })
}

/// Runs a row.
///
/// # Errors
/// The row cannot be run there, or the run failed.
pub fn run(row: &ResultRow, venue: RowVenue, files: &SourceFiles) -> anyhow::Result<Reproduced> {
    let how = experiment(row, venue)?;
    let measured = match &how.runner {
        Some(name) => (runners::find(name)?.run)()?,
        None => experiment::measure(how, venue, files)?,
    };
    judge(row, venue, measured)
}

/// Combines the measurements with the texts and the verdict of the row.
///
/// # Errors
/// A mark names a figure that does not exist.
pub fn judge(row: &ResultRow, venue: RowVenue, measured: Measured) -> anyhow::Result<Reproduced> {
    let how = experiment(row, venue)?;
    let mut marks = measured.mark;
    let mut conditions = measured.conditions;
    if how.runner.is_some() {
        // The runner adds conditions that only it knows: which programs were missing.
        let mut own = Vec::new();
        for mark in &how.marks {
            if mark.counts(&measured.ours)? {
                own.push(mark.text().to_owned());
            }
        }
        marks = own.into_iter().chain(marks).collect();
        let own = experiment::sentences(&how.conditions, &measured.ours)?;
        conditions = own.into_iter().chain(conditions).collect();
    }
    let holds = mark::holds(&marks, &measured.ours)?;
    let marks_by_seed = match measured.ours_by_seed.as_slice() {
        [] => Vec::new(),
        by_seed => {
            let fared = marks.iter().map(|mark| mark_by_seed(mark, by_seed));
            fared.collect::<anyhow::Result<_>>()?
        }
    };
    Ok(Reproduced {
        id: row.id.clone(),
        r#where: venue,
        model: how.model,
        claim: row.claim.clone(),
        paper: row.paper.clone(),
        verdict: mark::verdict(holds, &how.better, &how.contradicts, &measured.ours)?,
        seeds: measured.seeds,
        marks_by_seed,
        ours: measured.ours,
        baseline: measured.baseline,
        mark: marks,
        holds,
        conditions,
    })
}

/// The charts of a row: those of its file, its runner's, or each figure beside its mark.
///
/// # Errors
/// A chart needs figures that are missing.
pub fn charts(row: &ResultRow, reproduced: &Reproduced) -> anyhow::Result<Vec<Chart>> {
    let how = experiment(row, reproduced.r#where)?;
    let (ours, baseline) = (&reproduced.ours, &reproduced.baseline);
    if let Some(name) = &how.runner
        && let Some(charts) = runners::find(name)?.charts
    {
        return Ok(charts(ours, baseline));
    }
    if how.charts.is_empty() {
        return Ok(vec![against_marks(reproduced)]);
    }
    let facts = facts_of(ours, baseline);
    how.charts.iter().map(|chart| chart.drawn(&facts)).collect()
}

/// A chart for a row without its own: each figure that has a mark, beside that mark.
fn against_marks(row: &Reproduced) -> Chart {
    let reached = mark::reached(&row.mark, &row.ours);
    let last = reached.len().max(1) as f64 + 0.5;
    let at = |(n, (mark, percent)): (usize, (String, f64))| {
        Series::dots(&mark, vec![(n as f64 + 1.0, percent)])
    };
    let mut series = vec![Series::line("mark", vec![(0.0, 100.0), (last, 100.0)])];
    series.extend(reached.into_iter().enumerate().map(at));
    Chart {
        title: format!("{}: figures against their marks", row.id),
        x: "marks, in the order of the legend".to_owned(),
        y: "% of the mark".to_owned(),
        series,
    }
}
