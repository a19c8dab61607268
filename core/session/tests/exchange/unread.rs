//! Flows that nobody reads, or reads no more: the others of their session go on.

use crate::pair::*;
use d2tp_session::*;

/// The default windows, eight times smaller.
fn windows() -> EndpointConfig {
    EndpointConfig {
        session_window: 16 << 20,
        flow_window: 1 << 20,
        flow_window_first: 64 << 10,
        ..EndpointConfig::default()
    }
}

/// Nobody reads the flow from here on.
fn leave_unread(p: &mut Pair, flow: FlowId) {
    p.got.remove(&flow);
}

/// A flow that is read comes whole, although others are not read.
fn assert_another_comes(p: &mut Pair) {
    let flow = p.request(300_000, FlowOptions::default());
    let whole = p.run_until(Span::from_secs(2), |p| p.is_whole(flow));
    assert!(whole, "{} bytes came", p.got[&flow].len());
    p.assert_right(flow);
}

#[test]
fn flows_that_nobody_reads_leave_room_to_others() {
    // R-FLOW-13
    let mut p = Pair::with(windows());
    p.open_path(0, false);
    for _ in 0..200 {
        let flow = p.request(2_000_000, FlowOptions::default());
        leave_unread(&mut p, flow);
    }
    p.run_for(Span::from_secs(5));
    assert_another_comes(&mut p);
}

#[test]
fn flows_that_are_read_no_more_leave_room_to_others() {
    // R-FLOW-13: all are in full swing when they are left.
    let mut p = Pair::with(windows());
    p.wires.get_mut(&0).unwrap().rate = 20_000_000;
    p.open_path(0, false);
    let flows: Vec<FlowId> = (0..40)
        .map(|_| p.request(20_000_000, FlowOptions::default()))
        .collect();
    p.run_for(Span::from_secs(3));
    let least = flows.iter().map(|flow| p.got[flow].len()).min();
    assert!(least > Some(200_000), "{least:?}");
    for flow in flows {
        leave_unread(&mut p, flow);
    }
    p.run_for(Span::from_secs(5));
    assert_another_comes(&mut p);
}

#[test]
fn flows_that_are_left_one_after_the_other_leave_room_to_others() {
    // R-FLOW-13
    let mut p = Pair::with(windows());
    p.wires.get_mut(&0).unwrap().rate = 20_000_000;
    p.open_path(0, false);
    for _ in 0..60 {
        let flow = p.request(20_000_000, FlowOptions::default());
        let runs = p.run_until(Span::from_secs(3), |p| p.got[&flow].len() > 1_100_000);
        assert!(runs, "{} bytes came", p.got[&flow].len());
        leave_unread(&mut p, flow);
    }
    p.run_for(Span::from_secs(5));
    assert_another_comes(&mut p);
}

#[test]
fn a_flow_that_is_read_gets_its_whole_window() {
    let mut p = Pair::with(windows());
    let wire = p.wires.get_mut(&0).unwrap();
    (wire.delay, wire.rate) = (MS.times(50), 7_000_000);
    let flow = p.request(30_000_000, FlowOptions::default());
    p.open_path(0, false);
    p.run_for(Span::from_secs(2));
    let before = p.got[&flow].len();
    p.run_for(Span::from_secs(1));
    let came = p.got[&flow].len() - before;
    // 700 kB are on their way at once, of a window of 1 MiB that is announced in quarters; headers take a fortieth.
    assert!(came > 6_600_000, "{came} bytes in a second of 7,000,000");
}
