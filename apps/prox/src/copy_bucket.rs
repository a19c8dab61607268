//! Copies and bodies of uploads in an S3 bucket, so that they outlive the disk of this machine.
//!
//! ```text
//!  file of a copy ── 8 MiB more, or complete ──▶ work ── PUT PREFIX/<id>/<n>, If-None-Match: * ──▶ bucket
//!                                                  ▲ waits: 1 s, 2, … 60 s ◀── fails ──┘
//!  start ◀── GET PREFIX/<id>/0, 1, … ── for every copy with a note in the journal and no file here
//! ```
//!
//! Each part is an object of its own and not a part of a multipart upload, which nobody can read before its end: so
//! what is there of a growing copy can be read, by ranges too, and a write that is repeated changes nothing. The file
//! here stays what is read and written; a bucket that is slow, full or gone delays only itself, also at the start. What
//! waits is the ids of copies, which the quotas bound, and no open files.
//!
//! Objects whose note is gone are removed: with their copy, or once they are a day old. The object `PREFIX/proxy-key`
//! says whose the prefix is: proxies with other keys, and so with other notes, do not use it.
//!
//! Nodes that share a store of records share the bucket, too, and each has the files of what it serves now: a file goes
//! when its node has the copy no more and the bucket has all of it. The same part of a copy has the same bytes, whichever
//! node writes it: only a node that continues a copy with a strong validator writes parts that another may write too.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use d2tp_driver::PublicKey;
use futures_util::TryStreamExt;
use futures_util::future::join_all;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    ClientConfigKey, Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
    RetryConfig, UpdateVersion,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::Instant;

use crate::bucket_http::BucketConnector;
use crate::copy_store::CopyStore;

/// Bytes of a part. Of a copy that grows, fewer than these are not in the bucket yet.
pub(crate) const PART_BYTES: u64 = 8 << 20; // S3 has 5 MiB as the least for parts of its own.
/// Parts that are sent at once, each of which is in memory.
const PARTS_AT_ONCE: usize = 4;
/// Parts that are read at once, each of which is in memory until it is in its file.
const READS_AT_ONCE: usize = 8; // a guess: 64 MiB, while hundreds of flows wake
/// How long a bucket may be silent in the middle of an answer that a flow waits for. A guess.
const SILENT_FOR: Duration = Duration::from_secs(10);
/// How long a request may take, its body included. A guess: a part at 1 Mb/s, and its answer.
pub(crate) const REQUEST_WITHIN: Duration = Duration::from_secs(120);
/// How long work is collected: a copy that is delivered by then never goes to the bucket. A guess.
const COLLECT: Duration = Duration::from_millis(500);
/// The first and the longest wait after a failure.
pub(crate) const RETRY_WAIT: (Duration, Duration) =
    (Duration::from_secs(1), Duration::from_secs(60));
/// How long a start waits for the first answers of the bucket. A guess: five requests in turn.
pub(crate) const CHECK_WITHIN: Duration = Duration::from_secs(5);
/// The name of the object that says whose the prefix is.
const OWNER_NAME: &str = "proxy-key";
/// The most characters of another owner's name that a message has.
const OWNER_CHARS_MAX: usize = 96;
/// The most copies whose objects wait for removal; those of others go by their age.
const REMOVALS_MAX: usize = 65_536;
/// How old an object without a note must be before it is removed: its note may be on the way. A guess.
const ORPHAN_AGE: Duration = Duration::from_secs(24 * 3600);
/// How often objects without a note are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(3600);

