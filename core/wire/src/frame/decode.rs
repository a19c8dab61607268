//! Bytes to frames.

use super::{Frame, frame_type};
use crate::ack_ranges::AckRanges;
use crate::codec::{DecodeError, VARINT_MAX, WireReader};
use crate::flow_id::FlowId;
use crate::packet::{Cid, PathId};
use crate::path_status::PathStatus;
use crate::reason_code::ReasonCode;

impl<'a> Frame<'a> {
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
