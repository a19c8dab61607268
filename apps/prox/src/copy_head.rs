//! The head of a copy: what an origin said about an object, and how requests select it.

use std::time::{Duration, SystemTime};

use d2tp_driver::HostKey;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{StatusCode, Version};
use url::Url;

use crate::copy_store::{self, CopyRecord};
use crate::origin::OriginResponse;
use crate::request::{FetchRequest, STREAM_PORT, strip_hop_by_hop};

/// How much older than `Date` a `Last-Modified` must be to count as strong. RFC 9110 §8.8.2.2
/// asks for one second; a minute leaves room for clocks that disagree.
const DATE_STRONG_AFTER: Duration = Duration::from_secs(60);

/// The head of an origin's response, ready to be forwarded.
#[derive(Clone, Debug)]
pub(crate) struct CopyHead {
    pub(crate) status: StatusCode,
    pub(crate) version: Version,
    /// End-to-end headers, without `Content-Length`.
    pub(crate) headers: HeaderMap,
    /// A strong entity tag of our own, where the origin gives no strong validator: with it a device continues
    /// with this copy and no other.
    pub(crate) own_tag: Option<HeaderValue>,
    /// The URL that the bytes came from, after redirects.
    pub(crate) url: Url,
    pub(crate) redirected: bool,
    /// The validator with which the origin is asked for the rest of a body.
    pub(crate) origin_validator: Option<HeaderValue>,
    /// Request fields on which the representation may depend, with their values.
    selected_by: Vec<(HeaderName, Vec<HeaderValue>)>,
}

/// A device's request for a copy.
#[derive(Clone, Debug)]
pub(crate) struct CopyRequest {
    pub(crate) url: Url,
    pub(crate) headers: HeaderMap,
}

impl CopyHead {
    /// Creates the head from an origin's.
    pub(crate) fn new(response: &OriginResponse, request: &FetchRequest) -> CopyHead {
        let headers = forwarded(&response.headers);
        let origin_validator = strong_validator(&response.headers);
        let needs_tag = response.status == StatusCode::OK && origin_validator.is_none();
        CopyHead {
            status: response.status,
            version: response.version,
            url: response.url.clone(),
            redirected: response.redirects > 0,
            origin_validator,
            own_tag: needs_tag.then(random_tag),
            selected_by: selecting(&response.headers, request),
            headers,
        }
    }

    /// The head of a response that is forwarded once and never served again.
    pub(crate) fn relayed(response: &OriginResponse) -> CopyHead {
        let headers = forwarded(&response.headers);
        CopyHead {
            status: response.status,
            version: response.version,
            headers,
            url: response.url.clone(),
            redirected: false,
            own_tag: None,
            origin_validator: None,
            selected_by: Vec::new(),
        }
    }

    /// From now on any client's request selects it that has the fields which the origin names: it is shared.
    pub(crate) fn select_by_vary_only(&mut self) {
        let is_coded = self.headers.contains_key(header::CONTENT_ENCODING);
        let varied: Vec<HeaderName> = varied(&self.headers).collect();
        self.selected_by.retain(|(name, _)| {
            varied.contains(name) || (is_coded && *name == header::ACCEPT_ENCODING)
        });
    }

    /// The record for the copy store.
    pub(crate) fn entry(
        &self,
        client: HostKey,
        asked: &CopyRequest,
        total: Option<u64>,
    ) -> CopyRecord {
        CopyRecord {
            client,
            asked_url: asked.url.to_string(),
            asked_headers: copy_store::fields(&asked.headers),
            status: self.status.as_u16(),
            http2: self.version == Version::HTTP_2,
            headers: copy_store::fields(&self.headers),
            url: self.url.to_string(),
            redirected: self.redirected,
            origin_validator: self.origin_validator.as_ref().map(copy_store::text),
            own_tag: self.own_tag.as_ref().map(copy_store::text),
            selected_by: self
                .selected_by
                .iter()
                .map(|(n, had)| {
                    (
                        n.as_str().to_owned(),
                        had.iter().map(copy_store::text).collect(),
                    )
                })
                .collect(),
            total,
            boot: d2tp_driver::boot(),
        }
    }

    /// Restores head and request from a record made by [`CopyHead::entry`].
    pub(crate) fn from_entry(entry: &CopyRecord) -> Option<(CopyHead, CopyRequest)> {
        let selected_by = entry.selected_by.iter().map(|(name, had)| {
            let values: Option<Vec<_>> = had.iter().map(|text| copy_store::value(text)).collect();
            Some((name.parse().ok()?, values?))
        });
        let head = CopyHead {
            status: StatusCode::from_u16(entry.status).ok()?,
            version: match entry.http2 {
                true => Version::HTTP_2,
                false => Version::HTTP_11,
            },
            headers: copy_store::headers(&entry.headers)?,
            url: entry.url.parse().ok()?,
            redirected: entry.redirected,
            origin_validator: kept(&entry.origin_validator)?,
            own_tag: kept(&entry.own_tag)?,
            selected_by: selected_by.collect::<Option<_>>()?,
        };
        let asked = CopyRequest {
            url: entry.asked_url.parse().ok()?,
            headers: copy_store::headers(&entry.asked_headers)?,
        };
        Some((head, asked))
    }

