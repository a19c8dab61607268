//! Records of sleeping sessions in Redis or Valkey, which several servers with the same key share.
//!
//! ```text
//!  node a ──┐                          ┌── sessions, each owned by (epoch, process)
//!  node b ──┼── scripts, one round ────┤   notes
//!  node c ──┘   trip each              └── which flows and processes need which object
//! ```
//!
//! A session belongs to the process that claimed it with the greatest epoch. Epochs of an instance only grow (R-HS-1),
//! so the epoch is the fencing token of every write: what a process writes of a session that another has claimed since
//! is refused, and the process hears that it has lost it. No clock decides who owns what.
//!
//! All operations may be repeated: one whose answer was lost has the same result again.

mod check;
mod connection;
mod owner_questions;
mod scripts;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{
    CommitReport, JournalBatch, JournalError, JournalFlowKey, JournalSessionKey, OwnerAnswer,
    OwnerQuestion, OwnershipClaim, RecordStore, SharedRecords, SharedSession, StoreFuture,
};
use d2tp_session::{FlowId, SessionRecord};
use futures_util::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;

pub use connection::StoreHealth;
use connection::{ScriptAnswer, ScriptCall, StoreConnection};
use owner_questions::OwnerQuestions;
use scripts::SCRIPTS;

/// How many commands of one batch are on their way at once.
const COMMANDS_AT_ONCE: usize = 128; // a guess
/// How long the epoch of a session is remembered after its end: as long as a node may be away that still has it.
const EPOCH_REMEMBERED: Duration = Duration::from_secs(24 * 3600); // a guess
/// How often sessions are removed whose time is over, and how often those that are awake are kept from it.
const SWEEP_EVERY: Duration = Duration::from_secs(600); // a guess
/// How many sessions are removed at once.
const SWEEP_AT_ONCE: usize = 100; // a guess
/// How much longer than its deadlines a session stays: clocks and devices may be late.
const LASTS_LONGER: Duration = Duration::from_secs(600); // a guess
/// How long a session that is awake stays, should its node be gone.
const AWAKE: Duration = Duration::from_secs(24 * 3600); // a guess
/// How long a claim stays that no record follows, should its node be gone, and how long its epoch is remembered then.
const CLAIM: Duration = Duration::from_secs(3600); // a guess
/// How long the name of a node stays taken after its process was heard of last.
const LEASE: Duration = Duration::from_secs(30); // a guess
/// How often a process says that it runs.
const LEASE_RENEWED_EVERY: Duration = Duration::from_secs(10); // a third of the lease
/// How soon a process tries again to let go of what earlier ones held.
const BEGIN_AGAIN: Duration = Duration::from_secs(1); // a guess
/// How long a session without deadlines stays after its owner was heard of last.
const ABSENCE: Duration = Duration::from_secs(30 * 24 * 3600); // a guess

/// The most characters of a node's name that are part of the name of its processes.
const NODE_NAME_MAX: usize = 24;

/// Finds the object of the application that a flow's memo names, if there is one.
pub type ObjectOfMemo = dyn Fn(&[u8]) -> Option<u64> + Send + Sync;

/// Options of a shared store.
#[derive(Clone)]
pub struct RedisStoreOptions {
    /// The store's address: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` or `redis+unix:///PATH`.
    pub url: String,
    /// The name of this node, which no other has at the same time.
    pub node: String,
    /// What distinguishes this node from another that was given its name by mistake: the same for all processes of the
    /// node, one after the other.
    pub holder: String,
    /// The beginning of all keys: the same for all nodes with one host key, and for no others.
    pub prefix: String,
    /// Which object of the application a memo names: objects that no memo names any more are reported.
    pub object_of: Arc<ObjectOfMemo>,
}

/// A shared store in Redis or Valkey.
pub struct RedisStore {
    inner: Arc<StoreInner>,
    /// The runtime of connections, so that any thread may wait for an answer.
    runtime: Option<Runtime>,
}

