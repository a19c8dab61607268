//! A link of this machine, as it is at one moment.

use std::net::IpAddr;

use serde::Serialize;

use crate::class::{CostAssessment, CostClass};
use crate::link_kind::LinkKind;

/// A network device, with its addresses, routes and cost class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Link {
    /// The device's name, for example `wlan0`.
    pub name: String,
    /// The kernel's interface index; a device that leaves and returns gets a new one.
    pub index: u32,
    /// The kind of network.
    pub kind: LinkKind,
    /// The cost class, with its reason.
    pub class: CostAssessment,
    /// Whether the interface is enabled.
    pub up: bool,
    /// Whether the link has a carrier: associated, plugged in, attached.
    pub carrier: bool,
    /// Size of the largest packet in bytes; 0 if unknown.
    pub mtu_bytes: u32,
    /// Addresses that a program may send from: not tentative, deprecated, link-local or loopback.
    pub addresses: Vec<IpAddr>,
    /// Default routes, the best (lowest metric) first.
    pub routes: Vec<DefaultRoute>,
    /// What the network's DHCP names as its proxy (option [`crate::DHCP_PROXY_OPTION`]): a hint, which proves nothing.
    pub dhcp_proxy: Option<String>,
}

/// A default route over one link.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct DefaultRoute {
    /// Preference among routes of one table; the lowest is used.
    pub metric: u32,
    /// Whether the route is for IPv6.
    pub ipv6: bool,
    /// The next hop; `None` on point-to-point links.
    pub gateway: Option<IpAddr>,
    /// The routing table of the route (254 is the main one). Phones keep one table per link.
    pub table: u32,
}

impl Link {
    /// Whether packets can leave by the link: up, with carrier, an address and a route of one family.
    /// The network behind it may still not work.
    pub fn is_usable(&self) -> bool {
        self.source_addresses().next().is_some()
    }

    /// The source addresses, each of a family that has a route here. Empty unless up.
    pub fn source_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let on = self.up && self.carrier;
        self.addresses.iter().copied().filter(move |address| {
            on && self
                .routes
                .iter()
                .any(|route| route.ipv6 == address.is_ipv6())
        })
    }

    /// The source address for `destination`: of the same family, and usable.
    pub fn source_for(&self, destination: IpAddr) -> Option<IpAddr> {
        self.source_addresses()
            .find(|address| address.is_ipv6() == destination.is_ipv6())
    }

    /// Whether the link is free, as far as is known.
    pub fn is_free(&self) -> bool {
        self.class.class == CostClass::Free
    }

    /// The lowest metric of the routes: how much the system prefers the link.
    pub fn metric(&self) -> Option<u32> {
        self.routes.iter().map(|route| route.metric).min()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn wifi() -> Link {
        Link {
            name: "wlan0".into(),
            index: 3,
            kind: LinkKind::Wifi,
            class: CostAssessment {
                class: CostClass::Free,
                because: "test".into(),
            },
            up: true,
            carrier: true,
            mtu_bytes: 1500,
            dhcp_proxy: None,
            addresses: vec!["198.51.100.7".parse().expect("address")],
            routes: vec![DefaultRoute {
                metric: 600,
                ipv6: false,
                gateway: Some("198.51.100.1".parse().expect("address")),
                table: 254,
            }],
        }
    }

    #[test]
    fn a_link_is_usable_only_with_carrier_address_and_route_of_one_family() {
        let link = wifi();
        assert!(link.is_usable());
        assert!(
            !Link {
                up: false,
                ..link.clone()
            }
            .is_usable()
        );
        assert!(
            !Link {
                carrier: false,
                ..link.clone()
            }
            .is_usable()
        );
        assert!(
            !Link {
                addresses: vec![],
                ..link.clone()
            }
            .is_usable()
        );
        assert!(
            !Link {
                routes: vec![],
                ..link.clone()
            }
            .is_usable()
        );
        let v6: IpAddr = "2001:db8::7".parse().expect("address");
        let mixed = Link {
            addresses: vec![v6],
            ..link.clone()
        };
        assert!(!mixed.is_usable(), "an IPv6 address and only an IPv4 route");
        assert_eq!(link.source_for(v6), None);
    }
}
