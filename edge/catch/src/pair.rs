//! The other end of a program's socket: the program's is connected to a port of ours, and becomes a
//! connection when there is something behind it.
//!
//! ```text
//!  program's socket a                     ours, which hold port P of 127/8
//!  connect(a, 127.0.0.1:P) ──SYN──▶ ✗     a listener that drops every SYN: a stays "in progress"
//!                          ◀──SYN──       when there is a flow: b, bound to P too, connects to a
//!  writable                ══════════     (simultaneous open, RFC 9293 §3.5)
//! ```
//!
//! So the kernel says to the program when its connection is in progress or made. For it to say "refused"
//! somebody must have heard the SYN: a guard g, which called a before a called P, so that the same
//! simultaneous open is half done on its side. Until it is needed, a filter keeps from a what g says:
//!
//! ```text
//!  g, bound to P: connect(g, a) ──SYN──▶ ✗     a listener c at a's own address, closed again
//!  connect(a, 127.0.0.1:P) ─────SYN──▶ g       SYN-RECEIVED
//!                        ✗ ◀──SYN+ACK── g      the filter on a
//!  refused                 ◀──RST+ACK── g      the filter is gone, and g closed
//! ```
//!
//! A program in a network namespace of its own needs sockets from there: a porter, a process that stayed
//! in it, hands them out.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{MsgFlags, recvmsg, send};
use socket2::{Domain, Protocol, SockAddr, SockFilter, SockRef, Socket, Type};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use crate::{dns, fd_passing};

/// Times the kernel repeats a SYN: a connection may wait for a network for some four hours. The most
/// there is (tcp(7)).
const SYN_REPEATS: u32 = 127;

/// The two sockets that hold a port.
pub(crate) struct ReservedPort {
    /// On every address, so that no other user binds it on any.
    pub(crate) all: OwnedFd,
    /// Where programs' SYNs end.
    pub(crate) syn_sink: OwnedFd,
}

fn shared(socket: Socket, at: SocketAddrV4) -> io::Result<Socket> {
    socket.set_reuse_port(true)?;
    socket.bind(&at.into())?;
    Ok(socket)
}

fn fresh() -> io::Result<Socket> {
    Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))
}

/// Takes a port in the network namespace of this thread.
pub(crate) fn reserve() -> io::Result<ReservedPort> {
    let all = shared(fresh()?, SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0))?;
    let port = port_of(&all)?;
    let mute = shared(fresh()?, SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
    mute.attach_filter(&NOTHING_COMES_IN)?;
    mute.listen(1)?;
    Ok(ReservedPort {
        all: all.into(),
        syn_sink: mute.into(),
    })
}

/// A filter that lets no packet in. linux/bpf_common.h: BPF_RET | BPF_K.
const NOTHING_COMES_IN: [SockFilter; 1] = [SockFilter::new(0x06, 0, 0, 0)];

fn port_of(socket: &Socket) -> io::Result<u16> {
    let at = socket.local_addr()?.as_socket();
    at.map(|at| at.port())
        .ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

/// A client of the process that creates sockets in another network namespace.
pub struct NamespaceSockets {
    channel: Mutex<tokio::io::unix::AsyncFd<OwnedFd>>,
}

impl NamespaceSockets {
    /// Over the channel to its process.
    pub(crate) fn new(channel: OwnedFd) -> io::Result<NamespaceSockets> {
        SockRef::from(&channel).set_nonblocking(true)?;
        let channel = fd_passing::watch(channel)?;
        Ok(NamespaceSockets {
            channel: Mutex::new(channel),
        })
    }

    /// A TCP socket there.
    ///
    /// # Errors
    /// It is gone, or has none.
    pub async fn socket(&self) -> io::Result<Socket> {
        let mut fds = self.request(SocketRequest::Tcp4).await?;
        let socket = fds.pop().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(socket.into())
    }

    /// The sockets that a request gives; none if it cannot be met.
    pub(crate) async fn request(&self, what: SocketRequest) -> io::Result<Vec<OwnedFd>> {
        let channel = self.channel.lock().await;
        send(channel.as_raw_fd(), &[what as u8], MsgFlags::MSG_NOSIGNAL)?;
        loop {
            let mut ready = channel.readable().await?;
            let took = ready.try_io(|channel| fd_passing::take(channel.get_ref()));
            if let Ok(took) = took {
                return took.map(|(_, fds)| fds);
            }
        }
    }
}

/// A request to the process in the other namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum SocketRequest {
    /// A TCP socket for IPv4.
    Tcp4 = b's',
    /// A TCP socket for IPv6.
    Tcp6 = b'S',
    /// A UDP socket for IPv4.
    Udp4 = b'u',
    /// A UDP socket for IPv6.
    Udp6 = b'U',
    /// The sockets of a name server, in the order of [`dns::sockets`].
    NameServer = b'd',
}

