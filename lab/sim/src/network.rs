//! The network between device and proxy: two pipes for each link, addresses, NATs.
//!
//! ```text
//!  device 10.n.a.2 ──▶ upward pipe ──▶ NAT 198.18.x.y:port ──▶ proxy 203.0.113.1
//!                  ◀── down pipe   ◀── NAT (no mapping: dropped) ◀──
//! ```
//!
//! Each attachment of a link has its own address and, with a NAT, its own NAT, so packets to an
//! earlier one are dropped. A damaged packet is passed to the core unchanged: a kernel would drop
//! most of them by their checksum, but the core must handle all of them. Streams travel as TCP
//! segments on the same pipes (`network/segments.rs`).

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use cedos_lab_energy::{RadioDirection, RunEnergyMeter};
use cedos_lab_link::{
    Counters, LinkDirection, LinkModel, Nat, Packet, Profile, PushOutcome, Span, TcpPassage, Time,
};
use cedos_lab_scenario::{
    CrashedEnd, EventKind, Family, LinkReport, MTU_V6_MIN, NatKind, Scenario, ScenarioLinkEvent,
    Timeline,
};
use d2tp_session::StreamPathId;
use rand::Rng;

use crate::archive::Archive;
use crate::stream_paths::SimStreams;

mod segments;

use segments::SimSegment;

/// The address of the proxy.
const PROXY_V4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
const PROXY_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 1);
const PROXY_PORT: u16 = 443;
/// The external addresses of NATs, 4096 for each link. // RFC 2544's benchmark range
const OUTER: u32 = u32::from_be_bytes([198, 18, 0, 0]);
const OUTER_PER_LINK: u32 = 4096;
/// The first port of the device's sockets; each new socket gets the next one.
const DEVICE_PORT_FIRST: u16 = 40_000;
/// The rate of a link from which on progress is required. // a guess: a full-size packet in a fifth
/// of a second, and every probe's answer well before the run counts as stuck
const GOOD_BITS_PER_SECOND: u64 = 50_000;
const GOOD_DELAY: Span = Span::from_millis(2_000);
/// The most loss of a link without UDP from which progress is required: TCP carries little under more loss, and a stream that is not
/// open after 10 s is given up. // a guess
const STREAM_LOSS_MAX: f64 = 0.05;
const STREAM_GOOD_DELAY: Span = Span::from_millis(500);
/// Bytes of the IP and UDP headers.
const HEADERS_V4_BYTES: usize = 28;
const HEADERS_V6_BYTES: usize = 48;

/// A UDP datagram on a link.
#[derive(Clone, Debug)]
pub(crate) struct SimDatagram {
    from: SocketAddr,
    to: SocketAddr,
    bytes: Vec<u8>,
}

/// A packet on a link.
#[derive(Clone, Debug)]
enum SimPacket {
    Datagram(SimDatagram),
    Segment(SimSegment),
}

impl Packet for SimPacket {
    fn corrupt(&mut self, entropy: u64) {
        match self {
            SimPacket::Datagram(datagram) => datagram.bytes.corrupt(entropy),
            SimPacket::Segment(segment) => segment.damage(),
        }
    }
}

/// A packet that passed the device's end of a link, for energy models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassedPacket {
    /// The time of the packet.
    pub at: Time,
    /// The link's number in the scenario.
    pub link: usize,
    /// The direction of the packet.
    pub way: LinkDirection,
    /// Bytes of the IP packet.
    pub bytes: u32,
}

/// A datagram that was delivered to an end.
#[derive(Debug)]
pub(crate) struct Delivery {
    /// The link on which the datagram arrived.
    pub link: usize,
    /// The sender's address, as the receiver sees it.
    pub from: SocketAddr,
    /// The stream in which the datagram arrived, if it arrived in one.
    pub stream: Option<StreamPathId>,
    /// The payload of the datagram.
    pub bytes: Vec<u8>,
}

impl Delivery {
    /// A packet that arrived in a stream.
    pub(crate) fn in_stream(link: usize, stream: StreamPathId, bytes: Vec<u8>) -> Delivery {
        Delivery {
            link,
            from: stream.address(),
            stream: Some(stream),
            bytes,
        }
    }
}

