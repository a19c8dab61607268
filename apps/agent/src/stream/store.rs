//! The stored parts of an object: a sparse file, and a note that lists the parts.
//!
//! ```text
//!  FOLDER/<digest of the URL>/  data   bytes at their places
//!                               note   which of them are on the disk for certain, and of what object
//! ```
//!
//! The note is replaced as a whole, and only after the sync it speaks of: it never promises too much.
//! Bytes of different editions of an object never lie in one file. The URL, which may hold credentials,
//! is not written down.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::spans::Spans;
use crate::fetch::validator::Validator;

/// The version of the note's format; other versions are ignored.
const NOTE_VERSION: u32 = 1;

/// How long an object is kept after its last use.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(7 * 86_400); // a guess

/// The stored note of an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectNote {
    version: u32,
    /// The version of the content, which changes whenever the origin has other bytes.
    pub edition: String,
    /// Whether the origin has answered at least once.
    pub is_known: bool,
    /// The length of the object.
    pub length: Option<u64>,
    /// The origin's validator of these bytes.
    pub validator: Option<Validator>,
    /// The media type of the object.
    pub media_type: Option<String>,
    /// Ranges of the object's bytes that are held.
    pub held: Spans,
}

impl ObjectNote {
    fn new() -> ObjectNote {
        ObjectNote {
            version: NOTE_VERSION,
            edition: random_name(),
            is_known: false,
            length: None,
            validator: None,
            media_type: None,
            held: Spans::default(),
        }
    }
}

/// A random name of sixteen bytes, in the form of a path component.
pub fn random_name() -> String {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system has randomness");
    hex::encode(bytes)
}

/// The folder of this URL below `root`.
pub fn folder_of(root: &Path, url: &str) -> PathBuf {
    root.join(hex::encode(&Sha256::digest(url)[..16]))
}

/// An object on disk, locked against other programs.
#[derive(Debug)]
pub struct ObjectStore {
    folder: PathBuf,
    data: File,
    /// The note of the object.
    pub note: ObjectNote,
    is_dirty: bool,
}

/// The work that makes the bytes held so far durable. It may block.
pub struct PendingSync {
    folder: PathBuf,
    data: File,
    note: ObjectNote,
}

impl ObjectStore {
    /// Opens, or makes, the store of this URL below `root`.
    ///
    /// # Errors
    /// From the disk; `WouldBlock` while another program has it.
    pub fn open(root: &Path, url: &str) -> io::Result<ObjectStore> {
        let folder = folder_of(root, url);
        // What somebody watches is nobody else's business.
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)?;
        let data = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(folder.join("data"))?;
        data.try_lock().map_err(|error| match error {
            std::fs::TryLockError::WouldBlock => io::ErrorKind::WouldBlock.into(),
            std::fs::TryLockError::Error(error) => error,
        })?;
        let lying = std::fs::read(folder.join("note")).ok();
        let lying = lying.and_then(|bytes| serde_json::from_slice::<ObjectNote>(&bytes).ok());
        let lying = lying.filter(|note| note.version == NOTE_VERSION);
        let is_believed = lying.is_some();
        let mut store = ObjectStore {
            note: lying.unwrap_or_else(ObjectNote::new),
            folder,
            data,
            is_dirty: true,
        };
        let length = store.data.metadata()?.len();
        if !is_believed {
            store.data.set_len(0)?;
        } else if store.note.held.next_from(length).is_some()
            || store.note.held.end_from(length) > length
        {
            store.clear()?;
        }
        Ok(store)
    }

    /// Forgets the bytes: the origin has others now.
    ///
    /// # Errors
    /// From the disk.
    pub fn clear(&mut self) -> io::Result<()> {
        self.note = ObjectNote::new();
        self.is_dirty = true;
        self.data.set_len(0)
    }

    /// Puts bytes at their place.
    ///
    /// # Errors
    /// From the disk.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.data.write_all_at(bytes, at)?;
        self.note.held.add(at, at + bytes.len() as u64);
        self.is_dirty = true;
        Ok(())
    }

    /// Reads bytes that are held.
    ///
    /// # Errors
    /// From the disk.
    pub fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.data.read_exact_at(into, at)
    }

    /// Changes the note.
    pub fn update_note(&mut self, change: impl FnOnce(&mut ObjectNote)) {
        change(&mut self.note);
        self.is_dirty = true;
    }

    /// Frees the space of bytes that are no longer needed.
    pub fn release(&mut self, from: u64, to: u64) {
        let (at, length) = (from as i64, (to - from) as i64);
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        // Where the file system cannot, they stay until the object is forgotten.
        if fallocate(&self.data, mode, at, length).is_ok() {
            self.note.held.remove(from, to);
            self.is_dirty = true;
        }
    }

    /// The work that makes the bytes held now durable; none if nothing changed.
    pub fn prepare_sync(&mut self) -> Option<PendingSync> {
        if !self.is_dirty {
            return None;
        }
        let data = self.data.try_clone().ok()?;
        self.is_dirty = false;
        Some(PendingSync {
            folder: self.folder.clone(),
            data,
            note: self.note.clone(),
        })
    }
}

