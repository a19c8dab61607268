//! PUT and POST: the body is spooled here until it is complete, then sent to the origin in one
//! piece.
//!
//! ```text
//!  device ── head ──▶ may the origin be asked? room? ── 100, or 104: which byte is next ──▶ device
//!  device ── body, for hours, over many links ──▶ spool (a pin: memory, then disk)
//!                    whole? ── no: 400, nothing was sent
//!                      │ yes
//!                      ▼
//!  origin ◀── upload_sender.rs: one connection, Content-Length ── spool
//!  origin ── its own answer ──▶ device
//! ```
//!
//! An origin's connection never waits for a device that is away, and a device that has sent its
//! last byte may go. The body ends where `Content-Length` says, or, without it, at the clean end of
//! the flow; where both are there they must agree, and only the spool's length is ever told to an
//! origin, so there is nothing to smuggle in. If a flow breaks off, nothing is sent; with a token
//! its device may return and continue ([`crate::upload_table`]).
//!
//! Not done here: sending on while the body still arrives.

use std::io;
use std::pin::Pin as Pinned;
use std::sync::Arc;
use std::task::Poll;

use bytes::BytesMut;
use d2tp_driver::{FlowIo, HostKey};
use http::StatusCode;
use tokio::io::AsyncWriteExt;

use crate::answer::{self, AnswerSource};
use crate::flow_answer::{AnswerPart, MemoState, ResetGuard, refuse, send};
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ServedFrom};
use crate::flow_watch::{FlowGone, FlowWatch};
use crate::prox::Prox;
use crate::refusal::ProxRefusal;
use crate::request::UploadRequest;
use crate::spooled_body::SpoolStatus;
use crate::upload_delivery::{UploadAnswer, UploadDelivery, UploadFailure, may_change};
use crate::upload_sender;
use crate::upload_table::UploadHold;

/// The size of reads from the flow.
const READ_BYTES: usize = 64 * 1024;

/// Why an upload stopped.
enum UploadStop {
    Gone(FlowGone),
    Refused(ProxRefusal),
}

impl From<FlowGone> for UploadStop {
    fn from(gone: FlowGone) -> UploadStop {
        UploadStop::Gone(gone)
    }
}

impl From<ProxRefusal> for UploadStop {
    fn from(refusal: ProxRefusal) -> UploadStop {
        UploadStop::Refused(refusal)
    }
}

/// Serves an upload. `first`: bytes of the body that came with the head.
pub(crate) async fn serve<F: FlowIo>(
    flow: &mut F,
    first: &[u8],
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    request: &UploadRequest,
) -> ProxFlowOutcome {
    let mut hold = match room(flow.peer(), prox, request).await {
        Ok(hold) => hold,
        Err(UploadStop::Gone(gone)) => return gone.outcome(),
        Err(UploadStop::Refused(refusal)) => {
            return refuse(flow, prox, watch, record, &refusal, false).await;
        }
    };
    let answer = match take(flow, first, prox, watch, record, request, &mut hold).await {
        Ok(()) => delivered(flow, prox, watch, request, &mut hold).await,
        Err(stuck) => Err(stuck),
    };
    let (outcome, done) = match answer {
        Err(UploadStop::Gone(gone)) => (gone.outcome(), false),
        Err(UploadStop::Refused(refusal)) => {
            let outcome = refuse(flow, prox, watch, record, &refusal, false).await;
            let status = StatusCode::from_u16(refusal.status());
            (outcome, !status.is_ok_and(may_change))
        }
        Ok(Err(UploadFailure::Refused(refusal))) => {
            let outcome = refuse(flow, prox, watch, record, &refusal, false).await;
            (outcome, false)
        }
        Ok(Err(UploadFailure::Reset(cause))) => (ProxFlowOutcome::Reset(cause), false),
        Ok(Ok(answer)) => {
            let may_change = may_change(answer.status());
            (
                pass_on(flow, prox, watch, record, answer).await,
                !may_change,
            )
        }
    };
    settle(flow, prox, request, &hold, &outcome, done);
    outcome
}

/// Decides what happens to an upload that its flow no longer needs. `done`: its device has the final
/// answer.
fn settle<F: FlowIo>(
    flow: &F,
    prox: &Prox,
    request: &UploadRequest,
    hold: &UploadHold,
    outcome: &ProxFlowOutcome,
    done: bool,
) {
    let Some(token) = &request.token else {
        return;
    };
    let client = flow.peer();
    let left = flow.deadline_left();
    let over = match outcome {
        ProxFlowOutcome::Delivered | ProxFlowOutcome::Hibernated => done,
        ProxFlowOutcome::Forgotten => true,
        // Its spool is here, and its device may come back.
        ProxFlowOutcome::Broken(_) | ProxFlowOutcome::Reset(_) | ProxFlowOutcome::TakenOver => {
            left.is_some_and(|left| left.is_zero())
        }
    };
    if over || !prox.is_client(&client) {
        return prox.uploads.forget(client, token, hold);
    }
    if matches!(
        outcome,
        ProxFlowOutcome::Delivered | ProxFlowOutcome::Hibernated
    ) {
        // The next try asks the origin again, unless it must not.
        let mut delivery = hold.upload.delivery.lock();
        let answered = |delivery: &mut UploadDelivery| {
            delivery.is_answered() || delivery.may_restart(&request.method)
        };
        if delivery.take_if(answered).is_some()
            && let Some(stored) = &hold.upload.stored
        {
            stored.record_held();
        }
    }
    // After the flow's deadline nobody wants it.
    let grace = left.map_or(prox.config().keep, |left| left.min(prox.config().keep));
    let keeping = (grace, prox.config().client_kept_max);
    prox.uploads.retain(client, token, hold, keeping);
}

