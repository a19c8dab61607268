//! Two paths through one bottleneck beside somebody else's one: coupled, they take together about what
//! one connection would (RFC 6356 §2, its goal 2); uncoupled, they take twice as much.
//!
//! RFC 6356 reasons with one loss rate for all who pass, which a queue that drops early and at random
//! gives; a drop-tail queue strikes by phase (Floyd and Jacobson 1991), and is kinder to two windows of
//! half the size.
//!
//! ```text
//!  session A   path 0 ──┐
//!              path 1 ──┼──▶ 4 Mb/s, a queue of about 80 ms ──▶ devices
//!  session B   path 0 ──┘
//! ```

use std::cell::RefCell;
use std::rc::Rc;

use crate::pair::*;
use d2tp_session::*;

/// Bytes per second.
const RATE: u64 = 500_000;
const SECONDS: u64 = 60;
/// Queue sizes over which figures are averaged, because the drops of a queue are random.
const QUEUES_MS: [u64; 3] = [72, 80, 88];

/// How many times as much as B, which has one path and its own congestion control, A got over two.
fn ratio(two: CongestionKind, one: CongestionKind, early: bool) -> f64 {
    let each = QUEUES_MS.map(|queue_ms| ratio_through(queue_ms, two, one, early));
    each.iter().sum::<f64>() / each.len() as f64
}

fn ratio_through(queue_ms: u64, two: CongestionKind, one: CongestionKind, early: bool) -> f64 {
    let mut bottleneck = Bottleneck::new(RATE, RATE * queue_ms / 1000);
    if early {
        bottleneck.manager = QueueManagement::Early;
    }
    let shared = Rc::new(RefCell::new(bottleneck));
    let mut pairs = [(two, 2), (one, 1)].map(|(congestion, paths)| {
        let mut p = Pair::with(EndpointConfig {
            congestion,
            mirroring: Mirroring::Never,
            // Who gets how much falls by phase: the start is as it was when the bounds were set.
            hybrid: HybridPolicy::Off,
            ..config()
        });
        for wire in p.wires.values_mut() {
            wire.delay = MS.times(20);
            wire.behind = Some(shared.clone());
        }
        for link in 0..paths {
            p.open_path(link, false);
        }
        p.request(RATE * SECONDS, FlowOptions::default());
        p
    });
    let begin = pairs[0].now;
    let mut at_begin = [0; 2];
    for (until, got) in [(SECONDS / 4, Some(&mut at_begin)), (SECONDS, None)] {
        let until = begin + Span::from_secs(until);
        loop {
            let [a, b] = &mut pairs;
            let next = if a.next_at() <= b.next_at() { a } else { b };
            if !next.step(until) {
                break;
            }
        }
        if let Some(got) = got {
            *got = pairs.each_ref().map(received);
        }
    }
    let [a, b] = pairs.each_ref().map(received);
    let ratio = (a - at_begin[0]) as f64 / (b - at_begin[1]) as f64;
    let queue = if early { "random early" } else { "drop-tail" };
    println!(
        "two paths with {two:?} got {ratio:.2} times what one with {one:?} got, {queue} queue of {queue_ms} ms"
    );
    ratio
}

/// A queue that both lead through, and what drops from it.
#[derive(Clone, Copy, Debug)]
struct Queue {
    /// Bytes per second.
    rate: u64,
    ms: u64,
    manager: QueueManagement,
}

