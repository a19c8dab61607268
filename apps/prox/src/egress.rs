//! The addresses to which the proxy may connect: public ones, unless the operator changes that.
//!
//! A proxy is inside its operator's network, so a client that can name any address could reach
//! hosts behind the operator's firewall. The filter checks the actual address before each
//! connection, after name resolution and again for every redirect, so a name that changes its
//! answer between check and use gains nothing. IPv6 forms that carry an IPv4 address inside
//! (mapped, compatible, NAT64, 6to4, ISATAP) are checked by that address. Metadata services
//! (`metadata_services.rs`) are refused regardless of other settings, unless a setting names
//! exactly that address.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use crate::metadata_services::{metadata_service, translated_v4};

/// Why an address is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialAddress {
    /// Private (RFC 1918), loopback, unique-local, shared (CGNAT), test or protocol networks.
    Private,
    /// Link-local, which is where clouds put their metadata services.
    LinkLocal,
    /// A cloud's metadata service.
    Metadata,
    /// Multicast or broadcast.
    Multicast,
    /// Unspecified, reserved or not global unicast.
    Reserved,
}

impl fmt::Display for SpecialAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SpecialAddress::Private => "a private or local network",
            SpecialAddress::LinkLocal => "a link-local address",
            SpecialAddress::Metadata => "a metadata service",
            SpecialAddress::Multicast => "multicast",
            SpecialAddress::Reserved => "a reserved address",
        })
    }
}

/// The rule for origin addresses and ports.
#[derive(Clone, Debug, Default)]
pub struct EgressFilter {
    /// Whether [`SpecialAddress::Private`] is allowed.
    pub allow_private: bool,
    /// Networks that are allowed, whatever they are. A metadata service is allowed only by a network
    /// that is no larger than the service's own entry: its address, not a range around it.
    pub allow_nets: Vec<IpNet>,
    /// Ports refused at any address.
    pub refused_ports: Vec<u16>,
}

impl EgressFilter {
    /// Says whether `address` may be dialled.
    ///
    /// # Errors
    /// What the address is, when it may not.
    pub fn check(&self, address: IpAddr) -> Result<(), SpecialAddress> {
        let inner = match address {
            IpAddr::V6(v6) => embedded(v6),
            IpAddr::V4(_) => None,
        };
        if let Some(service) = metadata_service(address) {
            // A network inside the entry that has the address, or leads to what a translator dials.
            let names_it = |net: &IpNet| {
                let within = service.contains(net) || *net == IpNet::from(address);
                within && (service.addr().is_ipv4() || net.contains(&address))
            };
            return match self.allow_nets.iter().any(names_it) {
                true => Ok(()),
                false => Err(SpecialAddress::Metadata),
            };
        }
        let named = |ip: IpAddr| self.allow_nets.iter().any(|net| net.contains(&ip));
        if named(address) || inner.is_some_and(|v4| named(IpAddr::V4(v4))) {
            return Ok(());
        }
        let kind = match (address, inner) {
            (_, Some(v4)) => special_v4(v4),
            (IpAddr::V4(v4), None) => special_v4(v4),
            (IpAddr::V6(v6), None) => special_v6(v6),
        };
        match kind {
            None => Ok(()),
            Some(SpecialAddress::Private) if self.allow_private => Ok(()),
            Some(kind) => Err(kind),
        }
    }

    /// Says whether `port` may be dialled. Port 0 never may.
    pub fn port_allowed(&self, port: u16) -> bool {
        port != 0 && !self.refused_ports.contains(&port)
    }
}

