//! A session that sends nothing but datagrams, as a tunnel of packets does.

use crate::pair::*;
use d2tp_session::*;

/// A device whose only path has this rate, in bytes per second each way, and a queue of a quarter of a round trip.
fn connected(rate: u64) -> Pair {
    let mut p = Pair::new();
    let wire = p.wires.get_mut(&0).unwrap();
    (wire.rate, wire.queue) = (rate, (rate / 200).max(20_000));
    p.open_path(0, false);
    p.run_for(Span::from_secs(1));
    assert!(
        p.server_session().is_some(),
        "the session is not established"
    );
    p
}

/// Sends datagrams for this long as fast as the session takes them: `sizes` gives the bytes of each, by its number. Returns
/// how many the server got, and their bytes.
fn send_for(p: &mut Pair, span: Span, sizes: impl Fn(u64) -> usize) -> (u64, u64) {
    const WAITING: usize = 32;
    let (end, mut number) = (p.now + span, 0);
    let before = p.server_events.len();
    while p.now < end {
        let expires = p.now + Span::from_secs(1);
        let refill = |s: &mut Session| {
            for _ in s.datagrams_waiting()..WAITING {
                let bytes = vec![number as u8; sizes(number).min(s.datagram_max())];
                number += 1;
                s.send_datagram(7, bytes.into(), expires);
            }
        };
        p.device.with(p.session, refill).unwrap();
        p.pump();
        if sent(p).too_big > 0 || p.device.session(p.session).unwrap().datagrams_waiting() > 0 {
            p.step(end);
        }
    }
    let came = p.server_events[before..]
        .iter()
        .filter_map(|(_, _, event)| match event {
            SessionEvent::Datagram { bytes, .. } => Some(bytes.len() as u64),
            _ => None,
        });
    came.fold((0, 0), |(n, all), bytes| (n + 1, all + bytes))
}

fn sent(p: &Pair) -> DatagramStats {
    p.device.session(p.session).unwrap().datagram_stats()
}

#[test]
fn datagrams_alone_fill_a_path_whatever_its_rate_and_none_is_dropped_before_it() {
    for rate in [125_000, 1_250_000, 12_500_000, 125_000_000] {
        let mut p = connected(rate);
        // Until the window has grown.
        let span = match rate {
            125_000_000 => MS.times(200),
            _ => Span::from_secs(2),
        };
        send_for(&mut p, span + MS.times(500), |_| 1_280);
        let before = sent(&p);
        let (_, bytes) = send_for(&mut p, span, |_| 1_280);
        let after = sent(&p);
        assert_eq!(after.too_big, 0, "{rate} B/s: {after:?}");
        assert_eq!(after.expired, before.expired, "{rate} B/s: {after:?}");
        let share = bytes * 100_000 / (span.as_millis() * rate);
        assert!(share >= 85, "{rate} B/s: {share} %, {after:?}");
    }
}

#[test]
fn datagrams_of_all_sizes_leave_in_batches_and_none_counts_as_too_big() {
    let mut p = connected(12_500_000);
    let sizes = |number: u64| match number % 7 {
        0 => 40,
        1 => 900,
        3 => 1_000,
        5 => 1,
        _ => 1_280,
    };
    let (came, _) = send_for(&mut p, Span::from_secs(1), sizes);
    let stats = sent(&p);
    assert_eq!((stats.too_big, stats.displaced), (0, 0), "{stats:?}");
    assert!(
        came > 5_000 && came + 400 > stats.sent,
        "{came} of {stats:?}"
    );
}

/// A device with a path of a megabyte a second, and one of 6 kB/s and half a second.
fn beside_a_slow_path() -> Pair {
    let mut p = connected(1_000_000);
    let wire = p.wires.get_mut(&1).unwrap();
    (wire.rate, wire.queue, wire.delay) = (6_000, 12_000, MS.times(250));
    p.open_path(1, false);
    p.run_for(Span::from_secs(3));
    p
}

fn is_slow(p: &Pair) -> bool {
    p.device
        .session(p.session)
        .unwrap()
        .carries_datagrams_slowly(false)
}

#[test]
fn a_path_that_is_far_slower_than_another_carries_no_datagrams_beside_it() {
    let mut p = beside_a_slow_path();
    let before = p.wires[&1].bytes_up;
    let (came, _) = send_for(&mut p, Span::from_secs(2), |_| 1_280);
    assert!(came > 1_000, "{came}");
    let by_slow_path = p.wires[&1].bytes_up - before;
    assert!(by_slow_path < 1_280, "{by_slow_path}");
    assert!(!is_slow(&p));
}

#[test]
fn a_far_slower_path_carries_datagrams_while_the_fast_one_is_silent_and_the_session_says_so() {
    let mut p = beside_a_slow_path();
    send_for(&mut p, Span::from_secs(1), |_| 1_280);
    p.silence(0);
    send_for(&mut p, Span::from_secs(3), |_| 1_280);
    assert!(is_slow(&p));
    let (came, _) = send_for(&mut p, Span::from_secs(5), |_| 1_280);
    assert!((10..40).contains(&came), "{came}");
    p.wires.get_mut(&0).unwrap().up = true;
    let (came, _) = send_for(&mut p, Span::from_secs(2), |_| 1_280);
    assert!(!is_slow(&p) && came > 500, "{came}");
}

#[test]
fn datagrams_queue_for_about_a_second_on_a_slow_path_whatever_its_queue_holds() {
    let mut p = Pair::new();
    let wire = p.wires.get_mut(&0).unwrap();
    // The queue has room for any number.
    (wire.rate, wire.queue, wire.delay) = (6_000, 0, MS.times(250));
    p.open_path(0, false);
    p.run_for(Span::from_secs(3));
    send_for(&mut p, Span::from_secs(20), |_| 1_280);
    for _ in 0..20 {
        // Four and a half datagrams of that size take a second.
        let (came, _) = send_for(&mut p, Span::from_secs(2), |_| 1_280);
        let rtt = p.device.session(p.session).unwrap().path_stats()[0].rtt;
        assert!((8..=10).contains(&came), "{came}");
        assert!(rtt < MS.times(2_500), "{rtt:?}");
    }
}
