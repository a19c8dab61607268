//! A download of end-to-end TCP through a tunnel with outages, in virtual time. Its sender waits for very long after an
//! outage, as Linux does, and repeats a loss that is reported only once, or not at all.
//!
//! ```text
//!  sender ─▶ queue (drops) ─▶ TcpHold ─▶ air (loses, dies) ─▶ receiver
//!     ▲                          │                               │ ACKs with SACK
//!     └──────────────────────────┴◀── air (loses, dies) ◀────────┘
//! ```

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::tcp_hold::{BlockedPacket, TcpHold};
use crate::tcp_segment::{InnerSegment, selective_acknowledgement, timestamped_segment};

/// The bytes of each segment.
const SEGMENT: u32 = 100;
/// The sequence number of the first one, so that numbers wrap.
const FIRST: u32 = u32::MAX - 30_000;
const SEGMENTS: u32 = 3_000;
/// The receiver's window, in segments.
const WINDOW: u32 = 60;
/// All times are in milliseconds.
const STEP: u64 = 10;
const DELAY: u64 = 50;
/// The time after which an outage is noticed, and after which the session has no room any more.
const NOTICED: u64 = 600;
const FULL: u64 = 100;
/// The sender's timer, and that of one that has measured an outage.
const TIMER: u64 = 400;
const TIMER_AFTER_OUTAGE: u64 = 33_000;
const AFTER_OUTAGE: u64 = 10_000;
/// What a slow link that is there in outages takes for a packet, and how long the packet is under way then.
const SLOW_EVERY: u64 = 200;
const SLOW_DELAY: u64 = 600;
/// What another link takes for a repair, and how long the repair is under way there: later segments overtake it.
const OTHER_EVERY: u64 = 30;
const OTHER_DELAY: u64 = 150;
/// When a repair over it is lost, from when it left on.
const OTHER_DUE: u64 = 300;

struct PacketDraw(u64);

impl PacketDraw {
    fn below(&mut self, max: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % max
    }
}

fn sequence(segment: u32) -> u32 {
    FIRST.wrapping_add(segment * SEGMENT)
}

fn segment_at(sequence: u32) -> u32 {
    sequence.wrapping_sub(FIRST) / SEGMENT
}

#[derive(Default)]
struct DownloadReceiver {
    next: u32,
    later: BTreeSet<u32>,
    newest_timestamp: u32,
    /// Segments that came again.
    duplicates: u32,
    /// Segments that were discarded as old.
    discarded: u32,
}

impl DownloadReceiver {
    /// Takes a segment, and returns the ACK.
    fn take(&mut self, packet: &[u8]) -> Bytes {
        let read = InnerSegment::parse(packet).expect("TCP");
        let (segment, timestamp) = (
            segment_at(read.sequence),
            read.timestamps.expect("set").value,
        );
        if timestamp + 1 < self.newest_timestamp {
            // RFC 7323 §5.3
            self.discarded += 1;
        } else {
            if segment <= self.next {
                self.newest_timestamp = self.newest_timestamp.max(timestamp);
            }
            if segment < self.next || !self.later.insert(segment) {
                self.duplicates += 1;
            }
        }
        while self.later.remove(&self.next) {
            self.next += 1;
        }
        let mut blocks: Vec<(u32, u32)> = Vec::new();
        for segment in &self.later {
            match blocks.last_mut() {
                Some((_, end)) if *end == sequence(*segment) => *end = sequence(segment + 1),
                _ => blocks.push((sequence(*segment), sequence(segment + 1))),
            }
        }
        // The newest one first, as far as there is room.
        let has = |(from, to): &(u32, u32)| (segment_at(*from)..segment_at(*to)).contains(&segment);
        let newest = blocks.iter().position(has).unwrap_or(0);
        blocks.rotate_left(newest);
        blocks.truncate(3);
        selective_acknowledgement(sequence(self.next), &blocks).into()
    }
}

#[derive(Default)]
struct DownloadSender {
    acknowledged: u32,
    next: u32,
    is_closed: bool,
    reported: BTreeSet<u32>,
    repeated: BTreeSet<u32>,
    timer_since: u64,
    doublings: u32,
}

