//! Answers on their way to the device: a head, and a body that can be read again at any offset.

use std::fmt::Write as _;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use d2tp_driver::SendSource;
use http::header::{self, HeaderMap, HeaderValue};
use http::{StatusCode, Version};
use tokio::time::Instant;

use crate::cached_fetch::OpenedCopy;
use crate::client_traffic::FlowTraffic;
use crate::copy_head::CopyHead;
use crate::counters::TrafficDirection;
use crate::origin::PSEUDONYM;
use crate::pinned_copy::PinnedCopy;
use crate::range::RangeAnswer;
use crate::refusal::ProxRefusal;
use crate::request::STREAM_PORT;
use crate::shared_cache::CacheStatus;
use crate::spooled_body::SpoolReadError;

/// A complete response as a source: offset 0 is the first byte of the status line.
pub(crate) struct AnswerSource {
    head: Bytes,
    body: Option<CopyPart>,
    /// The highest offset that was read, for the log.
    sent: AtomicU64,
    /// The flow that sends it, whose client's limits it obeys.
    traffic: Option<Arc<FlowTraffic>>,
}

/// A part of a pinned copy.
struct CopyPart {
    copy: Arc<PinnedCopy>,
    start: u64,
    end: Option<u64>,
    /// The guard that exists while the proxy watches the flow, to reset it with the cause of a
    /// failure.
    reset_guard: Weak<()>,
}

impl AnswerSource {
    /// A response without a body, or whose body is in `head`.
    pub(crate) fn head_only(head: Vec<u8>) -> AnswerSource {
        AnswerSource {
            head: head.into(),
            body: None,
            sent: AtomicU64::new(0),
            traffic: None,
        }
    }

    /// A response with a head and a part of a copy.
    pub(crate) fn of_copy(
        head: Vec<u8>,
        copy: Arc<PinnedCopy>,
        start: u64,
        end: Option<u64>,
        attended: Weak<()>,
    ) -> AnswerSource {
        let body = Some(CopyPart {
            copy,
            start,
            end,
            reset_guard: attended,
        });
        AnswerSource {
            head: head.into(),
            body,
            sent: AtomicU64::new(0),
            traffic: None,
        }
    }

    /// The head in the form in which it is sent.
    pub(crate) fn head(&self) -> &[u8] {
        &self.head
    }

    /// The first byte of the copy that is sent.
    pub(crate) fn start(&self) -> u64 {
        self.body.as_ref().map_or(0, |body| body.start)
    }

    /// The response as this flow sends it.
    pub(crate) fn metered(mut self, traffic: &Arc<FlowTraffic>) -> AnswerSource {
        self.traffic = Some(traffic.clone());
        self
    }

    /// Bytes read by the flow so far, the head included.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

impl SendSource for AnswerSource {
    fn poll_read_at(
        &self,
        cx: &mut Context<'_>,
        offset: u64,
        max: usize,
    ) -> Poll<io::Result<Bytes>> {
        let max = match &self.traffic {
            Some(traffic) => ready!(traffic.poll(cx, TrafficDirection::Down)).min(max),
            None => max,
        };
        let head = self.head.len() as u64;
        let read = if offset < head {
            let from = offset as usize;
            let to = self.head.len().min(from.saturating_add(max));
            Poll::Ready(Ok(self.head.slice(from..to)))
        } else if let Some(body) = &self.body {
            body.poll_read_at(cx, offset - head, max)
        } else {
            Poll::Ready(Ok(Bytes::new()))
        };
        let moved = match &read {
            Poll::Ready(Ok(bytes)) => {
                let end = offset + bytes.len() as u64;
                self.sent.fetch_max(end, Ordering::Relaxed);
                bytes.len()
            }
            _ => 0,
        };
        if let Some(traffic) = &self.traffic {
            traffic.moved(TrafficDirection::Down, moved);
            match &read {
                Poll::Ready(Ok(_)) => traffic.supply.on_read(Instant::now(), moved),
                Poll::Ready(Err(_)) => {}
                Poll::Pending => traffic.supply.on_wait(Instant::now()),
            }
        }
        read
    }
}

impl Drop for CopyPart {
    fn drop(&mut self) {
        self.copy.on_reader_gone();
    }
}

impl CopyPart {
    fn poll_read_at(
        &self,
        cx: &mut Context<'_>,
        offset: u64,
        max: usize,
    ) -> Poll<io::Result<Bytes>> {
        let Some(at) = self.start.checked_add(offset) else {
            return Poll::Ready(Ok(Bytes::new()));
        };
        let max = match self.end {
            Some(end) if at >= end => return Poll::Ready(Ok(Bytes::new())),
            Some(end) => usize::try_from(end - at).unwrap_or(usize::MAX).min(max),
            None => max,
        };
        match self.copy.body.poll_read_at(cx, at, max) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(bytes)) => Poll::Ready(Ok(bytes)),
            // The flow's keeper is about to reset it with this cause; an error from here would
            // race it with a reset that names none.
            Poll::Ready(Err(SpoolReadError::Failed(_))) if self.reset_guard.strong_count() > 0 => {
                Poll::Pending
            }
            Poll::Ready(Err(SpoolReadError::Failed(cause))) => {
                Poll::Ready(Err(io::Error::other(cause)))
            }
            Poll::Ready(Err(SpoolReadError::Disk(error))) => Poll::Ready(Err(error)),
        }
    }
}

