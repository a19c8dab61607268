//! The origin side: one request, one connection, redirects followed here.
//!
//! ```text
//! fetch ── ask ── dial (filter) ── TLS (ALPN) ── HTTP/1.1 or HTTP/2 ──▶ head ── redirect? ──┐
//!             ▲                                                                            │
//!             └───────────────────────── at most redirects_max times ──────────────────────┘
//! ```
//!
//! An upload is sent only to its original URL: the device itself follows redirects of PUT and POST.
//!
//! Each fetch has its own connection. Uploads of one client to one origin share theirs, one after the other
//! (`origin_pool.rs`). No connection serves two clients, so that one's request cannot leave state for another's.

use std::error::Error;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{HostKey, MemoryAccount, MemoryCharge};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Request, StatusCode, Uri, Version};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Incoming};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use url::Url;

use crate::body_gate::{BodyGate, GatedBody};
use crate::charged_tcp::ChargedTcp;
use crate::config::ProxConfig;
use crate::counters::ProxCounters;
use crate::dial::{OriginTarget, Resolve, allowed_addresses, dial};
use crate::egress::EgressFilter;
use crate::origin_pool::{OriginPool, OriginPoolKey, OriginSender, UpstreamConn};
use crate::refusal::ProxRefusal;
use crate::request::is_idempotent;
use crate::tls::{self, ProxTlsError, client_config};

/// The most bytes of an origin's response head.
const RESPONSE_HEAD_BYTES_MAX: usize = 64 * 1024;
/// What TLS occupies for a connection: a record in each direction, and what the handshake keeps.
const TLS_BYTES: u64 = 32 * 1024;
/// The most header fields of an origin's response head.
const RESPONSE_HEADERS_MAX: usize = 128;
/// HTTP/2 receive windows: bytes that one origin may have in flight, and that the connection may hold. A guess: 1 Gb/s
/// at 8 ms.
const H2_WINDOW_BYTES: u32 = 1 << 20;
/// HTTP/2 receive windows of further connections of a client that uses more than a quarter of its memory, so that
/// large windows do not keep out connections.
const H2_WINDOW_BYTES_MIN: u32 = 65_535; // RFC 9113 §6.9.2: a connection cannot begin with less
/// How long the body of a request waits for the origin's 100 on a connection that was used before: as curl waits.
const CONTINUE_WITHIN: Duration = Duration::from_secs(1);
/// The name in `Via`, `Cache-Status` and `Proxy-Status`.
pub(crate) const PSEUDONYM: &str = "d2prox";

/// The connector to origins.
pub(crate) struct OriginConnector {
    counters: Arc<ProxCounters>,
    pub(crate) filter: EgressFilter,
    pub(crate) resolver: Arc<dyn Resolve>,
    pub(crate) tls: Arc<rustls::ClientConfig>,
    pub(crate) dns_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) redirects_max: u32,
    pool: Arc<OriginPool>,
}

/// The accounts of the client for whom an origin is asked.
#[derive(Clone, Debug)]
pub(crate) struct OriginMemory {
    /// The account of what this process holds.
    pub(crate) session: MemoryAccount,
    /// The account of what the kernel holds for the client's connections.
    pub(crate) sockets: MemoryAccount,
}

/// The body of a request to an origin.
pub(crate) struct OriginRequestBody {
    pub(crate) body: UnsyncBoxBody<Bytes, io::Error>,
    /// Bytes of the body that were written to the connection.
    pub(crate) sent: Arc<AtomicU64>,
    /// The client whose kept connections may serve the request, and which keeps its connection; none: the request has
    /// a connection of its own.
    pub(crate) shares_conns_of: Option<HostKey>,
    /// Whether a connection that was kept may be used, which the origin may be closing.
    pub(crate) may_use_kept_conn: bool,
    /// What must be ready before the first byte goes to the origin, once there is a connection.
    pub(crate) before_sending: Option<BoxFuture<'static, Result<(), ProxRefusal>>>,
}

/// The fields of a request with that of this proxy (RFC 9110 §7.6.3).
fn with_via(headers: &HeaderMap) -> HeaderMap {
    let mut headers = headers.clone();
    headers.append(header::VIA, HeaderValue::from_static("1.1 d2prox"));
    headers
}

