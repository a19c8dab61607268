//! How a GET or HEAD gets its answer: from the shared cache, from the origin, or from the origin by way of another
//! request for the same.
//!
//! ```text
//!        ┌──────────────────────────── redirect ─────────────────────────────┐
//!        ▼                                                                    │
//!  open ─▶ cache.find ─┬─ Use ──▶ the copy (validated in the background if it is nearly stale)
//!                      ├─ Wait ─▶ look again
//!                      └─ Ask ──▶ origin ─┬─ 304 ──▶ the stale copy, with new fields
//!                                         ├─ 206 ──▶ the rest of a copy of which the cache has a part
//!                                         ├─ 200 … ▶ a new copy: shared if it may be, else the client's own
//!                                         └─ none ─▶ the stale copy if it may be used, else why not
//! ```
//!
//! A request with a range asks the origin for the whole object, once, so that ranges of all clients come from one
//! copy.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use d2tp_driver::HostKey;
use http::header::{self, HeaderMap, HeaderName};
use http::{HeaderValue, Method, StatusCode};
use tokio::time::Instant;
use url::Url;

use crate::copy_fetcher::CopyFetchSource;
use crate::copy_head::{CopyHead, CopyRequest};
use crate::flow_report::ServedFrom;
use crate::origin::{OriginBody, OriginResponse, follow, redirect_location, without_query};
use crate::pinned_copy::PinnedCopy;
use crate::prox::{Prox, random_name};
use crate::quota_ledger::SHARED;
use crate::refusal::ProxRefusal;
use crate::request::{FetchRequest, STREAM_PORT, strip_hop_by_hop};
use crate::shared_cache::{
    CacheDemand, CacheEntry, CacheLookup, CacheStatus, CollapseLead, PartialResponse, ReceiptTime,
    StoredResponse, is_not_modified,
};

/// How often a request waits for others before it asks the origin itself: for the first response of a URL, and for
/// that of its own variant. A guess.
const WAITS_MAX: u32 = 2;

/// Fields of every answer to a link.
const LINK_FIELDS: [(HeaderName, &str); 3] = [
    (header::CACHE_CONTROL, "private, no-cache"),
    (
        header::CONTENT_SECURITY_POLICY,
        "sandbox; default-src 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
];

/// A copy, and how it answers one request.
#[derive(Debug)]
pub(crate) struct OpenedCopy {
    pub(crate) copy: Arc<PinnedCopy>,
    /// Fields that a later validation has changed; none: those of the copy.
    newer_fields: Option<HeaderMap>,
    /// The time since the origin made or validated it; none: the origin has just sent it.
    pub(crate) age: Option<Duration>,
    pub(crate) cache_status: CacheStatus,
    /// Where redirects of this request have led.
    pub(crate) redirected_to: Option<Url>,
    pub(crate) served: ServedFrom,
}

/// The answer to a GET or HEAD.
#[derive(Debug)]
pub(crate) enum FetchedAnswer {
    /// A copy, which may still be fetched.
    Copy(OpenedCopy),
    /// A response without a body, from a copy: 304 if the client's conditions are met, else that to HEAD.
    BareCopy {
        opened: OpenedCopy,
        not_modified: bool,
    },
    /// The origin's response without a body.
    HeadOnly {
        head: Box<CopyHead>,
        length: Option<HeaderValue>,
        cache_status: CacheStatus,
    },
}

/// What asking one URL has led to.
enum HopAnswer {
    Answer(Box<FetchedAnswer>),
    Redirect(HeaderValue),
}

impl HopAnswer {
    fn answer(answer: FetchedAnswer) -> HopAnswer {
        HopAnswer::Answer(Box::new(answer))
    }
}

/// One URL on the way of a request.
struct RedirectHop<'a> {
    client: HostKey,
    /// The request as the client made it.
    asked: &'a FetchRequest,
    url: Url,
    headers: HeaderMap,
    redirects: u32,
}

impl OpenedCopy {
    /// A copy of the client's own, from an earlier flow.
    pub(crate) fn pinned(copy: Arc<PinnedCopy>) -> OpenedCopy {
        OpenedCopy {
            newer_fields: None,
            age: None,
            cache_status: CacheStatus::Pinned,
            redirected_to: copy.head.redirected.then(|| copy.head.url.clone()),
            served: ServedFrom::PinnedCopy,
            copy,
        }
    }

