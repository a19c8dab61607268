//! The cache that all clients share (RFC 9111): which copies may answer whom, and one request to an origin for
//! all who ask at the same time.
//!
//! ```text
//!  find(url, fields) ──▶ Use     a copy that is fresh, or fresh enough while somebody validates it
//!                    ──▶ Wait    another request for it is under way: look again when that has its answer
//!                    ──▶ Ask     the origin; with a lead, others wait for this answer
//! ```
//!
//! A copy here is an ordinary [`PinnedCopy`], whose bytes are charged to the cache instead of to a client. A flow
//! that reads it holds it: eviction and newer versions take it from others, never from that flow.
//!
//! What there is of a response that nobody reads any more while it is fetched may be completed later: `partial_response.rs`.
//!
//! With a copy store responses and parts outlive the process: each has a note in the journal, which is removed with
//! it. A response that grew when the process ended is a part for the next one.

mod cache_control;
mod cache_status;
mod partial_response;
mod stored_response;

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use http::header::HeaderMap;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::copy_head::CopyHead;
use crate::copy_store::{CopyNote, CopyStore, wall_ms};
use crate::pinned_copy::PinnedCopy;
use crate::refusal::ProxRefusal;
use crate::spooled_body::{SpoolStatus, SpooledBody};

pub(crate) use cache_status::CacheStatus;
pub(crate) use partial_response::PartialResponse;
use partial_response::PartialResponses;
pub(crate) use stored_response::{
    CacheDemand, ReceiptTime, StoredResponse, StoredResponseRecord, Usability, is_not_modified,
    selecting_value,
};

/// The most responses of one URL, selected by different request fields; the oldest is dropped first. A guess.
const VARIANTS_MAX: usize = 32;
/// The most bytes of URLs and heads of all responses; the least recently used is dropped first. A guess: a page has
/// some 2 KiB of them.
pub(crate) const HEAD_BYTES_MAX: usize = 16 << 20;
/// What a response occupies beside its URL and its head. A guess.
const ENTRY_BYTES: usize = 1024;
/// The most URLs for which it is remembered that nobody needs to wait for their responses, or that they were
/// invalidated. A guess.
const MARKS_MAX: usize = 4096;
/// How long nobody waits for the response of a URL after one that could not be shared. A guess: Varnish has 120 s.
const NOT_SHARED_FOR: Duration = Duration::from_secs(120);
/// How long an answer waits until the journal has what it removed from the cache. A guess.
const WRITTEN_WITHIN: Duration = Duration::from_secs(2);
/// Bytes of a copy that nobody reads any more for which its fetch goes on. A guess.
const FINISH_BYTES: u64 = 64 << 10;

/// A response in the cache.
#[derive(Clone, Debug)]
pub(crate) struct CacheEntry {
    pub(crate) copy: Arc<PinnedCopy>,
    pub(crate) response: Arc<StoredResponse>,
    /// The time at which the response was received or validated, by a clock that nobody sets.
    since: Instant,
    /// The time at which the response was received or validated, by the machine's clock, which goes
    /// on while that sleeps.
    since_date: SystemTime,
}

impl CacheEntry {
    pub(crate) fn new(copy: Arc<PinnedCopy>, response: StoredResponse) -> CacheEntry {
        CacheEntry {
            copy,
            response: Arc::new(response),
            since: Instant::now(),
            since_date: SystemTime::now(),
        }
    }

    /// The time since it was received or validated.
    pub(crate) fn resident(&self) -> Duration {
        let by_date = self.since_date.elapsed().unwrap_or_default();
        self.since.elapsed().max(by_date)
    }

    /// An entry of an earlier process, received or validated at `since_date`; none if that is in the future.
    fn restored(
        copy: Arc<PinnedCopy>,
        response: StoredResponse,
        since_date: SystemTime,
    ) -> Option<CacheEntry> {
        let resident = since_date.elapsed().ok()?;
        let now = Instant::now();
        Some(CacheEntry {
            copy,
            response: Arc::new(response),
            // Where the machine has started since, its clock is all that tells.
            since: now.checked_sub(resident).unwrap_or(now),
            since_date,
        })
    }

