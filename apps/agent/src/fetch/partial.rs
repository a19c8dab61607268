//! `FILE.part` and its note `FILE.part.json`, which survive a stop, a crash or a full disk.
//!
//! The note says which object the part belongs to and how many bytes are on the disk for
//! certain (synced). It is replaced atomically, and only after the sync it speaks of, so it never
//! promises too much; after a crash the part is cut back to it. So it is after a sync that failed: the
//! system may have dropped what it could not write and would call a second sync a success, so there is
//! none, and what the note before promised is all that counts. When the object is whole, the
//! file and then its directory are synced around the rename, so FILE is either absent (or the
//! old one) or whole.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use d2tp_driver::PublicKey;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::filename::free_path;
use super::own_file;
use super::validator::Validator;
use crate::stream::store::random_name;

/// The version of the note's format; other versions are ignored.
const NOTE_VERSION: u32 = 2;

/// The note beside a partial file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialNote {
    /// The version of the format.
    pub version: u32,
    /// The URL asked for, without credentials.
    pub url: String,
    /// The validator of the object, if the origin sent one.
    pub validator: Option<Validator>,
    /// Size of the object, if known.
    pub length: Option<u64>,
    /// Bytes of the part that are synced to disk.
    pub durable_bytes: u64,
    /// The digest of the stored bytes in hex, if it was known when the note was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The flow at the proxy that carries the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<FlowNote>,
    /// The name of these bytes, which are others whenever the download starts again from zero. Notes of earlier
    /// versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edition: Option<String>,
}

/// A flow that outlives the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowNote {
    /// The instance of the flow.
    pub instance: u64,
    /// The flow's id.
    pub flow: u64,
    /// The difference between a byte's offset in the flow and in the file: the head of the answer
    /// precedes the body, and bytes that were not requested are missing.
    pub lead: i64,
    /// The key of the proxy that has the flow, if it was noted.
    #[serde(default, with = "proxy_key", skip_serializing_if = "Option::is_none")]
    pub proxy: Option<PublicKey>,
}

/// The key of a proxy in a note, as text.
mod proxy_key {
    use d2tp_driver::PublicKey;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        key: &Option<PublicKey>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match key {
            Some(key) => serializer.collect_str(key),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<PublicKey>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        let key = text.map(|text| PublicKey::from_text(&text)).transpose();
        key.map_err(|_| serde::de::Error::custom("not the key of a proxy"))
    }
}

impl FlowNote {
    /// The offset in the flow of the file's byte at `offset`.
    pub fn flow_offset(&self, offset: u64) -> Option<u64> {
        offset.checked_add_signed(self.lead)
    }
}

impl PartialNote {
    /// A note for an object of which nothing is known.
    pub fn new(url: &str) -> PartialNote {
        PartialNote {
            version: NOTE_VERSION,
            url: url.into(),
            validator: None,
            length: None,
            durable_bytes: 0,
            sha256: None,
            flow: None,
            edition: Some(random_name()),
        }
    }

    /// Whether the note at this path belongs to this flow.
    pub fn continues_flow(path: &Path, instance: u64, flow: u64) -> bool {
        let named = read_note(path).note().and_then(|note| note.flow);
        named.is_some_and(|f| (f.instance, f.flow) == (instance, flow))
    }
}

/// A partial file, locked against a second `cedos get`.
#[derive(Debug)]
pub struct PartialFile {
    file: File,
    part: PathBuf,
    note_path: PathBuf,
    destination: PathBuf,
    /// Whether a sync of the part failed.
    lost: Arc<AtomicBool>,
    /// Why an existing part is not continued, if it is damaged.
    distrust: Option<&'static str>,
}

/// A note as stored on disk, with a checksum of its other content.
#[derive(Serialize, Deserialize)]
struct ChecksummedNote {
    #[serde(flatten)]
    note: PartialNote,
    sum: String,
}

impl ChecksummedNote {
    fn of(note: PartialNote) -> io::Result<ChecksummedNote> {
        let digest = Sha256::digest(serde_json::to_vec(&note)?);
        let sum = hex::encode(&digest[..SUM_BYTES]);
        Ok(ChecksummedNote { note, sum })
    }
}

/// Size of the checksum: enough to detect damage.
const SUM_BYTES: usize = 8;

/// The content found at the path of a note.
pub(super) enum StoredNote {
    Nothing,
    Damaged,
    Note(PartialNote),
}

impl StoredNote {
    pub(super) fn note(self) -> Option<PartialNote> {
        match self {
            StoredNote::Note(note) => Some(note),
            StoredNote::Nothing | StoredNote::Damaged => None,
        }
    }
}

