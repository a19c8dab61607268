//! What brought other transports down, tried on ours: see the tables of `docs/security.md`.

use bytes::Bytes;
use d2tp_session::*;
use d2tp_wire::{Frame, VARINT_MAX};

use crate::adversary::rogue::*;
use crate::pair::Pair;

fn bytes_heard(r: &mut Rogue) -> usize {
    r.inbox.drain(..).map(|(_, datagram)| datagram.len()).sum()
}

#[test]
fn a_flood_of_challenges_while_nothing_is_acknowledged_is_answered_in_bounds() {
    // R-PATH-3, and CVE-2023-49295: answers piled up while the victim's window stood still.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), vec![1; 200_000].into()).unwrap());
    r.inbox.clear();
    let mut answers = 0;
    for round in 0..500u32 {
        let nonces: Vec<[u8; 16]> = (0..60u8).map(|n| [n ^ round as u8; 16]).collect();
        let frames: Vec<Frame<'_>> = nonces.iter().map(|n| Frame::Chg { nonce: *n }).collect();
        r.say(&frames);
        answers += r
            .heard_frames(|f| matches!(f, Frame::Rsp { .. }).then_some(()))
            .len();
    }
    assert!(r.is_alive());
    assert!(answers <= 4 * 500, "{answers} answers to 500 packets");
    let held = r.with_session(|s| s.violated_limit(200_000));
    assert_eq!(held, None);
    // They left, or are forgotten: none is owed from before.
    r.wait(MS.times(10));
    r.open_inbox();
    r.wait(MS.times(2_000));
    let late = r.heard_frames(|f| matches!(f, Frame::Rsp { .. }).then_some(()));
    assert!(late.len() <= 4, "{} answers were kept", late.len());
}

#[test]
fn a_guessed_connection_id_with_other_keys_changes_nothing() {
    // R-SEAL-1: whoever has seen or guessed an id, and sends CLOSE and RESET under keys of his own.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    r.inbox.clear();
    let mut other = Rogue::with(EndpointConfig::default());
    other.instance = 9;
    other.secret = SecretKey::from_bytes([67; 32]);
    other.enter(1);
    other.theirs = r.theirs.clone();
    let elsewhere = at("198.51.100.66:6666");
    for number in 0..200 {
        let forged = other.packet_numbered(
            0,
            number,
            &[
                Frame::Reset {
                    flow: flow(0),
                    code: 1,
                    final_size: 1,
                },
                Frame::Close {
                    code: 0,
                    text: b"bye",
                },
            ],
        );
        r.throw(elsewhere, forged);
    }
    assert!(
        r.inbox.iter().all(|(to, _)| *to != elsewhere),
        "it hears nothing"
    );
    assert!(r.is_alive());
    r.inbox.clear();
    // The true owner's numbers were not used up, and its flow stands.
    r.say(&[data(flow(0), 1, b"y")]);
    r.with_session(|s| s.write(flow(0), Bytes::from_static(b"answer")).unwrap());
    let heard = r.heard_frames(|f| match f {
        Frame::Data { flow, .. } => Some(*flow),
        _ => None,
    });
    assert_eq!(heard, [flow(0)]);
    assert!(r.inbox.iter().all(|(to, _)| *to == r.home));
}

#[test]
fn a_guessed_flow_id_of_another_client_is_refused_and_its_owner_goes_on() {
    // R-RESUME-1: flows belong to a host key and an instance, and neither is enough.
    for (secret, instance) in [([67; 32], 5), ([66; 32], 6)] {
        let mut r = Rogue::inside(EndpointConfig::default());
        r.say(&[data(flow(0), 0, b"mine")]);
        r.with_session(|s| s.write(flow(0), Bytes::from_static(&[7; 3000])).unwrap());
        let owner = r.session().unwrap();
        r.secret = SecretKey::from_bytes(secret);
        r.instance = instance;
        r.inbox.clear();
        let syn = r.syn(2, None);
        r.throw(at("198.51.100.66:6666"), syn);
        let (_, answer) = r.inbox.pop().expect("an answer");
        r.welcome(&answer);
        r.inbox.clear();
        r.home = at("198.51.100.66:6666");
        r.say(&[Frame::Resume {
            flow: flow(0),
            received: 0,
            flags: 0,
        }]);
        let answers = r.heard_frames(|f| match f {
            Frame::Refused { flow, reason } => Some((*flow, Some(*reason))),
            Frame::Data { flow, .. } => Some((*flow, None)),
            _ => None,
        });
        assert_eq!(answers, [(flow(0), Some(ReasonCode::UnknownFlow))]);
        let theirs = r.server.session(owner).expect("the owner's session stands");
        assert_eq!(theirs.flow_ids(), [flow(0)]);
        assert_eq!(theirs.state(), SessionState::Established);
    }
}

