//! Closing and pausing where there is no network, or one that loses just that.

use d2tp_session::*;
use d2tp_wire::Frame;

use crate::adversary::rogue::*;
use crate::pair::{Pair, config};

fn sleeps() -> FlowOptions {
    FlowOptions {
        hibernates: true,
        ..FlowOptions::default()
    }
}

fn closed(events: &[(Time, SessionId, SessionEvent)]) -> Vec<SessionEnd> {
    let ends = events.iter().filter_map(|(_, _, e)| match e {
        SessionEvent::Closed(end) => Some(end.clone()),
        _ => None,
    });
    ends.collect()
}

/// A transfer under way and its device cut off; the server has noticed.
fn apart() -> (Pair, FlowId) {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.open_path(0, false);
    let flow = p.request(3_000_000, sleeps());
    p.run_for(Span::from_secs(1));
    p.cut(0);
    p.run_for(Span::from_secs(60));
    (p, flow)
}

fn close(p: &mut Pair) {
    let id = p.session;
    p.device.close(id, 7, "enough").unwrap();
    p.pump();
}

#[test]
fn a_close_without_a_network_is_told_on_the_next_one() {
    // R-CLOSE-3
    let (mut p, flow) = apart();
    close(&mut p);
    assert!(p.ended.contains_key(&flow), "the flows end at once");
    assert!(closed(&p.device_events).is_empty(), "the session waits");
    assert_eq!(p.server.counts().0, 1);
    p.run_for(Span::from_secs(1800));
    assert_eq!(p.wires[&0].packets_while_down, 0);
    p.attach(0, "192.0.2.9:4000");
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    assert_eq!(closed(&p.device_events), [SessionEnd::Local]);
    let told = closed(&p.server_events);
    assert!(
        matches!(told.as_slice(), [SessionEnd::Peer { code: 7, .. }]),
        "{told:?}"
    );
    assert_eq!((p.device.counts().0, p.server.counts()), (0, (0, 0, 0)));
}

#[test]
fn a_close_that_is_lost_is_said_again_until_it_is_heard() {
    // R-CLOSE-3, R-CLOSE-1
    let mut p = Pair::new();
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.wires.get_mut(&0).unwrap().lose_every = 1;
    close(&mut p);
    p.run_for(MS.times(300));
    p.wires.get_mut(&0).unwrap().lose_every = 3;
    p.run_for(Span::from_secs(8));
    assert_eq!(closed(&p.device_events), [SessionEnd::Local]);
    assert_eq!(p.server.counts().0, 0);
}

#[test]
fn a_close_whose_answer_is_lost_ends_when_the_server_no_longer_knows_the_session() {
    // R-CLOSE-3: CLOSE arrives, its acknowledgement does not; the next one hears UNKNOWN.
    let mut p = Pair::new();
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    close(&mut p);
    let ended = p.run_until(Span::from_secs(1), |p| p.server.counts().0 == 0);
    assert!(ended);
    // The answer is on its way; it vanishes.
    p.silence(0);
    p.wires.get_mut(&0).unwrap().up = true;
    assert!(closed(&p.device_events).is_empty());
    p.run_for(Span::from_secs(5));
    assert_eq!(closed(&p.device_events), [SessionEnd::Local]);
}

#[test]
fn a_close_that_nobody_hears_is_given_up_and_says_so() {
    // R-CLOSE-3, R-SUSPEND-1: without a network, after an hour; on a dead one, after a few tries.
    let (mut p, _) = apart();
    close(&mut p);
    p.run_for(Span::from_secs(2 * 3600));
    assert_eq!(closed(&p.device_events), [SessionEnd::LocalUnheard]);
    assert_eq!(p.device.counts().0, 0);
    let mut p = Pair::new();
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.wires.get_mut(&0).unwrap().lose_every = 1;
    let before = p.wires[&0].bytes_up + p.wires[&0].count;
    close(&mut p);
    p.run_for(Span::from_secs(60));
    assert_eq!(closed(&p.device_events), [SessionEnd::LocalUnheard]);
    assert!(p.wires[&0].count - before.min(p.wires[&0].count) <= 20);
}

