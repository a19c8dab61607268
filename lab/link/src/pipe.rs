//! One direction of a link, as a queue.
//!
//! ```text
//!  push ─▶ [ drop-tail queue ] ─▶ server ─▶ lost? ─▶ delay + jitter ─▶ pop
//!            bytes or ms          rate      loss      in order, unless reordering is set
//! ```
//!
//! Loss comes after the server, so a lost packet has used its transmission time. Taking a pipe down
//! drops everything in it; a dead pipe (attached, carries nothing) loses every packet after its
//! transmission time; a stalled one keeps its queue and sends nothing. Each packet costs O(1), a
//! reordered one O(log n); nothing is allocated per packet once the queues have grown.
//!
//! Time must not go back between calls. Everything due at or before `now` is computed with its own
//! exact time, however late the call is, so a coarse timer affects when packets are seen, not their
//! results.

use crate::loss::{Loss, LossState, chance};
use crate::rate::{PipeServer, Rate};
use d2tp_time::{Span, Time};
use rand::Rng;
use rand_pcg::Pcg32;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// The most packets in a queue, whatever its limit in bytes.
pub const QUEUE_PACKETS_MAX: usize = 100_000;
/// The most packets in propagation; beyond this the pipe loses them. 1 Gb/s of 100-byte packets for
/// 0.8 s.
pub const FLIGHT_PACKETS_MAX: usize = 1_000_000;

/// The content of a pipe. A pipe may duplicate a packet, and damage it if configured.
pub trait Packet: Clone {
    /// Damages the packet; `entropy` selects where and how.
    fn corrupt(&mut self, entropy: u64);
}

impl Packet for Vec<u8> {
    /// Flips one bit.
    fn corrupt(&mut self, entropy: u64) {
        if !self.is_empty() {
            let bit = entropy % (self.len() as u64 * 8);
            self[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
    }
}

impl Packet for u64 {
    /// Flips one bit.
    fn corrupt(&mut self, entropy: u64) {
        *self ^= 1 << (entropy % 64);
    }
}

/// How long a queue may grow before packets are dropped at its tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// This many bytes, including the packet that is being sent.
    Bytes(u64),
    /// The bytes that the current rate carries in this time, at least one packet. While the rate is
    /// 0, the last other rate counts.
    Time(Span),
}

/// The properties of one direction of a link.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The rate at which the queue is served.
    pub rate: Rate,
    /// The time from leaving the queue to arriving.
    pub delay: Span,
    /// Additional delay, drawn evenly from zero to this for each packet. It keeps the order.
    pub jitter: Span,
    /// The packet loss.
    pub loss: Loss,
    /// The limit of the queue.
    pub queue: Queue,
    /// The probability that a packet is delayed by `reorder_by` and overtaken.
    pub reorder: f64,
    /// How long a reordered packet is delayed.
    pub reorder_by: Span,
    /// The probability that a packet arrives twice.
    pub duplicate: f64,
    /// The probability that a packet arrives damaged.
    pub corrupt: f64,
    /// The largest packet that is accepted, in bytes.
    pub mtu_bytes: u32,
}

impl Default for Profile {
    /// A perfect wire: no limit, no delay, no loss, 1500-byte packets.
    fn default() -> Profile {
        Profile {
            rate: Rate::Unlimited,
            delay: Span::ZERO,
            jitter: Span::ZERO,
            loss: Loss::default(),
            queue: Queue::Bytes(u64::MAX),
            reorder: 0.0,
            reorder_by: Span::ZERO,
            duplicate: 0.0,
            corrupt: 0.0,
            mtu_bytes: 1500,
        }
    }
}

/// The result of pushing a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushOutcome {
    /// The packet is in the queue.
    Queued,
    /// The packet was dropped, because the queue was full.
    QueueFull,
    /// The packet was refused and counted, because the pipe is down.
    Down,
    /// The packet was refused, because it is larger than the MTU.
    TooBig,
}

/// Counters of a pipe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets pushed, whatever the result.
    pub packets_offered: u64,
    /// Packets returned by `pop`, duplicates included.
    pub packets_delivered: u64,
    /// Bytes of the packets that were delivered.
    pub bytes_delivered: u64,
    /// Second copies among the delivered packets.
    pub packets_duplicated: u64,
    /// Packets that found the queue full.
    pub packets_queue_full: u64,
    /// Packets pushed while the pipe was down.
    pub packets_while_down: u64,
    /// Packets larger than the MTU.
    pub packets_too_big: u64,
    /// Packets delayed to be overtaken.
    pub packets_reordered: u64,
    /// Packets damaged.
    pub packets_corrupted: u64,
    /// Packets lost, including those of a dead pipe.
    pub packets_lost: u64,
    /// Packets dropped because the pipe went down.
    pub packets_cut: u64,
    /// Packets that left the queue, including those that were then lost.
    pub packets_served: u64,
    /// The total time that those packets were in the queue, including their transmission time.
    pub waited: Span,
    /// The longest wait of a packet in the queue.
    pub waited_max: Span,
}

