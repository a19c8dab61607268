//! A flow that is a stream of HTTP/2: one request, its answer, the end.
//!
//! ```text
//!  HEADERS, DATA ──▶ the request's head as HTTP/1.1 writes it, then its body ──▶ flow.rs, as for any flow
//!  HEADERS, DATA ◀── an answer's head is read back, its body goes on ◀────────── answer.rs, tunnel.rs, upload.rs
//! ```
//!
//! What is written as HTTP/1.1 is checked as such (`request.rs`), so a stream may ask for what a connection may. A flow
//! that is dropped before its end was sent is reset: a truncated answer or tunnel must not look complete. The flow is over
//! when the connection has taken its last byte.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use cedos_http::http2::{CancelCount, join_cookies};
use d2tp_driver::{FlowIo, HostKey, MemoryAccount, MemoryCharge, SendSource};
use futures_util::task::AtomicWaker;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::request::strip_hop_by_hop;
use crate::request_head::head_end;

/// The size of reads from a source, and the bytes of a stream that wait in its connection.
pub(crate) const PIECE_BYTES: usize = 64 * 1024;

/// Bytes that a client may send on a stream before they are read. Larger: uploads over longer round trips, 256 KiB in each;
/// it is charged for streams with a body.
pub(crate) const WINDOW_BYTES: u32 = 256 * 1024; // a guess: 5 MB/s with 50 ms

/// A flow that is a stream of HTTP/2.
pub struct Http2Flow {
    id: u64,
    peer: HostKey,
    /// The rest of the request's head.
    head: Bytes,
    body: RecvStream,
    /// The rest of the last DATA.
    data: Bytes,
    /// Whether something was read from the flow.
    was_read: bool,
    has_ended: bool,
    reply: Arc<Mutex<Http2Reply>>,
    answer: AnswerState,
    method: Method,
    source: Option<Arc<dyn SendSource>>,
    offset: u64,
    /// Bytes that were read from the source and not written yet.
    piece: Bytes,
    /// Whether the source has ended.
    ending: bool,
    unsent: Arc<UnsentPieces>,
    broken: Option<io::ErrorKind>,
    /// Whether this end has reset the stream.
    has_reset: bool,
    cancels: Arc<CancelCount>,
    /// What the stream and its task occupy, charged to the client.
    _memory: MemoryCharge,
}

/// How much of the answer was written.
enum AnswerState {
    /// The head, as far as it came.
    Head(Vec<u8>),
    Body,
    /// END_STREAM was sent.
    Ended,
}

/// The half of a stream that is sent.
struct Http2Reply {
    half: ReplyHalf,
    /// What waits for the stream. h2 knows one waker of a stream.
    waker: Waker,
}

enum ReplyHalf {
    Unanswered(SendResponse<Http2Piece>),
    Answered(SendStream<Http2Piece>),
}