impl DownloadSender {
    fn on_ack(&mut self, time: u64, packet: &[u8]) {
        let ack = InnerSegment::parse(packet).expect("TCP");
        let number = ack.acknowledged.expect("set");
        let acknowledged = segment_at(number);
        if acknowledged < self.acknowledged {
            return;
        }
        if acknowledged > self.acknowledged {
            (self.acknowledged, self.timer_since, self.doublings) = (acknowledged, time, 0);
        }
        self.is_closed = ack.window == 0;
        let reported = |segment: &u32| ack.sack.contains(sequence(*segment), sequence(segment + 1));
        self.reported
            .extend((self.acknowledged..self.next).filter(reported));
    }

    /// The segments that it sends now.
    fn send(&mut self, time: u64, timer: u64, draw: &mut PacketDraw) -> Vec<u32> {
        let mut sent = Vec::new();
        for segment in self.acknowledged..self.next {
            let is_lost = self.reported.range(segment + 1..).count() >= 3;
            if is_lost && !self.reported.contains(&segment) && self.repeated.insert(segment) {
                // It forgets some.
                sent.extend((draw.below(8) > 0).then_some(segment));
            }
        }
        let is_waiting = self.acknowledged < self.next;
        if is_waiting && time - self.timer_since >= timer << self.doublings {
            (self.timer_since, self.doublings) = (time, self.doublings + 1);
            sent.push(self.acknowledged);
        }
        while !self.is_closed && self.next < SEGMENTS.min(self.acknowledged + WINDOW) {
            if self.next == self.acknowledged {
                self.timer_since = time;
            }
            sent.push(self.next);
            self.next += 1;
        }
        sent
    }
}

/// A run of one download.
struct TunnelExchange {
    draw: PacketDraw,
    begin: Instant,
    time: u64,
    hold: TcpHold,
    outages: Vec<Range<u64>>,
    /// Whether a slow link carries in outages, when it takes the next packet, and how many it took.
    has_slow_link: bool,
    slow_at: u64,
    slow_packets: u64,
    /// How many segments were acknowledged while it carried.
    slow_acknowledged: u64,
    /// Whether another link carries repairs, when it takes the next one, and how many it took.
    has_other_link: bool,
    other_at: u64,
    other_packets: u64,
    /// How many of a thousand packets the queue drops, and the air loses.
    dropped: u64,
    lost: u64,
    sender: DownloadSender,
    receiver: DownloadReceiver,
    queue: VecDeque<Bytes>,
    was_released: bool,
    down: VecDeque<(u64, Bytes)>,
    up: VecDeque<(u64, Bytes)>,
}

impl TunnelExchange {
    fn new(seed: u64) -> TunnelExchange {
        let mut draw = PacketDraw(seed);
        let mut outages = Vec::new();
        let mut at = 1_000;
        for _ in 0..4 {
            at += draw.below(4_000);
            let end = at + 1_000 + draw.below(14_000);
            outages.push(at..end);
            at = end + 1_000;
        }
        TunnelExchange {
            begin: Instant::now(),
            time: 0,
            hold: TcpHold::default(),
            outages,
            has_slow_link: false,
            slow_at: 0,
            slow_packets: 0,
            slow_acknowledged: 0,
            has_other_link: false,
            other_at: 0,
            other_packets: 0,
            dropped: draw.below(3) * 10,
            lost: draw.below(3) * 10,
            sender: DownloadSender::default(),
            receiver: DownloadReceiver::default(),
            queue: VecDeque::new(),
            was_released: false,
            down: VecDeque::new(),
            up: VecDeque::new(),
            draw,
        }
    }

    fn now(&self) -> Instant {
        self.begin + Duration::from_millis(self.time)
    }

    fn outage(&self) -> Option<&Range<u64>> {
        let mut outages = self.outages.iter();
        outages.find(|outage| outage.contains(&self.time))
    }

