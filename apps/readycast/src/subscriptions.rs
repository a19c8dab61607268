//! Channels of the library: subscribing, listing, rules.

use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::{OptionalExtension, Row, Transaction, named_params, params};
use url::Url;

use crate::channel::{Channel, ChannelId, ChannelSummary};
use crate::episode::EpisodeState;
use crate::library::{
    Library, LibraryError, json, optional_time, optional_url, seconds, time, to_json, url,
};
use crate::parsed_feed::OpmlFeed;
use crate::refresh::REFRESH_INTERVAL;
use crate::rule::{ChannelRule, DownloadSchedule};
use crate::subscription_changes::{channel_at, note_change_source};

/// Feeds of an import that are stored in one transaction.
pub const IMPORT_BATCH: usize = 500; // measured: 10,000 feeds take 20 syncs of the disk; one holds others up for some ms

/// New feeds of an import that are due at once; the others follow within an hour.
pub const IMPORT_READ_AT_ONCE: usize = 100; // a guess: what people subscribe to

/// What came of an import of subscriptions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportedFeeds {
    /// Feeds of the list that are subscribed to now.
    pub feeds: usize,
    /// Feeds that were left out, each with the reason.
    pub skipped: Vec<String>,
}

/// Columns of a [`ChannelSummary`], with counts.
const SUMMARY: &str = "c.id, c.url, c.title, c.author, c.rule, c.problem,
    (SELECT count(*) FROM episodes e WHERE e.channel = c.id) AS episodes,
    (SELECT count(*) FROM episodes e WHERE e.channel = c.id AND e.played = 0) AS unplayed,
    (SELECT count(*) FROM episodes e WHERE e.channel = c.id AND e.state = 2) AS ready,
    (SELECT total(file_bytes) FROM episodes e WHERE e.channel = c.id AND e.state = 2) AS bytes,
    (SELECT max(published) FROM episodes e WHERE e.channel = c.id) AS newest";

impl Library {
    /// Subscribes to a feed, which is due at once. Subscribing again changes nothing. Credentials in the address
    /// are stored apart and never shown.
    ///
    /// # Errors
    /// The address is not one of HTTP, or the database fails.
    pub fn subscribe(&self, url: &Url, now: Timestamp) -> Result<ChannelId, LibraryError> {
        let new = NewChannel::of(url, "")?;
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        new.insert(&transaction, now, now)?;
        let id = transaction.query_row(
            "SELECT id FROM channels WHERE url = ?1",
            [new.url.as_str()],
            |row| row.get(0),
        )?;
        transaction.commit()?;
        Ok(ChannelId(id))
    }

    /// Subscribes to all feeds of a list. The first [`IMPORT_READ_AT_ONCE`] new ones are due at once, the others spread
    /// over an hour. The database is free for others after each [`IMPORT_BATCH`] of them; a list that breaks off in the
    /// middle can be imported again.
    ///
    /// # Errors
    /// The database fails.
    pub fn subscribe_all(
        &self,
        feeds: &[OpmlFeed],
        now: Timestamp,
    ) -> Result<ImportedFeeds, LibraryError> {
        let mut imported = ImportedFeeds::default();
        let mut added = 0;
        for batch in feeds.chunks(IMPORT_BATCH) {
            let mut connection = self.lock();
            let transaction = connection.transaction()?;
            for feed in batch {
                let new = match NewChannel::of(&feed.url, &feed.title) {
                    Ok(new) => new,
                    Err(error) => {
                        imported.skipped.push(error.to_string());
                        continue;
                    }
                };
                let due = now + import_wait(added, feeds.len());
                added += usize::from(new.insert(&transaction, due, now)?);
                imported.feeds += 1;
            }
            transaction.commit()?;
        }
        Ok(imported)
    }

