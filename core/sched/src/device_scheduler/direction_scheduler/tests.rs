//! One direction of a device, second by second.

use super::*;
use crate::{CostPolicy, DeadlineFallback, FlowDemand, LinkChoice, LinkWaitReason};

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

/// A device, second by second.
struct Device {
    scheduler: DirectionScheduler,
    now: Time,
    carried: BTreeMap<u64, BTreeMap<String, u64>>,
    is_interactive: bool,
}

impl Device {
    fn new() -> Device {
        Device {
            scheduler: DirectionScheduler::new(SchedulerMode::Forecast),
            now: Time::ZERO + Span::from_secs(1_000),
            carried: BTreeMap::new(),
            is_interactive: false,
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
            priority: 0,
            candidates,
            carried,
            uses_several_links: true,
            always_pays: false,
            is_interactive: self.is_interactive,
            keeps_awake: true,
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
    // Both at once, for longer than there was time.
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
    // Another session, which was as fast for half a second.
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
    // It is tried on all the same: there is nothing else.
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
    // While it carries for another client, the fault is not the link's.
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
    // Its origin gets slow; one slow second is none.
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
    // Whoever asks first: the second has not moved yet, but it is its turn.
    for n in [3, 2, 1] {
        let behind = (n > 1).then_some(LinkWaitReason::QueuedBehind);
        assert_eq!(ask(&mut device, n), behind);
    }
    // It never moves; so the third does.
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
    let radio = |device: &&str| RadioStatus {
        device: (*device).to_owned(),
        slot: (*device).to_owned(),
        class: LinkClass::Free,
        carries: true,
        rate: None,
    };
    LinkSurroundings {
        radios: devices.iter().map(radio).collect(),
        ..LinkSurroundings::default()
    }
}

#[test]
fn a_link_that_the_system_has_and_every_transfer_leaves_out_is_away() {
    let mut device = Device::new();
    device.scheduler.observe(device.now, &around(&["wlan0"]));
    assert!(device.scheduler.links.scheduler.links()[0].is_up());
    // It leads to a page to sign in: the transfer does not list it.
    let client = device.scheduler.register(device.now, 0);
    device.wait(1);
    device.ask(client, &need(1_000, 3_600), &[cell()]);
    assert!(!device.scheduler.links.scheduler.links()[0].is_up());
    // Another needs no link and says nothing of them.
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
    // One that brings nothing for a while keeps nobody awake.
    device.wait(60);
    let waits = device.scheduler.waking_clients(device.now);
    assert_eq!((waits.waiting, waits.running), (vec![1, 2], vec![]));
    // Who may pay must begin at some time, who may not never.
    assert_eq!(device.scheduler.latest_start(device.now), None);
    // (One of 2 MB and more would measure the link first, and so not wait.)
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
    // Nor do a few bytes a moment after a report, or what a person types.
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
fn a_program_may_use_a_link_that_costs_from_the_moment_it_is_up() {
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
    let broke = FlowDemand {
        metered_bytes_left: Some(0),
        ..fast
    };
    assert_eq!(device.ask(client, &broke, &[]).grant, Grant::None);
}

#[test]
fn who_has_no_budget_left_lacks_it_only_where_links_that_cost_would_carry_it() {
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
