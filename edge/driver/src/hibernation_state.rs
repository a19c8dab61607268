//! What a server knows of sessions at rest. What it does with them is in [`crate::hibernation`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{FlowId, SessionId, Span, Time};
use tokio::sync::Notify;

use crate::journal::{Journal, JournalBatch, JournalFlowKey, JournalSessionKey};

/// Reads bytes of a flow at rest: what was kept of it, an offset of the flow, how many at most.
/// Changes nothing and does not wait; none where nothing can be had at once.
pub type HibernatedReader = dyn Fn(&[u8], u64, usize) -> Option<Bytes> + Send + Sync;

/// What a server knows of sessions at rest, and of those that may come to it.
#[derive(Default)]
pub(crate) struct HibernationState {
    pub(crate) hibernate_after: Option<Span>,
    pub(crate) journal: Option<Arc<Journal>>,
    /// Suspended sessions, by when they may sleep.
    pub(crate) hibernate_at: BTreeSet<(Time, SessionId)>,
    /// Memos of flows asleep, where there is no journal to hold them.
    pub(crate) memos: HashMap<JournalSessionKey, BTreeMap<FlowId, Bytes>>,
    /// Sessions whose record in the journal is old.
    pub(crate) stale: BTreeSet<JournalSessionKey>,
    /// Sessions awake that have flows to be kept, both ways round.
    pub(crate) awake: HashMap<JournalSessionKey, SessionId>,
    pub(crate) keys: HashMap<SessionId, JournalSessionKey>,
    /// Flows that woke and of which nothing was kept.
    pub(crate) orphans: Vec<(SessionId, FlowId)>,
    pub(crate) batch: JournalBatch,
    pub(crate) changed: Arc<Notify>,
    /// Flows asleep whose last handle is not dropped yet: what they held is not put by.
    pub(crate) open_handles: HashMap<(SessionId, FlowId), JournalSessionKey>,
    /// What became of those flows meanwhile.
    pub(crate) deferred: HashMap<JournalFlowKey, DeferredChange>,
    pub(crate) expired: VecDeque<(JournalSessionKey, Bytes)>,
    pub(crate) expired_waker: Option<Waker>,
    /// Who can read a flow at rest, if anybody can.
    pub(crate) peek: Option<Arc<HibernatedReader>>,
    /// Sessions taken in from the journal.
    pub(crate) loaded: u64,
    /// While not all of the journal was read: who came to the door.
    pub(crate) seen_while_loading: Option<HashSet<JournalSessionKey>>,
}

/// What waits until a flow's handle from before its sleep is dropped.
pub(crate) enum DeferredChange {
    /// The session stays hibernated: nothing happened.
    Nothing,
    /// The session was restored, under this number.
    Woke(SessionId),
    /// The session had expired; this was its memo.
    Expired(Bytes),
}

impl HibernationState {
    pub(crate) fn new(after: Option<Duration>, journal: Option<Arc<Journal>>) -> HibernationState {
        HibernationState {
            hibernate_after: after.map(Span::from),
            journal,
            ..HibernationState::default()
        }
    }

    /// Whoever waits learns that nothing more comes.
    pub(crate) fn on_stop(&mut self) {
        self.changed.notify_one();
        if let Some(waker) = self.expired_waker.take() {
            waker.wake();
        }
    }

    /// Whether all of the journal was read.
    pub(crate) fn knows_all(&self) -> bool {
        self.seen_while_loading.is_none()
    }

    /// When a session may sleep.
    pub(crate) fn next_timeout(&self) -> Time {
        self.hibernate_at.first().map_or(Time::NEVER, |(at, _)| *at)
    }

    /// Notes something of the application's.
    pub(crate) fn note(&mut self, name: Vec<u8>, value: Option<Bytes>) {
        if self.journal.is_some() {
            self.batch.notes.insert(name, value);
            self.changed.notify_one();
        }
    }

    /// Notes what the application needs to take a flow up again; none: nothing any more.
    pub(crate) fn write_memo(
        &mut self,
        session: JournalSessionKey,
        flow: FlowId,
        memo: Option<Bytes>,
    ) {
        if self.journal.is_some() {
            self.batch
                .memos
                .insert(JournalFlowKey { session, flow }, memo);
            self.stale.insert(session);
            self.changed.notify_one();
        }
    }

    /// What the application noted of a flow that sleeps.
    pub(crate) fn memo(&self, session: JournalSessionKey, flow: FlowId) -> Option<Bytes> {
        let key = JournalFlowKey { session, flow };
        if let Some(memo) = self.batch.memos.get(&key) {
            return memo.clone();
        }
        if let Some(journal) = &self.journal {
            return match journal.memo(key) {
                Ok(memo) => memo.map(Bytes::from),
                Err(error) => {
                    tracing::error!(%error, "a sleeping flow cannot be woken");
                    None
                }
            };
        }
        self.memos.get(&session)?.get(&flow).cloned()
    }

    /// Takes the memo of a flow out; without a journal only the caller has it from now on.
    pub(crate) fn take_memo(&mut self, session: JournalSessionKey, flow: FlowId) -> Option<Bytes> {
        let memo = self.memo(session, flow);
        if let Some(memos) = self.memos.get_mut(&session) {
            memos.remove(&flow);
            if memos.is_empty() {
                self.memos.remove(&session);
            }
        }
        memo
    }

    /// A flow that slept is over: its memo is the application's again.
    pub(crate) fn expire(&mut self, session: JournalSessionKey, flow: FlowId) {
        if let Some(memo) = self.take_memo(session, flow) {
            self.return_memo(JournalFlowKey { session, flow }, memo);
        }
        if self.journal.is_some() {
            // The session's record stands: a flow without a memo is not loaded.
            let key = JournalFlowKey { session, flow };
            self.batch.memos.insert(key, None);
            self.changed.notify_one();
        }
    }

    /// Hands a memo to the application, after the handle from before the sleep.
    pub(crate) fn return_memo(&mut self, key: JournalFlowKey, memo: Bytes) {
        if let Some(next) = self.deferred.get_mut(&key) {
            *next = DeferredChange::Expired(memo);
            return;
        }
        self.expired.push_back((key.session, memo));
        if let Some(waker) = self.expired_waker.take() {
            waker.wake();
        }
    }

    /// A session with flows to be kept is awake.
    pub(crate) fn is_awake(&mut self, key: JournalSessionKey, id: SessionId) {
        self.awake.insert(key, id);
        self.keys.insert(id, key);
    }

    /// A session awake is over; returns its key in the journal, if it had one.
    pub(crate) fn is_over(&mut self, id: SessionId) -> Option<JournalSessionKey> {
        let key = self.keys.remove(&id)?;
        self.awake.remove(&key);
        Some(key)
    }
}