    fn timer(&self) -> u64 {
        let mut outages = self.outages.iter();
        let is_after =
            |outage: &Range<u64>| (outage.end..outage.end + AFTER_OUTAGE).contains(&self.time);
        match outages.any(is_after) {
            true => TIMER_AFTER_OUTAGE,
            false => TIMER,
        }
    }

    fn is_lost(&mut self) -> bool {
        self.outage().is_some() || self.draw.below(1_000) < self.lost
    }

    fn hold_senders(&mut self) {
        match self.has_slow_link {
            true => self.hold.set_slow(self.now(), true),
            false => self.hold.block(),
        }
        for packet in std::mem::take(&mut self.queue) {
            let held = self.hold.on_held(self.now(), &packet);
            assert!(matches!(held, BlockedPacket::Held(_)));
        }
    }

    /// Puts a packet under way for so long.
    fn carry(&mut self, packet: Bytes, delay: u64) {
        let at = self.time + delay;
        let behind = self.down.partition_point(|(other, _)| *other <= at);
        self.down.insert(behind, (at, packet));
    }

    fn receive(&mut self) {
        while self.down.front().is_some_and(|(at, _)| *at <= self.time) {
            let (_, packet) = self.down.pop_front().expect("one");
            let ack = self.receiver.take(&packet);
            let is_carried = self.has_slow_link && self.outage().is_some();
            if is_carried || !self.is_lost() {
                self.up.push_back((self.time + DELAY, ack));
            }
        }
        while self.up.front().is_some_and(|(at, _)| *at <= self.time) {
            let (_, ack) = self.up.pop_front().expect("one");
            if let Some(ack) = self.hold.on_received(self.now(), ack) {
                self.sender.on_ack(self.time, &ack);
            }
        }
    }

    fn send(&mut self) {
        let timer = self.timer();
        for segment in self.sender.send(self.time, timer, &mut self.draw) {
            let payload = [7; SEGMENT as usize];
            let packet = timestamped_segment(sequence(segment), &payload, self.time as u32);
            if !self.hold.holds_senders() {
                if !self.hold.take_repeated(self.now(), &packet) {
                    self.queue.push_back(packet.into());
                }
                continue;
            }
            match self.hold.on_held(self.now(), &packet.into()) {
                BlockedPacket::Held(answer) => {
                    let answer = answer.into_iter();
                    answer.for_each(|answer| self.sender.on_ack(self.time, &answer));
                }
                BlockedPacket::Passed => panic!("it has data"),
            }
        }
    }

    /// The next packet that leaves, as [`crate::PacketSource`] has it.
    fn next(&mut self) -> Option<Bytes> {
        loop {
            let released = match self.was_released && !self.queue.is_empty() {
                true => None,
                false => self.hold.next_released(),
            };
            self.was_released = released.is_some();
            if released.is_some() {
                return released;
            }
            let packet = self.queue.pop_front()?;
            if self.queue.len() > 2 && self.draw.below(1_000) < self.dropped {
                self.hold.on_dropped(self.now(), &packet);
                continue;
            }
            return Some(self.hold.on_leaving(self.now(), packet));
        }
    }

    /// Sends a repair over the other link, if it has room for one.
    fn repair_elsewhere(&mut self) {
        if !self.has_other_link || self.time < self.other_at {
            return;
        }
        let due = self.now() + Duration::from_millis(OTHER_DUE);
        let Some(packet) = self.hold.next_repair(due, true, |_| true) else {
            return;
        };
        self.other_at = self.time + OTHER_EVERY;
        self.other_packets += 1;
        if self.draw.below(1_000) >= self.lost {
            self.carry(packet, OTHER_DELAY);
        }
    }

