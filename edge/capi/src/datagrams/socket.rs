//! The program's side of a datagram socket.

use std::collections::HashMap;
use std::net::{Ipv4Addr, UdpSocket as Plain};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use d2tp_driver::Connection;
use libc::c_int;

use crate::kernel::socket_option;
use crate::pair;

/// Some socket of this process is one for datagrams: until then nobody is asked.
static ANY: AtomicBool = AtomicBool::new(false);

/// Whether a descriptor is a datagram socket, perhaps of ours.
pub(crate) fn may_be(fd: RawFd) -> bool {
    if !ANY.load(Ordering::Relaxed) {
        return false;
    }
    socket_option(fd, libc::SO_TYPE) == Ok(libc::SOCK_DGRAM)
}

/// The engine's ports for datagrams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    /// Of every far end's name.
    pub(crate) plain: u16,
    /// Of messages with a head.
    pub(crate) marked: u16,
}

/// What the program's side knows of a datagram socket.
pub(crate) struct Grams {
    pub(crate) ports: Ports,
    /// Its loopback port.
    pub(crate) port: u16,
    /// Its far ends, by their names.
    ends: Mutex<HashMap<Ipv4Addr, Session>>,
    /// The far end that it is connected to.
    to: Mutex<Option<Ipv4Addr>>,
}

/// Whose session with a far end it is.
pub(super) enum Session {
    Ours(Connection),
    /// An agent's: messages of so many bytes fit.
    Agents(usize),
}

/// A far end of a program's socket that an agent carries.
pub(crate) struct Far {
    pub(super) grams: Arc<Grams>,
    pub(super) name: Ipv4Addr,
}

impl Far {
    /// Messages of so many bytes fit.
    pub(crate) fn has_room(&self, bytes: usize) {
        let session = Session::Agents(bytes);
        self.grams.ends().insert(self.name, session);
    }
}

impl fmt::Debug for Grams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grams({})", self.port)
    }
}

impl Grams {
    /// The far end that it is connected to.
    pub(crate) fn to(&self) -> Option<Ipv4Addr> {
        *self.to.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_to(&self, name: Ipv4Addr) {
        *self.to.lock().unwrap_or_else(PoisonError::into_inner) = Some(name);
    }

    pub(super) fn ends(&self) -> MutexGuard<'_, HashMap<Ipv4Addr, Session>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The largest message that is taken for a far end now, if there is a session with it.
    pub(crate) fn max(&self, name: Ipv4Addr) -> Option<usize> {
        let connection = match self.ends().get(&name)? {
            Session::Ours(connection) => connection.clone(),
            Session::Agents(bytes) => return Some(*bytes),
        };
        connection.datagram_max()
    }
}

/// Makes a program's socket, and what is known of it.
pub(crate) fn program_socket(flags: c_int, ports: Ports) -> io::Result<(RawFd, Grams)> {
    // SAFETY: plain numbers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let set_up = || {
        // Before anybody can reach it.
        pair::guard_listener(fd, ports.plain)?;
        pair::bind_program(fd)
    };
    let port = set_up().inspect_err(|_| {
        // SAFETY: just made, and nobody knows it.
        unsafe { libc::close(fd) };
    })?;
    ANY.store(true, Ordering::Relaxed);
    let grams = Grams {
        ports,
        port,
        ends: Mutex::default(),
        to: Mutex::default(),
    };
    Ok((fd, grams))
}

/// Whether a program still has its datagram socket at `port`.
pub(super) fn is_bound(port: u16) -> bool {
    Plain::bind((Ipv4Addr::LOCALHOST, port)).is_err()
}
