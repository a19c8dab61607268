//! Loss recovery of a path: unacknowledged packets, and which of them count as lost (RFC 9002, with
//! RACK's tolerance of reordering, RFC 8985).
//!
//! ```text
//!  sent ──▶ Outstanding ──ACK──▶ Done
//!               │ older than the largest acknowledged by the reordering window
//!               ▼
//!             Lost ──late ACK──▶ Done, and the response is undone
//! ```
//!
//! Packet numbers are skipped at random: a peer that acknowledges a skipped one acknowledges
//! packets that it did not receive (R-ACK-4). The cost of an ACK is bounded, whatever it
//! acknowledges: by its new information, the reordering that is still possible, and its ranges,
//! which are found by `first_open` and `lost`.
//!
//! Frames are not kept, only their descriptions ([`SentFrame`]): after a loss their owners send
//! frames with the current state.

use core::ops::Range;
use std::collections::VecDeque;

use d2tp_time::{Span, Time};
use d2tp_wire::{AckRanges, PathId};

use crate::careful_resume_state::{CarefulResume, ValidationStep};
use crate::congestion::{AckEvent, Controller, Siblings};
use crate::delivery_rate::DeliveryRateEstimator;
use crate::event::PeerFault;
use crate::loss_classifier::{LossClassifier, LossKind};
use crate::rtt::{GRANULARITY, RttEstimator};
use crate::sent_packet::{PacketState, SentFrame, SentPacket};

/// The longest interval between probes, even if answers took longer: an answer that arrived after
/// minutes says little about the next one.
pub(crate) const PROBE_INTERVAL_SLOW_MAX: Span = Span::from_secs(20); // a guess
/// An answer that took this many times the shortest round trip is late; probes that are sent during
/// an outage get no answer at all. Packets that reach the peer late need not be repeated.
const LATE: u64 = 4; // a guess
/// The interval between probes doubles with each silence that was no outage, up to 6 s.
const LATE_HOLES_MAX: u8 = 7;
/// RFC 9002 §6.1.1: packets by which an acknowledged one must be newer for a packet to count as lost.
const PACKET_THRESHOLD: u64 = 3;
/// The highest packet threshold on a path with reordering.
const PACKET_THRESHOLD_MAX: u64 = 256;
/// RFC 9002 §7.6.1: probe timeouts without an ACK that count as persistent congestion.
const PERSISTENT_CONGESTION_PTOS: u64 = 3;
/// How long lost packets are remembered to detect spurious losses, in round trips.
const LOST_KEPT_RTTS: u64 = 2;

/// The most unacknowledged packets of a path: several windows of the fastest supported path.
const SENT_MAX: usize = 64 * 1024;

/// R-ACK-4: the number of packets between two skipped numbers: the minimum, and the random range
/// beyond it. A guess: rare enough that the gaps cost a receiver one early ACK and one range in
/// hundreds of packets.
const SKIP_AFTER_MIN: u64 = 16;
const SKIP_AFTER_SPREAD: u64 = 480;
/// The most skipped numbers that are remembered. When more are in flight, the oldest are forgotten.
const SKIPPED_MAX: usize = 512;
/// The most entries of `lost` that arrived after all, before the list is cleaned up.
const LOST_STALE_MAX: usize = 32;

/// How a path's window is restored when the path answers again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WindowRestore {
    /// The whole window: only the link was away.
    Full,
    /// Half of the window: congestion may have caused the silence.
    Half,
    /// The minimum window, as after persistent congestion (RFC 9002 §7.6): outages are not
    /// distinguished from congestion.
    Reset,
}

/// The result of an ACK or a timeout.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RecoveryOutcome {
    /// Whether anything was newly acknowledged.
    pub(crate) progress: bool,
    /// The round trip that the ACK measured, with the peer's ACK delay subtracted.
    pub(crate) rtt: Option<Span>,
    /// The size of an MTU probe that arrived.
    pub(crate) mtu_acked: Option<u16>,
    /// Whether an MTU probe was lost.
    pub(crate) mtu_lost: bool,
    /// The size of the largest ordinary packet acknowledged.
    pub(crate) acked_size: u16,
    /// The size of the largest ordinary packet lost.
    pub(crate) lost_size: u16,
    pub(crate) lost_packets: u32,
}

