//! The one request of a flow: read, checked, and converted into the proxy's form.
//!
//! ```text
//! device ── "GET https://host/path HTTP/1.1\r\nHost: …\r\n\r\n" ──▶ Head ──▶ Request
//! ```
//!
//! Nothing of the device's head is ever copied to an origin as bytes: names and values are parsed,
//! filtered and written anew, and a flow carries one request, so the classic smuggling tricks have
//! no second reader to disagree with. They are refused all the same, because a client that sends
//! them is broken or hostile, and the answer should say so: bare CR or LF, folded lines, spaces
//! before a colon, two lengths, a length beside a coding, two `Host` headers.

use std::time::Duration;

use cedos_http::{SUPPLY_ASKED, SUPPLY_FIELD};
use d2tp_driver::{HostKey, MemoryCharge};
use d2tp_tunnel::{HEADERS_BY_RULES, HEADERS_FIELD, METERED_ANSWERS, METERED_FIELD};
use http::Method;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use url::Url;

use crate::dial::OriginTarget;
use crate::invitation::InvitationSecret;
use crate::key_text::{parse_key, show_key};
use crate::refusal::ProxRefusal;
use crate::request_head::{ProxRequestHead, RequestHeadError, read_head};

/// The most header fields of a request. A guess: browsers send about 20.
pub const HEADERS_MAX: usize = 128;

/// The most bytes of a method's name. A guess: the longest that is registered has 17.
const METHOD_BYTES_MAX: usize = 32;

/// A device's request.
#[derive(Debug)]
pub(crate) enum ProxRequest {
    /// GET or HEAD of a URL.
    Fetch(Box<FetchRequest>),
    /// CONNECT to a host and port.
    Tunnel(TunnelRequest),
    /// PUT or POST to a URL, or another method that is forwarded with its body.
    Upload(Box<UploadRequest>),
    /// RELAY to a host and port, or to a device by its key.
    Relay(RelayTarget),
    /// LISTEN: the clients that may call; none: any.
    Listen(Vec<HostKey>),
    /// CONNECT-IP: IP packets beside the flow, in datagrams.
    PacketTunnel {
        /// Whether only answers to what came over metered links may leave over them.
        answers_only: bool,
        /// Whether the client compresses headers of packets, and expands them.
        compresses: bool,
    },
    /// MAILBOX: the number of the one to join; none: a new one.
    Mailbox(Option<u32>),
    /// ENROL: a device asks to become a client.
    Enrol(EnrolRequest),
}

/// A CONNECT request.
#[derive(Clone, Debug)]
pub(crate) struct TunnelRequest {
    /// The host and port to connect to.
    pub(crate) target: OriginTarget,
    /// Whether the device asks how the server supplies it.
    pub(crate) reports_supply: bool,
}

/// A request to be enrolled.
#[derive(Clone, Debug)]
pub(crate) struct EnrolRequest {
    /// The invitation's secret.
    pub(crate) secret: InvitationSecret,
    /// The name that the device suggests.
    pub(crate) name: Option<String>,
}

/// The destination of a relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RelayTarget {
    /// An origin that speaks D2TP.
    Origin(OriginTarget),
    /// A device that listens here.
    Device(HostKey),
}

/// A request with a body, which follows the head in the flow.
#[derive(Clone, Debug)]
pub(crate) struct UploadRequest {
    /// The request's method, which is neither GET nor HEAD.
    pub(crate) method: Method,
    /// The absolute URL, without a fragment.
    pub(crate) url: Url,
    /// End-to-end headers to forward.
    pub(crate) headers: HeaderMap,
    /// Size of the body if known; else it extends to the flow's end.
    pub(crate) length: Option<u64>,
    /// Whether the device waits for 100 before it sends the body, or for 104 if there is a token.
    pub(crate) expects_continue: bool,
    /// The token by which the device finds the upload again if its flow is lost.
    pub(crate) token: Option<UploadToken>,
}

/// The token of an upload.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct UploadToken(Box<str>);

impl UploadToken {
    /// The header field with the token.
    const FIELD: &str = "cedos-upload";

