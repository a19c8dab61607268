//! Several paths at once: what each scheduler does with them, and what a slow path may not spoil.
//!
//! Link 0 has a round trip of 20 ms, link 1 of 60 ms, unless a test says otherwise.

use crate::pair::*;
use d2tp_session::*;

const SLOW: u32 = 1;

fn with(path_scheduler: PathSchedulerKind, reinjection: bool) -> EndpointConfig {
    EndpointConfig {
        path_scheduler,
        reinjection,
        ..config()
    }
}

/// Both links up, each with a rate and a queue of 50 ms, and warm.
fn two_links(config: EndpointConfig, rates: [u64; 2]) -> Pair {
    let mut p = Pair::with(config);
    for (wire, rate) in p.wires.values_mut().zip(rates) {
        wire.rate = rate;
        wire.queue = (rate / 20).max(30_000);
    }
    p.open_path(0, false);
    p.run_for(Span::from_millis(300));
    p.open_path(SLOW, false);
    p.run_for(Span::from_millis(300));
    p
}

/// How long a download takes.
fn takes(p: &mut Pair, bytes: u64) -> Span {
    let began = p.now;
    let flow = p.request(bytes, FlowOptions::default());
    let got = p.run_until(Span::from_secs(120), |p| p.is_whole(flow));
    assert!(got, "{} of {bytes}", p.got[&flow].len());
    p.assert_right(flow);
    p.now.since(began)
}

fn server_paths(p: &Pair) -> Vec<PathStats> {
    let id = p.server_session().unwrap();
    p.server.session(id).unwrap().path_stats()
}

fn copied(p: &Pair) -> u64 {
    server_paths(p).iter().map(|s| s.copied_out).sum()
}

#[test]
fn free_first_leaves_a_metered_path_to_what_the_free_one_cannot_take() {
    for (kind, metered_first) in [
        (PathSchedulerKind::FreeFirst, false),
        (PathSchedulerKind::LowestRtt, true),
    ] {
        let mut p = Pair::with(with(kind, true));
        p.open_path(SLOW, false);
        p.run_for(Span::from_millis(300));
        p.open_path(0, true);
        p.run_for(Span::from_millis(300));
        let flow = p.request(8_000, FlowOptions::default());
        let session = p.session;
        p.device
            .with(session, |s| s.grant(flow, LinkId(0), 100_000))
            .unwrap();
        p.pump();
        assert!(p.run_until(Span::from_secs(5), |p| p.is_whole(flow)));
        let spent = p.device.session(session).unwrap().path_stats();
        let metered: u64 = spent.iter().filter(|s| s.gated).map(|s| s.payload_in).sum();
        assert_eq!(metered > 0, metered_first, "{kind:?}: {metered}");
    }
}

#[test]
fn ecf_does_not_hand_the_last_bytes_to_a_path_that_is_slower_than_waiting() {
    let run = |kind| {
        let mut p = Pair::with(with(kind, false));
        p.wires.get_mut(&SLOW).unwrap().delay = MS.times(300);
        p.wires.get_mut(&0).unwrap().rate = 1_000_000;
        p.open_path(0, false);
        p.run_for(Span::from_millis(500));
        p.open_path(SLOW, false);
        p.run_for(Span::from_secs(2));
        let before = p.wires[&SLOW].bytes_down;
        let took = takes(&mut p, 60_000);
        (took, p.wires[&SLOW].bytes_down - before)
    };
    let (took, slow) = run(PathSchedulerKind::Ecf);
    let (took_greedy, slow_greedy) = run(PathSchedulerKind::FreeFirst);
    assert!(slow < 2_000 && took < MS.times(200), "{took:?}, {slow}");
    assert!(
        slow_greedy > 5_000 && took_greedy > MS.times(300),
        "{took_greedy:?}, {slow_greedy}"
    );
}

#[test]
fn ecf_uses_every_path_where_there_is_enough_for_all() {
    let mut p = two_links(with(PathSchedulerKind::Ecf, true), [500_000, 250_000]);
    let took = takes(&mut p, 6_000_000);
    // 8 s at the rate of both, less their headers.
    assert!(took < MS.times(9_000), "{took:?}");
}

