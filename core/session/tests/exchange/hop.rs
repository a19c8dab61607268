//! Signs of a link: silence and what its first hop says of it, a link that is frozen by its driver.

use crate::pair::*;
use d2tp_session::*;

const RATE: u64 = 1_000_000;

/// Two links; over the first goes a download, or an upload, at a megabyte a second. Three seconds in.
fn under_way(upload: bool, config: EndpointConfig) -> (Pair, FlowId) {
    let mut p = Pair::with(EndpointConfig {
        flow_window: 120_000,
        ..config
    });
    let wifi = p.wires.get_mut(&0).unwrap();
    (wifi.rate, wifi.queue, wifi.delay) = (RATE, 40_000, MS.times(30));
    let flow = if upload {
        let flow = p.device.with(p.session, |s| {
            let flow = s.open(FlowOptions::default()).unwrap();
            s.write(flow, vec![7; 30_000_000].into()).unwrap();
            flow
        });
        let flow = flow.unwrap();
        p.sources.insert(flow, 0);
        flow
    } else {
        p.request(30_000_000, FlowOptions::default())
    };
    p.open_path(0, false);
    p.run_for(MS.times(500));
    // It costs, so it carries control alone.
    p.open_path(1, true);
    p.run_for(MS.times(2500));
    (p, flow)
}

fn device_paths(p: &Pair) -> Vec<PathStats> {
    p.device.session(p.session).unwrap().path_stats()
}

fn server_paths(p: &Pair) -> Vec<PathStats> {
    let server = p.server_session().unwrap();
    p.server.session(server).unwrap().path_stats()
}

/// The times at which the device reported that its first link is quiet.
fn quiet(p: &Pair) -> Vec<Time> {
    let told = p.device_events.iter().filter_map(|(at, _, event)| {
        let quiet = matches!(
            event,
            SessionEvent::PathQuiet {
                link: LinkId(0),
                ..
            }
        );
        quiet.then_some(*at)
    });
    told.collect()
}

/// Makes the first link silent, and after 50 ms reports the result of the probe of the first hop.
fn falls_quiet(p: &mut Pair, hop: FirstHopStatus) {
    p.silence(0);
    let known = quiet(p).len();
    assert!(p.run_until(Span::from_secs(1), |p| quiet(p).len() > known));
    let since = p.now;
    p.run_for(MS.times(50));
    tell(p, hop, since);
}

fn tell(p: &mut Pair, hop: FirstHopStatus, since: Time) {
    let (now, session) = (p.now, p.session);
    let say = |s: &mut Session| s.on_link_silent(now, LinkId(0), since, hop);
    p.device.with(session, say).unwrap();
    p.pump();
}

/// The first link is there again; runs until its path answers at both ends.
fn comes_back(p: &mut Pair) {
    p.wires.get_mut(&0).unwrap().up = true;
    let active = |p: &Pair| {
        [device_paths(p), server_paths(p)]
            .iter()
            .all(|paths| paths[0].state == PathState::Active)
    };
    assert!(p.run_until(Span::from_secs(5), active), "it never answers");
}

#[test]
fn a_path_is_called_quiet_after_200_ms_once_a_silence_and_never_while_packets_come() {
    // R-HOP-1
    let (mut p, _) = under_way(false, config());
    assert_eq!(quiet(&p), [], "packets came all the time");
    p.silence(0);
    let began = p.now;
    p.run_for(Span::from_secs(3));
    let told = quiet(&p);
    assert_eq!(told.len(), 1);
    let after = told[0].since(began);
    assert!(after <= MS.times(230), "{after:?}");
    p.wires.get_mut(&0).unwrap().up = true;
    p.run_for(Span::from_secs(3));
    p.silence(0);
    p.run_for(Span::from_secs(1));
    assert_eq!(quiet(&p).len(), 2);
}

#[test]
fn a_device_with_nothing_to_wait_for_asks_no_first_hop() {
    // R-HOP-1
    let mut p = Pair::new();
    let flow = p.request(100_000, FlowOptions::default());
    p.open_path(0, false);
    assert!(p.run_until(Span::from_secs(5), |p| p.is_whole(flow)));
    let known = quiet(&p).len();
    p.run_for(Span::from_secs(3000));
    assert_eq!(quiet(&p).len(), known);
}