    /// Subscribes to feeds that a server sent, and notes that they came from `source`. A feed that is known by any of its
    /// names is not new. New feeds are due, and the database is free for others, as with [`Library::subscribe_all`].
    /// Returns how many are new.
    ///
    /// # Errors
    /// An address is not one of HTTP, or the database fails.
    pub fn subscribe_received(
        &self,
        feeds: &[Url],
        source: &str,
        now: Timestamp,
    ) -> Result<usize, LibraryError> {
        let mut added = 0;
        for batch in feeds.chunks(IMPORT_BATCH) {
            let mut connection = self.lock();
            let transaction = connection.transaction()?;
            for feed in batch {
                if channel_at(&transaction, feed.as_str())?.is_none() {
                    let due = now + import_wait(added, feeds.len());
                    let new = NewChannel::of(feed, "")?;
                    added += usize::from(new.insert(&transaction, due, now)?);
                }
                note_change_source(&transaction, feed, source)?;
            }
            transaction.commit()?;
        }
        Ok(added)
    }

    /// Whether episodes of any channel are wanted without being asked for.
    ///
    /// # Errors
    /// The database fails.
    pub fn has_scheduled_channels(&self) -> Result<bool, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached("SELECT DISTINCT rule FROM channels")?;
        let rules = query.query_map([], |row| json::<ChannelRule>(row, "rule"))?;
        for rule in rules {
            if rule?.schedule != DownloadSchedule::Manual {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Lets a channel lead to the host of its feed although that is at an address of a local network: the user
    /// subscribed to it there.
    ///
    /// # Errors
    /// There is no such channel, or the database fails.
    pub fn allow_local_host(&self, channel: ChannelId) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let sql = "SELECT url FROM channels WHERE id = ?1";
        let feed = transaction.query_row(sql, [channel.0], |row| url(row, "url"));
        let feed = feed.optional()?.ok_or(LibraryError::NoChannel(channel.0))?;
        transaction.execute(
            "UPDATE channels SET local_host = ?2 WHERE id = ?1",
            params![channel.0, feed.host_str()],
        )?;
        transaction.commit()?;
        Ok(())
    }

    /// Removes a channel with its episodes; returns the files of the episodes, which the caller removes.
    ///
    /// # Errors
    /// There is no such channel, or the database fails.
    pub fn unsubscribe(&self, channel: ChannelId) -> Result<Vec<PathBuf>, LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let files = {
            let mut query = transaction.prepare_cached(
                "SELECT file FROM episodes WHERE channel = ?1 AND state IN (?2, ?3) AND file IS NOT NULL",
            )?;
            // Of one that failed only a part is left: a whole file of that name is another episode's, or a person's.
            let owns_file =
                [EpisodeState::Ready, EpisodeState::Downloading].map(EpisodeState::number);
            let rows = query.query_map(params![channel.0, owns_file[0], owns_file[1]], |row| {
                row.get::<_, String>(0)
            })?;
            rows.map(|row| row.map(PathBuf::from))
                .collect::<Result<_, _>>()?
        };
        if transaction.execute("DELETE FROM channels WHERE id = ?1", [channel.0])? == 0 {
            return Err(LibraryError::NoChannel(channel.0));
        }
        transaction.commit()?;
        Ok(files)
    }

    /// All channels, by title.
    ///
    /// # Errors
    /// The database fails.
    pub fn channels(&self) -> Result<Vec<ChannelSummary>, LibraryError> {
        self.channels_in(0, -1)
    }

    /// At most `limit` channels by title, without the first `offset`.
    ///
    /// # Errors
    /// The database fails.
    pub fn channels_from(
        &self,
        offset: u32,
        limit: u32,
    ) -> Result<Vec<ChannelSummary>, LibraryError> {
        self.channels_in(offset, i64::from(limit))
    }

    /// Channels by title; a negative limit is none.
    fn channels_in(&self, offset: u32, limit: i64) -> Result<Vec<ChannelSummary>, LibraryError> {
        let connection = self.lock();
        // Episodes are counted only of channels that are asked for.
        let mut query = connection.prepare_cached(&format!(
            "SELECT {SUMMARY} FROM (SELECT * FROM channels ORDER BY title COLLATE NOCASE, id LIMIT ?1 OFFSET ?2) c
             ORDER BY c.title COLLATE NOCASE, c.id"
        ))?;
        let rows = query.query_map(params![limit, offset], summary)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// A channel; none if there is no such one.
    ///
    /// # Errors
    /// The database fails.
    pub fn channel(&self, channel: ChannelId) -> Result<Option<Channel>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(&format!(
            "SELECT {SUMMARY}, c.description, c.site, c.image, c.added_at, c.refreshed_at,
             c.next_refresh_at, c.skipped FROM channels c WHERE c.id = ?1"
        ))?;
        let found = query.query_row([channel.0], |row| {
            Ok(Channel {
                summary: summary(row)?,
                description: row.get("description")?,
                site: optional_url(row, "site")?,
                image: optional_url(row, "image")?,
                added_at: time(row, "added_at")?,
                refreshed_at: optional_time(row, "refreshed_at")?,
                next_refresh_at: optional_time(row, "next_refresh_at")?,
                skipped: json(row, "skipped")?,
            })
        });
        Ok(found.optional()?)
    }

