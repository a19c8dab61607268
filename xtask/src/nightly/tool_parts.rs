//! Parts that are one run of one tool: advisories, the model, Miri.

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

/// Advisories, licences and bans, by cargo-deny.
pub fn advisories(_: &NightContext, budget: Duration) -> Result<NightPart> {
    if !has_subcommand("deny") {
        return Ok(NightPart::skipped(
            "cargo-deny is not installed (cargo install --locked cargo-deny)",
        ));
    }
    let arguments = [
        "deny",
        "--log-level",
        "error",
        "check",
        "--hide-inclusion-graph",
    ];
    // The database of advisories may have to be fetched.
    let ended = run_within(&mut cargo(arguments), budget.max(Duration::from_secs(120)))?;
    Ok(verdict(
        &ended,
        "no advisory, licence or ban concerns a dependency",
    ))
}

/// The queries of the symbolic model, where this program has them.
pub fn model(_: &NightContext, budget: Duration) -> Result<NightPart> {
    let verb = |more: &[&str]| {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("model").args(more).current_dir(root());
        anyhow::Ok(command)
    };
    if !run_within(&mut verb(&["--help"])?, Duration::from_secs(10))?.succeeded {
        return Ok(NightPart::skipped("`cargo xtask model` is not there"));
    }
    let ended = run_within(&mut verb(&[])?, budget.max(Duration::from_secs(600)))?;
    Ok(verdict(
        &ended,
        "every query of the model has its expected answer",
    ))
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
    let mut done = Vec::new();
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
        let ended = run_within(&mut command, left)?;
        if !ended.succeeded && !ended.timed_out {
            let text = format!("{name}: {}", ended.end(20));
            return Ok(NightPart::failed(text, json!({"crates": done})));
        }
        let end = if ended.timed_out {
            "until its time was over"
        } else {
            "whole"
        };
        done.push(format!("{name} ({end})"));
    }
    let text = format!("{}; the other crates of the core call C", done.join(", "));
    Ok(NightPart::held(text, json!({"crates": done})))
}

/// Cargo of the nightly toolchain: by rustup's proxy, not by the cargo that runs this program.
pub fn nightly_cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command
        .arg("+nightly")
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
