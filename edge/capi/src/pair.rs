//! The loopback TCP connection between a descriptor and the engine.
//!
//! ```text
//!  program's socket a                     engine, which holds port P of 127/8
//!  connect(a, 127.0.0.1:P) ──SYN──▶ ✗     a listener that drops every SYN: a stays "in progress"
//!                          ◀──SYN──       when the flow is there: b, bound to P too, connects to a
//!  writable                ══════════     (simultaneous open, RFC 9293 §3.5)
//!
//!  listen(a)               ◀──SYN──       b from 127.x.y.z:P; a's filter blocks others
//!  accept(a) → peer 127.x.y.z             which names the flow
//! ```
//!
//! So the kernel itself reports when a connection is in progress, established, refused or waiting
//! to be accepted, also to `poll` and to processes that inherited the descriptor. No other process
//! can take an end: P is bound on every address by this user, and both filters check the port.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};

use crate::errno::CallResult;
use crate::kernel::socket_option;

/// How often the kernel repeats a SYN: `connect` may wait about four hours for a network. It is the
/// maximum (tcp(7)).
const SYN_REPEATS: u32 = 127;
/// Kernel buffer size of both ends, unless the program sets it: bytes in transit within the machine are
/// neither the peer's nor on disk, so they should be few; less costs speed.
// a guess: docs/sockets.md, "Speed"
const PAIR_BUFFER_BYTES: usize = 256 * 1024;

/// The common port of all socket pairs of this process, with the sockets that reserve it.
pub(crate) struct PairPort {
    number: u16,
    /// A socket that binds the port on every address, so that no other user can.
    _reserved: Socket,
    /// The listening socket that receives programs' SYNs and never answers them.
    _mute: Option<Socket>,
}

fn loopback(port: u16) -> SockAddr {
    SocketAddrV4::new(Ipv4Addr::LOCALHOST, port).into()
}

fn shared_socket(at: &SockAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_port(true)?;
    socket.bind(at)?;
    Ok(socket)
}

impl PairPort {
    /// Reserves a port.
    pub(crate) fn take() -> io::Result<PairPort> {
        let port = PairPort::without_programs()?;
        let mute = shared_socket(&loopback(port.number))?;
        self::mute(mute.as_raw_fd())?;
        mute.listen(1)?;
        Ok(PairPort {
            _mute: Some(mute),
            ..port
        })
    }

    /// The port of an agent, which only connects to sockets that other processes made: some systems
    /// restrict who may attach a filter.
    pub(crate) fn without_programs() -> io::Result<PairPort> {
        let reserved = shared_socket(&SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0).into())?;
        let number = reserved
            .local_addr()?
            .as_socket_ipv4()
            .ok_or(io::ErrorKind::AddrNotAvailable)?
            .port();
        Ok(PairPort {
            number,
            _reserved: reserved,
            _mute: None,
        })
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Connects this end to a program's socket that waits at port `a`.
    ///
    /// # Errors
    /// The socket does not wait any more.
    pub(crate) async fn connect_waiting(&self, a: u16) -> io::Result<tokio::net::TcpStream> {
        self.call_listener(Ipv4Addr::LOCALHOST, a).await
    }

    /// Connects to the listener at port `a` from the address `name`, one of 127/8.
    ///
    /// # Errors
    /// It does not listen any more.
    pub(crate) async fn call_listener(
        &self,
        name: Ipv4Addr,
        a: u16,
    ) -> io::Result<tokio::net::TcpStream> {
        join(self.end(name)?, a).await
    }

    /// This end of a pair, to be connected by another process. If that process dies, the program's
    /// socket is reset.
    pub(crate) fn detachable_end(&self) -> io::Result<Socket> {
        let socket = self.end(Ipv4Addr::LOCALHOST)?;
        socket.set_linger(Some(Duration::ZERO))?;
        Ok(socket)
    }

    fn end(&self, name: Ipv4Addr) -> io::Result<Socket> {
        let socket = shared_socket(&SocketAddrV4::new(name, self.number).into())?;
        prepare(&socket)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    }
}

/// Connects this end of a pair to the program's, which waits or listens at port `a`.
///
/// # Errors
/// The socket does not exist any more.
pub(crate) async fn join(socket: Socket, a: u16) -> io::Result<tokio::net::TcpStream> {
    match socket.connect(&loopback(a)) {
        Ok(()) => {}
        Err(error) => match error.raw_os_error() {
            // An agent that ended may have begun to connect it.
            Some(libc::EINPROGRESS | libc::EALREADY | libc::EISCONN) => {}
            _ => return Err(error),
        },
    }
    let stream = tokio::net::TcpStream::from_std(socket.into())?;
    stream.writable().await?;
    match stream.take_error()? {
        Some(error) => Err(error),
        None => Ok(stream),
    }
}

/// Takes the pending error of the kernel's socket.
pub(crate) fn take_error(fd: RawFd) -> CallResult<libc::c_int> {
    socket_option(fd, libc::SO_ERROR)
}

