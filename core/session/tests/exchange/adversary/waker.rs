//! A device that wakes a session by claims in its SYN, and lies; or whose SYN somebody repeats.

use d2tp_session::*;
use d2tp_wire::{Frame, WireWriter};

use crate::adversary::rogue::*;

/// The claims of a SYN: flow, received, credit, flags.
fn claims(list: &[(FlowId, u64, u64, u8)]) -> Vec<u8> {
    let mut buf = vec![0; 2 + 25 * list.len()];
    let mut w = WireWriter::new(&mut buf);
    w.u8(list.len() as u8);
    w.u8(0);
    for (flow, received, credit, flags) in list {
        w.varint(flow.0);
        w.varint(*received);
        w.varint(*credit);
        w.u8(*flags);
    }
    let n = w.written();
    buf.truncate(n);
    buf
}

fn open(id: FlowId, flags: u8) -> Frame<'static> {
    Frame::Open {
        flow: id,
        flags,
        priority: 0,
        size: None,
        deadline_ms: None,
    }
}

/// A server that sent 1,000 bytes of flow 0, of which the device has 600 safe, and more of
/// flow 1, which is lost with its buffer when the session hibernates.
fn served() -> Rogue {
    let mut r = Rogue::inside(EndpointConfig::default());
    let hibernates = Frame::OPEN_HIBERNATES | Frame::OPEN_DURABLE;
    r.say(&[open(flow(0), hibernates), open(flow(1), 0)]);
    r.with_session(|s| {
        s.write(flow(0), vec![5; 1000].into()).unwrap();
        s.write(flow(1), vec![6; 1000].into()).unwrap();
    });
    r.wait(MS.times(50));
    r.acknowledge();
    r.say(&[Frame::Durable {
        flow: flow(0),
        offset: 600,
    }]);
    r.inbox.clear();
    r
}

/// A malicious endpoint that is hibernated, and its record.
fn sleeping() -> (Rogue, SessionRecord) {
    let mut r = served();
    let id = r.session().unwrap();
    let record = r.server.hibernate(r.now, id).unwrap();
    r.pump();
    r.events.clear();
    (r, SessionRecord::decode(&record).unwrap())
}

/// Sends a SYN with these claims and takes in the answer; what came behind it stays in the inbox.
fn knock(r: &mut Rogue, epoch: u32, list: &[(FlowId, u64, u64, u8)]) -> usize {
    r.claims = claims(list);
    r.inbox.clear();
    let syn = r.syn(epoch, None);
    r.throw(r.home, syn);
    let sent = r.inbox.iter().map(|(_, b)| b.len()).sum();
    let (_, answer) = r.inbox.remove(0);
    r.welcome(&answer);
    sent
}

fn asked(r: &Rogue) -> Vec<(FlowId, u64)> {
    let events = r.events.iter().filter_map(|e| match e {
        SessionEvent::SendFrom { flow, offset } => Some((*flow, *offset)),
        _ => None,
    });
    events.collect()
}

#[test]
fn a_syn_nobody_confirms_gets_as_much_as_it_brought_and_the_record_stands() {
    // R-RESUME-7, R-RESUME-8, R-PATH-2
    let (mut r, before) = sleeping();
    let mut sent = knock(&mut r, 2, &[(flow(0), 1000, 50_000, 0)]);
    r.inbox.clear();
    assert_eq!(asked(&r), [(flow(0), 1000)]);
    // The application gives more than can leave.
    let room = r.with_session(|s| s.write_room(flow(0)).unwrap());
    assert_eq!(room, RESTORED_BUFFER_BYTES);
    r.with_session(|s| s.write(flow(0), vec![7; 16_384].into()).unwrap());
    r.wait(MS.times(1000));
    sent += r.inbox.iter().map(|(_, b)| b.len()).sum::<usize>();
    assert!(sent > 1000 && sent <= 1200, "{sent}");
    // Whoever repeats the SYN hears its answer, no more, and moves nothing.
    let syn = r.syn(2, None);
    for n in 0..20 {
        r.inbox.clear();
        r.throw(at(&format!("198.51.100.9:{}", 1000 + n)), syn.clone());
        assert_eq!(r.inbox.len(), 1);
        assert!(r.inbox[0].1.len() < 300);
    }
    assert_eq!(r.server.counts(), (1, 1, 1));
    r.wait(Span::from_secs(20));
    assert_eq!(r.server.counts(), (0, 1, 0));
    assert_eq!(r.events.last(), Some(&SessionEvent::Asleep));
    // A handshake without claims finds everything as it was.
    r.claims.clear();
    r.enter(3);
    let now = r.now;
    let after = r.with_session(|s| s.record(now, false));
    assert_eq!(after.flows, before.flows);
}

