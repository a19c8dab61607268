//! What a program sends into its only link: streams become flows, questions for names are answered, the
//! rest is dropped.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use cedos_agent::proxy::{Line, Target, Wish};
use d2tp_catch::Names;
use ipstack::{IpStack, IpStackConfig, IpStackStream, IpStackTcpStream, TcpConfig, TcpOptions};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional};
use tokio::time::Sleep;

/// The stack gives up a connection that was silent for so long.
const SILENT_MAX: Duration = Duration::from_secs(24 * 3600); // docs/proxy.md: tunnel_idle_s

/// Questions are short, and so is who asks them.
const QUESTION_BYTES_MAX: usize = 1500;
const UDP_SILENT_MAX: Duration = Duration::from_secs(5); // a guess
const DNS_PORT: u16 = 53;

/// Serves the program's link until it is gone.
pub async fn take_packets(
    tun: OwnedFd,
    mtu: u16,
    line: Arc<Line>,
    wish: Wish,
    names: Arc<Names>,
) -> io::Result<()> {
    let mut tcp = TcpConfig::default();
    tcp.timeout = SILENT_MAX;
    tcp.close_wait_timeout = SILENT_MAX;
    // Both headers at their longest (RFC 8200 §3, RFC 9293 §3.1).
    tcp.options = Some(vec![TcpOptions::MaximumSegmentSize(mtu - 40 - 60)]);
    let mut config = IpStackConfig::default();
    config.mtu_unchecked(mtu).udp_timeout(UDP_SILENT_MAX);
    config.with_tcp_config(tcp);
    let mut stack = IpStack::new(config, Tun::new(tun)?);
    loop {
        match stack.accept().await.map_err(io::Error::other)? {
            IpStackStream::Tcp(program) => {
                tokio::spawn(stream(program, line.clone(), wish, names.clone()));
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
                tracing::debug!(to = %stray.peer_addr(), "a datagram goes nowhere");
            }
            IpStackStream::UnknownTransport(_) | IpStackStream::UnknownNetwork(_) => {}
        }
    }
}

async fn stream(program: IpStackTcpStream, line: Arc<Line>, wish: Wish, names: Arc<Names>) {
    let to = program.peer_addr();
    let mut program = Closing {
        program,
        again: None,
    };
    let target = match names.name_of(to.ip()) {
        Ok(None) => Target::from(to),
        Ok(Some(host)) => Target {
            host,
            port: to.port(),
        },
        Err(text) => return tracing::warn!("{text}"),
    };
    let mut open = match line.open(&target, wish).await {
        Ok(open) => open,
        Err(refusal) => return tracing::warn!(%target, "{}", refusal.text),
    };
    match copy_bidirectional(&mut program, &mut open).await {
        Ok(_) => open.settle().await,
        Err(error) => tracing::debug!(%target, %error, "broken off"),
    }
}

/// A stream of the stack's, which says its end only when it is asked again after the last packet arrived, and tells
/// nobody when that is.
struct Closing {
    program: IpStackTcpStream,
    again: Option<Pin<Box<Sleep>>>,
}

/// How often it is asked.
const ASKED_EVERY: Duration = Duration::from_millis(10); // a guess: nobody waits for an end of a stream longer

impl AsyncRead for Closing {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.program).poll_read(cx, into)
    }
}

impl AsyncWrite for Closing {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.program).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.program).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if let Poll::Ready(ended) = Pin::new(&mut self.program).poll_shutdown(cx) {
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
struct Tun(AsyncFd<OwnedFd>);

impl Tun {
    fn new(fd: OwnedFd) -> io::Result<Tun> {
        let flags = nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_GETFL)?;
        let flags = nix::fcntl::OFlag::from_bits_retain(flags) | nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_SETFL(flags))?;
        // SAFETY: an OwnedFd is one and the same open descriptor for as long as it lives.
        Ok(Tun(
            unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)?
        ))
    }
}

impl AsyncRead for Tun {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut readable = ready!(self.0.poll_read_ready(cx))?;
            let room = into.initialize_unfilled();
            let read = readable.try_io(|fd| {
                // SAFETY: the room is ours and as long as is said.
                let n = unsafe { libc::read(fd.as_raw_fd(), room.as_mut_ptr().cast(), room.len()) };
                usize::try_from(n).map_err(|_| io::Error::last_os_error())
            });
            if let Ok(read) = read {
                into.advance(read?);
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for Tun {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        packet: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut writable = ready!(self.0.poll_write_ready(cx))?;
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
