//! Reading `--by`, `--within` and sizes from the command line.

use std::time::Duration;

use bytesize::ByteSize;
use jiff::civil::Time;
use jiff::{SignedDuration, Span, SpanRelativeTo, Timestamp, ToSpan, Zoned};

use crate::order::Deadline;

/// The time left until `text`: `07:30` (the next one, local), RFC 3339, or `+45m`.
///
/// # Errors
/// A sentence that says what a time looks like, or that this one has passed.
pub fn parse_by(text: &str, now: &Zoned) -> Result<Duration, String> {
    if let Some(span) = text.strip_prefix('+') {
        return parse_span(span);
    }
    let left = if let Ok(at) = text.parse::<Timestamp>() {
        at.duration_since(now.timestamp())
    } else if let Ok(time) = text.parse::<Time>() {
        next_occurrence(time, now)?.duration_since(now)
    } else {
        return Err(format!(
            "`{text}` is not a time: write 07:30, 2030-01-31T07:30:00Z or +45m"
        ));
    };
    Duration::try_from(left)
        .ok()
        .filter(|left| !left.is_zero())
        .ok_or_else(|| format!("`{text}` has passed; give a time in the future"))
}

/// When `text` is: a time of day, which is a point in time, or `+45m`, a length of time from now on.
///
/// # Errors
/// As for [`parse_by`].
pub fn parse_due(text: &str, now: &Zoned) -> Result<Deadline, String> {
    let left = parse_by(text, now)?;
    if text.starts_with('+') {
        return Ok(Deadline::WithinS(left.as_secs_f64()));
    }
    let left = SignedDuration::try_from(left).map_err(|e| e.to_string())?;
    let at = now
        .timestamp()
        .checked_add(left)
        .map_err(|e| e.to_string())?;
    Ok(Deadline::At(at))
}

fn next_occurrence(time: Time, now: &Zoned) -> Result<Zoned, String> {
    let at = |day: &Zoned| {
        day.with()
            .time(time)
            .build()
            .map_err(|error| format!("{time} does not exist: {error}"))
    };
    let today = at(now)?;
    if today > *now {
        Ok(today)
    } else {
        at(&now.saturating_add(1.day()))
    }
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

/// A number of bytes: `50M`, `1.5G`, `300k`, `700` (powers of 1000), `64MiB` (of 1024).
///
/// # Errors
/// A sentence that says what a size looks like.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let size: Result<ByteSize, _> = text.parse();
    size.map(|size| size.as_u64())
        .map_err(|_| format!("`{text}` is not a size: write 50M, 1.5G or 64MiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noon() -> Zoned {
        "2030-06-01T12:00:00[Asia/Seoul]"
            .parse()
            .expect("a zoned time")
    }

    #[test]
    fn a_time_of_day_is_its_next_occurrence() {
        let left = |text| parse_by(text, &noon()).map(|d| d.as_secs());
        assert_eq!(left("12:01"), Ok(60));
        assert_eq!(left("07:30"), Ok(19 * 3600 + 1800));
        assert_eq!(left("12:00"), Ok(24 * 3600), "now is not the future");
    }

    #[test]
    fn rfc_3339_and_offsets_are_understood() {
        let left = |text| parse_by(text, &noon()).map(|d| d.as_secs());
        assert_eq!(left("2030-06-01T03:10:00Z"), Ok(600)); // noon in Seoul is 03:00 UTC
        assert_eq!(left("+45m"), Ok(45 * 60));
        assert_eq!(left("+1h30m"), Ok(90 * 60));
    }

    #[test]
    fn a_time_of_day_stays_one_and_a_span_a_span() {
        let due = |text| parse_due(text, &noon());
        assert_eq!(due("+1h"), Ok(Deadline::WithinS(3_600.0)));
        let at = "2030-06-01T12:01:00[Asia/Seoul]"
            .parse::<Zoned>()
            .expect("a zoned time");
        assert_eq!(due("12:01"), Ok(Deadline::At(at.timestamp())));
        assert!(due("soon").is_err());
    }

    #[test]
    fn a_time_that_has_passed_or_is_none_is_refused_in_words() {
        assert!(
            parse_by("2020-01-01T00:00:00Z", &noon())
                .expect_err("past")
                .contains("has passed")
        );
        assert!(
            parse_by("soon", &noon())
                .expect_err("no time")
                .contains("07:30")
        );
        assert!(parse_by("+soon", &noon()).is_err());
        assert!(parse_span("0s").is_err());
        assert!(parse_span("-5m").is_err());
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_bytes("50M"), Ok(50_000_000));
        assert_eq!(parse_bytes("1.5G"), Ok(1_500_000_000));
        assert_eq!(parse_bytes("64MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("0"), Ok(0));
        assert_eq!(parse_bytes("300k"), Ok(300_000));
        assert_eq!(parse_bytes("2TiB"), Ok(2 << 40));
        assert!(parse_bytes("").is_err());
        assert!(parse_bytes("K").is_err());
        assert!(parse_bytes("much").is_err());
        assert!(parse_bytes("-1M").is_err());
    }
}
