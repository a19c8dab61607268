//! Dynamic receive window adjustment: a receiver keeps the queue on the path short by limiting the
//! sender's window (DRWA: Jiang, Wang, Lee and Rhee, "Tackling Bufferbloat in 3G/4G Networks", IMC
//! 2012).
//!
//! The bytes that arrive in a round trip were in flight a round trip ago, those in the queue
//! included. Once a round:
//!
//! ```text
//!   window ← 7/8 window + 1/8 bytes received in the round
//!   limit  ← λ · (RTTmin / RTT) · window            = λ · RTTmin · rate, whatever the queue holds
//! ```
//!
//! so a full queue is drawn down to λ − 1 bandwidth-delay products, and a rate that doubles still
//! finds packets waiting. This module only computes the limit. A D2TP path announces it as
//! PATH_LIMIT, a kernel TCP socket sets it as its window clamp.
//!
//! The published rule is always in force and never forgets RTTmin. Here it has states:
//!
//! ```text
//!           RTT > (1 + λ)/2 · RTTmin             RTTmin not seen for 10 s, or
//!   Open ──────────────────────────▶ Holding ─── the round trip does not shrink ────▶ Draining
//!    ▲ ▲      4 rounds at 5/4 RTTmin    │  ▲                                           │   │
//!    │ └────────────────────────────────┘  └────────── the round trip shrank ──────────┘   │
//!    └── after a while Yielding ◀──── it did not: other traffic causes the queue ─────┘
//! ```
//!
//! - *Open*: no limit. A link without a long queue never gets one, and slow start is not slowed
//!   (the
//!   average trails a doubling window by so much that 3 times it would be less than the window).
//! - *Draining*: three quarters of a bandwidth-delay product, for the time that a round trip takes
//!   to
//!   show it: the round trip that remains is not caused by this flow. This detects an RTTmin that
//!   rose, and also one that was only ever measured while other flows filled the queue.
//! - *Yielding*: other flows fill the queue. A flow that held back there would only lose its share.
//!
//! [`Drwa::only_beyond`] makes a receiver that is on everywhere: it leaves a path alone until packets waited that long in
//! its queue, and then also searches for no RTTmin before a limit is needed.
//!
//! Several limited flows in one queue make it no longer than a single one does: each gets λ ·
//! RTTmin · *its* rate. A flow that joins late takes the others' queue for propagation delay, until
//! the queue is drained or another path reports a shorter RTTmin ([`Drwa::on_rtt_min`]). The others
//! see a queue that does not shrink, and yield: then no flow is limited.

use std::fmt;
use std::str::FromStr;

use d2tp_time::{Span, Time};

/// The smallest value used for RTTmin: a queue three times as long disturbs no application, and
/// timers and batches of the hosts alone cause that much delay. // a guess
const RTT_MIN_FLOOR: Span = Span::from_millis(10);
/// How long RTTmin is trusted without a sample near it. // as BBR's, draft-ietf-ccwg-bbr §5.3.4
const SEEN_WITHIN: Span = Span::from_secs(10);
/// How long RTTmin is trusted in round trips, if that is longer than [`SEEN_WITHIN`]: a search for it
/// takes up to three of them, at three quarters of the rate.
const SEEN_WITHIN_RTTS: u64 = 40; // a guess: one or two in a hundred at worst
/// The time until the next search for RTTmin, after a search found much less than was assumed. // a
/// guess
const LOOK_AGAIN: Span = Span::from_secs(1);
/// How many times that long RTTmin may remain without a sample near it, despite searches, before it is
/// dropped: the route has changed.
const LOOKS_IN_VAIN: u64 = 6;
/// How long a queue that others cause is left alone: the first time, and at most when it is doubled at
/// each repetition. // a guess: a web page's worth of competition, a song's
const YIELD_FOR: Span = Span::from_secs(10);
const YIELD_FOR_MAX: Span = Span::from_secs(160);
/// How long a path counts as bloated after it was held: networks on which the rate varies have a queue again soon.
const BLOATED_FOR: Span = Span::from_secs(60); // a guess
/// Rounds at one and a half times the target before the queue may be caused by others: the effect of a
/// lower rate shows in one or two.
const OVER_ROUNDS: u32 = 4;
/// Rounds near RTTmin after which the limit is lifted.
const CALM_ROUNDS: u32 = 4;
/// Round trips that draining the queue may take, in terms of those before: one until the queue is
/// empty, half of one until that is measured, the rest as a margin.
const DRAIN_RTTS: u64 = 3;
/// A round in which fewer bytes than an initial window (RFC 9002 §7.2) arrived is ignored.
const ROUND_BYTES_MIN: u64 = 12_000;

