//! Kinds of packets, and their unencrypted part: a type byte and a connection id.
//!
//! ```text
//!  first byte      what follows
//!  010gg000        DATA     cid(8) pn(4) ciphertext tag(16)     low 5 bits and pn are masked
//!  100vvvvv        SYN      cid(8) Noise message 1, mac1(16) mac2(16), padding to 1,200 B
//!  011vvvvv        WAKE     cid(8) ticket(76) Noise message 1, mac1(16) mac2(16), padding to 1,200 B
//!  101vvvvv        SYN+ACK  cid(8) Noise message 2
//!  110vvvvv        COOKIE   cid(8) nonce(12) sealed cookie(32)
//!  111vvvvv        UNKNOWN  cid(8) token(16)
//!  001vvvvv        VERSION  cid(8) one byte per supported version
//! ```
//!
//! `g`: key generation, `v`: version. The cid is the receiver's own, except in SYN and WAKE, where
//! it is the one the sender wants to be answered on.

use crate::codec::{DecodeError, WireReader};

/// Protocol version in the low bits of handshake packets.
pub const VERSION: u8 = 1;
/// Bytes of a connection id.
pub const CID_BYTES: usize = 8;
/// Bytes of a packet number on the wire.
pub const PN_BYTES: usize = 4;
/// Bytes of an AEAD tag.
pub const TAG_BYTES: usize = 16;
/// Bytes of the token that proves an UNKNOWN answer.
pub const TOKEN_BYTES: usize = 16;
/// Bytes before the ciphertext of a DATA packet.
pub const DATA_HEADER_BYTES: usize = 1 + CID_BYTES + PN_BYTES;
/// The size to which a SYN, a WAKE and the first packet on a new path are padded, in bytes. A path
/// must be able to carry datagrams of this size.
pub const DATAGRAM_FIRST_BYTES: usize = 1200;
/// The largest UDP payload that this implementation sends or accepts, in bytes.
pub const DATAGRAM_MAX_BYTES: usize = 9000 - 28;

/// A connection id: chosen at random by the host that receives it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cid(pub [u8; CID_BYTES]);

/// A path's number within a session. Never used twice under the same keys.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PathId(pub u32);

/// The kind of a packet, as its first byte states it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PacketKind {
    /// A packet of sealed frames.
    Data,
    /// First message of a handshake.
    Syn,
    /// First message of a handshake by ticket.
    Wake,
    /// Second message of a handshake.
    SynAck,
    /// Answer to a SYN under load: the client has to prove its address first.
    Cookie,
    /// Stateless answer to DATA: the sender does not know the session.
    Unknown,
    /// Answer to a SYN of another version: lists the versions that the sender supports.
    Version,
}

impl PacketKind {
    /// The kind in a datagram's first byte and, for handshake packets, its version.
    pub fn of(first: u8) -> Option<(PacketKind, u8)> {
        let kind = match first >> 5 {
            0b010 => return Some((PacketKind::Data, 0)),
            0b100 => PacketKind::Syn,
            0b011 => PacketKind::Wake,
            0b101 => PacketKind::SynAck,
            0b110 => PacketKind::Cookie,
            0b111 => PacketKind::Unknown,
            0b001 => PacketKind::Version,
            _ => return None,
        };
        Some((kind, first & 0x1f))
    }

    /// The first byte of a packet of this kind (for DATA: before generation and mask).
    pub fn first_byte(self) -> u8 {
        match self {
            PacketKind::Data => 0b010 << 5,
            PacketKind::Syn => 0b100 << 5 | VERSION,
            PacketKind::Wake => 0b011 << 5 | VERSION,
            PacketKind::SynAck => 0b101 << 5 | VERSION,
            PacketKind::Cookie => 0b110 << 5 | VERSION,
            PacketKind::Unknown => 0b111 << 5 | VERSION,
            PacketKind::Version => 0b001 << 5 | VERSION,
        }
    }

    /// R-WIRE-1: splits a datagram into kind, version, connection id and the rest. `None` if it is
    /// no D2TP packet.
    pub fn split(datagram: &[u8]) -> Option<(PacketKind, u8, Cid, &[u8])> {
        let mut r = WireReader::new(datagram);
        let (kind, version) = PacketKind::of(r.u8().ok()?)?;
        let cid = Cid(r.array().ok()?);
        Some((kind, version, cid, r.rest()))
    }
}

impl Cid {
    /// Reads a connection id.
    pub fn decode(r: &mut WireReader<'_>) -> Result<Cid, DecodeError> {
        Ok(Cid(r.array()?))
    }
}

/// The full packet number nearest to `expected` whose low 32 bits are `low` (RFC 9000 A.3).
pub fn expand_packet_number(expected: u64, low: u32) -> u64 {
    const WINDOW: u64 = 1 << 32;
    let candidate = (expected & !(WINDOW - 1)) | u64::from(low);
    if candidate + WINDOW / 2 <= expected {
        candidate + WINDOW
    } else if candidate > expected + WINDOW / 2 && candidate >= WINDOW {
        candidate - WINDOW
    } else {
        candidate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_packet_number_is_expanded_to_the_nearest() {
        assert_eq!(expand_packet_number(0, 5), 5);
        assert_eq!(
            expand_packet_number(0x1_0000_0002, 0xffff_fff0),
            0xffff_fff0
        );
        assert_eq!(expand_packet_number(0xffff_fffe, 3), 0x1_0000_0003);
        assert_eq!(
            expand_packet_number(0x2_8000_0000, 0x8000_0001),
            0x2_8000_0001
        );
    }

    #[test]
    fn first_bytes_name_their_kind() {
        for kind in [
            PacketKind::Data,
            PacketKind::Syn,
            PacketKind::SynAck,
            PacketKind::Cookie,
            PacketKind::Unknown,
            PacketKind::Version,
        ] {
            assert_eq!(
                PacketKind::of(kind.first_byte()).map(|(k, _)| k),
                Some(kind)
            );
        }
        assert_eq!(PacketKind::of(0x00), None);
        assert_eq!(PacketKind::of(0x16), None, "a TLS record is not D2TP");
    }
}
