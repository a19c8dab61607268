//! The destination of a program's connection.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TargetAddress {
    /// A name, or an address without brackets.
    pub host: String,
    /// The TCP port of the host.
    pub port: u16,
}

/// The longest name (RFC 1035 §2.3.4).
const NAME_BYTES_MAX: usize = 253;

impl TargetAddress {
    /// Checks a host's name. Any name is accepted that can stand in a request line: without blanks,
    /// control characters, or characters that begin a path or a user name.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn new(host: &str, port: u16) -> Result<TargetAddress, String> {
        let host = host
            .strip_prefix('[')
            .and_then(|h| h.strip_suffix(']'))
            .unwrap_or(host);
        let is_address = host.parse::<IpAddr>().is_ok();
        let is_name = !host.is_empty()
            && host.len() <= NAME_BYTES_MAX
            && host
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'));
        if !is_address && !is_name {
            return Err(format!("{host:?} is not a host name"));
        }
        if port == 0 {
            return Err("port 0 is not valid".into());
        }
        Ok(TargetAddress {
            host: host.to_owned(),
            port,
        })
    }

    /// `host:port`, as CONNECT has it.
    pub fn authority(&self) -> String {
        self.to_string()
    }
}

impl From<SocketAddr> for TargetAddress {
    fn from(at: SocketAddr) -> TargetAddress {
        TargetAddress {
            host: at.ip().to_canonical().to_string(),
            port: at.port(),
        }
    }
}

impl fmt::Display for TargetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Finds the names behind addresses that were made up for them.
pub trait NameLookup: Send + Sync {
    /// The name behind an address: none if it is a real one.
    ///
    /// # Errors
    /// It was made up, and is not known any more.
    fn name_of(&self, ip: IpAddr) -> Result<Option<String>, String>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_what_fits_into_a_request_line() {
        let told = |host| TargetAddress::new(host, 80).map(|t| t.to_string());
        assert_eq!(told("origin.example"), Ok("origin.example:80".into()));
        assert_eq!(told("2001:db8::1"), Ok("[2001:db8::1]:80".into()));
        assert_eq!(told("[2001:db8::1]"), Ok("[2001:db8::1]:80".into()));
        for bad in ["", "a b", "a\r\nHost: b", "a/b", "u@h", "a:80"] {
            assert!(told(bad).is_err(), "{bad:?}");
        }
        assert!(told(&"a".repeat(254)).is_err());
        assert!(TargetAddress::new("a", 0).is_err());
    }

    #[test]
    fn an_ipv4_address_in_ipv6_clothes_is_an_ipv4_address() {
        let at: SocketAddr = "[::ffff:192.0.2.1]:80".parse().unwrap();
        assert_eq!(TargetAddress::from(at).authority(), "192.0.2.1:80");
    }
}