/// How many times RTTmin the round trip may grow: λ, in hundredths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DrwaLambda(u64);

impl DrwaLambda {
    /// The smallest λ: below this the path would run empty between two rounds. // a guess
    pub const MIN: DrwaLambda = DrwaLambda(125);
    /// The largest λ: from this value on the limit has no effect. // a guess
    pub const MAX: DrwaLambda = DrwaLambda(10_000);

    fn of(self, n: u64) -> u64 {
        (u128::from(n) * u128::from(self.0) / 100).min(u128::from(u64::MAX)) as u64
    }
}

impl Default for DrwaLambda {
    /// 3, as in the paper: lower values lost throughput on its varying links, higher values gained
    /// nothing.
    fn default() -> Self {
        DrwaLambda(300)
    }
}

impl FromStr for DrwaLambda {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number: f64 = text
            .parse()
            .map_err(|_| format!("`{text}` is no number, as 3 or 2.5 would be"))?;
        let hundredths = DrwaLambda((number * 100.0).round() as u64);
        if !(DrwaLambda::MIN.0..=DrwaLambda::MAX.0).contains(&hundredths.0) {
            return Err(format!(
                "{text} is not between {} and {}",
                DrwaLambda::MIN,
                DrwaLambda::MAX
            ));
        }
        Ok(hundredths)
    }
}

impl fmt::Display for DrwaLambda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0 as f64 / 100.0)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DrwaState {
    Open,
    Holding {
        over: u32,
        calm: u32,
    },
    Draining {
        /// Bytes that one round trip carries without a queue: the bandwidth-delay product.
        full: u64,
        until: Time,
        /// Whether no limit was in force before the search.
        open: bool,
        /// RTTmin before the search, and the shortest sample since it began.
        min: Span,
        best: Span,
        /// Whether the round trip had not reacted to the limit before the search.
        doubted: bool,
    },
    Yielding {
        until: Time,
    },
}

const HOLDING: DrwaState = DrwaState::Holding { over: 0, calm: 0 };

/// The receiver's estimate of one path, and the limit that follows from it.
///
/// ```
/// use d2tp_session::{Drwa, DrwaLambda, Span, Time};
/// let mut drwa = Drwa::new(DrwaLambda::default(), 6_000);
/// let mut now = Time::ZERO;
/// // 1 MB/s over 50 ms; then a queue makes it 400 ms.
/// for rtt in [50, 50, 400, 400, 400, 400] {
///     let rtt = Span::from_millis(rtt);
///     now += rtt;
///     drwa.on_bytes(1_000 * rtt.as_millis());
///     drwa.on_rtt(now, rtt);
/// }
/// let limit = drwa.limit().unwrap();
/// assert!(limit <= 3 * 50_000, "three times 50 ms of 1 MB/s, or less while it is averaged: {limit}");
/// ```
#[derive(Clone, Debug)]
pub struct Drwa {
    lambda: DrwaLambda,
    floor: u64,
    /// The wait in the queue below which the path is left alone, unless it was bloated a moment ago.
    wait_min: Span,
    /// When a limit was last in force for the sake of the queue.
    held_at: Option<Time>,
    state: DrwaState,
    /// When the current round began.
    round_at: Option<Time>,
    /// Bytes received in the current round.
    bytes: u64,
    /// The sum and the number of the round trip samples of the current round.
    samples: (Span, u64),
    /// The average of the bytes in flight.
    window: u64,
    min: Span,
    /// When a sample was last near RTTmin.
    min_near_at: Time,
    /// The smallest sample since `min_near_at`.
    min_since: Span,
    /// When RTTmin was last searched for, by this receiver or another one in the same queue.
    looked_at: Time,
    /// How long the next queue that others cause is left alone.
    yield_for: Span,
    limit: Option<u64>,
}