#[test]
fn a_close_is_waited_for_as_long_as_a_flow_would_have_bound_the_server() {
    // R-CLOSE-3
    let mut p = Pair::new();
    p.open_path(0, false);
    let until = p.now + Span::from_secs(5 * 3600);
    p.request(
        3_000_000,
        FlowOptions {
            deadline: Some(until),
            ..sleeps()
        },
    );
    p.run_for(MS.times(30));
    p.cut(0);
    close(&mut p);
    p.run_for(Span::from_secs(4 * 3600));
    assert!(closed(&p.device_events).is_empty());
    p.run_for(Span::from_secs(2 * 3600));
    assert_eq!(closed(&p.device_events), [SessionEnd::LocalUnheard]);
}

#[test]
fn a_close_survives_as_a_record_and_is_told_by_the_next_process() {
    // R-CLOSE-3, R-CLOSE-4
    let (mut p, _) = apart();
    let server = p.server_session().unwrap();
    let now = p.now;
    p.server.hibernate(now, server).unwrap();
    close(&mut p);
    let record = p.device.hibernate(now, p.session).unwrap();
    assert!(SessionRecord::decode(&record).unwrap().closing.is_some());
    p.device = Endpoint::new(
        config(),
        crate::pair::device_key(),
        Admission::Nobody,
        [8; 32],
        [2; 32],
    );
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.attach(0, "192.0.2.9:4000");
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    assert_eq!(closed(&p.device_events), [SessionEnd::Local]);
    assert!(matches!(
        closed(&p.server_events)[..],
        [SessionEnd::Peer { code: 7, .. }]
    ));
    assert_eq!(p.server.counts(), (0, 0, 0));
}

#[test]
fn a_close_of_what_the_server_has_forgotten_makes_no_session_there() {
    // R-CLOSE-3
    let (mut p, _) = apart();
    close(&mut p);
    let record = p.device.hibernate(p.now, p.session).unwrap();
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.server = Endpoint::new(
        config(),
        crate::pair::server_key(),
        Admission::Anybody,
        [9; 32],
        [4; 32],
    );
    p.server_events.clear();
    p.attach(0, "192.0.2.9:4000");
    p.open_path(0, false);
    p.run_for(Span::from_secs(20));
    assert_eq!(closed(&p.device_events), [SessionEnd::Local]);
    assert_eq!((p.server.counts().0, p.server.counts().1), (0, 0));
    assert!(p.server_events.is_empty());
}

#[test]
fn a_reset_and_a_stop_that_were_never_heard_are_told_after_a_sleep_as_a_record() {
    // R-CLOSE-4
    let (mut p, flow) = apart();
    let session = p.session;
    p.device
        .with(session, |s| {
            s.reset(flow, 5);
            s.stop(flow, 6);
        })
        .unwrap();
    p.pump();
    let now = p.now;
    let record = p.device.hibernate(now, session).unwrap();
    let kept = &SessionRecord::decode(&record).unwrap().flows[0];
    assert_eq!(kept.stopped, Some(6));
    p.session = p.device.restore(now, &record, 500..600).unwrap();
    p.attach(0, "192.0.2.9:4000");
    p.open_path(0, false);
    p.run_for(Span::from_secs(3));
    let heard = p.server_events.iter().any(|(_, _, e)| {
        matches!(
            e,
            SessionEvent::Ended {
                end: FlowEnd::Reset(6),
                ..
            }
        )
    });
    assert!(heard, "{:?}", p.server_events);
    for (endpoint, id) in [
        (&p.device, p.session),
        (&p.server, p.server_session().unwrap()),
    ] {
        assert_eq!(endpoint.session(id).unwrap().flow_ids(), []);
    }
}

#[test]
fn a_server_that_closes_on_a_device_that_is_away_tells_it_when_it_comes_back() {
    // R-CLOSE-3, R-SUSPEND-2
    let (mut p, flow) = apart();
    let id = p.server_session().unwrap();
    p.server.close(id, 9, "bye").unwrap();
    p.run_for(Span::from_secs(600));
    assert_eq!(p.server.counts().0, 1, "only devices wake");
    p.attach(0, "192.0.2.9:4000");
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    assert!(matches!(
        closed(&p.device_events)[..],
        [SessionEnd::Peer { code: 9, .. }]
    ));
    assert!(p.ended.contains_key(&flow));
    assert_eq!(p.server.counts().0, 0);
}

