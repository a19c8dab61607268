//! How many bytes wait in this host for TCP to send them: a twentieth of a second of what the connection
//! carries.
//!
//! ```text
//!  batches of the sender ─▶ kernel: unsent │ in flight ─▶ network
//!       at most one limit        one limit │ congestion window
//! ```
//!
//! A batch of up to as much waits in the connection, and the driver queues two halves before it: altogether
//! some 100 to 200 ms. What waits delays everything behind it, as an urgent flow or an ACK, and stays behind when the path is
//! abandoned. If too little waits, a program that is late leaves gaps in what TCP sends.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use d2tp_tcp::KernelBuffers;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The limit of a new connection.
const UNSENT_BYTES_FIRST: u32 = 128 * 1024; // a guess: 10 ms at 100 Mb/s
const UNSENT_BYTES_MIN: u32 = 16 * 1024; // one TLS record
const UNSENT_BYTES_MAX: u32 = 1024 * 1024;
/// The time that TCP can send from what waits. Shorter: a busy machine leaves gaps.
const UNSENT_TIME: Duration = Duration::from_millis(50); // a guess: some turns of a busy machine
/// The interval between looks at what the peer has not taken when a connection ends.
const TAKEN_LOOK_EVERY: Duration = Duration::from_millis(20);
/// The shortest time over which a rate is measured.
const MEASURED_MIN: Duration = Duration::from_millis(100);

/// Derives the limit from the rate at which the kernel takes bytes. A sender that has little to send gets a
/// small one, which grows within some tenths of a second when it has more.
#[derive(Debug)]
pub(crate) struct UnsentLimit {
    limit: u32,
    /// When the current measurement began, and the bytes since then.
    since: Option<Instant>,
    bytes: u64,
}

impl UnsentLimit {
    pub(crate) fn new() -> UnsentLimit {
        UnsentLimit {
            limit: UNSENT_BYTES_FIRST,
            since: None,
            bytes: 0,
        }
    }

    /// The current limit.
    pub(crate) fn bytes(&self) -> u32 {
        self.limit
    }

    /// Records that the kernel accepted bytes, for which it was asked at `asked`. Returns the new limit if it
    /// changed.
    pub(crate) fn on_sent(&mut self, asked: Instant, now: Instant, bytes: usize) -> Option<u32> {
        let since = *self.since.get_or_insert(asked);
        self.bytes += bytes as u64;
        let took = now.saturating_duration_since(since);
        if took < MEASURED_MIN {
            return None;
        }
        let rate = self.bytes as f64 / took.as_secs_f64();
        (self.since, self.bytes) = (Some(now), 0);
        let wanted = (rate * UNSENT_TIME.as_secs_f64()) as u32;
        // Few different values, so that the kernel is seldom told.
        let wanted = wanted
            .clamp(UNSENT_BYTES_MIN, UNSENT_BYTES_MAX)
            .next_power_of_two();
        let changed = wanted != self.limit;
        self.limit = wanted;
        changed.then_some(wanted)
    }
}

/// A TCP connection whose options can be changed while a protocol above it has it.
#[derive(Clone, Debug)]
pub(crate) struct SharedTcp(Arc<TcpStream>);

impl SharedTcp {
    pub(crate) fn new(tcp: TcpStream) -> io::Result<SharedTcp> {
        let shared = SharedTcp(Arc::new(tcp));
        shared.set_unsent_limit(UNSENT_BYTES_FIRST)?;
        Ok(shared)
    }

    /// Sets how many bytes the kernel accepts beyond those that it may send at once.
    pub(crate) fn set_unsent_limit(&self, bytes: u32) -> io::Result<()> {
        socket2::SockRef::from(&*self.0).set_tcp_notsent_lowat(bytes)
    }

    /// The connection's buffers in the kernel; nothing if it does not say.
    pub(crate) fn kernel_buffers(&self) -> KernelBuffers {
        KernelBuffers::of(self.0.as_fd()).unwrap_or_default()
    }

