//! The note of an upload that outlives the process: whose it is, where it goes, and what its origin may have received.
//!
//! ```text
//!  Receiving ── the body is complete, there is a connection ──▶ Sending ── answer ──▶ Answered
//!      ▲                                                                                 │
//!      └──────────── Held: the next try of the device asks the origin again ◀────────────┘
//! ```
//!
//! `Sending` is durable before the origin gets the first byte, so that a process which finds another state knows that
//! the origin has received nothing, and one that finds no note has delivered nothing.
//!
//! Where nodes share a store, the note is replaced only if it has the version of this node: one that another node took
//! over meanwhile is lost, and then nothing is sent from here.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use d2tp_driver::{HostKey, JournalError, SharedRecords};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::Method;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::copy_head::{CopyHead, CopyRequest};
use crate::copy_store::{self, CopyNote, CopyRecord, CopyStore, HeaderFields, wall_ms};
use crate::pinned_copy::PinnedCopy;
use crate::refusal::ProxRefusal;
use crate::request::{UploadRequest, UploadToken};
use crate::retention_note::RetentionNote;

/// How long a delivery waits until the journal knows of it. Then the device is told that the state directory cannot be
/// written. A guess: the journal is tried again every 5 s.
const RECORDED_WITHIN: Duration = Duration::from_secs(20);

/// How soon a note is written again that a shared store did not take.
const AGAIN_AFTER: Duration = Duration::from_secs(1); // a guess

/// What the origin of an upload may have received.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum UploadStage {
    /// The origin has received nothing: the body is sent once it is complete.
    Receiving,
    /// The origin has refused the upload for now: it is sent when the device asks for it.
    Held,
    /// The origin may have received the upload.
    Sending,
    /// The origin has received the upload; its answer has no body.
    AnsweredHead(Box<CopyRecord>),
    /// The origin has received the upload; its answer is the copy with this id.
    AnsweredCopy(u64),
}

/// The note of an upload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct UploadRecord {
    pub(crate) client: HostKey,
    token: String,
    method: String,
    url: String,
    headers: HeaderFields,
    pub(crate) length: Option<u64>,
    pub(crate) stage: UploadStage,
    /// When the upload is dropped, in milliseconds since 1970; `None` while a flow uses it.
    pub(crate) until_ms: Option<u64>,
    /// The boot of the machine in which the file was created.
    pub(crate) boot: u32,
    /// The id of the body, where nodes share the note: its name has the token.
    #[serde(default)]
    pub(crate) id: u64,
    /// A random number of the node that has the upload, where nodes share the note.
    #[serde(default)]
    pub(crate) version: u64,
    /// The process that has the upload, where nodes share the note.
    #[serde(default)]
    pub(crate) process: String,
}

/// An upload in the copy store.
#[derive(Debug)]
pub(crate) struct StoredUpload {
    copy_store: Arc<CopyStore>,
    id: u64,
    record: Mutex<UploadRecord>,
    /// The note that nodes share; none: it is in the journal.
    shared: Option<SharedUploadNote>,
}

/// The note of an upload in a store that nodes share.
#[derive(Debug)]
struct SharedUploadNote {
    store: Arc<dyn SharedRecords>,
    name: Vec<u8>,
    /// Held by the task that writes the note.
    writing: tokio::sync::Mutex<()>,
}

impl UploadRecord {
    /// The record of a new upload; none if it has no token, by which alone a device finds it again.
    pub(crate) fn new(client: HostKey, request: &UploadRequest) -> Option<UploadRecord> {
        Some(UploadRecord {
            client,
            token: request.token.as_ref()?.as_str().to_owned(),
            method: request.method.as_str().to_owned(),
            url: request.url.to_string(),
            headers: copy_store::fields(&request.headers),
            length: request.length,
            stage: UploadStage::Receiving,
            until_ms: None,
            boot: d2tp_driver::boot(),
            id: 0,
            version: 0,
            process: String::new(),
        })
    }

    /// Whether this request continues the upload.
    pub(crate) fn is_of(&self, request: &UploadRequest) -> bool {
        let same = |known: UploadRequest| {
            known.method == request.method
                && known.url == request.url
                && known.length == request.length
        };
        self.request().is_some_and(same)
    }

    /// The record as a note.
    pub(crate) fn to_note(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("text and numbers")
    }

    /// The request; `None` if the record is invalid.
    pub(crate) fn request(&self) -> Option<UploadRequest> {
        Some(UploadRequest {
            method: Method::from_bytes(self.method.as_bytes()).ok()?,
            url: self.url.parse().ok()?,
            headers: copy_store::headers(&self.headers)?,
            length: self.length,
            expects_continue: true,
            token: Some(UploadToken::parse(&copy_store::value(&self.token)?)?),
        })
    }
}

impl StoredUpload {
    /// Records a new upload of a client; none if it has no token, by which alone a device finds it again.
    pub(crate) fn new(
        copy_store: &Arc<CopyStore>,
        id: u64,
        client: HostKey,
        request: &UploadRequest,
    ) -> Option<Arc<StoredUpload>> {
        let record = UploadRecord::new(client, request)?;
        let stored = StoredUpload::restored(copy_store, id, record);
        drop(stored.write());
        Some(stored)
    }

