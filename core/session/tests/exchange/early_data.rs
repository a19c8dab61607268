//! Flows opened inside the SYN: what they save, and what a copy of the SYN is not allowed to do.

use crate::pair::*;
use bytes::Bytes;
use d2tp_session::*;

const EARLY: FlowOptions = FlowOptions {
    priority: 0,
    size: None,
    deadline: None,
    durable: false,
    hibernates: true,
    reachable: false,
    early: true,
};

fn allowing() -> Pair {
    Pair::with(EndpointConfig {
        early_data: true,
        ..config()
    })
}

fn opened(p: &Pair) -> usize {
    let opened =
        |(_, _, e): &&(Time, SessionId, SessionEvent)| matches!(e, SessionEvent::Opened(_));
    p.server_events.iter().filter(opened).count()
}

fn closed_unconfirmed(p: &Pair) -> bool {
    let end = SessionEvent::Closed(SessionEnd::Unconfirmed);
    p.server_events.iter().any(|(_, _, e)| *e == end)
}

#[test]
fn a_request_in_the_syn_is_answered_in_one_round_trip() {
    // R-EARLY-1, R-EARLY-2, R-EARLY-3
    for (total, options, round_trips) in [
        (500, EARLY, 1),
        (
            500,
            FlowOptions {
                early: false,
                ..EARLY
            },
            2,
        ),
    ] {
        let mut p = allowing();
        let flow = p.request(total, options);
        let began = p.now;
        p.open_path(0, false);
        assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() == 500));
        let took = p.now.since(began);
        assert_eq!(took, MS.times(20 * round_trips), "early {}", options.early);
        assert!(
            p.run_until(Span::from_secs(5), |p| p.is_whole(flow)),
            "{:?}",
            p.ended
        );
        p.assert_right(flow);
        assert_eq!(opened(&p), 1, "the flow is one, however often it is opened");
        assert_eq!(p.server.counts(), (1, 0, 0));
    }
}

#[test]
fn several_flows_and_more_bytes_than_a_syn_holds_arrive_once() {
    // R-EARLY-3
    let mut p = allowing();
    let flows = [3_000, 0, 200_000].map(|total| p.request(total, EARLY));
    let long = p
        .device
        .with(p.session, |s| {
            let id = s.open(EARLY).unwrap();
            let bytes: Vec<u8> = (0..5_000).map(content).collect();
            s.write(id, bytes.into()).unwrap();
            s.finish(id).unwrap();
            id
        })
        .unwrap();
    p.open_path(0, false);
    let whole = |p: &Pair| flows.iter().all(|f| p.is_whole(*f));
    assert!(p.run_until(Span::from_secs(10), whole), "{:?}", p.ended);
    let server = p.server_session().unwrap();
    let mut got = Vec::new();
    let _ = p.server.with(server, |s| {
        while let Ok(ReadOutcome::Chunk(c)) = s.read(long, usize::MAX) {
            got.extend_from_slice(&c);
        }
    });
    assert_eq!(got, (0..5_000).map(content).collect::<Vec<u8>>());
}

#[test]
fn the_credit_of_a_session_that_began_with_early_data_is_whole() {
    // R-EARLY-3: what was read of the SYN counts once at both ends.
    let mut p = Pair::with(EndpointConfig {
        early_data: true,
        session_window: 100_000,
        flow_window: 100_000,
        ..config()
    });
    let flow = p
        .device
        .with(p.session, |s| {
            let id = s.open(EARLY).unwrap();
            s.write(id, Bytes::from(vec![7; 1_000_000])).unwrap();
            s.finish(id).unwrap();
            id
        })
        .unwrap();
    p.open_path(0, false);
    let mut got = 0;
    for _ in 0..200 {
        p.run_for(MS.times(50));
        let Some(server) = p.server_session() else {
            continue;
        };
        let _ = p.server.with(server, |s| {
            while let Ok(ReadOutcome::Chunk(c)) = s.read(flow, usize::MAX) {
                got += c.len();
            }
        });
        p.pump();
    }
    assert_eq!(got, 1_000_000);
}

#[test]
fn a_server_that_is_not_set_to_take_early_data_answers_after_the_handshake() {
    // R-EARLY-2
    let mut p = Pair::new();
    let flow = p.request(500, EARLY);
    p.open_path(0, false);
    p.run_for(MS.times(15));
    assert_eq!(
        p.server.counts(),
        (0, 0, 1),
        "no session before it is confirmed"
    );
    assert!(
        p.run_until(Span::from_secs(5), |p| p.is_whole(flow)),
        "{:?}",
        p.ended
    );
    assert_eq!(opened(&p), 1);
}

#[test]
fn nothing_is_said_early_on_a_metered_link_or_without_being_asked() {
    // R-EARLY-1
    for (gated, early) in [(true, true), (false, false)] {
        let mut p = allowing();
        p.keep_log = true;
        p.request(500, FlowOptions { early, ..EARLY });
        p.open_path(0, gated);
        p.run_for(MS.times(15));
        assert_eq!(p.server.counts(), (0, 0, 1));
        assert_eq!(opened(&p), 0);
    }
}