    /// The copy as the answer to a link: only with fields about its bytes, because others would speak for the proxy's own
    /// name, and with an entity tag that no other copy has, whatever the origin says of its bytes.
    pub(crate) fn for_link(mut self) -> OpenedCopy {
        let fields = self.newer_fields.as_ref();
        let mut fields = link_fields(fields.unwrap_or(&self.copy.head.headers));
        fields.insert(header::ETAG, self.copy.link_tag());
        self.newer_fields = Some(fields);
        self.redirected_to = None;
        self
    }

    /// The fields to be sent. A device gets a strong entity tag, with which it continues with this copy only; others
    /// keep that of the origin if there is one.
    pub(crate) fn fields(&self, is_device: bool) -> HeaderMap {
        let head = &self.copy.head;
        let fields = self.newer_fields.as_ref().unwrap_or(&head.headers);
        let mut fields = fields.clone();
        if let Some(tag) = &head.own_tag
            && (is_device || !fields.contains_key(header::ETAG))
        {
            fields.insert(header::ETAG, tag.clone());
        }
        fields
    }
}

/// What is passed on to an app of the origin's fields, and what browsers are told: not to run what they get.
pub(crate) fn link_fields(origins: &HeaderMap) -> HeaderMap {
    let mut fields = HeaderMap::new();
    for name in [
        header::CONTENT_TYPE,
        header::CONTENT_ENCODING,
        header::CONTENT_LANGUAGE,
        header::DATE,
        header::RETRY_AFTER,
    ] {
        for value in origins.get_all(&name) {
            fields.append(name.clone(), value.clone());
        }
    }
    for (name, value) in LINK_FIELDS {
        fields.insert(name, HeaderValue::from_static(value));
    }
    fields
}

impl Prox {
    /// Answers from the cache or from the origin. A body is fetched from then on.
    pub(crate) async fn open(
        self: &Arc<Prox>,
        client: HostKey,
        request: &FetchRequest,
    ) -> Result<FetchedAnswer, ProxRefusal> {
        let mut hop = RedirectHop {
            client,
            asked: request,
            url: request.url.clone(),
            headers: request.headers.clone(),
            redirects: 0,
        };
        let redirects_max = self.upstream().redirects_max;
        loop {
            let location = match self.open_hop(&hop).await? {
                HopAnswer::Answer(answer) => return Ok(*answer),
                HopAnswer::Redirect(location) => location,
            };
            if hop.redirects == redirects_max {
                let last = without_query(&hop.url);
                return Err(ProxRefusal::TooManyRedirects(hop.redirects, last));
            }
            hop.redirects += 1;
            let next = follow(&hop.url, &location)?;
            if next.origin() != hop.url.origin() {
                // What was meant for one origin is not for another.
                for name in [header::AUTHORIZATION, header::COOKIE] {
                    hop.headers.remove(name);
                }
            }
            tracing::debug!(from = %hop.url, to = %next, "redirect");
            hop.url = next;
        }
    }

