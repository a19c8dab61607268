//! Translation of ICMP errors in a NAT or a NAT64. An error quotes the packet that caused it, and
//! the quoted addresses and port identify the mapping.
//!
//! ```text
//!  outer: router → NAT's address │ type, code, MTU │ quoted: NAT's address:port → far end
//!                     ▼ inward                                   ▼
//!  outer: router → device        │                 │ quoted: device:port → far end
//! ```
//!
//! Without them a device behind a NAT would learn neither that a port is closed nor that its
//! packets are too big. Checksums in the quoted part are adjusted as far as they were quoted.

use crate::packet::{
    self, ICMP, ICMPV6, PacketEnd, PacketHead, UDP, V4_HEADER_BYTES, V6_HEADER_BYTES, adjusted,
    put, word,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes before the quoted packet.
const ICMP_HEADER_BYTES: usize = 8;
/// The least bytes quoted of a packet's payload: ports, and UDP's length and checksum. // RFC 792
const QUOTED_BYTES_MIN: usize = 8;
/// The growth of a header in the translation from IPv4 to IPv6.
const GROWTH: u16 = (V6_HEADER_BYTES - V4_HEADER_BYTES) as u16;

/// The answer to an echo request: with swapped addresses and the other type.
pub(crate) fn echo_reply(packet: &[u8], head: &PacketHead) -> Option<Vec<u8>> {
    let (request, reply) = match head.protocol {
        ICMP => (8, 0),
        ICMPV6 => (128, 129),
        _ => return None,
    };
    let at = head.offset;
    if *packet.get(at)? != request || packet.len() < at + ICMP_HEADER_BYTES {
        return None;
    }
    let mut out = packet.to_vec();
    // Checksums do not depend on the order of the words that they cover.
    let (source, bytes) = match head.source {
        IpAddr::V4(_) => (12, 4),
        IpAddr::V6(_) => (8, 16),
    };
    let (first, second) = out[source..].split_at_mut(bytes);
    first.swap_with_slice(&mut second[..bytes]);
    out[at] = reply;
    let sum = word(&out, at + 2)?;
    put(&mut out, at + 2, adjusted(sum, &[request, 0], &[reply, 0]));
    Some(out)
}

/// The packet that an error quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuotedPacket {
    /// The offset of the quoted packet.
    pub(crate) at: usize,
    /// The sender of the quoted packet.
    pub(crate) source: IpAddr,
    /// The receiver of the quoted packet.
    pub(crate) destination: IpAddr,
    /// The protocol of the quoted packet.
    pub(crate) protocol: u8,
    /// The offset of the quoted packet's payload.
    pub(crate) inner: usize,
    /// Source and destination port.
    pub(crate) ports: (u16, u16),
}

/// The packet that an error quotes; `None` if `packet` is no error, or quotes too little.
pub(crate) fn quote(packet: &[u8], head: &PacketHead) -> Option<QuotedPacket> {
    let kind = *packet.get(head.offset)?;
    let error = match head.protocol {
        ICMP => matches!(kind, 3 | 11 | 12),
        ICMPV6 => matches!(kind, 1..=4),
        _ => false,
    };
    if !error {
        return None;
    }
    let at = head.offset + ICMP_HEADER_BYTES;
    let quoted = packet.get(at..)?;
    let (source, destination, protocol, offset): (IpAddr, IpAddr, u8, usize) =
        match quoted.first()? >> 4 {
            4 if quoted.len() >= V4_HEADER_BYTES => {
                let source: [u8; 4] = quoted[12..16].try_into().ok()?;
                let destination: [u8; 4] = quoted[16..20].try_into().ok()?;
                let offset = usize::from(quoted[0] & 15) * 4;
                (source.into(), destination.into(), quoted[9], offset)
            }
            6 if quoted.len() >= V6_HEADER_BYTES => {
                let source: [u8; 16] = quoted[8..24].try_into().ok()?;
                let destination: [u8; 16] = quoted[24..40].try_into().ok()?;
                (
                    source.into(),
                    destination.into(),
                    quoted[6],
                    V6_HEADER_BYTES,
                )
            }
            _ => return None,
        };
    if offset < V4_HEADER_BYTES
        || source.is_ipv4() != head.source.is_ipv4()
        || quoted.len() < offset + QUOTED_BYTES_MIN
        || !matches!(protocol, packet::TCP | UDP)
    {
        return None;
    }
    let inner = at + offset;
    Some(QuotedPacket {
        at,
        source,
        destination,
        protocol,
        inner,
        ports: (word(packet, inner)?, word(packet, inner + 2)?),
    })
}

