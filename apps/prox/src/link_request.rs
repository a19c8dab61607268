//! A request for a link: `GET /feeds/… HTTP/1.1`, as web servers get it. Apps and web servers in front of the proxy send
//! it, HTTP/1.0 included.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderMap, HeaderValue};
use url::Url;

use crate::refusal::ProxRefusal;
use crate::request::{FetchRequest, HEADERS_MAX, body_length, header_map};
use crate::request_head::ProxRequestHead;

/// A request for a link.
#[derive(Debug)]
pub(crate) struct LinkRequest {
    /// Whether the request is HEAD.
    pub(crate) head_only: bool,
    /// The path with its query.
    pub(crate) path: String,
    /// The versions that the app has already.
    pub(crate) if_none_match: Option<HeaderValue>,
    range: Option<HeaderValue>,
    if_range: Option<HeaderValue>,
    user_agent: Option<HeaderValue>,
}

impl LinkRequest {
    /// Parses and checks a head.
    pub(crate) fn parse(head: &ProxRequestHead) -> Result<LinkRequest, ProxRefusal> {
        let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut parsed = httparse::Request::new(&mut fields);
        match parsed.parse(head.bytes()) {
            Ok(httparse::Status::Complete(end)) if end == head.bytes().len() => {}
            _ => return Err(ProxRefusal::BadRequest("the head cannot be read")),
        }
        let head_only = match parsed.method {
            Some("GET") => false,
            Some("HEAD") => true,
            other => {
                let method = other.unwrap_or_default().chars().take(32).collect();
                return Err(ProxRefusal::MethodUnsupported(method));
            }
        };
        let path = parsed.path.unwrap_or_default().to_owned();
        let mut fields = header_map(parsed.headers)?;
        if body_length(&fields)?.is_some_and(|length| length > 0) {
            return Err(ProxRefusal::BadRequest("these requests carry no body"));
        }
        Ok(LinkRequest {
            head_only,
            path,
            if_none_match: fields.remove(header::IF_NONE_MATCH),
            range: fields.remove(header::RANGE),
            if_range: fields.remove(header::IF_RANGE),
            user_agent: fields.remove(header::USER_AGENT),
        })
    }

    /// The request for what the link leads to, without a range. A password in its address is sent as a field.
    pub(crate) fn fetch(&self, address: &Url, head_only: bool) -> FetchRequest {
        let mut url = address.clone();
        let mut headers = HeaderMap::new();
        // Servers count whom they serve by it.
        if let Some(user_agent) = &self.user_agent {
            headers.insert(header::USER_AGENT, user_agent.clone());
        }
        headers.insert(header::ACCEPT, HeaderValue::from_static("*/*"));
        let coding = HeaderValue::from_static("identity");
        headers.insert(header::ACCEPT_ENCODING, coding);
        if let Some(credentials) = credentials(address) {
            headers.insert(header::AUTHORIZATION, credentials);
        }
        // Neither fails for an address of the web.
        let _ = (url.set_username(""), url.set_password(None));
        url.set_fragment(None);
        FetchRequest {
            head_only,
            url,
            headers,
            range: None,
            if_range: None,
            reports_supply: false,
        }
    }

    /// The range that applies to the copy with this tag. `is_new`: it was made for this request, so that an app which
    /// asks for its middle may have the beginning of an earlier one: that app gets all of it (RFC 9110 §14.2 allows
    /// that), unless it says by `If-Range` what it has.
    pub(crate) fn range_of(&self, tag: &HeaderValue, is_new: bool) -> Option<HeaderValue> {
        let range = self.range.as_ref()?;
        let applies = match &self.if_range {
            Some(if_range) => if_range == tag,
            None => !is_new || begins_at_start(range),
        };
        applies.then(|| range.clone())
    }
}

/// Whether a range begins with the first byte.
fn begins_at_start(range: &HeaderValue) -> bool {
    let text = range.to_str().unwrap_or_default().replace(' ', "");
    text.starts_with("bytes=0-")
}

/// User name and password of an address, as a field (RFC 7617).
fn credentials(address: &Url) -> Option<HeaderValue> {
    if address.username().is_empty() && address.password().is_none() {
        return None;
    }
    let plain = |text: &str| percent_encoding::percent_decode_str(text).collect::<Vec<u8>>();
    let pair = [
        plain(address.username()),
        b":".to_vec(),
        plain(address.password().unwrap_or_default()),
    ];
    let value = format!("Basic {}", STANDARD.encode(pair.concat()));
    let mut value = HeaderValue::from_str(&value).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<LinkRequest, ProxRefusal> {
        let bytes = text.as_bytes().to_vec();
        let end = bytes.len();
        LinkRequest::parse(&ProxRequestHead { bytes, end })
    }

    fn with(fields: &str) -> LinkRequest {
        parsed(&format!("GET /x HTTP/1.0\r\nHost: h\r\n{fields}\r\n")).expect("a request")
    }

    #[test]
    fn a_range_applies_to_what_the_app_has_the_beginning_of() {
        let tag = HeaderValue::from_static("\"a\"");
        let applies = |fields: &str, is_new| with(fields).range_of(&tag, is_new).is_some();
        for is_new in [true, false] {
            assert!(!applies("", is_new));
            assert!(applies("Range: bytes=0-\r\n", is_new));
            assert!(applies("Range: bytes=0-99\r\n", is_new));
            assert!(applies("Range: bytes=5-\r\nIf-Range: \"a\"\r\n", is_new));
            assert!(!applies("Range: bytes=5-\r\nIf-Range: \"b\"\r\n", is_new));
            let date = "Range: bytes=0-\r\nIf-Range: Fri, 20 Nov 2026 10:00:00 GMT\r\n";
            assert!(!applies(date, is_new));
        }
        for middle in ["bytes=5-", "bytes=5-9", "bytes=-5", "bytes=00-", "lines=0-"] {
            let fields = format!("Range: {middle}\r\n");
            assert!(
                applies(&fields, false) && !applies(&fields, true),
                "{middle}"
            );
        }
    }

    #[test]
    fn a_password_in_an_address_becomes_a_field() {
        let address: Url = "https://me:h%40sh@a.example/1.mp3#x"
            .parse()
            .expect("an address");
        let request = with("User-Agent: app/1\r\nCookie: a=b\r\n").fetch(&address, true);
        assert_eq!(request.url.as_str(), "https://a.example/1.mp3");
        assert_eq!(request.headers[header::AUTHORIZATION], "Basic bWU6aEBzaA==");
        assert_eq!(request.headers[header::USER_AGENT], "app/1");
        assert!(!request.headers.contains_key(header::COOKIE) && request.head_only);
    }

    #[test]
    fn what_two_readers_could_see_differently_is_refused() {
        for wrong in [
            "POST /x HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET /x HTTP/1.1\r\n\r\n",
            "GET /x HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n",
            "GET /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET /x HTTP/3.0\r\nHost: h\r\n\r\n",
            "GET /x\r\n\r\n",
        ] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
        assert!(
            parsed("HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n")
                .expect("a request")
                .head_only
        );
    }
}
