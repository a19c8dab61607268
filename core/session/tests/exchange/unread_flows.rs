//! Flows whose reader stops, such as a download that a program paused, beside others of the same session.

use crate::pair::*;
use d2tp_session::*;

/// Downloads that nobody reads, until nothing moves any more.
fn with_unread(flows: u64) -> (Pair, Vec<FlowId>) {
    let mut p = Pair::new();
    p.wires.get_mut(&0).unwrap().rate = 12_500_000;
    p.open_path(0, false);
    let unread: Vec<FlowId> = (0..flows)
        .map(|_| p.request(3 << 20, FlowOptions::default()))
        .collect();
    unread.iter().for_each(|flow| drop(p.got.remove(flow)));
    p.run_for(Span::from_secs(3));
    (p, unread)
}

#[test]
fn flows_that_nobody_reads_hold_up_no_other_one_and_go_on_when_they_are_read() {
    // R-FLOW-9, R-FLOW-12, R-FLOW-13
    for flows in [1, 2, 8, 60] {
        let (mut p, unread) = with_unread(flows);
        for round in 0..4 {
            let flow = p.request(1 << 20, FlowOptions::default());
            let came = p.run_until(Span::from_secs(60), |p| p.is_whole(flow));
            assert!(came, "{flows} unread flows: download {round} stands still");
        }
        unread
            .iter()
            .for_each(|flow| drop(p.got.insert(*flow, vec![])));
        let came = p.run_until(Span::from_secs(120), |p| {
            unread.iter().all(|f| p.is_whole(*f))
        });
        assert!(came, "{flows} flows that are read again stand still");
        unread.iter().for_each(|flow| p.assert_right(*flow));
    }
}

#[test]
fn a_flow_that_is_alone_uses_all_of_its_own_credit() {
    // R-FLOW-12
    let (p, unread) = with_unread(1);
    let (reached, _) = p
        .device
        .session(p.session)
        .unwrap()
        .received(unread[0])
        .unwrap();
    assert_eq!(reached, 0, "it is unread");
    assert!(p.wires[&0].bytes_down > config().flow_window);
}

#[test]
fn flows_that_nobody_reads_hold_up_no_other_one_when_they_come_one_after_another() {
    // R-FLOW-12
    let (mut p, _) = with_unread(1);
    for number in 0..30 {
        let unread = p.request(3 << 20, FlowOptions::default());
        p.got.remove(&unread);
        p.run_for(Span::from_secs(1));
        let flow = p.request(200_000, FlowOptions::default());
        let came = p.run_until(Span::from_secs(60), |p| p.is_whole(flow));
        assert!(came, "beside {number} unread flows a download stands still");
    }
}
