//! A witness sees packets, copies, alters, repeats and overtakes them, and has no key.

use d2tp_session::*;
use d2tp_wire::{DATA_HEADER_BYTES, Frame, PacketKind, TAG_BYTES};

use crate::adversary::rogue::*;
use crate::pair::Pair;

fn sleeps() -> FlowOptions {
    FlowOptions {
        hibernates: true,
        ..FlowOptions::default()
    }
}

#[test]
fn every_bit_flip_and_truncation_of_a_packet_is_dropped() {
    // R-SEAL-1
    let mut r = Rogue::inside(EndpointConfig::default());
    let packet = r.packet(0, &[data(flow(0), 0, b"one byte that counts")]);
    for bit in 0..packet.len() * 8 {
        let mut bad = packet.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        r.throw(r.home, bad);
    }
    for cut in 0..packet.len() {
        r.throw(r.home, packet[..cut].to_vec());
    }
    assert!(r.is_alive() && r.with_session(|s| s.flow_ids()).is_empty());
    r.throw(r.home, packet);
    assert_eq!(
        r.with_session(|s| s.flow_ids()),
        [flow(0)],
        "the true one counts"
    );
}

#[test]
fn a_bit_flip_or_truncation_of_a_syn_ack_leaves_the_handshake_open() {
    // R-SEAL-1
    let mut r = Rogue::with(EndpointConfig::default());
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    let (_, answer) = r.inbox.pop().unwrap();
    let initiator = r.initiator.as_mut().unwrap();
    let mut out = [0; 1500];
    for bit in 0..(answer.len() - 9) * 8 {
        let mut bad = answer[9..].to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(initiator.finish(&bad, &mut out).is_err(), "bit {bit}");
    }
    for cut in 0..answer.len() - 9 {
        assert!(initiator.finish(&answer[9..9 + cut], &mut out).is_err());
    }
    r.welcome(&answer);
    r.say(&[status(0, 1, false)]);
    assert!(r.is_alive());
}

#[test]
fn every_packet_ever_sent_repeated_at_once_and_a_day_later_changes_nothing() {
    // R-SEAL-4, R-HS-1
    let mut p = Pair::new();
    p.keep_log = true;
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(600_000, sleeps());
    p.open_path(0, false);
    let mut replayed = 0;
    for _ in 0..20 {
        p.run_for(MS.times(100));
        for (_, from, bytes) in p.log.clone().split_off(replayed) {
            p.inject(true, from, bytes);
        }
        replayed = p.log.len();
    }
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
    p.assert_right(flow);
    let counts = p.server.counts();
    p.cut(0);
    p.run_for(Span::from_secs(100));
    let log = p.log.clone();
    let server = p.server_session().unwrap();
    let stats = |p: &Pair| {
        p.server
            .session(server)
            .map(|s| (s.epoch(), s.flow_ids(), s.state()))
    };
    let before = stats(&p);
    let events = p.server_events.len();
    for (_, from, bytes) in log {
        p.inject(true, from, bytes);
    }
    assert_eq!(stats(&p), before);
    assert_eq!(p.server_events.len(), events, "a replay is no event");
    assert_eq!(p.server.counts().0, counts.0);
    // A day later the session is forgotten; its packets do not bring it back.
    p.run_for(Span::from_secs(24 * 3600));
    assert_eq!(p.server.counts().0, 0);
    for (_, from, bytes) in p.log.clone() {
        p.inject(true, from, bytes);
    }
    p.run_for(Span::from_secs(60));
    assert_eq!(p.server.counts().0, 0);
}

#[test]
fn duplicated_and_reordered_datagrams_do_no_harm() {
    let mut p = Pair::new();
    p.keep_log = true;
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(300_000, sleeps());
    p.open_path(0, false);
    let mut seen = 0;
    for _ in 0..40 {
        p.run_for(MS.times(37));
        let mut fresh = p.log.clone().split_off(seen);
        fresh.reverse();
        for (_, from, bytes) in fresh {
            p.inject(true, from, bytes);
        }
        seen = p.log.len();
    }
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
    p.assert_right(flow);
    assert_eq!(p.device.session(p.session).unwrap().duplicate_bytes(), 0);
}

