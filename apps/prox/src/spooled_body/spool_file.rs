//! Objects whose file has a name: they outlive the process, and the state of the file is recorded.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Instant;

use d2tp_driver::HostKey;
use parking_lot::Mutex;

use super::{SpoolState, SpoolStatus, SpoolStorage, SpooledBody};
use crate::copy_bucket::PART_BYTES;
use crate::copy_store::{
    CopyStore, SYNC_EVERY_BYTES, SYNC_PAUSE, StoredProgress, WHOLE_SYNC_DELAY,
};
use crate::quota_ledger::QuotaLedger;
use d2tp_driver::ResetCause;

/// A named file of an object.
#[derive(Clone, Debug)]
pub(crate) struct SpoolFile {
    pub(crate) copy_store: Arc<CopyStore>,
    pub(crate) id: u64,
}

/// The state of an object whose file exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RestoredBody {
    pub(crate) have: u64,
    pub(crate) counted: u64,
    pub(crate) total: Option<u64>,
    pub(crate) whole: bool,
}

impl SpooledBody {
    /// Restores an object from its file; `counted` of its bytes are in the ledger already.
    pub(crate) fn restore(
        ledger: Arc<QuotaLedger>,
        client: HostKey,
        home: SpoolFile,
        found: RestoredBody,
    ) -> io::Result<SpooledBody> {
        let file = home.copy_store.reopen(home.id)?;
        // What lies beyond is not known to be right.
        file.set_len(found.have)?;
        let state = SpoolState {
            client,
            store: SpoolStorage::Disk(Arc::new(file)),
            len: found.have,
            counted: found.counted,
            total: found.total,
            status: if found.whole {
                SpoolStatus::Complete
            } else {
                SpoolStatus::Growing
            },
            waiting: HashMap::new(),
            synced: found.have,
            synced_at: Instant::now(),
            noted: found.whole,
            in_bucket: 0,
            stays: false,
        };
        let body = SpooledBody {
            ledger,
            state_dir: PathBuf::new(),
            memory_max: 0,
            named_file: Some(home),
            state: Mutex::new(state),
        };
        // The bucket may not have all that an earlier process stored.
        body.send_to_bucket();
        Ok(body)
    }

    /// Whether another node has taken over the object, so that this one must not ask its origin.
    pub(crate) async fn is_taken_over(&self) -> bool {
        let Some(home) = self.named_file.clone() else {
            return false;
        };
        home.copy_store.is_taken_over(home.id).await
    }

    /// Removes the object from memory; file and count remain. Returns that count; none if the object
    /// has no named file, or is not complete.
    pub(crate) fn release_memory(&self) -> Option<u64> {
        let mut state = self.state.lock();
        if self.named_file.is_none() || state.status != SpoolStatus::Complete || !state.noted {
            return None;
        }
        state.stays = true;
        Some(state.counted)
    }

    /// Sends what is new to the bucket of copies, if there is one.
    pub(super) fn send_to_bucket(&self) {
        let Some(home) = &self.named_file else {
            return;
        };
        let Some(bucket) = home.copy_store.bucket() else {
            return;
        };
        let state = self.state.lock();
        let is_complete = state.status == SpoolStatus::Complete;
        if is_complete || state.len / PART_BYTES > state.in_bucket / PART_BYTES {
            let have = state.len;
            drop(state);
            let version = home.copy_store.version(home.id);
            bucket.on_growth(home.id, version, have, is_complete);
            self.state.lock().in_bucket = have;
        }
    }

    /// Syncs a named file that grows and records it, if it is time.
    pub(super) fn sync_growing(self: &Arc<SpooledBody>) {
        let Some(home) = &self.named_file else {
            return;
        };
        let state = self.state.lock();
        let is_due = home.copy_store.is_shared() || state.synced_at.elapsed() >= SYNC_PAUSE;
        if is_due && state.len >= state.synced + SYNC_EVERY_BYTES {
            drop(state);
            self.sync();
        }
    }

    /// Records that a named file is complete, and syncs it, unless the object is removed at once.
    pub(super) fn sync_complete(self: &Arc<SpooledBody>) {
        let Some(home) = self.named_file.clone() else {
            return;
        };
        if home.copy_store.is_shared() {
            return self.sync();
        }
        let state = self.state.lock();
        let (from, len) = (state.synced, state.len);
        drop(state);
        let body = Arc::downgrade(self);
        tokio::spawn(async move {
            let progress = StoredProgress {
                unsynced_from: Some(from),
                ..StoredProgress::synced_now(len, true)
            };
            let recorded = home.copy_store.record_progress(home.id, progress).await;
            if recorded.is_ok() {
                home.on_recorded(&body, true);
            }
            home.sync_later(len, body).await;
        });
    }

