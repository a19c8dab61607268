//! Finding podcasts by words: in a directory, or in the index on this device.
//!
//! ```text
//!  words ─┬─ no key ───── the search of iTunes, which asks for none ─┐
//!         ├─ a key ────── Podcast Index, by the user's key ──────────┼─▶ FoundPodcast
//!         └─ offline ──── PodcastIndex, without a network ───────────┘
//! ```

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use cedos_readycast::{IndexedPodcast, PodcastIndex};
use cedos_text::RemoteText;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use url::Url;

use super::super::state::Agent;
use super::feed_fetch::{FeedFault, FeedFetch, named_host};
use super::service::library_folder;
use crate::fetch::outcome::TransferFailure;
use crate::settings::UserSettings;

/// The setting of the directory's address.
const SEARCH_SETTING: &str = "podcasts.search_url";

/// The directory if the setting names no other.
const SEARCH_URL: &str = "https://itunes.apple.com/search";

/// The setting of the user's key for Podcast Index.
pub(in super::super) const KEY_SETTING: &str = "podcasts.index_key";

/// The setting of the file with the secret of the directory's key.
pub(in super::super) const SECRET_SETTING: &str = "podcasts.index_secret_file";

/// The setting of the address of Podcast Index.
const INDEX_SETTING: &str = "podcasts.index_url";

/// Podcast Index if the setting names no other.
const INDEX_URL: &str = "https://api.podcastindex.org/api/1.0/search/byterm";

/// The maximum number of bytes of a secret.
const SECRET_BYTES_MAX: u64 = 256; // a guess: Podcast Index gives 40

/// The maximum number of podcasts that a search returns.
const FOUND_MAX: usize = 25;

/// The maximum number of bytes of a directory's answer.
const ANSWER_BYTES_MAX: usize = 4 << 20; // a guess: 25 entries are 60 kB

/// A podcast that a directory knows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(in super::super) struct FoundPodcast {
    /// Title of the podcast, never empty.
    pub(in super::super) title: String,
    /// The podcast's author; may be empty.
    pub(in super::super) author: String,
    /// Address of its feed.
    pub(in super::super) url: Url,
    /// The podcast's language, as its feed says it; `None` if the directory does not tell.
    pub(in super::super) language: Option<String>,
    /// The number of episodes, as the directory counts them.
    pub(in super::super) episodes: Option<u32>,
}

impl From<IndexedPodcast> for FoundPodcast {
    fn from(found: IndexedPodcast) -> FoundPodcast {
        FoundPodcast {
            title: found.title,
            author: found.author,
            url: found.url,
            language: Some(found.language).filter(|language| !language.is_empty()),
            episodes: found.episodes,
        }
    }
}

/// An answer of iTunes.
#[derive(Deserialize)]
struct DirectoryAnswer {
    results: Vec<DirectoryResult>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DirectoryResult {
    collection_name: Option<String>,
    artist_name: Option<String>,
    feed_url: Option<String>,
    #[serde(skip)]
    language: Option<String>,
    track_count: Option<u32>,
}

/// An answer of Podcast Index.
#[derive(Deserialize)]
struct IndexAnswer {
    feeds: Vec<IndexResult>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct IndexResult {
    title: Option<String>,
    author: Option<String>,
    url: Option<String>,
    language: Option<String>,
    episode_count: Option<u32>,
}

impl From<IndexResult> for DirectoryResult {
    fn from(result: IndexResult) -> DirectoryResult {
        DirectoryResult {
            collection_name: result.title,
            artist_name: result.author,
            feed_url: result.url,
            language: Some(text(result.language)).filter(|language| !language.is_empty()),
            track_count: result.episode_count,
        }
    }
}

/// Reads an answer of iTunes; entries without a feed that can be read are left out.
fn read(body: &[u8]) -> Option<Vec<FoundPodcast>> {
    let answer: DirectoryAnswer = serde_json::from_slice(body).ok()?;
    Some(found(answer.results.into_iter()))
}

/// Reads an answer of Podcast Index; entries without a feed that can be read are left out.
fn read_index(body: &[u8]) -> Option<Vec<FoundPodcast>> {
    let answer: IndexAnswer = serde_json::from_slice(body).ok()?;
    Some(found(answer.feeds.into_iter().map(DirectoryResult::from)))
}

fn found(results: impl Iterator<Item = DirectoryResult>) -> Vec<FoundPodcast> {
    let found = results.filter_map(|result| {
        let url: Url = result.feed_url?.parse().ok()?;
        let title = text(result.collection_name);
        let is_web = matches!(url.scheme(), "http" | "https");
        (is_web && !title.is_empty()).then(|| FoundPodcast {
            title,
            author: text(result.artist_name),
            url,
            language: result.language,
            episodes: result.track_count,
        })
    });
    found.take(FOUND_MAX).collect()
}

/// A text of a directory on one line.
fn text(text: Option<String>) -> String {
    let text = text.unwrap_or_default();
    RemoteText::new(&text).as_str().to_owned()
}

/// A request to a directory, and how its answer is read.
struct DirectorySearch {
    ask: FeedFetch,
    read: fn(&[u8]) -> Option<Vec<FoundPodcast>>,
}

impl DirectorySearch {
    /// The search in the directory that the settings name.
    fn of(words: &str, settings: &UserSettings, now: Timestamp) -> Result<Self, TransferFailure> {
        match settings.chosen(KEY_SETTING) {
            Some(key) => DirectorySearch::in_podcast_index(words, settings, &key, now),
            None => DirectorySearch::in_itunes(words, settings),
        }
    }

