//! Packets that are larger than a frame: cut into fragments, and put together again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::frame::{
    FRAGMENT_INDEX_MAX, FRAGMENT_OVERHEAD_BYTES, FrameBody, LinkFragment, LinkFrame,
    StationAddress, WHOLE_OVERHEAD_BYTES,
};

/// The largest packet that a line carries, in bytes.
pub const PACKET_BYTES_MAX: usize = 1_500;
/// Packets that may be incomplete at the same time. The oldest gives way: its sender has gone on.
const INCOMPLETE_MAX: usize = 16; // a guess: several stations, each with one or two
/// How long a packet may be incomplete.
const INCOMPLETE_TIME: Duration = Duration::from_secs(120); // 1,500 bytes at 300 bit/s take 50 s

/// Cuts a packet into frames of at most `frame_bytes` bytes. `number` is the packet's among those of this
/// address and direction.
pub fn fragment(
    packet: &[u8],
    from_bridge: bool,
    address: StationAddress,
    number: u8,
    frame_bytes: usize,
) -> Vec<Vec<u8>> {
    let encoded = |body| {
        let mut bytes = Vec::with_capacity(frame_bytes);
        let frame = LinkFrame {
            from_bridge,
            address,
            body,
        };
        frame.encode(&mut bytes);
        bytes
    };
    if packet.len() + WHOLE_OVERHEAD_BYTES <= frame_bytes {
        return vec![encoded(FrameBody::Whole(packet))];
    }
    let most = frame_bytes.saturating_sub(FRAGMENT_OVERHEAD_BYTES).max(1);
    let parts = packet.len().div_ceil(most);
    // Parts of one size: the last would otherwise often be nothing but its header.
    let size = packet.len().div_ceil(parts);
    let cut = packet.chunks(size).enumerate().map(|(index, bytes)| {
        encoded(FrameBody::Fragment(LinkFragment {
            number,
            index: u8::try_from(index).unwrap_or(FRAGMENT_INDEX_MAX),
            last: index + 1 == parts,
            bytes,
        }))
    });
    cut.collect()
}

/// A packet of which some fragments have arrived.
#[derive(Debug)]
struct IncompletePacket {
    address: StationAddress,
    number: u8,
    /// The fragments, by index.
    parts: Vec<Option<Vec<u8>>>,
    /// The number of fragments, once the last has arrived.
    count: Option<usize>,
    bytes: usize,
    began: Instant,
}

/// What a fragment led to.
#[derive(Debug, PartialEq, Eq)]
pub enum Reassembled {
    /// The packet is complete.
    Packet(Vec<u8>),
    /// Other fragments are missing.
    Incomplete,
    /// The fragment contradicts others, or the packet would be too large: all of it is dropped.
    Dropped,
}

/// Packets of all stations that are being put together.
#[derive(Debug, Default)]
pub struct Reassembly {
    incomplete: VecDeque<IncompletePacket>,
    /// Packets that never became complete.
    abandoned: u64,
}

impl Reassembly {
    /// The number of packets that were given up because fragments are missing.
    pub fn abandoned(&self) -> u64 {
        self.abandoned
    }

    /// Handles a fragment.
    pub fn on_fragment(
        &mut self,
        now: Instant,
        address: StationAddress,
        fragment: LinkFragment<'_>,
    ) -> Reassembled {
        self.expire(now);
        // A line keeps the order of an address's fragments: nothing more comes of an earlier packet.
        let before = self.incomplete.len();
        self.incomplete
            .retain(|p| p.address != address || p.number == fragment.number);
        self.abandoned += (before - self.incomplete.len()) as u64;
        let of = |p: &IncompletePacket| p.address == address;
        let at = match self.incomplete.iter().position(of) {
            Some(at) => at,
            None => {
                if self.incomplete.len() >= INCOMPLETE_MAX {
                    self.incomplete.pop_front();
                    self.abandoned += 1;
                }
                self.incomplete.push_back(IncompletePacket {
                    address,
                    number: fragment.number,
                    parts: Vec::new(),
                    count: None,
                    bytes: 0,
                    began: now,
                });
                self.incomplete.len() - 1
            }
        };
        let done = self.incomplete[at].add(fragment);
        if done != Reassembled::Incomplete {
            self.incomplete.remove(at);
        }
        done
    }

    fn expire(&mut self, now: Instant) {
        let before = self.incomplete.len();
        self.incomplete
            .retain(|p| now.saturating_duration_since(p.began) < INCOMPLETE_TIME);
        self.abandoned += (before - self.incomplete.len()) as u64;
    }
}

