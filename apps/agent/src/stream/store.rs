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
//!
//! FOLDER may be one where other users write, too: links in it are not followed, and nothing of another user is used.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nix::fcntl::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::spans::Spans;
use crate::fetch::own_file::OwnFolder;
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
    folder: Arc<OwnFolder>,
    data: File,
    /// The note of the object.
    pub note: ObjectNote,
    is_dirty: bool,
}

/// The work that makes the bytes held so far durable. It may block.
pub struct PendingSync {
    folder: Arc<OwnFolder>,
    data: File,
    note: ObjectNote,
}

impl ObjectStore {
    /// Opens, or makes, the store of this URL below `root`.
    ///
    /// # Errors
    /// From the disk; `WouldBlock` while another program has it.
    pub fn open(root: &Path, url: &str) -> io::Result<ObjectStore> {
        // What somebody watches is nobody else's business.
        let folder = OwnFolder::open_or_create(&folder_of(root, url))?;
        let data = folder.open_or_create_file("data")?;
        data.try_lock().map_err(|error| match error {
            std::fs::TryLockError::WouldBlock => io::ErrorKind::WouldBlock.into(),
            std::fs::TryLockError::Error(error) => error,
        })?;
        let lying = folder.read_file("note").ok();
        let lying = lying.and_then(|bytes| serde_json::from_slice::<ObjectNote>(&bytes).ok());
        let lying = lying.filter(|note| note.version == NOTE_VERSION);
        let is_believed = lying.is_some();
        let mut store = ObjectStore {
            note: lying.unwrap_or_else(ObjectNote::new),
            folder: Arc::new(folder),
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
        let note = serde_json::to_vec(&self.note)?;
        self.folder.replace_file("note", &note)
    }
}

/// Removes objects that were not used lately.
pub fn remove_old(root: &Path) {
    let Ok(entries) = std::fs::read_dir(root) else {
        return;
    };
    for folder in entries.flatten().map(|entry| entry.path()) {
        let Ok(own) = OwnFolder::open(&folder) else {
            continue;
        };
        let changed = own
            .open_file("note")
            .and_then(|note| note.metadata()?.modified());
        let age = |at: SystemTime| SystemTime::now().duration_since(at).ok();
        let is_old = changed.is_ok_and(|at| age(at).is_some_and(|age| age > FORGOTTEN_AFTER));
        // The lock tells that it is in use.
        let is_free = || {
            own.open_file("data")
                .is_ok_and(|data| data.try_lock().is_ok())
        };
        if is_old && is_free() {
            let _ = std::fs::remove_dir_all(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::symlink;

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
    fn links_laid_in_a_stores_place_are_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let precious = root.path().join("precious");
        let folder = folder_of(root.path(), URL);
        let refused = |what: &str| {
            let error = ObjectStore::open(root.path(), URL).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{what}: {error}");
        };
        std::fs::create_dir(&precious).unwrap();
        std::fs::write(precious.join("data"), "precious").unwrap();
        symlink(&precious, &folder).unwrap();
        refused("a link in the folder's place");
        std::fs::remove_file(&folder).unwrap();
        std::fs::create_dir(&folder).unwrap();
        symlink(precious.join("data"), folder.join("data")).unwrap();
        refused("a link in the data's place");
        std::fs::remove_file(folder.join("data")).unwrap();
        std::fs::hard_link(precious.join("data"), folder.join("data")).unwrap();
        refused("a second name of a file");
        std::fs::remove_file(folder.join("data")).unwrap();
        for name in ["note", "note.new"] {
            symlink(precious.join("data"), folder.join(name)).unwrap();
        }
        let mut store = ObjectStore::open(root.path(), URL).unwrap();
        store.write(0, b"hello").unwrap();
        store.prepare_sync().unwrap().run().unwrap();
        assert_eq!(std::fs::read(precious.join("data")).unwrap(), b"precious");
        let note = std::fs::symlink_metadata(folder.join("note")).unwrap();
        assert!(note.is_file());
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
