//! A step of a check: a command or a function, its time, and whether it succeeded.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::repository::root;

/// The outcome of a step.
#[derive(Debug)]
pub enum StepOutcome {
    /// The step succeeded.
    Held,
    /// The step failed; the reason is on the terminal.
    Failed,
    /// The step was not run, for this reason.
    Skipped(String),
}

/// The steps so far.
#[derive(Debug, Default)]
pub struct Steps {
    done: Vec<(String, StepOutcome, Duration)>,
}

impl Steps {
    /// Runs a step. A failure does not stop the following ones: one run shows everything.
    pub fn run(&mut self, name: &str, step: impl FnOnce() -> Result<StepOutcome>) {
        eprintln!("── {name}");
        let begun = Instant::now();
        let outcome = step().unwrap_or_else(|error| {
            eprintln!("{error:#}");
            StepOutcome::Failed
        });
        self.done.push((name.to_owned(), outcome, begun.elapsed()));
    }

    /// Runs a command as a step.
    pub fn command(&mut self, name: &str, command: &mut Command) {
        self.run(name, || run(command));
    }

    /// Prints a line per step; returns whether none failed.
    pub fn summarise(&self) -> bool {
        eprintln!("──");
        for (name, outcome, took) in &self.done {
            let took = took.as_secs_f64();
            match outcome {
                StepOutcome::Held => eprintln!("  ok       {name} ({took:.0} s)"),
                StepOutcome::Failed => eprintln!("  FAILED   {name} ({took:.0} s)"),
                StepOutcome::Skipped(reason) => eprintln!("  skipped  {name}: {reason}"),
            }
        }
        !self
            .done
            .iter()
            .any(|(_, outcome, _)| matches!(outcome, StepOutcome::Failed))
    }
}

/// `cargo` with `arguments`, in the repository. It is the cargo that runs this program, so that all
/// steps use one toolchain and share its output.
pub fn cargo<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(arguments).current_dir(root());
    command
}

/// Whether a cargo subcommand is installed.
pub fn has_subcommand(name: &str) -> bool {
    cargo([name, "--version"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> Result<StepOutcome> {
    let status = command
        .status()
        .with_context(|| format!("{command:?} could not be started"))?;
    Ok(if status.success() {
        StepOutcome::Held
    } else {
        StepOutcome::Failed
    })
}