/// The error after a failed sync of the part.
fn lost() -> io::Error {
    io::Error::other("an earlier sync of it failed")
}

impl PartialFile {
    /// Whether an earlier run left something beside `destination`.
    pub fn exists(destination: &Path) -> bool {
        let left = |suffix| beside(destination, suffix).symlink_metadata().is_ok();
        left(".part") || left(".part.json")
    }

    /// Opens or makes the part for `destination`. The note comes back only if the part on the
    /// disk belongs to `url` and has the bytes the note promises; the file is then cut to them.
    ///
    /// # Errors
    /// From the disk; `WouldBlock` when another program is writing the same part; `InvalidInput` when a
    /// link or somebody else's file lies there.
    pub fn open(destination: &Path, url: &str) -> io::Result<(PartialFile, Option<PartialNote>)> {
        let (part, note_path) = (
            beside(destination, ".part"),
            beside(destination, ".part.json"),
        );
        let file = own_file::open_or_create(&part)?;
        file.try_lock()?;
        let lying = read_note(&note_path);
        let mut distrust = match lying {
            StoredNote::Damaged => Some("the state file beside the partial file is damaged"),
            StoredNote::Nothing | StoredNote::Note(_) => None,
        };
        let note = lying
            .note()
            .filter(|note| note.version == NOTE_VERSION && note.url == url)
            .filter(|note| {
                let is_there = file.metadata().is_ok_and(|m| m.len() >= note.durable_bytes);
                if !is_there {
                    distrust = Some("the partial file is shorter than its state file says");
                }
                is_there
            })
            .filter(|note| note.durable_bytes > 0);
        file.set_len(note.as_ref().map_or(0, |note| note.durable_bytes))?;
        let mut partial = PartialFile {
            file,
            part,
            note_path,
            destination: destination.to_owned(),
            lost: Arc::default(),
            distrust,
        };
        partial.file.seek(SeekFrom::End(0))?;
        Ok((partial, note))
    }

