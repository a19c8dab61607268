//! A token bucket: how many bytes a second all flows of a client move together, in one direction.
//!
//! ```text
//!  flow ── poll ──▶ enough tokens, and its turn? ── yes ──▶ it moves some bytes, and they are taken
//!                        │ no                                        │ enough are left: the next turn
//!                        ▼                                           ▼
//!                   queue, the first first ◀── timer: enough again ── wakes one
//! ```
//!
//! A flow that may not move bytes does not read its source or its device, so nothing is buffered: its D2TP credit is
//! what slows a device down. There is a timer only while flows wait.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

/// The time whose tokens a bucket holds at most.
const BURST: Duration = Duration::from_secs(1);
/// How many times a second a flow that waits gets tokens, if it is alone. Higher: smoother, and more wake-ups.
const TURNS_PER_S: u64 = 50; // a guess: pauses of 20 ms do not harm a player
/// The most tokens for which a flow waits: a larger piece is not read at once.
const TURN_BYTES_MAX: u64 = 64 * 1024;
/// The shortest time between two wake-ups by the timer.
const TURN_MIN: Duration = Duration::from_millis(5); // a guess

/// The tokens of one client in one direction.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    /// Bytes a second; 0: as many as possible.
    rate: AtomicU64,
    state: Mutex<BucketState>,
    /// Notified when the rate has changed.
    changed: Notify,
}

#[derive(Debug)]
struct BucketState {
    /// Bytes that may be moved now. Below zero after bytes that nobody could hold back.
    level: f64,
    filled: Instant,
    /// Flows that wait, the one that came first first.
    queue: VecDeque<Arc<BucketWaiter>>,
    /// Whether the timer runs.
    is_timed: bool,
}

/// A flow's place at a bucket.
#[derive(Debug, Default)]
pub(crate) struct BucketWaiter {
    waker: Mutex<Option<Waker>>,
    is_queued: AtomicBool,
    /// Whether this flow has the turn.
    has_turn: AtomicBool,
}

impl TokenBucket {
    /// A full bucket of this many bytes a second; 0: as many as possible.
    pub(crate) fn new(rate: u64) -> TokenBucket {
        TokenBucket {
            rate: AtomicU64::new(rate),
            state: Mutex::new(BucketState {
                level: burst(rate),
                filled: Instant::now(),
                queue: VecDeque::new(),
                is_timed: false,
            }),
            changed: Notify::new(),
        }
    }

    fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }

    /// Changes the rate, also for those that wait.
    pub(crate) fn set_rate(&self, rate: u64) {
        if self.rate() == rate {
            return;
        }
        let mut state = self.state.lock();
        state.fill(self.rate());
        self.rate.store(rate, Ordering::Relaxed);
        state.level = state.level.min(burst(rate));
        let released = match rate {
            0 => std::mem::take(&mut state.queue),
            _ => VecDeque::new(),
        };
        drop(state);
        for waiter in released {
            waiter.call();
        }
        self.changed.notify_one();
    }

    /// How many bytes this flow may move now. [`TokenBucket::take`] follows, also if it moved none.
    pub(crate) fn poll(
        self: &Arc<TokenBucket>,
        cx: &mut Context<'_>,
        waiter: &Arc<BucketWaiter>,
        timers: &Handle,
    ) -> Poll<usize> {
        let rate = self.rate();
        if rate == 0 {
            return Poll::Ready(usize::MAX);
        }
        let mut state = self.state.lock();
        state.fill(rate);
        let has_turn = waiter.has_turn.swap(false, Ordering::Relaxed);
        if state.level >= turn(rate) && (has_turn || state.queue.is_empty()) {
            return Poll::Ready(state.level as usize);
        }
        *waiter.waker.lock() = Some(cx.waker().clone());
        if !waiter.is_queued.swap(true, Ordering::Relaxed) {
            // Who had the turn and found too little keeps it.
            match has_turn {
                true => state.queue.push_front(waiter.clone()),
                false => state.queue.push_back(waiter.clone()),
            }
        }
        if !state.is_timed {
            state.is_timed = true;
            timers.spawn(hand_out(self.clone()));
        }
        Poll::Pending
    }

    /// Takes the tokens for bytes that were moved, and gives the turn to the next flow.
    pub(crate) fn take(&self, bytes: usize) {
        let rate = self.rate();
        if rate == 0 {
            return;
        }
        let mut state = self.state.lock();
        state.level -= bytes as f64;
        let next = (state.level >= turn(rate)).then(|| state.queue.pop_front());
        drop(state);
        if let Some(Some(next)) = next {
            next.call();
        }
    }

    /// Whether a new bucket of the same rate would allow no more than this one.
    pub(crate) fn is_full(&self) -> bool {
        let rate = self.rate();
        let mut state = self.state.lock();
        state.fill(rate);
        rate == 0 || state.level >= burst(rate)
    }

    /// Takes the tokens for a packet if there are enough; for what is dropped rather than delayed.
    pub(crate) fn try_take(&self, bytes: usize) -> bool {
        let rate = self.rate();
        if rate == 0 {
            return true;
        }
        let mut state = self.state.lock();
        state.fill(rate);
        let has_enough = state.level >= 1.0;
        if has_enough {
            // A whole packet, also where less is left: a rate below a packet a second still passes some.
            state.level -= bytes as f64;
        }
        has_enough
    }
}