impl OriginRequestBody {
    fn nothing() -> OriginRequestBody {
        OriginRequestBody {
            body: Empty::new().map_err(|never| match never {}).boxed_unsync(),
            sent: Arc::default(),
            shares_conns_of: None,
            may_use_kept_conn: false,
            before_sending: None,
        }
    }

    /// Ready when the first byte may go to the origin.
    async fn ready(&mut self) -> Result<(), ProxRefusal> {
        match self.before_sending.take() {
            Some(before) => before.await,
            None => Ok(()),
        }
    }
}

/// An origin's response, with its body still to be read.
pub(crate) struct OriginResponse {
    pub(crate) status: StatusCode,
    pub(crate) version: Version,
    pub(crate) headers: HeaderMap,
    /// The URL of the response, after redirects.
    pub(crate) url: Url,
    /// Redirects followed on the way.
    pub(crate) redirects: u32,
    pub(crate) body: OriginBody,
}

/// A body that is still arriving, and the connection it arrives on.
pub(crate) struct OriginBody {
    body: Incoming,
    idle_timeout: Duration,
    /// The connection; none once it is kept for another request.
    conn: Option<UpstreamConn>,
    /// Where the connection is kept after the body.
    kept_in: Option<(Arc<OriginPool>, OriginPoolKey)>,
    /// What the connection occupies, charged to the client.
    memory: MemoryCharge,
}

/// Why a body was cut short.
#[derive(Debug)]
pub(crate) struct OriginBodyError(pub(crate) String);

impl OriginBody {
    /// The size, if the origin declared it.
    pub(crate) fn size(&self) -> Option<u64> {
        self.body.size_hint().exact()
    }

    /// Keeps the connection for another request, if it may be.
    fn keep_conn(&mut self) {
        if let (Some((pool, key)), Some(conn)) = (self.kept_in.take(), self.conn.take()) {
            pool.put(key, conn, std::mem::take(&mut self.memory));
        }
    }

    /// The next bytes; `None` at the clean end.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, OriginBodyError> {
        loop {
            match timeout(self.idle_timeout, self.body.frame()).await {
                Err(_) => {
                    return Err(OriginBodyError(format!(
                        "silent for {:?}",
                        self.idle_timeout
                    )));
                }
                Ok(None) => {
                    self.keep_conn();
                    return Ok(None);
                }
                Ok(Some(Err(error))) => return Err(OriginBodyError(chain(&error))),
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => return Ok(Some(data)),
                    Err(_trailers) => {} // Hop-by-hop as far as this proxy is concerned.
                },
            }
        }
    }
}

impl OriginConnector {
    /// The connector that these settings describe.
    pub(crate) fn new(
        config: &ProxConfig,
        resolver: Arc<dyn Resolve>,
        counters: Arc<ProxCounters>,
    ) -> Result<OriginConnector, ProxTlsError> {
        Ok(OriginConnector {
            counters,
            filter: EgressFilter {
                allow_private: config.allow_private,
                allow_nets: config.allow_nets.clone(),
                refused_ports: config.refused_ports.clone(),
            },
            resolver,
            tls: client_config(config.ca_file.as_deref(), config.native_roots)?,
            dns_timeout: config.dns_timeout,
            connect_timeout: config.connect_timeout,
            response_timeout: config.response_timeout,
            idle_timeout: config.idle_timeout,
            redirects_max: config.redirects_max,
            pool: Arc::default(),
        })
    }

    /// Connects a tunnel.
    pub(crate) async fn connect(&self, target: &OriginTarget) -> Result<TcpStream, ProxRefusal> {
        dial(
            target,
            &self.filter,
            &*self.resolver,
            self.dns_timeout,
            self.connect_timeout,
        )
        .await
    }

    /// Requests a URL, and does not follow redirects.
    pub(crate) async fn fetch_once(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        memory: &OriginMemory,
    ) -> Result<OriginResponse, ProxRefusal> {
        let headers = with_via(headers);
        self.ask(method, url, &headers, OriginRequestBody::nothing(), memory)
            .await
    }

