//! `Range` (RFC 9110 §14) against a copy that may still grow: which part is answered, and when.
//!
//! `core/http` parses the field. Here a request for one part is answered with that part, and one
//! for several with the whole object, which RFC 9110 §14.2 allows.

use cedos_http::{ByteRanges, RangeDecision};
use http::header::{self, HeaderMap};

/// Which part of an object to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeAnswer {
    /// The whole object, as 200.
    Whole,
    /// `start..end`, as 206. `total` is `None` while the size is unknown.
    Bytes {
        /// The first byte of the range.
        start: u64,
        /// The end of the range: one more than its last byte.
        end: u64,
        /// Size of the whole object.
        total: Option<u64>,
    },
    /// No range fits: 416 with the size.
    Unsatisfiable {
        /// Size of the whole object.
        total: u64,
    },
    /// The answer is open until the object has more than this many bytes or has ended.
    WaitForMoreThan(u64),
}

impl RangeAnswer {
    /// The answer when `have` bytes are stored and the size is `total`, if known.
    pub fn to(ranges: &ByteRanges, have: u64, total: Option<u64>) -> RangeAnswer {
        match (ranges.decide(total), total) {
            (RangeDecision::Unsatisfiable, Some(total)) => RangeAnswer::Unsatisfiable { total },
            (RangeDecision::LengthNeeded, _) => RangeAnswer::WaitForMoreThan(u64::MAX),
            (RangeDecision::Parts(parts), total) => match parts[..] {
                // A part of an object of unknown size may be sent as soon as all of it is here.
                [ref part] if total.is_none() && have < part.end => {
                    RangeAnswer::WaitForMoreThan(part.end - 1)
                }
                [ref part] => RangeAnswer::Bytes {
                    start: part.start,
                    end: part.end,
                    total,
                },
                _ => RangeAnswer::Whole,
            },
            (RangeDecision::Whole | RangeDecision::Unsatisfiable, _) => RangeAnswer::Whole,
        }
    }
}

/// Reads `Content-Range: bytes first-last/total` or `bytes */total`: first and total.
pub(crate) fn content_range(headers: &HeaderMap) -> Option<(Option<u64>, Option<u64>)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.strip_prefix("bytes ")?.trim().split_once('/')?;
    let total = match total {
        "*" => None,
        digits => Some(digits.parse().ok()?),
    };
    match range {
        "*" => Some((None, total)),
        range => Some((Some(range.split_once('-')?.0.parse().ok()?), total)),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn answer(asked: &str, have: u64, total: Option<u64>) -> RangeAnswer {
        RangeAnswer::to(&ByteRanges::parse(asked).unwrap(), have, total)
    }

    #[test]
    fn one_part_is_answered_as_such_and_several_with_the_whole() {
        let bytes = |start, end| RangeAnswer::Bytes {
            start,
            end,
            total: Some(100),
        };
        assert_eq!(answer("bytes=10-", 0, Some(100)), bytes(10, 100));
        assert_eq!(answer("bytes=10-1000", 0, Some(100)), bytes(10, 100));
        assert_eq!(answer("bytes=-1", 0, Some(100)), bytes(99, 100));
        assert_eq!(answer("bytes=0-4,5-9", 0, Some(100)), bytes(0, 10));
        assert_eq!(answer("bytes=0-1,5-6", 100, Some(100)), RangeAnswer::Whole);
        assert_eq!(answer("bytes=0-1,5-6", 10, None), RangeAnswer::Whole);
    }

    #[test]
    fn a_range_past_the_end_is_unsatisfiable() {
        let none = RangeAnswer::Unsatisfiable { total: 100 };
        assert_eq!(answer("bytes=100-", 100, Some(100)), none);
        assert_eq!(answer("bytes=100-,200-300", 100, Some(100)), none);
        let none = RangeAnswer::Unsatisfiable { total: 0 };
        assert_eq!(answer("bytes=0-", 0, Some(0)), none);
        assert_eq!(answer("bytes=-5", 0, Some(0)), RangeAnswer::Whole);
    }

    #[test]
    fn an_object_of_unknown_size_answers_once_it_can() {
        let bytes = RangeAnswer::Bytes {
            start: 2,
            end: 5,
            total: None,
        };
        let wait = RangeAnswer::WaitForMoreThan;
        assert_eq!(answer("bytes=2-4", 4, None), wait(4));
        assert_eq!(answer("bytes=2-4", 5, None), bytes);
        assert_eq!(answer("bytes=2-", 50, None), wait(u64::MAX));
        assert_eq!(answer("bytes=-2", 50, None), wait(u64::MAX));
    }

    #[test]
    fn content_range_is_read() {
        let read = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_RANGE, HeaderValue::from_static(text));
            content_range(&headers)
        };
        assert_eq!(read("bytes 5-9/10"), Some((Some(5), Some(10))));
        assert_eq!(read("bytes 5-9/*"), Some((Some(5), None)));
        assert_eq!(read("bytes */10"), Some((None, Some(10))));
        assert_eq!(read("items 5-9/10"), None);
        assert_eq!(read("bytes 5/10"), None);
    }
}
