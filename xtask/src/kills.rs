//! Kill points: `cedos lab kill`, a few of them in the tests, thousands in the nightly run.

use std::process::Command;

use anyhow::{Context, Result};

use crate::repository::root;
use crate::seeds::{EXAMPLE, TEST_PROGRAMS};
use crate::step::cargo;
use crate::test_programs;

/// Kill points of a night at most: an hour and a half of two cores.
pub const NIGHT_POINTS: u64 = 5_000;

/// A portion of a night: so many system calls at which a download or its proxy is killed. A short night takes the programs
/// of the tests.
///
/// # Errors
/// They cannot be built.
pub fn portion(points: u64, seed: u64, is_optimised: bool) -> Result<Command> {
    let mut command = match is_optimised {
        true => cargo([
            "run",
            "--release",
            "--locked",
            "--quiet",
            "-p",
            "cedos-lab",
            "--",
        ]),
        false => {
            let example = test_programs::example(EXAMPLE, &TEST_PROGRAMS)?;
            let folder = example.parent().and_then(|folder| folder.parent());
            let folder = folder.context("an example is in a folder of its own")?;
            Command::new(folder.join("cedos-lab"))
        }
    };
    command.args(["lab", "kill", "--points", &points.to_string()]);
    command
        .args(["--seed", &seed.to_string()])
        .current_dir(root());
    Ok(command)
}
