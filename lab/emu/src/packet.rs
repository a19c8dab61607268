//! IP packets as the relay sees them: parsing heads, and rewriting addresses and ports.
//!
//! Checksums are adjusted by the changes (RFC 1624) and never recomputed, so that a packet which a
//! link model damaged still looks damaged to its receiver.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Protocol number of ICMP. // IANA
pub const ICMP: u8 = 1;
/// Protocol number of TCP.
pub const TCP: u8 = 6;
/// Protocol number of UDP.
pub const UDP: u8 = 17;
/// Protocol number of ICMP for IPv6.
pub const ICMPV6: u8 = 58;

pub(crate) const V4_HEADER_BYTES: usize = 20;
pub(crate) const V6_HEADER_BYTES: usize = 40;

/// The parsed head of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketHead {
    /// The source address.
    pub source: IpAddr,
    /// The destination address.
    pub destination: IpAddr,
    /// The protocol of the payload.
    pub protocol: u8,
    /// The offset of the payload.
    pub offset: usize,
    /// The ports; for an echo both are its identifier. `None` for other protocols, and for all
    /// fragments except the first.
    pub ports: Option<(u16, u16)>,
}

/// Parses a packet's head; `None` if it is not a complete IP packet.
pub fn head(packet: &[u8]) -> Option<PacketHead> {
    match packet.first()? >> 4 {
        4 => {
            let offset = usize::from(packet[0] & 15) * 4;
            let total = usize::from(word(packet, 2)?);
            if offset < V4_HEADER_BYTES || packet.len() < offset || total != packet.len() {
                return None;
            }
            let source: [u8; 4] = packet[12..16].try_into().ok()?;
            let destination: [u8; 4] = packet[16..20].try_into().ok()?;
            let later_fragment = word(packet, 6)? & 0x1fff != 0;
            let protocol = packet[9];
            Some(PacketHead {
                source: source.into(),
                destination: destination.into(),
                protocol,
                offset,
                ports: if later_fragment {
                    None
                } else {
                    ports(packet, protocol, offset)
                },
            })
        }
        6 => {
            if packet.len() < V6_HEADER_BYTES
                || usize::from(word(packet, 4)?) + V6_HEADER_BYTES != packet.len()
            {
                return None;
            }
            let source: [u8; 16] = packet[8..24].try_into().ok()?;
            let destination: [u8; 16] = packet[24..40].try_into().ok()?;
            let protocol = packet[6];
            Some(PacketHead {
                source: source.into(),
                destination: destination.into(),
                protocol,
                offset: V6_HEADER_BYTES,
                ports: ports(packet, protocol, V6_HEADER_BYTES),
            })
        }
        _ => None,
    }
}

fn ports(packet: &[u8], protocol: u8, offset: usize) -> Option<(u16, u16)> {
    match protocol {
        // The checksum is at 16..18 in TCP and at 6..8 in the others.
        TCP if packet.len() >= offset + 20 => {
            Some((word(packet, offset)?, word(packet, offset + 2)?))
        }
        UDP if packet.len() >= offset + 8 => {
            Some((word(packet, offset)?, word(packet, offset + 2)?))
        }
        ICMP if matches!(packet.get(offset)?, 0 | 8) => echo(packet, offset),
        ICMPV6 if matches!(packet.get(offset)?, 128 | 129) => echo(packet, offset),
        _ => None,
    }
}

fn echo(packet: &[u8], offset: usize) -> Option<(u16, u16)> {
    packet.get(offset + 7)?;
    let id = word(packet, offset + 4)?;
    Some((id, id))
}

pub(crate) fn word(packet: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*packet.get(at)?, *packet.get(at + 1)?]))
}

