//! C10: how programs behave when the network is lost in the middle of a transfer, ours compared
//! with others.
//!
//! ```text
//!  client.rs ──┐
//!              ├─▶ cell.rs: each in a separate lab, many at once ───┐
//!  disturbance.rs                                                   ├─▶ table, figures, marks
//!              policy.rs: `cedos edit` while bytes flow ────────────┘
//! ```

mod cell;
mod client;
mod disturbance;
mod policy;

use super::runner::Measured;
use anyhow::{Context, ensure};
use cedos_terminal::print_stderr;
use cell::{ApplicationCell, CellDirection, CellResult, UnaidedTransferEnd};
use client::{CLIENTS, Client};
use disturbance::Disturbance;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

/// The number of labs at once; their programs mostly wait.
const AT_ONCE: usize = 24;
/// The interval between the starts of labs, so that their transfers do not coincide.
const APART: Duration = Duration::from_millis(2500);
/// How often cells that were not disturbed in their middle are run again, with fewer at once,
/// because programs start slowly on a busy machine.
const AGAIN: usize = 2;
const AT_ONCE_AGAIN: usize = 8;
/// Which cells are to be run.
#[derive(Clone, Debug)]
pub struct CellSelection {
    /// How long the network is away.
    pub delays_s: Vec<u32>,
    /// How long a program may be silent once the network is back, in seconds.
    pub patience_s: u32,
    /// The prefixes of the names of cells to run; all cells if empty.
    pub only: Vec<String>,
}

impl Default for CellSelection {
    fn default() -> CellSelection {
        CellSelection {
            delays_s: vec![10, 60],
            // A sender's kernel waits at most 120 s before it tries again. // Linux, TCP_RTO_MAX
            patience_s: 150,
            only: Vec::new(),
        }
    }
}

