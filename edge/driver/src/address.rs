//! A server's address with its key in it: `d2tp://host:port/KEY`.

use std::fmt;
use std::str::FromStr;

use d2tp_session::PublicKey;

/// The address and the public key of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress {
    /// Name or literal address (IPv6 without brackets).
    pub host: String,
    /// UDP port.
    pub port: u16,
    /// The server's public key. The device talks to no other host.
    pub key: PublicKey,
}

/// Why a text is no server address.
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
        let (host, port) = place
            .rsplit_once(':')
            .ok_or_else(|| fail("the port is missing"))?;
        let host = host
            .strip_prefix('[')
            .and_then(|h| h.strip_suffix(']'))
            .unwrap_or(host);
        if host.is_empty() {
            return Err(fail("the host is missing"));
        }
        Ok(ServerAddress {
            host: host.to_string(),
            port: port
                .parse()
                .map_err(|_| fail("the port is not a number up to 65535"))?,
            key: PublicKey::from_text(key.trim_end_matches('/'))
                .map_err(|_| fail("the key is not 43 characters of base64url"))?,
        })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "d2tp://[{}]:{}/{}", self.host, self.port, self.key)
        } else {
            write!(f, "d2tp://{}:{}/{}", self.host, self.port, self.key)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_and_mistakes_are_named() {
        let key = PublicKey([7; 32]);
        for host in ["prox.example", "192.0.2.1", "2001:db8::1"] {
            let address = ServerAddress {
                host: host.into(),
                port: 4433,
                key,
            };
            assert_eq!(address.to_string().parse(), Ok(address));
        }
        for bad in [
            "http://a:1/k",
            "d2tp://a:1",
            "d2tp://a/k",
            "d2tp://a:99999/k",
            "d2tp://a:1/k",
        ] {
            assert!(bad.parse::<ServerAddress>().is_err(), "{bad}");
        }
    }
}
