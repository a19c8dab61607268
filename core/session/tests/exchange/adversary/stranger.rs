//! A stranger knows the server's address, perhaps its public key, and no session.

use d2tp_seal::{CookieSecrets, SynMacs, open_cookie};
use d2tp_session::*;
use d2tp_wire::{Cid, PacketKind, WireReader};

use crate::adversary::rogue::*;
use crate::pair::Pair;

fn kinds(r: &Rogue) -> Vec<PacketKind> {
    r.inbox
        .iter()
        .map(|(_, b)| PacketKind::of(b[0]).unwrap().0)
        .collect()
}

#[test]
fn garbage_is_dropped_in_every_state_and_costs_no_state() {
    // R-WIRE-1, R-SEAL-1
    let mut rng = Rng::new([1; 32]);
    let mut states = [
        Rogue::with(EndpointConfig::default()),
        {
            let mut half = Rogue::with(EndpointConfig::default());
            let syn = half.syn(1, None);
            half.throw(half.home, syn);
            half
        },
        Rogue::inside(EndpointConfig::default()),
    ];
    for r in &mut states {
        let before = r.server.counts();
        for n in 0..3000 {
            let mut bytes = vec![0; (rng.u64() % 1400) as usize];
            rng.fill(&mut bytes);
            if n % 2 == 0 && bytes.len() > 9 {
                // Every kind in turn, to ids that exist where there are any.
                bytes[0] = [0x40, 0x81, 0xa1, 0xc1, 0xe1, 0x21][n / 2 % 6];
                if let Some(cid) = r.theirs.get(&((n % 5) as u32)) {
                    bytes[1..9].copy_from_slice(&cid.0);
                }
            }
            r.throw(r.home, bytes);
        }
        assert_eq!(r.server.counts(), before);
    }
    let [_, half, inside] = &mut states;
    inside.say(&[data(flow(0), 0, b"still here")]);
    assert!(inside.is_alive());
    // The half-open handshake is confirmed after all.
    let (_, answer) = half.inbox.remove(0);
    half.welcome(&answer);
    half.say(&[status(0, 1, false)]);
    assert!(half.is_alive());
}

#[test]
fn every_truncation_and_every_bit_flip_of_a_syn_is_dropped() {
    // R-HS-5, R-HS-6
    let mut r = Rogue::with(EndpointConfig::default());
    let syn = r.syn(1, None);
    for cut in 0..syn.len() {
        r.throw(r.home, syn[..cut].to_vec());
    }
    for bit in (0..syn.len() * 8).step_by(3) {
        let mut bad = syn.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        r.throw(r.home, bad);
    }
    // A flipped version bit is answered with ours, a flipped mac2 does not matter without load.
    assert!(
        kinds(&r)
            .iter()
            .all(|k| matches!(k, PacketKind::Version | PacketKind::SynAck))
    );
    let answered = kinds(&r)
        .iter()
        .filter(|k| **k == PacketKind::SynAck)
        .count();
    assert!(
        answered <= 128usize.div_ceil(3),
        "only mac2 may differ: {answered}"
    );
    assert!(r.server.counts().2 <= 2);
}

#[test]
fn a_syn_that_is_cut_is_not_heard_even_if_its_mac_is_right() {
    // R-HS-5
    let mut r = Rogue::with(EndpointConfig::default());
    for size in [60, 159, 160, 600, 1199] {
        let mut syn = r.syn(1, None);
        syn.truncate(size);
        let key = r.server_key;
        SynMacs::write(&mut syn, &key, None);
        r.throw(r.home, syn);
        assert!(r.inbox.is_empty() && r.server.counts().2 == 0, "{size}");
    }
}

#[test]
fn who_does_not_know_the_servers_key_hears_nothing() {
    // R-HS-6
    let mut r = Rogue::with(EndpointConfig::default());
    r.server_key = SecretKey::from_bytes([23; 32]).public();
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    assert!(r.inbox.is_empty() && r.server.counts().2 == 0);
}