impl SocketRequest {
    fn of(byte: u8) -> Option<SocketRequest> {
        use SocketRequest::{NameServer, Tcp4, Tcp6, Udp4, Udp6};
        let all = [Tcp4, Tcp6, Udp4, Udp6, NameServer];
        all.into_iter().find(|what| *what as u8 == byte)
    }

    fn create(self) -> io::Result<Vec<OwnedFd>> {
        let one = |domain, kind| Socket::new(domain, kind, None).map(|s| vec![s.into()]);
        match self {
            SocketRequest::Tcp4 => one(Domain::IPV4, Type::STREAM),
            SocketRequest::Tcp6 => one(Domain::IPV6, Type::STREAM),
            SocketRequest::Udp4 => one(Domain::IPV4, Type::DGRAM),
            SocketRequest::Udp6 => one(Domain::IPV6, Type::DGRAM),
            SocketRequest::NameServer => dns::sockets(),
        }
    }
}

/// Creates sockets for the other end of the channel, until that is closed. `enter` runs before the first.
pub(crate) fn serve_sockets(channel: &OwnedFd, enter: impl Fn() -> io::Result<()>) {
    let mut byte = [0];
    let mut entered = None;
    loop {
        let mut slices = [IoSliceMut::new(&mut byte)];
        let message = recvmsg::<()>(channel.as_raw_fd(), &mut slices, None, MsgFlags::empty());
        if !message.is_ok_and(|message| message.bytes > 0) {
            return;
        }
        let entered = *entered.get_or_insert_with(|| enter().is_ok());
        let asked = SocketRequest::of(byte[0]).filter(|_| entered);
        let sockets = asked.and_then(|asked| asked.create().ok());
        let sockets = sockets.unwrap_or_default();
        let fds: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        if fd_passing::give(channel, b"s", &fds).is_err() {
            return;
        }
    }
}

/// The port that all pairs have in common.
pub struct CatchPort {
    number: u16,
    _all: OwnedFd,
    _mute: OwnedFd,
    namespace_sockets: Option<Arc<NamespaceSockets>>,
}

impl CatchPort {
    pub(crate) fn new(
        reserved: ReservedPort,
        porter: Option<Arc<NamespaceSockets>>,
    ) -> io::Result<CatchPort> {
        let number = SockRef::from(&reserved.all).local_addr()?.as_socket();
        let number = number.ok_or(io::ErrorKind::AddrNotAvailable)?.port();
        Ok(CatchPort {
            number,
            _all: reserved.all,
            _mute: reserved.syn_sink,
            namespace_sockets: porter,
        })
    }

    async fn socket(&self) -> io::Result<Socket> {
        match &self.namespace_sockets {
            Some(porter) => porter.socket().await,
            None => fresh(),
        }
    }

    /// A connection to `at`, on the program's loopback.
    ///
    /// # Errors
    /// Nobody listens there.
    pub async fn connect_loopback(&self, at: SocketAddr) -> io::Result<TcpStream> {
        let socket = match (&self.namespace_sockets, at) {
            (_, SocketAddr::V4(_)) => self.socket().await?,
            (None, SocketAddr::V6(_)) => {
                Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?
            }
            (Some(_), SocketAddr::V6(_)) => return Err(io::ErrorKind::Unsupported.into()),
        };
        finish(socket, &at.into()).await
    }

