//! What a service tells systemd (sd_notify(3)): that it serves, so that a start or restart lasts until then, and no reload
//! comes before; and which connections to keep while no process serves.
//!
//! ```text
//!  systemd ── $NOTIFY_SOCKET ──▶ this process ── "READY=1" ──────────────────────▶ systemd: active
//!                                             ── "FDSTORE=1" and connections ────▶ systemd ── LISTEN_FDS ──▶ the next process
//! ```

use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::mpsc;

use cedos_prox::{PassedTunnels, TunnelKeeper};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};

/// The variable that names the service manager's socket.
const MANAGER_VARIABLE: &str = "NOTIFY_SOCKET";

/// The messages about connections that wait for the manager. Beyond, connections do not outlive a crash.
const KEPT_WAITING_MAX: usize = 4_096; // as many as FileDescriptorStoreMax= in the unit

/// Tells the service manager that started this process that it serves. Without one, nothing happens.
pub fn announce_readiness() {
    let Some(manager) = ServiceManager::from_env() else {
        return;
    };
    if let Err(error) = manager.send("READY=1", &[]) {
        tracing::warn!(%error, "systemd is not told that this service is ready, and will end it");
    }
}

/// The service manager that started this process.
pub struct ServiceManager(OsString);

impl ServiceManager {
    /// The manager, if this process is a service of one.
    pub fn from_env() -> Option<ServiceManager> {
        std::env::var_os(MANAGER_VARIABLE).map(ServiceManager)
    }

    /// Has it keep tunnels for the next process: as many as `FileDescriptorStoreMax=` says.
    ///
    /// # Errors
    /// It cannot be told.
    pub fn keep(&self, tunnels: &PassedTunnels) -> io::Result<()> {
        let mut messages = tunnels.messages_to_keep().into_iter();
        messages.try_for_each(|(text, descriptors)| self.send(&text, &descriptors))
    }

    /// Has it keep tunnels no longer, which this process has now.
    ///
    /// # Errors
    /// It cannot be told.
    pub fn forget_tunnels(&self) -> io::Result<()> {
        let mut messages = PassedTunnels::messages_to_forget().into_iter();
        messages.try_for_each(|text| self.send(&text, &[]))
    }

    /// Has it keep the connections of tunnels that sleep, while this process serves. They are told on a thread of their own, because
    /// the manager may be busy.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn keeper(self) -> io::Result<ManagerKeeper> {
        let (tell, told) = mpsc::sync_channel::<(String, Option<OwnedFd>)>(KEPT_WAITING_MAX);
        let name = "tunnel-keeper".to_owned();
        std::thread::Builder::new().name(name).spawn(move || {
            for (text, connection) in told {
                let connection = connection.iter().map(OwnedFd::as_fd);
                let sent = self.send(&text, &connection.collect::<Vec<_>>());
                if let Err(error) = sent {
                    tracing::warn!(%error, "systemd is not told of a connection that sleeps");
                }
            }
        })?;
        Ok(ManagerKeeper(tell))
    }

    fn send(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let manager: &OsStr = &self.0;
        let address = match manager.as_bytes() {
            // An abstract name is written so.
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(manager)?,
        };
        let socket = UnixDatagram::unbound()?;
        if descriptors.is_empty() {
            socket.send_to_addr(text.as_bytes(), &address)?;
            return Ok(());
        }
        socket.connect_addr(&address)?;
        let numbers: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let parts = [IoSlice::new(text.as_bytes())];
        let control = [ControlMessage::ScmRights(&numbers)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        sendmsg::<UnixAddr>(socket.as_raw_fd(), &parts, &control, flags, None)?;
        Ok(())
    }
}

/// Keeps connections of tunnels that sleep at the service manager.
#[derive(Debug)]
pub struct ManagerKeeper(mpsc::SyncSender<(String, Option<OwnedFd>)>);

impl ManagerKeeper {
    fn tell(&self, text: String, connection: Option<OwnedFd>) {
        if self.0.try_send((text, connection)).is_err() {
            tracing::warn!("systemd is too busy to be told of a connection that sleeps");
        }
    }
}

impl TunnelKeeper for ManagerKeeper {
    fn keep(&self, name: String, connection: OwnedFd) {
        // It must not look whether both ends have shut it (FDPOLL=0): there may be something unread in it.
        let text = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
        self.tell(text, Some(connection));
    }

    fn forget(&self, name: String) {
        self.tell(format!("FDSTOREREMOVE=1\nFDNAME={name}"), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_is_told_by_a_path_and_by_an_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("@cedos-readiness-{}", std::process::id());
        let at_path = UnixDatagram::bind(&path).unwrap();
        let abstract_name = SocketAddr::from_abstract_name(&name[1..]).unwrap();
        let at_name = UnixDatagram::bind_addr(&abstract_name).unwrap();
        for (manager, socket) in [(path.as_os_str(), at_path), (OsStr::new(&name), at_name)] {
            let manager = ServiceManager(manager.to_owned());
            manager.send("READY=1", &[]).unwrap();
            let mut said = [0; 32];
            let length = socket.recv(&mut said).unwrap();
            assert_eq!(&said[..length], b"READY=1");
        }
        let gone = ServiceManager(folder.path().join("gone").into());
        assert!(gone.send("READY=1", &[]).is_err());
    }
}
