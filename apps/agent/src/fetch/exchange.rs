//! One GET: request, redirects, the answer's head, and its body as it comes.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use bytes::{Bytes, BytesMut};
use cedos_http::{SUPPLY_ASKED, SUPPLY_FIELD};
use cedos_text::RemoteText;
use http::header::{
    ACCEPT_ENCODING, ALT_SVC, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE,
    CONTENT_TYPE, COOKIE, HOST, IF_RANGE, LOCATION, RANGE, RETRY_AFTER, USER_AGENT,
};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use tokio::io::AsyncReadExt;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use url::Url;

use super::alt_svc;
use super::cookie_file::CookieFile;
use super::dial::{AnnouncedObject, ByteStream, Dial, EgressLink, FetchFault, HEAD_MAX};
use super::filename;
use super::header::HeaderField;
use super::object_version::ObjectVersion;
use super::outcome::{TransferExit, TransferFailure, TransferReason};
use super::proxy_status;
use super::request_method::RequestMethod;
use super::stream_ports;
use super::validator::Validator;

/// The number of redirects after which a loop is assumed (as browsers and curl's documentation do).
pub const REDIRECTS_MAX: usize = 20;

/// The most bytes of an explanation that are read.
const WORDS_BYTES_MAX: usize = 4096;

/// The longest wait that an origin may ask for by `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

/// The name of this program in requests.
pub(crate) const AGENT: &str = concat!("cedos/", env!("CARGO_PKG_VERSION"));

/// A request for an object or a range of it, or about a folder of a WebDAV server.
#[derive(Debug, Clone)]
pub struct GetRequest {
    /// The URL of the object.
    pub url: Url,
    /// The first byte to request.
    pub from: u64,
    /// The last byte to request; none is the end.
    pub to: Option<u64>,
    /// Requests the range only if the object still has this validator.
    pub if_range: Option<Validator>,
    /// Requests the object only if it no longer has this version.
    pub unless: Option<ObjectVersion>,
    /// Whether a redirect from `https` to `http` is followed.
    pub allow_downgrade: bool,
    /// Header fields that the user added.
    pub fields: Arc<[HeaderField]>,
    /// The user's cookies, which go where their file says.
    pub cookies: Option<Arc<CookieFile>>,
    /// The method of the request.
    pub method: RequestMethod,
}

/// The part of the object that an answer carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentPart {
    /// The object from its first byte, with its length if known.
    Whole(Option<u64>),
    /// A range of the object, with the object's length if known.
    Range {
        /// The first byte of the range.
        from: u64,
        /// The last byte of the range.
        to: u64,
        /// Length of the whole object.
        total: Option<u64>,
    },
    /// The object still has the version that the request named, and the body is empty.
    NotModified,
    /// The requested range does not exist; with the object's length if known.
    Unsatisfiable(Option<u64>),
}

impl ContentPart {
    /// The length of the whole object, if the answer tells it.
    pub fn object_length(self) -> Option<u64> {
        match self {
            ContentPart::Whole(length) => length,
            ContentPart::Range { total, .. } => total,
            ContentPart::NotModified => None,
            ContentPart::Unsatisfiable(total) => total,
        }
    }
}

/// The head of an answer, with the body still to be read.
pub struct FetchResponse {
    /// The part of the object that the body carries.
    pub part: ContentPart,
    /// The validator of the object.
    pub validator: Option<Validator>,
    /// The version of the object, for a later conditional request.
    pub version: Option<ObjectVersion>,
    /// A content coding that was not requested; the bytes are kept encoded.
    pub encoding: Option<String>,
    /// The file name that the origin suggests.
    pub name: Option<String>,
    /// The media type according to the origin.
    pub media_type: Option<String>,
    /// Whether the body is a web page.
    pub is_page: bool,
    body: FetchBody,
}

enum FetchBody {
    /// The body after a head that was read here.
    Http(Incoming, AbortHandle),
    /// The rest of an answer whose head an earlier process read.
    Rest(Box<dyn ByteStream>),
}