/// Sent packets of one path.
#[derive(Debug)]
pub(crate) struct Recovery {
    sent: VecDeque<SentPacket>,
    base: u64,
    /// The number below which no packet is outstanding.
    first_open: u64,
    /// Numbers of lost packets that are still remembered, ascending. `lost_stale` of them arrived
    /// after all.
    lost: VecDeque<u64>,
    lost_stale: usize,
    /// Skipped numbers, ascending.
    skipped: VecDeque<u64>,
    /// The next number to skip; `None` before the first packet.
    skip_at: Option<u64>,
    largest_acked: Option<u64>,
    pub(crate) in_flight: u64,
    loss_at: Time,
    pub(crate) probes: u32,
    last_eliciting_at: Time,
    /// When the last outage ended.
    answered_again_at: Time,
    /// Numbers of the probes sent in the last outage, which should be lost; empty once one of them
    /// arrived.
    vain: Range<u64>,
    /// Consecutive silences that were no outages: the probes sent in them arrived and were answered
    /// late.
    pub(crate) late_blackouts: u8,
    was_late: bool,
    outstanding_eliciting: u64,
    packet_threshold: u64,
    reorder_eighths: u64,
    episode_lost: u64,
    episode_spurious: u64,
    /// The round trip with both directions on this path.
    pub(crate) rtt: RttEstimator,
    /// Whether the path leads over a line so slow that its datagrams are small.
    pub(crate) is_narrow: bool,
    /// The round trip with ACKs on any path; `None` while all ACKs arrived on this path.
    elsewhere: Option<Box<RttEstimator>>,
    pub(crate) controller: Box<dyn Controller>,
    /// The resumed window of an earlier path, while it is not validated.
    careful: Option<Box<CarefulResume>>,
    /// Delivery snapshots in step with `sent`, for a controller that wants rate samples.
    delivery: Option<Box<DeliveryRateEstimator>>,
    /// The classification of losses, if it is enabled.
    classifier: Option<Box<LossClassifier>>,
    /// Whether random losses are now hidden from the controller.
    hides: bool,
    /// Counters for reports.
    pub(crate) lost_total: u64,
    pub(crate) spurious_total: u64,
    pub(crate) random_total: u64,
}

impl Recovery {
    pub(crate) fn new(rtt_initial: Span, controller: Box<dyn Controller>) -> Self {
        let delivery = controller
            .wants_samples()
            .then(|| Box::new(DeliveryRateEstimator::new()));
        Recovery {
            sent: VecDeque::new(),
            base: 0,
            first_open: 0,
            lost: VecDeque::new(),
            lost_stale: 0,
            skipped: VecDeque::new(),
            skip_at: None,
            largest_acked: None,
            in_flight: 0,
            loss_at: Time::NEVER,
            probes: 0,
            last_eliciting_at: Time::ZERO,
            answered_again_at: Time::ZERO,
            vain: 0..0,
            late_blackouts: 0,
            was_late: false,
            outstanding_eliciting: 0,
            packet_threshold: PACKET_THRESHOLD,
            reorder_eighths: 1,
            episode_lost: 0,
            episode_spurious: 0,
            rtt: RttEstimator::new(rtt_initial),
            is_narrow: false,
            elsewhere: None,
            controller,
            careful: None,
            delivery,
            classifier: None,
            hides: false,
            lost_total: 0,
            spurious_total: 0,
            random_total: 0,
        }
    }

    /// Enables the classification of losses. `hides`: random losses are hidden from the controller.
    pub(crate) fn classify_losses(&mut self, now: Time, hides: bool) {
        let classifier = self
            .classifier
            .get_or_insert_with(|| LossClassifier::new(now).into());
        if hides && !self.hides && self.lost_total > 0 && !classifier.settled {
            classifier.settled = true;
            self.controller.on_random_loss_only();
        }
        self.hides = hides;
    }

    /// Forgets the measurements of the queue, because the path has another route now.
    pub(crate) fn forget_queue(&mut self, now: Time) {
        if let Some(classifier) = &mut self.classifier {
            **classifier = LossClassifier::new(now);
        }
    }

    /// The number of the next packet.
    pub(crate) fn next_number(&self) -> u64 {
        self.base + self.sent.len() as u64
    }

    /// Records that there is nothing more to send although the path has room.
    pub(crate) fn on_nothing_to_send(&mut self) {
        if let Some(delivery) = &mut self.delivery {
            delivery.on_nothing_to_send(self.in_flight);
        }
    }

    /// Whether [`Recovery::skip`] is to be called before the next packet.
    #[inline]
    pub(crate) fn is_skip_due(&self) -> bool {
        self.skip_at.is_none_or(|at| at <= self.next_number())
    }

    /// R-ACK-4: skips the next number if that is due, and chooses the following one by `draw`,
    /// which no peer can guess.
    pub(crate) fn skip(&mut self, draw: u64) {
        if self.skip_at.is_some() {
            if self.skipped.len() == SKIPPED_MAX {
                self.skipped.pop_front();
            }
            self.skipped.push_back(self.next_number());
            let mut nothing = SentPacket::new(Time::ZERO);
            nothing.state = PacketState::Done;
            if let Some(delivery) = &mut self.delivery {
                delivery.on_skipped();
            }
            self.sent.push_back(nothing);
        }
        let after = SKIP_AFTER_MIN + draw % SKIP_AFTER_SPREAD;
        self.skip_at = Some(self.next_number() + after);
    }

    /// Forgets the oldest packet.
    fn pop_oldest(&mut self) -> Option<SentPacket> {
        let oldest = self.sent.pop_front()?;
        if let Some(delivery) = &mut self.delivery {
            delivery.on_forgotten();
        }
        if self.lost.front() == Some(&self.base) {
            self.lost.pop_front();
            self.lost_stale -= usize::from(oldest.state == PacketState::Done);
        }
        self.base += 1;
        self.first_open = self.first_open.max(self.base);
        Some(oldest)
    }

