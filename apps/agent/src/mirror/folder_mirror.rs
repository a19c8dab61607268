//! A run of a mirror: what differs, the transfers, and what is deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use url::Url;

use super::file_transfers::{FileTransfer, FileTransfers, stopped};
use super::local_tree::{self, LocalState, LocalTree};
use super::mirror_memory::MirrorMemory;
use super::mirror_plan::{MirrorDirection, MirrorPlan};
use super::mirror_reporter::MirrorReporter;
use super::path_filter::PathFilter;
use super::relative_path::{RelativePath, STAGING};
use super::remote_tree::RemoteEntry;
use super::server_folder::{ListingCompleteness, ServerFolder, ServerListing, blocking};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::file_stamp::FileStamp;
use crate::fetch::object_version::ObjectVersion;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::report::TransferReport;
use crate::fetch::request_method::RequestMethod;
use crate::fetch::transfer::redact_url;
use crate::order::{TransferOrder, TransferVerb};

/// The interval at which what is known of the files is saved.
const SAVE_EVERY: Duration = Duration::from_secs(10); // a guess: what is asked for again after a crash

/// Files that are looked at before other transfers of the process have their turn.
const LOOKED_AT_ONCE: usize = 64; // a guess: a millisecond of a disk's time

/// Makes one folder what another one is.
pub struct FolderMirror {
    /// Where files come from, and where they go.
    direction: MirrorDirection,
    /// Which files are meant.
    filter: PathFilter,
    /// Whether files are deleted that the source does not have.
    delete: bool,
    /// Whether nothing is changed.
    dry_run: bool,
    /// What carries the files.
    transfers: FileTransfers,
    /// What tells people and scripts.
    reporter: MirrorReporter,
    /// What earlier runs brought or sent.
    memory: Mutex<MirrorMemory>,
    /// When what is known was saved.
    saved_at: Mutex<BootInstant>,
}

/// A file to be downloaded.
struct MirrorDownload {
    path: RelativePath,
    entry: RemoteEntry,
    unless: Option<ObjectVersion>,
}

/// A file to be uploaded.
struct MirrorUpload<'a> {
    path: &'a RelativePath,
    stamp: FileStamp,
    bytes: Option<u64>,
}

impl FolderMirror {
    /// Prepares a run of the mirror that is ordered.
    ///
    /// # Errors
    /// The order makes no sense; in words.
    pub fn new(
        order: &TransferOrder,
        dry_run: bool,
        transfers: FileTransfers,
        reporter: MirrorReporter,
    ) -> Result<FolderMirror, TransferFailure> {
        let MirrorPlan {
            direction,
            filter,
            delete,
        } = MirrorPlan::of(order)?;
        let (from, to) = match &direction {
            MirrorDirection::Download { from, to } => (from.to_string(), to.display().to_string()),
            MirrorDirection::Upload { from, to } => (from.display().to_string(), to.to_string()),
        };
        Ok(FolderMirror {
            memory: Mutex::new(MirrorMemory::load(&from, &to)),
            saved_at: Mutex::new(BootInstant::now()),
            direction,
            filter,
            delete,
            dry_run,
            transfers,
            reporter,
        })
    }

    /// Runs it to its end. Returns the report, whose text says what failed, if anything did.
    pub async fn run(&self) -> TransferReport {
        let ended = match &self.direction {
            MirrorDirection::Download { from, to } => self.download(from, to).await,
            MirrorDirection::Upload { from, to } => self.upload(from, to).await,
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
        let (url, folder) = match &self.direction {
            MirrorDirection::Download {
                from: url,
                to: folder,
            }
            | MirrorDirection::Upload {
                from: folder,
                to: url,
            } => (url, folder),
        };
        let terms = self.transfers.terms.borrow().clone();
        let folder = folder.display().to_string();
        self.reporter.report(redact_url(url), folder, &terms)
    }

    fn memory(&self) -> MutexGuard<'_, MirrorMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn server_folder<'a>(&'a self, url: &'a Url) -> Result<ServerFolder<'a>, TransferFailure> {
        ServerFolder::new(url, &self.filter, &self.transfers, &self.reporter)
    }

