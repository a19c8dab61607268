//! The delivery of a complete upload to its origin, whose result any number of flows may request.
//!
//! It does not depend on a flow: the device may disconnect after its last byte, and a later flow
//! for the upload gets the same answer.

use std::sync::Arc;

use d2tp_driver::ResetCause;
use http::{Method, StatusCode};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::copy_head::CopyHead;
use crate::pinned_copy::PinnedCopy;
use crate::refusal::ProxRefusal;
use crate::request::is_idempotent;

/// The origin's answer to an upload.
#[derive(Clone, Debug)]
pub(crate) enum UploadAnswer {
    /// An answer without a body.
    HeadOnly(Arc<CopyHead>),
    /// An answer with a body, which is being received.
    Copy(Arc<PinnedCopy>),
}

/// Why there is no answer to forward.
#[derive(Clone, Debug)]
pub(crate) enum UploadFailure {
    Refused(ProxRefusal),
    /// The origin has the upload, but there is no room for its answer: neither a refusal of ours nor
    /// silence would be correct.
    Reset(ResetCause),
}

/// The result of an upload; none while there is none.
pub(crate) type UploadResult = Option<Result<UploadAnswer, UploadFailure>>;

/// A running delivery. It is aborted when this is dropped.
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
    /// Starts a delivery by `work`, which returns the result; none: it was aborted.
    pub(crate) fn of(work: impl Future<Output = UploadResult> + Send + 'static) -> UploadDelivery {
        let (sender, result) = watch::channel(None);
        let work = async move {
            if let Some(answer) = work.await {
                let _ = sender.send(Some(answer)); // Nobody may be left who would hear it.
            }
        };
        UploadDelivery {
            result,
            _work: AbortOnDropHandle::new(tokio::spawn(work)),
        }
    }

    /// A delivery that has ended with this result.
    pub(crate) fn finished(result: Result<UploadAnswer, UploadFailure>) -> UploadDelivery {
        let (_, on_result) = watch::channel(Some(result));
        UploadDelivery {
            result: on_result,
            _work: AbortOnDropHandle::new(tokio::spawn(async {})),
        }
    }

    /// The answer, when it is available; several tasks may wait for it.
    pub(crate) fn answer(
        &self,
    ) -> impl Future<Output = Result<UploadAnswer, UploadFailure>> + use<> {
        let mut result = self.result.clone();
        async move {
            match result.wait_for(Option::is_some).await {
                Ok(result) => result.clone().expect("it was waited for"),
                // It was broken off, because the proxy stops.
                Err(_) => Err(UploadFailure::Reset(ResetCause::Stopping)),
            }
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.result.borrow().is_some()
    }

    /// Whether the origin has answered.
    pub(crate) fn is_answered(&self) -> bool {
        matches!(&*self.result.borrow(), Some(Ok(_)))
    }

    /// Whether the delivery failed, or was answered, in a way that a new request to the origin may change
    /// without harm.
    pub(crate) fn may_restart(&self, method: &Method) -> bool {
        match &*self.result.borrow() {
            Some(Err(UploadFailure::Refused(refusal))) => {
                is_idempotent(method) || !may_have_arrived(refusal)
            }
            // A device that has such an answer may end its flow before the flow counts as delivered, and come
            // for another try.
            Some(Ok(answer)) => is_idempotent(method) && may_change(answer.status()),
            _ => false,
        }
    }
}

/// Whether another attempt may get another answer, so that the body must be kept.
pub(crate) fn may_change(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429)
}

/// Whether the origin may have received the request.
pub(crate) fn may_have_arrived(refusal: &ProxRefusal) -> bool {
    matches!(
        refusal,
        ProxRefusal::OriginClosed { .. } | ProxRefusal::ResponseTimeout { .. }
    )
}
