//! What the header of an inner packet says, as far as a tunnel decides by it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// IP protocol numbers (IANA).
pub const PROTOCOL_ICMP: u8 = 1;
/// The number of TCP.
pub const PROTOCOL_TCP: u8 = 6;
/// The number of UDP.
pub const PROTOCOL_UDP: u8 = 17;
/// The number of ICMPv6.
pub const PROTOCOL_ICMPV6: u8 = 58;

/// Extension headers of IPv6 (RFC 8200 §4).
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

/// The most extension headers that are read.
const EXTENSIONS_MAX: usize = 4; // a guess: real packets have one

const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

/// Why a packet is not carried, whoever sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InnerPacketError {
    /// The bytes are no IP packet, or its lengths contradict each other.
    #[error("malformed")]
    Malformed,
    /// The packet has IP options or extension headers that are not carried: source routes among them.
    #[error("with IP options")]
    Options,
    /// The packet is a fragment: its ports are elsewhere, so that no rule can be applied to it.
    #[error("a fragment")]
    Fragment,
}

/// The addresses, protocol, ports and code point of an inner packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InnerPacket {
    /// The source address.
    pub source: IpAddr,
    /// The destination address.
    pub destination: IpAddr,
    /// The number of the transport protocol.
    pub protocol: u8,
    /// The source port of TCP and UDP.
    pub source_port: Option<u16>,
    /// The destination port of TCP and UDP.
    pub destination_port: Option<u16>,
    /// The code point of Differentiated Services (RFC 2474).
    pub dscp: u8,
    /// The type of an ICMP message.
    pub icmp_type: Option<u8>,
}

impl InnerPacket {
    /// Reads the headers of a packet.
    ///
    /// ```
    /// use d2tp_tunnel::InnerPacket;
    /// // A UDP datagram without content: 10.83.0.2 to 192.0.2.1, port 53.
    /// let bytes = [
    ///     0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 83, 0, 2, 192, 0, 2, 1, //
    ///     0x9c, 0x40, 0, 53, 0, 8, 0, 0,
    /// ];
    /// let packet = InnerPacket::parse(&bytes).unwrap();
    /// assert_eq!(packet.source.to_string(), "10.83.0.2");
    /// assert_eq!(packet.destination_port, Some(53));
    /// assert_eq!(packet.dscp, 0);
    /// ```
    ///
    /// # Errors
    /// It is not a whole packet, or one that is not carried.
    pub fn parse(bytes: &[u8]) -> Result<InnerPacket, InnerPacketError> {
        match bytes.first().map(|first| first >> 4) {
            Some(4) => parse_v4(bytes),
            Some(6) => parse_v6(bytes),
            _ => Err(InnerPacketError::Malformed),
        }
    }

    fn with_transport(
        source: IpAddr,
        destination: IpAddr,
        dscp: u8,
        protocol: u8,
        payload: &[u8],
    ) -> Result<InnerPacket, InnerPacketError> {
        let has_ports = matches!(protocol, PROTOCOL_TCP | PROTOCOL_UDP);
        let is_icmp = matches!(protocol, PROTOCOL_ICMP | PROTOCOL_ICMPV6);
        let port = |at: usize| {
            let bytes = payload.get(at..at + 2).filter(|_| has_ports);
            bytes.map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
        };
        let icmp_type = payload.first().copied();
        if (has_ports && port(2).is_none()) || (is_icmp && icmp_type.is_none()) {
            return Err(InnerPacketError::Malformed);
        }
        Ok(InnerPacket {
            source,
            destination,
            protocol,
            source_port: port(0),
            destination_port: port(2),
            dscp,
            icmp_type: icmp_type.filter(|_| is_icmp),
        })
    }

    /// Whether the packet is for several hosts: multicast, or broadcast to all.
    pub fn is_for_many(&self) -> bool {
        match self.destination {
            IpAddr::V4(to) => to.is_multicast() || to.is_broadcast(),
            IpAddr::V6(to) => to.is_multicast(),
        }
    }

    /// Whether the packet is an ICMP redirect, which would change the receiver's routes.
    pub fn is_redirect(&self) -> bool {
        // RFC 792: type 5; RFC 4861 §4.5: type 137.
        matches!(
            (self.protocol, self.icmp_type),
            (PROTOCOL_ICMP, Some(5)) | (PROTOCOL_ICMPV6, Some(137))
        )
    }
}

fn parse_v4(bytes: &[u8]) -> Result<InnerPacket, InnerPacketError> {
    let header: &[u8; IPV4_HEADER] = bytes.first_chunk().ok_or(InnerPacketError::Malformed)?;
    let length = usize::from(u16::from_be_bytes([header[2], header[3]]));
    match header[0] & 0xf {
        _ if length != bytes.len() => return Err(InnerPacketError::Malformed),
        5 => {}
        0..5 => return Err(InnerPacketError::Malformed),
        _ => return Err(InnerPacketError::Options),
    }
    // More fragments, or an offset.
    if u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0 {
        return Err(InnerPacketError::Fragment);
    }
    let address = |at: usize| -> IpAddr {
        Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]).into()
    };
    InnerPacket::with_transport(
        address(12),
        address(16),
        header[1] >> 2,
        header[9],
        &bytes[IPV4_HEADER..],
    )
}

