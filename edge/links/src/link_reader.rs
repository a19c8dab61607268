//! Reading links, addresses and routes from the kernel, once per call.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use futures_util::{StreamExt, TryStreamExt, stream::BoxStream};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteNextHopFlags, RouteType,
};
use rtnetlink::{Handle, MulticastGroup};

use crate::cost_resolver::CostResolver;
use crate::dhcp_option::{NETWORKD_LEASES, of_networkd_lease};
use crate::link::{DefaultRoute, Link};
use crate::link_kind::LinkKindEvidence;
use crate::monitor::LinkError;
use crate::network::Networks;
use crate::network_manager::NetworkManager;
use crate::serial_links::serial_links;

/// The kernel's table of its own addresses, which has no default routes.
const TABLE_LOCAL: u32 = 255; // RT_TABLE_LOCAL, linux/rtnetlink.h

const GROUPS: [MulticastGroup; 5] = [
    MulticastGroup::Link,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv6Ifaddr,
    MulticastGroup::Ipv4Route,
    MulticastGroup::Ipv6Route,
];

/// An open netlink connection, with the sources that classify links.
pub(crate) struct LinkReader {
    handle: Handle,
    resolver: CostResolver,
    manager: Option<NetworkManager>,
}

impl LinkReader {
    /// Opens netlink. The second value yields once for each message of the kernel; it is missing if
    /// the system does not permit joining its groups.
    pub(crate) fn open(
        resolver: CostResolver,
        manager: Option<NetworkManager>,
    ) -> Result<(LinkReader, Option<BoxStream<'static, ()>>), LinkError> {
        if let Ok((connection, handle, messages)) = rtnetlink::new_multicast_connection(&GROUPS) {
            tokio::spawn(connection);
            // An overrun (lost messages) arrives as a message too: another hint.
            let reader = LinkReader {
                handle,
                resolver,
                manager,
            };
            return Ok((reader, Some(messages.map(drop).boxed())));
        }
        let (connection, handle, _) = rtnetlink::new_connection().map_err(LinkError::Socket)?;
        tokio::spawn(connection);
        let reader = LinkReader {
            handle,
            resolver,
            manager,
        };
        Ok((reader, None))
    }

    /// Waits until the network manager reports a change.
    pub(crate) async fn networks_changed(&mut self) {
        match &mut self.manager {
            Some(manager) => manager.changed().await,
            None => std::future::pending().await,
        }
    }

    /// The current links, in the order of their index.
    pub(crate) async fn read(&mut self) -> Result<Vec<Link>, LinkError> {
        let refused = |what| {
            move |error: rtnetlink::Error| LinkError::Read {
                what,
                cause: error.to_string(),
            }
        };
        let devices: Vec<LinkMessage> = self
            .handle
            .link()
            .get()
            .execute()
            .try_collect()
            .await
            .map_err(refused("links"))?;
        let addresses: Vec<AddressMessage> = self
            .handle
            .address()
            .get()
            .execute()
            .try_collect()
            .await
            .map_err(refused("addresses"))?;
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut filter = RouteMessage::default();
            filter.header.address_family = family;
            let found: Vec<RouteMessage> = self
                .handle
                .route()
                .get(filter)
                .execute()
                .try_collect()
                .await
                .map_err(refused("routes"))?;
            routes.extend(found);
        }
        Ok(self.assemble(&devices, &addresses, &routes))
    }

    fn assemble(
        &self,
        devices: &[LinkMessage],
        addresses: &[AddressMessage],
        routes: &[RouteMessage],
    ) -> Vec<Link> {
        let manager = self.manager.as_ref();
        let networks = manager.map_or_else(Networks::default, NetworkManager::networks);
        let mut routes_of: BTreeMap<u32, Vec<DefaultRoute>> = BTreeMap::new();
        for (index, route) in routes.iter().flat_map(default_routes) {
            routes_of.entry(index).or_default().push(route);
        }
        let mut links = BTreeMap::new();
        for device in devices {
            let index = device.header.index;
            let Some(mut evidence) = evidence_of(device) else {
                continue;
            };
            evidence.read_sysfs(index);
            let mut routes = routes_of.remove(&index).unwrap_or_default();
            routes.sort();
            routes.dedup();
            let kind = evidence.kind();
            let gateways: Vec<IpAddr> = routes.iter().filter_map(|r| r.gateway).collect();
            let network = networks.of(&evidence.name);
            let class = (self.resolver).resolve(&evidence.name, kind, &gateways, network);
            let flags = device.header.flags;
            let mtu_bytes = device.attributes.iter().find_map(|a| {
                if let LinkAttribute::Mtu(mtu) = a {
                    Some(*mtu)
                } else {
                    None
                }
            });
            let managed = network.and_then(|network| network.dhcp_proxy.clone());
            let lease = || of_networkd_lease(Path::new(NETWORKD_LEASES), index);
            let link = Link {
                dhcp_proxy: managed.or_else(lease),
                kind,
                class,
                index,
                up: flags.contains(LinkFlags::Up),
                carrier: flags.contains(LinkFlags::LowerUp),
                mtu_bytes: mtu_bytes.unwrap_or(0),
                addresses: addresses
                    .iter()
                    .filter(|address| address.header.index == index)
                    .filter_map(usable_address)
                    .collect(),
                routes,
                name: evidence.name,
            };
            links.insert(index, link);
        }
        let mut links: Vec<Link> = links.into_values().collect();
        self.resolver.resolve_tunnels(&mut links, &networks);
        links.extend(serial_links(&self.resolver.flags));
        links
    }
}

