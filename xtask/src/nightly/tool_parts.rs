//! Parts that are one run of one tool: advisories, the model, the stated Rust version, Miri.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::bounded_command::{BoundedOutcome, run_within};
use super::night_context::NightContext;
use super::night_report::NightPart;
use crate::repository::root;
use crate::step::{cargo, has_subcommand};

/// Crates of the core whose unit tests Miri can run: the others call aws-lc, which is C and assembly.
const MIRI_CRATES: [&str; 5] = [
    "d2tp-time",
    "d2tp-wire",
    "cedos-text",
    "cedos-http",
    "d2tp-sched",
];

/// The least time of a crate under Miri: it is built first.
const MIRI_LEAST: Duration = Duration::from_secs(45); // a guess

/// Advisories, licences and bans, by cargo-deny.
pub fn advisories(_: &NightContext, budget: Duration) -> Result<NightPart> {
    if !has_subcommand("deny") {
        return Ok(NightPart::skipped(
            "cargo-deny is not installed (cargo install --locked cargo-deny)",
        ));
    }
    let check = |what: &[&str]| {
        let mut command = cargo(["deny", "--log-level", "error", "check"]);
        command.arg("--hide-inclusion-graph").args(what);
        // The database of advisories may have to be fetched.
        run_within(&mut command, budget.max(Duration::from_secs(120)))
    };
    let advisories = check(&["advisories"])?;
    // Without it, nothing is known of advisories; that is no fault of a dependency.
    let is_unfetched = advisories
        .output
        .contains("failed to fetch advisory database");
    if !advisories.succeeded && !is_unfetched {
        return Ok(verdict(&advisories, ""));
    }
    let rest = check(&["licenses", "bans", "sources"])?;
    let text = match is_unfetched {
        true => {
            "licences, bans and sources; advisories were not read: their database cannot be fetched"
        }
        false => "no advisory, licence, ban or source concerns a dependency",
    };
    Ok(verdict(&rest, text))
}

/// The queries of the symbolic models.
pub fn model(_: &NightContext, budget: Duration) -> Result<NightPart> {
    if let Some(reason) = crate::model::missing_tool() {
        return Ok(NightPart::skipped(reason));
    }
    let mut verb = Command::new(std::env::current_exe()?);
    verb.arg("model").current_dir(root());
    let ended = run_within(&mut verb, budget.max(Duration::from_secs(600)))?;
    Ok(verdict(
        &ended,
        "every query of the model has its expected answer",
    ))
}

/// How long the workspace may take to be compiled by the stated Rust version: some six minutes on two cores.
const MSRV_BUILD_MAX: Duration = Duration::from_secs(20 * 60);

/// The workspace and its tests, compiled by the Rust version that it states. The check of every change compares what
/// dependencies state, and so does not see a use of something newer.
pub fn msrv(_: &NightContext, budget: Duration) -> Result<NightPart> {
    let version = crate::msrv::stated_toolchain()?;
    let probe = run_within(
        &mut toolchain_cargo(&version, &["--version"]),
        Duration::from_secs(30),
    )?;
    if !probe.succeeded {
        let text = format!(
            "Rust {version} is not there (rustup toolchain install {version} --profile minimal)"
        );
        return Ok(NightPart::skipped(text));
    }
    let mut check = toolchain_cargo(
        &version,
        &["check", "--workspace", "--all-targets", "--locked"],
    );
    check.args(["--target-dir", "target/msrv"]);
    let ended = run_within(&mut check, budget + MSRV_BUILD_MAX)?;
    let text = format!("Rust {version} compiles the workspace and its tests");
    Ok(verdict(&ended, &text))
}

/// How long the tests may take to be compiled: some ten minutes on two cores.
const TEST_BUILD_MAX: Duration = Duration::from_secs(30 * 60); // a guess

/// The tests of the agent's pages in Chromium and Firefox, with the accessibility checker. Where one of them is missing, this
/// fails: the check of every change passes there, and would never notice.
pub fn browsers(_: &NightContext, budget: Duration) -> Result<NightPart> {
    let mut tests = cargo(["test", "--workspace", "--locked", "--test", "agent", "--"]);
    tests
        .args([
            "podcasts_browser::",
            "podcasts_hearing::",
            "podcasts_lasting::",
        ])
        .env("CEDOS_REQUIRE", "browsers");
    let ended = run_within(&mut tests, budget + TEST_BUILD_MAX)?;
    let passed = ended.output.lines().filter(|line| line.ends_with("... ok"));
    let text = format!("{} tests in Chromium and Firefox", passed.count());
    Ok(verdict(&ended, &text))
}

/// Unit tests of the core under Miri, which finds undefined behaviour.
pub fn miri(_: &NightContext, budget: Duration) -> Result<NightPart> {
    if !run_within(
        &mut nightly_cargo(&["miri", "--version"]),
        Duration::from_secs(30),
    )?
    .succeeded
    {
        return Ok(NightPart::skipped(
            "there is no Miri (rustup toolchain install nightly --component miri,rust-src)",
        ));
    }
    let mut passed = serde_json::Map::new();
    let mut cut = Vec::new();
    let begun = std::time::Instant::now();
    for (n, name) in MIRI_CRATES.into_iter().enumerate() {
        // What is left, shared by those that are left.
        let left = budget.saturating_sub(begun.elapsed()) / u32::try_from(MIRI_CRATES.len() - n)?;
        let mut command = nightly_cargo(&["miri", "test", "--locked", "--lib", "-p", name]);
        // Tests read vectors; property tests keep no failures here, and try fewer values.
        command
            .env("MIRIFLAGS", "-Zmiri-disable-isolation")
            .env("PROPTEST_CASES", "4")
            .env("PROPTEST_FAILURE_PERSISTENCE", "off");
        let ended = run_within(&mut command, left.max(MIRI_LEAST))?;
        if !ended.succeeded && !ended.timed_out {
            let text = format!("{name}: {}", ended.end(20));
            return Ok(NightPart::failed(text, json!({"passed": passed})));
        }
        let tests = ended.output.lines().filter(|line| line.ends_with("... ok"));
        passed.insert(name.to_owned(), tests.count().into());
        if ended.timed_out {
            cut.push(name);
        }
    }
    let all: u64 = passed.values().filter_map(serde_json::Value::as_u64).sum();
    let figures = json!({"passed": passed, "cut_short": cut});
    if all == 0 {
        return Ok(NightPart::skipped(
            "no test ended within the time: Miri and the crates were built",
        ));
    }
    let whole = MIRI_CRATES.len() - cut.len();
    let text = format!(
        "{all} tests; {whole} crates whole, {} until their time was over; the others call C",
        cut.len()
    );
    Ok(NightPart::held(text, figures))
}

/// Cargo of the nightly toolchain.
pub fn nightly_cargo(arguments: &[&str]) -> Command {
    toolchain_cargo("nightly", arguments)
}

/// Cargo of a toolchain: by rustup's proxy, not by the cargo that runs this program.
fn toolchain_cargo(toolchain: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command
        .arg(format!("+{toolchain}"))
        .args(arguments)
        .env_remove("CARGO")
        .env_remove("RUSTUP_TOOLCHAIN")
        .current_dir(root());
    command
}

fn verdict(ended: &BoundedOutcome, text: &str) -> NightPart {
    match (ended.succeeded, ended.timed_out) {
        (true, _) => NightPart::held(text, json!({})),
        (false, true) => NightPart::failed("it did not end in time", json!({})),
        (false, false) => NightPart::failed(ended.end(20), json!({})),
    }
}
