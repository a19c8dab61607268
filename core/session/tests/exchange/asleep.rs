//! A server's sessions at rest: those whose records are elsewhere, those that lapse, those that are
//! only read out of their records.

use crate::pair::*;
use d2tp_session::*;

fn sleeps(deadline: Option<Time>) -> FlowOptions {
    FlowOptions {
        hibernates: true,
        deadline,
        ..FlowOptions::default()
    }
}

/// Hibernates both ends of a download. Returns the server's record.
fn asleep(p: &mut Pair, deadline: Option<Time>) -> (FlowId, Vec<u8>) {
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(600_000, sleeps(deadline));
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.cut(0);
    p.run_for(Span::from_secs(60));
    let server = p.server_session().unwrap();
    let kept = p.server.hibernate(p.now, server).unwrap();
    let session = p.session;
    let record = p.device.hibernate(p.now, session).unwrap();
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.attach(0, "192.0.2.200:4000");
    (flow, kept)
}

/// Runs a download whose device has no network for this span, and whose server hibernates it.
/// Returns the time from the link's return to the first new byte.
fn wakes_after(away: Span) -> Span {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    let flow = p.request(600_000, sleeps(None));
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.cut(0);
    p.run_for(away);
    let server = p.server_session().unwrap();
    p.server.hibernate(p.now, server).unwrap();
    p.attach(0, "192.0.2.200:4000");
    p.wires.get_mut(&0).unwrap().rate = 0;
    let (held, began) = (p.got[&flow].len(), p.now);
    p.open_path(0, false);
    assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() > held));
    let took = p.now.since(began);
    let whole = p.run_until(Span::from_secs(60), |p| p.is_whole(flow));
    assert!(whole, "{:?}", p.ended);
    p.assert_right(flow);
    took
}

#[test]
fn a_device_that_was_away_for_a_minute_claims_its_flows_before_it_is_told_to() {
    // R-RESUME-6
    let round_trip = MS.times(20);
    assert_eq!(wakes_after(Span::from_secs(120)), round_trip);
    // The first packet goes out under the old keys; the claims follow as soon as nobody knew them.
    assert_eq!(wakes_after(Span::from_secs(30)), round_trip.times(2));
}

#[test]
fn a_link_that_comes_while_a_device_claims_its_flows_is_one_more_door() {
    // R-RESUME-6: a path under keys that the server does not know would cost a round trip.
    let mut p = Pair::new();
    let flow = p.request(600_000, sleeps(None));
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.cut(0);
    p.run_for(Span::from_secs(30));
    let server = p.server_session().unwrap();
    p.server.hibernate(p.now, server).unwrap();
    p.attach(0, "192.0.2.200:4000");
    p.open_path(0, false);
    // Its UNKNOWN is there, the answer to its claims never comes.
    p.run_for(MS.times(25));
    p.silence(0);
    p.attach(1, "198.51.100.7:4000");
    let (held, began) = (p.got[&flow].len(), p.now);
    p.open_path(1, false);
    assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() > held));
    let round_trip = p.now.since(began);
    assert!(round_trip <= MS.times(60), "{round_trip:?}");
    let whole = p.run_until(Span::from_secs(60), |p| p.is_whole(flow));
    assert!(whole, "{:?}", p.ended);
    p.assert_right(flow);
}

fn another_server() -> Endpoint {
    Endpoint::new(config(), server_key(), Admission::Anybody, [9; 32], [4; 32])
}

#[test]
fn a_device_whose_record_is_elsewhere_is_answered_when_it_was_found() {
    let mut p = Pair::new();
    let (flow, record) = asleep(&mut p, None);
    p.server = another_server();
    p.server.set_records_elsewhere(true);
    p.open_path(0, false);
    p.run_for(Span::from_millis(300));
    // Nothing was said to it: a welcome that knows nothing of it would end its flow.
    assert_eq!(p.server.counts(), (0, 0, 0));
    let sought = p.server.poll_lookup().expect("it knocks");
    assert_eq!(sought.peer(), device_key().public());
    assert!(!p.server.has_session(sought.peer(), sought.instance()));
    assert!(p.server.poll_lookup().is_none(), "one knock, one question");
    let record = SessionRecord::decode(&record).unwrap();
    p.server.adopt_at(p.now, &record).unwrap();
    p.server.finish_lookup(p.now, sought);
    p.pump();
    assert!(
        p.run_until(Span::from_secs(60), |p| p.is_whole(flow)),
        "{:?}",
        p.ended
    );
    p.assert_right(flow);
}

