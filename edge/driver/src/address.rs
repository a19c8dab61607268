//! The address of a server, which includes its key: `d2tp://host:port/KEY`, or
//! `d2tp://host:port/KEY?stream=PORT` if streams are accepted on another TCP port than 443. With
//! `?hybrid=required` a device uses the server with keys by ML-KEM only (R-KEM-8), with `?round-trip-s=SECONDS` it waits so
//! long for answers; several settings are separated by `&`.
//!
//! A server with several nodes, all of which have its key: `d2tp://host:port,host:port/KEY`, or
//! `d2tp://name/KEY`, whose nodes the SVCB records of `_d2tp.name` list.

use std::fmt;
use std::str::FromStr;

use d2tp_session::{PublicKey, Span};
use d2tp_stream::STREAM_PORT_DEFAULT;

/// The UDP port of a server whose address or record names none.
pub const PORT_DEFAULT: u16 = 4433;
/// The most nodes in an address.
pub const NODES_MAX: usize = 8;

/// The longest round trip that an address may name: to the outer planets and back.
pub const ROUND_TRIP_S_MAX: u32 = 24 * 3600; // a guess

/// Where one of a server's nodes is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeAddress {
    /// Name or literal address (IPv6 without brackets).
    pub host: String,
    /// The UDP port of the server.
    pub port: u16,
}

impl fmt::Display for NodeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The nodes of a server, beside the one that [`ServerAddress::host`] names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServerNodes {
    /// There are no others.
    #[default]
    One,
    /// Other nodes of the server. All nodes have its key, and any of them continues a session of another.
    Also(Vec<NodeAddress>),
    /// The host is a name, whose SVCB records list the nodes; without records its addresses are used.
    Records,
}

/// The address and the public key of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress {
    /// Name or literal address (IPv6 without brackets).
    pub host: String,
    /// The UDP port of the server.
    pub port: u16,
    /// The server's public key. The device connects to no host with another key.
    pub key: PublicKey,
    /// The TCP port at which the server accepts streams, for networks that carry no UDP. None: not known,
    /// so 443 is tried. 0: there are no streams.
    pub stream: Option<u16>,
    /// The server's other nodes.
    pub nodes: ServerNodes,
    /// Whether keys by ML-KEM are required of the server (R-KEM-8).
    pub requires_hybrid: bool,
    /// How long the server takes to answer, where that is known to be long: to another planet, the waits for scheduled
    /// links included (R-LONG-1). Its operator sets it at the server's end, too.
    pub round_trip: Option<Span>,
}

impl ServerAddress {
    /// The address of a server with one node, of which nothing else is known.
    pub fn new(host: impl Into<String>, port: u16, key: PublicKey) -> Self {
        Self {
            host: host.into(),
            port,
            key,
            stream: None,
            nodes: ServerNodes::One,
            requires_hybrid: false,
            round_trip: None,
        }
    }

    /// Where the nodes are that the address itself names.
    pub fn named_nodes(&self) -> Vec<NodeAddress> {
        let first = NodeAddress {
            host: self.host.clone(),
            port: self.port,
        };
        match &self.nodes {
            ServerNodes::One | ServerNodes::Records => vec![first],
            ServerNodes::Also(others) => {
                [first].into_iter().chain(others.iter().cloned()).collect()
            }
        }
    }

    /// Adds the nodes of another address of the same server, after those that are there.
    ///
    /// # Errors
    /// The keys differ, one of them is a name whose records list the nodes, or there are too many.
    pub fn add_nodes(&mut self, other: &ServerAddress) -> Result<(), String> {
        let (ours, theirs) = (self.to_string(), other.to_string());
        if self.key != other.key {
            return Err(format!(
                "{ours} and {theirs} have different keys: they are two proxies, not nodes of one"
            ));
        }
        if self.host == other.host && self.nodes == other.nodes && self.port == other.port {
            self.requires_hybrid |= other.requires_hybrid;
            self.round_trip = self.round_trip.max(other.round_trip);
            return Ok(());
        }
        if [&self.nodes, &other.nodes].contains(&&ServerNodes::Records) {
            return Err(format!(
                "the nodes of {ours} and {theirs} cannot be listed together: the records of a name list all nodes"
            ));
        }
        let mut nodes = self.named_nodes();
        for node in other.named_nodes() {
            if !nodes.contains(&node) {
                nodes.push(node);
            }
        }
        if nodes.len() > NODES_MAX {
            return Err(format!(
                "a proxy has {NODES_MAX} nodes at most, not {}",
                nodes.len()
            ));
        }
        nodes.remove(0);
        if !nodes.is_empty() {
            self.nodes = ServerNodes::Also(nodes);
        }
        self.stream = self.stream.or(other.stream);
        self.requires_hybrid |= other.requires_hybrid;
        self.round_trip = self.round_trip.max(other.round_trip);
        Ok(())
    }

