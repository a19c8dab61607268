//! Flows whose application has no copy of their bytes go on at another process, which is given what the record lacks.

use crate::pair::*;
use bytes::Bytes;
use d2tp_session::*;

const BYTES: usize = 300_000;

fn expected() -> Vec<u8> {
    (0..BYTES as u64).map(content).collect()
}

/// Both ends write and read one flow; the server's end is one process after another.
struct Tunnel {
    p: Pair,
    flow: FlowId,
    up_written: usize,
    up_got: Vec<u8>,
    down_got: Vec<u8>,
    /// What the server's process has to write next, before what was never written.
    down_left: Vec<u8>,
    down_made: usize,
    /// What the process before this one held, until the device has said what it has.
    remainder: Option<FlowRemainder>,
}

impl Tunnel {
    fn start(lose_every: u64) -> Tunnel {
        let mut p = Pair::new();
        let wire = p.wires.get_mut(&0).unwrap();
        (wire.rate, wire.lose_every) = (500_000, lose_every);
        let options = FlowOptions {
            hibernates: true,
            ..FlowOptions::default()
        };
        let flow = p.device.with(p.session, |s| s.open(options)).unwrap();
        p.open_path(0, false);
        Tunnel {
            p,
            flow: flow.unwrap(),
            up_written: 0,
            up_got: Vec::new(),
            down_got: Vec::new(),
            down_left: Vec::new(),
            down_made: 0,
            remainder: None,
        }
    }

    /// Both applications do what they can, the server's reader slowly.
    fn step(&mut self) {
        let (flow, written) = (self.flow, self.up_written);
        let (up, got) = self
            .p
            .device
            .with(self.p.session, |s| {
                let mut got = Vec::new();
                while let Ok(ReadOutcome::Chunk(chunk)) = s.read(flow, 100_000) {
                    got.extend_from_slice(&chunk);
                }
                (write(s, flow, &expected()[written..]), got)
            })
            .unwrap();
        self.up_written += up;
        if self.up_written == BYTES {
            let _ = self.p.device.with(self.p.session, |s| s.finish(flow));
        }
        self.down_got.extend(got);
        if let Some(id) = self.p.server_session() {
            self.serve(id);
        }
        self.p.run_for(MS.times(5));
    }

    fn serve(&mut self, id: SessionId) {
        let flow = self.flow;
        if let Some(remainder) = self.remainder.take() {
            let server = self.p.server.session(id).unwrap();
            let at = server
                .send_offsets(flow)
                .filter(|_| !server.awaits_claim(flow));
            let Some((at, _)) = at else {
                self.remainder = Some(remainder);
                return;
            };
            let has = (at - remainder.unacked_from) as usize;
            let mut left = remainder.unacked[has..].to_vec();
            left.append(&mut self.down_left);
            self.down_left = left;
        }
        let (made, whole) = (self.down_made, expected());
        let left = std::mem::take(&mut self.down_left);
        let (down, of_left, got) = self
            .p
            .server
            .with(id, |s| {
                let of_left = write(s, flow, &left);
                let down = match of_left == left.len() {
                    true => write(s, flow, &whole[made..]),
                    false => 0,
                };
                if of_left == left.len() && made + down == BYTES {
                    let _ = s.finish(flow);
                }
                let got = match s.read(flow, 2_000) {
                    Ok(ReadOutcome::Chunk(chunk)) => chunk,
                    _ => Bytes::new(),
                };
                (down, of_left, got)
            })
            .unwrap();
        self.down_left = left[of_left..].to_vec();
        self.down_made += down;
        self.up_got.extend_from_slice(&got);
    }

    /// Another process takes the server's place. False if there is nothing to pass on.
    fn pass_on(&mut self) -> bool {
        let Some(id) = self.p.server_session() else {
            return false;
        };
        if self.remainder.is_some() {
            return false; // The one before has just begun.
        }
        let flow = self.flow;
        let taken = self.p.server.with(id, |s| s.take_remainder(flow)).unwrap();
        let Some(mut remainder) = taken else {
            return false;
        };
        self.up_got.append(&mut remainder.unread);
        assert!(self.p.server.session(id).unwrap().may_hibernate());
        self.p.server.hibernate(self.p.now, id).unwrap();
        self.remainder = Some(remainder);
        true
    }

    fn is_whole(&self) -> bool {
        self.up_got.len() >= BYTES && self.down_got.len() >= BYTES
    }
}

