//! Runs commands as a person types them, and keeps what a terminal would show.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use cedos_lab_rig::program::{RUNTIME, at_home, built};
use cedos_lab_rig::wait::within;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use super::normalise::{normalised, renamed};

/// The page as it grows, and the machine on which it is recorded.
pub struct Recorder {
    home: tempfile::TempDir,
    page: String,
    /// The texts that replace names that differ between runs.
    names: Vec<(String, &'static str)>,
}

/// A command that goes on.
pub struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    said: String,
    shown: String,
    /// Which lines are put on the page; none is all of them.
    is_kept: Option<fn(&str) -> bool>,
}

impl Running {
    /// Puts on the page only the lines that `is_kept` accepts, with those that continue them.
    pub fn keep(&mut self, is_kept: fn(&str) -> bool) {
        self.is_kept = Some(is_kept);
    }

    /// Reads lines until one contains `words`.
    pub async fn until(&mut self, words: &str) {
        self.until_line(words, |line| line.contains(words)).await;
    }

    /// Reads lines until one begins with `words`; returns that line.
    pub async fn until_begins(&mut self, words: &str) -> String {
        self.until_line(words, |line| line.starts_with(words)).await
    }

    async fn until_line(&mut self, words: &str, is_it: impl Fn(&str) -> bool) -> String {
        loop {
            let line = within(self.lines.next_line()).await.expect("text");
            let line = line.unwrap_or_else(|| panic!("no `{words}` in {}", self.said));
            self.said += &line;
            self.said.push('\n');
            if is_it(&line) {
                return line;
            }
        }
    }
}

impl Recorder {
    pub fn new(introduction: &str) -> Recorder {
        let home = tempfile::tempdir().expect("a directory");
        let path = home.path().display().to_string();
        Recorder {
            names: vec![(format!("{path}/{RUNTIME}"), "/run/user/1000"), (path, "~")],
            home,
            page: introduction.to_owned(),
        }
    }

    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Writes `name` as `shown` from here on.
    pub fn call(&mut self, name: &str, shown: &'static str) {
        self.names.insert(0, (name.to_owned(), shown));
    }

    /// Begins a section.
    pub fn section(&mut self, title: &str) {
        let _ = write!(self.page, "\n## {title}\n");
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("sh");
        // Both streams in the order in which they are written, as on a terminal.
        command.args(["-c", "exec \"$@\" 2>&1", "sh"]);
        command.arg(built("cedos")).args(words);
        at_home(&mut command, self.home.path());
        command.env("CEDOS_AGENT", self.home.path().join("agent.sock"));
        command
    }

    /// Starts a command that is not on the page until [`Recorder::end`] puts it there.
    pub fn start(&self, words: &[&str]) -> Running {
        let mut child = self.command(words).spawn().expect("start");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let quoted = words.iter().map(|word| match word.contains(' ') {
            true => format!(" '{word}'"),
            false => format!(" {word}"),
        });
        Running {
            child,
            lines,
            said: String::new(),
            is_kept: None,
            shown: format!("cedos{}", quoted.collect::<String>()),
        }
    }

    /// Runs a command to its end. `about`: the situation, for the heading.
    pub async fn run(&mut self, about: &str, words: &[&str]) {
        let running = self.start(words);
        self.end(about, running, None).await;
    }

    /// Runs a command to its end, and keeps the lines that `is_kept` accepts, with those that continue them.
    pub async fn run_keeping(&mut self, about: &str, words: &[&str], is_kept: fn(&str) -> bool) {
        let mut running = self.start(words);
        running.keep(is_kept);
        self.end(about, running, None).await;
    }

    /// Runs a command until a line contains `words`, and stops it as Ctrl-C does.
    pub async fn interrupt(&mut self, about: &str, arguments: &[&str], words: &str) {
        let mut running = self.start(arguments);
        running.until(words).await;
        self.end(about, running, Some(Signal::SIGINT)).await;
    }

    /// Ends a command, by a signal or as it does by itself, and puts it on the page.
    pub async fn end(&mut self, about: &str, mut running: Running, signal: Option<Signal>) {
        if let Some(signal) = signal {
            let pid = running.child.id().expect("it runs");
            kill(Pid::from_raw(pid as i32), signal).expect("send");
        }
        while let Some(line) = within(running.lines.next_line()).await.expect("text") {
            running.said += &line;
            running.said.push('\n');
        }
        if let Some(is_kept) = running.is_kept {
            let mut keeps = false;
            let lines = running.said.lines().filter(|line| {
                keeps = if line.starts_with(' ') {
                    keeps
                } else {
                    is_kept(line)
                };
                keeps
            });
            running.said = lines.map(|line| format!("{line}\n")).collect();
        }
        let status = within(running.child.wait()).await.expect("it ends");
        let code = match status.code() {
            Some(0) => String::new(),
            Some(code) => format!("[exit code {code}]\n"),
            None => "[ended by a signal]\n".to_owned(),
        };
        let shown = renamed(&running.shown, &self.names);
        let said = normalised(&renamed(&running.said, &self.names));
        let _ = write!(
            self.page,
            "\n{about}:\n\n```console\n$ {shown}\n{said}{code}```\n"
        );
    }

    /// Runs a command of which nothing is shown; returns what it says.
    pub async fn quietly(&self, words: &[&str]) -> String {
        let output = within(self.command(words).output()).await.expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Ends a command of which nothing is shown.
    pub async fn drop_running(&self, mut running: Running) {
        running.child.kill().await.expect("it runs");
    }

    /// Waits until a transfer is in a state that `is_so` accepts.
    pub async fn until_transfer(&self, id: &str, is_so: impl Fn(&serde_json::Value) -> bool) {
        within(async {
            loop {
                let shown = self.quietly(&["status", id, "--json"]).await;
                let shown: serde_json::Value = serde_json::from_str(&shown).unwrap_or_default();
                if is_so(&shown) {
                    return;
                }
                // sleep: another process is looked at, which does not tell
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }

    /// Waits until an episode of a podcast is in a state.
    pub async fn until_podcast(&self, episode: &str, state: &str) {
        let id: u64 = episode.parse().expect("a number");
        within(async {
            loop {
                let shown = self.quietly(&["cast", "show", "1", "--json"]).await;
                let shown: serde_json::Value = serde_json::from_str(&shown).unwrap_or_default();
                let episodes = shown["episodes"].as_array().into_iter().flatten();
                if episodes
                    .into_iter()
                    .any(|e| e["id"] == id && e["state"] == state)
                {
                    return;
                }
                // sleep: another process is looked at, which does not tell
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }

    pub fn page(self) -> String {
        self.page
    }
}