    /// R-ACK-3: limits the unacknowledged packets of a peer that never answers: if there are too
    /// many, the oldest counts as lost, and `each` gets the frames that it carried.
    pub(crate) fn give_up_oldest(&mut self, mut each: impl FnMut(SentFrame, bool)) {
        while self.sent.len() > SENT_MAX
            && let Some(oldest) = self.pop_oldest()
        {
            if oldest.state != PacketState::Outstanding {
                continue;
            }
            if oldest.eliciting {
                self.in_flight -= u64::from(oldest.bytes);
                self.outstanding_eliciting -= 1;
            }
            for said in oldest.frames() {
                each(said, false);
            }
        }
    }

    pub(crate) fn on_sent(&mut self, mut sent: SentPacket) {
        if !sent.eliciting {
            // The peer will not acknowledge it, and none of its frames is repeated.
            sent.state = PacketState::Done;
            sent.more = Vec::new();
            while self
                .sent
                .front()
                .is_some_and(|s| s.state == PacketState::Done)
            {
                self.pop_oldest();
            }
        }
        if sent.eliciting {
            self.in_flight += u64::from(sent.bytes);
            self.last_eliciting_at = sent.at;
            self.outstanding_eliciting += 1;
        }
        if let Some(delivery) = &mut self.delivery {
            delivery.on_sent(sent.at, u64::from(sent.bytes), self.in_flight);
        }
        self.sent.push_back(sent);
    }

    /// The number of bytes that the window still allows.
    pub(crate) fn room(&self) -> u64 {
        self.controller.window().saturating_sub(self.in_flight)
    }

    /// Whether any packet is unacknowledged.
    pub(crate) fn is_waiting(&self) -> bool {
        self.outstanding_eliciting > 0
    }

    /// The round trip with ACKs on any path, which timers and the pacer use.
    pub(crate) fn return_rtt(&self) -> &RttEstimator {
        self.elsewhere.as_deref().unwrap_or(&self.rtt)
    }

    /// R-ACK-6: handles a round trip sample. If its ACK arrived on another path, it does not count
    /// as this path's round trip.
    fn on_sample(&mut self, on_own_path: bool, sample: Span, delay: Span) -> Option<Span> {
        let own = on_own_path.then(|| self.rtt.on_sample(sample, delay));
        if !on_own_path && self.elsewhere.is_none() {
            self.elsewhere = Some(Box::new(self.rtt.clone()));
        }
        if let Some(elsewhere) = &mut self.elsewhere {
            elsewhere.on_sample(sample, delay);
        }
        own
    }

