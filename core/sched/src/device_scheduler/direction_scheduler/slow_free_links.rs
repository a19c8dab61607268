//! Detects free links that are too slow for the policy `any`, so that metered ones are used beside
//! them.
//!
//! ```text
//!            slow for SLOW_FOR              at least GAIN times as much moves
//!  Suffice ────────────────────▶ Trial ─────────────────────────────────────▶ Together
//!     ▲                            │ no more moves: the program or                │  │
//!     │                            ▼ the origin is slow, not the links            │  │
//!     ├──── rest is over ──────  Rest ◀───────────────────────────────────────────┘  │
//!     └──── free links are fast enough again, or nothing moves ◀─────────────────────┘
//! ```
//!
//! The traffic of a program shows the rate of a link only if the program has more to send. So when
//! a link looks slow, both kinds of links are used for a few seconds. Unless much more moves then,
//! metered links are not used for a while, each time for longer.

use d2tp_time::{Span, Time};

/// The share of the metered links' rate below which free links count as too slow.
const SLOW_SHARE: f64 = 0.25; // a guess: people pay to avoid waiting four times as long
/// The share of the metered links' rate from which free links suffice again.
const ENOUGH_SHARE: f64 = 0.5; // a guess: twice SLOW_SHARE, so that the state does not flap
/// The rate in bytes per second from which free links are never too slow.
const FAST_ENOUGH_BYTES_PER_S: f64 = 625_000.0; // a guess: 5 Mb/s, a video in HD
/// How long free links must be too slow before both kinds are tried, and fast enough before free
/// links are used alone again.
const SLOW_FOR: Span = Span::from_secs(5); // a guess: longer than a fade or a handover of Wi-Fi
/// How long both kinds of links are tried.
const TRIAL: Span = Span::from_secs(5); // a guess: a handshake, and a slow start over a long path
/// The beginning of a trial that does not count, as the metered link starts slowly.
const TRIAL_STARTS: Span = Span::from_secs(2); // a guess
/// The factor by which traffic must grow in a trial.
const GAIN: f64 = 2.0; // a guess
/// The factor by which traffic over both kinds must stay above that over free links alone.
const GAIN_KEPT: f64 = 1.5; // a guess: below GAIN, so that the state does not flap
/// The time over which traffic is averaged for [`GAIN_KEPT`].
const GAIN_OVER: Span = Span::from_secs(10); // a guess
/// How long nothing may move before free links are used alone again.
const IDLE: Span = Span::from_secs(10); // a guess: as long as a radio stays awake
/// The first rest after a trial that did not help; each following one is twice as long.
const REST_FIRST: Span = Span::from_secs(60); // a guess
/// The longest rest.
const REST_MAX: Span = Span::from_secs(3_840); // a guess: about an hour

/// Traffic and rates of the links in an epoch.
#[derive(Debug, Clone, Copy)]
pub(super) struct EpochTraffic {
    pub(super) length: Span,
    /// Payload bytes on all links.
    pub(super) bytes: u64,
    /// Bytes per second of the free links that carry, if they were measured.
    pub(super) free_rate: Option<f64>,
    /// Bytes per second of the metered links that carry, an assumed rate if they were never used;
    /// `None` if there are none.
    pub(super) metered_rate: Option<f64>,
}

/// Decides whether free links suffice for flows whose policy is `any`.
#[derive(Debug)]
pub(super) struct SlowFreeLinks {
    phase: SpeedPhase,
    /// The rate of the free links, in bytes per second.
    free_rate: f64,
    /// The length of the next rest.
    rest: Span,
    moved_at: Time,
}

#[derive(Debug, Clone, Copy)]
enum SpeedPhase {
    /// Free links are used alone. `slow_for`: how long they have been too slow.
    Suffice { slow_for: Span },
    /// Both kinds are tried. `alone`: the rate of free links before the trial.
    Trial {
        since: Time,
        alone: f64,
        counted: TrafficCount,
    },
    /// Both kinds are used.
    Together {
        alone: f64,
        counted: TrafficCount,
        fast_for: Span,
    },
    /// Metered links did not help, and are not used until then.
    Rest { until: Time },
}

