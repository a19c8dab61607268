//! Copies that several nodes share: their bytes lie in a directory that all nodes see, their records in the shared
//! store.
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
//! A node that fetched a copy before and is still alive learns that it lost it when it records its progress. Its file
//! stays for its own readers until the node that took the copy over needs it no more. A copy is removed when no memo of any node names it and no process holds it; the
//! store counts both.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use d2tp_driver::{HostKey, JournalError, SharedRecords};
use parking_lot::Mutex;

use crate::copy_store::{CopyRecord, CopyStore, StoredProgress};
use crate::flow_report::ProxFlowOutcome;
use crate::pinned_copy::{CopyHead, CopyRequest, PinnedCopy};
use crate::prox::Prox;
use crate::quota_ledger::{FlowPermit, StorageTier};
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
}

/// The file of a copy that a node goes on with.
struct TakenFile {
    entry: CopyRecord,
    progress: StoredProgress,
    /// How many bytes of the file count.
    have: u64,
    /// The version of the file that other nodes may still read.
    old_version: Option<u64>,
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
    let Ok(found) = tokio::fs::metadata(&path).await else {
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
        })));
    }
    if entry.origin_validator.is_none() && entry.total != Some(have) {
        return Ok(CopyTakeover::Nothing); // The rest may be of another object.
    }
    // Its flow does not wait for a sync: in this boot all bytes count, and they are recorded as synced when they are.
    let taken = StoredProgress {
        synced: 0,
        whole: false,
        boot,
        version: copy_store.new_version(),
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
    })))
}

/// The copies of this process, where nodes share them.
#[derive(Debug, Default)]
pub(crate) struct SharedCopies {
    /// Copies in this process, by id.
    here: Mutex<HashMap<u64, Weak<PinnedCopy>>>,
    /// For each copy that is being loaded, a lock: two flows that wake share one copy.
    loading: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<()>>>>,
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
        let old_version = found.as_ref().and_then(|found| found.old_version);
        if let Some(old) = old_version {
            copy_store.remove_old_version_later(id, old);
        }
        let (prox, files) = (self.clone(), copy_store.clone());
        let opening = tokio::task::spawn_blocking(move || {
            found.and_then(|f| prox.open_taken(&files, id, &f))
        });
        let opened = opening.await.ok().flatten();
        let copy = opened.map(|taken| {
            let (client, body) = (taken.client, Arc::new(taken.body));
            let copy = self.start_fetch(client, id, taken.head, body, taken.request, None);
            self.retained.list(client, copy.request.url.as_str(), &copy);
            copy
        });
        match &copy {
            None => copy_store.let_go_shared(id),
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
            ..
        } = found;
        let have = *have;
        let (head, request) = CopyHead::from_entry(entry)?;
        let counted = entry.total.unwrap_or(0).max(have);
        if self.ledger.reserve_restored(entry.client, counted).is_err() {
            tracing::warn!(id, "a copy does not fit the quotas of this node");
            return None;
        }
        let found = RestoredBody {
            have,
            counted,
            total: if progress.whole {
                Some(have)
            } else {
                entry.total
            },
            whole: progress.whole,
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
            let _ = tokio::task::spawn_blocking(move || copy_store.remove_shared(id)).await;
        }
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
            synced: 10,
            whole: false,
            boot,
            version,
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
