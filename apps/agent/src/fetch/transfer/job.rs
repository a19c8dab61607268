//! The job of a transfer: a URL, a destination, terms and patience; and its environment.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::SchedulerHandle;
use d2tp_links::Link;
use tokio::sync::watch;
use url::Url;

use crate::fetch::cookie_file::CookieFile;
use crate::fetch::filename;
use crate::fetch::header::HeaderField;
use crate::fetch::object_version::ObjectVersion;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::rate_limiter::RateLimiter;
use crate::fetch::request_method::RequestMethod;
use crate::fetch::sink;
use crate::fetch::transfer::following_bytes::FollowingBytes;
use crate::terms::TransferTerms;

/// The destination of an object.
#[derive(Debug, Clone)]
pub enum Destination {
    /// This file, which is replaced when the object is complete.
    File(PathBuf),
    /// This file, or one with a number in its name if this one exists when the object is complete.
    NewFile(PathBuf),
    /// A file in this directory (empty: the working directory), named by the URL or the origin;
    /// must not exist.
    InDirectory(PathBuf),
    /// The object is written to standard output.
    Stdout,
    /// A character device, such as `/dev/null`, which is written to as bytes arrive.
    Device(PathBuf),
    /// No destination: an upload.
    Nowhere,
}

impl Destination {
    /// The destination for people; `file` is where the object is, or would be.
    pub(super) fn describe(&self, file: &Path) -> String {
        match self {
            Destination::Stdout | Destination::Nowhere => "-".into(),
            Destination::File(path) | Destination::Device(path) => path.display().to_string(),
            Destination::NewFile(_) | Destination::InDirectory(_) => file.display().to_string(),
        }
    }
}

/// A transfer, as the user requested it.
#[derive(Debug, Clone)]
pub struct TransferJob {
    /// The URL of the object.
    pub url: Url,
    /// The destination of the object.
    pub destination: Destination,
    /// Deadline, cost policy and limits.
    pub terms: TransferTerms,
    /// Whether the transfer must start at once or fail.
    pub now: bool,
    /// The digest the object must have.
    pub integrity: Option<[u8; 32]>,
    /// Tries without a new byte before the origin is given up.
    pub tries_max: u32,
    /// How long a connection may carry nothing before it is dropped.
    pub stall: Duration,
    /// Whether redirects from https to http are followed.
    pub allow_downgrade: bool,
    /// Header fields that the user added.
    pub fields: Arc<[HeaderField]>,
    /// The user's cookies, which go where their file says.
    pub cookies: Option<Arc<CookieFile>>,
    /// The version of the object that the destination holds: unless it has changed, nothing is transferred.
    pub unless: Option<ObjectVersion>,
    /// Older versions of the file that are kept when it is replaced.
    pub keep_older: u32,
    /// The method of the requests of a download.
    pub method: RequestMethod,
}

impl TransferJob {
    /// Checks that a destination not named by the user does not exist.
    ///
    /// # Errors
    /// The file exists.
    pub fn refuse_existing(&self) -> Result<(), TransferFailure> {
        let named = self.expected_path();
        if matches!(self.destination, Destination::InDirectory(_)) && named.exists() {
            let named = named.display();
            return Err(TransferFailure::usage(format!(
                "{named} exists; -o {named} replaces it"
            )));
        }
        Ok(())
    }

    /// Checks what a download would be refused for before anything is fetched, without creating a file.
    ///
    /// # Errors
    /// The file exists and was not named by the user, or its directory does not exist.
    pub fn check_path(&self) -> Result<(), TransferFailure> {
        match &self.destination {
            Destination::File(_) | Destination::NewFile(_) | Destination::InDirectory(_) => {
                let path = self.expected_path();
                sink::check_directory(&path)?;
                sink::check_replaceable(&path)?;
                self.refuse_existing()
            }
            Destination::Stdout | Destination::Device(_) | Destination::Nowhere => Ok(()),
        }
    }

    /// The place where the bytes go can be written to.
    ///
    /// # Errors
    /// Why not.
    pub fn check_destination(&self) -> Result<(), TransferFailure> {
        match &self.destination {
            Destination::File(_) | Destination::NewFile(_) | Destination::InDirectory(_) => {
                sink::check_writable(&self.expected_path(), &redact_url(&self.url))
            }
            Destination::Stdout | Destination::Device(_) | Destination::Nowhere => Ok(()),
        }
    }

    /// The destination by the name known before the origin is asked.
    pub fn expected_path(&self) -> PathBuf {
        let name = || filename::from_url(&self.url);
        match &self.destination {
            Destination::File(path) | Destination::NewFile(path) | Destination::Device(path) => {
                path.clone()
            }
            Destination::InDirectory(directory) => directory.join(name()),
            Destination::Stdout | Destination::Nowhere => name().into(),
        }
    }
}

/// The environment of a transfer.
#[derive(Debug, Clone)]
pub struct TransferContext {
    /// The links of this device.
    pub links: watch::Receiver<Arc<Vec<Link>>>,
    /// Stops the transfer when it becomes true; the part stays.
    pub stop: watch::Receiver<bool>,
    /// The scheduler that decides about links.
    pub scheduler: Arc<SchedulerHandle>,
    /// Updates of the terms, if they can change.
    pub terms: Option<watch::Receiver<TransferTerms>>,
    /// The number by which the scheduler knows the transfer.
    pub id: u64,
    /// The path of the record that the object is about to be renamed into place.
    pub pending_rename: Option<PathBuf>,
    /// The limit on the rate of a download, if it has one.
    pub rate_limiter: Option<Arc<RateLimiter>>,
    /// What is to be moved after the transfer by the same deadline, if it is one of many.
    pub following: Option<Arc<FollowingBytes>>,
}

impl TransferContext {
    /// The context of a transfer that is the only one.
    pub fn standalone(
        links: watch::Receiver<Arc<Vec<Link>>>,
        stop: watch::Receiver<bool>,
        scheduler: Arc<SchedulerHandle>,
    ) -> TransferContext {
        TransferContext {
            links,
            stop,
            scheduler,
            terms: None,
            id: 0,
            pending_rename: None,
            rate_limiter: None,
            following: None,
        }
    }
}

/// The URL without credentials or fragment, which may be logged.
pub fn redact_url(url: &Url) -> String {
    let mut url = url.clone();
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_fragment(None);
    url.to_string()
}
