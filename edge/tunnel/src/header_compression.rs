//! Headers of inner packets, compressed by static rules (SCHC, RFC 8724), for radios of some ten kilobits a second.
//!
//! ```text
//!  rule (1) ‖ [traffic class (1)] ‖ [hops (1)] ‖ [identification (2) or flow label (3)] ‖ address of the other host (4 or 16) ‖
//!      UDP   ports (4)                                                                        ‖ content
//!      TCP   ports (4), numbers (8), offset and flags (2), window (2)                         ‖ options, content
//!      ICMP  type, code                                                                       ‖ the rest
//! ```
//!
//! Both ends know the client's address. Lengths and checksums are computed, which nobody notices, because a packet whose checksum is wrong
//! is not compressed, and D2TP lets no damaged one arrive. The rule says what of the brackets is there: a traffic class that is not 0,
//! hops that are not 64, the identification of a packet that may be fragmented, a flow label that is not 0. What fits no rule stays as
//! it is. The first byte tells: whole packets begin with 4 or 6, pieces with the bytes 0 and 1, rules are 0x10 to 0x3f.
//!
//! Each packet stands for itself: a lost one costs no other.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytes::Bytes;
use d2tp_wire::WireReader;

use crate::inner_packet::{PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP, PROTOCOL_UDP};
use crate::internet_checksum::sum;

const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const UDP_HEADER: usize = 8;
const TCP_HEADER: usize = 20;
const ICMP_HEADER: usize = 4;

/// The hops that hosts give their packets usually.
const HOPS_USUAL: u8 = 64;

/// The first rule, the number of transports, and of transports in both families.
const RULE_FIRST: u8 = 0x10;
const TRANSPORTS: u8 = 3;
const KINDS: u8 = 2 * TRANSPORTS;
/// What a rule has beyond the fields that are always sent.
const SENDS_CLASS: u8 = 1;
const SENDS_HOPS: u8 = 2;
/// The identification of IPv4, the flow label of IPv6.
const SENDS_LABEL: u8 = 4;
/// The rule after the last one.
const RULE_END: u8 = RULE_FIRST + 8 * KINDS;

/// Whether packets of IPv4 may be fragmented, or have more fragments: the upper half of that field.
const DONT_FRAGMENT: u8 = 0x40;
const URGENT_FLAG: u8 = 0x20;

/// Whether a datagram is a packet with compressed headers.
pub(crate) fn is_compressed(datagram: &[u8]) -> bool {
    let first = datagram.first();
    first.is_some_and(|first| (RULE_FIRST..RULE_END).contains(first))
}

/// What both ends of a tunnel know beforehand: the inner addresses of its client.
///
/// ```
/// use d2tp_tunnel::HeaderContext;
/// let own = "10.83.0.2".parse().unwrap();
/// let (client, proxy) = (HeaderContext::of_client(own, None), HeaderContext::of_proxy(own, None));
/// // A UDP datagram with two bytes: 10.83.0.2 to 192.0.2.1, port 53.
/// let packet = [
///     0x45, 0, 0, 30, 0, 0, 0x40, 0, 64, 17, 0x6e, 0x79, 10, 83, 0, 2, 192, 0, 2, 1, //
///     0x9c, 0x40, 0, 53, 0, 10, 0x2e, 0xa5, 0x68, 0x69,
/// ];
/// let compressed = client.compress(&packet).unwrap();
/// assert_eq!(compressed[..], [0x10, 192, 0, 2, 1, 0x9c, 0x40, 0, 53, 0x68, 0x69]);
/// assert_eq!(proxy.expand(&compressed).unwrap()[..], packet);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderContext {
    v4: Ipv4Addr,
    v6: Option<Ipv6Addr>,
    /// Whether this is the client's end.
    is_client: bool,
}

/// The headers of a packet that fits a rule.
#[derive(Clone, Copy, Debug)]
struct RuleFields {
    source: IpAddr,
    destination: IpAddr,
    /// The number of the transport.
    protocol: u8,
    class: u8,
    hops: u8,
    /// The identification of IPv4 if the packet may be fragmented, or the flow label of IPv6.
    label: Option<u32>,
}

impl HeaderContext {
    /// The context at the client.
    pub fn of_client(v4: Ipv4Addr, v6: Option<Ipv6Addr>) -> HeaderContext {
        HeaderContext {
            v4,
            v6,
            is_client: true,
        }
    }

    /// The context at the proxy, for the client with these addresses.
    pub fn of_proxy(v4: Ipv4Addr, v6: Option<Ipv6Addr>) -> HeaderContext {
        HeaderContext {
            v4,
            v6,
            is_client: false,
        }
    }

