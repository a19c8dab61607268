//! Watches a flow during other work for it: its end, its deadline, and the stop of the proxy.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use d2tp_driver::{FORGOTTEN, FlowEnd, FlowHibernated, FlowIo, FlowTakenOver, ResetCause};
use tokio::io::{AsyncReadExt, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::client_traffic::FlowTraffic;
use crate::counters::TrafficKind;
use crate::flow_report::ProxFlowOutcome;
use crate::prox::Prox;

/// Bytes after a request that are read and discarded; more stay unread, which stops the sender.
const DISCARD_BYTES_MAX: usize = 64 * 1024;

/// Why a flow needs no further serving.
#[derive(Debug)]
pub(crate) enum FlowGone {
    /// Both directions ended and the device has everything.
    Delivered,
    /// The device reset the flow, or its session is lost.
    Broken(io::Error),
    /// The deadline passed, or the longest time for flows without one.
    Deadline,
    /// The proxy is stopping.
    Stopped,
    /// The flow hibernated: it will come back with another handle.
    Hibernated,
    /// Another node has taken over the flow.
    TakenOver,
    /// The device gave the flow up.
    Forgotten,
    /// The client has transferred as much as it may in this month.
    MonthUsedUp,
}

/// Whether the error says that the flow hibernated.
pub(crate) fn is_asleep(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|e| e.is::<FlowHibernated>())
}

fn is_forgotten(error: &io::Error) -> bool {
    let end = error.get_ref().and_then(|e| e.downcast_ref::<FlowEnd>());
    end == Some(&FlowEnd::Reset(FORGOTTEN))
}

/// Watches one flow.
pub(crate) struct FlowWatch {
    alarm: Pin<Box<Sleep>>,
    hold_until: Instant,
    discarded: usize,
    input_ended: bool,
    traffic: Arc<FlowTraffic>,
}

impl FlowWatch {
    pub(crate) fn new(prox: &Prox, traffic: &Arc<FlowTraffic>) -> FlowWatch {
        let now = Instant::now();
        FlowWatch {
            alarm: Box::pin(sleep_until(now)),
            hold_until: now + prox.config().no_deadline_hold,
            discarded: 0,
            input_ended: false,
            traffic: traffic.clone(),
        }
    }

    /// Ready when the flow needs no further serving. May be dropped and called again.
    pub(crate) async fn gone<F: FlowIo>(&mut self, flow: &mut F, prox: &Prox) -> FlowGone {
        let traffic = self.traffic.clone();
        let mut stopped = pin!(prox.stop.cancelled());
        let mut used_up = pin!(traffic.used_up());
        std::future::poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return Poll::Ready(FlowGone::Stopped);
            }
            // What a refusal says is no more than a few bytes.
            if traffic.kind() != TrafficKind::Other && used_up.as_mut().poll(cx).is_ready() {
                return Poll::Ready(FlowGone::MonthUsedUp);
            }
            self.poll_gone(cx, flow)
        })
        .await
    }

    /// Reads the device's next bytes into `buf`; 0 is the clean end of its direction.
    pub(crate) async fn read<F: FlowIo>(
        &mut self,
        flow: &mut F,
        prox: &Prox,
        buf: &mut BytesMut,
    ) -> Result<usize, FlowGone> {
        let traffic = self.traffic.clone();
        let mut stopped = pin!(prox.stop.cancelled());
        let mut used_up = pin!(traffic.used_up());
        let read = std::future::poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(FlowGone::Stopped));
            }
            if used_up.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(FlowGone::MonthUsedUp));
            }
            let reading = pin!(flow.read_buf(buf)).poll(cx);
            match reading {
                Poll::Ready(Ok(bytes)) => Poll::Ready(Ok(bytes)),
                Poll::Ready(Err(error)) => Poll::Ready(Err(broken(flow, error))),
                Poll::Pending => self
                    .poll_overdue(cx, flow)
                    .map(|()| Err(FlowGone::Deadline)),
            }
        })
        .await;
        self.input_ended |= matches!(read, Ok(0));
        read
    }

    fn poll_gone<F: FlowIo>(&mut self, cx: &mut Context<'_>, flow: &mut F) -> Poll<FlowGone> {
        // The device's direction must be read to its end for the flow to finish.
        self.discard(cx, flow);
        match flow.poll_finished(cx) {
            Poll::Ready(Ok(())) => return Poll::Ready(FlowGone::Delivered),
            Poll::Ready(Err(error)) => return Poll::Ready(broken(flow, error)),
            Poll::Pending => {}
        }
        self.poll_overdue(cx, flow).map(|()| FlowGone::Deadline)
    }

    /// Ready when the deadline has passed, or the longest time for a flow without one.
    fn poll_overdue<F: FlowIo>(&mut self, cx: &mut Context<'_>, flow: &F) -> Poll<()> {
        loop {
            ready!(self.alarm.as_mut().poll(cx));
            // The deadline may have been moved since the alarm was set.
            let now = Instant::now();
            let until = match flow.deadline_left() {
                Some(left) => now + left,
                None => self.hold_until,
            };
            if until <= now {
                return Poll::Ready(());
            }
            self.alarm.as_mut().reset(until);
        }
    }

    fn discard<F: FlowIo>(&mut self, cx: &mut Context<'_>, flow: &mut F) {
        let mut space = [0; 1024];
        while !self.input_ended && self.discarded < DISCARD_BYTES_MAX {
            let mut buf = ReadBuf::new(&mut space);
            match Pin::new(&mut *flow).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {
                    self.discarded += buf.filled().len();
                }
                // An error here is the flow's, and `poll_finished` tells it.
                Poll::Ready(_) => self.input_ended = true,
                Poll::Pending => return,
            }
        }
    }
}

/// The meaning of a flow's error.
fn broken<F: FlowIo>(flow: &F, error: io::Error) -> FlowGone {
    if is_asleep(&error) {
        return FlowGone::Hibernated;
    }
    if error.get_ref().is_some_and(|e| e.is::<FlowTakenOver>()) {
        return FlowGone::TakenOver;
    }
    if is_forgotten(&error) {
        return FlowGone::Forgotten;
    }
    let late = flow.deadline_left() == Some(Duration::ZERO);
    if late || error.kind() == io::ErrorKind::TimedOut {
        return FlowGone::Deadline;
    }
    FlowGone::Broken(error)
}

impl FlowGone {
    /// The outcome of a flow that ended by itself.
    pub(crate) fn outcome(self) -> ProxFlowOutcome {
        match self {
            FlowGone::Delivered => ProxFlowOutcome::Delivered,
            FlowGone::Broken(error) => ProxFlowOutcome::Broken(error.to_string()),
            FlowGone::Deadline => ProxFlowOutcome::Reset(ResetCause::Deadline),
            FlowGone::Stopped => ProxFlowOutcome::Reset(ResetCause::Stopping),
            FlowGone::Hibernated => ProxFlowOutcome::Hibernated,
            FlowGone::TakenOver => ProxFlowOutcome::TakenOver,
            FlowGone::Forgotten => ProxFlowOutcome::Forgotten,
            FlowGone::MonthUsedUp => ProxFlowOutcome::Reset(ResetCause::MonthUsedUp),
        }
    }
}
