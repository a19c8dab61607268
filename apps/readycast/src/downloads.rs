//! Which episodes are wanted on this device, and how their downloads went.
//!
//! ```text
//!            the rule wants it, or a person does
//!  New ──────────────────────────────────────────▶ Downloading ─┬─ whole ─▶ Ready ── not wanted ─▶ Removed
//!   ▲                                                           ├─ failed ─▶ Failed ── after a while ─┐
//!   └───────────────────────────────────────────────────────────┴─ cancelled                          │
//!   └──────────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! What is wanted is computed from the rules each time; nothing is scheduled ahead, so a rule that changes, an episode
//! that is played and a feed that brings a new one all take effect with the next plan.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::{Timestamp, Zoned};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, named_params, params};
use serde::Serialize;
use url::Url;

use crate::channel::ChannelId;
use crate::enclosure_choice::{EnclosureChoice, EpisodeEnclosure};
use crate::episode::{EpisodeDeadline, EpisodeId, EpisodeState};
use crate::episodes::found;
use crate::library::{Library, LibraryError, json, optional_time, seconds, time, to_json, url};
use crate::local_host::local_host_of;
use crate::refresh::refused_enclosure;
use crate::rule::{ChannelRule, DownloadSchedule};
use crate::transfer_log::TransferRecord;
use crate::up_next::priority_of_place;

/// Time until a failed download is tried again; it doubles with each failure, up to a day.
pub const DOWNLOAD_RETRY: Duration = Duration::from_secs(10 * 60);

/// Channels that are planned before others have the database.
const PLAN_BATCH: usize = 500; // a guess: some ms

/// Seconds at the beginning of an episode that are wanted before the rest of others.
const START_S: u64 = 180; // a guess: the rest comes faster than one listens

/// Bytes of a second of an episode whose length or size is not known.
const BYTES_PER_S: u64 = 16_000; // 128 kb/s, as most podcasts have

/// The least and the most bytes of a beginning. Titles with pictures come before the sound; videos have a beginning that
/// takes longer than their rest is waited for.
const START_BYTES: std::ops::RangeInclusive<u64> = 500_000..=20_000_000; // guesses

const DAY: Duration = Duration::from_secs(24 * 3_600);

/// Where the audio or video of an episode comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EpisodeSource {
    /// The address of the enclosure.
    pub url: Url,
    /// Value of `Authorization`, if the enclosure is of the feed's own origin.
    #[serde(skip)]
    pub authorization: Option<String>,
    /// The host of a local network that the download may lead to: the feed's own, if the user subscribed to it there.
    pub local_host: Option<String>,
    /// Why the enclosure is not fetched, in a sentence; none if it is.
    pub refused: Option<String>,
    /// The alternate enclosure that the channel's rule chose; none for the feed's own.
    pub chosen: Option<EpisodeEnclosure>,
}

/// A download that is to begin.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedDownload {
    /// Number of the episode.
    pub episode: EpisodeId,
    /// Number of its channel.
    pub channel: ChannelId,
    /// Title of the channel.
    pub channel_title: String,
    /// Title of the episode.
    pub title: String,
    /// Publication of the episode.
    pub published: Timestamp,
    /// The addresses and credentials to fetch the episode with.
    pub source: EpisodeSource,
    /// Media type as the feed says it.
    pub media_type: Option<String>,
    /// The deadline; `None` if there is none.
    pub deadline: Option<Timestamp>,
    /// Policy, as `--policy` takes it; none for the device's own.
    pub policy: Option<String>,
    /// The bytes at the beginning that are wanted before the rest of other episodes, so that listening can begin.
    pub start_bytes: u64,
    /// Priority of the download: 7 for what is heard first, by the order of a person, down to 0.
    pub priority: u8,
    /// The file of an earlier attempt, of which a part may be there.
    pub file: Option<PathBuf>,
}

/// A file that no rule wants any longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnwantedFile {
    /// Number of the episode.
    pub episode: EpisodeId,
    /// Path of the file to remove.
    pub file: PathBuf,
    /// The file system that it was seen on; none if it was not.
    pub file_system: Option<String>,
}

/// The downloads to begin now, and the files to remove.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DownloadPlan {
    /// Downloads to begin, in the order in which they will be heard: by deadline, then the oldest first.
    pub start: Vec<PlannedDownload>,
    /// Files to remove: played, or more than the channel's rule keeps.
    pub remove: Vec<UnwantedFile>,
    /// Files of which a part may be there that nobody will complete: their downloads failed, and they are no longer
    /// wanted.
    pub discard: Vec<UnwantedFile>,
    /// When a failed download may be tried again; none if none waits.
    pub next_retry_at: Option<Timestamp>,
}

