//! The origin side: one request, one connection, redirects followed here.
//!
//! ```text
//! fetch ── ask ── dial (filter) ── TLS (ALPN) ── HTTP/1.1 or HTTP/2 ──▶ head ── redirect? ──┐
//!             ▲                                                                            │
//!             └───────────────────────── at most redirects_max times ──────────────────────┘
//! ```
//!
//! An upload goes to where it was sent and nowhere else: redirects of PUT and POST are the device's
//! to follow.
//!
//! Each request has a connection of its own: no pool means no state that one client's request can
//! leave behind for another's. Not done here: reusing connections between fetches of one client.

use std::error::Error;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
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

use crate::dial::{OriginTarget, Resolve, allowed_addresses, dial};
use crate::egress::EgressFilter;
use crate::refusal::ProxRefusal;
use crate::tls;

/// The most bytes of an origin's response head.
const RESPONSE_HEAD_BYTES_MAX: usize = 64 * 1024;
/// The most header fields of an origin's response head.
const RESPONSE_HEADERS_MAX: usize = 128;
/// HTTP/2 receive windows: bytes that one origin may have in flight. A guess: 1 Gb/s at 8 ms.
const H2_WINDOW_BYTES: u32 = 1 << 20;
/// The name in `Via`, `Cache-Status` and `Proxy-Status`.
pub(crate) const PSEUDONYM: &str = "d2prox";

/// The connector to origins.
pub(crate) struct Upstream {
    pub(crate) filter: EgressFilter,
    pub(crate) resolver: Arc<dyn Resolve>,
    pub(crate) tls: Arc<rustls::ClientConfig>,
    pub(crate) dns_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) redirects_max: u32,
}

/// The body of a request to an origin.
pub(crate) struct OriginRequestBody {
    pub(crate) body: UnsyncBoxBody<Bytes, io::Error>,
    /// Bytes of the body that were written to the connection.
    pub(crate) sent: Arc<AtomicU64>,
}

impl OriginRequestBody {
    fn nothing() -> OriginRequestBody {
        OriginRequestBody {
            body: Empty::new().map_err(|never| match never {}).boxed_unsync(),
            sent: Arc::default(),
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
    _connection: AbortOnDropHandle<()>,
}

/// Why a body was cut short.
#[derive(Debug)]
pub(crate) struct OriginBodyError(pub(crate) String);

impl OriginBody {
    /// The size, if the origin declared it.
    pub(crate) fn size(&self) -> Option<u64> {
        self.body.size_hint().exact()
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
                Ok(None) => return Ok(None),
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

impl Upstream {
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

    /// Requests a URL and follows redirects.
    pub(crate) async fn fetch(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
    ) -> Result<OriginResponse, ProxRefusal> {
        let mut url = url.clone();
        let mut headers = headers.clone();
        headers.append(header::VIA, HeaderValue::from_static("1.1 d2prox"));
        let mut redirects = 0;
        loop {
            let mut response = self
                .ask(method, &url, &headers, OriginRequestBody::nothing())
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
    ) -> Result<OriginResponse, ProxRefusal> {
        let mut headers = headers.clone();
        headers.append(header::VIA, HeaderValue::from_static("1.1 d2prox"));
        // hyper leaves it out where the body is empty.
        if let Some(length) = outgoing.body.size_hint().exact() {
            headers.insert(header::CONTENT_LENGTH, length.into());
        }
        self.ask(method, url, &headers, outgoing).await
    }

    /// Sends one request and returns its response.
    async fn ask(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        outgoing: OriginRequestBody,
    ) -> Result<OriginResponse, ProxRefusal> {
        let target = OriginTarget::of(url).ok_or(ProxRefusal::BadRequest("the URL has no host"))?;
        let until = Instant::now() + self.dns_timeout + self.connect_timeout;
        let tcp = self.connect(&target).await?;
        if url.scheme() == "http" {
            return self
                .exchange_http1(tcp, method, url, headers, &target, outgoing)
                .await;
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
        if tls.get_ref().1.alpn_protocol() == Some(b"h2") {
            self.exchange_http2(tls, method, url, headers, &target, outgoing)
                .await
        } else {
            self.exchange_http1(tls, method, url, headers, &target, outgoing)
                .await
        }
    }

    async fn exchange_http1<S>(
        &self,
        stream: S,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        target: &OriginTarget,
        outgoing: OriginRequestBody,
    ) -> Result<OriginResponse, ProxRefusal>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (mut sender, connection) = http1::Builder::new()
            .max_buf_size(RESPONSE_HEAD_BYTES_MAX)
            .max_headers(RESPONSE_HEADERS_MAX)
            .handshake::<_, UnsyncBoxBody<Bytes, io::Error>>(TokioIo::new(stream))
            .await
            .map_err(|error| refusal_of(&error, target))?;
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = connection.await; // Its error reaches the body or the answer.
        }));
        let path = &url[url::Position::BeforePath..url::Position::AfterQuery];
        let OriginRequestBody { body, sent } = outgoing;
        let mut request = request(method, path, headers, body)?;
        let authority = &url[url::Position::BeforeHost..url::Position::AfterPort];
        let authority = HeaderValue::from_str(authority)
            .map_err(|_| ProxRefusal::BadRequest("the host cannot be put into a header"))?;
        request.headers_mut().insert(header::HOST, authority);
        self.answered(sender.send_request(request), &sent, url, target, connection)
            .await
    }

    async fn exchange_http2<S>(
        &self,
        stream: S,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        target: &OriginTarget,
        outgoing: OriginRequestBody,
    ) -> Result<OriginResponse, ProxRefusal>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (mut sender, connection) = http2::Builder::new(TokioExecutor::new())
            .max_header_list_size(RESPONSE_HEAD_BYTES_MAX as u32)
            .initial_stream_window_size(H2_WINDOW_BYTES)
            .initial_connection_window_size(H2_WINDOW_BYTES)
            .handshake::<_, UnsyncBoxBody<Bytes, io::Error>>(TokioIo::new(stream))
            .await
            .map_err(|error| refusal_of(&error, target))?;
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = connection.await;
        }));
        let whole = &url[..url::Position::AfterQuery];
        let OriginRequestBody { body, sent } = outgoing;
        let mut request = request(method, whole, headers, body)?;
        *request.version_mut() = Version::HTTP_2;
        self.answered(sender.send_request(request), &sent, url, target, connection)
            .await
    }

    async fn answered(
        &self,
        answer: impl Future<Output = hyper::Result<http::Response<Incoming>>>,
        sent: &AtomicU64,
        url: &Url,
        target: &OriginTarget,
        connection: AbortOnDropHandle<()>,
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
        Ok(OriginResponse {
            status: head.status,
            version: head.version,
            headers: head.headers,
            url: url.clone(),
            redirects: 0,
            body: OriginBody {
                body,
                idle_timeout: self.idle_timeout,
                _connection: connection,
            },
        })
    }
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

/// The `Location` of an answer that redirects a GET or HEAD.
fn redirect_location(status: StatusCode, headers: &HeaderMap) -> Option<&HeaderValue> {
    match status.as_u16() {
        301 | 302 | 303 | 307 | 308 => headers.get(header::LOCATION),
        _ => None,
    }
}

/// The target of a redirect, if it may be followed.
fn follow(from: &Url, location: &HeaderValue) -> Result<Url, ProxRefusal> {
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
