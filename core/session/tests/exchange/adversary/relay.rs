//! Relays, and who would use them without being asked: strangers at the relay's door, members who ask
//! for too much, and peers that punch.

use d2tp_session::*;

use crate::adversary::rogue::MS;
use crate::pair::{Pair, config, device_key};

const LIMITS: RelayLimits = RelayLimits {
    client: 16,
    all: 64,
};

/// A device with a session at a host that relays, and a relay to somewhere outside.
fn relayed() -> (Pair, RelayTable, RelayId) {
    let mut p = Pair::new();
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    let mut relays = RelayTable::new(LIMITS, [8; 32]);
    let session = p.server_session().unwrap();
    let id = relays.open(&p.server, session).unwrap();
    (p, relays, id)
}

/// An address pair as the relay's host sees it.
fn at(text: &str) -> Addresses {
    Addresses {
        link: LinkId(0),
        local: None,
        remote: text.parse().unwrap(),
    }
}

const HOME: &str = "192.0.2.1:4000";

fn syn() -> Vec<u8> {
    let mut bytes = vec![0; 1200];
    bytes[0] = 0x81;
    bytes
}

#[test]
fn a_packet_to_a_relay_from_a_strangers_address_goes_nowhere_and_changes_nothing() {
    // R-RELAY-1
    let (p, mut relays, id) = relayed();
    let onward = Some(ForwardTarget::Outside(id));
    assert_eq!(
        relays.forward_from_device(&p.server, id, &at(HOME), &syn()),
        onward
    );
    for elsewhere in ["192.0.2.1:4001", "192.0.2.66:4000", "[2001:db8::1]:4000"] {
        let place = at(elsewhere);
        assert_eq!(
            relays.forward_from_device(&p.server, id, &place, &syn()),
            None
        );
        let back = relays.forward_to_device(&p.server, id, &syn()).unwrap();
        assert_eq!(back.remote, at(HOME).remote, "after {elsewhere}");
    }
    // The right address on another socket of the relay's is another place.
    let other = Addresses {
        link: LinkId(5),
        ..at(HOME)
    };
    assert_eq!(
        relays.forward_from_device(&p.server, id, &other, &syn()),
        None
    );
}

#[test]
fn a_forged_move_of_the_session_turns_its_relay_only_when_the_new_place_is_proved() {
    // R-RELAY-1: a packet repeated from elsewhere moves the path at once, and proves nothing.
    let (mut p, mut relays, id) = relayed();
    p.keep_log = true;
    let flow = p.request(10, FlowOptions::default());
    p.run_for(Span::from_secs(1));
    assert!(p.is_whole(flow));
    p.silence(0);
    let session = p.session;
    let _ = p.device.with(session, |s| s.close(0, "held up"));
    let mut buf = vec![0; 65_536];
    let held = p.device.poll_transmit(p.now, &mut buf).expect("it says so");
    let thief = "198.51.100.66:666";
    let own = relays.forward_from_device(&p.server, id, &at(HOME), &syn());
    assert!(own.is_some());
    p.inject(true, thief.parse().unwrap(), buf[..held.segment].to_vec());
    assert_eq!(
        relays.forward_from_device(&p.server, id, &at(thief), &syn()),
        None
    );
    let to = relays.forward_to_device(&p.server, id, &syn());
    assert!(to.is_none_or(|to| to.remote != at(thief).remote), "{to:?}");
}

