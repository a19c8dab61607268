//! Turns on an air in virtual time: what two stations send at once nobody understands, and who sends hears nothing.

use super::*;
use crate::delimiter::{Delimited, FrameReader};
use crate::fragments::{Reassembled, Reassembly};

const BRIDGE: usize = 0;

/// Packets that wait for a station at most, in bytes.
const QUEUE_BYTES: usize = 4_800;

/// A frame on the air.
struct Transmission {
    from: usize,
    ends: Instant,
    bytes: Vec<u8>,
    is_garbled: bool,
}

/// A station of the air: the bridge, or a mobile.
struct AirStation {
    turns: LineTurns,
    queue: FairQueue,
    reader: FrameReader,
    reassembly: Reassembly,
    /// Whether the station is on: else it neither hears nor sends.
    is_on: bool,
    wake_at: Option<Instant>,
}

/// An air with a bridge and mobiles that hear the bridge, and each other where `hears_all`.
struct TestAir {
    line: SerialLine,
    now: Instant,
    stations: Vec<AirStation>,
    transmissions: Vec<Transmission>,
    hears_all: bool,
    /// How many of a thousand frames noise destroys.
    noise: u64,
    seed: u64,
    /// Packets that arrived: the receiver, and the bytes.
    arrived: Vec<(usize, Vec<u8>)>,
    out_of_turn: u64,
    collisions: u64,
}

fn address(mobile: usize) -> StationAddress {
    StationAddress(0x100 + mobile as u16)
}

impl TestAir {
    fn new(line: &str, mobiles: usize) -> TestAir {
        let line: SerialLine = line.parse().unwrap();
        let now = Instant::now();
        let station = |n: usize| {
            let role = match n == BRIDGE {
                true => StationRole::Bridge,
                false => StationRole::Mobile,
            };
            AirStation {
                turns: LineTurns::new(&line, role, now),
                queue: FairQueue::new(QUEUE_BYTES),
                reader: FrameReader::new(line.framing.clone()),
                reassembly: Reassembly::default(),
                is_on: true,
                wake_at: Some(now),
            }
        };
        TestAir {
            stations: (0..=mobiles).map(station).collect(),
            line,
            now,
            transmissions: Vec::new(),
            hears_all: false,
            noise: 0,
            seed: 1,
            arrived: Vec::new(),
            out_of_turn: 0,
            collisions: 0,
        }
    }

