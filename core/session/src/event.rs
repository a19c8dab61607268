//! What a session tells its driver, and why things end.

use bytes::Bytes;
use d2tp_seal::PublicKey;
use d2tp_time::Span;
use d2tp_wire::{FlowId, PathId, ReasonCode};

use crate::link::LinkId;

/// Why a session ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// Our own side closed it.
    #[error("closed here")]
    Local,
    /// Our own side closed it, and the peer may not have heard so: it was never there to hear.
    #[error("closed here; the other end may not know")]
    LocalUnheard,
    /// The instance has used up every epoch there is; a new instance begins anew.
    #[error("this instance has no epoch left: begin a new one")]
    EpochsExhausted,
    /// The peer closed it.
    #[error("the peer closed the session (code {code:#x}): {text}")]
    Peer {
        /// The peer's code.
        code: u64,
        /// The peer's words.
        text: String,
    },
    /// The peer broke a rule.
    #[error("the peer broke the protocol: {0}")]
    Fault(#[from] PeerFault),
    /// The server does not admit this device.
    #[error("the server does not admit this device: {0:?}")]
    Refused(ReasonCode),
    /// Early data came with a handshake that nobody confirmed (R-EARLY-2).
    #[error("the device did not confirm its handshake")]
    Unconfirmed,
    /// No common suite or version.
    #[error("the server speaks no version or cipher suite that we do")]
    NoCommonVersion,
}

/// Which rule of the protocol a peer broke. Ends the session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerFault {
    /// Frames that do not decode.
    #[error("bad frame: {0}")]
    BadFrame(#[from] d2tp_wire::DecodeError),
    /// An ACK of a packet that was never sent (R-ACK-2).
    #[error("ACK of packet {acked} on path {path:?}, of which only {sent} were sent")]
    BadAck {
        /// The path that the event is about.
        path: PathId,
        /// The number acknowledged.
        acked: u64,
        /// How many were sent.
        sent: u64,
    },
    /// An ACK of a number that was left out: it acknowledges what it did not receive (R-ACK-4).
    #[error("ACK of packet {number} on path {path:?}, which was left out on purpose")]
    SkippedAck {
        /// The path that the event is about.
        path: PathId,
        /// The number of the packet.
        number: u64,
    },
    /// More bytes than it was given credit for (R-FLOW-3).
    #[error("flow {flow:?} reached {end}, credit was {credit}")]
    OverCredit {
        /// The flow, or none for the session's credit.
        flow: Option<FlowId>,
        /// Where it ended.
        end: u64,
        /// What was allowed.
        credit: u64,
    },
    /// A flow's length changed (R-FLOW-4).
    #[error("flow {flow:?} has two lengths: {was} and {now}")]
    FinalSize {
        /// The flow that the peer contradicts itself about.
        flow: FlowId,
        /// First said.
        was: u64,
        /// What the peer states now.
        now: u64,
    },
    /// A flow opened with an id that is not the peer's to use (R-FLOW-1).
    #[error("flow {0:?} is not the peer's to open")]
    FlowId(FlowId),
    /// The peer states that it claimed more flows than it did (R-RESUME-10).
    #[error("RESUME_END counts {said} claims, {heard} were heard")]
    Claims {
        /// What it said.
        said: u64,
        /// What arrived.
        heard: u64,
    },
    /// More flows than the limit (R-FLOW-2).
    #[error("more than {0} flows")]
    TooManyFlows(usize),
}

/// How a flow ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlowEnd {
    /// Both directions are complete and acknowledged.
    #[error("complete")]
    Complete,
    /// The peer reset it.
    #[error("the peer reset the flow (code {0:#x})")]
    Reset(u64),
    /// We reset it.
    #[error("reset here (code {0:#x})")]
    Local(u64),
    /// The flow's deadline passed.
    #[error("the deadline passed")]
    DeadlinePassed,
    /// The peer no longer knows it, or not at this offset.
    #[error("{}", why_refused(*.0))]
    Refused(ReasonCode),
    /// The flow's session ended.
    #[error("the session ended")]
    SessionEnded,
}