/// A download that an agent has, or had when it ended.
#[derive(Clone, Debug, PartialEq)]
pub struct ActiveDownload {
    /// Number of the episode.
    pub episode: EpisodeId,
    /// Number of the agent's transfer; none if it ended before it told.
    pub job: Option<u64>,
    /// The file it writes.
    pub file: PathBuf,
    /// When the download is to be complete.
    pub deadline: Option<Timestamp>,
    /// What the log will keep of it, as far as it is stored.
    pub record: TransferRecord,
}

/// How a download ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DownloadOutcome {
    /// The file is whole.
    Whole {
        /// The size of the file.
        bytes: u64,
        /// The digest of the file, in hexadecimal.
        sha256: Option<String>,
        /// The file's media type, if the origin gave one.
        media_type: Option<String>,
    },
    /// The episode could not be fetched; it is tried again after a while.
    Failed {
        /// Why, in a sentence.
        reason: String,
        /// Whether trying again is useless, such as for a web page in place of the audio.
        is_final: bool,
    },
    /// A person took the episode out of the queue: it is fetched again only if asked for.
    Cancelled,
}

impl DownloadOutcome {
    /// Whether what was fetched of a part is of no further use.
    pub fn is_end(&self) -> bool {
        match self {
            DownloadOutcome::Whole { .. } => false,
            DownloadOutcome::Failed { is_final, .. } => *is_final,
            DownloadOutcome::Cancelled => true,
        }
    }
}

/// The bytes at the beginning of an episode with which listening can begin: three minutes, by its size and length.
pub fn start_bytes(bytes: Option<u64>, duration_s: Option<u32>) -> u64 {
    let per_s = match (bytes, duration_s) {
        (Some(bytes), Some(seconds)) if bytes > 0 && seconds > 0 => bytes / u64::from(seconds),
        _ => BYTES_PER_S,
    };
    let wanted = per_s.saturating_mul(START_S);
    wanted.clamp(*START_BYTES.start(), *START_BYTES.end())
}

/// An episode and its channel, as planning sees it.
struct Candidate {
    planned: PlannedDownload,
    state: EpisodeState,
    played: bool,
    position_ms: i64,
    bytes: u64,
    retry_at: Option<Timestamp>,
    own: Option<EpisodeDeadline>,
    file_system: Option<String>,
    /// Whether a person gave it a place in the order of hearing.
    has_place: bool,
}

impl Library {
    /// The downloads and removals that are due now, by the rules and by requests of the user.
    ///
    /// # Errors
    /// The database fails.
    pub fn planned_downloads(&self, now: &Zoned) -> Result<DownloadPlan, LibraryError> {
        let rules = channel_rules(&self.lock())?;
        self.plan(&rules, now)
    }

    /// The downloads and removals that are due now in these channels.
    ///
    /// # Errors
    /// The database fails.
    pub fn planned_downloads_of(
        &self,
        channels: &[ChannelId],
        now: &Zoned,
    ) -> Result<DownloadPlan, LibraryError> {
        let mut rules = Vec::new();
        for channel in channels {
            rules.extend(channel_rule(&self.lock(), *channel)?);
        }
        self.plan(&rules, now)
    }

    /// Plans channel by channel. Others have the database after each [`PLAN_BATCH`] of them.
    fn plan(
        &self,
        rules: &[(ChannelId, ChannelRule)],
        now: &Zoned,
    ) -> Result<DownloadPlan, LibraryError> {
        let mut plan = DownloadPlan::default();
        for batch in rules.chunks(PLAN_BATCH) {
            let mut connection = self.lock();
            let transaction = connection.transaction()?;
            for (channel, rule) in batch {
                let candidates = candidates(&transaction, *channel, rule)?;
                plan_channel(&transaction, candidates, rule, now, &mut plan)?;
            }
            transaction.commit()?;
        }
        plan.start
            .sort_by_key(|p| (p.deadline.unwrap_or(Timestamp::MAX), p.published, p.episode));
        Ok(plan)
    }