    /// Requests a URL and follows redirects.
    pub(crate) async fn fetch(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        memory: &OriginMemory,
    ) -> Result<OriginResponse, ProxRefusal> {
        let mut url = url.clone();
        let mut headers = with_via(headers);
        let mut redirects = 0;
        loop {
            let mut response = self
                .ask(method, &url, &headers, OriginRequestBody::nothing(), memory)
                .await?;
            let Some(location) = redirect_location(response.status, &response.headers) else {
                response.redirects = redirects;
                return Ok(response);
            };
            if redirects == self.redirects_max {
                return Err(ProxRefusal::TooManyRedirects(
                    redirects,
                    without_query(&url),
                ));
            }
            redirects += 1;
            let next = follow(&url, location)?;
            if next.origin() != url.origin() {
                // What was meant for one origin is not for another.
                for name in [header::AUTHORIZATION, header::COOKIE] {
                    headers.remove(name);
                }
            }
            tracing::debug!(from = %url, to = %next, "redirect");
            url = next;
        }
    }

    /// Checks whether `url`'s host may be connected to, as far as its name shows.
    pub(crate) async fn check_allowed(&self, url: &Url) -> Result<(), ProxRefusal> {
        let target = OriginTarget::of(url).ok_or(ProxRefusal::BadRequest("the URL has no host"))?;
        allowed_addresses(&target, &self.filter, &*self.resolver, self.dns_timeout)
            .await
            .map(|_| ())
    }

    /// Sends a request with a body; redirects are not followed.
    pub(crate) async fn send(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        outgoing: OriginRequestBody,
        memory: &OriginMemory,
    ) -> Result<OriginResponse, ProxRefusal> {
        let mut headers = with_via(headers);
        // hyper leaves it out where the body is empty.
        if let Some(length) = outgoing.body.size_hint().exact() {
            headers.insert(header::CONTENT_LENGTH, length.into());
        }
        self.ask(method, url, &headers, outgoing, memory).await
    }

    /// Sends one request and returns its response. The connection is charged to `memory` until the body is
    /// dropped.
    async fn ask(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        outgoing: OriginRequestBody,
        memory: &OriginMemory,
    ) -> Result<OriginResponse, ProxRefusal> {
        let mut charge = memory.session.charge();
        let tls = if url.scheme() == "https" {
            TLS_BYTES
        } else {
            0
        };
        if !charge.try_resize(RESPONSE_HEAD_BYTES_MAX as u64 + tls) {
            return Err(ProxRefusal::ClientMemoryFull);
        }
        let mut response = self
            .exchange(method, url, headers, outgoing, (memory, &mut charge))
            .await?;
        response.body.memory = charge;
        if response.body.body.is_end_stream() {
            response.body.keep_conn();
        }
        Ok(response)
    }

    async fn exchange(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        mut outgoing: OriginRequestBody,
        (memory, charge): (&OriginMemory, &mut MemoryCharge),
    ) -> Result<OriginResponse, ProxRefusal> {
        self.counters.on_origin_request();
        let target = OriginTarget::of(url).ok_or(ProxRefusal::BadRequest("the URL has no host"))?;
        let key = (outgoing.shares_conns_of).map(|client| OriginPoolKey::new(client, url));
        // The origin may be closing a kept connection: it must be known whether it has received the request.
        let is_guarded = !is_idempotent(method);
        let has_body = !outgoing.body.is_end_stream();
        let kept = key.as_ref().filter(|key| {
            outgoing.may_use_kept_conn && (!is_guarded || (has_body && !self.pool.is_silent(key)))
        });
        let (mut conn, is_kept) = match kept.and_then(|key| self.pool.take(key)) {
            Some(conn) => {
                charge.resize(charge.bytes() + u64::from(conn.window_bytes));
                (conn, true)
            }
            None => (self.open_conn(url, &target, (memory, charge)).await?, false),
        };
        outgoing.ready().await?;
        let OriginRequestBody { body, sent, .. } = outgoing;
        // HTTP/2 tells which requests were not read.
        let is_http1 = matches!(conn.sender, OriginSender::Http1(_));
        let gate = (is_kept && is_guarded && is_http1).then(Arc::<BodyGate>::default);
        let body = match gate.clone() {
            Some(gate) => GatedBody { gate, body }.boxed_unsync(),
            None => body,
        };
        let answer = match &mut conn.sender {
            OriginSender::Http1(sender) => {
                let path = &url[url::Position::BeforePath..url::Position::AfterQuery];
                let mut request = request(method, path, headers, body)?;
                let authority = &url[url::Position::BeforeHost..url::Position::AfterPort];
                let authority = HeaderValue::from_str(authority)
                    .map_err(|_| ProxRefusal::BadRequest("the host cannot be put into a header"))?;
                request.headers_mut().insert(header::HOST, authority);
                if let Some(gate) = gate.clone() {
                    let expect = HeaderValue::from_static("100-continue");
                    request.headers_mut().insert(header::EXPECT, expect);
                    hyper::ext::on_informational(&mut request, move |interim| {
                        if interim.status() == StatusCode::CONTINUE {
                            gate.open();
                        }
                    });
                }
                sender.send_request(request).boxed()
            }
            OriginSender::Http2(sender) => {
                let whole = &url[..url::Position::AfterQuery];
                let mut request = request(method, whole, headers, body)?;
                *request.version_mut() = Version::HTTP_2;
                sender.send_request(request).boxed()
            }
        };
        let is_unread = AtomicBool::new(false);
        let note_silent = || key.iter().for_each(|key| self.pool.note_silent(key));
        let answer = async {
            let answer = match &gate {
                Some(gate) => expected(answer, gate, note_silent).await,
                None => answer.await,
            };
            let error = answer.as_ref().err().filter(|_| is_kept);
            let is_unread_now = error.is_some_and(|error| was_not_read(error, gate.as_deref()));
            is_unread.store(is_unread_now, Ordering::Relaxed);
            answer
        };
        let answered = self.answered(answer, &sent, url, &target).await;
        if is_unread.load(Ordering::Relaxed) {
            return Err(ProxRefusal::KeptConnClosed(target.host()));
        }
        let mut response = answered?;
        if response.status == StatusCode::EXPECTATION_FAILED
            && gate.is_some_and(|gate| !gate.is_open())
        {
            note_silent();
            return Err(ProxRefusal::KeptConnClosed(target.host()));
        }
        response.body.conn = Some(conn);
        response.body.kept_in = key.map(|key| (self.pool.clone(), key));
        Ok(response)
    }

