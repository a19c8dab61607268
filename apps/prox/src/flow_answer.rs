//! An answer on a flow: written, watched until the flow has ended, and recorded so that the flow
//! may be hibernated.

use std::sync::Arc;

use d2tp_driver::{DatagramSender, FlowIo, SendSource};
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::answer::{self, AnswerSource};
use crate::flow_memo::FlowMemo;
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ServedFrom};
use crate::flow_watch::FlowWatch;
use crate::key_text::show_key;
use crate::pinned_copy::PinnedCopy;
use crate::prox::Prox;
use crate::refusal::ProxRefusal;
use crate::spooled_body::SpooledBody;

/// Whether the flow has a memo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoState {
    /// The flow gets a record now.
    New,
    /// The flow has a record: it was hibernated.
    Existing,
    /// The flow gets no record, and its session is not hibernated: nothing could be resumed.
    Never,
}

/// The part of an answer that is read from a copy.
pub(crate) struct AnswerPart<'a> {
    pub(crate) copy: &'a Arc<PinnedCopy>,
    /// The end of the part; none is the end of the copy.
    pub(crate) end: Option<u64>,
    /// Where reports on the server's supply go, if the device asked for them.
    pub(crate) reports_to: Option<DatagramSender>,
    /// Held until the copy is recorded, or cannot be.
    pub(crate) unrecorded: Option<TaskTrackerToken>,
}

/// Sends a response on the flow, and watches until the flow is over or its copy fails.
pub(crate) async fn send<F: FlowIo>(
    flow: &mut F,
    prox: &Prox,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    source: AnswerSource,
    part: Option<AnswerPart<'_>>,
    keeping: MemoState,
) -> ProxFlowOutcome {
    let traffic = record.traffic.clone();
    let source = Arc::new(source.metered(&traffic));
    let (copy, reports_to, mut unrecorded) = match part {
        Some(part) => (
            Some((part.copy, part.end)),
            part.reports_to,
            part.unrecorded,
        ),
        None => (None, None, None),
    };
    let id = flow.id();
    let reporting = traffic.supply.report(reports_to.as_ref(), id);
    let mut reporting = std::pin::pin!(reporting);
    let slept = keeping == MemoState::Existing;
    let mut is_settled = keeping != MemoState::New;
    if slept {
        flow.resume_source(source.clone() as Arc<dyn SendSource>);
    } else {
        flow.send_source(source.clone() as Arc<dyn SendSource>);
    }
    let memo = (keeping == MemoState::New).then(|| FlowMemo {
        copy: copy.map(|(copy, _)| copy.id),
        head: source.head().iter().map(|b| char::from(*b)).collect(),
        start: source.start(),
        end: copy.and_then(|(_, end)| end),
        status: record.status.unwrap_or(0),
        pinned: record.served == ServedFrom::PinnedCopy,
        asked: record.asked.clone(),
        reports_supply: reports_to.is_some(),
        tunnel: None,
    });
    // Only what the copy store knows can be promised.
    let stored = async {
        match (copy, &prox.copy_store, slept) {
            (Some((copy, _)), Some(copy_store), false) => {
                let total = copy.body.extent().total;
                let entry = copy.head.entry(copy.body.client(), &copy.request, total);
                copy_store.record_copy(copy.id, &entry).await.is_ok()
            }
            _ => true,
        }
    };
    let mut stored = std::pin::pin!(stored);
    let failed = async {
        match copy {
            Some((copy, end)) => copy.body.failed_before(end).await,
            None => std::future::pending().await,
        }
    };
    let mut failed = std::pin::pin!(failed);
    let outcome = loop {
        tokio::select! {
            gone = watch.gone(flow, prox) => break gone.outcome(),
            cause = &mut failed => break ProxFlowOutcome::Reset(cause),
            never = &mut reporting => match never {},
            is_stored = &mut stored, if !is_settled => {
                is_settled = true;
                if let (true, Some(memo)) = (is_stored, &memo) {
                    flow.allow_hibernation(memo.encode());
                }
                unrecorded = None;
            }
        }
    };
    drop(unrecorded);
    record.bytes_down = source.sent();
    outcome
}

/// Sends an error response.
pub(crate) async fn refuse<F: FlowIo>(
    flow: &mut F,
    prox: &Prox,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    refusal: &ProxRefusal,
    to_head: bool,
) -> ProxFlowOutcome {
    prox.counters.on_refusal(refusal);
    match refusal.limit() {
        Some(limit) => {
            let client = &show_key(&flow.peer())[..8];
            tracing::info!(flow = flow.id(), client, limit, reason = %refusal, "a limit was reached");
        }
        None => tracing::debug!(flow = flow.id(), reason = %refusal, "refused"),
    }
    record.status = Some(refusal.status());
    record.served = ServedFrom::Proxy;
    let source = AnswerSource::head_only(answer::refusal(refusal, to_head));
    send(flow, prox, watch, record, source, None, MemoState::New).await
}

/// Held while a task watches the flow to reset it with a cause. After it is dropped, the source reports
/// failures itself.
pub(crate) struct ResetGuard {
    here: Option<Arc<()>>,
    pin: Arc<SpooledBody>,
}

impl ResetGuard {
    pub(crate) fn of(copy: &PinnedCopy) -> ResetGuard {
        ResetGuard {
            here: Some(Arc::new(())),
            pin: copy.body.clone(),
        }
    }

    pub(crate) fn token(&self) -> std::sync::Weak<()> {
        self.here.as_ref().map(Arc::downgrade).unwrap_or_default()
    }
}

impl Drop for ResetGuard {
    fn drop(&mut self) {
        self.here = None;
        self.pin.wake();
    }
}
