//! What a player asks for: `Range` and `If-Range` (RFC 9110 §14) against an object that still grows.
//!
//! ```text
//!                        length known            not known yet
//!  bytes=a-b             206 a-min(b,end)        206 a-b/*, once b is here
//!  bytes=a-   bytes=-n   206, 416 past the end   the whole, 200
//!  bytes=a-b,c-d         206, in parts           the whole, 200
//!  anything else         the whole, 200          the whole, 200
//! ```
//!
//! Ranges that overlap or touch are joined, so that no list of them asks for more than the object
//! (§14.2); of too many, and of another unit, nothing is taken.

/// Ranges read of one header; a longer list is ignored, as §14.2 allows.
const RANGES_MAX: usize = 16; // a guess: players ask for one, document readers for a handful

/// What to answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestedRanges {
    /// The whole object: 200.
    Whole,
    /// Byte ranges, each from its first byte up to, not including, its end: 206.
    Ranges(Vec<(u64, u64)>),
    /// No requested range exists: 416.
    Unsatisfiable,
}

/// One item of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RangeItem {
    From(u64, Option<u64>),
    Last(u64),
}

/// What the value of a `Range` field asks of an object of this length, where that is known.
pub fn parse_ranges(range: &str, length: Option<u64>) -> RequestedRanges {
    let Some(items) = items(range) else {
        return RequestedRanges::Whole;
    };
    let Some(length) = length else {
        return match items[..] {
            [RangeItem::From(from, Some(last))] => {
                RequestedRanges::Ranges(vec![(from, last.saturating_add(1))])
            }
            _ => RequestedRanges::Whole,
        };
    };
    let mut ranges: Vec<(u64, u64)> = items
        .iter()
        .map(|item| match *item {
            RangeItem::From(from, last) => {
                let end = last.map_or(length, |last| last.saturating_add(1));
                (from, end.min(length))
            }
            RangeItem::Last(n) => (length.saturating_sub(n), length),
        })
        .filter(|(from, to)| from < to)
        .collect();
    if ranges.is_empty() {
        return RequestedRanges::Unsatisfiable;
    }
    ranges.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (from, to) in ranges {
        match joined.last_mut().filter(|(_, end)| from <= *end) {
            Some((_, end)) => *end = to.max(*end),
            None => joined.push((from, to)),
        }
    }
    RequestedRanges::Ranges(joined)
}

/// The list, if all of it can be read.
fn items(range: &str) -> Option<Vec<RangeItem>> {
    let (unit, list) = range.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let mut items = Vec::new();
    for text in list.split(',').map(|item| item.trim_matches([' ', '\t'])) {
        if text.is_empty() {
            continue; // RFC 9110 §5.6.1.2: empty elements of a list are ignored.
        }
        if items.len() == RANGES_MAX {
            return None;
        }
        let (first, last) = text.split_once('-')?;
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            digits.then(|| text.parse::<u64>().unwrap_or(u64::MAX))
        };
        items.push(match (number(first), number(last)) {
            (Some(from), Some(last)) if from <= last => RangeItem::From(from, Some(last)),
            (Some(from), None) if last.is_empty() => RangeItem::From(from, None),
            (None, Some(n)) if first.is_empty() => RangeItem::Last(n),
            _ => return None,
        });
    }
    (!items.is_empty()).then_some(items)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_range_has_its_answer() {
        let one = |from, to| RequestedRanges::Ranges(vec![(from, to)]);
        for (asked, of_100, growing) in [
            ("bytes=0-9", one(0, 10), one(0, 10)),
            ("bytes=90-", one(90, 100), RequestedRanges::Whole),
            ("bytes=-10", one(90, 100), RequestedRanges::Whole),
            ("bytes=-1000", one(0, 100), RequestedRanges::Whole),
            ("bytes=90-1000", one(90, 100), one(90, 1001)),
            (
                "bytes=100-",
                RequestedRanges::Unsatisfiable,
                RequestedRanges::Whole,
            ),
            (
                "bytes=100-200",
                RequestedRanges::Unsatisfiable,
                one(100, 201),
            ),
            (
                "bytes=-0",
                RequestedRanges::Unsatisfiable,
                RequestedRanges::Whole,
            ),
            (
                "bytes=0-1, 50-59",
                RequestedRanges::Ranges(vec![(0, 2), (50, 60)]),
                RequestedRanges::Whole,
            ),
            ("bytes=50-59,0-99", one(0, 100), RequestedRanges::Whole),
            ("bytes=0-4,5-9", one(0, 10), RequestedRanges::Whole),
            ("bytes=0-4,200-", one(0, 5), RequestedRanges::Whole),
            ("Bytes = 0-4", one(0, 5), one(0, 5)),
            ("bytes=,0-4,", one(0, 5), one(0, 5)),
            ("bytes=9-5", RequestedRanges::Whole, RequestedRanges::Whole),
            ("bytes=a-b", RequestedRanges::Whole, RequestedRanges::Whole),
            ("bytes=+1-5", RequestedRanges::Whole, RequestedRanges::Whole),
            ("bytes=-", RequestedRanges::Whole, RequestedRanges::Whole),
            ("bytes=", RequestedRanges::Whole, RequestedRanges::Whole),
            ("items=0-4", RequestedRanges::Whole, RequestedRanges::Whole),
        ] {
            assert_eq!(parse_ranges(asked, Some(100)), of_100, "{asked}");
            assert_eq!(parse_ranges(asked, None), growing, "{asked}, growing");
        }
        let huge = "bytes=0-99999999999999999999999";
        assert_eq!(parse_ranges(huge, Some(100)), one(0, 100));
    }

    #[test]
    fn a_long_list_is_ignored_and_an_empty_object_has_no_ranges() {
        let many: Vec<String> = (0..17).map(|n| format!("{n}0-{n}1")).collect();
        let asked = format!("bytes={}", many.join(","));
        assert_eq!(parse_ranges(&asked, Some(1000)), RequestedRanges::Whole);
        assert_eq!(
            parse_ranges("bytes=0-", Some(0)),
            RequestedRanges::Unsatisfiable
        );
    }
}
