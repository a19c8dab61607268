//! Deadlines as people write and read them: `--by TIME`, and "Fri 27 Nov 16:00 (in 2 days)".
//!
//! | written | is |
//! |---|---|
//! | `07:30`, `7:30`, `7am`, `7:30 pm` | the next such time of day |
//! | `today 19:30`, `tomorrow 07:30`, `friday 16:00` | that day; a weekday is its next one |
//! | `2027-01-01 07:30`, with a space or `T` | that moment, in local time |
//! | `2027-01-01T07:30:00Z`, `…+09:00` | that moment, wherever it is read |
//! | `+45m`, `in 2h` | a length of time from now on, which a clock that is set does not change |
//!
//! A day without a time of day is refused: nobody could say whether its beginning or its end is meant.

use std::time::Duration;

use cedos_text::{parse_span, parse_time_of_day, parse_weekday};
use jiff::civil::{Date, DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan, Unit, Zoned};

use crate::order::Deadline;

/// The ways to write a time, for a message.
const EXAMPLES: &str = "write 07:30, 7pm, tomorrow 07:30, friday 16:00, 2030-01-31 07:30 or +45m";

/// The deadline that `text` names. Times without an offset are in the time zone of `now`.
///
/// # Errors
/// A sentence that says what a time looks like, or that this one has passed.
pub fn parse_deadline(text: &str, now: &Zoned) -> Result<Deadline, String> {
    let words = text.trim();
    let lower = words.to_lowercase();
    let span = words
        .strip_prefix('+')
        .or_else(|| lower.strip_prefix("in ").map(|_| &words["in ".len()..]));
    if let Some(span) = span {
        let span = parse_span(span.trim())?;
        return Ok(Deadline::WithinS(span.as_secs_f64()));
    }
    let at = moment(words, &lower, now)?;
    if at <= now.timestamp() {
        let at = describe_time(at, now);
        return Err(format!(
            "`{text}` has passed ({at}); give a time in the future"
        ));
    }
    Ok(Deadline::At(at))
}

fn moment(words: &str, lower: &str, now: &Zoned) -> Result<Timestamp, String> {
    let refuse = || match parse_span(words) {
        Ok(_) => format!("`{words}` is a length of time; for a deadline write +{words}"),
        Err(_) => format!("`{words}` is not a time: {EXAMPLES}"),
    };
    if let Some(time) = parse_time_of_day(lower) {
        return next_occurrence(time, now);
    }
    // With an offset, or a time zone in brackets. Without one, both parsers refuse it.
    if let Ok(at) = words.parse::<Timestamp>() {
        return Ok(at);
    }
    if let Ok(at) = words.parse::<Zoned>() {
        return Ok(at.timestamp());
    }
    let (day, time) = match lower.split_once(' ') {
        Some((day, time)) => (day, Some(time)),
        // `2027-01-01t07:30`: a weekday has no digits before its `t`.
        None => match lower.split_once('t') {
            Some((day, time)) if day.starts_with(|c: char| c.is_ascii_digit()) => (day, Some(time)),
            _ => (lower, None),
        },
    };
    let Some(date) = date_of(day, now) else {
        return Err(refuse());
    };
    let Some(time) = time else {
        return Err(format!("`{words}` has no time of day; write {words} 07:30"));
    };
    let time = parse_time_of_day(time.trim()).ok_or_else(refuse)?;
    let at = local(date.to_datetime(time), now)?;
    let is_weekday = parse_weekday(day).is_some();
    match is_weekday && at <= now.timestamp() {
        true => local(date.saturating_add(7.days()).to_datetime(time), now),
        false => Ok(at),
    }
}

/// The date of `today`, `tomorrow`, a weekday (today's, if it is that day) or `2027-01-01`.
fn date_of(day: &str, now: &Zoned) -> Option<Date> {
    let today = now.date();
    match day {
        "today" => Some(today),
        "tomorrow" => Some(today.saturating_add(1.day())),
        _ => match parse_weekday(day) {
            Some(weekday) => {
                let ahead = today.weekday().until(weekday);
                Some(today.saturating_add(i64::from(ahead).days()))
            }
            // What parses with a time of day would lose it.
            None if day.len() == "2027-01-01".len() => day.parse().ok(),
            None => None,
        },
    }
}

