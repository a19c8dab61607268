//! Properties of every pipe, for any profile and any packets.

use cedos_lab_link::{Burst, Loss, Pipe, Profile, Queue, Rate, Span, Time, seeded};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Action {
    Push { bytes: u32 },
    Wait { us: u64 },
    Rate { kbps: u64 },
    Turn { up: bool },
    Stall { stalled: bool },
    Delay { us: u64 },
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        8 => (40u32..=1500).prop_map(|bytes| Action::Push { bytes }),
        4 => (0u64..20_000).prop_map(|us| Action::Wait { us }),
        1 => (0u64..20_000).prop_map(|kbps| Action::Rate { kbps }),
        1 => any::<bool>().prop_map(|up| Action::Turn { up }),
        1 => any::<bool>().prop_map(|stalled| Action::Stall { stalled }),
        1 => (0u64..50_000).prop_map(|us| Action::Delay { us }),
    ]
}

prop_compose! {
    fn profile()(
        kbps in 100u64..50_000,
        delay_us in 0u64..50_000,
        jitter_us in 0u64..20_000,
        random in 0.0f64..0.5,
        burst in proptest::option::of((0.0f64..0.3, 1.0f64..20.0)),
        queue in prop_oneof![
            (0u64..100_000).prop_map(Queue::Bytes),
            (0u64..500).prop_map(|ms| Queue::Time(Span::from_millis(ms))),
        ],
        reorder in prop_oneof![Just(0.0), 0.0f64..0.5],
        duplicate in prop_oneof![Just(0.0), 0.0f64..0.5],
    ) -> Profile {
        Profile {
            rate: Rate::BitsPerSecond(kbps * 1000),
            delay: Span::from_nanos(delay_us * 1000),
            jitter: Span::from_nanos(jitter_us * 1000),
            loss: Loss { random, burst: burst.map(|(p, n)| Burst::of(p, n)) },
            queue,
            reorder,
            reorder_by: Span::from_millis(5),
            duplicate,
            ..Profile::default()
        }
    }
}

/// The packets that came out, with their times.
fn play(profile: &Profile, actions: &[Action], seed: u64) -> (Pipe<u64>, Vec<(Time, u64)>) {
    let mut pipe = Pipe::new(profile.clone(), seeded(seed, 0));
    let mut now = Time::ZERO;
    let mut out = Vec::new();
    let run_to = |pipe: &mut Pipe<u64>, out: &mut Vec<_>, until: Time| {
        while let Some(at) = pipe.next_event().filter(|at| *at <= until) {
            while let Some(packet) = pipe.pop(at) {
                out.push((at, packet));
            }
        }
    };
    for (number, action) in actions.iter().enumerate() {
        match action {
            Action::Push { bytes } => {
                pipe.push(now, *bytes, number as u64);
            }
            Action::Wait { us } => {
                now += Span::from_nanos(us * 1000);
                run_to(&mut pipe, &mut out, now);
            }
            Action::Rate { kbps } => {
                let mut changed = pipe.profile().clone();
                changed.rate = Rate::BitsPerSecond(kbps * 1000);
                pipe.change(now, changed);
            }
            Action::Turn { up } => pipe.turn(now, *up),
            Action::Stall { stalled } => pipe.stall(now, *stalled),
            Action::Delay { us } => {
                let mut changed = pipe.profile().clone();
                changed.delay = Span::from_nanos(us * 1000);
                pipe.change(now, changed);
            }
        }
    }
    run_to(&mut pipe, &mut out, now + Span::from_secs_f64(3600.0));
    (pipe, out)
}

proptest! {
    #[test]
    fn every_packet_is_accounted_for(p in profile(), actions in prop::collection::vec(action(), 0..300), seed: u64) {
        let (pipe, out) = play(&p, &actions, seed);
        let c = pipe.counters();
        prop_assert_eq!(c.packets_delivered, out.len() as u64);
        // A duplicate that is dropped counts as dropped, so both sides count duplicates as
        // additional packets.
        prop_assert_eq!(
            c.packets_offered + c.packets_duplicated,
            c.packets_delivered + c.packets_queue_full + c.packets_while_down + c.packets_too_big
                + c.packets_lost + c.packets_cut + pipe.packets_inside() as u64
        );
    }

    #[test]
    fn nothing_is_reordered_unless_asked(p in profile(), actions in prop::collection::vec(action(), 0..300), seed: u64) {
        let (_, out) = play(&Profile { reorder: 0.0, ..p }, &actions, seed);
        prop_assert!(out.windows(2).all(|w| w[0].1 <= w[1].1 && w[0].0 <= w[1].0));
    }

    #[test]
    fn the_rate_is_obeyed_within_one_packet(p in profile(), actions in prop::collection::vec(action(), 0..300)) {
        // Without jitter and changes of delay, arrivals show departures.
        let p = Profile { jitter: Span::ZERO, reorder: 0.0, duplicate: 0.0, loss: Loss::default(), ..p };
        let steady: Vec<_> = actions.iter()
            .filter(|a| matches!(a, Action::Push { .. } | Action::Wait { .. } | Action::Stall { .. })).cloned().collect();
        let (_, out) = play(&p, &steady, 1);
        let size = |n: u64| match steady[n as usize] { Action::Push { bytes } => u64::from(bytes), _ => 0 };
        let bps = p.rate.bits_per_second().unwrap();
        for start in 0..out.len() {
            let mut bits = 0u128;
            for end in start + 1..out.len() {
                bits += u128::from(size(out[end].1)) * 8;
                let span = out[end].0.since(out[start].0).as_nanos();
                // The rounding of departures to a nanosecond is the only slack.
                prop_assert!(u128::from(span + (end - start) as u64) * u128::from(bps) >= bits * 1_000_000_000);
            }
        }
    }

    #[test]
    fn a_busy_pipe_wastes_no_time(kbps in 100u64..50_000, packets in 1usize..200) {
        let p = Profile { rate: Rate::BitsPerSecond(kbps * 1000), ..Profile::default() };
        let (_, out) = play(&p, &vec![Action::Push { bytes: 1000 }; packets], 1);
        let ideal_ns = packets as u128 * 8_000_000_000 / u128::from(kbps);
        let took = u128::from(out.last().unwrap().0.as_nanos());
        prop_assert!(took >= ideal_ns && took <= ideal_ns + packets as u128 + 1, "{} {}", took, ideal_ns);
    }

    #[test]
    fn the_same_seed_gives_the_same_run(p in profile(), actions in prop::collection::vec(action(), 0..300), seed: u64) {
        prop_assert_eq!(play(&p, &actions, seed).1, play(&p, &actions, seed).1);
    }
}
