//! The log of downloads: what each cost, when it was whole, and when it was played. It stays on the device.
//!
//! ```text
//!  events of a download ─▶ TransferRecord (kept with the episode) ── at its end ─▶ TransferLogEntry
//!                                                                   first play ──▶     │ played_at
//!                                            StudySummary, DelayProposal ◀── transfer_log
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::{OptionalExtension, named_params, params};
use serde::{Deserialize, Serialize};
use url::Url;

use crate::channel::ChannelId;
use crate::episode::{EpisodeId, EpisodeState};
use crate::library::{Library, LibraryError, optional_time, optional_url, seconds, to_json};
use crate::rule::{NOTICE_MIN, WHEN_FREE_POLICY};

/// Entries that are kept: the newest.
pub const TRANSFER_LOG_ENTRIES_MAX: u32 = 10_000; // a guess: years of one person's downloads

/// Switches, and lost networks, that are kept of one download: the first.
pub const SWITCHES_MAX: usize = 1_000; // a guess: a switch each minute of a day is 1,440

/// A network as the log knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedNetwork {
    /// Name: `wifi:SSID`, `carrier:CODE` or the device's; none if it was removed from the log.
    pub name: Option<String>,
    /// Kind of link: `wifi`, `cellular`, `ethernet`, `vpn` or `other`.
    pub kind: String,
    /// Cost class: `free`, `metered` or `roaming`.
    pub class: String,
}

/// What a network carried of a download.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedBytes {
    /// Network that carried the bytes.
    #[serde(flatten)]
    pub network: LoggedNetwork,
    /// Bytes of the file that it carried, those that came twice included.
    pub bytes: u64,
}

/// A move of a download to another network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoggedSwitch {
    /// When the transfer moved to another link.
    pub at: Timestamp,
    /// Bytes of the file that were there.
    pub bytes: u64,
    /// The network that carried before.
    pub from: LoggedNetwork,
    /// The network that carries from then on.
    pub to: LoggedNetwork,
}

/// The loss of the network that carried a download: an ordinary connection broke here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoggedLoss {
    /// When the network was gone.
    pub at: Timestamp,
    /// Bytes of the file that were there.
    pub bytes: u64,
}

/// What the log will keep of a download that runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransferRecord {
    /// When its first byte came.
    pub first_byte_at: Option<Timestamp>,
    /// When its last new byte came.
    pub last_byte_at: Option<Timestamp>,
    /// Moves to another network.
    pub switches: Vec<LoggedSwitch>,
    /// Losses of the network that carried it.
    pub losses: Vec<LoggedLoss>,
    /// Bytes by network.
    pub carried: Vec<CarriedBytes>,
    /// Bytes of each device that are in `carried`.
    pub counted: BTreeMap<String, u64>,
    /// Bytes of the file that were there at the last event.
    pub bytes: u64,
}

impl TransferRecord {
    /// Adds bytes that a network carried.
    pub fn add(&mut self, network: &LoggedNetwork, bytes: u64) {
        match self.carried.iter_mut().find(|c| c.network == *network) {
            Some(carried) => carried.bytes += bytes,
            None => self.carried.push(CarriedBytes {
                network: network.clone(),
                bytes,
            }),
        }
    }
}

/// Texts by which a person recognises a download.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransferLabels {
    /// Number of the channel.
    pub channel: Option<ChannelId>,
    /// Title of the channel.
    pub channel_title: String,
    /// Title of the episode.
    pub title: String,
    /// The address that was fetched.
    pub url: Option<Url>,
}

/// The delay that was allowed for a download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptedDelay {
    /// The download was wanted at once.
    Immediate,
    /// The download was wanted within this time.
    Within(Duration),
    /// The download could wait for a free network as long as it takes.
    Unlimited,
}

/// A download that ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransferLogEntry {
    /// Number of the episode; none if it was removed from the log.
    pub episode: Option<EpisodeId>,
    /// The titles and the address of the download, stored by [`Library::record_transfer`]; none if they were removed from
    /// the log.
    #[serde(default)]
    pub labels: Option<TransferLabels>,
    /// When the transfer was requested.
    pub started_at: Timestamp,
    /// When the transfer ended.
    pub ended_at: Timestamp,
    /// The deadline of the transfer.
    pub deadline: Option<Timestamp>,
    /// Which networks it might use, as `--policy` takes it.
    #[serde(default)]
    pub policy: Option<String>,
    /// Whether the file is whole.
    pub is_whole: bool,
    /// Bytes of the file that were there at the end.
    pub bytes: u64,
    /// Bytes that were fetched more than once.
    pub wasted_bytes: u64,
    /// When the episode was first played; none if it was not.
    #[serde(default)]
    pub played_at: Option<Timestamp>,
    /// When its first byte came.
    pub first_byte_at: Option<Timestamp>,
    /// When its last new byte came.
    #[serde(default)]
    pub last_byte_at: Option<Timestamp>,
    /// Bytes by network.
    #[serde(default)]
    pub carried: Vec<CarriedBytes>,
    /// Moves to another network.
    #[serde(default)]
    pub switches: Vec<LoggedSwitch>,
    /// Losses of the network that carried it.
    #[serde(default)]
    pub losses: Vec<LoggedLoss>,
}