    fn in_itunes(words: &str, settings: &UserSettings) -> Result<Self, TransferFailure> {
        let mut url = address(settings, SEARCH_SETTING, SEARCH_URL)?;
        url.query_pairs_mut()
            .append_pair("media", "podcast")
            .append_pair("limit", &FOUND_MAX.to_string())
            .append_pair("term", words);
        Ok(DirectorySearch {
            ask: ask(url),
            read,
        })
    }

    fn in_podcast_index(
        words: &str,
        settings: &UserSettings,
        key: &str,
        now: Timestamp,
    ) -> Result<Self, TransferFailure> {
        let mut url = address(settings, INDEX_SETTING, INDEX_URL)?;
        url.query_pairs_mut()
            .append_pair("max", &FOUND_MAX.to_string())
            .append_pair("q", words);
        let secret = secret(settings)?;
        let date = now.as_second().to_string();
        let mut ask = ask(url);
        ask.authorization = Some(signature(key, &secret, &date));
        ask.fields = vec![("X-Auth-Key", key.to_owned()), ("X-Auth-Date", date)];
        Ok(DirectorySearch {
            ask,
            read: read_index,
        })
    }
}

/// The value of `Authorization` for Podcast Index: the SHA-1 of key, secret and date, in hexadecimal.
fn signature(key: &str, secret: &str, date: &str) -> String {
    let signed = format!("{key}{secret}{date}");
    hex::encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, signed.as_bytes()))
}

fn ask(url: Url) -> FeedFetch {
    // The setting may name a directory of the user's own network.
    let local_host = named_host(&url);
    FeedFetch::of(url, ANSWER_BYTES_MAX).with_local_host(local_host)
}

fn address(settings: &UserSettings, key: &str, default: &str) -> Result<Url, TransferFailure> {
    let chosen = settings.chosen(key);
    let address = chosen.as_deref().unwrap_or(default).parse();
    address.map_err(|error| {
        TransferFailure::usage(format!("the setting {key} is no address: {error}"))
    })
}

/// The secret of the user's key for Podcast Index.
fn secret(settings: &UserSettings) -> Result<String, TransferFailure> {
    use std::io::Read as _;
    let file = settings.path(SECRET_SETTING).ok_or_else(|| {
        TransferFailure::usage(format!(
            "{KEY_SETTING} is set, but not {SECRET_SETTING}: write the secret into a file, and set its path"
        ))
    })?;
    let mut text = String::new();
    let read = std::fs::File::open(&file)
        .and_then(|file| file.take(SECRET_BYTES_MAX).read_to_string(&mut text));
    match read {
        Ok(_) if !text.trim().is_empty() => Ok(text.trim().to_owned()),
        Ok(_) => Err(TransferFailure::usage(format!(
            "{SECRET_SETTING}: {} is empty",
            file.display()
        ))),
        Err(error) => Err(TransferFailure::usage(format!(
            "{SECRET_SETTING}: cannot read {}: {error}",
            file.display()
        ))),
    }
}