    /// The TCP port that is tried for streams, if any.
    pub fn stream_port(&self) -> Option<u16> {
        match self.stream {
            None => Some(STREAM_PORT_DEFAULT),
            Some(0) => None,
            port => port,
        }
    }
}

/// A text is not a server address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a proxy address: {why}. It looks like d2tp://host:port/KEY, as `cedos prox` prints it"
)]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl FromStr for ServerAddress {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let fail = |why| AddressError {
            text: text.to_string(),
            why,
        };
        let rest = text
            .strip_prefix("d2tp://")
            .ok_or_else(|| fail("it does not begin with d2tp://"))?;
        let (place, key) = rest
            .split_once('/')
            .ok_or_else(|| fail("the key is missing"))?;
        let (key, query) = key.split_once('?').unwrap_or((key, ""));
        let AddressSettings {
            stream,
            requires_hybrid,
            round_trip,
        } = read_settings(query).map_err(fail)?;
        let key = PublicKey::from_text(key.trim_end_matches('/'))
            .map_err(|_| fail("the key is not 43 characters of base64url"))?;
        if is_service_name(place) {
            return Ok(ServerAddress {
                host: place.to_string(),
                port: PORT_DEFAULT,
                key,
                stream,
                nodes: ServerNodes::Records,
                requires_hybrid,
                round_trip,
            });
        }
        let mut nodes = Vec::new();
        for place in place.split(',') {
            nodes.push(node_address(place).map_err(fail)?);
        }
        if nodes.len() > NODES_MAX {
            return Err(fail("it names more than 8 hosts"));
        }
        let NodeAddress { host, port } = nodes.remove(0);
        Ok(ServerAddress {
            host,
            port,
            key,
            stream,
            nodes: match nodes.is_empty() {
                true => ServerNodes::One,
                false => ServerNodes::Also(nodes),
            },
            requires_hybrid,
            round_trip,
        })
    }
}

/// What may follow the key.
#[derive(Default)]
struct AddressSettings {
    stream: Option<u16>,
    requires_hybrid: bool,
    round_trip: Option<Span>,
}

/// Reads what may follow the key.
fn read_settings(query: &str) -> Result<AddressSettings, &'static str> {
    let mut settings = AddressSettings::default();
    for setting in query.split('&').filter(|_| !query.is_empty()) {
        match setting.split_once('=') {
            Some(("stream", port)) if settings.stream.is_none() => {
                let port = port.parse();
                let port = port.map_err(|_| "the stream port is not a number up to 65535")?;
                settings.stream = Some(port);
            }
            Some(("hybrid", "required")) => settings.requires_hybrid = true,
            Some(("round-trip-s", seconds)) if settings.round_trip.is_none() => {
                let seconds = seconds.parse().ok();
                let seconds = seconds.filter(|s| (1..=ROUND_TRIP_S_MAX).contains(s));
                let seconds = seconds.ok_or("the round trip is not 1 to 86400 seconds")?;
                settings.round_trip = Some(Span::from_secs(seconds.into()));
            }
            _ => {
                return Err(
                    "after the key only ?stream=PORT, ?hybrid=required or ?round-trip-s=SECONDS may follow",
                );
            }
        }
    }
    Ok(settings)
}

/// Reads `host:port`.
fn node_address(text: &str) -> Result<NodeAddress, &'static str> {
    let (host, port) = text.rsplit_once(':').ok_or("the port is missing")?;
    let host = host
        .strip_prefix('[')
        .and_then(|h| h.strip_suffix(']'))
        .unwrap_or(host);
    if host.is_empty() {
        return Err("the host is missing");
    }
    let port = port.parse();
    Ok(NodeAddress {
        host: host.to_string(),
        port: port.map_err(|_| "the port is not a number up to 65535")?,
    })
}

