//! The bytes of a download that goes on, read from outside of it.
//!
//! ```text
//!  FILE.part  ═══════════════╪╌╌╌╌╌╌        read: what is durable, so that a crash takes none of it back
//!                            └ FILE.part.json says how much, and of which edition
//! ```
//!
//! A download that starts again from zero first removes its note, and its next note has another edition. So bytes
//! that were read are those of an edition if the note still names it afterwards.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use sha2::{Digest, Sha256};

use super::own_file;
use super::partial::{PartialNote, beside, read_note};

/// Bytes that are digested at a time.
const DIGEST_PIECE_BYTES: u64 = 256 * 1024; // a guess

/// How far a download is, whose bytes are read from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartialState {
    /// The first bytes are durable.
    Growing {
        /// The number of bytes that are on the disk.
        durable_bytes: u64,
    },
    /// The file is whole.
    Whole {
        /// Length of the file.
        length: u64,
    },
    /// The download started again from zero, or its file is gone: no further byte of this edition comes.
    Replaced,
}

/// An open part of a download.
#[derive(Debug)]
pub struct PartialReader {
    file: File,
    destination: PathBuf,
    edition: String,
    /// How many bytes the newest note of this edition was of, and their digest.
    known: Mutex<(u64, Option<String>)>,
    /// The length, once the file was seen whole: it can be read to its end even if it is removed.
    whole: OnceLock<u64>,
}

impl PartialReader {
    /// Opens the part for `destination`, with its note; none if nothing of it is durable yet.
    pub fn open(destination: &Path) -> Option<(PartialReader, PartialNote)> {
        let note = read_note(&beside(destination, ".part.json")).note()?;
        let edition = note.edition.clone()?;
        let file = own_file::open_existing(&beside(destination, ".part")).ok()?;
        let reader = PartialReader {
            file,
            destination: destination.to_owned(),
            edition,
            known: Mutex::new((note.durable_bytes, note.sha256.clone())),
            whole: OnceLock::new(),
        };
        (note.durable_bytes > 0).then_some((reader, note))
    }

    /// The name of these bytes.
    pub fn edition(&self) -> &str {
        &self.edition
    }

    /// How far the download is.
    pub fn state(&self) -> PartialState {
        if let Some(length) = self.whole.get() {
            return PartialState::Whole { length: *length };
        }
        match read_note(&beside(&self.destination, ".part.json")).note() {
            Some(note) if note.edition.as_ref() == Some(&self.edition) => {
                let durable_bytes = note.durable_bytes;
                *self.known() = (durable_bytes, note.sha256);
                PartialState::Growing { durable_bytes }
            }
            Some(_) => PartialState::Replaced,
            // The note goes when the file has its name.
            None => self.finished().unwrap_or(PartialState::Replaced),
        }
    }

    fn finished(&self) -> Option<PartialState> {
        let named = std::fs::symlink_metadata(&self.destination).ok()?;
        let held = self.file.metadata().ok()?;
        let is_same = (named.dev(), named.ino()) == (held.dev(), held.ino());
        // It may have started again and ended since its note was read.
        let (bytes, sha256) = self.known().clone();
        let is_continued = is_same && sha256.is_some() && self.digest(bytes) == sha256;
        is_continued.then(|| PartialState::Whole {
            length: *self.whole.get_or_init(|| held.len()),
        })
    }

    fn known(&self) -> MutexGuard<'_, (u64, Option<String>)> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The digest of the first bytes, in hexadecimal; none if they are not there.
    fn digest(&self, bytes: u64) -> Option<String> {
        let mut digest = Sha256::new();
        let mut at = 0;
        while at < bytes {
            let most = (bytes - at).min(DIGEST_PIECE_BYTES);
            let piece = self.read(at, usize::try_from(most).ok()?).ok()?;
            digest.update(&piece);
            at += most;
        }
        Some(hex::encode(digest.finalize()))
    }

    /// Reads `most` bytes at `at`.
    ///
    /// # Errors
    /// From the disk, or the bytes are not there.
    pub fn read(&self, at: u64, most: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; most];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::sink::DownloadSink;

    const URL: &str = "https://h.example/a";

    async fn sink(destination: &Path, bytes: &[u8]) -> DownloadSink {
        let mut sink = DownloadSink::file(destination, URL).expect("it opens");
        sink.append(bytes).expect("written");
        sink.sync().await.expect("synced");
        sink
    }

    #[tokio::test]
    async fn durable_bytes_are_read_while_the_download_goes_on_and_after_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let destination = folder.path().join("a");
        assert!(PartialReader::open(&destination).is_none());
        let mut sink = sink(&destination, b"0123").await;
        sink.append(b"45").expect("written");
        let (reader, note) = PartialReader::open(&destination).expect("some bytes");
        assert_eq!(note.edition.as_deref(), Some(reader.edition()));
        assert_eq!(reader.state(), PartialState::Growing { durable_bytes: 4 });
        assert_eq!(reader.read(1, 3).expect("read"), b"123");
        // Another run of the same download goes on with the same edition.
        sink.suspend().await;
        let sink = DownloadSink::file(&destination, URL).expect("it opens");
        assert_eq!(reader.state(), PartialState::Growing { durable_bytes: 6 });
        sink.commit(&destination, true, 0).await.expect("whole");
        assert_eq!(reader.state(), PartialState::Whole { length: 6 });
        assert_eq!(reader.read(4, 2).expect("read"), b"45");
        std::fs::remove_file(&destination).expect("removed");
        assert_eq!(reader.state(), PartialState::Whole { length: 6 });
    }

    #[tokio::test]
    async fn a_download_that_starts_again_is_another_edition() {
        let folder = tempfile::tempdir().expect("a folder");
        let destination = folder.path().join("a");
        let mut sink = sink(&destination, b"0123").await;
        let (reader, _) = PartialReader::open(&destination).expect("some bytes");
        assert!(sink.restart().await.expect("from zero"));
        assert_eq!(reader.state(), PartialState::Replaced);
        sink.append(b"abcdef").expect("written");
        sink.sync().await.expect("synced");
        assert_eq!(reader.state(), PartialState::Replaced);
        let (again, _) = PartialReader::open(&destination).expect("some bytes");
        assert_ne!(again.edition(), reader.edition());
        // Also if nobody looked in between.
        sink.commit(&destination, true, 0).await.expect("whole");
        assert_eq!(reader.state(), PartialState::Replaced);
        assert_eq!(again.state(), PartialState::Whole { length: 6 });
    }
}
