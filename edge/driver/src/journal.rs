//! The journal: one file for all that must survive the process: sessions, their flows, and notes of
//! the application.
//!
//! ```text
//!  changes ─▶ JournalBatch (newest value of each key) ─▶ commit: one transaction, one sync ──▶ FILE
//!                     ▲                                  │ any error: the file is not trusted any more
//!                     └────────── put back ◀─────────────┘ the next commit copies the valid content to a new file
//! ```
//!
//! `redb` stores the file: copy-on-write pages, two commit slots, checksums over all pages, a lock.
//! Each value has an additional checksum over table, key and value, since the store verifies its
//! pages only when it repairs. A damaged file is refused when it is opened, with an error that
//! names it and says what to do, so either all committed data is used or none.
//!
//! After an I/O error nothing is assumed about the file, and its sync is never repeated. The last
//! commit, as far as it can be read, is copied to a new file, which is synced and renamed to the
//! old one.

mod batch;
mod error;
mod format;
mod staged_file;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use d2tp_session::FlowId;
use parking_lot::Mutex;
use redb::backends::FileBackend;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

pub use batch::{JournalBatch, JournalFlowKey, JournalSessionKey, StoredRecord};
pub use error::JournalError;
use format::{seal, unseal};
use staged_file::StagedFile;

/// The memory that the store may use to cache pages, beside the system's page cache.
const CACHE_BYTES: usize = 4 << 20;

type JournalTable = TableDefinition<'static, &'static [u8], &'static [u8]>;
const SESSIONS: JournalTable = TableDefinition::new("sessions");
const FLOWS: JournalTable = TableDefinition::new("flows");
const NOTES: JournalTable = TableDefinition::new("notes");
const TABLES: [(u8, JournalTable); 3] = [(1, SESSIONS), (2, FLOWS), (3, NOTES)];

/// An open journal. Its file is locked against every other process.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    store: Mutex<Option<Database>>,
}

impl Journal {
    /// Opens a journal, or creates an empty one if there is none.
    ///
    /// # Errors
    /// Another process has it open, the disk failed, or the file is damaged. A damaged file is not
    /// changed.
    pub fn open(path: &Path) -> Result<Journal, JournalError> {
        let fault = |cause| JournalError::new(path, cause);
        if !path.exists() {
            // It is created under another name, so that a file of this name was complete at some
            // time.
            create(path, &BTreeMap::new()).map_err(fault)?;
        }
        let store = open_whole(path).map_err(fault)?;
        Ok(Journal {
            path: path.to_owned(),
            store: Mutex::new(Some(store)),
        })
    }

    /// The path of the journal's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a batch permanent, completely or not at all. Blocks until it is on disk.
    ///
    /// # Errors
    /// The disk failed. Earlier commits remain valid, and the batch may be committed again.
    pub fn commit(&self, batch: &JournalBatch) -> Result<(), JournalError> {
        let mut store = self.store.lock();
        let committed = self
            .usable_store(&mut store)
            .and_then(|db| write(db, batch));
        committed.map_err(|cause| {
            *store = None;
            JournalError::new(&self.path, cause)
        })
    }