impl Drop for FetchResponse {
    fn drop(&mut self) {
        // Nothing more may arrive on a link we have left.
        if let FetchBody::Http(_, connection) = &self.body {
            connection.abort();
        }
    }
}

/// The size of reads from the rest of an answer.
const REST_READ_BYTES: usize = 64 * 1024;

impl FetchResponse {
    /// The rest of an answer, from byte `from` of the object on.
    pub fn continued(
        stream: Box<dyn ByteStream>,
        from: u64,
        total: Option<u64>,
        validator: Option<Validator>,
    ) -> FetchResponse {
        let to = total.map_or(u64::MAX, |total| total.saturating_sub(1));
        FetchResponse {
            part: ContentPart::Range { from, to, total },
            validator,
            version: None,
            encoding: None,
            name: None,
            media_type: None,
            is_page: false,
            body: FetchBody::Rest(stream),
        }
    }

    /// The next bytes; `None` at a clean end, a fault if the answer was cut short.
    pub async fn next(&mut self) -> Option<Result<Bytes, FetchFault>> {
        let body = match &mut self.body {
            FetchBody::Http(body, _) => body,
            FetchBody::Rest(stream) => {
                let mut bytes = BytesMut::with_capacity(REST_READ_BYTES);
                return match stream.read_buf(&mut bytes).await {
                    Ok(0) => None,
                    Ok(_) => Some(Ok(bytes.freeze())),
                    Err(error) => Some(Err(FetchFault::Proxy(error.to_string()))),
                };
            }
        };
        loop {
            return match body.frame().await? {
                Ok(frame) => match frame.into_data() {
                    Ok(data) => Some(Ok(data)),
                    Err(_trailers) => continue,
                },
                Err(error) => Some(Err(broken(&error))),
            };
        }
    }
}

/// Sends a request, follows redirects, and returns an answer that carries the object or shows that it
/// has changed.
pub async fn exchange(
    dial: &impl Dial,
    ask: &GetRequest,
    via: &EgressLink,
) -> Result<FetchResponse, FetchFault> {
    let mut url = ask.url.clone();
    let credentials = credentials(&url);
    for _ in 0..=REDIRECTS_MAX {
        let same_origin = url.origin() == ask.url.origin();
        let credentials = credentials.as_deref().filter(|_| same_origin);
        let fields = ask
            .fields
            .iter()
            .filter(|field| same_origin || !field.is_credential());
        let request = request(dial, ask, &url, credentials, fields)?;
        let stream = dial.dial(&url, via).await?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.map_err(|e| broken(&e))?;
        let connection = tokio::spawn(connection).abort_handle();
        let answer = match timeout(dial.answers_within(), sender.send_request(request)).await {
            Ok(answer) => answer.map_err(|e| broken(&e))?,
            Err(_) => {
                connection.abort();
                let text = format!("{} accepted the request and sends no answer", host(&url));
                return Err(FetchFault::Origin {
                    text,
                    retry_after: None,
                });
            }
        };
        let (head, body) = answer.into_parts();
        if dial.absolute_form() && proxy_status::refusal(head.status, &head.headers, "").is_some() {
            let words = words(body).await;
            connection.abort();
            let fault = proxy_status::download_refusal(head.status, &head.headers, &words);
            return Err(fault.expect("it was a refusal a moment ago"));
        }
        let announced = head.headers.get(ALT_SVC).and_then(|v| v.to_str().ok());
        if let Some(field) = announced {
            alt_svc::record_alt_svc(&url, dial.answering_proxy().as_deref(), field);
        }
        if let Some(port) = head.headers.get(stream_ports::FIELD)
            && let Some(proxy) = dial.answering_proxy()
        {
            stream_ports::record(&proxy, port.to_str().unwrap_or_default());
        }
        if head.status.is_redirection() && head.headers.contains_key(LOCATION) {
            connection.abort();
            if !ask.method.follows_redirects() {
                let text = format!(
                    "{} redirects to another place, where nothing is changed; name that place instead",
                    host(&url)
                );
                return Err(FetchFault::Final(TransferFailure::error(text)));
            }
            url = redirected(&url, &head.headers, ask.allow_downgrade)?;
            continue;
        }
        let part = match part(head.status, &head.headers, ask, &url) {
            Ok(part) => part,
            Err(fault) => {
                connection.abort();
                return Err(fault);
            }
        };
        let text = |name| {
            head.headers
                .get(name)
                .and_then(|v| v.to_str().ok())
                .map(str::to_owned)
        };
        let version = ObjectVersion::from_headers(&head.headers, &url);
        let validator = Validator::from_headers(&head.headers);
        if announced.is_some() && ask.method == RequestMethod::Get && url == ask.url {
            dial.on_announcement(AnnouncedObject {
                url,
                validator: validator.clone(),
                length: part.object_length(),
            });
        }
        return Ok(FetchResponse {
            part,
            validator,
            version,
            encoding: text(CONTENT_ENCODING).filter(|e| !e.eq_ignore_ascii_case("identity")),
            name: filename::from_headers(&head.headers),
            // What says that something was changed is for people.
            is_page: ask.method.is_of_objects()
                && text(CONTENT_TYPE).is_some_and(|kind| is_page(&kind)),
            media_type: text(CONTENT_TYPE),
            body: FetchBody::Http(body, connection),
        });
    }
    let text = format!("more than {REDIRECTS_MAX} redirects: the server redirects in a circle");
    Err(FetchFault::Final(TransferFailure::error(text)))
}

