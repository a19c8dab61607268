//! What distinguishes a file from what it was when it was fetched or sent, without reading it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// What distinguishes the bytes of a file from those that it had before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileStamp {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl FileStamp {
    /// The stamp of a file; none if there is no such file.
    pub fn of(path: &Path) -> Option<FileStamp> {
        let found = path.metadata().ok().filter(std::fs::Metadata::is_file)?;
        Some(FileStamp {
            inode: found.ino(),
            bytes: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
        })
    }
}