    /// Ends when everything has arrived. Returns for how long nothing was acknowledged at most, outages aside.
    fn run(&mut self) -> u64 {
        let (mut longest, mut since, mut before) = (0, 0, 0);
        while self.sender.acknowledged < SEGMENTS {
            self.time += STEP;
            let outage = self.outage().cloned();
            if outage
                .as_ref()
                .is_some_and(|o| self.time >= o.start + NOTICED)
            {
                if !self.hold.holds_senders() {
                    self.hold_senders();
                }
                if self.has_slow_link {
                    self.hold.unblock(self.now());
                }
            } else {
                self.hold.unblock(self.now());
                self.hold.set_slow(self.now(), false);
            }
            let acknowledged = self.sender.acknowledged;
            self.receive();
            if self.hold.is_slow() {
                self.slow_acknowledged += u64::from(self.sender.acknowledged - acknowledged);
            }
            self.send();
            if self.hold.is_slow()
                && self.time >= self.slow_at
                && let Some(packet) = self.next()
            {
                self.slow_at = self.time + SLOW_EVERY;
                self.slow_packets += 1;
                self.carry(packet, SLOW_DELAY);
            }
            self.repair_elsewhere();
            let has_room = outage.as_ref().is_none_or(|o| self.time < o.start + FULL);
            for _ in 0..2 * u8::from(has_room) {
                let Some(packet) = self.next() else {
                    break;
                };
                if !self.is_lost() {
                    self.carry(packet, DELAY);
                }
            }
            if outage.is_some() || self.sender.acknowledged > before {
                (since, before) = (self.time, self.sender.acknowledged);
            }
            longest = longest.max(self.time - since);
            if longest > 2 * TIMER_AFTER_OUTAGE {
                break;
            }
        }
        longest
    }
}

#[test]
fn a_download_does_not_wait_for_its_senders_timer_after_an_outage() {
    for seed in 0..24 {
        let mut exchange = TunnelExchange::new(seed);
        let longest = exchange.run();
        assert!(
            longest < 5_000,
            "seed {seed}: nothing for {longest} ms; at {} ms; {} acknowledged, {} sent, reported {:?}",
            exchange.time,
            exchange.sender.acknowledged,
            exchange.sender.next,
            exchange
                .sender
                .reported
                .range(exchange.sender.acknowledged..),
        );
        assert_eq!(exchange.receiver.discarded, 0, "seed {seed}");
    }
}

#[test]
fn a_download_uses_a_slow_link_in_outages_and_goes_on_after_them() {
    for seed in 0..24 {
        let mut exchange = TunnelExchange::new(seed);
        exchange.has_slow_link = true;
        let longest = exchange.run();
        assert!(longest < 5_000, "seed {seed}: nothing for {longest} ms");
        let lasted = exchange.outages.iter().map(|outage| {
            let end = outage.end.min(exchange.time);
            end.saturating_sub(outage.start + NOTICED)
        });
        let slots = lasted.sum::<u64>() / SLOW_EVERY;
        let (used, useful) = (exchange.slow_packets, exchange.slow_acknowledged);
        assert!(
            10 * used >= 9 * slots && 10 * useful >= 8 * slots,
            "seed {seed}: of {slots} turns {used} were used, and {useful} carried something new"
        );
    }
}

#[test]
fn repairs_over_another_link_are_overtaken_and_neither_end_notices() {
    for seed in 0..24 {
        let mut exchange = TunnelExchange::new(seed);
        exchange.outages.clear();
        (exchange.has_other_link, exchange.dropped, exchange.lost) = (true, 0, 20);
        let longest = exchange.run();
        let (sender, receiver) = (&exchange.sender, &exchange.receiver);
        assert!(longest < 1_500, "seed {seed}: nothing for {longest} ms");
        assert!(exchange.other_packets > 20, "seed {seed}: it is used");
        assert_eq!(receiver.discarded, 0, "seed {seed}");
        assert!(
            sender.repeated.len() <= 3 && receiver.duplicates <= 6,
            "seed {seed}: of {} repairs there, {} came twice, and the sender repeated {:?}",
            exchange.other_packets,
            receiver.duplicates,
            sender.repeated,
        );
    }
}

#[test]
fn outages_and_lost_repairs_do_not_stop_a_download_beside_another_link() {
    for seed in 0..24 {
        let mut exchange = TunnelExchange::new(seed);
        exchange.has_other_link = true;
        let longest = exchange.run();
        assert!(longest < 5_000, "seed {seed}: nothing for {longest} ms");
    }
}
