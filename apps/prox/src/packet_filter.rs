//! Which packets of clients pass, and which packets for clients: no state, no socket.
//!
//! What a client may reach is what its flows may reach ([`EgressFilter`]).

use d2tp_tunnel::{InnerPacket, InnerPacketError, PROTOCOL_ICMP, PROTOCOL_ICMPV6};

use crate::egress::EgressFilter;
use crate::inner_addresses::{InnerAddressPair, InnerNets};

/// The port of name servers.
const DNS_PORT: u16 = 53;

/// Why a packet of a tunnel is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PacketDropReason {
    /// The packet's headers are invalid or not supported.
    Header(InnerPacketError),
    /// The packet's source is not an address of the client.
    SpoofedSource,
    /// The packet is for several hosts.
    Multicast,
    /// The packet would change its receiver's routes.
    Redirect,
    /// The packet's destination is another client, or an inner address that nobody has.
    OtherClient,
    /// The proxy may not reach its destination.
    AddressRefused,
    /// The proxy may not reach its port.
    PortRefused,
    /// The client's limits do not allow it now.
    OverLimit,
    /// The packet's client has no tunnel now.
    NoTunnel,
    /// The packet is larger than the tunnel carries.
    TooBig,
    /// The client's session has no room: the packet waited too long, or too many wait.
    QueueFull,
    /// Only metered networks are up at the client, which pays for answers there.
    Unasked,
}

impl PacketDropReason {
    /// The word for it in metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            PacketDropReason::Header(InnerPacketError::Malformed) => "malformed",
            PacketDropReason::Header(InnerPacketError::Options) => "options",
            PacketDropReason::Header(InnerPacketError::Fragment) => "fragment",
            PacketDropReason::SpoofedSource => "spoofed_source",
            PacketDropReason::Multicast => "multicast",
            PacketDropReason::Redirect => "redirect",
            PacketDropReason::OtherClient => "other_client",
            PacketDropReason::AddressRefused => "address_refused",
            PacketDropReason::PortRefused => "port_refused",
            PacketDropReason::OverLimit => "over_limit",
            PacketDropReason::NoTunnel => "no_tunnel",
            PacketDropReason::TooBig => "too_big",
            PacketDropReason::QueueFull => "queue_full",
            PacketDropReason::Unasked => "unasked",
        }
    }
}

/// Checks a packet that a client with these addresses sent.
pub(crate) fn check_packet_from_client(
    packet: &[u8],
    own: &InnerAddressPair,
    nets: &InnerNets,
    egress: &EgressFilter,
) -> Result<(), PacketDropReason> {
    let packet = InnerPacket::parse(packet).map_err(PacketDropReason::Header)?;
    if !own.contains(packet.source) {
        return Err(PacketDropReason::SpoofedSource);
    }
    check_both_ways(&packet)?;
    if nets.contains(packet.destination) {
        return match nets.gateway().contains(packet.destination) && is_for_gateway(&packet) {
            true => Ok(()),
            false => Err(PacketDropReason::OtherClient),
        };
    }
    if egress.check(packet.destination).is_err() {
        return Err(PacketDropReason::AddressRefused);
    }
    match packet.destination_port {
        Some(port) if !egress.port_allowed(port) => Err(PacketDropReason::PortRefused),
        _ => Ok(()),
    }
}

/// Checks a packet for a client, which came from elsewhere.
pub(crate) fn check_packet_to_client(
    packet: &InnerPacket,
    nets: &InnerNets,
) -> Result<(), PacketDropReason> {
    check_both_ways(packet)?;
    let is_of_gateway = nets.gateway().contains(packet.source);
    match nets.contains(packet.source) && !is_of_gateway {
        true => Err(PacketDropReason::OtherClient),
        false => Ok(()),
    }
}

fn check_both_ways(packet: &InnerPacket) -> Result<(), PacketDropReason> {
    if packet.is_for_many() {
        return Err(PacketDropReason::Multicast);
    }
    match packet.is_redirect() {
        true => Err(PacketDropReason::Redirect),
        false => Ok(()),
    }
}

