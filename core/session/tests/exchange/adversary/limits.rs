//! What a peer may use up: memory, work, keys, windows, numbers. Every bound is met and holds.

use bytes::Bytes;
use d2tp_session::*;
use d2tp_wire::{Frame, FrameIter};

use crate::adversary::rogue::*;
use crate::pair::{Pair, config};

fn fault(rogue: &Rogue) -> PeerFault {
    match rogue.verdict() {
        Some(SessionEnd::Fault(fault)) => fault,
        other => panic!("the server ended it with {other:?}"),
    }
}

/// Has the server send until it left a number out, honestly acknowledging what arrives; returns
/// that number.
fn until_a_number_is_left_out(r: &mut Rogue) -> u64 {
    r.say(&[data(flow(0), 0, b"x")]);
    for _ in 0..200 {
        r.with_session(|s| s.write(flow(0), vec![1; 20_000].into()).unwrap());
        r.wait(MS.times(50));
        r.acknowledge();
        r.open_inbox();
        let (first, last) = (*r.arrived.first().unwrap(), *r.arrived.last().unwrap());
        let left_out = (first..last).find(|n| !r.arrived.contains(n));
        if let Some(n) = left_out.filter(|_| r.is_alive()) {
            return n;
        }
    }
    panic!("thousands of packets and every number used");
}

#[test]
fn a_receiver_that_acknowledges_what_did_not_arrive_is_found_out() {
    // R-ACK-4: here the sender left a number out; an optimist cannot know which.
    let mut r = Rogue::inside(EndpointConfig::default());
    let honest = until_a_number_is_left_out(&mut r);
    assert!(r.is_alive(), "an honest receiver is not blamed");
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    for _ in 0..200 {
        let Some(_) = r.session().filter(|_| r.is_alive()) else {
            break;
        };
        r.with_session(|s| s.write(flow(0), vec![1; 20_000].into()).unwrap());
        r.open_inbox();
        let reach = *r.arrived.last().unwrap();
        let packet = r.ack_packet(&[(0, reach)]);
        r.throw(r.home, packet);
        r.wait(MS.times(50));
    }
    let PeerFault::SkippedAck { number, .. } = fault(&r) else {
        panic!("{:?}", r.verdict());
    };
    assert!(number <= honest + 1000, "found out after {number} packets");
}

