//! Chapters of episodes whose feed names a file of them (`podcast:chapters`, in JSON). The agent fetches it once and
//! keeps what it needs of it beside the library, so that the chapters are there without a network.
//!
//! ```text
//!  download whole, or page opened ─▶ GET by a permitted link ─▶ titles, times, links ─▶ chapters/DIGEST.json
//! ```
//!
//! Pictures of chapters are not fetched: the page shows nothing that is not on this device.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cedos_readycast::{ChannelId, Episode, EpisodeId, refused_enclosure};
use cedos_text::escape_controls;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use url::Url;

use super::super::state::{Agent, lock};
use super::feed_fetch::{FeedFault, FeedFetch};
use super::service::library_folder;
use crate::fetch::jobs;

/// Most bytes of a file of chapters.
const CHAPTER_FILE_BYTES_MAX: usize = 1 << 20; // a guess: 200 chapters are 40 kB

/// Most chapters of an episode.
pub(in super::super) const CHAPTERS_MAX: usize = 200; // a guess

/// Most bytes of a chapter's title.
const CHAPTER_TITLE_BYTES_MAX: usize = 300; // a guess

/// Most seconds at which a chapter begins: four days.
const CHAPTER_START_S_MAX: f64 = 4.0 * 24.0 * 3_600.0; // a guess

/// Files of chapters that are kept; the oldest is removed for another.
const KEPT_FILES_MAX: usize = 1_000; // a guess: 20 MB at most, as they were seen

/// How long a file that could not be fetched is left alone.
const CHAPTERS_RETRY: Duration = Duration::from_secs(10 * 60); // a guess

/// Files of chapters that are remembered as asked for.
const ASKED_MAX: usize = 1_000;

/// A part of an episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct EpisodeChapter {
    /// Where it begins.
    pub(in super::super) start_s: f64,
    /// Title, never empty.
    pub(in super::super) title: String,
    /// A page about it.
    pub(in super::super) link: Option<Url>,
}

/// A file of chapters, as the podcast namespace defines it; of what it may hold, what is used here.
#[derive(Deserialize)]
struct ChapterFile {
    chapters: Vec<ListedChapter>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListedChapter {
    start_time: f64,
    #[serde(default)]
    title: String,
    url: Option<String>,
    /// Whether it is in the table of contents; those that are not only change the picture.
    toc: Option<bool>,
}

/// Reads a file of chapters: those that have a title and are in the table of contents, by their start.
fn parse_chapters(bytes: &[u8]) -> Option<Vec<EpisodeChapter>> {
    let file: ChapterFile = serde_json::from_slice(bytes).ok()?;
    let listed = file.chapters.into_iter().filter_map(|chapter| {
        let title = title_of(&chapter.title)?;
        let is_shown = chapter.toc != Some(false);
        let is_time = (0.0..=CHAPTER_START_S_MAX).contains(&chapter.start_time);
        let link = chapter.url.and_then(|text| text.parse().ok());
        (is_shown && is_time).then(|| EpisodeChapter {
            start_s: (chapter.start_time * 1000.0).round() / 1000.0,
            title,
            link: link.filter(|url: &Url| matches!(url.scheme(), "http" | "https")),
        })
    });
    let mut chapters: Vec<EpisodeChapter> = listed.take(CHAPTERS_MAX).collect();
    chapters.sort_by(|one, other| one.start_s.total_cmp(&other.start_s));
    Some(chapters)
}

fn title_of(text: &str) -> Option<String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut title = escape_controls(&words.join(" ")).into_owned();
    let end = title.floor_char_boundary(CHAPTER_TITLE_BYTES_MAX);
    title.truncate(end);
    (!title.is_empty()).then_some(title)
}

fn chapters_folder() -> Option<PathBuf> {
    Some(library_folder().ok()?.join("chapters"))
}

/// The file of what is known of the chapters at an address.
fn kept_file(folder: &Path, url: &Url) -> PathBuf {
    let digest = Sha256::digest(url.as_str());
    folder.join(format!("{}.json", hex::encode(&digest[..16])))
}

fn keep(folder: &Path, url: &Url, chapters: &[EpisodeChapter]) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    remove_oldest(folder)?;
    jobs::replace(&kept_file(folder, url), &chapters)
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

/// The chapters at an address that were fetched earlier; none if they were not.
fn kept_chapters(folder: &Path, url: &Url) -> Option<Vec<EpisodeChapter>> {
    let bytes = std::fs::read(kept_file(folder, url)).ok()?;
    serde_json::from_slice(&bytes).ok()
}

impl Agent {
    /// The chapters that the feed of an episode names. Those that are not on this device are fetched, and are here the
    /// next time.
    pub(in super::super) fn listed_chapters(
        self: &Arc<Agent>,
        episode: &Episode,
    ) -> Vec<EpisodeChapter> {
        let (Some(url), Some(folder)) = (&episode.chapters, chapters_folder()) else {
            return Vec::new();
        };
        if let Some(chapters) = kept_chapters(&folder, url) {
            return chapters;
        }
        if self.may_ask_for_chapters(url) {
            let (agent, url) = (self.clone(), url.clone());
            let (id, channel) = (episode.summary.id, episode.summary.channel);
            tokio::task::spawn_local(async move { agent.fetch_chapters(id, channel, url).await });
        }
        Vec::new()
    }