/// Why a bucket cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CopyBucketError {
    /// The URL is not `s3://BUCKET/PREFIX`.
    #[error("`{0}` is no place for copies; it must be s3://BUCKET or s3://BUCKET/PREFIX")]
    Url(String),
    /// The settings in the environment make no sense.
    #[error(
        "the bucket of --copies cannot be used: {0}; check AWS_ENDPOINT_URL, AWS_REGION and the keys"
    )]
    Unusable(String),
    /// The endpoint has no TLS, and nobody allowed that.
    #[error(
        "the endpoint `{0}` of --copies has no TLS: keys and copies would be sent in clear; use https, or set \
         AWS_ALLOW_HTTP=true"
    )]
    InClear(String),
    /// The prefix is another proxy's.
    #[error(
        "the prefix of --copies is used by the proxy with the key {0}; give this one a prefix of its own, or remove the \
         object `{OWNER_NAME}` below the prefix if that proxy is gone"
    )]
    Taken(String),
    /// The server ignores conditions.
    #[error(
        "the server of --copies ignores {0} when it writes, so that proxies could overwrite each other's copies; use \
         one that knows conditional writes"
    )]
    Unconditional(&'static str),
}

/// Why the bucket was not found to be usable.
enum CheckFailure {
    /// The bucket must not be used.
    Refused(CopyBucketError),
    /// A request to the bucket failed, which a later one may not.
    Failed(Error),
}

impl From<Error> for CheckFailure {
    fn from(error: Error) -> CheckFailure {
        CheckFailure::Failed(error)
    }
}

/// The owner of a bucket's prefix, as the object there names it. A proxy with a journal of its own is another owner than nodes
/// with a store: it would remove what they have there.
pub(crate) fn bucket_owner(key: PublicKey, is_shared: bool) -> String {
    match is_shared {
        true => format!("{key} with --store"),
        false => key.to_string(),
    }
}

/// What the bucket waits for, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyBucketStatus {
    /// Copies that are not in the bucket yet as far as they are here.
    pub waiting: usize,
    /// The cause of the last failure; none if the last request succeeded.
    pub failing: Option<String>,
}

/// Stores copies and uploads as objects of a bucket (S3).
#[derive(Debug)]
pub(crate) struct CopyBucket {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    work: Mutex<BucketWork>,
    news: Notify,
    /// A permit for each part that is read at once.
    reads: Semaphore,
}

#[derive(Debug, Default)]
struct BucketWork {
    /// Whether the bucket has passed its checks.
    is_checked: bool,
    /// Whether the parts of copies of earlier processes are known.
    is_listed: bool,
    copies: HashMap<u64, BucketCopy>,
    /// The parts of copies of earlier processes that this one has not named yet.
    earlier: HashMap<u64, u64>,
    removals: BTreeSet<u64>,
    failing: Option<String>,
}

/// A copy of this process that goes to the bucket.
#[derive(Debug)]
struct BucketCopy {
    /// Which file of the copy has the bytes: 0 but where nodes take copies over from each other.
    version: u64,
    have: u64,
    is_complete: bool,
    /// Whether the process has the copy no more, so that its file goes once the bucket has all of it.
    is_let_go: bool,
    /// Parts that are in the bucket.
    parts: u64,
    /// How often a part of it could not be sent.
    failures: u32,
}

/// A part of a copy that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DuePart {
    id: u64,
    /// Which file of the copy has the bytes.
    version: u64,
    part: u64,
    length: u64,
}

impl BucketWork {
    /// The entry of a copy whose bytes are in the file with this version. Another version is another file: what the
    /// bucket has stays.
    fn copy(&mut self, id: u64, version: u64) -> &mut BucketCopy {
        let earlier = &mut self.earlier;
        let copy = self.copies.entry(id).or_insert_with(|| BucketCopy {
            version,
            have: 0,
            is_complete: false,
            is_let_go: false,
            parts: earlier.remove(&id).unwrap_or(0),
            failures: 0,
        });
        if copy.version != version {
            copy.version = version;
            copy.have = 0;
            copy.is_complete = false;
        }
        copy.is_let_go = false;
        copy
    }
}

impl BucketCopy {
    /// The next part that can be sent: its number and its length.
    fn next_part(&self) -> Option<(u64, u64)> {
        let left = self.have - (self.parts * PART_BYTES).min(self.have);
        match left {
            PART_BYTES.. => Some((self.parts, PART_BYTES)),
            1.. if self.is_complete => Some((self.parts, left)),
            _ => None,
        }
    }
}