impl CellSelection {
    fn include(&self, name: &str) -> bool {
        let begins = |only: &String| {
            let rest = name.strip_prefix(only.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.only.is_empty() || self.only.iter().any(begins)
    }

    /// The cells of a client, the longest first.
    fn of(&self, client: &'static Client) -> Vec<ApplicationCell> {
        let mut cells = Vec::new();
        let mut delays_s = self.delays_s.clone();
        delays_s.sort_unstable();
        delays_s.dedup();
        let longest_s = delays_s.last().copied();
        for delay_s in delays_s.into_iter().rev() {
            for way in CellDirection::ALL {
                let Some(call) = client.call(way) else {
                    continue;
                };
                for disturbance in Disturbance::ALL {
                    let cell = ApplicationCell {
                        client,
                        way,
                        call,
                        disturbance,
                        delay_s,
                    };
                    // With another link, the length of the outage of the first one matters little.
                    let once = disturbance != Disturbance::Cellular || Some(delay_s) == longest_s;
                    if once && client.is_disturbed_by(disturbance) && self.include(&cell.name()) {
                        cells.push(cell);
                    }
                }
            }
        }
        cells
    }
}

/// All cells, on real sockets.
///
/// # Errors
/// There is no lab, or it could not follow a scenario.
pub fn emulate() -> anyhow::Result<Measured> {
    run(&CellSelection::default())
}

/// Runs some cells, on real sockets.
///
/// # Errors
/// There are no cells of these names, there is no lab, or it could not follow a scenario.
pub fn run(asked: &CellSelection) -> anyhow::Result<Measured> {
    let folder = tempfile::tempdir().context("no temporary folder")?;
    cell::furnish(folder.path())?;
    let (mut cells, mut missing) = (Vec::new(), Vec::new());
    for client in CLIENTS {
        match client.lacks() {
            Some(lacks) => missing.push(format!(
                "not run: {}: {lacks} is not installed here",
                client.name
            )),
            None => cells.extend(asked.of(client)),
        }
    }
    // The longest come first, so that none runs alone at the end; no program runs beside itself.
    cells.sort_by_key(|cell| {
        let way = cell.way == CellDirection::Up;
        (
            std::cmp::Reverse(cell.delay_s),
            cell.disturbance.word(),
            way,
        )
    });
    let toggles = asked.include("policy");
    ensure!(
        !cells.is_empty() || toggles,
        "there is no such cell of C10 that can be run here. --only takes a client, or more of a cell's \
         name, as in curl/down/off/10; clients are {}{}",
        CLIENTS
            .iter()
            .map(|c| c.name)
            .collect::<Vec<_>>()
            .join(", "),
        missing
            .iter()
            .map(|one| format!("\n{one}"))
            .collect::<String>()
    );
    let mut told = all(&cells, AT_ONCE, asked, folder.path())?;
    for _ in 0..AGAIN {
        let missed: Vec<usize> = (0..cells.len())
            .filter(|&n| !told[n].in_the_middle)
            .collect();
        let again: Vec<ApplicationCell> = missed.iter().map(|&n| cells[n]).collect();
        let came = all(&again, AT_ONCE_AGAIN, asked, folder.path())?;
        for (n, came) in missed.into_iter().zip(came) {
            told[n] = came;
        }
    }
    // It runs alone, because it measures seconds.
    let policy = toggles.then(|| policy::run(folder.path())).transpose()?;
    let mut measured = figures(&cells, &told, policy);
    if !cells.is_empty() {
        measured.ours["tried"] = tried(asked, &cells);
    }
    measured.conditions = missing;
    measured.conditions.extend(not_in_the_middle(&cells, &told));
    Ok(measured)
}

/// Runs cells, many at once.
fn all(
    cells: &[ApplicationCell],
    at_once: usize,
    asked: &CellSelection,
    folder: &Path,
) -> anyhow::Result<Vec<CellResult>> {
    let next = Mutex::new(0..cells.len());
    let told = Mutex::new(BTreeMap::new());
    let take = || {
        // The thread that takes a cell delays the others for a while.
        let mut next = next.lock().expect("nobody panics here");
        let n = next.next()?;
        std::thread::sleep(APART);
        Some(n)
    };
    let work = || -> anyhow::Result<()> {
        while let Some(n) = take() {
            let cell = &cells[n];
            let came = cell.run(asked.patience_s, folder);
            let came = came.with_context(|| format!("cell {}", cell.name()))?;
            let json = serde_json::to_string(&came)?;
            print_stderr(&format!("{} {json}", cell.name()));
            told.lock().expect("nobody panics here").insert(n, came);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once.min(cells.len()))
            .map(|_| scope.spawn(work))
            .collect();
        let mut ended = workers
            .into_iter()
            .map(|worker| worker.join().expect("nobody panics here"));
        ended.try_for_each(|ended| ended)
    })?;
    let told = told.into_inner().expect("nobody panics here");
    Ok(told.into_values().collect())
}

/// Whether the transfer was right without a retry, and was disturbed in its middle.
fn is_right(told: &CellResult) -> bool {
    told.ended == UnaidedTransferEnd::Right && told.in_the_middle
}

fn figures(cells: &[ApplicationCell], told: &[CellResult], policy: Option<Value>) -> Measured {
    let mut tables = [Map::new(), Map::new()];
    let mut counts = [(0, 0), (0, 0)];
    let mut leaked = None;
    for (cell, told) in cells.iter().zip(told) {
        let side = usize::from(!cell.client.ours);
        tables[side].insert(cell.name(), json!(told));
        counts[side].0 += 1;
        counts[side].1 += u32::from(is_right(told));
        if cell.client.name == "cedos-free-only" {
            leaked = leaked.max(told.metered_bytes);
        }
    }
    let [table, others] = tables;
    let mut ours = json!({ "cells": counts[0].0, "right": counts[0].1, "table": table });
    if let Some(leaked) = leaked {
        ours["free_only_metered_bytes_max"] = json!(leaked);
    }
    if let Some(policy) = policy {
        ours["policy"] = policy;
    }
    let baseline = json!({ "cells": counts[1].0, "right": counts[1].1, "table": others });
    Measured::figures(ours, baseline, 1)
}

fn not_in_the_middle(cells: &[ApplicationCell], told: &[CellResult]) -> Vec<String> {
    let both = cells.iter().zip(told);
    let not = both.filter(|(_, told)| !told.in_the_middle);
    not.map(|(cell, told)| {
        let percent = 100.0 * told.moved_before;
        format!(
            "{} was disturbed with {percent:.0} % moved: says nothing",
            cell.name()
        )
    })
    .collect()
}

/// How many cells were run of each client and with each disturbance, for the conditions of the row.
fn tried(asked: &CellSelection, cells: &[ApplicationCell]) -> Value {
    let mut counts = [BTreeMap::new(), BTreeMap::new()];
    for cell in cells {
        for (counts, name) in counts
            .iter_mut()
            .zip([cell.client.name, cell.disturbance.word()])
        {
            *counts.entry(name).or_insert(0) += 1;
        }
    }
    let [clients, disturbances] = counts;
    json!({
        "delays_s": asked.delays_s,
        "patience_s": asked.patience_s,
        "clients": clients,
        "disturbances": disturbances,
    })
}

/// The result of a client in words, by the number of the disturbance and the delay.
type CellTexts = BTreeMap<(usize, u32), String>;

/// A table in Markdown for each direction: clients, and the result of each with each disturbance.
pub fn table(ours: &Value, baseline: &Value) -> String {
    let mut cells: BTreeMap<(&str, &str), CellTexts> = BTreeMap::new();
    let both = [ours, baseline].map(|side| side["table"].as_object());
    for (name, told) in both.into_iter().flatten().flatten() {
        let words: Vec<&str> = name.split('/').collect();
        let [client, way, disturbance, delay_s] = words[..] else {
            continue;
        };
        let column = Disturbance::ALL
            .iter()
            .position(|d| d.word() == disturbance);
        if let (Some(column), Ok(delay_s)) = (column, delay_s.parse()) {
            let row = cells.entry((way, client)).or_default();
            row.insert((column, delay_s), in_words(told, delay_s));
        }
    }
    let mut text = String::new();
    for way in CellDirection::ALL.map(CellDirection::word) {
        let rows: Vec<_> = CLIENTS
            .iter()
            .filter_map(|client| Some((client.name, cells.get(&(way, client.name))?)))
            .collect();
        let mut columns: Vec<_> = rows.iter().flat_map(|(_, row)| row.keys()).collect();
        columns.sort_unstable();
        columns.dedup();
        if rows.is_empty() {
            continue;
        }
        let heads = columns
            .iter()
            .map(|(d, s)| format!(" {}, {s} s |", Disturbance::ALL[*d].word()));
        let _ = writeln!(text, "| {way} |{}", heads.collect::<String>());
        let _ = writeln!(text, "|---|{}", "---|".repeat(columns.len()));
        for (client, row) in rows {
            let _ = write!(text, "| {client} |");
            for column in &columns {
                let _ = write!(text, " {} |", row.get(*column).map_or("", String::as_str));
            }
            text.push('\n');
        }
        text.push('\n');
    }
    text
}

/// A higher share of the object on the links means that some of it was carried twice.
const ONCE: f64 = 1.15;

/// The result of a cell in a few words.
fn in_words(told: &Value, delay_s: u32) -> String {
    let after_s = told["after_s"].as_f64().unwrap_or(f64::NAN);
    let since_back_s = after_s - f64::from(delay_s);
    let mut text = match told["ended"].as_str() {
        Some("right") if since_back_s < 0.0 => format!("right, {:.0} s before", -since_back_s),
        Some("right") => format!("right, {since_back_s:.0} s"),
        Some("wrong") => "**wrong bytes**".to_owned(),
        Some("gave-up") => format!("**gave up** after {after_s:.0} s"),
        _ => "**hung**".to_owned(),
    };
    match told["by_hand"].as_str() {
        Some("right") => text += ", by hand right",
        Some("wrong") => text += ", by hand wrong bytes",
        Some(_) => text += ", not by hand either",
        None => {}
    }
    let carried = told["carried"].as_f64().unwrap_or(0.0);
    if carried > ONCE {
        let _ = write!(text, ", {carried:.1}×");
    }
    if told["in_the_middle"] == json!(false) {
        text += " (not disturbed in its middle)";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repro::runner::RowVenue;
    use crate::repro::{reproduced, rows};

    fn told(ended: UnaidedTransferEnd) -> CellResult {
        CellResult {
            ended,
            code: None,
            after_s: 17.0,
            by_hand: (ended != UnaidedTransferEnd::Right).then_some(UnaidedTransferEnd::Right),
            moved_before: 0.5,
            in_the_middle: true,
            carried: 1.04,
            metered_bytes: None,
        }
    }

    fn cells(only: &[&str]) -> Vec<ApplicationCell> {
        let asked = CellSelection {
            only: only.iter().map(|&name| name.to_owned()).collect(),
            ..CellSelection::default()
        };
        CLIENTS.iter().flat_map(|client| asked.of(client)).collect()
    }

    #[test]
    fn a_name_is_a_whole_word_of_cells() {
        let names = |only: &[&str]| {
            cells(only)
                .iter()
                .map(ApplicationCell::name)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names(&["curl/up/cut"]),
            ["curl/up/cut/60", "curl/up/cut/10"]
        );
        assert!(
            names(&["cedos"])
                .iter()
                .all(|name| name.starts_with("cedos/"))
        );
        assert_eq!(names(&["cedos-any"]), ["cedos-any/down/cellular/60"]);
        assert!(names(&["nobody"]).is_empty());
    }

    #[test]
    fn one_cell_of_ours_that_is_not_right_breaks_the_mark_and_others_do_not() {
        let cells = cells(&["cedos/down/off/10", "curl/down/off/10"]);
        let holds = |ours, theirs| {
            let measured = figures(&cells, &[told(ours), told(theirs)], None);
            reproduced::judge(rows::find("C10").unwrap(), RowVenue::Lab, measured)
                .unwrap()
                .holds
        };
        assert!(holds(UnaidedTransferEnd::Right, UnaidedTransferEnd::Hung));
        for ended in [
            UnaidedTransferEnd::Wrong,
            UnaidedTransferEnd::GaveUp,
            UnaidedTransferEnd::Hung,
        ] {
            assert!(!holds(ended, UnaidedTransferEnd::Right));
        }
        let mut late = told(UnaidedTransferEnd::Right);
        late.in_the_middle = false;
        assert!(!is_right(&late));
    }

    #[test]
    fn what_was_tried_is_described_in_the_rows_file_and_nothing_else() {
        let described = |only: &[&str]| {
            let asked = CellSelection::default();
            let mut measured = figures(&[], &[], None);
            measured.ours["tried"] = tried(&asked, &cells(only));
            let row = rows::find("C10").unwrap();
            let judged = reproduced::judge(row, RowVenue::Lab, measured).unwrap();
            let heads = judged.conditions.into_iter();
            let heads = heads.filter_map(|text| Some(text.split_once(": ")?.0.to_owned()));
            let names = |head: &String| !head.contains(' ') && head != "hung";
            heads.filter(names).collect::<Vec<_>>()
        };
        let disturbances = Disturbance::ALL.map(Disturbance::word);
        let clients = CLIENTS.iter().map(|client| client.name);
        assert_eq!(
            described(&[]),
            disturbances.into_iter().chain(clients).collect::<Vec<_>>()
        );
        assert_eq!(described(&["curl/up/cut"]), ["cut", "curl"]);
    }

    #[test]
    fn the_table_says_in_words_what_came_of_each() {
        let cells = cells(&["cedos/down/off/10", "curl/down/off/10"]);
        let measured = figures(
            &cells,
            &[
                told(UnaidedTransferEnd::Right),
                told(UnaidedTransferEnd::GaveUp),
            ],
            None,
        );
        let table = table(&measured.ours, &measured.baseline);
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(
            lines[..4],
            [
                "| down | off, 10 s |",
                "|---|---|",
                "| cedos | right, 7 s |",
                "| curl | **gave up** after 17 s, by hand right |",
            ]
        );
    }
}
