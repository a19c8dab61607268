//! Socket options: BSD's are passed to the kernel, D2TP's to the table and to the flow.

use libc::{c_int, c_long, c_void, socklen_t};

use super::answer;
use crate::connect_wait::ConnectWait;
use crate::connection_status::ConnectionStatus;
use crate::errno::{CallResult, Errno, SocketFault, check};
use crate::flow_info::info_of;
use crate::info::D2tpInfo;
use crate::options::{
    self, PersistMode, SO_ERROR, SO_HOSTKEY, SO_INFO, SOL_D2TP, SocketOptions, VALUE_BYTES_MAX,
};
use crate::reopen_token::TOKEN_BYTES;
use crate::table::{self, SocketEntry};
use crate::{agent_address, engine, memory, pair};

/// setsockopt(2)
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    answer(|| {
        let known = table::find(fd)?;
        match (level, known) {
            (SOL_D2TP, Some((cookie, socket))) => set(cookie, &socket, name, value, len),
            (SOL_D2TP, None) => Err(Errno(libc::ENOPROTOOPT)),
            (libc::SOL_SOCKET, Some(_)) if is_the_engines(name) => Err(Errno(libc::ENOPROTOOPT)),
            // D2TP decides about packets, and the kernel's socket is an IPv4 one.
            (libc::IPPROTO_IPV6, Some((_, socket))) if socket.domain == libc::AF_INET6 => Ok(0),
            // SAFETY: the kernel checks the pointers.
            _ => check(unsafe { libc::setsockopt(fd, level, name, value, len) }),
        }
    })
}

/// Whether the option would separate the program's end from the engine's: the policy chooses links.
fn is_the_engines(name: c_int) -> bool {
    matches!(
        name,
        libc::SO_BINDTODEVICE
            | libc::SO_ATTACH_FILTER
            | libc::SO_DETACH_FILTER
            | libc::SO_DONTROUTE
    )
}

