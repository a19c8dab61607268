//! `cedos` as a process: a run to its end, a proxy, an agent.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};

use crate::wait::within;

/// The folder, below a program's directory, of files that need not survive a restart of the
/// machine.
pub const RUNTIME: &str = ".runtime";

/// The path of a built program of the workspace: one folder above the test.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let folder = test.parent().and_then(Path::parent).expect("two above it");
    let path = folder.join(name);
    assert!(path.is_file(), "{} is not built", path.display());
    path
}

/// A command of `cedos` whose directory is also its home, isolated from the user's desktop.
pub fn cedos(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(built("cedos"));
    at_home(command.args(arguments), directory);
    command
}

/// Sets the directory of a command as its home, and isolates it from the user's desktop.
pub fn at_home<'a>(command: &'a mut Command, directory: &Path) -> &'a mut Command {
    let runtime = directory.join(RUNTIME);
    let _ = std::fs::create_dir(&runtime);
    command
        .current_dir(directory)
        .env_remove("CEDOS_PROX")
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .env_remove("CEDOS_CONFIG")
        .env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent")
        .env("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nonexistent")
        .env("HOME", directory)
        .env("XDG_CONFIG_HOME", directory.join(".config"))
        .env("XDG_STATE_HOME", directory.join(".state"))
        .env("XDG_CACHE_HOME", directory.join(".cache"))
        .env("XDG_RUNTIME_DIR", runtime)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
}

/// The result and output of a run of `cedos`.
#[derive(Debug)]
pub struct CedosRun {
    /// The exit code.
    pub code: i32,
    /// The lines of its output that are JSON.
    pub events: Vec<Value>,
    /// The program's standard output.
    pub output: Vec<u8>,
    /// The program's standard error.
    pub errors: String,
}

impl CedosRun {
    /// The last event.
    #[track_caller]
    pub fn last(&self) -> &Value {
        self.events
            .last()
            .unwrap_or_else(|| panic!("no event; stderr: {}", self.errors))
    }

    /// The reasons in its events, in order.
    pub fn reasons(&self) -> Vec<&str> {
        self.events
            .iter()
            .filter_map(|event| event["reason"].as_str())
            .collect()
    }

    /// Asserts that it ended with this code, and that its output contains this text.
    #[track_caller]
    pub fn ends_with(&self, code: i32, words: &str) {
        let output = String::from_utf8_lossy(&self.output);
        let said = format!("{output}\n{}", self.errors);
        assert_eq!(self.code, code, "{said}");
        assert!(said.contains(words), "no `{words}` in {said}");
    }
}

/// Runs `cedos` to its end.
pub async fn run(directory: &Path, arguments: &[&str]) -> CedosRun {
    ended(cedos(directory, arguments).spawn().expect("start cedos")).await
}

/// Waits for the end of a run.
pub async fn ended(child: Child) -> CedosRun {
    let output = within(child.wait_with_output()).await.expect("its output");
    let text = String::from_utf8_lossy(&output.stdout);
    CedosRun {
        code: output.status.code().expect("no signal ended it"),
        events: text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect(),
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
        output: output.stdout,
    }
}

/// The public key of the device whose home is `directory`.
pub async fn device_key(directory: &Path) -> String {
    let shown = run(directory, &["key", "show"]).await;
    let key = String::from_utf8(shown.output).expect("text");
    key.trim().to_owned()
}

/// The process id of a running child.
pub fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(child.id().expect("a process") as i32)
}

/// Stops a process, and waits until all of its threads have stopped: what was under way in one of them is not
/// stopped when the signal has been sent.
pub fn stop(child: &Child) {
    let pid = pid_of(child);
    kill(pid, Signal::SIGSTOP).expect("send");
    let stopped = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
        tasks.flatten().all(|task| {
            let status = std::fs::read_to_string(task.path().join("status"));
            status.is_ok_and(|status| status.contains("\nState:\tT"))
        })
    };
    while !stopped() {
        std::thread::yield_now();
    }
}

/// A `cedos prox` that is ended when this is dropped.
pub struct ProxyProcess {
    /// The running process.
    pub child: Child,
    /// The proxy's address, `d2tp://HOST:PORT/KEY`.
    pub address: String,
}

impl ProxyProcess {
    /// Starts a proxy with the key in `prox.key` for the device whose home is `directory`.
    pub async fn start(directory: &Path, listen: &str, more: &[&str]) -> ProxyProcess {
        let device = device_key(directory).await;
        ProxyProcess::start_for(&device, directory, listen, more).await
    }

    /// Starts a proxy that admits only this client.
    pub async fn start_for(
        client: &str,
        directory: &Path,
        listen: &str,
        more: &[&str],
    ) -> ProxyProcess {
        if !directory.join("prox.key").exists() {
            run(directory, &["key", "gen", "-o", "prox.key"]).await;
        }
        let arguments = [
            "prox",
            "--listen",
            listen,
            "--key",
            "prox.key",
            "--allow-private",
            "--allow-client",
            client,
        ];
        let arguments = [&arguments[..], more].concat();
        for _ in 0..100 {
            let mut command = cedos(directory, &arguments);
            command.stderr(Stdio::null());
            if let Some(proxy) = ProxyProcess::spawned(&mut command).await {
                return proxy;
            }
            // sleep: nothing signals when a port is free again
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the proxy cannot listen at {listen}");
    }

    /// Starts a command that becomes a proxy; `None` if it ends without printing its address.
    pub async fn spawned(command: &mut Command) -> Option<ProxyProcess> {
        let mut child = command.spawn().expect("start the proxy");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let address = within(lines.next_line()).await.expect("readable")?;
        Some(ProxyProcess { child, address })
    }

    /// The host and port at which the proxy listens: `HOST:PORT`.
    pub fn listens_at(&self) -> &str {
        let rest = self.address.strip_prefix("d2tp://").expect("its scheme");
        rest.split('/').next().expect("a first part")
    }
}

/// A `cedos agent` that is ended when this is dropped.
pub struct AgentProcess {
    /// The running process.
    pub child: Child,
    /// The path of its socket, for `CEDOS_AGENT`.
    pub socket: PathBuf,
    /// The agent's standard error, kept open.
    _errors: Lines<BufReader<ChildStderr>>,
}

impl AgentProcess {
    /// Starts an agent whose home is `home`.
    pub async fn start(home: &Path) -> AgentProcess {
        AgentProcess::start_with(home, &[]).await
    }

    /// Starts an agent with more arguments.
    pub async fn start_with(home: &Path, more: &[&str]) -> AgentProcess {
        AgentProcess::start_among(home, more, &[]).await
    }

    /// Starts an agent with more arguments and environment variables.
    pub async fn start_among(
        home: &Path,
        more: &[&str],
        variables: &[(&str, &str)],
    ) -> AgentProcess {
        let socket = home.join("agent.sock");
        let mut child = cedos(home, &[&["agent"], more].concat())
            .env("CEDOS_AGENT", &socket)
            .envs(variables.iter().copied())
            .spawn()
            .expect("start the agent");
        let mut lines = BufReader::new(child.stderr.take().expect("its errors")).lines();
        let line = within(lines.next_line()).await;
        let line = line.expect("text").unwrap_or_default();
        assert!(line.contains("ready at"), "{line}");
        AgentProcess {
            child,
            socket,
            _errors: lines,
        }
    }

    /// Kills the agent, and waits until it is gone.
    pub async fn kill(mut self) {
        kill(pid_of(&self.child), Signal::SIGKILL).expect("send");
        self.child.wait().await.expect("it ends");
    }
}
