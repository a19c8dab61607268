//! An HTTP proxy (RFC 9110 §9.3.6, RFC 9112 §3.2): CONNECT, and requests with a whole URL.
//!
//! ```text
//!  CONNECT host:443     ──▶ a flow to host:443; the answer, then bytes both ways
//!  GET http://host/path ──▶ a flow to host:80, in it GET /path; the answer is the origin's own
//! ```
//!
//! Requests are asked of the origin itself, through a tunnel, and not of D2Prox, which would follow
//! redirects and pin copies: the program knows what it wants. What a client asks next of the same host, on the
//! same terms and only to read, goes the same way: as it would without us, by the connection there is.
//!
//! This file serves HTTP/1.1, and has what HTTP/2 (`http2.rs`) shares with it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE, VIA,
};
use http::uri::Scheme;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::{Either, Full};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use jiff::Zoned;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

use super::conn_options::ConnOptions;
use super::http2::Http2RequestBody;
use super::proxy_context::{HELLO_WITHIN, ProxyContext};
use super::proxy_session::ProxyConnection;
use super::refusal::{ConnectRefusal, RefusalCause};

/// The most bytes of a request's header.
pub(super) const HEAD_BYTES_MAX: usize = 32 * 1024; // docs/proxy.md: as D2Prox

/// The header field with connection options, which is not forwarded.
const BY: HeaderName = HeaderName::from_static("cedos-by");
const POLICY: HeaderName = HeaderName::from_static("cedos-policy");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");

/// By which version a message came (RFC 9110 §7.6.3).
const VIA_HTTP_1: HeaderValue = HeaderValue::from_static("1.1 cedos");
const VIA_HTTP_2: HeaderValue = HeaderValue::from_static("2.0 cedos");

/// The body of a program's request, by its version of HTTP.
pub(super) type ProgramBody = Either<Incoming, Http2RequestBody>;
type ForwardBody = Either<ProgramBody, Full<Bytes>>;
pub(super) type AnswerBody = Either<Incoming, Full<Bytes>>;

/// A connection to an origin on which a client's last request was answered.
pub(super) struct OriginConn {
    host: HeaderValue,
    conn_options: ConnOptions,
    sender: SendRequest<ForwardBody>,
}

/// Connections to origins that a client's next requests may use.
#[derive(Clone)]
pub(super) struct OriginConnCache {
    conns: Arc<Mutex<VecDeque<OriginConn>>>,
    conns_max: usize,
}

impl OriginConnCache {
    /// Creates a cache that keeps the last `conns_max` connections.
    pub(super) fn new(conns_max: usize) -> OriginConnCache {
        OriginConnCache {
            conns: Arc::default(),
            conns_max,
        }
    }

    /// Keeps a connection whose answer has been read, or is read before its client asks again.
    pub(super) fn put(&self, kept_conn: OriginConn) {
        let mut conns = self.conns.lock().unwrap_or_else(PoisonError::into_inner);
        while conns.len() >= self.conns_max {
            conns.pop_front();
        }
        conns.push_back(kept_conn);
    }

    /// Takes a connection to `host` with these options. If there is none, the oldest makes room for a new one.
    fn take(&self, host: &HeaderValue, conn_options: ConnOptions) -> Option<OriginConn> {
        let mut conns = self.conns.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |kept_conn: &OriginConn| {
            kept_conn.host == host && kept_conn.conn_options == conn_options
        };
        match conns.iter().rposition(fits) {
            Some(at) => conns.remove(at),
            None => {
                if conns.len() >= self.conns_max {
                    conns.pop_front();
                }
                None
            }
        }
    }
}

