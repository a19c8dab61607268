//! `cargo xtask header`: generates `edge/capi/include/d2tp.h` from the sources of libd2tp.
//!
//! The test that compares both writes it, so that there is one generator and one set of options.

use anyhow::Result;

use crate::step::{StepOutcome, cargo, run as run_command};

/// The test that compares the header with the sources.
const TEST: &str = "the_header_is_generated_from_the_sources";

/// Writes the header; returns whether that succeeded.
pub fn run() -> Result<bool> {
    let mut command = cargo(["test", "--locked", "-p", "d2tp-capi", "--tests", TEST]);
    let outcome = run_command(command.env("D2TP_WRITE_HEADER", "1"))?;
    Ok(matches!(outcome, StepOutcome::Held))
}
