//! Why a feed cannot be read, in words for its reader.

/// The maximum number of bytes of a feed.
pub const FEED_BYTES_MAX: usize = 50 << 20; // the largest feed that the tests take

/// Why a feed or a list of subscriptions cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeedError {
    /// The feed has more bytes than are read.
    #[error("the feed is larger than {} MB", FEED_BYTES_MAX >> 20)]
    TooLarge,
    /// A web page came in place of the feed.
    #[error("this is a web page, not a feed")]
    WebPage,
    /// The feed declares entities of its own, which could expand without end.
    #[error("the feed declares entities of its own, which are not read")]
    OwnEntities,
    /// The text cannot be parsed as a feed.
    #[error("this is not a feed that can be read: {0}")]
    Malformed(String),
}