    fn is_intact(&self) -> bool {
        !matches!(self.copy.body.extent().status, SpoolStatus::Failed(_))
    }

    fn head_bytes(&self, url: &str) -> usize {
        let fields = self.response.headers.iter();
        let head: usize = fields.map(|(n, v)| n.as_str().len() + v.len()).sum();
        // What the request says is kept as the request, and by what it selects in the copy and in the response.
        let fields = self.copy.request.headers.iter();
        let request: usize = fields.map(|(n, v)| n.as_str().len() + v.len()).sum();
        // The copy has a head of its own, and the URL is there twice.
        ENTRY_BYTES + 2 * (url.len() + head) + 3 * request
    }
}

/// A response in the cache, as the journal has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CachedRecord {
    /// The URL under which it is found.
    pub(crate) url: String,
    response: StoredResponseRecord,
    /// The time at which the response was received or validated, in milliseconds since 1970.
    pub(crate) since_ms: u64,
}

/// How a request for a stored response ended.
#[derive(Clone, Debug)]
enum CollapseEnd {
    /// There is a response in the cache.
    Stored,
    /// The response must not be given to another client.
    NotShared,
    /// The origin cannot be reached.
    Failed(ProxRefusal),
}

/// What stands for a URL, or for a URL and the values of request fields, where one that is mistaken for another
/// does no harm. It takes no room that a client chooses.
type NameHash = u64;

/// A request to an origin, for whose response others wait.
#[derive(Debug)]
struct CollapsedRequest {
    serial: u64,
    end: watch::Receiver<Option<CollapseEnd>>,
}

/// The right to ask the origin while other requests for the same response wait. If it is dropped
/// without an end, one of those asks.
#[derive(Debug)]
pub(crate) struct CollapseLead {
    cache: Arc<SharedCache>,
    key: NameHash,
    url: NameHash,
    serial: u64,
    end: watch::Sender<Option<CollapseEnd>>,
}

/// A wait for the request of another.
#[derive(Debug)]
pub(crate) struct CollapseWait {
    end: watch::Receiver<Option<CollapseEnd>>,
}

impl CollapseWait {
    /// Ready when the cache may be looked into again.
    ///
    /// # Errors
    /// The origin cannot be reached.
    pub(crate) async fn over(mut self) -> Result<(), ProxRefusal> {
        match self.end.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(CollapseEnd::Failed(refusal))) => Err(refusal.clone()),
            _ => Ok(()),
        }
    }
}

impl CollapseLead {
    /// The response is in the cache.
    pub(crate) fn stored(self) {
        self.finish(CollapseEnd::Stored);
    }

    /// Records that the response must not be shared, so that later requests for it do not wait for
    /// each other.
    pub(crate) fn not_shared(self) {
        self.cache.mark_not_shared(self.url);
        self.finish(CollapseEnd::NotShared);
    }

    /// The origin cannot be reached.
    pub(crate) fn failed(self, refusal: ProxRefusal) {
        self.finish(CollapseEnd::Failed(refusal));
    }

    fn finish(self, end: CollapseEnd) {
        // Whoever looks into the cache from now on must not wait for this one.
        self.cache.end_collapse(self.key, self.serial);
        let _ = self.end.send(Some(end)); // Nobody may wait.
    }
}

impl Drop for CollapseLead {
    fn drop(&mut self) {
        self.cache.end_collapse(self.key, self.serial);
    }
}

/// The result of looking up a request in the cache.
#[derive(Debug)]
pub(crate) enum CacheLookup {
    /// The entry answers it. With a lead, the caller has it validated meanwhile.
    Use(CacheEntry, Option<CollapseLead>),
    /// Another request for it is under way.
    Wait(CollapseWait),
    /// The origin is asked: about a stale entry if there is one.
    Ask {
        lead: Option<CollapseLead>,
        stale: Option<CacheEntry>,
        /// Whether there are entries that other request fields select.
        has_variants: bool,
    },
}

