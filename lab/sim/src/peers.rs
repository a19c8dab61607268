//! Simulates two devices behind NATs and the relay between them, in virtual time, with the real
//! core.
//!
//! ```text
//!  caller 10.0.n.2 ─ NAT 198.18.0.n ─┐                      ┌─ NAT 198.18.1.n ─ listener 10.1.n.2
//!                                    ├── 203.0.113.1: relay ┤
//!                                    └──────── direct ──────┘
//! ```
//!
//! The relay's messages in the flows of its devices (ids and observed addresses) are delivered at
//! once; everything else is datagrams. There is no hairpinning, and no route from one private
//! network to another.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::net::{Ipv4Addr, SocketAddr};

use bytes::Bytes;
use cedos_lab_link::{Behaviour, FilteringNat};
use d2tp_session::{
    Addresses, Admission, Endpoint, EndpointConfig, FlowEnd, FlowId, FlowOptions, ForwardTarget,
    IncomingDatagram, InterceptedDatagram, LinkId, PathState, ReadOutcome, RelayClient, RelayId,
    RelayLimits, RelayTable, Rendezvous, RendezvousReach, SecretKey, SessionEvent, SessionId, Span,
    Time, Transmit, relayed_id, unwrap_relayed, wrap_relayed,
};

/// The one-way delay between a device and the middle of the network, and between that and the
/// relay.
const DELAY: Span = Span::from_millis(10);
/// The rate at which packets reach an address, in bytes per second.
const RATE_BYTES: u64 = 1_250_000;
/// The longest wait of packets for an address.
const QUEUE: Span = Span::from_millis(100);
/// How often a device updates its links while packets move, as in the driver.
const LOOK: Span = Span::from_millis(100);
/// The address of the relay.
const RELAY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1)), 443);
/// The link number that stands for the relay at the listener.
const FLOATING: LinkId = LinkId(1_000_000);

/// A device of a simulated session between two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimPeer {
    /// The device that begins the session.
    Caller = 0,
    /// The device that is called.
    Listener = 1,
}

/// A link a device is attached to.
struct SimAttachment {
    inside: SocketAddr,
    outside: Ipv4Addr,
    nat: FilteringNat<SocketAddr>,
}

struct SimPeerHost {
    core: Endpoint,
    /// The device's session with the relay.
    outer: SessionId,
    /// The device's session with the other device.
    inner: Option<SessionId>,
    relay_client: RelayClient,
    places: BTreeMap<LinkId, SimAttachment>,
    attached: u32,
    rendezvous: Rendezvous,
    /// The flow of the rendezvous' lines.
    lines: Option<FlowId>,
    /// A line of the rendezvous that is read in part.
    half_line: Vec<u8>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Flight {
    at: Reverse<(Time, u64)>,
    from: SocketAddr,
    to: SocketAddr,
    bytes: Vec<u8>,
}

/// A simulation of two devices that communicate.
pub struct PeerSimulation {
    now: Time,
    hosts: [SimPeerHost; 2],
    relay: Endpoint,
    relays: RelayTable,
    flights: BinaryHeap<Flight>,
    sent: u64,
    busy_until: BTreeMap<std::net::IpAddr, Time>,
    look_at: Time,
    kinds: [Behaviour; 2],
    /// What the listener sends in each flow, and the current offset.
    given: BTreeMap<FlowId, u64>,
    asked: BTreeMap<FlowId, u64>,
    got: BTreeMap<FlowId, u64>,
    ended: BTreeSet<FlowId>,
    /// The relay ids of the call: the caller's and the listener's.
    pub call: (RelayId, RelayId),
    /// Bytes that the relay has forwarded.
    pub relayed_bytes: u64,
    /// All packets that went to the relay, for replays in tests.
    pub seen_by_relay: Vec<(SocketAddr, Vec<u8>)>,
}

/// The byte at an offset of every flow.
fn content(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8
}

fn key(n: u8) -> SecretKey {
    SecretKey::from_bytes([n; 32])
}

impl SimPeerHost {
    fn new(now: Time, n: u8, rendezvous: Rendezvous) -> SimPeerHost {
        let admission = match n {
            1 => Admission::Nobody,
            _ => Admission::Anybody,
        };
        let mut core = Endpoint::new(
            EndpointConfig::default(),
            key(n),
            admission,
            [n; 32],
            [n; 32],
        );
        let outer = core.connect(now, key(9).public(), u64::from(n), 1..1000);
        let _ = core.with(outer, |s| {
            // Like LISTEN and RELAY flows: the relay may send at any time.
            let reachable = FlowOptions {
                reachable: true,
                ..FlowOptions::default()
            };
            let flow = s.open(reachable).expect("a flow may be opened");
            let _ = s.write(flow, Bytes::from_static(b"hello"));
        });
        SimPeerHost {
            core,
            outer,
            inner: None,
            relay_client: RelayClient::default(),
            places: BTreeMap::new(),
            attached: 0,
            rendezvous,
            lines: None,
            half_line: Vec::new(),
        }
    }

