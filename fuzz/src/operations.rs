//! Two endpoints, two links, and bytes read as actions: open, write, read, cut, attach, lose,
//! replay, sleep, crash, wait. The data read must always be a prefix of the data written, at both
//! ends, and after each action all limits must hold. A failing run lists its actions by name.

use std::collections::BTreeMap;

use bytes::Bytes;
use d2tp_session::*;

use super::syn_ack;

/// The meaning of a pair of bytes: the name of an action. The second byte is its argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    OpenPath0,
    OpenPath1,
    CutLink,
    AttachLink,
    OpenFlow,
    Write,
    WriteMore,
    FinishFlow,
    ResetStopPauseOrGrant,
    ReadAtBothEnds,
    DeliverOne,
    DeliverAll,
    DeliverAllAgain,
    LoseSome,
    ReplayOne,
    WaitMillis,
    WaitSeconds,
    DeviceSleepsOrCrashes,
    ServerSleepsOrCrashes,
    SetPathStatus,
    ClosePath,
    ServerWritesOrTellsDurable,
    AnswerTheSynWithAnything,
    SayTooBig,
}

impl Action {
    const ALL: [Action; 24] = [
        Action::OpenPath0,
        Action::OpenPath1,
        Action::CutLink,
        Action::AttachLink,
        Action::OpenFlow,
        Action::Write,
        Action::WriteMore,
        Action::FinishFlow,
        Action::ResetStopPauseOrGrant,
        Action::ReadAtBothEnds,
        Action::DeliverOne,
        Action::DeliverAll,
        Action::DeliverAllAgain,
        Action::LoseSome,
        Action::ReplayOne,
        Action::WaitMillis,
        Action::WaitSeconds,
        Action::DeviceSleepsOrCrashes,
        Action::ServerSleepsOrCrashes,
        Action::SetPathStatus,
        Action::ClosePath,
        Action::ServerWritesOrTellsDurable,
        Action::AnswerTheSynWithAnything,
        Action::SayTooBig,
    ];

    fn of(byte: u8) -> Action {
        Action::ALL[usize::from(byte) % Action::ALL.len()]
    }
}

/// The list of actions, which is printed if the run fails.
struct Story(Vec<(Action, u8)>);

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (action, argument) in &self.0 {
                eprintln!("  {action:?} {argument}");
            }
        }
    }
}

/// The largest chunk that the application writes at once.
const CHUNK_MAX: u64 = 255 * 40 + 1;

struct World {
    now: Time,
    device: Endpoint,
    server: Endpoint,
    session: SessionId,
    epochs: u32,
    up: [bool; 2],
    lose: u8,
    flying: Vec<(bool, u32, Vec<u8>)>,
    last_syn: Vec<u8>,
    kept: Vec<Vec<u8>>,
    /// Bytes of each flow read at the server, and whether a crash may have reduced them.
    read: BTreeMap<FlowId, u64>,
    written: BTreeMap<FlowId, u64>,
}

/// The number of bytes that the server writes at once.
const ANSWER_BYTES: u64 = 500;
const KEPT_MAX: usize = 64;
const FLYING_MAX: usize = 512;

fn content(offset: u64) -> u8 {
    (offset.wrapping_mul(2_654_435_761) >> 13) as u8
}

fn addresses(link: u32, to_server: bool) -> Addresses {
    let remote = if to_server {
        "203.0.113.1:443"
    } else {
        ["192.0.2.1:1", "192.0.2.2:2"][link as usize]
    };
    Addresses {
        link: LinkId(if to_server { link } else { 0 }),
        local: None,
        remote: remote.parse().expect("an address"),
    }
}

fn config() -> EndpointConfig {
    EndpointConfig {
        flow_window: 50_000,
        session_window: 80_000,
        send_buffer: 60_000,
        flows_max: 12,
        early_data: true,
        ..EndpointConfig::default()
    }
}

fn server() -> Endpoint {
    Endpoint::new(
        config(),
        SecretKey::from_bytes([22; 32]),
        Admission::Anybody,
        [3; 32],
        [4; 32],
    )
}

fn device() -> Endpoint {
    Endpoint::new(
        config(),
        SecretKey::from_bytes([11; 32]),
        Admission::Nobody,
        [1; 32],
        [2; 32],
    )
}

