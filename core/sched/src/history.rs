//! The history of a link, from the device's own use of it: how long it carries, how long it does
//! not, and at which rate.
//!
//! ```text
//!  carries      ▁▂▅▅▃▁          ▁▃▅▅▅     periods that ended: their lengths and mean rates
//!  does not  ───      ──────────     ─▶   the current one: its age, the recent and the long-term rate
//! ```
//!
//! A link that is up but carries nothing of what is sent over it counts as down. The history
//! contains only observations: of a link that was never used it knows only whether it is up.

use crate::forecast::ForecastHint;
use crate::link_choice::{FREE_RATE_FIRST_BYTES_PER_S, LinkClass, METERED_RATE_FIRST_BYTES_PER_S};
use d2tp_time::{Span, Time};
use std::collections::VecDeque;

/// How long a link in use may carry no byte before it counts as stalled. // a guess: a long round trip
const DEAD_AFTER_S: f64 = 2.0;

/// The most up and down periods remembered. Higher: the past counts longer.
pub const SPELLS_MAX: usize = 32;

/// The seconds of use over which the recent rate is averaged. // tuned: docs/repro/score.md
const LATELY_S: f64 = 8.0;

/// The seconds of use over which the long-term rate is averaged.
const WHOLE_S: f64 = 100.0; // tuned in the same way

/// The seconds of use after which confidence in the rates is one half. // a guess
const KNOWN_S: f64 = 5.0; // a guess

/// The least weight of an observation in seconds: a probe is short. // a guess
const LOOK_S: f64 = 1.0;

/// A link's state, and what it carried since the last observation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkObservation {
    /// Whether the link is attached according to the system.
    pub up: bool,
    /// Payload carried.
    pub bytes: u64,
    /// How long there was payload for the link.
    pub busy: Span,
}

/// A period in which a link carried data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpPeriod {
    /// Length of the period in seconds.
    pub length_s: f64,
    /// The mean rate of the period in bytes per second.
    pub rate: f64,
}

/// The history of one link.
#[derive(Debug, Clone)]
pub struct LinkHistory {
    class: LinkClass,
    seen_at: Option<Time>,
    up: bool,
    /// Whether the link carries data, as far as is known.
    on: bool,
    /// Since when the link is up, or down.
    since: Time,
    /// How long the link has been in use without a byte.
    silent_s: f64,
    /// Bytes in this period.
    carried: BytesCarried,
    ons: VecDeque<UpPeriod>,
    offs: VecDeque<f64>,
    lately: DecayingMean,
    whole: DecayingMean,
    measured_at: Option<Time>,
    hint: ForecastHint,
    /// How long before `since` the link was down already, if the history was restored.
    away_before_s: f64,
}

/// The rate of a network that no link is on at present.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NetworkRates {
    /// The mean rate in bytes per second.
    pub whole: f64,
    /// The seconds of use that the mean covers, weighted towards the latest.
    pub known_s: f64,
}

/// The saved form of a link's history.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SavedHistory {
    /// Past up periods.
    pub ons: Vec<UpPeriod>,
    /// Lengths of past down periods in seconds.
    pub offs: Vec<f64>,
    /// How long the link had been down when the history was saved; `None` if it was up.
    pub away_s: Option<f64>,
}

#[derive(Debug, Clone, Copy, Default)]
struct BytesCarried {
    bytes: f64,
    busy_s: f64,
}

/// An exponentially decaying mean.
#[derive(Debug, Clone, Copy, Default)]
struct DecayingMean {
    sum: f64,
    weight: f64,
}

impl DecayingMean {
    fn add(&mut self, value: f64, weight: f64, span: f64) {
        // (1 + w/s)^-1 decays like an exponential for small steps, and needs no exponential
        // function.
        let keep = 1.0 / (1.0 + weight / span);
        self.sum = self.sum * keep + value * weight;
        self.weight = self.weight * keep + weight;
    }

