//! What a server that shares its records with other nodes remembers of its requests to the store.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use d2tp_session::{SessionId, Span, Time};

use crate::clock;
use crate::journal::JournalSessionKey;
use crate::record_store::SharedRecords;

/// The shortest time between two entries in the log about a store that does not answer.
const SAY_AGAIN: Span = Span::from_secs(10);

/// The state of a server that shares its records.
pub(crate) struct SharedState {
    pub(crate) store: Arc<dyn SharedRecords>,
    /// Lookups and claims that wait for the store.
    pub(crate) requests: usize,
    /// Records that are here only until the store has them, or until a handshake is confirmed: when they may go.
    pub(crate) adopted: BTreeMap<JournalSessionKey, AdoptedRecord>,
    /// Awake sessions that this process owns.
    pub(crate) owned: HashMap<SessionId, JournalSessionKey>,
    /// No record may go before this time.
    pub(crate) next_release: Time,
    /// Since when other nodes ask for sessions that have flows which the store does not know.
    pub(crate) asked_since: HashMap<JournalSessionKey, Time>,
    said: Time,
}

/// A record in the core that the store has too.
pub(crate) struct AdoptedRecord {
    /// The number of writes that the lookup found, if it was one.
    pub(crate) version: Option<u64>,
    pub(crate) until: Time,
}

impl SharedState {
    pub(crate) fn new(store: Arc<dyn SharedRecords>) -> SharedState {
        SharedState {
            store,
            requests: 0,
            adopted: BTreeMap::new(),
            owned: HashMap::new(),
            next_release: Time::NEVER,
            asked_since: HashMap::new(),
            said: Time::ZERO,
        }
    }

    /// When the next record may be released.
    pub(crate) fn next_timeout(&self) -> Time {
        self.next_release
    }

    /// Notes a record that the store has, or will have soon.
    pub(crate) fn note(&mut self, key: JournalSessionKey, version: Option<u64>, until: Time) {
        self.next_release = self.next_release.min(until);
        let adopted = AdoptedRecord { version, until };
        self.adopted.insert(key, adopted);
    }

    /// Says in the log that the store does not answer, at most once in a while.
    pub(crate) fn warn(&mut self, error: &dyn std::fmt::Display) {
        let now = clock::now();
        if self.said == Time::ZERO || now.since(self.said) >= SAY_AGAIN {
            self.said = now;
            tracing::warn!(%error, "sleeping sessions cannot be woken now; their devices wait");
        }
    }
}
