//! The destination of received bytes: a part that becomes a file, or standard output. Both keep the
//! digest and the last bytes, which the next request asks for again to see that the object is still
//! the same.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::task::JoinHandle;

use super::boot_clock::BootInstant;
use super::older_versions;
use super::outcome::TransferFailure;
use super::partial::{PartialFile, PartialNote};
use crate::stream::store::random_name;

/// Bytes that are requested again when a transfer is continued, and compared. More costs that much at
/// every switch; fewer may not reveal an object that changed elsewhere.
pub const OVERLAP_BYTES_MAX: usize = 16 * 1024; // a guess

/// The interval between checkpoints of a part: what a power failure may cost to fetch again.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(2); // a guess

/// The bytes between checkpoints where they come faster: what the disk has already need not be waited for at the end.
const CHECKPOINT_BYTES: u64 = 64 << 20; // a guess

/// How soon the first bytes are made durable: players and other apps have none before.
const CHECKPOINT_FIRST: Duration = Duration::from_millis(250); // a guess: small files are whole by then

/// Bytes that are cut off a part to make room for its note on a full disk.
const NOTE_ROOM_BYTES: u64 = 64 * 1024; // a file system block and then some

enum SinkTarget {
    File {
        partial: PartialFile,
        checkpoint: Option<JoinHandle<io::Result<u64>>>,
        last: BootInstant,
        /// The length of the part at the last checkpoint.
        covered: u64,
    },
    Output(Box<dyn Write + Send>),
}

/// The receiving end of a download.
pub struct DownloadSink {
    place: SinkTarget,
    digest: Sha256,
    tail: Vec<u8>,
    length: u64,
    /// The note of the object, stored beside the part.
    pub note: PartialNote,
    /// Why the part of an earlier run is not continued, if it is damaged.
    pub discard_reason: Option<&'static str>,
}

/// Whether [`DownloadSink::file`] could be had now.
///
/// # Errors
/// Why not.
pub fn check_writable(destination: &Path, url: &str) -> Result<(), TransferFailure> {
    check_replaceable(destination)?;
    let opened = PartialFile::open(destination, url);
    opened
        .map(drop)
        .map_err(|error| unwritable(destination, &error))
}

impl DownloadSink {
    /// Opens the part for `destination`, and continues an existing one if possible.
    pub fn file(destination: &Path, url: &str) -> Result<DownloadSink, TransferFailure> {
        check_replaceable(destination)?;
        let opened =
            PartialFile::open(destination, url).map_err(|error| unwritable(destination, &error));
        let (mut partial, found) = opened?;
        let mut note = found.unwrap_or_else(|| PartialNote::new(url));
        note.edition.get_or_insert_with(random_name);
        let mut distrust = partial.discard_reason();
        let mut digest = Sha256::new();
        let mut tail = partial
            .rehash(note.durable_bytes, &mut digest, OVERLAP_BYTES_MAX)
            .map_err(|e| TransferFailure::storage("cannot read the partial file", &e))?;
        let held = hex::encode(digest.clone().finalize());
        if note.sha256.as_ref().is_some_and(|noted| *noted != held) {
            distrust = Some("the partial file does not hold the bytes that were written");
            partial
                .remove_note()
                .and_then(|()| partial.truncate(0))
                .map_err(|e| TransferFailure::storage("cannot empty the partial file", &e))?;
            (note, digest, tail) = (PartialNote::new(url), Sha256::new(), Vec::new());
        }
        Ok(DownloadSink {
            length: note.durable_bytes,
            digest,
            tail,
            note,
            discard_reason: distrust,
            place: SinkTarget::File {
                partial,
                checkpoint: None,
                last: BootInstant::now(),
                covered: 0,
            },
        })
    }

    /// Writes to `output` as bytes arrive; written bytes cannot be taken back.
    pub fn output(output: Box<dyn Write + Send>, url: &str) -> DownloadSink {
        DownloadSink {
            place: SinkTarget::Output(output),
            digest: Sha256::new(),
            tail: Vec::new(),
            length: 0,
            note: PartialNote::new(url),
            discard_reason: None,
        }
    }

    /// The number of bytes held.
    pub fn held_bytes(&self) -> u64 {
        self.length
    }

    /// The last bytes held, at most [`OVERLAP_BYTES_MAX`].
    pub fn tail(&self) -> &[u8] {
        &self.tail
    }

