//! Classifies lost packets: dropped by a full queue, or lost at random on a radio link.
//!
//! ```text
//!  queueing delay
//!     deepest ─ ─ ─ ─ ─╮─ ─ ─ ─ ─ ─ ─ ─ ─ ─   a packet came through a queue as long as this
//!                    ╱  ╲  ✕ queue
//!      1/2 ─ ─ ─ ─ ╱─ ─ ─ ╲─ ─ ─ ─ ─ ─ ─ ─
//!                ╱  ✕ queue ╲                 may be either: a soft response if random losses are common
//!    floor ─ ─ ╱─ ─ ─ ─ ─ ─ ─ ╲─ ─ ─ ─ ─ ─
//!     ──── ✕ ╱─────────────────╲── ✕ ────▶   random: there is no queue
//! ```
//!
//! A queue drops packets while it is long: drop-tail when it is full, CoDel when it has persisted.
//! So a loss without a queue is random. Vegas (Brakmo and Peterson 1995) and Veno (Fu and Liew
//! 2003) use the queueing delay; Spike (Cen, Cosman and Voelker 2003) compares it with the longest
//! one. Packets also wait for others of their own burst, so the persistent queue is the shortest
//! delay of several packets (CoDel, RFC 8289 §3).
//!
//! If the cause is uncertain, the loss counts as the queue's: for three consecutive losses, while
//! more is lost than radio links lose, and for some time after that if no queue is visible, as with
//! a policer or a very short queue.

use d2tp_time::{Span, Time};

/// Parts of the deepest queueing delay. Above one quarter, the delay exceeds that of the path's own
/// bursts. Above one half, a loss counts as congestion even if random losses are common.
const QUARTER: (u64, u64) = (1, 4);
const HALF: (u64, u64) = (1, 2);
/// A queueing delay below this part of the shortest round trip, within limits, counts as no queue,
/// but as jitter and bursts.
const FLOOR_PART: u64 = 8; // RFC 9406 §4.3, which ends slow start by it
const FLOOR_MIN: Span = Span::from_millis(1); // a guess
/// The upper limit of the floor: CoDel lets 5 ms persist (RFC 8289 §4.3). // measured: with 16 ms a
/// session took twice its share of such a queue
const FLOOR_MAX: Span = Span::from_millis(4);
/// How long the deepest queueing delay is remembered, at least; at most twice as long.
const DEEPEST_KEPT: Span = Span::from_secs(120); // a guess: rates of radio links change, and their queues with them
/// The number of packets whose smallest delay is the queueing delay: a round trip of ACKs.
const SAMPLES: usize = 8;
/// With a smaller window, in packets, the queue is judged by the longer of the last two delays, to be
/// conservative.
const WINDOW_SMALL: u64 = 40; // measured: of a shared queue of 7 packets a session took 1.3 times as much as without
/// The number of consecutive losses that counts as congestion; two more if random losses are
/// common. At 3 % random loss one packet in 40,000 begins such a run, and one in 40 million with
/// two more.
const RUN: u32 = 3;
/// How many of the last eight losses must have been random for random losses to count as common.
/// Twice the usual delay then counts as no queue.
const AIRY: u32 = 4; // a guess
/// The share of lost packets, in 2^16ths, above which losses count as congestion whatever the delay.
const SHARE_MAX: u32 = 65_536 * 8 / 100; // the paper's random losses end at 3 %
/// The number of packets over which that share is averaged.
const SHARE_PACKETS: u32 = 256; // at 3 % its standard deviation is 0.8 %
/// How long the delay is ignored after excessive loss without delay; doubled each time.
const BLIND_MIN: Span = Span::from_secs(10); // a guess
const BLIND_MAX: Span = Span::from_secs(160); // a guess

/// The cause of a packet loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LossKind {
    /// Congestion, or an unknown cause.
    Queue,
    /// A random loss on the radio link.
    Random,
}

