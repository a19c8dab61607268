//! Packets received on a path: which to acknowledge and when, and which are replays.

use d2tp_time::{Span, Time};
use d2tp_wire::{Frame, PathId, WireWriter};

use crate::config::ACK_RANGES_MAX;
use crate::ranges::RangeSet;
use crate::sent_packet::{SentFrame, SentPacket};

/// Packets received before one ACK must leave, until the sender asks for another rate.
const EVERY_DEFAULT: u32 = 2;
/// Packet numbers below the largest acknowledged one for which replays can still be detected.
const REORDER_KEPT: u64 = 1024;

/// Received packet numbers of one path.
#[derive(Debug)]
pub(crate) struct AckTracker {
    seen: RangeSet,
    floor: u64,
    largest_at: Time,
    unanswered: u32,
    every: u32,
    delay: Span,
    due: Time,
}

impl AckTracker {
    pub(crate) fn new(delay: Span) -> Self {
        AckTracker {
            seen: RangeSet::default(),
            floor: 0,
            largest_at: Time::ZERO,
            unanswered: 0,
            every: EVERY_DEFAULT,
            delay,
            due: Time::NEVER,
        }
    }

    /// The number after the largest one received.
    pub(crate) fn expected(&self) -> u64 {
        self.seen.last().map_or(0, |(_, end)| end)
    }

    /// R-SEAL-4: whether a packet number is a replay: it was received before, or is too old to
    /// tell.
    pub(crate) fn is_replay(&self, number: u64) -> bool {
        number < self.floor || self.seen.contains(number)
    }

    /// R-ACK-1: records a packet that was received and whose frames were handled.
    pub(crate) fn on_packet(&mut self, now: Time, number: u64, eliciting: bool) {
        let expected = self.expected();
        self.seen.insert(number, number + 1);
        if self.seen.len() > ACK_RANGES_MAX
            && let Some((_, end)) = self.seen.pop_first()
        {
            self.floor = self.floor.max(end);
        }
        if number >= expected {
            self.largest_at = now;
        }
        if !eliciting {
            return;
        }
        self.unanswered += 1;
        let in_order = number == expected;
        if !in_order || self.unanswered >= self.every {
            self.due = now;
        } else {
            self.due = self.due.min(now + self.delay);
        }
    }

    /// When an ACK must leave.
    pub(crate) fn due(&self) -> Time {
        self.due
    }
    /// Whether an ACK should be part of the next packet that leaves anyway.
    pub(crate) fn is_wanted(&self) -> bool {
        self.unanswered > 0
    }
    /// Applies the ACK frequency that the sender asks for.
    pub(crate) fn set_rate(&mut self, every: u32, delay: Span, delay_max: Span) {
        self.every = every.max(1);
        self.delay = delay.min(delay_max);
    }

    /// Ranges to acknowledge, largest first, both ends included.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + Clone + '_ {
        self.seen.iter().rev().map(|(start, end)| (start, end - 1))
    }
    pub(crate) fn delay_us(&self, now: Time) -> u64 {
        now.since(self.largest_at).as_micros()
    }
    /// How many packets the sender wants acknowledged by one ACK.
    pub(crate) fn every(&self) -> u32 {
        self.every
    }
    /// Writes an ACK frame for `path`, to which this tracker belongs. The frame may leave on any path.
    /// False if there is no room for it.
    pub(crate) fn write(
        &self,
        path: PathId,
        now: Time,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) -> bool {
        let written = Frame::encode_ack(w, path, self.delay_us(now), self.ranges());
        if let Some(largest) = self.largest().filter(|_| written) {
            sent.note(SentFrame::Ack { path, largest });
        }
        written
    }
    /// Records that an ACK was sent.
    pub(crate) fn on_ack_sent(&mut self) {
        self.unanswered = 0;
        self.due = Time::NEVER;
    }
    /// The peer has our ACK up to `largest`: older ranges need not be repeated.
    pub(crate) fn on_ack_acked(&mut self, largest: u64) {
        let floor = largest.saturating_sub(REORDER_KEPT);
        if floor > self.floor {
            self.floor = floor;
            self.seen.remove_below(floor);
        }
    }
    pub(crate) fn largest(&self) -> Option<u64> {
        self.seen.last().map(|(_, end)| end - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_counts_once() {
        let mut acks = AckTracker::new(Span::from_millis(20));
        for n in [0, 1, 5, 3] {
            assert!(!acks.is_replay(n));
            acks.on_packet(Time::ZERO, n, true);
            assert!(acks.is_replay(n));
        }
        assert_eq!(acks.ranges().collect::<Vec<_>>(), [(5, 5), (3, 3), (0, 1)]);
    }

    #[test]
    fn ranges_are_bounded_and_what_was_forgotten_reads_as_replay() {
        let mut acks = AckTracker::new(Span::ZERO);
        for n in 0..500 {
            acks.on_packet(Time::ZERO, n * 2, true);
        }
        assert_eq!(acks.ranges().count(), ACK_RANGES_MAX);
        assert!(acks.is_replay(1) && acks.is_replay(100));
    }

    #[test]
    fn an_ack_waits_for_the_second_packet_or_the_delay_and_not_for_a_gap() {
        // R-ACK-1
        let mut acks = AckTracker::new(Span::from_millis(20));
        acks.on_packet(Time::ZERO, 0, true);
        assert_eq!(acks.due(), Time::ZERO + Span::from_millis(20));
        let now = Time::from_nanos(5);
        acks.on_packet(now, 1, true);
        assert_eq!(acks.due(), now);
        acks.on_ack_sent();
        acks.on_packet(now, 2, false);
        assert_eq!(acks.due(), Time::NEVER);
        acks.on_packet(now, 4, true);
        assert_eq!(acks.due(), now);
    }
}
