//! Web origins that also support D2TP and announced it (RFC 7838), which are remembered until the
//! announcement expires.
//!
//! ```text
//!  answer of https://files.example/…, itself or through a proxy:
//!      Alt-Svc: d2tp="files.example:4434"; key="KEY"; ma=86400
//!  next request for it ──▶ does d2tp://files.example:4434/KEY answer? ──▶ end to end, else as before
//! ```
//!
//! Only announcements of `https` origins count: an attacker who can forge those of an `http` origin
//! could redirect requests anywhere. So could a proxy that fetches for the device: announcements
//! through it count only for downloads through it. An empty host means the origin's own. Without
//! `key` the host cannot be authenticated.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use d2tp_driver::ServerAddress;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use url::Url;

use super::state_directory::state_directory;

/// The default lifetime of an alternative service. // RFC 7838 §3.1
const MAX_AGE: Duration = Duration::from_secs(24 * 3600);
/// The longest lifetime that is accepted.
const MAX_AGE_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// The most origins that are remembered; beyond that those that expire first are dropped.
const REMEMBERED_MAX: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct AltSvcEntry {
    address: String,
    /// The expiry in seconds since 1970.
    until_s: i64,
}

/// Entries by scheme, host and port of the origin, and by the proxy that reported them.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct AltSvcCache(BTreeMap<String, AltSvcEntry>);

/// Parses a field: the server and the lifetime. `clear`, other protocols and invalid values yield none.
fn read(field: &str, own_host: &str) -> Option<(ServerAddress, Duration)> {
    let entries = field.split(',').map(str::trim);
    let rest = entries
        .filter_map(|entry| entry.strip_prefix("d2tp="))
        .next()?;
    let mut parts = rest.split(';').map(str::trim);
    let place = parts.next()?.trim_matches('"');
    let (host, port) = place.rsplit_once(':')?;
    let host = if host.is_empty() { own_host } else { host };
    let (mut key, mut age) = (None, MAX_AGE);
    for (name, value) in parts.filter_map(|part| part.split_once('=')) {
        let value = value.trim_matches('"');
        match name {
            "key" => key = Some(value),
            "ma" => age = Duration::from_secs(value.parse().ok()?),
            _ => {}
        }
    }
    let address = format!("d2tp://{host}:{port}/{}", key?).parse().ok()?;
    Some((address, age.min(MAX_AGE_MAX)))
}

fn file() -> Option<PathBuf> {
    Some(state_directory().ok()?.join("alternatives.json"))
}

fn remembered() -> AltSvcCache {
    let text = file().and_then(|file| std::fs::read_to_string(file).ok());
    // One that cannot be read begins anew: it only spares a detour.
    text.and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default()
}

/// Changes the saved cache. Of two concurrent changes one may be lost, and is learnt again later.
fn remember(change: impl FnOnce(&mut AltSvcCache)) {
    let (mut all, now) = (remembered(), Timestamp::now().as_second());
    change(&mut all);
    all.0.retain(|_, noted| noted.until_s > now);
    while all.0.len() > REMEMBERED_MAX {
        let first = all.0.iter().min_by_key(|(_, noted)| noted.until_s);
        let Some(origin) = first.map(|(origin, _)| origin.clone()) else {
            break;
        };
        all.0.remove(&origin);
    }
    let Some(file) = file() else { return };
    let text = serde_json::to_string(&all).expect("plain data");
    let directory = file.parent().map_or(Ok(()), std::fs::create_dir_all);
    let beside = file.with_extension("new");
    let written = directory
        .and_then(|()| std::fs::write(&beside, text))
        .and_then(|()| std::fs::rename(&beside, &file));
    if let Err(error) = written {
        tracing::debug!(%error, "cannot save alternative services");
    }
}

/// The key of an origin in the cache.
fn name(url: &Url, told_by: Option<&str>) -> String {
    let origin = url.origin().ascii_serialization();
    told_by.map_or_else(|| origin.clone(), |proxy| format!("{origin} by {proxy}"))
}

/// Records the `Alt-Svc` field of an answer for `url`; `told_by`: the proxy that forwarded it, if any.
pub fn record_alt_svc(url: &Url, told_by: Option<&str>, field: &str) {
    let Some(host) = url.host_str().filter(|_| url.scheme() == "https") else {
        return;
    };
    let origin = name(url, told_by);
    if field.trim() == "clear" {
        return remember(|all| drop(all.0.remove(&origin)));
    }
    if let Some((address, age)) = read(field, host) {
        let noted = AltSvcEntry {
            address: address.to_string(),
            until_s: Timestamp::now().as_second() + age.as_secs() as i64,
        };
        remember(|all| drop(all.0.insert(origin, noted)));
    }
}

/// The D2TP server of `url`'s origin, if the origin announced one itself or through this proxy, and the
/// entry has not expired.
pub fn known_server(url: &Url, proxy: Option<&str>) -> Option<ServerAddress> {
    let mut all = remembered().0;
    let itself = all.remove(&name(url, None));
    let noted = itself.or_else(|| all.remove(&name(url, Some(proxy?))))?;
    let counts = url.scheme() == "https" && noted.until_s > Timestamp::now().as_second();
    counts.then(|| noted.address.parse().ok())?
}

/// Forgets the D2TP server of `url`'s origin, whoever reported it.
pub fn forget_server(url: &Url) {
    let origin = name(url, None);
    let also = format!("{origin} by ");
    remember(|all| {
        all.0
            .retain(|name, _| *name != origin && !name.starts_with(&also));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_names_an_address_and_a_key_among_other_protocols() {
        let key = d2tp_driver::PublicKey([7; 32]);
        let text = format!("h3=\":443\"; ma=60, d2tp=\":4434\"; key=\"{key}\"; ma=600; persist=1");
        let (address, age) = read(&text, "files.example").unwrap();
        assert_eq!(
            address.to_string(),
            format!("d2tp://files.example:4434/{key}")
        );
        assert_eq!(age, Duration::from_secs(600));
        let other = format!("d2tp=\"other.example:1\"; key={key}; ma=999999999");
        let (address, age) = read(&other, "files.example").unwrap();
        assert_eq!((&*address.host, age), ("other.example", MAX_AGE_MAX));
        for nothing in [
            "clear".to_owned(),
            "h3=\":443\"".to_owned(),
            "d2tp=\":4434\"".to_owned(),
            format!("d2tp=\"4434\"; key={key}"),
            format!("d2tp=\":4434\"; key={key}; ma=soon"),
            "d2tp=\":4434\"; key=short".to_owned(),
        ] {
            assert_eq!(read(&nothing, "files.example"), None, "{nothing}");
        }
    }
}
