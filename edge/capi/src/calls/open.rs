//! Creating, connecting and closing sockets.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::{c_int, c_void, sockaddr, socklen_t};

use super::answer;
use crate::address::{AF_D2TP, SocketName};
use crate::agent_client;
use crate::agent_delegation::{self, ReopenedConnection};
use crate::agent_message::ReopenOptions;
use crate::connect;
use crate::connect_call::{ConnectCall, servers_of};
use crate::connection_status::ConnectionStatus;
use crate::datagrams::{self, ProgramDatagrams};
use crate::engine;
use crate::engine_handle;
use crate::errno::{CallResult, Errno, check};
use crate::kernel::socket_option;
use crate::listen;
use crate::listen_address::ProgramListener;
use crate::memory;
use crate::options::{PersistMode, SocketOptions};
use crate::pair;
use crate::reopen_token::{ReopenToken, TOKEN_BYTES};
use crate::table::{self, SocketEntry};

const TYPE_FLAGS: c_int = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

/// Creates a socket over D2TP: AF_INET, AF_INET6 or AF_D2TP, each of which accepts addresses of all
/// three families; SOCK_STREAM or SOCK_DGRAM, with SOCK_NONBLOCK and SOCK_CLOEXEC.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    answer(|| {
        let domain = match domain {
            libc::AF_INET | libc::AF_INET6 => domain,
            // As `d2tp_getaddrinfo` answers for a name.
            AF_D2TP => libc::AF_INET6,
            _ => return Err(Errno(libc::EAFNOSUPPORT)),
        };
        let is_datagram = match (kind & !TYPE_FLAGS, protocol) {
            (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => false,
            (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => true,
            _ => return Err(Errno(libc::EPROTONOSUPPORT)),
        };
        // Later calls need its port, and a failure is best reported here.
        let engine = engine::get()?;
        let mut socket = SocketEntry::new(domain);
        let fd = if is_datagram {
            let ports = engine.request(|home, reply| {
                let _ = reply.send(datagrams::ports(home));
            })??;
            let (fd, grams) = datagrams::program_socket(kind & TYPE_FLAGS, ports)?;
            socket.datagrams = Some(Arc::new(grams));
            fd
        } else {
            pair::program_socket(kind & TYPE_FLAGS)?
        };
        table::insert(table::cookie(fd)?, socket);
        Ok(fd)
    })
}

/// The socket, if this process's engine carries it.
fn ours(fd: RawFd) -> CallResult<Option<(u64, SocketEntry)>> {
    match table::find(fd)? {
        Some((_, socket)) if !socket.is_ours() => Err(Errno(libc::EOPNOTSUPP)),
        known => Ok(known),
    }
}

/// Binds the socket to a UDP address for listening.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    answer(|| {
        let Some((cookie, socket)) = ours(fd)? else {
            // SAFETY: the kernel checks the pointers.
            return check(unsafe { libc::bind(fd, address, len) });
        };
        let SocketName::Ip(place) = SocketName::read(address.cast::<c_void>(), len, socket.domain)?
        else {
            return Err(Errno(libc::EAFNOSUPPORT));
        };
        if socket.domain == libc::AF_INET6 && place.is_ipv4() {
            return Err(Errno(libc::EINVAL));
        }
        if socket.bound.is_some() || socket.status.is_some() {
            return Err(Errno(libc::EINVAL));
        }
        match socket.datagrams {
            Some(grams) => bind_datagrams(cookie, grams, place, socket.options),
            None => bind_to(fd, cookie, place),
        }
    })
}

/// Makes a datagram socket a server as soon as it is bound: there is no `listen`.
fn bind_datagrams(
    cookie: u64,
    grams: Arc<ProgramDatagrams>,
    place: SocketAddr,
    options: SocketOptions,
) -> CallResult<c_int> {
    let port = grams.port;
    let bound = engine::get()?.request(move |home, reply| {
        let home = home.clone();
        tokio::task::spawn_local(async move {
            let _ = reply.send(datagrams::bind(&home, &grams, place, options).await);
        });
    })??;
    table::change(cookie, |socket| {
        socket.bound = Some(port);
        socket.local = Some(SocketName::Ip(bound));
    });
    Ok(0)
}

