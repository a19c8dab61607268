//! A receiver that keeps the sender's queue short by moving its own window (DRWA: Jiang, Wang, Lee
//! and Rhee, "Tackling Bufferbloat in 3G/4G Networks", IMC 2012).
//!
//! What arrives in a round trip is what was in flight a round trip ago, queue and all. Once a round:
//!
//! ```text
//!   window ← 7/8 window + 1/8 bytes received in the round
//!   limit  ← λ · (RTTmin / RTT) · window            = λ · RTTmin · rate, whatever the queue holds
//! ```
//!
//! so a full queue is drawn down to λ − 1 bandwidth-delay products, and a rate that doubles still
//! finds packets waiting. This module only computes; a D2TP path says the limit as PATH_LIMIT, a
//! kernel TCP socket as its window clamp.
//!
//! The published rule holds always and keeps RTTmin for ever. Here it has states:
//!
//! ```text
//!           RTT > (1 + λ)/2 · RTTmin             RTTmin not seen for 10 s, or
//!   Open ──────────────────────────▶ Holding ─── the round trip does not give way ──▶ Draining
//!    ▲ ▲      4 rounds at 5/4 RTTmin    │  ▲                                           │   │
//!    │ └────────────────────────────────┘  └────────── the round trip gave way ────────┘   │
//!    └── after 10 s ── Yielding ◀──────────────── it did not: the queue is others' ────────┘
//! ```
//!
//! - *Open*: no limit. A link that is not bloated never sees one, and slow start is not slowed (the
//!   average trails a doubling window by so much that 3 times it would be less than the window).
//! - *Draining*: three quarters of a bandwidth-delay product, for as long as a round trip takes to
//!   show it: what is left of the round trip then is not our queue. A flow that joined late learns
//!   RTTmin this way, and so does everybody who shares the queue at that moment.
//! - *Yielding*: somebody else fills the queue. Who holds back there only gives its share away.

use std::fmt;
use std::str::FromStr;

use d2tp_time::{Span, Time};

/// Round trips below this count as this much: three times as long a queue bothers nobody, and
/// timers and batches of the ends alone make as much. // a guess
const RTT_MIN_FLOOR: Span = Span::from_millis(10);
/// RTTmin is looked for when no sample came near it for so long. // as BBR's, RFC draft ccwg-bbr §5.3.4
const SEEN_WITHIN: Span = Span::from_secs(10);
/// And forgotten after so long, drained for in vain: the way is another. // a guess
const MIN_KEPT: Span = Span::from_secs(60);
/// How long a queue of others is left alone. // a guess: a web page's worth of competition
const YIELD_FOR: Span = Span::from_secs(10);
/// Rounds at half as much again as aimed for before the queue may be others'. Eight averages of 1/8
/// move the window by two thirds.
const OVER_ROUNDS: u32 = 8;
/// Rounds near RTTmin until the limit is lifted.
const CALM_ROUNDS: u32 = 4;
/// Round trips a drain may take, as long as they were before: one until what is in the queue is gone,
/// half of one until that shows, the rest to spare.
const DRAIN_RTTS: u64 = 3;
/// A round in which no more arrived than a sender may send unasked (RFC 9002 §7.2) says nothing.
const ROUND_BYTES_MIN: u64 = 12_000;

/// How many times RTTmin the round trip may grow: λ, in hundredths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lambda(u64);

impl Lambda {
    /// At least this, or the pipe would run empty between two rounds. // a guess
    pub const MIN: Lambda = Lambda(125);
    /// Beyond this it limits nothing worth limiting. // a guess
    pub const MAX: Lambda = Lambda(10_000);

    fn of(self, n: u64) -> u64 {
        (u128::from(n) * u128::from(self.0) / 100).min(u128::from(u64::MAX)) as u64
    }
}

impl Default for Lambda {
    /// 3, as in the paper: less lost throughput on its varying links, more gained nothing.
    fn default() -> Self {
        Lambda(300)
    }
}

impl FromStr for Lambda {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number: f64 = text
            .parse()
            .map_err(|_| format!("`{text}` is no number, as 3 or 2.5 would be"))?;
        let hundredths = Lambda((number * 100.0).round() as u64);
        if !(Lambda::MIN.0..=Lambda::MAX.0).contains(&hundredths.0) {
            return Err(format!(
                "{text} is not between {} and {}",
                Lambda::MIN,
                Lambda::MAX
            ));
        }
        Ok(hundredths)
    }
}

