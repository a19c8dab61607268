//! Messages and flows on the paths that their application wants.
//!
//! ```text
//!           30 ms, half duplex: Wi-Fi
//!  device ═══════════════════════════ server
//!         ───────────────────────────
//!           60 ms: the steadier one
//! ```

use crate::pair::*;
use bytes::Bytes;
use d2tp_session::*;

const WIFI: u32 = 0;
const CELL: u32 = 1;

fn both_up(config: EndpointConfig) -> Pair {
    let mut p = Pair::with(config);
    for (link, delay) in [(WIFI, 15), (CELL, 30)] {
        p.wires.get_mut(&link).unwrap().delay = MS.times(delay);
        p.open_path(link, false);
        p.run_for(MS.times(500));
    }
    let session = p.session;
    p.device
        .with(session, |s| s.set_half_duplex(LinkId(WIFI)))
        .unwrap();
    p.run_for(Span::from_secs(1));
    p
}

/// One end sends a message.
fn send(p: &mut Pair, from_device: bool, route: PathSelection, context: u64, n: u8) {
    let expires = p.now + Span::from_secs(1);
    let say = |s: &mut Session| s.send_datagram_on(route, context, vec![n; 100].into(), expires);
    match from_device {
        true => p.device.with(p.session, say).unwrap(),
        false => {
            let id = p.server_session().unwrap();
            p.server.with(id, say).unwrap();
        }
    }
    p.pump();
}

/// Messages that an end got: when, context, first byte.
fn got(p: &Pair, at_device: bool) -> Vec<(Time, u64, u8)> {
    let events = match at_device {
        true => &p.device_events,
        false => &p.server_events,
    };
    let messages = events.iter().filter_map(|(at, _, event)| match event {
        SessionEvent::Datagram { context, bytes } => Some((*at, *context, bytes[0])),
        _ => None,
    });
    messages.collect()
}

fn stats(p: &Pair, of_device: bool) -> DatagramStats {
    let server = p.server_session().unwrap();
    match of_device {
        true => p.device.session(p.session).unwrap().datagram_stats(),
        false => p.server.session(server).unwrap().datagram_stats(),
    }
}

#[test]
fn a_report_leaves_by_the_steadier_path_and_anything_else_by_the_quicker() {
    let mut p = both_up(config());
    for device in [true, false] {
        let (before, began) = (got(&p, !device).len(), p.now);
        send(&mut p, device, PathSelection::Steadiest, 5, 1);
        send(&mut p, device, PathSelection::Any, 6, 2);
        p.run_for(MS.times(100));
        let came = got(&p, !device)[before..].to_vec();
        let came: Vec<_> = came
            .iter()
            .map(|(at, context, n)| (at.since(began), *context, *n))
            .collect();
        assert_eq!(came, [(MS.times(15), 6, 2), (MS.times(30), 5, 1)]);
    }
}

#[test]
fn of_paths_alike_the_one_without_holes_is_the_steadier_and_others_again_a_minute_later() {
    let mut p = both_up(config());
    let way = |p: &mut Pair, wait: Span| {
        p.run_for(wait);
        let before = p.wires[&CELL].bytes_up;
        send(p, true, PathSelection::Steadiest, 0, 1);
        p.run_for(MS.times(300));
        p.wires[&CELL].bytes_up - before > 100
    };
    assert!(way(&mut p, MS));
    p.silence(CELL);
    send(&mut p, true, PathSelection::Each, 0, 1);
    p.run_for(Span::from_secs(2));
    p.wires.get_mut(&CELL).unwrap().up = true;
    send(&mut p, true, PathSelection::Each, 0, 1);
    assert!(!way(&mut p, Span::from_secs(3)), "it had a hole just now");
    assert!(way(&mut p, Span::from_secs(60)), "that was long ago");
}

#[test]
fn a_command_comes_by_both_paths_and_is_heard_once() {
    // R-COPY-1, R-COPY-2
    let mut p = both_up(config());
    for device in [true, false] {
        let before = got(&p, !device).len();
        for n in 0..20 {
            send(&mut p, device, PathSelection::Each, 7, n);
            p.run_for(MS.times(20));
        }
        p.run_for(MS.times(200));
        let came = got(&p, !device)[before..].to_vec();
        let came: Vec<_> = came.iter().map(|(_, context, n)| (*context, *n)).collect();
        let sent: Vec<_> = (0..20).map(|n| (7, n)).collect();
        assert_eq!(came, sent);
        let (near, far) = (stats(&p, device), stats(&p, !device));
        assert_eq!((near.sent, near.copies_sent), (20, 20));
        assert_eq!((far.received, far.copies_received), (20, 20));
        // Copies too: they cross links.
        let bytes = 40 * 100;
        assert_eq!((near.bytes_out, far.bytes_in), (bytes, bytes));
    }
}

