//! The answer to a packet that is larger than a tunnel carries: its sender then sends smaller ones.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::inner_packet::{InnerPacket, PROTOCOL_ICMP, PROTOCOL_ICMPV6};

const HOPS: u8 = 64; // RFC 1700
/// Bytes of the packet that an ICMP error repeats (RFC 792: 64 bits of the payload; RFC 1812 §4.3.2.3 allows more).
const QUOTED_V4: usize = 20 + 64;
/// RFC 4443 §2.4 (c): as much as fits into the smallest MTU.
const QUOTED_V6: usize = 1280 - 40 - 8;

/// The answer that a packet is larger than `mtu`, from `router`: "fragmentation needed" (RFC 1191) or "packet too big"
/// (RFC 4443 §3.2). `None` where none is sent: to an ICMP error, to a packet of IPv4 that may be fragmented, and to a
/// packet of another family than `router`.
pub fn packet_too_big(bytes: &[u8], router: IpAddr, mtu: u16) -> Option<Vec<u8>> {
    let packet = InnerPacket::parse(bytes).ok()?;
    if is_icmp_error(&packet) {
        return None;
    }
    match (router, packet.source) {
        (IpAddr::V4(router), IpAddr::V4(to)) => {
            let may_fragment = bytes[6] & 0x40 == 0;
            (!may_fragment).then(|| too_big_v4(bytes, router, to, mtu))
        }
        (IpAddr::V6(router), IpAddr::V6(to)) => Some(too_big_v6(bytes, router, to, mtu)),
        _ => None,
    }
}

/// RFC 1122 §3.2.2, RFC 4443 §2.4 (e): no error is an answer to an error.
fn is_icmp_error(packet: &InnerPacket) -> bool {
    match (packet.protocol, packet.icmp_type) {
        (PROTOCOL_ICMP, Some(kind)) => matches!(kind, 3 | 4 | 5 | 11 | 12),
        (PROTOCOL_ICMPV6, Some(kind)) => kind < 128,
        _ => false,
    }
}

fn too_big_v4(bytes: &[u8], from: Ipv4Addr, to: Ipv4Addr, mtu: u16) -> Vec<u8> {
    let quoted = &bytes[..bytes.len().min(QUOTED_V4)];
    let length = (20 + 8 + quoted.len()) as u16;
    let mut answer = vec![0x45, 0];
    answer.extend(length.to_be_bytes());
    answer.extend([0, 0, 0, 0, HOPS, PROTOCOL_ICMP, 0, 0]);
    answer.extend(from.octets());
    answer.extend(to.octets());
    let header_sum = checksum(&[&answer]);
    answer[10..12].copy_from_slice(&header_sum.to_be_bytes());
    // Destination unreachable, fragmentation needed.
    answer.extend([3, 4, 0, 0, 0, 0]);
    answer.extend(mtu.to_be_bytes());
    answer.extend(quoted);
    let sum = checksum(&[&answer[20..]]);
    answer[22..24].copy_from_slice(&sum.to_be_bytes());
    answer
}

fn too_big_v6(bytes: &[u8], from: Ipv6Addr, to: Ipv6Addr, mtu: u16) -> Vec<u8> {
    let quoted = &bytes[..bytes.len().min(QUOTED_V6)];
    let length = (8 + quoted.len()) as u16;
    let mut answer = vec![0x60, 0, 0, 0];
    answer.extend(length.to_be_bytes());
    answer.extend([PROTOCOL_ICMPV6, HOPS]);
    answer.extend(from.octets());
    answer.extend(to.octets());
    answer.extend([2, 0, 0, 0]);
    answer.extend(u32::from(mtu).to_be_bytes());
    answer.extend(quoted);
    // RFC 8200 §8.1: the pseudo-header.
    let tail = [0, 0, 0, PROTOCOL_ICMPV6];
    let pseudo = [
        &answer[8..40],
        &u32::from(length).to_be_bytes()[..],
        &tail[..],
    ]
    .concat();
    let sum = checksum(&[&pseudo, &answer[40..]]);
    answer[42..44].copy_from_slice(&sum.to_be_bytes());
    answer
}

/// The Internet checksum (RFC 1071) of these parts, all but the last of an even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 = words
        .map(|word| u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inner_packet::tests::{udp_v4, udp_v6};

    #[test]
    fn the_answer_is_a_valid_packet_to_the_sender_with_the_mtu() {
        let router = "10.83.0.1".parse().unwrap();
        let answer = packet_too_big(&udp_v4(1_400), router, 1_300).unwrap();
        let parsed = InnerPacket::parse(&answer).unwrap();
        assert_eq!((parsed.source, parsed.icmp_type), (router, Some(3)));
        assert_eq!(parsed.destination.to_string(), "10.83.0.2");
        assert_eq!(answer[26..28], 1_300u16.to_be_bytes());
        assert_eq!(checksum(&[&answer[..20]]), 0);
        assert_eq!(checksum(&[&answer[20..]]), 0);

        let router = "fd00::1".parse().unwrap();
        let answer = packet_too_big(&udp_v6(1_400), router, 1_300).unwrap();
        let parsed = InnerPacket::parse(&answer).unwrap();
        assert_eq!((parsed.source, parsed.icmp_type), (router, Some(2)));
        assert_eq!(answer.len(), 1_280);
        assert_eq!(answer[44..48], 1_300u32.to_be_bytes());
        let length = (answer.len() - 40) as u32;
        let pseudo = [&answer[8..40], &length.to_be_bytes(), &[0, 0, 0, 58]].concat();
        assert_eq!(checksum(&[&pseudo, &answer[40..]]), 0);
    }

    #[test]
    fn an_error_a_divisible_packet_and_another_family_get_no_answer() {
        let router = "10.83.0.1".parse().unwrap();
        let mut error = udp_v4(1_400);
        error[9] = PROTOCOL_ICMP;
        error[20] = 3;
        assert_eq!(packet_too_big(&error, router, 1_300), None);
        let mut divisible = udp_v4(1_400);
        divisible[6] = 0;
        assert_eq!(packet_too_big(&divisible, router, 1_300), None);
        assert_eq!(packet_too_big(&udp_v6(1_400), router, 1_300), None);
    }
}
