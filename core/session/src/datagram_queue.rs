//! The queue of unreliable datagrams to be sent: short, and it drops datagrams rather than delaying
//! them.
//!
//! ```text
//!  send_datagram ─▶ [ newest … oldest ] ─▶ a packet of a path that is available, not gated, and on its route
//!                     │ full: drops the oldest    │ expired: dropped       │ fits no packet: dropped
//!                     └────────────── each counted ─────────────────────────┘
//! ```
//!
//! A datagram for each path stays in the queue until it left on all paths that take datagrams. Its
//! copies have the same number in the upper half of the context, by which the peer detects the
//! second copy ([`DuplicateFilter`]).

use std::collections::VecDeque;

use bytes::Bytes;
use d2tp_time::Time;
use d2tp_wire::{DATA_HEADER_BYTES, DATAGRAM_FIRST_BYTES, FlowId, Frame, PathId, TAG_BYTES};

use crate::config::DATAGRAMS_MAX;
use crate::path_selection::PathSelection;

/// Contexts below this value belong to the application.
pub const CONTEXTS: u64 = 1 << 61;

/// R-COPY-1: a context from [`CONTEXTS`] on consists of a number and the application's context,
/// which is below this value.
pub const CONTEXTS_OF_COPIES: u64 = 1 << 32;

/// The most bytes of a DATAGRAM frame beside its payload: type, context, length.
pub(crate) const HEAD_MAX: usize = 1 + 8 + 4;

/// The number of numbers of copied datagrams, after which they start again.
pub(crate) const NUMBERS: u32 = 1 << 29;

/// R-COPY-2: how many of the latest datagram numbers are remembered as received or not.
const SEEN: u32 = 1024;

const SEEN_WORDS: usize = SEEN as usize / 64;

/// Counts of what happened to datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramStats {
    /// Datagrams that left in a packet.
    pub sent: u64,
    /// Datagrams dropped for newer ones, because no path took them.
    pub displaced: u64,
    /// Datagrams dropped because they expired before they could leave.
    pub expired: u64,
    /// Datagrams dropped because they were too large for any packet by the time they could leave.
    pub too_big: u64,
    /// Datagrams that arrived from the peer.
    pub received: u64,
    /// Copies that left on another path after the first one.
    pub copies_sent: u64,
    /// Copies that arrived after the first one, and were dropped.
    pub copies_received: u64,
    /// Datagrams that repaired losses and left on another path than most datagrams (R-MIRROR-4).
    pub repairs_sent: u64,
    /// Payload bytes of all datagrams that left, copies included, as paths count them.
    pub bytes_out: u64,
    /// Payload bytes of all datagrams that arrived.
    pub bytes_in: u64,
    /// Datagrams that arrived on gated paths, and their payload bytes: repairs, and what acknowledges (R-ACK-8, R-MIRROR-4).
    pub gated_received: u64,
    /// Payload bytes of the datagrams that arrived on gated paths.
    pub gated_bytes_in: u64,
}

/// Where a datagram leaves that repairs a loss, and which flow's grants pay for it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RepairRoute {
    pub(crate) path: PathId,
    pub(crate) flow: FlowId,
}

/// A datagram that waits to be sent.
#[derive(Debug)]
pub(crate) struct QueuedDatagram {
    /// The context number as it is on the wire.
    pub(crate) context: u64,
    pub(crate) bytes: Bytes,
    pub(crate) expires: Time,
    pub(crate) route: PathSelection,
    /// Paths on which the datagram has already left.
    pub(crate) left_on: Vec<PathId>,
    /// Whether the datagram acknowledges what arrives on other paths, for the application's own protocol.
    pub(crate) acknowledges: bool,
    /// Set if the datagram repairs a loss on another path than most datagrams.
    pub(crate) repairs: Option<RepairRoute>,
}

impl QueuedDatagram {
    fn may_leave(&self, by: &DatagramPath) -> bool {
        if let Some(repairs) = self.repairs {
            // R-MIRROR-4
            return by.takes_repairs && repairs.path == by.path;
        }
        if self.acknowledges || by.takes_only_acks {
            // R-ACK-8
            return self.acknowledges && by.takes_acks;
        }
        match self.route {
            PathSelection::Any => !by.is_far_slower,
            PathSelection::Steadiest => by.steadiest == Some(by.path),
            PathSelection::Each => !self.left_on.contains(&by.path),
        }
    }
}

