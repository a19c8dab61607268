//! Flows that fall asleep and wake: what becomes of their copies, and how a new process takes both up.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use d2tp_driver::{FlowIo, HostKey, Journal, JournalError, Server};

use crate::answer::AnswerSource;
use crate::copy_store::StoredProgress;
use crate::flow_answer::{MemoState, ResetGuard, send};
use crate::flow_memo::FlowMemo;
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome};
use crate::flow_watch::FlowWatch;
use crate::pinned_copy::{CopyHead, PinnedCopy};
use crate::prox::Prox;
use crate::quota_ledger::StorageTier;
use crate::spooled_body::{RestoredBody, SpoolFile, SpoolStatus, SpooledBody};
use d2tp_driver::ResetCause;

impl Prox {
    /// Takes up what the journal holds: copies that sleeping flows will read are here again, those
    /// half fetched are fetched on, the rest is let go of. Returns how many copies.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn restore_from_journal(&self, journal: &Journal) -> Result<usize, JournalError> {
        let Some(copy_store) = &self.copy_store else {
            return Ok(0);
        };
        let mut flows: HashMap<u64, u32> = HashMap::new();
        journal.memos(|key, bytes| {
            self.ledger.count_hibernated(key.session.peer.0);
            if let Some(id) = FlowMemo::decode(bytes).and_then(|memo| memo.copy) {
                *flows.entry(id).or_default() += 1;
            }
        })?;
        copy_store.retain_only(|id| flows.contains_key(&id))?;
        let mut here = 0;
        for (id, flows) in flows {
            let Some((entry, progress)) = copy_store.record(id) else {
                continue; // Its flows are reset when they wake.
            };
            let Ok(file) = std::fs::metadata(copy_store.path(id)) else {
                continue;
            };
            let boot = d2tp_driver::boot();
            // In the same boot what was written is there, synced or not.
            let same = boot != 0 && (entry.boot == boot || progress.boot == boot);
            let have = if same {
                file.len()
            } else {
                progress.synced.min(file.len())
            };
            let whole = progress.whole && have >= progress.synced;
            let counted = entry.total.unwrap_or(0).max(have);
            if self
                .ledger
                .reserve(entry.client, StorageTier::Disk, counted)
                .is_err()
            {
                tracing::warn!(id, "a copy no longer fits the quotas");
                continue;
            }
            here += 1;
            self.hibernated.restore(id, flows, entry.client, counted);
            if !whole {
                let synced = if same { progress.synced } else { have };
                let progress = StoredProgress {
                    synced,
                    whole,
                    boot,
                };
                drop(copy_store.record_progress(id, progress));
                if let Some(copy) = self.load(id, counted, Some(have)) {
                    self.hibernated.set_loaded(&copy);
                }
            }
        }
        Ok(here)
    }

    /// Loads a copy from the copy store; `have` bytes of it, or all.
    fn load(&self, id: u64, counted: u64, have: Option<u64>) -> Option<Arc<PinnedCopy>> {
        let copy_store = self.copy_store.clone()?;
        let (entry, progress) = copy_store.record(id)?;
        let (head, asked) = CopyHead::from_entry(&entry)?;
        let whole = have.is_none();
        let found = RestoredBody {
            have: have.unwrap_or(progress.synced),
            counted,
            total: if whole {
                Some(progress.synced)
            } else {
                entry.total
            },
            whole,
        };
        let home = SpoolFile { copy_store, id };
        let pin = SpooledBody::restore(self.ledger.clone(), entry.client, home, found)
            .inspect_err(|error| tracing::error!(%error, "a copy is lost"))
            .ok()?;
        let copy = self.start_fetch(entry.client, id, head, Arc::new(pin), asked, None);
        self.retained.list(entry.client, &entry.asked_url, &copy);
        Some(copy)
    }

    /// The copy of a flow that was restored.
    fn rouse(&self, id: u64) -> Option<Arc<PinnedCopy>> {
        let (resting, last) = self.hibernated.remove_flow(id)?;
        if let Some(copy) = resting.copy {
            return Some(copy);
        }
        let copy = self.load(id, resting.counted, None);
        match &copy {
            Some(copy) if !last => self.hibernated.set_loaded(copy),
            None if last => self
                .ledger
                .release(resting.client, StorageTier::Disk, resting.counted),
            _ => {}
        }
        copy
    }

    /// Bytes of a hibernated flow, from `offset` on, without restoring the flow.
    pub fn peek(&self, memo: &[u8], offset: u64, max: usize) -> Option<Bytes> {
        let memo = FlowMemo::decode(memo)?;
        let head = memo.head_bytes()?;
        let body = offset.checked_sub(head.len() as u64);
        let Some(body) = body else {
            let from = usize::try_from(offset).ok()?;
            let to = head.len().min(from.saturating_add(max));
            return Some(Bytes::copy_from_slice(&head[from..to]));
        };
        let at = memo.start.checked_add(body)?;
        let left = memo.end.map_or(u64::MAX, |end| end.saturating_sub(at));
        let max = usize::try_from(left).unwrap_or(usize::MAX).min(max);
        let id = memo.copy?;
        match self.hibernated.get(id)? {
            Some(copy) => {
                let mut nobody = Context::from_waker(Waker::noop());
                match copy.body.poll_read_at(&mut nobody, at, max) {
                    Poll::Ready(read) => read.ok(),
                    Poll::Pending => None,
                }
            }
            None => self.copy_store.as_ref()?.peek(id, at, max),
        }
    }

    /// Records that a flow which reads this copy hibernated.
    pub(crate) fn hibernate_copy(&self, client: HostKey, copy: Arc<PinnedCopy>) {
        let id = copy.id;
        self.hibernated.add_flow(client, copy);
        if self.copy_store.is_some() {
            self.hibernated.unload(id);
        }
    }

    /// Handles a flow that expired while it was hibernated.
    pub(crate) fn on_flow_expired(&self, client: HostKey, memo: &[u8]) {
        drop(self.ledger.readmit_hibernated(client));
        let Some(id) = FlowMemo::decode(memo).and_then(|memo| memo.copy) else {
            return;
        };
        if let Some((resting, true)) = self.hibernated.remove_flow(id) {
            match (resting.copy, &self.copy_store) {
                (None, Some(copy_store)) => {
                    copy_store.remove(id);
                    self.ledger
                        .release(client, StorageTier::Disk, resting.counted);
                }
                (copy, _) => drop(copy),
            }
            self.retained.remove_if_empty(client);
        }
    }

    /// Frees what expired hibernated flows held, until the server stops.
    pub async fn watch_expired_flows(self: Arc<Prox>, server: Arc<Server>) {
        while let Some((client, memo)) = server.next_expired().await {
            self.on_flow_expired(client, &memo);
        }
    }

    /// From now on copies stay where they are, for the next process.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub async fn persist_copies(&self) -> Result<(), JournalError> {
        match &self.copy_store {
            Some(copy_store) => {
                copy_store.close();
                copy_store.flush().await
            }
            None => Ok(()),
        }
    }
}

