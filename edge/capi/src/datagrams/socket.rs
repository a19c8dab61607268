//! The program's side of a datagram socket.

use std::collections::HashMap;
use std::net::{Ipv4Addr, UdpSocket as Plain};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use d2tp_driver::Connection;
use libc::c_int;

use crate::kernel::socket_option;
use crate::pair;

/// The datagram size that every session supports before its paths are known, from the smallest packet
/// that D2TP requires.
pub(crate) const SURE_BYTES: usize = 1100;
/// The first bytes of the loopback addresses that stand for peers
/// ([`crate::engine_state::EngineState::name`]).
pub(crate) const NAMES: [u8; 2] = [127, 1];
/// The interval at which it is checked whether a program still has its socket, if nothing else
/// shows that.
pub(super) const LOOK: Duration = Duration::from_secs(5);

/// Whether any socket of this process is a datagram socket. Until then calls need no look-up.
static ANY: AtomicBool = AtomicBool::new(false);

/// Whether a descriptor may be a D2TP datagram socket.
pub(crate) fn may_be_datagram_socket(fd: RawFd) -> bool {
    if !ANY.load(Ordering::Relaxed) {
        return false;
    }
    socket_option(fd, libc::SO_TYPE) == Ok(libc::SOCK_DGRAM)
}

/// The engine's ports for datagrams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DatagramPorts {
    /// The port for datagrams without a head.
    pub(crate) plain: u16,
    /// The port for datagrams with a head.
    pub(crate) with_head: u16,
}

/// A datagram socket as the program's calls know it.
pub(crate) struct ProgramDatagrams {
    pub(crate) ports: DatagramPorts,
    /// The socket's loopback port.
    pub(crate) port: u16,
    /// The socket's peers, by their loopback addresses.
    peers: Mutex<HashMap<Ipv4Addr, DatagramSession>>,
    /// The peer that the socket is connected to.
    to: Mutex<Option<Ipv4Addr>>,
}

/// The owner of the session with a far end: this process or an agent.
pub(super) enum DatagramSession {
    Local(Connection),
    /// An agent's session: datagrams of this many bytes fit.
    Agent(usize),
}

/// A peer of a program's socket that an agent carries.
pub(crate) struct AgentDatagramPeer {
    pub(super) socket: Arc<ProgramDatagrams>,
    pub(super) name: Ipv4Addr,
}

impl AgentDatagramPeer {
    /// Records the size of datagrams that fit into a packet now.
    pub(crate) fn has_room(&self, bytes: usize) {
        let session = DatagramSession::Agent(bytes);
        self.socket.peers().insert(self.name, session);
    }
}

impl fmt::Debug for ProgramDatagrams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grams({})", self.port)
    }
}

impl ProgramDatagrams {
    /// The peer that the socket is connected to.
    pub(crate) fn to(&self) -> Option<Ipv4Addr> {
        *self.to.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_to(&self, name: Ipv4Addr) {
        *self.to.lock().unwrap_or_else(PoisonError::into_inner) = Some(name);
    }

    pub(super) fn peers(&self) -> MutexGuard<'_, HashMap<Ipv4Addr, DatagramSession>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The largest datagram to a peer now, if there is a session with it.
    pub(crate) fn max(&self, name: Ipv4Addr) -> Option<usize> {
        let connection = match self.peers().get(&name)? {
            DatagramSession::Local(connection) => connection.clone(),
            DatagramSession::Agent(bytes) => return Some(*bytes),
        };
        connection.datagram_max()
    }
}

/// Creates a program's socket and its state.
pub(crate) fn program_socket(
    flags: c_int,
    ports: DatagramPorts,
) -> io::Result<(RawFd, ProgramDatagrams)> {
    // SAFETY: the arguments are plain numbers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let set_up = || {
        // Before any other process can send to it.
        pair::guard_listener(fd, ports.plain)?;
        pair::bind_program(fd)
    };
    let port = set_up().inspect_err(|_| {
        // SAFETY: just created, and nothing else uses it.
        unsafe { libc::close(fd) };
    })?;
    ANY.store(true, Ordering::Relaxed);
    let grams = ProgramDatagrams {
        ports,
        port,
        peers: Mutex::default(),
        to: Mutex::default(),
    };
    Ok((fd, grams))
}

/// Whether a program still has its datagram socket at `port`.
pub(super) fn is_bound(port: u16) -> bool {
    Plain::bind((Ipv4Addr::LOCALHOST, port)).is_err()
}
