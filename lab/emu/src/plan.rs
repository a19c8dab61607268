//! The addresses in the lab's internet.
//!
//! ```text
//! device, link i, address number g     10.(64+i).(g+1).2/24        2001:db8:(i+1):(g+1)::2/64
//! its NAT seen from outside            198.18+.i.(g+1)
//! proxy                                203.0.113.10                2001:db8:ffff::10
//! origin                               203.0.113.20                2001:db8:ffff::20
//! IPv4 through NAT64                                               64:ff9b::/96
//! ```
//!
//! Every attachment has another subnet and another NAT, like another access point. All blocks are
//! reserved for documentation, benchmarks and private use, so no real host has these addresses.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The name of the origin, in addresses and in its certificate.
pub const ORIGIN_NAME: &str = "origin";
/// The proxy's IPv4 address.
pub const PROXY_V4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
/// The proxy's IPv6 address.
pub const PROXY_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 0x10);
/// The UDP port of the proxy, and that of its second node.
pub const PROXY_PORTS: [u16; 2] = [4433, 4434];
/// The origin's IPv4 address.
pub const ORIGIN_V4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 20);
/// The origin's IPv6 address.
pub const ORIGIN_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 0x20);
/// The port at the origin's address on which the captive portals of all links answer. Web servers that run at the origin
/// need another.
pub const PORTAL_PORT: u16 = 8480;
/// The port at the origin's address of the HTTP proxy that some networks have.
pub const HTTP_PROXY_PORT: u16 = 3128;
/// The hosts of the internet, with the names by which programs in the lab know them.
const HOSTS: [(Ipv4Addr, Ipv6Addr, &str); 2] = [
    (PROXY_V4, PROXY_V6, "proxy"),
    (ORIGIN_V4, ORIGIN_V6, ORIGIN_NAME),
];

/// The address that a host's name or literal IPv4 address stands for; `None` for other names.
pub(crate) fn address_of(name: &str) -> Option<Ipv4Addr> {
    let named = HOSTS.iter().find(|(.., known)| *known == name);
    named.map_or_else(|| name.parse().ok(), |(v4, ..)| Some(*v4))
}

/// The content of `/etc/hosts` for programs in the lab: names for both address families of both
/// hosts, and the machine's `own` name, which some programs resolve at their start and wait for
/// (Firefox, to lock its profile).
pub(crate) fn hosts(own: &str) -> String {
    let mut text = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
    for (v4, v6, name) in HOSTS {
        text += &format!("{v4} {name}\n{v6} {name}\n");
    }
    if !own.is_empty() && HOSTS.iter().all(|(.., name)| *name != own) {
        text += &format!("127.0.0.1 {own}\n");
    }
    text
}

/// The prefix of IPv4 addresses behind a NAT64. // RFC 6052 §2.1
pub const NAT64_PREFIX: Ipv6Addr = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0);

/// The number of addresses of one link before they repeat.
const ADDRESSES: u32 = 250;

/// The addresses of a link with its address number `number`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkAddresses {
    /// The device's IPv4 address, in a /24.
    pub v4: Ipv4Addr,
    /// The IPv4 gateway of the link.
    pub gateway_v4: Ipv4Addr,
    /// The device's IPv6 address, in a /64.
    pub v6: Ipv6Addr,
    /// The IPv6 gateway of the link.
    pub gateway_v6: Ipv6Addr,
    /// The external address of the NAT.
    pub public: Ipv4Addr,
}

/// The addresses of link `link` with its address number `number`.
pub fn link_addresses(link: usize, number: u32) -> LinkAddresses {
    let (i, g) = (link as u8, (number % ADDRESSES) as u8 + 1);
    let v6 = |host| Ipv6Addr::new(0x2001, 0xdb8, u16::from(i) + 1, u16::from(g), 0, 0, 0, host);
    LinkAddresses {
        v4: Ipv4Addr::new(10, 64 + i, g, 2),
        gateway_v4: Ipv4Addr::new(10, 64 + i, g, 1),
        v6: v6(2),
        gateway_v6: v6(1),
        public: Ipv4Addr::new(198, 18, i, g),
    }
}

/// The IPv6 address by which a device behind a NAT64 reaches `v4`.
pub fn through_nat64(v4: Ipv4Addr) -> Ipv6Addr {
    let [a, b, c, d] = v4.octets().map(u16::from);
    let mut words = NAT64_PREFIX.segments();
    words[6] = a << 8 | b;
    words[7] = c << 8 | d;
    Ipv6Addr::from(words)
}

/// The IPv4 address for a NAT64 address; `None` for other addresses.
pub fn behind_nat64(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let words = v6.segments();
    (words[..6] == NAT64_PREFIX.segments()[..6]).then(|| {
        let [.., a, b] = words;
        Ipv4Addr::new((a >> 8) as u8, a as u8, (b >> 8) as u8, b as u8)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nat64_addresses_go_there_and_back() {
        assert_eq!(through_nat64(ORIGIN_V4).to_string(), "64:ff9b::cb00:7114");
        assert_eq!(behind_nat64(through_nat64(ORIGIN_V4)), Some(ORIGIN_V4));
        assert_eq!(behind_nat64(ORIGIN_V6), None);
    }

    #[test]
    fn a_lab_knows_its_machines_name_and_no_other_by_it() {
        assert!(hosts("laptop").ends_with("\n127.0.0.1 laptop\n"));
        assert_eq!(hosts("proxy"), hosts(""));
        assert_eq!(address_of("origin"), Some(ORIGIN_V4));
        assert_eq!(address_of("203.0.113.10"), Some(PROXY_V4));
        assert_eq!(address_of("laptop"), None);
    }

    #[test]
    fn another_attachment_is_another_subnet_and_another_nat() {
        let (a, b) = (link_addresses(0, 0), link_addresses(0, 1));
        assert_ne!(a.v4.octets()[..3], b.v4.octets()[..3]);
        assert_ne!(a.v6.segments()[..4], b.v6.segments()[..4]);
        assert_ne!(a.public, b.public);
        assert_ne!(link_addresses(1, 0).public, a.public);
    }
}
