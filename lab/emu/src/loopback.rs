//! The lab without namespaces: the same link models between UDP sockets of this machine's loopback.
//!
//! ```text
//!  device ──▶ near socket ─▶ upward pipe ─▶ mapping ──▶ proxy
//!  127.64.g.2   127.64.g.1                  127.128.g.1
//!         ◀──             ◀─ down pipe    ◀─        ◀──
//! ```
//!
//! For the device the near socket is the proxy. The proxy sees the mapping's address, which differs
//! for each attachment and each of the device's sockets, as behind a NAT. One thread forwards
//! packets and follows the scenario's timeline.
//!
//! A kernel refuses packets on an interface that is gone. Loopback is always up, so packets that
//! the device sends within [`LEAVE_GRACE`] after losing a link are dropped and not counted; later
//! packets are errors of the device and are counted, as in the lab.

use crate::clock::EmuClock;
use crate::plan::LinkAddresses;
use crate::relay::{DATA_PACKET_BYTES_MIN, QUANTUM, RelayedBytes};
use crate::world::{WorldEvent, WorldObservations};
use anyhow::Context;
use cedos_lab_link::{LinkDirection, LinkModel, Packet, PushOutcome, Span, Time};
use cedos_lab_scenario::{
    EventKind, LinkReport, Scenario, ScenarioLinkEvent, SwitchMeter, Timeline,
};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long after losing a link the device's packets on it are dropped without being counted,
/// because a kernel would have refused them.
pub const LEAVE_GRACE: Span = Span::from_millis(200); // a guess: the scheduling delay of a busy machine
/// The most sockets of the device that a link remembers; the oldest one is forgotten.
const MAPPINGS_MAX: usize = 16;
/// The most packets that are taken from one socket in turn.
const BATCH: usize = 256;
/// The longest sleep: orders are handled with at most this delay.
const SLEEP_MAX: Duration = Duration::from_millis(10);
/// The size of the receive buffer to request: room for packets while the thread is not scheduled.
const BUFFER_BYTES: usize = 4 << 20;
/// Bytes of IPv4 and UDP headers, which the models count and loopback does not have.
const HEADER_BYTES: u32 = 28;

/// An event of the scenario, of which the device must be informed.
#[derive(Clone, Debug)]
pub struct LoopbackHappening {
    /// The event.
    pub happening: WorldEvent,
    /// The proxy's address over this link after the event; `None` if it is not reachable.
    pub proxy_at: Option<SocketAddr>,
}

enum Order {
    Idle,
    Report(Sender<WorldObservations>),
    Stop,
}

/// Emulated links on loopback, following a scenario.
pub struct Loopback {
    orders: Sender<Order>,
    clock: EmuClock,
    thread: Option<JoinHandle<()>>,
}

impl Loopback {
    /// Starts the scenario's time, between the caller's device and the proxy at `proxy`. `on_event`
    /// is called with each event before packets are affected, on the relay's thread, so it must
    /// return quickly.
    ///
    /// # Errors
    /// The first links cannot be created, or the thread cannot be started.
    pub fn start(
        scenario: &Scenario,
        proxy: SocketAddr,
        on_event: impl FnMut(&LoopbackHappening) + Send + 'static,
    ) -> anyhow::Result<Loopback> {
        let clock = EmuClock::start();
        let (orders, inbox) = channel();
        let links = (0..scenario.links.len()).map(|number| {
            let mut condition = scenario.condition_at_start(number);
            condition.up = false;
            AttachedSockets {
                model: LinkModel::new(&condition, scenario.seed, number as u64),
                near: None,
                mappings: Vec::new(),
                addresses: None,
                lost_at: Time::ZERO,
                bytes_up: 0,
            }
        });
        let mut worker = Worker {
            clock,
            proxy,
            links: links.collect(),
            meter: SwitchMeter::new(scenario.links.iter().map(|link| link.name.clone())),
            timeline: scenario.timeline(),
            scenario: scenario.clone(),
            inbox,
            on_event: Box::new(on_event),
        };
        worker.follow(Time::ZERO)?;
        let thread = std::thread::Builder::new()
            .name("lab-loopback".to_owned())
            .spawn(move || worker.run())
            .context("the relay's thread cannot be started")?;
        Ok(Loopback {
            orders,
            clock,
            thread: Some(thread),
        })
    }

    /// The current time of the scenario.
    pub fn now(&self) -> Time {
        self.clock.now()
    }

    /// Why the scenario is not followed any more, in which case the run is not valid; `None` if it
    /// is.
    pub fn fault(&self) -> Option<String> {
        let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        ended.then(|| "the relay between the loopback sockets ended; its log says why".to_owned())
    }

    /// Records that no flow is active from now on.
    pub fn idle(&self) {
        let _ = self.orders.send(Order::Idle);
    }

    /// The observations so far.
    pub fn seen(&self) -> Option<WorldObservations> {
        let (to, from) = channel();
        let _ = self.orders.send(Order::Report(to));
        from.recv().ok()
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        let _ = self.orders.send(Order::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the loopback relay panicked");
        }
    }
}

