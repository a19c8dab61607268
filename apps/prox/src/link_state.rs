//! What all links of podcast apps share: the keys that they are made with, and who waits.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use d2tp_driver::HostKey;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::feed_links::LinkSealer;

/// Connections whose link was not read yet, of all addresses; further ones are reset.
pub(crate) const LINK_GUESTS_MAX: usize = 256; // a guess: each is a round trip

/// Feeds that are rewritten at once; more wait.
const REWRITING_MAX: usize = 2; // a guess: a feed of 16 MB takes half a second of a core

/// Entries of turns that are kept before those that nobody waits for are looked for.
const TURNS_SWEPT_AT: usize = 256; // a guess

/// The turn of one request for an episode, while others for the same wait.
type EpisodeTurn = tokio::sync::Mutex<()>;

/// What links share.
#[derive(Debug)]
pub(crate) struct LinkState {
    pub(crate) links: OnceLock<LinkSealer>,
    guests: Arc<Semaphore>,
    pub(crate) rewriting: Semaphore,
    turns: Mutex<HashMap<(HostKey, String), Weak<EpisodeTurn>>>,
}

impl Default for LinkState {
    fn default() -> LinkState {
        LinkState {
            links: OnceLock::new(),
            guests: Arc::new(Semaphore::new(LINK_GUESTS_MAX)),
            rewriting: Semaphore::new(REWRITING_MAX),
            turns: Mutex::default(),
        }
    }
}

impl LinkState {
    /// A place for a connection whose link was not read yet; none if there are too many.
    pub(crate) fn guest(&self) -> Option<OwnedSemaphorePermit> {
        self.guests.clone().try_acquire_owned().ok()
    }

    /// The turn for an episode of a client. Requests for the same take it one after the other, so that the first one
    /// makes the copy that all of them get.
    pub(crate) fn turn(&self, client: HostKey, url: &str) -> Arc<EpisodeTurn> {
        let mut turns = self.turns.lock();
        if turns.len() >= TURNS_SWEPT_AT {
            turns.retain(|_, turn| turn.strong_count() > 0);
        }
        let entry = turns.entry((client, url.to_owned())).or_default();
        entry.upgrade().unwrap_or_else(|| {
            let turn = Arc::default();
            *entry = Arc::downgrade(&turn);
            turn
        })
    }
}
