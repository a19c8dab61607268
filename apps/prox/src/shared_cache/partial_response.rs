//! Parts of shared responses whose fetch ended because nobody read them any more (RFC 9111 §3.3).
//!
//! ```text
//!  response, growing ── last reader gone ──▶ PartialResponses ── asked for again ──▶ Range, If-Range ─┬─ 206 ─▶ goes on
//!                                                  │                                                 └─ 200 ─▶ another response
//!                                                  └─ room is needed, or the URL is invalidated ─▶ dropped
//! ```
//!
//! A part begins with the first byte. It is kept only if its origin has named a strong validator, without which the rest
//! could be that of other bytes. It never answers without its origin, so that one of an earlier process does no harm
//! whatever has changed since.

use std::collections::VecDeque;
use std::sync::Arc;

use http::StatusCode;
use http::header::{self, HeaderMap, HeaderValue};

use super::stored_response::StoredResponse;
use crate::copy_head::{CopyHead, has_validator};
use crate::origin::OriginResponse;
use crate::quota_ledger::SHARED;
use crate::range::content_range;
use crate::spooled_body::{SpoolStatus, SpooledBody};

/// The most parts; the oldest is dropped first. A guess.
const PARTIALS_MAX: usize = 64;

/// The beginning of a response.
#[derive(Debug)]
pub(crate) struct PartialResponse {
    url: String,
    /// The id of the copy that it was.
    pub(crate) id: u64,
    pub(crate) head: CopyHead,
    pub(crate) body: Arc<SpooledBody>,
    response: Arc<StoredResponse>,
    validator: HeaderValue,
}

impl PartialResponse {
    /// What there is of a response whose fetch ends; none if the origin cannot be asked for the rest.
    pub(super) fn of(
        url: &str,
        id: u64,
        head: &CopyHead,
        body: &Arc<SpooledBody>,
        response: &Arc<StoredResponse>,
    ) -> Option<PartialResponse> {
        let validator = head.origin_validator.clone()?;
        let extent = body.extent();
        let is_part = extent.status == SpoolStatus::Growing && extent.have > 0;
        let is_shared = head.status == StatusCode::OK && body.client() == SHARED;
        (is_part && is_shared).then(|| PartialResponse {
            url: url.to_owned(),
            id,
            head: head.clone(),
            body: body.clone(),
            response: response.clone(),
            validator,
        })
    }

    /// Asks for the bytes that are missing, if the response is still the same.
    pub(crate) fn add_range(&self, headers: &mut HeaderMap) {
        let range = format!("bytes={}-", self.body.extent().have);
        let range = HeaderValue::from_str(&range).expect("digits are a header value");
        headers.insert(header::RANGE, range);
        headers.insert(header::IF_RANGE, self.validator.clone());
    }

    /// The fields of the whole response, if this answer has the rest of its bytes (RFC 9111 §3.4).
    pub(crate) fn completed_by(&self, answer: &OriginResponse) -> Option<HeaderMap> {
        let extent = self.body.extent();
        let (first, total) = content_range(&answer.headers)?;
        let fits = answer.status == StatusCode::PARTIAL_CONTENT
            && first == Some(extent.have)
            && (total.is_none() || extent.total.is_none() || total == extent.total)
            && has_validator(&answer.headers, &self.validator) != Some(false);
        fits.then(|| self.response.freshened(&answer.headers))?
    }
}

/// The parts that are kept, the oldest first; at most one of each URL.
#[derive(Debug, Default)]
pub(super) struct PartialResponses(VecDeque<PartialResponse>);

impl PartialResponses {
    /// Keeps a part. Returns what it replaces, which frees bytes when it is dropped.
    pub(super) fn keep(&mut self, partial: PartialResponse) -> Option<PartialResponse> {
        let older = self.remove(&partial.url);
        partial.body.release_unused();
        self.0.push_back(partial);
        match self.0.len() > PARTIALS_MAX {
            true => self.0.pop_front(),
            false => older,
        }
    }

    /// The part of a URL that answers a request, if the fetch that made it has ended.
    pub(super) fn take(&mut self, url: &str, request: &HeaderMap) -> Option<PartialResponse> {
        let fits = |partial: &PartialResponse| {
            partial.url == url
                && partial.response.answers(request)
                // Nobody else has the bytes: what wrote them writes no more.
                && Arc::strong_count(&partial.body) == 1
        };
        let at = self.0.iter().position(fits)?;
        self.0.remove(at)
    }

    /// Removes the part of a URL.
    pub(super) fn remove(&mut self, url: &str) -> Option<PartialResponse> {
        let at = self.0.iter().position(|partial| partial.url == url)?;
        self.0.remove(at)
    }

    /// Removes the oldest part.
    pub(super) fn pop_oldest(&mut self) -> Option<PartialResponse> {
        self.0.pop_front()
    }

    /// Removes all parts.
    pub(super) fn clear(&mut self) -> PartialResponses {
        std::mem::take(self)
    }
}
