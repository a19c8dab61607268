//! Frames to bytes.

use super::{Frame, frame_type};
use crate::codec::{VARINT_MAX, WireWriter, varint_len};
use crate::flow_id::FlowId;
use crate::packet::PathId;

impl Frame<'_> {
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