#[test]
fn redundant_sends_every_byte_on_every_path_and_loses_nothing_to_one_that_fails() {
    let bytes = 300_000;
    let mut p = two_links(with(PathSchedulerKind::Redundant, true), [200_000, 200_000]);
    let took = takes(&mut p, bytes);
    for path in server_paths(&p) {
        assert!(path.payload_out >= bytes * 9 / 10, "{path:?}");
    }
    // The same again, and in the middle of it one path falls silent without a word.
    let mut p = two_links(with(PathSchedulerKind::Redundant, true), [200_000, 200_000]);
    let began = p.now;
    let flow = p.request(bytes, FlowOptions::default());
    p.run_for(took.divided(2));
    p.silence(0);
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
    p.assert_right(flow);
    let took_wounded = p.now.since(began);
    assert!(
        took_wounded < took + MS.times(100),
        "{took:?}, {took_wounded:?}"
    );
}

#[test]
fn a_window_too_small_for_both_is_left_to_the_fast_path() {
    // What the fast path carries while bytes of the slow one are under way is more than the window.
    let run = |reinjection| {
        let config = EndpointConfig {
            flow_window: 100_000,
            ..with(PathSchedulerKind::FreeFirst, reinjection)
        };
        let mut p = Pair::with(config);
        p.wires.get_mut(&0).unwrap().rate = 1_000_000;
        let slow = p.wires.get_mut(&SLOW).unwrap();
        (slow.rate, slow.delay) = (25_000, MS.times(300));
        p.open_path(0, false);
        p.run_for(Span::from_millis(300));
        p.open_path(SLOW, false);
        p.run_for(Span::from_secs(2));
        takes(&mut p, 4_000_000)
    };
    let alone = {
        let mut p = Pair::with(with(PathSchedulerKind::FreeFirst, true));
        p.wires.get_mut(&0).unwrap().rate = 1_000_000;
        p.open_path(0, false);
        p.run_for(Span::from_millis(300));
        takes(&mut p, 4_000_000)
    };
    for took in [run(true), run(false)] {
        assert!(
            took < alone + alone.divided(20),
            "{took:?} beside {alone:?} alone"
        );
    }
}

#[test]
fn a_path_that_turns_slow_holds_up_the_other_only_without_reinjection() {
    let run = |reinjection| {
        let config = EndpointConfig {
            flow_window: 200_000,
            ..with(PathSchedulerKind::FreeFirst, reinjection)
        };
        let mut p = two_links(config, [500_000, 500_000]);
        let flow = p.request(4_000_000, FlowOptions::default());
        p.run_for(Span::from_secs(1));
        let (got, slow) = (p.got[&flow].len(), p.wires.get_mut(&SLOW).unwrap());
        assert!(slow.bytes_down > 200_000, "both are in use");
        slow.rate = 20_000;
        p.run_for(Span::from_millis(1_500));
        (p.got[&flow].len() - got, copied(&p))
    };
    let (with_it, copies) = run(true);
    let (without, none) = run(false);
    // The other alone carries 700 kB in that time.
    assert!(
        with_it > 500_000 && without < 350_000,
        "{with_it}, {without}"
    );
    assert!(copies > 0 && none == 0, "{copies}, {none}");
}

#[test]
fn the_last_bytes_do_not_wait_for_the_slow_path() {
    let run = |reinjection| {
        let config = with(PathSchedulerKind::FreeFirst, reinjection);
        let mut p = two_links(config, [1_000_000, 50_000]);
        (takes(&mut p, 1_000_000), copied(&p))
    };
    let (with_it, copies) = run(true);
    let (without, _) = run(false);
    assert!(
        with_it + MS.times(200) < without,
        "{with_it:?}, {without:?}"
    );
    // A queue's worth of the slow path, no more.
    assert!(copies < 60_000, "{copies}");
}

