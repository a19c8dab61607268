//! Which feeds are due, and what a refresh brought.
//!
//! ```text
//!  due ─▶ fetched ─┬─ not modified ──▶ due again after an hour, or the feed's `ttl`
//!                  ├─ a feed ────────▶ episodes added and changed; perhaps moved to another address
//!                  └─ failed ────────▶ due again after 15 min, 30 min, 1 h … 24 h; gone: never
//! ```

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::{OptionalExtension, Row, Transaction, named_params, params};
use serde::Serialize;
use url::Url;

use crate::channel::ChannelId;
use crate::episode::{EpisodeId, EpisodeState};
use crate::feed::parse_feed;
use crate::kept_feeds::keep_feed;
use crate::library::{Library, LibraryError, optional_time, seconds, to_json, url};
use crate::local_host::{is_local_url, local_host_of};
use crate::parsed_feed::{ParsedEpisode, ParsedFeed, SkippedItems};

/// Time between two refreshes of a feed that asks for no other.
pub const REFRESH_INTERVAL: Duration = Duration::from_secs(3_600);

/// Longest time between two refreshes, whatever a feed asks for.
pub const REFRESH_INTERVAL_MAX: Duration = Duration::from_secs(24 * 3_600);

/// Time until a failed refresh is tried again; it doubles with each failure, up to [`REFRESH_INTERVAL_MAX`].
pub const REFRESH_RETRY: Duration = Duration::from_secs(15 * 60);

/// The furthest that a refresh is ever set ahead, in seconds: the longest interval and its spread.
const FURTHEST_S: i64 = 24 * 3_600 * 11 / 10;

/// Moves of a feed to other addresses that are followed within a day.
const MOVES_PER_DAY_MAX: u32 = 5;

/// A feed to be fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefreshRequest {
    /// Channel of the feed.
    pub channel: ChannelId,
    /// The feed's address.
    pub url: Url,
    /// The entity tag, for `If-None-Match`.
    pub etag: Option<String>,
    /// The time of the last change, for `If-Modified-Since`.
    pub last_modified: Option<String>,
    /// Value of `Authorization`, for this host only.
    pub authorization: Option<String>,
    /// The host of a local network that the feed may lead to: its own, if the user subscribed to it there.
    pub local_host: Option<String>,
}

/// What came of fetching a feed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefreshOutcome {
    /// The origin says that nothing changed.
    NotModified,
    /// The origin sent the feed.
    Feed {
        /// The body of the server's answer.
        bytes: Vec<u8>,
        /// `ETag` of the answer.
        etag: Option<String>,
        /// The feed's `Last-Modified`.
        last_modified: Option<String>,
        /// The address at which redirects for good (301, 308) ended; none without such a redirect.
        moved_to: Option<Url>,
    },
    /// The feed could not be fetched.
    Failed {
        /// Why, in a sentence.
        reason: String,
        /// Whether the origin says that it is gone for good (410).
        gone: bool,
        /// When the origin wants to be asked again (`Retry-After`).
        retry_after: Option<Duration>,
    },
}

/// What a refresh changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RefreshReport {
    /// Episodes that are new.
    pub added: u32,
    /// Episodes whose title, notes or enclosure changed.
    pub changed: u32,
    /// Items that are no episodes here.
    pub skipped: SkippedItems,
    /// The feed's new address.
    pub moved_to: Option<Url>,
    /// Why the feed could not be read, in a sentence.
    pub problem: Option<String>,
}