impl TransferLogEntry {
    /// The delay that was allowed. Less than a minute, which a deadline that has passed still gets, is none.
    pub fn accepted_delay(&self) -> AcceptedDelay {
        let Some(deadline) = self.deadline else {
            return match self.policy.as_deref() {
                Some(WHEN_FREE_POLICY) => AcceptedDelay::Unlimited,
                _ => AcceptedDelay::Immediate,
            };
        };
        match Duration::try_from(deadline.duration_since(self.started_at)) {
            Ok(delay) if delay > NOTICE_MIN => AcceptedDelay::Within(delay),
            _ => AcceptedDelay::Immediate,
        }
    }

    /// Whether the file was whole by the deadline; none if there was no deadline.
    pub fn is_in_time(&self) -> Option<bool> {
        let deadline = self.deadline?;
        // The report of the end comes a moment after the last byte.
        let whole_at = self.last_byte_at.unwrap_or(self.ended_at);
        Some(self.is_whole && whole_at <= deadline)
    }

    /// Bytes that networks carried.
    pub fn carried_bytes(&self) -> u64 {
        self.carried.iter().map(|carried| carried.bytes).sum()
    }

    /// Bytes that links of this kind carried.
    pub fn carried_by_kind(&self, kind: &str) -> u64 {
        let of_kind = self.carried.iter().filter(|c| c.network.kind == kind);
        of_kind.map(|carried| carried.bytes).sum()
    }

    /// Bytes that a client fetches again which begins at the first byte whenever it loses its network: all that was
    /// there at the last loss. At least these: while it fetches them again, it may lose its network once more.
    pub fn restart_bytes(&self) -> u64 {
        self.losses.iter().map(|loss| loss.bytes).max().unwrap_or(0)
    }
}

/// A log without titles, addresses, numbers of episodes and channels, and names of networks. Its times count from
/// 1970-01-01T00:00:00Z, where the first download was asked for.
pub fn anonymous_log(entries: &[TransferLogEntry]) -> Vec<TransferLogEntry> {
    let first = entries.iter().map(|entry| entry.started_at).min();
    // By whole seconds: what is whole in the second of its play stays so.
    let first = first.map_or(0, Timestamp::as_second);
    let first = Timestamp::from_second(first).unwrap_or(Timestamp::UNIX_EPOCH);
    let moved = |at: Timestamp| {
        let since = at.duration_since(first);
        Timestamp::from_duration(since).unwrap_or(Timestamp::UNIX_EPOCH)
    };
    let nameless = |network: &LoggedNetwork| LoggedNetwork {
        name: None,
        ..network.clone()
    };
    let anonymous = |entry: &TransferLogEntry| {
        let mut record = TransferRecord::default();
        for carried in &entry.carried {
            record.add(&nameless(&carried.network), carried.bytes);
        }
        let switches = entry.switches.iter().map(|switch| LoggedSwitch {
            at: moved(switch.at),
            bytes: switch.bytes,
            from: nameless(&switch.from),
            to: nameless(&switch.to),
        });
        let losses = entry.losses.iter().map(|loss| LoggedLoss {
            at: moved(loss.at),
            bytes: loss.bytes,
        });
        TransferLogEntry {
            episode: None,
            labels: None,
            started_at: moved(entry.started_at),
            ended_at: moved(entry.ended_at),
            deadline: entry.deadline.map(moved),
            policy: entry.policy.clone(),
            is_whole: entry.is_whole,
            bytes: entry.bytes,
            wasted_bytes: entry.wasted_bytes,
            played_at: entry.played_at.map(moved),
            first_byte_at: entry.first_byte_at.map(moved),
            last_byte_at: entry.last_byte_at.map(moved),
            carried: record.carried,
            switches: switches.collect(),
            losses: losses.collect(),
        }
    };
    entries.iter().map(anonymous).collect()
}

impl Library {
    /// Keeps what the log will say of a download that runs, so that an agent that is killed loses none of it.
    ///
    /// # Errors
    /// The database fails.
    pub fn keep_transfer_record(
        &self,
        job: u64,
        record: &TransferRecord,
    ) -> Result<(), LibraryError> {
        self.lock().execute(
            "UPDATE episodes SET transfer_record = ?3 WHERE job = ?1 AND state = ?2",
            params![
                i64::try_from(job).unwrap_or(i64::MAX),
                EpisodeState::Downloading.number(),
                to_json(record),
            ],
        )?;
        Ok(())
    }

