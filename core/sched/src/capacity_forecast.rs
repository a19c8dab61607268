//! Forecast of the bytes that the links will carry until a point in time, as a distribution.
//!
//! ```text
//!  history of each link ─▶ SCENES futures: ─▶ at each horizon, sorted: bytes over free links
//!                          stay, go, return;                           bytes over all links
//!                          a rate for each
//! ```
//!
//! Each scenario draws how long every link stays up or down, and at which rate it carries: from
//! this device's history of the link and, while that is short, from an assumed distribution.
//! Lengths are heavy-tailed: a period that has lasted long will probably last as long again. The
//! draws are deterministic: equal histories give equal forecasts.

use crate::forecast::SLOT_S;
use crate::history::LinkHistory;
use crate::link_choice::LinkClass;
use d2tp_time::{Span, Time};

/// The number of simulated scenarios of the links' future. Higher: finer probabilities, slower.
pub const SCENES: usize = 128;

/// Assumptions about a link class, for links without observations.
#[derive(Debug, Clone, Copy)]
struct LinkPrior {
    /// Median length of an up period, in seconds.
    on_s: f64,
    /// Median length of a down period, in seconds.
    off_s: f64,
    /// The weight of the assumption, in observed periods.
    weight: f64,
    /// The variation of rates, relative to cellular links.
    spread: f64,
}

// tuned: docs/repro/score.md
const FREE: LinkPrior = LinkPrior {
    on_s: 55.0,
    off_s: 12.0,
    weight: 2.0,
    spread: 0.8,
};
// guesses: cellular coverage has few and short gaps
const METERED: LinkPrior = LinkPrior {
    on_s: 3000.0,
    off_s: 5.0,
    weight: 2.0,
    spread: 1.0,
};

/// The rate of the next seconds, relative to the recent rate: 17 quantiles, one for each sixteenth.
// measured: half of the recorded cellular links, three seconds compared with the following 5 to 45
const SOON: [f64; 17] = [
    0.1, 0.54, 0.66, 0.75, 0.81, 0.87, 0.92, 0.96, 1.0, 1.05, 1.11, 1.18, 1.3, 1.45, 1.7, 2.2, 3.0,
];
/// The rate over longer times, relative to the mean of the recent and the long-term rate: 17
/// quantiles, one for each sixteenth.
// measured in the same way, compared with the following 45 to 400 seconds
const LATER: [f64; 17] = [
    0.1, 0.40, 0.52, 0.61, 0.69, 0.77, 0.84, 0.91, 0.97, 1.04, 1.11, 1.18, 1.27, 1.4, 1.6, 1.9, 2.6,
];
/// How long the recent rate predicts more than the long-term rate, in seconds. // a guess
const SOON_S: f64 = 30.0;

/// The variation of the rate of a network that was never measured (standard deviation of its
/// logarithm).
const UNKNOWN_SPREAD: f64 = 0.8; // fits the promises of docs/repro/score.md

/// The most changes between up and down per scenario. Higher: more exact for the distant future,
/// slower.
const TURNS_MAX: u32 = 24; // enough for many of them to average out

/// The weight, in days, of the possibility that today resembles no known day.
const DAYS_WEIGHT: f64 = 1.0;

/// The lowest factor by which a rate may be scaled. // a guess
const TIMES_MIN: f64 = 0.02; // a guess

/// What the links will carry until each horizon.
#[derive(Debug, Clone)]
pub struct CapacityForecast {
    /// Bytes that free links carry until each horizon: one value per scenario, ascending.
    free: Vec<[f64; SCENES]>,
    all: Vec<[f64; SCENES]>,
}

impl CapacityForecast {
    /// Simulates the links from their histories, up to these horizons: seconds from now, ascending.
    pub fn new(
        now: Time,
        links: &[LinkHistory],
        horizons: impl Iterator<Item = f64>,
    ) -> CapacityForecast {
        CapacityForecast::over(now, links, &|_| true, horizons)
    }