    /// Where an episode comes from; none if there is no such one.
    ///
    /// # Errors
    /// The database fails.
    pub fn episode_source(
        &self,
        episode: EpisodeId,
    ) -> Result<Option<EpisodeSource>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(
            "SELECT e.enclosure, e.media_type, e.feed_bytes, e.alternates, c.url AS feed, c.authorization,
             c.local_host, c.rule FROM episodes e JOIN channels c ON c.id = e.channel WHERE e.id = ?1",
        )?;
        let of_rule = |row: &Row<'_>| {
            let rule: ChannelRule = json(row, "rule")?;
            source(row, rule.enclosure)
        };
        Ok(query.query_row([episode.0], of_rule).optional()?)
    }

    /// Notes that a download begins into `file`, before the agent is asked: what ends in between is found by
    /// [`Library::active_downloads`].
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn begin_download(
        &self,
        episode: EpisodeId,
        file: &Path,
        deadline: Option<Timestamp>,
    ) -> Result<(), LibraryError> {
        self.begin_download_from(episode, file, deadline, None)
    }

    /// Notes that a download of an alternate enclosure begins, or of the feed's own if `chosen` is none, as
    /// [`Library::begin_download`] does.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn begin_download_from(
        &self,
        episode: EpisodeId,
        file: &Path,
        deadline: Option<Timestamp>,
        chosen: Option<&EpisodeEnclosure>,
    ) -> Result<(), LibraryError> {
        let changed = self.lock().execute(
            "UPDATE episodes SET state = ?2, job = NULL, file = ?3, deadline = ?4, problem = NULL,
             chosen = ?5, transfer_record = CASE WHEN state = ?2 THEN transfer_record END
             WHERE id = ?1",
            params![
                episode.0,
                EpisodeState::Downloading.number(),
                file.to_string_lossy(),
                deadline.map(seconds),
                chosen.map(to_json),
            ],
        )?;
        found(changed, episode)
    }

    /// Notes that a download has another deadline.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn set_download_deadline(
        &self,
        episode: EpisodeId,
        deadline: Option<Timestamp>,
    ) -> Result<(), LibraryError> {
        let changed = self.lock().execute(
            "UPDATE episodes SET deadline = ?2 WHERE id = ?1",
            params![episode.0, deadline.map(seconds)],
        )?;
        found(changed, episode)
    }

    /// Notes the number of the agent's transfer.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn set_job(&self, episode: EpisodeId, job: u64) -> Result<(), LibraryError> {
        let changed = self.lock().execute(
            "UPDATE episodes SET job = ?2 WHERE id = ?1",
            params![episode.0, i64::try_from(job).unwrap_or(i64::MAX)],
        )?;
        found(changed, episode)
    }

    /// Notes how a download ended.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn finish_download(
        &self,
        episode: EpisodeId,
        outcome: &DownloadOutcome,
        now: Timestamp,
    ) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let changed = match outcome {
            DownloadOutcome::Whole {
                bytes,
                sha256,
                media_type,
            } => transaction.execute(
                "UPDATE episodes SET state = ?2, job = NULL, file_bytes = ?3, sha256 = ?4,
                 media_type = coalesce(?5, media_type), failures = 0, retry_at = NULL, problem = NULL
                 WHERE id = ?1",
                params![
                    episode.0,
                    EpisodeState::Ready.number(),
                    i64::try_from(*bytes).unwrap_or(i64::MAX),
                    sha256,
                    media_type,
                ],
            )?,
            DownloadOutcome::Failed { reason, is_final } => {
                note_failure(&transaction, episode, reason, *is_final, now)?
            }
            DownloadOutcome::Cancelled => remove_file(&transaction, episode)?,
        };
        found(changed, episode)?;
        transaction.commit()?;
        Ok(())
    }

    /// Notes that nothing is left of a download that failed.
    ///
    /// # Errors
    /// The database fails.
    pub fn note_discarded(&self, episode: EpisodeId) -> Result<(), LibraryError> {
        self.lock().execute(
            "UPDATE episodes SET file = NULL WHERE id = ?1 AND state NOT IN (?2, ?3)",
            params![
                episode.0,
                EpisodeState::Ready.number(),
                EpisodeState::Downloading.number(),
            ],
        )?;
        Ok(())
    }

    /// Files of a channel's downloads that failed, of which a part may be there.
    ///
    /// # Errors
    /// The database fails.
    pub fn failed_files(&self, channel: ChannelId) -> Result<Vec<PathBuf>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(
            "SELECT file FROM episodes WHERE channel = ?1 AND file IS NOT NULL AND state NOT IN (?2, ?3)",
        )?;
        let states = params![
            channel.0,
            EpisodeState::Ready.number(),
            EpisodeState::Downloading.number(),
        ];
        let rows = query.query_map(states, |row| row.get::<_, String>(0))?;
        Ok(rows
            .map(|row| row.map(PathBuf::from))
            .collect::<Result<_, _>>()?)
    }

    /// Notes that the file of an episode was removed; it is fetched again only if asked for.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn note_removed(&self, episode: EpisodeId) -> Result<(), LibraryError> {
        let connection = self.lock();
        found(remove_file(&connection, episode)?, episode)
    }

    /// Downloads that have begun and not ended, by deadline.
    ///
    /// # Errors
    /// The database fails.
    pub fn active_downloads(&self) -> Result<Vec<ActiveDownload>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(
            "SELECT id, job, file, deadline, transfer_record FROM episodes WHERE state = ?1 AND state <> 0
             ORDER BY ifnull(deadline, 9e18), published, id",
        )?;
        let rows = query.query_map([EpisodeState::Downloading.number()], |row| {
            let file: Option<String> = row.get("file")?;
            Ok(ActiveDownload {
                episode: EpisodeId(row.get("id")?),
                job: row.get::<_, Option<i64>>("job")?.map(|job| job as u64),
                file: PathBuf::from(file.unwrap_or_default()),
                deadline: optional_time(row, "deadline")?,
                record: json(row, "transfer_record")?,
            })
        })?;
        Ok(rows.collect::<Result<_, _>>()?)
    }
}

