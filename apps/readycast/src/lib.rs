//! The library of a podcast client: subscriptions, episodes, positions, rules, and what is to be fetched next.
//!
//! ```text
//!  feed, OPML ─▶ ParsedFeed ─▶ Library (SQLite) ─▶ DownloadPlan ─▶ the agent's queue
//!                                  ▲                                    │
//!                                  └──── what was fetched, positions ◀──┘
//! ```
//!
//! It opens no socket and starts no thread: the agent fetches feeds and episodes, and tells what came.

mod parsed_feed;

pub use parsed_feed::{
    FEED_BYTES_MAX, FEED_EPISODES_MAX, FeedError, NOTES_BYTES_MAX, OpmlFeed, OpmlImport,
    ParsedEpisode, ParsedFeed, SkippedItems, TITLE_BYTES_MAX,
};
