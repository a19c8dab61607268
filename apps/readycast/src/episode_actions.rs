//! What was done with episodes, on this device and in apps and servers that sync: how far they were heard.
//!
//! ```text
//!  player, page ─▶ episodes ── trigger ─▶ episode_actions ─▶ actions since 41 ─▶ apps, server
//!  apps, server ─▶ actions ── newer than what is known? ─▶ episode_actions, episodes
//!                     └─ of an episode that is not known yet: kept until its feed brings it
//! ```
//!
//! The newest action on an episode counts, by the time at which it happened.

use std::collections::HashMap;

use jiff::Timestamp;
use rusqlite::{OptionalExtension, Row, Transaction, named_params, params};
use url::Url;

use crate::channel::ChannelId;
use crate::episode::EpisodeId;
use crate::library::{Library, LibraryError, seconds, time, url};
use crate::subscription_changes::{channel_at, read_clock};

/// The maximum number of actions that are kept: the newest.
pub const EPISODE_ACTIONS_MAX: i64 = 50_000; // a guess: ten years of a busy listener

/// The maximum number of bytes of a device's or an episode's name in an action.
const NAME_BYTES_MAX: usize = 1_024;

/// This close to the end an episode was heard, as for the agent's own player.
const END_S: u32 = 5;

/// What was done with an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpisodeActionKind {
    /// The episode was heard up to a position.
    Play,
    /// The episode is to be heard anew.
    New,
    /// A device fetched it.
    Download,
    /// A device removed its file.
    Delete,
}

impl EpisodeActionKind {
    const ALL: [EpisodeActionKind; 4] = [
        EpisodeActionKind::Play,
        EpisodeActionKind::New,
        EpisodeActionKind::Download,
        EpisodeActionKind::Delete,
    ];

    /// The word of the protocol.
    pub fn as_str(self) -> &'static str {
        match self {
            EpisodeActionKind::Play => "play",
            EpisodeActionKind::New => "new",
            EpisodeActionKind::Download => "download",
            EpisodeActionKind::Delete => "delete",
        }
    }

    /// The kind of a word of the protocol, in any case.
    pub fn from_word(word: &str) -> Option<EpisodeActionKind> {
        let is_it = |kind: &EpisodeActionKind| word.eq_ignore_ascii_case(kind.as_str());
        EpisodeActionKind::ALL.into_iter().find(is_it)
    }

    /// Whether the action says how far the episode was heard.
    fn is_about_listening(self) -> bool {
        matches!(self, EpisodeActionKind::Play | EpisodeActionKind::New)
    }
}

/// An action on an episode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyncAction {
    /// Address of the feed.
    pub podcast: Url,
    /// Address of the audio or video.
    pub episode: Url,
    /// What names the episode within its feed.
    pub guid: Option<String>,
    /// The device; empty if nobody said.
    pub device: String,
    /// What was done.
    pub kind: EpisodeActionKind,
    /// When the action happened.
    pub happened_at: Timestamp,
    /// Second at which the player began.
    pub started: Option<u32>,
    /// Second at which the player was.
    pub position: Option<u32>,
    /// Length in seconds.
    pub total: Option<u32>,
}

/// What an action is on, where it is known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActionSubject {
    /// Channel of the feed.
    pub channel: Option<ChannelId>,
    /// Number of the episode.
    pub episode: Option<EpisodeId>,
}

/// What became of actions that came from elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordedActions {
    /// Actions that changed what is known of an episode.
    pub applied: usize,
    /// Actions on episodes that are not known yet.
    pub pending: usize,
    /// Actions that are not newer than what is known.
    pub older: usize,
}