impl Library {
    /// Feeds that are due at `now`, those that wait longest first. One whose time is further away than any wait is due
    /// too: the clock was wrong when it was set.
    ///
    /// # Errors
    /// The database fails.
    pub fn due_refreshes(
        &self,
        now: Timestamp,
        limit: usize,
    ) -> Result<Vec<RefreshRequest>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(
            "SELECT id, url, etag, last_modified, authorization, local_host FROM channels
             WHERE next_refresh_at <= ?1 OR next_refresh_at > ?2
             ORDER BY next_refresh_at, id LIMIT ?3",
        )?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let now = seconds(now);
        let rows = query.query_map(params![now, now + FURTHEST_S, limit], refresh_request)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// The feed of a channel if it is due at `now`, as [`Library::due_refreshes`] has it.
    ///
    /// # Errors
    /// The database fails.
    pub fn due_refresh(
        &self,
        channel: ChannelId,
        now: Timestamp,
    ) -> Result<Option<RefreshRequest>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(
            "SELECT id, url, etag, last_modified, authorization, local_host FROM channels
             WHERE id = ?1 AND (next_refresh_at <= ?2 OR next_refresh_at > ?3)",
        )?;
        let now = seconds(now);
        let of_channel = params![channel.0, now, now + FURTHEST_S];
        let found = query.query_row(of_channel, refresh_request);
        Ok(found.optional()?)
    }

    /// When the next feed is due after `now`; none if none is.
    ///
    /// # Errors
    /// The database fails.
    pub fn next_refresh_after(&self, now: Timestamp) -> Result<Option<Timestamp>, LibraryError> {
        let connection = self.lock();
        let sql = "SELECT min(next_refresh_at) AS at FROM channels WHERE next_refresh_at > ?1";
        let next = connection.query_row(sql, [seconds(now)], |row| optional_time(row, "at"));
        Ok(next?)
    }

    /// Makes a feed due now; all feeds if `channel` is none. One that is gone is asked for once more.
    ///
    /// # Errors
    /// The database fails.
    pub fn refresh_now(
        &self,
        channel: Option<ChannelId>,
        now: Timestamp,
    ) -> Result<(), LibraryError> {
        self.lock().execute(
            "UPDATE channels SET next_refresh_at = ?1 WHERE ?2 IS NULL OR id = ?2",
            params![seconds(now), channel.map(|c| c.0)],
        )?;
        Ok(())
    }

    /// Makes the feed of an episode due, because the origin refused the episode: the feed may have a newer address. Only
    /// if the feed was not read since `since`, when the download began.
    ///
    /// # Errors
    /// The database fails.
    pub fn refresh_for_episode(
        &self,
        episode: EpisodeId,
        since: Timestamp,
        now: Timestamp,
    ) -> Result<(), LibraryError> {
        self.lock().execute(
            "UPDATE channels SET next_refresh_at = ?3
             WHERE id = (SELECT channel FROM episodes WHERE id = ?1)
             AND ifnull(refreshed_at, 0) <= ?2 AND next_refresh_at IS NOT NULL",
            params![episode.0, seconds(since), seconds(now)],
        )?;
        Ok(())
    }

    /// Stores what came of fetching a feed. A feed that cannot be read is a problem of its channel, and reported.
    ///
    /// # Errors
    /// There is no such channel, or the database fails.
    pub fn apply_refresh(
        &self,
        channel: ChannelId,
        outcome: RefreshOutcome,
        now: Timestamp,
    ) -> Result<RefreshReport, LibraryError> {
        let address = self.channel_url(channel)?;
        // Parsing takes longest; the database is free meanwhile.
        let parsed = match &outcome {
            RefreshOutcome::Feed { bytes, .. } => Some(parse_feed(bytes, &address)),
            _ => None,
        };
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let report = match (outcome, parsed) {
            (RefreshOutcome::NotModified, _) => {
                note_success(&transaction, channel, &address, None, now)?;
                RefreshReport::default()
            }
            (
                RefreshOutcome::Feed {
                    bytes,
                    etag,
                    last_modified,
                    moved_to,
                },
                Some(Ok(feed)),
            ) => {
                keep_feed(&transaction, channel, &bytes)?;
                let mut report = store_feed(&transaction, channel, &address, &feed, now)?;
                note_success(&transaction, channel, &address, feed.ttl_minutes, now)?;
                transaction.execute(
                    "UPDATE channels SET etag = ?2, last_modified = ?3 WHERE id = ?1",
                    params![channel.0, etag, last_modified],
                )?;
                let moved_to = feed.new_url.or(moved_to).filter(|to| *to != address);
                if let Some(to) = moved_to {
                    match move_channel(&transaction, channel, &address, &to, now)? {
                        Ok(()) => report.moved_to = Some(to),
                        Err(problem) => report.problem = Some(problem),
                    }
                }
                report
            }
            (RefreshOutcome::Feed { .. }, Some(Err(error))) => {
                let problem = error.to_string();
                note_failure(&transaction, channel, &address, &problem, None, now)?;
                failed(problem)
            }
            (
                RefreshOutcome::Failed {
                    reason,
                    gone,
                    retry_after,
                },
                _,
            ) => {
                note_failure(&transaction, channel, &address, &reason, retry_after, now)?;
                if gone {
                    transaction.execute(
                        "UPDATE channels SET next_refresh_at = NULL WHERE id = ?1",
                        [channel.0],
                    )?;
                }
                failed(reason)
            }
            (RefreshOutcome::Feed { .. }, None) => unreachable!("feeds are parsed above"),
        };
        if let Some(problem) = &report.problem {
            transaction.execute(
                "UPDATE channels SET problem = ?2 WHERE id = ?1",
                params![channel.0, problem],
            )?;
        }
        transaction.commit()?;
        Ok(report)
    }

    fn channel_url(&self, channel: ChannelId) -> Result<Url, LibraryError> {
        let connection = self.lock();
        let sql = "SELECT url FROM channels WHERE id = ?1";
        let found = connection.query_row(sql, [channel.0], |row| url(row, "url"));
        found.optional()?.ok_or(LibraryError::NoChannel(channel.0))
    }
}