fn why_refused(reason: ReasonCode) -> String {
    match reason {
        ReasonCode::LimitReached => {
            "the server has as many connections of this device as it takes; \
                                 those of programs that were killed count for an hour"
                .to_owned()
        }
        reason => format!("the peer refused to resume it: {reason:?}"),
    }
}

/// How a switch between paths came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathSwitchKind {
    /// The new path was there before the old one went.
    MakeBeforeBreak,
    /// There was nothing in between.
    BreakBeforeMake,
}

/// Something happened.
#[derive(Clone, Debug, PartialEq)]
pub enum SessionEvent {
    /// The handshake is complete (again: `resumed`).
    Established {
        /// Who the peer is.
        peer: PublicKey,
        /// The session existed before.
        resumed: bool,
    },
    /// A path works.
    PathUp {
        /// The path that the event is about.
        path: PathId,
        /// The link that the path is on.
        link: LinkId,
        /// From its first packet to the answer.
        took: Span,
    },
    /// Nothing came on a path of a device for a while where something should: its first hop is worth asking
    /// ([`crate::Session::on_link_silent`]).
    PathQuiet {
        /// The path that the event is about.
        path: PathId,
        /// The link that the path is on.
        link: LinkId,
    },
    /// A path does not answer; its data goes elsewhere.
    PathSilent {
        /// The path that the event is about.
        path: PathId,
        /// The link that the path is on.
        link: LinkId,
    },
    /// A path is gone.
    PathDown {
        /// The path that the event is about.
        path: PathId,
        /// The link that the path is on.
        link: LinkId,
    },
    /// Payload arrives on another path than before, and no more on the one before.
    Switched {
        /// The path before, if it still has a name.
        from: Option<LinkId>,
        /// The path now.
        to: LinkId,
        /// How.
        kind: PathSwitchKind,
        /// From the last payload before to the first one on the new path.
        silence: Span,
    },
    /// The peer opened a flow.
    Opened(FlowId),
    /// A flow has bytes to read, or its end.
    Readable(FlowId),
    /// A flow takes more bytes.
    Writable(FlowId),
    /// The flow's bytes must be given again from `offset` on (it slept as a record).
    SendFrom {
        /// The flow that the event is about.
        flow: FlowId,
        /// Where to begin.
        offset: u64,
    },
    /// The peer keeps everything below `offset` safe across a crash.
    PeerDurable {
        /// The flow that the event is about.
        flow: FlowId,
        /// Up to here.
        offset: u64,
    },
    /// The peer changed a flow's deadline.
    DeadlineChanged(FlowId),
    /// The peer ended the session, and had sent all of this flow before: what was not read yet, and then
    /// its end (R-CLOSE-1). Comes before the flow's [`SessionEvent::Ended`].
    Remains {
        /// The flow that the event is about.
        flow: FlowId,
        /// Its bytes, in order.
        pieces: Vec<Bytes>,
    },
    /// A flow is over.
    Ended {
        /// The flow that the event is about.
        flow: FlowId,
        /// How.
        end: FlowEnd,
    },
    /// An unreliable datagram.
    Datagram {
        /// The context the peer gave.
        context: u64,
        /// Payload of the datagram.
        bytes: Bytes,
    },
    /// No path is left: nothing is sent until there is one.
    Suspended(ReasonCode),
    /// The session was thawed for a handshake that nobody confirmed, and is its record again, as
    /// it was. Its id is no more; the next handshake thaws it under another.
    Asleep,
    /// The device used all epochs it reserved and cannot knock again: reserve more, then
    /// [`crate::Session::add_epochs`].
    EpochsUsedUp,
    /// Paths are back.
    Woken {
        /// How long there was none.
        after: Span,
    },
    /// The session is over.
    Closed(SessionEnd),
}

/// A piece of a flow that a datagram carried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowArrival {
    /// The flow that the data belong to.
    pub flow: FlowId,
    /// Bytes of data.
    pub bytes: u64,
    /// Bytes that had not arrived before.
    pub new: u64,
}
