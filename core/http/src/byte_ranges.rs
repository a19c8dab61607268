//! The `Range` field of HTTP requests (RFC 9110 §14), for objects whose length may not be known
//! yet.
//!
//! ```text
//!                        length known               not known yet
//!  bytes=a-b             206 a to min(b, end)       206 a to b, once b is here
//!  bytes=a-   bytes=-n   206, 416 past the end      the length decides
//!  bytes=a-b,c-d         206 in parts, 416          the whole, 200
//!  anything else         the whole, 200             the whole, 200
//! ```
//!
//! Ranges that overlap or touch are joined, so that no list asks for more bytes than the object has
//! (§14.2). A list that is too long, malformed, or in another unit is ignored, as §14.2 allows.

use std::num::NonZeroUsize;
use std::ops::Range;

use http_range_header::{SyntacticallyCorrectRange, parse_range_header_with_max_ranges};

/// The most ranges read from one field; a longer list is ignored.
const RANGES_MAX: NonZeroUsize = NonZeroUsize::new(16).unwrap(); // a guess: players ask for one, document readers for a handful

/// The byte ranges that a request asks for; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByteRanges(Vec<SyntacticallyCorrectRange>);

/// Which part of an object a response to a request with a `Range` field carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RangeDecision {
    /// The whole object: 200.
    Whole,
    /// Parts of the object in ascending order, at least one, none of them empty: 206.
    Parts(Vec<Range<u64>>),
    /// The object contains no requested byte: 416.
    Unsatisfiable,
    /// The decision depends on the length of the object, which is not known.
    LengthNeeded,
}

impl ByteRanges {
    /// Reads the value of a `Range` field. `None` if the field is to be ignored.
    pub fn parse(value: &str) -> Option<ByteRanges> {
        let parsed = parse_range_header_with_max_ranges(value, RANGES_MAX).ok()?;
        Some(ByteRanges(parsed.into_ranges()))
    }

    /// Decides how to answer for an object of this length; `None` if the length is unknown.
    pub fn decide(&self, length: Option<u64>) -> RangeDecision {
        match (length, self.0.as_slice()) {
            (Some(length), _) => self.of_length(length),
            (None, [SyntacticallyCorrectRange::Indexed(first, last)]) => {
                let part = *first..last.saturating_add(1);
                RangeDecision::Parts(std::iter::once(part).collect())
            }
            (None, [_]) => RangeDecision::LengthNeeded,
            (None, _) => RangeDecision::Whole,
        }
    }

