//! A store of notes in memory that several nodes share, for tests. It loses replies and answers late when it is told to.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use d2tp_driver::{
    CommitReport, JournalBatch, JournalError, JournalSessionKey, OwnerAnswer, OwnerQuestion,
    OwnershipClaim, RecordStore, SharedRecords, SharedSession, StoreFuture,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

/// What all nodes see.
#[derive(Debug, Default)]
pub(crate) struct SharedNotes {
    notes: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    pub(crate) reads: AtomicUsize,
}

/// The store, as one node sees it.
#[derive(Debug)]
pub(crate) struct MemoryNotes {
    node: String,
    shared: Arc<SharedNotes>,
    /// Whether operations are carried out, but nobody hears so.
    pub(crate) loses_replies: AtomicBool,
    /// The next reply waits for a permit of it.
    pub(crate) held: Mutex<Option<Arc<Semaphore>>>,
}

impl SharedNotes {
    pub(crate) fn at(self: &Arc<Self>, node: &str) -> Arc<MemoryNotes> {
        Arc::new(MemoryNotes {
            node: node.to_owned(),
            shared: self.clone(),
            loses_replies: AtomicBool::new(false),
            held: Mutex::default(),
        })
    }

    /// Drops all notes, as a store that was restarted does.
    pub(crate) fn empty(&self) {
        self.notes.lock().clear();
    }

    /// A copy of all notes.
    pub(crate) fn copy(&self) -> HashMap<Vec<u8>, Vec<u8>> {
        self.notes.lock().clone()
    }

    /// Goes back to a copy.
    pub(crate) fn become_copy(&self, copy: &HashMap<Vec<u8>, Vec<u8>>) {
        self.notes.lock().clone_from(copy);
    }

    /// The names that begin with `prefix`, sorted.
    pub(crate) fn names_with(&self, prefix: &[u8]) -> Vec<Vec<u8>> {
        let notes = self.notes.lock();
        let mut names: Vec<_> = notes
            .keys()
            .filter(|name| name.starts_with(prefix))
            .cloned()
            .collect();
        names.sort();
        names
    }

    pub(crate) fn put(&self, name: &[u8], value: &[u8]) {
        self.notes.lock().insert(name.to_vec(), value.to_vec());
    }

    pub(crate) fn get(&self, name: &[u8]) -> Option<Vec<u8>> {
        self.notes.lock().get(name).cloned()
    }

    fn exchange(&self, name: &[u8], expected: Option<&[u8]>, value: Option<&[u8]>) -> bool {
        let mut notes = self.notes.lock();
        if notes.get(name).map(Vec::as_slice) != expected {
            return false;
        }
        match value {
            Some(value) => notes.insert(name.to_vec(), value.to_vec()),
            None => notes.remove(name),
        };
        true
    }
}

impl MemoryNotes {
    /// Holds the next reply until the returned semaphore has a permit.
    pub(crate) fn hold_reply(&self) -> Arc<Semaphore> {
        let held = Arc::new(Semaphore::new(0));
        *self.held.lock() = Some(held.clone());
        held
    }

    fn reply<T: Send + 'static>(&self, value: T) -> StoreFuture<T> {
        let is_lost = self.loses_replies.load(Ordering::Relaxed);
        let (held, place) = (self.held.lock().take(), self.place());
        Box::pin(async move {
            if let Some(held) = held {
                let _permit = held.acquire().await.expect("it is not closed");
            }
            match is_lost {
                true => Err(JournalError::Store {
                    place,
                    cause: "does not answer".into(),
                }),
                false => Ok(value),
            }
        })
    }
}

impl RecordStore for MemoryNotes {
    fn place(&self) -> String {
        "memory".into()
    }

    fn commit(&self, _: &JournalBatch) -> Result<CommitReport, JournalError> {
        unreachable!("only notes are tested")
    }

    fn note(&self, name: &[u8]) -> Result<Option<Vec<u8>>, JournalError> {
        Ok(self.shared.get(name))
    }

    fn replace_note(
        &self,
        name: &[u8],
        expected: Option<&[u8]>,
        value: Option<&[u8]>,
    ) -> Result<bool, JournalError> {
        Ok(self.shared.exchange(name, expected, value))
    }
}

impl SharedRecords for MemoryNotes {
    fn look_up(&self, _: JournalSessionKey) -> StoreFuture<Option<SharedSession>> {
        unreachable!("only notes are tested")
    }

    fn claim(&self, _: JournalSessionKey, _: u32) -> StoreFuture<OwnershipClaim> {
        unreachable!("only notes are tested")
    }

    fn owns(&self, _: &JournalSessionKey) -> bool {
        unreachable!("only notes are tested")
    }

    fn disown(&self, _: &JournalSessionKey) {
        unreachable!("only notes are tested")
    }

    fn hold(&self, _: u64) -> StoreFuture<()> {
        unreachable!("only notes are tested")
    }

    fn hold_alone(&self, _: u64) -> StoreFuture<()> {
        unreachable!("only notes are tested")
    }

    fn let_go(&self, _: u64) -> StoreFuture<()> {
        unreachable!("only notes are tested")
    }

    fn next_free_object(&self) -> StoreFuture<u64> {
        unreachable!("only notes are tested")
    }

    fn next_lost(&self) -> StoreFuture<JournalSessionKey> {
        unreachable!("only notes are tested")
    }

    fn ask_owner(&self, _: JournalSessionKey, _: String) -> StoreFuture<OwnerAnswer> {
        unreachable!("only notes are tested")
    }

    fn next_question(&self) -> StoreFuture<OwnerQuestion> {
        unreachable!("only notes are tested")
    }

    fn answer_question(&self, _: OwnerQuestion, _: OwnerAnswer) -> StoreFuture<()> {
        unreachable!("only notes are tested")
    }

    fn read_note(&self, name: &[u8]) -> StoreFuture<Option<Vec<u8>>> {
        self.shared.reads.fetch_add(1, Ordering::Relaxed);
        self.reply(self.shared.get(name))
    }

    fn exchange_note(
        &self,
        name: &[u8],
        expected: Option<&[u8]>,
        value: Option<&[u8]>,
    ) -> StoreFuture<bool> {
        self.reply(self.shared.exchange(name, expected, value))
    }

    fn node(&self) -> &str {
        &self.node
    }

    fn process(&self) -> &str {
        &self.node
    }

    fn state(&self) -> &'static str {
        "ok"
    }
}