    /// Connects to the origin of a URL, with TLS where that says so.
    async fn open_conn(
        &self,
        url: &Url,
        target: &OriginTarget,
        (memory, charge): (&OriginMemory, &mut MemoryCharge),
    ) -> Result<UpstreamConn, ProxRefusal> {
        let until = Instant::now() + self.dns_timeout + self.connect_timeout;
        let tcp = self.connect(target).await?;
        let tcp = ChargedTcp::new(tcp, &memory.sockets).ok_or(ProxRefusal::ClientMemoryFull)?;
        if url.scheme() == "http" {
            return open_http1(tcp, target).await;
        }
        let host = target.host();
        let bare = host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned();
        let name = ServerName::try_from(bare)
            .map_err(|_| ProxRefusal::BadRequest("the host name cannot be in a certificate"))?;
        let handshake = TlsConnector::from(self.tls.clone()).connect(name, tcp);
        let tls = match timeout_at(until, handshake).await {
            Err(_) => {
                let limit = self.connect_timeout;
                return Err(ProxRefusal::ConnectTimeout {
                    host: target.to_string(),
                    limit,
                });
            }
            Ok(Err(error)) => {
                return Err(match tls::certificate_error(&error) {
                    Some(cause) => ProxRefusal::Certificate { host, cause },
                    None => ProxRefusal::Tls {
                        host,
                        cause: error.to_string(),
                    },
                });
            }
            Ok(Ok(tls)) => tls,
        };
        match tls.get_ref().1.alpn_protocol() {
            Some(b"h2") => open_http2(tls, target, charge_window(&memory.session, charge)?).await,
            _ => open_http1(tls, target).await,
        }
    }

    async fn answered(
        &self,
        answer: impl Future<Output = hyper::Result<http::Response<Incoming>>>,
        sent: &AtomicU64,
        url: &Url,
        target: &OriginTarget,
    ) -> Result<OriginResponse, ProxRefusal> {
        let mut answer = pin!(answer);
        let mut seen = 0;
        let response = loop {
            match timeout(self.response_timeout, &mut answer).await {
                // A long body is no silence as long as it moves.
                Err(_) if sent.load(Ordering::Relaxed) != seen => {
                    seen = sent.load(Ordering::Relaxed);
                }
                Err(_) => {
                    let limit = self.response_timeout;
                    return Err(ProxRefusal::ResponseTimeout {
                        host: target.host(),
                        limit,
                    });
                }
                Ok(Err(error)) => return Err(refusal_of(&error, target)),
                Ok(Ok(response)) => break response,
            }
        };
        let (head, body) = response.into_parts();
        // hyper may read a little more than its limit.
        let bytes = head.headers.iter().map(|(n, v)| n.as_str().len() + v.len());
        if bytes.sum::<usize>() > RESPONSE_HEAD_BYTES_MAX {
            return Err(ProxRefusal::OriginHeadTooLarge(target.host()));
        }
        check_framing(&head).map_err(|cause| ProxRefusal::OriginProtocol {
            host: target.host(),
            cause: cause.to_owned(),
        })?;
        Ok(OriginResponse {
            status: head.status,
            version: head.version,
            headers: head.headers,
            url: url.clone(),
            redirects: 0,
            body: OriginBody {
                body,
                idle_timeout: self.idle_timeout,
                conn: None,
                kept_in: None,
                memory: MemoryCharge::default(),
            },
        })
    }
}