pub(crate) fn remove_file(connection: &Connection, episode: EpisodeId) -> rusqlite::Result<usize> {
    connection.execute(
        "UPDATE episodes SET state = ?2, job = NULL, file = NULL, file_bytes = NULL, sha256 = NULL,
         file_system = NULL, chosen = NULL, deadline = NULL, own_deadline = NULL, up_next = NULL WHERE id = ?1",
        params![episode.0, EpisodeState::Removed.number()],
    )
}

fn note_failure(
    transaction: &Transaction<'_>,
    episode: EpisodeId,
    reason: &str,
    is_final: bool,
    now: Timestamp,
) -> rusqlite::Result<usize> {
    let changed = transaction.execute(
        "UPDATE episodes SET state = :failed, job = NULL, file = CASE WHEN :is_final THEN NULL ELSE file END,
         problem = :reason, failures = failures + 1, retry_at = NULL WHERE id = :id",
        named_params! {
            ":id": episode.0,
            ":failed": EpisodeState::Failed.number(),
            ":reason": reason,
            ":is_final": is_final,
        },
    )?;
    if changed == 0 || is_final {
        return Ok(changed);
    }
    let failures: u32 = transaction.query_row(
        "SELECT failures FROM episodes WHERE id = ?1",
        [episode.0],
        |row| row.get(0),
    )?;
    let wait = DOWNLOAD_RETRY
        .saturating_mul(1 << failures.saturating_sub(1).min(16))
        .min(DAY);
    transaction.execute(
        "UPDATE episodes SET retry_at = ?2 WHERE id = ?1",
        params![episode.0, seconds(now) + wait.as_secs() as i64],
    )
}

fn channel_rules(connection: &Connection) -> rusqlite::Result<Vec<(ChannelId, ChannelRule)>> {
    let mut query = connection.prepare_cached("SELECT id, rule FROM channels ORDER BY id")?;
    query.query_map([], rule_row)?.collect()
}

fn channel_rule(
    connection: &Connection,
    channel: ChannelId,
) -> rusqlite::Result<Option<(ChannelId, ChannelRule)>> {
    let mut query = connection.prepare_cached("SELECT id, rule FROM channels WHERE id = ?1")?;
    query.query_row([channel.0], rule_row).optional()
}

fn rule_row(row: &Row<'_>) -> rusqlite::Result<(ChannelId, ChannelRule)> {
    Ok((ChannelId(row.get("id")?), json(row, "rule")?))
}

