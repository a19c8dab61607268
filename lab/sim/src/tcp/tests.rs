//! Two connections over a link model.

use cedos_lab_link::{
    LinkCondition, LinkDirection, LinkModel, LinkReach, Loss, Packet, Profile, Queue, Rate, Span,
    TcpPassage, Time,
};

use super::segment::{DATA_HEADER_BYTES, ModelSegment};
use super::{TcpConnection, TcpEnd};

const SEGMENT_BYTES: usize = 1_448;
const HEADER_BYTES: usize = 20;

impl Packet for ModelSegment {
    fn corrupt(&mut self, _: u64) {
        self.damaged = true;
    }
}

struct TestPair {
    now: Time,
    link: LinkModel<ModelSegment>,
    device: TcpConnection,
    /// The other end, which knows of the connection from the first SYN on.
    server: TcpConnection,
    knows: bool,
    received: Vec<u8>,
}

fn at_random(random: f64) -> Loss {
    Loss {
        random,
        ..Loss::default()
    }
}

fn link(change: impl FnOnce(&mut Profile)) -> LinkCondition {
    let mut profile = Profile {
        rate: Rate::BitsPerSecond(100_000_000),
        delay: Span::from_millis(25),
        queue: Queue::Time(Span::from_millis(100)),
        ..Profile::default()
    };
    let upward = profile.clone();
    change(&mut profile);
    LinkCondition {
        up: true,
        dead: false,
        stalled: false,
        reach: LinkReach::All,
        tcp: TcpPassage::Pass,
        down: profile,
        upward,
    }
}

impl TestPair {
    fn new(seed: u64, condition: &LinkCondition) -> TestPair {
        TestPair {
            now: Time::ZERO,
            link: LinkModel::new(condition, seed, 0),
            device: TcpConnection::connect(Time::ZERO, SEGMENT_BYTES),
            server: TcpConnection::accept(Time::ZERO, SEGMENT_BYTES),
            knows: false,
            received: Vec::new(),
        }
    }

    /// Handles the next instant, at `until` at the latest. Returns false once it has come.
    fn step(&mut self, until: Time) -> bool {
        let ends = [&mut self.device, &mut self.server];
        let ways = [LinkDirection::Up, LinkDirection::Down];
        for (end, way) in ends.into_iter().zip(ways) {
            while (self.knows || way == LinkDirection::Up)
                && let Some(segment) = end.poll(self.now)
            {
                let fits = segment.size() <= DATA_HEADER_BYTES + SEGMENT_BYTES;
                assert!(segment.bytes.is_empty() || fits, "{} bytes", segment.size());
                let size = (HEADER_BYTES + segment.size()) as u32;
                self.link.push(way, self.now, size, segment);
            }
        }
        let served = self.server.next_timeout().filter(|_| self.knows);
        let timers = [self.device.next_timeout(), served];
        let next = timers
            .into_iter()
            .chain([self.link.next_event()])
            .flatten()
            .min();
        let next = next.unwrap_or(until).max(self.now).min(until);
        self.now = next;
        self.device.on_time(next);
        self.server.on_time(next);
        while let Some(segment) = self.link.pop(LinkDirection::Up, next) {
            self.knows = true;
            self.server.on_segment(next, segment);
        }
        while let Some(segment) = self.link.pop(LinkDirection::Down, next) {
            self.device.on_segment(next, segment);
        }
        self.received.extend(self.device.read(next));
        next < until
    }

    fn open(&mut self) {
        let until = Time::ZERO + Span::from_secs(20);
        while !(self.device.is_open() && self.server.is_open()) {
            assert!(self.step(until), "it is not open");
        }
    }
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| (n % 251) as u8).collect()
}

fn s(s: u64) -> Time {
    Time::ZERO + Span::from_secs(s)
}

#[test]
fn bytes_arrive_whole_and_in_order_whatever_the_link_does() {
    for seed in 0..20 {
        let condition = link(|p| {
            p.loss = at_random(0.1);
            (p.reorder, p.reorder_by) = (0.1, Span::from_millis(9));
            (p.duplicate, p.corrupt) = (0.1, 0.05);
        });
        let mut pair = TestPair::new(seed, &condition);
        pair.open();
        let sent = content(500_000);
        pair.server.write(&sent);
        pair.server.close();
        while !pair.device.is_peer_done() {
            assert!(pair.step(s(600)), "seed {seed}: {:?}", pair.server);
        }
        assert!(pair.received == sent, "seed {seed}");
        pair.device.close();
        while pair.device.end().is_none() {
            assert!(pair.step(s(700)), "seed {seed}");
        }
        assert_eq!(pair.device.end(), Some(TcpEnd::Finished));
    }
}

/// Segments in a second of Reno with SACK: the window goes up and down between half and all of
/// √(8/3p), which is √(3/2p) at the mean (Mathis et al. 1997, an ACK for each segment counted).
fn reno(loss: f64, rtt: Span) -> f64 {
    (1.5 / loss).sqrt() / rtt.as_secs_f64()
}

