//! How a link gets a socket: bound to a device of the kernel, or provided by the program.
//!
//! ```text
//!  link comes up ─▶ Attach::attach(link, server's addresses) ─▶ a socket and the server's address,
//!  socket broken ─┘                                              one for each address family
//! ```

use std::io;
use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use d2tp_links::{KernelLinkProbe, Link, LinkKind, LinkProbe, NoLinkProbe};
use d2tp_session::PublicKey;
use d2tp_udp::{BindError, BindOptions, LinkSocket};
use tokio::net::TcpSocket;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::local_hints::{self, LocalHint};

/// A socket on a link, and the server's address over that link.
#[derive(Debug)]
pub struct Attachment {
    /// The socket, bound to the link.
    pub socket: LinkSocket,
    /// The server's address over this link.
    pub remote: SocketAddr,
}

/// Creates the sockets of links.
///
/// A device asks for one when a link becomes usable, and whenever the old one is no longer of use,
/// so an implementation creates a new socket each time if it can.
pub trait Attach: Send + Sync + 'static {
    /// Creates sockets by which a server with these addresses is reached over `link`, the best
    /// first: at most one for each address family, none if the server is not reachable there. The
    /// second is tried when the first does not answer soon.
    ///
    /// # Errors
    /// A socket that should be possible could not be created. The device asks again later.
    fn attach(&self, link: &Link, servers: &[SocketAddr]) -> Result<Vec<Attachment>, BindError>;

    /// The addresses at which `servers` are reached over `link` by TCP, the best first. None, as by
    /// default, where links have no TCP: then there are no streams over them.
    fn stream_addresses(&self, _link: &Link, _servers: &[SocketAddr]) -> Vec<SocketAddr> {
        Vec::new()
    }

    /// A TCP socket on the link, from which `to` is connected to.
    ///
    /// # Errors
    /// There is no TCP over the link, or no socket.
    fn stream_socket(&self, _link: &Link, _to: SocketAddr) -> io::Result<TcpSocket> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The addresses at which `servers` are reached over `link` by UDP, for [`Attach::probe_socket`].
    fn probe_addresses(&self, _link: &Link, _servers: &[SocketAddr]) -> Vec<SocketAddr> {
        Vec::new()
    }

    /// A UDP socket on the link of which the device knows nothing, from which a node at `to` is measured. None,
    /// as by default, where the program's own socket is all there is: such nodes are never compared.
    ///
    /// # Errors
    /// There is no socket.
    fn probe_socket(&self, _link: &Link, _to: SocketAddr) -> io::Result<UdpSocket> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Where the network behind a link says that the server with this key is, as answers come. Nobody is asked by
    /// default.
    fn local_hints(&self, _link: &Link, _server: PublicKey) -> UnboundedReceiver<LocalHint> {
        unbounded_channel().1
    }

    /// The probe of this provider's links; by default one that measures nothing.
    fn link_probe(&self) -> Arc<dyn LinkProbe> {
        Arc::new(NoLinkProbe)
    }
}

/// The links of this machine, with sockets bound to the kernel's network devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelLinks;

