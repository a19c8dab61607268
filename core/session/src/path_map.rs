//! A map from a few path ids to values: a sorted list. The smallest node of a tree has room for
//! eleven entries, and every session would have two such nodes.

use d2tp_wire::PathId;

#[derive(Debug)]
pub(crate) struct PathMap<T>(Vec<(PathId, T)>);

impl<T> Default for PathMap<T> {
    fn default() -> Self {
        PathMap(Vec::new())
    }
}

impl<T> PathMap<T> {
    fn place(&self, path: PathId) -> Result<usize, usize> {
        self.0.binary_search_by_key(&path, |(path, _)| *path)
    }
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
    pub(crate) fn get(&self, path: &PathId) -> Option<&T> {
        self.place(*path).ok().map(|at| &self.0[at].1)
    }
    pub(crate) fn get_mut(&mut self, path: &PathId) -> Option<&mut T> {
        self.place(*path).ok().map(|at| &mut self.0[at].1)
    }
    pub(crate) fn contains_key(&self, path: &PathId) -> bool {
        self.place(*path).is_ok()
    }
    pub(crate) fn insert(&mut self, path: PathId, value: T) {
        match self.place(path) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => {
                self.0.reserve_exact(1);
                self.0.insert(at, (path, value));
            }
        }
    }
    /// The entry of this path id, which is created with its default if it is missing.
    pub(crate) fn entry(&mut self, path: PathId) -> &mut T
    where
        T: Default,
    {
        let at = match self.place(path) {
            Ok(at) => at,
            Err(at) => {
                self.0.insert(at, (path, T::default()));
                at
            }
        };
        &mut self.0[at].1
    }
    pub(crate) fn remove(&mut self, path: &PathId) -> Option<T> {
        self.place(*path).ok().map(|at| self.0.remove(at).1)
    }
    pub(crate) fn pop_first(&mut self) -> Option<(PathId, T)> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
    pub(crate) fn keys(&self) -> impl Iterator<Item = &PathId> {
        self.0.iter().map(|(path, _)| path)
    }
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, value)| value)
    }
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&PathId, &mut T)> {
        self.0.iter_mut().map(|(path, value)| (&*path, value))
    }
}

impl<T> IntoIterator for PathMap<T> {
    type Item = (PathId, T);
    type IntoIter = std::vec::IntoIter<(PathId, T)>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<T> FromIterator<(PathId, T)> for PathMap<T> {
    fn from_iter<I: IntoIterator<Item = (PathId, T)>>(all: I) -> Self {
        let mut by_path = PathMap(all.into_iter().collect());
        by_path.0.sort_by_key(|(path, _)| *path);
        by_path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_kept_in_order_whatever_the_order_of_coming() {
        let mut map: PathMap<u8> = [(PathId(5), 5), (PathId(1), 1)].into_iter().collect();
        map.insert(PathId(3), 3);
        map.insert(PathId(3), 4);
        assert_eq!(map.keys().map(|p| p.0).collect::<Vec<_>>(), [1, 3, 5]);
        assert_eq!((map.get(&PathId(3)), map.get(&PathId(2))), (Some(&4), None));
        assert_eq!(map.remove(&PathId(9)), None);
        assert_eq!(map.pop_first(), Some((PathId(1), 1)));
        assert_eq!(map.into_iter().count(), 2);
    }
}