#[test]
fn a_device_that_has_no_record_anywhere_is_new() {
    let mut p = Pair::new();
    p.server.set_records_elsewhere(true);
    let flow = p.request(10_000, sleeps(None));
    p.open_path(0, false);
    p.run_for(Span::from_millis(300));
    let sought = p.server.poll_lookup().expect("it knocks");
    p.server.finish_lookup(p.now, sought);
    p.pump();
    assert!(
        p.run_until(Span::from_secs(60), |p| p.is_whole(flow)),
        "{:?}",
        p.ended
    );
}

#[test]
fn who_is_not_admitted_is_not_sought() {
    // R-HS-11
    let mut p = Pair::new();
    p.server.set_admission(Admission::Only(Default::default()));
    p.server.set_records_elsewhere(true);
    p.open_path(0, false);
    p.run_for(Span::from_secs(2));
    assert!(p.server.poll_lookup().is_none());
    let refused = SessionEnd::Refused(ReasonCode::NotAllowed);
    assert!(
        p.device_events
            .iter()
            .any(|(_, _, e)| *e == SessionEvent::Closed(refused.clone()))
    );
}

#[test]
fn what_lapsed_asleep_is_not_booked_for_its_client_any_more() {
    // R-QUOTA-2, R-DEADLINE-3
    let mut p = Pair::with(EndpointConfig {
        flows_per_key_max: 2,
        ..config()
    });
    let deadline = p.now + Span::from_secs(300);
    asleep(&mut p, Some(deadline));
    p.run_for(Span::from_secs(400));
    let lapsed: Vec<HibernatedExpiry> = std::iter::from_fn(|| p.server.poll_expired()).collect();
    assert_eq!(lapsed.iter().filter(|l| l.flow.is_some()).count(), 1);
    // With the lapsed one counted, the second of these would be one too many.
    let flows = [p.request(10, sleeps(None)), p.request(10, sleeps(None))];
    p.open_path(0, false);
    let whole = |p: &Pair| flows.iter().all(|f| p.is_whole(*f));
    assert!(p.run_until(Span::from_secs(60), whole), "{:?}", p.ended);
}

#[test]
fn a_client_whose_sessions_all_sleep_has_its_flows_counted_when_one_wakes() {
    // R-QUOTA-2
    let mut p = Pair::with(EndpointConfig {
        flows_per_key_max: 2,
        ..config()
    });
    // Another instance of the same client sleeps with a flow of its own.
    let (_, record) = asleep(&mut p, None);
    let mut other = SessionRecord::decode(&record).unwrap();
    other.instance += 1;
    p.server.adopt_at(p.now, &other).unwrap();
    assert_eq!(p.server.counts().1, 2);
    let one_too_many = p.request(10, sleeps(None));
    p.open_path(0, false);
    p.run_for(Span::from_secs(20));
    assert!(p.ended.contains_key(&one_too_many), "{:?}", p.ended);
}

#[test]
fn a_session_read_out_of_its_record_that_is_closed_takes_its_record_with_it() {
    // R-RESUME-8, R-CLOSE-3
    let mut p = Pair::new();
    let (flow, _) = asleep(&mut p, None);
    p.open_path(0, false);
    // The device claims in its SYN; the server reads the session and answers; then the network is
    // gone before the device's first packet.
    let read = |p: &Pair| !p.server.ids().is_empty();
    assert!(p.run_until(Span::from_secs(1), read), "read for the claim");
    let thawed = p.server.ids()[0];
    assert!(p.server.session(thawed).unwrap().is_tentative());
    p.silence(0);
    p.server.close(thawed, 0, "the proxy is stopping").unwrap();
    p.run_for(Span::from_secs(3 * 3600));
    assert_eq!(
        p.server.counts(),
        (0, 0, 0),
        "neither session nor record is left"
    );
    let lapsed: Vec<HibernatedExpiry> = std::iter::from_fn(|| p.server.poll_expired()).collect();
    assert!(lapsed.iter().any(|l| l.flow == Some(flow)), "{lapsed:?}");
    assert!(lapsed.iter().any(|l| l.flow.is_none()), "{lapsed:?}");
}

