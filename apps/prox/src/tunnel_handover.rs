//! Sleeping tunnels on their way to another process: their connections, and a file in memory that describes them.
//!
//! ```text
//!  SleepingTunnels ─▶ PassedTunnels ── kept over execve, by the number in a variable ──▶ the same process, begun anew
//!                                  └── SCM_RIGHTS beside a message ──▶ the new process, or systemd
//!                                                                       └─▶ SleepingTunnels
//! ```
//!
//! A connection is found by its inode, which it keeps wherever it is passed, so the order in which descriptors arrive does
//! not matter. One that does not arrive is a tunnel that is reset when its device is back.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::net::TcpStream as StdTcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use d2tp_driver::HostKey;
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;

use crate::charged_tcp::ChargedTcp;
use crate::prox::Prox;
use crate::sleeping_tunnels::{SleptTunnel, TunnelRemainder};
use crate::tunnel_keeper::{KeptTunnelName, TunnelKeeper};

/// The variable that has the number of the description's descriptor when the process begins anew.
pub(crate) const TUNNELS_VARIABLE: &str = "CEDOS_PROX_TUNNELS";
/// The names under which systemd keeps the description, and connections.
const DESCRIPTION_NAME: &str = "cedos-tunnels";
const CONNECTION_NAME: &str = "cedos-tunnel";
/// The first descriptor that systemd passes.
const MANAGER_DESCRIPTORS_FROM: RawFd = 3; // sd_listen_fds(3)
/// The most descriptors in one message to systemd.
const DESCRIPTORS_AT_ONCE: usize = 200; // SCM_MAX_FD is 253
/// The most bytes of the table in a description; more is damage.
const TABLE_BYTES_MAX: u64 = 64 << 20; // 200 bytes for each of more connections than a process has descriptors

/// Tunnels that are passed to another process.
#[derive(Debug)]
pub struct PassedTunnels {
    /// The description: the length of the table in 8 bytes, the table in JSON, and the bytes under way of each tunnel.
    description: Option<OwnedFd>,
    connections: Vec<OwnedFd>,
    /// Connections of a process that crashed, with what their names said.
    kept: Vec<(KeptTunnelName, OwnedFd)>,
}

/// A tunnel in a description.
#[derive(Debug, Serialize, Deserialize)]
struct TunnelEntry {
    number: u64,
    client: HostKey,
    /// The connection: its inode, and its descriptor in the process that wrote this.
    inode: u64,
    descriptor: RawFd,
    up_bytes: usize,
    is_up_ended: bool,
    is_up_shut: bool,
    down_bytes: usize,
    down_from: Option<u64>,
    is_down_ended: bool,
    is_down_shut: bool,
}

impl Prox {
    /// Takes all sleeping tunnels for another process; none if there is none.
    ///
    /// # Errors
    /// They cannot be described. Then they are reset.
    pub fn take_tunnels(&self) -> io::Result<Option<PassedTunnels>> {
        let tunnels = self.sleeping_tunnels.take_all();
        match tunnels.is_empty() {
            true => Ok(None),
            false => PassedTunnels::of(tunnels).map(Some),
        }
    }

    /// Has `keeper` keep the connections of tunnels that sleep, so that they outlive a crash of this process. Tunnels of nodes that
    /// share their sessions do not sleep.
    pub fn keep_tunnels_with(&self, keeper: Arc<dyn TunnelKeeper>) {
        self.sleeping_tunnels.keep_with(keeper);
    }

    /// Has the tunnels of an earlier process sleep here. Must be called on a runtime. Returns how many there are.
    ///
    /// # Errors
    /// The description is damaged.
    pub fn adopt_tunnels(self: &Arc<Prox>, passed: PassedTunnels) -> io::Result<usize> {
        let mut adopted = 0;
        for (number, client, connection, remainder) in passed.open()? {
            let tcp = TcpStream::from_std(connection)?;
            let account = self.socket_memory().account(d2tp_driver::PublicKey(client));
            let Some(connection) = ChargedTcp::new(tcp, &account) else {
                continue; // It is closed: its client has no room.
            };
            let account = self.memory_account(client);
            let slept = SleptTunnel::new(client, connection, remainder, &account);
            self.sleeping_tunnels.put(number, slept, true);
            adopted += 1;
        }
        Ok(adopted)
    }
}