    async fn open_hop(self: &Arc<Prox>, hop: &RedirectHop<'_>) -> Result<HopAnswer, ProxRefusal> {
        let demand = CacheDemand::of(&hop.headers);
        if !self.cache.is_on() || !demand.may_use {
            if demand.only_if_cached() {
                return Err(ProxRefusal::NotCached);
            }
            return self.ask(hop, &demand, None, None, "bypass").await;
        }
        let mut waits = 0;
        loop {
            let may_wait = waits < WAITS_MAX && !hop.asked.head_only;
            let found = (self.cache).find(hop.url.as_str(), &hop.headers, &demand, may_wait);
            match found {
                CacheLookup::Use(entry, lead) => {
                    if let Some(lead) = lead {
                        self.validate_in_background(hop, &demand, lead, entry.clone());
                    }
                    let cache_status = match (waits, entry.response.fresh_for(entry.resident())) {
                        (0, fresh_for) => CacheStatus::Hit(ttl(&entry, fresh_for)),
                        _ => CacheStatus::Collapsed,
                    };
                    return Ok(HopAnswer::answer(self.answer_from(
                        hop,
                        entry,
                        cache_status,
                    )));
                }
                CacheLookup::Wait(pending) => {
                    waits += 1;
                    if let Err(refusal) = pending.over().await {
                        let last_resort = self.cache.last_resort(hop.url.as_str(), &hop.headers);
                        let survivor = last_resort.filter(|entry| self.survives(entry, None));
                        return match survivor {
                            Some(entry) => {
                                Ok(HopAnswer::answer(self.answer_from_stale(hop, entry)))
                            }
                            None => Err(refusal),
                        };
                    }
                }
                CacheLookup::Ask { .. } if demand.only_if_cached() => {
                    return Err(ProxRefusal::NotCached);
                }
                CacheLookup::Ask {
                    lead,
                    stale,
                    has_variants,
                } => {
                    let why = match (&stale, has_variants) {
                        (Some(entry), _)
                            if entry.response.fresh_for(entry.resident()).is_some() =>
                        {
                            "request"
                        }
                        (Some(_), _) => "stale",
                        (None, true) => "vary-miss",
                        (None, false) => "uri-miss",
                    };
                    return self.ask(hop, &demand, lead, stale, why).await;
                }
            }
        }
    }

    /// Asks the origin, about a stale entry if there is one.
    async fn ask(
        self: &Arc<Prox>,
        hop: &RedirectHop<'_>,
        demand: &CacheDemand,
        lead: Option<CollapseLead>,
        stale: Option<CacheEntry>,
        why: &'static str,
    ) -> Result<HopAnswer, ProxRefusal> {
        let begun = self.cache.begin();
        let method = match hop.asked.head_only {
            true => Method::HEAD,
            false => Method::GET,
        };
        let validated = stale
            .as_ref()
            .filter(|entry| entry.response.has_validator() && method == Method::GET);
        let mut headers = hop.headers.clone();
        if let Some(entry) = validated {
            entry.response.add_conditions(&mut headers);
        }
        let may_complete =
            lead.is_some() && stale.is_none() && method == Method::GET && !demand.is_conditional;
        let mut partial = match may_complete {
            true => self.cache.take_partial(hop.url.as_str(), &hop.headers),
            false => None,
        };
        if let Some(partial) = &partial {
            partial.add_range(&mut headers);
        }
        let memory = self.origin_memory(hop.client);
        let asked_at = Instant::now();
        let upstream = self.upstream();
        let asking = upstream.fetch_once(&method, &hop.url, &headers, &memory);
        let mut response = match asking.await {
            Ok(response) => response,
            Err(refusal) => {
                partial
                    .into_iter()
                    .for_each(|part| self.cache.keep_partial(part));
                let survivor = stale.filter(|entry| self.survives(entry, None));
                if !refusal.is_of_origin() {
                    return Err(refusal);
                }
                // What one request makes of the origin is no answer to others: those ask for themselves.
                if let Some(lead) = lead.filter(|_| refusal.is_before_request()) {
                    lead.failed(refusal.clone());
                }
                return match survivor {
                    Some(entry) => Ok(HopAnswer::answer(self.answer_from_stale(hop, entry))),
                    None => Err(refusal),
                };
            }
        };
        let is_failure = matches!(response.status.as_u16(), 500 | 502 | 503 | 504);
        if is_failure
            && let Some(entry) = &stale
            && self.survives(entry, Some(response.status))
        {
            drop(lead); // Another request may succeed: those that wait ask for themselves.
            return Ok(HopAnswer::answer(
                self.answer_from_stale(hop, entry.clone()),
            ));
        }
        let delay = asked_at.elapsed();
        let received = ReceiptTime {
            at: SystemTime::now(),
            delay,
        };
        if let Some(partial) = partial.take_if(|_| !response.status.is_server_error()) {
            let fields = partial.completed_by(&response);
            let completed = fields.and_then(|fields| {
                let whole = StatusCode::OK;
                let stored = StoredResponse::new(&hop.headers, whole, &fields, received)?;
                Some((fields, stored))
            });
            if let Some((fields, stored)) = completed {
                let rest = response.body;
                let answer = self.complete(hop, partial, fields, stored, rest, begun, lead);
                return Ok(HopAnswer::answer(answer));
            }
            // What the origin has now is another response, of which it may have sent a part.
            if matches!(response.status.as_u16(), 206 | 416) {
                let asking = upstream.fetch_once(&method, &hop.url, &hop.headers, &memory);
                response = asking.await?;
            }
        }
        partial
            .into_iter()
            .for_each(|part| self.cache.keep_partial(part));
        if let (StatusCode::NOT_MODIFIED, Some(entry)) = (response.status, validated) {
            if let Some(fields) = entry.response.freshened(&response.headers) {
                let answer = self.freshen(hop, entry, fields, received, begun, lead);
                return Ok(HopAnswer::answer(answer));
            }
            // The origin speaks of another response than the one that it was asked about.
            let asking = upstream.fetch_once(&method, &hop.url, &hop.headers, &memory);
            response = asking.await?;
        }
        if let Some(location) = redirect_location(response.status, &response.headers) {
            let location = location.clone();
            if let Some(lead) = lead {
                lead.not_shared();
            }
            return Ok(HopAnswer::Redirect(location));
        }
        if response.status == StatusCode::PARTIAL_CONTENT {
            let host = response.url.host_str().unwrap_or_default();
            return Err(ProxRefusal::UnexpectedPartial(host.to_owned()));
        }
        response.redirects = hop.redirects;
        self.take_response(hop, demand, response, received, begun, lead, why)
            .map(HopAnswer::answer)
    }

