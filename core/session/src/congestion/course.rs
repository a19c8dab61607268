//! A course the controllers are run over in tests: senders with always something to send,
//! bottlenecks with a queue and random loss, receivers that acknowledge every packet.

use std::collections::VecDeque;

use d2tp_time::{Span, Time};
use d2tp_wire::{Frame, FrameIter, PathId, Writer};

use super::{CongestionKind, Sibling, controller};
use crate::pacer::Pacer;
use crate::recovery::{Recovery, Sent};

const DATAGRAM: u64 = 1_200;
const ACK_DELAY_MAX: Span = Span::from_millis(25);
const STEP: Span = Span::from_micros(500);

/// What a path is like.
#[derive(Clone, Copy)]
pub(super) struct Course {
    pub(super) bytes_per_s: u64,
    pub(super) rtt_ms: u64,
    /// Bytes the bottleneck holds back at most.
    pub(super) queue: u64,
    /// One packet of so many is lost at random; 0: none.
    pub(super) loss_of: u64,
}

/// What came of it, the first half left out.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Share of the bottleneck's rate that was delivered, in hundredths.
    pub(super) used: u64,
    /// Mean wait in the queue.
    pub(super) wait_ms: u64,
}

/// A bottleneck at work.
struct Bottleneck {
    course: Course,
    free_at: Time,
    dice: u64,
}

impl Bottleneck {
    fn new(course: Course) -> Self {
        Bottleneck {
            course,
            free_at: Time::ZERO,
            dice: 0x1234_5678_9abc_def1,
        }
    }

    fn half(&self) -> Span {
        Span::from_millis(self.course.rtt_ms).divided(2)
    }

    /// How long the packet waits and when it is acknowledged; none if it is lost.
    fn pass(&mut self, now: Time) -> Option<(Span, Time)> {
        let at_queue = now + self.half();
        let wait = self.free_at.since(at_queue);
        let queued = wait.as_nanos() * self.course.bytes_per_s / 1_000_000_000;
        if queued + DATAGRAM > self.course.queue {
            return None;
        }
        let service = Span::from_nanos(DATAGRAM * 1_000_000_000 / self.course.bytes_per_s);
        self.free_at = self.free_at.max(at_queue) + service;
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        // Airtime is spent on what is lost.
        let lost = self.course.loss_of > 0 && self.dice.is_multiple_of(self.course.loss_of);
        (!lost).then(|| (wait, self.free_at + self.half()))
    }
}

/// A sender on one path.
struct Sender {
    recovery: Recovery,
    pacer: Pacer,
    acks: VecDeque<(Time, u64)>,
    received: Vec<(u64, u64)>,
    delivered: u64,
    waited: Span,
}

impl Sender {
    fn new(kind: CongestionKind) -> Self {
        Sender {
            recovery: Recovery::new(Span::from_millis(333), controller(kind, DATAGRAM)),
            pacer: Pacer::new(Time::ZERO, DATAGRAM),
            acks: VecDeque::new(),
            received: Vec::new(),
            delivered: 0,
            waited: Span::ZERO,
        }
    }

    fn sibling(&self) -> Sibling {
        Sibling {
            window: self.recovery.controller.window(),
            rtt: self.recovery.rtt.smoothed(),
            interval: self.recovery.controller.interval(),
        }
    }

    fn hear(&mut self, now: Time, siblings: &[Sibling]) {
        while let Some((at, number)) = self.acks.pop_front_if(|(at, _)| *at <= now) {
            match self.received.last_mut() {
                Some((_, high)) if *high + 1 == number => *high = number,
                _ => self.received.push((number, number)),
            }
            let newest = self.received.iter().rev().take(8).copied();
            let mut buf = [0; 200];
            let mut w = Writer::new(&mut buf);
            assert!(Frame::encode_ack(&mut w, PathId(0), 0, newest));
            let n = w.written();
            let Some(Ok(Frame::Ack { ranges, .. })) = FrameIter::new(&buf[..n]).next() else {
                panic!("an ACK of our own");
            };
            self.recovery
                .on_ack(
                    at,
                    PathId(0),
                    ranges,
                    true,
                    Span::ZERO,
                    ACK_DELAY_MAX,
                    siblings,
                    |_, _| {},
                )
                .expect("only what was sent is acknowledged");
        }
        if self.recovery.loss_at() <= now {
            self.recovery.on_loss_timeout(now, ACK_DELAY_MAX, |_, _| {});
        }
    }

