//! Copies that several nodes share: their bytes lie in a directory that all nodes see, or in a bucket, their records in
//! the shared store.
//!
//! ```text
//!  a flow wakes here ─▶ copy in this process? ── yes ─▶ read on
//!                           │ no
//!                           ▼
//!                       complete ─▶ its file is read where it lies
//!                       growing  ─▶ the bytes so far are copied into a file of this node, the record is replaced if
//!                                   nobody else did (one node wins), and the rest is fetched with Range and If-Range
//! ```
//!
//! With a bucket a node has no files but those that it wrote. What it has not is read from the bucket into a file of its
//! own while the flow reads that. If the bucket has not all of it, the record is replaced in the same way before the
//! origin is asked for the rest.
//!
//! A node that fetched a copy before and is still alive learns that it lost it when it records its progress. Its file
//! stays for its own readers until the node that took the copy over needs it no more. A copy is removed when no memo of any node names it and no process holds it; the
//! store counts both.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use d2tp_driver::{HostKey, JournalError, SharedRecords};
use http::HeaderValue;
use parking_lot::Mutex;

use crate::copy_fetcher::{BucketParts, CopyFetchSource};
use crate::copy_head::{CopyHead, CopyRequest};
use crate::copy_store::{CopyRecord, CopyStore, StoredProgress};
use crate::flow_report::ProxFlowOutcome;
use crate::pinned_copy::PinnedCopy;
use crate::prox::Prox;
use crate::quota_ledger::{FlowPermit, StorageTier};
use crate::request::FetchRequest;
use crate::retention_note::{RetainedUrlCopy, RetentionNote, note_retained, retained_copies};
use crate::spooled_body::{RestoredBody, SpoolFile, SpoolStatus, SpooledBody};

/// How long to wait after the store did not answer.
const AGAIN_AFTER: Duration = Duration::from_secs(1); // a guess

/// How often a copy is tried to be taken over that other nodes take over at the same time.
const TAKE_OVER_TRIES: usize = 3; // a guess

/// A copy that this node goes on with.
struct TakenCopy {
    body: SpooledBody,
    client: HostKey,
    head: CopyHead,
    request: CopyRequest,
    /// Whether its record says that it is complete.
    is_whole: bool,
}

/// The file of a copy that a node goes on with.
struct TakenFile {
    entry: CopyRecord,
    progress: StoredProgress,
    /// How many bytes of the file count.
    have: u64,
    /// The version of the file that other nodes may still read.
    old_version: Option<u64>,
    /// Whether the bytes are read from the bucket.
    is_from_bucket: bool,
}

/// What comes of an attempt to find the file of a copy.
enum CopyTakeover {
    /// There is no copy, or nothing that can be continued.
    Nothing,
    /// Another node was faster, or the file cannot be read.
    Again,
    Taken(Box<TakenFile>),
}

/// How many bytes of a copy's file count: in the boot of the machine that wrote it all of them, synced or not.
fn valid_bytes(entry: &CopyRecord, progress: &StoredProgress, boot: u32, len: u64) -> u64 {
    // Another machine may have written what a later version has, so where the copy began says nothing of it.
    let began_here = progress.version == 0 && entry.boot == boot;
    match boot != 0 && (began_here || progress.boot == boot) {
        true => len,
        false => progress.synced.min(len),
    }
}

