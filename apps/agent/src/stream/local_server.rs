//! The server of local links: plain HTTP on 127.0.0.1, for clients that know the token.
//!
//! ```text
//!  player ── GET /TOKEN/name  Host: 127.0.0.1:PORT ──▶ StreamObject ── ResponseBody ──▶ player
//!  page   ── GET /…           Host: evil.example    ──▶ 421       (DNS rebinding)
//! ```
//!
//! Who may ask is decided by the port's token and the `Host` header (`token_listener`), and no answer says
//! that pages of other origins may read it.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cedos_http::{ByteRanges, RangeDecision};
use futures_util::stream::{self, StreamExt};
use http::header::{
    ACCEPT_RANGES, ALLOW, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG,
    IF_RANGE, RANGE, RETRY_AFTER,
};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::object::{ObjectHead, StreamObject};
use super::response_body::{ResponseBody, ResponsePart};
use super::title::StreamTitle;
use crate::fetch::boot_clock::BootInstant;
use crate::token_listener::{ConnectionPlace, TokenGuard, TokenListener};

/// How long a request waits for the origin's answer: less than the least patient player waits.
const HEAD_WITHIN: Duration = Duration::from_secs(7); // Media3 gives up after 8 s

/// The kernel's send buffer for a player: beyond it, the position of the player is unknown.
const SEND_BUFFER_BYTES: usize = 128 * 1024; // a guess

/// The Retry-After value for players, in seconds.
const AGAIN_S: u32 = 2; // a guess

/// The body of an answer.
pub type StreamAnswerBody = UnsyncBoxBody<Bytes, io::Error>;

/// The content behind a path.
pub enum LinkTarget {
    /// Bytes of an object, and the title it is part of.
    Stream(Arc<StreamObject>, Arc<StreamTitle>),
    /// A text of this media type.
    Text(String, &'static str),
    /// No content, with the reason.
    Refused(StatusCode, String),
}

/// Finds what the server's paths lead to.
pub trait LinkResolver: Send + Sync + 'static {
    /// The content of `path`, without the token.
    fn find(&self, path: &str) -> impl Future<Output = LinkTarget> + Send;

    /// When the catalog was created: all times of a stream count from then.
    fn opened_at(&self) -> BootInstant;
}

/// A listening server.
pub struct StreamListener(TokenListener);

impl StreamListener {
    /// Opens it, at `port` if that is free.
    ///
    /// # Errors
    /// No port is to be had.
    pub async fn bind(token: String, port: Option<u16>) -> io::Result<StreamListener> {
        if let Some(port) = port
            && let Ok(listener) = TokenListener::bind(token.clone(), port).await
        {
            return Ok(StreamListener(listener));
        }
        TokenListener::bind(token, 0).await.map(StreamListener)
    }

    /// The port of the server.
    pub fn port(&self) -> u16 {
        self.0.address().port()
    }

    /// The beginning of all links of this server.
    pub fn base(&self) -> String {
        self.0.base()
    }

    /// Answers requests until this is dropped.
    pub async fn serve(self, context: Arc<impl LinkResolver>) {
        let gate = Arc::new(RequestGuard(self.0.guard().clone()));
        loop {
            let (stream, place) = self.0.accept().await;
            let (gate, context) = (gate.clone(), context.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = speak(stream, gate, context, place.clone()) => {}
                    () = place.closed() => {
                        tracing::debug!("closed a connection that did not show the token");
                    }
                }
            });
        }
    }
}

async fn speak(
    stream: TcpStream,
    gate: Arc<RequestGuard>,
    context: Arc<impl LinkResolver>,
    place: Arc<ConnectionPlace>,
) {
    let _ = stream.set_nodelay(true);
    let _ = setsockopt(&stream, sockopt::SndBuf, &SEND_BUFFER_BYTES);
    let answer = service_fn(|request: Request<Incoming>| {
        let (gate, context, place) = (gate.clone(), context.clone(), place.clone());
        async move {
            if gate.shows_token(&request) {
                place.prove().await;
            }
            Ok::<_, std::convert::Infallible>(gate.answer(&request, &context).await)
        }
    });
    let spoken = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), answer)
        .await;
    if let Err(error) = spoken {
        tracing::debug!(%error, "a player's connection ended");
    }
}

