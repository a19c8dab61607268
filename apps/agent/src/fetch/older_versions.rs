//! Older versions of a file that a recurring download replaces: `FILE.1` is the one before, `FILE.2` the one
//! before that, as logrotate(8) names them.
//!
//! ```text
//!  FILE.2 ─▶ FILE.3   FILE.1 ─▶ FILE.2   FILE ══ FILE.1 (a hard link)   new part ─▶ FILE
//! ```
//!
//! FILE is there at every moment. A crash in between leaves a number unused, and loses nothing. A note in the state
//! directory says which files are older versions: a number that another file has is left out.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::file_stamp::FileStamp;
use super::partial::beside;
use super::state_directory::{replace, state_directory};

/// The most older versions of a file that are kept.
pub const OLDER_MAX: u32 = 1_000; // a guess: three years of days

/// Makes the file at `path` its own newest older version, before it is replaced; of the older ones `keep` stay.
/// Nothing happens if there is no file.
///
/// # Errors
/// The disk refuses.
pub fn keep_older(path: &Path, keep: u32) -> io::Result<()> {
    match keep {
        0 => Ok(()),
        keep => keep_older_noted(path, keep, &note_of(path)?),
    }
}

/// The note of which files are older versions of the one at `path`.
fn note_of(path: &Path) -> io::Result<PathBuf> {
    let state = state_directory().map_err(io::Error::other)?;
    let digest = Sha256::digest(std::path::absolute(path)?.as_os_str().as_encoded_bytes());
    let name = format!("{}.json", hex::encode(&digest[..16]));
    Ok(state.join("older-versions").join(name))
}

fn keep_older_noted(path: &Path, keep: u32, note: &Path) -> io::Result<()> {
    let keep = keep.min(OLDER_MAX) as usize;
    match path.symlink_metadata() {
        Ok(found) if found.is_file() => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => return Ok(()),
    }
    let Some(current) = FileStamp::of(path) else {
        return Ok(());
    };
    let mut own: Vec<FileStamp> = match std::fs::read(note) {
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
        Err(_) => Vec::new(),
    };
    let slots = own_slots(path, keep, &own);
    let stamps: Vec<Option<FileStamp>> = slots.iter().map(|slot| stamp_of(slot)).collect();
    if stamps.first() == Some(&Some(current)) && own.contains(&current) {
        return Ok(()); // an earlier run came as far as this
    }
    // Before anything has such a name: what is not in the note is never touched.
    own.retain(|stamp| stamps.contains(&Some(*stamp)));
    own.push(current);
    if let Some(folder) = note.parent() {
        std::fs::create_dir_all(folder)?;
    }
    replace(note, &own)?;
    let Some(newest) = slots.first() else {
        return Ok(());
    };
    let free = stamps.iter().position(Option::is_none);
    let last = free.unwrap_or(slots.len() - 1);
    for n in (0..last).rev() {
        std::fs::rename(&slots[n], &slots[n + 1])?;
    }
    if last == 0 && free.is_none() {
        std::fs::remove_file(newest)?;
    }
    match std::fs::hard_link(path, newest) {
        // File systems such as FAT and exFAT have none: for a moment there is no file of that name.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied
            ) =>
        {
            std::fs::rename(path, newest)
        }
        linked => linked,
    }
}

/// The first `keep` names for older versions that are free, or have a file that is noted as one.
fn own_slots(path: &Path, keep: usize, own: &[FileStamp]) -> Vec<PathBuf> {
    let own: BTreeSet<FileStamp> = own.iter().copied().collect();
    let numbered = (1..=OLDER_MAX).map(|n| beside(path, &format!(".{n}")));
    let is_own = |name: &PathBuf| match name.symlink_metadata() {
        Ok(_) => stamp_of(name).is_some_and(|stamp| own.contains(&stamp)),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    numbered.filter(is_own).take(keep).collect()
}

/// The stamp of a file; none if the name is free, or has something else.
fn stamp_of(path: &Path) -> Option<FileStamp> {
    let is_file = path.symlink_metadata().is_ok_and(|found| found.is_file());
    FileStamp::of(path).filter(|_| is_file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file whose older versions are kept, and the note of them.
    struct Versions {
        folder: tempfile::TempDir,
    }

    impl Versions {
        fn new() -> Versions {
            Versions {
                folder: tempfile::tempdir().expect("a folder"),
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn read(&self, name: &str) -> Option<String> {
            std::fs::read_to_string(self.path(name)).ok()
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.path(name), text).expect("written");
        }

        fn keep(&self, keep: u32) {
            let note = self.path("notes/a.json");
            keep_older_noted(&self.path("a"), keep, &note).expect("kept");
        }

        /// Replaces the file, as a download does.
        fn replace(&self, text: &str, keep: u32) {
            let was_there = self.path("a").exists();
            self.keep(keep);
            assert_eq!(self.path("a").exists(), was_there);
            self.write("new", text);
            std::fs::rename(self.path("new"), self.path("a")).expect("renamed");
        }
    }

    #[test]
    fn the_newest_older_versions_are_kept_and_the_file_is_always_there() {
        let versions = Versions::new();
        for text in ["one", "two", "three", "four"] {
            versions.replace(text, 2);
        }
        let read = |name: &str| versions.read(name);
        assert_eq!(read("a").as_deref(), Some("four"));
        assert_eq!(read("a.1").as_deref(), Some("three"));
        assert_eq!(read("a.2").as_deref(), Some("two"));
        assert_eq!(read("a.3"), None);
        // After a crash before the new file got its name.
        versions.keep(2);
        versions.keep(2);
        assert_eq!(read("a.1").as_deref(), Some("four"));
        assert_eq!(read("a.2").as_deref(), Some("three"));
        keep_older(&versions.path("a"), 0).expect("none");
        assert_eq!(read("a.1").as_deref(), Some("four"));
        versions.replace("five", 1);
        versions.replace("six", 1);
        assert_eq!(read("a.1").as_deref(), Some("five"));
    }

    #[test]
    fn a_number_that_is_free_is_used_before_an_old_version_is_lost() {
        let versions = Versions::new();
        for text in ["1", "2", "3", "4"] {
            versions.replace(text, 3);
        }
        std::fs::remove_file(versions.path("a.2")).expect("it was there");
        versions.keep(3);
        let read = |name: &str| versions.read(name).expect("there");
        assert_eq!(
            ["a", "a.1", "a.2", "a.3"].map(read),
            ["4", "4", "3", "1"].map(String::from)
        );
    }

    #[test]
    fn a_file_of_such_a_name_that_is_no_older_version_stays_as_it_is() {
        let versions = Versions::new();
        versions.write("a.1", "mine");
        std::fs::create_dir(versions.path("a.3")).expect("a folder");
        for text in ["one", "two", "three", "four"] {
            versions.replace(text, 2);
        }
        let read = |name: &str| versions.read(name);
        assert_eq!(read("a.1").as_deref(), Some("mine"));
        assert_eq!(read("a.2").as_deref(), Some("three"));
        assert_eq!(read("a.4").as_deref(), Some("two"));
        assert_eq!(read("a.5"), None);
        // An older version that a person wrote into is the person's.
        versions.write("a.2", "mine, too");
        versions.replace("five", 2);
        assert_eq!(read("a.2").as_deref(), Some("mine, too"));
        assert_eq!(read("a.4").as_deref(), Some("four"));
        assert_eq!(read("a.5").as_deref(), Some("two"));
    }
}
