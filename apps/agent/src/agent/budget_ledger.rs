//! The bytes that metered links carried for this device since the start of the allowance, and the
//! rest of the allowance; the same for each network with a cap in the settings.
//!
//! ```text
//!  budget (cedos budget set, [budget])   all metered links      hard: no transfer pays any more
//!  cap ([[network]])           one network            hard: nothing goes over it any more
//!                                                     cautious: likewise, a tenth before
//!                                                     soft: it is told, and goes on
//! ```
//!
//! Only payload of this agent's transfers and streams counts, not the traffic of other programs.

use std::collections::BTreeMap;

use d2tp_links::{CapCutoff, NetworkRule};
use jiff::civil::Date;
use jiff::{ToSpan, Zoned};
use serde::{Deserialize, Serialize};

use crate::fetch::jobs;
use crate::fetch::option_parsers;
use crate::settings::UserSettings;
use crate::settings::schema::parse_cutoff;

/// The default day of the month on which an allowance begins.
const RESET_DAY: i8 = 1;

/// The allowance on metered links, and what was used of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetLedger {
    /// Bytes that metered links may carry in a period; none is no limit.
    pub cap: Option<u64>,
    /// The day of the month on which a period begins; in a shorter month, its last.
    pub reset_day: i8,
    /// The day on which this period began.
    pub since: Date,
    /// Bytes carried since then.
    pub used: u64,
    /// What happens at the cap.
    #[serde(default)]
    pub cutoff: CapCutoff,
    /// Usage in the month of each network with a cap.
    #[serde(default)]
    pub networks: BTreeMap<String, NetworkMonth>,
    #[serde(skip)]
    changed: bool,
}

/// What the settings say of the budget; what they leave open is as it was set before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BudgetSettings {
    /// Bytes that metered links may carry in a period.
    pub cap: Option<u64>,
    /// The day of the month on which a period begins.
    pub reset_day: Option<i8>,
    /// What happens at the cap.
    pub cutoff: Option<CapCutoff>,
}

impl BudgetSettings {
    /// The budget in these settings.
    pub fn of(settings: &UserSettings) -> BudgetSettings {
        BudgetSettings {
            cap: settings.parsed("budget.cap", option_parsers::parse_bytes),
            reset_day: settings.parsed("budget.reset_day", str::parse),
            cutoff: settings.parsed("budget.cutoff", parse_cutoff),
        }
    }
}

/// Bytes that a network carried in its current month.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkMonth {
    /// The day on which the month began.
    pub since: Date,
    /// Payload bytes since then.
    pub used: u64,
}

/// The first day of the month of a rule that contains `today`.
fn month_began(rule: &NetworkRule, today: Date) -> Date {
    let parts = |day: Date| (day.year(), day.month() as u8, day.day() as u8);
    let (year, month, day) = rule.reset_day.began(parts(today));
    Date::new(year, month as i8, day as i8).unwrap_or(today)
}

/// The first day of the period that contains `today`.
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

impl BudgetLedger {
    /// Loads the saved ledger, or creates a new one.
    pub fn load() -> BudgetLedger {
        let text = jobs::state_directory()
            .ok()
            .and_then(|state| std::fs::read(state.join("budget.json")).ok());
        let known = text.and_then(|text| serde_json::from_slice(&text).ok());
        let mut ledger = known.unwrap_or(BudgetLedger {
            cap: None,
            reset_day: RESET_DAY,
            since: began(Zoned::now().date(), RESET_DAY),
            used: 0,
            cutoff: CapCutoff::default(),
            networks: BTreeMap::new(),
            changed: false,
        });
        ledger.turn(Zoned::now().date());
        ledger
    }

    /// Takes over what the settings say.
    pub fn apply(&mut self, settings: &BudgetSettings) {
        if *settings != BudgetSettings::default() {
            self.set(settings.cap.map(Some), settings.reset_day, settings.cutoff);
        }
    }

    /// Begins a new period if its day has come. Setting the clock back does not begin one: used bytes
    /// stay used.
    fn turn(&mut self, today: Date) {
        let began = began(today, self.reset_day);
        if began > self.since {
            (self.since, self.used, self.changed) = (began, 0, true);
        }
    }

    /// Adds bytes that metered links carried.
    pub fn record(&mut self, bytes: u64) {
        self.turn(Zoned::now().date());
        self.used += bytes;
        self.changed |= bytes > 0;
    }

    /// Bytes that may still be carried; none is no limit.
    pub fn left(&self) -> Option<u64> {
        self.cutoff.left(self.cap?, self.used)
    }

    /// Whether more was carried than the cap, which is a soft one.
    pub fn is_over(&self) -> bool {
        self.cap.is_some_and(|cap| self.used > cap)
    }

