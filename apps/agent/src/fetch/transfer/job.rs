//! What is asked for: a URL, a destination, terms and patience; and what it runs in.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::SchedulerHandle;
use d2tp_links::Link;
use tokio::sync::watch;
use url::Url;

use crate::fetch::filename;
use crate::fetch::header::HeaderField;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::sink;
use crate::terms::TransferTerms;

/// Where the object goes.
#[derive(Debug, Clone)]
pub enum Destination {
    /// This file, replaced when the object is whole.
    File(PathBuf),
    /// A file in this directory (empty: the working directory), named by the URL or the origin;
    /// must not exist.
    InDirectory(PathBuf),
    /// Standard output.
    Stdout,
    /// Nothing comes: an upload.
    Nowhere,
}

impl Destination {
    /// The destination for people; `file` is where the object is, or would be.
    pub(super) fn describe(&self, file: &Path) -> String {
        match self {
            Destination::Stdout | Destination::Nowhere => "-".into(),
            Destination::File(path) => path.display().to_string(),
            Destination::InDirectory(_) => file.display().to_string(),
        }
    }
}

/// A download, as the user asked for it.
#[derive(Debug, Clone)]
pub struct TransferJob {
    /// The object.
    pub url: Url,
    /// Where it goes.
    pub destination: Destination,
    /// By when, and at what cost.
    pub terms: TransferTerms,
    /// Start at once or not at all.
    pub now: bool,
    /// The digest the object must have.
    pub integrity: Option<[u8; 32]>,
    /// Tries without a new byte before giving up on the origin.
    pub tries_max: u32,
    /// Time without a byte after which a connection is dropped.
    pub stall: Duration,
    /// Follow redirects from https to http.
    pub allow_downgrade: bool,
    /// Fields of the user's own for the request.
    pub fields: Arc<[HeaderField]>,
}

impl TransferJob {
    /// A file that nobody mentioned is not replaced.
    ///
    /// # Errors
    /// It is there.
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

    /// The place where the bytes go can be written to.
    ///
    /// # Errors
    /// Why not.
    pub fn check_destination(&self) -> Result<(), TransferFailure> {
        match &self.destination {
            Destination::File(_) | Destination::InDirectory(_) => {
                sink::check_writable(&self.expected_path(), &redact_url(&self.url))
            }
            Destination::Stdout | Destination::Nowhere => Ok(()),
        }
    }

    /// Where the bytes would go, by the name known before the origin is asked.
    pub fn expected_path(&self) -> PathBuf {
        let name = || filename::from_url(&self.url);
        match &self.destination {
            Destination::File(path) => path.clone(),
            Destination::InDirectory(directory) => directory.join(name()),
            Destination::Stdout | Destination::Nowhere => name().into(),
        }
    }
}

/// What a transfer runs in.
#[derive(Debug, Clone)]
pub struct TransferContext {
    /// The links of this device.
    pub links: watch::Receiver<Arc<Vec<Link>>>,
    /// Turning true leaves a partial.
    pub stop: watch::Receiver<bool>,
    /// Who says which links it may use.
    pub scheduler: Arc<SchedulerHandle>,
    /// Other terms than it began with, where they can come.
    pub terms: Option<watch::Receiver<TransferTerms>>,
    /// The number it is known by to the scheduler.
    pub id: u64,
    /// Where it is written down that the object is about to get its name.
    pub pending_rename: Option<PathBuf>,
}

impl TransferContext {
    /// For a transfer beside which there is no other.
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
        }
    }
}

/// The URL without credentials or fragment: what may be written down.
pub fn redact_url(url: &Url) -> String {
    let mut url = url.clone();
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_fragment(None);
    url.to_string()
}
