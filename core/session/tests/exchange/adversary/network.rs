//! The network itself as the enemy: it loses and overtakes the very packet that matters.

use bytes::Bytes;
use d2tp_session::*;

use crate::adversary::rogue::MS;
use crate::pair::{Pair, config, device_key, server_key};

fn sleeps() -> FlowOptions {
    FlowOptions {
        hibernates: true,
        ..FlowOptions::default()
    }
}

/// Whatever is sent meanwhile vanishes.
fn losing(p: &mut Pair, link: u32, act: impl FnOnce(&mut Pair)) {
    p.wires.get_mut(&link).unwrap().lose_every = 1;
    act(p);
    p.wires.get_mut(&link).unwrap().lose_every = 0;
}

#[test]
fn claims_that_are_lost_on_the_way_are_not_given_up_by_the_one_that_ends_them() {
    // R-RESUME-5
    let mut p = Pair::new();
    p.open_path(0, false);
    let flows: Vec<FlowId> = (0..150).map(|_| p.request(4_000, sleeps())).collect();
    p.wires.get_mut(&0).unwrap().rate = 100_000;
    p.run_for(Span::from_secs(2));
    p.cut(0);
    let device = p.session;
    let record = p.device.hibernate(p.now, device).unwrap();
    p.session = p.device.restore(p.now, &record, 1000..2000).unwrap();
    for flow in &flows {
        let read = p
            .device
            .session(p.session)
            .and_then(|s| s.received(*flow))
            .map_or(0, |r| r.0);
        p.got.get_mut(flow).unwrap().truncate(read as usize);
    }
    p.attach(0, "192.0.2.50:4000");
    p.wires.get_mut(&0).unwrap().lose_every = 3;
    p.open_path(0, false);
    p.run_for(Span::from_secs(5));
    p.wires.get_mut(&0).unwrap().lose_every = 0;
    p.run_until(Span::from_secs(120), |p| {
        flows.iter().all(|f| p.ended.contains_key(f))
    });
    let lost: Vec<_> = flows
        .iter()
        .filter(|f| p.ended.get(f) != Some(&FlowEnd::Complete))
        .map(|f| p.ended.get(f))
        .collect();
    assert_eq!(lost.len(), 0, "{:?}", lost.first());
}

#[test]
fn who_follows_a_process_that_was_killed_has_room_for_as_many_flows_whatever_is_lost() {
    // R-RESUME-5
    for lose_every in [0, 2, 3] {
        let mut p = Pair::new();
        p.open_path(0, false);
        p.reading = false;
        let before: Vec<FlowId> = (0..250).map(|_| p.request(1_000_000, sleeps())).collect();
        p.run_for(Span::from_secs(2));
        p.silence(0);
        p.device = Endpoint::new(config(), device_key(), Admission::Nobody, [5; 32], [6; 32]);
        let server = server_key().public();
        p.session = p.device.connect(p.now, server, 77, 1000..2000);
        p.got.clear();
        p.ended.clear();
        p.reading = true;
        let flows: Vec<FlowId> = (0..250).map(|_| p.request(4_000, sleeps())).collect();
        p.attach(0, "192.0.2.50:4000");
        p.wires.get_mut(&0).unwrap().lose_every = lose_every;
        p.open_path(0, false);
        p.run_for(Span::from_secs(10));
        p.wires.get_mut(&0).unwrap().lose_every = 0;
        let over = |p: &Pair| flows.iter().all(|f| p.ended.contains_key(f));
        assert!(p.run_until(Span::from_secs(120), over), "{:?}", p.ended);
        for flow in &flows {
            assert_eq!(p.ended.get(flow), Some(&FlowEnd::Complete));
            p.assert_right(*flow);
        }
        let session = p.server_session().unwrap();
        let left = p.server.session(session).unwrap().flow_ids();
        assert!(!before.iter().any(|f| left.contains(f)), "{left:?}");
    }
}

#[test]
fn every_flow_of_a_server_that_lost_everything_is_refused_however_many() {
    // R-RESUME-2
    let mut p = Pair::new();
    p.open_path(0, false);
    let flows: Vec<FlowId> = (0..200).map(|_| p.request(2_000_000, sleeps())).collect();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.run_for(Span::from_secs(2));
    p.server = Endpoint::new(
        config(),
        crate::pair::server_key(),
        Admission::Anybody,
        [9; 32],
        [4; 32],
    );
    p.run_until(Span::from_secs(60), |p| {
        flows.iter().all(|f| p.ended.contains_key(f))
    });
    let hanging = flows.iter().filter(|f| !p.ended.contains_key(f)).count();
    assert_eq!(hanging, 0, "flows neither go on nor end");
}