impl Attach for KernelLinks {
    fn attach(&self, link: &Link, servers: &[SocketAddr]) -> Result<Vec<Attachment>, BindError> {
        let mut found = Vec::new();
        for remote in server_addresses(link, servers) {
            let Some(source) = link.source_for(remote.ip()) else {
                continue;
            };
            let options = BindOptions::at(SocketAddr::new(source, 0)).on_device(&link.name);
            match LinkSocket::bind(&options) {
                Ok(socket) => found.push(Attachment { socket, remote }),
                // One address family that works is enough.
                Err(error) if !found.is_empty() => {
                    tracing::info!(link = %link.name, %error, "one address family less");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    fn stream_addresses(&self, link: &Link, servers: &[SocketAddr]) -> Vec<SocketAddr> {
        server_addresses(link, servers)
    }

    fn stream_socket(&self, link: &Link, to: SocketAddr) -> io::Result<TcpSocket> {
        let source = link
            .source_for(to.ip())
            .ok_or(io::ErrorKind::AddrNotAvailable)?;
        let options = BindOptions::at(SocketAddr::new(source, 0)).on_device(&link.name);
        Ok(TcpSocket::from_std_stream(d2tp_udp::bind_tcp(&options)?))
    }

    fn probe_addresses(&self, link: &Link, servers: &[SocketAddr]) -> Vec<SocketAddr> {
        server_addresses(link, servers)
    }

    fn probe_socket(&self, link: &Link, to: SocketAddr) -> io::Result<UdpSocket> {
        let source = link
            .source_for(to.ip())
            .ok_or(io::ErrorKind::AddrNotAvailable)?;
        let options = BindOptions::at(SocketAddr::new(source, 0)).on_device(&link.name);
        Ok(d2tp_udp::bind_udp(&options)?)
    }

    fn local_hints(&self, link: &Link, server: PublicKey) -> UnboundedReceiver<LocalHint> {
        local_hints::ask_kernel_link(link, server)
    }

    fn link_probe(&self) -> Arc<dyn LinkProbe> {
        Arc::new(KernelLinkProbe::default())
    }
}

/// The addresses of a server over a link: the first of each family that the link has, in the
/// resolver's order; a NAT64 address if the link has only IPv6 and the server only IPv4.
fn server_addresses(link: &Link, servers: &[SocketAddr]) -> Vec<SocketAddr> {
    let mut found: Vec<SocketAddr> = Vec::new();
    if link.kind == LinkKind::Serial {
        // The bridge alone knows addresses.
        return found;
    }
    for server in servers {
        let reached = link.source_for(server.ip()).is_some();
        if reached && !found.iter().any(|f| f.is_ipv6() == server.is_ipv6()) {
            found.push(*server);
        }
    }
    if found.is_empty() {
        let through = servers.iter().find_map(|s| nat64(*s));
        found.extend(through.filter(|r| link.source_for(r.ip()).is_some()));
    }
    found
}

/// The NAT64 address of an IPv4 address under the well-known prefix (RFC 6052 §2.1).
fn nat64(remote: SocketAddr) -> Option<SocketAddr> {
    let SocketAddr::V4(v4) = remote else {
        return None;
    };
    let [a, b, c, d] = v4.ip().octets();
    let low = [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])];
    let ip = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, low[0], low[1]);
    Some((ip, v4.port()).into())
}

#[cfg(test)]
pub(crate) mod tests {
    use d2tp_links::{CostAssessment, CostClass, DefaultRoute};

    use super::*;

    pub(crate) fn link(addresses: &[&str]) -> Link {
        let addresses: Vec<std::net::IpAddr> =
            addresses.iter().map(|a| a.parse().unwrap()).collect();
        Link {
            name: "wlan0".into(),
            index: 3,
            kind: LinkKind::Wifi,
            class: CostAssessment {
                class: CostClass::Free,
                because: "test".into(),
            },
            up: true,
            carrier: true,
            mtu_bytes: 1500,
            dhcp_proxy: None,
            routes: addresses
                .iter()
                .map(|a| DefaultRoute {
                    metric: 1,
                    ipv6: a.is_ipv6(),
                    gateway: None,
                    table: 254,
                })
                .collect(),
            addresses,
        }
    }

    fn told(addresses: &[&str], servers: &[&str]) -> Vec<String> {
        let servers: Vec<SocketAddr> = servers.iter().map(|s| s.parse().unwrap()).collect();
        let found = server_addresses(&link(addresses), &servers);
        found.iter().map(SocketAddr::to_string).collect()
    }

    const BOTH: [&str; 4] = [
        "[2001:db8::1]:4433",
        "[2001:db8::2]:4433",
        "192.0.2.1:4433",
        "192.0.2.2:4433",
    ];

    #[test]
    fn a_link_with_both_families_tries_the_first_address_of_each_in_the_resolvers_order() {
        let dual = ["2001:db8:1::7", "198.51.100.7"];
        assert_eq!(told(&dual, &BOTH), ["[2001:db8::1]:4433", "192.0.2.1:4433"]);
    }

    #[test]
    fn a_link_with_one_family_uses_the_servers_address_of_that_family() {
        assert_eq!(told(&["198.51.100.7"], &BOTH), ["192.0.2.1:4433"]);
        assert_eq!(told(&["2001:db8:1::7"], &BOTH), ["[2001:db8::1]:4433"]);
    }

    #[test]
    fn an_ipv6_only_link_reaches_an_ipv4_server_through_nat64_and_only_such_a_one() {
        let v4 = ["192.0.2.1:4433"];
        assert_eq!(told(&["2001:db8:1::7"], &v4), ["[64:ff9b::c000:201]:4433"]);
        assert_eq!(
            told(&["198.51.100.7"], &["[2001:db8::1]:4433"]),
            [""; 0],
            "there is no such way back"
        );
    }
}
