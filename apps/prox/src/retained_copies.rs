//! Copies a device may come back for, private to its key.
//!
//! A copy is listed while a flow reads it, so that a device that crashed and restarted finds it
//! even before the old flow is known to be dead. When a flow ends abnormally its copy is *kept*
//! for a grace time; the fetch goes on meanwhile. Kept copies are the first to go when room is
//! needed.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use d2tp_driver::HostKey;
use http::HeaderValue;
use parking_lot::Mutex;

use crate::pinned_copy::PinnedCopy;
use crate::request::FetchRequest;
use crate::spooled_body::SpoolStatus;

/// The most copies listed for one URL of one client; the oldest is dropped first.
const LISTED_PER_URL_MAX: usize = 8;

/// The listed and the kept copies of all clients.
#[derive(Debug, Default)]
pub(crate) struct RetainedCopies {
    clients: Mutex<HashMap<HostKey, ClientCopies>>,
}

#[derive(Debug, Default)]
struct ClientCopies {
    listed: HashMap<String, Vec<Weak<PinnedCopy>>>,
    /// Kept copies, the oldest first.
    kept: Vec<RetainedCopy>,
}

#[derive(Debug)]
struct RetainedCopy {
    serial: u64,
    copy: Arc<PinnedCopy>,
}

impl RetainedCopies {
    /// Lists a copy under the requested URL.
    pub(crate) fn list(&self, client: HostKey, url: &str, copy: &Arc<PinnedCopy>) {
        let mut clients = self.clients.lock();
        let copies = clients.entry(client).or_default();
        copies.forget_dead();
        let listed = copies.listed.entry(url.to_owned()).or_default();
        if listed.len() == LISTED_PER_URL_MAX {
            listed.remove(0);
        }
        listed.push(Arc::downgrade(copy));
    }

    /// The copy with the validator in `if_range`, if this client has one.
    pub(crate) fn find(
        &self,
        client: HostKey,
        request: &FetchRequest,
        if_range: &HeaderValue,
    ) -> Option<Arc<PinnedCopy>> {
        let clients = self.clients.lock();
        let listed = clients.get(&client)?.listed.get(request.url.as_str())?;
        // Newest first: the one most likely still growing.
        listed
            .iter()
            .rev()
            .filter_map(Weak::upgrade)
            // One that failed would fail its reader again; a new fetch may not.
            .filter(|copy| !matches!(copy.body.extent().status, SpoolStatus::Failed(_)))
            .find(|copy| copy.head.matches_if_range(if_range) && copy.head.matches_request(request))
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
        {
            let mut clients = self.clients.lock();
            let copies = clients.entry(client).or_default();
            // Keeping it again only renews the time.
            dropped.extend(copies.take_kept(|kept| Arc::ptr_eq(&kept.copy, &copy)));
            copies.kept.push(RetainedCopy { serial, copy });
            while copies.kept.len() > max {
                dropped.push(copies.kept.remove(0));
            }
        }
        drop(dropped); // Outside the lock: this frees bytes.
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
        let dropped = match client {
            Some(client) => clients.get_mut(&client).and_then(ClientCopies::take_oldest),
            None => clients.values_mut().find_map(ClientCopies::take_oldest),
        };
        drop(clients);
        dropped.is_some()
    }

    /// The number of kept copies.
    pub(crate) fn retained_count(&self) -> usize {
        self.clients
            .lock()
            .values()
            .map(|copies| copies.kept.len())
            .sum()
    }

    fn expire(&self, client: HostKey, serial: u64) {
        let mut clients = self.clients.lock();
        let mut dropped = Vec::new();
        if let Some(copies) = clients.get_mut(&client) {
            dropped = copies.take_kept(|kept| kept.serial == serial);
        }
        drop(clients);
        drop(dropped);
        self.remove_if_empty(client);
    }

    /// Removes the entry of a client without copies.
    pub(crate) fn remove_if_empty(&self, client: HostKey) {
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
            listed.retain(|copy| copy.strong_count() > 0);
            !listed.is_empty()
        });
    }

    fn take_kept(&mut self, which: impl Fn(&RetainedCopy) -> bool) -> Vec<RetainedCopy> {
        self.kept.extract_if(.., |kept| which(kept)).collect()
    }

    fn take_oldest(&mut self) -> Option<RetainedCopy> {
        (!self.kept.is_empty()).then(|| self.kept.remove(0))
    }
}
