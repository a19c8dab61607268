//! The file of a journal that is not verified yet. The store may repair what it finds, but its writes
//! stay in memory until the whole file was found to be valid. So a file that is refused is not changed,
//! and is refused the next time, too.
//!
//! ```text
//!   store ── write ──▶ pages in memory, and a list of changes ── apply_staged ──▶ the same to the file
//!         ◀── read ─── those pages, else the file
//! ```
//!
//! A sync is never repeated: once one has failed, all later ones fail as well. The store does not
//! report errors when it closes; [`StagedFile::failed`] does.
//!
//! A commit has two phases: pages and the new commit slot, a sync, one bit that makes the slot valid, a
//! sync. So the slot that the bit selects is complete, or the file is damaged, and the store never falls
//! back to the previous commit unnoticed. One case remains: a newer slot that the bit does not select is
//! a commit interrupted between the phases, or the bit was damaged. In both cases the newer slot is right
//! if it is complete, and the store uses it unless it is told that there were two phases.

use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::sync::Arc;

use parking_lot::Mutex;
use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};

const PAGE_BYTES: u64 = 4096;
// From redb's description of its file, format 3.
const FLAGS_AT: usize = 9;
const FLAG_SECOND_SLOT: u8 = 1;
const FLAG_TWO_PHASES: u8 = 4;
const SLOT_IDS_AT: [usize; 2] = [64 + 104, 192 + 104];

#[derive(Clone, Debug)]
pub(super) struct StagedFile(Arc<StagedFileInner>);

#[derive(Debug)]
struct StagedFileInner {
    file: FileBackend,
    /// Writes that wait until the file is verified; `None` afterwards.
    staged: Mutex<Option<StagedWrites>>,
    /// The error of the first failed sync or write.
    failed: Mutex<Option<(io::ErrorKind, String)>>,
}

/// Writes that are not in the file yet.
#[derive(Debug)]
struct StagedWrites {
    len: u64,
    /// The length to which the file was truncated meanwhile. Its old bytes beyond are not valid.
    floor: u64,
    pages: BTreeMap<u64, Vec<u8>>,
    operations: Vec<StagedOperation>,
}

#[derive(Debug)]
enum StagedOperation {
    Write(u64, Vec<u8>),
    Length(u64),
    Sync,
}

impl StagedFile {
    pub(super) fn new(file: FileBackend) -> io::Result<StagedFile> {
        let len = file.len()?;
        let held = StagedWrites {
            len,
            floor: len,
            pages: BTreeMap::new(),
            operations: Vec::new(),
        };
        Ok(StagedFile(Arc::new(StagedFileInner {
            file,
            staged: Mutex::new(Some(held)),
            failed: Mutex::default(),
        })))
    }

    /// Returns the error after which the file cannot be trusted, if there was one.
    pub(super) fn failed(&self) -> io::Result<()> {
        match &*self.0.failed.lock() {
            Some((kind, words)) => Err(io::Error::new(*kind, words.clone())),
            None => Ok(()),
        }
    }

    /// Runs an operation unless one failed before, and remembers its error.
    fn attempt(&self, f: impl FnOnce(&FileBackend) -> io::Result<()>) -> io::Result<()> {
        self.failed()?;
        f(&self.0.file).inspect_err(|error| {
            *self.0.failed.lock() = Some((error.kind(), error.to_string()));
        })
    }

    /// Applies the staged writes to the file; later writes go to the file directly.
    pub(super) fn apply_staged(&self) -> io::Result<()> {
        let mut held = self.0.staged.lock();
        for done in held.take().into_iter().flat_map(|held| held.operations) {
            match done {
                StagedOperation::Write(at, bytes) => self.attempt(|file| file.write(at, &bytes))?,
                StagedOperation::Length(len) => self.attempt(|file| file.set_len(len))?,
                StagedOperation::Sync => self.attempt(FileBackend::sync_data)?,
            }
        }
        Ok(())
    }
}

impl StagedWrites {
    /// The current content of a page, from the staged writes or the file.
    fn page(&self, file: &FileBackend, number: u64) -> io::Result<Vec<u8>> {
        if let Some(page) = self.pages.get(&number) {
            return Ok(page.clone());
        }
        let at = number * PAGE_BYTES;
        let there = self.floor.saturating_sub(at).min(PAGE_BYTES);
        let mut page = vec![0; PAGE_BYTES as usize];
        file.read(at, &mut page[..there as usize])?;
        if number == 0 {
            prefer_the_newer_slot(&mut page);
        }
        Ok(page)
    }

