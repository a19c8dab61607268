//! A TCP connection whose buffers in the kernel are charged to the client for whom it exists.
//!
//! ```text
//!  new: what the kernel gives a new socket
//!   │ bytes move: the kernel enlarges the buffers ─▶ charged too, while the client uses less than a third of its
//!   ▼                                                part, and all of the whole: the rest is for small connections
//!  otherwise the limits are set to what is charged, and of a new connection to the least
//! ```
//!
//! The kernel holds what it has promised to take, so its limits are charged, not what is in the buffers. They are
//! compared after this process has read or written: that is when the kernel enlarges a receive buffer as a rule. A send
//! buffer may grow as the peer acknowledges, and is compared with the next bytes.

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use d2tp_driver::{MemoryAccount, MemoryCharge};
use d2tp_tcp::KernelBuffers;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The limits of a new connection's buffers where the client uses much of its part, as the kernel counts. All
/// connections that a client may have fit into what is left then. Smaller: fewer bytes in a round trip.
const RECEIVE_BYTES_MIN: u64 = 112 * 1024; // a guess: what the kernel begins with, and a little less
const SEND_BYTES_MIN: u64 = 16 * 1024; // a guess: a record of TLS
/// The part of a client's memory, and of all clients', that connections may use with larger buffers.
const LARGE_PART: u64 = 3;
/// The bytes that are read or written between two comparisons. Larger: more is held beyond what is charged when
/// the memory is used up. Smaller: more system calls.
const COMPARED_BYTES: usize = 64 * 1024;

/// A TCP connection, charged to a client.
#[derive(Debug)]
pub(crate) struct ChargedTcp {
    tcp: TcpStream,
    account: MemoryAccount,
    memory: MemoryCharge,
    limits: KernelBuffers,
    /// Bytes read and written since the last comparison.
    moved: usize,
    /// Whether the kernel enlarges neither buffer any more.
    is_held: bool,
}

impl ChargedTcp {
    /// Charges a new connection. None if the client has no room for it: then it is closed.
    pub(crate) fn new(tcp: TcpStream, account: &MemoryAccount) -> Option<ChargedTcp> {
        let limits = KernelBuffers::of(tcp.as_fd()).unwrap_or_default();
        let mut charged = ChargedTcp {
            tcp,
            account: account.clone(),
            memory: account.charge(),
            limits,
            moved: 0,
            is_held: false,
        };
        if charged.memory.is_counted() && !charged.grow(limits) {
            charged.limits.receive_max = limits.receive_max.min(RECEIVE_BYTES_MIN);
            charged.limits.send_max = limits.send_max.min(SEND_BYTES_MIN);
            if !charged.memory.try_resize(charged.limits.max()) {
                return None;
            }
            charged.hold();
        }
        Some(charged)
    }

    /// The connection without its charge, for another process.
    pub(crate) fn into_std(self) -> io::Result<std::net::TcpStream> {
        self.tcp.into_std()
    }

    /// The connection itself.
    pub(crate) fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Charges larger limits, if the client, and all together, use little enough of their memory.
    fn grow(&mut self, limits: KernelBuffers) -> bool {
        let more = limits.max().saturating_sub(self.memory.bytes());
        let (used, room) = (self.account.used(), self.account.room());
        let (of_all, max) = self.account.used_by_all();
        let fits = used + more <= used.saturating_add(room) / LARGE_PART
            && of_all + more <= max / LARGE_PART;
        let fits = fits && self.memory.try_resize(limits.max());
        if fits {
            self.limits = limits;
        }
        fits
    }

    /// Keeps the kernel from enlarging the buffers beyond what is charged.
    fn hold(&mut self) {
        self.is_held = true;
        let socket = SockRef::from(&self.tcp);
        // The kernel doubles what it is given, for its own needs.
        let set = socket.set_recv_buffer_size(self.limits.receive_max as usize / 2);
        let set = set.and(socket.set_send_buffer_size(self.limits.send_max as usize / 2));
        if let Err(error) = set {
            tracing::debug!(%error, "the buffers of a connection stay as the kernel tunes them");
        }
        // The system has a maximum of its own for limits that a program sets.
        if let Ok(now) = KernelBuffers::of(self.tcp.as_fd()) {
            self.limits = now;
            self.memory.resize(now.max());
        }
    }

    fn on_moved(&mut self, bytes: usize) {
        self.moved += bytes;
        if self.moved < COMPARED_BYTES || self.is_held || !self.memory.is_counted() {
            return;
        }
        self.moved = 0;
        let Ok(now) = KernelBuffers::of(self.tcp.as_fd()) else {
            return;
        };
        let grown =
            now.receive_max > self.limits.receive_max || now.send_max > self.limits.send_max;
        if grown && !self.grow(now) {
            self.hold();
        }
    }
}

