//! The relay: one thread that carries packets between the namespaces through the link models.
//!
//! ```text
//!  device                          relay                              internet
//!  wlan0 ─TUN─▶ upward pipe ─▶ gate (NAT) ─▶ by destination ─TUN─▶ proxy, origin
//!        ◀─TUN─ down pipe  ◀─ gate (NAT) ◀─ by destination ◀─TUN─
//! ```
//!
//! While packets move, it polls everything once per quantum, because waking for each packet costs
//! most of a core. The models compute exact times themselves, so the quantum only delays the
//! delivery of packets. While nothing moves it sleeps until a packet or the models' next event.
//!
//! The arrival times of packets found in one poll are unknown, so they are offered to the models
//! evenly spread over the time since the previous poll. If all were offered at its end, the first
//! ones would get every free place in a full queue, and those are TCP's: the kernel answers while
//! an acknowledgement is delivered, a program a moment later.

use crate::clock::EmuClock;
use crate::gate::LinkGateway;
use crate::link_filter::LinkFilter;
use crate::node_delays::NodeDelays;
use crate::packet;
use crate::plan::{self, LinkAddresses};
use crate::port::Port;
use anyhow::Context;
use cedos_lab_energy::{RadioDirection, RunEnergyMeter};
use cedos_lab_link::{Counters, LinkCondition, LinkDirection, LinkModel, PushOutcome, Span, Time};
use cedos_lab_scenario::{DataSwitch, Family, Scenario, SwitchMeter};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The polling interval while packets move. // measured here: 25 % of a core with this value, 60 to
/// 90 % with a timer for each packet
pub const QUANTUM: Duration = Duration::from_micros(200);
/// The most packets that are taken from one device in turn.
const BATCH: usize = 512;
/// The most buffers that are kept for reuse.
const SPARE_BUFFERS_MAX: usize = 4096;
/// The size below which packets count as acknowledgements and the like, not as data. // a guess:
/// above any ACK of D2TP or TCP, below any datagram worth sending
pub const DATA_PACKET_BYTES_MIN: usize = 400;
/// The largest packet on any device.
const PACKET_BYTES_MAX: usize = 9000;

/// What the relay has carried over one link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayedBytes {
    /// The counters of the pipe towards the device.
    pub down: Counters,
    /// The counters of the pipe from the device.
    pub upward: Counters,
    /// Bytes that the device sent on the link while it was up.
    pub bytes_up: u64,
    /// Packets that the access network dropped: from a foreign address, or without a mapping.
    pub packets_misaddressed: u64,
}

enum Order {
    Apply {
        link: usize,
        condition: Box<LinkCondition>,
        done: Sender<()>,
    },
    Readdress {
        link: usize,
        addresses: LinkAddresses,
        done: Sender<()>,
    },
    Usable {
        link: usize,
    },
    Lost {
        link: usize,
    },
    Rebind {
        link: usize,
    },
    Idle,
    Report {
        to: Sender<RelayReport>,
    },
    Stop,
}

/// What the relay has carried and found so far.
#[derive(Default)]
pub(crate) struct RelayReport {
    /// What each link carried.
    pub(crate) carried: Vec<RelayedBytes>,
    pub(crate) switches: Vec<DataSwitch>,
    /// The energy of the links' radios, if the scenario names them.
    pub(crate) energy: Option<RunEnergyMeter>,
}

/// The running relay.
pub(crate) struct Relay {
    orders: Sender<Order>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

/// An interface on the internet side, with the addresses behind it.
pub(crate) struct RelayInterface {
    pub(crate) device: Port,
    pub(crate) addresses: [IpAddr; 2],
}

impl Relay {
    /// Starts to forward packets between the links' devices and `places`. All links are down.
    pub(crate) fn start(
        scenario: &Scenario,
        clock: EmuClock,
        devices: Vec<Port>,
        places: Vec<RelayInterface>,
    ) -> anyhow::Result<Relay> {
        let (orders, inbox) = channel();
        let wake = Arc::new(EventFd::from_flags(
            EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC,
        )?);
        let meter = SwitchMeter::new(scenario.links.iter().map(|link| link.name.clone()));
        let links = std::iter::zip(&scenario.links, devices)
            .enumerate()
            .map(|(number, (link, device))| {
                let mut condition = scenario.condition_at_start(number);
                condition.up = false;
                AttachedDevice {
                    device,
                    model: LinkModel::new(&condition, scenario.seed, number as u64),
                    gate: LinkGateway::new(
                        link.family,
                        link.nat,
                        link.nat_idle_s.map(Span::from_secs_f64),
                    ),
                    filter: LinkFilter::default(),
                    nat64: link.family == Family::Nat64,
                    bytes_up: 0,
                    misaddressed: 0,
                }
            })
            .collect();
        let mut worker = Worker {
            clock,
            links,
            places,
            delays: NodeDelays::of(scenario),
            inbox,
            wake: wake.clone(),
            meter,
            energy: RunEnergyMeter::of(scenario),
            spare: Vec::new(),
            found: Vec::new(),
            looked: Time::ZERO,
        };
        let thread = std::thread::Builder::new()
            .name("lab-relay".to_owned())
            .spawn(move || worker.run())
            .context("the relay's thread cannot be started")?;
        Ok(Relay {
            orders,
            wake,
            thread: Some(thread),
        })
    }

