//! Tests of one direction of a device, second by second.

use super::*;
use crate::{
    CostPolicy, DeadlineFallback, FlowDemand, LinkChoice, LinkWaitReason, ObjectStart, SourceSupply,
};

fn candidate(name: &str, class: LinkClass) -> LinkCandidate {
    LinkCandidate {
        name: name.into(),
        class,
        rate_bytes_per_s: None,
        metric: 0,
        stalled: false,
        in_use: true,
    }
}

fn wifi() -> LinkCandidate {
    candidate("wlan0", LinkClass::Free)
}

fn cell() -> LinkCandidate {
    candidate("wwan0", LinkClass::Metered)
}

fn need(bytes: u64, left_s: u64) -> FlowDemand {
    FlowDemand {
        remaining_bytes: Some(bytes),
        left: Some(Duration::from_secs(left_s)),
        policy: CostPolicy::FreeFirst,
        if_late: DeadlineFallback::Cell,
        metered_bytes_left: None,
    }
}

/// A simulated device with its clients and links, in steps of a second.
struct Device {
    scheduler: DirectionScheduler,
    now: Time,
    carried: BTreeMap<u64, BTreeMap<String, u64>>,
    is_interactive: bool,
    source: SourceSupply,
    priority: u8,
    start: Option<ObjectStart>,
}

impl Device {
    fn new() -> Device {
        Device {
            scheduler: DirectionScheduler::new(SchedulerMode::Forecast),
            now: Time::ZERO + Span::from_secs(1_000),
            carried: BTreeMap::new(),
            is_interactive: false,
            source: SourceSupply::Ample,
            priority: 0,
            start: None,
        }
    }

    fn ask(
        &mut self,
        number: u64,
        need: &FlowDemand,
        candidates: &[LinkCandidate],
    ) -> ClientDecision {
        let carried = self.carried.entry(number).or_default();
        let report = ClientReport {
            demand: need.clone(),
            size_bytes: need.remaining_bytes,
            priority: self.priority,
            start: self.start,
            candidates,
            carried,
            uses_several_links: true,
            always_pays: false,
            is_interactive: self.is_interactive,
            keeps_awake: true,
            source: self.source,
        };
        self.scheduler.decide(self.now, number, &report)
    }

    fn carry(&mut self, number: u64, link: &str, bytes: u64) {
        let links = self.carried.entry(number).or_default();
        *links.entry(link.into()).or_default() += bytes;
    }

    fn wait(&mut self, seconds: u64) {
        self.now += Span::from_secs(seconds);
    }
}

fn waits(decision: &ClientDecision) -> Option<LinkWaitReason> {
    match &decision.choice {
        LinkChoice::Wait { reason, .. } => Some(*reason),
        LinkChoice::Use { .. } => None,
    }
}

#[test]
fn with_a_free_link_hoped_for_nothing_is_paid_early_and_without_time_all_is() {
    let mut device = Device::new();
    let client = device.scheduler.register(device.now, 0);
    let early = device.ask(client, &need(1_000_000, 6 * 3_600), &[cell()]);
    assert!(early.pays_because.is_none(), "{early:?}");
    assert_eq!(waits(&early), Some(LinkWaitReason::PathCost));
    device.wait(1);
    let late = device.ask(client, &need(50_000_000, 10), &[cell()]);
    assert!(late.pays_because.is_some(), "{late:?}");
    assert_eq!(waits(&late), None);
}

#[test]
fn the_first_free_link_takes_the_place_of_the_one_hoped_for() {
    let mut device = Device::new();
    let client = device.scheduler.register(device.now, 0);
    device.ask(client, &need(1_000_000, 100), &[cell()]);
    assert_eq!(device.scheduler.links.names.len(), 2);
    device.ask(client, &need(1_000_000, 100), &[cell(), wifi()]);
    assert_eq!(device.scheduler.links.names.len(), 2);
    assert_eq!(device.scheduler.links.names[0].as_deref(), Some("wlan0"));
    assert!(device.scheduler.links.scheduler.links()[0].carries());
}

