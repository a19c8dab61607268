//! Strategies that save energy: which links the device uses among those that its policy permits.
//!
//! ```text
//!  all ──10 s──▶ the one with the most bits per joule ──100 s──▶ all ──10 s──▶ …      ProbeThenPick
//!  at each moment the one with the most, now or over the next seconds                 ForesightStrategy
//!  those with enough bits per joule                                    d2tp_sched's EnergyPolicy
//! ```
//!
//! The first is by Raciu et al., *Opportunistic Mobility with Multipath TCP* (MobiArch 2011), the
//! second is their omniscient one, damped or not; the third is ours.

use cedos_lab_link::{Span, Time};
use d2tp_sched::energy_policy::{self, EnergyPolicy, RadioPowerModel};

pub use d2tp_sched::energy_policy::LinkSample;

/// A strategy that chooses links.
pub trait Strategy {
    /// The links to use now, one entry for each of `samples`.
    fn pick(&mut self, now: Time, samples: &[LinkSample]) -> Vec<bool>;

    /// The time after which the strategy is called again; it is also called at every event of a
    /// link.
    fn again(&self) -> Span {
        Span::from_millis(500)
    }
}

impl Strategy for EnergyPolicy {
    fn pick(&mut self, now: Time, samples: &[LinkSample]) -> Vec<bool> {
        EnergyPolicy::pick(self, now, samples)
    }

    fn again(&self) -> Span {
        energy_policy::SAMPLE
    }
}

/// A strategy that always chooses the same links.
#[derive(Clone, Debug)]
pub struct FixedStrategy(pub Vec<bool>);

impl Strategy for FixedStrategy {
    fn pick(&mut self, _: Time, _: &[LinkSample]) -> Vec<bool> {
        self.0.clone()
    }
}

/// How long Raciu et al. probe all links.
pub const PROBE: Span = Span::from_secs(10);
/// How long the strategy stays with the best link.
pub const STAY: Span = Span::from_secs(100);

/// Uses all links for [`PROBE`], then the one with the most bits per joule for [`STAY`].
///
/// Details that the paper leaves open: the tail does not count (as in its scheduler), and if the
/// chosen link is lost, all available ones are used for the rest of its time.
#[derive(Clone, Debug)]
pub struct ProbeThenPick {
    draws: Vec<RadioPowerModel>,
    /// When the current probe began, and the links' bytes by then.
    probe: Option<(Time, Vec<u64>)>,
    pick: usize,
    until: Time,
}

impl ProbeThenPick {
    /// Creates the strategy for links with these power models.
    pub fn new(draws: Vec<RadioPowerModel>) -> ProbeThenPick {
        ProbeThenPick {
            draws,
            probe: None,
            pick: 0,
            until: Time::ZERO,
        }
    }

    /// The link with the most bits per joule since the probe began.
    fn best(&self, began: Time, now: Time, before: &[u64], samples: &[LinkSample]) -> usize {
        let seconds = now.since(began).as_secs_f64();
        let worth = |n: usize| {
            let bits = (samples[n].bytes - before[n]) as f64 * 8.0;
            self.draws[n].bits_per_joule(bits / seconds)
        };
        let links = (0..samples.len()).filter(|n| samples[*n].up);
        let best = links.max_by(|a, b| worth(*a).total_cmp(&worth(*b)));
        best.unwrap_or(self.pick)
    }
}

impl Strategy for ProbeThenPick {
    fn pick(&mut self, now: Time, samples: &[LinkSample]) -> Vec<bool> {
        match &self.probe {
            Some((began, before)) if now >= *began + PROBE => {
                self.pick = self.best(*began, now, before, samples);
                self.until = now + STAY;
                self.probe = None;
            }
            None if now >= self.until => {
                let bytes = samples.iter().map(|sample| sample.bytes).collect();
                self.probe = Some((now, bytes));
            }
            _ => {}
        }
        let all = self.probe.is_some() || !samples[self.pick].up;
        (0..samples.len()).map(|n| all || n == self.pick).collect()
    }
}

/// The rates of the links from a time on.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// The time from which the choice holds.
    pub from: Time,
    /// The rate of each link in bits per second; 0 if it is not available.
    pub bits_per_s: Vec<f64>,
}

/// Uses the one link with the most bits per joule, with knowledge of all future rates.
#[derive(Clone, Debug)]
pub struct ForesightStrategy {
    draws: Vec<RadioPowerModel>,
    forecasts: Vec<Forecast>,
    /// The span over which the strategy averages; zero means the current rate.
    damping: Span,
    pick: usize,
}

