//! What one path loses at random is fetched over another, and the window stays.
//!
//! ```text
//!           25 ms, 1 MB/s, a queue of 100 ms, loses one packet of fifty
//!  device ═══════════════════════════════ server
//!         ───────────────────────────────
//!           60 ms, 60 kB/s, a queue of 500 ms, metered, lent for 40 kB/s
//! ```

use crate::pair::{MS, Pair, Wire, config};
use bytes::Bytes;
use d2tp_session::*;

const WIFI: u32 = 0;
const CELL: u32 = 1;
const RATE: u64 = 1_000_000;
const LENT: u64 = 40_000;
const LOSE_EVERY: u64 = 50;
const SECONDS: u64 = 20;

/// A pair of endpoints whose links are all up.
fn pair(mirroring: Mirroring, cell: bool) -> Pair {
    let mut pair = Pair::with(EndpointConfig {
        mirroring,
        ..config()
    });
    let mut wifi = Wire::new(25, "192.0.2.1:4000");
    (wifi.rate, wifi.queue) = (RATE, RATE / 10);
    let mut slow = Wire::new(60, "198.51.100.1:4000");
    (slow.rate, slow.queue) = (60_000, 30_000);
    pair.wires = [(WIFI, wifi), (CELL, slow)].into();
    pair.open_path(WIFI, false);
    pair.run_for(MS.times(200));
    if cell {
        pair.open_path(CELL, true);
        pair.run_for(MS.times(300));
    }
    pair
}

fn lossy(mut pair: Pair) -> Pair {
    pair.wires.get_mut(&WIFI).unwrap().lose_every = LOSE_EVERY;
    pair
}

/// Time passes, and the device lends its cellular path meanwhile.
fn pass(pair: &mut Pair, span: Span, mut each: impl FnMut(&mut Pair)) {
    let until = pair.now + span;
    while pair.now < until {
        let (now, session) = (pair.now, pair.session);
        let lend = |s: &mut Session| s.lend_path(now, LinkId(CELL), LENT);
        pair.device.with(session, lend).unwrap();
        pair.run_for(MS.times(100));
        each(pair);
    }
}

/// Bytes a second that a download gets, its first two seconds left out.
fn download(pair: &mut Pair) -> u64 {
    let flow = pair.request(RATE * 2 * SECONDS, FlowOptions::default());
    pass(pair, Span::from_secs(2), |_| {});
    let before = pair.got[&flow].len();
    pass(pair, Span::from_secs(SECONDS), |_| {});
    pair.assert_right(flow);
    (pair.got[&flow].len() - before) as u64 / SECONDS
}

/// The server's Wi-Fi and cellular paths.
fn at_server(pair: &Pair) -> [PathStats; 2] {
    let id = pair.server_session().unwrap();
    let paths = pair.server.session(id).unwrap().path_stats();
    [false, true].map(|gated| paths.iter().find(|p| p.gated == gated).unwrap().clone())
}

#[test]
fn what_is_lost_at_random_comes_over_the_other_path_and_the_window_stays() {
    // R-MIRROR-1, R-MIRROR-2
    let whole = download(&mut pair(Mirroring::Free, true));
    let mut on = lossy(pair(Mirroring::Free, true));
    let mirrored = download(&mut on);
    let plain = download(&mut lossy(pair(Mirroring::Never, true)));
    println!("{whole} B/s without loss, {mirrored} mirrored, {plain} not");
    assert!(mirrored * 100 >= whole * 95, "{mirrored} of {whole}");
    assert!(plain * 100 <= whole * 70, "{plain} of {whole}");
    let [wifi, cell] = at_server(&on);
    assert!(wifi.random * 2 >= wifi.lost, "{wifi:?}");
    assert!(cell.fetched_out > 100_000, "{cell:?}");
    assert_eq!(
        cell.fetched_out, cell.payload_out,
        "it carries nothing else"
    );
}

#[test]
fn a_path_that_is_alone_or_whose_mirror_is_off_responds_to_every_loss() {
    // R-MIRROR-1
    for (mirroring, cell) in [(Mirroring::Free, false), (Mirroring::Never, true)] {
        let mut pair = lossy(pair(mirroring, cell));
        download(&mut pair);
        let id = pair.server_session().unwrap();
        let paths = pair.server.session(id).unwrap().path_stats();
        assert!(paths[0].lost > 30 && paths[0].random == 0, "{paths:?}");
        assert!(paths.iter().all(|p| p.fetched_out == 0), "{paths:?}");
    }
}

#[test]
fn a_queue_that_overflows_is_responded_to() {
    // R-MIRROR-1
    let mut pair = pair(Mirroring::Free, true);
    download(&mut pair);
    let [wifi, cell] = at_server(&pair);
    assert!(wifi.lost > 10, "{wifi:?}");
    assert!(wifi.random * 20 <= wifi.lost, "{wifi:?}");
    assert!(cell.fetched_out < 20_000 + wifi.lost * 1_500, "{cell:?}");
}