struct StoreInner {
    connection: StoreConnection,
    prefix: Vec<u8>,
    node: String,
    holder: String,
    object_of: Arc<ObjectOfMemo>,
    /// Sessions that this process owns, and their epochs.
    owned: Mutex<HashMap<JournalSessionKey, u32>>,
    /// Objects that nobody needs any more.
    free_objects: Mutex<VecDeque<u64>>,
    has_free_objects: Notify,
    /// Sessions that another process has taken over, and of which no report was delivered.
    lost: Mutex<VecDeque<JournalSessionKey>>,
    has_lost: Notify,
    questions: OwnerQuestions,
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedisStore({})", self.inner.connection.place())
    }
}

impl Drop for RedisStore {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The address of a store without its password, for messages.
fn without_password(url: &str) -> String {
    let is_unix = url.starts_with("redis+unix:") || url.starts_with("unix:");
    if let (true, Some((place, _))) = (is_unix, url.split_once('?')) {
        return place.to_owned(); // What follows may be `pass=…`.
    }
    match (url.split_once("://"), url.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        _ => url.to_owned(),
    }
}

impl RedisStore {
    /// Opens a store, and checks that it honours conditional writes, and that the node's name is free. Blocks until it has
    /// answered. What an earlier process of the node has there is untouched until [`RedisStore::begin`].
    ///
    /// # Errors
    /// The address makes no sense, the store cannot be reached, it is none that records can be trusted to, or another
    /// node of this name runs.
    pub fn open(options: RedisStoreOptions) -> Result<RedisStore, JournalError> {
        let place = without_password(&options.url);
        let fault = |cause: String| JournalError::Store {
            place: place.clone(),
            cause,
        };
        let client = redis::Client::open(options.url.as_str())
            .map_err(|error| fault(format!("has an address that makes no sense: {error}")))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("store")
            .enable_all()
            .build()
            .map_err(|error| fault(format!("cannot be used: {error}")))?;
        let mut random = [0; 8];
        getrandom::fill(&mut random).expect("the system has randomness");
        // Never as long as the reference of a flow.
        let node: String = options.node.chars().take(NODE_NAME_MAX).collect();
        let process = format!("{node}/{}", hex::encode(random));
        let prefix = format!("{}:", options.prefix).into_bytes();
        let key = |kind: &[u8], name: &[u8]| [&prefix[..], kind, name].concat();
        let connection = StoreConnection::new(
            client,
            place.clone(),
            process.clone(),
            key(b"f", process.as_bytes()),
            key(b"p", options.node.as_bytes()),
        );
        let inner = Arc::new(StoreInner {
            connection,
            prefix,
            node: options.node,
            holder: options.holder,
            object_of: options.object_of,
            owned: Mutex::default(),
            free_objects: Mutex::default(),
            has_free_objects: Notify::new(),
            lost: Mutex::default(),
            has_lost: Notify::new(),
            questions: OwnerQuestions::default(),
        });
        let store = RedisStore {
            inner: inner.clone(),
            runtime: Some(runtime),
        };
        store.wait(async move {
            inner.check().await?;
            if inner.renew_lease().await? {
                return Ok(());
            }
            Err(inner.connection.error(format!(
                "has another node {:?} that runs; give this one another name (--node). The name of a node that is gone is \
                 free after {} s",
                inner.node,
                LEASE.as_secs()
            )))
        })?;
        Ok(store)
    }

    /// Takes the place of the node's earlier processes, which have ended: what they held is let go, as soon as the store
    /// answers. From now on the node's name stays taken, and sessions whose time is over are removed.
    pub fn begin(&self) {
        if let Some(runtime) = &self.runtime {
            runtime.spawn(keep_lease(Arc::downgrade(&self.inner)));
            runtime.spawn(sweep(Arc::downgrade(&self.inner)));
            runtime.spawn(owner_questions::listen(Arc::downgrade(&self.inner)));
        }
    }

    /// What the store's last answer says of it.
    pub fn health(&self) -> StoreHealth {
        self.inner.connection.health()
    }

    /// How many sessions this process owns.
    pub fn owned_sessions(&self) -> usize {
        self.inner.owned.lock().len()
    }

    fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, JournalError>> + Send + 'static,
    ) -> StoreFuture<T> {
        let inner = self.inner.clone();
        let task = self.runtime.as_ref().map(|runtime| runtime.spawn(work));
        Box::pin(async move {
            match task {
                Some(task) => task
                    .await
                    .unwrap_or_else(|_| Err(inner.connection.error("is no longer used"))),
                None => Err(inner.connection.error("is no longer used")),
            }
        })
    }

