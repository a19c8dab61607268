//! A flow as a byte stream, shared by the exchange that reads it and the transfer that controls it.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};

use d2tp_driver::Flow;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::head_scanner::HeadScanner;

/// A flow that is shared by the exchange that reads it and the transfer that manages it.
pub(super) struct SharedFlow {
    pub(super) flow: Arc<Mutex<Flow>>,
    /// The scanner for the head of the answer, for a flow that a later process may claim.
    pub(super) head: Option<Arc<Mutex<HeadScanner>>>,
    /// The code with which the flow was reset.
    pub(super) broken: Arc<OnceLock<u64>>,
}

impl SharedFlow {
    pub(super) fn flow(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsyncRead for SharedFlow {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut *self.flow()).poll_read(cx, buf);
        if let Some(head) = &self.head {
            let mut head = head.lock().unwrap_or_else(PoisonError::into_inner);
            head.scan(&buf.filled()[before..]);
        }
        if let Poll::Ready(Err(error)) = &read {
            let error = error
                .get_ref()
                .and_then(|e| e.downcast_ref::<d2tp_session::FlowError>());
            if let Some(d2tp_session::FlowError::Reset(code)) = error {
                let _ = self.broken.set(*code);
            }
        }
        read
    }
}

impl AsyncWrite for SharedFlow {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.flow()).poll_write(cx, bytes)
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.flow()).poll_flush(cx)
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.head.is_some() {
            // HTTP is done with the flow as soon as it has the answer. The end of our direction tells
            // the proxy that the bytes are safe, which only `Proxy::finish` knows.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut *self.flow()).poll_shutdown(cx)
    }
}
