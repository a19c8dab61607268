//! Handles the packets that a program sends on its only link: TCP streams become flows, name
//! lookups are answered, the rest is dropped.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use cedos_agent::proxy::{ConnOptions, ProxySession, TargetAddress};
use d2tp_catch::NameStandIns;
use etherparse::{InternetSlice, PacketBuilder, SlicedPacket, TransportSlice};
use ipstack::{IpStack, IpStackConfig, IpStackStream, IpStackTcpStream, TcpConfig, TcpOptions};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional};
use tokio::sync::Notify;
use tokio::time::Sleep;

/// How long a connection may be silent before the stack closes it.
const SILENT_MAX: Duration = Duration::from_secs(24 * 3600); // docs/proxy.md: tunnel_idle_s

/// The largest DNS query that is read: queries are short.
const QUESTION_BYTES_MAX: usize = 1500;
const UDP_SILENT_MAX: Duration = Duration::from_secs(5); // a guess
const DNS_PORT: u16 = 53;

/// Serves the program's link until it is gone.
pub async fn take_packets(
    tun: OwnedFd,
    mtu: u16,
    line: Arc<ProxySession>,
    conn_options: ConnOptions,
    names: Arc<NameStandIns>,
) -> io::Result<()> {
    let mut tcp = TcpConfig::default();
    tcp.timeout = SILENT_MAX;
    tcp.close_wait_timeout = SILENT_MAX;
    // Nothing is late on this link, and a run waits for its streams.
    tcp.two_msl = Duration::ZERO;
    // Both headers at their longest (RFC 8200 §3, RFC 9293 §3.1).
    tcp.options = Some(vec![TcpOptions::MaximumSegmentSize(mtu - 40 - 60)]);
    let mut config = IpStackConfig::default();
    config.mtu_unchecked(mtu).udp_timeout(UDP_SILENT_MAX);
    config.with_tcp_config(tcp);
    let streams = TunStreams::default();
    // Streams that nobody accepted would be dropped with it; see `Program`.
    let tun = TunLink::new(tun, streams.clone())?;
    let mut stack = ManuallyDrop::new(IpStack::new(config, tun));
    loop {
        match stack.accept().await.map_err(io::Error::other)? {
            IpStackStream::Tcp(program) => {
                let program = TunProgramStream::new(program, streams.clone());
                tokio::spawn(stream(program, line.clone(), conn_options, names.clone()));
            }
            IpStackStream::Udp(mut asker) if asker.peer_addr().port() == DNS_PORT => {
                let names = names.clone();
                tokio::spawn(async move {
                    let mut question = vec![0; QUESTION_BYTES_MAX];
                    while let Ok(n @ 1..) = asker.read(&mut question).await {
                        let Some(answer) = d2tp_catch::answer(&question[..n], &names) else {
                            continue;
                        };
                        if asker.write_all(&answer).await.is_err() {
                            return;
                        }
                    }
                });
            }
            IpStackStream::Udp(stray) => {
                tracing::debug!(to = %stray.peer_addr(), "a datagram cannot be delivered");
            }
            IpStackStream::UnknownTransport(_) | IpStackStream::UnknownNetwork(_) => {}
        }
    }
}

async fn stream(
    mut program: TunProgramStream,
    line: Arc<ProxySession>,
    conn_options: ConnOptions,
    names: Arc<NameStandIns>,
) {
    let given_up = program.streams.over(program.ends);
    tokio::select! {
        () = carried(&mut program, &line, conn_options, &names) => {}
        // The kernel took it back, as it does for a program that was killed.
        () = given_up.notified() => {}
    }
    program.end().await;
}

async fn carried(
    program: &mut TunProgramStream,
    line: &Arc<ProxySession>,
    conn_options: ConnOptions,
    names: &NameStandIns,
) {
    let (_, to) = program.ends;
    let target = match names.name_of(to.ip()) {
        Ok(None) => TargetAddress::from(to),
        Ok(Some(host)) => TargetAddress {
            host,
            port: to.port(),
        },
        Err(text) => return tracing::warn!("{text}"),
    };
    let mut open = match line.open(&target, conn_options).await {
        Ok(open) => open,
        Err(refusal) => return tracing::warn!(%target, "{}", refusal.text),
    };
    match copy_bidirectional(program, &mut open).await {
        Ok(_) => open.wait_delivered().await,
        Err(error) => tracing::debug!(%target, %error, "broken off"),
    }
}

