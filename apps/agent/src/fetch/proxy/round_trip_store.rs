//! Round trips to proxies by network, so that the next transfer asks the nearest first.
//!
//! ```text
//!  $XDG_STATE_HOME/cedos/proxy-round-trips.json   by network, by the proxy's key: milliseconds, when they were measured
//! ```
//!
//! A file that cannot be read counts as empty: all are asked then, as on a new network.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::fetch::state_directory::state_directory;

/// How long a round trip is remembered after it was measured. Higher: a route that became longer is noticed only when
/// its proxy misses its turn.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600); // a guess
/// How old an entry must be to be written anew with a similar round trip: not every transfer writes a file.
const RENEWED_AFTER: Duration = Duration::from_secs(3600);
/// The most networks that are remembered; beyond that those that were measured first are dropped.
const NETWORKS_MAX: usize = 32;
/// The largest file that is read.
const FILE_BYTES_MAX: u64 = 64 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct RoundTripEntry {
    ms: f64,
    /// When the round trip was measured, in seconds since 1970.
    at_s: i64,
}

type RoundTripsByKey = BTreeMap<String, RoundTripEntry>;

/// Round trips by network and by the proxy's key.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RoundTripStore(BTreeMap<String, RoundTripsByKey>);

impl RoundTripStore {
    /// Reads what earlier transfers measured.
    pub(super) fn read() -> RoundTripStore {
        store_file().map_or_else(RoundTripStore::default, |file| {
            RoundTripStore::read_file(&file)
        })
    }

    fn read_file(file: &Path) -> RoundTripStore {
        let is_small = std::fs::metadata(file).is_ok_and(|m| m.len() <= FILE_BYTES_MAX);
        let text = std::fs::read_to_string(file).ok().filter(|_| is_small);
        text.and_then(|text| serde_json::from_str(&text).ok())
            .unwrap_or_default()
    }

    /// The round trips on a network that are not forgotten, by the proxy's key.
    pub(super) fn of_network(&self, network: &str) -> BTreeMap<String, Duration> {
        self.at(network, Timestamp::now().as_second())
    }

    fn at(&self, network: &str, now_s: i64) -> BTreeMap<String, Duration> {
        let known = self.0.get(network).into_iter().flatten();
        let known = known.filter(|(_, entry)| is_current(entry, now_s));
        known
            .filter_map(|(key, entry)| {
                let trip = Duration::try_from_secs_f64(entry.ms / 1e3).ok()?;
                Some((key.clone(), trip))
            })
            .collect()
    }

    /// Records round trips on a network, and forgets those of `silent` proxies there. Of two concurrent changes one may
    /// be lost, and is measured again.
    pub(super) fn record(network: &str, measured: BTreeMap<String, Duration>, silent: Vec<String>) {
        let Some(file) = store_file() else {
            return;
        };
        let mut all = RoundTripStore::read_file(&file);
        if all.take(network, &measured, &silent, Timestamp::now().as_second())
            && let Err(error) = all.write(&file)
        {
            tracing::debug!(%error, "cannot save the round trips to proxies");
        }
    }

    /// Takes in what was measured; returns whether the file is to be written.
    fn take(
        &mut self,
        network: &str,
        measured: &BTreeMap<String, Duration>,
        silent: &[String],
        now_s: i64,
    ) -> bool {
        let before = self.0.get(network).cloned().unwrap_or_default();
        let mut known = before.clone();
        for (key, trip) in measured {
            let ms = (trip.as_secs_f64() * 1e4).round() / 10.0;
            let is_similar = |entry: &RoundTripEntry| {
                now_s - entry.at_s < RENEWED_AFTER.as_secs() as i64
                    && (entry.ms - ms).abs() <= entry.ms / 5.0
            };
            if !known.get(key).is_some_and(is_similar) {
                known.insert(key.clone(), RoundTripEntry { ms, at_s: now_s });
            }
        }
        known.retain(|key, entry| !silent.contains(key) && is_current(entry, now_s));
        if known == before {
            return false;
        }
        self.0.insert(network.to_owned(), known);
        self.0.retain(|_, known| {
            known.retain(|_, entry| is_current(entry, now_s));
            !known.is_empty()
        });
        while self.0.len() > NETWORKS_MAX {
            let newest = |known: &RoundTripsByKey| known.values().map(|entry| entry.at_s).max();
            let oldest = self.0.iter().min_by_key(|(_, known)| newest(known));
            let Some(oldest) = oldest.map(|(network, _)| network.clone()) else {
                break;
            };
            self.0.remove(&oldest);
        }
        true
    }

