//! `cedos bench`: measures. The peers to compare with live in a program of their own, so that
//! nobody has to build quinn to download a podcast; this verb finds and runs it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
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
    let program = program()?;
    let status = Command::new(&program)
        .args(&args.args)
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    Ok(ExitCode::from(
        u8::try_from(status.code().unwrap_or(1)).unwrap_or(1),
    ))
}

/// The bench program: beside this one.
///
/// # Errors
/// It is not built; says what builds it.
pub fn program() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot tell where this program lies")?;
    let beside = own.with_file_name("cedos-bench");
    if beside.is_file() {
        return Ok(beside);
    }
    bail!("{}", how_to_build(&own));
}

fn how_to_build(own: &Path) -> String {
    let folder = own.parent().and_then(Path::file_name);
    // A program of another profile would lie elsewhere, and be looked for in vain.
    let profile = if folder.is_some_and(|name| name == "debug") {
        ""
    } else {
        "--release "
    };
    format!(
        "cedos-bench is not beside {}: build it with `cargo build {profile}--workspace` (for every \
         peer with `cargo build {profile}--workspace --features cedos-bench/peers-all`)",
        own.display()
    )
}

#[cfg(test)]
mod tests {
    use super::how_to_build;
    use std::path::Path;

    #[test]
    fn the_command_builds_it_beside_the_program_that_misses_it() {
        let told = |at: &str| how_to_build(Path::new(at));
        let release = told("/src/target/release/cedos");
        assert!(
            release.contains("`cargo build --release --workspace`"),
            "{release}"
        );
        let debug = told("/src/target/debug/cedos");
        assert!(debug.contains("`cargo build --workspace`"), "{debug}");
    }
}