/// The source of an episode in a row with the columns `enclosure`, `media_type`, `feed_bytes`, `alternates`, `feed`,
/// `authorization` and `local_host`. An alternate that would not be fetched is not chosen.
fn source(row: &Row<'_>, choice: EnclosureChoice) -> rusqlite::Result<EpisodeSource> {
    let feed = url(row, "feed")?;
    let own = EpisodeEnclosure {
        url: url(row, "enclosure")?,
        media_type: row.get("media_type")?,
        bytes: row.get::<_, Option<i64>>("feed_bytes")?.map(|b| b as u64),
        title: String::new(),
    };
    let mut alternates: Vec<EpisodeEnclosure> = json(row, "alternates")?;
    alternates.retain(|alternate| refused_enclosure(&alternate.url, &feed).is_none());
    let chosen = choice.choose(&own, &alternates).cloned();
    let enclosure = chosen.as_ref().map_or(own.url, |chosen| chosen.url.clone());
    let authorization: Option<String> = row.get("authorization")?;
    Ok(EpisodeSource {
        authorization: authorization.filter(|_| feed.origin() == enclosure.origin()),
        local_host: local_host_of(&feed, row.get("local_host")?),
        refused: refused_enclosure(&enclosure, &feed),
        url: enclosure,
        chosen,
    })
}

/// Selects what [`candidates`] returns. Each set has an index of its own, so a channel of thousands of episodes is not read
/// whole.
const CANDIDATES: &str =
    "SELECT e.*, c.title AS channel_title, c.url AS feed, c.authorization, c.local_host FROM episodes e
     JOIN channels c ON c.id = e.channel
     WHERE e.id IN (
        SELECT id FROM episodes WHERE channel = :channel AND state <> 0 AND state = :ready
        UNION SELECT id FROM episodes WHERE channel = :channel AND own_deadline IS NOT NULL
        UNION SELECT id FROM episodes WHERE channel = :channel AND state IN (:new, :failed) AND file IS NOT NULL
        UNION SELECT id FROM (
            SELECT id FROM episodes WHERE channel = :channel AND (played = 0 OR NOT :unplayed)
            ORDER BY published DESC, id DESC LIMIT :latest))
     ORDER BY e.published DESC, e.id DESC";

/// Episodes of a channel that a plan can concern: the newest, those with a file, and those asked for.
fn candidates(
    transaction: &Transaction<'_>,
    channel: ChannelId,
    rule: &ChannelRule,
) -> rusqlite::Result<Vec<Candidate>> {
    let mut query = transaction.prepare_cached(CANDIDATES)?;
    let rows = query.query_map(
        named_params! {
            ":channel": channel.0,
            ":ready": EpisodeState::Ready.number(),
            ":new": EpisodeState::New.number(),
            ":failed": EpisodeState::Failed.number(),
            ":unplayed": rule.keep.unplayed_only,
            ":latest": rule.keep.latest,
        },
        |row| {
            let source = source(row, rule.enclosure)?;
            let chosen = source.chosen.clone();
            let bytes: Option<u64> = match row.get::<_, Option<i64>>("file_bytes")? {
                Some(bytes) => Some(bytes as u64),
                None => {
                    let own: Option<i64> = row.get("feed_bytes")?;
                    let chosen = chosen.as_ref().and_then(|chosen| chosen.bytes);
                    chosen.or(own.map(|bytes| bytes as u64))
                }
            };
            let media_type = match chosen {
                Some(chosen) => chosen.media_type,
                None => row.get("media_type")?,
            };
            let place: Option<u32> = row.get("up_next")?;
            Ok(Candidate {
                has_place: place.is_some(),
                planned: PlannedDownload {
                    episode: EpisodeId(row.get("id")?),
                    channel,
                    channel_title: row.get("channel_title")?,
                    title: row.get("title")?,
                    published: time(row, "published")?,
                    source,
                    media_type,
                    deadline: None,
                    policy: None,
                    start_bytes: start_bytes(bytes, row.get("duration_s")?),
                    priority: priority_of_place(place),
                    file: row.get::<_, Option<String>>("file")?.map(PathBuf::from),
                },
                state: EpisodeState::from_number(row.get("state")?),
                played: row.get("played")?,
                position_ms: row.get("position_ms")?,
                bytes: bytes.unwrap_or(0),
                retry_at: optional_time(row, "retry_at")?,
                own: json(row, "own_deadline")?,
                file_system: row.get("file_system")?,
            })
        },
    )?;
    rows.collect()
}

