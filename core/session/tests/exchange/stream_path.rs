//! Paths over a reliable stream, where a network carries no UDP: link 0 is a stream, link 1 carries
//! datagrams.

use crate::pair::*;
use d2tp_session::*;

const STREAM: u32 = 0;
const UDP: u32 = 1;
const RATE: u64 = 1_000_000;

/// A device that reached its server by a stream.
fn by_stream(config: EndpointConfig) -> Pair {
    let mut p = Pair::with(config);
    p.make_stream(STREAM, RATE);
    p.open_path(STREAM, false);
    p.run_for(Span::from_millis(300));
    p
}

fn paths(p: &Pair) -> Vec<PathStats> {
    p.device.session(p.session).unwrap().path_stats()
}

fn duplicates(p: &Pair) -> u64 {
    p.device.session(p.session).unwrap().duplicate_bytes()
}

/// Payload that the server sent, repetitions included.
fn sent_by_server(p: &Pair) -> u64 {
    let session = p.server.session(p.server_session().unwrap()).unwrap();
    session
        .path_stats()
        .iter()
        .map(|path| path.payload_out)
        .sum()
}

// R-STREAM-2
#[test]
fn a_stream_carries_what_it_takes_from_the_first_round_trip_on_in_large_packets() {
    let mut p = by_stream(config());
    let began = p.now;
    let flow = p.request(3_000_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(10), |p| p.is_whole(flow)));
    p.assert_right(flow);
    // Three seconds at the wire's rate; the rest is what is not payload, and round trips.
    let took = p.now.since(began);
    assert!(took < Span::from_millis(3_150), "{took:?}");
    let [path] = &paths(&p)[..] else {
        panic!("one path")
    };
    assert_eq!((path.mtu, path.lost), (8_972, 0));
    assert_eq!(sent_by_server(&p), 3_000_000);
}

// R-STREAM-2
#[test]
fn nothing_is_sent_on_a_stream_without_room() {
    let mut p = Pair::new();
    p.make_stream(STREAM, 0);
    p.open_path(STREAM, false);
    p.run_for(Span::from_millis(300));
    // From here on nobody says that there is room.
    p.wires.get_mut(&STREAM).unwrap().stream = false;
    let before = p.wires[&STREAM].bytes_down;
    let _flow = p.request(1_000_000, FlowOptions::default());
    p.run_for(Span::from_secs(3));
    let carried = p.wires[&STREAM].bytes_down - before;
    assert!(carried < 80_000, "{carried} bytes into room for 64 kB");
}

// R-STREAM-3
#[test]
fn a_stream_that_stands_still_has_nothing_repeated() {
    let mut p = by_stream(config());
    let flow = p.request(2_000_000, FlowOptions::default());
    p.run_for(Span::from_millis(700));
    p.stall(STREAM, Span::from_secs(6));
    p.run_for(Span::from_secs(3));
    let state = paths(&p)[0].state;
    assert_eq!(state, PathState::Silent, "the device looks for other links");
    assert!(p.run_until(Span::from_secs(12), |p| p.is_whole(flow)));
    p.assert_right(flow);
    assert_eq!((duplicates(&p), sent_by_server(&p)), (0, 2_000_000));
}

// R-STREAM-3
#[test]
fn a_stream_is_silent_a_second_after_the_first_packet_without_an_answer() {
    let mut p = by_stream(config());
    let _flow = p.request(20_000_000, FlowOptions::default());
    p.run_for(Span::from_millis(700));
    // A deep queue makes probe timeouts long.
    let timeout = paths(&p)[0].rtt.times(2);
    p.silence(STREAM);
    let heard = p.now;
    let is_silent = |p: &Pair| paths(p)[0].state == PathState::Silent;
    assert!(p.run_until(Span::from_secs(9), is_silent));
    // What waits for payload asks after two probe timeouts (R-PATH-9).
    let asked = (timeout.times(2)).max(Span::from_millis(250)) + Span::from_millis(100);
    let took = p.now.since(heard);
    assert!(took >= Span::from_secs(1), "{took:?}");
    assert!(took <= Span::from_secs(1) + asked, "{took:?}");
}

