//! Frames: one instruction each, inside a sealed DATA packet (or a handshake payload).
//!
//! ```text
//!  type    frame           fields (v = varint, bytes otherwise)
//!  00      PADDING         –
//!  01      PING            –
//!  02      ACK             path v, largest v, delay_us v, ranges v, first v, {gap v, len v}*
//!  03      ACK_RATE        path v, every v, delay_us v
//!  04      KEY_SHARE       half 1, length v, bytes
//!  08/09   DATA / DATA+FIN flow v, offset v, length v, bytes
//!  10      OPEN            flow v, flags 1, priority 1, size+1 v, deadline_ms+1 v
//!  11      RESET           flow v, code v, final_size v
//!  12      STOP            flow v, code v
//!  13      FLOW_CREDIT     flow v, max v
//!  14      SESSION_CREDIT  max v
//!  15      DEADLINE        flow v, seq v, remaining_ms+1 v
//!  16      DURABLE         flow v, offset v
//!  17      COMMITTED       flow v, offset v
//!  18      GRANT           seq v, flow v, path v, max_sent v
//!  19      SPENT           flow v, path v, sent v
//!  1a      PATH_STATUS     path v, seq v, status 1, gated 1, reason 1
//!  1b      PATH_LIMIT      path v, seq v, bytes v
//!  1c      FLOW_PAUSE      flow v, seq v, paused 1, reason 1
//!  20/21   CHG / RSP       nonce 16
//!  22      AUTH            path v
//!  23      PATH_CID        path v, cid 8, token 16
//!  28      RESUME          flow v, received v, flags 1
//!  29      RESUMED         flow v, received v
//!  2a      REFUSED         flow v, reason 1
//!  2b      RESUME_END      flows v
//!  30      DATAGRAM        context v, length v, bytes
//!  3c      SUSPEND         reason 1
//!  3e      CLOSE           code v, text (length v, bytes)
//! ```
//!
//! R-WIRE-2: a frame of unknown type ends the session. Extensions need a new version, which is
//! negotiated.

use crate::codec::{DecodeError, VARINT_MAX, WireReader, WireWriter, varint_len};
use crate::packet::{Cid, PathId, TOKEN_BYTES};

/// The identifier of a flow, never used twice between two instances: `epoch (32) ‖ counter (24) ‖
/// opener (1)`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FlowId(pub u64);

impl FlowId {
    /// The largest flow id: the 57 bits of epoch, counter and opener (R-FLOW-10).
    pub const MAX: u64 = (1 << 57) - 1;
    /// The number of flows that one side may open in one epoch.
    pub const COUNTER_MAX: u32 = (1 << 24) - 1;

    /// The `counter`-th flow of `epoch`, opened by the session's initiator or by its responder.
    pub fn new(epoch: u32, counter: u32, by_initiator: bool) -> Self {
        assert!(counter <= Self::COUNTER_MAX);
        FlowId(u64::from(epoch) << 25 | u64::from(counter) << 1 | u64::from(!by_initiator))
    }
    /// Whether the session's initiator opened this flow.
    pub fn by_initiator(self) -> bool {
        self.0 & 1 == 0
    }
    /// The epoch in which the flow was opened.
    pub fn epoch(self) -> u32 {
        (self.0 >> 25) as u32
    }
    /// The flow's number among the flows that its opener opened in that epoch.
    pub fn counter(self) -> u32 {
        (self.0 >> 1) as u32 & Self::COUNTER_MAX
    }
}

/// The state of a path, as its device reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathStatus {
    /// The path may carry payload.
    Available,
    /// The path is kept, but must not carry payload.
    Standby,
    /// The path's link is silent for a while: nothing is sent, and the congestion window is kept.
    Frozen,
    /// The path no longer exists.
    Gone,
}