/// Measurements of a path's queue, by which its losses are classified.
#[derive(Debug)]
pub(crate) struct LossClassifier {
    /// The longest queueing delay of this period and of the previous one.
    deepest: [Span; 2],
    period_began: Time,
    /// The queueing delays of the last packets that were sent after the last congestion response.
    near: [Span; SAMPLES],
    /// The delays of the last two of those packets that were acknowledged on the path itself.
    own: [Span; 2],
    /// The most recent queueing delay.
    latest: Span,
    /// The shortest round trip with an ACK on another path, of this period and of the previous one.
    detour_min: [Span; 2],
    responded_at: Time,
    /// The share of packets lost.
    share: u32,
    /// The last eight classifications, one bit each: 1 if random.
    verdicts: u8,
    /// The queueing delay, if the last loss counted as congestion only to be conservative.
    unsure: Option<Span>,
    /// The packet lost last.
    last: Option<u64>,
    /// The length of the run of consecutive losses that ends with `last`.
    run: u32,
    run_most: u32,
    /// Whether a loss was congestion, or slow start resumed because no loss was.
    pub(crate) settled: bool,
    blind_until: Time,
    blind_next: Span,
}

impl LossClassifier {
    pub(crate) fn new(now: Time) -> LossClassifier {
        LossClassifier {
            deepest: [Span::ZERO; 2],
            period_began: now,
            near: [Span::ZERO; SAMPLES],
            own: [Span::ZERO; 2],
            latest: Span::ZERO,
            detour_min: [Span::MAX; 2],
            responded_at: Time::ZERO,
            share: 0,
            verdicts: 0,
            unsure: None,
            last: None,
            run: 0,
            run_most: 0,
            settled: false,
            blind_until: Time::ZERO,
            blind_next: BLIND_MIN,
        }
    }

    /// Handles a round trip sample of a packet sent at `sent_at`, whose ACK arrived on this path.
    pub(crate) fn on_round_trip(&mut self, now: Time, sent_at: Time, rtt: Span, rtt_min: Span) {
        self.turn(now);
        let wait = rtt.saturating_sub(rtt_min);
        if self.note(sent_at, wait) {
            self.own = [wait, self.own[0]];
            self.latest = self.queue();
            self.deepest[0] = self.deepest[0].max(self.latest);
        }
    }

    /// Handles a round trip sample whose ACK arrived over another path. Its delay includes that
    /// path's queue, so it counts only if this path shows a queue as well, and never as the
    /// longest.
    pub(crate) fn on_indirect_round_trip(&mut self, now: Time, sent_at: Time, rtt: Span) {
        self.turn(now);
        self.detour_min[0] = self.detour_min[0].min(rtt);
        let least = self.detour_min[0].min(self.detour_min[1]);
        self.note(sent_at, rtt.saturating_sub(least));
    }

    /// Forgets measurements that are too old to count.
    fn turn(&mut self, now: Time) {
        if now >= self.period_began + DEEPEST_KEPT {
            self.deepest = [Span::ZERO, self.deepest[0]];
            self.detour_min = [Span::MAX, self.detour_min[0]];
            self.period_began = now;
        }
    }

    /// Records a packet's queueing delay. Returns whether it is newer than the last response.
    fn note(&mut self, sent_at: Time, wait: Span) -> bool {
        let is_evidence = !self.is_covered(sent_at);
        if is_evidence {
            self.near.rotate_right(1);
            self.near[0] = wait;
        }
        is_evidence
    }

    /// The current queueing delay.
    fn queue(&self) -> Span {
        self.near
            .into_iter()
            .fold(self.own[0].min(self.own[1]), Span::min)
    }

    /// Records that packets arrived.
    pub(crate) fn on_arrived(&mut self, packets: u32) {
        let part = packets.min(SHARE_PACKETS);
        self.share -= (u64::from(self.share) * u64::from(part) / u64::from(SHARE_PACKETS)) as u32;
    }

    /// Records that this packet is lost; numbers ascend.
    pub(crate) fn on_lost(&mut self, number: u64, sent_at: Time) {
        if !self.is_covered(sent_at) {
            self.share += (65_536 - self.share) / SHARE_PACKETS;
        }
        let follows = self.last.is_some_and(|last| last + 1 == number);
        self.run = if follows { self.run + 1 } else { 1 };
        self.run_most = self.run_most.max(self.run);
        self.last = Some(number);
    }