    fn order(&self, order: Order) {
        // A relay that has ended needs no order; joining it reports why it ended.
        let _ = self.orders.send(order);
        let _ = self.wake.write(1);
    }

    fn order_and_wait(&self, make: impl FnOnce(Sender<()>) -> Order) {
        let (done, wait) = channel();
        self.order(make(done));
        let _ = wait.recv();
    }

    /// Sets the condition of a link. The change has been made when it returns.
    pub(crate) fn apply(&self, link: usize, condition: &LinkCondition) {
        let condition = Box::new(condition.clone());
        self.order_and_wait(|done| Order::Apply {
            link,
            condition,
            done,
        });
    }

    /// Sets the addresses that the network assigns on the link. The change has been made when it
    /// returns.
    pub(crate) fn readdress(&self, link: usize, addresses: LinkAddresses) {
        self.order_and_wait(|done| Order::Readdress {
            link,
            addresses,
            done,
        });
    }

    /// Records that the device has its address on the link: the time of a switch counts from here.
    pub(crate) fn usable(&self, link: usize) {
        self.order(Order::Usable { link });
    }

    /// Records that the device's address on the link is gone.
    pub(crate) fn lost(&self, link: usize) {
        self.order(Order::Lost { link });
    }

    /// Makes the link's NAT drop its mappings.
    pub(crate) fn rebind(&self, link: usize) {
        self.order(Order::Rebind { link });
    }

    /// Records that no flow is active from now on.
    pub(crate) fn idle(&self) {
        self.order(Order::Idle);
    }

    /// What was carried so far, and the switches that were found.
    pub(crate) fn report(&self) -> RelayReport {
        let (to, from) = channel();
        self.order(Order::Report { to });
        from.recv().unwrap_or_default()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.order(Order::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the lab's relay panicked: what it carried after that is lost");
        }
    }
}

struct AttachedDevice {
    device: Port,
    model: LinkModel<Vec<u8>>,
    gate: LinkGateway,
    filter: LinkFilter,
    nat64: bool,
    bytes_up: u64,
    misaddressed: u64,
}

struct Worker {
    clock: EmuClock,
    links: Vec<AttachedDevice>,
    places: Vec<RelayInterface>,
    delays: NodeDelays,
    inbox: Receiver<Order>,
    wake: Arc<EventFd>,
    meter: SwitchMeter,
    energy: Option<RunEnergyMeter>,
    spare: Vec<Vec<u8>>,
    /// The packets of this poll, with the number of the link or place from which they came.
    found: Vec<(usize, Vec<u8>)>,
    /// The time up to which the models have been computed.
    looked: Time,
}

/// The arrival times of packets found in one poll.
#[derive(Clone, Copy)]
struct Arrivals {
    since: Time,
    now: Time,
    count: u64,
}

impl Arrivals {
    /// The arrival time of the packet with this number: in order, evenly spread.
    fn at(&self, number: usize) -> Time {
        let all = self.now.since(self.since);
        self.since + all.scaled(2 * number as u64 + 1, 2 * self.count.max(1))
    }
}

impl Worker {
    fn run(&mut self) {
        // Sleep exactly as long as requested, not up to 50 µs longer.
        if let Err(error) = nix::sys::prctl::set_timerslack(1) {
            tracing::debug!(%error, "timer slack stays as it is");
        }
        loop {
            let begun = self.clock.now();
            if !self.obey(begun) {
                return;
            }
            let moved = self.take_from_device(begun) | self.take_from_places(begun);
            let moved = self.hand_over() | moved;
            if moved {
                let spent = Duration::from_nanos(self.clock.now().since(begun).as_nanos());
                std::thread::sleep(QUANTUM.saturating_sub(spent));
            } else {
                self.wait();
                // The next packets arrived just now.
                self.looked = self.clock.now();
            }
        }
    }