/// The IPv4 address inside an IPv6 one, where the form defines one.
fn embedded(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = v6.segments();
    let v4 = |hi: u16, lo: u16| Some(Ipv4Addr::from((u32::from(hi) << 16) | u32::from(lo)));
    match s {
        // ::ffff:0:0/96 mapped, ::ffff:0:0:0/96 translated (RFC 2765), 64:ff9b::/96 NAT64.
        [0, 0, 0, 0, 0, 0xffff, hi, lo]
        | [0, 0, 0, 0, 0xffff, 0, hi, lo]
        | [0x64, 0xff9b, 0, 0, 0, 0, hi, lo] => v4(hi, lo),
        // ::/96 compatible; :: and ::1 are their own.
        [0, 0, 0, 0, 0, 0, hi, lo] if hi != 0 || lo > 1 => v4(hi, lo),
        // 2002::/16 6to4.
        [0x2002, hi, lo, ..] => v4(hi, lo),
        // ISATAP: ::0:5efe:a.b.c.d and ::200:5efe:a.b.c.d in any prefix.
        [_, _, _, _, 0 | 0x200, 0x5efe, hi, lo] => v4(hi, lo),
        _ => None,
    }
}

/// What kind of special IPv4 address this is (IANA special-purpose registry).
fn special_v4(v4: Ipv4Addr) -> Option<SpecialAddress> {
    let o = v4.octets();
    match o {
        [10 | 127, ..] => Some(SpecialAddress::Private),
        [172, b, ..] if b & 0xf0 == 16 => Some(SpecialAddress::Private),
        [192, 168, ..] => Some(SpecialAddress::Private),
        [100, b, ..] if b & 0xc0 == 64 => Some(SpecialAddress::Private),
        [198, 18 | 19, ..] => Some(SpecialAddress::Private),
        [192, 0, 0 | 2, _] | [198, 51, 100, _] | [203, 0, 113, _] | [192, 88, 99, _] => {
            Some(SpecialAddress::Private)
        }
        [169, 254, ..] => Some(SpecialAddress::LinkLocal),
        [255, 255, 255, 255] => Some(SpecialAddress::Multicast),
        [224..=239, ..] => Some(SpecialAddress::Multicast),
        [0 | 240..=255, ..] => Some(SpecialAddress::Reserved),
        _ => None,
    }
}