impl AsyncRead for ChargedTcp {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let poll = Pin::new(&mut self.tcp).poll_read(cx, buf);
        self.on_moved(buf.filled().len() - before);
        poll
    }
}

impl AsyncWrite for ChargedTcp {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.tcp).poll_write(cx, bytes);
        if let Poll::Ready(Ok(written)) = &poll {
            self.on_moved(*written);
        }
        poll
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.tcp).poll_write_vectored(cx, pieces);
        if let Poll::Ready(Ok(written)) = &poll {
            self.on_moved(*written);
        }
        poll
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_driver::{MemoryPool, PublicKey};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    /// Connections to a peer that sends without end.
    async fn connections(count: usize, account: &MemoryAccount) -> Vec<ChargedTcp> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move { while stream.write_all(&[7; 1 << 16]).await.is_ok() {} });
            }
        });
        let mut all = Vec::new();
        for _ in 0..count {
            let tcp = TcpStream::connect(at).await.unwrap();
            all.extend(ChargedTcp::new(tcp, account));
        }
        all
    }

    fn held(all: &[ChargedTcp]) -> (u64, u64) {
        let of = |tcp: &ChargedTcp| {
            let kernel = KernelBuffers::of(tcp.tcp.as_fd()).unwrap();
            (kernel.received + kernel.sent, tcp.memory.bytes())
        };
        let sum = |a: (u64, u64), b: (u64, u64)| (a.0 + b.0, a.1 + b.1);
        all.iter().map(of).fold((0, 0), sum)
    }

    #[tokio::test]
    async fn what_the_kernel_holds_for_connections_that_nobody_reads_any_more_was_charged() {
        let pool = MemoryPool::new(5 * 48 * (1 << 20));
        let account = pool.account(PublicKey([1; 32]));
        let mut reading = tokio::task::JoinSet::new();
        for mut tcp in connections(10, &account).await {
            reading.spawn(async move {
                // So that the kernel enlarges its buffers.
                let mut read = vec![0; 1 << 16];
                for _ in 0..40 {
                    tcp.read_exact(&mut read).await.unwrap();
                }
                tcp
            });
        }
        let all = reading.join_all().await;
        let is_large = |tcp: &ChargedTcp| tcp.limits.receive_max > RECEIVE_BYTES_MIN;
        assert!(all.iter().any(is_large), "the kernel enlarged some");
        assert!(!all.iter().all(is_large), "there was no room for all");
        let mut most = 0;
        for _ in 0..10 {
            // sleep: the kernel says nothing when a buffer is full.
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            let (kernel, charged) = held(&all);
            assert!(
                kernel <= charged,
                "{kernel} bytes are held, {charged} charged"
            );
            assert_eq!(charged, pool.used());
            most = most.max(kernel);
        }
        assert!(most > 10 * 50_000, "the buffers are full: {most} bytes");
        assert!(pool.used() <= 48 << 20, "{}", pool.used());
        drop(all);
        assert_eq!(pool.used(), 0);
    }

    #[tokio::test]
    async fn large_buffers_of_some_clients_leave_room_for_the_connections_of_many() {
        let pool = MemoryPool::new(256 << 20);
        let mut all = Vec::new();
        for number in 0..600_u16 {
            let mut key = [0; 32];
            key[..2].copy_from_slice(&number.to_be_bytes());
            all.extend(connections(1, &pool.account(PublicKey(key))).await);
        }
        assert_eq!(all.len(), 600);
    }

    #[tokio::test]
    async fn a_connection_for_which_its_client_has_no_room_is_closed() {
        let pool = MemoryPool::new(5 * 300 * 1024);
        let account = pool.account(PublicKey([1; 32]));
        let all = connections(8, &account).await;
        assert_eq!(all.len(), 2);
        assert_eq!(pool.used(), 2 * (RECEIVE_BYTES_MIN + SEND_BYTES_MIN));
    }

    #[test]
    fn all_connections_of_a_client_fit_its_part_beside_large_ones() {
        let limits = crate::ProxConfig::default();
        let share = MemoryPool::new(limits.socket_memory_bytes_max())
            .account(PublicKey([1; 32]))
            .room();
        let small = u64::from(limits.client_flows_max) * (RECEIVE_BYTES_MIN + SEND_BYTES_MIN);
        assert!(small <= share - share / LARGE_PART, "{small} of {share}");
    }
}