/// Why something waits, stops or ends, in one byte on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ReasonCode {
    /// No reason is given.
    None = 0,
    /// No link is up.
    NoPath = 1,
    /// The only link that is up costs money that this flow may not spend yet.
    PathCost = 2,
    /// The flow's or link's budget is used up.
    OverBudget = 3,
    /// The link answers too slowly to be of use.
    PathTooSlow = 4,
    /// The user paused it.
    UserPaused = 5,
    /// Another flow goes first.
    QueuedBehind = 6,
    /// The flow's deadline passed.
    DeadlinePassed = 7,
    /// The host does not know this flow.
    UnknownFlow = 8,
    /// The host knows the flow, but its state is older than the offset claimed.
    RolledBack = 9,
    /// A limit of this host was reached.
    LimitReached = 10,
    /// The application ended it.
    Application = 11,
    /// The host is stopping.
    Stopping = 12,
    /// The peer broke a rule of the protocol.
    Protocol = 13,
    /// The server's list of allowed clients does not contain this client.
    NotAllowed = 14,
    /// The device goes to sleep.
    Sleeping = 15,
    /// Both directions of the path's link contend for one medium.
    HalfDuplex = 16,
    /// The path costs money, and its user allows it to carry ACKs of other paths.
    TakesAcks = 17,
}

impl ReasonCode {
    /// The reason that a byte stands for. A value that only newer versions define reads as
    /// [`ReasonCode::None`].
    pub fn from_u8(b: u8) -> ReasonCode {
        use ReasonCode::*;
        const ALL: [ReasonCode; 18] = [
            None,
            NoPath,
            PathCost,
            OverBudget,
            PathTooSlow,
            UserPaused,
            QueuedBehind,
            DeadlinePassed,
            UnknownFlow,
            RolledBack,
            LimitReached,
            Application,
            Stopping,
            Protocol,
            NotAllowed,
            Sleeping,
            HalfDuplex,
            TakesAcks,
        ];
        ALL.get(usize::from(b)).copied().unwrap_or(None)
    }
}

impl PathStatus {
    fn from_u8(b: u8) -> Result<PathStatus, DecodeError> {
        Ok(match b {
            0 => PathStatus::Available,
            1 => PathStatus::Standby,
            2 => PathStatus::Frozen,
            3 => PathStatus::Gone,
            _ => return Err(DecodeError::BadValue("path status")),
        })
    }
    fn to_u8(self) -> u8 {
        match self {
            PathStatus::Available => 0,
            PathStatus::Standby => 1,
            PathStatus::Frozen => 2,
            PathStatus::Gone => 3,
        }
    }
}

/// Frame types, for encoders that write the start of a frame themselves.
pub mod frame_type {
    /// Type byte of a PADDING frame.
    pub const PADDING: u8 = 0x00;
    /// Type byte of a PING frame.
    pub const PING: u8 = 0x01;
    /// Type byte of an ACK frame.
    pub const ACK: u8 = 0x02;
    /// Type byte of an ACK_RATE frame.
    pub const ACK_RATE: u8 = 0x03;
    /// Type byte of a DATA frame; the lowest bit is set in the last one of a flow.
    pub const DATA: u8 = 0x08;
    /// Type byte of a DATAGRAM frame.
    pub const DATAGRAM: u8 = 0x30;
}

/// The acknowledged ranges of an ACK frame, largest first, still encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckRanges<'a> {
    /// The largest packet number acknowledged.
    pub largest: u64,
    first: u64,
    count: u64,
    encoded: &'a [u8],
}