/// The head for a part of a copy.
pub(crate) fn copy_head(
    opened: &OpenedCopy,
    part: RangeAnswer,
    total: Option<u64>,
    is_device: bool,
    stream_port: Option<u16>,
) -> Vec<u8> {
    let copy = &opened.copy.head;
    let mut headers = opened.fields(is_device);
    if let Some(port) = stream_port {
        headers.insert(STREAM_PORT, port.into());
    }
    let mut status = copy.status;
    let length = match part {
        RangeAnswer::Whole | RangeAnswer::WaitForMoreThan(_) => total,
        RangeAnswer::Bytes { start, end, total } => {
            status = StatusCode::PARTIAL_CONTENT;
            let total = total.map_or("*".to_owned(), |total| total.to_string());
            insert(
                &mut headers,
                header::CONTENT_RANGE,
                format!("bytes {start}-{}/{total}", end - 1),
            );
            // These describe the whole content, not the part.
            headers.remove("content-digest");
            headers.remove("content-md5");
            Some(end - start)
        }
        RangeAnswer::Unsatisfiable { total } => {
            status = StatusCode::RANGE_NOT_SATISFIABLE;
            insert(
                &mut headers,
                header::CONTENT_RANGE,
                format!("bytes */{total}"),
            );
            for name in [
                "content-type",
                "content-encoding",
                "content-digest",
                "content-md5",
            ] {
                headers.remove(name);
            }
            Some(0)
        }
    };
    if copy.status == StatusCode::OK {
        headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    }
    if let Some(length) = length.filter(|_| status != StatusCode::NO_CONTENT) {
        headers.insert(header::CONTENT_LENGTH, length.into());
    }
    mark_cached(&mut headers, opened);
    bytes(status, &headers)
}

/// The head of a response to HEAD from a copy, or of 304 for one whose conditions a client has met.
pub(crate) fn bare_copy_head(opened: &OpenedCopy, not_modified: bool, is_device: bool) -> Vec<u8> {
    let mut headers = opened.fields(is_device);
    let copy = &opened.copy;
    let mut status = copy.head.status;
    if not_modified {
        status = StatusCode::NOT_MODIFIED;
    } else if let Some(length) = copy.body.extent().total {
        headers.insert(header::CONTENT_LENGTH, length.into());
    }
    mark_cached(&mut headers, opened);
    bytes(status, &headers)
}

/// Adds what is said about the copy and its way.
fn mark_cached(headers: &mut HeaderMap, opened: &OpenedCopy) {
    if let Some(age) = opened.age {
        headers.insert(header::AGE, age.as_secs().into());
    }
    append(headers, "cache-status", opened.cache_status.to_string());
    mark(headers, opened.copy.head.version);
    if let Some(url) = &opened.redirected_to {
        insert(headers, header::CONTENT_LOCATION, url.to_string());
    }
}

/// The head of a response without a pinned body: to HEAD, or 204 and 304.
pub(crate) fn bare_head(
    copy: &CopyHead,
    length: Option<&HeaderValue>,
    cache_status: CacheStatus,
) -> Vec<u8> {
    let mut headers = copy.headers.clone();
    if let Some(length) = length {
        headers.insert(header::CONTENT_LENGTH, length.clone());
    }
    append(&mut headers, "cache-status", cache_status.to_string());
    mark(&mut headers, copy.version);
    if copy.redirected {
        insert(&mut headers, header::CONTENT_LOCATION, copy.url.to_string());
    }
    bytes(copy.status, &headers)
}