#[test]
fn a_guessed_relay_id_is_an_unknown_connection_to_whoever_guesses() {
    let (mut p, mut relays, id) = relayed();
    let mut buf = vec![0; 2000];
    for n in 0..1_000u64 {
        let guess = RelayId((n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_be_bytes());
        assert!(!relays.contains(guess) && guess != id);
        assert_eq!(
            relays.forward_from_device(&p.server, guess, &at(HOME), &syn()),
            None
        );
        let mut datagram = Vec::new();
        wrap_relayed(guess, &syn(), &mut datagram);
        let incoming = IncomingDatagram {
            addresses: at("203.0.113.7:7"),
            bytes: &mut datagram,
        };
        p.server.handle_datagram(p.now, incoming);
        while let Some(answer) = p.server.poll_transmit(p.now, &mut buf) {
            assert!(answer.len < 100, "R-UNKNOWN-2: {} bytes", answer.len);
        }
    }
    assert_eq!(relays.len(), 1);
}

#[test]
fn somebody_who_does_not_answer_gets_sixteen_packets_and_nothing_that_is_not_d2tp() {
    // R-RELAY-2, R-RELAY-3
    let (p, mut relays, id) = relayed();
    let place = at(HOME);
    let mut passed = 0;
    for n in 0..1_000 {
        // A query for names, of which answers are large.
        let dns = [
            0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
        ];
        assert_eq!(
            relays.forward_from_device(&p.server, id, &place, &dns),
            None
        );
        assert_eq!(
            relays.forward_from_device(&p.server, id, &place, &syn()[..20]),
            None
        );
        if relays
            .forward_from_device(&p.server, id, &place, &syn())
            .is_some()
        {
            passed += 1;
            assert!(n < UNANSWERED_MAX);
        }
    }
    assert_eq!(passed, UNANSWERED_MAX);
    // Whoever answers takes part.
    assert!(relays.forward_to_device(&p.server, id, &syn()).is_some());
    assert!((0..100).all(|_| {
        relays
            .forward_from_device(&p.server, id, &place, &syn())
            .is_some()
    }));
}

#[test]
fn nobody_reaches_a_device_through_a_relay_it_has_not_used_yet() {
    // R-RELAY-3
    let (p, mut relays, id) = relayed();
    assert_eq!(relays.forward_to_device(&p.server, id, &syn()), None);
    assert!(
        relays
            .forward_from_device(&p.server, id, &at(HOME), &syn())
            .is_some()
    );
    assert_eq!(relays.forward_to_device(&p.server, id, &[0; 30]), None);
    let to = relays
        .forward_to_device(&p.server, id, &syn())
        .map(|to| to.remote);
    assert_eq!(to, Some(at(HOME).remote));
}

#[test]
fn a_device_that_asks_for_ten_thousand_relays_gets_sixteen_and_leaves_room_for_others() {
    // R-RELAY-4
    let (p, mut relays, first) = relayed();
    let session = p.server_session().unwrap();
    let mut open = vec![first];
    let mut refused = 0;
    for _ in 0..10_000 {
        match relays.open(&p.server, session) {
            Ok(id) => open.push(id),
            Err(RelayRefusal::ClientFull(16)) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!((open.len(), refused, relays.len()), (16, 10_000 - 15, 16));
    // Calls count too, at the caller's cost, whoever listens.
    let own = p.server.session(session).unwrap().peer();
    let told = relays.listen(&p.server, session, Admission::Anybody);
    assert_eq!(told, Ok(()));
    let full = Err(RelayRefusal::ClientFull(16));
    assert_eq!(relays.call(&p.server, session, own).map(|_| ()), full);
    relays.close(open[0]);
    assert_eq!(
        relays.call(&p.server, session, own).map(|_| ()),
        full,
        "two are needed"
    );
    relays.close(open[1]);
    assert!(relays.call(&p.server, session, own).is_ok());
}

#[test]
fn the_id_of_a_relay_leads_to_its_host_and_its_worker() {
    // R-RELAY-9
    let of_host = CidShare::new(7, 1, 3).unwrap();
    let client = device_key().public().0;
    let part: [u8; 8] = client[..8].try_into().unwrap();
    let workers = (0..4).map(|index| CidShare::new(9, index, 4).unwrap());
    let worker = workers.clone().find(|share| share.contains(part)).unwrap();
    let mut p = Pair::with(EndpointConfig {
        cid_share: Some(of_host),
        worker: Some(worker),
        ..config()
    });
    p.server.set_cookie_seed([8; 32]);
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    let session = p.server_session().unwrap();
    let mut relays = RelayTable::new(LIMITS, [8; 32]);
    for _ in 0..LIMITS.client {
        let id = relays.open(&p.server, session).unwrap();
        assert!(of_host.contains(id.0) && worker.contains(id.0), "{id}");
    }
}

#[test]
fn who_may_not_call_and_who_calls_nobody_hear_the_same() {
    let (p, mut relays, _) = relayed();
    let session = p.server_session().unwrap();
    let own = p.server.session(session).unwrap().peer();
    let nobody = relays
        .call(&p.server, session, PublicKey([9; 32]))
        .map(|_| ());
    relays
        .listen(&p.server, session, Admission::Nobody)
        .unwrap();
    let refused = relays.call(&p.server, session, own).map(|_| ());
    assert_eq!(
        (nobody, refused),
        (Err(RelayRefusal::NobodyListens), nobody)
    );
    relays
        .listen(&p.server, session, Admission::Anybody)
        .unwrap();
    relays.stop_listening(session);
    assert_eq!(relays.call(&p.server, session, own).map(|_| ()), nobody);
}

#[test]
fn a_device_hears_relayed_packets_from_its_relay_and_nobody_else() {
    // R-RELAY-5
    let (p, _, id) = relayed();
    let mut guest = RelayClient::default();
    guest.use_relay(id, p.session);
    let mut datagram = Vec::new();
    wrap_relayed(id, &syn(), &mut datagram);
    let from = |remote: &str, link| Addresses {
        link: LinkId(link),
        local: None,
        remote: remote.parse().unwrap(),
    };
    let server = p.server_address.to_string();
    let heard = guest.classify_datagram(&p.device, &from(&server, 0), &datagram);
    let stands = Addresses {
        remote: id.address(),
        ..from(&server, 0)
    };
    assert_eq!(heard, Some(InterceptedDatagram::Relayed(stands)));
    for (remote, link) in [
        ("203.0.113.66:443", 0),
        ("203.0.113.1:444", 0),
        (&*server, 1),
    ] {
        let heard = guest.classify_datagram(&p.device, &from(remote, link), &datagram);
        assert_eq!(
            heard,
            Some(InterceptedDatagram::Nothing),
            "{remote} over {link}"
        );
    }
    let cut = guest.classify_datagram(&p.device, &from(&server, 0), &datagram[..9]);
    assert_eq!(cut, Some(InterceptedDatagram::Nothing));
}

#[test]
fn a_listener_takes_so_many_calls_and_no_more() {
    // R-RELAY-5
    let mut guest = RelayClient::default();
    let (p, _, _) = relayed();
    let taken = (0..1_000u64)
        .filter(|n| guest.take_call(RelayId(n.to_be_bytes()), p.session, LinkId(*n as u32)));
    assert_eq!(taken.count(), CALLS_MAX);
}

#[test]
fn a_peer_that_names_strangers_costs_each_a_few_packets() {
    // R-PUNCH-2, R-PUNCH-3
    let (mut p, relay) = (Pair::new(), RelayId([4; 8]));
    p.server_address = relay.address();
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    let mut caller = Rendezvous::caller([3; 8]);
    caller.set_relay(Some(relay));
    let (mut buf, session) = (vec![0; 65_536], p.session);
    let victim = "198.51.100.9:53".parse().unwrap();
    let (mut said, begun) = (0, p.now);
    while p.now < begun + Span::from_secs(60) {
        let now = p.now;
        caller.set_local_addresses(
            now,
            vec![(LinkId(0), RendezvousReach::Ipv4)],
            vec!["10.0.0.1:4000".parse().unwrap()],
        );
        caller.handle_line(now, "at - 198.51.100.9:53");
        caller.on_punch(LinkId(0), victim);
        let _ = p.device.with(session, |s| caller.update_paths(now, s));
        while let Some(t) = p.device.poll_transmit(now, &mut buf) {
            if t.remote == victim {
                said += t.len;
            }
        }
        p.now = now + MS.times(100);
        p.device.handle_timeouts(p.now);
    }
    // Three seconds of probes each time, and a peer's word counts twice a second at most.
    assert!(said > 0, "it is tried");
    assert!(said < 60 * 2 * 1_200, "{said} bytes in a minute");
}
