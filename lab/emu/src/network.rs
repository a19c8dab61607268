//! The interfaces, addresses, routes and rules of a namespace, over netlink.
//!
//! It does what a phone does when it joins a network: carrier, a new address, a default route with
//! a metric for each link, and a rule that packets from the address, or of sockets bound to the
//! interface, leave by that interface. When the device leaves the network, all of that is removed.

use crate::multipath::{self, Multipath};
use crate::namespace::Namespace;
use crate::plan::LinkAddresses;
use crate::port::Port;
use anyhow::Context;
use cedos_lab_scenario::Family;
use nix::net::if_::if_nametoindex;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::route::RouteMessage;
use rtnetlink::packet_route::rule::{RuleAction, RuleMessage};
use rtnetlink::{Handle, LinkUnspec, LinkVeth, RouteMessageBuilder, new_connection};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};
use tokio::runtime::{Builder, Runtime};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

/// The metric of the first link's default route, in the range of desktop systems. //
/// NetworkManager: Wi-Fi 600, cellular 700
const METRIC_FIRST: u32 = 600;
/// How much the metric increases from one link to the next.
const METRIC_STEP: u32 = 100;
/// The routing table of the first link.
const TABLE_FIRST: u32 = 1000;
/// The first priority of rules by source address. They precede the main table's.
const RULE_SOURCE_FIRST: u32 = 1000;
/// The first priority of rules by interface. They precede the main table's.
const RULE_INTERFACE_FIRST: u32 = 2000;
/// The packets that a TUN device holds before the relay takes them.
const TUN_QUEUE_PACKETS: u32 = 5000;

/// The netlink connection of a namespace, on the namespace's own thread.
pub struct NamespaceNetwork {
    runtime: Runtime,
    handle: Handle,
    joined: Vec<ConfiguredLink>,
    multipath: Option<Multipath>,
}

/// The configuration of a link that must be removed again.
struct ConfiguredLink {
    link: usize,
    rules: Vec<RuleMessage>,
    addresses: Vec<(IpAddr, u8)>,
    routes: Vec<RouteMessage>,
}

