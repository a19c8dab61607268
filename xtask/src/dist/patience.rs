//! How long the trial of packages waits.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// How long to wait for an action of a program.
const PATIENCE: Duration = Duration::from_secs(180);

/// Polls for the condition, which depends on files of another program.
pub fn wait_for(what: &str, mut there: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !there()? {
        ensure!(
            begun.elapsed() < PATIENCE,
            "{what} did not come within {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}