    fn states(&self, of: SessionId) -> Vec<d2tp_session::PathStats> {
        let session = self.core.session(of);
        session.map(|s| s.path_stats()).unwrap_or_default()
    }
}

impl PeerSimulation {
    /// A caller and a listener behind NATs of these kinds. The call has been made, and nothing was
    /// sent.
    pub fn new(caller: Behaviour, listener: Behaviour) -> PeerSimulation {
        let now = Time::ZERO + Span::from_secs(1);
        let hosts = [
            SimPeerHost::new(now, 1, Rendezvous::caller([7; 8])),
            SimPeerHost::new(now, 2, Rendezvous::listener()),
        ];
        let limits = RelayLimits {
            client: 16,
            all: 64,
        };
        let relay = Endpoint::new(
            EndpointConfig::default(),
            key(9),
            Admission::Anybody,
            [9; 32],
            [9; 32],
        );
        let mut meeting = PeerSimulation {
            now,
            hosts,
            relay,
            relays: RelayTable::new(limits, [5; 32]),
            flights: BinaryHeap::new(),
            sent: 0,
            busy_until: BTreeMap::new(),
            look_at: now,
            kinds: [caller, listener],
            given: BTreeMap::new(),
            asked: BTreeMap::new(),
            got: BTreeMap::new(),
            ended: BTreeSet::new(),
            call: (RelayId([0; 8]), RelayId([0; 8])),
            relayed_bytes: 0,
            seen_by_relay: Vec::new(),
        };
        meeting.attach(SimPeer::Caller);
        meeting.attach(SimPeer::Listener);
        let both = |m: &PeerSimulation| m.relay.ids().len() == 2;
        assert!(meeting.run_until(Span::from_secs(5), both), "no sessions");
        meeting.place_call();
        meeting
    }

    fn place_call(&mut self) {
        let of = |m: &PeerSimulation, n: u8| {
            let mut ids = m.relay.ids().into_iter();
            ids.find(|id| {
                m.relay
                    .session(*id)
                    .is_some_and(|s| s.peer() == key(n).public())
            })
        };
        let (caller, listener) = (of(self, 1).expect("known"), of(self, 2).expect("known"));
        let told = self
            .relays
            .listen(&self.relay, listener, Admission::Anybody);
        told.expect("it may listen");
        let call = self.relays.call(&self.relay, caller, key(2).public());
        let (own, theirs, _) = call.expect("it may call");
        self.call = (own, theirs);
        let [near, far] = &mut self.hosts;
        near.relay_client.use_relay(own, near.outer);
        far.relay_client.take_call(theirs, far.outer, FLOATING);
        near.rendezvous.set_relay(Some(own));
        let inner = near.core.connect(self.now, key(2).public(), 77, 1..1000);
        near.inner = Some(inner);
        near.relay_client
            .await_punch(near.rendezvous.punch(), inner);
        let reachable = FlowOptions {
            reachable: true,
            ..FlowOptions::default()
        };
        near.lines = near
            .core
            .with(inner, |s| s.open(reachable).ok())
            .ok()
            .flatten();
        self.look_at = self.now;
        self.pump();
    }

