//! PUT and POST: the body is spooled here until it is whole, then goes to the origin in one piece.
//!
//! ```text
//!  device ── head ──▶ may the origin be asked? room? ── 100 ──▶ device
//!  device ── body, for hours, over many links ──▶ spool (a pin: memory, then disk)
//!                    whole? ── no: 400, nothing was sent
//!                      │ yes
//!                      ▼
//!  origin ◀── one connection, Content-Length ── spool     not there ─▶ wait, again
//!  origin ── its own answer ──▶ device
//! ```
//!
//! An origin's connection never waits for a device that is away, and a device that has sent its
//! last byte may go. The body ends where `Content-Length` says, or, without it, at the clean end of
//! the flow; where both are there they must agree, and only the spool's length is ever told to an
//! origin, so there is nothing to smuggle in. A flow that breaks off sends nothing.
//!
//! A request that the origin may have seen is repeated only if it is a PUT. Not done here: sending
//! on while the body still arrives.

use std::io;
use std::pin::Pin as Pinned;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use d2tp_driver::FlowIo;
use http::Method;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use crate::answer::{self, AnswerSource, Served};
use crate::copy::CopyHead;
use crate::flow::{Attendance, Keeping, Outcome, Record, early, refuse, send};
use crate::origin::{Outgoing, Response};
use crate::pin::{Pin, PinReadFault};
use crate::prox::Prox;
use crate::refusal::Refusal;
use crate::request::Upload;
use crate::reset::ResetCause;
use crate::watch::{Gone, Watch};

/// Bytes taken from the flow at once.
const READ_BYTES: usize = 64 * 1024;
/// The longest wait between two tries to reach the origin.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(60);

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
    let answered = async {
        let spool = take(flow, first, prox, watch, record, request).await?;
        deliver(flow, prox, watch, request, spool).await
    };
    let response = match answered.await {
        Ok(response) => response,
        Err(Stuck::Gone(gone)) => return early(gone),
        Err(Stuck::Refused(refusal)) => {
            return refuse(flow, prox, watch, record, &refusal, false).await;
        }
    };
    pass_on(flow, prox, watch, record, request, response).await
}

/// Checks what can be checked before a body costs anybody anything, then takes it in.
async fn take<F: FlowIo>(
    flow: &mut F,
    first: &[u8],
    prox: &Arc<Prox>,
    watch: &mut Watch,
    record: &mut Record,
    request: &Upload,
) -> Result<Arc<Pin>, Stuck> {
    tokio::select! {
        may = prox.upstream.may_ask(&request.url) => may?,
        () = prox.stop.cancelled() => return Err(Gone::Stopped.into()),
    }
    let max = prox.ledger.object_max();
    if let Some(bytes) = request.length.filter(|bytes| *bytes > max) {
        return Err(Refusal::UploadTooLarge { bytes, max }.into());
    }
    let client = flow.peer();
    let spool = Arc::new(prox.pin(client, request.length, None)?);
    // A device that did not wait for it needs no leave.
    if request.expects_continue && first.is_empty() {
        let said = async {
            flow.write_all(answer::go_on()).await?;
            flow.flush().await
        };
        said.await.map_err(Gone::Broken)?;
    }
    let longer = Refusal::BadRequest("the body is longer than Content-Length");
    let shorter = Refusal::BadRequest("the body is shorter than Content-Length");
    let mut piece = BytesMut::from(first);
    loop {
        let have = spool.extent().have + piece.len() as u64;
        if request.length.is_some_and(|length| have > length) {
            return Err(longer.into());
        }
        record.bytes_up = have;
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
        if watch.read(flow, prox, &mut piece).await? == 0 {
            if request.length.is_some() {
                return Err(shorter.into());
            }
            break;
        }
    }
    spool.finish();
    Ok(spool)
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

/// Sends the spool to the origin, again and again while the origin is not there.
async fn deliver<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut Watch,
    request: &Upload,
    spool: Arc<Pin>,
) -> Result<Response, Stuck> {
    let give_up = Instant::now() + prox.config.origin_patience;
    let mut wait = prox.config.retry_wait;
    loop {
        let body = SpoolBody::new(&spool);
        let outgoing = Outgoing {
            sent: body.sent.clone(),
            body: body.boxed_unsync(),
        };
        let sending = prox
            .upstream
            .send(&request.method, &request.url, &request.headers, outgoing);
        let refusal = tokio::select! {
            answer = sending => match answer {
                Ok(response) => return Ok(response),
                Err(refusal) => refusal,
            },
            gone = watch.gone(flow, prox) => return Err(gone.into()),
        };
        if !may_repeat(&request.method, &refusal) || Instant::now() + wait > give_up {
            return Err(refusal.into());
        }
        tracing::info!(reason = %refusal, ?wait, "the upload waits for its origin");
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            gone = watch.gone(flow, prox) => return Err(gone.into()),
        }
        wait = (wait * 2).min(RETRY_WAIT_MAX);
    }
}

