//! The bytes of one fetched object, readable at any offset while they still arrive.
//!
//! ```text
//!  one writer ── append ──▶ ┌ memory: 64 kB blocks ┐ ── poll_read_at ──▶ any number of readers
//!                           └ or a file, no name   ┘
//! ```
//!
//! An object begins in memory and moves to a file that was never given a name (so it is gone with
//! the process, however that ends) once it outgrows its share or memory is full. Bytes are counted
//! in the [`QuotaLedger`] before they are stored; an object of known size is counted whole at the
//! start, so that it cannot fail half-way for want of room.
//!
//! A read from the file happens in the caller's poll, at most [`READ_BYTES_MAX`] at once: usually
//! the page cache has it. Not done here: reading cold bytes on another thread.

mod spool_file;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use d2tp_driver::HostKey;
use parking_lot::Mutex;

use crate::quota_ledger::{QuotaExceeded, QuotaLedger, StorageTier};
use d2tp_driver::ResetCause;

pub(crate) use spool_file::{RestoredBody, SpoolFile};

/// Size of a memory block.
const BLOCK_BYTES: usize = 64 * 1024;
/// The maximum number of bytes one read returns.
const READ_BYTES_MAX: usize = 64 * 1024;

/// How often one reader of an object may wait at once: its flow, and those that watch it. A guess.
const WAKERS_PER_READER: usize = 4;
/// Wakers of readers that are gone which an object keeps before it forgets them. A guess.
const STALE_WAKERS_MAX: usize = 64;

/// Why bytes could not be stored.
#[derive(Debug)]
pub(crate) enum SpoolError {
    /// A limit of the ledger is reached.
    Full(QuotaExceeded),
    /// The disk refused a read or write.
    Disk(io::Error),
}

/// The state of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpoolStatus {
    Growing,
    Complete,
    Failed(ResetCause),
}

/// The extent of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpoolExtent {
    /// Bytes that are stored.
    pub(crate) have: u64,
    /// The size of the object, once known.
    pub(crate) total: Option<u64>,
    /// Whether more will come.
    pub(crate) status: SpoolStatus,
}

/// The bytes of one object.
#[derive(Debug)]
pub(crate) struct SpooledBody {
    ledger: Arc<QuotaLedger>,
    state_dir: PathBuf,
    memory_max: u64,
    /// The object's named file, if it has one.
    named_file: Option<SpoolFile>,
    state: Mutex<SpoolState>,
}

#[derive(Debug)]
struct SpoolState {
    /// Whom the bytes are charged to.
    client: HostKey,
    store: SpoolStorage,
    len: u64,
    /// Bytes counted in the ledger for the storage tier of `store`; never less than `len`.
    counted: u64,
    total: Option<u64>,
    status: SpoolStatus,
    /// Readers that wait, by the addresses that make up their wakers: a reader that is polled again waits once.
    waiting: HashMap<(usize, usize), Waker>,
    /// Bytes of a named file for which a sync was requested.
    synced: u64,
    /// When that was, or when the object began.
    synced_at: Instant,
    /// Whether the copy store knows that the object is complete.
    noted: bool,
    /// Bytes of which the bucket of copies knows.
    in_bucket: u64,
    /// Whether file and count remain when the object is removed from memory.
    stays: bool,
}

#[derive(Debug)]
enum SpoolStorage {
    Memory { blocks: Vec<Bytes>, tail: BytesMut },
    Disk(Arc<File>),
}

impl SpoolStorage {
    fn place(&self) -> StorageTier {
        match self {
            SpoolStorage::Memory { .. } => StorageTier::Memory,
            SpoolStorage::Disk(_) => StorageTier::Disk,
        }
    }
}

