//! A real `cedos prox` in a control group, and its memory and CPU time.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use d2tp_driver::ServerAddress;
use d2tp_session::PublicKey;

use super::hostile_kind::HostileKind;
use super::memory_group::MemoryGroup;
use crate::credential::Credential;

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
    /// What will attack it.
    pub kind: HostileKind,
    /// The value of `--disk-quota`; none: the proxy's own.
    pub disk_quota: Option<u64>,
    /// The file of `--config`, if there is one.
    pub settings: Option<String>,
}

/// The network from which the proxy gives its clients addresses.
const TUNNEL_NET: &str = "10.83.0.0/16";

/// The TCP ports of a proxy.
#[derive(Clone, Debug, Default)]
pub struct TcpPorts {
    /// The address at which devices connect by streams, if the proxy takes them.
    pub streams: Option<SocketAddr>,
    /// The certificate for streams, DER.
    pub certificate: Vec<u8>,
    /// The address for clients without D2TP, if the proxy serves them.
    pub proxy: Option<SocketAddr>,
}

/// A running proxy.
pub struct ProxyUnderLoad {
    child: Child,
    group: MemoryGroup,
    /// The `d2tp://` address of the proxy.
    pub address: ServerAddress,
    tcp: TcpPorts,
    rss_max: u64,
    disk_max: u64,
    next_disk_look: Instant,
    directory: tempfile::TempDir,
}

impl ProxyUnderLoad {
    /// Starts a proxy with its files in `directory`. It has no state directory, unless it must invite: then
    /// copies begin in memory, and a slow disk delays no client.
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
        let tcp = open_ports(setup.kind, directory.path(), &mut command)?;
        if let Some(quota) = setup.disk_quota {
            command.args(["--disk-quota", &quota.to_string()]);
        }
        if let Some(settings) = &setup.settings {
            let file = directory.path().join("prox.toml");
            fs::write(&file, settings)?;
            command.arg("--config").arg(file);
        }
        if setup.kind.uses_tunnels() {
            command.args(["--tunnel-net", TUNNEL_NET]);
        }
        let state = directory.path().join("state");
        if setup.kind.invites() {
            command.arg("--state-dir").arg(&state);
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
        let proxy = ProxyUnderLoad {
            child,
            group,
            address,
            tcp,
            rss_max: 0,
            disk_max: 0,
            next_disk_look: Instant::now(),
            directory,
        };
        if setup.kind.invites() {
            let mut invite = Command::new(&setup.program);
            invite.args(["prox", "invite", "--json", "--state-dir"]);
            let invited = invite.arg(&state).output()?;
            let error = String::from_utf8_lossy(&invited.stderr);
            ensure!(
                invited.status.success(),
                "the proxy does not invite: {error}"
            );
        }
        Ok(proxy)
    }

    /// The TCP ports on which it listens.
    pub fn tcp(&self) -> &TcpPorts {
        &self.tcp
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
        if Instant::now() >= self.next_disk_look {
            self.next_disk_look = Instant::now() + DISK_LOOK_EVERY;
            self.disk_max = self.disk_max.max(self.disk_bytes());
        }
        of("VmRSS:")
    }

    /// The most resident memory that [`ProxyUnderLoad::measure`] has seen.
    pub fn rss_max(&self) -> u64 {
        self.rss_max
    }

    /// The most bytes on disk that [`ProxyUnderLoad::measure`] has seen.
    pub fn disk_max(&self) -> u64 {
        self.disk_max
    }

    /// What the open files of the proxy occupy, which have no names.
    fn disk_bytes(&self) -> u64 {
        let files = fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        let of = |path: PathBuf| {
            let is_ours =
                fs::read_link(&path).is_ok_and(|to| to.starts_with(self.directory.path()));
            let found = is_ours.then(|| fs::metadata(&path).ok()).flatten();
            found.map_or(0, |found| found.blocks() * 512)
        };
        let files = files.into_iter().flatten().flatten();
        files.map(|file| of(file.path())).sum()
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

/// Adds the options for the TCP ports that a kind needs.
fn open_ports(kind: HostileKind, directory: &Path, command: &mut Command) -> Result<TcpPorts> {
    let mut tcp = TcpPorts::default();
    if kind.uses_streams() {
        let at = free_port()?;
        let credential = Credential::make()?;
        let (chain, key) = (directory.join("chain.pem"), directory.join("key.pem"));
        credential.write_pem(&chain, &key)?;
        command.arg("--stream-listen").arg(at.to_string());
        command.arg("--stream-cert").arg(&chain);
        command.arg("--stream-key").arg(&key);
        tcp.certificate = credential.certificate;
        tcp.streams = Some(at);
    }
    if kind.uses_http2() {
        let at = free_port()?;
        command.arg("--tcp-listen").arg(at.to_string());
        command.args(["--allow-address", "127.0.0.0/8"]);
        tcp.proxy = Some(at);
    }
    Ok(tcp)
}

/// A TCP port that nobody uses now: the proxy prints its UDP port only.
fn free_port() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?)
}

/// How often the disk is looked at: a thousand files take a while.
const DISK_LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often resident memory is measured.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);