    /// Simulates those of the links that `is_used` names by their place, as [`CapacityForecast::new`] does.
    pub fn over(
        now: Time,
        links: &[LinkHistory],
        is_used: &dyn Fn(usize) -> bool,
        horizons: impl Iterator<Item = f64>,
    ) -> CapacityForecast {
        let horizons: Vec<f64> = horizons.collect();
        let mut free = vec![[0.0; SCENES]; horizons.len()];
        let mut all = free.clone();
        let used = links.iter().enumerate().filter(|(n, _)| is_used(*n));
        for (n, link) in used {
            let into = match link.class() {
                LinkClass::Free => &mut free,
                LinkClass::Metered => &mut all,
                LinkClass::Roaming => continue,
            };
            let away = away_from_here(link);
            let mut draw = |scene: usize| {
                let chance = QuasiRandom::new(n, scene);
                play(now, link, &away, chance, &horizons, |k, bytes| {
                    into[k][scene] += bytes;
                });
            };
            (0..SCENES).for_each(&mut draw);
        }
        for (all, free) in all.iter_mut().zip(&mut free) {
            for (all, free) in all.iter_mut().zip(free.iter()) {
                *all += free;
            }
            all.sort_unstable_by(f64::total_cmp);
            free.sort_unstable_by(f64::total_cmp);
        }
        CapacityForecast { free, all }
    }

    /// The probability that free links alone carry `bytes` until a horizon.
    pub fn free_reach(&self, horizon: usize, bytes: f64) -> f64 {
        1.0 - below(&self.free[horizon], bytes)
    }

    /// The probability that all links together carry less than `bytes` until a horizon.
    pub fn all_short_of(&self, horizon: usize, bytes: f64) -> f64 {
        below(&self.all[horizon], bytes)
    }

    /// The median of the bytes that all links together carry until a horizon.
    pub fn all_median(&self, horizon: usize) -> f64 {
        self.all[horizon][SCENES / 2]
    }

    /// The mean of what remains of `bytes` after free links have carried what they can until a
    /// horizon.
    pub fn left_over(&self, horizon: usize, bytes: f64) -> f64 {
        let over = |free: &f64| (bytes - free).max(0.0);
        self.free[horizon].iter().map(over).sum::<f64>() / SCENES as f64
    }

    /// The quantile, for this share of the scenarios, of what remains of `bytes` after free links
    /// have carried what they can until a horizon.
    pub fn left_over_at_most(&self, horizon: usize, bytes: f64, share: f64) -> f64 {
        let n = ((1.0 - share) * SCENES as f64) as usize;
        (bytes - self.free[horizon][n.min(SCENES - 1)]).max(0.0)
    }
}

impl LinkHistory {
    /// The probability that the link comes back within a span; 0 while it is up.
    pub fn returns_within(&self, now: Time, span: Span) -> f64 {
        if self.carries() {
            return 0.0;
        }
        let (law, age) = (law_of(self.class()), self.age_s(now));
        let until = age + span.as_secs_f64();
        let away = away_from_here(self);
        let longer = away.iter().filter(|length| **length > age);
        // As in `residual`: each past length counts as half to one and a half times as long.
        let by_then = |length: &f64| {
            let least = age.max(0.5 * length);
            ((until - least) / (1.5 * length - least)).clamp(0.0, 1.0)
        };
        let general = law.weight * law.off_s / (law.off_s + age);
        let (count, past) = (
            longer.clone().count() as f64,
            longer.map(by_then).sum::<f64>(),
        );
        let lomax = 1.0 - (law.off_s + age) / (law.off_s + until);
        (past + general * lomax) / (count + general)
    }
}

fn law_of(class: LinkClass) -> LinkPrior {
    match class {
        LinkClass::Free => FREE,
        LinkClass::Metered | LinkClass::Roaming => METERED,
    }
}

fn below(ascending: &[f64; SCENES], bytes: f64) -> f64 {
    ascending.partition_point(|b| *b < bytes) as f64 / SCENES as f64
}

/// Lengths in seconds of past down periods that began at this location; those of all locations if
/// none are known here.
fn away_from_here(link: &LinkHistory) -> Vec<f64> {
    match &link.hint().away_s {
        here if here.is_empty() => link.down_periods().iter().copied().collect(),
        here => here.clone(),
    }
}

