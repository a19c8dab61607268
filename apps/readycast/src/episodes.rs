//! Episodes of the library: lists, positions, what a person asks for one of them.

use std::path::PathBuf;

use jiff::Timestamp;
use rusqlite::{OptionalExtension, Row, named_params, params};

use crate::channel::ChannelId;
use crate::episode::{
    Episode, EpisodeDeadline, EpisodeId, EpisodeQuery, EpisodeState, EpisodeSummary,
};
use crate::library::{
    Library, LibraryError, json, optional_time, optional_url, seconds, time, to_json, url,
};
use crate::transfer_log::note_play;

/// Columns of an [`EpisodeSummary`].
pub(crate) const EPISODE_SUMMARY: &str =
    "e.id, e.channel, c.title AS channel_title, e.title, e.season, e.number,
    e.published, e.duration_s, ifnull(e.file_bytes, e.feed_bytes) AS bytes, e.state, e.played, e.position_ms, e.deadline, e.job,
    e.problem, e.up_next";

impl Library {
    /// Episodes, the newest first.
    ///
    /// # Errors
    /// The database fails.
    pub fn episodes(&self, query: &EpisodeQuery) -> Result<Vec<EpisodeSummary>, LibraryError> {
        let connection = self.lock();
        let mut filter = String::new();
        if query.channel.is_some() {
            filter.push_str(" AND e.channel = :channel");
        }
        if let Some(state) = query.state {
            filter.push_str(" AND e.state = :state");
            if state != EpisodeState::New {
                // By this SQLite knows that the index of what is not new has them all.
                filter.push_str(" AND e.state <> 0");
            }
        }
        if query.played.is_some() {
            filter.push_str(" AND e.played = :played");
        }
        let words: Vec<String> = query.words.split_whitespace().map(like_pattern).collect();
        for (n, _) in words.iter().enumerate() {
            filter.push_str(&format!(" AND e.title LIKE :word{n} ESCAPE '\\'"));
        }
        let mut statement = connection.prepare_cached(&format!(
            "SELECT {EPISODE_SUMMARY} FROM episodes e JOIN channels c ON c.id = e.channel
             WHERE 1 {filter} ORDER BY e.published DESC, e.id DESC LIMIT :limit OFFSET :offset"
        ))?;
        let named: [(&str, Option<i64>); 3] = [
            (":channel", query.channel.map(|c| c.0)),
            (":state", query.state.map(EpisodeState::number)),
            (":played", query.played.map(i64::from)),
        ];
        for (name, value) in named {
            if let (Some(value), Some(index)) = (value, statement.parameter_index(name)?) {
                statement.raw_bind_parameter(index, value)?;
            }
        }
        for (n, word) in words.iter().enumerate() {
            if let Some(index) = statement.parameter_index(&format!(":word{n}"))? {
                statement.raw_bind_parameter(index, word)?;
            }
        }
        for (name, value) in [(":limit", query.limit), (":offset", query.offset)] {
            if let Some(index) = statement.parameter_index(name)? {
                statement.raw_bind_parameter(index, value)?;
            }
        }
        let rows = statement.raw_query().mapped(episode_summary);
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// An episode; none if there is no such one.
    ///
    /// # Errors
    /// The database fails.
    pub fn episode(&self, episode: EpisodeId) -> Result<Option<Episode>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(&format!(
            "SELECT {EPISODE_SUMMARY}, e.guid, ifnull(n.html, '') AS notes, e.enclosure, e.media_type, e.link,
             e.chapters, e.transcript, e.alternates, e.chosen, e.file, e.sha256, e.own_deadline
             FROM episodes e JOIN channels c ON c.id = e.channel LEFT JOIN notes n ON n.episode = e.id
             WHERE e.id = ?1"
        ))?;
        let found = query.query_row([episode.0], |row| {
            let summary = episode_summary(row)?;
            let file: Option<String> = row.get("file")?;
            let is_whole = summary.state == EpisodeState::Ready;
            Ok(Episode {
                guid: row.get("guid")?,
                notes: row.get("notes")?,
                enclosure: url(row, "enclosure")?,
                media_type: row.get("media_type")?,
                link: optional_url(row, "link")?,
                chapters: optional_url(row, "chapters")?,
                transcript: optional_url(row, "transcript")?,
                alternates: json(row, "alternates")?,
                chosen: json(row, "chosen")?,
                file: file.filter(|_| is_whole).map(PathBuf::from),
                sha256: row.get("sha256")?,
                own_deadline: json::<Option<EpisodeDeadline>>(row, "own_deadline")?,
                summary,
            })
        });
        Ok(found.optional()?)
    }