    /// Carries out pending orders. Returns whether to continue.
    fn obey(&mut self, now: Time) -> bool {
        while let Ok(order) = self.inbox.try_recv() {
            // An order may compute the models up to now; nothing has arrived before.
            self.looked = now;
            match order {
                Order::Apply {
                    link,
                    condition,
                    done,
                } => {
                    // Packets that the device sent before it lost the link are in flight, not
                    // "while down".
                    if !condition.up {
                        self.take_from_device(now);
                    }
                    self.links[link].model.apply(now, &condition);
                    let _ = done.send(());
                }
                Order::Readdress {
                    link,
                    addresses,
                    done,
                } => {
                    self.links[link].gate.readdress(addresses);
                    let _ = done.send(());
                }
                Order::Usable { link } => self.meter.on_up(now, link),
                Order::Lost { link } => self.meter.on_down(now, link),
                Order::Rebind { link } => self.links[link].gate.rebind(),
                Order::Idle => self.meter.on_idle(),
                Order::Report { to } => {
                    let carried = self.links.iter().map(|link| RelayedBytes {
                        down: *link.model.down().counters(),
                        upward: *link.model.upward().counters(),
                        bytes_up: link.bytes_up,
                        packets_misaddressed: link.misaddressed,
                    });
                    let _ = to.send(RelayReport {
                        carried: carried.collect(),
                        switches: self.meter.clone().into_switches(),
                        energy: self.energy.clone(),
                    });
                }
                Order::Stop => return false,
            }
        }
        true
    }

    fn take_from_device(&mut self, now: Time) -> bool {
        let mut found = std::mem::take(&mut self.found);
        for (number, link) in self.links.iter().enumerate() {
            let begun = found.len();
            while found.len() < begun + BATCH
                && let Some(packet) = receive(&link.device, &mut self.spare)
            {
                found.push((number, packet));
            }
        }
        let moved = !found.is_empty();
        let arrivals = self.arrivals(now, &found);
        for (n, (number, packet)) in found.drain(..).enumerate() {
            if is_chatter(&packet) {
                keep(&mut self.spare, packet);
                continue;
            }
            let link = &mut self.links[number];
            // The first hop is next to the device: the link's delay and queue are beyond it.
            if let Some(answer) = link.gate.answer(&packet) {
                if link.model.upward().delivers() && link.model.down().delivers() {
                    send(&link.device, &answer);
                }
                keep(&mut self.spare, packet);
                continue;
            }
            let bytes = packet.len() as u32;
            if link
                .model
                .push(LinkDirection::Up, arrivals.at(n), bytes, packet)
                != PushOutcome::Down
            {
                link.bytes_up += u64::from(bytes);
                if let Some(energy) = &mut self.energy {
                    energy.on_packet(arrivals.at(n), number, RadioDirection::Up, bytes);
                }
            }
        }
        self.found = found;
        moved
    }

    fn arrivals(&self, now: Time, found: &[(usize, Vec<u8>)]) -> Arrivals {
        Arrivals {
            since: self.looked.min(now),
            now,
            count: found.len() as u64,
        }
    }

    fn take_from_places(&mut self, now: Time) -> bool {
        let mut found = std::mem::take(&mut self.found);
        for (from, place) in self.places.iter().enumerate() {
            let begun = found.len();
            while found.len() < begun + BATCH
                && let Some(packet) = receive(&place.device, &mut self.spare)
            {
                found.push((from, packet));
            }
        }
        let moved = !found.is_empty();
        let arrivals = self.arrivals(now, &found);
        for (n, (from, packet)) in found.drain(..).enumerate() {
            let at = arrivals.at(n);
            let Some(head) = packet::head(&packet) else {
                continue;
            };
            let Some(link) = self
                .links
                .iter_mut()
                .find(|l| l.gate.leads_to(head.destination))
            else {
                continue; // To an old address, or multicast.
            };
            let mtu = link.model.down().profile().mtu_bytes;
            let mtu = if link.nat64 && head.destination.is_ipv4() {
                mtu - 20
            } else {
                mtu
            };
            if packet.len() > mtu as usize && link.model.down().is_up() {
                let router = self.places[from]
                    .addresses
                    .iter()
                    .find(|a| a.is_ipv4() == head.source.is_ipv4());
                let router = match router {
                    // The router before the link; any address except the place's own will do.
                    Some(IpAddr::V4(_)) => IpAddr::V4([203, 0, 113, 1].into()),
                    _ => IpAddr::V6(plan::link_addresses(0, 0).gateway_v6),
                };
                if let Some(told) = packet::too_big(&packet, &head, router, mtu as u16) {
                    send(&self.places[from].device, &told);
                }
                continue;
            }
            let Some(packet) = link.filter.inward(link.model.reach(), packet) else {
                continue;
            };
            match link.gate.inward(at, packet) {
                Some(packet) => {
                    let bytes = packet.len() as u32;
                    link.model.push(LinkDirection::Down, at, bytes, packet);
                }
                None => link.misaddressed += 1,
            }
        }
        self.found = found;
        moved
    }

