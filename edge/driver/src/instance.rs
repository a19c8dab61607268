//! A device's instance: its number, its epochs and its session's record, in a file that one process owns.
//!
//! ```text
//!  DIR/<number>.journal ── lock ──▶ epochs reserved in steps, before use
//!        │                           record and flows, so that the next process claims them
//!        └── no flow of it is wanted any more? the next process takes it over, and its first words
//!            to the server are that those flows are over
//! ```
//!
//! So a flow that was given up without a network is told of at the next one, by whatever process
//! comes then.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{
    FlowId, FlowRecord, PublicKey, ReasonCode, SessionEvent, SessionId, SessionRecord, Time,
};
use parking_lot::Mutex;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::task::JoinHandle;

use crate::attach::KernelLinks;
use crate::clock;
use crate::device::{Device, DeviceOptions};
use crate::engine::{DriverError, DriverShared, FlowEntry};
use crate::flow::Flow;
use crate::journal::{
    Journal, JournalBatch, JournalError, JournalFlowKey, JournalSessionKey, StoredRecord,
};
use crate::server::{CLOSE_GRACE, seed};

/// Epochs reserved at once: a sync for each thousand SYNs, which on a dead network is one in eight
/// hours.
const EPOCH_STEP: u32 = 1024;
/// How long a journal that could not reserve epochs is left alone.
const AGAIN_AFTER: Duration = Duration::from_secs(5); // a guess
/// Instances looked at before another one is made.
const LOOKED_AT_MAX: usize = 256;
/// A journal is made in milliseconds: one that has no name after so long will not get one.
const UNNAMED_FOR_MAX: Duration = Duration::from_secs(3600);
/// Reset code of a flow that nobody wants any more.
pub const FORGOTTEN: u64 = 0xd102;

const OWNERS: &[u8] = b"owners";
const EPOCHS: &[u8] = b"epochs";

/// A flow to be claimed: all bytes below `received` are safe here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstanceClaim {
    /// Its id.
    pub flow: u64,
    /// Where the server's sending goes on.
    pub received: u64,
}

/// One instance of a device towards one server, owned by this process.
#[derive(Debug)]
pub struct Instance {
    journal: Journal,
    key: JournalSessionKey,
}

/// What a device writes down of itself.
pub(crate) struct InstanceUpkeep {
    instance: Arc<Instance>,
    upkeep: JoinHandle<()>,
    /// Flows that are wanted beyond this process, with what is noted of each.
    kept_flows: Mutex<Vec<(FlowId, Bytes)>>,
}

impl Drop for InstanceUpkeep {
    fn drop(&mut self) {
        self.upkeep.abort();
    }
}

impl Instance {
    /// Takes an instance in `dir` that nobody else has: number `first` if given and possible, else
    /// one of which no flow is `wanted` any more (by its number, the flow's id and what was kept of
    /// it), else a new one. Blocks.
    ///
    /// # Errors
    /// The disk. A damaged file is passed over.
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
                // Its maker was ended before it was anybody's.
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