    fn random(&mut self) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.seed >> 33
    }

    /// Queues a packet of a mobile, or of the bridge for it. False if the queue is full.
    fn send(&mut self, from: usize, mobile: usize, packet: &[u8]) -> bool {
        let (now, station) = (self.now, &mut self.stations[from]);
        let queued = station.queue.push(address(mobile), packet.to_vec()).is_ok();
        if queued {
            station.turns.on_queued(address(mobile));
            station.wake_at = Some(now);
        }
        queued
    }

    /// Whether a station is sending.
    fn is_sending(&self, station: usize) -> bool {
        self.transmissions.iter().any(|sent| sent.from == station)
    }

    /// Lets every station do what it can now.
    fn act(&mut self) {
        for n in 0..self.stations.len() {
            let is_due = self.stations[n].wake_at.is_some_and(|at| at <= self.now);
            if !self.stations[n].is_on || !is_due || self.is_sending(n) {
                continue;
            }
            let station = &mut self.stations[n];
            match station.turns.step(self.now, &mut station.queue) {
                LineStep::Wait(until) => station.wake_at = until,
                LineStep::Send(frame) => {
                    station.wake_at = Some(self.now);
                    let collides = !self.transmissions.is_empty();
                    self.collisions += u64::from(collides);
                    for other in &mut self.transmissions {
                        other.is_garbled = true;
                    }
                    let is_hit = self.random() % 1_000 < self.noise;
                    self.transmissions.push(Transmission {
                        from: n,
                        ends: self.now + self.line.time_of(frame.bytes.len()),
                        bytes: frame.bytes,
                        is_garbled: collides || is_hit,
                    });
                }
            }
        }
    }

    /// Goes on to the next event, or to this time.
    fn advance(&mut self, until: Instant) {
        let ends = self.transmissions.iter().map(|sent| sent.ends);
        let sending: Vec<usize> = self.transmissions.iter().map(|sent| sent.from).collect();
        let stations = self.stations.iter().enumerate();
        let idle = stations.filter(|(n, station)| station.is_on && !sending.contains(n));
        let wakes = idle.filter_map(|(_, station)| station.wake_at);
        let next = ends.chain(wakes).min().unwrap_or(until);
        self.now = self.now.max(next.min(until));
        let mut over = Vec::new();
        let now = self.now;
        self.transmissions.retain_mut(|sent| {
            let is_over = sent.ends <= now;
            if is_over {
                over.push((sent.from, std::mem::take(&mut sent.bytes), sent.is_garbled));
            }
            !is_over
        });
        for (from, mut bytes, is_garbled) in over {
            if is_garbled {
                let at = bytes.len() / 2;
                bytes[at] ^= 0x15;
            }
            for to in 0..self.stations.len() {
                let hears = from == BRIDGE || to == BRIDGE || self.hears_all;
                if to != from && hears && self.stations[to].is_on && !self.is_sending(to) {
                    self.hear(to, &bytes);
                }
            }
        }
    }

    fn hear(&mut self, to: usize, bytes: &[u8]) {
        let now = self.now;
        let draw = self.random() as u8;
        let station = &mut self.stations[to];
        station.wake_at = Some(now);
        station.turns.on_heard(now);
        let mut found = Vec::new();
        station
            .reader
            .read(bytes, |delimited| found.push(delimited));
        for delimited in found {
            let Delimited::Frame(content) = delimited else {
                station.turns.on_noise();
                continue;
            };
            let Ok(frame) = LinkFrame::decode(&content) else {
                station.turns.on_noise();
                continue;
            };
            if frame.from_bridge == (to == BRIDGE) {
                continue;
            }
            match station.turns.on_frame(now, &frame, content.len(), draw) {
                FrameUse::Turn => continue,
                FrameUse::OutOfTurn => {
                    self.out_of_turn += 1;
                    continue;
                }
                FrameUse::Packet => {}
            }
            let packet = match frame.body {
                FrameBody::Whole(packet) => packet.to_vec(),
                FrameBody::Fragment(part) => {
                    match station.reassembly.on_fragment(now, frame.address, part) {
                        Reassembled::Packet(packet) => packet,
                        _ => continue,
                    }
                }
                _ => continue,
            };
            if to == BRIDGE || frame.address == address(to) {
                self.arrived.push((to, packet));
            }
        }
    }

    fn run_until(&mut self, until: Instant) {
        while self.now < until {
            self.act();
            self.advance(until);
        }
    }

    fn run_for(&mut self, time: Duration) {
        self.run_until(self.now + time);
    }

    fn take_arrived(&mut self) -> Vec<(usize, Vec<u8>)> {
        std::mem::take(&mut self.arrived)
    }
}

/// A packet of a mobile: its number, that of the packet, and a pattern.
fn packet(mobile: usize, number: u32, bytes: usize) -> Vec<u8> {
    let mut packet = vec![mobile as u8];
    packet.extend(number.to_be_bytes());
    packet.extend((5..bytes).map(|n| (n as u32 * 7 + number) as u8));
    packet
}

fn assert_whole(packet: &[u8]) {
    let number = u32::from_be_bytes(packet[1..5].try_into().unwrap());
    assert_eq!(packet, self::packet(packet[0].into(), number, packet.len()));
}