impl World {
    fn new() -> World {
        let mut device = device();
        let key = SecretKey::from_bytes([22; 32]).public();
        let session = device.connect(Time::ZERO, key, 7, 1..100_000);
        World {
            now: Time::ZERO + Span::from_secs(1),
            device,
            server: server(),
            session,
            epochs: 100_000,
            up: [true; 2],
            lose: 0,
            flying: Vec::new(),
            last_syn: Vec::new(),
            kept: Vec::new(),
            read: BTreeMap::new(),
            written: BTreeMap::new(),
        }
    }

    fn pump(&mut self) {
        let mut buf = vec![0; 65536];
        for round in 0.. {
            assert!(round < 10_000, "the two never fall silent");
            let mut idle = true;
            while let Some(t) = self.device.poll_transmit(self.now, &mut buf) {
                idle = false;
                for d in buf[..t.len].chunks(t.segment) {
                    if d[0] >> 5 == 0b100 {
                        self.last_syn = d.to_vec();
                    }
                    self.post(true, t.link.0, d);
                }
            }
            while let Some(t) = self.server.poll_transmit(self.now, &mut buf) {
                idle = false;
                let link = u32::from(t.remote == addresses(1, false).remote);
                for d in buf[..t.len].chunks(t.segment) {
                    self.post(false, link, d);
                }
            }
            while self.device.poll_event().is_some() {
                idle = false;
            }
            while self.server.poll_event().is_some() {
                idle = false;
            }
            if idle {
                return;
            }
        }
    }

    fn post(&mut self, to_server: bool, link: u32, bytes: &[u8]) {
        if self.lose > 0 {
            self.lose -= 1;
        } else if self.up[link as usize] && self.flying.len() < FLYING_MAX {
            self.flying.push((to_server, link, bytes.to_vec()));
        }
    }

    fn deliver(&mut self, i: usize) {
        let (to_server, link, mut bytes) = self.flying.remove(i);
        if to_server {
            if self.kept.len() < KEPT_MAX {
                self.kept.push(bytes.clone());
            }
            let addresses = addresses(link, false);
            self.server.handle_datagram(
                self.now,
                IncomingDatagram {
                    addresses,
                    bytes: &mut bytes,
                },
            );
        } else {
            let addresses = addresses(link, true);
            self.device.handle_datagram(
                self.now,
                IncomingDatagram {
                    addresses,
                    bytes: &mut bytes,
                },
            );
        }
        self.pump();
    }

    fn deliver_all(&mut self) {
        for _ in 0..200 {
            if self.flying.is_empty() {
                return;
            }
            self.deliver(0);
        }
    }

    fn wait(&mut self, span: Span) {
        let until = self.now + span;
        let mut last = (self.now, 0);
        for _ in 0..400 {
            let next = self.device.next_timeout().min(self.server.next_timeout());
            if next > until {
                break;
            }
            self.now = self.now.max(next);
            last = if last.0 == self.now {
                (last.0, last.1 + 1)
            } else {
                (self.now, 0)
            };
            assert!(last.1 < 100, "a timer fires and fires and nothing happens");
            self.device.handle_timeouts(self.now);
            self.server.handle_timeouts(self.now);
            self.pump();
            self.deliver_all();
        }
        self.now = until;
    }

    fn flow(&self, n: u8) -> Option<FlowId> {
        let flows: Vec<FlowId> = self.written.keys().copied().collect();
        flows.get(usize::from(n) % flows.len().max(1)).copied()
    }

    fn with_device<R>(&mut self, f: impl FnOnce(&mut Session) -> R) -> Option<R> {
        let r = self.device.with(self.session, f).ok();
        self.pump();
        r
    }

    fn read_at_server(&mut self, limit: usize) {
        for id in self.server.ids() {
            let flows = self
                .server
                .session(id)
                .map(Session::flow_ids)
                .unwrap_or_default();
            for flow in flows {
                let (read, written) = (&mut self.read, &self.written);
                let _ = self.server.with(id, |s| {
                    let start = s.received(flow).map_or(0, |r| r.0);
                    if let Ok(ReadOutcome::Chunk(c)) = s.read(flow, limit.max(1)) {
                        for (b, i) in c.iter().zip(start..) {
                            assert_eq!(*b, content(i), "flow {flow:?} has a wrong byte at {i}");
                        }
                        let end = start + c.len() as u64;
                        assert!(
                            written.get(&flow).is_some_and(|w| end <= *w),
                            "more than was written"
                        );
                        read.insert(flow, end);
                    }
                });
            }
        }
        self.pump();
    }

