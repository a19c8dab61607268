//! Which unacknowledged packets count as lost: by later acknowledged packets, and by time.

use d2tp_time::{Span, Time};

use super::{
    LOST_KEPT_RTTS, PACKET_THRESHOLD, PERSISTENT_CONGESTION_PTOS, Recovery, RecoveryOutcome,
};
use crate::loss_classifier::LossKind;
use crate::rtt::GRANULARITY;
use crate::sent_packet::{PacketState, SentFrame};

impl Recovery {
    pub(super) fn skipped_within(&self, low: u64, high: u64) -> Option<u64> {
        let at = self.skipped.partition_point(|n| *n < low);
        self.skipped.get(at).copied().filter(|n| *n <= high)
    }

    /// Declares packets lost that are too old, and sets the timer for those that soon will be.
    pub(super) fn detect(
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
        let mut newest_lost: Option<Time> = None;
        // When the first of the lost packets was sent between which none arrived, and how long they went on at most.
        let mut all_lost_from: Option<Time> = None;
        let mut all_lost_for = Span::ZERO;
        let mut fates = Vec::new();
        let lost_before = self.lost.len();
        let end = largest.min(self.next_number());
        while self.first_open < end {
            let number = self.first_open;
            let sent = &mut self.sent[(number - self.base) as usize];
            if sent.state != PacketState::Outstanding {
                if sent.state == PacketState::Done && sent.eliciting {
                    all_lost_from = None;
                }
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
            if sent.mtu_probe || sent.at < self.answered_again_at {
                outcome.mtu_lost |= sent.mtu_probe;
                sent.hidden = true;
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
            newest_lost = Some(newest_lost.map_or(sent.at, |t| t.max(sent.at)));
            let from = *all_lost_from.get_or_insert(sent.at);
            all_lost_for = all_lost_for.max(sent.at.since(from));
        }
        if let Some(newest) = newest_lost {
            self.note_recovery(now, newest);
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
                outcome.reduced_for = Some(newest);
                if let Some(classifier) = &mut self.classifier {
                    let leaves = classifier.reduced_window(window, self.rtt.min());
                    if let Some(least) = leaves.filter(|_| self.hides) {
                        self.controller.raise_reduced_window(least);
                        // What may be no congestion is no reason for others.
                        outcome.reduced_for = None;
                    }
                    classifier.on_response(now);
                }
            }
            self.episode_lost += u64::from(outcome.lost_packets);
            let span = self
                .return_rtt()
                .probe_timeout(ack_delay_max)
                .times(PERSISTENT_CONGESTION_PTOS);
            if self.rtt.is_measured() && all_lost_for > span {
                self.controller.on_persistent_congestion();
            }
        }
    }

    /// Begins a recovery if a packet was lost that was sent after the last one began. Once enough of them passed without
    /// reordering, its tolerance is as at first (RFC 8985 §6.2, step 4).
    fn note_recovery(&mut self, now: Time, newest_lost: Time) {
        if newest_lost <= self.recovery_at {
            return;
        }
        self.recovery_at = now;
        match self.reorder_persists.checked_sub(1) {
            Some(left) => self.reorder_persists = left,
            None => (self.packet_threshold, self.reorder_eighths) = (PACKET_THRESHOLD, 1),
        }
    }

    /// Whether the losses that were just detected are hidden from the controller.
    pub(super) fn is_random(&mut self, now: Time, sent_at: Time, datagram: u16) -> bool {
        let rtt_min = self.rtt.min();
        let window = self.controller.window() / u64::from(datagram.max(1));
        let classifier = self.classifier.as_mut();
        let kind = classifier.map(|classifier| classifier.classify(now, sent_at, rtt_min, window));
        self.hides && kind == Some(LossKind::Random)
    }

    pub(super) fn prune(&mut self, now: Time) {
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
}