#[test]
fn the_other_path_keeps_room_and_its_price() {
    // R-MIRROR-3
    let mut pair = lossy(pair(Mirroring::Free, true));
    let flow = pair.request(RATE * 2 * SECONDS, FlowOptions::default());
    let (mut rtts, began) = (Vec::new(), pair.now);
    pass(&mut pair, Span::from_secs(SECONDS), |pair| {
        let spent = at_server(pair)[1].payload_out;
        let seconds = pair.now.since(began).as_millis() / 1_000 + 1;
        assert!(spent <= LENT * (seconds + 1), "{spent} in {seconds} s");
        rtts.push(at_server(pair)[1].rtt.as_millis());
    });
    pair.assert_right(flow);
    rtts.sort_unstable();
    // 120 ms and a half, and an ACK's delay; its queue would take half a second more.
    let most = rtts[rtts.len() * 9 / 10];
    assert!(most <= 220, "{most} ms");
    assert!(at_server(&pair)[1].payload_out > LENT * SECONDS / 8);
}

#[test]
fn what_was_lent_is_taken_back() {
    let mut pair = lossy(pair(Mirroring::Free, true));
    let flow = pair.request(RATE * 2 * SECONDS, FlowOptions::default());
    pass(&mut pair, Span::from_secs(5), |_| {});
    let (session, cell) = (pair.session, LinkId(CELL));
    let left = |pair: &mut Pair| {
        pair.device
            .with(session, |s| s.grant_left(flow, cell))
            .unwrap()
    };
    assert!(left(&mut pair).is_some_and(|(left, _)| left > 0));
    pair.device.with(session, |s| s.end_lending(cell)).unwrap();
    assert!(left(&mut pair).is_some_and(|(left, _)| left == 0));
    pair.run_for(MS.times(300));
    let spent = at_server(&pair)[1].payload_out;
    pair.run_for(Span::from_secs(1));
    assert_eq!(at_server(&pair)[1].payload_out, spent);
    pair.assert_right(flow);
}

#[test]
fn another_path_that_dies_unnoticed_costs_little() {
    let mut pair = lossy(pair(Mirroring::Free, true));
    let flow = pair.request(RATE * 2 * SECONDS, FlowOptions::default());
    pass(&mut pair, Span::from_secs(5), |_| {});
    pair.silence(CELL);
    let before = pair.got[&flow].len();
    pair.run_for(Span::from_secs(2));
    let got = (pair.got[&flow].len() - before) as u64 / 2;
    assert!(got * 10 >= RATE * 5, "{got} B/s");
    pair.assert_right(flow);
}

#[test]
fn what_a_hole_swallowed_comes_over_the_other_path() {
    // R-MIRROR-2
    let mut pair = pair(Mirroring::Free, true);
    let flow = pair.request(RATE * 2 * SECONDS, FlowOptions::default());
    pass(&mut pair, Span::from_secs(5), |_| {});
    let fetched = at_server(&pair)[1].fetched_out;
    pair.silence(WIFI);
    pass(&mut pair, Span::from_secs(3), |_| {});
    let hole = at_server(&pair)[1].fetched_out - fetched;
    assert!(hole > 20_000, "{hole} bytes");
    pair.wires.get_mut(&WIFI).unwrap().up = true;
    pass(&mut pair, Span::from_secs(3), |_| {});
    pair.assert_right(flow);
}

#[test]
fn a_path_that_is_far_too_slow_fetches_nothing() {
    // R-MIRROR-2
    let mut slow = pair(Mirroring::Free, false);
    slow.wires.get_mut(&CELL).unwrap().delay = Span::from_secs(2);
    slow.open_path(CELL, true);
    slow.run_for(Span::from_secs(5));
    let mut slow = lossy(slow);
    download(&mut slow);
    let [wifi, cell] = at_server(&slow);
    assert!(wifi.lost > 30 && wifi.random == 0, "{wifi:?}");
    assert_eq!((cell.fetched_out, cell.payload_out), (0, 0));
}

#[test]
fn uploads_too() {
    // R-MIRROR-1, R-MIRROR-2
    let uploaded = |mut pair: Pair| {
        let session = pair.session;
        let open = |s: &mut Session| s.open(FlowOptions::default()).unwrap();
        let flow = pair.device.with(session, open).unwrap();
        pair.sources.insert(flow, 0);
        pass(&mut pair, Span::from_secs(1), |_| {});
        for _ in 0..SECONDS * 100 {
            let now = pair.now;
            let write = |s: &mut Session| {
                let room = s.write_room(flow).unwrap().min(40_000) as usize;
                if room > 0 {
                    s.write(flow, Bytes::from(vec![7; room])).unwrap();
                }
                s.lend_path(now, LinkId(CELL), LENT);
            };
            pair.device.with(session, write).unwrap();
            pair.run_for(MS.times(10));
        }
        let session = pair.device.session(session).unwrap();
        let fetched: u64 = session.path_stats().iter().map(|p| p.fetched_out).sum();
        (session.send_offsets(flow).unwrap().1, fetched)
    };
    let (whole, _) = uploaded(pair(Mirroring::Free, true));
    let (mirrored, fetched) = uploaded(lossy(pair(Mirroring::Free, true)));
    let (plain, none) = uploaded(lossy(pair(Mirroring::Never, true)));
    assert!(mirrored * 100 >= whole * 90, "{mirrored} of {whole}");
    assert!(plain * 100 <= whole * 75, "{plain} of {whole}");
    assert!(fetched > 50_000 && none == 0, "{fetched}, {none}");
}
