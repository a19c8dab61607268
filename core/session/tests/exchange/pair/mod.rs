//! Two endpoints and links between them, in virtual time: the smallest network that can lose,
//! delay, cut and move. The full models are the lab's; this is for exchanges one can follow.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::cell::RefCell;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::SocketAddr;
use std::rc::Rc;

use bytes::Bytes;
use d2tp_session::*;
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg32;

pub const MS: Span = Span::from_millis(1);

pub fn device_key() -> SecretKey {
    SecretKey::from_bytes([11; 32])
}
pub fn server_key() -> SecretKey {
    SecretKey::from_bytes([22; 32])
}

/// A queue that several links lead through on the way to the device.
pub struct Bottleneck {
    /// Bytes per second.
    pub rate: u64,
    /// Bytes that wait at most.
    pub queue: u64,
    pub busy_until: Time,
    pub manager: QueueManagement,
    pub dice: Pcg32,
}

/// How a queue is managed: whether it drops packets before it is full.
#[derive(Clone, Copy, Debug, Default)]
pub enum QueueManagement {
    /// Packets are dropped only when the queue is full.
    #[default]
    DropTail,
    /// At random as the queue fills, so that all who pass see the same loss rate.
    Early,
    /// Ever more often while a queue stands.
    CoDel(CoDel),
}

/// The state of the queue management CoDel (RFC 8289 §5).
#[derive(Clone, Copy, Debug, Default)]
pub struct CoDel {
    stands_since: Option<Time>,
    next: Time,
    count: u64,
    dropping: bool,
}

impl CoDel {
    const TARGET: Span = Span::from_millis(5);
    const INTERVAL: Span = Span::from_millis(100);

    /// Whether a packet that leaves the queue at this time after this wait is dropped.
    fn drops(&mut self, at: Time, waited: Span) -> bool {
        if waited < Self::TARGET {
            (self.stands_since, self.dropping) = (None, false);
            return false;
        }
        let since = *self.stands_since.get_or_insert(at);
        if self.dropping && at >= self.next {
            self.count += 1;
            self.next += self.pause();
            return true;
        }
        let begins = !self.dropping && at >= since + Self::INTERVAL;
        if begins {
            let lately = at.since(self.next) < Self::INTERVAL.times(16);
            self.count = if lately && self.count > 2 {
                self.count - 2
            } else {
                1
            };
            self.dropping = true;
            self.next = at + self.pause();
        }
        begins
    }

    fn pause(&self) -> Span {
        Span::from_nanos((Self::INTERVAL.as_nanos() as f64 / (self.count as f64).sqrt()) as u64)
    }
}

impl Bottleneck {
    pub fn new(rate: u64, queue: u64) -> Self {
        Bottleneck {
            rate,
            queue,
            busy_until: Time::ZERO,
            manager: QueueManagement::DropTail,
            dice: Pcg32::seed_from_u64(1),
        }
    }

    /// Random early drops: none up to a quarter of the queue, 4 % where it is full.
    fn drops_early(&mut self, queued: u64) -> bool {
        let beyond = (queued * 4).saturating_sub(self.queue);
        self.dice.random_range(0..10_000) < beyond * 400 / (self.queue * 3)
    }

    /// When a datagram of `n` bytes has passed; `None` if there is no room for it.
    fn pass(&mut self, now: Time, n: u64) -> Option<Time> {
        let waits = self.busy_until.since(now);
        let queued = u128::from(waits.as_nanos()) * u128::from(self.rate) / 1_000_000_000;
        let queued = queued as u64;
        if self.queue > 0 && queued + n > self.queue {
            return None;
        }
        let drops = match &mut self.manager {
            QueueManagement::DropTail => false,
            QueueManagement::Early => self.drops_early(queued),
            QueueManagement::CoDel(codel) => codel.drops(self.busy_until.max(now), waits),
        };
        if drops {
            return None;
        }
        let span = (n * 1_000_000_000).checked_div(self.rate).unwrap_or(0);
        self.busy_until = self.busy_until.max(now) + Span::from_nanos(span);
        Some(self.busy_until)
    }
}