#[test]
fn what_came_in_a_moment_is_not_spread_over_the_second() {
    let mut device = Device::new();
    let (one, other) = (
        device.scheduler.register(device.now, 0),
        device.scheduler.register(device.now, 0),
    );
    let ask = |device: &mut Device| {
        for client in [one, other] {
            device.ask(client, &need(50_000_000, 6 * 3_600), &[cell()]);
        }
        let links = device.scheduler.links.scheduler.links();
        links.iter().find_map(|link| link.recent_rate())
    };
    ask(&mut device);
    device.wait(1);
    device.carry(one, "wwan0", 100_000);
    device
        .scheduler
        .record_busy_time(one, "wwan0", Span::from_millis(200));
    assert_eq!(ask(&mut device), Some(500_000.0));
    // Both clients at once report more time than has passed.
    for second in 1..=30 {
        device.wait(1);
        for client in [one, other] {
            device.carry(client, "wwan0", 250_000);
            let busy = Span::from_millis(200 + second * 900);
            device.scheduler.record_busy_time(client, "wwan0", busy);
        }
        ask(&mut device);
    }
    let rate = ask(&mut device).unwrap();
    assert!((495_000.0..510_000.0).contains(&rate), "{rate}");
    // Another session was as fast for half a second.
    let mut fresh = Device::new();
    let client = fresh.scheduler.register(fresh.now, 0);
    fresh.ask(client, &need(50_000_000, 6 * 3_600), &[cell()]);
    for busy_ms in [900, 500] {
        fresh.wait(1);
        fresh.carry(client, "wwan0", busy_ms * 500);
        fresh
            .scheduler
            .record_busy_time(client, "wwan0", Span::from_millis(busy_ms));
        fresh.ask(client, &need(50_000_000, 6 * 3_600), &[cell()]);
        let links = fresh.scheduler.links.scheduler.links();
        let rate = links.iter().find_map(|link| link.recent_rate()).unwrap();
        assert!((rate - 500_000.0).abs() < 1.0, "{rate} after {busy_ms} ms");
    }
}

#[test]
fn rates_are_those_of_all_transfers_together() {
    let mut device = Device::new();
    let (one, other) = (
        device.scheduler.register(device.now, 0),
        device.scheduler.register(device.now, 0),
    );
    for _ in 0..30 {
        device.wait(1);
        for client in [one, other] {
            device.carry(client, "wlan0", 500_000);
            device.ask(client, &need(900_000_000, 6 * 3_600), &[wifi()]);
        }
    }
    let rate = device.scheduler.links.scheduler.links()[0].long_term_rate();
    assert!((900_000.0..1_100_000.0).contains(&rate), "{rate}");
}

#[test]
fn a_link_that_carries_nothing_for_those_on_it_counts_as_away() {
    let mut device = Device::new();
    let client = device.scheduler.register(device.now, 0);
    device.ask(client, &need(1_000, 3_600), &[wifi()]);
    device.wait(1);
    let silent = LinkCandidate {
        stalled: true,
        ..wifi()
    };
    let decision = device.ask(client, &need(1_000, 3_600), std::slice::from_ref(&silent));
    assert!(!device.scheduler.links.scheduler.links()[0].is_up());
    // The link is tried anyway, because there is no other one.
    assert_eq!(waits(&decision), None);
}

#[test]
fn a_link_that_is_silent_for_a_client_counts_as_away_though_an_idle_one_did_not_notice() {
    let mut device = Device::new();
    let [idle, asking] = [0, 1].map(|number| device.scheduler.register(device.now, number));
    let silent = LinkCandidate {
        stalled: true,
        ..wifi()
    };
    let is_up = |device: &Device| device.scheduler.links.scheduler.links()[0].is_up();
    device.ask(idle, &need(1_000, 3_600), &[wifi()]);
    device.wait(1);
    device.ask(asking, &need(1_000, 3_600), std::slice::from_ref(&silent));
    assert!(!is_up(&device));
    // While the link carries for another client, the link is not at fault.
    device.carry(idle, "wlan0", 100_000);
    device.ask(idle, &need(1_000, 3_600), &[wifi()]);
    assert!(is_up(&device));
    device.wait(6);
    device.ask(asking, &need(1_000, 3_600), std::slice::from_ref(&silent));
    assert!(!is_up(&device));
}

