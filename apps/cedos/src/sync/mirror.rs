//! A run of `cedos sync`: what differs, the transfers, and what is deleted.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cedos_agent::fetch::file_stamp::FileStamp;
use cedos_agent::fetch::object_version::ObjectVersion;
use cedos_agent::fetch::outcome::{TransferExit, TransferFailure};
use cedos_agent::order::TransferVerb;
use futures_util::StreamExt;
use url::Url;

use super::file_transfers::{FileTransfers, stopped};
use super::local_tree::{self, LocalState, LocalTree};
use super::path_filter::PathFilter;
use super::relative_path::{RelativePath, STAGING};
use super::remote_tree::{LISTING_BYTES_MAX, RemoteEntry, RemoteListing};
use super::sync_memory::SyncMemory;
use super::sync_reporter::SyncReporter;

/// Whether the listings of a source name all of its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListingCompleteness {
    /// The server said so in a form for programs.
    Certain,
    /// A page for people was read, which may be another page.
    Page,
    /// Some are missing.
    Partial,
}

/// The most files of a mirror.
const FILES_MAX: usize = 1_000_000; // a guess: a gigabyte of memory

/// Files after which what is known of them is saved.
const SAVE_EVERY: usize = 256; // a guess: seconds of work

/// What a folder prefers of the forms in which it can be listed.
const ACCEPT_LISTING: &str = "Accept: application/json, text/html;q=0.9, */*;q=0.1";

/// Where files come from, and where they go.
#[derive(Debug, Clone)]
pub enum SyncDirection {
    /// From a server to a folder here.
    Download {
        /// The folder there.
        from: Url,
        /// The folder here.
        to: PathBuf,
    },
    /// From a folder here to a server.
    Upload {
        /// The folder here.
        from: PathBuf,
        /// The folder there.
        to: Url,
    },
}

/// Makes one folder what another one is.
pub struct FolderMirror {
    /// Where files come from, and where they go.
    pub direction: SyncDirection,
    /// Which files are meant.
    pub filter: PathFilter,
    /// Whether files are deleted that the source does not have.
    pub delete: bool,
    /// Whether nothing is changed.
    pub dry_run: bool,
    /// What carries the files.
    pub transfers: FileTransfers,
    /// What tells people and scripts.
    pub reporter: SyncReporter,
    /// What earlier runs brought or sent.
    memory: Mutex<SyncMemory>,
    /// Files since what is known was saved.
    unsaved: Mutex<usize>,
}

/// A file to be downloaded.
struct MirrorDownload {
    path: RelativePath,
    entry: RemoteEntry,
    unless: Option<ObjectVersion>,
}

impl FolderMirror {
    /// Prepares a run.
    pub fn new(
        direction: SyncDirection,
        filter: PathFilter,
        (delete, dry_run): (bool, bool),
        transfers: FileTransfers,
        reporter: SyncReporter,
    ) -> FolderMirror {
        let (from, to) = match &direction {
            SyncDirection::Download { from, to } => (from.to_string(), to.display().to_string()),
            SyncDirection::Upload { from, to } => (from.display().to_string(), to.to_string()),
        };
        FolderMirror {
            memory: Mutex::new(SyncMemory::load(&from, &to)),
            unsaved: Mutex::new(0),
            direction,
            filter,
            delete,
            dry_run,
            transfers,
            reporter,
        }
    }

    /// Runs it to its end. Returns the exit code.
    pub async fn run(&self) -> TransferExit {
        let ended = match &self.direction {
            SyncDirection::Download { from, to } => self.download(from, to).await,
            SyncDirection::Upload { from, to } => self.upload(from, to).await,
        };
        if let Err(failure) = ended {
            self.reporter.failed("the whole folder", &failure);
        }
        if self.transfers.is_stopped() {
            self.reporter.failed("the rest", &stopped());
        }
        if !self.dry_run
            && let Err(error) = self.memory().save()
        {
            let text = format!("cannot save what is known of these files: {error}");
            self.reporter.note(&text);
        }
        self.reporter.finish()
    }

