//! The index of podcasts as the page makes it: from a file on this machine, or from an address that is downloaded first.
//!
//! ```text
//!  address ─▶ Downloading, by free networks ─▶ Reading ─┬─▶ the index
//!  file ──────────────────────────────────────▲         └─▶ Failed, until somebody tries again
//! ```
//!
//! Both take minutes, so nobody waits for them: the page says how far it is.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use cedos_readycast::PodcastIndex;
use d2tp_sched::CostPolicy;
use tokio::sync::broadcast::error::RecvError;

use super::super::state::{Agent, AgentEventReceiver, lock};
use super::index_progress::IndexProgress;
use super::podcast_request::INDEX_DOWNLOAD_FILE;
use super::service::library_folder;
use crate::fetch::outcome::TransferFailure;
use crate::fetch::state_directory::state_directory;
use crate::order::{TransferOrder, TransferVerb};

impl Agent {
    /// Begins to make the index from a file of Podcast Index or from its address.
    ///
    /// # Errors
    /// The source is neither, or an index is being made already.
    pub(in super::super) fn make_index(
        self: &Arc<Agent>,
        source: &str,
    ) -> Result<(), TransferFailure> {
        let source = source.trim();
        let progress = &self.podcasts.index_progress;
        if let Some(IndexProgress::Downloading(_) | IndexProgress::Reading) = &*lock(progress) {
            let text = "an index is being made already; wait until it is there";
            return Err(TransferFailure::error(text));
        }
        let is_address = source.starts_with("http://") || source.starts_with("https://");
        let events = self.events.subscribe();
        let (file, job) = match is_address {
            true => {
                let (file, job) = self.download_index(source)?;
                (file, Some(job))
            }
            false => (index_file(source)?, None),
        };
        *lock(progress) = Some(job.map_or(IndexProgress::Reading, IndexProgress::Downloading));
        let agent = self.clone();
        tokio::task::spawn_local(async move {
            let made = agent.finish_index(file, job, events).await;
            let outcome = made
                .err()
                .map(|failure| IndexProgress::Failed(failure.text));
            *lock(&agent.podcasts.index_progress) = outcome;
        });
        Ok(())
    }

    /// Orders the download of an index, by free networks. One that broke off goes on.
    fn download_index(self: &Arc<Agent>, address: &str) -> Result<(PathBuf, u64), TransferFailure> {
        let state = state_directory();
        let state = state.map_err(|error| TransferFailure::error(format!("{error:#}")))?;
        let file = state.join(INDEX_DOWNLOAD_FILE);
        let mut order = TransferOrder::new(TransferVerb::Get, address);
        order.file = Some(file.clone());
        CostPolicy::FreeOnly.as_str().clone_into(&mut order.policy);
        let (job, _) = self.add(order, true)?;
        Ok((file, job))
    }

    /// Waits for the download, if there is one, and makes the index.
    async fn finish_index(
        &self,
        file: PathBuf,
        job: Option<u64>,
        events: AgentEventReceiver,
    ) -> Result<(), TransferFailure> {
        if let Some(job) = job {
            self.wait_for_download(job, events).await?;
            *lock(&self.podcasts.index_progress) = Some(IndexProgress::Reading);
        }
        let made = self.import_index(file.clone()).await;
        if job.is_some() {
            // It is of no more use, and large.
            let _ = std::fs::remove_file(&file);
        }
        made.map(drop)
    }

    async fn wait_for_download(
        &self,
        job: u64,
        mut events: AgentEventReceiver,
    ) -> Result<(), TransferFailure> {
        loop {
            let transfer = self.show(job)?;
            let why = transfer["last"]["text"].as_str();
            match transfer["standing"].as_str() {
                Some("done") => return Ok(()),
                Some("failed" | "cancelled" | "gone") => {
                    return Err(TransferFailure::error(why.unwrap_or("the download failed")));
                }
                _ => {}
            }
            loop {
                match events.recv().await {
                    Ok((id, _)) if id != job => {}
                    // Events that were missed may have been its own.
                    Ok(_) | Err(RecvError::Lagged(_)) => break,
                    Err(RecvError::Closed) => {
                        return Err(TransferFailure::error("the agent is ending"));
                    }
                }
            }
        }
    }

    /// How far the making of an index is; none if none is being made, and the last one was.
    pub(in super::super) fn index_progress(&self) -> Option<IndexProgress> {
        lock(&self.podcasts.index_progress).clone()
    }

    /// When the index on this device was made; none if there is none.
    pub(in super::super) fn index_made_at(&self) -> Option<SystemTime> {
        let folder = library_folder().ok()?;
        PodcastIndex::in_folder(&folder).made_at()
    }

    /// Removes the index from this device.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(in super::super) fn remove_index(&self) -> Result<(), TransferFailure> {
        let removed = PodcastIndex::in_folder(&library_folder()?).remove();
        removed.map_err(|error| TransferFailure::error(error.to_string()))
    }
}

/// A file with an index, as a person wrote its path.
fn index_file(source: &str) -> Result<PathBuf, TransferFailure> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let file = match (source.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(source),
    };
    let is_file = file.is_absolute() && file.is_file();
    is_file.then_some(file).ok_or_else(|| {
        TransferFailure::usage(format!(
            "`{source}` is no file on this machine: write its whole path, such as ~/Downloads/podcastindex_feeds.db.tgz, or \
             an address"
        ))
    })
}