impl SpooledBody {
    /// An empty object of `total` bytes, if known. `memory_max` bytes of it may stay in memory.
    pub(crate) fn new(
        ledger: Arc<QuotaLedger>,
        client: HostKey,
        state_dir: PathBuf,
        memory_max: u64,
        total: Option<u64>,
        home: Option<SpoolFile>,
    ) -> Result<SpooledBody, SpoolError> {
        let mut store = SpoolStorage::Memory {
            blocks: Vec::new(),
            tail: BytesMut::new(),
        };
        let counted = total.unwrap_or(0);
        let in_memory = counted <= memory_max && home.is_none();
        match if in_memory {
            ledger.reserve(client, StorageTier::Memory, counted)
        } else {
            Err(QuotaExceeded::Memory)
        } {
            Ok(()) => {}
            Err(QuotaExceeded::Memory) => {
                ledger
                    .reserve(client, StorageTier::Disk, counted)
                    .map_err(SpoolError::Full)?;
                let file = match &home {
                    Some(home) => home.copy_store.create(home.id),
                    None => nameless(&state_dir),
                };
                match file {
                    Ok(file) => store = SpoolStorage::Disk(Arc::new(file)),
                    Err(error) => {
                        ledger.release(client, StorageTier::Disk, counted);
                        return Err(SpoolError::Disk(error));
                    }
                }
            }
            Err(full) => return Err(SpoolError::Full(full)),
        }
        let state = SpoolState {
            client,
            store,
            len: 0,
            counted,
            total,
            status: SpoolStatus::Growing,
            waiting: HashMap::new(),
            synced: 0,
            synced_at: Instant::now(),
            noted: false,
            in_bucket: 0,
            stays: false,
        };
        Ok(SpooledBody {
            ledger,
            state_dir,
            memory_max,
            named_file: home,
            state: Mutex::new(state),
        })
    }

    /// Appends bytes. There is one writer.
    pub(crate) async fn append(self: &Arc<SpooledBody>, bytes: Bytes) -> Result<(), SpoolError> {
        if bytes.is_empty() {
            return Ok(());
        }
        if self.count(bytes.len() as u64)? == StorageTier::Memory {
            self.state.lock().remember(&bytes);
            self.wake();
            return Ok(());
        }
        let pin = self.clone();
        tokio::task::spawn_blocking(move || pin.write(&bytes))
            .await
            .map_err(|error| SpoolError::Disk(io::Error::other(error)))?
            .map_err(SpoolError::Disk)?;
        self.wake();
        self.sync_growing();
        self.send_to_bucket();
        Ok(())
    }

    /// Marks the object as complete.
    pub(crate) fn finish(self: &Arc<SpooledBody>) {
        let mut state = self.state.lock();
        state.status = SpoolStatus::Complete;
        state.total = Some(state.len);
        drop(state);
        self.wake();
        self.sync_complete();
        self.send_to_bucket();
    }

    /// Marks the object as failed.
    pub(crate) fn fail(&self, cause: ResetCause) {
        self.state.lock().status = SpoolStatus::Failed(cause);
        self.wake();
    }

    /// Whom the bytes are charged to.
    pub(crate) fn client(&self) -> HostKey {
        self.state.lock().client
    }

    /// Charges the bytes to another client.
    pub(crate) fn charge_to(&self, client: HostKey) -> Result<(), QuotaExceeded> {
        let mut state = self.state.lock();
        self.ledger.transfer(state.client, client, state.counted)?;
        state.client = client;
        Ok(())
    }

    /// Gives back what was counted for bytes that may never come. Should they come, they are counted again.
    pub(crate) fn release_unused(&self) {
        let mut state = self.state.lock();
        let unused = state.counted.saturating_sub(state.len);
        self.ledger
            .release(state.client, state.store.place(), unused);
        state.counted -= unused;
    }

    /// The extent of the object.
    pub(crate) fn extent(&self) -> SpoolExtent {
        let state = self.state.lock();
        SpoolExtent {
            have: state.len,
            total: state.total,
            status: state.status,
        }
    }

    /// Ready when more than `bytes` are stored or no more will come.
    pub(crate) async fn wait_beyond(&self, bytes: u64) -> SpoolExtent {
        std::future::poll_fn(|cx| {
            let mut state = self.state.lock();
            if state.len > bytes || state.status != SpoolStatus::Growing {
                let extent = SpoolExtent {
                    have: state.len,
                    total: state.total,
                    status: state.status,
                };
                return Poll::Ready(extent);
            }
            state.wait(cx);
            Poll::Pending
        })
        .await
    }

