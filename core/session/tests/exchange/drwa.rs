//! A receiver that keeps the sender's queue short, on paths whose queue drops nothing.

use crate::pair::*;
use d2tp_session::*;

const RATE: u64 = 1_000_000;

fn config(drwa: Option<&str>) -> EndpointConfig {
    EndpointConfig {
        drwa: drwa.map(|lambda| lambda.parse().unwrap()),
        ..crate::pair::config()
    }
}

/// A device and a server over 40 ms of round trip, 1 MB/s, and a queue without end.
fn bloated(drwa: Option<&str>) -> Pair {
    let mut p = Pair::with(config(drwa));
    for (wire, delay_ms) in [(0, 20), (1, 60)] {
        let wire = p.wires.get_mut(&wire).unwrap();
        wire.rate = RATE;
        wire.delay = MS.times(delay_ms);
    }
    p.open_path(0, false);
    p
}

fn sender_path(p: &Pair) -> PathStats {
    let id = p.server_session().unwrap();
    let paths = p.server.session(id).unwrap().path_stats();
    let busy = paths.into_iter().max_by_key(|path| path.in_flight);
    busy.unwrap()
}

/// The mean round trip over a second, in milliseconds, and the payload that came in it.
fn over_a_second(p: &mut Pair, flow: FlowId) -> (f64, usize) {
    let before = p.got[&flow].len();
    let mut sum = 0.0;
    for _ in 0..100 {
        p.run_for(MS.times(10));
        sum += sender_path(p).rtt.as_millis_f64();
    }
    (sum / 100.0, p.got[&flow].len() - before)
}

#[test]
fn a_download_has_a_short_round_trip_at_the_same_rate() {
    // R-DRWA-2
    let measured = |drwa| {
        let mut p = bloated(drwa);
        let flow = p.request(30_000_000, FlowOptions::default());
        p.run_for(Span::from_secs(8));
        over_a_second(&mut p, flow)
    };
    let (rtt_without, bytes_without) = measured(None);
    assert!(rtt_without >= 240.0, "not bloated: {rtt_without} ms");
    let (rtt, bytes) = measured(Some("3"));
    assert!((60.0..=128.0).contains(&rtt), "{rtt} ms, not 3 x 40");
    assert!(
        bytes * 100 >= bytes_without * 99,
        "{bytes} of {bytes_without}"
    );
    let (shorter, bytes) = measured(Some("1.5"));
    assert!(shorter < 0.7 * rtt, "{shorter} ms where 3 makes {rtt}");
    assert!(
        bytes * 100 >= bytes_without * 96,
        "{bytes} of {bytes_without}"
    );
}

/// Lets the device write for this span while the server reads.
fn upload_for(p: &mut Pair, flow: FlowId, span: Span) {
    let until = p.now + span;
    while p.now < until {
        p.device
            .with(p.session, |s| {
                while let Ok(room @ 1..) = s.write_room(flow) {
                    s.write(flow, vec![7; room as usize].into()).unwrap();
                }
            })
            .unwrap();
        if let Some(id) = p.server_session() {
            let read =
                |s: &mut Session| while let Ok(ReadOutcome::Chunk(_)) = s.read(flow, 1 << 20) {};
            p.server.with(id, read).unwrap();
        }
        p.pump();
        p.run_for(MS.times(10));
    }
}

fn device_path(p: &Pair) -> PathStats {
    p.device.session(p.session).unwrap().path_stats()[0].clone()
}

#[test]
fn an_upload_is_held_by_the_server_until_the_path_moves() {
    // R-PATH-12
    let mut p = bloated(Some("3"));
    let open = |s: &mut Session| s.open(FlowOptions::default()).unwrap();
    let flow = p.device.with(p.session, open).unwrap();
    upload_for(&mut p, flow, Span::from_secs(8));
    let rtt = device_path(&p).rtt.as_millis_f64();
    assert!((60.0..=160.0).contains(&rtt), "{rtt} ms, not about 3 x 40");
    assert!(device_path(&p).limit.is_some());
    // R-DRWA-3: behind another address is another way; three times as far is not bloated there.
    p.wires.get_mut(&0).unwrap().delay = MS.times(60);
    p.attach(0, "192.0.2.77:7777");
    // Later its own queue is found, and held.
    upload_for(&mut p, flow, MS.times(500));
    assert_eq!(device_path(&p).limit, None);
}

#[test]
fn a_path_that_is_not_bloated_is_never_told_a_limit() {
    // R-DRWA-1
    let mut p = bloated(Some("3"));
    // The window of the receiver fills a path and a third of it.
    p.wires.get_mut(&0).unwrap().rate = 75_000_000;
    let flow = p.request(200_000_000, FlowOptions::default());
    p.run_for(MS.times(100));
    for _ in 0..200 {
        p.run_for(MS.times(10));
        assert_eq!(sender_path(&p).limit, None);
    }
    assert!(p.got[&flow].len() > 40_000_000, "{}", p.got[&flow].len());
}

#[test]
fn after_a_switch_the_other_path_has_a_minimum_of_its_own() {
    // R-DRWA-3
    let mut p = bloated(Some("3"));
    let flow = p.request(30_000_000, FlowOptions::default());
    p.run_for(Span::from_secs(6));
    let held = sender_path(&p).limit.unwrap();
    assert!(held <= 4 * 40 * RATE / 1_000, "{held}");
    p.cut(0);
    p.open_path(1, false);
    p.run_for(MS.times(300));
    assert_eq!(sender_path(&p).limit, None);
    p.run_for(Span::from_secs(6));
    let (rtt, bytes) = over_a_second(&mut p, flow);
    assert!((180.0..=384.0).contains(&rtt), "{rtt} ms, not 3 x 120");
    assert!(bytes >= 900_000, "{bytes}");
}

#[test]
fn what_the_application_allows_holds_beside_it() {
    let mut p = bloated(Some("3"));
    let session = p.session;
    p.request(30_000_000, FlowOptions::default());
    p.run_for(Span::from_secs(6));
    let own = sender_path(&p).limit.unwrap();
    p.device
        .set_path_limit(session, LinkId(0), Some(20_000))
        .unwrap();
    p.run_for(Span::from_secs(2));
    assert_eq!(sender_path(&p).limit, Some(20_000));
    p.device.set_path_limit(session, LinkId(0), None).unwrap();
    p.run_for(Span::from_secs(5));
    let again = sender_path(&p).limit;
    assert!(again.is_some_and(|limit| limit > own / 2), "{again:?}");
}
