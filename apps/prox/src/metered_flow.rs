//! A flow whose bytes are counted, and as fast as its client's limits allow.
//!
//! What is not read stays with the device, which gets no more credit; what is not written stays with the origin. A
//! source is metered where it is read (`answer.rs`), because the flow's own task does not see that.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{
    Connection, DatagramSender, DeviceRelays, FlowIo, FlowRemainder, HibernationSwitch, HostKey,
    SendSource,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::client_traffic::FlowTraffic;
use crate::counters::TrafficDirection;

/// A flow whose bytes count against its client's limits.
pub(crate) struct MeteredFlow<F> {
    flow: F,
    client: HostKey,
    traffic: Arc<FlowTraffic>,
}

impl<F: FlowIo> MeteredFlow<F> {
    pub(crate) fn new(flow: F, traffic: Arc<FlowTraffic>) -> MeteredFlow<F> {
        MeteredFlow {
            client: flow.peer(),
            flow,
            traffic,
        }
    }

    /// From now on the flow is this client's, whose link it asks for.
    pub(crate) fn belongs_to(&mut self, client: HostKey, traffic: Arc<FlowTraffic>) {
        self.client = client;
        self.traffic = traffic;
    }
}

impl<F: FlowIo> AsyncRead for MeteredFlow<F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let allowed = ready!(this.traffic.poll(cx, TrafficDirection::Up));
        let flow = Pin::new(&mut this.flow);
        let (polled, read) = if allowed >= buf.remaining() {
            let before = buf.filled().len();
            let polled = flow.poll_read(cx, buf);
            (polled, buf.filled().len() - before)
        } else {
            let mut part = ReadBuf::new(buf.initialize_unfilled_to(allowed));
            let polled = flow.poll_read(cx, &mut part);
            let read = part.filled().len();
            buf.advance(read);
            (polled, read)
        };
        this.traffic.moved(TrafficDirection::Up, read);
        polled
    }
}

impl<F: FlowIo> AsyncWrite for MeteredFlow<F> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let allowed = ready!(this.traffic.poll(cx, TrafficDirection::Down));
        let part = &bytes[..bytes.len().min(allowed)];
        let written = Pin::new(&mut this.flow).poll_write(cx, part);
        let moved = match &written {
            Poll::Ready(Ok(moved)) => *moved,
            _ => 0,
        };
        this.traffic.moved(TrafficDirection::Down, moved);
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.flow).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.flow).poll_shutdown(cx)
    }
}

impl<F: FlowIo> FlowIo for MeteredFlow<F> {
    fn id(&self) -> u64 {
        self.flow.id()
    }

    fn peer(&self) -> HostKey {
        self.client
    }

    fn deadline_left(&self) -> Option<Duration> {
        self.flow.deadline_left()
    }

    fn limit_moved_deadlines(&mut self, max: Duration) {
        self.flow.limit_moved_deadlines(max);
    }

    fn send_source(&mut self, source: Arc<dyn SendSource>) {
        self.flow.send_source(source);
    }

    fn resume_source(&mut self, source: Arc<dyn SendSource>) {
        self.flow.resume_source(source);
    }

    fn allow_hibernation(&mut self, memo: Bytes) {
        self.flow.allow_hibernation(memo);
    }

    fn hibernation_switch(&self) -> HibernationSwitch {
        self.flow.hibernation_switch()
    }

    fn take_remainder(&mut self) -> Option<FlowRemainder> {
        self.flow.take_remainder()
    }

    fn resumed_at(&self) -> Option<u64> {
        self.flow.resumed_at()
    }

    fn memo(&self) -> Option<Bytes> {
        self.flow.memo()
    }

    fn relays(&self) -> Option<DeviceRelays> {
        self.flow.relays()
    }

    fn datagram_sender(&self) -> Option<DatagramSender> {
        self.flow.datagram_sender()
    }

    fn session(&self) -> Option<Connection> {
        self.flow.session()
    }

    fn peer_stopped_check(&self) -> Box<dyn Fn() -> bool + Send> {
        self.flow.peer_stopped_check()
    }

    fn reset(&mut self, code: u64) {
        self.flow.reset(code);
    }

    fn poll_finished(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.flow.poll_finished(cx)
    }
}