    /// Waits for an answer on a thread of any kind.
    fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, JournalError>> + Send + 'static,
    ) -> Result<T, JournalError> {
        let (tell, told) = std::sync::mpsc::channel();
        let ended = || self.inner.connection.error("is no longer used");
        let runtime = self.runtime.as_ref().ok_or_else(ended)?;
        runtime.spawn(async move {
            let _ = tell.send(work.await);
        });
        told.recv().unwrap_or_else(|_| Err(ended()))
    }
}

impl RecordStore for RedisStore {
    fn place(&self) -> String {
        self.inner.connection.place().to_owned()
    }

    fn commit(&self, batch: &JournalBatch) -> Result<CommitReport, JournalError> {
        let calls = self.inner.commit_calls(batch);
        let inner = self.inner.clone();
        self.wait(async move { inner.commit(calls).await })
    }

    fn note(&self, name: &[u8]) -> Result<Option<Vec<u8>>, JournalError> {
        let (inner, key) = (self.inner.clone(), self.inner.key(b"n", name));
        self.wait(async move { inner.connection.value(&key).await })
    }

    fn replace_note(
        &self,
        name: &[u8],
        expected: Option<&[u8]>,
        value: Option<&[u8]>,
    ) -> Result<bool, JournalError> {
        let expected = Some(expected);
        let call = self.inner.note_call(name, expected, value);
        let (inner, removes) = (self.inner.clone(), value.is_none());
        self.wait(async move { inner.change_note(&call, removes).await })
    }

    fn as_shared(self: Arc<Self>) -> Option<Arc<dyn SharedRecords>> {
        Some(self)
    }
}

impl SharedRecords for RedisStore {
    fn look_up(&self, key: JournalSessionKey) -> StoreFuture<Option<SharedSession>> {
        let inner = self.inner.clone();
        self.spawn(async move {
            let call = ScriptCall {
                keys: vec![inner.key(b"s", &key.bytes())],
                arguments: Vec::new(),
            };
            let answer = inner.connection.call(&SCRIPTS.look_up, &call).await?;
            Ok(inner.read_session(&answer))
        })
    }

    fn claim(&self, key: JournalSessionKey, epoch: u32) -> StoreFuture<OwnershipClaim> {
        let inner = self.inner.clone();
        self.spawn(async move {
            let claimed = inner
                .claim(key, epoch, &inner.connection.process, &inner.node)
                .await?;
            if let OwnershipClaim::Owned { .. } = claimed {
                let mut owned = inner.owned.lock();
                let held = owned.entry(key).or_insert(epoch);
                *held = epoch.max(*held);
            }
            Ok(claimed)
        })
    }

    fn owns(&self, key: &JournalSessionKey) -> bool {
        self.inner.owned.lock().contains_key(key)
    }

    fn disown(&self, key: &JournalSessionKey) {
        self.inner.owned.lock().remove(key);
    }

    fn hold(&self, object: u64) -> StoreFuture<()> {
        let inner = self.inner.clone();
        self.spawn(async move {
            let call = inner.object_call(object, inner.connection.process.as_bytes());
            inner.connection.call(&SCRIPTS.hold, &call).await.map(drop)
        })
    }

    fn hold_alone(&self, object: u64) -> StoreFuture<()> {
        let inner = self.inner.clone();
        self.spawn(async move {
            let call = inner.object_call(object, inner.connection.process.as_bytes());
            let held = inner.connection.call(&SCRIPTS.hold_alone, &call).await;
            held.map(drop)
        })
    }

    fn let_go(&self, object: u64) -> StoreFuture<()> {
        let inner = self.inner.clone();
        self.spawn(async move {
            let process = inner.connection.process.clone();
            inner.let_go(object, process.as_bytes()).await
        })
    }

    fn next_free_object(&self) -> StoreFuture<u64> {
        let inner = self.inner.clone();
        self.spawn(async move {
            loop {
                let news = inner.has_free_objects.notified();
                if let Some(object) = inner.free_objects.lock().pop_front() {
                    return Ok(object);
                }
                news.await;
            }
        })
    }

