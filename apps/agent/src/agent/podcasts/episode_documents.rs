//! Files beside an episode that its feed names: chapters and transcripts. The agent fetches each once and keeps what it
//! needs of it beside the library, so that it is there without a network.
//!
//! ```text
//!  download whole, or page opened ─▶ GET by a permitted link ─▶ parse ─▶ chapters/DIGEST.json, transcripts/DIGEST.json
//! ```

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cedos_readycast::{ChannelId, Episode, EpisodeId, refused_enclosure};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use url::Url;

use super::super::state::{Agent, lock};
use super::feed_fetch::{FeedFault, FeedFetch};
use super::service::library_folder;
use crate::fetch::jobs;

/// Files of a kind that are kept; the oldest is removed for another.
const KEPT_FILES_MAX: usize = 1_000; // a guess: 20 MB of chapters and 200 MB of transcripts, as they were seen

/// How long a file that could not be fetched is left alone.
const DOCUMENT_RETRY: Duration = Duration::from_secs(10 * 60); // a guess

/// Files that are remembered as asked for.
const ASKED_MAX: usize = 1_000;

/// A kind of files beside episodes.
pub(super) struct DocumentKind<T: 'static> {
    /// What the files are, in the plural; also the name of their folder.
    pub(super) name: &'static str,
    /// The maximum number of bytes of a file.
    pub(super) bytes_max: usize,
    /// Reads a file; none if it is no such file.
    pub(super) parse: fn(&[u8]) -> Option<T>,
}

impl<T: Serialize + DeserializeOwned + Send + 'static> DocumentKind<T> {
    fn folder(&self) -> Option<PathBuf> {
        Some(library_folder().ok()?.join(self.name))
    }

    /// What was kept of the file at an address; none if it was not fetched.
    pub(super) fn kept(&self, url: &Url) -> Option<T> {
        let bytes = std::fs::read(kept_file(&self.folder()?, url)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Whether the file at an address was fetched.
    pub(super) fn is_kept(&self, url: &Url) -> bool {
        self.folder()
            .is_some_and(|folder| kept_file(&folder, url).exists())
    }
}

/// The file of what is known of the one at an address.
fn kept_file(folder: &Path, url: &Url) -> PathBuf {
    let digest = Sha256::digest(url.as_str());
    folder.join(format!("{}.json", hex::encode(&digest[..16])))
}

fn keep(folder: &Path, url: &Url, document: &impl Serialize) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    remove_oldest(folder)?;
    jobs::replace(&kept_file(folder, url), document)
}

/// Makes room for another file.
fn remove_oldest(folder: &Path) -> io::Result<()> {
    let mut files: Vec<(SystemTime, PathBuf)> = std::fs::read_dir(folder)?
        .flatten()
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    files.sort();
    let surplus = (files.len() + 1).saturating_sub(KEPT_FILES_MAX);
    for (_, file) in &files[..surplus] {
        std::fs::remove_file(file)?;
    }
    Ok(())
}

impl Agent {
    /// Begins to fetch a file that the feed of an episode names, unless that was tried a short while ago.
    pub(super) fn fetch_document_of<T: Serialize + DeserializeOwned + Send + 'static>(
        self: &Arc<Agent>,
        episode: &Episode,
        url: &Url,
        kind: &'static DocumentKind<T>,
    ) {
        if self.may_ask_for_document(url) {
            let (agent, url) = (self.clone(), url.clone());
            let (id, channel) = (episode.summary.id, episode.summary.channel);
            tokio::task::spawn_local(async move {
                agent.fetch_and_keep(id, channel, url, kind).await;
            });
        }
    }

    /// Whether a file was not asked for a short while ago; it is noted as asked for.
    fn may_ask_for_document(&self, url: &Url) -> bool {
        let now = Instant::now();
        let mut asked = lock(&self.podcasts.documents_asked);
        asked.retain(|_, at| now.duration_since(*at) < DOCUMENT_RETRY);
        if asked.contains_key(url) || asked.len() >= ASKED_MAX {
            return false;
        }
        asked.insert(url.clone(), now);
        true
    }

    async fn fetch_and_keep<T: Serialize + DeserializeOwned + Send + 'static>(
        &self,
        episode: EpisodeId,
        channel: ChannelId,
        url: Url,
        kind: &'static DocumentKind<T>,
    ) {
        let known = self.podcasts.with(move |library| library.channel(channel));
        let Ok(Some(channel)) = known.await else {
            return;
        };
        if let Some(why) = refused_enclosure(&url, &channel.summary.url) {
            tracing::info!(why, "{} are not fetched", kind.name);
            return;
        }
        let source = self
            .podcasts
            .with(move |library| library.episode_source(episode));
        let source = source.await.ok().flatten();
        let local_host = source.and_then(|source| source.local_host);
        let ask = FeedFetch::of(url.clone(), kind.bytes_max).with_local_host(local_host);
        let answer = match self.fetch_document(&ask).await {
            Ok(answer) => answer,
            Err(FeedFault::NoNetwork) => {
                // It is asked for again when the page is opened again.
                lock(&self.podcasts.documents_asked).remove(&url);
                return;
            }
            Err(FeedFault::Failed(why)) => {
                tracing::info!(why, "{} are not fetched", kind.name);
                return;
            }
        };
        let status = answer.status;
        let Some(folder) = kind.folder().filter(|_| status == http::StatusCode::OK) else {
            tracing::info!(%url, %status, "there are no {}", kind.name);
            return;
        };
        let kept = tokio::task::spawn_blocking(move || match (kind.parse)(&answer.body) {
            Some(document) => keep(&folder, &url, &document),
            None => {
                tracing::info!(%url, "this is no file of {}", kind.name);
                Ok(())
            }
        });
        if let Ok(Err(error)) = kept.await {
            tracing::warn!(%error, "cannot keep the {} of an episode", kind.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_file_makes_room_for_another() {
        let folder = tempfile::tempdir().expect("a folder");
        for n in 0..KEPT_FILES_MAX {
            std::fs::write(folder.path().join(format!("{n}.json")), b"[]").expect("written");
        }
        let url: Url = "https://a.example/chapters.json"
            .parse()
            .expect("an address");
        keep(folder.path(), &url, &["One"]).expect("kept");
        let files = std::fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(files, KEPT_FILES_MAX);
        let kept = std::fs::read(kept_file(folder.path(), &url)).expect("there");
        assert_eq!(kept, b"[\"One\"]");
    }
}
