//! What a shared cache may do with a response (RFC 9111 §3, §4): facts and pure functions, no clock.
//!
//! ```text
//!  response ── may it be stored? ──▶ StoredResponse ── which requests does it answer? (Vary)
//!                                          │
//!                        age < lifetime: fresh · else within stale-while-revalidate · else to be validated
//! ```
//!
//! Stricter than RFC 9111 has to be: a response to a request with `Authorization` or `Cookie`, and one with
//! `Set-Cookie`, is never stored, whatever else it says.

use std::time::{Duration, SystemTime};

use http::StatusCode;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

use crate::copy_store::{self, HeaderFields, fields};
use crate::request::{STREAM_PORT, strip_hop_by_hop};

use super::cache_control::{CacheControl, age_field, date_field, http_date};

/// The part of the time since its last change for which a response without an expiry is fresh. RFC 9111 §4.2.2.
const HEURISTIC_PART: u32 = 10;
/// The longest heuristic freshness. A guess: a day.
const HEURISTIC_MAX: Duration = Duration::from_secs(24 * 3600);
/// `CDN-Cache-Control` (RFC 9213). This proxy serves devices, not an origin: it obeys what forbids, and takes no
/// leave from it.
const CDN_CACHE_CONTROL: HeaderName = HeaderName::from_static("cdn-cache-control");

/// The age of a response when it arrived, and what it is counted from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceiptTime {
    /// The time at which the response arrived.
    pub(crate) at: SystemTime,
    /// The time that the request took.
    pub(crate) delay: Duration,
}

/// A response that a shared cache stores.
#[derive(Debug)]
pub(crate) struct StoredResponse {
    pub(crate) status: StatusCode,
    /// End-to-end fields, those of later validations included.
    pub(crate) headers: HeaderMap,
    selected_by: Vec<(HeaderName, Option<String>)>,
    directives: CacheControl,
    /// The time for which the response is fresh.
    lifetime: Duration,
    /// The age at which the response arrived.
    initial_age: Duration,
    must_validate: bool,
}

/// A [`StoredResponse`] as the journal has it. Times are milliseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StoredResponseRecord {
    headers: HeaderFields,
    selected_by: Vec<(String, Option<String>)>,
    directives: CacheControl,
    lifetime_ms: u64,
    initial_age_ms: u64,
    must_validate: bool,
}

/// How a stored response may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Usability {
    /// Without asking the origin.
    Fresh,
    /// Without waiting for the origin, which validates it meanwhile (RFC 5861 §3).
    FreshEnough,
    /// Once its origin has validated it.
    Stale,
}

/// What a request demands of a cache.
#[derive(Clone, Debug)]
pub(crate) struct CacheDemand {
    directives: CacheControl,
    no_cache: bool,
    /// Whether a response to it may be stored.
    pub(crate) may_store: bool,
    /// Whether a stored response may answer it.
    pub(crate) may_use: bool,
    /// Whether the request has conditions of its own.
    pub(crate) is_conditional: bool,
}

impl CacheDemand {
    /// The demand of a GET or HEAD with these fields.
    pub(crate) fn of(headers: &HeaderMap) -> CacheDemand {
        let directives = CacheControl::of(headers, header::CACHE_CONTROL);
        let pragma = CacheControl::of(headers, header::PRAGMA);
        let has = |name: HeaderName| headers.contains_key(name);
        let no_store = directives.has("no-store");
        let is_conditional = has(header::IF_NONE_MATCH) || has(header::IF_MODIFIED_SINCE);
        // These ask about the origin's state.
        let asks_origin = has(header::IF_MATCH) || has(header::IF_UNMODIFIED_SINCE);
        CacheDemand {
            no_cache: directives.has("no-cache")
                || (!has(header::CACHE_CONTROL) && pragma.has("no-cache")),
            may_store: !no_store
                && !asks_origin
                && !has(header::AUTHORIZATION)
                && !has(header::COOKIE)
                && !headers.keys().any(is_about_the_way),
            may_use: !no_store && !asks_origin && !has(header::AUTHORIZATION),
            is_conditional,
            directives,
        }
    }

