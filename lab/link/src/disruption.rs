//! A model of TCP on a link with outages: how long a connection waits after each outage, and its
//! throughput.
//!
//! ```text
//!  link  ██████████│           outage            │████████████████
//!  TCP   ███████████ T0 ┊ 2 T0  ┊     4 T0      ┊  ·  ·  8 T0  ·  ·  ┊▁▂▄█
//!                       ▲       ▲               ▲│                   ▲ first packet that gets through
//!                       timeouts, L_k = (2^k − 1) T0                 │
//!                                    T_d ────────┘     t_w ──────────┘
//! ```
//!
//! The model follows Soroush et al. (Epsilon), who use Padhye's sums (SIGCOMM 1998): timeouts
//! double, so the wait t_w after an outage of length T_d is the rest of the last one. Two of their
//! equations are corrected here (docs/repro/E1.md): k is the least number with L_k ≥ T_d, so
//!
//! ```text
//!  t_w = (2^⌈log2(T_d / T0 + 1)⌉ − 1) T0 − T_d        (theirs has 2^…·T0: too large by T0)
//! ```
//!
//! and without a second link nothing is carried in an outage. In addition to theirs: if t_w is
//! longer than the stay, the timeout falls into the next outage and doubles again, which a rate of
//! (T_O − t_w) cannot express; the window begins with one segment and doubles each round trip; and
//! a tail loss probe (RFC 8985 §7) precedes the first timeout and restarts it, as in Linux.

use d2tp_time::{Span, Time};

use crate::holes::Holes;

/// The initial window of a connection in segments (RFC 6928).
const WINDOW_INITIAL: u64 = 10;

/// A TCP connection whose sender always has data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Disruption {
    /// The rate while the link is available, in payload bytes per second.
    pub rate: f64,
    /// The round-trip time.
    pub rtt: Span,
    /// Payload bytes of a segment.
    pub segment: u64,
    /// T0: the first timeout.
    pub timeout: Span,
    /// The longest timeout: 64 T0 in the model as published, 120 s in Linux.
    pub timeout_max: Span,
    /// The time from the last acknowledgement to a tail loss probe; zero without probes.
    pub probe: Span,
}

impl Disruption {
    /// L_k: the time from the beginning of the outage to the `k`-th timeout.
    pub fn timeouts_last(&self, k: u32) -> Span {
        let mut timeout = self.timeout;
        let mut sum = self.probe;
        for _ in 0..k {
            sum = sum + timeout;
            timeout = timeout.times(2).min(self.timeout_max);
        }
        sum
    }

    /// k: the number of timeouts until the connection resumes after an outage of this length.
    pub fn timeouts(&self, hole: Span) -> u32 {
        (1..)
            .find(|k| self.timeouts_last(*k) >= hole)
            .expect("timeouts are longer than nothing")
    }

    /// t_w: how long the connection waits after an outage.
    pub fn waits(&self, hole: Span) -> Span {
        self.timeouts_last(self.timeouts(hole)).saturating_sub(hole)
    }

    /// The bytes carried over a link with these outages, from the first moment at which the link is
    /// available.
    pub fn carries(&self, holes: &Holes) -> f64 {
        let way = self.rtt.divided(2);
        let first = holes.iter().next().filter(|(from, _)| *from == Time::ZERO);
        let mut at = first.map_or(Time::ZERO, |(_, to)| to);
        let (mut bytes, mut window) = (0.0, WINDOW_INITIAL);
        while let Some(until) = holes.stay_until(at) {
            bytes += self.fills(until.since(at), window);
            window = 1;
            // The last acknowledgement that passed is half a round trip old when it arrives.
            let heard = until + way;
            let through = |at: &Time| holes.stay_until(*at).is_some_and(|until| *at + way < until);
            let end = Time::ZERO + holes.length();
            let tries = (1..).map(|k| heard + self.timeouts_last(k));
            let tries = std::iter::once(heard + self.probe).chain(tries);
            let next = tries.take_while(|at| *at < end).find(through);
            let Some(next) = next else { break };
            at = next;
        }
        bytes
    }

