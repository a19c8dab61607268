//! Withholds the body of a request on a connection that was used before, until its origin has shown that it reads there.
//!
//! ```text
//!  head with Expect: 100-continue ─▶ origin ─┬─ 100 ──────────────────▶ the body is sent
//!                                            ├─ a second of silence ──▶ the body is sent; next time it gets a new connection
//!                                            └─ it closes ────────────▶ it has no complete request: sent again elsewhere
//! ```
//!
//! So a request that must not be sent twice, such as a POST, may use a connection that its origin may be closing.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body, Frame, SizeHint};

/// Whether a body may be sent.
#[derive(Default)]
pub(crate) struct BodyGate {
    is_open: AtomicBool,
    waker: AtomicWaker,
}

impl BodyGate {
    /// Lets the body be sent.
    pub(crate) fn open(&self) {
        self.is_open.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Whether bytes of the body may have been sent.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }
}

/// A body that is sent once its gate is open.
pub(crate) struct GatedBody {
    pub(crate) gate: Arc<BodyGate>,
    pub(crate) body: UnsyncBoxBody<Bytes, std::io::Error>,
}

impl Body for GatedBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        self.gate.waker.register(cx.waker());
        if !self.gate.is_open() {
            return Poll::Pending;
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
