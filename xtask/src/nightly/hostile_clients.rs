//! Every kind of hostile client against a proxy in a control group: `cedos bench hostile`.
//!
//! Memory is judged, and whether the proxy was killed. What honest clients keep of their goodput depends on what else
//! the machine does at night, so the report says it, and it fails nothing.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use crate::repository::root;
use crate::test_programs;

/// Builds the programs optimised.
const OPTIMISED: [&str; 8] = [
    "build",
    "--release",
    "--locked",
    "--bins",
    "-p",
    "cedos",
    "-p",
    BENCH,
];
/// The program of the bench, which starts the proxy that is beside it.
const BENCH: &str = "cedos-bench";
/// The number of kinds, by which the time is divided.
const KINDS: f64 = 34.0;
/// What a kind takes beside its attack, and the times before and after it that are as long together: in seconds.
const BESIDE_S: f64 = 3.0; // a guess
/// The shortest and the longest attack, in seconds. What fills memory does so in the first three.
const ATTACK_S: (f64, f64) = (3.0, 10.0);
/// How much longer than its share the run may take.
const GRACE: Duration = Duration::from_secs(15 * 60); // a guess: programs have to start

/// Builds the programs and runs all kinds.
pub fn run(context: &NightContext, budget: Duration) -> Result<NightPart> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(NightPart::skipped(
            "only root can limit the memory of the proxy by a control group",
        ));
    }
    // The bound has room for the program, and one that is built for the tests is three times as large.
    if !context.is_long {
        return Ok(NightPart::skipped(
            "there is no time to build the proxy optimised, as its bound of memory asks",
        ));
    }
    let program = test_programs::example(BENCH, &OPTIMISED)?;
    let attack_s = attack_s(budget);
    let mut bench = Command::new(program);
    bench
        .args(["hostile", "--json"])
        .args(["--attack-s", &attack_s.to_string()])
        .current_dir(root());
    let ended = run_within(&mut bench, budget + GRACE)?;
    // It ends with an error if goodput missed its mark, too.
    let Some(outcome) = outcome_of(&ended.output) else {
        return Ok(NightPart::failed(ended.end(20), json!({})));
    };
    judge(&outcome)
}

/// The length of each attack, so that all kinds fit into the time.
fn attack_s(budget: Duration) -> f64 {
    let of_kind = budget.as_secs_f64() / KINDS;
    ((of_kind - BESIDE_S) / 2.0)
        .clamp(ATTACK_S.0, ATTACK_S.1)
        .round()
}

/// The object that the bench prints, among what else it wrote.
fn outcome_of(output: &str) -> Option<Value> {
    let mut objects = output
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    objects.find(|object| object["kinds"].is_array())
}

/// Whether every kind stayed within its bound of memory, and no proxy was killed.
fn judge(outcome: &Value) -> Result<NightPart> {
    let kinds = outcome["kinds"].as_array().context("the bench ran kinds")?;
    let mut missed = Vec::new();
    for kind in kinds {
        let name = kind["kind"].as_str().unwrap_or_default();
        let bytes = |key: &str| kind[key].as_u64().with_context(|| format!("{name}: {key}"));
        let (most, bound) = (bytes("rss_max_bytes")?, bytes("rss_bound_bytes")?);
        if kind["killed"] == true {
            missed.push(format!("{name}: the proxy was killed"));
        } else if most > bound {
            missed.push(format!("{name}: {most} bytes of {bound}"));
        }
    }
    let figures = outcome.clone();
    if !missed.is_empty() {
        return Ok(NightPart::failed(missed.join("; "), figures));
    }
    let ratio = outcome["others_goodput_ratio"].as_f64().unwrap_or(0.0);
    let text = format!(
        "{} kinds within their memory, limited by {}; goodput of others {ratio:.2} at least",
        kinds.len(),
        outcome["limited_by"].as_str().unwrap_or_default()
    );
    Ok(NightPart::held(text, figures))
}

#[cfg(test)]
mod tests {
    use super::super::night_report::NightVerdict;
    use super::*;

    fn kind(most: u64, killed: bool) -> Value {
        json!({"kind": "garbage", "rss_max_bytes": most, "rss_bound_bytes": 100, "killed": killed})
    }

    fn verdict(kinds: &[Value]) -> NightVerdict {
        let line = json!({"kinds": kinds, "others_goodput_ratio": 0.4, "limited_by": "cgroup-v1"});
        let output = format!("starts\n{line}\nError: marks were missed: garbage\n");
        judge(&outcome_of(&output).unwrap()).unwrap().verdict
    }

    #[test]
    fn memory_and_a_killed_proxy_fail_the_part_and_goodput_does_not() {
        assert_eq!(verdict(&[kind(100, false)]), NightVerdict::Held);
        let too_much = [kind(50, false), kind(101, false)];
        assert_eq!(verdict(&too_much), NightVerdict::Failed);
        assert_eq!(verdict(&[kind(50, true)]), NightVerdict::Failed);
        assert!(outcome_of("Error: syn-flood could not be run").is_none());
    }

    #[test]
    fn attacks_are_as_long_as_the_time_allows() {
        assert_eq!(attack_s(Duration::from_secs(10)), 3.0);
        assert_eq!(attack_s(Duration::from_secs(34 * 13)), 5.0);
        assert_eq!(attack_s(Duration::from_secs(3600)), 10.0);
    }
}