    /// Whether a file of chapters was not asked for a short while ago; it is noted as asked for.
    fn may_ask_for_chapters(&self, url: &Url) -> bool {
        let now = Instant::now();
        let mut asked = lock(&self.podcasts.chapters_asked);
        asked.retain(|_, at| now.duration_since(*at) < CHAPTERS_RETRY);
        if asked.contains_key(url) || asked.len() >= ASKED_MAX {
            return false;
        }
        asked.insert(url.clone(), now);
        true
    }

    async fn fetch_chapters(&self, episode: EpisodeId, channel: ChannelId, url: Url) {
        let known = self.podcasts.with(move |library| library.channel(channel));
        let Ok(Some(channel)) = known.await else {
            return;
        };
        if let Some(why) = refused_enclosure(&url, &channel.summary.url) {
            tracing::info!(why, "chapters are not fetched");
            return;
        }
        let source = self
            .podcasts
            .with(move |library| library.episode_source(episode));
        let source = source.await.ok().flatten();
        let local_host = source.and_then(|source| source.local_host);
        let ask = FeedFetch::of(url.clone(), CHAPTER_FILE_BYTES_MAX).with_local_host(local_host);
        let answer = match self.fetch_document(&ask).await {
            Ok(answer) => answer,
            Err(FeedFault::NoNetwork) => {
                // It is asked for again when the page is opened again.
                lock(&self.podcasts.chapters_asked).remove(&url);
                return;
            }
            Err(FeedFault::Failed(why)) => {
                tracing::info!(why, "chapters are not fetched");
                return;
            }
        };
        let chapters = match answer.status {
            http::StatusCode::OK => parse_chapters(&answer.body),
            _ => None,
        };
        let (Some(chapters), Some(folder)) = (chapters, chapters_folder()) else {
            tracing::info!(%url, status = %answer.status, "this is no file of chapters");
            return;
        };
        let kept = tokio::task::spawn_blocking(move || keep(&folder, &url, &chapters)).await;
        if let Ok(Err(error)) = kept {
            tracing::warn!(%error, "cannot keep the chapters of an episode");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn titles(json: &str) -> Option<Vec<(f64, String)>> {
        let chapters = parse_chapters(json.as_bytes())?;
        Some(chapters.into_iter().map(|c| (c.start_s, c.title)).collect())
    }

    #[test]
    fn chapters_are_read_in_their_order_and_only_those_in_the_table_of_contents() {
        let json = r#"{"version": "1.2.0", "chapters": [
            {"startTime": 90.5, "title": " Two\nwords ", "img": "https://a.example/1.png"},
            {"startTime": 0, "title": "Opening"},
            {"startTime": 5, "title": "", "img": "https://a.example/2.png"},
            {"startTime": 7, "title": "Picture", "toc": false},
            {"startTime": -1, "title": "Early"},
            {"startTime": 1e300, "title": "Late"}
        ]}"#;
        let expected = [(0.0, "Opening".to_owned()), (90.5, "Two words".to_owned())];
        assert_eq!(titles(json).expect("chapters"), expected);
        for wrong in ["", "[]", "{}", r#"{"chapters": [{"title": "no time"}]}"#] {
            assert_eq!(titles(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn links_of_chapters_are_pages_of_the_web_and_titles_are_short_and_plain() {
        let long = "ö".repeat(400);
        let json = serde_json::json!({"chapters": [
            {"startTime": 0, "title": "a\u{202e}b", "url": "javascript:alert(1)"},
            {"startTime": 1, "title": long, "url": "https://a.example/"},
        ]});
        let chapters = parse_chapters(json.to_string().as_bytes()).expect("chapters");
        assert_eq!(chapters[0].link, None);
        assert!(!chapters[0].title.contains('\u{202e}'));
        assert_eq!(chapters[1].title.len(), CHAPTER_TITLE_BYTES_MAX);
        assert_eq!(
            chapters[1].link.as_ref().map(Url::as_str),
            Some("https://a.example/")
        );
        let many = (0..2 * CHAPTERS_MAX).map(|n| serde_json::json!({"startTime": n, "title": "x"}));
        let many = serde_json::json!({"chapters": many.collect::<Vec<_>>()}).to_string();
        assert_eq!(
            parse_chapters(many.as_bytes()).expect("chapters").len(),
            CHAPTERS_MAX
        );
    }

    #[test]
    fn the_oldest_file_makes_room_for_another() {
        let folder = tempfile::tempdir().expect("a directory");
        for n in 0..KEPT_FILES_MAX {
            std::fs::write(folder.path().join(format!("{n}.json")), b"[]").expect("written");
        }
        let url: Url = "https://a.example/chapters.json"
            .parse()
            .expect("an address");
        let chapters = [EpisodeChapter {
            start_s: 1.5,
            title: "One".to_owned(),
            link: None,
        }];
        keep(folder.path(), &url, &chapters).expect("kept");
        let files = std::fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(files, KEPT_FILES_MAX);
        assert_eq!(
            kept_chapters(folder.path(), &url).as_deref(),
            Some(&chapters[..])
        );
    }
}