impl IncompletePacket {
    fn add(&mut self, fragment: LinkFragment<'_>) -> Reassembled {
        let index = usize::from(fragment.index);
        let count = match (fragment.last, self.count) {
            (true, None) => Some(index + 1),
            (true, Some(count)) if count != index + 1 => return Reassembled::Dropped,
            (_, known) => known,
        };
        let highest = self.parts.len().max(index + 1);
        if count.is_some_and(|count| count < highest) {
            return Reassembled::Dropped;
        }
        self.count = count;
        self.parts.resize(highest, None);
        if let Some(known) = &self.parts[index] {
            // A copy. Another content belongs to a later packet of this number.
            return match known == fragment.bytes {
                true => Reassembled::Incomplete,
                false => Reassembled::Dropped,
            };
        }
        self.bytes += fragment.bytes.len();
        if self.bytes > PACKET_BYTES_MAX {
            return Reassembled::Dropped;
        }
        self.parts[index] = Some(fragment.bytes.to_vec());
        if self.count != Some(self.parts.len()) || self.parts.iter().any(Option::is_none) {
            return Reassembled::Incomplete;
        }
        Reassembled::Packet(self.parts.drain(..).flatten().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part(frame: &[u8]) -> (StationAddress, LinkFragment<'_>) {
        let frame = LinkFrame::decode(frame).unwrap();
        match frame.body {
            FrameBody::Fragment(fragment) => (frame.address, fragment),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn a_packet_comes_back_in_whatever_order_its_fragments_arrive(
            packet in prop::collection::vec(any::<u8>(), 250..=PACKET_BYTES_MAX),
            frame_bytes in 96_usize..=240, shuffle: u64,
        ) {
            let mut frames = fragment(&packet, true, StationAddress(3), 9, frame_bytes);
            prop_assert!(frames.iter().all(|frame| frame.len() <= frame_bytes));
            // A cheap permutation that depends on the seed.
            frames.sort_by_key(|frame| {
                u64::from(crc32fast::hash(frame)).wrapping_mul(shuffle | 1)
            });
            let mut whole = Reassembly::default();
            let (last, first) = frames.split_last().unwrap();
            for frame in first {
                let (address, fragment) = part(frame);
                let done = whole.on_fragment(Instant::now(), address, fragment);
                prop_assert_eq!(done, Reassembled::Incomplete);
            }
            let (address, fragment) = part(last);
            let done = whole.on_fragment(Instant::now(), address, fragment);
            prop_assert_eq!(done, Reassembled::Packet(packet));
        }

        #[test]
        fn arbitrary_fragments_hold_bounded_memory(
            parts in prop::collection::vec(
                (any::<u16>(), any::<u8>(), 0..=FRAGMENT_INDEX_MAX, any::<bool>(), 1_usize..250), 0..200,
            ),
        ) {
            let mut whole = Reassembly::default();
            let bytes = [7; 250];
            for (address, number, index, last, n) in parts {
                let fragment = LinkFragment { number, index, last, bytes: &bytes[..n] };
                let done = whole.on_fragment(Instant::now(), StationAddress(address % 40), fragment);
                if let Reassembled::Packet(packet) = done {
                    prop_assert!(packet.len() <= PACKET_BYTES_MAX);
                }
                let held: usize = whole.incomplete.iter().map(|p| p.bytes).sum();
                prop_assert!(held <= INCOMPLETE_MAX * PACKET_BYTES_MAX);
            }
        }
    }

    #[test]
    fn a_packet_that_stays_incomplete_is_given_up_and_counted() {
        let frames = fragment(&[1; 400], false, StationAddress(1), 0, 96);
        let (address, first) = part(&frames[0]);
        let mut whole = Reassembly::default();
        let start = Instant::now();
        whole.on_fragment(start, address, first);
        let later = start + INCOMPLETE_TIME;
        let next = LinkFragment { number: 1, ..first };
        whole.on_fragment(later, address, next);
        assert_eq!((whole.incomplete.len(), whole.abandoned()), (1, 1));
    }

    #[test]
    fn a_lost_fragment_costs_no_later_packet_of_the_same_number() {
        let (lost, next) = ([1; 400], [2; 400]);
        let mut whole = Reassembly::default();
        let lost = fragment(&lost, false, StationAddress(1), 7, 96);
        let (address, first) = part(&lost[0]);
        whole.on_fragment(Instant::now(), address, first);
        for number in [8, 7] {
            let frames = fragment(&next, false, StationAddress(1), number, 96);
            let done = frames.iter().map(|frame| {
                let (address, fragment) = part(frame);
                whole.on_fragment(Instant::now(), address, fragment)
            });
            assert_eq!(done.last(), Some(Reassembled::Packet(next.to_vec())));
        }
        assert_eq!((whole.incomplete.len(), whole.abandoned()), (0, 1));
    }

    #[test]
    fn a_packet_that_fits_into_a_frame_has_no_header_of_fragments() {
        let frames = fragment(&[1; 89], false, StationAddress(1), 0, 96);
        assert_eq!((frames.len(), frames[0].len()), (1, 96));
        assert_eq!(fragment(&[1; 90], false, StationAddress(1), 0, 96).len(), 2);
    }
}