    async fn download(&self, from: &Url, to: &Path) -> Result<(), TransferFailure> {
        if !self.dry_run {
            std::fs::create_dir_all(to).map_err(|error| {
                TransferFailure::storage(&format!("cannot make {}", to.display()), &error)
            })?;
        }
        let server = self.server_folder(from)?;
        let ServerListing {
            files,
            completeness,
            ..
        } = server.list().await?;
        let is_complete = completeness != ListingCompleteness::Partial;
        let mut plan = Vec::new();
        for (n, (path, entry)) in files.iter().enumerate() {
            match self.plan(to, path, entry) {
                Ok(Some(planned)) => plan.push(planned),
                Ok(None) => self.reporter.unchanged(),
                Err(text) => (self.reporter).failed(&path.text(), &TransferFailure::error(text)),
            }
            if n % LOOKED_AT_ONCE == LOOKED_AT_ONCE - 1 {
                tokio::task::yield_now().await;
            }
        }
        let lengths = plan.iter().map(|planned| planned.entry.bytes);
        self.announce(lengths.collect());
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
            (true, ListingCompleteness::Certain) => {
                return self.delete_others(to, &files).await;
            }
            (true, _) => {
                "the server lists its files as a web page, which may be another page, such as one to sign in"
            }
            (false, _) => "not everything was listed and transferred",
        };
        let text = format!("nothing is deleted, because {kept_because}");
        self.reporter.note(&text);
        Ok(())
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
        let file = FileTransfer {
            verb: TransferVerb::Get,
            url: &url,
            file: &staged,
            bytes: planned.entry.bytes,
            unless: planned.unless.clone(),
            method: RequestMethod::Get,
            field: None,
            tries_max: None,
        };
        let report = match self.transfers.carry(file, &self.reporter).await {
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
        let mut saved_at = self.saved_at.lock().unwrap_or_else(PoisonError::into_inner);
        if BootInstant::now().since(*saved_at) >= SAVE_EVERY {
            // The last save tells.
            let _ = memory.save();
            *saved_at = BootInstant::now();
        }
    }

    /// Tells the scheduler and the reporter what is to be transferred.
    fn announce(&self, lengths: Vec<Option<u64>>) {
        let known = lengths.iter().flatten().sum();
        self.transfers.following.add(known);
        let is_known = lengths.iter().all(Option::is_some);
        self.reporter.planned(is_known.then_some(known));
    }