    fn next_lost(&self) -> StoreFuture<JournalSessionKey> {
        let inner = self.inner.clone();
        self.spawn(async move {
            loop {
                let news = inner.has_lost.notified();
                if let Some(key) = inner.lost.lock().pop_front() {
                    return Ok(key);
                }
                news.await;
            }
        })
    }

    fn ask_owner(&self, key: JournalSessionKey, owner: String) -> StoreFuture<OwnerAnswer> {
        let inner = self.inner.clone();
        self.spawn(async move { inner.ask_owner(key, &owner).await })
    }

    fn next_question(&self) -> StoreFuture<OwnerQuestion> {
        let inner = self.inner.clone();
        self.spawn(async move { Ok(inner.questions.next().await) })
    }

    fn answer_question(&self, question: OwnerQuestion, answer: OwnerAnswer) -> StoreFuture<()> {
        let inner = self.inner.clone();
        self.spawn(async move { inner.answer_question(&question, answer).await })
    }

    fn read_note(&self, name: &[u8]) -> StoreFuture<Option<Vec<u8>>> {
        let (inner, key) = (self.inner.clone(), self.inner.key(b"n", name));
        self.spawn(async move { inner.connection.value(&key).await })
    }

    fn exchange_note(
        &self,
        name: &[u8],
        expected: Option<&[u8]>,
        value: Option<&[u8]>,
    ) -> StoreFuture<bool> {
        let call = self.inner.note_call(name, Some(expected), value);
        let (inner, removes) = (self.inner.clone(), value.is_none());
        self.spawn(async move { inner.change_note(&call, removes).await })
    }

    fn node(&self) -> &str {
        &self.inner.node
    }

    fn process(&self) -> &str {
        &self.inner.connection.process
    }

    fn state(&self) -> &'static str {
        self.health().as_str()
    }
}

/// A call of a batch.
enum CommitCall {
    Session {
        key: JournalSessionKey,
        call: ScriptCall,
        removes: bool,
    },
    Note {
        call: ScriptCall,
        removes: bool,
    },
}

impl StoreInner {
    fn key(&self, kind: &[u8], name: &[u8]) -> Vec<u8> {
        [&self.prefix[..], kind, name].concat()
    }

    fn fence_key(&self) -> Vec<u8> {
        self.key(b"f", self.connection.process.as_bytes())
    }

    async fn claim(
        &self,
        key: JournalSessionKey,
        epoch: u32,
        process: &str,
        node: &str,
    ) -> Result<OwnershipClaim, JournalError> {
        let member = key.bytes();
        let call = ScriptCall {
            keys: vec![
                self.fence_key(),
                self.key(b"s", &member),
                self.key(b"d", b""),
            ],
            arguments: vec![
                epoch.to_string().into_bytes(),
                process.into(),
                node.into(),
                member.to_vec(),
                CLAIM.as_millis().to_string().into_bytes(),
            ],
        };
        let answer = self.connection.call(&SCRIPTS.claim, &call).await?;
        let text = |i: usize| {
            let field = answer.get(i).map(Vec::as_slice).unwrap_or_default();
            String::from_utf8_lossy(field).into_owned()
        };
        match text(0).as_str() {
            "owned" => Ok(OwnershipClaim::Owned {
                version: text(1).parse().unwrap_or(0),
                from: Some(text(2)).filter(|from| !from.is_empty()),
            }),
            "lost" => Ok(OwnershipClaim::Lost {
                owner: text(1),
                is_ours: !text(2).is_empty(),
            }),
            _ => Err(self.misunderstood()),
        }
    }

    fn misunderstood(&self) -> JournalError {
        self.connection
            .error("answers as no Redis 7 or Valkey does; records cannot be trusted to it")
    }

