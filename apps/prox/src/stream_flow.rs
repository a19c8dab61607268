//! A flow that is a TCP or MPTCP connection: one request, its answer, the end.
//!
//! ```text
//!  source ──read at──▶ piece ──write──▶ connection      (driven by poll_finished, nobody else waits on it)
//!  its end ──▶ FIN ──▶ the client's FIN, or a while without one ──▶ finished
//! ```
//!
//! It has neither a deadline nor hibernation. A connection that is dropped before its direction was
//! ended is reset: a truncated answer or tunnel must not look complete. A client that begins with HTTP/2 has many flows on
//! one connection instead (`http2_conn.rs`).

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use cedos_http::http2::HTTP2_PREFACE;
use d2tp_driver::{FlowIo, HostKey, MemoryAccount, MemoryCharge, SendSource};
use d2tp_tcp::multipath;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use crate::charged_tcp::ChargedTcp;

/// The size of reads from a source.
const PIECE_BYTES: usize = 64 * 1024;
/// How long a client that has the whole response may keep its direction open.
const FAREWELL: Duration = Duration::from_secs(30); // a guess

/// What a client's first bytes begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionBeginning {
    /// A connection of HTTP/2, by its preface.
    Http2,
    /// A request of HTTP/1 for a path, as web servers get it.
    Path,
    /// Anything else: a request for a proxy.
    ProxyRequest,
}

/// The beginnings that are looked for.
const BEGINNINGS: [(&[u8], ConnectionBeginning); 3] = [
    (HTTP2_PREFACE, ConnectionBeginning::Http2),
    (b"GET /", ConnectionBeginning::Path),
    (b"HEAD /", ConnectionBeginning::Path),
];

/// A flow as a byte stream for tokio.
pub struct StreamFlow {
    stream: ChargedTcp,
    id: u64,
    peer: HostKey,
    /// Bytes that were read to see what begins, and are read again.
    first: Bytes,
    source: Option<Arc<dyn SendSource>>,
    offset: u64,
    /// Bytes that were read from the source and not written yet.
    piece: Bytes,
    /// Whether the source has ended and FIN is not sent yet.
    ending: bool,
    /// Whether our FIN was sent.
    sent_end: bool,
    /// Whether the client's FIN was received.
    has_ended: bool,
    broken: Option<io::ErrorKind>,
    farewell: Option<Pin<Box<Sleep>>>,
    /// What the connection and its task occupy, charged to the client.
    _memory: MemoryCharge,
}

impl StreamFlow {
    /// A flow of this client; none where its account has no room for one.
    pub(crate) fn new(
        stream: TcpStream,
        id: u64,
        peer: HostKey,
        account: &MemoryAccount,
        sockets: &MemoryAccount,
        task_bytes: u64,
    ) -> Option<StreamFlow> {
        let mut memory = account.charge();
        if !memory.try_resize(PIECE_BYTES as u64 + task_bytes) {
            let _ = multipath::reset(stream.as_fd());
            return None;
        }
        let stream = ChargedTcp::new(stream, sockets)?;
        Some(StreamFlow {
            stream,
            id,
            peer,
            first: Bytes::new(),
            source: None,
            offset: 0,
            piece: Bytes::new(),
            ending: false,
            sent_end: false,
            has_ended: false,
            broken: None,
            farewell: None,
            _memory: memory,
        })
    }

    /// From now on the flow counts as this client's.
    pub(crate) fn set_peer(&mut self, peer: HostKey) {
        self.peer = peer;
    }

    /// What the client begins. May be dropped and called again. What was read is read again.
    pub(crate) async fn beginning(&mut self) -> ConnectionBeginning {
        loop {
            let count = self.first.len();
            let found = BEGINNINGS
                .iter()
                .find(|(text, _)| self.first.starts_with(text));
            if let Some((_, beginning)) = found {
                return *beginning;
            }
            // The longest that is still possible says how many bytes may be missing.
            let possible = BEGINNINGS
                .iter()
                .filter(|(text, _)| text.starts_with(&self.first));
            let Some(longest) = possible.map(|(text, _)| text.len()).max() else {
                return ConnectionBeginning::ProxyRequest;
            };
            let mut more = [0; HTTP2_PREFACE.len()];
            let more = &mut more[..longest - count];
            match self.stream.read(more).await {
                Ok(0) => {
                    self.has_ended = true;
                    return ConnectionBeginning::ProxyRequest;
                }
                Ok(read) => self.first = [&self.first[..], &more[..read]].concat().into(),
                // The next read tells it.
                Err(_) => return ConnectionBeginning::ProxyRequest,
            }
        }
    }

    /// Records an error.
    fn note<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &result {
            self.broken = Some(error.kind());
        }
        result
    }

    /// Ready when the end of the source was sent.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.piece.has_remaining() {
                let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.piece));
                let written = self.note(written)?;
                self.piece.advance(written);
            } else if self.ending {
                return Pin::new(self).poll_shutdown(cx);
            } else {
                let Some(source) = &self.source else {
                    return Poll::Pending;
                };
                let piece = ready!(source.poll_read_at(cx, self.offset, PIECE_BYTES));
                self.piece = self.note(piece)?;
                self.offset += self.piece.len() as u64;
                self.ending = self.piece.is_empty();
            }
        }
    }
}

impl AsyncRead for StreamFlow {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.has_remaining() {
            let count = self.first.len().min(buf.remaining());
            buf.put_slice(&self.first.split_to(count));
            return Poll::Ready(Ok(()));
        }
        let (before, room) = (buf.filled().len(), buf.remaining());
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
        self.has_ended |= read.is_ok() && room > 0 && buf.filled().len() == before;
        Poll::Ready(self.note(read))
    }
}

impl AsyncWrite for StreamFlow {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes));
        Poll::Ready(self.note(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, pieces));
        Poll::Ready(self.note(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.sent_end {
            let ended = ready!(Pin::new(&mut self.stream).poll_shutdown(cx));
            self.note(ended)?;
            self.sent_end = true;
        }
        Poll::Ready(Ok(()))
    }
}

impl FlowIo for StreamFlow {
    fn id(&self) -> u64 {
        self.id
    }

    fn peer(&self) -> HostKey {
        self.peer
    }

    fn deadline_left(&self) -> Option<Duration> {
        None
    }

    fn limit_moved_deadlines(&mut self, _max: Duration) {}

    fn send_source(&mut self, source: Arc<dyn SendSource>) {
        self.source = Some(source);
    }

    fn reset(&mut self, _code: u64) {
        // TCP has no code to tell.
        self.broken = Some(io::ErrorKind::ConnectionReset);
        self.sent_end = false;
    }

    fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(kind) = self.broken {
            return Poll::Ready(Err(kind.into()));
        }
        if !self.sent_end {
            ready!(self.poll_send(cx))?;
        }
        if self.has_ended {
            return Poll::Ready(Ok(()));
        }
        let farewell = self
            .farewell
            .get_or_insert_with(|| Box::pin(sleep(FAREWELL)));
        farewell.as_mut().poll(cx).map(Ok)
    }
}

impl Drop for StreamFlow {
    fn drop(&mut self) {
        if !self.sent_end {
            let _ = multipath::reset(self.stream.tcp().as_fd());
        }
    }
}