#[test]
fn no_copy_goes_from_a_free_path_to_a_metered_one() {
    let mut p = Pair::with(with(PathSchedulerKind::FreeFirst, true));
    p.wires.get_mut(&SLOW).unwrap().rate = 50_000;
    p.open_path(SLOW, false);
    p.run_for(Span::from_millis(300));
    p.open_path(0, true);
    p.run_for(Span::from_millis(300));
    let flow = p.request(400_000, FlowOptions::default());
    let session = p.session;
    p.device
        .with(session, |s| s.grant(flow, LinkId(0), 1_000_000))
        .unwrap();
    p.pump();
    assert!(p.run_until(Span::from_secs(20), |p| p.is_whole(flow)));
    let gated: u64 = server_paths(&p)
        .iter()
        .filter(|s| s.gated)
        .map(|s| s.copied_out)
        .sum();
    assert_eq!(gated, 0);
}

#[test]
fn a_fading_link_is_used_as_long_as_it_delivers() {
    let mut p = two_links(with(PathSchedulerKind::FreeFirst, true), [400_000, 100_000]);
    let flow = p.request(8_000_000, FlowOptions::default());
    p.run_for(Span::from_secs(3));
    let mut could = 0;
    let (got, faded) = (p.got[&flow].len() as u64, p.wires[&0].bytes_down);
    // It loses half its rate every two seconds, down to less than a thirtieth.
    for step in 1..=5 {
        let rate = 400_000 >> step;
        p.wires.get_mut(&0).unwrap().rate = rate;
        p.run_for(Span::from_secs(2));
        could += 2 * (rate + 100_000);
    }
    assert!(
        p.wires[&0].bytes_down - faded > 400_000,
        "the fading link was left"
    );
    let got = p.got[&flow].len() as u64 - got;
    assert!(got * 10 > could * 8, "{got} of {could}");
    p.cut(0);
    assert!(p.run_until(Span::from_secs(120), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

#[test]
fn two_paths_bring_nine_tenths_of_their_sum_whatever_their_rates_and_round_trips() {
    for (rates, delays_ms) in [
        ([500_000, 500_000], [10, 10]),
        ([500_000, 500_000], [10, 100]),
        ([500_000, 50_000], [10, 10]),
        ([500_000, 50_000], [10, 100]),
        ([500_000, 50_000], [100, 10]),
    ] {
        let mut p = Pair::with(with(PathSchedulerKind::FreeFirst, true));
        for (n, wire) in &mut p.wires {
            wire.rate = rates[*n as usize];
            wire.delay = MS.times(delays_ms[*n as usize]);
            // One bandwidth-delay product, and what slow links have at least.
            wire.queue = (wire.rate * 2 * delays_ms[*n as usize] / 1000).max(30_000);
        }
        p.open_path(0, false);
        p.open_path(SLOW, false);
        p.run_for(Span::from_secs(1));
        let sum: u64 = rates.iter().sum();
        let took = takes(&mut p, sum * 10);
        // 10 s, and 5 % for headers.
        let rate = Span::from_secs(10).as_nanos() * 100 / took.as_nanos();
        assert!(rate * 105 / 100 >= 90, "{rates:?}, {delays_ms:?}: {rate} %");
    }
}

/// A session whose only link is `gated`, with a flow on which nothing moves.
fn idle_session(gated: bool) -> Pair {
    let mut p = Pair::new();
    p.open_path(0, gated);
    p.run_for(Span::from_secs(1));
    let flow = (p.device)
        .with(p.session, |s| s.open(FlowOptions::default()).unwrap())
        .unwrap();
    p.device
        .with(p.session, |s| s.grant(flow, LinkId(0), 1_000_000))
        .unwrap();
    p.pump();
    p.run_for(Span::from_millis(100));
    p
}

#[test]
fn probes_of_an_idle_metered_path_cost_little() {
    // R-PATH-9: on a free link each probe is a full datagram.
    let probed = |gated: bool| {
        let mut p = idle_session(gated);
        let before = p.wires[&0].bytes_up;
        p.run_for(Span::from_secs(60));
        p.wires[&0].bytes_up - before
    };
    let (free, metered) = (probed(false), probed(true));
    assert!(free >= 7 * 1_200, "{free}");
    assert!((3 * 128..=1_500).contains(&metered), "{metered}");
}

#[test]
fn a_flow_that_arrived_whole_is_carried_and_not_probed_for_while_nobody_reads_it() {
    // R-PATH-9: the device waits for no payload.
    let mut p = Pair::new();
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    p.reading = false;
    let flow = p.request(1_000, FlowOptions::default());
    assert!(!p.device.session(p.session).unwrap().is_carried(flow));
    p.run_for(Span::from_secs(1));
    let session = p.device.session(p.session).unwrap();
    assert!(session.has_unread(flow) && session.is_carried(flow));
    let before = p.wires[&0].bytes_up;
    p.run_for(Span::from_secs(60));
    assert_eq!(p.wires[&0].bytes_up, before);
}

#[test]
fn what_a_flow_that_ended_carried_on_a_gated_path_is_known_until_another_handshake() {
    let mut p = Pair::new();
    p.open_path(0, true);
    p.run_for(Span::from_secs(1));
    let flow = p.request(1_000, FlowOptions::default());
    (p.device)
        .with(p.session, |s| s.grant(flow, LinkId(0), 1_000_000))
        .unwrap();
    p.run_for(Span::from_secs(1));
    let session = p.device.session(p.session).unwrap();
    assert_eq!(session.grant_left(flow, LinkId(0)), None, "it is forgotten");
    // The request has eight bytes.
    assert_eq!(session.ended_spending(flow, LinkId(0)), Some(1_008));
    // Keys last an hour.
    p.run_for(Span::from_secs(3_700));
    let session = p.device.session(p.session).unwrap();
    assert_eq!(session.ended_spending(flow, LinkId(0)), None);
}

#[test]
fn a_small_probe_from_another_address_proves_it() {
    // R-PATH-2, R-PATH-9: 128 bytes are enough for a challenge.
    let mut p = idle_session(true);
    let moved = "198.51.100.77:40000".parse().unwrap();
    p.wires.get_mut(&0).unwrap().address = moved;
    p.run_for(Span::from_secs(60));
    let id = p.server_session().unwrap();
    let path = p.server.session(id).unwrap().path_stats()[0].clone();
    assert_eq!((path.addresses.remote, path.proved), (moved, true));
}

#[test]
fn a_small_probe_proves_an_address_after_many_losses() {
    // R-PATH-3: the answer has room for a challenge, however many ranges it could acknowledge.
    let mut p = idle_session(true);
    p.wires.get_mut(&0).unwrap().lose_every = 3;
    for _ in 0..200 {
        let chunk = vec![7; 100];
        (p.device)
            .with(p.session, |s| {
                let flow = s.flow_ids()[0];
                s.write(flow, chunk.into()).unwrap();
            })
            .unwrap();
        p.pump();
        p.run_for(Span::from_millis(100));
    }
    p.wires.get_mut(&0).unwrap().lose_every = 0;
    p.run_for(Span::from_secs(40));
    let moved = "198.51.100.77:40000".parse().unwrap();
    p.wires.get_mut(&0).unwrap().address = moved;
    p.run_for(Span::from_secs(60));
    let id = p.server_session().unwrap();
    let path = p.server.session(id).unwrap().path_stats()[0].clone();
    assert_eq!((path.addresses.remote, path.proved), (moved, true));
}

// R-PATH-6
#[test]
fn an_only_path_on_which_nothing_was_ever_acknowledged_counts_as_silent_too() {
    let mut p = Pair::new();
    p.open_path(0, false);
    let is_up = |p: &Pair| {
        let session = p.device.session(p.session).unwrap();
        session.state() == SessionState::Established
    };
    assert!(p.run_until(Span::from_secs(1), is_up));
    // A network that passes the handshake and nothing after it.
    p.silence(0);
    let _flow = p.request(1_000, FlowOptions::default());
    let is_silent = |p: &Pair| {
        let session = p.device.session(p.session).unwrap();
        session
            .path_stats()
            .iter()
            .all(|path| path.state == PathState::Silent)
    };
    assert!(
        p.run_until(Span::from_secs(5), is_silent),
        "the device looks for another way"
    );
    let told = p.device_events.iter();
    let mut told = told.filter(|(_, _, event)| matches!(event, SessionEvent::PathSilent { .. }));
    assert!(told.next().is_some());
}

/// Begins to move to a node that is reached over link 1, and opens a flow. Returns the flow, after some of the time that
/// the node takes to answer.
fn open_while_it_moves(p: &mut Pair) -> FlowId {
    p.open_path(0, false);
    let first = p.request(100_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(5), |p| p.is_whole(first)));
    // Both are one server here.
    p.server_address = "203.0.113.2:443".parse().unwrap();
    let (now, to) = (p.now, p.addresses(1));
    p.device
        .with(p.session, |s| s.wake_at(now, to, false))
        .unwrap();
    let flow = p.request(100_000, FlowOptions::default());
    p.run_for(MS.times(50));
    flow
}

fn is_open_at_server(p: &Pair, flow: FlowId) -> bool {
    let opened = |(_, _, e): &(Time, SessionId, SessionEvent)| *e == SessionEvent::Opened(flow);
    p.server_events.iter().any(opened)
}

#[test]
fn a_flow_that_is_opened_while_the_session_moves_to_another_node_is_opened_there() {
    // R-NODE-6
    let mut p = Pair::new();
    let flow = open_while_it_moves(&mut p);
    assert!(
        !is_open_at_server(&p, flow),
        "over the path to the node before"
    );
    assert!(p.run_until(Span::from_secs(5), |p| p.is_whole(flow)));
    let paths = p.device.session(p.session).unwrap().path_stats();
    assert!(paths.iter().all(|path| path.addresses.link == LinkId(1)));
}

#[test]
fn a_flow_that_waits_for_a_node_which_does_not_answer_is_opened_at_the_one_before() {
    // R-NODE-6
    let mut p = Pair::new();
    p.silence(1);
    let flow = open_while_it_moves(&mut p);
    p.run_for(Span::from_secs(2));
    assert!(!is_open_at_server(&p, flow));
    p.cut(1);
    assert!(p.run_until(Span::from_secs(5), |p| p.is_whole(flow)));
}

#[test]
fn a_path_whose_limit_is_lifted_finds_its_datagram_size_as_if_there_had_been_none() {
    // R-SERIAL-4
    for before in [MS.times(30), Span::from_secs(1)] {
        let mut p = Pair::new();
        p.wires.get_mut(&0).unwrap().rate = 200_000;
        p.open_path(0, false);
        let flow = p.request(1_000_000, FlowOptions::default());
        p.run_for(before);
        let limit = |p: &mut Pair, bytes| {
            p.device
                .with(p.session, |s| s.set_path_limit(LinkId(0), bytes))
                .unwrap();
            p.pump();
            p.run_for(Span::from_secs(1));
            let server = p.server.session(p.server_session().unwrap()).unwrap();
            server.path_stats()[0].mtu
        };
        assert_eq!(limit(&mut p, Some(1_920)), 480);
        assert_eq!(limit(&mut p, None), 1_472, "limited after {before:?}");
        assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(flow)));
        p.assert_right(flow);
    }
}

#[test]
fn jumbo_frames_are_used_where_the_link_carries_them_and_after_much_payload() {
    let at_server = |p: &Pair| {
        let server = p.server.session(p.server_session().unwrap()).unwrap();
        server.path_stats()[0].clone()
    };
    for (link_carries, found) in [
        (8_972, 8_972),
        (9_000, 8_972),
        (8_000, 1_472),
        (1_472, 1_472),
    ] {
        let mut p = Pair::new();
        let wire = p.wires.get_mut(&0).unwrap();
        (wire.datagram_max, wire.rate) = (link_carries, 2_000_000);
        p.open_path(0, false);
        let little = p.request(200_000, FlowOptions::default());
        assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(little)));
        assert_eq!(at_server(&p).mtu, 1_472, "after 200 kB");
        let much = p.request(2_000_000, FlowOptions::default());
        assert!(p.run_until(Span::from_secs(60), |p| p.is_whole(much)));
        p.assert_right(much);
        let path = at_server(&p);
        assert_eq!(path.mtu, found, "a link of {link_carries}");
        // What a link refuses never left, and is no loss.
        assert_eq!(path.lost, 0, "a link of {link_carries}");
    }
}
