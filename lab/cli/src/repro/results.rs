//! Kept results, and the generation of docs/results.md from them.
//!
//! ```text
//!  cedos repro ID --into docs/results ─▶ docs/results/ID.sim.json, .svg
//!  cedos repro --table docs/results   ─▶ docs/results.md
//! ```
//!
//! A row without a kept result is listed as such: the table contains only what was run.

use super::experiment::row_file::ResultRow;
use super::reproduced::{Reproduced, charts};
use super::runner::RowVenue;
use super::{mark, plot, rows};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The largest picture that is kept, in bytes; the figures of larger ones are kept.
const PICTURE_BYTES_MAX: usize = 40_000;

/// The result of a row, and its date.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KeptResult {
    /// The date of the run, UTC.
    run_on: jiff::civil::Date,
    /// Whether its charts are stored beside it.
    picture: bool,
    /// The result of the row.
    #[serde(flatten)]
    pub row: Reproduced,
}

/// Stores the result of a row.
///
/// # Errors
/// The folder is not writable, or the row's charts cannot be drawn.
pub fn keep(folder: &Path, row: &ResultRow, reproduced: &Reproduced) -> anyhow::Result<()> {
    let at = || format!("cannot write into {}", folder.display());
    std::fs::create_dir_all(folder).with_context(at)?;
    let name = format!("{}.{}", reproduced.id, reproduced.r#where.word());
    let picture = plot::picture(&charts(row, reproduced)?);
    let kept = KeptResult {
        run_on: jiff::Timestamp::now()
            .to_zoned(jiff::tz::TimeZone::UTC)
            .date(),
        picture: picture.len() <= PICTURE_BYTES_MAX,
        row: reproduced.clone(),
    };
    if kept.picture {
        std::fs::write(folder.join(format!("{name}.svg")), picture).with_context(at)?;
    }
    let json = serde_json::to_string_pretty(&kept)? + "\n";
    std::fs::write(folder.join(format!("{name}.json")), json).with_context(at)
}

/// Reads the results kept in a folder.
///
/// # Errors
/// A file cannot be read, or is no kept result.
pub fn read(folder: &Path) -> anyhow::Result<Vec<KeptResult>> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut kept: Vec<(PathBuf, KeptResult)> = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "json") {
            let text = std::fs::read_to_string(&path)?;
            let result = serde_json::from_str(&text)
                .with_context(|| format!("{} is no kept result", path.display()))?;
            kept.push((path, result));
        }
    }
    kept.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(kept.into_iter().map(|(_, result)| result).collect())
}

const HEAD: &str = "\
# Results

What the papers claim, and what the last kept run of each row came to. This file is generated: `cedos repro ID --into
docs/results` keeps a run, `cedos repro --table docs/results > docs/results.md` writes this. What a row does is in
`lab/repro/ID.toml` ([format](repro.md)); how results came about is told in [repro/](repro).

*Verdict*: **reproduced** where every mark of the row holds, **better** where we are also beyond what the authors
report, **not reproduced** where a mark does not hold, **contradicts** where the figures speak against the claim. *Where*:
`sim` is virtual time around the real protocol code; `model` is a model without it; `lab` is real sockets between network
namespaces; `tunnel` is kernel TCP through the VPN there. The figure shown is the one nearest to its mark. *Seeds*: of how
many seeds, days, trips or rounds the figures are; where they are means over seeds, also with how many of these the mark
held that held with fewest. The JSON has the least and the most of each.
";

/// The document of these results.
pub fn table(kept: &[KeptResult]) -> String {
    let mut text = HEAD.to_owned();
    text += "\n| row | claim | the authors | where | verdict | nearest to its mark | marks | seeds | run on |\n\
             |---|---|---|---|---|---|---:|---:|---|\n";
    let mut not_kept = Vec::new();
    let mut missed = Vec::new();
    let mut pictures = String::new();
    for row in rows::all() {
        if row.venues.is_empty() {
            not_kept.push(format!("{} ({}): it cannot be run yet", row.id, row.claim));
        }
        for (venue, _) in &row.venues {
            match find(kept, &row.id, *venue) {
                Some(result) => {
                    let _ = writeln!(text, "{}", line(result));
                    missed.extend(missed_marks(&result.row));
                    if result.picture {
                        let name = format!("{}.{}", row.id, venue.word());
                        let _ = write!(
                            pictures,
                            "\n{name}: {}\n\n![{name}](results/{name}.svg)\n",
                            row.claim
                        );
                    }
                }
                None => not_kept.push(format!("{} ({}): no run is kept", row.id, venue.word())),
            }
        }
    }
    text += "\n## Missed\n\nMarks that do not hold in the runs above:\n\n";
    text += &list(&missed, "none");
    text += "\nWhat else is missed, or was not tried, is in [marks.md](marks.md#missed-or-not-tried-yet).\n\
             \n## Not in the table\n\n";
    text += &list(&not_kept, "every row of every place is");
    if !pictures.is_empty() {
        text += "\n## Pictures\n";
        text += &pictures;
    }
    text
}