/// Simulates one link in one scenario, and reports the bytes carried until each horizon.
fn play(
    now: Time,
    link: &LinkHistory,
    away: &[f64],
    mut chance: QuasiRandom,
    horizons: &[f64],
    mut tell: impl FnMut(usize, f64),
) {
    let law = law_of(link.class());
    let whole = link.long_term_rate();
    let spread = law.spread * (1.0 + UNKNOWN_SPREAD * (1.0 - link.confidence()));
    let soon = spread_by(quantile(&SOON, chance.first()), spread);
    let later = spread_by(quantile(&LATER, chance.second()), spread);
    let stay = chance.third();
    let mut on = link.carries();
    let mut until = if on {
        let ons = link.up_periods().iter().map(|spell| spell.length_s);
        residual(
            stay,
            link.age_s(now),
            ons,
            law.on_s,
            law.weight,
            &mut chance,
        )
    } else {
        let offs = away.iter().copied();
        residual(
            stay,
            link.age_s(now),
            offs,
            law.off_s,
            law.weight,
            &mut chance,
        )
    };
    let lately = link.recent_rate().unwrap_or(whole);
    let (near, far) = (lately * soon, 0.5 * (lately + whole) * later);
    let (mut at, mut bytes) = (0.0, 0.0);
    let mut first = on;
    let (mut rate, mut turns) = (far, 0);
    let day = day_to_follow(link, &mut chance);
    let into_slot_s = link.hint().into_slot_s;
    let lost = day.filter(|_| on).and_then(|day| lost_on(day, into_slot_s));
    let back_s = day
        .filter(|_| !on)
        .and_then(|day| back_on(day, into_slot_s));
    let turn_s = lost.map(|lost| lost.at_s).or(back_s);
    until = until.min(turn_s.unwrap_or(f64::INFINITY));
    for (k, horizon) in horizons.iter().enumerate() {
        while at < *horizon {
            if let Some(day) = day.filter(|_| turns > 0) {
                // The rate of the slot in which the link was lost is of the time before that.
                let from = lost.map_or(at, |lost| lost.slot_ends_s.max(at));
                if from < *horizon {
                    bytes += carried_on(day, into_slot_s, from, *horizon);
                }
                at = *horizon;
                continue;
            }
            let mut end = until.min(*horizon);
            if on {
                let now_rate = if first && at < SOON_S {
                    end = end.min(SOON_S);
                    near
                } else {
                    rate
                };
                bytes += now_rate * (end - at);
            }
            at = end;
            if at >= until {
                (on, first, turns) = (!on, false, turns + 1);
                if turns >= TURNS_MAX {
                    // From here on the link carries at its average rate.
                    (on, rate, until) = (true, bytes / at, f64::INFINITY);
                    continue;
                }
                let length = if on {
                    let (length, seen) = stay_of(link, law, &mut chance);
                    rate = seen.unwrap_or(whole * later);
                    length
                } else {
                    away_of(link, law, &mut chance)
                };
                until = at + length.max(0.5);
            }
        }
        tell(k, bytes);
    }
}

/// The past day that this scenario follows once the state of the link changes; `None` without a
/// record of days. More recorded days make it more likely that one is chosen.
fn day_to_follow<'a>(link: &'a LinkHistory, chance: &mut QuasiRandom) -> Option<&'a [Option<f32>]> {
    let days = &link.hint().days;
    if days.is_empty() {
        return None;
    }
    let which = chance.next() * (days.len() as f64 + DAYS_WEIGHT);
    days.get(which as usize).map(Vec::as_slice)
}

/// When the link was lost on a past day, in seconds from this time of the day.
#[derive(Debug, Clone, Copy, PartialEq)]
struct DayLoss {
    at_s: f64,
    /// The end of the slot in which it was lost.
    slot_ends_s: f64,
}

