//! `cedos repro [ID] [--where sim|lab|tunnel] [--json] [--plot FILE]`: the papers' results compared with ours.
//! `cedos repro --file FILE`: a new or changed row.
//! `cedos repro --all [--json] [--into FOLDER]`: every row; `cedos repro --table FOLDER`: docs/results.md of kept results.
//! `cedos repro C10 [--delays S,…] [--patience S] [--only CELL]`: some of its cells; `cedos repro C11 --only PART`.
//! `cedos repro E1 --where tunnel [--seconds S] [--sessions N] [--only CASE]`: shorter and fewer sessions.
//! `cedos repro E2 [--seconds S] [--only web|udp]`: a shorter time.

use crate::repro::applications::{self, CellSelection};
use crate::repro::experiment::row_file::ResultRow;
use crate::repro::experiment::source_files::SourceFiles;
use crate::repro::holes::{self, PatchedHoles, TunnelHoles};
use crate::repro::reproduced::{self, Reproduced};
use crate::repro::results::{self, KeptResult};
use crate::repro::{figures, plot, rows, runner::RowVenue, runners, unmodified};
use anyhow::{Context, anyhow, bail};
use cedos_terminal::{is_stdout_closed, print_stderr, print_stdout};
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
    #[arg(conflicts_with_all = ["file", "all", "table"])]
    id: Option<String>,
    /// Run the row in this file instead of one of the program's: docs/repro.md describes it.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["all", "table"])]
    file: Option<PathBuf>,
    /// Run every row, in the place given by `--where` or in its first place; this takes hours.
    #[arg(long, conflicts_with_all = ["table", "plot"])]
    all: bool,
    /// Keep what each row came to in this folder: ID.PLACE.json and, where the row has a chart, .svg.
    #[arg(long, value_name = "FOLDER", conflicts_with = "table")]
    into: Option<PathBuf>,
    /// Print docs/results.md of what was kept in this folder; with --json, the object that --all would print.
    #[arg(long, value_name = "FOLDER")]
    table: Option<PathBuf>,
    /// Where to run it: in virtual time, on real sockets, or there with kernel TCP through a VPN. The first place the row has, if not given.
    #[arg(long = "where", value_name = "PLACE")]
    place: Option<RowVenue>,
    /// Print JSON: one object for a row or for all of them, one per line for the list.
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
    /// E1 in the tunnel: the length of a session, in seconds [default: 240]; E2: that of each run [default: 1800]
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// E1 in the tunnel: sessions of each case [default: 3]
    #[arg(long, value_name = "N")]
    sessions: Option<u64>,
    /// C10: only these cells: curl, curl/down, curl/down/off; C11: only these parts: caught, served, shown,
    /// keys, beside; E1 in the tunnel: only these cases: even_5, even_15, …; E2: only web, or udp; repeatable
    #[arg(long, value_name = "CELL")]
    only: Vec<String>,
}

/// The longest delay of a cell that may be requested, in seconds.
const DELAY_S_MAX: i64 = 86_400;

impl ReproArgs {
    /// The requested cells of C10, if any are requested.
    fn cells(&self) -> Option<CellSelection> {
        let CellSelection {
            delays_s,
            patience_s,
            ..
        } = CellSelection::default();
        let asks = !self.delays.is_empty() || self.patience.is_some() || !self.only.is_empty();
        asks.then(|| CellSelection {
            delays_s: if self.delays.is_empty() {
                delays_s
            } else {
                self.delays.clone()
            },
            patience_s: self.patience.unwrap_or(patience_s),
            only: self.only.clone(),
        })
    }

    /// The requested part of E2, if a part is requested.
    fn patched_holes(&self) -> Option<PatchedHoles> {
        let asks = self.seconds.is_some() || !self.only.is_empty();
        asks.then(|| PatchedHoles {
            seconds: self.seconds.unwrap_or(PatchedHoles::default().seconds),
            only: self.only.clone(),
        })
    }

    /// The requested part of E1 in the tunnel, if a part is requested.
    fn tunnel_holes(&self) -> Option<TunnelHoles> {
        let whole = TunnelHoles::default();
        let asks = self.seconds.is_some() || self.sessions.is_some() || !self.only.is_empty();
        asks.then(|| TunnelHoles {
            session_s: self.seconds.unwrap_or(whole.session_s),
            courses: self.sessions.unwrap_or(whole.courses),
            only: self.only.clone(),
        })
    }
}

