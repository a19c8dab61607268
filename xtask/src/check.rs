//! `cargo xtask check`: everything a change must pass.
//!
//! ```text
//!  format ▸ lints ▸ tests ▸ random scenarios ▸ documentation ▸ rules ▸ MSRV ▸ dependencies
//! ```
//!
//! Every step runs even after one has failed. Lints also check that `core/` uses no I/O and no
//! clock: `core/clippy.toml` lists what it must not use, and a use is a warning, which is an error
//! here. Flags are passed only to clippy and rustdoc, never to rustc, so that nothing is built
//! twice.
//!
//! The last line is `N passed, N failed`, over all tests; a step that failed without any test
//! failing is in the lines above it and in the exit status.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::repository::root;
use crate::step::{StepOutcome, Steps, cargo, has_subcommand, run as run_command};
use crate::totals::TestTotals;
use crate::{hung, msrv, rules, seeds, test_programs};

/// Runs every step; returns whether all succeeded.
pub fn run() -> Result<bool> {
    let mut steps = Steps::default();
    let mut totals = TestTotals::default();
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
    steps.run("random scenarios", || run_command(&mut seeds::check()?));
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
    totals.print();
    Ok(held && totals.failed == 0)
}

/// The number of tests that [`times`] lists.
const LONGEST_TESTS: usize = 40;

/// Runs the tests alone, and says which took longest; returns whether all succeeded.
pub fn times() -> Result<bool> {
    let mut totals = TestTotals::default();
    let mut steps = Steps::default();
    let report = [&["--"], &test_programs::REPORT_TIME[..]].concat();
    steps.run("tests", || tests(&mut totals, &report));
    let held = steps.summarise();
    totals.print_longest(LONGEST_TESTS);
    totals.print();
    Ok(held && totals.failed == 0)
}

/// A test program without output for this long hangs. The slowest test takes about two minutes on a
/// busy machine.
pub const SILENCE: Duration = Duration::from_secs(360);

/// Runs the tests of the workspace, adding up their results; `more` are arguments of cargo, and
/// after `--` of the tests.
pub fn tests(totals: &mut TestTotals, more: &[&str]) -> Result<StepOutcome> {
    let split = more.iter().position(|word| *word == "--");
    let (of_cargo, of_tests) = match split {
        Some(at) => (&more[..at], &more[at + 1..]),
        None => (more, &[][..]),
    };
    // All are built first: a compiler may be silent for longer than a test.
    let arguments = [&["test", "--workspace", "--locked"], of_cargo].concat();
    let Some(programs) = test_programs::build(&arguments)? else {
        return Ok(StepOutcome::Failed);
    };
    // All programs run even after one failed, so that the totals are complete.
    let programs = test_programs::run(programs.iter(), of_tests, SILENCE, totals)?;
    let of_examples = of_tests
        .iter()
        .filter(|word| !test_programs::REPORT_TIME.contains(word));
    let of_examples: Vec<&str> = of_examples.copied().collect();
    let examples = [
        &arguments[..],
        &["--no-fail-fast", "--doc", "--"],
        &of_examples,
    ]
    .concat();
    let examples = heard(&mut cargo(examples), totals)?;
    Ok(if programs && examples {
        StepOutcome::Held
    } else {
        StepOutcome::Failed
    })
}

/// Runs a cargo command that runs tests, and shows its output; returns whether it succeeded. A
/// command without output for too long is killed.
fn heard(command: &mut Command, totals: &mut TestTotals) -> Result<bool> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo test could not be started")?;
    let output = BufReader::new(child.stdout.take().expect("piped above"));
    let (hear, heard) = mpsc::channel();
    // Not joined: a process left by a killed test may keep the pipe open.
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
    Ok(status.success())
}

fn dependencies() -> Result<StepOutcome> {
    if !has_subcommand("deny") {
        return Ok(StepOutcome::Skipped(
            "cargo-deny is not installed (cargo install --locked cargo-deny)".to_owned(),
        ));
    }
    // Advisories need the network and belong to the nightly run, as do warnings about duplicates.
    let arguments = ["deny", "--log-level", "error", "check"];
    run_command(cargo(arguments).args(["--hide-inclusion-graph", "licenses", "bans", "sources"]))
}