/// Whether a media type is that of a web page.
fn is_page(media_type: &str) -> bool {
    let essence = media_type.split(';').next().unwrap_or_default().trim();
    ["text/html", "application/xhtml+xml"]
        .iter()
        .any(|page| essence.eq_ignore_ascii_case(page))
}

/// The beginning of a body, if it is text for people.
async fn words(body: Incoming) -> String {
    let body = http_body_util::Limited::new(body, WORDS_BYTES_MAX);
    match timeout(HEAD_MAX, body.collect()).await {
        Ok(Ok(body)) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        _ => String::new(),
    }
}

fn request<'a>(
    dial: &impl Dial,
    ask: &GetRequest,
    url: &Url,
    credentials: Option<&str>,
    fields: impl Iterator<Item = &'a HeaderField>,
) -> Result<Request<Full<Bytes>>, FetchFault> {
    let mut plain = url.clone();
    plain.set_fragment(None);
    let _ = plain.set_username("");
    let _ = plain.set_password(None);
    let target = if dial.absolute_form() {
        plain.to_string()
    } else {
        plain[url::Position::BeforePath..].to_owned()
    };
    let mut request = Request::builder()
        .method(ask.method.in_http())
        .uri(target)
        .header(HOST, host(url))
        .header(USER_AGENT, AGENT)
        // A coding would give the bytes a second identity that ranges and digests cannot follow.
        .header(ACCEPT_ENCODING, "identity");
    if dial.absolute_form() {
        request = request.header(SUPPLY_FIELD, SUPPLY_ASKED);
    }
    if ask.from > 0 || ask.to.is_some() {
        let to = ask.to.map(|to| to.to_string()).unwrap_or_default();
        request = request.header(RANGE, format!("bytes={}-{to}", ask.from));
        if let Some(validator) = &ask.if_range {
            request = request.header(IF_RANGE, validator.as_str());
        }
    }
    let unless = ask.unless.as_ref();
    if let Some((name, value)) = unless.and_then(|version| version.condition(url)) {
        request = request.header(name, value);
    }
    let cookies = ask.cookies.as_ref();
    if let Some(cookies) = cookies.and_then(|cookies| cookies.header_for(url, Timestamp::now())) {
        request = request.header(COOKIE, cookies);
    }
    if let Some(credentials) = credentials {
        request = request.header(AUTHORIZATION, credentials);
    }
    let body = ask.method.body();
    if !body.is_empty() {
        request = request.header(CONTENT_TYPE, "application/xml");
    }
    let mut request = request.body(Full::new(body.into())).map_err(|e| {
        FetchFault::Final(TransferFailure::error(format!("cannot request {url}: {e}")))
    })?;
    // The user's word wins over ours, and a name given twice is sent twice.
    let (headers, mut named) = (request.headers_mut(), Vec::new());
    for field in fields {
        if named.contains(&&field.name) {
            headers.append(&field.name, field.value.clone());
        } else {
            headers.insert(&field.name, field.value.clone());
            named.push(&field.name);
        }
    }
    Ok(request)
}

