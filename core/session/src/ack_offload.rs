//! Acknowledgements of a half-duplex path that travel on another (offloading-ACK).
//!
//! ```text
//!           payload, half duplex (Wi-Fi)
//!  sender ════════════════════════════════▶ receiver
//!         ◀─ · ─ · ─ · ─ · ─ · ─ · ─ · ─ ·    one each 250 ms, and the end of a round
//!         ◀────────────────────────────────   the others, on the other path, as it has room
//!           the other path (cellular)
//! ```
//!
//! On Wi-Fi a small packet costs a third of a large one and takes it from those the other way. The
//! receiver decides, for it sees when an ACK is due and whether the other path is idle; nothing of it
//! shows on the wire, since every ACK names its path. An ACK says all there is to say, so one that
//! leaves replaces those that did not, and one that comes late does no harm.
//!
//! What must not happen is that the sender is held back: by answers that take longer (so not while
//! its window is small or growing), by a way that has no room (so the share it carries is found by
//! its round trip, as a window is), or by a way that died unnoticed (so it is asked now and then, and
//! some ACKs go the usual way whatever happens).

use d2tp_time::{Span, Time};
use d2tp_wire::{PathId, PathStatus, ReasonCode, WireWriter};

use crate::path::{self, LinkId, PathState, SessionPath};
use crate::recovery::SentPacket;
use crate::session::{Role, Session};

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
/// The other round trip, in round trips of the path itself, beyond which answers come too late.
const ROUND_TRIPS_MAX: u64 = 4; // a guess
/// One ACK goes the usual way at least so often: it measures the path, and is there if the other
/// way died. // a guess: a few hundredths of a per cent of the airtime
const USUAL_WAY_EVERY: Span = Span::from_millis(250);
/// How often the other path is asked, by PING, for its round trip while it carries ACKs.
const ASK_EVERY: Span = Span::from_millis(200); // a guess
/// Bytes a second of ACKs given to a path that nothing is known of, and at least. // guesses
const SHARE_FIRST: u64 = 4_000;
const SHARE_MIN: u64 = 1_000;
/// What a round trip may be longer by without a queue: an ACK's delay.
const QUEUE_SLACK: Span = Span::from_millis(20);
/// IP, UDP, header and tag around the ACK of a packet that holds nothing else.
const AROUND_BYTES: i64 = 28 + 29;

/// What the receiver on a half-duplex path knows of its sender's window, and where its ACK goes.
#[derive(Debug)]
pub(crate) struct AckOffloadState {
    round_began: Time,
    packets: u32,
    /// Packets of the last whole round, and of the one before.
    last: u32,
    before: u32,
    usual_at: Time,
    /// Until then the sender may be judging a loss.
    gap_until: Time,
    /// The path that the ACK now due leaves on, instead of its own.
    by: Option<PathId>,
}