// R-STREAM-3
#[test]
fn another_path_takes_over_what_a_silent_stream_holds() {
    let mut p = by_stream(config());
    let flow = p.request(2_000_000, FlowOptions::default());
    p.run_for(Span::from_millis(700));
    p.silence(STREAM);
    p.run_for(Span::from_secs(3));
    p.open_path(UDP, false);
    assert!(p.run_until(Span::from_secs(8), |p| p.is_whole(flow)));
    p.assert_right(flow);
}

// R-STREAM-3
#[test]
fn a_packet_that_was_overtaken_in_a_stream_is_sent_again() {
    let mut p = by_stream(config());
    p.wires.get_mut(&STREAM).unwrap().lose_every = 40;
    let flow = p.request(2_000_000, FlowOptions::default());
    assert!(p.run_until(Span::from_secs(6), |p| p.is_whole(flow)));
    p.assert_right(flow);
    assert!(sent_by_server(&p) > 2_000_000);
}

// R-STREAM-4
#[test]
fn what_a_stream_held_when_it_ended_is_sent_elsewhere_at_once() {
    let mut p = by_stream(config());
    p.open_path(UDP, false);
    p.run_for(Span::from_millis(300));
    let flow = p.request(1_500_000, FlowOptions::default());
    p.run_for(Span::from_millis(400));
    p.close_stream(STREAM);
    let before = p.wires[&UDP].bytes_down;
    p.run_for(Span::from_millis(100));
    assert!(p.wires[&UDP].bytes_down > before, "within a round trip");
    assert!(p.run_until(Span::from_secs(5), |p| p.is_whole(flow)));
    p.assert_right(flow);
    // What had arrived, and its ACKs had not.
    assert!(duplicates(&p) < RATE / 50, "{} bytes", duplicates(&p));
}

// R-STREAM-4
#[test]
fn a_server_whose_only_path_was_a_stream_that_ended_waits_for_the_device() {
    let mut p = by_stream(config());
    let flow = p.request(1_500_000, FlowOptions::default());
    p.run_for(Span::from_millis(400));
    p.close_stream(STREAM);
    let server = p.server_session().unwrap();
    assert_eq!(
        p.server.session(server).unwrap().state(),
        SessionState::Suspended
    );
    p.run_for(Span::from_secs(5));
    assert_eq!(p.wires[&STREAM].packets_into_hole, 0, "it is silent");
    p.open_path(UDP, false);
    assert!(p.run_until(Span::from_secs(8), |p| p.is_whole(flow)));
    p.assert_right(flow);
    assert_eq!(duplicates(&p), 0);
}

// R-STREAM-5
#[test]
fn a_syn_in_a_stream_is_not_asked_for_a_cookie() {
    let loaded = EndpointConfig {
        cookie_above: 0,
        ..config()
    };
    for (link, syns) in [(STREAM, 1), (UDP, 2)] {
        let mut p = Pair::with(loaded.clone());
        p.make_stream(STREAM, RATE);
        p.keep_log = true;
        p.open_path(link, false);
        p.run_for(Span::from_millis(300));
        assert_eq!(paths(&p).len(), 1, "link {link} is up");
        let sent = p.log.iter().filter(|(_, _, bytes)| bytes.len() == 1_200);
        // The first packet of a path is as long.
        assert!(sent.count() >= syns);
        let up = p
            .device_events
            .iter()
            .find_map(|(at, _, event)| matches!(event, SessionEvent::PathUp { .. }).then_some(*at));
        let began = Time::ZERO + Span::from_secs(1);
        let round_trips =
            up.unwrap().since(began).as_millis() / (2 * p.wires[&link].delay.as_millis());
        assert_eq!(round_trips, syns as u64, "link {link}");
    }
}