/// How packets of an attachment reach the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NatPassage {
    /// Packets keep the device's own address.
    Own,
    /// Packets pass a NAT with this external address.
    Nat(Ipv4Addr),
    /// Packets pass a NAT64 with this external address.
    Nat64(Ipv4Addr),
}

/// A link with its pipes, NAT and sockets.
struct Access {
    name: String,
    class: &'static str,
    family: Family,
    nat_kind: NatKind,
    pipes: LinkModel<SimPacket>,
    tcp: TcpPassage,
    up: bool,
    dead: bool,
    stalled: bool,
    address: u32,
    /// The address of the device's socket on it.
    local: SocketAddr,
    way: NatPassage,
    nat: Nat<SocketAddr>,
    /// The NAT's table for TCP, whose mappings no NAT forgets within hours. // RFC 5382 REQ-5
    tcp_nat: Nat<SocketAddr>,
    bytes_up: u64,
}

/// All links of a scenario.
pub(crate) struct SimNetwork {
    links: Vec<Access>,
    timeline: Timeline,
    next_port: u16,
    seed: u64,
    /// The ends of streams.
    pub(crate) streams: SimStreams,
    /// Whether the proxy accepts streams.
    accepts_streams: bool,
    /// Whether the device is told of an HTTP proxy.
    has_http_proxy: bool,
    /// Whether the machines of device and proxy have crashed, so that no packet is answered.
    pub(crate) machines_off: [bool; 2],
    /// Samples of the datagrams to the device and to the proxy, if replays are possible.
    archives: Option<[Archive; 2]>,
    /// The packets that passed the device, if they are recorded.
    pub(crate) passages: Option<Vec<PassedPacket>>,
    /// The number of packets that passed the device.
    pub(crate) passed: u64,
    /// The energy of the links' radios, if the scenario names them.
    pub(crate) energy: Option<RunEnergyMeter>,
}

impl SimNetwork {
    pub(crate) fn new(scenario: &Scenario) -> SimNetwork {
        let links = scenario
            .links
            .iter()
            .enumerate()
            .map(|(number, link)| {
                let mut condition = scenario.condition_at_start(number);
                // The first event of the timeline brings it up, with an address.
                condition.up = false;
                Access {
                    name: link.name.clone(),
                    class: link.class.word(),
                    family: link.family,
                    nat_kind: link.nat,
                    pipes: LinkModel::new(&condition, scenario.seed, number as u64),
                    tcp: TcpPassage::Pass,
                    up: false,
                    dead: false,
                    stalled: false,
                    address: 0,
                    local: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
                    way: NatPassage::Own,
                    nat: link
                        .nat_idle_s
                        .map(Span::from_secs_f64)
                        .map_or_else(Nat::new, Nat::with_idle),
                    tcp_nat: Nat::new(),
                    bytes_up: 0,
                }
            })
            .collect();
        SimNetwork {
            links,
            timeline: scenario.timeline(),
            next_port: DEVICE_PORT_FIRST,
            seed: scenario.seed,
            streams: SimStreams::default(),
            accepts_streams: scenario.streams,
            has_http_proxy: scenario.has_http_proxy(),
            machines_off: [false; 2],
            archives: (!scenario.replays.is_empty())
                .then(|| [0, 1].map(|n| Archive::new(scenario.seed, n))),
            passages: None,
            passed: 0,
            energy: RunEnergyMeter::of(scenario),
        }
    }

    /// The time of the next event of a link.
    pub(crate) fn next_at(&self) -> Time {
        let pipes = self.links.iter().filter_map(|l| l.pipes.next_event());
        pipes
            .chain(self.timeline.next_at())
            .chain([self.streams.next_at()])
            .min()
            .unwrap_or(Time::NEVER)
    }