    fn of_length(&self, length: u64) -> RangeDecision {
        let mut ranges = Vec::with_capacity(self.0.len());
        for range in &self.0 {
            ranges.push(match *range {
                SyntacticallyCorrectRange::Indexed(first, last) => {
                    first..last.saturating_add(1).min(length)
                }
                SyntacticallyCorrectRange::FromStart(first) => first..length,
                // All of an empty object. RFC 9110 §14.1.2 calls that satisfiable, but
                // Content-Range cannot express it.
                SyntacticallyCorrectRange::FromLast(1..) if length == 0 => {
                    return RangeDecision::Whole;
                }
                SyntacticallyCorrectRange::FromLast(bytes) => length.saturating_sub(bytes)..length,
            });
        }
        ranges.retain(|range| !range.is_empty());
        ranges.sort_unstable_by_key(|range| (range.start, range.end));
        let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match joined.last_mut().filter(|last| range.start <= last.end) {
                Some(last) => last.end = last.end.max(range.end),
                None => joined.push(range),
            }
        }
        if joined.is_empty() {
            RangeDecision::Unsatisfiable
        } else {
            RangeDecision::Parts(joined)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::RangeDecision::{LengthNeeded, Unsatisfiable, Whole};
    use super::*;

    fn decide(asked: &str, length: Option<u64>) -> RangeDecision {
        ByteRanges::parse(asked).map_or(Whole, |ranges| ranges.decide(length))
    }

    fn one(first: u64, end: u64) -> RangeDecision {
        RangeDecision::Parts(std::iter::once(first..end).collect())
    }

    #[test]
    fn every_kind_of_range_has_its_answer() {
        for (asked, of_100, unknown) in [
            ("bytes=0-0", one(0, 1), one(0, 1)),
            ("bytes=0-9", one(0, 10), one(0, 10)),
            ("bytes=00-09", one(0, 10), one(0, 10)),
            ("bytes=90-", one(90, 100), LengthNeeded),
            ("bytes=-10", one(90, 100), LengthNeeded),
            ("bytes=-1000", one(0, 100), LengthNeeded),
            ("bytes=90-1000", one(90, 100), one(90, 1001)),
            ("bytes=99-", one(99, 100), LengthNeeded),
            ("bytes=100-", Unsatisfiable, LengthNeeded),
            ("bytes=100-200", Unsatisfiable, one(100, 201)),
            ("bytes=-0", Unsatisfiable, LengthNeeded),
            ("bytes=100-,200-300", Unsatisfiable, Whole),
            (
                "bytes=0-1, 50-59",
                RangeDecision::Parts(vec![0..2, 50..60]),
                Whole,
            ),
            (
                "bytes=-1,0-0",
                RangeDecision::Parts(vec![0..1, 99..100]),
                Whole,
            ),
            ("bytes=50-59,0-99", one(0, 100), Whole),
            ("bytes=0-4,5-9", one(0, 10), Whole),
            ("bytes=0-4,0-4,0-4", one(0, 5), Whole),
            ("bytes=0-4,200-", one(0, 5), Whole),
            ("Bytes=0-4", one(0, 5), one(0, 5)),
            ("bytes=,\t0-4 ,", one(0, 5), one(0, 5)),
        ] {
            assert_eq!(decide(asked, Some(100)), of_100, "{asked}");
            assert_eq!(decide(asked, None), unknown, "{asked}, length unknown");
        }
    }

    #[test]
    fn what_is_malformed_or_in_another_unit_is_ignored() {
        for asked in [
            "",
            "bytes",
            "bytes=",
            "bytes=-",
            "bytes=,",
            "bytes=a-b",
            "bytes=5-4",
            "bytes=0-1,9-5",
            "bytes=+1-2",
            "bytes=1-+2",
            "bytes=1 - 2",
            "bytes=0-1 ",
            "bytes=0-1;2-3",
            "bytes=0x1-2",
            "bytes=--1",
            "bytes =0-1",
            "items=0-1",
            "0-1",
        ] {
            assert_eq!(ByteRanges::parse(asked), None, "{asked}");
        }
    }

    #[test]
    fn a_list_is_read_up_to_its_limit() {
        let list = |ranges: usize| format!("bytes={}", vec!["0-0"; ranges].join(","));
        assert_eq!(decide(&list(RANGES_MAX.get()), Some(100)), one(0, 1));
        assert_eq!(ByteRanges::parse(&list(RANGES_MAX.get() + 1)), None);
    }

    #[test]
    fn numbers_beyond_64_bits_are_beyond_every_object() {
        let huge = "99999999999999999999999";
        assert_eq!(decide(&format!("bytes=0-{huge}"), Some(100)), one(0, 100));
        assert_eq!(decide(&format!("bytes={huge}-"), Some(100)), Unsatisfiable);
        assert_eq!(decide(&format!("bytes=-{huge}"), Some(100)), one(0, 100));
    }

    #[test]
    fn of_an_empty_object_a_suffix_is_all_and_nothing_else_exists() {
        assert_eq!(decide("bytes=0-", Some(0)), Unsatisfiable);
        assert_eq!(decide("bytes=0-9", Some(0)), Unsatisfiable);
        assert_eq!(decide("bytes=-0", Some(0)), Unsatisfiable);
        assert_eq!(decide("bytes=-5", Some(0)), Whole);
        assert_eq!(decide("bytes=0-,-5", Some(0)), Whole);
    }

    proptest::proptest! {
        #[test]
        fn parts_are_within_the_object_apart_and_in_order(
            asked in "bytes=[0-9]{0,21}-[0-9]{0,21}(,[0-9]{0,3}-[0-9]{0,3}){0,4}",
            length: u64,
        ) {
            if let RangeDecision::Parts(parts) = decide(&asked, Some(length)) {
                let mut free_from = 0;
                for part in parts {
                    proptest::prop_assert!(part.start >= free_from && part.start < part.end);
                    free_from = part.end + u64::from(part.end < length);
                    proptest::prop_assert!(part.end <= length);
                }
            }
        }
    }
}