/// The addresses of link `link` with its address number `number`.
pub fn link_addresses(link: usize, number: u32) -> LinkAddresses {
    let (i, g) = (link as u8 % 64, (number % 250) as u8 + 1);
    LinkAddresses {
        v4: Ipv4Addr::new(127, 64 + i, g, 2),
        gateway_v4: Ipv4Addr::new(127, 64 + i, g, 1),
        v6: Ipv6Addr::UNSPECIFIED,
        gateway_v6: Ipv6Addr::UNSPECIFIED,
        public: Ipv4Addr::new(127, 128 + i, g, 1),
    }
}

/// A datagram in flight, with the device's socket to which it belongs.
#[derive(Clone)]
struct LoopbackPacket {
    bytes: Vec<u8>,
    device: SocketAddr,
}

impl Packet for LoopbackPacket {
    fn corrupt(&mut self, entropy: u64) {
        self.bytes.corrupt(entropy);
    }
}

struct AttachedSockets {
    model: LinkModel<LoopbackPacket>,
    near: Option<UdpSocket>,
    mappings: Vec<(SocketAddr, UdpSocket)>,
    addresses: Option<LinkAddresses>,
    lost_at: Time,
    bytes_up: u64,
}

struct Worker {
    clock: EmuClock,
    proxy: SocketAddr,
    links: Vec<AttachedSockets>,
    meter: SwitchMeter,
    timeline: Timeline,
    scenario: Scenario,
    inbox: Receiver<Order>,
    on_event: Box<dyn FnMut(&LoopbackHappening) + Send>,
}

impl Worker {
    fn run(&mut self) {
        loop {
            let begun = self.clock.now();
            while let Ok(order) = self.inbox.try_recv() {
                match order {
                    Order::Idle => self.meter.on_idle(),
                    Order::Report(to) => drop(to.send(self.seen())),
                    Order::Stop => return,
                }
            }
            if let Err(error) = self.follow(begun) {
                tracing::error!(error = %format!("{error:#}"), "the scenario cannot be followed");
                return;
            }
            let moved = self.take_in(begun) | self.hand_over();
            if moved {
                let spent = Duration::from_nanos(self.clock.now().since(begun).as_nanos());
                std::thread::sleep(QUANTUM.saturating_sub(spent));
            } else {
                self.wait();
            }
        }
    }

    /// Carries out the timeline up to `now`.
    fn follow(&mut self, now: Time) -> anyhow::Result<()> {
        while self.timeline.next_at().is_some_and(|at| at <= now)
            && let Some(event) = self.timeline.next()
        {
            self.act(event)?;
        }
        Ok(())
    }

    fn act(&mut self, event: ScenarioLinkEvent) -> anyhow::Result<()> {
        let number = event.link;
        let now = self.clock.now();
        match event.kind {
            EventKind::Down => {
                self.links[number].addresses = None;
                self.report(&event, None);
                self.lose(number, now);
                self.links[number].model.apply(now, &event.condition);
            }
            EventKind::Up { address } | EventKind::NewAddress { address } => {
                if matches!(event.kind, EventKind::NewAddress { .. }) {
                    self.lose(number, now);
                }
                let addresses = link_addresses(number, address);
                let near = bound(addresses.gateway_v4)?;
                let proxy_at = near.local_addr()?;
                let link = &mut self.links[number];
                link.near = Some(near);
                link.mappings.clear();
                link.addresses = Some(addresses);
                link.model.apply(now, &event.condition);
                self.report(&event, Some(proxy_at));
                self.meter.on_up(self.clock.now(), number);
            }
            EventKind::Rebind => {
                self.links[number].mappings.clear();
                self.report_unmoved(&event);
            }
            EventKind::Attaching | EventKind::Changed => {
                self.links[number].model.apply(now, &event.condition);
                self.report_unmoved(&event);
            }
        }
        Ok(())
    }

    fn lose(&mut self, number: usize, now: Time) {
        self.links[number].lost_at = now;
        self.links[number].mappings.clear();
        self.meter.on_down(now, number);
    }

    fn report_unmoved(&mut self, event: &ScenarioLinkEvent) {
        let link = &self.links[event.link];
        let at = link
            .near
            .as_ref()
            .filter(|_| link.addresses.is_some())
            .and_then(|near| near.local_addr().ok());
        self.report(event, at);
    }

    fn report(&mut self, event: &ScenarioLinkEvent, proxy_at: Option<SocketAddr>) {
        (self.on_event)(&LoopbackHappening {
            happening: WorldEvent {
                at: self.clock.now(),
                link: self.scenario.links[event.link].name.clone(),
                addresses: self.links[event.link].addresses,
                event: event.clone(),
            },
            proxy_at,
        });
    }

