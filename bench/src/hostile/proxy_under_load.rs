//! A real `cedos prox` in a control group, and its memory and CPU time.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use d2tp_driver::ServerAddress;
use d2tp_session::PublicKey;

use super::memory_group::MemoryGroup;

/// The settings of the proxy.
#[derive(Clone, Debug)]
pub struct ProxySetup {
    /// The program `cedos`.
    pub program: PathBuf,
    /// The value of `--session-memory`.
    pub session_memory: u64,
    /// The value of `--memory-quota`.
    pub memory_quota: u64,
    /// The limit of the control group.
    pub memory_max: u64,
    /// The keys that are admitted.
    pub clients: Vec<PublicKey>,
}

/// A running proxy.
pub struct ProxyUnderLoad {
    child: Child,
    group: MemoryGroup,
    /// The `d2tp://` address of the proxy.
    pub address: ServerAddress,
    rss_max: u64,
    _directory: tempfile::TempDir,
}

impl ProxyUnderLoad {
    /// Starts a proxy with its files in `directory`. It has no state directory: then copies begin
    /// in memory, and a slow disk delays no client.
    ///
    /// # Errors
    /// The proxy does not start.
    pub fn start(setup: &ProxySetup, directory: &Path) -> Result<ProxyUnderLoad> {
        let directory = tempfile::tempdir_in(directory)?;
        let group = MemoryGroup::new(setup.memory_max);
        let mut command = Command::new(&setup.program);
        command
            .args(["prox", "--listen", "127.0.0.1:0", "--allow-private"])
            .args(["--session-memory", &setup.session_memory.to_string()])
            .args(["--memory-quota", &setup.memory_quota.to_string()])
            .env(
                "RUST_LOG",
                std::env::var("RUST_LOG").unwrap_or("error".into()),
            )
            .env("TMPDIR", directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        for client in &setup.clients {
            command.arg("--allow-client").arg(client.to_string());
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot run {}", setup.program.display()))?;
        group.admit(child.id())?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("its output is piped")?;
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(!line.is_empty(), "the proxy ended; its error is above");
        let address = line.trim().parse();
        let address = address.with_context(|| format!("the proxy said {line:?}"))?;
        Ok(ProxyUnderLoad {
            child,
            group,
            address,
            rss_max: 0,
            _directory: directory,
        })
    }

    /// What enforces the limit on its memory.
    pub fn group(&self) -> &MemoryGroup {
        &self.group
    }

    /// Measures the resident memory; returns the current and records the highest.
    pub fn measure(&mut self) -> u64 {
        let status = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(status).unwrap_or_default();
        let of = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            kib.unwrap_or(0) * 1024
        };
        self.rss_max = self.rss_max.max(of("VmHWM:"));
        of("VmRSS:")
    }

    /// The most resident memory that [`ProxyUnderLoad::measure`] has seen.
    pub fn rss_max(&self) -> u64 {
        self.rss_max
    }

    /// Whether the proxy ended, or the kernel killed it.
    pub fn is_gone(&mut self) -> bool {
        self.group.kills() > 0 || !matches!(self.child.try_wait(), Ok(None))
    }

    /// The CPU time that it has used, in seconds.
    pub fn cpu_s(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        let stat = stat.unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let ticks = fields.split_whitespace().skip(11).take(2);
        let ticks: f64 = ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
        ticks / 100.0 // USER_HZ is 100 on all supported Linux systems
    }
}

impl Drop for ProxyUnderLoad {
    fn drop(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The path of the program `cedos`: the given one, or the one in this program's folder.
///
/// # Errors
/// There is none.
pub fn find_program(named: Option<&PathBuf>) -> Result<PathBuf> {
    let program = match named {
        Some(program) => program.clone(),
        None => std::env::current_exe()?.with_file_name("cedos"),
    };
    if !program.is_file() {
        bail!(
            "{} is not there: `cargo build -p cedos` builds it, and --cedos names another",
            program.display()
        );
    }
    Ok(program)
}

/// How often resident memory is measured.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);