#[test]
fn mobiles_that_do_not_hear_each_other_have_equal_shares_and_none_collides() {
    let mut air = TestAir::new("serial:/dev/x@9600,polled", 3);
    let (mut sent, mut bytes) = ([0; 4], [0; 4]);
    let began = air.now;
    while air.now < began + Duration::from_secs(120) {
        for mobile in 1..=3 {
            // One sends large packets, one small ones.
            let size = [0, 1_200, 90, 400][mobile];
            while air.send(mobile, mobile, &packet(mobile, sent[mobile], size)) {
                sent[mobile] += 1;
            }
        }
        air.run_for(Duration::from_millis(200));
        for (to, packet) in air.take_arrived() {
            assert_eq!(to, BRIDGE);
            assert_whole(&packet);
            bytes[usize::from(packet[0])] += packet.len();
        }
    }
    let all: usize = bytes.iter().sum();
    // 960 bytes a second.
    assert!(all > 70_000, "{bytes:?}");
    for mobile in 1..=3 {
        let share = bytes[mobile] as f64 * 3.0 / all as f64;
        assert!((0.75..1.3).contains(&share), "{bytes:?}");
    }
    // Newcomers answer invitations at the same time, some times.
    assert!(air.collisions < 10, "{} collisions", air.collisions);
    assert_eq!(air.out_of_turn, 0);
}

#[test]
fn without_turns_mobiles_that_do_not_hear_each_other_destroy_what_they_send() {
    let mut air = TestAir::new("serial:/dev/x@9600", 3);
    let (mut sent, mut arrived) = ([0; 4], 0);
    let began = air.now;
    while air.now < began + Duration::from_secs(60) {
        for (mobile, sent) in sent.iter_mut().enumerate().skip(1) {
            while air.send(mobile, mobile, &packet(mobile, *sent, 400)) {
                *sent += 1;
            }
        }
        air.run_for(Duration::from_millis(200));
        arrived += air.take_arrived().len();
    }
    assert!(air.collisions > 100);
    assert!(arrived < 10, "{arrived}");
}

#[test]
fn a_mobile_that_begins_is_heard_within_seconds_and_an_idle_air_is_almost_silent() {
    for (line, seconds) in [
        ("serial:/dev/x@115200,polled", 2),
        ("serial:/dev/x@9600,polled", 3),
        ("kiss:/dev/x@1200,N0CALL,polled", 12),
        ("serial:/dev/x@300,polled", 40),
    ] {
        let mut air = TestAir::new(line, 2);
        air.run_for(Duration::from_secs(60));
        assert!(air.take_arrived().is_empty());
        for number in 0..3 {
            let began = air.now;
            assert!(air.send(1, 1, &packet(1, number, 60)));
            while air.arrived.is_empty() {
                air.run_for(Duration::from_millis(100));
                let took = air.now.duration_since(began);
                assert!(took < Duration::from_secs(seconds), "{line}: {took:?}");
            }
            let arrived = air.take_arrived();
            assert_eq!(arrived, [(BRIDGE, packet(1, number, 60))], "{line}");
            // The answer, and its answer, need no invitation.
            assert!(air.send(BRIDGE, 1, &packet(1, 100, 60)));
            air.run_for(Duration::from_secs(seconds));
            assert_eq!(air.take_arrived(), [(1, packet(1, 100, 60))], "{line}");
            air.run_for(Duration::from_secs(60));
        }
        assert_eq!(air.collisions, 0);
    }
}