/// Serves a restored flow, from the offset that its device states.
pub(crate) async fn serve_resumed<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    record: &mut FlowLogRecord,
    memo: Bytes,
) -> ProxFlowOutcome {
    let permit = prox.ledger.readmit_hibernated(flow.peer());
    let lost = ProxFlowOutcome::Reset(ResetCause::StoreFailed);
    let Some(memo) = FlowMemo::decode(&memo) else {
        return lost;
    };
    record.asked.clone_from(&memo.asked);
    record.status = Some(memo.status);
    record.served = memo.served();
    let Some(head) = memo.head_bytes() else {
        return lost;
    };
    let mut watch = FlowWatch::new(prox);
    let Some(id) = memo.copy else {
        let source = AnswerSource::head_only(head);
        let outcome = send(
            flow,
            prox,
            &mut watch,
            record,
            source,
            None,
            MemoState::Existing,
        )
        .await;
        permit.settle(&outcome);
        return outcome;
    };
    let Some(copy) = prox.rouse(id) else {
        return lost;
    };
    let attendance = ResetGuard::of(&copy);
    let token = attendance.token();
    let source = AnswerSource::of_copy(head, copy.clone(), memo.start, memo.end, token);
    let part = Some((&copy, memo.end));
    let outcome = send(
        flow,
        prox,
        &mut watch,
        record,
        source,
        part,
        MemoState::Existing,
    )
    .await;
    drop(attendance);
    permit.settle(&outcome);
    retain_copy(flow, prox, &outcome, copy);
    outcome
}

/// Decides what happens to a copy when its flow no longer needs it.
pub(crate) fn retain_copy<F: FlowIo>(
    flow: &F,
    prox: &Prox,
    outcome: &ProxFlowOutcome,
    copy: Arc<PinnedCopy>,
) {
    let client = flow.peer();
    let intact = !matches!(copy.body.extent().status, SpoolStatus::Failed(_));
    if *outcome == ProxFlowOutcome::Hibernated {
        prox.hibernate_copy(client, copy);
    } else if matches!(outcome, ProxFlowOutcome::Broken(_))
        && intact
        && copy.head.status == http::StatusCode::OK
    {
        // After the flow's deadline nobody wants it.
        let grace = flow
            .deadline_left()
            .map_or(prox.config.keep, |left| left.min(prox.config.keep));
        prox.retained
            .retain(client, copy, grace, prox.config.client_kept_max);
    } else {
        drop(copy);
        prox.retained.remove_if_empty(client);
    }
}