impl<'a> AckRanges<'a> {
    /// Iterates over the ranges `(low, high)`, both ends included, from the largest down.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + Clone + use<'a> {
        let mut reader = WireReader::new(self.encoded);
        let mut high = self.largest;
        let mut low = high - self.first;
        let mut left = self.count;
        let mut start = true;
        std::iter::from_fn(move || {
            if start {
                start = false;
                return Some((low, high));
            }
            if left == 0 {
                return None;
            }
            left -= 1;
            // `decode` has checked the ranges, so this cannot fail; if it did, the iteration would
            // end.
            let gap = reader.varint().ok()?;
            let len = reader.varint().ok()?;
            high = low.checked_sub(gap + 2)?;
            low = high.checked_sub(len)?;
            Some((low, high))
        })
    }

    fn decode(r: &mut WireReader<'a>, largest: u64) -> Result<Self, DecodeError> {
        let count = r.varint()?;
        let first = r.varint()?;
        const UNDERFLOW: DecodeError = DecodeError::BadValue("ACK range below zero");
        let mut low = largest.checked_sub(first).ok_or(UNDERFLOW)?;
        let whole = *r;
        let before = r.remaining();
        for _ in 0..count {
            let gap = r.varint()?;
            let len = r.varint()?;
            let high = low.checked_sub(gap + 2).ok_or(UNDERFLOW)?;
            low = high.checked_sub(len).ok_or(UNDERFLOW)?;
        }
        let mut whole = whole;
        let encoded = whole.bytes(before - r.remaining())?;
        Ok(AckRanges {
            largest,
            first,
            count,
            encoded,
        })
    }
}

/// One frame, borrowed from the packet it came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "the fields are those of the table above and of docs/protocol.md"
)]
pub enum Frame<'a> {
    Ping,
    Ack {
        path: PathId,
        delay_us: u64,
        ranges: AckRanges<'a>,
    },
    AckRate {
        path: PathId,
        every: u32,
        delay_us: u64,
    },
    KeyShare {
        /// Which half of the share the bytes are: 0 or 1.
        half: u8,
        bytes: &'a [u8],
    },
    Data {
        flow: FlowId,
        offset: u64,
        bytes: &'a [u8],
        fin: bool,
    },
    Open {
        flow: FlowId,
        flags: u8,
        priority: u8,
        size: Option<u64>,
        deadline_ms: Option<u64>,
    },
    Reset {
        flow: FlowId,
        code: u64,
        final_size: u64,
    },
    Stop {
        flow: FlowId,
        code: u64,
    },
    FlowCredit {
        flow: FlowId,
        max: u64,
    },
    SessionCredit {
        max: u64,
    },
    Deadline {
        flow: FlowId,
        seq: u64,
        remaining_ms: Option<u64>,
    },
    Durable {
        flow: FlowId,
        offset: u64,
    },
    Committed {
        flow: FlowId,
        offset: u64,
    },
    Grant {
        seq: u64,
        flow: FlowId,
        path: PathId,
        max_sent: u64,
    },
    Spent {
        flow: FlowId,
        path: PathId,
        sent: u64,
    },
    PathStatus {
        path: PathId,
        seq: u64,
        status: PathStatus,
        gated: bool,
        reason: ReasonCode,
    },
    PathLimit {
        path: PathId,
        seq: u64,
        bytes: u64,
    },
    FlowPause {
        flow: FlowId,
        seq: u64,
        paused: bool,
        reason: ReasonCode,
    },
    Chg {
        nonce: [u8; 16],
    },
    Rsp {
        nonce: [u8; 16],
    },
    Auth {
        path: PathId,
    },
    PathCid {
        path: PathId,
        cid: Cid,
        token: [u8; TOKEN_BYTES],
    },
    Resume {
        flow: FlowId,
        received: u64,
        flags: u8,
    },
    Resumed {
        flow: FlowId,
        received: u64,
    },
    Refused {
        flow: FlowId,
        reason: ReasonCode,
    },
    ResumeEnd {
        flows: u64,
    },
    Datagram {
        context: u64,
        bytes: &'a [u8],
    },
    Suspend {
        reason: ReasonCode,
    },
    Close {
        code: u64,
        text: &'a [u8],
    },
}

