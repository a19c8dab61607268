//! The library: one SQLite file, and what all its parts share.
//!
//! ```text
//!  library.rs        opening, schema, errors
//!  ├─ subscriptions  channels, their rules
//!  ├─ refresh        which feeds are due, and what a refresh brought
//!  ├─ episodes       lists, positions
//!  ├─ up_next        the order of hearing, and what was begun
//!  ├─ downloads      which episodes are wanted, and how their downloads went
//!  ├─ episode_files  files of episodes, and the disks that they are on
//!  ├─ transfer_log   what each download cost, when it was whole, and when it was played
//!  ├─ kept_feeds     texts of feeds that other apps read through the agent
//!  └─ sync: subscription_changes, episode_actions, sync_account
//! ```
//!
//! Each call is one transaction: what returned without an error survives a killed process and a power cut.
//! Calls block for as long as the disk takes.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cedos_feed::FeedError;
use jiff::Timestamp;
use rusqlite::types::Type;
use rusqlite::{Connection, Row, TransactionBehavior};
use url::Url;

use crate::podcast_index::private_file;

/// Name of the database within its folder.
const FILE_NAME: &str = "library.sqlite";

/// How long a call waits for another process that has the database.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// The steps from an empty database to today's schema. A step that was released never changes.
const MIGRATIONS: [&str; 8] = [
    include_str!("schema_1.sql"),
    include_str!("schema_2.sql"),
    include_str!("schema_3.sql"),
    include_str!("schema_4.sql"),
    include_str!("schema_5.sql"),
    include_str!("schema_6.sql"),
    include_str!("schema_7.sql"),
    include_str!("schema_8.sql"),
];

/// Why the library cannot do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The database cannot be read or written.
    #[error("the podcast library cannot be used: {0}")]
    Database(#[from] rusqlite::Error),
    /// The folder cannot be made.
    #[error("the podcast library cannot be made in {}: {error}", folder.display())]
    Folder {
        /// Folder that cannot be made.
        folder: PathBuf,
        /// The error of the operating system.
        error: std::io::Error,
    },
    /// The database was written by a later version.
    #[error(
        "the podcast library in {} was written by a newer version of Cedos; install that one",
        file.display()
    )]
    Newer {
        /// The path of the database.
        file: PathBuf,
    },
    /// No such channel.
    #[error("there is no channel with the number {0}")]
    NoChannel(i64),
    /// No such episode.
    #[error("there is no episode with the number {0}")]
    NoEpisode(i64),
    /// An address that is no feed's.
    #[error("{0} is no address of a feed: only http and https are read")]
    Scheme(Url),
    /// A copy of the library that cannot be written.
    #[error("cannot write the copy {}: {why}", file.display())]
    Backup {
        /// The path of the copy.
        file: PathBuf,
        /// Why the database cannot be written, in words.
        why: String,
    },
    /// An index of podcasts that cannot be read or written.
    #[error("the index of podcasts {} cannot be used: {why}", file.display())]
    Index {
        /// The index, or the database that it is made from.
        file: PathBuf,
        /// Why the database cannot be used, in words.
        why: String,
    },
    /// A feed that cannot be read.
    #[error(transparent)]
    Feed(#[from] FeedError),
}

/// Subscriptions, episodes and their files. Clones share one database.
#[derive(Clone)]
pub struct Library {
    connection: Arc<Mutex<Connection>>,
}

impl Library {
    /// Whether there is a library in this folder.
    pub fn exists(folder: &Path) -> bool {
        folder.join(FILE_NAME).exists()
    }

    /// Opens the library in a folder, which is made if it is not there. Only its owner can read it: it may hold
    /// passwords of feeds.
    ///
    /// # Errors
    /// The folder cannot be made, the database is damaged, or a newer version wrote it.
    pub fn open(folder: &Path) -> Result<Library, LibraryError> {
        let of_folder = |error| LibraryError::Folder {
            folder: folder.to_owned(),
            error,
        };
        private_folder(folder).map_err(of_folder)?;
        let file = folder.join(FILE_NAME);
        let mut connection = Connection::open(&file)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        // A power cut takes nothing that was acknowledged.
        connection.pragma_update(None, "synchronous", "full")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        migrate(&mut connection, &file)?;
        connection.set_transaction_behavior(TransactionBehavior::Immediate);
        Ok(Library {
            connection: Arc::new(Mutex::new(connection)),
        })
    }

    /// Writes a copy of the library into a file that does not exist yet, while the library is in use. Only its owner can
    /// read it. To go back to it, it takes the library's place while no agent runs.
    ///
    /// # Errors
    /// The file exists, or there is no room for it.
    pub fn backup(&self, file: &Path) -> Result<(), LibraryError> {
        let failed = |error: &dyn std::fmt::Display| LibraryError::Backup {
            file: file.to_owned(),
            why: error.to_string(),
        };
        let library = self.lock().path().map(PathBuf::from).unwrap_or_default();
        // Apart from the connection that others use.
        let connection = Connection::open(library)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        private_file(file).map_err(|error| failed(&error))?;
        let written = connection
            .execute("VACUUM INTO ?1", [file.to_string_lossy()])
            .map_err(|error| failed(&error))
            .and_then(|_| {
                let synced = std::fs::File::open(file).and_then(|file| file.sync_all());
                synced.map_err(|error| failed(&error))
            });
        if written.is_err() {
            // Half of a copy is none.
            let _ = std::fs::remove_file(file);
        }
        written
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic within a transaction rolled it back.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn private_folder(folder: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
    }
    #[cfg(not(unix))]
    std::fs::create_dir_all(folder)
}

fn migrate(connection: &mut Connection, file: &Path) -> Result<(), LibraryError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let version: usize =
        transaction.pragma_query_value(None, "user_version", |row| row.get::<_, u32>(0))? as usize;
    if version > MIGRATIONS.len() {
        return Err(LibraryError::Newer {
            file: file.to_owned(),
        });
    }
    for step in &MIGRATIONS[version..] {
        transaction.execute_batch(step)?;
    }
    transaction.pragma_update(None, "user_version", MIGRATIONS.len() as u32)?;
    transaction.commit()?;
    Ok(())
}

/// Seconds since 1970.
pub(crate) fn seconds(at: Timestamp) -> i64 {
    at.as_second()
}

/// The time of a column of seconds.
pub(crate) fn time(row: &Row<'_>, column: &str) -> rusqlite::Result<Timestamp> {
    let seconds: i64 = row.get(column)?;
    Ok(Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// The time of a column of seconds that may be null.
pub(crate) fn optional_time(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<Timestamp>> {
    let seconds: Option<i64> = row.get(column)?;
    Ok(seconds.and_then(|s| Timestamp::from_second(s).ok()))
}

/// The address of a column.
pub(crate) fn url(row: &Row<'_>, column: &str) -> rusqlite::Result<Url> {
    let text: String = row.get(column)?;
    Url::parse(&text)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, Type::Text, Box::new(error)))
}

/// The address of a column that may be null; one that cannot be read is none.
pub(crate) fn optional_url(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<Url>> {
    let text: Option<String> = row.get(column)?;
    Ok(text.and_then(|text| Url::parse(&text).ok()))
}

/// The value of a column of JSON; one that cannot be read is the default.
pub(crate) fn json<T: serde::de::DeserializeOwned + Default>(
    row: &Row<'_>,
    column: &str,
) -> rusqlite::Result<T> {
    let text: Option<String> = row.get(column)?;
    Ok(text
        .and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default())
}

/// A value as JSON for a column.
pub(crate) fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("plain structs are JSON")
}
