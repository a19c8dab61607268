//! What must outlive the agent that carries a connection, in memory that the program's library and the agent share.
//!
//! ```text
//!  program ─▶ kernel ─▶ peeked, stored, then taken ─▶ flow ─▶ acknowledged: released
//!  program ◀─ kernel ◀─ written                    ◀─ flow ◀─ stored before it is acknowledged
//! ```
//!
//! How many bytes the kernel took from the agent for the program, and how many it gave to the agent, the kernel itself
//! knows (tcp(7), TCP_INFO). So an agent may end at any instruction: the next one finds out what the program has, and what
//! of the program's the peer does not have.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{BufMut as _, BytesMut};
use d2tp_driver::ReceivedStore;
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Fields of 64 bits at the start of the memory.
#[derive(Clone, Copy)]
enum StoreField {
    /// 1 once the program's socket is connected and the next two are set.
    Joined,
    /// The kernel's counts before the first byte.
    WrittenBefore,
    TakenBefore,
    /// The offset of the program's bytes below which the peer has everything.
    Released,
    /// The offset of the flow below which everything that arrived is stored.
    Received,
    /// 1 once the peer's direction is stored with its end.
    ReceivedEnd,
    /// 1 once the peer has all of the program's direction with its end.
    SentEnd,
    /// Bytes that metered links carried for the connection.
    Paid,
    /// 1 once something could not be stored.
    Broken,
}

/// Where the program's bytes begin in the memory, and where the flow's. Only what is in use occupies memory.
const SENT_AT: u64 = 1 << 60;
const RECEIVED_AT: u64 = 1 << 61;
/// The memory that is given back at once. Larger: more memory. Smaller: more system calls.
const RELEASE_BYTES: u64 = 1 << 20; // a guess
/// The unit in which memory is given back.
const PAGE_BYTES: u64 = 4096;

/// The memory of a connection that outlives its agent.
#[derive(Debug)]
pub(crate) struct ConnectionStore {
    file: File,
    /// The offset of the next byte that is taken from the program.
    taken: AtomicU64,
    /// The offsets below which memory was given back.
    sent_freed: AtomicU64,
    received_freed: AtomicU64,
}

/// What the kernel counts of the engine's end of a program's socket, without the ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelCounts {
    /// Bytes that were written to it for the program.
    pub(crate) written: u64,
    /// Bytes of the program that were taken from it.
    pub(crate) taken: u64,
}

impl ConnectionStore {
    /// Creates empty memory.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn create() -> io::Result<OwnedFd> {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"d2tp-connection".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just created, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The memory that another process created.
    pub(crate) fn open(fd: OwnedFd) -> ConnectionStore {
        ConnectionStore {
            file: fd.into(),
            taken: AtomicU64::new(0),
            sent_freed: AtomicU64::new(0),
            received_freed: AtomicU64::new(0),
        }
    }

    fn field(&self, field: StoreField) -> u64 {
        let mut bytes = [0; 8];
        // What was never written reads as zero.
        let _ = self.file.read_at(&mut bytes, 8 * field as u64);
        u64::from_ne_bytes(bytes)
    }

    fn set(&self, field: StoreField, value: u64) {
        // The first page is written before the connection is made, so that there is room for it.
        let _ = self
            .file
            .write_all_at(&value.to_ne_bytes(), 8 * field as u64);
    }

    fn keep_bytes(&self, at: u64, bytes: &[u8]) {
        if let Err(error) = self.file.write_all_at(bytes, at) {
            tracing::warn!(%error, "a connection will not outlive this agent");
            self.set(StoreField::Broken, 1);
        }
    }

