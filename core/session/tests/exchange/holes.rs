//! Paths that stop answering and come back: what a hole costs beyond itself.

use crate::pair::*;
use d2tp_session::*;

const RATE: u64 = 1_000_000;

/// A download at a megabyte a second over link 0, three seconds old.
fn under_way(second: bool) -> (Pair, FlowId) {
    // The wire's queue has no end: what the device takes bounds it.
    let mut p = Pair::with(EndpointConfig {
        flow_window: 60_000,
        ..config()
    });
    p.wires.get_mut(&0).unwrap().rate = RATE;
    let flow = p.request(30_000_000, FlowOptions::default());
    p.open_path(0, false);
    p.run_for(MS.times(500));
    if second {
        // A metered link: it carries no payload without grants.
        p.open_path(1, true);
    }
    p.run_for(MS.times(2500));
    (p, flow)
}

/// Lets link 0 deliver nothing for this span. Returns the time from its end to the next byte, and
/// how many bytes in the second from then.
fn falls_into_a_hole(p: &mut Pair, flow: FlowId, hole: Span) -> (Span, usize) {
    p.silence(0);
    p.run_for(hole);
    p.wires.get_mut(&0).unwrap().up = true;
    let (held, began) = (p.got[&flow].len(), p.now);
    assert!(p.run_until(Span::from_secs(10), |p| p.got[&flow].len() > held));
    let late = p.now.since(began);
    p.run_for(Span::from_secs(1));
    (late, p.got[&flow].len() - held)
}

fn statuses(p: &mut Pair) -> Vec<PathStatus> {
    let server = p.server_session().unwrap();
    let session = p.server.session(server).unwrap();
    session.path_stats().iter().map(|s| s.status).collect()
}

#[test]
fn the_only_path_goes_on_soon_after_a_hole_and_as_fast_as_before() {
    // R-PATH-6
    for seconds in [1, 2, 10] {
        let (mut p, flow) = under_way(false);
        let (late, bytes) = falls_into_a_hole(&mut p, flow, Span::from_secs(seconds));
        let most = Span::from_secs(seconds).divided(32) + MS.times(200);
        assert!(late < most, "{seconds} s: {late:?}");
        assert!(bytes as u64 > RATE * 9 / 10, "{seconds} s: {bytes} bytes");
        assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
        p.assert_right(flow);
    }
}

#[test]
fn a_frozen_path_is_told_on_another_keeps_its_window_and_thaws_when_it_answers() {
    // R-PATH-14
    let (mut p, flow) = under_way(true);
    assert_eq!(statuses(&mut p), [PathStatus::Available; 2]);
    p.silence(0);
    p.run_for(Span::from_secs(1));
    assert_eq!(statuses(&mut p)[0], PathStatus::Frozen);
    let told = p.wires[&0].packets_into_hole;
    p.run_for(Span::from_secs(1));
    assert_eq!(
        p.wires[&0].packets_into_hole, told,
        "it sends into the hole"
    );
    let (late, bytes) = falls_into_a_hole(&mut p, flow, MS.times(10));
    assert!(late < MS.times(200), "{late:?}");
    assert!(bytes as u64 > RATE * 95 / 100, "{bytes} bytes");
    assert_eq!(statuses(&mut p)[0], PathStatus::Available);
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    p.assert_right(flow);
    let device = p.device.session(p.session).unwrap();
    assert!(
        device
            .path_stats()
            .iter()
            .all(|s| s.status == PathStatus::Available)
    );
}

fn questions(p: &mut Pair, seconds: u64) -> u64 {
    let before = p.wires[&0].packets_while_down;
    p.run_for(Span::from_secs(seconds));
    p.wires[&0].packets_while_down - before
}

#[test]
fn a_device_asks_often_in_a_short_hole_and_rarely_in_a_long_one() {
    // R-PATH-14
    for waits in [true, false] {
        let (mut p, flow) = under_way(false);
        if !waits {
            let session = p.session;
            let pause = |s: &mut Session| s.pause(flow, true, ReasonCode::UserPaused);
            p.device.with(session, pause).unwrap();
            p.pump();
        }
        p.silence(0);
        let first = questions(&mut p, 3);
        let (later, minute) = (questions(&mut p, 60), questions(&mut p, 60));
        questions(&mut p, 1_500);
        let long = questions(&mut p, 60);
        if waits {
            assert!((40..=65).contains(&first), "{first}");
            assert!((800..=1_000).contains(&later), "{later}");
            assert!((300..=400).contains(&minute), "{minute}");
        } else {
            assert!((10..=60).contains(&first), "{first}");
            assert!((60..=120).contains(&later), "{later}");
            assert!(minute <= 31, "{minute}");
        }
        assert!(long <= 31, "{long}");
    }
}