/// Serves the requests of one connection, which counts towards the limit until its last tunnel is
/// closed.
pub(super) async fn serve(
    program: TcpStream,
    context: &Arc<ProxyContext>,
    place: &Arc<OwnedSemaphorePermit>,
) {
    let kept = OriginConnCache::new(1);
    let ours = SockRef::from(&program).try_clone();
    let service = service_fn(|request| {
        let (context, place, kept) = (context.clone(), place.clone(), kept.clone());
        async move { Ok::<_, Infallible>(answer(request, context, place, kept).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HELLO_WITHIN)
        .max_buf_size(HEAD_BYTES_MAX)
        .preserve_header_case(true)
        // A client may say all it has to say, and then listen.
        .half_close(true)
        .serve_connection(TokioIo::new(program), service)
        .with_upgrades()
        .await;
    if let Err(error) = served {
        // An answer that ends where its connection does would look whole.
        if error.is_user()
            && let Ok(ours) = &ours
        {
            let _ = ours.set_linger(Some(Duration::ZERO));
        }
        tracing::debug!(%error, "an HTTP client disconnected");
    }
}

async fn answer(
    request: Request<Incoming>,
    context: Arc<ProxyContext>,
    place: Arc<OwnedSemaphorePermit>,
    kept: OriginConnCache,
) -> Response<AnswerBody> {
    let answered = match conn_options_of(request.headers(), context.options) {
        Err(refusal) => Err(refusal),
        Ok(conn_options) if request.method() == Method::CONNECT => {
            connect(request, context, conn_options, place).await
        }
        Ok(conn_options) => {
            let request = request.map(Either::Left);
            let forwarded = forward(request, &context, conn_options, &kept).await;
            forwarded.map(|(response, origin_conn)| {
                // The client asks next when it has this answer.
                kept.put(origin_conn);
                response
            })
        }
    };
    answered.unwrap_or_else(|refusal| refused(&refusal))
}

pub(super) fn nonsense(text: impl Into<String>) -> ConnectRefusal {
    ConnectRefusal::new(RefusalCause::BadRequest, text)
}

/// The connection options of a request.
pub(super) fn conn_options_of(
    fields: &HeaderMap,
    conn_options: ConnOptions,
) -> Result<ConnOptions, ConnectRefusal> {
    let now = Zoned::now();
    let mut conn_options = match fields.get(PROXY_AUTHORIZATION) {
        Some(field) => {
            let user = user_of(field).ok_or_else(|| {
                nonsense("Proxy-Authorization: only Basic is supported, for its user name")
            })?;
            conn_options.with_user_name(&user, &now).map_err(nonsense)?
        }
        None => conn_options,
    };
    for (name, field) in [("by", BY), ("policy", POLICY)] {
        if let Some(value) = fields.get(field) {
            let value = value.to_str().unwrap_or_default().trim();
            conn_options = conn_options.with(name, value, &now).map_err(nonsense)?;
        }
    }
    Ok(conn_options)
}

fn user_of(field: &HeaderValue) -> Option<String> {
    let (scheme, coded) = field.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let plain = String::from_utf8(BASE64.decode(coded.trim()).ok()?).ok()?;
    let user = plain.split_once(':').map_or(&*plain, |(user, _)| user);
    // In a URL `+` and `=` are often written so, and not every client takes that back.
    Some(
        user.replace("%2B", "+")
            .replace("%2b", "+")
            .replace("%3D", "=")
            .replace("%3d", "="),
    )
}

/// Opens the connection that CONNECT asks for.
pub(super) async fn open_tunnel(
    uri: &Uri,
    context: &ProxyContext,
    conn_options: ConnOptions,
) -> Result<ProxyConnection, ConnectRefusal> {
    let host = uri.authority().filter(|at| !at.as_str().contains('@'));
    let host = host.ok_or_else(|| nonsense("CONNECT needs host:port"))?;
    let port = host.port_u16();
    let port = port.ok_or_else(|| nonsense("CONNECT needs a port: host:443"))?;
    context.open(host.host(), port, conn_options).await
}

async fn connect(
    mut request: Request<Incoming>,
    context: Arc<ProxyContext>,
    conn_options: ConnOptions,
    place: Arc<OwnedSemaphorePermit>,
) -> Result<Response<AnswerBody>, ConnectRefusal> {
    let open = open_tunnel(request.uri(), &context, conn_options).await?;
    tokio::spawn(async move {
        let _place = place;
        let upgraded = match hyper::upgrade::on(&mut request).await {
            Ok(upgraded) => upgraded,
            Err(error) => {
                return tracing::debug!(%error, "a client disconnected before its tunnel was open");
            }
        };
        let Ok(parts) = upgraded.downcast::<TokioIo<TcpStream>>() else {
            return tracing::error!("the connection is gone");
        };
        let mut open = open;
        // A client may speak before it has heard that it may.
        if !parts.read_buf.is_empty() {
            use tokio::io::AsyncWriteExt as _;
            if open.write_all(&parts.read_buf).await.is_err() {
                return super::carry::reset(parts.io.into_inner());
            }
        }
        open.carry(parts.io.into_inner()).await;
    });
    Ok(Response::new(Either::Right(Full::default())))
}

/// Asks the origin of a request with a whole URL. The connection is for the next one, once the answer is read.
pub(super) async fn forward(
    mut request: Request<ProgramBody>,
    context: &ProxyContext,
    conn_options: ConnOptions,
    kept: &OriginConnCache,
) -> Result<(Response<AnswerBody>, OriginConn), ConnectRefusal> {
    let uri = request.uri().clone();
    match uri.scheme() {
        Some(scheme) if *scheme == Scheme::HTTP => {}
        Some(scheme) => {
            let text = format!("a URL with {scheme}:// needs a tunnel: use CONNECT");
            return Err(nonsense(text));
        }
        None => {
            let text = "this is a proxy: it accepts http://host/path and CONNECT host:port";
            return Err(nonsense(text));
        }
    }
    let place = uri.authority().filter(|at| !at.as_str().contains('@'));
    let place = place.ok_or_else(|| nonsense("the URL has no host, or a user name"))?;
    let port = place.port_u16().unwrap_or(80);
    let host = HeaderValue::from_str(place.as_str());
    let host = host.map_err(|_| nonsense("the URL has no host"))?;
    *request.uri_mut() = uri
        .path_and_query()
        .map_or(Uri::from_static("/"), |path| Uri::from(path.clone()));
    let via = match request.version() {
        Version::HTTP_2 => VIA_HTTP_2,
        _ => VIA_HTTP_1,
    };
    *request.version_mut() = Version::HTTP_11;
    hop_ends(request.headers_mut(), via);
    // RFC 9112 §3.2.2: the URL's host counts, whatever the field says.
    request.headers_mut().insert(HOST, host.clone());
    let (head, body) = request.into_parts();
    let kept_conn = kept.take(&host, conn_options);
    if let Some(mut kept_conn) = kept_conn.filter(|_| is_asked_twice_safely(&head.method, &body)) {
        let same = Request::from_parts(head.clone(), Either::Right(Full::default()));
        if kept_conn.sender.ready().await.is_ok()
            && let Ok(response) = kept_conn.sender.send_request(same).await
        {
            return Ok(answered(response, kept_conn));
        }
        // The origin closed it meanwhile. RFC 9112 §9.3.1: anew.
    }
    let target = context.target(place.host(), port)?;
    let early_end = |error: hyper::Error| {
        let text = format!("{target} ended early: {error}");
        ConnectRefusal::new(RefusalCause::Refused, text)
    };
    let origin_conn = |sender| OriginConn {
        host: host.clone(),
        conn_options,
        sender,
    };
    // D2Prox makes the connection or drops what came for it: a request that is whole need not wait to hear which.
    if is_asked_twice_safely(&head.method, &body) {
        let open = context.session.open_optimistically(&target, conn_options);
        let open = open.await?;
        let why = open.failure();
        let same = Request::from_parts(head.clone(), Either::Right(Full::default()));
        match send(open, same).await {
            Ok((sender, response)) => return Ok(answered(response, origin_conn(sender))),
            Err(error) => match why.take() {
                // It waits for a place below, as any other connection does.
                Some(refusal) if refusal.cause == RefusalCause::Full => {}
                refusal => return Err(refusal.unwrap_or_else(|| early_end(error))),
            },
        }
    }
    let open = context.session.open(&target, conn_options).await?;
    let request = Request::from_parts(head, Either::Left(body));
    let (sender, response) = send(open, request).await.map_err(early_end)?;
    Ok(answered(response, origin_conn(sender)))
}

/// Sends a request by a new connection; the sender is for the next one.
async fn send(
    open: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: Request<ForwardBody>,
) -> hyper::Result<(SendRequest<ForwardBody>, Response<Incoming>)> {
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .preserve_header_case(true)
        .handshake(TokioIo::new(open))
        .await?;
    // Its error reaches the body, or the answer.
    tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    Ok((sender, response))
}

/// Whether a request can be repeated safely if its outcome is unknown.
fn is_asked_twice_safely(method: &Method, body: &ProgramBody) -> bool {
    matches!(*method, Method::GET | Method::HEAD) && body.is_end_stream()
}

fn answered(
    mut response: Response<Incoming>,
    origin_conn: OriginConn,
) -> (Response<AnswerBody>, OriginConn) {
    hop_ends(response.headers_mut(), VIA_HTTP_1);
    (response.map(Either::Left), origin_conn)
}

/// Removes hop-by-hop fields (RFC 9110 §7.6.1), and those for this proxy, and adds `via`.
fn hop_ends(fields: &mut HeaderMap, via: HeaderValue) {
    let named: Vec<HeaderName> = (fields.get_all(CONNECTION).iter())
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .filter(|name| *name != HOST && *name != CONTENT_LENGTH)
        .collect();
    let always = [
        CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        // hyper says it anew where it is needed.
        TRANSFER_ENCODING,
        UPGRADE,
        BY,
        POLICY,
    ];
    for name in named.iter().chain(&always) {
        fields.remove(name);
    }
    fields.append(VIA, via);
}

/// The answer to a request that is refused, which is logged.
pub(super) fn refused(refusal: &ConnectRefusal) -> Response<AnswerBody> {
    tracing::info!("{}", refusal.text);
    let (status, kind) = refusal.status();
    let text = format!("{}\n", refusal.text);
    let mut response = Response::new(Either::Right(Full::new(Bytes::from(text))));
    *response.status_mut() = status;
    let fields = response.headers_mut();
    fields.insert(
        PROXY_STATUS,
        HeaderValue::from_str(&format!("cedos; error={kind}")).expect("plain text"),
    );
    fields.insert(
        "content-type",
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    if status == StatusCode::SERVICE_UNAVAILABLE {
        fields.insert("retry-after", HeaderValue::from_static("30"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_sched::CostPolicy;

    fn fields(pairs: &[(&str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&str, &str)| {
            let name: HeaderName = name.parse().unwrap();
            (name, value.parse().unwrap())
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn user_name_and_fields_say_how_and_the_fields_have_the_last_word() {
        let user = BASE64.encode("by=%2B45m,policy=fast:x");
        let both = fields(&[
            ("proxy-authorization", &format!("Basic {user}")),
            ("cedos-policy", "free-only"),
        ]);
        let conn_options = conn_options_of(&both, ConnOptions::default()).unwrap();
        assert_eq!(conn_options.policy, CostPolicy::FreeOnly);
        assert!(conn_options.due.is_some());
        let bad = fields(&[("cedos-by", "soon")]);
        let refusal = conn_options_of(&bad, ConnOptions::default()).unwrap_err();
        assert_eq!(refusal.status().0, StatusCode::BAD_REQUEST);
        assert!(refusal.text.contains("07:30"), "{}", refusal.text);
    }

    #[test]
    fn what_is_for_this_hop_goes_no_further() {
        let mut told = fields(&[
            ("connection", "close, x-mine, host"),
            ("x-mine", "1"),
            ("x-theirs", "2"),
            ("host", "a.example"),
            ("proxy-authorization", "Basic eA=="),
            ("cedos-policy", "any"),
            ("transfer-encoding", "chunked"),
        ]);
        hop_ends(&mut told, VIA_HTTP_1);
        let mut left: Vec<&str> = told.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["host", "via", "x-theirs"]);
    }
}
