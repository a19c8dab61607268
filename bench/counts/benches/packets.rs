//! The number of instructions that a packet takes: sealed, sent, received, opened, acknowledged.
//!
//! Two endpoints in one thread exchange their packets. Nothing waits and nothing is lost, so the
//! counts are the same on every run. `cargo bench` in this folder prints them, for ten thousand
//! packets together, for one handshake, and for one session that comes back by ticket.

use std::hint::black_box;

use bytes::Bytes;
use d2tp_session::*;
use gungraun::{library_benchmark, library_benchmark_group, main};

/// Full-size packets of one transfer: so that the handshake and the first probes count for little.
const PACKETS: u64 = 10_000;
const PAYLOAD_BYTES: u64 = 1_430;
const STEP: Span = Span::from_micros(200);

struct EndpointPair {
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

fn two(number: u8) -> EndpointPair {
    let config = Config::default();
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
    fn turn(&mut self) {
        self.now = self.now + STEP;
        loop {
            let mut any = false;
            while let Some(t) = self.device.poll_transmit(self.now, &mut self.buffer) {
                any = true;
                let bytes = &mut self.buffer[..t.len];
                let addresses = addresses(1);
                let incoming = Incoming { addresses, bytes };
                self.server.handle_datagrams(self.now, incoming, t.segment);
            }
            while let Some(t) = self.server.poll_transmit(self.now, &mut self.buffer) {
                any = true;
                let bytes = &mut self.buffer[..t.len];
                let addresses = addresses(2);
                let incoming = Incoming { addresses, bytes };
                self.device.handle_datagrams(self.now, incoming, t.segment);
            }
            if !any {
                break;
            }
        }
        self.device.handle_timeouts(self.now);
        self.server.handle_timeouts(self.now);
    }

    fn open_path(&mut self) {
        let now = self.now;
        let opened = |s: &mut Session| s.open_path(now, addresses(2), false);
        self.device.with(self.session, opened).expect("it is there");
    }

    fn is_established(&self) -> bool {
        let session = self.device.session(self.session);
        session.is_some_and(|s| s.life() == Life::Established)
    }
}

/// A session that has sent enough to know its path, and a flow.
fn warm() -> (EndpointPair, FlowId) {
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

fn send(two: &mut EndpointPair, flow: FlowId, bytes: u64) {
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
            while let Ok(Read::Chunk(chunk)) = s.read(flow, usize::MAX) {
                n += chunk.len() as u64;
            }
            n
        };
        read += two.server.with(id, take).expect("it is there");
    }
}

#[library_benchmark]
#[bench::ten_thousand(setup = warm)]
fn packets_sent_and_received((mut two, flow): (EndpointPair, FlowId)) -> EndpointPair {
    send(&mut two, flow, PACKETS * PAYLOAD_BYTES);
    black_box(two)
}

#[library_benchmark]
#[bench::one(args = (12), setup = two)]
fn handshake_of_both_ends(mut two: EndpointPair) -> EndpointPair {
    two.open_path();
    while !two.is_established() || two.server.ids().is_empty() {
        two.turn();
    }
    black_box(two)
}

/// A session whose ends are both records: restored at the device, and the path not yet open.
fn asleep() -> EndpointPair {
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

#[library_benchmark]
#[bench::one(setup = asleep)]
fn wake_of_both_ends(mut two: EndpointPair) -> EndpointPair {
    two.open_path();
    while !two.is_established() || two.server.ids().is_empty() {
        two.turn();
    }
    black_box(two)
}

library_benchmark_group!(
    name = of_packets,
    benchmarks = [packets_sent_and_received, handshake_of_both_ends, wake_of_both_ends]
);
main!(library_benchmark_groups = of_packets);