#[test]
fn numbers_left_out_cost_an_honest_download_nothing() {
    // R-ACK-4
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 2_000_000;
    p.open_path(0, false);
    let flow = p.request(6_000_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    p.assert_right(flow);
    let id = p.server_session().unwrap();
    let stats = p.server.session(id).unwrap().path_stats();
    assert_eq!((stats[0].lost, stats[0].spurious), (0, 0));
    // What the path carried beyond the content: headers, and not one byte twice.
    assert_eq!(p.device.session(p.session).unwrap().duplicate_bytes(), 0);
}

#[test]
fn forged_packets_wear_the_keys_out_and_the_device_comes_with_new_ones() {
    // R-SEAL-5
    let mut p = Pair::with(EndpointConfig {
        failed_openings_max: 50,
        ..config()
    });
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.keep_log = true;
    p.open_path(0, false);
    let flow = p.request(2_000_000, FlowOptions::default());
    p.run_for(Span::from_secs(1));
    let (_, from, packet) = p.log.last().unwrap().clone();
    assert_eq!(packet[0] >> 5, 2, "a DATA packet");
    for n in 0..60u8 {
        let mut forged = packet.clone();
        let end = forged.len() - 1;
        forged[end] ^= n | 1;
        p.inject(true, from, forged);
    }
    let id = p.server_session().unwrap();
    assert!(p.server.session(id).unwrap().path_stats().is_empty());
    assert!(
        p.run_until(Span::from_secs(60), |p| p.is_whole(flow)),
        "{:?} {:?}",
        p.got[&flow].len(),
        p.ended
    );
    p.assert_right(flow);
    assert!(p.device.session(p.session).unwrap().epoch() > 1);
}

#[test]
fn a_confirmation_that_comes_after_its_handshake_expired_makes_no_session() {
    // R-HS-17: no timer fires in between; the clock alone decides.
    let mut r = Rogue::with(EndpointConfig::default());
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    let (_, answer) = r.inbox.pop().unwrap();
    r.welcome(&answer);
    let confirming = r.packet(0, &[status(0, 1, false)]);
    r.now += Span::from_secs(11);
    r.throw(r.home, confirming);
    assert_eq!(r.server.counts(), (0, 0, 0));
}

#[test]
fn flow_ids_beyond_their_bits_are_bad_frames_and_not_other_flows() {
    // R-FLOW-10
    let mut r = Rogue::inside(EndpointConfig::default());
    let alias = FlowId(flow(0).0 | 1 << 57);
    assert_eq!(
        (alias.epoch(), alias.counter()),
        (1, 0),
        "it would be flow 0"
    );
    r.say(&[data(alias, 0, b"x")]);
    assert!(matches!(fault(&r), PeerFault::BadFrame(_)));
}

#[test]
fn events_that_nobody_takes_are_bounded_for_each_session() {
    // The driver sleeps; a peer changes a deadline a hundred thousand times.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"x")]);
    let mut seq = 0;
    for _ in 0..700 {
        let frames: Vec<Frame<'_>> = (0..150)
            .map(|_| {
                seq += 1;
                Frame::Deadline {
                    flow: flow(0),
                    seq,
                    remaining_ms: Some(1 << 20),
                }
            })
            .collect();
        let mut packet = r.packet(0, &frames);
        let addresses = Addresses {
            link: LinkId(0),
            local: None,
            remote: r.home,
        };
        let bytes = &mut packet[..];
        r.server
            .handle_datagram(r.now, IncomingDatagram { addresses, bytes });
    }
    let mut n = 0;
    while r.server.poll_event().is_some() {
        n += 1;
    }
    assert!((1_000..=EVENTS_MAX).contains(&n), "{n} events were kept");
    r.say(&[data(flow(1), 0, b"x")]);
    assert!(
        r.events.contains(&SessionEvent::Opened(flow(1))),
        "taken events make room"
    );
}

#[test]
fn claims_that_find_no_place_to_be_refused_are_not_acknowledged() {
    // R-RESUME-9
    let mut r = Rogue::inside(EndpointConfig::default());
    r.open_inbox();
    let claim = |n| Frame::Resume {
        flow: flow(n),
        received: 0,
        flags: 0,
    };
    let mut answered = Vec::new();
    let mut numbers = Vec::new();
    for n in 0..100 {
        numbers.push(r.numbers[&0]);
        r.say(&[claim(n)]);
    }
    r.wait(MS.times(100));
    let mut acked = std::collections::BTreeSet::new();
    for (_, _, text) in r.open_inbox() {
        for frame in FrameIter::new(&text) {
            match frame.unwrap() {
                Frame::Refused { flow, reason } => answered.push((flow, reason)),
                Frame::Ack { ranges, .. } => ranges
                    .iter()
                    .for_each(|(low, high)| acked.extend(low..=high)),
                _ => {}
            }
        }
    }
    let distinct: std::collections::BTreeSet<_> = answered.iter().map(|a| a.0).collect();
    assert_eq!(distinct.len(), REFUSALS_MAX);
    let taken = numbers.iter().filter(|n| acked.contains(n)).count();
    assert_eq!(taken, REFUSALS_MAX, "no more claims than answers");
    // Once the peer has those answers there is room for the others.
    r.acknowledge();
    r.say(&[claim(99)]);
    let more = r.heard_frames(|f| match f {
        Frame::Refused { flow, .. } => Some(*flow),
        _ => None,
    });
    assert!(more.contains(&flow(99)));
}

#[test]
fn a_refusal_that_is_lost_is_said_again_with_its_reason() {
    // R-RESUME-9: a claim below what was durable; the first answer vanishes.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[Frame::Open {
        flow: flow(0),
        flags: Frame::OPEN_DURABLE,
        priority: 0,
        size: None,
        deadline_ms: None,
    }]);
    r.with_session(|s| s.write(flow(0), vec![1; 5000].into()).unwrap());
    r.acknowledge();
    r.say(&[Frame::Durable {
        flow: flow(0),
        offset: 3000,
    }]);
    r.inbox.clear();
    r.enter(2);
    r.acknowledge();
    r.say(&[Frame::Resume {
        flow: flow(0),
        received: 0,
        flags: 0,
    }]);
    let reasons = |r: &mut Rogue| {
        let mut found = Vec::new();
        for (_, number, text) in r.open_inbox() {
            for frame in FrameIter::new(&text) {
                if let Ok(Frame::Refused { reason, .. }) = frame {
                    found.push((number, reason));
                }
            }
        }
        found
    };
    let first = reasons(&mut r);
    assert!(
        matches!(first[..], [(_, ReasonCode::RolledBack)]),
        "{first:?}"
    );
    // Everything after it arrives.
    r.say(&[data(flow(1), 0, b"x")]);
    r.with_session(|s| s.write(flow(1), vec![1; 9000].into()).unwrap());
    r.wait(MS.times(50));
    r.open_inbox();
    r.arrived.remove(&first[0].0);
    r.acknowledge();
    let again = reasons(&mut r);
    assert!(!again.is_empty());
    assert!(
        again.iter().all(|a| a.1 == ReasonCode::RolledBack),
        "{again:?}"
    );
}