    fn read_at_device(&mut self, limit: usize) {
        let flows = self.device.session(self.session).map(Session::flow_ids);
        for flow in flows.unwrap_or_default() {
            let _ = self.device.with(self.session, |s| {
                let start = s.received(flow).map_or(0, |r| r.0);
                if let Ok(ReadOutcome::Chunk(c)) = s.read(flow, limit.max(1)) {
                    for (b, i) in c.iter().zip(start..) {
                        assert_eq!(*b, content(i), "flow {flow:?} has a wrong byte at {i}");
                    }
                }
            });
        }
        self.pump();
    }

    /// Checks that no queue exceeds its limit, regardless of the actions.
    fn see_bounds(&self) {
        let device = self.device.session(self.session);
        let sessions = self
            .server
            .ids()
            .into_iter()
            .filter_map(|id| self.server.session(id));
        for session in device.into_iter().chain(sessions) {
            assert_eq!(session.violated_limit(CHUNK_MAX), None);
        }
    }

    fn act(&mut self, action: Action, arg: u8) {
        let now = self.now;
        match action {
            Action::OpenPath0 | Action::OpenPath1 => {
                let link = u32::from(action == Action::OpenPath1);
                if self.up[link as usize] {
                    self.with_device(|s| s.open_path(now, addresses(link, true), arg & 1 == 1));
                }
            }
            Action::CutLink => {
                let link = usize::from(arg & 1);
                self.up[link] = false;
                self.flying.retain(|f| f.1 as usize != link);
                if arg & 2 == 0 {
                    self.with_device(|s| s.on_link_down(now, LinkId(u32::from(arg & 1))));
                }
            }
            Action::AttachLink => self.up[usize::from(arg & 1)] = true,
            Action::OpenFlow => {
                let options = FlowOptions {
                    priority: arg & 7,
                    size: None,
                    deadline: (arg & 8 != 0).then(|| now + Span::from_secs(30)),
                    durable: arg & 16 != 0,
                    hibernates: arg & 32 != 0,
                    reachable: arg & 64 != 0,
                    early: arg & 128 != 0,
                };
                if let Some(Ok(id)) = self.with_device(|s| s.open(options)) {
                    self.written.insert(id, 0);
                }
            }
            Action::Write | Action::WriteMore => {
                let Some(flow) = self.flow(arg) else { return };
                let n = u64::from(arg) * 40 + 1;
                let start = self
                    .device
                    .session(self.session)
                    .and_then(|s| s.send_offsets(flow));
                let Some((start, _)) = start else { return };
                let room = self.with_device(|s| s.write_room(flow));
                if !room.is_some_and(|room| room.is_ok_and(|room| room > 0)) {
                    return;
                }
                let bytes: Vec<u8> = (start..start + n).map(content).collect();
                if let Some(Ok(())) = self.with_device(|s| s.write(flow, Bytes::from(bytes))) {
                    let written = self.written.entry(flow).or_default();
                    *written = (*written).max(start + n);
                }
            }
            Action::FinishFlow => {
                let Some(flow) = self.flow(arg) else { return };
                self.with_device(|s| {
                    let _ = s.finish(flow);
                });
            }
            Action::ResetStopPauseOrGrant => {
                let Some(flow) = self.flow(arg) else { return };
                self.with_device(|s| match arg & 3 {
                    0 => s.reset(flow, 1),
                    1 => s.stop(flow, 2),
                    2 => s.pause(flow, arg & 4 == 0, ReasonCode::UserPaused),
                    _ => s.grant(flow, LinkId(u32::from(arg >> 2 & 1)), u64::from(arg) * 100),
                });
            }
            Action::ReadAtBothEnds => {
                self.read_at_server(usize::from(arg) * 100);
                self.read_at_device(usize::from(arg) * 100);
            }
            Action::DeliverOne => {
                if !self.flying.is_empty() {
                    self.deliver(usize::from(arg) % self.flying.len());
                }
            }
            Action::DeliverAll | Action::DeliverAllAgain => self.deliver_all(),
            Action::LoseSome => self.lose = arg % 8,
            Action::ReplayOne => {
                if let Some(bytes) = self.kept.get(usize::from(arg) % self.kept.len().max(1)) {
                    let mut bytes = bytes.clone();
                    let addresses = addresses(u32::from(arg & 1), false);
                    self.server.handle_datagram(
                        now,
                        IncomingDatagram {
                            addresses,
                            bytes: &mut bytes,
                        },
                    );
                    self.pump();
                }
            }
            Action::WaitMillis => self.wait(Span::from_millis(u64::from(arg))),
            Action::WaitSeconds => self.wait(Span::from_secs(u64::from(arg))),
            Action::DeviceSleepsOrCrashes => {
                // The device hibernates and wakes, or crashes and restarts.
                let record = if arg & 1 == 0 {
                    self.device.hibernate(now, self.session).ok()
                } else {
                    self.device
                        .session(self.session)
                        .map(|s| s.record(now, true).encode())
                };
                let Some(record) = record else { return };
                self.device = device();
                let epochs = self.epochs..self.epochs + 1000;
                self.epochs += 1000;
                self.session = self
                    .device
                    .restore(now, &record, epochs)
                    .expect("its own record");
            }
            Action::ServerSleepsOrCrashes => {
                let Some(id) = self.server.ids().first().copied() else {
                    return;
                };
                if arg & 1 == 0 {
                    let _ = self.server.hibernate(now, id);
                } else {
                    let record = self
                        .server
                        .session(id)
                        .map(|s| s.record(now, true).encode());
                    self.server = server();
                    if let Some(record) = record.filter(|_| arg & 2 == 0) {
                        self.server.adopt(&record).expect("its own record");
                    }
                }
            }
            Action::SetPathStatus => {
                let link = LinkId(u32::from(arg & 1));
                let status = [
                    PathStatus::Available,
                    PathStatus::Standby,
                    PathStatus::Frozen,
                ][usize::from(arg >> 1) % 3];
                self.with_device(|s| {
                    s.set_path_status(link, status, arg & 8 != 0, ReasonCode::None)
                });
            }
            Action::ClosePath => {
                let link = LinkId(u32::from(arg & 1));
                self.with_device(|s| s.close_path(now, link, ReasonCode::PathCost));
            }
            Action::ServerWritesOrTellsDurable => {
                let flows = self.written.keys().copied().collect::<Vec<_>>();
                for id in self.server.ids() {
                    let _ = self.server.with(id, |s| {
                        for flow in &flows {
                            if arg & 1 == 0 {
                                let Some((start, _)) = s.send_offsets(*flow) else {
                                    continue;
                                };
                                if s.write_room(*flow).is_ok_and(|room| room >= ANSWER_BYTES) {
                                    let end = start + ANSWER_BYTES;
                                    let bytes: Vec<u8> = (start..end).map(content).collect();
                                    let _ = s.write(*flow, Bytes::from(bytes));
                                }
                            } else if let Some((read, _)) = s.received(*flow) {
                                s.set_durable(*flow, read);
                                s.set_committed(*flow, read);
                            }
                        }
                    });
                }
                self.pump();
            }
            Action::AnswerTheSynWithAnything => {
                // An authentic answer to the newest SYN, with arbitrary payload.
                let payload: Vec<u8> = (0..usize::from(arg)).map(|i| (i * 7 % 5) as u8).collect();
                let key = SecretKey::from_bytes([22; 32]);
                if let Some(mut bytes) = syn_ack(&key, &self.last_syn, &payload) {
                    let addresses = addresses(0, true);
                    self.device.handle_datagram(
                        now,
                        IncomingDatagram {
                            addresses,
                            bytes: &mut bytes,
                        },
                    );
                    self.pump();
                }
            }
            Action::SayTooBig => {
                let size = 1200 + usize::from(arg);
                for id in self.device.ids() {
                    let link = LinkId(u32::from(arg & 1));
                    let _ = self.device.with(id, |s| s.on_too_big(now, link, size));
                }
                self.pump();
            }
        }
    }
}

/// Pairs of bytes, each an action and its argument; at most 400 of them.
pub fn operations(bytes: &[u8]) {
    let mut world = World::new();
    let mut story = Story(Vec::new());
    world.act(Action::OpenPath0, 0);
    world.deliver_all();
    for pair in bytes.chunks_exact(2).take(400) {
        let action = Action::of(pair[0]);
        story.0.push((action, pair[1]));
        world.act(action, pair[1]);
        world.see_bounds();
    }
    world.wait(Span::from_secs(30));
    world.read_at_server(100_000);
    world.read_at_device(100_000);
    world.see_bounds();
}
