//! `cedos repro [ID] [--where sim|lab] [--json] [--plot FILE]`: the papers' results beside ours.
//! `cedos repro C10 [--delays S,…] [--patience S] [--only CELL]`: some of its cells; `cedos repro C11 --only PART`.

use crate::repro::applications::{self, Cells};
use crate::repro::plot::{self, Chart, Series};
use crate::repro::{self, Reproduced, figures, mark, rows, runner::RowVenue, unmodified};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Reproduce the papers' results; without ID, list them.
///
/// Exit codes: 0 the row holds (or they were listed), 1 it does not, or could not be run, 2 usage.
#[derive(Debug, Args)]
pub struct ReproArgs {
    /// Which result: `C3`.
    id: Option<String>,
    /// Where to run it: in virtual time, or on real sockets. The first place the row has, if not given.
    #[arg(long = "where", value_name = "PLACE")]
    place: Option<RowVenue>,
    /// Print JSON: one object for a row, one per line for the list.
    #[arg(long)]
    json: bool,
    /// Draw the figures into this file, an SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// C10: how long networks are away, in seconds [default: 10,60]
    #[arg(long, value_name = "S", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=DELAY_S_MAX))]
    delays: Vec<u32>,
    /// C10: how long a program may say nothing once the network is back, in seconds [default: 150]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..=DELAY_S_MAX))]
    patience: Option<u32>,
    /// C10: only these cells: curl, curl/down, curl/down/off; C11: only these parts: caught, served, shown,
    /// keys, beside; repeatable
    #[arg(long, value_name = "CELL")]
    only: Vec<String>,
}

/// The longest a cell may be asked to wait.
const DELAY_S_MAX: i64 = 86_400;

impl ReproArgs {
    /// Some cells of C10, if they are asked for.
    fn cells(&self) -> Option<Cells> {
        let Cells {
            delays_s,
            patience_s,
            ..
        } = Cells::default();
        let asks = !self.delays.is_empty() || self.patience.is_some() || !self.only.is_empty();
        asks.then(|| Cells {
            delays_s: if self.delays.is_empty() {
                delays_s
            } else {
                self.delays.clone()
            },
            patience_s: self.patience.unwrap_or(patience_s),
            only: self.only.clone(),
        })
    }
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
        .unwrap_or(RowVenue::Sim);
    let parts = row.id == "C11" && args.delays.is_empty() && args.patience.is_none();
    let reproduced = match args.cells() {
        Some(cells) if parts && place == RowVenue::Lab => {
            repro::judge(row, place, unmodified::run(&cells.only)?)?
        }
        Some(_) if row.id != "C10" || place != RowVenue::Lab => {
            bail!("--delays, --patience and --only are of C10 in the lab, --only also of C11");
        }
        Some(cells) => repro::judge(row, place, applications::run(&cells)?)?,
        None => repro::run(row, place)?,
    };
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
        print(row, &reproduced);
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

fn print(of: &rows::PaperRow, row: &Reproduced) {
    println!("{} ({}): {}", row.id, row.r#where.word(), row.claim);
    println!("  paper     {}", row.paper);
    for (title, figures) in [("ours", &row.ours), ("baseline", &row.baseline)] {
        let mut figures = figures.clone();
        if let (Some(_), Some(groups)) = (of.table, figures.as_object_mut()) {
            groups.remove(TABLE);
        }
        print_figures(title, &figures);
    }
    for mark in &row.mark {
        println!("  mark      {mark}");
    }
    println!("  holds     {}", if row.holds { "yes" } else { "NO" });
    for condition in &row.conditions {
        println!("  with      {condition}");
    }
    if let Some(table) = of.table {
        println!("\n{}", table(&row.ours, &row.baseline));
    }
}

/// Figures of this name are printed as a table, where the row has one.
const TABLE: &str = "table";

fn print_figures(title: &str, values: &Value) {
    for (n, line) in figures::lines(values).into_iter().enumerate() {
        let title = if n == 0 { title } else { "" };
        println!("  {title:9} {line}");
    }
}