    /// Whether only a stored response may answer it.
    pub(crate) fn only_if_cached(&self) -> bool {
        self.directives.has("only-if-cached")
    }
}

/// Whether a request field claims to be from a proxy on the way. Origins make links and whole answers from these and
/// name them in no `Vary`: a client could choose what others get.
fn is_about_the_way(name: &HeaderName) -> bool {
    let name = name.as_str();
    let begins = ["x-forwarded", "x-original-", "x-rewrite-", "x-http-method"];
    begins.iter().any(|begin| name.starts_with(begin))
        || matches!(
            name,
            "forwarded"
                | "x-host"
                | "x-method-override"
                | "x-real-ip"
                | "x-client-ip"
                | "client-ip"
                | "true-client-ip"
        )
}

/// Whether a status code allows heuristic freshness. RFC 9110 §15.1.
fn is_heuristically_cacheable(status: StatusCode) -> bool {
    matches!(
        status.as_u16(),
        200 | 203 | 204 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501
    )
}

impl StoredResponse {
    /// The response with these fields, hop-by-hop ones among them, as it would be stored; none if it must not be, or if storing it could help nobody.
    pub(crate) fn new(
        request: &HeaderMap,
        status: StatusCode,
        headers: &HeaderMap,
        received: ReceiptTime,
    ) -> Option<StoredResponse> {
        let demand = CacheDemand::of(request);
        let directives = CacheControl::of(headers, header::CACHE_CONTROL);
        let forbids = CacheControl::of(headers, CDN_CACHE_CONTROL);
        let no_store = match directives.has("must-understand") {
            // RFC 9111 §5.2.2.3: it overrides no-store where the status is understood.
            true => !is_heuristically_cacheable(status) && status != StatusCode::FOUND,
            false => directives.has("no-store"),
        };
        let is_final = !status.is_informational() && !matches!(status.as_u16(), 206 | 304);
        let is_shared = !directives.has("private") && !headers.contains_key(header::SET_COOKIE);
        let is_forbidden = no_store || forbids.has("no-store") || forbids.has("private");
        if !demand.may_store || !is_final || !is_shared || is_forbidden {
            return None;
        }
        let selected_by = selecting(headers, request)?;
        let lifetime = lifetime(&directives, status, headers, received.at);
        let lifetime = match forbids.span("max-age") {
            Some(shorter) => lifetime.map(|lifetime| lifetime.min(shorter)),
            None => lifetime,
        };
        let has_validator =
            headers.contains_key(header::ETAG) || headers.contains_key(header::LAST_MODIFIED);
        if lifetime.is_none_or(|lifetime| lifetime.is_zero())
            && !(has_validator && status == StatusCode::OK)
        {
            return None;
        }
        let date = date_field(headers, header::DATE).unwrap_or(received.at);
        let apparent = received.at.duration_since(date).unwrap_or_default();
        let must_validate = directives.has_unqualified("no-cache") || forbids.has("no-cache");
        // What the origin says of hop-by-hop fields must not hide what it says of sharing.
        let mut kept = headers.clone();
        strip_hop_by_hop(&mut kept);
        for name in [header::VARY, header::CACHE_CONTROL, CDN_CACHE_CONTROL] {
            if !kept.contains_key(&name) {
                for value in headers.get_all(&name) {
                    kept.append(&name, value.clone());
                }
            }
        }
        for name in [header::AGE, header::CONTENT_LENGTH, STREAM_PORT] {
            kept.remove(name);
        }
        for name in directives.field_names("no-cache") {
            kept.remove(name);
        }
        Some(StoredResponse {
            status,
            headers: kept,
            selected_by,
            lifetime: lifetime.unwrap_or_default(),
            // RFC 9111 §4.2.3.
            initial_age: apparent.max(age_field(headers) + received.delay),
            must_validate,
            directives,
        })
    }

