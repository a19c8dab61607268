//! The addresses of clouds' metadata services, also inside IPv6 addresses.
//!
//! A metadata service gives the machine's credentials to any connection from that machine. A proxy
//! in a cloud runs on such a machine, so its clients must never reach the service. Most services
//! are link-local, but some have addresses in private or even public space, which `--allow-private`
//! would open.
//!
//! The IPv4 services are also reached through a translator: an IPv6 address with the service's IPv4
//! address inside. A network may choose its own prefix for that (RFC 6052 §2.2), so every IPv6 address
//! is read at each of the six places where that RFC puts an IPv4 address. A random address matches
//! one of those by chance about once in 60 million.
//!
//! `docs/security.md` has the same table with the sources.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv6Net};

/// Metadata services over IPv4.
const METADATA_V4: [Ipv4Addr; 11] = [
    // AWS, Google, Azure, Oracle, DigitalOcean, OpenStack, IBM, Hetzner, Vultr, Akamai, Yandex, Huawei.
    Ipv4Addr::new(169, 254, 169, 254),
    // Google Kubernetes Engine's metadata server on its node.
    Ipv4Addr::new(169, 254, 169, 252),
    // Credentials of AWS containers: ECS and EKS.
    Ipv4Addr::new(169, 254, 170, 2),
    Ipv4Addr::new(169, 254, 170, 23),
    // Tencent.
    Ipv4Addr::new(169, 254, 0, 23),
    Ipv4Addr::new(169, 254, 10, 10),
    // Scaleway.
    Ipv4Addr::new(169, 254, 42, 42),
    // Alibaba, in shared address space.
    Ipv4Addr::new(100, 100, 100, 200),
    // Volcano Engine, in shared address space.
    Ipv4Addr::new(100, 96, 0, 96),
    // Azure's wire server, in public space: it has the machine's secrets.
    Ipv4Addr::new(168, 63, 129, 16),
    // Oracle Cloud Classic, in the IETF's protocol assignments.
    Ipv4Addr::new(192, 0, 0, 192),
];

/// Metadata services over IPv6, each with its prefix length.
const METADATA_V6: [(Ipv6Addr, u8); 7] = [
    // AWS: metadata at ::254, credentials of EKS at ::23, and more services beside them.
    (Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0), 32),
    // Google.
    (Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254), 128),
    // Oracle.
    (Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe), 128),
    // Scaleway.
    (Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42), 128),
    // Alibaba.
    (Ipv6Addr::new(0xfd00, 0x100, 0, 0, 0, 0, 0x100, 0x200), 128),
    // Akamai (Linode).
    (Ipv6Addr::new(0xfd00, 0xa9fe, 0xa9fe, 0, 0, 0, 0, 1), 128),
    // OpenStack.
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0xa9fe, 0xa9fe), 128),
];

/// Where RFC 6052 §2.2 puts the four bytes of an IPv4 address, for each length of the prefix.
const RFC_6052: [(u8, [usize; 4]); 6] = [
    (32, [4, 5, 6, 7]),
    (40, [5, 6, 7, 9]),
    (48, [6, 7, 9, 10]),
    (56, [7, 9, 10, 11]),
    (64, [9, 10, 11, 12]),
    (96, [12, 13, 14, 15]),
];

/// The table's entry that `address` is, or leads to through a translator or a tunnel.
pub(crate) fn metadata_service(address: IpAddr) -> Option<IpNet> {
    match address {
        IpAddr::V4(v4) => metadata_v4(v4),
        IpAddr::V6(v6) => METADATA_V6
            .iter()
            .filter_map(|(service, prefix)| Ipv6Net::new(*service, *prefix).ok())
            .find(|net| net.contains(&v6))
            .map(IpNet::V6)
            .or_else(|| tunnelled_v4(v6).into_iter().find_map(metadata_v4))
            .or_else(|| translated_v4(v6, 0).find_map(metadata_v4)),
    }
}

fn metadata_v4(v4: Ipv4Addr) -> Option<IpNet> {
    METADATA_V4.contains(&v4).then(|| IpAddr::V4(v4).into())
}

/// The IPv4 addresses that a translator with a prefix of at least `prefix_min` bits would read from
/// an IPv6 address.
pub(crate) fn translated_v4(v6: Ipv6Addr, prefix_min: u8) -> impl Iterator<Item = Ipv4Addr> {
    let bytes = v6.octets();
    RFC_6052
        .into_iter()
        .filter(move |(prefix, _)| *prefix >= prefix_min)
        .map(move |(_, at)| Ipv4Addr::from(at.map(|index| bytes[index])))
}