/// When the link was lost on a day on which it carried at this time; `None` if it did not, or carried all day.
///
/// The slot before the first that carried nothing is the one in which it was lost: its rate is the share of the slot before
/// that, as long as the link was still there.
fn lost_on(day: &[Option<f32>], into_slot_s: f64) -> Option<DayLoss> {
    let carried = |rate: &Option<f32>| rate.filter(|rate| *rate > 0.0);
    day.first().and_then(carried)?;
    let next = day.iter().position(|rate| *rate == Some(0.0))?;
    let slot = next - 1;
    // Before the present slot is that of the next day at the same time.
    let before = match slot {
        0 => day.last(),
        slot => day.get(slot - 1),
    };
    let share = match (carried(&day[slot]), before.and_then(carried)) {
        (Some(rate), Some(whole)) => f64::from(rate / whole).min(1.0),
        _ => 1.0,
    };
    let slot_s = f64::from(SLOT_S);
    let slot_ends_s = next as f64 * slot_s - into_slot_s;
    let at_s = (slot as f64 + share) * slot_s - into_slot_s;
    Some(DayLoss {
        // A link that is still here is lost later than on that day.
        at_s: if at_s > 0.0 { at_s } else { slot_ends_s },
        slot_ends_s,
    })
}

/// Seconds until the link was back on a day on which it was lost by this time: the first slot after that in which it
/// carried something. `None` if it was not lost by this time, or not back within the day.
fn back_on(day: &[Option<f32>], into_slot_s: f64) -> Option<f64> {
    // In the slot of this time it may have carried before it was lost.
    let lost = day.iter().take(2).position(|rate| *rate == Some(0.0))?;
    let carries = |rate: &Option<f32>| rate.is_some_and(|rate| rate > 0.0);
    let slot = lost + day[lost..].iter().position(carries)?;
    Some(slot as f64 * f64::from(SLOT_S) - into_slot_s)
}

/// Bytes carried between two times, in seconds from now, if each day is like this one with its rates by slot. Slots with
/// unknown rates count as the average of the others.
fn carried_on(day: &[Option<f32>], into_slot_s: f64, from_s: f64, until_s: f64) -> f64 {
    let known = day.iter().flatten();
    let mean = known.clone().sum::<f32>() / known.count().max(1) as f32;
    let rate = |slot: usize| f64::from(day[slot % day.len()].unwrap_or(mean));
    let slot_s = f64::from(SLOT_S);
    let day_s = day.len() as f64 * slot_s;
    // A deadline may be centuries away.
    let whole_days = ((until_s - from_s) / day_s).floor();
    let mut bytes = match whole_days > 0.0 {
        true => whole_days * slot_s * (0..day.len()).map(rate).sum::<f64>(),
        false => 0.0,
    };
    let mut at = (from_s + into_slot_s) % day_s;
    let until = at + (until_s - from_s - whole_days * day_s);
    while at < until {
        let slot = (at / slot_s) as usize;
        let end = ((slot + 1) as f64 * slot_s).min(until);
        bytes += rate(slot) * (end - at);
        at = end;
    }
    bytes
}

/// Draws a whole up period: its length, and its rate if it repeats a past one.
fn stay_of(link: &LinkHistory, law: LinkPrior, chance: &mut QuasiRandom) -> (f64, Option<f64>) {
    let ons = link.up_periods();
    let u = chance.next() * (ons.len() as f64 + law.weight);
    match ons.get(u as usize) {
        Some(spell) => (spell.length_s, Some(spell.rate)),
        None => (lomax(chance.next(), law.on_s), None),
    }
}

/// Draws a whole down period.
fn away_of(link: &LinkHistory, law: LinkPrior, chance: &mut QuasiRandom) -> f64 {
    let offs = link.down_periods();
    let u = chance.next() * (offs.len() as f64 + law.weight);
    match offs.get(u as usize) {
        Some(length) => length * (0.5 + chance.next()),
        None => lomax(chance.next(), law.off_s),
    }
}

