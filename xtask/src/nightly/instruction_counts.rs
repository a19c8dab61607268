//! Instructions for a packet's life and for handshakes (`bench/counts`), against those that were kept.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use crate::repository::root;
use crate::step::cargo;

/// Where counts are kept, by name.
const KEPT: &str = "bench/counts/kept.json";
/// How many hundredths more than kept are a fault: compilers differ by less.
const MORE_MAX: u64 = 2;
/// How long the build of an optimised program may take beside the runs.
const BUILD_MAX: Duration = Duration::from_secs(900);

/// Counts, and compares.
pub fn run(context: &NightContext, budget: Duration) -> Result<NightPart> {
    for (tool, install) in [
        ("valgrind", "apt-get install valgrind"),
        (
            "gungraun-runner",
            "cargo install gungraun-runner --version 0.20.0",
        ),
    ] {
        let there = run_within(Command::new(tool).arg("--version"), Duration::from_secs(10));
        if !there.is_ok_and(|there| there.succeeded) {
            return Ok(NightPart::skipped(format!(
                "{tool} is not installed ({install})"
            )));
        }
    }
    let mut command = cargo(["bench", "--locked", "--color", "never"]);
    command
        .current_dir(root().join("bench/counts"))
        .env("GUNGRAUN_COLOR", "never");
    let ended = run_within(&mut command, budget + BUILD_MAX)?;
    let counts = counts_of(&ended.output);
    if !ended.succeeded || counts.is_empty() {
        return Ok(NightPart::failed(ended.end(20), json!({})));
    }
    let file = root().join(KEPT);
    if context.keep_counts {
        let text = format!("{:#}\n", json!(counts));
        std::fs::write(&file, text)?;
        return Ok(NightPart::held(
            format!("{} counts, kept in {KEPT}", counts.len()),
            json!(counts),
        ));
    }
    let Ok(kept) = std::fs::read_to_string(&file) else {
        let text = format!(
            "{} counts; none are kept to compare with (--keep-counts)",
            counts.len()
        );
        return Ok(NightPart::held(text, json!(counts)));
    };
    Ok(judge(&counts, &serde_json::from_str(&kept)?))
}

/// Compares counts with those that were kept.
fn judge(counts: &BTreeMap<String, u64>, kept: &BTreeMap<String, u64>) -> NightPart {
    let grown: Vec<String> = counts
        .iter()
        .filter_map(|(name, count)| {
            let before = kept.get(name)?;
            (count * 100 > before * (100 + MORE_MAX))
                .then(|| format!("{name}: {count}, was {before}"))
        })
        .collect();
    let figures = Value::from_iter(
        counts
            .iter()
            .map(|(name, count)| (name.clone(), json!(count))),
    );
    match grown.is_empty() {
        true => NightPart::held(
            format!(
                "{} counts, none {MORE_MAX} % above the kept ones",
                counts.len()
            ),
            figures,
        ),
        false => NightPart::failed(grown.join("; "), figures),
    }
}

/// Reads gungraun's table: a line with the name of each benchmark, and below it `Instructions: N|…`.
fn counts_of(output: &str) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    let mut name = None;
    for line in output.lines() {
        if let Some(rest) = line.trim_start().strip_prefix("Instructions:") {
            let digits = rest
                .trim_start()
                .split(['|', ' '])
                .next()
                .unwrap_or_default();
            if let (Some(name), Ok(count)) = (name.take(), digits.parse()) {
                counts.insert(name, count);
            }
        } else if line.contains("::") && !line.starts_with(' ') {
            name = line.split_whitespace().next().map(str::to_owned);
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::super::night_report::NightVerdict;
    use super::*;

    #[test]
    fn counts_are_read_by_name() {
        let output =
            "packets::life::full\n  Instructions:      12099|12099  (No change)\n  L1 Hits: 5|5\n";
        assert_eq!(
            counts_of(output),
            [("packets::life::full".to_owned(), 12_099)].into()
        );
    }

    #[test]
    fn three_in_a_hundred_more_are_a_fault_and_fewer_are_not() {
        let of = |count| BTreeMap::from([("a".to_owned(), count)]);
        assert_eq!(judge(&of(103), &of(100)).verdict, NightVerdict::Failed);
        assert_eq!(judge(&of(102), &of(100)).verdict, NightVerdict::Held);
        assert_eq!(judge(&of(50), &of(100)).verdict, NightVerdict::Held);
    }
}