    /// Stores where a player is. One that is within the last seconds of a known length is at the end: the episode was
    /// played.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn set_position(
        &self,
        episode: EpisodeId,
        position_ms: u64,
        duration_ms: Option<u64>,
        now: Timestamp,
    ) -> Result<(), LibraryError> {
        let is_end = duration_ms.is_some_and(|d| d > 0 && position_ms + END_MS >= d);
        let duration_s = duration_ms.map(|ms| ms.div_ceil(1000));
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let changed = transaction.execute(
            "UPDATE episodes SET position_ms = :position, position_at = :now,
             duration_s = coalesce(:duration, duration_s),
             played_at = CASE WHEN :is_end AND played = 0 THEN :now ELSE played_at END,
             played = played OR :is_end,
             up_next = CASE WHEN :is_end THEN NULL ELSE up_next END
             WHERE id = :id",
            named_params! {
                ":id": episode.0,
                // After the end, it begins again.
                ":position": if is_end { 0 } else { i64::try_from(position_ms).unwrap_or(i64::MAX) },
                ":duration": duration_s.and_then(|s| i64::try_from(s).ok()),
                ":is_end": is_end,
                ":now": seconds(now),
            },
        )?;
        found(changed, episode)?;
        if position_ms > 0 {
            note_play(&transaction, episode, now)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Notes that a player began with an episode, for the log of transfers: the first time counts.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn note_begun(&self, episode: EpisodeId, now: Timestamp) -> Result<(), LibraryError> {
        let connection = self.lock();
        let known = connection
            .prepare_cached("SELECT 1 FROM episodes WHERE id = ?1")?
            .exists([episode.0])?;
        found(usize::from(known), episode)?;
        Ok(note_play(&connection, episode, now)?)
    }

    /// Marks an episode as played, or as not played.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn set_played(
        &self,
        episode: EpisodeId,
        played: bool,
        now: Timestamp,
    ) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let changed = transaction.execute(
            "UPDATE episodes SET played = ?2, played_at = CASE WHEN ?2 THEN ?3 END, position_ms = 0,
             up_next = CASE WHEN ?2 THEN NULL ELSE up_next END
             WHERE id = ?1",
            params![episode.0, played, seconds(now)],
        )?;
        found(changed, episode)?;
        if played {
            note_play(&transaction, episode, now)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Asks for an episode, whatever its channel's rule says; `None` takes that back. One that failed or was removed is
    /// fetched again.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn set_episode_deadline(
        &self,
        episode: EpisodeId,
        deadline: Option<&EpisodeDeadline>,
    ) -> Result<(), LibraryError> {
        let changed = self.lock().execute(
            "UPDATE episodes SET own_deadline = ?2, failures = 0, retry_at = NULL,
             state = CASE WHEN ?2 IS NOT NULL AND state IN (?3, ?4) THEN ?5 ELSE state END,
             problem = CASE WHEN ?2 IS NOT NULL THEN NULL ELSE problem END
             WHERE id = ?1",
            params![
                episode.0,
                deadline.map(to_json),
                EpisodeState::Failed.number(),
                EpisodeState::Removed.number(),
                EpisodeState::New.number(),
            ],
        )?;
        found(changed, episode)
    }
}

/// A player this close to the end has heard it: closing music, and players that report the position before the last.
const END_MS: u64 = 5_000;

pub(crate) fn found(changed: usize, episode: EpisodeId) -> Result<(), LibraryError> {
    match changed {
        0 => Err(LibraryError::NoEpisode(episode.0)),
        _ => Ok(()),
    }
}

/// A pattern of LIKE for a word anywhere.
fn like_pattern(word: &str) -> String {
    let mut pattern = String::from("%");
    for c in word.chars() {
        if matches!(c, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('%');
    pattern
}

pub(crate) fn episode_summary(row: &Row<'_>) -> rusqlite::Result<EpisodeSummary> {
    Ok(EpisodeSummary {
        id: EpisodeId(row.get("id")?),
        channel: ChannelId(row.get("channel")?),
        channel_title: row.get("channel_title")?,
        title: row.get("title")?,
        season: row.get("season")?,
        number: row.get("number")?,
        published: time(row, "published")?,
        duration_s: row.get("duration_s")?,
        bytes: row.get::<_, Option<i64>>("bytes")?.map(|b| b as u64),
        state: EpisodeState::from_number(row.get("state")?),
        played: row.get("played")?,
        position_ms: row.get::<_, i64>("position_ms")? as u64,
        deadline: optional_time(row, "deadline")?,
        job: row.get::<_, Option<i64>>("job")?.map(|job| job as u64),
        problem: row.get("problem")?,
        up_next: row.get("up_next")?,
    })
}
