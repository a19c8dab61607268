//! Announces the proxy to the hosts of its local networks, by DNS-SD (RFC 6763) over multicast DNS (RFC 6762).
//!
//! ```text
//!  _d2tp._udp.local            PTR  <name>._d2tp._udp.local
//!  <name>._d2tp._udp.local     SRV  4433 <name>.local          the port
//!                              TXT  key=<the proxy's key>      devices that have this key may use the address
//!  <name>.local                A    192.168.1.5
//! ```
//!
//! The name is drawn anew by each process: what hosts learn is that a proxy with this key is here. Metered networks
//! money, tunnels and this machine itself are left out. A change of addresses ends the announcement and begins another;
//! otherwise nothing is done but to answer.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{PublicKey, SERVICE_KEY_ATTRIBUTE, SERVICE_TYPE};
use d2tp_links::{Link, LinkKind};
use mdns_sd::{IfKind, ServiceDaemon, ServiceInfo};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How long the end of an announcement may take. Hosts that do not hear of it forget the proxy after two minutes.
const END_WITHIN: Duration = Duration::from_secs(1); // a guess: it is sent at once

/// The announcement of a proxy, as long as it is not ended.
#[derive(Debug)]
pub struct ServiceAnnouncement {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl ServiceAnnouncement {
    /// Announces the proxy with this key that listens at `listening`, on those of the machine's links on which it does.
    /// Must be called on a tokio runtime.
    pub fn begin(
        key: PublicKey,
        listening: SocketAddr,
        links: watch::Receiver<Arc<Vec<Link>>>,
    ) -> ServiceAnnouncement {
        let stop = CancellationToken::new();
        let task = tokio::spawn(keep_announced(key, listening, links, stop.clone()));
        ServiceAnnouncement { stop, task }
    }

    /// Takes the announcement back, and waits until hosts have been told.
    pub async fn end(self) {
        self.stop.cancel();
        let _ = self.task.await;
    }
}

async fn keep_announced(
    key: PublicKey,
    listening: SocketAddr,
    mut links: watch::Receiver<Arc<Vec<Link>>>,
    stop: CancellationToken,
) {
    let mut announced: Option<(Vec<AnnouncedInterface>, ServiceDaemon)> = None;
    loop {
        let now = interfaces(&links.borrow_and_update(), listening.ip());
        let is_same = announced.as_ref().is_some_and(|(before, _)| *before == now);
        if !is_same {
            if let Some((_, before)) = announced.take() {
                end(before).await;
            }
            if !now.is_empty() {
                match announce(key, listening.port(), &now) {
                    Ok(daemon) => {
                        let names: Vec<&str> = now.iter().map(|one| &*one.name).collect();
                        tracing::info!(links = names.join(" "), "announced on the local network");
                        announced = Some((now, daemon));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "not announced on the local network");
                    }
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => break,
            changed = links.changed() => if changed.is_err() {
                stop.cancelled().await;
                break;
            },
        }
    }
    if let Some((_, daemon)) = announced {
        end(daemon).await;
    }
}

/// A link on which the proxy is announced, and its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AnnouncedInterface {
    name: String,
    addresses: Vec<IpAddr>,
}

/// The links of local networks on which a proxy listens.
fn interfaces(links: &[Link], listening: IpAddr) -> Vec<AnnouncedInterface> {
    let is_local = |link: &&Link| {
        let has_hosts = matches!(
            link.kind,
            LinkKind::Wifi | LinkKind::Ethernet | LinkKind::Other
        );
        has_hosts && link.is_free() && link.up && link.carrier
    };
    let is_reached = |address: &IpAddr| match (listening, address) {
        (IpAddr::V4(any), IpAddr::V6(_)) if any.is_unspecified() => false,
        (any, _) if any.is_unspecified() => true,
        (only, address) => only == *address,
    };
    let interface = |link: &Link| AnnouncedInterface {
        name: link.name.clone(),
        addresses: link.addresses.iter().copied().filter(is_reached).collect(),
    };
    let all = links.iter().filter(is_local).map(interface);
    all.filter(|one| !one.addresses.is_empty()).collect()
}

fn announce(
    key: PublicKey,
    port: u16,
    interfaces: &[AnnouncedInterface],
) -> mdns_sd::Result<ServiceDaemon> {
    let daemon = ServiceDaemon::new()?;
    // Changes are known from the links; the library would look every few seconds.
    daemon.set_ip_check_interval(0)?;
    daemon.disable_interface(IfKind::All)?;
    for interface in interfaces {
        daemon.enable_interface(&*interface.name)?;
    }
    let mut random = [0; 4];
    getrandom::fill(&mut random).expect("the system has randomness");
    let name = format!("d2tp-{:08x}", u32::from_be_bytes(random));
    let addresses = interfaces.iter().flat_map(|one| one.addresses.clone());
    let addresses: Vec<IpAddr> = addresses.collect();
    let key = key.to_string();
    let attributes = [(SERVICE_KEY_ATTRIBUTE, &*key)];
    let service = ServiceInfo::new(
        &format!("{SERVICE_TYPE}."),
        &name,
        &format!("{name}.local."),
        &*addresses,
        port,
        &attributes[..],
    )?;
    daemon.register(service)?;
    Ok(daemon)
}

/// Takes an announcement back.
async fn end(daemon: ServiceDaemon) {
    if let Ok(ended) = daemon.shutdown() {
        let _ = timeout(END_WITHIN, ended.recv_async()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use d2tp_links::{CostAssessment, CostClass};

    fn link(name: &str, kind: LinkKind, class: CostClass, addresses: &[&str]) -> Link {
        Link {
            name: name.into(),
            index: 2,
            kind,
            class: CostAssessment {
                class,
                because: "test".into(),
            },
            up: true,
            carrier: true,
            mtu_bytes: 1500,
            dhcp_proxy: None,
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            routes: Vec::new(),
        }
    }

    #[test]
    fn a_proxy_is_announced_where_it_listens_and_on_local_networks_alone() {
        let (free, metered) = (CostClass::Free, CostClass::Metered);
        let mut off = link("eth1", LinkKind::Ethernet, free, &["10.1.0.1"]);
        off.carrier = false;
        let links = [
            link("lo", LinkKind::Loopback, free, &["127.0.0.1"]),
            link(
                "eth0",
                LinkKind::Ethernet,
                free,
                &["192.168.1.5", "fd00::5"],
            ),
            link("wlan0", LinkKind::Wifi, metered, &["172.20.10.2"]),
            link("wwan0", LinkKind::Cellular, free, &["10.9.0.1"]),
            link("tun0", LinkKind::Vpn, free, &["10.8.0.1"]),
            link("br0", LinkKind::Other, free, &["10.2.0.1"]),
            off,
        ];
        let shown = |listening: &str| {
            let all = interfaces(&links, listening.parse().unwrap());
            let show = |one: &AnnouncedInterface| {
                let addresses = one.addresses.iter().map(IpAddr::to_string);
                format!("{} {}", one.name, addresses.collect::<Vec<_>>().join(" "))
            };
            all.iter().map(show).collect::<Vec<_>>()
        };
        assert_eq!(shown("::"), ["eth0 192.168.1.5 fd00::5", "br0 10.2.0.1"]);
        assert_eq!(shown("0.0.0.0"), ["eth0 192.168.1.5", "br0 10.2.0.1"]);
        assert_eq!(shown("10.2.0.1"), ["br0 10.2.0.1"]);
        assert_eq!(shown("fd00::5"), ["eth0 fd00::5"]);
        assert_eq!(shown("127.0.0.1"), [""; 0]);
    }
}
