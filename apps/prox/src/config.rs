//! The operator's settings, with their defaults and costs.
//!
//! Every limit the proxy enforces is a field here or a named constant beside the code that
//! enforces it; nothing is unbounded. Durations are seconds in files (fractions allowed).

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use d2tp_driver::HostKey;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use url::Url;

/// 1 MiB in bytes.
const MIB: u64 = 1 << 20;
/// One hour.
const HOUR: Duration = Duration::from_secs(3600);

/// Everything D2Prox can be told. `Default` is what runs without any option.
///
/// ```
/// let config = cedos_prox::ProxConfig { allow_any_client: true, ..Default::default() };
/// assert_eq!(config.redirects_max, 10);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProxConfig {
    /// Client keys that may use this proxy. Empty, with `allow_any_client` off: none.
    #[serde(with = "crate::key_text::list")]
    pub allow_clients: Vec<HostKey>,
    /// Whether any client key may use this proxy. Off by default: an open proxy gets abused.
    pub allow_any_client: bool,
    /// Networks whose hosts may use this proxy over TCP without a key, if it listens there. Empty:
    /// none.
    pub allow_addresses: Vec<IpNet>,

    /// Where podcast apps reach this proxy for their links, such as `https://proxy.example`: an address of `--tcp-listen`,
    /// or of a web server in front of it. None: no links.
    pub feeds_url: Option<String>,
    /// How long the copy of an episode answers the same link after its last use. Default 24 h. Longer lets an app go on
    /// with the same bytes later; it costs quota.
    #[serde(rename = "feeds_keep_s", with = "seconds")]
    pub feeds_keep: Duration,

    /// Let requests reach private, loopback, unique-local, shared (CGNAT) and test networks.
    /// Link-local, metadata and multicast addresses stay refused; `allow_nets` opens those.
    pub allow_private: bool,
    /// Networks that are allowed, whatever else is refused. A metadata service is opened only by its
    /// own address, not by a range that contains it.
    pub allow_nets: Vec<IpNet>,
    /// Origin ports that are refused. Default 25: a proxy must not become a mail relay.
    pub refused_ports: Vec<u16>,

    /// A PEM file with further authorities that origins' certificates may chain to.
    pub ca_file: Option<PathBuf>,
    /// Trust the machine's own authorities as well. On by default.
    pub native_roots: bool,

    /// Where spilled copies live, as files without a name. Default: the system's temporary
    /// directory. Should be a disk: on a tmpfs spilling saves no memory.
    pub state_dir: PathBuf,
    /// The store that several nodes with one key share: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]`. None: the state
    /// directory is this proxy's alone.
    pub store: Option<String>,
    /// The name of this node, which no other node of the store has. Needed with `store`.
    pub node: Option<String>,
    /// The directory for copies that all nodes of `store` see, which needs it. None: the state directory.
    pub copies_dir: Option<PathBuf>,
    /// A bucket that has the bytes of copies and uploads too, `s3://BUCKET/PREFIX`. Default: none. Endpoint and
    /// credentials come from the environment.
    pub copies: Option<String>,
    /// Bytes of one copy kept in memory before it moves to disk. Default 4 MiB. Higher saves
    /// disk writes, lower saves memory.
    pub object_memory_bytes_max: u64,
    /// Bytes of memory for all copies. Default 256 MiB. When it is full, copies go to disk.
    pub memory_quota_bytes: u64,
    /// Bytes of memory for the sessions of all devices: bytes that nobody has read or acknowledged yet,
    /// and the state of sessions and flows. Default 512 MiB. One client key gets a fifth of what the
    /// others leave. Higher serves more devices at once; lower slows down who fills it.
    pub session_memory_bytes_max: u64,
    /// Bytes of disk for all spilled copies. Default 16 GiB. When it is full, new objects are
    /// refused with 503.
    pub disk_quota_bytes: u64,
    /// Bytes of the cache that all clients share, of the quotas above. Default 4 GiB; 0: no cache. Higher spares
    /// origins and their networks more.
    pub cache_bytes_max: u64,
    /// Bytes of an object that is shared. Default 1 GiB. Larger ones are pinned for one client.
    pub cache_object_bytes_max: u64,
    /// How long after it became stale a shared object may answer while its origin cannot be reached, if the origin
    /// does not forbid it. Default 1 day; 0: not at all.
    #[serde(rename = "cache_stale_s", with = "seconds")]
    pub cache_stale: Duration,
    /// Bytes pinned for one client key. Default 4 GiB.
    pub client_pinned_bytes_max: u64,
    /// Flows of one client key at once. Default 1,024.
    pub client_flows_max: u32,
    /// Bytes a second to one client, of all its flows together; after a pause, those of a second at once. Default 0:
    /// as many as possible.
    pub client_down_bytes_per_s: u64,
    /// Bytes a second from one client, of all its flows together; after a pause, those of a second at once.
    /// Default 0: as many as possible.
    pub client_up_bytes_per_s: u64,
    /// Bytes of one client in a calendar month (UTC), both directions together. Default 0: any number.
    pub client_month_bytes_max: u64,
    /// Flows of all clients at once. Default 65,536.
    pub flows_max: u32,
    /// Copies kept after an abnormal end for one client key. Default 16.
    pub client_kept_max: usize,
    /// How long a copy waits for its device after the flow ended abnormally. Default 1 h. Longer
    /// lets a rebooted device resume origins that serve other bytes each time; it costs quota.
    #[serde(rename = "keep_s", with = "seconds")]
    pub keep: Duration,

    /// The furthest deadline accepted. Default 7 days.
    #[serde(rename = "deadline_horizon_s", with = "seconds")]
    pub deadline_horizon: Duration,
    /// How long a flow without a deadline is served. Default 24 h.
    #[serde(rename = "no_deadline_hold_s", with = "seconds")]
    pub no_deadline_hold: Duration,
    /// How long the request head may take to arrive. Default 10 min (the device may be away).
    #[serde(rename = "request_timeout_s", with = "seconds")]
    pub request_timeout: Duration,

    /// Name lookup. Default 10 s.
    #[serde(rename = "dns_timeout_s", with = "seconds")]
    pub dns_timeout: Duration,
    /// Connecting to an origin, with all its addresses and TLS. Default 20 s.
    #[serde(rename = "connect_timeout_s", with = "seconds")]
    pub connect_timeout: Duration,
    /// From the request to the origin's response head. Default 60 s.
    #[serde(rename = "response_timeout_s", with = "seconds")]
    pub response_timeout: Duration,
    /// Silence in the middle of an origin's body before the connection counts as dead.
    /// Default 60 s.
    #[serde(rename = "idle_timeout_s", with = "seconds")]
    pub idle_timeout: Duration,
    /// First wait before continuing a body that broke off; doubles up to 60 s. Default 0.5 s.
    #[serde(rename = "retry_wait_s", with = "seconds")]
    pub retry_wait: Duration,
    /// How long a broken body is tried again without one new byte. Default 30 min.
    #[serde(rename = "origin_patience_s", with = "seconds")]
    pub origin_patience: Duration,
    /// Redirects followed for one request. Default 10.
    pub redirects_max: u32,
    /// Silence in both directions before a CONNECT tunnel is closed. Default 24 h.
    #[serde(rename = "tunnel_idle_s", with = "seconds")]
    pub tunnel_idle: Duration,

    /// Relay sealed packets between clients, and between them and origins that speak D2TP. On by default:
    /// it is for clients only, and spares both ends the way through the proxy where there is one.
    pub relay: bool,
    /// Relays of one client key at once. Default 16; a call to another client takes two.
    pub client_relays_max: usize,
    /// Relays of all clients at once. Default 4,096; each to an origin has a socket.
    pub relays_max: usize,

    /// Networks from which clients get an inner address for packet tunnels, one of IPv4 and, if wanted, one of IPv6:
    /// `cedos vpn`. Empty, the default: no packet tunnels. Needs CAP_NET_ADMIN, and the programs `ip` and `nft`.
    pub tunnel_nets: Vec<IpNet>,

    /// Announce this proxy to the hosts of its local networks, by DNS-SD over multicast DNS: devices that have its key
    /// find it there. Off by default: every host of those networks learns its key and that it is there.
    pub announce: bool,

    /// How long a device may be silent before its flows sleep: their keys and buffers are freed,
    /// and waking costs a handshake. Default 60 s.
    #[serde(rename = "sleep_after_s", with = "seconds")]
    pub sleep_after: Duration,

    /// How long running flows may finish after the order to stop. Default 10 s.
    #[serde(rename = "stop_grace_s", with = "seconds")]
    pub stop_grace: Duration,
}

