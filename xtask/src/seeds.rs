//! Random scenarios in the simulator: some at every check, many at night.
//!
//! A check runs the program that the tests have built anyway. For the long run a build with every
//! check on, optimised, is worth its minutes.

use std::process::Command;

use anyhow::Result;

use crate::repository::root;
use crate::step::cargo;
use crate::test_programs;

/// The example of `lab/sim` that runs random scenarios.
pub const EXAMPLE: &str = "sim";

/// Seeds of a check: 70 s of a core and a half minute or more on two of them.
pub const CHECK_SEEDS: u64 = 2_000;
/// Seeds between two commits.
pub const QUICK_SEEDS: u64 = 100;
/// Seeds of a night.
pub const NIGHT_SEEDS: u64 = 100_000;

/// The seeds of a check, always the same ones.
pub fn check() -> Result<Command> {
    first(CHECK_SEEDS)
}

/// The first of the seeds that a check runs.
pub fn quick() -> Result<Command> {
    first(QUICK_SEEDS)
}

fn first(seeds: u64) -> Result<Command> {
    let program = test_programs::example(EXAMPLE)?;
    let mut command = Command::new(program);
    command.args(["fuzz", "--seeds", &seeds.to_string()]);
    command.current_dir(root());
    Ok(command)
}

/// Many seeds; a fault that never hit a state it can hit is a failure too.
pub fn night(seeds: u64, salt: u64) -> Command {
    let mut command = cargo(["run", "--locked", "--quiet", "-p", "cedos-lab-sim"]);
    command.args(["--example", EXAMPLE, "--profile", "sim", "--"]);
    command.args(["fuzz", "--seeds", &seeds.to_string()]);
    command.args(["--salt", &salt.to_string(), "--require-coverage"]);
    command
}