fn set(
    cookie: u64,
    socket: &SocketEntry,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> CallResult<c_int> {
    if !socket.is_ours() {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    if len as usize > VALUE_BYTES_MAX {
        return Err(Errno(libc::EINVAL));
    }
    let value = memory::read(value, len as usize)?;
    if name == options::SO_PERSIST {
        persists(cookie, socket, &value)?;
    }
    if name == options::SO_RCVBUFTH && socket.datagrams.is_some() {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let changed: Option<CallResult<_>> = table::change(cookie, |socket| {
        let begun = socket.status.is_some();
        socket.options.set(name, &value, begun)?;
        Ok((socket.options.clone(), socket.status.clone()))
    });
    let (options, conn_status) = changed.ok_or(Errno(libc::EBADF))??;
    if let Some(grams) = &socket.datagrams {
        let (port, deadline_too) = (grams.port, is_deadline(name));
        // Before the next message is sent.
        engine::get()?.request(move |home, reply| {
            let told = crate::datagrams::on_options(home, port, deadline_too, &options);
            tokio::task::spawn_local(async move {
                if let Some(handed) = told {
                    // The reply arrives after the agent has handled the option.
                    let _ = handed.info().await;
                }
                let _ = reply.send(());
            });
        })?;
    } else if let Some(conn_status) = conn_status {
        engine::get()?.post(move |home| {
            if let Some(held) = home.flows.borrow().get(&conn_status.serial) {
                held.change(options);
            } else if let Some(handed) = home.agent_connections.borrow().get(&conn_status.serial) {
                handed.change(&options);
            }
        });
    }
    Ok(0)
}

/// Checks whether a connection can outlive its program: an agent must carry it.
fn persists(cookie: u64, socket: &SocketEntry, value: &[u8]) -> CallResult<()> {
    if socket.datagrams.is_some() || socket.listens {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let mut asked = socket.options.clone();
    asked.set(options::SO_PERSIST, value, socket.status.is_some())?;
    if asked.persist == PersistMode::No {
        return Ok(());
    }
    let is_there = engine::get()?.request(|_, reply| {
        tokio::task::spawn_local(async move {
            let _ = reply.send(agent_address::is_agent_running().await);
        });
    })?;
    if is_there {
        return Ok(());
    }
    let fault = agent_address::no_agent();
    table::change(cookie, |socket| socket.cause = Some(fault.text));
    Err(Errno(fault.errno))
}

fn is_deadline(name: c_int) -> bool {
    name == options::SO_DEADLINE || name == options::SO_IFLATE
}

/// getsockopt(2)
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    answer(|| {
        let Some((_, socket)) = table::find(fd)? else {
            return match level {
                SOL_D2TP => Err(Errno(libc::ENOPROTOOPT)),
                // SAFETY: the kernel checks the pointers.
                _ => check(unsafe { libc::getsockopt(fd, level, name, value, len) }),
            };
        };
        let room = memory::read(len.cast(), size_of::<socklen_t>())?;
        let room = u32::from_ne_bytes(room.try_into().map_err(|_| Errno(libc::EFAULT))?) as usize;
        let bytes = match (level, name) {
            // A program whose buffer is too small for a token gets the number.
            (SOL_D2TP, options::SO_PERSIST) if room >= TOKEN_BYTES && socket.token.is_some() => {
                socket.token.map_or_else(Vec::new, |token| token.0.to_vec())
            }
            (SOL_D2TP, _) => get(&socket, name)?,
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => socket.domain.to_ne_bytes().to_vec(),
            (libc::SOL_SOCKET, libc::SO_ERROR) => pending(fd)?.to_ne_bytes().to_vec(),
            // SAFETY: the kernel checks the pointers.
            _ => return check(unsafe { libc::getsockopt(fd, level, name, value, len) }),
        };
        memory::answer(&bytes, value, len, bytes.len().min(room))?;
        Ok(0)
    })
}

/// The pending error, with the connection's own cause; reading it clears it.
fn pending(fd: c_int) -> CallResult<c_int> {
    Ok(table::translate(fd, Errno(pair::take_error(fd)?)).0)
}

fn get(socket: &SocketEntry, name: c_int) -> CallResult<Vec<u8>> {
    match name {
        SO_INFO => Ok(info(socket)?.to_bytes()),
        SO_ERROR => {
            // The agent may have died without being noticed yet.
            let waits_for = info(socket)?.waits_for();
            let fault = socket
                .status
                .as_ref()
                .and_then(|conn_status| conn_status.fault.get());
            let fault = fault.map(|fault| fault.text.as_str());
            let why = fault.or(socket.cause.as_deref());
            Ok(text(
                why.or(waits_for.map(ConnectWait::why)).unwrap_or_default(),
            ))
        }
        SO_HOSTKEY => {
            let key = engine::get()?.request(|home, reply| {
                let _ = reply.send(home.key().map(|key| key.public().to_string()));
            })?;
            let key = key.map_err(|fault: SocketFault| Errno(fault.errno))?;
            Ok(text(&key))
        }
        name => SocketOptions::get(&socket.options, name),
    }
}

fn text(words: &str) -> Vec<u8> {
    let mut bytes = words.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

fn info(socket: &SocketEntry) -> CallResult<D2tpInfo> {
    let last = |conn_status: &ConnectionStatus| {
        conn_status
            .last
            .get()
            .copied()
            .unwrap_or_else(D2tpInfo::over)
    };
    let Some(conn_status) = socket.status.clone().filter(|_| socket.is_ours()) else {
        return Ok(D2tpInfo::idle());
    };
    let options = socket.options.clone();
    engine::get()?.request(move |home, reply| {
        let home = home.clone();
        tokio::task::spawn_local(async move {
            let handed = home
                .agent_connections
                .borrow()
                .get(&conn_status.serial)
                .cloned();
            let info = match handed {
                Some(handed) => match handed.info().await.and_then(|reply| reply.info) {
                    Some(info) => *info,
                    None => last(&conn_status),
                },
                None => match home.flows.borrow().get(&conn_status.serial) {
                    Some(held) => info_of(held),
                    None if conn_status.is_over() => last(&conn_status),
                    None => D2tpInfo::opening(ConnectWait::Answer),
                },
            };
            let waits = match info.waits_for() {
                // An agent has less information about it.
                Some(_) => D2tpInfo::opening(home.waits_for(&options).await),
                None => info,
            };
            let _ = reply.send(waits);
        });
    })
}

/// fcntl(2)
///
/// # Safety
/// The same as that of the kernel's call.
// In C the function has any number of arguments. On the supported platforms, a third argument of
// integer or pointer type is passed like this one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: guaranteed by the caller.
    answer(|| check(unsafe { libc::fcntl(fd, command, argument) }))
}