    /// The packet with compressed headers, if a rule fits it. The identification of a packet of IPv4 that may not be fragmented is lost:
    /// it has no meaning (RFC 6864).
    pub fn compress(&self, packet: &[u8]) -> Option<Bytes> {
        let (fields, transport) = match packet.first()? >> 4 {
            4 => fields_v4(packet)?,
            6 => fields_v6(packet)?,
            _ => return None,
        };
        let (own, other) = match self.is_client {
            true => (fields.source, fields.destination),
            false => (fields.destination, fields.source),
        };
        if !self.is_own(own) || transport_sum(&fields, transport) != u16::MAX {
            return None;
        }
        let mut rule = if own.is_ipv6() { TRANSPORTS } else { 0 };
        let mut bytes = vec![0];
        let mut extra = 0;
        if fields.class != 0 {
            extra |= SENDS_CLASS;
            bytes.push(fields.class);
        }
        if fields.hops != HOPS_USUAL {
            extra |= SENDS_HOPS;
            bytes.push(fields.hops);
        }
        if let Some(label) = fields.label {
            extra |= SENDS_LABEL;
            let label = label.to_be_bytes();
            bytes.extend(if own.is_ipv6() {
                &label[1..]
            } else {
                &label[2..]
            });
        }
        match other {
            IpAddr::V4(other) => bytes.extend(other.octets()),
            IpAddr::V6(other) => bytes.extend(other.octets()),
        }
        match fields.protocol {
            PROTOCOL_UDP => {
                let (header, content) = transport.split_first_chunk::<UDP_HEADER>()?;
                let length = u16::from_be_bytes([header[4], header[5]]);
                // A checksum of 0 is none.
                if usize::from(length) != transport.len() || header[6..] == [0, 0] {
                    return None;
                }
                bytes.extend(&header[..4]);
                bytes.extend(content);
            }
            PROTOCOL_TCP => {
                rule += 1;
                let (header, rest) = transport.split_first_chunk::<TCP_HEADER>()?;
                if header[13] & URGENT_FLAG != 0 || header[18..] != [0, 0] {
                    return None;
                }
                bytes.extend(&header[..16]);
                bytes.extend(rest);
            }
            PROTOCOL_ICMP | PROTOCOL_ICMPV6 => {
                rule += 2;
                let (header, rest) = transport.split_first_chunk::<ICMP_HEADER>()?;
                bytes.extend(&header[..2]);
                bytes.extend(rest);
            }
            _ => return None,
        }
        bytes[0] = RULE_FIRST + rule + KINDS * extra;
        Some(bytes.into())
    }

    /// The packet whose headers were compressed at the other end; `None` if the bytes are none.
    pub fn expand(&self, compressed: &[u8]) -> Option<Bytes> {
        if !is_compressed(compressed) {
            return None;
        }
        let mut reader = WireReader::new(&compressed[1..]);
        let rule = compressed[0] - RULE_FIRST;
        let (kind, extra) = (rule % KINDS, rule / KINDS);
        let is_v6 = kind >= TRANSPORTS;
        let class = match extra & SENDS_CLASS {
            0 => 0,
            _ => reader.u8().ok()?,
        };
        let hops = match extra & SENDS_HOPS {
            0 => HOPS_USUAL,
            _ => reader.u8().ok()?,
        };
        let label = match extra & SENDS_LABEL {
            0 => None,
            _ => Some(number(reader.bytes(if is_v6 { 3 } else { 2 }).ok()?)),
        };
        let own = match is_v6 {
            true => IpAddr::V6(self.v6?),
            false => IpAddr::V4(self.v4),
        };
        let other = match is_v6 {
            true => IpAddr::from(reader.array::<16>().ok()?),
            false => IpAddr::from(reader.array::<4>().ok()?),
        };
        let (source, destination) = match self.is_client {
            true => (other, own),
            false => (own, other),
        };
        let (protocol, mut transport, checksum_at) = expanded_transport(kind, reader.rest())?;
        let fields = RuleFields {
            source,
            destination,
            protocol,
            class,
            hops,
            label,
        };
        let checksum = match !transport_sum(&fields, &transport) {
            // Of UDP, 0 is none.
            0 if protocol == PROTOCOL_UDP => u16::MAX,
            checksum => checksum,
        };
        transport[checksum_at..checksum_at + 2].copy_from_slice(&checksum.to_be_bytes());
        let mut packet = header(&fields, transport.len())?;
        packet.extend(transport);
        Some(packet.into())
    }

    fn is_own(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => address == self.v4,
            IpAddr::V6(address) => Some(address) == self.v6,
        }
    }
}