/// A datagram that is taken from the queue to be sent.
#[derive(Debug)]
pub(crate) struct OutgoingDatagram {
    pub(crate) context: u64,
    pub(crate) bytes: Bytes,
    /// Whether the datagram left on another path before.
    pub(crate) is_copy: bool,
    /// Whether the datagram acknowledges what arrives on other paths.
    pub(crate) acknowledges: bool,
    /// The flow whose grants pay, if the datagram repairs a loss.
    pub(crate) repairs: Option<FlowId>,
}

/// A path that can carry datagrams, as the queue sees it.
#[derive(Debug)]
pub(crate) struct DatagramPath {
    pub(crate) path: PathId,
    /// Whether another path that carries datagrams is so much faster that waiting for it takes less time.
    pub(crate) is_far_slower: bool,
    /// Whether datagrams that acknowledge leave on this path now.
    pub(crate) takes_acks: bool,
    /// Whether datagrams that repair losses leave on this path now.
    pub(crate) takes_repairs: bool,
    /// Whether no other datagrams do, because the path is gated or in standby.
    pub(crate) takes_only_acks: bool,
    pub(crate) steadiest: Option<PathId>,
    pub(crate) all: Vec<PathId>,
}

/// Remembers which numbers of copied datagrams arrived: the highest one, and a bit for each number
/// before it.
#[derive(Clone, Debug, Default)]
struct DuplicateFilter {
    highest: u32,
    before: [u64; SEEN_WORDS],
}

impl DuplicateFilter {
    fn new(highest: u32) -> DuplicateFilter {
        let mut seen = DuplicateFilter {
            highest,
            ..DuplicateFilter::default()
        };
        seen.mark(0);
        seen
    }

    /// Marks the number that is `back` below the highest. Returns whether it had not arrived
    /// before.
    fn mark(&mut self, back: u32) -> bool {
        let (word, bit) = ((back / 64) as usize, 1 << (back % 64));
        let new = self.before[word] & bit == 0;
        self.before[word] |= bit;
        new
    }

    /// R-COPY-2: records that this number arrived. Returns whether it is new.
    fn take(&mut self, number: u32) -> bool {
        let ahead = number.wrapping_sub(self.highest) % NUMBERS;
        let back = (NUMBERS - ahead) % NUMBERS;
        if back < SEEN {
            return self.mark(back);
        }
        if ahead >= SEEN {
            // The sender started again, or a thousand datagrams were lost.
            *self = DuplicateFilter::new(number);
            return true;
        }
        let (words, bits) = ((ahead / 64) as usize, ahead % 64);
        self.before.rotate_right(words);
        self.before[..words].fill(0);
        if bits > 0 {
            for n in (0..SEEN_WORDS).rev() {
                let carried = n
                    .checked_sub(1)
                    .map_or(0, |m| self.before[m] >> (64 - bits));
                self.before[n] = self.before[n] << bits | carried;
            }
        }
        self.highest = number;
        self.mark(0)
    }
}

/// The datagrams of a session that wait to be sent.
#[derive(Debug, Default)]
pub(crate) struct DatagramSendQueue {
    waiting: VecDeque<QueuedDatagram>,
    /// Whether a datagram was ever sent with a path selection.
    pub(crate) routed: bool,
    /// Whether a datagram that repairs a loss was ever queued: until then nobody looks for one.
    repairing: bool,
    /// The path on which datagrams leave that acknowledge, if it is another one than that of what they acknowledge.
    pub(crate) ack_carrier: Option<PathId>,
    /// The number of the next copied datagram; `None` before the first one.
    pub(crate) number: Option<u32>,
    seen: Option<Box<DuplicateFilter>>,
    /// Counts of what happened to datagrams so far; `None` until one is sent or received.
    stats: Option<Box<DatagramStats>>,
}

impl DatagramSendQueue {
    /// Counts of what happened to datagrams so far.
    pub(crate) fn stats(&self) -> DatagramStats {
        self.stats.as_deref().copied().unwrap_or_default()
    }

    pub(crate) fn stats_mut(&mut self) -> &mut DatagramStats {
        self.stats.get_or_insert_default()
    }

    /// Adds a datagram. Those with a path selection are sent before the others, and dropped after
    /// them.
    pub(crate) fn push(&mut self, waiting: QueuedDatagram) {
        let routed = |waiting: &QueuedDatagram| waiting.route != PathSelection::Any;
        self.routed |= routed(&waiting);
        self.repairing |= waiting.repairs.is_some();
        let rest = match self.routed {
            true => self.waiting.partition_point(routed),
            false => 0,
        };
        if self.waiting.len() == DATAGRAMS_MAX {
            let oldest = if rest == DATAGRAMS_MAX { 0 } else { rest };
            let oldest = self.waiting.remove(oldest);
            self.stats.get_or_insert_default().displaced +=
                u64::from(oldest.is_some_and(|w| w.left_on.is_empty()));
        }
        if routed(&waiting) {
            self.waiting.insert(rest.min(self.waiting.len()), waiting);
        } else {
            self.waiting.push_back(waiting);
        }
    }