    /// The channels that `words` name: by number, by address, or by words of the title.
    ///
    /// # Errors
    /// The database fails.
    pub fn find_channels(&self, words: &str) -> Result<Vec<ChannelSummary>, LibraryError> {
        let words = words.trim();
        let number = words.parse::<i64>().ok().map(ChannelId);
        let lower = words.to_lowercase();
        let channels = self.channels()?;
        let by = |is_named: &dyn Fn(&ChannelSummary) -> bool| {
            let found = channels.iter().filter(|channel| is_named(channel));
            found.cloned().collect::<Vec<_>>()
        };
        let exact = by(&|c| Some(c.id) == number || c.url.as_str() == words);
        if !exact.is_empty() {
            return Ok(exact);
        }
        let by_title = by(&|c| c.title.to_lowercase() == lower);
        if !by_title.is_empty() {
            return Ok(by_title);
        }
        Ok(by(&|c| {
            let title = c.title.to_lowercase();
            !lower.is_empty() && lower.split_whitespace().all(|word| title.contains(word))
        }))
    }

    /// Changes what is fetched of a channel.
    ///
    /// # Errors
    /// There is no such channel, or the database fails.
    pub fn set_channel_rule(
        &self,
        channel: ChannelId,
        rule: &ChannelRule,
    ) -> Result<(), LibraryError> {
        let changed = self.lock().execute(
            "UPDATE channels SET rule = ?2 WHERE id = ?1",
            params![channel.0, to_json(rule)],
        )?;
        match changed {
            0 => Err(LibraryError::NoChannel(channel.0)),
            _ => Ok(()),
        }
    }

    /// Files that are whole, of all channels: number and bytes.
    ///
    /// # Errors
    /// The database fails.
    pub fn file_totals(&self) -> Result<(u64, u64), LibraryError> {
        let totals = self.lock().query_row(
            "SELECT count(*), total(file_bytes) FROM episodes WHERE state = :ready AND state <> 0",
            named_params! {":ready": EpisodeState::Ready.number()},
            |row| Ok((row.get::<_, i64>(0)?, row.get::<_, f64>(1)?)),
        )?;
        Ok((totals.0 as u64, totals.1 as u64))
    }
}

/// How long a new feed of an import waits, after so many new ones of so many feeds.
fn import_wait(added: usize, feeds: usize) -> Duration {
    let later = feeds.saturating_sub(IMPORT_READ_AT_ONCE).max(1) as u64;
    let place = added.saturating_sub(IMPORT_READ_AT_ONCE) as u64;
    Duration::from_secs(REFRESH_INTERVAL.as_secs() * place / later)
}

/// A channel that is subscribed to.
struct NewChannel {
    url: Url,
    authorization: Option<String>,
    title: String,
}

impl NewChannel {
    /// The channel of an address; an empty title is the address.
    fn of(url: &Url, title: &str) -> Result<NewChannel, LibraryError> {
        let (url, authorization) = split_credentials(url);
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(LibraryError::Scheme(url));
        }
        let title = match title.is_empty() {
            true => url.to_string(),
            false => title.to_owned(),
        };
        Ok(NewChannel {
            url,
            authorization,
            title,
        })
    }

    /// Stores the channel, which is due at `due`; returns whether it is new.
    fn insert(
        &self,
        transaction: &Transaction<'_>,
        due: Timestamp,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let added = transaction
            .prepare_cached(
                "INSERT INTO channels (url, title, rule, added_at, next_refresh_at)
                 VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (url) DO NOTHING",
            )?
            .execute(params![
                self.url.as_str(),
                self.title,
                to_json(&ChannelRule::default()),
                seconds(now),
                seconds(due),
            ])?;
        if let Some(authorization) = &self.authorization {
            transaction
                .prepare_cached(
                    "UPDATE channels SET authorization = ?2, next_refresh_at = ?3 WHERE url = ?1",
                )?
                .execute(params![self.url.as_str(), authorization, seconds(due)])?;
        }
        Ok(added > 0)
    }
}