impl Http2Reply {
    /// Ready when the client has reset the stream, or the connection is gone.
    fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.clone_from(cx.waker());
        self.poll_reset_again()
    }

    /// Whether the client has reset the stream, or the connection is gone. What waits for the stream is still woken.
    fn poll_reset_again(&mut self) -> Poll<()> {
        let mut cx = Context::from_waker(&self.waker);
        let reset = match &mut self.half {
            ReplyHalf::Unanswered(reply) => reply.poll_reset(&mut cx),
            ReplyHalf::Answered(stream) => stream.poll_reset(&mut cx),
        };
        reset.map(drop)
    }

    fn send_reset(&mut self, reason: Reason) {
        match &mut self.half {
            ReplyHalf::Unanswered(reply) => reply.send_reset(reason),
            ReplyHalf::Answered(stream) => stream.send_reset(reason),
        }
    }

    /// How many of these bytes of the body may be sent.
    fn poll_room(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<io::Result<usize>> {
        self.waker.clone_from(cx.waker());
        let ReplyHalf::Answered(stream) = &mut self.half else {
            return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
        };
        stream.reserve_capacity(bytes.min(PIECE_BYTES));
        while stream.capacity() == 0 {
            match ready!(stream.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(broken(error))),
                None => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            }
        }
        Poll::Ready(Ok(stream.capacity().min(bytes)))
    }

    fn send_data(&mut self, piece: Http2Piece, is_last: bool) -> io::Result<()> {
        match &mut self.half {
            ReplyHalf::Answered(stream) => stream.send_data(piece, is_last).map_err(broken),
            ReplyHalf::Unanswered(_) => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

impl Http2Flow {
    /// A flow of this client; none where its account has no room for one. Then the stream is refused, and the client may ask
    /// again.
    pub(crate) fn new(
        request: Request<RecvStream>,
        mut reply: SendResponse<Http2Piece>,
        (id, peer): (u64, HostKey),
        account: &MemoryAccount,
        task_bytes: u64,
        cancels: &Arc<CancelCount>,
    ) -> Option<Http2Flow> {
        let window = match request.body().is_end_stream() {
            true => 0,
            false => u64::from(WINDOW_BYTES),
        };
        let mut memory = account.charge();
        if !memory.try_resize(PIECE_BYTES as u64 + window + task_bytes) {
            reply.send_reset(Reason::REFUSED_STREAM);
            return None;
        }
        let head = request_head(&request).into();
        let method = request.method().clone();
        Some(Http2Flow {
            id,
            peer,
            head,
            body: request.into_body(),
            data: Bytes::new(),
            was_read: false,
            has_ended: false,
            reply: Arc::new(Mutex::new(Http2Reply {
                half: ReplyHalf::Unanswered(reply),
                waker: Waker::noop().clone(),
            })),
            answer: AnswerState::Head(Vec::new()),
            method,
            source: None,
            offset: 0,
            piece: Bytes::new(),
            ending: false,
            unsent: Arc::default(),
            broken: None,
            has_reset: false,
            cancels: cancels.clone(),
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

    fn has_sent_end(&self) -> bool {
        matches!(self.answer, AnswerState::Ended)
    }

    /// Writes the first of these bytes of an answer. Ready with their number.
    fn poll_send_bytes(&mut self, cx: &mut Context<'_>, bytes: &Bytes) -> Poll<io::Result<usize>> {
        let sent = match self.answer {
            AnswerState::Head(_) => self.send_head_bytes(bytes),
            AnswerState::Body => {
                let mut reply = self.reply.lock();
                let room = ready!(reply.poll_room(cx, bytes.len()));
                room.and_then(|room| {
                    reply.send_data(self.unsent.piece(bytes.slice(..room)), false)?;
                    Ok(room)
                })
            }
            // An answer without a body has none (RFC 9110 §6.4.1).
            AnswerState::Ended => Ok(bytes.len()),
        };
        Poll::Ready(self.note(sent))
    }

    /// Takes bytes of a head, and sends it when it is whole.
    fn send_head_bytes(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let AnswerState::Head(head) = &mut self.answer else {
            return Ok(0);
        };
        let before = head.len();
        head.extend_from_slice(bytes);
        let Some(end) = head_end(head, before).map_err(io::Error::other)? else {
            return Ok(bytes.len());
        };
        head.truncate(end);
        let answer = read_answer_head(head)?;
        let status = answer.status();
        let mut reply = self.reply.lock();
        let ReplyHalf::Unanswered(unanswered) = &mut reply.half else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if status.is_informational() {
            let sent = unanswered.send_informational(answer);
            sent.map_err(broken)?;
            head.clear();
        } else {
            let is_bare = self.method == Method::HEAD
                || [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
            let stream = unanswered.send_response(answer, is_bare);
            reply.half = ReplyHalf::Answered(stream.map_err(broken)?);
            self.cancels.on_answered();
            self.answer = match is_bare {
                true => AnswerState::Ended,
                false => AnswerState::Body,
            };
        }
        Ok(end - before)
    }

    /// Sends the end of the answer.
    fn send_end(&mut self) -> io::Result<()> {
        let sent = match &self.answer {
            AnswerState::Ended => return Ok(()),
            AnswerState::Head(_) => Err(io::ErrorKind::UnexpectedEof.into()),
            AnswerState::Body => {
                let last = self.unsent.piece(Bytes::new());
                self.reply.lock().send_data(last, true)
            }
        };
        self.note(sent)?;
        self.answer = AnswerState::Ended;
        Ok(())
    }

    /// Ready when the end of the source was sent.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.piece.has_remaining() {
                let piece = self.piece.clone();
                let sent = ready!(self.poll_send_bytes(cx, &piece))?;
                self.piece.advance(sent);
            } else if self.ending || self.has_sent_end() {
                return Poll::Ready(self.send_end());
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

    /// What the client learns when the stream breaks.
    fn reset_reason(&self) -> Reason {
        match (&self.answer, self.was_read) {
            // It may ask anew, whatever it asked for (RFC 9113 §8.7).
            (AnswerState::Head(_), false) => Reason::REFUSED_STREAM,
            _ if self.method == Method::CONNECT => Reason::CONNECT_ERROR,
            _ => Reason::INTERNAL_ERROR,
        }
    }
}

/// An error of a stream as one of I/O.
fn broken(error: h2::Error) -> io::Error {
    match error.is_io() {
        true => error
            .into_io()
            .unwrap_or_else(|| io::ErrorKind::BrokenPipe.into()),
        false => io::Error::new(io::ErrorKind::ConnectionReset, error),
    }
}

impl AsyncRead for Http2Flow {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        this.was_read = true;
        if this.head.has_remaining() {
            let part = this.head.split_to(this.head.len().min(buf.remaining()));
            buf.put_slice(&part);
            return Poll::Ready(Ok(()));
        }
        while !this.data.has_remaining() && !this.has_ended {
            match ready!(this.body.poll_data(cx)) {
                Some(Ok(data)) => this.data = data,
                Some(Err(error)) => return Poll::Ready(this.note(Err(broken(error)))),
                // Trailers go no further: RFC 9110 §6.5.1.
                None => this.has_ended = true,
            }
        }
        let part = this.data.split_to(this.data.len().min(buf.remaining()));
        buf.put_slice(&part);
        // What fails here has failed: the next read tells it.
        let _ = this.body.flow_control().release_capacity(part.len());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Http2Flow {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let part = Bytes::copy_from_slice(&bytes[..bytes.len().min(PIECE_BYTES)]);
        self.poll_send_bytes(cx, &part)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.send_end())
    }
}

impl FlowIo for Http2Flow {
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

    fn peer_stopped_check(&self) -> Box<dyn Fn() -> bool + Send> {
        let reply = self.reply.clone();
        Box::new(move || reply.lock().poll_reset_again().is_ready())
    }

    fn reset(&mut self, _code: u64) {
        // HTTP/2 has no code for the cause.
        self.broken = Some(io::ErrorKind::ConnectionReset);
        self.has_reset = true;
        let reason = self.reset_reason();
        self.reply.lock().send_reset(reason);
    }

    fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(kind) = self.broken {
            return Poll::Ready(Err(kind.into()));
        }
        if self.reply.lock().poll_reset(cx).is_ready() {
            let reset = Err(io::ErrorKind::ConnectionReset.into());
            return Poll::Ready(self.note(reset));
        }
        if !self.has_sent_end() || self.piece.has_remaining() {
            ready!(self.poll_send(cx))?;
        }
        let sent = ready!(self.unsent.poll_sent(cx));
        Poll::Ready(self.note(sent))
    }
}

impl Drop for Http2Flow {
    fn drop(&mut self) {
        let mut reply = self.reply.lock();
        if self.has_sent_end() || self.has_reset {
            return;
        }
        if reply.poll_reset_again().is_pending() {
            reply.send_reset(self.reset_reason());
        } else if matches!(self.answer, AnswerState::Head(_)) {
            self.cancels.on_cancelled();
        }
    }
}

/// The pieces of a stream's answer that its connection has not written yet.
#[derive(Default)]
struct UnsentPieces {
    count: AtomicUsize,
    /// Whether a piece was dropped before it was written.
    is_lost: AtomicBool,
    waiting: AtomicWaker,
}

impl UnsentPieces {
    fn piece(self: &Arc<Self>, bytes: Bytes) -> Http2Piece {
        self.count.fetch_add(1, Ordering::Relaxed);
        Http2Piece {
            bytes,
            unsent: self.clone(),
        }
    }

    /// Ready when no piece is left.
    fn poll_sent(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.waiting.register(cx.waker());
        if self.count.load(Ordering::Acquire) > 0 {
            return Poll::Pending;
        }
        Poll::Ready(match self.is_lost.load(Ordering::Relaxed) {
            true => Err(io::ErrorKind::ConnectionReset.into()),
            false => Ok(()),
        })
    }
}

/// Bytes of an answer in DATA.
pub(crate) struct Http2Piece {
    bytes: Bytes,
    unsent: Arc<UnsentPieces>,
}

impl Buf for Http2Piece {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

impl Drop for Http2Piece {
    fn drop(&mut self) {
        if self.bytes.has_remaining() {
            self.unsent.is_lost.store(true, Ordering::Relaxed);
        }
        self.unsent.count.fetch_sub(1, Ordering::Release);
        self.unsent.waiting.wake();
    }
}

/// A request's head as HTTP/1.1 writes it. h2 has refused fields of connections and bytes that no field may have.
fn request_head<B>(request: &Request<B>) -> Vec<u8> {
    let uri = request.uri();
    let authority = uri.authority().map(|authority| authority.as_str());
    let target = match authority {
        Some(authority) if request.method() == Method::CONNECT => authority.to_owned(),
        _ => uri.to_string(),
    };
    let mut fields = request.headers().clone();
    join_cookies(&mut fields);
    // RFC 9113 §8.3.1: Host is the same, or it is there twice and refused.
    let is_same = |host: &HeaderValue| {
        authority
            .is_some_and(|authority| authority.as_bytes().eq_ignore_ascii_case(host.as_bytes()))
    };
    if fields.get_all(header::HOST).iter().all(is_same) {
        fields.remove(header::HOST);
    }
    if let Some(authority) = authority.and_then(|text| HeaderValue::from_str(text).ok()) {
        fields.append(header::HOST, authority);
    }
    let mut head = format!("{} {target} HTTP/1.1\r\n", request.method()).into_bytes();
    write_fields(&mut head, &fields);
    head
}

fn write_fields(head: &mut Vec<u8>, fields: &HeaderMap) {
    for (name, value) in fields {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            head.extend_from_slice(part);
        }
    }
    head.extend_from_slice(b"\r\n");
}

/// Reads back the head of an answer, without what HTTP/2 does not have.
fn read_answer_head(head: &[u8]) -> io::Result<Response<()>> {
    let lines = head.iter().filter(|byte| **byte == b'\n').count();
    let mut fields = vec![httparse::EMPTY_HEADER; lines];
    let mut parsed = httparse::Response::new(&mut fields);
    parsed.parse(head).map_err(io::Error::other)?;
    let mut answer = Response::new(());
    let status = StatusCode::from_u16(parsed.code.unwrap_or(0));
    *answer.status_mut() = status.map_err(io::Error::other)?;
    let map = answer.headers_mut();
    for field in parsed.headers {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(io::Error::other)?;
        let value = HeaderValue::from_bytes(field.value).map_err(io::Error::other)?;
        map.append(name, value);
    }
    strip_hop_by_hop(map);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head_of(method: &str, uri: &str, fields: &[(&str, &str)]) -> String {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        String::from_utf8(request_head(&request)).unwrap()
    }

    #[test]
    fn a_request_is_written_as_http_1_has_it() {
        let url = "http://a.example:81/b?c=d";
        let get = head_of("GET", url, &[("cookie", "e=1"), ("cookie", "f=2")]);
        let wanted = "GET http://a.example:81/b?c=d HTTP/1.1\r\n\
             cookie: e=1; f=2\r\nhost: a.example:81\r\n\r\n";
        assert_eq!(get, wanted);
        let connect = head_of("CONNECT", "a.example:443", &[]);
        let wanted = "CONNECT a.example:443 HTTP/1.1\r\nhost: a.example:443\r\n\r\n";
        assert_eq!(connect, wanted);
    }

    #[test]
    fn a_host_that_is_another_than_the_authority_is_there_twice() {
        for (host, count) in [("A.example", 1), ("b.example", 2)] {
            let get = head_of("GET", "http://a.example/", &[("host", host)]);
            assert_eq!(get.matches("host: ").count(), count, "{get}");
        }
    }

    #[test]
    fn an_answer_has_no_fields_of_its_connection() {
        let head =
            b"HTTP/1.1 404 Not Found\r\nconnection: close, x-hop\r\nx-hop: 1\r\nage: 7\r\n\r\n";
        let answer = read_answer_head(head).unwrap();
        assert_eq!(answer.status(), StatusCode::NOT_FOUND);
        let names: Vec<_> = answer.headers().keys().collect();
        assert_eq!(names, ["age"]);
    }
}