    /// The store; after a fault, a new one with the content of the old one.
    fn usable_store<'a>(
        &self,
        store: &'a mut Option<Database>,
    ) -> Result<&'a Database, error::JournalErrorKind> {
        match store {
            Some(db) => Ok(db),
            None => {
                let old = open_whole(&self.path)?;
                let held = everything(&old)?;
                create(&self.path, &held)?;
                // Only now, because no other process may take the old file before the new one has
                // its name.
                drop(old);
                Ok(store.insert(open_whole(&self.path)?))
            }
        }
    }

    fn read<R>(
        &self,
        f: impl FnOnce(&Database) -> Result<R, error::JournalErrorKind>,
    ) -> Result<R, JournalError> {
        let mut store = self.store.lock();
        let read = self.usable_store(&mut store).and_then(f);
        read.map_err(|cause| JournalError::new(&self.path, cause))
    }

    /// Passes every session to `f`.
    ///
    /// # Errors
    /// The disk failed, or a record is damaged.
    pub fn sessions(
        &self,
        mut f: impl FnMut(JournalSessionKey, StoredRecord),
    ) -> Result<(), JournalError> {
        self.read(|db| {
            each(db, 0, |key, value| {
                let key = JournalSessionKey::read(key)
                    .ok_or(error::JournalErrorKind::Damaged("session key"))?;
                f(key, stored(value)?);
                Ok(())
            })
        })
    }

    /// A session with those of its flows that have a memo; `None` if it is not in the journal.
    ///
    /// # Errors
    /// The same as those of [`Journal::sessions`].
    pub fn session(&self, key: JournalSessionKey) -> Result<Option<JournalSession>, JournalError> {
        self.read(|db| {
            let Some(value) = one(db, 0, &key.bytes())? else {
                return Ok(None);
            };
            let mut flows = Vec::new();
            let notes = (
                Bound::Included(JournalFlowKey::first_of(key)),
                Bound::Included(JournalFlowKey::last_of(key)),
            );
            read_range(db, 1, notes, |found, _| {
                flows.push(flow_key(found)?.flow);
                Ok(true)
            })?;
            Ok(Some(JournalSession {
                key,
                stored: stored(&value)?,
                flows,
            }))
        })
    }

    /// The next sessions after `after`, or the first ones, at most `most`; with the memos of flows
    /// between them that have no session.
    ///
    /// # Errors
    /// The same as those of [`Journal::sessions`].
    pub fn page(
        &self,
        after: Option<JournalSessionKey>,
        most: usize,
    ) -> Result<JournalPage, JournalError> {
        self.read(|db| {
            let mut part = JournalPage::default();
            let from = after.map_or(Bound::Unbounded, |key| {
                Bound::Excluded(key.bytes().to_vec())
            });
            read_range(db, 0, (from, Bound::Unbounded), |key, value| {
                let key = JournalSessionKey::read(key)
                    .ok_or(error::JournalErrorKind::Damaged("session key"))?;
                let (stored, flows) = (stored(value)?, Vec::new());
                part.sessions.push(JournalSession { key, stored, flows });
                Ok(part.sessions.len() < most)
            })?;
            part.is_last = part.sessions.len() < most;
            // Both tables are sorted by session, so they are walked in parallel to match memos with
            // sessions.
            let from = after.map_or(Bound::Unbounded, |key| {
                Bound::Excluded(JournalFlowKey::last_of(key))
            });
            let to = match part.sessions.last().filter(|_| !part.is_last) {
                Some(last) => Bound::Included(JournalFlowKey::last_of(last.key)),
                None => Bound::Unbounded,
            };
            let mut sessions = part.sessions.iter_mut().peekable();
            read_range(db, 1, (from, to), |found, _| {
                let found = flow_key(found)?;
                while sessions.next_if(|s| s.key < found.session).is_some() {}
                match sessions.peek_mut().filter(|s| s.key == found.session) {
                    Some(kept) => kept.flows.push(found.flow),
                    None => part.orphan_memos.push(found),
                }
                Ok(true)
            })?;
            Ok(part)
        })
    }

    /// Passes every flow's memo to `f`, those of one session in sequence.
    ///
    /// # Errors
    /// The same as those of [`Journal::sessions`].
    pub fn memos(&self, mut f: impl FnMut(JournalFlowKey, &[u8])) -> Result<(), JournalError> {
        self.read(|db| {
            each(db, 1, |key, value| {
                f(flow_key(key)?, value);
                Ok(())
            })
        })
    }

    /// The memo of one flow.
    ///
    /// # Errors
    /// The same as those of [`Journal::sessions`].
    pub fn memo(&self, key: JournalFlowKey) -> Result<Option<Vec<u8>>, JournalError> {
        self.read(|db| one(db, 1, &key.bytes()))
    }

    /// Passes every note of the application whose name begins with `prefix` to `f`.
    ///
    /// # Errors
    /// The same as those of [`Journal::sessions`].
    pub fn notes(
        &self,
        prefix: &[u8],
        mut f: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), JournalError> {
        self.read(|db| {
            each(db, 2, |key, value| {
                if key.starts_with(prefix) {
                    f(key, value);
                }
                Ok(())
            })
        })
    }

    /// Replaces a note if it still has the value `expected`; `None` stands for no note. Returns whether it did.
    ///
    /// # Errors
    /// Those of [`Journal::note`] and [`Journal::commit`].
    pub fn replace_note(
        &self,
        name: &[u8],
        expected: Option<&[u8]>,
        value: Option<&[u8]>,
    ) -> Result<bool, JournalError> {
        let mut store = self.store.lock();
        let replaced = self.usable_store(&mut store).and_then(|db| {
            if one(db, 2, name)?.as_deref() != expected {
                return Ok(false);
            }
            let mut batch = JournalBatch::default();
            let value = value.map(Bytes::copy_from_slice);
            batch.notes.insert(name.to_vec(), value);
            write(db, &batch)?;
            Ok(true)
        });
        replaced.map_err(|cause| {
            *store = None;
            JournalError::new(&self.path, cause)
        })
    }

    /// Reads a note of the application.
    ///
    /// # Errors
    /// The same as those of [`Journal::sessions`].
    pub fn note(&self, name: &[u8]) -> Result<Option<Vec<u8>>, JournalError> {
        self.read(|db| one(db, 2, name))
    }
}

