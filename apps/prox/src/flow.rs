//! One flow from its first byte to its end.
//!
//! ```text
//! admit ─▶ read head ─▶ parse ─┬─ CONNECT ──▶ tunnel.rs
//!                              ├─ RELAY, LISTEN ▶ relay.rs
//!                              ├─ PUT, POST ─▶ upload.rs ─▶ ask the origin ─▶ ─┐
//!                              └─ GET, HEAD ─▶ shelf or origin ─▶ part ─▶ send_source ─▶ watch
//!                                                                                        │
//!        delivered: free · deadline: free · broken: keep the copy for a while · fetch failed: reset
//! ```

use std::sync::Arc;
use std::time::Duration;

use cedos_http::ByteRanges;
use d2tp_driver::{FlowIo, SendSource};
use tokio::time::Instant;

use crate::answer::{self, AnswerSource, ServedFrom};
use crate::flow_hibernation;
use crate::flow_watch::{FlowGone, FlowWatch};
use crate::hibernated_copies::FlowMemo;
use crate::key_text::show_key;
use crate::origin::without_query;
use crate::pinned_copy::PinnedCopy;
use crate::prox::{FetchedAnswer, Prox};
use crate::range::RangeAnswer;
use crate::refusal::ProxRefusal;
use crate::relay;
use crate::request::{FetchRequest, ProxRequest, RequestHeadError, parse, read_head};
use crate::spooled_body::{SpoolStatus, SpooledBody};
use crate::tunnel;
use crate::upload;
use d2tp_driver::ResetCause;

/// How a flow ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProxFlowOutcome {
    /// The device has the whole answer (an error answer counts).
    Delivered,
    /// The device reset the flow or its session is lost; the text is the transport's.
    Broken(String),
    /// We reset the flow.
    Reset(ResetCause),
    /// The flow is hibernated, and will be served again when its device comes back.
    Hibernated,
    /// The device said that it does not want it any more.
    Forgotten,
}

/// One line about a flow that ended.
#[derive(Clone, Debug)]
pub struct ProxFlowReport {
    /// The status that was answered; none if the flow broke before.
    pub status: Option<u16>,
    /// Where the bytes came from.
    pub served: ServedFrom,
    /// Bytes handed to the flow, heads included.
    pub bytes_down: u64,
    /// Bytes taken from the flow, for tunnels and uploads.
    pub bytes_up: u64,
    /// From its acceptance to its end.
    pub lasted: Duration,
    /// How it ended.
    pub outcome: ProxFlowOutcome,
    /// What was asked for: method and URL without its query, or host and port.
    pub asked: String,
}

/// What is known of a flow so far.
pub(crate) struct FlowLogRecord {
    began: Instant,
    pub(crate) status: Option<u16>,
    pub(crate) served: ServedFrom,
    pub(crate) bytes_down: u64,
    pub(crate) bytes_up: u64,
    pub(crate) asked: String,
}

/// Serves one flow and returns when it is over.
pub async fn serve_flow<F: FlowIo>(mut flow: F, prox: Arc<Prox>) -> ProxFlowReport {
    let mut record = FlowLogRecord {
        began: Instant::now(),
        status: None,
        served: ServedFrom::Proxy,
        bytes_down: 0,
        bytes_up: 0,
        asked: String::new(),
    };
    let outcome = conduct(&mut flow, &prox, &mut record).await;
    if let ProxFlowOutcome::Reset(cause) = &outcome {
        flow.reset(cause.code());
    }
    let report = ProxFlowReport {
        status: record.status,
        served: record.served,
        bytes_down: record.bytes_down,
        bytes_up: record.bytes_up,
        lasted: record.began.elapsed(),
        outcome,
        asked: record.asked,
    };
    report.log(&flow);
    report
}

impl ProxFlowReport {
    fn log<F: FlowIo>(&self, flow: &F) {
        let (outcome, cause) = match &self.outcome {
            ProxFlowOutcome::Delivered => ("delivered", String::new()),
            ProxFlowOutcome::Broken(cause) => ("broken", cause.clone()),
            ProxFlowOutcome::Reset(cause) => (cause.as_str(), cause.to_string()),
            ProxFlowOutcome::Hibernated => ("asleep", String::new()),
            ProxFlowOutcome::Forgotten => ("forgotten", String::new()),
        };
        let from = match self.served {
            ServedFrom::Origin => "origin",
            ServedFrom::PinnedCopy => "pinned",
            ServedFrom::Proxy => "proxy",
            ServedFrom::Tunnel => "tunnel",
            ServedFrom::Relay => "relay",
        };
        tracing::info!(
            flow = flow.id(),
            client = &show_key(&flow.peer())[..8],
            asked = self.asked,
            status = self.status,
            from,
            bytes_down = self.bytes_down,
            bytes_up = self.bytes_up,
            lasted_ms = self.lasted.as_millis() as u64,
            outcome,
            cause,
            "flow ended"
        );
    }
}