    fn value(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }
}

impl LinkHistory {
    /// An empty history.
    pub fn new(class: LinkClass) -> LinkHistory {
        LinkHistory {
            class,
            seen_at: None,
            up: false,
            on: false,
            since: Time::ZERO,
            silent_s: 0.0,
            carried: BytesCarried::default(),
            ons: VecDeque::new(),
            offs: VecDeque::new(),
            lately: DecayingMean::default(),
            whole: DecayingMean::default(),
            measured_at: None,
            hint: ForecastHint::default(),
            away_before_s: 0.0,
        }
    }

    /// A history restored from its saved form. Its link counts as down until it is observed.
    pub fn recall(now: Time, class: LinkClass, past: &SavedHistory) -> LinkHistory {
        let mut history = LinkHistory::new(class);
        let is_length = |length: &f64| length.is_finite() && *length >= 0.0;
        let is_spell = |spell: &&UpPeriod| is_length(&spell.length_s) && is_length(&spell.rate);
        for spell in past.ons.iter().filter(is_spell) {
            remember(&mut history.ons, *spell);
        }
        for length in past.offs.iter().filter(|length| is_length(length)) {
            remember(&mut history.offs, *length);
        }
        history.away_before_s = past.away_s.filter(is_length).unwrap_or(0.0);
        (history.seen_at, history.since) = (Some(now), now);
        history
    }

    /// The history in its saved form.
    pub fn saved(&self, now: Time) -> SavedHistory {
        SavedHistory {
            ons: self.ons.iter().copied().collect(),
            offs: self.offs.iter().copied().collect(),
            away_s: (!self.on).then(|| self.age_s(now)),
        }
    }

    /// The rate of the link's network.
    pub fn rates(&self) -> NetworkRates {
        NetworkRates {
            whole: self.whole.value().unwrap_or(0.0),
            known_s: self.whole.weight,
        }
    }

    /// Records that the link is on another network, whose rate is known.
    pub fn switch_network(&mut self, rates: NetworkRates) {
        let is_known = rates.known_s.is_finite() && rates.whole.is_finite() && rates.whole >= 0.0;
        self.whole = match is_known && rates.known_s > 0.0 {
            true => DecayingMean {
                sum: rates.whole * rates.known_s,
                weight: rates.known_s,
            },
            false => DecayingMean::default(),
        };
        (self.lately, self.measured_at, self.silent_s) = (DecayingMean::default(), None, 0.0);
    }

    /// Handles an observation.
    pub fn observe(&mut self, now: Time, observation: &LinkObservation) {
        let busy_s = observation.busy.as_secs_f64();
        if busy_s > 0.0 {
            let rate = observation.bytes as f64 / busy_s;
            if observation.bytes > 0 {
                self.silent_s = 0.0;
            } else {
                self.silent_s += busy_s;
            }
            self.lately.add(rate, busy_s.max(LOOK_S), LATELY_S);
            if observation.bytes > 0 || self.on {
                self.whole.add(rate, busy_s.max(LOOK_S), WHOLE_S);
            }
            self.measured_at = Some(now);
        }
        if !self.up || !observation.up {
            self.silent_s = 0.0;
            self.lately = DecayingMean::default();
        }
        let dead = self.silent_s >= DEAD_AFTER_S;
        let on = observation.up && !dead && (observation.bytes > 0 || self.on || !self.up);
        if self.seen_at.is_none() {
            self.since = now;
        } else if on != self.on {
            self.turn(now);
        }
        if on {
            self.carried.bytes += observation.bytes as f64;
            self.carried.busy_s += busy_s;
        }
        self.on = on;
        self.up = observation.up;
        self.seen_at = Some(now);
    }

    /// Sets the forecast, which applies until the next one.
    pub fn set_hint(&mut self, hint: ForecastHint) {
        self.hint = hint;
    }