    /// What the journal needs to know of it.
    pub(crate) fn record(&self) -> StoredResponseRecord {
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let selected_by = self.selected_by.iter();
        StoredResponseRecord {
            headers: fields(&self.headers),
            selected_by: selected_by
                .map(|(name, value)| (name.as_str().to_owned(), value.clone()))
                .collect(),
            directives: self.directives.clone(),
            lifetime_ms: millis(self.lifetime),
            initial_age_ms: millis(self.initial_age),
            must_validate: self.must_validate,
        }
    }

    /// The response of a record made by [`StoredResponse::record`].
    pub(crate) fn from_record(
        status: StatusCode,
        record: &StoredResponseRecord,
    ) -> Option<StoredResponse> {
        let selected_by = record.selected_by.iter();
        let selected_by =
            selected_by.map(|(name, value)| Some((name.parse().ok()?, value.clone())));
        Some(StoredResponse {
            status,
            selected_by: selected_by.collect::<Option<_>>()?,
            directives: record.directives.clone(),
            lifetime: Duration::from_millis(record.lifetime_ms),
            initial_age: Duration::from_millis(record.initial_age_ms),
            must_validate: record.must_validate,
            headers: copy_store::headers(&record.headers)?,
        })
    }

    /// Whether its `Vary` allows it to answer a request with these fields.
    pub(crate) fn answers(&self, request: &HeaderMap) -> bool {
        let selects =
            |(name, had): &(HeaderName, Option<String>)| selecting_value(request, name) == *had;
        self.selected_by.iter().all(selects)
    }

    /// Whether both were selected by the same fields with the same values, so that the newer replaces the older.
    pub(crate) fn replaces(&self, older: &StoredResponse) -> bool {
        self.selected_by == older.selected_by
    }

    /// The names of the fields that select it.
    pub(crate) fn selecting_names(&self) -> impl Iterator<Item = &HeaderName> {
        self.selected_by.iter().map(|(name, _)| name)
    }

    /// The age after this time in the cache.
    pub(crate) fn age(&self, resident: Duration) -> Duration {
        self.initial_age + resident
    }

    /// How long the response stays fresh; `None` if it is stale.
    pub(crate) fn fresh_for(&self, resident: Duration) -> Option<Duration> {
        let left = self.lifetime.checked_sub(self.age(resident))?;
        (!left.is_zero() && !self.must_validate).then_some(left)
    }

    /// How long the response has been stale.
    pub(crate) fn stale_for(&self, resident: Duration) -> Duration {
        self.age(resident).saturating_sub(self.lifetime)
    }

    /// How the response may answer a request, after this time in the cache.
    pub(crate) fn usability(&self, demand: &CacheDemand, resident: Duration) -> Usability {
        let asks = |name| demand.directives.span(name);
        let age = self.age(resident);
        if demand.no_cache || self.must_validate || asks("max-age").is_some_and(|max| age > max) {
            return Usability::Stale;
        }
        let fresh_for = self.fresh_for(resident).unwrap_or_default();
        if asks("min-fresh").is_some_and(|min| fresh_for < min) {
            return Usability::Stale;
        }
        if !fresh_for.is_zero() {
            return Usability::Fresh;
        }
        let stale_for = self.stale_for(resident);
        if self.forbids_stale() {
            return Usability::Stale;
        }
        let max_stale = demand.directives.has("max-stale")
            && (demand.directives.has_unqualified("max-stale")
                || asks("max-stale").is_some_and(|max| stale_for <= max));
        if max_stale {
            return Usability::Fresh;
        }
        match self.directives.span("stale-while-revalidate") {
            Some(window) if stale_for < window => Usability::FreshEnough,
            _ => Usability::Stale,
        }
    }

