//! Filling a pinned copy from its origin, through broken connections.
//!
//! ```text
//! body ── append ──▶ pin          whole ──▶ finish
//!   │ breaks off
//!   ▼
//! strong validator? ── no ──▶ fail(OriginGone)
//!   │ yes
//!   ▼
//! wait, ask with Range + If-Range ──▶ 206 from here, or 200 with the same validator ──▶ go on
//!                                 └─▶ other bytes ──▶ fail(OriginChanged)
//! ```
//!
//! What a node takes over from another one comes from the bucket first, if the bucket has the bytes of copies.
//!
//! The fetch is independent of the device: it continues while the device is away and ends when the
//! copy is complete or fails, or when nothing refers to the copy any more.

use std::sync::{Arc, Weak};
use std::time::Duration;

use d2tp_driver::HostKey;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, StatusCode};
use tokio::time::Instant;
use url::Url;

use crate::copy_bucket::{CopyBucket, PART_BYTES};
use crate::copy_head::has_validator;
use crate::copy_store::CopyStore;
use crate::link_keys::link_client_id;
use crate::origin::{OriginBody, OriginConnector, OriginMemory, without_query};
use crate::pinned_copy::PinnedCopy;
use crate::quota_ledger::{QuotaExceeded, SHARED};
use crate::range::content_range;
use crate::retained_copies::RetainedCopies;
use crate::shared_cache::SharedCache;
use crate::spooled_body::{SpoolError, SpooledBody};
use d2tp_driver::ResetCause;

/// The longest wait between two attempts.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(60);
/// New bytes after which the wait is short again. With less, an origin that breaks off after every byte
/// would be asked without pause.
const PROGRESS_BYTES: u64 = 64 * 1024;

/// How long a bucket may lack the end of a copy whose record says that it is complete: the node that fetched the copy may
/// be sending it.
const BUCKET_LAG: Duration = Duration::from_secs(3); // a guess: half a second and a part
/// How soon such a bucket is asked again.
const LACKING_AGAIN: Duration = Duration::from_millis(250);
/// The first and the longest wait for a bucket or a store that fails while a flow waits.
const AWAITED_AGAIN: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

/// Handles of a copy that a flow has which reads it: its own, and that of its source.
const HANDLES_OF_READER: usize = 2;

/// The fetch of one object.
pub(crate) struct CopyFetcher {
    pub(crate) upstream: Arc<OriginConnector>,
    /// What connections to the origin are charged to.
    pub(crate) memory: OriginMemory,
    pub(crate) retained: Weak<RetainedCopies>,
    pub(crate) cache: Weak<SharedCache>,
    /// The copy, whose handles its readers have.
    pub(crate) copy: Weak<PinnedCopy>,
    /// The id of the copy.
    pub(crate) id: u64,
    /// The client that asked, to whom a copy is charged that can no longer be shared.
    pub(crate) client: HostKey,
    pub(crate) spool: Arc<SpooledBody>,
    /// The URL that the device asked for.
    pub(crate) asked_url: Url,
    /// The URL that the bytes come from, after redirects.
    pub(crate) url: Url,
    /// The header fields of the device's request.
    pub(crate) headers: HeaderMap,
    pub(crate) validator: Option<HeaderValue>,
    pub(crate) total: Option<u64>,
    pub(crate) retry_wait: Duration,
    pub(crate) patience: Duration,
}

/// Where the bytes come from that a copy lacks.
pub(crate) enum CopyFetchSource {
    /// The origin's answer.
    Origin(OriginBody),
    /// A request for the rest, which is made at once: an earlier process began the copy.
    Rest,
    /// The bucket, and a request for what it lacks.
    Bucket(BucketParts),
}

/// The parts of a copy in the bucket that nodes share.
pub(crate) struct BucketParts {
    pub(crate) copy_store: Arc<CopyStore>,
    pub(crate) bucket: Arc<CopyBucket>,
    /// Whether the record of the copy says that it is complete.
    pub(crate) is_whole: bool,
}

/// How an origin's body ended.
enum BodyEnd {
    Whole,
    Interrupted(String),
}

/// The result of an attempt to continue.
enum FetchContinuation {
    /// A body whose first `skip` bytes are stored already.
    Body { body: OriginBody, skip: u64 },
    /// There was nothing left to fetch.
    Whole,
    /// The origin could not be asked now.
    RetryLater(String),
}

