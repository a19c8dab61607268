//! The hibernation and waking of flows, and what becomes of their copies.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use d2tp_driver::{FlowIo, HostKey, JournalError, Server};

use crate::answer::AnswerSource;
use crate::flow_answer::{AnswerPart, MemoState, ResetGuard, send};
use crate::flow_memo::{FlowMemo, SleepingTunnel};
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome};
use crate::flow_watch::FlowWatch;
use crate::packet_tunnel;
use crate::pinned_copy::PinnedCopy;
use crate::prox::Prox;
use crate::quota_ledger::StorageTier;
use crate::spooled_body::SpoolStatus;
use crate::tunnel;
use d2tp_driver::ResetCause;

impl Prox {
    /// The copy of a flow that was restored.
    fn rouse(&self, id: u64) -> Option<Arc<PinnedCopy>> {
        let (resting, last) = self.hibernated.remove_flow(id)?;
        if let Some(copy) = resting.copy {
            return Some(copy);
        }
        let copy = self.load_complete(id, resting.counted);
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
    pub(crate) fn hibernate_copy(&self, copy: Arc<PinnedCopy>) {
        if self.shared_records().is_some() {
            return self.finish_shared(copy);
        }
        let id = copy.id;
        self.hibernated.add_flow(copy);
        if self.copy_store.is_some() {
            self.hibernated.unload(id);
        }
    }

    /// Handles a flow that expired while it was hibernated.
    pub(crate) fn on_flow_expired(&self, client: HostKey, memo: &[u8]) {
        if self.shared_records().is_some() {
            return; // The store counts who needs the copy.
        }
        drop(self.ledger.readmit_hibernated(client));
        match FlowMemo::decode(memo).and_then(|memo| memo.tunnel) {
            Some(SleepingTunnel::Connection(number)) => self.sleeping_tunnels.remove(number),
            Some(SleepingTunnel::Packets(number)) => {
                if let Some(network) = self.packet_network.get() {
                    network.forget_sleeping(number);
                }
            }
            None => {}
        }
        let Some(id) = FlowMemo::decode(memo).and_then(|memo| memo.copy) else {
            return;
        };
        if let Some((resting, true)) = self.hibernated.remove_flow(id) {
            match (resting.copy, &self.copy_store) {
                (None, Some(copy_store)) => {
                    copy_store.remove(id);
                    self.ledger
                        .release(resting.client, StorageTier::Disk, resting.counted);
                }
                (copy, _) => drop(copy),
            }
        }
    }

    /// Frees what expired hibernated flows held, until the server stops.
    pub async fn watch_expired_flows(self: Arc<Prox>, server: Arc<Server>) {
        while let Some((client, memo)) = server.next_expired().await {
            self.on_flow_expired(client, &memo);
        }
    }

    /// Keeps copies where they are when the process ends, also by an error.
    pub fn keep_copies_at_exit(self: &Arc<Prox>) -> KeptCopies {
        KeptCopies(self.clone())
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

/// Leaves copies to the next process when it is dropped, however this one ends: nobody here reads them any more, and
/// that must not free them.
pub struct KeptCopies(Arc<Prox>);

impl Drop for KeptCopies {
    fn drop(&mut self) {
        if let Some(copy_store) = &self.0.copy_store {
            copy_store.close();
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
    if prox.shared_records().is_some() {
        prox.ledger.count_hibernated(flow.peer());
    }
    let permit = prox.ledger.readmit_hibernated(flow.peer());
    flow.limit_moved_deadlines(prox.deadline_max(&flow.peer()));
    let lost = ProxFlowOutcome::Reset(ResetCause::StoreFailed);
    let Some(memo) = FlowMemo::decode(&memo) else {
        return lost;
    };
    record.asked.clone_from(&memo.asked);
    record.status = Some(memo.status);
    record.served = memo.served();
    if let Some(tunnel) = memo.tunnel {
        let reports_to = flow.datagram_sender().filter(|_| memo.reports_supply);
        let outcome = match tunnel {
            SleepingTunnel::Connection(number) => {
                tunnel::resume(flow, prox, record, number, reports_to).await
            }
            SleepingTunnel::Packets(number) => {
                packet_tunnel::resume(flow, prox, record, number).await
            }
        };
        prox.settle_permit(permit, &outcome);
        return outcome;
    }
    let Some(head) = memo.head_bytes() else {
        return lost;
    };
    let mut watch = FlowWatch::new(prox, &record.traffic);
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
        prox.settle_permit(permit, &outcome);
        return outcome;
    };
    let copy = match prox.shared_records() {
        // It goes on if the flow does not wait for it: what was begun is ended, or let go.
        Some(_) => {
            let (prox_there, id) = (prox.clone(), id);
            let rousing = tokio::spawn(async move { prox_there.rouse_shared(id).await });
            tokio::select! {
                copy = rousing => copy.ok().flatten(),
                gone = watch.gone(flow, prox) => {
                    let outcome = gone.outcome();
                    prox.settle_permit(permit, &outcome);
                    return outcome;
                }
            }
        }
        None => prox.rouse(id),
    };
    let Some(copy) = copy else {
        return lost;
    };
    let attendance = ResetGuard::of(&copy);
    let token = attendance.token();
    let source = AnswerSource::of_copy(head, copy.clone(), memo.start, memo.end, token);
    let part = AnswerPart {
        copy: &copy,
        end: memo.end,
        reports_to: flow.datagram_sender().filter(|_| memo.reports_supply),
        unrecorded: None,
    };
    let part = Some(part);
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
    prox.settle_permit(permit, &outcome);
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
    copy.body.sweep(Arc::strong_count(&copy));
    let client = flow.peer();
    let intact = !matches!(copy.body.extent().status, SpoolStatus::Failed(_));
    if *outcome == ProxFlowOutcome::Hibernated {
        prox.hibernate_copy(copy);
    } else if matches!(outcome, ProxFlowOutcome::Broken(_))
        && intact
        && prox.is_client(&client)
        && copy.head.status == http::StatusCode::OK
    {
        // After the flow's deadline nobody wants it.
        let grace = flow
            .deadline_left()
            .map_or(prox.config().keep, |left| left.min(prox.config().keep));
        if !grace.is_zero() {
            prox.tell_retained(client, &copy, grace);
        }
        prox.retained
            .retain(client, copy, grace, prox.config().client_kept_max);
    } else {
        copy.on_reader_gone();
    }
}