#[test]
fn who_knows_the_sum_but_not_the_key_gets_no_state() {
    // R-HS-6: sums by the right key, the Noise message for another server.
    let mut r = Rogue::with(EndpointConfig::default());
    let right = r.server_key;
    r.server_key = SecretKey::from_bytes([23; 32]).public();
    let mut syn = r.syn(1, None);
    SynMacs::write(&mut syn, &right, None);
    r.throw(r.home, syn);
    assert!(r.inbox.is_empty() && r.server.counts().2 == 0);
}

#[test]
fn a_device_that_dials_the_wrong_key_stays_outside() {
    // R-HS-6
    let mut p = Pair::new();
    p.session = p
        .device
        .connect(p.now, SecretKey::from_bytes([99; 32]).public(), 78, 1..1000);
    p.open_path(0, false);
    p.run_for(Span::from_secs(30));
    assert_eq!(p.server.counts(), (0, 0, 0));
    assert_eq!(
        p.device.session(p.session).unwrap().state(),
        SessionState::Handshaking
    );
    assert_eq!(p.wires[&0].bytes_down, 0);
}

#[test]
fn a_client_that_is_not_on_the_list_is_refused_and_nothing_is_kept() {
    // R-HS-11
    let mut r = Rogue::with(EndpointConfig::default());
    r.server.set_admission(Admission::Only(Default::default()));
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    assert_eq!(kinds(&r), [PacketKind::SynAck]);
    assert_eq!(r.server.counts(), (0, 0, 0));
}

#[test]
fn an_unknown_id_is_answered_by_less_and_not_too_often() {
    // R-UNKNOWN-2
    let mut r = Rogue::with(EndpointConfig::default());
    for len in 9..=25 {
        let mut bytes = vec![9; len];
        bytes[0] = 0x40;
        r.throw(r.home, bytes);
    }
    assert!(r.inbox.is_empty(), "an answer would not be smaller");
    for n in 0..1000u64 {
        let mut bytes = vec![9; 26];
        bytes[0] = 0x40;
        bytes[1..9].copy_from_slice(&n.to_be_bytes());
        r.throw(r.home, bytes);
    }
    assert_eq!(r.inbox.len(), 200);
    assert!(r.inbox.iter().all(|(_, b)| b.len() == 25));
    r.now += Span::from_secs(1);
    r.throw(r.home, [[0x40].as_slice(), &[8; 40]].concat());
    assert_eq!(r.inbox.len(), 201);
}

#[test]
fn a_flood_of_syns_of_one_client_leaves_two_half_open_handshakes_that_end() {
    // R-HS-8
    let mut r = Rogue::with(EndpointConfig::default());
    for epoch in 1..50 {
        let syn = r.syn(epoch, None);
        r.throw(r.home, syn);
        assert!(r.server.counts().2 <= 2);
    }
    r.wait(Span::from_secs(11));
    r.instance = 6;
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    assert_eq!(r.server.counts(), (0, 0, 1), "the old ones are gone");
}

#[test]
fn under_load_an_address_is_proved_before_any_state() {
    // R-HS-7: other clients, one address; from the third in a second on, a cookie is asked for.
    let config = EndpointConfig {
        cookie_above: 2,
        ..EndpointConfig::default()
    };
    let mut r = Rogue::with(config);
    for n in 0..40 {
        r.instance = n;
        r.secret = SecretKey::from_bytes([n as u8 + 1; 32]);
        let syn = r.syn(1, None);
        r.throw(r.home, syn);
    }
    let kinds = kinds(&r);
    assert_eq!(
        kinds.iter().filter(|k| **k == PacketKind::SynAck).count(),
        2
    );
    assert_eq!(
        kinds.iter().filter(|k| **k == PacketKind::Cookie).count(),
        38
    );
    assert_eq!(r.server.counts().2, 2);
    assert!(r.inbox.iter().all(|(_, b)| b.len() <= 1200));

    // Who receives there may come in; the same cookie from another port may not.
    let syn = r.syn(2, None);
    let mac1 = SynMacs::mac1(&syn).unwrap();
    r.inbox.clear();
    r.throw(r.home, syn.clone());
    let (_, answer) = r.inbox.pop().unwrap();
    let nonce = answer[9..21].try_into().unwrap();
    let cookie = open_cookie(&r.server_key, mac1, nonce, &answer[21..]).unwrap();
    let mut proved = syn;
    let key = r.server_key;
    SynMacs::write(&mut proved, &key, Some(&cookie));
    r.throw(at("192.0.2.7:4001"), proved.clone());
    assert_eq!(r.server.counts().2, 2, "the cookie is of another port");
    r.throw(r.home, proved);
    assert_eq!(r.server.counts().2, 3);
}

