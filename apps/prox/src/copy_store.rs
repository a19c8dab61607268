//! Copies that outlive the process: named files, and notes about them in the journal.
//!
//! ```text
//!  DIR/copies/<id>    the bytes, written in order
//!  journal  c<id>     whose, what was asked, what the origin said: once
//!           p<id>     how far the file is synced, and whether it is whole: now and then
//! ```
//!
//! After a crash of the process alone the file itself tells how far it came: bytes were appended in
//! order. After a crash of the machine only what was synced counts.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{HostKey, Journal, JournalBatch, JournalError};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, oneshot};

/// Bytes of a growing copy between two syncs, which a crash of the machine may cost to fetch again.
pub(crate) const SYNC_EVERY_BYTES: u64 = 64 << 20; // a guess
/// How long records are collected before they are written together.
const GATHER: Duration = Duration::from_millis(10); // a guess
/// How long to wait after a failed write of the journal.
const AGAIN_AFTER: Duration = Duration::from_secs(5); // a guess

/// Headers as text: one character for each byte.
pub(crate) type HeaderFields = Vec<(String, String)>;

/// The constant part of a copy's record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CopyRecord {
    pub(crate) client: HostKey,
    /// The URL and the header fields of the device's request.
    pub(crate) asked_url: String,
    pub(crate) asked_headers: HeaderFields,
    pub(crate) status: u16,
    pub(crate) http2: bool,
    pub(crate) headers: HeaderFields,
    pub(crate) url: String,
    pub(crate) redirected: bool,
    pub(crate) origin_validator: Option<String>,
    pub(crate) selected_by: Vec<(String, Vec<String>)>,
    pub(crate) total: Option<u64>,
    /// The boot of the machine in which the copy's file was created.
    pub(crate) boot: u32,
}

/// The progress part of a copy's record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredProgress {
    pub(crate) synced: u64,
    pub(crate) whole: bool,
    /// The boot of the machine in which the file was written.
    pub(crate) boot: u32,
}

/// The named files of copies, with their records in the journal.
#[derive(Debug)]
pub(crate) struct CopyStore {
    journal: Arc<Journal>,
    copies: PathBuf,
    queue: Mutex<CopyStoreQueue>,
    news: Notify,
    /// Whether a copy is removed with its last handle, which it is not while the process ends.
    open: AtomicBool,
}

#[derive(Debug, Default)]
struct CopyStoreQueue {
    batch: JournalBatch,
    waiting: Vec<oneshot::Sender<()>>,
}

fn name(kind: u8, id: u64) -> Vec<u8> {
    let mut name = vec![kind];
    name.extend(id.to_be_bytes());
    name
}

impl CopyStore {
    /// Opens the store; its writer task runs as long as the handle lives. Must be called on a runtime.
    pub(crate) fn open(dir: &Path, journal: Arc<Journal>) -> io::Result<Arc<CopyStore>> {
        let copies = dir.join("copies");
        std::fs::create_dir_all(&copies)?;
        let copy_store = Arc::new(CopyStore {
            journal,
            copies,
            queue: Mutex::default(),
            news: Notify::new(),
            open: AtomicBool::new(true),
        });
        tokio::spawn(keep(Arc::downgrade(&copy_store)));
        Ok(copy_store)
    }

    pub(crate) fn path(&self, id: u64) -> PathBuf {
        self.copies.join(format!("{id:016x}"))
    }

