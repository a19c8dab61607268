//! The filter of an access network between a link and the internet: it blocks UDP, or everything
//! but a captive portal or an HTTP proxy.
//!
//! ```text
//!  device ─ link model ─ NAT ─▶ outward() ─▶ proxy, origin
//!                                  │ portal: TCP to port 80 of any host
//!                                  ├──────▶ origin, port 8480: "302 Found", to a page for signing in
//!                                  │ HTTP proxy: TCP to it
//!                                  └──────▶ origin, port 3128: CONNECT
//! ```
//!
//! The HTTP proxy belongs to the networks that let nothing else pass: others drop what goes to it.
//! The portal answers with the addresses of the requested hosts, as real portals do, so a client
//! can detect it only by the answer. It supports IPv4 only; a portal drops IPv6.

use crate::packet::{self, PacketEnd, PacketHead, TCP, UDP};
use crate::plan::{HTTP_PROXY_PORT, ORIGIN_V4, PORTAL_PORT};
use cedos_lab_link::LinkReach;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// The port on which a captive portal answers every connection.
const HTTP_PORT: u16 = 80;

/// The filter between one link and the internet.
#[derive(Default)]
pub(crate) struct LinkFilter {
    /// The hosts in whose place the portal answers, by the client's port.
    asked: BTreeMap<u16, Ipv4Addr>,
}

impl LinkFilter {
    /// A packet behind the link's NAT, as it is forwarded; `None` if it is dropped.
    pub(crate) fn outward(&mut self, reach: LinkReach, mut packet: Vec<u8>) -> Option<Vec<u8>> {
        let head = packet::head(&packet)?;
        if reach != LinkReach::Portal {
            let port = head.ports.map(|(_, to)| to);
            return passes(reach, &head, head.destination, port).then_some(packet);
        }
        let (IpAddr::V4(host), Some((from, HTTP_PORT))) = (head.destination, head.ports) else {
            return None;
        };
        if head.protocol != TCP {
            return None;
        }
        self.asked.insert(from, host);
        packet::rewrite_v4(
            &mut packet,
            &head,
            PacketEnd::Destination,
            ORIGIN_V4,
            PORTAL_PORT,
        );
        Some(packet)
    }

    /// A packet to the link's external address, as it reaches the link's NAT; `None` if it is
    /// dropped.
    pub(crate) fn inward(&self, reach: LinkReach, mut packet: Vec<u8>) -> Option<Vec<u8>> {
        let head = packet::head(&packet)?;
        if reach != LinkReach::Portal {
            let port = head.ports.map(|(from, _)| from);
            return passes(reach, &head, head.source, port).then_some(packet);
        }
        let (portal, Some((PORTAL_PORT, to))) = (IpAddr::V4(ORIGIN_V4), head.ports) else {
            return None;
        };
        if head.protocol != TCP || head.source != portal {
            return None;
        }
        let host = *self.asked.get(&to)?;
        packet::rewrite_v4(&mut packet, &head, PacketEnd::Source, host, HTTP_PORT);
        Some(packet)
    }
}

/// Whether a packet from or to this host and port of the internet passes.
fn passes(reach: LinkReach, head: &PacketHead, host: IpAddr, port: Option<u16>) -> bool {
    let is_http_proxy =
        head.protocol == TCP && host == IpAddr::V4(ORIGIN_V4) && port == Some(HTTP_PROXY_PORT);
    if is_http_proxy || reach == LinkReach::HttpProxy {
        is_http_proxy && reach == LinkReach::HttpProxy
    } else if head.protocol == UDP {
        reach.passes_udp()
    } else {
        reach.passes_tcp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::tests::{sums_up, v4};
    use crate::packet::{ICMP, head};
    use crate::plan::PROXY_V4;

    const DEVICE: (Ipv4Addr, u16) = (Ipv4Addr::new(198, 18, 0, 1), 5000);

    #[test]
    fn a_network_that_blocks_udp_passes_tcp_and_echoes() {
        let mut filter = LinkFilter::default();
        for (protocol, passes) in [(TCP, true), (ICMP, true), (UDP, false)] {
            let out = v4(protocol, DEVICE, (PROXY_V4, 80));
            let back = v4(protocol, (PROXY_V4, 80), DEVICE);
            assert_eq!(filter.outward(LinkReach::NoUdp, out).is_some(), passes);
            assert_eq!(filter.inward(LinkReach::NoUdp, back).is_some(), passes);
        }
    }

    #[test]
    fn an_http_proxy_is_reached_where_it_is_alone_and_nowhere_else() {
        let proxy = (ORIGIN_V4, HTTP_PROXY_PORT);
        for (reach, protocol, host, passes) in [
            (LinkReach::HttpProxy, TCP, proxy, true),
            (LinkReach::HttpProxy, UDP, proxy, false),
            (LinkReach::HttpProxy, TCP, (ORIGIN_V4, 443), false),
            (
                LinkReach::HttpProxy,
                TCP,
                (PROXY_V4, HTTP_PROXY_PORT),
                false,
            ),
            (LinkReach::HttpProxy, ICMP, (ORIGIN_V4, 0), false),
            (LinkReach::All, TCP, proxy, false),
            (LinkReach::NoUdp, TCP, proxy, false),
        ] {
            let mut filter = LinkFilter::default();
            let out = filter.outward(reach, v4(protocol, DEVICE, host));
            let back = filter.inward(reach, v4(protocol, host, DEVICE));
            assert_eq!(out.is_some(), passes, "{reach:?} {protocol} {host:?}");
            assert_eq!(back.is_some(), passes, "{reach:?} {protocol} {host:?}");
        }
    }

    #[test]
    fn a_portal_answers_for_every_host_and_passes_nothing_else() {
        let mut filter = LinkFilter::default();
        let mut outward = |packet| filter.outward(LinkReach::Portal, packet);
        assert_eq!(outward(v4(UDP, DEVICE, (PROXY_V4, 80))), None);
        assert_eq!(outward(v4(TCP, DEVICE, (PROXY_V4, 443))), None);
        assert_eq!(outward(v4(ICMP, DEVICE, (PROXY_V4, 80))), None);
        let asked = outward(v4(TCP, DEVICE, (PROXY_V4, 80))).expect("it reaches the portal");
        assert!(sums_up(&asked));
        let to = head(&asked).expect("a packet");
        assert_eq!(to.destination, IpAddr::V4(ORIGIN_V4));
        assert_eq!(to.ports.expect("TCP").1, PORTAL_PORT);

        let inward = |packet| filter.inward(LinkReach::Portal, packet);
        let answer = inward(v4(TCP, (ORIGIN_V4, PORTAL_PORT), DEVICE)).expect("it comes back");
        assert!(sums_up(&answer));
        let from = head(&answer).expect("a packet");
        assert_eq!(from.source, IpAddr::V4(PROXY_V4));
        assert_eq!(from.ports.expect("TCP").0, 80);
        assert_eq!(inward(v4(TCP, (PROXY_V4, 80), DEVICE)), None);
    }
}