    /// Classifies all losses since the last call, the newest of them sent at `sent_at`; losses that
    /// are detected together are of one kind. `window`: the number of packets that may be in
    /// flight.
    pub(crate) fn classify(
        &mut self,
        now: Time,
        sent_at: Time,
        rtt_min: Span,
        window: u64,
    ) -> LossKind {
        self.unsure = None;
        let run = std::mem::take(&mut self.run_most);
        if self.is_covered(sent_at) {
            return LossKind::Queue;
        }
        let floor = rtt_min.divided(FLOOR_PART).clamp(FLOOR_MIN, FLOOR_MAX);
        let wait = match window < WINDOW_SMALL {
            true => self.near[0].max(self.near[1]),
            false => self.queue(),
        };
        if self.share > SHARE_MAX {
            // The current queue is the deepest, whatever was measured before.
            self.deepest = [self.latest, Span::ZERO];
            self.period_began = now;
            self.share = SHARE_MAX / 2;
            self.settled = true;
            if self.latest < floor && now >= self.blind_until {
                self.blind_until = now + self.blind_next;
                self.blind_next = self.blind_next.times(2).min(BLIND_MAX);
            }
            return LossKind::Queue;
        }
        let deepest = self.deepest[0].max(self.deepest[1]);
        let airy = self.verdicts.count_ones() >= AIRY;
        let floor = floor.times(1 + u64::from(airy));
        let doubted = run >= RUN + 2 * u32::from(airy) || now < self.blind_until;
        let below = |part: (u64, u64)| wait < deepest.scaled(part.0, part.1).max(floor.times(2));
        let stands = self.queue() >= floor;
        self.unsure = (stands && below(HALF) && airy && !doubted).then_some(wait);
        let random = !stands && below(QUARTER) && !doubted;
        self.verdicts = self.verdicts << 1 | u8::from(random);
        if random {
            LossKind::Random
        } else {
            self.settled = true;
            LossKind::Queue
        }
    }

    /// The window that the response to an uncertain loss must leave at least: what fills the path
    /// without a queue (Westwood; Mascolo et al. 2001).
    pub(crate) fn reduced_window(&self, window: u64, rtt_min: Span) -> Option<u64> {
        let wait = self.unsure?.as_nanos();
        // ACKs over another path arrive later, and the window is larger because of that.
        let detour = self.detour_min.into_iter().filter(|min| *min < Span::MAX);
        let base = detour.fold(rtt_min, Span::max).as_nanos().max(1);
        Some((u128::from(window) * u128::from(base) / u128::from(base + wait)) as u64)
    }

    /// Whether a packet was sent before the last response, so that the response covers it.
    fn is_covered(&self, sent_at: Time) -> bool {
        sent_at <= self.responded_at
    }