fn next_occurrence(time: Time, now: &Zoned) -> Result<Timestamp, String> {
    let today = local(now.date().to_datetime(time), now)?;
    if today > now.timestamp() {
        return Ok(today);
    }
    local(now.date().saturating_add(1.day()).to_datetime(time), now)
}

/// The moment of a local time. One that the clock skips is taken as the system's tools take it: as much
/// later as the clock is put forward.
fn local(at: DateTime, now: &Zoned) -> Result<Timestamp, String> {
    at.to_zoned(now.time_zone().clone())
        .map(|at| at.timestamp())
        .map_err(|error| format!("{at} does not exist here: {error}"))
}

/// A point in time in local time: without the date if it is today's, with the year if it is another,
/// to the second if it is less than an hour ahead.
pub fn describe_time(at: Timestamp, now: &Zoned) -> String {
    let at = at.to_zoned(now.time_zone().clone());
    let ahead = at.timestamp().duration_since(now.timestamp()).as_secs();
    let form = match at.date() == now.date() {
        _ if (0..3_600).contains(&ahead) => "%H:%M:%S",
        true => "%H:%M",
        false if at.year() == now.year() => "%a %-d %b %H:%M",
        false => "%a %-d %b %Y %H:%M",
    };
    at.strftime(form).to_string()
}

/// A deadline as it is understood: `Fri 27 Nov 16:00 (in 2 days)`.
pub fn describe_deadline(at: Timestamp, now: &Zoned) -> String {
    let left = at.duration_since(now.timestamp());
    // A deadline of whole seconds was computed a moment ago.
    let left = left.round(Unit::Second).unwrap_or(left);
    let time = describe_time(at, now);
    match Duration::try_from(left) {
        Ok(left) if !left.is_zero() => format!("{time} (in {})", describe_span(left)),
        _ => format!("{time} (passed)"),
    }
}

/// The deadline in local time, of an order that is given now.
pub fn describe_order_deadline(deadline: Deadline) -> String {
    let now = Zoned::now().with_time_zone(TimeZone::system());
    describe_deadline(deadline.due().at(), &now)
}