#[test]
fn where_time_is_short_the_earliest_deadline_goes_alone_and_else_side_by_side() {
    let mut device = Device::new();
    let clients = [
        device.scheduler.register(device.now, 0),
        device.scheduler.register(device.now, 0),
    ];
    let mut held = [0, 0];
    for _ in 0..20 {
        device.wait(1);
        for (n, client) in clients.into_iter().enumerate() {
            let left_s = [300, 100][n];
            if held[n] == 0 {
                device.carry(client, "wlan0", 1_000_000);
            }
            let need = need(80_000_000, left_s);
            let decision = device.ask(client, &need, &[wifi()]);
            held[n] = usize::from(waits(&decision) == Some(LinkWaitReason::QueuedBehind));
        }
    }
    assert_eq!(held, [1, 0]);
    device.wait(1);
    let patient = need(1_000_000, 36_000);
    device.ask(clients[1], &patient, &[wifi()]);
    for client in clients {
        let decision = device.ask(client, &patient, &[wifi()]);
        assert_eq!(waits(&decision), None);
    }
}

#[test]
fn room_that_the_first_leaves_goes_to_the_next_and_a_newcomer_is_asked_first() {
    let mut device = Device::new();
    let clients = [
        device.scheduler.register(device.now, 0),
        device.scheduler.register(device.now, 0),
    ];
    let step = |device: &mut Device, rate: u64| {
        device.wait(1);
        device.carry(clients[0], "wlan0", rate);
        device.ask(clients[0], &need(80_000_000, 90), &[wifi()]);
        device.ask(clients[1], &need(80_000_000, 100), &[wifi()])
    };
    for _ in 0..20 {
        assert_eq!(
            waits(&step(&mut device, 1_000_000)),
            Some(LinkWaitReason::QueuedBehind)
        );
    }
    // The origin becomes slow; a single slow second does not count.
    step(&mut device, 100_000);
    assert_eq!(
        waits(&step(&mut device, 1_000_000)),
        Some(LinkWaitReason::QueuedBehind)
    );
    for _ in 0..3 {
        step(&mut device, 100_000);
    }
    assert_eq!(waits(&step(&mut device, 100_000)), None);
    device.scheduler.register(device.now, 0);
    assert_eq!(device.scheduler.queue.extra, 0);
}

#[test]
fn when_the_first_ends_the_next_goes_alone_and_not_all_that_waited() {
    let mut device = Device::new();
    let clients = [0, 1, 2, 3].map(|_| device.scheduler.register(device.now, 0));
    let ask = |device: &mut Device, n: usize| {
        let need = need(8_000_000, 10 * (n as u64 + 1));
        waits(&device.ask(clients[n], &need, &[wifi()]))
    };
    for round in 0..10 {
        device.wait(1);
        device.carry(clients[0], "wlan0", 1_000_000);
        for n in [3, 2, 1, 0] {
            let behind = (n > 0).then_some(LinkWaitReason::QueuedBehind);
            let told = ask(&mut device, n);
            assert!(
                round == 0 || told == behind,
                "{n} in round {round}: {told:?}"
            );
        }
    }
    device.scheduler.unregister(clients[0]);
    // In any order of reports: the second has not moved yet, but it is its turn.
    for n in [3, 2, 1] {
        let behind = (n > 1).then_some(LinkWaitReason::QueuedBehind);
        assert_eq!(ask(&mut device, n), behind);
    }
    // The second never moves, so the third does.
    for _ in 0..6 {
        device.wait(1);
        for n in [3, 2, 1] {
            ask(&mut device, n);
        }
    }
    assert_eq!(ask(&mut device, 2), None);
}

#[test]
fn how_large_it_is_is_asked_before_its_turn() {
    let mut device = Device::new();
    let (first, next) = (
        device.scheduler.register(device.now, 0),
        device.scheduler.register(device.now, 0),
    );
    let mut unknown = need(0, 100);
    unknown.remaining_bytes = None;
    for _ in 0..10 {
        device.wait(1);
        device.carry(first, "wlan0", 1_000_000);
        device.ask(first, &need(80_000_000, 90), &[wifi()]);
        assert_eq!(waits(&device.ask(next, &unknown, &[wifi()])), None);
    }
    let known = device.ask(next, &need(80_000_000, 100), &[wifi()]);
    assert_eq!(waits(&known), Some(LinkWaitReason::QueuedBehind));
}