fn refresh_request(row: &Row<'_>) -> rusqlite::Result<RefreshRequest> {
    let url = url(row, "url")?;
    Ok(RefreshRequest {
        channel: ChannelId(row.get("id")?),
        local_host: local_host_of(&url, row.get("local_host")?),
        url,
        etag: row.get("etag")?,
        last_modified: row.get("last_modified")?,
        authorization: row.get("authorization")?,
    })
}

fn failed(problem: String) -> RefreshReport {
    RefreshReport {
        problem: Some(problem),
        ..RefreshReport::default()
    }
}

/// Up to a tenth more, by the address: feeds of one host are not asked for at the same moment.
fn spread(interval: Duration, address: &Url) -> i64 {
    let mut hasher = DefaultHasher::new();
    address.as_str().hash(&mut hasher);
    let s = interval.as_secs();
    (s + hasher.finish() % (s / 10).max(1)) as i64
}

fn note_success(
    transaction: &Transaction<'_>,
    channel: ChannelId,
    address: &Url,
    ttl_minutes: Option<u32>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let ttl = Duration::from_secs(u64::from(ttl_minutes.unwrap_or(0)) * 60);
    let interval = ttl.clamp(REFRESH_INTERVAL, REFRESH_INTERVAL_MAX);
    transaction.execute(
        "UPDATE channels SET refreshed_at = ?2, next_refresh_at = ?2 + ?3, failures = 0,
         problem = NULL WHERE id = ?1",
        params![channel.0, seconds(now), spread(interval, address)],
    )?;
    Ok(())
}

fn note_failure(
    transaction: &Transaction<'_>,
    channel: ChannelId,
    address: &Url,
    problem: &str,
    retry_after: Option<Duration>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let failures: u32 = transaction.query_row(
        "UPDATE channels SET failures = failures + 1, problem = ?2 WHERE id = ?1
         RETURNING failures",
        params![channel.0, problem],
        |row| row.get(0),
    )?;
    let doubled = REFRESH_RETRY.saturating_mul(1 << failures.saturating_sub(1).min(16));
    let wait = doubled
        .max(retry_after.unwrap_or_default())
        .min(REFRESH_INTERVAL_MAX);
    transaction.execute(
        "UPDATE channels SET next_refresh_at = ?2 WHERE id = ?1",
        params![channel.0, seconds(now) + spread(wait, address)],
    )?;
    Ok(())
}

fn store_feed(
    transaction: &Transaction<'_>,
    channel: ChannelId,
    address: &Url,
    feed: &ParsedFeed,
    now: Timestamp,
) -> rusqlite::Result<RefreshReport> {
    transaction.execute(
        "UPDATE channels SET title = ?2, author = ?3, description = ?4, site = ?5, image = ?6,
         skipped = ?7 WHERE id = ?1",
        params![
            channel.0,
            feed.title,
            feed.author,
            feed.description,
            feed.site.as_ref().map(Url::as_str),
            feed.image.as_ref().map(Url::as_str),
            to_json(&feed.skipped),
        ],
    )?;
    let mut report = RefreshReport {
        skipped: feed.skipped,
        ..RefreshReport::default()
    };
    let guids: HashSet<&str> = feed.episodes.iter().map(|e| e.guid.as_str()).collect();
    for episode in &feed.episodes {
        let known = known_episode(transaction, channel, episode, &guids)?;
        let problem = refused_enclosure(&episode.enclosure, address);
        match known {
            Some(id) => {
                let is_changed = update_episode(transaction, id, episode, problem.as_deref(), now)?;
                update_published(transaction, id, episode, now)?;
                report.changed += u32::from(is_changed);
            }
            None => {
                insert_episode(transaction, channel, episode, problem.as_deref(), now)?;
                report.added += 1;
            }
        }
    }
    Ok(report)
}