    /// Delivers packets that have crossed a link by now.
    fn hand_over(&mut self) -> bool {
        let now = self.clock.now();
        self.looked = now;
        let mut moved = false;
        while let Some(packet) = self.delays.arrived(now) {
            moved = true;
            deliver(&self.places, &packet);
            keep(&mut self.spare, packet);
        }
        for (number, link) in self.links.iter_mut().enumerate() {
            while let Some(packet) = link.model.pop(LinkDirection::Up, now) {
                moved = true;
                let Some(packet) = link.gate.outward(now, packet) else {
                    link.misaddressed += 1;
                    continue;
                };
                let Some(packet) = link.filter.outward(link.model.reach(), packet) else {
                    continue;
                };
                if let Some(packet) = self.delays.hold(now, packet) {
                    deliver(&self.places, &packet);
                    keep(&mut self.spare, packet);
                }
            }
            while let Some(packet) = link.model.pop(LinkDirection::Down, now) {
                moved = true;
                if packet.len() >= DATA_PACKET_BYTES_MIN {
                    self.meter.on_data(now, number);
                }
                if let Some(energy) = &mut self.energy {
                    energy.on_packet(now, number, RadioDirection::Down, packet.len() as u32);
                }
                send(&link.device, &packet);
                keep(&mut self.spare, packet);
            }
        }
        moved
    }

    /// Sleeps until a packet, an order, or the models' next event.
    fn wait(&mut self) {
        let next = self
            .links
            .iter()
            .filter_map(|link| link.model.next_event())
            .chain(self.delays.next_event())
            .min();
        let timeout = next.map(|at| TimeSpec::from(self.clock.until(at)));
        let mut fds = vec![PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        let devices = self
            .links
            .iter()
            .map(|l| &l.device)
            .chain(self.places.iter().map(|p| &p.device));
        fds.extend(devices.map(|d| {
            // SAFETY: the descriptor belongs to a device that lives as long as `self`.
            let fd = unsafe { BorrowedFd::borrow_raw(d.descriptor()) };
            PollFd::new(fd, PollFlags::POLLIN)
        }));
        let woken = ppoll(&mut fds, timeout, None).is_ok();
        // A device that is down reports an error at once, which must not cause a busy loop.
        let readable = |fd: &PollFd| fd.revents().is_some_and(|r| r.contains(PollFlags::POLLIN));
        let failing = |fd: &PollFd| {
            fd.revents()
                .is_some_and(|r| r.intersects(PollFlags::POLLERR))
        };
        if woken && fds.iter().any(failing) && !fds.iter().any(readable) {
            std::thread::sleep(QUANTUM);
        }
        let _ = self.wake.read();
    }
}

/// Whether a packet is multicast or link-local, such as a router solicitation, which the lab's
/// links do not carry.
fn is_chatter(packet: &[u8]) -> bool {
    match packet::head(packet).map(|head| (head.source, head.destination)) {
        Some((IpAddr::V4(_), IpAddr::V4(to))) => to.is_multicast() || to.is_broadcast(),
        Some((IpAddr::V6(from), IpAddr::V6(to))) => {
            to.is_multicast() || from.is_unicast_link_local() || from.is_unspecified()
        }
        _ => true,
    }
}

/// Reads the next packet of a device; `None` if it has none, or is down.
fn receive(device: &Port, spare: &mut Vec<Vec<u8>>) -> Option<Vec<u8>> {
    let mut landing = [0; PACKET_BYTES_MAX];
    let bytes = device.receive(&mut landing).ok()?;
    let mut buffer = spare.pop().unwrap_or_default();
    buffer.clear();
    buffer.extend_from_slice(&landing[..bytes]);
    Some(buffer)
}

fn send(device: &Port, packet: &[u8]) {
    if let Err(error) = device.send(packet) {
        // The interface went down meanwhile, so the packet is lost, as on a radio link.
        tracing::trace!(%error, bytes = packet.len(), "a packet met a device that is down");
    }
}

/// Sends a packet to the place that has its destination.
fn deliver(places: &[RelayInterface], packet: &[u8]) {
    let Some(head) = packet::head(packet) else {
        return;
    };
    let mut places = places.iter();
    if let Some(place) = places.find(|place| place.addresses.contains(&head.destination)) {
        send(&place.device, packet);
    }
}

fn keep(spare: &mut Vec<Vec<u8>>, buffer: Vec<u8>) {
    if spare.len() < SPARE_BUFFERS_MAX {
        spare.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_one_look_came_one_after_the_other_since_the_last() {
        let since = Time::from_nanos(1_000);
        let arrivals = Arrivals {
            since,
            now: Time::from_nanos(1_800),
            count: 4,
        };
        let at: Vec<u64> = (0..4)
            .map(|n| arrivals.at(n).since(since).as_nanos())
            .collect();
        assert_eq!(at, [100, 300, 500, 700]);
        let none = Arrivals {
            since,
            now: since,
            count: 3,
        };
        assert_eq!(none.at(2), since);
    }
}
