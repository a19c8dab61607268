//! Copies and bodies of uploads that outlive the process: named files, and notes about them in the journal.
//!
//! ```text
//!  DIR/copies/<id>       the bytes, written in order
//!  journal  c<id>        whose, what was asked, what the origin said: once
//!           p<id>        how far the file is synced, and whether it is whole: now and then
//!           k<id><key>   until when this client may come back for the copy
//!           e<id>        how the shared cache may use the copy
//!           u<id>        the upload whose body it is, and what its origin may have received
//!           s            the settings under which the shared cache was filled
//! ```
//!
//! After a crash of the process only, the file's length is valid, because bytes are appended in
//! order. After a crash of the machine only synced bytes count.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use crate::copy_bucket::CopyBucket;
use crate::shared_copy_work::SharedCopyWork;
use bytes::Bytes;
use d2tp_driver::{HostKey, JournalBatch, JournalError, RecordStore, SharedRecords};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, oneshot};

/// The least bytes of a growing copy between two syncs. Without them only a crash of the machine, not one of the process,
/// has them fetched again.
pub(crate) const SYNC_EVERY_BYTES: u64 = 64 << 20; // a guess
/// The least time between two syncs of a growing copy, and from its beginning to the first: what is read as fast as it
/// arrives is gone again before the disk has seen it. Where nodes share copies there is none.
pub(crate) const SYNC_PAUSE: Duration = Duration::from_secs(5); // a guess
/// How long a complete copy waits for its sync, where nodes do not share it: one that was read is often gone by then.
pub(crate) const WHOLE_SYNC_DELAY: Duration = Duration::from_secs(1); // a guess
/// How long records are collected before they are written together.
const GATHER: Duration = Duration::from_millis(10); // a guess
/// How long to wait after a failed write of the journal.
pub(crate) const AGAIN_AFTER: Duration = Duration::from_secs(5); // a guess

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
    #[serde(default)]
    pub(crate) own_tag: Option<String>,
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
    /// Which file has the bytes, where a node took the copy over from another: a random number, 0 for the first.
    #[serde(default)]
    pub(crate) version: u64,
    /// The byte from which on the file was not synced yet, if it was not: in another boot of the machine no more counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unsynced_from: Option<u64>,
}

impl StoredProgress {
    /// Progress of a copy's first file, of which this boot of the machine has synced the first `synced` bytes. `whole`: they
    /// are all there are.
    pub(crate) fn synced_now(synced: u64, whole: bool) -> StoredProgress {
        StoredProgress {
            synced,
            whole,
            boot: d2tp_driver::boot(),
            version: 0,
            unsynced_from: None,
        }
    }

    /// What counts in this boot of the machine.
    pub(crate) fn as_of_boot(self, boot: u32) -> StoredProgress {
        match self.unsynced_from {
            Some(from) if boot == 0 || self.boot != boot => StoredProgress {
                synced: from,
                whole: false,
                unsynced_from: None,
                ..self
            },
            _ => self,
        }
    }
}

/// A function that takes the id of a copy of which a record says that it is whole.
struct WholeListener(Box<dyn Fn(u64) + Send + Sync>);

impl fmt::Debug for WholeListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WholeListener")
    }
}

/// The named files of copies, with their records in the journal.
#[derive(Debug)]
pub(crate) struct CopyStore {
    journal: Arc<dyn RecordStore>,
    /// The journal again, if other nodes share it.
    shared: Option<Arc<dyn SharedRecords>>,
    /// Files and progress of copies of this process that other nodes may take over.
    versions: Mutex<HashMap<u64, CopyVersion>>,
    /// What a shared store has yet to hear.
    pub(crate) shared_work: SharedCopyWork,
    copies: PathBuf,
    queue: Mutex<CopyStoreQueue>,
    news: Notify,
    /// Whether a copy is removed with its last handle, which it is not while the process ends.
    open: AtomicBool,
    /// The bucket that has the bytes too.
    bucket: OnceLock<Arc<CopyBucket>>,
    /// Called with the id of a copy when a record says that it is whole.
    whole_listener: OnceLock<WholeListener>,
}

/// Which file a shared copy has, and what its record says last.
#[derive(Clone, Copy, Debug, Default)]
struct CopyVersion {
    version: u64,
    recorded: Option<StoredProgress>,
}