    /// The number of datagrams that wait, but for those that repair losses.
    pub(crate) fn len_without_repairs(&self) -> usize {
        let repairs = match self.repairing {
            true => {
                let repairs = self.waiting.iter().filter(|one| one.repairs.is_some());
                repairs.count()
            }
            false => 0,
        };
        self.waiting.len() - repairs
    }

    /// The number of datagrams that wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Drops all datagrams that wait, because the session is over.
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }

    /// Whether a datagram waits that acknowledges.
    pub(crate) fn has_acks(&self) -> bool {
        self.waiting.iter().any(|waiting| waiting.acknowledges)
    }

    /// The first datagram that waits to repair a loss on this path: the flow that pays, and its bytes.
    pub(crate) fn repair_for(&self, path: PathId) -> Option<(FlowId, usize)> {
        if !self.repairing {
            return None;
        }
        let mut waiting = self.waiting.iter();
        waiting.find_map(|waiting| {
            let repairs = waiting.repairs.filter(|repairs| repairs.path == path)?;
            Some((repairs.flow, waiting.bytes.len()))
        })
    }

    /// Whether a datagram waits that repairs a loss, and has not expired.
    pub(crate) fn has_repairs(&self, now: Time) -> bool {
        let mut waiting = self.waiting.iter();
        waiting.any(|waiting| waiting.repairs.is_some() && waiting.expires > now)
    }

    /// Whether a waiting datagram could leave on this path.
    pub(crate) fn has_for(&self, by: &DatagramPath) -> bool {
        self.waiting.iter().any(|waiting| waiting.may_leave(by))
    }

    /// Takes the next datagram for a packet with `room` bytes left. `is_whole`: the packet is still empty, and as large as
    /// the path carries. A packet within a batch may be smaller, and what does not fit there fits the next batch.
    pub(crate) fn next(
        &mut self,
        now: Time,
        room: usize,
        is_whole: bool,
        by: &DatagramPath,
    ) -> Option<OutgoingDatagram> {
        let mut n = 0;
        while let Some(waiting) = self.waiting.get_mut(n) {
            let len = waiting.bytes.len();
            let need = Frame::datagram_head_len(waiting.context, len) + len;
            if waiting.expires <= now {
                self.stats.get_or_insert_default().expired += u64::from(waiting.left_on.is_empty());
            } else if !waiting.may_leave(by) {
                n += 1;
                continue;
            } else if room >= need {
                let leaving = self.take_for(n, by)?;
                let stats = self.stats.get_or_insert_default();
                stats.sent += u64::from(!leaving.is_copy);
                stats.copies_sent += u64::from(leaving.is_copy);
                stats.repairs_sent += u64::from(leaving.repairs.is_some());
                stats.bytes_out += leaving.bytes.len() as u64;
                return Some(leaving);
            } else if is_whole && need > ROOM_SURE {
                // A datagram that fits no packet would block the others, so it is dropped.
                self.stats.get_or_insert_default().too_big += 1;
            } else if is_whole {
                // It waits for a path with larger packets; the others do not wait for it.
                n += 1;
                continue;
            } else {
                return None;
            }
            self.waiting.remove(n);
        }
        None
    }

    /// The waiting datagram with this index, to leave on this path. It stays if it must leave on others too.
    fn take_for(&mut self, n: usize, by: &DatagramPath) -> Option<OutgoingDatagram> {
        let waiting = self.waiting.get_mut(n)?;
        if waiting.route != PathSelection::Each {
            let QueuedDatagram {
                context,
                bytes,
                acknowledges,
                repairs,
                ..
            } = self.waiting.remove(n)?;
            return Some(OutgoingDatagram {
                context,
                bytes,
                is_copy: false,
                acknowledges,
                repairs: repairs.map(|repairs| repairs.flow),
            });
        }
        let leaving = OutgoingDatagram {
            context: waiting.context,
            bytes: waiting.bytes.clone(),
            is_copy: !waiting.left_on.is_empty(),
            acknowledges: false,
            repairs: None,
        };
        waiting.left_on.push(by.path);
        if by.all.iter().all(|path| waiting.left_on.contains(path)) {
            self.waiting.remove(n);
        }
        Some(leaving)
    }

    /// The application's context of a datagram that arrived; `None` for a copy of an earlier one.
    pub(crate) fn take(&mut self, context: u64) -> Option<u64> {
        if context < CONTEXTS {
            return Some(context);
        }
        let number = ((context - CONTEXTS) / CONTEXTS_OF_COPIES) as u32;
        let new = match &mut self.seen {
            Some(seen) => seen.take(number),
            None => {
                self.seen = Some(Box::new(DuplicateFilter::new(number)));
                true
            }
        };
        new.then_some(context % CONTEXTS_OF_COPIES)
    }
}