    fn read_session(&self, answer: &ScriptAnswer) -> Option<SharedSession> {
        let number = |bytes: &[u8]| std::str::from_utf8(bytes).ok()?.parse::<u64>().ok();
        let (now, fields) = answer.split_first()?;
        let mut found = SharedSession {
            epoch: 0,
            is_ours: false,
            owner: String::new(),
            version: 0,
            record: None,
            age: Duration::ZERO.into(),
            memos: Vec::new(),
        };
        let mut made = None;
        for pair in fields.chunks_exact(2) {
            let (field, value) = (&pair[0], &pair[1]);
            match field.split_first()? {
                (b'e', []) => found.epoch = number(value)?.try_into().ok()?,
                (b'o', []) => {
                    found.is_ours = *value == self.connection.process.as_bytes();
                    found.owner = String::from_utf8_lossy(value).into_owned();
                }
                (b'v', []) => found.version = number(value)?,
                (b't', []) => made = number(value),
                (b'r', []) => found.record = Some(value.clone()),
                (b'm', flow) => {
                    let flow = u64::from_be_bytes(flow.try_into().ok()?);
                    found.memos.push((FlowId(flow), Bytes::from(value.clone())));
                }
                _ => {}
            }
        }
        if fields.is_empty() {
            return None;
        }
        let age = made.and_then(|made| number(now)?.checked_sub(made));
        found.age = Duration::from_millis(age.unwrap_or(0)).into();
        Some(found)
    }

    /// The calls that write a batch. Sessions that this process does not own are left out.
    fn commit_calls(&self, batch: &JournalBatch) -> Vec<CommitCall> {
        let owned = self.owned.lock();
        let mut keys: Vec<JournalSessionKey> = batch.sessions.keys().copied().collect();
        keys.extend(batch.memos.keys().map(|memo| memo.session));
        keys.sort_unstable();
        keys.dedup();
        let mut calls = Vec::new();
        for key in keys {
            let Some(epoch) = owned.get(&key) else {
                continue;
            };
            calls.push(self.session_call(key, *epoch, batch));
        }
        drop(owned);
        for (name, value) in &batch.notes {
            calls.push(CommitCall::Note {
                call: self.note_call(name, None, value.as_deref()),
                removes: value.is_none(),
            });
        }
        calls
    }

    fn session_call(&self, key: JournalSessionKey, epoch: u32, batch: &JournalBatch) -> CommitCall {
        let member = key.bytes();
        let (what, record, lasts) = match batch.sessions.get(&key) {
            None => ("keep", &[][..], AWAKE),
            Some(None) => ("end", &[][..], Duration::ZERO),
            Some(Some(stored)) => ("set", &stored.record[..], lasts(&stored.record)),
        };
        let mut arguments = vec![
            epoch.to_string().into_bytes(),
            self.connection.process.as_bytes().to_vec(),
            self.node.as_bytes().to_vec(),
            self.key(b"r", b""),
            member.to_vec(),
            what.into(),
            record.to_vec(),
            lasts.as_millis().to_string().into_bytes(),
            EPOCH_REMEMBERED.as_millis().to_string().into_bytes(),
        ];
        let mut removes = what == "end";
        let flow = |id| JournalFlowKey {
            session: key,
            flow: FlowId(id),
        };
        for (memo, value) in batch.memos.range(flow(0)..=flow(u64::MAX)) {
            removes &= value.is_none();
            let object = value.as_ref().and_then(|value| (self.object_of)(value));
            let object = object.map_or(Vec::new(), |object| object.to_be_bytes().to_vec());
            arguments.push(memo.flow.0.to_be_bytes().to_vec());
            arguments.push(if value.is_some() { "set" } else { "end" }.into());
            arguments.push(value.as_ref().map_or(Vec::new(), |value| value.to_vec()));
            arguments.push(object);
        }
        CommitCall::Session {
            key,
            removes,
            call: ScriptCall {
                keys: vec![
                    self.fence_key(),
                    self.key(b"s", &member),
                    self.key(b"d", b""),
                ],
                arguments,
            },
        }
    }

    async fn commit(&self, calls: Vec<CommitCall>) -> Result<CommitReport, JournalError> {
        let mut report = CommitReport::default();
        let failed = Mutex::new(None);
        let work = calls.into_iter().map(|call| async {
            // After a failure no more are sent; what is under way is waited for, since it may tell of a loss.
            if failed.lock().is_some() {
                return None;
            }
            let answer = self.commit_one(call).await;
            answer.unwrap_or_else(|error| {
                failed.lock().get_or_insert(error);
                None
            })
        });
        let mut answers = stream::iter(work).buffered(COMMANDS_AT_ONCE);
        while let Some(lost) = answers.next().await {
            report.lost.extend(lost);
        }
        drop(answers);
        match failed.into_inner() {
            None => Ok(report),
            Some(error) => {
                self.report_lost(report.lost);
                Err(error)
            }
        }
    }