#[test]
fn used_flow_ids_full_of_gaps_are_remembered_in_bounded_memory() {
    // R-FLOW-11, R-FLOW-5: every other id is opened and ended, far beyond the bound.
    let mut r = Rogue::inside(EndpointConfig::default());
    for n in 0..(SEEN_RANGES_AWAKE_MAX as u32 + 500) {
        let id = flow(2 * n);
        r.say(&[
            data(id, 0, b"x"),
            Frame::Reset {
                flow: id,
                code: 1,
                final_size: 1,
            },
            Frame::Stop { flow: id, code: 1 },
        ]);
        r.wait(MS.times(10));
        r.acknowledge();
    }
    assert!(r.is_alive(), "{:?}", r.verdict());
    let opened = |r: &Rogue, id| r.events.contains(&SessionEvent::Opened(id));
    // Used ids stay used; the lowest gaps count as used too; the highest are still free.
    let last = 2 * (SEEN_RANGES_AWAKE_MAX as u32 + 499);
    r.events.clear();
    for id in [flow(0), flow(1), flow(101), flow(last)] {
        r.say(&[data(id, 0, b"x")]);
        assert!(!opened(&r, id), "{id:?}");
    }
    r.say(&[data(flow(last - 1), 0, b"x")]);
    assert!(opened(&r, flow(last - 1)));
}

#[test]
fn a_session_with_bytes_that_nobody_could_give_again_does_not_sleep_as_a_record() {
    // R-SUSPEND-4
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[data(flow(0), 0, b"not read yet")]);
    let id = r.session().unwrap();
    assert_eq!(
        r.server.hibernate(r.now, id),
        Err(HibernateError::FlowNotReplayable(flow(0)))
    );
    r.with_session(|s| s.read(flow(0), 100).unwrap());
    r.with_session(|s| {
        s.write(flow(0), Bytes::from_static(b"not heard yet"))
            .unwrap()
    });
    assert_eq!(
        r.server.hibernate(r.now, id),
        Err(HibernateError::FlowNotReplayable(flow(0)))
    );
    r.acknowledge();
    assert!(r.server.hibernate(r.now, id).is_ok());
}

fn limit(seq: u64, bytes: u64) -> Frame<'static> {
    Frame::PathLimit {
        path: PathId(0),
        seq,
        bytes,
    }
}

#[test]
fn the_device_bounds_what_is_in_flight_and_no_lower_than_four_datagrams() {
    // R-PATH-12
    let mut r = Rogue::inside(EndpointConfig::default());
    let in_flight = |r: &mut Rogue| r.with_session(|s| s.path_stats()[0].in_flight);
    r.say(&[data(flow(0), 0, b"x"), limit(2, 8_000)]);
    r.with_session(|s| s.write(flow(0), vec![1; 300_000].into()).unwrap());
    r.wait(MS.times(100));
    let n = in_flight(&mut r);
    assert!((6_000..=8_000).contains(&n), "{n} bytes in flight");
    // An older one that comes late does not count; a lower one takes nothing back.
    r.say(&[limit(1, 1 << 30), limit(3, 0)]);
    r.wait(MS.times(20));
    assert!(in_flight(&mut r) <= 8_000);
    for _ in 0..20 {
        r.acknowledge();
        r.wait(MS.times(100));
        let n = in_flight(&mut r);
        let mtu = r.with_session(|s| s.path_stats()[0].mtu) as u64;
        assert!(n <= 4 * mtu, "{n} bytes in flight at a limit of nothing");
        assert!(n > 0, "and still it goes on");
    }
    r.say(&[limit(4, 1 << 30)]);
    r.acknowledge();
    r.wait(MS.times(100));
    assert!(in_flight(&mut r) > 8_000);
}

