//! The other end of a program's socket: the program's socket connects to a port of this process,
//! and the connection is established when there is a flow for it.
//!
//! ```text
//!  program's socket a                     this process, which holds port P of 127/8
//!  connect(a, 127.0.0.1:P) ──SYN──▶ ✗     a listener that drops every SYN: a stays "in progress"
//!                          ◀──SYN──       when there is a flow: b, bound to P too, connects to a
//!  writable                ══════════     (simultaneous open, RFC 9293 §3.5)
//! ```
//!
//! So the kernel reports to the program when its connection is in progress or established. To
//! report "refused", a socket must have received the SYN: a guard g, which connected to a before a
//! connected to P, so that the same simultaneous open is half complete on its side. Until it is
//! needed, a filter on a drops g's packets:
//!
//! ```text
//!  g, bound to P: connect(g, a) ──SYN──▶ ✗     a listener c at a's own address, closed again
//!  connect(a, 127.0.0.1:P) ─────SYN──▶ g       SYN-RECEIVED
//!                        ✗ ◀──SYN+ACK── g      the filter on a
//!  refused                 ◀──RST+ACK── g      the filter is gone, and g closed
//! ```
//!
//! If there is a flow instead, g is closed as well, and its reset must not reach a. The kernel may deliver it
//! late, when this process has gone on: a drops resets until b is connected.
//!
//! A program in its own network namespace needs sockets from there: a porter, a process that stayed
//! in it, provides them.

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

/// How often the kernel repeats a SYN: a connection may wait about four hours for a network. It is
/// the maximum (tcp(7)).
const SYN_REPEATS: u32 = 127;

/// The two sockets that reserve a port.
pub(crate) struct ReservedPort {
    /// A socket on every address, so that no other user can bind the port on any.
    pub(crate) all: OwnedFd,
    /// The socket that receives programs' SYNs and never answers.
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

/// A filter that lets in all but resets. linux/bpf_common.h: BPF_LD | BPF_B | BPF_ABS, BPF_JMP | BPF_JSET | BPF_K,
/// BPF_RET | BPF_K; the packet begins with its TCP header, whose byte 13 has the flags (RFC 9293 §3.1).
const NO_RESET_COMES_IN: [SockFilter; 4] = [
    SockFilter::new(0x30, 0, 0, 13),
    SockFilter::new(0x45, 0, 1, 0x04),
    SockFilter::new(0x06, 0, 0, 0),
    SockFilter::new(0x06, 0, 0, u32::MAX),
];

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
    /// A client that uses the channel to that process.
    pub(crate) fn new(channel: OwnedFd) -> io::Result<NamespaceSockets> {
        SockRef::from(&channel).set_nonblocking(true)?;
        let channel = fd_passing::watch(channel)?;
        Ok(NamespaceSockets {
            channel: Mutex::new(channel),
        })
    }

    /// Creates a TCP socket in the namespace.
    ///
    /// # Errors
    /// The process is gone, or could not create one.
    pub async fn socket(&self) -> io::Result<Socket> {
        let mut fds = self.request(SocketRequest::Tcp4).await?;
        let socket = fds.pop().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(socket.into())
    }

    /// Requests sockets from the process.
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

/// The common port of all pairs.
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

    /// Connects to `at`, on the program's loopback.
    ///
    /// # Errors
    /// There is no listener.
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

    /// Begins to connect a program's socket, which is not connected. It stays in progress until
    /// [`PendingConnection::connect`].
    ///
    /// # Errors
    /// The same as those of `connect`.
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
                // The other end is an IPv4 socket.
                socket.set_only_v6(false)?;
            }
            // It shares the port for a moment with the listener that a guard needs.
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
        // A socket without this option waits for a shorter time.
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

    /// Adds a guard to a connection that is about to be in progress, so that it can be refused as
    /// by the kernel. Without one, [`PendingConnection::refuse`] uses another method.
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
        // Closing it sends a reset.
        guard.set_linger(Some(Duration::ZERO))?;
        guard.set_nonblocking(true)?;
        match guard.connect(&meeting.peer_address.into()) {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(guard),
            Err(error) => Err(error),
            Ok(()) => Err(io::ErrorKind::AddrInUse.into()),
        }
    }

    /// Connects the other end to a program's socket that waits.
    ///
    /// # Errors
    /// The socket does not wait any more.
    pub async fn accept_waiting(&self, theirs: SocketAddrV4) -> io::Result<TcpStream> {
        let ours = SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.number);
        let socket = shared(self.socket().await?, ours)?;
        finish(socket, &SocketAddr::from(theirs).into()).await
    }

    /// Connects the other end to a program's socket that is in progress, and takes its guard away.
    ///
    /// # Errors
    /// The socket does not wait any more.
    pub async fn establish(&self, mut meeting: PendingConnection) -> io::Result<TcpStream> {
        meeting.remove_guard();
        let other_end = self.accept_waiting(meeting.peer_address).await;
        // From now on a reset is the other end's.
        let _ = meeting.socket.detach_filter();
        other_end
    }
}

