//! What becomes of a whole upload at its origin, for any number of flows that ask.
//!
//! It does not depend on a flow: the device that sent its last byte may go, and who comes back for
//! the upload hears the same answer.

use std::sync::Arc;

use d2tp_driver::ResetCause;
use http::{Method, StatusCode};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::pinned_copy::{CopyHead, PinnedCopy};
use crate::refusal::ProxRefusal;

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

/// What became of an upload; none: nothing yet.
pub(crate) type UploadResult = Option<Result<UploadAnswer, UploadFailure>>;

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
    /// A delivery whose answer `work` finds; none: it was broken off.
    pub(crate) fn of(work: impl Future<Output = UploadResult> + Send + 'static) -> UploadDelivery {
        let (tell, told) = watch::channel(None);
        let work = async move {
            if let Some(answer) = work.await {
                let _ = tell.send(Some(answer)); // Nobody may be left who would hear it.
            }
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

/// The origin may have seen the request.
pub(crate) fn may_have_arrived(refusal: &ProxRefusal) -> bool {
    matches!(
        refusal,
        ProxRefusal::OriginClosed { .. } | ProxRefusal::ResponseTimeout { .. }
    )
}