/// What kind of special IPv6 address this is, for those without an IPv4 address inside.
fn special_v6(v6: Ipv6Addr) -> Option<SpecialAddress> {
    let s = v6.segments();
    match s {
        [0, 0, 0, 0, 0, 0, 0, 1] => Some(SpecialAddress::Private),
        [a, ..] if a & 0xfe00 == 0xfc00 => Some(SpecialAddress::Private),
        [a, ..] if a & 0xffc0 == 0xfe80 => Some(SpecialAddress::LinkLocal),
        // fec0::/10, site-local: deprecated, still routed in places.
        [a, ..] if a & 0xffc0 == 0xfec0 => Some(SpecialAddress::Private),
        [a, ..] if a & 0xff00 == 0xff00 => Some(SpecialAddress::Multicast),
        // 64:ff9b:1::/48, a network's own NAT64 (RFC 8215): leads into that network, and to the
        // translator's own neighbours where the IPv4 address is link-local.
        [0x64, 0xff9b, 1, ..] if translated_v4(v6, 48).any(|v4| v4.is_link_local()) => {
            Some(SpecialAddress::LinkLocal)
        }
        [0x64, 0xff9b, 1, ..] => Some(SpecialAddress::Private),
        // 2001::/23 protocol assignments (Teredo, ORCHID, benchmarks); 2001:db8::/32 and
        // 3fff::/20 documentation.
        [0x2001, b, ..] if b < 0x200 || b == 0xdb8 => Some(SpecialAddress::Private),
        [0x3fff, b, ..] if b < 0x1000 => Some(SpecialAddress::Private),
        // Global unicast is 2000::/3; nothing else is a place on the Internet.
        [a, ..] if a & 0xe000 == 0x2000 => None,
        _ => Some(SpecialAddress::Reserved),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata_services::tests::every_metadata_address;

    fn check(filter: &EgressFilter, text: &str) -> Result<(), SpecialAddress> {
        filter.check(text.parse().unwrap())
    }

    #[test]
    fn public_addresses_are_let_through() {
        let filter = EgressFilter::default();
        for text in [
            "1.1.1.1",
            "8.8.8.8",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "2606:4700::1111",
            "2a00:1450:4001::1",
            "::ffff:1.1.1.1",
            "64:ff9b::101:101",
        ] {
            assert_eq!(check(&filter, text), Ok(()), "{text}");
        }
    }

    #[test]
    fn special_addresses_are_refused_in_every_disguise() {
        let filter = EgressFilter::default();
        for text in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.9.9.9",
            "169.254.1.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.168.1.1",
            "198.18.0.1",
            "203.0.113.9",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "168.63.129.16",
            "::",
            "::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2001:db8::1",
            "2001::1",
            "3fff::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "::ffff:0:10.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2002:a9fe:a9fe::",
            "2606:4700::5efe:10.0.0.1",
            "2606:4700::200:5efe:127.0.0.1",
            "100::1",
        ] {
            assert!(check(&filter, text).is_err(), "{text}");
        }
    }

    #[test]
    fn allow_private_opens_private_networks_but_not_metadata_or_link_local() {
        let filter = EgressFilter {
            allow_private: true,
            ..Default::default()
        };
        for text in [
            "10.0.0.1",
            "127.0.0.1",
            "::1",
            "fd12::1",
            "::ffff:192.168.0.1",
        ] {
            assert_eq!(check(&filter, text), Ok(()), "{text}");
        }
        for text in [
            "169.254.169.254",
            "fe80::1",
            "224.0.0.1",
            "0.0.0.0",
            "100.100.100.200",
        ] {
            assert!(check(&filter, text).is_err(), "{text}");
        }
    }

    #[test]
    fn metadata_services_stay_refused_whatever_range_is_allowed() {
        let filter = EgressFilter {
            allow_private: true,
            allow_nets: ["0.0.0.0/0", "::/0", "169.254.0.0/16", "fd00::/8"]
                .map(|net| net.parse().unwrap())
                .to_vec(),
            ..Default::default()
        };
        for address in every_metadata_address() {
            let refused = Err(SpecialAddress::Metadata);
            assert_eq!(filter.check(address), refused, "{address}");
        }
    }

    #[test]
    fn link_local_addresses_stay_refused_through_a_local_nat64() {
        let filter = EgressFilter {
            allow_private: true,
            ..Default::default()
        };
        for text in [
            "64:ff9b:1::169.254.1.1",
            "64:ff9b:1:a9fe:1:100::",
            "64:ff9b:1:a9:fe:101::",
            "64:ff9b:1::a9:fe01:100:0",
            "64:ff9b::169.254.1.1",
        ] {
            let refused = Err(SpecialAddress::LinkLocal);
            assert_eq!(check(&filter, text), refused, "{text}");
        }
        assert_eq!(check(&filter, "64:ff9b:1::192.168.1.1"), Ok(()));
    }

    #[test]
    fn a_metadata_service_is_opened_by_its_own_address() {
        let filter = EgressFilter {
            allow_nets: [
                "169.254.169.254/32",
                "fd00:ec2::254/128",
                "64:ff9b:1::6464:64c8/128",
            ]
            .map(|net| net.parse().unwrap())
            .to_vec(),
            ..Default::default()
        };
        for text in [
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "fd00:ec2::254",
            "64:ff9b:1::100.100.100.200",
        ] {
            assert_eq!(check(&filter, text), Ok(()), "{text}");
        }
        for text in ["100.100.100.200", "fd00:ec2::23", "169.254.170.2"] {
            let refused = Err(SpecialAddress::Metadata);
            assert_eq!(check(&filter, text), refused, "{text}");
        }
    }

    #[test]
    fn a_named_network_is_let_through_also_in_its_mapped_form() {
        let filter = EgressFilter {
            allow_nets: vec!["169.254.7.0/24".parse().unwrap()],
            ..Default::default()
        };
        assert_eq!(check(&filter, "169.254.7.1"), Ok(()));
        assert_eq!(check(&filter, "::ffff:169.254.7.1"), Ok(()));
        assert_eq!(
            check(&filter, "169.254.8.1"),
            Err(SpecialAddress::LinkLocal)
        );
    }

    #[test]
    fn port_zero_is_never_allowed() {
        let filter = EgressFilter {
            refused_ports: vec![25],
            ..Default::default()
        };
        assert!(!filter.port_allowed(0));
        assert!(!filter.port_allowed(25));
        assert!(filter.port_allowed(443));
    }
}
