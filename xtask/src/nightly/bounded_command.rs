//! A command with a time limit, whose output is kept.

use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// How a command ended.
pub struct BoundedOutcome {
    /// Whether the command ended by itself, and with success.
    pub succeeded: bool,
    /// Whether the command was ended because its time was over.
    pub timed_out: bool,
    /// All that it wrote.
    pub output: String,
}

impl BoundedOutcome {
    /// The end of the output, for a report.
    pub fn end(&self, lines: usize) -> String {
        let all: Vec<&str> = self.output.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// The interval at which the command is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Runs a command for `limit` at most, and ends it with all that it started.
///
/// # Errors
/// It cannot be started.
pub fn run_within(command: &mut Command, limit: Duration) -> Result<BoundedOutcome> {
    // Not a pipe, which a command that writes much would fill.
    let mut output = tempfile::tempfile()?;
    let begun = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        .process_group(0)
        .spawn()
        .with_context(|| format!("{command:?} could not be started"))?;
    let group = Pid::from_raw(i32::try_from(child.id())?);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if begun.elapsed() > limit {
            let _ = killpg(group, Signal::SIGKILL);
            child.wait()?;
            break None;
        }
        std::thread::sleep(LOOK_EVERY);
    };
    let mut text = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut text)?;
    Ok(BoundedOutcome {
        succeeded: status.is_some_and(|status| status.success()),
        timed_out: status.is_none(),
        output: String::from_utf8_lossy(&text).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_takes_too_long_is_ended_with_what_it_started() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo begun; sleep 600 & wait"]);
        let begun = Instant::now();
        let outcome = run_within(&mut command, Duration::from_millis(300)).unwrap();
        assert!(outcome.timed_out && !outcome.succeeded);
        assert_eq!(outcome.end(1), "begun");
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
