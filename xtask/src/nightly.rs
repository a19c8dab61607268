//! `cargo xtask nightly`: what takes longer than a change can wait.
//!
//! Everything of `check` in its long form: every test, also those marked `#[ignore]`, optimised;
//! many random scenarios; thousands of kill points; every fuzz target for a while; every feature; advisories. A run that needs a tool which is not
//! there says so and is not counted as held.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;

use crate::repository::root;
use crate::step::{StepOutcome, Steps, cargo, has_subcommand, run as run_command};
use crate::totals::TestTotals;

/// NightlyOptions of the verb.
#[derive(clap::Args)]
pub struct NightlyOptions {
    /// Seconds for each fuzz target
    #[arg(long, default_value_t = 600)]
    fuzz_seconds: u32,
    /// Random scenarios to run
    #[arg(long, default_value_t = crate::seeds::NIGHT_SEEDS)]
    seeds: u64,
    /// System calls to kill a download and its proxy at
    #[arg(long, default_value_t = crate::kills::NIGHT_POINTS)]
    kill_points: u64,
    /// Other scenarios for the same seeds, and other kill points; the number of today where nothing is said
    #[arg(long)]
    salt: Option<u64>,
}

/// Runs every long step; whether none failed.
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
    steps.run("advisories", || {
        if has_subcommand("deny") {
            run_command(&mut cargo(["deny", "check"]))
        } else {
            Ok(StepOutcome::Skipped(
                "cargo-deny is not installed".to_owned(),
            ))
        }
    });
    let held = steps.summarise();
    println!("{} passed, {} failed", totals.passed, totals.failed);
    Ok(held && totals.failed == 0)
}

/// Days since 1970: every night tries scenarios that none tried before.
fn today() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() / 86_400)
}

/// Names of `fuzz/fuzz_targets/*.rs`; none where there is no such folder.
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
    // cargo-fuzz wants a nightly compiler: through rustup's chooser, not the cargo that runs us.
    run_command(
        std::process::Command::new("cargo")
            .args(["+nightly", "fuzz", "run", target, "--", &limit])
            .env_remove("CARGO")
            .env_remove("RUSTUP_TOOLCHAIN")
            .current_dir(root()),
    )
}