async fn conduct<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    record: &mut FlowLogRecord,
) -> ProxFlowOutcome {
    if let Some(memo) = flow.memo() {
        return flow_hibernation::serve_resumed(flow, prox, record, memo).await;
    }
    let mut watch = FlowWatch::new(prox);
    match prox.admit(flow.peer(), flow.deadline_left()).await {
        Ok(permit) => {
            let outcome = serve_new(flow, prox, watch, record).await;
            permit.settle(&outcome);
            outcome
        }
        Err(refusal) => refuse(flow, prox, &mut watch, record, &refusal, false).await,
    }
}

/// Serves a flow from its request on.
async fn serve_new<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    mut watch: FlowWatch,
    record: &mut FlowLogRecord,
) -> ProxFlowOutcome {
    let head = tokio::select! {
        head = read_head(flow, prox.config.request_timeout) => head,
        () = prox.stop.cancelled() => return ProxFlowOutcome::Reset(ResetCause::Stopping),
    };
    let head = match head {
        Ok(head) => head,
        Err(RequestHeadError::Gone(error)) => return ProxFlowOutcome::Broken(error.to_string()),
        Err(RequestHeadError::Refused(refusal)) => {
            return refuse(flow, prox, &mut watch, record, &refusal, false).await;
        }
    };
    match parse(&head) {
        Err(refusal) => refuse(flow, prox, &mut watch, record, &refusal, false).await,
        Ok(ProxRequest::Tunnel(target)) => {
            record.asked = format!("CONNECT {target}");
            let connecting = prox.upstream.connect(&target);
            let connected = tokio::select! {
                // A tunnel's bytes must not be thrown away: only our own stop is watched here.
                connected = connecting => connected,
                () = prox.stop.cancelled() => Err(ProxRefusal::Stopping),
            };
            match connected {
                Ok(origin) => tunnel::serve(flow, head.rest(), origin, prox, record).await,
                Err(refusal) => refuse(flow, prox, &mut watch, record, &refusal, false).await,
            }
        }
        Ok(ProxRequest::Relay(to)) => relay::serve(flow, prox, &mut watch, record, &to).await,
        Ok(ProxRequest::Listen(callers)) => {
            relay::listen(flow, prox, &mut watch, record, &callers).await
        }
        Ok(ProxRequest::Upload(request)) => {
            let method = request.method.as_str();
            record.asked = format!("{method} {}", without_query(&request.url));
            upload::serve(flow, head.rest(), prox, &mut watch, record, &request).await
        }
        Ok(ProxRequest::Fetch(request)) => {
            let method = if request.head_only { "HEAD" } else { "GET" };
            record.asked = format!("{method} {}", without_query(&request.url));
            tracing::debug!(flow = flow.id(), url = %request.url, "asked");
            serve_fetch(flow, prox, &mut watch, record, &request).await
        }
    }
}

/// Answers a GET or HEAD.
async fn serve_fetch<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    request: &FetchRequest,
) -> ProxFlowOutcome {
    let client = flow.peer();
    let known = match (&request.range, &request.if_range) {
        (Some(_), Some(if_range)) if !request.head_only => {
            prox.retained.find(client, request, if_range)
        }
        _ => None,
    };
    record.served = if known.is_some() {
        ServedFrom::PinnedCopy
    } else {
        ServedFrom::Origin
    };
    let opened = match known {
        Some(copy) => Ok(FetchedAnswer::Copy(copy)),
        None => tokio::select! {
            opened = prox.open(client, request) => opened,
            gone = watch.gone(flow, prox) => return outcome_when_gone(gone),
        },
    };
    let copy = match opened {
        Ok(FetchedAnswer::Copy(copy)) => copy,
        Ok(FetchedAnswer::HeadOnly(head, length)) => {
            record.status = Some(head.status.as_u16());
            let source = AnswerSource::head_only(answer::bare_head(&head, length.as_ref()));
            return send(flow, prox, watch, record, source, None, MemoState::New).await;
        }
        Err(refusal) => {
            return refuse(flow, prox, watch, record, &refusal, request.head_only).await;
        }
    };
    let outcome = serve_copy(flow, prox, watch, record, request, &copy).await;
    retain_copy(flow, prox, &outcome, copy);
    outcome
}

/// What becomes of a copy when a flow needs it no more.
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