/// Replaces the receiver or the sender (`outer`) of an IPv4 error, and the address and port on one
/// side of its quoted packet.
pub(crate) fn rewrite_v4(
    packet: &mut [u8],
    head: &PacketHead,
    outer: (PacketEnd, Ipv4Addr),
    quote: &QuotedPacket,
    quoted: (PacketEnd, Ipv4Addr, u16),
) {
    // No ICMP checksum covers the outer addresses.
    let at = if outer.0 == PacketEnd::Source { 12 } else { 16 };
    replace(packet, at, &outer.1.octets(), &[10]);
    let sum = head.offset + 2;
    let (side, address, port) = quoted;
    let at = quote.at + if side == PacketEnd::Source { 12 } else { 16 };
    let mut sums = vec![quote.at + 10];
    let inner_sum = inner_sum(packet, quote);
    sums.extend(inner_sum);
    replace_quoted(packet, at, &address.octets(), &sums, sum);
    let at = quote.inner + if side == PacketEnd::Source { 0 } else { 2 };
    let sums: Vec<usize> = inner_sum.into_iter().collect();
    replace_quoted(packet, at, &port.to_be_bytes(), &sums, sum);
}

/// The offset of the quoted checksum, if it was quoted and is in use.
fn inner_sum(packet: &[u8], quote: &QuotedPacket) -> Option<usize> {
    let at = quote.inner + if quote.protocol == UDP { 6 } else { 16 };
    let sum = word(packet, at)?;
    (quote.protocol != UDP || sum != 0).then_some(at)
}

/// Replaces bytes and adjusts the checksums at `sums` that cover them.
fn replace(packet: &mut [u8], at: usize, new: &[u8], sums: &[usize]) {
    let old = packet[at..at + new.len()].to_vec();
    packet[at..at + new.len()].copy_from_slice(new);
    for sum in sums {
        if let Some(value) = word(packet, *sum) {
            put(packet, *sum, adjusted(value, &old, new));
        }
    }
}

/// Replaces bytes within a quoted packet. The error's own checksum covers these bytes and the
/// quoted checksums.
fn replace_quoted(packet: &mut [u8], at: usize, new: &[u8], sums: &[usize], own: usize) {
    let before: Vec<u16> = sums.iter().filter_map(|sum| word(packet, *sum)).collect();
    let mut all = sums.to_vec();
    all.push(own);
    replace(packet, at, new, &all);
    for (sum, before) in std::iter::zip(sums, before) {
        let after = word(packet, *sum).unwrap_or(before);
        let value = word(packet, own).unwrap_or(0);
        let value = adjusted(value, &before.to_be_bytes(), &after.to_be_bytes());
        put(packet, own, value);
    }
}

/// Translates an IPv4 error to IPv6 as in a NAT64; `None` if IPv6 has no equivalent. // RFC 7915
/// §4.2
pub(crate) fn to_v6(
    packet: &[u8],
    head: &PacketHead,
    quote: &QuotedPacket,
    outer: (Ipv6Addr, Ipv6Addr),
    quoted: (Ipv6Addr, u16, Ipv6Addr),
) -> Option<Vec<u8>> {
    let (kind, code) = (packet[head.offset], packet[head.offset + 1]);
    let (kind, code, value) = match (kind, code) {
        (3, 2) => (4, 1, 6),
        (3, 3) => (1, 4, 0),
        (3, 4) => {
            let mtu = word(packet, head.offset + 6)?;
            (2, 0, u32::from(mtu.saturating_add(GROWTH)).max(1280))
        }
        (3, 9 | 10 | 13 | 15) => (1, 1, 0),
        (3, _) => (1, 0, 0),
        (11, code) => (3, code, 0),
        _ => return None,
    };
    let rest = &packet[quote.inner..];
    let length = word(packet, quote.at + 2)?.saturating_sub((quote.inner - quote.at) as u16);
    let mut body = vec![kind, code, 0, 0];
    body.extend(u32::to_be_bytes(value));
    let mut about = vec![0x60, 0, 0, 0];
    about.extend(length.to_be_bytes());
    about.extend([quote.protocol, packet[quote.at + 8]]);
    about.extend(quoted.0.octets());
    about.extend(quoted.2.octets());
    body.extend(&about);
    body.extend(rest);
    let port_at = ICMP_HEADER_BYTES + V6_HEADER_BYTES;
    body[port_at..port_at + 2].copy_from_slice(&quoted.1.to_be_bytes());
    Some(v6_error(body, packet[8], outer))
}