impl ForesightStrategy {
    /// Creates the strategy for links with these power models and rates.
    pub fn new(
        draws: Vec<RadioPowerModel>,
        forecasts: Vec<Forecast>,
        damping: Span,
    ) -> ForesightStrategy {
        ForesightStrategy {
            draws,
            forecasts,
            damping,
            pick: 0,
        }
    }

    /// Bits per joule of a link over `span` from `now` on.
    fn worth(&self, link: usize, now: Time, span: Span) -> f64 {
        let end = now + span;
        let mut bits = 0.0;
        for (n, forecast) in self.forecasts.iter().enumerate() {
            let until = self.forecasts.get(n + 1).map_or(Time::NEVER, |f| f.from);
            let shared = until.min(end).since(forecast.from.max(now));
            bits += forecast.bits_per_s[link] * shared.as_secs_f64();
        }
        self.draws[link].bits_per_joule(bits / span.as_secs_f64())
    }
}

impl Strategy for ForesightStrategy {
    fn pick(&mut self, now: Time, samples: &[LinkSample]) -> Vec<bool> {
        let span = self.damping.max(self.again());
        let worth = |n: usize| self.worth(n, now, span);
        let links = (0..samples.len()).filter(|n| samples[*n].up);
        let best = links.max_by(|a, b| worth(*a).total_cmp(&worth(*b)));
        self.pick = best.unwrap_or(self.pick);
        (0..samples.len()).map(|n| n == self.pick).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two radios that both use one watt and nothing else.
    fn draws() -> Vec<RadioPowerModel> {
        let watt = RadioPowerModel {
            wake_joules: 0.0,
            work_watts: 1.0,
            byte_joules: 0.0,
            tail_joules: 0.0,
        };
        vec![watt; 2]
    }

    fn at(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    fn samples(bytes: [u64; 2], up: [bool; 2]) -> Vec<LinkSample> {
        std::iter::zip(bytes, up)
            .map(|(bytes, up)| LinkSample {
                up,
                attachment: 0,
                bytes,
            })
            .collect()
    }

    #[test]
    fn what_the_probe_found_best_is_kept_for_its_time() {
        let mut strategy = ProbeThenPick::new(draws());
        let up = [true; 2];
        assert_eq!(strategy.pick(at(0.0), &samples([0; 2], up)), [true, true]);
        let found = samples([1_000, 2_000], up);
        assert_eq!(strategy.pick(at(9.9), &found), [true, true]);
        assert_eq!(strategy.pick(at(10.0), &found), [false, true]);
        let later = samples([1_000, 2_100], up);
        assert_eq!(strategy.pick(at(109.9), &later), [false, true]);
        assert_eq!(strategy.pick(at(110.0), &later), [true, true]);
        // Only what came in the probe counts.
        let again = samples([1_200, 2_150], up);
        assert_eq!(strategy.pick(at(120.0), &again), [true, false]);
    }

    #[test]
    fn a_pick_that_goes_is_replaced_until_its_time_is_over() {
        let mut strategy = ProbeThenPick::new(draws());
        strategy.pick(at(0.0), &samples([0; 2], [true; 2]));
        let gone = samples([9, 0], [false, true]);
        strategy.pick(at(10.0), &samples([9, 0], [true; 2]));
        assert_eq!(strategy.pick(at(20.0), &gone), [true, true]);
        let back = samples([9, 0], [true; 2]);
        assert_eq!(strategy.pick(at(30.0), &back), [true, false]);
    }

    #[test]
    fn foresight_takes_the_better_link_and_damped_ignores_a_moment() {
        let forecast = |from, rates: [f64; 2]| Forecast {
            from: at(from),
            bits_per_s: rates.to_vec(),
        };
        let course = vec![
            forecast(0.0, [2e6, 1e6]),
            forecast(10.0, [0.5e6, 1e6]),
            forecast(15.0, [4e6, 1e6]),
        ];
        let there = samples([0; 2], [true; 2]);
        let mut omniscient = ForesightStrategy::new(draws(), course.clone(), Span::ZERO);
        assert_eq!(omniscient.pick(at(9.0), &there), [true, false]);
        assert_eq!(omniscient.pick(at(12.0), &there), [false, true]);
        assert_eq!(omniscient.pick(at(15.0), &there), [true, false]);
        let mut damped = ForesightStrategy::new(draws(), course, Span::from_secs(20));
        assert_eq!(damped.pick(at(12.0), &there), [true, false]);
        let gone = samples([0; 2], [false, true]);
        assert_eq!(damped.pick(at(12.0), &gone), [false, true]);
    }
}
