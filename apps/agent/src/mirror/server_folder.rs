//! The folder on the server: its listing, and by WebDAV also changes to it.
//!
//! ```text
//!  GET /photos/        JSON of `cedos serve` or nginx ─▶ lengths, times, complete for certain
//!                      a page of links, or no listing ─▶ PROPFIND /photos/ ─ 207 ─▶ as certain as JSON
//!                                                             └ refused ─▶ the page, if there was one
//! ```
//!
//! The form that the top folder has is that of all folders below it. A proxy forwards requests of WebDAV as a tunnel only.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use cedos_sandbox::confined;
use futures_util::StreamExt;
use tempfile::TempDir;
use url::Url;

use super::file_transfers::{FileTransfer, FileTransfers};
use super::mirror_reporter::MirrorReporter;
use super::multistatus;
use super::path_filter::PathFilter;
use super::relative_path::RelativePath;
use super::remote_tree::{LISTING_BYTES_MAX, RemoteEntry, RemoteListing};
use crate::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use crate::fetch::request_method::RequestMethod;
use crate::order::TransferVerb;

/// The most files of a mirror.
const FILES_MAX: usize = 1_000_000; // a guess: a gigabyte of memory

/// What a folder prefers of the forms in which it can be listed.
const ACCEPT_LISTING: &str = "Accept: application/json, text/html;q=0.9, */*;q=0.1";

/// How deep a WebDAV server is to list a folder (RFC 4918 §10.2).
const DEPTH_LISTING: &str = "Depth: 1";

/// Tries of a request that the server may not know.
const PROBE_TRIES: u32 = 2; // a guess: once more, if a network failed

/// Whether the listings of a source name all of its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListingCompleteness {
    /// The server gave the listing in a form for programs.
    Certain,
    /// A page for people was read, which may be another page.
    Page,
    /// Some files could not be transferred.
    Partial,
}

/// The form in which a server lists folders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListingForm {
    /// The answer to GET: JSON, or a page.
    Object,
    /// The answer to PROPFIND.
    Webdav,
}

/// What a server has in a folder and below it.
#[derive(Debug)]
pub(super) struct ServerListing {
    /// The files that are meant.
    pub(super) files: BTreeMap<RelativePath, RemoteEntry>,
    /// The folders in it.
    pub(super) folders: BTreeSet<RelativePath>,
    /// Whether these are all.
    pub(super) completeness: ListingCompleteness,
}

/// A folder on a server.
pub(super) struct ServerFolder<'a> {
    url: &'a Url,
    filter: &'a PathFilter,
    transfers: &'a FileTransfers,
    reporter: &'a MirrorReporter,
    /// Where answers are stored until they are read.
    scratch: TempDir,
}