fn summary(row: &Row<'_>) -> rusqlite::Result<ChannelSummary> {
    Ok(ChannelSummary {
        id: ChannelId(row.get("id")?),
        url: url(row, "url")?,
        title: row.get("title")?,
        author: row.get("author")?,
        rule: json(row, "rule")?,
        episodes: row.get("episodes")?,
        unplayed: row.get("unplayed")?,
        ready: row.get("ready")?,
        file_bytes: row.get::<_, f64>("bytes")? as u64,
        newest: optional_time(row, "newest")?,
        problem: row.get("problem")?,
    })
}

/// An address without its credentials, and these as the value of an `Authorization` field.
fn split_credentials(url: &Url) -> (Url, Option<String>) {
    use base64::Engine as _;
    let mut plain = url.clone();
    plain.set_fragment(None);
    if url.username().is_empty() && url.password().is_none() {
        return (plain, None);
    }
    // These fail for addresses without a host only, which have no credentials.
    let _ = plain.set_username("");
    let _ = plain.set_password(None);
    let decoded = |text: &str| percent_decode(text);
    let mut pair = decoded(url.username());
    pair.push(b':');
    pair.extend(decoded(url.password().unwrap_or_default()));
    let value = base64::engine::general_purpose::STANDARD.encode(pair);
    (plain, Some(format!("Basic {value}")))
}