#[test]
fn a_replayed_syn_is_answered_as_stale_and_the_session_stands() {
    // R-HS-1, R-HS-4, R-HS-12
    let mut p = Pair::new();
    p.keep_log = true;
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(300_000, sleeps());
    p.open_path(0, false);
    p.run_for(MS.times(200));
    let syn = p
        .log
        .iter()
        .find(|(_, _, b)| b[0] >> 5 == 0b100)
        .unwrap()
        .2
        .clone();
    for n in 0..50 {
        p.inject(true, at(&format!("192.0.2.99:{}", 1000 + n)), syn.clone());
    }
    assert_eq!(p.server.counts(), (1, 0, 0));
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn a_replayed_syn_does_not_push_out_the_handshake_it_was_copied_from() {
    // R-HS-8: a SYN is readable by nobody and repeatable by anybody; before it is confirmed its
    // epoch is still good. Copies must not use up the places of the true one.
    let mut r = Rogue::with(EndpointConfig::default());
    let syn = r.syn(1, None);
    r.throw(r.home, syn.clone());
    let (_, answer) = r.inbox.pop().unwrap();
    for n in 0..10 {
        r.throw(at(&format!("198.51.100.9:{}", 1000 + n)), syn.clone());
    }
    r.inbox.clear();
    r.welcome(&answer);
    r.say(&[status(0, 1, false)]);
    assert!(r.is_alive(), "the true handshake was pushed out");
}

#[test]
fn later_syns_of_an_answered_knock_get_its_answer_until_the_device_may_have_lost_it() {
    // R-HS-18: a busy server answers late, and each device has knocked again by then.
    let mut r = Rogue::with(EndpointConfig::default());
    let (home, elsewhere) = (r.home, at("198.51.100.9:1000"));
    let first = r.syn(1, None);
    r.throw(home, first);
    let (_, answer) = r.inbox.pop().unwrap();
    for epoch in 2..4 {
        let later = r.syn_again(epoch, None);
        r.throw(home, later);
        let (to, again) = r.inbox.pop().unwrap();
        assert_eq!((to, &again), (home, &answer));
        assert_eq!(r.server.counts(), (0, 0, 1), "no state of its own");
    }
    let moved = r.syn_again(4, None);
    r.throw(elsewhere, moved);
    assert_ne!(
        r.inbox.pop().unwrap().1,
        answer,
        "asked from elsewhere it is another handshake"
    );
    let lost = r.syn_again(5, None);
    r.throw(home, lost);
    let (_, fresh) = r.inbox.pop().unwrap();
    assert_ne!(fresh, answer);
    r.welcome(&fresh);
    r.say(&[status(0, 1, false)]);
    assert!(r.is_alive());
}

#[test]
fn an_answer_that_nobody_can_confirm_any_more_is_not_given_again() {
    // R-HS-17, R-HS-18
    let mut r = Rogue::with(EndpointConfig::default());
    let first = r.syn(1, None);
    r.throw(r.home, first);
    let (_, answer) = r.inbox.pop().unwrap();
    r.now += EndpointConfig::default().half_open_max;
    let later = r.syn_again(2, None);
    r.throw(r.home, later);
    let (_, fresh) = r.inbox.pop().unwrap();
    assert_ne!(fresh, answer);
    r.welcome(&fresh);
    r.say(&[status(0, 1, false)]);
    assert!(r.is_alive());
}

#[test]
fn a_syn_that_was_still_on_its_way_when_its_knock_was_let_in_costs_nothing() {
    // R-HS-18
    let mut r = Rogue::inside(EndpointConfig::default());
    let late = r.syn_again(2, None);
    r.throw(r.home, late.clone());
    assert!(r.inbox.is_empty());
    assert_eq!(r.server.counts(), (1, 0, 0));
    // Somebody who saw the id does not shut the door for others by it.
    r.throw(at("198.51.100.9:1000"), late);
    assert_eq!(r.inbox.len(), 1);
}

#[test]
fn a_packet_delivered_first_from_elsewhere_moves_the_path_and_the_true_place_wins() {
    // R-PATH-4: a hijacker faster than the network, who can copy but not open.
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(1_000_000, sleeps());
    p.keep_log = true;
    p.open_path(0, false);
    let hijacker = at("198.51.100.66:666");
    let mut copied = 0;
    for _ in 0..30 {
        p.run_for(MS.times(50));
        if p.log.len() > copied {
            // The newest packet is still on its way: the copy overtakes it.
            let (_, _, bytes) = p.log.last().unwrap().clone();
            copied = p.log.len();
            p.inject(true, hijacker, bytes);
        }
    }
    assert!(p.run_until(Span::from_secs(30), |p| p.is_whole(flow)));
    p.assert_right(flow);
    p.run_for(Span::from_secs(1));
    let server = p.server_session().unwrap();
    let stats = p.server.session(server).unwrap().path_stats();
    assert_eq!(stats[0].addresses.remote, p.wires[&0].address);
}

#[test]
fn a_hijacked_path_returns_when_the_true_place_answers_the_challenge() {
    // R-PATH-4
    let mut r = Rogue::inside(EndpointConfig::default());
    r.inbox.clear();
    let packet = r.packet(0, &[Frame::Ping]);
    let elsewhere = at("198.51.100.66:666");
    r.throw(elsewhere, packet);
    let place = |r: &mut Rogue| r.with_session(|s| s.path_stats()[0].addresses.remote);
    assert_eq!(
        place(&mut r),
        elsewhere,
        "the newest packet says where the peer is"
    );
    let home = r.home;
    r.inbox.retain(|(to, _)| *to == home);
    let asked = r.heard_frames(|f| match f {
        Frame::Chg { nonce } => Some(*nonce),
        _ => None,
    });
    assert_eq!(asked.len(), 1, "the old place is asked");
    // From anywhere else the answer is worth nothing.
    let wrong = r.packet_numbered(0, 0, &[Frame::Rsp { nonce: asked[0] }]);
    r.throw(elsewhere, wrong);
    assert_eq!(place(&mut r), elsewhere);
    let numbers = r.numbers[&0];
    let packet = r.packet_numbered(0, numbers, &[Frame::Rsp { nonce: asked[0] }]);
    r.throw(home, packet);
    assert_eq!(place(&mut r), home);
}

#[test]
fn a_true_place_wins_even_after_two_forged_moves() {
    // R-PATH-4: the last *proved* place is the one to ask, not the last one.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.inbox.clear();
    for place in ["198.51.100.66:666", "198.51.100.67:667"] {
        let packet = r.packet(0, &[Frame::Ping]);
        r.throw(at(place), packet);
    }
    let home = r.home;
    r.inbox.retain(|(to, _)| *to == home);
    let asked = r.heard_frames(|f| match f {
        Frame::Chg { nonce } => Some(*nonce),
        _ => None,
    });
    assert!(!asked.is_empty());
    for nonce in asked {
        let n = r.numbers[&0];
        r.numbers.insert(0, n + 1);
        // Below the largest seen, so that only the answer itself can bring the path home.
        let ahead = r.packet_numbered(0, n + 5, &[Frame::Ping]);
        r.throw(at("198.51.100.67:667"), ahead);
        let packet = r.packet_numbered(0, n, &[Frame::Rsp { nonce }]);
        r.throw(home, packet);
    }
    let place = r.with_session(|s| s.path_stats()[0].addresses.remote);
    assert_eq!(place, home);
}

/// What a server does with a packet of `len` bytes from elsewhere: whether it challenges the place at once.
fn is_challenged_at_once(r: &mut Rogue, place: &str, len: usize) -> bool {
    const PING: u8 = 1;
    r.inbox.clear();
    let number = r.numbers[&0];
    r.numbers.insert(0, number + 1);
    let mut text = vec![0; len - DATA_HEADER_BYTES - TAG_BYTES];
    text[0] = PING;
    let packet = r.packet_of(0, number, &text);
    r.throw(at(place), packet);
    r.inbox.retain(|(to, _)| *to == at(place));
    let got: usize = r.inbox.iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(got <= len, "{got} bytes for {len}");
    let asked = r.heard_frames(|f| matches!(f, Frame::Chg { .. }).then_some(()));
    !asked.is_empty()
}

#[test]
fn a_place_is_challenged_however_many_ranges_there_are_to_acknowledge() {
    // R-PATH-3: an ACK of 64 ranges alone takes more than 128 bytes.
    for len in [46, 60, 128, 1200] {
        let mut r = Rogue::inside(EndpointConfig::default());
        for n in 0..100 {
            let packet = r.packet_numbered(0, 10 + 2 * n, &[Frame::Ping]);
            r.throw(r.home, packet);
        }
        r.numbers.insert(0, 211);
        assert!(
            is_challenged_at_once(&mut r, "198.51.100.1:1", len),
            "by {len} bytes"
        );
    }
}

#[test]
fn a_place_is_challenged_though_the_window_is_full() {
    // R-PATH-4: what the old place does not acknowledge does not delay the challenge.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), vec![1; 500_000].into()).unwrap());
    assert!(is_challenged_at_once(&mut r, "198.51.100.1:1", 128));
}

#[test]
fn a_place_is_challenged_though_a_metered_path_has_spent_its_budget() {
    // R-GRANT-6
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[status(0, 2, true)]);
    for _ in 0..4_000 {
        r.say(&[Frame::Ping]);
    }
    r.inbox.clear();
    r.say(&[Frame::Ping]);
    r.say(&[Frame::Ping]);
    assert!(r.inbox.is_empty(), "the budget is spent");
    assert!(is_challenged_at_once(&mut r, "198.51.100.1:1", 128));
}

