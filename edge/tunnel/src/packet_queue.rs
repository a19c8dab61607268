//! Packets that wait for room in a session: FQ-CoDel (RFC 8290).
//!
//! ```text
//!  push ─▶ by addresses, protocol and ports ─▶ [flow] [flow] [flow] ─▶ in turn, new flows first ─▶ CoDel ─▶ pop
//!             │ full: the head of the longest flow                              │ waited too long: marked, or dropped
//! ```
//!
//! A session's own queue is short and drops without regard to whose packet it is. With this one before it, a call beside a
//! download waits for no more than a packet of each other flow, and a TCP connection sees a short queue with few losses
//! whatever the burst in which its packets came.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use bytes::BytesMut;

use crate::congestion_mark::mark_congestion;
use crate::inner_packet::{PROTOCOL_TCP, PROTOCOL_UDP};

/// How long packets of a flow may wait before it is told. RFC 8289 has 5 ms, for links that take packets one by one;
/// radios take them in bursts, and a packet of 1,420 bytes alone takes 11 ms at 1 Mb/s.
const TARGET: Duration = Duration::from_millis(20); // a guess between a radio's bursts and what a call notices

/// For how long they must have waited so long, which covers a round trip (RFC 8289 §4.3).
const INTERVAL: Duration = Duration::from_millis(100);

/// The longest that a packet waits.
const EXPIRY: Duration = Duration::from_millis(500); // a guess: a call cannot use older ones

/// The bytes that a flow may send in its turn (RFC 8290 §5.2.3).
const QUANTUM: i64 = 1_514;

/// What a packet takes beside its bytes: its allocation, its entry, and a flow of its own if it is the only one.
const PACKET_OVERHEAD_BYTES: usize = 384;

/// A flow that occupies no more than this has no standing queue.
const ONE_PACKET: usize = 1_500 + PACKET_OVERHEAD_BYTES;

/// The most flows that are told apart (RFC 8290 §5.2.5); others share their turns.
const FLOWS_MAX: u64 = 1024;

/// The most packets that are dropped at once when the queue is full (RFC 8290 §4.1.3).
const DROP_BATCH: usize = 64;

/// The entries that a flow without packets keeps room for.
const IDLE_ROOM: usize = 16;

/// What happened to packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketQueueCounts {
    /// Packets marked "congestion experienced".
    pub marked: u64,
    /// Packets dropped because their flow's had waited too long.
    pub congested: u64,
    /// Packets dropped because the queue was full.
    pub overflowed: u64,
    /// Packets dropped because they had waited for half a second.
    pub expired: u64,
}

impl PacketQueueCounts {
    /// All packets that were dropped.
    pub fn dropped(&self) -> u64 {
        self.congested + self.overflowed + self.expired
    }
}

/// A packet that leaves the queue.
#[derive(Debug, PartialEq, Eq)]
pub struct WaitingPacket {
    /// The bytes of the packet.
    pub packet: BytesMut,
    /// The time for which the packet may still wait.
    pub left: Duration,
}

/// A queue of packets for one destination, managed by CoDel.
#[derive(Debug)]
pub struct PacketQueue {
    flows: HashMap<u64, FlowPackets>,
    /// Flows that had no packets waiting.
    new: VecDeque<u64>,
    old: VecDeque<u64>,
    bytes: usize,
    bytes_max: usize,
    hashing: RandomState,
    counts: PacketQueueCounts,
}

#[derive(Debug)]
struct FlowPackets {
    waiting: VecDeque<(Instant, BytesMut)>,
    bytes: usize,
    /// The bytes that the flow may still send in this turn.
    deficit: i64,
    codel: CoDel,
}

/// The state of the queue management CoDel (RFC 8289 §5).
#[derive(Debug, Default)]
struct CoDel {
    /// The time at which packets will have waited too long for a whole interval.
    above_since: Option<Instant>,
    next_drop: Option<Instant>,
    is_dropping: bool,
    count: u32,
    last_count: u32,
}

impl CoDel {
    fn control_law(from: Instant, count: u32) -> Instant {
        from + INTERVAL.div_f64(f64::from(count.max(1)).sqrt())
    }