async fn open_http1<S>(stream: S, target: &OriginTarget) -> Result<UpstreamConn, ProxRefusal>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(RESPONSE_HEAD_BYTES_MAX)
        .max_headers(RESPONSE_HEADERS_MAX)
        .handshake::<_, UnsyncBoxBody<Bytes, io::Error>>(TokioIo::new(stream))
        .await
        .map_err(|error| refusal_of(&error, target))?;
    let connection = async move {
        let _ = connection.await; // Its error reaches the body or the answer.
    };
    Ok(UpstreamConn {
        sender: OriginSender::Http1(sender),
        window_bytes: 0,
        _task: AbortOnDropHandle::new(tokio::spawn(connection)),
    })
}

/// Charges an HTTP/2 receive window: the whole while the client uses little of its memory, and the least otherwise.
/// Returns its size.
fn charge_window(memory: &MemoryAccount, charge: &mut MemoryCharge) -> Result<u32, ProxRefusal> {
    let window = match memory.used() <= memory.room() / 3 {
        true => H2_WINDOW_BYTES,
        false => H2_WINDOW_BYTES_MIN,
    };
    let base = charge.bytes();
    match charge.try_resize(base + u64::from(window)) {
        true => Ok(window),
        false => Err(ProxRefusal::ClientMemoryFull),
    }
}

async fn open_http2<S>(
    stream: S,
    target: &OriginTarget,
    window_bytes: u32,
) -> Result<UpstreamConn, ProxRefusal>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .max_header_list_size(RESPONSE_HEAD_BYTES_MAX as u32)
        .initial_stream_window_size(window_bytes)
        .initial_connection_window_size(window_bytes)
        .handshake::<_, UnsyncBoxBody<Bytes, io::Error>>(TokioIo::new(stream))
        .await
        .map_err(|error| refusal_of(&error, target))?;
    let connection = async move {
        let _ = connection.await; // Its error reaches the body or the answer.
    };
    Ok(UpstreamConn {
        sender: OriginSender::Http2(sender),
        window_bytes,
        _task: AbortOnDropHandle::new(tokio::spawn(connection)),
    })
}

fn request<B>(
    method: &Method,
    target: &str,
    headers: &HeaderMap,
    body: B,
) -> Result<Request<B>, ProxRefusal> {
    let uri: Uri = target
        .parse()
        .map_err(|_| ProxRefusal::BadRequest("the URL cannot be sent as it is"))?;
    let mut request = Request::new(body);
    *request.method_mut() = method.clone();
    *request.uri_mut() = uri;
    *request.headers_mut() = headers.clone();
    Ok(request)
}

/// Refuses heads whose body two readers could end differently (RFC 9112 §6.3), and final answers that are none.
fn check_framing(head: &http::response::Parts) -> Result<(), &'static str> {
    if head.status.is_informational() {
        return Err("it switched to another protocol, which nobody asked for");
    }
    let values = |name| head.headers.get_all(name).iter().collect::<Vec<_>>();
    let lengths = values(header::CONTENT_LENGTH);
    let is_list = |value: &&HeaderValue| value.as_bytes().contains(&b',');
    if lengths.len() > 1 || lengths.iter().any(is_list) {
        return Err("more than one Content-Length");
    }
    match values(header::TRANSFER_ENCODING)[..] {
        [] => Ok(()),
        _ if !lengths.is_empty() => Err("Content-Length and Transfer-Encoding together"),
        [coding] if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err("a transfer coding other than chunked"),
    }
}