    fn take_in(&mut self, now: Time) -> bool {
        let mut moved = false;
        let mut landing = [0; 65_536];
        for link in &mut self.links {
            for _ in 0..BATCH {
                let Some(near) = &link.near else { break };
                let Ok((bytes, device)) = near.recv_from(&mut landing) else {
                    break;
                };
                moved = true;
                let away = !link.model.upward().is_up();
                if away && now.since(link.lost_at) < LEAVE_GRACE {
                    continue;
                }
                let size = bytes as u32 + HEADER_BYTES;
                let packet = LoopbackPacket {
                    bytes: landing[..bytes].to_vec(),
                    device,
                };
                if link.model.push(LinkDirection::Up, now, size, packet) != PushOutcome::Down {
                    link.bytes_up += u64::from(size);
                }
            }
            for (device, far) in &link.mappings {
                for _ in 0..BATCH {
                    let Ok(bytes) = far.recv(&mut landing) else {
                        break;
                    };
                    moved = true;
                    let packet = LoopbackPacket {
                        bytes: landing[..bytes].to_vec(),
                        device: *device,
                    };
                    let size = bytes as u32 + HEADER_BYTES;
                    if link.model.reach().passes_udp() {
                        link.model.push(LinkDirection::Down, now, size, packet);
                    }
                }
            }
        }
        moved
    }

    /// Delivers datagrams that have crossed a link by now. A failed send counts as a loss.
    fn hand_over(&mut self) -> bool {
        let now = self.clock.now();
        let mut moved = false;
        for (number, link) in self.links.iter_mut().enumerate() {
            while let Some(packet) = link.model.pop(LinkDirection::Up, now) {
                moved = true;
                let Some(own) = link.addresses.filter(|_| link.model.reach().passes_udp()) else {
                    continue;
                };
                match mapping(&mut link.mappings, own.public, packet.device) {
                    Ok(far) => drop(far.send_to(&packet.bytes, self.proxy)),
                    Err(error) => tracing::warn!(%error, "no mapping for a packet"),
                }
            }
            while let Some(packet) = link.model.pop(LinkDirection::Down, now) {
                moved = true;
                if packet.bytes.len() >= DATA_PACKET_BYTES_MIN {
                    self.meter.on_data(now, number);
                }
                if let Some(near) = &link.near {
                    let _ = near.send_to(&packet.bytes, packet.device);
                }
            }
        }
        moved
    }

    /// Sleeps briefly, until a packet or the next event of the models or the scenario.
    fn wait(&self) {
        let models = self.links.iter().filter_map(|l| l.model.next_event());
        let next = models.chain(self.timeline.next_at()).min();
        let timeout = next.map_or(SLEEP_MAX, |at| self.clock.until(at).min(SLEEP_MAX));
        let sockets = self
            .links
            .iter()
            .flat_map(|l| l.near.iter().chain(l.mappings.iter().map(|(_, far)| far)));
        let mut fds: Vec<PollFd> = sockets
            .map(|s| PollFd::new(s.as_fd(), PollFlags::POLLIN))
            .collect();
        let _ = ppoll(&mut fds, Some(TimeSpec::from(timeout)), None);
    }

    fn seen(&self) -> WorldObservations {
        let carried: Vec<RelayedBytes> = self
            .links
            .iter()
            .map(|link| RelayedBytes {
                down: *link.model.down().counters(),
                upward: *link.model.upward().counters(),
                bytes_up: link.bytes_up,
                packets_misaddressed: 0,
            })
            .collect();
        let links = self
            .scenario
            .links
            .iter()
            .zip(&carried)
            .map(|(link, carried)| LinkReport {
                name: link.name.clone(),
                class: link.class.word().to_owned(),
                bytes_down: carried.down.bytes_delivered,
                bytes_up: carried.bytes_up,
                packets_while_down: carried.upward.packets_while_down,
                wait_down_ms: carried.down.waited_mean_ms(),
                wait_up_ms: carried.upward.waited_mean_ms(),
                wait_down_max_ms: carried.down.waited_max.as_millis_f64(),
            });
        WorldObservations {
            links: links.collect(),
            switches: self.meter.clone().into_switches(),
            carried,
            energy: None,
        }
    }
}

/// The external socket that stands for one of the device's sockets.
fn mapping(
    mappings: &mut Vec<(SocketAddr, UdpSocket)>,
    public: Ipv4Addr,
    device: SocketAddr,
) -> anyhow::Result<&UdpSocket> {
    let known = mappings.iter().position(|(d, _)| *d == device);
    let index = match known {
        Some(index) => index,
        None => {
            if mappings.len() == MAPPINGS_MAX {
                mappings.remove(0);
            }
            mappings.push((device, bound(public)?));
            mappings.len() - 1
        }
    };
    Ok(&mappings[index].1)
}

fn bound(at: Ipv4Addr) -> anyhow::Result<UdpSocket> {
    let socket = UdpSocket::bind((at, 0)).with_context(|| {
        format!("{at} cannot be had: is all of 127.0.0.0/8 on the loopback interface?")
    })?;
    socket.set_nonblocking(true)?;
    // A smaller buffer than requested is not an error.
    let _ = setsockopt(&socket, sockopt::RcvBuf, &BUFFER_BYTES);
    Ok(socket)
}