impl Default for ProxConfig {
    fn default() -> ProxConfig {
        ProxConfig {
            allow_clients: Vec::new(),
            allow_any_client: false,
            allow_addresses: Vec::new(),
            feeds_url: None,
            feeds_keep: 24 * HOUR,
            allow_private: false,
            allow_nets: Vec::new(),
            refused_ports: vec![25],
            ca_file: None,
            native_roots: true,
            state_dir: std::env::temp_dir(),
            store: None,
            node: None,
            copies_dir: None,
            copies: None,
            object_memory_bytes_max: 4 * MIB,
            memory_quota_bytes: 256 * MIB,
            session_memory_bytes_max: 512 * MIB,
            disk_quota_bytes: 16 * 1024 * MIB,
            cache_bytes_max: 4 * 1024 * MIB,
            cache_object_bytes_max: 1024 * MIB,
            cache_stale: 24 * HOUR,
            client_pinned_bytes_max: 4 * 1024 * MIB,
            client_flows_max: 1_024,
            client_down_bytes_per_s: 0,
            client_up_bytes_per_s: 0,
            client_month_bytes_max: 0,
            flows_max: 65_536,
            client_kept_max: 16,
            keep: HOUR,
            deadline_horizon: 7 * 24 * HOUR,
            no_deadline_hold: 24 * HOUR,
            request_timeout: Duration::from_secs(600),
            dns_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(20),
            response_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(60),
            retry_wait: Duration::from_millis(500),
            origin_patience: Duration::from_secs(1800),
            redirects_max: 10,
            tunnel_idle: 24 * HOUR,
            relay: true,
            client_relays_max: 16,
            relays_max: 4096,
            tunnel_nets: Vec::new(),
            announce: false,
            sleep_after: Duration::from_secs(60),
            stop_grace: Duration::from_secs(10),
        }
    }
}