impl PassedTunnels {
    /// Tunnels of these descriptors: the description, and connections in any order.
    pub fn from_descriptors(description: OwnedFd, connections: Vec<OwnedFd>) -> PassedTunnels {
        PassedTunnels {
            description: Some(description),
            connections,
            kept: Vec::new(),
        }
    }

    /// The descriptors, the description first.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let connections = self.connections.iter().map(OwnedFd::as_fd);
        let description = self.description.iter().map(OwnedFd::as_fd);
        description.chain(connections)
    }

    /// The tunnels that systemd kept while no process served, after a stop or a crash, if there are any. To be called before its other descriptors are
    /// taken.
    pub fn from_manager() -> Option<PassedTunnels> {
        let own = std::env::var("LISTEN_PID").ok()?.parse() == Ok(std::process::id());
        let names = std::env::var("LISTEN_FDNAMES").ok().filter(|_| own)?;
        let (mut description, mut connections, mut kept) = (None, Vec::new(), Vec::new());
        for (number, name) in (MANAGER_DESCRIPTORS_FROM..).zip(names.split(':')) {
            match name {
                DESCRIPTION_NAME => description = inherited(number).or(description),
                CONNECTION_NAME => connections.extend(inherited(number)),
                _ => {
                    let said = KeptTunnelName::parse(name);
                    kept.extend(said.and_then(|said| Some((said, inherited(number)?))));
                }
            }
        }
        let has_any = description.is_some() || !kept.is_empty();
        has_any.then_some(PassedTunnels {
            description,
            connections,
            kept,
        })
    }

    /// Whether [`PassedTunnels::from_manager`] takes a descriptor that systemd passes with this name.
    pub fn is_name_of_one(name: &str) -> bool {
        matches!(name, DESCRIPTION_NAME | CONNECTION_NAME) || KeptTunnelName::parse(name).is_some()
    }

    /// What to send to systemd, beside these descriptors, so that it keeps the tunnels while no process serves (sd_notify(3)).
    /// It must not look at them (`FDPOLL=0`): it would close a connection that both ends have shut, with what is still unread
    /// in it.
    pub fn messages_to_keep(&self) -> Vec<(String, Vec<BorrowedFd<'_>>)> {
        let parts = self.connections.chunks(DESCRIPTORS_AT_ONCE);
        let description = self.description.as_slice();
        std::iter::once((DESCRIPTION_NAME, description))
            .chain(parts.map(|part| (CONNECTION_NAME, part)))
            .map(|(name, descriptors)| {
                let descriptors = descriptors.iter().map(OwnedFd::as_fd).collect();
                (format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), descriptors)
            })
            .collect()
    }

    /// What to send to systemd so that it keeps them no longer. Until then a server hears nothing of the end of its connection.
    pub fn messages_to_forget() -> [String; 2] {
        [DESCRIPTION_NAME, CONNECTION_NAME].map(|name| format!("FDSTOREREMOVE=1\nFDNAME={name}"))
    }

    fn of(tunnels: Vec<(u64, SleptTunnel)>) -> io::Result<PassedTunnels> {
        let (mut table, mut connections, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for (number, slept) in tunnels {
            let connection = OwnedFd::from(slept.connection.into_std()?);
            let remainder = slept.remainder;
            table.push(TunnelEntry {
                number,
                client: slept.client,
                inode: fstat(&connection)?.st_ino,
                descriptor: connection.as_raw_fd(),
                up_bytes: remainder.up.len(),
                is_up_ended: remainder.is_up_ended,
                is_up_shut: remainder.is_up_shut,
                down_bytes: remainder.down.len(),
                down_from: remainder.down_from,
                is_down_ended: remainder.is_down_ended,
                is_down_shut: remainder.is_down_shut,
            });
            connections.push(connection);
            bytes.extend([remainder.up, remainder.down]);
        }
        let table = serde_json::to_vec(&table)?;
        let mut file = File::from(memfd_create("cedos-tunnels", MemfdFlags::CLOEXEC)?);
        file.write_all(&(table.len() as u64).to_be_bytes())?;
        file.write_all(&table)?;
        for piece in bytes {
            file.write_all(&piece)?;
        }
        Ok(PassedTunnels::from_descriptors(file.into(), connections))
    }

    /// The tunnels whose connections arrived.
    fn open(self) -> io::Result<Vec<(u64, HostKey, StdTcpStream, TunnelRemainder)>> {
        let kept = self.kept.into_iter();
        let kept = kept.map(|(said, connection)| {
            let connection = StdTcpStream::from(connection);
            (said.number, said.client, connection, said.remainder)
        });
        // Those of the description come behind, in place of these.
        let mut tunnels: Vec<_> = kept.collect();
        let Some(description) = self.description else {
            return Ok(tunnels);
        };
        let file = File::from(description);
        let (table, mut at) = read_table(&file)?;
        let mut by_inode = HashMap::new();
        for connection in self.connections {
            by_inode.insert(fstat(&connection)?.st_ino, connection);
        }
        let end = file.metadata()?.len();
        let mut piece = |bytes: usize| -> io::Result<Vec<u8>> {
            let from = at;
            let to = (bytes as u64).checked_add(from).filter(|to| *to <= end);
            at = to.ok_or(ErrorKind::UnexpectedEof)?;
            let mut piece = vec![0; bytes];
            file.read_exact_at(&mut piece, from)?;
            Ok(piece)
        };
        for entry in table {
            let (up, down) = (piece(entry.up_bytes)?, piece(entry.down_bytes)?);
            let Some(connection) = by_inode.remove(&entry.inode) else {
                continue;
            };
            let remainder = TunnelRemainder {
                up,
                is_up_ended: entry.is_up_ended,
                is_up_shut: entry.is_up_shut,
                down,
                down_from: entry.down_from,
                is_down_ended: entry.is_down_ended,
                is_down_shut: entry.is_down_shut,
            };
            let connection = StdTcpStream::from(connection);
            tunnels.push((entry.number, entry.client, connection, remainder));
        }
        Ok(tunnels)
    }

    /// Keeps the descriptors open when this process begins anew, and returns the variable by which it finds them.
    pub(crate) fn keep_at_exec(&self) -> io::Result<(&'static str, String)> {
        for descriptor in self.descriptors() {
            fcntl_setfd(descriptor, FdFlags::empty())?;
        }
        let description = self.description.as_ref().map(AsRawFd::as_raw_fd);
        let description = description.ok_or(ErrorKind::InvalidInput)?;
        Ok((TUNNELS_VARIABLE, description.to_string()))
    }

    /// The tunnels of this process before it began anew, if it had any.
    pub(crate) fn after_exec() -> Option<PassedTunnels> {
        let number: RawFd = std::env::var(TUNNELS_VARIABLE).ok()?.parse().ok()?;
        let description = inherited(number)?;
        let file = File::from(description);
        let (table, _) = read_table(&file).ok()?;
        let connections = table.iter().filter_map(|entry| {
            let connection = inherited(entry.descriptor)?;
            let is_it = fstat(&connection).is_ok_and(|found| found.st_ino == entry.inode);
            is_it.then_some(connection)
        });
        let connections = connections.collect();
        Some(PassedTunnels::from_descriptors(file.into(), connections))
    }
}

/// A descriptor that this process was begun with; none if it is not open. It is closed when another program begins.
fn inherited(number: RawFd) -> Option<OwnedFd> {
    if number <= 2 {
        return None;
    }
    // SAFETY: the descriptor is looked at only while this expression lasts.
    let is_open = unsafe { fcntl_getfd(BorrowedFd::borrow_raw(number)) }.is_ok();
    if !is_open {
        return None;
    }
    // SAFETY: this process was begun with the descriptor for this, and nobody else takes it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl_setfd(&descriptor, FdFlags::CLOEXEC).ok()?;
    Some(descriptor)
}

/// The table of a description, and the offset of what follows it.
fn read_table(file: &File) -> io::Result<(Vec<TunnelEntry>, u64)> {
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0)?;
    let length = u64::from_be_bytes(length);
    if length > TABLE_BYTES_MAX.min(file.metadata()?.len()) {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut table = vec![0; length as usize];
    file.read_exact_at(&mut table, 8)?;
    Ok((serde_json::from_slice(&table)?, 8 + length))
}