    pub(crate) fn hint(&self) -> &ForecastHint {
        &self.hint
    }

    fn turn(&mut self, now: Time) {
        let length_s = self.age_s(now);
        if self.on {
            // A period without use does not show how long the link would have carried.
            if self.carried.busy_s > 0.0 && self.carried.bytes > 0.0 {
                let rate = self.carried.bytes / self.carried.busy_s;
                remember(&mut self.ons, UpPeriod { length_s, rate });
            }
        } else {
            remember(&mut self.offs, length_s);
        }
        self.carried = BytesCarried::default();
        self.since = now;
        self.away_before_s = 0.0;
    }

    /// Sets the link's cost class.
    pub fn set_class(&mut self, class: LinkClass) {
        self.class = class;
    }

    /// The link's cost class.
    pub fn class(&self) -> LinkClass {
        self.class
    }

    /// Whether the link is attached.
    pub fn is_up(&self) -> bool {
        self.up
    }

    /// Whether the link is attached and carries, as far as is known.
    pub fn carries(&self) -> bool {
        self.on
    }

    /// How long the link has been up, or down.
    pub fn age_s(&self, now: Time) -> f64 {
        now.since(self.since).as_secs_f64() + self.away_before_s
    }

    /// The rate of the last seconds of use in this period, if any.
    pub fn recent_rate(&self) -> Option<f64> {
        self.lately.value()
    }

    /// The larger of the recent and the long-term rate.
    pub(crate) fn best_known_rate(&self) -> f64 {
        self.long_term_rate().max(self.recent_rate().unwrap_or(0.0))
    }

    /// The rate over all use, weighted towards the last minutes; an assumed rate if there was no
    /// use.
    pub fn long_term_rate(&self) -> f64 {
        self.whole.value().unwrap_or(match self.class {
            LinkClass::Free => FREE_RATE_FIRST_BYTES_PER_S,
            LinkClass::Metered | LinkClass::Roaming => METERED_RATE_FIRST_BYTES_PER_S,
        })
    }

    /// The confidence in the rates, from 0 (never used) to nearly 1.
    pub fn confidence(&self) -> f64 {
        self.whole.weight / (self.whole.weight + KNOWN_S)
    }

    /// The seconds since the link was last used: infinite if it never was, and very long if only
    /// earlier use of its network is known.
    pub fn unused_s(&self, now: Time) -> f64 {
        let never = match self.whole.weight > 0.0 {
            true => f64::MAX,
            false => f64::INFINITY,
        };
        self.measured_at
            .map_or(never, |at| now.since(at).as_secs_f64())
    }

    /// Completed up periods.
    pub fn up_periods(&self) -> &VecDeque<UpPeriod> {
        &self.ons
    }

    /// Lengths of completed down periods in seconds.
    pub fn down_periods(&self) -> &VecDeque<f64> {
        &self.offs
    }
}