    /// Syncs a named file and records it.
    fn sync(self: &Arc<SpooledBody>) {
        let Some(home) = self.named_file.clone() else {
            return;
        };
        let mut state = self.state.lock();
        let whole = state.status == SpoolStatus::Complete;
        state.synced = state.len;
        state.synced_at = Instant::now();
        let len = state.len;
        let SpoolStorage::Disk(file) = &state.store else {
            return;
        };
        let file = file.clone();
        drop(state);
        self.spawn_sync(home, len, whole, move || file.sync_data());
    }

    /// Syncs a named file that was copied from another one, with its name, and records it.
    pub(crate) fn sync_with_name(self: &Arc<SpooledBody>) {
        let Some(home) = self.named_file.clone() else {
            return;
        };
        let state = self.state.lock();
        let len = state.len;
        let SpoolStorage::Disk(file) = &state.store else {
            return;
        };
        let file = file.clone();
        drop(state);
        let folder = home.copy_store.path(home.id).parent().map(PathBuf::from);
        self.spawn_sync(home, len, false, move || {
            file.sync_all()?;
            folder.map_or(Ok(()), |folder| File::open(folder)?.sync_all())
        });
    }

    /// Syncs the first `len` bytes in a task, and records that.
    fn spawn_sync(
        self: &Arc<SpooledBody>,
        home: SpoolFile,
        len: u64,
        whole: bool,
        sync: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) {
        let body = Arc::downgrade(self);
        home.copy_store.begin_shared_sync(home.id);
        tokio::spawn(home.sync_and_record(len, whole, body, sync));
    }
}

impl SpoolFile {
    /// Syncs the file of a complete object of `len` bytes after a while, if it is still there, and records that.
    pub(crate) async fn sync_later(self, len: u64, body: Weak<SpooledBody>) {
        tokio::time::sleep(WHOLE_SYNC_DELAY).await;
        match self.copy_store.reopen(self.id) {
            Ok(file) => {
                self.copy_store.begin_shared_sync(self.id);
                self.sync_and_record(len, true, body, move || file.sync_data())
                    .await;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.on_failed_sync(&body, &error),
        }
    }

    /// Syncs the first `len` bytes, after `begin_shared_sync`, and records that. No thread waits for the journal: its task may have ended with the
    /// runtime, which waits for its threads.
    async fn sync_and_record(
        self,
        len: u64,
        whole: bool,
        body: Weak<SpooledBody>,
        sync: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) {
        let synced = tokio::task::spawn_blocking(sync).await;
        match synced.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(()) => {
                let progress = StoredProgress::synced_now(len, whole);
                let recorded = self.copy_store.record_progress(self.id, progress).await;
                match recorded {
                    Ok(()) => self.on_recorded(&body, whole),
                    Err(_) if body.strong_count() == 0 => self.copy_store.forget_version(self.id),
                    Err(_) => {}
                }
            }
            Err(error) => {
                self.copy_store.end_shared_sync(self.id, None, None);
                self.on_failed_sync(&body, &error);
            }
        }
    }

    /// Handles a record of the object's progress.
    fn on_recorded(&self, body: &Weak<SpooledBody>, whole: bool) {
        match body.upgrade() {
            Some(body) => {
                body.state.lock().noted = whole;
                drop(body);
                if whole {
                    self.copy_store.on_whole(self.id);
                }
            }
            None => self.copy_store.forget_version(self.id),
        }
    }