/// A flow whose OPEN, with all that was written, is lost once.
fn request_that_is_lost(p: &mut Pair) -> FlowId {
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    let mut flow = None;
    losing(p, 0, |p| flow = Some(p.request(5_000, sleeps())));
    flow.unwrap()
}

#[test]
fn a_reset_that_overtakes_the_flows_opening_ends_the_flow_at_both_ends() {
    // R-FLOW-12
    let mut p = Pair::new();
    let flow = request_that_is_lost(&mut p);
    p.device
        .with(p.session, |s| {
            s.reset(flow, 5);
            s.stop(flow, 5);
        })
        .unwrap();
    p.pump();
    p.run_for(Span::from_secs(10));
    let device = p.device.session(p.session).unwrap().flow_ids();
    let server = p.server.session(p.server_session().unwrap()).unwrap();
    assert_eq!((device, server.flow_ids()), (vec![], vec![]));
}

#[test]
fn a_pause_that_overtakes_the_flows_opening_holds_the_flow() {
    // R-FLOW-12
    let mut p = Pair::new();
    let flow = request_that_is_lost(&mut p);
    let pause = |p: &mut Pair, paused| {
        let set = |s: &mut Session| s.pause(flow, paused, ReasonCode::UserPaused);
        p.device.with(p.session, set).unwrap();
        p.pump();
    };
    pause(&mut p, true);
    p.run_for(Span::from_secs(10));
    assert!(p.got[&flow].is_empty());
    pause(&mut p, false);
    assert!(p.run_until(Span::from_secs(10), |p| p.is_whole(flow)));
}

#[test]
fn a_grant_that_overtakes_the_flows_opening_counts() {
    // R-GRANT-5
    let mut p = Pair::new();
    p.open_path(0, true);
    p.run_for(Span::from_secs(1));
    let mut flow = None;
    losing(&mut p, 0, |p| flow = Some(p.request(5_000, sleeps())));
    let flow = flow.unwrap();
    let session = p.session;
    p.device
        .with(session, |s| s.grant(flow, LinkId(0), 100_000))
        .unwrap();
    p.pump();
    assert!(
        p.run_until(Span::from_secs(20), |p| p.is_whole(flow)),
        "{} of 5000 bytes",
        p.got[&flow].len()
    );
}

#[test]
fn a_flow_opened_after_a_crash_and_before_the_handshake_replaces_none_of_the_record() {
    // R-FLOW-5, R-FLOW-8
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    let old = p.request(1_000_000, sleeps());
    p.run_for(Span::from_secs(1));
    let record = p
        .device
        .session(p.session)
        .unwrap()
        .record(p.now, true)
        .encode();
    let kept = p.got[&old].len();
    p.device = Endpoint::new(
        config(),
        crate::pair::device_key(),
        Admission::Nobody,
        [8; 32],
        [2; 32],
    );
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.got.get_mut(&old).unwrap().truncate(kept);
    let session = p.session;
    let new = p
        .device
        .with(session, |s| {
            let id = s.open(sleeps()).unwrap();
            s.write(id, Bytes::from_static(&[0, 0, 0, 0, 0, 0, 4, 0]))
                .unwrap();
            s.finish(id).unwrap();
            id
        })
        .unwrap();
    assert_ne!(new, old);
    p.sources.insert(new, 1024);
    p.got.insert(new, vec![]);
    p.attach(0, "192.0.2.33:4000");
    p.open_path(0, false);
    assert!(
        p.run_until(Span::from_secs(60), |p| p.is_whole(old) && p.is_whole(new)),
        "{:?}",
        p.ended
    );
    p.assert_right(old);
    p.assert_right(new);
}

#[test]
fn payload_waits_until_a_metered_path_is_known_as_such_even_if_that_packet_is_lost() {
    // R-PATH-10
    let mut p = Pair::new();
    p.open_path(0, true);
    let flow = p.request(50_000, FlowOptions::default());
    for n in 2..6 {
        p.wires.get_mut(&0).unwrap().lose_every = n;
        p.run_for(MS.times(300));
    }
    p.wires.get_mut(&0).unwrap().lose_every = 0;
    p.run_for(Span::from_secs(10));
    assert_eq!(p.got[&flow].len(), 0, "nothing was granted");
}