#[test]
fn claims_change_nothing_of_a_session_that_lives() {
    // R-HS-12, R-RESUME-7
    let mut r = served();
    let keys = r.keys.take();
    let (theirs, numbers) = (r.theirs.clone(), r.numbers.clone());
    let now = r.now;
    let look = |r: &mut Rogue| {
        r.with_session(|s| {
            (
                s.record(now, false),
                s.path_stats(),
                s.state(),
                s.flow_ids(),
            )
        })
    };
    let before = look(&mut r);
    let heard = r.heard.clone();
    let sent = knock(&mut r, 2, &[(flow(0), 600, 50_000, 0), (flow(1), 0, 9, 0)]);
    assert!(sent <= 1200);
    assert_eq!(look(&mut r), before);
    assert_eq!(asked(&r), []);
    r.wait(MS.times(500));
    // The old keys are those in force, and the old numbers go on.
    (r.keys, r.theirs, r.numbers, r.heard) = (keys, theirs, numbers, heard);
    r.inbox.clear();
    r.say(&[data(flow(1), 0, b"as before")]);
    assert_eq!(r.with_session(|s| s.received(flow(1))), Some((0, None)));
    assert_eq!(r.with_session(|s| s.epoch()), 1);
    assert!(r.is_alive());
}

#[test]
fn a_flood_of_claims_thaws_one_session_and_leaves_it_asleep() {
    // R-HS-8, R-RESUME-8
    let (mut r, _) = sleeping();
    for epoch in 2..200 {
        r.claims = claims(&[(flow(0), 1000 + u64::from(epoch), 50_000, 0)]);
        let syn = r.syn(epoch, None);
        r.inbox.clear();
        r.throw(r.home, syn);
        let sent: usize = r.inbox.iter().map(|(_, b)| b.len()).sum();
        assert!(sent <= 1200);
        let (awake, asleep, half_open) = r.server.counts();
        assert!(awake == 1 && asleep == 1 && half_open <= HALF_OPEN_PER_INSTANCE);
    }
    r.wait(Span::from_secs(20));
    assert_eq!(r.server.counts(), (0, 1, 0));
}

#[test]
fn each_claim_of_a_syn_is_answered_singly_once_it_is_confirmed() {
    // R-RESUME-1, R-RESUME-2, R-RESUME-7
    let (mut r, _) = sleeping();
    let beyond = 1 << 40;
    knock(
        &mut r,
        2,
        &[
            (flow(99), 0, 1000, 0),
            (flow(0), 1000, 1000, 0),
            (flow(1), beyond, 1000, 0),
        ],
    );
    let resumed = |f: &Frame<'_>| match f {
        Frame::Resumed { flow, .. } => Some(*flow),
        _ => None,
    };
    let refused = |f: &Frame<'_>| match f {
        Frame::Refused { flow, reason } => Some((*flow, *reason)),
        _ => None,
    };
    let early = r.inbox.clone();
    assert_eq!(r.heard_frames(resumed), [flow(0)]);
    r.inbox = early;
    r.heard.clear();
    assert_eq!(r.heard_frames(refused), [], "bad news waits");
    r.say(&[status(0, 1, false)]);
    let late = r.inbox.clone();
    let heard = r.heard.clone();
    assert_eq!(r.heard_frames(resumed), [], "it was answered already");
    (r.inbox, r.heard) = (late, heard);
    assert_eq!(
        r.heard_frames(refused),
        [
            (flow(99), ReasonCode::UnknownFlow),
            (flow(1), ReasonCode::RolledBack)
        ]
    );
    assert!(r.is_alive());
    assert_eq!(r.with_session(|s| s.flow_ids()), [flow(0)]);
}

