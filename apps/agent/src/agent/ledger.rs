//! What links that cost carried for this device since the day the allowance began, and how much of
//! the allowance is left.
//!
//! The cap is hard: when it is used up, no transfer pays until the next period or a larger cap.

use jiff::civil::Date;
use jiff::{ToSpan, Zoned};
use serde::{Deserialize, Serialize};

use crate::fetch::jobs;

/// The day of the month on which an allowance begins, if nobody says.
const RESET_DAY: i8 = 1;

/// The allowance and what was used of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Bytes that links that cost may carry in a period; none is no limit.
    pub cap: Option<u64>,
    /// The day of the month on which a period begins; in a shorter month, its last.
    pub reset_day: i8,
    /// The day this one began.
    pub since: Date,
    /// What they carried since.
    pub used: u64,
    #[serde(skip)]
    changed: bool,
}

/// The day on which the period began that `today` lies in.
fn began(today: Date, reset_day: i8) -> Date {
    let in_month = |day: Date| {
        let last = day.days_in_month();
        day.with()
            .day(reset_day.clamp(1, last))
            .build()
            .unwrap_or(day)
    };
    let this = in_month(today);
    match this <= today {
        true => this,
        false => in_month(today.saturating_sub(1.month())),
    }
}

impl Ledger {
    /// What was written down, or a new one.
    pub fn load() -> Ledger {
        let text = jobs::state()
            .ok()
            .and_then(|state| std::fs::read(state.join("budget.json")).ok());
        let known = text.and_then(|text| serde_json::from_slice(&text).ok());
        let mut ledger = known.unwrap_or(Ledger {
            cap: None,
            reset_day: RESET_DAY,
            since: began(Zoned::now().date(), RESET_DAY),
            used: 0,
            changed: false,
        });
        ledger.turn(Zoned::now().date());
        ledger
    }

    /// Begins a new period if the day has come. A clock that is set back begins none: what was used
    /// stays used.
    fn turn(&mut self, today: Date) {
        let began = began(today, self.reset_day);
        if began > self.since {
            (self.since, self.used, self.changed) = (began, 0, true);
        }
    }

    /// Adds what links that cost carried.
    pub fn spend(&mut self, bytes: u64) {
        self.turn(Zoned::now().date());
        self.used += bytes;
        self.changed |= bytes > 0;
    }

    /// What may still be carried.
    pub fn left(&self) -> Option<u64> {
        self.cap.map(|cap| cap.saturating_sub(self.used))
    }

    /// Another allowance.
    pub fn set(&mut self, cap: Option<Option<u64>>, reset_day: Option<i8>) {
        self.cap = cap.unwrap_or(self.cap);
        if let Some(day) = reset_day {
            self.reset_day = day.clamp(1, 31);
            self.since = self.since.max(began(Zoned::now().date(), self.reset_day));
        }
        self.changed = true;
    }

    /// Writes it down if there is news.
    pub fn save(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let written = jobs::state().and_then(|state| {
            std::fs::create_dir_all(&state)?;
            Ok(jobs::replace(&state.join("budget.json"), self)?)
        });
        if let Err(error) = written {
            tracing::warn!(%error, "what was used of the allowance is not written down");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(text: &str) -> Date {
        text.parse().unwrap()
    }

    #[test]
    fn a_period_begins_on_its_day_or_the_last_of_a_short_month() {
        for (today, reset_day, expected) in [
            ("2030-03-15", 1, "2030-03-01"),
            ("2030-03-15", 15, "2030-03-15"),
            ("2030-03-15", 16, "2030-02-16"),
            ("2030-03-15", 31, "2030-02-28"),
            ("2030-01-05", 10, "2029-12-10"),
        ] {
            assert_eq!(
                began(day(today), reset_day),
                day(expected),
                "{today} {reset_day}"
            );
        }
    }

    #[test]
    fn a_new_period_begins_with_nothing_used_and_a_clock_set_back_begins_none() {
        let mut ledger = Ledger {
            cap: Some(100),
            reset_day: 1,
            since: day("2030-03-01"),
            used: 80,
            changed: false,
        };
        ledger.turn(day("2030-02-10"));
        assert_eq!((ledger.used, ledger.left()), (80, Some(20)));
        ledger.turn(day("2030-04-01"));
        assert_eq!((ledger.used, ledger.left()), (0, Some(100)));
    }
}