impl Frame<'_> {
    /// Flag of OPEN: the sender frees bytes only after the receiver has made them durable.
    pub const OPEN_DURABLE: u8 = 1;
    /// Flag of OPEN: the flow may hibernate, because its bytes can be read again from their source.
    pub const OPEN_HIBERNATES: u8 = 2;
    /// Flag of OPEN: the device keeps a path open for the flow while it is awake, because the
    /// server may send at any time.
    pub const OPEN_REACHABLE: u8 = 4;
    /// Flag of RESUME: everything that the peer sends on this flow was received, including its end.
    pub const RESUME_COMPLETE: u8 = 1;
    /// The longest text of a CLOSE frame, in bytes.
    pub const CLOSE_TEXT_MAX: usize = 256;
}

fn flag(b: u8, what: &'static str) -> Result<bool, DecodeError> {
    match b {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::BadValue(what)),
    }
}

fn plus_one(v: u64) -> Option<u64> {
    v.checked_sub(1)
}

impl<'a> Frame<'a> {
    /// Whether the peer must acknowledge a packet that holds this frame.
    pub fn is_ack_eliciting(&self) -> bool {
        !matches!(self, Frame::Ack { .. })
    }

    /// Decodes the next frame that is not padding; `None` at the end of the packet.
    #[inline]
    pub fn decode(r: &mut WireReader<'a>) -> Result<Option<Frame<'a>>, DecodeError> {
        let mut ty = frame_type::PADDING;
        while ty == frame_type::PADDING {
            if r.is_empty() {
                return Ok(None);
            }
            ty = r.u8()?;
        }
        // R-FLOW-10: only the low 57 bits identify a flow, so an id with higher bits set is an
        // error.
        let flow = |r: &mut WireReader<'a>| match r.varint()? {
            id @ ..=FlowId::MAX => Ok(FlowId(id)),
            _ => Err(DecodeError::BadValue("flow id beyond 57 bits")),
        };
        let path = |r: &mut WireReader<'a>| r.varint32("path id").map(PathId);
        Ok(Some(match ty {
            0x08 | 0x09 => {
                let id = flow(r)?;
                let offset = r.varint()?;
                let bytes = r.string()?;
                if offset + bytes.len() as u64 > VARINT_MAX {
                    return Err(DecodeError::BadValue("DATA beyond the largest offset"));
                }
                Frame::Data {
                    flow: id,
                    offset,
                    bytes,
                    fin: ty & 1 == 1,
                }
            }
            0x01 => Frame::Ping,
            0x02 => {
                let path = path(r)?;
                let largest = r.varint()?;
                let delay_us = r.varint()?;
                Frame::Ack {
                    path,
                    delay_us,
                    ranges: AckRanges::decode(r, largest)?,
                }
            }
            0x03 => Frame::AckRate {
                path: path(r)?,
                every: r.varint32("ACK_RATE every")?,
                delay_us: r.varint()?,
            },
            0x04 => Frame::KeyShare {
                half: u8::from(flag(r.u8()?, "KEY_SHARE half")?),
                bytes: r.string()?,
            },
            0x10 => Frame::Open {
                flow: flow(r)?,
                flags: r.u8()?,
                priority: r.u8()?,
                size: plus_one(r.varint()?),
                deadline_ms: plus_one(r.varint()?),
            },
            0x11 => Frame::Reset {
                flow: flow(r)?,
                code: r.varint()?,
                final_size: r.varint()?,
            },
            0x12 => Frame::Stop {
                flow: flow(r)?,
                code: r.varint()?,
            },
            0x13 => Frame::FlowCredit {
                flow: flow(r)?,
                max: r.varint()?,
            },
            0x14 => Frame::SessionCredit { max: r.varint()? },
            0x15 => Frame::Deadline {
                flow: flow(r)?,
                seq: r.varint()?,
                remaining_ms: plus_one(r.varint()?),
            },
            0x16 => Frame::Durable {
                flow: flow(r)?,
                offset: r.varint()?,
            },
            0x17 => Frame::Committed {
                flow: flow(r)?,
                offset: r.varint()?,
            },
            0x18 => Frame::Grant {
                seq: r.varint()?,
                flow: flow(r)?,
                path: path(r)?,
                max_sent: r.varint()?,
            },
            0x19 => Frame::Spent {
                flow: flow(r)?,
                path: path(r)?,
                sent: r.varint()?,
            },
            0x1a => Frame::PathStatus {
                path: path(r)?,
                seq: r.varint()?,
                status: PathStatus::from_u8(r.u8()?)?,
                gated: flag(r.u8()?, "PATH_STATUS gated")?,
                reason: ReasonCode::from_u8(r.u8()?),
            },
            0x1b => Frame::PathLimit {
                path: path(r)?,
                seq: r.varint()?,
                bytes: r.varint()?,
            },
            0x1c => Frame::FlowPause {
                flow: flow(r)?,
                seq: r.varint()?,
                paused: flag(r.u8()?, "FLOW_PAUSE paused")?,
                reason: ReasonCode::from_u8(r.u8()?),
            },
            0x20 => Frame::Chg { nonce: r.array()? },
            0x21 => Frame::Rsp { nonce: r.array()? },
            0x22 => Frame::Auth { path: path(r)? },
            0x23 => Frame::PathCid {
                path: path(r)?,
                cid: Cid::decode(r)?,
                token: r.array()?,
            },
            0x28 => Frame::Resume {
                flow: flow(r)?,
                received: r.varint()?,
                flags: r.u8()?,
            },
            0x29 => Frame::Resumed {
                flow: flow(r)?,
                received: r.varint()?,
            },
            0x2a => Frame::Refused {
                flow: flow(r)?,
                reason: ReasonCode::from_u8(r.u8()?),
            },
            0x2b => Frame::ResumeEnd { flows: r.varint()? },
            0x30 => Frame::Datagram {
                context: r.varint()?,
                bytes: r.string()?,
            },
            0x3c => Frame::Suspend {
                reason: ReasonCode::from_u8(r.u8()?),
            },
            0x3e => {
                let code = r.varint()?;
                let text = r.string()?;
                if text.len() > Frame::CLOSE_TEXT_MAX {
                    return Err(DecodeError::BadValue("CLOSE text too long"));
                }
                Frame::Close { code, text }
            }
            other => return Err(DecodeError::UnknownFrame(u64::from(other))),
        }))
    }