/// The packet at the head of a queue, as a shared medium sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueHead {
    pub(crate) arrived: Time,
    pub(crate) bytes: u32,
}

struct QueuedPacket<P> {
    bytes: u32,
    arrived: Time,
    packet: P,
}

struct InFlightPacket<P> {
    at: Time,
    /// Breaks ties by order of sending.
    order: u64,
    bytes: u32,
    packet: P,
}

impl<P> InFlightPacket<P> {
    fn key(&self) -> (Time, u64) {
        (self.at, self.order)
    }
}

impl<P> PartialEq for InFlightPacket<P> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}
impl<P> Eq for InFlightPacket<P> {}
impl<P> PartialOrd for InFlightPacket<P> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<P> Ord for InFlightPacket<P> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl Counters {
    /// The mean time of a packet in the queue, in milliseconds; 0 without packets.
    pub fn waited_mean_ms(&self) -> f64 {
        self.waited.as_millis_f64() / self.packets_served.max(1) as f64
    }
}

/// One direction of a link.
///
/// ```
/// use cedos_lab_link::{Pipe, Profile, Rate, Span, Time, PushOutcome, seeded};
/// let profile = Profile {
///     rate: Rate::BitsPerSecond(12_000_000),
///     delay: Span::from_millis(10),
///     ..Profile::default()
/// };
/// let mut pipe = Pipe::new(profile, seeded(1, 0));
/// assert_eq!(pipe.push(Time::ZERO, 1500, 42u64), PushOutcome::Queued);
/// let arrives = Time::ZERO + Span::from_millis(11); // 1 ms of transmission, 10 ms of delay
/// assert_eq!(pipe.pop(arrives - Span::from_nanos(1)), None);
/// assert_eq!(pipe.next_event(), Some(arrives));
/// assert_eq!(pipe.pop(arrives), Some(42));
/// ```
pub struct Pipe<P> {
    profile: Profile,
    up: bool,
    dead: bool,
    stalled: bool,
    rng: Pcg32,
    loss: LossState,
    queue: VecDeque<QueuedPacket<P>>,
    queue_bytes: u64,
    /// The bytes of a queue limit in time, from the last rate that was not 0.
    queue_bytes_max: u64,
    server: PipeServer,
    flight: VecDeque<InFlightPacket<P>>,
    stragglers: BinaryHeap<Reverse<InFlightPacket<P>>>,
    last_arrival: Time,
    sent: u64,
    counters: Counters,
}

impl<P: Packet> Pipe<P> {
    /// A pipe that is up. `rng` determines all its random values.
    pub fn new(profile: Profile, rng: Pcg32) -> Pipe<P> {
        let queue_bytes_max = queue_bytes_max(&profile).unwrap_or(0);
        Pipe {
            server: PipeServer::new(profile.rate.clone()),
            profile,
            up: true,
            dead: false,
            stalled: false,
            rng,
            loss: LossState::default(),
            queue: VecDeque::new(),
            queue_bytes: 0,
            queue_bytes_max,
            flight: VecDeque::new(),
            stragglers: BinaryHeap::new(),
            last_arrival: Time::ZERO,
            sent: 0,
            counters: Counters::default(),
        }
    }

    /// Offers a packet of `bytes` at `now`.
    pub fn push(&mut self, now: Time, bytes: u32, packet: P) -> PushOutcome {
        self.counters.packets_offered += 1;
        if !self.up {
            self.counters.packets_while_down += 1;
            return PushOutcome::Down;
        }
        if bytes > self.profile.mtu_bytes {
            self.counters.packets_too_big += 1;
            return PushOutcome::TooBig;
        }
        self.serve(now);
        if self.is_full_for(bytes) {
            self.counters.packets_queue_full += 1;
            return PushOutcome::QueueFull;
        }
        self.queue_bytes += u64::from(bytes);
        if self.queue.is_empty() {
            self.server.begin(now, bytes);
        }
        self.queue.push_back(QueuedPacket {
            bytes,
            arrived: now,
            packet,
        });
        PushOutcome::Queued
    }