#[test]
fn a_limit_set_at_the_device_holds_at_the_server_even_if_its_packet_is_lost() {
    // R-PATH-12
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 1_000_000;
    p.open_path(0, false);
    let flow = p.request(2_000_000, FlowOptions::default());
    p.run_for(MS.times(300));
    let session = p.session;
    p.wires.get_mut(&0).unwrap().lose_every = 1;
    p.device
        .set_path_limit(session, LinkId(0), Some(10_000))
        .unwrap();
    p.pump();
    p.wires.get_mut(&0).unwrap().lose_every = 0;
    p.run_for(Span::from_secs(2));
    let server = p.server_session().unwrap();
    let stats = &p.server.session(server).unwrap().path_stats()[0];
    assert!(stats.in_flight <= 10_000, "{stats:?}");
    p.device.set_path_limit(session, LinkId(0), None).unwrap();
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
}

#[test]
fn an_end_of_claims_that_counts_more_than_were_made_ends_the_session() {
    // R-RESUME-10
    let mut r = Rogue::inside(EndpointConfig::default());
    let claim = Frame::Resume {
        flow: flow(3),
        received: 0,
        flags: 0,
    };
    r.say(&[claim, Frame::ResumeEnd { flows: 1 }]);
    assert!(r.is_alive());
    r.say(&[Frame::ResumeEnd { flows: 2 }]);
    assert_eq!(fault(&r), PeerFault::Claims { said: 2, heard: 1 });
}

#[test]
fn a_client_key_gets_its_share_of_sessions_and_others_get_theirs() {
    // R-QUOTA-1
    let mut r = Rogue::with(EndpointConfig {
        sessions_per_key_max: 3,
        ..EndpointConfig::default()
    });
    let knock = |r: &mut Rogue, instance| {
        r.instance = instance;
        let syn = r.syn(1, None);
        r.throw(r.home, syn);
        r.inbox.pop().expect("an answer").1
    };
    for instance in 0..3 {
        let answer = knock(&mut r, instance);
        r.welcome(&answer);
        if instance < 2 {
            r.say(&[status(0, 1, false)]);
        }
    }
    assert_eq!(r.server.counts(), (2, 0, 1), "one is half open and counts");
    knock(&mut r, 3);
    assert_eq!(r.server.counts(), (2, 0, 1));
    let id = r.session().unwrap();
    r.server.hibernate(r.now, id).unwrap();
    knock(&mut r, 4);
    assert_eq!(r.server.counts(), (1, 1, 1), "one asleep counts too");
    // Those that are in may wake, and another client is not concerned.
    knock(&mut r, 1);
    let halves = r.server.counts().2;
    r.secret = SecretKey::from_bytes([67; 32]);
    knock(&mut r, 9);
    assert_eq!(r.server.counts().2, halves + 1);
}