/// A session in the journal, and those of its flows that have a memo.
#[derive(Clone, Debug)]
pub struct JournalSession {
    /// The key of the session that the record is of.
    pub key: JournalSessionKey,
    /// The session's record.
    pub stored: StoredRecord,
    /// The session's flows that have a memo.
    pub flows: Vec<FlowId>,
}

/// A page of sessions.
#[derive(Clone, Debug, Default)]
pub struct JournalPage {
    /// The sessions, in ascending order of their keys.
    pub sessions: Vec<JournalSession>,
    /// Flows that have a memo but no session.
    pub orphan_memos: Vec<JournalFlowKey>,
    /// Whether this is the last page.
    pub is_last: bool,
}

fn flow_key(bytes: &[u8]) -> Result<JournalFlowKey, error::JournalErrorKind> {
    JournalFlowKey::read(bytes).ok_or(error::JournalErrorKind::Damaged("flow key"))
}

fn stored(bytes: &[u8]) -> Result<StoredRecord, error::JournalErrorKind> {
    StoredRecord::read(bytes).ok_or(error::JournalErrorKind::Damaged("session"))
}

type JournalContents = BTreeMap<(usize, Vec<u8>), Vec<u8>>;

/// Opens a file that was complete at some time, and verifies it.
fn open_whole(path: &Path) -> Result<Database, error::JournalErrorKind> {
    if fs::metadata(path)?.len() == 0 {
        return Err(error::JournalErrorKind::Damaged(
            "the whole file: it is empty",
        ));
    }
    // The store panics on some kinds of damage.
    let opened = catch_unwind(AssertUnwindSafe(
        || -> Result<Database, error::JournalErrorKind> {
            let file = File::options().read(true).write(true).open(path)?;
            let file = StagedFile::new(FileBackend::new(file)?)?;
            let mut db = Database::builder()
                .set_cache_size(CACHE_BYTES)
                .create_with_backend(file.clone())?;
            if !db.check_integrity()? {
                return Err(error::JournalErrorKind::Damaged("its pages"));
            }
            for table in 0..TABLES.len() {
                each(&db, table, |_, _| Ok(()))?;
            }
            file.apply_staged()?;
            Ok(db)
        },
    ));
    opened.unwrap_or(Err(error::JournalErrorKind::Damaged("its structure")))
}

/// Creates a new file with this content, and renames it into place.
fn create(path: &Path, held: &JournalContents) -> Result<(), error::JournalErrorKind> {
    let new = path.with_extension("new");
    let _ = fs::remove_file(&new);
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::create_dir_all(dir)?;
    }
    let made = write_new(&new, held).and_then(|()| Ok(fs::rename(&new, path)?));
    if made.is_err() {
        let _ = fs::remove_file(&new);
    }
    made?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(dir.unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(())
}

