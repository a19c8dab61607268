//! The newest text of feeds that other apps read through the agent.

use jiff::Timestamp;
use rusqlite::{OptionalExtension, Transaction, params};
use url::Url;

use crate::channel::ChannelId;
use crate::episode::EpisodeId;
use crate::library::{Library, LibraryError, seconds, url};

/// The maximum number of bytes of a feed that is kept for other apps.
pub const KEPT_FEED_BYTES_MAX: usize = 16 << 20; // a guess: 10,000 episodes with long notes

/// How long a feed is kept that no app asks for.
const KEPT_S: i64 = 30 * 24 * 3_600; // a guess

/// The text of a feed, and the episodes in it.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptFeed {
    /// Address at the origin.
    pub url: Url,
    /// Title of the channel.
    pub title: String,
    /// The feed as it came; none if it was not fetched since it is kept, empty if it is larger than
    /// [`KEPT_FEED_BYTES_MAX`].
    pub body: Option<Vec<u8>>,
    /// Number and address of each episode.
    pub episodes: Vec<(EpisodeId, Url)>,
    /// Why the feed could not be read the last time.
    pub problem: Option<String>,
}

impl Library {
    /// The feed of a channel for another app. From the first call on, what a refresh brings is kept; the feed is then
    /// due, and asked for without conditions. None if there is no such channel.
    ///
    /// # Errors
    /// The database fails.
    pub fn kept_feed(
        &self,
        channel: ChannelId,
        now: Timestamp,
    ) -> Result<Option<KeptFeed>, LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let found = transaction
            .query_row(
                "SELECT c.url, c.title, c.problem, k.body FROM channels c LEFT JOIN kept_feeds k ON k.channel = c.id
                 WHERE c.id = ?1",
                [channel.0],
                |row| {
                    Ok(KeptFeed {
                        url: url(row, "url")?,
                        title: row.get("title")?,
                        body: row.get("body")?,
                        problem: row.get("problem")?,
                        episodes: Vec::new(),
                    })
                },
            )
            .optional()?;
        let Some(mut feed) = found else {
            return Ok(None);
        };
        if feed.body.is_none() {
            transaction.execute(
                "UPDATE channels SET etag = NULL, last_modified = NULL, next_refresh_at = ?2 WHERE id = ?1",
                params![channel.0, seconds(now)],
            )?;
        }
        transaction.execute(
            "INSERT INTO kept_feeds (channel, asked_at) VALUES (?1, ?2)
             ON CONFLICT (channel) DO UPDATE SET asked_at = excluded.asked_at",
            params![channel.0, seconds(now)],
        )?;
        transaction.execute(
            "DELETE FROM kept_feeds WHERE asked_at < ?1",
            [seconds(now) - KEPT_S],
        )?;
        {
            let sql = "SELECT id, enclosure FROM episodes WHERE channel = ?1";
            let mut query = transaction.prepare_cached(sql)?;
            let rows = query.query_map([channel.0], |row| {
                Ok((EpisodeId(row.get("id")?), url(row, "enclosure")?))
            })?;
            feed.episodes = rows.collect::<Result<_, _>>()?;
        }
        transaction.commit()?;
        Ok(Some(feed))
    }
}

/// Keeps the text of a feed that was read, if an app reads it through the agent.
pub(crate) fn keep_feed(
    transaction: &Transaction<'_>,
    channel: ChannelId,
    body: &[u8],
) -> rusqlite::Result<()> {
    let body = match body.len() <= KEPT_FEED_BYTES_MAX {
        true => body,
        false => &[],
    };
    transaction.execute(
        "UPDATE kept_feeds SET body = ?2 WHERE channel = ?1",
        params![channel.0, body],
    )?;
    Ok(())
}

/// A version of an episode's bytes that an app was given a part of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedCopyVersion {
    /// Name of the version.
    pub edition: String,
    /// How many of its first bytes the digest is of.
    pub bytes: u64,
    /// Their digest, in hexadecimal.
    pub sha256: String,
}

impl Library {
    /// Notes which version of an episode an app is given.
    ///
    /// # Errors
    /// The database fails.
    pub fn note_given_copy(
        &self,
        episode: EpisodeId,
        copy: &ServedCopyVersion,
    ) -> Result<(), LibraryError> {
        self.lock().execute(
            "INSERT OR REPLACE INTO given_copies (episode, edition, bytes, sha256)
             SELECT id, ?2, ?3, ?4 FROM episodes WHERE id = ?1",
            params![
                episode.0,
                copy.edition,
                i64::try_from(copy.bytes).unwrap_or(i64::MAX),
                copy.sha256
            ],
        )?;
        Ok(())
    }

    /// The version of an episode that an app was given last; none if none was.
    ///
    /// # Errors
    /// The database fails.
    pub fn given_copy(
        &self,
        episode: EpisodeId,
    ) -> Result<Option<ServedCopyVersion>, LibraryError> {
        let connection = self.lock();
        let sql = "SELECT edition, bytes, sha256 FROM given_copies WHERE episode = ?1";
        let found = connection.query_row(sql, [episode.0], |row| {
            Ok(ServedCopyVersion {
                edition: row.get("edition")?,
                bytes: row.get::<_, i64>("bytes")? as u64,
                sha256: row.get("sha256")?,
            })
        });
        Ok(found.optional()?)
    }

    /// Notes which version of an episode an app is given now. Returns the one that apps were given last; none if
    /// they were given none.
    ///
    /// # Errors
    /// The database fails.
    pub fn note_app_copy(
        &self,
        episode: EpisodeId,
        edition: &str,
    ) -> Result<Option<String>, LibraryError> {
        let connection = self.lock();
        let sql = "SELECT edition FROM app_copies WHERE episode = ?1";
        let known: Option<String> = connection
            .query_row(sql, [episode.0], |row| row.get(0))
            .optional()?;
        if known.as_deref() != Some(edition) {
            connection.execute(
                "INSERT OR REPLACE INTO app_copies (episode, edition)
                 SELECT id, ?2 FROM episodes WHERE id = ?1",
                params![episode.0, edition],
            )?;
        }
        Ok(known)
    }
}