    /// Writes the frame. ACK frames are written by [`Frame::encode_ack`] instead.
    pub fn encode(&self, w: &mut WireWriter<'_>) {
        fn opt(v: Option<u64>) -> u64 {
            v.map_or(0, |v| v.saturating_add(1).min(VARINT_MAX))
        }
        match *self {
            Frame::Ping => w.u8(0x01),
            Frame::Ack {
                path,
                delay_us,
                ranges,
            } => {
                Frame::encode_ack(w, path, delay_us, ranges.iter());
            }
            Frame::KeyShare { half, bytes } => {
                w.u8(0x04);
                w.u8(half);
                w.string(bytes);
            }
            Frame::AckRate {
                path,
                every,
                delay_us,
            } => {
                w.u8(0x03);
                w.varint(u64::from(path.0));
                w.varint(u64::from(every));
                w.varint(delay_us);
            }
            Frame::Data {
                flow,
                offset,
                bytes,
                fin,
            } => {
                Frame::encode_data_head(w, flow, offset, bytes.len(), fin);
                w.bytes(bytes);
            }
            Frame::Open {
                flow,
                flags,
                priority,
                size,
                deadline_ms,
            } => {
                w.u8(0x10);
                w.varint(flow.0);
                w.u8(flags);
                w.u8(priority);
                w.varint(opt(size));
                w.varint(opt(deadline_ms));
            }
            Frame::Reset {
                flow,
                code,
                final_size,
            } => {
                w.u8(0x11);
                w.varint(flow.0);
                w.varint(code);
                w.varint(final_size);
            }
            Frame::Stop { flow, code } => {
                w.u8(0x12);
                w.varint(flow.0);
                w.varint(code);
            }
            Frame::FlowCredit { flow, max } => {
                w.u8(0x13);
                w.varint(flow.0);
                w.varint(max);
            }
            Frame::SessionCredit { max } => {
                w.u8(0x14);
                w.varint(max);
            }
            Frame::Deadline {
                flow,
                seq,
                remaining_ms,
            } => {
                w.u8(0x15);
                w.varint(flow.0);
                w.varint(seq);
                w.varint(opt(remaining_ms));
            }
            Frame::Durable { flow, offset } => {
                w.u8(0x16);
                w.varint(flow.0);
                w.varint(offset);
            }
            Frame::Committed { flow, offset } => {
                w.u8(0x17);
                w.varint(flow.0);
                w.varint(offset);
            }
            Frame::Grant {
                seq,
                flow,
                path,
                max_sent,
            } => {
                w.u8(0x18);
                w.varint(seq);
                w.varint(flow.0);
                w.varint(u64::from(path.0));
                w.varint(max_sent);
            }
            Frame::Spent { flow, path, sent } => {
                w.u8(0x19);
                w.varint(flow.0);
                w.varint(u64::from(path.0));
                w.varint(sent);
            }
            Frame::PathStatus {
                path,
                seq,
                status,
                gated,
                reason,
            } => {
                w.u8(0x1a);
                w.varint(u64::from(path.0));
                w.varint(seq);
                w.u8(status.to_u8());
                w.u8(u8::from(gated));
                w.u8(reason as u8);
            }
            Frame::PathLimit { path, seq, bytes } => {
                w.u8(0x1b);
                w.varint(u64::from(path.0));
                w.varint(seq);
                w.varint(bytes);
            }
            Frame::FlowPause {
                flow,
                seq,
                paused,
                reason,
            } => {
                w.u8(0x1c);
                w.varint(flow.0);
                w.varint(seq);
                w.u8(u8::from(paused));
                w.u8(reason as u8);
            }
            Frame::Chg { nonce } => {
                w.u8(0x20);
                w.bytes(&nonce);
            }
            Frame::Rsp { nonce } => {
                w.u8(0x21);
                w.bytes(&nonce);
            }
            Frame::Auth { path } => {
                w.u8(0x22);
                w.varint(u64::from(path.0));
            }
            Frame::PathCid { path, cid, token } => {
                w.u8(0x23);
                w.varint(u64::from(path.0));
                w.bytes(&cid.0);
                w.bytes(&token);
            }
            Frame::Resume {
                flow,
                received,
                flags,
            } => {
                w.u8(0x28);
                w.varint(flow.0);
                w.varint(received);
                w.u8(flags);
            }
            Frame::Resumed { flow, received } => {
                w.u8(0x29);
                w.varint(flow.0);
                w.varint(received);
            }
            Frame::Refused { flow, reason } => {
                w.u8(0x2a);
                w.varint(flow.0);
                w.u8(reason as u8);
            }
            Frame::ResumeEnd { flows } => {
                w.u8(0x2b);
                w.varint(flows);
            }
            Frame::Datagram { context, bytes } => {
                w.u8(0x30);
                w.varint(context);
                w.string(bytes);
            }
            Frame::Suspend { reason } => {
                w.u8(0x3c);
                w.u8(reason as u8);
            }
            Frame::Close { code, text } => {
                w.u8(0x3e);
                w.varint(code);
                w.string(&text[..text.len().min(Frame::CLOSE_TEXT_MAX)]);
            }
        }
    }

