//! The table of this process's D2TP sockets, with the state that the kernel does not have.
//!
//! A socket is found by its cookie (SO_COOKIE), which the kernel gives only once: duplicates of a
//! descriptor lead to the same entry, a reused descriptor number does not. The table has one lock,
//! which [`crate::fork`] holds while a process forks.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libc::c_int;

use crate::address::SocketName;
use crate::connection_status::ConnectionStatus;
use crate::datagrams::ProgramDatagrams;
use crate::errno::{CallResult, Errno};
use crate::kernel::socket_option;
use crate::options::SocketOptions;
use crate::reopen_token::ReopenToken;

/// The number of entries from which closed connections are removed, because programs may also close
/// sockets by the kernel's call, which is not seen here. It exceeds the number of descriptors of
/// most processes.
const SOCKETS_MAX: usize = 1 << 15;

/// A D2TP socket.
#[derive(Clone, Debug)]
pub(crate) struct SocketEntry {
    /// AF_INET or AF_INET6, as the program asked.
    pub(crate) domain: c_int,
    /// The process whose engine has the other end of the pair.
    pub(crate) pid: u32,
    pub(crate) options: SocketOptions,
    pub(crate) peer: Option<SocketName>,
    pub(crate) local: Option<SocketName>,
    /// The loopback port, once the socket was bound to an address of AF_D2TP.
    pub(crate) bound: Option<u16>,
    pub(crate) listens: bool,
    /// The datagrams of a socket that carries any.
    pub(crate) datagrams: Option<Arc<ProgramDatagrams>>,
    pub(crate) status: Option<Arc<ConnectionStatus>>,
    /// The token for opening the connection again.
    pub(crate) token: Option<ReopenToken>,
    /// Why the connection attempt was not started, in words.
    pub(crate) cause: Option<String>,
}

impl SocketEntry {
    pub(crate) fn new(domain: c_int) -> SocketEntry {
        SocketEntry {
            domain,
            pid: std::process::id(),
            options: SocketOptions::default(),
            peer: None,
            local: None,
            bound: None,
            listens: false,
            datagrams: None,
            status: None,
            token: None,
            cause: None,
        }
    }

    /// Whether the connection existed and is over.
    fn is_over(&self) -> bool {
        let conn_status = self.status.as_ref();
        conn_status.is_some_and(|conn_status| conn_status.over.load(Ordering::Relaxed))
    }

    /// Whether this process's engine has the other end of the pair.
    pub(crate) fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }
}

/// All sockets of the process, by descriptor.
#[derive(Default)]
pub(crate) struct SocketTable {
    sockets: HashMap<u64, SocketEntry>,
    /// Flows that are connecting to a listener, by the loopback address they connect from.
    arrivals: HashMap<Ipv4Addr, SocketEntry>,
}

static TABLE: Mutex<Option<SocketTable>> = Mutex::new(None);

/// Locks the table, for fork handlers.
pub(crate) fn lock() -> MutexGuard<'static, Option<SocketTable>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The kernel's cookie of a socket.
pub(crate) fn cookie(fd: RawFd) -> CallResult<u64> {
    socket_option(fd, libc::SO_COOKIE)
}

/// Adds `socket` to the table.
pub(crate) fn insert(cookie: u64, socket: SocketEntry) {
    let mut table = lock();
    let sockets = &mut table.get_or_insert_default().sockets;
    if sockets.len() >= SOCKETS_MAX {
        sockets.retain(|_, socket| !socket.is_over());
    }
    sockets.insert(cookie, socket);
}

/// The socket of a descriptor, if it is a D2TP socket.
///
/// # Errors
/// The descriptor is not a socket, or not open.
pub(crate) fn find(fd: RawFd) -> CallResult<Option<(u64, SocketEntry)>> {
    let cookie = cookie(fd)?;
    let table = lock();
    let known = table.as_ref().and_then(|t| t.sockets.get(&cookie));
    Ok(known.map(|socket| (cookie, socket.clone())))
}

/// Changes the entry of a socket.
pub(crate) fn change<R>(cookie: u64, f: impl FnOnce(&mut SocketEntry) -> R) -> Option<R> {
    let mut table = lock();
    table.as_mut()?.sockets.get_mut(&cookie).map(f)
}

/// Handles a close call. While the socket is connected a duplicate descriptor may exist, so its entry
/// remains until the connection is over.
pub(crate) fn forget(cookie: u64) {
    if let Some(table) = lock().as_mut()
        && let Some(socket) = table.sockets.get(&cookie)
        && (socket.status.is_none() || socket.is_over())
    {
        table.sockets.remove(&cookie);
    }
}

/// Announces a flow that will connect to a listener from `name`.
pub(crate) fn announce(name: Ipv4Addr, socket: SocketEntry) {
    let mut table = lock();
    table.get_or_insert_default().arrivals.insert(name, socket);
}

/// Takes the flow that connected from `name`.
pub(crate) fn arrive(name: Ipv4Addr) -> Option<SocketEntry> {
    lock().as_mut()?.arrivals.remove(&name)
}

/// The error of a failed connection attempt, if the program does not know it yet.
pub(crate) fn take_refusal(socket: &SocketEntry) -> Option<Errno> {
    let conn_status = socket.status.as_ref()?;
    let fault = conn_status.fault.get()?;
    let unheard = conn_status.refused.swap(false, Ordering::AcqRel);
    unheard.then_some(Errno(fault.errno))
}

/// Translates an error of the kernel's socket into that of the connection; `errno` 0 means that the
/// kernel reports no error.
pub(crate) fn translate(fd: RawFd, errno: Errno) -> Errno {
    if !matches!(errno.0, 0 | libc::ECONNRESET) {
        return errno;
    }
    let conn_status = find(fd).ok().flatten().and_then(|(_, s)| s.status);
    let Some((conn_status, fault)) = conn_status.as_ref().and_then(|f| Some((f, f.fault.get()?)))
    else {
        return errno;
    };
    let unheard = conn_status.refused.swap(false, Ordering::AcqRel);
    match unheard || errno.0 != 0 {
        true => Errno(fault.errno),
        false => errno,
    }
}