#[test]
fn a_client_that_is_ended_loses_what_is_awake_asleep_and_half_open() {
    // R-HS-11
    let mut p = Pair::new();
    let (flow, _) = asleep(&mut p, None);
    let client = p.device.public_key();
    p.server.set_admission(Admission::Only(Default::default()));
    p.server.end_client(p.now, client, 7, "no longer");
    let lapsed: Vec<_> = std::iter::from_fn(|| p.server.poll_expired()).collect();
    assert!(
        lapsed.iter().any(|lapse| lapse.flow == Some(flow)),
        "{lapsed:?}"
    );
    assert_eq!(p.server.counts(), (0, 0, 0));
    p.open_path(0, false);
    p.run_for(Span::from_secs(5));
    let refused = SessionEnd::Refused(ReasonCode::NotAllowed);
    let heard = |p: &Pair, end: &SessionEnd| {
        let closed = SessionEvent::Closed(end.clone());
        p.device_events.iter().any(|(_, _, event)| *event == closed)
    };
    assert!(heard(&p, &refused), "{:?}", p.device_events);

    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 500_000;
    p.request(6_000_000, sleeps(None));
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    let client = p.device.public_key();
    p.server.set_admission(Admission::Only(Default::default()));
    p.server.end_client(p.now, client, 7, "no longer");
    p.pump();
    p.run_for(Span::from_secs(1));
    let told = SessionEnd::Peer {
        code: 7,
        text: "no longer".into(),
    };
    assert!(heard(&p, &told));
}

/// A server that shares its records, and a device that sleeps with half a download.
fn sleeping_at_shared_servers() -> (Pair, FlowId, SessionRecord) {
    let mut p = Pair::new();
    let (flow, record) = asleep(&mut p, None);
    p.server = another_server();
    p.server.set_records_shared(true);
    let record = SessionRecord::decode(&record).unwrap();
    (p, flow, record)
}

/// Runs until a lookup is asked for.
fn lookup(p: &mut Pair) -> PendingLookup {
    let steps = (0..6_000).find_map(|_| {
        let sought = p.server.poll_lookup();
        if sought.is_none() {
            p.run_for(MS.times(10));
        }
        sought
    });
    steps.expect("the device sends a SYN")
}

/// Runs until an ownership is asked for.
fn ownership(p: &mut Pair) -> OwnershipRequest {
    let steps = (0..6_000).find_map(|_| {
        let asked = p.server.poll_ownership();
        if asked.is_none() {
            p.run_for(MS.times(10));
        }
        asked
    });
    steps.expect("the device sends its first packet")
}

#[test]
fn a_session_wakes_only_when_its_server_owns_it() {
    // R-HS-20
    let (mut p, flow, record) = sleeping_at_shared_servers();
    p.open_path(0, false);
    let sought = lookup(&mut p);
    p.server.adopt_at(p.now, &record).unwrap();
    p.server.finish_lookup(p.now, sought);
    p.pump();
    let request = ownership(&mut p);
    assert_eq!(request.peer, device_key().public());
    assert!(request.epoch > record.epoch);
    p.run_for(MS.times(200));
    assert!(
        p.server.poll_ownership().is_none(),
        "its packets wait together"
    );
    let awake = p.server.awake_session(request.peer, request.instance);
    assert!(p.server.session(awake.unwrap()).unwrap().is_tentative());
    p.server
        .finish_ownership(p.now, request, OwnershipAnswer::Owned);
    p.pump();
    let whole = p.run_until(Span::from_secs(60), |p| p.is_whole(flow));
    assert!(whole, "{:?}", p.ended);
    p.assert_right(flow);
}