/// Translates an IPv6 error to IPv4 as in a NAT64; `None` if IPv4 has no equivalent. // RFC 7915
/// §5.2
pub(crate) fn to_v4(
    packet: &[u8],
    head: &PacketHead,
    quote: &QuotedPacket,
    outer: (Ipv4Addr, Ipv4Addr),
    quoted: (Ipv4Addr, Ipv4Addr, u16),
) -> Option<Vec<u8>> {
    let (kind, code) = (packet[head.offset], packet[head.offset + 1]);
    let (kind, code, mtu) = match (kind, code) {
        (1, 4) => (3, 3, 0),
        (1, 1) => (3, 10, 0),
        (1, _) => (3, 1, 0),
        (2, _) => (3, 4, word(packet, head.offset + 6)?.saturating_sub(GROWTH)),
        (3, code) => (11, code, 0),
        _ => return None,
    };
    let rest = &packet[quote.inner..];
    let length = word(packet, quote.at + 4)?.saturating_add(V4_HEADER_BYTES as u16);
    let mut body = vec![kind, code, 0, 0, 0, 0];
    body.extend(mtu.to_be_bytes());
    body.extend(v4_header(
        length,
        quote.protocol,
        packet[quote.at + 7],
        quoted.0,
        quoted.1,
    ));
    body.extend(rest);
    let port_at = ICMP_HEADER_BYTES + V4_HEADER_BYTES + 2;
    body[port_at..port_at + 2].copy_from_slice(&quoted.2.to_be_bytes());
    let sum = adjusted(0xffff, &[], &body);
    put(&mut body, 2, sum);
    let total = u16::try_from(V4_HEADER_BYTES + body.len()).ok()?;
    let mut out = v4_header(total, ICMP, packet[7], outer.0, outer.1);
    out.extend(body);
    Some(out)
}

fn v4_header(total: u16, protocol: u8, hops: u8, from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let mut out = vec![0x45, 0];
    out.extend(total.to_be_bytes());
    out.extend([0, 0, 0x40, 0, hops, protocol, 0, 0]);
    out.extend(from.octets());
    out.extend(to.octets());
    let sum = adjusted(0xffff, &[], &out);
    put(&mut out, 10, sum);
    out
}