    /// Takes a response over as a copy: one that is shared if it may be.
    #[allow(clippy::too_many_arguments)] // Facts of one exchange, used once.
    fn take_response(
        &self,
        hop: &RedirectHop<'_>,
        demand: &CacheDemand,
        response: OriginResponse,
        received: ReceiptTime,
        begun: u64,
        lead: Option<CollapseLead>,
        why: &'static str,
    ) -> Result<FetchedAnswer, ProxRefusal> {
        let status = response.status;
        let head = CopyHead::new(&response, hop.asked);
        let length = response.headers.get(header::CONTENT_LENGTH).cloned();
        let may_share =
            !hop.asked.head_only && demand.may_store && self.cache.takes(response.body.size());
        let stored = may_share
            .then(|| StoredResponse::new(&hop.headers, status, &response.headers, received))
            .flatten();
        let has_no_body = matches!(status.as_u16(), 204 | 304);
        if hop.asked.head_only || (has_no_body && stored.is_none()) {
            if let Some(lead) = lead {
                lead.not_shared();
            }
            return Ok(FetchedAnswer::HeadOnly {
                head: Box::new(head),
                length: length.filter(|_| hop.asked.head_only),
                cache_status: CacheStatus::Forwarded {
                    why,
                    status,
                    stored: false,
                },
            });
        }
        let name = Some(random_name());
        // Where the cache is full of what others read, the copy is the client's own.
        let shared = stored.and_then(|stored| {
            let spool = self.reserve_spool(SHARED, response.body.size(), name);
            Some((stored, Arc::new(spool.ok()?)))
        });
        let copy = match shared {
            Some((stored, spool)) => {
                let asked = FetchRequest {
                    url: hop.url.clone(),
                    headers: hop.headers.clone(),
                    ..hop.asked.clone()
                };
                let mut head = head;
                head.select_by_vary_only();
                let copy = self.fill(hop.client, &asked, head, response.body, spool, name);
                let entry = CacheEntry::new(copy.clone(), stored);
                self.cache.store(hop.url.as_str(), entry, begun);
                if let Some(lead) = lead {
                    lead.stored();
                }
                copy
            }
            None => {
                let body = response.body;
                let copy = self.take_over(hop.client, hop.asked, head, body, name)?;
                if let Some(lead) = lead {
                    lead.not_shared();
                }
                copy
            }
        };
        let opened = OpenedCopy {
            newer_fields: None,
            age: None,
            cache_status: CacheStatus::Forwarded {
                why,
                status,
                stored: true,
            },
            redirected_to: (hop.redirects > 0).then(|| hop.url.clone()),
            served: ServedFrom::Origin,
            copy,
        };
        Ok(self.answer_with(hop, opened))
    }