    /// Reports sessions that were lost while nobody waited for a report.
    fn report_lost(&self, lost: Vec<JournalSessionKey>) {
        if !lost.is_empty() {
            self.lost.lock().extend(lost);
            self.has_lost.notify_one();
        }
    }

    async fn commit_one(
        &self,
        call: CommitCall,
    ) -> Result<Option<JournalSessionKey>, JournalError> {
        match call {
            CommitCall::Note { call, removes } => {
                self.change_note(&call, removes).await?;
                Ok(None)
            }
            CommitCall::Session { key, call, removes } => {
                let script = match removes {
                    true => &SCRIPTS.commit_removals,
                    false => &SCRIPTS.commit,
                };
                let answer = self.connection.call(script, &call).await?;
                match answer.first().map(Vec::as_slice) {
                    Some(b"ok") => {
                        self.report_free(&answer[1..]);
                        Ok(None)
                    }
                    Some(b"lost") => {
                        self.owned.lock().remove(&key);
                        Ok(Some(key))
                    }
                    _ => Err(self.misunderstood()),
                }
            }
        }
    }

    /// The call that changes a note; without `expected` whatever it is.
    #[allow(clippy::option_option)] // The note may be expected not to be there.
    fn note_call(
        &self,
        name: &[u8],
        expected: Option<Option<&[u8]>>,
        value: Option<&[u8]>,
    ) -> ScriptCall {
        let (condition, held) = match expected {
            None => ("any", &[][..]),
            Some(None) => ("none", &[][..]),
            Some(Some(held)) => ("is", held),
        };
        ScriptCall {
            keys: vec![self.fence_key(), self.key(b"n", name)],
            arguments: vec![
                condition.into(),
                held.to_vec(),
                if value.is_some() { "set" } else { "end" }.into(),
                value.unwrap_or_default().to_vec(),
            ],
        }
    }

    async fn change_note(&self, call: &ScriptCall, removes: bool) -> Result<bool, JournalError> {
        let script = match removes {
            true => &SCRIPTS.remove_note,
            false => &SCRIPTS.replace_note,
        };
        let answer = self.connection.call(script, call).await?;
        match answer.first().map(Vec::as_slice) {
            Some(b"ok") => Ok(true),
            Some(b"no") => Ok(false),
            _ => Err(self.misunderstood()),
        }
    }

    fn object_call(&self, object: u64, process: &[u8]) -> ScriptCall {
        let name = object.to_be_bytes();
        ScriptCall {
            keys: vec![
                self.fence_key(),
                self.key(b"r", &name),
                self.key(b"h", process),
            ],
            arguments: vec![name.to_vec(), process.to_vec()],
        }
    }

    async fn let_go(&self, object: u64, process: &[u8]) -> Result<(), JournalError> {
        let call = self.object_call(object, process);
        let answer = self.connection.call(&SCRIPTS.let_go, &call).await?;
        self.report_free(answer.get(1..).unwrap_or_default());
        Ok(())
    }

    fn report_free(&self, objects: &[Vec<u8>]) {
        if objects.is_empty() {
            return;
        }
        let read = |bytes: &Vec<u8>| Some(u64::from_be_bytes(bytes.as_slice().try_into().ok()?));
        self.free_objects
            .lock()
            .extend(objects.iter().filter_map(read));
        self.has_free_objects.notify_one();
    }

    /// Says that this process runs. Returns whether the node's name is this node's.
    async fn renew_lease(&self) -> Result<bool, JournalError> {
        let call = ScriptCall {
            keys: vec![self.fence_key(), self.key(b"l", self.node.as_bytes())],
            arguments: vec![
                self.holder.clone().into_bytes(),
                LEASE.as_millis().to_string().into_bytes(),
            ],
        };
        if self.connection.health() == StoreHealth::Full {
            // Tells whether it has room again, should nothing else be written.
            let _ = self.connection.call(&SCRIPTS.lease_with_room, &call).await;
        }
        let answer = self.connection.call(&SCRIPTS.lease, &call).await?;
        match answer.first().map(Vec::as_slice) {
            Some(b"ok") => Ok(true),
            Some(b"no") => Ok(false),
            _ => Err(self.misunderstood()),
        }
    }

