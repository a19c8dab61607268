//! Reading lengths of time and sizes from the command line.

use std::time::Duration;

use bytesize::ByteSize;
use jiff::{SignedDuration, Span, SpanRelativeTo};

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

    #[test]
    fn a_length_of_time_has_a_unit_and_is_more_than_nothing() {
        assert_eq!(parse_span("1h30m"), Ok(Duration::from_secs(90 * 60)));
        for bad in ["0s", "-5m", "soon", "5"] {
            assert!(parse_span(bad).is_err(), "{bad}");
        }
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