/// The value of the Host header: `host` or `host:port`.
pub(crate) fn host(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    url.port()
        .map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
}

/// The credentials of a URL, as the value of `Authorization`.
pub(crate) fn credentials(url: &Url) -> Option<String> {
    if url.username().is_empty() && url.password().is_none() {
        return None;
    }
    let decode = |text: &str| {
        // The URL keeps them percent-encoded; a form parser decodes exactly that.
        url::form_urlencoded::parse(text.replace('+', "%2B").as_bytes())
            .next()
            .map(|(name, _)| name.into_owned())
            .unwrap_or_default()
    };
    let pair = format!(
        "{}:{}",
        decode(url.username()),
        decode(url.password().unwrap_or(""))
    );
    Some(format!(
        "Basic {}",
        base64::engine::general_purpose::STANDARD.encode(pair)
    ))
}

fn redirected(from: &Url, headers: &HeaderMap, allow_downgrade: bool) -> Result<Url, FetchFault> {
    let refuse = |text: String| FetchFault::Final(TransferFailure::error(text));
    // Servers write names that are not ASCII as they are.
    let location = headers.get(LOCATION).map(|value| value.as_bytes());
    let location = String::from_utf8_lossy(location.unwrap_or_default());
    let shown = RemoteText::new(&location);
    let to = from
        .join(&location)
        .map_err(|e| refuse(format!("the origin redirects to `{shown}`: {e}")))?;
    if !matches!(to.scheme(), "http" | "https") {
        return Err(refuse(format!(
            "the origin redirects to {shown}, which is not http: or https:"
        )));
    }
    if from.scheme() == "https" && to.scheme() == "http" && !allow_downgrade {
        return Err(refuse(format!(
            "the origin redirects from https to {to}, which is not encrypted. To follow it, add \
             --allow-downgrade"
        )));
    }
    Ok(to)
}

