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