fn evidence_of(device: &LinkMessage) -> Option<LinkKindEvidence> {
    let mut evidence = LinkKindEvidence {
        loopback: device.header.flags.contains(LinkFlags::Loopback),
        ethernet: device.header.link_layer_type == LinkLayerType::Ether,
        ..LinkKindEvidence::default()
    };
    for attribute in &device.attributes {
        match attribute {
            LinkAttribute::IfName(name) => evidence.name = name.clone(),
            LinkAttribute::Wireless(_) => evidence.wireless = true,
            LinkAttribute::LinkInfo(infos) => {
                evidence.created_as = infos.iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind.to_string()),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    (!evidence.name.is_empty()).then_some(evidence)
}

/// The address, if a program may send from it.
fn usable_address(message: &AddressMessage) -> Option<IpAddr> {
    let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
    let (mut local, mut address) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            // The long form of the flags, which have eight bits in the header.
            AddressAttribute::Flags(long) => flags = *long,
            // On point-to-point links `Address` is the peer's; `Local` is this machine's.
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => address = Some(*ip),
            _ => {}
        }
    }
    let ip = local.or(address)?;
    let unfit = AddressFlags::Tentative | AddressFlags::Deprecated | AddressFlags::Dadfailed;
    // An optimistic address may be used while its check still runs (RFC 4429).
    let unfit = flags.intersects(unfit) && !flags.contains(AddressFlags::Optimistic);
    let link_local = match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    (!unfit && !link_local && !ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

/// The devices of a default route. Routes for half of the address space count as well, because
/// tunnels add `0.0.0.0/1` and `128.0.0.0/1` to override the default route.
fn default_routes(message: &RouteMessage) -> Vec<(u32, DefaultRoute)> {
    if message.header.kind != RouteType::Unicast || message.header.destination_prefix_length > 1 {
        return Vec::new();
    }
    let ipv6 = message.header.address_family == AddressFamily::Inet6;
    let mut route = DefaultRoute {
        metric: 0,
        ipv6,
        gateway: None,
        table: message.header.table.into(),
    };
    let mut device = None;
    let mut hops = Vec::new();
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Priority(metric) => route.metric = *metric,
            RouteAttribute::Table(table) => route.table = *table,
            RouteAttribute::MultiPath(next_hops) => hops.extend(next_hops),
            _ => {}
        }
    }
    route.gateway = gateway_in(&message.attributes);
    if route.table == TABLE_LOCAL {
        return Vec::new();
    }
    let single = device.map(|index| (index, route.clone()));
    let several = hops
        .into_iter()
        .filter(|hop| {
            !hop.flags
                .intersects(RouteNextHopFlags::Dead | RouteNextHopFlags::Linkdown)
        })
        .map(|hop| {
            let gateway = gateway_in(&hop.attributes);
            (
                hop.interface_index,
                DefaultRoute {
                    gateway,
                    ..route.clone()
                },
            )
        });
    single.into_iter().chain(several).collect()
}

fn gateway_in(attributes: &[RouteAttribute]) -> Option<IpAddr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(ip)) => Some(IpAddr::V4(*ip)),
        RouteAttribute::Gateway(RouteAddress::Inet6(ip)) => Some(IpAddr::V6(*ip)),
        _ => None,
    })
}