impl ProxConfig {
    /// The most memory that the kernel may hold for clients' TCP connections: twice that of sessions, so that all
    /// connections of a client have buffers of a size with which they are not slow.
    pub fn socket_memory_bytes_max(&self) -> u64 {
        self.session_memory_bytes_max.saturating_mul(2)
    }

    /// Whether there is a client who may use this proxy.
    pub fn is_for_anybody(&self) -> bool {
        self.allow_any_client || !self.allow_clients.is_empty() || !self.allow_addresses.is_empty()
    }

    /// The address below which links for podcast apps lie; none without them.
    ///
    /// # Errors
    /// The setting is no address of the web, or has parts that a link cannot have.
    pub(crate) fn feeds_base(&self) -> Result<Option<Url>, FeedsUrlError> {
        let Some(text) = &self.feeds_url else {
            return Ok(None);
        };
        let url = Url::parse(text).ok();
        let url = url.filter(|url| {
            matches!(url.scheme(), "http" | "https")
                && url.host().is_some()
                && url.username().is_empty()
                && url.password().is_none()
                && url.query().is_none()
                && url.fragment().is_none()
        });
        url.map(Some).ok_or_else(|| FeedsUrlError(text.clone()))
    }

    /// Whether a host without a key may use this proxy.
    pub(crate) fn admits(&self, address: IpAddr) -> bool {
        self.allow_addresses
            .iter()
            .any(|net| net.contains(&address))
    }
}

/// The address for links makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "feeds_url (--feeds-url) is where apps reach this proxy, such as https://proxy.example; {0} is not"
)]
pub struct FeedsUrlError(String);

/// Settings that a running proxy cannot take: they shape what it has made already.
const AT_RESTART: &[&str] = &[
    "allow_clients",
    "allow_any_client",
    "state_dir",
    "store",
    "node",
    "copies_dir",
    "copies",
    "session_memory_bytes_max",
    "relay",
    "client_relays_max",
    "relays_max",
    "tunnel_nets",
    "announce",
    "sleep_after_s",
];

/// What became of settings that were read again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReloadReport {
    /// Settings that have changed.
    pub taken: Vec<String>,
    /// Settings that differ and are taken when the proxy starts again.
    pub at_restart: Vec<String>,
}

