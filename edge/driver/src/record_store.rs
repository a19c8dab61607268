//! Where a server's records of sessions, memos of flows and notes of the application are kept: in its own
//! [`Journal`], or in a store that it shares with other servers.
//!
//! ```text
//!  embedded   one process, one file; sleeping sessions are loaded at its start and wait in memory
//!  shared     many nodes; a session is looked up at its SYN, owned by the node that confirms the handshake, and
//!             in memory only while it is awake
//! ```
//!
//! In a shared store the owner of a session is the node that confirmed its last epoch (R-HS-1). Each write carries
//! that epoch and that node, and a write of another node's epoch is refused, so what two nodes say of one session is
//! never mixed, whatever their clocks say and however late a packet arrives.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use d2tp_session::{FlowId, Span};

use crate::journal::{Journal, JournalBatch, JournalError, JournalSessionKey};

/// A future of a shared store, which any runtime may await.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = Result<T, JournalError>> + Send>>;

/// What a commit found beside what it wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommitReport {
    /// Sessions that another node has taken over. Nothing of them was written.
    pub lost: Vec<JournalSessionKey>,
}

/// A place for records that outlive the process. Its methods block.
pub trait RecordStore: Send + Sync + Debug {
    /// The place, for messages to the operator.
    fn place(&self) -> String;

    /// Makes a batch permanent: in a journal completely or not at all, in a shared store each session with its memos,
    /// and each note. A batch may be committed again.
    ///
    /// # Errors
    /// The store cannot be written. What was committed before remains valid.
    fn commit(&self, batch: &JournalBatch) -> Result<CommitReport, JournalError>;

    /// A note of the application.
    ///
    /// # Errors
    /// The store cannot be read.
    fn note(&self, name: &[u8]) -> Result<Option<Vec<u8>>, JournalError>;

    /// Replaces a note if it still has the value `expected`; `None` stands for no note. Returns whether it did.
    ///
    /// # Errors
    /// The store cannot be read or written.
    fn replace_note(
        &self,
        name: &[u8],
        expected: Option<&[u8]>,
        value: Option<&[u8]>,
    ) -> Result<bool, JournalError>;

    /// The journal, if the store is one.
    fn as_journal(&self) -> Option<&Journal> {
        None
    }

    /// The shared store, if the store is one.
    fn as_shared(self: Arc<Self>) -> Option<Arc<dyn SharedRecords>> {
        None
    }
}

/// A session as a node found it in a shared store.
#[derive(Clone, Debug)]
pub struct SharedSession {
    /// The last epoch that a node owned it with.
    pub epoch: u32,
    /// Whether this process is the owner.
    pub is_ours: bool,
    /// The process that owns it, by a name of the store.
    pub owner: String,
    /// Counts the writes of the session, so that a node notices those since its lookup.
    pub version: u64,
    /// The record, as encoded by [`d2tp_session::SessionRecord::encode`]; none if nothing of the session sleeps.
    pub record: Option<Vec<u8>>,
    /// The age of the record, by the store's clock.
    pub age: Span,
    /// The memos of the session's flows.
    pub memos: Vec<(FlowId, Bytes)>,
}

/// The result of a claim to own a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnershipClaim {
    /// This node owns the session, and no other node writes it any more.
    Owned {
        /// The number of writes before.
        version: u64,
        /// The node that owned it before, if that was another one.
        from: Option<String>,
    },
    /// Another node owns it with this epoch or a later one.
    Lost {
        /// The name of the node that owns the session.
        owner: String,
        /// Whether the owner is this process, with a later epoch.
        is_ours: bool,
    },
}

/// A question of another process for a session that this one owns: its device came there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerQuestion {
    /// The session for which the other process asks.
    pub session: JournalSessionKey,
    /// The number by which the asking process knows the question.
    pub number: u64,
    /// The process that asks, by a name of the store.
    pub asker: String,
}

/// What the owner of a session says to a process to which its device came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerAnswer {
    /// The owner has written what the store lacked of the session: look it up again.
    Written,
    /// The owner has nothing of the session that the store lacks.
    Nothing,
    /// A flow of the session is not in the store yet: another process would lose it. Its device is to try later.
    Busy,
    /// The owner does not answer.
    Gone,
}

/// Records that several nodes share.
pub trait SharedRecords: RecordStore {
    /// Looks up a session.
    fn look_up(&self, key: JournalSessionKey) -> StoreFuture<Option<SharedSession>>;

    /// Makes this node the owner of a session, if `epoch` is greater than that of the owner. The same claim again, after
    /// a lost answer, has the same result.
    fn claim(&self, key: JournalSessionKey, epoch: u32) -> StoreFuture<OwnershipClaim>;

    /// Whether this process claimed the session, and has not heard that it lost it.
    fn owns(&self, key: &JournalSessionKey) -> bool;

    /// Forgets that this process claimed the session. It writes nothing of it any more.
    fn disown(&self, key: &JournalSessionKey);

    /// Says that this process holds an object of the application, which memos may name.
    fn hold(&self, object: u64) -> StoreFuture<()>;

    /// Says that this process holds an object, and that others do no more: it has taken the object over.
    fn hold_alone(&self, object: u64) -> StoreFuture<()>;

    /// Says that this process holds an object no more.
    fn let_go(&self, object: u64) -> StoreFuture<()>;

    /// The next object that no memo names and no process holds any more.
    fn next_free_object(&self) -> StoreFuture<u64>;

    /// The next session that another node has taken over, of which no [`CommitReport`] was delivered.
    fn next_lost(&self) -> StoreFuture<JournalSessionKey>;

    /// Asks the process that owns a session for what it has of it, before another claims the session. A process that
    /// was killed is found to be gone at once.
    fn ask_owner(&self, key: JournalSessionKey, owner: String) -> StoreFuture<OwnerAnswer>;

    /// The next question for a session that this process owns, or owned.
    fn next_question(&self) -> StoreFuture<OwnerQuestion>;

    /// Answers a question.
    fn answer_question(&self, question: OwnerQuestion, answer: OwnerAnswer) -> StoreFuture<()>;

    /// A note of the application, as [`RecordStore::note`] without blocking.
    fn read_note(&self, name: &[u8]) -> StoreFuture<Option<Vec<u8>>>;

    /// Replaces a note that still has the value `expected`, as [`RecordStore::replace_note`] without blocking.
    fn exchange_note(
        &self,
        name: &[u8],
        expected: Option<&[u8]>,
        value: Option<&[u8]>,
    ) -> StoreFuture<bool>;

    /// The name of this node.
    fn node(&self) -> &str;

    /// The name of this process in the store, which no other process of any node ever has.
    fn process(&self) -> &str;

    /// What the store's last answer says of it, in a word.
    fn state(&self) -> &'static str;
}

impl RecordStore for Journal {
    fn place(&self) -> String {
        self.path().display().to_string()
    }

    fn commit(&self, batch: &JournalBatch) -> Result<CommitReport, JournalError> {
        Journal::commit(self, batch)?;
        Ok(CommitReport::default())
    }

    fn note(&self, name: &[u8]) -> Result<Option<Vec<u8>>, JournalError> {
        Journal::note(self, name)
    }

    fn replace_note(
        &self,
        name: &[u8],
        expected: Option<&[u8]>,
        value: Option<&[u8]>,
    ) -> Result<bool, JournalError> {
        Journal::replace_note(self, name, expected, value)
    }

    fn as_journal(&self) -> Option<&Journal> {
        Some(self)
    }
}