    /// Handles an ACK that arrived on this path itself (`on_own_path`) or on another one. Calls
    /// `each` with frames that arrived (`true`) or count as lost (`false`).
    pub(crate) fn on_ack(
        &mut self,
        now: Time,
        path: PathId,
        ranges: AckRanges<'_>,
        on_own_path: bool,
        delay: Span,
        ack_delay_max: Span,
        siblings: Siblings<'_>,
        mut each: impl FnMut(SentFrame, bool),
    ) -> Result<RecoveryOutcome, PeerFault> {
        let next = self.next_number();
        // R-ACK-2: a packet that was never sent cannot have arrived.
        if ranges.largest >= next {
            return Err(PeerFault::BadAck {
                path,
                acked: ranges.largest,
                sent: next,
            });
        }
        let mut outcome = RecoveryOutcome::default();
        let mut acked_bytes = 0u64;
        let mut acked_packets = 0;
        let mut newest: Option<(Time, bool)> = None;
        let mut sample = None;
        for (low, high) in ranges.iter() {
            // R-ACK-4: a skipped number cannot have arrived.
            if let Some(number) = self.skipped_within(low, high) {
                return Err(PeerFault::SkippedAck { path, number });
            }
            if low < self.vain.end && high >= self.vain.start {
                self.vain = 0..0;
                self.was_late = true;
                self.late_blackouts = (self.late_blackouts + 1).min(LATE_HOLES_MAX);
            }
            if high < self.base {
                continue;
            }
            // R-ACK-5: below `first_open` only lost packets are of interest; they are looked up,
            // not searched.
            let mut at = self.lost.partition_point(|n| *n < low);
            while let Some(number) = self.lost.get(at).copied().filter(|n| *n <= high) {
                at += 1;
                let sent = &mut self.sent[(number - self.base) as usize];
                if sent.state == PacketState::Done {
                    continue;
                }
                self.spurious_total += 1;
                self.episode_spurious += u64::from(!sent.hidden);
                let distance = self.largest_acked.unwrap_or(0).saturating_sub(number) + 1;
                self.packet_threshold = self
                    .packet_threshold
                    .max(distance)
                    .min(PACKET_THRESHOLD_MAX);
                self.reorder_eighths = (self.reorder_eighths + 1).min(8);
                self.lost_stale += 1;
                sent.state = PacketState::Done;
                outcome.progress = true;
                if let Some(data) = sent.data.take() {
                    each(SentFrame::Data(data), true);
                }
                for said in std::mem::take(&mut sent.more) {
                    each(said, true);
                }
            }
            for number in low.max(self.first_open)..=high {
                let index = (number - self.base) as usize;
                let sent = &mut self.sent[index];
                match sent.state {
                    PacketState::Done | PacketState::Lost => continue,
                    PacketState::Outstanding => {
                        if sent.eliciting {
                            self.in_flight -= u64::from(sent.bytes);
                            self.outstanding_eliciting -= 1;
                            acked_bytes += u64::from(sent.bytes);
                            acked_packets += 1;
                            if let Some(delivery) = &mut self.delivery {
                                delivery.on_arrived(now, index, sent.at, u64::from(sent.bytes));
                            }
                            if newest.is_none_or(|(at, _)| sent.at >= at) {
                                newest = Some((sent.at, sent.app_limited));
                            }
                        }
                        if sent.mtu_probe {
                            outcome.mtu_acked = Some(sent.bytes);
                        } else {
                            outcome.acked_size = outcome.acked_size.max(sent.bytes);
                        }
                        if number == ranges.largest && sent.eliciting {
                            sample = Some(sent.at);
                        }
                    }
                }
                sent.state = PacketState::Done;
                outcome.progress = true;
                if let Some(data) = sent.data.take() {
                    each(SentFrame::Data(data), true);
                }
                for said in std::mem::take(&mut sent.more) {
                    each(said, true);
                }
            }
        }
        if self.lost_stale > LOST_STALE_MAX && self.lost_stale * 2 > self.lost.len() {
            let (sent, base) = (&self.sent, self.base);
            self.lost
                .retain(|n| sent[(n - base) as usize].state == PacketState::Lost);
            self.lost_stale = 0;
        }
        if let Some(sent_at) = sample {
            let (sample, delay) = (now.since(sent_at), delay.min(ack_delay_max));
            outcome.rtt = self.on_sample(on_own_path, sample, delay);
            if let Some(classifier) = &mut self.classifier {
                let own = sample.saturating_sub(delay);
                match on_own_path {
                    true => classifier.on_round_trip(now, sent_at, own, self.rtt.min()),
                    false => classifier.on_indirect_round_trip(now, sent_at, own),
                }
            }
        }
        if let Some(classifier) = &mut self.classifier {
            classifier.on_arrived(acked_packets);
        }
        let fresh = outcome.rtt.is_some();
        self.largest_acked = Some(
            self.largest_acked
                .map_or(ranges.largest, |l| l.max(ranges.largest)),
        );
        if self.episode_lost > 0 && self.episode_spurious >= self.episode_lost {
            self.controller.on_spurious();
            self.episode_lost = 0;
            self.episode_spurious = 0;
        }
        if let Some(careful) = &mut self.careful {
            careful.on_arrived(acked_bytes);
        }
        self.detect(now, ack_delay_max, &mut outcome, &mut each);
        self.doubt(ranges.largest, acked_bytes);
        if let Some((sent_at, app_limited)) = newest {
            self.probes = 0;
            let rtt_min = self.rtt.min();
            let sample = self.delivery.as_mut().and_then(|d| d.sample(rtt_min));
            self.controller.on_ack(
                AckEvent {
                    now,
                    bytes: acked_bytes,
                    sent_at,
                    smoothed: self.return_rtt().smoothed(),
                    rtt: self.rtt.latest(),
                    fresh,
                    app_limited,
                    largest: ranges.largest,
                    next_number: next,
                    in_flight: self.in_flight,
                    sample,
                },
                siblings,
            );
        }
        self.prune(now);
        // An ACK beyond a skipped number has shown that the peer does not acknowledge it.
        while self
            .skipped
            .front()
            .is_some_and(|n| *n < self.base && Some(*n) <= self.largest_acked)
        {
            self.skipped.pop_front();
        }
        Ok(outcome)
    }

    /// Continues with a window that was measured on an earlier path, and slow start up to
    /// `threshold`.
    pub(crate) fn resume(&mut self, window: u64, threshold: u64) {
        self.controller.resume(window, threshold);
        let careful = CarefulResume::new(self.next_number(), self.in_flight, threshold);
        self.careful = Some(careful.into());
    }

    /// Whether the window was resumed and is not validated yet.
    pub(crate) fn is_careful(&self) -> bool {
        self.careful.is_some()
    }

    fn doubt(&mut self, largest: u64, acked_bytes: u64) {
        let next = self.next_number();
        let Some(careful) = &mut self.careful else {
            return;
        };
        match careful.on_ack(largest, next) {
            ValidationStep::Unchanged => {}
            ValidationStep::Validating { threshold } => {
                let used = self.in_flight + acked_bytes;
                if used < self.controller.window() {
                    self.controller.resume(used, threshold);
                }
            }
            ValidationStep::Validated => self.careful = None,
        }
    }