#[test]
fn flows_of_a_client_are_counted_over_all_its_sessions_and_refused_beyond_its_share() {
    // R-QUOTA-2
    let mut r = Rogue::inside(EndpointConfig {
        flows_per_key_max: 10,
        ..EndpointConfig::default()
    });
    for n in 0..6 {
        r.say(&[data(flow(n), 0, b"x")]);
    }
    let (keys, numbers) = (r.keys.take(), r.numbers.clone());
    let (theirs, heard) = (r.theirs.clone(), r.heard.clone());
    r.instance = 6;
    let own = r.own.clone();
    (0..5).for_each(|n| {
        r.own.insert(n, d2tp_wire::Cid([n as u8 + 50; 8]));
    });
    let syn = r.syn(1, None);
    r.inbox.clear();
    r.throw(r.home, syn);
    let (_, answer) = r.inbox.pop().unwrap();
    r.welcome(&answer);
    r.events.clear();
    for n in 0..6 {
        r.say(&[data(flow(n), 0, b"x")]);
    }
    let opened = |r: &Rogue| {
        let opened = |e: &&SessionEvent| matches!(e, SessionEvent::Opened(_));
        r.events.iter().filter(opened).count()
    };
    assert_eq!(opened(&r), 4, "six there and four here");
    let refused = r.heard_frames(|f| match f {
        Frame::Refused { flow, reason } => Some((*flow, *reason)),
        _ => None,
    });
    let over = ReasonCode::LimitReached;
    assert_eq!(refused[..2], [(flow(4), over), (flow(5), over)]);
    // The first session is as good as before, and as full.
    (r.keys, r.numbers, r.theirs, r.heard, r.own) = (keys, numbers, theirs, heard, own);
    r.say(&[data(flow(6), 0, b"x")]);
    assert_eq!((opened(&r), r.verdict()), (4, None));
    r.say(&[
        Frame::Reset {
            flow: flow(0),
            code: 1,
            final_size: 1,
        },
        Frame::Stop {
            flow: flow(0),
            code: 1,
        },
    ]);
    r.acknowledge();
    r.say(&[data(flow(7), 0, b"x")]);
    assert_eq!(opened(&r), 5, "what ends makes room");
}

