//! Events of a session for its driver, and the reasons why sessions and flows end.

use std::sync::Arc;

use bytes::Bytes;
use d2tp_seal::PublicKey;
use d2tp_time::Span;
use d2tp_wire::{FlowId, PathId, ReasonCode};

use crate::link::LinkId;
use crate::memory_pool::MemoryCharge;

/// Why a session ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// This host closed the session.
    #[error("closed here")]
    Local,
    /// This host closed the session, and the peer may never have received the CLOSE.
    #[error("closed here; the other end may not know")]
    LocalUnheard,
    /// The instance has used up every epoch. Connect with a new instance.
    #[error("this instance has no epoch left: begin a new one")]
    EpochsExhausted,
    /// The peer closed the session.
    #[error("the peer closed the session (code {code:#x}): {text}")]
    Peer {
        /// The code that the peer gave.
        code: u64,
        /// The text that the peer gave.
        text: String,
    },
    /// The peer broke a rule of the protocol.
    #[error("the peer broke the protocol: {0}")]
    Fault(#[from] PeerFault),
    /// The server does not admit this device. The reason code says why.
    #[error("the server does not admit this device: {0:?}")]
    Refused(ReasonCode),
    /// Early data arrived with a handshake that was never confirmed (R-EARLY-2).
    #[error("the device did not confirm its handshake")]
    Unconfirmed,
    /// The two hosts have no cipher suite or version in common.
    #[error("the server speaks no version or cipher suite that we do")]
    NoCommonVersion,
    /// The server cannot agree keys by ML-KEM, and they are required (R-KEM-8).
    #[error("the server has no keys that withstand quantum computers, and they are required of it")]
    NoHybridKeys,
}

/// The rule of the protocol that a peer broke. It ends the session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerFault {
    /// The peer sent frames that cannot be decoded.
    #[error("bad frame: {0}")]
    BadFrame(#[from] d2tp_wire::DecodeError),
    /// The peer acknowledged a packet that was never sent (R-ACK-2).
    #[error("ACK of packet {acked} on path {path:?}, of which only {sent} were sent")]
    BadAck {
        /// The path that the event is about.
        path: PathId,
        /// The packet number that the peer acknowledged.
        acked: u64,
        /// The number of packets that were sent on the path.
        sent: u64,
    },
    /// The peer acknowledged a number that was skipped, so it acknowledges packets that it did not
    /// receive (R-ACK-4).
    #[error("ACK of packet {number} on path {path:?}, which was left out on purpose")]
    SkippedAck {
        /// The path that the event is about.
        path: PathId,
        /// The number of the packet.
        number: u64,
    },
    /// The peer sent more bytes than its credit allows (R-FLOW-3).
    #[error("flow {flow:?} reached {end}, credit was {credit}")]
    OverCredit {
        /// The flow; `None` for the session's credit.
        flow: Option<FlowId>,
        /// The end of the bytes that the peer sent.
        end: u64,
        /// The credit that the peer had.
        credit: u64,
    },
    /// The peer changed the final size of a flow (R-FLOW-4).
    #[error("flow {flow:?} has two lengths: {was} and {now}")]
    FinalSize {
        /// The flow whose final size changed.
        flow: FlowId,
        /// The final size that the peer stated first.
        was: u64,
        /// The final size that the peer states now.
        now: u64,
    },
    /// The peer opened a flow with an id that it must not use (R-FLOW-1).
    #[error("flow {0:?} is not the peer's to open")]
    FlowId(FlowId),
    /// The peer states that it sent more claims than arrived (R-RESUME-10).
    #[error("RESUME_END counts {said} claims, {heard} were heard")]
    Claims {
        /// The number of claims that the peer stated.
        said: u64,
        /// The number of claims that arrived.
        heard: u64,
    },
    /// The peer sent a share of keys that was not agreed on, or that is none (R-KEM-1, R-KEM-5).
    #[error("a key share that is none, or that was not agreed on")]
    KeyShare,
    /// The peer opened more flows than the limit, which is given (R-FLOW-2).
    #[error("more than {0} flows")]
    TooManyFlows(usize),
}

/// How a flow ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlowEnd {
    /// Both directions are complete and acknowledged.
    #[error("complete")]
    Complete,
    /// The peer reset the flow with this code.
    #[error("the peer reset the flow (code {0:#x})")]
    Reset(u64),
    /// This host reset the flow with this code.
    #[error("reset here (code {0:#x})")]
    Local(u64),
    /// The flow's deadline passed.
    #[error("the deadline passed")]
    DeadlinePassed,
    /// The peer does not know the flow any more, or not at this offset.
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

