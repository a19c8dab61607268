//! A proxy of an operator, and devices with homes of their own.

use std::path::{Path, PathBuf};

use cedos_lab_rig::program::{CedosRun, ProxyProcess, cedos, ended, run};
use cedos_lab_rig::wait::within;
use serde_json::Value;
use tokio::io::AsyncWriteExt;

/// An operator with a running proxy.
pub struct Operator {
    pub home: tempfile::TempDir,
    pub proxy: ProxyProcess,
}

impl Operator {
    /// Starts a proxy that admits only invited devices.
    pub async fn start() -> Operator {
        let home = tempfile::tempdir().unwrap();
        let proxy = start_proxy(home.path(), "127.0.0.1:0", &[]).await;
        Operator { home, proxy }
    }

    pub fn state_dir(&self) -> PathBuf {
        self.home.path().join("state")
    }

    /// Runs a command of the operator, with the proxy's state directory.
    pub async fn run(&self, arguments: &[&str]) -> CedosRun {
        let directory = self.state_dir();
        let directory = directory.to_str().unwrap();
        run(
            self.home.path(),
            &[arguments, &["--state-dir", directory]].concat(),
        )
        .await
    }

    /// The line of a new invitation.
    pub async fn invite(&self, arguments: &[&str]) -> String {
        let told = self
            .run(&[&["prox", "invite", "--json"], arguments].concat())
            .await;
        told.ends_with(0, "line");
        told.last()["line"].as_str().unwrap().to_owned()
    }

    /// The clients, by name.
    pub async fn clients(&self) -> Vec<Value> {
        let told = self.run(&["prox", "client", "list", "--json"]).await;
        assert_eq!(told.code, 0, "{}", told.errors);
        told.events
    }
}

/// Starts a proxy in `home`, with its state beside.
pub async fn start_proxy(home: &Path, listen: &str, more: &[&str]) -> ProxyProcess {
    let started = ProxyProcess::spawned(&mut proxy_command(home, listen, more)).await;
    started.unwrap_or_else(|| panic!("{}", std::fs::read_to_string(home.join("log")).unwrap()))
}

/// The command of a proxy in `home`, with its state and its log beside.
pub fn proxy_command(home: &Path, listen: &str, more: &[&str]) -> tokio::process::Command {
    let always = [
        "prox",
        "--listen",
        listen,
        "--state-dir",
        "state",
        "--allow-private",
    ];
    let mut command = cedos(home, &[&always[..], more].concat());
    let mut options = std::fs::OpenOptions::new();
    let log = options
        .create(true)
        .append(true)
        .open(home.join("log"))
        .unwrap();
    command.stderr(log);
    command
}

/// Joins with a line on standard input.
pub async fn join(home: &Path, line: &str, more: &[&str]) -> CedosRun {
    let mut command = cedos(home, &[&["join", "-"], more].concat());
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    within(input.write_all(format!("{line}\n").as_bytes()))
        .await
        .unwrap();
    drop(input);
    ended(child).await
}