/// The `Location` of an answer that redirects a GET or HEAD.
pub(crate) fn redirect_location(status: StatusCode, headers: &HeaderMap) -> Option<&HeaderValue> {
    match status.as_u16() {
        301 | 302 | 303 | 307 | 308 => headers.get(header::LOCATION),
        _ => None,
    }
}

/// The target of a redirect, if it may be followed.
pub(crate) fn follow(from: &Url, location: &HeaderValue) -> Result<Url, ProxRefusal> {
    let text = String::from_utf8_lossy(location.as_bytes());
    let unusable = || ProxRefusal::RedirectUnusable(text.chars().take(200).collect());
    let mut next = from.join(&text).map_err(|_| unusable())?;
    next.set_fragment(None);
    match (from.scheme(), next.scheme()) {
        ("https", "http") => Err(ProxRefusal::RedirectDowngrade(without_query(&next))),
        (_, "http" | "https") if next.username().is_empty() && next.password().is_none() => {
            Ok(next)
        }
        _ => Err(unusable()),
    }
}

/// A URL for logs and error responses, without its query, which may contain secrets.
pub(crate) fn without_query(url: &Url) -> String {
    let mut text = url[..url::Position::AfterPath].to_owned();
    if url.query().is_some() {
        text.push_str("?…");
    }
    text
}

/// The refusal for an error of an exchange, by its cause.
fn refusal_of(error: &hyper::Error, target: &OriginTarget) -> ProxRefusal {
    let host = target.host();
    let cause = chain(error);
    if error.is_parse_too_large() {
        ProxRefusal::OriginHeadTooLarge(host)
    } else if error.is_parse() {
        ProxRefusal::OriginProtocol { host, cause }
    } else {
        ProxRefusal::OriginClosed { host, cause }
    }
}

/// The answer to a request whose body waits at a gate for the origin's 100. An origin that is silent gets the body all the
/// same, after a while.
async fn expected<T>(
    mut answer: impl Future<Output = T> + Unpin,
    gate: &BodyGate,
    on_silence: impl FnOnce(),
) -> T {
    if let Ok(answer) = timeout(CONTINUE_WITHIN, &mut answer).await {
        return answer;
    }
    if !gate.is_open() {
        on_silence();
        gate.open();
    }
    answer.await
}

/// Whether the origin cannot have acted on a request that failed with this error on a kept connection.
fn was_not_read(error: &hyper::Error, gate: Option<&BodyGate>) -> bool {
    // It was not even begun, or lacks its body.
    if error.is_canceled() || gate.is_some_and(|gate| !gate.is_open()) {
        return true;
    }
    let mut cause = error.source();
    while let Some(found) = cause {
        if let Some(error) = found.downcast_ref::<h2::Error>() {
            // RFC 9113 §6.8 and §8.7: streams beyond the last one that a GOAWAY names, and refused ones.
            let reason = error.reason();
            let is_left_out = error.is_go_away() && reason == Some(h2::Reason::NO_ERROR);
            let is_refused = error.is_reset() && reason == Some(h2::Reason::REFUSED_STREAM);
            return error.is_remote() && (is_left_out || is_refused);
        }
        cause = found.source();
    }
    false
}

/// An error and its causes, in one line.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn led(from: &str, location: &str) -> Result<String, u16> {
        let location = HeaderValue::from_str(location).unwrap();
        follow(&Url::parse(from).unwrap(), &location)
            .map(|url| url.to_string())
            .map_err(|refusal| refusal.status())
    }

    #[test]
    fn a_location_is_read_against_the_url_it_came_from() {
        assert_eq!(led("https://a/b/c", "../d?e#f").unwrap(), "https://a/d?e");
        assert_eq!(led("http://a/", "https://b/").unwrap(), "https://b/");
        assert_eq!(led("https://a/", "//b/x").unwrap(), "https://b/x");
    }

    #[test]
    fn a_redirect_never_leads_from_https_to_http_or_to_something_else() {
        for location in [
            "http://a/",
            "ftp://a/",
            "file:///etc/passwd",
            "https://u:p@a/",
            "https://",
        ] {
            assert_eq!(led("https://a/", location), Err(502), "{location}");
        }
    }

    #[test]
    fn a_shown_url_has_no_query() {
        let url = Url::parse("https://a/b?token=secret").unwrap();
        assert_eq!(without_query(&url), "https://a/b?…");
    }
}