    /// The first epoch that no process has reserved, by an instance's journal.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn first_free_epoch(journal: &Journal) -> Result<Option<u32>, JournalError> {
        let told = journal.note(EPOCHS)?;
        Ok(told.and_then(|b| Some(u32::from_be_bytes(b.try_into().ok()?))))
    }

    // R-HS-2
    /// Reserves epochs that no process has used, from `from` on at least.
    fn reserve(&self, from: u32) -> Result<std::ops::Range<u32>, JournalError> {
        let next = Instance::first_free_epoch(&self.journal)?;
        let start = next.unwrap_or(1).max(from);
        let end = start.saturating_add(EPOCH_STEP);
        let mut batch = JournalBatch::default();
        let value = Bytes::copy_from_slice(&end.to_be_bytes());
        batch.notes.insert(EPOCHS.to_vec(), Some(value));
        self.journal.commit(&batch)?;
        Ok(start..end)
    }

    fn record(&self) -> Result<Option<(SessionRecord, StoredRecord)>, JournalError> {
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

    /// Writes down what is left of the session: flows that are kept, and those whose end the
    /// server does not know yet.
    fn write(
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

/// Notes whose an instance is: before anything else, so that no epoch of it was used without.
fn own(journal: &Journal, owners: &[u8]) -> Result<(), JournalError> {
    let mut batch = JournalBatch::default();
    let owners = Bytes::copy_from_slice(owners);
    batch.notes.insert(OWNERS.to_vec(), Some(owners));
    journal.commit(&batch)
}

/// Removes journals whose makers were ended before they had a name.
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

impl Device {
    /// A device that goes on as `instance`: with the flow it claims, if its record is there. The
    /// server is told that the record's other flows are over. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The server's name has no address, or the journal cannot be used.
    pub async fn resume(
        options: DeviceOptions,
        instance: Arc<Instance>,
        claim: Option<InstanceClaim>,
    ) -> Result<(Device, Option<Flow>), DriverError> {
        let at_work = instance.clone();
        let read = move || -> Result<_, JournalError> {
            let found = at_work.record()?;
            let after = found.as_ref().map_or(0, |(r, _)| r.epoch.saturating_add(1));
            Ok((found, at_work.reserve(after)?))
        };
        let (found, epochs) = blocking(read).await?;
        let mut record = found.map(|(mut record, stored)| {
            let age = stored.age();
            // Whoever comes next has something to say.
            record.closing = None;
            for flow in &mut record.flows {
                flow.deadline_left = flow.deadline_left.map(|left| left.saturating_sub(age));
                if let Some(claim) = claim.filter(|c| c.flow == flow.id.0) {
                    take_claim(flow, claim);
                }
            }
            record
        });
        let server = options.server.key;
        let number = instance.number();
        let claimed = claim.map(|c| FlowId(c.flow)).filter(|id| {
            let flows = record.iter().flat_map(|r| &r.flows);
            flows.clone().any(|f| f.id == *id)
        });
        let given_up: Vec<FlowId> = record
            .iter_mut()
            .flat_map(|r| &r.flows)
            .map(|f| f.id)
            .filter(|id| Some(*id) != claimed)
            .collect();
        let bytes = record.map(|r| r.encode());
        let mut device = Device::begin(options, Arc::new(KernelLinks), move |core| {
            let now = clock::now();
            let restored = bytes.and_then(|b| core.restore(now, &b, epochs.clone()).ok());
            let id = restored.unwrap_or_else(|| core.connect(now, server, number, epochs));
            let _ = core.with(id, |s| {
                for flow in given_up {
                    s.reset(flow, FORGOTTEN);
                    s.stop(flow, FORGOTTEN);
                }
            });
            Ok(id)
        })
        .await?;
        let (shared, session, peer) = device.parts();
        let flow = claimed.map(|id| {
            let mut inner = shared.inner.lock();
            inner.flows.insert((session, id), FlowEntry::default());
            Flow::new(shared.clone(), session, id, peer)
        });
        let events = shared.events.subscribe();
        let upkeep = tokio::spawn(upkeep(
            shared.clone(),
            session,
            Arc::downgrade(&instance),
            events,
        ));
        device.instance_upkeep = Some(InstanceUpkeep {
            instance,
            upkeep,
            kept_flows: Mutex::default(),
        });
        Ok((device, flow))
    }

    /// Writes down that the flow is wanted beyond this process, with what is needed to go on with
    /// it. False if it is too early for that: the server has not taken all that was written.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub async fn persist_flow(&self, flow: u64, memo: Bytes) -> Result<bool, DriverError> {
        let Some(keeping) = &self.instance_upkeep else {
            return Ok(false);
        };
        let (shared, session, _) = self.parts();
        let id = FlowId(flow);
        let record = {
            let inner = shared.inner.lock();
            inner
                .core
                .session(session)
                .filter(|s| s.is_flushed(id) && s.flow_ids().contains(&id))
                .map(|s| s.record(clock::now(), true))
        };
        let Some(record) = record else {
            return Ok(false);
        };
        let kept = {
            let mut kept = keeping.kept_flows.lock();
            kept.retain(|(known, _)| *known != id);
            kept.push((id, memo));
            kept.clone()
        };
        let instance = keeping.instance.clone();
        blocking(move || instance.write(Some(record), &kept)).await?;
        Ok(true)
    }

    /// Whether it has an instance that outlives it.
    pub fn has_instance(&self) -> bool {
        self.instance_upkeep.is_some()
    }

    /// Whether the server knows the end of every flow that is over.
    pub fn is_settled(&self) -> bool {
        let (shared, session, _) = self.parts();
        let inner = shared.inner.lock();
        inner
            .core
            .session(session)
            .is_none_or(|s| s.flow_ids().is_empty())
    }

    /// Leaves without ending the session: what was remembered and is not over is there for the next
    /// process, and so is what the server still has to be told.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub async fn leave(mut self) -> Result<(), DriverError> {
        let (shared, session, _) = self.parts();
        let now = clock::now();
        let record = {
            let mut inner = shared.inner.lock();
            let links: Vec<_> = inner.sockets.keys().copied().collect();
            let _ = inner.core.with(session, |s| {
                for link in links {
                    s.close_path(now, link, ReasonCode::NoPath);
                }
            });
            inner.core.session(session).map(|s| s.record(now, true))
        };
        shared.wake();
        if let Some(keeping) = &self.instance_upkeep {
            let (instance, kept) = (keeping.instance.clone(), keeping.kept_flows.lock().clone());
            blocking(move || instance.write(record, &kept)).await?;
        }
        // The last word on each path leaves in the task's next turn.
        tokio::time::sleep(CLOSE_GRACE).await;
        if let Some(keeping) = &mut self.instance_upkeep {
            // Whoever comes next finds the instance free.
            keeping.upkeep.abort();
            let _ = (&mut keeping.upkeep).await;
        }
        Ok(())
    }

    /// The session is over: nothing of it is kept.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub async fn forget(&self) -> Result<(), DriverError> {
        match &self.instance_upkeep {
            Some(keeping) => {
                keeping.kept_flows.lock().clear();
                let instance = keeping.instance.clone();
                blocking(move || instance.write(None, &[])).await
            }
            None => Ok(()),
        }
    }
}

