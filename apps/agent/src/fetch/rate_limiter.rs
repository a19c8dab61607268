//! A limit on the rate at which transfers take bytes in or send them (`--limit-rate`): a token bucket that several
//! downloads may share. An upload's flow reads its file only while the limit allows it.
//!
//! ```text
//!  bytes that came ──▶ taken from the allowance ── below zero: nobody reads until it has grown back
//!                                                     │
//!  the connection, or the flow, is not read ◀─────────┘  so the sender's window closes
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::order::TransferOrder;

/// How long a limiter may be unused for it to be made up for afterwards.
const BURST: Duration = Duration::from_millis(100); // a guess: less than people see

/// The least that a connection may hold unread. Less: each read waits for a round trip.
const WINDOW_BYTES_MIN: u64 = 64 * 1024; // a guess: several packets

/// The least that an upload reads at once. Less: a packet for every few bytes.
const PIECE_BYTES_MIN: u64 = 1_200;

/// A limit on the rate of one or more transfers.
#[derive(Debug)]
pub struct RateLimiter {
    bytes_per_s: u64,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    /// Bytes that may be taken in; below zero after a piece that was larger.
    allowance: f64,
    /// When the allowance was computed.
    at: Instant,
}

impl RateLimiter {
    /// A limit of so many bytes per second.
    pub fn new(bytes_per_s: u64) -> RateLimiter {
        RateLimiter {
            bytes_per_s: bytes_per_s.max(1),
            bucket: Mutex::new(Bucket {
                allowance: 0.0,
                at: Instant::now(),
            }),
        }
    }

    /// The limit in bytes per second.
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes_per_s as f64
    }

    /// The most bytes that a connection should hold unread with this limit: what it allows in a second.
    pub fn window(bytes_per_s: u64) -> u64 {
        bytes_per_s.max(WINDOW_BYTES_MIN)
    }

    /// The most bytes of an upload that are read at once: what the limit allows in the time of a burst.
    pub fn piece_bytes_max(&self) -> usize {
        let burst = (BURST.as_secs_f64() * self.bytes_per_s()) as u64;
        usize::try_from(burst.max(PIECE_BYTES_MIN)).unwrap_or(usize::MAX)
    }

    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let grown = now.duration_since(bucket.at).as_secs_f64() * self.bytes_per_s();
        let most = BURST.as_secs_f64() * self.bytes_per_s();
        bucket.allowance = (bucket.allowance + grown).min(most);
        bucket.at = now;
        bucket
    }

    /// Whether nothing may be read now.
    pub fn is_holding(&self) -> bool {
        self.bucket().allowance < 0.0
    }

    /// Ready when bytes may be read.
    pub async fn ready(&self) {
        loop {
            let until = {
                let bucket = self.bucket();
                if bucket.allowance >= 0.0 {
                    return;
                }
                let missing = -bucket.allowance / self.bytes_per_s();
                // A timer has milliseconds.
                let missing = Duration::try_from_secs_f64(missing).unwrap_or(Duration::MAX);
                bucket.at + missing.min(Duration::from_secs(3_600)) + Duration::from_millis(1)
            };
            sleep_until(until).await;
        }
    }

    /// Records that bytes were read.
    pub fn take(&self, bytes: u64) {
        self.bucket().allowance -= bytes as f64;
    }
}

/// The limiters of orders, of which those with the same group share one.
#[derive(Debug, Default)]
pub struct RateLimiters {
    groups: Mutex<BTreeMap<String, Weak<RateLimiter>>>,
}

impl RateLimiters {
    /// The limiter of an order, if it has a limit.
    pub fn limiter_of(&self, order: &TransferOrder) -> Option<Arc<RateLimiter>> {
        let limit_rate = order.limit_rate?;
        let Some(group) = &order.limit_group else {
            return Some(Arc::new(RateLimiter::new(limit_rate)));
        };
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|_, limiter| limiter.strong_count() > 0);
        let shared = groups.get(group).and_then(Weak::upgrade);
        let limiter = shared.unwrap_or_else(|| Arc::new(RateLimiter::new(limit_rate)));
        groups.insert(group.clone(), Arc::downgrade(&limiter));
        Some(limiter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::TransferVerb;

    #[test]
    fn orders_of_a_group_have_one_limiter_and_others_each_their_own() {
        let limiters = RateLimiters::default();
        let limiter = |limit_rate, group: Option<&str>| {
            let mut order = TransferOrder::new(TransferVerb::Get, "http://h/a");
            (order.limit_rate, order.limit_group) = (limit_rate, group.map(str::to_owned));
            limiters.limiter_of(&order)
        };
        assert!(limiter(None, Some("a")).is_none());
        let (one, other) = (limiter(Some(9), Some("a")), limiter(Some(9), Some("a")));
        let (one, other) = (one.expect("a limit"), other.expect("a limit"));
        assert!(Arc::ptr_eq(&one, &other));
        let alone = limiter(Some(9), None).expect("a limit");
        assert!(!Arc::ptr_eq(&one, &alone));
        assert!(limiter(Some(5), Some("b")).is_some_and(|b| b.bytes_per_s() == 5.0));
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_of_any_size_come_at_the_limit_on_average() {
        for piece in [100u64, 10_000, 400_000] {
            let limiter = RateLimiter::new(50_000);
            let begun = Instant::now();
            let mut taken = 0;
            while taken < 1_000_000 {
                limiter.ready().await;
                limiter.take(piece);
                taken += piece;
            }
            limiter.ready().await;
            let rate = taken as f64 / begun.elapsed().as_secs_f64();
            assert!((45_000.0..=50_500.0).contains(&rate), "{piece}: {rate}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nothing_came_is_hardly_made_up_for() {
        let limiter = RateLimiter::new(50_000);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!(!limiter.is_holding());
        limiter.take(6_000);
        assert!(limiter.is_holding(), "a minute is not saved up");
    }

    #[tokio::test(start_paused = true)]
    async fn downloads_that_share_a_limit_have_it_together() {
        let limiter = RateLimiter::new(50_000);
        let begun = Instant::now();
        let take = async || {
            for _ in 0..50 {
                limiter.ready().await;
                limiter.take(10_000);
            }
        };
        tokio::join!(take(), take());
        limiter.ready().await;
        let rate = 1_000_000.0 / begun.elapsed().as_secs_f64();
        assert!((45_000.0..=51_000.0).contains(&rate), "{rate}");
    }
}