/// Connects a datagram socket and returns at once. Datagrams wait for the session until they
/// expire.
fn connect_datagrams(
    fd: RawFd,
    cookie: u64,
    socket: SocketEntry,
    grams: Arc<ProgramDatagrams>,
    to: SocketName,
) -> CallResult<c_int> {
    let engine = engine::get()?;
    let port = grams.port;
    if socket.bound.is_some() {
        engine.request(move |home, reply| {
            let home = home.clone();
            tokio::task::spawn_local(async move {
                datagrams::unbind(&home, port).await;
                let _ = reply.send(());
            });
        })?;
    }
    let conn_status = ConnectionStatus::new();
    let call = datagrams::DatagramCall {
        socket: grams.clone(),
        connect: ConnectCall {
            fd,
            cookie,
            from: port,
            to: to.clone(),
            options: socket.options,
            conn_status: conn_status.clone(),
            keep: None,
        },
    };
    let name = engine.request(move |home, reply| {
        let _ = reply.send(datagrams::connect(home, call));
    })??;
    let place = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: grams.ports.plain.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from(name).to_be(),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: the pointer is to a complete sockaddr_in.
    check(unsafe {
        libc::connect(
            fd,
            (&raw const place).cast(),
            size_of::<libc::sockaddr_in>() as socklen_t,
        )
    })?;
    grams.set_to(name);
    table::change(cookie, |socket| {
        socket.status = Some(conn_status);
        socket.peer = Some(to);
        socket.bound = None;
        socket.cause = None;
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        socket.local = Some(SocketName::Ip(any));
    });
    Ok(0)
}

fn bind_to(fd: RawFd, cookie: u64, place: SocketAddr) -> CallResult<c_int> {
    let port = match pair::local_port(fd)? {
        // The kernel binds a socket once; an earlier attempt may have done that.
        0 => pair::bind_program(fd)?,
        port => port,
    };
    let bound = engine::get()?.request(move |home, reply| {
        let home = home.clone();
        tokio::task::spawn_local(async move {
            let _ = reply.send(home.listeners.bind(cookie, port, place).await);
        });
    })??;
    table::change(cookie, |socket| {
        socket.bound = Some(port);
        socket.local = Some(SocketName::Ip(bound));
    });
    Ok(0)
}

/// Listens for connections at the socket's address.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_listen(fd: c_int, backlog: c_int) -> c_int {
    answer(|| {
        let Some((cookie, socket)) = ours(fd)? else {
            // SAFETY: the arguments are plain numbers.
            return check(unsafe { libc::listen(fd, backlog) });
        };
        if socket.datagrams.is_some() {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        if socket.status.is_some() {
            return Err(Errno(libc::EINVAL));
        }
        if socket.listens {
            // SAFETY: the arguments are plain numbers.
            return check(unsafe { libc::listen(fd, backlog) });
        }
        if socket.bound.is_none() {
            let any = match socket.domain {
                libc::AF_INET6 => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
                _ => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            };
            bind_to(fd, cookie, any)?;
        }
        let engine = engine::get()?;
        // Before it listens, so that no other process can connect to it.
        pair::guard_listener(fd, engine.port)?;
        // SAFETY: the arguments are plain numbers.
        check(unsafe { libc::listen(fd, backlog) })?;
        let socket = table::change(cookie, |socket| socket.clone()).ok_or(Errno(libc::EBADF))?;
        let address = socket.local.as_ref().and_then(local_address);
        let address = address.ok_or(Errno(libc::EINVAL))?;
        let listener = ProgramListener {
            cookie,
            port: pair::local_port(fd)?,
            domain: socket.domain,
            options: socket.options,
        };
        engine.request(move |home, reply| {
            let home = home.clone();
            tokio::task::spawn_local(async move {
                let _ = reply.send(listen::listen(&home, address, listener).await);
            });
        })??;
        table::change(cookie, |socket| socket.listens = true);
        Ok(0)
    })
}

fn local_address(name: &SocketName) -> Option<SocketAddr> {
    match name {
        SocketName::Ip(address) => Some(*address),
        SocketName::Host { .. } => None,
    }
}

/// Accepts a connection.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_accept(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { d2tp_accept4(fd, address, len, 0) }
}

