//! A bounded map of the latest entries; the oldest entries are forgotten.

use std::collections::{BTreeMap, VecDeque};

pub(crate) struct RecentMap<K, V> {
    max: usize,
    map: BTreeMap<K, V>,
    /// Keys in the order of insertion, the oldest first.
    order: VecDeque<K>,
}

impl<K: Ord + Copy, V> RecentMap<K, V> {
    pub(crate) fn new(max: usize) -> Self {
        RecentMap {
            max,
            map: BTreeMap::new(),
            order: VecDeque::new(),
        }
    }

    /// Inserts an entry. A key that exists already keeps its age.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        if self.map.insert(key, value).is_some() {
            return;
        }
        self.order.push_back(key);
        if self.order.len() > self.max
            && let Some(oldest) = self.order.pop_front()
        {
            self.map.remove(&oldest);
        }
    }

    /// Removes an entry.
    pub(crate) fn remove(&mut self, key: &K) {
        if self.map.remove(key).is_some() {
            self.order.retain(|held| held != key);
        }
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.map.get(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_make_room() {
        let mut recent = RecentMap::new(2);
        recent.insert(1, 'a');
        recent.insert(2, 'b');
        recent.insert(1, 'c');
        recent.insert(3, 'd');
        let there = [1, 2, 3].map(|key| recent.get(&key).copied());
        assert_eq!(there, [None, Some('b'), Some('d')]);
        assert_eq!((recent.map.len(), recent.order.len()), (2, 2));
    }
}