    /// Records a reduction of the window, after which queueing delays are measured again.
    pub(crate) fn on_response(&mut self, now: Time) {
        (self.near, self.own) = ([Span::ZERO; SAMPLES], [Span::ZERO; 2]);
        self.responded_at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::CongestionKind;
    use crate::congestion::path_model::{ClassificationCounts, PathModel, classify_losses};

    const MS: Span = Span::from_millis(1);
    const BASE: Span = Span::from_millis(50);

    fn at(ms: u64) -> Time {
        Time::ZERO + MS.times(ms)
    }

    /// Lets as many packets arrive as make a measurement, each sent at `sent` and `ms` under way.
    fn wait(classifier: &mut LossClassifier, sent: Time, ms: u64) {
        for _ in 0..SAMPLES {
            classifier.on_round_trip(sent + BASE, sent, BASE + MS.times(ms), BASE);
        }
    }

    /// A classifier that saw queueing delays of up to 60 ms, and of `last_ms` most recently.
    fn classifier(last_ms: u64) -> LossClassifier {
        let mut classifier = LossClassifier::new(at(0));
        for (n, ms) in [0, 20, 40, 60, 40, last_ms].into_iter().enumerate() {
            wait(&mut classifier, at(100 * n as u64 + 1), ms);
            classifier.on_arrived(50);
        }
        classifier
    }

    /// Lets packets be lost, consecutively or not. Returns how the losses are classified.
    fn lose(classifier: &mut LossClassifier, now: Time, packets: u64, in_a_row: bool) -> LossKind {
        let first = classifier.last.map_or(0, |last| last + 2);
        let step = if in_a_row { 1 } else { 2 };
        (0..packets).for_each(|n| classifier.on_lost(first + n * step, now));
        classifier.classify(now, now, BASE, 100)
    }

    #[test]
    fn a_loss_while_no_queue_stands_is_random() {
        // R-MIRROR-1
        for (wait, kind) in [
            (0, LossKind::Random),
            (3, LossKind::Random),
            (5, LossKind::Queue),
            (60, LossKind::Queue),
        ] {
            assert_eq!(
                lose(&mut classifier(wait), at(900), 1, false),
                kind,
                "{wait} ms"
            );
        }
    }

    #[test]
    fn answers_over_another_path_show_a_queue_and_not_how_long_it_gets() {
        let mut classifier = classifier(0);
        let detour = |classifier: &mut LossClassifier, ms| {
            for _ in 0..SAMPLES {
                classifier.on_indirect_round_trip(at(850), at(800), BASE.times(2) + MS.times(ms));
            }
            lose(classifier, at(900), 1, false)
        };
        assert_eq!(detour(&mut classifier, 0), LossKind::Random);
        assert_eq!(
            detour(&mut classifier, 200),
            LossKind::Random,
            "it is the other path's"
        );
        for ms in [870, 871] {
            classifier.on_round_trip(at(ms), at(820), BASE + MS.times(10), BASE);
        }
        assert_eq!(detour(&mut classifier, 200), LossKind::Queue);
        assert_eq!(classifier.deepest[0], MS.times(60));
    }

    #[test]
    fn packets_that_wait_for_their_own_burst_are_no_queue() {
        let mut classifier = classifier(0);
        for ms in [20, 3, 40, 20, 40, 20, 40, 20] {
            classifier.on_round_trip(at(850), at(800), BASE + MS.times(ms), BASE);
        }
        assert_eq!(lose(&mut classifier, at(900), 1, false), LossKind::Random);
        classifier.on_lost(100, at(900));
        let small = classifier.classify(at(900), at(900), BASE, 30);
        assert_eq!(small, LossKind::Queue, "a small window is all burst");
        wait(&mut classifier, at(800), 20);
        assert_eq!(lose(&mut classifier, at(900), 1, false), LossKind::Queue);
    }

    #[test]
    fn what_may_be_either_leaves_what_the_way_holds_where_the_air_is_known_to_lose() {
        for (ms, random, left) in [
            (0, 8, None),
            (7, 8, None),
            (10, 8, Some(100_000)),
            (10, 4, Some(100_000)),
            (10, 3, None),
            (30, 8, None),
        ] {
            let mut classifier = classifier(ms);
            classifier.verdicts = ((1_u16 << random) - 1) as u8;
            lose(&mut classifier, at(900), 1, false);
            assert_eq!(
                classifier.reduced_window(120_000, BASE),
                left,
                "{ms} ms, {random} of 8"
            );
        }
    }

    #[test]
    fn packets_lost_in_a_row_are_the_queues() {
        // R-MIRROR-1
        assert_eq!(lose(&mut classifier(0), at(900), 2, true), LossKind::Random);
        assert_eq!(lose(&mut classifier(0), at(900), 3, true), LossKind::Queue);
        for (packets, kind) in [(4, LossKind::Random), (5, LossKind::Queue)] {
            let mut airy = classifier(0);
            airy.verdicts = 0b1111;
            assert_eq!(lose(&mut airy, at(900), packets, true), kind);
        }
    }

    #[test]
    fn more_than_radio_loses_is_the_queues_and_says_how_deep_it_is() {
        // R-MIRROR-1
        let mut classifier = classifier(0);
        let mut lose_one_of_six = || {
            classifier.on_arrived(5);
            lose(&mut classifier, at(900), 1, false)
        };
        assert_eq!(lose_one_of_six(), LossKind::Random);
        let kinds: Vec<LossKind> = (0..60).map(|_| lose_one_of_six()).collect();
        assert!(kinds.contains(&LossKind::Queue));
        assert_eq!(classifier.deepest, [Span::ZERO; 2], "it overflows here");
    }

    #[test]
    fn where_much_is_lost_and_no_queue_shows_the_delay_is_not_believed_for_a_while() {
        let mut classifier = LossClassifier::new(at(0));
        classifier.on_round_trip(at(50), at(1), BASE, BASE);
        assert_eq!(lose(&mut classifier, at(60), 2, false), LossKind::Random);
        assert_eq!(lose(&mut classifier, at(70), 60, false), LossKind::Queue);
        classifier.on_arrived(256);
        assert_eq!(lose(&mut classifier, at(9_000), 1, false), LossKind::Queue);
        assert_eq!(
            lose(&mut classifier, at(11_000), 1, false),
            LossKind::Random
        );
        assert_eq!(
            lose(&mut classifier, at(11_000), 60, false),
            LossKind::Queue
        );
        classifier.on_arrived(256);
        assert_eq!(lose(&mut classifier, at(30_000), 1, false), LossKind::Queue);
    }

    #[test]
    fn what_packets_waited_before_a_response_says_nothing_after_it() {
        let mut classifier = classifier(60);
        assert_eq!(lose(&mut classifier, at(900), 1, false), LossKind::Queue);
        classifier.on_response(at(900));
        // Measured now, but sent before the response.
        classifier.on_round_trip(at(940), at(850), BASE + MS.times(60), BASE);
        assert_eq!(lose(&mut classifier, at(940), 1, false), LossKind::Random);
        classifier.on_lost(100, at(899));
        let covered = classifier.classify(at(940), at(899), BASE, 100);
        assert_eq!(covered, LossKind::Queue, "it is of the same overflow");
        wait(&mut classifier, at(901), 59);
        assert_eq!(lose(&mut classifier, at(1_010), 1, false), LossKind::Queue);
    }

    /// R-MIRROR-1: measures how often the classification is wrong. 20 Mb/s; drop-tail queues of
    /// half, one and four bandwidth-delay products; random loss of none to 3 %; alone, and beside
    /// NewReno. Run with `--nocapture` for the table.
    #[test]
    fn few_losses_are_taken_for_the_other_kind() {
        println!(
            "RTT ms  queue BDP  random | queue's, called random | random, called queue's | rate"
        );
        for beside in [false, true] {
            let mut all = ClassificationCounts::default();
            for (rtt_ms, halves, loss_of) in [50, 200].into_iter().flat_map(|rtt_ms| {
                [1, 2, 8].into_iter().flat_map(move |halves| {
                    [0, 1_000, 100, 33].map(|loss_of| (rtt_ms, halves, loss_of))
                })
            }) {
                let course = PathModel {
                    bytes_per_s: 2_500_000,
                    rtt_ms,
                    queue: 2_500 * rtt_ms * halves / 2,
                    loss_of,
                };
                let (v, used) = classify_losses(CongestionKind::Cubic, course, beside, 60);
                println!(
                    "{rtt_ms:6}  {:9.1}  1/{loss_of:<4} | {:7}, {:13} | {:6}, {:14} | {used} %",
                    halves as f64 / 2.0,
                    v.queue,
                    v.queue_called_random,
                    v.random,
                    v.random_called_queue,
                );
                all.queue += v.queue;
                all.queue_called_random += v.queue_called_random;
                all.random += v.random;
                all.random_called_queue += v.random_called_queue;
            }
            println!("beside NewReno: {beside}; {all:?}");
            assert!(all.queue_called_random * 50 <= all.queue, "{all:?}");
            assert!(all.random_called_queue * 5 <= all.random, "{all:?}");
        }
    }

    #[test]
    fn a_queue_that_was_deep_long_ago_is_forgotten() {
        let mut classifier = classifier(10);
        let mut lose_at = |s: u64| {
            wait(&mut classifier, at(s * 1_000), 20);
            classifier.verdicts = u8::MAX;
            lose(&mut classifier, at(s * 1_000 + 1), 1, false);
            classifier.reduced_window(120_000, BASE).is_some()
        };
        assert!(lose_at(1), "60 ms were seen");
        assert!(lose_at(121));
        assert!(!lose_at(242));
    }
}
