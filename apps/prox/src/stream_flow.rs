//! A flow that is a TCP or MPTCP connection: one request, its answer, the end.
//!
//! ```text
//!  source ──read at──▶ piece ──write──▶ connection      (driven by poll_finished, nobody else waits on it)
//!  its end ──▶ FIN ──▶ the client's FIN, or a while without one ──▶ finished
//! ```
//!
//! It has neither a deadline nor hibernation. A connection that is dropped before its direction was
//! ended is reset: a truncated answer or tunnel must not look complete.

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use d2tp_driver::{FlowIo, HostKey, MemoryAccount, MemoryCharge, SendSource};
use d2tp_tcp::multipath;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use crate::charged_tcp::ChargedTcp;
use crate::flow::task_bytes_of;

/// The size of reads from a source.
const PIECE_BYTES: usize = 64 * 1024;
/// How long a client that has the whole response may keep its direction open.
const FAREWELL: Duration = Duration::from_secs(30); // a guess

/// See the module.
pub struct StreamFlow {
    stream: ChargedTcp,
    id: u64,
    peer: HostKey,
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
    ) -> Option<StreamFlow> {
        let mut memory = account.charge();
        if !memory.try_resize(PIECE_BYTES as u64 + task_bytes_of::<StreamFlow>()) {
            let _ = multipath::reset(stream.as_fd());
            return None;
        }
        let stream = ChargedTcp::new(stream, sockets)?;
        Some(StreamFlow {
            stream,
            id,
            peer,
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
