//! PUT and POST: the body is spooled here until it is whole, then goes to the origin in one piece.
//!
//! ```text
//!  device ── head ──▶ may the origin be asked? room? ── 100, or 104: which byte is next ──▶ device
//!  device ── body, for hours, over many links ──▶ spool (a pin: memory, then disk)
//!                    whole? ── no: 400, nothing was sent
//!                      │ yes
//!                      ▼
//!  origin ◀── delivery.rs: one connection, Content-Length ── spool
//!  origin ── its own answer ──▶ device
//! ```
//!
//! An origin's connection never waits for a device that is away, and a device that has sent its
//! last byte may go. The body ends where `Content-Length` says, or, without it, at the clean end of
//! the flow; where both are there they must agree, and only the spool's length is ever told to an
//! origin, so there is nothing to smuggle in. A flow that breaks off sends nothing; with a token its
//! device may come back and go on ([`crate::uploads`]).
//!
//! Not done here: sending on while the body still arrives.

use std::io;
use std::pin::Pin as Pinned;
use std::sync::Arc;
use std::task::Poll;

use bytes::BytesMut;
use d2tp_driver::{FlowIo, HostKey};
use tokio::io::AsyncWriteExt;

use crate::answer::{self, AnswerSource, Served};
use crate::delivery::{Answer, Delivery, NoAnswer};
use crate::flow::{Attendance, Keeping, Outcome, Record, early, refuse, send};
use crate::pin::End;
use crate::prox::Prox;
use crate::refusal::Refusal;
use crate::request::Upload;
use crate::uploads::Hold;
use crate::watch::{Gone, Watch};

/// Bytes taken from the flow at once.
const READ_BYTES: usize = 64 * 1024;

/// Why an upload went no further.
enum Stuck {
    Gone(Gone),
    Refused(Refusal),
}

impl From<Gone> for Stuck {
    fn from(gone: Gone) -> Stuck {
        Stuck::Gone(gone)
    }
}

impl From<Refusal> for Stuck {
    fn from(refusal: Refusal) -> Stuck {
        Stuck::Refused(refusal)
    }
}

/// Serves an upload to its end. `first`: what of the body came with the head.
pub(crate) async fn serve<F: FlowIo>(
    flow: &mut F,
    first: &[u8],
    prox: &Arc<Prox>,
    watch: &mut Watch,
    record: &mut Record,
    request: &Upload,
) -> Outcome {
    let mut hold = match room(flow.peer(), prox, request).await {
        Ok(hold) => hold,
        Err(Stuck::Gone(gone)) => return early(gone),
        Err(Stuck::Refused(refusal)) => {
            return refuse(flow, prox, watch, record, &refusal, false).await;
        }
    };
    let answer = match take(flow, first, prox, watch, record, request, &mut hold).await {
        Ok(()) => delivered(flow, prox, watch, request, &mut hold).await,
        Err(stuck) => Err(stuck),
    };
    let (outcome, done) = match answer {
        Err(Stuck::Gone(gone)) => (early(gone), false),
        Err(Stuck::Refused(refusal)) => {
            let outcome = refuse(flow, prox, watch, record, &refusal, false).await;
            (outcome, !may_change(refusal.status()))
        }
        Ok(Err(NoAnswer::Refused(refusal))) => {
            let outcome = refuse(flow, prox, watch, record, &refusal, false).await;
            (outcome, false)
        }
        Ok(Err(NoAnswer::Reset(cause))) => (Outcome::Reset(cause), false),
        Ok(Ok(answer)) => {
            let may_change = may_change(answer.status().as_u16());
            (
                pass_on(flow, prox, watch, record, answer).await,
                !may_change,
            )
        }
    };
    settle(flow, prox, request, &hold, &outcome, done);
    outcome
}

/// Another try may have another answer, and is not to cost the body again.
fn may_change(status: u16) -> bool {
    status >= 500 || matches!(status, 408 | 425 | 429)
}

/// What becomes of an upload that its flow needs no more. `done`: its device has the last word on it.
fn settle<F: FlowIo>(
    flow: &F,
    prox: &Prox,
    request: &Upload,
    hold: &Hold,
    outcome: &Outcome,
    done: bool,
) {
    let Some(token) = &request.token else {
        return;
    };
    let client = flow.peer();
    let left = flow.deadline_left();
    let over = match outcome {
        Outcome::Delivered | Outcome::Asleep => done,
        Outcome::Forgotten => true,
        Outcome::Broken(_) | Outcome::Reset(_) => left.is_some_and(|left| left.is_zero()),
    };
    if over {
        return prox.uploads.forget(client, token, hold);
    }
    if matches!(outcome, Outcome::Delivered | Outcome::Asleep) {
        // The next try asks the origin again, unless it must not.
        let mut delivery = hold.parcel.delivery.lock();
        let answered = |delivery: &mut Delivery| {
            delivery.is_answered() || delivery.may_begin_again(&request.method)
        };
        drop(delivery.take_if(answered));
    }
    // After the flow's deadline nobody wants it.
    let grace = left.map_or(prox.config.keep, |left| left.min(prox.config.keep));
    let keeping = (grace, prox.config.client_kept_max);
    prox.uploads.leave(client, token, hold, keeping);
}

