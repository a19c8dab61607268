//! Starts the agent for a verb that needs one.
//!
//! ```text
//!  verb ── connect ── an agent answers ───────────────────────────────▶ go on
//!     └─ none: lock start.lock ── connect again ── spawn `cedos agent` ── hello ── unlock ──▶ go on
//! ```
//!
//! Of several verbs at once, the one with the lock starts the agent, and the others find it. Where systemd
//! listens on the socket (`packaging/systemd/cedos-agent.socket`), the first connection starts it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use cedos_agent::agent::client::AgentApiClient;
use cedos_agent::agent::{SOCKET_VARIABLE, is_locked, socket_path};
use cedos_agent::fetch::jobs;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

/// How long an agent may take to answer after it was started.
const START_MAX: Duration = Duration::from_secs(20); // a guess: a machine under load

/// The interval at which an agent that starts is asked whether it is there.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The size at which the log of agents that verbs start begins anew.
const LOG_BYTES_MAX: u64 = 1 << 20;

/// Variables with a path that the agent reads, too.
const PATH_VARIABLES: [&str; 3] = [SOCKET_VARIABLE, "CEDOS_CONFIG", "CEDOS_KEY_FILE"];

/// Whether verbs may start an agent.
pub fn is_allowed() -> bool {
    std::env::var_os(SOCKET_VARIABLE).is_none_or(|value| value != "none")
}

/// The user's agent, which is started if none runs.
///
/// # Errors
/// It cannot be started; the sentence says why.
pub async fn connect_or_start() -> anyhow::Result<AgentApiClient> {
    if let Some(agent) = AgentApiClient::connect().await {
        return Ok(agent);
    }
    if !is_allowed() {
        bail!("the agent is not running, and {SOCKET_VARIABLE}=none keeps it from being started");
    }
    let started = start().await;
    started.context("the agent is not running and cannot be started; try `cedos agent`")
}

async fn start() -> anyhow::Result<AgentApiClient> {
    let socket = socket_path()?;
    let folder = socket.parent().context("the socket needs a folder")?;
    make_folder(folder)?;
    let until = Instant::now() + START_MAX;
    let lock = own_file(&folder.join("start.lock"))?;
    while lock.try_lock().is_err() {
        if Instant::now() > until {
            bail!("another command has been starting it for {START_MAX:?}");
        }
        sleep(LOOK_EVERY).await;
    }
    let log = log_path()?;
    loop {
        if let Some(agent) = AgentApiClient::connect_to(&socket).await {
            return Ok(agent);
        }
        let mut child = spawn(&log)?;
        let status = loop {
            if let Some(agent) = AgentApiClient::connect_to(&socket).await {
                return Ok(agent);
            }
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if Instant::now() > until {
                bail!(
                    "it does not answer after {START_MAX:?}; see {}",
                    log.display()
                );
            }
            sleep(LOOK_EVERY).await;
        };
        // An agent that is just ending may still have the lock; then there is a next try.
        if !is_locked(&socket) || Instant::now() > until {
            return Err(why(&log).unwrap_or_else(|| anyhow!("it ended with {status}")));
        }
    }
}

/// Starts the agent in a session of its own, so that it outlives this terminal.
fn spawn(log: &Path) -> anyhow::Result<Child> {
    let output = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    if output.metadata()?.len() > LOG_BYTES_MAX {
        output.set_len(0)?;
    }
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["agent", "--exit-when-idle", "--detached"])
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(output);
    for name in PATH_VARIABLES {
        if let Some(path) = std::env::var_os(name).filter(|path| !path.is_empty()) {
            command.env(name, std::path::absolute(path)?);
        }
    }
    command.spawn().context("cannot start a process")
}

/// The last line that an agent which ended has said.
fn why(log: &Path) -> Option<anyhow::Error> {
    let text = std::fs::read_to_string(log).ok()?;
    let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
    let line = line.trim_start_matches("cedos agent: ");
    Some(anyhow!("{line}"))
}

fn log_path() -> anyhow::Result<PathBuf> {
    let state = jobs::state_directory()?;
    make_folder(&state)?;
    Ok(state.join("agent.log"))
}

fn make_folder(folder: &Path) -> anyhow::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .with_context(|| format!("cannot make {}", folder.display()))
}

fn own_file(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))
}