/// Checks the request before a body is transferred, and finds or creates its spool.
async fn room(
    client: HostKey,
    prox: &Arc<Prox>,
    request: &UploadRequest,
) -> Result<UploadHold, UploadStop> {
    let upstream = prox.upstream();
    tokio::select! {
        may = upstream.check_allowed(&request.url) => may?,
        () = prox.stop.cancelled() => return Err(FlowGone::Stopped.into()),
    }
    let max = prox.ledger.object_max(&client);
    // One that has its room goes on beyond a bound that is smaller since.
    let is_new = !prox.uploads.has(client, request);
    if let Some(bytes) = request.length.filter(|bytes| is_new && *bytes > max) {
        return Err(ProxRefusal::UploadTooLarge { bytes, max }.into());
    }
    tokio::select! {
        found = prox.find_shared_upload(client, request) => found?,
        () = prox.stop.cancelled() => return Err(FlowGone::Stopped.into()),
    }
    let new = || prox.reserve_upload(client, request);
    tokio::select! {
        hold = prox.uploads.attach(client, request, new) => Ok(hold?),
        () = prox.stop.cancelled() => Err(FlowGone::Stopped.into()),
    }
}

/// Receives a body, from the end of its spool on.
async fn take<F: FlowIo>(
    flow: &mut F,
    first: &[u8],
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    request: &UploadRequest,
    hold: &mut UploadHold,
) -> Result<(), UploadStop> {
    let (client, spool) = (flow.peer(), hold.upload.spool.clone());
    let begin = spool.extent().have;
    // A device that did not wait for it needs no leave.
    if request.expects_continue && first.is_empty() {
        let leave = match request.token {
            Some(_) => answer::resume_upload_head(begin),
            None => answer::continue_head().to_vec(),
        };
        let said = async {
            flow.write_all(&leave).await?;
            flow.flush().await
        };
        said.await.map_err(FlowGone::Broken)?;
    }
    if spool.extent().status == SpoolStatus::Complete {
        hold.set_filled();
        return Ok(());
    }
    let longer = ProxRefusal::BadRequest("the body is longer than Content-Length");
    let shorter = ProxRefusal::BadRequest("the body is shorter than Content-Length");
    let mut piece = BytesMut::from(first);
    loop {
        let have = spool.extent().have + piece.len() as u64;
        if request.length.is_some_and(|length| have > length) {
            return Err(longer.into());
        }
        record.bytes_up = have - begin;
        prox.append_upload(client, &spool, piece.split().freeze())
            .await?;
        if request.length == Some(have) {
            // What is there beyond the body shows that the two ends disagree; what comes later is
            // thrown away unread.
            if poll_more(flow).await {
                return Err(longer.into());
            }
            break;
        }
        piece.reserve(READ_BYTES);
        // Nothing is broken off here but the wait: the next flow begins where this one ends.
        let read = tokio::select! {
            biased;
            () = hold.until_superseded() => {
                let error = io::Error::other("the device resumed this upload in another flow");
                return Err(FlowGone::Broken(error).into());
            }
            read = watch.read(flow, prox, &mut piece) => read?,
        };
        if read == 0 {
            if request.length.is_some() {
                return Err(shorter.into());
            }
            break;
        }
    }
    spool.finish();
    hold.set_filled();
    Ok(())
}

/// Whether another byte is available already.
async fn poll_more<F: FlowIo>(flow: &mut F) -> bool {
    let mut byte = [0; 1];
    std::future::poll_fn(|cx| {
        let mut buf = tokio::io::ReadBuf::new(&mut byte);
        let read = Pinned::new(&mut *flow).poll_read(cx, &mut buf);
        Poll::Ready(matches!(read, Poll::Ready(Ok(()))) && !buf.filled().is_empty())
    })
    .await
}

/// Delivers the spool, unless that was begun before, and waits for the origin's answer.
async fn delivered<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    request: &UploadRequest,
    hold: &mut UploadHold,
) -> Result<Result<UploadAnswer, UploadFailure>, UploadStop> {
    let answer = {
        let mut delivery = hold.upload.delivery.lock();
        drop(delivery.take_if(|delivery| delivery.may_restart(&request.method)));
        let (spool, stored) = (&hold.upload.spool, hold.upload.stored.as_ref());
        let begin = || upload_sender::start(prox, flow.peer(), request, spool, stored);
        delivery.get_or_insert_with(begin).answer()
    };
    tokio::select! {
        answer = answer => Ok(answer),
        gone = watch.gone(flow, prox) => Err(gone.into()),
        () = hold.until_superseded() => {
            let error = io::Error::other("the device resumed this upload in another flow");
            Err(FlowGone::Broken(error).into())
        }
    }
}

/// Forwards the origin's own answer to the device.
async fn pass_on<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut FlowWatch,
    record: &mut FlowLogRecord,
    answer: UploadAnswer,
) -> ProxFlowOutcome {
    record.served = ServedFrom::Origin;
    record.status = Some(answer.status().as_u16());
    match answer {
        UploadAnswer::HeadOnly(head) => {
            let source = AnswerSource::head_only(answer::relayed_head(&head, None));
            send(flow, prox, watch, record, source, None, MemoState::New).await
        }
        UploadAnswer::Copy(copy) => {
            let total = copy.body.extent().total;
            let attendance = ResetGuard::of(&copy);
            let head = answer::relayed_head(&copy.head, total);
            let token = attendance.token();
            let source = AnswerSource::of_copy(head, copy.clone(), 0, None, token);
            let part = Some(AnswerPart {
                copy: &copy,
                end: None,
                reports_to: None,
                unrecorded: None,
            });
            send(flow, prox, watch, record, source, part, MemoState::Never).await
        }
    }
}