#[derive(Debug, Default)]
struct CopyStoreQueue {
    batch: JournalBatch,
    waiting: Vec<oneshot::Sender<()>>,
}

/// What a note tells about a copy or an upload: the first byte of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyNote {
    /// A [`CopyRecord`] follows.
    Copy = b'c' as isize,
    /// A [`StoredProgress`] follows.
    Progress = b'p' as isize,
    /// A [`RetainedRecord`]; the client's key follows the id.
    Retained = b'k' as isize,
    /// How the shared cache may use a copy: a `CachedRecord`.
    Cached = b'e' as isize,
    /// An upload and what its origin may have received: an `UploadRecord`.
    Upload = b'u' as isize,
    /// Where nodes share a store: who retains a copy or an upload for a device that may return.
    Retention = b'o' as isize,
}

/// Every kind of note that names a copy or an upload.
const COPY_NOTES: [CopyNote; 5] = [
    CopyNote::Copy,
    CopyNote::Progress,
    CopyNote::Retained,
    CopyNote::Cached,
    CopyNote::Upload,
];

/// The name of the note with the settings under which the shared cache was filled.
const CACHE_SETTINGS: &[u8] = b"s";

/// A copy that waits for its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RetainedRecord {
    /// When the copy is dropped, in milliseconds since 1970.
    pub(crate) until_ms: u64,
}

/// The time by the machine's clock, in milliseconds since 1970.
pub(crate) fn wall_ms(at: SystemTime) -> u64 {
    let since = at
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn name(kind: CopyNote, id: u64) -> Vec<u8> {
    let mut name = vec![kind as u8];
    name.extend(id.to_be_bytes());
    name
}

fn retained_name(id: u64, client: &HostKey) -> Vec<u8> {
    [&name(CopyNote::Retained, id)[..], client].concat()
}

/// The id in a note's name.
fn id_of(name: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(name.get(1..9)?.try_into().ok()?))
}