#[test]
fn after_a_rebinding_no_more_goes_to_the_new_place_than_came_from_there() {
    // R-PATH-2
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), vec![1; 500_000].into()).unwrap());
    r.inbox.clear();
    let victim = at("198.51.100.1:1");
    let packet = r.packet(0, &[Frame::Ping]);
    let thrown = packet.len();
    r.throw(victim, packet);
    r.wait(Span::from_secs(10));
    let got: usize = r
        .inbox
        .iter()
        .filter(|(to, _)| *to == victim)
        .map(|(_, b)| b.len())
        .sum();
    assert!(got <= thrown, "{got} bytes for {thrown}");
}

#[test]
fn a_confirmation_from_an_unproved_place_gets_no_more_than_it_sent() {
    // R-PATH-2: SYN from one address, first packet from another.
    let mut r = Rogue::with(EndpointConfig::default());
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    let (_, answer) = r.inbox.pop().unwrap();
    r.welcome(&answer);
    let victim = at("198.51.100.1:1");
    let packet = r.packet(0, &[status(0, 1, false), data(flow(0), 0, b"x")]);
    let thrown = packet.len();
    r.throw(victim, packet);
    r.with_session(|s| s.write(flow(0), vec![1; 500_000].into()).unwrap());
    r.wait(Span::from_secs(10));
    let got: usize = r.inbox.iter().map(|(_, b)| b.len()).sum();
    assert!(got <= thrown, "{got} bytes for {thrown}");
}