    /// The next event of a link by `now`, which has been applied when this returns.
    pub(crate) fn next_event(&mut self, now: Time) -> Option<ScenarioLinkEvent> {
        if self.timeline.next_at()? > now {
            return None;
        }
        let event = self.timeline.next()?;
        let link = &mut self.links[event.link];
        link.pipes.apply(now, &event.condition);
        link.up = event.condition.up;
        link.dead = event.condition.dead;
        link.stalled = event.condition.stalled;
        link.tcp = event.condition.tcp;
        match event.kind {
            EventKind::Up { address } | EventKind::NewAddress { address } => {
                link.address = address;
                link.nat.rebind();
                link.tcp_nat.rebind();
                self.open_socket(event.link);
            }
            EventKind::Rebind => {
                link.nat.rebind();
                link.tcp_nat.rebind();
            }
            EventKind::Down | EventKind::Attaching | EventKind::Changed => {}
        }
        Some(event)
    }

    /// Opens a fresh socket of the device on the link.
    pub(crate) fn open_socket(&mut self, number: usize) {
        let port = self.new_port();
        let link = &mut self.links[number];
        let (n, a) = (number as u32, link.address);
        let inner = Ipv4Addr::from(0x0a00_0002 | n << 20 | (a % 4096) << 8);
        let outer = Ipv4Addr::from(OUTER + n * OUTER_PER_LINK + a % OUTER_PER_LINK);
        let v6 = Ipv6Addr::new(0x2001, 0xdb8, 0, n as u16, a as u16, 0, 0, 2);
        (link.local, link.way) = match (link.family, link.nat_kind) {
            (Family::V4, NatKind::None) => (SocketAddr::from((inner, port)), NatPassage::Own),
            (Family::V4, _) => (SocketAddr::from((inner, port)), NatPassage::Nat(outer)),
            (Family::V6 | Family::Both, _) => (SocketAddr::from((v6, port)), NatPassage::Own),
            (Family::Nat64, _) => (SocketAddr::from((v6, port)), NatPassage::Nat64(outer)),
        };
    }

    fn new_port(&mut self) -> u16 {
        let port = self.next_port;
        self.next_port = port.checked_add(1).unwrap_or(DEVICE_PORT_FIRST);
        port
    }

    /// The device's own address on the link.
    pub(crate) fn address(&self, number: usize) -> std::net::IpAddr {
        self.links[number].local.ip()
    }

    /// The proxy's address, as the device reaches it over this link.
    pub(crate) fn proxy_address(&self, number: usize) -> SocketAddr {
        match (self.links[number].local, self.links[number].way) {
            (_, NatPassage::Nat64(_)) => SocketAddr::from((nat64(PROXY_V4), PROXY_PORT)),
            (SocketAddr::V6(_), _) => SocketAddr::from((PROXY_V6, PROXY_PORT)),
            (SocketAddr::V4(_), _) => SocketAddr::from((PROXY_V4, PROXY_PORT)),
        }
    }

    /// Sends a datagram of the device on a link.
    pub(crate) fn send_up(
        &mut self,
        now: Time,
        number: usize,
        to: SocketAddr,
        bytes: &[u8],
    ) -> PushOutcome {
        let link = &mut self.links[number];
        let size = (bytes.len() + headers_bytes(link.local)) as u32;
        if let Some([_, to_proxy]) = self.archives.as_mut().filter(|_| link.up) {
            let from = link.seen_from(now);
            to_proxy.offer(number, from, bytes);
        }
        let datagram = SimPacket::Datagram(SimDatagram {
            from: link.local,
            to,
            bytes: bytes.to_vec(),
        });
        self.push_up(now, number, size, datagram)
    }

    /// Offers a packet of the device to a link.
    fn push_up(&mut self, now: Time, number: usize, size: u32, packet: SimPacket) -> PushOutcome {
        let link = &mut self.links[number];
        let verdict = link.pipes.push(LinkDirection::Up, now, size, packet);
        if matches!(verdict, PushOutcome::Queued | PushOutcome::QueueFull) {
            link.bytes_up += u64::from(size);
            self.note_passage(now, number, LinkDirection::Up, size);
        }
        verdict
    }

    fn note_passage(&mut self, at: Time, link: usize, way: LinkDirection, bytes: u32) {
        self.passed += 1;
        if let Some(passages) = &mut self.passages {
            passages.push(PassedPacket {
                at,
                link,
                way,
                bytes,
            });
        }
        if let Some(energy) = &mut self.energy {
            let way = match way {
                LinkDirection::Up => RadioDirection::Up,
                LinkDirection::Down => RadioDirection::Down,
            };
            energy.on_packet(at, link, way, bytes);
        }
    }