/// SYNs of two thousand keys that nobody knows, at once.
fn strangers_syns(r: &mut Rogue, cookie: Option<&[u8; 16]>) -> Vec<Vec<u8>> {
    let key = r.server_key;
    let mut syns = Vec::new();
    for n in 0..2_000_u64 {
        r.instance = 100 + n;
        let mut secret = [9; 32];
        secret[..8].copy_from_slice(&n.to_be_bytes());
        r.secret = SecretKey::from_bytes(secret);
        let mut syn = r.syn(1, None);
        SynMacs::write(&mut syn, &key, cookie);
        syns.push(syn);
    }
    syns
}

fn accepted(r: &Rogue) -> usize {
    let kinds = kinds(r).into_iter();
    kinds.filter(|kind| *kind == PacketKind::SynAck).count()
}

#[test]
fn strangers_with_streams_cost_a_loaded_server_so_many_handshakes_a_second() {
    // R-HS-22: a stream proves an address, and anybody can open many.
    let mut r = Rogue::with(EndpointConfig::default());
    let syns = strangers_syns(&mut r, None);
    for (n, syn) in syns.into_iter().enumerate() {
        r.throw(StreamPathId(n as u64 % 50).address(), syn);
    }
    // 500 are no load, and as many are answered under load.
    assert_eq!(accepted(&r), 1_000);
    // By UDP a device comes in meanwhile, if it shows that it has its address.
    r.inbox.clear();
    r.secret = SecretKey::from_bytes([77; 32]);
    let syn = r.syn(2, None);
    r.throw(r.home, syn);
    assert_eq!(kinds(&r), [PacketKind::Cookie]);
    // In the next second a device with a stream does, too.
    r.inbox.clear();
    r.wait(Span::from_secs(1));
    let syn = r.syn(3, None);
    r.throw(StreamPathId(1_000).address(), syn);
    assert_eq!(accepted(&r), 1);
}

#[test]
fn an_attacker_with_an_address_of_its_own_costs_a_loaded_server_so_many_handshakes_a_second() {
    // R-HS-22: one cookie is enough for any number of SYNs from that address.
    let config = EndpointConfig {
        cookie_above: 0,
        ..EndpointConfig::default()
    };
    let mut r = Rogue::with(config);
    let cookie = |r: &mut Rogue, from| {
        r.inbox.clear();
        let syn = r.syn(1, None);
        r.throw(from, syn.clone());
        let (_, answer) = r.inbox.pop().unwrap();
        let nonce = answer[9..21].try_into().unwrap();
        let mac1 = SynMacs::mac1(&syn).unwrap();
        open_cookie(&r.server_key, mac1, nonce, &answer[21..]).unwrap()
    };
    let home = r.home;
    let proof = cookie(&mut r, home);
    for syn in strangers_syns(&mut r, Some(&proof)) {
        r.throw(home, syn);
    }
    assert_eq!(accepted(&r), 500);
    // Others come in meanwhile.
    let elsewhere = at("192.0.2.77:4001");
    let proof = cookie(&mut r, elsewhere);
    let mut syn = r.syn(2, None);
    let key = r.server_key;
    SynMacs::write(&mut syn, &key, Some(&proof));
    r.inbox.clear();
    r.throw(elsewhere, syn);
    assert_eq!(accepted(&r), 1);
}