fn parse_v6(bytes: &[u8]) -> Result<InnerPacket, InnerPacketError> {
    let header: &[u8; IPV6_HEADER] = bytes.first_chunk().ok_or(InnerPacketError::Malformed)?;
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    if length + IPV6_HEADER != bytes.len() {
        return Err(InnerPacketError::Malformed);
    }
    let address = |at: usize| -> IpAddr {
        let octets: [u8; 16] = header[at..at + 16].try_into().expect("sixteen bytes");
        Ipv6Addr::from(octets).into()
    };
    let dscp = (u16::from_be_bytes([header[0], header[1]]) >> 6) as u8 & 0x3f;
    let (mut next, mut payload) = (header[6], &bytes[IPV6_HEADER..]);
    for _ in 0..EXTENSIONS_MAX {
        match next {
            FRAGMENT => return Err(InnerPacketError::Fragment),
            ROUTING => return Err(InnerPacketError::Options),
            HOP_BY_HOP | DESTINATION_OPTIONS => {
                let &[after, units, ..] = payload else {
                    return Err(InnerPacketError::Malformed);
                };
                let extension = 8 * (usize::from(units) + 1);
                next = after;
                payload = payload
                    .get(extension..)
                    .ok_or(InnerPacketError::Malformed)?;
            }
            _ => {
                return InnerPacket::with_transport(address(8), address(24), dscp, next, payload);
            }
        }
    }
    Err(InnerPacketError::Options)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A packet of UDP to port 53 with `content` zeros.
    pub(crate) fn udp_v4(content: usize) -> Vec<u8> {
        let length = (28 + content) as u16;
        let mut bytes = vec![0x45, 0];
        bytes.extend(length.to_be_bytes());
        bytes.extend([
            0,
            0,
            0x40,
            0,
            64,
            PROTOCOL_UDP,
            0,
            0,
            10,
            83,
            0,
            2,
            192,
            0,
            2,
            1,
        ]);
        bytes.extend([0x9c, 0x40, 0, 53]);
        bytes.extend(((8 + content) as u16).to_be_bytes());
        bytes.extend(vec![0; 2 + content]);
        bytes
    }

    pub(crate) fn udp_v6(content: usize) -> Vec<u8> {
        let mut bytes = vec![0x60, 0, 0, 0];
        bytes.extend(((8 + content) as u16).to_be_bytes());
        bytes.extend([PROTOCOL_UDP, 64]);
        bytes.extend("fd00::2".parse::<Ipv6Addr>().unwrap().octets());
        bytes.extend("2001:db8::1".parse::<Ipv6Addr>().unwrap().octets());
        bytes.extend([0x9c, 0x40, 0, 53]);
        bytes.extend(((8 + content) as u16).to_be_bytes());
        bytes.extend(vec![0; 2 + content]);
        bytes
    }

    #[test]
    fn addresses_and_ports_of_both_families_are_read() {
        let four = InnerPacket::parse(&udp_v4(3)).unwrap();
        assert_eq!(four.destination.to_string(), "192.0.2.1");
        assert_eq!(
            (four.protocol, four.destination_port),
            (PROTOCOL_UDP, Some(53))
        );
        let six = InnerPacket::parse(&udp_v6(3)).unwrap();
        assert_eq!(six.source.to_string(), "fd00::2");
        assert_eq!(six.destination_port, Some(53));
    }

    #[test]
    fn a_packet_of_another_length_than_it_says_is_malformed() {
        for whole in [udp_v4(3), udp_v6(3)] {
            for end in 0..whole.len() {
                let error = InnerPacket::parse(&whole[..end]);
                assert_eq!(error, Err(InnerPacketError::Malformed), "{end}");
            }
            let longer = [&whole[..], &[0]].concat();
            assert_eq!(
                InnerPacket::parse(&longer),
                Err(InnerPacketError::Malformed)
            );
        }
    }

    #[test]
    fn fragments_options_and_source_routes_are_told_apart() {
        let mut fragment = udp_v4(3);
        fragment[6] = 0x20;
        assert_eq!(
            InnerPacket::parse(&fragment),
            Err(InnerPacketError::Fragment)
        );
        let mut later = udp_v4(3);
        later[7] = 1;
        assert_eq!(InnerPacket::parse(&later), Err(InnerPacketError::Fragment));
        let mut options = udp_v4(3);
        options[0] = 0x46;
        assert_eq!(InnerPacket::parse(&options), Err(InnerPacketError::Options));
        let mut six = udp_v6(8);
        six[6] = FRAGMENT;
        assert_eq!(InnerPacket::parse(&six), Err(InnerPacketError::Fragment));
        six[6] = ROUTING;
        assert_eq!(InnerPacket::parse(&six), Err(InnerPacketError::Options));
    }

    #[test]
    fn the_port_behind_extension_headers_is_found_and_an_endless_chain_ends() {
        let mut bytes = udp_v6(0);
        let udp = bytes.split_off(IPV6_HEADER);
        bytes[6] = DESTINATION_OPTIONS;
        bytes[5] += 8;
        bytes.extend([PROTOCOL_UDP, 0, 1, 4, 0, 0, 0, 0]);
        bytes.extend(&udp);
        assert_eq!(
            InnerPacket::parse(&bytes).unwrap().destination_port,
            Some(53)
        );
        let mut chain = udp_v6(0);
        chain.truncate(IPV6_HEADER);
        chain[6] = HOP_BY_HOP;
        chain.extend([HOP_BY_HOP, 0, 1, 4, 0, 0, 0, 0].repeat(9));
        chain[5] = 72;
        assert_eq!(InnerPacket::parse(&chain), Err(InnerPacketError::Options));
    }

    #[test]
    fn redirects_and_what_is_for_many_are_recognised() {
        let mut redirect = udp_v4(0);
        redirect[9] = PROTOCOL_ICMP;
        redirect[20] = 5;
        assert!(InnerPacket::parse(&redirect).unwrap().is_redirect());
        let mut many = udp_v4(0);
        many[16..20].copy_from_slice(&[224, 0, 0, 251]);
        assert!(InnerPacket::parse(&many).unwrap().is_for_many());
        assert!(!InnerPacket::parse(&udp_v4(0)).unwrap().is_for_many());
    }
}