    /// Whether the proxy's own link, an Ethernet, refuses a datagram of this size.
    pub(crate) fn is_too_big_for_proxy(&self, to: SocketAddr, datagram_bytes: usize) -> bool {
        datagram_bytes + headers_bytes(to) > PROXY_MTU_BYTES
    }

    /// Sends a datagram of the proxy. Returns the link, if its address leads to one.
    pub(crate) fn send_down(
        &mut self,
        now: Time,
        to: SocketAddr,
        bytes: &[u8],
    ) -> Option<(usize, PushOutcome)> {
        let (number, from, inner) = self.links.iter().enumerate().find_map(|(number, link)| {
            let proxy = self.proxy_address(number);
            let inner = link.inner(now, to)?;
            Some((number, proxy, inner))
        })?;
        if !self.links[number].pipes.reach().passes_udp() {
            return None;
        }
        let size = (bytes.len() + headers_bytes(inner)) as u32;
        if let Some([to_device, _]) = &mut self.archives {
            to_device.offer(number, from, bytes);
        }
        let datagram = SimPacket::Datagram(SimDatagram {
            from,
            to: inner,
            bytes: bytes.to_vec(),
        });
        let verdict = self.links[number]
            .pipes
            .push(LinkDirection::Down, now, size, datagram);
        Some((number, verdict))
    }

    /// The next datagram that reaches the proxy by `now`.
    pub(crate) fn next_for_proxy(&mut self, now: Time) -> Option<Delivery> {
        for number in 0..self.links.len() {
            while let Some(packet) = self.pop(now, number, LinkDirection::Up) {
                let datagram = match packet {
                    SimPacket::Datagram(datagram) => datagram,
                    SimPacket::Segment(segment) => {
                        self.on_segment_up(now, number, segment);
                        continue;
                    }
                };
                let link = &mut self.links[number];
                let passes = link.pipes.reach().passes_udp() && reaches_proxy(datagram.to);
                if datagram.from != link.local || !passes {
                    continue;
                }
                return Some(Delivery {
                    link: number,
                    from: link.seen_from(now),
                    stream: None,
                    bytes: datagram.bytes,
                });
            }
        }
        None
    }

    /// The next datagram that reaches the device by `now`.
    pub(crate) fn next_for_device(&mut self, now: Time) -> Option<Delivery> {
        for number in 0..self.links.len() {
            while let Some(packet) = self.pop(now, number, LinkDirection::Down) {
                let datagram = match packet {
                    SimPacket::Datagram(datagram) => datagram,
                    SimPacket::Segment(segment) => {
                        self.on_segment_down(now, number, segment);
                        continue;
                    }
                };
                let local = self.links[number].local;
                if datagram.to == local {
                    let SimDatagram { from, bytes, .. } = datagram;
                    let size = (bytes.len() + headers_bytes(local)) as u32;
                    self.note_passage(now, number, LinkDirection::Down, size);
                    return Some(Delivery {
                        link: number,
                        from,
                        stream: None,
                        bytes,
                    });
                }
            }
        }
        None
    }

    fn pop(&mut self, now: Time, number: usize, way: LinkDirection) -> Option<SimPacket> {
        let link = &mut self.links[number];
        let packet = link.pipes.pop(way, now)?;
        assert!(link.up, "a packet crossed {}, which is down", link.name);
        Some(packet)
    }

    /// A datagram that was sent to this end before, as it would arrive if it were sent again;
    /// `None` if there is none or, for the device, no link is up.
    pub(crate) fn replayed(&mut self, to: CrashedEnd, elsewhere: bool) -> Option<Delivery> {
        let [to_device, to_proxy] = self.archives.as_mut()?;
        let archive = match to {
            CrashedEnd::Device => to_device,
            CrashedEnd::Proxy => to_proxy,
        };
        let copy = archive.draw()?;
        let from = if elsewhere {
            archive.elsewhere()
        } else {
            copy.from
        };
        let mut link = copy.link;
        if to == CrashedEnd::Device && !self.links[link].up {
            link = self.links.iter().position(|l| l.up)?;
        }
        Some(Delivery {
            link,
            from,
            stream: None,
            bytes: copy.bytes,
        })
    }

