//! The library of a podcast client: subscriptions, episodes, positions, rules, and what is to be fetched next.
//!
//! ```text
//!  feed, OPML ─▶ ParsedFeed ─▶ Library (SQLite) ─▶ DownloadPlan ─▶ the agent's queue
//!                                  ▲                                    │
//!                                  └──── what was fetched, positions ◀──┘
//! ```
//!
//! It opens no socket: the agent fetches feeds and episodes, and tells what came. What strangers wrote (feeds, lists of
//! subscriptions, web pages) is parsed on a thread that reaches nothing else (`cedos_sandbox::confined`).

mod channel;
mod downloads;
mod enclosure_choice;
mod episode;
mod episode_actions;
mod episode_files;
mod episodes;
mod feed;
mod kept_feeds;
mod library;
mod local_host;
mod opml;
mod parsed_feed;
mod podcast_index;
mod refresh;
mod rule;
mod study;
mod subscription_changes;
mod subscriptions;
mod sync_account;
mod transcript;
mod transfer_log;
mod up_next;

pub use cedos_feed::{FEED_BYTES_MAX, FeedError};
pub use channel::{Channel, ChannelId, ChannelSummary};
pub use downloads::{
    ActiveDownload, DOWNLOAD_RETRY, DownloadOutcome, DownloadPlan, EpisodeSource, PlannedDownload,
    UnwantedFile, start_bytes,
};
pub use enclosure_choice::{ALTERNATES_MAX, EnclosureChoice, EpisodeEnclosure};
pub use episode::{
    Episode, EpisodeDeadline, EpisodeId, EpisodeQuery, EpisodeState, EpisodeSummary,
};
pub use episode_actions::{
    ActionSubject, EPISODE_ACTIONS_MAX, EpisodeActionKind, RecordedActions, SyncAction,
};
pub use episode_files::{FolderMount, ReadyFile};
pub use feed::parse_feed;
pub use kept_feeds::{KEPT_FEED_BYTES_MAX, KeptFeed, ServedCopyVersion};
pub use library::{Library, LibraryError};
pub use local_host::is_local_url;
pub use opml::{OPML_FEEDS_MAX, feed_links_of_page, read_opml, write_feed_list, write_opml};
pub use parsed_feed::{
    FEED_EPISODES_MAX, NOTES_BYTES_MAX, OpmlFeed, OpmlImport, ParsedEpisode, ParsedFeed,
    SkippedItems, TITLE_BYTES_MAX,
};
pub use podcast_index::{INDEX_PODCASTS_MAX, IndexImport, IndexedPodcast, PodcastIndex};
pub use refresh::{
    REFRESH_INTERVAL, REFRESH_INTERVAL_MAX, REFRESH_RETRY, RefreshOutcome, RefreshReport,
    RefreshRequest, refused_enclosure,
};
pub use rule::{ChannelRule, DownloadSchedule, KEEP_LATEST_DEFAULT, KeepRule, WeekdaySet};
pub use study::{
    DELAY_CLASSES, DelayClassSummary, DelayProposal, PROPOSAL_MET_SHARE, PROPOSAL_PLAYS_MAX,
    PROPOSAL_PLAYS_MIN, StudySummary, propose_delay,
};
pub use subscription_changes::{APP_DEVICES_MAX, AppDevice, ChangedFeed, SubscriptionChanges};
pub use subscriptions::{IMPORT_BATCH, IMPORT_READ_AT_ONCE, ImportedFeeds};
pub use sync_account::{SYNC_INTERVAL, SYNC_RETRY_MAX, SyncAccount, SyncProgress};
pub use transcript::{PASSAGES_MAX, TRANSCRIPT_BYTES_MAX, TranscriptPassage, parse_transcript};
pub use transfer_log::{
    AcceptedDelay, CarriedBytes, LoggedLoss, LoggedNetwork, LoggedSwitch, SWITCHES_MAX,
    TRANSFER_LOG_ENTRIES_MAX, TransferLabels, TransferLogEntry, TransferLogPage, TransferRecord,
    anonymous_log,
};
pub use up_next::{UpNextMove, priority_of_place};