/// The HTTP cache that all clients share.
#[derive(Debug)]
pub(crate) struct SharedCache {
    bytes_max: AtomicU64,
    object_bytes_max: AtomicU64,
    /// The most responses: where each has a file open, there must be descriptors left.
    responses_max: usize,
    hasher: RandomState,
    /// How many responses were dropped to make room.
    evictions: AtomicU64,
    state: Mutex<CacheState>,
}

#[derive(Debug, Default)]
struct CacheState {
    /// The store that records what the cache has.
    copy_store: Option<Arc<CopyStore>>,
    urls: HashMap<String, Vec<IndexedEntry>>,
    /// Parts of responses, whose rest the origin can be asked for.
    partials: PartialResponses,
    /// Ids of copies, the least recently used first.
    order: BTreeMap<u64, u64>,
    /// URL and place in `order` of a copy, by its id.
    places: HashMap<u64, (String, u64)>,
    head_bytes: usize,
    collapsed: HashMap<NameHash, CollapsedRequest>,
    not_shared: HashMap<NameHash, Instant>,
    /// When a URL was last invalidated.
    invalidated: HashMap<NameHash, u64>,
    /// What began before this is not stored: it is not known whether it was invalidated.
    forgotten_until: u64,
    /// Counts everything that has an order in time.
    tick: u64,
}

#[derive(Debug)]
struct IndexedEntry {
    entry: CacheEntry,
    head_bytes: usize,
}