/// Checks which requests are allowed, and answers them.
struct RequestGuard(Arc<TokenGuard>);

impl RequestGuard {
    async fn answer<B>(
        &self,
        request: &Request<B>,
        context: &Arc<impl LinkResolver>,
    ) -> Response<StreamAnswerBody> {
        if !self.0.is_ours(request.headers()) {
            let text = "this link works only on this machine, by its address 127.0.0.1 or \
                localhost";
            return words(StatusCode::MISDIRECTED_REQUEST, text);
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut answer = words(
                StatusCode::METHOD_NOT_ALLOWED,
                "only GET and HEAD are served here",
            );
            let allowed = HeaderValue::from_static("GET, HEAD");
            answer.headers_mut().insert(ALLOW, allowed);
            return answer;
        }
        let path = request.uri().path_and_query().map_or("", |p| p.as_str());
        let Some(path) = self.0.behind_token(path) else {
            return words(StatusCode::NOT_FOUND, "there is no such link here");
        };
        match context.find(path).await {
            LinkTarget::Stream(object, title) => stream_of(request, context, object, title).await,
            LinkTarget::Text(text, media_type) => text_of(request, text, media_type),
            LinkTarget::Refused(status, text) => words(status, &text),
        }
    }

    /// Whether a request has the token, and comes from no page of another name.
    fn shows_token<B>(&self, request: &Request<B>) -> bool {
        let path = request.uri().path_and_query().map_or("", |p| p.as_str());
        self.0.is_ours(request.headers()) && self.0.behind_token(path).is_some()
    }
}

async fn stream_of<B>(
    request: &Request<B>,
    context: &Arc<impl LinkResolver>,
    object: Arc<StreamObject>,
    title: Arc<StreamTitle>,
) -> Response<StreamAnswerBody> {
    let is_head = *request.method() == Method::HEAD;
    let now = || BootInstant::now().since(context.opened_at());
    let asked = request.headers().get(RANGE).and_then(|v| v.to_str().ok());
    // Range is defined for GET alone (RFC 9110 §14.2).
    let asked = asked.filter(|_| !is_head);
    // To ask is to read: from then on somebody waits for the first byte.
    let asked = asked.and_then(ByteRanges::parse);
    let first = match asked.as_ref().map(|asked| asked.decide(object.length())) {
        Some(RangeDecision::Parts(parts)) => parts[0].start,
        _ => 0,
    };
    object.clear_refusal();
    let mut reading = object.read_from(first);
    if object.head().is_none() || !is_head {
        title.on_reader(now(), &object, first);
    }
    let head = match first_word(&object, &title).await {
        Ok(head) => head,
        Err(answer) => return *answer,
    };
    let tag = format!("\"{}\"", head.edition);
    let same = request.headers().get(IF_RANGE);
    let same = same.is_none_or(|named| named.as_bytes() == tag.as_bytes());
    let part = asked
        .filter(|_| same)
        .map_or(RangeDecision::Whole, |asked| asked.decide(head.length));
    let media_type = head
        .media_type
        .as_deref()
        .unwrap_or("application/octet-stream");
    let mut answer = Response::builder()
        .header(ETAG, &tag)
        .header(ACCEPT_RANGES, "bytes")
        .header(CACHE_CONTROL, "no-store");
    let whole = (0, head.length.unwrap_or(u64::MAX));
    let mut out = VecDeque::new();
    let (length, media_type) = match part {
        // Of an object whose length nobody knows yet, a reader may have all that comes.
        RangeDecision::Whole | RangeDecision::LengthNeeded => {
            out.push_back(ResponsePart::Range(whole.0, whole.1));
            (head.length, media_type.to_owned())
        }
        RangeDecision::Unsatisfiable => {
            answer = answer.status(StatusCode::RANGE_NOT_SATISFIABLE);
            answer = answer.header(CONTENT_RANGE, format!("bytes */{}", whole.1));
            (Some(0), media_type.to_owned())
        }
        RangeDecision::Parts(parts) => match parts[..] {
            [
                Range {
                    start: from,
                    end: to,
                },
            ] => {
                if head.length.is_none() && !is_here(&object, from, to, &mut reading).await {
                    let text = "the length is not known yet, nor whether the object is that long";
                    return later(text);
                }
                let to = to.min(object.length().unwrap_or(to));
                answer = answer.status(StatusCode::PARTIAL_CONTENT);
                answer = answer.header(CONTENT_RANGE, range_of(from, to, head.length));
                out.push_back(ResponsePart::Range(from, to));
                (Some(to.saturating_sub(from)), media_type.to_owned())
            }
            _ => {
                answer = answer.status(StatusCode::PARTIAL_CONTENT);
                let length = in_parts(&mut out, &parts, head.length, media_type, &head.edition);
                let media_type = format!("multipart/byteranges; boundary={}", head.edition);
                (Some(length), media_type)
            }
        },
    };
    answer = answer.header(CONTENT_TYPE, media_type);
    if let Some(length) = length {
        answer = answer.header(CONTENT_LENGTH, length);
    }
    let body = if is_head {
        empty()
    } else {
        bytes_of(ResponseBody::new(reading, title, out, context.opened_at()))
    };
    let refused = |_| words(StatusCode::BAD_GATEWAY, "the origin's words make no header");
    answer.body(body).unwrap_or_else(refused)
}