    /// Whether the packet that waited from `since` to `now`, with `left` bytes behind it, may be dropped.
    fn may_drop(&mut self, now: Instant, since: Instant, left: usize) -> bool {
        if now.saturating_duration_since(since) < TARGET || left <= ONE_PACKET {
            self.above_since = None;
            return false;
        }
        let above_since = *self.above_since.get_or_insert(now + INTERVAL);
        now >= above_since
    }

    fn begin_dropping(&mut self, now: Instant) {
        self.is_dropping = true;
        let recently = self
            .next_drop
            .is_some_and(|next| now.saturating_duration_since(next) < 16 * INTERVAL);
        let more = self.count.wrapping_sub(self.last_count);
        self.count = match recently && more > 1 {
            true => more,
            false => 1,
        };
        self.last_count = self.count;
        self.next_drop = Some(CoDel::control_law(now, self.count));
    }
}

impl FlowPackets {
    /// The next packet, and whether CoDel may drop it.
    fn take(&mut self, now: Instant, total: &mut usize) -> Option<(WaitingPacket, bool)> {
        let Some((since, packet)) = self.waiting.pop_front() else {
            self.codel.above_since = None;
            return None;
        };
        if self.waiting.is_empty() {
            self.waiting.shrink_to(IDLE_ROOM);
        }
        let cost = cost(&packet);
        self.bytes -= cost;
        *total -= cost;
        let may_drop = self.codel.may_drop(now, since, self.bytes);
        let left = match is_tcp(&packet) {
            true => EXPIRY,
            false => EXPIRY.saturating_sub(now.saturating_duration_since(since)),
        };
        Some((WaitingPacket { packet, left }, may_drop))
    }

    fn forget_expired(&mut self, now: Instant, total: &mut usize) -> u64 {
        let mut expired = 0;
        while let Some((since, packet)) = self.waiting.front()
            && now.saturating_duration_since(*since) > EXPIRY
            && !is_tcp(packet)
        {
            self.take(now, total);
            expired += 1;
        }
        expired
    }

    /// The next packet that is not dropped.
    fn pop(
        &mut self,
        now: Instant,
        total: &mut usize,
        counts: &mut PacketQueueCounts,
        dropped: &mut Vec<BytesMut>,
    ) -> Option<WaitingPacket> {
        counts.expired += self.forget_expired(now, total);
        let Some((mut taken, mut may_drop)) = self.take(now, total) else {
            self.codel.is_dropping = false;
            return None;
        };
        if !self.codel.is_dropping {
            if !may_drop {
                return Some(taken);
            }
            self.codel.begin_dropping(now);
            if mark_congestion(&mut taken.packet) {
                counts.marked += 1;
                return Some(taken);
            }
            counts.congested += 1;
            dropped.push(taken.packet);
            return self.take(now, total).map(|(taken, _)| taken);
        }
        loop {
            let due = self.codel.next_drop.is_none_or(|next| now >= next);
            self.codel.is_dropping = may_drop;
            if !may_drop || !due {
                return Some(taken);
            }
            self.codel.count += 1;
            let from = self.codel.next_drop.unwrap_or(now);
            self.codel.next_drop = Some(CoDel::control_law(from, self.codel.count));
            if mark_congestion(&mut taken.packet) {
                counts.marked += 1;
                return Some(taken);
            }
            counts.congested += 1;
            dropped.push(taken.packet);
            (taken, may_drop) = self.take(now, total)?;
        }
    }
}

impl PacketQueue {
    /// A queue whose packets occupy at most `bytes_max`.
    pub fn new(bytes_max: usize) -> PacketQueue {
        PacketQueue {
            flows: HashMap::new(),
            new: VecDeque::new(),
            old: VecDeque::new(),
            bytes: 0,
            bytes_max,
            hashing: RandomState::new(),
            counts: PacketQueueCounts::default(),
        }
    }

    /// What the packets occupy.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether no packet waits.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// What happened to packets so far.
    pub fn counts(&self) -> PacketQueueCounts {
        self.counts
    }

    /// Adds a packet of IPv4 or IPv6.
    pub fn push(&mut self, now: Instant, packet: &[u8]) {
        let key = self.hashing.hash_one(flow_of(packet)) % FLOWS_MAX;
        let flow = self.flows.entry(key).or_insert_with(|| {
            self.new.push_back(key);
            FlowPackets {
                waiting: VecDeque::new(),
                bytes: 0,
                deficit: QUANTUM,
                codel: CoDel::default(),
            }
        });
        self.counts.expired += flow.forget_expired(now, &mut self.bytes);
        let packet = BytesMut::from(packet);
        let cost = cost(&packet);
        flow.bytes += cost;
        self.bytes += cost;
        flow.waiting.push_back((now, packet));
        while self.bytes > self.bytes_max && self.drop_from_longest(now) {}
    }

