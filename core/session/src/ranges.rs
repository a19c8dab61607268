//! Sets of numbers, stored as ranges: which bytes arrived, which packets were received.

/// Half-open ranges `start..end`, ascending, which never touch each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RangeSet {
    ranges: Vec<(u64, u64)>,
}

impl RangeSet {
    /// Adds `start..end`. Returns how many of these numbers were new.
    #[inline]
    pub(crate) fn insert(&mut self, start: u64, end: u64) -> u64 {
        if start >= end {
            return 0;
        }
        // The common case is arrival in order, which changes only the last range.
        match self.ranges.last_mut() {
            None => {
                // Most sets never have a second range: what arrives, arrives in order.
                self.ranges.reserve_exact(1);
                self.ranges.push((start, end));
                return end - start;
            }
            Some(last) if last.1 == start => {
                last.1 = end;
                return end - start;
            }
            Some(last) if last.1 < start => {
                self.ranges.push((start, end));
                return end - start;
            }
            Some(_) => {}
        }
        let first = self.ranges.partition_point(|r| r.1 < start);
        let after = self.ranges.partition_point(|r| r.0 <= end);
        if first == after {
            self.ranges.insert(first, (start, end));
            return end - start;
        }
        let before: u64 = self.ranges[first..after].iter().map(|r| r.1 - r.0).sum();
        let merged = (
            start.min(self.ranges[first].0),
            end.max(self.ranges[after - 1].1),
        );
        self.ranges[first] = merged;
        self.ranges.drain(first + 1..after);
        merged.1 - merged.0 - before
    }

    /// Removes `start..end`.
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let first = self.ranges.partition_point(|r| r.1 <= start);
        let mut i = first;
        while i < self.ranges.len() && self.ranges[i].0 < end {
            let (a, b) = self.ranges[i];
            match (a < start, b > end) {
                (true, true) => {
                    self.ranges[i].1 = start;
                    self.ranges.insert(i + 1, (end, b));
                    return;
                }
                (true, false) => {
                    self.ranges[i].1 = start;
                    i += 1;
                }
                (false, true) => {
                    self.ranges[i].0 = end;
                    return;
                }
                (false, false) => {
                    self.ranges.remove(i);
                }
            }
        }
    }

    /// Removes everything below `n`.
    pub(crate) fn remove_below(&mut self, n: u64) {
        match self.ranges.first_mut() {
            Some(first) if first.0 < n => {
                if first.1 > n {
                    first.0 = n;
                } else {
                    self.remove(0, n);
                }
            }
            _ => {}
        }
    }

    /// Whether `n` is in the set.
    pub(crate) fn contains(&self, n: u64) -> bool {
        let i = self.ranges.partition_point(|r| r.1 <= n);
        self.ranges.get(i).is_some_and(|r| r.0 <= n)
    }

    /// Whether `start..end` overlaps or touches a range of the set.
    pub(crate) fn touches(&self, start: u64, end: u64) -> bool {
        let i = self.ranges.partition_point(|r| r.1 < start);
        self.ranges.get(i).is_some_and(|r| r.0 <= end)
    }

    /// The end of the range that contains `n`; `n` itself if none does.
    pub(crate) fn end_from(&self, n: u64) -> u64 {
        let i = self.ranges.partition_point(|r| r.1 <= n);
        match self.ranges.get(i) {
            Some(r) if r.0 <= n => r.1,
            _ => n,
        }
    }

    /// The lowest range.
    pub(crate) fn first(&self) -> Option<(u64, u64)> {
        self.ranges.first().copied()
    }
    /// The highest range.
    pub(crate) fn last(&self) -> Option<(u64, u64)> {
        self.ranges.last().copied()
    }
    /// Removes the lowest range.
    pub(crate) fn pop_first(&mut self) -> Option<(u64, u64)> {
        (!self.ranges.is_empty()).then(|| self.ranges.remove(0))
    }
    /// Closes the gap between the two lowest ranges.
    pub(crate) fn close_first_gap(&mut self) {
        if self.ranges.len() > 1 {
            self.ranges[1].0 = self.ranges[0].0;
            self.ranges.remove(0);
        }
    }
    /// The number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }
    /// The number of bytes that the set has allocated.
    pub(crate) fn footprint(&self) -> u64 {
        (self.ranges.capacity() * size_of::<(u64, u64)>()) as u64
    }
    /// Whether the set is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
    /// Removes all ranges.
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
    }
    /// Ranges from the lowest up.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> + Clone + '_ {
        self.ranges.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_behaves_like_a_set_of_numbers(
            steps in proptest::collection::vec((any::<bool>(), 0u64..60, 0u64..12), 0..60)) {
            let mut ours = RangeSet::default();
            let mut model = BTreeSet::new();
            for (add, start, len) in steps {
                let end = start + len;
                if add {
                    let new = (start..end).filter(|n| model.insert(*n)).count() as u64;
                    prop_assert_eq!(ours.insert(start, end), new);
                } else {
                    (start..end).for_each(|n| { model.remove(&n); });
                    ours.remove(start, end);
                }
                let flat: Vec<u64> = ours.iter().flat_map(|(a, b)| a..b).collect();
                prop_assert_eq!(&flat, &model.iter().copied().collect::<Vec<_>>());
                prop_assert!(ours.ranges.windows(2).all(|w| w[0].1 < w[1].0));
                for n in 0..80 {
                    prop_assert_eq!(ours.contains(n), model.contains(&n));
                }
            }
        }
    }
}