    /// Handles a sync that failed: nothing of the file can be believed now, and a second sync would say it is well.
    fn on_failed_sync(&self, body: &Weak<SpooledBody>, error: &io::Error) {
        let path = self.copy_store.path(self.id);
        tracing::error!(%error, path = %path.display(), "a copy is lost: its sync failed");
        if let Some(body) = body.upgrade() {
            body.fail(ResetCause::StoreFailed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc;
    use std::time::Duration;

    use cedos_lab_rig::wait::until;
    use d2tp_driver::Journal;
    use tokio_util::task::AbortOnDropHandle;

    use super::*;
    use crate::client_limits::ClientLimitTable;
    use crate::config::ProxConfig;
    use crate::copy_head::CopyHead;
    use crate::copy_store::CopyRecord;
    use crate::hibernated_copies::HibernatedCopies;
    use crate::pinned_copy::PinnedCopy;

    /// A copy with this body.
    fn copy_of(id: u64, body: &Arc<SpooledBody>) -> Arc<PinnedCopy> {
        let url = "http://origin.example/object";
        let record = CopyRecord {
            client: body.client(),
            asked_url: url.to_owned(),
            asked_headers: Vec::new(),
            status: 200,
            http2: false,
            headers: Vec::new(),
            url: url.to_owned(),
            redirected: false,
            origin_validator: None,
            own_tag: None,
            selected_by: Vec::new(),
            total: None,
            boot: 0,
        };
        let (head, request) = CopyHead::from_entry(&record).unwrap();
        Arc::new(PinnedCopy {
            id,
            head,
            body: body.clone(),
            request,
            cache: Weak::new(),
            listings: Mutex::default(),
            _fetch: AbortOnDropHandle::new(tokio::spawn(async {})),
        })
    }

    fn open_store(dir: &Path) -> Arc<CopyStore> {
        let journal = Arc::new(Journal::open(&dir.join("journal")).unwrap());
        CopyStore::open(dir, journal).unwrap()
    }

    /// An empty copy with the id 1 in a file of its own.
    fn named_body(dir: &Path, copy_store: Arc<CopyStore>) -> Arc<SpooledBody> {
        let config = ProxConfig::default();
        let clients = Arc::new(ClientLimitTable::new(&config));
        let ledger = Arc::new(QuotaLedger::new(&config, clients, false));
        let home = SpoolFile { copy_store, id: 1 };
        let body = SpooledBody::new(ledger, [9; 32], dir.to_owned(), 0, None, Some(home));
        Arc::new(body.unwrap())
    }

    #[tokio::test]
    async fn a_copy_that_is_read_as_it_arrives_is_removed_without_a_sync() {
        let dir = tempfile::tempdir().unwrap();
        let copy_store = open_store(dir.path());
        let body = named_body(dir.path(), copy_store.clone());
        let piece = vec![7; 8 << 20];
        for _ in 0..=SYNC_EVERY_BYTES / piece.len() as u64 {
            body.append(piece.clone().into()).await.unwrap();
        }
        body.finish();
        assert_eq!(body.state.lock().synced, 0);
        drop(body);
        assert!(!copy_store.path(1).exists());
        until("it is recorded", || copy_store.progress(1).whole).await;
        // sleep: that nothing happens is the subject
        tokio::time::sleep(WHOLE_SYNC_DELAY * 2).await;
        assert_eq!(copy_store.progress(1).unsynced_from, Some(0));

        let kept = named_body(dir.path(), copy_store.clone());
        kept.append(vec![7; 1_000].into()).await.unwrap();
        kept.finish();
        let is_synced = || {
            let progress = copy_store.progress(1);
            progress.synced == 1_000 && progress.unsynced_from.is_none()
        };
        until("it is synced", is_synced).await;
    }

    #[test]
    fn another_boot_of_the_machine_believes_only_what_was_synced() {
        let recorded = StoredProgress {
            boot: 7,
            unsynced_from: Some(600),
            ..StoredProgress::synced_now(1_000, true)
        };
        assert_eq!(recorded.as_of_boot(7), recorded);
        for other in [0, 8] {
            let known = recorded.as_of_boot(other);
            assert_eq!((known.synced, known.whole), (600, false));
            assert_eq!(known.unsynced_from, None);
        }
        let synced = StoredProgress {
            unsynced_from: None,
            ..recorded
        };
        assert_eq!(synced.as_of_boot(8), synced);
    }

    #[tokio::test]
    async fn a_copy_whose_record_is_made_after_its_flow_slept_leaves_memory_then() {
        let dir = tempfile::tempdir().unwrap();
        let copy_store = open_store(dir.path());
        let hibernated = Arc::<HibernatedCopies>::default();
        hibernated.follow_records(&copy_store);
        let body = named_body(dir.path(), copy_store);
        hibernated.add_flow(copy_of(1, &body));
        body.finish();
        hibernated.unload(1);
        let is_loaded = || hibernated.get(1).expect("a flow reads it").is_some();
        assert!(is_loaded(), "its record does not say yet that it is whole");
        until("it leaves memory", || !is_loaded()).await;
    }

    #[test]
    fn a_runtime_ends_while_a_copy_waits_for_the_journal() {
        let (tell, ended) = mpsc::channel();
        std::thread::spawn(move || {
            let dir = tempfile::tempdir().unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                // The journal's task does not run again before the runtime ends.
                named_body(dir.path(), open_store(dir.path())).sync();
            });
            drop(runtime);
            tell.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}