/// The clients that may go after twenty seconds in which those that might go moved. `wants`: demand, priority and start of
/// each.
fn going(wants: &[(FlowDemand, u8, Option<ObjectStart>)], rate: u64) -> Vec<bool> {
    let mut device = Device::new();
    let clients: Vec<u64> = (wants.iter())
        .map(|_| device.scheduler.register(device.now, 0))
        .collect();
    let mut goes = vec![true; wants.len()];
    for second in 1..=20 {
        device.wait(1);
        for (n, (need, priority, start)) in wants.iter().enumerate() {
            if goes[n] {
                device.carry(clients[n], "wlan0", rate);
            }
            (device.priority, device.start) = (*priority, *start);
            let need = FlowDemand {
                left: need.left.map(|left| left - Duration::from_secs(second)),
                ..need.clone()
            };
            let decision = device.ask(clients[n], &need, &[wifi()]);
            goes[n] = waits(&decision) != Some(LinkWaitReason::QueuedBehind);
        }
    }
    goes
}

#[test]
fn while_there_is_time_a_missing_start_goes_before_the_rest_of_those_whose_start_is_here() {
    let (missing, here) = (Some(ObjectStart::Missing), Some(ObjectStart::Here));
    let patient = |left_s| need(40_000_000, left_s);
    // The one with the earlier deadline waits until the other's start is here; one without starts waits for nobody.
    let wants = [
        (patient(36_000), 0, here),
        (patient(72_000), 0, missing),
        (patient(72_000), 0, None),
    ];
    assert_eq!(going(&wants, 2_000_000), [false, true, true]);
    let whole = [
        (patient(36_000), 0, here),
        (patient(72_000), 0, here),
        (patient(72_000), 0, None),
    ];
    assert_eq!(going(&whole, 2_000_000), [true, true, true]);
    // Where time is short, the earliest deadline goes first, whatever is here of it.
    let pressed = [
        (need(80_000_000, 100), 0, here),
        (need(80_000_000, 300), 0, missing),
    ];
    assert_eq!(going(&pressed, 1_000_000), [true, false]);
}

#[test]
fn of_transfers_with_the_same_deadline_the_highest_priority_goes_first() {
    let same = |priority| (need(40_000_000, 36_000), priority, None);
    let wants = [same(0), same(0), same(0), same(0), same(5), same(7)];
    let goes = going(&wants, 2_000_000);
    assert!(goes[4] && goes[5], "{goes:?}");
    assert!(!goes[3], "{goes:?}");
}

#[test]
fn one_that_does_not_move_lets_those_behind_it_go() {
    let mut device = Device::new();
    let (stuck, other) = (
        device.scheduler.register(device.now, 0),
        device.scheduler.register(device.now, 0),
    );
    for _ in 0..8 {
        device.wait(1);
        device.ask(stuck, &need(80_000_000, 90), &[wifi()]);
        device.ask(other, &need(80_000_000, 100), &[wifi()]);
    }
    let decision = device.ask(other, &need(80_000_000, 100), &[wifi()]);
    assert_eq!(waits(&decision), None);
}

fn around(devices: &[&str]) -> LinkSurroundings {
    let usable = |device: &&str| KnownLink {
        device: (*device).to_owned(),
        slot: (*device).to_owned(),
        class: LinkClass::Free,
        carries: true,
        rate: None,
    };
    LinkSurroundings {
        links: devices.iter().map(usable).collect(),
        ..LinkSurroundings::default()
    }
}

#[test]
fn a_link_that_the_system_has_and_every_transfer_leaves_out_is_away() {
    let mut device = Device::new();
    device.scheduler.observe(device.now, &around(&["wlan0"]));
    assert!(device.scheduler.links.scheduler.links()[0].is_up());
    // The link leads to a sign-in page, so the transfer does not list it.
    let client = device.scheduler.register(device.now, 0);
    device.wait(1);
    device.ask(client, &need(1_000, 3_600), &[cell()]);
    assert!(!device.scheduler.links.scheduler.links()[0].is_up());
    // The other client needs no link and does not report any.
    device.scheduler.unregister(client);
    let client = device.scheduler.register(device.now, 0);
    let here = LinkCandidate {
        name: "lo".into(),
        ..wifi()
    };
    device.wait(1);
    device.ask(client, &need(1_000, 3_600), &[here]);
    assert!(device.scheduler.links.scheduler.links()[0].is_up());
}