/// Whether a text is a name without a port: one that records are looked up for.
fn is_service_name(text: &str) -> bool {
    let is_of_names = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    (1..=240).contains(&text.len())
        && text.chars().all(is_of_names)
        && text.parse::<std::net::IpAddr>().is_err()
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.nodes {
            ServerNodes::Records => write!(f, "d2tp://{}/{}", self.host, self.key)?,
            ServerNodes::One | ServerNodes::Also(_) => {
                let nodes = self.named_nodes();
                let nodes: Vec<String> = nodes.iter().map(NodeAddress::to_string).collect();
                write!(f, "d2tp://{}/{}", nodes.join(","), self.key)?;
            }
        }
        let stream = self.stream.map(|port| format!("stream={port}"));
        let hybrid = self.requires_hybrid.then(|| "hybrid=required".to_owned());
        let round_trip = self.round_trip.map(Span::as_secs_f64);
        let round_trip = round_trip.map(|seconds| format!("round-trip-s={:.0}", seconds.ceil()));
        let settings = [stream, hybrid, round_trip].into_iter().flatten();
        settings
            .zip(["?", "&", "&"])
            .try_for_each(|(setting, sign)| write!(f, "{sign}{setting}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_and_mistakes_are_named() {
        let key = PublicKey([7; 32]);
        for host in ["prox.example", "192.0.2.1", "2001:db8::1"] {
            let address = ServerAddress::new(host, 4433, key);
            assert_eq!(address.stream_port(), Some(443));
            assert_eq!(address.to_string().parse(), Ok(address.clone()));
            for (stream, tried) in [(Some(8443), Some(8443)), (Some(0), None)] {
                let address = ServerAddress {
                    stream,
                    ..address.clone()
                };
                assert_eq!(address.stream_port(), tried);
                assert_eq!(address.to_string().parse(), Ok(address.clone()));
                let required = ServerAddress {
                    requires_hybrid: true,
                    ..address
                };
                assert_eq!(required.to_string().parse(), Ok(required.clone()));
                let far = ServerAddress {
                    round_trip: Some(Span::from_secs(2_400)),
                    ..required
                };
                assert!(far.to_string().ends_with("&round-trip-s=2400"), "{far}");
                assert_eq!(far.to_string().parse(), Ok(far));
            }
        }
        let two = format!("d2tp://a.example:1,[2001:db8::1]:2/{key}");
        let address: ServerAddress = two.parse().unwrap();
        assert_eq!((&*address.host, address.port), ("a.example", 1));
        let other = NodeAddress {
            host: "2001:db8::1".into(),
            port: 2,
        };
        assert_eq!(address.nodes, ServerNodes::Also(vec![other]));
        assert_eq!(address.to_string(), two);
        let named = format!("d2tp://example.org/{key}?stream=8443");
        let address: ServerAddress = named.parse().unwrap();
        assert_eq!(
            (address.port, &address.nodes),
            (PORT_DEFAULT, &ServerNodes::Records)
        );
        assert_eq!(address.to_string(), named);
        let nine = ["a:1"; 9].join(",");
        for bad in [
            &*format!("d2tp://192.0.2.1/{key}"),
            &*format!("d2tp://a:1,/{key}"),
            &*format!("d2tp://a:1,b/{key}"),
            &*format!("d2tp://{nine}/{key}"),
            "http://a:1/k",
            "d2tp://a:1",
            "d2tp://a/k",
            "d2tp://a:99999/k",
            "d2tp://a:1/k",
            "d2tp://a:1/BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc?stream=x",
            "d2tp://a:1/BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc?port=443",
            "d2tp://a:1/BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc?hybrid=off",
            "d2tp://a:1/BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc?stream=1&",
            "d2tp://a:1/BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc?round-trip-s=0",
            "d2tp://a:1/BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc?round-trip-s=40m",
        ] {
            assert!(bad.parse::<ServerAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn nodes_of_one_key_are_one_server_and_others_are_not() {
        let key = PublicKey([7; 32]);
        let of = |text: String| text.parse::<ServerAddress>().unwrap();
        let mut one = of(format!("d2tp://a:1/{key}"));
        one.add_nodes(&of(format!("d2tp://b:2,a:1/{key}?stream=8443")))
            .unwrap();
        assert_eq!(one.to_string(), format!("d2tp://a:1,b:2/{key}?stream=8443"));
        let before = one.clone();
        for (other, why) in [
            (
                format!("d2tp://b:2/{}", PublicKey([8; 32])),
                "different keys",
            ),
            (format!("d2tp://b/{key}"), "records"),
            (
                format!(
                    "d2tp://{}/{key}",
                    ["c:1,d:1,e:1", "f:1,g:1,h:1,i:1"].join(",")
                ),
                "8 nodes",
            ),
        ] {
            let error = one.add_nodes(&of(other)).unwrap_err();
            assert!(error.contains(why), "{error}");
            assert_eq!(one, before);
        }
    }
}
