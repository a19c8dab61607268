//! The built-in origin: a small web server with an object of every size.
//!
//! ```text
//! GET, HEAD /bytes/N[?seed=S]   N bytes generated from S (default: the scenario's seed); Range, If-Range,
//!                               a strong ETag
//! GET /feed/NAME                the feed of that name as it is at this moment
//! PUT, POST /upload[/NAME]      accepts a body; answers {"bytes": N, "sha256": "…"}
//! ```
//!
//! At another port it answers every request as a captive portal: "302 Found", to a page for signing
//! in.
//!
//! It accepts kernel MPTCP as well as TCP.

use bytes::Bytes;
use cedos_lab_scenario::content;
use d2tp_tcp::multipath;
use http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_RANGE, LOCATION, RANGE,
};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::TcpCongestion;
use rustls_pki_types::PrivateKeyDer;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// The largest object.
pub const OBJECT_BYTES_MAX: u64 = 1 << 50;
/// The congestion control of the origin's TCP, whatever this machine is configured to use.
const CONGESTION: &str = "cubic";
/// Bytes per piece of a body.
const PIECE_BYTES: u64 = 64 * 1024;

/// Serves on `listener` until the returned future is dropped.
async fn serve_with<A, F>(listener: TcpListener, tls: Option<TlsAcceptor>, answer: A)
where
    A: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Response<Content>> + Send + 'static,
{
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Probably no descriptors are left: wait until some connections end.
                tracing::warn!(%error, "the origin cannot accept");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let (tls, answer) = (tls.clone(), answer.clone());
        tokio::spawn(async move {
            let served = match tls {
                None => converse(stream, answer).await,
                Some(tls) => match tls.accept(stream).await {
                    Ok(stream) => converse(stream, answer).await,
                    Err(error) => Err(error.into()),
                },
            };
            if let Err(error) = served {
                tracing::debug!(error = %error, "a connection to the origin ended");
            }
        });
    }
}

