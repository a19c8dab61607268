//! A user's machine with an agent, and the time of day of that agent.

use std::path::{Path, PathBuf};

use cedos_lab_rig::program::{CedosRun, ended};
use cedos_lab_rig::{PATIENCE, program};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// A user's machine: a home, and an agent in it.
pub(super) struct Home {
    pub(super) folder: tempfile::TempDir,
    pub(super) agent: Option<Child>,
    pub(super) figures: Option<String>,
    /// What the agent loads before all else.
    preloaded: Option<PathBuf>,
}

/// Adds the seconds in a file to the time of day of whatever loads it.
const CLOCK: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *ts) {
    long result = syscall(SYS_clock_gettime, id, ts);
    FILE *file = id == CLOCK_REALTIME ? fopen(getenv("CLOCK_FILE"), "r") : NULL;
    long more = 0;
    if (file) {
        if (fscanf(file, "%ld", &more) == 1) ts->tv_sec += more;
        fclose(file);
    }
    return result;
}
"#;

impl Home {
    pub(super) async fn new(more: &[&str]) -> Home {
        let mut home = Home {
            folder: tempfile::tempdir().expect("a directory"),
            agent: None,
            figures: None,
            preloaded: None,
        };
        home.start(more).await;
        home
    }

    /// A home with a clock for the agent that can be set; none if there is no C compiler.
    pub(super) async fn with_clock() -> Option<Home> {
        let folder = tempfile::tempdir().expect("a directory");
        let (source, library) = (
            folder.path().join("clock.c"),
            folder.path().join("clock.so"),
        );
        std::fs::write(&source, CLOCK).expect("written");
        let cc = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(&source)
            .status();
        if !cc.await.is_ok_and(|status| status.success()) {
            eprintln!("not tried: no C compiler here");
            return None;
        }
        let mut home = Home {
            folder,
            agent: None,
            figures: None,
            preloaded: Some(library),
        };
        home.set_clock(0);
        home.start(&[]).await;
        Some(home)
    }

    /// Sets the agent's time of day this many seconds ahead.
    pub(super) fn set_clock(&self, seconds: i64) {
        let (file, new) = (self.path().join("clock"), self.path().join("clock.new"));
        std::fs::write(&new, seconds.to_string()).expect("written");
        std::fs::rename(&new, &file).expect("renamed");
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.path().join("agent.sock")
    }

    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program::cedos(self.path(), arguments);
        command.env("CEDOS_AGENT", self.socket());
        command
    }

    pub(super) async fn start(&mut self, more: &[&str]) {
        let mut command = self.command(&[&["agent"], more].concat());
        if let Some(library) = &self.preloaded {
            command.env("LD_PRELOAD", library);
            command.env("CLOCK_FILE", self.path().join("clock"));
        }
        let mut child = command.spawn().expect("start the agent");
        let mut lines = BufReader::new(child.stderr.take().expect("its errors")).lines();
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        let line = line
            .expect("in time")
            .expect("readable")
            .unwrap_or_default();
        assert!(line.contains("ready at"), "{line}");
        if more.contains(&"--metrics") {
            let line = lines.next_line().await.expect("readable").expect("a line");
            let at = line.split("http://").nth(1).expect("an address");
            self.figures = Some(at.trim_end_matches("/metrics").to_owned());
        }
        self.agent = Some(child);
    }

    /// Ends the agent like this, and waits until it is gone.
    pub(super) async fn end(&mut self, signal: Signal) {
        let mut agent = self.agent.take().expect("it runs");
        let pid = Pid::from_raw(agent.id().expect("a process") as i32);
        kill(pid, signal).expect("send");
        let ended = tokio::time::timeout(PATIENCE, agent.wait()).await;
        ended.expect("it ends").expect("a status");
    }

    pub(super) async fn run(&self, arguments: &[&str]) -> CedosRun {
        ended(self.command(arguments).spawn().expect("start cedos")).await
    }

    /// Leaves a download to the agent; its number.
    pub(super) async fn leave(&self, url: &str, more: &[&str]) -> String {
        let get = [
            "get", "--detach", "--json", "-o", "out", "--stall", "1s", url,
        ];
        let run = self.run(&[&get[..], more].concat()).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        assert_eq!(run.last()["agent"], true, "{}", run.last());
        run.last()["id"].to_string()
    }

    pub(super) async fn until(
        &self,
        id: &str,
        what: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> CedosRun {
        let mut last = Value::Null;
        let looking = async {
            loop {
                let run = self.run(&["status", id, "--json"]).await;
                last.clone_from(run.last());
                if wanted(run.last()) {
                    return run;
                }
            }
        };
        let found = tokio::time::timeout(PATIENCE, looking).await;
        found.unwrap_or_else(|_| panic!("never {what}: {last}"))
    }

    pub(super) fn kept(&self, id: &str) -> PathBuf {
        self.path().join(".state/cedos/get").join(id)
    }
}