    /// The sum of the counters of all pipes.
    pub(crate) fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        for link in &self.links {
            for pipe in [link.pipes.down(), link.pipes.upward()] {
                let c = pipe.counters();
                sum.packets_queue_full += c.packets_queue_full;
                sum.packets_too_big += c.packets_too_big;
                sum.packets_lost += c.packets_lost;
                sum.packets_cut += c.packets_cut;
                sum.packets_duplicated += c.packets_duplicated;
                sum.packets_reordered += c.packets_reordered;
                sum.packets_corrupted += c.packets_corrupted;
            }
        }
        sum
    }

    /// Whether the device has an address on the link.
    pub(crate) fn is_up(&self, number: usize) -> bool {
        self.links[number].up
    }

    /// Whether the link's first hop would answer one of two echo requests. They have the link's
    /// losses, but take no place in its queues.
    pub(crate) fn hop_answers(&self, now: Time, number: usize) -> bool {
        let link = &self.links[number];
        let one = arrives(link.pipes.down().profile()) * arrives(link.pipes.upward().profile());
        // A generator for this time only, so that the call does not affect later ones.
        let mut rng = cedos_lab_link::seeded(self.seed ^ now.as_nanos(), number as u64);
        let lost = rng.random::<f64>() < (1.0 - one).powi(2);
        link.up && !link.dead && !link.stalled && !lost
    }

    /// Whether the link carries at least half of the packets in both directions, and soon enough,
    /// so that progress can be required.
    pub(crate) fn is_good(&self, number: usize) -> bool {
        let link = &self.links[number];
        let udp = link.pipes.reach().passes_udp();
        let carries = |profile: &Profile| {
            let loss_max = if udp { 0.5 } else { STREAM_LOSS_MAX };
            1.0 - arrives(profile) <= loss_max
                && (udp || profile.reorder <= STREAM_LOSS_MAX)
                && profile
                    .rate
                    .bits_per_second()
                    .is_none_or(|bps| bps >= GOOD_BITS_PER_SECOND)
                && profile.delay <= if udp { GOOD_DELAY } else { STREAM_GOOD_DELAY }
                && profile.mtu_bytes >= MTU_V6_MIN
        };
        link.up
            && !link.dead
            && !link.stalled
            && (udp || self.passes_streams(link))
            && carries(link.pipes.down().profile())
            && carries(link.pipes.upward().profile())
    }

    /// The traffic of the links.
    pub(crate) fn reports(&self) -> Vec<LinkReport> {
        let report = |link: &Access| LinkReport {
            name: link.name.clone(),
            class: link.class.to_owned(),
            bytes_down: link.pipes.down().counters().bytes_delivered,
            bytes_up: link.bytes_up,
            packets_while_down: link.pipes.upward().counters().packets_while_down,
            wait_down_ms: link.pipes.down().counters().waited_mean_ms(),
            wait_up_ms: link.pipes.upward().counters().waited_mean_ms(),
            wait_down_max_ms: link.pipes.down().counters().waited_max.as_millis_f64(),
        };
        self.links.iter().map(report).collect()
    }
}

impl Access {
    /// The device's address, as the proxy sees it.
    fn seen_from(&mut self, now: Time) -> SocketAddr {
        match self.way {
            NatPassage::Own => self.local,
            NatPassage::Nat(outer) | NatPassage::Nat64(outer) => {
                SocketAddr::from((outer, self.nat.outbound_at(now, self.local)))
            }
        }
    }

    /// The socket on this link that a datagram to `to` reaches.
    fn inner(&self, now: Time, to: SocketAddr) -> Option<SocketAddr> {
        if !self.up {
            return None;
        }
        match self.way {
            NatPassage::Own => (to == self.local).then_some(to),
            NatPassage::Nat(outer) | NatPassage::Nat64(outer) => {
                (to.ip() == outer).then(|| self.nat.inbound_at(now, to.port()))?
            }
        }
    }
}