    /// The current time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Attaches a device to another network, behind another NAT of the same kind.
    pub fn attach(&mut self, peer: SimPeer) {
        let (number, kind) = (peer as u8, self.kinds[peer as usize]);
        let host = &mut self.hosts[peer as usize];
        let n = host.attached as u8 + 1;
        let link = LinkId(host.attached);
        host.attached += 1;
        let place = SimAttachment {
            inside: SocketAddr::from(([10, number, n, 2], 5000)),
            outside: Ipv4Addr::new(198, 18, number, n),
            nat: FilteringNat::new(kind),
        };
        host.places.insert(link, place);
        let (now, way) = (self.now, way(link, RELAY));
        let _ = host.core.with(host.outer, |s| s.open_path(now, way, false));
        self.pump();
    }

    /// Detaches a device from all its networks, and informs it.
    pub fn detach(&mut self, peer: SimPeer) {
        let now = self.now;
        let host = &mut self.hosts[peer as usize];
        for link in std::mem::take(&mut host.places).into_keys() {
            for id in host.core.ids() {
                let _ = host.core.with(id, |s| s.on_link_down(now, link));
            }
        }
        self.pump();
    }

    /// Restarts a device's NATs, without informing it.
    pub fn rebind(&mut self, peer: SimPeer) {
        for place in self.hosts[peer as usize].places.values_mut() {
            place.nat.rebind();
        }
    }

    /// Requests this many bytes by the caller.
    pub fn ask(&mut self, bytes: u64) -> FlowId {
        let host = &mut self.hosts[0];
        let inner = host.inner.expect("there is a call");
        let opened = host.core.with(inner, |s| {
            let flow = s
                .open(FlowOptions::default())
                .expect("a flow may be opened");
            let _ = s.write(flow, Bytes::copy_from_slice(&bytes.to_be_bytes()));
            let _ = s.finish(flow);
            flow
        });
        let flow = opened.expect("the session is there");
        self.got.insert(flow, 0);
        self.pump();
        flow
    }

    /// Bytes of a flow that the caller has read and verified.
    pub fn got(&self, flow: FlowId) -> u64 {
        self.got[&flow]
    }

    /// Whether all of a flow was read.
    pub fn is_whole(&self, flow: FlowId) -> bool {
        self.ended.contains(&flow)
    }

    /// Whether the caller has a direct path that answers.
    pub fn is_direct(&self) -> bool {
        self.paths().0 > 0
    }

    /// The caller's direct and relayed paths that answer.
    pub fn paths(&self) -> (usize, usize) {
        let host = &self.hosts[0];
        let stats = host.inner.map(|id| host.states(id)).unwrap_or_default();
        let active = stats.iter().filter(|p| p.state == PathState::Active);
        let (relayed, direct): (Vec<_>, Vec<_>) =
            active.partition(|p| RelayId::of(&p.addresses.remote).is_some());
        (direct.len(), relayed.len())
    }

    /// Whether the session between the two is still the original one.
    pub fn stands(&self) -> bool {
        let host = &self.hosts[0];
        host.inner.is_some_and(|id| host.core.session(id).is_some())
    }

    /// Runs the simulation for a span of time.
    pub fn run_for(&mut self, span: Span) {
        self.run_until(span, |_| false);
    }

    /// Runs until `done` or for `span`. Returns whether `done` became true.
    pub fn run_until(&mut self, span: Span, mut done: impl FnMut(&PeerSimulation) -> bool) -> bool {
        let until = self.now + span;
        while !done(self) {
            let at = self.next_at();
            if at > until {
                self.now = until;
                return done(self);
            }
            self.now = self.now.max(at);
            self.step();
        }
        true
    }

