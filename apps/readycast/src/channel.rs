//! Channels: what a person subscribes to.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use url::Url;

use crate::parsed_feed::SkippedItems;
use crate::rule::ChannelRule;

/// Number of a channel in this library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ChannelId(pub i64);

impl fmt::Display for ChannelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A channel in a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChannelSummary {
    /// Number of the channel.
    pub id: ChannelId,
    /// Address of the feed, without credentials.
    pub url: Url,
    /// Title, never empty.
    pub title: String,
    /// Author; may be empty.
    pub author: String,
    /// Which episodes are fetched, and by when.
    pub rule: ChannelRule,
    /// Episodes that are known.
    pub episodes: u32,
    /// Episodes that were not played.
    pub unplayed: u32,
    /// Episodes whose file is whole.
    pub ready: u32,
    /// Bytes of the files.
    pub file_bytes: u64,
    /// Publication of the newest episode.
    pub newest: Option<Timestamp>,
    /// Why the feed could not be read the last time, in a sentence.
    pub problem: Option<String>,
}

/// A channel with all that is known of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Channel {
    /// What a list shows.
    pub summary: ChannelSummary,
    /// Description in plain text.
    pub description: String,
    /// Page of the podcast.
    pub site: Option<Url>,
    /// Picture of the podcast.
    pub image: Option<Url>,
    /// When the channel was subscribed to.
    pub added_at: Timestamp,
    /// When the feed was last read.
    pub refreshed_at: Option<Timestamp>,
    /// When the feed is read next; none if it is gone for good.
    pub next_refresh_at: Option<Timestamp>,
    /// Items of the feed that are no episodes here.
    pub skipped: SkippedItems,
}