#[test]
fn a_claim_below_what_is_durable_is_refused_and_gets_no_byte() {
    // R-CRASH-1
    let (mut r, before) = sleeping();
    let below = before.flows[0].sent_to - 1;
    knock(&mut r, 2, &[(flow(0), below, 50_000, 0)]);
    assert_eq!(r.inbox.len(), 0, "nothing behind the SYN+ACK");
    assert_eq!(asked(&r), []);
    r.say(&[status(0, 1, false)]);
    let refused = r.heard_frames(|f| match f {
        Frame::Refused { flow, reason } => Some((*flow, *reason)),
        _ => None,
    });
    assert_eq!(refused, [(flow(0), ReasonCode::RolledBack)]);
}

#[test]
fn no_number_is_used_twice_whichever_path_confirms() {
    // R-SEAL-2, R-HS-12
    let (mut r, _) = sleeping();
    knock(&mut r, 2, &[(flow(0), 1000, 50_000, 0)]);
    r.with_session(|s| s.write(flow(0), vec![7; 5000].into()).unwrap());
    let mut seen = r.open_inbox();
    assert!(!seen.is_empty());
    let packet = r.packet(1, &[status(1, 1, false)]);
    r.throw(at("192.0.2.8:4000"), packet);
    r.wait(MS.times(2000));
    seen.extend(r.open_inbox());
    let packet = r.packet(0, &[status(0, 1, false)]);
    r.throw(r.home, packet);
    r.wait(MS.times(100));
    seen.extend(r.open_inbox());
    let mut numbers: Vec<(u32, u64)> = seen.iter().map(|(p, n, _)| (*p, *n)).collect();
    let all = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), all);
    assert!(numbers.iter().filter(|(p, _)| *p == 0).count() > 1);
    // What was said before the confirmation may be acknowledged after it.
    r.acknowledge();
    assert!(r.is_alive());
}

#[test]
fn a_record_full_of_flows_wakes_by_a_syn_that_carries_some() {
    // R-RESUME-6
    let (mut r, mut record) = sleeping();
    let one = record.flows[0].clone();
    record.flows = (0..65_536)
        .map(|n| FlowRecord {
            id: flow(n),
            ..one.clone()
        })
        .collect();
    r.server.adopt(&record.encode()).unwrap();
    let list: Vec<_> = (65_500..65_536).map(|n| (flow(n), 1000, 9, 0)).collect();
    let sent = knock(&mut r, 2, &list);
    assert!(sent <= 1200);
    assert_eq!(asked(&r).len(), list.len());
    r.say(&[status(0, 1, false)]);
    assert!(r.is_alive());
    assert_eq!(r.with_session(|s| s.flow_ids().len()), 65_536);
}

#[test]
fn a_syn_with_malformed_claims_is_dropped() {
    // R-HS-15
    let (mut r, _) = sleeping();
    let twice = claims(&[(flow(0), 0, 1, 0), (flow(0), 0, 1, 0)]);
    let flags = claims(&[(flow(0), 0, 1, 2)]);
    let high = claims(&[(flow(0), 1 << 61, 1 << 61, 0)]);
    for (epoch, bad) in [twice, flags, high, vec![65, 0], vec![1, 9]]
        .into_iter()
        .enumerate()
    {
        r.claims = bad;
        r.inbox.clear();
        let syn = r.syn(2 + epoch as u32, None);
        r.throw(r.home, syn);
        assert!(r.inbox.is_empty(), "{epoch}");
        assert_eq!(r.server.counts(), (0, 1, 0));
    }
}