    fn next_at(&mut self) -> Time {
        let flight = self.flights.peek().map_or(Time::NEVER, |f| f.at.0.0);
        let hosts = self.hosts.iter();
        let timers = hosts.map(|h| h.core.next_timeout().min(h.rendezvous.next_at()));
        let timers = timers.fold(self.relay.next_timeout(), Time::min);
        flight.min(timers).min(self.look_at)
    }

    fn step(&mut self) {
        while self.flights.peek().is_some_and(|f| f.at.0.0 <= self.now) {
            let flight = self.flights.pop().expect("it was just there");
            self.deliver(flight);
        }
        self.relay.handle_timeouts(self.now);
        for host in &mut self.hosts {
            host.core.handle_timeouts(self.now);
        }
        let due = self.hosts.iter().map(|h| h.rendezvous.next_at()).min();
        if self.now >= self.look_at || due.is_some_and(|at| at <= self.now) {
            self.look_at = self.now + LOOK;
            self.tend(SimPeer::Caller);
            self.tend(SimPeer::Listener);
        }
        self.pump();
    }

    /// Does what a device's driver does at intervals.
    fn tend(&mut self, peer: SimPeer) {
        let now = self.now;
        let host = &mut self.hosts[peer as usize];
        let public = host.core.public_key();
        let mut seen_as = self
            .relay
            .ids()
            .into_iter()
            .filter_map(|id| self.relay.session(id));
        let seen = seen_as.find(|s| s.peer() == public);
        let seen = seen.map(|s| s.path_stats()).unwrap_or_default();
        let outer: Vec<_> = host.states(host.outer);
        let active = outer.iter().filter(|p| p.state == PathState::Active);
        let links: Vec<LinkId> = active.map(|p| p.addresses.link).collect();
        let mut addresses: Vec<SocketAddr> = Vec::new();
        let relay_sees = |p: &&d2tp_session::PathStats| {
            let same = seen.iter().find(|s| s.id == p.id && s.proved);
            same.map(|s| s.addresses.remote)
        };
        let mine = outer.iter().filter(|p| links.contains(&p.addresses.link));
        addresses.extend(mine.filter_map(|p| relay_sees(&p)));
        let places = links.iter().filter_map(|l| host.places.get(l));
        addresses.extend(places.map(|p| p.inside));
        let links = links
            .into_iter()
            .map(|link| (link, RendezvousReach::Ipv4))
            .collect();
        host.rendezvous.set_local_addresses(now, links, addresses);
        let Some(inner) = host.inner else { return };
        let rendezvous = &mut host.rendezvous;
        let _ = host.core.with(inner, |s| rendezvous.update_paths(now, s));
        if let (Some(flow), Some(line)) = (host.lines, host.rendezvous.poll_line()) {
            let _ = host.core.with(inner, |s| s.write(flow, line.into()));
        }
        let mut punches = Vec::new();
        while let Some(punch) = host.rendezvous.poll_punch(now) {
            punches.push(punch);
        }
        for (link, to, id) in punches {
            let mut bytes = vec![0x40];
            bytes.extend(id);
            bytes.resize(d2tp_session::PUNCH_BYTES, 0);
            self.leave(peer, link, to, bytes);
        }
    }

    /// Sends a datagram of a device over a link.
    fn leave(&mut self, peer: SimPeer, link: LinkId, to: SocketAddr, bytes: Vec<u8>) {
        let host = &mut self.hosts[peer as usize];
        let Some(place) = host.places.get_mut(&link) else {
            return;
        };
        let port = place.nat.outbound(place.inside, to);
        let from = SocketAddr::from((place.outside, port));
        self.fly(from, to, bytes);
    }

