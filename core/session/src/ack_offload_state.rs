//! What paths hold of ACKs that travel on others ([`crate::ack_offload`]).

use d2tp_time::{Span, Time};
use d2tp_wire::PathId;

/// Where ACKs of half-duplex paths may travel besides the path itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AckOffload {
    /// Nowhere.
    Never,
    /// On paths that cost nothing.
    #[default]
    Free,
    /// On metered ones too, for at most so many bytes a second more than such a path may spend
    /// unasked (R-GRANT-6).
    Paid {
        /// The user's price of a faster Wi-Fi.
        bytes_per_second: u64,
    },
}

/// The window, in packets, below which answers must not be slowed: there it still grows by them.
/// // Super-aggregation §3.1: the prototype's ssthresh
const WINDOW_MIN: u32 = 20;

/// ACKs that a sender asks for in a window (§9.1), from which its window is known.
const ACKS_PER_WINDOW: u32 = 8;

/// More packets in a round than in the one before by this share of them: the window grows.
const GROWTH: u32 = 4; // a guess: a fourth; slow start doubles, CUBIC hardly moves

/// Rounds after a gap in what arrived, in which all answers go the usual way: a sender that judges a loss
/// by late answers takes a random one for congestion. // a guess: what it takes to answer and repair it
const ROUNDS_AFTER_GAP: u64 = 2;

/// Bytes a second of ACKs given to a path that nothing is known of, and at least. // guesses
const SHARE_FIRST: u64 = 4_000;

const SHARE_MIN: u64 = 1_000;

/// What a round trip may be longer by without a queue: an ACK's delay.
const QUEUE_SLACK: Span = Span::from_millis(20);

/// What the receiver on a half-duplex path knows of its sender's window, and where its ACK goes.
#[derive(Debug)]
pub(crate) struct AckOffloadState {
    round_began: Time,
    packets: u32,
    /// Packets of the last whole round, and of the one before.
    last: u32,
    before: u32,
    pub(crate) usual_at: Time,
    /// Until then the sender may be judging a loss.
    gap_until: Time,
    /// The path that the ACK now due leaves on, instead of its own.
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

    /// Whether the sender's window is large and does not grow by answers, and nothing was lost.
    pub(crate) fn is_steady(&self, now: Time, asked_every: u32) -> bool {
        let window = self.last.max(asked_every.saturating_mul(ACKS_PER_WINDOW));
        let grows = self.last > self.before + self.before / GROWTH;
        window >= WINDOW_MIN && !grows && now >= self.gap_until
    }
}

/// What another path carries of ACKs.
#[derive(Debug)]
pub(crate) struct CarriedAckBudget {
    /// Bytes a second.
    rate: u64,
    /// Bytes left of this round's.
    pub(crate) left: i64,
    round: Span,
    round_began: Time,
    pub(crate) asked_at: Time,
    /// Whether the window was too small since the last round trip was measured.
    short: bool,
    /// A queue was seen: from then on it grows slowly.
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

    /// Whether one more may leave now. All of a round's are there at its beginning, so those of the
    /// beginning of a window go this way and the later ones wait least.
    pub(crate) fn has_room(&mut self, now: Time, round: Span) -> bool {
        if now >= self.round_began + round {
            let bytes = u128::from(self.rate) * u128::from(round.as_nanos()) / 1_000_000_000;
            self.left = self.left.min(0) + i64::try_from(bytes).unwrap_or(i64::MAX);
            (self.round, self.round_began) = (round, now);
        }
        self.short |= self.left <= 0;
        self.left > 0
    }

    /// The path's round trip was measured.
    pub(crate) fn on_round_trip(&mut self, latest: Span, least: Span) {
        // A round's share that leaves at once is a queue of at most a round, if there is room for it.
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

    /// Rounds with so many packets each.
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
        // 4,000 bytes a second are 200 in a round.
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
