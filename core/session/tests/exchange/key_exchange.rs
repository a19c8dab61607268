//! Keys by ML-KEM: when the exchange takes place, what survives of it, and what happens where one end
//! cannot or has forgotten.

use crate::pair::*;
use d2tp_session::*;

const SYN: u8 = 0x81;
const WAKE: u8 = 0x61;

fn policy(hybrid: HybridPolicy) -> EndpointConfig {
    EndpointConfig { hybrid, ..config() }
}

/// Two ends with a policy each.
fn ends(device: HybridPolicy, server: HybridPolicy) -> Pair {
    let mut p = Pair::with(policy(device));
    p.server = server_of(server);
    p
}

fn server_of(hybrid: HybridPolicy) -> Endpoint {
    Endpoint::new(
        policy(hybrid),
        server_key(),
        Admission::Anybody,
        [3; 32],
        [4; 32],
    )
}

fn sleeps() -> FlowOptions {
    FlowOptions {
        hibernates: true,
        ..FlowOptions::default()
    }
}

fn device_is_hybrid(p: &Pair) -> bool {
    p.device
        .session(p.session)
        .is_some_and(Session::has_hybrid_keys)
}

fn server_is_hybrid(p: &Pair) -> bool {
    let session = p.server_session().and_then(|id| p.server.session(id));
    session.is_some_and(Session::has_hybrid_keys)
}

fn are_hybrid(p: &Pair) -> bool {
    device_is_hybrid(p) && server_is_hybrid(p)
}

/// The secrets in the records of device and server.
fn secrets(p: &Pair) -> [Option<SessionSecret>; 2] {
    let server = p.server.session(p.server_session().unwrap()).unwrap();
    let device = p.device.session(p.session).unwrap();
    [device, server].map(|session| session.record(p.now, false).secret)
}

/// Both ends become records. Returned: the device's, the server's.
fn hibernate_both(p: &mut Pair) -> [SessionRecord; 2] {
    p.cut(0);
    p.run_for(Span::from_secs(60));
    let server = p.server_session().unwrap();
    let server = p.server.hibernate(p.now, server).unwrap();
    let session = p.session;
    let device = p.device.hibernate(p.now, session).unwrap();
    p.keep_log = true;
    p.log.clear();
    [device, server].map(|record| SessionRecord::decode(&record).unwrap())
}

fn wake(p: &mut Pair, record: &SessionRecord, epoch: u32) {
    let record = record.encode();
    p.session = p
        .device
        .restore(p.now, &record, epoch..epoch + 100)
        .unwrap();
    p.attach(0, &format!("192.0.2.{}:4000", epoch % 200));
    p.open_path(0, false);
}

/// The first bytes of the device's handshake packets since the start of the log.
fn handshakes(p: &Pair) -> Vec<u8> {
    let first = p.log.iter().map(|(_, _, bytes)| bytes[0]);
    first.filter(|b| matches!(*b, SYN | WAKE)).collect()
}

/// A download that sleeps half way, with hybrid keys in force. Returned: the flow, both records.
fn asleep(p: &mut Pair) -> (FlowId, [SessionRecord; 2]) {
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(600_000, sleeps());
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    assert!(are_hybrid(p));
    (flow, hibernate_both(p))
}

fn ends_well(p: &mut Pair, flow: FlowId) {
    p.wires.get_mut(&0).unwrap().rate = 0;
    assert!(
        p.run_until(Span::from_secs(60), |p| p.is_whole(flow)),
        "{:?}",
        p.ended
    );
    p.assert_right(flow);
}