    /// Ready with the cause if the object fails before it has `end` bytes; else never ready.
    pub(crate) async fn failed_before(&self, end: Option<u64>) -> ResetCause {
        let last = end.map_or(u64::MAX, |end| end.saturating_sub(1));
        loop {
            let extent = self.wait_beyond(last).await;
            match extent.status {
                SpoolStatus::Failed(cause) if extent.have <= last => return cause,
                _ => std::future::pending().await,
            }
        }
    }

    /// Reads at most `max` bytes at `offset`; see `d2tp_driver::Source`.
    pub(crate) fn poll_read_at(
        &self,
        cx: &mut Context<'_>,
        offset: u64,
        max: usize,
    ) -> Poll<Result<Bytes, SpoolReadError>> {
        let max = max.min(READ_BYTES_MAX);
        let mut state = self.state.lock();
        let left = state.len.saturating_sub(offset);
        if left == 0 {
            return match state.status {
                SpoolStatus::Complete => Poll::Ready(Ok(Bytes::new())),
                SpoolStatus::Failed(cause) => Poll::Ready(Err(SpoolReadError::Failed(cause))),
                SpoolStatus::Growing => {
                    state.wait(cx);
                    Poll::Pending
                }
            };
        }
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(max);
        let file = match &state.store {
            SpoolStorage::Memory { blocks, tail } => {
                return Poll::Ready(Ok(from_memory(blocks, tail, offset, want)));
            }
            SpoolStorage::Disk(file) => file.clone(),
        };
        drop(state);
        let mut bytes = BytesMut::zeroed(want);
        Poll::Ready(match file.read_exact_at(&mut bytes, offset) {
            Ok(()) => Ok(bytes.freeze()),
            Err(error) => Err(SpoolReadError::Disk(error)),
        })
    }

    /// Wakes every waiting reader.
    pub(crate) fn wake(&self) {
        let waiting = std::mem::take(&mut self.state.lock().waiting);
        for waker in waiting.into_values() {
            waker.wake();
        }
    }

    /// Forgets the wakers of readers that are gone, if there are many more than `readers`: those that still wait are
    /// polled, and wait again.
    pub(crate) fn sweep(&self, readers: usize) {
        let waiting = self.state.lock().waiting.len();
        if waiting > STALE_WAKERS_MAX + WAKERS_PER_READER * readers {
            self.wake();
        }
    }

    /// Counts `more` bytes, in memory if possible, and returns their tier.
    fn count(&self, more: u64) -> Result<StorageTier, SpoolError> {
        let mut state = self.state.lock();
        let need = state.len + more;
        let place = state.store.place();
        let missing = need.saturating_sub(state.counted);
        if place == StorageTier::Memory && need > self.memory_max {
            return self.count_on_disk(&mut state, missing);
        }
        match self.ledger.reserve(state.client, place, missing) {
            Ok(()) => {
                state.counted += missing;
                Ok(place)
            }
            Err(QuotaExceeded::Memory) => self.count_on_disk(&mut state, missing),
            Err(full) => Err(SpoolError::Full(full)),
        }
    }

    /// Moves an object and its count to disk.
    fn count_on_disk(
        &self,
        state: &mut SpoolState,
        missing: u64,
    ) -> Result<StorageTier, SpoolError> {
        self.ledger
            .reserve(state.client, StorageTier::Disk, missing)
            .map_err(SpoolError::Full)?;
        let moved = self
            .ledger
            .spill(state.counted)
            .map_err(SpoolError::Full)
            .and_then(|()| {
                let file = nameless(&self.state_dir).and_then(|file| {
                    if let SpoolStorage::Memory { blocks, tail } = &state.store {
                        let mut at = 0;
                        for block in blocks.iter().map(|block| &block[..]).chain([&tail[..]]) {
                            file.write_all_at(block, at)?;
                            at += block.len() as u64;
                        }
                    }
                    Ok(file)
                });
                file.map_err(|error| {
                    self.ledger.unspill(state.counted);
                    SpoolError::Disk(error)
                })
            });
        match moved {
            Ok(file) => {
                state.store = SpoolStorage::Disk(Arc::new(file));
                state.counted += missing;
                Ok(StorageTier::Disk)
            }
            Err(fault) => {
                self.ledger
                    .release(state.client, StorageTier::Disk, missing);
                Err(fault)
            }
        }
    }