/// A length of time in its largest unit, and the next one where that says more.
fn describe_span(span: Duration) -> String {
    let s = span.as_secs();
    let (minutes, hours, days) = (s / 60, s / 3_600, s / 86_400);
    let plural = |n: u64, unit: &str| match n {
        1 => format!("1 {unit}"),
        n => format!("{n} {unit}s"),
    };
    match (days, hours, minutes) {
        (0, 0, 0) => plural(s, "second"),
        (0, 0, _) if s < 600 && !s.is_multiple_of(60) => format!("{minutes} min {} s", s % 60),
        (0, 0, minutes) => plural(minutes, "minute"),
        (0, hours, _) if !minutes.is_multiple_of(60) => format!("{hours} h {} min", minutes % 60),
        (0, hours, _) => plural(hours, "hour"),
        // Hours count for tomorrow, not for next week.
        (1, ..) if !hours.is_multiple_of(24) => format!("1 day {} h", hours % 24),
        (days, ..) => plural(days, "day"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noon of a Saturday.
    fn noon() -> Zoned {
        "2030-06-01T12:00:00[Asia/Seoul]"
            .parse()
            .expect("a zoned time")
    }

    /// What `text` is, as local time in Seoul.
    fn read(text: &str) -> Result<String, String> {
        parse_deadline(text, &noon()).map(|deadline| match deadline {
            Deadline::At(at) => {
                let at = at.to_zoned(noon().time_zone().clone());
                at.strftime("%Y-%m-%d %H:%M:%S").to_string()
            }
            Deadline::WithinS(s) => format!("{s} s"),
        })
    }

    fn check(cases: &[(&str, &str)]) {
        for (text, is) in cases {
            assert_eq!(read(text).as_deref(), Ok(*is), "{text}");
        }
    }

    #[test]
    fn a_time_of_day_is_its_next_occurrence() {
        check(&[
            ("12:01", "2030-06-01 12:01:00"),
            ("07:30", "2030-06-02 07:30:00"),
            ("7:30", "2030-06-02 07:30:00"),
            ("07:30:15", "2030-06-02 07:30:15"),
            ("7am", "2030-06-02 07:00:00"),
            ("7:30 PM", "2030-06-01 19:30:00"),
            ("12am", "2030-06-02 00:00:00"),
            ("12:30pm", "2030-06-01 12:30:00"),
            ("19:30", "2030-06-01 19:30:00"),
            // Now is not the future.
            ("12:00", "2030-06-02 12:00:00"),
        ]);
    }

    #[test]
    fn a_date_is_kept_whatever_stands_between_it_and_the_time() {
        check(&[
            ("2031-01-01 07:30", "2031-01-01 07:30:00"),
            ("2031-01-01T07:30", "2031-01-01 07:30:00"),
            ("2031-01-01t07:30:15", "2031-01-01 07:30:15"),
            ("2031-01-01 7pm", "2031-01-01 19:00:00"),
            ("2031-01-01T07:30:00Z", "2031-01-01 16:30:00"),
            ("2031-01-01 07:30Z", "2031-01-01 16:30:00"),
            ("2031-01-01 07:30+09:00", "2031-01-01 07:30:00"),
            ("2031-01-01T07:30[Europe/Berlin]", "2031-01-01 15:30:00"),
            ("2030-06-01T03:10:00Z", "2030-06-01 12:10:00"),
        ]);
    }

    #[test]
    fn days_have_names() {
        check(&[
            ("today 19:30", "2030-06-01 19:30:00"),
            ("tomorrow 07:30", "2030-06-02 07:30:00"),
            ("Tomorrow 7am", "2030-06-02 07:00:00"),
            ("friday 16:00", "2030-06-07 16:00:00"),
            ("fri 4pm", "2030-06-07 16:00:00"),
            // It is Saturday noon.
            ("saturday 16:00", "2030-06-01 16:00:00"),
            ("saturday 11:00", "2030-06-08 11:00:00"),
        ]);
    }

    #[test]
    fn a_length_of_time_counts_from_now() {
        check(&[
            ("+40s", "40 s"),
            ("+1h30m", "5400 s"),
            ("in 2h", "7200 s"),
            ("In 45m", "2700 s"),
        ]);
    }

    #[test]
    fn a_time_that_has_passed_is_refused() {
        for past in [
            "2020-01-01 07:30",
            "2020-01-01T07:30",
            "2020-01-01T00:00:00Z",
            "2030-06-01 12:00",
            "today 07:30",
        ] {
            let error = read(past).expect_err(past);
            assert!(error.contains("has passed"), "{error}");
        }
        let error = read("2020-01-01 07:30").expect_err("past");
        assert!(error.contains("Wed 1 Jan 2020 07:30"), "{error}");
    }

    #[test]
    fn what_is_no_time_is_refused_with_examples() {
        for bad in [
            "soon",
            "",
            "7",
            "25:00",
            "13pm",
            "0am",
            "07:3O",
            "friday",
            "2031-01-01",
            "tomorrow",
            "next friday 16:00",
            "2031-13-01 07:30",
            "+soon",
            "in",
            "+",
            "7:30:15:2",
            "+5",
            "2031-01-01 07:30 x",
            "07:30 tomorrow x",
        ] {
            let error = read(bad).expect_err(bad);
            assert!(error.contains("write"), "{error}");
        }
        let day = read("friday").expect_err("no time of day");
        assert!(day.contains("write friday 07:30"), "{day}");
        let span = read("2h").expect_err("a span");
        assert!(span.contains("write +2h"), "{span}");
    }

    #[test]
    fn a_deadline_is_told_with_the_time_that_is_left() {
        let told = |text: &str| {
            let at: Timestamp = text.parse().expect("a time");
            describe_deadline(at, &noon())
        };
        assert_eq!(told("2030-06-01T03:00:40Z"), "12:00:40 (in 40 seconds)");
        assert_eq!(told("2030-06-01T03:45:00Z"), "12:45:00 (in 45 minutes)");
        assert_eq!(told("2030-06-01T05:30:00Z"), "14:30 (in 2 h 30 min)");
        assert_eq!(
            told("2030-06-01T22:30:00Z"),
            "Sun 2 Jun 07:30 (in 19 h 30 min)"
        );
        assert_eq!(told("2030-06-07T07:00:00Z"), "Fri 7 Jun 16:00 (in 6 days)");
        assert_eq!(
            told("2031-01-01T03:00:00Z"),
            "Wed 1 Jan 2031 12:00 (in 214 days)"
        );
        assert_eq!(told("2030-06-01T02:00:00Z"), "11:00 (passed)");
    }
}
