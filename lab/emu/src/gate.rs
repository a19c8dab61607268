//! The gateway between a link and the internet: its NAT, its NAT64, and the link's addresses.
//!
//! ```text
//!  device ─ link model ─▶ outward() ─▶ proxy, origin
//!         ◀─ link model ─ inward() ◀──
//! ```
//!
//! Packets from an address that is not the link's current one, or to a port without a mapping, are
//! dropped, as in an access network.

use crate::icmp;
use crate::packet::{self, PacketEnd};
use crate::plan::{self, LinkAddresses};
use cedos_lab_link::{Nat, Span, Time};
use cedos_lab_scenario::{Family, NatKind};
use std::net::{IpAddr, Ipv4Addr};

/// The internal side of a NAT mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct InternalEndpoint {
    protocol: u8,
    address: IpAddr,
    port: u16,
}

/// The network's side of one link.
pub(crate) struct LinkGateway {
    family: Family,
    translates_v4: bool,
    addresses: Option<LinkAddresses>,
    nat: Nat<InternalEndpoint>,
}

impl LinkGateway {
    /// Creates a gateway. `idle`: how long a mapping lasts without outgoing packets; `None`:
    /// forever.
    pub(crate) fn new(family: Family, nat: NatKind, idle: Option<Span>) -> LinkGateway {
        LinkGateway {
            family,
            translates_v4: nat != NatKind::None,
            addresses: None,
            nat: idle.map_or_else(Nat::new, Nat::with_idle),
        }
    }

    /// Sets the link's addresses. Mappings of the old addresses are dropped.
    pub(crate) fn readdress(&mut self, addresses: LinkAddresses) {
        self.addresses = Some(addresses);
        self.nat.rebind();
    }

    /// Drops all mappings.
    pub(crate) fn rebind(&mut self) {
        self.nat.rebind();
    }

    /// The gateway's own answer to a packet: an echo reply, if the packet is an echo request to it,
    /// whatever is beyond.
    pub(crate) fn answer(&self, packet: &[u8]) -> Option<Vec<u8>> {
        let (own, head) = (self.addresses?, packet::head(packet)?);
        let gateways = [IpAddr::from(own.gateway_v4), IpAddr::from(own.gateway_v6)];
        let asked = gateways.contains(&head.destination);
        asked.then(|| icmp::echo_reply(packet, &head)).flatten()
    }

    /// Whether packets to `destination` are routed to this link.
    pub(crate) fn leads_to(&self, destination: IpAddr) -> bool {
        let Some(own) = self.addresses else {
            return false;
        };
        match destination {
            IpAddr::V4(v4) if self.translates_v4 || self.family == Family::Nat64 => {
                v4 == own.public
            }
            IpAddr::V4(v4) => self.family.has_v4() && v4 == own.v4,
            IpAddr::V6(v6) => self.family.has_v6() && v6 == own.v6,
        }
    }

    /// A packet that has crossed the link, as it is forwarded; `None` if it is dropped.
    pub(crate) fn outward(&mut self, now: Time, mut packet: Vec<u8>) -> Option<Vec<u8>> {
        let own = self.addresses?;
        let head = packet::head(&packet)?;
        match (head.source, head.destination) {
            (IpAddr::V4(source), _) if self.family.has_v4() && source == own.v4 => {
                if self.translates_v4 {
                    if let Some(quote) = icmp::quote(&packet, &head) {
                        let port =
                            self.port_of(now, quote.protocol, quote.destination, quote.ports.1)?;
                        let outer = (PacketEnd::Source, own.public);
                        let quoted = (PacketEnd::Destination, own.public, port);
                        icmp::rewrite_v4(&mut packet, &head, outer, &quote, quoted);
                        return Some(packet);
                    }
                    let port = self.map(now, &head)?;
                    packet::rewrite_v4(&mut packet, &head, PacketEnd::Source, own.public, port);
                }
                Some(packet)
            }
            (IpAddr::V6(source), IpAddr::V6(to)) if self.family.has_v6() && source == own.v6 => {
                match plan::behind_nat64(to) {
                    Some(to) if self.family == Family::Nat64 => {
                        if let Some(quote) = icmp::quote(&packet, &head) {
                            let port = self.port_of(
                                now,
                                quote.protocol,
                                quote.destination,
                                quote.ports.1,
                            )?;
                            let IpAddr::V6(from) = quote.source else {
                                return None;
                            };
                            let quoted = (plan::behind_nat64(from)?, own.public, port);
                            return icmp::to_v4(&packet, &head, &quote, (own.public, to), quoted);
                        }
                        let port = self.map(now, &head)?;
                        packet::to_v4(&packet, &head, (own.public, port), to)
                    }
                    Some(_) => None,
                    None => Some(packet),
                }
            }
            _ => None,
        }
    }

