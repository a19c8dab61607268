//! HTTP/2 for programs that begin with its preface (RFC 9113 §3.3): requests and tunnels, many on one connection.
//!
//! ```text
//!  GET http://host/path  ──▶ forwarded as a request of HTTP/1.1 is (http.rs)
//!  CONNECT host:443      ──▶ a flow to host:443; DATA both ways (RFC 9113 §8.5)
//!                            what breaks is reset: RST_STREAM with CONNECT_ERROR
//! ```
//!
//! Served by the crate `h2`, not by hyper on top of it: hyper ends a tunnel with END_STREAM where it broke, and takes a
//! program's CANCEL for an end.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use cedos_http::http2::{
    CancelCount, HTTP2_CONN_STREAMS_MAX, HTTP2_ERROR_RESETS_MAX, HTTP2_PREFACE,
    HTTP2_RESETS_UNSEEN_MAX, join_cookies,
};
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::header::{CONTENT_LENGTH, EXPECT, HOST};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Either};
use hyper::body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::http::{
    AnswerBody, HEAD_BYTES_MAX, OriginConn, OriginConnCache, conn_options_of, forward, nonsense,
    open_tunnel, refused,
};
use super::proxy_context::{HELLO_WITHIN, ProxyContext};
use super::proxy_session::ProxyConnection;
use super::refusal::{ConnectRefusal, RefusalCause};

/// Streams of all connections at once; further ones are refused.
pub(super) const STREAMS_MAX: usize = 1_024; // as `CONNECTIONS_MAX`

/// Bytes that a stream may send before they are carried on. A connection's window is that of all its streams, so that
/// uploads that wait for a network delay no others.
const STREAM_WINDOW_BYTES: u32 = 64 * 1024; // RFC 9113 §6.9.2's own; the round trip is this machine's

/// Bytes of a stream that wait for its program.
const SEND_BUFFER_BYTES: usize = 64 * 1024; // a guess: as `COPY_BYTES` of carry.rs

/// Connections to origins that are kept for next requests.
const ORIGIN_CONNS_KEPT_MAX: usize = 8; // a guess

/// How long to wait for the next byte of a preface: the kernel reports that there is one, not that there are more.
const PREFACE_PAUSE: Duration = Duration::from_millis(10);

/// Whether a program that has begun to send speaks HTTP/2.
pub(super) async fn has_preface(program: &TcpStream) -> bool {
    let mut begin = [0; HTTP2_PREFACE.len()];
    loop {
        match program.peek(&mut begin).await {
            Ok(0) | Err(_) => return false,
            Ok(count) if begin[..count] != HTTP2_PREFACE[..count] => return false,
            Ok(count) if count == HTTP2_PREFACE.len() => return true,
            Ok(_) => tokio::time::sleep(PREFACE_PAUSE).await,
        }
    }
}

/// Serves the streams of one connection until it ends, or has none for a while.
pub(super) async fn serve(program: TcpStream, context: &Arc<ProxyContext>) {
    let handshake = h2::server::Builder::new()
        .max_concurrent_streams(HTTP2_CONN_STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(STREAM_WINDOW_BYTES * HTTP2_CONN_STREAMS_MAX)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_pending_accept_reset_streams(HTTP2_RESETS_UNSEEN_MAX)
        .max_local_error_reset_streams(Some(HTTP2_ERROR_RESETS_MAX))
        .handshake::<_, Bytes>(program);
    let mut connection = match timeout(HELLO_WITHIN, handshake).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return tracing::debug!(%error, "an HTTP/2 client disconnected"),
        Err(_) => return,
    };
    let kept = OriginConnCache::new(ORIGIN_CONNS_KEPT_MAX);
    let cancels = Arc::new(CancelCount::default());
    let mut closing = false;
    loop {
        match timeout(HELLO_WITHIN, connection.accept()).await {
            Ok(Some(Ok((request, mut reply)))) => {
                if cancels.is_too_many() {
                    connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                    continue;
                }
                let Ok(place) = context.http2_streams.clone().try_acquire_owned() else {
                    reply.send_reset(Reason::REFUSED_STREAM);
                    continue;
                };
                let (context, kept, cancels) = (context.clone(), kept.clone(), cancels.clone());
                tokio::spawn(async move {
                    let _place = place;
                    serve_stream(request, reply, &context, &kept, &cancels).await;
                });
            }
            Ok(Some(Err(error))) => {
                return tracing::debug!(%error, "an HTTP/2 client disconnected");
            }
            Ok(None) => return,
            Err(_) if connection.has_streams() => {}
            Err(_) if closing => return,
            Err(_) => {
                connection.graceful_shutdown();
                closing = true;
            }
        }
    }
}