fn write(s: &mut Session, flow: FlowId, bytes: &[u8]) -> usize {
    let room = s.write_room(flow).unwrap_or(0) as usize;
    let piece = &bytes[..bytes.len().min(room)];
    match piece.is_empty() || s.write(flow, Bytes::copy_from_slice(piece)).is_err() {
        true => 0,
        false => piece.len(),
    }
}

#[test]
fn a_flow_goes_on_at_one_process_after_another_and_loses_and_repeats_nothing() {
    let (mut passed, mut unread, mut unacked) = (0, 0, 0);
    for lose_every in [0, 7] {
        for every in [7, 23, 61] {
            let mut tunnel = Tunnel::start(lose_every);
            let mut steps = 0;
            while !tunnel.is_whole() {
                tunnel.step();
                steps += 1;
                assert!(
                    steps < 20_000,
                    "{} up, {} down: {:?}",
                    tunnel.up_got.len(),
                    tunnel.down_got.len(),
                    tunnel.p.ended,
                );
                let before = tunnel.up_got.len();
                if steps % every == 0 && tunnel.pass_on() {
                    passed += 1;
                    unread += usize::from(tunnel.up_got.len() > before);
                    let held = tunnel.remainder.as_ref().unwrap();
                    unacked += usize::from(!held.unacked.is_empty());
                }
            }
            assert!(tunnel.up_got == expected(), "up");
            assert!(tunnel.down_got == expected(), "down");
        }
    }
    // The cases that matter were among them.
    assert!(
        passed > 50 && unread > 20 && unacked > 20,
        "{passed} {unread} {unacked}"
    );
}

#[test]
fn nothing_is_taken_of_a_flow_that_is_over_or_whose_bytes_are_its_applications_to_keep() {
    let mut tunnel = Tunnel::start(0);
    for _ in 0..10 {
        tunnel.step();
    }
    let id = tunnel.p.server_session().unwrap();
    let flow = tunnel.flow;
    let taken = tunnel.p.server.with(id, |s| {
        s.reset(flow, 7);
        s.take_remainder(flow)
    });
    assert_eq!(taken.unwrap(), None);
    let durable = FlowOptions {
        hibernates: true,
        durable: true,
        ..FlowOptions::default()
    };
    let session = tunnel.p.session;
    let durable = tunnel.p.device.with(session, |s| {
        let flow = s.open(durable).unwrap();
        s.write(flow, Bytes::from_static(b"kept")).unwrap();
        flow
    });
    tunnel.p.run_for(MS.times(500));
    let taken = tunnel
        .p
        .server
        .with(id, |s| s.take_remainder(durable.unwrap()));
    assert_eq!(taken.unwrap(), None);
}

#[test]
fn an_answer_that_arrived_whole_is_read_although_its_server_does_not_know_the_flow_any_more() {
    // R-RESUME-2
    let mut p = Pair::new();
    let options = FlowOptions {
        hibernates: true,
        ..FlowOptions::default()
    };
    let open = |s: &mut Session| {
        let flow = s.open(options).unwrap();
        s.write(flow, Bytes::from_static(b"request")).unwrap();
        s.finish(flow).unwrap();
        flow
    };
    let flow = p.device.with(p.session, open).unwrap();
    p.open_path(0, false);
    p.run_for(MS.times(200));
    let server = p.server_session().unwrap();
    let answer = &expected()[..10_000];
    let served = p.server.with(server, |s| {
        while let Ok(ReadOutcome::Chunk(_)) = s.read(flow, 100) {}
        s.write(flow, Bytes::copy_from_slice(answer)).unwrap();
        s.finish(flow).unwrap();
    });
    served.unwrap();
    p.run_for(MS.times(500));
    let of_server = p.server.session(server).unwrap().flow_ids();
    assert_eq!(of_server, [], "it is done with the flow");
    p.server.hibernate(p.now, server).unwrap();
    p.device_events.clear();
    p.device.with(p.session, open).unwrap();
    p.run_for(Span::from_secs(3));
    let (mut got, mut ends) = (Vec::new(), Vec::new());
    for (_, _, event) in &p.device_events {
        match event {
            SessionEvent::Remains {
                flow: of, pieces, ..
            } if *of == flow => got.extend(pieces.concat()),
            SessionEvent::Ended { flow: of, end } if *of == flow => ends.push(*end),
            _ => {}
        }
    }
    assert!(got == answer, "{} bytes: {ends:?}", got.len());
    assert_eq!(ends, [FlowEnd::Complete]);
}