#[test]
fn a_device_whose_session_another_server_owns_begins_again() {
    // R-HS-20
    let (mut p, flow, record) = sleeping_at_shared_servers();
    p.open_path(0, false);
    let sought = lookup(&mut p);
    p.server.adopt_at(p.now, &record).unwrap();
    p.server.finish_lookup(p.now, sought);
    p.pump();
    let lost = ownership(&mut p);
    p.server.forget_session(lost.peer, lost.instance);
    p.server
        .finish_ownership(p.now, lost, OwnershipAnswer::Lost);
    assert_eq!(p.server.counts(), (0, 0, 0), "nothing is left of it");
    p.pump();
    let sought = lookup(&mut p);
    p.server.adopt_at(p.now, &record).unwrap();
    p.server.finish_lookup(p.now, sought);
    p.pump();
    let owned = ownership(&mut p);
    assert!(owned.epoch > lost.epoch);
    p.server
        .finish_ownership(p.now, owned, OwnershipAnswer::Owned);
    p.pump();
    let whole = p.run_until(Span::from_secs(60), |p| p.is_whole(flow));
    assert!(whole, "{:?}", p.ended);
    p.assert_right(flow);
}

#[test]
fn a_device_that_is_told_later_waits_and_keeps_its_flows() {
    // R-HS-21
    let (mut p, flow, record) = sleeping_at_shared_servers();
    p.open_path(0, false);
    for _ in 0..5 {
        let sought = lookup(&mut p);
        p.server.defer_lookup(sought);
        p.pump();
    }
    assert!(p.ended.is_empty(), "{:?}", p.ended);
    let sought = lookup(&mut p);
    p.server.adopt_at(p.now, &record).unwrap();
    p.server.finish_lookup(p.now, sought);
    p.pump();
    // Nobody knows who owns it: its packets are repeated, and each asks again.
    for _ in 0..2 {
        let request = ownership(&mut p);
        p.server
            .finish_ownership(p.now, request, OwnershipAnswer::Unknown);
    }
    let request = ownership(&mut p);
    p.server
        .finish_ownership(p.now, request, OwnershipAnswer::Owned);
    p.pump();
    let whole = p.run_until(Span::from_secs(60), |p| p.is_whole(flow));
    assert!(whole, "{:?}", p.ended);
    p.assert_right(flow);
}

#[test]
fn a_server_that_shares_its_records_ends_no_flows_of_a_device_that_another_one_admits() {
    // R-HS-11
    let (mut p, flow, record) = sleeping_at_shared_servers();
    p.server.set_admission(Admission::Only(Default::default()));
    p.open_path(0, false);
    p.run_for(Span::from_secs(20));
    assert!(p.ended.is_empty(), "{:?}", p.ended);
    // Its packets reach a server that admits it.
    p.server.set_admission(Admission::Anybody);
    let sought = lookup(&mut p);
    p.server.adopt_at(p.now, &record).unwrap();
    p.server.finish_lookup(p.now, sought);
    p.pump();
    let request = ownership(&mut p);
    p.server
        .finish_ownership(p.now, request, OwnershipAnswer::Owned);
    let whole = p.run_until(Span::from_secs(60), |p| p.is_whole(flow));
    assert!(whole, "{:?}", p.ended);
    p.assert_right(flow);
}

#[test]
fn a_copied_syn_moves_no_session_to_another_server() {
    // R-HS-12, R-HS-20
    let (mut p, _, record) = sleeping_at_shared_servers();
    p.open_path(0, false);
    let sought = lookup(&mut p);
    p.silence(0);
    p.server.adopt_at(p.now, &record).unwrap();
    p.server.finish_lookup(p.now, sought);
    p.run_for(Span::from_secs(5));
    assert!(p.server.poll_ownership().is_none());
}

/// A flow whose device reset its direction, as both ends know, and lost its network then.
fn half_reset() -> (Pair, FlowId) {
    let mut p = Pair::new();
    p.open_path(0, false);
    let session = p.session;
    let open = |s: &mut Session| {
        let flow = s.open(sleeps(None)).unwrap();
        s.write(flow, vec![1; 100].into()).unwrap();
        flow
    };
    let flow = p.device.with(session, open).unwrap();
    p.pump();
    p.run_for(Span::from_secs(1));
    p.device.with(session, |s| s.reset(flow, 7)).unwrap();
    p.pump();
    p.run_for(Span::from_secs(1));
    assert_eq!(read_at_server(&mut p, flow), Err(FlowError::Reset(7)));
    p.cut(0);
    p.run_for(Span::from_secs(60));
    (p, flow)
}