    /// Adds an entry to the log, with the titles that the episode has now; the oldest go when it is full.
    ///
    /// # Errors
    /// The database fails.
    pub fn record_transfer(&self, entry: &TransferLogEntry) -> Result<(), LibraryError> {
        let mut entry = entry.clone();
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let mut played_at = None;
        if let Some(episode) = entry.episode {
            let found = transaction.query_row(
                "SELECT e.channel, c.title AS channel_title, e.title, e.enclosure, e.first_played_at
                 FROM episodes e JOIN channels c ON c.id = e.channel WHERE e.id = ?1",
                [episode.0],
                |row| {
                    let labels = TransferLabels {
                        channel: Some(ChannelId(row.get("channel")?)),
                        channel_title: row.get("channel_title")?,
                        title: row.get("title")?,
                        url: optional_url(row, "enclosure")?,
                    };
                    Ok((labels, optional_time(row, "first_played_at")?))
                },
            );
            if let Some((labels, first_played_at)) = found.optional()? {
                entry.labels = Some(labels);
                // An earlier copy may have been played.
                played_at = first_played_at.filter(|at| seconds(*at) >= seconds(entry.started_at));
            }
        }
        transaction.execute(
            "INSERT INTO transfer_log (episode, started_at, ended_at, entry, played_at)
             VALUES (:episode, :started_at, :ended_at, :entry, :played_at)",
            named_params! {
                ":episode": entry.episode.map(|e| e.0),
                ":started_at": seconds(entry.started_at),
                ":ended_at": seconds(entry.ended_at),
                ":entry": to_json(&entry),
                ":played_at": played_at.map(seconds),
            },
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
        let mut entries = Vec::new();
        let mut after = Some(0);
        while let Some(from) = after {
            let page = self.transfer_log_page(since, from, usize::MAX)?;
            entries.extend(page.entries);
            after = page.next;
        }
        Ok(entries)
    }

    /// Entries that ended since then, the oldest first: those after the place where an earlier page ended, 0 at the
    /// beginning, until they are about this many bytes.
    ///
    /// # Errors
    /// The database fails.
    pub fn transfer_log_page(
        &self,
        since: Timestamp,
        after: i64,
        bytes_max: usize,
    ) -> Result<TransferLogPage, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(
            "SELECT id, entry, played_at FROM transfer_log WHERE ended_at >= ?1 AND id > ?2 ORDER BY id",
        )?;
        let mut rows = query.query(params![seconds(since), after])?;
        let mut page = TransferLogPage::default();
        let (mut bytes, mut last) = (0, after);
        while let Some(row) = rows.next()? {
            if bytes >= bytes_max {
                page.next = Some(last);
                break;
            }
            last = row.get("id")?;
            let text: String = row.get("entry")?;
            bytes += text.len();
            page.entries
                .extend(entry_of(&text, optional_time(row, "played_at")?));
        }
        Ok(page)
    }

    /// The newest entries of a channel's episodes that were played, at most this many; the newest first.
    ///
    /// # Errors
    /// The database fails.
    pub fn played_transfers(
        &self,
        channel: ChannelId,
        count: usize,
    ) -> Result<Vec<TransferLogEntry>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(
            "SELECT entry, played_at FROM transfer_log WHERE played_at IS NOT NULL AND episode IN (
                SELECT id FROM episodes WHERE channel = ?1 AND first_played_at IS NOT NULL)
             ORDER BY id DESC LIMIT ?2",
        )?;
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        let rows = query.query_map(params![channel.0, count], |row| {
            let text: String = row.get("entry")?;
            Ok(entry_of(&text, optional_time(row, "played_at")?))
        })?;
        let entries: Vec<Option<TransferLogEntry>> = rows.collect::<Result<_, _>>()?;
        Ok(entries.into_iter().flatten().collect())
    }
}

/// Part of the log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransferLogPage {
    /// The entries, the oldest first.
    pub entries: Vec<TransferLogEntry>,
    /// Where the next page begins; none if this is the last.
    pub next: Option<i64>,
}

/// An entry as it is stored; none if a later version wrote it.
fn entry_of(text: &str, played_at: Option<Timestamp>) -> Option<TransferLogEntry> {
    let entry = serde_json::from_str::<TransferLogEntry>(text).ok()?;
    Some(TransferLogEntry { played_at, ..entry })
}