/// Bytes within a time.
#[derive(Debug, Clone, Copy, Default)]
struct TrafficCount {
    bytes: u64,
    span: Span,
}

impl TrafficCount {
    fn add(&mut self, epoch: &EpochTraffic) {
        self.bytes += epoch.bytes;
        self.span = self.span + epoch.length;
    }

    fn rate(&self) -> f64 {
        self.bytes as f64 / self.span.as_secs_f64().max(0.1)
    }
}

impl Default for SlowFreeLinks {
    fn default() -> SlowFreeLinks {
        SlowFreeLinks {
            phase: SUFFICE,
            free_rate: 0.0,
            rest: REST_FIRST,
            moved_at: Time::ZERO,
        }
    }
}

const SUFFICE: SpeedPhase = SpeedPhase::Suffice {
    slow_for: Span::ZERO,
};

impl SlowFreeLinks {
    /// The rate of the free links in bytes per second while metered ones are used beside them;
    /// `None` otherwise.
    pub(super) fn rate(&self) -> Option<f64> {
        match self.phase {
            SpeedPhase::Suffice { .. } | SpeedPhase::Rest { .. } => None,
            SpeedPhase::Trial { .. } | SpeedPhase::Together { .. } => Some(self.free_rate),
        }
    }

    /// Handles the links' traffic in the epoch that ends now.
    pub(super) fn observe(&mut self, now: Time, epoch: &EpochTraffic) {
        if epoch.bytes > 0 {
            self.moved_at = now;
        }
        let (Some(free), Some(metered)) = (epoch.free_rate, epoch.metered_rate) else {
            // With only one kind of links there is no choice.
            self.phase = match self.phase {
                rest @ SpeedPhase::Rest { .. } => rest,
                _ => SUFFICE,
            };
            return;
        };
        self.free_rate = free;
        let is_slow = free < FAST_ENOUGH_BYTES_PER_S && free < SLOW_SHARE * metered;
        let is_enough = free >= FAST_ENOUGH_BYTES_PER_S || free >= ENOUGH_SHARE * metered;
        let is_idle = now.since(self.moved_at) >= IDLE;
        self.phase = match self.phase {
            SpeedPhase::Suffice { slow_for } if is_slow && epoch.bytes > 0 => {
                let slow_for = slow_for + epoch.length;
                match slow_for >= SLOW_FOR {
                    true => SpeedPhase::Trial {
                        since: now,
                        alone: free,
                        counted: TrafficCount::default(),
                    },
                    false => SpeedPhase::Suffice { slow_for },
                }
            }
            // An epoch without traffic says nothing.
            suffices @ SpeedPhase::Suffice { .. } if epoch.bytes == 0 && !is_idle => suffices,
            SpeedPhase::Suffice { .. } => SUFFICE,
            SpeedPhase::Trial {
                since,
                alone,
                mut counted,
            } => {
                if now.since(since) > TRIAL_STARTS {
                    counted.add(epoch);
                }
                match now.since(since) >= TRIAL {
                    true if counted.rate() >= GAIN * alone => {
                        self.rest = REST_FIRST;
                        SpeedPhase::Together {
                            alone,
                            counted: TrafficCount::default(),
                            fast_for: Span::ZERO,
                        }
                    }
                    true => self.take_rest(now),
                    false => SpeedPhase::Trial {
                        since,
                        alone,
                        counted,
                    },
                }
            }
            SpeedPhase::Together {
                alone,
                mut counted,
                fast_for,
            } => {
                counted.add(epoch);
                let fast_for = match is_enough {
                    true => fast_for + epoch.length,
                    false => Span::ZERO,
                };
                let is_over = counted.span >= GAIN_OVER;
                if is_idle || fast_for >= SLOW_FOR {
                    SUFFICE
                } else if is_over && counted.rate() < GAIN_KEPT * alone {
                    self.take_rest(now)
                } else {
                    SpeedPhase::Together {
                        alone,
                        counted: if is_over {
                            TrafficCount::default()
                        } else {
                            counted
                        },
                        fast_for,
                    }
                }
            }
            SpeedPhase::Rest { until } if now < until => SpeedPhase::Rest { until },
            SpeedPhase::Rest { .. } => SUFFICE,
        };
    }

