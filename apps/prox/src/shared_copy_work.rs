//! What a shared store has yet to hear of this process's copies.
//!
//! ```text
//!  for each copy, in this order:  hold ─▶ record ─▶ progress, the newest alone ─▶ let go
//! ```
//!
//! A few tasks write, and end when there is nothing to write: no thread waits for a store that is away, and a copy that
//! ends before the store has heard of it leaves nothing there, and no file.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use d2tp_driver::{JournalError, SharedRecords};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::copy_store::{AGAIN_AFTER, CopyNote, CopyStore, StoredProgress, name};

/// How many copies are written at once.
const WRITERS_MAX: usize = 64; // a guess

/// The tasks that wait until the store has recorded something.
type StoreWaiters = Vec<oneshot::Sender<()>>;

/// Copies of which the store has something, or has yet to hear of.
#[derive(Debug, Default)]
pub(crate) struct SharedCopyWork(Mutex<SharedCopyQueue>);

#[derive(Debug, Default)]
struct SharedCopyQueue {
    copies: HashMap<u64, SharedCopyState>,
    /// Copies to be written, each once.
    due: VecDeque<u64>,
    writers: usize,
}

/// Whether the store says that this process holds a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StoredHold {
    #[default]
    No,
    /// The store was asked to record the hold, and its answer is not known.
    Maybe,
    Yes,
}

#[derive(Debug, Default)]
struct SharedCopyState {
    /// Whether this process has the copy, and others may know of it.
    is_here: bool,
    hold: StoredHold,
    /// The tasks that wait until the copy is recorded as held.
    waiting: StoreWaiters,
    /// The record to be written once it is held.
    record: Option<(Bytes, StoreWaiters)>,
    progress: Option<(StoredProgress, StoreWaiters)>,
    /// Syncs of its file that have yet to say how they ended.
    syncs: usize,
    /// Versions whose files go with the copy: other nodes may still read them.
    old_versions: Vec<u64>,
    /// Whether the copy is in the queue, or is being written.
    is_due: bool,
}

/// The next operation on the store for a copy.
#[derive(Clone, Copy, Debug)]
enum StoreStep {
    Hold,
    Progress(StoredProgress),
    LetGo,
}

impl SharedCopyState {
    fn next(&mut self) -> Option<StoreStep> {
        if self.is_here && self.hold != StoredHold::Yes {
            self.hold = StoredHold::Maybe;
            return Some(StoreStep::Hold);
        }
        match &self.progress {
            Some((progress, _)) if self.hold == StoredHold::Yes => {
                return Some(StoreStep::Progress(*progress));
            }
            _ => {}
        }
        let is_over = !self.is_here && self.syncs == 0 && self.hold != StoredHold::No;
        is_over.then_some(StoreStep::LetGo)
    }
}

fn tell(waiting: StoreWaiters) {
    for one in waiting {
        let _ = one.send(());
    }
}