/// Ends the connection attempt of a program's socket at once, for all tasks that wait for it: for
/// the kernel it was never connected. Called from a thread with its own descriptors.
///
/// # Errors
/// The program has no such socket at `fd` any more, or the system does not allow access to it.
pub(crate) fn refuse(fd: RawFd, cookie: u64) -> io::Result<()> {
    let socket = copy_program_socket(fd, cookie)?;
    // SAFETY: sockaddr consists of plain numbers; AF_UNSPEC is 0.
    let nowhere: libc::sockaddr = unsafe { std::mem::zeroed() };
    let len = size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: the pointer is to a complete sockaddr.
    let ended = unsafe { libc::connect(socket.as_raw_fd(), &raw const nowhere, len) };
    match ended {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Copies a program's socket. Called from a thread with its own descriptors.
///
/// # Errors
/// The program has no such socket at `fd` any more, or the system does not allow access to it.
pub(crate) fn copy_program_socket(fd: RawFd, cookie: u64) -> io::Result<OwnedFd> {
    let own = |number: libc::c_long| -> io::Result<OwnedFd> {
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just created, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(number as RawFd) })
    };
    // SAFETY: the arguments are plain numbers.
    let process = own(unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) })?;
    // SAFETY: the arguments are plain numbers.
    let socket = own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })?;
    let is_it = crate::table::cookie(socket.as_raw_fd()).is_ok_and(|found| found == cookie);
    match is_it {
        true => Ok(socket),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Whether a listener still exists at `a`: a filtered one does not answer, a closed port does.
pub(crate) async fn is_listening(a: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, a));
    // Long enough for a loopback answer on a busy machine; a listener takes all of it.
    let tried = tokio::time::timeout(PROBE, tokio::net::TcpStream::connect(address)).await;
    tried.is_err()
}

/// How long a closed port may take to answer.
const PROBE: Duration = Duration::from_millis(100); // a guess

/// Whether a socket that does not listen is still bound to `a`.
pub(crate) fn is_bound(a: u16) -> bool {
    let Ok(socket) = Socket::new(Domain::IPV4, Type::STREAM, None) else {
        return true;
    };
    socket.bind(&loopback(a)).is_err()
}

/// The congestion control of pairs: every kernel has it, and it does not pace. The system's default may
/// be BBR (docs/sockets.md, "Speed").
const CONGESTION_CONTROL: &[u8] = b"reno";

/// Sets the options that both ends need. Small writes are sent at once, since their reader is a thread
/// of this process.
fn prepare(socket: &Socket) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_congestion(CONGESTION_CONTROL)?;
    socket.set_send_buffer_size(PAIR_BUFFER_BYTES)
}

/// Creates a program's socket: `flags` are SOCK_NONBLOCK and SOCK_CLOEXEC.
pub(crate) fn program_socket(flags: libc::c_int) -> io::Result<RawFd> {
    // SAFETY: the arguments are plain numbers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let set_up = || -> io::Result<()> {
        set(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
        set(
            fd,
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            PAIR_BUFFER_BYTES as libc::c_int,
        )?;
        set(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_SYNCNT,
            SYN_REPEATS as libc::c_int,
        )?;
        // SAFETY: the descriptor stays open at least until the end of this function.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        SockRef::from(&borrowed).set_tcp_congestion(CONGESTION_CONTROL)
    };
    set_up().inspect_err(|_| {
        // SAFETY: just created, and nothing else uses it.
        unsafe { libc::close(fd) };
    })?;
    Ok(fd)
}