impl CopyStore {
    /// Whether other nodes continue copies of this one.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.is_some() || self.bucket.get().is_some()
    }

    /// Opens the store; its writer task runs as long as the handle lives. Must be called on a runtime.
    pub(crate) fn open(dir: &Path, journal: Arc<dyn RecordStore>) -> io::Result<Arc<CopyStore>> {
        let copies = dir.join("copies");
        std::fs::create_dir_all(&copies)?;
        let copy_store = Arc::new(CopyStore {
            shared: journal.clone().as_shared(),
            journal,
            versions: Mutex::default(),
            shared_work: SharedCopyWork::default(),
            copies,
            queue: Mutex::default(),
            news: Notify::new(),
            open: AtomicBool::new(true),
            bucket: OnceLock::new(),
            whole_listener: OnceLock::new(),
        });
        tokio::spawn(keep(Arc::downgrade(&copy_store)));
        Ok(copy_store)
    }

    pub(crate) fn path(&self, id: u64) -> PathBuf {
        let version = self.versions.lock().get(&id).map_or(0, |v| v.version);
        self.path_of_version(id, version)
    }

    /// The path of a copy's file, after a node took it over with this version.
    pub(crate) fn path_of_version(&self, id: u64, version: u64) -> PathBuf {
        self.copies.join(match version {
            0 => format!("{id:016x}"),
            version => format!("{id:016x}-{version:016x}"),
        })
    }

    /// The shared store, if nodes share the copies.
    pub(crate) fn shared(&self) -> Option<&Arc<dyn SharedRecords>> {
        self.shared.as_ref()
    }

    /// A version that no other file has.
    pub(crate) fn new_version(&self) -> u64 {
        getrandom::u64().expect("the system has randomness").max(1)
    }

    /// Sets which file a shared copy has.
    pub(crate) fn set_version(&self, id: u64, version: u64) {
        self.versions.lock().entry(id).or_default().version = version;
    }

    /// Sets which file a shared copy has here, and what its record says.
    pub(crate) fn set_found_version(&self, id: u64, version: u64, found: StoredProgress) {
        let recorded = Some(found).filter(|found| *found != StoredProgress::default());
        let found = CopyVersion { version, recorded };
        self.versions.lock().insert(id, found);
    }

    /// Which file a copy has here: 0 but where nodes take copies over from each other.
    pub(crate) fn version(&self, id: u64) -> u64 {
        self.versions.lock().get(&id).map_or(0, |v| v.version)
    }

    /// The bucket that has the bytes of copies, where nodes share it.
    pub(crate) fn node_bucket(&self) -> Option<&Arc<CopyBucket>> {
        self.shared.as_ref().and(self.bucket())
    }

    /// Makes a copy this node's own before its origin is asked for more. Returns whether it is: another node may have
    /// taken the copy over since it was found.
    pub(crate) async fn claim_copy(&self, id: u64) -> Result<bool, JournalError> {
        let Some(shared) = &self.shared else {
            return Ok(true);
        };
        let known = self.versions.lock().get(&id).copied().unwrap_or_default();
        let recorded = known.recorded.unwrap_or_default();
        if recorded.version == known.version {
            return Ok(true);
        }
        let claimed = StoredProgress {
            version: known.version,
            ..StoredProgress::synced_now(0, false)
        };
        self.replace_progress(shared, id, known.recorded, claimed)
            .await
    }

    /// Replaces the progress of a shared copy if nobody else did. Returns whether it did.
    pub(crate) async fn replace_progress(
        &self,
        shared: &Arc<dyn SharedRecords>,
        id: u64,
        expected: Option<StoredProgress>,
        progress: StoredProgress,
    ) -> Result<bool, JournalError> {
        let json = |progress| serde_json::to_vec(&progress).expect("numbers");
        let expected = expected.filter(|e| *e != StoredProgress::default());
        let (expected, value) = (expected.map(json), json(progress));
        let name = name(CopyNote::Progress, id);
        let replaced = shared.exchange_note(&name, expected.as_deref(), Some(&value));
        let replaced = replaced.await?;
        if replaced {
            self.versions.lock().entry(id).or_default().recorded = Some(progress);
        }
        Ok(replaced)
    }

    /// Records how far a copy of this process is. Returns whether it is this process's copy still.
    pub(crate) async fn exchange_progress(
        &self,
        shared: &Arc<dyn SharedRecords>,
        id: u64,
        mut progress: StoredProgress,
    ) -> Result<bool, JournalError> {
        let known = self.versions.lock().get(&id).copied().unwrap_or_default();
        progress.version = known.version;
        // Progress that was recorded in another order says nothing new.
        let is_news = known
            .recorded
            .is_none_or(|r| progress.synced > r.synced || progress.whole && !r.whole);
        match is_news {
            true => {
                self.replace_progress(shared, id, known.recorded, progress)
                    .await
            }
            false => Ok(true),
        }
    }

    /// Forgets which file a shared copy has, once this process has nothing more to say of it.
    pub(crate) fn forget_version(&self, id: u64) {
        self.versions.lock().remove(&id);
    }

    /// Whether another node has taken over a copy of this process. Without an answer of the store what runs goes on.
    pub(crate) async fn is_taken_over(&self, id: u64) -> bool {
        let Some(shared) = &self.shared else {
            return false;
        };
        let ours = self.versions.lock().get(&id).map_or(0, |v| v.version);
        let Ok(note) = shared.read_note(&name(CopyNote::Progress, id)).await else {
            return false;
        };
        let told: Option<StoredProgress> = note.and_then(|json| serde_json::from_slice(&json).ok());
        told.is_some_and(|told| told.version != ours)
    }

    /// The record of a shared copy.
    pub(crate) async fn shared_record(
        &self,
        shared: &Arc<dyn SharedRecords>,
        id: u64,
    ) -> Result<Option<(CopyRecord, StoredProgress)>, JournalError> {
        let Some(entry) = shared.read_note(&name(CopyNote::Copy, id)).await? else {
            return Ok(None);
        };
        let progress = self.shared_progress(shared, id).await?;
        let entry = serde_json::from_slice(&entry).ok();
        Ok(entry.map(|entry| (entry, progress)))
    }

    /// Removes a shared copy that nobody needs. Blocks.
    pub(crate) fn remove_shared(&self, id: u64) {
        let version = self.progress(id).version;
        for version in [0, version] {
            let _ = std::fs::remove_file(self.path_of_version(id, version));
        }
        self.versions.lock().remove(&id);
        if let Some(bucket) = self.bucket() {
            bucket.on_removal(id);
        }
        self.note(name(CopyNote::Copy, id), None, None);
        self.note(name(CopyNote::Progress, id), None, None);
    }

    /// The progress of a shared copy or upload.
    pub(crate) async fn shared_progress(
        &self,
        shared: &Arc<dyn SharedRecords>,
        id: u64,
    ) -> Result<StoredProgress, JournalError> {
        let progress = shared.read_note(&name(CopyNote::Progress, id)).await?;
        let progress = progress.and_then(|json| serde_json::from_slice(&json).ok());
        Ok(progress.unwrap_or_default())
    }

    /// Creates the file of a copy, which only its owner can read: bodies may be private.
    pub(crate) fn create(&self, id: u64) -> io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        options.open(self.path(id))
    }

    /// Makes the empty file with this version of a copy.
    pub(crate) fn create_version(&self, id: u64, version: u64) -> io::Result<()> {
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        let path = self.path_of_version(id, version);
        options.open(path).map(drop)
    }

    pub(crate) fn reopen(&self, id: u64) -> io::Result<File> {
        File::options().read(true).write(true).open(self.path(id))
    }

    pub(crate) fn note(
        &self,
        name: Vec<u8>,
        value: Option<Bytes>,
        written: impl IntoIterator<Item = oneshot::Sender<()>>,
    ) {
        let mut queue = self.queue.lock();
        queue.batch.notes.insert(name, value);
        queue.waiting.extend(written);
        drop(queue);
        self.news.notify_one();
    }

    /// Writes a note; ready when it is durable.
    pub(crate) fn write_note(
        &self,
        kind: CopyNote,
        id: u64,
        note: &impl Serialize,
    ) -> oneshot::Receiver<()> {
        self.write_named(name(kind, id), note)
    }

    fn write_named(&self, name: Vec<u8>, note: &impl Serialize) -> oneshot::Receiver<()> {
        let (written, on_written) = oneshot::channel();
        // What a node keeps for itself does not belong into a store that others share.
        if self.shared.is_some() {
            let _ = written.send(());
            return on_written;
        }
        let json = serde_json::to_vec(note).expect("text and numbers");
        self.note(name, Some(json.into()), Some(written));
        on_written
    }

    /// Removes a note; ready when that is durable. Also while the process ends: what is removed from the cache then is
    /// not the next process's either.
    pub(crate) fn remove_note(&self, kind: CopyNote, id: u64) -> oneshot::Receiver<()> {
        let (written, on_written) = oneshot::channel();
        if self.shared.is_some() {
            let _ = written.send(());
        } else {
            self.note(name(kind, id), None, Some(written));
        }
        on_written
    }

    /// Reads all notes of a kind. One that does not make sense is left out.
    pub(crate) fn notes<T: DeserializeOwned>(
        &self,
        kind: CopyNote,
    ) -> Result<Vec<(u64, T)>, JournalError> {
        let mut found = Vec::new();
        self.each_note(kind, |name, value| {
            let id = id_of(name).filter(|_| name.len() == 9);
            let note = serde_json::from_slice(value).ok();
            found.extend(id.zip(note));
        })?;
        Ok(found)
    }

    /// Records a new copy; ready when the record is durable.
    pub(crate) fn record_copy(
        self: &Arc<Self>,
        id: u64,
        entry: &CopyRecord,
    ) -> oneshot::Receiver<()> {
        let (written, on_written) = oneshot::channel();
        let json = Bytes::from(serde_json::to_vec(entry).expect("text and numbers"));
        match self.shared {
            Some(_) => self.record_shared(id, json, written),
            None => self.note(name(CopyNote::Copy, id), Some(json), Some(written)),
        }
        on_written
    }

    /// Records how far a copy's file is synced; ready when that is durable.
    pub(crate) fn record_progress(
        self: &Arc<Self>,
        id: u64,
        progress: StoredProgress,
    ) -> oneshot::Receiver<()> {
        let (written, on_written) = oneshot::channel();
        if self.shared.is_some() {
            self.end_shared_sync(id, Some(progress), Some(written));
            return on_written;
        }
        let json = serde_json::to_vec(&progress).expect("numbers");
        self.note(
            name(CopyNote::Progress, id),
            Some(json.into()),
            Some(written),
        );
        on_written
    }

    /// Passes every note of a kind to `f`. In a shared store a node looks up those that it needs.
    fn each_note(&self, kind: CopyNote, f: impl FnMut(&[u8], &[u8])) -> Result<(), JournalError> {
        match self.journal.as_journal() {
            Some(journal) => journal.notes(&[kind as u8], f),
            None => Ok(()),
        }
    }

    /// Records that a copy waits for a client.
    pub(crate) fn record_retained(&self, id: u64, client: &HostKey, record: RetainedRecord) {
        drop(self.write_named(retained_name(id, client), &record));
    }

    /// Records that a copy no longer waits for a client. While the process ends it goes on waiting, for the next one.
    pub(crate) fn remove_retained(&self, id: u64, client: &HostKey) {
        if self.shared.is_none() && self.is_open() {
            self.note(retained_name(id, client), None, None);
        }
    }

    /// All copies that wait for clients.
    pub(crate) fn retained(&self) -> Result<Vec<(u64, HostKey, RetainedRecord)>, JournalError> {
        let mut found = Vec::new();
        self.each_note(CopyNote::Retained, |name, value| {
            let client = name.get(9..).and_then(|key| HostKey::try_from(key).ok());
            let record = serde_json::from_slice(value).ok();
            if let (Some(id), Some(client), Some(record)) = (id_of(name), client, record) {
                found.push((id, client, record));
            }
        })?;
        Ok(found)
    }

    /// Records the settings under which the shared cache is filled from now on.
    pub(crate) fn record_cache_settings(&self, settings: &serde_json::Value) {
        drop(self.write_named(CACHE_SETTINGS.to_vec(), settings));
    }

    /// The settings under which the shared cache was filled.
    pub(crate) fn cache_settings(&self) -> Result<Option<serde_json::Value>, JournalError> {
        let note = self.journal.note(CACHE_SETTINGS)?;
        Ok(note.and_then(|json| serde_json::from_slice(&json).ok()))
    }

    fn put_back(&self, batch: JournalBatch, waiting: Vec<oneshot::Sender<()>>) {
        let mut queue = self.queue.lock();
        queue.batch.merge_older(batch);
        queue.waiting.extend(waiting);
    }

    /// Sets the bucket that has the bytes too. What it is to have waits until its work begins.
    pub(crate) fn use_bucket(&self, bucket: CopyBucket) {
        let _ = self.bucket.set(Arc::new(bucket));
    }

    /// Sets the function that is called with the id of a copy when a record says that it is whole.
    pub(crate) fn set_whole_listener(&self, listener: impl Fn(u64) + Send + Sync + 'static) {
        let _ = self.whole_listener.set(WholeListener(Box::new(listener)));
    }

    /// Handles a record that says that a copy is whole.
    pub(crate) fn on_whole(&self, id: u64) {
        if let Some(WholeListener(listener)) = self.whole_listener.get() {
            listener(id);
        }
    }

    /// The bucket that has the bytes too.
    pub(crate) fn bucket(&self) -> Option<&Arc<CopyBucket>> {
        self.bucket.get()
    }

    /// Whether there is a copy or an upload with this id, or the journal cannot tell.
    pub(crate) fn has_note(&self, id: u64) -> bool {
        let kinds = [CopyNote::Copy, CopyNote::Upload, CopyNote::Retention];
        let known_kinds = match self.shared {
            Some(_) => &kinds[..],
            None => &kinds[..2],
        };
        known_kinds
            .iter()
            .any(|kind| !matches!(self.journal.note(&name(*kind, id)), Ok(None)))
    }

    /// Whether there is a copy or an upload with this id, or the store cannot tell. Does not block the task.
    pub(crate) async fn has_note_soon(self: &Arc<Self>, id: u64) -> bool {
        let copy_store = self.clone();
        let looking = tokio::task::spawn_blocking(move || copy_store.has_note(id));
        looking.await.unwrap_or(true)
    }

    /// The files of copies here, with their versions.
    pub(crate) fn files(&self) -> Vec<(u64, u64)> {
        let entries = std::fs::read_dir(&self.copies).into_iter().flatten();
        let names = entries.flatten().map(|entry| entry.file_name());
        let read = |text: &str| u64::from_str_radix(text, 16).ok();
        let files = names.filter_map(|name| {
            let name = name.to_str()?;
            let (id, version) = name.split_once('-').unwrap_or((name, "0"));
            Some((read(id)?, read(version)?))
        });
        files.collect()
    }

    /// The copies and uploads that have a note and no file here.
    pub(crate) fn without_file(&self) -> Result<Vec<u64>, JournalError> {
        let mut missing = Vec::new();
        for kind in [CopyNote::Copy, CopyNote::Upload] {
            self.each_note(kind, |name, _| {
                missing.extend(id_of(name).filter(|id| !self.path(*id).exists()));
            })?;
        }
        Ok(missing)
    }

    /// Removes the file of a copy or an upload, and what is known of it.
    pub(crate) fn remove(self: &Arc<Self>, id: u64) {
        if !self.is_open() {
            return;
        }
        if self.shared.is_some() {
            // Others may need it: the store tells who removes it.
            return self.let_go_shared(id);
        }
        if let Some(bucket) = self.bucket() {
            bucket.on_removal(id);
        }
        if let Err(error) = std::fs::remove_file(self.path(id))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "cannot remove the file of a copy");
        }
        // Who retains a copy removes that note when it lets go.
        for kind in COPY_NOTES {
            if kind != CopyNote::Retained {
                self.note(name(kind, id), None, None);
            }
        }
    }

    /// Keeps everything as it is from now on, for the next process.
    pub(crate) fn close(&self) {
        self.open.store(false, Ordering::Release);
    }

    /// Writes all pending records.
    pub(crate) async fn flush(&self) -> Result<(), JournalError> {
        let CopyStoreQueue { batch, waiting } = std::mem::take(&mut *self.queue.lock());
        let journal = self.journal.clone();
        let work = move || {
            let written = journal.commit(&batch);
            (batch, written)
        };
        match tokio::task::spawn_blocking(work).await {
            Ok((_, Ok(_))) => {
                for written in waiting {
                    let _ = written.send(());
                }
                Ok(())
            }
            Ok((batch, Err(error))) => {
                self.put_back(batch, waiting);
                Err(error)
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
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
        let entry = serde_json::from_slice(&read(CopyNote::Copy)?).ok()?;
        let progress = read(CopyNote::Progress).and_then(|json| serde_json::from_slice(&json).ok());
        let progress: StoredProgress = progress.unwrap_or_default();
        Some((entry, progress.as_of_boot(d2tp_driver::boot())))
    }

    /// Bytes of a complete copy in the store, at most `max`.
    pub(crate) fn peek(&self, id: u64, at: u64, max: usize) -> Option<Bytes> {
        // The caller must not wait for a store elsewhere.
        self.journal.as_journal()?;
        let (_, progress) = self.record(id)?;
        let len = progress.synced.checked_sub(at)?.min(max as u64) as usize;
        let mut bytes = vec![0; if progress.whole { len } else { 0 }];
        let file = File::open(self.path(id)).ok()?;
        file.read_exact_at(&mut bytes, at).ok()?;
        Some(bytes.into())
    }

    /// How far the file of an upload is synced.
    pub(crate) fn progress(&self, id: u64) -> StoredProgress {
        let note = self.journal.note(&name(CopyNote::Progress, id)).ok();
        let progress = note.flatten().map(|json| serde_json::from_slice(&json));
        let progress: StoredProgress = progress.and_then(Result::ok).unwrap_or_default();
        progress.as_of_boot(d2tp_driver::boot())
    }

    /// The bytes of a file that count: all of them in the boot of the machine in which they were written, else those
    /// that were synced. None if there is no file.
    pub(crate) fn valid_bytes(
        &self,
        id: u64,
        created_in: u32,
        progress: StoredProgress,
    ) -> Option<u64> {
        let length = std::fs::metadata(self.path(id)).ok()?.len();
        let boot = d2tp_driver::boot();
        let is_same_boot = boot != 0 && (created_in == boot || progress.boot == boot);
        Some(match is_same_boot {
            true => length,
            false => progress.synced.min(length),
        })
    }

    /// Removes every copy and upload that is not `wanted`.
    pub(crate) fn retain_only(&self, wanted: impl Fn(u64) -> bool) -> Result<(), JournalError> {
        let mut over = Vec::new();
        for kind in COPY_NOTES {
            self.each_note(kind, |name, _| {
                if !id_of(name).is_some_and(&wanted) {
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
            Ok((_, Ok(_))) => {
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