#[test]
fn new_ends_have_hybrid_keys_two_round_trips_after_the_syn_and_keep_one_secret() {
    // R-KEM-1, R-KEM-2, R-KEM-7
    let mut p = ends(HybridPolicy::Offered, HybridPolicy::Offered);
    let flow = p.request(100_000, FlowOptions::default());
    p.open_path(0, false);
    let began = p.now;
    assert!(p.run_until(Span::from_secs(5), are_hybrid));
    assert!(
        p.now.since(began) < MS.times(55),
        "two and a half round trips of 20 ms"
    );
    let [device, server] = secrets(&p);
    assert!(device.is_some());
    assert_eq!(device, server);
    ends_well(&mut p, flow);
}

#[test]
fn whatever_packets_are_lost_the_exchange_comes_to_its_end() {
    // R-KEM-2
    // Every second packet of a dialogue would be each answer.
    for lose_every in 3..=9 {
        for first in 0..lose_every {
            let mut p = ends(HybridPolicy::Offered, HybridPolicy::Offered);
            let wire = p.wires.get_mut(&0).unwrap();
            (wire.lose_every, wire.count) = (lose_every, first);
            let flow = p.request(20_000, FlowOptions::default());
            p.open_path(0, false);
            let done = p.run_until(Span::from_secs(60), are_hybrid);
            assert!(done, "with each {lose_every}. packet lost from {first} on");
            let [device, server] = secrets(&p);
            assert_eq!(device, server);
            ends_well(&mut p, flow);
        }
    }
}

#[test]
fn an_end_that_has_no_hybrid_keys_is_served_with_those_of_the_handshake() {
    // R-KEM-1
    let (off, offered) = (HybridPolicy::Off, HybridPolicy::Offered);
    for (device, server) in [(off, offered), (offered, off), (off, off)] {
        let mut p = ends(device, server);
        let flow = p.request(100_000, FlowOptions::default());
        p.open_path(0, false);
        ends_well(&mut p, flow);
        assert!(!device_is_hybrid(&p) && !server_is_hybrid(&p));
        assert_eq!(secrets(&p), [None, None]);
    }
}

#[test]
fn where_hybrid_keys_are_required_nothing_of_flows_is_sent_before_them() {
    // R-KEM-8
    let mut p = ends(HybridPolicy::Required, HybridPolicy::Offered);
    let flow = p.request(100_000, FlowOptions::default());
    p.open_path(0, false);
    let until = p.now + Span::from_secs(5);
    while !server_is_hybrid(&p) {
        assert!(p.step(until), "the exchange ends");
        let session = p.server_session().and_then(|id| p.server.session(id));
        let flows = session.map_or(0, |session| session.flow_ids().len());
        assert!(
            flows == 0 || server_is_hybrid(&p),
            "a flow came before the keys"
        );
    }
    ends_well(&mut p, flow);
}

#[test]
fn a_server_without_hybrid_keys_is_left_where_they_are_required() {
    // R-KEM-8
    let mut p = ends(HybridPolicy::Required, HybridPolicy::Off);
    p.request(100_000, FlowOptions::default());
    p.open_path(0, false);
    p.run_for(Span::from_secs(5));
    let closed = p
        .device_events
        .iter()
        .find_map(|(_, _, event)| match event {
            SessionEvent::Closed(end) => Some(end.clone()),
            _ => None,
        });
    assert_eq!(closed, Some(SessionEnd::NoHybridKeys));
    assert!(p.server.ids().is_empty(), "nothing was confirmed");
}

#[test]
fn who_comes_back_uses_the_secret_in_one_round_trip_and_as_many_bytes_as_before() {
    // R-KEM-6
    let mut first_bytes = [0; 2];
    for (hybrid, bytes) in [HybridPolicy::Off, HybridPolicy::Offered]
        .into_iter()
        .zip(&mut first_bytes)
    {
        let mut p = ends(hybrid, hybrid);
        p.wires.get_mut(&0).unwrap().rate = 500_000;
        let flow = p.request(600_000, sleeps());
        p.open_path(0, false);
        p.run_for(Span::from_secs(1));
        let [record, _] = hibernate_both(&mut p);
        let (held, began) = (p.got[&flow].len(), p.now);
        wake(&mut p, &record, 500);
        assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() > held));
        assert!(p.now.since(began) < MS.times(25), "one round trip of 20 ms");
        assert_eq!(handshakes(&p), [WAKE]);
        assert_eq!(device_is_hybrid(&p), hybrid == HybridPolicy::Offered);
        let sent = p.log.iter().map(|(_, _, datagram)| datagram.len());
        *bytes = sent.take(3).sum();
        assert_eq!(record.secret, secrets(&p)[0]);
        ends_well(&mut p, flow);
    }
    assert_eq!(
        first_bytes[0], first_bytes[1],
        "WAKE, its answer and the first bytes"
    );
}

