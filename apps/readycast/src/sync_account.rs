//! The server that subscriptions and positions are exchanged with, and how far the exchange is.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::{OptionalExtension, params};
use serde::Serialize;
use url::Url;

use crate::library::{Library, LibraryError, optional_time, seconds, time, url};

/// Time between two exchanges with the server.
pub const SYNC_INTERVAL: Duration = Duration::from_secs(3_600); // a guess, as for feeds

/// Longest time until an exchange that failed is tried again.
pub const SYNC_RETRY_MAX: Duration = Duration::from_secs(24 * 3_600);

/// Time until an exchange that failed is tried again the first time; it doubles.
const SYNC_RETRY: Duration = Duration::from_secs(5 * 60); // a guess

/// The account at a server.
#[derive(Clone, PartialEq, Eq, Serialize)]
pub struct SyncAccount {
    /// Address of the server.
    pub server: Url,
    /// Name of the user.
    pub user: String,
    /// Value of `Authorization`.
    #[serde(skip)]
    pub authorization: String,
    /// Name of this device at the server.
    pub device: String,
    /// Whether the server is the app of Nextcloud, which has paths of its own.
    pub is_nextcloud: bool,
    /// When subscriptions and positions were exchanged the last time.
    pub synced_at: Option<Timestamp>,
    /// The time of the next exchange.
    pub next_sync_at: Timestamp,
    /// Why the last exchange failed, in a sentence.
    pub problem: Option<String>,
    /// How far the exchange is.
    #[serde(skip)]
    pub progress: SyncProgress,
}

/// How far the exchange with a server is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyncProgress {
    /// The server's number of the subscriptions that were received last; 0 before the first exchange.
    pub subscriptions_since: i64,
    /// The server's number of the actions that were received last.
    pub actions_since: i64,
    /// The library's number of the changes that were sent last.
    pub sent_until: i64,
}

impl fmt::Debug for SyncAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the password.
        write!(f, "SyncAccount({} at {})", self.user, self.server)
    }
}

impl SyncAccount {
    /// What names the account as the source of changes.
    pub fn source(&self) -> String {
        format!("server:{} {}", self.user, self.server)
    }
}

impl Library {
    /// The account; none if none was set up.
    ///
    /// # Errors
    /// The database fails.
    pub fn sync_account(&self) -> Result<Option<SyncAccount>, LibraryError> {
        let connection = self.lock();
        let found = connection.query_row("SELECT * FROM sync_account", [], |row| {
            Ok(SyncAccount {
                server: url(row, "server")?,
                user: row.get("user_name")?,
                authorization: row.get("authorization")?,
                device: row.get("device")?,
                is_nextcloud: row.get("is_nextcloud")?,
                synced_at: optional_time(row, "synced_at")?,
                next_sync_at: time(row, "next_sync_at")?,
                problem: row.get("problem")?,
                progress: SyncProgress {
                    subscriptions_since: row.get("subscriptions_since")?,
                    actions_since: row.get("actions_since")?,
                    sent_until: row.get("sent_until")?,
                },
            })
        });
        Ok(found.optional()?)
    }

    /// Sets the account up in place of any other. The same user at the same server goes on where the exchange was.
    ///
    /// # Errors
    /// The database fails.
    pub fn set_sync_account(&self, account: &SyncAccount) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        transaction.execute(
            "DELETE FROM sync_account WHERE server <> ?1 OR user_name <> ?2 OR is_nextcloud <> ?3",
            params![account.server.as_str(), account.user, account.is_nextcloud],
        )?;
        let is_new: bool =
            transaction.query_row("SELECT count(*) = 0 FROM sync_account", [], |row| {
                row.get(0)
            })?;
        if is_new {
            // What came from there earlier may be there no longer: all is sent.
            for table in ["subscription_changes", "episode_actions"] {
                let sql = format!("UPDATE {table} SET source = '' WHERE source = ?1");
                transaction.execute(&sql, [account.source()])?;
            }
        }
        transaction.execute(
            "INSERT INTO sync_account (id, server, user_name, authorization, device, is_nextcloud, next_sync_at)
             VALUES (1, ?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT (id) DO UPDATE SET authorization = excluded.authorization, next_sync_at = excluded.next_sync_at",
            params![
                account.server.as_str(),
                account.user,
                account.authorization,
                account.device,
                account.is_nextcloud,
                seconds(account.next_sync_at),
            ],
        )?;
        transaction.commit()?;
        Ok(())
    }

