//! The arguments of a program's `connect`: the destination, the server, and the device's key.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use d2tp_driver::{PublicKey, ServerList};

use crate::address::SocketName;
use crate::agent_message::ReopenOptions;
use crate::connection_status::ConnectionStatus;
use crate::errno::SocketFault;
use crate::options::SocketOptions;
use crate::settings_file;
use crate::socket_owner::SocketOwner;

/// The arguments of a connect call.
pub(crate) struct ConnectCall {
    /// The cookie of the program's socket in the table.
    pub(crate) cookie: u64,
    /// The descriptor at the time of the call.
    pub(crate) fd: RawFd,
    /// The loopback port of the program's socket.
    pub(crate) from: u16,
    pub(crate) to: SocketName,
    pub(crate) options: SocketOptions,
    pub(crate) conn_status: Arc<ConnectionStatus>,
    /// The token for opening the connection again.
    pub(crate) keep: Option<ReopenOptions>,
}

/// The servers for a destination, of which one is used, and whether they are proxies for it.
pub(crate) fn servers_of(
    to: &SocketName,
    options: &SocketOptions,
) -> Result<(ServerList, bool), SocketFault> {
    let key: Option<PublicKey> = match to {
        SocketName::Host { key: Some(key), .. } => Some(*key),
        _ => options.peer_key,
    };
    if let Some(key) = key {
        return Ok((to.server(key).into(), false));
    }
    let said = match options.proxy.clone() {
        Some(text) => Some(text),
        None => settings_file::default_proxy()?,
    };
    let Some(text) = said else {
        let why = "no key of a D2TP server was given, and no proxy: set CEDOS_PROX, or a default proxy by \
            `cedos join`";
        return Err(SocketFault::new(libc::ENETUNREACH, why));
    };
    let servers = text.parse::<ServerList>();
    let servers = servers.map_err(|error| SocketFault::new(libc::EINVAL, error))?;
    Ok((servers, true))
}

/// The servers of a connection.
pub(crate) struct ConnectTarget {
    /// The servers, of which one is used.
    pub(crate) servers: ServerList,
    /// The host and port to request from the server, if it is a proxy.
    pub(crate) target: Option<String>,
    /// The path of the key file; `None` for this process's own key.
    pub(crate) key: Option<PathBuf>,
    /// The process that owns the socket, if it is another one.
    pub(crate) owner: Option<Rc<SocketOwner>>,
}