/// The room for frames that every path has, in bytes.
pub(crate) const ROOM_SURE: usize = room(DATAGRAM_FIRST_BYTES);

/// The room for frames in a datagram of this size, in bytes.
pub(crate) const fn room(datagram: usize) -> usize {
    datagram - DATA_HEADER_BYTES - TAG_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_time::Span;
    use rand::{Rng as _, SeedableRng as _};
    use rand_pcg::Pcg32;

    fn waiting(n: u8, bytes: usize, expires: u64) -> QueuedDatagram {
        QueuedDatagram {
            context: 0,
            bytes: vec![n; bytes].into(),
            expires: Time::ZERO + Span::from_secs(expires),
            route: PathSelection::Any,
            left_on: Vec::new(),
            acknowledges: false,
            repairs: None,
        }
    }

    fn by(path: u32) -> DatagramPath {
        DatagramPath {
            path: PathId(path),
            is_far_slower: false,
            takes_acks: true,
            takes_repairs: false,
            takes_only_acks: false,
            steadiest: Some(PathId(1)),
            all: vec![PathId(0), PathId(1)],
        }
    }

    #[test]
    fn a_full_queue_forgets_its_oldest_and_counts_it() {
        let mut queue = DatagramSendQueue::default();
        for n in 0..=DATAGRAMS_MAX {
            queue.push(waiting(n as u8, 10, 9));
        }
        let first = queue.next(Time::ZERO, 1000, true, &by(0)).unwrap();
        assert_eq!(first.bytes[0], 1);
        assert_eq!((queue.stats().displaced, queue.stats().sent), (1, 1));
    }

    #[test]
    fn what_expired_is_passed_over_and_counted() {
        let mut queue = DatagramSendQueue::default();
        queue.push(waiting(1, 10, 3));
        queue.push(waiting(2, 10, 9));
        let now = Time::ZERO + Span::from_secs(3);
        assert_eq!(queue.next(now, 1000, true, &by(0)).unwrap().bytes[0], 2);
        assert_eq!(queue.stats().expired, 1);
        assert!(queue.is_empty());
    }

    #[test]
    fn one_that_fits_no_packet_goes_and_one_that_fits_the_next_stays() {
        let mut queue = DatagramSendQueue::default();
        queue.push(waiting(1, 2000, 9));
        queue.push(waiting(2, 800, 9));
        assert!(queue.next(Time::ZERO, 500, false, &by(0)).is_none());
        assert_eq!(queue.stats().too_big, 0, "a full packet proves nothing");
        assert!(queue.next(Time::ZERO, 500, true, &by(0)).is_none());
        assert_eq!(queue.stats().too_big, 1);
        let next = queue.next(Time::ZERO, 1100, true, &by(0));
        assert_eq!(next.unwrap().bytes[0], 2);
    }

    #[test]
    fn what_is_wanted_somewhere_goes_first_and_is_pushed_out_last() {
        let mut queue = DatagramSendQueue::default();
        for n in 0..DATAGRAMS_MAX {
            queue.push(waiting(n as u8, 10, 9));
        }
        for n in 100..102 {
            queue.push(QueuedDatagram {
                route: PathSelection::Each,
                ..waiting(n, 10, 9)
            });
        }
        queue.push(waiting(99, 10, 9));
        assert_eq!((queue.len(), queue.stats().displaced), (DATAGRAMS_MAX, 3));
        let mut take = || {
            queue
                .next(Time::ZERO, 1000, true, &by(0))
                .map(|l| l.bytes[0])
        };
        let first: Vec<_> = (0..3).map_while(|_| take()).collect();
        assert_eq!(first, [100, 101, 3]);
    }

    #[test]
    fn datagrams_that_acknowledge_leave_on_their_carrier_alone_and_a_gated_one_takes_no_others() {
        // R-ACK-8
        let mut queue = DatagramSendQueue::default();
        queue.push(waiting(1, 10, 9));
        queue.push(QueuedDatagram {
            acknowledges: true,
            ..waiting(2, 10, 9)
        });
        assert!(queue.has_acks());
        let own = DatagramPath {
            takes_acks: false,
            ..by(0)
        };
        let gated = DatagramPath {
            takes_only_acks: true,
            ..by(1)
        };
        let mut take = |by: &DatagramPath| {
            let next = queue.next(Time::ZERO, 1000, true, by);
            next.map(|leaving| (leaving.bytes[0], leaving.acknowledges))
        };
        assert_eq!(take(&gated), Some((2, true)));
        assert_eq!(take(&gated), None);
        assert_eq!(take(&own), Some((1, false)));
        assert!(!queue.has_acks() && queue.is_empty());
    }

    #[test]
    fn datagrams_that_repair_leave_on_their_path_alone_and_take_no_others_there() {
        // R-MIRROR-4
        let mut queue = DatagramSendQueue::default();
        queue.push(QueuedDatagram {
            repairs: Some(RepairRoute {
                path: PathId(1),
                flow: FlowId(4),
            }),
            ..waiting(1, 10, 9)
        });
        queue.push(waiting(2, 10, 9));
        assert!(queue.has_repairs(Time::ZERO));
        assert_eq!(queue.len_without_repairs(), 1);
        assert!(!queue.has_repairs(Time::ZERO + Span::from_secs(9)));
        assert_eq!(queue.repair_for(PathId(1)), Some((FlowId(4), 10)));
        assert_eq!(queue.repair_for(PathId(0)), None);
        let lent = DatagramPath {
            takes_acks: false,
            takes_repairs: true,
            takes_only_acks: true,
            ..by(1)
        };
        let full = DatagramPath {
            takes_repairs: false,
            ..by(1)
        };
        let mut take = |by: &DatagramPath| {
            let next = queue.next(Time::ZERO, 1000, true, by);
            next.map(|leaving| (leaving.bytes[0], leaving.repairs))
        };
        assert_eq!(take(&full), Some((2, None)));
        assert_eq!(take(&full), None);
        assert_eq!(take(&lent), Some((1, Some(FlowId(4)))));
        assert_eq!(take(&lent), None);
        assert_eq!(queue.stats().repairs_sent, 1);
    }

    #[test]
    fn what_is_for_other_paths_holds_up_nothing_and_leaves_once_on_each_of_its_own() {
        let mut queue = DatagramSendQueue::default();
        for (n, route) in [
            PathSelection::Steadiest,
            PathSelection::Each,
            PathSelection::Any,
        ]
        .into_iter()
        .enumerate()
        {
            queue.push(QueuedDatagram {
                route,
                ..waiting(n as u8, 10, 9)
            });
        }
        let mut take = |path| {
            let next = queue.next(Time::ZERO, 1000, true, &by(path));
            next.map(|leaving| (leaving.bytes[0], leaving.is_copy))
        };
        assert_eq!(take(0), Some((1, false)));
        assert_eq!(take(0), Some((2, false)));
        assert_eq!(take(0), None);
        assert_eq!(take(1), Some((0, false)));
        assert_eq!(take(1), Some((1, true)));
        assert_eq!(take(1), None);
        assert_eq!((queue.stats().sent, queue.stats().copies_sent), (3, 1));
        assert!(queue.is_empty());
    }

    #[test]
    fn a_number_counts_once_wherever_it_comes_in_the_last_thousand() {
        // R-COPY-2
        let mut seen = DuplicateFilter::new(NUMBERS - 700);
        let mut came = std::collections::BTreeSet::from([NUMBERS - 700]);
        let mut draw = Pcg32::seed_from_u64(1);
        for _ in 0..20_000 {
            // Forwards beyond the last number, and back by less than a thousand.
            let number = (seen.highest + NUMBERS + draw.random_range(0..600) - 550) % NUMBERS;
            assert_eq!(seen.take(number), came.insert(number), "{number}");
        }
        assert!(seen.highest < NUMBERS / 2, "it came around");
    }

    #[test]
    fn a_sender_that_begins_anew_is_heard() {
        // R-COPY-2
        let mut seen = DuplicateFilter::new(900_000);
        assert!(seen.take(7) && seen.take(8) && !seen.take(7));
        assert!(seen.take(8 + SEEN) && !seen.take(8 + SEEN) && seen.take(9));
    }
}