impl CopyStore {
    /// Changes what the store has to hear of a copy, and has it written.
    fn change_shared(self: &Arc<Self>, id: u64, change: impl FnOnce(&mut SharedCopyState)) {
        let Some(shared) = self.shared() else {
            return;
        };
        let mut queue = self.shared_work.0.lock();
        let state = queue.copies.entry(id).or_default();
        change(state);
        if !std::mem::replace(&mut state.is_due, true) {
            queue.due.push_back(id);
        }
        if queue.writers >= WRITERS_MAX {
            return;
        }
        // Without a runtime the process ends, and the next one of this node lets go.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            queue.writers += 1;
            runtime.spawn(write_shared(self.clone(), shared.clone()));
        }
    }

    /// Makes the store note that this process holds a copy; the receiver is ready when it has.
    pub(crate) fn hold_shared(self: &Arc<Self>, id: u64) -> oneshot::Receiver<()> {
        let (held, on_held) = oneshot::channel();
        self.change_shared(id, |state| {
            state.is_here = true;
            match state.hold {
                StoredHold::Yes => drop(held.send(())),
                _ => state.waiting.push(held),
            }
        });
        on_held
    }

    /// Records a copy of this process, after it is held.
    pub(crate) fn record_shared(
        self: &Arc<Self>,
        id: u64,
        json: Bytes,
        written: oneshot::Sender<()>,
    ) {
        let mut written = Some(written);
        let mut now = None;
        self.change_shared(id, |state| {
            state.is_here = true;
            if state.hold == StoredHold::Yes {
                now = Some(json);
                return;
            }
            let (newest, waiting) = state.record.get_or_insert_default();
            *newest = json;
            waiting.extend(written.take());
        });
        if let Some(json) = now {
            self.note(name(CopyNote::Copy, id), Some(json), written);
        }
    }

    /// Says that a sync of a copy's file begins, whose end [`Self::end_shared_sync`] tells.
    pub(crate) fn begin_shared_sync(self: &Arc<Self>, id: u64) {
        self.change_shared(id, |state| state.syncs += 1);
    }

    /// Says how far a sync came that began; none if it failed.
    pub(crate) fn end_shared_sync(
        self: &Arc<Self>,
        id: u64,
        progress: Option<StoredProgress>,
        written: Option<oneshot::Sender<()>>,
    ) {
        self.change_shared(id, |state| {
            state.syncs = state.syncs.saturating_sub(1);
            let Some(progress) = progress else {
                return;
            };
            match &mut state.progress {
                Some((held, waiting)) => {
                    // Syncs may end in another order.
                    if progress.synced > held.synced || progress.whole {
                        *held = progress;
                    }
                    waiting.extend(written);
                }
                held => *held = Some((progress, written.into_iter().collect())),
            }
        });
    }

    /// Says that the file with an old version of a copy goes with the copy.
    pub(crate) fn remove_old_version_later(self: &Arc<Self>, id: u64, version: u64) {
        self.change_shared(id, |state| state.old_versions.push(version));
    }

    /// Says that this process has a copy no more. The store tells who removes it; a copy that the store does not know is
    /// removed at once.
    pub(crate) fn let_go_shared(self: &Arc<Self>, id: u64) {
        let mut is_known = false;
        self.change_shared(id, |state| {
            is_known = state.hold != StoredHold::No;
            state.is_here = false;
            state.record = None;
            state.waiting.clear();
        });
        if !is_known {
            let _ = std::fs::remove_file(self.path(id));
            self.forget_version(id);
            if let Some(bucket) = self.bucket() {
                bucket.on_removal(id);
            }
        }
    }

    /// The next copy to be written; none if there is none, and the writer that asks ends.
    fn next_shared(&self) -> Option<u64> {
        let mut queue = self.shared_work.0.lock();
        let next = queue.due.pop_front();
        if next.is_none() {
            queue.writers -= 1;
        }
        next
    }

    /// Writes all that there is of a copy to the store.
    async fn write_copy(
        self: &Arc<Self>,
        shared: &Arc<dyn SharedRecords>,
        id: u64,
    ) -> Result<(), JournalError> {
        loop {
            let step = {
                let mut queue = self.shared_work.0.lock();
                let Some(state) = queue.copies.get_mut(&id) else {
                    return Ok(());
                };
                let Some(step) = state.next() else {
                    state.is_due = false;
                    let is_over = !state.is_here && state.syncs == 0;
                    if is_over && state.hold == StoredHold::No {
                        queue.copies.remove(&id);
                    }
                    return Ok(());
                };
                step
            };
            match step {
                StoreStep::Hold => {
                    shared.hold(id).await?;
                    self.on_held(id);
                }
                StoreStep::Progress(progress) => {
                    let is_ours = self.exchange_progress(shared, id, progress).await?;
                    self.on_progress(id, progress, is_ours);
                }
                StoreStep::LetGo => {
                    shared.let_go(id).await?;
                    self.on_let_go(id);
                }
            }
        }
    }

    fn on_held(&self, id: u64) {
        let mut queue = self.shared_work.0.lock();
        let Some(state) = queue.copies.get_mut(&id) else {
            return;
        };
        state.hold = StoredHold::Yes;
        let (waiting, record) = (std::mem::take(&mut state.waiting), state.record.take());
        drop(queue);
        tell(waiting);
        if let Some((json, waiting)) = record {
            self.note(name(CopyNote::Copy, id), Some(json), waiting);
        }
    }

    fn on_progress(&self, id: u64, written: StoredProgress, is_ours: bool) {
        let mut queue = self.shared_work.0.lock();
        let Some(state) = queue.copies.get_mut(&id) else {
            return;
        };
        let Some((newest, waiting)) = state.progress.take() else {
            return;
        };
        if !is_ours {
            tracing::warn!(id, "another node has taken over this copy");
        } else if newest == written {
            drop(queue);
            tell(waiting);
        } else {
            state.progress = Some((newest, waiting));
        }
    }

    fn on_let_go(&self, id: u64) {
        let mut queue = self.shared_work.0.lock();
        let Some(state) = queue.copies.get_mut(&id) else {
            return;
        };
        state.hold = StoredHold::No;
        state.progress = None;
        let old = std::mem::take(&mut state.old_versions);
        let is_here = state.is_here;
        drop(queue);
        for version in old {
            let _ = std::fs::remove_file(self.path_of_version(id, version));
        }
        if !is_here {
            self.forget_version(id);
        }
    }

    /// Puts a copy back that could not be written.
    fn put_shared_back(&self, id: u64) {
        let mut queue = self.shared_work.0.lock();
        let state = queue.copies.get(&id);
        let is_unknown = state.is_some_and(|state| {
            !state.is_here && state.syncs == 0 && state.hold == StoredHold::No
        });
        if is_unknown {
            queue.copies.remove(&id);
        } else {
            queue.due.push_back(id);
        }
    }
}

/// Writes what the store has to hear, until there is nothing.
async fn write_shared(copy_store: Arc<CopyStore>, shared: Arc<dyn SharedRecords>) {
    while let Some(id) = copy_store.next_shared() {
        if let Err(error) = copy_store.write_copy(&shared, id).await {
            tracing::debug!(%error, "a copy waits for the store");
            copy_store.put_shared_back(id);
            tokio::time::sleep(AGAIN_AFTER).await;
        }
    }
}