    fn bytes(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    /// Whether everything could be stored.
    pub(crate) fn is_whole(&self) -> bool {
        self.field(StoreField::Broken) == 0
    }

    /// Records that the program's socket is connected: nothing was written to it or taken from it.
    ///
    /// # Errors
    /// The kernel does not count.
    pub(crate) fn on_joined(&self, fd: RawFd) -> io::Result<()> {
        let counts = kernel_counts(fd)?;
        self.set(StoreField::WrittenBefore, counts.written);
        self.set(StoreField::TakenBefore, counts.taken);
        self.set(StoreField::Joined, 1);
        Ok(())
    }

    /// Whether the program's socket is connected.
    pub(crate) fn is_joined(&self) -> bool {
        self.field(StoreField::Joined) == 1
    }

    /// What was written to the program and taken from it so far. From here on bytes are taken after those.
    ///
    /// # Errors
    /// The kernel does not count.
    pub(crate) fn resume(&self, fd: RawFd) -> io::Result<KernelCounts> {
        let counts = kernel_counts(fd)?;
        let since = |now: u64, before| now.saturating_sub(self.field(before));
        let counts = KernelCounts {
            written: since(counts.written, StoreField::WrittenBefore),
            taken: since(counts.taken, StoreField::TakenBefore),
        };
        self.taken.store(counts.taken, Ordering::Relaxed);
        Ok(counts)
    }

    /// Takes bytes from the program's socket, which are stored before; zero at the end.
    ///
    /// # Errors
    /// Nothing is there to take (`WouldBlock`), or the socket broke.
    pub(crate) fn take(&self, stream: &TcpStream, buffer: &mut BytesMut) -> io::Result<usize> {
        stream.try_io(Interest::READABLE, || {
            let room = buffer.chunk_mut();
            let call = |to: *mut libc::c_void, len, flags| {
                // SAFETY: `to` has room for `len` bytes, or the kernel writes none there.
                let result =
                    unsafe { libc::recv(stream.as_raw_fd(), to, len, flags | libc::MSG_DONTWAIT) };
                usize::try_from(result).map_err(|_| io::Error::last_os_error())
            };
            let peeked = call(room.as_mut_ptr().cast(), room.len(), libc::MSG_PEEK)?;
            // SAFETY: the kernel wrote that many bytes.
            unsafe { buffer.advance_mut(peeked) };
            let at = self.taken.load(Ordering::Relaxed);
            let first = buffer.len() - peeked;
            self.keep_bytes(SENT_AT + at, &buffer[first..]);
            let mut dropped = 0;
            while dropped < peeked {
                // Nobody else reads, so what was peeked is there.
                match call(std::ptr::null_mut(), peeked - dropped, libc::MSG_TRUNC) {
                    Ok(0) => break,
                    Ok(more) => dropped += more,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            self.taken.store(at + peeked as u64, Ordering::Relaxed);
            Ok(peeked)
        })
    }

    /// The offset of the next byte that is taken from the program.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// The program's bytes from this offset on, as they were taken.
    ///
    /// # Errors
    /// They are not stored any more.
    pub(crate) fn sent_bytes(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        if offset < self.released() {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.bytes(SENT_AT + offset, len)
    }

    /// The offset of the program's bytes below which the peer has everything.
    pub(crate) fn released(&self) -> u64 {
        self.field(StoreField::Released)
    }

    /// Records that the peer has the program's bytes below this offset.
    pub(crate) fn release_sent(&self, to: u64) {
        if to > self.sent_freed.load(Ordering::Relaxed) {
            self.set(StoreField::Released, to);
            self.free(&self.sent_freed, SENT_AT, to);
        }
    }

    /// Records that the peer has all of the program's direction, its end included.
    pub(crate) fn sent_end(&self) {
        self.set(StoreField::SentEnd, 1);
    }

    /// The offset of the flow below which everything that arrived is stored.
    pub(crate) fn received(&self) -> u64 {
        self.field(StoreField::Received)
    }

    /// Whether the peer's direction is stored with its end.
    pub(crate) fn is_received_whole(&self) -> bool {
        self.field(StoreField::ReceivedEnd) == 1
    }

    /// Whether both directions are over at the peer: only the program may lack bytes.
    pub(crate) fn is_over_at_peer(&self) -> bool {
        self.is_received_whole() && self.field(StoreField::SentEnd) == 1
    }

    /// Bytes of the flow that arrived, from this offset on.
    ///
    /// # Errors
    /// They are not stored any more.
    pub(crate) fn received_bytes(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        self.bytes(RECEIVED_AT + offset, len)
    }

    /// Records that the program's socket has the flow's bytes below this offset.
    pub(crate) fn release_received(&self, to: u64) {
        self.free(&self.received_freed, RECEIVED_AT, to);
    }

    /// Bytes that metered links carried for the connection, as it was recorded last.
    pub(crate) fn paid(&self) -> u64 {
        self.field(StoreField::Paid)
    }

    /// Records how many bytes metered links have carried for the connection.
    pub(crate) fn set_paid(&self, bytes: u64) {
        if self.paid() != bytes {
            self.set(StoreField::Paid, bytes);
        }
    }

    /// Gives memory back, once it is enough.
    fn free(&self, freed: &AtomicU64, base: u64, to: u64) {
        let from = freed.load(Ordering::Relaxed);
        let to = to / PAGE_BYTES * PAGE_BYTES;
        if to < from + RELEASE_BYTES {
            return;
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (at, len) = ((base + from) as libc::off_t, (to - from) as libc::off_t);
        // If it fails, the memory is given back with the connection. SAFETY: the arguments are plain numbers.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, at, len) };
        freed.store(to, Ordering::Relaxed);
    }
}

impl ReceivedStore for ConnectionStore {
    fn keep(&self, offset: u64, bytes: &[u8]) {
        self.keep_bytes(RECEIVED_AT + offset, bytes);
    }

    fn commit(&self, offset: u64, is_end: bool) {
        self.set(StoreField::Received, offset);
        if is_end {
            self.set(StoreField::ReceivedEnd, 1);
        }
    }
}

/// What the kernel counts of a connected TCP socket.
///
/// # Errors
/// It is no TCP socket, or the kernel is older than 4.1.
pub(crate) fn kernel_counts(fd: RawFd) -> io::Result<KernelCounts> {
    loop {
        let before = TcpCounts::of(fd)?;
        let (unacked, unread) = (queued(fd, libc::TIOCOUTQ)?, queued(fd, libc::FIONREAD)?);
        // The kernel counts while it is asked.
        if TcpCounts::of(fd)? == before {
            return Ok(KernelCounts {
                written: (before.acked + unacked).saturating_sub(u64::from(before.has_sent_end())),
                taken: before
                    .received
                    .saturating_sub(unread + u64::from(before.has_received_end())),
            });
        }
    }
}

/// The counts of a TCP socket, in which an end is a byte.
#[derive(Clone, Copy, PartialEq, Eq)]
struct TcpCounts {
    state: u8,
    acked: u64,
    received: u64,
}

impl TcpCounts {
    fn of(fd: RawFd) -> io::Result<TcpCounts> {
        /// Where `struct tcp_info` has its counts (linux/tcp.h).
        const ACKED_AT: usize = 120;
        const RECEIVED_AT: usize = 128;
        let mut info = [0u8; RECEIVED_AT + 8];
        let mut len = info.len() as libc::socklen_t;
        // SAFETY: the buffer has this length.
        let result = unsafe {
            libc::getsockopt(
                fd,
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        if (len as usize) < info.len() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let word = |at: usize| {
            let bytes = info[at..at + 8].try_into().expect("eight bytes");
            u64::from_ne_bytes(bytes)
        };
        Ok(TcpCounts {
            state: info[0],
            acked: word(ACKED_AT),
            received: word(RECEIVED_AT),
        })
    }

    /// States of the kernel (net/tcp_states.h): FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE, LAST_ACK, CLOSING.
    fn has_sent_end(self) -> bool {
        matches!(self.state, 4..=7 | 9 | 11)
    }

    /// TIME_WAIT, CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING.
    fn has_received_end(self) -> bool {
        matches!(self.state, 6..=9 | 11)
    }
}

/// How many bytes are in a queue of a socket.
fn queued(fd: RawFd, which: libc::Ioctl) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: both calls write an int.
    if unsafe { libc::ioctl(fd, which, &raw mut bytes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::{self, PairPort};
    use socket2::{Domain, Protocol, SockAddr, Socket, Type};
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, SocketAddrV4};

    /// A program's socket, and the engine's end with its store.
    async fn joined() -> (std::net::TcpStream, TcpStream, ConnectionStore) {
        let port = PairPort::take().expect("a port");
        let program = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).expect("one");
        let here: SockAddr = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0).into();
        program.bind(&here).expect("bind");
        let at = program.local_addr().expect("one").as_socket_ipv4();
        let at = at.expect("an address").port();
        program.set_nonblocking(true).expect("a flag");
        let there: SockAddr = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port.number()).into();
        let _ = program.connect(&there);
        let end = port.detachable_end().expect("an end");
        let stream = pair::join(end, at).await.expect("it waits");
        program.set_nonblocking(false).expect("a flag");
        let store = ConnectionStore::open(ConnectionStore::create().expect("memory"));
        assert!(!store.is_joined());
        store.on_joined(stream.as_raw_fd()).expect("counts");
        assert!(store.is_joined());
        (program.into(), stream, store)
    }

    fn counts(store: &ConnectionStore, stream: &TcpStream) -> (u64, u64) {
        let counts = store.resume(stream.as_raw_fd()).expect("counts");
        (counts.written, counts.taken)
    }

    #[tokio::test]
    async fn the_kernel_knows_what_was_written_and_what_was_taken() {
        let (mut program, stream, store) = joined().await;
        assert_eq!(counts(&store, &stream), (0, 0));
        program.write_all(&[1; 5000]).expect("room");
        stream.writable().await.expect("room");
        assert_eq!(stream.try_write(&[2; 700]).expect("room"), 700);
        assert_eq!(counts(&store, &stream), (700, 0));
        let mut buffer = BytesMut::with_capacity(3000);
        stream.readable().await.expect("bytes");
        let took = store.take(&stream, &mut buffer).expect("bytes") as u64;
        assert!((1..=5000).contains(&took));
        assert_eq!(counts(&store, &stream), (700, took));
        assert_eq!(store.taken(), took);
        program.read_exact(&mut [0; 300]).expect("bytes");
        assert_eq!(counts(&store, &stream), (700, took));
        // Ends are no bytes, read or not.
        program.shutdown(std::net::Shutdown::Write).expect("an end");
        let mut all = took;
        loop {
            assert_eq!(counts(&store, &stream), (700, all));
            stream.readable().await.expect("bytes");
            let mut buffer = BytesMut::with_capacity(3000);
            match store.take(&stream, &mut buffer) {
                Ok(0) => break,
                Ok(more) => all += more as u64,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        assert_eq!((all, counts(&store, &stream)), (5000, (700, 5000)));
        crate::program_stream::end(&stream).expect("an end");
        assert_eq!(counts(&store, &stream), (700, 5000));
        let mut rest = Vec::new();
        program.read_to_end(&mut rest).expect("bytes");
        assert_eq!(rest.len(), 400);
        assert_eq!(counts(&store, &stream), (700, 5000));
    }

    #[tokio::test]
    async fn what_was_taken_is_there_until_the_peer_has_it() {
        let (mut program, stream, store) = joined().await;
        let text: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 7) as u8).collect();
        let written = text.clone();
        let writing = std::thread::spawn(move || program.write_all(&written).map(|()| program));
        let mut buffer = BytesMut::with_capacity(1 << 20);
        while store.taken() < text.len() as u64 {
            stream.readable().await.expect("bytes");
            buffer.clear();
            buffer.reserve(1 << 20);
            let _ = store.take(&stream, &mut buffer);
        }
        assert_eq!(store.sent_bytes(0, text.len()).expect("all"), text);
        store.release_sent(2 << 20);
        assert_eq!(store.released(), 2 << 20);
        assert!(store.sent_bytes((2 << 20) - 1, 1).is_err());
        assert_eq!(
            store.sent_bytes(2 << 20, 9).expect("some"),
            text[2 << 20..][..9]
        );
        let used = || {
            use std::os::unix::fs::MetadataExt as _;
            store.file.metadata().expect("it is open").blocks() * 512
        };
        assert!(used() < 3 << 19, "{}", used());
        store.keep(1000, b"arrived");
        store.commit(1007, true);
        assert_eq!(store.received_bytes(1003, 4).expect("some"), b"ived");
        assert!(store.is_received_whole() && !store.is_over_at_peer());
        store.sent_end();
        assert!(store.is_over_at_peer() && store.is_whole());
        drop(writing.join().expect("it ends"));
    }
}