#[test]
fn early_data_nobody_confirms_ends_with_its_handshake_and_is_not_heard_again() {
    // R-EARLY-2
    let mut p = allowing();
    p.keep_log = true;
    p.request(500, EARLY);
    p.open_path(0, false);
    let (_, _, syn) = p.log[0].clone();
    // Somebody else has the SYN; the device and its answers are gone.
    p.silence(0);
    p.wires.get_mut(&0).unwrap().address = "192.0.2.99:1".parse().unwrap();
    p.inject(true, "192.0.2.66:6666".parse().unwrap(), syn.clone());
    assert_eq!(p.server.counts(), (1, 0, 1));
    assert_eq!(opened(&p), 1);
    let server = p.server_session().unwrap();
    assert!(p.server.session(server).unwrap().is_unconfirmed());
    assert_eq!(
        p.server.hibernate(p.now, server),
        Err(HibernateError::Unconfirmed),
        "nothing of it is written down"
    );
    p.run_for(Span::from_secs(12));
    assert!(closed_unconfirmed(&p), "{:?}", p.server_events);
    assert_eq!(p.server.counts(), (0, 0, 0));
    for _ in 0..5 {
        p.inject(true, "192.0.2.66:6666".parse().unwrap(), syn.clone());
        p.run_for(Span::from_secs(12));
    }
    assert_eq!(opened(&p), 1, "a copy of the SYN opens nothing");
}

#[test]
fn an_answer_to_a_place_that_is_not_proved_is_no_larger_than_the_syn() {
    // R-EARLY-2, R-PATH-2
    let mut p = allowing();
    p.keep_log = true;
    p.request(400_000, EARLY);
    p.open_path(0, false);
    let (_, _, syn) = p.log[0].clone();
    p.wires.get_mut(&0).unwrap().up = false;
    p.attach(1, "192.0.2.66:6666");
    p.inject(true, "192.0.2.66:6666".parse().unwrap(), syn.clone());
    p.run_for(Span::from_secs(9));
    let down = p.wires[&1].bytes_down;
    assert_eq!(opened(&p), 1);
    assert!(
        down > 0 && down <= syn.len() as u64,
        "{down} of {}",
        syn.len()
    );
}

#[test]
fn a_device_whose_answers_were_lost_goes_on_with_its_next_syn() {
    // R-EARLY-3
    let mut p = allowing();
    let flow = p.request(50_000, EARLY);
    p.open_path(0, false);
    p.run_for(MS.times(12));
    assert_eq!(opened(&p), 1);
    // The SYN+ACK and all that follows it are lost for a while.
    p.silence(0);
    p.run_for(MS.times(500));
    p.attach(0, "192.0.2.1:4000");
    assert!(
        p.run_until(Span::from_secs(5), |p| p.is_whole(flow)),
        "{:?}",
        p.ended
    );
    p.assert_right(flow);
    assert_eq!(opened(&p), 1);
}

#[test]
fn a_flow_that_is_reset_before_the_answer_ends_on_both_sides() {
    // R-EARLY-3, R-FLOW-4
    let mut p = allowing();
    let flow = p.request(50_000, EARLY);
    let other = p.request(300_000, EARLY);
    p.open_path(0, false);
    p.run_for(MS.times(12));
    p.device
        .with(p.session, |s| {
            s.reset(flow, 5);
            s.stop(flow, 5);
        })
        .unwrap();
    assert!(
        p.run_until(Span::from_secs(5), |p| p.is_whole(other)),
        "{:?}",
        p.ended
    );
    p.run_for(Span::from_secs(5));
    let server = p.server_session().unwrap();
    let left = p.server.session(server).unwrap().flow_ids();
    assert!(!left.contains(&flow), "{left:?}");
    let faults = |(_, _, e): &(Time, SessionId, SessionEvent)| {
        matches!(
            e,
            SessionEvent::Closed(SessionEnd::Fault(_) | SessionEnd::Peer { .. })
        )
    };
    assert!(!p.server_events.iter().chain(&p.device_events).any(faults));
}

#[test]
fn flows_of_unconfirmed_sessions_count_against_their_client() {
    // R-QUOTA-2
    let mut p = Pair::with(EndpointConfig {
        early_data: true,
        flows_per_key_max: 2,
        ..config()
    });
    let flows = [0; 3].map(|_| p.request(200_000, EARLY));
    p.open_path(0, false);
    p.run_for(Span::from_secs(5));
    let whole = flows.iter().filter(|f| p.is_whole(**f)).count();
    let refused = FlowEnd::Refused(ReasonCode::LimitReached);
    let refused = flows.iter().filter(|f| p.ended.get(*f) == Some(&refused));
    assert_eq!((whole, refused.count()), (2, 1), "{:?}", p.ended);
}

#[test]
fn a_flow_whose_syn_was_heard_may_end_before_anything_else_of_it_is_sent() {
    // Its last word names what the SYN said, at both ends, not the nothing that was sent since.
    let mut p = allowing();
    let deadline = p.now + MS.times(15);
    let flow = p.request(
        500,
        FlowOptions {
            deadline: Some(deadline),
            ..EARLY
        },
    );
    p.open_path(0, false);
    p.run_for(Span::from_secs(2));
    assert_eq!(opened(&p), 1, "the server heard it in the SYN");
    assert!(p.ended.contains_key(&flow), "{:?}", p.ended);
    let alive = p.request(500, EARLY);
    let whole = p.run_until(Span::from_secs(5), |p| p.is_whole(alive));
    assert!(whole, "{:?} {:?}", p.ended, p.device_events.last());
}

#[test]
fn early_data_of_a_device_that_is_not_admitted_is_ignored() {
    // R-HS-19
    let mut p = allowing();
    p.server.set_admission(Admission::Only(Default::default()));
    p.server.set_unadmitted_max(1);
    let flow = p.request(500, EARLY);
    let began = p.now;
    p.open_path(0, false);
    assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() == 500));
    assert_eq!(p.now.since(began), MS.times(40), "as without early data");
}