/// Whether it may help, and does no harm, to send the request again.
fn may_repeat(method: &Method, refusal: &Refusal) -> bool {
    match refusal {
        // The origin has seen nothing.
        Refusal::ConnectRefused(_)
        | Refusal::ConnectTimeout { .. }
        | Refusal::Unroutable { .. }
        | Refusal::NameTimeout(_)
        | Refusal::NameNotFound { .. } => true,
        // It may have. PUT is idempotent (RFC 9110 §9.2.2), POST is not.
        Refusal::OriginClosed { .. } | Refusal::ResponseTimeout { .. } => *method == Method::PUT,
        _ => false,
    }
}

/// The origin's own answer, to the device.
async fn pass_on<F: FlowIo>(
    flow: &mut F,
    prox: &Arc<Prox>,
    watch: &mut Watch,
    record: &mut Record,
    request: &Upload,
    response: Response,
) -> Outcome {
    record.served = Served::Origin;
    record.status = Some(response.status.as_u16());
    if matches!(response.status.as_u16(), 204 | 304) {
        let head = answer::relayed_head(&CopyHead::relayed(&response), None);
        let source = AnswerSource::head_only(head);
        return send(flow, prox, watch, record, source, None, Keeping::New).await;
    }
    let total = response.body.size();
    let copy = match prox.relay(flow.peer(), request, response) {
        Ok(copy) => copy,
        // The origin has the upload, and an answer that there is no room for: neither a refusal of
        // ours nor silence would be true.
        Err(Refusal::StoreFailed) => return Outcome::Reset(ResetCause::StoreFailed),
        Err(_) => return Outcome::Reset(ResetCause::StoreFull),
    };
    let attendance = Attendance::of(&copy);
    let head = answer::relayed_head(&copy.head, total);
    let source = AnswerSource::of_copy(head, copy.clone(), 0, None, attendance.token());
    let part = Some((&copy, None));
    send(flow, prox, watch, record, source, part, Keeping::Never).await
}

/// A whole spool as the body of a request.
struct SpoolBody {
    spool: Arc<Pin>,
    at: u64,
    end: u64,
    sent: Arc<AtomicU64>,
}

impl SpoolBody {
    fn new(spool: &Arc<Pin>) -> SpoolBody {
        SpoolBody {
            end: spool.extent().have,
            spool: spool.clone(),
            at: 0,
            sent: Arc::default(),
        }
    }
}

impl Body for SpoolBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pinned<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.at == self.end {
            return Poll::Ready(None);
        }
        let read = ready!(self.spool.poll_read_at(cx, self.at, READ_BYTES));
        Poll::Ready(Some(match read {
            Ok(bytes) => {
                self.at += bytes.len() as u64;
                self.sent.store(self.at, Ordering::Relaxed);
                Ok(Frame::data(bytes))
            }
            Err(PinReadFault::Failed(cause)) => Err(io::Error::other(cause)),
            Err(PinReadFault::Disk(error)) => Err(error),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.at == self.end
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.end - self.at)
    }
}