/// Creates a file under a temporary name, with this content.
fn write_new(new: &Path, held: &JournalContents) -> Result<(), error::JournalErrorKind> {
    let file = StagedFile::new(FileBackend::new(private(new)?)?)?;
    // A new file needs no verification.
    file.apply_staged()?;
    let db = Database::builder()
        .set_cache_size(CACHE_BYTES)
        .create_with_backend(file.clone())?;
    let mut transaction = db.begin_write()?;
    transaction.set_two_phase_commit(true);
    for (number, (_, table)) in TABLES.iter().enumerate() {
        let mut table = transaction.open_table(*table)?;
        for ((_, key), value) in held.iter().filter(|((n, _), _)| *n == number) {
            table.insert(key.as_slice(), value.as_slice())?;
        }
    }
    transaction.commit()?;
    // Closing writes as well, and does not report errors.
    drop(db);
    Ok(file.failed()?)
}

/// Creates a file that only its owner can read: requests may contain credentials.
fn private(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

fn write(db: &Database, batch: &JournalBatch) -> Result<(), error::JournalErrorKind> {
    let mut transaction = db.begin_write()?;
    // A commit that was confirmed must never be lost in favour of the one before; see
    // `prefer_the_newer_slot`.
    transaction.set_two_phase_commit(true);
    for (number, (tag, table)) in TABLES.iter().enumerate() {
        let mut table = transaction.open_table(*table)?;
        for (key, value) in batch.of_table(number) {
            match value {
                Some(value) => {
                    let sealed = seal(*tag, &key, &value);
                    table.insert(key.as_slice(), sealed.as_slice())?;
                }
                None => drop(table.remove(key.as_slice())?),
            }
        }
    }
    Ok(transaction.commit()?)
}

/// Calls `f` with each verified key and value of a table.
fn each(
    db: &Database,
    table: usize,
    mut f: impl FnMut(&[u8], &[u8]) -> Result<(), error::JournalErrorKind>,
) -> Result<(), error::JournalErrorKind> {
    let all = (Bound::Unbounded, Bound::Unbounded);
    read_range(db, table, all, |key, value| f(key, value).map(|()| true))
}

/// Reads the records whose keys lie within bounds, while `f` returns true.
fn read_range(
    db: &Database,
    table: usize,
    bounds: (Bound<Vec<u8>>, Bound<Vec<u8>>),
    mut f: impl FnMut(&[u8], &[u8]) -> Result<bool, error::JournalErrorKind>,
) -> Result<(), error::JournalErrorKind> {
    let (tag, definition) = TABLES[table];
    let bounds = (
        bounds.0.as_ref().map(Vec::as_slice),
        bounds.1.as_ref().map(Vec::as_slice),
    );
    for entry in db
        .begin_read()?
        .open_table(definition)?
        .range::<&[u8]>(bounds)?
    {
        let (key, value) = entry?;
        let value = unseal(tag, key.value(), value.value())?;
        if !f(key.value(), value)? {
            break;
        }
    }
    Ok(())
}

fn one(
    db: &Database,
    table: usize,
    key: &[u8],
) -> Result<Option<Vec<u8>>, error::JournalErrorKind> {
    let (tag, definition) = TABLES[table];
    match db.begin_read()?.open_table(definition)?.get(key)? {
        Some(value) => Ok(Some(unseal(tag, key, value.value())?.to_vec())),
        None => Ok(None),
    }
}

/// The whole content, without verification.
fn everything(db: &Database) -> Result<JournalContents, error::JournalErrorKind> {
    let mut held = JournalContents::new();
    for (number, (tag, definition)) in TABLES.iter().enumerate() {
        for entry in db.begin_read()?.open_table(*definition)?.iter()? {
            let (key, value) = entry?;
            unseal(*tag, key.value(), value.value())?;
            held.insert((number, key.value().to_vec()), value.value().to_vec());
        }
    }
    Ok(held)
}