/// Accepts a connection, with SOCK_NONBLOCK and SOCK_CLOEXEC in `flags`.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_accept4(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    answer(|| {
        let Some((_, listener)) = table::find(fd)? else {
            // SAFETY: the kernel checks the pointers.
            return check(unsafe { libc::accept4(fd, address, len, flags) });
        };
        // SAFETY: sockaddr_in is plain numbers.
        let mut from: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        let mut from_len = size_of::<libc::sockaddr_in>() as socklen_t;
        // SAFETY: the buffer has the length that is passed.
        let new =
            check(unsafe { libc::accept4(fd, (&raw mut from).cast(), &mut from_len, flags) })?;
        let name = Ipv4Addr::from(u32::from_be(from.sin_addr.s_addr));
        // In a child of the listener's process flows are not announced, so the peer is unknown
        // there.
        let socket = table::arrive(name).unwrap_or(SocketEntry {
            pid: listener.pid,
            local: listener.local.clone(),
            ..SocketEntry::new(listener.domain)
        });
        let peer = socket.peer.clone();
        let reported = table::cookie(new).and_then(|cookie| {
            table::insert(cookie, socket);
            if address.is_null() {
                return Ok(());
            }
            let unknown = SocketName::Ip((Ipv4Addr::UNSPECIFIED, 0).into());
            let bytes = peer.unwrap_or(unknown).to_bytes(listener.domain);
            memory::answer(&bytes, address.cast(), len, bytes.len())
        });
        reported.inspect_err(|_| {
            // SAFETY: just created, and nothing else uses it.
            unsafe { libc::close(new) };
        })?;
        Ok(new)
    })
}

/// Connects to a D2TP server if its key is known (sockaddr_d2tp, D2TP_SO_PEERKEY), else to any host
/// and port through the proxy.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_connect(
    fd: c_int,
    address: *const sockaddr,
    len: socklen_t,
) -> c_int {
    answer(|| {
        let Some((cookie, socket)) = ours(fd)? else {
            // SAFETY: the kernel checks the pointers.
            return check(unsafe { libc::connect(fd, address, len) });
        };
        let to = SocketName::read(address.cast::<c_void>(), len, socket.domain)?;
        if let Some(errno) = table::take_refusal(&socket) {
            // The kernel's error is reported together with the connection's.
            let _ = pair::take_error(fd);
            return Err(errno);
        }
        table::change(cookie, |socket| socket.cause = None);
        // Permanent errors are reported before the kernel's socket has begun to connect.
        let leads = servers_of(&to, &socket.options).and_then(|(_, through_proxy)| {
            match through_proxy && socket.datagrams.is_some() {
                true => Err(datagrams::no_proxy()),
                false => Ok(()),
            }
        });
        if let Err(fault) = leads {
            table::change(cookie, |socket| socket.cause = Some(fault.text));
            return Err(Errno(fault.errno));
        }
        if let Some(grams) = socket.datagrams.clone() {
            return connect_datagrams(fd, cookie, socket, grams, to);
        }
        let engine = engine::get()?;
        let keep = keep(fd, cookie, &socket)?;
        let blocks = !is_nonblocking(fd)?;
        match begin(fd, engine.port, blocks) {
            Err(Errno(libc::EINPROGRESS)) => {}
            // An earlier call that was interrupted has begun to connect.
            Err(Errno(libc::EALREADY)) if blocks => return until_made(fd, engine.port, blocks),
            other => return other,
        }
        let conn_status = ConnectionStatus::new();
        let from = pair::local_port(fd)?;
        let options = table::change(cookie, |socket| {
            socket.status = Some(conn_status.clone());
            socket.peer = Some(to.clone());
            socket.token = keep.as_ref().map(|keep| keep.token);
            let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, from));
            socket.local.get_or_insert(SocketName::Ip(any));
            socket.options.clone()
        });
        let call = ConnectCall {
            cookie,
            fd,
            from,
            to,
            options: options.ok_or(Errno(libc::EBADF))?,
            conn_status,
            keep,
        };
        engine.post(|home| {
            tokio::task::spawn_local(connect::run(home.clone(), call));
        });
        match blocks {
            true => until_made(fd, engine.port, blocks),
            false => Err(Errno(libc::EINPROGRESS)),
        }
    })
}

