//! Flows whose bytes come from a source that is read only as far as can be sent soon, and only when an event
//! asks for it: nothing may wait for an event that does not come.

use crate::pair::*;
use d2tp_session::*;

const BYTES: u64 = 700_000;

fn reading_sources(window: u64) -> Pair {
    let mut p = Pair::with(EndpointConfig {
        flow_window: window,
        ..config()
    });
    p.reads_sources = true;
    p.wires.get_mut(&0).unwrap().rate = 2_000_000;
    p
}

fn hibernating() -> FlowOptions {
    FlowOptions {
        hibernates: true,
        ..FlowOptions::default()
    }
}

fn assert_comes(p: &mut Pair, flow: FlowId) {
    let whole = p.run_until(Span::from_secs(120), |p| p.is_whole(flow));
    assert!(
        whole,
        "{:?} of {BYTES} B, {:?}",
        p.got[&flow].len(),
        p.ended
    );
    p.assert_right(flow);
}

#[test]
fn a_source_is_sent_whole_whatever_the_window_and_the_losses() {
    for window in [1_500, 4_096, 65_536, 2 << 20] {
        for lose_every in [0, 7] {
            let mut p = reading_sources(window);
            p.wires.get_mut(&0).unwrap().lose_every = lose_every;
            let flow = p.request(BYTES, FlowOptions::default());
            p.open_path(0, false);
            assert_comes(&mut p, flow);
        }
    }
}

#[test]
fn an_end_exactly_at_the_credit_comes_with_the_last_byte() {
    let mut p = reading_sources(4_096);
    p.reading = false;
    let flow = p.request(4_096, FlowOptions::default());
    p.open_path(0, false);
    p.run_for(Span::from_secs(5));
    let (_, end) = p
        .device
        .with(p.session, |s| s.received(flow))
        .unwrap()
        .unwrap();
    assert_eq!(end, Some(4_096));
}

#[test]
fn a_source_goes_on_after_cuts_at_any_moment() {
    for window in [4_096, 2 << 20] {
        for options in [FlowOptions::default(), hibernating()] {
            for cut_after in 1..40 {
                let mut p = reading_sources(window);
                let flow = p.request(BYTES, options);
                p.open_path(0, false);
                p.run_for(MS.times(20 * cut_after));
                // Every other time nothing comes to the device any more before the link is gone.
                p.wires.get_mut(&0).unwrap().deaf = cut_after % 2 == 0;
                p.run_for(MS.times(30));
                p.cut(0);
                p.run_for(Span::from_secs(20));
                p.wires.get_mut(&0).unwrap().deaf = false;
                p.attach(0, "192.0.2.200:4000");
                p.open_path(0, false);
                assert_comes(&mut p, flow);
            }
        }
    }
}

#[test]
fn a_source_goes_on_when_its_server_had_hibernated() {
    for window in [4_096, 2 << 20] {
        for cut_after in 1..20 {
            let mut p = reading_sources(window);
            let flow = p.request(BYTES, hibernating());
            p.open_path(0, false);
            p.run_for(MS.times(60 * cut_after));
            p.cut(0);
            p.run_for(Span::from_secs(60));
            let server = p.server_session().unwrap();
            if p.server.hibernate(p.now, server).is_err() {
                continue; // The flow has ended.
            }
            p.attach(0, "192.0.2.200:4000");
            p.open_path(0, false);
            assert_comes(&mut p, flow);
        }
    }
}

#[test]
fn a_source_fills_an_open_window_without_waiting_for_acks() {
    let mut p = Pair::new();
    p.reads_sources = true;
    let wire = p.wires.get_mut(&0).unwrap();
    (wire.delay, wire.rate) = (MS.times(50), 20_000_000);
    let first = p.request(20_000_000, FlowOptions::default());
    p.open_path(0, false);
    assert_comes(&mut p, first);
    let begun = p.now;
    let second = p.request(1_000_000, FlowOptions::default());
    assert_comes(&mut p, second);
    // The request takes 50 ms, and the answer 50 ms to arrive and 50 ms to leave.
    let took = p.now.since(begun);
    assert!(took < MS.times(220), "{took:?}: the window was not used");
}