pub(crate) fn put(packet: &mut [u8], at: usize, value: u16) {
    packet[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// The side of a packet: its sender or its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketEnd {
    /// The address of the sender.
    Source,
    /// The address of the receiver.
    Destination,
}

/// Replaces the address and port on one side of an IPv4 packet with ports.
pub fn rewrite_v4(
    packet: &mut [u8],
    head: &PacketHead,
    side: PacketEnd,
    address: Ipv4Addr,
    port: u16,
) {
    let at = if side == PacketEnd::Source { 12 } else { 16 };
    let old: [u8; 4] = [packet[at], packet[at + 1], packet[at + 2], packet[at + 3]];
    packet[at..at + 4].copy_from_slice(&address.octets());
    let header = word(packet, 10).unwrap_or(0);
    put(packet, 10, adjusted(header, &old, &address.octets()));
    if matches!(head.protocol, TCP | UDP) {
        adjust_inner(packet, head.protocol, head.offset, &old, &address.octets());
    }
    rewrite_port(packet, head.protocol, head.offset, side, port);
}

fn rewrite_port(packet: &mut [u8], protocol: u8, offset: usize, side: PacketEnd, port: u16) {
    let at = match (protocol, side) {
        (ICMP | ICMPV6, _) => offset + 4,
        (_, PacketEnd::Source) => offset,
        (_, PacketEnd::Destination) => offset + 2,
    };
    let old = [packet[at], packet[at + 1]];
    put(packet, at, port);
    adjust_inner(packet, protocol, offset, &old, &port.to_be_bytes());
}

/// Adjusts the checksum of the inner protocol by the removed and added bytes.
fn adjust_inner(packet: &mut [u8], protocol: u8, offset: usize, old: &[u8], new: &[u8]) {
    let at = offset
        + match protocol {
            TCP => 16,
            UDP => 6,
            _ => 2,
        };
    let Some(sum) = word(packet, at) else { return };
    if protocol == UDP && sum == 0 {
        return; // The sender uses no checksum.
    }
    let sum = adjusted(sum, old, new);
    put(
        packet,
        at,
        if protocol == UDP && sum == 0 {
            0xffff
        } else {
            sum
        },
    );
}

/// A checksum after `old` was replaced by `new` in the covered bytes. // RFC 1624, equation 3
pub(crate) fn adjusted(sum: u16, old: &[u8], new: &[u8]) -> u16 {
    let words = |bytes: &[u8]| -> Vec<u16> {
        bytes
            .chunks(2)
            .map(|w| u16::from_be_bytes([w[0], w.get(1).copied().unwrap_or(0)]))
            .collect()
    };
    let mut total = u32::from(!sum);
    total += words(old).into_iter().map(|w| u32::from(!w)).sum::<u32>();
    total += words(new).into_iter().map(u32::from).sum::<u32>();
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    !(total as u16)
}

/// Translates an IPv6 packet with ports to IPv4, as in a NAT64. // RFC 7915 §5.1
pub fn to_v4(
    packet: &[u8],
    head: &PacketHead,
    source: (Ipv4Addr, u16),
    destination: Ipv4Addr,
) -> Option<Vec<u8>> {
    let inner = &packet[V6_HEADER_BYTES..];
    let protocol = if head.protocol == ICMPV6 {
        ICMP
    } else {
        head.protocol
    };
    let total = u16::try_from(V4_HEADER_BYTES + inner.len()).ok()?;
    let mut out = Vec::with_capacity(usize::from(total));
    out.extend([0x45, 0]);
    out.extend(total.to_be_bytes());
    out.extend([0, 0, 0x40, 0, packet[7], protocol, 0, 0]); // never fragment
    out.extend(source.0.octets());
    out.extend(destination.octets());
    let sum = adjusted(0xffff, &[], &out);
    put(&mut out, 10, sum);
    out.extend(inner);
    if protocol == ICMP {
        let kind = if inner[0] == 128 { 8 } else { 0 };
        // ICMPv6 covers a pseudo-header, ICMP does not.
        let mut covered = packet[8..40].to_vec();
        covered.extend((inner.len() as u32).to_be_bytes());
        covered.extend([0, 0, 0, ICMPV6, inner[0], inner[1]]);
        out[V4_HEADER_BYTES] = kind;
        adjust_inner(&mut out, ICMP, V4_HEADER_BYTES, &covered, &[kind, inner[1]]);
    } else {
        adjust_inner(&mut out, protocol, V4_HEADER_BYTES, &packet[8..40], &{
            let mut addresses = source.0.octets().to_vec();
            addresses.extend(destination.octets());
            addresses
        });
    }
    rewrite_port(
        &mut out,
        protocol,
        V4_HEADER_BYTES,
        PacketEnd::Source,
        source.1,
    );
    Some(out)
}

/// Translates an IPv4 packet with ports to IPv6, as in a NAT64. // RFC 7915 §4.1
pub fn to_v6(
    packet: &[u8],
    head: &PacketHead,
    source: Ipv6Addr,
    destination: (Ipv6Addr, u16),
) -> Option<Vec<u8>> {
    let inner = &packet[head.offset..];
    let protocol = if head.protocol == ICMP {
        ICMPV6
    } else {
        head.protocol
    };
    if protocol == UDP && word(inner, 6) == Some(0) {
        return None; // IPv6 has no UDP without a checksum.
    }
    let mut out = Vec::with_capacity(V6_HEADER_BYTES + inner.len());
    out.extend([0x60, 0, 0, 0]);
    out.extend(u16::try_from(inner.len()).ok()?.to_be_bytes());
    out.extend([protocol, packet[8]]);
    out.extend(source.octets());
    out.extend(destination.0.octets());
    out.extend(inner);
    let addresses = out[8..40].to_vec();
    if protocol == ICMPV6 {
        let kind = if inner[0] == 8 { 128 } else { 129 };
        let mut covered = addresses;
        covered.extend((inner.len() as u32).to_be_bytes());
        covered.extend([0, 0, 0, ICMPV6, kind, inner[1]]);
        out[V6_HEADER_BYTES] = kind;
        adjust_inner(
            &mut out,
            ICMPV6,
            V6_HEADER_BYTES,
            &[inner[0], inner[1]],
            &covered,
        );
    } else {
        adjust_inner(
            &mut out,
            protocol,
            V6_HEADER_BYTES,
            &packet[12..20],
            &addresses,
        );
    }
    rewrite_port(
        &mut out,
        protocol,
        V6_HEADER_BYTES,
        PacketEnd::Destination,
        destination.1,
    );
    Some(out)
}

/// The ICMP error "too big, at most `mtu`" to the sender of `packet`, from `router`, which is of
/// the same address family. // RFC 792 (RFC 1191 §4), RFC 4443 §3.2
pub fn too_big(packet: &[u8], head: &PacketHead, router: IpAddr, mtu: u16) -> Option<Vec<u8>> {
    match (head.source, router) {
        (IpAddr::V4(to), IpAddr::V4(router)) => {
            let quoted = &packet[..packet.len().min(head.offset + 8)];
            let total = (V4_HEADER_BYTES + 8 + quoted.len()) as u16;
            let mut out = vec![0x45, 0];
            out.extend(total.to_be_bytes());
            out.extend([0, 0, 0, 0, 64, ICMP, 0, 0]);
            out.extend(router.octets());
            out.extend(to.octets());
            let sum = adjusted(0xffff, &[], &out);
            put(&mut out, 10, sum);
            out.extend([3, 4, 0, 0, 0, 0]);
            out.extend(mtu.to_be_bytes());
            out.extend(quoted);
            let sum = adjusted(0xffff, &[], &out[V4_HEADER_BYTES..]);
            put(&mut out, V4_HEADER_BYTES + 2, sum);
            Some(out)
        }
        (IpAddr::V6(to), IpAddr::V6(router)) => {
            let quoted = &packet[..packet.len().min(1232)];
            let length = (8 + quoted.len()) as u16;
            let mut out = vec![0x60, 0, 0, 0];
            out.extend(length.to_be_bytes());
            out.extend([ICMPV6, 64]);
            out.extend(router.octets());
            out.extend(to.octets());
            out.extend([2, 0, 0, 0, 0, 0]);
            out.extend(mtu.to_be_bytes());
            out.extend(quoted);
            let mut covered = out[8..40].to_vec();
            covered.extend(u32::from(length).to_be_bytes());
            covered.extend([0, 0, 0, ICMPV6]);
            covered.extend(&out[V6_HEADER_BYTES..]);
            let sum = adjusted(0xffff, &[], &covered);
            put(&mut out, V6_HEADER_BYTES + 2, sum);
            Some(out)
        }
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Whether every checksum of a packet is right.
    pub(crate) fn sums_up(packet: &[u8]) -> bool {
        let head = head(packet).expect("a packet");
        let inner = &packet[head.offset..];
        let mut covered = Vec::new();
        match (head.source, head.destination) {
            (IpAddr::V4(s), IpAddr::V4(d)) if head.protocol != ICMP => {
                covered.extend(s.octets());
                covered.extend(d.octets());
            }
            (IpAddr::V6(s), IpAddr::V6(d)) => {
                covered.extend(s.octets());
                covered.extend(d.octets());
            }
            _ => {}
        }
        if !covered.is_empty() {
            covered.extend((inner.len() as u32).to_be_bytes());
            covered.extend([0, 0, 0, head.protocol]);
        }
        covered.extend(inner);
        let header_right =
            packet[0] >> 4 == 6 || adjusted(0xffff, &[], &packet[..head.offset]) == 0;
        header_right && adjusted(0xffff, &[], &covered) == 0
    }

    /// A valid packet from `source` to `destination`, both IPv4 with ports.
    pub(crate) fn v4(
        protocol: u8,
        source: (Ipv4Addr, u16),
        destination: (Ipv4Addr, u16),
    ) -> Vec<u8> {
        let inner = match protocol {
            ICMP => {
                let mut inner = vec![8, 0, 0, 0];
                inner.extend(source.1.to_be_bytes());
                inner.extend([0, 1, 1, 2, 3]);
                inner
            }
            _ => {
                let mut inner = Vec::new();
                inner.extend(source.1.to_be_bytes());
                inner.extend(destination.1.to_be_bytes());
                inner.extend([0; 16]);
                inner.extend([7, 8, 9]);
                inner
            }
        };
        let mut out = vec![0x45, 0];
        out.extend(((20 + inner.len()) as u16).to_be_bytes());
        out.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
        out.extend(source.0.octets());
        out.extend(destination.0.octets());
        let sum = adjusted(0xffff, &[], &out);
        put(&mut out, 10, sum);
        out.extend(&inner);
        let mut covered = if protocol == ICMP {
            Vec::new()
        } else {
            out[12..20].to_vec()
        };
        if protocol != ICMP {
            covered.extend((inner.len() as u32).to_be_bytes());
            covered.extend([0, 0, 0, protocol]);
        }
        covered.extend(&inner);
        let sum = adjusted(0xffff, &[], &covered);
        let at = 20
            + match protocol {
                TCP => 16,
                UDP => 6,
                _ => 2,
            };
        put(&mut out, at, sum);
        out
    }

    const A: Ipv4Addr = Ipv4Addr::new(10, 64, 1, 2);
    const B: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 20);

    #[test]
    fn rewritten_packets_have_right_checksums() {
        for protocol in [TCP, UDP, ICMP] {
            let mut packet = v4(protocol, (A, 5000), (B, 80));
            assert!(sums_up(&packet), "{protocol}");
            let first = head(&packet).unwrap();
            rewrite_v4(
                &mut packet,
                &first,
                PacketEnd::Source,
                Ipv4Addr::new(198, 18, 3, 250),
                20_001,
            );
            assert!(sums_up(&packet), "{protocol}");
            assert_eq!(head(&packet).unwrap().ports.unwrap().0, 20_001);
        }
    }

    #[test]
    fn a_damaged_packet_stays_damaged_through_a_nat() {
        let mut packet = v4(UDP, (A, 5000), (B, 80));
        packet[30] ^= 4;
        let first = head(&packet).unwrap();
        rewrite_v4(&mut packet, &first, PacketEnd::Source, B, 1);
        assert!(!sums_up(&packet));
    }

    #[test]
    fn packets_cross_a_nat64_both_ways_with_right_checksums() {
        let (device, far) = (
            "2001:db8:1:1::2".parse().unwrap(),
            crate::plan::through_nat64(B),
        );
        for protocol in [TCP, UDP, ICMP] {
            let inward = v4(protocol, (B, 80), (A, 20_000));
            let six = to_v6(&inward, &head(&inward).unwrap(), far, (device, 5000)).unwrap();
            assert!(sums_up(&six), "{protocol}");
            let mut at = head(&six).unwrap();
            assert_eq!(at.ports.unwrap().1, 5000);
            at.ports = None;
            let four = to_v4(&six, &at, (A, 777), B).unwrap();
            assert!(sums_up(&four), "{protocol}");
        }
    }

    #[test]
    fn what_is_not_a_whole_packet_has_no_head() {
        let packet = v4(TCP, (A, 1), (B, 2));
        for length in 0..packet.len() {
            assert_eq!(head(&packet[..length]), None);
        }
        assert_eq!(head(&[0x60; 39]), None);
        assert_eq!(head(&[0xff; 100]), None);
    }

    #[test]
    fn too_big_is_a_right_packet_to_the_sender() {
        let packet = v4(TCP, (A, 1), (B, 2));
        let told = too_big(&packet, &head(&packet).unwrap(), B.into(), 1400).unwrap();
        assert_eq!(head(&told).unwrap().destination, IpAddr::V4(A));
        assert_eq!(adjusted(0xffff, &[], &told[20..]), 0);
        let six = to_v6(
            &packet,
            &head(&packet).unwrap(),
            crate::plan::PROXY_V6,
            (crate::plan::ORIGIN_V6, 9),
        );
        let six = six.unwrap();
        let told = too_big(
            &six,
            &head(&six).unwrap(),
            crate::plan::ORIGIN_V6.into(),
            1400,
        )
        .unwrap();
        assert!(sums_up(&told));
    }
}