    /// Drops the oldest packets of the flow that occupies most: half of them, and some dozens at most. Returns whether there
    /// were any.
    pub fn drop_from_longest(&mut self, now: Instant) -> bool {
        let Some(longest) = self.flows.values_mut().max_by_key(|flow| flow.bytes) else {
            return false;
        };
        let count = longest.waiting.len().div_ceil(2).min(DROP_BATCH);
        for _ in 0..count {
            longest.take(now, &mut self.bytes);
        }
        self.counts.overflowed += count as u64;
        count > 0
    }

    /// Drops packets that have waited for too long.
    pub fn forget_expired(&mut self, now: Instant) {
        for flow in self.flows.values_mut() {
            self.counts.expired += flow.forget_expired(now, &mut self.bytes);
        }
    }

    /// Takes the waiting packets of TCP out, those of each flow in their order.
    pub(crate) fn take_tcp(&mut self) -> Vec<BytesMut> {
        let mut taken = Vec::new();
        for flow in self.flows.values_mut() {
            for (since, packet) in std::mem::take(&mut flow.waiting) {
                if !is_tcp(&packet) {
                    flow.waiting.push_back((since, packet));
                    continue;
                }
                let cost = cost(&packet);
                flow.bytes -= cost;
                self.bytes -= cost;
                taken.push(packet);
            }
        }
        taken
    }

    /// Drops everything that waits, without counting it.
    pub fn clear(&mut self) {
        self.flows.clear();
        self.new.clear();
        self.old.clear();
        self.bytes = 0;
    }

    /// The packet whose turn it is. Adds those to `dropped` that leave the queue for their sender to slow down.
    pub fn pop(&mut self, now: Instant, dropped: &mut Vec<BytesMut>) -> Option<WaitingPacket> {
        loop {
            let is_new = !self.new.is_empty();
            let turn = match is_new {
                true => &mut self.new,
                false => &mut self.old,
            };
            let key = turn.pop_front()?;
            let Some(flow) = self.flows.get_mut(&key) else {
                continue;
            };
            if flow.deficit <= 0 {
                flow.deficit += QUANTUM;
                self.old.push_back(key);
                continue;
            }
            let Some(taken) = flow.pop(now, &mut self.bytes, &mut self.counts, dropped) else {
                match is_new {
                    // Not forgotten at once, so that one that sends single packets is not always new.
                    true => self.old.push_back(key),
                    false => drop(self.flows.remove(&key)),
                }
                continue;
            };
            flow.deficit -= taken.packet.len() as i64;
            let turn = match is_new {
                true => &mut self.new,
                false => &mut self.old,
            };
            turn.push_front(key);
            return Some(taken);
        }
    }
}

fn cost(packet: &BytesMut) -> usize {
    packet.len() + PACKET_OVERHEAD_BYTES
}

/// Whether a packet is TCP's. Such packets do not expire: their sender would have to send them again.
fn is_tcp(packet: &[u8]) -> bool {
    flow_of(packet).1 == PROTOCOL_TCP
}

