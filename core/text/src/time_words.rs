//! Times of day, weekdays and lengths of time, as people write them.

use std::time::Duration;

use jiff::civil::{Time, Weekday};
use jiff::{SignedDuration, Span, SpanRelativeTo};

/// A time of day: `7:30`, `07:30:15`, `7am`, `7:30 pm`, in lower case.
pub fn parse_time_of_day(text: &str) -> Option<Time> {
    let (digits, half) = match text {
        _ if text.ends_with("am") => (text.strip_suffix("am")?.trim_end(), Some(0)),
        _ if text.ends_with("pm") => (text.strip_suffix("pm")?.trim_end(), Some(12)),
        _ => (text, None),
    };
    let parts: Option<Vec<i8>> = digits
        .split(':')
        .map(|part| {
            let is_number =
                (1..=2).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
            is_number.then(|| part.parse().ok())?
        })
        .collect();
    let (hour, minute, second) = match (parts?.as_slice(), half) {
        (&[hour], Some(_)) => (hour, 0, 0),
        (&[hour, minute], _) => (hour, minute, 0),
        (&[hour, minute, second], _) => (hour, minute, second),
        _ => return None,
    };
    let hour = match half {
        Some(half) => (1..=12).contains(&hour).then_some(hour % 12 + half)?,
        None => hour,
    };
    Time::new(hour, minute, second, 0).ok()
}

/// The weekday with this English name in lower case, whole or its first three letters.
pub fn parse_weekday(day: &str) -> Option<Weekday> {
    const NAMES: [(&str, Weekday); 7] = [
        ("monday", Weekday::Monday),
        ("tuesday", Weekday::Tuesday),
        ("wednesday", Weekday::Wednesday),
        ("thursday", Weekday::Thursday),
        ("friday", Weekday::Friday),
        ("saturday", Weekday::Saturday),
        ("sunday", Weekday::Sunday),
    ];
    let named = NAMES
        .iter()
        .find(|(name, _)| *name == day || name[..3] == *day);
    named.map(|(_, weekday)| *weekday)
}

/// A length of time: `2h`, `45m`, `1h 30m`, `90s`, `PT2H`.
///
/// # Errors
/// A sentence that says what a length of time looks like.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let refuse = || format!("`{text}` is not a length of time: write 2h, 45m or 1h30m");
    let span: Span = text.parse().map_err(|_| refuse())?;
    let length: SignedDuration = span
        .to_duration(SpanRelativeTo::days_are_24_hours())
        .map_err(|_| refuse())?;
    Duration::try_from(length)
        .ok()
        .filter(|d| !d.is_zero())
        .ok_or_else(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_of_time_has_a_unit_and_is_more_than_nothing() {
        assert_eq!(parse_span("1h30m"), Ok(Duration::from_secs(90 * 60)));
        for bad in ["0s", "-5m", "soon", "5"] {
            assert!(parse_span(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_of_day_have_two_forms() {
        let at = |hour, minute| Some(Time::constant(hour, minute, 0, 0));
        assert_eq!(parse_time_of_day("07:30"), at(7, 30));
        assert_eq!(parse_time_of_day("7:30 pm"), at(19, 30));
        assert_eq!(parse_time_of_day("12am"), at(0, 0));
        for bad in ["7", "24:00", "13pm", "7:300", "noon"] {
            assert_eq!(parse_time_of_day(bad), None, "{bad}");
        }
    }
}