#[test]
fn a_close_right_after_the_last_byte_acknowledges_it() {
    // R-CLOSE-5
    let mut p = Pair::new();
    p.open_path(0, false);
    let flow = p.request(1_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(1), |p| p.is_whole(flow)));
    let is_end = |(_, _, event): &(Time, SessionId, SessionEvent)| match event {
        SessionEvent::Ended { flow: of, end } => (*of == flow).then_some(*end),
        _ => None,
    };
    assert_eq!(
        p.server_events.iter().find_map(is_end),
        None,
        "the last acknowledgement waits for more to acknowledge"
    );
    close(&mut p);
    p.run_for(Span::from_secs(1));
    let ends: Vec<_> = p.server_events.iter().filter_map(is_end).collect();
    assert_eq!(ends, [FlowEnd::Complete]);
    assert!(matches!(
        closed(&p.server_events).as_slice(),
        [SessionEnd::Peer { code: 7, .. }]
    ));
}

#[test]
fn a_close_repeats_an_acknowledgement_that_was_lost() {
    // R-CLOSE-5
    let mut p = Pair::new();
    p.open_path(0, false);
    let flow = p.request(1_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(1), |p| p.is_whole(flow)));
    let sent = p.wires[&0].count;
    p.wires.get_mut(&0).unwrap().lose_every = 1;
    p.run_for(Span::from_millis(30));
    assert!(p.wires[&0].count > sent, "the acknowledgement was sent");
    p.wires.get_mut(&0).unwrap().lose_every = 0;
    close(&mut p);
    p.run_for(Span::from_secs(1));
    let is_end = |(_, _, event): &(Time, SessionId, SessionEvent)| match event {
        SessionEvent::Ended { flow: of, end } => (*of == flow).then_some(*end),
        _ => None,
    };
    let ends: Vec<_> = p.server_events.iter().filter_map(is_end).collect();
    assert_eq!(ends, [FlowEnd::Complete]);
}

#[test]
fn a_closed_session_takes_in_nothing_more() {
    // R-CLOSE-1: flows that arrive between CLOSE and its answer open nothing.
    let mut r = Rogue::inside(EndpointConfig::default());
    r.with_session(|s| s.close(1, "over"));
    r.events.clear();
    r.say(&[data(flow(0), 0, b"x")]);
    assert!(r.events.is_empty(), "{:?}", r.events);
    r.acknowledge();
    assert_eq!(r.events, [SessionEvent::Closed(SessionEnd::Local)]);
}

#[test]
fn a_server_that_is_told_to_pause_stops_at_once_and_goes_on_when_the_device_does() {
    // R-SUSPEND-3
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.open_path(0, false);
    let flow = p.request(3_000_000, sleeps());
    p.run_for(Span::from_secs(1));
    let (now, session) = (p.now, p.session);
    p.device
        .with(session, |s| s.suspend(now, ReasonCode::Sleeping))
        .unwrap();
    p.pump();
    assert_eq!(
        p.device.session(session).unwrap().state(),
        SessionState::Suspended
    );
    p.run_for(MS.times(15));
    let server = p.server_session().unwrap();
    assert_eq!(
        p.server.session(server).unwrap().state(),
        SessionState::Suspended
    );
    let sent = p.wires[&0].bytes_down;
    p.run_for(Span::from_secs(600));
    assert_eq!(p.wires[&0].bytes_down, sent, "not one byte more");
    let heard =
        |e: &(Time, SessionId, SessionEvent)| e.2 == SessionEvent::Suspended(ReasonCode::Sleeping);
    assert!(p.server_events.iter().any(heard));
    p.open_path(0, false);
    assert!(p.run_until(Span::from_secs(30), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn a_packet_from_before_a_pause_does_not_end_it() {
    // R-SUSPEND-3
    let mut r = Rogue::inside(EndpointConfig::default());
    let early = r.packet(0, &[data(flow(0), 0, b"x")]);
    r.say(&[Frame::Suspend {
        reason: ReasonCode::Sleeping,
    }]);
    assert!(!r.is_alive());
    r.throw(r.home, early);
    assert!(!r.is_alive());
    r.inbox.clear();
    r.with_session(|s| s.write(flow(0), vec![1; 5000].into()).unwrap());
    r.wait(Span::from_secs(60));
    assert!(
        r.inbox.is_empty(),
        "it sends to a device that asked for silence"
    );
    r.say(&[Frame::Ping]);
    assert!(r.is_alive() && !r.inbox.is_empty());
}
