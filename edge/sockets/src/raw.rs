//! The calls of the C library with Rust's types. All `unsafe` code for them is here.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use d2tp::SOL_D2TP;
pub(crate) use d2tp::{
    SO_BUDGET, SO_DEADLINE, SO_ERROR, SO_ESIZE, SO_EXPIRY, SO_HOSTKEY, SO_IFLATE, SO_INFO,
    SO_PERSIST, SO_POLICY, SO_PRIORITY, SO_PROXY, SO_RCVBUFTH, SO_ROUTE,
};
use libc::{c_int, c_void, socklen_t};

/// Why a connection was not established or broke, in words (`D2TP_SO_ERROR`); the inner error of an
/// [`io::Error`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionFault {
    /// The error number that C programs get.
    pub errno: i32,
    /// The cause in words.
    pub words: String,
}

impl std::fmt::Display for ConnectionFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.words)
    }
}

impl std::error::Error for ConnectionFault {}

/// The error of a call, with its cause if the library knows one.
pub(crate) fn error(fd: &(impl AsFd + ?Sized), said: io::Error) -> io::Error {
    let errno = said.raw_os_error();
    let words = match errno {
        Some(libc::EAGAIN | libc::EINTR | libc::EINPROGRESS) | None => return said,
        Some(_) => text(fd, SO_ERROR).unwrap_or_default(),
    };
    match (errno, words.is_empty()) {
        (Some(errno), false) => io::Error::new(said.kind(), ConnectionFault { errno, words }),
        _ => said,
    }
}

/// The error of a call, with this text.
pub(crate) fn fault(said: io::Error, words: String) -> io::Error {
    match said.raw_os_error() {
        Some(errno) => io::Error::new(said.kind(), ConnectionFault { errno, words }),
        None => said,
    }
}

/// The result of a wait.
pub(crate) enum WaitOutcome {
    /// The descriptor is ready for the requested events, or broke.
    Ready,
    /// The other descriptor is readable.
    GivenUp,
}

/// Waits until `fd` is ready for `events` of poll(2), or `give_up` is readable.
pub(crate) fn wait(
    fd: BorrowedFd<'_>,
    events: libc::c_short,
    give_up: BorrowedFd<'_>,
) -> io::Result<WaitOutcome> {
    let entry = |fd: BorrowedFd<'_>, events| libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    };
    let mut both = [entry(fd, events), entry(give_up, libc::POLLIN)];
    loop {
        // SAFETY: two entries.
        match check(unsafe { d2tp::d2tp_poll(both.as_mut_ptr(), 2, -1) }) {
            Err(said) if said.kind() == io::ErrorKind::Interrupted => {}
            Err(said) => return Err(said),
            Ok(_) if both[1].revents != 0 => return Ok(WaitOutcome::GivenUp),
            Ok(_) => return Ok(WaitOutcome::Ready),
        }
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

/// Creates a socket. `kind`: SOCK_STREAM or SOCK_DGRAM, and flags.
pub(crate) fn socket(ipv6: bool, kind: c_int) -> io::Result<OwnedFd> {
    d2tp::share_descriptors();
    let domain = if ipv6 { libc::AF_INET6 } else { libc::AF_INET };
    let fd = check(d2tp::d2tp_socket(domain, kind | libc::SOCK_CLOEXEC, 0))?;
    // SAFETY: just created, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn set(fd: &(impl AsFd + ?Sized), name: c_int, value: &[u8]) -> io::Result<()> {
    set_at(fd, SOL_D2TP, name, value)
}

fn set_at(fd: &(impl AsFd + ?Sized), level: c_int, name: c_int, value: &[u8]) -> io::Result<()> {
    // SAFETY: the value has the length that is passed.
    check(unsafe {
        d2tp::d2tp_setsockopt(
            fd.as_fd().as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            value.len() as socklen_t,
        )
    })
    .map(drop)
}

/// Sets how long a reading call waits.
pub(crate) fn set_read_timeout(fd: &impl AsFd, within: Option<Duration>) -> io::Result<()> {
    let time = libc::timeval {
        tv_sec: within.map_or(0, |w| w.as_secs().min(i64::MAX as u64)) as libc::time_t,
        // Zero seconds and microseconds mean no limit.
        tv_usec: within.map_or(0, |w| w.subsec_micros().max(u32::from(w.as_secs() == 0)))
            as libc::suseconds_t,
    };
    let value = [time.tv_sec.to_ne_bytes(), time.tv_usec.to_ne_bytes()].concat();
    set_at(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &value)
}

pub(crate) fn get<const N: usize>(
    fd: &(impl AsFd + ?Sized),
    level: c_int,
    name: c_int,
) -> io::Result<([u8; N], usize)> {
    let mut value = [0u8; N];
    let mut len = N as socklen_t;
    // SAFETY: the buffer has the length that is passed.
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

/// Reads an option with a text value.
pub(crate) fn text(fd: &(impl AsFd + ?Sized), name: c_int) -> io::Result<String> {
    let (bytes, len) = get::<512>(fd, SOL_D2TP, name)?;
    let words = bytes[..len].split(|byte| *byte == 0).next();
    Ok(String::from_utf8_lossy(words.unwrap_or_default()).into_owned())
}

/// Why a connection attempt failed; success if it did not.
pub(crate) fn pending(fd: &impl AsFd) -> io::Result<()> {
    let (bytes, _) = get::<4>(fd, libc::SOL_SOCKET, libc::SO_ERROR)?;
    match i32::from_ne_bytes(bytes) {
        0 => Ok(()),
        errno => Err(error(fd, io::Error::from_raw_os_error(errno))),
    }
}

/// Connects to `address`, as the library resolves it.
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
    // SAFETY: C strings, no hints, and a pointer for the answer.
    let why = unsafe { d2tp::d2tp_getaddrinfo(host.as_ptr(), service, ptr::null(), &mut found) };
    match why {
        0 => {}
        libc::EAI_SYSTEM => return Err(io::Error::last_os_error()),
        _ => {
            let words = format!("{address} is neither d2tp://host:port/KEY nor host:port");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, words));
        }
    }
    // SAFETY: the result is valid until it is freed, once.
    unsafe {
        let said = d2tp::d2tp_connect(fd.as_raw_fd(), (*found).ai_addr, (*found).ai_addrlen);
        let said = check(said).map(drop);
        d2tp::d2tp_freeaddrinfo(found);
        said
    }
}