    /// Answers with a response of which the cache had a part, and the origin sends the rest.
    #[allow(clippy::too_many_arguments)] // Facts of one exchange, used once.
    fn complete(
        &self,
        hop: &RedirectHop<'_>,
        partial: PartialResponse,
        mut fields: HeaderMap,
        stored: StoredResponse,
        rest: OriginBody,
        begun: u64,
        lead: Option<CollapseLead>,
    ) -> FetchedAnswer {
        let asked = CopyRequest {
            url: hop.url.clone(),
            headers: hop.headers.clone(),
        };
        let (id, have) = (partial.id, partial.body.extent().have);
        tracing::debug!(id, have, "a part in the cache is completed");
        let (head, spool) = (partial.head, partial.body);
        let source = CopyFetchSource::Origin(rest);
        let copy = self.start_fetch(hop.client, id, head, spool, asked, source);
        let entry = CacheEntry::new(copy.clone(), stored);
        self.cache.store(hop.url.as_str(), entry, begun);
        if let Some(lead) = lead {
            lead.stored();
        }
        strip_hop_by_hop(&mut fields);
        for name in [header::AGE, STREAM_PORT] {
            fields.remove(name);
        }
        let opened = OpenedCopy {
            newer_fields: Some(fields),
            age: Some(Duration::ZERO),
            cache_status: CacheStatus::Forwarded {
                why: "partial",
                status: StatusCode::PARTIAL_CONTENT,
                stored: true,
            },
            redirected_to: (hop.redirects > 0).then(|| hop.url.clone()),
            served: ServedFrom::Origin,
            copy,
        };
        self.answer_with(hop, opened)
    }

    /// Answers with a stale entry that its origin has validated.
    fn freshen(
        &self,
        hop: &RedirectHop<'_>,
        entry: &CacheEntry,
        fields: HeaderMap,
        received: ReceiptTime,
        begun: u64,
        lead: Option<CollapseLead>,
    ) -> FetchedAnswer {
        let status = entry.response.status;
        let stored = StoredResponse::new(&hop.headers, status, &fields, received);
        let copy = entry.copy.clone();
        match stored {
            Some(stored) => {
                let entry = CacheEntry::new(copy.clone(), stored);
                self.cache.store(hop.url.as_str(), entry, begun);
                if let Some(lead) = lead {
                    lead.stored();
                }
            }
            // The origin has changed its mind about sharing it.
            None => {
                self.cache.remove(copy.id);
                if let Some(lead) = lead {
                    lead.not_shared();
                }
            }
        }
        let mut fields = fields;
        strip_hop_by_hop(&mut fields);
        for name in [header::AGE, STREAM_PORT] {
            fields.remove(name);
        }
        let opened = OpenedCopy {
            newer_fields: Some(fields),
            age: Some(Duration::ZERO),
            cache_status: CacheStatus::Validated,
            redirected_to: (hop.redirects > 0).then(|| hop.url.clone()),
            served: ServedFrom::SharedCache,
            copy,
        };
        self.answer_with(hop, opened)
    }

    /// Answers with an entry.
    fn answer_from(
        &self,
        hop: &RedirectHop<'_>,
        entry: CacheEntry,
        cache_status: CacheStatus,
    ) -> FetchedAnswer {
        let opened = OpenedCopy {
            age: Some(entry.response.age(entry.resident())),
            newer_fields: Some(entry.response.headers.clone()),
            cache_status,
            redirected_to: (hop.redirects > 0).then(|| hop.url.clone()),
            served: ServedFrom::SharedCache,
            copy: entry.copy,
        };
        self.answer_with(hop, opened)
    }

    /// Answers with an entry whose origin cannot be asked.
    fn answer_from_stale(&self, hop: &RedirectHop<'_>, entry: CacheEntry) -> FetchedAnswer {
        let cache_status = CacheStatus::Hit(ttl(&entry, None));
        self.answer_from(hop, entry, cache_status)
    }

