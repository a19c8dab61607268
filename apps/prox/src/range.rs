//! `Range` and `If-Range` (RFC 9110 §14) against an object whose size may not be known yet.
//!
//! Only one range is answered as a part. Several ranges are answered with the whole object, which
//! RFC 9110 §14.2 allows and which no overlapping list can turn into an amplifier. A `Range` that
//! does not parse, or that names another unit, is ignored, as the RFC says.

use http::HeaderValue;

/// One `Range` header, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeHeader {
    /// `bytes=first-` or `bytes=first-last`, both inclusive.
    From {
        /// The first byte asked for.
        first: u64,
        /// The last one, unless the rest is asked for.
        last: Option<u64>,
    },
    /// `bytes=-n`: the last `n` bytes.
    Suffix(u64),
    /// Several ranges; `reachable_from` is the least first byte among them (0 if any suffix).
    Many {
        /// Below or at this size none of the ranges can be satisfied.
        reachable_from: u64,
    },
}

/// What to send of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeAnswer {
    /// The whole object, as 200.
    Whole,
    /// `start..end`, as 206. `total` is `None` while the size is unknown.
    Bytes {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Size of the whole object.
        total: Option<u64>,
    },
    /// Nothing fits: 416 with the size.
    Unsatisfiable {
        /// Size of the whole object.
        total: u64,
    },
    /// Not to be said before the object has more than this many bytes or has ended.
    WaitForMoreThan(u64),
}

/// Most ranges read from one header; a longer list is ignored (RFC 9110 §14.2 allows it).
const RANGES_MAX: usize = 64;

impl RangeHeader {
    /// Reads the value of a `Range` header; `None` when it is to be ignored.
    pub fn parse(value: &HeaderValue) -> Option<RangeHeader> {
        let text = value.to_str().ok()?;
        let (unit, list) = text.split_once('=')?;
        if !unit.trim().eq_ignore_ascii_case("bytes") {
            return None;
        }
        let mut ranges = Vec::new();
        for item in list.split(',').map(|item| item.trim_matches([' ', '\t'])) {
            if item.is_empty() {
                continue; // RFC 9110 §5.6.1.2: empty list elements are ignored.
            }
            if ranges.len() == RANGES_MAX {
                return None;
            }
            ranges.push(one(item)?);
        }
        match ranges.as_slice() {
            [] => None,
            [range] => Some(*range),
            many => Some(RangeHeader::Many {
                reachable_from: many
                    .iter()
                    .filter_map(|range| match range {
                        RangeHeader::From { first, .. } => Some(*first),
                        RangeHeader::Suffix(0) => None,
                        _ => Some(0),
                    })
                    .min()
                    .unwrap_or(u64::MAX),
            }),
        }
    }

    /// What to answer when `have` bytes are here and the whole is `total` bytes, if known.
    pub fn resolve(self, have: u64, total: Option<u64>) -> RangeAnswer {
        match (self, total) {
            (RangeHeader::From { first, .. }, Some(total)) if first >= total => {
                RangeAnswer::Unsatisfiable { total }
            }
            (RangeHeader::From { first, last }, Some(total)) => RangeAnswer::Bytes {
                start: first,
                end: last.map_or(total, |last| total.min(last.saturating_add(1))),
                total: Some(total),
            },
            // A part of an object of unknown size may be sent as soon as all of it is here.
            (
                RangeHeader::From {
                    first,
                    last: Some(last),
                },
                None,
            ) if have > last => RangeAnswer::Bytes {
                start: first,
                end: last + 1,
                total: None,
            },
            (
                RangeHeader::From {
                    last: Some(last), ..
                },
                None,
            ) => RangeAnswer::WaitForMoreThan(last),
            (RangeHeader::From { last: None, .. } | RangeHeader::Suffix(_), None) => {
                RangeAnswer::WaitForMoreThan(u64::MAX)
            }
            (RangeHeader::Suffix(0), Some(total)) => RangeAnswer::Unsatisfiable { total },
            // A suffix of nothing is all of it, and Content-Range cannot say so.
            (RangeHeader::Suffix(_), Some(0)) => RangeAnswer::Whole,
            (RangeHeader::Suffix(bytes), Some(total)) => RangeAnswer::Bytes {
                start: total.saturating_sub(bytes),
                end: total,
                total: Some(total),
            },
            (RangeHeader::Many { reachable_from }, Some(total))
                if reachable_from >= total && total > 0 =>
            {
                RangeAnswer::Unsatisfiable { total }
            }
            (RangeHeader::Many { .. }, _) => RangeAnswer::Whole,
        }
    }
}

/// Reads `first-`, `first-last` or `-n`.
fn one(item: &str) -> Option<RangeHeader> {
    let (first, last) = item.split_once('-')?;
    match (first, last) {
        ("", bytes) => Some(RangeHeader::Suffix(number(bytes)?)),
        (first, "") => Some(RangeHeader::From {
            first: number(first)?,
            last: None,
        }),
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(RangeHeader::From {
                first,
                last: Some(last),
            })
        }
    }
}