impl<'a> ServerFolder<'a> {
    /// Names the folder at `url`, which ends with a slash.
    ///
    /// # Errors
    /// Answers cannot be stored.
    pub(super) fn new(
        url: &'a Url,
        filter: &'a PathFilter,
        transfers: &'a FileTransfers,
        reporter: &'a MirrorReporter,
    ) -> Result<ServerFolder<'a>, TransferFailure> {
        let scratch = tempfile::tempdir()
            .map_err(|error| TransferFailure::storage("cannot store the listing", &error))?;
        Ok(ServerFolder {
            url,
            filter,
            transfers,
            reporter,
            scratch,
        })
    }

    /// What is in the folder, in the form that tells most.
    ///
    /// # Errors
    /// The top folder is not listed; in words.
    pub(super) async fn list(&self) -> Result<ServerListing, TransferFailure> {
        let root = RelativePath::root();
        let found = self.list_one(&root, ListingForm::Object, None).await;
        let may_tell_more = match &found {
            Ok(listing) => listing.is_page,
            Err(failure) => may_be_no_listing(failure),
        };
        if self.url.scheme() != "d2tp" && may_tell_more {
            let webdav = self.list_one(&root, ListingForm::Webdav, Some(PROBE_TRIES));
            match webdav.await {
                Ok(listing) => return self.list_below(listing, ListingForm::Webdav).await,
                Err(failure) if failure.exit == TransferExit::Cancelled => return Err(failure),
                // A server that does not know the request may do anything.
                Err(_) => {}
            }
        }
        self.list_below(found?, ListingForm::Object).await
    }

    /// What a WebDAV server has in the folder, which is made if it is not there and `makes` is true. None if the server
    /// does not list it, or is not there now: a proxy keeps uploads until it is.
    ///
    /// # Errors
    /// The requests may not be sent; in words.
    pub(super) async fn list_by_webdav(
        &self,
        makes: bool,
    ) -> Result<Option<ServerListing>, TransferFailure> {
        let root = RelativePath::root();
        let tries = Some(PROBE_TRIES);
        let mut found = self.list_one(&root, ListingForm::Webdav, tries).await;
        if makes
            && found.as_ref().is_err_and(may_be_no_listing)
            && self.make_folder(&root, false).await.is_ok()
        {
            found = self.list_one(&root, ListingForm::Webdav, tries).await;
        }
        match found {
            Ok(listing) => {
                let listing = self.list_below(listing, ListingForm::Webdav).await;
                listing.map(Some)
            }
            Err(failure) if failure.exit == TransferExit::Error => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Makes a folder, or learns that it is there. `is_webdav`: whether the server is known to do that.
    ///
    /// # Errors
    /// The server does not; in words.
    pub(super) async fn make_folder(
        &self,
        path: &RelativePath,
        is_webdav: bool,
    ) -> Result<(), TransferFailure> {
        let url = path.url(self.url, true);
        let tries = (!is_webdav).then_some(PROBE_TRIES);
        self.ask(&url, path, RequestMethod::Mkcol, (None, tries))
            .await
    }

    /// Deletes a file.
    ///
    /// # Errors
    /// The server does not; in words.
    pub(super) async fn delete(&self, path: &RelativePath) -> Result<(), TransferFailure> {
        let url = path.url(self.url, false);
        self.ask(&url, path, RequestMethod::Delete, (None, None))
            .await
    }

    /// Lists everything below the top folder.
    async fn list_below(
        &self,
        top: RemoteListing,
        form: ListingForm,
    ) -> Result<ServerListing, TransferFailure> {
        let mut found = ServerListing {
            files: BTreeMap::new(),
            folders: BTreeSet::new(),
            completeness: ListingCompleteness::Certain,
        };
        let mut below = Vec::new();
        self.take_in(&RelativePath::root(), top, &mut found, &mut below);
        while !below.is_empty() {
            below.sort();
            below.dedup();
            if found.files.len() + below.len() > FILES_MAX {
                let text = format!("more than {FILES_MAX} files and folders");
                return Err(TransferFailure::error(text));
            }
            let level = std::mem::take(&mut below);
            let listing = level.iter().map(|path| self.list_one(path, form, None));
            let listed: Vec<_> = futures_util::stream::iter(listing)
                .buffered(self.transfers.together_max())
                .collect()
                .await;
            for (path, listing) in level.iter().zip(listed) {
                match listing {
                    Ok(listing) => self.take_in(path, listing, &mut found, &mut below),
                    Err(failure) => self.reporter.failed(&format!("{path}/"), &failure),
                }
            }
        }
        Ok(found)
    }

    /// Adds what a listing names. `below`: folders that are to be listed, too.
    fn take_in(
        &self,
        path: &RelativePath,
        listing: RemoteListing,
        found: &mut ServerListing,
        below: &mut Vec<RelativePath>,
    ) {
        if !listing.is_complete {
            found.completeness = ListingCompleteness::Partial;
            let text = format!("the server left files out of the listing of /{path}");
            (self.reporter).failed(&format!("{path}/"), &TransferFailure::error(text));
        }
        if listing.is_page && found.completeness == ListingCompleteness::Certain {
            found.completeness = ListingCompleteness::Page;
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
                    below.push(child.clone());
                }
                found.folders.insert(child);
            } else if self.filter.takes(&child) {
                found.files.insert(child, entry);
            }
        }
    }

    async fn list_one(
        &self,
        path: &RelativePath,
        form: ListingForm,
        tries_max: Option<u32>,
    ) -> Result<RemoteListing, TransferFailure> {
        let url = path.url(self.url, true);
        let (method, field) = match form {
            ListingForm::Object => (RequestMethod::Get, ACCEPT_LISTING),
            ListingForm::Webdav => (RequestMethod::Propfind, DEPTH_LISTING),
        };
        self.ask(&url, path, method, (Some(field), tries_max))
            .await?;
        let file = self.scratch.path().join(scratch_name(path, method));
        let reading = blocking(move || {
            let mut bytes = Vec::new();
            std::fs::File::open(&file)?
                .take(LISTING_BYTES_MAX)
                .read_to_end(&mut bytes)?;
            let _ = std::fs::remove_file(&file);
            // Strangers write listings.
            Ok(confined(|| match form {
                ListingForm::Object => RemoteListing::parse(&bytes, &url),
                ListingForm::Webdav => multistatus::parse(&bytes, &url),
            }))
        });
        reading
            .await
            .map_err(|error| TransferFailure::storage("cannot read the listing", &error))?
            .map_err(TransferFailure::error)
    }

    async fn ask(
        &self,
        url: &Url,
        path: &RelativePath,
        method: RequestMethod,
        (field, tries_max): (Option<&'static str>, Option<u32>),
    ) -> Result<(), TransferFailure> {
        let file = self.scratch.path().join(scratch_name(path, method));
        let request = FileTransfer {
            verb: TransferVerb::Get,
            url,
            file: &file,
            bytes: None,
            unless: None,
            method,
            field,
            tries_max,
        };
        let answered = self.transfers.carry(request, self.reporter).await;
        if !matches!(method, RequestMethod::Get | RequestMethod::Propfind) {
            let _ = std::fs::remove_file(&file);
        }
        answered.map(drop)
    }
}

/// The name of the file with an answer.
fn scratch_name(path: &RelativePath, method: RequestMethod) -> String {
    format!("{}.{}", path.staged_name(), method.in_http())
}

/// Whether a failure may be that of a server that does not list a folder in this form, and not one that passes or that
/// the user can end.
fn may_be_no_listing(failure: &TransferFailure) -> bool {
    failure.exit == TransferExit::Error
        && !matches!(
            failure.reason,
            Some(
                TransferReason::OriginWait
                    | TransferReason::AuthRequired
                    | TransferReason::ProxyUnreachable
                    | TransferReason::ProxyRefused
                    | TransferReason::NetworkBlocked
                    | TransferReason::PathTooSlow
                    | TransferReason::StorageFull
                    | TransferReason::Portal
            )
        )
}

/// Does what waits for the disk, without holding up the other transfers of the process.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(std::io::Error::other(error)),
    }
}