    /// The number of bytes before the payload of a DATAGRAM frame with this context and `len` bytes.
    #[inline]
    pub fn datagram_head_len(context: u64, len: usize) -> usize {
        1 + varint_len(context) + varint_len(len as u64)
    }

    /// The number of bytes before the payload of a DATA frame that carries at most `len` bytes.
    #[inline]
    pub fn data_head_len(flow: FlowId, offset: u64, len: usize) -> usize {
        1 + varint_len(flow.0) + varint_len(offset) + varint_len(len as u64)
    }

    /// Writes a DATA frame up to its payload, which the caller appends.
    #[inline]
    pub fn encode_data_head(
        w: &mut WireWriter<'_>,
        flow: FlowId,
        offset: u64,
        len: usize,
        fin: bool,
    ) {
        w.u8(frame_type::DATA | u8::from(fin));
        w.varint(flow.0);
        w.varint(offset);
        w.varint(len as u64);
    }

    /// Writes an ACK of as many `ranges` (largest first, both ends included) as there is room for.
    /// Returns false, with nothing written, if not even one fits.
    pub fn encode_ack(
        w: &mut WireWriter<'_>,
        path: PathId,
        delay_us: u64,
        ranges: impl Iterator<Item = (u64, u64)> + Clone,
    ) -> bool {
        let Some((low, high)) = ranges.clone().next() else {
            return false;
        };
        let delay_us = delay_us.min(VARINT_MAX);
        // The count takes at most two bytes, because no receiver keeps more than 64 ranges.
        let head = 1
            + varint_len(u64::from(path.0))
            + varint_len(high)
            + varint_len(delay_us)
            + 2
            + varint_len(high - low);
        if w.room() < head {
            return false;
        }
        let mut room = w.room() - head;
        let mut count = 0u64;
        let mut below = low;
        for (low, high) in ranges.clone().skip(1) {
            let need = varint_len(below - high - 2) + varint_len(high - low);
            if need > room {
                break;
            }
            room -= need;
            below = low;
            count += 1;
        }
        w.u8(frame_type::ACK);
        w.varint(u64::from(path.0));
        w.varint(high);
        w.varint(delay_us);
        w.varint(count);
        w.varint(high - low);
        let mut below = low;
        for (low, high) in ranges.skip(1).take(count as usize) {
            w.varint(below - high - 2);
            w.varint(high - low);
            below = low;
        }
        true
    }
}

