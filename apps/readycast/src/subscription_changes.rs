//! What was subscribed to and unsubscribed from since when, for apps and servers that sync; and the apps' devices.
//!
//! ```text
//!  library ── triggers ─▶ subscription_changes ─▶ changes since 41 ─▶ app: "add", "remove", "timestamp": 57
//!                                                                       └─ next time: changes since 57
//! ```

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};
use url::Url;

use crate::channel::ChannelId;
use crate::library::{Library, LibraryError, seconds, url};

/// The maximum number of ended subscriptions that are remembered.
const ENDED_MAX: i64 = 20_000; // a guess

/// The maximum number of devices of apps that are remembered: those seen last.
pub const APP_DEVICES_MAX: usize = 64; // a guess: a person has three

/// A feed whose subscription changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedFeed {
    /// Address of the feed.
    pub url: Url,
    /// Number that its channel has, or had.
    pub channel: ChannelId,
}

/// The subscriptions that were added and removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubscriptionChanges {
    /// Feeds that are subscribed to.
    pub add: Vec<ChangedFeed>,
    /// Feeds that are no longer subscribed to. The channel of one that moved goes on under another address.
    pub remove: Vec<ChangedFeed>,
    /// What to ask with the next time.
    pub timestamp: i64,
}

/// A device of an app that syncs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppDevice {
    /// Name that the app gave it.
    pub id: String,
    /// Name for a person.
    pub caption: String,
    /// Kind of device as the app says it: desktop, laptop, mobile, server, other.
    pub kind: String,
}

/// Advances the clock of changes and returns its value: each later change has a greater one.
pub(crate) fn read_clock(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row(
        "UPDATE sync_clock SET next = max(unixepoch(), next) + 1 RETURNING next - 1",
        [],
        |row| row.get(0),
    )
}

/// The channel of a feed's address, by any of its names.
pub(crate) fn channel_at(connection: &Connection, address: &str) -> rusqlite::Result<Option<i64>> {
    connection
        .prepare_cached(
            "SELECT id FROM channels WHERE url = ?1
             UNION ALL SELECT channel FROM feed_aliases WHERE alias = ?1 LIMIT 1",
        )?
        .query_row([address], |row| row.get(0))
        .optional()
}

/// Says from where the newest change of a feed came.
pub(crate) fn note_change_source(
    connection: &Connection,
    feed: &Url,
    source: &str,
) -> rusqlite::Result<()> {
    let sql = "UPDATE subscription_changes SET source = ?2 WHERE url = ?1";
    let mut update = connection.prepare_cached(sql)?;
    update.execute(params![feed.as_str(), source])?;
    Ok(())
}

