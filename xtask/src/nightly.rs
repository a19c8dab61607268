//! `cargo xtask nightly`: checks that take too long for every change.
//!
//! All steps of `check` in their long form: every test, also those marked `#[ignore]`, optimised;
//! many random scenarios; thousands of kill points; every fuzz target for a while; every feature;
//! advisories; packages, tried in a fresh Debian. A step whose tool is missing says so and does not count
//! as passed.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;

use crate::repository::root;
use crate::step::{StepOutcome, Steps, cargo, has_subcommand, run as run_command};
use crate::totals::TestTotals;

/// Options of the verb `nightly`.
#[derive(clap::Args)]
pub struct NightlyOptions {
    /// Seconds for each fuzz target
    #[arg(long, default_value_t = 600)]
    fuzz_seconds: u32,
    /// Random scenarios to run
    #[arg(long, default_value_t = crate::seeds::NIGHT_SEEDS)]
    seeds: u64,
    /// The number of system calls at which a download and its proxy are killed
    #[arg(long, default_value_t = crate::kills::NIGHT_POINTS)]
    kill_points: u64,
    /// Other scenarios for the same seeds, and other kill points; by default the number of today
    #[arg(long)]
    salt: Option<u64>,
}

/// Runs every long step; returns whether none failed.
pub fn run(options: &NightlyOptions) -> Result<bool> {
    let mut steps = Steps::default();
    let mut totals = TestTotals::default();
    steps.command(
        "every feature",
        &mut cargo([
            "clippy",
            "--workspace",
            "--all-targets",
            "--all-features",
            "--locked",
            "--",
            "-D",
            "warnings",
        ]),
    );
    steps.run("tests, optimised, ignored ones too", || {
        crate::check::tests(&mut totals, &["--release", "--", "--include-ignored"])
    });
    let salt = options.salt.unwrap_or_else(today);
    steps.command(
        &format!("random scenarios, salt {salt}"),
        &mut crate::seeds::night(options.seeds, salt),
    );
    for (what, mut command) in crate::kills::night(options.kill_points, salt) {
        steps.command(&what, &mut command);
    }
    for target in fuzz_targets()? {
        steps.run(&format!("fuzz {target}"), || fuzz(&target, options));
    }
    steps.run("symbolic models", crate::model::step);
    steps.run("advisories", || {
        if has_subcommand("deny") {
            run_command(&mut cargo(["deny", "check"]))
        } else {
            Ok(StepOutcome::Skipped(
                "cargo-deny is not installed".to_owned(),
            ))
        }
    });
    crate::dist::nightly(&mut steps)?;
    let held = steps.summarise();
    totals.print();
    Ok(held && totals.failed == 0)
}

/// The number of days since 1970, so that every night tries new scenarios.
fn today() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() / 86_400)
}

/// The names of `fuzz/fuzz_targets/*.rs`; empty if there is no such folder.
fn fuzz_targets() -> Result<Vec<String>> {
    let folder = root().join("fuzz/fuzz_targets");
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    Ok(crate::repository::files_below(&folder, "rs")?
        .iter()
        .filter_map(|file| Some(file.file_stem()?.to_string_lossy().into_owned()))
        .collect())
}

fn fuzz(target: &str, options: &NightlyOptions) -> Result<StepOutcome> {
    if !has_subcommand("fuzz") {
        return Ok(StepOutcome::Skipped(
            "cargo-fuzz is not installed (cargo install cargo-fuzz; it needs a nightly toolchain)"
                .to_owned(),
        ));
    }
    let limit = format!("-max_total_time={}", options.fuzz_seconds);
    // cargo-fuzz needs a nightly compiler: by rustup's proxy, not by the cargo that runs this
    // program.
    run_command(
        std::process::Command::new("cargo")
            .args(["+nightly", "fuzz", "run", target, "--", &limit])
            .env_remove("CARGO")
            .env_remove("RUSTUP_TOOLCHAIN")
            .current_dir(root()),
    )
}
