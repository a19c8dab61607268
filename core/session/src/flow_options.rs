//! Options of flows, and their encoding in OPEN frames.

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, Frame};

/// The lowest priority.
pub(crate) const PRIORITY_LAST: u8 = 7;

/// Options with which a flow is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowOptions {
    /// Priority: 0 is sent first, 7 last.
    pub priority: u8,
    /// The expected size in bytes, for the scheduler.
    pub size: Option<u64>,
    /// The time until which the flow is of use. Both ends drop it when the deadline passes.
    pub deadline: Option<Time>,
    /// Whether the sender keeps bytes until the receiver has stored them durably.
    pub durable: bool,
    /// Whether this end can read the bytes that it sends again from their source, so that the flow
    /// may hibernate.
    pub hibernates: bool,
    /// Whether the peer may want to send at any time. While the device is awake it then keeps one
    /// permitted path open for the flow ([`crate::EndpointConfig::keepalive`]). Other flows cost
    /// nothing while they are idle.
    pub reachable: bool,
    /// Whether the flow's OPEN and first bytes may travel in the SYN of the first handshake, a
    /// round trip sooner, to a server that allows it. They may then be received twice, and an
    /// attacker who learns the server's key later can read them: only for requests that may safely
    /// be repeated.
    pub early: bool,
}

impl FlowOptions {
    /// The bits of OPEN's `flags`, and the option that each stands for.
    fn flags(&mut self) -> [(u8, &mut bool); 3] {
        [
            (Frame::OPEN_DURABLE, &mut self.durable),
            (Frame::OPEN_HIBERNATES, &mut self.hibernates),
            (Frame::OPEN_REACHABLE, &mut self.reachable),
        ]
    }

    /// The OPEN frame of a flow with these options.
    pub(crate) fn open_frame(mut self, now: Time, flow: FlowId) -> Frame<'static> {
        let on = self.flags().into_iter().filter(|(_, on)| **on);
        let flags = on.fold(0, |flags, (flag, _)| flags | flag);
        Frame::Open {
            flow,
            flags,
            priority: self.priority,
            size: self.size,
            deadline_ms: self.deadline.map(|d| d.since(now).as_millis()),
        }
    }

    /// The options in an OPEN frame; `None` for any other frame.
    pub(crate) fn from_open_frame(now: Time, frame: &Frame<'_>) -> Option<(FlowId, FlowOptions)> {
        let &Frame::Open {
            flow,
            flags,
            priority,
            size,
            deadline_ms,
        } = frame
        else {
            return None;
        };
        let mut options = FlowOptions {
            priority: priority.min(PRIORITY_LAST),
            size,
            deadline: deadline_ms.map(|ms| now + Span::from_millis(ms)),
            ..FlowOptions::default()
        };
        for (flag, on) in options.flags() {
            *on = flags & flag != 0;
        }
        Some((flow, options))
    }
}
