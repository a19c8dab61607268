//! Mutants of the core, by cargo-mutants: changes of single expressions, which some unit test of their crate must notice.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use crate::step::{cargo, has_subcommand};

/// The least share of mutants that tests notice, in hundredths.
const CAUGHT_MIN: usize = 85;
/// The time that a mutant takes: it is built, and its crate's tests run.
const SECONDS_EACH: u64 = 12; // a guess
/// Mutants of the crates below; the shard of a night is a part of them.
const ABOUT_ALL: u64 = 4_000; // a guess
/// Crates whose unit tests are enough to judge them: the session is judged by its exchanges, too.
const CRATES: [&str; 6] = [
    "d2tp-time",
    "d2tp-wire",
    "d2tp-seal",
    "d2tp-sched",
    "cedos-http",
    "cedos-text",
];

/// Tries a sample that fits into the time.
pub fn run(context: &NightContext, budget: Duration) -> Result<NightPart> {
    if !has_subcommand("mutants") {
        return Ok(NightPart::skipped(
            "cargo-mutants is not installed (cargo install --locked cargo-mutants)",
        ));
    }
    let folder = tempfile::tempdir()?;
    let shards = (ABOUT_ALL * SECONDS_EACH / budget.as_secs().max(1)).max(1);
    let shard = format!("{}/{shards}", context.salt % shards);
    let mut command = cargo([
        "mutants",
        "--no-shuffle",
        "--colors",
        "never",
        "--shard",
        &shard,
    ]);
    for name in CRATES {
        command.args(["-p", name]);
    }
    command.arg("--output").arg(folder.path());
    // Only unit tests: cargo builds programs of other folders for the others.
    command.args(["--", "--lib"]);
    let ended = run_within(&mut command, budget + Duration::from_secs(300))?;
    let text = std::fs::read_to_string(folder.path().join("mutants.out/outcomes.json"));
    let Ok(text) = text else {
        return Ok(NightPart::failed(ended.end(20), json!({"shard": shard})));
    };
    judge(
        &serde_json::from_str(&text).context("outcomes.json")?,
        &shard,
    )
}

/// Judges the outcomes of a sample.
fn judge(outcomes: &Value, shard: &str) -> Result<NightPart> {
    let count = |name: &str| outcomes[name].as_u64().unwrap_or(0) as usize;
    let (caught, missed) = (count("caught") + count("timeout"), count("missed"));
    if caught + missed == 0 {
        return Ok(NightPart::skipped("the sample had no mutant that builds"));
    }
    let percent = 100 * caught / (caught + missed);
    let missed_ones: Vec<&str> = outcomes["outcomes"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|outcome| outcome["summary"] == "MissedMutant")
        .filter_map(|outcome| outcome["scenario"]["Mutant"]["name"].as_str())
        .collect();
    let figures =
        json!({"shard": shard, "caught": caught, "missed": missed, "missed_list": missed_ones});
    let text = format!(
        "{caught} of {} mutants are noticed ({percent} %), sample {shard}",
        caught + missed
    );
    Ok(match percent >= CAUGHT_MIN {
        true => NightPart::held(text, figures),
        false => NightPart::failed(format!("{text}; at least {CAUGHT_MIN} % must be"), figures),
    })
}

#[cfg(test)]
mod tests {
    use super::super::night_report::NightVerdict;
    use super::*;

    #[test]
    fn too_many_mutants_that_nobody_notices_fail() {
        let outcomes =
            |caught: u64, missed: u64| json!({"caught": caught, "missed": missed, "timeout": 0});
        let verdict = |caught, missed| judge(&outcomes(caught, missed), "0/1").unwrap().verdict;
        assert_eq!(verdict(85, 15), NightVerdict::Held);
        assert_eq!(verdict(84, 16), NightVerdict::Failed);
        assert_eq!(verdict(0, 0), NightVerdict::Skipped);
    }
}