/// The program's address, and the address that it connects to.
type StreamEndpoints = (SocketAddr, SocketAddr);

/// What passed on the link of a stream that has not ended: enough to reset it.
struct TunStream {
    /// What the program awaits next, once it has been answered.
    awaited: Option<u32>,
    /// What its SYN awaits.
    answer: u32,
    over: Arc<Notify>,
    /// Whether the connection was reset; packets that still come for it are answered with a reset.
    reset: bool,
}

/// All streams on the link, and packets that are ours: the stack can reset none.
#[derive(Clone, Default)]
struct TunStreams(Arc<Mutex<TunStreamTable>>);

#[derive(Default)]
struct TunStreamTable {
    passed: HashMap<StreamEndpoints, TunStream>,
    to_program: VecDeque<Vec<u8>>,
    to_stack: VecDeque<Vec<u8>>,
    stack: Option<Waker>,
}

/// The fields of a TCP packet that decide what is done with it.
struct TcpSegment {
    from: SocketAddr,
    to: SocketAddr,
    syn: bool,
    fin: bool,
    rst: bool,
    ack: Option<u32>,
    seq: u32,
    bytes: u32,
}

impl TcpSegment {
    fn of(packet: &[u8]) -> Option<TcpSegment> {
        let sliced = SlicedPacket::from_ip(packet).ok()?;
        let (from, to) = match sliced.net.as_ref()? {
            InternetSlice::Ipv4(ip) => {
                let header = ip.header();
                (
                    header.source_addr().into(),
                    header.destination_addr().into(),
                )
            }
            InternetSlice::Ipv6(ip) => {
                let header = ip.header();
                (
                    header.source_addr().into(),
                    header.destination_addr().into(),
                )
            }
            InternetSlice::Arp(_) => return None,
        };
        let TransportSlice::Tcp(tcp) = sliced.transport? else {
            return None;
        };
        Some(TcpSegment {
            from: SocketAddr::new(from, tcp.source_port()),
            to: SocketAddr::new(to, tcp.destination_port()),
            syn: tcp.syn(),
            fin: tcp.fin(),
            rst: tcp.rst(),
            ack: tcp.ack().then(|| tcp.acknowledgment_number()),
            seq: tcp.sequence_number(),
            bytes: u32::try_from(tcp.payload().len()).ok()?,
        })
    }

    fn after(&self) -> u32 {
        let flags = u32::from(self.syn) + u32::from(self.fin);
        self.seq.wrapping_add(self.bytes).wrapping_add(flags)
    }
}

/// A reset (RFC 9293 §3.10.7.1); `answer`: of a SYN, which awaits this.
fn reset(from: SocketAddr, to: SocketAddr, seq: u32, answer: Option<u32>) -> Vec<u8> {
    const HOPS: u8 = 64; // RFC 1700's
    let packet = match (from, to) {
        (SocketAddr::V4(from), SocketAddr::V4(to)) => {
            PacketBuilder::ipv4(from.ip().octets(), to.ip().octets(), HOPS)
        }
        (from, to) => {
            let octets = |at: SocketAddr| match at {
                SocketAddr::V4(at) => at.ip().to_ipv6_mapped().octets(),
                SocketAddr::V6(at) => at.ip().octets(),
            };
            PacketBuilder::ipv6(octets(from), octets(to), HOPS)
        }
    };
    let mut packet = packet.tcp(from.port(), to.port(), seq, 0).rst();
    if let Some(answer) = answer {
        packet = packet.ack(answer);
    }
    let mut bytes = Vec::with_capacity(packet.size(0));
    packet.write(&mut bytes, &[]).expect("headers fit");
    bytes
}