impl SharedCache {
    /// A cache of at most `bytes_max` bytes, which the ledger counts; 0: none. Larger objects than
    /// `object_bytes_max` are not shared, and there are at most `responses_max`. In `copy_store`, if there is one, it
    /// is recorded what the cache has.
    pub(crate) fn new(
        bytes_max: u64,
        object_bytes_max: u64,
        responses_max: usize,
        copy_store: Option<Arc<CopyStore>>,
    ) -> SharedCache {
        let state = CacheState {
            copy_store,
            ..CacheState::default()
        };
        SharedCache {
            bytes_max: bytes_max.into(),
            object_bytes_max: object_bytes_max.into(),
            responses_max,
            hasher: RandomState::new(),
            evictions: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    /// Changes what [`SharedCache::new`] was told.
    pub(crate) fn set_limits(&self, bytes_max: u64, object_bytes_max: u64) {
        self.bytes_max.store(bytes_max, Ordering::Relaxed);
        self.object_bytes_max
            .store(object_bytes_max, Ordering::Relaxed);
    }

    /// Whether there is a cache.
    pub(crate) fn is_on(&self) -> bool {
        self.bytes_max.load(Ordering::Relaxed) > 0
    }

    /// Whether an object of this size may be shared; none: its size is not known yet.
    pub(crate) fn takes(&self, bytes: Option<u64>) -> bool {
        let (max, object_max) = (&self.bytes_max, &self.object_bytes_max);
        let max = max.load(Ordering::Relaxed);
        let object_max = object_max.load(Ordering::Relaxed).min(max);
        max > 0 && bytes.is_none_or(|bytes| bytes <= object_max)
    }

    /// The number of responses in the cache.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().places.len()
    }

    /// How many responses were dropped to make room for others.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }

    /// The time of a request that begins now, for [`SharedCache::store`].
    pub(crate) fn begin(&self) -> u64 {
        self.state.lock().next_tick()
    }

    /// Looks for a response. `may_wait`: whether the caller waits for others; else it gets no lead either.
    pub(crate) fn find(
        self: &Arc<SharedCache>,
        url: &str,
        request: &HeaderMap,
        demand: &CacheDemand,
        may_wait: bool,
    ) -> CacheLookup {
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        state.drop_failed(url, &mut dropped);
        let kept = state.urls.get(url).map_or(&[][..], |kept| &kept[..]);
        let has_variants = !kept.is_empty();
        let answers = |kept: &&IndexedEntry| kept.entry.response.answers(request);
        let best = kept
            .iter()
            .rev()
            .find(answers)
            .map(|kept| kept.entry.clone());
        let usability = best.as_ref().map(|entry| {
            let resident = entry.resident();
            entry.response.usability(demand, resident)
        });
        let key = self.collapse_key(url, kept, request);
        let is_validated = best
            .as_ref()
            .is_some_and(|entry| entry.response.has_validator());
        let url_hash = self.hasher.hash_one(url);
        let is_not_shared = state.is_not_shared(url_hash);
        let found = match (best, usability) {
            (Some(entry), Some(Usability::Fresh)) => {
                state.touch(entry.copy.id);
                CacheLookup::Use(entry, None)
            }
            (Some(entry), Some(Usability::FreshEnough)) => {
                state.touch(entry.copy.id);
                let lead = match demand.may_store && !state.collapsed.contains_key(&key) {
                    true => Some(self.begin_collapse(&mut state, key, url_hash)),
                    false => None,
                };
                CacheLookup::Use(entry, lead)
            }
            // What is learnt by a request with a cookie stays with its client.
            (_, _) if !demand.may_store => CacheLookup::Ask {
                lead: None,
                stale: None,
                has_variants,
            },
            (stale, _) => match state.collapsed.get(&key) {
                Some(pending) if may_wait => CacheLookup::Wait(CollapseWait {
                    end: pending.end.clone(),
                }),
                Some(_) => CacheLookup::Ask {
                    lead: None,
                    stale,
                    has_variants,
                },
                // A client with conditions of its own may get an answer that nobody else can use.
                None if !may_wait || (demand.is_conditional && !is_validated) => CacheLookup::Ask {
                    lead: None,
                    stale,
                    has_variants,
                },
                None if is_not_shared => CacheLookup::Ask {
                    lead: None,
                    stale,
                    has_variants,
                },
                None => CacheLookup::Ask {
                    lead: Some(self.begin_collapse(&mut state, key, url_hash)),
                    stale,
                    has_variants,
                },
            },
        };
        drop(state);
        drop(dropped); // Outside the lock: this frees bytes.
        found
    }

    /// The entry that answers a request if its origin cannot, however stale.
    pub(crate) fn last_resort(&self, url: &str, request: &HeaderMap) -> Option<CacheEntry> {
        let state = self.state.lock();
        let mut kept = state.urls.get(url)?.iter().rev();
        let found =
            kept.find(|kept| kept.entry.response.answers(request) && kept.entry.is_intact());
        found.map(|kept| kept.entry.clone())
    }

    /// Stores a response of a request that began at `begun`. Not if the URL was invalidated meanwhile.
    pub(crate) fn store(&self, url: &str, entry: CacheEntry, begun: u64) -> bool {
        self.insert(url, entry, begun, true)
    }

    /// Puts an entry into the index. `is_new`: the journal does not know it.
    fn insert(&self, url: &str, entry: CacheEntry, begun: u64, is_new: bool) -> bool {
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        let url_hash = self.hasher.hash_one(url);
        let invalidated = state.invalidated.get(&url_hash);
        let was_invalidated = invalidated.is_some_and(|at| *at > begun);
        if was_invalidated || begun < state.forgotten_until {
            return false;
        }
        let kept = state.urls.entry(url.to_owned()).or_default();
        let is_older = |kept: &IndexedEntry| {
            kept.entry.copy.id == entry.copy.id || entry.response.replaces(&kept.entry.response)
        };
        let mut older: Vec<u64> = kept
            .iter()
            .filter(|kept| is_older(kept))
            .map(|kept| kept.entry.copy.id)
            .collect();
        if older.is_empty() && kept.len() == VARIANTS_MAX {
            older.push(kept[0].entry.copy.id);
        }
        for id in older {
            dropped.extend(state.remove(id));
        }
        let head_bytes = entry.head_bytes(url);
        let partial = state.partials.remove(url);
        let tick = state.next_tick();
        let id = entry.copy.id;
        if is_new {
            state.record(url, &entry);
        }
        state.order.insert(tick, id);
        state.places.insert(id, (url.to_owned(), tick));
        state.head_bytes += head_bytes;
        state.not_shared.remove(&url_hash);
        let kept = state.urls.entry(url.to_owned()).or_default();
        kept.push(IndexedEntry { entry, head_bytes });
        while state.head_bytes > HEAD_BYTES_MAX || state.places.len() > self.responses_max {
            let Some(id) = state.order.values().next().copied() else {
                break;
            };
            dropped.extend(state.remove(id));
            self.evictions.fetch_add(1, Ordering::Relaxed);
        }
        drop(state);
        drop((dropped, partial)); // Outside the lock: this frees bytes.
        true
    }

    /// The part of a response that answers a request once its rest is there. It is the caller's now.
    pub(crate) fn take_partial(&self, url: &str, request: &HeaderMap) -> Option<PartialResponse> {
        self.state.lock().partials.take(url, request)
    }

    /// Keeps a part that the origin could not complete now.
    pub(crate) fn keep_partial(&self, partial: PartialResponse) {
        let older = self.state.lock().partials.keep(partial);
        drop(older); // Outside the lock: this frees bytes.
    }

    /// Puts a complete response of an earlier process into the cache, unless the cache has a newer one, or its time
    /// makes no sense.
    pub(crate) fn restore(&self, copy: Arc<PinnedCopy>, record: &CachedRecord) -> bool {
        let status = copy.head.status;
        let response = StoredResponse::from_record(status, &record.response);
        let since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(record.since_ms));
        let entry = response.zip(since);
        let entry = entry.and_then(|(response, since)| CacheEntry::restored(copy, response, since));
        entry.is_some_and(|entry| self.insert(&record.url, entry, self.begin(), false))
    }