    fn skipped_within(&self, low: u64, high: u64) -> Option<u64> {
        let at = self.skipped.partition_point(|n| *n < low);
        self.skipped.get(at).copied().filter(|n| *n <= high)
    }

    /// Declares packets lost that are too old, and sets the timer for those that soon will be.
    fn detect(
        &mut self,
        now: Time,
        ack_delay_max: Span,
        outcome: &mut RecoveryOutcome,
        each: &mut impl FnMut(SentFrame, bool),
    ) {
        self.loss_at = Time::NEVER;
        let Some(largest) = self.largest_acked else {
            return;
        };
        let rtt = self.return_rtt().smoothed().max(self.return_rtt().latest());
        let tolerance = (rtt + rtt.scaled(self.reorder_eighths, 8)).max(GRANULARITY);
        let mut oldest_lost: Option<Time> = None;
        let mut newest_lost: Option<Time> = None;
        let mut fates = Vec::new();
        let lost_before = self.lost.len();
        let end = largest.min(self.next_number());
        while self.first_open < end {
            let number = self.first_open;
            let sent = &mut self.sent[(number - self.base) as usize];
            if sent.state != PacketState::Outstanding {
                self.first_open += 1;
                continue;
            }
            let late = sent.at + tolerance <= now;
            let overtaken = largest - number >= self.packet_threshold;
            if !late && !overtaken {
                // Later packets were sent later and have been overtaken by fewer.
                self.loss_at = sent.at + tolerance;
                break;
            }
            self.first_open += 1;
            self.lost.push_back(number);
            sent.state = PacketState::Lost;
            for said in sent.frames() {
                each(said, false);
            }
            if !sent.eliciting {
                continue;
            }
            self.in_flight -= u64::from(sent.bytes);
            self.outstanding_eliciting -= 1;
            self.lost_total += 1;
            if sent.mtu_probe {
                outcome.mtu_lost = true;
                continue;
            }
            if sent.at < self.answered_again_at {
                continue;
            }
            if let Some(delivery) = &mut self.delivery {
                fates.push(delivery.on_lost((number - self.base) as usize, u64::from(sent.bytes)));
            }
            if let Some(classifier) = &mut self.classifier {
                classifier.on_lost(number, sent.at);
            }
            outcome.lost_packets += 1;
            outcome.lost_size = outcome.lost_size.max(sent.bytes);
            oldest_lost = Some(oldest_lost.map_or(sent.at, |t| t.min(sent.at)));
            newest_lost = Some(newest_lost.map_or(sent.at, |t| t.max(sent.at)));
        }
        if let (Some(oldest), Some(newest)) = (oldest_lost, newest_lost) {
            if self.is_random(now, newest, outcome.lost_size) {
                // R-MIRROR-1
                self.random_total += u64::from(outcome.lost_packets);
                for number in self.lost.range(lost_before..) {
                    self.sent[(number - self.base) as usize].hidden = true;
                }
                return;
            }
            for fate in fates {
                self.controller.on_packet_lost(fate);
            }
            let window = self.controller.window();
            self.controller.on_loss(now, newest);
            if let Some(careful) = self.careful.take() {
                self.controller.retreat(careful.retreat());
            }
            if self.controller.window() < window {
                self.episode_lost = 0;
                self.episode_spurious = 0;
                if let Some(classifier) = &mut self.classifier {
                    let leaves = classifier.reduced_window(window, self.rtt.min());
                    if let Some(least) = leaves.filter(|_| self.hides) {
                        self.controller.raise_reduced_window(least);
                    }
                    classifier.on_response(now);
                }
            }
            self.episode_lost += u64::from(outcome.lost_packets);
            let span = self
                .return_rtt()
                .probe_timeout(ack_delay_max)
                .times(PERSISTENT_CONGESTION_PTOS);
            if self.rtt.is_measured() && newest.since(oldest) > span {
                self.controller.on_persistent_congestion();
            }
        }
    }

    /// Whether the losses that were just detected are hidden from the controller.
    fn is_random(&mut self, now: Time, sent_at: Time, datagram: u16) -> bool {
        let rtt_min = self.rtt.min();
        let window = self.controller.window() / u64::from(datagram.max(1));
        let classifier = self.classifier.as_mut();
        let kind = classifier.map(|classifier| classifier.classify(now, sent_at, rtt_min, window));
        self.hides && kind == Some(LossKind::Random)
    }

    fn prune(&mut self, now: Time) {
        let smoothed = self.return_rtt().smoothed();
        let keep = smoothed.times(LOST_KEPT_RTTS);
        while let Some(front) = self.sent.front() {
            match front.state {
                PacketState::Outstanding => break,
                PacketState::Lost if now.since(front.at) < keep + smoothed => break,
                PacketState::Lost | PacketState::Done => {
                    self.pop_oldest();
                }
            }
        }
    }

