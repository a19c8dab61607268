//! The host at which others reach a server on this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use d2tp_links::{ClassRules, Link, LinkKind, LinkMonitor};

/// The host to write into the address: what is listened on, or for a wildcard this machine's best
/// address.
pub(crate) async fn host_for_devices(listening: SocketAddr) -> IpAddr {
    if !listening.ip().is_unspecified() {
        return listening.ip();
    }
    // Where the links cannot be read there is still this machine itself.
    let links = LinkMonitor::start(ClassRules::default())
        .await
        .map(|(links, _)| links)
        .unwrap_or_default();
    best_address(&links, listening.is_ipv4())
}

/// The address that most devices can reach: public IPv4, then public IPv6, then private ones.
fn best_address(links: &[Link], only_v4: bool) -> IpAddr {
    let rank = |address: &IpAddr| match address {
        IpAddr::V4(v4) if v4.is_private() || v4.is_link_local() => 2,
        IpAddr::V4(_) => 0,
        IpAddr::V6(v6) if v6.is_unique_local() => 3,
        IpAddr::V6(_) => 1,
    };
    // An address beside the default route is one of a network inside: of containers, of virtual machines.
    let is_beside = |link: &Link, address: &IpAddr| {
        let routes = &mut link.routes.iter();
        !routes.any(|route| route.ipv6 == address.is_ipv6())
    };
    links
        .iter()
        .filter(|link| link.kind != LinkKind::Loopback && link.up && link.carrier)
        .flat_map(|link| link.addresses.iter().map(move |address| (link, *address)))
        .filter(|(_, address)| address.is_ipv4() || !only_v4)
        .filter(|(_, address)| !address.is_loopback())
        .min_by_key(|(link, address)| (rank(address), is_beside(link, address)))
        .map(|(_, address)| address)
        .unwrap_or(if only_v4 {
            Ipv4Addr::LOCALHOST.into()
        } else {
            Ipv6Addr::LOCALHOST.into()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, addresses: &[&str]) -> Link {
        Link {
            name: name.into(),
            index: 2,
            kind: LinkKind::Ethernet,
            class: d2tp_links::CostAssessment {
                class: d2tp_links::CostClass::Free,
                because: "test".into(),
            },
            up: true,
            carrier: true,
            mtu_bytes: 1500,
            dhcp_proxy: None,
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            routes: Vec::new(),
        }
    }

    #[test]
    fn a_wildcard_is_told_as_the_address_most_devices_reach() {
        let private = link("eth0", &["fd00::1", "192.168.1.2", "2001:db8::7"]);
        let public = link("eth1", &["192.0.2.1"]);
        let best = |links: &[Link], only_v4| best_address(links, only_v4).to_string();
        assert_eq!(best(&[private.clone(), public], false), "192.0.2.1");
        assert_eq!(best(std::slice::from_ref(&private), false), "2001:db8::7");
        assert_eq!(best(std::slice::from_ref(&private), true), "192.168.1.2");
        assert_eq!(best(&[], true), "127.0.0.1");
        assert_eq!(best(&[], false), "::1");
    }
}
