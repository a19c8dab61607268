//! Direct connections to the origin: TCP on a chosen link, and TLS if the URL requires it.
//!
//! The socket is bound to the link's device and to an address of the link, so that a default
//! route through another link cannot take the bytes there. Names are looked up by the system's
//! resolver, which goes its own way: a lookup may use another link than the transfer.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use d2tp_session::DrwaLambda;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use url::{Host, Url};

use super::dial::{ByteStream, Dial, EgressLink, FetchFault};
use super::drwa_stream::DrwaStream;
use super::local_hosts::LocalHosts;
use super::mode::FetchMode;
use super::outcome::TransferFailure;
use super::tls::OriginTls;
use super::unanswered_connects::UnansweredConnects;

/// How long one address may take to answer a TCP SYN before the next is tried.
const CONNECT_MAX: Duration = Duration::from_secs(10); // a guess: cellular start-up takes up to 3 s

/// How long a TLS handshake may take.
const HANDSHAKE_MAX: Duration = Duration::from_secs(15); // a guess

/// How long a name may take to resolve.
const LOOKUP_MAX: Duration = Duration::from_secs(10); // two tries of glibc's resolver

/// The size from which a receive buffer is left to the system, in bytes.
const RECEIVE_BUFFER_OF_USE: u32 = 2 << 20; // a guess: what the system makes of its own on a home's line

/// Opens TCP connections, with TLS for `https`.
pub struct DirectConnector {
    tls: OriginTls,
    drwa: Option<DrwaLambda>,
    connects: UnansweredConnects,
    /// The most bytes that a connection holds unread; none leaves it to the system.
    receive_buffer: Option<u32>,
    /// The hosts of local networks that connections may lead to.
    local_hosts: LocalHosts,
}

/// A connection to an origin.
pub(crate) struct OriginConnection {
    pub(crate) stream: Box<dyn ByteStream>,
    /// The address that answered.
    pub(crate) peer: IpAddr,
}

impl DirectConnector {
    /// Creates a connector that trusts origins by `tls`.
    pub fn new(tls: OriginTls) -> DirectConnector {
        DirectConnector {
            tls,
            drwa: None,
            connects: UnansweredConnects::default(),
            receive_buffer: None,
            local_hosts: LocalHosts::ANY,
        }
    }

    /// Limits what origins have in flight by DRWA, if a factor is given.
    pub fn with_drwa(mut self, drwa: Option<DrwaLambda>) -> DirectConnector {
        self.drwa = drwa;
        self
    }

    /// Limits what connections hold unread, in bytes; none leaves it to the system.
    pub fn with_receive_buffer(mut self, bytes: Option<u64>) -> DirectConnector {
        self.receive_buffer = bytes.map(|bytes| u32::try_from(bytes).unwrap_or(u32::MAX));
        self
    }

    /// Limits which hosts of local networks connections may lead to.
    pub fn with_local_hosts(mut self, local_hosts: LocalHosts) -> DirectConnector {
        self.local_hosts = local_hosts;
        self
    }
}

impl DirectConnector {
    /// Opens a connection to the origin of `url` for a request to `request_host`, which may have redirected there.
    /// `local_hosts`: those that it may lead to; none are the connector's own.
    pub(crate) async fn dial_for(
        &self,
        request_host: &str,
        url: &Url,
        via: &EgressLink,
        local_hosts: Option<&LocalHosts>,
    ) -> Result<OriginConnection, FetchFault> {
        let host = url
            .host()
            .ok_or_else(|| FetchFault::Final(TransferFailure::error("the URL has no host")))?;
        let port = url.port_or_known_default().unwrap_or(80);
        let local_hosts = local_hosts.unwrap_or(&self.local_hosts);
        let addresses = local_hosts.admit(&host, addresses(&host, port).await?)?;
        let attempt = connect(&addresses, via, self.receive_buffer);
        let link = via.device.as_deref();
        let observed = self.connects.observe(link, request_host, attempt);
        let stream = observed.await?;
        let _ = stream.set_nodelay(true);
        let peer = stream.peer_addr();
        let peer = peer.map_err(|error| FetchFault::Path(format!("{host}: {error}")))?;
        let stream: Box<dyn ByteStream> = match self.drwa {
            Some(lambda) => Box::new(DrwaStream::new(stream, lambda)),
            None => Box::new(stream),
        };
        match timeout(HANDSHAKE_MAX, self.tls.wrap(url, stream)).await {
            Ok(stream) => Ok(OriginConnection {
                stream: stream?,
                peer: peer.ip(),
            }),
            Err(_) => Err(FetchFault::Path(format!(
                "{host}: the TLS handshake did not finish in {HANDSHAKE_MAX:?}"
            ))),
        }
    }
}

impl Dial for DirectConnector {
    async fn dial(&self, url: &Url, via: &EgressLink) -> Result<Box<dyn ByteStream>, FetchFault> {
        let host = url.host_str().unwrap_or_default();
        Ok(self.dial_for(host, url, via, None).await?.stream)
    }

    fn mode(&self) -> FetchMode {
        FetchMode::Direct
    }