    /// Handles the loss timer.
    pub(crate) fn on_loss_timeout(
        &mut self,
        now: Time,
        ack_delay_max: Span,
        mut each: impl FnMut(SentFrame, bool),
    ) -> RecoveryOutcome {
        let mut outcome = RecoveryOutcome::default();
        self.detect(now, ack_delay_max, &mut outcome, &mut each);
        outcome
    }

    /// When the loss timer is due.
    pub(crate) fn loss_at(&self) -> Time {
        self.loss_at
    }

    /// Handles the probe timer.
    pub(crate) fn on_probe_timeout(&mut self, now: Time) {
        self.probes += 1;
        // Whether or not the probe can be sent, the next one is due a full interval from now.
        self.last_eliciting_at = now;
    }

    /// Whether any packet sent on the path was ever acknowledged.
    pub(crate) fn ever_answered(&self) -> bool {
        self.largest_acked.is_some()
    }

    /// When to send a probe, if nothing arrives before.
    pub(crate) fn probe_at(&self, ack_delay_max: Span, interval_max: Span) -> Time {
        if !self.is_waiting() {
            return Time::NEVER;
        }
        let base = self.return_rtt().probe_timeout(ack_delay_max);
        // A single answer after a long stall must not delay the next probe as long. Only a path
        // whose answers are all slow is probed so slowly.
        let slow = self
            .return_rtt()
            .min()
            .times(2)
            .min(PROBE_INTERVAL_SLOW_MAX);
        let mut most = interval_max.max(slow);
        if self.is_narrow {
            // R-SERIAL-3: the window alone takes longer than that, and a probe takes place in it.
            most = most.max(base);
        }
        let span = base.times(1 << self.probes.min(10)).min(most);
        self.last_eliciting_at + span
    }

    /// When to send a probe after `pause`, whatever the number of probes before.
    pub(crate) fn probe_after(&self, pause: Span) -> Time {
        if !self.is_waiting() {
            return Time::NEVER;
        }
        self.last_eliciting_at + pause
    }

    /// Handles the end of an outage: packets sent during it say nothing about congestion.
    pub(crate) fn on_blackout(&mut self, now: Time, since: Time, comeback: WindowRestore) {
        self.answered_again_at = now;
        if !std::mem::take(&mut self.was_late) {
            self.late_blackouts = self.late_blackouts.saturating_sub(1);
        }
        let late = self.return_rtt().min().times(LATE);
        let first = self.sent.partition_point(|s| s.at <= since) as u64;
        let end = self.sent.partition_point(|s| s.at + late < now) as u64;
        self.vain = self.base + first..self.base + end.max(first);
        let hole = now.since(since);
        match comeback {
            WindowRestore::Full => self.controller.on_blackout(hole, false),
            WindowRestore::Half => self.controller.on_blackout(hole, true),
            WindowRestore::Reset => self.controller.on_persistent_congestion(),
        }
    }

    /// When an ack-eliciting packet was last sent.
    pub(crate) fn last_eliciting_at(&self) -> Time {
        self.last_eliciting_at
    }

    /// The oldest unacknowledged packet, whose data a probe should repeat.
    pub(crate) fn oldest(&self) -> Option<&SentPacket> {
        self.sent
            .range((self.first_open - self.base) as usize..)
            .find(|s| s.state == PacketState::Outstanding && s.eliciting)
    }

    /// The first unacknowledged packet from `number` on that carries original data and is `wanted`.
    pub(crate) fn next_original(
        &self,
        number: u64,
        wanted: impl Fn(&SentPacket) -> bool,
    ) -> Option<(u64, &SentPacket)> {
        let is_original =
            |s: &SentPacket| s.state == PacketState::Outstanding && s.eliciting && s.data.is_some();
        let first = number.max(self.first_open);
        if first >= self.next_number() {
            return None;
        }
        (first..)
            .zip(self.sent.range((first - self.base) as usize..))
            .find(|(_, s)| is_original(s) && wanted(s))
    }

    /// Records that bytes of a packet's data were sent again on another path.
    pub(crate) fn note_copied(&mut self, number: u64, bytes: u64) {
        if let Some(index) = number.checked_sub(self.base)
            && let Some(sent) = self.sent.get_mut(index as usize)
        {
            sent.copied = sent
                .copied
                .saturating_add(bytes.min(u64::from(u16::MAX)) as u16);
        }
    }

    /// Releases unused memory.
    pub(crate) fn shrink(&mut self) {
        self.sent.shrink_to_fit();
        self.lost.shrink_to_fit();
        self.skipped.shrink_to_fit();
    }