/// The IPv4 address at the far end of a 6to4 (RFC 3056) or Teredo (RFC 4380 §4) tunnel.
fn tunnelled_v4(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let o = v6.octets();
    match o {
        [0x20, 0x02, a, b, c, d, ..] => Some(Ipv4Addr::new(a, b, c, d)),
        // Teredo inverts the bits of the client's address.
        [0x20, 0x01, 0, 0, _, _, _, _, _, _, _, _, a, b, c, d] => {
            Some(Ipv4Addr::new(!a, !b, !c, !d))
        }
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Every spelling by which an IPv4 address may be reached over IPv6.
    pub(crate) fn ipv6_forms(v4: Ipv4Addr) -> Vec<Ipv6Addr> {
        let [a, b, c, d] = v4.octets();
        let (hi, lo) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        let mut forms = vec![
            // Mapped, compatible, translated.
            Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, hi, lo),
            Ipv6Addr::new(0, 0, 0, 0, 0, 0, hi, lo),
            Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, hi, lo),
            // NAT64, 6to4, ISATAP, Teredo.
            Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, hi, lo),
            Ipv6Addr::new(0x2002, hi, lo, 0, 0, 0, 0, 1),
            Ipv6Addr::new(0x2a00, 1, 2, 3, 0, 0x5efe, hi, lo),
            Ipv6Addr::new(0x2a00, 1, 2, 3, 0x200, 0x5efe, hi, lo),
            Ipv6Addr::new(0x2001, 0, 0x4136, 0xe378, 0x8000, 0x63bf, !hi, !lo),
        ];
        // A network's own NAT64 prefix, of every length: RFC 8215's, unique-local, and global.
        for prefix in [
            Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0),
            Ipv6Addr::new(0x64, 0xff9b, 1, 0xfffe, 0, 0, 0, 0),
            Ipv6Addr::new(0xfd12, 0x3456, 0x789a, 0x1, 0, 0, 0, 0),
            Ipv6Addr::new(0x2a00, 0x1450, 0x4001, 0x64, 0, 0, 0, 0),
        ] {
            for (length, at) in RFC_6052 {
                let mut bytes = prefix.octets();
                bytes[usize::from(length / 8)..].fill(0);
                for (index, byte) in at.into_iter().zip(v4.octets()) {
                    bytes[index] = byte;
                }
                forms.push(Ipv6Addr::from(bytes));
            }
        }
        forms
    }

    /// An address of every service in the tables, in every form.
    pub(crate) fn every_metadata_address() -> Vec<IpAddr> {
        let v4 = METADATA_V4.into_iter().flat_map(|v4| {
            let forms = ipv6_forms(v4).into_iter().map(IpAddr::V6);
            forms.chain([IpAddr::V4(v4)])
        });
        let v6 = METADATA_V6.into_iter().map(|(v6, _)| IpAddr::V6(v6));
        v4.chain(v6).collect()
    }

    #[test]
    fn a_metadata_service_is_recognized_in_every_form() {
        for address in every_metadata_address() {
            assert!(metadata_service(address).is_some(), "{address}");
        }
        for text in ["fd00:ec2::254", "fd00:ec2::23"] {
            assert!(metadata_service(text.parse().unwrap()).is_some(), "{text}");
        }
    }

    #[test]
    fn the_document_has_every_service_of_the_table() {
        let document = include_str!("../../../docs/security.md");
        let v4 = METADATA_V4.into_iter().map(|v4| v4.to_string());
        let v6 = METADATA_V6.into_iter().map(|(v6, prefix)| match prefix {
            128 => v6.to_string(),
            _ => format!("{v6}/{prefix}"),
        });
        for service in v4.chain(v6) {
            assert!(document.contains(&format!("`{service}`")), "{service}");
        }
    }

    #[test]
    fn neighbours_of_metadata_services_are_none() {
        for text in [
            "168.63.129.17",
            "100.100.100.201",
            "fd20:ce::255",
            "2a00:1450:4001::1",
            "2606:4700::1111",
            "64:ff9b::808:808",
        ] {
            assert_eq!(metadata_service(text.parse().unwrap()), None, "{text}");
        }
    }
}