fn remember<T>(past: &mut VecDeque<T>, one: T) {
    if past.len() == SPELLS_MAX {
        past.pop_front();
    }
    past.push_back(one);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn see(history: &mut LinkHistory, from_s: u64, seconds: u64, up: bool, rate: Option<u64>) {
        for n in 1..=seconds {
            let observation = LinkObservation {
                up,
                bytes: rate.unwrap_or(0),
                busy: Span::from_secs(u64::from(rate.is_some())),
            };
            history.observe(Time::ZERO + Span::from_secs(from_s + n), &observation);
        }
    }

    #[test]
    fn spells_that_ended_are_remembered_with_their_rate() {
        let mut history = LinkHistory::new(LinkClass::Free);
        see(&mut history, 0, 10, true, Some(1_000));
        see(&mut history, 10, 20, false, None);
        see(&mut history, 30, 5, true, Some(3_000));
        let on = history.up_periods()[0];
        assert!((on.length_s - 10.0).abs() <= 1.0, "{on:?}");
        assert_eq!(on.rate, 1_000.0);
        assert_eq!(history.down_periods().len(), 1);
        assert!((history.down_periods()[0] - 20.0).abs() <= 1.0);
        assert!((history.age_s(Time::from_secs_f64(35.0)) - 4.0).abs() <= 1.0);
        // Of this up period only.
        assert_eq!(history.recent_rate(), Some(3_000.0));
        assert!(history.long_term_rate() > 1_000.0 && history.long_term_rate() < 3_000.0);
    }

    #[test]
    fn a_link_that_is_up_and_carries_nothing_counts_as_away() {
        let mut history = LinkHistory::new(LinkClass::Free);
        see(&mut history, 0, 10, true, Some(1_000));
        see(&mut history, 10, 5, true, Some(0));
        assert!(history.is_up() && !history.carries());
        see(&mut history, 15, 1, true, Some(1_000));
        assert!(history.carries());
    }

    #[test]
    fn what_was_never_used_has_an_assumed_rate_and_no_spells() {
        let mut history = LinkHistory::new(LinkClass::Metered);
        see(&mut history, 0, 10, true, None);
        see(&mut history, 10, 10, false, None);
        assert_eq!(history.long_term_rate(), METERED_RATE_FIRST_BYTES_PER_S);
        assert_eq!(history.confidence(), 0.0);
        assert!(history.up_periods().is_empty());
        assert!(history.unused_s(Time::from_secs_f64(20.0)).is_infinite());
    }

    #[test]
    fn what_is_recalled_goes_on_where_it_was_and_what_is_no_number_is_left_out() {
        let mut history = LinkHistory::new(LinkClass::Free);
        see(&mut history, 0, 10, true, Some(1_000));
        see(&mut history, 10, 20, false, None);
        see(&mut history, 30, 5, true, Some(1_000));
        see(&mut history, 35, 100, false, None);
        let mut past = history.saved(Time::from_secs_f64(135.0));
        assert!((past.away_s.expect("away") - 100.0).abs() <= 1.0);
        past.away_s = Some(3_600.0);
        past.offs.push(f64::NAN);
        // The clock starts again after a restart of the machine.
        let mut again = LinkHistory::recall(Time::from_secs_f64(5.0), LinkClass::Free, &past);
        assert_eq!(
            (again.up_periods().len(), again.down_periods().len()),
            (2, 1)
        );
        assert_eq!(again.age_s(Time::from_secs_f64(65.0)), 3_660.0);
        assert!(!again.carries());
        see(&mut again, 65, 1, true, None);
        assert!(again.carries() && again.age_s(Time::from_secs_f64(66.0)) < 1.0);
        assert_eq!(again.down_periods().back().map(|s| *s as u64), Some(3_661));
    }

    #[test]
    fn another_network_has_rates_of_its_own_and_the_spells_stay() {
        let mut history = LinkHistory::new(LinkClass::Free);
        see(&mut history, 0, 10, true, Some(1_000));
        let home = history.rates();
        history.switch_network(NetworkRates::default());
        assert_eq!((history.confidence(), history.recent_rate()), (0.0, None));
        see(&mut history, 10, 10, true, Some(9_000));
        assert!(
            (history.long_term_rate() - 9_000.0).abs() < 1.0,
            "{}",
            history.long_term_rate()
        );
        history.switch_network(home);
        assert!((history.long_term_rate() - 1_000.0).abs() < 1.0);
        assert!(history.confidence() > 0.5 && history.carries());
    }

    #[test]
    fn no_more_spells_are_kept_than_the_limit() {
        let mut history = LinkHistory::new(LinkClass::Free);
        for n in 0..100 {
            see(&mut history, 2 * n, 1, true, Some(1));
            see(&mut history, 2 * n + 1, 1, false, None);
        }
        assert_eq!(history.up_periods().len(), SPELLS_MAX);
        assert_eq!(history.down_periods().len(), SPELLS_MAX);
    }
}
