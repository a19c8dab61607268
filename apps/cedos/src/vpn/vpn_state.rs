//! The state directory of the VPN: which process runs it, and how it is.
//!
//! ```text
//!  /run/cedos-vpn/lock         locked by the process that runs the VPN, whose number is in it
//!  /run/cedos-vpn/status.json  how it is, replaced whenever that changes
//! ```

use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::packet_carrier::{PacketCounts, RepairCounts};
use super::packet_rules::RulePackets;

/// How the VPN is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VpnStatus {
    /// Whether the proxy carries packets now.
    pub connected: bool,
    /// Why the VPN does not carry packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The inner addresses of this machine.
    pub addresses: Vec<IpAddr>,
    /// The inner MTU in bytes.
    pub mtu_bytes: u16,
    /// How TCP is carried: `flows` or `packets`.
    pub tcp: String,
    /// TCP connections that are carried as flows.
    pub flows: usize,
    /// The numbers of packets carried and dropped so far.
    pub packets: PacketCounts,
    /// Lost segments of TCP as packets that were sent again.
    #[serde(default)]
    pub repairs: RepairCounts,
    /// What traffic of each rule has used, in their order, and last everything else. Empty without rules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<RuleStatus>,
}

/// What traffic of one rule has used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleStatus {
    /// The traffic, as it was written; `None` for everything else.
    pub traffic: Option<String>,
    /// The policy, as it was written.
    pub policy: String,
    /// TCP connections that are carried as flows.
    pub connections: RuleConnections,
    /// Everything that is carried as packets.
    pub packets: RulePackets,
}

/// TCP connections of one rule that are carried as flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleConnections {
    /// How many there are now.
    pub open: u64,
    /// How many were begun so far.
    pub total: u64,
    /// Payload bytes over free networks, in both directions.
    pub free_bytes: u64,
    /// Payload bytes over metered networks, in both directions.
    pub metered_bytes: u64,
}

/// The directory, held by the process that runs the VPN.
#[derive(Debug)]
pub struct VpnState {
    directory: PathBuf,
    _lock: File,
}

/// A VPN that another process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningVpn(pub Pid);

impl VpnState {
    /// Takes the directory for this process.
    ///
    /// # Errors
    /// Another process runs a VPN there, or the directory cannot be used.
    pub fn take(directory: &Path) -> anyhow::Result<VpnState> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o755);
        let shown = directory.display();
        builder
            .create(directory)
            .with_context(|| format!("cannot make {shown}; `cedos vpn` needs root"))?;
        let path = directory.join("lock");
        let mut options = File::options();
        let lock = options.read(true).write(true).create(true).truncate(false);
        let mut lock = lock
            .open(&path)
            .with_context(|| format!("cannot open {}; `cedos vpn` needs root", path.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                anyhow::bail!("the VPN is up already; `cedos vpn down` ends it")
            }
            Err(TryLockError::Error(error)) => return Err(error).context("cannot lock the state"),
        }
        let _ = std::fs::remove_file(directory.join("status.json"));
        lock.set_len(0)?;
        lock.rewind()?;
        write!(lock, "{}", std::process::id())?;
        Ok(VpnState {
            directory: directory.to_owned(),
            _lock: lock,
        })
    }

    /// The process that runs the VPN of a directory, if one does.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn running(directory: &Path) -> io::Result<Option<RunningVpn>> {
        let mut lock = match File::open(directory.join("lock")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            lock => lock?,
        };
        match lock.try_lock_shared() {
            Ok(()) => return Ok(None),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let mut text = String::new();
        lock.read_to_string(&mut text)?;
        Ok(text.trim().parse().ok().map(Pid::from_raw).map(RunningVpn))
    }

    /// Records how the VPN is.
    pub fn report(&self, status: &VpnStatus) {
        let path = self.directory.join("status.json");
        let new = path.with_extension("new");
        let text = serde_json::to_vec(status).expect("plain data");
        let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path));
        if let Err(error) = written {
            tracing::debug!(%error, "the status is not written");
        }
    }

    /// How the VPN of a directory is; `None` before it was recorded.
    pub fn status(directory: &Path) -> Option<VpnStatus> {
        let text = std::fs::read(directory.join("status.json")).ok()?;
        serde_json::from_slice(&text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_has_the_directory_and_what_it_reports_is_read() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("vpn");
        assert_eq!(VpnState::running(&directory).unwrap(), None);
        let state = VpnState::take(&directory).unwrap();
        let running = VpnState::running(&directory).unwrap();
        let own = Pid::from_raw(std::process::id() as i32);
        assert_eq!(running, Some(RunningVpn(own)));
        let refused = VpnState::take(&directory).unwrap_err();
        assert!(refused.to_string().contains("cedos vpn down"), "{refused}");
        let status = VpnStatus {
            connected: true,
            ..VpnStatus::default()
        };
        state.report(&status);
        assert_eq!(VpnState::status(&directory), Some(status));
        drop(state);
        assert_eq!(VpnState::running(&directory).unwrap(), None);
    }
}