    /// Writes counted bytes to the file.
    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let (file, at) = {
            let state = self.state.lock();
            match &state.store {
                SpoolStorage::Disk(file) => (file.clone(), state.len),
                SpoolStorage::Memory { .. } => unreachable!("counted on disk, stored in memory"),
            }
        };
        file.write_all_at(bytes, at)?;
        self.state.lock().len = at + bytes.len() as u64;
        Ok(())
    }
}

impl SpoolState {
    fn remember(&mut self, mut bytes: &[u8]) {
        // A block is allocated for what will be in it: what is allocated is not counted, but what is stored.
        let left = self
            .total
            .map_or(u64::MAX, |total| total - self.len.min(total));
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        self.len += bytes.len() as u64;
        let SpoolStorage::Memory { blocks, tail } = &mut self.store else {
            unreachable!("counted in memory, stored on disk");
        };
        let mut left = left.saturating_add(tail.len());
        // Copied, not kept: a slice of the network buffer would hold all of that buffer.
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK_BYTES - tail.len()));
            let length = tail.len() + now.len();
            if length > tail.capacity() {
                // Exactly so much: a vector that grows by itself doubles beyond a block.
                let room = length.next_power_of_two().min(left).min(BLOCK_BYTES);
                let mut larger = BytesMut::with_capacity(room.max(length));
                larger.extend_from_slice(tail);
                *tail = larger;
            }
            tail.extend_from_slice(now);
            bytes = later;
            if tail.len() == BLOCK_BYTES {
                blocks.push(std::mem::take(tail).freeze());
                left = left.saturating_sub(BLOCK_BYTES);
            }
        }
    }

    fn wait(&mut self, cx: &mut Context<'_>) {
        let waker = cx.waker();
        let address = (
            waker.data().addr(),
            std::ptr::from_ref(waker.vtable()).addr(),
        );
        self.waiting.insert(address, waker.clone());
    }
}

impl Drop for SpooledBody {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if state.stays {
            return;
        }
        self.ledger
            .release(state.client, state.store.place(), state.counted);
        if let Some(home) = &self.named_file {
            let path = home.copy_store.path(home.id);
            // What is complete is recorded once more.
            if state.status != SpoolStatus::Complete || state.noted {
                home.copy_store.forget_version(home.id);
            }
            home.copy_store.remove(home.id);
            if let Some(bucket) = home.copy_store.node_bucket()
                && home.copy_store.is_open()
            {
                bucket.on_let_go(home.id, &path);
            }
        }
    }
}

/// Why a read failed.
#[derive(Debug)]
pub(crate) enum SpoolReadError {
    /// The object failed before these bytes arrived.
    Failed(ResetCause),
    /// The disk refused a read or write.
    Disk(io::Error),
}

/// A slice of a full block, or a copy from the growing one.
fn from_memory(blocks: &[Bytes], tail: &[u8], offset: u64, want: usize) -> Bytes {
    let (block, from) = (offset as usize / BLOCK_BYTES, offset as usize % BLOCK_BYTES);
    match blocks.get(block) {
        Some(block) => block.slice(from..block.len().min(from + want)),
        None => Bytes::copy_from_slice(&tail[from..tail.len().min(from + want)]),
    }
}

/// Creates a file without a name.
fn nameless(dir: &std::path::Path) -> io::Result<File> {
    tempfile::tempfile_in(dir)
}

#[cfg(test)]
mod tests {
    use futures_util::task::noop_waker;

    use super::*;
    use crate::client_limits::ClientLimitTable;
    use crate::config::ProxConfig;

