//! State of paths for ACK offloading ([`crate::ack_offload`]).

use d2tp_time::{Span, Time};
use d2tp_wire::PathId;

/// Which other paths may carry the ACKs of half-duplex paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AckOffload {
    /// ACKs always leave on their own path.
    Never,
    /// ACKs may leave on free paths.
    #[default]
    Free,
    /// ACKs may leave on metered paths too, with a limit in addition to what such a path may spend
    /// without a grant (R-GRANT-6).
    Paid {
        /// The most bytes of ACKs per second on a metered path: what the user pays for a faster Wi-Fi.
        bytes_per_second: u64,
    },
}

/// The window, in packets, below which ACKs must not be delayed: a small window grows with each of
/// them. // Super-aggregation §3.1: the prototype's ssthresh
const WINDOW_MIN: u32 = 20;

/// ACKs that a sender asks for in a window (§9.1), from which its window is known.
const ACKS_PER_WINDOW: u32 = 8;

/// The share by which the packets of a round must exceed those of the round before to count as a
/// growing window.
const GROWTH: u32 = 4; // a guess: a fourth; slow start doubles, CUBIC hardly moves

/// Rounds after a gap in the received packets during which all ACKs leave on their own path: late
/// ACKs would make a sender that classifies losses by delay take a random loss for congestion. // a
/// guess: the time to acknowledge and repair the gap
const ROUNDS_AFTER_GAP: u64 = 2;

/// The initial and the smallest rate of ACKs on another path, in bytes per second. // guesses
const SHARE_FIRST: u64 = 4_000;

const SHARE_MIN: u64 = 1_000;

/// How much a round trip may exceed the minimum without a sign of a queue: the delay of one ACK.
const QUEUE_SLACK: Span = Span::from_millis(20);

/// What the receiver on a half-duplex path has measured of its sender's window, and which path its ACKs
/// take.
#[derive(Debug)]
pub(crate) struct AckOffloadState {
    round_began: Time,
    packets: u32,
    /// Packets received in the last complete round.
    last: u32,
    /// Packets received in the round before the last complete one.
    before: u32,
    pub(crate) usual_at: Time,
    /// When a datagram that acknowledges last left on the path itself (R-ACK-8).
    pub(crate) datagram_usual_at: Time,
    /// The time until which the sender may be classifying a loss.
    gap_until: Time,
    /// The path on which the ACK that is due now leaves, if it is not its own.
    pub(crate) by: Option<PathId>,
}

impl AckOffloadState {
    pub(crate) fn new(now: Time) -> AckOffloadState {
        AckOffloadState {
            round_began: now,
            packets: 0,
            last: 0,
            before: 0,
            usual_at: now,
            datagram_usual_at: now,
            gap_until: Time::ZERO,
            by: None,
        }
    }

    /// A packet with payload arrived, perhaps behind a gap; `round` is the path's round trip.
    pub(crate) fn on_payload(&mut self, now: Time, round: Span, gap: bool) {
        if gap {
            self.gap_until = now + round.times(ROUNDS_AFTER_GAP);
        }
        if now >= self.round_began + round {
            (self.before, self.last, self.packets) = (self.last, self.packets, 0);
            self.round_began = now;
        }
        self.packets += 1;
    }

    /// Whether payload arrived in the last two rounds.
    pub(crate) fn is_recent(&self, now: Time, round: Span) -> bool {
        now <= self.round_began + round.times(2)
    }

    /// Whether the sender's window is large, does not depend on frequent ACKs, and nothing was lost.
    pub(crate) fn is_steady(&self, now: Time, asked_every: u32) -> bool {
        let window = self.last.max(asked_every.saturating_mul(ACKS_PER_WINDOW));
        let grows = self.last > self.before + self.before / GROWTH;
        window >= WINDOW_MIN && !grows && now >= self.gap_until
    }
}

/// The rate at which a path may carry ACKs of other paths.
#[derive(Debug)]
pub(crate) struct CarriedAckBudget {
    /// The rate in bytes per second.
    rate: u64,
    /// Bytes left of the current round's budget.
    pub(crate) left: i64,
    round: Span,
    round_began: Time,
    pub(crate) asked_at: Time,
    /// Whether the budget was too small since the last round trip was measured.
    short: bool,
    /// Whether a queue was seen. From then on the rate grows slowly.
    found: bool,
}

