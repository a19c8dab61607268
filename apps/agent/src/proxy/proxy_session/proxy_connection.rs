//! A connection through D2Prox, as a stream.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use d2tp_driver::{Flow, FlowEnd, FlowIo as _, ResetCause};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

use super::super::carry::carry;
use super::super::target::TargetAddress;
use super::ProxySession;
use super::session_flows::{ConnLengths, ConnTraffic, lock};
use crate::fetch::dial::ByteStream;

/// What became of a connection that D2Prox does not know any more.
const LOST: &str = "the proxy was started again, and connections through it were reset. Programs that \
    connect again continue";

/// A connection that D2Prox opened: its stream is the target's. It is reset if it is dropped before
/// both ends have ended.
pub struct ProxyConnection {
    pub(super) io: Box<dyn ByteStream>,
    pub(super) flow: Arc<Mutex<Flow>>,
    pub(super) number: u64,
    /// Bytes that the connection moved.
    pub(super) moved: Arc<ConnTraffic>,
    /// Bytes that all connections with the same options moved.
    pub(super) moved_together: Arc<ConnTraffic>,
    pub(super) lengths: Arc<ConnLengths>,
    pub(super) target: TargetAddress,
    pub(super) line: Arc<ProxySession>,
    pub(super) _place: OwnedSemaphorePermit,
}

impl ProxyConnection {
    /// The target of the connection.
    pub fn target(&self) -> &TargetAddress {
        &self.target
    }

    /// Carries a program's connection until it is over.
    pub async fn carry(mut self, program: TcpStream) {
        if carry(program, &mut self).await {
            self.wait_delivered().await;
        } else {
            self.report_broken();
        }
    }

    /// Reports a connection that broke, if D2Prox is the reason.
    pub(in crate::proxy) fn report_broken(&self) {
        if self.is_lost() {
            let lost = self.line.lost.fetch_add(1, Relaxed) + 1;
            match lost {
                1 => tracing::warn!(target = %self.target, "{LOST}"),
                _ => tracing::info!(target = %self.target, "{LOST}"),
            }
        }
    }

    /// Whether the connection ended because D2Prox does not know it any more, or is stopping.
    fn is_lost(&self) -> bool {
        match lock(&self.flow).end() {
            Some(FlowEnd::Refused(_) | FlowEnd::SessionEnded) => true,
            Some(FlowEnd::Reset(code)) => ResetCause::from_code(code) == Some(ResetCause::Stopping),
            _ => false,
        }
    }

    /// Waits until the peer has everything, after both directions have ended.
    pub async fn wait_delivered(self) {
        self.lengths.on_ended();
        // Once it is delivered its flow may be forgotten.
        let device = self.line.proxy.device();
        lock(&self.line.flows).count_paid(self.number, device.as_deref());
        let _ = poll_fn(|cx| lock(&self.flow).poll_finished(cx)).await;
    }
}

impl Drop for ProxyConnection {
    fn drop(&mut self) {
        self.line.leave(self.number);
        self.line.left.notify_one();
    }
}

impl AsyncRead for ProxyConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, into);
        let more = into.filled().len() - before;
        for moved in [&self.moved, &self.moved_together] {
            moved.down.fetch_add(more as u64, Relaxed);
        }
        if self.lengths.on_received(&into.filled()[before..]) {
            self.line.stirred.notify_one();
        }
        polled
    }
}

impl AsyncWrite for ProxyConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(cx, bytes);
        if let Poll::Ready(Ok(more)) = polled {
            for moved in [&self.moved, &self.moved_together] {
                moved.up.fetch_add(more as u64, Relaxed);
            }
            if self.lengths.on_sent(&bytes[..more]) {
                self.line.stirred.notify_one();
            }
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
