//! Packets in datagrams: as they are, or in two pieces where a path carries less than a packet has.
//!
//! IPv6 needs an inner MTU of 1,280 bytes, and D2TP promises datagrams of some 1,100. A whole packet begins with its IP
//! version, 4 or 6; a piece with 0, which is no version.
//!
//! ```text
//!  0x00 or 0x01  which piece
//!  2 bytes       number of the packet, the same in both pieces
//!  …             the first half, or the second
//! ```

use std::collections::VecDeque;

use bytes::{BufMut, Bytes, BytesMut};

const PIECE_HEADER: usize = 3;
const FIRST: u8 = 0x00;
const SECOND: u8 = 0x01;

/// First or second pieces that wait for their other one; more are forgotten, the oldest first.
const WAITING_MAX: usize = 32; // a guess: reordering among paths

/// How far the numbers of a piece and of one that comes later may lie apart; numbers repeat after 65,536 packets.
const DISTANCE_MAX: u16 = 1024; // a guess: more than the packets that are under way at once

/// A packet is too long for two pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the packet is too long for the tunnel's path")]
pub struct PacketTooLong;

/// Whether a packet of so many bytes fits two datagrams of at most `datagram_max` bytes.
pub(crate) fn fits_two(bytes: usize, datagram_max: usize) -> bool {
    bytes.div_ceil(2) + PIECE_HEADER <= datagram_max
}

/// The datagrams for a packet: itself, or two pieces with this number if datagrams have at most `datagram_max` bytes.
///
/// # Errors
/// Two pieces would not suffice.
pub fn split(
    packet: Bytes,
    datagram_max: usize,
    number: u16,
) -> Result<(Bytes, Option<Bytes>), PacketTooLong> {
    if packet.len() <= datagram_max {
        return Ok((packet, None));
    }
    if !fits_two(packet.len(), datagram_max) {
        return Err(PacketTooLong);
    }
    let half = packet.len().div_ceil(2);
    let piece = |kind: u8, part: &[u8]| {
        let mut bytes = BytesMut::with_capacity(PIECE_HEADER + part.len());
        bytes.put_u8(kind);
        bytes.put_u16(number);
        bytes.put_slice(part);
        bytes.freeze()
    };
    let (first, second) = packet.split_at(half);
    Ok((piece(FIRST, first), Some(piece(SECOND, second))))
}

/// Joins the pieces of packets that one sender split.
#[derive(Debug, Default)]
pub struct PieceJoiner {
    waiting: VecDeque<Bytes>,
}

impl PieceJoiner {
    /// The packet that a datagram is, or completes; `None` if it is a piece whose other one has not come.
    pub fn join(&mut self, datagram: Bytes) -> Option<Bytes> {
        if !matches!(datagram.first(), Some(&(FIRST | SECOND))) || datagram.len() <= PIECE_HEADER {
            return Some(datagram);
        }
        let number = number(&datagram);
        self.waiting
            .retain(|waiting| is_near(self::number(waiting), number));
        let is_other =
            |waiting: &Bytes| waiting[0] != datagram[0] && self::number(waiting) == number;
        let Some(at) = self.waiting.iter().position(is_other) else {
            if self.waiting.len() == WAITING_MAX {
                self.waiting.pop_front();
            }
            self.waiting.push_back(datagram);
            return None;
        };
        let other = self.waiting.remove(at)?;
        let (first, second) = match datagram[0] {
            FIRST => (datagram, other),
            _ => (other, datagram),
        };
        let mut packet = BytesMut::with_capacity(first.len() + second.len());
        packet.put_slice(&first[PIECE_HEADER..]);
        packet.put_slice(&second[PIECE_HEADER..]);
        Some(packet.freeze())
    }
}

/// The packet's number in a piece.
fn number(piece: &Bytes) -> u16 {
    u16::from_be_bytes([piece[1], piece[2]])
}

fn is_near(one: u16, other: u16) -> bool {
    one.wrapping_sub(other).min(other.wrapping_sub(one)) <= DISTANCE_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(first: u8, bytes: usize) -> Bytes {
        let content = (0..bytes).map(|n| n as u8);
        [first].into_iter().chain(content).collect()
    }

    #[test]
    fn a_packet_that_fits_stays_as_it_is() {
        let whole = packet(0x45, 999);
        assert_eq!(split(whole.clone(), 1_000, 1), Ok((whole.clone(), None)));
        assert_eq!(PieceJoiner::default().join(whole.clone()), Some(whole));
    }

    #[test]
    fn pieces_of_several_packets_join_in_any_order() {
        let whole = [packet(0x45, 1_279), packet(0x60, 1_300)];
        let split = |n: usize| split(whole[n].clone(), 1_100, n as u16).unwrap();
        let ((a, b), (c, d)) = (split(0), split(1));
        let mut joiner = PieceJoiner::default();
        assert_eq!(joiner.join(d.unwrap()), None);
        assert_eq!(joiner.join(a), None);
        assert_eq!(joiner.join(c), Some(whole[1].clone()));
        assert_eq!(joiner.join(b.unwrap()), Some(whole[0].clone()));
        assert!(joiner.waiting.is_empty());
    }

    #[test]
    fn lone_pieces_are_forgotten_in_the_end_and_a_repeated_one_joins_nothing() {
        let mut joiner = PieceJoiner::default();
        for number in 0..=WAITING_MAX as u16 {
            let (first, _) = split(packet(0x45, 1_279), 1_100, number).unwrap();
            assert_eq!(joiner.join(first), None);
        }
        assert_eq!(joiner.waiting.len(), WAITING_MAX);
        let (first, _) = split(packet(0x45, 1_279), 1_100, 5).unwrap();
        assert_eq!(joiner.join(first), None);
    }

    #[test]
    fn a_lone_piece_does_not_wait_until_its_number_comes_again() {
        let pieces = |number| split(packet(0x45, 1_279), 1_100, number).unwrap();
        let mut joiner = PieceJoiner::default();
        assert_eq!(joiner.join(pieces(65_500).0), None);
        // Near it, though numbers begin again between.
        assert_eq!(joiner.join(pieces(100).0), None);
        assert_eq!(joiner.waiting.len(), 2);
        assert_eq!(joiner.join(pieces(2_000).0), None);
        assert_eq!(joiner.waiting.len(), 1);
        assert_eq!(joiner.join(pieces(65_500).1.unwrap()), None);
    }

    #[test]
    fn what_two_pieces_cannot_hold_is_refused() {
        assert_eq!(split(packet(0x45, 1_999), 1_000, 0), Err(PacketTooLong));
    }
}