/// Leaves the descriptor with the agent if its connection can be opened again.
fn keep(fd: RawFd, cookie: u64, socket: &SocketEntry) -> CallResult<Option<ReopenOptions>> {
    let begins = socket
        .status
        .as_ref()
        .is_none_or(|conn_status| conn_status.is_over());
    if socket.options.persist != PersistMode::Open || !begins {
        return Ok(None);
    }
    let token = agent_client::deposit_descriptor(fd).map_err(|fault| {
        table::change(cookie, |socket| socket.cause = Some(fault.text));
        Errno(fault.errno)
    })?;
    Ok(Some(ReopenOptions {
        token,
        ipv6: socket.domain == libc::AF_INET6,
    }))
}

/// Opens a connection again that has D2TP_PERSIST_OPEN and whose process has ended. Reading
/// continues with the first byte that it had not read. ENOENT: there is none with this token;
/// EBUSY: its process exists. flags: SOCK_NONBLOCK, SOCK_CLOEXEC.
///
/// # Safety
/// The same as that of the kernel's calls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_reopen(token: *const c_void, len: socklen_t, flags: c_int) -> c_int {
    answer(|| {
        if len as usize != TOKEN_BYTES || flags & !TYPE_FLAGS != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let bytes = memory::read(token, TOKEN_BYTES)?;
        let token = ReopenToken(bytes.try_into().map_err(|_| Errno(libc::EFAULT))?);
        let engine = engine::get()?;
        let conn_status = ConnectionStatus::new();
        let its = conn_status.clone();
        let reopened = engine.request(move |home, reply| {
            let home = home.clone();
            tokio::task::spawn_local(async move {
                let _ = reply.send(agent_delegation::reopen(&home, token, &its).await);
            });
        })?;
        let reopened = reopened.map_err(|fault| Errno(fault.errno))?;
        let serial = conn_status.serial;
        let known = take_up(token, reopened, conn_status, flags);
        if known.is_err() {
            engine.post(move |home| {
                if let Some(handed) = home.agent_connections.borrow().get(&serial) {
                    handed.abandon();
                }
            });
        }
        known
    })
}

fn take_up(
    token: ReopenToken,
    reopened: ReopenedConnection,
    conn_status: Arc<ConnectionStatus>,
    flags: c_int,
) -> CallResult<c_int> {
    let fd = agent_client::fetch_descriptor(token).map_err(|fault| Errno(fault.errno))?;
    if flags & libc::SOCK_CLOEXEC == 0 {
        // SAFETY: the arguments are plain numbers.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0) })?;
    }
    // SAFETY: the arguments are plain numbers.
    let status = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    let status = match flags & libc::SOCK_NONBLOCK {
        0 => status & !libc::O_NONBLOCK,
        _ => status | libc::O_NONBLOCK,
    };
    // SAFETY: the arguments are plain numbers.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, status) })?;
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, pair::local_port(fd.as_raw_fd())?));
    let domain = match reopened.ipv6 {
        true => libc::AF_INET6,
        false => libc::AF_INET,
    };
    let socket = SocketEntry {
        options: reopened.options,
        peer: SocketName::from_agent_call(&reopened.server, reopened.target.as_deref()),
        local: Some(SocketName::Ip(any)),
        status: Some(conn_status),
        token: Some(token),
        ..SocketEntry::new(domain)
    };
    table::insert(table::cookie(fd.as_raw_fd())?, socket);
    Ok(fd.into_raw_fd())
}

fn is_nonblocking(fd: RawFd) -> CallResult<bool> {
    // SAFETY: the arguments are plain numbers.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    Ok(flags & libc::O_NONBLOCK != 0)
}

/// Calls the kernel's `connect` to the engine's port, which never blocks.
fn begin(fd: RawFd, port: u16, blocks: bool) -> CallResult<c_int> {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from(Ipv4Addr::LOCALHOST).to_be(),
        },
        sin_zero: [0; 8],
    };
    // Non-blocking during this call only; other calls that wait on the unconnected socket are not
    // affected.
    let switch = |on: bool| {
        if blocks {
            // SAFETY: the arguments are plain numbers.
            unsafe {
                let flags = libc::fcntl(fd, libc::F_GETFL);
                let changed = match on {
                    true => flags | libc::O_NONBLOCK,
                    false => flags & !libc::O_NONBLOCK,
                };
                libc::fcntl(fd, libc::F_SETFL, changed);
            }
        }
    };
    switch(true);
    // SAFETY: the pointer is to a complete sockaddr_in.
    let begun = check(unsafe {
        libc::connect(
            fd,
            (&raw const address).cast(),
            size_of::<libc::sockaddr_in>() as socklen_t,
        )
    });
    switch(false);
    begun.map_err(|errno| table::translate(fd, errno))
}

