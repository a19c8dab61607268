//! Counts flows that hibernate, so that the memory that they had is given back to the system after many of them.

use std::time::Duration;

use tokio::sync::Semaphore;

use crate::prox::Prox;

/// After so many flows memory is given back.
const FLOWS_MIN: u32 = 1_000; // a guess: 30,000 left some 100 MB of free memory, 3.5 kB each

/// How long the last of many flows may take to free what it had, and the least time between two releases.
const RELEASE_AFTER: Duration = Duration::from_secs(5); // a guess: a walk through 1 GB of heap takes a part of a second

/// The number of flows that hibernated since memory was given back.
#[derive(Debug)]
pub(crate) struct HibernationCount {
    flows: Semaphore,
}

impl Default for HibernationCount {
    fn default() -> HibernationCount {
        HibernationCount {
            flows: Semaphore::new(0),
        }
    }
}

impl HibernationCount {
    /// Counts a flow that hibernates.
    pub(crate) fn add(&self) {
        self.flows.add_permits(1);
    }

    /// Calls `release` on a thread that may block, some seconds after many flows have hibernated since the last time.
    /// Sets no timer while fewer do. Never ends.
    async fn release_after_many<R>(&self, release: R)
    where
        R: Fn() + Clone + Send + 'static,
    {
        loop {
            let many = self.flows.acquire_many(FLOWS_MIN).await;
            many.expect("it is never closed").forget();
            tokio::time::sleep(RELEASE_AFTER).await;
            // What hibernated meanwhile frees its memory too.
            self.flows.forget_permits(usize::MAX);
            if let Err(error) = tokio::task::spawn_blocking(release.clone()).await {
                tracing::debug!(%error, "free memory is not given back");
            }
        }
    }
}

impl Prox {
    /// Calls `release`, which gives free memory back to the system and may block, some seconds after many flows have
    /// hibernated: what a session had while it was awake is far more than its record. Never ends.
    pub async fn release_memory_after_hibernations<R>(&self, release: R)
    where
        R: Fn() + Clone + Send + 'static,
    {
        self.hibernations.release_after_many(release).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
    use tokio::time::{Instant, timeout};

    use super::*;

    /// Longer than anything here takes, in virtual time.
    const LONG: Duration = Duration::from_secs(3_600);

    /// The times at which memory is given back.
    fn releases(count: &Arc<HibernationCount>) -> UnboundedReceiver<Instant> {
        let (releases, told) = unbounded_channel();
        let count = count.clone();
        tokio::spawn(async move {
            let release = move || releases.send(Instant::now()).expect("the test listens");
            count.release_after_many(release).await;
        });
        told
    }

    fn hibernate(count: &HibernationCount, flows: u32) {
        (0..flows).for_each(|_| count.add());
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_given_back_when_enough_flows_sleep_and_not_before() {
        let count = Arc::<HibernationCount>::default();
        let mut releases = releases(&count);
        hibernate(&count, FLOWS_MIN - 1);
        assert!(timeout(LONG, releases.recv()).await.is_err());
        hibernate(&count, 1);
        assert!(timeout(LONG, releases.recv()).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn flows_that_fall_asleep_together_have_their_memory_given_back_once() {
        let count = Arc::<HibernationCount>::default();
        let mut releases = releases(&count);
        hibernate(&count, 10 * FLOWS_MIN);
        assert!(timeout(LONG, releases.recv()).await.is_ok());
        assert!(timeout(LONG, releases.recv()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_given_back_once_in_some_seconds_however_many_flows_fall_asleep() {
        let count = Arc::<HibernationCount>::default();
        let mut releases = releases(&count);
        hibernate(&count, FLOWS_MIN);
        let first = releases.recv().await.expect("it goes on");
        hibernate(&count, 10 * FLOWS_MIN);
        let second = releases.recv().await.expect("it goes on");
        assert!(second - first >= RELEASE_AFTER, "{:?}", second - first);
    }
}
