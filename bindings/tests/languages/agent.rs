//! An agent that keeps connections of ended programs.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::timeout;

/// A limit for waiting for certain events, so that a failure is not a hang.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// An agent's process, killed when this is dropped.
pub struct Agent {
    /// The path for `$CEDOS_AGENT`.
    pub socket: PathBuf,
    _process: Child,
    /// The agent's standard error: an agent that cannot write to it ends.
    _errors: Lines<BufReader<ChildStderr>>,
}

impl Agent {
    /// Starts an agent with keys and state in `home`, and waits until it is ready.
    pub async fn start(home: &Path) -> Agent {
        let socket = home.join("agent.sock");
        let runtime = home.join(".runtime");
        std::fs::create_dir(&runtime).expect("a folder");
        let mut process = Command::new(env!("CARGO_BIN_EXE_cedos-bindings"))
            .arg("agent")
            .current_dir(home)
            .env("CEDOS_AGENT", &socket)
            .env_remove("CEDOS_PROX")
            .env_remove("CEDOS_KEY_FILE")
            .env_remove("CEDOS_CONFIG")
            // Without the desktop on which the tests run.
            .env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent")
            .env("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nonexistent")
            .env("XDG_CONFIG_HOME", home.join(".config"))
            .env("XDG_STATE_HOME", home.join(".state"))
            .env("XDG_RUNTIME_DIR", runtime)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the agent starts");
        let mut errors = BufReader::new(process.stderr.take().expect("piped")).lines();
        let line = timeout(PATIENCE, errors.next_line()).await;
        let line = line.expect("in time").expect("text").unwrap_or_default();
        assert!(line.contains("ready at"), "{line}");
        Agent {
            socket,
            _process: process,
            _errors: errors,
        }
    }
}