    /// Lets go of what earlier processes of this node held.
    async fn let_go_of_earlier_processes(&self) -> Result<(), JournalError> {
        let processes_key = self.key(b"p", self.node.as_bytes());
        for process in self.connection.members(&processes_key).await? {
            if process == self.connection.process.as_bytes() {
                continue;
            }
            let held_key = self.key(b"h", &process);
            for object in self.connection.members(&held_key).await? {
                if let Ok(object) = object.as_slice().try_into() {
                    self.let_go(u64::from_be_bytes(object), &process).await?;
                }
            }
            // A process that still runs under this name hears that it has lost its connection, and makes another.
            self.connection.remove(&[self.key(b"f", &process)]).await?;
            self.connection
                .remove_of_set(&processes_key, &process)
                .await?;
        }
        Ok(())
    }

    /// Removes sessions whose time is over, and keeps those that are awake here.
    async fn sweep(&self) -> Result<(), JournalError> {
        let awake: Vec<(JournalSessionKey, u32)> = {
            let owned = self.owned.lock();
            owned.iter().map(|(key, epoch)| (*key, *epoch)).collect()
        };
        let none = JournalBatch::default();
        let calls = awake
            .iter()
            .map(|(key, epoch)| self.session_call(*key, *epoch, &none));
        let report = self.commit(calls.collect()).await?;
        self.report_lost(report.lost);
        let call = ScriptCall {
            keys: vec![self.fence_key(), self.key(b"d", b"")],
            arguments: vec![
                self.key(b"s", b""),
                EPOCH_REMEMBERED.as_millis().to_string().into_bytes(),
                CLAIM.as_millis().to_string().into_bytes(),
                self.key(b"r", b""),
                SWEEP_AT_ONCE.to_string().into_bytes(),
            ],
        };
        let answer = self.connection.call(&SCRIPTS.sweep, &call).await?;
        self.report_free(answer.get(1..).unwrap_or_default());
        Ok(())
    }
}

/// How long a session's record is of use: until its last deadline, or as long as its device may be absent.
fn lasts(record: &[u8]) -> Duration {
    let left = SessionRecord::decode(record).ok().and_then(|record| {
        let flows = record.flows.iter();
        let left: Option<Vec<_>> = flows.map(|flow| flow.deadline_left).collect();
        left?.into_iter().max()
    });
    match left {
        Some(left) => Duration::from(left) + LASTS_LONGER,
        None => ABSENCE,
    }
}

/// Says that this process runs while the store is open, after it let go of what the node's earlier ones held.
async fn keep_lease(store: std::sync::Weak<StoreInner>) {
    let (mut has_begun, mut has_name) = (false, true);
    while let Some(store) = store.upgrade() {
        // The store's state is in the log already.
        has_begun = has_begun || store.let_go_of_earlier_processes().await.is_ok();
        if let Ok(now) = store.renew_lease().await
            && now != std::mem::replace(&mut has_name, now)
        {
            let node = store.node.as_str();
            match now {
                true => tracing::info!(node, "this node has its name again"),
                false => tracing::error!(
                    node,
                    "another node has this one's name, and removes what it keeps; give one of them another (--node)"
                ),
            }
        }
        drop(store);
        let pause = if has_begun {
            LEASE_RENEWED_EVERY
        } else {
            BEGIN_AGAIN
        };
        tokio::time::sleep(pause).await;
    }
}

/// Sweeps while the store is open.
async fn sweep(store: std::sync::Weak<StoreInner>) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        let Some(store) = store.upgrade() else {
            return;
        };
        // Its state is in the log already.
        let _ = store.sweep().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_a_store_without_its_password() {
        for (url, said) in [
            ("redis://:secret@10.0.0.5/0", "redis://10.0.0.5/0"),
            ("redis://10.0.0.5", "redis://10.0.0.5"),
            (
                "redis+unix:///run/redis.sock?db=1&pass=secret",
                "redis+unix:///run/redis.sock",
            ),
            (
                "redis+unix:///run/redis.sock?pass=a@b",
                "redis+unix:///run/redis.sock",
            ),
            (
                "redis+unix:///run/redis.sock",
                "redis+unix:///run/redis.sock",
            ),
        ] {
            assert_eq!(without_password(url), said);
        }
    }
}