    /// Whether the response may be used although it is stale, because its origin cannot be asked (RFC 9111 §4.2.4), or has
    /// failed (RFC 5861 §4). `at_most`: the proxy's own limit.
    pub(crate) fn survives_error(
        &self,
        resident: Duration,
        status: Option<StatusCode>,
        at_most: Duration,
    ) -> bool {
        let stale_for = self.stale_for(resident);
        // What was never fresh was stored to be validated.
        if self.forbids_stale() || self.must_validate || self.lifetime.is_zero() {
            return false;
        }
        match (self.directives.span("stale-if-error"), status) {
            (Some(window), _) => stale_for < window,
            (None, None) => stale_for < at_most,
            (None, Some(_)) => false,
        }
    }

    fn forbids_stale(&self) -> bool {
        // RFC 9111 §5.2.2.10: s-maxage has the meaning of proxy-revalidate.
        ["must-revalidate", "proxy-revalidate", "s-maxage"]
            .iter()
            .any(|name| self.directives.has(name))
    }

    /// Adds the conditions by which the origin is asked whether it still holds.
    pub(crate) fn add_conditions(&self, request: &mut HeaderMap) {
        for name in [header::IF_NONE_MATCH, header::IF_MODIFIED_SINCE] {
            request.remove(name);
        }
        if let Some(tag) = self.headers.get(header::ETAG) {
            request.insert(header::IF_NONE_MATCH, tag.clone());
        }
        if let Some(date) = self.headers.get(header::LAST_MODIFIED) {
            request.insert(header::IF_MODIFIED_SINCE, date.clone());
        }
    }

    /// Whether the origin can be asked about it.
    pub(crate) fn has_validator(&self) -> bool {
        let has = |name| self.headers.contains_key(name);
        has(header::ETAG) || has(header::LAST_MODIFIED)
    }

    /// Its fields after a 304 with these fields (RFC 9111 §3.2); none if that one is about another response.
    pub(crate) fn freshened(&self, not_modified: &HeaderMap) -> Option<HeaderMap> {
        let is_other = |name: HeaderName| match (not_modified.get(&name), self.headers.get(&name)) {
            (Some(new), Some(old)) => weak(new.as_bytes()) != weak(old.as_bytes()),
            _ => false,
        };
        if is_other(header::ETAG) {
            return None;
        }
        let mut headers = self.headers.clone();
        for name in not_modified.keys() {
            let is_of_body = [
                header::CONTENT_LENGTH,
                header::CONTENT_ENCODING,
                header::CONTENT_RANGE,
                header::TRANSFER_ENCODING,
            ];
            if is_of_body.contains(name) {
                continue;
            }
            headers.remove(name);
            for value in not_modified.get_all(name) {
                headers.append(name, value.clone());
            }
        }
        Some(headers)
    }
}

/// An entity tag without its mark of weakness.
fn weak(tag: &[u8]) -> &[u8] {
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// Whether the conditions of a GET or HEAD hold against a response that has these fields, so that the answer is
/// 304 (RFC 9110 §13.2.2). `own_tag`: another tag by which clients know it.
pub(crate) fn is_not_modified(
    request: &HeaderMap,
    response: &HeaderMap,
    own_tag: Option<&HeaderValue>,
) -> bool {
    let mut tags = request.get_all(header::IF_NONE_MATCH).iter().peekable();
    if tags.peek().is_some() {
        let known: Vec<&[u8]> = [response.get(header::ETAG), own_tag]
            .into_iter()
            .flatten()
            .map(|tag| weak(tag.as_bytes()))
            .collect();
        return tags.any(|line| {
            line.as_bytes().trim_ascii() == b"*"
                || entity_tags(line.as_bytes()).any(|tag| known.contains(&weak(tag)))
        });
    }
    let since = date_field(request, header::IF_MODIFIED_SINCE);
    let changed = date_field(response, header::LAST_MODIFIED);
    let changed = changed.or_else(|| date_field(response, header::DATE));
    matches!((since, changed), (Some(since), Some(changed)) if changed <= since)
}

/// The entity tags of a list. A tag may contain a comma.
fn entity_tags(mut line: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        line = line.trim_ascii_start();
        while let Some(rest) = line.strip_prefix(b",") {
            line = rest.trim_ascii_start();
        }
        if line.is_empty() {
            return None;
        }
        let quote = line.iter().position(|byte| *byte == b'"');
        let close = quote.and_then(|open| {
            let after = &line[open + 1..];
            Some(open + 1 + after.iter().position(|byte| *byte == b'"')? + 1)
        });
        let comma = line.iter().position(|byte| *byte == b',');
        let end = match (close, comma, quote) {
            (Some(close), Some(comma), Some(open)) if comma > open => close,
            (Some(close), None, _) => close,
            (_, Some(comma), _) => comma,
            _ => line.len(),
        };
        let (tag, rest) = line.split_at(end);
        line = rest;
        Some(tag.trim_ascii())
    })
}

