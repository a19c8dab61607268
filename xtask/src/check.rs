//! `cargo xtask check`: everything a change must pass.
//!
//! ```text
//!  format ▸ lints ▸ tests ▸ random scenarios ▸ documentation ▸ rules ▸ MSRV ▸ dependencies
//! ```
//!
//! Every step runs even after one has failed. Lints carry the promise of `core/` too:
//! `core/clippy.toml` names what it may not touch, and a use of it is a warning, which is an
//! error here. Flags reach only clippy and rustdoc, never rustc, so that nothing is built twice.
//!
//! The last line is `N passed, N failed`, over all tests; a step that failed without any test
//! failing is in the lines above it and in the exit status.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::repository::root;
use crate::step::{StepOutcome, Steps, cargo, has_subcommand, run as run_command};
use crate::totals::Totals;
use crate::{hung, msrv, rules, seeds};

/// Runs every step; whether all held.
pub fn run() -> Result<bool> {
    let mut steps = Steps::default();
    let mut totals = Totals::default();
    steps.command("format", &mut cargo(["fmt", "--all", "--check"]));
    steps.command(
        "lints",
        &mut cargo([
            "clippy",
            "--workspace",
            "--all-targets",
            "--locked",
            "--",
            "-D",
            "warnings",
        ]),
    );
    steps.run("tests", || tests(&mut totals, &[]));
    steps.command("random scenarios", &mut seeds::check());
    steps.command(
        "documentation",
        cargo(["doc", "--workspace", "--no-deps", "--locked", "--quiet"])
            .env("RUSTDOCFLAGS", "-D warnings"),
    );
    steps.run("rules", || {
        let held = rules::run(&root(), &rules::RulesOptions::default())?;
        Ok(if held {
            StepOutcome::Held
        } else {
            StepOutcome::Failed
        })
    });
    steps.run("MSRV", || {
        println!("{}", msrv::check()?);
        Ok(StepOutcome::Held)
    });
    steps.run("dependencies", dependencies);
    let held = steps.summarise();
    println!("{} passed, {} failed", totals.passed, totals.failed);
    Ok(held && totals.failed == 0)
}

/// A test that says nothing for so long hangs. The slowest take some two minutes on a busy machine.
const SILENCE: Duration = Duration::from_secs(360);

/// Runs the tests of the workspace, showing their output and adding up their results.
pub fn tests(totals: &mut Totals, more: &[&str]) -> Result<StepOutcome> {
    // All binaries even after one failed, so that the totals are totals.
    let arguments = ["test", "--workspace", "--locked", "--no-fail-fast"];
    // Built first: a compiler may be silent for longer than a test.
    let mut build = cargo(arguments.iter().chain(more).copied().chain(["--no-run"]));
    if !matches!(run_command(&mut build)?, StepOutcome::Held) {
        return Ok(StepOutcome::Failed);
    }
    let mut command = cargo(arguments.iter().chain(more).copied());
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo test could not be started")?;
    let output = BufReader::new(child.stdout.take().expect("piped above"));
    let (hear, heard) = mpsc::channel();
    // Not joined: what a killed test left behind may hold the pipe open.
    std::thread::spawn(move || {
        for line in output.lines() {
            if hear.send(line).is_err() {
                return;
            }
        }
    });
    let mut last = Instant::now();
    let status = loop {
        match heard.recv_timeout(Duration::from_secs(1)) {
            Ok(line) => {
                let line = line?;
                println!("{line}");
                totals.hear(&line);
                last = Instant::now();
            }
            Err(RecvTimeoutError::Disconnected) => break child.wait()?,
            Err(RecvTimeoutError::Timeout) => {
                if let Some(status) = child.try_wait()? {
                    break status;
                }
                if last.elapsed() > SILENCE {
                    eprintln!("nothing was heard for {} s; killed:", SILENCE.as_secs());
                    for line in hung::kill_what_runs(&mut child) {
                        eprintln!("  {line}");
                    }
                    last = Instant::now();
                }
            }
        }
    };
    Ok(if status.success() {
        StepOutcome::Held
    } else {
        StepOutcome::Failed
    })
}

fn dependencies() -> Result<StepOutcome> {
    if !has_subcommand("deny") {
        return Ok(StepOutcome::Skipped(
            "cargo-deny is not installed (cargo install --locked cargo-deny)".to_owned(),
        ));
    }
    // Advisories need the network and are the nightly run's; so are warnings about duplicates.
    let arguments = ["deny", "--log-level", "error", "check"];
    run_command(cargo(arguments).args(["--hide-inclusion-graph", "licenses", "bans", "sources"]))
}
