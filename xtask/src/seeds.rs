//! Random scenarios in the simulator, and scenarios at random times: some in every check, many in the nightly run.
//!
//! A check runs the program that is built for the tests anyway. The long run uses an optimised
//! build with every check enabled, which takes minutes to build.

use std::process::Command;

use anyhow::Result;

use crate::repository::root;
use crate::step::cargo;
use crate::test_programs;

/// The number of seeds from which on each fault must have affected each state that it can affect.
const COVERAGE_SEEDS: u64 = 20_000; // a guess

/// The example of `lab/sim` that runs random scenarios.
pub const EXAMPLE: &str = "sim";

/// The number of seeds of a check: 70 s of a core, half a minute or more on two of them.
pub const CHECK_SEEDS: u64 = 2_000;
/// The number of seeds of `quick`.
pub const QUICK_SEEDS: u64 = 100;
/// The number of seeds of a nightly run.
pub const NIGHT_SEEDS: u64 = 100_000;

/// Scenarios of networks that carry nothing, which a night runs at random times.
pub const VARIED_FILES: [&str; 5] = [
    "lab/scenarios/wifi-dead-at-start.toml",
    "lab/scenarios/wifi-dies-silently.toml",
    "lab/scenarios/portal-at-start.toml",
    "lab/scenarios/udp-blocked-midway.toml",
    "lab/scenarios/slow-wifi-deadline.toml",
];
/// The number of times at which a nightly run tries each of [`VARIED_FILES`].
pub const NIGHT_TIMES: u64 = 2_000;
/// The number of times at which `nightly --whole` tries each of them.
pub const WHOLE_TIMES: u64 = 10_000;

/// The seeds of a check, always the same ones. All tests are built by then, and the example with them; by itself it
/// would be built anew with most of its dependencies, because what build scripts share with programs is built with
/// other debug information then.
pub fn check() -> Result<Command> {
    first(
        CHECK_SEEDS,
        &["test", "--workspace", "--locked", "--no-run"],
    )
}

/// The first of the seeds that a check runs.
pub fn quick() -> Result<Command> {
    let arguments = ["build", "--workspace", "--locked", "--example", EXAMPLE];
    first(QUICK_SEEDS, &arguments)
}

/// A portion of a short night, with the program of the tests: an optimised one would take most of the time to build.
///
/// # Errors
/// It cannot be built.
pub fn short_night(seeds: u64, salt: u64) -> Result<Command> {
    let mut command = Command::new(test_programs::example(EXAMPLE, &TEST_PROGRAMS)?);
    command.args(["fuzz", "--seeds", &seeds.to_string()]);
    command
        .args(["--salt", &salt.to_string()])
        .current_dir(root());
    Ok(command)
}

/// The command that runs a scenario at `seeds` random times, from the seed `first` on.
///
/// # Errors
/// The program of the tests cannot be built.
pub fn varied(file: &str, first: u64, seeds: u64, is_optimised: bool) -> Result<Command> {
    let mut command = match is_optimised {
        true => optimised(),
        false => Command::new(test_programs::example(EXAMPLE, &TEST_PROGRAMS)?),
    };
    command.args(["vary", file, "--seeds", &seeds.to_string()]);
    command
        .args(["--first", &first.to_string()])
        .current_dir(root());
    Ok(command)
}

/// Builds the simulator and the laboratory as the tests have them.
pub const TEST_PROGRAMS: [&str; 9] = [
    "build",
    "--workspace",
    "--locked",
    "--example",
    EXAMPLE,
    "--bin",
    "cedos",
    "--bin",
    "cedos-lab",
];

fn first(seeds: u64, arguments: &[&str]) -> Result<Command> {
    let program = test_programs::example(EXAMPLE, arguments)?;
    let mut command = Command::new(program);
    command.args(["fuzz", "--seeds", &seeds.to_string()]);
    command.current_dir(root());
    Ok(command)
}

/// The command that runs many seeds with an optimised simulator.
pub fn night(seeds: u64, salt: u64) -> Command {
    let mut command = optimised();
    command.args(["fuzz", "--seeds", &seeds.to_string()]);
    command.args(["--salt", &salt.to_string()]);
    // With fewer, a fault may by chance never meet a state that it can affect.
    if seeds >= COVERAGE_SEEDS {
        command.arg("--require-coverage");
    }
    command
}

/// An optimised simulator, with every check enabled; its arguments follow.
fn optimised() -> Command {
    let mut command = cargo(["run", "--locked", "--quiet", "-p", "cedos-lab-sim"]);
    command.args(["--example", EXAMPLE, "--profile", "sim", "--"]);
    command
}