impl Agent {
    /// Searches the directory for podcasts.
    ///
    /// # Errors
    /// The directory cannot be reached, or answers something else.
    pub(in super::super) async fn search_podcasts(
        &self,
        words: &str,
    ) -> Result<Vec<FoundPodcast>, TransferFailure> {
        let settings =
            UserSettings::load(None).map_err(|error| TransferFailure::usage(error.to_string()))?;
        let search = DirectorySearch::of(words, &settings, Timestamp::now())?;
        let directory = search.ask.url.host_str().unwrap_or_default().to_owned();
        let failed = |why: &str| {
            TransferFailure::error(format!(
                "the directory {directory} cannot be searched: {why}. `cedos cast add` takes the address of a feed, \
                 too, and `cedos cast search --offline` an index on this device"
            ))
        };
        let answer = self.fetch_document(&search.ask).await;
        let answer = answer.map_err(|fault| match fault {
            FeedFault::NoNetwork => failed("no network is up that may be used"),
            FeedFault::Failed(why) => failed(&why),
        })?;
        match answer.status {
            http::StatusCode::OK => {}
            http::StatusCode::UNAUTHORIZED | http::StatusCode::FORBIDDEN => {
                let why = format!(
                    "it refuses the key ({}); check {KEY_SETTING}, {SECRET_SETTING} and this machine's clock",
                    answer.status
                );
                return Err(failed(&why));
            }
            status => return Err(failed(&format!("it answers {status}"))),
        }
        (search.read)(&answer.body).ok_or_else(|| failed("its answer is no list of podcasts"))
    }

    /// Searches the index on this device.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub(in super::super) async fn search_index(
        &self,
        words: &str,
    ) -> Result<Vec<FoundPodcast>, TransferFailure> {
        let index = PodcastIndex::in_folder(&library_folder()?);
        if !index.exists() {
            let text = "there is no index on this device; `cedos cast index FILE` makes one from the file that \
                        Podcast Index publishes";
            return Err(TransferFailure::error(text));
        }
        let words = words.to_owned();
        let searching = tokio::task::spawn_blocking(move || index.search(&words, FOUND_MAX)).await;
        let found = searching.map_err(|error| TransferFailure::error(error.to_string()))?;
        let found = found.map_err(|error| TransferFailure::error(error.to_string()))?;
        Ok(found.into_iter().map(FoundPodcast::from).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_without_a_feed_are_left_out_and_titles_are_plain() {
        let body = br#"{"resultCount": 3, "results": [
            {"collectionName": "A\u001b[31m", "artistName": "B", "feedUrl": "https://a.example/f", "trackCount": 7},
            {"collectionName": "No feed"},
            {"collectionName": "C", "feedUrl": "file:///etc/passwd"}]}"#;
        let found = read(body).expect("a list");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].url.as_str(), "https://a.example/f");
        assert!(!found[0].title.contains('\u{1b}'), "{}", found[0].title);
        assert_eq!(found[0].episodes, Some(7));
        assert!(read(b"<html>").is_none());
    }

    #[test]
    fn an_answer_of_podcast_index_is_read() {
        let body = br#"{"status": "true", "feeds": [
            {"id": 75075, "title": "Batman University", "url": "https://feeds.example/bat", "author": "Tony",
             "episodeCount": 19, "dead": 0},
            {"id": 2, "title": "No feed", "url": ""}], "count": 2}"#;
        let found = read_index(body).expect("a list");
        assert_eq!(found.len(), 1);
        assert_eq!(
            (&*found[0].title, found[0].episodes),
            ("Batman University", Some(19))
        );
        assert!(read_index(br#"{"status": "false"}"#).is_none());
    }

    #[test]
    fn a_request_is_signed_by_key_secret_and_date() {
        // printf %s 'UXKCGDSYGUUEVQJSYDZH''yzJe2eE7XV-3eY576dyRZ6wXyAbndh6LUrCZ8KN|''1613713388' | sha1sum
        let signed = signature(
            "UXKCGDSYGUUEVQJSYDZH",
            "yzJe2eE7XV-3eY576dyRZ6wXyAbndh6LUrCZ8KN|",
            "1613713388",
        );
        assert_eq!(signed, "73a1fffed61c1d30d858beb1fc48f355386449d2");
    }
}