/// Finds the file of a copy, or makes one of this node.
///
/// # Errors
/// The store does not answer.
async fn take_over_file(
    copy_store: &Arc<CopyStore>,
    shared: &Arc<dyn SharedRecords>,
    id: u64,
) -> Result<CopyTakeover, JournalError> {
    let Some((entry, progress)) = copy_store.shared_record(shared, id).await? else {
        return Ok(CopyTakeover::Nothing);
    };
    let path = copy_store.path_of_version(id, progress.version);
    let boot = d2tp_driver::boot();
    let found = tokio::fs::metadata(&path).await;
    if copy_store.node_bucket().is_some() {
        let length = found.map_or(0, |found| found.len());
        let have = valid_bytes(&entry, &progress, boot, length);
        return Ok(take_up_with_bucket(copy_store, id, entry, progress, have));
    }
    let Ok(found) = found else {
        return Ok(CopyTakeover::Again); // Where it is gone, another node has just taken it over.
    };
    let have = valid_bytes(&entry, &progress, boot, found.len());
    if progress.whole && have >= progress.synced {
        copy_store.set_version(id, progress.version);
        return Ok(CopyTakeover::Taken(Box::new(TakenFile {
            entry,
            have: progress.synced,
            progress,
            old_version: None,
            is_from_bucket: false,
        })));
    }
    if entry.origin_validator.is_none() && entry.total != Some(have) {
        return Ok(CopyTakeover::Nothing); // The rest may be of another object.
    }
    // Its flow does not wait for a sync: in this boot all bytes count, and they are recorded as synced when they are.
    let taken = StoredProgress {
        version: copy_store.new_version(),
        ..StoredProgress::synced_now(0, false)
    };
    let new = copy_store.path_of_version(id, taken.version);
    let (from, to) = (path, new.clone());
    // What cannot be fetched again is durable before anything names it.
    let is_durable_first = entry.origin_validator.is_none();
    let copied = tokio::task::spawn_blocking(move || {
        std::fs::copy(&from, &to)?;
        if is_durable_first {
            File::open(&to)?.sync_all()?;
            let folder = to.parent().expect("a copy lies in a folder");
            File::open(folder)?.sync_all()?;
        }
        Ok::<_, io::Error>(())
    })
    .await;
    if let Err(error) = copied.unwrap_or_else(|error| Err(io::Error::other(error))) {
        tracing::error!(%error, "a copy cannot be taken over");
        return Ok(CopyTakeover::Again);
    }
    // Asked again until it answers: it may have done it.
    let is_ours = loop {
        let replaced = copy_store.replace_progress(shared, id, Some(progress), taken);
        match replaced.await {
            Ok(is_ours) => break is_ours,
            Err(error) => {
                tracing::warn!(%error, "a copy is taken over, which waits for the store");
                tokio::time::sleep(AGAIN_AFTER).await;
            }
        }
    };
    if !is_ours {
        let _ = std::fs::remove_file(&new);
        return Ok(CopyTakeover::Again);
    }
    copy_store.set_version(id, taken.version);
    tracing::info!(have, "took over a copy that is fetched");
    Ok(CopyTakeover::Taken(Box::new(TakenFile {
        entry,
        progress: taken,
        have,
        old_version: Some(progress.version),
        is_from_bucket: false,
    })))
}

/// Takes the file of a copy that this node wrote, of which `have` bytes count, or makes an empty one for what the bucket
/// has.
fn take_up_with_bucket(
    copy_store: &CopyStore,
    id: u64,
    entry: CopyRecord,
    progress: StoredProgress,
    have: u64,
) -> CopyTakeover {
    let is_here = match progress.whole {
        true => have >= progress.synced,
        false => have > 0,
    };
    if is_here {
        copy_store.set_found_version(id, progress.version, progress);
        return CopyTakeover::Taken(Box::new(TakenFile {
            entry,
            progress,
            have: if progress.whole {
                progress.synced
            } else {
                have
            },
            old_version: None,
            is_from_bucket: false,
        }));
    }
    copy_store.set_found_version(id, copy_store.new_version(), progress);
    if let Err(error) = copy_store.create(id) {
        tracing::error!(%error, "a copy cannot be taken from the bucket");
        return CopyTakeover::Again;
    }
    tracing::info!(id, "takes over a copy from the bucket");
    CopyTakeover::Taken(Box::new(TakenFile {
        entry,
        progress,
        have: 0,
        old_version: None,
        is_from_bucket: true,
    }))
}

/// The copies of this process, where nodes share them.
#[derive(Debug, Default)]
pub(crate) struct SharedCopies {
    /// Copies in this process, by id.
    here: Mutex<HashMap<u64, Weak<PinnedCopy>>>,
    /// For each copy that is being loaded, a lock: two flows that wake share one copy.
    loading: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<()>>>>,
    /// Files that earlier processes of this node left, with their versions, where a bucket has the copies.
    pub(crate) left_files: Mutex<Vec<(u64, u64)>>,
    /// Objects of earlier processes that this node retained until their time was over.
    expired: Mutex<HashSet<u64>>,
}

impl SharedCopies {
    /// Notes that the copy is in this process.
    pub(crate) fn note(&self, copy: &Arc<PinnedCopy>) {
        let mut here = self.here.lock();
        if here.len() >= 64 && here.len().is_power_of_two() {
            here.retain(|_, copy| copy.strong_count() > 0);
        }
        here.insert(copy.id, Arc::downgrade(copy));
    }