fn find<'a>(kept: &'a [KeptResult], id: &str, venue: RowVenue) -> Option<&'a KeptResult> {
    let mut kept = kept.iter();
    kept.find(|result| result.row.id == id && result.row.r#where == venue)
}

fn list(items: &[String], none: &str) -> String {
    if items.is_empty() {
        return format!("{none}\n");
    }
    items.iter().map(|item| format!("- {item}\n")).collect()
}

fn line(result: &KeptResult) -> String {
    let row = &result.row;
    let (id, venue) = (&row.id, row.r#where.word());
    let held = row.mark.len() - missed_marks(row).len();
    let cells = [
        format!("[{id}](results/{id}.{venue}.json)"),
        row.claim.clone(),
        row.paper.clone(),
        row.source().to_owned(),
        row.verdict.words().to_owned(),
        nearest(row),
        format!("{held} of {}", row.mark.len()),
        seeds(row),
        result.run_on.to_string(),
    ];
    let cells: Vec<_> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    format!("| {} |", cells.join(" | "))
}

/// The number of seeds, and with how many of them every mark held.
fn seeds(row: &Reproduced) -> String {
    let held = row.marks_by_seed.iter().map(|mark| mark.held).min();
    match held {
        Some(held) if held < row.seeds => format!("{}; a mark with {held}", row.seeds),
        Some(_) => format!("{}; each mark with all", row.seeds),
        None => row.seeds.to_string(),
    }
}

/// The marks that do not hold, with their figures.
fn missed_marks(row: &Reproduced) -> Vec<String> {
    let holds = |mark: &&String| mark::one_holds(mark, &row.ours).unwrap_or(false);
    let missed = row.mark.iter().filter(|mark| !holds(mark));
    let words = |mark: &String| {
        format!(
            "{} ({}): {}",
            row.id,
            row.r#where.word(),
            with_figure(mark, row)
        )
    };
    missed.map(words).collect()
}

/// The mark whose figure is closest to its limit; those that do not hold come first.
fn nearest(row: &Reproduced) -> String {
    let distance = |mark: &&String| {
        let apart = mark::sides(mark, &row.ours).map_or(f64::MAX, |(left, right)| {
            (left - right).abs() / right.abs().max(1e-9)
        });
        let holds = mark::one_holds(mark, &row.ours).unwrap_or(false);
        match holds {
            // A comparison for equality has no distance to its limit.
            true if mark.contains("==") => f64::MAX,
            true => apart,
            false => -1.0 - apart,
        }
    };
    let mark = row
        .mark
        .iter()
        .min_by(|a, b| distance(a).total_cmp(&distance(b)));
    mark.map_or_else(String::new, |mark| with_figure(mark, row))
}

/// A mark with the figures that it contains.
fn with_figure(mark: &str, row: &Reproduced) -> String {
    let says_right_side = mark
        .split(' ')
        .next_back()
        .is_some_and(|last| last.parse::<f64>().is_ok());
    match mark::sides(mark, &row.ours) {
        Some((left, _)) if says_right_side => format!("`{mark}`: {}", short(left)),
        Some((left, right)) => format!("`{mark}`: {} and {}", short(left), short(right)),
        None => format!("`{mark}`: not measured"),
    }
}

/// Formats a number with four significant digits, or all digits of a whole number.
fn short(value: f64) -> String {
    if value.fract() == 0.0 || value.abs() >= 10_000.0 {
        return format!("{value:.0}");
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    let text = format!("{value:.*}", usize::try_from(digits).unwrap_or(0));
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::super::runner::MarkBySeed;
    use super::*;
    use crate::repro::mark::RowVerdict;
    use serde_json::json;

    fn kept(id: &str, share: f64) -> KeptResult {
        let holds = share >= 0.95;
        KeptResult {
            run_on: jiff::civil::date(2026, 11, 25),
            picture: true,
            row: Reproduced {
                id: id.to_owned(),
                r#where: RowVenue::Sim,
                model: id == "S4",
                claim: "a claim".to_owned(),
                paper: "a | b".to_owned(),
                ours: json!({"share": share, "far": 3, "less": 0.5}),
                baseline: json!(null),
                mark: ["far == 3", "far >= 0.9 * less", "share >= 0.95"]
                    .map(str::to_owned)
                    .into(),
                holds,
                verdict: if holds {
                    RowVerdict::Reproduced
                } else {
                    RowVerdict::NotReproduced
                },
                seeds: 3,
                marks_by_seed: Vec::new(),
                conditions: Vec::new(),
            },
        }
    }

    #[test]
    fn a_line_shows_the_figure_nearest_to_its_mark_and_what_is_missed_is_listed() {
        let text = table(&[kept("S2", 0.96123), kept("S4", 0.9)]);
        let of = |id: &str| {
            text.lines()
                .find(|line| line.starts_with(&format!("| [{id}]")))
        };
        let line = of("S2").unwrap();
        assert!(
            line.contains("`share >= 0.95`: 0.9612 | 3 of 3 | 3 | 2026-11-25"),
            "{line}"
        );
        assert!(
            line.contains("a \\| b") && line.contains("reproduced"),
            "{line}"
        );
        assert!(
            of("S4")
                .unwrap()
                .contains("| model | not reproduced | `share >= 0.95`: 0.9 | 2 of 3")
        );
        assert!(
            text.contains("- S4 (sim): `share >= 0.95`: 0.9\n"),
            "{text}"
        );
        assert!(!text.contains("- S2 (sim): `share"), "{text}");
        let both = with_figure("far >= 0.9 * less", &kept("S2", 1.0).row);
        assert_eq!(both, "`far >= 0.9 * less`: 3 and 0.45");
        assert!(text.contains("- S2 (lab): no run is kept\n"), "{text}");
        assert!(text.contains("- E2 (tunnel): no run is kept\n"), "{text}");
        assert!(text.contains("![S2.sim](results/S2.sim.svg)"));
    }

    #[test]
    fn of_means_over_seeds_it_is_said_with_how_many_the_marks_held() {
        let mut row = kept("S2", 0.97).row;
        let held = |held| MarkBySeed {
            held,
            least: None,
            most: None,
        };
        row.marks_by_seed = vec![held(3), held(2)];
        assert_eq!(seeds(&row), "3; a mark with 2");
        row.marks_by_seed = vec![held(3)];
        assert_eq!(seeds(&row), "3; each mark with all");
    }

    #[test]
    fn figures_have_four_digits_that_count() {
        let words = [0.95123, 12.3456, 0.0012349, 123456.7, 40.0, 1999.6].map(short);
        assert_eq!(
            words,
            ["0.9512", "12.35", "0.001235", "123457", "40", "2000"]
        );
    }

    #[test]
    fn a_result_is_kept_with_the_day_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let row = rows::find("S2").unwrap();
        let mut reproduced = kept("S2", 0.97).row;
        reproduced.ours["cases"] = json!([
            {"rtt_ms": 50, "blackout_s": 2, "share_of_ideal": 1, "share_of_ideal_one_link": 1}
        ]);
        keep(folder.path(), row, &reproduced).unwrap();
        let read = read(folder.path()).unwrap();
        assert_eq!(read.len(), 1);
        assert_eq!(
            (read[0].row.ours == reproduced.ours, read[0].picture),
            (true, true)
        );
        assert!(folder.path().join("S2.sim.svg").exists());
    }

    #[test]
    fn the_document_is_what_the_kept_results_give() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        let wanted = table(&read(&docs.join("results")).unwrap());
        let there = std::fs::read_to_string(docs.join("results.md")).unwrap();
        assert!(
            there == wanted,
            "docs/results.md is not that of docs/results: `cedos repro --table docs/results > docs/results.md`"
        );
    }
}