fn v6_error(mut body: Vec<u8>, hops: u8, (from, to): (Ipv6Addr, Ipv6Addr)) -> Vec<u8> {
    // Not larger than what every path carries. // RFC 4443 §2.4
    body.truncate(1280 - V6_HEADER_BYTES);
    let mut out = vec![0x60, 0, 0, 0];
    out.extend((body.len() as u16).to_be_bytes());
    out.extend([ICMPV6, hops]);
    out.extend(from.octets());
    out.extend(to.octets());
    let mut covered = out[8..40].to_vec();
    covered.extend((body.len() as u32).to_be_bytes());
    covered.extend([0, 0, 0, ICMPV6]);
    covered.extend(&body);
    let sum = adjusted(0xffff, &[], &covered);
    put(&mut body, 2, sum);
    out.extend(body);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::tests::{sums_up, v4};
    use crate::packet::{head, too_big};
    use crate::plan;

    const DEVICE: Ipv4Addr = Ipv4Addr::new(10, 64, 1, 2);
    const NAT: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
    const FAR: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 20);

    /// The error "port unreachable" about `packet`, from its receiver.
    fn port_unreachable(packet: &[u8]) -> Vec<u8> {
        let about = head(packet).unwrap();
        let mut told = too_big(packet, &about, about.destination, 0).unwrap();
        put(&mut told, V4_HEADER_BYTES, 0x0303);
        let sum = word(&told, V4_HEADER_BYTES + 2).unwrap();
        let sum = adjusted(sum, &[3, 4], &[3, 3]);
        put(&mut told, V4_HEADER_BYTES + 2, sum);
        told
    }

    #[test]
    fn an_echo_comes_back_from_whom_it_was_for_with_right_checksums() {
        let far_v6 = (plan::PROXY_V6, 0);
        let four = v4(ICMP, (DEVICE, 77), (FAR, 0));
        let six = crate::packet::to_v6(&four, &head(&four).unwrap(), plan::ORIGIN_V6, far_v6);
        let six = six.unwrap();
        for asked in [four, six] {
            let about = head(&asked).unwrap();
            let answer = echo_reply(&asked, &about).unwrap();
            assert!(sums_up(&answer));
            let at = head(&answer).unwrap();
            assert_eq!(
                (at.source, at.destination),
                (about.destination, about.source)
            );
            assert_eq!(answer[at.offset + 4..], asked[at.offset + 4..]);
            assert_eq!(echo_reply(&answer, &at), None, "an answer is no question");
        }
        let udp = v4(UDP, (DEVICE, 77), (FAR, 9));
        assert_eq!(echo_reply(&udp, &head(&udp).unwrap()), None);
    }

    #[test]
    fn an_error_comes_back_to_who_sent_what_it_quotes_with_right_checksums() {
        let mut told = port_unreachable(&v4(UDP, (NAT, 20_000), (FAR, 443)));
        let at = head(&told).unwrap();
        let about = quote(&told, &at).unwrap();
        assert_eq!((about.source, about.ports), (NAT.into(), (20_000, 443)));
        rewrite_v4(
            &mut told,
            &at,
            (PacketEnd::Destination, DEVICE),
            &about,
            (PacketEnd::Source, DEVICE, 5000),
        );
        assert!(sums_up(&told));
        let at = head(&told).unwrap();
        assert_eq!(at.destination, IpAddr::V4(DEVICE));
        let about = quote(&told, &at).unwrap();
        assert_eq!((about.source, about.ports), (DEVICE.into(), (5000, 443)));
        // The quoted part is what the device sent, including its checksums.
        let sent = v4(UDP, (DEVICE, 5000), (FAR, 443));
        assert_eq!(told[about.at..], sent[..told.len() - about.at]);
    }

    #[test]
    fn errors_cross_a_nat64_both_ways() {
        let device: Ipv6Addr = "2001:db8:1:1::2".parse().unwrap();
        let far = plan::through_nat64(FAR);
        let sent = v4(UDP, (NAT, 20_000), (FAR, 443));
        let big = too_big(&sent, &head(&sent).unwrap(), FAR.into(), 1400).unwrap();
        for (told, kind, value) in [(port_unreachable(&sent), [1, 4], 0), (big, [2, 0], 1420)] {
            let at = head(&told).unwrap();
            let about = quote(&told, &at).unwrap();
            let six = to_v6(&told, &at, &about, (far, device), (device, 5000, far)).unwrap();
            assert!(sums_up(&six));
            assert_eq!(six[40..42], kind);
            assert_eq!(word(&six, 46), Some(value));
            let at = head(&six).unwrap();
            let about = quote(&six, &at).unwrap();
            assert_eq!(
                (about.source, about.destination),
                (device.into(), far.into())
            );
            assert_eq!(about.ports, (5000, 443));
            // The device's own error about a received packet, outward.
            let four = to_v4(&six, &at, &about, (NAT, FAR), (NAT, FAR, 443)).unwrap();
            assert!(sums_up(&four));
            assert_eq!(
                quote(&four, &head(&four).unwrap()).unwrap().destination,
                FAR
            );
        }
    }

    #[test]
    fn what_quotes_too_little_or_is_no_error_quotes_nothing() {
        let echo = v4(ICMP, (DEVICE, 7), (FAR, 7));
        assert_eq!(quote(&echo, &head(&echo).unwrap()), None);
        let told = port_unreachable(&v4(UDP, (NAT, 20_000), (FAR, 443)));
        for length in V4_HEADER_BYTES..told.len() {
            let mut short = told[..length].to_vec();
            put(&mut short, 2, length as u16);
            assert_eq!(quote(&short, &head(&short).unwrap()), None, "{length}");
        }
    }
}
