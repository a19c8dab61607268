//! What threads share in the driver, in every order of their steps: the tests of `tools/races`, by loom.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::bounded_command::run_within;
use super::night_context::NightContext;
use super::night_report::NightPart;
use crate::repository::root;
use crate::step::cargo;

/// How long loom and what it needs may take to be built: a minute or two on two cores.
const BUILD_MAX: Duration = Duration::from_secs(10 * 60);

/// Builds the tests and runs them.
pub fn run(_: &NightContext, budget: Duration) -> Result<NightPart> {
    let folder = root().join("tools/races");
    // loom is no dependency of the workspace, so it may not be there.
    let mut fetch = cargo(["fetch", "--locked"]);
    fetch.current_dir(&folder);
    let fetched = run_within(&mut fetch, BUILD_MAX)?;
    if !fetched.succeeded {
        let text = format!("loom cannot be fetched: {}", fetched.end(3));
        return Ok(NightPart::skipped(text));
    }
    let mut tests = cargo(["test", "--release", "--locked"]);
    tests.current_dir(&folder);
    let ended = run_within(&mut tests, budget + BUILD_MAX)?;
    let passed = ended.output.lines().filter(|line| line.ends_with("... ok"));
    let figures = json!({"tests": passed.count()});
    Ok(match (ended.succeeded, ended.timed_out) {
        (true, _) => NightPart::held("every order of the threads of `tools/races`", figures),
        (false, true) => NightPart::failed("it did not end in time", figures),
        (false, false) => NightPart::failed(ended.end(25), figures),
    })
}