impl TunStreams {
    fn table(&self) -> MutexGuard<'_, TunStreamTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn over(&self, ends: StreamEndpoints) -> Arc<Notify> {
        let table = self.table();
        let passed = table.passed.get(&ends);
        passed.map(|passed| passed.over.clone()).unwrap_or_default()
    }

    /// The program sent it: whether the stack is to have it.
    fn is_for_stack(&self, packet: &[u8]) -> bool {
        let Some(segment) = TcpSegment::of(packet) else {
            return true;
        };
        let ends = (segment.from, segment.to);
        let mut table = self.table();
        let table = &mut *table;
        if segment.syn && table.passed.get(&ends).is_none_or(|passed| passed.reset) {
            let begun = TunStream {
                awaited: None,
                answer: segment.after(),
                over: Arc::default(),
                reset: false,
            };
            table.passed.insert(ends, begun);
            return true;
        }
        match table.passed.get_mut(&ends) {
            Some(passed) if passed.reset => {
                if segment.rst {
                    table.passed.remove(&ends);
                } else if let Some(seq) = segment.ack {
                    table
                        .to_program
                        .push_back(reset(segment.to, segment.from, seq, None));
                }
                false
            }
            Some(passed) => {
                if segment.rst {
                    passed.over.notify_one();
                }
                true
            }
            // It ended a while ago; the stack's own answer has a number that is not heeded.
            None => match segment.ack {
                Some(seq) if !segment.rst && !segment.fin => {
                    table
                        .to_program
                        .push_back(reset(segment.to, segment.from, seq, None));
                    false
                }
                _ => true,
            },
        }
    }

    /// The stack sent it: whether the program is to have it.
    fn is_for_program(&self, packet: &[u8]) -> bool {
        let Some(segment) = TcpSegment::of(packet) else {
            return true;
        };
        match self.table().passed.get_mut(&(segment.to, segment.from)) {
            Some(passed) if passed.reset => false,
            Some(passed) => {
                let after = segment.after();
                let is_newer = |before: u32| after.wrapping_sub(before) < 1 << 31;
                if passed.awaited.is_none_or(is_newer) {
                    passed.awaited = Some(after);
                }
                true
            }
            None => true,
        }
    }

    /// Resets it, for the program and the stack.
    fn reset(&self, ends: StreamEndpoints) {
        let mut table = self.table();
        let table = &mut *table;
        let (from, to) = ends;
        if let Some(passed) = table.passed.get_mut(&ends) {
            passed.reset = true;
            let packet = match passed.awaited {
                Some(seq) => reset(to, from, seq, None),
                None => reset(to, from, 0, Some(passed.answer)),
            };
            table.to_program.push_back(packet);
        }
        // The stack's task ends with the first packet after a reset.
        table
            .to_stack
            .extend([0, 0].map(|seq| reset(from, to, seq, None)));
        if let Some(stack) = table.stack.take() {
            stack.wake();
        }
    }

    fn forget(&self, ends: StreamEndpoints) {
        let mut table = self.table();
        if table.passed.get(&ends).is_some_and(|passed| !passed.reset) {
            table.passed.remove(&ends);
        }
    }

    /// Forgets a connection that was reset, unless the program has begun another since.
    fn forget_reset(&self, ends: StreamEndpoints, over: &Arc<Notify>) {
        let mut table = self.table();
        let is_it = |passed: &TunStream| passed.reset && Arc::ptr_eq(&passed.over, over);
        if table.passed.get(&ends).is_some_and(is_it) {
            table.passed.remove(&ends);
        }
    }
}

/// A stream of the stack's, which says its end only when it is asked again after the last packet arrived, and tells
/// nobody when that is. While the stack's task for it runs it must not be dropped: that waits for the task, which a
/// runtime of one thread cannot do.
struct TunProgramStream {
    stream: ManuallyDrop<IpStackTcpStream>,
    ends: StreamEndpoints,
    streams: TunStreams,
    /// The stack's task for it has ended, which wakes no reader.
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
    again: Option<Pin<Box<Sleep>>>,
}

/// The interval at which connections are checked for their end.
const ASKED_EVERY: Duration = Duration::from_millis(10); // a guess: nobody waits for an end of a stream longer