    /// The bytes carried in a stay of this length that begins with a window of this many segments.
    fn fills(&self, stay: Span, window: u64) -> f64 {
        let whole = self.rate * self.rtt.as_secs_f64();
        let mut window = (window * self.segment) as f64;
        let (mut left, mut bytes) = (stay, 0.0);
        while window < whole {
            if left <= self.rtt {
                return bytes + window.min(self.rate * left.as_secs_f64());
            }
            bytes += window;
            left = left.saturating_sub(self.rtt);
            window *= 2.0;
        }
        bytes + self.rate * left.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::holes::DurationModel;

    const S: Span = Span::from_secs(1);
    const MS: Span = Span::from_millis(1);

    fn at(s: u64) -> Time {
        Time::ZERO + S.times(s)
    }

    /// The model as published: no probe, at most 64 T0.
    fn published(timeout: Span) -> Disruption {
        Disruption {
            rate: 325_000.0,
            rtt: MS.times(100),
            segment: 1_448,
            timeout,
            timeout_max: timeout.times(64),
            probe: Span::ZERO,
        }
    }

    #[test]
    fn the_wait_is_what_is_left_of_the_last_timeout() {
        let tcp = published(S);
        // L: 1, 3, 7, 15, 31, 63, then 64 more each.
        for (hole, k, waits) in [(1, 1, 0), (2, 2, 1), (3, 2, 0), (4, 3, 3), (16, 5, 15)] {
            assert_eq!(tcp.timeouts(S.times(hole)), k, "{hole} s");
            assert_eq!(tcp.waits(S.times(hole)), S.times(waits), "{hole} s");
        }
        for (hole, k, waits) in [(63, 6, 0), (64, 7, 63), (127, 7, 0), (128, 8, 63)] {
            assert_eq!(tcp.timeouts(S.times(hole)), k, "{hole} s");
            assert_eq!(tcp.waits(S.times(hole)), S.times(waits), "{hole} s");
        }
    }

    #[test]
    fn the_closed_forms_are_the_published_ones_with_t0_taken_off_the_first() {
        let t0 = MS.times(300);
        let tcp = published(t0);
        for hole_ms in (1_000..120_000).step_by(777) {
            let ratio = hole_ms as f64 / 300.0;
            let by_t0 = if ratio <= 63.0 {
                // Published: 2^(⌈log2(ratio + 1) − 1⌉ + 1) − ratio, without the last − 1.
                ((ratio + 1.0).log2() - 1.0).ceil().exp2() * 2.0 - 1.0 - ratio
            } else {
                63.0 + 64.0 * (((ratio + 321.0) / 64.0).ceil() - 6.0) - ratio
            };
            let waits = tcp.waits(MS.times(hole_ms)).as_millis_f64();
            assert!(
                (waits - by_t0 * 300.0).abs() < 0.01,
                "{hole_ms} ms: {waits}"
            );
        }
    }

    #[test]
    fn a_hole_costs_itself_the_wait_and_a_slow_start() {
        let tcp = published(S);
        let whole = Holes::none(S.times(60));
        let hole = Holes::of(S.times(60), vec![(at(10), at(15))]);
        // The third timeout: 7 s and half a round trip after 10 s, which is 2 s after the outage.
        let missing = tcp.carries(&whole) - tcp.carries(&hole);
        let (away, half) = (tcp.rate * 7.0, tcp.rate * 0.05);
        let slow_start = missing - away - half;
        assert!(
            slow_start > 0.0 && slow_start < tcp.rate * 0.5,
            "{slow_start}"
        );
    }

    #[test]
    fn a_timeout_that_falls_into_the_next_hole_doubles_again() {
        let tcp = published(S);
        // Stays of 4 s, outages of 32 s. The last packet arrived at 4.05 s, so it tries at 5.05,
        // 7.05, 11.05, 19.05, 35.05, 67.05 and 131.05; the link is available from 36, 72, 108 and
        // 144 s on.
        let holes = (0..4).map(|n| (at(4 + 36 * n), at(36 + 36 * n)));
        let holes = Holes::of(S.times(148), holes.collect());
        assert_eq!(tcp.carries(&holes), tcp.fills(S.times(4), WINDOW_INITIAL));
    }

    #[test]
    fn a_probe_restarts_the_first_timeout() {
        let mut tcp = published(S);
        tcp.probe = MS.times(200);
        assert_eq!(tcp.waits(S.times(2)), MS.times(1_200));
        // The probe may itself pass.
        let short = Holes::of(S.times(60), vec![(at(10), at(10) + MS.times(150))]);
        let whole = Holes::none(S.times(60));
        let missing = tcp.carries(&whole) - tcp.carries(&short);
        assert!(missing < tcp.rate, "{missing}");
    }

    #[test]
    fn longer_holes_carry_less_than_their_share() {
        let tcp = published(MS.times(300));
        let mut before = 1.0;
        for gap in [5, 10, 20] {
            let evenly = DurationModel::Evenly(S.times(30));
            let holes = Holes::drawn(
                1,
                evenly,
                DurationModel::Always(S.times(gap)),
                S.times(86_400),
            );
            let share = tcp.carries(&holes) / tcp.rate / holes.there().as_secs_f64();
            assert!(share < before, "{gap} s: {share}");
            before = share;
        }
    }
}