impl NamespaceNetwork {
    /// Opens netlink in the network namespace of the calling thread, and brings its loopback up.
    pub(crate) fn open() -> anyhow::Result<NamespaceNetwork> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = {
            let _inside = runtime.enter();
            let (connection, handle, _) =
                new_connection().context("netlink cannot be opened in the namespace")?;
            runtime.spawn(connection);
            handle
        };
        quieten();
        let mut network = NamespaceNetwork {
            runtime,
            handle,
            joined: Vec::new(),
            multipath: None,
        };
        network.raise("lo")?;
        Ok(network)
    }

    /// Makes MPTCP connections use all addresses of all links, from the next address on; those of
    /// `backups` only if there is no other.
    pub(crate) fn use_multipath(&mut self, backups: Vec<bool>) -> anyhow::Result<()> {
        self.multipath = Some(Multipath::new(backups)?);
        Ok(())
    }

    /// Allows MPTCP connections to this namespace the largest number of subflows.
    pub(crate) fn take_multipath(&mut self) -> anyhow::Result<()> {
        multipath::allow_subflows()
    }

    /// Brings an interface up.
    pub(crate) fn raise(&mut self, name: &str) -> anyhow::Result<()> {
        let message = LinkUnspec::new_with_index(index(name)?).up().build();
        self.runtime
            .block_on(self.handle.link().set(message).execute())
            .with_context(|| format!("{name} cannot be brought up"))
    }

    fn lower(&mut self, name: &str) -> anyhow::Result<()> {
        let message = LinkUnspec::new_with_index(index(name)?).down().build();
        self.runtime
            .block_on(self.handle.link().set(message).execute())
            .with_context(|| format!("{name} cannot be taken down"))
    }

    /// Creates a TUN device of this name that is still down.
    fn tun(&mut self, name: &str, mtu: u32) -> anyhow::Result<SyncDevice> {
        let device = DeviceBuilder::new()
            .name(name)
            .layer(Layer::L3)
            .mtu(mtu as u16)
            .enable(false)
            .with(|options| {
                options.offload(false).packet_information(false);
            })
            .build_sync()
            .with_context(|| format!("TUN device {name} cannot be made"))?;
        // Over netlink, because the ioctl for it needs privileges on the whole machine.
        let longer = LinkUnspec::new_with_index(index(name)?).txqueuelen(TUN_QUEUE_PACKETS);
        self.runtime
            .block_on(self.handle.link().set(longer.build()).execute())
            .with_context(|| format!("the queue of {name} cannot be made longer"))?;
        Ok(device)
    }

    /// Creates an interface of this name that is still down, and the relay's end of it.
    pub(crate) fn port(&mut self, name: &str, mtu: u32, relay: &Namespace) -> anyhow::Result<Port> {
        if tun_allowed() {
            let device = self.tun(name, mtu)?;
            device
                .set_nonblocking(true)
                .context("a TUN device cannot be made non-blocking")?;
            return Ok(Port::Tun(device));
        }
        let number = WIRES.fetch_add(1, Ordering::Relaxed);
        let [high, low] = number.to_be_bytes();
        // A locally administered address, different for each interface.
        let hardware = [0x02, 0, 0, 0, high, low];
        let far = format!("lab{number}");
        let there = relay.run(|_| own_namespace())??;
        self.pair(name, &far, &there)?;
        let plain = LinkUnspec::new_with_index(index(name)?)
            .address(hardware.to_vec())
            .arp(false)
            .mtu(mtu)
            .build();
        self.runtime
            .block_on(self.handle.link().set(plain).execute())
            .with_context(|| format!("{name} cannot be set up"))?;
        crate::port::plain_packets(name)
            .with_context(|| format!("{name} cannot be made to compute checksums"))?;
        let wire = relay.run(move |network| {
            let larger = LinkUnspec::new_with_index(index(&far)?)
                .mtu(mtu)
                .arp(false)
                .build();
            network
                .runtime
                .block_on(network.handle.link().set(larger).execute())?;
            network.raise(&far)?;
            anyhow::Ok(crate::port::wire(index(&far)?, hardware)?)
        })??;
        Ok(Port::Wire(wire))
    }

    /// Creates one half of a pair of Ethernet devices; the other half, `peer`, goes to the
    /// namespace of `there`.
    pub(crate) fn pair(&mut self, name: &str, peer: &str, there: &fs::File) -> anyhow::Result<()> {
        self.runtime.block_on(async {
            self.handle
                .link()
                .add(LinkVeth::new(name, peer).build())
                .execute()
                .await?;
            let moved = LinkUnspec::new_with_index(index(peer)?)
                .setns_by_fd(there.as_raw_fd())
                .build();
            self.handle.link().set(moved).execute().await?;
            anyhow::Ok(())
        })?;
        Ok(())
    }

    /// Adds an address to an interface.
    pub(crate) fn address(
        &mut self,
        name: &str,
        address: IpAddr,
        prefix: u8,
    ) -> anyhow::Result<()> {
        let mut request = self.handle.address().add(index(name)?, address, prefix);
        if address.is_ipv6() {
            // Usable at once, without duplicate address detection.
            let message = request.message_mut();
            message
                .attributes
                .push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        self.runtime
            .block_on(request.execute())
            .with_context(|| format!("{name} does not take the address {address}/{prefix}"))
    }

    /// Adds a route to `to` by an interface, and returns it for its removal.
    pub(crate) fn route(
        &mut self,
        name: &str,
        to: (IpAddr, u8),
        by: RouteHop,
    ) -> anyhow::Result<RouteMessage> {
        let index = index(name)?;
        let mut route = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(to.0, to.1)
            .map_err(|e| anyhow::anyhow!("{e}"))?
            .output_interface(index);
        if let Some(gateway) = by.gateway {
            route = route.gateway(gateway).map_err(|e| anyhow::anyhow!("{e}"))?;
        }
        if let Some(source) = by.source {
            route = route
                .pref_source(source)
                .map_err(|e| anyhow::anyhow!("{e}"))?;
        }
        if let Some(table) = by.table {
            route = route.table_id(table);
        }
        if let Some(metric) = by.metric {
            route = route.priority(metric);
        }
        let route = route.build();
        self.runtime
            .block_on(self.handle.route().add(route.clone()).execute())
            .with_context(|| format!("no route to {}/{} by {name}", to.0, to.1))?;
        Ok(route)
    }

    /// Joins a network: brings `name` up with these addresses, routes and rules.
    pub(crate) fn join(
        &mut self,
        link: usize,
        name: &str,
        family: Family,
        addresses: &LinkAddresses,
    ) -> anyhow::Result<()> {
        self.raise(name)?;
        self.settle(link, name, family, addresses)
    }

    /// Adds addresses, routes and rules to an interface that is up.
    pub(crate) fn settle(
        &mut self,
        link: usize,
        name: &str,
        family: Family,
        addresses: &LinkAddresses,
    ) -> anyhow::Result<()> {
        let mut rules = Vec::new();
        let (mut own, mut routes) = (Vec::new(), Vec::new());
        let number = link as u32;
        let table = TABLE_FIRST + number;
        let mut families: Vec<(IpAddr, u8, IpAddr, IpAddr)> = Vec::new();
        if family.has_v4() {
            let any = Ipv4Addr::UNSPECIFIED.into();
            families.push((addresses.v4.into(), 24, addresses.gateway_v4.into(), any));
        }
        if family.has_v6() {
            let any = Ipv6Addr::UNSPECIFIED.into();
            families.push((addresses.v6.into(), 64, addresses.gateway_v6.into(), any));
        }
        for (address, prefix, gateway, any) in families {
            self.address(name, address, prefix)?;
            own.push((address, prefix));
            let metric = Some(METRIC_FIRST + METRIC_STEP * number);
            let gateway = Some(gateway);
            // The source is set so that a bound socket finds its address.
            let source = Some(address);
            let main_route = RouteHop {
                gateway,
                metric,
                source,
                ..RouteHop::default()
            };
            routes.push(self.route(name, (any, 0), main_route)?);
            let table_route = RouteHop {
                gateway,
                source,
                table: Some(table),
                ..RouteHop::default()
            };
            routes.push(self.route(name, (any, 0), table_route)?);
            rules.push(self.rule(address, RuleKey::Source, table, RULE_SOURCE_FIRST + number)?);
            let by_name = RuleKey::Interface(name.to_owned());
            rules.push(self.rule(address, by_name, table, RULE_INTERFACE_FIRST + number)?);
            // Last, because its subflow is created at once.
            if let Some(multipath) = &self.multipath {
                multipath.add(link, name, address)?;
            }
        }
        self.joined.push(ConfiguredLink {
            link,
            rules,
            addresses: own,
            routes,
        });
        Ok(())
    }

    /// Leaves a network: removes rules, addresses and routes, and brings the interface down.
    pub(crate) fn leave(&mut self, link: usize, name: &str) -> anyhow::Result<()> {
        // First down, so that nothing more is sent.
        self.lower(name)?;
        self.unsettle(link, name)
    }

    /// Removes the rules and addresses of a link, and with them its routes; the interface stays up.
    pub(crate) fn unsettle(&mut self, link: usize, name: &str) -> anyhow::Result<()> {
        let index = index(name)?;
        let Some(at) = self.joined.iter().position(|joined| joined.link == link) else {
            return Ok(());
        };
        let joined = self.joined.remove(at);
        for (address, _) in &joined.addresses {
            if let Some(multipath) = &self.multipath {
                multipath.remove(link, *address)?;
            }
        }
        self.runtime.block_on(async {
            for rule in joined.rules {
                self.handle
                    .rule()
                    .del(rule)
                    .execute()
                    .await
                    .context("a rule stays")?;
            }
            for route in joined.routes {
                // An interface that went down has lost its routes already.
                let _ = self.handle.route().del(route).execute().await;
            }
            for (address, prefix) in joined.addresses {
                let mut request = self.handle.address().add(index, address, prefix);
                let message = request.message_mut().clone();
                let gone = self.handle.address().del(message).execute().await;
                // It has lost its IPv6 addresses as well.
                if address.is_ipv4() {
                    gone.with_context(|| format!("address {address} stays"))?;
                }
            }
            anyhow::Ok(())
        })
    }

    fn rule(
        &mut self,
        address: IpAddr,
        key: RuleKey,
        table: u32,
        priority: u32,
    ) -> anyhow::Result<RuleMessage> {
        let rule = self.handle.rule();
        let request = rule
            .add()
            .table_id(table)
            .priority(priority)
            .action(RuleAction::ToTable);
        let (mut v4, mut v6);
        let request: &mut RuleMessage = match address {
            IpAddr::V4(v4_address) => {
                v4 = request.v4();
                if key == RuleKey::Source {
                    v4 = v4.source_prefix(v4_address, 32);
                }
                v4.message_mut()
            }
            IpAddr::V6(v6_address) => {
                v6 = request.v6();
                if key == RuleKey::Source {
                    v6 = v6.source_prefix(v6_address, 128);
                }
                v6.message_mut()
            }
        };
        if let RuleKey::Interface(name) = &key {
            request
                .attributes
                .push(rtnetlink::packet_route::rule::RuleAttribute::Oifname(
                    name.clone(),
                ));
        }
        debug_assert!(matches!(
            request.header.family,
            AddressFamily::Inet | AddressFamily::Inet6
        ));
        let message = request.clone();
        let mut adding = self.handle.rule().add();
        *adding.message_mut() = message.clone();
        self.runtime
            .block_on(adding.execute())
            .with_context(|| format!("no rule for {address}"))?;
        Ok(message)
    }
}