impl BucketState {
    /// Adds the tokens for the time that has passed.
    fn fill(&mut self, rate: u64) {
        let now = Instant::now();
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.filled = now;
        self.level = (self.level + passed * rate as f64).min(burst(rate));
    }
}

impl BucketWaiter {
    /// Tells the flow that it is its turn.
    fn call(&self) {
        self.is_queued.store(false, Ordering::Relaxed);
        self.has_turn.store(true, Ordering::Relaxed);
        if let Some(waker) = self.waker.lock().take() {
            waker.wake();
        }
    }
}

/// The most tokens that a bucket of this rate holds.
fn burst(rate: u64) -> f64 {
    (rate as f64 * BURST.as_secs_f64()).max(turn(rate))
}

/// The fewest tokens with which a flow moves bytes.
fn turn(rate: u64) -> f64 {
    (rate / TURNS_PER_S).clamp(1, TURN_BYTES_MAX) as f64
}

/// Wakes the flows that wait, one after the other, until none waits.
async fn hand_out(bucket: Arc<TokenBucket>) {
    loop {
        let wait = {
            let rate = bucket.rate();
            let mut state = bucket.state.lock();
            if state.queue.is_empty() || rate == 0 {
                state.is_timed = false;
                return;
            }
            state.fill(rate);
            let missing = turn(rate) - state.level;
            Duration::from_secs_f64(missing.max(0.0) / rate as f64).max(TURN_MIN)
        };
        tokio::select! {
            () = sleep(wait) => {}
            () = bucket.changed.notified() => continue,
        }
        let rate = bucket.rate();
        let mut state = bucket.state.lock();
        state.fill(rate);
        let next = (state.level >= turn(rate)).then(|| state.queue.pop_front());
        drop(state);
        if let Some(Some(next)) = next {
            next.call();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moves `bytes` in pieces of at most 10,000, and returns the time that took.
    async fn carry(bucket: &Arc<TokenBucket>, mut bytes: usize) -> Duration {
        let (began, waiter) = (Instant::now(), Arc::default());
        while bytes > 0 {
            let timers = Handle::current();
            let allowed = std::future::poll_fn(|cx| bucket.poll(cx, &waiter, &timers)).await;
            let moved = bytes.min(allowed).min(10_000);
            bucket.take(moved);
            bytes -= moved;
            tokio::task::yield_now().await;
        }
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_of_a_second_is_free_and_the_rest_takes_its_time() {
        let bucket = Arc::new(TokenBucket::new(100_000));
        assert_eq!(carry(&bucket, 100_000).await, Duration::ZERO);
        let took = carry(&bucket, 500_000).await;
        let seconds = took.as_secs_f64();
        assert!((4.9..5.2).contains(&seconds), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn flows_that_wait_share_the_rate_alike() {
        let bucket = Arc::new(TokenBucket::new(100_000));
        carry(&bucket, 100_000).await;
        let carried: Vec<Arc<AtomicU64>> = (0..8).map(|_| Arc::default()).collect();
        for mine in &carried {
            let (bucket, mine) = (bucket.clone(), mine.clone());
            tokio::spawn(async move {
                loop {
                    carry(&bucket, 500).await;
                    mine.fetch_add(500, Ordering::Relaxed);
                }
            });
        }
        // sleep: virtual time, in which they compete
        tokio::time::sleep(Duration::from_secs(20)).await;
        let all: Vec<u64> = carried.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        let sum: u64 = all.iter().sum();
        assert!((1_900_000..2_150_000).contains(&sum), "{all:?}");
        let (least, most) = (all.iter().min().unwrap(), all.iter().max().unwrap());
        assert!(least * 10 >= most * 8, "{all:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_flow_that_goes_away_while_it_is_its_turn_stops_no_other() {
        let bucket = Arc::new(TokenBucket::new(1_000));
        carry(&bucket, 1_000).await;
        let timers = Handle::current();
        for _ in 0..3 {
            let mut nobody = Context::from_waker(Waker::noop());
            let gone = Arc::default();
            assert!(bucket.poll(&mut nobody, &gone, &timers).is_pending());
        }
        let took = carry(&bucket, 1_000).await;
        assert!(took < Duration::from_secs(2), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_that_is_raised_wakes_those_that_wait() {
        let bucket = Arc::new(TokenBucket::new(1));
        let carrying = {
            let bucket = bucket.clone();
            tokio::spawn(async move { carry(&bucket, 1_000_000).await })
        };
        // sleep: virtual time, so that it waits
        tokio::time::sleep(Duration::from_secs(1)).await;
        bucket.set_rate(1_000_000);
        let took = carrying.await.unwrap();
        assert!(took < Duration::from_secs(3), "{took:?}");
        bucket.set_rate(0);
        assert_eq!(carry(&bucket, 1 << 30).await, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn packets_beyond_the_rate_are_dropped() {
        let bucket = TokenBucket::new(100_000);
        let passed = (0..200).filter(|_| bucket.try_take(1_000)).count();
        assert_eq!(passed, 100);
    }
}
