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

/// A download under way; then both ends are records. The server's one, for whoever wants to keep it.
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

/// A download under way whose device has no network for that long, and whose server has it as a
/// record; and how long after the link is back the first new byte is there.
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