    /// Closes the connection. What the peer does not take within `most` is given up: the kernel would hold it for as long as
    /// it tries to deliver it, although nobody has the connection any more.
    pub(crate) async fn end(self, most: Duration) {
        let socket = socket2::SockRef::from(&*self.0);
        // Fails if the peer has reset the connection: then nothing is left.
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let taken = async {
            while self.kernel_buffers().sent > 0 {
                tokio::time::sleep(TAKEN_LOOK_EVERY).await;
            }
        };
        if tokio::time::timeout(most, taken).await.is_err()
            && let Err(error) = socket.set_linger(Some(Duration::ZERO))
        {
            tracing::debug!(%error, "the kernel goes on delivering what was written to a stream");
        }
    }

    pub(crate) fn set_send_buffer_max(&self, bytes: u64) -> io::Result<()> {
        // The kernel doubles what it is given, for its own needs.
        socket2::SockRef::from(&*self.0).set_send_buffer_size(bytes as usize / 2)
    }
}

impl AsyncRead for SharedTcp {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(into.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    into.advance(read?);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl SharedTcp {
    fn poll_try<T>(
        &self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for SharedTcp {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_try(cx, |tcp| tcp.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_try(cx, |tcp| tcp.try_write_vectored(pieces))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(socket2::SockRef::from(&*self.0).shutdown(std::net::Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Ends a connection on which some megabytes were written, while its peer reads only afterwards, or all the time.
    /// Returns how many were written, and what the peer read in the end.
    async fn end_with(reads: bool) -> io::Result<(usize, io::Result<usize>)> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        // The peer's kernel takes less than is written.
        socket2::SockRef::from(&listener).set_recv_buffer_size(16_384)?;
        let tcp = TcpStream::connect(listener.local_addr()?).await?;
        let (mut peer, _) = listener.accept()?;
        let mut rest = Vec::new();
        let read = move || peer.read_to_end(&mut rest);
        let tcp = SharedTcp::new(tcp)?;
        let mut written = 0;
        while let Ok(n) = tcp.0.try_write(&[0; 65_536]) {
            written += n;
        }
        let (most, now, later) = match reads {
            true => (
                Duration::from_secs(60),
                Some(std::thread::spawn(read)),
                None,
            ),
            false => (Duration::from_millis(1), None, Some(read)),
        };
        tcp.end(most).await;
        let read = match (now, later) {
            (Some(reader), _) => reader.join().expect("it reads"),
            (None, read) => read.map_or(Ok(0), |mut read| read()),
        };
        Ok((written, read))
    }

    #[tokio::test]
    async fn what_a_peer_does_not_take_is_not_left_with_the_kernel() -> io::Result<()> {
        let (_, read) = end_with(false).await?;
        let error = read.expect_err("it was given all of it");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        Ok(())
    }

    #[tokio::test]
    async fn what_a_peer_takes_arrives_whole_when_a_connection_ends() -> io::Result<()> {
        let (written, read) = end_with(true).await?;
        assert_eq!(read?, written);
        Ok(())
    }

    #[test]
    fn what_waits_is_a_twentieth_of_a_second_of_what_the_connection_carries() {
        let mut limit = UnsentLimit::new();
        let mut now = Instant::now();
        let mut send = |count: u32, bytes: usize, every: Duration| -> Vec<u32> {
            let mut one = || {
                let asked = now;
                now += every;
                limit.on_sent(asked, now, bytes)
            };
            (0..count).filter_map(|_| one()).collect()
        };
        // 2 Mb/s: 12.5 kB in 50 ms.
        let told = send(100, 16_384, Duration::from_micros(65_536));
        assert_eq!(told, [UNSENT_BYTES_MIN]);
        // 100 Mb/s: 625 kB.
        let told = send(1000, 16_384, Duration::from_micros(1_311));
        assert_eq!(told, [UNSENT_BYTES_MAX]);
        // Little to send says nothing of the network: what comes next must not fill its queue.
        let told = send(100, 100, Duration::from_millis(20));
        // The measurement that had begun before ends first.
        assert_eq!(told.last(), Some(&UNSENT_BYTES_MIN));
    }
}