    #[tokio::test]
    async fn wakers_of_readers_that_are_gone_are_forgotten() {
        let ledger = ledger(100, 0);
        let dir = std::env::temp_dir();
        let body = SpooledBody::new(ledger, CLIENT, dir, 100, None, None).unwrap();
        let wakers: Vec<_> = (0..200).map(|_| own_waker()).collect();
        for waker in &wakers {
            let mut cx = Context::from_waker(waker);
            assert!(body.poll_read_at(&mut cx, 0, 1).is_pending());
        }
        body.sweep(200);
        assert_eq!(body.state.lock().waiting.len(), 200);
        body.sweep(1);
        assert_eq!(body.state.lock().waiting.len(), 0);
    }

    /// A waker that is not the same as any other.
    fn own_waker() -> Waker {
        struct Alone;
        impl std::task::Wake for Alone {
            fn wake(self: Arc<Self>) {}
        }
        Arc::new(Alone).into()
    }

    const CLIENT: HostKey = [9; 32];

    fn ledger(memory: u64, disk: u64) -> Arc<QuotaLedger> {
        let config = ProxConfig {
            memory_quota_bytes: memory,
            disk_quota_bytes: disk,
            ..Default::default()
        };
        let clients = Arc::new(ClientLimitTable::new(&config));
        Arc::new(QuotaLedger::new(&config, clients, false))
    }

    fn pin(ledger: &Arc<QuotaLedger>, memory_max: u64, total: Option<u64>) -> Arc<SpooledBody> {
        let dir = std::env::temp_dir();
        Arc::new(SpooledBody::new(ledger.clone(), CLIENT, dir, memory_max, total, None).unwrap())
    }

    fn pattern(len: usize) -> Bytes {
        (0..len)
            .map(|i| (i * 31 + i / 256) as u8)
            .collect::<Vec<_>>()
            .into()
    }

    fn read_all(pin: &SpooledBody, step: usize) -> Vec<u8> {
        let waker = noop_waker();
        let mut cx = Context::from_waker(&waker);
        let mut bytes = Vec::new();
        while let Poll::Ready(Ok(part)) = pin.poll_read_at(&mut cx, bytes.len() as u64, step) {
            if part.is_empty() {
                break;
            }
            bytes.extend_from_slice(&part);
        }
        bytes
    }

    #[tokio::test]
    async fn what_is_read_is_what_was_written_in_memory_and_on_disk() {
        let data = pattern(300_001);
        for memory_max in [0, 1, 65_536, 100_000, 1 << 20] {
            let ledger = ledger(1 << 20, 1 << 20);
            let pin = pin(&ledger, memory_max, None);
            for chunk in data.chunks(7_777) {
                pin.append(Bytes::copy_from_slice(chunk)).await.unwrap();
            }
            pin.finish();
            for step in [1_000, 65_536, 1 << 20] {
                assert!(
                    read_all(&pin, step) == data,
                    "memory_max {memory_max} step {step}"
                );
            }
            let len = data.len() as u64;
            let expected = if memory_max < len { (0, len) } else { (len, 0) };
            assert_eq!(ledger.pinned(), expected);
            drop(pin);
            assert_eq!(ledger.pinned(), (0, 0));
        }
    }

    /// The bytes that were allocated for an object in memory.
    fn allocated(pin: Arc<SpooledBody>) -> usize {
        let mut state = pin.state.lock();
        let SpoolStorage::Memory { blocks, tail } = &mut state.store else {
            panic!("it is on disk");
        };
        let of_blocks = blocks.drain(..).map(|block| {
            let block = block.try_into_mut().expect("nobody else reads it");
            block.capacity()
        });
        of_blocks.sum::<usize>() + tail.capacity()
    }