    /// Answers with a copy, and lists it for the client.
    fn answer_with(&self, hop: &RedirectHop<'_>, opened: OpenedCopy) -> FetchedAnswer {
        let head = &opened.copy.head;
        if head.status == StatusCode::OK {
            let fields = opened.newer_fields.as_ref().unwrap_or(&head.headers);
            // The origin has decided itself where it was asked with the client's conditions.
            if opened.served == ServedFrom::SharedCache
                && is_not_modified(&hop.headers, fields, head.own_tag.as_ref())
            {
                return FetchedAnswer::BareCopy {
                    opened,
                    not_modified: true,
                };
            }
            // A client's cookie may have chosen the redirect, and a shared copy outlives the request.
            let is_redirected_share = hop.redirects > 0 && opened.copy.body.client() == SHARED;
            if !hop.asked.head_only && !is_redirected_share {
                let url = hop.asked.url.as_str();
                self.retained.list(hop.client, url, &opened.copy);
            }
        }
        match hop.asked.head_only {
            true => FetchedAnswer::BareCopy {
                opened,
                not_modified: false,
            },
            false => FetchedAnswer::Copy(opened),
        }
    }

    /// Removes from the cache what the response to an unsafe method may have changed (RFC 9111 §4.4), for the next
    /// process too.
    pub(crate) async fn invalidate_cached(
        &self,
        method: &Method,
        url: &Url,
        response: &OriginResponse,
    ) {
        let has_worked = response.status.is_success() || response.status.is_redirection();
        if !has_worked || is_safe(method) {
            return;
        }
        let mut removed = vec![self.cache.invalidate(url.as_str())];
        for name in [header::LOCATION, header::CONTENT_LOCATION] {
            let field = response.headers.get(name);
            let text = field.and_then(|value| value.to_str().ok());
            let other = text.and_then(|text| url.join(text).ok());
            // Others' objects are not this origin's to remove.
            if let Some(other) = other.filter(|other| other.origin() == url.origin()) {
                removed.push(self.cache.invalidate(other.as_str()));
            }
        }
        futures_util::future::join_all(removed).await;
    }

    fn survives(&self, entry: &CacheEntry, status: Option<StatusCode>) -> bool {
        let at_most = self.config().cache_stale;
        (entry.response).survives_error(entry.resident(), status, at_most)
    }

    fn validate_in_background(
        self: &Arc<Prox>,
        hop: &RedirectHop<'_>,
        demand: &CacheDemand,
        lead: CollapseLead,
        entry: CacheEntry,
    ) {
        let (prox, demand) = (self.clone(), demand.clone());
        // It is asked for the cache, not for this client.
        let mut asked = FetchRequest {
            head_only: false,
            url: hop.url.clone(),
            headers: hop.headers.clone(),
            range: None,
            if_range: None,
            reports_supply: false,
        };
        for name in [header::IF_NONE_MATCH, header::IF_MODIFIED_SINCE] {
            asked.headers.remove(name);
        }
        let client = hop.client;
        tokio::spawn(async move {
            let hop = RedirectHop {
                client,
                asked: &asked,
                url: asked.url.clone(),
                headers: asked.headers.clone(),
                redirects: 0,
            };
            tokio::select! {
                asked = prox.ask(&hop, &demand, Some(lead), Some(entry), "stale") => {
                    if let Err(refusal) = asked {
                        tracing::debug!(url = without_query(&hop.url), %refusal, "could not validate");
                    }
                }
                () = prox.stop.cancelled() => {}
            }
        });
    }
}

/// Whether a method changes nothing at the origin. Of those that are not known nothing is known.
fn is_safe(method: &Method) -> bool {
    let name = method.as_str();
    method.is_safe() || matches!(name, "PROPFIND" | "REPORT" | "SEARCH" | "QUERY")
}

/// Seconds for which an entry stays fresh, negative if it is stale.
fn ttl(entry: &CacheEntry, fresh_for: Option<Duration>) -> i64 {
    let seconds = |span: Duration| i64::try_from(span.as_secs()).unwrap_or(i64::MAX);
    match fresh_for {
        Some(left) => seconds(left),
        None => -seconds(entry.response.stale_for(entry.resident())),
    }
}
