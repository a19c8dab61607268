//! Channels of the library: subscribing, listing, rules.

use std::path::PathBuf;

use jiff::Timestamp;
use rusqlite::{OptionalExtension, Row, named_params, params};
use url::Url;

use crate::channel::{Channel, ChannelId, ChannelSummary};
use crate::episode::EpisodeState;
use crate::library::{
    Library, LibraryError, json, optional_time, optional_url, seconds, time, to_json, url,
};
use crate::rule::ChannelRule;

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
        let (url, authorization) = split_credentials(url);
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(LibraryError::Scheme(url));
        }
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        transaction.execute(
            "INSERT INTO channels (url, title, rule, added_at, next_refresh_at)
             VALUES (?1, ?1, ?2, ?3, ?3) ON CONFLICT (url) DO NOTHING",
            params![url.as_str(), to_json(&ChannelRule::default()), seconds(now)],
        )?;
        if let Some(authorization) = authorization {
            transaction.execute(
                "UPDATE channels SET authorization = ?2, next_refresh_at = ?3 WHERE url = ?1",
                params![url.as_str(), authorization, seconds(now)],
            )?;
        }
        let id = transaction.query_row(
            "SELECT id FROM channels WHERE url = ?1",
            [url.as_str()],
            |row| row.get(0),
        )?;
        transaction.commit()?;
        Ok(ChannelId(id))
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
                "SELECT file FROM episodes WHERE channel = ?1 AND file IS NOT NULL",
            )?;
            let rows = query.query_map([channel.0], |row| row.get::<_, String>(0))?;
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
        let connection = self.lock();
        let mut query = connection.prepare_cached(&format!(
            "SELECT {SUMMARY} FROM channels c ORDER BY c.title COLLATE NOCASE, c.id"
        ))?;
        let rows = query.query_map([], summary)?;
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
             c.next_refresh_at FROM channels c WHERE c.id = ?1"
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
            "SELECT count(*), total(file_bytes) FROM episodes WHERE state = :ready",
            named_params! {":ready": EpisodeState::Ready.number()},
            |row| Ok((row.get::<_, i64>(0)?, row.get::<_, f64>(1)?)),
        )?;
        Ok((totals.0 as u64, totals.1 as u64))
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
    use crate::rule::{DownloadSchedule, KeepRule};

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