fn plan_channel(
    transaction: &Transaction<'_>,
    candidates: Vec<Candidate>,
    rule: &ChannelRule,
    now: &Zoned,
    plan: &mut DownloadPlan,
) -> rusqlite::Result<()> {
    let (mut kept, mut kept_bytes) = (0, 0_u64);
    for candidate in candidates {
        let counts = !(rule.keep.unplayed_only && candidate.played);
        let fits = rule
            .keep
            .bytes_max
            .is_none_or(|max| kept_bytes.saturating_add(candidate.bytes) <= max);
        let is_among_latest = counts && kept < rule.keep.latest && fits;
        if is_among_latest {
            kept += 1;
            kept_bytes = kept_bytes.saturating_add(candidate.bytes);
        }
        match candidate.state {
            EpisodeState::Ready => {
                // What was begun is not taken away before its end.
                let is_begun = candidate.position_ms > 0 && !candidate.played;
                let is_asked_for = candidate.own.is_some() || candidate.has_place;
                let is_wanted = is_among_latest || is_begun || is_asked_for && !candidate.played;
                if let (false, Some(file)) = (is_wanted, candidate.planned.file) {
                    plan.remove.push(UnwantedFile {
                        episode: candidate.planned.episode,
                        file,
                        file_system: candidate.file_system,
                    });
                }
            }
            EpisodeState::New | EpisodeState::Failed => {
                let by_rule = is_among_latest && rule.schedule != DownloadSchedule::Manual;
                if candidate.own.is_some() || by_rule {
                    plan_start(transaction, candidate, rule, now, plan)?;
                } else {
                    plan_discard(candidate, plan);
                }
            }
            EpisodeState::Downloading | EpisodeState::Removed => {}
        }
    }
    Ok(())
}

/// Plans that the part of a file goes of which nothing more will come.
fn plan_discard(candidate: Candidate, plan: &mut DownloadPlan) {
    plan.discard
        .extend(candidate.planned.file.map(|file| UnwantedFile {
            episode: candidate.planned.episode,
            file,
            file_system: None,
        }));
}

fn plan_start(
    transaction: &Transaction<'_>,
    candidate: Candidate,
    rule: &ChannelRule,
    now: &Zoned,
    plan: &mut DownloadPlan,
) -> rusqlite::Result<()> {
    let planned = &candidate.planned;
    if let Some(problem) = &planned.source.refused {
        transaction.execute(
            "UPDATE episodes SET state = ?2, problem = ?3, own_deadline = NULL WHERE id = ?1",
            params![planned.episode.0, EpisodeState::Failed.number(), problem],
        )?;
        plan_discard(candidate, plan);
        return Ok(());
    }
    if candidate.state == EpisodeState::Failed {
        match candidate.retry_at {
            // It failed for good.
            None => {
                plan_discard(candidate, plan);
                return Ok(());
            }
            // One that is further away than any wait was set by a clock that was wrong.
            Some(at) if at > now.timestamp() && at <= now.timestamp() + DAY => {
                let next = plan.next_retry_at.unwrap_or(at).min(at);
                plan.next_retry_at = Some(next);
                return Ok(());
            }
            Some(_) => {}
        }
    }
    let mut planned = candidate.planned;
    match candidate.own {
        Some(own) => {
            planned.deadline = own.by;
            planned.policy = own.policy.or_else(|| rule.policy.clone());
        }
        None => {
            planned.deadline = rule.schedule.deadline(planned.published, now);
            planned.policy = rule.download_policy();
        }
    }
    plan.start.push(planned);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_is_three_minutes_within_bounds() {
        // An hour of 57.6 MB has 16 kB a second.
        assert_eq!(start_bytes(Some(57_600_000), Some(3_600)), 2_880_000);
        assert_eq!(start_bytes(None, Some(3_600)), 2_880_000);
        assert_eq!(start_bytes(Some(57_600_000), None), 2_880_000);
        assert_eq!(start_bytes(Some(57_600_000), Some(0)), 2_880_000);
        assert_eq!(start_bytes(Some(1_000), Some(3_600)), 500_000);
        assert_eq!(start_bytes(Some(u64::MAX), Some(1)), 20_000_000);
    }

    #[test]
    fn a_plan_reads_no_channel_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("a library");
        let connection = library.lock();
        let mut explained = connection
            .prepare(&format!("EXPLAIN QUERY PLAN {CANDIDATES}"))
            .expect("valid");
        let steps = explained.raw_query().mapped(|row| row.get("detail"));
        let steps: Vec<String> = steps.map(|step| step.expect("text")).collect();
        assert!(
            !steps.iter().any(|step| step.starts_with("SCAN e")),
            "{steps:#?}"
        );
        let of_channel = steps
            .iter()
            .filter(|step| step.contains("episodes_of_channel"));
        // The newest: their number is limited.
        assert_eq!(of_channel.count(), 1, "{steps:#?}");
    }
}