#[test]
fn who_waits_for_a_link_and_who_moves_are_told_apart() {
    let mut device = Device::new();
    let (waiting, moving) = (
        device.scheduler.register(device.now, 1),
        device.scheduler.register(device.now, 2),
    );
    let patient = FlowDemand {
        policy: CostPolicy::FreeOnly,
        ..need(1_000_000, 3_600)
    };
    device.ask(waiting, &patient, &[cell()]);
    device.ask(moving, &patient, &[wifi(), cell()]);
    let waits = device.scheduler.waking_clients(device.now);
    assert_eq!((waits.waiting, waits.running), (vec![1], vec![2]));
    // A client that carries nothing for a while does not keep the machine awake.
    device.wait(60);
    let waits = device.scheduler.waking_clients(device.now);
    assert_eq!((waits.waiting, waits.running), (vec![1, 2], vec![]));
    // A client that may pay must begin at some time, one that may not never begins.
    assert_eq!(device.scheduler.latest_start(device.now), None);
    // A transfer of 2 MB or more would probe the link first, and so not wait.
    device.ask(waiting, &need(1_000_000, 6 * 3_600), &[cell()]);
    let start = device
        .scheduler
        .latest_start(device.now)
        .expect("it may pay");
    assert!(start < Duration::from_secs(6 * 3_600), "{start:?}");
}

#[test]
fn what_the_device_may_spend_binds_every_transfer() {
    let mut device = Device::new();
    let client = device.scheduler.register(device.now, 0);
    device.scheduler.set_metered_limit(Some(0));
    let decision = device.ask(client, &need(50_000_000, 10), &[cell()]);
    assert!(decision.pays_because.is_none());
    assert_eq!(waits(&decision), Some(LinkWaitReason::OverBudget));
    device.scheduler.set_metered_limit(None);
    let decision = device.ask(client, &need(50_000_000, 10), &[cell()]);
    assert!(decision.pays_because.is_some());
}

#[test]
fn a_pause_of_a_program_does_not_make_a_link_slow() {
    let mut device = Device::new();
    device.is_interactive = true;
    let candidates = [
        LinkCandidate {
            rate_bytes_per_s: Some(1e6),
            ..wifi()
        },
        LinkCandidate {
            rate_bytes_per_s: Some(1e6),
            ..cell()
        },
    ];
    let client = device.scheduler.register(device.now, 0);
    let pays = |device: &mut Device| {
        let decision = device.ask(client, &need(30_000_000, 60), &candidates);
        decision.pays_because.is_some()
    };
    assert!(!pays(&mut device), "the session's word is taken");
    device.wait(3_600);
    device.carry(client, "wlan0", 1_000_000);
    assert!(!pays(&mut device));
    // A few bytes just after a report, or typed input, do not show a slow link either.
    device.carry(client, "wlan0", 60);
    device.now += Span::from_millis(1);
    assert!(!pays(&mut device));
    for second in 1..60 {
        device.wait(1);
        if second % 10 != 0 {
            device.carry(client, "wlan0", 500);
        }
        assert!(!pays(&mut device), "after {second} s");
    }
    // A link that carries little without a pause is slow.
    let mut paid = false;
    for _ in 0..120 {
        device.wait(1);
        device.carry(client, "wlan0", 1_000);
        paid = pays(&mut device);
    }
    assert!(paid);
}

