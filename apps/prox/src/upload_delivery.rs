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

use crate::origin::{OriginRequestBody, OriginResponse};
use crate::pinned_copy::{CopyHead, PinnedCopy};
use crate::prox::Prox;
use crate::refusal::ProxRefusal;
use crate::request::UploadRequest;
use crate::spooled_body::{SpoolReadError, SpooledBody};
use d2tp_driver::ResetCause;

/// Bytes given to the origin's connection at once.
const READ_BYTES: usize = 64 * 1024;
/// The longest wait between two tries to reach the origin.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(60);

/// What the origin said.
#[derive(Clone, Debug)]
pub(crate) enum UploadAnswer {
    /// Without a body.
    HeadOnly(Arc<CopyHead>),
    /// With one, which is being taken over.
    Copy(Arc<PinnedCopy>),
}

/// Why there is no answer to pass on.
#[derive(Clone, Debug)]
pub(crate) enum UploadFailure {
    Refused(ProxRefusal),
    /// The origin has the upload, and an answer that there is no room for: neither a refusal of ours
    /// nor silence would be true.
    Reset(ResetCause),
}

type UploadResult = Option<Result<UploadAnswer, UploadFailure>>;

/// A delivery. Dropped, it is broken off.
#[derive(Debug)]
pub(crate) struct UploadDelivery {
    result: watch::Receiver<UploadResult>,
    _work: AbortOnDropHandle<()>,
}

impl UploadAnswer {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            UploadAnswer::HeadOnly(head) => head.status,
            UploadAnswer::Copy(copy) => copy.head.status,
        }
    }
}

impl UploadDelivery {
    /// Begins to send a whole spool.
    pub(crate) fn start(
        prox: &Arc<Prox>,
        client: HostKey,
        request: &UploadRequest,
        spool: &Arc<SpooledBody>,
    ) -> UploadDelivery {
        let (tell, told) = watch::channel(None);
        let (prox, request, spool) = (prox.clone(), request.clone(), spool.clone());
        let work = async move {
            let delivering = deliver(&prox, &request, &spool);
            let answer = tokio::select! {
                answer = delivering => answer.map_err(UploadFailure::Refused),
                () = prox.stop.cancelled() => return,
            };
            let answer = answer.and_then(|response| take_over(&prox, client, &request, response));
            let _ = tell.send(Some(answer)); // Nobody may be left who would hear it.
        };
        UploadDelivery {
            result: told,
            _work: AbortOnDropHandle::new(tokio::spawn(work)),
        }
    }

    /// The answer, when it is there; it may be asked for by several.
    pub(crate) fn answer(
        &self,
    ) -> impl Future<Output = Result<UploadAnswer, UploadFailure>> + use<> {
        let mut told = self.result.clone();
        async move {
            match told.wait_for(Option::is_some).await {
                Ok(told) => told.clone().expect("it was waited for"),
                // It was broken off, because the proxy stops.
                Err(_) => Err(UploadFailure::Reset(ResetCause::Stopping)),
            }
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.result.borrow().is_some()
    }

    /// The origin said something.
    pub(crate) fn is_answered(&self) -> bool {
        matches!(&*self.result.borrow(), Some(Ok(_)))
    }

    /// Whether the delivery failed in a way that asking the origin again may mend, and can do no
    /// harm.
    pub(crate) fn may_restart(&self, method: &Method) -> bool {
        match &*self.result.borrow() {
            Some(Err(UploadFailure::Refused(refusal))) => {
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
    request: &UploadRequest,
    response: OriginResponse,
) -> Result<UploadAnswer, UploadFailure> {
    if matches!(response.status.as_u16(), 204 | 304) {
        return Ok(UploadAnswer::HeadOnly(Arc::new(CopyHead::relayed(
            &response,
        ))));
    }
    match prox.pin_upload_answer(client, request, response) {
        Ok(copy) => Ok(UploadAnswer::Copy(copy)),
        Err(ProxRefusal::StoreFailed) => Err(UploadFailure::Reset(ResetCause::StoreFailed)),
        Err(_) => Err(UploadFailure::Reset(ResetCause::StoreFull)),
    }
}

async fn deliver(
    prox: &Arc<Prox>,
    request: &UploadRequest,
    spool: &Arc<SpooledBody>,
) -> Result<OriginResponse, ProxRefusal> {
    let give_up = Instant::now() + prox.config.origin_patience;
    let mut wait = prox.config.retry_wait;
    loop {
        let body = SpoolHttpBody::new(spool);
        let outgoing = OriginRequestBody {
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
        tracing::info!(reason = %refusal, ?wait, "the upload waits for its server");
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(RETRY_WAIT_MAX);
    }
}

/// Whether it may help, and does no harm, to send the request again.
fn may_repeat(method: &Method, refusal: &ProxRefusal) -> bool {
    match refusal {
        // The origin has seen nothing.
        ProxRefusal::ConnectRefused(_)
        | ProxRefusal::ConnectTimeout { .. }
        | ProxRefusal::Unroutable { .. }
        | ProxRefusal::NameTimeout(_)
        | ProxRefusal::NameNotFound { .. } => true,
        // PUT is idempotent (RFC 9110 §9.2.2), POST is not.
        refusal => may_have_arrived(refusal) && *method == Method::PUT,
    }
}

/// The origin may have seen the request.
fn may_have_arrived(refusal: &ProxRefusal) -> bool {
    matches!(
        refusal,
        ProxRefusal::OriginClosed { .. } | ProxRefusal::ResponseTimeout { .. }
    )
}

/// A whole spool as the body of a request.
struct SpoolHttpBody {
    spool: Arc<SpooledBody>,
    at: u64,
    end: u64,
    sent: Arc<AtomicU64>,
}

impl SpoolHttpBody {
    fn new(spool: &Arc<SpooledBody>) -> SpoolHttpBody {
        SpoolHttpBody {
            end: spool.extent().have,
            spool: spool.clone(),
            at: 0,
            sent: Arc::default(),
        }
    }
}

impl Body for SpoolHttpBody {
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
            Err(SpoolReadError::Failed(cause)) => Err(io::Error::other(cause)),
            Err(SpoolReadError::Disk(error)) => Err(error),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.at == self.end
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.end - self.at)
    }
}