#[test]
fn a_mobile_that_sends_more_than_its_turn_gains_nothing_by_it() {
    let mut air = TestAir::new("serial:/dev/x@9600,polled", 2);
    // The first mobile does not know of turns, and a radio that is louder has its frames understood.
    let line: SerialLine = "serial:/dev/x@9600".parse().unwrap();
    let mut talker = PacketFramer::new(&line, StationRole::Mobile);
    let LineTurns::Leader(leader) = &mut air.stations[BRIDGE].turns else {
        panic!("the bridge polls");
    };
    let (mut passed, mut dropped) = (0, 0);
    let mut now = air.now;
    for round in 0..200 {
        for number in 0..10 {
            for framed in talker.frames(address(1), &packet(1, round * 10 + number, 150)) {
                let content = cobs::decode_vec(&framed[1..framed.len() - 1]).unwrap();
                let frame = LinkFrame::decode(&content).unwrap();
                match leader.on_frame(now, &frame, content.len()) {
                    FrameUse::Packet => passed += 1,
                    FrameUse::OutOfTurn => dropped += 1,
                    FrameUse::Turn => panic!("a packet"),
                }
            }
        }
        now += line.time_of(300);
        // Another one that is polled in turn meanwhile.
        let end = LinkFrame {
            from_bridge: false,
            address: address(2),
            body: FrameBody::TurnEnd { waiting: 100 },
        };
        leader.on_frame(now, &end, 9);
        let mut queue = FairQueue::new(QUEUE_BYTES);
        leader.step(now, &mut queue);
    }
    // A turn has room for three of these frames.
    assert!(passed <= 3 * 200, "{passed} passed, {dropped} dropped");
    assert_eq!(passed + dropped, 2_000);
    assert!(leader.stations.contains_key(&address(2)));
}

#[test]
fn a_mobile_that_hears_polls_waits_for_its_turn_and_sends_freely_when_they_end() {
    let line: SerialLine = "serial:/dev/x@9600,half-duplex".parse().unwrap();
    let mut now = Instant::now();
    let mut turns = StationTurns::new(&line, StationRole::Mobile);
    let mut queue = FairQueue::new(QUEUE_BYTES);
    let push = |queue: &mut FairQueue, turns: &mut StationTurns| {
        queue.push(address(1), vec![1; 50]).unwrap();
        turns.own(address(1));
    };
    push(&mut queue, &mut turns);
    let first = turns.step(now, &mut queue);
    assert!(matches!(first, LineStep::Send(frame) if frame.listens_first));
    push(&mut queue, &mut turns);
    let poll = |to: u16| LinkFrame {
        from_bridge: true,
        address: StationAddress(to),
        body: FrameBody::Poll { bytes: 300 },
    };
    turns.on_frame(now, &poll(7), 0);
    let waits = turns.step(now, &mut queue);
    assert_eq!(waits, LineStep::Wait(Some(now + LED_TIME)));
    turns.on_frame(now, &poll(0x101), 0);
    let sends = turns.step(now, &mut queue);
    assert!(matches!(sends, LineStep::Send(frame) if !frame.listens_first && frame.ends_packet));
    // The end of the turn.
    assert!(matches!(turns.step(now, &mut queue), LineStep::Send(_)));
    push(&mut queue, &mut turns);
    assert!(matches!(turns.step(now, &mut queue), LineStep::Wait(_)));
    now += LED_TIME;
    let free = turns.step(now, &mut queue);
    assert!(matches!(free, LineStep::Send(frame) if frame.listens_first));
}

/// What happened in a soak.
#[derive(Debug, Default)]
struct SoakFigures {
    /// Bytes of each mobile that arrived at the bridge.
    bytes: Vec<u64>,
    /// Packets of quiet mobiles that were sent, and that arrived.
    quiet: (u64, u64),
    /// The longest time that a packet of a quiet mobile took, but for noise.
    slowest: Duration,
}

