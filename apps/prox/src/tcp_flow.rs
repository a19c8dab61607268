//! A flow of a client without D2TP: a connection, or a stream of one.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use d2tp_driver::{FlowIo, HostKey, SendSource};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http2_flow::Http2Flow;
use crate::stream_flow::StreamFlow;

/// A flow of a client without D2TP.
pub enum TcpFlow {
    /// A connection with one request of HTTP/1.1.
    Connection(StreamFlow),
    /// A stream of HTTP/2.
    Stream(Http2Flow),
}

/// Evaluates an expression for the flow of either kind.
macro_rules! either {
    ($flow:expr, $name:ident => $result:expr) => {
        match $flow {
            TcpFlow::Connection($name) => $result,
            TcpFlow::Stream($name) => $result,
        }
    };
}

impl AsyncRead for TcpFlow {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self.get_mut(), flow => Pin::new(flow).poll_read(cx, buf))
    }
}

impl AsyncWrite for TcpFlow {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self.get_mut(), flow => Pin::new(flow).poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), flow => Pin::new(flow).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), flow => Pin::new(flow).poll_shutdown(cx))
    }
}

impl FlowIo for TcpFlow {
    fn id(&self) -> u64 {
        either!(self, flow => flow.id())
    }

    fn peer(&self) -> HostKey {
        either!(self, flow => flow.peer())
    }

    fn deadline_left(&self) -> Option<Duration> {
        either!(self, flow => flow.deadline_left())
    }

    fn limit_moved_deadlines(&mut self, _max: Duration) {}

    fn send_source(&mut self, source: Arc<dyn SendSource>) {
        either!(self, flow => flow.send_source(source));
    }

    fn peer_stopped_check(&self) -> Box<dyn Fn() -> bool + Send> {
        either!(self, flow => flow.peer_stopped_check())
    }

    fn reset(&mut self, code: u64) {
        either!(self, flow => flow.reset(code));
    }

    fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, flow => flow.poll_finished(cx))
    }
}