impl TunProgramStream {
    fn new(stream: IpStackTcpStream, streams: TunStreams) -> TunProgramStream {
        let task = stream.stream_sender();
        TunProgramStream {
            ends: (stream.local_addr(), stream.peer_addr()),
            ended: Box::pin(async move { task.closed().await }),
            stream: ManuallyDrop::new(stream),
            streams,
            again: None,
        }
    }

    /// Resets it, if it has not ended.
    async fn end(self) {
        let task = self.stream.stream_sender();
        if task.is_closed() {
            self.streams.forget(self.ends);
        } else {
            let over = self.streams.over(self.ends);
            self.streams.reset(self.ends);
            task.closed().await;
            self.streams.forget_reset(self.ends, &over);
        }
    }
}

impl Drop for TunProgramStream {
    fn drop(&mut self) {
        // Its receiver is the task's. One whose task runs is left to the end of the process, which is near.
        if self.stream.stream_sender().is_closed() {
            // SAFETY: it is used no more.
            unsafe { ManuallyDrop::drop(&mut self.stream) };
        }
    }
}

impl AsyncRead for TunProgramStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if let Poll::Ready(read) = Pin::new(&mut *this.stream).poll_read(cx, into) {
            return Poll::Ready(read);
        }
        if !this.stream.stream_sender().is_closed() {
            ready!(this.ended.as_mut().poll(cx));
        }
        Pin::new(&mut *this.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for TunProgramStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if let Poll::Ready(ended) = Pin::new(&mut *self.stream).poll_shutdown(cx) {
                return Poll::Ready(ended);
            }
            let again = self
                .again
                .get_or_insert_with(|| Box::pin(tokio::time::sleep(ASKED_EVERY)));
            ready!(again.as_mut().poll(cx));
            self.again = None;
        }
    }
}

/// The program's link as a stream of packets, one for each read and write.
struct TunLink {
    link: AsyncFd<OwnedFd>,
    streams: TunStreams,
}

impl TunLink {
    fn new(fd: OwnedFd, streams: TunStreams) -> io::Result<TunLink> {
        let flags = nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_GETFL)?;
        let flags = nix::fcntl::OFlag::from_bits_retain(flags) | nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_SETFL(flags))?;
        // SAFETY: an OwnedFd is one and the same open descriptor for as long as it lives.
        let link = unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)?;
        Ok(TunLink { link, streams })
    }

    /// Sends what is ours. A link that is full loses it, and what the program sends next is answered again.
    fn send_ours(&self) {
        let ours = std::mem::take(&mut self.streams.table().to_program);
        for packet in ours {
            // SAFETY: the packet is as long as is said.
            let _ =
                unsafe { libc::write(self.link.as_raw_fd(), packet.as_ptr().cast(), packet.len()) };
        }
    }
}

impl AsyncRead for TunLink {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            self.send_ours();
            {
                let mut table = self.streams.table();
                if let Some(packet) = table.to_stack.pop_front() {
                    into.put_slice(&packet);
                    return Poll::Ready(Ok(()));
                }
                table.stack = Some(cx.waker().clone());
            }
            let mut readable = ready!(self.link.poll_read_ready(cx))?;
            let room = into.initialize_unfilled();
            let read = readable.try_io(|fd| {
                // SAFETY: the room is ours and as long as is said.
                let n = unsafe { libc::read(fd.as_raw_fd(), room.as_mut_ptr().cast(), room.len()) };
                usize::try_from(n).map_err(|_| io::Error::last_os_error())
            });
            if let Ok(read) = read {
                let read = read?;
                if !self
                    .streams
                    .is_for_stack(&into.initialize_unfilled()[..read])
                {
                    continue;
                }
                into.advance(read);
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for TunLink {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        packet: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !self.streams.is_for_program(packet) {
            return Poll::Ready(Ok(packet.len()));
        }
        loop {
            let mut writable = ready!(self.link.poll_write_ready(cx))?;
            let wrote = writable.try_io(|fd| {
                // SAFETY: the packet is as long as is said.
                let n =
                    unsafe { libc::write(fd.as_raw_fd(), packet.as_ptr().cast(), packet.len()) };
                usize::try_from(n).map_err(|_| io::Error::last_os_error())
            });
            if let Ok(wrote) = wrote {
                return Poll::Ready(wrote);
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
