//! The addresses of both ends, and name resolution.

use std::ffi::CString;
use std::net::IpAddr;
use std::ptr;

use d2tp_driver::ServerAddress;
use libc::{addrinfo, c_char, c_int, c_void, sockaddr, socklen_t};

use super::answer;
use crate::address::{AF_D2TP, SocketName};
use crate::engine;
use crate::errno::{CallResult, Errno, check};
use crate::{flow_info, memory, table};

/// The socket's own address: the UDP address that it was bound to. A socket that only connected has
/// no address, because it moves; its port then distinguishes the sockets of a process.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_getsockname(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    answer(|| {
        let Some((_, socket)) = table::find(fd)? else {
            // SAFETY: the kernel checks the pointers.
            return check(unsafe { libc::getsockname(fd, address, len) });
        };
        let unbound = match socket.domain {
            libc::AF_INET6 => SocketName::Ip((std::net::Ipv6Addr::UNSPECIFIED, 0).into()),
            _ => SocketName::Ip((std::net::Ipv4Addr::UNSPECIFIED, 0).into()),
        };
        write_address(
            &socket.local.unwrap_or(unbound),
            socket.domain,
            address,
            len,
        )
    })
}

/// The address of the peer: as `connect` was given it, or the current one of an accepted
/// connection's device.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_getpeername(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    answer(|| {
        let Some((_, socket)) = table::find(fd)? else {
            // SAFETY: the kernel checks the pointers.
            return check(unsafe { libc::getpeername(fd, address, len) });
        };
        connected(fd)?;
        let mut peer = socket.peer.clone().ok_or(Errno(libc::EOPNOTSUPP))?;
        if socket.bound.is_none()
            && socket.is_ours()
            && let Some(conn_status) = &socket.status
            && let Some(moved) = now_at(conn_status.serial)?
        {
            peer = moved;
        }
        write_address(&peer, socket.domain, address, len)
    })
}

/// Whether the kernel's socket has a peer.
fn connected(fd: c_int) -> CallResult<()> {
    // SAFETY: sockaddr_in is plain numbers.
    let mut pair: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_in>() as socklen_t;
    // SAFETY: the buffer has the length that is passed.
    check(unsafe { libc::getpeername(fd, (&raw mut pair).cast(), &mut len) })?;
    Ok(())
}

/// The current address of an accepted flow's device.
fn now_at(serial: u64) -> CallResult<Option<SocketName>> {
    engine::get()?.request(move |home, reply| {
        let flows = home.flows.borrow();
        let held = flows.get(&serial).filter(|held| held.session.is_none());
        let _ = reply.send(
            held.and_then(|held| flow_info::far_end(held))
                .map(SocketName::Ip),
        );
    })
}

fn write_address(
    name: &SocketName,
    domain: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> CallResult<c_int> {
    let bytes = name.to_bytes(domain);
    memory::answer(&bytes, address.cast::<c_void>(), len, bytes.len())?;
    Ok(0)
}

/// getaddrinfo(3) for D2TP: `d2tp://host:port/KEY`, a numeric address, or a name, which is not
/// resolved here but by the proxy.
///
/// # Safety
/// `hints` is null or points to an addrinfo, `found` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const addrinfo,
    found: *mut *mut addrinfo,
) -> c_int {
    let looked = std::panic::catch_unwind(|| look_up(node, service, hints));
    let name = match looked.unwrap_or(Err(libc::EAI_FAIL)) {
        Ok(name) => name,
        Err(why) => return why,
    };
    let bytes = name.to_bytes(libc::AF_UNSPEC);
    let family = match &name {
        SocketName::Ip(address) if address.is_ipv6() => libc::AF_INET6,
        SocketName::Ip(_) => libc::AF_INET,
        SocketName::Host { .. } => AF_D2TP,
    };
    let size = size_of::<addrinfo>() + bytes.len();
    // SAFETY: one allocation with room for both, which `d2tp_freeaddrinfo` frees.
    unsafe {
        let info = libc::calloc(1, size).cast::<addrinfo>();
        if info.is_null() {
            return libc::EAI_MEMORY;
        }
        let address = info.add(1).cast::<u8>();
        ptr::copy_nonoverlapping(bytes.as_ptr(), address, bytes.len());
        (*info).ai_family = family;
        (*info).ai_socktype = libc::SOCK_STREAM;
        (*info).ai_addrlen = bytes.len() as socklen_t;
        (*info).ai_addr = address.cast();
        if memory::write(found.cast(), &(info as usize).to_ne_bytes()).is_err() {
            libc::free(info.cast());
            Errno(libc::EFAULT).set();
            return libc::EAI_SYSTEM;
        }
    }
    0
}

fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: *const addrinfo,
) -> Result<SocketName, c_int> {
    let system = |errno: Errno| {
        errno.set();
        libc::EAI_SYSTEM
    };
    let text = |from: *const c_char| match from.is_null() {
        true => Ok(None),
        false => memory::read_text(from, TEXT_BYTES_MAX)
            .map(Some)
            .map_err(system),
    };
    let (node, service) = (text(node)?, text(service)?);
    let flags = match hints.is_null() {
        true => 0,
        false => {
            let bytes = memory::read(hints.cast(), size_of::<c_int>()).map_err(system)?;
            c_int::from_ne_bytes(bytes.try_into().expect("four bytes"))
        }
    };
    let port = service.map(|service| port_of(&service)).transpose()?;
    let Some(node) = node else {
        let port = port.ok_or(libc::EAI_NONAME)?;
        let ip = match flags & libc::AI_PASSIVE != 0 {
            true => std::net::Ipv4Addr::UNSPECIFIED,
            false => std::net::Ipv4Addr::LOCALHOST,
        };
        return Ok(SocketName::Ip((ip, port).into()));
    };
    if node.starts_with("d2tp://") {
        let server: ServerAddress = node.parse().map_err(|_| libc::EAI_NONAME)?;
        return named(server.host, server.port, Some(server.key), server.stream);
    }
    let port = port.unwrap_or(0);
    match node.parse::<IpAddr>() {
        Ok(ip) => Ok(SocketName::Ip((ip, port).into())),
        Err(_) if flags & libc::AI_NUMERICHOST != 0 => Err(libc::EAI_NONAME),
        Err(_) => named(node, port, None, None),
    }
}

/// The longest host or service, in bytes; longer text is neither a name nor an address.
const TEXT_BYTES_MAX: usize = 255;

fn named(
    host: String,
    port: u16,
    key: Option<d2tp_driver::PublicKey>,
    stream: Option<u16>,
) -> Result<SocketName, c_int> {
    let name = SocketName::Host {
        host: host.clone(),
        port,
        key,
        stream,
    };
    if host.is_empty() || !name.fits() || host.contains(['/', ' ', '\r', '\n']) {
        return Err(libc::EAI_NONAME);
    }
    Ok(name)
}

fn port_of(service: &str) -> Result<u16, c_int> {
    if let Ok(port) = service.parse() {
        return Ok(port);
    }
    let name = CString::new(service).map_err(|_| libc::EAI_SERVICE)?;
    // SAFETY: a C string. The answer is copied before another call of this thread can change it;
    // other threads that call at the same time may disturb it, as getservbyname(3) says.
    unsafe {
        let entry = libc::getservbyname(name.as_ptr(), c"tcp".as_ptr());
        if entry.is_null() {
            return Err(libc::EAI_SERVICE);
        }
        Ok(u16::from_be((*entry).s_port as u16))
    }
}

/// Frees the result of `d2tp_getaddrinfo`.
///
/// # Safety
/// `found` is null or such a result that was not freed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_freeaddrinfo(found: *mut addrinfo) {
    // SAFETY: guaranteed by the caller.
    unsafe { libc::free(found.cast()) };
}
