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

/// The bytes that each link carried from the device in this span, in which datagrams of the application arrive by Wi-Fi at
/// 600 kB/s, and the device acknowledges every second one by a datagram of 52 bytes; and how many of these arrived.
fn acknowledged(pair: &mut Pair, time: Span) -> ([u64; 2], usize) {
    let server = pair.server_session().unwrap();
    let up = |pair: &Pair| [WIFI, CELL].map(|link| pair.wires[&link].bytes_up);
    let received = |pair: &Pair| {
        let is_ack =
            |event: &SessionEvent| matches!(event, SessionEvent::Datagram { context: 9, .. });
        pair.server_events
            .iter()
            .filter(|(.., event)| is_ack(event))
            .count()
    };
    let (before, received_before) = (up(pair), received(pair));
    let end = pair.now + time;
    while pair.now < end {
        let expires = pair.now + MS.times(500);
        let data = |s: &mut Session| {
            (0..2).for_each(|_| s.send_datagram(8, vec![1; 1_000].into(), expires));
        };
        pair.server.with(server, data).unwrap();
        let ack = |s: &mut Session| s.send_ack_datagram(9, vec![2; 52].into(), expires);
        pair.device.with(pair.session, ack).unwrap();
        pair.pump();
        pair.run_for(Span::from_micros(3_333));
    }
    let after = up(pair);
    (
        [0, 1].map(|n| after[n] - before[n]),
        received(pair) - received_before,
    )
}

#[test]
fn datagrams_that_acknowledge_travel_on_the_other_path() {
    // R-ACK-8
    let time = MS.times(10_000);
    let sent = 3_000;
    let mut off = pair(AckOffload::Never);
    let ([usual, other], arrived) = acknowledged(&mut off, time);
    assert_eq!(other, 0, "the switch is off");
    assert!(arrived * 100 > sent * 99, "{arrived}");
    let mut on = pair(AckOffload::Paid {
        bytes_per_second: 60_000,
    });
    let ([up, other], arrived) = acknowledged(&mut on, time);
    assert!(arrived * 100 > sent * 99, "{arrived}");
    assert!(
        up * 3 < usual,
        "{up} bytes of {usual} still go the usual way"
    );
    assert!(other > usual / 2, "{other} bytes go the other way");
    let stats = on.device.session(on.session).unwrap().path_stats();
    let cell = stats
        .iter()
        .find(|path| path.addresses.link == LinkId(CELL))
        .unwrap();
    assert_eq!(cell.payload_out, 0, "there is no grant");
}

#[test]
fn datagrams_that_acknowledge_stay_within_the_budget_of_a_metered_path() {
    // R-ACK-8, R-GRANT-6
    let time = MS.times(20_000);
    let ([_, other], _) = acknowledged(&mut pair(AckOffload::Free), time);
    assert_eq!(other, 0, "its user allowed nothing");
    let mut paid = pair(AckOffload::Paid {
        bytes_per_second: 2_000,
    });
    let ([_, other], arrived) = acknowledged(&mut paid, time);
    assert!(
        arrived * 100 > 6_000 * 99,
        "what found no room went the usual way: {arrived}"
    );
    // The bytes at once, those of each second, and those of the last packet.
    assert!(
        other > 30_000 && other <= 32 * 1024 + 20 * 3_000 + 1_200,
        "{other}"
    );
}

#[test]
fn datagrams_that_acknowledge_return_when_the_other_path_dies() {
    // R-ACK-8
    let mut pair = pair(AckOffload::Paid {
        bytes_per_second: 60_000,
    });
    acknowledged(&mut pair, MS.times(3_000));
    pair.silence(CELL);
    acknowledged(&mut pair, MS.times(1_000));
    let (_, arrived) = acknowledged(&mut pair, MS.times(2_000));
    assert!(arrived > 580, "{arrived} of 600 a second after its death");
}
