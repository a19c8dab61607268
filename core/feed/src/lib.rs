//! Feeds of podcasts as strangers write them: what is refused of them, and how they are rewritten for apps of others.
//!
//! ```text
//!  the agent, for apps of its machine ─┐
//!                                      ├─▶ rewrite_feed ─▶ the feed, with their links in place of enclosures
//!  D2Prox, for phones ─────────────────┘
//! ```
//!
//! Both call it on a thread that reaches nothing else (`cedos_sandbox::confined`).

mod feed_error;
mod feed_xml;
mod rewritten_feed;

pub use feed_error::{FEED_BYTES_MAX, FeedError};
pub use feed_xml::{attribute, declares_entities, is_web_page};
pub use rewritten_feed::{REWRITTEN_BYTES_MAX, rewrite_feed};