/// Draws the remaining length of a period that has lasted for `age`.
fn residual(
    u: f64,
    age: f64,
    past: impl Iterator<Item = f64> + Clone,
    median: f64,
    weight: f64,
    chance: &mut QuasiRandom,
) -> f64 {
    let longer = past.clone().filter(|length| *length > age).count();
    // The share of the prior's periods that last longer than this.
    let general = weight * median / (median + age);
    let which = u * (longer as f64 + general);
    if which < longer as f64 {
        let mut longer = past.filter(|length| *length > age);
        let length = longer.nth(which as usize).unwrap_or(age);
        // Past lengths repeat only roughly: half to one and a half times as long.
        return (length * (0.5 + chance.next()) - age).max((length - age) * chance.next());
    }
    lomax(chance.next(), median + age)
}

/// Draws from the Lomax distribution with this median: P(longer than x) = median ÷ (median + x). A
/// period that has lasted as long as the median lasts as long again with even odds.
fn lomax(u: f64, median: f64) -> f64 {
    median * u / (1.0 - u).max(1e-4)
}

/// Interpolates between the quantiles of a table.
fn quantile(table: &[f64; 17], u: f64) -> f64 {
    let at = u * 16.0;
    let k = (at as usize).min(15);
    table[k] + (at - k as f64) * (table[k + 1] - table[k])
}

/// Scales a factor's distance from one.
fn spread_by(times: f64, spread: f64) -> f64 {
    (1.0 + spread * (times - 1.0)).max(TIMES_MIN)
}

/// Deterministic numbers in [0, 1) that are spread evenly over the scenarios.
struct QuasiRandom {
    link: usize,
    scene: usize,
    state: u64,
}

impl QuasiRandom {
    fn new(link: usize, scene: usize) -> QuasiRandom {
        let state = (link as u64 + 1) << 32 | scene as u64;
        QuasiRandom { link, scene, state }
    }

    // Fractions of multiples of irrational numbers: no two scenarios are close in all of them.
    fn spread(&self, step: f64) -> f64 {
        let at = (self.scene as f64 + 0.5) * step + self.link as f64 * 0.381_966;
        at - at.floor()
    }

    fn first(&self) -> f64 {
        // Each sixteenth of a table is drawn equally often.
        let at = (self.scene as f64 + 0.5) / SCENES as f64 + self.link as f64 * 0.618_034;
        at - at.floor()
    }
    fn second(&self) -> f64 {
        self.spread(0.754_877_666_246_693)
    }
    fn third(&self) -> f64 {
        self.spread(0.569_840_290_998_053)
    }