impl fmt::Display for Lambda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0 as f64 / 100.0)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Open,
    Holding {
        over: u32,
        calm: u32,
    },
    Draining {
        /// What one round trip without a queue carries.
        full: u64,
        until: Time,
        best: Span,
        /// The round trip did not give way to the limit before.
        doubted: bool,
    },
    Yielding {
        until: Time,
    },
}

const HOLDING: State = State::Holding { over: 0, calm: 0 };

/// The receiver's estimate of one path, and the limit that follows from it.
///
/// ```
/// use d2tp_session::{Drwa, Lambda, Span, Time};
/// let mut drwa = Drwa::new(Lambda::default(), 6_000);
/// let mut now = Time::ZERO;
/// // 1 MB/s over 50 ms; then a queue makes it 400 ms.
/// for rtt in [50, 50, 400, 400, 400, 400] {
///     let rtt = Span::from_millis(rtt);
///     now += rtt;
///     drwa.on_bytes(1_000 * rtt.as_millis());
///     drwa.on_rtt(now, rtt);
/// }
/// let limit = drwa.limit().unwrap();
/// assert!(limit < 3 * 50_000, "three times 50 ms of 1 MB/s, or less while it is averaged: {limit}");
/// ```
#[derive(Clone, Debug)]
pub struct Drwa {
    lambda: Lambda,
    floor: u64,
    state: State,
    /// When the round under way began, what arrived in it, and its samples: their sum and number.
    round_at: Option<Time>,
    bytes: u64,
    samples: (Span, u64),
    /// What is in flight, averaged.
    window: u64,
    min: Span,
    /// When a sample was last near it, and the smallest since then.
    min_near_at: Time,
    min_since: Span,
    limit: Option<u64>,
}

impl Drwa {
    /// Of a path of which nothing is known. No limit is below `floor` bytes: a sender must be able
    /// to notice its losses.
    pub fn new(lambda: Lambda, floor: u64) -> Self {
        Drwa {
            lambda,
            floor,
            state: State::Open,
            round_at: None,
            bytes: 0,
            samples: (Span::ZERO, 0),
            window: 0,
            min: NEVER_MEASURED,
            min_near_at: Time::ZERO,
            min_since: NEVER_MEASURED,
            limit: None,
        }
    }

    /// The path leads elsewhere now.
    pub fn reset(&mut self) {
        *self = Drwa::new(self.lambda, self.floor);
    }

    /// The most bytes that may be in flight; none: as many as the sender sees fit.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// The smallest round trip believed in, if any was measured.
    pub fn rtt_min(&self) -> Option<Span> {
        (self.min != NEVER_MEASURED).then_some(self.min)
    }

    /// Whether so much has arrived since the last sample that another one is worth a packet.
    pub fn asks(&self) -> bool {
        self.bytes >= ROUND_BYTES_MIN || matches!(self.state, State::Draining { .. })
    }