    #[tokio::test]
    async fn an_object_in_memory_is_allocated_as_it_is_counted() {
        for piece in [1, 1_000, 40_000, 65_536, 100_000] {
            for total in [40_000, 300_000] {
                let ledger = ledger(1 << 20, 0);
                let known = pin(&ledger, 1 << 20, Some(total as u64));
                let unknown = pin(&ledger, 1 << 20, None);
                for chunk in pattern(total).chunks(piece) {
                    for pin in [&known, &unknown] {
                        pin.append(Bytes::copy_from_slice(chunk)).await.unwrap();
                    }
                }
                assert!(read_all(&known, 1 << 20) == pattern(total));
                assert_eq!(allocated(known), total, "pieces of {piece}");
                // The last block of what has no known size is begun with room for more.
                let most = total.next_multiple_of(BLOCK_BYTES);
                assert!(allocated(unknown) <= most, "pieces of {piece}");
            }
        }
    }

    #[tokio::test]
    async fn an_object_spills_when_memory_is_full() {
        let ledger = ledger(1_000, 1 << 20);
        let pin = pin(&ledger, 1 << 20, None);
        pin.append(pattern(900)).await.unwrap();
        assert_eq!(ledger.pinned(), (900, 0));
        pin.append(pattern(200)).await.unwrap();
        assert_eq!(ledger.pinned(), (0, 1_100));
    }

    #[tokio::test]
    async fn a_full_disk_quota_is_said_and_nothing_stays_counted() {
        let ledger = ledger(100, 150);
        let pin = pin(&ledger, 100, None);
        pin.append(pattern(100)).await.unwrap();
        assert!(matches!(
            pin.append(pattern(51)).await,
            Err(SpoolError::Full(QuotaExceeded::Disk))
        ));
        assert_eq!(ledger.pinned(), (100, 0));
        pin.append(pattern(50)).await.unwrap();
        assert_eq!(ledger.pinned(), (0, 150));
        drop(pin);
        assert_eq!(ledger.pinned(), (0, 0));
    }

    #[test]
    fn a_known_size_is_counted_at_once_or_refused_at_once() {
        let ledger = ledger(100, 150);
        let _pin = pin(&ledger, 100, Some(100));
        assert_eq!(ledger.pinned(), (100, 0));
        let second = SpooledBody::new(
            ledger.clone(),
            CLIENT,
            std::env::temp_dir(),
            100,
            Some(151),
            None,
        );
        assert!(matches!(second, Err(SpoolError::Full(QuotaExceeded::Disk))));
    }

    #[test]
    fn a_state_directory_that_is_gone_is_a_disk_fault_and_is_not_counted() {
        let ledger = ledger(0, 150);
        let pin = SpooledBody::new(
            ledger.clone(),
            CLIENT,
            "/nonexistent".into(),
            100,
            Some(5),
            None,
        );
        assert!(matches!(pin, Err(SpoolError::Disk(_))));
        assert_eq!(ledger.pinned(), (0, 0));
    }

    #[tokio::test]
    async fn a_reader_ahead_of_the_writer_waits_and_is_woken() {
        let ledger = ledger(1 << 20, 0);
        let pin = pin(&ledger, 1 << 20, None);
        let reader = tokio::spawn({
            let pin = pin.clone();
            async move { std::future::poll_fn(|cx| pin.poll_read_at(cx, 5, 10)).await }
        });
        tokio::task::yield_now().await;
        pin.append(Bytes::from_static(b"0123456")).await.unwrap();
        assert_eq!(reader.await.unwrap().unwrap(), "56");
    }

    #[tokio::test]
    async fn a_failed_object_gives_what_it_has_and_then_the_cause() {
        let ledger = ledger(1 << 20, 0);
        let pin = pin(&ledger, 1 << 20, None);
        pin.append(Bytes::from_static(b"abc")).await.unwrap();
        pin.fail(ResetCause::OriginGone);
        let read = |offset| {
            let waker = noop_waker();
            pin.poll_read_at(&mut Context::from_waker(&waker), offset, 10)
        };
        assert!(matches!(read(0), Poll::Ready(Ok(bytes)) if bytes == "abc"));
        assert!(matches!(
            read(3),
            Poll::Ready(Err(SpoolReadError::Failed(ResetCause::OriginGone)))
        ));
        assert_eq!(pin.failed_before(Some(4)).await, ResetCause::OriginGone);
    }
}
