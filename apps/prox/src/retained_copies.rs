//! Copies to which a device may return, private to its key.
//!
//! A copy is listed while a flow reads it, so that a device that crashed and restarted finds it
//! even before the old flow is known to be dead. When a flow ends abnormally its copy is *kept*
//! for a grace time; the fetch continues meanwhile. Kept copies are discarded first when room is
//! needed. With a copy store, kept copies outlive the process.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use d2tp_driver::HostKey;
use http::{HeaderValue, StatusCode};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::copy_store::{CopyStore, RetainedRecord, wall_ms};
use crate::pinned_copy::PinnedCopy;
use crate::request::FetchRequest;
use crate::spooled_body::SpoolStatus;

/// The most copies listed for one URL of one client; the oldest is dropped first.
const LISTED_PER_URL_MAX: usize = 8;

/// The most URLs of one client under which copies are listed; the one listed first is dropped first. A guess.
const LISTED_URLS_MAX: usize = 1024;

/// The listed and the kept copies of all clients.
#[derive(Debug, Default)]
pub(crate) struct RetainedCopies {
    copy_store: Option<Arc<CopyStore>>,
    clients: Mutex<HashMap<HostKey, ClientCopies>>,
}

#[derive(Debug, Default)]
struct ClientCopies {
    listed: HashMap<String, ListedUrl>,
    /// How many URLs were listed so far.
    serial: u64,
    /// Kept copies, the oldest first.
    kept: Vec<RetainedCopy>,
}

/// A client's entry for a copy, which goes when this is dropped: with the copy. Otherwise the entry would keep the
/// copy's own memory until the client asks for something else.
#[derive(Debug)]
pub(crate) struct CopyListing {
    copies: Weak<RetainedCopies>,
    client: HostKey,
}

impl Drop for CopyListing {
    fn drop(&mut self) {
        if let Some(copies) = self.copies.upgrade() {
            copies.remove_if_empty(self.client);
        }
    }
}

/// The copies listed under one URL, the oldest first.
#[derive(Debug, Default)]
struct ListedUrl {
    serial: u64,
    copies: Vec<Weak<PinnedCopy>>,
}

#[derive(Debug)]
struct RetainedCopy {
    serial: u64,
    copy: Arc<PinnedCopy>,
    /// When the copy was last kept for its client.
    kept_at: Instant,
}

impl RetainedCopies {
    /// No copies yet. In `copy_store`, if there is one, it is recorded which are kept.
    pub(crate) fn new(copy_store: Option<Arc<CopyStore>>) -> RetainedCopies {
        RetainedCopies {
            copy_store,
            clients: Mutex::default(),
        }
    }

    /// Frees copies that are no longer kept for a client. Outside every lock: this frees bytes.
    fn release(&self, client: &HostKey, dropped: Vec<RetainedCopy>) {
        if let Some(copy_store) = &self.copy_store {
            for kept in &dropped {
                copy_store.remove_retained(kept.copy.id, client);
            }
        }
    }

    /// Lists a copy under the requested URL.
    pub(crate) fn list(
        self: &Arc<RetainedCopies>,
        client: HostKey,
        url: &str,
        copy: &Arc<PinnedCopy>,
    ) {
        let mut clients = self.clients.lock();
        let copies = clients.entry(client).or_default();
        copies.forget_dead();
        let listed = copies.list_url(url);
        if listed.len() == LISTED_PER_URL_MAX {
            listed.remove(0);
        }
        listed.push(Arc::downgrade(copy));
        drop(clients);
        let mut listings = copy.listings.lock();
        if !listings.iter().any(|listing| listing.client == client) {
            listings.push(CopyListing {
                copies: Arc::downgrade(self),
                client,
            });
        }
    }

    /// The copy with the validator in `if_range`, if this client has one.
    pub(crate) fn find(
        &self,
        client: HostKey,
        request: &FetchRequest,
        if_range: &HeaderValue,
    ) -> Option<Arc<PinnedCopy>> {
        // One of these may be the last handle of its copy by now, which takes the lock when it is dropped.
        let listed: Vec<Arc<PinnedCopy>> = {
            let clients = self.clients.lock();
            let listed = clients.get(&client)?.listed.get(request.url.as_str())?;
            listed.copies.iter().filter_map(Weak::upgrade).collect()
        };
        // Newest first: the one most likely still growing.
        listed
            .into_iter()
            .rev()
            // One that failed would fail its reader again; a new fetch may not.
            .filter(|copy| !matches!(copy.body.extent().status, SpoolStatus::Failed(_)))
            .find(|copy| copy.head.matches_if_range(if_range) && copy.head.matches_request(request))
    }

    /// The newest whole answer that this client has of a URL, whatever it was asked with.
    pub(crate) fn latest(&self, client: HostKey, url: &str) -> Option<Arc<PinnedCopy>> {
        let listed: Vec<Arc<PinnedCopy>> = {
            let clients = self.clients.lock();
            let listed = clients.get(&client)?.listed.get(url)?;
            listed.copies.iter().filter_map(Weak::upgrade).collect()
        };
        listed
            .into_iter()
            .rev()
            .filter(|copy| copy.head.status == StatusCode::OK)
            .find(|copy| !matches!(copy.body.extent().status, SpoolStatus::Failed(_)))
    }

    /// Whether a copy was kept for this client within the last `span`.
    pub(crate) fn was_kept_within(
        &self,
        client: HostKey,
        copy: &Arc<PinnedCopy>,
        span: Duration,
    ) -> bool {
        let clients = self.clients.lock();
        let kept = clients.get(&client).map(|copies| copies.kept.iter());
        kept.into_iter()
            .flatten()
            .any(|kept| Arc::ptr_eq(&kept.copy, copy) && kept.kept_at.elapsed() < span)
    }

