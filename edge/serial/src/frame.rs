//! Frames of a link: what travels between two delimiters of a serial line.
//!
//! ```text
//!  whole packet   kind ‖ address (2) ‖ packet ‖ CRC-32 (4)
//!  fragment       kind ‖ address (2) ‖ packet number ‖ last, index ‖ bytes ‖ CRC-32 (4)
//!  poll           kind ‖ address (2) ‖ bytes (2) ‖ CRC-32 (4)               this mobile may send so many bytes
//!  invitation     kind ‖ 0000 ‖ slots ‖ milliseconds (2) ‖ CRC-32 (4)       mobiles that are not polled may answer
//!  end of turn    kind ‖ address (2) ‖ bytes that wait (2) ‖ CRC-32 (4)     from the mobile
//!
//!  kind: 0x10 whole, 0x11 fragment, 0x12 poll, 0x13 invitation, 0x14 end of turn; | 0x80 from the bridge
//! ```
//!
//! The address is the mobile's in both directions. An unfragmented packet costs nine bytes with its byte
//! stuffing, where IPv4 and UDP take 28.
//!
//! ```
//! use d2tp_serial::{FrameBody, LinkFrame, StationAddress};
//! let frame = LinkFrame { from_bridge: false, address: StationAddress(0x0107), body: FrameBody::Whole(b"hi") };
//! let mut bytes = Vec::new();
//! frame.encode(&mut bytes);
//! assert_eq!(bytes[..5], [0x10, 1, 7, b'h', b'i']);
//! assert_eq!(LinkFrame::decode(&bytes), Ok(frame));
//! ```

use std::fmt;

/// Bytes of a frame that carries a whole packet, beside the packet.
pub(crate) const WHOLE_OVERHEAD_BYTES: usize = 3 + CRC_BYTES;
/// Bytes of a fragment beside its content.
pub(crate) const FRAGMENT_OVERHEAD_BYTES: usize = 5 + CRC_BYTES;
/// The largest number of a fragment.
pub(crate) const FRAGMENT_INDEX_MAX: u8 = 0x7f;

const CRC_BYTES: usize = 4;
const FROM_BRIDGE: u8 = 0x80;
const KIND_WHOLE: u8 = 0x10;
const KIND_FRAGMENT: u8 = 0x11;
const KIND_POLL: u8 = 0x12;
const KIND_INVITATION: u8 = 0x13;
const KIND_TURN_END: u8 = 0x14;
const LAST: u8 = 0x80;

/// A mobile's address on a line. Each session of a mobile draws one; two that draw the same share their
/// turns, and each drops the other's packets, which it cannot open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StationAddress(pub u16);

impl fmt::Display for StationAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0)
    }
}

/// What travels between two delimiters of a serial line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkFrame<'a> {
    /// Whether the bridge sent it; otherwise a mobile did.
    pub from_bridge: bool,
    /// The mobile that sent it, or that it is for.
    pub address: StationAddress,
    /// The content.
    pub body: FrameBody<'a>,
}

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameBody<'a> {
    /// A whole packet.
    Whole(&'a [u8]),
    /// A part of a packet that is larger than a frame.
    Fragment(LinkFragment<'a>),
    /// From the bridge: the mobile may send now.
    Poll {
        /// How many bytes it may send, delimiters included.
        bytes: u16,
    },
    /// From the bridge: mobiles that have something to send and are not polled may answer by [`FrameBody::TurnEnd`], each in
    /// a slot that it draws.
    Invitation {
        /// The number of slots.
        slots: u8,
        /// The length of a slot in milliseconds.
        slot_ms: u16,
    },
    /// From a mobile: its turn is over, or it asks to be polled.
    TurnEnd {
        /// Bytes that still wait there; the largest number stands for more.
        waiting: u16,
    },
}

/// A part of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkFragment<'a> {
    /// The packet's number among those of this mobile and direction, modulo 256.
    pub number: u8,
    /// The place of this part in the packet.
    pub index: u8,
    /// Whether no part follows.
    pub last: bool,
    /// The bytes of this part.
    pub bytes: &'a [u8],
}

/// Why bytes between two delimiters are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameFault {
    /// The check does not fit: noise, or the rest of a frame.
    Damaged,
    /// The check fits, but the kind of frame is unknown or its content is none.
    Unknown,
}

