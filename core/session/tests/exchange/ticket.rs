//! Coming back by ticket: when a device shows one, when a server takes it, and what happens when not.

use crate::pair::*;
use d2tp_seal::SynMacs;
use d2tp_session::*;

const SYN: u8 = 0x81;
const WAKE: u8 = 0x61;

fn sleeps() -> FlowOptions {
    FlowOptions {
        hibernates: true,
        ..FlowOptions::default()
    }
}

/// A download under way; then both ends are records. Returned: the flow, the device's record.
fn asleep(p: &mut Pair) -> (FlowId, Vec<u8>) {
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(600_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.cut(0);
    p.run_for(Span::from_secs(60));
    let server = p.server_session().unwrap();
    p.server.hibernate(p.now, server).unwrap();
    let session = p.session;
    let record = p.device.hibernate(p.now, session).unwrap();
    p.keep_log = true;
    (flow, record)
}

fn comes_back(p: &mut Pair, record: &[u8], epoch: u32, address: &str) {
    p.session = p.device.restore(p.now, record, epoch..epoch + 100).unwrap();
    p.attach(0, address);
    p.open_path(0, false);
}

/// The first bytes of the device's handshake packets since the start of the log.
fn knocks(p: &Pair) -> Vec<u8> {
    let first = p.log.iter().map(|(_, _, bytes)| bytes[0]);
    first.filter(|b| matches!(*b, SYN | WAKE)).collect()
}

fn ends_well(p: &mut Pair, flow: FlowId) {
    p.wires.get_mut(&0).unwrap().rate = 0;
    let whole = p.run_until(Span::from_secs(60), |p| p.is_whole(flow));
    assert!(whole, "{:?}", p.ended);
    p.assert_right(flow);
}

/// A server of the same host, with the records of the one before.
fn another_server(token_seed: u8) -> Endpoint {
    let seed = [token_seed; 32];
    Endpoint::new(config(), server_key(), Admission::Anybody, [9; 32], seed)
}

#[test]
fn who_was_here_before_comes_back_by_ticket_in_one_round_trip() {
    // R-TICKET-1
    let mut p = Pair::new();
    let (flow, record) = asleep(&mut p);
    let (held, began) = (p.got[&flow].len(), p.now);
    comes_back(&mut p, &record, 500, "192.0.2.200:4000");
    assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() > held));
    assert!(p.now.since(began) < MS.times(25), "one round trip of 20 ms");
    assert_eq!(knocks(&p), [WAKE]);
    ends_well(&mut p, flow);
    // The new handshake gave a new ticket.
    let again = p.device.session(p.session).unwrap().record(p.now, false);
    assert!(again.ticket.is_some());
    assert_ne!(again.ticket, SessionRecord::decode(&record).unwrap().ticket);
}

#[test]
fn a_ticket_from_before_the_last_handshake_is_refused_and_the_device_goes_on_with_its_key() {
    // R-TICKET-1: a copy of the device's record of yesterday.
    let mut p = Pair::new();
    let (_, old) = asleep(&mut p);
    comes_back(&mut p, &old, 500, "192.0.2.200:4000");
    p.run_for(MS.times(200));
    p.cut(0);
    p.run_for(Span::from_secs(60));
    let server = p.server_session().unwrap();
    p.server.hibernate(p.now, server).unwrap();
    let session = p.session;
    p.device.hibernate(p.now, session).unwrap();
    p.log.clear();
    let began = p.now;
    comes_back(&mut p, &old, 700, "192.0.2.201:4000");
    let up = |p: &Pair| {
        p.device.session(p.session).map(Session::state) == Some(SessionState::Established)
    };
    assert!(p.run_until(Span::from_secs(5), up));
    assert_eq!(knocks(&p), [WAKE, SYN]);
    let took = p.now.since(began);
    assert!(took < MS.times(50), "two round trips of 20 ms: {took:?}");
}