    /// Parses the value of an upload token's header field.
    pub(crate) fn parse(value: &HeaderValue) -> Option<UploadToken> {
        let text = value.to_str().ok()?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let fits = (16..=64).contains(&text.len()) && text.chars().all(is_plain);
        fits.then(|| UploadToken(text.into()))
    }

    /// The token as it was sent.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a request may be sent again although the origin may have received it (RFC 9110 §9.2.2).
pub(crate) fn is_idempotent(method: &Method) -> bool {
    [Method::PUT, Method::DELETE, Method::OPTIONS].contains(method)
}

/// A GET or HEAD request.
#[derive(Clone, Debug)]
pub(crate) struct FetchRequest {
    /// Whether the request is HEAD.
    pub(crate) head_only: bool,
    /// The absolute URL, without a fragment.
    pub(crate) url: Url,
    /// End-to-end headers to forward, without `Range` and `If-Range`.
    pub(crate) headers: HeaderMap,
    /// The `Range` header, which the proxy answers itself.
    pub(crate) range: Option<HeaderValue>,
    /// The `If-Range` header, which the proxy evaluates itself.
    pub(crate) if_range: Option<HeaderValue>,
    /// Whether the device asks how the server supplies it.
    pub(crate) reports_supply: bool,
}

/// The target of a flow that begins with `bytes`: the URL or authority, or the status of the refusal.
/// `None`: the flow ended before. For the fuzzer, which uses public functions only.
#[doc(hidden)]
pub async fn check_head(mut bytes: &[u8]) -> Option<Result<String, u16>> {
    let head = match read_head(&mut bytes, Duration::MAX, &mut MemoryCharge::default()).await {
        Ok(head) => head,
        Err(RequestHeadError::Refused(refusal)) => return Some(Err(refusal.status())),
        Err(RequestHeadError::Gone(_)) => return None,
    };
    Some(match parse(&head) {
        Ok(ProxRequest::Fetch(fetch)) => Ok(fetch.url.into()),
        Ok(ProxRequest::Tunnel(tunnel)) => Ok(tunnel.target.to_string()),
        Ok(ProxRequest::Upload(upload)) => Ok(upload.url.into()),
        Ok(ProxRequest::Relay(RelayTarget::Origin(target))) => Ok(target.to_string()),
        Ok(ProxRequest::Relay(RelayTarget::Device(key))) => Ok(show_key(&key)),
        Ok(ProxRequest::Listen(_) | ProxRequest::Enrol(_) | ProxRequest::PacketTunnel { .. }) => {
            Ok("*".to_owned())
        }
        Ok(ProxRequest::Mailbox(number)) => {
            Ok(number.map_or("*".to_owned(), |number| number.to_string()))
        }
        Err(refusal) => Err(refusal.status()),
    })
}

/// Parses and checks a head.
pub(crate) fn parse(head: &ProxRequestHead) -> Result<ProxRequest, ProxRefusal> {
    let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut fields);
    match parsed.parse(head.bytes()) {
        Ok(httparse::Status::Complete(end)) if end == head.bytes().len() => {}
        Ok(_) => return Err(ProxRefusal::BadRequest("the head has no end")),
        Err(httparse::Error::TooManyHeaders) => {
            return Err(ProxRefusal::BadRequest("more than 128 header fields"));
        }
        Err(httparse::Error::Version) => return Err(ProxRefusal::VersionUnsupported),
        Err(httparse::Error::HeaderName) => {
            return Err(ProxRefusal::BadRequest(
                "a header name has a character it may not have",
            ));
        }
        Err(httparse::Error::HeaderValue) => {
            return Err(ProxRefusal::BadRequest(
                "a header value has a character it may not have",
            ));
        }
        Err(_) => return Err(ProxRefusal::BadRequest("the request line cannot be read")),
    }
    let (method, target) = (parsed.method.unwrap_or(""), parsed.path.unwrap_or(""));
    if parsed.version != Some(1) {
        return Err(ProxRefusal::VersionUnsupported);
    }
    let mut headers = header_map(parsed.headers)?;
    let supply = headers.remove(SUPPLY_FIELD);
    let reports_supply = supply.is_some_and(|value| value == SUPPLY_ASKED);
    let length = body_length(&headers)?;
    if is_without_body(method) && length.is_some_and(|length| length > 0) {
        return Err(ProxRefusal::BadRequest("these requests carry no body"));
    }
    match method {
        "CONNECT" => Ok(ProxRequest::Tunnel(TunnelRequest {
            target: OriginTarget::parse_authority(target).ok_or(ProxRefusal::BadRequest(
                "CONNECT needs host:port, such as example.org:443",
            ))?,
            reports_supply,
        })),
        "RELAY" => relayed(target).map(ProxRequest::Relay),
        "LISTEN" => listening(target, &headers).map(ProxRequest::Listen),
        "CONNECT-IP" if target == "*" => Ok(ProxRequest::PacketTunnel {
            answers_only: headers
                .get(METERED_FIELD)
                .is_some_and(|value| value == METERED_ANSWERS),
            compresses: headers
                .get(HEADERS_FIELD)
                .is_some_and(|value| value == HEADERS_BY_RULES),
        }),
        "CONNECT-IP" => Err(ProxRefusal::BadRequest("CONNECT-IP takes only *")),
        "MAILBOX" => mailbox_number(target).map(ProxRequest::Mailbox),
        "ENROL" => enrolling(target, &headers).map(ProxRequest::Enrol),
        "GET" | "HEAD" => {
            let url = absolute_url(target)?;
            let mut forward = headers;
            let range = forward.remove(header::RANGE);
            let if_range = forward.remove(header::IF_RANGE);
            for name in [
                header::HOST,
                header::CONTENT_LENGTH,
                header::EXPECT,
                header::MAX_FORWARDS,
            ] {
                forward.remove(name);
            }
            strip_hop_by_hop(&mut forward);
            let head_only = method == "HEAD";
            let fetch = FetchRequest {
                head_only,
                url,
                headers: forward,
                range,
                if_range,
                reports_supply,
            };
            Ok(ProxRequest::Fetch(Box::new(fetch)))
        }
        other if is_forwarded(other) => {
            let url = absolute_url(target)?;
            let mut forward = headers;
            let expects_continue = match forward.remove(header::EXPECT) {
                None => false,
                Some(value) if value.as_bytes().eq_ignore_ascii_case(b"100-continue") => true,
                Some(_) => return Err(ProxRefusal::ExpectationUnknown),
            };
            for name in [header::HOST, header::CONTENT_LENGTH, header::MAX_FORWARDS] {
                forward.remove(name);
            }
            let token = match forward.remove(UploadToken::FIELD) {
                None => None,
                Some(_) if !expects_continue || length.is_none() => {
                    return Err(ProxRefusal::BadRequest(
                        "Cedos-Upload needs Content-Length and Expect: 100-continue",
                    ));
                }
                Some(value) => Some(UploadToken::parse(&value).ok_or(ProxRefusal::BadRequest(
                    "Cedos-Upload is 16 to 64 letters, digits, - or _",
                ))?),
            };
            strip_hop_by_hop(&mut forward);
            Ok(ProxRequest::Upload(Box::new(UploadRequest {
                method: Method::from_bytes(method.as_bytes())
                    .map_err(|_| unknown_method(method))?,
                url,
                headers: forward,
                // PUT and POST without a length end with the flow; others have no body then (RFC 9112 §6.3).
                length: match method {
                    "PUT" | "POST" => length,
                    _ => Some(length.unwrap_or(0)),
                },
                expects_continue,
                token,
            })))
        }
        other => Err(unknown_method(other)),
    }
}

