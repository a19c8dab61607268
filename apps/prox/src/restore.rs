//! What an earlier process left in the state directory, taken up when this one starts.
//!
//! ```text
//!  journal: memos of flows ──┐
//!           retained copies ─┼─▶ copies: their bytes are charged again, half-fetched ones are fetched on
//!           cached responses ┘   (incomplete cached ones are parts, until somebody asks for them)
//!           uploads ───────────▶ their bodies go on where they stopped; complete ones go to their origins, unless
//!                                those may have received them and must not twice
//!  everything else ────────────▶ removed
//! ```
//!
//! Nothing of a client is dropped because a bound is smaller than it was, so clients' copies and uploads are charged
//! first; the cache gets what they leave. What only a bucket has that does not answer yet is taken up when it does.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use d2tp_driver::{HostKey, Journal, JournalError, PublicKey, RecordStore, ResetCause};
use http::StatusCode;

use crate::copy_bucket::{CopyBucket, CopyBucketStatus, REQUEST_WITHIN, RETRY_WAIT, bucket_owner};
use crate::copy_fetcher::CopyFetchSource;
use crate::copy_head::CopyHead;
use crate::copy_store::{CopyNote, CopyRecord, CopyStore, RetainedRecord, StoredProgress, wall_ms};
use crate::flow_memo::FlowMemo;
use crate::pinned_copy::PinnedCopy;
use crate::prox::Prox;
use crate::quota_ledger::{SHARED, StorageTier};
use crate::refusal::ProxRefusal;
use crate::request::{UploadRequest, is_idempotent};
use crate::shared_cache::CachedRecord;
use crate::spooled_body::{RestoredBody, SpoolFile, SpooledBody};
use crate::stored_upload::{StoredUpload, UploadRecord, UploadStage};
use crate::upload_delivery::{UploadAnswer, UploadDelivery, UploadFailure};
use crate::upload_sender;
use crate::upload_table::UploadRoom;

/// How long a start waits for copies that only the bucket has. A guess: some gigabytes.
const FETCH_WITHIN: Duration = Duration::from_secs(30);

/// The interval of looks whether the bucket has all copies.
const LOOK_AGAIN: Duration = Duration::from_millis(100); // a guess

/// A copy in the copy store: its record, and the bytes of its file that count.
struct FoundCopy {
    entry: CopyRecord,
    have: u64,
    is_complete: bool,
    /// Whether the file has the length that the journal says, if that says one.
    has_right_length: bool,
    progress: StoredProgress,
}

impl FoundCopy {
    fn find(copy_store: &CopyStore, id: u64) -> Option<FoundCopy> {
        let (entry, progress) = copy_store.record(id)?;
        let valid = copy_store.valid_bytes(id, entry.boot, progress)?;
        // A file may have its last byte before the journal knows that it is complete.
        let total = match progress.whole {
            true => Some(progress.synced),
            false => entry.total,
        };
        let have = total.map_or(valid, |total| total.min(valid));
        Some(FoundCopy {
            have,
            is_complete: total == Some(have),
            has_right_length: total.is_none_or(|total| total == valid),
            entry,
            progress,
        })
    }

    fn counted(&self) -> u64 {
        self.entry.total.unwrap_or(0).max(self.have)
    }

    fn body(&self) -> RestoredBody {
        RestoredBody {
            have: self.have,
            counted: self.counted(),
            total: match self.is_complete {
                true => Some(self.have),
                false => self.entry.total,
            },
            // One that the journal does not know as complete is synced first, like one that was fetched.
            whole: self.progress.whole && self.is_complete,
        }
    }

    /// Whether the file has the beginning of what was still being fetched.
    fn is_part(&self) -> bool {
        self.have > 0 && !self.is_complete && !self.progress.whole
    }

    /// Syncs the file if it is complete and the process that wrote it ended before that was done.
    fn sync_later(&self, copy_store: &Arc<CopyStore>, id: u64) {
        if self.progress.unsynced_from.is_some() && self.is_complete {
            let copy_store = copy_store.clone();
            let file = SpoolFile { copy_store, id };
            tokio::spawn(file.sync_later(self.have, Weak::new()));
        }
    }

