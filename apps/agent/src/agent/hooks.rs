//! Commands of the user that are started when a free network becomes available, and when the last
//! one is lost.
//!
//! An agent in its sandbox starts no programs: a process that was started before runs the commands for it.
//!
//! ```text
//!  agent (in its sandbox) ── '1' or '0' ──▶ `cedos agent --run-hooks` ──▶ /bin/sh -c COMMAND
//! ```

use std::fs::File;
use std::io::{BufRead, Write};
use std::process::Stdio;
use std::sync::Arc;

use cedos_terminal::print_stderr;
use d2tp_links::{Link, LinkKind};
use tokio::process::Command;
use tokio::sync::watch;

/// Shell commands that run when free networks come and go.
#[derive(Debug, Clone, Default)]
pub struct Hooks {
    /// The command for when the first free network comes.
    pub when_free: Option<String>,
    /// The command for when the last free network goes.
    pub when_not_free: Option<String>,
    /// The pipe to the process that runs them ([`run_hooks`]); this one does without.
    pub runner: Option<Arc<File>>,
}

impl Hooks {
    fn command(&self, is_free: bool) -> Option<&str> {
        match is_free {
            true => self.when_free.as_deref(),
            false => self.when_not_free.as_deref(),
        }
    }
}

/// Runs the hooks as free networks come and go, and once at the start.
pub(super) async fn watch(hooks: Hooks, mut links: watch::Receiver<Arc<Vec<Link>>>) {
    let mut was_free = None;
    loop {
        let is_free = links
            .borrow_and_update()
            .iter()
            .any(|link| link.kind != LinkKind::Loopback && link.is_usable() && link.is_free());
        if was_free != Some(is_free) {
            if let Some(command) = hooks.command(is_free) {
                match &hooks.runner {
                    Some(runner) => request(runner, is_free),
                    None => start(command, is_free),
                }
            }
            was_free = Some(is_free);
        }
        if links.changed().await.is_err() {
            return;
        }
    }
}

/// Asks the process at the other end of the pipe to run a hook.
fn request(mut runner: &File, is_free: bool) {
    let byte = if is_free { FREE } else { NOT_FREE };
    if let Err(error) = runner.write_all(&[byte]) {
        tracing::warn!(%error, "the process that runs hooks has ended");
    }
}

/// Asks for the hook of the first free network.
const FREE: u8 = b'1';
/// Asks for the hook of the last free network.
const NOT_FREE: u8 = b'0';

/// Runs a hook for each byte that an agent writes, until it ends.
pub fn run_hooks(hooks: &Hooks, input: impl BufRead) {
    for byte in input.bytes().map_while(Result::ok) {
        let is_free = byte == FREE;
        let Some(command) = hooks.command(is_free).map(str::to_owned) else {
            continue;
        };
        // The next hook does not wait for it.
        std::thread::spawn(move || {
            let status = shell(&command, is_free).into_std().status();
            match status {
                Ok(status) if status.success() => {}
                Ok(status) => {
                    print_stderr(&format!("cedos agent: a hook failed ({status}): {command}"))
                }
                Err(error) => {
                    print_stderr(&format!("cedos agent: cannot start {command}: {error}"))
                }
            }
        });
    }
}

fn shell(command: &str, is_free: bool) -> Command {
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", command])
        .env("CEDOS_FREE", if is_free { "1" } else { "0" })
        .stdin(Stdio::null());
    shell
}

fn start(command: &str, is_free: bool) {
    let child = shell(command, is_free).spawn();
    match child {
        Ok(mut child) => {
            let command = command.to_owned();
            tokio::task::spawn_local(async move {
                if let Ok(status) = child.wait().await
                    && !status.success()
                {
                    tracing::warn!(command, %status, "a hook failed");
                }
            });
        }
        Err(error) => tracing::warn!(command, %error, "cannot start a hook"),
    }
}