#[test]
fn a_syn_without_proof_under_load_costs_no_public_key_work() {
    // R-HS-7: its Noise message is garbage under a right mac1. Without load that is silently
    // dropped after a public-key operation; the cookie in answer shows that none was done.
    let config = EndpointConfig {
        cookie_above: 0,
        ..EndpointConfig::default()
    };
    let mut r = Rogue::with(config);
    let mut syn = r.syn(1, None);
    syn[9..1168].fill(0);
    let key = r.server_key;
    SynMacs::write(&mut syn, &key, None);
    r.throw(r.home, syn);
    assert_eq!(kinds(&r), [PacketKind::Cookie]);
    assert_eq!(r.server.counts(), (0, 0, 0));
}

#[test]
fn another_version_is_told_ours_in_less_than_it_sent() {
    // R-HS-10
    let mut r = Rogue::with(EndpointConfig::default());
    let mut syn = r.syn(1, None);
    syn[0] = 0b100 << 5 | 9;
    r.throw(r.home, syn);
    assert_eq!(kinds(&r), [PacketKind::Version]);
    assert_eq!(r.inbox[0].1[9..], [1]);
    assert_eq!(r.server.counts().2, 0);
}

#[test]
fn a_forged_unknown_does_not_make_the_device_knock() {
    // R-UNKNOWN-1
    let mut p = Pair::new();
    let flow = p.request(200_000, FlowOptions::default());
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.keep_log = true;
    p.open_path(0, false);
    p.run_for(MS.times(100));
    let cid: [u8; 8] = p.log.last().unwrap().2[1..9].try_into().unwrap();
    let foreign = CookieSecrets::new(&SecretKey::from_bytes([1; 32]).public(), [0; 32], [77; 32]);
    for token in [[0; 16], [0xff; 16], foreign.token(Cid(cid))] {
        let mut bytes = vec![PacketKind::Unknown.first_byte()];
        bytes.extend(cid);
        bytes.extend(token);
        p.inject(false, p.server_address, bytes.clone());
        for cut in 0..bytes.len() {
            p.inject(false, p.server_address, bytes[..cut].to_vec());
        }
    }
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
    let established = p
        .device_events
        .iter()
        .filter(|(_, _, e)| matches!(e, SessionEvent::Established { .. }))
        .count();
    assert_eq!(established, 1);
}

#[test]
fn a_client_key_cannot_fill_the_server() {
    // R-HS-8: half-open handshakes of many instances are bounded in all.
    let mut r = Rogue::with(EndpointConfig {
        cookie_above: 10_000,
        ..EndpointConfig::default()
    });
    for n in 0..3000 {
        r.instance = n;
        let syn = r.syn(1, None);
        r.throw(r.home, syn);
    }
    let half_open = r.server.counts().2;
    assert!(
        half_open <= 2048,
        "{half_open} half-open, cookies must be asked for"
    );
}

#[test]
fn an_answer_of_another_version_is_not_heard() {
    // R-WIRE-4: the version is not authenticated, so it must not be taken for a detail.
    let (now, server_key) = (Time::ZERO + MS, SecretKey::from_bytes([22; 32]));
    let host = |key: &SecretKey, admission, seed| {
        Endpoint::new(
            EndpointConfig::default(),
            key.clone(),
            admission,
            [seed; 32],
            [seed + 1; 32],
        )
    };
    let mut server = host(&server_key, Admission::Anybody, 1);
    let mut device = host(&SecretKey::from_bytes([11; 32]), Admission::Nobody, 3);
    let at = |remote: &str| Addresses {
        link: LinkId(0),
        local: None,
        remote: remote.parse().unwrap(),
    };
    let (to_server, to_device) = (at("198.51.100.1:4433"), at("192.0.2.1:4000"));
    let throw = |host: &mut Endpoint, addresses, bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        let bytes = &mut bytes[..];
        host.handle_datagram(now, IncomingDatagram { addresses, bytes });
    };
    let say = |host: &mut Endpoint| {
        let mut buf = vec![0; 65536];
        let n = host.poll_transmit(now, &mut buf).expect("a datagram").len;
        buf.truncate(n);
        buf
    };
    let session = device.connect(now, server_key.public(), 77, 1..100);
    device
        .with(session, |s| s.open_path(now, to_server, false))
        .unwrap();
    let syn = say(&mut device);
    throw(&mut server, to_device, &syn);
    let answer = say(&mut server);
    let mut heard = |answer: &[u8]| {
        throw(&mut device, to_server, answer);
        std::iter::from_fn(|| device.poll_event())
            .any(|(_, event)| matches!(event, SessionEvent::Established { .. }))
    };
    for bit in 0..5 {
        let mut other = answer.clone();
        other[0] ^= 1 << bit;
        assert!(!heard(&other), "bit {bit}");
    }
    assert!(heard(&answer), "the true one");
}