impl CopyBucket {
    /// The bucket of `s3://BUCKET/PREFIX`, with endpoint and credentials from the environment (`AWS_…`). Nothing is
    /// asked of it yet.
    pub(crate) fn new(
        url: &str,
        tls: Arc<rustls::ClientConfig>,
    ) -> Result<CopyBucket, CopyBucketError> {
        let wrong = || CopyBucketError::Url(url.to_owned());
        let place = url.strip_prefix("s3://").ok_or_else(wrong)?;
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let prefix = Path::parse(prefix.trim_end_matches('/')).map_err(|_| wrong())?;
        if bucket.is_empty() {
            return Err(wrong());
        }
        let builder = AmazonS3Builder::from_env();
        let of = |key| builder.get_config_value(&key);
        let allows_http = of(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
        if let Some(endpoint) = of(AmazonS3ConfigKey::Endpoint)
            && endpoint.to_ascii_lowercase().starts_with("http:")
            && allows_http.as_deref() != Some("true")
        {
            return Err(CopyBucketError::InClear(endpoint));
        }
        let store = builder
            .with_bucket_name(bucket)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_http_connector(BucketConnector { tls })
            // Failures are waited out here, where it can be said.
            .with_retry(RetryConfig {
                max_retries: 1,
                retry_timeout: Duration::from_secs(30),
                ..RetryConfig::default()
            })
            .build()
            .map_err(|error| CopyBucketError::Unusable(error.to_string()))?;
        Ok(CopyBucket {
            store: Arc::new(store),
            prefix,
            work: Mutex::default(),
            news: Notify::new(),
            reads: Semaphore::new(READS_AT_ONCE),
        })
    }

    /// Whether the bucket has answered as it must.
    pub(crate) fn is_checked(&self) -> bool {
        self.work.lock().is_checked
    }

    /// Checks that the prefix is free or belongs to `owner`, and that the server honours conditions. A bucket that does
    /// not answer `within` that time, or answers with an error, is checked again later.
    ///
    /// # Errors
    /// The bucket must not be used.
    pub(crate) async fn check(&self, owner: &str, within: Duration) -> Result<(), CopyBucketError> {
        let done = match tokio::time::timeout(within, self.check_now(owner)).await {
            Ok(Ok(())) => {
                self.work.lock().is_checked = true;
                Ok(())
            }
            Ok(Err(CheckFailure::Failed(error))) => Err(error),
            Ok(Err(CheckFailure::Refused(error))) => return Err(error),
            Err(late) => Err(Error::Generic {
                store: "bucket of copies",
                source: late.into(),
            }),
        };
        self.report(&done);
        Ok(())
    }

    async fn check_now(&self, owner: &str) -> Result<(), CheckFailure> {
        self.check_owner(owner).await?;
        let random = getrandom::u64().expect("the system has randomness");
        let at = self.prefix.clone().join(format!("check-{random:016x}"));
        let put = |text: &'static [u8], mode| {
            let options = PutOptions::from(mode);
            (self.store).put_opts(&at, PutPayload::from_static(text), options)
        };
        let first = put(b"1", PutMode::Create).await?;
        let again = put(b"2", PutMode::Create).await;
        let second = put(b"3", PutMode::Update(first.clone().into())).await;
        let stale = put(b"4", PutMode::Update(UpdateVersion::from(first))).await;
        self.store.delete(&at).await?;
        let ignores = |what| Err(CheckFailure::Refused(CopyBucketError::Unconditional(what)));
        match (again, stale) {
            (Ok(_), _) => return ignores("If-None-Match: *"),
            (_, Ok(_)) => return ignores("If-Match"),
            (Err(Error::AlreadyExists { .. }), Err(Error::Precondition { .. })) => {}
            (Err(error), Err(Error::Precondition { .. })) | (_, Err(error)) => {
                return Err(error.into());
            }
        }
        second?;
        Ok(())
    }