    fn speak(&mut self, now: Time, bottleneck: &mut Bottleneck, counting: bool) {
        let mut probe = self.recovery.probe_at(ACK_DELAY_MAX, Span::from_secs(2)) <= now;
        if probe {
            self.recovery.on_probe_timeout(now);
        }
        let controller = &self.recovery.controller;
        let rate = controller.pacing_rate().unwrap_or_else(|| {
            let rtt = self.recovery.rtt.smoothed().as_nanos().max(10_000);
            let gain = if controller.in_slow_start() { 8 } else { 5 };
            (u128::from(controller.window()) * gain * 250_000_000 / u128::from(rtt)) as u64
        });
        self.pacer.set_rate(now, rate, DATAGRAM);
        while std::mem::take(&mut probe)
            || self.recovery.room() >= DATAGRAM && self.pacer.allowance(now) >= DATAGRAM
        {
            let number = self.recovery.next_number();
            let mut sent = Sent::new(now);
            sent.bytes = DATAGRAM as u16;
            sent.eliciting = true;
            self.recovery.on_sent(sent);
            self.pacer.on_sent(DATAGRAM);
            let Some((wait, heard_at)) = bottleneck.pass(now) else {
                continue;
            };
            self.acks.push_back((heard_at, number));
            if counting {
                self.delivered += DATAGRAM;
                self.waited = self.waited + wait;
            }
        }
    }
}

/// Runs groups of senders, coupled within a group, each over one of `courses`, for `seconds`.
fn race(
    courses: &[Course],
    groups: &[(CongestionKind, &[usize])],
    seconds: u64,
) -> Vec<Vec<Sender>> {
    let mut bottlenecks: Vec<_> = courses.iter().copied().map(Bottleneck::new).collect();
    let mut senders: Vec<Vec<Sender>> = groups
        .iter()
        .map(|(kind, paths)| paths.iter().map(|_| Sender::new(*kind)).collect())
        .collect();
    let (mut now, mut turn) = (Time::ZERO, 0);
    let end = Time::ZERO + Span::from_secs(seconds);
    let half = Time::ZERO + Span::from_secs(seconds).divided(2);
    while now < end {
        for n in 0..groups.len() {
            // Nobody is always first at the queue.
            let g = (n + turn) % groups.len();
            let siblings: Vec<Sibling> = senders[g].iter().map(Sender::sibling).collect();
            for (sender, path) in senders[g].iter_mut().zip(groups[g].1) {
                sender.hear(now, &siblings);
                sender.speak(now, &mut bottlenecks[*path], now >= half);
            }
        }
        now += STEP;
        turn += 1;
    }
    senders
}

/// One sender over one path.
pub(super) fn run(kind: CongestionKind, course: Course, seconds: u64) -> Outcome {
    let senders = race(&[course], &[(kind, &[0])], seconds);
    let sender = &senders[0][0];
    let could = course.bytes_per_s * seconds / 2;
    Outcome {
        used: sender.delivered * 100 / could,
        wait_ms: sender.waited.as_millis() / (sender.delivered / DATAGRAM).max(1),
    }
}

/// Bytes per second of each group.
pub(super) fn share(
    courses: &[Course],
    groups: &[(CongestionKind, &[usize])],
    seconds: u64,
) -> Vec<u64> {
    let senders = race(courses, groups, seconds);
    let rate = |group: &Vec<Sender>| group.iter().map(|s| s.delivered).sum::<u64>() * 2 / seconds;
    senders.iter().map(rate).collect()
}