/// The stored episode that an item is: by its identifier; or, if the feed changed its identifiers, by its enclosure.
fn known_episode(
    transaction: &Transaction<'_>,
    channel: ChannelId,
    episode: &ParsedEpisode,
    guids: &HashSet<&str>,
) -> rusqlite::Result<Option<i64>> {
    let by_guid: Option<i64> = transaction
        .prepare_cached("SELECT id FROM episodes WHERE channel = ?1 AND guid = ?2")?
        .query_row(params![channel.0, episode.guid], |row| row.get(0))
        .optional()?;
    if by_guid.is_some() {
        return Ok(by_guid);
    }
    let by_enclosure: Option<(i64, String)> = transaction
        .prepare_cached("SELECT id, guid FROM episodes WHERE channel = ?1 AND enclosure = ?2")?
        .query_row(params![channel.0, episode.enclosure.as_str()], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })
        .optional()?;
    Ok(by_enclosure.and_then(|(id, guid)| (!guids.contains(guid.as_str())).then_some(id)))
}

fn insert_episode(
    transaction: &Transaction<'_>,
    channel: ChannelId,
    episode: &ParsedEpisode,
    problem: Option<&str>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let state = match problem {
        Some(_) => EpisodeState::Failed,
        None => EpisodeState::New,
    };
    // A date in the future would keep an episode at the top for years.
    let published = episode.published.unwrap_or(now).min(now);
    let mut insert = transaction.prepare_cached(
        "INSERT INTO episodes (channel, guid, title, published, enclosure, media_type, feed_bytes,
         duration_s, link, chapters, transcript, season, number, state, problem, alternates)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)",
    )?;
    let id = insert.insert(params![
        channel.0,
        episode.guid,
        episode.title,
        seconds(published),
        episode.enclosure.as_str(),
        episode.media_type,
        episode.bytes.and_then(|b| i64::try_from(b).ok()),
        episode.duration_s,
        episode.link.as_ref().map(Url::as_str),
        episode.chapters.as_ref().map(Url::as_str),
        episode.transcript.as_ref().map(Url::as_str),
        episode.season,
        episode.number,
        state.number(),
        problem,
        alternates(episode),
    ])?;
    store_notes(transaction, id, &episode.notes)?;
    Ok(())
}

/// The alternate enclosures of an item as JSON; none if it has none.
fn alternates(episode: &ParsedEpisode) -> Option<String> {
    (!episode.alternates.is_empty()).then(|| to_json(&episode.alternates))
}

fn update_episode(
    transaction: &Transaction<'_>,
    id: i64,
    episode: &ParsedEpisode,
    problem: Option<&str>,
    now: Timestamp,
) -> rusqlite::Result<bool> {
    let mut update = transaction.prepare_cached(
        "UPDATE episodes SET guid = ?2, title = ?3, enclosure = ?4, media_type = coalesce(?5, media_type),
         feed_bytes = ?6, duration_s = coalesce(?7, duration_s), link = ?8, chapters = ?9, transcript = ?10,
         season = ?11, number = ?12, alternates = ?13
         WHERE id = ?1 AND (guid, title, enclosure, ifnull(feed_bytes, -1), ifnull(link, ''),
         ifnull(chapters, ''), ifnull(transcript, ''), ifnull(season, -1), ifnull(number, -1),
         ifnull(alternates, ''))
         IS NOT (?2, ?3, ?4, ifnull(?6, -1), ifnull(?8, ''), ifnull(?9, ''), ifnull(?10, ''),
         ifnull(?11, -1), ifnull(?12, -1), ifnull(?13, ''))",
    )?;
    let changed = update.execute(params![
        id,
        episode.guid,
        episode.title,
        episode.enclosure.as_str(),
        episode.media_type,
        episode.bytes.and_then(|b| i64::try_from(b).ok()),
        episode.duration_s,
        episode.link.as_ref().map(Url::as_str),
        episode.chapters.as_ref().map(Url::as_str),
        episode.transcript.as_ref().map(Url::as_str),
        episode.season,
        episode.number,
        alternates(episode),
    ])?;
    let notes_changed = store_notes(transaction, id, &episode.notes)?;
    if changed > 0 {
        retry_changed(transaction, id, problem, now)?;
    }
    Ok(changed > 0 || notes_changed)
}

/// Has an episode that was refused or failed tried by what the feed says of it now: at once after the first failure,
/// later after further ones, for feeds whose addresses are new each time.
fn retry_changed(
    transaction: &Transaction<'_>,
    id: i64,
    problem: Option<&str>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    const SQL: &str = "UPDATE episodes SET
        state = CASE WHEN :problem IS NOT NULL THEN :failed WHEN failures < 2 THEN :new ELSE state END,
        problem = CASE WHEN :problem IS NULL AND failures >= 2 THEN problem ELSE :problem END,
        retry_at = CASE WHEN failures < 2 THEN NULL ELSE ifnull(retry_at, :later) END
        WHERE id = :id AND state IN (:new, :failed)";
    transaction.prepare_cached(SQL)?.execute(named_params! {
        ":id": id,
        ":problem": problem,
        ":new": EpisodeState::New.number(),
        ":failed": EpisodeState::Failed.number(),
        ":later": seconds(now) + REFRESH_INTERVAL_MAX.as_secs() as i64,
    })?;
    Ok(())
}