    /// Takes the prefix for the proxy with this key, unless another has it.
    async fn check_owner(&self, owner: &str) -> Result<(), CheckFailure> {
        let at = self.prefix.clone().join(OWNER_NAME);
        let text = PutPayload::from(Bytes::copy_from_slice(owner.as_bytes()));
        let created = (self.store)
            .put_opts(&at, text, PutOptions::from(PutMode::Create))
            .await;
        match created {
            Ok(_) => return Ok(()),
            Err(Error::AlreadyExists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let theirs = self.store.get(&at).await?.bytes().await?;
        match theirs == owner.as_bytes() {
            true => Ok(()),
            false => {
                let theirs = String::from_utf8_lossy(&theirs)
                    .chars()
                    .take(OWNER_CHARS_MAX)
                    .collect();
                Err(CheckFailure::Refused(CopyBucketError::Taken(theirs)))
            }
        }
    }

    fn copy_prefix(&self, id: u64) -> Path {
        self.prefix.clone().join(format!("{id:016x}"))
    }

    fn part_path(&self, id: u64, part: u64) -> Path {
        self.copy_prefix(id).join(format!("{part:08}"))
    }

    /// The file with this version of a copy has `have` bytes.
    pub(crate) fn on_growth(&self, id: u64, version: u64, have: u64, is_complete: bool) {
        let mut work = self.work.lock();
        let copy = work.copy(id, version);
        copy.have = copy.have.max(have);
        copy.is_complete |= is_complete;
        if copy.next_part().is_some() {
            self.news.notify_one(); // It takes no lock.
        }
    }

    /// The first `parts` parts of a copy were read from the bucket into the file with this version.
    pub(crate) fn on_parts_read(&self, id: u64, version: u64, parts: u64) {
        let mut work = self.work.lock();
        let copy = work.copy(id, version);
        copy.parts = copy.parts.max(parts);
    }

    /// Whether the bucket has all of a copy that is complete here.
    pub(crate) fn has_all(&self, id: u64) -> bool {
        let work = self.work.lock();
        let copy = work.copies.get(&id);
        copy.is_some_and(|copy| copy.is_complete && copy.next_part().is_none())
    }

    /// This process has the copy no more, and other nodes may read it: its file at `path` goes once the bucket has all
    /// that is complete of it.
    pub(crate) fn on_let_go(&self, id: u64, path: &FilePath) {
        let mut work = self.work.lock();
        if let Some(copy) = work.copies.get_mut(&id)
            && copy.is_complete
            && copy.next_part().is_some()
        {
            copy.is_let_go = true;
            return;
        }
        work.copies.remove(&id);
        remove_file(path);
    }

    /// A copy is no longer wanted.
    pub(crate) fn on_removal(&self, id: u64) {
        let mut work = self.work.lock();
        let known = work.copies.remove(&id);
        // One of which nothing was sent has no objects; what is being sent is removed when that has ended. What failed may
        // have arrived.
        let may_be_there = |copy: BucketCopy| copy.parts > 0 || copy.failures > 0;
        let has_objects = !work.is_listed || known.is_none_or(may_be_there);
        if has_objects && work.removals.len() < REMOVALS_MAX {
            work.removals.insert(id);
            self.news.notify_one();
        }
    }

    /// What waits, and why.
    pub(crate) fn status(&self) -> CopyBucketStatus {
        let work = self.work.lock();
        let waits = |copy: &&BucketCopy| copy.next_part().is_some();
        CopyBucketStatus {
            waiting: work.copies.values().filter(waits).count(),
            failing: work.failing.clone(),
        }
    }

    /// Writes the parts of a copy that are in the bucket to a file, and returns their bytes; none if there are none.
    pub(crate) async fn fetch(&self, id: u64, to: &FilePath) -> io::Result<Option<u64>> {
        let staged = to.with_extension("fetched");
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&staged)?;
        let mut have = 0;
        for part in 0.. {
            let _permit = self.until_may_read().await;
            let read = self.read_awaited_part(id, part).await;
            let Some(bytes) = read.map_err(io::Error::other)? else {
                break;
            };
            have += bytes.len() as u64;
            let is_last = (bytes.len() as u64) < PART_BYTES;
            file = tokio::task::spawn_blocking(move || file.write_all(&bytes).map(|()| file))
                .await
                .map_err(io::Error::other)??;
            if is_last {
                break;
            }
        }
        if have == 0 {
            std::fs::remove_file(&staged)?;
            return Ok(None);
        }
        tokio::task::spawn_blocking(move || file.sync_data())
            .await
            .map_err(io::Error::other)??;
        std::fs::rename(&staged, to)?;
        Ok(Some(have))
    }

    /// Waits for a permit to read a part, which is held until the part is in its file.
    pub(crate) async fn until_may_read(&self) -> SemaphorePermit<'_> {
        self.reads.acquire().await.expect("it is never closed")
    }

