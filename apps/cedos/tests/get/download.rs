//! `cedos get` in each of its three modes against one scripted origin over HTTPS: a directory, an
//! authority, an origin and, where the mode needs one, a proxy.

use std::path::Path;

use cedos_lab_rig::origin::{OriginReply, OriginRequest, ScriptedOrigin, TestAuthority};
use cedos_lab_rig::program::{CedosRun, ProxyProcess, RUNTIME, cedos, ended};
use tokio::process::Command;

/// The modes, by the names they have in `--json`.
pub const MODES: [&str; 3] = ["direct", "proxy-fetch", "sealed"];

/// Everything a download in one mode needs.
pub struct Rig {
    pub mode: &'static str,
    pub origin: ScriptedOrigin,
    pub proxy: Option<ProxyProcess>,
    directory: tempfile::TempDir,
    home: tempfile::TempDir,
}

impl Rig {
    /// Prepares downloads in `mode` from an origin over HTTPS that answers by `script`.
    pub async fn new(
        mode: &'static str,
        script: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> Rig {
        let authority = TestAuthority::new();
        let home = tempfile::tempdir().expect("a directory");
        std::fs::write(home.path().join("ca.pem"), &authority.pem).expect("write");
        let origin = ScriptedOrigin::start_tls(&authority, script).await;
        let proxy = match mode {
            "direct" => None,
            _ => Some(ProxyProcess::start(home.path(), "127.0.0.1:0", &["--ca", "ca.pem"]).await),
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
    pub async fn get(&self, path: &str, more: &[&str]) -> CedosRun {
        ended(self.command(path, more).spawn().expect("start cedos")).await
    }

    /// Asserts that exactly `wanted` arrived, in this mode, and that nothing else is left.
    #[track_caller]
    pub fn assert_whole(&self, run: &CedosRun, wanted: &[u8]) {
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
    pub fn assert_fails(&self, run: &CedosRun, code: i32, words: &str) {
        let mode = self.mode;
        assert_eq!(run.code, code, "{mode}: {:#?}\n{}", run.events, run.errors);
        let text = run.last()["text"].as_str().unwrap_or_default();
        assert!(text.contains(words), "{mode}: no `{words}` in `{text}`");
        assert!(!self.place().join("out").exists(), "{mode}");
    }
}
