//! Descriptions of the frames in sent packets. The frames themselves are not kept: after a loss
//! their owners send frames with the current state.

use d2tp_time::Time;
use d2tp_wire::{FlowId, PathId};

/// Bytes of a flow that a packet carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SentData {
    pub(crate) flow: FlowId,
    pub(crate) offset: u64,
    pub(crate) len: u16,
    pub(crate) fin: bool,
}

/// A frame in a sent packet, except the first piece of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SentFrame {
    Data(SentData),
    /// Data that another path has sent as well.
    Copy(SentData),
    Ack {
        path: PathId,
        largest: u64,
    },
    Flow {
        flow: FlowId,
        what: u16,
    },
    Refused(FlowId),
    Gone(PathId),
    Session {
        what: u16,
    },
    Path {
        path: PathId,
        what: u16,
    },
    Grant {
        flow: FlowId,
        path: PathId,
    },
    Spent {
        flow: FlowId,
        path: PathId,
    },
}

/// The state of a sent packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PacketState {
    Outstanding,
    Lost,
    Done,
}

/// A packet in flight.
#[derive(Debug)]
pub(crate) struct SentPacket {
    pub(crate) at: Time,
    pub(crate) bytes: u16,
    pub(crate) eliciting: bool,
    pub(crate) mtu_probe: bool,
    pub(crate) app_limited: bool,
    /// Bytes of the packet's data that were repeated on another path.
    pub(crate) copied: u16,
    /// Whether congestion control is not informed of the packet's loss: it was lost at random, was a probe of the
    /// datagram size, or was sent in an outage.
    pub(crate) hidden: bool,
    pub(crate) data: Option<SentData>,
    pub(crate) more: Vec<SentFrame>,
    pub(crate) state: PacketState,
}

impl SentPacket {
    pub(crate) fn new(at: Time) -> Self {
        SentPacket {
            at,
            bytes: 0,
            eliciting: false,
            mtu_probe: false,
            app_limited: false,
            copied: 0,
            hidden: false,
            data: None,
            more: Vec::new(),
            state: PacketState::Outstanding,
        }
    }
    /// All frames of the packet.
    pub(crate) fn frames(&self) -> impl Iterator<Item = SentFrame> + '_ {
        self.data
            .map(SentFrame::Data)
            .into_iter()
            .chain(self.more.iter().copied())
    }
    /// Bytes of the packet's data.
    pub(crate) fn payload(&self) -> u64 {
        let len = |said| match said {
            SentFrame::Data(data) => u64::from(data.len),
            _ => 0,
        };
        self.frames().map(len).sum()
    }
    pub(crate) fn note(&mut self, said: SentFrame) {
        match said {
            SentFrame::Data(data) if self.data.is_none() => self.data = Some(data),
            other => self.more.push(other),
        }
    }
}