/// The fields of a packet of IPv4, and what it carries.
fn fields_v4(packet: &[u8]) -> Option<(RuleFields, &[u8])> {
    let (header, transport) = packet.split_first_chunk::<IPV4_HEADER>()?;
    let length = u16::from_be_bytes([header[2], header[3]]);
    // Without options, whole, and no fragment.
    let is_plain = header[0] == 0x45
        && usize::from(length) == packet.len()
        && header[6] & !DONT_FRAGMENT == 0
        && header[7] == 0
        && sum(header) == u16::MAX;
    let address =
        |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]);
    let may_fragment = header[6] & DONT_FRAGMENT == 0;
    let label = may_fragment.then(|| number(&header[4..6]));
    let fields = RuleFields {
        source: address(12).into(),
        destination: address(16).into(),
        protocol: header[9],
        class: header[1],
        hops: header[8],
        label,
    };
    (is_plain && header[9] != PROTOCOL_ICMPV6).then_some((fields, transport))
}

/// The fields of a packet of IPv6, and what it carries.
fn fields_v6(packet: &[u8]) -> Option<(RuleFields, &[u8])> {
    let (header, transport) = packet.split_first_chunk::<IPV6_HEADER>()?;
    let length = u16::from_be_bytes([header[4], header[5]]);
    let address = |at: usize| -> Option<Ipv6Addr> {
        let octets: [u8; 16] = header[at..at + 16].try_into().ok()?;
        Some(octets.into())
    };
    let label = number(&header[1..4]) & 0xf_ffff;
    let fields = RuleFields {
        source: address(8)?.into(),
        destination: address(24)?.into(),
        protocol: header[6],
        class: header[0] << 4 | header[1] >> 4,
        hops: header[7],
        label: (label != 0).then_some(label),
    };
    let is_plain = usize::from(length) == transport.len() && header[6] != PROTOCOL_ICMP;
    is_plain.then_some((fields, transport))
}

/// The IP header of a packet that carries so many bytes; `None` if they are too many.
fn header(fields: &RuleFields, bytes: usize) -> Option<Vec<u8>> {
    let label = fields.label.unwrap_or(0).to_be_bytes();
    let (class, hops) = (fields.class, fields.hops);
    match (fields.source, fields.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let length = u16::try_from(IPV4_HEADER + bytes).ok()?;
            let fragments = if fields.label.is_some() {
                0
            } else {
                DONT_FRAGMENT
            };
            let mut header = vec![0x45, class];
            header.extend(length.to_be_bytes());
            header.extend([
                label[2],
                label[3],
                fragments,
                0,
                hops,
                fields.protocol,
                0,
                0,
            ]);
            header.extend(source.octets());
            header.extend(destination.octets());
            let checksum = !sum(&header);
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
            Some(header)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let length = u16::try_from(bytes).ok()?;
            let mut header = vec![
                0x60 | class >> 4,
                class << 4 | label[1] & 0xf,
                label[2],
                label[3],
            ];
            header.extend(length.to_be_bytes());
            header.extend([fields.protocol, hops]);
            header.extend(source.octets());
            header.extend(destination.octets());
            Some(header)
        }
        _ => None,
    }
}

/// The transport's number, its header and content, and where its checksum is, which is 0 as yet.
fn expanded_transport(kind: u8, rest: &[u8]) -> Option<(u8, Vec<u8>, usize)> {
    match kind % TRANSPORTS {
        0 => {
            let (ports, content) = rest.split_first_chunk::<4>()?;
            let length = u16::try_from(UDP_HEADER + content.len()).ok()?;
            let mut transport = ports.to_vec();
            transport.extend(length.to_be_bytes());
            transport.extend([0, 0]);
            transport.extend(content);
            Some((PROTOCOL_UDP, transport, 6))
        }
        1 => {
            let (header, rest) = rest.split_first_chunk::<16>()?;
            let mut transport = header.to_vec();
            transport.extend([0; 4]);
            transport.extend(rest);
            Some((PROTOCOL_TCP, transport, 16))
        }
        _ => {
            let (header, rest) = rest.split_first_chunk::<2>()?;
            let protocol = match kind < TRANSPORTS {
                true => PROTOCOL_ICMP,
                false => PROTOCOL_ICMPV6,
            };
            let mut transport = header.to_vec();
            transport.extend([0; 2]);
            transport.extend(rest);
            Some((protocol, transport, 2))
        }
    }
}