#[test]
fn of_a_short_stay_after_a_long_hole_little_is_lost() {
    // R-PATH-14
    for second in [false, true] {
        let (mut p, flow) = under_way(second);
        let (late, _) = falls_into_a_hole(&mut p, flow, Span::from_secs(32));
        // A 512th of the hole, and the round trip.
        assert!(late < MS.times(63 + 20 + 5), "{late:?}");
    }
}

#[test]
fn what_arrived_before_a_hole_is_not_sent_again_over_a_slow_link() {
    // R-PATH-14: the ACKs of the last 50 ms are lost in the hole.
    let (mut p, _) = under_way(false);
    p.wires.get_mut(&0).unwrap().delay = MS.times(50);
    let slow = p.wires.get_mut(&1).unwrap();
    (slow.rate, slow.queue) = (6_000, 12_000);
    p.open_path(1, false);
    p.run_for(Span::from_secs(10));
    let twice = |p: &Pair| p.device.session(p.session).unwrap().duplicate_bytes();
    let (before, carried) = (twice(&p), p.wires[&1].bytes_down);
    p.silence(0);
    p.run_for(Span::from_secs(15));
    let (again, carried) = (twice(&p) - before, p.wires[&1].bytes_down - carried);
    assert!(carried > 70_000, "{carried}");
    // What was queued on the slow link before the news came.
    assert!(again < 20_000, "{again} of {carried}");
}

/// Falls silent on link 0 with its only path, at a round trip of 100 ms with all ACKs of that time lost.
fn falls_silent_alone() -> (Pair, FlowId) {
    let (mut p, flow) = under_way(false);
    for link in [0, 1] {
        let wire = p.wires.get_mut(&link).unwrap();
        (wire.rate, wire.delay) = (RATE, MS.times(50));
    }
    p.run_for(Span::from_secs(2));
    p.silence(0);
    p.run_for(Span::from_secs(2));
    (p, flow)
}

fn twice(p: &Pair) -> u64 {
    p.device.session(p.session).unwrap().duplicate_bytes()
}

#[test]
fn a_path_opened_after_the_only_one_fell_silent_does_not_bring_again_what_arrived() {
    // R-PATH-14
    let (mut p, flow) = falls_silent_alone();
    let (before, held) = (twice(&p), p.got[&flow].len());
    p.open_path(1, false);
    let began = p.now;
    assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() > held));
    let (late, again) = (p.now.since(began), twice(&p) - before);
    // The path is validated for a round trip, and the first byte that comes is one that was owed.
    assert!(late < MS.times(215), "{late:?}");
    assert_eq!(again, 0);
    assert_eq!(statuses(&mut p)[0], PathStatus::Frozen);
    p.wires.get_mut(&0).unwrap().up = true;
    p.run_for(Span::from_secs(1));
    assert_eq!(statuses(&mut p)[0], PathStatus::Available);
    p.run_for(Span::from_secs(1));
    p.assert_right(flow);
}

#[test]
fn the_first_path_to_answer_after_all_were_silent_reports_the_others() {
    // R-PATH-14
    let (mut p, flow) = falls_silent_alone();
    p.open_path(1, false);
    p.run_for(Span::from_secs(1));
    p.silence(1);
    p.run_for(Span::from_secs(3));
    let held = p.got[&flow].len();
    p.wires.get_mut(&0).unwrap().up = true;
    assert!(p.run_until(Span::from_secs(5), |p| p.got[&flow].len() > held));
    // The report leaves with the first packet that arrived.
    p.run_for(MS.times(60));
    assert_eq!(statuses(&mut p)[1], PathStatus::Frozen);
    p.run_for(Span::from_secs(1));
    p.assert_right(flow);
}

