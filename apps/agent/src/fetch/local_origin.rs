//! Origins that need no default route: this machine itself, and hosts on its local networks.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use d2tp_links::Link;
use url::{Host, Url};

/// An origin that is reachable without a default route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalOrigin {
    /// The origin is on this machine.
    ThisMachine,
    /// The origin is on the network of this link, reached from this address.
    OnLink(String, IpAddr),
}

impl LocalOrigin {
    /// Whether the URL names this machine, or an address on one of its own networks.
    pub fn of(url: &Url, links: &[Link]) -> Option<LocalOrigin> {
        let ip = match url.host()? {
            Host::Domain(name) if name == "localhost" || name.ends_with(".localhost") => {
                return Some(LocalOrigin::ThisMachine);
            }
            // Of d2tp: the host is what is written, an address too.
            Host::Domain(name) => name.parse().ok()?,
            Host::Ipv4(ip) => IpAddr::V4(ip),
            Host::Ipv6(ip) => IpAddr::V6(ip),
        };
        LocalOrigin::of_address(ip, links)
    }

    /// Whether this is an address of this machine, or on one of its own networks.
    pub fn of_address(ip: IpAddr, links: &[Link]) -> Option<LocalOrigin> {
        if ip.is_loopback() || links.iter().any(|link| link.addresses.contains(&ip)) {
            return Some(LocalOrigin::ThisMachine);
        }
        on_link(ip, links).map(|(name, source)| LocalOrigin::OnLink(name, source))
    }
}

/// The link on whose own network this address is as routing sees it, and the address to send from.
fn on_link(ip: IpAddr, links: &[Link]) -> Option<(String, IpAddr)> {
    // Connecting a UDP socket sends nothing; it asks routing for the source address.
    let any = SocketAddr::new(
        if ip.is_ipv6() {
            [0u16; 8].into()
        } else {
            [0u8; 4].into()
        },
        0,
    );
    let probe = UdpSocket::bind(any).ok()?;
    probe.connect((ip, 9)).ok()?;
    let source = probe.local_addr().ok()?.ip();
    let link = links
        .iter()
        .find(|link| link.up && link.carrier && link.addresses.contains(&source))?;
    Some((link.name.clone(), source))
}
