//! When a transfer that recurs runs: by each time of its schedule once, and once for all the times that were
//! missed while the machine was off.
//!
//! ```text
//!  weekdays 07:30, lead 6h
//!
//!  Thu 07:30        Fri 01:30 ──── run ────▶ Fri 07:30                    Mon 01:30 ── run ──▶ Mon 07:30
//!                   off until 09:00:         Fri 09:00 ── run ──▶ 15:00   Mon 01:30 …
//! ```
//!
//! Times are those of the clock on the wall where the machine is: a time that daylight saving time skips is as much
//! later as the clock is put forward, and one that comes twice counts the first time.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use cedos_readycast::DownloadSchedule;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, Zoned};
use serde::{Deserialize, Serialize};

/// How long before its deadline a run begins, if nothing else is said: as long as a transfer without a deadline has.
pub const LEAD_DEFAULT: Duration = Duration::from_secs(6 * 3600);

/// The longest time between the beginning of a run and its deadline.
pub const LEAD_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// Times that are counted one by one when they were missed.
const MISSED_MAX: u64 = 4_000; // a guess: ten years of days

/// Days and a time of day by which a transfer is to be complete again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurringTime(DownloadSchedule);

impl RecurringTime {
    /// The first such time that is later than `after`, and not less than a minute.
    fn next(self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        self.0.deadline(after, &after.to_zoned(zone.clone()))
    }
}

impl FromStr for RecurringTime {
    type Err = String;

    fn from_str(text: &str) -> Result<RecurringTime, String> {
        match text.parse() {
            Ok(schedule @ DownloadSchedule::At { .. }) => Ok(RecurringTime(schedule)),
            _ => Err(format!(
                "`{text}` is not a time that recurs: write \"07:30\", \"weekday 07:30\", \"mon,fri 16:00\" \
                 or \"weekend 9am\""
            )),
        }
    }
}

impl fmt::Display for RecurringTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A run of a recurring transfer that began and has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecurringRun {
    /// The time of the schedule that the run is for.
    pub slot: Timestamp,
    /// The deadline, which is later than that time if the time had passed when the run began.
    pub due: Timestamp,
}

/// The step that a recurring transfer needs now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecurrenceStep {
    /// Wait for the next run.
    Wait {
        /// The time at which the run begins.
        starts: Timestamp,
        /// The deadline of the run.
        due: Timestamp,
    },
    /// Run, or continue a run.
    Run {
        /// The run that is to begin, or to go on.
        run: RecurringRun,
        /// Times that passed without a run since the last step.
        missed: u64,
    },
}

/// How far a recurring transfer came, as the queue stores it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecurrenceProgress {
    /// The latest time of the schedule for which a run began or none is needed.
    pub handled: Timestamp,
    /// The run that began and has not ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<RecurringRun>,
    /// Times that passed without a run, in all.
    #[serde(default)]
    pub missed: u64,
}

impl RecurrenceProgress {
    /// The progress of a transfer that was just ordered: no time before `now` counts as missed.
    pub fn new(now: Timestamp) -> RecurrenceProgress {
        RecurrenceProgress {
            handled: now,
            current: None,
            missed: 0,
        }
    }

    /// The step at `now`, if runs begin this long before their deadlines. None if the schedule has
    /// no time that a clock can show.
    pub fn step(&self, time: RecurringTime, lead: Duration, now: &Zoned) -> Option<RecurrenceStep> {
        let (zone, now) = (now.time_zone(), now.timestamp());
        let lead = SignedDuration::try_from(lead.min(LEAD_MAX)).ok()?;
        let before = |at: Timestamp| at.saturating_sub(lead).unwrap_or(Timestamp::MIN);
        let latest = now.saturating_add(SignedDuration::try_from(LEAD_MAX).ok()?);
        let is_possible = |run: &RecurringRun| latest.is_ok_and(|latest| run.due <= latest);
        // One that is due later than any can be began when the clock was wrong.
        if let Some(run) = (self.current).filter(|run| run.due > now && is_possible(run)) {
            return Some(RecurrenceStep::Run { run, missed: 0 });
        }
        // A clock that was wrong and is right again.
        let handled = match before(self.handled) > now {
            true => now,
            false => self.handled,
        };
        let mut next = time.next(handled, zone)?;
        let (mut last, mut missed) = (self.current.map(|run| run.slot), 0);
        while next <= now {
            (last, missed) = (Some(next), missed + 1);
            let from = if missed < MISSED_MAX { next } else { now };
            next = time.next(from, zone)?;
        }
        let starts = before(next).max(handled);
        if starts <= now {
            let run = RecurringRun {
                slot: next,
                due: next,
            };
            return Some(RecurrenceStep::Run { run, missed });
        }
        Some(match last {
            Some(slot) => {
                let due = now.saturating_add(lead).unwrap_or(next);
                let run = RecurringRun { slot, due };
                RecurrenceStep::Run { run, missed }
            }
            None => RecurrenceStep::Wait { starts, due: next },
        })
    }