#[test]
fn a_connection_of_known_size_pays_only_for_what_free_links_leave_over() {
    let mut device = Device::new();
    device.is_interactive = true;
    let client = device.scheduler.register(device.now, 0);
    let (size, deadline_s) = (5_000_000, 40);
    let (mut free, mut paid) = (0, 0);
    for second in 0..deadline_s {
        let remaining = size - free - paid;
        if remaining == 0 {
            break;
        }
        let decision = device.ask(
            client,
            &need(remaining, deadline_s - second),
            &[wifi(), cell()],
        );
        let granted = match decision.grant {
            Grant::Spend { up_to } => up_to.unwrap_or(u64::MAX),
            Grant::Probe { bytes } => bytes,
            Grant::None | Grant::Path => 0,
        };
        // The Wi-Fi carries 2 MB until the deadline; cellular could carry all in five seconds.
        let by_wifi = remaining.min(50_000);
        let by_cell = (remaining - by_wifi).min(granted).min(1_000_000);
        device.carry(client, "wlan0", by_wifi);
        device.carry(client, "wwan0", by_cell);
        (free, paid) = (free + by_wifi, paid + by_cell);
        device.wait(1);
    }
    assert_eq!(free + paid, size, "in time");
    assert!(free >= size / 3, "{free} by free links, {paid} paid");
}

#[test]
fn a_sessions_first_request_does_not_make_a_link_slow() {
    // A few bytes of a first answer are 100 kB/s, whatever the link could carry.
    let mut device = Device::new();
    device.is_interactive = true;
    let client = device.scheduler.register(device.now, 0);
    let ask = |device: &mut Device, left_s, candidates: &[LinkCandidate]| {
        let unknown = FlowDemand {
            remaining_bytes: None,
            ..need(1, left_s)
        };
        device.ask(client, &unknown, candidates).grant
    };
    for rate in [1e5, 2e7, 4e6] {
        let known = LinkCandidate {
            rate_bytes_per_s: Some(rate),
            ..wifi()
        };
        ask(&mut device, 40, &[known, cell()]);
        device.now += Span::from_millis(300);
    }
    device.carry(client, "wlan0", 1_000_000);
    let mut left_s = 35;
    while !matches!(ask(&mut device, left_s, &[cell()]), Grant::Spend { .. }) {
        device.wait(1);
        left_s -= 1;
    }
    assert!((10..25).contains(&left_s), "paid with {left_s} s left");
}

#[test]
fn connections_of_programs_are_never_behind_and_hold_nobody_back() {
    let mut device = Device::new();
    device.is_interactive = true;
    let connections: Vec<u64> = (0..20)
        .map(|n| device.scheduler.register(device.now, n))
        .collect();
    let transfer = device.scheduler.register(device.now, 99);
    for _ in 0..10 {
        device.wait(1);
        device.is_interactive = true;
        for connection in &connections {
            device.carry(*connection, "wlan0", 100_000);
            let decision = device.ask(*connection, &need(80_000_000, 90), &[wifi()]);
            assert_eq!(waits(&decision), None);
        }
        device.is_interactive = false;
        let decision = device.ask(transfer, &need(80_000_000, 100), &[wifi()]);
        assert_eq!(waits(&decision), None);
    }
}

#[test]
fn a_program_may_use_a_metered_link_from_the_moment_it_is_up() {
    let mut device = Device::new();
    let client = device.scheduler.register(device.now, 0);
    let fast = FlowDemand {
        policy: CostPolicy::Fast,
        ..need(1_000, 3_600)
    };
    assert_eq!(device.ask(client, &fast, &[]).grant, Grant::None);
    device.is_interactive = true;
    let spends = Grant::Spend { up_to: None };
    assert_eq!(device.ask(client, &fast, &[]).grant, spends);
    let patient = FlowDemand {
        policy: CostPolicy::FreeOnly,
        ..fast.clone()
    };
    assert_eq!(device.ask(client, &patient, &[]).grant, Grant::None);
    // A free link may come up together with the metered one.
    let any = FlowDemand {
        policy: CostPolicy::Any,
        ..fast.clone()
    };
    assert_eq!(device.ask(client, &any, &[]).grant, Grant::None);
    assert_eq!(device.ask(client, &any, &[cell()]).grant, spends);
    let broke = FlowDemand {
        metered_bytes_left: Some(0),
        ..fast
    };
    assert_eq!(device.ask(client, &broke, &[]).grant, Grant::None);
}

