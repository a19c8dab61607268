//! A server's state of hibernated sessions, for [`crate::hibernation`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use d2tp_session::{FlowId, SessionId, Span, Time};
use tokio::sync::Notify;

use crate::journal::{JournalBatch, JournalFlowKey, JournalSessionKey};
use crate::record_store::RecordStore;
use crate::shared_state::SharedState;

/// Reads bytes of a hibernated flow, given its memo, an offset and the most bytes to read. Does not
/// block; `None` if nothing is available at once.
pub type HibernatedReader = dyn Fn(&[u8], u64, usize) -> Option<Bytes> + Send + Sync;

/// A server's state of hibernated sessions, and of those that may hibernate.
#[derive(Default)]
pub(crate) struct HibernationState {
    pub(crate) hibernate_after: Option<Span>,
    pub(crate) journal: Option<Arc<dyn RecordStore>>,
    /// The journal again, if other nodes share it.
    pub(crate) shared: Option<SharedState>,
    /// The sessions of which changes are being written.
    pub(crate) writing: HashSet<JournalSessionKey>,
    /// Held by who writes: one at a time.
    pub(crate) write_turn: Arc<tokio::sync::Mutex<()>>,
    /// Suspended sessions, by the time at which they may hibernate.
    pub(crate) hibernate_at: BTreeSet<(Time, SessionId)>,
    /// Memos of hibernated flows, if there is no journal to hold them; with a shared one, those of sessions that are
    /// about to wake.
    pub(crate) memos: HashMap<JournalSessionKey, BTreeMap<FlowId, Bytes>>,
    /// Sessions whose record in the journal is outdated.
    pub(crate) stale: BTreeSet<JournalSessionKey>,
    /// Awake sessions with flows to be kept, by journal key; the field `keys` is the reverse
    /// mapping.
    pub(crate) awake: HashMap<JournalSessionKey, SessionId>,
    pub(crate) keys: HashMap<SessionId, JournalSessionKey>,
    /// Flows of a restored session for which there is no memo.
    pub(crate) orphans: Vec<(SessionId, FlowId)>,
    pub(crate) batch: JournalBatch,
    pub(crate) changed: Arc<Notify>,
    /// Hibernated flows whose last handle is not dropped yet, so that their application has not stored
    /// its state.
    pub(crate) open_handles: HashMap<(SessionId, FlowId), JournalSessionKey>,
    /// Changes to those flows that wait for the drop.
    pub(crate) deferred: HashMap<JournalFlowKey, DeferredChange>,
    pub(crate) expired: VecDeque<(JournalSessionKey, Bytes)>,
    pub(crate) expired_waker: Option<Waker>,
    /// The reader of hibernated flows, if there is one.
    pub(crate) peek: Option<Arc<HibernatedReader>>,
    /// The number of sessions loaded from the journal.
    pub(crate) loaded: u64,
    /// Sessions that connected while the journal is being loaded.
    pub(crate) seen_while_loading: Option<HashSet<JournalSessionKey>>,
}

/// A change to a hibernated flow that waits for the drop of its old handle.
pub(crate) enum DeferredChange {
    /// The session stays hibernated: nothing happened.
    Nothing,
    /// The session was restored, with this id.
    Woke(SessionId),
    /// The session expired. This is the flow's memo.
    Expired(Bytes),
}

impl HibernationState {
    pub(crate) fn new(
        after: Option<Duration>,
        journal: Option<Arc<dyn RecordStore>>,
    ) -> HibernationState {
        HibernationState {
            hibernate_after: after.map(Span::from),
            shared: (journal.clone())
                .and_then(RecordStore::as_shared)
                .map(SharedState::new),
            journal,
            ..HibernationState::default()
        }
    }

    /// Wakes all waiting tasks, because the server stops.
    pub(crate) fn on_stop(&mut self) {
        self.changed.notify_one();
        if let Some(waker) = self.expired_waker.take() {
            waker.wake();
        }
    }

    /// Whether the journal is loaded completely.
    pub(crate) fn knows_all(&self) -> bool {
        self.seen_while_loading.is_none()
    }

    /// When the next session may hibernate.
    pub(crate) fn next_timeout(&self) -> Time {
        let next = self.hibernate_at.first().map_or(Time::NEVER, |(at, _)| *at);
        match &self.shared {
            Some(shared) => next.min(shared.next_timeout()),
            None => next,
        }
    }

    /// Whether changes of this session are not written yet.
    pub(crate) fn is_pending(&self, key: &JournalSessionKey) -> bool {
        self.writing.contains(key)
            || self.batch.sessions.contains_key(key)
            || self.stale.contains(key)
    }

    /// Stages a note of the application, to be written.
    pub(crate) fn note(&mut self, name: Vec<u8>, value: Option<Bytes>) {
        if self.journal.is_some() {
            self.batch.notes.insert(name, value);
            self.changed.notify_one();
        }
    }

    /// Stores what the application needs to resume a flow; `None` removes it.
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

    /// The memo of a hibernated flow.
    pub(crate) fn memo(&self, session: JournalSessionKey, flow: FlowId) -> Option<Bytes> {
        let key = JournalFlowKey { session, flow };
        if let Some(memo) = self.batch.memos.get(&key) {
            return memo.clone();
        }
        if let Some(journal) = self.journal.as_ref().and_then(|j| j.as_journal()) {
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

    /// Takes the memo of a flow. Without a journal only the caller has it afterwards.
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

    /// Returns the memo of an expired hibernated flow to the application.
    pub(crate) fn expire(&mut self, session: JournalSessionKey, flow: FlowId) {
        if let Some(memo) = self.take_memo(session, flow) {
            self.return_memo(JournalFlowKey { session, flow }, memo);
        }
        if self.journal.is_some() {
            // The session's record stays, because a flow without a memo is not loaded.
            let key = JournalFlowKey { session, flow };
            self.batch.memos.insert(key, None);
            self.changed.notify_one();
        }
    }

    /// Queues a memo for the application, after the handle from before the hibernation was dropped.
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

    /// Records that a session with flows to be kept is awake.
    pub(crate) fn is_awake(&mut self, key: JournalSessionKey, id: SessionId) {
        self.awake.insert(key, id);
        self.keys.insert(id, key);
    }

    /// Records the end of an awake session. Returns its key in the journal, if it had one.
    pub(crate) fn is_over(&mut self, id: SessionId) -> Option<JournalSessionKey> {
        let key = self.keys.remove(&id)?;
        self.awake.remove(&key);
        Some(key)
    }
}