    /// Forgets the account. Returns whether there was one.
    ///
    /// # Errors
    /// The database fails.
    pub fn remove_sync_account(&self) -> Result<bool, LibraryError> {
        Ok(self.lock().execute("DELETE FROM sync_account", [])? > 0)
    }

    /// Notes how far the exchange is.
    ///
    /// # Errors
    /// The database fails.
    pub fn note_sync_progress(&self, progress: SyncProgress) -> Result<(), LibraryError> {
        self.lock().execute(
            "UPDATE sync_account SET subscriptions_since = ?1, actions_since = ?2, sent_until = ?3",
            params![
                progress.subscriptions_since,
                progress.actions_since,
                progress.sent_until
            ],
        )?;
        Ok(())
    }

    /// Notes the end of an exchange: whole, or why not.
    ///
    /// # Errors
    /// The database fails.
    pub fn note_sync_end(&self, problem: Option<&str>, now: Timestamp) -> Result<(), LibraryError> {
        let connection = self.lock();
        match problem {
            None => connection.execute(
                "UPDATE sync_account SET synced_at = ?1, next_sync_at = ?1 + ?2, failures = 0, problem = NULL",
                params![seconds(now), SYNC_INTERVAL.as_secs() as i64],
            )?,
            // Doubled with each failure, up to the longest.
            Some(problem) => connection.execute(
                "UPDATE sync_account SET failures = failures + 1, problem = ?2,
                 next_sync_at = ?1 + min(?3 << min(failures, 16), ?4)",
                params![
                    seconds(now),
                    problem,
                    SYNC_RETRY.as_secs() as i64,
                    SYNC_RETRY_MAX.as_secs() as i64
                ],
            )?,
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(user: &str) -> SyncAccount {
        SyncAccount {
            server: "https://sync.example/".parse().expect("an address"),
            user: user.to_owned(),
            authorization: "Basic x".to_owned(),
            device: "cedos-laptop".to_owned(),
            is_nextcloud: false,
            synced_at: None,
            next_sync_at: Timestamp::UNIX_EPOCH,
            problem: None,
            progress: SyncProgress::default(),
        }
    }

    #[test]
    fn an_account_goes_on_where_it_was_and_another_begins_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("it opens");
        assert_eq!(library.sync_account().expect("a query"), None);
        library.set_sync_account(&account("me")).expect("stored");
        let progress = SyncProgress {
            subscriptions_since: 1,
            actions_since: 2,
            sent_until: 3,
        };
        library.note_sync_progress(progress).expect("stored");
        let changed = SyncAccount {
            authorization: "Basic y".to_owned(),
            ..account("me")
        };
        library.set_sync_account(&changed).expect("stored");
        let found = library.sync_account().expect("a query").expect("one");
        assert_eq!(
            (found.progress, &*found.authorization),
            (progress, "Basic y")
        );
        library.set_sync_account(&account("you")).expect("stored");
        let found = library.sync_account().expect("a query").expect("one");
        assert_eq!(found.progress, SyncProgress::default());
        assert!(library.remove_sync_account().expect("removed"));
        assert!(!library.remove_sync_account().expect("none"));
    }

    #[test]
    fn failures_are_tried_again_ever_later() {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("it opens");
        library.set_sync_account(&account("me")).expect("stored");
        let now = Timestamp::UNIX_EPOCH;
        let mut waits = Vec::new();
        for _ in 0..12 {
            library.note_sync_end(Some("no"), now).expect("stored");
            let found = library.sync_account().expect("a query").expect("one");
            assert_eq!(found.problem.as_deref(), Some("no"));
            waits.push(found.next_sync_at.as_second());
        }
        assert_eq!(waits[..3], [300, 600, 1_200]);
        assert_eq!(waits[11], 24 * 3_600);
        library.note_sync_end(None, now).expect("stored");
        let found = library.sync_account().expect("a query").expect("one");
        assert_eq!(
            (found.problem, found.next_sync_at.as_second()),
            (None, 3_600)
        );
    }
}