/// The frames of one packet, in order.
#[derive(Clone, Debug)]
pub struct FrameIter<'a> {
    reader: WireReader<'a>,
    failed: bool,
}

impl<'a> FrameIter<'a> {
    /// Iterates over the frames of a packet's plaintext.
    pub fn new(plaintext: &'a [u8]) -> Self {
        FrameIter {
            reader: WireReader::new(plaintext),
            failed: false,
        }
    }
}

impl<'a> Iterator for FrameIter<'a> {
    type Item = Result<Frame<'a>, DecodeError>;
    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        match Frame::decode(&mut self.reader) {
            Ok(Some(frame)) => Some(Ok(frame)),
            Ok(None) => None,
            Err(e) => {
                self.failed = true;
                Some(Err(e))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(frame: Frame<'_>) {
        let mut buf = vec![0u8; 2048];
        let mut w = WireWriter::new(&mut buf);
        frame.encode(&mut w);
        let n = w.written();
        let mut it = FrameIter::new(&buf[..n]);
        assert_eq!(it.next(), Some(Ok(frame)));
        assert_eq!(it.next(), None);
        for cut in 1..n {
            let short = FrameIter::new(&buf[..cut]).next();
            assert_ne!(
                short,
                Some(Ok(frame)),
                "cut at {cut} of {n} still decodes the same"
            );
        }
    }

    fn v() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..100, 0u64..70_000, 0..=VARINT_MAX - 1]
    }