/// Whether requests with this method carry no body: GET and HEAD, and those that the proxy itself serves.
fn is_without_body(method: &str) -> bool {
    matches!(
        method,
        "GET" | "HEAD" | "CONNECT" | "RELAY" | "LISTEN" | "MAILBOX" | "ENROL" | "CONNECT-IP"
    )
}

/// Whether requests with this method are sent to origins with their body: all that are written as methods are, but
/// those that ask for the request itself, which may hold credentials, and the preface of HTTP/2.
fn is_forwarded(method: &str) -> bool {
    let is_written_so = |byte: u8| byte.is_ascii_uppercase() || byte == b'-';
    (1..=METHOD_BYTES_MAX).contains(&method.len())
        && method.bytes().all(is_written_so)
        && !matches!(method, "TRACE" | "TRACK" | "PRI")
}

fn unknown_method(method: &str) -> ProxRefusal {
    ProxRefusal::MethodUnsupported(method.chars().take(METHOD_BYTES_MAX).collect())
}

/// Parses the destination of a relay: `host:port`, or a key.
fn relayed(target: &str) -> Result<RelayTarget, ProxRefusal> {
    if let Ok(key) = parse_key(target) {
        return Ok(RelayTarget::Device(key));
    }
    let origin = OriginTarget::parse_authority(target).map(RelayTarget::Origin);
    origin.ok_or(ProxRefusal::BadRequest(
        "RELAY needs host:port, or the key of a device that listens here",
    ))
}