fn percent_decode(text: &str) -> Vec<u8> {
    percent_encoding::percent_decode_str(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::KeepRule;

    fn library() -> (tempfile::TempDir, Library) {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("a library");
        (folder, library)
    }

    fn url(text: &str) -> Url {
        text.parse().expect("an address")
    }

    #[test]
    fn subscribing_twice_is_one_channel() {
        let (folder, library) = library();
        let now = Timestamp::UNIX_EPOCH;
        let feed = url("https://a.example/feed");
        let id = library.subscribe(&feed, now).expect("it is stored");
        assert_eq!(library.subscribe(&feed, now).expect("again"), id);
        drop(library);
        let library = Library::open(folder.path()).expect("it opens again");
        let channels = library.channels().expect("a list");
        assert_eq!(channels.len(), 1);
        assert_eq!(channels[0].title, feed.as_str());
        assert!(matches!(
            library.subscribe(&url("file:///etc/passwd"), now),
            Err(LibraryError::Scheme(_))
        ));
    }

    #[test]
    fn a_password_is_not_in_the_address() {
        let (_folder, library) = library();
        let now = Timestamp::UNIX_EPOCH;
        let id = library
            .subscribe(&url("https://me:s%40cret@a.example/feed"), now)
            .expect("it is stored");
        let channel = library.channel(id).expect("a query").expect("the channel");
        assert_eq!(channel.summary.url.as_str(), "https://a.example/feed");
        let due = library.due_refreshes(now, 10).expect("a list");
        // base64 of `me:s@cret`.
        assert_eq!(due[0].authorization.as_deref(), Some("Basic bWU6c0BjcmV0"));
    }

    #[test]
    fn an_import_is_read_over_an_hour_the_first_at_once() {
        let (_folder, library) = library();
        let now = Timestamp::UNIX_EPOCH;
        let known = library.subscribe(&url("https://h7.example/f"), now);
        let known = known.expect("stored");
        let feeds: Vec<OpmlFeed> = (0..10_000)
            .map(|n| OpmlFeed {
                url: url(&format!("https://h{n}.example/f")),
                title: format!("Podcast {n}"),
            })
            .collect();
        let imported = library.subscribe_all(&feeds, now).expect("stored");
        assert_eq!((imported.feeds, imported.skipped.len()), (10_000, 0));
        let due = |s: u64| {
            let at = now + Duration::from_secs(s);
            library.due_refreshes(at, 100_000).expect("a list").len()
        };
        assert_eq!(due(0), 1 + IMPORT_READ_AT_ONCE + 3);
        for minutes in 1..60_usize {
            let even = IMPORT_READ_AT_ONCE + 9_900 * minutes / 60;
            assert!(due(60 * minutes as u64).abs_diff(even) < 10, "{minutes}");
        }
        assert_eq!(due(3_600), 10_000);
        let again = library.subscribe_all(&feeds, now).expect("again");
        assert_eq!(again, imported);
        let channels = library.channels().expect("a list");
        assert_eq!(channels.len(), 10_000);
        for (offset, limit) in [(0, 500), (9_700, 500), (20_000, 500)] {
            let some = library.channels_from(offset, limit).expect("a list");
            let all = channels.iter().skip(offset as usize).take(limit as usize);
            assert!(some.iter().eq(all), "from {offset}");
        }
        let titled = channels.iter().find(|c| c.title == "Podcast 8");
        assert!(titled.is_some(), "the list's title until the feed is read");
        let kept = channels
            .iter()
            .find(|c| c.id == known)
            .expect("it is there");
        assert_eq!(kept.title, kept.url.as_str());
        assert!(library.has_scheduled_channels().expect("an answer"));
    }

    #[test]
    fn feeds_that_a_server_sent_are_stored_together_and_each_once() {
        let (folder, library) = library();
        let now = Timestamp::UNIX_EPOCH;
        let known = library.subscribe(&url("https://h7.example/f"), now);
        known.expect("stored");
        let feeds: Vec<Url> = (0..300)
            .map(|n| url(&format!("https://h{n}.example/f")))
            .collect();
        let log = folder.path().join("library.sqlite-wal");
        let length = || log.metadata().expect("a log").len();
        let before = length();
        let received = || library.subscribe_received(&feeds, "server", now);
        assert_eq!(received().expect("stored"), 299);
        // Each transaction alone writes pages of 4 KB of five tables and indexes.
        let written = length() - before;
        assert!(written < 300 * 4_096, "{written} bytes for 299 feeds");
        assert_eq!(received().expect("again"), 0);
        assert_eq!(library.channels().expect("a list").len(), 300);
        // They go to other servers, and not back.
        let sent = |server: &str| {
            let changes = library.subscription_changes(0, Some(server));
            changes.expect("changes").add.len()
        };
        assert_eq!((sent("server"), sent("another")), (0, 300));
        let due = library.due_refreshes(now, 1_000).expect("a list").len();
        assert!((100..=IMPORT_READ_AT_ONCE + 5).contains(&due), "{due}");
    }

    #[test]
    fn channels_are_found_by_number_address_and_words() {
        let (_folder, library) = library();
        let now = Timestamp::UNIX_EPOCH;
        let a = library.subscribe(&url("https://a.example/morning"), now);
        let b = library.subscribe(&url("https://b.example/morning-news"), now);
        let (a, b) = (a.expect("stored"), b.expect("stored"));
        let found = |words: &str| {
            let found = library.find_channels(words).expect("a query");
            found.iter().map(|c| c.id).collect::<Vec<_>>()
        };
        assert_eq!(found(&a.to_string()), [a]);
        assert_eq!(found("https://a.example/morning"), [a]);
        assert_eq!(found("MORNING"), [a, b]);
        assert_eq!(found("morning news"), [b]);
        assert!(found("").is_empty());
    }

    #[test]
    fn rules_are_kept_and_channels_removed() {
        let (_folder, library) = library();
        let id = library
            .subscribe(&url("https://a.example/"), Timestamp::UNIX_EPOCH)
            .expect("it is stored");
        let rule = ChannelRule {
            schedule: "weekdays 07:30".parse::<DownloadSchedule>().expect("one"),
            policy: Some("free-only".to_owned()),
            keep: KeepRule {
                latest: 7,
                unplayed_only: false,
                bytes_max: Some(1 << 30),
            },
            enclosure: crate::EnclosureChoice::Smallest,
        };
        library.set_channel_rule(id, &rule).expect("it is stored");
        assert_eq!(library.channels().expect("a list")[0].rule, rule);
        library.unsubscribe(id).expect("it is removed");
        assert!(matches!(
            library.unsubscribe(id),
            Err(LibraryError::NoChannel(_))
        ));
        assert!(library.set_channel_rule(id, &rule).is_err());
    }
}