    /// Begins to connect a program's socket, which is not connected: it stays in progress until
    /// [`PendingConnection::connect`].
    ///
    /// # Errors
    /// As `connect` says it.
    pub fn begin(&self, program: OwnedFd) -> io::Result<PendingConnection> {
        let socket = Socket::from(program);
        let six = socket.domain()? == Domain::IPV6;
        let bound = socket.local_addr()?.as_socket();
        let shares = bound.is_none_or(|at| at.port() == 0);
        if shares {
            let mut ours = Ipv4Addr::LOCALHOST;
            if let Some(ip) = bound.map(|at| at.ip()).filter(|ip| !ip.is_unspecified()) {
                match ip.to_canonical() {
                    IpAddr::V4(four) => ours = four,
                    IpAddr::V6(_) => return Err(io::ErrorKind::AddrNotAvailable.into()),
                }
            }
            if six {
                // Its other end is of IPv4.
                socket.set_only_v6(false)?;
            }
            // With the listener that a guard needs for a moment.
            socket.set_reuse_port(true)?;
            socket.bind(&as_seen(ours, 0, six))?;
        }
        let at = socket.local_addr()?.as_socket();
        let at = at.ok_or(io::ErrorKind::AddrNotAvailable)?;
        let theirs = match at.ip().to_canonical() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST,
            IpAddr::V4(ip) => ip,
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST,
            IpAddr::V6(_) => return Err(io::ErrorKind::AddrNotAvailable.into()),
        };
        // A socket that cannot wait so long waits less.
        let _ = repeat_syns(&socket);
        Ok(PendingConnection {
            blocks: !socket.nonblocking()?,
            peer_address: SocketAddrV4::new(theirs, at.port()),
            to: as_seen(Ipv4Addr::LOCALHOST, self.number, six),
            socket,
            shares,
            guard: None,
        })
    }

    /// Puts a guard before a connection that is about to be in progress, so that it can be refused as the
    /// kernel would. Without one [`PendingConnection::refuse`] does what it can.
    pub async fn guard(&self, meeting: &mut PendingConnection) {
        if !meeting.shares {
            return;
        }
        match self.try_guard(meeting).await {
            Ok(guard) => meeting.guard = Some(guard),
            Err(error) => {
                tracing::debug!(%error, "a connection without a guard");
                let _ = meeting.socket.detach_filter();
            }
        }
    }

    async fn try_guard(&self, meeting: &PendingConnection) -> io::Result<Socket> {
        meeting.socket.attach_filter(&NOTHING_COMES_IN)?;
        let swallows = shared(self.socket().await?, meeting.peer_address)?;
        swallows.attach_filter(&NOTHING_COMES_IN)?;
        swallows.listen(1)?;
        let ours = SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.number);
        let guard = shared(self.socket().await?, ours)?;
        repeat_syns(&guard)?;
        // Closed, it resets.
        guard.set_linger(Some(Duration::ZERO))?;
        guard.set_nonblocking(true)?;
        match guard.connect(&meeting.peer_address.into()) {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(guard),
            Err(error) => Err(error),
            Ok(()) => Err(io::ErrorKind::AddrInUse.into()),
        }
    }

    /// The other end of a program's socket that waits.
    ///
    /// # Errors
    /// It waits no more.
    pub async fn accept_waiting(&self, theirs: SocketAddrV4) -> io::Result<TcpStream> {
        let ours = SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.number);
        let socket = shared(self.socket().await?, ours)?;
        finish(socket, &SocketAddr::from(theirs).into()).await
    }
}

fn repeat_syns(socket: &Socket) -> io::Result<()> {
    let times = SYN_REPEATS as libc::c_int;
    // SAFETY: an int, as tcp(7) wants it.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_SYNCNT,
            (&raw const times).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn as_seen(ip: Ipv4Addr, port: u16, six: bool) -> SockAddr {
    match six {
        true => SocketAddr::from((ip.to_ipv6_mapped(), port)).into(),
        false => SocketAddr::from((ip, port)).into(),
    }
}

async fn finish(socket: Socket, to: &SockAddr) -> io::Result<TcpStream> {
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    // It paces nothing, as the system's own may; every kernel has it.
    socket.set_tcp_congestion(b"reno")?;
    match socket.connect(to) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
        _ => {}
    }
    let stream = TcpStream::from_std(socket.into())?;
    stream.writable().await?;
    match stream.take_error()? {
        Some(error) => Err(error),
        None => Ok(stream),
    }
}

/// A program's socket on its way.
pub struct PendingConnection {
    socket: Socket,
    to: SockAddr,
    /// Where its other end finds it.
    pub peer_address: SocketAddrV4,
    /// `connect` returns when the connection is there; otherwise at once, with EINPROGRESS.
    pub blocks: bool,
    /// Its address is one that we gave it.
    shares: bool,
    guard: Option<Socket>,
}

impl PendingConnection {
    /// Sends the SYN. Where the program waits this blocks until the other end has come.
    ///
    /// # Errors
    /// As `connect` says it: EINPROGRESS for one that does not wait.
    pub fn connect(&self) -> io::Result<()> {
        if self.shares {
            let _ = self.socket.set_reuse_port(false);
        }
        self.socket.connect(&self.to)
    }

    /// Lets its other end come.
    pub fn release(mut self) {
        if let Some(guard) = self.guard.take() {
            // Its reset is not heard: the filter is there for one moment more.
            drop(guard);
            let _ = self.socket.detach_filter();
        }
    }

    /// Has a connection that is in progress fail with ECONNREFUSED.
    pub fn refuse(mut self) {
        if let Some(guard) = self.guard.take() {
            let _ = self.socket.detach_filter();
            return drop(guard);
        }
        // Given up, which a program may see for an instant as ECONNRESET, and called anew where nobody
        // is: the kernel says it to whoever polls.
        // SAFETY: an address of the family alone, as connect(2) wants it for this.
        unsafe {
            let none = libc::sockaddr {
                sa_family: libc::AF_UNSPEC as libc::sa_family_t,
                sa_data: [0; 14],
            };
            libc::connect(
                self.socket.as_fd().as_raw_fd(),
                &none,
                size_of::<libc::sockaddr>() as libc::socklen_t,
            );
        }
        let six = self.to.is_ipv6();
        let nobody = as_seen(Ipv4Addr::LOCALHOST, NOBODYS_PORT, six);
        let _ = self.socket.connect(&nobody);
    }
}

/// tcpmux (RFC 1078), which nobody serves.
const NOBODYS_PORT: u16 = 1;