impl Library {
    /// Subscriptions that changed since an earlier answer's timestamp, but for those that came from `except`. Since 0
    /// these are all subscriptions, and none that ended.
    ///
    /// # Errors
    /// The database fails.
    pub fn subscription_changes(
        &self,
        since: i64,
        except: Option<&str>,
    ) -> Result<SubscriptionChanges, LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let mut changes = SubscriptionChanges {
            timestamp: read_clock(&transaction)?,
            ..SubscriptionChanges::default()
        };
        {
            let mut query = transaction.prepare_cached(
                "SELECT url, channel, subscribed FROM subscription_changes
                 WHERE changed_at > ?1 AND (?2 IS NULL OR source <> ?2) ORDER BY changed_at, url",
            )?;
            let rows = query.query_map(params![since, except], |row| {
                let feed = ChangedFeed {
                    url: url(row, "url")?,
                    channel: ChannelId(row.get("channel")?),
                };
                Ok((feed, row.get("subscribed")?))
            })?;
            for row in rows {
                match row? {
                    (feed, true) => changes.add.push(feed),
                    (_, false) if since == 0 => {}
                    (feed, false) => changes.remove.push(feed),
                }
            }
        }
        transaction.execute(
            "DELETE FROM subscription_changes WHERE url IN (SELECT url FROM subscription_changes
             WHERE subscribed = 0 ORDER BY changed_at DESC LIMIT -1 OFFSET ?1)",
            [ENDED_MAX],
        )?;
        transaction.commit()?;
        Ok(changes)
    }

    /// Says from where the newest changes of these feeds came, so that they are not sent back there.
    ///
    /// # Errors
    /// The database fails.
    pub fn set_change_source(&self, feeds: &[Url], source: &str) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        for feed in feeds {
            note_change_source(&transaction, feed, source)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Whether a person subscribed to this feed here, after an earlier answer's timestamp.
    ///
    /// # Errors
    /// The database fails.
    pub fn is_subscribed_since(&self, feed: &Url, since: i64) -> Result<bool, LibraryError> {
        let connection = self.lock();
        let sql = "SELECT 1 FROM subscription_changes
                   WHERE url = ?1 AND subscribed = 1 AND changed_at > ?2 AND source = ''";
        let found = connection.query_row(sql, params![feed.as_str(), since], |_| Ok(()));
        Ok(found.optional()?.is_some())
    }

    /// Whether a subscription to this address ended: the person removed it, or the feed moved.
    ///
    /// # Errors
    /// The database fails.
    pub fn has_subscription_ended(&self, feed: &Url) -> Result<bool, LibraryError> {
        let connection = self.lock();
        let sql = "SELECT 1 FROM subscription_changes WHERE url = ?1 AND subscribed = 0";
        let found = connection.query_row(sql, [feed.as_str()], |_| Ok(()));
        Ok(found.optional()?.is_some())
    }

    /// The channel of a feed, by its address or another name of it; none if it is not subscribed to.
    ///
    /// # Errors
    /// The database fails.
    pub fn channel_of_feed(&self, feed: &Url) -> Result<Option<ChannelId>, LibraryError> {
        let connection = self.lock();
        Ok(channel_at(&connection, feed.as_str())?.map(ChannelId))
    }

    /// Notes another name of a channel's feed, as a server gave it.
    ///
    /// # Errors
    /// The database fails.
    pub fn add_feed_alias(&self, channel: ChannelId, alias: &Url) -> Result<(), LibraryError> {
        self.lock().execute(
            "INSERT OR REPLACE INTO feed_aliases (alias, channel) SELECT ?2, id FROM channels WHERE id = ?1",
            params![channel.0, alias.as_str()],
        )?;
        Ok(())
    }

    /// Notes a device of an app. What is empty stays as it was.
    ///
    /// # Errors
    /// The database fails.
    pub fn note_app_device(&self, device: &AppDevice, now: Timestamp) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        transaction.execute(
            "INSERT INTO app_devices (id, caption, kind, seen_at) VALUES (?1, ?2, ifnull(nullif(?3, ''), 'other'), ?4)
             ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at,
             caption = ifnull(nullif(?2, ''), caption), kind = ifnull(nullif(?3, ''), kind)",
            params![device.id, device.caption, device.kind, seconds(now)],
        )?;
        transaction.execute(
            "DELETE FROM app_devices WHERE id IN (SELECT id FROM app_devices ORDER BY seen_at DESC, id
             LIMIT -1 OFFSET ?1)",
            [APP_DEVICES_MAX as i64],
        )?;
        transaction.commit()?;
        Ok(())
    }

    /// The devices of apps, by name.
    ///
    /// # Errors
    /// The database fails.
    pub fn app_devices(&self) -> Result<Vec<AppDevice>, LibraryError> {
        let connection = self.lock();
        let sql = "SELECT id, caption, kind FROM app_devices ORDER BY id";
        let mut query = connection.prepare_cached(sql)?;
        let rows = query.query_map([], |row| {
            Ok(AppDevice {
                id: row.get("id")?,
                caption: row.get("caption")?,
                kind: row.get("kind")?,
            })
        })?;
        Ok(rows.collect::<Result<_, _>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refresh::RefreshOutcome;

    fn feed(n: usize) -> Url {
        format!("https://a.example/{n}")
            .parse()
            .expect("an address")
    }

    fn urls(changes: &SubscriptionChanges) -> (Vec<Url>, Vec<Url>) {
        let urls = |feeds: &[ChangedFeed]| feeds.iter().map(|feed| feed.url.clone()).collect();
        (urls(&changes.add), urls(&changes.remove))
    }

    #[test]
    fn changes_are_told_once_however_fast_they_follow() {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("it opens");
        let now = Timestamp::now();
        let mut since = 0;
        // Many within one second of the clock.
        for n in 0..50 {
            let id = library.subscribe(&feed(n), now).expect("stored");
            let changes = library.subscription_changes(since, None).expect("a list");
            assert_eq!(urls(&changes), (vec![feed(n)], vec![]), "{n}");
            assert!(changes.timestamp > since, "{n}");
            since = changes.timestamp;
            if n % 2 == 1 {
                library.unsubscribe(id).expect("removed");
                let changes = library.subscription_changes(since, None).expect("a list");
                assert_eq!(urls(&changes), (vec![], vec![feed(n)]), "{n}");
                since = changes.timestamp;
            }
        }
        let all = library.subscription_changes(0, None).expect("a list");
        assert_eq!((all.add.len(), all.remove.len()), (25, 0));
        library.subscribe(&feed(100), now).expect("stored");
        library
            .set_change_source(&[feed(100)], "server")
            .expect("stored");
        let others = library.subscription_changes(since, Some("server"));
        assert!(others.expect("a list").add.is_empty());
        assert!(
            !library
                .is_subscribed_since(&feed(100), since)
                .expect("a query")
        );
        assert!(library.is_subscribed_since(&feed(0), 0).expect("a query"));
    }

    #[test]
    fn a_feed_that_moved_is_known_by_both_addresses() {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("it opens");
        let now = Timestamp::now();
        let id = library.subscribe(&feed(1), now).expect("stored");
        let since = library
            .subscription_changes(0, None)
            .expect("a list")
            .timestamp;
        let outcome = RefreshOutcome::Feed {
            bytes: b"<rss version=\"2.0\"><channel><title>A</title></channel></rss>".to_vec(),
            etag: None,
            last_modified: None,
            moved_to: Some(feed(2)),
        };
        library.apply_refresh(id, outcome, now).expect("stored");
        let changes = library.subscription_changes(since, None).expect("a list");
        assert_eq!(urls(&changes), (vec![feed(2)], vec![feed(1)]));
        for address in [feed(1), feed(2)] {
            let found = library.channel_of_feed(&address).expect("a query");
            assert_eq!(found, Some(id), "{address}");
        }
    }

    #[test]
    fn devices_that_were_seen_last_are_remembered() {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("it opens");
        for n in 0..=APP_DEVICES_MAX {
            let device = AppDevice {
                id: format!("d{n:03}"),
                caption: "Phone".to_owned(),
                kind: String::new(),
            };
            let at = Timestamp::from_second(n as i64).expect("a time");
            library.note_app_device(&device, at).expect("stored");
        }
        let devices = library.app_devices().expect("a list");
        assert_eq!(devices.len(), APP_DEVICES_MAX);
        assert_eq!((&*devices[0].id, &*devices[0].kind), ("d001", "other"));
    }
}