#[test]
fn a_server_that_does_not_know_the_device_any_more_refuses_its_ticket() {
    // R-TICKET-1
    let mut p = Pair::new();
    let (flow, record) = asleep(&mut p);
    p.server = another_server(4);
    comes_back(&mut p, &record, 500, "192.0.2.200:4000");
    assert!(p.run_until(Span::from_secs(5), |p| p.ended.contains_key(&flow)));
    assert_eq!(knocks(&p), [WAKE, SYN]);
}

#[test]
fn a_server_that_cannot_read_a_ticket_is_silent_and_the_device_goes_on_with_its_key() {
    // R-TICKET-1, R-TICKET-2
    let mut p = Pair::new();
    let (_, record) = asleep(&mut p);
    p.server = another_server(5);
    comes_back(&mut p, &record, 500, "192.0.2.200:4000");
    p.run_for(Span::from_secs(4));
    // R-HS-2: copies are that WAKE.
    assert_eq!(knocks(&p), [WAKE, WAKE, WAKE, SYN]);
    assert!(p.log[..3].iter().all(|(_, _, bytes)| *bytes == p.log[0].2));
}

#[test]
fn a_ticket_is_shown_at_one_place() {
    // R-TICKET-2
    let mut p = Pair::new();
    let (flow, record) = asleep(&mut p);
    p.attach(0, "192.0.2.200:4000");
    p.silence(0);
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.open_path(0, false);
    p.run_for(MS.times(100));
    p.attach(1, "198.51.100.7:4000");
    p.open_path(1, false);
    p.run_for(MS.times(100));
    let at = |link| move |(l, _, bytes): &&(u32, _, Vec<u8>)| *l == link && bytes[0] == WAKE;
    assert_eq!(p.log.iter().filter(at(1)).count(), 0);
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
}

#[test]
fn keys_that_are_an_hour_old_are_renewed_with_the_long_term_ones() {
    // R-TICKET-3
    let mut p = Pair::new();
    p.request(600_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(10));
    p.keep_log = true;
    let epoch = p.device.session(p.session).unwrap().epoch();
    p.run_for(Span::from_secs(3700));
    assert_eq!(p.device.session(p.session).unwrap().epoch(), epoch + 1);
    assert_eq!(knocks(&p), [SYN]);
}

#[test]
fn a_wake_that_somebody_repeats_later_brings_him_nothing() {
    // R-HS-1, R-TICKET-1
    let mut p = Pair::new();
    let (flow, record) = asleep(&mut p);
    comes_back(&mut p, &record, 500, "192.0.2.200:4000");
    ends_well(&mut p, flow);
    let wake = p.log.iter().find(|(_, _, bytes)| bytes[0] == WAKE);
    let wake = wake.expect("it came by ticket").2.clone();
    p.run_for(Span::from_secs(30));
    let before = p.server.counts();
    let remote = "198.51.100.66:666".parse().unwrap();
    let addresses = Addresses {
        link: LinkId(0),
        local: None,
        remote,
    };
    let mut bytes = wake.clone();
    let bytes = &mut bytes[..];
    p.server
        .handle_datagram(p.now, IncomingDatagram { addresses, bytes });
    let mut out = vec![0; 65_536];
    let mut answered = 0;
    while let Some(t) = p.server.poll_transmit(p.now, &mut out) {
        if t.remote == remote {
            answered += t.len;
        }
    }
    assert!(answered < 100, "{answered} bytes: at most that it is stale");
    assert_eq!(p.server.counts(), before);
}

