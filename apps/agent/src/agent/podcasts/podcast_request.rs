//! What `cedos cast` asks of the agent, in JSON.

use std::path::PathBuf;

use cedos_readycast::{EpisodeId, UpNextMove};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use url::Url;

/// The file of an index while it is downloaded, in the directory of the state.
pub const INDEX_DOWNLOAD_FILE: &str = "podcasts-index.download";

/// What `cedos cast` asks of the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cast", rename_all = "kebab-case")]
pub enum PodcastRequest {
    /// Subscribes to a feed, or to the feed that a page links to.
    Add {
        /// The address of the feed or page; credentials in it are stored apart.
        url: Url,
    },
    /// Searches a directory.
    Search {
        /// Words of the title.
        words: String,
        /// Whether the index on this device is searched, without a network.
        #[serde(default)]
        offline: bool,
    },
    /// Makes the index on this device from a file of Podcast Index.
    Index {
        /// The database or its archive; its path is absolute.
        file: PathBuf,
    },
    /// Writes a copy of the library.
    Backup {
        /// The file to write, which must not exist; its path is absolute.
        file: PathBuf,
    },
    /// Lists the channels; with words, the channels and episodes whose titles have them.
    List {
        /// Words of titles; empty for all channels.
        #[serde(default)]
        words: String,
    },
    /// Shows a channel and its episodes.
    Show {
        /// Number, address or words of the title.
        channel: String,
        /// The maximum number of episodes in the answer.
        #[serde(default = "shown")]
        limit: u32,
    },
    /// Lists the episodes that are in the queue, by their deadlines, and those that are ready.
    Queue,
    /// Lists the episodes that are ready or coming, in the order in which they will be heard, after moving one.
    UpNext {
        /// The episode to move; one that is not on this device is asked for.
        #[serde(default)]
        episode: Option<EpisodeId>,
        /// Where the episode is moved to.
        #[serde(default)]
        to: UpNextMove,
        /// Whether the order is that of publication again.
        #[serde(default)]
        reset: bool,
    },
    /// Returns the episode to hear next; none if nothing else is here.
    Next {
        /// The episode that is being heard, or was.
        #[serde(default)]
        after: Option<EpisodeId>,
    },
    /// Lists the episodes that were begun and not heard to their end, the one that was heard last first.
    Continue,
    /// Shows an episode, with its file or address, its notes and chapters.
    Episode {
        /// The episode's number.
        episode: EpisodeId,
        /// Whether the answer has the transcript.
        #[serde(default)]
        transcript: bool,
    },
    /// Returns what a player is to play: the file of an episode, or a link to its download as far as it has come. One that
    /// is not on this device is asked for. If nothing of it comes within a few seconds, the answer has neither, and says
    /// why.
    Play {
        /// The episode's number.
        episode: EpisodeId,
        /// The policy of its download from now on; none as it is, or as the channel's rule has it.
        #[serde(default)]
        policy: Option<String>,
        /// Whether the same player asked before: an episode that is not wanted any longer is not asked for again.
        #[serde(default)]
        again: bool,
    },
    /// Notes that a player began with an episode.
    Begun {
        /// The episode's number.
        episode: EpisodeId,
    },
    /// Returns how far an episode was heard, after storing it if it is named.
    Position {
        /// The episode's number.
        episode: EpisodeId,
        /// The position to store.
        #[serde(default)]
        position_ms: Option<u64>,
        /// The length as the player measured it.
        #[serde(default)]
        duration_ms: Option<u64>,
    },
    /// Changes what is fetched of a channel; what is absent stays.
    Rule {
        /// Number, address or words of the title.
        channel: String,
        /// When new episodes are wanted, as a person writes it.
        #[serde(default)]
        schedule: Option<String>,
        /// How many of the newest episodes are kept.
        #[serde(default)]
        keep: Option<u32>,
        /// The maximum number of bytes of the channel's files.
        #[serde(default)]
        keep_bytes: Option<u64>,
        /// Whether an episode is removed from this device when it was played.
        #[serde(default)]
        unplayed_only: Option<bool>,
        /// The policy of downloads; `default` is the device's own.
        #[serde(default)]
        policy: Option<String>,
        /// Which of an episode's files is downloaded: `original`, `audio` or `smallest`.
        #[serde(default)]
        file: Option<String>,
    },
    /// Subscribes to all feeds of a list.
    Import {
        /// The OPML file; its path is absolute.
        file: PathBuf,
    },
    /// Returns the subscriptions as OPML.
    Export {
        /// Whether the addresses are links of the agent, for other apps on this machine.
        #[serde(default)]
        for_apps: bool,
    },
    /// Opens the port for other apps, and returns what they are told.
    Apps {
        /// Whether what apps were told until now no longer works.
        #[serde(default)]
        new_links: bool,
    },
    /// Closes the port for other apps.
    AppsClose,
    /// Exchanges subscriptions and positions with a server now.
    Sync {
        /// The server to set up, with user and password; none for the one that is set up.
        #[serde(default)]
        url: Option<Url>,
        /// Whether the exchange may end many subscriptions at once.
        #[serde(default)]
        accept_removals: bool,
    },
    /// Returns the server that is set up.
    SyncStatus,
    /// Forgets the server.
    SyncEnd,
    /// Returns a part of the log of downloads, the oldest first.
    Log {
        /// Only downloads that ended since then.
        #[serde(default)]
        since: Option<Timestamp>,
        /// Where the earlier part ended, as its answer said it.
        #[serde(default)]
        after: i64,
    },
    /// Reads feeds now.
    Refresh {
        /// Number, address or words of the title; none is all channels.
        #[serde(default)]
        channel: Option<String>,
    },
    /// Ends a subscription, and removes the files of its episodes.
    Remove {
        /// Number, address or words of the title.
        channel: String,
    },
    /// Marks an episode as played, or as not played.
    Played {
        /// The episode's number.
        episode: EpisodeId,
        /// Whether the episode was played.
        played: bool,
    },
    /// Asks for an episode, whatever its channel's rule says.
    Download {
        /// The episode's number.
        episode: EpisodeId,
        /// The deadline; `None` if there is none.
        #[serde(default)]
        by: Option<Timestamp>,
        /// The policy; none for the channel's.
        #[serde(default)]
        policy: Option<String>,
    },
    /// Takes back that an episode was asked for, and takes it out of the queue.
    NotWanted {
        /// The episode's number.
        episode: EpisodeId,
    },
}

fn shown() -> u32 {
    50
}