/// Carries out `cedos repro`. The exit code is 0 if the row holds.
///
/// # Errors
/// There is no such row, it could not be run, or its picture could not be drawn.
pub fn run(args: &ReproArgs) -> anyhow::Result<ExitCode> {
    if let Some(folder) = &args.table {
        let kept = results::read(folder)?;
        match args.json {
            true => print_stdout(&of_kept(&kept).to_string()),
            false => print_stdout(results::table(&kept).trim_end()),
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.all {
        return all(args);
    }
    let read;
    let row = match (&args.id, &args.file) {
        (_, Some(file)) => {
            read = row_of(file)?;
            &read
        }
        (Some(id), None) => rows::find(id)
            .ok_or_else(|| anyhow!("there is no row {id}; `cedos repro` lists them"))?,
        (None, None) => {
            list(args.json);
            return Ok(ExitCode::SUCCESS);
        }
    };
    let place = place(row, args.place);
    let files = SourceFiles {
        folder: args
            .file
            .as_ref()
            .and_then(|file| file.parent())
            .map(Path::to_owned),
    };
    let reproduced = reproduce(args, row, place, &files)?;
    if let Some(file) = &args.plot {
        let picture = plot::picture(&reproduced::charts(row, &reproduced)?);
        std::fs::write(file, picture)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    if let Some(folder) = &args.into {
        results::keep(folder, row, &reproduced)?;
    }
    if args.json {
        print_stdout(&serde_json::to_string(&reproduced)?);
    } else {
        print(row, &reproduced)?;
    }
    Ok(if reproduced.holds {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs a row, or the part of it that was requested.
fn reproduce(
    args: &ReproArgs,
    row: &ResultRow,
    place: RowVenue,
    files: &SourceFiles,
) -> anyhow::Result<Reproduced> {
    let of_cells = !args.delays.is_empty() || args.patience.is_some();
    if row.id == "E1" && place == RowVenue::Tunnel && !of_cells {
        return match args.tunnel_holes() {
            Some(part) => reproduced::judge(row, place, holes::tunnelled(&part)?),
            None => reproduced::run(row, place, files),
        };
    }
    if row.id == "E2" && place == RowVenue::Tunnel && !of_cells && args.sessions.is_none() {
        return match args.patched_holes() {
            Some(part) => reproduced::judge(row, place, holes::patched(&part)?),
            None => reproduced::run(row, place, files),
        };
    }
    if args.seconds.is_some() || args.sessions.is_some() {
        bail!("--seconds is of E1 in the tunnel and of E2, --sessions of E1 in the tunnel");
    }
    match args.cells() {
        Some(cells) if row.id == "C11" && place == RowVenue::Lab && !of_cells => {
            reproduced::judge(row, place, unmodified::run(&cells.only)?)
        }
        Some(_) if row.id != "C10" || place != RowVenue::Lab => bail!(
            "--delays, --patience and --only are of C10 in the lab, --only also of C11, of E1 in the tunnel, and of E2"
        ),
        Some(cells) => reproduced::judge(row, place, applications::run(&cells)?),
        None => reproduced::run(row, place, files),
    }
}

fn row_of(file: &Path) -> anyhow::Result<ResultRow> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
    ResultRow::parse(&name, &text)
}

/// The requested venue, or the row's first one.
fn place(row: &ResultRow, asked: Option<RowVenue>) -> RowVenue {
    let first = || row.venues.first().map(|(place, _)| *place);
    asked.or_else(first).unwrap_or(RowVenue::Sim)
}

/// Runs every row in turn. A row that fails is reported and does not end the others.
fn all(args: &ReproArgs) -> anyhow::Result<ExitCode> {
    let mut lines = Vec::new();
    let mut all_hold = true;
    for row in rows::all() {
        let place = place(row, args.place);
        if row.at(place).is_none() {
            let why = reproduced::experiment(row, place).err();
            let why = why.map_or_else(String::new, |why| why.to_string());
            lines.push(json!({"id": row.id, "paper": row.paper, "not_run": why}));
            continue;
        }
        print_stderr(&format!("{} ({}) …", row.id, place.word()));
        let line = match reproduced::run(row, place, &SourceFiles::default()) {
            Ok(reproduced) => {
                if let Some(folder) = &args.into {
                    results::keep(folder, row, &reproduced)?;
                }
                all_hold &= reproduced.holds;
                if !args.json {
                    let verdict = reproduced.verdict.words();
                    print_stdout(&format!(
                        "{:9} {:4} {verdict:14} {}",
                        row.id,
                        place.word(),
                        row.claim
                    ));
                }
                line_of(&reproduced)
            }
            Err(fault) => {
                all_hold = false;
                print_stderr(&format!("{}: {fault:#}", row.id));
                json!({"id": row.id, "where": place, "paper": row.paper, "not_run": format!("{fault:#}")})
            }
        };
        lines.push(line);
        if is_stdout_closed() && args.into.is_none() {
            break;
        }
    }
    if args.json {
        print_stdout(&json!({"rows": lines}).to_string());
    }
    Ok(if all_hold {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The object of all rows, from kept results: each as it was run.
fn of_kept(kept: &[KeptResult]) -> Value {
    let mut lines = Vec::new();
    for row in rows::all() {
        let of_row = kept.iter().filter(|result| result.row.id == row.id);
        let before = lines.len();
        lines.extend(of_row.map(|result| line_of(&result.row)));
        if lines.len() == before {
            lines.push(json!({"id": row.id, "paper": row.paper, "not_run": "no run is kept"}));
        }
    }
    json!({ "rows": lines })
}

/// A row in the object of all rows.
fn line_of(row: &Reproduced) -> Value {
    json!({
        "id": row.id,
        "where": row.source(),
        "claim": row.claim,
        "paper": row.paper,
        "measured": row.ours,
        "mark": row.mark,
        "holds": row.holds,
        "verdict": row.verdict,
        "seeds": row.seeds,
    })
}

fn list(json: bool) {
    for row in rows::all() {
        let places: Vec<_> = row.venues.iter().map(|(place, _)| place.word()).collect();
        if json {
            let object = json!({
                "id": row.id, "claim": row.claim, "paper": row.paper, "where": places,
            });
            print_stdout(&object.to_string());
        } else {
            let places = if places.is_empty() {
                "not yet".to_owned()
            } else {
                places.join(", ")
            };
            print_stdout(&format!("{:9} {places:9} {}", row.id, row.claim));
        }
    }
}

fn print(of: &ResultRow, row: &Reproduced) -> anyhow::Result<()> {
    let how = reproduced::experiment(of, row.r#where)?;
    let table = match &how.runner {
        Some(name) => runners::find(name)?.table,
        None => None,
    };
    print_stdout(&format!(
        "{} ({}): {}",
        row.id,
        row.r#where.word(),
        row.claim
    ));
    print_stdout(&format!("  paper     {}", row.paper));
    for (title, figures) in [("ours", &row.ours), ("baseline", &row.baseline)] {
        let mut figures = figures.clone();
        if let (Some(_), Some(groups)) = (table, figures.as_object_mut()) {
            groups.remove(TABLE);
        }
        print_figures(title, &figures);
    }
    for mark in &row.mark {
        print_stdout(&format!("  mark      {mark}"));
    }
    print_stdout(&format!(
        "  holds     {}",
        if row.holds { "yes" } else { "NO" }
    ));
    print_stdout(&format!("  verdict   {}", row.verdict.words()));
    for condition in &row.conditions {
        print_stdout(&format!("  with      {condition}"));
    }
    if let Some(table) = table {
        print_stdout(&format!("\n{}", table(&row.ours, &row.baseline)));
    }
    Ok(())
}

/// Figures with this name are printed as a table, if the row has one.
const TABLE: &str = "table";

fn print_figures(title: &str, values: &Value) {
    for (n, line) in figures::lines(values).into_iter().enumerate() {
        let title = if n == 0 { title } else { "" };
        print_stdout(&format!("  {title:9} {line}"));
    }
}

#[cfg(test)]
mod tests {
    use super::of_kept;
    use crate::repro::{results, rows};
    use std::path::Path;

    #[test]
    fn the_object_of_all_rows_names_each_with_its_verdict_or_why_it_was_not_run() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
        let all = of_kept(&results::read(&folder).unwrap());
        let lines = all["rows"].as_array().unwrap();
        let of = |id: &str| lines.iter().find(|line| line["id"] == id).unwrap();
        assert!(
            rows::all()
                .iter()
                .all(|row| !of(&row.id)["paper"].is_null())
        );
        let s2 = of("S2");
        for key in [
            "where", "claim", "measured", "mark", "holds", "verdict", "seeds",
        ] {
            assert!(!s2[key].is_null(), "{key}: {s2}");
        }
        assert_eq!(of("C5")["where"], "model");
        assert_eq!(of("C1")["not_run"], "no run is kept");
    }
}