impl ProxConfig {
    /// The names of all settings, as files have them.
    pub fn keys() -> Vec<String> {
        ProxConfig::default()
            .to_map()
            .into_iter()
            .map(|(key, _)| key)
            .collect()
    }

    /// The settings by their names, as files have them.
    pub(crate) fn to_map(&self) -> serde_json::Map<String, serde_json::Value> {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::Object(map)) => map,
            other => unreachable!("settings are an object: {other:?}"),
        }
    }

    /// The settings of a running proxy after a change to `newer`: as those, but for what it cannot take.
    pub(crate) fn changed_to(&self, newer: ProxConfig) -> (ProxConfig, ReloadReport) {
        let (old, new) = (self.to_map(), newer.to_map());
        let differs = |key: &&String| old.get(*key) != new.get(*key);
        let waits = |key: &&String| AT_RESTART.contains(&key.as_str());
        let (at_restart, taken): (Vec<_>, Vec<_>) = new.keys().filter(differs).partition(waits);
        let report = ReloadReport {
            taken: taken.into_iter().cloned().collect(),
            at_restart: at_restart.into_iter().cloned().collect(),
        };
        let changed = ProxConfig {
            allow_clients: self.allow_clients.clone(),
            allow_any_client: self.allow_any_client,
            state_dir: self.state_dir.clone(),
            store: self.store.clone(),
            node: self.node.clone(),
            copies_dir: self.copies_dir.clone(),
            copies: self.copies.clone(),
            session_memory_bytes_max: self.session_memory_bytes_max,
            relay: self.relay,
            client_relays_max: self.client_relays_max,
            relays_max: self.relays_max,
            tunnel_nets: self.tunnel_nets.clone(),
            announce: self.announce,
            sleep_after: self.sleep_after,
            ..newer
        };
        (changed, report)
    }
}

/// Durations as (fractional) seconds.
mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_f64(span.as_secs_f64())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let seconds = f64::deserialize(from)?;
        Duration::try_from_secs_f64(seconds).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_survives_being_written_and_read() {
        let config = ProxConfig {
            allow_clients: vec![[7; 32]],
            allow_nets: vec!["10.1.0.0/16".parse().unwrap()],
            keep: Duration::from_millis(1500),
            ..Default::default()
        };
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ProxConfig>(&text).unwrap(), config);
    }

    #[test]
    fn every_setting_is_taken_or_waits_for_a_restart() {
        let keys = ProxConfig::keys();
        assert!(
            AT_RESTART
                .iter()
                .all(|key| keys.iter().any(|known| known == key))
        );
        // Each field different from its default.
        let mut other = ProxConfig::default().to_map();
        for (key, value) in &mut other {
            *value = match (key.as_str(), &*value) {
                (_, serde_json::Value::Bool(on)) => (!on).into(),
                (_, serde_json::Value::Number(_)) => 7.into(),
                ("allow_clients", _) => [crate::show_key(&[7; 32])].as_slice().into(),
                ("refused_ports", _) => serde_json::json!([7]),
                ("allow_addresses" | "allow_nets" | "tunnel_nets", _) => {
                    serde_json::json!(["10.0.0.0/8"])
                }
                _ => "/x".into(),
            };
        }
        let newer: ProxConfig =
            serde_json::from_value(serde_json::Value::Object(other.clone())).unwrap();
        let old = ProxConfig::default();
        let (changed, report) = old.changed_to(newer);
        let changed = changed.to_map();
        for key in &keys {
            let waits = AT_RESTART.contains(&key.as_str());
            assert_eq!(report.at_restart.contains(key), waits, "{key}");
            assert_eq!(report.taken.contains(key), !waits, "{key}");
            let expected = if waits {
                &old.to_map()[key]
            } else {
                &other[key]
            };
            // Numbers may come back with a fraction.
            let same = changed[key] == *expected || changed[key].as_f64() == expected.as_f64();
            assert!(same, "{key}: {} is not {expected}", changed[key]);
        }
    }

    #[test]
    fn a_misspelt_option_is_an_error() {
        assert!(serde_json::from_str::<ProxConfig>(r#"{"memory_quota": 1}"#).is_err());
    }

    #[test]
    fn a_negative_time_is_an_error() {
        assert!(serde_json::from_str::<ProxConfig>(r#"{"keep_s": -1}"#).is_err());
    }
}
