//! Hosts in separate namespaces, each behind a NAT of a chosen kind or none, and the crossing that
//! forwards their packets.
//!
//! ```text
//!  10.0.0.2 wlan0 ── NAT 198.18.0.1 ─┐
//!  10.1.0.2 wlan0 ── NAT 198.18.1.1 ─┼─ crossing: one thread
//!  203.0.113.12 wlan0 ───────────────┘
//! ```
//!
//! It has IPv4 only, without delay, rate or loss, and is for tests of NATs. A NAT drops packets
//! silently, and there is no route from one private network to another.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use cedos_lab_link::{Behaviour, FilteringNat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::namespace::Namespace;
use crate::network::RouteHop;
use crate::packet::{self, PacketEnd};
use crate::port::Port;

/// The interface of each host.
const INTERFACE: &str = "wlan0";
const MTU: u32 = 1500;
/// The interval at which the crossing checks whether it is to end.
const LOOK_MS: u16 = 50;

/// A protocol, an address and a port.
type NatEndpoint = (u8, Ipv4Addr, u16);

struct CrossingEnd {
    port: Port,
    inside: Ipv4Addr,
    /// The external address, and its NAT.
    nat: Option<(Ipv4Addr, FilteringNat<NatEndpoint>)>,
}

/// Bytes that were forwarded from one host to another, by their numbers.
type CrossedBytes = BTreeMap<(usize, usize), u64>;

/// Hosts and their crossing, until it is dropped.
pub struct HostNetwork {
    hosts: Vec<Namespace>,
    carried: Arc<Mutex<CrossedBytes>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// The namespace with the far ends of interfaces, if TUN devices are not available.
    _relay: Namespace,
}

impl HostNetwork {
    /// Creates a host for each entry: behind a NAT of that kind, or none. [`crate::enter`] must be
    /// called before.
    ///
    /// # Errors
    /// The system refused something.
    pub fn build(kinds: &[Option<Behaviour>]) -> anyhow::Result<HostNetwork> {
        let relay = Arc::new(Namespace::new("crossing")?);
        let (mut hosts, mut exits) = (Vec::new(), Vec::new());
        for (kind, number) in kinds.iter().zip(0..) {
            let inside = HostNetwork::address(number, kind.is_some());
            let host = Namespace::new(&format!("host{number}"))?;
            let far = relay.clone();
            let port = host.run(move |network| {
                let port = network.port(INTERFACE, MTU, &far)?;
                network.raise(INTERFACE)?;
                let source = IpAddr::V4(inside);
                network.address(INTERFACE, source, 32)?;
                let way = RouteHop {
                    source: Some(source),
                    ..RouteHop::default()
                };
                network.route(INTERFACE, (Ipv4Addr::UNSPECIFIED.into(), 0), way)?;
                anyhow::Ok(port)
            })??;
            let outside = Ipv4Addr::new(198, 18, number, 1);
            exits.push(CrossingEnd {
                port,
                inside,
                nat: kind.map(|kind| (outside, FilteringNat::new(kind))),
            });
            hosts.push(host);
        }
        let (stop, carried) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (told, counts) = (stop.clone(), Arc::clone(&carried));
        let thread = std::thread::Builder::new()
            .name("crossing".into())
            .spawn(move || cross(&mut exits, &told, &counts))?;
        Ok(HostNetwork {
            hosts,
            carried,
            stop,
            thread: Some(thread),
            _relay: Arc::into_inner(relay).expect("the hosts are built"),
        })
    }

    /// The address of host `number` on its interface.
    pub fn address(number: u8, behind_nat: bool) -> Ipv4Addr {
        if behind_nat {
            Ipv4Addr::new(10, number, 0, 2)
        } else {
            Ipv4Addr::new(203, 0, 113, 10 + number)
        }
    }

    /// The namespace in which the programs of a host run.
    pub fn host(&self, number: usize) -> &Namespace {
        &self.hosts[number]
    }

    /// Bytes of IP packets that reached host `to` from host `from`.
    pub fn carried(&self, from: usize, to: usize) -> u64 {
        let carried = self.carried.lock().unwrap_or_else(PoisonError::into_inner);
        carried.get(&(from, to)).copied().unwrap_or(0)
    }
}

impl Drop for HostNetwork {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn cross(exits: &mut [CrossingEnd], stop: &AtomicBool, carried: &Mutex<CrossedBytes>) {
    let mut buffer = vec![0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        {
            let mut waiting: Vec<PollFd<'_>> = exits
                .iter()
                // SAFETY: the descriptors belong to ports that outlive the call.
                .map(|e| unsafe { BorrowedFd::borrow_raw(e.port.descriptor()) })
                .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
                .collect();
            let _ = poll(&mut waiting, PollTimeout::from(LOOK_MS));
        }
        for from in 0..exits.len() {
            while let Ok(bytes) = exits[from].port.receive(&mut buffer) {
                let Some(to) = pass(exits, from, &mut buffer[..bytes]) else {
                    continue;
                };
                let mut carried = carried.lock().unwrap_or_else(PoisonError::into_inner);
                *carried.entry((from, to)).or_default() += bytes as u64;
            }
        }
    }
}

/// Forwards a host's packet to another one, if its NAT accepts it. Returns the receiver.
fn pass(exits: &mut [CrossingEnd], from: usize, packet: &mut [u8]) -> Option<usize> {
    let head = packet::head(packet)?;
    let (IpAddr::V4(source), IpAddr::V4(to)) = (head.source, head.destination) else {
        return None;
    };
    let (own, far) = head.ports?;
    let exit = &mut exits[from];
    if source != exit.inside {
        return None;
    }
    let mut seen = SocketAddr::from((source, own));
    if let Some((outside, nat)) = &mut exit.nat {
        let port = nat.outbound((head.protocol, source, own), SocketAddr::from((to, far)));
        packet::rewrite_v4(packet, &head, PacketEnd::Source, *outside, port);
        seen = SocketAddr::from((*outside, port));
    }
    let found = exits.iter().position(|exit| match &exit.nat {
        Some((outside, _)) => *outside == to,
        None => exit.inside == to,
    })?;
    if let Some((_, nat)) = &exits[found].nat {
        let (protocol, inside, port) = nat.inbound(far, seen)?;
        if protocol != head.protocol {
            return None;
        }
        packet::rewrite_v4(packet, &head, PacketEnd::Destination, inside, port);
    }
    exits[found].port.send(packet).ok()?;
    Some(found)
}
