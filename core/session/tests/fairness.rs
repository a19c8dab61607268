//! Two paths through one bottleneck beside somebody else's one: coupled, they take together about what
//! one connection would (RFC 6356 §2, its goal 2); uncoupled, they take twice as much.
//!
//! The queue drops early and at random: RFC 6356 reasons with one loss rate for all, and a drop-tail
//! queue would strike by phase (Floyd and Jacobson 1991).
//!
//! ```text
//!  session A   path 0 ──┐
//!              path 1 ──┼──▶ 4 Mb/s, a queue of 80 ms ──▶ devices
//!  session B   path 0 ──┘
//! ```

mod pair;

use std::cell::RefCell;
use std::rc::Rc;

use d2tp_session::*;
use pair::*;

/// Bytes per second.
const RATE: u64 = 500_000;
const SECONDS: u64 = 60;
const QUEUE_MS: u64 = 80;

/// How many times as much as B, which has one path and its own congestion control, A got over two.
fn ratio(two: CongestionKind, one: CongestionKind) -> f64 {
    let mut bottleneck = Bottleneck::new(RATE, RATE * QUEUE_MS / 1000);
    bottleneck.early = true;
    let shared = Rc::new(RefCell::new(bottleneck));
    let mut pairs = [(two, 2), (one, 1)].map(|(congestion, paths)| {
        let mut p = Pair::with(Config {
            congestion,
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
    let mut at_half = [0; 2];
    for (until, got) in [(SECONDS / 4, Some(&mut at_half)), (SECONDS, None)] {
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
    (a - at_half[0]) as f64 / (b - at_half[1]) as f64
}

fn received(p: &Pair) -> u64 {
    p.got.values().map(|got| got.len() as u64).sum()
}

#[test]
fn two_coupled_paths_take_about_as_much_as_one_connection() {
    use CongestionKind::{Balia, Lia, NewReno, Olia};
    for kind in [Lia, Olia, Balia] {
        let ratio = ratio(kind, NewReno);
        assert!((0.7..=1.4).contains(&ratio), "{kind:?}: {ratio}");
    }
}

#[test]
fn two_uncoupled_paths_take_twice_as_much() {
    use CongestionKind::{Cubic, NewReno};
    for kind in [Cubic, NewReno] {
        let ratio = ratio(kind, kind);
        assert!(ratio >= 1.7, "{kind:?}: {ratio}");
    }
}
