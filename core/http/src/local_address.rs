//! Addresses of this machine and of local networks: what a document from the Internet must not lead to.
//!
//! IPv6 forms with an IPv4 address inside (mapped, compatible, NAT64, 6to4) are judged by that address. Networks for
//! documentation and benchmarks are no local networks: laboratories and VPNs carry public names on them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether an address is of this machine or of a local network: loopback, private (RFC 1918), shared (RFC 6598),
/// link-local, unique-local, or of several machines at once.
pub fn is_local_address(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_local_v4(v4),
        IpAddr::V6(v6) => match embedded_v4(v6) {
            Some(v4) => is_local_v4(v4),
            None => is_local_v6(v6),
        },
    }
}

fn is_local_v4(v4: Ipv4Addr) -> bool {
    v4.is_loopback()
        || v4.is_private()
        || v4.is_link_local()
        || v4.is_multicast()
        || v4.is_broadcast()
        // "This network", RFC 1122 §3.2.1.3: Linux connects 0.0.0.0 to itself.
        || v4.octets()[0] == 0
        // Shared address space, RFC 6598.
        || (v4.octets()[0] == 100 && v4.octets()[1] & 0xc0 == 64)
}

fn is_local_v6(v6: Ipv6Addr) -> bool {
    v6.is_loopback()
        || v6.is_unspecified()
        || v6.is_unique_local()
        || v6.is_unicast_link_local()
        || v6.is_multicast()
        // Site-local, RFC 3879: deprecated, and still routed in places.
        || v6.segments()[0] & 0xffc0 == 0xfec0
}

/// The IPv4 address inside an IPv6 one, where the form defines one.
fn embedded_v4(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let v4 = |hi: u16, lo: u16| Some(Ipv4Addr::from((u32::from(hi) << 16) | u32::from(lo)));
    match v6.segments() {
        // Mapped (RFC 4291 §2.5.5.2), translated (RFC 2765), NAT64 (RFC 6052, RFC 8215).
        [0, 0, 0, 0, 0, 0xffff, hi, lo]
        | [0, 0, 0, 0, 0xffff, 0, hi, lo]
        | [0x64, 0xff9b, 0, 0, 0, 0, hi, lo]
        | [0x64, 0xff9b, 1, _, _, _, hi, lo] => v4(hi, lo),
        // Compatible (RFC 4291 §2.5.5.1); :: and ::1 are their own.
        [0, 0, 0, 0, 0, 0, hi, lo] if hi != 0 || lo > 1 => v4(hi, lo),
        // 6to4 (RFC 3056).
        [0x2002, hi, lo, ..] => v4(hi, lo),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_local(text: &str) -> bool {
        is_local_address(text.parse().expect(text))
    }

    #[test]
    fn local_addresses_are_known_in_every_form() {
        for text in [
            "127.0.0.1",
            "127.8.9.1",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "100.127.255.255",
            "224.0.0.251",
            "255.255.255.255",
            "::",
            "::1",
            "fd00::1",
            "fe80::1",
            "fec0::1",
            "ff02::fb",
            "::ffff:127.0.0.1",
            "::10.0.0.1",
            "::ffff:0:192.168.1.1",
            "64:ff9b::192.168.1.1",
            "64:ff9b:1::192.168.1.1",
            "2002:c0a8:101::1",
        ] {
            assert!(is_local(text), "{text}");
        }
    }

    #[test]
    fn public_addresses_are_none() {
        for text in [
            "1.1.1.1",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.2.1",
            "198.18.0.1",
            "2606:4700::1111",
            "64:ff9b::1.1.1.1",
            "::ffff:8.8.8.8",
            "2002:808:808::1",
        ] {
            assert!(!is_local(text), "{text}");
        }
    }
}
