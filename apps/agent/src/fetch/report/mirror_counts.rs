//! How many files of a folder were transferred, and how many were not.

use serde::{Deserialize, Serialize};

use super::human_bytes;

/// How the files of a folder ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorCounts {
    /// Files that were transferred.
    pub transferred: u64,
    /// Files that were the same already.
    pub unchanged: u64,
    /// Files that were deleted, because the source does not have them.
    pub deleted: u64,
    /// Files and folders that failed.
    pub failed: u64,
    /// Files that were transferred after the deadline.
    pub late: u64,
}

impl MirrorCounts {
    /// The counts in words. `verb`: what was done to files; `would`: nothing was done yet.
    pub fn describe(&self, verb: &str, bytes: u64, metered_bytes: u64, would: bool) -> String {
        let would = if would { "would be " } else { "" };
        let mut text = format!(
            "{} {would}{verb} ({}), {} unchanged, {} {would}deleted",
            self.transferred,
            human_bytes(bytes),
            self.unchanged,
            self.deleted
        );
        if self.failed > 0 {
            text += &format!(", {} failed", self.failed);
        }
        if self.late > 0 {
            text += &format!(", {} late", self.late);
        }
        if metered_bytes > 0 {
            text += &format!("; mobile data {}", human_bytes(metered_bytes));
        }
        text
    }
}

/// What was done to the files of a folder, by the verb of its transfers.
pub fn done_to_files(verb: &str) -> &'static str {
    match verb {
        "put" => "uploaded",
        _ => "downloaded",
    }
}