    fn write(&self, file: &Path) -> std::io::Result<()> {
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let beside = file.with_extension(format!("new-{}", std::process::id()));
        let mut options = std::fs::OpenOptions::new();
        options.create(true).write(true).truncate(true).mode(0o600);
        let written = options
            .open(&beside)
            .and_then(|mut out| out.write_all(&serde_json::to_vec(self)?))
            .and_then(|()| std::fs::rename(&beside, file));
        if written.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
        written
    }
}

fn is_current(entry: &RoundTripEntry, now_s: i64) -> bool {
    // A clock that was set back must not keep an entry for ever.
    (now_s - entry.at_s).unsigned_abs() < KEPT.as_secs()
}

fn store_file() -> Option<PathBuf> {
    Some(state_directory().ok()?.join("proxy-round-trips.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trips(all: &[(&str, u64)]) -> BTreeMap<String, Duration> {
        let entry = |(key, ms): &(&str, u64)| ((*key).to_owned(), Duration::from_millis(*ms));
        all.iter().map(entry).collect()
    }

    #[test]
    fn round_trips_are_kept_by_network_for_a_week() {
        let week = KEPT.as_secs() as i64;
        let mut all = RoundTripStore::default();
        assert!(all.take("wlan0", &trips(&[("near", 14), ("far", 82)]), &[], 1_000));
        assert!(all.take("eth0", &trips(&[("near", 90)]), &[], 1_000));
        assert!(
            !all.take("wlan0", &trips(&[("near", 15)]), &[], 1_060),
            "similar"
        );
        assert!(all.take("wlan0", &trips(&[("near", 40)]), &[], 1_060));
        assert_eq!(all.at("wlan0", 1_060), trips(&[("near", 40), ("far", 82)]));
        assert_eq!(all.at("eth0", 1_060), trips(&[("near", 90)]));
        assert_eq!(all.at("wlan0", 1_000 + week), trips(&[("near", 40)]));
        assert_eq!(all.at("wlan0", 1_060 + week), trips(&[]));
        assert_eq!(all.at("elsewhere", 1_060), trips(&[]));
    }

    #[test]
    fn a_proxy_that_is_silent_is_forgotten_and_so_are_the_oldest_networks() {
        let mut all = RoundTripStore::default();
        all.take("wlan0", &trips(&[("near", 14), ("far", 82)]), &[], 1_000);
        assert!(all.take("wlan0", &trips(&[]), &["near".to_owned()], 1_001));
        assert_eq!(all.at("wlan0", 1_001), trips(&[("far", 82)]));
        for n in 0..NETWORKS_MAX as i64 {
            assert!(all.take(&n.to_string(), &trips(&[("far", 5)]), &[], 2_000 + n));
        }
        assert_eq!(all.0.len(), NETWORKS_MAX);
        assert_eq!(all.at("wlan0", 2_000), trips(&[]));
    }

    #[test]
    fn a_file_comes_back_and_one_that_is_broken_counts_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("state/proxy-round-trips.json");
        assert_eq!(RoundTripStore::read_file(&file), RoundTripStore::default());
        let mut all = RoundTripStore::default();
        all.take("wlan0", &trips(&[("near", 14)]), &[], 1_000);
        all.write(&file).unwrap();
        assert_eq!(RoundTripStore::read_file(&file), all);
        std::fs::write(&file, "{").unwrap();
        assert_eq!(RoundTripStore::read_file(&file), RoundTripStore::default());
    }
}
