//! Rows that are measured by the bench program.

use crate::verbs::bench;
use anyhow::{Context, ensure};
use serde::de::DeserializeOwned;
use std::process::{Command, Stdio};

/// Runs `cedos-bench ARGUMENTS --json` and parses its object. Its other output is shown.
///
/// # Errors
/// It is not built, it failed, or its output is invalid.
pub fn by_bench<T: DeserializeOwned>(arguments: &[&str]) -> anyhow::Result<T> {
    let said = Command::new(cedos::companion_program::find(bench::PROGRAM)?)
        .args(arguments)
        .arg("--json")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("the bench program cannot be run")?;
    let what = || format!("`cedos bench {} --json`", arguments.join(" "));
    ensure!(said.status.success(), "{} failed: {}", what(), said.status);
    serde_json::from_slice(&said.stdout)
        .with_context(|| format!("{} did not print what this row reads", what()))
}