impl<'a> LinkFrame<'a> {
    /// Appends the frame's bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let direction = if self.from_bridge { FROM_BRIDGE } else { 0 };
        let [high, low] = self.address.0.to_be_bytes();
        match self.body {
            FrameBody::Whole(packet) => {
                out.extend([direction | KIND_WHOLE, high, low]);
                out.extend(packet);
            }
            FrameBody::Fragment(fragment) => {
                let last = if fragment.last { LAST } else { 0 };
                let place = last | fragment.index & FRAGMENT_INDEX_MAX;
                out.extend([direction | KIND_FRAGMENT, high, low, fragment.number, place]);
                out.extend(fragment.bytes);
            }
            FrameBody::Poll { bytes } => {
                out.extend([direction | KIND_POLL, high, low]);
                out.extend(bytes.to_be_bytes());
            }
            FrameBody::Invitation { slots, slot_ms } => {
                out.extend([direction | KIND_INVITATION, high, low, slots]);
                out.extend(slot_ms.to_be_bytes());
            }
            FrameBody::TurnEnd { waiting } => {
                out.extend([direction | KIND_TURN_END, high, low]);
                out.extend(waiting.to_be_bytes());
            }
        }
        let check = crc32fast::hash(&out[start..]);
        out.extend(check.to_be_bytes());
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// The bytes are no frame.
    pub fn decode(bytes: &'a [u8]) -> Result<LinkFrame<'a>, FrameFault> {
        let (content, check) = bytes
            .split_last_chunk::<CRC_BYTES>()
            .ok_or(FrameFault::Damaged)?;
        if crc32fast::hash(content) != u32::from_be_bytes(*check) {
            return Err(FrameFault::Damaged);
        }
        let (head, rest) = content
            .split_first_chunk::<3>()
            .ok_or(FrameFault::Unknown)?;
        let body = match head[0] & !FROM_BRIDGE {
            KIND_WHOLE if !rest.is_empty() => FrameBody::Whole(rest),
            KIND_FRAGMENT => match rest {
                [number, place, bytes @ ..] if !bytes.is_empty() => {
                    FrameBody::Fragment(LinkFragment {
                        number: *number,
                        index: place & FRAGMENT_INDEX_MAX,
                        last: place & LAST != 0,
                        bytes,
                    })
                }
                _ => return Err(FrameFault::Unknown),
            },
            KIND_POLL => FrameBody::Poll {
                bytes: two_bytes(rest)?,
            },
            KIND_INVITATION => match rest {
                [slots, time @ ..] => FrameBody::Invitation {
                    slots: *slots,
                    slot_ms: two_bytes(time)?,
                },
                [] => return Err(FrameFault::Unknown),
            },
            KIND_TURN_END => FrameBody::TurnEnd {
                waiting: two_bytes(rest)?,
            },
            _ => return Err(FrameFault::Unknown),
        };
        Ok(LinkFrame {
            from_bridge: head[0] & FROM_BRIDGE != 0,
            address: StationAddress(u16::from_be_bytes([head[1], head[2]])),
            body,
        })
    }
}

/// The number that two bytes are.
fn two_bytes(bytes: &[u8]) -> Result<u16, FrameFault> {
    let bytes = bytes.try_into().map_err(|_| FrameFault::Unknown)?;
    Ok(u16::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_frame_comes_back_and_every_damaged_bit_is_noticed(
            from_bridge: bool, address: u16, number: u8, index in 0..=FRAGMENT_INDEX_MAX, last: bool,
            whole: bool, content in prop::collection::vec(any::<u8>(), 1..300), flip: prop::sample::Index,
        ) {
            let body = match whole {
                true => FrameBody::Whole(&content),
                false => FrameBody::Fragment(LinkFragment { number, index, last, bytes: &content }),
            };
            let frame = LinkFrame { from_bridge, address: StationAddress(address), body };
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            prop_assert_eq!(LinkFrame::decode(&bytes), Ok(frame));
            let bit = flip.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(LinkFrame::decode(&bytes), Err(FrameFault::Damaged));
        }

        #[test]
        fn arbitrary_bytes_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = LinkFrame::decode(&bytes);
        }

        #[test]
        fn frames_of_turns_come_back(from_bridge: bool, address: u16, slots: u8, number: u16) {
            for body in [
                FrameBody::Poll { bytes: number },
                FrameBody::Invitation { slots, slot_ms: number },
                FrameBody::TurnEnd { waiting: number },
            ] {
                let frame = LinkFrame { from_bridge, address: StationAddress(address), body };
                let mut bytes = Vec::new();
                frame.encode(&mut bytes);
                prop_assert_eq!(LinkFrame::decode(&bytes), Ok(frame));
            }
        }
    }

    #[test]
    fn a_frame_of_turns_of_another_length_is_unknown() {
        for content in [
            &[KIND_POLL, 0, 1, 5][..],
            &[KIND_POLL, 0, 1, 5, 6, 7],
            &[KIND_INVITATION, 0, 0],
            &[KIND_INVITATION, 0, 0, 4, 1],
            &[KIND_TURN_END, 0, 1],
        ] {
            let mut bytes = content.to_vec();
            bytes.extend(crc32fast::hash(content).to_be_bytes());
            assert_eq!(
                LinkFrame::decode(&bytes),
                Err(FrameFault::Unknown),
                "{content:?}"
            );
        }
    }
}
