//! Round trips of minutes: one SYN, few packets, nothing twice.

use crate::pair::*;
use d2tp_session::*;

const FAR: u32 = 0;
const MINUTES_40: Span = Span::from_secs(2_400);

/// Both ends expect `round_trip`, and it is what link 0 has.
fn far(round_trip: Span, change: impl FnOnce(&mut EndpointConfig)) -> Pair {
    let mut config = config();
    config.expect_round_trip(round_trip);
    change(&mut config);
    let mut p = Pair::with(config);
    p.keep_log = true;
    p.wires.get_mut(&FAR).unwrap().delay = round_trip.divided(2);
    p
}

fn syns(p: &Pair) -> usize {
    p.log
        .iter()
        .filter(|(_, _, bytes)| bytes[0] == 0x81)
        .count()
}

fn wakes(p: &Pair) -> usize {
    p.log
        .iter()
        .filter(|(_, _, bytes)| bytes[0] == 0x61)
        .count()
}

fn stats(p: &Pair) -> PathStats {
    p.device.session(p.session).unwrap().path_stats()[0].clone()
}

// R-LONG-1, R-LONG-2, R-LONG-3
#[test]
fn over_40_minutes_a_handshake_takes_ten_packets_at_most_and_nothing_is_sent_twice() {
    for minutes in [2, 10, 40] {
        let round_trip = Span::from_secs(60 * minutes);
        let mut p = far(round_trip, |_| {});
        p.open_path(FAR, false);
        let flow = p.request(3_000_000, FlowOptions::default());
        assert!(p.run_until(round_trip.times(3), |p| !p.got[&flow].is_empty()));
        // Those of the first window are on their way, too.
        let packets = p.wires[&FAR].count;
        assert!(packets <= 10 + 10, "{packets} packets over {minutes} min");
        assert_eq!(syns(&p), 1);
        assert!(p.run_until(round_trip.times(40), |p| p.is_whole(flow)));
        p.assert_right(flow);
        let session = p.device.session(p.session).unwrap();
        assert_eq!(session.duplicate_bytes(), 0);
        assert_eq!((stats(&p).lost, syns(&p)), (0, 1));
    }
}

// R-LONG-2
#[test]
fn a_relay_that_keeps_packets_for_less_than_the_expected_round_trip_causes_no_repetition() {
    let mut p = far(MINUTES_40.times(2), |_| {});
    let wire = p.wires.get_mut(&FAR).unwrap();
    // A rate keeps the order of what waits.
    (wire.delay, wire.rate) = (MINUTES_40.divided(2), 1_000_000);
    p.open_path(FAR, false);
    let flow = p.request(2_000_000, FlowOptions::default());
    assert!(p.run_until(MINUTES_40.times(6), |p| p.got[&flow].len() > 100_000));
    // No contact for half an hour.
    p.stall(FAR, Span::from_secs(1_800));
    assert!(p.run_until(MINUTES_40.times(30), |p| p.is_whole(flow)));
    let session = p.device.session(p.session).unwrap();
    assert_eq!(session.duplicate_bytes(), 0);
    assert_eq!((stats(&p).lost, syns(&p)), (0, 1));
}

// R-LONG-1
#[test]
fn a_lost_syn_is_repeated_after_the_round_trip_and_a_quarter() {
    let mut p = far(MINUTES_40, |_| {});
    p.wires.get_mut(&FAR).unwrap().mute = true;
    p.open_path(FAR, false);
    p.run_for(Span::from_secs(2_999));
    assert_eq!(syns(&p), 1);
    p.run_for(Span::from_secs(2));
    assert_eq!(syns(&p), 2);
    p.wires.get_mut(&FAR).unwrap().mute = false;
    p.run_for(Span::from_secs(3_000 + 2_400 + 3_600));
    assert!(p.server_session().is_some());
    // Ten hours without an answer would have cost five of them.
    assert!(syns(&p) <= 3, "{}", syns(&p));
}

// R-LONG-3
#[test]
fn a_cookie_is_accepted_after_its_round_trip() {
    let mut p = far(MINUTES_40, |config| config.cookie_above = 0);
    p.open_path(FAR, false);
    assert!(p.run_until(MINUTES_40.times(3), |p| p.server_session().is_some()));
    assert_eq!(syns(&p), 2, "the second with the cookie");
}

// R-LONG-1
#[test]
fn the_next_handshake_expects_the_round_trip_that_a_path_had() {
    // Neither end was told, and the round trip is one at which a handshake succeeds without that.
    let mut p = Pair::new();
    p.keep_log = true;
    p.wires.get_mut(&FAR).unwrap().delay = Span::from_secs(3);
    p.open_path(FAR, false);
    assert!(p.run_until(Span::from_secs(60), |p| p.server_session().is_some()));
    let blind = syns(&p);
    assert!(blind > 3, "{blind}");
    let flow = p.request(1_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
    p.cut(FAR);
    // Then it continues by a handshake.
    p.run_for(Span::from_secs(70));
    p.attach(FAR, "192.0.2.1:4001");
    let before = syns(&p) + wakes(&p);
    p.open_path(FAR, false);
    let next = p.request(1_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(next)));
    assert_eq!(syns(&p) + wakes(&p) - before, 1);
}

#[test]
fn a_known_rate_is_used_from_the_first_window_on_whatever_is_lost() {
    let rate = 20_000;
    let round_trip = Span::from_secs(120);
    let mut p = far(round_trip, |config| {
        config.expect_rates(rate, rate);
    });
    let wire = p.wires.get_mut(&FAR).unwrap();
    (wire.rate, wire.queue, wire.lose_every) = (rate, 60 * rate, 200);
    p.open_path(FAR, false);
    p.run_for(round_trip.times(3));
    let began = p.now;
    let bytes = 40_000_000;
    let flow = p.request(bytes, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(20_000), |p| p.is_whole(flow)));
    p.assert_right(flow);
    // The request takes a round trip, and so does each repetition of what was lost of the last window.
    let took = p.now.since(began).saturating_sub(round_trip.times(4));
    let share = bytes as f64 / rate as f64 / took.as_secs_f64();
    assert!(share > 0.88, "{share} of the rate");
}