#[test]
fn goodput_under_random_loss_is_that_of_the_formula_for_reno() {
    for loss in [0.005, 0.02] {
        let mut total = 0;
        for seed in 0..5 {
            let mut pair = TestPair::new(seed, &link(|p| p.loss = at_random(loss)));
            pair.open();
            let begin = pair.now;
            pair.server.write(&content(100_000_000));
            while pair.step(begin + Span::from_secs(60)) {}
            total += pair.received.len();
        }
        let segments = total as f64 / SEGMENT_BYTES as f64 / (5.0 * 60.0);
        let expected = reno(loss, Span::from_millis(50));
        let ratio = segments / expected;
        println!("{loss}: {segments:.0} segments a second, the formula says {expected:.0}");
        assert!((0.85..1.15).contains(&ratio), "{loss}: {ratio}");
    }
}

#[test]
fn a_link_without_loss_is_filled() {
    let condition = link(|p| p.rate = Rate::BitsPerSecond(20_000_000));
    let mut pair = TestPair::new(1, &condition);
    pair.open();
    let begin = pair.now;
    pair.server.write(&content(40_000_000));
    while pair.step(begin + Span::from_secs(10)) {}
    // 1,448 of 1,500 bytes are content.
    let share = pair.received.len() as f64 * 8.0 / 10.0 / (20e6 * 1_448.0 / 1_500.0);
    assert!(share > 0.93, "{share}");
}

#[test]
fn a_connection_opens_in_one_round_trip_and_a_lost_syn_costs_a_second() {
    let mut pair = TestPair::new(1, &link(|_| {}));
    while !pair.device.is_open() {
        assert!(pair.step(s(1)));
    }
    let took = pair.now.since(Time::ZERO);
    assert!(
        took >= Span::from_millis(50) && took < Span::from_millis(52),
        "{took:?}"
    );
    let dead = LinkCondition {
        dead: true,
        ..link(|_| {})
    };
    let mut pair = TestPair::new(1, &dead);
    while pair.step(Time::ZERO + Span::from_millis(500)) {}
    pair.link.apply(pair.now, &link(|_| {}));
    while !pair.device.is_open() {
        assert!(pair.step(s(5)));
    }
    assert_eq!(pair.now.since(Time::ZERO).as_millis_f64().round(), 1_050.0);
}

#[test]
fn one_lost_segment_holds_back_those_behind_it_for_a_round_trip() {
    let mut pair = TestPair::new(1, &link(|_| {}));
    pair.open();
    while pair.step(s(1)) {}
    let dead = LinkCondition {
        dead: true,
        ..link(|_| {})
    };
    pair.link.apply(pair.now, &dead);
    let begin = pair.now;
    pair.server.write(&content(SEGMENT_BYTES));
    // It is lost once it has left the queue.
    while pair.step(begin + Span::from_millis(1)) {}
    pair.link.apply(pair.now, &link(|_| {}));
    pair.server.write(&content(8 * SEGMENT_BYTES));
    while pair.received.is_empty() {
        assert!(pair.step(s(9)));
    }
    assert_eq!(pair.received.len(), 9 * SEGMENT_BYTES, "all at once");
    let took = pair.now.since(begin).as_millis_f64();
    // The answer to the second, a quarter of a round trip of patience, and the way once more.
    assert!((75.0..95.0).contains(&took), "{took} ms");
}

#[test]
fn a_lost_tail_is_repeated_after_two_round_trips_and_a_peer_that_is_gone_is_given_up() {
    let mut pair = TestPair::new(1, &link(|_| {}));
    pair.open();
    while pair.step(s(1)) {}
    let dead = LinkCondition {
        dead: true,
        ..link(|_| {})
    };
    pair.link.apply(pair.now, &dead);
    let begin = pair.now;
    pair.server.write(&content(2 * SEGMENT_BYTES));
    while pair.step(begin + Span::from_millis(10)) {}
    pair.link.apply(pair.now, &link(|_| {}));
    while pair.received.len() < 2 * SEGMENT_BYTES {
        assert!(pair.step(s(9)));
    }
    let took = pair.now.since(begin).as_millis_f64();
    // The probe is behind the gap, and its answer shows the gap.
    assert!((150.0..250.0).contains(&took), "{took} ms");
    let acked = pair.now + Span::from_millis(100);
    while pair.step(acked) {}
    pair.link.apply(pair.now, &dead);
    let begin = pair.now;
    pair.server.write(&content(10));
    while pair.server.end().is_none() {
        assert!(pair.step(s(90)));
    }
    assert_eq!(pair.server.end(), Some(TcpEnd::TimedOut));
    assert_eq!(pair.now.since(begin), Span::from_secs(30));
}

#[test]
fn a_smaller_path_is_filled_with_smaller_segments() {
    let mut pair = TestPair::new(1, &link(|_| {}));
    pair.open();
    pair.server.write(&content(100_000));
    pair.step(s(9));
    pair.server.on_too_big(500);
    let mut largest = 0;
    while pair.received.len() < 100_000 {
        while let Some(segment) = pair.server.poll(pair.now) {
            largest = largest.max(segment.bytes.len());
            let size = (HEADER_BYTES + segment.size()) as u32;
            pair.link.push(LinkDirection::Down, pair.now, size, segment);
        }
        assert!(pair.step(s(60)));
    }
    assert_eq!((largest, pair.received), (500, content(100_000)));
}

#[test]
fn segments_that_carry_sack_blocks_have_less_room_for_data() {
    let lossy = link(|profile| profile.loss = at_random(0.03));
    let mut pair = TestPair::new(1, &lossy);
    pair.open();
    pair.server.write(&content(400_000));
    pair.device.write(&content(400_000));
    while pair.received.len() < 400_000 {
        assert!(pair.step(s(90)));
    }
    assert_eq!(pair.received, content(400_000));
}
