//! What earlier runs of `cedos sync` brought or sent, so that a file that did not change is not transferred again where
//! no listing tells.
//!
//! ```text
//!  $XDG_STATE_HOME/cedos/sync/<digest of both folders>.json   {"photos/a.jpg": {"stamp": …, "version": …}}
//! ```
//!
//! Without it everything is asked for again, and nothing is lost.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::fetch::file_stamp::FileStamp;
use crate::fetch::object_version::ObjectVersion;
use crate::fetch::state_directory::state_directory;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::relative_path::RelativePath;

/// A file as a run left it, or sent it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct SyncedFile {
    stamp: FileStamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<ObjectVersion>,
}

/// What earlier runs brought or sent.
#[derive(Debug, Default)]
pub struct MirrorMemory {
    file: Option<PathBuf>,
    known: BTreeMap<String, SyncedFile>,
}

impl MirrorMemory {
    /// Loads what is known of a pair of folders. What cannot be read is not known.
    pub fn load(from: &str, to: &str) -> MirrorMemory {
        let name = hex::encode(&Sha256::digest(format!("{from}\n{to}"))[..16]);
        let file = state_directory()
            .ok()
            .map(|state| state.join("sync").join(format!("{name}.json")));
        let text = file.as_deref().and_then(|file| std::fs::read(file).ok());
        let known = text.and_then(|text| serde_json::from_slice(&text).ok());
        MirrorMemory {
            file,
            known: known.unwrap_or_default(),
        }
    }

    /// The version of the object that the file at `at` still holds.
    pub fn version(&self, path: &RelativePath, at: &Path) -> Option<ObjectVersion> {
        let known = self.known.get(&path.text())?;
        let is_same = FileStamp::of(at) == Some(known.stamp);
        known.version.clone().filter(|_| is_same)
    }

    /// Whether the file at `at` is the one that was sent.
    pub fn has_sent(&self, path: &RelativePath, stamp: FileStamp) -> bool {
        let known = self.known.get(&path.text());
        known.is_some_and(|known| known.stamp == stamp)
    }

    /// Records that a file was transferred.
    pub fn record(
        &mut self,
        path: &RelativePath,
        stamp: Option<FileStamp>,
        version: Option<ObjectVersion>,
    ) {
        match stamp {
            Some(stamp) => {
                let synced = SyncedFile { stamp, version };
                self.known.insert(path.text(), synced);
            }
            None => drop(self.known.remove(&path.text())),
        }
    }

    /// Saves what is known.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn save(&self) -> io::Result<()> {
        let Some(path) = &self.file else {
            return Ok(());
        };
        let folder = path.parent().unwrap_or(Path::new("."));
        let mut made = std::fs::DirBuilder::new();
        made.recursive(true).mode(0o700).create(folder)?;
        let fresh = path.with_extension("new");
        let mut options = std::fs::OpenOptions::new();
        options.create(true).write(true).truncate(true).mode(0o600);
        let mut file = options.open(&fresh)?;
        file.write_all(&serde_json::to_vec(&self.known)?)?;
        std::fs::rename(&fresh, path)
    }
}