#[test]
fn a_silent_first_hop_freezes_the_path_at_once_and_its_window_stays() {
    // R-HOP-1
    let (mut p, flow) = under_way(false, config());
    let window = server_paths(&p)[0].window;
    falls_quiet(&mut p, FirstHopStatus::Silent);
    assert_eq!(device_paths(&p)[0].state, PathState::Silent);
    // As long as the other link takes, and no probe timeout more.
    p.run_for(MS.times(35));
    assert_eq!(server_paths(&p)[0].status, PathStatus::Frozen);
    p.run_for(Span::from_secs(2));
    comes_back(&mut p);
    assert!(server_paths(&p)[0].window >= window);
    assert_eq!(server_paths(&p)[0].status, PathStatus::Available);
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn a_fault_beyond_the_first_hop_is_no_hole() {
    // R-HOP-2
    let (mut p, flow) = under_way(false, config());
    let window = server_paths(&p)[0].window;
    falls_quiet(&mut p, FirstHopStatus::Answers);
    assert_eq!(device_paths(&p)[0].state, PathState::Active);
    assert_eq!(device_paths(&p)[0].status, PathStatus::Available);
    p.run_for(Span::from_secs(2));
    // Probe timeouts have found it out.
    assert_eq!(server_paths(&p)[0].status, PathStatus::Frozen);
    comes_back(&mut p);
    let after = server_paths(&p)[0].window;
    assert!(after <= window / 2 + 3_000, "{after} of {window}");
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

/// How long the only path of a download, with no outstanding data at the device, is silent before
/// the device reports it.
fn silent_after(hop: FirstHopStatus) -> Span {
    let mut p = Pair::with(EndpointConfig {
        session_window: 64 << 20,
        flow_window: 64 << 20,
        flow_window_first: 64 << 20,
        ..config()
    });
    let wifi = p.wires.get_mut(&0).unwrap();
    (wifi.rate, wifi.queue, wifi.delay) = (RATE, 100_000, MS.times(100));
    p.request(30_000_000, FlowOptions::default());
    p.open_path(0, false);
    p.run_for(Span::from_secs(2));
    let began = p.now;
    falls_quiet(&mut p, hop);
    let silent = |p: &Pair| device_paths(p)[0].state == PathState::Silent;
    assert!(p.run_until(Span::from_secs(5), silent));
    p.now.since(began)
}

#[test]
fn a_path_whose_first_hop_answers_is_probed_at_once() {
    // R-HOP-2
    let usual = silent_after(FirstHopStatus::Unknown);
    let sooner = silent_after(FirstHopStatus::Answers);
    assert!(sooner + MS.times(100) <= usual, "{sooner:?}, {usual:?}");
}

#[test]
fn what_the_first_hop_says_late_counts_too() {
    // R-HOP-2
    for (first, then, whole) in [
        (FirstHopStatus::Unknown, FirstHopStatus::Answers, false),
        (FirstHopStatus::Answers, FirstHopStatus::Silent, true),
        (FirstHopStatus::Unknown, FirstHopStatus::Unknown, true),
    ] {
        let (mut p, _) = under_way(false, config());
        let window = server_paths(&p)[0].window;
        falls_quiet(&mut p, first);
        let since = p.now;
        p.run_for(Span::from_secs(1));
        assert_eq!(device_paths(&p)[0].state, PathState::Silent);
        tell(&mut p, then, since);
        p.run_for(Span::from_secs(1));
        comes_back(&mut p);
        let after = server_paths(&p)[0].window;
        assert_eq!(after >= window, whole, "{first:?}, {then:?}: {after}");
    }
}

#[test]
fn alone_a_known_hole_keeps_the_whole_window_and_any_other_half_of_it() {
    // R-HOP-1, R-HOP-2
    for (hop, whole) in [
        (FirstHopStatus::Silent, true),
        (FirstHopStatus::Unknown, false),
        (FirstHopStatus::Answers, false),
    ] {
        let (mut p, _) = under_way(true, config());
        p.cut(1);
        p.run_for(Span::from_secs(1));
        let window = device_paths(&p)[0].window;
        falls_quiet(&mut p, hop);
        p.run_for(Span::from_secs(2));
        comes_back(&mut p);
        let after = device_paths(&p)[0].window;
        assert_eq!(after >= window, whole, "{hop:?}: {after} of {window}");
    }
}

#[test]
fn what_was_heard_since_the_question_counts_for_more_than_no_answer() {
    // R-HOP-1
    let (mut p, _) = under_way(false, config());
    let since = p.now;
    p.run_for(MS.times(100));
    tell(&mut p, FirstHopStatus::Silent, since);
    assert_eq!(device_paths(&p)[0].state, PathState::Active);
}

#[test]
fn a_link_that_is_frozen_carries_nothing_until_it_is_thawed_and_goes_on_at_once() {
    // R-HOP-3
    let (mut p, flow) = under_way(false, config());
    let window = server_paths(&p)[0].window;
    let (now, session) = (p.now, p.session);
    p.device
        .with(session, |s| s.freeze_path(now, LinkId(0)))
        .unwrap();
    p.pump();
    assert!(matches!(
        p.device_events.last(),
        Some((
            _,
            _,
            SessionEvent::PathSilent {
                link: LinkId(0),
                ..
            }
        ))
    ));
    let sent = p.wires[&0].bytes_up;
    p.run_for(Span::from_secs(1));
    assert_eq!(server_paths(&p)[0].status, PathStatus::Frozen);
    let served = p.wires[&0].bytes_down;
    p.run_for(Span::from_secs(9));
    assert_eq!(p.wires[&0].bytes_up, sent, "it speaks on it");
    let asked = p.wires[&0].bytes_down - served;
    assert!(asked < 1_000, "the server sends into it: {asked}");
    p.device
        .with(session, |s| s.unfreeze_path(LinkId(0)))
        .unwrap();
    p.pump();
    let began = p.now;
    comes_back(&mut p);
    let after = p.now.since(began);
    assert!(after <= MS.times(65), "{after:?}");
    assert!(server_paths(&p)[0].window >= window);
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn a_frozen_link_wakes_nobody() {
    // R-HOP-3
    let (mut p, _) = under_way(false, config());
    p.cut(1);
    let (now, session) = (p.now, p.session);
    p.device
        .with(session, |s| s.freeze_path(now, LinkId(0)))
        .unwrap();
    p.run_for(Span::from_secs(5));
    let (sent, mut steps) = (p.wires[&0].bytes_up, 0);
    let until = p.now + Span::from_secs(1800);
    while p.step(until) {
        steps += 1;
    }
    assert_eq!(p.wires[&0].bytes_up, sent);
    // The server asks until it takes the device to be away.
    assert!(steps < 40, "{steps}");
}

#[test]
fn a_word_that_overtook_packets_of_the_frozen_link_is_said_again() {
    // R-HOP-3
    let (mut p, _) = under_way(true, config());
    p.wires.get_mut(&0).unwrap().delay = MS.times(80);
    p.wires.get_mut(&1).unwrap().delay = MS.times(2);
    p.run_for(Span::from_secs(1));
    // A download beside, for the server to have something to send.
    let flow = p.request(10_000_000, FlowOptions::default());
    p.run_for(Span::from_secs(1));
    let (now, session) = (p.now, p.session);
    p.device
        .with(session, |s| s.freeze_path(now, LinkId(0)))
        .unwrap();
    p.run_for(Span::from_secs(2));
    assert_eq!(server_paths(&p)[0].status, PathStatus::Frozen);
    let (held, served) = (p.got[&flow].len(), p.wires[&0].bytes_down);
    p.run_for(Span::from_secs(3));
    assert_eq!(p.got[&flow].len(), held);
    assert!(p.wires[&0].bytes_down - served < 1_000);
}

#[test]
fn without_freezing_nobody_is_told_and_the_path_begins_anew() {
    // R-HOP-4
    let off = EndpointConfig {
        freezing: false,
        ..config()
    };
    let (mut p, flow) = under_way(false, off);
    let window = server_paths(&p)[0].window;
    p.silence(0);
    p.run_for(Span::from_secs(4));
    assert_eq!(quiet(&p), []);
    assert_eq!(server_paths(&p)[0].status, PathStatus::Available);
    comes_back(&mut p);
    let after = server_paths(&p)[0].window;
    assert!(after < window / 8, "{after} of {window}");
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn a_session_that_is_closed_while_its_link_is_frozen_says_so_there() {
    // R-CLOSE-3
    let (mut p, _) = under_way(false, config());
    p.cut(1);
    let (now, session) = (p.now, p.session);
    p.device
        .with(session, |s| s.freeze_path(now, LinkId(0)))
        .unwrap();
    p.run_for(Span::from_secs(1));
    p.device.with(session, |s| s.close(3, "bye")).unwrap();
    p.pump();
    p.run_for(Span::from_secs(2));
    assert!(p.server_session().is_none());
}
