//! Episodes: what a person hears.

use std::fmt;
use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use url::Url;

use crate::channel::ChannelId;
use crate::enclosure_choice::EpisodeEnclosure;

/// Number of an episode in this library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EpisodeId(pub i64);

impl fmt::Display for EpisodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How far the file of an episode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EpisodeState {
    /// The episode was not fetched.
    New,
    /// The agent has a transfer for it.
    Downloading,
    /// The file is whole.
    Ready,
    /// The episode could not be fetched; `problem` says why.
    Failed,
    /// The file was removed: by hand, or by the rule.
    Removed,
}

impl EpisodeState {
    const ALL: [EpisodeState; 5] = [
        EpisodeState::New,
        EpisodeState::Downloading,
        EpisodeState::Ready,
        EpisodeState::Failed,
        EpisodeState::Removed,
    ];

    pub(crate) fn number(self) -> i64 {
        self as i64
    }

    pub(crate) fn from_number(number: i64) -> EpisodeState {
        let state = EpisodeState::ALL.into_iter().find(|s| s.number() == number);
        state.unwrap_or(EpisodeState::New)
    }

    /// The word for a person.
    pub fn as_str(self) -> &'static str {
        match self {
            EpisodeState::New => "new",
            EpisodeState::Downloading => "downloading",
            EpisodeState::Ready => "ready",
            EpisodeState::Failed => "failed",
            EpisodeState::Removed => "removed",
        }
    }
}

/// The deadline that a person gave to an episode alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpisodeDeadline {
    /// The deadline; `None` if there is none.
    pub by: Option<Timestamp>,
    /// Policy of the download, as `--policy` takes it; none for the channel's.
    pub policy: Option<String>,
}

/// An episode in a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EpisodeSummary {
    /// Number of the episode.
    pub id: EpisodeId,
    /// Number of its channel.
    pub channel: ChannelId,
    /// Title of its channel.
    pub channel_title: String,
    /// Title, never empty.
    pub title: String,
    /// Number of the season, if the feed says it.
    pub season: Option<u32>,
    /// Number of the episode in its season or podcast, if the feed says it.
    pub number: Option<u32>,
    /// Publication, or when it was first seen.
    pub published: Timestamp,
    /// Length as the feed says it, or as a player measured it.
    pub duration_s: Option<u32>,
    /// Bytes of the file, or as the feed says it.
    pub bytes: Option<u64>,
    /// How far the file is.
    pub state: EpisodeState,
    /// Whether the episode was heard to its end.
    pub played: bool,
    /// Where to go on.
    pub position_ms: u64,
    /// Deadline of its download, while there is one.
    pub deadline: Option<Timestamp>,
    /// Number of the agent's transfer, while there is one.
    pub job: Option<u64>,
    /// Why the episode could not be fetched, in a sentence.
    pub problem: Option<String>,
    /// The place that a person gave it in the order of hearing, from 1; none if no person did.
    pub up_next: Option<u32>,
}

/// An episode with all that is known of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Episode {
    /// What a list shows.
    pub summary: EpisodeSummary,
    /// What names it within its feed.
    pub guid: String,
    /// Show notes, sanitised HTML.
    pub notes: String,
    /// The audio or video.
    pub enclosure: Url,
    /// Media type as the feed or the origin says it.
    pub media_type: Option<String>,
    /// Page of the episode.
    pub link: Option<Url>,
    /// File of chapters in JSON.
    pub chapters: Option<Url>,
    /// Address of the transcript.
    pub transcript: Option<Url>,
    /// Other enclosures that the feed names.
    pub alternates: Vec<EpisodeEnclosure>,
    /// The alternate that was chosen for the download; none for the feed's own, and before there is a download.
    pub chosen: Option<EpisodeEnclosure>,
    /// The file, if it is whole.
    pub file: Option<PathBuf>,
    /// Digest of the file, in hexadecimal.
    pub sha256: Option<String>,
    /// What a person asked for this episode alone.
    pub own_deadline: Option<EpisodeDeadline>,
}

/// Which episodes a list shows; the newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpisodeQuery {
    /// Episodes of this channel only.
    pub channel: Option<ChannelId>,
    /// Only episodes in this state.
    pub state: Option<EpisodeState>,
    /// Only those that were played, or only those that were not.
    pub played: Option<bool>,
    /// Words in the title, all of them.
    pub words: String,
    /// Entries to leave out at the beginning.
    pub offset: u32,
    /// The maximum number of entries.
    pub limit: u32,
}

impl Default for EpisodeQuery {
    fn default() -> EpisodeQuery {
        EpisodeQuery {
            channel: None,
            state: None,
            played: None,
            words: String::new(),
            offset: 0,
            limit: 100,
        }
    }
}
