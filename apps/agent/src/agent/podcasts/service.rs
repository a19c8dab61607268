//! What the agent holds of podcasts: the library, and what is being done for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use cedos_readycast::{ChannelId, Library, LibraryError};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use url::Url;

use super::apps::open_port::AppPort;
use super::index_progress::IndexProgress;
use super::refresh_queue::HostPermits;
use super::transfer_record::RunningRecord;
use crate::fetch::jobs;
use crate::fetch::outcome::TransferFailure;
use crate::stream::stream_transport::StreamTransport;

/// Feeds that are fetched at the same time.
pub(super) const REFRESHES_MAX: usize = 4;

/// Whether files of episodes are being looked for, and when that began last.
#[derive(Debug, Default)]
pub(super) struct FilesLook {
    pub(super) is_running: bool,
    pub(super) begun_at: Option<Instant>,
}

/// The agent's podcasts: the library, and what the task of [`run`](PodcastService::run) works on.
pub(in super::super) struct PodcastService {
    pub(super) library: OnceLock<Library>,
    /// Makes `run` look at the library.
    pub(super) wake: Notify,
    /// Wakes those that wait for a feed that is fetched already.
    pub(super) refreshed: Notify,
    /// Channels whose feed is being fetched.
    pub(super) busy: Mutex<BTreeSet<ChannelId>>,
    pub(super) refreshes: Semaphore,
    /// Permits of the hosts of feeds, taken before one of `refreshes`.
    pub(super) hosts: HostPermits,
    /// Held while downloads are planned and queued, and while those in the queue get other terms: a rule that changes
    /// in between misses none.
    pub(super) planning: tokio::sync::Mutex<()>,
    /// Held from a subscription until what its feed brought is stored: the feed is not fetched a second time.
    pub(super) adding: tokio::sync::Mutex<()>,
    /// The way of feeds to this device.
    pub(super) transport: OnceLock<Arc<StreamTransport>>,
    /// What the log will keep of the downloads that run, by the number of their transfer.
    pub(super) records: Mutex<BTreeMap<u64, RunningRecord>>,
    /// The look for files of episodes that somebody removed.
    pub(super) files_look: Mutex<FilesLook>,
    /// The port for other apps.
    pub(in super::super) apps: AppPort,
    /// The lock held during an exchange with a server.
    pub(super) syncing: tokio::sync::Mutex<()>,
    /// Makes the task of exchanges look at the account.
    pub(super) sync_changed: Notify,
    /// The lock held while an index of podcasts is made.
    pub(super) importing: Arc<tokio::sync::Mutex<()>>,
    /// How far the making of an index is that the page asked for.
    pub(super) index_progress: Mutex<Option<IndexProgress>>,
    /// Files beside episodes that were asked for a short while ago.
    pub(super) documents_asked: Mutex<BTreeMap<Url, Instant>>,
}

impl Default for PodcastService {
    fn default() -> PodcastService {
        PodcastService {
            library: OnceLock::new(),
            wake: Notify::new(),
            refreshed: Notify::new(),
            busy: Mutex::default(),
            refreshes: Semaphore::new(REFRESHES_MAX),
            hosts: HostPermits::default(),
            planning: tokio::sync::Mutex::default(),
            adding: tokio::sync::Mutex::default(),
            transport: OnceLock::new(),
            records: Mutex::default(),
            files_look: Mutex::default(),
            apps: AppPort::default(),
            syncing: tokio::sync::Mutex::default(),
            sync_changed: Notify::new(),
            importing: Arc::default(),
            index_progress: Mutex::default(),
            documents_asked: Mutex::default(),
        }
    }
}

/// The folder of the library.
pub(super) fn library_folder() -> Result<PathBuf, TransferFailure> {
    let state = jobs::state_directory();
    let state = state.map_err(|error| TransferFailure::error(format!("{error:#}")))?;
    Ok(state.join("podcasts"))
}

/// What a failure of the library is to a person.
fn library_failure(error: &LibraryError) -> TransferFailure {
    match error {
        LibraryError::Scheme(_) | LibraryError::Feed(_) => {
            TransferFailure::usage(error.to_string())
        }
        _ => TransferFailure::error(error.to_string()),
    }
}

impl PodcastService {
    /// Whether there is a library, so that pages and requests that only read need not make one.
    pub(in super::super) fn exists(&self) -> bool {
        self.library.get().is_some()
            || library_folder().is_ok_and(|folder| Library::exists(&folder))
    }

    /// Opens the library, which is made if there is none.
    ///
    /// # Errors
    /// The disk refuses, or a newer version wrote it.
    pub(in super::super) fn library(&self) -> Result<Library, TransferFailure> {
        if let Some(library) = self.library.get() {
            return Ok(library.clone());
        }
        let opened = Library::open(&library_folder()?).map_err(|error| library_failure(&error))?;
        let library = self.library.get_or_init(|| opened).clone();
        self.changed();
        Ok(library)
    }

    /// Calls the library on a thread for blocking calls.
    ///
    /// # Errors
    /// The library's, in a sentence.
    pub(in super::super) async fn with<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Library) -> Result<T, LibraryError> + Send + 'static,
    ) -> Result<T, TransferFailure> {
        let library = self.library()?;
        let called = tokio::task::spawn_blocking(move || call(&library)).await;
        let called = called.map_err(|error| TransferFailure::error(error.to_string()))?;
        called.map_err(|error| library_failure(&error))
    }

    /// Says that the library changed: what follows from it is done now.
    pub(in super::super) fn changed(&self) {
        self.wake.notify_one();
    }
}