fn read_at_server(p: &mut Pair, flow: FlowId) -> Result<ReadOutcome, FlowError> {
    let server = p.server_session().unwrap();
    p.server.with(server, |s| s.read(flow, 1_000)).unwrap()
}

#[test]
fn a_direction_that_was_reset_stays_so_whichever_end_sleeps() {
    // R-CLOSE-4
    for (device_sleeps, server_sleeps) in [(true, true), (true, false), (false, true)] {
        let (mut p, flow) = half_reset();
        if server_sleeps {
            let server = p.server_session().unwrap();
            p.server.hibernate(p.now, server).unwrap();
        }
        if device_sleeps {
            let record = p.device.hibernate(p.now, p.session).unwrap();
            p.session = p.device.restore(p.now, &record, 500..600).unwrap();
        }
        let session = p.session;
        let room = p.device.with(session, |s| s.write_room(flow)).unwrap();
        assert_eq!(room, Err(FlowError::Stopped(7)), "before it is awake");
        p.attach(0, "192.0.2.200:4000");
        p.open_path(0, false);
        p.run_for(Span::from_secs(5));
        let read = read_at_server(&mut p, flow);
        assert_eq!(
            read,
            Err(FlowError::Reset(7)),
            "device asleep: {device_sleeps}"
        );
        // The other direction goes on.
        let server = p.server_session().unwrap();
        let write = |s: &mut Session| s.write(flow, vec![2; 100].into());
        p.server.with(server, write).unwrap().unwrap();
        p.pump();
        p.run_for(Span::from_secs(1));
        let read = p.device.with(session, |s| s.read(flow, 1_000)).unwrap();
        assert_eq!(read, Ok(ReadOutcome::Chunk(vec![2; 100].into())));
    }
}

#[test]
fn a_record_that_does_not_say_that_a_direction_was_reset_is_read() {
    // As older programs wrote it once the RESET was acknowledged.
    let (mut p, flow) = half_reset();
    let record = p.device.hibernate(p.now, p.session).unwrap();
    let mut record = SessionRecord::decode(&record).unwrap();
    assert_eq!(record.flows[0].reset.take(), Some(7));
    p.session = p.device.restore(p.now, &record.encode(), 500..600).unwrap();
    p.attach(0, "192.0.2.200:4000");
    p.open_path(0, false);
    p.run_for(Span::from_secs(5));
    assert!(p.ended.is_empty(), "{:?}", p.ended);
    let server = p.server_session().unwrap();
    let write = |s: &mut Session| s.write(flow, vec![2; 100].into());
    p.server.with(server, write).unwrap().unwrap();
    p.pump();
    p.run_for(Span::from_secs(1));
    let session = p.session;
    let read = p.device.with(session, |s| s.read(flow, 1_000)).unwrap();
    assert_eq!(read, Ok(ReadOutcome::Chunk(vec![2; 100].into())));
}

#[test]
fn a_flow_that_was_over_before_a_record_ends_once_and_is_forgotten_if_the_server_does_not_know_it()
{
    // R-FLOW-7
    let (mut p, flow) = half_reset();
    let session = p.session;
    p.device.with(session, |s| s.stop(flow, 7)).unwrap();
    p.pump();
    assert_eq!(p.ended.remove(&flow), Some(FlowEnd::Local(7)));
    let record = p.device.hibernate(p.now, session).unwrap();
    p.session = p.device.restore(p.now, &record, 500..600).unwrap();
    p.server = another_server();
    p.attach(0, "192.0.2.200:4000");
    p.open_path(0, false);
    p.run_for(Span::from_secs(5));
    assert!(p.ended.is_empty(), "{:?}", p.ended);
    let session = p.device.session(p.session).unwrap();
    assert_eq!(session.received(flow), None);
}