    /// Keeps a part of a response of an earlier process, if its origin can be asked for the rest. Returns whether it can.
    pub(crate) fn restore_partial(
        &self,
        id: u64,
        head: &CopyHead,
        body: &Arc<SpooledBody>,
        record: &CachedRecord,
    ) -> bool {
        let response = StoredResponse::from_record(head.status, &record.response).map(Arc::new);
        let partial = response
            .and_then(|response| PartialResponse::of(&record.url, id, head, body, &response));
        let is_kept = partial.is_some();
        if let Some(partial) = partial {
            self.keep_partial(partial);
        }
        is_kept
    }

    /// Removes the responses of a URL, and keeps those from being stored that are under way (RFC 9111 §4.4). Ready
    /// when the next process does not have them either.
    pub(crate) fn invalidate(&self, url: &str) -> impl Future<Output = ()> + Send + use<> {
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        if state.invalidated.len() == MARKS_MAX {
            state.invalidated.clear();
            state.forgotten_until = state.next_tick();
        }
        let tick = state.next_tick();
        state.invalidated.insert(self.hasher.hash_one(url), tick);
        let kept = state.urls.get(url).map_or(&[][..], |kept| &kept[..]);
        let ids: Vec<u64> = kept.iter().map(|kept| kept.entry.copy.id).collect();
        let mut forgotten = Vec::new();
        for id in ids {
            let copy_store = state.copy_store.clone();
            dropped.extend(state.remove(id));
            forgotten.extend(copy_store.map(|notes| notes.remove_note(CopyNote::Cached, id)));
        }
        let partial = state.partials.remove(url);
        drop(state);
        drop((dropped, partial));
        all_written(forgotten)
    }