/// What became of a stream's request.
enum StreamAnswer {
    Tunnel(ProxyConnection, RecvStream),
    Response(Response<AnswerBody>, OriginConn),
}

async fn serve_stream(
    request: Request<RecvStream>,
    mut reply: SendResponse<Bytes>,
    context: &ProxyContext,
    kept: &OriginConnCache,
    cancels: &CancelCount,
) {
    let is_head = *request.method() == Method::HEAD;
    let is_awaited = request.headers().get(EXPECT).is_some_and(|expected| {
        let expected = expected.as_bytes();
        expected.eq_ignore_ascii_case(b"100-continue")
    });
    if is_awaited && !request.body().is_end_stream() {
        let mut go_on = Response::new(());
        *go_on.status_mut() = StatusCode::CONTINUE;
        // If it is gone, that is noticed below.
        let _ = reply.send_informational(go_on);
    }
    let answered = tokio::select! {
        biased;
        answered = answer(request, context, kept) => answered,
        _ = poll_fn(|cx| reply.poll_reset(cx)) => return cancels.on_cancelled(),
    };
    cancels.on_answered();
    let sent = match answered {
        Ok(StreamAnswer::Tunnel(tunnel, program_sent)) => carry(tunnel, program_sent, reply).await,
        Ok(StreamAnswer::Response(response, origin_conn)) => {
            let sent = send_response(&mut reply, response, is_head).await;
            if sent.is_ok() {
                kept.put(origin_conn);
            }
            sent
        }
        Err(refusal) => send_response(&mut reply, refused(&refusal), is_head).await,
    };
    if let Err(error) = sent {
        tracing::debug!(%error, "broken off");
    }
}

async fn answer(
    mut request: Request<RecvStream>,
    context: &ProxyContext,
    kept: &OriginConnCache,
) -> Result<StreamAnswer, ConnectRefusal> {
    check(&request)?;
    let conn_options = conn_options_of(request.headers(), context.options)?;
    if request.method() == Method::CONNECT {
        let tunnel = open_tunnel(request.uri(), context, conn_options).await?;
        return Ok(StreamAnswer::Tunnel(tunnel, request.into_body()));
    }
    join_cookies(request.headers_mut());
    let request = request.map(|body| Either::Right(Http2RequestBody(body)));
    let (response, origin_conn) = forward(request, context, conn_options, kept).await?;
    if response.status().is_informational() {
        // RFC 9113 §8.6: HTTP/2 has no 101, and nobody asked for one.
        let text = "the server changes to a protocol that was not asked for";
        return Err(ConnectRefusal::new(RefusalCause::Refused, text));
    }
    Ok(StreamAnswer::Response(response, origin_conn))
}

/// Refuses what two readers could take for two requests.
fn check<B>(request: &Request<B>) -> Result<(), ConnectRefusal> {
    let fields = request.headers();
    let authority = request.uri().authority();
    // RFC 9113 §8.3.1.
    let is_same = |host: &HeaderValue| {
        authority.is_some_and(|authority| {
            let authority = authority.as_str().as_bytes();
            authority.eq_ignore_ascii_case(host.as_bytes())
        })
    };
    if !fields.get_all(HOST).iter().all(is_same) {
        return Err(nonsense("Host is another than :authority"));
    }
    let lengths = fields.get_all(CONTENT_LENGTH).iter().count();
    if lengths > 1 {
        return Err(nonsense("Content-Length is there more than once"));
    }
    if lengths > 0 && request.method() == Method::CONNECT {
        return Err(nonsense("CONNECT has no Content-Length"));
    }
    Ok(())
}

/// A request's body as it comes. What has been taken from it may be sent anew.
pub(super) struct Http2RequestBody(RecvStream);

impl Body for Http2RequestBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        // Trailers go no further: RFC 9110 §6.5.1, and as with HTTP/1.1.
        let Some(data) = ready!(self.0.poll_data(cx)) else {
            return Poll::Ready(None);
        };
        let data = data.and_then(|data| {
            self.0.flow_control().release_capacity(data.len())?;
            Ok(Frame::data(data))
        });
        Poll::Ready(Some(data))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // hyper takes it from Content-Length, and h2 has the body keep to that.
        match self.0.is_end_stream() {
            true => SizeHint::with_exact(0),
            false => SizeHint::default(),
        }
    }
}

