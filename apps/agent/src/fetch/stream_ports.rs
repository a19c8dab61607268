//! The TCP ports at which proxies take streams, as they told them with downloads. An address that names no port
//! would have 443 tried.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use d2tp_driver::{STREAM_PORT_DEFAULT, ServerAddress};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::state_directory::state_directory;

/// The field of an answer with the port.
pub(super) const FIELD: &str = "d2tp-stream-port";
/// How long a port is remembered after it was told.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600); // a guess
/// How old an entry must be to be written anew: not every download writes a file.
const RENEWED_AFTER: Duration = Duration::from_secs(24 * 3600);
/// The most proxies that are remembered; beyond that those that told theirs first are dropped.
const REMEMBERED_MAX: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct StreamPortEntry {
    port: u16,
    /// When the proxy announced the port, in seconds since 1970.
    told_s: i64,
}

/// Entries by the address of the proxy.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct StreamPortCache(BTreeMap<String, StreamPortEntry>);

impl StreamPortCache {
    /// Reads the file. A file that cannot be read counts as empty, for the cache only spares a detour.
    fn read(file: &Path) -> StreamPortCache {
        let text = std::fs::read_to_string(file).ok();
        text.and_then(|text| serde_json::from_str(&text).ok())
            .unwrap_or_default()
    }

    /// Records a port; returns whether something changed.
    fn tell(&mut self, proxy: &str, port: u16, now_s: i64) -> bool {
        let new = StreamPortEntry {
            port,
            told_s: now_s,
        };
        let fresh = |known: &StreamPortEntry| {
            known.port == port && now_s - known.told_s < RENEWED_AFTER.as_secs() as i64
        };
        if self.0.get(proxy).is_some_and(fresh) {
            return false;
        }
        self.0.insert(proxy.to_owned(), new);
        self.0.retain(|_, known| is_current(known, now_s));
        while self.0.len() > REMEMBERED_MAX {
            let oldest = self.0.iter().min_by_key(|(_, known)| known.told_s);
            let Some(oldest) = oldest.map(|(proxy, _)| proxy.clone()) else {
                break;
            };
            self.0.remove(&oldest);
        }
        true
    }

    fn port(&self, proxy: &str, now_s: i64) -> Option<u16> {
        let known = self.0.get(proxy).filter(|known| is_current(known, now_s));
        known.map(|known| known.port)
    }
}

fn is_current(known: &StreamPortEntry, now_s: i64) -> bool {
    now_s - known.told_s < KEPT.as_secs() as i64
}

fn file() -> Option<PathBuf> {
    Some(state_directory().ok()?.join("stream-ports.json"))
}

/// Records the port that a proxy told; `proxy`: its address. One whose address names a port needs none. Of two
/// concurrent changes one may be lost, and is told again later.
pub(super) fn record(proxy: &str, field: &str) {
    let (Ok(address), Ok(port)) = (proxy.parse::<ServerAddress>(), field.parse()) else {
        return;
    };
    let Some(file) = file().filter(|_| address.stream.is_none()) else {
        return;
    };
    let mut all = StreamPortCache::read(&file);
    // Nothing to remember: the usual port is tried anyhow.
    if port == STREAM_PORT_DEFAULT && !all.0.contains_key(proxy) {
        return;
    }
    if !all.tell(proxy, port, Timestamp::now().as_second()) {
        return;
    }
    let text = serde_json::to_string(&all).expect("plain data");
    let directory = file.parent().map_or(Ok(()), std::fs::create_dir_all);
    let beside = file.with_extension(format!("new-{}", std::process::id()));
    let written = directory
        .and_then(|()| std::fs::write(&beside, text))
        .and_then(|()| std::fs::rename(&beside, &file));
    if let Err(error) = written {
        tracing::debug!(%error, "cannot save the port for streams");
    }
}

/// The address of a proxy, with the port for streams that it told if the address names none.
pub(super) fn with_known_port(proxy: &ServerAddress) -> ServerAddress {
    let mut known = proxy.clone();
    if known.stream.is_none()
        && let Some(file) = file()
    {
        let now_s = Timestamp::now().as_second();
        known.stream = StreamPortCache::read(&file).port(&proxy.to_string(), now_s);
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_kept_for_a_month_and_the_newest_proxies_are() {
        let mut all = StreamPortCache::default();
        assert!(all.tell("a", 8443, 0));
        assert!(!all.tell("a", 8443, 60), "nothing changed");
        assert!(all.tell("a", 9443, 120));
        assert_eq!(all.port("a", 180), Some(9443));
        let month = KEPT.as_secs() as i64;
        assert_eq!(all.port("a", 120 + month), None);
        for n in 0..100 {
            assert!(all.tell(&n.to_string(), 8443, 200 + n));
        }
        assert_eq!(all.0.len(), REMEMBERED_MAX);
        assert_eq!(
            (all.port("99", 300), all.port("3", 300)),
            (Some(8443), None)
        );
    }
}