    /// The progress of the file as of this boot of the machine.
    fn progress_now(&self) -> StoredProgress {
        let synced = self.progress.synced.min(self.have);
        StoredProgress {
            unsynced_from: self.progress.unsynced_from,
            ..StoredProgress::synced_now(synced, self.progress.whole && self.is_complete)
        }
    }
}

/// The journal's notes on clients' copies and uploads.
struct ClientNotes {
    /// Copies that sleeping flows read, and how many flows.
    flows: HashMap<u64, u32>,
    retained: Vec<(u64, HostKey, RetainedRecord)>,
    uploads: Vec<(u64, UploadRecord)>,
}

impl ClientNotes {
    fn read(copy_store: &CopyStore, journal: &Journal) -> Result<ClientNotes, JournalError> {
        let mut flows: HashMap<u64, u32> = HashMap::new();
        journal.memos(|_, bytes| {
            if let Some(id) = FlowMemo::decode(bytes).and_then(|memo| memo.copy) {
                *flows.entry(id).or_default() += 1;
            }
        })?;
        Ok(ClientNotes {
            flows,
            retained: copy_store.retained()?,
            uploads: copy_store.notes(CopyNote::Upload)?,
        })
    }

    fn ids(&self) -> impl Iterator<Item = u64> {
        let of_uploads = self
            .uploads
            .iter()
            .flat_map(|(id, record)| ids_of(*id, record));
        (self.flows.keys().copied())
            .chain(self.retained.iter().map(|(id, ..)| *id))
            .chain(of_uploads)
    }

    fn retain(&mut self, is_wanted: impl Fn(u64) -> bool) {
        self.flows.retain(|id, _| is_wanted(*id));
        self.retained.retain(|(id, ..)| is_wanted(*id));
        self.uploads.retain(|(id, _)| is_wanted(*id));
    }
}

/// The files of an upload: of its body, and of the body of its answer.
fn ids_of(id: u64, record: &UploadRecord) -> Vec<u64> {
    match record.stage {
        UploadStage::AnsweredCopy(answer) => vec![id, answer],
        _ => vec![id],
    }
}

/// An upload of another process, whose body has a file here.
pub(crate) struct FoundUpload {
    pub(crate) id: u64,
    /// Bytes of the file that count.
    pub(crate) have: u64,
    pub(crate) progress: StoredProgress,
    pub(crate) record: UploadRecord,
    pub(crate) stored: Arc<StoredUpload>,
    /// Its delivery, if that has ended, or must not be repeated.
    pub(crate) delivered: Option<UploadDelivery>,
    /// How long the upload is kept without a flow.
    pub(crate) grace: Duration,
}

impl Prox {
    fn bucket(&self) -> Option<&Arc<CopyBucket>> {
        self.copy_store.as_ref()?.bucket()
    }

    /// Fetches the copies and uploads that the journal knows and this disk has not from the bucket, if there is one that
    /// answers, for a while. [`Prox::restore_from_journal`] follows.
    pub async fn fetch_missing_copies(&self) {
        let (Some(copy_store), Some(bucket)) = (&self.copy_store, self.bucket()) else {
            return;
        };
        if !bucket.is_checked() {
            return;
        }
        let fetching = async {
            let missing = copy_store.without_file().map_err(io::Error::other)?;
            fetch(copy_store, bucket, missing).await
        };
        match tokio::time::timeout(FETCH_WITHIN, fetching).await {
            Ok(Ok(())) => *self.awaited.lock() = None,
            Ok(failed) => bucket.report(&failed),
            Err(_) => tracing::warn!("the bucket of copies has more than can be waited for"),
        }
    }