#[derive(Clone, PartialEq, Eq)]
enum RuleKey {
    Source,
    Interface(String),
}

/// The properties of a route beside its interface.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RouteHop {
    /// The gateway of the route.
    pub(crate) gateway: Option<IpAddr>,
    /// The source address of packets.
    pub(crate) source: Option<IpAddr>,
    /// A table other than the main one.
    pub(crate) table: Option<u32>,
    /// The metric; lower is preferred.
    pub(crate) metric: Option<u32>,
}

/// The number of pairs created so far, for distinct names and addresses.
static WIRES: AtomicU16 = AtomicU16::new(0);

/// Whether TUN devices are available.
fn tun_allowed() -> bool {
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .is_ok()
}

/// A descriptor of the network namespace of the calling thread.
pub(crate) fn own_namespace() -> anyhow::Result<fs::File> {
    Ok(fs::File::open("/proc/thread-self/ns/net")?)
}

fn index(name: &str) -> anyhow::Result<u32> {
    if_nametoindex(name).with_context(|| format!("there is no interface {name}"))
}

/// Disables router solicitations and automatic link-local addresses, so that only configured events
/// happen, and sets CUBIC and large buffers for TCP. If these cannot be written, the relay drops
/// the packets that they would have prevented.
fn quieten() {
    for (key, value) in [
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv6/conf/default/accept_ra", "0"),
        ("ipv6/conf/default/router_solicitations", "0"),
        ("ipv6/conf/default/addr_gen_mode", "1"),
        ("ipv4/ping_group_range", "0 0"),
        // Comparisons use this TCP, whatever this machine is configured to use.
        ("ipv4/tcp_congestion_control", "cubic"),
        // Buffers are no limit: at most 32 and 16 MB, tuned by the kernel.
        ("ipv4/tcp_rmem", "4096 131072 33554432"),
        ("ipv4/tcp_wmem", "4096 16384 16777216"),
    ] {
        if let Err(error) = fs::write(format!("/proc/sys/net/{key}"), value) {
            tracing::debug!(key, %error, "a network setting stays as it is");
        }
    }
}