/// The rate of A relative to that of B, which uses NewReno, through a queue of this size. A has
/// another path too, for retransmissions.
fn beside_new_reno(mirroring: Mirroring, queue: Queue) -> (f64, PathStats) {
    let rate = queue.rate;
    let mut bottleneck = Bottleneck::new(rate, rate * queue.ms / 1000);
    bottleneck.manager = queue.manager;
    let shared = Rc::new(RefCell::new(bottleneck));
    let mut pairs = [CongestionKind::Cubic, CongestionKind::NewReno].map(|congestion| {
        let mut p = Pair::with(EndpointConfig {
            congestion,
            mirroring,
            // Who gets how much falls by phase: the start is as it was when the bounds were set.
            hybrid: HybridPolicy::Off,
            ..config()
        });
        let wire = p.wires.get_mut(&0).unwrap();
        wire.delay = MS.times(20);
        wire.behind = Some(shared.clone());
        p.open_path(0, false);
        p
    });
    pairs[0].run_for(MS.times(200));
    pairs[1].run_for(MS.times(200));
    pairs[0].open_path(1, true);
    for p in &mut pairs {
        p.run_for(MS.times(200));
        p.request(rate * SECONDS, FlowOptions::default());
    }
    let (begin, mut at_quarter) = (pairs[0].now, None);
    for tenth in 1..=SECONDS * 10 {
        let (now, session) = (pairs[0].now, pairs[0].session);
        let lend = |s: &mut Session| s.lend_path(now, LinkId(1), 20_000);
        pairs[0].device.with(session, lend).unwrap();
        let until = begin + MS.times(100 * tenth);
        loop {
            let [a, b] = &mut pairs;
            let next = if a.next_at() <= b.next_at() { a } else { b };
            if !next.step(until) {
                break;
            }
        }
        pairs.iter_mut().for_each(|p| p.now = until);
        if tenth == SECONDS * 10 / 4 {
            at_quarter = Some(pairs.each_ref().map(received));
        }
    }
    let [a, b] = pairs.each_ref().map(received);
    let [a0, b0] = at_quarter.unwrap();
    let ratio = (a - a0) as f64 / (b - b0) as f64;
    println!("{mirroring:?}, {queue:?}: {ratio:.2} times NewReno's");
    let server = pairs[0].server_session().unwrap();
    let paths = pairs[0].server.session(server).unwrap().path_stats();
    (ratio, paths[0].clone())
}

fn received(p: &Pair) -> u64 {
    p.got.values().map(|got| got.len() as u64).sum()
}

#[test]
fn two_coupled_paths_take_about_as_much_as_one_connection() {
    use CongestionKind::{Balia, Lia, NewReno, Olia};
    for (early, most) in [(true, 1.4), (false, 1.5)] {
        for kind in [Lia, Olia, Balia] {
            let ratio = ratio(kind, NewReno, early);
            assert!((0.7..=most).contains(&ratio), "{kind:?}: {ratio}");
        }
    }
}

#[test]
fn two_uncoupled_paths_take_twice_as_much() {
    use CongestionKind::{Cubic, NewReno};
    for kind in [Cubic, NewReno] {
        let ratio = ratio(kind, kind, true);
        assert!(ratio >= 1.7, "{kind:?}: {ratio}");
    }
}

#[test]
fn who_hides_random_losses_takes_no_more_of_a_shared_queue() {
    // R-MIRROR-1: half, once and twice what the way holds; drops that no full queue explains. Who gets
    // how much of one queue falls by phase, so it is the mean that counts.
    let drop_tail = |ms| (RATE, ms, QueueManagement::DropTail);
    let codel = QueueManagement::CoDel(CoDel::default());
    let queues = [
        drop_tail(20),
        drop_tail(40),
        drop_tail(80),
        (RATE, 80, QueueManagement::Early),
        (RATE, 200, codel),
        // Windows above what is too small to judge by.
        (5 * RATE, 200, codel),
    ];
    let mut sums = [0.0; 2];
    for (rate, ms, manager) in queues {
        let queue = Queue { rate, ms, manager };
        let (without, _) = beside_new_reno(Mirroring::Never, queue);
        let (with, path) = beside_new_reno(Mirroring::Free, queue);
        assert!(path.lost > 50 && path.random * 6 <= path.lost, "{path:?}");
        assert!(with <= without * 1.3, "{with} instead of {without}");
        sums = [sums[0] + without, sums[1] + with];
    }
    let [without, with] = sums.map(|sum| sum / queues.len() as f64);
    println!(
        "on average {without:.2} times NewReno's, and {with:.2} where random losses are hidden"
    );
    assert!(with <= without * 1.1, "{with} instead of {without}");
}