    /// Deletes the files that the source does not have.
    async fn delete_others(
        &self,
        to: &Path,
        files: &BTreeMap<RelativePath, RemoteEntry>,
    ) -> Result<(), TransferFailure> {
        if !to.is_dir() {
            return Ok(()); // of a dry run
        }
        let folder = to.to_owned();
        let read = blocking(move || LocalTree::read(&folder)).await;
        let tree = read.map_err(|error| {
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
        let folder = from.to_owned();
        let read = blocking(move || LocalTree::read(&folder)).await;
        let tree = read.map_err(|error| {
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
        let server = self.server_folder(to)?;
        let there = server.list_by_webdav(!self.dry_run).await?;
        if self.delete && there.is_none() {
            let text = "--delete needs a server that lists what it has, by WebDAV (PROPFIND), which this one does \
                        not; leave it out";
            return Err(TransferFailure::error(text));
        }
        let plan = self.plan_uploads(from, &tree, there.as_ref()).await;
        if self.dry_run {
            for planned in plan {
                self.reporter.would_transfer(planned.path, planned.bytes);
            }
        } else {
            self.announce(plan.iter().map(|planned| planned.bytes).collect());
            self.make_folders(&server, &plan, there.as_ref()).await;
            let sending = plan.into_iter().map(|planned| self.send(from, to, planned));
            futures_util::stream::iter(sending)
                .buffer_unordered(self.transfers.together_max())
                .collect::<()>()
                .await;
        }
        match there.filter(|_| self.delete) {
            Some(there) => self.delete_there(&server, &tree, &there).await,
            None => Ok(()),
        }
    }

    /// The files that are to be sent: those that were not sent as they are, or that the server has lost.
    async fn plan_uploads<'t>(
        &self,
        from: &Path,
        tree: &'t LocalTree,
        there: Option<&ServerListing>,
    ) -> Vec<MirrorUpload<'t>> {
        let mut plan = Vec::new();
        let chosen = tree.files.iter().filter(|path| self.filter.takes(path));
        for (n, path) in chosen.enumerate() {
            let at = path.below(from);
            let Some(stamp) = FileStamp::of(&at) else {
                continue; // it is gone
            };
            let bytes = at.metadata().map(|file| file.len()).ok();
            let is_there = there.is_none_or(|there| {
                let entry = there.files.get(path);
                entry.is_some_and(|entry| entry.bytes.is_none() || entry.bytes == bytes)
            });
            match is_there && self.memory().has_sent(path, stamp) {
                true => self.reporter.unchanged(),
                false => plan.push(MirrorUpload { path, stamp, bytes }),
            }
            if n % LOOKED_AT_ONCE == LOOKED_AT_ONCE - 1 {
                tokio::task::yield_now().await;
            }
        }
        plan
    }

    /// Makes the folders that the files need and the server does not have, outermost first.
    async fn make_folders(
        &self,
        server: &ServerFolder<'_>,
        plan: &[MirrorUpload<'_>],
        there: Option<&ServerListing>,
    ) {
        let needed: BTreeSet<RelativePath> = plan
            .iter()
            .flat_map(|planned| planned.path.folders())
            .collect();
        for path in needed {
            if there.is_some_and(|there| there.folders.contains(&path)) {
                continue;
            }
            let made = server.make_folder(&path, there.is_some()).await;
            // A server that is not known to be one of WebDAV may make folders by itself, with the files in them.
            if let (Err(failure), Some(_)) = (made, there) {
                self.reporter.failed(&format!("{path}/"), &failure);
            }
        }
    }

    /// Deletes the files on the server that are not here. Folders stay.
    async fn delete_there(
        &self,
        server: &ServerFolder<'_>,
        tree: &LocalTree,
        there: &ServerListing,
    ) -> Result<(), TransferFailure> {
        if there.completeness != ListingCompleteness::Certain || self.reporter.has_failures() {
            self.reporter
                .note("nothing is deleted, because not everything was listed and transferred");
            return Ok(());
        }
        // What is left out here is not missing here.
        let here: BTreeSet<&RelativePath> = tree.files.iter().chain(&tree.others).collect();
        let surplus: Vec<_> = (there.files.keys())
            .filter(|path| !here.contains(path))
            .collect();
        let is_none_here = !tree.files.iter().any(|path| self.filter.takes(path));
        if is_none_here && !surplus.is_empty() {
            let text = format!(
                "the folder here has no file, so --delete would delete all {} on the server; delete them there if \
                 that is meant",
                surplus.len()
            );
            return Err(TransferFailure::error(text));
        }
        for path in surplus {
            if !self.dry_run
                && let Err(failure) = server.delete(path).await
            {
                self.reporter.failed(&path.text(), &failure);
                continue;
            }
            self.record(path, None, None);
            self.reporter.deleted(path);
        }
        Ok(())
    }

    async fn send(&self, from: &Path, to: &Url, planned: MirrorUpload<'_>) {
        let path = planned.path;
        let file = FileTransfer {
            verb: TransferVerb::Put,
            url: &path.url(to, false),
            file: &path.below(from),
            bytes: planned.bytes,
            unless: None,
            method: RequestMethod::Get,
            field: None,
            tries_max: None,
        };
        match self.transfers.carry(file, &self.reporter).await {
            Ok(report) => {
                self.record(path, Some(planned.stamp), None);
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
