//! A network model for tests of congestion controllers: senders that always have data, bottlenecks
//! with a queue and random loss, receivers that acknowledge every packet.

use std::collections::VecDeque;

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, Frame, FrameIter, PathId, WireWriter};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg32;

use super::{CongestionKind, SiblingPath, controller};
use crate::loss_classifier::LossKind;
use crate::pacer::Pacer;
use crate::recovery::Recovery;
use crate::sent_packet::{SentData, SentFrame, SentPacket};

const DATAGRAM: u64 = 1_200;
const ACK_DELAY_MAX: Span = Span::from_millis(25);
const STEP: Span = Span::from_micros(500);

/// The properties of a modelled path.
#[derive(Clone, Copy)]
pub(crate) struct PathModel {
    pub(crate) bytes_per_s: u64,
    pub(crate) rtt_ms: u64,
    /// The most bytes that the bottleneck queues.
    pub(crate) queue: u64,
    /// The random loss rate is one in this many packets; 0: no loss.
    pub(crate) loss_of: u64,
}

/// The result of a controller's run, without the first half of the run.
#[derive(Debug)]
pub(super) struct ControllerResult {
    /// The delivered share of the bottleneck's rate, in hundredths.
    pub(super) used: u64,
    /// The mean queueing delay in milliseconds.
    pub(super) wait_ms: u64,
}

/// The state of a bottleneck.
struct ModelBottleneck {
    course: PathModel,
    free_at: Time,
    dice: Pcg32,
}

impl ModelBottleneck {
    fn new(course: PathModel) -> Self {
        ModelBottleneck {
            course,
            free_at: Time::ZERO,
            dice: Pcg32::seed_from_u64(1),
        }
    }

    fn half(&self) -> Span {
        Span::from_millis(self.course.rtt_ms).divided(2)
    }

    /// The packet's queueing delay and the time of its acknowledgement, or why it is lost.
    fn pass(&mut self, now: Time) -> Result<(Span, Time), LossKind> {
        let at_queue = now + self.half();
        let wait = self.free_at.since(at_queue);
        let queued = wait.as_nanos() * self.course.bytes_per_s / 1_000_000_000;
        if queued + DATAGRAM > self.course.queue {
            return Err(LossKind::Queue);
        }
        let service = Span::from_nanos(DATAGRAM * 1_000_000_000 / self.course.bytes_per_s);
        self.free_at = self.free_at.max(at_queue) + service;
        // A lost packet takes transmission time as well.
        let one_of = self.course.loss_of;
        let lost = one_of > 0 && self.dice.random_range(0..one_of) == 0;
        match lost {
            true => Err(LossKind::Random),
            false => Ok((wait, self.free_at + self.half())),
        }
    }
}

/// A sender on one path.
struct ModelSender {
    recovery: Recovery,
    pacer: Pacer,
    acks: VecDeque<(Time, u64)>,
    received: Vec<(u64, u64)>,
    delivered: u64,
    waited: Span,
    /// Lost packets with the reason, by number, until the sender detects the loss.
    fates: VecDeque<(u64, LossKind)>,
    verdicts: ClassificationCounts,
}

/// How a sender classified its losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClassificationCounts {
    /// Packets that the queue dropped.
    pub(crate) queue: u64,
    /// Packets that the queue dropped, and that were classified as random losses.
    pub(crate) queue_called_random: u64,
    /// Packets lost at random.
    pub(crate) random: u64,
    /// Packets lost at random, and that were classified as the queue's.
    pub(crate) random_called_queue: u64,
}

impl ClassificationCounts {
    fn note(&mut self, truth: LossKind, called_random: bool) {
        match truth {
            LossKind::Queue => {
                self.queue += 1;
                self.queue_called_random += u64::from(called_random);
            }
            LossKind::Random => {
                self.random += 1;
                self.random_called_queue += u64::from(!called_random);
            }
        }
    }
}

impl ModelSender {
    fn new(kind: CongestionKind) -> Self {
        ModelSender {
            recovery: Recovery::new(Span::from_millis(333), controller(kind, DATAGRAM)),
            pacer: Pacer::new(Time::ZERO, DATAGRAM),
            acks: VecDeque::new(),
            received: Vec::new(),
            delivered: 0,
            waited: Span::ZERO,
            fates: VecDeque::new(),
            verdicts: ClassificationCounts::default(),
        }
    }

    /// Compares the classification of newly detected losses, which are all of one kind, with their
    /// true reasons.
    fn compare(&mut self, lost: &[u64], random_before: u64) {
        let called_random = self.recovery.random_total > random_before;
        for number in lost {
            let at = self.fates.partition_point(|(n, _)| n < number);
            if let Some((_, truth)) = self.fates.get(at).filter(|(n, _)| n == number) {
                self.verdicts.note(*truth, called_random);
            }
        }
        if let Some(last) = lost.last() {
            self.fates.retain(|(n, _)| n > last);
        }
    }

    fn sibling(&self) -> SiblingPath {
        SiblingPath {
            window: self.recovery.controller.window(),
            rtt: self.recovery.rtt.smoothed(),
            interval: self.recovery.controller.interval(),
        }
    }

