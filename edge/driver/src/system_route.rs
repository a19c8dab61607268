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
///
/// A route over a metered link does not count, nor one over a link that is not known yet and may be metered: nothing
/// limits what the system's route carries.
pub fn is_by_system_route(host: &str, links: &[Link]) -> bool {
    let Ok(ip) = host.parse::<IpAddr>() else {
        return is_loopback_host(host);
    };
    let leads_away = |link: &Link| link.kind != LinkKind::Loopback && link.is_usable();
    ip.is_loopback()
        || links.iter().any(|link| link.addresses.contains(&ip))
        || !links.iter().any(leads_away)
            && route_source(ip).is_some_and(|source| is_free_source(source, links))
}

/// The address from which the system's route to `ip` sends; `None` without a route. Connecting a UDP socket sends
/// nothing.
fn route_source(ip: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = match ip {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind(SocketAddr::from((any, 0))).ok()?;
    socket.connect((ip, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Whether what is sent from an address of this machine leaves by a free link, as far as links are known.
fn is_free_source(source: IpAddr, links: &[Link]) -> bool {
    // Where links cannot be watched, there is nothing else to go by.
    if links.is_empty() {
        return true;
    }
    match links.iter().find(|link| link.addresses.contains(&source)) {
        Some(link) => link.is_free(),
        // Links do not list their link-local addresses, which lead to the local network alone.
        None => is_link_local(source),
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::tests::link;
    use d2tp_links::CostClass;

    #[test]
    fn the_systems_route_is_used_over_free_links_that_are_known_alone() {
        let source = |text: &str| text.parse::<IpAddr>().unwrap();
        let mut links = vec![link(&["192.168.1.7"])];
        links[0].routes.clear();
        assert!(is_free_source(source("192.168.1.7"), &links));
        // A link that came up a moment ago.
        assert!(!is_free_source(source("203.0.113.7"), &links));
        assert!(is_free_source(source("169.254.3.4"), &links));
        assert!(is_free_source(source("fe80::1"), &links));
        for class in [CostClass::Metered, CostClass::Roaming] {
            links[0].class.class = class;
            assert!(!is_free_source(source("192.168.1.7"), &links));
        }
        assert!(is_free_source(source("192.168.1.7"), &[]));
    }
}