/// The part of the object that status and header describe, or why there is none.
fn part(
    status: StatusCode,
    headers: &HeaderMap,
    ask: &GetRequest,
    url: &Url,
) -> Result<ContentPart, FetchFault> {
    let text = |name| headers.get(name).and_then(|v| v.to_str().ok());
    let host = url.host_str().unwrap_or_default();
    if !ask.method.is_of_objects() {
        return folder_part(status, headers, ask, url);
    }
    match status {
        StatusCode::OK => Ok(ContentPart::Whole(
            text(CONTENT_LENGTH).and_then(|v| v.parse().ok()),
        )),
        StatusCode::NOT_MODIFIED if ask.unless.is_some() => Ok(ContentPart::NotModified),
        StatusCode::PARTIAL_CONTENT => {
            let range = text(CONTENT_RANGE).and_then(parse_content_range);
            match range {
                Some(ContentPart::Range { from, to, total }) if from == ask.from => {
                    Ok(ContentPart::Range { from, to, total })
                }
                _ => Err(FetchFault::Final(TransferFailure::error(format!(
                    "{host} sent a range that was not requested: {}",
                    text(CONTENT_RANGE).unwrap_or("no Content-Range")
                )))),
            }
        }
        StatusCode::RANGE_NOT_SATISFIABLE if ask.from > 0 || ask.to.is_some() => {
            Ok(text(CONTENT_RANGE)
                .and_then(parse_content_range)
                .unwrap_or(ContentPart::Unsatisfiable(None)))
        }
        // Some origins answer no HEAD and would answer GET.
        StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED | StatusCode::FORBIDDEN
            if ask.method == RequestMethod::Head =>
        {
            Err(patience(status, None, host))
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            Err(patience(status, text(RETRY_AFTER), host))
        }
        // RFC 6585 §6: by design never from the origin.
        StatusCode::NETWORK_AUTHENTICATION_REQUIRED => Err(FetchFault::CaptivePortal(format!(
            "the network requires a sign-in ({status})"
        ))),
        _ if status.is_server_error() => Err(patience(status, text(RETRY_AFTER), host)),
        StatusCode::UNAUTHORIZED | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            Err(FetchFault::Final(auth_required(status, ask, url)))
        }
        // A URL that worked before is not wrong but over: signed links run out.
        StatusCode::FORBIDDEN | StatusCode::GONE | StatusCode::NOT_FOUND if ask.from > 0 => {
            Err(FetchFault::Final(TransferFailure::of(
                TransferExit::Error,
                TransferReason::UrlExpired,
                format!(
                    "{host} sent the first {} bytes and now answers {status}; get a new URL",
                    ask.from
                ),
            )))
        }
        _ => Err(FetchFault::Final(TransferFailure::error(format!(
            "{host} answers {status} for {}",
            url.path()
        )))),
    }
}

/// The body of an answer about a folder, or why nothing was listed or changed.
fn folder_part(
    status: StatusCode,
    headers: &HeaderMap,
    ask: &GetRequest,
    url: &Url,
) -> Result<ContentPart, FetchFault> {
    let text = |name| headers.get(name).and_then(|v| v.to_str().ok());
    let host = url.host_str().unwrap_or_default();
    match status {
        _ if ask.method.is_fulfilled_by(status) => Ok(ContentPart::Whole(
            text(CONTENT_LENGTH).and_then(|v| v.parse().ok()),
        )),
        StatusCode::REQUEST_TIMEOUT
        | StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => Err(patience(status, text(RETRY_AFTER), host)),
        StatusCode::NETWORK_AUTHENTICATION_REQUIRED => Err(FetchFault::CaptivePortal(format!(
            "the network requires a sign-in ({status})"
        ))),
        StatusCode::UNAUTHORIZED | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            Err(FetchFault::Final(auth_required(status, ask, url)))
        }
        // A server that does not know the method answers it with anything.
        _ => Err(FetchFault::Final(TransferFailure::error(format!(
            "{host} answers {status} to {} {}",
            ask.method.in_http(),
            url.path()
        )))),
    }
}

fn auth_required(status: StatusCode, ask: &GetRequest, url: &Url) -> TransferFailure {
    let host = url.host_str().unwrap_or_default();
    TransferFailure::of(
        TransferExit::Error,
        TransferReason::AuthRequired,
        match were_given(ask, url) {
            true => format!("{host} refused the credentials ({status})"),
            false => format!(
                "{host} requires credentials ({status}); give --user NAME, which asks for the password, or --netrc"
            ),
        },
    )
}

/// Whether the request to `url` carried the user's credentials.
fn were_given(ask: &GetRequest, url: &Url) -> bool {
    let given =
        credentials(&ask.url).is_some() || ask.fields.iter().any(HeaderField::is_credential);
    let given = given || ask.cookies.is_some();
    given && url.origin() == ask.url.origin()
}

fn patience(status: StatusCode, retry_after: Option<&str>, host: &str) -> FetchFault {
    let retry_after = retry_after
        .and_then(|text| text.trim().parse().ok())
        .map(|s| Duration::from_secs(s).min(RETRY_AFTER_MAX));
    FetchFault::Origin {
        text: format!("{host} answers {status}"),
        retry_after,
    }
}