    fn unanswered_connects(&self) -> Option<&UnansweredConnects> {
        Some(&self.connects)
    }
}

async fn addresses(host: &Host<&str>, port: u16) -> Result<Vec<SocketAddr>, FetchFault> {
    let name = match host {
        Host::Ipv4(ip) => return Ok(vec![SocketAddr::new(IpAddr::V4(*ip), port)]),
        Host::Ipv6(ip) => return Ok(vec![SocketAddr::new(IpAddr::V6(*ip), port)]),
        Host::Domain(name) => *name,
    };
    match timeout(LOOKUP_MAX, tokio::net::lookup_host((name, port))).await {
        Ok(Ok(found)) => Ok(found.collect()),
        Ok(Err(error)) => {
            let error = error.to_string();
            // The standard library's own words in front say nothing more.
            let why = error.rsplit(": ").next().unwrap_or(&error);
            let text = format!("cannot find the address of {name} ({why}); check the name");
            match is_nameless(why) {
                true => Err(FetchFault::NameNotFound(text)),
                false => Err(FetchFault::Path(text)),
            }
        }
        Err(_) => Err(FetchFault::Path(format!(
            "cannot look up {name}: no answer in {LOOKUP_MAX:?}"
        ))),
    }
}

/// Whether a resolver says that there is no such name, or no address of it, rather than that it cannot
/// tell. getaddrinfo(3) has codes for that (EAI_NONAME, EAI_NODATA); the standard library hands on its
/// words only: those of glibc, and of musl.
fn is_nameless(why: &str) -> bool {
    let words = ["not known", "No address associated", "does not resolve"];
    words.iter().any(|words| why.contains(words))
}

async fn connect(
    addresses: &[SocketAddr],
    via: &EgressLink,
    receive_buffer: Option<u32>,
) -> Result<TcpStream, FetchFault> {
    let mut last = None;
    for address in addresses {
        let source = match source_for(*address, via) {
            Ok(source) => source,
            Err(text) => {
                last.get_or_insert(FetchFault::Path(text));
                continue;
            }
        };
        let device = via.device.as_deref().filter(|_| source.is_some());
        let connecting = connect_from(*address, source, device, receive_buffer);
        match timeout(CONNECT_MAX, connecting).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = Some(connect_fault(*address, &error)),
            Err(_) => {
                last = Some(FetchFault::Path(format!(
                    "{address} does not answer ({CONNECT_MAX:?})"
                )));
            }
        }
    }
    Err(last.unwrap_or_else(|| FetchFault::Path("the host has no address".into())))
}

/// The source address; none for loopback, or when routing decides.
fn source_for(destination: SocketAddr, via: &EgressLink) -> Result<Option<IpAddr>, String> {
    if destination.ip().is_loopback() || via.sources.is_empty() {
        return Ok(None);
    }
    let fits = |source: &&IpAddr| source.is_ipv6() == destination.is_ipv6();
    via.sources
        .iter()
        .find(fits)
        .copied()
        .map(Some)
        .ok_or_else(|| {
            let family = if destination.is_ipv6() {
                "IPv6"
            } else {
                "IPv4"
            };
            format!(
                "{} has no {family} to reach {destination}",
                via.device.as_deref().unwrap_or("it")
            )
        })
}

async fn connect_from(
    destination: SocketAddr,
    source: Option<IpAddr>,
    device: Option<&str>,
    receive_buffer: Option<u32>,
) -> io::Result<TcpStream> {
    let socket = if destination.is_ipv6() {
        TcpSocket::new_v6()?
    } else {
        TcpSocket::new_v4()?
    };
    // A buffer that is set does not grow by itself (tcp(7)), so it is set only if the rate is limited.
    if let Some(bytes) = receive_buffer
        && bytes < RECEIVE_BUFFER_OF_USE
    {
        socket.set_recv_buffer_size(bytes)?;
    }
    if let Some(device) = device
        && let Err(error) = socket.bind_device(Some(device.as_bytes()))
    {
        // Without the right to bind to a device the source address still picks the link where
        // routing has a rule for it, which is how systems with several links are set up.
        if error.kind() != io::ErrorKind::PermissionDenied {
            return Err(error);
        }
        tracing::debug!(device, %error, "bound to the address only");
    }
    if let Some(source) = source {
        socket.bind(SocketAddr::new(source, 0))?;
    }
    socket.connect(destination).await
}

fn connect_fault(address: SocketAddr, error: &io::Error) -> FetchFault {
    if error.kind() == io::ErrorKind::ConnectionRefused {
        return FetchFault::Origin {
            text: format!("{address} refuses connections: no server runs there"),
            retry_after: None,
        };
    }
    FetchFault::Path(format!("cannot connect to {address}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resolver_that_cannot_tell_is_not_one_that_says_no() {
        assert!(is_nameless("Name or service not known"));
        assert!(is_nameless("No address associated with hostname"));
        assert!(is_nameless("Name does not resolve"));
        assert!(!is_nameless("Temporary failure in name resolution"));
        assert!(!is_nameless("Try again"));
    }
}
