//! What each download cost and when it was whole: the paper's field study, kept on the device.

use std::collections::BTreeMap;

use jiff::Timestamp;
use rusqlite::params;
use serde::{Deserialize, Serialize};

use crate::episode::EpisodeId;
use crate::library::{Library, LibraryError, seconds, to_json};

/// Entries that are kept: the newest.
pub const TRANSFER_LOG_ENTRIES_MAX: u32 = 10_000; // a guess: years of one person's downloads

/// A download that ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransferLogEntry {
    /// Number of the episode; none if it is no longer in the library.
    pub episode: Option<EpisodeId>,
    /// When it was asked for.
    pub started_at: Timestamp,
    /// When it ended.
    pub ended_at: Timestamp,
    /// When its first byte came.
    pub first_byte_at: Option<Timestamp>,
    /// By when it was wanted.
    pub deadline: Option<Timestamp>,
    /// Whether the file is whole.
    pub is_whole: bool,
    /// Size of the file.
    pub bytes: u64,
    /// Bytes on the networks by class: `free`, `metered`, `roaming`.
    pub bytes_by_class: BTreeMap<String, u64>,
    /// Times at which it went on by another network.
    pub switches: Vec<Timestamp>,
    /// Bytes that were fetched more than once.
    pub wasted_bytes: u64,
}

impl Library {
    /// Adds an entry to the log; the oldest go when it is full.
    ///
    /// # Errors
    /// The database fails.
    pub fn record_transfer(&self, entry: &TransferLogEntry) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        transaction.execute(
            "INSERT INTO transfer_log (episode, started_at, ended_at, entry) VALUES (?1, ?2, ?3, ?4)",
            params![
                entry.episode.map(|e| e.0),
                seconds(entry.started_at),
                seconds(entry.ended_at),
                to_json(entry),
            ],
        )?;
        transaction.execute(
            "DELETE FROM transfer_log WHERE id <= (SELECT max(id) FROM transfer_log) - ?1",
            [TRANSFER_LOG_ENTRIES_MAX],
        )?;
        transaction.commit()?;
        Ok(())
    }

    /// Entries that ended since then, the oldest first.
    ///
    /// # Errors
    /// The database fails.
    pub fn transfer_log(&self, since: Timestamp) -> Result<Vec<TransferLogEntry>, LibraryError> {
        let connection = self.lock();
        let mut query = connection
            .prepare_cached("SELECT entry FROM transfer_log WHERE ended_at >= ?1 ORDER BY id")?;
        let rows = query.query_map([seconds(since)], |row| row.get::<_, String>(0))?;
        let mut entries = Vec::new();
        for text in rows {
            // An entry of a later version is left out.
            entries.extend(serde_json::from_str::<TransferLogEntry>(&text?).ok());
        }
        Ok(entries)
    }
}