fn repeat_syns(socket: &Socket) -> io::Result<()> {
    let times = SYN_REPEATS as libc::c_int;
    // SAFETY: the value is an int, as tcp(7) requires.
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
    // Reno does not pace, as the system's default may, and every kernel has it.
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

/// A program's socket that is connecting.
pub struct PendingConnection {
    socket: Socket,
    to: SockAddr,
    /// The address at which the other end finds it.
    pub peer_address: SocketAddrV4,
    /// Whether `connect` waits until the connection is established; otherwise it returns
    /// EINPROGRESS at once.
    pub blocks: bool,
    /// Whether this process bound its address.
    shares: bool,
    guard: Option<Socket>,
}

impl PendingConnection {
    /// Sends the SYN. If the program's socket blocks, this waits until the other end has connected.
    ///
    /// # Errors
    /// The same as those of `connect`: EINPROGRESS for a non-blocking socket.
    pub fn connect(&self) -> io::Result<()> {
        if self.shares {
            let _ = self.socket.set_reuse_port(false);
        }
        self.socket.connect(&self.to)
    }

    /// Closes the guard; its reset is not received, whenever it comes.
    fn remove_guard(&mut self) {
        if let Some(guard) = self.guard.take() {
            let _ = self.socket.attach_filter(&NO_RESET_COMES_IN);
            drop(guard);
        }
    }

    /// Makes a connection that is in progress fail with ECONNREFUSED.
    pub fn refuse(mut self) {
        let guard = self.guard.take();
        // One that has failed can refuse nothing.
        let guard = guard.filter(|guard| matches!(guard.take_error(), Ok(None)));
        let _ = self.socket.detach_filter();
        if let Some(guard) = guard {
            return drop(guard);
        }
        // The attempt is aborted, which the program may see for an instant as ECONNRESET, and
        // repeated to an address without a listener, so that the kernel reports the refusal to a
        // polling program. SAFETY: an address of the family AF_UNSPEC, as connect(2) requires for
        // this.
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

/// The port of tcpmux (RFC 1078), which is never in use.
const NOBODYS_PORT: u16 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read as _, Write as _};

    fn catch_port() -> CatchPort {
        CatchPort::new(reserve().expect("a port"), None).expect("it has a number")
    }

    /// A program's socket that is in progress, and the connection that this process knows of.
    async fn in_progress(port: &CatchPort) -> (Socket, PendingConnection) {
        let program = fresh().expect("a socket");
        program.set_nonblocking(true).expect("it does not block");
        let caught = program.try_clone().expect("what cedos run is given");
        let mut meeting = port.begin(caught.into()).expect("it begins");
        port.guard(&mut meeting).await;
        assert!(meeting.guard.is_some(), "it can be refused");
        let error = meeting.connect().expect_err("it is in progress");
        assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS));
        (program, meeting)
    }

    async fn writable(program: &Socket) -> io::Result<()> {
        let program = program.try_clone()?.into();
        let program = TcpStream::from_std(program)?;
        program.writable().await?;
        program.take_error()?.map_or(Ok(()), Err)
    }

    #[tokio::test]
    async fn a_connection_is_established_whenever_the_guards_reset_comes() {
        let port = catch_port();
        let (mut program, mut meeting) = in_progress(&port).await;
        meeting.remove_guard();
        assert!(program.take_error().expect("a socket").is_none());
        let mut other = port.establish(meeting).await.expect("it waits");
        writable(&program).await.expect("it is connected");
        program.write_all(b"hello").expect("it is sent");
        let mut got = [0; 5];
        tokio::io::AsyncReadExt::read_exact(&mut other, &mut got)
            .await
            .expect("it comes");
        assert_eq!(&got, b"hello");
        // A reset of the other end is the program's.
        SockRef::from(&other)
            .set_linger(Some(Duration::ZERO))
            .expect("a reset");
        drop(other);
        program.set_nonblocking(false).expect("it blocks");
        let error = program.read(&mut got).expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn a_connection_is_refused_with_and_without_its_guard() {
        let port = catch_port();
        let (program, meeting) = in_progress(&port).await;
        meeting.refuse();
        let error = writable(&program).await.expect_err("a refusal");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        let (program, mut meeting) = in_progress(&port).await;
        meeting.remove_guard();
        meeting.refuse();
        let error = writable(&program).await.expect_err("a refusal");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    }
}
