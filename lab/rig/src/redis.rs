//! A real `redis-server` for tests: killed, paused and filled.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::PATIENCE;
use crate::missing_tool::skip_without;

/// A `redis-server` of a test, at a Unix socket, with an append-only file.
pub struct RedisServer {
    directory: PathBuf,
    child: Option<Child>,
    _own: Option<tempfile::TempDir>,
}

impl RedisServer {
    /// Starts a server; `None`, with a sentence, where none is installed.
    pub fn start() -> Option<RedisServer> {
        let is_installed = |name: &str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
        };
        if !is_installed("redis-server") || !is_installed("redis-cli") {
            skip_without(
                "redis",
                "redis-server is not installed (apt install redis-server)",
            );
            return None;
        }
        let own = tempfile::tempdir().expect("a directory");
        let mut server = RedisServer {
            directory: own.path().to_owned(),
            child: None,
            _own: Some(own),
        };
        server.start_again();
        Some(server)
    }

    /// The path of the server's socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("redis.sock")
    }

    /// The address of the server, for programs.
    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    /// Starts the server again with what it had on disk, and waits until it answers.
    pub fn start_again(&mut self) {
        let socket = self.socket();
        let mut command = Command::new("redis-server");
        command
            .args([
                "--port",
                "0",
                "--appendonly",
                "yes",
                "--appendfsync",
                "always",
            ])
            .args([
                "--save",
                "",
                "--maxmemory-policy",
                "noeviction",
                "--unixsocket",
            ])
            .arg(&socket)
            .arg("--dir")
            .arg(&self.directory)
            .stdout(Stdio::null());
        self.child = Some(command.spawn().expect("start redis-server"));
        let began = std::time::Instant::now();
        while self.ask(&["PING"]).trim() != "PONG" {
            assert!(began.elapsed() < PATIENCE, "redis-server does not answer");
            // sleep: nothing signals when a server answers
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the server, with its own client.
    pub fn ask(&self, arguments: &[&str]) -> String {
        let asked = Command::new("redis-cli")
            .arg("-s")
            .arg(self.socket())
            .args(arguments)
            .output()
            .expect("start redis-cli");
        String::from_utf8_lossy(&asked.stdout).into_owned()
    }

    /// The server's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("it runs");
        kill(Pid::from_raw(child.id() as i32), signal).expect("send");
    }

    /// Kills the server.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("send");
        child.wait().expect("it ends");
    }

    /// Stops the server without ending it: it answers nothing.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets a paused server go on.
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Makes the server full, or gives it room again.
    pub fn set_full(&self, full: bool) {
        let max = if full { "1" } else { "0" };
        let said = self.ask(&["CONFIG", "SET", "maxmemory", max]);
        assert_eq!(said.trim(), "OK");
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
