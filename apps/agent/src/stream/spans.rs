//! Which bytes of an object are held: spans that neither overlap nor touch, in order.

use serde::{Deserialize, Serialize};

/// Half-open spans of bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub struct Spans(Vec<(u64, u64)>);

impl Spans {
    /// Adds `from..to`, and merges adjacent spans.
    pub fn add(&mut self, mut from: u64, mut to: u64) {
        if from >= to {
            return;
        }
        let first = self.0.partition_point(|(_, end)| *end < from);
        let last = self.0.partition_point(|(start, _)| *start <= to);
        if let Some((start, _)) = self.0[first..last].first() {
            from = from.min(*start);
        }
        if let Some((_, end)) = self.0[first..last].last() {
            to = to.max(*end);
        }
        self.0.splice(first..last, [(from, to)]);
    }

    /// Removes `from..to`.
    pub fn remove(&mut self, from: u64, to: u64) {
        let mut left = Vec::with_capacity(self.0.len() + 1);
        for (start, end) in self.0.drain(..) {
            let before = (start, end.min(from));
            let behind = (start.max(to), end);
            left.extend([before, behind].into_iter().filter(|(a, b)| a < b));
        }
        left.dedup();
        self.0 = left;
    }

    /// The end of the held bytes from `at` on; `at` itself if it is not held.
    pub fn end_from(&self, at: u64) -> u64 {
        let after = self.0.partition_point(|(start, _)| *start <= at);
        let (_, end) = after.checked_sub(1).map_or((0, 0), |n| self.0[n]);
        end.max(at)
    }

    /// The start of the next span after `at`.
    pub fn next_from(&self, at: u64) -> Option<u64> {
        let after = self.0.partition_point(|(start, _)| *start <= at);
        self.0.get(after).map(|(start, _)| *start)
    }

    /// How many bytes are held.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// The part below `before` of the first span.
    pub fn first_below(&self, before: u64) -> Option<(u64, u64)> {
        let (start, end) = *self.0.first()?;
        (start < before).then(|| (start, end.min(before)))
    }
}

impl From<Spans> for Vec<(u64, u64)> {
    fn from(spans: Spans) -> Vec<(u64, u64)> {
        spans.0
    }
}

/// Spans that are out of order or touch.
#[derive(Debug)]
pub struct SpanOrderError;

impl std::fmt::Display for SpanOrderError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("spans that overlap or are out of order")
    }
}

impl TryFrom<Vec<(u64, u64)>> for Spans {
    type Error = SpanOrderError;
    fn try_from(spans: Vec<(u64, u64)>) -> Result<Spans, SpanOrderError> {
        let whole = spans.iter().all(|(start, end)| start < end);
        let apart = spans.windows(2).all(|pair| pair[0].1 < pair[1].0);
        (whole && apart)
            .then_some(Spans(spans))
            .ok_or(SpanOrderError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(of: &[(u64, u64)]) -> Spans {
        let mut spans = Spans::default();
        of.iter().for_each(|(from, to)| spans.add(*from, *to));
        spans
    }

    #[test]
    fn spans_that_meet_are_one() {
        for (added, held) in [
            (vec![(0, 5), (5, 9)], vec![(0, 9)]),
            (vec![(5, 9), (0, 4)], vec![(0, 4), (5, 9)]),
            (vec![(0, 2), (4, 6), (8, 9), (1, 8)], vec![(0, 9)]),
            (vec![(3, 3), (7, 9), (7, 8)], vec![(7, 9)]),
        ] {
            assert_eq!(Vec::from(spans(&added)), held, "{added:?}");
        }
    }

    #[test]
    fn what_is_taken_away_is_not_held() {
        let mut held = spans(&[(0, 10), (20, 30)]);
        held.remove(5, 25);
        assert_eq!(Vec::from(held.clone()), [(0, 5), (25, 30)]);
        held.remove(26, 27);
        assert_eq!(Vec::from(held.clone()), [(0, 5), (25, 26), (27, 30)]);
        assert_eq!(held.bytes(), 9);
        assert_eq!(held.first_below(3), Some((0, 3)));
        assert_eq!(held.first_below(0), None);
    }

    #[test]
    fn it_is_known_how_far_one_can_read_and_where_to_go_on_fetching() {
        let held = spans(&[(0, 10), (20, 30)]);
        for (at, end, next) in [
            (0, 10, Some(20)),
            (9, 10, Some(20)),
            (10, 10, Some(20)),
            (25, 30, None),
            (40, 40, None),
        ] {
            assert_eq!((held.end_from(at), held.next_from(at)), (end, next), "{at}");
        }
    }

    #[test]
    fn a_note_whose_spans_make_no_sense_is_not_believed() {
        assert!(serde_json::from_str::<Spans>("[[0,5],[6,9]]").is_ok());
        for bad in ["[[5,0]]", "[[0,5],[5,9]]", "[[6,9],[0,5]]"] {
            assert!(serde_json::from_str::<Spans>(bad).is_err(), "{bad}");
        }
    }
}
