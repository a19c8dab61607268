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

mod loss_detection;

use core::ops::Range;
use std::collections::VecDeque;

use d2tp_time::{Span, Time};
use d2tp_wire::{AckRanges, PathId};

use crate::careful_resume_state::{CarefulResume, ValidationStep};
use crate::congestion::{AckEvent, Controller, SiblingPaths};
use crate::delivery_rate::DeliveryRateEstimator;
use crate::event::PeerFault;
use crate::long_round_trip::LONG_ROUND_TRIP_MIN;
use crate::loss_classifier::LossClassifier;
use crate::rtt::RttEstimator;
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
/// RFC 8985 §6.2: the number of recoveries without reordering after which the tolerance of reordering is as at first.
const REORDER_PERSIST_RECOVERIES: u8 = 16;
/// RFC 9002 §7.6.1: probe timeouts without an ACK that count as persistent congestion.
const PERSISTENT_CONGESTION_PTOS: u64 = 3;
/// How long lost packets are remembered to detect spurious losses, in round trips.
const LOST_KEPT_RTTS: u64 = 2;

/// The most unacknowledged packets of a path: several windows of the fastest supported path.
pub(crate) const SENT_MAX: usize = 64 * 1024;
/// The most packets that hold only ACK and are remembered, because an older packet is unacknowledged, where no long round
/// trips are expected. // a guess: seconds of a fast upload
const ACK_ONLY_MAX: usize = 4 * 1024;

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
    /// When the newest lost packet was sent, if the window was reduced for it.
    pub(crate) reduced_for: Option<Time>,
}

/// Sent packets of one path.
#[derive(Debug)]
pub(crate) struct Recovery {
    sent: VecDeque<SentPacket>,
    /// The number of packets in `sent` that hold only ACK, or stand for skipped numbers.
    ack_only: usize,
    /// The most packets that hold only ACK and are remembered.
    ack_only_max: usize,
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
    /// The number of further recoveries for which the tolerance of reordering remains raised.
    reorder_persists: u8,
    /// When the last recovery began. The loss of a packet sent later begins the next one.
    recovery_at: Time,
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
    /// The number of packets declared lost so far, for reports.
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
            ack_only: 0,
            ack_only_max: match rtt_initial >= LONG_ROUND_TRIP_MIN {
                true => SENT_MAX,
                false => ACK_ONLY_MAX,
            },
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
            reorder_persists: 0,
            recovery_at: Time::ZERO,
            episode_lost: 0,
            episode_spurious: 0,
            rtt: RttEstimator::expecting(rtt_initial),
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
            // Packets are found by the time at which they were sent, which ascends.
            let at = self.sent.back().map_or(self.last_eliciting_at, |s| s.at);
            let mut nothing = SentPacket::new(at);
            nothing.state = PacketState::Done;
            if let Some(delivery) = &mut self.delivery {
                delivery.on_skipped();
            }
            self.sent.push_back(nothing);
            self.ack_only += 1;
        }
        let after = SKIP_AFTER_MIN + draw % SKIP_AFTER_SPREAD;
        self.skip_at = Some(self.next_number() + after);
    }

    /// Forgets the oldest packet.
    fn pop_oldest(&mut self) -> Option<SentPacket> {
        let oldest = self.sent.pop_front()?;
        self.ack_only -= usize::from(!oldest.eliciting);
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
        while (self.sent.len() > SENT_MAX || self.ack_only > self.ack_only_max)
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
            self.ack_only += 1;
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

    /// Handles that the newest probe of the datagram size never left this host: neither an answer to it nor its loss is
    /// waited for.
    pub(crate) fn retract_mtu_probe(&mut self) {
        let is_probe =
            |sent: &&mut SentPacket| sent.mtu_probe && sent.state == PacketState::Outstanding;
        if let Some(probe) = self.sent.iter_mut().rev().find(is_probe) {
            probe.state = PacketState::Done;
            self.in_flight -= u64::from(probe.bytes);
            self.outstanding_eliciting -= 1;
        }
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
        siblings: SiblingPaths<'_>,
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
                self.reorder_persists = REORDER_PERSIST_RECOVERIES;
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
        // R-LONG-2: where round trips are long, `interval_max` is some of them.
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
                sent.hidden = true;
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
mod tests;