    /// The bytes of a part that a flow or a start waits for; none if the bucket has no such part. A bucket that falls
    /// silent fails sooner than where nobody waits.
    ///
    /// # Errors
    /// The bucket does not answer, or with an error.
    pub(crate) async fn read_awaited_part(
        &self,
        id: u64,
        part: u64,
    ) -> object_store::Result<Option<Bytes>> {
        let path = self.part_path(id, part);
        let found = match within(SILENT_FOR, self.store.get(&path)).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = BytesMut::new();
        let mut pieces = found.into_stream();
        while let Some(piece) = within(SILENT_FOR, pieces.try_next()).await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(Some(bytes.freeze()))
    }

    /// Sends what waits, and removes what is no longer wanted, as long as `copy_store` exists.
    pub(crate) async fn work(self: Arc<CopyBucket>, copy_store: Weak<CopyStore>) {
        let mut wait = RETRY_WAIT.0;
        let mut sweep_at = Instant::now();
        loop {
            let _ = tokio::time::timeout_at(sweep_at, self.news.notified()).await;
            let Some(known) = copy_store.upgrade() else {
                return;
            };
            tokio::time::sleep(COLLECT).await;
            let mut done = match known.shared() {
                None => self.find_earlier_parts().await,
                // Those of all nodes are there: what a copy has is found when the copy is read or written.
                Some(_) => {
                    self.work.lock().is_listed = true;
                    Ok(())
                }
            };
            if done.is_ok() {
                done = self.send_all(&known, sweep_at).await;
            }
            if Instant::now() >= sweep_at {
                let swept = self.sweep(&known).await;
                let next = if swept.is_ok() {
                    SWEEP_EVERY
                } else {
                    RETRY_WAIT.1
                };
                sweep_at = Instant::now() + next;
                done = done.and(swept);
            }
            drop(known);
            self.report(&done);
            match done {
                Ok(()) => wait = RETRY_WAIT.0,
                Err(_) => {
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(RETRY_WAIT.1);
                    self.news.notify_one();
                }
            }
        }
    }

    /// Says once that the bucket fails, and once that it works again.
    pub(crate) fn report<E: std::fmt::Display>(&self, done: &Result<(), E>) {
        let failing = done.as_ref().err().map(ToString::to_string);
        let before = std::mem::replace(&mut self.work.lock().failing, failing.clone());
        match (before, failing) {
            (None, Some(error)) => {
                tracing::error!(
                    error,
                    "the bucket of copies fails: they go on from the disk, and are sent later"
                );
            }
            (Some(_), None) => tracing::info!("the bucket of copies works again"),
            _ => {}
        }
    }

