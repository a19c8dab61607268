//! What is to be moved after transfers that are under way, by the same deadline: the other files of a folder.
//!
//! ```text
//!  files of a folder   ├── under way: 2 ──┤├──────── not begun: 900 MB ────────┤
//!  for the scheduler   each has its own bytes left, and 450 MB
//! ```
//!
//! So the scheduler decides for the whole folder, and not only for the files that are under way.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that follow the transfers that are under way, which share them evenly.
#[derive(Debug, Default)]
pub struct FollowingBytes {
    bytes: AtomicU64,
    under_way: AtomicU64,
}

impl FollowingBytes {
    /// Adds bytes that are to be moved.
    pub fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records that a transfer of these bytes begins: they follow no more.
    pub fn begin(&self, bytes: u64) {
        let subtract = |known: u64| Some(known.saturating_sub(bytes));
        let _ = (self.bytes).fetch_update(Ordering::Relaxed, Ordering::Relaxed, subtract);
        self.under_way.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that a transfer ended.
    pub fn end(&self) {
        let subtract = |known: u64| Some(known.saturating_sub(1));
        let _ = (self.under_way).fetch_update(Ordering::Relaxed, Ordering::Relaxed, subtract);
    }

    /// Transfers that are under way.
    pub fn under_way(&self) -> u64 {
        self.under_way.load(Ordering::Relaxed)
    }

    /// The part of each transfer that is under way.
    pub fn share(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed) / self.under_way().max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_is_shared_by_those_that_are_under_way() {
        let following = FollowingBytes::default();
        following.add(1_000);
        assert_eq!(following.share(), 1_000);
        following.begin(200);
        following.begin(200);
        assert_eq!(following.share(), 300);
        following.end();
        assert_eq!((following.share(), following.under_way()), (600, 1));
        following.begin(900);
        assert_eq!(following.share(), 0, "no less than nothing");
    }
}
