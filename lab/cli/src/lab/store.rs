//! The store of a scenario's nodes: a `redis-server` at a Unix socket, which the scenario kills and pauses.

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::LOOK;

/// How long the server may take until it answers.
const START: Duration = Duration::from_secs(20);

/// The `redis-server` that the nodes of a scenario share.
pub struct LabStore {
    folder: PathBuf,
    /// The server's process; `None` while it is killed.
    child: Option<Child>,
}

impl LabStore {
    /// Starts a server with its files in `folder`.
    ///
    /// # Errors
    /// No server is installed, or it does not answer.
    pub fn start(folder: &Path) -> anyhow::Result<LabStore> {
        std::fs::create_dir_all(folder)?;
        let mut store = LabStore {
            folder: folder.to_owned(),
            child: None,
        };
        store.begin()?;
        Ok(store)
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("redis.sock")
    }

    /// The address of the server, for `cedos prox --store`.
    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    /// Starts the server with what it has on disk, and waits until it answers.
    ///
    /// # Errors
    /// It cannot be started, or does not answer.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        let log = self.folder.join("redis.log");
        let mut command = Command::new("redis-server");
        command
            .args(["--port", "0", "--save", "", "--appendonly", "yes"])
            .args([
                "--appendfsync",
                "always",
                "--maxmemory-policy",
                "noeviction",
            ])
            .arg("--unixsocket")
            .arg(self.socket())
            .arg("--dir")
            .arg(&self.folder)
            .stdin(Stdio::null())
            .stdout(OpenOptions::new().create(true).append(true).open(&log)?);
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "the scenario has a store, and redis-server is not installed; install it (Debian: apt install \
                 redis-server)"
            ),
            Err(error) => return Err(error).context("redis-server cannot be started"),
        };
        let child = self.child.insert(child);
        let mut left = START;
        while !answers(&self.folder.join("redis.sock")) {
            if left.is_zero() || child.try_wait()?.is_some() {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("redis-server does not answer: {}", said.trim());
            }
            std::thread::sleep(LOOK);
            left = left.saturating_sub(LOOK);
        }
        Ok(())
    }

    /// Kills the server.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Stops the server without ending it: it answers nothing.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets a paused server continue.
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            let _ = kill(Pid::from_raw(child.id() as i32), signal);
        }
    }
}

impl Drop for LabStore {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether a server answers at this socket.
fn answers(socket: &Path) -> bool {
    let asked = || -> std::io::Result<bool> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = [0; 5];
        stream.read_exact(&mut answer)?;
        Ok(answer == *b"+PONG")
    };
    asked().unwrap_or(false)
}