/// The ones' complement sum of a transport's header and content, its pseudo-header included: all ones if its checksum is right.
fn transport_sum(fields: &RuleFields, transport: &[u8]) -> u16 {
    let mut pseudo = Vec::with_capacity(IPV6_HEADER);
    match (fields.source, fields.destination) {
        // ICMP of IPv4 has none.
        (IpAddr::V4(_), IpAddr::V4(_)) if fields.protocol == PROTOCOL_ICMP => {}
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            pseudo.extend(source.octets());
            pseudo.extend(destination.octets());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            pseudo.extend(source.octets());
            pseudo.extend(destination.octets());
        }
        _ => return 0,
    }
    if !pseudo.is_empty() {
        pseudo.extend((transport.len() as u32).to_be_bytes());
        pseudo.extend([0, 0, 0, fields.protocol]);
    }
    let sums = [sum(&pseudo), sum(transport)].map(u16::to_be_bytes);
    sum(sums.as_flattened())
}

/// The number that some bytes are.
fn number(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .fold(0, |number, byte| number << 8 | u32::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_V4: Ipv4Addr = Ipv4Addr::new(10, 83, 0, 2);
    const OTHER_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

    fn own_v6() -> Ipv6Addr {
        "fd83::2".parse().unwrap()
    }

    fn ends() -> [HeaderContext; 2] {
        [
            HeaderContext::of_client(OWN_V4, Some(own_v6())),
            HeaderContext::of_proxy(OWN_V4, Some(own_v6())),
        ]
    }

    /// A packet of the client to another host with right checksums, by the fields and the transport without its checksum.
    fn packet(
        is_v6: bool,
        protocol: u8,
        mut transport: Vec<u8>,
        change: fn(&mut RuleFields),
    ) -> Vec<u8> {
        let (source, destination) = match is_v6 {
            true => (own_v6().into(), "2001:db8::1".parse().unwrap()),
            false => (OWN_V4.into(), OTHER_V4.into()),
        };
        let mut fields = RuleFields {
            source,
            destination,
            protocol,
            class: 0,
            hops: HOPS_USUAL,
            label: None,
        };
        change(&mut fields);
        let at = match protocol {
            PROTOCOL_UDP => 6,
            PROTOCOL_TCP => 16,
            _ => 2,
        };
        let checksum = !transport_sum(&fields, &transport);
        transport[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
        [header(&fields, transport.len()).unwrap(), transport].concat()
    }

    fn udp(content: &[u8]) -> Vec<u8> {
        let length = (UDP_HEADER + content.len()) as u16;
        let mut udp = vec![0x9c, 0x40, 0x0d, 0x96];
        udp.extend(length.to_be_bytes());
        udp.extend([0, 0]);
        udp.extend(content);
        udp
    }

    /// A segment with timestamps.
    fn tcp(content: &[u8]) -> Vec<u8> {
        let mut tcp = vec![
            0x9c, 0x40, 0x01, 0xbb, 1, 2, 3, 4, 5, 6, 7, 8, 0x80, 0x18, 0x02, 0, 0, 0, 0, 0,
        ];
        tcp.extend([1, 1, 8, 10, 0, 0, 1, 2, 0, 0, 3, 4]);
        tcp.extend(content);
        tcp
    }

    fn ping(content: &[u8]) -> Vec<u8> {
        [&[8, 0, 0, 0, 0x12, 0x34, 0, 1], content].concat()
    }

    fn crosses(packet: &[u8]) -> usize {
        let [client, proxy] = ends();
        let compressed = client.compress(packet).expect("a rule fits");
        assert!(is_compressed(&compressed));
        assert_eq!(proxy.expand(&compressed).as_deref(), Some(packet));
        compressed.len()
    }

    #[test]
    fn headers_of_usual_packets_become_a_third_to_two_thirds() {
        let content = [7; 40];
        for (is_v6, protocol, transport, before, after) in [
            (false, PROTOCOL_UDP, udp(&content), 28, 9),
            (false, PROTOCOL_TCP, tcp(&content), 52, 33),
            (false, PROTOCOL_ICMP, ping(&content), 28, 11),
            (true, PROTOCOL_UDP, udp(&content), 48, 21),
            (true, PROTOCOL_TCP, tcp(&content), 72, 45),
            (true, PROTOCOL_ICMPV6, ping(&content), 48, 23),
        ] {
            let packet = packet(is_v6, protocol, transport, |_| {});
            assert_eq!(packet.len(), before + content.len());
            assert_eq!(
                crosses(&packet),
                after + content.len(),
                "{protocol} {is_v6}"
            );
        }
    }

    #[test]
    fn what_is_not_usual_is_sent_beside() {
        let changes: [fn(&mut RuleFields); 5] = [
            |fields| fields.class = 0xb8,
            |fields| fields.hops = 1,
            |fields| fields.label = Some(0x1234),
            |fields| (fields.class, fields.hops) = (1, 255),
            |fields| (fields.class, fields.hops, fields.label) = (2, 0, Some(0xffff)),
        ];
        for change in changes {
            for odd in 0..2 {
                for is_v6 in [false, true] {
                    let icmp = if is_v6 {
                        PROTOCOL_ICMPV6
                    } else {
                        PROTOCOL_ICMP
                    };
                    let content = vec![0xa5; 20 + odd];
                    crosses(&packet(is_v6, PROTOCOL_UDP, udp(&content), change));
                    crosses(&packet(is_v6, PROTOCOL_TCP, tcp(&content), change));
                    crosses(&packet(is_v6, icmp, ping(&content), change));
                }
            }
        }
    }

    #[test]
    fn packets_to_the_client_are_compressed_at_the_proxy() {
        let [client, proxy] = ends();
        let answer = packet(false, PROTOCOL_UDP, udp(b"answer"), |fields| {
            (fields.source, fields.destination) = (fields.destination, fields.source);
            fields.hops = 53;
        });
        assert_eq!(client.compress(&answer), None, "it is not from the client");
        let compressed = proxy.compress(&answer).unwrap();
        assert_eq!(
            compressed[..6],
            [0x10 + KINDS * SENDS_HOPS, 53, 192, 0, 2, 1]
        );
        assert_eq!(client.expand(&compressed).as_deref(), Some(&answer[..]));
    }

    #[test]
    fn a_packet_that_fits_no_rule_stays_as_it_is() {
        let [client, _] = ends();
        let good = packet(false, PROTOCOL_UDP, udp(b"content"), |_| {});
        assert!(client.compress(&good).is_some());
        let changed = |change: fn(&mut Vec<u8>)| {
            let mut packet = good.clone();
            change(&mut packet);
            client.compress(&packet)
        };
        assert_eq!(changed(|p| p[30] ^= 1), None, "a wrong checksum of UDP");
        assert_eq!(changed(|p| p[26..28].fill(0)), None, "no checksum of UDP");
        assert_eq!(changed(|p| p[11] ^= 1), None, "a wrong checksum of IP");
        assert_eq!(changed(|p| p[6] = 0x20), None, "a fragment");
        assert_eq!(changed(|p| p[0] = 0x46), None, "options");
        assert_eq!(changed(|p| p.truncate(20)), None, "no header of UDP");
        let foreign = packet(false, PROTOCOL_UDP, udp(b"content"), |fields| {
            fields.source = OTHER_V4.into();
        });
        assert_eq!(client.compress(&foreign), None, "another's address");
        let gre = packet(false, 47, udp(b"content"), |_| {});
        assert_eq!(client.compress(&gre), None, "another transport");
        let mut urgent = tcp(b"content");
        urgent[13] |= URGENT_FLAG;
        assert_eq!(
            client.compress(&packet(false, PROTOCOL_TCP, urgent, |_| {})),
            None
        );
    }

    #[test]
    fn the_identification_of_a_packet_that_may_not_be_fragmented_is_left_out() {
        let [client, proxy] = ends();
        let mut good = packet(false, PROTOCOL_UDP, udp(b"content"), |_| {});
        let plain = good.clone();
        good[4..6].copy_from_slice(&[0x12, 0x34]);
        good[10..12].fill(0);
        let checksum = !sum(&good[..20]);
        good[10..12].copy_from_slice(&checksum.to_be_bytes());
        let expanded = proxy.expand(&client.compress(&good).unwrap()).unwrap();
        assert_eq!(expanded, plain);
    }

    #[test]
    fn arbitrary_bytes_expand_to_packets_that_fit_or_to_nothing() {
        let without_v6 = HeaderContext::of_proxy(OWN_V4, None);
        let [_, proxy] = ends();
        let mut seed = 7_u64;
        for n in 0..20_000 {
            let mut bytes = Vec::new();
            for _ in 0..n % 70 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                bytes.push((seed >> 40) as u8);
            }
            if let Some(first) = bytes.first_mut() {
                *first = RULE_FIRST + *first % (RULE_END - RULE_FIRST);
            }
            if let Some(packet) = proxy.expand(&bytes) {
                assert!(packet.len() <= bytes.len() + IPV6_HEADER);
                assert!(crate::InnerPacket::parse(&packet).is_ok(), "{bytes:x?}");
            }
            let _ = without_v6.expand(&bytes);
        }
        assert_eq!(proxy.expand(&[]), None);
        assert_eq!(proxy.expand(&[0x45; 40]), None);
    }
}