async fn converse<S, A, F>(stream: S, answer: A) -> Result<(), Box<dyn Error + Send + Sync>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    A: Fn(Request<Incoming>) -> F,
    F: Future<Output = Response<Content>> + Send + 'static,
{
    let service = service_fn(move |request| {
        let answer = answer(request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    auto::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(stream), service)
        .await
}

/// Settings for serving over TLS as well.
#[derive(Debug)]
pub struct Tls {
    /// The addresses to listen at.
    pub addresses: Vec<SocketAddr>,
    /// The certificate in DER.
    pub certificate: Vec<u8>,
    /// The private key in PKCS #8 DER.
    pub key: Vec<u8>,
}

impl Tls {
    fn acceptor(self) -> anyhow::Result<TlsAcceptor> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let key = PrivateKeyDer::try_from(self.key).map_err(anyhow::Error::msg)?;
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate.into()], key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

/// How many bytes of each upload have arrived, by its name, during the upload and afterwards.
#[derive(Clone, Debug, Default)]
pub struct UploadCounts(Arc<Mutex<BTreeMap<String, u64>>>);

impl UploadCounts {
    /// Bytes of the upload to `/upload/NAME` that have arrived. A second request counts from where
    /// it exceeds the first.
    pub fn arrived(&self, name: &str) -> u64 {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.get(name).copied().unwrap_or(0)
    }

    fn record(&self, name: &str, bytes: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = counts.entry(name.to_owned()).or_default();
        *known = bytes.max(*known);
    }
}

/// The requests for objects that the built-in origin got: of each object, the bytes at which they began.
#[derive(Clone, Debug, Default)]
pub struct ObjectRequests(Arc<Mutex<BTreeMap<String, Vec<u64>>>>);

impl ObjectRequests {
    /// The number of requests that began at a byte of their object at which an earlier one had begun.
    pub fn twice(&self) -> u64 {
        let requests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let repeated = requests.values().map(|begun| {
            let distinct: BTreeSet<&u64> = begun.iter().collect();
            (begun.len() - distinct.len()) as u64
        });
        repeated.sum()
    }

    /// The objects for which requests began twice at the same byte, with those bytes in order.
    pub fn repeated(&self) -> Vec<(String, Vec<u64>)> {
        let requests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_repeated = |begun: &[u64]| {
            let distinct: BTreeSet<&u64> = begun.iter().collect();
            distinct.len() < begun.len()
        };
        let repeated = requests.iter().filter(|(_, begun)| is_repeated(begun));
        repeated
            .map(|(object, begun)| (object.clone(), begun.clone()))
            .collect()
    }

    fn record(&self, object: &str, at: u64) {
        let mut requests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        requests.entry(object.to_owned()).or_default().push(at);
    }
}

/// The feeds that the built-in origin serves now, by name.
#[derive(Clone, Debug, Default)]
pub struct ServedFeeds(Arc<Mutex<BTreeMap<String, String>>>);

impl ServedFeeds {
    /// Serves this document at `/feed/NAME` from now on.
    pub fn set(&self, name: &str, document: String) {
        let mut feeds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        feeds.insert(name.to_owned(), document);
    }

    fn document(&self, name: &str) -> Option<String> {
        let feeds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        feeds.get(name).cloned()
    }
}

/// A built-in origin, before it runs.
#[derive(Debug, Default)]
pub struct OriginServer {
    /// The addresses for HTTP.
    pub plain: Vec<SocketAddr>,
    /// The addresses and certificate for HTTPS.
    pub tls: Option<Tls>,
    /// The address at which the origin answers as a captive portal.
    pub portal: Option<SocketAddr>,
    /// The address at which the origin is an HTTP proxy.
    pub http_proxy: Option<SocketAddr>,
    /// The seed of the content, if a request has none.
    pub seed: u64,
    /// The byte counts of uploads.
    pub received: UploadCounts,
    /// The requests for objects.
    pub requests: ObjectRequests,
    /// Feeds that the origin serves at `/feed/NAME`.
    pub feeds: ServedFeeds,
}

impl OriginServer {
    /// Serves on the calling thread until `stopped` resolves.
    ///
    /// # Errors
    /// An address cannot be bound.
    pub fn run(
        self,
        ready: impl FnOnce(Vec<SocketAddr>),
        stopped: impl Future,
    ) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let (seed, received, requests) = (self.seed, self.received, self.requests);
            let feeds = self.feeds;
            let respond = move |request| {
                let (received, requests) = (received.clone(), requests.clone());
                answer(request, seed, received, requests, feeds.clone())
            };
            let mut bound = Vec::new();
            let mut servers = tokio::task::JoinSet::new();
            for address in self.plain {
                let listener = listen(address)?;
                bound.push(listener.local_addr()?);
                servers.spawn(serve_with(listener, None, respond.clone()));
            }
            if let Some(tls) = self.tls {
                let addresses = tls.addresses.clone();
                let acceptor = tls.acceptor()?;
                for address in addresses {
                    let listener = listen(address)?;
                    servers.spawn(serve_with(
                        listener,
                        Some(acceptor.clone()),
                        respond.clone(),
                    ));
                }
            }
            if let Some(portal) = self.portal {
                servers.spawn(serve_with(listen(portal)?, None, sign_in));
            }
            if let Some(http_proxy) = self.http_proxy {
                servers.spawn(crate::http_proxy::serve(listen(http_proxy)?));
            }
            ready(bound);
            stopped.await;
            Ok(())
        })
    }
}