    /// Whether `If-Range` names exactly these bytes.
    pub(crate) fn matches_if_range(&self, if_range: &HeaderValue) -> bool {
        if if_range.as_bytes().starts_with(b"\"") {
            let tag = self.headers.get(header::ETAG);
            return tag == Some(if_range) || self.own_tag.as_ref() == Some(if_range);
        }
        strong_date(&self.headers).is_some_and(|date| date == if_range)
    }

    /// Whether a request would have selected this representation.
    pub(crate) fn matches_request(&self, request: &FetchRequest) -> bool {
        self.selected_by
            .iter()
            .all(|(name, had)| request.headers.get_all(name).iter().eq(had))
    }
}

/// The fields of a response that are forwarded: without hop-by-hop ones, its length, and what only this proxy may say.
fn forwarded(response: &HeaderMap) -> HeaderMap {
    let mut headers = response.clone();
    strip_hop_by_hop(&mut headers);
    for name in [header::CONTENT_LENGTH, STREAM_PORT] {
        headers.remove(name);
    }
    headers
}

/// An entity tag that nobody else uses.
fn random_tag() -> HeaderValue {
    let mut random = [0; 16];
    getrandom::fill(&mut random).expect("the system has randomness");
    let tag = format!("\"d2prox-{:032x}\"", u128::from_ne_bytes(random));
    HeaderValue::from_str(&tag).expect("hex digits are a header value")
}

/// A value from a record; the outer none is damage.
#[allow(clippy::option_option)] // The record may have none.
fn kept(text: &Option<String>) -> Option<Option<HeaderValue>> {
    match text {
        Some(text) => copy_store::value(text).map(Some),
        None => Some(None),
    }
}

/// The request fields that `Vary` names.
fn varied(response: &HeaderMap) -> impl Iterator<Item = HeaderName> {
    response
        .get_all(header::VARY)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
}

/// The request fields that select a representation: those `Vary` names, and credentials and codings
/// even if an origin does not name them.
fn selecting(response: &HeaderMap, request: &FetchRequest) -> Vec<(HeaderName, Vec<HeaderValue>)> {
    [
        header::AUTHORIZATION,
        header::COOKIE,
        header::ACCEPT_ENCODING,
    ]
    .into_iter()
    .chain(varied(response))
    .map(|name| {
        let values = request.headers.get_all(&name).iter().cloned().collect();
        (name, values)
    })
    .collect()
}

/// The validator that guarantees the same bytes: a strong entity tag, else an old enough date; never a
/// weak tag.
fn strong_validator(headers: &HeaderMap) -> Option<HeaderValue> {
    strong_tag(headers)
        .or_else(|| strong_date(headers))
        .cloned()
}

/// Whether a response with these fields has this validator; `None` if it has none of that kind.
pub(crate) fn has_validator(headers: &HeaderMap, validator: &HeaderValue) -> Option<bool> {
    let name = match validator.as_bytes().starts_with(b"\"") {
        true => header::ETAG,
        false => header::LAST_MODIFIED,
    };
    if name == header::ETAG && headers.contains_key(&name) {
        return Some(strong_tag(headers) == Some(validator));
    }
    Some(headers.get(name)? == validator)
}

/// The strong entity tag, if there is exactly one.
fn strong_tag(headers: &HeaderMap) -> Option<&HeaderValue> {
    let mut tags = headers.get_all(header::ETAG).iter();
    let tag = tags.next().filter(|_| tags.next().is_none())?;
    let bytes = tag.as_bytes();
    let quoted = bytes.len() >= 2 && bytes.starts_with(b"\"") && bytes.ends_with(b"\"");
    quoted.then_some(tag)
}

/// The `Last-Modified` date, if it is well before `Date`.
fn strong_date(headers: &HeaderMap) -> Option<&HeaderValue> {
    let read = |name| -> Option<SystemTime> {
        httpdate::parse_http_date(headers.get(name)?.to_str().ok()?).ok()
    };
    let (modified, date) = (read(header::LAST_MODIFIED)?, read(header::DATE)?);
    let age = date.duration_since(modified).ok()?;
    (age >= DATE_STRONG_AFTER).then(|| &headers[header::LAST_MODIFIED])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn only_strong_validators_promise_the_same_bytes() {
        const OLD: (&str, &str) = ("last-modified", "Fri, 20 Nov 2026 10:00:00 GMT");
        const DATE: (&str, &str) = ("date", "Fri, 20 Nov 2026 10:01:00 GMT");
        let validator = |pairs: &[_]| strong_validator(&headers(pairs));
        assert_eq!(validator(&[("etag", "\"a\"")]).unwrap(), "\"a\"");
        assert_eq!(validator(&[("etag", "W/\"a\"")]), None);
        assert_eq!(validator(&[("etag", "a")]), None);
        assert_eq!(validator(&[("etag", "\"a\""), ("etag", "\"b\"")]), None);
        assert_eq!(validator(&[OLD, DATE]).unwrap(), OLD.1);
        assert_eq!(validator(&[("etag", "W/\"a\""), OLD, DATE]).unwrap(), OLD.1);
        assert_eq!(validator(&[OLD]), None);
        assert_eq!(
            validator(&[OLD, ("date", "Fri, 20 Nov 2026 10:00:59 GMT")]),
            None
        );
        assert_eq!(
            validator(&[OLD, ("date", "Fri, 20 Nov 2026 09:00:00 GMT")]),
            None
        );
    }
}
