//! Objects whose file has a name: they outlive the process, and what is known of the file is noted.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use d2tp_driver::HostKey;
use parking_lot::Mutex;

use super::{SpoolState, SpoolStatus, SpoolStorage, SpooledBody};
use crate::copy_store::{CopyStore, SYNC_EVERY_BYTES, StoredProgress};
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
            store: SpoolStorage::Disk(Arc::new(file)),
            len: found.have,
            counted: found.counted,
            total: found.total,
            status: if found.whole {
                SpoolStatus::Complete
            } else {
                SpoolStatus::Growing
            },
            waiting: Vec::new(),
            synced: found.have,
            noted: found.whole,
            stays: false,
        };
        Ok(SpooledBody {
            ledger,
            client,
            state_dir: PathBuf::new(),
            memory_max: 0,
            named_file: Some(home),
            state: Mutex::new(state),
        })
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

    /// The client that the file's bytes are charged to.
    pub(crate) fn client(&self) -> HostKey {
        self.client
    }

    /// Syncs a named file and records it, if it is time.
    pub(super) fn sync(self: &Arc<SpooledBody>) {
        let Some(home) = self.named_file.clone() else {
            return;
        };
        let mut state = self.state.lock();
        let whole = state.status == SpoolStatus::Complete;
        if !whole && state.len < state.synced + SYNC_EVERY_BYTES {
            return;
        }
        state.synced = state.len;
        let len = state.len;
        let SpoolStorage::Disk(file) = &state.store else {
            return;
        };
        let (file, pin) = (file.clone(), Arc::downgrade(self));
        drop(state);
        tokio::task::spawn_blocking(move || match file.sync_data() {
            Ok(()) => {
                let progress = StoredProgress {
                    synced: len,
                    whole,
                    boot: d2tp_driver::boot(),
                };
                let told = home.copy_store.record_progress(home.id, progress);
                if told.blocking_recv().is_ok()
                    && let Some(pin) = pin.upgrade()
                {
                    pin.state.lock().noted = whole;
                }
            }
            Err(error) => {
                // Nothing of the file can be believed now; a second sync would say it is well.
                let path = home.copy_store.path(home.id);
                tracing::error!(%error, path = %path.display(), "a copy is lost: its sync failed");
                if let Some(pin) = pin.upgrade() {
                    pin.fail(ResetCause::StoreFailed);
                }
            }
        });
    }
}