pub(crate) fn set(
    fd: RawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the value is an int, as these options require.
    let result = unsafe {
        libc::setsockopt(
            fd,
            level,
            name,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Binds a program's socket to a loopback port of the kernel's choice, if it is not bound yet.
pub(crate) fn bind_program(fd: RawFd) -> io::Result<u16> {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: u32::from(Ipv4Addr::LOCALHOST).to_be(),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: the pointer is to a complete sockaddr_in.
    let bound = unsafe {
        libc::bind(
            fd,
            (&raw const address).cast(),
            size_of::<libc::sockaddr_in>() as libc::socklen_t,
        )
    };
    if bound < 0 {
        return Err(io::Error::last_os_error());
    }
    local_port(fd)
}

/// The loopback port of a program's socket.
pub(crate) fn local_port(fd: RawFd) -> io::Result<u16> {
    // SAFETY: sockaddr_in consists of plain numbers.
    let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    // SAFETY: the buffer has the length that is passed.
    if unsafe { libc::getsockname(fd, (&raw mut address).cast(), &mut len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u16::from_be(address.sin_port))
}

/// Filters a listener so that only the engine's port can connect to it.
pub(crate) fn guard_listener(fd: RawFd, port: u16) -> io::Result<()> {
    let only_port = [
        // The source port is a TCP header's first half word (RFC 9293 §3.1); the filter begins there.
        libc::sock_filter {
            code: (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16,
            jt: 0,
            jf: 0,
            k: 0,
        },
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: u32::from(port),
        },
        libc::sock_filter {
            code: (libc::BPF_RET | libc::BPF_K) as u16,
            jt: 0,
            jf: 0,
            k: u32::MAX,
        },
        DROP,
    ];
    filter(fd, &only_port)
}

const DROP: libc::sock_filter = libc::sock_filter {
    code: (libc::BPF_RET | libc::BPF_K) as u16,
    jt: 0,
    jf: 0,
    k: 0,
};

/// Filters a socket so that nothing can connect to it.
pub(crate) fn mute(fd: RawFd) -> io::Result<()> {
    filter(fd, &[DROP])
}

/// Waits until the UDP address of a former server is free: its sockets are closed by the driver's task.
/// Another socket may bind it first.
pub(crate) async fn until_free(at: SocketAddr) {
    for _ in 0..FREE_LOOKS {
        if std::net::UdpSocket::bind(at).is_ok() {
            break;
        }
        tokio::time::sleep(FREE_LOOK).await;
    }
}

/// The number of checks, and the interval between them. On a busy machine the driver's task has no core for
/// hundreds of milliseconds; who closes waits for it, so that the address can be bound again.
const FREE_LOOKS: usize = 10_000; // a guess: ten seconds
const FREE_LOOK: Duration = Duration::from_millis(1);

/// Bytes that were written to the engine's end of a pair and that the program has not read: those in
/// its socket, and those in transit. Where the kernel does not report other sockets (sock_diag(7)),
/// only the latter.
pub(crate) fn unread(ours: RawFd) -> u64 {
    let mut unsent: libc::c_int = 0;
    // SAFETY: the pointer is to an int, as this request requires.
    let asked = unsafe { libc::ioctl(ours, SIOCOUTQNSD, &raw mut unsent) };
    let unsent = if asked < 0 { 0 } else { unsent };
    let arrived = queued_at_program(ours).unwrap_or_default();
    u64::from(arrived) + u64::try_from(unsent).unwrap_or(0)
}

/// Linux, include/uapi/linux/sockios.h: bytes not sent yet.
const SIOCOUTQNSD: libc::Ioctl = 0x894b;
/// The request for sockets of an address family. // linux/sock_diag.h
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Bytes of a netlink message header (include/uapi/linux/netlink.h).
const NETLINK_HEAD_BYTES: usize = 16;
/// Bytes of a socket diagnosis request (include/uapi/linux/inet_diag.h, `inet_diag_req_v2`).
const QUESTION_BYTES: usize = NETLINK_HEAD_BYTES + 56;
/// Offset of the number of queued bytes in a socket diagnosis answer (`inet_diag_msg`).
const QUEUED_AT: usize = NETLINK_HEAD_BYTES + 56;

/// Bytes that wait in the program's socket, which the kernel reports synchronously.
fn queued_at_program(ours: RawFd) -> Option<u32> {
    // SAFETY: the caller keeps the descriptor open.
    let ours = unsafe { BorrowedFd::borrow_raw(ours) };
    let ours = SockRef::from(&ours);
    let here = ours.local_addr().ok()?.as_socket_ipv4()?;
    let there = ours.peer_addr().ok()?.as_socket_ipv4()?;
    let mut question = Vec::with_capacity(QUESTION_BYTES);
    question.extend((QUESTION_BYTES as u32).to_ne_bytes());
    question.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    question.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    question.extend([0; 8]);
    question.extend([libc::AF_INET as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    // The socket may be in any state.
    question.extend(u32::MAX.to_ne_bytes());
    question.extend(there.port().to_be_bytes());
    question.extend(here.port().to_be_bytes());
    for address in [there, here] {
        question.extend(address.ip().octets());
        question.extend([0; 12]);
    }
    // On any interface, with any cookie.
    question.extend([0; 4]);
    question.extend([u8::MAX; 8]);
    let kernel = Socket::new(
        Domain::from(libc::AF_NETLINK),
        Type::DGRAM,
        Some(Protocol::from(libc::NETLINK_SOCK_DIAG)),
    );
    let kernel = kernel.ok()?;
    kernel.set_nonblocking(true).ok()?;
    kernel.send(&question).ok()?;
    let mut answer = [std::mem::MaybeUninit::new(0); 512];
    let len = kernel.recv(&mut answer).ok()?;
    // SAFETY: every byte was set above or by the kernel.
    let answer: Vec<u8> = answer
        .iter()
        .map(|byte| unsafe { byte.assume_init() })
        .collect();
    let kind = u16::from_ne_bytes([answer[4], answer[5]]);
    let queued = answer[..len].get(QUEUED_AT..QUEUED_AT + 4)?;
    let queued = u32::from_ne_bytes(queued.try_into().ok()?);
    (kind == SOCK_DIAG_BY_FAMILY).then_some(queued)
}

/// Attaches a filter to a socket (Linux, Documentation/networking/filter.rst).
fn filter(fd: RawFd, program: &[libc::sock_filter]) -> io::Result<()> {
    let whole = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program before it returns.
    let result = unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const whole).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