/// The share of packets that pass a pipe undamaged.
fn arrives(profile: &Profile) -> f64 {
    let burst = profile.loss.burst;
    let in_bursts = burst.map_or(0.0, |b| b.enter / (b.enter + b.leave));
    (1.0 - profile.loss.random) * (1.0 - in_bursts) * (1.0 - profile.corrupt)
}

fn nat64(v4: Ipv4Addr) -> Ipv6Addr {
    let [a, b, c, d] = v4.octets();
    let pair = |high, low| u16::from_be_bytes([high, low]);
    // RFC 6052 §2.1
    Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, pair(a, b), pair(c, d))
}

fn reaches_proxy(to: SocketAddr) -> bool {
    to.port() == PROXY_PORT
        && (to.ip() == PROXY_V4 || to.ip() == PROXY_V6 || to.ip() == nat64(PROXY_V4))
}

/// The MTU of the proxy's own link, as that of the lab's internet.
const PROXY_MTU_BYTES: usize = 1500;

fn headers_bytes(local: SocketAddr) -> usize {
    if local.is_ipv6() {
        HEADERS_V6_BYTES
    } else {
        HEADERS_V4_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(link: &str) -> SimNetwork {
        let text = format!("duration_s = 60\n[[link]]\nname = \"wlan0\"\n{link}");
        let scenario = Scenario::parse("test", &text, &mut |_| unreachable!()).unwrap();
        let mut network = SimNetwork::new(&scenario);
        while network.next_event(Time::ZERO).is_some() {}
        network
    }

    fn s(s: u64) -> Time {
        Time::ZERO + Span::from_millis(1000 * s)
    }

    fn up(network: &mut SimNetwork, at: Time) -> SocketAddr {
        let proxy = network.proxy_address(0);
        assert_eq!(
            network.send_up(at, 0, proxy, b"to the proxy"),
            PushOutcome::Queued
        );
        network
            .next_for_proxy(at + Span::from_millis(500))
            .unwrap()
            .from
    }

    #[test]
    fn an_answer_finds_its_way_back_through_the_nat() {
        let mut network = network("");
        let from = up(&mut network, s(0));
        assert_eq!(from.ip().to_string(), "198.18.0.0");
        assert!(network.send_down(s(1), from, b"to the device").is_some());
        let delivery = network.next_for_device(s(2)).unwrap();
        assert_eq!(delivery.from, network.proxy_address(0));
        assert_eq!(delivery.bytes, b"to the device");
    }

    #[test]
    fn after_a_rebinding_the_old_port_leads_nowhere() {
        let mut network = network("nat = \"rebinding\"\nnat_rebind_s = 5\n");
        let from = up(&mut network, s(0));
        while network.next_event(s(5)).is_some() {}
        assert!(network.send_down(s(5), from, b"late").is_none());
        assert_ne!(up(&mut network, s(5)), from);
    }

    #[test]
    fn after_re_attachment_there_is_another_address_and_the_old_one_leads_nowhere() {
        let at = "[[link.at]]\nt_s = 5\nup = false\n[[link.at]]\nt_s = 9\nup = true\n";
        let mut network = network(at);
        let from = up(&mut network, s(0));
        while network.next_event(s(5)).is_some() {}
        let proxy = network.proxy_address(0);
        assert_eq!(network.send_up(s(6), 0, proxy, b"lost"), PushOutcome::Down);
        assert_eq!(network.reports()[0].packets_while_down, 1);
        while network.next_event(s(9)).is_some() {}
        assert!(network.send_down(s(9), from, b"late").is_none());
        assert_ne!(up(&mut network, s(9)).ip(), from.ip());
    }

    #[test]
    fn an_ipv6_only_device_reaches_the_proxy_through_a_nat64() {
        let mut network = network("family = \"v6-only-nat64\"\n");
        assert_eq!(
            network.proxy_address(0).to_string(),
            "[64:ff9b::cb00:7101]:443"
        );
        let from = up(&mut network, s(0));
        assert!(from.is_ipv4());
        assert!(network.send_down(s(1), from, b"back").is_some());
        assert!(network.next_for_device(s(2)).unwrap().from.is_ipv6());
    }
}