/// The time for which a response is fresh in a shared cache (RFC 9111 §4.2.1); none where nothing says it.
fn lifetime(
    directives: &CacheControl,
    status: StatusCode,
    headers: &HeaderMap,
    received: SystemTime,
) -> Option<Duration> {
    if let Some(span) = directives.span("s-maxage").or(directives.span("max-age")) {
        return Some(span);
    }
    let date = date_field(headers, header::DATE).unwrap_or(received);
    if headers.contains_key(header::EXPIRES) {
        let expires = date_field(headers, header::EXPIRES);
        return Some(
            expires
                .and_then(|at| at.duration_since(date).ok())
                .unwrap_or_default(),
        );
    }
    let is_cacheable = is_heuristically_cacheable(status) || directives.has("public");
    let changed = headers.get(header::LAST_MODIFIED)?.to_str().ok();
    let since_change = date.duration_since(changed.and_then(http_date)?).ok()?;
    is_cacheable.then(|| (since_change / HEURISTIC_PART).min(HEURISTIC_MAX))
}

/// The request fields that select a response, with their values; none if nothing selects it (`Vary: *`).
fn selecting(
    response: &HeaderMap,
    request: &HeaderMap,
) -> Option<Vec<(HeaderName, Option<String>)>> {
    let mut names = Vec::new();
    for line in response.get_all(header::VARY) {
        for name in line.to_str().ok()?.split(',').map(str::trim) {
            match name {
                "" => {}
                "*" => return None,
                name => names.push(name.parse::<HeaderName>().ok()?),
            }
        }
    }
    // An origin that encodes without saying so must not give one client's coding to another.
    if response.contains_key(header::CONTENT_ENCODING) {
        names.push(header::ACCEPT_ENCODING);
    }
    names.sort_by(|one, other| one.as_str().cmp(other.as_str()));
    names.dedup();
    let selected = names.into_iter().map(|name| {
        let value = selecting_value(request, &name);
        (name, value)
    });
    Some(selected.collect())
}

/// The value of a selecting field in a form in which equal values are equal texts: lines combined, without
/// whitespace around commas, languages and codings in lower case.
pub(crate) fn selecting_value(request: &HeaderMap, name: &HeaderName) -> Option<String> {
    let mut value: Option<String> = None;
    for line in request.get_all(name) {
        let line: String = line
            .as_bytes()
            .iter()
            .map(|byte| char::from(*byte))
            .collect();
        let members: Vec<&str> = line.split(',').map(str::trim).collect();
        let text = members.join(",");
        match &mut value {
            Some(value) => {
                value.push(',');
                value.push_str(&text);
            }
            None => value = Some(text),
        }
    }
    let has_no_case = [header::ACCEPT_LANGUAGE, header::ACCEPT_ENCODING].contains(name);
    match has_no_case {
        true => value.map(|value| value.to_ascii_lowercase()),
        false => value,
    }
}