    /// A packet to one of the link's addresses, as it crosses the link; `None` if it is dropped.
    pub(crate) fn inward(&mut self, now: Time, mut packet: Vec<u8>) -> Option<Vec<u8>> {
        let own = self.addresses?;
        let head = packet::head(&packet)?;
        match (head.source, head.destination) {
            (IpAddr::V4(source), IpAddr::V4(to)) if to == own.public => {
                if let Some(quote) = icmp::quote(&packet, &head) {
                    return self.error_inward(now, packet, &head, source, &quote);
                }
                let inside = self.nat.inbound_at(now, head.ports?.1)?;
                match inside.address {
                    IpAddr::V4(address) if inside.protocol == head.protocol => {
                        packet::rewrite_v4(
                            &mut packet,
                            &head,
                            PacketEnd::Destination,
                            address,
                            inside.port,
                        );
                        Some(packet)
                    }
                    IpAddr::V6(address) if inside.protocol == as_v6(head.protocol) => {
                        let source = plan::through_nat64(source);
                        packet::to_v6(&packet, &head, source, (address, inside.port))
                    }
                    _ => None,
                }
            }
            _ => Some(packet),
        }
    }

    /// An ICMP error about a packet that left by a mapping, as it crosses the link to the sender.
    fn error_inward(
        &self,
        now: Time,
        mut packet: Vec<u8>,
        head: &packet::PacketHead,
        source: Ipv4Addr,
        quote: &icmp::QuotedPacket,
    ) -> Option<Vec<u8>> {
        let inside = self.nat.inbound_at(now, quote.ports.0)?;
        if inside.protocol != quote.protocol {
            return None;
        }
        match (inside.address, quote.destination) {
            (IpAddr::V4(address), _) => {
                let outer = (PacketEnd::Destination, address);
                let quoted = (PacketEnd::Source, address, inside.port);
                icmp::rewrite_v4(&mut packet, head, outer, quote, quoted);
                Some(packet)
            }
            (IpAddr::V6(address), IpAddr::V4(far)) => {
                let outer = (plan::through_nat64(source), address);
                let quoted = (address, inside.port, plan::through_nat64(far));
                icmp::to_v6(&packet, head, quote, outer, quoted)
            }
            _ => None,
        }
    }

    fn map(&mut self, now: Time, head: &packet::PacketHead) -> Option<u16> {
        let (port, _) = head.ports?;
        let inside = InternalEndpoint {
            protocol: head.protocol,
            address: head.source,
            port,
        };
        Some(self.nat.outbound_at(now, inside))
    }

    fn port_of(&self, now: Time, protocol: u8, address: IpAddr, port: u16) -> Option<u16> {
        let inside = InternalEndpoint {
            protocol,
            address,
            port,
        };
        self.nat.port_of(now, inside)
    }
}

fn as_v6(protocol: u8) -> u8 {
    if protocol == packet::ICMP {
        packet::ICMPV6
    } else {
        protocol
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::tests::{sums_up, v4};
    use crate::packet::{TCP, UDP, head};
    use crate::plan::{ORIGIN_V4, link_addresses};

    fn gate(family: Family, nat: NatKind) -> LinkGateway {
        let mut gate = LinkGateway::new(family, nat, None);
        gate.readdress(link_addresses(0, 0));
        gate
    }

    #[test]
    fn an_answer_finds_its_way_back_through_the_nat_until_it_rebinds() {
        let mut gate = gate(Family::V4, NatKind::Stable);
        let own = link_addresses(0, 0);
        let out = gate
            .outward(Time::ZERO, v4(UDP, (own.v4, 5000), (ORIGIN_V4, 443)))
            .unwrap();
        let at = head(&out).unwrap();
        assert_eq!(at.source, IpAddr::V4(own.public));
        let answer = v4(UDP, (ORIGIN_V4, 443), (own.public, at.ports.unwrap().0));
        let inside = gate.inward(Time::ZERO, answer.clone()).unwrap();
        assert!(sums_up(&inside));
        let to = head(&inside).unwrap();
        assert_eq!(
            (to.destination, to.ports.unwrap().1),
            (IpAddr::V4(own.v4), 5000)
        );
        gate.rebind();
        assert_eq!(gate.inward(Time::ZERO, answer), None);
    }

    #[test]
    fn a_packet_from_an_old_address_goes_nowhere() {
        let mut gate = gate(Family::V4, NatKind::None);
        let old = link_addresses(0, 0).v4;
        assert!(
            gate.outward(Time::ZERO, v4(TCP, (old, 1), (ORIGIN_V4, 2)))
                .is_some()
        );
        gate.readdress(link_addresses(0, 1));
        assert!(
            gate.outward(Time::ZERO, v4(TCP, (old, 1), (ORIGIN_V4, 2)))
                .is_none()
        );
        assert!(!gate.leads_to(old.into()));
    }

    #[test]
    fn nothing_else_answers_on_a_port_of_another_protocol() {
        let mut gate = gate(Family::V4, NatKind::Stable);
        let own = link_addresses(0, 0);
        let out = gate
            .outward(Time::ZERO, v4(UDP, (own.v4, 5000), (ORIGIN_V4, 443)))
            .unwrap();
        let port = head(&out).unwrap().ports.unwrap().0;
        assert_eq!(
            gate.inward(Time::ZERO, v4(TCP, (ORIGIN_V4, 443), (own.public, port))),
            None
        );
    }
}
