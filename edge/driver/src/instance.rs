//! A device's instance: its number, its epochs and the record of its session, in a file that one
//! process owns.
//!
//! ```text
//!  DIR/<number>.journal ── lock ──▶ epochs reserved in steps, before use
//!        │                           record and flows, so that the next process claims them
//!        └── no flow of it is wanted any more? the next process takes it over, and first informs
//!            the server that those flows are over
//! ```
//!
//! So the server learns of a flow that was given up without a network from the next process that
//! has one.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{FlowId, PublicKey, SessionRecord};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::journal::{
    Journal, JournalBatch, JournalError, JournalFlowKey, JournalSessionKey, StoredRecord,
};
use crate::secrets::seed;

/// The number of epochs reserved at once: one sync for each thousand SYNs, which take eight hours
/// on a dead network.
const EPOCH_STEP: u32 = 1024;
/// The most existing instances that are tried before a new one is created.
const LOOKED_AT_MAX: usize = 256;
/// How long a journal may remain without a name before it is removed: creating one takes milliseconds.
const UNNAMED_FOR_MAX: Duration = Duration::from_secs(3600);
/// The reset code of a flow that no process wants any more.
pub const FORGOTTEN: u64 = 0xd102;

const OWNERS: &[u8] = b"owners";
const EPOCHS: &[u8] = b"epochs";

/// A flow to claim. All bytes below `received` are stored by this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstanceClaim {
    /// The flow's id.
    pub flow: u64,
    /// The offset from which the server is to continue sending.
    pub received: u64,
}

/// One instance of a device towards one server, owned by this process.
#[derive(Debug)]
pub struct Instance {
    journal: Journal,
    key: JournalSessionKey,
}

/// The device's journal of its own session.
pub(crate) struct InstanceUpkeep {
    pub(crate) instance: Arc<Instance>,
    pub(crate) upkeep: JoinHandle<()>,
    /// Flows that are kept beyond this process, with the memo of each.
    pub(crate) kept_flows: Mutex<Vec<(FlowId, Bytes)>>,
}

impl Drop for InstanceUpkeep {
    fn drop(&mut self) {
        self.upkeep.abort();
    }
}

impl Instance {
    /// Takes an instance in `dir` that no other process has: number `first` if given and possible,
    /// else one whose flows are all not `wanted` any more (by its number, the flow's id and its
    /// memo), else a new one. Blocks.
    ///
    /// # Errors
    /// The disk failed. A damaged file is skipped.
    pub fn take(
        dir: &Path,
        device: PublicKey,
        server: PublicKey,
        first: Option<u64>,
        wanted: impl Fn(u64, u64, &[u8]) -> bool,
    ) -> Result<Instance, JournalError> {
        let owners = [device.0, server.0].concat();
        let open = |number: u64| {
            let path = file_of(dir, number);
            let journal = match path.exists().then(|| Journal::open(&path)) {
                Some(Ok(journal)) => journal,
                Some(Err(error)) => {
                    if !matches!(error, JournalError::Taken { .. }) {
                        tracing::warn!(%error, "an instance cannot be used");
                    }
                    return None;
                }
                None => return None,
            };
            let ours = match journal.note(OWNERS).ok()? {
                Some(theirs) => theirs == owners,
                // The process that created it ended before it recorded an owner.
                None => own(&journal, &owners).is_ok(),
            };
            let key = JournalSessionKey {
                peer: server,
                instance: number,
            };
            ours.then_some(Instance { journal, key })
        };
        if let Some(instance) = first.and_then(open) {
            return Ok(instance);
        }
        for number in numbers(dir) {
            let Some(instance) = open(number) else {
                continue;
            };
            let mut free = true;
            instance
                .journal
                .memos(|key, memo| free &= !wanted(number, key.flow.0, memo))?;
            if free {
                return Ok(instance);
            }
        }
        let number = u64::from_be_bytes(seed()[..8].try_into().expect("eight of 32 bytes"));
        let journal = Journal::open(&file_of(dir, number))?;
        own(&journal, &owners)?;
        remove_unnamed(dir);
        Ok(Instance {
            journal,
            key: JournalSessionKey {
                peer: server,
                instance: number,
            },
        })
    }

    /// The instance number.
    pub fn number(&self) -> u64 {
        self.key.instance
    }

    /// The first epoch that no process has reserved, from an instance's journal.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn first_free_epoch(journal: &Journal) -> Result<Option<u32>, JournalError> {
        let told = journal.note(EPOCHS)?;
        Ok(told.and_then(|b| Some(u32::from_be_bytes(b.try_into().ok()?))))
    }

    /// R-HS-2: reserves epochs that no process has used, beginning at `from` or later.
    pub(crate) fn reserve(&self, from: u32) -> Result<std::ops::Range<u32>, JournalError> {
        let next = Instance::first_free_epoch(&self.journal)?;
        let start = next.unwrap_or(1).max(from);
        let end = start.saturating_add(EPOCH_STEP);
        let mut batch = JournalBatch::default();
        let value = Bytes::copy_from_slice(&end.to_be_bytes());
        batch.notes.insert(EPOCHS.to_vec(), Some(value));
        self.journal.commit(&batch)?;
        Ok(start..end)
    }

    /// The session as the last process left it, if there is one.
    pub(crate) fn record(&self) -> Result<Option<(SessionRecord, StoredRecord)>, JournalError> {
        let mut found = None;
        self.journal.sessions(|key, stored| {
            if key == self.key {
                found = SessionRecord::decode(&stored.record)
                    .ok()
                    .map(|r| (r, stored));
            }
        })?;
        Ok(found)
    }

    /// Writes the rest of the session to the journal: flows that are kept, and flows whose end the
    /// server does not know yet.
    pub(crate) fn write(
        &self,
        record: Option<SessionRecord>,
        kept: &[(FlowId, Bytes)],
    ) -> Result<(), JournalError> {
        let mut batch = JournalBatch::default();
        self.journal
            .memos(|key, _| drop(batch.memos.insert(key, None)))?;
        let record = record.filter(|record| !record.flows.is_empty());
        for (flow, memo) in kept {
            let session = self.key;
            let key = JournalFlowKey {
                session,
                flow: *flow,
            };
            let known = record.iter().flat_map(|r| &r.flows).any(|f| f.id == *flow);
            if known {
                batch.memos.insert(key, Some(memo.clone()));
            }
        }
        let stored = record.map(|record| StoredRecord::now(record.encode()));
        batch.sessions.insert(self.key, stored);
        self.journal.commit(&batch)
    }
}

fn file_of(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{number:016x}.journal"))
}

/// Records the owner of an instance before anything else, so that no epoch is used without it.
fn own(journal: &Journal, owners: &[u8]) -> Result<(), JournalError> {
    let mut batch = JournalBatch::default();
    let owners = Bytes::copy_from_slice(owners);
    batch.notes.insert(OWNERS.to_vec(), Some(owners));
    journal.commit(&batch)
}

/// Removes journals whose creation was interrupted before they had a name.
fn remove_unnamed(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let written = entry.metadata().and_then(|about| about.modified());
        let old = written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > UNNAMED_FOR_MAX));
        if old && path.extension().is_some_and(|kind| kind == "new") {
            let _ = fs::remove_file(path);
        }
    }
}

fn numbers(dir: &Path) -> Vec<u64> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let name = name.to_str()?.strip_suffix(".journal")?;
            u64::from_str_radix(name, 16).ok()
        })
        .take(LOOKED_AT_MAX)
        .collect()
}