#[test]
fn a_command_survives_whichever_path_swallows_it() {
    // R-COPY-1
    for dead in [WIFI, CELL] {
        let mut p = both_up(config());
        p.silence(dead);
        send(&mut p, true, PathSelection::Each, 7, 9);
        p.run_for(MS.times(60));
        assert_eq!(got(&p, false).len(), 1, "link {dead}");
    }
}

#[test]
fn no_copy_travels_where_bytes_cost() {
    // R-GRANT-4
    let mut p = Pair::new();
    p.open_path(WIFI, false);
    p.run_for(MS.times(500));
    p.open_path(CELL, true);
    p.run_for(Span::from_secs(1));
    let payload = |p: &Pair| {
        let stats = p.device.session(p.session).unwrap().path_stats();
        stats.iter().map(|s| s.payload_out).collect::<Vec<_>>()
    };
    let before = payload(&p);
    send(&mut p, true, PathSelection::Each, 0, 1);
    send(&mut p, true, PathSelection::Steadiest, 0, 2);
    p.run_for(MS.times(300));
    let after = payload(&p);
    assert_eq!(got(&p, false).len(), 2);
    assert_eq!((after[0] - before[0], after[1] - before[1]), (200, 0));
}

#[test]
fn copies_are_known_again_after_either_end_began_anew() {
    // R-COPY-2
    let mut p = both_up(config());
    for n in 0..3 {
        send(&mut p, true, PathSelection::Each, 7, n);
        p.run_for(MS.times(100));
    }
    // Its process is gone; the same instance comes back with a later epoch, and the server remembers.
    let key = server_key().public();
    p.device = Endpoint::new(config(), device_key(), Admission::Nobody, [5; 32], [6; 32]);
    p.session = p.device.connect(p.now, key, 77, 1000..2000);
    for link in [WIFI, CELL] {
        p.open_path(link, false);
        p.run_for(Span::from_secs(1));
    }
    let known = got(&p, false).len();
    for n in 0..3 {
        send(&mut p, true, PathSelection::Each, 7, n);
        p.run_for(MS.times(100));
    }
    assert_eq!(got(&p, false).len() - known, 3);
}

/// A flow of the device's, as it is sent: bytes over each link.
fn uploads(p: &mut Pair, route: PathSelection, bytes: usize) -> [u64; 2] {
    let payload = |p: &Pair| {
        let stats = p.device.session(p.session).unwrap().path_stats();
        [WIFI, CELL].map(|link| {
            let mut of_link = stats.iter().filter(|s| s.addresses.link == LinkId(link));
            of_link.next().map_or(0, |s| s.payload_out)
        })
    };
    let before = payload(p);
    let flow = p.device.with(p.session, |s| {
        let flow = s.open(FlowOptions::default()).unwrap();
        s.set_path_selection(flow, route).unwrap();
        s.write(flow, Bytes::from(vec![3; bytes])).unwrap();
        s.finish(flow).unwrap();
        flow
    });
    let flow = flow.unwrap();
    p.sources.insert(flow, 0);
    p.pump();
    p.run_for(Span::from_secs(5));
    let session = p.device.session(p.session).unwrap();
    assert!(session.is_flushed(flow), "{route:?}: it never arrived");
    let after = payload(p);
    [after[0] - before[0], after[1] - before[1]]
}

#[test]
fn a_flow_takes_the_steadier_path_or_both_if_its_application_says_so() {
    let mut p = both_up(EndpointConfig {
        reinjection: false,
        ..config()
    });
    let bytes = 50_000;
    let [wifi, cell] = uploads(&mut p, PathSelection::Steadiest, bytes);
    assert_eq!((wifi, cell), (0, bytes as u64));
    let [wifi, cell] = uploads(&mut p, PathSelection::Each, bytes);
    let both = bytes as u64 * 9 / 10;
    assert!(wifi >= both && cell >= both, "{wifi} and {cell}");
    let [wifi, cell] = uploads(&mut p, PathSelection::Any, bytes);
    assert_eq!(wifi + cell, bytes as u64, "nothing is copied");
}

#[test]
fn a_flow_for_the_steadier_path_takes_the_other_when_that_is_gone() {
    let mut p = both_up(config());
    p.cut(CELL);
    let [wifi, cell] = uploads(&mut p, PathSelection::Steadiest, 20_000);
    assert_eq!((wifi, cell), (20_000, 0));
}