/// Whether the proxy's own inner address takes it: names, and what `ping` sends.
fn is_for_gateway(packet: &InnerPacket) -> bool {
    let is_icmp = matches!(packet.protocol, PROTOCOL_ICMP | PROTOCOL_ICMPV6);
    is_icmp || packet.destination_port == Some(DNS_PORT)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn nets() -> InnerNets {
        InnerNets::of(&["10.83.0.0/16".parse().unwrap()]).unwrap()
    }

    /// A packet of UDP.
    fn udp(from: &str, to: &str, port: u16) -> Vec<u8> {
        let octets = |text: &str| text.parse::<Ipv4Addr>().unwrap().octets();
        let mut bytes = vec![0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0];
        bytes.extend(octets(from));
        bytes.extend(octets(to));
        bytes.extend([0x9c, 0x40]);
        bytes.extend(port.to_be_bytes());
        bytes.extend([0, 8, 0, 0]);
        bytes
    }

    fn check(packet: &[u8], egress: &EgressFilter) -> Result<(), PacketDropReason> {
        let own = InnerAddressPair {
            v4: "10.83.0.2".parse().unwrap(),
            v6: None,
        };
        check_packet_from_client(packet, &own, &nets(), egress)
    }

    #[test]
    fn a_client_reaches_what_its_flows_reach_and_no_other_client() {
        use PacketDropReason::*;
        let egress = EgressFilter {
            refused_ports: vec![25],
            ..EgressFilter::default()
        };
        for (from, to, port, expected) in [
            ("10.83.0.2", "1.1.1.1", 443, Ok(())),
            ("10.83.0.2", "10.83.0.1", 53, Ok(())),
            ("10.83.0.2", "10.83.0.1", 22, Err(OtherClient)),
            ("10.83.0.2", "10.83.0.3", 53, Err(OtherClient)),
            ("10.83.0.3", "1.1.1.1", 443, Err(SpoofedSource)),
            ("10.83.0.1", "1.1.1.1", 443, Err(SpoofedSource)),
            ("10.83.0.2", "192.168.1.1", 80, Err(AddressRefused)),
            ("10.83.0.2", "127.0.0.1", 80, Err(AddressRefused)),
            ("10.83.0.2", "169.254.169.254", 80, Err(AddressRefused)),
            ("10.83.0.2", "1.1.1.1", 25, Err(PortRefused)),
            ("10.83.0.2", "224.0.0.251", 5353, Err(Multicast)),
            ("10.83.0.2", "255.255.255.255", 67, Err(Multicast)),
        ] {
            assert_eq!(
                check(&udp(from, to, port), &egress),
                expected,
                "{from} {to} {port}"
            );
        }
        let open = EgressFilter {
            allow_private: true,
            ..egress
        };
        assert_eq!(check(&udp("10.83.0.2", "192.168.1.1", 80), &open), Ok(()));
        let metadata = udp("10.83.0.2", "169.254.169.254", 80);
        assert_eq!(check(&metadata, &open), Err(AddressRefused));
        let other = udp("10.83.0.2", "10.83.0.3", 80);
        assert_eq!(check(&other, &open), Err(OtherClient));
    }

    #[test]
    fn fragments_and_redirects_do_not_pass() {
        let egress = EgressFilter::default();
        let mut fragment = udp("10.83.0.2", "1.1.1.1", 443);
        fragment[6] = 0x20;
        assert_eq!(
            check(&fragment, &egress),
            Err(PacketDropReason::Header(InnerPacketError::Fragment))
        );
        let mut redirect = udp("10.83.0.2", "1.1.1.1", 443);
        (redirect[9], redirect[20]) = (1, 5);
        assert_eq!(check(&redirect, &egress), Err(PacketDropReason::Redirect));
    }

    #[test]
    fn what_comes_from_another_client_does_not_reach_one() {
        let from = |source: &str| {
            let packet = InnerPacket::parse(&udp(source, "10.83.0.2", 9)).unwrap();
            check_packet_to_client(&packet, &nets())
        };
        assert_eq!(from("1.1.1.1"), Ok(()));
        assert_eq!(from("10.83.0.1"), Ok(()));
        assert_eq!(from("10.83.0.9"), Err(PacketDropReason::OtherClient));
        assert!(nets().contains("10.83.0.9".parse::<IpAddr>().unwrap()));
    }
}