impl Drwa {
    /// The wait in a queue from which on a path counts as bloated, where nobody asked for a short queue there: somebody who
    /// talks or plays over the same link notices it.
    pub const BLOATED_WAIT: Span = Span::from_millis(100); // a guess: ITU-T G.114 allows 150 ms one way, for everything

    /// The control of a new path. No limit is below `floor` bytes: a sender must be able to detect
    /// losses.
    pub fn new(lambda: DrwaLambda, floor: u64) -> Self {
        Drwa {
            lambda,
            floor,
            wait_min: Span::ZERO,
            held_at: None,
            state: DrwaState::Open,
            round_at: None,
            bytes: 0,
            samples: (Span::ZERO, 0),
            window: 0,
            min: NEVER_MEASURED,
            min_near_at: Time::ZERO,
            min_since: NEVER_MEASURED,
            looked_at: Time::ZERO,
            yield_for: YIELD_FOR,
            limit: None,
        }
    }

    /// Leaves the path alone until a round trip is this much longer than RTTmin, whatever λ says. A path that was held in the
    /// last minute is bloated: then λ decides.
    #[must_use]
    pub fn only_beyond(mut self, wait_min: Span) -> Self {
        self.wait_min = wait_min;
        self
    }

    /// Forgets all measurements, because the path has another route now.
    pub fn reset(&mut self) {
        *self = Drwa::new(self.lambda, self.floor).only_beyond(self.wait_min);
    }

    /// The most bytes that the sender may have in flight; `None`: no limit.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// The current estimate of RTTmin, if there is one.
    pub fn rtt_min(&self) -> Option<Span> {
        (self.min != NEVER_MEASURED).then_some(self.min)
    }

    /// Whether enough has arrived since the last sample to spend a packet on another one.
    pub fn wants_sample(&self) -> bool {
        self.bytes >= self.round_bytes_min()
    }

    /// The bytes that make a round count. A sender under a limit sends few, and must be measured as
    /// well.
    fn round_bytes_min(&self) -> u64 {
        match self.state {
            DrwaState::Open => ROUND_BYTES_MIN,
            _ => 1,
        }
    }