/// Answers from a copy, which may still grow.
async fn serve_copy<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    request: &FetchRequest,
    copy: &Arc<PinnedCopy>,
) -> ProxFlowOutcome {
    let ranges = ranges_of(request, copy);
    let (part, total) = loop {
        let extent = copy.body.extent();
        let part = ranges.as_ref().map_or(RangeAnswer::Whole, |ranges| {
            RangeAnswer::to(ranges, extent.have, extent.total)
        });
        match (part, extent.status) {
            (RangeAnswer::WaitForMoreThan(_), SpoolStatus::Failed(cause)) => {
                let refusal = ProxRefusal::BodyLost(cause.to_string());
                return refuse(flow, prox, watch, record, &refusal, false).await;
            }
            (RangeAnswer::WaitForMoreThan(bytes), _) => {
                tokio::select! {
                    _ = copy.body.wait_beyond(bytes) => {}
                    gone = watch.gone(flow, prox) => return outcome_when_gone(gone),
                }
            }
            (part, _) => break (part, extent.total),
        }
    };
    let (start, end) = match part {
        RangeAnswer::Bytes { start, end, .. } => (start, Some(end)),
        RangeAnswer::Unsatisfiable { .. } => (0, Some(0)),
        RangeAnswer::Whole | RangeAnswer::WaitForMoreThan(_) => (0, None),
    };
    record.status = Some(match part {
        RangeAnswer::Bytes { .. } => 206,
        RangeAnswer::Unsatisfiable { .. } => 416,
        _ => copy.head.status.as_u16(),
    });
    let attendance = ResetGuard::of(copy);
    let head = answer::copy_head(&copy.head, part, total, record.served);
    let source = AnswerSource::of_copy(head, copy.clone(), start, end, attendance.token());
    let part = Some((copy, end));
    send(flow, prox, watch, record, source, part, MemoState::New).await
}

/// The ranges that the request asks for, if it has some that apply to this copy.
fn ranges_of(request: &FetchRequest, copy: &PinnedCopy) -> Option<ByteRanges> {
    if copy.head.status != http::StatusCode::OK {
        return None;
    }
    let ranges = ByteRanges::parse(request.range.as_ref()?.to_str().ok()?)?;
    match &request.if_range {
        Some(if_range) if !copy.head.matches_if_range(if_range) => None,
        _ => Some(ranges),
    }
}

/// Whether the flow has a memo already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoState {
    /// The flow gets a record now.
    New,
    /// The flow has a record: it was hibernated.
    Existing,
    /// The flow gets no record, and its session is not hibernated: nothing could go on with it.
    Never,
}

/// Hands an answer to the flow and stays until the flow is over or its copy fails.
pub(crate) async fn send<F: FlowIo>(
    flow: &mut F,
    prox: &Prox,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    source: AnswerSource,
    copy: Option<(&Arc<PinnedCopy>, Option<u64>)>,
    keeping: MemoState,
) -> ProxFlowOutcome {
    let source = Arc::new(source);
    let slept = keeping == MemoState::Existing;
    let mut kept = keeping != MemoState::New;
    if slept {
        flow.resume_source(source.clone() as Arc<dyn SendSource>);
    } else {
        flow.send_source(source.clone() as Arc<dyn SendSource>);
    }
    let memo = FlowMemo {
        copy: copy.map(|(copy, _)| copy.id),
        head: source.head().iter().map(|b| char::from(*b)).collect(),
        start: source.start(),
        end: copy.and_then(|(_, end)| end),
        status: record.status.unwrap_or(0),
        pinned: record.served == ServedFrom::PinnedCopy,
        asked: record.asked.clone(),
    };
    // Only what the vault knows can be promised.
    let stored = async {
        if let (Some((copy, _)), Some(vault), false) = (copy, &prox.copy_store, slept) {
            let total = copy.body.extent().total;
            let entry = copy.head.entry(copy.body.client(), &copy.request, total);
            if vault.record_copy(copy.id, &entry).await.is_err() {
                std::future::pending::<()>().await;
            }
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
            gone = watch.gone(flow, prox) => break outcome_when_gone(gone),
            cause = &mut failed => break ProxFlowOutcome::Reset(cause),
            () = &mut stored, if !kept => {
                kept = true;
                flow.allow_hibernation(memo.encode());
            }
        }
    };
    record.bytes_down = source.sent();
    outcome
}

/// Sends an error answer.
pub(crate) async fn refuse<F: FlowIo>(
    flow: &mut F,
    prox: &Prox,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    refusal: &ProxRefusal,
    to_head: bool,
) -> ProxFlowOutcome {
    tracing::debug!(flow = flow.id(), reason = %refusal, "refused");
    record.status = Some(refusal.status());
    record.served = ServedFrom::Proxy;
    let source = AnswerSource::head_only(answer::refusal(refusal, to_head));
    send(flow, prox, watch, record, source, None, MemoState::New).await
}

/// The outcome of a flow that went by itself.
pub(crate) fn outcome_when_gone(gone: FlowGone) -> ProxFlowOutcome {
    match gone {
        FlowGone::Delivered => ProxFlowOutcome::Delivered,
        FlowGone::Broken(error) => ProxFlowOutcome::Broken(error.to_string()),
        FlowGone::Deadline => ProxFlowOutcome::Reset(ResetCause::Deadline),
        FlowGone::Stopped => ProxFlowOutcome::Reset(ResetCause::Stopping),
        FlowGone::Hibernated => ProxFlowOutcome::Hibernated,
        FlowGone::Forgotten => ProxFlowOutcome::Forgotten,
    }
}

/// Somebody stands by to reset the flow with a cause. Once dropped, the source tells failures
/// itself.
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
