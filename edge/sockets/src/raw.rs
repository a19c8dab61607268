//! The calls of the C library, with Rust's types. All `unsafe` is here.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use d2tp::SOL_D2TP;
pub(crate) use d2tp::{
    SO_BUDGET, SO_DEADLINE, SO_ERROR, SO_ESIZE, SO_HOSTKEY, SO_IFLATE, SO_PERSIST, SO_POLICY,
    SO_PRIORITY, SO_PROXY, SO_RCVBUFTH,
};
use libc::{c_int, c_void, socklen_t};

/// Why a connection was not made or broke, in words (`D2TP_SO_ERROR`); inside of an [`io::Error`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The number that C programs get.
    pub errno: i32,
    /// In words.
    pub words: String,
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.words)
    }
}

impl std::error::Error for Cause {}

/// What a call said, with its cause where the library knows one.
pub(crate) fn error(fd: &impl AsFd, said: io::Error) -> io::Error {
    let errno = said.raw_os_error();
    let words = match errno {
        Some(libc::EAGAIN | libc::EINTR | libc::EINPROGRESS) | None => return said,
        Some(_) => text(fd, SO_ERROR).unwrap_or_default(),
    };
    match (errno, words.is_empty()) {
        (Some(errno), false) => io::Error::new(said.kind(), Cause { errno, words }),
        _ => said,
    }
}

fn check(result: c_int) -> io::Result<c_int> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        fine => Ok(fine),
    }
}

fn counted(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

pub(crate) fn is_ipv6(address: &str) -> bool {
    address.parse::<SocketAddr>().is_ok_and(|a| a.is_ipv6())
}

pub(crate) fn socket(ipv6: bool, flags: c_int) -> io::Result<OwnedFd> {
    d2tp::share_descriptors();
    let domain = if ipv6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags;
    let fd = check(d2tp::d2tp_socket(domain, kind, 0))?;
    // SAFETY: just made, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn set(fd: &OwnedFd, name: c_int, value: &[u8]) -> io::Result<()> {
    // SAFETY: the value has the length that is said.
    check(unsafe {
        d2tp::d2tp_setsockopt(
            fd.as_raw_fd(),
            SOL_D2TP,
            name,
            value.as_ptr().cast(),
            value.len() as socklen_t,
        )
    })
    .map(drop)
}

fn get<const N: usize>(fd: &impl AsFd, level: c_int, name: c_int) -> io::Result<([u8; N], usize)> {
    let mut value = [0u8; N];
    let mut len = N as socklen_t;
    // SAFETY: the place has the length that is said.
    check(unsafe {
        d2tp::d2tp_getsockopt(
            fd.as_fd().as_raw_fd(),
            level,
            name,
            value.as_mut_ptr().cast(),
            &mut len,
        )
    })?;
    Ok((value, len as usize))
}

/// An option that is text.
pub(crate) fn text(fd: &impl AsFd, name: c_int) -> io::Result<String> {
    let (bytes, len) = get::<512>(fd, SOL_D2TP, name)?;
    let words = bytes[..len].split(|byte| *byte == 0).next();
    Ok(String::from_utf8_lossy(words.unwrap_or_default()).into_owned())
}

/// Why an attempt to connect failed, if it did.
pub(crate) fn pending(fd: &impl AsFd) -> io::Result<()> {
    let (bytes, _) = get::<4>(fd, libc::SOL_SOCKET, libc::SO_ERROR)?;
    match i32::from_ne_bytes(bytes) {
        0 => Ok(()),
        errno => Err(error(fd, io::Error::from_raw_os_error(errno))),
    }
}

/// Where `address` leads, as the library finds it.
pub(crate) fn connect(fd: &OwnedFd, address: &str) -> io::Result<()> {
    let (host, port) = match address.starts_with("d2tp://") {
        true => (address, None),
        false => {
            let (host, port) = address
                .rsplit_once(':')
                .ok_or(io::ErrorKind::InvalidInput)?;
            let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
            let bare = address.rsplit_once(':').map_or("", |(bare, _)| bare);
            (host.unwrap_or(bare), Some(CString::new(port)?))
        }
    };
    let host = CString::new(host)?;
    let service = port.as_ref().map_or(ptr::null(), |port| port.as_ptr());
    let mut found = ptr::null_mut();
    // SAFETY: C strings, no hints, a place for the answer.
    let why = unsafe { d2tp::d2tp_getaddrinfo(host.as_ptr(), service, ptr::null(), &mut found) };
    match why {
        0 => {}
        libc::EAI_SYSTEM => return Err(io::Error::last_os_error()),
        _ => {
            let words = format!("{address} is neither d2tp://host:port/KEY nor host:port");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, words));
        }
    }
    // SAFETY: what was found is there until it is given back, once.
    unsafe {
        let said = d2tp::d2tp_connect(fd.as_raw_fd(), (*found).ai_addr, (*found).ai_addrlen);
        let said = check(said).map(drop);
        d2tp::d2tp_freeaddrinfo(found);
        said
    }
}

/// An address as C has it.
struct Place(libc::sockaddr_storage, socklen_t);