/// Digits only (`u64::from_str` would take a plus sign); too large is as good as the end.
fn number(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(text.parse().unwrap_or(u64::MAX - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<RangeHeader> {
        RangeHeader::parse(&HeaderValue::from_str(text).unwrap())
    }

    fn part(text: &str, have: u64, total: Option<u64>) -> RangeAnswer {
        parse(text).unwrap().resolve(have, total)
    }

    #[test]
    fn what_does_not_parse_is_ignored() {
        for text in [
            "bytes",
            "bytes=",
            "bytes=-",
            "bytes=a-b",
            "bytes=5-4",
            "bytes=+1-2",
            "bytes=1-+2",
            "items=0-1",
            "bytes=1 - 2",
            "bytes=0-1;2-3",
            "bytes=0x1-2",
            "bytes=,",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        let long = format!("bytes={}", vec!["0-0"; RANGES_MAX + 1].join(","));
        assert_eq!(parse(&long), None);
    }

    #[test]
    fn a_range_of_a_known_size_is_cut_to_it() {
        let bytes = |start, end| RangeAnswer::Bytes {
            start,
            end,
            total: Some(100),
        };
        assert_eq!(part("bytes=0-0", 0, Some(100)), bytes(0, 1));
        assert_eq!(part("bytes=10-", 0, Some(100)), bytes(10, 100));
        assert_eq!(part("bytes=10-1000", 0, Some(100)), bytes(10, 100));
        assert_eq!(part("Bytes=99-", 0, Some(100)), bytes(99, 100));
        assert_eq!(part("bytes=-1", 0, Some(100)), bytes(99, 100));
        assert_eq!(part("bytes=-1000", 0, Some(100)), bytes(0, 100));
        assert_eq!(
            part("bytes=0-99999999999999999999999", 0, Some(100)),
            bytes(0, 100)
        );
        assert_eq!(part("bytes=, 5-6 ,", 0, Some(100)), bytes(5, 7));
    }

    #[test]
    fn a_range_past_the_end_is_unsatisfiable() {
        let none = RangeAnswer::Unsatisfiable { total: 100 };
        assert_eq!(part("bytes=100-", 100, Some(100)), none);
        assert_eq!(part("bytes=-0", 100, Some(100)), none);
        assert_eq!(part("bytes=100-,200-300", 100, Some(100)), none);
        assert_eq!(
            part("bytes=0-", 0, Some(0)),
            RangeAnswer::Unsatisfiable { total: 0 }
        );
        assert_eq!(part("bytes=-5", 0, Some(0)), RangeAnswer::Whole);
    }

    #[test]
    fn several_ranges_are_answered_with_the_whole() {
        assert_eq!(part("bytes=0-1,5-6", 100, Some(100)), RangeAnswer::Whole);
        assert_eq!(part("bytes=0-1,5-6", 10, None), RangeAnswer::Whole);
        assert_eq!(part("bytes=500-,-1", 100, Some(100)), RangeAnswer::Whole);
    }

    #[test]
    fn an_object_of_unknown_size_answers_once_it_can() {
        let five = RangeAnswer::Bytes {
            start: 2,
            end: 5,
            total: None,
        };
        assert_eq!(part("bytes=2-4", 4, None), RangeAnswer::WaitForMoreThan(4));
        assert_eq!(part("bytes=2-4", 5, None), five);
        assert_eq!(
            part("bytes=2-", 50, None),
            RangeAnswer::WaitForMoreThan(u64::MAX)
        );
        assert_eq!(
            part("bytes=-2", 50, None),
            RangeAnswer::WaitForMoreThan(u64::MAX)
        );
    }

    proptest::proptest! {
        #[test]
        fn a_part_lies_within_the_object_whatever_is_asked(
            text in "bytes=[0-9]{0,21}-[0-9]{0,21}(,[0-9]{0,3}-[0-9]{0,3})?",
            have: u64,
            total in proptest::option::of(proptest::num::u64::ANY),
        ) {
            let Some(range) = parse(&text) else { return Ok(()) };
            match range.resolve(have, total) {
                RangeAnswer::Bytes { start, end, total: said } => {
                    proptest::prop_assert!(start < end);
                    proptest::prop_assert!(end <= total.unwrap_or(have));
                    proptest::prop_assert_eq!(said, total);
                }
                RangeAnswer::Unsatisfiable { total: said } => {
                    proptest::prop_assert_eq!(Some(said), total);
                }
                RangeAnswer::WaitForMoreThan(bytes) => {
                    proptest::prop_assert!(total.is_none() && bytes >= have);
                }
                RangeAnswer::Whole => {}
            }
        }
    }
}