/// The server's answer to the SYN of another unknown client: its credits for session and flow, or
/// the code of the refusal.
fn answer_to_stranger(r: &mut Rogue, n: u8) -> Result<(u64, u64), u8> {
    r.secret = SecretKey::from_bytes([n; 32]);
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    let (_, answer) = r.inbox.pop().expect("the server answers");
    let (_, _, _, body) = PacketKind::split(&answer).unwrap();
    let mut payload = [0; 1500];
    let (_, len) = r
        .initiator
        .as_mut()
        .unwrap()
        .finish(body, &mut payload)
        .unwrap();
    let mut reader = WireReader::new(&payload[..len]);
    if reader.u8().unwrap() != 0 {
        return Err(reader.u8().unwrap());
    }
    let _cid: [u8; 8] = reader.array().unwrap();
    let _token: [u8; 16] = reader.array().unwrap();
    let (_suite, _resumed) = (reader.u8().unwrap(), reader.u8().unwrap());
    Ok((reader.varint().unwrap(), reader.varint().unwrap()))
}

#[test]
fn strangers_who_may_ask_to_be_admitted_are_few_and_get_little_credit() {
    // R-HS-19
    let mut r = Rogue::with(EndpointConfig::default());
    r.server.set_admission(Admission::Only(Default::default()));
    r.server.set_unadmitted_max(2);
    for n in 1..=2 {
        let (session, flow) = answer_to_stranger(&mut r, n).expect("there is room");
        assert!(session <= UNADMITTED_WINDOW_BYTES && flow <= UNADMITTED_WINDOW_BYTES);
    }
    assert_eq!(r.server.counts(), (0, 0, 2));
    assert!(
        answer_to_stranger(&mut r, 3).is_err(),
        "half-open handshakes count"
    );
    // Whoever is on the list is none of them.
    let listed = SecretKey::from_bytes([4; 32]).public();
    r.server.set_admission(Admission::Only([listed].into()));
    let (session, _) = answer_to_stranger(&mut r, 4).expect("it is admitted");
    assert!(session > UNADMITTED_WINDOW_BYTES);
    r.server.set_unadmitted_max(0);
    r.wait(Span::from_secs(11));
    assert!(
        answer_to_stranger(&mut r, 5).is_err(),
        "the door is closed again"
    );
}

#[test]
fn a_stranger_who_is_not_admitted_in_time_loses_its_session_and_one_who_is_keeps_it() {
    // R-HS-19
    for is_admitted in [false, true] {
        let mut p = Pair::new();
        p.server.set_admission(Admission::Only(Default::default()));
        p.server.set_unadmitted_max(1);
        p.open_path(0, false);
        p.run_for(Span::from_secs(1));
        let id = p.server_session().expect("it is let in to ask");
        let device = p.server.session(id).unwrap().peer();
        assert!(!p.server.is_admitted(&device));
        assert_eq!(
            p.server.end_unadmitted(p.now, Span::from_secs(5)),
            0,
            "too soon"
        );
        if is_admitted {
            p.server.set_admission(Admission::Only([device].into()));
        }
        p.run_for(Span::from_secs(5));
        let closed = p.server.end_unadmitted(p.now, Span::from_secs(5));
        assert_eq!(closed, usize::from(!is_admitted));
        p.run_for(Span::from_secs(10));
        assert_eq!(p.server.counts().0, usize::from(is_admitted));
    }
}
