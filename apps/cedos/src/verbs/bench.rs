//! `cedos bench`: measures. The peers to compare with live in a program of their own, so that
//! nobody has to build quinn to download a podcast; this verb finds and runs it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use clap::Args;

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
    let own = std::env::current_exe().context("cannot tell where this program lies")?;
    let beside = own.with_file_name("cedos-bench");
    let found: Option<PathBuf> = beside.is_file().then_some(beside);
    let Some(program) = found else {
        bail!(
            "cedos-bench is not beside {}. Build it: cargo build --release -p cedos-bench",
            own.display()
        );
    };
    let status = Command::new(&program)
        .args(&args.args)
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    Ok(ExitCode::from(
        u8::try_from(status.code().unwrap_or(1)).unwrap_or(1),
    ))
}