#[test]
fn forged_cookies_do_not_burn_the_devices_epochs() {
    // R-HS-13
    // A cookie is sealed with a key made of the server's public one: whoever knows that and sees
    // a SYN can make cookies without end.
    let mut p = Pair::new();
    p.keep_log = true;
    p.silence(0);
    p.wires.get_mut(&0).unwrap().up = true;
    p.server.set_admission(Admission::Nobody);
    p.open_path(0, false);
    let server = p.server.public_key();
    let jar = d2tp_seal::CookieSecrets::new(&server, [0; 32], [0; 32]);
    for n in 0..200u16 {
        let (_, _, syn) = p.log.last().unwrap().clone();
        let mac1 = d2tp_seal::SynMacs::mac1(&syn).unwrap();
        let mut bytes = vec![PacketKind::Cookie.first_byte()];
        bytes.extend(&syn[1..9]);
        bytes.extend([0; 12]);
        let from = at(&format!("192.0.2.1:{}", 1000 + n));
        bytes.extend(jar.seal_cookie(mac1, from, [0; 12]));
        p.inject(false, p.server_address, bytes);
    }
    assert!(p.log.len() <= 10, "{} SYNs in no time at all", p.log.len());
}

#[test]
fn a_syn_ack_relayed_from_elsewhere_does_not_lead_the_device_astray() {
    // R-HS-14
    let mut p = Pair::new();
    p.keep_log = true;
    let flow = p.request(10_000, sleeps());
    p.open_path(0, false);
    let (_, from, syn) = p.log.last().unwrap().clone();
    // The witness is faster than the network in both directions.
    let mut bytes = syn;
    let addresses = Addresses {
        link: LinkId(0),
        local: None,
        remote: from,
    };
    p.server.handle_datagram(
        p.now,
        IncomingDatagram {
            addresses,
            bytes: &mut bytes,
        },
    );
    let mut buf = vec![0; 65536];
    let t = p.server.poll_transmit(p.now, &mut buf).unwrap();
    p.inject(false, at("198.51.100.66:666"), buf[..t.len].to_vec());
    let stats = p.device.session(p.session).unwrap().path_stats();
    assert!(
        stats.iter().all(|s| s.addresses.remote == p.server_address),
        "{stats:?}"
    );
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
}

#[test]
fn nothing_in_clear_names_the_device_and_no_id_outlives_its_handshake() {
    // R-SEAL-2: a new handshake is new keys, new paths and new ids.
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(1_000_000, sleeps());
    p.keep_log = true;
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.cut(0);
    let asleep = p.log.len();
    let record = p.device.hibernate(p.now, p.session).unwrap();
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.attach(0, "192.0.2.200:4000");
    p.open_path(0, false);
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));

    let ids = |part: &[(u32, std::net::SocketAddr, Vec<u8>)]| {
        let ids = part.iter().map(|(_, _, bytes)| bytes[1..9].to_vec());
        ids.collect::<std::collections::BTreeSet<_>>()
    };
    let (before, after) = p.log.split_at(asleep);
    assert!(
        ids(before).len() >= 2 && ids(after).len() >= 2,
        "SYN and DATA each time"
    );
    assert!(ids(before).is_disjoint(&ids(after)));
    let key = crate::pair::device_key().public().0;
    let instance = 77u64.to_be_bytes();
    for (_, _, bytes) in &p.log {
        for name in [&key[..], &instance[..]] {
            assert!(!bytes.windows(name.len()).any(|part| part == name));
        }
    }
}