/// Gives an episode the feed's date if it had another: the clock was wrong, or the feed was. A date in the future
/// would keep an episode at the top for years: until it has come, the episode has the time at which it was first seen.
fn update_published(
    transaction: &Transaction<'_>,
    id: i64,
    episode: &ParsedEpisode,
    now: Timestamp,
) -> rusqlite::Result<()> {
    transaction
        .prepare_cached(
            "UPDATE episodes SET published = iif(?2 <= ?3, ?2, min(published, ?3))
             WHERE id = ?1 AND published <> iif(?2 <= ?3, ?2, min(published, ?3))",
        )?
        .execute(params![id, episode.published.map(seconds), seconds(now)])?;
    Ok(())
}

fn store_notes(transaction: &Transaction<'_>, id: i64, notes: &str) -> rusqlite::Result<bool> {
    let stored = transaction
        .prepare_cached(
            "INSERT INTO notes (episode, html) VALUES (?1, ?2)
             ON CONFLICT (episode) DO UPDATE SET html = ?2 WHERE html <> ?2",
        )?
        .execute(params![id, notes])?;
    Ok(stored > 0)
}

/// Moves a channel to another address; the inner error says why it stays.
fn move_channel(
    transaction: &Transaction<'_>,
    channel: ChannelId,
    from: &Url,
    to: &Url,
    now: Timestamp,
) -> rusqlite::Result<Result<(), String>> {
    if !matches!(to.scheme(), "http" | "https") {
        return Ok(Err(format!(
            "the feed says that it moved to {to}, which is not read; it stays at {from}"
        )));
    }
    if is_local_url(to) && to.host() != from.host() {
        return Ok(Err(format!(
            "the feed says that it moved to {to}, an address of a local network; it stays at {from}"
        )));
    }
    let taken: Option<i64> = transaction
        .query_row(
            "SELECT id FROM channels WHERE url = ?1",
            [to.as_str()],
            |row| row.get(0),
        )
        .optional()?;
    if taken.is_some() {
        return Ok(Err(format!(
            "the feed moved to {to}, which you subscribe to already; remove one of the two"
        )));
    }
    let day = i64::try_from(REFRESH_INTERVAL_MAX.as_secs()).unwrap_or(i64::MAX);
    let moves: u32 = transaction.query_row(
        "UPDATE channels SET
         moves = CASE WHEN moved_since BETWEEN ?2 - ?3 AND ?2 THEN moves + 1 ELSE 1 END,
         moved_since = CASE WHEN moved_since BETWEEN ?2 - ?3 AND ?2 THEN moved_since ELSE ?2 END
         WHERE id = ?1 RETURNING moves",
        params![channel.0, seconds(now), day],
        |row| row.get(0),
    )?;
    if moves > MOVES_PER_DAY_MAX {
        return Ok(Err(format!(
            "the feed says that it moved more than {MOVES_PER_DAY_MAX} times in a day; it stays at {from}"
        )));
    }
    // The password is for the old host.
    let keeps_password = to.origin() == from.origin();
    transaction.execute(
        "UPDATE channels SET url = ?2, etag = NULL, last_modified = NULL,
         authorization = CASE WHEN ?3 THEN authorization END,
         local_host = CASE WHEN ?4 THEN local_host END WHERE id = ?1",
        params![
            channel.0,
            to.as_str(),
            keeps_password,
            to.host() == from.host()
        ],
    )?;
    Ok(Ok(()))
}

/// Why an address that a feed names, of an enclosure or of chapters, is not fetched: it is none of the web, or one of a
/// local network that the feed is not in.
pub fn refused_enclosure(enclosure: &Url, feed: &Url) -> Option<String> {
    if !matches!(enclosure.scheme(), "http" | "https") {
        return Some(format!(
            "the feed names {enclosure}, which is not fetched: only http and https are"
        ));
    }
    if is_local_url(enclosure) && enclosure.host() != feed.host() {
        return Some(format!(
            "the feed names {enclosure}, an address of a local network that the feed is not in; it is not fetched"
        ));
    }
    None
}