/// The head of a response to a link that is not read from a copy.
pub(crate) fn link_head(status: StatusCode, mut fields: HeaderMap, length: Option<u64>) -> Vec<u8> {
    if let Some(length) = length {
        fields.insert(header::CONTENT_LENGTH, length.into());
    }
    mark(&mut fields, Version::HTTP_11);
    bytes(status, &fields)
}

/// The head of a response to an upload.
pub(crate) fn relayed_head(copy: &CopyHead, length: Option<u64>) -> Vec<u8> {
    let mut headers = copy.headers.clone();
    if let Some(length) = length {
        headers.insert(header::CONTENT_LENGTH, length.into());
    }
    mark(&mut headers, copy.version);
    bytes(copy.status, &headers)
}

/// The interim response that lets a device send its body (RFC 9110 §15.2.1).
pub(crate) fn continue_head() -> &'static [u8] {
    b"HTTP/1.1 100 Continue\r\n\r\n"
}

/// The interim response to an upload of which this many body bytes are stored already. Status and field
/// are those of draft-ietf-httpbis-resumable-upload; the way uploads are named is ours.
pub(crate) fn resume_upload_head(offset: u64) -> Vec<u8> {
    format!("HTTP/1.1 104 Upload Resumption Supported\r\nUpload-Offset: {offset}\r\n\r\n")
        .into_bytes()
}

/// An error response with its reason as text.
pub(crate) fn refusal(refusal: &ProxRefusal, to_head: bool) -> Vec<u8> {
    let reason = format!("{refusal}\n");
    let mut headers = HeaderMap::new();
    let details = quoted(&refusal.to_string());
    let status = format!(
        "{PSEUDONYM}; error={}; details=\"{details}\"",
        refusal.token()
    );
    append(&mut headers, "proxy-status", status);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    headers.insert(header::CONTENT_LENGTH, reason.len().into());
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    if let Some(wait) = refusal.retry_after() {
        headers.insert(header::RETRY_AFTER, wait.as_secs().into());
    }
    let status = StatusCode::from_u16(refusal.status()).expect("the table holds valid statuses");
    let mut answer = bytes(status, &headers);
    if !to_head {
        answer.extend_from_slice(reason.as_bytes());
    }
    answer
}

/// The response that opens a tunnel (RFC 9110 §9.3.6: neither length nor coding).
pub(crate) fn tunnel_open() -> &'static [u8] {
    b"HTTP/1.1 200 Connection established\r\nvia: 1.1 d2prox\r\n\r\n"
}

/// Adds the fields of every forwarded response.
fn mark(headers: &mut HeaderMap, version: Version) {
    let version = match version {
        Version::HTTP_2 => "2",
        Version::HTTP_10 => "1.0",
        _ => "1.1",
    };
    append(headers, "via", format!("{version} {PSEUDONYM}"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
}

/// Replaces a field with text that is known to be valid.
fn insert(headers: &mut HeaderMap, name: header::HeaderName, value: String) {
    if let Ok(value) = HeaderValue::from_str(&value) {
        headers.insert(name, value);
    }
}

fn append(headers: &mut HeaderMap, name: &'static str, value: String) {
    if let Ok(value) = HeaderValue::from_str(&value) {
        headers.append(name, value);
    }
}

/// Text as the inside of an RFC 8941 string: printable ASCII, quotes escaped.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            ' '..='~' => out.push(c),
            _ => out.push('?'),
        }
    }
    out
}

/// Encodes a head.
fn bytes(status: StatusCode, headers: &HeaderMap) -> Vec<u8> {
    let mut line = String::new();
    let reason = status.canonical_reason().unwrap_or("");
    let _ = write!(line, "HTTP/1.1 {} {reason}\r\n", status.as_u16());
    let mut head = line.into_bytes();
    for (name, value) in headers {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_answer_names_its_kind_and_quotes_its_reason() {
        let why = ProxRefusal::SchemeUnsupported("a\"b\\ü\r\nx: y".to_owned());
        let text = String::from_utf8(refusal(&why, true)).unwrap();
        assert!(text.starts_with("HTTP/1.1 501 Not Implemented\r\n"));
        assert!(text.contains(
            "proxy-status: d2prox; error=http_request_error; details=\"a\\\"b\\\\???x: y"
        ));
        assert!(text.ends_with("\r\n\r\n"));
    }

    #[test]
    fn a_limit_says_when_to_come_back() {
        let text = String::from_utf8(refusal(&ProxRefusal::StoreFull, false)).unwrap();
        assert!(text.contains("\r\nretry-after: 30\r\n"));
        assert!(text.ends_with("try again later\n"));
    }
}