    /// Removes all responses, and keeps those from being stored that are under way.
    pub(crate) fn clear(&self) {
        let mut state = self.state.lock();
        state.invalidated.clear();
        state.forgotten_until = state.next_tick();
        let ids: Vec<u64> = state.places.keys().copied().collect();
        let dropped: Vec<_> = ids.into_iter().map(|id| state.remove(id)).collect();
        let partials = state.partials.clear();
        drop(state);
        drop((dropped, partials)); // Outside the lock: this frees bytes.
    }

    /// Removes a copy. Flows that read it go on.
    pub(crate) fn remove(&self, id: u64) {
        let removed = self.state.lock().remove(id);
        drop(removed); // Outside the lock: this frees bytes.
    }

    /// Removes a part of a response, or the least recently used copy that nobody reads, to make room; not the one that is
    /// named. False if there is none.
    pub(crate) fn make_room(&self, not: Option<u64>) -> bool {
        let mut state = self.state.lock();
        if let Some(partial) = state.partials.pop_oldest() {
            drop(state);
            drop(partial);
            self.evictions.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        let mut ids = state.order.values().copied();
        let unused = ids.find(|id| Some(*id) != not && state.is_unused(*id));
        let removed = unused.and_then(|id| state.remove(id));
        drop(state);
        self.evictions
            .fetch_add(u64::from(removed.is_some()), Ordering::Relaxed);
        removed.is_some()
    }

    /// Whether the cache has a copy.
    pub(crate) fn has(&self, id: u64) -> bool {
        self.state.lock().places.contains_key(&id)
    }

    /// Ends the fetch of a copy that nobody reads any more and that has far to go. What there is of it is kept if its origin
    /// can be asked for the rest. The caller holds `copy`, and nothing else that belongs to the flow.
    pub(crate) fn on_reader_gone(&self, copy: &Arc<PinnedCopy>) {
        let extent = copy.body.extent();
        let left = extent.total.map(|total| total.saturating_sub(extent.have));
        if extent.status != SpoolStatus::Growing || left.is_some_and(|left| left <= FINISH_BYTES) {
            return;
        }
        let mut state = self.state.lock();
        // The cache's own handle, and the caller's.
        let removed = match Arc::strong_count(copy) {
            2 => state.set_aside(copy.id),
            _ => None,
        };
        drop(state);
        drop(removed);
    }

    fn mark_not_shared(&self, url: NameHash) {
        let mut state = self.state.lock();
        if state.not_shared.len() == MARKS_MAX {
            state.not_shared.clear();
        }
        let until = Instant::now() + NOT_SHARED_FOR;
        state.not_shared.insert(url, until);
    }

    fn begin_collapse(
        self: &Arc<SharedCache>,
        state: &mut CacheState,
        key: NameHash,
        url: NameHash,
    ) -> CollapseLead {
        let (end, on_end) = watch::channel(None);
        let serial = state.next_tick();
        let pending = CollapsedRequest {
            serial,
            end: on_end,
        };
        state.collapsed.insert(key, pending);
        CollapseLead {
            cache: self.clone(),
            key,
            url,
            serial,
            end,
        }
    }

    fn end_collapse(&self, key: NameHash, serial: u64) {
        let mut state = self.state.lock();
        if (state.collapsed.get(&key)).is_some_and(|own| own.serial == serial) {
            state.collapsed.remove(&key);
        }
    }

    /// What stands for a request for whose response others may wait: its URL, and the values of the fields that
    /// selected the newest response.
    fn collapse_key(&self, url: &str, kept: &[IndexedEntry], request: &HeaderMap) -> NameHash {
        let newest = kept.last().map(|kept| &kept.entry.response);
        let names = newest
            .into_iter()
            .flat_map(|response| response.selecting_names());
        let values: Vec<_> = names.map(|name| selecting_value(request, name)).collect();
        self.hasher.hash_one((url, values))
    }
}

/// Ready when all notes are written, or after a while if the journal cannot be written.
async fn all_written(notes: Vec<oneshot::Receiver<()>>) {
    let all = async {
        for note in notes {
            let _ = note.await;
        }
    };
    if tokio::time::timeout(WRITTEN_WITHIN, all).await.is_err() {
        tracing::warn!(
            "the journal is slow: after a crash now the cache would have what was removed"
        );
    }
}

impl CacheState {
    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    /// Records an entry for the next process.
    fn record(&self, url: &str, entry: &CacheEntry) {
        let Some(copy_store) = &self.copy_store else {
            return;
        };
        let copy = &entry.copy;
        let head = (copy.head).entry(copy.body.client(), &copy.request, copy.body.extent().total);
        drop(copy_store.record_copy(copy.id, &head));
        self.note(url, entry);
    }

