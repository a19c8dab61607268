//! Who is at either end, and how names become addresses.

use std::ffi::CString;
use std::net::IpAddr;
use std::ptr;

use d2tp_driver::ServerAddress;
use libc::{addrinfo, c_char, c_int, c_void, sockaddr, socklen_t};

use super::answer;
use crate::address::{AF_D2TP, HOST_BYTES_MAX, SocketName};
use crate::engine;
use crate::errno::{CallResult, Errno, check};
use crate::{flow_info, memory, table};

/// Where the socket is: the UDP address that it was bound to. One that only connected has no address of
/// its own, for it moves; the port then tells sockets of one process apart.
///
/// # Safety
/// As for the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_getsockname(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    answer(|| {
        let Some((_, socket)) = table::find(fd)? else {
            // SAFETY: the kernel checks.
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

/// Who is at the far end: as `connect` named it, or where the device of an accepted flow is now.
///
/// # Safety
/// As for the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_getpeername(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    answer(|| {
        let Some((_, socket)) = table::find(fd)? else {
            // SAFETY: the kernel checks.
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
    // SAFETY: the place has the length that is said.
    check(unsafe { libc::getpeername(fd, (&raw mut pair).cast(), &mut len) })?;
    Ok(())
}

/// Where an accepted flow's device is.
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

/// getaddrinfo(3) for D2TP: `d2tp://host:port/KEY`, a numeric address, or a name, which is not looked up
/// here but by the proxy.
///
/// # Safety
/// `hints` is null or an addrinfo, `found` a place for a pointer.
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
    // SAFETY: room for both, which `d2tp_freeaddrinfo` gives back as one.
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
        let ServerAddress { host, port, key } = server;
        return named(host, port, Some(key));
    }
    let port = port.unwrap_or(0);
    match node.parse::<IpAddr>() {
        Ok(ip) => Ok(SocketName::Ip((ip, port).into())),
        Err(_) if flags & libc::AI_NUMERICHOST != 0 => Err(libc::EAI_NONAME),
        Err(_) => named(node, port, None),
    }
}

/// Longer is no name and no address of ours.
const TEXT_BYTES_MAX: usize = 255;

fn named(
    host: String,
    port: u16,
    key: Option<d2tp_driver::PublicKey>,
) -> Result<SocketName, c_int> {
    if host.is_empty() || host.len() > HOST_BYTES_MAX || host.contains(['/', ' ', '\r', '\n']) {
        return Err(libc::EAI_NONAME);
    }
    Ok(SocketName::Host { host, port, key })
}

fn port_of(service: &str) -> Result<u16, c_int> {
    if let Ok(port) = service.parse() {
        return Ok(port);
    }
    let name = CString::new(service).map_err(|_| libc::EAI_SERVICE)?;
    // SAFETY: a C string; the answer is copied before anybody may ask again in this thread. Other
    // threads that ask at this moment may disturb it, as getservbyname(3) says.
    unsafe {
        let entry = libc::getservbyname(name.as_ptr(), c"tcp".as_ptr());
        if entry.is_null() {
            return Err(libc::EAI_SERVICE);
        }
        Ok(u16::from_be((*entry).s_port as u16))
    }
}

/// Gives back what `d2tp_getaddrinfo` found.
///
/// # Safety
/// `found` is null or from there, and not given back yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_freeaddrinfo(found: *mut addrinfo) {
    // SAFETY: as promised.
    unsafe { libc::free(found.cast()) };
}
