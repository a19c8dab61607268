//! A medium that both directions share has the rates that the standard's arithmetic gives.

use cedos_lab_link::{
    LinkCondition, LinkDirection, LinkModel, LinkReach, Medium, Profile, Queue, Rate, Span,
    TcpPassage, Time,
};

const DATA_BYTES: u32 = 1500;
/// A TCP acknowledgement with timestamps.
const ACK_BYTES: u32 = 52;
const SECONDS: u64 = 20;

fn link(medium: Medium) -> LinkModel<u64> {
    let profile = Profile {
        rate: Rate::Shared(medium),
        queue: Queue::Bytes(1_000_000),
        ..Profile::default()
    };
    let condition = LinkCondition {
        up: true,
        dead: false,
        stalled: false,
        reach: LinkReach::All,
        tcp: TcpPassage::Pass,
        down: profile.clone(),
        upward: profile,
    };
    LinkModel::new(&condition, 7, 0)
}

fn end() -> Time {
    Time::ZERO + Span::from_secs(SECONDS)
}

/// Simulates full packets in one direction, and one answer for every `every` that arrive (0: none).
/// Returns the full packets that arrived in a second, and the share of attempts that collided.
fn saturate(medium: Medium, every: u64) -> (f64, f64) {
    let mut link = link(medium);
    let (mut down, mut back) = (0u64, 0u64);
    let refill = |link: &mut LinkModel<u64>, now| {
        while link.down().packets_inside() < 50 {
            link.push(LinkDirection::Down, now, DATA_BYTES, 0);
        }
    };
    refill(&mut link, Time::ZERO);
    while let Some(now) = link.next_event().filter(|now| *now < end()) {
        while link.pop(LinkDirection::Down, now).is_some() {
            down += 1;
            if every > 0 && down.is_multiple_of(every) {
                link.push(LinkDirection::Up, now, ACK_BYTES, 0);
            }
        }
        while link.pop(LinkDirection::Up, now).is_some() {
            back += 1;
        }
        refill(&mut link, now);
    }
    let attempts = (down + back + link.collisions()) as f64;
    let met = link.collisions() as f64 / attempts;
    (down as f64 / SECONDS as f64, met)
}

fn per_second(cycle: Span) -> f64 {
    1.0 / cycle.as_secs_f64()
}

fn close(measured: f64, expected: f64, tolerance: f64) -> bool {
    (measured / expected - 1.0).abs() < tolerance
}

#[test]
fn a_lone_sender_gets_what_the_closed_form_says() {
    for medium in [Medium::Dot11b, Medium::Dot11g] {
        let (measured, met) = saturate(medium, 0);
        let expected = per_second(medium.cycle(DATA_BYTES));
        assert!(
            close(measured, expected, 0.01),
            "{medium:?}: {measured:.1} packets/s, {expected:.1} by the closed form"
        );
        assert_eq!(met, 0.0);
    }
}

#[test]
fn acknowledgements_cost_what_the_closed_form_says() {
    for medium in [Medium::Dot11b, Medium::Dot11g] {
        for every in [1, 2, 8] {
            let (measured, met) = saturate(medium, every);
            let cycle = medium.cycle_answered(DATA_BYTES, ACK_BYTES, every as u32);
            let expected = per_second(cycle);
            assert!(
                close(measured, expected, 0.03),
                "{medium:?}, one for {every}: {measured:.1} packets/s, {expected:.1} by the closed form"
            );
            assert!(met > 0.0, "both sent, and they never met");
        }
    }
}