/// A link: `LinkId` at the device, an address the server sees.
#[derive(Clone)]
pub struct Wire {
    pub up: bool,
    /// Whether packets to the device are lost, while packets to the server arrive.
    pub deaf: bool,
    /// Whether packets to the server are lost, while packets to the device arrive.
    pub mute: bool,
    pub delay: Span,
    /// Every n-th datagram is lost, counted over both directions; 0: none.
    pub lose_every: u64,
    /// Bytes per second each way; 0: unlimited.
    pub rate: u64,
    /// Bytes that wait at most each way; 0: any number.
    pub queue: u64,
    /// The shared bottleneck towards the device, in addition to the link's own rate.
    pub behind: Option<Rc<RefCell<Bottleneck>>>,
    /// The largest datagram, in bytes. The sender's socket refuses a larger one.
    pub datagram_max: usize,
    pub address: SocketAddr,
    /// Whether the link is a stream: packets stay in order, and each end learns when there is room.
    pub stream: bool,
    /// The serial line by which the device reaches a bridge, if it is one. The server sees the bridge's
    /// address.
    pub serial: Option<SerialPathId>,
    pub count: u64,
    pub bytes_down: u64,
    pub bytes_up: u64,
    pub packets_while_down: u64,
    /// The server's packets into unreported holes.
    pub packets_into_hole: u64,
    busy_until: [Time; 2],
}