    /// Records that a run began.
    pub fn begin(&mut self, run: RecurringRun, missed: u64) {
        self.handled = run.slot;
        self.current = Some(run);
        self.missed += missed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAD: Duration = LEAD_DEFAULT;

    fn zoned(text: &str, zone: &str) -> Zoned {
        format!("{text}[{zone}]").parse().expect("a zoned time")
    }

    fn berlin(text: &str) -> Zoned {
        zoned(text, "Europe/Berlin")
    }

    fn time(text: &str) -> RecurringTime {
        text.parse().expect("a time")
    }

    fn at(text: &str) -> Timestamp {
        berlin(text).timestamp()
    }

    fn since(text: &str) -> RecurrenceProgress {
        RecurrenceProgress::new(at(text))
    }

    fn waits(starts: &str, due: &str) -> Option<RecurrenceStep> {
        let (starts, due) = (at(starts), at(due));
        Some(RecurrenceStep::Wait { starts, due })
    }

    fn runs(slot: &str, due: &str, missed: u64) -> Option<RecurrenceStep> {
        let (slot, due) = (at(slot), at(due));
        let run = RecurringRun { slot, due };
        Some(RecurrenceStep::Run { run, missed })
    }

    #[test]
    fn a_run_begins_its_lead_before_each_time_and_none_on_other_days() {
        let weekdays = time("weekday 07:30");
        // A Thursday.
        let mut progress = since("2030-06-06T12:00");
        let step = |progress: &RecurrenceProgress, now| progress.step(weekdays, LEAD, &berlin(now));
        let friday = waits("2030-06-07T01:30", "2030-06-07T07:30");
        assert_eq!(step(&progress, "2030-06-06T12:00"), friday);
        assert_eq!(step(&progress, "2030-06-07T01:29"), friday);
        let run = runs("2030-06-07T07:30", "2030-06-07T07:30", 0);
        assert_eq!(step(&progress, "2030-06-07T01:30"), run);
        let Some(RecurrenceStep::Run { run, missed }) = run else {
            unreachable!("it runs");
        };
        progress.begin(run, missed);
        progress.current = None;
        let monday = waits("2030-06-10T01:30", "2030-06-10T07:30");
        assert_eq!(step(&progress, "2030-06-07T01:31"), monday);
        assert_eq!(step(&progress, "2030-06-09T12:00"), monday);
    }

    #[test]
    fn times_that_were_missed_are_made_up_for_once() {
        let weekdays = time("weekdays 07:30");
        let mut progress = since("2030-06-05T12:00");
        // Off from Wednesday to Friday morning: Thursday and Friday.
        let step = progress.step(weekdays, LEAD, &berlin("2030-06-07T09:00"));
        assert_eq!(step, runs("2030-06-07T07:30", "2030-06-07T15:00", 2));
        let Some(RecurrenceStep::Run { run, missed }) = step else {
            unreachable!("it runs");
        };
        progress.begin(run, missed);
        // The agent is killed, and runs again.
        let again = progress.step(weekdays, LEAD, &berlin("2030-06-07T10:00"));
        assert_eq!(again, runs("2030-06-07T07:30", "2030-06-07T15:00", 0));
        // Off again until after that deadline: the run is still owed, and nothing is counted twice.
        let late = progress.step(weekdays, LEAD, &berlin("2030-06-07T16:00"));
        assert_eq!(late, runs("2030-06-07T07:30", "2030-06-07T22:00", 0));
        progress.current = None;
        let monday = waits("2030-06-10T01:30", "2030-06-10T07:30");
        let step = progress.step(weekdays, LEAD, &berlin("2030-06-07T17:00"));
        assert_eq!((step, progress.missed), (monday, 2));
    }

    #[test]
    fn a_time_that_is_due_soon_makes_up_for_those_that_were_missed() {
        let progress = since("2030-06-04T12:00");
        let step = progress.step(time("daily 07:30"), LEAD, &berlin("2030-06-07T07:00"));
        assert_eq!(step, runs("2030-06-07T07:30", "2030-06-07T07:30", 2));
    }

    #[test]
    fn runs_do_not_begin_before_the_deadline_of_the_last_one() {
        let mut progress = since("2030-06-06T12:00");
        let day = Duration::from_secs(48 * 3600);
        let step = progress.step(time("07:30"), day, &berlin("2030-06-06T12:00"));
        let slot = at("2030-06-07T07:30");
        let run = RecurringRun { slot, due: slot };
        assert_eq!(step, Some(RecurrenceStep::Run { run, missed: 0 }));
        progress.begin(run, 0);
        progress.current = None;
        let step = progress.step(time("07:30"), day, &berlin("2030-06-06T12:05"));
        assert_eq!(step, waits("2030-06-07T07:30", "2030-06-08T07:30"));
    }

    #[test]
    fn the_time_on_the_wall_stays_when_clocks_are_put_forward_or_back() {
        let hour = Duration::from_secs(3600);
        // Clocks go from 02:00 to 03:00 on 31 March 2030, and from 03:00 to 02:00 on 27 October.
        let due = |text, from: &str| match since(from).step(time(text), hour, &berlin(from)) {
            Some(RecurrenceStep::Wait { due, .. }) => {
                let due = due.to_zoned(berlin(from).time_zone().clone());
                due.strftime("%d %H:%M%:z").to_string()
            }
            step => panic!("{step:?}"),
        };
        assert_eq!(due("07:30", "2030-03-30T12:00"), "31 07:30+02:00");
        assert_eq!(due("02:30", "2030-03-30T12:00"), "31 03:30+02:00");
        assert_eq!(due("02:30", "2030-03-31T12:00"), "01 02:30+02:00");
        assert_eq!(due("07:30", "2030-10-26T12:00"), "27 07:30+01:00");
        assert_eq!(due("02:30", "2030-10-26T12:00"), "27 02:30+02:00");
        // Between 02:30 and 02:30: the second one does not count.
        let between: Zoned = "2030-10-27T02:45:00+02:00[Europe/Berlin]"
            .parse()
            .expect("a time");
        let progress = RecurrenceProgress::new(between.timestamp());
        let step = progress.step(time("02:30"), hour, &between);
        assert_eq!(step, waits("2030-10-28T01:30", "2030-10-28T02:30"));
    }

    #[test]
    fn another_time_zone_moves_the_times_that_are_to_come() {
        let progress = since("2030-06-06T12:00");
        let now = berlin("2030-06-06T12:00").with_time_zone(TimeZone::get("Asia/Seoul").unwrap());
        let due = zoned("2030-06-07T07:30", "Asia/Seoul").timestamp();
        let Some(RecurrenceStep::Wait { due: told, .. }) =
            progress.step(time("07:30"), Duration::from_secs(3600), &now)
        else {
            panic!("it waits");
        };
        assert_eq!(told, due);
    }

    #[test]
    fn a_clock_that_was_years_ahead_does_not_keep_runs_from_coming() {
        let progress = since("2050-01-01T00:00");
        let step = progress.step(time("07:30"), LEAD, &berlin("2030-06-06T12:00"));
        assert_eq!(step, waits("2030-06-07T01:30", "2030-06-07T07:30"));
    }

    #[test]
    fn years_without_power_are_one_run() {
        let progress = since("1990-01-01T00:00");
        let step = progress.step(time("07:30"), LEAD, &berlin("2030-06-06T12:00"));
        let Some(RecurrenceStep::Run { run, .. }) = step else {
            panic!("{step:?}");
        };
        assert_eq!(run.due, at("2030-06-06T18:00"));
    }

    #[test]
    fn only_a_time_of_day_recurs() {
        for bad in [
            "",
            "in 2h",
            "by hand",
            "whenever it is free",
            "weekday",
            "7",
        ] {
            let error = bad.parse::<RecurringTime>().expect_err(bad);
            assert!(error.contains("weekday 07:30"), "{error}");
        }
        assert_eq!(time("every weekday 7:30 am").to_string(), "weekdays 07:30");
        assert_eq!(time("mon,fri 4pm").to_string(), "mon,fri 16:00");
    }
}