    fn each_page(
        &self,
        at: u64,
        len: usize,
        mut f: impl FnMut(u64, std::ops::Range<usize>, std::ops::Range<usize>) -> io::Result<()>,
    ) -> io::Result<()> {
        let end = at + len as u64;
        if end > self.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut from = at;
        while from < end {
            let number = from / PAGE_BYTES;
            let to = end.min((number + 1) * PAGE_BYTES);
            let inside = (from % PAGE_BYTES) as usize;
            let taken = (to - from) as usize;
            let outside = (from - at) as usize;
            f(number, inside..inside + taken, outside..outside + taken)?;
            from = to;
        }
        Ok(())
    }
}

/// If the inactive slot is the newer one, makes the store decide by their checksums.
fn prefer_the_newer_slot(header: &mut [u8]) {
    let id = |slot: usize| {
        let at = SLOT_IDS_AT[slot];
        let bytes = header[at..at + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    };
    let counts = usize::from(header[FLAGS_AT] & FLAG_SECOND_SLOT);
    if id(1 - counts) > id(counts) {
        header[FLAGS_AT] &= !FLAG_TWO_PHASES;
    }
}

impl StorageBackend for StagedFile {
    fn len(&self) -> io::Result<u64> {
        match &*self.0.staged.lock() {
            Some(held) => Ok(held.len),
            None => self.0.file.len(),
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let held = self.0.staged.lock();
        let Some(held) = &*held else {
            return self.0.file.read(offset, out);
        };
        held.each_page(offset, out.len(), |number, inside, outside| {
            let page = held.page(&self.0.file, number)?;
            out[outside].copy_from_slice(&page[inside]);
            Ok(())
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut held = self.0.staged.lock();
        let Some(held) = &mut *held else {
            return self.attempt(|file| file.set_len(len));
        };
        held.operations.push(StagedOperation::Length(len));
        held.len = len;
        if len < held.floor {
            held.floor = len;
        }
        // If the file grows again, bytes beyond its length are zero.
        held.pages.retain(|number, _| number * PAGE_BYTES < len);
        if let Some(page) = held.pages.get_mut(&(len / PAGE_BYTES)) {
            page[(len % PAGE_BYTES) as usize..].fill(0);
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        match &mut *self.0.staged.lock() {
            Some(held) => held.operations.push(StagedOperation::Sync),
            None => return self.attempt(FileBackend::sync_data),
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut held = self.0.staged.lock();
        let Some(held) = &mut *held else {
            return self.attempt(|file| file.write(offset, data));
        };
        held.len = held.len.max(offset + data.len() as u64);
        let mut written = Vec::new();
        held.each_page(offset, data.len(), |number, inside, outside| {
            let mut page = held.page(&self.0.file, number)?;
            page[inside].copy_from_slice(&data[outside]);
            written.push((number, page));
            Ok(())
        })?;
        held.pages.extend(written);
        held.operations
            .push(StagedOperation::Write(offset, data.to_vec()));
        Ok(())
    }

    fn close(&self) -> io::Result<()> {
        self.0.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.file.try_lock_range(start, end)
    }

    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.0.file.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.file.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.file.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.file.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.file.query_lock_range(start, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng as _, SeedableRng as _};
    use rand_pcg::Pcg32;

    #[test]
    fn what_is_read_is_what_was_written_before_and_after_it_is_believed() {
        let file = tempfile::tempfile().unwrap();
        let again = file.try_clone().unwrap();
        FileBackend::new(again).unwrap().set_len(10_000).unwrap();
        let plain = file.try_clone().unwrap();
        let cautious = StagedFile::new(FileBackend::new(file).unwrap()).unwrap();
        let mut model = vec![0; 10_000];
        let mut draw = Pcg32::seed_from_u64(0);
        for n in 0..200u64 {
            let at = draw.random_range(0..12_000);
            if n % 7 == 0 {
                cautious.set_len(at).unwrap();
                model.resize(at as usize, 0);
            } else if at < model.len() as u64 {
                let most = (model.len() - at as usize).min(5_000);
                let bytes = vec![n as u8; most];
                cautious.write(at, &bytes).unwrap();
                model[at as usize..at as usize + most].copy_from_slice(&bytes);
            }
            let mut read = vec![0; model.len()];
            cautious.read(0, &mut read).unwrap();
            assert!(read == model, "step {n}");
            assert!(cautious.read(1, &mut read).is_err(), "beyond the end");
        }
        let len = |file: &std::fs::File| file.metadata().unwrap().len();
        assert_eq!(len(&plain), 10_000, "nothing was done to the file");
        cautious.apply_staged().unwrap();
        assert_eq!(len(&plain), model.len() as u64);
        let mut read = vec![0; model.len()];
        cautious.read(0, &mut read).unwrap();
        assert!(read == model);
    }
}