/// Checks what can be checked before a body costs anybody anything, and finds or makes its spool.
async fn room(client: HostKey, prox: &Arc<Prox>, request: &Upload) -> Result<Hold, Stuck> {
    tokio::select! {
        may = prox.upstream.may_ask(&request.url) => may?,
        () = prox.stop.cancelled() => return Err(Gone::Stopped.into()),
    }
    let max = prox.ledger.object_max();
    if let Some(bytes) = request.length.filter(|bytes| *bytes > max) {
        return Err(Refusal::UploadTooLarge { bytes, max }.into());
    }
    let new = || prox.pin(client, request.length, None);
    tokio::select! {
        hold = prox.uploads.take_up(client, request, new) => Ok(hold?),
        () = prox.stop.cancelled() => Err(Gone::Stopped.into()),
    }
}

/// Takes a body in, from where its spool is.
async fn take<F: FlowIo>(
    flow: &mut F,
    first: &[u8],
    prox: &Arc<Prox>,
    watch: &mut Watch,
    record: &mut Record,
    request: &Upload,
    hold: &mut Hold,
) -> Result<(), Stuck> {
    let (client, spool) = (flow.peer(), hold.parcel.spool.clone());
    let begin = spool.extent().have;
    // A device that did not wait for it needs no leave.
    if request.expects_continue && first.is_empty() {
        let leave = match request.token {
            Some(_) => answer::go_on_from(begin),
            None => answer::go_on().to_vec(),
        };
        let said = async {
            flow.write_all(&leave).await?;
            flow.flush().await
        };
        said.await.map_err(Gone::Broken)?;
    }
    if spool.extent().end == End::Whole {
        hold.filled();
        return Ok(());
    }
    let longer = Refusal::BadRequest("the body is longer than Content-Length");
    let shorter = Refusal::BadRequest("the body is shorter than Content-Length");
    let mut piece = BytesMut::from(first);
    loop {
        let have = spool.extent().have + piece.len() as u64;
        if request.length.is_some_and(|length| have > length) {
            return Err(longer.into());
        }
        record.bytes_up = have - begin;
        prox.store(client, &spool, piece.split().freeze()).await?;
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
            () = hold.superseded() => {
                let error = io::Error::other("the device came back for this upload by another flow");
                return Err(Gone::Broken(error).into());
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
    hold.filled();
    Ok(())
}

/// Whether another byte is there already.
async fn poll_more<F: FlowIo>(flow: &mut F) -> bool {
    let mut byte = [0; 1];
    std::future::poll_fn(|cx| {
        let mut buf = tokio::io::ReadBuf::new(&mut byte);
        let read = Pinned::new(&mut *flow).poll_read(cx, &mut buf);
        Poll::Ready(matches!(read, Poll::Ready(Ok(()))) && !buf.filled().is_empty())
    })
    .await
}

/// Has the spool delivered, if it is not yet, and waits for what the origin says.
async fn delivered<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut Watch,
    request: &Upload,
    hold: &mut Hold,
) -> Result<Result<Answer, NoAnswer>, Stuck> {
    let answer = {
        let mut delivery = hold.parcel.delivery.lock();
        drop(delivery.take_if(|delivery| delivery.may_begin_again(&request.method)));
        let begin = || Delivery::begin(prox, flow.peer(), request, &hold.parcel.spool);
        delivery.get_or_insert_with(begin).answer()
    };
    tokio::select! {
        answer = answer => Ok(answer),
        gone = watch.gone(flow, prox) => Err(gone.into()),
        () = hold.superseded() => {
            let error = io::Error::other("the device came back for this upload by another flow");
            Err(Gone::Broken(error).into())
        }
    }
}

/// The origin's own answer, to the device.
async fn pass_on<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut Watch,
    record: &mut Record,
    answer: Answer,
) -> Outcome {
    record.served = Served::Origin;
    record.status = Some(answer.status().as_u16());
    match answer {
        Answer::Bare(head) => {
            let source = AnswerSource::head_only(answer::relayed_head(&head, None));
            send(flow, prox, watch, record, source, None, Keeping::New).await
        }
        Answer::Copy(copy) => {
            let total = copy.pin.extent().total;
            let attendance = Attendance::of(&copy);
            let head = answer::relayed_head(&copy.head, total);
            let token = attendance.token();
            let source = AnswerSource::of_copy(head, copy.clone(), 0, None, token);
            let part = Some((&copy, None));
            send(flow, prox, watch, record, source, part, Keeping::Never).await
        }
    }
}