/// What packets of one flow have in common: addresses, protocol and ports. Headers with extensions are told apart by
/// addresses alone.
fn flow_of(packet: &[u8]) -> (&[u8], u8, &[u8]) {
    let (addresses, protocol, transport) = match packet.first().map(|first| first >> 4) {
        Some(4) => (packet.get(12..20), packet.get(9), packet.get(20..24)),
        _ => (packet.get(8..40), packet.get(6), packet.get(40..44)),
    };
    let protocol = protocol.copied().unwrap_or_default();
    let ports = transport.filter(|_| matches!(protocol, PROTOCOL_TCP | PROTOCOL_UDP));
    (
        addresses.unwrap_or_default(),
        protocol,
        ports.unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A packet of UDP from this port.
    fn udp(port: u16, number: u8, bytes: usize, ecn: u8) -> Vec<u8> {
        let mut packet = vec![0x45, ecn, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0];
        packet.extend([10, 83, 0, 2, 192, 0, 2, 1]);
        packet.extend(port.to_be_bytes());
        packet.extend([0, 53]);
        packet.resize(bytes, number);
        packet
    }

    fn port_of(packet: &[u8]) -> u16 {
        u16::from_be_bytes([packet[20], packet[21]])
    }

    fn pop(queue: &mut PacketQueue, now: Instant) -> Option<BytesMut> {
        let popped = queue.pop(now, &mut Vec::new());
        popped.map(|taken| taken.packet)
    }

    #[test]
    fn a_short_flow_does_not_wait_behind_a_long_one() {
        let (mut queue, now) = (PacketQueue::new(1 << 20), Instant::now());
        for number in 0..100 {
            queue.push(now, &udp(1, number, 1_400, 0));
        }
        assert_eq!(port_of(&pop(&mut queue, now).unwrap()), 1);
        queue.push(now, &udp(2, 0, 200, 0));
        let next: Vec<u16> = (0..3)
            .map(|_| port_of(&pop(&mut queue, now).unwrap()))
            .collect();
        assert!(next.contains(&2), "{next:?}");
        let rest = std::iter::from_fn(|| pop(&mut queue, now)).count();
        assert_eq!((rest, queue.bytes()), (97, 0));
        assert!(queue.is_empty() && queue.flows.is_empty());
        assert_eq!(queue.counts(), PacketQueueCounts::default());
    }

    #[test]
    fn flows_share_by_bytes_and_keep_their_order() {
        let (mut queue, now) = (PacketQueue::new(1 << 20), Instant::now());
        for number in 0..60 {
            queue.push(now, &udp(1, number, 1_400, 0));
            queue.push(now, &udp(2, number, 350, 0));
        }
        let (mut bytes, mut last) = ([0, 0], [0, 0]);
        while bytes[0] < 14_000 {
            let packet = pop(&mut queue, now).unwrap();
            let flow = usize::from(port_of(&packet) - 1);
            bytes[flow] += packet.len();
            assert!(packet[30] >= last[flow], "out of order");
            last[flow] = packet[30];
        }
        let ratio = bytes[1] as f64 / bytes[0] as f64;
        assert!((0.7..1.4).contains(&ratio), "{bytes:?}");
    }

    /// Packets come at twice the rate at which they leave; returns the longest wait after the first second, and the counts.
    fn overload(ecn: u8) -> (Duration, PacketQueueCounts) {
        let (mut queue, begin) = (PacketQueue::new(1 << 30), Instant::now());
        let (mut longest, mut sent) = (Duration::ZERO, HashMap::new());
        let (mut number, mut rate) = (0u32, 2.0);
        let (mut owed, mut seen) = (0.0, 0);
        for ms in 0..10_000 {
            let now = begin + ms * MS;
            // A sender that halves its rate when it is told, at most once in a round trip, and raises it otherwise.
            if ms % 50 == 0 {
                let counts = queue.counts();
                let told = counts.marked + counts.congested;
                rate = if told > seen { rate / 2.0 } else { rate + 0.05 };
                seen = told;
            }
            owed += rate;
            while owed >= 1.0 {
                let mut packet = udp(1, 0, 1_400, ecn);
                packet[40..44].copy_from_slice(&number.to_be_bytes());
                queue.push(now, &packet);
                sent.insert(number, now);
                (number, owed) = (number + 1, owed - 1.0);
            }
            if let Some(packet) = pop(&mut queue, now)
                && ms > 1_000
            {
                let number = u32::from_be_bytes(packet[40..44].try_into().unwrap());
                longest = longest.max(now - sent[&number]);
            }
        }
        (longest, queue.counts())
    }

    #[test]
    fn who_fills_the_queue_is_told_by_marks_or_by_few_drops() {
        let (longest, counts) = overload(0);
        assert!(longest < 200 * MS, "{longest:?}");
        assert!((5..500).contains(&counts.congested), "{counts:?}");
        assert_eq!((counts.marked, counts.overflowed), (0, 0));
        let (longest, counts) = overload(0b10);
        assert!(longest < 200 * MS, "{longest:?}");
        assert!(counts.marked >= 5, "{counts:?}");
        assert_eq!((counts.congested, counts.overflowed), (0, 0));
    }

    #[test]
    fn a_full_queue_drops_the_oldest_of_the_longest_flow() {
        let cost = 1_400 + PACKET_OVERHEAD_BYTES;
        let (mut queue, now) = (PacketQueue::new(20 * cost), Instant::now());
        queue.push(now, &udp(2, 7, 1_400, 0));
        for number in 0..20 {
            queue.push(now, &udp(1, number, 1_400, 0));
        }
        assert_eq!((queue.bytes(), queue.counts().overflowed), (11 * cost, 10));
        let left: Vec<(u16, u8)> = std::iter::from_fn(|| pop(&mut queue, now))
            .map(|packet| (port_of(&packet), packet[30]))
            .collect();
        let expected = (10..20).map(|number| (1, number)).chain([(2, 7)]);
        let missing: Vec<_> = expected.filter(|one| !left.contains(one)).collect();
        assert!(missing.is_empty() && left.len() == 11, "{left:?}");
    }

    #[test]
    fn packets_of_tcp_wait_longer_and_are_taken_out_in_an_outage() {
        let (mut queue, now) = (PacketQueue::new(1 << 20), Instant::now());
        let mut tcp = udp(1, 0, 100, 0);
        tcp[9] = PROTOCOL_TCP;
        queue.push(now, &tcp);
        queue.push(now, &udp(2, 0, 100, 0));
        let later = now + 2 * EXPIRY;
        queue.forget_expired(later);
        assert_eq!(queue.counts().expired, 1);
        assert_eq!(queue.take_tcp(), [&tcp[..]]);
        assert_eq!((queue.bytes(), pop(&mut queue, later)), (0, None));
    }

    #[test]
    fn packets_of_udp_expire_that_share_their_turns_with_tcp() {
        let (mut queue, now) = (PacketQueue::new(1 << 20), Instant::now());
        let mut tcp = udp(1, 0, 100, 0);
        tcp[9] = PROTOCOL_TCP;
        let key = |packet: &[u8]| queue.hashing.hash_one(flow_of(packet)) % FLOWS_MAX;
        let mut ports = (0..=u16::MAX).map(|port| udp(port, 0, 100, 0));
        let shares = ports.find(|packet| key(packet) == key(&tcp));
        queue.push(now, &tcp);
        queue.push(now, &shares.expect("one of 65,536 of 1,024 flows"));
        let later = now + 2 * EXPIRY;
        let first = pop(&mut queue, later).expect("TCP does not expire");
        assert_eq!(first[9], PROTOCOL_TCP);
        assert_eq!((pop(&mut queue, later), queue.counts().expired), (None, 1));
    }

    #[test]
    fn flows_that_come_and_go_leave_nothing_behind() {
        let (mut queue, now) = (PacketQueue::new(100_000), Instant::now());
        for port in 0..=u16::MAX {
            queue.push(now, &udp(port, 0, 100, 0));
        }
        assert!(queue.flows.len() <= FLOWS_MAX as usize && queue.bytes() <= 100_000);
        assert!(queue.new.len() + queue.old.len() <= FLOWS_MAX as usize);
        queue.forget_expired(now + 501 * MS);
        assert!(queue.is_empty() && queue.counts().expired > 0);
        assert!(pop(&mut queue, now + 501 * MS).is_none());
        assert!(queue.flows.is_empty() && queue.old.is_empty());
    }

    #[test]
    fn what_waited_for_half_a_second_is_dropped() {
        let (mut queue, now) = (PacketQueue::new(1 << 20), Instant::now());
        queue.push(now, &udp(1, 0, 100, 0));
        queue.push(now + 400 * MS, &udp(1, 1, 100, 0));
        let packet = pop(&mut queue, now + 501 * MS).unwrap();
        assert_eq!((packet[30], queue.counts().expired), (1, 1));
        assert!(pop(&mut queue, now + 501 * MS).is_none());
    }

    #[test]
    fn bytes_that_are_no_packet_are_carried_too() {
        let (mut queue, now) = (PacketQueue::new(1 << 20), Instant::now());
        for bytes in [&[][..], &[0x45], &[0x60; 30], &[0xff; 50]] {
            queue.push(now, bytes);
        }
        assert_eq!(std::iter::from_fn(|| pop(&mut queue, now)).count(), 4);
    }
}