/// The bridge for so many seconds at 9,600 bit/s: three mobiles that always send, two that send seldom, one that goes and comes. Noise
/// hits a fiftieth of all frames, and everything for twenty seconds in each thousand.
fn soak(seconds: u64) -> SoakFigures {
    const GREEDY: std::ops::RangeInclusive<usize> = 1..=3;
    const QUIET: std::ops::RangeInclusive<usize> = 4..=5;
    const VISITOR: usize = 6;
    let mut air = TestAir::new("serial:/dev/x@9600,polled", VISITOR);
    let mut figures = SoakFigures {
        bytes: vec![0; VISITOR + 1],
        ..SoakFigures::default()
    };
    let mut sent = [0_u32; VISITOR + 1];
    let mut waiting: BTreeMap<(usize, u32), Instant> = BTreeMap::new();
    let began = air.now;
    for second in 0..seconds {
        let is_burst = second % 1_000 < 20;
        air.noise = if is_burst { 1_000 } else { 20 };
        air.stations[VISITOR].is_on = second % 900 < 450;
        if air.stations[VISITOR].is_on && air.stations[VISITOR].wake_at.is_none() {
            air.stations[VISITOR].wake_at = Some(air.now);
        }
        for mobile in GREEDY.chain([VISITOR]) {
            while air.send(mobile, mobile, &packet(mobile, sent[mobile], 700)) {
                sent[mobile] += 1;
            }
        }
        for mobile in QUIET {
            if second % 15 == mobile as u64 {
                figures.quiet.0 += 1;
                waiting.insert((mobile, sent[mobile]), air.now);
                assert!(air.send(mobile, mobile, &packet(mobile, sent[mobile], 80)));
                sent[mobile] += 1;
            }
        }
        air.run_until(began + Duration::from_secs(second + 1));
        for (to, packet) in air.take_arrived() {
            assert_whole(&packet);
            let mobile = usize::from(packet[0]);
            if to != BRIDGE {
                continue;
            }
            figures.bytes[mobile] += packet.len() as u64;
            let number = u32::from_be_bytes(packet[1..5].try_into().unwrap());
            if let Some(at) = waiting.remove(&(mobile, number)) {
                figures.quiet.1 += 1;
                let took = air.now.duration_since(at);
                let began_at = at.duration_since(began).as_secs() % 1_000;
                if (25..960).contains(&began_at) {
                    figures.slowest = figures.slowest.max(took);
                }
            }
            // What a server answers.
            let answer = self::packet(mobile, number, 60);
            air.send(BRIDGE, mobile, &answer);
        }
        let LineTurns::Leader(leader) = &air.stations[BRIDGE].turns else {
            panic!("the bridge polls");
        };
        assert!(leader.stations.len() <= VISITOR && leader.begun.len() <= 8);
        assert!(air.stations[BRIDGE].queue.bytes() <= (VISITOR + 1) * QUEUE_BYTES);
        waiting.retain(|_, at| air.now.duration_since(*at) < Duration::from_secs(300));
    }
    figures
}

fn assert_soak(figures: &SoakFigures, seconds: u64) {
    let SoakFigures { bytes, quiet, .. } = figures;
    let greedy = &bytes[1..=3];
    let sum: u64 = greedy.iter().sum();
    let squares: f64 = greedy.iter().map(|b| (*b as f64).powi(2)).sum();
    let jain = (sum as f64).powi(2) / (3.0 * squares);
    assert!(jain > 0.98, "{figures:?}");
    let all: u64 = bytes.iter().sum();
    let share = all as f64 / (seconds as f64 * 960.0);
    assert!(share > 0.55, "{share} of the line: {figures:?}");
    // A fiftieth of all frames is lost, and a packet of 80 bytes is one.
    let arrived = quiet.1 as f64 / quiet.0 as f64;
    assert!(arrived > 0.9, "{figures:?}");
    assert!(figures.slowest < Duration::from_secs(30), "{figures:?}");
    println!(
        "{seconds} s: {:.1} % of the line, Jain's index {jain:.4}, {:.1} % of a quiet mobile's packets, the slowest {:?}",
        share * 100.0,
        arrived * 100.0,
        figures.slowest
    );
}

#[test]
fn half_an_hour_of_a_polled_air_in_virtual_time() {
    assert_soak(&soak(1_800), 1_800);
}

#[test]
#[ignore = "six hours in virtual time"]
fn six_hours_of_a_polled_air_in_virtual_time() {
    assert_soak(&soak(21_600), 21_600);
}
