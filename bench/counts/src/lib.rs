//! Two endpoints in one thread that exchange their packets: what `cargo bench` in this folder counts.
//!
//! Nothing waits and nothing is lost, so the counts are the same on every run. `core/session/tests/exchange/counted.rs`
//! contains this file too, so that each check of the workspace compiles and runs it.

use bytes::Bytes;
use d2tp_session::*;

/// Full-size packets of one transfer: so that the handshake and the first probes count for little.
pub const PACKETS: u64 = 10_000;
/// What a full-size packet carries of its flow.
pub const PAYLOAD_BYTES: u64 = 1_430;
const STEP: Span = Span::from_micros(200);

/// A device and a server, and the time of both.
pub struct EndpointPair {
    now: Time,
    device: Endpoint,
    server: Endpoint,
    session: SessionId,
    buffer: Vec<u8>,
}

fn addresses(port: u16) -> Addresses {
    Addresses {
        link: LinkId(0),
        local: None,
        remote: ([192, 0, 2, 1], port).into(),
    }
}

/// Two ends that have not exchanged anything. Each `number` has its own keys.
pub fn two(number: u8) -> EndpointPair {
    let config = EndpointConfig::default();
    let [device, server] = [[number; 32], [200; 32]].map(SecretKey::from_bytes);
    let peer = server.public();
    let mut device = Endpoint::new(config.clone(), device, Admission::Nobody, [1; 32], [2; 32]);
    let server = Endpoint::new(config, server, Admission::Anybody, [3; 32], [4; 32]);
    let now = Time::ZERO + Span::from_secs(1);
    let session = device.connect(now, peer, 7, 1..100);
    EndpointPair {
        now,
        device,
        server,
        session,
        buffer: vec![0; 65_536],
    }
}

impl EndpointPair {
    /// Delivers all packets that both ends have to send now.
    pub fn turn(&mut self) {
        self.now += STEP;
        loop {
            let mut any = false;
            while let Some(t) = self.device.poll_transmit(self.now, &mut self.buffer) {
                any = true;
                let bytes = &mut self.buffer[..t.len];
                let addresses = addresses(1);
                let incoming = IncomingDatagram { addresses, bytes };
                self.server.handle_datagrams(self.now, incoming, t.segment);
            }
            while let Some(t) = self.server.poll_transmit(self.now, &mut self.buffer) {
                any = true;
                let bytes = &mut self.buffer[..t.len];
                let addresses = addresses(2);
                let incoming = IncomingDatagram { addresses, bytes };
                self.device.handle_datagrams(self.now, incoming, t.segment);
            }
            if !any {
                break;
            }
        }
        self.device.handle_timeouts(self.now);
        self.server.handle_timeouts(self.now);
    }

    /// Opens the device's path, which begins the handshake.
    pub fn open_path(&mut self) {
        let now = self.now;
        let opened = |s: &mut Session| s.open_path(now, addresses(2), false);
        self.device.with(self.session, opened).expect("it is there");
    }

    /// Whether both ends have the session's keys.
    pub fn is_established(&self) -> bool {
        let session = self.device.session(self.session);
        session.is_some_and(|s| s.state() == SessionState::Established)
            && !self.server.ids().is_empty()
    }
}

/// A session that has sent enough to know its path, and a flow.
pub fn warm() -> (EndpointPair, FlowId) {
    let mut two = two(11);
    two.open_path();
    while !two.is_established() {
        two.turn();
    }
    let opened = |s: &mut Session| s.open(FlowOptions::default());
    let opened = two.device.with(two.session, opened).expect("it is there");
    let flow = opened.expect("the first");
    send(&mut two, flow, 2_000 * PAYLOAD_BYTES);
    (two, flow)
}

/// Carries `bytes` on `flow` from the device to the server, whose program reads them.
pub fn send(two: &mut EndpointPair, flow: FlowId, bytes: u64) {
    let piece = Bytes::from(vec![0x5a; 256 * 1024]);
    let (mut left, mut read) = (bytes, 0);
    while read < bytes {
        let give = |s: &mut Session| {
            let room = s.write_room(flow).unwrap_or(0);
            let n = room.min(left).min(piece.len() as u64);
            if n > 0 {
                let _ = s.write(flow, piece.slice(..n as usize));
            }
            n
        };
        left -= two.device.with(two.session, give).expect("it is there");
        two.turn();
        while two.device.poll_event().is_some() {}
        while two.server.poll_event().is_some() {}
        let Some(id) = two.server.ids().first().copied() else {
            continue;
        };
        let take = |s: &mut Session| {
            let mut n = 0;
            while let Ok(ReadOutcome::Chunk(chunk)) = s.read(flow, usize::MAX) {
                n += chunk.len() as u64;
            }
            n
        };
        read += two.server.with(id, take).expect("it is there");
    }
}

/// A session whose ends are both records: restored at the device, and the path not yet open.
pub fn asleep() -> EndpointPair {
    let mut two = two(13);
    two.open_path();
    while !two.is_established() {
        two.turn();
    }
    // The server's acknowledgement, and the ticket.
    (0..200).for_each(|_| two.turn());
    let now = two.now;
    two.device
        .with(two.session, |s| s.on_link_down(now, LinkId(0)))
        .expect("it is there");
    two.turn();
    let server = two.server.ids()[0];
    two.server.hibernate(two.now, server).expect("it may sleep");
    let record = two.device.hibernate(two.now, two.session);
    let record = record.expect("it may sleep");
    let restored = two.device.restore(two.now, &record, 500..600);
    two.session = restored.expect("its own record");
    two
}
