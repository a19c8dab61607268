//! Connects to a name or address, if the egress filter allows it.
//!
//! ```text
//! host:port ── resolve ──▶ addresses ── filter each ──▶ connect, next one every 250 ms ──▶ stream
//! ```

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use url::{Host, Url};

use crate::egress::EgressFilter;
use crate::refusal::ProxRefusal;

/// The most addresses tried for one name.
const ADDRESSES_MAX: usize = 8;
/// Head start of one address before the next is tried too. RFC 8305 §5.
const HEAD_START: Duration = Duration::from_millis(250);

/// Resolves names to addresses: the system's resolver unless a test or an embedder provides another.
pub trait Resolve: Send + Sync + 'static {
    /// The addresses of `name`, best first.
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// The system's resolver (`getaddrinfo`).
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name, 0)).await?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }
}

/// The host and port of an origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OriginTarget {
    host: Host<String>,
    port: u16,
}

impl fmt::Display for OriginTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl OriginTarget {
    /// Parses `host:port`, the only form CONNECT allows.
    pub(crate) fn parse_authority(text: &str) -> Option<OriginTarget> {
        let (host, port) = text.rsplit_once(':')?;
        if host.contains('%') || !port.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
        Some(OriginTarget {
            host: Host::parse(host).ok()?,
            port,
        })
    }

    /// The host and port of an http or https URL.
    pub(crate) fn of(url: &Url) -> Option<OriginTarget> {
        Some(OriginTarget {
            host: url.host()?.to_owned(),
            port: url.port_or_known_default()?,
        })
    }

    /// Port of the origin.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The host without a port, for messages.
    pub(crate) fn host(&self) -> String {
        self.host.to_string()
    }
}

/// The addresses of a target that the egress rules allow; at least one.
pub(crate) async fn allowed_addresses(
    target: &OriginTarget,
    filter: &EgressFilter,
    resolver: &dyn Resolve,
    dns_timeout: Duration,
) -> Result<Vec<IpAddr>, ProxRefusal> {
    if !filter.port_allowed(target.port) {
        return Err(ProxRefusal::PortRefused(target.port));
    }
    let addresses = match &target.host {
        Host::Ipv4(v4) => vec![IpAddr::V4(*v4)],
        Host::Ipv6(v6) => vec![IpAddr::V6(*v6)],
        Host::Domain(name) => match timeout(dns_timeout, resolver.resolve(name)).await {
            Err(_) => return Err(ProxRefusal::NameTimeout(target.host())),
            Ok(Err(error)) => {
                return Err(ProxRefusal::NameNotFound {
                    host: target.host(),
                    cause: error.to_string(),
                });
            }
            Ok(Ok(found)) => found,
        },
    };
    let mut refused = None;
    let mut allowed = Vec::new();
    for address in addresses {
        match filter.check(address) {
            Ok(()) if allowed.len() < ADDRESSES_MAX && !allowed.contains(&address) => {
                allowed.push(address);
            }
            Ok(()) => {}
            Err(kind) => refused = refused.or(Some((address, kind))),
        }
    }
    if allowed.is_empty() {
        return Err(match refused {
            Some((address, kind)) => ProxRefusal::AddressRefused {
                host: target.host(),
                address,
                kind,
            },
            None => ProxRefusal::NameNotFound {
                host: target.host(),
                cause: "the name has no address".to_owned(),
            },
        });
    }
    Ok(allowed)
}

/// Connects; `until` limits the total time.
pub(crate) async fn dial(
    target: &OriginTarget,
    filter: &EgressFilter,
    resolver: &dyn Resolve,
    dns_timeout: Duration,
    connect_timeout: Duration,
) -> Result<TcpStream, ProxRefusal> {
    let allowed = allowed_addresses(target, filter, resolver, dns_timeout).await?;
    let until = Instant::now() + connect_timeout;
    match timeout_at(until, race(alternate(allowed), target.port)).await {
        Ok(Ok(stream)) => {
            // Small writes (a TLS record, a request) must not wait for acknowledgements.
            let _ = stream.set_nodelay(true);
            Ok(stream)
        }
        Ok(Err(error)) => Err(match error.kind() {
            io::ErrorKind::ConnectionRefused => ProxRefusal::ConnectRefused(target.to_string()),
            io::ErrorKind::TimedOut => ProxRefusal::ConnectTimeout {
                host: target.to_string(),
                limit: connect_timeout,
            },
            io::ErrorKind::ConnectionReset => ProxRefusal::OriginClosed {
                host: target.to_string(),
                cause: error.to_string(),
            },
            _ => ProxRefusal::Unroutable {
                host: target.to_string(),
                cause: error.to_string(),
            },
        }),
        Err(_) => Err(ProxRefusal::ConnectTimeout {
            host: target.to_string(),
            limit: connect_timeout,
        }),
    }
}

/// Alternates address families, keeping the resolver's order within each (RFC 8305 §4).
fn alternate(addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    let first_is_v6 = addresses.first().is_some_and(IpAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) = addresses
        .into_iter()
        .partition(|address| address.is_ipv6() == first_is_v6);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut mixed = Vec::new();
    loop {
        match (first.next(), second.next()) {
            (None, None) => return mixed,
            (a, b) => mixed.extend(a.into_iter().chain(b)),
        }
    }
}

/// Connects to the addresses in turn, to the next when one fails or after a delay. The first connection
/// wins and the others are dropped.
async fn race(addresses: Vec<IpAddr>, port: u16) -> io::Result<TcpStream> {
    let mut left = addresses.into_iter();
    let mut running = JoinSet::new();
    let mut last_error = io::Error::from(io::ErrorKind::AddrNotAvailable);
    loop {
        let more = match left.next() {
            Some(address) => {
                running.spawn(TcpStream::connect(SocketAddr::new(address, port)));
                left.len() > 0
            }
            None => false,
        };
        let joined = if more {
            match timeout(HEAD_START, running.join_next()).await {
                Err(_) => continue,
                Ok(joined) => joined,
            }
        } else {
            running.join_next().await
        };
        match joined {
            None => return Err(last_error),
            Some(Ok(Ok(stream))) => return Ok(stream),
            Some(Ok(Err(error))) => last_error = error,
            Some(Err(join)) => last_error = io::Error::other(join),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_host_and_port_is_an_authority() {
        for text in ["h:443", "1.2.3.4:80", "[::1]:8080", "sub.h.example:65535"] {
            assert!(OriginTarget::parse_authority(text).is_some(), "{text}");
        }
        for text in [
            "h",
            "h:",
            ":443",
            "h:0",
            "h:65536",
            "h:+1",
            "u@h:443",
            "h/:443",
            "h%2e:443",
            "::1:443",
            "[::1]",
            "h:443/",
            "http://h:443",
            "[fe80::1%eth0]:443",
        ] {
            assert!(OriginTarget::parse_authority(text).is_none(), "{text}");
        }
    }

    #[test]
    fn address_families_take_turns() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let mixed = alternate(vec![ip("::1"), ip("::2"), ip("::3"), ip("1.1.1.1")]);
        assert_eq!(mixed, [ip("::1"), ip("1.1.1.1"), ip("::2"), ip("::3")]);
    }
}
