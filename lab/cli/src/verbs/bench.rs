//! `cedos bench`: benchmarks. The transports to compare with are in a separate program, so that a
//! download does not need to build quinn; this verb finds and runs that program.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::Context;
use cedos::companion_program;
use clap::Args;

/// The benchmarks' program.
pub const PROGRAM: &str = "cedos-bench";

/// `cedos bench …`
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct BenchArgs {
    /// What to measure, with its options: `throughput --net lo1500 --rounds 3 --json`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<OsString>,
}

/// Runs the bench program with the same arguments.
///
/// # Errors
/// It is not built.
pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let program = companion_program::find(PROGRAM)?;
    let status = Command::new(&program)
        .args(&args.args)
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    Ok(ExitCode::from(
        u8::try_from(status.code().unwrap_or(1)).unwrap_or(1),
    ))
}