/// The head of the object from the origin, or an answer that says why there is none.
async fn first_word(
    object: &Arc<StreamObject>,
    title: &StreamTitle,
) -> Result<ObjectHead, Box<Response<StreamAnswerBody>>> {
    let mut news = object.changes();
    let word = async {
        loop {
            news.borrow_and_update();
            if let Some(head) = object.head() {
                return Ok(head);
            }
            if let Some(refusal) = object.refusal().filter(|refusal| !refusal.is_temporary) {
                return Err(refusal);
            }
            let _ = news.changed().await;
        }
    };
    match timeout(HEAD_WITHIN, word).await {
        Ok(Ok(head)) => Ok(head),
        Ok(Err(refusal)) => Err(Box::new(words(refusal.status, &refusal.text))),
        Err(_) => Err(Box::new(match object.refusal() {
            Some(refusal) => {
                let mut answer = words(refusal.status, &refusal.text);
                answer.headers_mut().insert(RETRY_AFTER, AGAIN_S.into());
                answer
            }
            None => later(&title.reason()),
        })),
    }
}

/// Waits until all of `from..to` is held, or the object's end is known.
async fn is_here(
    object: &StreamObject,
    from: u64,
    to: u64,
    reading: &mut super::object::ObjectReader,
) -> bool {
    let mut news = object.changes();
    reading.seek(from);
    let here = async {
        loop {
            news.borrow_and_update();
            match object.length() {
                Some(length) => return from < length,
                None if object.held_from(from).0 >= to => return true,
                None => drop(news.changed().await),
            }
        }
    };
    timeout(HEAD_WITHIN, here).await.unwrap_or(false)
}

/// The parts of a `multipart/byteranges` body (RFC 9110 §14.6), and its length.
fn in_parts(
    out: &mut VecDeque<ResponsePart>,
    parts: &[Range<u64>],
    length: Option<u64>,
    media_type: &str,
    boundary: &str,
) -> u64 {
    let mut sum = 0;
    let mut say = |out: &mut VecDeque<ResponsePart>, words: String| {
        sum += words.len() as u64;
        out.push_back(ResponsePart::Text(words.into()));
    };
    for &Range { start, end } in parts {
        let range = range_of(start, end, length);
        let words = format!(
            "\r\n--{boundary}\r\nContent-Type: {media_type}\r\nContent-Range: {range}\r\n\r\n"
        );
        say(out, words);
        out.push_back(ResponsePart::Range(start, end));
    }
    say(out, format!("\r\n--{boundary}--\r\n"));
    sum + parts.iter().map(|part| part.end - part.start).sum::<u64>()
}