impl AckOffloadState {
    fn new(now: Time) -> AckOffloadState {
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
    fn on_payload(&mut self, now: Time, round: Span, gap: bool) {
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
    fn is_steady(&self, now: Time, asked_every: u32) -> bool {
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
    left: i64,
    round: Span,
    round_began: Time,
    asked_at: Time,
    /// Whether the window was too small since the last round trip was measured.
    short: bool,
    /// A queue was seen: from then on it grows slowly.
    found: bool,
}

impl CarriedAckBudget {
    fn new() -> CarriedAckBudget {
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
    fn has_room(&mut self, now: Time, round: Span) -> bool {
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

impl Session {
    /// Says that what travels on the paths over `link` contends with what travels the other way, as
    /// on Wi-Fi: ACKs of either end may then leave on another path ([`crate::EndpointConfig::ack_offload`]).
    pub fn set_half_duplex(&mut self, link: LinkId) {
        let off = self.config.ack_offload == AckOffload::Never;
        if off || self.half_duplex.contains(&link) {
            return;
        }
        self.half_duplex.push(link);
        for path in self.paths.iter_mut().filter(|p| p.addresses.link == link) {
            path.status_seq += 1;
            path.wants |= path::want::STATUS;
        }
    }

    /// What a device says with the status of a path that is as good as it was.
    pub(crate) fn reason_of(&self, path: &SessionPath) -> ReasonCode {
        let used = matches!(path.status, PathStatus::Available | PathStatus::Standby);
        if !used || path.reason != ReasonCode::None {
            path.reason
        } else if self.is_half_duplex(path) {
            ReasonCode::HalfDuplex
        } else if path.gated && self.acks_pay() {
            ReasonCode::TakesAcks
        } else {
            ReasonCode::None
        }
    }

    /// Whether the user lets ACKs cost something (a device's).
    fn acks_pay(&self) -> bool {
        self.role == Role::Initiator && matches!(self.config.ack_offload, AckOffload::Paid { .. })
    }

    pub(crate) fn is_half_duplex(&self, path: &SessionPath) -> bool {
        match self.role {
            Role::Initiator => self.half_duplex.contains(&path.addresses.link),
            Role::Responder => {
                path.reason == ReasonCode::HalfDuplex
                    && self.config.ack_offload != AckOffload::Never
            }
        }
    }

    /// Packet `number`, with payload, arrived on this path.
    pub(crate) fn note_offload_payload(&mut self, now: Time, slot: usize, number: u64) {
        if self.paths.len() < 2 || !self.is_half_duplex(&self.paths[slot]) {
            return;
        }
        // A number that was left out on purpose (R-ACK-4) leaves no hole in what is read.
        let gap = number > self.paths[slot].acks.expected()
            && self.flows.iter().any(|f| f.recv.has_gap());
        let path = self.paths.at(slot);
        let round = path.recovery.rtt.smoothed();
        let relief = path
            .ack_offload_state
            .get_or_insert_with(|| AckOffloadState::new(now).into());
        relief.on_payload(now, round, gap);
    }

    /// R-ACK-7: chooses for each half-duplex path with an ACK due which way that goes.
    pub(crate) fn route_acks(&mut self, now: Time) {
        for slot in 0..self.paths.len() {
            let path = self.paths.at(slot);
            let (due, every) = (path.acks.due() <= now, path.acks.every());
            let round = path.recovery.rtt.smoothed();
            let Some(relief) = path.ack_offload_state.as_mut().filter(|_| due) else {
                continue;
            };
            // The other path may be gone since it was chosen.
            relief.by = None;
            let steady = relief.is_steady(now, every) && now < relief.usual_at + USUAL_WAY_EVERY;
            if steady && let Some(other) = self.other_way(now, slot, round) {
                let id = self.paths[other].id;
                let path = self.paths.at(slot);
                path.ack_offload_state.as_mut().expect("it has one").by = Some(id);
                self.ask_other_way(now, other);
            }
        }
    }

    /// The path, not this one, that has room for an ACK now and is not much slower.
    fn other_way(&mut self, now: Time, slot: usize, round: Span) -> Option<usize> {
        let may_cost = self.acks_pay();
        let limit = round.times(ROUND_TRIPS_MAX);
        let other = (0..self.paths.len())
            .filter(|other| *other != slot)
            .filter(|other| {
                let p = &self.paths[*other];
                p.state == PathState::Active
                    && p.validated
                    && matches!(p.status, PathStatus::Available | PathStatus::Standby)
                    && (may_cost || !p.gated || p.reason == ReasonCode::TakesAcks)
                    && p.recovery.rtt.is_measured()
                    && p.recovery.rtt.smoothed() <= limit
                    && !self.is_half_duplex(p)
            })
            .min_by_key(|other| self.paths[*other].rank())?;
        if let AckOffload::Paid { bytes_per_second } = self.config.ack_offload
            && may_cost
        {
            self.paths.at(other).control.raise_rate(bytes_per_second);
        }
        let path = self.paths.at(other);
        let share = path
            .carried_acks
            .get_or_insert_with(|| CarriedAckBudget::new().into());
        let room = share.has_room(now, round) && (!path.gated || path.control.may_send(now));
        room.then_some(other)
    }

    fn ask_other_way(&mut self, now: Time, other: usize) {
        let path = self.paths.at(other);
        let waits = path.recovery.is_waiting();
        if let Some(share) = &mut path.carried_acks
            && !waits
            && now >= share.asked_at + ASK_EVERY
        {
            share.asked_at = now;
            path.wants |= path::want::PING;
            if path.only_carries_acks() && path.ack_every != 1 {
                // An answer that waits for another packet would be to one that has no time of sending.
                path.ack_every = 1;
                path.wants |= path::want::ACK_RATE;
            }
        }
    }

    /// Whether the ACK that is due on this path leaves on another.
    pub(crate) fn is_ack_rerouted(&self, slot: usize) -> bool {
        let relief = self.paths[slot].ack_offload_state.as_ref();
        relief.is_some_and(|relief| relief.by.is_some())
    }

    /// Whether ACKs of other paths leave on this one.
    pub(crate) fn carries_acks(&self, id: PathId) -> bool {
        let mut reliefs = self
            .paths
            .iter()
            .filter_map(|p| p.ack_offload_state.as_ref());
        reliefs.any(|relief| relief.by == Some(id))
    }

    /// Writes the ACKs of other paths that leave on this one.
    pub(crate) fn write_carried_acks(
        &mut self,
        now: Time,
        slot: usize,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) {
        let carrier = self.paths[slot].id;
        let before = w.written();
        for path in self.paths.iter_mut() {
            let Some(relief) = path
                .ack_offload_state
                .as_mut()
                .filter(|r| r.by == Some(carrier))
            else {
                continue;
            };
            relief.by = None;
            if path.acks.write(path.id, now, w, sent) {
                path.acks.on_ack_sent();
            }
        }
        let bytes = (w.written() - before) as i64 + AROUND_BYTES;
        if let Some(share) = &mut self.paths.at(slot).carried_acks {
            share.left -= bytes;
        }
    }
}

impl SessionPath {
    /// Whether we send nothing here but ACKs of other paths.
    pub(crate) fn only_carries_acks(&self) -> bool {
        self.carried_acks.is_some() && self.payload_out == 0
    }

    /// Its ACK left on the path itself.
    pub(crate) fn on_direct_ack_sent(&mut self, now: Time) {
        if let Some(relief) = &mut self.ack_offload_state {
            (relief.usual_at, relief.by) = (now, None);
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