#[test]
fn a_flood_of_stale_wakes_costs_little_public_key_work_and_an_honest_one_gets_in() {
    // R-TICKET-4
    let mut p = Pair::new();
    let (_, record) = asleep(&mut p);
    comes_back(&mut p, &record, 500, "192.0.2.200:4000");
    p.run_for(MS.times(200));
    p.cut(0);
    p.run_for(Span::from_secs(60));
    let server = p.server_session().unwrap();
    p.server.hibernate(p.now, server).unwrap();
    let session = p.session;
    let record = p.device.hibernate(p.now, session).unwrap();
    let stale = p.log.iter().find(|(_, _, bytes)| bytes[0] == WAKE);
    let stale = stale.expect("it came by ticket").2.clone();
    let before = d2tp_seal::x25519_operations();
    let mut out = vec![0; 65_536];
    for n in 0..1000u16 {
        let mut bytes = stale.clone();
        let addresses = Addresses {
            link: LinkId(0),
            local: None,
            remote: ([198, 51, 100, 66], 1000 + n).into(),
        };
        let bytes = &mut bytes[..];
        p.server
            .handle_datagram(p.now, IncomingDatagram { addresses, bytes });
        let answer = p.server.poll_transmit(p.now, &mut out).unwrap();
        assert!(answer.len < 100);
        if n >= 20 {
            assert_eq!((answer.len, out[0]), (53, 0xc1), "a cookie");
        }
    }
    let spent = d2tp_seal::x25519_operations() - before;
    assert!(spent <= 2 * 20, "{spent} X25519 operations");
    p.log.clear();
    comes_back(&mut p, &record, 700, "192.0.2.201:4000");
    p.run_for(MS.times(100));
    assert_eq!(knocks(&p), [WAKE]);
    let state = p.device.session(p.session).map(Session::state);
    assert_eq!(state, Some(SessionState::Established));
}

#[test]
fn where_too_many_wakes_are_in_doubt_the_next_one_proves_its_address_before_it_is_read() {
    // R-TICKET-4
    let mut p = Pair::new();
    let (_, record) = asleep(&mut p);
    comes_back(&mut p, &record, 500, "192.0.2.200:4000");
    p.run_for(MS.times(200));
    p.cut(0);
    p.run_for(Span::from_secs(60));
    let server = p.server_session().unwrap();
    p.server.hibernate(p.now, server).unwrap();
    let session = p.session;
    let record = p.device.hibernate(p.now, session).unwrap();
    let stale = p.log.iter().find(|(_, _, bytes)| bytes[0] == WAKE);
    let stale = stale.expect("it came by ticket").2.clone();
    let mut out = vec![0; 65_536];
    for n in 0..1_100u16 {
        let mut bytes = stale.clone();
        let addresses = Addresses {
            link: LinkId(0),
            local: None,
            remote: ([198, 51, 100, 66], 1000 + n).into(),
        };
        if n % 2 == 0 {
            // Not of the ticket's holder, by somebody who knows the server's key.
            let last = bytes.len() - SynMacs::BYTES - 1;
            bytes[last] ^= 1;
            SynMacs::write(&mut bytes, &server_key().public(), None);
        }
        let bytes = &mut bytes[..];
        p.server
            .handle_datagram(p.now, IncomingDatagram { addresses, bytes });
        while p.server.poll_transmit(p.now, &mut out).is_some() {}
    }
    p.log.clear();
    comes_back(&mut p, &record, 700, "192.0.2.201:4000");
    p.run_for(MS.times(100));
    assert_eq!(knocks(&p), [WAKE, WAKE], "the second with the cookie");
    let state = p.device.session(p.session).map(Session::state);
    assert_eq!(state, Some(SessionState::Established));
}

#[test]
fn under_load_who_shows_a_ticket_is_let_in_at_once_and_a_stranger_proves_his_address() {
    // R-HS-7
    let mut p = Pair::with(EndpointConfig {
        cookie_above: 0,
        ..config()
    });
    let (flow, record) = asleep(&mut p);
    comes_back(&mut p, &record, 500, "192.0.2.200:4000");
    ends_well(&mut p, flow);
    assert_eq!(knocks(&p), [WAKE]);
    p.log.clear();
    p.session = p.device.connect(p.now, server_key().public(), 78, 1..9);
    p.open_path(0, false);
    p.run_for(MS.times(100));
    assert_eq!(knocks(&p), [SYN, SYN], "the second with the cookie");
}