#[test]
fn a_server_that_lost_the_secret_gets_a_new_one() {
    // R-KEM-7: its journal is older than the exchange.
    let mut p = ends(HybridPolicy::Offered, HybridPolicy::Offered);
    let (flow, [record, mut rolled_back]) = asleep(&mut p);
    assert_eq!(record.secret, rolled_back.secret);
    rolled_back.secret = None;
    p.server = server_of(HybridPolicy::Offered);
    p.server.adopt(&rolled_back.encode()).unwrap();
    wake(&mut p, &record, 500);
    assert!(p.run_until(Span::from_secs(5), are_hybrid));
    let [device, server] = secrets(&p);
    assert_eq!(device, server);
    assert_ne!(device, record.secret);
    ends_well(&mut p, flow);
}

#[test]
fn a_device_that_lost_the_secret_is_not_woken_by_its_ticket_but_by_its_key() {
    // R-KEM-7: so a ticket that was read with a quantum computer opens nothing.
    for forgets in [true, false] {
        let mut p = ends(HybridPolicy::Offered, HybridPolicy::Offered);
        let (flow, [mut record, _]) = asleep(&mut p);
        record.secret = record.secret.filter(|_| !forgets).map(|mut secret| {
            secret.id[0] ^= 1;
            secret
        });
        wake(&mut p, &record, 500);
        assert!(p.run_until(Span::from_secs(5), are_hybrid));
        assert_eq!(handshakes(&p)[..2], [WAKE, SYN]);
        let [device, server] = secrets(&p);
        assert_eq!(device, server);
        ends_well(&mut p, flow);
    }
}

#[test]
fn who_names_a_secret_and_does_not_have_it_confirms_nothing() {
    // R-KEM-6
    let mut p = ends(HybridPolicy::Offered, HybridPolicy::Offered);
    let (_, [mut record, _]) = asleep(&mut p);
    record.secret.as_mut().unwrap().secret[0] ^= 1;
    p.server_events.clear();
    wake(&mut p, &record, 500);
    p.run_for(Span::from_secs(2));
    p.cut(0);
    p.run_for(Span::from_secs(30));
    let confirmed = |event: &SessionEvent| matches!(event, SessionEvent::Established { .. });
    assert!(!p.server_events.iter().any(|(_, _, event)| confirmed(event)));
    assert_eq!(p.server.counts(), (0, 1, 0), "it sleeps as before");
}

#[test]
fn the_exchange_survives_a_crash_of_either_end_at_every_point() {
    // R-KEM-7
    for steps in 0..14 {
        for device_crashes in [true, false] {
            let mut p = ends(HybridPolicy::Offered, HybridPolicy::Offered);
            let flow = p.request(200_000, sleeps());
            p.open_path(0, false);
            p.run_for(MS.times(5 * steps));
            let Some(server) = p.server_session() else {
                continue;
            };
            let (mine, theirs) = (
                p.device.session(p.session).unwrap().record(p.now, true),
                p.server
                    .session(server)
                    .unwrap()
                    .record(p.now, true)
                    .encode(),
            );
            p.run_for(MS.times(7));
            if device_crashes {
                p.device = Endpoint::new(
                    policy(HybridPolicy::Offered),
                    device_key(),
                    Admission::Nobody,
                    [steps as u8; 32],
                    [2; 32],
                );
                wake(&mut p, &mine, 500);
            } else {
                p.server = server_of(HybridPolicy::Offered);
                p.server.adopt(&theirs).unwrap();
            }
            let done = p.run_until(Span::from_secs(60), are_hybrid);
            assert!(done, "after {steps} steps, device: {device_crashes}");
            let [device, server] = secrets(&p);
            assert_eq!(device, server);
            let _ = flow;
        }
    }
}

