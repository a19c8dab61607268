//! Feeds that are due and wait for their turn, and the permits of their hosts.
//!
//! ```text
//!  due feeds ─▶ RefreshQueue ─ the first whose host has a permit ─▶ at most REFRESHES_MAX at once
//!                                        ▲
//!                                   HostPermits: REFRESHES_PER_HOST_MAX for each host
//! ```
//!
//! Many podcasts are on few hosts. One that is slow or silent holds up its own feeds only.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use cedos_readycast::{ChannelId, RefreshRequest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use url::Url;

use super::super::state::lock;

/// Feeds of one host that are fetched at the same time.
const REFRESHES_PER_HOST_MAX: usize = 2;

/// Hosts that are remembered before those without a request are forgotten.
const HOSTS_MAX: usize = 1_024; // a guess

/// Permits to ask hosts for feeds, [`REFRESHES_PER_HOST_MAX`] for each.
#[derive(Default)]
pub(super) struct HostPermits(Mutex<BTreeMap<String, Weak<Semaphore>>>);

impl HostPermits {
    fn of(&self, url: &Url) -> Arc<Semaphore> {
        let host = url.host_str().unwrap_or_default();
        let mut hosts = lock(&self.0);
        if let Some(known) = hosts.get(host).and_then(Weak::upgrade) {
            return known;
        }
        if hosts.len() >= HOSTS_MAX {
            hosts.retain(|_, permits| permits.strong_count() > 0);
        }
        let permits = Arc::new(Semaphore::new(REFRESHES_PER_HOST_MAX));
        hosts.insert(host.to_owned(), Arc::downgrade(&permits));
        permits
    }

    /// A permit for the host of a feed; none while it has as many requests as it may have.
    fn try_acquire(&self, url: &Url) -> Option<OwnedSemaphorePermit> {
        self.of(url).try_acquire_owned().ok()
    }

    /// Waits for a permit for the host of a feed.
    pub(super) async fn acquire(&self, url: &Url) -> Option<OwnedSemaphorePermit> {
        self.of(url).acquire_owned().await.ok()
    }
}

/// Feeds that are due, those that wait longest first.
#[derive(Default)]
pub(super) struct RefreshQueue(VecDeque<(ChannelId, Url)>);

impl RefreshQueue {
    /// The queue of these feeds.
    pub(super) fn of(due: impl Iterator<Item = RefreshRequest>) -> RefreshQueue {
        RefreshQueue(due.map(|due| (due.channel, due.url)).collect())
    }

    /// Whether no feed waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes out the first feed that can be fetched now and whose host has a permit.
    pub(super) fn take(
        &mut self,
        hosts: &HostPermits,
        mut can_fetch: impl FnMut(&Url) -> bool,
    ) -> Option<(ChannelId, OwnedSemaphorePermit)> {
        let found = self.0.iter().enumerate().find_map(|(index, (_, url))| {
            let is_possible = can_fetch(url);
            let permit = is_possible.then(|| hosts.try_acquire(url)).flatten()?;
            Some((index, permit))
        });
        let (index, permit) = found?;
        let (channel, _) = self.0.remove(index)?;
        Some((channel, permit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(urls: &[&str]) -> RefreshQueue {
        let feeds = (1..).map(ChannelId).zip(urls);
        let feeds = feeds.map(|(id, url)| (id, url.parse().expect(url)));
        RefreshQueue(feeds.collect())
    }

    #[test]
    fn a_host_with_many_feeds_holds_up_no_other() {
        let hosts = HostPermits::default();
        let mut queue = queue(&[
            "http://a.example/1",
            "http://a.example/2",
            "http://a.example/3",
            "http://b.example/4",
        ]);
        let mut take = || queue.take(&hosts, |_| true);
        let (one, permit) = take().expect("the first");
        let (two, _other) = take().expect("the second");
        let (four, _of_b) = take().expect("the other host's");
        assert_eq!([one.0, two.0, four.0], [1, 2, 4]);
        assert!(take().is_none(), "its host has two requests");
        drop(permit);
        assert_eq!(take().map(|(id, _)| id.0), Some(3));
        assert!(queue.is_empty());
    }

    #[test]
    fn what_no_network_reaches_stays() {
        let hosts = HostPermits::default();
        let mut queue = queue(&["http://a.example/", "http://127.0.0.1/"]);
        let is_here = |url: &Url| url.host_str() == Some("127.0.0.1");
        assert_eq!(queue.take(&hosts, is_here).map(|(id, _)| id.0), Some(2));
        assert!(queue.take(&hosts, is_here).is_none());
        assert!(!queue.is_empty());
    }

    #[test]
    fn hosts_without_requests_are_forgotten() {
        let hosts = HostPermits::default();
        for n in 0..5_000 {
            let url = format!("http://h{n}.example/").parse().expect("one");
            drop(hosts.try_acquire(&url));
        }
        assert!(lock(&hosts.0).len() <= HOSTS_MAX);
    }
}