impl Library {
    /// Actions that were recorded since an earlier answer's timestamp, but for those that came from `except`; and the
    /// timestamp to ask with the next time.
    ///
    /// # Errors
    /// The database fails.
    pub fn episode_actions(
        &self,
        since: i64,
        except: Option<&str>,
    ) -> Result<(Vec<SyncAction>, i64), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let timestamp = read_clock(&transaction)?;
        let actions = {
            let mut query = transaction.prepare_cached(
                "SELECT * FROM episode_actions WHERE changed_at > ?1 AND (?2 IS NULL OR source <> ?2)
                 ORDER BY changed_at, happened_at",
            )?;
            let rows = query.query_map(params![since, except], action)?;
            rows.collect::<Result<_, _>>()?
        };
        transaction.commit()?;
        Ok((actions, timestamp))
    }

    /// The channel and the episode of each of these actions, where they are known.
    ///
    /// # Errors
    /// The database fails.
    pub fn episode_numbers(
        &self,
        actions: &[SyncAction],
    ) -> Result<Vec<ActionSubject>, LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let mut channels = HashMap::new();
        let mut numbers = Vec::with_capacity(actions.len());
        for action in actions {
            let channel = known_channel(&transaction, &mut channels, action)?;
            let episode = match channel {
                Some(channel) => find_episode(&transaction, channel, action)?,
                None => None,
            };
            numbers.push(ActionSubject {
                channel: channel.map(ChannelId),
                episode: episode.map(|(id, _)| EpisodeId(id)),
            });
        }
        Ok(numbers)
    }

    /// Records actions that came from `source`, and applies those that are newer than what is known here. A time in
    /// the future counts as `now`.
    ///
    /// # Errors
    /// The database fails.
    pub fn record_episode_actions(
        &self,
        actions: &[SyncAction],
        source: &str,
        now: Timestamp,
    ) -> Result<RecordedActions, LibraryError> {
        let mut recorded = RecordedActions::default();
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let mut channels = HashMap::new();
        for action in actions {
            let channel = known_channel(&transaction, &mut channels, action)?;
            let mut action = action.clone();
            cut(&mut action.device);
            action.guid.as_mut().map(cut);
            record(&transaction, channel, &action, source, now, &mut recorded)?;
        }
        trim(&transaction)?;
        transaction.commit()?;
        Ok(recorded)
    }

    /// Applies actions on episodes that were not known when they came, and are known now. Returns their number.
    ///
    /// # Errors
    /// The database fails.
    pub fn apply_pending_actions(&self) -> Result<usize, LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let pending: Vec<(i64, SyncAction, String)> = {
            let mut query = transaction.prepare_cached(
                "SELECT a.*, c.id AS channel FROM episode_actions a JOIN channels c ON c.url = a.podcast
                 WHERE a.applied = 0 AND EXISTS (SELECT 1 FROM episodes e WHERE e.channel = c.id
                    AND e.enclosure = a.episode)",
            )?;
            let rows = query.query_map([], |row| {
                Ok((row.get("channel")?, action(row)?, row.get("source")?))
            })?;
            rows.collect::<Result<_, _>>()?
        };
        for (channel, action, source) in &pending {
            if let Some((episode, _)) = find_episode(&transaction, *channel, action)? {
                apply(&transaction, episode, action)?;
            }
            store(&transaction, action, None, source, true)?;
        }
        transaction.commit()?;
        Ok(pending.len())
    }
}

/// The channel of an action, which is looked up once.
fn known_channel<'a>(
    transaction: &Transaction<'_>,
    channels: &mut HashMap<&'a str, Option<i64>>,
    action: &'a SyncAction,
) -> rusqlite::Result<Option<i64>> {
    if let Some(known) = channels.get(action.podcast.as_str()) {
        return Ok(*known);
    }
    let found = channel_at(transaction, action.podcast.as_str())?;
    channels.insert(action.podcast.as_str(), found);
    Ok(found)
}

fn cut(text: &mut String) {
    let mut end = text.len().min(NAME_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

fn action(row: &Row<'_>) -> rusqlite::Result<SyncAction> {
    let word: String = row.get("action")?;
    Ok(SyncAction {
        podcast: url(row, "podcast")?,
        episode: url(row, "episode")?,
        guid: row.get("guid")?,
        device: row.get("device")?,
        kind: EpisodeActionKind::from_word(&word).unwrap_or(EpisodeActionKind::Download),
        happened_at: time(row, "happened_at")?,
        started: row.get("started")?,
        position: row.get("position")?,
        total: row.get("total")?,
    })
}

/// The episode of an action, by its address or its name in the feed; and its address here.
fn find_episode(
    transaction: &Transaction<'_>,
    channel: i64,
    action: &SyncAction,
) -> rusqlite::Result<Option<(i64, String)>> {
    let row = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?));
    let by_address = transaction
        .prepare_cached("SELECT id, enclosure FROM episodes WHERE channel = ?1 AND enclosure = ?2 ORDER BY id DESC LIMIT 1")?
        .query_row(params![channel, action.episode.as_str()], row)
        .optional()?;
    if by_address.is_some() {
        return Ok(by_address);
    }
    let Some(guid) = &action.guid else {
        return Ok(None);
    };
    transaction
        .prepare_cached("SELECT id, enclosure FROM episodes WHERE channel = ?1 AND guid = ?2")?
        .query_row(params![channel, guid], row)
        .optional()
}