impl CopyFetcher {
    /// Fetches until the copy is complete or has failed.
    pub(crate) async fn run(mut self, source: CopyFetchSource) {
        match self.fetch(source).await {
            Ok(()) => self.spool.finish(),
            Err(cause) => {
                let url = self.shown_url();
                let have = self.spool.extent().have;
                tracing::warn!(url, have, cause = cause.as_str(), "the fetch failed");
                self.spool.fail(cause);
                if let Some(cache) = self.cache.upgrade() {
                    cache.remove(self.id);
                }
            }
        }
    }

    /// The URL as logs show it: of what links of podcast apps lead to, the host alone.
    fn shown_url(&self) -> String {
        match link_client_id(&self.client) {
            None => without_query(&self.url),
            Some(_) => self.url.host_str().unwrap_or_default().to_owned(),
        }
    }

    async fn fetch(&mut self, source: CopyFetchSource) -> Result<(), ResetCause> {
        let mut body = match source {
            CopyFetchSource::Origin(body) => Some(body),
            CopyFetchSource::Rest => None,
            CopyFetchSource::Bucket(parts) => {
                self.read_bucket(&parts).await?;
                None
            }
        };
        let mut skip = 0;
        let mut wait = self.retry_wait;
        loop {
            let before = self.spool.extent().have;
            let drained = match body.take() {
                Some(body) => self.drain(body, skip).await?,
                // Begun by a process that is no more: the rest is asked for at once.
                None if self.total == Some(before) => return Ok(()),
                None => {
                    wait = Duration::ZERO;
                    BodyEnd::Interrupted("the proxy was restarted".into())
                }
            };
            match drained {
                BodyEnd::Whole => return Ok(()),
                BodyEnd::Interrupted(why) => {
                    let have = self.spool.extent().have;
                    let url = self.shown_url();
                    tracing::info!(url, have, why, "the server closed the connection early");
                    if have - before >= PROGRESS_BYTES {
                        wait = self.retry_wait;
                    }
                }
            }
            let give_up = Instant::now() + self.patience;
            loop {
                let Some(validator) = self.validator.clone() else {
                    return Err(ResetCause::OriginGone);
                };
                tokio::time::sleep(wait).await;
                if self.spool.is_taken_over().await && !self.has_several_readers() {
                    tracing::info!(id = self.id, "another node fetches this copy on");
                    return Err(ResetCause::StoreFailed);
                }
                wait = (wait * 2).clamp(self.retry_wait, RETRY_WAIT_MAX.max(self.retry_wait));
                match self.carry_on(&validator).await? {
                    FetchContinuation::Whole => return Ok(()),
                    FetchContinuation::Body {
                        body: next,
                        skip: already,
                    } => {
                        (body, skip) = (Some(next), already);
                        break;
                    }
                    FetchContinuation::RetryLater(why) if Instant::now() < give_up => {
                        tracing::debug!(why, "the server cannot continue yet");
                    }
                    FetchContinuation::RetryLater(_) => return Err(ResetCause::OriginTimeout),
                }
            }
        }
    }

