//! `cedos get` in each of its three modes against one scripted origin over HTTPS: a directory, an
//! authority, an origin and, where the mode needs one, a proxy.

#![allow(dead_code)] // each test file uses a part of it

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::get_origin::{Asked, Authority, Origin, Reply};

/// Upper bound for what is certain to happen, so that a failure is not a hang.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The modes, by the names they have in `--json`.
pub const MODES: [&str; 3] = ["direct", "proxy-fetch", "sealed"];

/// What need not outlive the machine's run.
pub const RUNTIME: &str = ".runtime";

/// `cedos` in a directory that is its home, too.
pub fn cedos(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cedos"));
    let runtime = directory.join(RUNTIME);
    let _ = std::fs::create_dir(&runtime);
    command
        .current_dir(directory)
        .args(arguments)
        .env_remove("CEDOS_PROX")
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .env_remove("CEDOS_CONFIG")
        // Nothing of the desktop that the tests run on.
        .env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent")
        .env("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nonexistent")
        .env("XDG_CONFIG_HOME", directory.join(".config"))
        .env("XDG_STATE_HOME", directory.join(".state"))
        .env("XDG_RUNTIME_DIR", runtime)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// How a run ended, and what it said.
#[derive(Debug)]
pub struct Run {
    pub code: i32,
    pub events: Vec<Value>,
    pub output: Vec<u8>,
    pub errors: String,
}

impl Run {
    #[track_caller]
    pub fn last(&self) -> &Value {
        self.events
            .last()
            .unwrap_or_else(|| panic!("no event; stderr: {}", self.errors))
    }

    pub fn reasons(&self) -> Vec<&str> {
        self.events
            .iter()
            .filter_map(|event| event["reason"].as_str())
            .collect()
    }

    #[track_caller]
    pub fn ends_with(&self, code: i32, words: &str) {
        let output = String::from_utf8_lossy(&self.output);
        let said = format!("{output}\n{}", self.errors);
        assert_eq!(self.code, code, "{said}");
        assert!(said.contains(words), "no `{words}` in {said}");
    }
}

/// Runs `cedos` to its end.
pub async fn run(directory: &Path, arguments: &[&str]) -> Run {
    ended(cedos(directory, arguments).spawn().expect("start cedos")).await
}

/// Waits for the end of a run.
pub async fn ended(child: Child) -> Run {
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output())
        .await
        .expect("cedos ends by itself")
        .expect("its output");
    let text = String::from_utf8_lossy(&output.stdout);
    Run {
        code: output.status.code().expect("no signal ended it"),
        events: text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect(),
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
        output: output.stdout,
    }
}

/// A proxy that ends with this.
pub struct Proxy {
    pub child: Child,
    pub address: String,
}

/// Starts a proxy for the device whose home is `directory`.
pub async fn proxy(directory: &Path, listen: &str, more: &[&str]) -> Proxy {
    let shown = run(directory, &["key", "show"]).await;
    let ours = String::from_utf8(shown.output).expect("text");
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
        ours.trim(),
    ];
    // A port that was free a moment ago may be somebody else's for another moment.
    for _ in 0..100 {
        let mut child = cedos(directory, &[&arguments[..], more].concat())
            .stderr(Stdio::null())
            .spawn()
            .expect("start the proxy");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        if let Some(address) = line.expect("in time").expect("readable") {
            return Proxy { child, address };
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the proxy cannot listen at {listen}");
}

/// Everything a download in one mode needs.
pub struct Rig {
    pub mode: &'static str,
    pub origin: Origin,
    pub proxy: Option<Proxy>,
    directory: tempfile::TempDir,
    home: tempfile::TempDir,
}

impl Rig {
    /// For downloads in `mode` from an origin over HTTPS that answers by `script`.
    pub async fn new(
        mode: &'static str,
        script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Rig {
        let authority = Authority::new();
        let home = tempfile::tempdir().expect("a directory");
        std::fs::write(home.path().join("ca.pem"), &authority.pem).expect("write");
        let origin = Origin::start_tls(&authority, script).await;
        let proxy = match mode {
            "direct" => None,
            _ => Some(proxy(home.path(), "127.0.0.1:0", &["--ca", "ca.pem"]).await),
        };
        Rig {
            mode,
            origin,
            proxy,
            directory: tempfile::tempdir().expect("a directory"),
            home,
        }
    }

    /// The place where downloads go, empty at first.
    pub fn place(&self) -> &Path {
        self.directory.path()
    }

    /// The home of the device and of the proxy: keys and `ca.pem`.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// The names of what is in the place.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.place()).expect("list");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("entry").file_name().to_string_lossy().into())
            .filter(|name| name != RUNTIME)
            .collect();
        names.sort();
        names
    }

    /// A download of `path` to `out`, not started yet.
    pub fn command(&self, path: &str, more: &[&str]) -> Command {
        let url = self.origin.url(path);
        let ca = self.home().join("ca.pem");
        let ca = ca.to_str().expect("text");
        let mut arguments = vec!["get", "--json", &url];
        if !more.contains(&"-o") {
            arguments.extend(["-o", "out"]);
        }
        if let Some(proxy) = &self.proxy {
            arguments.extend(["--prox", &proxy.address]);
        }
        match self.mode {
            "direct" => arguments.extend(["--ca", ca]),
            "sealed" => arguments.extend(["--ca", ca, "--sealed"]),
            _ => {}
        }
        arguments.extend(more);
        let mut command = cedos(self.place(), &arguments);
        command
            .env("XDG_CONFIG_HOME", self.home().join(".config"))
            .env("XDG_STATE_HOME", self.home().join(".state"));
        command
    }

    /// Runs `cedos get` to its end.
    pub async fn get(&self, path: &str, more: &[&str]) -> Run {
        ended(self.command(path, more).spawn().expect("start cedos")).await
    }

    /// Asserts that exactly `wanted` arrived, in this mode, and that nothing else is left.
    #[track_caller]
    pub fn assert_whole(&self, run: &Run, wanted: &[u8]) {
        let mode = self.mode;
        assert_eq!(run.code, 0, "{mode}: {:#?}\n{}", run.events, run.errors);
        assert_eq!(run.last()["mode"], mode);
        let got = std::fs::read(self.place().join("out")).expect("the file");
        assert!(got == wanted, "{mode}: other bytes");
        assert_eq!(self.names(), ["out"], "{mode}");
        std::fs::remove_file(self.place().join("out")).expect("remove");
    }

    /// Asserts that it failed with this code, saying this, and left no file.
    #[track_caller]
    pub fn assert_fails(&self, run: &Run, code: i32, words: &str) {
        let mode = self.mode;
        assert_eq!(run.code, code, "{mode}: {:#?}\n{}", run.events, run.errors);
        let text = run.last()["text"].as_str().unwrap_or_default();
        assert!(text.contains(words), "{mode}: no `{words}` in `{text}`");
        assert!(!self.place().join("out").exists(), "{mode}");
    }
}