    /// Adds bytes that a network with a cap carried. True if they reach the cap.
    pub fn record_on_network(&mut self, network: &str, rule: &NetworkRule, bytes: u64) -> bool {
        self.spend_on_day(network, rule, bytes, Zoned::now().date())
    }

    fn spend_on_day(&mut self, network: &str, rule: &NetworkRule, bytes: u64, today: Date) -> bool {
        let Some(cap) = rule.cap else {
            return false;
        };
        let before = self.used_on(network, rule, today);
        let since = month_began(rule, today);
        let known = self.networks.get(network).map(|month| month.since);
        let month = NetworkMonth {
            // A clock that is set back begins no month.
            since: known.map_or(since, |known| known.max(since)),
            used: before + bytes,
        };
        self.networks.insert(network.to_owned(), month);
        self.changed |= bytes > 0;
        before < cap && month.used >= cap
    }

    fn used_on(&self, network: &str, rule: &NetworkRule, today: Date) -> u64 {
        let month = self.networks.get(network);
        let month = month.filter(|month| month.since >= month_began(rule, today));
        month.map_or(0, |month| month.used)
    }

    /// Bytes that a network carried this month, and those left by its rule; none is no limit.
    pub fn network_usage(&self, network: &str, rule: &NetworkRule) -> (u64, Option<u64>) {
        let used = self.used_on(network, rule, Zoned::now().date());
        (used, rule.left(used))
    }

    /// Changes the allowance.
    pub fn set(
        &mut self,
        cap: Option<Option<u64>>,
        reset_day: Option<i8>,
        cutoff: Option<CapCutoff>,
    ) {
        self.cap = cap.unwrap_or(self.cap);
        self.cutoff = cutoff.unwrap_or(self.cutoff);
        if let Some(day) = reset_day {
            self.reset_day = day.clamp(1, 31);
            self.since = self.since.max(began(Zoned::now().date(), self.reset_day));
        }
        self.changed = true;
    }

    /// Saves the ledger if it changed.
    pub fn save(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let written = jobs::state_directory().and_then(|state| {
            std::fs::create_dir_all(&state)?;
            Ok(jobs::replace(&state.join("budget.json"), self)?)
        });
        if let Err(error) = written {
            tracing::warn!(%error, "cannot save how much of the budget is used");
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
        let mut ledger = BudgetLedger {
            cap: Some(100),
            reset_day: 1,
            since: day("2030-03-01"),
            used: 80,
            cutoff: CapCutoff::Hard,
            networks: BTreeMap::new(),
            changed: false,
        };
        ledger.turn(day("2030-02-10"));
        assert_eq!((ledger.used, ledger.left()), (80, Some(20)));
        ledger.turn(day("2030-04-01"));
        assert_eq!((ledger.used, ledger.left()), (0, Some(100)));
    }

    #[test]
    fn a_cautious_cap_ends_a_tenth_before_and_a_soft_one_is_told_and_goes_on() {
        let ledger = |cutoff, used| BudgetLedger {
            cap: Some(1_000),
            reset_day: 1,
            since: day("2030-03-01"),
            used,
            cutoff,
            networks: BTreeMap::new(),
            changed: false,
        };
        assert_eq!(ledger(CapCutoff::Hard, 950).left(), Some(50));
        assert_eq!(ledger(CapCutoff::Cautious, 850).left(), Some(50));
        assert_eq!(ledger(CapCutoff::Cautious, 950).left(), Some(0));
        let soft = ledger(CapCutoff::Soft, 1_001);
        assert_eq!((soft.left(), soft.is_over()), (None, true));
    }

    #[test]
    fn each_network_has_a_month_and_a_cap_of_its_own() {
        let rules = "[[network]]\nssid = \"Train\"\ncap = 1000\nreset_day = 14";
        let rules = d2tp_links::NetworkRules::parse(rules).unwrap();
        let rule = &rules.network[0];
        let mut ledger = BudgetLedger {
            cap: None,
            reset_day: 1,
            since: day("2030-03-01"),
            used: 0,
            cutoff: CapCutoff::Hard,
            networks: BTreeMap::new(),
            changed: false,
        };
        let mut spend = |network: &str, bytes, today: &str| {
            let reached = ledger.spend_on_day(network, rule, bytes, day(today));
            (reached, ledger.used_on(network, rule, day(today)))
        };
        assert_eq!(spend("wifi:Train", 900, "2030-03-13"), (false, 900));
        assert_eq!(spend("wifi:Train", 100, "2030-03-13"), (true, 1_000));
        // That is said once.
        assert_eq!(spend("wifi:Train", 100, "2030-03-13"), (false, 1_100));
        assert_eq!(spend("wifi:Bus", 5, "2030-03-13"), (false, 5));
        assert_eq!(spend("wifi:Train", 7, "2030-03-14"), (false, 7));
        // The clock is set back: the month stays.
        assert_eq!(spend("wifi:Train", 3, "2030-03-10"), (false, 10));
    }
}
