//! A program in C that does with its socket what a test tells it to (edge/capi/tests/c/told.c).

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;

use cedos_lab_rig::wait::within;
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::support::CProgram;

/// The UDP sockets that a process has.
pub fn udp_sockets(pid: Pid) -> BTreeSet<String> {
    let known = std::fs::read_to_string("/proc/net/udp").expect("the kernel says");
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let names = fds.flatten().filter_map(|fd| {
        let name = std::fs::read_link(fd.path()).ok()?;
        let name = name.to_str()?.strip_prefix("socket:[")?;
        name.strip_suffix(']').map(str::to_owned)
    });
    let is_udp = |inode: &String| known.contains(&format!(" {inode} "));
    names.filter(is_udp).collect()
}

/// A running told.c, which reports what its socket calls return.
pub struct Program {
    pub child: Child,
    to: Option<ChildStdin>,
    from: Lines<BufReader<ChildStdout>>,
}

impl Program {
    /// Starts the program towards `at` through the proxy; the agent listens at `socket`.
    pub fn start(
        program: &CProgram,
        home: &Path,
        proxy: &str,
        socket: &Path,
        arguments: &[&str],
    ) -> Program {
        Program::start_among(program, home, proxy, socket, arguments, &[])
    }

    /// Starts the program with these environment variables.
    pub fn start_among(
        program: &CProgram,
        home: &Path,
        proxy: &str,
        socket: &Path,
        arguments: &[&str],
        around: &[(&str, &str)],
    ) -> Program {
        let mut command: Command = program.command().into();
        let mut child = command
            .args(arguments)
            .envs(around.iter().copied())
            .env("XDG_CONFIG_HOME", home.join(".config"))
            .env("CEDOS_AGENT", socket)
            .env("CEDOS_PROX", proxy)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("it runs");
        let from = BufReader::new(child.stdout.take().expect("piped")).lines();
        Program {
            to: child.stdin.take(),
            child,
            from,
        }
    }

    pub async fn hear(&mut self) -> String {
        let line = within(self.from.next_line()).await.expect("text");
        line.unwrap_or_default()
    }

    pub async fn tell(&mut self, line: &str) {
        let to = self.to.as_mut().expect("it listens");
        let told = to.write_all(format!("{line}\n").as_bytes()).await;
        told.expect("it listens");
    }

    pub async fn ask(&mut self, line: &str) -> String {
        self.tell(line).await;
        self.hear().await
    }

    /// Ends it as it likes, by the end of what it is told.
    pub async fn leave(&mut self) {
        self.to = None;
        let status = within(self.child.wait()).await.expect("a status");
        assert!(status.success());
    }
}
