//! What a peer may use up: memory, work, keys, windows, numbers. Every bound is met and holds.

use bytes::Bytes;
use d2tp_session::*;
use d2tp_wire::{Frame, FrameIter};

use crate::pair::{Pair, config};
use crate::rogue::*;

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
    let mut r = Rogue::inside(Config::default());
    let honest = until_a_number_is_left_out(&mut r);
    assert!(r.is_alive(), "an honest receiver is not blamed");
    let mut r = Rogue::inside(Config::default());
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
    let mut p = Pair::with(Config {
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
    // R-HS-15: no timer fires in between; the clock alone decides.
    let mut r = Rogue::with(Config::default());
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
    let mut r = Rogue::inside(Config::default());
    let alias = FlowId(flow(0).0 | 1 << 57);
    assert_eq!((alias.epoch(), alias.counter()), (1, 0), "it would be flow 0");
    r.say(&[data(alias, 0, b"x")]);
    assert!(matches!(fault(&r), PeerFault::BadFrame(_)));
}

#[test]
fn events_that_nobody_takes_are_bounded_for_each_session() {
    // The driver sleeps; a peer changes a deadline a hundred thousand times.
    let mut r = Rogue::inside(Config::default());
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
            .handle_datagram(r.now, Incoming { addresses, bytes });
    }
    let mut n = 0;
    while r.server.poll_event().is_some() {
        n += 1;
    }
    assert!((1_000..=EVENTS_MAX).contains(&n), "{n} events were kept");
    r.say(&[data(flow(1), 0, b"x")]);
    assert!(
        r.events.contains(&Event::Opened(flow(1))),
        "taken events make room"
    );
}

#[test]
fn claims_that_find_no_place_to_be_refused_are_not_acknowledged() {
    // R-RESUME-6
    let mut r = Rogue::inside(Config::default());
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
                Frame::Ack { ranges, .. } => {
                    ranges.iter().for_each(|(low, high)| acked.extend(low..=high))
                }
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
    // R-RESUME-6: a claim below what was durable; the first answer vanishes.
    let mut r = Rogue::inside(Config::default());
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
    r.open_inbox();
    r.say(&[Frame::Resume {
        flow: flow(0),
        received: 0,
        flags: 0,
    }]);
    let reasons = |r: &mut Rogue| {
        r.heard_frames(|f| match f {
            Frame::Refused { reason, .. } => Some(*reason),
            _ => None,
        })
    };
    assert_eq!(reasons(&mut r), [Reason::RolledBack]);
    r.wait(Span::from_secs(3));
    let again = reasons(&mut r);
    assert!(!again.is_empty());
    assert!(again.iter().all(|a| *a == Reason::RolledBack), "{again:?}");
}

#[test]
fn used_flow_ids_full_of_gaps_are_remembered_in_bounded_memory() {
    // R-FLOW-5, R-FLOW-11: every other id is opened and ended, far beyond the bound.
    let mut r = Rogue::inside(Config::default());
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
    let opened = |r: &Rogue, id| r.events.contains(&Event::Opened(id));
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
    let mut r = Rogue::inside(Config::default());
    r.say(&[data(flow(0), 0, b"not read yet")]);
    let id = r.session().unwrap();
    assert_eq!(
        r.server.hibernate(r.now, id),
        Err(HibernateError::Bound(flow(0)))
    );
    r.with_session(|s| s.read(flow(0), 100).unwrap());
    r.with_session(|s| s.write(flow(0), Bytes::from_static(b"not heard yet")).unwrap());
    assert_eq!(
        r.server.hibernate(r.now, id),
        Err(HibernateError::Bound(flow(0)))
    );
    r.acknowledge();
    assert!(r.server.hibernate(r.now, id).is_ok());
}