fn range_of(from: u64, to: u64, length: Option<u64>) -> String {
    let length = length.map_or("*".to_owned(), |length| length.to_string());
    format!("bytes {from}-{}/{length}", to.saturating_sub(1))
}

fn text_of<B>(
    request: &Request<B>,
    text: String,
    media_type: &'static str,
) -> Response<StreamAnswerBody> {
    let length = text.len();
    let mut answer = Response::new(match *request.method() == Method::HEAD {
        true => empty(),
        false => full(text.into()),
    });
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(CONTENT_LENGTH, length.into());
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

fn bytes_of(handing: ResponseBody) -> StreamAnswerBody {
    let bytes = stream::try_unfold(handing, |mut handing| async move {
        Ok(handing.next().await?.map(|bytes| (bytes, handing)))
    });
    StreamBody::new(bytes.map(|bytes| bytes.map(Frame::data))).boxed_unsync()
}

fn full(bytes: Bytes) -> StreamAnswerBody {
    Full::new(bytes)
        .map_err(|never| match never {})
        .boxed_unsync()
}

fn empty() -> StreamAnswerBody {
    full(Bytes::new())
}

fn words(status: StatusCode, text: &str) -> Response<StreamAnswerBody> {
    let mut answer = Response::new(full(format!("{text}\n").into()));
    *answer.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(CONTENT_TYPE, plain);
    answer
}

fn later(text: &str) -> Response<StreamAnswerBody> {
    let mut answer = words(StatusCode::SERVICE_UNAVAILABLE, text);
    answer.headers_mut().insert(RETRY_AFTER, AGAIN_S.into());
    answer
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::token_listener::{CONNECTIONS_MAX, TOKEN_WITHIN, UNPROVEN_MAX};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    struct OneText(BootInstant);

    impl LinkResolver for OneText {
        async fn find(&self, path: &str) -> LinkTarget {
            LinkTarget::Text(path.to_owned(), "text/plain")
        }

        fn opened_at(&self) -> BootInstant {
            self.0
        }
    }

    async fn ask(at: SocketAddr, token: &str) -> (TcpStream, String) {
        let mut stream = TcpStream::connect(at).await.unwrap();
        let request = format!("GET /{token}/name HTTP/1.1\r\nHost: {at}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        (stream, String::from_utf8_lossy(&answer).into_owned())
    }

    #[tokio::test]
    async fn idle_strangers_keep_no_player_out_and_no_player_gives_way_to_them() {
        let listener = StreamListener::bind("token".into(), None).await.unwrap();
        let at = listener.0.address();
        let serving = tokio::spawn(listener.serve(Arc::new(OneText(BootInstant::now()))));
        let asked = async {
            let (mut player, answer) = ask(at, "token").await;
            assert_eq!(answer, "HTTP/1.1 200");
            let mut strangers = Vec::new();
            for _ in 0..2 * (UNPROVEN_MAX + CONNECTIONS_MAX) {
                strangers.push(TcpStream::connect(at).await.unwrap());
            }
            assert_eq!(ask(at, "wrong").await.1, "HTTP/1.1 404");
            assert_eq!(ask(at, "token").await.1, "HTTP/1.1 200");
            // The oldest strangers gave way.
            assert_eq!(strangers[0].read(&mut [0]).await.unwrap_or(0), 0);
            // The player's connection is still served.
            let again = format!("GET /token/name HTTP/1.1\r\nHost: {at}\r\n\r\n");
            player.write_all(again.as_bytes()).await.unwrap();
            let mut rest = [0; 256];
            assert!(player.read(&mut rest).await.unwrap() > 0);
        };
        timeout(TOKEN_WITHIN, asked).await.expect("at once");
        serving.abort();
    }
}