/// Waits like a blocking `connect`: at most for SO_SNDTIMEO.
fn until_made(fd: RawFd, port: u16, blocks: bool) -> CallResult<c_int> {
    let until = send_timeout(fd).map(|timeout| Instant::now() + timeout);
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        // Rounded up, so that it does not wake too early.
        let left_ms = left.map_or(-1, |left| left.as_millis().min(1 << 30) as c_int + 1);
        // SAFETY: one pollfd.
        let ready = check(unsafe { libc::poll(&mut poll, 1, left_ms) })?;
        if ready > 0 {
            break;
        }
        if left.is_some_and(|left| left.is_zero()) {
            // The kernel's error in this case (socket(7)).
            return Err(Errno(libc::EINPROGRESS));
        }
    }
    match table::translate(fd, Errno(pair::take_error(fd)?)) {
        Errno(0) => {}
        errno => return Err(errno),
    }
    // The kernel's socket records that the program was informed.
    match begin(fd, port, blocks) {
        Ok(_) | Err(Errno(libc::EISCONN)) => Ok(0),
        other => other,
    }
}

fn send_timeout(fd: RawFd) -> Option<Duration> {
    let time: libc::timeval = socket_option(fd, libc::SO_SNDTIMEO).ok()?;
    let timeout =
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64);
    (!timeout.is_zero()).then_some(timeout)
}

/// Ends one direction of a connection or both.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_shutdown(fd: c_int, how: c_int) -> c_int {
    // SAFETY: the arguments are plain numbers.
    answer(|| check(unsafe { libc::shutdown(fd, how) }))
}

/// Tells the agent not to keep the connection open.
fn release(socket: &SocketEntry) -> CallResult<()> {
    let Some(serial) = socket.status.as_ref().map(|conn_status| conn_status.serial) else {
        return Ok(());
    };
    engine::get()?.request(move |home, reply| {
        let handed = home.agent_connections.borrow().get(&serial).cloned();
        tokio::task::spawn_local(async move {
            if let Some(handed) = handed {
                handed.release().await;
            }
            let _ = reply.send(());
        });
    })
}

/// Closes the descriptor. With SO_LINGER it first waits until the peer has received all written
/// data.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_close(fd: c_int) -> c_int {
    answer(|| {
        let known = table::find(fd).ok().flatten();
        if let Some((_, socket)) = &known
            && socket.is_ours()
            && socket.datagrams.is_none()
            && let Some(conn_status) = &socket.status
            && let Some(linger) = linger(fd)
        {
            // When the time is over or the peer has all data, the socket is closed, as the kernel
            // does it.
            let _ = super::transfer::flush(fd, conn_status, Some(linger));
        }
        if let Some((_, socket)) = &known
            && socket.is_ours()
            && socket.token.is_some()
        {
            release(socket)?;
        }
        // SAFETY: the caller gives up the descriptor.
        let closed = check(unsafe { libc::close(fd) });
        if let Some((cookie, socket)) = known {
            table::forget(cookie);
            if let Some(grams) = &socket.datagrams {
                if socket.is_ours()
                    && let Some(engine) = engine_handle::running()
                {
                    let port = grams.port;
                    engine.request(move |home, reply| {
                        let home = home.clone();
                        tokio::task::spawn_local(async move {
                            datagrams::on_close(&home, port).await;
                            let _ = reply.send(());
                        });
                    })?;
                }
            } else if socket.bound.is_some()
                && socket.is_ours()
                && let Some(engine) = engine_handle::running()
            {
                // When this returns, the address can be bound again.
                engine.request(move |home, reply| {
                    let home = home.clone();
                    tokio::task::spawn_local(async move {
                        home.listeners.on_close(cookie).await;
                        let _ = reply.send(());
                    });
                })?;
            }
        }
        closed
    })
}

fn linger(fd: RawFd) -> Option<Duration> {
    let linger: libc::linger = socket_option(fd, libc::SO_LINGER).ok()?;
    let lingers = linger.l_onoff != 0 && linger.l_linger > 0;
    lingers.then(|| Duration::from_secs(linger.l_linger as u64))
}