fn listen(at: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = multipath::listen(at)?;
    // A namespace may only choose algorithms that its machine permits to all users; this socket may
    // use others.
    if let Err(error) = setsockopt(&listener, TcpCongestion, &CONGESTION.into()) {
        tracing::warn!(%error, "TCP from the origin is not CUBIC but what this machine is set to");
    }
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

async fn answer(
    request: Request<Incoming>,
    seed: u64,
    received: UploadCounts,
    requests: ObjectRequests,
    feeds: ServedFeeds,
) -> Response<Content> {
    match (request.method(), request.uri().path()) {
        (&Method::GET, path) if path.starts_with("/feed/") => feed(path, &feeds),
        (&Method::GET | &Method::HEAD, path) if path.starts_with("/bytes/") => {
            object(&request, seed, &requests)
        }
        (&Method::PUT | &Method::POST, path) if is_upload(path) => upload(request, &received).await,
        (_, path) if is_upload(path) => {
            text(StatusCode::METHOD_NOT_ALLOWED, "PUT or POST to /upload\n")
        }
        _ => text(
            StatusCode::NOT_FOUND,
            "there is /bytes/N, /feed/NAME and /upload\n",
        ),
    }
}

/// The answer of a captive portal, to any request to any host.
async fn sign_in(_: Request<Incoming>) -> Response<Content> {
    let mut answer = text(StatusCode::FOUND, "sign in first\n");
    let page = HeaderValue::from_static("http://portal.example/sign-in");
    answer.headers_mut().insert(LOCATION, page);
    answer
}

fn feed(path: &str, feeds: &ServedFeeds) -> Response<Content> {
    let name = path.strip_prefix("/feed/").unwrap_or_default();
    let Some(document) = feeds.document(name) else {
        return text(StatusCode::NOT_FOUND, "there is no such feed\n");
    };
    let mut answer = text(StatusCode::OK, &document);
    let kind = HeaderValue::from_static("application/rss+xml");
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}

fn is_upload(path: &str) -> bool {
    path == "/upload" || path.starts_with("/upload/")
}

fn object(request: &Request<Incoming>, seed: u64, requests: &ObjectRequests) -> Response<Content> {
    let Some(total) = request
        .uri()
        .path()
        .strip_prefix("/bytes/")
        .and_then(|n| n.parse().ok())
    else {
        return text(
            StatusCode::NOT_FOUND,
            "expected a number of bytes: /bytes/1000000\n",
        );
    };
    if total > OBJECT_BYTES_MAX {
        return text(StatusCode::NOT_FOUND, "no object is that large\n");
    }
    let named = request
        .uri()
        .query()
        .and_then(|q| q.split('&').find_map(|p| p.strip_prefix("seed=")));
    let seed = named.and_then(|s| s.parse().ok()).unwrap_or(seed);
    let etag = format!("\"{total}-{seed}\"");
    let header = |name| {
        request
            .headers()
            .get(name)
            .and_then(|v: &HeaderValue| v.to_str().ok())
    };
    let same = header(IF_RANGE).is_none_or(|condition| condition == etag);
    let range = header(RANGE).filter(|_| same && request.method() == Method::GET);
    let builder = Response::builder()
        .header(ACCEPT_RANGES, "bytes")
        .header(ETAG, &etag)
        .header(CONTENT_TYPE, "application/octet-stream");
    let (builder, at, end) = match range.map(|range| wanted(range, total)) {
        None | Some(RequestedRange::All) => (builder.status(StatusCode::OK), 0, total),
        Some(RequestedRange::Part { first, end }) => {
            let range = format!("bytes {first}-{}/{total}", end - 1);
            (
                builder
                    .status(StatusCode::PARTIAL_CONTENT)
                    .header(CONTENT_RANGE, range),
                first,
                end,
            )
        }
        Some(RequestedRange::Nothing) => {
            let builder = builder.status(StatusCode::RANGE_NOT_SATISFIABLE);
            (
                builder.header(CONTENT_RANGE, format!("bytes */{total}")),
                0,
                0,
            )
        }
    };
    let content = Content::Made { seed, at, end };
    let head = request.method() == Method::HEAD;
    if !head {
        requests.record(&request.uri().to_string(), at);
    }
    let builder = builder.header(CONTENT_LENGTH, end - at);
    builder
        .body(if head { Content::NONE } else { content })
        .expect("these headers are valid")
}

#[derive(Debug, PartialEq, Eq)]
enum RequestedRange {
    All,
    Part { first: u64, end: u64 },
    Nothing,
}

/// The part of `total` bytes that a Range header requests. More than one range is answered with
/// everything. // RFC 9110 §14.2
fn wanted(range: &str, total: u64) -> RequestedRange {
    let Some((first, last)) = range
        .strip_prefix("bytes=")
        .and_then(|r| r.trim().split_once('-'))
    else {
        return RequestedRange::All;
    };
    let part = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => (first, last.saturating_add(1).min(total)),
        (Ok(first), _) if last.is_empty() => (first, total),
        (_, Ok(tail)) if first.is_empty() => (total.saturating_sub(tail), total),
        _ => return RequestedRange::All,
    };
    let (first, end) = part;
    if first < end {
        RequestedRange::Part { first, end }
    } else {
        RequestedRange::Nothing
    }
}