    /// Sends what waits and removes what is no longer wanted: until `until`, but at least once. What fails is left for
    /// the next time, and the rest goes on.
    async fn send_all(&self, copy_store: &CopyStore, until: Instant) -> object_store::Result<()> {
        let mut failed: HashSet<u64> = HashSet::new();
        let mut first = None;
        loop {
            let (parts, removals) = self.next_round(&failed);
            if parts.is_empty() && removals.is_empty() {
                break;
            }
            let sent = parts.into_iter().map(|due| async move {
                let path = copy_store.path_of_version(due.id, due.version);
                (due.id, self.send_part(&due, path).await)
            });
            let removed = removals.into_iter().map(|id| async move {
                let removed = self.remove_objects(id).await;
                if removed.is_ok() {
                    self.work.lock().removals.remove(&id);
                }
                (id, removed)
            });
            let (sent, removed) = tokio::join!(join_all(sent), join_all(removed));
            let mut has_worked = false;
            for (id, done) in sent.into_iter().chain(removed) {
                match done {
                    Ok(()) => has_worked = true,
                    Err(error) => {
                        failed.insert(id);
                        if let Some(copy) = self.work.lock().copies.get_mut(&id) {
                            copy.failures = copy.failures.saturating_add(1);
                        }
                        first.get_or_insert(error);
                    }
                }
            }
            if !has_worked {
                break;
            }
            if Instant::now() >= until {
                self.news.notify_one(); // There may be more.
                break;
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// The copies to upload and to remove next: none that have just `failed`, and last those that failed most often.
    /// While the objects of a copy are being removed, no part of it is sent: one that arrives after they were listed would
    /// stay.
    fn next_round(&self, failed: &HashSet<u64>) -> (Vec<DuePart>, Vec<u64>) {
        let work = self.work.lock();
        let is_out = |id| failed.contains(id) || work.removals.contains(id);
        let waiting = work.copies.iter().filter(|(id, _)| !is_out(*id));
        let mut parts: Vec<_> = waiting
            .filter_map(|(id, copy)| {
                let (part, length) = copy.next_part()?;
                let due = DuePart {
                    id: *id,
                    version: copy.version,
                    part,
                    length,
                };
                Some((copy.failures, due))
            })
            .collect();
        parts.sort_unstable_by_key(|(failures, due)| (*failures, due.id));
        parts.truncate(PARTS_AT_ONCE);
        let removals = work.removals.iter().filter(|id| !failed.contains(id));
        (
            parts.into_iter().map(|(_, part)| part).collect(),
            removals.take(PARTS_AT_ONCE).copied().collect(),
        )
    }

    async fn send_part(&self, due: &DuePart, file: PathBuf) -> object_store::Result<()> {
        let DuePart {
            id,
            version,
            part,
            length,
        } = *due;
        let from = file.clone();
        let read = move || {
            let mut bytes = vec![0; length as usize];
            File::open(from)?.read_exact_at(&mut bytes, part * PART_BYTES)?;
            Ok::<_, io::Error>(bytes)
        };
        let failed = |source: io::Error| Error::Generic {
            store: "file of a copy",
            source: source.into(),
        };
        let bytes = match tokio::task::spawn_blocking(read).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                // It was removed meanwhile.
                let mut work = self.work.lock();
                if work.copies.get(&id).is_some_and(|c| c.version == version) {
                    work.copies.remove(&id);
                }
                return Ok(());
            }
            Ok(Err(error)) => return Err(failed(error)),
            Err(panic) => return Err(failed(io::Error::other(panic))),
        };
        let (path, options) = (self.part_path(id, part), PutOptions::from(PutMode::Create));
        match in_time(self.store.put_opts(&path, bytes.into(), options)).await {
            // An earlier attempt has arrived: the same part of a copy has the same bytes.
            Ok(_) | Err(Error::AlreadyExists { .. }) => {}
            Err(error) => {
                let mut work = self.work.lock();
                if !work.copies.contains_key(&id) {
                    // It was removed meanwhile, and may have arrived all the same.
                    work.removals.insert(id);
                }
                return Err(error);
            }
        }
        let mut work = self.work.lock();
        match work.copies.get_mut(&id) {
            Some(copy) => {
                copy.parts = copy.parts.max(part + 1);
                copy.failures = 0;
                if copy.is_let_go && copy.next_part().is_none() {
                    work.copies.remove(&id);
                    remove_file(&file);
                }
            }
            // It was removed meanwhile.
            None => drop(work.removals.insert(id)),
        }
        Ok(())
    }

    async fn remove_objects(&self, id: u64) -> object_store::Result<()> {
        let prefix = self.copy_prefix(id);
        let found = self
            .store
            .list(Some(&prefix))
            .map_ok(|object| object.location);
        let paths: Vec<Path> = in_time(found.try_collect()).await?;
        let of_copies = |path: &Path| self.copy_of(path).is_some();
        for path in paths.into_iter().filter(of_copies) {
            match in_time(self.store.delete(&path)).await {
                Ok(()) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The copy whose part is at this path; none if the object is not the proxy's.
    fn copy_of(&self, path: &Path) -> Option<u64> {
        let mut names = path.prefix_match(&self.prefix)?;
        let (id, part) = (names.next()?, names.next()?);
        let (id, part) = (id.as_ref(), part.as_ref());
        let is_part = part.len() == 8 && part.bytes().all(|byte| byte.is_ascii_digit());
        let found = u64::from_str_radix(id, 16).ok()?;
        (is_part && names.next().is_none() && format!("{found:016x}") == id).then_some(found)
    }

    /// Finds the parts of copies of earlier processes, once.
    async fn find_earlier_parts(&self) -> object_store::Result<()> {
        if self.work.lock().is_listed {
            return Ok(());
        }
        let found = self.objects().await?;
        let mut work = self.work.lock();
        let work = &mut *work;
        for (id, found) in found {
            match work.copies.get_mut(&id) {
                Some(copy) => copy.parts = copy.parts.max(found.parts),
                None => drop(work.earlier.insert(id, found.parts)),
            }
        }
        work.is_listed = true;
        Ok(())
    }

    /// The copies that have objects.
    async fn objects(&self) -> object_store::Result<BTreeMap<u64, BucketObjects>> {
        let mut found: BTreeMap<u64, BucketObjects> = BTreeMap::new();
        let mut objects = self.store.list(Some(&self.prefix));
        while let Some(object) = in_time(objects.try_next()).await? {
            if let Some(id) = self.copy_of(&object.location) {
                let copy = found.entry(id).or_default();
                copy.parts += 1;
                copy.newest = copy
                    .newest
                    .max(Some(SystemTime::from(object.last_modified)));
            }
        }
        Ok(found)
    }

    /// Removes the objects of copies without a note that are old enough.
    async fn sweep(&self, copy_store: &Arc<CopyStore>) -> object_store::Result<()> {
        for (id, objects) in self.objects().await? {
            let age = objects.newest.and_then(|at| at.elapsed().ok());
            let is_old = age.is_some_and(|age| age > ORPHAN_AGE);
            if is_old && !copy_store.has_note_soon(id).await {
                self.remove_objects(id).await?;
            }
        }
        Ok(())
    }
}

/// Removes a file that nobody reads any more, if it is there.
fn remove_file(path: &FilePath) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, "cannot remove the file of a copy");
    }
}

/// Fails if a request takes too long: a server may stop in the middle of a body.
async fn in_time<T>(
    request: impl Future<Output = object_store::Result<T>>,
) -> object_store::Result<T> {
    within(REQUEST_WITHIN, request).await
}

async fn within<T>(
    time: Duration,
    request: impl Future<Output = object_store::Result<T>>,
) -> object_store::Result<T> {
    match tokio::time::timeout(time, request).await {
        Ok(done) => done,
        Err(late) => Err(Error::Generic {
            store: "bucket of copies",
            source: late.into(),
        }),
    }
}

/// The objects of a copy.
#[derive(Clone, Copy, Debug, Default)]
struct BucketObjects {
    parts: u64,
    newest: Option<SystemTime>,
}

#[cfg(test)]
mod tests {
    use d2tp_driver::Journal;
    use object_store::memory::InMemory;

