//! An answer from a copy, which may still grow: which part of it, and with which head.

use std::sync::Arc;

use cedos_http::ByteRanges;
use d2tp_driver::{DatagramSender, FlowIo};
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::address_key::address_of;
use crate::answer::{self, AnswerSource};
use crate::cached_fetch::OpenedCopy;
use crate::flow_answer::{ResetGuard, refuse};
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome};
use crate::flow_watch::FlowWatch;
use crate::link_keys::link_client_id;
use crate::pinned_copy::PinnedCopy;
use crate::prox::Prox;
use crate::range::RangeAnswer;
use crate::refusal::ProxRefusal;
use crate::request::FetchRequest;
use crate::spooled_body::SpoolStatus;

/// The part of a copy that an answer consists of.
pub(crate) struct PreparedPart {
    pub(crate) copy: Arc<PinnedCopy>,
    /// The end of the part; none is the end of the copy.
    pub(crate) end: Option<u64>,
    pub(crate) reports_to: Option<DatagramSender>,
    /// Held until the copy is recorded.
    pub(crate) unrecorded: Option<TaskTrackerToken>,
    pub(crate) guard: ResetGuard,
}

/// Prepares an answer from a copy, which may still grow.
pub(crate) async fn prepare_copy<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    request: &FetchRequest,
    opened: &OpenedCopy,
) -> Result<(AnswerSource, PreparedPart), ProxFlowOutcome> {
    let copy = &opened.copy;
    let ranges = ranges_of(request, copy);
    let (part, total) = loop {
        let extent = copy.body.extent();
        let part = ranges.as_ref().map_or(RangeAnswer::Whole, |ranges| {
            RangeAnswer::to(ranges, extent.have, extent.total)
        });
        match (part, extent.status) {
            (RangeAnswer::WaitForMoreThan(_), SpoolStatus::Failed(cause)) => {
                let refusal = ProxRefusal::BodyLost(cause.to_string());
                return Err(refuse(flow, prox, watch, record, &refusal, false).await);
            }
            (RangeAnswer::WaitForMoreThan(bytes), _) => {
                tokio::select! {
                    _ = copy.body.wait_beyond(bytes) => {}
                    gone = watch.gone(flow, prox) => return Err(gone.outcome()),
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
    let guard = ResetGuard::of(copy);
    let is_device = is_device(flow);
    let stream_port = prox.stream_port.get().filter(|_| is_device).copied();
    let head = answer::copy_head(opened, part, total, is_device, stream_port);
    let part = PreparedPart {
        copy: copy.clone(),
        end,
        reports_to: supply_reports(flow, request.reports_supply),
        unrecorded: None,
        guard,
    };
    let token = part.guard.token();
    let source = AnswerSource::of_copy(head, copy.clone(), start, end, token);
    Ok((source, part))
}

/// Whether the client speaks D2TP.
pub(crate) fn is_device<F: FlowIo>(flow: &F) -> bool {
    let client = flow.peer();
    address_of(&client).is_none() && link_client_id(&client).is_none()
}

/// Where reports on the server's supply go, if the device asked for them.
pub(crate) fn supply_reports<F: FlowIo>(flow: &F, asked: bool) -> Option<DatagramSender> {
    flow.datagram_sender().filter(|_| asked)
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
