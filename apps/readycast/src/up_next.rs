//! The order in which episodes are heard, and those that were begun.
//!
//! ```text
//!  moved by a person     1  2  3 │ the others that are ready or coming, the oldest first
//!                        ▲ next  │
//! ```
//!
//! An episode leaves the list when it was heard to its end. What comes next is the first of the list that is not being
//! heard, so an episode that is played out of its turn changes nothing for the others.

use rusqlite::{Connection, named_params, params};
use serde::{Deserialize, Serialize};

use crate::episode::{EpisodeId, EpisodeState, EpisodeSummary};
use crate::episodes::{EPISODE_SUMMARY, episode_summary, found};
use crate::library::{Library, LibraryError};

/// The highest priority of a download, as the agent's queue has it.
const PRIORITY_MAX: u32 = 7;

/// Where an episode is moved to in the order of hearing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpNextMove {
    /// Before all others.
    #[default]
    Top,
    /// One place nearer to the top.
    Up,
    /// One place further from the top.
    Down,
    /// Behind all others.
    Last,
}

impl UpNextMove {
    /// The index to which an episode moves in a list of `length`, from `index`.
    fn target(self, index: usize, length: usize) -> usize {
        let last = length.saturating_sub(1);
        match self {
            UpNextMove::Top => 0,
            UpNextMove::Up => index.saturating_sub(1),
            UpNextMove::Down => (index + 1).min(last),
            UpNextMove::Last => last,
        }
    }
}

/// The priority of a download, by the place that a person gave its episode: 7 for the first, 0 from the eighth on and for those
/// without a place.
pub fn priority_of_place(place: Option<u32>) -> u8 {
    let behind_first = place.map_or(PRIORITY_MAX, |place| place.saturating_sub(1));
    PRIORITY_MAX.saturating_sub(behind_first) as u8
}

/// Selects the episodes that are ready, coming or asked for and not heard to their end, in the order of hearing. Each set has
/// an index of its own, so no other episode is read.
const UP_NEXT: &str = "FROM episodes e JOIN channels c ON c.id = e.channel
     WHERE e.played = 0 AND e.id IN (
        SELECT id FROM episodes WHERE state <> 0 AND state IN (:ready, :downloading)
        UNION SELECT id FROM episodes INDEXED BY episodes_with_deadline
            WHERE own_deadline IS NOT NULL AND state = :new)
     ORDER BY e.up_next IS NULL, e.up_next, e.published, e.id LIMIT :limit";

/// Selects the episodes that were begun, the one that was heard last first.
const BEGUN: &str = "FROM episodes e JOIN channels c ON c.id = e.channel
     WHERE e.position_ms > 0 AND e.played = 0 AND e.position_at IS NOT NULL
     ORDER BY e.position_at DESC, e.id DESC LIMIT ?1";

impl Library {
    /// The episodes that are ready or coming and not heard to their end, in the order in which they will be heard.
    ///
    /// # Errors
    /// The database fails.
    pub fn up_next(&self, limit: u32) -> Result<Vec<EpisodeSummary>, LibraryError> {
        let connection = self.lock();
        let mut query =
            connection.prepare_cached(&format!("SELECT {EPISODE_SUMMARY} {UP_NEXT}"))?;
        let rows = query.query_map(
            named_params! {
                ":ready": EpisodeState::Ready.number(),
                ":downloading": EpisodeState::Downloading.number(),
                ":new": EpisodeState::New.number(),
                ":limit": limit,
            },
            episode_summary,
        )?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Moves an episode in the order of hearing. One that is not in the list counts as its last.
    ///
    /// # Errors
    /// There is no such episode, or the database fails.
    pub fn move_up_next(&self, episode: EpisodeId, to: UpNextMove) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let known = transaction
            .prepare_cached("SELECT 1 FROM episodes WHERE id = ?1")?
            .exists([episode.0])?;
        found(usize::from(known), episode)?;
        let mut order = order_of_hearing(&transaction)?;
        let index = match order.iter().position(|(id, _)| *id == episode) {
            Some(index) => index,
            None => {
                order.push((episode, false));
                order.len() - 1
            }
        };
        let target = to.target(index, order.len());
        let moved = order.remove(index);
        order.insert(target, moved);
        // Those behind the last that a person placed stay without a place, so newer ones come behind them.
        let placed = order.iter().rposition(|(_, has_place)| *has_place);
        let last = placed.unwrap_or(0).max(target);
        transaction.execute(
            "UPDATE episodes SET up_next = NULL WHERE up_next IS NOT NULL",
            [],
        )?;
        for (place, (id, _)) in order.iter().enumerate().take(last + 1) {
            transaction.execute(
                "UPDATE episodes SET up_next = ?2 WHERE id = ?1",
                params![id.0, place as i64 + 1],
            )?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Takes all episodes' places away: the order of hearing is that of publication again.
    ///
    /// # Errors
    /// The database fails.
    pub fn reset_up_next(&self) -> Result<(), LibraryError> {
        self.lock().execute(
            "UPDATE episodes SET up_next = NULL WHERE up_next IS NOT NULL",
            [],
        )?;
        Ok(())
    }

    /// The episodes that were begun and not heard to their end, the one that was heard last first.
    ///
    /// # Errors
    /// The database fails.
    pub fn begun_episodes(&self, limit: u32) -> Result<Vec<EpisodeSummary>, LibraryError> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(&format!("SELECT {EPISODE_SUMMARY} {BEGUN}"))?;
        let rows = query.query_map([limit], episode_summary)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }
}

/// The whole order of hearing, each episode with whether a person gave it its place.
fn order_of_hearing(connection: &Connection) -> rusqlite::Result<Vec<(EpisodeId, bool)>> {
    let mut query = connection.prepare_cached(&format!(
        "SELECT e.id, e.up_next IS NOT NULL AS has_place {UP_NEXT}"
    ))?;
    let rows = query.query_map(
        named_params! {
            ":ready": EpisodeState::Ready.number(),
            ":downloading": EpisodeState::Downloading.number(),
            ":new": EpisodeState::New.number(),
            ":limit": i64::MAX,
        },
        |row| Ok((EpisodeId(row.get("id")?), row.get("has_place")?)),
    )?;
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_places_have_the_highest_priorities() {
        let priorities = [None, Some(1), Some(2), Some(7), Some(8), Some(500)];
        assert_eq!(priorities.map(priority_of_place), [0, 7, 6, 1, 0, 0]);
    }

    #[test]
    fn the_lists_read_no_channel_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("a library");
        let connection = library.lock();
        for list in [UP_NEXT, BEGUN] {
            let mut explained = connection
                .prepare(&format!("EXPLAIN QUERY PLAN SELECT e.id {list}"))
                .expect("valid");
            let steps = explained.raw_query().mapped(|row| row.get("detail"));
            let steps: Vec<String> = steps.map(|step| step.expect("text")).collect();
            let reads_all = |step: &String| step == "SCAN e" || step == "SCAN episodes";
            assert!(!steps.iter().any(reads_all), "{steps:#?}");
        }
    }
}