    fn fly(&mut self, from: SocketAddr, to: SocketAddr, bytes: Vec<u8>) {
        self.sent += 1;
        let busy = self.busy_until.entry(to.ip()).or_insert(self.now);
        let begins = self.now.max(*busy);
        if begins.since(self.now) > QUEUE {
            return;
        }
        *busy = begins + Span::from_nanos(bytes.len() as u64 * 1_000_000_000 / RATE_BYTES);
        let at = Reverse((*busy + DELAY.times(2), self.sent));
        self.flights.push(Flight {
            at,
            from,
            to,
            bytes,
        });
    }

    /// Delivers a datagram of an unknown host to the relay.
    pub fn inject(&mut self, from: SocketAddr, bytes: Vec<u8>) {
        self.fly(from, RELAY, bytes);
    }

    fn deliver(&mut self, flight: Flight) {
        let Flight {
            from,
            to,
            mut bytes,
            ..
        } = flight;
        if to == RELAY {
            self.seen_by_relay.push((from, bytes.clone()));
            return self.at_relay(from, &mut bytes);
        }
        let now = self.now;
        for peer in [SimPeer::Caller, SimPeer::Listener] {
            let host = &mut self.hosts[peer as usize];
            let mut places = host.places.iter();
            let found = places.find(|(_, p)| p.outside == to.ip());
            let Some((link, place)) = found else { continue };
            let link = *link;
            if place.nat.inbound(to.port(), from).is_none() {
                return;
            }
            let mut at = way(link, from);
            let mut packet = &mut bytes[..];
            match host.relay_client.classify_datagram(&host.core, &at, packet) {
                None => {}
                Some(InterceptedDatagram::Punch(_)) => return host.rendezvous.on_punch(link, from),
                Some(InterceptedDatagram::Nothing) => return,
                Some(InterceptedDatagram::Relayed(stands)) => {
                    let Some(within) = unwrap_relayed(packet) else {
                        return;
                    };
                    (at, packet) = (stands, within);
                }
            }
            let incoming = IncomingDatagram {
                addresses: at,
                bytes: packet,
            };
            return host.core.handle_datagram(now, incoming);
        }
    }

    fn at_relay(&mut self, from: SocketAddr, bytes: &mut [u8]) {
        let at = way(LinkId(0), from);
        let id = relayed_id(bytes)
            .map(RelayId)
            .filter(|id| self.relays.contains(*id));
        let Some(id) = id else {
            let incoming = IncomingDatagram {
                addresses: at,
                bytes,
            };
            return self.relay.handle_datagram(self.now, incoming);
        };
        let Some(packet) = unwrap_relayed(bytes) else {
            return;
        };
        let onward = self
            .relays
            .forward_from_device(&self.relay, id, &at, packet);
        let Some(ForwardTarget::Device(id, to)) = onward else {
            return;
        };
        let mut out = Vec::new();
        wrap_relayed(id, packet, &mut out);
        self.relayed_bytes += out.len() as u64;
        self.fly(RELAY, to.remote, out);
    }

    /// Lets all hosts send what they can send now.
    fn pump(&mut self) {
        let mut buf = vec![0; 65_536];
        for _ in 0..10_000 {
            self.serve();
            self.read();
            let mut idle = true;
            while let Some(t) = self.relay.poll_transmit(self.now, &mut buf) {
                idle = false;
                for datagram in buf[..t.len].chunks(t.segment) {
                    self.fly(RELAY, t.remote, datagram.to_vec());
                }
            }
            while self.relay.poll_event().is_some() {
                idle = false;
            }
            for peer in [SimPeer::Caller, SimPeer::Listener] {
                while let Some(t) = self.hosts[peer as usize]
                    .core
                    .poll_transmit(self.now, &mut buf)
                {
                    idle = false;
                    self.leave_batch(peer, t, &buf[..t.len]);
                }
                while let Some((id, event)) = self.hosts[peer as usize].core.poll_event() {
                    idle = false;
                    self.on_event(peer, id, &event);
                }
            }
            if idle {
                return;
            }
        }
        panic!("they never fall silent at {:?}", self.now);
    }