/// Notes that an episode is played, the first time.
pub(crate) fn note_play(
    connection: &rusqlite::Connection,
    episode: EpisodeId,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let times = params![episode.0, seconds(now)];
    connection.execute(
        "UPDATE episodes SET first_played_at = ?2 WHERE id = ?1 AND first_played_at IS NULL",
        times,
    )?;
    connection.execute(
        "UPDATE transfer_log SET played_at = ?2 WHERE episode = ?1 AND played_at IS NULL",
        times,
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(s: i64) -> Timestamp {
        Timestamp::from_second(1_900_000_000 + s).expect("a time")
    }

    fn network(name: &str, kind: &str, class: &str) -> LoggedNetwork {
        LoggedNetwork {
            name: Some(name.to_owned()),
            kind: kind.to_owned(),
            class: class.to_owned(),
        }
    }

    /// A download that lost Wi-Fi at 300 and again at 700 of 1000 bytes.
    fn interrupted() -> TransferLogEntry {
        let (home, cell) = (
            network("wifi:Home", "wifi", "free"),
            network("carrier:45005", "cellular", "metered"),
        );
        let mut record = TransferRecord::default();
        record.add(&home, 300);
        record.add(&cell, 100);
        record.add(&network("wifi:Work", "wifi", "free"), 600);
        TransferLogEntry {
            episode: Some(EpisodeId(7)),
            labels: Some(TransferLabels {
                channel: Some(ChannelId(3)),
                channel_title: "Secret channel".to_owned(),
                title: "Secret title".to_owned(),
                url: "https://secret.example/1.mp3".parse().ok(),
            }),
            started_at: at(0),
            ended_at: at(501),
            deadline: Some(at(500)),
            policy: Some("free-first".to_owned()),
            is_whole: true,
            bytes: 1000,
            wasted_bytes: 0,
            played_at: Some(at(900)),
            first_byte_at: Some(at(1)),
            last_byte_at: Some(at(500)),
            carried: record.carried,
            switches: vec![LoggedSwitch {
                at: at(100),
                bytes: 300,
                from: home,
                to: cell,
            }],
            losses: [(90, 300), (400, 700)]
                .map(|(s, bytes)| LoggedLoss { at: at(s), bytes })
                .to_vec(),
        }
    }

    #[test]
    fn a_client_that_starts_again_fetches_again_what_it_had_at_the_last_loss() {
        assert_eq!(interrupted().restart_bytes(), 700);
        let calm = TransferLogEntry {
            losses: Vec::new(),
            ..interrupted()
        };
        assert_eq!(calm.restart_bytes(), 0);
    }

    #[test]
    fn a_file_is_in_time_by_its_last_byte() {
        let entry = interrupted();
        assert_eq!(entry.is_in_time(), Some(true));
        let late = TransferLogEntry {
            last_byte_at: Some(at(501)),
            ..entry.clone()
        };
        assert_eq!(late.is_in_time(), Some(false));
        let broken = TransferLogEntry {
            is_whole: false,
            ..entry.clone()
        };
        assert_eq!(broken.is_in_time(), Some(false));
        let whenever = TransferLogEntry {
            deadline: None,
            ..entry
        };
        assert_eq!(whenever.is_in_time(), None);
    }

    #[test]
    fn the_delay_is_from_the_request_to_the_deadline() {
        let entry = interrupted();
        let within = AcceptedDelay::Within(Duration::from_secs(500));
        assert_eq!(entry.accepted_delay(), within);
        let due = TransferLogEntry {
            deadline: Some(at(60)),
            ..entry.clone()
        };
        assert_eq!(due.accepted_delay(), AcceptedDelay::Immediate);
        let now = TransferLogEntry {
            deadline: None,
            ..entry.clone()
        };
        assert_eq!(now.accepted_delay(), AcceptedDelay::Immediate);
        let patient = TransferLogEntry {
            deadline: None,
            policy: Some("free-only".to_owned()),
            ..entry
        };
        assert_eq!(patient.accepted_delay(), AcceptedDelay::Unlimited);
    }

    #[test]
    fn an_anonymous_log_has_no_names_and_no_dates() {
        let later = TransferLogEntry {
            started_at: at(50),
            ..interrupted()
        };
        let log = anonymous_log(&[later, interrupted()]);
        let text = to_json(&log);
        for secret in ["ecret", "Home", "Work", "45005", "2030", "\"episode\":7"] {
            assert!(!text.contains(secret), "{secret}: {text}");
        }
        assert_eq!(log[1].started_at, Timestamp::UNIX_EPOCH);
        assert_eq!(log[0].started_at.as_second(), 50);
        assert_eq!(log[1].played_at.map(Timestamp::as_second), Some(900));
        // Two networks of one kind are one.
        let carried: Vec<_> = log[0]
            .carried
            .iter()
            .map(|c| (&*c.network.kind, c.bytes))
            .collect();
        assert_eq!(carried, [("wifi", 900), ("cellular", 100)]);
        assert_eq!(log[0].restart_bytes(), 700);
        assert_eq!(
            log[0].accepted_delay(),
            AcceptedDelay::Within(Duration::from_secs(450))
        );
    }
}