#[test]
fn two_busy_senders_meet_as_often_as_bianchi_says() {
    for medium in [Medium::Dot11b, Medium::Dot11g] {
        let mut link = link(medium);
        let refill = |link: &mut LinkModel<u64>, now| {
            while link.down().packets_inside() < 50 {
                link.push(LinkDirection::Down, now, DATA_BYTES, 0);
            }
            while link.upward().packets_inside() < 50 {
                link.push(LinkDirection::Up, now, DATA_BYTES, 0);
            }
        };
        refill(&mut link, Time::ZERO);
        let mut arrived = [0u64; 2];
        while let Some(now) = link.next_event().filter(|now| *now < end()) {
            while link.pop(LinkDirection::Down, now).is_some() {
                arrived[0] += 1;
            }
            while link.pop(LinkDirection::Up, now).is_some() {
                arrived[1] += 1;
            }
            refill(&mut link, now);
        }
        // An attempt collides with the probability p that the other station sends in that slot: p =
        // 2(1-2p) / ((1-2p)(W+1) + pW(1-(2p)^m)), Bianchi 2000, eq. 7 and 9, two stations.
        let (first, largest) = medium.windows();
        let (w, m) = (
            f64::from(first + 1),
            f64::from((largest + 1) / (first + 1)).log2(),
        );
        let tau = |p: f64| {
            let open = 1.0 - 2.0 * p;
            2.0 * open / (open * (w + 1.0) + p * w * (1.0 - (2.0 * p).powf(m)))
        };
        let p = (0..100).fold(0.1, |p, _| (p + tau(p)) / 2.0);
        let met = link.collisions() as f64;
        let attempts = (arrived[0] + arrived[1]) as f64 + 2.0 * met;
        assert!(
            close(2.0 * met / attempts, p, 0.15),
            "{medium:?}: {:.4} of attempts met, {p:.4} by Bianchi",
            2.0 * met / attempts
        );
        let share = arrived[0] as f64 / (arrived[0] + arrived[1]) as f64;
        assert!((share - 0.5).abs() < 0.02, "{medium:?}: not even, {share}");
    }
}

#[test]
fn a_packet_that_comes_to_a_quiet_medium_leaves_at_once() {
    let mut link = link(Medium::Dot11g);
    let now = Time::ZERO + Span::from_secs(1);
    link.push(LinkDirection::Up, now, ACK_BYTES, 0);
    let arrives = now + Medium::Dot11g.frame(ACK_BYTES);
    assert_eq!(link.next_event(), Some(arrives));
    assert_eq!(link.pop(LinkDirection::Up, arrives), Some(0));
}

#[test]
fn a_late_look_changes_nothing() {
    let fill = || {
        let mut link = link(Medium::Dot11b);
        for n in 0..20 {
            link.push(LinkDirection::Down, Time::ZERO, DATA_BYTES, n);
            link.push(LinkDirection::Up, Time::ZERO, ACK_BYTES, n);
        }
        link
    };
    let (mut prompt, mut late) = (fill(), fill());
    let until = Time::ZERO + Span::from_millis(25);
    let mut seen = 0;
    while let Some(now) = prompt.next_event().filter(|now| *now <= until) {
        seen += usize::from(prompt.pop(LinkDirection::Down, now).is_some());
        while prompt.pop(LinkDirection::Down, now).is_some() {
            seen += 1;
        }
        while prompt.pop(LinkDirection::Up, now).is_some() {}
    }
    assert!(seen > 0);
    let found = std::iter::from_fn(|| late.pop(LinkDirection::Down, until)).count();
    assert_eq!(found, seen);
}

#[test]
fn a_stall_holds_the_medium_and_its_end_frees_it() {
    let mut link = link(Medium::Dot11g);
    let up = LinkCondition {
        up: true,
        dead: false,
        stalled: false,
        reach: LinkReach::All,
        tcp: TcpPassage::Pass,
        down: link.down().profile().clone(),
        upward: link.upward().profile().clone(),
    };
    let stalled = LinkCondition {
        stalled: true,
        ..up.clone()
    };
    link.apply(Time::ZERO, &stalled);
    link.push(LinkDirection::Down, Time::ZERO, DATA_BYTES, 0);
    assert_eq!(link.next_event(), None);
    let over = Time::ZERO + Span::from_secs(1);
    link.apply(over, &up);
    let at = link.next_event().unwrap();
    assert!(at > over && at < over + Span::from_millis(1), "{at:?}");
}