    fn leave_batch(&mut self, peer: SimPeer, t: Transmit, bytes: &[u8]) {
        let Some(id) = RelayId::of(&t.remote) else {
            for datagram in bytes.chunks(t.segment) {
                self.leave(peer, t.link, t.remote, datagram.to_vec());
            }
            return;
        };
        let host = &self.hosts[peer as usize];
        let Some(out) = host.relay_client.relay_addresses(&host.core, t.link, id) else {
            return;
        };
        for packet in bytes.chunks(t.segment) {
            let mut wrapped = Vec::new();
            wrap_relayed(id, packet, &mut wrapped);
            self.leave(peer, out.link, out.remote, wrapped);
        }
    }

    fn on_event(&mut self, peer: SimPeer, id: SessionId, event: &SessionEvent) {
        let host = &mut self.hosts[peer as usize];
        match event {
            SessionEvent::Opened(flow) if peer == SimPeer::Listener => {
                host.inner = Some(id);
                // The first flow of a call belongs to the rendezvous.
                if flow.counter() == 0 {
                    host.lines = Some(*flow);
                } else {
                    self.asked.insert(*flow, 0);
                }
            }
            SessionEvent::Ended { flow, end } if peer == SimPeer::Caller => {
                assert_eq!(*end, FlowEnd::Complete);
                self.ended.insert(*flow);
            }
            SessionEvent::SendFrom { flow, offset } => {
                self.given.insert(*flow, *offset);
            }
            _ => {}
        }
    }

    /// The listener's application, which answers each request with the requested bytes.
    fn serve(&mut self) {
        let host = &mut self.hosts[1];
        let Some(inner) = host.inner else { return };
        for (flow, total) in &mut self.asked {
            let flow = *flow;
            let given = self.given.entry(flow).or_default();
            let _ = host.core.with(inner, |s| {
                while let Ok(ReadOutcome::Chunk(chunk)) = s.read(flow, 8) {
                    *total = u64::from_be_bytes(chunk[..].try_into().expect("eight bytes"));
                }
                while *given < *total
                    && let Ok(room @ 1..) = s.write_room(flow)
                {
                    let n = room.min(*total - *given).min(40_000);
                    let bytes: Vec<u8> = (*given..*given + n).map(content).collect();
                    let _ = s.write(flow, bytes.into());
                    *given += n;
                    if *given == *total {
                        let _ = s.finish(flow);
                    }
                }
            });
        }
    }

    /// Reads at both ends: the caller's requested bytes, and both ends' lines.
    fn read(&mut self) {
        for host in &mut self.hosts {
            let (Some(inner), Some(flow)) = (host.inner, host.lines) else {
                continue;
            };
            let half_line = &mut host.half_line;
            let _ = host.core.with(inner, |s| {
                while let Ok(ReadOutcome::Chunk(chunk)) = s.read(flow, 1 << 16) {
                    half_line.extend_from_slice(&chunk);
                }
            });
            while let Some(end) = half_line.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = half_line.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line[..end]).into_owned();
                host.rendezvous.handle_line(self.now, &line);
                self.look_at = self.now;
            }
        }
        let host = &mut self.hosts[0];
        let Some(inner) = host.inner else { return };
        for (flow, got) in &mut self.got {
            let _ = host.core.with(inner, |s| {
                while let Ok(ReadOutcome::Chunk(chunk)) = s.read(*flow, 1 << 16) {
                    for byte in chunk {
                        assert_eq!(byte, content(*got), "byte {got} of {flow:?}");
                        *got += 1;
                    }
                }
            });
        }
    }
}

fn way(link: LinkId, remote: SocketAddr) -> Addresses {
    Addresses {
        link,
        local: None,
        remote,
    }
}
