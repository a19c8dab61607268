//! Tells systemd that a service serves (sd_notify(3)), so that a start or restart lasts until then, and no reload comes
//! before.
//!
//! ```text
//!  systemd ── $NOTIFY_SOCKET ──▶ this process ── "READY=1" ──▶ systemd: active
//! ```

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells the service manager that started this process that it serves. Without one, nothing happens.
pub fn announce_readiness() {
    let Some(manager) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(error) = send_ready(&manager) {
        tracing::warn!(%error, "systemd is not told that this service is ready, and will end it");
    }
}

fn send_ready(manager: &OsStr) -> io::Result<()> {
    let address = match manager.as_bytes() {
        // An abstract name is written so.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(manager)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address)?;
    Ok(())
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
            send_ready(manager).unwrap();
            let mut said = [0; 32];
            let length = socket.recv(&mut said).unwrap();
            assert_eq!(&said[..length], b"READY=1");
        }
        assert!(send_ready(folder.path().join("gone").as_os_str()).is_err());
    }
}