#[test]
fn a_flow_that_is_refused_gives_its_credit_back_to_an_honest_device() {
    // R-QUOTA-2
    let mut p = Pair::with(EndpointConfig {
        flows_per_key_max: 1,
        session_window: 100_000,
        ..config()
    });
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    let hold = p.request(50_000_000, FlowOptions::default());
    p.reading = false;
    let session = p.session;
    for _ in 0..30 {
        let refused = p
            .device
            .with(session, |s| {
                let id = s.open(FlowOptions::default()).unwrap();
                s.write(id, vec![1; 9_000].into()).unwrap();
                id
            })
            .unwrap();
        p.pump();
        p.run_for(Span::from_secs(1));
        let over = FlowEnd::Refused(ReasonCode::LimitReached);
        assert_eq!(p.ended.get(&refused), Some(&over));
    }
    p.device
        .with(session, |s| {
            s.reset(hold, 1);
            s.stop(hold, 1);
        })
        .unwrap();
    p.pump();
    p.run_for(Span::from_secs(1));
    p.reading = true;
    let flow = p.request(200_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
}

#[test]
fn a_deadline_beyond_the_horizon_is_cut_and_told() {
    // R-QUOTA-3
    let mut r = Rogue::inside(EndpointConfig {
        deadline_max: Span::from_secs(3600),
        ..EndpointConfig::default()
    });
    let told = |r: &mut Rogue| {
        r.heard_frames(|f| match f {
            Frame::Deadline {
                seq, remaining_ms, ..
            } => Some((*seq, *remaining_ms)),
            _ => None,
        })
    };
    r.say(&[Frame::Open {
        flow: flow(0),
        flags: 0,
        priority: 0,
        size: None,
        deadline_ms: Some(1 << 60),
    }]);
    assert_eq!(told(&mut r), [(1, Some(3_600_000))]);
    r.say(&[Frame::Deadline {
        flow: flow(0),
        seq: 2,
        remaining_ms: Some(7_200_000),
    }]);
    assert!(told(&mut r).contains(&(3, Some(3_600_000))));
    r.wait(Span::from_secs(3601));
    let passed = SessionEvent::Ended {
        flow: flow(0),
        end: FlowEnd::DeadlinePassed,
    };
    assert!(r.events.contains(&passed));
}

#[test]
fn a_deadline_may_be_moved_no_further_than_the_device_is_allowed() {
    // R-QUOTA-3
    let mut r = Rogue::inside(EndpointConfig::default());
    let id = r.session().unwrap();
    r.say(&[Frame::Open {
        flow: flow(0),
        flags: 0,
        priority: 0,
        size: None,
        deadline_ms: Some(60_000),
    }]);
    let max = Span::from_secs(3600);
    r.server.with(id, |s| s.limit_moved_deadlines(max)).unwrap();
    for (seq, asked) in [(1, Some(7_200_000)), (3, Some(1_000))] {
        r.say(&[Frame::Deadline {
            flow: flow(0),
            seq,
            remaining_ms: asked,
        }]);
    }
    let told = r.heard_frames(|f| match f {
        Frame::Deadline {
            seq, remaining_ms, ..
        } => Some((*seq, *remaining_ms)),
        _ => None,
    });
    assert_eq!(
        told,
        [(2, Some(3_600_000))],
        "the nearer one stays as it is"
    );
    let left = r.server.with(id, |s| s.deadline(flow(0))).unwrap();
    assert_eq!(left, Some(r.now + Span::from_secs(1)));
}

#[test]
fn a_full_server_refuses_the_new_and_keeps_the_sleeping_waiting() {
    // R-QUOTA-4
    let mut r = Rogue::inside(EndpointConfig {
        sessions_max: 1,
        ..EndpointConfig::default()
    });
    let id = r.session().unwrap();
    r.server.hibernate(r.now, id).unwrap();
    let first = r.instance;
    r.instance = 6;
    r.enter(1);
    r.instance = first;
    let syn = r.syn(2, None);
    r.inbox.clear();
    r.throw(r.home, syn);
    assert!(r.inbox.is_empty(), "no refusal: that would end what sleeps");
    assert_eq!(r.server.counts(), (1, 1, 0));
    r.instance = 7;
    let syn = r.syn(1, None);
    r.throw(r.home, syn);
    assert_eq!(r.inbox.len(), 1, "refused, and told");
    assert_eq!(r.server.counts(), (1, 1, 0));
}

#[test]
fn a_metered_path_that_was_granted_nothing_costs_next_to_nothing_whoever_asks() {
    // R-GRANT-6: the peer asks for an answer a thousand times a second.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.say(&[status(0, 2, true)]);
    r.inbox.clear();
    for _ in 0..10_000 {
        r.say(&[Frame::Ping]);
        r.wait(MS);
    }
    let sent: usize = r.inbox.iter().map(|(_, b)| b.len()).sum();
    assert!(
        sent <= 32 * 1024 + 11 * 1_000,
        "{sent} bytes in ten seconds"
    );
    assert!(r.is_alive() && sent > 1_000);
    let stats = r.with_session(|s| s.path_stats()[0].clone());
    assert!(stats.control_out >= sent as u64 && stats.control_in >= 10_000 * 30);
}

#[test]
fn a_metered_path_that_was_granted_much_carries_it_at_full_speed() {
    // R-GRANT-6
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 1_000_000;
    p.wires.get_mut(&0).unwrap().lose_every = 50;
    p.open_path(0, true);
    p.run_for(Span::from_secs(1));
    let flow = p.request(5_000_000, FlowOptions::default());
    let session = p.session;
    p.device
        .with(session, |s| s.grant(flow, LinkId(0), 50_000_000))
        .unwrap();
    p.pump();
    assert!(
        p.run_until(Span::from_secs(20), |p| p.is_whole(flow)),
        "{} bytes",
        p.got[&flow].len()
    );
    let up = p.wires[&0].bytes_up;
    assert!(up <= 5_000_000 / 4, "{up} bytes of answers");
}

#[test]
fn a_reachable_flow_keeps_one_path_open_and_the_server_may_speak_at_any_time() {
    // R-ALIVE-1, R-SUSPEND-2
    let mut p = Pair::new();
    p.open_path(0, false);
    p.open_path(1, true);
    let session = p.session;
    let open = |p: &mut Pair, reachable| {
        let id = p.device.with(session, |s| {
            let id = s
                .open(FlowOptions {
                    reachable,
                    ..FlowOptions::default()
                })
                .unwrap();
            s.write(id, b"hello".as_slice().into()).unwrap();
            id
        });
        id.unwrap()
    };
    let flow = open(&mut p, true);
    p.run_for(Span::from_secs(10));
    let (first, second) = (p.wires[&0].bytes_up, p.wires[&1].bytes_up);
    p.run_for(Span::from_secs(600));
    let asked = p.wires[&0].bytes_up - first;
    assert!(asked >= 24 * 30, "{asked} bytes: it was not kept open");
    assert_eq!(p.wires[&1].bytes_up, second, "one path, the free one");
    let server = p.server_session().unwrap();
    assert_eq!(
        p.server.session(server).unwrap().state(),
        SessionState::Established
    );
    p.server
        .with(server, |s| s.write(flow, b"now".as_slice().into()).unwrap())
        .unwrap();
    let at = p.now;
    p.got.insert(flow, vec![]);
    p.pump();
    p.run_until(Span::from_secs(5), |p| p.got[&flow] == b"now");
    assert!(p.now.since(at) <= MS.times(50));
    // Without a network nothing is kept open.
    p.cut(0);
    p.cut(1);
    p.run_for(Span::from_secs(600));
    assert_eq!(p.wires[&0].packets_while_down, 0);
}

#[test]
fn flows_that_need_not_be_reachable_cost_nothing_while_they_are_idle() {
    // R-ALIVE-2
    let mut p = Pair::new();
    p.open_path(0, false);
    let session = p.session;
    p.device
        .with(session, |s| {
            let id = s.open(FlowOptions::default()).unwrap();
            s.write(id, b"hello".as_slice().into()).unwrap();
            s.pause(id, true, ReasonCode::UserPaused);
        })
        .unwrap();
    p.run_for(Span::from_secs(30));
    let (sent, count) = (p.wires[&0].bytes_up, p.wires[&0].count);
    p.run_for(Span::from_secs(1800));
    assert_eq!((p.wires[&0].bytes_up, p.wires[&0].count), (sent, count));
    p.device.with(session, |s| s.set_reachable(true)).unwrap();
    p.run_for(Span::from_secs(60));
    assert!(
        p.wires[&0].bytes_up > sent,
        "the session itself may ask for it"
    );
}

#[test]
fn a_device_without_epochs_says_so_and_goes_on_with_new_ones() {
    // R-HS-16
    let mut p = Pair::new();
    p.session = p
        .device
        .connect(p.now, crate::pair::server_key().public(), 5, 1..4);
    p.silence(0);
    p.open_path(0, false);
    p.run_for(Span::from_secs(60));
    let told = |e: &&(Time, SessionId, SessionEvent)| e.2 == SessionEvent::EpochsUsedUp;
    assert_eq!(p.device_events.iter().filter(told).count(), 1);
    // Two of them with their copies; nothing follows the last.
    assert_eq!(p.wires[&0].packets_while_down, 7);
    p.attach(0, "192.0.2.1:4000");
    let session = p.session;
    p.device.with(session, |s| s.add_epochs(10)).unwrap();
    p.run_for(Span::from_secs(5));
    assert_eq!(
        p.device.session(session).unwrap().state(),
        SessionState::Established
    );
    // The very last epoch is behind it: this instance can never knock again.
    p.session = p.device.connect(
        p.now,
        crate::pair::server_key().public(),
        6,
        u32::MAX..u32::MAX,
    );
    p.open_path(0, false);
    let end = SessionEvent::Closed(SessionEnd::EpochsExhausted);
    assert!(p.device_events.iter().any(|e| e.2 == end));
}

#[test]
fn an_answer_to_a_challenge_that_is_lost_is_given_again() {
    // R-PATH-13: whichever packets of the device vanish after its NAT moved it, the server soon
    // knows its new address.
    for lost in 2..12 {
        let mut p = Pair::new();
        p.wires.get_mut(&0).unwrap().rate = 400_000;
        p.open_path(0, false);
        p.request(5_000_000, FlowOptions::default());
        p.run_for(Span::from_secs(1));
        p.attach(0, "192.0.2.1:4001");
        p.wires.get_mut(&0).unwrap().lose_every = lost + 1;
        p.run_for(MS.times(500));
        p.wires.get_mut(&0).unwrap().lose_every = 0;
        p.run_for(MS.times(500));
        let server = p.server_session().unwrap();
        let stats = &p.server.session(server).unwrap().path_stats()[0];
        assert!(stats.proved, "every {lost}th packet lost: {stats:?}");
    }
}