    /// Appends bytes to the destination.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), TransferFailure> {
        let written = match &mut self.place {
            SinkTarget::File { partial, .. } => partial.append(bytes),
            SinkTarget::Output(output) => output.write_all(bytes),
        };
        written.map_err(|error| match &self.place {
            SinkTarget::File { .. } => {
                TransferFailure::storage("cannot write the partial file", &error)
            }
            SinkTarget::Output(_) => output_failure(&error),
        })?;
        self.digest.update(bytes);
        self.length += bytes.len() as u64;
        let keep = OVERLAP_BYTES_MAX.saturating_sub(bytes.len());
        let surplus = self.tail.len().saturating_sub(keep);
        self.tail.drain(..surplus);
        self.tail
            .extend_from_slice(&bytes[bytes.len().saturating_sub(OVERLAP_BYTES_MAX)..]);
        Ok(())
    }

    /// Starts again from zero. False if that is impossible, because bytes were written to standard
    /// output.
    pub async fn restart(&mut self) -> Result<bool, TransferFailure> {
        if let SinkTarget::File {
            partial,
            checkpoint,
            last,
            covered,
        } = &mut self.place
        {
            if let Some(running) = checkpoint.take() {
                // It would write a note of the bytes before. Whether it fails does not matter to those that follow:
                // a part with a failed sync says so at the next checkpoint.
                let _ = running.await;
            }
            (*last, *covered) = (BootInstant::now(), 0);
            // The note goes first: it must not speak of bytes that are about to change.
            partial
                .remove_note()
                .and_then(|()| partial.truncate(0))
                .map_err(|e| TransferFailure::storage("cannot empty the partial file", &e))?;
        } else if self.length > 0 {
            return Ok(false);
        }
        self.digest = Sha256::new();
        self.tail.clear();
        self.length = 0;
        self.note = PartialNote::new(&self.note.url);
        Ok(true)
    }

    /// A note that covers everything held.
    fn note_of_all(&self) -> PartialNote {
        PartialNote {
            durable_bytes: self.length,
            sha256: Some(self.sha256_hex()),
            ..self.note.clone()
        }
    }

    /// Called now and then: syncs and writes the note in the background when it is time.
    ///
    /// # Errors
    /// A failed sync: the disk can no longer be believed.
    pub async fn tick(&mut self) -> Result<(), TransferFailure> {
        let all = self.note_of_all();
        let SinkTarget::File {
            partial,
            checkpoint,
            last,
            covered,
        } = &mut self.place
        else {
            return Ok(());
        };
        let failed =
            |error: &io::Error| TransferFailure::storage("cannot sync the partial file", error);
        if let Some(running) = checkpoint {
            if !running.is_finished() {
                return Ok(());
            }
            let outcome = running
                .await
                .unwrap_or_else(|panic| Err(io::Error::other(panic)));
            *checkpoint = None;
            self.note.durable_bytes = outcome.map_err(|e| failed(&e))?;
        }
        let now = BootInstant::now();
        let interval = match self.note.durable_bytes {
            0 => CHECKPOINT_FIRST,
            _ => CHECKPOINT_EVERY,
        };
        let is_due =
            now.since(*last) >= interval || self.length >= covered.saturating_add(CHECKPOINT_BYTES);
        if self.length > self.note.durable_bytes && is_due {
            (*last, *covered) = (now, self.length);
            let work = partial.checkpoint(all).map_err(|e| failed(&e))?;
            *checkpoint = Some(tokio::task::spawn_blocking(work));
        }
        Ok(())
    }

    /// Closes the part so that it can be continued. Returns how many bytes it keeps, and its path.
    pub async fn suspend(mut self) -> Option<(u64, PathBuf)> {
        let digest = self.sha256_hex();
        if let SinkTarget::Output(output) = &mut self.place {
            let _ = output.flush();
        }
        let SinkTarget::File {
            mut partial,
            checkpoint,
            ..
        } = self.place
        else {
            return None;
        };
        if let Some(running) = checkpoint
            && let Ok(Ok(bytes)) = running.await
        {
            self.note.durable_bytes = bytes;
        }
        if self.length == 0 {
            let _ = partial.discard();
            return None;
        }
        let path = partial.path().to_owned();
        if partial.has_failed_sync() {
            // No second sync: what the last note promises is what is left.
            return match self.note.durable_bytes {
                0 => partial.discard().ok().and(None),
                bytes => partial.truncate(bytes).ok().map(|()| (bytes, path)),
            };
        }
        // On a full disk there is no room for the note either: give up a little of the part, but nothing
        // that the note before promises.
        let less = self.length.saturating_sub(NOTE_ROOM_BYTES);
        for length in [self.length, less.max(self.note.durable_bytes)] {
            // A write that failed half-way may have left a torn end.
            let _ = partial.truncate(length);
            let note = PartialNote {
                durable_bytes: length,
                sha256: (length == self.length).then(|| digest.clone()),
                ..self.note.clone()
            };
            if let Ok(bytes) = partial.checkpoint(note).and_then(|work| work()) {
                return Some((bytes, path));
            }
        }
        Some((self.note.durable_bytes, path)) // the previous note still holds
    }

    /// Bytes from which a later run can continue, even after a crash now.
    pub fn durable_bytes(&self) -> u64 {
        match &self.place {
            SinkTarget::File { .. } => self.note.durable_bytes,
            SinkTarget::Output(_) => 0,
        }
    }

    /// Syncs everything that was received, and notes it.
    ///
    /// # Errors
    /// A failed sync: the disk can no longer be believed.
    pub async fn sync(&mut self) -> Result<(), TransferFailure> {
        let all = self.note_of_all();
        let SinkTarget::File {
            partial,
            checkpoint,
            ..
        } = &mut self.place
        else {
            return Ok(());
        };
        let failed =
            |error: &io::Error| TransferFailure::storage("cannot sync the partial file", error);
        if let Some(running) = checkpoint.take() {
            let outcome = running
                .await
                .unwrap_or_else(|panic| Err(io::Error::other(panic)));
            self.note.durable_bytes = outcome.map_err(|e| failed(&e))?;
        }
        let work = partial.checkpoint(all).map_err(|e| failed(&e))?;
        let outcome = tokio::task::spawn_blocking(work).await;
        let outcome = outcome.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        self.note.durable_bytes = outcome.map_err(|e| failed(&e))?;
        Ok(())
    }

    /// The path of the part's note; none on standard output.
    pub fn note_path(&self) -> Option<&Path> {
        match &self.place {
            SinkTarget::File { partial, .. } => Some(partial.note_path()),
            SinkTarget::Output(_) => None,
        }
    }

    /// The path of the part; none on standard output.
    pub fn part_path(&self) -> Option<&Path> {
        match &self.place {
            SinkTarget::File { partial, .. } => Some(partial.path()),
            SinkTarget::Output(_) => None,
        }
    }

    /// The digest of everything held, in hex.
    pub fn sha256_hex(&self) -> String {
        hex::encode(self.digest.clone().finalize())
    }

    /// Renames the complete object to `destination`.
    pub async fn commit(
        self,
        destination: &Path,
        replaces: bool,
        keep_older: u32,
    ) -> Result<PathBuf, TransferFailure> {
        match self.place {
            SinkTarget::File {
                partial,
                checkpoint,
                ..
            } => {
                if let Some(running) = checkpoint {
                    let _ = running.await;
                }
                let what = format!("cannot finish {}", destination.display());
                let committed = match replaces {
                    true => older_versions::keep_older(destination, keep_older)
                        .and_then(|()| partial.commit(destination))
                        .map(|()| destination.to_owned()),
                    false => partial.commit_beside(destination),
                };
                committed.map_err(|e| TransferFailure::storage(&what, &e))
            }
            SinkTarget::Output(mut output) => {
                output.flush().map_err(|error| output_failure(&error))?;
                Ok(destination.to_owned())
            }
        }
    }

    /// Renames a complete object with wrong content. Returns its new path, if it is in a file.
    pub async fn set_aside(self) -> Option<PathBuf> {
        let SinkTarget::File {
            partial,
            checkpoint,
            ..
        } = self.place
        else {
            return None;
        };
        if let Some(running) = checkpoint {
            let _ = running.await;
        }
        partial.set_aside().ok()
    }
}