fn record(
    transaction: &Transaction<'_>,
    channel: Option<i64>,
    action: &SyncAction,
    source: &str,
    now: Timestamp,
    recorded: &mut RecordedActions,
) -> rusqlite::Result<()> {
    let mut action = action.clone();
    let stated_at = seconds(action.happened_at);
    action.happened_at = action.happened_at.min(now);
    let mut found = None;
    if let Some(channel) = channel {
        // Under the names of the library, whatever names the app has.
        let sql = "SELECT url FROM channels WHERE id = ?1";
        action.podcast = transaction
            .prepare_cached(sql)?
            .query_row([channel], |row| url(row, "url"))?;
        found = find_episode(transaction, channel, &action)?;
        if let Some(address) = found.as_ref().and_then(|(_, address)| address.parse().ok()) {
            action.episode = address;
        }
    }
    let kind = i64::from(!action.kind.is_about_listening());
    let known = transaction
        .prepare_cached(
            "SELECT happened_at, action, position, stated_at, stated_position FROM episode_actions
             WHERE podcast = ?1 AND episode = ?2 AND kind = ?3",
        )?
        .query_row(
            params![action.podcast.as_str(), action.episode.as_str(), kind],
            KnownAction::of,
        )
        .optional()?;
    if known.is_some_and(|known| known.counts_before(&action, stated_at)) {
        recorded.older += 1;
        return Ok(());
    }
    match found {
        Some((episode, _)) => {
            apply(transaction, episode, &action)?;
            store(transaction, &action, Some(stated_at), source, true)?;
            recorded.applied += 1;
        }
        None => {
            store(transaction, &action, Some(stated_at), source, false)?;
            recorded.pending += 1;
        }
    }
    Ok(())
}

/// The newest action on an episode of one kind: how far it was heard, or what happened to its file.
struct KnownAction {
    happened_at: i64,
    word: String,
    position: Option<u32>,
    stated_at: Option<i64>,
    stated_position: Option<u32>,
}

impl KnownAction {
    fn of(row: &Row<'_>) -> rusqlite::Result<KnownAction> {
        Ok(KnownAction {
            happened_at: row.get(0)?,
            word: row.get(1)?,
            position: row.get(2)?,
            stated_at: row.get(3)?,
            stated_position: row.get(4)?,
        })
    }

    /// Whether this counts, and not `action`, which says that it happened at `stated_at`.
    fn counts_before(&self, action: &SyncAction, stated_at: i64) -> bool {
        // The same action comes again; what happened here since is newer, whatever time the action says.
        let is_repeated = self.stated_at.is_some_and(|known| {
            known > stated_at || (known == stated_at && self.stated_position == action.position)
        });
        // A player that does not say how far it came knows less than what is known.
        let says_less = action.kind == EpisodeActionKind::Play && action.position.is_none();
        let happened_at = seconds(action.happened_at);
        // Times are whole seconds: of two different actions in the same one, that which came last counts.
        let is_same = self.word == action.kind.as_str() && self.position == action.position;
        let is_older =
            self.happened_at > happened_at || (self.happened_at == happened_at && is_same);
        is_repeated || says_less || is_older
    }
}

