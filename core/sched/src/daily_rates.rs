//! The rates of a link at each time of day, over the last days.
//!
//! ```text
//!  day 20 413   ▁▁▁▁▁▁▁▁▆▆▁▁▃▃▃▃▁▁▇▇▇▇▇▇     a byte for each ten minutes: a rate, or unknown
//!  day 20 414   ▁▁▁▁▁▁▁▁▆▅▁▁▃▃·
//!                              ▲ now: past days continue from here
//! ```

use std::collections::VecDeque;

/// The most days remembered: today, and two weeks, which contain each day of the week twice.
pub const DAYS_MAX: usize = 15;

/// The length of a slot in seconds.
pub const SLOT_S: u32 = 600;

/// The number of slots in a day.
pub const SLOTS: usize = 86_400 / SLOT_S as usize;

/// The code of an unknown rate.
const UNKNOWN: u8 = u8::MAX;

/// The number of codes per doubling of the rate: a step of 7 %.
const CODES_PER_DOUBLING: u32 = 10;
/// The lowest rate above zero, in bytes per second.
const RATE_MIN: f32 = 128.0;

/// Rates by day and slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DailyRates {
    /// Days in ascending order, each with the codes of its slots.
    pub(crate) days: VecDeque<(u32, [u8; SLOTS])>,
}

impl DailyRates {
    /// Records the link's rate in bytes per second, 0 while it is down, from one second of a day up
    /// to another. Days count in the device's local time, from any start, and must not go back.
    /// Times without a record stay unknown.
    pub fn note(&mut self, day: u32, seconds: std::ops::Range<u32>, rate: f64) {
        let last = self.days.back().map(|(day, _)| *day);
        if last.is_none_or(|last| last < day) {
            if self.days.len() == DAYS_MAX {
                self.days.pop_front();
            }
            self.days.push_back((day, [UNKNOWN; SLOTS]));
        }
        let Some((_, slots)) = self.days.iter_mut().find(|(known, _)| *known == day) else {
            return;
        };
        let first = (seconds.start / SLOT_S) as usize;
        let end = (seconds.end.div_ceil(SLOT_S) as usize).min(SLOTS);
        for (n, slot) in slots.iter_mut().enumerate().take(end).skip(first) {
            let from = (n as u32 * SLOT_S).max(seconds.start);
            let until = ((n as u32 + 1) * SLOT_S).min(seconds.end);
            // The part of the slot that is recorded by now, in seconds.
            let over = f64::from(until - n as u32 * SLOT_S);
            let share = f64::from(until - from) / over;
            let known = rate_of(*slot).map_or(rate, f64::from);
            *slot = code_of(known + share * (rate - known));
        }
    }

    /// The rates of past days from this second of the day on, for 24 hours each. If there are days
    /// like `day` in the week, only those are used, else all.
    pub(crate) fn days_from(&self, day: u32, second: u32) -> Vec<Vec<Option<f32>>> {
        let first = (second / SLOT_S) as usize;
        let days_like = |week: u32| -> Vec<Vec<Option<f32>>> {
            let past = self
                .days
                .iter()
                .filter(|(past, _)| *past < day && (day - past).is_multiple_of(week));
            past.map(|(past, slots)| self.day_from(*past, slots, first))
                .filter(|slots| slots.iter().any(Option::is_some))
                .collect()
        };
        let alike = days_like(7);
        // A single day may have been an exception.
        if alike.len() > 1 { alike } else { days_like(1) }
    }

    fn day_from(&self, day: u32, slots: &[u8; SLOTS], first: usize) -> Vec<Option<f32>> {
        let next = self.days.iter().find(|(known, _)| *known == day + 1);
        let next = next.map_or([UNKNOWN; SLOTS], |(_, slots)| *slots);
        let rest = slots[first..].iter().chain(&next[..first]);
        rest.map(|code| rate_of(*code)).collect()
    }
}

fn rate_of(code: u8) -> Option<f32> {
    match code {
        UNKNOWN => None,
        0 => Some(0.0),
        code => {
            let steps = u32::from(code) - 1;
            let mut rate = RATE_MIN;
            for _ in 0..steps / CODES_PER_DOUBLING {
                rate *= 2.0;
            }
            // Linear between doublings, not exponential, so that every machine computes the same.
            let part = (steps % CODES_PER_DOUBLING) as f32 / CODES_PER_DOUBLING as f32;
            Some(rate * (1.0 + part))
        }
    }
}

fn code_of(rate: f64) -> u8 {
    if rate < f64::from(RATE_MIN) / 2.0 {
        return 0;
    }
    let codes = 1..UNKNOWN;
    let off = |code: &u8| (f64::from(rate_of(*code).unwrap_or(0.0)) - rate).abs();
    // The codes ascend, so the search ends where the distance begins to grow.
    let mut best = codes.start;
    for code in codes {
        if off(&code) > off(&best) {
            break;
        }
        best = code;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_come_back_within_a_twentieth() {
        for rate in [128.0, 1_000.0, 123_456.0, 5e6, 1e9] {
            let back = f64::from(rate_of(code_of(rate)).unwrap());
            assert!((back / rate - 1.0).abs() < 0.05, "{rate}: {back}");
        }
        assert_eq!(rate_of(code_of(0.0)), Some(0.0));
    }

    #[test]
    fn a_day_goes_on_as_that_day_of_the_week_did() {
        let mut diary = DailyRates::default();
        for day in 0..14 {
            let rate = if day % 7 == 3 { 2e6 } else { 1e6 };
            diary.note(day, 0..86_400, 0.0);
            diary.note(day, 36_000..43_200, rate);
        }
        // From half past nine on day 17, which is the same day of the week as days 3 and 10.
        let days = diary.days_from(17, 34_200);
        assert_eq!(days.len(), 2);
        // Also when that day has begun.
        for day in 14..18 {
            diary.note(day, 0..34_200, 0.0);
        }
        assert_eq!(diary.days_from(17, 34_200), days);
        for day in days {
            assert_eq!(day.len(), SLOTS);
            assert_eq!(&day[..3], [Some(0.0); 3]);
            let noon = f64::from(day[3].unwrap());
            assert!((noon / 2e6 - 1.0).abs() < 0.05);
            assert_eq!(day[16], Some(0.0));
        }
    }

    #[test]
    fn a_slot_is_the_mean_of_what_was_noted_in_it() {
        let mut diary = DailyRates::default();
        diary.note(1, 0..300, 1e6);
        diary.note(1, 300..600, 0.0);
        let day = &diary.days_from(2, 0)[0];
        let mean = f64::from(day[0].unwrap());
        assert!((mean / 5e5 - 1.0).abs() < 0.05, "{mean}");
        assert_eq!(day[1], None);
    }

    #[test]
    fn no_more_days_are_kept_than_the_limit_and_an_old_one_is_not_begun_again() {
        let mut diary = DailyRates::default();
        for day in 0..40 {
            diary.note(day, 0..600, 1e6);
        }
        diary.note(3, 0..600, 1e6);
        assert_eq!(diary.days.len(), DAYS_MAX);
        assert_eq!(diary.days[0].0, 25);
    }
}
