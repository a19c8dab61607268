//! A record that an object is about to get its final name, for the process that finds the object
//! after a crash.
//!
//! ```text
//!  part synced ─ landing written ─ renamed ─ (a crash here) ─ "done" written
//!                                               └▶ the file of that name is the part: it is whole
//! ```
//!
//! A file keeps its device and inode numbers when it is renamed, and another user's file has
//! different ones.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A complete object that is about to be renamed into place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PendingRename {
    /// The final path.
    pub file: PathBuf,
    /// Length of the object in bytes.
    pub bytes: u64,
    /// SHA-256 digest of the object's bytes, in hex.
    pub sha256: String,
    /// Whether the deadline had passed when the object was complete.
    pub late: bool,
    /// How long the transfer took.
    pub duration_s: f64,
    /// The note of the part, which is no longer needed.
    pub note: Option<PathBuf>,
    device: u64,
    inode: u64,
}

impl PendingRename {
    /// Notes the whole object that lies in `part`.
    ///
    /// # Errors
    /// It is not there.
    pub fn of(
        part: &Path,
        file: &Path,
        bytes: u64,
        sha256: &str,
        late: bool,
        duration_s: f64,
    ) -> io::Result<PendingRename> {
        let about = std::fs::metadata(part)?;
        Ok(PendingRename {
            file: std::path::absolute(file)?,
            bytes,
            sha256: sha256.to_owned(),
            late,
            duration_s,
            note: None,
            device: about.dev(),
            inode: about.ino(),
        })
    }

    /// Writes it down, for certain.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let fresh = path.with_extension("new");
        let mut out = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .mode(0o600)
            .open(&fresh)?;
        out.write_all(&serde_json::to_vec(self)?)?;
        out.sync_all()?;
        std::fs::rename(&fresh, path)?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    }

    /// The record, if the rename was completed.
    pub fn read_completed(path: &Path) -> Option<PendingRename> {
        let text = std::fs::read(path).ok()?;
        let landing: PendingRename = serde_json::from_slice(&text).ok()?;
        let about = std::fs::symlink_metadata(&landing.file).ok()?;
        let is_it = (about.dev(), about.ino(), about.len())
            == (landing.device, landing.inode, landing.bytes);
        is_it.then_some(landing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_part_itself_under_its_new_name_has_landed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("a.part"), b"whole").unwrap();
        let landing = PendingRename::of(&path("a.part"), &path("a"), 5, "00", false, 1.0).unwrap();
        let note = path("landing.json");
        landing.write(&note).unwrap();
        assert_eq!(PendingRename::read_completed(&note), None, "not yet");
        std::fs::write(path("a"), b"other").unwrap();
        assert_eq!(
            PendingRename::read_completed(&note),
            None,
            "somebody else's"
        );
        std::fs::rename(path("a.part"), path("a")).unwrap();
        assert_eq!(PendingRename::read_completed(&note), Some(landing));
        std::fs::write(path("a"), b"more of it").unwrap();
        assert_eq!(PendingRename::read_completed(&note), None, "changed since");
        std::fs::write(&note, b"{").unwrap();
        assert_eq!(PendingRename::read_completed(&note), None);
    }
}