    /// Creates the file of a copy, which only its owner can read: bodies may be private.
    pub(crate) fn create(&self, id: u64) -> io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        options.open(self.path(id))
    }

    pub(crate) fn reopen(&self, id: u64) -> io::Result<File> {
        File::options().read(true).write(true).open(self.path(id))
    }

    fn note(&self, name: Vec<u8>, value: Option<Bytes>, written: Option<oneshot::Sender<()>>) {
        let mut queue = self.queue.lock();
        queue.batch.notes.insert(name, value);
        queue.waiting.extend(written);
        drop(queue);
        self.news.notify_one();
    }

    /// Records a new copy; ready when the record is durable.
    pub(crate) fn record_copy(&self, id: u64, entry: &CopyRecord) -> oneshot::Receiver<()> {
        let (written, on_written) = oneshot::channel();
        let json = serde_json::to_vec(entry).expect("text and numbers");
        self.note(name(b'c', id), Some(json.into()), Some(written));
        on_written
    }

    /// Records how far a copy's file is synced; ready when that is durable.
    pub(crate) fn record_progress(
        &self,
        id: u64,
        progress: StoredProgress,
    ) -> oneshot::Receiver<()> {
        let (written, on_written) = oneshot::channel();
        let json = serde_json::to_vec(&progress).expect("numbers");
        self.note(name(b'p', id), Some(json.into()), Some(written));
        on_written
    }

    fn put_back(&self, batch: JournalBatch, waiting: Vec<oneshot::Sender<()>>) {
        let mut queue = self.queue.lock();
        queue.batch.merge_older(batch);
        queue.waiting.extend(waiting);
    }

    /// Removes a copy.
    pub(crate) fn remove(&self, id: u64) {
        if !self.is_open() {
            return;
        }
        if let Err(error) = std::fs::remove_file(self.path(id)) {
            tracing::warn!(%error, "cannot remove the file of a copy");
        }
        self.note(name(b'c', id), None, None);
        self.note(name(b'p', id), None, None);
    }

    /// Keeps everything as it is from now on, for the next process.
    pub(crate) fn close(&self) {
        self.open.store(false, Ordering::Release);
    }

    /// Writes all pending records.
    pub(crate) async fn flush(&self) -> Result<(), JournalError> {
        let CopyStoreQueue { batch, .. } = std::mem::take(&mut *self.queue.lock());
        let journal = self.journal.clone();
        let written = tokio::task::spawn_blocking(move || journal.commit(&batch)).await;
        written.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// The record of a copy.
    pub(crate) fn record(&self, id: u64) -> Option<(CopyRecord, StoredProgress)> {
        let read = |kind| {
            let note = self.journal.note(&name(kind, id));
            note.inspect_err(|error| tracing::error!(%error, "a copy is lost"))
                .ok()?
        };
        let entry = serde_json::from_slice(&read(b'c')?).ok()?;
        let progress = read(b'p').and_then(|json| serde_json::from_slice(&json).ok());
        Some((entry, progress.unwrap_or_default()))
    }

    /// Bytes of a complete copy in the store, at most `max`.
    pub(crate) fn peek(&self, id: u64, at: u64, max: usize) -> Option<Bytes> {
        let (_, progress) = self.record(id)?;
        let len = progress.synced.checked_sub(at)?.min(max as u64) as usize;
        let mut bytes = vec![0; if progress.whole { len } else { 0 }];
        let file = File::open(self.path(id)).ok()?;
        file.read_exact_at(&mut bytes, at).ok()?;
        Some(bytes.into())
    }

    /// Removes every copy that is not `wanted`.
    pub(crate) fn retain_only(&self, wanted: impl Fn(u64) -> bool) -> Result<(), JournalError> {
        let mut over = Vec::new();
        for kind in [b'c', b'p'] {
            self.journal.notes(&[kind], |name, _| {
                let id = name[1..].try_into().map(u64::from_be_bytes);
                if !id.is_ok_and(&wanted) {
                    over.push(name.to_vec());
                }
            })?;
        }
        for name in over {
            self.note(name, None, None);
        }
        for entry in std::fs::read_dir(&self.copies)
            .into_iter()
            .flatten()
            .flatten()
        {
            let file = entry.file_name();
            let id = file.to_str().and_then(|n| u64::from_str_radix(n, 16).ok());
            if !id.is_some_and(&wanted) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
        Ok(())
    }
}

/// Writes records to the journal.
async fn keep(copy_store: std::sync::Weak<CopyStore>) {
    loop {
        let Some(strong) = copy_store.upgrade() else {
            return;
        };
        let woken = tokio::time::timeout(AGAIN_AFTER, strong.news.notified()).await;
        if woken.is_ok() {
            tokio::time::sleep(GATHER).await;
        }
        let CopyStoreQueue { batch, waiting } = std::mem::take(&mut *strong.queue.lock());
        if batch.is_empty() {
            continue;
        }
        let journal = strong.journal.clone();
        let work = move || {
            let written = journal.commit(&batch);
            (batch, written)
        };
        match tokio::task::spawn_blocking(work).await {
            Ok((_, Ok(()))) => {
                for written in waiting {
                    let _ = written.send(());
                }
            }
            Ok((batch, Err(error))) => {
                tracing::error!(%error, "copies would be lost in a crash now");
                strong.put_back(batch, waiting);
                tokio::time::sleep(AGAIN_AFTER).await;
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
}

pub(crate) fn text(value: &HeaderValue) -> String {
    value.as_bytes().iter().map(|b| char::from(*b)).collect()
}

pub(crate) fn value(text: &str) -> Option<HeaderValue> {
    let bytes: Result<Vec<u8>, _> = text.chars().map(u8::try_from).collect();
    HeaderValue::from_bytes(&bytes.ok()?).ok()
}

pub(crate) fn fields(headers: &HeaderMap) -> HeaderFields {
    let all = headers.iter();
    all.map(|(n, v)| (n.as_str().to_owned(), text(v))).collect()
}

pub(crate) fn headers(fields: &HeaderFields) -> Option<HeaderMap> {
    let mut map = HeaderMap::new();
    for (name, text) in fields {
        let name: HeaderName = name.parse().ok()?;
        map.append(name, value(text)?);
    }
    Some(map)
}
