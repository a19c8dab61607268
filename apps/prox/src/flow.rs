//! One flow from its first byte to its end.
//!
//! ```text
//! admit ─▶ read head ─▶ parse ─┬─ CONNECT ──▶ tunnel.rs
//!                              ├─ RELAY, LISTEN ▶ relay.rs
//!                              ├─ PUT, POST ─▶ upload.rs ─▶ ask the origin ─▶ ─┐
//!                              └─ GET, HEAD ─▶ copy or origin ─▶ part ─▶ flow_answer.rs ─▶ watch
//!                                                                                        │
//!        delivered: free · deadline: free · broken: keep the copy for a while · fetch failed: reset
//! ```

use std::sync::Arc;

use cedos_http::ByteRanges;
use d2tp_driver::{FlowIo, PublicKey, ResetCause};
use tokio::time::Instant;

use crate::answer::{self, AnswerSource};
use crate::flow_answer::{MemoState, ResetGuard, refuse, send};
use crate::flow_hibernation::{self, retain_copy};
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ProxFlowReport, ServedFrom};
use crate::flow_watch::FlowWatch;
use crate::origin::without_query;
use crate::pinned_copy::PinnedCopy;
use crate::prox::{FetchedAnswer, Prox};
use crate::range::RangeAnswer;
use crate::refusal::ProxRefusal;
use crate::relay;
use crate::request::{FetchRequest, ProxRequest, parse};
use crate::request_head::{RequestHeadError, read_head};
use crate::spooled_body::SpoolStatus;
use crate::tunnel;
use crate::upload;

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

/// Serves a new flow, beginning with its request.
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
            let account = prox.session_memory.account(PublicKey(flow.peer()));
            let mut buffers = account.charge();
            if !buffers.try_resize(tunnel::TUNNEL_BYTES) {
                let refusal = ProxRefusal::ClientMemoryFull;
                return refuse(flow, prox, &mut watch, record, &refusal, false).await;
            }
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
            gone = watch.gone(flow, prox) => return gone.outcome(),
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
                    gone = watch.gone(flow, prox) => return gone.outcome(),
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