    fn memory(&self) -> MutexGuard<'_, SyncMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn download(&self, from: &Url, to: &Path) -> Result<(), TransferFailure> {
        if !self.dry_run {
            std::fs::create_dir_all(to).map_err(|error| {
                TransferFailure::storage(&format!("cannot make {}", to.display()), &error)
            })?;
        }
        let (files, completeness) = self.list(from).await?;
        let is_complete = completeness != ListingCompleteness::Partial;
        let mut plan = Vec::new();
        for (path, entry) in &files {
            match self.plan(to, path, entry) {
                Ok(Some(planned)) => plan.push(planned),
                Ok(None) => self.reporter.unchanged(),
                Err(text) => (self.reporter).failed(&path.text(), &TransferFailure::error(text)),
            }
        }
        if self.dry_run {
            for planned in &plan {
                let bytes = planned.entry.bytes;
                self.reporter.would_transfer(&planned.path, bytes);
            }
        } else if !plan.is_empty() {
            let staging = staging_folder(to)?;
            let fetching = plan
                .iter()
                .map(|planned| self.fetch(from, to, &staging, planned));
            futures_util::stream::iter(fetching)
                .buffer_unordered(self.transfers.together_max())
                .collect::<()>()
                .await;
        }
        let is_whole = is_complete && !self.reporter.has_failures();
        if is_whole && !self.dry_run {
            // Parts of files that are no longer there.
            let _ = std::fs::remove_dir_all(to.join(STAGING));
        }
        let kept_because = match (is_whole, completeness) {
            _ if !self.delete => return Ok(()),
            (true, ListingCompleteness::Certain) => return self.delete_others(to, &files),
            (true, _) => {
                "the server lists its files as a web page, which may be another page, such as one to sign in"
            }
            (false, _) => "not everything was listed and transferred",
        };
        let text = format!("nothing is deleted, because {kept_because}");
        self.reporter.note(&text);
        Ok(())
    }

    /// The files of the source, and what is known of whether these are all.
    async fn list(
        &self,
        from: &Url,
    ) -> Result<(BTreeMap<RelativePath, RemoteEntry>, ListingCompleteness), TransferFailure> {
        let scratch = tempfile::tempdir()
            .map_err(|error| TransferFailure::storage("cannot store the listing", &error))?;
        let (mut files, mut completeness) = (BTreeMap::new(), ListingCompleteness::Certain);
        let mut level = vec![RelativePath::root()];
        while !level.is_empty() {
            let listing = level
                .iter()
                .map(|path| self.list_one(from, path, scratch.path()));
            let listed: Vec<_> = futures_util::stream::iter(listing)
                .buffered(self.transfers.together_max())
                .collect()
                .await;
            let mut below = Vec::new();
            for (path, listing) in level.iter().zip(listed) {
                let listing = match listing {
                    Ok(listing) => listing,
                    // Without the first one nothing is known.
                    Err(failure) if path.depth() == 0 => return Err(failure),
                    Err(failure) => {
                        self.reporter.failed(&format!("{path}/"), &failure);
                        continue;
                    }
                };
                if !listing.is_complete {
                    completeness = ListingCompleteness::Partial;
                    let text = format!("the server left files out of the listing of /{path}");
                    (self.reporter).failed(&format!("{path}/"), &TransferFailure::error(text));
                }
                if listing.is_page && completeness == ListingCompleteness::Certain {
                    completeness = ListingCompleteness::Page;
                }
                for entry in listing.entries {
                    let child = match path.child(&entry.name) {
                        Ok(child) => child,
                        Err(why) => {
                            let failure = TransferFailure::error(why);
                            self.reporter.failed(&format!("{path}/"), &failure);
                            continue;
                        }
                    };
                    if entry.is_folder {
                        if !self.filter.skips_folder(&child) {
                            below.push(child);
                        }
                    } else if self.filter.takes(&child) {
                        files.insert(child, entry);
                    }
                }
                if files.len() + below.len() > FILES_MAX {
                    let text = format!("more than {FILES_MAX} files and folders");
                    return Err(TransferFailure::error(text));
                }
            }
            below.sort();
            below.dedup();
            level = below;
        }
        Ok((files, completeness))
    }

    async fn list_one(
        &self,
        from: &Url,
        path: &RelativePath,
        scratch: &Path,
    ) -> Result<RemoteListing, TransferFailure> {
        let url = path.url(from, true);
        let file = scratch.join(path.staged_name());
        let (verb, field) = (TransferVerb::Get, Some(ACCEPT_LISTING));
        let carried = self
            .transfers
            .carry(verb, &url, &file, None, field, &self.reporter);
        carried.await?;
        let mut bytes = Vec::new();
        let read = std::fs::File::open(&file)
            .and_then(|file| file.take(LISTING_BYTES_MAX).read_to_end(&mut bytes));
        read.map_err(|error| TransferFailure::storage("cannot read the listing", &error))?;
        let _ = std::fs::remove_file(&file);
        RemoteListing::parse(&bytes, &url).map_err(TransferFailure::error)
    }

    /// What is to be done for a file; none if it is as it was.
    fn plan(
        &self,
        to: &Path,
        path: &RelativePath,
        entry: &RemoteEntry,
    ) -> Result<Option<MirrorDownload>, String> {
        let state = LocalState::of(to, path)?;
        let LocalState::File { bytes, modified_s } = state else {
            return Ok(Some(MirrorDownload::new(path, entry, None)));
        };
        if let (Some(length), Some(modified)) = (entry.bytes, entry.modified) {
            let is_same = (length, modified.as_second()) == (bytes, modified_s);
            return Ok((!is_same).then(|| MirrorDownload::new(path, entry, None)));
        }
        // The listing does not tell, but the server does when it is asked for the file.
        let unless = self.memory().version(path, &path.below(to));
        Ok(Some(MirrorDownload::new(path, entry, unless)))
    }

    async fn fetch(&self, from: &Url, to: &Path, staging: &Path, planned: &MirrorDownload) {
        let path = &planned.path;
        let (url, staged) = (path.url(from, false), staging.join(path.staged_name()));
        let (verb, unless) = (TransferVerb::Get, planned.unless.clone());
        let carried = self
            .transfers
            .carry(verb, &url, &staged, unless, None, &self.reporter);
        let report = match carried.await {
            Ok(report) if report.unchanged => return self.reporter.unchanged(),
            Ok(report) => report,
            Err(failure) => return self.reporter.failed(&path.text(), &failure),
        };
        let placed = local_tree::put_in_place(&staged, to, path, planned.entry.modified);
        match placed {
            Ok(_) => {
                let stamp = FileStamp::of(&path.below(to));
                self.record(path, stamp, report.version.clone());
                self.reporter.transferred(path, &report);
            }
            Err(error) => {
                let failure = TransferFailure::storage("cannot put it in its place", &error);
                self.reporter.failed(&path.text(), &failure);
            }
        }
    }

    fn record(
        &self,
        path: &RelativePath,
        stamp: Option<FileStamp>,
        version: Option<ObjectVersion>,
    ) {
        let mut memory = self.memory();
        memory.record(path, stamp, version);
        let mut unsaved = self.unsaved.lock().unwrap_or_else(PoisonError::into_inner);
        *unsaved += 1;
        if *unsaved >= SAVE_EVERY {
            *unsaved = 0;
            // The last save tells.
            let _ = memory.save();
        }
    }

    /// Deletes the files that the source does not have.
    fn delete_others(
        &self,
        to: &Path,
        files: &BTreeMap<RelativePath, RemoteEntry>,
    ) -> Result<(), TransferFailure> {
        if !to.is_dir() {
            return Ok(()); // of a dry run
        }
        let tree = LocalTree::read(to).map_err(|error| {
            TransferFailure::storage(&format!("cannot read {}", to.display()), &error)
        })?;
        let is_surplus =
            |path: &&RelativePath| !files.contains_key(*path) && self.filter.takes(path);
        let surplus: Vec<_> = tree.files.iter().filter(is_surplus).collect();
        if files.is_empty() && !surplus.is_empty() {
            let text = format!(
                "the source lists no file, so --delete would delete all {} here; empty the folder by hand if that \
                 is meant",
                surplus.len()
            );
            return Err(TransferFailure::error(text));
        }
        for path in surplus {
            if !self.dry_run
                && let Err(error) = local_tree::remove(to, path)
            {
                let failure = TransferFailure::storage("cannot delete it", &error);
                self.reporter.failed(&path.text(), &failure);
                continue;
            }
            self.record(path, None, None);
            self.reporter.deleted(path);
        }
        Ok(())
    }

    async fn upload(&self, from: &Path, to: &Url) -> Result<(), TransferFailure> {
        let tree = LocalTree::read(from).map_err(|error| {
            TransferFailure::error(format!("cannot read {}: {error}", from.display()))
        })?;
        for why in &tree.refused {
            (self.reporter).failed("a name", &TransferFailure::error(why.clone()));
        }
        if !tree.others.is_empty() {
            let n = tree.others.len();
            let text = format!("{n} symbolic links and devices are left out");
            self.reporter.note(&text);
        }
        let mut plan = Vec::new();
        for path in tree.files.iter().filter(|path| self.filter.takes(path)) {
            let Some(stamp) = FileStamp::of(&path.below(from)) else {
                continue; // it is gone
            };
            match self.memory().has_sent(path, stamp) {
                true => self.reporter.unchanged(),
                false => plan.push((path, stamp)),
            }
        }
        if self.dry_run {
            for (path, _) in plan {
                let bytes = path.below(from).metadata().map(|file| file.len());
                self.reporter.would_transfer(path, bytes.ok());
            }
            return Ok(());
        }
        let sending = plan
            .into_iter()
            .map(|(path, stamp)| self.send(from, to, path, stamp));
        futures_util::stream::iter(sending)
            .buffer_unordered(self.transfers.together_max())
            .collect::<()>()
            .await;
        Ok(())
    }

    async fn send(&self, from: &Path, to: &Url, path: &RelativePath, stamp: FileStamp) {
        let (url, file) = (path.url(to, false), path.below(from));
        let verb = TransferVerb::Put;
        let carried = self
            .transfers
            .carry(verb, &url, &file, None, None, &self.reporter);
        match carried.await {
            Ok(report) => {
                self.record(path, Some(stamp), None);
                self.reporter.transferred(path, &report);
            }
            Err(failure) => self.reporter.failed(&path.text(), &failure),
        }
    }
}

impl MirrorDownload {
    fn new(
        path: &RelativePath,
        entry: &RemoteEntry,
        unless: Option<ObjectVersion>,
    ) -> MirrorDownload {
        MirrorDownload {
            path: path.clone(),
            entry: entry.clone(),
            unless,
        }
    }
}

/// The folder for parts of files, which is made if it is not there.
fn staging_folder(to: &Path) -> Result<PathBuf, TransferFailure> {
    let staging = to.join(STAGING);
    let made = match std::fs::create_dir(&staging) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    };
    let is_folder = || staging.symlink_metadata().is_ok_and(|found| found.is_dir());
    match made {
        Ok(()) if is_folder() => Ok(staging),
        Ok(()) => Err(TransferFailure::error(format!(
            "{} is not a folder; remove it",
            staging.display()
        ))),
        Err(error) => {
            let what = format!("cannot make {}", staging.display());
            Err(TransferFailure::storage(&what, &error))
        }
    }
}