    /// An upload of an earlier process.
    pub(crate) fn restored(
        copy_store: &Arc<CopyStore>,
        id: u64,
        record: UploadRecord,
    ) -> Arc<StoredUpload> {
        Arc::new(StoredUpload {
            copy_store: copy_store.clone(),
            id,
            record: Mutex::new(record),
            shared: None,
        })
    }

    /// An upload whose note nodes share, under this name.
    pub(crate) fn shared(
        copy_store: &Arc<CopyStore>,
        store: &Arc<dyn SharedRecords>,
        name: Vec<u8>,
        record: UploadRecord,
    ) -> Arc<StoredUpload> {
        Arc::new(StoredUpload {
            copy_store: copy_store.clone(),
            id: record.id,
            record: Mutex::new(record),
            shared: Some(SharedUploadNote {
                store: store.clone(),
                name,
                writing: tokio::sync::Mutex::default(),
            }),
        })
    }

    /// The random number of this node in the note that nodes share.
    pub(crate) fn version(&self) -> u64 {
        self.record.lock().version
    }

    /// Writes the record; the receiver fails if the upload is another node's.
    fn write(self: &Arc<Self>) -> oneshot::Receiver<()> {
        if self.shared.is_none() {
            let record = self.record.lock();
            return (self.copy_store).write_note(CopyNote::Upload, self.id, &*record);
        }
        let (written, on_written) = oneshot::channel();
        let stored = self.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if stored.write_shared().await {
                    let _ = written.send(());
                }
            });
        }
        on_written
    }

    /// Writes the newest record. Returns whether the upload is this node's still.
    async fn write_shared(&self) -> bool {
        let Some(note) = &self.shared else {
            return false;
        };
        let _alone = note.writing.lock().await;
        while self.copy_store.is_open() {
            match self.replace_shared(note).await {
                Ok(is_ours) => return is_ours,
                Err(error) => {
                    tracing::warn!(%error, "an upload waits for the store");
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
            }
        }
        false
    }

    async fn replace_shared(&self, note: &SharedUploadNote) -> Result<bool, JournalError> {
        loop {
            // Where it is gone, the upload is over, or the store was emptied: nobody knows what its origin has received.
            let Some(held) = note.store.read_note(&note.name).await? else {
                return Ok(false);
            };
            let record = self.record.lock().clone();
            let theirs: Option<UploadRecord> = serde_json::from_slice(&held).ok();
            if theirs.is_none_or(|theirs| theirs.version != record.version) {
                tracing::warn!(id = self.id, "another node has taken over this upload");
                return Ok(false);
            }
            let new = record.to_note();
            let replaced = note
                .store
                .exchange_note(&note.name, Some(&held), Some(&new));
            if replaced.await? {
                return Ok(true);
            }
        }
    }

    fn set_stage(self: &Arc<Self>, stage: UploadStage) -> oneshot::Receiver<()> {
        self.record.lock().stage = stage;
        self.write()
    }

    /// Records that the origin may have received the upload from now on; ready when that is durable.
    pub(crate) fn record_sending(
        self: Arc<StoredUpload>,
    ) -> BoxFuture<'static, Result<(), ProxRefusal>> {
        async move {
            let before = self.record.lock().stage.clone();
            if before == UploadStage::Sending {
                return Ok(());
            }
            let written = self.set_stage(UploadStage::Sending);
            match tokio::time::timeout(RECORDED_WITHIN, written).await {
                Ok(Ok(())) => Ok(()),
                _ => {
                    // The origin has received nothing.
                    drop(self.set_stage(before));
                    Err(match self.shared {
                        Some(_) => ProxRefusal::UploadAwaited,
                        None => ProxRefusal::StoreFailed,
                    })
                }
            }
        }
        .boxed()
    }

    /// Records the origin's answer, which has no body.
    pub(crate) fn record_answer_head(self: &Arc<Self>, client: HostKey, head: &CopyHead) {
        let asked = CopyRequest {
            url: head.url.clone(),
            headers: http::HeaderMap::new(),
        };
        let head = Box::new(head.entry(client, &asked, None));
        drop(self.set_stage(UploadStage::AnsweredHead(head)));
    }

    /// Records the origin's answer, whose body is a copy.
    pub(crate) fn record_answer_copy(self: &Arc<Self>, copy: &PinnedCopy) {
        let total = copy.body.extent().total;
        let entry = copy.head.entry(copy.body.client(), &copy.request, total);
        drop(self.copy_store.record_copy(copy.id, &entry));
        if let Some(note) = &self.shared {
            let (store, id) = (note.store.clone(), copy.id);
            tokio::spawn(async move {
                let note = RetentionNote::of_process(&store);
                if let Err(error) = note.write(&store, id).await {
                    tracing::warn!(%error, "the answer to an upload would be lost with this node");
                }
            });
        }
        drop(self.set_stage(UploadStage::AnsweredCopy(copy.id)));
    }

    /// Records that the upload is sent again when the device asks for it.
    pub(crate) fn record_held(self: &Arc<Self>) {
        drop(self.set_stage(UploadStage::Held));
    }

    /// Records until when the upload is kept without a flow; none: a flow uses it.
    pub(crate) fn record_until(self: &Arc<Self>, until: Option<SystemTime>) {
        self.record.lock().until_ms = until.map(wall_ms);
        drop(self.write());
    }
}