    fn receive_acks(&mut self, now: Time, siblings: &[SiblingPath]) {
        while let Some(&(at, number)) = self.acks.front().filter(|(at, _)| *at <= now) {
            self.acks.pop_front();
            match self.received.last_mut() {
                Some((_, high)) if *high + 1 == number => *high = number,
                _ => self.received.push((number, number)),
            }
            let newest = self.received.iter().rev().take(8).copied();
            let mut buf = [0; 200];
            let mut w = WireWriter::new(&mut buf);
            assert!(Frame::encode_ack(&mut w, PathId(0), 0, newest));
            let n = w.written();
            let Some(Ok(Frame::Ack { ranges, .. })) = FrameIter::new(&buf[..n]).next() else {
                panic!("an ACK of our own");
            };
            let (mut lost, random) = (Vec::new(), self.recovery.random_total);
            self.recovery
                .on_ack(
                    at,
                    PathId(0),
                    ranges,
                    true,
                    Span::ZERO,
                    ACK_DELAY_MAX,
                    siblings,
                    |said, arrived| lost.extend(number_of(said).filter(|_| !arrived)),
                )
                .expect("only what was sent is acknowledged");
            self.compare(&lost, random);
        }
        if self.recovery.loss_at() <= now {
            let (mut lost, random) = (Vec::new(), self.recovery.random_total);
            self.recovery
                .on_loss_timeout(now, ACK_DELAY_MAX, |said, arrived| {
                    lost.extend(number_of(said).filter(|_| !arrived));
                });
            self.compare(&lost, random);
        }
    }

    fn send_packets(&mut self, now: Time, bottleneck: &mut ModelBottleneck, counting: bool) {
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
            let mut sent = SentPacket::new(now);
            sent.bytes = DATAGRAM as u16;
            sent.eliciting = true;
            sent.note(SentFrame::Data(SentData {
                flow: FlowId(0),
                offset: number,
                len: 1,
                fin: false,
            }));
            self.recovery.on_sent(sent);
            self.pacer.on_sent(DATAGRAM);
            let (wait, heard_at) = match bottleneck.pass(now) {
                Ok(passed) => passed,
                Err(why) => {
                    self.fates.push_back((number, why));
                    continue;
                }
            };
            self.acks.push_back((heard_at, number));
            if counting {
                self.delivered += DATAGRAM;
                self.waited = self.waited + wait;
            }
        }
    }
}

/// The number of the packet whose frame this is.
fn number_of(said: SentFrame) -> Option<u64> {
    match said {
        SentFrame::Data(data) => Some(data.offset),
        _ => None,
    }
}

/// How a sender that hides random losses classifies its losses, and the delivered share of the
/// bottleneck's rate in hundredths, without the first half of the run. `beside`: a NewReno flow,
/// which hides nothing, started first.
pub(crate) fn classify_losses(
    kind: CongestionKind,
    course: PathModel,
    beside: bool,
    seconds: u64,
) -> (ClassificationCounts, u64) {
    let mut bottleneck = ModelBottleneck::new(course);
    let mut sender = ModelSender::new(kind);
    sender.recovery.classify_losses(Time::ZERO, true);
    let mut other = beside.then(|| ModelSender::new(CongestionKind::NewReno));
    let (mut now, end) = (Time::ZERO, Time::ZERO + Span::from_secs(seconds));
    let half = Time::ZERO + Span::from_secs(seconds).divided(2);
    let begins = Time::ZERO + Span::from_secs(if beside { 5 } else { 0 });
    while now < end {
        if now >= begins {
            sender.receive_acks(now, &[]);
            sender.send_packets(now, &mut bottleneck, now >= half);
        }
        if let Some(other) = &mut other {
            other.receive_acks(now, &[]);
            other.send_packets(now, &mut bottleneck, false);
        }
        now += STEP;
    }
    let could = course.bytes_per_s * seconds / 2;
    (sender.verdicts, sender.delivered * 100 / could)
}

/// Runs groups of senders, coupled within a group, each over one of `courses`, for `seconds`.
fn run_groups(
    courses: &[PathModel],
    groups: &[(CongestionKind, &[usize])],
    seconds: u64,
) -> Vec<Vec<ModelSender>> {
    let mut bottlenecks: Vec<_> = courses.iter().copied().map(ModelBottleneck::new).collect();
    let mut senders: Vec<Vec<ModelSender>> = groups
        .iter()
        .map(|(kind, paths)| paths.iter().map(|_| ModelSender::new(*kind)).collect())
        .collect();
    let (mut now, mut turn) = (Time::ZERO, 0);
    let end = Time::ZERO + Span::from_secs(seconds);
    let half = Time::ZERO + Span::from_secs(seconds).divided(2);
    while now < end {
        for n in 0..groups.len() {
            // The order of the groups changes, so that none is always first at the queue.
            let g = (n + turn) % groups.len();
            let siblings: Vec<SiblingPath> = senders[g].iter().map(ModelSender::sibling).collect();
            for (sender, path) in senders[g].iter_mut().zip(groups[g].1) {
                sender.receive_acks(now, &siblings);
                sender.send_packets(now, &mut bottlenecks[*path], now >= half);
            }
        }
        now += STEP;
        turn += 1;
    }
    senders
}

/// One sender over one path.
pub(super) fn run(kind: CongestionKind, course: PathModel, seconds: u64) -> ControllerResult {
    let senders = run_groups(&[course], &[(kind, &[0])], seconds);
    let sender = &senders[0][0];
    let could = course.bytes_per_s * seconds / 2;
    ControllerResult {
        used: sender.delivered * 100 / could,
        wait_ms: sender.waited.as_millis() / (sender.delivered / DATAGRAM).max(1),
    }
}

/// Bytes per second of each group.
pub(super) fn share(
    courses: &[PathModel],
    groups: &[(CongestionKind, &[usize])],
    seconds: u64,
) -> Vec<u64> {
    let senders = run_groups(courses, groups, seconds);
    let rate =
        |group: &Vec<ModelSender>| group.iter().map(|s| s.delivered).sum::<u64>() * 2 / seconds;
    senders.iter().map(rate).collect()
}