    /// Gives up all unacknowledged packets without a congestion response, because the path fell
    /// silent or was closed and its data must be sent on other paths. The packets are remembered,
    /// so that a late ACK still counts.
    pub(crate) fn abandon(&mut self, mut each: impl FnMut(SentFrame, bool)) {
        let first = (self.first_open - self.base) as usize;
        for (sent, number) in self.sent.range_mut(first..).zip(self.first_open..) {
            if sent.state == PacketState::Outstanding {
                sent.state = PacketState::Lost;
                self.lost.push_back(number);
                if sent.eliciting {
                    self.in_flight -= u64::from(sent.bytes);
                    self.outstanding_eliciting -= 1;
                }
                for said in sent.frames() {
                    each(said, false);
                }
            }
        }
        self.first_open = self.next_number();
        self.loss_at = Time::NEVER;
        self.episode_lost = 0;
        self.episode_spurious = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::{CongestionKind, controller};
    use crate::sent_packet::SentData;
    use d2tp_wire::FlowId;
    use d2tp_wire::{Frame, FrameIter, WireWriter};

    const MS: Span = Span::from_millis(1);

    fn at(ms: u64) -> Time {
        Time::ZERO + MS.times(ms)
    }

    struct RecoveryFixture {
        recovery: Recovery,
        arrived: Vec<u64>,
        lost: Vec<u64>,
    }

    impl RecoveryFixture {
        fn new() -> Self {
            let recovery = Recovery::new(MS.times(100), controller(CongestionKind::NewReno, 1_000));
            RecoveryFixture {
                recovery,
                arrived: vec![],
                lost: vec![],
            }
        }
        fn send(&mut self, now: Time) {
            let mut sent = SentPacket::new(now);
            sent.bytes = 1_000;
            sent.eliciting = true;
            let offset = self.recovery.next_number();
            sent.note(SentFrame::Data(SentData {
                flow: FlowId(0),
                offset,
                len: 1,
                fin: false,
            }));
            self.recovery.on_sent(sent);
        }
        fn ack(&mut self, now: Time, ranges: &[(u64, u64)]) -> Result<RecoveryOutcome, PeerFault> {
            self.ack_by(true, now, ranges)
        }
        /// Handles an ACK that arrived on the path itself, or on another one.
        fn ack_by(
            &mut self,
            on_own_path: bool,
            now: Time,
            ranges: &[(u64, u64)],
        ) -> Result<RecoveryOutcome, PeerFault> {
            let mut buf = [0; 100];
            let mut w = WireWriter::new(&mut buf);
            assert!(Frame::encode_ack(
                &mut w,
                PathId(0),
                0,
                ranges.iter().copied()
            ));
            let n = w.written();
            let Some(Ok(Frame::Ack { ranges, .. })) = FrameIter::new(&buf[..n]).next() else {
                panic!()
            };
            let RecoveryFixture {
                recovery,
                arrived,
                lost,
            } = self;
            recovery.on_ack(
                now,
                PathId(0),
                ranges,
                on_own_path,
                Span::ZERO,
                MS.times(20),
                &[],
                |said, ok| {
                    if let SentFrame::Data(d) = said {
                        if ok {
                            arrived.push(d.offset)
                        } else {
                            lost.push(d.offset)
                        }
                    }
                },
            )
        }
    }

    #[test]
    fn an_ack_that_came_another_way_moves_timers_and_not_the_round_trip() {
        // R-ACK-6
        let mut bed = RecoveryFixture::new();
        bed.send(at(0));
        bed.ack(at(50), &[(0, 0)]).unwrap();
        for n in 1..50 {
            bed.send(at(100 * n));
            let outcome = bed.ack_by(false, at(100 * n + 200), &[(0, n)]).unwrap();
            assert!(outcome.progress && outcome.rtt.is_none());
        }
        assert_eq!(bed.recovery.rtt.smoothed(), MS.times(50));
        assert!(bed.recovery.return_rtt().smoothed() > MS.times(190));
        bed.send(at(10_000));
        let probe_at = bed.recovery.probe_at(Span::ZERO, MS.times(2_000));
        assert!(
            probe_at > at(10_200),
            "asked before the answer can be there"
        );
        assert!(
            bed.ack_by(true, at(10_050), &[(0, 50)])
                .unwrap()
                .rtt
                .is_some()
        );
    }

    #[test]
    fn three_later_packets_make_one_lost() {
        let mut bed = RecoveryFixture::new();
        (0..5).for_each(|i| bed.send(at(i)));
        bed.ack(at(50), &[(1, 3)]).unwrap();
        assert_eq!(
            (bed.arrived.clone(), bed.lost.clone()),
            (vec![1, 2, 3], vec![0])
        );
        assert_eq!(bed.recovery.in_flight, 1_000);
    }

    #[test]
    fn a_late_packet_is_noticed_and_the_response_undone() {
        let mut bed = RecoveryFixture::new();
        (0..5).for_each(|i| bed.send(at(i)));
        let before = bed.recovery.controller.window();
        bed.ack(at(50), &[(1, 3)]).unwrap();
        assert!(bed.recovery.controller.window() < before);
        bed.ack(at(55), &[(0, 3)]).unwrap();
        assert!(bed.recovery.controller.window() >= before);
        assert!(bed.recovery.packet_threshold > PACKET_THRESHOLD);
    }

    #[test]
    fn time_makes_the_last_but_one_lost() {
        let mut bed = RecoveryFixture::new();
        bed.send(at(0));
        bed.send(at(0));
        bed.ack(at(40), &[(1, 1)]).unwrap();
        assert!(bed.lost.is_empty());
        let fires = bed.recovery.loss_at();
        assert_eq!(fires, at(45));
        let RecoveryFixture { recovery, lost, .. } = &mut bed;
        recovery.on_loss_timeout(fires, MS.times(20), |said, _| {
            if let SentFrame::Data(d) = said {
                lost.push(d.offset);
            }
        });
        assert_eq!(bed.lost, [0]);
    }

    #[test]
    fn one_answer_after_a_long_stall_does_not_make_the_next_question_wait() {
        let mut bed = RecoveryFixture::new();
        bed.send(at(0));
        bed.ack(at(40), &[(0, 0)]).unwrap();
        bed.send(at(100));
        bed.ack(at(17_100), &[(0, 1)]).unwrap();
        bed.send(at(20_000));
        let (delay, most) = (MS.times(20), MS.times(2_000));
        assert!(bed.recovery.probe_at(delay, most) <= at(22_000));
    }

    #[test]
    fn an_ack_of_what_was_never_sent_is_a_fault() {
        let mut bed = RecoveryFixture::new();
        bed.send(at(0));
        assert_eq!(
            bed.ack(at(9), &[(0, 1)]),
            Err(PeerFault::BadAck {
                path: PathId(0),
                acked: 1,
                sent: 1
            })
        );
    }

    #[test]
    fn an_abandoned_path_gives_back_everything_without_a_response() {
        let mut bed = RecoveryFixture::new();
        (0..4).for_each(|i| bed.send(at(i)));
        let window = bed.recovery.controller.window();
        let mut back = vec![];
        bed.recovery.abandon(|said, ok| back.push((said, ok)));
        assert_eq!(back.len(), 4);
        assert_eq!(
            (bed.recovery.in_flight, bed.recovery.controller.window()),
            (0, window)
        );
        assert_eq!(bed.recovery.probe_at(MS, MS), Time::NEVER);
    }

    #[test]
    fn a_number_left_out_is_neither_lost_nor_waited_for_and_its_ack_is_a_fault() {
        // R-ACK-4
        let mut bed = RecoveryFixture::new();
        bed.recovery.skip(0);
        let mut skipped = 0;
        for n in 0..40 {
            if bed.recovery.is_skip_due() {
                skipped = bed.recovery.next_number();
                bed.recovery.skip(9);
            }
            bed.send(at(n));
        }
        assert_eq!(skipped, SKIP_AFTER_MIN);
        let last = bed.recovery.next_number() - 1;
        assert_eq!(
            bed.ack(at(90), &[(skipped - 2, last)]),
            Err(PeerFault::SkippedAck {
                path: PathId(0),
                number: skipped
            })
        );
        bed.ack(at(90), &[(skipped + 1, last), (0, skipped - 1)])
            .unwrap();
        assert_eq!((bed.recovery.lost_total, bed.recovery.in_flight), (0, 0));
        assert!(!bed.arrived.contains(&skipped) && bed.lost.is_empty());
        assert!(
            bed.recovery.skipped.is_empty(),
            "it is not remembered for ever"
        );
    }

    #[test]
    fn an_ack_repeated_for_a_whole_window_costs_its_news_and_not_the_window() {
        // R-ACK-5
        let mut bed = RecoveryFixture::new();
        (0..20_000).for_each(|_| bed.send(at(0)));
        // The first packet is missing, so all packets of the window are still remembered.
        bed.ack(at(1_000), &[(1, 19_998)]).unwrap();
        assert!(bed.recovery.sent.len() >= 20_000);
        bed.ack(at(1_001), &[(1, 19_998)]).unwrap();
        // The number from which the next ACK begins to search, and the lost packets that it looks
        // up below.
        assert!(19_998 - bed.recovery.first_open <= PACKET_THRESHOLD_MAX);
        assert_eq!(bed.recovery.lost, [0]);
        bed.ack(at(1_002), &[(0, 19_999)]).unwrap();
        assert_eq!(bed.arrived.len(), 20_000);
        assert_eq!(bed.recovery.spurious_total, 1);
    }

    #[test]
    fn a_peer_that_never_acknowledges_does_not_fill_our_memory() {
        // R-ACK-3
        let mut bed = RecoveryFixture::new();
        for n in 0..100_000 {
            bed.recovery.on_sent(SentPacket::new(at(n)));
        }
        assert!(bed.recovery.sent.len() <= 10_000);
        let mut given_up = 0;
        for n in 0..2 * SENT_MAX as u64 {
            bed.send(at(n));
            bed.recovery
                .give_up_oldest(|_, arrived| given_up += u64::from(!arrived));
        }
        assert_eq!(bed.recovery.sent.len(), SENT_MAX);
        assert_eq!(given_up, SENT_MAX as u64);
        assert_eq!(bed.recovery.in_flight, SENT_MAX as u64 * 1_000);
    }
}
