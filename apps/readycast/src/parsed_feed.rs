//! A feed or a list of subscriptions, as it was read: nothing of it is stored yet.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use url::Url;

use crate::enclosure_choice::EpisodeEnclosure;

/// The maximum number of episodes that are kept of a feed: the newest.
pub const FEED_EPISODES_MAX: usize = 10_000;

/// The maximum number of bytes of a title, an author or an identifier.
pub const TITLE_BYTES_MAX: usize = 1024;

/// The maximum number of bytes of sanitised show notes.
pub const NOTES_BYTES_MAX: usize = 256 * 1024;

/// A feed as it was read. Texts are plain, show notes are sanitised HTML.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedFeed {
    /// Title, never empty: the address if the feed has none.
    pub title: String,
    /// Author, empty if there is none.
    pub author: String,
    /// Description in plain text.
    pub description: String,
    /// Page of the podcast.
    pub site: Option<Url>,
    /// Picture of the podcast.
    pub image: Option<Url>,
    /// Where the feed says that it has moved to (`itunes:new-feed-url`).
    pub new_url: Option<Url>,
    /// Minutes between refreshes that the feed asks for (`ttl`).
    pub ttl_minutes: Option<u32>,
    /// Episodes, the newest first.
    pub episodes: Vec<ParsedEpisode>,
    /// Items without audio or video, with a second use of an identifier, or beyond [`FEED_EPISODES_MAX`].
    pub skipped: SkippedItems,
}

/// Items of a feed that are no episodes here, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedItems {
    /// Items without an enclosure.
    pub without_enclosure: u32,
    /// Items whose identifier a newer item of the same feed has.
    pub duplicates: u32,
    /// Items older than the newest [`FEED_EPISODES_MAX`].
    pub beyond_limit: u32,
}

/// An item of a feed.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedEpisode {
    /// What names the episode within its feed: the GUID, else the enclosure's URL.
    pub guid: String,
    /// Title in plain text, never empty.
    pub title: String,
    /// Show notes, sanitised HTML.
    pub notes: String,
    /// Time of publication; none if the feed has none that can be read.
    pub published: Option<Timestamp>,
    /// The audio or video.
    pub enclosure: Url,
    /// Media type of the enclosure as the feed says it.
    pub media_type: Option<String>,
    /// Bytes of the enclosure as the feed says it. Often wrong.
    pub bytes: Option<u64>,
    /// Length as the feed says it.
    pub duration_s: Option<u32>,
    /// Page of the episode.
    pub link: Option<Url>,
    /// File of chapters in JSON (`podcast:chapters`).
    pub chapters: Option<Url>,
    /// Transcript (`podcast:transcript`): of several, one with times.
    pub transcript: Option<Url>,
    /// Other enclosures (`podcast:alternateEnclosure`), in the feed's order.
    pub alternates: Vec<EpisodeEnclosure>,
    /// Number of the season.
    pub season: Option<u32>,
    /// Number of the episode in its season.
    pub number: Option<u32>,
}

/// A list of subscriptions, as another program exported it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpmlImport {
    /// The feeds, each once, in their order.
    pub feeds: Vec<OpmlFeed>,
    /// Entries that were left out, each with the reason in words.
    pub skipped: Vec<String>,
}

/// A feed in a list of subscriptions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpmlFeed {
    /// Address of the feed.
    pub url: Url,
    /// Title in the list; may be empty.
    pub title: String,
}