    use super::*;

    struct Bench {
        _dir: tempfile::TempDir,
        copy_store: Arc<CopyStore>,
        bucket: CopyBucket,
    }

    impl Bench {
        fn new() -> Bench {
            let dir = tempfile::tempdir().unwrap();
            let journal = Arc::new(Journal::open(&dir.path().join("journal")).unwrap());
            Bench {
                copy_store: CopyStore::open(dir.path(), journal).unwrap(),
                _dir: dir,
                bucket: CopyBucket {
                    store: Arc::new(InMemory::new()),
                    prefix: Path::from("a"),
                    work: Mutex::default(),
                    news: Notify::new(),
                    reads: Semaphore::new(READS_AT_ONCE),
                },
            }
        }

        /// A copy of one part, which is complete.
        fn copy(&self, id: u64) {
            let mut file = self.copy_store.create(id).unwrap();
            file.write_all(b"abc").unwrap();
            self.bucket.on_growth(id, 0, 3, true);
        }

        /// A copy of an earlier process, which nobody wants any more.
        async fn unwanted(&self, id: u64) {
            let at = self.bucket.part_path(id, 0);
            let put = self.bucket.store.put(&at, PutPayload::from_static(b"x"));
            put.await.unwrap();
            self.bucket.on_removal(id);
        }

