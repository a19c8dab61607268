//! Sends a complete upload to its origin, with retries while the origin is not reachable. A request
//! that the origin may have seen is repeated only if it is idempotent.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{HostKey, ResetCause};
use http::Method;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use crate::copy_head::CopyHead;
use crate::origin::{OriginRequestBody, OriginResponse};
use crate::prox::{Prox, random_name};
use crate::refusal::ProxRefusal;
use crate::request::{UploadRequest, is_idempotent};
use crate::spooled_body::{SpoolReadError, SpooledBody};
use crate::stored_upload::StoredUpload;
use crate::upload_delivery::{UploadAnswer, UploadDelivery, UploadFailure, may_have_arrived};

/// Begins to send a complete spool. In `stored`, if there is one, it is recorded what the origin may have received.
pub(crate) fn start(
    prox: &Arc<Prox>,
    client: HostKey,
    request: &UploadRequest,
    spool: &Arc<SpooledBody>,
    stored: Option<&Arc<StoredUpload>>,
) -> UploadDelivery {
    let (prox, request, spool) = (prox.clone(), request.clone(), spool.clone());
    let stored = stored.cloned();
    UploadDelivery::of(async move {
        let delivering = deliver(&prox, client, &request, &spool, stored.as_ref());
        let answer = tokio::select! {
            answer = delivering => answer.map_err(UploadFailure::Refused),
            () = prox.stop.cancelled() => return None,
        };
        if let Ok(response) = &answer {
            let (method, url) = (&request.method, &request.url);
            prox.invalidate_cached(method, url, response).await;
        }
        let stored = stored.as_ref();
        Some(answer.and_then(|response| take_over(&prox, client, &request, response, stored)))
    })
}

/// Bytes given to the origin's connection at a time.
const READ_BYTES: usize = 64 * 1024;

/// The longest wait between two attempts to reach the origin.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(60);

/// Receives the origin's answer, and reserves room for its body.
fn take_over(
    prox: &Arc<Prox>,
    client: HostKey,
    request: &UploadRequest,
    response: OriginResponse,
    stored: Option<&Arc<StoredUpload>>,
) -> Result<UploadAnswer, UploadFailure> {
    if matches!(response.status.as_u16(), 204 | 304) {
        let head = CopyHead::relayed(&response);
        if let Some(stored) = stored {
            stored.record_answer_head(client, &head);
        }
        return Ok(UploadAnswer::HeadOnly(Arc::new(head)));
    }
    let name = stored.map(|_| random_name());
    match prox.pin_upload_answer(client, request, response, name) {
        Ok(copy) => {
            if let Some(stored) = stored {
                stored.record_answer_copy(&copy);
            }
            Ok(UploadAnswer::Copy(copy))
        }
        Err(ProxRefusal::StoreFailed) => Err(UploadFailure::Reset(ResetCause::StoreFailed)),
        Err(_) => Err(UploadFailure::Reset(ResetCause::StoreFull)),
    }
}

async fn deliver(
    prox: &Arc<Prox>,
    client: HostKey,
    request: &UploadRequest,
    spool: &Arc<SpooledBody>,
    stored: Option<&Arc<StoredUpload>>,
) -> Result<OriginResponse, ProxRefusal> {
    let give_up = Instant::now() + prox.config().origin_patience;
    let mut wait = prox.config().retry_wait;
    let memory = prox.origin_memory(client);
    let mut may_use_kept_conn = true;
    loop {
        let body = SpoolHttpBody::new(spool);
        let outgoing = OriginRequestBody {
            sent: body.sent.clone(),
            body: body.boxed_unsync(),
            shares_conns_of: Some(client),
            may_use_kept_conn,
            before_sending: stored.map(|stored| stored.clone().record_sending()),
        };
        let upstream = prox.upstream();
        let sending = upstream.send(
            &request.method,
            &request.url,
            &request.headers,
            outgoing,
            &memory,
        );
        let refusal = match sending.await {
            Ok(response) => return Ok(response),
            // The origin has not received the request.
            Err(ProxRefusal::KeptConnClosed(_)) if may_use_kept_conn => {
                may_use_kept_conn = false;
                continue;
            }
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

/// Whether sending the request again may help, and does no harm.
fn may_repeat(method: &Method, refusal: &ProxRefusal) -> bool {
    match refusal {
        // The origin has seen nothing.
        ProxRefusal::ConnectRefused(_)
        | ProxRefusal::ConnectTimeout { .. }
        | ProxRefusal::Unroutable { .. }
        | ProxRefusal::NameTimeout(_)
        | ProxRefusal::NameNotFound { .. }
        // Another flow of this client may end.
        | ProxRefusal::ClientMemoryFull => true,
        refusal => may_have_arrived(refusal) && is_idempotent(method),
    }
}

/// A complete spool as the body of a request.
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
        mut self: Pin<&mut Self>,
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
