//! New paths over ways that were used before (RFC 9959).

use crate::pair::*;
use d2tp_session::*;

const RATE: u64 = 2_500_000;
const HOME: &str = "10.0.0.2:4000";

/// A download over link 0, five seconds old: 20 Mb/s, 100 ms there and back, a queue of one pipe.
fn under_way(congestion: CongestionKind) -> (Pair, FlowId) {
    let mut p = Pair::with(EndpointConfig {
        congestion,
        flow_window: 4_000_000,
        session_window: 8_000_000,
        ..config()
    });
    let wire = p.wires.get_mut(&0).unwrap();
    (wire.rate, wire.queue, wire.delay) = (RATE, 250_000, MS.times(50));
    p.attach(0, HOME);
    let flow = p.request(60_000_000, FlowOptions::default());
    p.open_path(0, false);
    p.run_for(Span::from_secs(5));
    assert!(p.got[&flow].len() > 8_000_000, "{}", p.got[&flow].len());
    (p, flow)
}

/// Takes the link down for this span, and up again with this address. Returns the bytes in the
/// first half second in which there are any.
fn comes_back(p: &mut Pair, flow: FlowId, away: Span, address: &str) -> usize {
    p.cut(0);
    p.run_for(away);
    p.attach(0, address);
    p.open_path(0, false);
    let held = p.got[&flow].len();
    assert!(p.run_until(Span::from_secs(10), |p| p.got[&flow].len() > held));
    p.run_for(MS.times(500));
    p.got[&flow].len() - held
}

fn lost(p: &Pair) -> u64 {
    let session = p.server.session(p.server_session().unwrap()).unwrap();
    session.path_stats().iter().map(|s| s.lost).sum()
}

#[test]
fn a_link_that_comes_back_with_its_address_is_as_fast_as_before_in_three_round_trips() {
    for kind in [
        CongestionKind::Cubic,
        CongestionKind::NewReno,
        CongestionKind::Lia,
    ] {
        let (mut p, flow) = under_way(kind);
        let known = comes_back(&mut p, flow, Span::from_secs(3), HOME);
        let (mut p, flow) = under_way(kind);
        let unknown = comes_back(&mut p, flow, Span::from_secs(3), "10.7.0.2:4000");
        assert!(
            known > unknown * 3 / 2,
            "{kind:?}: {known} bytes, {unknown} at another address"
        );
        assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
        p.assert_right(flow);
    }
}

#[test]
fn what_was_long_ago_or_has_another_round_trip_is_another_way() {
    // R-CC-3
    let (mut p, flow) = under_way(CongestionKind::Cubic);
    let new = comes_back(&mut p, flow, Span::from_secs(3), "10.7.0.2:4000");
    let (mut p, flow) = under_way(CongestionKind::Cubic);
    let old = comes_back(&mut p, flow, Span::from_secs(1200), HOME);
    assert!(old <= new * 11 / 10, "{old} after 20 minutes, {new}");
    let (mut p, flow) = under_way(CongestionKind::Cubic);
    p.wires.get_mut(&0).unwrap().delay = MS.times(20);
    let near = comes_back(&mut p, flow, Span::from_secs(3), HOME);
    let (mut p, flow) = under_way(CongestionKind::Cubic);
    p.wires.get_mut(&0).unwrap().delay = MS.times(20);
    let other = comes_back(&mut p, flow, Span::from_secs(3), "10.7.0.2:4000");
    assert!(near <= other * 11 / 10, "{near} at 40 ms, {other}");
}

#[test]
fn a_way_that_became_narrow_is_left_soon() {
    // R-CC-3
    let (mut p, flow) = under_way(CongestionKind::Cubic);
    let wire = p.wires.get_mut(&0).unwrap();
    (wire.rate, wire.queue) = (RATE / 20, 12_500);
    comes_back(&mut p, flow, Span::from_secs(3), HOME);
    p.run_for(Span::from_secs(2));
    let known = lost(&p);
    let held = p.got[&flow].len();
    p.run_for(Span::from_secs(4));
    let rate = (p.got[&flow].len() - held) as u64 / 4;
    assert!(rate > RATE / 20 * 8 / 10, "{rate} bytes a second");
    // Some of half the old window, once.
    assert!(known < 200, "{known} lost");
}
