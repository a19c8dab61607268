//! The public test suite for HTTP caches against D2Prox, where a checkout of it is given: `tools/cache-tests.mjs`.
//!
//! The marks must hold, and each test that fails must have its reason in `docs/cache-tests.md`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use crate::repository::root;
use crate::test_programs;

/// The variable that names a checkout of `http-tests/cache-tests` in which `npm install` was run.
const CHECKOUT: &str = "CEDOS_CACHE_TESTS";
/// The document with the reasons.
const REASONS: &str = "docs/cache-tests.md";
/// The program that is tested.
const PROGRAM: &str = "cedos";
/// How long the suite may take: some minutes.
const SUITE_MAX: Duration = Duration::from_secs(15 * 60); // a guess

/// Builds the proxy and runs the suite.
pub fn run(context: &NightContext, budget: Duration) -> Result<NightPart> {
    let suite = match checkout() {
        Ok(suite) => suite,
        Err(why) => return Ok(NightPart::skipped(why)),
    };
    let mut build = vec!["build", "--workspace", "--locked", "--bin", PROGRAM];
    if context.is_long {
        build.push("--release");
    }
    let program = test_programs::example(PROGRAM, &build)?;
    let folder = tempfile::tempdir()?;
    let results = folder.path().join("results.json");
    let mut command = Command::new("node");
    command
        .arg("tools/cache-tests.mjs")
        .args([&suite, &program])
        .arg("--json")
        .arg(&results)
        .current_dir(root());
    let ended = run_within(&mut command, budget.max(SUITE_MAX))?;
    // It ends with an error if a mark was missed, too.
    let Ok(text) = std::fs::read_to_string(&results) else {
        return Ok(NightPart::failed(ended.end(20), json!({})));
    };
    let reasons = std::fs::read_to_string(root().join(REASONS)).context(REASONS)?;
    judge(&serde_json::from_str(&text)?, &reasons, ended.succeeded)
}

/// The checkout, or why there is none that can be run.
fn checkout() -> Result<PathBuf, String> {
    let given = std::env::var_os(CHECKOUT).map(PathBuf::from);
    let suite = given.ok_or(format!(
        "{CHECKOUT} names no checkout of http-tests/cache-tests in which `npm install` was run"
    ))?;
    let has = |part: &str| suite.join(part).exists();
    if !has("tests/index.mjs") {
        return Err(format!("{} is no checkout of the suite", suite.display()));
    }
    if !has("node_modules") {
        return Err(format!(
            "the suite needs its packages (cd {} && npm install)",
            suite.display()
        ));
    }
    let node = Command::new("node").arg("--version").output();
    if !node.is_ok_and(|output| output.status.success()) {
        return Err("node is not installed (apt install nodejs)".to_owned());
    }
    // The suite's programs run in folders of their own.
    Path::canonicalize(&suite).map_err(|error| error.to_string())
}

/// Whether the marks are kept, and each test that failed has a reason.
fn judge(results: &Value, reasons: &str, is_kept: bool) -> Result<NightPart> {
    let passed = |kind: &str| {
        let count = &results["counts"][kind];
        let of = |key: &str| {
            count[key]
                .as_u64()
                .with_context(|| format!("{kind}: {key}"))
        };
        Ok::<_, anyhow::Error>((of("passed")?, of("of")?))
    };
    let (required, optimal) = (passed("required")?, passed("optimal")?);
    let missed = results["missed"]
        .as_array()
        .context("the tests that failed")?;
    let ids = missed.iter().filter_map(|test| test["id"].as_str());
    let unexplained: Vec<&str> = ids
        .filter(|id| !reasons.contains(&format!("`{id}`")))
        .collect();
    let text = format!(
        "{} of {} required and {} of {} optimal tests",
        required.0, required.1, optimal.0, optimal.1
    );
    let figures = results.clone();
    Ok(match (is_kept, unexplained.is_empty()) {
        (true, true) => NightPart::held(text, figures),
        (false, _) => NightPart::failed(format!("a mark was missed: {text}"), figures),
        (true, false) => NightPart::failed(
            format!(
                "{text}; without a reason in {REASONS}: {}",
                unexplained.join(", ")
            ),
            figures,
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::night_report::NightVerdict;
    use super::*;

    fn verdict(missed: &[&str], is_kept: bool) -> NightVerdict {
        let count = json!({"passed": 2, "of": 3});
        let missed: Vec<Value> = missed.iter().map(|id| json!({"id": id})).collect();
        let results = json!({"counts": {"required": count, "optimal": count}, "missed": missed});
        judge(&results, "| `a-test` | why |", is_kept)
            .unwrap()
            .verdict
    }

    #[test]
    fn a_mark_that_is_missed_and_a_failure_without_a_reason_fail_the_part() {
        assert_eq!(verdict(&["a-test"], true), NightVerdict::Held);
        assert_eq!(verdict(&[], true), NightVerdict::Held);
        assert_eq!(verdict(&["another"], true), NightVerdict::Failed);
        assert_eq!(verdict(&["a-test"], false), NightVerdict::Failed);
    }
}