/// Parses which clients may call a listening device.
fn listening(target: &str, headers: &HeaderMap) -> Result<Vec<HostKey>, ProxRefusal> {
    if target != "*" {
        return Err(ProxRefusal::BadRequest("LISTEN takes only *"));
    }
    let callers = headers.get_all("caller").iter();
    callers
        .map(|value| value.to_str().ok().and_then(|text| parse_key(text).ok()))
        .collect::<Option<Vec<HostKey>>>()
        .ok_or(ProxRefusal::BadRequest("a Caller is not a client key"))
}

/// Parses which mailbox is meant: `*` is a new one.
fn mailbox_number(target: &str) -> Result<Option<u32>, ProxRefusal> {
    let is_number = !target.is_empty() && target.bytes().all(|byte| byte.is_ascii_digit());
    match target {
        "*" => Ok(None),
        number => number
            .parse()
            .ok()
            .filter(|_| is_number)
            .map(Some)
            .ok_or(ProxRefusal::BadRequest("MAILBOX takes * or a number")),
    }
}

/// Parses a request to become a client.
fn enrolling(target: &str, headers: &HeaderMap) -> Result<EnrolRequest, ProxRefusal> {
    if target != "*" {
        return Err(ProxRefusal::BadRequest("ENROL takes only *"));
    }
    let field = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let secret = field("invitation").and_then(InvitationSecret::from_text);
    let decode = |name| percent_encoding::percent_decode_str(name).decode_utf8();
    let name = field("device-name").and_then(|name| decode(name).ok());
    Ok(EnrolRequest {
        secret: secret.ok_or(ProxRefusal::BadRequest("ENROL needs an Invitation"))?,
        name: name.map(|name| name.into_owned()),
    })
}

/// Converts parsed fields to a map. httparse has checked them; `http` checks again.
pub(crate) fn header_map(fields: &[httparse::Header<'_>]) -> Result<HeaderMap, ProxRefusal> {
    let mut map = HeaderMap::with_capacity(fields.len());
    for field in fields {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| {
            ProxRefusal::BadRequest("a header name has a character it may not have")
        })?;
        let value = HeaderValue::from_bytes(field.value).map_err(|_| {
            ProxRefusal::BadRequest("a header value has a character it may not have")
        })?;
        map.append(name, value);
    }
    Ok(map)
}

/// The declared length of the body. Refuses heads whose end or target two parsers could interpret
/// differently.
pub(crate) fn body_length(headers: &HeaderMap) -> Result<Option<u64>, ProxRefusal> {
    let count = |name| headers.get_all(name).iter().count();
    match count(header::HOST) {
        0 => return Err(ProxRefusal::BadRequest("the Host header is missing")),
        1 => {}
        _ => return Err(ProxRefusal::BadRequest("more than one Host header")),
    }
    let lengths = count(header::CONTENT_LENGTH);
    match (headers.contains_key(header::TRANSFER_ENCODING), lengths) {
        (false, 0) => return Ok(None),
        (false, 1) => {}
        (false, _) => return Err(ProxRefusal::BadRequest("more than one Content-Length")),
        (true, 0) => {
            return Err(ProxRefusal::BadRequest(
                "Transfer-Encoding is not allowed; the end of the flow ends the body",
            ));
        }
        (true, _) => {
            return Err(ProxRefusal::BadRequest(
                "Content-Length and Transfer-Encoding together",
            ));
        }
    }
    let text = headers[header::CONTENT_LENGTH].to_str().unwrap_or_default();
    // `parse` alone would take a sign.
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(length) if digits => Ok(Some(length)),
        _ => Err(ProxRefusal::BadRequest("Content-Length is not a number")),
    }
}