    /// The next number of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    // Not rand_pcg: the figures in docs/repro/score.md are of these draws, and SCENES generators
    // for each forecast must cost nothing to seed.
    fn next(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::ForecastHint;
    use crate::history::LinkObservation;

    /// A link that is alternately up and down, for these lengths.
    fn link(class: LinkClass, on_s: u64, off_s: u64, rate: u64) -> (LinkHistory, Time) {
        let mut link = LinkHistory::new(class);
        let mut now = Time::ZERO;
        for second in 0..3_600 {
            now += Span::from_secs(1);
            let up = second % (on_s + off_s) < on_s;
            let observation = LinkObservation {
                up,
                bytes: if up { rate } else { 0 },
                busy: Span::from_secs(u64::from(up)),
            };
            link.observe(now, &observation);
        }
        (link, now)
    }

    #[test]
    fn a_time_centuries_away_is_forecast_as_fast_as_tomorrow() {
        let mut day = vec![Some(0.0); crate::daily_rates::SLOTS];
        (day[0], day[100]) = (Some(1_000.0), Some(3_000.0));
        // From the middle of the first slot to its beginning some days later, and beyond it.
        let bytes = |days: f64, more_s: f64| carried_on(&day, 300.0, 0.0, days * 86_400.0 + more_s);
        assert_eq!(bytes(0.0, 200.0), 200_000.0);
        assert_eq!(bytes(1.0, 0.0), 2_400_000.0);
        assert_eq!(bytes(2.0, 500.0), 2.0 * 2_400_000.0 + 300_000.0);
        let centuries = bytes(1e9, 0.0);
        assert!((centuries / 2.4e15 - 1.0).abs() < 1e-9, "{centuries}");
    }

    #[test]
    fn a_steady_link_carries_about_its_rate() {
        let (link, now) = link(LinkClass::Metered, 1, 0, 1_000_000);
        let outlook = CapacityForecast::new(now, &[link], [10.0, 1_000.0].into_iter());
        for (horizon, bytes) in [(0, 10e6), (1, 1_000e6)] {
            let median = outlook.all_median(horizon);
            assert!((0.9..1.1).contains(&(median / bytes)), "{median}");
            assert!(outlook.all_short_of(horizon, 0.3 * bytes) < 0.08);
            assert_eq!(outlook.free_reach(horizon, 1.0), 0.0);
        }
    }

    #[test]
    fn a_link_that_comes_and_goes_carries_its_share_of_the_time() {
        let (link, now) = link(LinkClass::Free, 30, 30, 1_000_000);
        let outlook = CapacityForecast::new(now, &[link], [1_200.0].into_iter());
        let median = outlook.all_median(0);
        assert!((400e6..800e6).contains(&median), "{median}");
    }

    #[test]
    fn what_was_away_for_half_a_minute_each_time_is_soon_back_and_what_is_away_for_long_is_not() {
        let (mut link, now) = link(LinkClass::Free, 30, 30, 1_000_000);
        let (there, gone) = (now + Span::from_secs(1), now + Span::from_secs(11));
        let observation = LinkObservation {
            up: true,
            bytes: 1,
            busy: Span::from_secs(1),
        };
        link.observe(there, &observation);
        link.observe(gone, &LinkObservation::default());
        let within = |at, seconds| link.returns_within(at, Span::from_secs(seconds));
        assert!(within(gone, 5) < 0.1 && within(gone, 60) > 0.8);
        let hour = gone + Span::from_secs(3_600);
        assert!(within(hour, 60) < 0.05 && within(hour, 3_600) > 0.4);
        for seconds in 1..100 {
            assert!(within(gone, seconds) <= within(gone, seconds + 1));
        }
        link.observe(hour, &observation);
        assert_eq!(link.returns_within(hour, Span::MAX), 0.0);
    }

    #[test]
    fn a_hint_of_nothing_changes_nothing_and_one_of_this_place_says_how_long() {
        let (mut wifi, mut now) = link(LinkClass::Free, 30, 30, 1_000_000);
        now += Span::from_secs(1);
        wifi.observe(
            now,
            &LinkObservation {
                up: true,
                bytes: 1,
                busy: Span::from_secs(1),
            },
        );
        now += Span::from_secs(9);
        wifi.observe(now, &LinkObservation::default());
        let outlook = |wifi: &LinkHistory| {
            CapacityForecast::new(now, std::slice::from_ref(wifi), [60.0].into_iter())
        };
        let before = outlook(&wifi);
        wifi.set_hint(ForecastHint::default());
        assert_eq!(outlook(&wifi).free, before.free);
        // One outage here lasts five seconds, another one ten minutes.
        let here = |away_s: f64| ForecastHint {
            away_s: vec![away_s; 8],
            ..ForecastHint::default()
        };
        let medians = [5.0, 600.0].map(|away_s| {
            wifi.set_hint(here(away_s));
            outlook(&wifi).all_median(0)
        });
        assert!(
            medians[0] > before.all_median(0) && medians[1] == 0.0,
            "{medians:?}"
        );
        let soon = wifi.returns_within(now, Span::from_secs(300));
        assert!(soon < 0.2, "{soon}");
    }

    #[test]
    fn a_diary_says_what_the_evening_brings() {
        // The link has been down since noon; on every day it comes back at six o'clock.
        let (mut wifi, mut now) = link(LinkClass::Free, 60, 5, 2_000_000);
        now += Span::from_secs(3_600);
        wifi.observe(now, &LinkObservation::default());
        let hours = [4.0 * 3_600.0, 8.0 * 3_600.0];
        let reach = |wifi: &LinkHistory, horizon, bytes| {
            CapacityForecast::new(now, std::slice::from_ref(wifi), hours.into_iter())
                .free_reach(horizon, bytes)
        };
        let slots = SLOT_S as usize;
        let day: Vec<Option<f32>> = (0..86_400 / slots)
            .map(|slot| Some(if slot * slots < 18_000 { 0.0 } else { 2e6 }))
            .collect();
        wifi.set_hint(ForecastHint {
            days: vec![day; 9],
            ..ForecastHint::default()
        });
        assert!(reach(&wifi, 0, 1e9) < 0.2, "before six there is none");
        assert!(reach(&wifi, 1, 15e9) > 0.8, "three hours of it");
        assert!(reach(&wifi, 1, 25e9) < 0.2);
    }

    #[test]
    fn a_link_is_lost_when_it_was_on_other_days_and_not_at_the_end_of_that_ten_minutes() {
        let day =
            |rates: &[f32]| -> Vec<Option<f32>> { rates.iter().map(|rate| Some(*rate)).collect() };
        let at_s = |rates: &[f32], into_slot_s| {
            lost_on(&day(rates), into_slot_s).map(|lost| (lost.at_s, lost.slot_ends_s))
        };
        // It carried for half of the second slot.
        assert_eq!(at_s(&[1e6, 5e5, 0.0, 1e6], 60.0), Some((840.0, 1_140.0)));
        // The present slot, beside that of the day after.
        assert_eq!(at_s(&[5e5, 0.0, 1e6], 60.0), Some((240.0, 540.0)));
        // On that day it was lost before this second.
        assert_eq!(at_s(&[5e5, 0.0, 1e6], 400.0), Some((200.0, 200.0)));
        assert_eq!(at_s(&[0.0, 1e6], 0.0), None);
        assert_eq!(at_s(&[1e6, 1e6], 0.0), None);
        // What it carries until then is counted, and nothing of it twice.
        let (mut wifi, now) = link(LinkClass::Free, 5_000, 1, 1_000_000);
        let rates = [1e6, 5e5, 0.0, 0.0, 0.0, 0.0, 0.0, 1e6];
        wifi.set_hint(ForecastHint {
            days: vec![day(&rates); 999],
            ..ForecastHint::default()
        });
        let horizons = [900.0, 3_000.0].into_iter();
        let outlook = CapacityForecast::new(now, std::slice::from_ref(&wifi), horizons);
        let medians = [0, 1].map(|horizon| outlook.all_median(horizon));
        assert!((600e6..1_000e6).contains(&medians[0]), "{medians:?}");
        // One scene in a thousand follows no day. The rate of the slot counted once more would be 150 MB.
        assert!(medians[1] - medians[0] < 50e6, "{medians:?}");
    }

    #[test]
    fn more_bytes_are_never_likelier_and_more_time_never_less() {
        let (free, now) = link(LinkClass::Free, 20, 10, 300_000);
        let (metered, _) = link(LinkClass::Metered, 3_000, 1, 900_000);
        let horizons = [3.0, 30.0, 300.0];
        let outlook = CapacityForecast::new(now, &[free, metered], horizons.into_iter());
        for horizon in 0..3 {
            for step in 0..40 {
                let bytes = f64::from(step) * 5e6;
                let more = bytes + 5e6;
                let reach = outlook.free_reach(horizon, bytes);
                assert!(reach >= outlook.free_reach(horizon, more));
                let short = outlook.all_short_of(horizon, bytes);
                assert!(short <= outlook.all_short_of(horizon, more));
                assert!(reach <= 1.0 - short + 1e-9);
                if horizon > 0 {
                    assert!(short <= outlook.all_short_of(horizon - 1, bytes));
                }
            }
        }
    }

    #[test]
    fn what_is_left_over_is_between_nothing_and_everything() {
        let (free, now) = link(LinkClass::Free, 20, 40, 1_000_000);
        let outlook = CapacityForecast::new(now, &[free], [60.0].into_iter());
        let mean = outlook.left_over(0, 30e6);
        let worst = outlook.left_over_at_most(0, 30e6, 0.95);
        assert!(
            mean > 0.0 && mean < worst && worst <= 30e6,
            "{mean} {worst}"
        );
        assert_eq!(outlook.left_over(0, 0.0), 0.0);
    }
}