/// How payload moved from one path to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathSwitchKind {
    /// The new path was in use before the old one was lost.
    MakeBeforeBreak,
    /// The old path was lost before the new one carried payload.
    BreakBeforeMake,
}

/// An event of a session, for the driver.
#[derive(Clone, Debug, PartialEq)]
pub enum SessionEvent {
    /// The handshake is complete; `resumed` if the session existed before.
    Established {
        /// The public key of the peer.
        peer: PublicKey,
        /// Whether the session existed before.
        resumed: bool,
    },
    /// A path has received its first answer.
    PathUp {
        /// The path that the event is about.
        path: PathId,
        /// The link that the path is on.
        link: LinkId,
        /// The time from the path's first packet to the first answer.
        took: Span,
    },
    /// A device's path was quiet while an answer was due. The driver should ask the link's first
    /// hop, then call [`crate::Session::on_link_silent`].
    PathQuiet {
        /// The path that the event is about.
        path: PathId,
        /// The link that the path is on.
        link: LinkId,
    },
    /// A path does not answer; its data is sent on other paths.
    PathSilent {
        /// The path that the event is about.
        path: PathId,
        /// The link that the path is on.
        link: LinkId,
    },
    /// A path was closed or lost.
    PathDown {
        /// The path that the event is about.
        path: PathId,
        /// The link that the path is on.
        link: LinkId,
    },
    /// Payload arrives on another path than before, and no longer on the previous one.
    Switched {
        /// The link of the previous path, if it still exists.
        from: Option<LinkId>,
        /// The link of the new path.
        to: LinkId,
        /// Whether the two paths overlapped.
        kind: PathSwitchKind,
        /// The time between the last payload on the previous path and the first on the new one.
        silence: Span,
    },
    /// The peer opened a flow.
    Opened(FlowId),
    /// A flow has bytes to read, or its end.
    Readable(FlowId),
    /// A flow accepts more bytes.
    Writable(FlowId),
    /// The application must write the flow's bytes again from `offset` on, because the session
    /// hibernated.
    SendFrom {
        /// The flow that the event is about.
        flow: FlowId,
        /// The offset of the first byte to write again.
        offset: u64,
    },
    /// The peer has stored everything below `offset` so that it survives a crash.
    PeerDurable {
        /// The flow that the event is about.
        flow: FlowId,
        /// The offset below which everything is durable.
        offset: u64,
    },
    /// The peer changed a flow's deadline.
    DeadlineChanged(FlowId),
    /// The peer ended the session, or refused to resume the flow, after it had sent all of it: the unread bytes, after which
    /// the flow ends (R-CLOSE-1, R-RESUME-2). It precedes the flow's [`SessionEvent::Ended`].
    Remains {
        /// The flow that the event is about.
        flow: FlowId,
        /// The unread bytes, in order.
        pieces: Vec<Bytes>,
        /// The memory charge of those bytes, to be kept as long as they are.
        charge: Arc<MemoryCharge>,
    },
    /// A flow is over.
    Ended {
        /// The flow that the event is about.
        flow: FlowId,
        /// How the flow ended.
        end: FlowEnd,
    },
    /// An unreliable datagram arrived.
    Datagram {
        /// The application's context number of the datagram.
        context: u64,
        /// Payload of the datagram.
        bytes: Bytes,
    },
    /// An exchange by ML-KEM is complete: its keys are in force, and the session's record has changed.
    HybridKeys,
    /// The session has no path, so it sends nothing until it has one again.
    Suspended(ReasonCode),
    /// The session was restored for a handshake that was not confirmed, and is hibernated again
    /// unchanged. Its id is no longer valid; the next handshake restores it with another id.
    Asleep,
    /// The device used all the epochs that it reserved and cannot send another SYN. The driver must
    /// reserve more, then call [`crate::Session::add_epochs`].
    EpochsUsedUp,
    /// The session has a path again.
    Woken {
        /// How long the session had no path.
        after: Span,
    },
    /// The session is over.
    Closed(SessionEnd),
}

/// Data of a flow that arrived in a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowArrival {
    /// The flow that the data belongs to.
    pub flow: FlowId,
    /// The number of bytes.
    pub bytes: u64,
    /// The number of bytes that had not arrived before.
    pub new: u64,
}