impl Wire {
    pub fn new(delay_ms: u64, address: &str) -> Self {
        Wire {
            up: true,
            deaf: false,
            mute: false,
            delay: MS.times(delay_ms),
            lose_every: 0,
            rate: 0,
            queue: 0,
            behind: None,
            datagram_max: 1_472,
            address: address.parse().unwrap(),
            stream: false,
            serial: None,
            count: 0,
            bytes_down: 0,
            bytes_up: 0,
            packets_while_down: 0,
            packets_into_hole: 0,
            busy_until: [Time::ZERO; 2],
        }
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct InFlight {
    at: std::cmp::Reverse<(Time, u64)>,
    to_server: bool,
    link: u32,
    epoch: u64,
    from: SocketAddr,
    bytes: Vec<u8>,
}

pub struct Pair {
    pub now: Time,
    pub device: Endpoint,
    pub server: Endpoint,
    pub wires: BTreeMap<u32, Wire>,
    pub server_address: SocketAddr,
    flying: BinaryHeap<InFlight>,
    order: u64,
    pub device_events: Vec<(Time, SessionId, SessionEvent)>,
    pub server_events: Vec<(Time, SessionId, SessionEvent)>,
    pub session: SessionId,
    /// Everything that ever travelled to the server, for replays.
    pub log: Vec<(u32, SocketAddr, Vec<u8>)>,
    pub keep_log: bool,
    /// The data that the server's application sends on each flow: content(offset), total length.
    pub sources: BTreeMap<FlowId, u64>,
    /// How far the server gave the source's bytes.
    pub given: BTreeMap<FlowId, u64>,
    /// Whether the server's bytes come from a source that is read only when an event asks for it, as the
    /// driver reads its sources.
    pub reads_sources: bool,
    /// The number of the server's events when a source had no room.
    had_no_room: BTreeMap<FlowId, usize>,
    /// From where the server's application was asked for bytes again.
    pub asked: Vec<(FlowId, u64)>,
    pub got: BTreeMap<FlowId, Vec<u8>>,
    pub ended: BTreeMap<FlowId, FlowEnd>,
    pub reading: bool,
}

/// How long packets may wait for a stream.
const STREAM_WAITS: Span = MS.times(20);

pub fn content(offset: u64) -> u8 {
    (offset.wrapping_mul(2_654_435_761) >> 13) as u8
}

pub fn config() -> EndpointConfig {
    EndpointConfig {
        session_window: 4 << 20,
        flow_window: 2 << 20,
        flow_window_first: 2 << 20,
        send_buffer: 1 << 20,
        ..EndpointConfig::default()
    }
}

impl Pair {
    pub fn new() -> Self {
        Self::with(config())
    }

    pub fn with(config: EndpointConfig) -> Self {
        let mut device = Endpoint::new(
            config.clone(),
            device_key(),
            Admission::Nobody,
            [1; 32],
            [2; 32],
        );
        let server = Endpoint::new(config, server_key(), Admission::Anybody, [3; 32], [4; 32]);
        let session = device.connect(Time::ZERO, server_key().public(), 77, 1..1000);
        Pair {
            now: Time::ZERO + MS.times(1000),
            device,
            server,
            wires: BTreeMap::from([
                (0, Wire::new(10, "192.0.2.1:4000")),
                (1, Wire::new(30, "198.51.100.1:4000")),
            ]),
            server_address: "203.0.113.1:443".parse().unwrap(),
            flying: BinaryHeap::new(),
            order: 0,
            device_events: vec![],
            server_events: vec![],
            session,
            log: vec![],
            keep_log: false,
            sources: BTreeMap::new(),
            given: BTreeMap::new(),
            reads_sources: false,
            had_no_room: BTreeMap::new(),
            asked: vec![],
            got: BTreeMap::new(),
            ended: BTreeMap::new(),
            reading: true,
        }
    }

    pub fn addresses(&self, link: u32) -> Addresses {
        Addresses {
            link: LinkId(link),
            local: None,
            remote: match &self.wires[&link] {
                Wire {
                    serial: Some(line), ..
                } => line.address(),
                wire if wire.stream => wire.address,
                _ => self.server_address,
            },
        }
    }

    /// Makes a wire a stream with this rate in bytes per second.
    pub fn make_stream(&mut self, link: u32, rate: u64) {
        let wire = self.wires.get_mut(&link).unwrap();
        wire.address = StreamPathId(u64::from(link)).address();
        (wire.stream, wire.rate) = (true, rate);
    }

    /// Makes a wire a serial line of this rate in bytes per second, on which packets of four seconds wait at
    /// a bridge.
    pub fn make_serial(&mut self, link: u32, bytes_per_second: u32) {
        let wire = self.wires.get_mut(&link).unwrap();
        wire.serial = Some(SerialPathId {
            number: link,
            bytes_per_second,
        });
        wire.rate = u64::from(bytes_per_second);
        wire.queue = (4 * wire.rate).max(4_800);
    }

    /// Ends the stream of a wire, and notifies both ends.
    pub fn close_stream(&mut self, link: u32) {
        self.silence(link);
        let (now, stream) = (self.now, StreamPathId(u64::from(link)));
        self.device.on_stream_closed(now, stream);
        self.server.on_stream_closed(now, stream);
        self.pump();
    }

    /// Delays all packets that are on a wire or are sent there within this span.
    pub fn stall(&mut self, link: u32, span: Span) {
        let delayed = |mut flying: InFlight| {
            if flying.link == link {
                flying.at.0.0 += span;
            }
            flying
        };
        self.flying = self.flying.drain().map(delayed).collect();
        let wire = self.wires.get_mut(&link).unwrap();
        for busy in &mut wire.busy_until {
            *busy = (*busy).max(self.now) + span;
        }
    }

    /// Reports room to each end of a stream while few bytes wait.
    fn give_room(&mut self) {
        for (link, wire) in self.wires.iter().filter(|(_, w)| w.stream && w.up) {
            let stream = StreamPathId(u64::from(*link));
            for (end, busy) in [&mut self.server, &mut self.device]
                .into_iter()
                .zip(wire.busy_until)
            {
                if busy <= self.now + STREAM_WAITS {
                    end.on_stream_room(stream, STREAM_ROOM_BYTES);
                }
            }
        }
    }

    pub fn open_path(&mut self, link: u32, gated: bool) {
        let (now, to) = (self.now, self.addresses(link));
        self.device
            .with(self.session, |s| s.open_path(now, to, gated))
            .unwrap();
        self.pump();
    }

    /// Takes the link down: packets in flight are lost, and the device is notified.
    pub fn cut(&mut self, link: u32) {
        self.silence(link);
        let now = self.now;
        self.device
            .with(self.session, |s| s.on_link_down(now, LinkId(link)))
            .unwrap();
        self.pump();
    }

    /// Takes the link down without notifying the device.
    pub fn silence(&mut self, link: u32) {
        self.wires.get_mut(&link).unwrap().up = false;
        let rest: Vec<InFlight> = self.flying.drain().filter(|f| f.link != link).collect();
        self.flying.extend(rest);
    }

    pub fn attach(&mut self, link: u32, address: &str) {
        let wire = self.wires.get_mut(&link).unwrap();
        wire.up = true;
        wire.address = address.parse().unwrap();
    }

    /// The device opens a flow and asks for `total` bytes; the server will send them.
    pub fn request(&mut self, total: u64, options: FlowOptions) -> FlowId {
        let id = self
            .device
            .with(self.session, |s| {
                let id = s.open(options).unwrap();
                s.write(id, Bytes::copy_from_slice(&total.to_be_bytes()))
                    .unwrap();
                s.finish(id).unwrap();
                id
            })
            .unwrap();
        self.sources.insert(id, total);
        self.got.insert(id, vec![]);
        self.pump();
        id
    }

    fn send(&mut self, to_server: bool, t: Transmit, buf: &[u8]) {
        let link = if to_server {
            t.link.0
        } else {
            // The server has one link; the address says which wire.
            match self.wires.iter().find(|(_, w)| w.address == t.remote) {
                Some((link, _)) => *link,
                None => return,
            }
        };
        let server_address = self.server_address;
        let wire = self.wires.get_mut(&link).unwrap();
        if t.segment > wire.datagram_max && !wire.stream {
            let end = match to_server {
                true => &mut self.device,
                false => &mut self.server,
            };
            return end.on_too_big(self.now, &t, t.segment);
        }
        for datagram in buf[..t.len].chunks(t.segment) {
            if !wire.up {
                if to_server {
                    wire.packets_while_down += 1;
                } else {
                    wire.packets_into_hole += 1;
                }
                continue;
            }
            wire.count += 1;
            if wire.lose_every > 0 && wire.count.is_multiple_of(wire.lose_every) {
                continue;
            }
            let n = datagram.len() as u64;
            if to_server {
                wire.bytes_up += n
            } else {
                wire.bytes_down += n
            }
            let mut leaves = self.now;
            if let Some(shared) = wire.behind.as_ref().filter(|_| !to_server) {
                match shared.borrow_mut().pass(leaves, n) {
                    Some(passed) => leaves = passed,
                    None => continue,
                }
            }
            if wire.rate > 0 {
                let busy = &mut wire.busy_until[usize::from(to_server)];
                let mut own = Bottleneck::new(wire.rate, wire.queue);
                own.busy_until = *busy;
                match own.pass(leaves, n) {
                    Some(passed) => leaves = passed,
                    None => continue,
                }
                *busy = leaves;
            }
            let from = match wire.serial {
                Some(line) if !to_server => line.address(),
                _ if to_server || wire.stream => wire.address,
                _ => server_address,
            };
            if to_server && self.keep_log {
                self.log.push((link, from, datagram.to_vec()));
            }
            self.order += 1;
            self.flying.push(InFlight {
                at: std::cmp::Reverse((leaves + wire.delay, self.order)),
                to_server,
                link,
                epoch: 0,
                from,
                bytes: datagram.to_vec(),
            });
        }
    }

    /// The server's application: gives bytes while there is room.
    fn serve(&mut self) {
        for (flow, total) in self.sources.clone() {
            let Some(id) = self.server_session() else {
                return;
            };
            if let Some(events) = self.had_no_room.get(&flow) {
                let asked = self.server_events[*events..].iter().any(|(_, _, event)| {
                    matches!(event, SessionEvent::Writable(f) if *f == flow)
                        || matches!(event, SessionEvent::SendFrom { flow: f, .. } if *f == flow)
                });
                if !asked {
                    continue;
                }
            }
            let given = self.given.get(&flow).copied().unwrap_or(0);
            let reads_sources = self.reads_sources;
            let mut has_room = true;
            let Some(given) = self
                .server
                .with(id, |s| {
                    let mut given = given;
                    // The request must have been read.
                    while let Ok(ReadOutcome::Chunk(_)) = s.read(flow, 100) {}
                    if s.received(flow).is_none()
                        || s.send_offsets(flow).is_none_or(|o| o.0 != given)
                    {
                        return Some(given);
                    }
                    if s.received(flow).unwrap().1.is_none() && given == 0 {
                        return Some(given);
                    }
                    // A source tells its end to who reads there, which needs room.
                    while given < total || reads_sources {
                        let room = match reads_sources {
                            true => s.source_room(flow).ok()?,
                            false => s.write_room(flow).ok()?,
                        };
                        if room == 0 {
                            has_room = false;
                            return Some(given);
                        }
                        let piece = room.min(total - given).min(40_000);
                        if piece == 0 {
                            break;
                        }
                        let bytes: Vec<u8> = (given..given + piece).map(content).collect();
                        s.write(flow, bytes.into()).ok()?;
                        given += piece;
                    }
                    let _ = s.finish(flow);
                    Some(given)
                })
                .unwrap()
            else {
                continue;
            };
            self.given.insert(flow, given);
            if has_room || !reads_sources {
                self.had_no_room.remove(&flow);
            } else {
                self.had_no_room.insert(flow, self.server_events.len());
            }
        }
    }

    pub fn server_session(&self) -> Option<SessionId> {
        self.server.ids().first().copied()
    }

    fn consume(&mut self) {
        if !self.reading {
            return;
        }
        let flows: Vec<FlowId> = self.got.keys().copied().collect();
        for flow in flows {
            let got = self.got.get_mut(&flow).unwrap();
            let _ = self.device.with(self.session, |s| {
                while let Ok(ReadOutcome::Chunk(c)) = s.read(flow, 1 << 20) {
                    got.extend_from_slice(&c);
                }
            });
        }
    }

    /// Lets both ends say everything they can say now.
    pub fn pump(&mut self) {
        let mut buf = vec![0; 65536];
        for _ in 0..10_000 {
            self.serve();
            self.consume();
            self.give_room();
            let mut idle = true;
            while let Some(t) = self.device.poll_transmit(self.now, &mut buf) {
                self.send(true, t, &buf);
                idle = false;
            }
            while let Some(t) = self.server.poll_transmit(self.now, &mut buf) {
                self.send(false, t, &buf);
                idle = false;
            }
            while let Some((id, e)) = self.device.poll_event() {
                if let SessionEvent::Ended { flow, end } = &e {
                    self.ended.insert(*flow, *end);
                }
                self.device_events.push((self.now, id, e));
                idle = false;
            }
            while let Some((id, e)) = self.server.poll_event() {
                if let SessionEvent::SendFrom { flow, offset } = &e {
                    self.given.insert(*flow, *offset);
                    self.asked.push((*flow, *offset));
                }
                self.server_events.push((self.now, id, e));
                idle = false;
            }
            if idle {
                return;
            }
        }
        panic!("the two never fall silent at {:?}", self.now);
    }

    /// When something happens next.
    pub fn next_at(&mut self) -> Time {
        let flight = self.flying.peek().map_or(Time::NEVER, |f| f.at.0.0);
        flight
            .min(self.device.next_timeout())
            .min(self.server.next_timeout())
    }

    /// Moves on to the next thing that happens, not beyond `until`. False if nothing will.
    pub fn step(&mut self, until: Time) -> bool {
        let at = self.next_at();
        if at > until {
            self.now = until;
            return false;
        }
        self.now = self.now.max(at);
        while self.flying.peek().is_some_and(|f| f.at.0.0 <= self.now) {
            let mut f = self.flying.pop().unwrap();
            let link = LinkId(f.link);
            if f.to_server && self.wires[&f.link].mute {
                // Lost on its way.
            } else if f.to_server {
                let addresses = Addresses {
                    link: LinkId(0),
                    local: None,
                    remote: f.from,
                };
                self.server.handle_datagram(
                    self.now,
                    IncomingDatagram {
                        addresses,
                        bytes: &mut f.bytes,
                    },
                );
            } else if self.wires[&f.link].up && !self.wires[&f.link].deaf {
                let addresses = Addresses {
                    link,
                    local: None,
                    remote: f.from,
                };
                self.device.handle_datagram(
                    self.now,
                    IncomingDatagram {
                        addresses,
                        bytes: &mut f.bytes,
                    },
                );
            }
        }
        self.device.handle_timeouts(self.now);
        self.server.handle_timeouts(self.now);
        self.pump();
        true
    }

    pub fn run_for(&mut self, span: Span) {
        let until = self.now + span;
        while self.step(until) {}
    }

    /// Runs until `done` or for `span`; true if done.
    pub fn run_until(&mut self, span: Span, mut done: impl FnMut(&Pair) -> bool) -> bool {
        let until = self.now + span;
        while !done(self) {
            if !self.step(until) {
                return done(self);
            }
        }
        true
    }

    pub fn is_whole(&self, flow: FlowId) -> bool {
        self.got[&flow].len() as u64 == self.sources[&flow]
            && self.ended.get(&flow) == Some(&FlowEnd::Complete)
    }

    pub fn assert_right(&self, flow: FlowId) {
        let got = &self.got[&flow];
        let wrong = got.iter().zip(0..).position(|(b, i)| *b != content(i));
        assert_eq!(wrong, None, "flow {flow:?} has a wrong byte");
    }

    pub fn inject(&mut self, to_server: bool, from: SocketAddr, mut bytes: Vec<u8>) {
        let addresses = Addresses {
            link: LinkId(0),
            local: None,
            remote: from,
        };
        let incoming = IncomingDatagram {
            addresses,
            bytes: &mut bytes,
        };
        if to_server {
            self.server.handle_datagram(self.now, incoming);
        } else {
            self.device.handle_datagram(self.now, incoming);
        }
        self.pump();
    }
}
