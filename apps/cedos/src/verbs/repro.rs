//! `cedos repro [ID] [--where sim|lab] [--json] [--plot FILE]`: the papers' results beside ours.

use crate::repro::plot::{self, Chart, Series};
use crate::repro::{self, Reproduced, Where, mark, rows};
use anyhow::{Context, anyhow};
use clap::Args;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Reproduce the papers' results; without ID, list them.
#[derive(Debug, Args)]
pub struct ReproArgs {
    /// Which result: `C3`.
    id: Option<String>,
    /// Where to run it: in virtual time, or on real sockets. The first place the row has, if not given.
    #[arg(long = "where", value_name = "PLACE")]
    place: Option<Where>,
    /// Print JSON: one object for a row, one per line for the list.
    #[arg(long)]
    json: bool,
    /// Draw the figures into this file, an SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Carry out `cedos repro`. The exit code is 0 if the row holds.
///
/// # Errors
/// There is no such row, it could not be run, or its picture not be drawn.
pub fn run(args: &ReproArgs) -> anyhow::Result<ExitCode> {
    let Some(id) = &args.id else {
        list(args.json);
        return Ok(ExitCode::SUCCESS);
    };
    let row =
        rows::find(id).ok_or_else(|| anyhow!("there is no row {id}; `cedos repro` lists them"))?;
    let place = args
        .place
        .or_else(|| row.runners.first().map(|(place, _)| *place))
        .unwrap_or(Where::Sim);
    let reproduced = repro::run(row, place)?;
    if let Some(file) = &args.plot {
        let charts = match row.charts {
            Some(charts) => charts(&reproduced.ours, &reproduced.baseline),
            None => vec![against_marks(&reproduced)],
        };
        draw(file, &charts)?;
    }
    if args.json {
        println!("{}", serde_json::to_string(&reproduced)?);
    } else {
        print(&reproduced);
    }
    Ok(if reproduced.holds {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn draw(file: &Path, charts: &[Chart]) -> anyhow::Result<()> {
    std::fs::write(file, plot::picture(charts))
        .with_context(|| format!("cannot write {}", file.display()))
}

/// A row without a picture of its own: each figure that has a mark, beside it.
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

fn list(json: bool) {
    for row in rows::ROWS {
        let places: Vec<_> = row.runners.iter().map(|(place, _)| place.word()).collect();
        if json {
            let object = json!({
                "id": row.id, "claim": row.claim, "paper": row.paper, "where": places,
            });
            println!("{object}");
        } else {
            let places = if places.is_empty() {
                "not yet".to_owned()
            } else {
                places.join(", ")
            };
            println!("{:9} {places:9} {}", row.id, row.claim);
        }
    }
}

fn print(row: &Reproduced) {
    println!("{} ({}): {}", row.id, row.r#where.word(), row.claim);
    println!("  paper     {}", row.paper);
    print_figures("ours", &row.ours);
    print_figures("baseline", &row.baseline);
    for mark in &row.mark {
        println!("  mark      {mark}");
    }
    println!("  holds     {}", if row.holds { "yes" } else { "NO" });
    for condition in &row.conditions {
        println!("  with      {condition}");
    }
}

/// One line for each figure or group of figures.
fn print_figures(title: &str, figures: &Value) {
    let Some(groups) = figures.as_object() else {
        if !figures.is_null() {
            println!("  {title:9} {figures}");
        }
        return;
    };
    for (name, value) in groups {
        println!("  {title:9} {name} = {}", in_words(value));
    }
}

/// More of them are for programs to read.
const POINTS_MAX: usize = 20;

fn in_words(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let fields: Vec<_> = fields
                .iter()
                .map(|(name, value)| format!("{name} {}", in_words(value)))
                .collect();
            fields.join(", ")
        }
        Value::Array(points) if points.len() > POINTS_MAX => format!("{} points", points.len()),
        Value::Number(number) if number.is_f64() => {
            format!("{:.4}", number.as_f64().unwrap_or(f64::NAN))
                .trim_end_matches('0')
                .trim_end_matches('.')
                .to_owned()
        }
        other => other.to_string(),
    }
}