    /// Reads what the bucket has of the copy. If that is not all, the copy is this node's own afterwards, so that the
    /// origin may be asked for the rest.
    async fn read_bucket(&mut self, parts: &BucketParts) -> Result<(), ResetCause> {
        let mut lacking_until = None;
        let mut wait = AWAITED_AGAIN.0;
        loop {
            let have = self.spool.extent().have;
            if self.total == Some(have) {
                return Ok(());
            }
            let part = have / PART_BYTES;
            let permit = parts.bucket.until_may_read().await;
            match parts.bucket.read_awaited_part(self.id, part).await {
                Ok(Some(bytes)) => {
                    wait = AWAITED_AGAIN.0;
                    lacking_until = None;
                    parts.bucket.report::<object_store::Error>(&Ok(()));
                    let after = have + bytes.len() as u64;
                    let is_beyond = self.total.is_some_and(|total| after > total);
                    if is_beyond || bytes.len() as u64 > PART_BYTES {
                        tracing::error!(id = self.id, "the bucket has other bytes for a copy");
                        return Err(ResetCause::StoreFailed);
                    }
                    let is_last = (bytes.len() as u64) < PART_BYTES;
                    let version = parts.copy_store.version(self.id);
                    parts.bucket.on_parts_read(self.id, version, part + 1);
                    self.store(bytes).await?;
                    if is_last && self.total.is_none() {
                        self.total = Some(after); // Only the last part of a complete copy is shorter.
                    }
                    if is_last && self.total != Some(after) {
                        tracing::error!(id = self.id, "the bucket has a part that is too short");
                        return Err(ResetCause::StoreFailed);
                    }
                }
                Ok(None) => {
                    let now = Instant::now();
                    let until = *lacking_until.get_or_insert(now + BUCKET_LAG);
                    if !parts.is_whole || now >= until {
                        break;
                    }
                    drop(permit);
                    tokio::time::sleep(LACKING_AGAIN).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "a copy is needed, and the bucket that has it fails; its flow waits");
                    parts.bucket.report(&Err(error));
                    drop(permit);
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(AWAITED_AGAIN.1);
                }
            }
        }
        let have = self.spool.extent().have;
        tracing::info!(id = self.id, have, "the bucket has no more of this copy");
        loop {
            match parts.copy_store.claim_copy(self.id).await {
                Ok(true) => return Ok(()),
                Ok(false) => {
                    tracing::info!(id = self.id, "another node fetches this copy on");
                    return Err(ResetCause::StoreFailed);
                }
                Err(error) => {
                    tracing::warn!(%error, "a copy is taken over, which waits for the store");
                    tokio::time::sleep(AWAITED_AGAIN.1).await;
                }
            }
        }
    }

    /// Whether several flows read the copy here: if one of them has moved to another node, the others have not.
    fn has_several_readers(&self) -> bool {
        let cache = self.cache.upgrade();
        let is_cached = cache.is_some_and(|cache| cache.has(self.id));
        self.copy.strong_count() > HANDLES_OF_READER + usize::from(is_cached)
    }

    /// Appends a body to the copy, without its first `skip` bytes.
    async fn drain(&self, mut body: OriginBody, mut skip: u64) -> Result<BodyEnd, ResetCause> {
        loop {
            let mut bytes = match body.next().await {
                Ok(Some(bytes)) => bytes,
                Ok(None) => {
                    let have = self.spool.extent().have;
                    return match self.total {
                        Some(total) if have < total => Ok(BodyEnd::Interrupted(format!(
                            "ended at {have} of {total} bytes"
                        ))),
                        _ if skip > 0 => Err(ResetCause::OriginChanged),
                        _ => Ok(BodyEnd::Whole),
                    };
                }
                Err(fault) => return Ok(BodyEnd::Interrupted(fault.0)),
            };
            let known = skip.min(bytes.len() as u64);
            skip -= known;
            let _ = bytes.split_to(known as usize);
            let after = self.spool.extent().have + bytes.len() as u64;
            if self.total.is_some_and(|total| after > total) {
                return Err(ResetCause::OriginChanged);
            }
            self.store(bytes).await?;
        }
    }

    /// Stores bytes, and drops kept copies if there is no room.
    async fn store(&self, bytes: bytes::Bytes) -> Result<(), ResetCause> {
        loop {
            // A shared copy of an earlier process has no client to whom it could be charged instead.
            let is_shared = self.spool.client() == SHARED && self.client != SHARED;
            if is_shared {
                let after = self.spool.extent().have + bytes.len() as u64;
                let takes = |cache: Arc<SharedCache>| cache.takes(Some(after));
                if !self.cache.upgrade().is_some_and(takes) {
                    self.share_no_more()?;
                    continue;
                }
            }
            match self.spool.append(bytes.clone()).await {
                Ok(()) => return Ok(()),
                Err(SpoolError::Full(full)) if self.make_room(full, is_shared) => {}
                Err(SpoolError::Full(QuotaExceeded::Client)) if is_shared => {
                    self.share_no_more()?
                }
                Err(SpoolError::Full(_)) => return Err(ResetCause::StoreFull),
                Err(SpoolError::Disk(error)) => {
                    tracing::error!(%error, "the state directory cannot be written");
                    return Err(ResetCause::StoreFailed);
                }
            }
            // If the copy let go of was this one, this fetch ends here.
            tokio::task::yield_now().await;
        }
    }

    /// Drops copies that nobody reads. False if there are none.
    fn make_room(&self, full: QuotaExceeded, is_shared: bool) -> bool {
        let of_client = full == QuotaExceeded::Client;
        if is_shared || !of_client || self.client == SHARED {
            let cache = self.cache.upgrade();
            if cache.is_some_and(|cache| cache.make_room(Some(self.id))) {
                return true;
            }
        }
        let only_of = of_client.then_some(self.client);
        let retained = self.retained.upgrade();
        !(of_client && is_shared) && retained.is_some_and(|retained| retained.make_room(only_of))
    }

    /// Takes the copy out of the cache, and charges it to the client that asked for it.
    fn share_no_more(&self) -> Result<(), ResetCause> {
        self.spool
            .charge_to(self.client)
            .map_err(|_| ResetCause::StoreFull)?;
        if let Some(cache) = self.cache.upgrade() {
            cache.remove(self.id);
        }
        Ok(())
    }

    /// Requests the bytes of the object that are missing.
    async fn carry_on(&mut self, validator: &HeaderValue) -> Result<FetchContinuation, ResetCause> {
        let have = self.spool.extent().have;
        let mut headers = self.headers.clone();
        for name in [
            header::IF_MATCH,
            header::IF_NONE_MATCH,
            header::IF_MODIFIED_SINCE,
            header::IF_UNMODIFIED_SINCE,
        ] {
            headers.remove(name);
        }
        let range = HeaderValue::from_str(&format!("bytes={have}-")).expect("digits");
        headers.insert(header::RANGE, range);
        headers.insert(header::IF_RANGE, validator.clone());
        if self.url.origin() != self.asked_url.origin() {
            headers.remove(header::AUTHORIZATION);
            headers.remove(header::COOKIE);
        }
        let response = match self
            .upstream
            .fetch(&Method::GET, &self.url, &headers, &self.memory)
            .await
        {
            Ok(response) => response,
            Err(refusal) => return Ok(FetchContinuation::RetryLater(refusal.to_string())),
        };
        let same = has_validator(&response.headers, validator);
        match response.status {
            StatusCode::PARTIAL_CONTENT => match content_range(&response.headers) {
                Some((Some(first), total))
                    if first == have
                        && same != Some(false)
                        && (total.is_none() || self.total.is_none() || total == self.total) =>
                {
                    self.total = self.total.or(total);
                    Ok(FetchContinuation::Body {
                        body: response.body,
                        skip: 0,
                    })
                }
                _ => Err(ResetCause::OriginChanged),
            },
            // The origin ignores ranges; the same strong validator still promises the same bytes.
            StatusCode::OK if same == Some(true) => Ok(FetchContinuation::Body {
                body: response.body,
                skip: have,
            }),
            StatusCode::OK => Err(ResetCause::OriginChanged),
            StatusCode::RANGE_NOT_SATISFIABLE => match content_range(&response.headers) {
                // The size was unknown, and this was all of it.
                Some((None, Some(total)))
                    if total == have && self.total.is_none() && same != Some(false) =>
                {
                    Ok(FetchContinuation::Whole)
                }
                _ => Err(ResetCause::OriginChanged),
            },
            status if status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429) => {
                Ok(FetchContinuation::RetryLater(format!("status {status}")))
            }
            // A redirect led to a URL that has expired: go the whole way again.
            _ if self.url != self.asked_url => {
                self.url = self.asked_url.clone();
                Ok(FetchContinuation::RetryLater(format!(
                    "status {}",
                    response.status
                )))
            }
            _ => Err(ResetCause::OriginChanged),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ProxConfig;
    use crate::prox::Prox;

    #[test]
    fn a_restored_shared_copy_that_the_cache_takes_no_more_is_filled_or_fails() {
        let (tell, stored) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            let end = runtime.block_on(async {
                let prox = Prox::new(ProxConfig {
                    allow_any_client: true,
                    ..ProxConfig::default()
                })
                .unwrap();
                let spool = Arc::new(prox.reserve_spool(SHARED, Some(3), None).unwrap());
                prox.cache.set_limits(0, 0);
                let url: Url = "http://h/".parse().unwrap();
                let fetcher = CopyFetcher {
                    upstream: prox.upstream(),
                    memory: prox.origin_memory(SHARED),
                    retained: Arc::downgrade(&prox.retained),
                    cache: Arc::downgrade(&prox.cache),
                    copy: Weak::new(),
                    id: 1,
                    client: SHARED,
                    spool,
                    asked_url: url.clone(),
                    url,
                    headers: HeaderMap::new(),
                    validator: None,
                    total: Some(3),
                    retry_wait: Duration::ZERO,
                    patience: Duration::ZERO,
                };
                fetcher.store(bytes::Bytes::from_static(b"abc")).await
            });
            tell.send(end).unwrap();
        });
        let end = stored.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(end, Ok(()));
    }
}
