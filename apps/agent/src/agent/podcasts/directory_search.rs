//! Finding podcasts by words in a directory: the search of iTunes, which asks for no key.

use cedos_text::RemoteText;
use serde::{Deserialize, Serialize};
use url::Url;

use super::super::state::Agent;
use super::feed_fetch::{FeedFault, FeedFetch};
use crate::fetch::outcome::TransferFailure;
use crate::settings::UserSettings;

/// The setting of the directory's address.
const SEARCH_SETTING: &str = "podcasts.search_url";

/// The directory if the setting names no other.
const SEARCH_URL: &str = "https://itunes.apple.com/search";

/// Most podcasts that a search returns.
const FOUND_MAX: usize = 25;

/// Most bytes of a directory's answer.
const ANSWER_BYTES_MAX: usize = 4 << 20; // a guess: 25 entries are 60 kB

/// A podcast that a directory knows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(in super::super) struct FoundPodcast {
    /// Title of the podcast, never empty.
    pub(in super::super) title: String,
    /// Who makes it; may be empty.
    pub(in super::super) author: String,
    /// Address of its feed.
    pub(in super::super) url: Url,
    /// Its episodes, as the directory counts them.
    pub(in super::super) episodes: Option<u32>,
}

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
    track_count: Option<u32>,
}

/// Reads a directory's answer; entries without a feed that can be read are left out.
fn read(body: &[u8]) -> Option<Vec<FoundPodcast>> {
    let answer: DirectoryAnswer = serde_json::from_slice(body).ok()?;
    let text = |text: Option<String>| {
        RemoteText::new(&text.unwrap_or_default())
            .as_str()
            .to_owned()
    };
    let found = answer.results.into_iter().filter_map(|result| {
        let url: Url = result.feed_url?.parse().ok()?;
        let title = text(result.collection_name);
        let is_web = matches!(url.scheme(), "http" | "https");
        (is_web && !title.is_empty()).then(|| FoundPodcast {
            title,
            author: text(result.artist_name),
            url,
            episodes: result.track_count,
        })
    });
    Some(found.take(FOUND_MAX).collect())
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
        let address = settings.chosen(SEARCH_SETTING);
        let mut url: Url = address
            .as_deref()
            .unwrap_or(SEARCH_URL)
            .parse()
            .map_err(|error| {
                TransferFailure::usage(format!(
                    "the setting {SEARCH_SETTING} is no address: {error}"
                ))
            })?;
        url.query_pairs_mut()
            .append_pair("media", "podcast")
            .append_pair("limit", &FOUND_MAX.to_string())
            .append_pair("term", words);
        let directory = url.host_str().unwrap_or_default().to_owned();
        let failed = |why: &str| {
            TransferFailure::error(format!(
                "the directory {directory} cannot be searched: {why}. `cedos cast add` takes the address of a feed, \
                 too"
            ))
        };
        let answer = self
            .fetch_document(&FeedFetch::of(url, ANSWER_BYTES_MAX))
            .await;
        let answer = answer.map_err(|fault| match fault {
            FeedFault::NoNetwork => failed("no network is up that may be used"),
            FeedFault::Failed(why) => failed(&why),
        })?;
        if answer.status != http::StatusCode::OK {
            return Err(failed(&format!("it answers {}", answer.status)));
        }
        read(&answer.body).ok_or_else(|| failed("its answer is no list of podcasts"))
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
}
