//! Older versions of a file that a recurring download replaces: `FILE.1` is the one before, `FILE.2` the one
//! before that, as logrotate(8) names them.
//!
//! ```text
//!  FILE.2 ─▶ FILE.3   FILE.1 ─▶ FILE.2   FILE ══ FILE.1 (a hard link)   new part ─▶ FILE
//! ```
//!
//! FILE is there at every moment. A crash in between leaves a number unused, and loses nothing.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::partial::beside;

/// The most older versions of a file that are kept.
pub const OLDER_MAX: u32 = 1_000; // a guess: three years of days

/// Makes the file at `path` its own newest older version, before it is replaced; of the older ones `keep` stay.
/// Nothing happens if there is no file.
///
/// # Errors
/// The disk refuses, or something else than a file has such a name.
pub fn keep_older(path: &Path, keep: u32) -> io::Result<()> {
    let keep = keep.min(OLDER_MAX);
    let current = match path.symlink_metadata() {
        Ok(found) if found.is_file() && keep > 0 => found,
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => return Ok(()),
    };
    let newest = numbered(path, 1);
    let is_kept = newest
        .symlink_metadata()
        .is_ok_and(|older| (older.dev(), older.ino()) == (current.dev(), current.ino()));
    if is_kept {
        return Ok(()); // an earlier run came as far as this
    }
    let free = (1..=keep).find(|n| numbered(path, *n).symlink_metadata().is_err());
    for n in (1..free.unwrap_or(keep)).rev() {
        std::fs::rename(numbered(path, n), numbered(path, n + 1))?;
    }
    if keep == 1 && free.is_none() {
        std::fs::remove_file(&newest)?;
    }
    match std::fs::hard_link(path, &newest) {
        // File systems such as FAT and exFAT have none: for a moment there is no file of that name.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied
            ) =>
        {
            std::fs::rename(path, &newest)
        }
        linked => linked,
    }
}

/// The path of the older version with this number.
fn numbered(path: &Path, n: u32) -> PathBuf {
    beside(path, &format!(".{n}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_older_versions_are_kept_and_the_file_is_always_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let read = |name: &str| std::fs::read_to_string(path(name)).ok();
        keep_older(&path("a"), 2).expect("nothing to keep");
        for text in ["one", "two", "three", "four"] {
            keep_older(&path("a"), 2).expect("kept");
            assert!(text == "one" || path("a").exists());
            std::fs::write(path("new"), text).expect("written");
            std::fs::rename(path("new"), path("a")).expect("renamed");
        }
        assert_eq!(read("a").as_deref(), Some("four"));
        assert_eq!(read("a.1").as_deref(), Some("three"));
        assert_eq!(read("a.2").as_deref(), Some("two"));
        assert_eq!(read("a.3"), None);
        // After a crash before the new file got its name.
        keep_older(&path("a"), 2).expect("kept");
        keep_older(&path("a"), 2).expect("kept already");
        assert_eq!(read("a.1").as_deref(), Some("four"));
        assert_eq!(read("a.2").as_deref(), Some("three"));
        keep_older(&path("a"), 0).expect("none");
        assert_eq!(read("a.1").as_deref(), Some("four"));
        std::fs::write(path("b"), "b").expect("written");
        std::fs::write(path("b.1"), "old").expect("written");
        keep_older(&path("b"), 1).expect("one");
        assert_eq!(read("b.1").as_deref(), Some("b"));
    }

    #[test]
    fn a_number_that_is_free_is_used_before_an_old_version_is_lost() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        for (name, text) in [("a", "4"), ("a.1", "3"), ("a.3", "1")] {
            std::fs::write(path(name), text).expect("written");
        }
        keep_older(&path("a"), 3).expect("kept");
        let read = |name: &str| std::fs::read_to_string(path(name)).expect("there");
        assert_eq!(
            ["a", "a.1", "a.2", "a.3"].map(read),
            ["4", "4", "3", "1"].map(String::from)
        );
    }
}