        async fn has(&self, id: u64) -> bool {
            let at = self.bucket.part_path(id, 0);
            self.bucket.store.head(&at).await.is_ok()
        }
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_read_keeps_no_other_copy_from_the_bucket() {
        let bench = Bench::new();
        // A folder is opened, and cannot be read.
        for id in 1..=2 * PARTS_AT_ONCE as u64 {
            std::fs::create_dir(bench.copy_store.path(id)).unwrap();
            bench.bucket.on_growth(id, 0, 3, true);
        }
        bench.copy(100);
        bench.unwanted(200).await;
        let later = Instant::now() + SWEEP_EVERY;
        for _ in 0..3 {
            let done = bench.bucket.send_all(&bench.copy_store, later).await;
            assert!(done.is_err());
        }
        assert!(bench.has(100).await);
        assert!(!bench.has(200).await);
        assert_eq!(bench.bucket.status().waiting, 2 * PARTS_AT_ONCE);
    }

    #[tokio::test]
    async fn what_arrived_of_a_copy_that_seemed_to_fail_goes_with_it() {
        let bench = Bench::new();
        let later = Instant::now() + SWEEP_EVERY;
        bench.bucket.find_earlier_parts().await.unwrap();
        std::fs::create_dir(bench.copy_store.path(1)).unwrap();
        bench.bucket.on_growth(1, 0, 3, true);
        assert!(
            bench
                .bucket
                .send_all(&bench.copy_store, later)
                .await
                .is_err()
        );
        let at = bench.bucket.part_path(1, 0);
        let put = bench.bucket.store.put(&at, PutPayload::from_static(b"abc"));
        put.await.unwrap();
        bench.bucket.on_removal(1);
        bench
            .bucket
            .send_all(&bench.copy_store, later)
            .await
            .unwrap();
        assert!(!bench.has(1).await);
    }

    #[tokio::test]
    async fn nothing_is_sent_of_a_copy_whose_objects_are_being_removed() {
        let bench = Bench::new();
        bench.unwanted(1).await;
        // A writer that was under way says so late, before the file is gone.
        bench.copy(1);
        let (parts, removals) = bench.bucket.next_round(&HashSet::new());
        assert_eq!((parts, removals), (vec![], vec![1]));
        let later = Instant::now() + SWEEP_EVERY;
        std::fs::remove_file(bench.copy_store.path(1)).unwrap();
        let sent = bench.bucket.send_all(&bench.copy_store, later).await;
        sent.unwrap();
        assert!(!bench.has(1).await);
        assert_eq!(bench.bucket.status(), CopyBucketStatus::default());
    }

    #[tokio::test]
    async fn removals_do_not_wait_until_nothing_is_left_to_send() {
        let bench = Bench::new();
        for id in 1..=2 * PARTS_AT_ONCE as u64 {
            bench.copy(id);
        }
        bench.unwanted(200).await;
        let now = Instant::now();
        bench.bucket.send_all(&bench.copy_store, now).await.unwrap();
        assert_eq!(bench.bucket.status().waiting, PARTS_AT_ONCE);
        assert!(!bench.has(200).await);
    }

    #[tokio::test]
    async fn a_copy_that_is_gone_is_not_sent_and_no_failure() {
        let bench = Bench::new();
        bench.bucket.on_growth(1, 0, 3, true);
        let now = Instant::now();
        bench.bucket.send_all(&bench.copy_store, now).await.unwrap();
        assert_eq!(bench.bucket.status(), CopyBucketStatus::default());
    }
}