#[test]
fn who_has_no_budget_left_lacks_it_only_where_metered_links_would_carry_it() {
    let mut device = Device::new();
    let client = device.scheduler.register(device.now, 0);
    let mut lacks = |policy, left| {
        let demand = FlowDemand {
            policy,
            metered_bytes_left: left,
            ..need(50_000_000, 10)
        };
        device.ask(client, &demand, &[cell()]).lacks_budget
    };
    assert!(lacks(CostPolicy::Fast, Some(0)));
    assert!(lacks(CostPolicy::FreeFirst, Some(0)));
    assert!(!lacks(CostPolicy::FreeOnly, Some(0)));
    assert!(!lacks(CostPolicy::Fast, Some(1)));
    assert!(!lacks(CostPolicy::Fast, None));
}

/// A download of 200 MB in an hour from a server that sends 50 kB/s, second by second, beside a free
/// and a metered link. Returns the last decision for it.
fn slow_server(device: &mut Device, client: u64, seconds: u64) -> ClientDecision {
    let links = [wifi(), cell()];
    let mut left_s = 3_600;
    let mut decision = device.ask(client, &need(200_000_000, left_s), &links);
    for second in 0..seconds {
        device.source = match second {
            0 | 1 => SourceSupply::Unknown,
            _ => SourceSupply::Limited {
                bytes_per_s: 50_000.0,
            },
        };
        device.wait(1);
        left_s -= 1;
        device.carry(client, "wlan0", 50_000);
        decision = device.ask(client, &need(200_000_000, left_s), &links);
        assert_eq!(decision.grant, Grant::None, "after {second} s");
    }
    decision
}

#[test]
fn a_slow_server_is_no_reason_to_pay_and_is_named() {
    let mut device = Device::new();
    device.source = SourceSupply::Unknown;
    let client = device.scheduler.register(device.now, 0);
    let decision = slow_server(&mut device, client, 30);
    let LinkChoice::Use { why, .. } = &decision.choice else {
        panic!("{decision:?}");
    };
    let expected = "wlan0 is free; the server sends 50 kB/s, so mobile data would not help";
    assert_eq!(why, expected);
    let promise = device.scheduler.promise(device.now, client).unwrap();
    assert!(promise.ready < 0.5, "{promise:?}");
}

#[test]
fn a_slow_server_is_not_taken_for_a_slow_link() {
    let mut device = Device::new();
    device.source = SourceSupply::Unknown;
    let client = device.scheduler.register(device.now, 0);
    slow_server(&mut device, client, 30);
    let link = &device.scheduler.links.scheduler.links()[0];
    assert!(link.long_term_rate() > 500_000.0, "{link:?}");
    // Once the server is fast, what is carried counts.
    device.source = SourceSupply::Ample;
    for _ in 0..60 {
        device.wait(1);
        device.carry(client, "wlan0", 100_000);
        device.ask(client, &need(200_000_000, 3_000), &[wifi(), cell()]);
    }
    let rate = device.scheduler.links.scheduler.links()[0].long_term_rate();
    assert!((90_000.0..110_000.0).contains(&rate), "{rate}");
}

#[test]
fn nobody_waits_behind_a_transfer_whose_server_is_slow() {
    let mut device = Device::new();
    device.source = SourceSupply::Unknown;
    let first = device.scheduler.register(device.now, 0);
    slow_server(&mut device, first, 10);
    device.source = SourceSupply::Unknown;
    let other = device.scheduler.register(device.now, 0);
    // More than is left over beside the first, by what is assumed of the link.
    let demand = need(6_000_000_000, 3_700);
    let decision = device.ask(other, &demand, &[wifi(), cell()]);
    assert_eq!(waits(&decision), None, "{decision:?}");
}

#[test]
fn nothing_is_promised_while_the_server_refuses() {
    let mut device = Device::new();
    let client = device.scheduler.register(device.now, 7);
    device.ask(client, &need(1_000_000, 600), &[wifi()]);
    assert!(device.scheduler.promise(device.now, client).is_some());
    device.scheduler.set_refused(client, true);
    assert_eq!(device.scheduler.promise(device.now, client), None);
    assert_eq!(device.scheduler.promise_of(device.now, 7), None);
    device.scheduler.set_refused(client, false);
    assert!(device.scheduler.promise_of(device.now, 7).is_some());
}