    /// Whether a packet of `bytes` would find the queue full.
    pub(crate) fn is_full_for(&self, bytes: u32) -> bool {
        let full = self.queue_bytes.saturating_add(u64::from(bytes)) > self.queue_bytes_max
            || self.queue.len() >= QUEUE_PACKETS_MAX;
        // An empty queue accepts any packet, because a limit below one packet would block
        // everything.
        full && !self.queue.is_empty()
    }

    /// The time of the next internal event, at which `pop` should be called. `None`: not before the
    /// next call.
    pub fn next_event(&self) -> Option<Time> {
        let front = self.flight.front().map(|f| f.at);
        let straggler = self.stragglers.peek().map(|s| s.0.at);
        [front, straggler, self.server.departure()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Takes the next packet that has arrived by `now`. Call again until it returns `None`.
    pub fn pop(&mut self, now: Time) -> Option<P> {
        self.serve(now);
        let straggler_first = match (self.flight.front(), self.stragglers.peek()) {
            (Some(f), Some(s)) => s.0 < *f,
            (None, Some(_)) => true,
            _ => false,
        };
        let arrived = if straggler_first {
            let due = self.stragglers.peek().is_some_and(|s| s.0.at <= now);
            due.then(|| self.stragglers.pop()).flatten().map(|s| s.0)
        } else {
            let due = self.flight.front().is_some_and(|f| f.at <= now);
            due.then(|| self.flight.pop_front()).flatten()
        }?;
        self.counters.packets_delivered += 1;
        self.counters.bytes_delivered += u64::from(arrived.bytes);
        Some(arrived.packet)
    }

    /// Changes the pipe's properties from `now` on. Packets in propagation keep their arrival
    /// times, and later ones do not overtake them even if the delay shrinks.
    pub fn change(&mut self, now: Time, profile: Profile) {
        self.serve(now);
        if let Some(max) = queue_bytes_max(&profile) {
            self.queue_bytes_max = max;
        }
        self.server.change(now, profile.rate.clone(), self.stalled);
        self.profile = profile;
    }

    /// Takes the pipe up or down. Going down drops everything queued and in propagation.
    pub fn turn(&mut self, now: Time, up: bool) {
        self.serve(now);
        if self.up && !up {
            let cut = self.queue.len() + self.flight.len() + self.stragglers.len();
            self.counters.packets_cut += cut as u64;
            self.queue.clear();
            self.queue_bytes = 0;
            self.flight.clear();
            self.stragglers.clear();
            self.server.end(now);
            self.last_arrival = now;
        }
        self.up = up;
    }

    /// Makes the pipe dead or not: a dead one is attached, accepts packets, uses their transmission
    /// time, and delivers none.
    pub fn deaden(&mut self, now: Time, dead: bool) {
        self.serve(now);
        self.dead = dead;
    }

    /// Stalls the pipe or not: a stalled one accepts and queues packets, and sends none.
    pub fn stall(&mut self, now: Time, stalled: bool) {
        self.serve(now);
        self.stalled = stalled;
        self.server.change(now, self.profile.rate.clone(), stalled);
    }

    /// Whether the pipe is up.
    pub fn is_up(&self) -> bool {
        self.up
    }

    /// Whether packets that are offered now will be delivered.
    pub fn delivers(&self) -> bool {
        self.up && !self.dead && !self.stalled
    }

    /// The current properties of the pipe.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The counters of the pipe so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The number of packets inside: queued or in propagation.
    pub fn packets_inside(&self) -> usize {
        self.queue.len() + self.flight.len() + self.stragglers.len()
    }

    /// The number of bytes queued, including the packet that is being sent.
    pub fn queue_bytes(&self) -> u64 {
        self.queue_bytes
    }

    /// The packet that a shared medium may send next; `None` while the pipe is stalled.
    pub(crate) fn head(&self) -> Option<QueueHead> {
        let head = self.queue.front().filter(|_| !self.stalled)?;
        Some(QueueHead {
            arrived: head.arrived,
            bytes: head.bytes,
        })
    }

    /// Removes the head packet at `left`, because a shared medium has sent it or given it up.
    pub(crate) fn take_head(&mut self, left: Time, arrives: bool) {
        let Some(head) = self.queue.pop_front() else {
            return;
        };
        self.queue_bytes -= u64::from(head.bytes);
        if arrives {
            self.send(left, head);
        } else {
            self.counters.packets_lost += 1;
        }
    }

    /// Moves every packet that left the queue by `now` to propagation.
    fn serve(&mut self, now: Time) {
        while let Some(left) = self.server.departure().filter(|left| *left <= now) {
            let Some(head) = self.queue.pop_front() else {
                break;
            };
            self.queue_bytes -= u64::from(head.bytes);
            self.server.end(left);
            let waited = left.since(head.arrived);
            self.counters.packets_served += 1;
            self.counters.waited = self.counters.waited + waited;
            self.counters.waited_max = self.counters.waited_max.max(waited);
            if let Some(next) = self.queue.front() {
                self.server.begin(left.max(next.arrived), next.bytes);
            }
            self.send(left, head);
        }
    }

    fn send(&mut self, left: Time, head: QueuedPacket<P>) {
        let lost = self.loss.loses(&self.profile.loss, &mut self.rng);
        if lost || self.dead || self.flight.len() >= FLIGHT_PACKETS_MAX {
            self.counters.packets_lost += 1;
            return;
        }
        let mut at = left + self.profile.delay;
        if self.profile.jitter > Span::ZERO {
            let jitter = self.rng.random_range(0..=self.profile.jitter.as_nanos());
            at += Span::from_nanos(jitter);
        }
        let mut packet = head.packet;
        if chance(&mut self.rng, self.profile.corrupt) {
            packet.corrupt(self.rng.random());
            self.counters.packets_corrupted += 1;
        }
        let twin = chance(&mut self.rng, self.profile.duplicate).then(|| packet.clone());
        if chance(&mut self.rng, self.profile.reorder) {
            let at = at + self.profile.reorder_by;
            self.counters.packets_reordered += 1;
            self.sent += 1;
            let order = self.sent;
            self.stragglers.push(Reverse(InFlightPacket {
                at,
                order,
                bytes: head.bytes,
                packet,
            }));
        } else {
            self.fly(at, head.bytes, packet);
        }
        if let Some(twin) = twin {
            self.counters.packets_duplicated += 1;
            self.fly(at, head.bytes, twin);
        }
    }

    /// Adds a packet to propagation, behind all others.
    fn fly(&mut self, at: Time, bytes: u32, packet: P) {
        let at = at.max(self.last_arrival);
        self.last_arrival = at;
        self.sent += 1;
        self.flight.push_back(InFlightPacket {
            at,
            order: self.sent,
            bytes,
            packet,
        });
    }
}

/// The queue limit in bytes; `None` if it is a time and there is no rate.
fn queue_bytes_max(profile: &Profile) -> Option<u64> {
    match profile.queue {
        Queue::Bytes(bytes) => Some(bytes),
        Queue::Time(span) => match profile.rate.bits_per_second() {
            None => Some(u64::MAX),
            Some(0) => None,
            Some(bps) => {
                let bytes = u128::from(bps) * u128::from(span.as_nanos()) / 8_000_000_000;
                Some(u64::try_from(bytes).unwrap_or(u64::MAX))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded;

    fn ms(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    /// 12 Mb/s: 1 ms per 1500-byte packet.
    fn pipe(profile: Profile) -> Pipe<u64> {
        Pipe::new(
            Profile {
                rate: Rate::BitsPerSecond(12_000_000),
                ..profile
            },
            seeded(1, 0),
        )
    }

    fn drain(pipe: &mut Pipe<u64>) -> Vec<(Time, u64)> {
        let mut out = Vec::new();
        while let Some(at) = pipe.next_event() {
            while let Some(packet) = pipe.pop(at) {
                out.push((at, packet));
            }
        }
        out
    }

    #[test]
    fn packets_leave_one_airtime_apart() {
        let mut pipe = pipe(Profile {
            delay: Span::from_millis(5),
            ..Profile::default()
        });
        for n in 0..3 {
            pipe.push(ms(0), 1500, n);
        }
        assert_eq!(drain(&mut pipe), [(ms(6), 0), (ms(7), 1), (ms(8), 2)]);
    }

    #[test]
    fn the_time_in_the_queue_is_counted_with_the_airtime() {
        let mut pipe = pipe(Profile {
            delay: Span::from_millis(5),
            ..Profile::default()
        });
        for n in 0..3 {
            pipe.push(ms(0), 1500, n);
        }
        pipe.push(ms(10), 1500, 3);
        drain(&mut pipe);
        let counters = pipe.counters();
        assert_eq!(counters.packets_served, 4);
        assert_eq!(counters.waited_mean_ms(), (1.0 + 2.0 + 3.0 + 1.0) / 4.0);
        assert_eq!(counters.waited_max, Span::from_millis(3));
    }

    #[test]
    fn a_full_queue_drops_at_the_tail() {
        let mut pipe = pipe(Profile {
            queue: Queue::Bytes(3000),
            ..Profile::default()
        });
        assert_eq!(pipe.push(ms(0), 1500, 0), PushOutcome::Queued);
        assert_eq!(pipe.push(ms(0), 1500, 1), PushOutcome::Queued);
        assert_eq!(pipe.push(ms(0), 1500, 2), PushOutcome::QueueFull);
        assert_eq!(pipe.push(ms(1), 1500, 3), PushOutcome::Queued);
        assert_eq!(
            drain(&mut pipe)
                .into_iter()
                .map(|p| p.1)
                .collect::<Vec<_>>(),
            [0, 1, 3]
        );
    }

    #[test]
    fn a_queue_in_time_follows_the_rate_and_outlives_a_stall() {
        let mut pipe = pipe(Profile {
            queue: Queue::Time(Span::from_millis(4)),
            ..Profile::default()
        });
        assert_eq!(pipe.queue_bytes_max, 6000);
        let mut half = pipe.profile().clone();
        half.rate = Rate::BitsPerSecond(6_000_000);
        pipe.change(ms(0), half.clone());
        assert_eq!(pipe.queue_bytes_max, 3000);
        half.rate = Rate::BitsPerSecond(0);
        pipe.change(ms(0), half);
        assert_eq!(pipe.queue_bytes_max, 3000);
    }

    #[test]
    fn going_down_cuts_everything_and_refuses_and_counts_the_rest() {
        let mut pipe = pipe(Profile {
            delay: Span::from_millis(50),
            ..Profile::default()
        });
        for n in 0..10 {
            pipe.push(ms(0), 1500, n);
        }
        pipe.turn(ms(5), false);
        assert_eq!(pipe.counters().packets_cut, 10);
        assert_eq!(pipe.push(ms(6), 1500, 99), PushOutcome::Down);
        assert_eq!(pipe.counters().packets_while_down, 1);
        assert_eq!(pipe.next_event(), None);
        pipe.turn(ms(100), true);
        pipe.push(ms(100), 1500, 100);
        assert_eq!(drain(&mut pipe), [(ms(151), 100)]);
    }

    #[test]
    fn a_dead_pipe_takes_packets_and_delivers_none() {
        let mut pipe = pipe(Profile::default());
        pipe.deaden(ms(0), true);
        assert_eq!(pipe.push(ms(0), 1500, 0), PushOutcome::Queued);
        assert_eq!(drain(&mut pipe), []);
        assert_eq!(pipe.counters().packets_lost, 1);
        pipe.deaden(ms(9), false);
        pipe.push(ms(9), 1500, 1);
        assert_eq!(drain(&mut pipe), [(ms(10), 1)]);
    }

    #[test]
    fn a_stall_keeps_the_queue() {
        let mut pipe = pipe(Profile::default());
        pipe.push(ms(0), 1500, 0);
        pipe.stall(ms(0), true);
        assert_eq!(pipe.next_event(), None);
        pipe.stall(ms(500), false);
        assert_eq!(drain(&mut pipe), [(ms(501), 0)]);
    }

    #[test]
    fn a_late_look_changes_nothing() {
        let profile = Profile {
            delay: Span::from_millis(3),
            ..Profile::default()
        };
        let (mut prompt, mut late) = (pipe(profile.clone()), pipe(profile));
        for n in 0..5 {
            prompt.push(ms(0), 1500, n);
            late.push(ms(0), 1500, n);
        }
        let seen = drain(&mut prompt).len();
        assert_eq!(std::iter::from_fn(|| late.pop(ms(8))).count(), seen);
    }

    #[test]
    fn a_reordered_packet_is_overtaken() {
        let mut pipe = pipe(Profile {
            reorder: 1.0,
            reorder_by: Span::from_millis(5),
            ..Profile::default()
        });
        pipe.push(ms(0), 1500, 0);
        let mut in_order = pipe.profile().clone();
        pipe.pop(ms(1));
        in_order.reorder = 0.0;
        pipe.change(ms(1), in_order);
        pipe.push(ms(1), 1500, 1);
        assert_eq!(drain(&mut pipe), [(ms(2), 1), (ms(6), 0)]);
    }

    #[test]
    fn a_packet_above_the_mtu_is_refused() {
        let mut pipe = pipe(Profile::default());
        assert_eq!(pipe.push(ms(0), 1501, 0), PushOutcome::TooBig);
    }

    #[test]
    fn duplicates_and_damage_come_as_asked() {
        let mut pipe = pipe(Profile {
            duplicate: 1.0,
            corrupt: 1.0,
            ..Profile::default()
        });
        pipe.push(ms(0), 1500, 0);
        let out = drain(&mut pipe);
        assert_eq!(out.len(), 2);
        assert_eq!(out[0].1.count_ones(), 1);
    }
}
