//! ACKs of a half-duplex path travel on the other one, where that helps and is allowed.
//!
//! ```text
//!           25 ms, 1 MB/s, half duplex
//!  device ═══════════════════════════════ server
//!         ───────────────────────────────
//!           60 ms, metered
//! ```

use crate::pair::{MS, Pair, Wire, config};
use bytes::Bytes;
use d2tp_session::*;

const WIFI: u32 = 0;
const CELL: u32 = 1;
const PAID: AckOffload = AckOffload::Paid {
    bytes_per_second: 20_000,
};

/// A pair of endpoints with two links, of which only the first carries payload.
fn pair(ack_offload: AckOffload) -> Pair {
    let mut pair = Pair::with(EndpointConfig {
        ack_offload,
        ..config()
    });
    let mut wifi = Wire::new(25, "192.0.2.1:4000");
    wifi.rate = 1_000_000;
    let cell = Wire::new(60, "198.51.100.1:4000");
    pair.wires = [(WIFI, wifi), (CELL, cell)].into();
    pair.device
        .with(pair.session, |s| s.set_half_duplex(LinkId(WIFI)))
        .unwrap();
    pair.open_path(WIFI, false);
    pair.run_for(MS.times(200));
    pair.open_path(CELL, true);
    pair.run_for(MS.times(500));
    pair
}

/// The bytes that each link carried from the device, and to it, in this span of a download.
fn downloaded(pair: &mut Pair, time: Span) -> [(u64, u64); 2] {
    let seen =
        |pair: &Pair| [WIFI, CELL].map(|l| (pair.wires[&l].bytes_up, pair.wires[&l].bytes_down));
    let before = seen(pair);
    pair.request(40_000_000, FlowOptions::default());
    pair.run_for(time);
    let after = seen(pair);
    [0, 1].map(|n| (after[n].0 - before[n].0, after[n].1 - before[n].1))
}

#[test]
fn acks_of_a_download_travel_on_the_other_path() {
    // R-ACK-7
    let time = MS.times(10_000);
    let [(usual, plain), (other, _)] = downloaded(&mut pair(AckOffload::Never), time);
    assert_eq!(other, 0, "the switch is off");
    let mut on = pair(PAID);
    let [(up, down), (other, _)] = downloaded(&mut on, time);
    assert!(
        up * 3 < usual,
        "{up} bytes of {usual} still go the usual way"
    );
    assert!(other > usual / 3, "{other} bytes go the other way");
    assert!(
        down * 100 >= plain * 99,
        "slower: {down} bytes, {plain} with ACKs on the path itself"
    );
}

#[test]
fn the_round_trip_stays_that_of_the_path() {
    // R-ACK-6
    let mut pair = pair(PAID);
    downloaded(&mut pair, MS.times(10_000));
    let id = pair.server_session().unwrap();
    let paths = pair.server.session(id).unwrap().path_stats();
    let wifi = paths.iter().find(|p| p.payload_out > 0).unwrap();
    assert!(wifi.rtt_min < MS.times(55), "{:?}", wifi.rtt_min);
    assert_eq!(wifi.spurious, 0, "what was not lost was taken for it");
}

#[test]
fn a_small_window_keeps_its_acks() {
    // R-ACK-7
    let mut pair = pair(PAID);
    let cell = pair.wires[&CELL].bytes_up;
    let flow = pair.request(20_000, FlowOptions::default());
    pair.run_for(MS.times(2_000));
    assert_eq!(pair.got[&flow].len(), 20_000);
    assert_eq!(pair.wires[&CELL].bytes_up, cell);
}

#[test]
fn a_metered_path_carries_none_unless_its_user_said_so() {
    // R-ACK-7
    let [_, (up, _)] = downloaded(&mut pair(AckOffload::Free), MS.times(5_000));
    assert_eq!(up, 0);
    let mut pair = pair(AckOffload::Paid {
        bytes_per_second: 0,
    });
    let seconds = 60;
    let [_, (up, _)] = downloaded(&mut pair, MS.times(seconds * 1_000));
    // R-GRANT-6: what such a path may spend unasked, and no more.
    assert!(up > 0 && up <= 32 * 1024 + seconds * 1_000 + 1_200, "{up}");
}

#[test]
fn another_path_that_dies_unnoticed_costs_little() {
    // R-ACK-7
    let time = MS.times(5_000);
    let mut whole = pair(PAID);
    let [(_, undisturbed), _] = downloaded(&mut whole, time);
    let mut pair = pair(PAID);
    pair.request(40_000_000, FlowOptions::default());
    let before = pair.wires[&WIFI].bytes_down;
    pair.run_for(MS.times(2_500));
    pair.silence(CELL);
    pair.run_for(MS.times(2_500));
    let down = pair.wires[&WIFI].bytes_down - before;
    assert!(down * 10 >= undisturbed * 9, "{down} of {undisturbed}");
}

#[test]
fn acks_of_an_upload_travel_on_the_other_path_if_its_user_said_so() {
    // R-ACK-7
    for (offload, allowed) in [(PAID, true), (AckOffload::Free, false)] {
        let mut pair = pair(offload);
        let (session, cell) = (pair.session, pair.wires[&CELL].bytes_down);
        let flow = pair
            .device
            .with(session, |s| s.open(FlowOptions::default()).unwrap())
            .unwrap();
        pair.sources.insert(flow, 0);
        for _ in 0..500 {
            let write = |s: &mut Session| {
                let room = s.write_room(flow).unwrap().min(40_000) as usize;
                if room > 0 {
                    s.write(flow, Bytes::from(vec![7; room])).unwrap();
                }
            };
            pair.device.with(session, write).unwrap();
            pair.run_for(MS.times(10));
        }
        let carried = pair.wires[&CELL].bytes_down - cell;
        assert_eq!(carried > 1_000, allowed, "{carried} bytes with {offload:?}");
    }
}
