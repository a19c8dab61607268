//! Which servers are reached by the system's routes, and not over a link that the device chooses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use d2tp_links::{Link, LinkKind};

/// Whether a server is on this machine whatever its links are.
pub fn is_loopback_host(host: &str) -> bool {
    let ip: Option<IpAddr> = host.parse().ok();
    host == "localhost" || ip.is_some_and(|ip| ip.is_loopback())
}

/// Whether a server is on this machine, or where no known link leads although the system has a route: on a local
/// network without a router, for example. [`crate::Device::follow_links_or_route`] asks at every change of links,
/// because the system may know a route before the link of it is known.
pub fn is_by_system_route(host: &str, links: &[Link]) -> bool {
    let Ok(ip) = host.parse::<IpAddr>() else {
        return is_loopback_host(host);
    };
    let leads_away = |link: &Link| link.kind != LinkKind::Loopback && link.is_usable();
    ip.is_loopback()
        || links.iter().any(|link| link.addresses.contains(&ip))
        || !links.iter().any(leads_away) && has_route(ip)
}

/// Whether the system has a route to an address. Connecting a UDP socket sends nothing.
fn has_route(ip: IpAddr) -> bool {
    let any: IpAddr = match ip {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind(SocketAddr::from((any, 0)));
    socket.is_ok_and(|socket| socket.connect((ip, 9)).is_ok())
}