impl PendingSync {
    /// Does it.
    ///
    /// # Errors
    /// From the disk; the note before still stands.
    pub fn run(&self) -> io::Result<()> {
        self.data.sync_data()?;
        replace(&self.folder.join("note"), &serde_json::to_vec(&self.note)?)
    }
}

/// Replaces a file as a whole, for its owner alone.
///
/// # Errors
/// From the disk.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)?;
    file.write_all(bytes)?;
    file.sync_data()?;
    std::fs::rename(fresh, path)
}

/// Removes objects that were not used lately.
pub fn remove_old(root: &Path) {
    let Ok(entries) = std::fs::read_dir(root) else {
        return;
    };
    for folder in entries.flatten().map(|entry| entry.path()) {
        let changed = std::fs::metadata(folder.join("note")).and_then(|note| note.modified());
        let age = |at: SystemTime| SystemTime::now().duration_since(at).ok();
        let is_old = changed.is_ok_and(|at| age(at).is_some_and(|age| age > FORGOTTEN_AFTER));
        // The lock tells that it is in use.
        let is_free = || File::open(folder.join("data")).is_ok_and(|data| data.try_lock().is_ok());
        if is_old && is_free() {
            let _ = std::fs::remove_dir_all(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const URL: &str = "https://o.example/a.mp4";

    #[test]
    fn what_was_settled_is_held_after_a_restart_and_the_rest_is_not() {
        let root = tempfile::tempdir().unwrap();
        let mut store = ObjectStore::open(root.path(), URL).unwrap();
        store.write(100, b"hello").unwrap();
        store.update_note(|note| note.length = Some(1000));
        let edition = store.note.edition.clone();
        store.prepare_sync().unwrap().run().unwrap();
        assert!(store.prepare_sync().is_none());
        store.write(500, b"lost").unwrap();
        assert_eq!(
            ObjectStore::open(root.path(), URL).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        drop(store);
        let store = ObjectStore::open(root.path(), URL).unwrap();
        assert_eq!(Vec::from(store.note.held.clone()), [(100, 105)]);
        assert_eq!(
            (store.note.length, &store.note.edition),
            (Some(1000), &edition)
        );
        let mut bytes = [0; 5];
        store.read(100, &mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
    }

    #[test]
    fn a_note_that_promises_more_than_lies_there_is_not_believed() {
        let root = tempfile::tempdir().unwrap();
        let mut store = ObjectStore::open(root.path(), URL).unwrap();
        store.write(0, &[7; 1000]).unwrap();
        store.prepare_sync().unwrap().run().unwrap();
        drop(store);
        let folder = folder_of(root.path(), URL);
        let data = OpenOptions::new().write(true).open(folder.join("data"));
        data.unwrap().set_len(10).unwrap();
        let store = ObjectStore::open(root.path(), URL).unwrap();
        assert_eq!(store.note.held.bytes(), 0);
        drop(store);
        std::fs::write(folder.join("note"), "{}").unwrap();
        assert_eq!(
            ObjectStore::open(root.path(), URL)
                .unwrap()
                .note
                .held
                .bytes(),
            0
        );
    }

    #[test]
    fn another_edition_begins_with_nothing() {
        let root = tempfile::tempdir().unwrap();
        let mut store = ObjectStore::open(root.path(), URL).unwrap();
        store.write(0, b"old").unwrap();
        let before = store.note.edition.clone();
        store.clear().unwrap();
        assert_eq!(store.note.held.bytes(), 0);
        assert_ne!(store.note.edition, before);
    }

    #[test]
    fn released_bytes_are_not_held_and_take_no_room() {
        let root = tempfile::tempdir().unwrap();
        let mut store = ObjectStore::open(root.path(), URL).unwrap();
        store.write(0, &vec![7; 1 << 20]).unwrap();
        store.release(0, 1 << 19);
        let held = store.note.held.bytes();
        assert!(held == 1 << 19 || held == 1 << 20, "{held}");
    }
}
