//! What a flow is opened with, and its OPEN frame.

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, Frame};

/// The priority that goes last.
pub(crate) const PRIORITY_LAST: u8 = 7;

/// Options with which a flow is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowOptions {
    /// Priority: 0 is sent first, 7 last.
    pub priority: u8,
    /// Bytes expected, for the scheduler.
    pub size: Option<u64>,
    /// The time by which the flow must finish; both ends drop it when the deadline passes.
    pub deadline: Option<Time>,
    /// Whether the sender keeps bytes until the receiver has made them durable.
    pub durable: bool,
    /// Whether the bytes sent here can be read again from their source, so that the flow may hibernate.
    pub hibernates: bool,
    /// The peer may want to speak at any time: while the device is awake it keeps one permitted
    /// path open for it ([`crate::EndpointConfig::keepalive`]). Others cost nothing while they are idle.
    pub reachable: bool,
    /// Its opening and first bytes may travel in the SYN of the first handshake, a round trip sooner,
    /// to a server that allows it. They may then be heard twice, and whoever learns the server's key
    /// later can read them: for requests that do no harm when repeated.
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

    /// The OPEN of a flow with these options.
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

    /// The options of an OPEN frame; `None` for any other frame.
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