/// Bytes per second of a line whose datagrams have no room for half of a share.
const SLOW_LINE: u32 = 960;

/// The device wakes over a slow line alone, and calls a server that has this record.
fn wake_over_slow_line(p: &mut Pair, record: &SessionRecord, of_server: &SessionRecord) {
    p.server = server_of(HybridPolicy::Offered);
    p.server.adopt(&of_server.encode()).unwrap();
    let record = record.encode();
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.make_serial(1, SLOW_LINE);
    p.open_path(1, false);
}

#[test]
fn a_line_with_room_for_a_share_has_hybrid_keys_and_a_slower_one_goes_on_without() {
    // R-SERIAL-5
    for (rate, expected) in [(11_520, true), (SLOW_LINE, false)] {
        let mut p = ends(HybridPolicy::Offered, HybridPolicy::Offered);
        p.make_serial(0, rate);
        p.open_path(0, false);
        let flow = p.request(5_000, FlowOptions::default());
        assert!(p.run_until(Span::from_secs(120), |p| p.is_whole(flow)));
        p.assert_right(flow);
        p.run_for(Span::from_secs(10));
        assert_eq!(device_is_hybrid(&p), expected, "{rate}");
        assert_eq!(server_is_hybrid(&p), expected, "{rate}");
    }
}

#[test]
fn over_a_slow_line_a_secret_is_used_and_a_lost_one_holds_nothing_up() {
    // R-SERIAL-5
    for is_lost in [false, true] {
        let mut p = ends(HybridPolicy::Offered, HybridPolicy::Offered);
        let (flow, [record, mut of_server]) = asleep(&mut p);
        if is_lost {
            of_server.secret = None;
        }
        wake_over_slow_line(&mut p, &record, &of_server);
        let whole = p.run_until(Span::from_secs(1_800), |p| p.is_whole(flow));
        assert!(whole, "lost: {is_lost}, {:?}", p.ended);
        p.assert_right(flow);
        assert_eq!(device_is_hybrid(&p), !is_lost);
    }
}

#[test]
fn a_share_waits_for_a_path_with_room_and_what_requires_it_goes_on_there() {
    // R-SERIAL-5, R-KEM-8
    let mut p = ends(HybridPolicy::Required, HybridPolicy::Offered);
    p.make_serial(1, SLOW_LINE);
    let flow = p.request(20_000, FlowOptions::default());
    p.open_path(1, false);
    p.run_for(Span::from_secs(60));
    assert!(p.server.ids().is_empty(), "nothing is sent over the line");
    p.open_path(0, false);
    ends_well(&mut p, flow);
    assert!(are_hybrid(&p));
}

#[test]
fn a_secret_that_was_lost_is_replaced_when_a_path_has_room() {
    // R-SERIAL-5
    let mut p = ends(HybridPolicy::Required, HybridPolicy::Offered);
    let (flow, [record, mut of_server]) = asleep(&mut p);
    of_server.secret = None;
    wake_over_slow_line(&mut p, &record, &of_server);
    p.run_for(Span::from_secs(60));
    assert!(!device_is_hybrid(&p));
    p.attach(0, "192.0.2.77:4000");
    p.open_path(0, false);
    assert!(
        p.run_until(Span::from_secs(60), are_hybrid),
        "{:?}",
        p.ended
    );
    ends_well(&mut p, flow);
}
