//! A whole upload on its way to the origin, again and again while the origin is not there.
//!
//! It does not depend on a flow: the device that sent its last byte may go, and who comes back for
//! the upload hears the same answer. A request that the origin may have seen is repeated only if it
//! is a PUT.

use std::io;
use std::pin::Pin as Pinned;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::HostKey;
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::copy::{CopyHead, PinnedCopy};
use crate::origin::{Outgoing, Response};
use crate::pin::{Pin, PinReadFault};
use crate::prox::Prox;
use crate::refusal::Refusal;
use crate::request::Upload;
use crate::reset::ResetCause;

/// Bytes given to the origin's connection at once.
const READ_BYTES: usize = 64 * 1024;
/// The longest wait between two tries to reach the origin.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(60);

/// What the origin said.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// Without a body.
    Bare(Arc<CopyHead>),
    /// With one, which is being taken over.
    Copy(Arc<PinnedCopy>),
}

/// Why there is no answer to pass on.
#[derive(Clone, Debug)]
pub(crate) enum NoAnswer {
    Refused(Refusal),
    /// The origin has the upload, and an answer that there is no room for: neither a refusal of ours
    /// nor silence would be true.
    Reset(ResetCause),
}

type Told = Option<Result<Answer, NoAnswer>>;

/// A delivery. Dropped, it is broken off.
#[derive(Debug)]
pub(crate) struct Delivery {
    told: watch::Receiver<Told>,
    _work: AbortOnDropHandle<()>,
}

impl Answer {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Answer::Bare(head) => head.status,
            Answer::Copy(copy) => copy.head.status,
        }
    }
}

impl Delivery {
    /// Begins to send a whole spool.
    pub(crate) fn begin(
        prox: &Arc<Prox>,
        client: HostKey,
        request: &Upload,
        spool: &Arc<Pin>,
    ) -> Delivery {
        let (tell, told) = watch::channel(None);
        let (prox, request, spool) = (prox.clone(), request.clone(), spool.clone());
        let work = async move {
            let delivering = deliver(&prox, &request, &spool);
            let answer = tokio::select! {
                answer = delivering => answer.map_err(NoAnswer::Refused),
                () = prox.stop.cancelled() => return,
            };
            let answer = answer.and_then(|response| take_over(&prox, client, &request, response));
            let _ = tell.send(Some(answer)); // Nobody may be left who would hear it.
        };
        Delivery {
            told,
            _work: AbortOnDropHandle::new(tokio::spawn(work)),
        }
    }

    /// The answer, when it is there; it may be asked for by several.
    pub(crate) fn answer(&self) -> impl Future<Output = Result<Answer, NoAnswer>> + use<> {
        let mut told = self.told.clone();
        async move {
            match told.wait_for(Option::is_some).await {
                Ok(told) => told.clone().expect("it was waited for"),
                // It was broken off, because the proxy stops.
                Err(_) => Err(NoAnswer::Reset(ResetCause::Stopping)),
            }
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.told.borrow().is_some()
    }

    /// The origin said something.
    pub(crate) fn is_answered(&self) -> bool {
        matches!(&*self.told.borrow(), Some(Ok(_)))
    }

    /// It failed, and asking the origin again may do good and can do no harm.
    pub(crate) fn may_begin_again(&self, method: &Method) -> bool {
        match &*self.told.borrow() {
            Some(Err(NoAnswer::Refused(refusal))) => {
                *method == Method::PUT || !may_have_arrived(refusal)
            }
            _ => false,
        }
    }
}

/// What the origin said, with room for its words.
fn take_over(
    prox: &Arc<Prox>,
    client: HostKey,
    request: &Upload,
    response: Response,
) -> Result<Answer, NoAnswer> {
    if matches!(response.status.as_u16(), 204 | 304) {
        return Ok(Answer::Bare(Arc::new(CopyHead::relayed(&response))));
    }
    match prox.relay(client, request, response) {
        Ok(copy) => Ok(Answer::Copy(copy)),
        Err(Refusal::StoreFailed) => Err(NoAnswer::Reset(ResetCause::StoreFailed)),
        Err(_) => Err(NoAnswer::Reset(ResetCause::StoreFull)),
    }
}

async fn deliver(
    prox: &Arc<Prox>,
    request: &Upload,
    spool: &Arc<Pin>,
) -> Result<Response, Refusal> {
    let give_up = Instant::now() + prox.config.origin_patience;
    let mut wait = prox.config.retry_wait;
    loop {
        let body = SpoolBody::new(spool);
        let outgoing = Outgoing {
            sent: body.sent.clone(),
            body: body.boxed_unsync(),
        };
        let sending = prox
            .upstream
            .send(&request.method, &request.url, &request.headers, outgoing);
        let refusal = match sending.await {
            Ok(response) => return Ok(response),
            Err(refusal) => refusal,
        };
        if !may_repeat(&request.method, &refusal) || Instant::now() + wait > give_up {
            return Err(refusal);
        }
        tracing::info!(reason = %refusal, ?wait, "the upload waits for its origin");
        tokio::time::sleep(wait).await;
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
        // PUT is idempotent (RFC 9110 §9.2.2), POST is not.
        refusal => may_have_arrived(refusal) && *method == Method::PUT,
    }
}

/// The origin may have seen the request.
fn may_have_arrived(refusal: &Refusal) -> bool {
    matches!(
        refusal,
        Refusal::OriginClosed { .. } | Refusal::ResponseTimeout { .. }
    )
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