impl Place {
    fn of(address: SocketAddr) -> Place {
        // SAFETY: plain numbers.
        let mut place: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let to: *mut libc::sockaddr_storage = &mut place;
        let len = match address {
            SocketAddr::V4(v4) => {
                // SAFETY: a storage has room for each, and is aligned for each.
                let to = unsafe { &mut *to.cast::<libc::sockaddr_in>() };
                to.sin_family = libc::AF_INET as libc::sa_family_t;
                to.sin_port = v4.port().to_be();
                to.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                // SAFETY: as above.
                let to = unsafe { &mut *to.cast::<libc::sockaddr_in6>() };
                to.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                to.sin6_port = v6.port().to_be();
                to.sin6_addr.s6_addr = v6.ip().octets();
                to.sin6_scope_id = v6.scope_id();
                size_of::<libc::sockaddr_in6>()
            }
        };
        Place(place, len as socklen_t)
    }

    fn read(&self) -> io::Result<SocketAddr> {
        let from: *const libc::sockaddr_storage = &self.0;
        match c_int::from(self.0.ss_family) {
            libc::AF_INET => {
                // SAFETY: its family says that it is one.
                let v4 = unsafe { &*from.cast::<libc::sockaddr_in>() };
                let ip = IpAddr::V4(u32::from_be(v4.sin_addr.s_addr).into());
                Ok((ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let v6 = unsafe { &*from.cast::<libc::sockaddr_in6>() };
                let ip = IpAddr::V6(v6.sin6_addr.s6_addr.into());
                Ok((ip, u16::from_be(v6.sin6_port)).into())
            }
            _ => Err(io::ErrorKind::AddrNotAvailable.into()),
        }
    }
}

fn ask(
    fd: &impl AsFd,
    call: unsafe extern "C" fn(c_int, *mut libc::sockaddr, *mut socklen_t) -> c_int,
) -> io::Result<(c_int, SocketAddr)> {
    // SAFETY: plain numbers.
    let mut place = Place(unsafe { std::mem::zeroed() }, 0);
    place.1 = size_of::<libc::sockaddr_storage>() as socklen_t;
    // SAFETY: the place has the length that is said.
    let said = check(unsafe {
        call(
            fd.as_fd().as_raw_fd(),
            (&raw mut place.0).cast(),
            &mut place.1,
        )
    })?;
    Ok((said, place.read()?))
}

pub(crate) fn listen(fd: &OwnedFd, at: SocketAddr, backlog: c_int) -> io::Result<()> {
    let place = Place::of(at);
    // SAFETY: the address has the length that is said.
    check(unsafe { d2tp::d2tp_bind(fd.as_raw_fd(), (&raw const place.0).cast(), place.1) })?;
    check(d2tp::d2tp_listen(fd.as_raw_fd(), backlog)).map(drop)
}

pub(crate) fn local(fd: &impl AsFd) -> io::Result<SocketAddr> {
    Ok(ask(fd, d2tp::d2tp_getsockname)?.1)
}

pub(crate) fn peer(fd: &impl AsFd) -> io::Result<SocketAddr> {
    Ok(ask(fd, d2tp::d2tp_getpeername)?.1)
}

pub(crate) fn accept(fd: &impl AsFd, nonblocking: bool) -> io::Result<(OwnedFd, SocketAddr)> {
    let call = match nonblocking {
        true => accept_at_once,
        false => accept_blocking,
    };
    let (new, from) = ask(fd, call)?;
    // SAFETY: just made, and nobody else has it.
    Ok((unsafe { OwnedFd::from_raw_fd(new) }, from))
}

unsafe extern "C" fn accept_at_once(
    fd: c_int,
    address: *mut libc::sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: as for the caller.
    unsafe { d2tp::d2tp_accept4(fd, address, len, flags) }
}

unsafe extern "C" fn accept_blocking(
    fd: c_int,
    address: *mut libc::sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: as for the caller.
    unsafe { d2tp::d2tp_accept4(fd, address, len, libc::SOCK_CLOEXEC) }
}

pub(crate) fn recv(fd: BorrowedFd<'_>, into: &mut [MaybeUninit<u8>]) -> io::Result<usize> {
    // SAFETY: the place has the length that is said.
    counted(unsafe {
        d2tp::d2tp_recv(
            fd.as_raw_fd(),
            into.as_mut_ptr().cast::<c_void>(),
            into.len(),
            0,
        )
    })
    .map_err(|said| error(&fd, said))
}

pub(crate) fn send(fd: BorrowedFd<'_>, from: &[u8]) -> io::Result<usize> {
    // SAFETY: the bytes are there.
    counted(unsafe { d2tp::d2tp_send(fd.as_raw_fd(), from.as_ptr().cast(), from.len(), 0) })
        .map_err(|said| error(&fd, said))
}

pub(crate) fn shutdown(fd: &impl AsFd, how: c_int) -> io::Result<()> {
    check(d2tp::d2tp_shutdown(fd.as_fd().as_raw_fd(), how)).map(drop)
}

/// Waits until the peer has everything.
pub(crate) fn flush(fd: &impl AsFd, timeout_ms: c_int) -> io::Result<()> {
    let flushed = check(d2tp::d2tp_flush(fd.as_fd().as_raw_fd(), timeout_ms));
    flushed.map(drop).map_err(|said| error(fd, said))
}