/// Sends an answer. One that breaks is reset. A body to HEAD is that of a refusal, and not sent.
async fn send_response(
    reply: &mut SendResponse<Bytes>,
    response: Response<AnswerBody>,
    is_to_head: bool,
) -> Result<(), h2::Error> {
    let (head, mut body) = response.into_parts();
    let is_all = is_to_head || body.is_end_stream();
    let mut program = reply.send_response(Response::from_parts(head, ()), is_all)?;
    if is_all {
        return Ok(());
    }
    loop {
        let frame = tokio::select! {
            biased;
            frame = body.frame() => frame,
            reset = poll_fn(|cx| program.poll_reset(cx)) => return Err(reset?.into()),
        };
        match frame {
            None => return program.send_data(Bytes::new(), true),
            Some(Ok(frame)) => {
                // Trailers go no further, as with HTTP/1.1.
                if let Ok(data) = frame.into_data() {
                    send_data(&mut program, data).await?;
                }
            }
            Some(Err(error)) => {
                tracing::debug!(error, "an answer broke off");
                program.send_reset(Reason::INTERNAL_ERROR);
                return Err(Reason::INTERNAL_ERROR.into());
            }
        }
    }
}

/// Sends bytes as the program takes them.
async fn send_data(program: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), h2::Error> {
    while !data.is_empty() {
        program.reserve_capacity(data.len().min(SEND_BUFFER_BYTES));
        while program.capacity() == 0 {
            // None once it is reset.
            let Some(capacity) = poll_fn(|cx| program.poll_capacity(cx)).await else {
                return Err(Reason::CANCEL.into());
            };
            capacity?;
        }
        let part = data.split_to(program.capacity().min(data.len()));
        program.send_data(part, false)?;
    }
    Ok(())
}

/// Carries a tunnel to the ends of both directions. If one breaks, both are reset (RFC 9113 §8.5).
async fn carry(
    mut tunnel: ProxyConnection,
    program_sent: RecvStream,
    mut reply: SendResponse<Bytes>,
) -> Result<(), h2::Error> {
    let mut program = reply.send_response(Response::new(()), false)?;
    let carried = {
        let (from_far, to_far) = tokio::io::split(&mut tunnel);
        tokio::try_join!(
            carry_up(program_sent, to_far),
            carry_down(from_far, &mut program)
        )
    };
    if let Err(reason) = carried {
        program.send_reset(reason);
        tunnel.report_broken();
        return Err(reason.into());
    }
    tunnel.wait_delivered().await;
    Ok(())
}

async fn carry_up(mut program: RecvStream, mut far: impl AsyncWrite + Unpin) -> Result<(), Reason> {
    while let Some(data) = program.data().await {
        let data = data.map_err(|_| Reason::CONNECT_ERROR)?;
        let written = far.write_all(&data).await;
        written.map_err(|_| Reason::CONNECT_ERROR)?;
        let released = program.flow_control().release_capacity(data.len());
        released.map_err(|_| Reason::CONNECT_ERROR)?;
    }
    far.shutdown().await.map_err(|_| Reason::CONNECT_ERROR)
}

async fn carry_down(
    mut far: impl AsyncRead + Unpin,
    program: &mut SendStream<Bytes>,
) -> Result<(), Reason> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(SEND_BUFFER_BYTES);
        let read = tokio::select! {
            biased;
            read = far.read_buf(&mut buffer) => read,
            _ = poll_fn(|cx| program.poll_reset(cx)) => return Err(Reason::CONNECT_ERROR),
        };
        let sent = match read {
            Ok(0) => program.send_data(Bytes::new(), true),
            Ok(_) => send_data(program, buffer.split().freeze()).await,
            Err(_) => return Err(Reason::CONNECT_ERROR),
        };
        sent.map_err(|_| Reason::CONNECT_ERROR)?;
        if matches!(read, Ok(0)) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, uri: &str, fields: &[(&str, &str)]) -> Request<()> {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request")
    }

    #[test]
    fn what_two_readers_could_take_for_two_requests_is_refused() {
        let uri = "http://a.example/";
        for (method, uri, fields) in [
            ("GET", uri, &[("host", "b.example")][..]),
            ("GET", uri, &[("host", "a.example"), ("host", "b.example")]),
            ("GET", "/", &[("host", "a.example")]),
            (
                "PUT",
                uri,
                &[("content-length", "1"), ("content-length", "1")],
            ),
            ("CONNECT", "a.example:1", &[("content-length", "0")]),
        ] {
            let request = request(method, uri, fields);
            assert!(check(&request).is_err(), "{request:?}");
        }
        let fields = [("host", "A.example"), ("content-length", "1")];
        assert!(check(&request("PUT", uri, &fields)).is_ok());
    }
}