/// Parses an absolute-form target.
fn absolute_url(target: &str) -> Result<Url, ProxRefusal> {
    if target.starts_with('/') || target == "*" {
        return Err(ProxRefusal::BadRequest(
            "this is a proxy: the request line needs the full URL, such as GET https://host/path",
        ));
    }
    // `url` mends what browsers mend; a proxy should see what was sent or refuse it.
    if !target.bytes().all(|b| b.is_ascii_graphic() && b != b'\\') {
        return Err(ProxRefusal::BadRequest(
            "the URL has characters that must be percent-encoded",
        ));
    }
    let url = Url::parse(target).map_err(|_| ProxRefusal::BadRequest("the URL cannot be read"))?;
    match url.scheme() {
        "http" | "https" => {}
        other => {
            return Err(ProxRefusal::SchemeUnsupported(
                other.chars().take(32).collect(),
            ));
        }
    }
    if !target[url.scheme().len()..].starts_with("://") {
        return Err(ProxRefusal::BadRequest("the URL needs // after its scheme"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(ProxRefusal::BadRequest(
            "a user name or password in the URL; send an Authorization header instead",
        ));
    }
    if url.fragment().is_some() {
        return Err(ProxRefusal::BadRequest(
            "a #fragment in the URL; it is never sent to servers",
        ));
    }
    Ok(url)
}

/// The field with the TCP port at which this proxy takes streams.
pub(crate) const STREAM_PORT: HeaderName = HeaderName::from_static("d2tp-stream-port");

/// Removes hop-by-hop fields (RFC 9110 §7.6.1), the fields that `Connection` names, and credentials for
/// proxies.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in [
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-authentication-info",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
    ] {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_head::{HEAD_BYTES_MAX, head_end};

    fn read(bytes: &[u8]) -> Result<ProxRequest, ProxRefusal> {
        match head_end(bytes, 0) {
            Err(why) => Err(ProxRefusal::BadRequest(why)),
            Ok(None) => Err(ProxRefusal::BadRequest("unfinished")),
            Ok(Some(end)) => parse(&ProxRequestHead {
                bytes: bytes.to_vec(),
                end,
            }),
        }
    }

    fn fetch(text: &str) -> Box<FetchRequest> {
        match read(text.as_bytes()) {
            Ok(ProxRequest::Fetch(fetch)) => fetch,
            other => panic!("{text:?} gave {other:?}"),
        }
    }

    fn status(text: &str) -> u16 {
        read(text.as_bytes()).expect_err(text).status()
    }

    #[test]
    fn a_plain_request_is_read() {
        let fetch = fetch(
            "GET https://h.example:8443/a?b=c HTTP/1.1\r\nHost: x\r\nRange: bytes=1-\r\nX-A: 1\r\n\r\n",
        );
        assert_eq!(fetch.url.as_str(), "https://h.example:8443/a?b=c");
        assert!(!fetch.head_only);
        assert_eq!(fetch.range.unwrap(), "bytes=1-");
        assert_eq!(fetch.headers.len(), 1);
        assert_eq!(fetch.headers["x-a"], "1");
    }

    #[test]
    fn hop_by_hop_headers_and_those_that_connection_names_are_not_forwarded() {
        let fetch = fetch(
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n\
             Keep-Alive: 5\r\nTE: trailers\r\nUpgrade: h2c\r\nProxy-Authorization: Basic x\r\n\
             Proxy-Connection: keep-alive\r\nAuthorization: Basic y\r\nCookie: c\r\n\r\n",
        );
        let mut names: Vec<_> = fetch.headers.keys().map(|n| n.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "cookie"]);
    }

    #[test]
    fn smuggling_attempts_are_refused() {
        for text in [
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nContent-Length: 0, 0\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nContent-Length: +0\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
            "GET http://h/ HTTP/1.1\nHost: h\n\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nX: a\rb\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nX: a\r\n\tb\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\n Host: h\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost : h\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nTransfer-Encoding : chunked\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\nX: \0\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\n: empty\r\n\r\n",
            "GET  http://h/  HTTP/1.1\r\nHost: h\r\n\r\n",
            "\r\nGET http://h/ HTTP/1.1\r\nHost: h\r\n\r\n",
        ] {
            assert_eq!(status(text), 400, "{text:?}");
        }
    }

    #[test]
    fn an_upload_is_read_with_its_length_and_expectation() {
        let upload = |text: &str| match read(text.as_bytes()) {
            Ok(ProxRequest::Upload(upload)) => upload,
            other => panic!("{text:?} gave {other:?}"),
        };
        let put = upload(
            "PUT http://h/a HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\nExpect: 100-Continue\r\n\
             Content-Type: text/plain\r\nConnection: X\r\nX: 1\r\n\r\n",
        );
        assert_eq!((put.method, put.length), (Method::PUT, Some(12)));
        assert!(put.expects_continue);
        let names: Vec<_> = put.headers.keys().map(|n| n.as_str()).collect();
        assert_eq!(names, ["content-type"]);
        let post = upload("POST http://h/ HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!((post.method, post.length), (Method::POST, None));
        assert!(!post.expects_continue);
    }

    #[test]
    fn other_methods_are_forwarded_and_have_a_body_only_if_they_say_so() {
        let upload = |text: &str| match read(text.as_bytes()) {
            Ok(ProxRequest::Upload(upload)) => upload,
            other => panic!("{text:?} gave {other:?}"),
        };
        let delete = upload("DELETE http://h/a HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!((delete.method, delete.length), (Method::DELETE, Some(0)));
        let search =
            upload("M-SEARCH http://h/ HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc");
        assert_eq!(
            (search.method.as_str(), search.length),
            ("M-SEARCH", Some(3))
        );
    }

    #[test]
    fn uploads_that_two_readers_could_cut_differently_are_refused() {
        for lines in [
            "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: chunked\r\n",
            "Transfer-Encoding: identity\r\n",
            "Content-Length: 3\r\nContent-Length: 3\r\n",
            "Content-Length: 3, 3\r\n",
            "Content-Length: +3\r\n",
            "Content-Length: -3\r\n",
            "Content-Length: 0x3\r\n",
            "Content-Length: 3 \x0b\r\n",
            "Content-Length: \r\n",
            "Content-Length: 18446744073709551616\r\n",
            "Content-Length : 3\r\n",
        ] {
            for method in ["PUT", "POST"] {
                let text = format!("{method} http://h/ HTTP/1.1\r\nHost: h\r\n{lines}\r\nabc");
                assert_eq!(status(&text), 400, "{text:?}");
            }
        }
        let expect = "PUT http://h/ HTTP/1.1\r\nHost: h\r\nExpect: tea\r\n\r\n";
        assert_eq!(status(expect), 417);
    }

    #[test]
    fn what_is_not_served_is_named() {
        let with = |line: &str| status(&format!("{line}\r\nHost: h\r\n\r\n"));
        assert_eq!(with("GET / HTTP/1.1"), 400);
        assert_eq!(with("OPTIONS * HTTP/1.1"), 400);
        assert_eq!(with("TRACE http://h/ HTTP/1.1"), 501);
        assert_eq!(with("PRI http://h/ HTTP/1.1"), 501);
        assert_eq!(with("PUT /path HTTP/1.1"), 400);
        assert_eq!(with("Brew http://h/ HTTP/1.1"), 501);
        assert_eq!(with("get http://h/ HTTP/1.1"), 501);
        assert_eq!(with("GET ftp://h/ HTTP/1.1"), 501);
        assert_eq!(with("GET http:h/ HTTP/1.1"), 400);
        assert_eq!(with("GET http://u:p@h/ HTTP/1.1"), 400);
        assert_eq!(with("GET http://h/#f HTTP/1.1"), 400);
        assert_eq!(with("GET http://h\\@evil/ HTTP/1.1"), 400);
        assert_eq!(with("GET http:///path HTTP/1.0"), 505);
        assert_eq!(with("GET http://h/ HTTP/1.0"), 505);
        assert_eq!(with("GET http://h/ HTTP/2.0"), 505);
        assert_eq!(with("CONNECT h HTTP/1.1"), 400);
        assert_eq!(with("CONNECT http://h:443/ HTTP/1.1"), 400);
    }

    #[test]
    fn a_tunnel_keeps_what_came_after_its_head() {
        let bytes = b"CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: h\r\n\r\n\x16\x03\n".to_vec();
        let end = head_end(&bytes, 0).unwrap().unwrap();
        let head = ProxRequestHead { bytes, end };
        assert_eq!(head.rest(), b"\x16\x03\n");
        match parse(&head) {
            Ok(ProxRequest::Tunnel(tunnel)) => {
                assert_eq!(tunnel.target.to_string(), "[2001:db8::1]:443");
                assert!(!tunnel.reports_supply);
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_head_over_the_limit_is_431_and_one_at_the_limit_is_read() {
        let line = "GET http://h/ HTTP/1.1\r\nHost: h\r\nX: ";
        let pad = HEAD_BYTES_MAX - line.len() - 4;
        let text = format!("{line}{}\r\n\r\n", "a".repeat(pad));
        let limit = Duration::from_secs(600);
        assert!(
            read_head(&mut text.as_bytes(), limit, &mut MemoryCharge::default())
                .await
                .is_ok()
        );
        let text = format!("{line}{}\r\n\r\n", "a".repeat(pad + 1));
        match read_head(&mut text.as_bytes(), limit, &mut MemoryCharge::default()).await {
            Err(RequestHeadError::Refused(refusal)) => assert_eq!(refusal.status(), 431),
            other => panic!("{other:?}"),
        }
    }

    /// Pieces that heads are made of, right and wrong.
    const PIECES: &[&str] = &[
        "GET ",
        "HEAD ",
        "CONNECT ",
        "POST ",
        "http://h/",
        "https://h:1/a?b",
        "//h/",
        "h:443",
        "/",
        " HTTP/1.1",
        " HTTP/1.0",
        "\r\n",
        "\r",
        "\n",
        "\r\n\r\n",
        "Host: h",
        "Host:",
        ": ",
        " ",
        "\t",
        "Content-Length: ",
        "0",
        "5",
        "Transfer-Encoding: chunked",
        "Connection: X, close",
        "X: y",
        "\0",
        "\u{80}",
        "Range: bytes=0-",
        "[::1]:1",
        "@",
        "#",
        "\\",
        "%",
    ];

    proptest::proptest! {
        #[test]
        fn no_head_makes_the_reader_panic_and_what_is_read_is_clean(
            picks in proptest::collection::vec(0..PIECES.len(), 0..40),
        ) {
            let mut text: String = picks.iter().map(|pick| PIECES[*pick]).collect();
            text.push_str("\r\n\r\n");
            if let Ok(ProxRequest::Fetch(fetch)) = read(text.as_bytes()) {
                proptest::prop_assert!(fetch.url.has_host());
                for name in ["host", "content-length", "transfer-encoding", "connection"] {
                    proptest::prop_assert!(!fetch.headers.contains_key(name), "{name} in {text:?}");
                }
            }
        }

        #[test]
        fn a_correct_head_with_one_byte_changed_never_panics(at in 0usize..60, byte: u8) {
            let mut head = b"GET http://h.example/path HTTP/1.1\r\nHost: h\r\nX-A: b\r\n\r\n".to_vec();
            let at = at % head.len();
            head[at] = byte;
            let _ = read(&head);
        }
    }
}