    /// Keeps a copy for `grace`; drops the client's oldest if it has more than `max`.
    pub(crate) fn retain(
        self: &Arc<RetainedCopies>,
        client: HostKey,
        copy: Arc<PinnedCopy>,
        grace: Duration,
        max: usize,
    ) {
        if grace.is_zero() || max == 0 {
            return;
        }
        let serial = getrandom::u64().expect("the system has randomness");
        let mut dropped = Vec::new();
        let kept_before;
        {
            let mut clients = self.clients.lock();
            let copies = clients.entry(client).or_default();
            // Keeping it again only renews the time.
            kept_before = copies.take_kept(|kept| Arc::ptr_eq(&kept.copy, &copy));
            if let Some(copy_store) = &self.copy_store {
                let total = copy.body.extent().total;
                let entry = copy.head.entry(copy.body.client(), &copy.request, total);
                drop(copy_store.record_copy(copy.id, &entry));
                let until_ms = wall_ms(SystemTime::now() + grace);
                copy_store.record_retained(copy.id, &client, RetainedRecord { until_ms });
            }
            copies.kept.push(RetainedCopy {
                serial,
                copy,
                kept_at: Instant::now(),
            });
            while copies.kept.len() > max {
                dropped.push(copies.kept.remove(0));
            }
        }
        self.release(&client, dropped);
        drop(kept_before);
        let retained = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(grace).await;
            if let Some(retained) = retained.upgrade() {
                retained.expire(client, serial);
            }
        });
    }

    /// Drops one kept copy, of `client` if given, to make room. False if there is none.
    pub(crate) fn make_room(&self, client: Option<HostKey>) -> bool {
        let mut clients = self.clients.lock();
        let take = |(key, copies): (HostKey, &mut ClientCopies)| Some((key, copies.take_oldest()?));
        let dropped = match client {
            Some(client) => clients
                .get_mut(&client)
                .and_then(|copies| take((client, copies))),
            None => clients
                .iter_mut()
                .find_map(|(key, copies)| take((*key, copies))),
        };
        drop(clients);
        let Some((key, dropped)) = dropped else {
            return false;
        };
        self.release(&key, vec![dropped]);
        true
    }

    /// The number of kept copies.
    pub(crate) fn retained_count(&self) -> usize {
        self.clients
            .lock()
            .values()
            .map(|copies| copies.kept.len())
            .sum()
    }

    /// The number of clients with listed or kept copies.
    pub(crate) fn listed_count(&self) -> usize {
        self.clients.lock().len()
    }

    /// Drops all kept copies of a client, who comes back no more.
    pub(crate) fn discard_client(&self, client: HostKey) {
        let dropped = {
            let mut clients = self.clients.lock();
            let copies = clients.get_mut(&client);
            copies.map(|copies| std::mem::take(&mut copies.kept))
        };
        self.release(&client, dropped.unwrap_or_default());
        self.remove_if_empty(client);
    }

    fn expire(&self, client: HostKey, serial: u64) {
        let mut clients = self.clients.lock();
        let mut dropped = Vec::new();
        if let Some(copies) = clients.get_mut(&client) {
            dropped = copies.take_kept(|kept| kept.serial == serial);
        }
        drop(clients);
        self.release(&client, dropped);
        self.remove_if_empty(client);
    }

    /// Removes the entry of a client without copies.
    fn remove_if_empty(&self, client: HostKey) {
        let mut clients = self.clients.lock();
        if let Some(copies) = clients.get_mut(&client) {
            copies.forget_dead();
            if copies.kept.is_empty() && copies.listed.is_empty() {
                clients.remove(&client);
            }
        }
    }
}

impl ClientCopies {
    fn forget_dead(&mut self) {
        self.listed.retain(|_, listed| {
            listed.copies.retain(|copy| copy.strong_count() > 0);
            !listed.copies.is_empty()
        });
    }

    /// The list of a URL; drops that of another if there are too many.
    fn list_url(&mut self, url: &str) -> &mut Vec<Weak<PinnedCopy>> {
        if self.listed.len() >= LISTED_URLS_MAX && !self.listed.contains_key(url) {
            let oldest = self.listed.iter().min_by_key(|(_, listed)| listed.serial);
            if let Some(oldest) = oldest.map(|(url, _)| url.clone()) {
                self.listed.remove(&oldest);
            }
        }
        self.serial += 1;
        let new = ListedUrl {
            serial: self.serial,
            copies: Vec::new(),
        };
        let listed = self.listed.entry(url.to_owned()).or_insert(new);
        &mut listed.copies
    }

    fn take_kept(&mut self, which: impl Fn(&RetainedCopy) -> bool) -> Vec<RetainedCopy> {
        self.kept.extract_if(.., |kept| which(kept)).collect()
    }

    fn take_oldest(&mut self) -> Option<RetainedCopy> {
        (!self.kept.is_empty()).then(|| self.kept.remove(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_a_bounded_number_of_listed_urls_and_the_oldest_go() {
        let mut copies = ClientCopies::default();
        for n in 0..=LISTED_URLS_MAX {
            copies.list_url(&format!("http://h/{n}"));
        }
        assert_eq!(copies.listed.len(), LISTED_URLS_MAX);
        assert!(!copies.listed.contains_key("http://h/0"));
        assert!(copies.listed.contains_key("http://h/1"));
        copies.list_url("http://h/1");
        assert_eq!(copies.listed.len(), LISTED_URLS_MAX);
    }
}
