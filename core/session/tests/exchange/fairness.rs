//! Two paths through one bottleneck beside somebody else's one: they take together about what one connection would
//! (RFC 6356 §2, its goal 2), with coupled congestion control, or because they are seen to share it (R-CC-4).
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
    ratio_after(SECONDS / 4, SECONDS, two, one, early)
}

/// How many times as much as B, which has one path, A got over two from the second `begin` to the second `end`.
fn ratio_after(begin: u64, end: u64, two: CongestionKind, one: CongestionKind, early: bool) -> f64 {
    let each = QUEUES_MS.map(|queue_ms| ratio_through(queue_ms, [begin, end], two, one, early));
    each.iter().sum::<f64>() / each.len() as f64
}

fn ratio_through(
    queue_ms: u64,
    [from, to]: [u64; 2],
    two: CongestionKind,
    one: CongestionKind,
    early: bool,
) -> f64 {
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
            mtu_max: 1472,
            ..config()
        });
        for wire in p.wires.values_mut() {
            wire.delay = MS.times(20);
            wire.behind = Some(shared.clone());
        }
        for link in 0..paths {
            p.open_path(link, false);
        }
        p.request(RATE * to, FlowOptions::default());
        p
    });
    let begin = pairs[0].now;
    let mut at_begin = [0; 2];
    for (until, got) in [(from, Some(&mut at_begin)), (to, None)] {
        run_together(&mut pairs, begin + Span::from_secs(until));
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
            mtu_max: 1472,
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
        run_together(&mut pairs, until);
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

// R-CC-4
#[test]
fn paths_that_share_a_bottleneck_take_together_what_one_connection_does() {
    use CongestionKind::{Cubic, NewReno};
    for kind in [Cubic, NewReno] {
        for early in [true, false] {
            let ratio = ratio_after(30, 180, kind, kind, early);
            assert!((0.9..=1.1).contains(&ratio), "{kind:?}: {ratio}");
        }
    }
}

/// Runs sessions until this time, in the order of what happens to them.
fn run_together(pairs: &mut [Pair], until: Time) {
    loop {
        let next_at = pairs.iter_mut().map(Pair::next_at);
        let next = next_at.enumerate().min_by_key(|(_, at)| *at);
        let Some((next, _)) = next else { break };
        if !pairs[next].step(until) {
            break;
        }
    }
}

/// What a session with a path through each of these queues gets in a minute and a half, in bytes, and what sessions get
/// that have one of them each besides it. Without `others` there are none.
fn through_separate(queues: [(u64, u64); 2], others: bool) -> [u64; 2] {
    let queues = queues.map(|(rate, ms)| {
        let bottleneck = Bottleneck::new(rate, rate * ms / 1000);
        Rc::new(RefCell::new(bottleneck))
    });
    let mut uses = vec![vec![0, 1]];
    if others {
        uses.extend([vec![0], vec![1]]);
    }
    let mut pairs: Vec<Pair> = uses
        .iter()
        .map(|uses| {
            let mut p = Pair::with(EndpointConfig {
                mirroring: Mirroring::Never,
                hybrid: HybridPolicy::Off,
                mtu_max: 1472,
                ..config()
            });
            for (link, queue) in (0..).zip(uses) {
                let wire = p.wires.get_mut(&link).unwrap();
                wire.delay = MS.times(20);
                wire.behind = Some(queues[*queue].clone());
                p.open_path(link, false);
            }
            p.request(10 * RATE * SECONDS * 2, FlowOptions::default());
            p
        })
        .collect();
    let begin = pairs[0].now + Span::from_secs(30);
    run_together(&mut pairs, begin);
    let before: Vec<u64> = pairs.iter().map(received).collect();
    run_together(&mut pairs, begin + Span::from_secs(90));
    let got: Vec<u64> = pairs
        .iter()
        .map(received)
        .zip(before)
        .map(|(a, b)| a - b)
        .collect();
    [got[0], got[1..].iter().sum()]
}

// R-CC-4
#[test]
fn paths_with_bottlenecks_of_their_own_use_each_as_one_connection_does() {
    for queues in [
        // Alike in all: what fills both at once is no sign.
        [(RATE, 80), (RATE, 80)],
        [(2 * RATE, 60), (RATE / 2, 200)],
    ] {
        let all = queues.map(|(rate, _)| rate).iter().sum::<u64>() * 90;
        let [alone, _] = through_separate(queues, false);
        let used = alone as f64 / all as f64;
        let [both, others] = through_separate(queues, true);
        let ratio = both as f64 / others as f64;
        println!("{queues:?}: {used:.2} of the rate alone, {ratio:.2} times others beside them");
        assert!(used > 0.92, "{queues:?}: {used}");
        assert!(ratio > 0.85, "{queues:?}: {ratio}");
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
