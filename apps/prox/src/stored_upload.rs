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

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use d2tp_driver::HostKey;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::Method;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::copy_store::{self, CopyNote, CopyRecord, CopyStore, HeaderFields, wall_ms};
use crate::pinned_copy::{CopyHead, CopyRequest, PinnedCopy};
use crate::refusal::ProxRefusal;
use crate::request::{UploadRequest, UploadToken};

/// How long a delivery waits until the journal knows of it. Then the device is told that the state directory cannot be
/// written. A guess: the journal is tried again every 5 s.
const RECORDED_WITHIN: Duration = Duration::from_secs(20);

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
}

/// An upload in the copy store.
#[derive(Debug)]
pub(crate) struct StoredUpload {
    copy_store: Arc<CopyStore>,
    id: u64,
    record: Mutex<UploadRecord>,
}

impl UploadRecord {
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
        let record = UploadRecord {
            client,
            token: request.token.as_ref()?.as_str().to_owned(),
            method: request.method.as_str().to_owned(),
            url: request.url.to_string(),
            headers: copy_store::fields(&request.headers),
            length: request.length,
            stage: UploadStage::Receiving,
            until_ms: None,
            boot: d2tp_driver::boot(),
        };
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
        })
    }

    fn write(&self) -> oneshot::Receiver<()> {
        let record = self.record.lock();
        (self.copy_store).write_note(CopyNote::Upload, self.id, &*record)
    }

    fn set_stage(&self, stage: UploadStage) -> oneshot::Receiver<()> {
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
                    Err(ProxRefusal::StoreFailed)
                }
            }
        }
        .boxed()
    }

    /// Records the origin's answer, which has no body.
    pub(crate) fn record_answer_head(&self, client: HostKey, head: &CopyHead) {
        let asked = CopyRequest {
            url: head.url.clone(),
            headers: http::HeaderMap::new(),
        };
        let head = Box::new(head.entry(client, &asked, None));
        drop(self.set_stage(UploadStage::AnsweredHead(head)));
    }

    /// Records the origin's answer, whose body is a copy.
    pub(crate) fn record_answer_copy(&self, copy: &PinnedCopy) {
        let total = copy.body.extent().total;
        let entry = copy.head.entry(copy.body.client(), &copy.request, total);
        drop(self.copy_store.record_copy(copy.id, &entry));
        drop(self.set_stage(UploadStage::AnsweredCopy(copy.id)));
    }

    /// Records that the upload is sent again when the device asks for it.
    pub(crate) fn record_held(&self) {
        drop(self.set_stage(UploadStage::Held));
    }

    /// Records until when the upload is kept without a flow; none: a flow uses it.
    pub(crate) fn record_until(&self, until: Option<SystemTime>) {
        self.record.lock().until_ms = until.map(wall_ms);
        drop(self.write());
    }
}