/// Stores an action as the newest on its episode, after a trigger may have stored what it did to the episode.
/// `stated_at`: when it happened, as another program said.
fn store(
    transaction: &Transaction<'_>,
    action: &SyncAction,
    stated_at: Option<i64>,
    source: &str,
    is_applied: bool,
) -> rusqlite::Result<()> {
    transaction
        .prepare_cached(
            "INSERT INTO episode_actions (podcast, episode, kind, guid, action, device, happened_at, started,
             position, total, changed_at, source, applied, stated_at, stated_position)
             SELECT :podcast, :episode, :kind, :guid, :action, :device, :happened_at, :started, :position, :total,
             max(unixepoch(), next), :source, :applied, :stated_at,
             CASE WHEN :stated_at IS NOT NULL THEN :position END FROM sync_clock WHERE 1
             ON CONFLICT (podcast, episode, kind) DO UPDATE SET guid = excluded.guid, action = excluded.action,
             device = excluded.device, happened_at = excluded.happened_at, started = excluded.started,
             position = excluded.position, total = excluded.total, changed_at = excluded.changed_at,
             source = excluded.source, applied = excluded.applied,
             stated_position = CASE WHEN excluded.stated_at IS NULL THEN stated_position ELSE excluded.stated_position END,
             stated_at = coalesce(excluded.stated_at, stated_at)",
        )?
        .execute(named_params! {
            ":podcast": action.podcast.as_str(),
            ":episode": action.episode.as_str(),
            ":kind": i64::from(!action.kind.is_about_listening()),
            ":guid": action.guid,
            ":action": action.kind.as_str(),
            ":device": action.device,
            ":happened_at": seconds(action.happened_at),
            ":started": action.started,
            ":position": action.position,
            ":total": action.total,
            ":source": source,
            ":applied": is_applied,
            ":stated_at": stated_at,
        })?;
    Ok(())
}

/// Applies an action of another app to an episode: its position, and whether it was heard.
fn apply(transaction: &Transaction<'_>, episode: i64, action: &SyncAction) -> rusqlite::Result<()> {
    let at = seconds(action.happened_at);
    match (action.kind, action.position) {
        (EpisodeActionKind::New, _) => {
            transaction.prepare_cached(
                "UPDATE episodes SET played = 0, played_at = NULL, position_ms = 0, position_at = ?2 WHERE id = ?1",
            )?.execute(params![episode, at])?;
        }
        (EpisodeActionKind::Play, Some(position)) => {
            let total = action.total.filter(|total| *total > 0);
            let is_end = total.is_some_and(|total| position.saturating_add(END_S) >= total);
            transaction.prepare_cached(
                "UPDATE episodes SET position_ms = :position, position_at = :at,
                 duration_s = coalesce(duration_s, :total),
                 played_at = CASE WHEN :is_end AND played = 0 THEN :at ELSE played_at END, played = played OR :is_end
                 WHERE id = :id",
            )?.execute(named_params! {
                ":id": episode,
                ":position": if is_end { 0 } else { i64::from(position) * 1_000 },
                ":total": total,
                ":at": at,
                ":is_end": is_end,
            })?;
        }
        // A player that does not say how far it came says nothing that could be gone on with.
        (EpisodeActionKind::Play, None)
        | (EpisodeActionKind::Download | EpisodeActionKind::Delete, _) => {}
    }
    Ok(())
}