    fn take_rest(&mut self, now: Time) -> SpeedPhase {
        let until = now + self.rest;
        self.rest = (self.rest + self.rest).min(REST_MAX);
        SpeedPhase::Rest { until }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a device second by second: each kind of link has a rate, and the program needs
    /// one.
    struct Course {
        links: SlowFreeLinks,
        now: Time,
        paid: u64,
    }

    impl Course {
        fn new() -> Course {
            Course {
                links: SlowFreeLinks::default(),
                now: Time::from_secs_f64(1_000.0),
                paid: 0,
            }
        }

        /// Simulates seconds. Returns in how many of them metered links were used.
        fn pass(&mut self, seconds: u64, free: u64, metered: u64, wanted: u64) -> u64 {
            let mut together = 0;
            for _ in 0..seconds {
                self.now += Span::from_secs(1);
                let uses_both = self.links.rate().is_some();
                together += u64::from(uses_both);
                let by_free = wanted.min(free);
                let by_metered = match uses_both {
                    true => (wanted - by_free).min(metered),
                    false => 0,
                };
                self.paid += by_metered;
                let traffic = EpochTraffic {
                    length: Span::from_secs(1),
                    bytes: by_free + by_metered,
                    free_rate: Some(by_free as f64),
                    metered_rate: Some(metered as f64),
                };
                self.links.observe(self.now, &traffic);
            }
            together
        }
    }

    const ALL: u64 = u64::MAX;

    #[test]
    fn a_free_link_that_crawls_is_helped_within_seconds_and_one_that_is_fast_never() {
        let mut course = Course::new();
        let together = course.pass(60, 37_000, 375_000, ALL);
        assert!((53..=56).contains(&together), "{together}");
        // 5 Mb/s suffice beside a link ten times as fast, and so does half of the other link's
        // rate.
        assert_eq!(Course::new().pass(600, 700_000, 7_000_000, ALL), 0);
        assert_eq!(Course::new().pass(600, 150_000, 300_000, ALL), 0);
    }

    #[test]
    fn a_program_that_wants_little_is_not_taken_for_a_slow_link() {
        let mut course = Course::new();
        // Speech at 16 kB/s over a Wi-Fi that could carry a hundred times as much.
        let together = course.pass(3_600, 1_600_000, 375_000, 16_000);
        assert_eq!(course.paid, 0);
        assert!(together < 40, "{together}");
    }

    #[test]
    fn free_links_are_alone_again_when_they_suffice_or_nothing_moves() {
        let mut course = Course::new();
        course.pass(20, 37_000, 375_000, ALL);
        assert!(course.links.rate().is_some());
        course.pass(6, 2_000_000, 375_000, ALL);
        assert_eq!(course.links.rate(), None);
        course.pass(20, 37_000, 375_000, ALL);
        assert!(course.links.rate().is_some());
        course.pass(12, 37_000, 375_000, 0);
        assert_eq!(course.links.rate(), None);
    }

    #[test]
    fn a_link_between_the_two_thresholds_does_not_flap() {
        let mut course = Course::new();
        let changes = (0..600).filter(|second| {
            let before = course.links.rate().is_some();
            let free = if second % 4 < 2 { 70_000 } else { 130_000 };
            course.pass(1, free, 375_000, ALL);
            course.links.rate().is_some() != before
        });
        assert!(changes.count() <= 2);
    }
}