    /// Sends to the bucket what it lacks, if there is a bucket. Takes up what only it has as soon
    /// as it answers.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn work_on_bucket(
        self: Arc<Prox>,
        key: PublicKey,
        journal: Option<Arc<dyn RecordStore>>,
    ) -> Result<(), JournalError> {
        let (Some(copy_store), Some(bucket)) = (self.copy_store.clone(), self.bucket().cloned())
        else {
            return Ok(());
        };
        let mut wait = RETRY_WAIT.0;
        while !bucket.is_checked() {
            let owner = bucket_owner(key, copy_store.shared().is_some());
            let checked = bucket.check(&owner, REQUEST_WITHIN).await;
            if checked.is_err() {
                bucket.report(&checked);
            }
            if !bucket.is_checked() {
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(RETRY_WAIT.1);
            }
        }
        tokio::spawn(bucket.clone().work(Arc::downgrade(&copy_store)));
        if copy_store.shared().is_some() {
            let left = std::mem::take(&mut *self.shared_copies.left_files.lock());
            let prox = self.clone();
            tokio::spawn(async move { prox.clear_node_files(left).await });
        }
        let Some(awaited) = self.awaited.lock().clone() else {
            return Ok(());
        };
        wait = RETRY_WAIT.0;
        while let Err(error) = fetch(&copy_store, &bucket, awaited.iter().copied().collect()).await
        {
            bucket.report(&Err(error));
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(RETRY_WAIT.1);
        }
        match journal.as_ref().and_then(|journal| journal.as_journal()) {
            Some(journal) => self.restore_awaited(&copy_store, journal, &awaited),
            None => Ok(()),
        }
    }

    /// Waits until the bucket that nodes share has what is complete here, unless it fails, at most for `max`.
    pub async fn until_in_bucket(&self, max: Duration) {
        let bucket = self.copy_store.as_ref().and_then(|s| s.node_bucket());
        let Some(bucket) = bucket else {
            return;
        };
        let sending = async {
            loop {
                let status = bucket.status();
                if status.waiting == 0 || status.failing.is_some() {
                    return;
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        let _ = tokio::time::timeout(max, sending).await;
    }

    /// What the bucket of copies waits for; none if there is no bucket.
    pub fn copy_bucket_status(&self) -> Option<CopyBucketStatus> {
        Some(self.bucket()?.status())
    }

    /// Takes up what the journal holds: copies that sleeping flows will read or to which devices may return,
    /// responses of the shared cache, and uploads. What is half fetched is fetched on, the rest is removed. Returns
    /// the number of copies and uploads.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn restore_from_journal(
        self: &Arc<Prox>,
        journal: &Journal,
    ) -> Result<usize, JournalError> {
        let Some(copy_store) = self.copy_store.clone() else {
            return Ok(0);
        };
        journal.memos(|key, _| self.ledger.count_hibernated(key.session.peer.0))?;
        let mut notes = ClientNotes::read(&copy_store, journal)?;
        let mut cached: Vec<(u64, CachedRecord)> = copy_store.notes(CopyNote::Cached)?;
        let is_filled_otherwise = copy_store.cache_settings()? != Some(self.cache_settings());
        if !self.cache.is_on() || is_filled_otherwise {
            for (id, _) in cached.drain(..) {
                drop(copy_store.remove_note(CopyNote::Cached, id));
            }
            self.record_cache_settings();
        }
        let of_cache = cached.iter().map(|(id, _)| *id);
        let wanted: HashSet<u64> = notes.ids().chain(of_cache).collect();
        copy_store.retain_only(|id| wanted.contains(&id))?;
        let awaited = self.await_bucket(&copy_store, &notes)?;
        notes.retain(|id| !awaited.contains(&id));
        let mut loaded: HashMap<u64, Arc<PinnedCopy>> = HashMap::new();
        let mut in_use = self.restore_notes(&copy_store, notes, &mut loaded);
        let mut here = in_use.len();
        // If there is less room than before, it goes to what was received last; that is also evicted last.
        cached.sort_by_key(|(_, record)| Reverse(record.since_ms));
        let (mut taken, mut parts) = (Vec::new(), Vec::new());
        for (id, record) in cached {
            let found = FoundCopy::find(&copy_store, id);
            let part = found.filter(|found| found.is_part() && found.entry.client == SHARED);
            if let Some(copy) = self.restore_shared(&copy_store, id, &mut loaded) {
                taken.push((copy, record));
            } else if let (Some(_), Some(copy)) = (&part, loaded.get(&id)) {
                // It is fetched on for a client.
                taken.push((copy.clone(), record));
            } else if let Some(part) = part.and_then(|part| self.load_part(&copy_store, id, &part))
            {
                in_use.insert(id);
                parts.push((id, part, record));
            } else {
                drop(copy_store.remove_note(CopyNote::Cached, id));
            }
        }
        for (copy, record) in taken.into_iter().rev() {
            let id = copy.id;
            match self.cache.restore(copy, &record) {
                true => here += 1,
                false => drop(copy_store.remove_note(CopyNote::Cached, id)),
            }
        }
        for (id, (head, body), record) in parts.into_iter().rev() {
            here += usize::from(self.cache.restore_partial(id, &head, &body, &record));
        }
        // What is loaded is freed with its last handle.
        in_use.extend(loaded.keys());
        in_use.extend(awaited);
        for id in wanted.difference(&in_use) {
            copy_store.remove(*id);
        }
        Ok(here)
    }

    /// Notes which copies and uploads of clients only a bucket has that has not answered yet. They are left alone until
    /// it does. What the cache had there is forgotten: nobody would remove it when its origin changes it.
    fn await_bucket(
        &self,
        copy_store: &CopyStore,
        notes: &ClientNotes,
    ) -> Result<HashSet<u64>, JournalError> {
        let mut awaited = self.awaited.lock();
        if awaited.is_none() {
            return Ok(HashSet::new());
        }
        let missing: HashSet<u64> = copy_store.without_file()?.into_iter().collect();
        let mut found: HashSet<u64> = notes.ids().filter(|id| missing.contains(id)).collect();
        for (id, record) in &notes.uploads {
            let files = ids_of(*id, record);
            if files.iter().any(|id| missing.contains(id)) {
                found.extend(files);
                self.uploads.set_awaited(record.client, record.request());
            }
        }
        if !found.is_empty() {
            tracing::warn!(
                missing = found.len(),
                "copies and uploads wait for the bucket that has them"
            );
        }
        *awaited = (!found.is_empty()).then(|| found.clone());
        Ok(found)
    }

    /// Takes up what was fetched from the bucket while the proxy serves.
    fn restore_awaited(
        self: &Arc<Prox>,
        copy_store: &Arc<CopyStore>,
        journal: &Journal,
        awaited: &HashSet<u64>,
    ) -> Result<(), JournalError> {
        let mut notes = ClientNotes::read(copy_store, journal)?;
        notes.retain(|id| awaited.contains(&id));
        let mut loaded = HashMap::new();
        let mut in_use = self.restore_notes(copy_store, notes, &mut loaded);
        tracing::info!(copies = in_use.len(), "copies restored from the bucket");
        in_use.extend(loaded.keys());
        for id in awaited.difference(&in_use) {
            copy_store.remove(*id);
        }
        *self.awaited.lock() = None;
        self.uploads.clear_awaited();
        Ok(())
    }

    /// Takes up clients' copies and uploads. Returns the ids of those that are here.
    fn restore_notes(
        self: &Arc<Prox>,
        copy_store: &Arc<CopyStore>,
        notes: ClientNotes,
        loaded: &mut HashMap<u64, Arc<PinnedCopy>>,
    ) -> HashSet<u64> {
        let mut in_use = HashSet::new();
        for (id, record) in notes.uploads {
            if self.restore_upload(copy_store, id, record, loaded) {
                in_use.insert(id);
            }
        }
        // In the order of the journal, and of what it has in its cache.
        let mut of_flows: Vec<_> = notes.flows.into_iter().collect();
        of_flows.sort_unstable();
        for (id, flows) in of_flows {
            if self.restore_for_flows(copy_store, id, flows, loaded) {
                in_use.insert(id);
            }
        }
        for (id, client, record) in notes.retained {
            let grace = remaining(record.until_ms, self.config().keep);
            let copy = match self.is_client(&client) && !grace.is_zero() {
                true => self.restore_copy(copy_store, id, QuotaCheck::Ignored, loaded),
                false => None,
            };
            let Some(copy) = copy else {
                copy_store.remove_retained(id, &client);
                continue;
            };
            in_use.insert(id);
            let url = copy.request.url.clone();
            self.retained.list(client, url.as_str(), &copy);
            (self.retained).retain(client, copy, grace, self.config().client_kept_max);
        }
        in_use
    }

    /// Takes up a copy that sleeping flows read.
    fn restore_for_flows(
        &self,
        copy_store: &Arc<CopyStore>,
        id: u64,
        flows: u32,
        loaded: &mut HashMap<u64, Arc<PinnedCopy>>,
    ) -> bool {
        let Some(found) = FoundCopy::find(copy_store, id) else {
            return false; // Its flows are reset when they wake.
        };
        found.sync_later(copy_store, id);
        let (client, counted) = (found.entry.client, found.counted());
        self.ledger.charge_restored(client, counted);
        self.hibernated.restore(id, flows, client, counted);
        // The bucket may not have all of a copy that nothing here loads.
        if let (true, Some(bucket)) = (found.is_complete, copy_store.bucket()) {
            bucket.on_growth(id, 0, found.have, true);
        }
        if !found.progress.whole || !found.is_complete {
            drop(copy_store.record_progress(id, found.progress_now()));
            if let Some(copy) = self.load(copy_store, id, &found) {
                self.list(&copy, &found.entry);
                self.hibernated.set_loaded(&copy);
                loaded.insert(id, copy);
            }
        }
        true
    }

    /// Takes up a copy, whose bytes are charged unless a sleeping flow reads it.
    fn restore_copy(
        &self,
        copy_store: &Arc<CopyStore>,
        id: u64,
        bound: QuotaCheck,
        loaded: &mut HashMap<u64, Arc<PinnedCopy>>,
    ) -> Option<Arc<PinnedCopy>> {
        if let Some(copy) = loaded.get(&id) {
            return Some(copy.clone());
        }
        let found = FoundCopy::find(copy_store, id)?;
        found.sync_later(copy_store, id);
        let is_charged = self.hibernated.get(id).is_some();
        let (client, counted) = (found.entry.client, found.counted());
        match bound {
            _ if is_charged => {}
            QuotaCheck::Ignored => self.ledger.charge_restored(client, counted),
            QuotaCheck::Holds => {
                let reserved = self.ledger.reserve(client, StorageTier::Disk, counted);
                if reserved.is_err() {
                    return None;
                }
            }
        }
        drop(copy_store.record_progress(id, found.progress_now()));
        let Some(copy) = self.load(copy_store, id, &found) else {
            if !is_charged {
                self.ledger.release(client, StorageTier::Disk, counted);
            }
            return None;
        };
        self.hibernated.set_loaded(&copy);
        loaded.insert(id, copy.clone());
        Some(copy)
    }

    /// Takes up the copy of a complete response of the shared cache.
    fn restore_shared(
        &self,
        copy_store: &Arc<CopyStore>,
        id: u64,
        loaded: &mut HashMap<u64, Arc<PinnedCopy>>,
    ) -> Option<Arc<PinnedCopy>> {
        let found = FoundCopy::find(copy_store, id)?;
        let is_whole = found.is_complete && found.has_right_length;
        let is_shared = is_whole && found.entry.client == SHARED;
        if !is_shared || !self.cache.takes(Some(found.have)) {
            return None;
        }
        self.restore_copy(copy_store, id, QuotaCheck::Holds, loaded)
    }

    /// Takes up a part of a response of the shared cache: its head, and the bytes that there are.
    fn load_part(
        &self,
        copy_store: &Arc<CopyStore>,
        id: u64,
        found: &FoundCopy,
    ) -> Option<(CopyHead, Arc<SpooledBody>)> {
        if !self.cache.takes(Some(found.counted())) {
            return None;
        }
        let (head, _) = CopyHead::from_entry(&found.entry)?;
        let counted = found.have;
        let tier = StorageTier::Disk;
        self.ledger.reserve(SHARED, tier, counted).ok()?;
        drop(copy_store.record_progress(id, found.progress_now()));
        let home = SpoolFile {
            copy_store: copy_store.clone(),
            id,
        };
        let body = RestoredBody {
            counted,
            ..found.body()
        };
        match SpooledBody::restore(self.ledger.clone(), SHARED, home, body) {
            Ok(body) => Some((head, Arc::new(body))),
            Err(error) => {
                tracing::error!(%error, "a part of a response is lost");
                self.ledger.release(SHARED, tier, counted);
                None
            }
        }
    }

    /// Takes up an upload, and delivers it if it is complete and its origin has not received it.
    fn restore_upload(
        self: &Arc<Prox>,
        copy_store: &Arc<CopyStore>,
        id: u64,
        record: UploadRecord,
        loaded: &mut HashMap<u64, Arc<PinnedCopy>>,
    ) -> bool {
        let client = record.client;
        let keep = self.config().keep;
        let grace = record.until_ms.map_or(keep, |until| remaining(until, keep));
        let progress = copy_store.progress(id);
        let Some(request) = record.request() else {
            return false;
        };
        if !self.is_client(&client) || grace.is_zero() || self.uploads.has(client, &request) {
            return false;
        }
        let have = match copy_store.valid_bytes(id, record.boot, progress) {
            Some(have) => have,
            None if matches!(record.stage, UploadStage::Receiving | UploadStage::Held) => {
                return false;
            }
            // Without its note the device's next try would be sent to the origin once more.
            None if copy_store.create(id).is_ok() => 0,
            None => return false,
        };
        let delivered = self.delivered_before(copy_store, &record, &request, loaded);
        let stored = StoredUpload::restored(copy_store, id, record.clone());
        let found = FoundUpload {
            id,
            have,
            progress,
            record,
            stored,
            delivered,
            grace,
        };
        self.open_upload(copy_store, &request, found)
    }

    /// Takes up an upload whose body has a file here, and delivers it if it is complete and its origin has not received
    /// it. Returns whether it is here.
    pub(crate) fn open_upload(
        self: &Arc<Prox>,
        copy_store: &Arc<CopyStore>,
        request: &UploadRequest,
        found: FoundUpload,
    ) -> bool {
        let FoundUpload {
            id,
            have,
            progress,
            record,
            stored,
            delivered,
            grace,
        } = found;
        let client = record.client;
        let have = record.length.map_or(have, |length| length.min(have));
        let is_complete = record.length == Some(have);
        let counted = record.length.unwrap_or(0).max(have);
        self.ledger.charge_restored(client, counted);
        let found = RestoredBody {
            have,
            counted,
            total: record.length,
            whole: false,
        };
        let home = SpoolFile {
            copy_store: copy_store.clone(),
            id,
        };
        let spool = match SpooledBody::restore(self.ledger.clone(), client, home, found) {
            Ok(spool) => spool,
            Err(error) => {
                tracing::error!(%error, "an upload is lost");
                self.ledger.release(client, StorageTier::Disk, counted);
                return false;
            }
        };
        let now =
            StoredProgress::synced_now(progress.synced.min(have), progress.whole && is_complete);
        if copy_store.shared().is_none() {
            drop(copy_store.record_progress(id, now));
        }
        let is_sent_now = is_complete
            && delivered.is_none()
            && matches!(record.stage, UploadStage::Receiving | UploadStage::Sending);
        let stored = Some(stored);
        let room = UploadRoom {
            spool,
            stored: stored.clone(),
        };
        let Some(upload) = self.uploads.restore(client, request, room, grace) else {
            return false;
        };
        if is_complete {
            upload.spool.finish();
        }
        let sending = is_sent_now
            .then(|| upload_sender::start(self, client, request, &upload.spool, stored.as_ref()));
        *upload.delivery.lock() = delivered.or(sending);
        true
    }

    /// The delivery of an upload that an earlier process ended, or must not have been repeated.
    fn delivered_before(
        &self,
        copy_store: &Arc<CopyStore>,
        record: &UploadRecord,
        request: &UploadRequest,
        loaded: &mut HashMap<u64, Arc<PinnedCopy>>,
    ) -> Option<UploadDelivery> {
        // It is no copy of the resource at that URL, so it is not listed.
        let answer = match &record.stage {
            UploadStage::AnsweredCopy(id) => {
                self.restore_copy(copy_store, *id, QuotaCheck::Ignored, loaded)
            }
            _ => None,
        };
        ended_delivery(record, request, answer)
    }

    /// Loads a copy from the copy store.
    fn load(
        &self,
        copy_store: &Arc<CopyStore>,
        id: u64,
        found: &FoundCopy,
    ) -> Option<Arc<PinnedCopy>> {
        let entry = &found.entry;
        let (head, asked) = CopyHead::from_entry(entry)?;
        let home = SpoolFile {
            copy_store: copy_store.clone(),
            id,
        };
        let pin = SpooledBody::restore(self.ledger.clone(), entry.client, home, found.body())
            .inspect_err(|error| tracing::error!(%error, "a copy is lost"))
            .ok()?;
        let rest = CopyFetchSource::Rest;
        Some(self.start_fetch(entry.client, id, head, Arc::new(pin), asked, rest))
    }

    /// Lists a copy that a flow reads for its client.
    fn list(&self, copy: &Arc<PinnedCopy>, entry: &CopyRecord) {
        if copy.head.status == StatusCode::OK && entry.client != SHARED {
            self.retained.list(entry.client, &entry.asked_url, copy);
        }
    }

    /// Loads a complete copy that sleeping flows read.
    pub(crate) fn load_complete(&self, id: u64, counted: u64) -> Option<Arc<PinnedCopy>> {
        let copy_store = self.copy_store.as_ref()?;
        let (entry, progress) = copy_store.record(id)?;
        let found = FoundCopy {
            have: progress.synced,
            is_complete: true,
            has_right_length: true,
            entry: CopyRecord {
                total: Some(counted),
                ..entry
            },
            progress,
        };
        let copy = self.load(copy_store, id, &found)?;
        self.list(&copy, &found.entry);
        Some(copy)
    }
}

/// The delivery of an upload that another process ended, or must not have been repeated. `answer`: the copy of its answer,
/// if it has one that is there still.
pub(crate) fn ended_delivery(
    record: &UploadRecord,
    request: &UploadRequest,
    answer: Option<Arc<PinnedCopy>>,
) -> Option<UploadDelivery> {
    let result = match &record.stage {
        UploadStage::Receiving | UploadStage::Held => return None,
        UploadStage::Sending if is_idempotent(&request.method) => return None,
        UploadStage::Sending => Err(UploadFailure::Refused(ProxRefusal::OriginClosed {
            host: request.url.host_str().unwrap_or_default().to_owned(),
            cause: "this proxy was restarted while it sent the request".to_owned(),
        })),
        UploadStage::AnsweredHead(head) => match CopyHead::from_entry(head) {
            Some((head, _)) => Ok(UploadAnswer::HeadOnly(Arc::new(head))),
            None => Err(UploadFailure::Reset(ResetCause::StoreFailed)),
        },
        UploadStage::AnsweredCopy(_) => match answer {
            Some(copy) => Ok(UploadAnswer::Copy(copy)),
            None => Err(UploadFailure::Reset(ResetCause::StoreFailed)),
        },
    };
    Some(UploadDelivery::finished(result))
}

/// Whether a copy that is taken up must fit the bounds.
#[derive(Clone, Copy)]
enum QuotaCheck {
    Holds,
    Ignored,
}

/// Fetches copies and uploads from the bucket, as far as it has them and this disk has not.
async fn fetch(
    copy_store: &Arc<CopyStore>,
    bucket: &CopyBucket,
    missing: Vec<u64>,
) -> io::Result<()> {
    for id in missing {
        let path = copy_store.path(id);
        if path.exists() {
            continue;
        }
        let Some(synced) = bucket.fetch(id, &path).await? else {
            continue;
        };
        let known = copy_store.progress(id);
        let is_whole = known.whole && known.synced == synced;
        let progress = StoredProgress::synced_now(synced, is_whole);
        // What is restored is read from the journal.
        let _ = copy_store.record_progress(id, progress).await;
    }
    Ok(())
}

/// The time until `until_ms` by the machine's clock, at most `most`: the clock may have been set.
fn remaining(until_ms: u64, most: Duration) -> Duration {
    let left = until_ms.saturating_sub(wall_ms(SystemTime::now()));
    Duration::from_millis(left).min(most)
}