fn trim(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    let sql = "SELECT count(*) FROM episode_actions";
    let count: i64 = transaction.query_row(sql, [], |row| row.get(0))?;
    if count > EPISODE_ACTIONS_MAX {
        transaction.execute(
            "DELETE FROM episode_actions WHERE (podcast, episode, kind) IN (
                SELECT podcast, episode, kind FROM episode_actions ORDER BY happened_at LIMIT ?1)",
            [count - EPISODE_ACTIONS_MAX],
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::episode::EpisodeQuery;
    use crate::refresh::RefreshOutcome;

    fn address(text: &str) -> Url {
        text.parse().expect("an address")
    }

    /// A library with a channel of this many episodes of 100 s, the first of which is the newest.
    fn library(episodes: usize) -> (tempfile::TempDir, Library, ChannelId) {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("it opens");
        let feed = address("https://a.example/feed");
        let channel = library.subscribe(&feed, Timestamp::now()).expect("stored");
        bring(&library, channel, episodes);
        (folder, library, channel)
    }

    fn bring(library: &Library, channel: ChannelId, episodes: usize) {
        let items: String = (0..episodes)
            .map(|n| {
                format!(
                    "<item><guid>g{n}</guid><title>{n}</title><itunes:duration>100</itunes:duration>\
                     <enclosure url=\"https://a.example/{n}.mp3\" type=\"audio/mpeg\"/></item>"
                )
            })
            .collect();
        let feed = format!(
            "<rss version=\"2.0\" xmlns:itunes=\"http://www.itunes.com/dtds/podcast-1.0.dtd\"><channel><title>A</title>{items}</channel></rss>"
        );
        let outcome = RefreshOutcome::Feed {
            bytes: feed.into_bytes(),
            etag: None,
            last_modified: None,
            moved_to: None,
        };
        library
            .apply_refresh(channel, outcome, Timestamp::now())
            .expect("stored");
    }

    fn play(n: usize, position: u32, at: i64) -> SyncAction {
        SyncAction {
            podcast: address("https://a.example/feed"),
            episode: address(&format!("https://a.example/{n}.mp3")),
            guid: None,
            device: "phone".to_owned(),
            kind: EpisodeActionKind::Play,
            happened_at: Timestamp::from_second(at).expect("a time"),
            started: Some(0),
            position: Some(position),
            total: Some(100),
        }
    }

    fn state(library: &Library, n: usize) -> (bool, u64) {
        let list = library.episodes(&EpisodeQuery {
            words: n.to_string(),
            ..EpisodeQuery::default()
        });
        let list = list.expect("a list");
        let found = list.iter().find(|e| e.title == n.to_string());
        let found = found.expect("the episode");
        (found.played, found.position_ms)
    }

    fn id(library: &Library, n: usize) -> EpisodeId {
        let list = library.episodes(&EpisodeQuery::default()).expect("a list");
        let mut list = list.iter();
        let found = list.find(|e| e.title == n.to_string());
        found.expect("the episode").id
    }

    #[test]
    fn the_newest_action_counts_in_whatever_order_they_come() {
        let (_folder, library, _) = library(2);
        let now = Timestamp::now();
        let record = |action| {
            let recorded = library.record_episode_actions(&[action], "server", now);
            recorded.expect("stored")
        };
        assert_eq!(record(play(0, 50, 1_000)).applied, 1);
        assert_eq!(record(play(0, 20, 900)).older, 1);
        assert_eq!(state(&library, 0), (false, 50_000));
        assert_eq!(record(play(0, 50, 1_000)).older, 1);
        assert_eq!(record(play(0, 97, 1_100)).applied, 1);
        assert_eq!(state(&library, 0), (true, 0));
        let anew = SyncAction {
            kind: EpisodeActionKind::New,
            ..play(0, 0, 1_200)
        };
        record(anew);
        assert_eq!(state(&library, 0), (false, 0));
        // What is done here is newer than all that, and a clock that is wrong elsewhere does not outrun it.
        library
            .set_position(id(&library, 0), 30_000, Some(100_000), now)
            .expect("stored");
        assert_eq!(record(play(0, 60, 1_300)).older, 1);
        let future = play(1, 60, now.as_second() + 1_000_000);
        record(future.clone());
        library
            .set_played(id(&library, 1), false, now)
            .expect("stored");
        assert_eq!(state(&library, 1), (false, 0));
        // Servers send it again, until its time has come and after that.
        for later_s in [1, 1_000_001] {
            let later = Timestamp::from_second(now.as_second() + later_s).expect("a time");
            let again =
                library.record_episode_actions(std::slice::from_ref(&future), "server", later);
            assert_eq!(again.expect("stored").older, 1);
            assert_eq!(state(&library, 1), (false, 0));
        }
        // A player that does not say how far it came takes back nothing.
        let silent = SyncAction {
            position: None,
            ..play(0, 0, now.as_second())
        };
        let later = Timestamp::from_second(now.as_second() + 5).expect("a time");
        let silent = library.record_episode_actions(&[silent], "server", later);
        assert_eq!(silent.expect("stored").older, 1);
        assert_eq!(state(&library, 0), (false, 30_000));
        let (actions, _) = library.episode_actions(0, None).expect("a list");
        assert!(actions.iter().all(|a| a.happened_at <= Timestamp::now()));
    }

    #[test]
    fn what_was_done_here_is_told_and_what_came_from_a_server_is_not_sent_back() {
        let (_folder, library, _) = library(3);
        let now = Timestamp::now();
        let (actions, since) = library.episode_actions(0, None).expect("a list");
        assert_eq!(actions, []);
        library
            .set_position(id(&library, 0), 40_000, None, now)
            .expect("stored");
        library
            .set_played(id(&library, 1), true, now)
            .expect("stored");
        library
            .record_episode_actions(&[play(2, 10, 1_000)], "server", now)
            .expect("stored");
        let (actions, later) = library
            .episode_actions(since, Some("server"))
            .expect("a list");
        let told: Vec<_> = actions
            .iter()
            .map(|a| (a.episode.path(), a.position, a.total, a.guid.as_deref()))
            .collect();
        assert_eq!(
            told,
            [
                ("/0.mp3", Some(40), Some(100), Some("g0")),
                ("/1.mp3", Some(100), Some(100), Some("g1"))
            ]
        );
        let (actions, _) = library.episode_actions(later, None).expect("a list");
        assert_eq!(actions, []);
        let (all, _) = library.episode_actions(0, None).expect("a list");
        assert_eq!(all.len(), 3);
    }

    #[test]
    fn an_action_waits_for_its_episode() {
        let (_folder, library, channel) = library(1);
        let now = Timestamp::now();
        let mut by_guid = play(7, 33, 1_000);
        by_guid.episode = address("https://cdn.example/other.mp3");
        by_guid.guid = Some("g0".to_owned());
        let actions = [play(1, 50, 1_000), by_guid];
        let recorded = library.record_episode_actions(&actions, "app:phone", now);
        let recorded = recorded.expect("stored");
        assert_eq!((recorded.pending, recorded.applied), (1, 1));
        assert_eq!(state(&library, 0), (false, 33_000));
        assert_eq!(library.apply_pending_actions().expect("none"), 0);
        bring(&library, channel, 2);
        assert_eq!(library.apply_pending_actions().expect("one"), 1);
        assert_eq!(state(&library, 1), (false, 50_000));
        assert_eq!(library.apply_pending_actions().expect("none"), 0);
    }

    #[test]
    fn positions_outlive_a_subscription_and_follow_a_feed_that_moves() {
        let (_folder, library, channel) = library(1);
        let now = Timestamp::now();
        library
            .set_position(id(&library, 0), 40_000, None, now)
            .expect("stored");
        let moved = address("https://b.example/feed");
        let outcome = RefreshOutcome::Feed {
            bytes: b"<rss version=\"2.0\"><channel><title>A</title></channel></rss>".to_vec(),
            etag: None,
            last_modified: None,
            moved_to: Some(moved.clone()),
        };
        library
            .apply_refresh(channel, outcome, now)
            .expect("stored");
        // Under the old address, too, it is older than what was done here.
        let older = library.record_episode_actions(&[play(0, 10, 1_000)], "server", now);
        assert_eq!(older.expect("stored").older, 1);
        library.unsubscribe(channel).expect("removed");
        let channel = library.subscribe(&moved, now).expect("stored");
        bring(&library, channel, 1);
        assert_eq!(state(&library, 0), (false, 0));
        assert_eq!(library.apply_pending_actions().expect("one"), 1);
        assert_eq!(state(&library, 0), (false, 40_000));
    }

    #[test]
    fn thousands_of_actions_stay_fast_and_have_a_limit() {
        let (_folder, library, _) = library(10_000);
        let now = Timestamp::now();
        let actions: Vec<_> = (0..10_000).map(|n| play(n, 50, 1_000)).collect();
        let begun = std::time::Instant::now();
        let recorded = library.record_episode_actions(&actions, "app", now);
        assert_eq!(recorded.expect("stored").applied, 10_000);
        let (told, _) = library.episode_actions(0, None).expect("a list");
        assert_eq!(told.len(), 10_000);
        let took = begun.elapsed();
        assert!(took < std::time::Duration::from_secs(20), "{took:?}");
        let unknown: Vec<_> = (10_000..61_000).map(|n| play(n, 50, 2_000)).collect();
        library
            .record_episode_actions(&unknown, "app", now)
            .expect("stored");
        let (told, _) = library.episode_actions(0, None).expect("a list");
        assert_eq!(told.len() as i64, EPISODE_ACTIONS_MAX);
    }
}