    /// Records received bytes, in the unit in which the sender counts bytes in flight.
    pub fn on_bytes(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// Handles a shorter minimum round trip, which another path over the same link measured.
    pub fn on_rtt_min(&mut self, now: Time, rtt: Span) {
        if rtt < self.min {
            if near(rtt) < self.min {
                // The flow that drained the queue searches again at the same time as this one.
                self.looked_at = now;
            }
            self.min = rtt;
            self.min_near_at = now;
            self.min_since = NEVER_MEASURED;
        }
    }

    /// Handles a round trip sample, with the peer's ACK delay subtracted.
    pub fn on_rtt(&mut self, now: Time, rtt: Span) {
        let rtt = rtt.max(Span::from_nanos(1));
        self.on_rtt_min(now, rtt);
        if rtt <= near(self.min) {
            self.min_near_at = now;
            self.min_since = NEVER_MEASURED;
            self.yield_for = YIELD_FOR;
        } else {
            self.min_since = self.min_since.min(rtt);
        }
        if matches!(self.state, DrwaState::Draining { .. }) {
            return self.drain(now, rtt);
        }
        self.samples = (self.samples.0 + rtt, self.samples.1 + 1);
        let Some(began) = self.round_at else {
            // The time in which earlier bytes arrived is unknown.
            return self.begin_round(now);
        };
        let mean = self.samples.0.divided(self.samples.1);
        let elapsed = now.since(began);
        if elapsed >= mean.scaled(7, 8) && self.bytes >= self.round_bytes_min() {
            let received = ratio(self.bytes, mean, elapsed);
            self.begin_round(now);
            self.on_round(now, mean, received);
        } else if elapsed > mean.times(16) {
            // The sender had nothing to send.
            self.begin_round(now);
        }
    }

    fn begin_round(&mut self, now: Time) {
        self.round_at = Some(now);
        self.bytes = 0;
        self.samples = (Span::ZERO, 0);
    }

    /// Handles the end of a round: its mean round trip, and the bytes received in it.
    fn on_round(&mut self, now: Time, rtt: Span, received: u64) {
        self.window = match self.window {
            0 => received,
            window => (window / 8).saturating_mul(7).saturating_add(received / 8),
        };
        match self.state {
            // R-DRWA-1
            DrwaState::Open if rtt > self.engage_at(now) => {
                // The average lags behind a window that has grown until now.
                self.window = received;
                self.state = HOLDING;
            }
            DrwaState::Holding { over, calm } => self.hold(now, rtt, (over, calm)),
            DrwaState::Yielding { until } if until <= now => self.state = DrwaState::Open,
            DrwaState::Open | DrwaState::Draining { .. } | DrwaState::Yielding { .. } => {}
        }
        if let Some(doubted) = self.is_doubtful(now) {
            self.state = DrwaState::Draining {
                full: ratio(received, self.base(), rtt),
                until: now + rtt.times(DRAIN_RTTS),
                open: self.state == DrwaState::Open,
                min: self.min,
                best: NEVER_MEASURED,
                doubted,
            };
        }
        if matches!(self.state, DrwaState::Holding { .. }) {
            self.held_at = Some(now);
        }
        self.limit = match self.state {
            DrwaState::Open | DrwaState::Yielding { .. } => None,
            DrwaState::Draining { full, .. } => Some((full / 4 * 3).max(self.floor)),
            DrwaState::Holding { .. } => {
                // If the round trip falls faster than the average follows, the limit would be λ
                // times too high.
                let window = self.window.min(received / 4 * 5);
                let limit = self.lambda.of(ratio(window, self.base(), rtt));
                Some(limit.max(self.floor))
            }
        };
    }

    /// Handles a round in which the limit was in force.
    fn hold(&mut self, now: Time, rtt: Span, (over, calm): (u32, u32)) {
        let counted = |counts: bool, rounds: u32| if counts { rounds + 1 } else { 0 };
        let over = counted(rtt > self.aim().scaled(3, 2), over);
        let calm = counted(rtt <= self.base().scaled(5, 4), calm);
        self.state = DrwaState::Holding { over, calm };
        if calm >= CALM_ROUNDS {
            self.state = DrwaState::Open;
        } else if now.since(self.min_near_at) > self.seen_within().times(LOOKS_IN_VAIN) {
            // Searches did not find the old RTTmin any more, so the smallest sample since then
            // replaces it.
            self.min = self.min_since;
            self.min_near_at = now;
            self.min_since = NEVER_MEASURED;
        }
    }

    /// Whether RTTmin should be searched for; if so, whether other traffic may cause the queue.
    fn is_doubtful(&self, now: Time) -> Option<bool> {
        let over = matches!(self.state, DrwaState::Holding { over, .. } if over >= OVER_ROUNDS);
        let unseen = now.since(self.min_near_at.max(self.looked_at)) > self.seen_within();
        let looks = match self.state {
            // R-DRWA-4: a search would touch a path that is not bloated.
            DrwaState::Open => self.wait_min(now) == Span::ZERO,
            DrwaState::Holding { .. } => true,
            DrwaState::Draining { .. } | DrwaState::Yielding { .. } => false,
        };
        (looks && (over || unseen)).then_some(over)
    }

    /// A sample while the queue is being drained.
    fn drain(&mut self, now: Time, rtt: Span) {
        let DrwaState::Draining {
            full,
            until,
            open,
            min,
            best,
            doubted,
        } = &mut self.state
        else {
            return;
        };
        let falls = rtt < best.scaled(15, 16);
        *best = (*best).min(rtt);
        if (falls || *best > near(*min)) && now < *until {
            return;
        }
        let (full, open, min, best, doubted) = (*full, *open, *min, *best, *doubted);
        let others = doubted && best > self.aim();
        self.begin_round(now);
        self.looked_at = now;
        if near(best) < min {
            // The old value was not the path's own minimum, and the new one may not be either.
            self.looked_at = (now + LOOK_AGAIN) - self.seen_within();
            self.min_near_at = self.looked_at;
        }
        if others {
            let until = now + self.yield_for;
            self.yield_for = self.yield_for.times(2).min(YIELD_FOR_MAX);
            self.state = DrwaState::Yielding { until };
            self.limit = None;
        } else if open {
            self.state = DrwaState::Open;
            self.limit = None;
        } else {
            // Continue at the same rate, half way to the bytes in flight when the queue is there
            // again. The next round trips are still short, so the full value would be too much.
            let aim = self.lambda.of(full);
            self.window = (full + aim) / 2;
            self.limit = Some(aim.max(self.floor));
            self.state = HOLDING;
        }
    }

    /// How long RTTmin stays valid without a sample near it.
    fn seen_within(&self) -> Span {
        SEEN_WITHIN.max(self.aim().times(SEEN_WITHIN_RTTS))
    }

    /// The value of RTTmin used in calculations.
    fn base(&self) -> Span {
        self.min.max(RTT_MIN_FLOOR)
    }

    /// The target round trip.
    fn aim(&self) -> Span {
        Span::from_nanos(self.lambda.of(self.base().as_nanos()))
    }

    /// The round trip from which the path's queue counts as too long: half way to the target, or more where the path is
    /// to be left alone for longer.
    fn engage_at(&self, now: Time) -> Span {
        let half_way = (self.base() + self.aim()).divided(2);
        half_way.max(self.base() + self.wait_min(now))
    }

    /// The wait in the queue below which the path is left alone now.
    fn wait_min(&self, now: Time) -> Span {
        let is_bloated = |at| now.since(at) < BLOATED_FOR;
        match self.held_at.is_some_and(is_bloated) {
            true => Span::ZERO,
            false => self.wait_min,
        }
    }
}

const NEVER_MEASURED: Span = Span::from_nanos(u64::MAX);

/// The largest round trip that counts as near RTTmin.
fn near(min: Span) -> Span {
    min.max(RTT_MIN_FLOOR).scaled(9, 8)
}

fn ratio(bytes: u64, num: Span, den: Span) -> u64 {
    let scaled = u128::from(bytes) * u128::from(num.as_nanos()) / u128::from(den.as_nanos().max(1));
    scaled.min(u128::from(u64::MAX)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    const MS: Span = Span::from_millis(1);
    const PACKET: u64 = 1_000;
    const FLOOR: u64 = 4 * PACKET;
    /// 1 MB/s over 50 ms: the bandwidth-delay product is 50 kB.
    const PER_PACKET: Span = MS;
    const BASE: Span = Span::from_millis(50);
    const FULL: u64 = 50_000;

    /// A sender that doubles its window each round trip up to `window_max`, whatever the queue
    /// does, and a receiver that may limit it.
    struct Flow {
        window: u64,
        window_max: u64,
        begins: Time,
        in_flight: u64,
        drwa: Option<Drwa>,
        arrived: u64,
    }

    fn flow(window_max: u64, held: bool) -> Flow {
        Flow {
            window: 10 * PACKET,
            window_max,
            begins: Time::ZERO,
            in_flight: 0,
            drwa: held.then(|| Drwa::new(DrwaLambda::default(), FLOOR)),
            arrived: 0,
        }
    }

    /// Flows through one queue that drops nothing.
    struct Bottleneck {
        now: Time,
        flows: Vec<Flow>,
        per_packet: Span,
        busy_until: Time,
        /// Packets in flight: when each arrives, its flow, and when it was sent.
        flying: BinaryHeap<Reverse<(Time, usize, Time)>>,
        rtt: Span,
        begun: Vec<bool>,
    }

    impl Bottleneck {
        fn of(flows: Vec<Flow>) -> Self {
            Bottleneck {
                now: Time::ZERO,
                begun: vec![false; flows.len()],
                flows,
                per_packet: PER_PACKET,
                busy_until: Time::ZERO,
                flying: BinaryHeap::new(),
                rtt: BASE,
            }
        }

        fn send(&mut self, who: usize) {
            let flow = &mut self.flows[who];
            let limit = flow.drwa.as_ref().and_then(Drwa::limit);
            let allowed = flow.window.min(limit.unwrap_or(u64::MAX));
            while flow.in_flight + PACKET <= allowed {
                flow.in_flight += PACKET;
                self.busy_until = self.busy_until.max(self.now) + self.per_packet;
                // The propagation delay follows the queue; the answer takes no time.
                let arrives = self.busy_until + BASE;
                self.flying.push(Reverse((arrives, who, self.now)));
            }
        }

        fn run_for(&mut self, span: Span) -> &mut Self {
            let until = self.now + span;
            loop {
                for who in 0..self.flows.len() {
                    if !self.begun[who] && self.flows[who].begins <= self.now {
                        self.begun[who] = true;
                        self.send(who);
                    }
                }
                let begins = (self.flows.iter().zip(&self.begun))
                    .filter(|(_, begun)| !**begun)
                    .map(|(flow, _)| flow.begins)
                    .min();
                let next = self.flying.peek().map(|f| f.0.0);
                let at = next.into_iter().chain(begins).min().unwrap_or(until);
                if at >= until {
                    self.now = until;
                    return self;
                }
                self.now = at;
                if next != Some(at) {
                    continue;
                }
                let Reverse((_, who, sent)) = self.flying.pop().unwrap();
                let flow = &mut self.flows[who];
                flow.in_flight -= PACKET;
                flow.arrived += PACKET;
                flow.window = (flow.window + PACKET).min(flow.window_max);
                self.rtt = self.now.since(sent);
                if let Some(drwa) = &mut flow.drwa {
                    drwa.on_bytes(PACKET);
                    if drwa.wants_sample() || drwa.rtt_min().is_none() {
                        drwa.on_rtt(self.now, self.rtt);
                    }
                }
                self.send(who);
            }
        }

        fn limit(&self, who: usize) -> Option<u64> {
            self.flows[who].drwa.as_ref().unwrap().limit()
        }
        fn rtt_min(&self, who: usize) -> Span {
            self.flows[who].drwa.as_ref().unwrap().rtt_min().unwrap()
        }
    }

    fn bloated(held: bool) -> Bottleneck {
        Bottleneck::of(vec![flow(600_000, held)])
    }

    #[test]
    fn a_bloated_round_trip_falls_to_three_times_its_minimum_at_the_same_rate() {
        let mut without = bloated(false);
        without.run_for(Span::from_secs(9));
        assert!(without.rtt >= BASE.times(6), "{:?}", without.rtt);
        let mut with = bloated(true);
        with.run_for(Span::from_secs(9));
        assert!(with.rtt <= BASE.scaled(33, 10), "{:?}", with.rtt);
        assert!(with.rtt >= BASE.scaled(24, 10), "{:?}", with.rtt);
        let (with, without) = (with.flows[0].arrived, without.flows[0].arrived);
        assert!(with * 100 >= without * 99, "{with} of {without} bytes");
    }

    #[test]
    fn a_lower_lambda_makes_a_shorter_queue() {
        let mut with = bloated(true);
        with.flows[0].drwa = Some(Drwa::new("1.5".parse().unwrap(), FLOOR));
        with.run_for(Span::from_secs(9));
        assert!(with.rtt <= BASE.scaled(17, 10), "{:?}", with.rtt);
        assert!(with.flows[0].arrived > 8_800_000);
    }

    #[test]
    fn a_link_that_is_not_bloated_never_sees_a_limit() {
        // R-DRWA-1: a queue of a third of the bandwidth-delay product is not enough, nor is a
        // window that doubles.
        let mut path = Bottleneck::of(vec![flow(FULL * 4 / 3, true)]);
        for _ in 0..900 {
            path.run_for(MS.times(10));
            assert_eq!(path.limit(0), None, "at {:?}", path.now);
        }
        // From time to time the receiver measures whether that is a queue.
        let before = path.flows[0].arrived;
        path.run_for(Span::from_secs(30));
        let arrived = path.flows[0].arrived - before;
        assert!(arrived >= 29_700_000, "{arrived} of 30,000,000 bytes");
    }

    #[test]
    fn what_is_on_everywhere_leaves_a_path_alone_whose_queue_nobody_notices() {
        // R-DRWA-4: a queue of 90 ms is too long for λ, and no bloat.
        let noticed = Drwa::BLOATED_WAIT;
        for (window, is_bloated) in [(FULL * 14 / 5, false), (600_000, true)] {
            let mut path = Bottleneck::of(vec![flow(window, true)]);
            let drwa = path.flows[0].drwa.take().unwrap();
            path.flows[0].drwa = Some(drwa.only_beyond(noticed));
            let mut is_limited = false;
            for _ in 0..4_000 {
                path.run_for(MS.times(10));
                is_limited |= path.limit(0).is_some();
            }
            assert_eq!(is_limited, is_bloated, "{window}");
            let longest = if is_bloated { 4 } else { 3 };
            assert!(path.rtt <= BASE.times(longest), "{:?}", path.rtt);
        }
    }

    #[test]
    fn a_path_that_was_bloated_a_moment_ago_is_held_again_as_lambda_says() {
        // R-DRWA-4
        let mut path = bloated(true);
        let drwa = path.flows[0].drwa.take().unwrap();
        path.flows[0].drwa = Some(drwa.only_beyond(Drwa::BLOATED_WAIT));
        path.run_for(Span::from_secs(5));
        assert!(path.limit(0).is_some());
        // The queue goes, and the limit; then there is one of 90 ms.
        path.flows[0].window = 20 * PACKET;
        path.flows[0].window_max = 20 * PACKET;
        path.run_for(Span::from_secs(2));
        assert_eq!(path.limit(0), None);
        let grown = |path: &mut Bottleneck| {
            path.flows[0].window_max = FULL * 14 / 5;
            path.run_for(Span::from_secs(2));
            path.limit(0)
        };
        assert!(grown(&mut path).is_some());
        path.flows[0].window = 20 * PACKET;
        path.flows[0].window_max = 20 * PACKET;
        path.run_for(BLOATED_FOR + Span::from_secs(5));
        assert_eq!(path.limit(0), None);
        assert_eq!(grown(&mut path), None);
    }

    #[test]
    fn the_limit_is_lifted_when_the_queue_is_gone() {
        let mut path = bloated(true);
        path.run_for(Span::from_secs(5));
        assert!(path.limit(0).is_some());
        path.flows[0].window = 20 * PACKET;
        path.flows[0].window_max = 20 * PACKET;
        path.run_for(Span::from_secs(2));
        assert_eq!(path.limit(0), None);
    }

    #[test]
    fn a_rate_that_rises_is_used() {
        let mut path = bloated(true);
        path.run_for(Span::from_secs(5));
        path.per_packet = Span::from_micros(250);
        path.run_for(Span::from_secs(1));
        let before = path.flows[0].arrived;
        path.run_for(Span::from_secs(2));
        let arrived = path.flows[0].arrived - before;
        assert!(arrived >= 7_600_000, "{arrived} of 8,000,000 bytes");
        assert!(path.rtt <= BASE.scaled(33, 10), "{:?}", path.rtt);
    }

    #[test]
    fn a_rate_that_falls_is_followed() {
        let mut path = bloated(true);
        path.run_for(Span::from_secs(5));
        path.per_packet = MS.times(4);
        path.run_for(Span::from_secs(4));
        assert!(path.rtt <= BASE.times(4), "{:?}", path.rtt);
        assert!(matches!(
            path.flows[0].drwa.as_ref().unwrap().state,
            DrwaState::Holding { .. }
        ));
    }

    #[test]
    fn it_looks_for_the_minimum_every_ten_seconds_and_loses_little_by_it() {
        let mut path = bloated(true);
        path.run_for(Span::from_secs(9));
        let before = path.flows[0].arrived;
        let mut shortest = Span::MAX;
        for _ in 0..2_000 {
            path.run_for(MS.times(10));
            shortest = shortest.min(path.rtt);
        }
        assert!(shortest <= near(BASE), "{shortest:?}");
        let arrived = path.flows[0].arrived - before;
        assert!(arrived >= 19_600_000, "{arrived} of 20,000,000 bytes");
    }

    #[test]
    fn several_flows_in_one_queue_hold_it_together_at_what_one_would() {
        let flows = (0..4).map(|_| flow(150_000, true)).collect();
        let mut path = Bottleneck::of(flows);
        path.run_for(Span::from_secs(20));
        let mut longest = Span::ZERO;
        for _ in 0..100 {
            path.run_for(MS.times(10));
            longest = longest.max(path.rtt);
        }
        assert!(longest <= BASE.scaled(36, 10), "{longest:?}");
        let arrived: u64 = path.flows.iter().map(|f| f.arrived).sum();
        assert!(arrived >= 20_300_000, "{arrived} of 21,000,000 bytes");
    }

    /// The second flow joins when the first has its queue of two bandwidth-delay products.
    fn joined_late(known_minimum: bool) -> Bottleneck {
        let mut second = flow(300_000, true);
        second.begins = Time::ZERO + Span::from_secs(8);
        let mut path = Bottleneck::of(vec![flow(600_000, true), second]);
        path.run_for(Span::from_secs(8));
        if known_minimum {
            let (now, min) = (path.now, path.rtt_min(0));
            let second = path.flows[1].drwa.as_mut().unwrap();
            second.on_rtt_min(now, min);
        }
        path
    }

    #[test]
    fn a_late_joiner_takes_the_queue_for_the_way_and_nobody_is_held_then_for_its_sake() {
        let mut path = joined_late(false);
        path.run_for(Span::from_secs(2));
        // This is the weakness of the rule.
        assert!(path.rtt_min(1) >= BASE.times(2), "{:?}", path.rtt_min(1));
        let before = path.flows[0].arrived;
        path.run_for(Span::from_secs(30));
        let arrived = path.flows[0].arrived - before;
        assert!(arrived >= 10_000_000, "{arrived} of 30,000,000 bytes");
    }

    #[test]
    fn a_late_joiner_that_is_told_the_minimum_never_takes_more_than_its_part() {
        let mut path = joined_late(true);
        path.run_for(Span::from_secs(3));
        let mut longest = Span::ZERO;
        for _ in 0..100 {
            path.run_for(MS.times(10));
            longest = longest.max(path.rtt);
        }
        assert!(longest <= BASE.times(4), "{longest:?}");
    }

    #[test]
    fn in_a_queue_that_others_fill_it_does_not_give_its_share_away() {
        let mut path = Bottleneck::of(vec![flow(100_000, true), flow(600_000, false)]);
        path.run_for(Span::from_secs(60));
        let before = path.flows[0].arrived;
        path.run_for(Span::from_secs(60));
        let held = path.flows[0].arrived - before;
        // As in the published rule: always limited, whatever causes the queue.
        let mut alone = Bottleneck::of(vec![flow(100_000, false), flow(600_000, false)]);
        alone.run_for(Span::from_secs(60));
        let before = alone.flows[0].arrived;
        alone.run_for(Span::from_secs(60));
        let free = alone.flows[0].arrived - before;
        assert!(
            held * 2 >= free,
            "{held} bytes where {free} without a limit"
        );
    }

    #[test]
    fn no_limit_is_below_the_floor() {
        let mut path = bloated(true);
        path.per_packet = MS.times(400);
        path.run_for(Span::from_secs(60));
        assert_eq!(path.limit(0), Some(FLOOR));
    }

    #[test]
    fn what_was_known_of_one_way_is_not_held_against_another() {
        // R-DRWA-3
        let mut path = bloated(true);
        path.run_for(Span::from_secs(5));
        let drwa = path.flows[0].drwa.as_mut().unwrap();
        drwa.reset();
        assert_eq!((drwa.limit(), drwa.rtt_min()), (None, None));
        let mut now = path.now;
        for _ in 0..50 {
            now += BASE.times(5);
            drwa.on_bytes(250_000);
            drwa.on_rtt(now, BASE.times(5));
            assert_eq!(drwa.limit(), None, "five times as far is not bloated");
        }
    }

    #[test]
    fn a_round_trip_that_grew_for_good_is_believed_in_the_end() {
        let mut drwa = Drwa::new(DrwaLambda::default(), FLOOR);
        let mut now = Time::ZERO;
        drwa.on_rtt(now, BASE);
        let far = BASE.times(5);
        for _ in 0..600 {
            now += far;
            drwa.on_bytes(100_000);
            drwa.on_rtt(now, far);
        }
        assert_eq!(drwa.rtt_min(), Some(far));
        assert_eq!(drwa.limit(), None);
    }

    #[test]
    fn lambda_is_a_number_within_reason() {
        assert_eq!("3".parse(), Ok(DrwaLambda::default()));
        assert_eq!("2.5".parse::<DrwaLambda>().unwrap().of(100), 250);
        for wrong in ["1", "0", "-3", "1e9", "nan", "much"] {
            assert!(wrong.parse::<DrwaLambda>().is_err(), "{wrong}");
        }
    }
}