#[test]
fn credit_that_shrinks_or_has_no_end_frees_and_takes_nothing() {
    // R-FLOW-3
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    for max in [VARINT_MAX, 0, 1, VARINT_MAX - 1] {
        r.say(&[
            Frame::FlowCredit { flow: flow(0), max },
            Frame::SessionCredit { max },
        ]);
        assert!(r.is_alive());
    }
    // Endless credit opens neither the writer's bound nor the congestion window.
    r.inbox.clear();
    let room = r.with_session(|s| s.write_room(flow(0)).unwrap());
    r.with_session(|s| s.write(flow(0), vec![1; room as usize].into()).unwrap());
    let heard = bytes_heard(&mut r) as u64;
    assert!(
        heard > 0 && heard < room,
        "{heard} bytes at once, of {room}"
    );
    let (left, broken) = r.with_session(|s| (s.write_room(flow(0)).unwrap(), s.violated_limit(1)));
    assert!(left <= heard, "room for {left} bytes more");
    assert_eq!(broken, None);
    assert!(r.is_alive());
}

#[test]
fn a_flood_of_tiny_frames_is_answered_by_less_than_it_brought() {
    // R-PATH-2's spirit for members: a hundred thousand frames of one byte, in packets of one and of
    // many, cost no answer but acknowledgements.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.inbox.clear();
    let (mut brought, mut heard) = (0, 0);
    let many = vec![Frame::Ping; 1_000];
    for n in 0..300 {
        let frames = if n % 3 == 0 { &many[..] } else { &many[..1] };
        let packet = r.packet(0, frames);
        brought += packet.len();
        r.throw(r.home, packet);
        heard += bytes_heard(&mut r);
    }
    assert!(heard <= brought, "{heard} bytes for {brought}");
    // The same as bytes of a flow, one a frame.
    let (mut brought, mut heard) = (0, 0);
    for n in 0..300u64 {
        let byte = [1];
        let frames: Vec<Frame<'_>> = (0..100)
            .map(|i| data(flow(1), 100 * n + i, &byte))
            .collect();
        let packet = r.packet(0, &frames);
        brought += packet.len();
        r.throw(r.home, packet);
        heard += bytes_heard(&mut r);
    }
    assert!(heard <= brought, "{heard} bytes for {brought}");
    assert!(r.is_alive());
    assert_eq!(r.with_session(|s| s.violated_limit(0)), None);
}

#[test]
fn probes_that_nobody_answers_and_acknowledgements_that_come_too_late_are_no_fault() {
    // CVE-2025-29785: recovery of a lost path probe panicked. Here the size and the addresses are
    // probed, nobody answers for an hour, and then everything is acknowledged at once.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    r.with_session(|s| s.write(flow(0), vec![1; 50_000].into()).unwrap());
    let packet = r.packet(1, &[status(1, 1, false)]);
    r.throw(at("198.51.100.9:9"), packet);
    for _ in 0..40 {
        r.wait(MS.times(1_500));
        if r.session().is_none() {
            return; // Silence ended it, in order.
        }
    }
    r.acknowledge();
    let (first, last) = match (r.arrived.first(), r.arrived.last()) {
        (Some(first), Some(last)) => (*first, *last),
        _ => panic!("the server never sent"),
    };
    assert!(first <= last);
    r.wait(MS.times(60_000));
    assert!(
        !matches!(r.verdict(), Some(SessionEnd::Fault(_))),
        "{:?}",
        r.verdict()
    );
}

#[test]
fn a_datagram_said_to_be_too_big_makes_none_smaller_than_the_least_and_stalls_nothing() {
    // CVE-2024-53259: forged "packet too big" messages shrank packets until nothing moved.
    let mut pair = Pair::new();
    pair.open_path(0, false);
    let flow = pair.request(400_000, FlowOptions::default());
    let mut sizes = [0, 1, 68, 576, 1199, 1200, 1201, 1472, 65_535, usize::MAX]
        .into_iter()
        .cycle();
    let done = pair.run_until(MS.times(120_000), |pair| pair.is_whole(flow));
    assert!(done, "without anybody's forgeries");
    let flow = pair.request(400_000, FlowOptions::default());
    let until = pair.now + MS.times(120_000);
    while !pair.is_whole(flow) {
        let size = sizes.next().unwrap();
        let now = pair.now;
        let at_server = pair.server_session().unwrap();
        let at_device = pair.session;
        for (end, id) in [(&mut pair.server, at_server), (&mut pair.device, at_device)] {
            end.with(id, |s| s.on_too_big(now, LinkId(0), size))
                .unwrap();
        }
        assert!(
            pair.step(until),
            "it stalls at {} bytes",
            pair.got[&flow].len()
        );
    }
    pair.assert_right(flow);
}

#[test]
fn the_last_epoch_there_is_bricks_nobody_but_the_instance_that_used_it() {
    // CVE-2021-46873: a clock far ahead made a key useless for ever. Epochs are counted for each
    // instance, so a host that used them up begins another one (R-HS-2).
    let mut r = Rogue::with(EndpointConfig::default());
    r.enter(u32::MAX);
    r.inbox.clear();
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    assert_eq!(r.server.counts().2, 0, "an epoch from before makes nothing");
    r.instance = 6;
    r.inbox.clear();
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    let (_, answer) = r
        .inbox
        .pop()
        .expect("the same key in another instance is welcome");
    r.welcome(&answer);
    r.say(&[status(0, 1, false)]);
    assert_eq!(r.server.counts().0, 2);
}