/// The failure of writing an object to standard output.
fn output_failure(error: &io::Error) -> TransferFailure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => TransferFailure::error(
            "the program that reads standard output ended before the download was complete",
        ),
        _ => TransferFailure::error(format!("cannot write to standard output: {error}")),
    }
}

/// The directory of a destination. A path that ends with a slash names the directory itself.
fn directory_of(destination: &Path) -> &Path {
    if destination.as_os_str().as_bytes().ends_with(b"/") {
        return destination;
    }
    destination
        .parent()
        .filter(|directory| !directory.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Checks that the directory of a destination exists. Nothing is opened or created.
///
/// # Errors
/// It does not exist, or something else has its name.
pub fn check_directory(destination: &Path) -> Result<(), TransferFailure> {
    let directory = directory_of(destination);
    let shown = directory.display();
    match directory.metadata() {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(TransferFailure::error(format!(
            "{shown} is a file, not a directory; name another file with -o"
        ))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(TransferFailure::error(
            format!("the directory {shown} does not exist; `mkdir -p {shown}` makes it"),
        )),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            Err(TransferFailure::error(format!(
                "a part of the path {shown} is a file, not a directory; name another file with -o"
            )))
        }
        Err(error) => Err(TransferFailure::error(format!(
            "the directory {shown} cannot be used: {error}; name another file with -o"
        ))),
    }
}

/// Checks that the complete file may take this name: it is free, or that of a regular file.
///
/// # Errors
/// A device, a pipe or a socket has the name. To replace it would break whatever uses it.
pub fn check_replaceable(destination: &Path) -> Result<(), TransferFailure> {
    // A link to nothing is replaced.
    let Ok(found) = destination.metadata() else {
        return Ok(());
    };
    if found.is_file() || found.is_dir() {
        return Ok(());
    }
    Err(TransferFailure::error(format!(
        "{} is a device, a pipe or a socket, which a file must not replace; name a file with -o, or write to \
         standard output with -o -",
        destination.display()
    )))
}

/// The failure of creating a part beside this file, with what to do about it.
fn unwritable(destination: &Path, error: &io::Error) -> TransferFailure {
    if let Err(failure) = check_directory(destination) {
        return failure;
    }
    let what = format!("cannot write {}.part", destination.display());
    let directory = directory_of(destination);
    match error.kind() {
        io::ErrorKind::WouldBlock => TransferFailure::error(format!(
            "{what}: another cedos get is writing it; wait for that one, or name another \
             file with -o"
        )),
        io::ErrorKind::NotFound => TransferFailure::error(format!(
            "{what}: cannot create a file in {}; name another directory with -o",
            directory.display()
        )),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            TransferFailure::error(format!(
                "{what}: no permission to write to {}; name another file with -o",
                directory.display()
            ))
        }
        io::ErrorKind::IsADirectory => TransferFailure::error(format!(
            "{what}: that is a directory; move it away or name another file with -o"
        )),
        io::ErrorKind::InvalidInput => TransferFailure::error(format!(
            "{what}: {error}; remove it, or name another file with -o"
        )),
        io::ErrorKind::InvalidFilename => TransferFailure::error(format!(
            "{what}: the name is too long; give a shorter one with -o"
        )),
        _ => TransferFailure::storage(&what, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_tail_is_the_last_bytes_however_they_came() {
        let mut sink = DownloadSink::output(Box::new(io::sink()), "u");
        let all: Vec<u8> = (0..50_000u32).map(|i| (i % 253) as u8).collect();
        for piece in all.chunks(777) {
            sink.append(piece).expect("append");
        }
        assert_eq!(sink.tail(), &all[all.len() - OVERLAP_BYTES_MAX..]);
        assert_eq!(sink.sha256_hex(), hex::encode(Sha256::digest(&all)));
        sink.append(&all).expect("append more than a tail at once");
        assert_eq!(sink.tail(), &all[all.len() - OVERLAP_BYTES_MAX..]);
        assert!(
            !sink.restart().await.expect("no disk involved"),
            "output cannot be taken back"
        );
    }

    #[tokio::test]
    async fn a_part_that_begins_anew_keeps_no_checkpoint_of_the_bytes_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let destination = folder.path().join("a");
        let mut sink = DownloadSink::file(&destination, "u").expect("it opens");
        sink.append(b"0123").expect("written");
        if let SinkTarget::File { last, .. } = &mut sink.place {
            *last = BootInstant::from_boot(Duration::ZERO); // A checkpoint is due.
        }
        sink.tick().await.expect("begun");
        assert!(sink.restart().await.expect("from zero"));
        let SinkTarget::File {
            checkpoint,
            covered,
            ..
        } = &sink.place
        else {
            unreachable!("it is a file");
        };
        assert!(checkpoint.is_none(), "it would count bytes that are gone");
        assert_eq!(*covered, 0);
        sink.tick().await.expect("nothing to do");
        assert_eq!(sink.durable_bytes(), 0);
        let note = sink.note_path().expect("it is a file");
        assert!(!note.exists(), "it speaks of bytes that are gone");
    }
}