    /// Appends bytes to the partial file.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Truncates the part to `length` bytes, after a write that failed half-way.
    pub fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.file.set_len(length)?;
        self.file.seek(SeekFrom::Start(length)).map(drop)
    }

    /// Feeds the first `length` bytes to `digest` and returns the last `tail_max` of them.
    pub fn rehash(
        &mut self,
        length: u64,
        digest: &mut Sha256,
        tail_max: usize,
    ) -> io::Result<Vec<u8>> {
        self.file.seek(SeekFrom::Start(0))?;
        let mut reader = (&self.file).take(length);
        let mut buffer = vec![0; 1 << 18];
        loop {
            match reader.read(&mut buffer)? {
                0 => break,
                n => digest.update(&buffer[..n]),
            }
        }
        let tail_len = length.min(tail_max as u64);
        let mut tail = vec![0; tail_len as usize];
        self.file.seek(SeekFrom::Start(length - tail_len))?;
        self.file.read_exact(&mut tail)?;
        self.file.seek(SeekFrom::Start(length))?;
        Ok(tail)
    }

    /// The work of making `note.durable_bytes` true and writing it down, to be run where blocking
    /// is allowed.
    ///
    /// # Errors
    /// From the disk. After a failed sync of the part every other checkpoint fails too.
    pub fn checkpoint(
        &self,
        note: PartialNote,
    ) -> io::Result<impl FnOnce() -> io::Result<u64> + Send + use<>> {
        let file = self.file.try_clone()?;
        let path = self.note_path.clone();
        let given_up = self.lost.clone();
        Ok(move || {
            if given_up.load(Ordering::Acquire) {
                return Err(lost());
            }
            file.sync_data()
                .inspect_err(|_| given_up.store(true, Ordering::Release))?;
            write_note(&path, &note)?;
            Ok(note.durable_bytes)
        })
    }

    /// Whether a sync of the part failed: only what the last note promises is there.
    pub fn has_failed_sync(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Why an existing part is not continued, if it is damaged.
    pub fn discard_reason(&self) -> Option<&'static str> {
        self.distrust
    }

    /// Removes the note, so that the part is not continued.
    pub fn remove_note(&self) -> io::Result<()> {
        match std::fs::remove_file(&self.note_path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Renames the part to its destination, and replaces what is there: syncs it, renames it, syncs the
    /// directory, removes the note.
    pub fn commit(&self, destination: &Path) -> io::Result<()> {
        self.sync()?;
        std::fs::rename(&self.part, destination)?;
        self.finish_rename(destination)
    }

    /// Like [`PartialFile::commit`], but replaces nothing: if the name is taken, the file gets one with a number.
    /// Returns its path.
    pub fn commit_beside(&self, destination: &Path) -> io::Result<PathBuf> {
        self.sync()?;
        let is_taken = |path: &Path| path.symlink_metadata().is_ok();
        loop {
            let free = free_path(destination, is_taken).unwrap_or_else(|| destination.to_owned());
            match rename_without_replacing(&self.part, &free) {
                // Another program took it in this moment.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                renamed => {
                    renamed?;
                    self.finish_rename(&free)?;
                    return Ok(free);
                }
            }
        }
    }

    /// Syncs the part, if its name leads to what is held.
    fn sync(&self) -> io::Result<()> {
        if self.has_failed_sync() {
            return Err(lost());
        }
        self.file
            .sync_all()
            .inspect_err(|_| self.lost.store(true, Ordering::Release))?;
        let (held, named) = (
            self.file.metadata()?,
            std::fs::symlink_metadata(&self.part)?,
        );
        if (held.dev(), held.ino()) != (named.dev(), named.ino()) {
            // The name leads to other bytes than those that were checked.
            return Err(io::Error::other(
                "another program replaced the partial file",
            ));
        }
        Ok(())
    }

    fn finish_rename(&self, destination: &Path) -> io::Result<()> {
        let directory = destination.parent().filter(|p| !p.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()?;
        self.remove_note()
    }

    /// Renames the part to `FILE.bad`, so that it is never continued. Returns that path.
    pub fn set_aside(self) -> io::Result<PathBuf> {
        let bad = beside(&self.destination, ".bad");
        std::fs::rename(&self.part, &bad)?;
        self.remove_note()?;
        Ok(bad)
    }

    /// Removes an empty part and its note.
    pub fn discard(self) -> io::Result<()> {
        std::fs::remove_file(&self.part)?;
        self.remove_note()
    }

    /// The path of the note.
    pub fn note_path(&self) -> &Path {
        &self.note_path
    }

    /// The path of the part.
    pub fn path(&self) -> &Path {
        &self.part
    }
}

/// The path of the part for `destination`.
pub fn part_path(destination: &Path) -> PathBuf {
    beside(destination, ".part")
}

/// The note that an earlier run left for `destination` of `url`; nothing is opened or changed.
pub fn find_note(destination: &Path, url: &str) -> Option<PartialNote> {
    let note = read_note(&beside(destination, ".part.json")).note()?;
    let part = std::fs::symlink_metadata(beside(destination, ".part")).ok()?;
    let fits = note.version == NOTE_VERSION && note.url == url && part.len() >= note.durable_bytes;
    fits.then_some(note)
}

pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

pub(super) fn read_note(path: &Path) -> StoredNote {
    let Ok(bytes) = own_file::read(path) else {
        return StoredNote::Nothing;
    };
    let read = serde_json::from_slice::<ChecksummedNote>(&bytes).ok();
    let sealed = read.and_then(|ChecksummedNote { note, sum }| {
        let again = ChecksummedNote::of(note).ok()?;
        (again.sum == sum).then_some(again)
    });
    match sealed {
        // What it means it must also say, byte for byte.
        Some(sealed) if serde_json::to_vec(&sealed).is_ok_and(|same| same == bytes) => {
            StoredNote::Note(sealed.note)
        }
        _ => StoredNote::Damaged,
    }
}

fn write_note(path: &Path, note: &PartialNote) -> io::Result<()> {
    let fresh = beside(path, ".new");
    let written = (|| {
        let mut file = own_file::create_fresh(&fresh)?;
        file.write_all(&serde_json::to_vec(&ChecksummedNote::of(note.clone())?)?)?;
        file.sync_data()?;
        std::fs::rename(&fresh, path)
    })();
    if written.is_err() {
        // Leave the previous note as it is; a half-written new one is of no use.
        let _ = std::fs::remove_file(&fresh);
    }
    written
}

/// Renames a file to a name that must be free, in one step where the file system can do that.
fn rename_without_replacing(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        renamed => return Ok(renamed?),
    }
    if to.symlink_metadata().is_ok() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    std::fs::rename(from, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    const URL: &str = "http://origin.example/a";

    fn note(durable_bytes: u64) -> PartialNote {
        PartialNote {
            durable_bytes,
            length: Some(10),
            sha256: Some("ab".repeat(32)),
            edition: Some("edition".into()),
            ..PartialNote::new(URL)
        }
    }

    fn written(directory: &Path, bytes: &[u8], note: PartialNote) -> PathBuf {
        let destination = directory.join("a");
        let (mut partial, _) = PartialFile::open(&destination, URL).expect("open");
        partial.append(bytes).expect("append");
        partial.checkpoint(note).expect("prepare")().expect("checkpoint");
        destination
    }

    #[test]
    fn a_part_is_continued_from_what_was_durable() {
        let directory = tempfile::tempdir().expect("directory");
        let destination = written(directory.path(), b"0123456", note(5));
        let (mut partial, found) = PartialFile::open(&destination, URL).expect("open again");
        assert_eq!(found, Some(note(5)));
        let mut digest = Sha256::new();
        assert_eq!(partial.rehash(5, &mut digest, 3).expect("rehash"), b"234");
        assert_eq!(digest.finalize(), Sha256::digest(b"01234"));
        partial.append(b"ABCDE").expect("append");
        partial.commit(&destination).expect("commit");
        assert_eq!(std::fs::read(&destination).expect("read"), b"01234ABCDE");
        assert_eq!(
            std::fs::read_dir(directory.path()).expect("list").count(),
            1,
            "only the file"
        );
    }

    #[test]
    fn a_part_of_another_url_or_shorter_than_promised_is_not_continued() {
        let directory = tempfile::tempdir().expect("directory");
        let destination = written(directory.path(), b"0123", note(4));
        let (_, found) = PartialFile::open(&destination, "http://origin.example/b").expect("open");
        assert_eq!(found, None);
        let destination = written(directory.path(), b"0123", note(9));
        assert_eq!(PartialFile::open(&destination, URL).expect("open").1, None);
    }

    #[test]
    fn any_damage_to_the_note_is_a_start_from_zero_and_no_panic() {
        let directory = tempfile::tempdir().expect("directory");
        let destination = written(directory.path(), b"0123", note(4));
        let path = beside(&destination, ".part.json");
        let good = std::fs::read(&path).expect("the note");
        let try_out = |bytes: &[u8], what: String| {
            std::fs::write(&path, bytes).expect("damage");
            let (partial, found) = PartialFile::open(&destination, URL).expect("open");
            assert_eq!(found, None, "{what}");
            assert!(partial.discard_reason().is_some(), "{what}");
        };
        for length in 0..good.len() {
            try_out(&good[..length], format!("{length} bytes"));
        }
        for bit in 0..8 * good.len() {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            try_out(&bytes, format!("bit {bit}"));
        }
    }

    #[test]
    fn a_link_laid_in_a_parts_place_is_not_followed() {
        let directory = tempfile::tempdir().expect("directory");
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("precious"), "precious").expect("write");
        std::os::unix::fs::symlink(path("precious"), path("a.part")).expect("link");
        let refused = PartialFile::open(&path("a"), URL).expect_err("a link");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        std::fs::remove_file(path("a.part")).expect("remove");
        for note in ["a.part.json", "a.part.json.new"] {
            std::os::unix::fs::symlink(path("precious"), path(note)).expect("link");
        }
        let destination = written(directory.path(), b"0123", note(4));
        assert_eq!(std::fs::read(path("precious")).expect("read"), b"precious");
        assert_eq!(find_note(&destination, URL), Some(note(4)));
    }

    #[test]
    fn a_name_that_was_taken_meanwhile_is_not_replaced() {
        let directory = tempfile::tempdir().expect("directory");
        let path = |name: &str| directory.path().join(name);
        for (bytes, name) in [("mine", "a.bin"), ("more", "a (1).bin")] {
            let (mut partial, _) = PartialFile::open(&path("a.bin"), URL).expect("open");
            partial.append(bytes.as_bytes()).expect("append");
            let named = partial.commit_beside(&path("a.bin")).expect("commit");
            assert_eq!(named, path(name));
            assert_eq!(std::fs::read_to_string(named).expect("read"), bytes);
        }
        std::fs::write(path("b"), "other").expect("write");
        let taken = rename_without_replacing(&path("b"), &path("a.bin")).expect_err("taken");
        assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(
            std::fs::read_to_string(path("a.bin")).expect("read"),
            "mine"
        );
    }

    #[test]
    fn a_part_that_was_replaced_is_not_renamed() {
        let directory = tempfile::tempdir().expect("directory");
        let destination = directory.path().join("a");
        let (partial, _) = PartialFile::open(&destination, URL).expect("open");
        std::fs::remove_file(partial.path()).expect("remove");
        std::fs::write(partial.path(), "other bytes").expect("replace");
        partial.commit(&destination).expect_err("replaced");
        assert!(!destination.exists());
    }

    #[test]
    fn two_programs_do_not_write_one_part() {
        let directory = tempfile::tempdir().expect("directory");
        let (_first, _) = PartialFile::open(&directory.path().join("a"), URL).expect("open");
        let second = PartialFile::open(&directory.path().join("a"), URL).expect_err("locked");
        assert_eq!(second.kind(), io::ErrorKind::WouldBlock);
    }
}