    proptest! {
        #[test]
        fn every_frame_comes_back(flow in v(), a in v(), b in v(), p: u32, byte: u8,
                                  nonce: [u8; 16], cid: [u8; 8],
                                  data in proptest::collection::vec(any::<u8>(), 0..200), on: bool) {
            let flow = FlowId(flow & FlowId::MAX);
            let path = PathId(p);
            let reason = ReasonCode::from_u8(byte % 16);
            let status = [PathStatus::Available, PathStatus::Standby, PathStatus::Frozen,
                PathStatus::Gone][usize::from(byte % 4)];
            let offset = a.min(VARINT_MAX - 1000);
            for frame in [
                Frame::Ping,
                Frame::AckRate { path, every: p, delay_us: a },
                Frame::KeyShare { half: u8::from(on), bytes: &data },
                Frame::Data { flow, offset, bytes: &data, fin: on },
                Frame::Open { flow, flags: byte, priority: byte, size: on.then_some(a),
                    deadline_ms: (!on).then_some(b) },
                Frame::Reset { flow, code: a, final_size: b },
                Frame::Stop { flow, code: a },
                Frame::FlowCredit { flow, max: a },
                Frame::SessionCredit { max: a },
                Frame::Deadline { flow, seq: a, remaining_ms: on.then_some(b) },
                Frame::Durable { flow, offset: a },
                Frame::Committed { flow, offset: a },
                Frame::Grant { seq: a, flow, path, max_sent: b },
                Frame::Spent { flow, path, sent: b },
                Frame::PathStatus { path, seq: a, status, gated: on, reason },
                Frame::PathLimit { path, seq: a, bytes: b },
                Frame::FlowPause { flow, seq: a, paused: on, reason },
                Frame::Chg { nonce },
                Frame::Rsp { nonce },
                Frame::Auth { path },
                Frame::PathCid { path, cid: Cid(cid), token: nonce },
                Frame::Resume { flow, received: a, flags: byte },
                Frame::Resumed { flow, received: a },
                Frame::Refused { flow, reason },
                Frame::ResumeEnd { flows: a },
                Frame::Datagram { context: a, bytes: &data },
                Frame::Suspend { reason },
                Frame::Close { code: a, text: &data },
            ] {
                round_trip(frame);
            }
        }

        #[test]
        fn acknowledged_ranges_come_back(gaps in proptest::collection::vec((0u64..50, 0u64..50), 1..64),
                                         top in 10_000u64..1_000_000) {
            let mut ranges = Vec::new();
            let mut high = top;
            for (gap, len) in gaps {
                let low = high - len;
                ranges.push((low, high));
                high = low - gap - 2;
            }
            let mut buf = vec![0u8; 2048];
            let mut w = WireWriter::new(&mut buf);
            prop_assert!(Frame::encode_ack(&mut w, PathId(3), 17, ranges.iter().copied()));
            let n = w.written();
            let Some(Ok(Frame::Ack { path, delay_us, ranges: got })) = FrameIter::new(&buf[..n]).next()
            else { panic!("not an ACK") };
            prop_assert_eq!((path, delay_us), (PathId(3), 17));
            prop_assert_eq!(got.iter().collect::<Vec<_>>(), ranges);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            for frame in FrameIter::new(&bytes) {
                if let Ok(Frame::Ack { ranges, .. }) = frame {
                    let _ = ranges.iter().count();
                }
            }
            let _ = crate::packet::PacketKind::split(&bytes);
        }
    }

    #[test]
    fn an_ack_range_below_zero_is_refused() {
        // ACK of path 0: largest 3, delay 0, one more range, first 1, gap 5. The range would begin
        // below zero.
        let bytes = [0x02, 0, 3, 0, 1, 1, 5, 0];
        assert_eq!(
            FrameIter::new(&bytes).next(),
            Some(Err(DecodeError::BadValue("ACK range below zero")))
        );
    }

    #[test]
    fn an_unknown_frame_is_named() {
        assert_eq!(
            FrameIter::new(&[0x3f]).next(),
            Some(Err(DecodeError::UnknownFrame(0x3f)))
        );
    }
}