    /// Bytes arrived, in the measure in which the sender counts what is in flight.
    pub fn on_bytes(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// Somebody on the same link knows of a shorter round trip.
    pub fn on_rtt_min(&mut self, now: Time, rtt: Span) {
        if rtt < self.min {
            self.min = rtt;
            self.min_near_at = now;
            self.min_since = NEVER_MEASURED;
        }
    }

    /// A sample of the round trip, what the peer held back taken off.
    pub fn on_rtt(&mut self, now: Time, rtt: Span) {
        let rtt = rtt.max(Span::from_nanos(1));
        self.on_rtt_min(now, rtt);
        if rtt <= near(self.min) {
            self.min_near_at = now;
            self.min_since = NEVER_MEASURED;
        } else {
            self.min_since = self.min_since.min(rtt);
        }
        if matches!(self.state, State::Draining { .. }) {
            return self.drain(now, rtt);
        }
        self.samples = (self.samples.0 + rtt, self.samples.1 + 1);
        let Some(began) = self.round_at else {
            // What came before the first sample came in no known time.
            return self.begin_round(now);
        };
        let mean = self.samples.0.divided(self.samples.1);
        let elapsed = now.since(began);
        if elapsed >= mean.scaled(7, 8) && self.bytes >= ROUND_BYTES_MIN {
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

    /// A round ended: its mean round trip, and what arrived in one of these.
    fn on_round(&mut self, now: Time, rtt: Span, received: u64) {
        self.window = match self.window {
            0 => received,
            window => (window / 8).saturating_mul(7).saturating_add(received / 8),
        };
        match self.state {
            State::Open if rtt > self.engage_at() => {
                // The average trails a window that has grown so far.
                self.window = received;
                self.state = HOLDING;
            }
            State::Holding { over, calm } => self.hold(now, rtt, received, (over, calm)),
            State::Yielding { until } if until <= now => self.state = State::Open,
            State::Open | State::Draining { .. } | State::Yielding { .. } => {}
        }
        self.limit = match self.state {
            State::Open | State::Yielding { .. } => None,
            State::Draining { full, .. } => Some((full / 4 * 3).max(self.floor)),
            State::Holding { .. } => {
                // A round trip that falls faster than the average follows would let λ times too much go.
                let window = self.window.min(received / 4 * 5);
                let limit = self.lambda.of(ratio(window, self.base(), rtt));
                Some(limit.max(self.floor))
            }
        };
    }

    fn hold(&mut self, now: Time, rtt: Span, received: u64, (over, calm): (u32, u32)) {
        let over = if rtt > self.aim().scaled(3, 2) {
            over + 1
        } else {
            0
        };
        let calm = if rtt <= self.base().scaled(5, 4) {
            calm + 1
        } else {
            0
        };
        self.state = State::Holding { over, calm };
        let unseen = now.since(self.min_near_at);
        if calm >= CALM_ROUNDS {
            self.state = State::Open;
        } else if unseen > MIN_KEPT {
            // Drains did not find it any more: what they found is the shortest there is.
            self.min = self.min_since;
            self.min_near_at = now;
            self.min_since = NEVER_MEASURED;
        } else if over >= OVER_ROUNDS || unseen > SEEN_WITHIN {
            self.state = State::Draining {
                full: ratio(received, self.base(), rtt),
                until: now + rtt.times(DRAIN_RTTS),
                best: NEVER_MEASURED,
                doubted: over >= OVER_ROUNDS,
            };
        }
    }

    /// A sample while the queue is being drained.
    fn drain(&mut self, now: Time, rtt: Span) {
        let State::Draining {
            full,
            until,
            best,
            doubted,
        } = &mut self.state
        else {
            return;
        };
        *best = (*best).min(rtt);
        if *best > near(self.min) && now < *until {
            return;
        }
        let (full, best, doubted) = (*full, *best, *doubted);
        let others = doubted && best > self.aim();
        self.begin_round(now);
        if others {
            let until = now + YIELD_FOR;
            self.state = State::Yielding { until };
            self.limit = None;
        } else {
            // On at the same rate, half way to what will be in flight when the queue is there again:
            // the next round trips are still short ones, and would make the whole of it too much.
            self.window = (full + self.lambda.of(full)) / 2;
            self.limit = Some(self.lambda.of(full).max(self.floor));
            self.state = HOLDING;
        }
    }

    /// RTTmin as it is reckoned with.
    fn base(&self) -> Span {
        self.min.max(RTT_MIN_FLOOR)
    }

    /// What the round trip may come to.
    fn aim(&self) -> Span {
        Span::from_nanos(self.lambda.of(self.base().as_nanos()))
    }

    /// From where on a path counts as bloated: half way there.
    fn engage_at(&self) -> Span {
        (self.base() + self.aim()).divided(2)
    }
}

const NEVER_MEASURED: Span = Span::from_nanos(u64::MAX);

/// What counts as having seen RTTmin again.
fn near(min: Span) -> Span {
    min.max(RTT_MIN_FLOOR).scaled(9, 8)
}

fn ratio(bytes: u64, num: Span, den: Span) -> u64 {
    let scaled = u128::from(bytes) * u128::from(num.as_nanos()) / u128::from(den.as_nanos().max(1));
    scaled.min(u128::from(u64::MAX)) as u64
}