/// `bytes 5-9/10`, `bytes 5-9/*`, `bytes */10` (RFC 9110 §14.4).
fn parse_content_range(text: &str) -> Option<ContentPart> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let total = if total == "*" {
        None
    } else {
        Some(total.parse().ok()?)
    };
    if range == "*" {
        return Some(ContentPart::Unsatisfiable(total));
    }
    let (from, to) = range.split_once('-')?;
    let (from, to): (u64, u64) = (from.parse().ok()?, to.parse().ok()?);
    (from <= to && to < u64::MAX && total.is_none_or(|total| to < total))
        .then_some(ContentPart::Range { from, to, total })
}

/// The fault behind a broken exchange: an end or a reset was most likely sent by the origin; any other
/// error (no route, no answer) is the network's.
fn broken(error: &hyper::Error) -> FetchFault {
    use std::io::ErrorKind;
    let origin = |text: String| FetchFault::Origin {
        text,
        retry_after: None,
    };
    let chain = std::iter::successors(std::error::Error::source(error), |inner| inner.source());
    let (mut cause, mut kind) = (String::new(), None);
    for inner in chain {
        cause = format!(": {inner}");
        kind = kind.or(inner
            .downcast_ref::<std::io::Error>()
            .map(std::io::Error::kind));
    }
    if error.is_incomplete_message() || kind == Some(ErrorKind::UnexpectedEof) {
        return origin("the origin closed the connection before the end".into());
    }
    if matches!(
        kind,
        Some(ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe)
    ) {
        return origin("the origin reset the connection".into());
    }
    if error.is_parse() || error.is_parse_status() {
        // Asked again it would say the same; another link may lead to another host.
        return FetchFault::UntrustedPeer(format!(
            "the server did not answer in valid HTTP: {error}{cause}"
        ));
    }
    FetchFault::Path(format!("the connection broke: {error}{cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_strictly() {
        let range = |from, to, total| Some(ContentPart::Range { from, to, total });
        assert_eq!(parse_content_range("bytes 5-9/10"), range(5, 9, Some(10)));
        assert_eq!(parse_content_range("bytes 5-9/*"), range(5, 9, None));
        assert_eq!(
            parse_content_range("bytes */10"),
            Some(ContentPart::Unsatisfiable(Some(10)))
        );
        for bad in [
            "bytes 9-5/10",
            "bytes 5-10/10",
            "items 5-9/10",
            "bytes 5-9",
            "bytes -9/10",
            "",
        ] {
            assert_eq!(parse_content_range(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_redirect_to_plain_http_is_refused_unless_said() {
        let from: Url = "https://origin.example/a".parse().expect("a URL");
        let mut headers = HeaderMap::new();
        headers.insert(
            LOCATION,
            "http://origin.example/b".parse().expect("a value"),
        );
        assert!(matches!(
            redirected(&from, &headers, false),
            Err(FetchFault::Final(_))
        ));
        assert_eq!(
            redirected(&from, &headers, true).expect("allowed").path(),
            "/b"
        );
        headers.insert(LOCATION, "file:///etc/passwd".parse().expect("a value"));
        assert!(redirected(&from, &headers, true).is_err());
    }

    #[test]
    fn a_redirect_to_a_name_that_is_not_ascii_is_followed() {
        let from: Url = "https://origin.example/a/b".parse().expect("a URL");
        let mut headers = HeaderMap::new();
        let value = http::HeaderValue::from_bytes("../größe".as_bytes());
        headers.insert(LOCATION, value.expect("a value"));
        let to = redirected(&from, &headers, false).expect("allowed");
        assert_eq!(to.as_str(), "https://origin.example/gr%C3%B6%C3%9Fe");
    }

    #[test]
    fn credentials_of_the_url_become_a_header() {
        let url: Url = "http://us%40er:p%2Bw@h/".parse().expect("a URL");
        // us@er:p+w
        assert_eq!(credentials(&url).as_deref(), Some("Basic dXNAZXI6cCt3"));
    }
}