impl CarriedAckBudget {
    pub(crate) fn new() -> CarriedAckBudget {
        CarriedAckBudget {
            rate: SHARE_FIRST,
            left: 0,
            round: Span::ZERO,
            round_began: Time::ZERO,
            asked_at: Time::ZERO,
            short: false,
            found: false,
        }
    }

    /// Whether one more ACK may leave now. The whole budget of a round is available at its start.
    /// ACKs of the first packets of a window use this path, and those of the later packets are not
    /// delayed.
    pub(crate) fn has_room(&mut self, now: Time, round: Span) -> bool {
        if now >= self.round_began + round {
            let bytes = u128::from(self.rate) * u128::from(round.as_nanos()) / 1_000_000_000;
            self.left = self.left.min(0) + i64::try_from(bytes).unwrap_or(i64::MAX);
            (self.round, self.round_began) = (round, now);
        }
        self.short |= self.left <= 0;
        self.left > 0
    }

    /// Handles a round trip sample of the path that carries the ACKs.
    pub(crate) fn on_round_trip(&mut self, latest: Span, least: Span) {
        // A round's budget that leaves at once forms a queue of at most one round, if the path can
        // carry it.
        if latest > least + self.round.max(least.divided(2)) + QUEUE_SLACK {
            self.rate = (self.rate / 2).max(SHARE_MIN);
            self.found = true;
        } else if std::mem::take(&mut self.short) {
            self.rate += if self.found { self.rate / 8 } else { self.rate };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    const ROUND: Span = Span::from_millis(50);

    /// The state after rounds with these numbers of packets.
    fn relief(rounds: &[u32]) -> AckOffloadState {
        let mut relief = AckOffloadState::new(ms(0));
        for (n, packets) in rounds.iter().enumerate() {
            let begins = ms(50 * n as u64);
            (0..*packets).for_each(|_| relief.on_payload(begins, ROUND, false));
        }
        relief.on_payload(ms(50 * rounds.len() as u64), ROUND, false);
        relief
    }

    #[test]
    fn a_small_window_and_one_that_grows_keep_their_answers() {
        // R-ACK-7
        let is_steady = |rounds: &[u32], every| relief(rounds).is_steady(ms(1000), every);
        assert!(!is_steady(&[19, 19, 19], 2), "below 20 packets");
        assert!(!is_steady(&[20, 40, 80], 10), "slow start");
        assert!(is_steady(&[80, 80, 80], 2));
        assert!(is_steady(&[80, 85, 90], 2), "congestion avoidance");
        assert!(is_steady(&[80, 80, 40], 2), "after a loss");
        assert!(is_steady(&[10, 10, 10], 3), "a large window says so itself");
    }

    #[test]
    fn answers_go_the_usual_way_while_a_loss_is_judged() {
        // R-ACK-7
        let mut relief = relief(&[80, 80, 80]);
        relief.on_payload(ms(160), ROUND, true);
        relief.on_payload(ms(170), ROUND, false);
        assert!(!relief.is_steady(ms(259), 2));
        assert!(relief.is_steady(ms(260), 2));
    }

    #[test]
    fn a_share_is_used_from_the_beginning_of_a_round() {
        let mut share = CarriedAckBudget::new();
        let mut sent = [0, 0];
        for (half, from) in [0, 25].into_iter().enumerate() {
            for n in 0..25 {
                if share.has_room(ms(1000 + from + n), ROUND) {
                    share.left -= 60;
                    sent[half] += 1;
                }
            }
        }
        // 4,000 bytes per second are 200 bytes in a round.
        assert_eq!(sent, [4, 0]);
    }

    #[test]
    fn a_share_grows_while_it_is_too_small_and_halves_where_there_is_a_queue() {
        let (least, queued) = (Span::from_millis(100), Span::from_millis(200));
        let mut share = CarriedAckBudget::new();
        share.on_round_trip(least, least);
        assert_eq!(share.rate, SHARE_FIRST, "nobody wanted more");
        for _ in 0..3 {
            share.short = true;
            share.on_round_trip(least, least);
        }
        assert_eq!(share.rate, 8 * SHARE_FIRST);
        share.on_round_trip(queued, least);
        assert_eq!(share.rate, 4 * SHARE_FIRST);
        share.short = true;
        share.on_round_trip(least, least);
        assert_eq!(share.rate, 4 * SHARE_FIRST + SHARE_FIRST / 2);
        (0..20).for_each(|_| share.on_round_trip(queued, least));
        assert_eq!(share.rate, SHARE_MIN);
    }
}