    /// Whether the copy is in this process and complete.
    pub(crate) fn is_whole(&self, id: u64) -> bool {
        self.get(id).is_some_and(|copy| is_whole(&copy))
    }

    fn get(&self, id: u64) -> Option<Arc<PinnedCopy>> {
        self.here.lock().get(&id).and_then(Weak::upgrade)
    }
}

fn is_whole(copy: &PinnedCopy) -> bool {
    copy.body.extent().status == SpoolStatus::Complete
}

impl Prox {
    /// The shared store, if nodes share this proxy's copies.
    pub fn shared_records(&self) -> Option<&Arc<dyn SharedRecords>> {
        self.copy_store.as_ref()?.shared()
    }

    /// The copy of a flow that wakes on this node.
    pub(crate) async fn rouse_shared(self: &Arc<Prox>, id: u64) -> Option<Arc<PinnedCopy>> {
        let lock = self
            .shared_copies
            .loading
            .lock()
            .entry(id)
            .or_default()
            .clone();
        let alone = lock.lock().await;
        let copy = match self.shared_copies.get(id) {
            Some(copy) => Some(copy),
            None => self.load_shared(id).await,
        };
        drop(alone);
        self.shared_copies.loading.lock().remove(&id);
        copy
    }

    /// Loads a copy from the shared directory.
    async fn load_shared(self: &Arc<Prox>, id: u64) -> Option<Arc<PinnedCopy>> {
        let (copy_store, shared) = (self.copy_store.clone()?, self.shared_records()?.clone());
        copy_store.hold_shared(id).await.ok()?;
        let mut tries = 0;
        let found = loop {
            match take_over_file(&copy_store, &shared, id).await {
                Ok(CopyTakeover::Taken(found)) => break Some(found),
                Ok(CopyTakeover::Nothing) => break None,
                Ok(CopyTakeover::Again) if tries + 1 == TAKE_OVER_TRIES => break None,
                Ok(CopyTakeover::Again) => tries += 1,
                Err(error) => {
                    tracing::warn!(%error, "a copy is needed and cannot be looked up; its flow waits");
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
            }
        };
        let is_from_bucket = found.as_ref().is_some_and(|found| found.is_from_bucket);
        let old_version = found.as_ref().and_then(|found| found.old_version);
        if let Some(old) = old_version {
            copy_store.remove_old_version_later(id, old);
        }
        let (prox, files) = (self.clone(), copy_store.clone());
        let opening = tokio::task::spawn_blocking(move || {
            found.and_then(|f| prox.open_taken(&files, id, &f))
        });
        let opened = opening.await.ok().flatten();
        let bucket = copy_store.node_bucket().filter(|_| is_from_bucket);
        let copy = opened.map(|taken| {
            let (client, body) = (taken.client, Arc::new(taken.body));
            let rest = match bucket {
                Some(bucket) => CopyFetchSource::Bucket(BucketParts {
                    copy_store: copy_store.clone(),
                    bucket: bucket.clone(),
                    is_whole: taken.is_whole,
                }),
                None => CopyFetchSource::Rest,
            };
            let copy = self.start_fetch(client, id, taken.head, body, taken.request, rest);
            self.retained.list(client, copy.request.url.as_str(), &copy);
            copy
        });
        match &copy {
            None => copy_store.let_go_shared(id),
            // The node before needs it no more, or has a file of its own.
            Some(_) if is_from_bucket => drop(shared.hold_alone(id).await),
            // It lies in a file of this node now; that of the node before goes with it.
            Some(copy) if old_version.is_some() => {
                copy.body.sync_with_name();
                drop(shared.hold_alone(id).await);
            }
            Some(_) => {}
        }
        copy
    }

    /// Opens the file of a copy: where it lies if it is complete, else the one of this node. Blocks.
    fn open_taken(
        &self,
        copy_store: &Arc<CopyStore>,
        id: u64,
        found: &TakenFile,
    ) -> Option<TakenCopy> {
        let TakenFile {
            entry,
            progress,
            have,
            is_from_bucket,
            ..
        } = found;
        let have = *have;
        let (head, request) = CopyHead::from_entry(entry)?;
        let total = match progress.whole {
            true => Some(progress.synced),
            false => entry.total,
        };
        let counted = total.unwrap_or(0).max(have);
        if self.ledger.reserve_restored(entry.client, counted).is_err() {
            tracing::warn!(id, "a copy does not fit the quotas of this node");
            return None;
        }
        let found = RestoredBody {
            have,
            counted,
            total,
            whole: progress.whole && !is_from_bucket,
        };
        let home = SpoolFile {
            copy_store: copy_store.clone(),
            id,
        };
        let restored = SpooledBody::restore(self.ledger.clone(), entry.client, home, found);
        let Ok(body) = restored.inspect_err(|error| tracing::error!(%error, "a copy is lost"))
        else {
            self.ledger
                .release(entry.client, StorageTier::Disk, counted);
            return None;
        };
        Some(TakenCopy {
            body,
            client: entry.client,
            head,
            request,
            is_whole: progress.whole,
        })
    }

    /// Counts a flow no longer, unless it sleeps on this node, which alone wakes it.
    pub(crate) fn settle_permit(&self, permit: FlowPermit, outcome: &ProxFlowOutcome) {
        if *outcome == ProxFlowOutcome::Hibernated {
            self.hibernations.add();
        }
        if self.shared_records().is_none() {
            permit.settle(outcome);
        }
    }

    /// Lets a copy go on being fetched whose flow sleeps, until it is complete.
    pub(crate) fn finish_shared(&self, copy: Arc<PinnedCopy>) {
        tokio::spawn(async move {
            copy.body.wait_beyond(u64::MAX).await;
            drop(copy);
        });
    }

    /// Whether another node can read all of a copy.
    pub(crate) fn is_whole_for_others(&self, id: u64) -> bool {
        let bucket = self.copy_store.as_ref().and_then(|s| s.node_bucket());
        self.shared_copies.is_whole(id) && bucket.is_none_or(|bucket| bucket.has_all(id))
    }

    /// Looks through the files that earlier processes of this node left, where a bucket has the copies: sends the bucket
    /// what it may lack of complete ones, and removes those that nobody reads any more.
    pub(crate) async fn clear_node_files(&self, files: Vec<(u64, u64)>) {
        let (Some(copy_store), Some(shared)) = (&self.copy_store, self.shared_records()) else {
            return;
        };
        for (id, version) in files {
            let known = loop {
                match copy_store.shared_record(shared, id).await {
                    Ok(known) => break known,
                    Err(_) => tokio::time::sleep(AGAIN_AFTER).await,
                }
            };
            if self.shared_copies.get(id).is_some() {
                continue; // A flow reads it again.
            }
            let path = copy_store.path_of_version(id, version);
            match (known, copy_store.node_bucket()) {
                (Some((_, progress)), Some(bucket)) if progress.version == version => {
                    if progress.whole {
                        bucket.on_growth(id, version, progress.synced, true);
                        bucket.on_let_go(id, &path);
                    }
                }
                // An upload is taken up with its file.
                (None, _) if self.is_retained(shared, id).await => {}
                _ => drop(std::fs::remove_file(path)),
            }
        }
    }

    async fn is_retained(&self, shared: &Arc<dyn SharedRecords>, id: u64) -> bool {
        !matches!(RetentionNote::read(shared, id).await, Ok(None))
    }

    /// Removes copies that nobody needs, while the proxy runs.
    pub async fn remove_free_copies(self: Arc<Prox>) {
        let Some(shared) = self.shared_records().cloned() else {
            return;
        };
        while let Ok(id) = shared.next_free_object().await {
            let Some(copy_store) = self.copy_store.clone() else {
                return;
            };
            if self.shared_copies.get(id).is_some() {
                continue; // It is held again, and reported again.
            }
            let note = loop {
                match RetentionNote::read(&shared, id).await {
                    Ok(note) => break note,
                    Err(_) => tokio::time::sleep(AGAIN_AFTER).await,
                }
            };
            if let Some(note) = note {
                if self.retain_for_rest(&shared, id, &note).await {
                    continue;
                }
                if let Err(error) = note.remove(&shared, id).await {
                    tracing::warn!(%error, "a note of a copy that is gone stays");
                }
            }
            let _ = tokio::task::spawn_blocking(move || copy_store.remove_shared(id)).await;
        }
    }

    /// Holds an object for the rest of its time that an earlier process of this node retained. Returns whether there is
    /// any.
    async fn retain_for_rest(
        self: &Arc<Prox>,
        shared: &Arc<dyn SharedRecords>,
        id: u64,
        note: &RetentionNote,
    ) -> bool {
        let left = note.left(shared, self.config().keep);
        let is_over = self.shared_copies.expired.lock().remove(&id);
        if is_over || left.is_zero() || shared.hold(id).await.is_err() {
            return false;
        }
        if let Some(name) = note.upload()
            && self.take_up_upload(id, name).await
        {
            return true;
        }
        tracing::info!(
            id,
            ?left,
            "retains what an earlier process of this node had"
        );
        let (prox, shared) = (Arc::downgrade(self), shared.clone());
        tokio::spawn(async move {
            tokio::time::sleep(left).await;
            let Some(prox) = prox.upgrade() else {
                return;
            };
            if prox.shared_copies.get(id).is_some() {
                return; // A flow came for it, and lets go of it.
            }
            prox.shared_copies.expired.lock().insert(id);
            while shared.let_go(id).await.is_err() {
                tokio::time::sleep(AGAIN_AFTER).await;
            }
        });
        true
    }

    /// Tells all nodes that a copy is retained for its client, who may return to any of them.
    pub(crate) fn tell_retained(&self, client: HostKey, copy: &PinnedCopy, grace: Duration) {
        let Some(shared) = self.shared_records().cloned() else {
            return;
        };
        let (url, id) = (copy.request.url.clone(), copy.id);
        let until = SystemTime::now() + grace;
        tokio::spawn(async move {
            while SystemTime::now() < until {
                match note_retained(&shared, &client, url.as_str(), id, until).await {
                    Ok(()) => return,
                    Err(_) => tokio::time::sleep(AGAIN_AFTER).await,
                }
            }
        });
    }

    /// The copy with the validator in `if_range` that another process retained for this client, if there is one.
    pub(crate) async fn find_retained(
        self: &Arc<Prox>,
        client: HostKey,
        request: &FetchRequest,
        if_range: &HeaderValue,
    ) -> Option<Arc<PinnedCopy>> {
        let (copy_store, shared) = (self.copy_store.as_ref()?, self.shared_records()?);
        let found = retained_copies(shared, &client, request.url.as_str()).await;
        for RetainedUrlCopy { id, .. } in found.ok()? {
            let Ok(Some((entry, _))) = copy_store.shared_record(shared, id).await else {
                continue;
            };
            let Some((head, _)) = CopyHead::from_entry(&entry) else {
                continue;
            };
            if !head.matches_if_range(if_range) || !head.matches_request(request) {
                continue;
            }
            let Some(copy) = self.rouse_shared(id).await else {
                continue;
            };
            if let Ok(Some(note)) = RetentionNote::read(shared, id).await {
                let _ = note.take_over(shared, id).await;
            }
            return Some(copy);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: u32 = 7;
    const ELSEWHERE: u32 = 8;

    fn record_of(boot: u32) -> CopyRecord {
        let json = serde_json::json!({
            "client": vec![0; 32], "asked_url": "", "asked_headers": [], "status": 200, "http2": false,
            "headers": [], "url": "", "redirected": false, "origin_validator": null, "selected_by": [],
            "total": null, "boot": boot,
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn bytes_that_another_machine_did_not_sync_count_for_nothing() {
        let progress = |boot, version| StoredProgress {
            boot,
            version,
            ..StoredProgress::synced_now(10, false)
        };
        let counts = |record, boot, version| {
            valid_bytes(&record_of(record), &progress(boot, version), HERE, 99)
        };
        assert_eq!(counts(HERE, HERE, 0), 99);
        // No progress was recorded yet.
        assert_eq!(counts(HERE, 0, 0), 99);
        assert_eq!(counts(ELSEWHERE, ELSEWHERE, 0), 10);
        // It began here, and another machine has taken it over since.
        assert_eq!(counts(HERE, ELSEWHERE, 5), 10);
        assert_eq!(counts(ELSEWHERE, HERE, 5), 99);
        let unknown = valid_bytes(&record_of(0), &progress(0, 0), 0, 99);
        assert_eq!(unknown, 10, "no boot is known");
    }
}