    /// Records how the next process may use an entry, or the part that there is of it.
    fn note(&self, url: &str, entry: &CacheEntry) {
        let Some(copy_store) = &self.copy_store else {
            return;
        };
        let note = CachedRecord {
            url: url.to_owned(),
            response: entry.response.record(),
            since_ms: wall_ms(entry.since_date),
        };
        drop(copy_store.write_note(CopyNote::Cached, entry.copy.id, &note));
    }

    fn touch(&mut self, id: u64) {
        let tick = self.next_tick();
        if let Some((_, place)) = self.places.get_mut(&id) {
            self.order.remove(place);
            self.order.insert(tick, id);
            *place = tick;
        }
    }

    fn remove(&mut self, id: u64) -> Option<IndexedEntry> {
        let (url, place) = self.places.remove(&id)?;
        self.order.remove(&place);
        let all = self.urls.get_mut(&url)?;
        let at = all.iter().position(|kept| kept.entry.copy.id == id)?;
        let removed = all.remove(at);
        if all.is_empty() {
            self.urls.remove(&url);
        }
        self.head_bytes -= removed.head_bytes;
        if let Some(copy_store) = &self.copy_store {
            drop(copy_store.remove_note(CopyNote::Cached, id));
        }
        Some(removed)
    }

    /// Takes an unfinished response out, and keeps what there is of it if it can be completed.
    fn set_aside(&mut self, id: u64) -> Option<(IndexedEntry, Option<PartialResponse>)> {
        let url = self.places.get(&id)?.0.clone();
        let removed = self.remove(id)?;
        // Another node may have taken over a copy of nodes that share a store.
        let is_own = (self.copy_store.as_ref()).is_none_or(|store| store.shared().is_none());
        let CacheEntry { copy, response, .. } = &removed.entry;
        let partial = PartialResponse::of(&url, id, &copy.head, &copy.body, response);
        let partial = partial.filter(|_| is_own);
        if partial.is_some() {
            self.note(&url, &removed.entry);
        }
        let older = partial.and_then(|partial| self.partials.keep(partial));
        Some((removed, older))
    }

    fn is_unused(&self, id: u64) -> bool {
        let kept = self.places.get(&id).and_then(|(url, _)| self.urls.get(url));
        let of_id = kept.and_then(|all| all.iter().find(|kept| kept.entry.copy.id == id));
        of_id.is_some_and(|kept| Arc::strong_count(&kept.entry.copy) == 1)
    }

    fn drop_failed(&mut self, url: &str, dropped: &mut Vec<IndexedEntry>) {
        let kept = self.urls.get(url).map_or(&[][..], |kept| &kept[..]);
        let failed: Vec<u64> = kept
            .iter()
            .filter(|kept| !kept.entry.is_intact())
            .map(|kept| kept.entry.copy.id)
            .collect();
        for id in failed {
            dropped.extend(self.remove(id));
        }
    }

    fn is_not_shared(&mut self, url: NameHash) -> bool {
        match self.not_shared.get(&url) {
            Some(until) if Instant::now() < *until => true,
            Some(_) => {
                self.not_shared.remove(&url);
                false
            }
            None => false,
        }
    }
}