async fn upload(request: Request<Incoming>, received: &UploadCounts) -> Response<Content> {
    use sha2::{Digest, Sha256};
    let name = request.uri().path().trim_start_matches("/upload");
    let name = name.trim_start_matches('/').to_owned();
    let mut body = request.into_body();
    let mut digest = Sha256::new();
    let mut bytes = 0u64;
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => {
                if let Ok(data) = frame.into_data() {
                    bytes += data.len() as u64;
                    digest.update(&data);
                    received.record(&name, bytes);
                }
            }
            Err(error) => {
                tracing::debug!(%error, bytes, "an upload broke off");
                return text(StatusCode::BAD_REQUEST, "the body broke off\n");
            }
        }
    }
    let hex: String = digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    text(
        StatusCode::OK,
        &serde_json::json!({ "bytes": bytes, "sha256": hex }).to_string(),
    )
}

fn text(status: StatusCode, text: &str) -> Response<Content> {
    let content = Content::Text(Some(Bytes::copy_from_slice(text.as_bytes())));
    let builder = Response::builder().status(status);
    builder.body(content).expect("a status alone is valid")
}

/// A body: generated while it is read, or a line of text.
enum Content {
    Made { seed: u64, at: u64, end: u64 },
    Text(Option<Bytes>),
}

impl Content {
    const NONE: Content = Content::Text(None);
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(match &mut *self {
            Content::Made { seed, at, end } if *at < *end => {
                let mut piece = vec![0; (*end - *at).min(PIECE_BYTES) as usize];
                content::fill(*seed, *at, &mut piece);
                *at += piece.len() as u64;
                Some(Ok(Frame::data(piece.into())))
            }
            Content::Made { .. } => None,
            Content::Text(text) => text.take().map(|text| Ok(Frame::data(text))),
        })
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Content::Text(None))
            || matches!(self, Content::Made { at, end, .. } if at == end)
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Content::Made { at, end, .. } => SizeHint::with_exact(end - at),
            Content::Text(text) => {
                SizeHint::with_exact(text.as_ref().map_or(0, |t| t.len() as u64))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_the_standard_says() {
        let part = |first, end| RequestedRange::Part { first, end };
        for (range, expected) in [
            ("bytes=0-0", part(0, 1)),
            ("bytes=10-", part(10, 100)),
            ("bytes=-5", part(95, 100)),
            ("bytes=-500", part(0, 100)),
            ("bytes=90-900", part(90, 100)),
            ("bytes=100-", RequestedRange::Nothing),
            ("bytes=-0", RequestedRange::Nothing),
            ("bytes=5-4", RequestedRange::All),
            ("bytes=0-1,5-6", RequestedRange::All),
            ("lines=1-2", RequestedRange::All),
        ] {
            assert_eq!(wanted(range, 100), expected, "{range}");
        }
        assert_eq!(wanted("bytes=0-", 0), RequestedRange::Nothing);
    }
}