/// An address in C's form.
struct RawSockaddr(libc::sockaddr_storage, socklen_t);

impl RawSockaddr {
    fn of(address: SocketAddr) -> RawSockaddr {
        // SAFETY: the arguments are plain numbers.
        let mut place: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let to: *mut libc::sockaddr_storage = &mut place;
        let len = match address {
            SocketAddr::V4(v4) => {
                // SAFETY: the storage has room for either structure, and is aligned for both.
                let to = unsafe { &mut *to.cast::<libc::sockaddr_in>() };
                to.sin_family = libc::AF_INET as libc::sa_family_t;
                to.sin_port = v4.port().to_be();
                to.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                // SAFETY: the same as above.
                let to = unsafe { &mut *to.cast::<libc::sockaddr_in6>() };
                to.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                to.sin6_port = v6.port().to_be();
                to.sin6_addr.s6_addr = v6.ip().octets();
                to.sin6_scope_id = v6.scope_id();
                size_of::<libc::sockaddr_in6>()
            }
        };
        RawSockaddr(place, len as socklen_t)
    }

    fn read(&self) -> io::Result<SocketAddr> {
        let from: *const libc::sockaddr_storage = &self.0;
        match c_int::from(self.0.ss_family) {
            libc::AF_INET => {
                // SAFETY: its family says that it is this structure.
                let v4 = unsafe { &*from.cast::<libc::sockaddr_in>() };
                let ip = IpAddr::V4(u32::from_be(v4.sin_addr.s_addr).into());
                Ok((ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: the same as above.
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
    // SAFETY: the arguments are plain numbers.
    let mut place = RawSockaddr(unsafe { std::mem::zeroed() }, 0);
    place.1 = size_of::<libc::sockaddr_storage>() as socklen_t;
    // SAFETY: the buffer has the length that is passed.
    let said = check(unsafe {
        call(
            fd.as_fd().as_raw_fd(),
            (&raw mut place.0).cast(),
            &mut place.1,
        )
    })?;
    Ok((said, place.read()?))
}

pub(crate) fn bind(fd: &OwnedFd, at: SocketAddr) -> io::Result<()> {
    let place = RawSockaddr::of(at);
    // SAFETY: the address has the length that is passed.
    check(unsafe { d2tp::d2tp_bind(fd.as_raw_fd(), (&raw const place.0).cast(), place.1) })
        .map(drop)
}

pub(crate) fn listen(fd: &OwnedFd, backlog: c_int) -> io::Result<()> {
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
    // SAFETY: just created, and nothing else owns it.
    Ok((unsafe { OwnedFd::from_raw_fd(new) }, from))
}

unsafe extern "C" fn accept_at_once(
    fd: c_int,
    address: *mut libc::sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the same as for the caller.
    unsafe { d2tp::d2tp_accept4(fd, address, len, flags) }
}

unsafe extern "C" fn accept_blocking(
    fd: c_int,
    address: *mut libc::sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the same as for the caller.
    unsafe { d2tp::d2tp_accept4(fd, address, len, libc::SOCK_CLOEXEC) }
}

pub(crate) fn recv(fd: BorrowedFd<'_>, into: &mut [MaybeUninit<u8>]) -> io::Result<usize> {
    // SAFETY: the buffer has the length that is passed.
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
    // SAFETY: the slice has this many bytes.
    counted(unsafe { d2tp::d2tp_send(fd.as_raw_fd(), from.as_ptr().cast(), from.len(), 0) })
        .map_err(|said| error(&fd, said))
}

pub(crate) fn shutdown(fd: &impl AsFd, how: c_int) -> io::Result<()> {
    check(d2tp::d2tp_shutdown(fd.as_fd().as_raw_fd(), how)).map(drop)
}

/// Sends a datagram to a peer of a server.
pub(crate) fn send_to(fd: &impl AsFd, from: &[u8], to: SocketAddr) -> io::Result<usize> {
    let place = RawSockaddr::of(to);
    // SAFETY: the slice has this many bytes, and the address the length that is passed.
    counted(unsafe {
        d2tp::d2tp_sendto(
            fd.as_fd().as_raw_fd(),
            from.as_ptr().cast(),
            from.len(),
            0,
            (&raw const place.0).cast(),
            place.1,
        )
    })
    .map_err(|said| error(fd, said))
}

/// Receives the next datagram and its sender's address.
pub(crate) fn recv_from(fd: &impl AsFd, into: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
    // SAFETY: the arguments are plain numbers.
    let mut place = RawSockaddr(unsafe { std::mem::zeroed() }, 0);
    place.1 = size_of::<libc::sockaddr_storage>() as socklen_t;
    // SAFETY: both buffers have the lengths that are passed.
    let bytes = counted(unsafe {
        d2tp::d2tp_recvfrom(
            fd.as_fd().as_raw_fd(),
            into.as_mut_ptr().cast(),
            into.len(),
            0,
            (&raw mut place.0).cast(),
            &mut place.1,
        )
    })
    .map_err(|said| error(fd, said))?;
    // A server that was connected by name has no IP address.
    let unnamed = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    Ok((bytes, place.read().unwrap_or(unnamed)))
}

/// Closes a descriptor by the library's call, which also ends what the kernel's would leave.
pub(crate) fn close(fd: OwnedFd) -> io::Result<()> {
    check(d2tp::d2tp_close(fd.into_raw_fd())).map(drop)
}

/// Reopens a connection whose process has ended, and returns its descriptor.
pub(crate) fn reopen(token: &[u8; 32], flags: c_int) -> io::Result<OwnedFd> {
    d2tp::share_descriptors();
    let flags = flags | libc::SOCK_CLOEXEC;
    // SAFETY: the token has the length that is passed.
    let fd = check(unsafe { d2tp::d2tp_reopen(token.as_ptr().cast(), 32, flags) });
    // There is no descriptor from which the cause could be read.
    let fd = fd.map_err(|said| match said.raw_os_error() {
        Some(errno) => {
            let words = not_reopened(errno, &said);
            io::Error::new(said.kind(), ConnectionFault { errno, words })
        }
        None => said,
    })?;
    // SAFETY: just created, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn not_reopened(errno: i32, said: &io::Error) -> String {
    match errno {
        libc::ENOENT => {
            "no connection of this token is kept: it was ended or let go, or its agent ended".into()
        }
        libc::EBUSY => "the process that has this connection is still there".into(),
        libc::EOPNOTSUPP => "no agent answers that keeps connections: start `cedos agent`".into(),
        _ => format!("the connection cannot be opened again: {said}"),
    }
}

pub(crate) fn network_changed() -> io::Result<()> {
    check(d2tp::d2tp_network_changed()).map(drop)
}

pub(crate) fn dlock_acquire() -> io::Result<()> {
    check(d2tp::d2tp_dlock_acquire()).map(drop)
}

pub(crate) fn dlock_release() -> io::Result<()> {
    check(d2tp::d2tp_dlock_release()).map(drop)
}

/// Waits until the peer has received everything.
pub(crate) fn flush(fd: &impl AsFd, timeout_ms: c_int) -> io::Result<()> {
    let flushed = check(d2tp::d2tp_flush(fd.as_fd().as_raw_fd(), timeout_ms));
    flushed.map(drop).map_err(|said| error(fd, said))
}
