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

mod decode;
mod encode;

use crate::ack_ranges::AckRanges;
use crate::codec::{DecodeError, WireReader};
use crate::flow_id::FlowId;
use crate::packet::{Cid, PathId, TOKEN_BYTES};
use crate::path_status::PathStatus;
use crate::reason_code::ReasonCode;

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
    /// The room that an ACK of one range takes at most, in bytes.
    pub const ACK_OF_ONE_RANGE_BYTES_MAX: usize = 1 + 8 + 8 + 8 + 2 + 8;
}

impl<'a> Frame<'a> {
    /// Whether the peer must acknowledge a packet that holds this frame.
    pub fn is_ack_eliciting(&self) -> bool {
        !matches!(self, Frame::Ack { .. })
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
    use crate::codec::{VARINT_MAX, WireWriter};
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