#[test]
fn a_path_that_carries_one_way_only_is_left_until_the_device_hears_it_again() {
    // R-PATH-15
    let (mut p, flow) = under_way(false);
    p.wires.get_mut(&1).unwrap().rate = RATE;
    p.open_path(1, false);
    p.run_for(MS.times(500));
    let state = |p: &mut Pair| {
        let server = p.server_session().unwrap();
        p.server.session(server).unwrap().path_stats()[0].state
    };
    p.wires.get_mut(&0).unwrap().deaf = true;
    p.run_for(MS.times(1500));
    assert_eq!(state(&mut p), PathState::Silent);
    // What it had there travels on the other path, and nothing but answers goes there.
    let (held, sent) = (p.got[&flow].len(), p.wires[&0].bytes_down);
    p.run_for(Span::from_secs(3));
    assert!((p.got[&flow].len() - held) as u64 > RATE * 2);
    let sent = p.wires[&0].bytes_down - sent;
    assert!(sent < 10_000, "{sent} bytes of answers");
    assert_eq!(state(&mut p), PathState::Silent);
    p.wires.get_mut(&0).unwrap().deaf = false;
    p.run_for(MS.times(500));
    assert_eq!(state(&mut p), PathState::Active);
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn the_only_path_that_carries_towards_the_device_only_stays_silent_until_something_is_acknowledged()
{
    // R-PATH-15: the server, whose packets arrive, sends the same again and again.
    let (mut p, flow) = under_way(false);
    let state = |p: &Pair| {
        let ids = p.device.ids();
        p.device.session(ids[0]).unwrap().path_stats()[0].state
    };
    p.wires.get_mut(&0).unwrap().mute = true;
    p.run_for(Span::from_secs(5));
    let (mut heard, mut received) = (0, p.wires[&0].bytes_down);
    for _ in 0..2_500 {
        p.run_for(MS.times(10));
        assert_eq!(state(&p), PathState::Silent, "at {:?}", p.now);
        heard += usize::from(p.wires[&0].bytes_down > received);
        received = p.wires[&0].bytes_down;
    }
    assert!(heard >= 3, "the server is heard {heard} times");
    p.wires.get_mut(&0).unwrap().mute = false;
    let held = p.got[&flow].len();
    assert!(p.run_until(Span::from_secs(2), |p| p.got[&flow].len() > held));
    assert_eq!(state(&p), PathState::Active);
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn a_device_asks_at_once_when_something_arrives_on_its_one_way_path() {
    // R-PATH-15
    let mut p = Pair::with(EndpointConfig {
        flow_window: 60_000,
        ..config()
    });
    p.wires.get_mut(&0).unwrap().rate = RATE;
    let flow = p.request(30_000_000, FlowOptions::default());
    // Metered: probes of a silent path back off to 2 s, and its server's are as rare.
    p.open_path(0, true);
    p.run_for(MS.times(500));
    let session = p.session;
    let granted = |s: &mut Session| s.grant(flow, LinkId(0), 30_000_000);
    p.device.with(session, granted).unwrap();
    p.pump();
    p.run_for(Span::from_secs(3));
    let is = |state: PathState| {
        move |p: &Pair| {
            let session = p.device.session(p.session).unwrap();
            session.path_stats()[0].state == state
        }
    };
    let minute = Span::from_secs(60);
    p.wires.get_mut(&0).unwrap().mute = true;
    assert!(p.run_until(minute, is(PathState::Silent)));
    // A packet of the server arrives on the silent path, and nothing is acknowledged after it.
    assert!(p.run_until(minute, is(PathState::Active)));
    assert!(p.run_until(minute, is(PathState::Silent)));
    let received = p.wires[&0].bytes_down;
    assert!(p.run_until(minute, |p| p.wires[&0].bytes_down > received));
    assert!(is(PathState::Silent)(&p));
    p.wires.get_mut(&0).unwrap().mute = false;
    let arrives = p.now + p.wires[&0].delay;
    assert!(p.run_until(minute, is(PathState::Active)));
    let (took, round_trip) = (p.now.since(arrives), p.wires[&0].delay.times(2));
    assert!(took < round_trip + MS.times(50), "{took:?}");
}

#[test]
fn a_full_queue_is_no_hole() {
    // R-PATH-6: answers are late by seconds, and something is heard all the time.
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 100_000;
    p.wires.get_mut(&1).unwrap().rate = 100_000;
    let flow = p.request(3_000_000, FlowOptions::default());
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.open_path(1, false);
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    let silent =
        |(_, _, e): &&(Time, SessionId, SessionEvent)| matches!(e, SessionEvent::PathSilent { .. });
    assert_eq!(p.device_events.iter().filter(silent).count(), 0);
}

#[test]
fn a_path_that_answers_late_is_asked_ever_more_rarely() {
    // R-PATH-14: it serves others for 5 s and then all that waited at once, again and again.
    let (mut p, flow) = under_way(false);
    let delay = p.wires[&0].delay;
    let mut asked = Vec::new();
    for _ in 0..8 {
        let before = p.wires[&0].bytes_up;
        let served = p.now + Span::from_secs(5);
        while p.now < served {
            p.wires.get_mut(&0).unwrap().delay = served.since(p.now) + delay;
            p.run_for(MS.times(20));
        }
        asked.push(p.wires[&0].bytes_up - before);
        p.wires.get_mut(&0).unwrap().delay = delay;
        p.run_for(MS.times(500));
    }
    assert!(asked[0] > 3_000, "{asked:?}");
    assert!(asked[7] < asked[0] / 8, "{asked:?}");
    // A hole that is one is asked about as often as before, after a few.
    for _ in 0..8 {
        falls_into_a_hole(&mut p, flow, Span::from_secs(3));
    }
    p.silence(0);
    let first = questions(&mut p, 3);
    assert!((40..=65).contains(&first), "{first}");
}