/// Changes of a deadline that another process may have told and not written down.
const DEADLINES_SKIPPED: u64 = 1 << 20;

fn take_claim(flow: &mut FlowRecord, claim: InstanceClaim) {
    // Nothing ends here before the server was asked, however long it was; whoever claims says anew
    // how long there is, and that must count.
    flow.deadline_left = None;
    flow.deadline_seq = (flow.deadline_seq + DEADLINES_SKIPPED).min(1 << 60);
    flow.received_to = claim.received;
    flow.receive_end = None;
    flow.receive_complete = false;
}

async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, JournalError> + Send + 'static,
) -> Result<R, DriverError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Reserves more epochs when the session has used up those it had: until then nothing wakes.
async fn upkeep(
    shared: Arc<DriverShared>,
    session: SessionId,
    instance: Weak<Instance>,
    mut events: broadcast::Receiver<(Time, SessionEvent)>,
) {
    loop {
        let left = {
            let inner = shared.inner.lock();
            inner.core.session(session).map(|s| s.epochs_left())
        };
        let Some(left) = left else { return };
        if left.is_empty() {
            // Its file is free for another process as soon as the device is gone.
            let Some(instance) = instance.upgrade() else {
                return;
            };
            match blocking(move || instance.reserve(left.start)).await {
                // Where there are no more, the session ends and says so.
                Ok(more) => {
                    shared.with(session, |s| s.add_epochs(more.end));
                }
                Err(error) => {
                    tracing::error!(%error, "the device cannot call: no more epochs can be reserved");
                    tokio::time::sleep(AGAIN_AFTER).await;
                    continue;
                }
            }
        }
        loop {
            match events.recv().await {
                Ok((_, SessionEvent::EpochsUsedUp)) | Err(RecvError::Lagged(_)) => break,
                Ok(_) => {}
                Err(RecvError::Closed) => return,
            }
        }
    }
}
