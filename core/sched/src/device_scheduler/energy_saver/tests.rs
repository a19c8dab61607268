use super::*;
use crate::{
    CostPolicy, DeadlineFallback, DeviceScheduler, FlowDemand, SchedulerKind, SourceSupply,
    TransferDirection,
};
use proptest::prelude::*;

const BATTERY: PowerSource = PowerSource::Battery { percent: Some(40) };

/// A radio like Wi-Fi.
const FRUGAL: RadioPowerModel = RadioPowerModel {
    wake_joules: 0.0,
    work_watts: 0.2,
    byte_joules: 0.0,
    tail_joules: 0.1,
};
/// A radio like LTE, with a long tail.
const HUNGRY: RadioPowerModel = RadioPowerModel {
    wake_joules: 0.3,
    work_watts: 1.3,
    byte_joules: 0.0,
    tail_joules: 12.0,
};

fn link(name: &str, class: LinkClass) -> LinkCandidate {
    LinkCandidate {
        name: name.into(),
        class,
        rate_bytes_per_s: None,
        metric: 0,
        stalled: false,
        in_use: false,
    }
}

/// A device with a frugal `wlan0` and a hungry `wwan0`, of which the given ones are up, and its clients.
struct Device {
    scheduler: DeviceScheduler,
    now: Time,
    links: Vec<(LinkCandidate, u64)>,
}

/// A download of the device.
struct Download {
    id: ClientId,
    left: Option<Duration>,
    due: Option<Time>,
    policy: CostPolicy,
    remaining: u64,
    together: bool,
    carried: BTreeMap<String, u64>,
}

impl Device {
    /// Links with their classes, and the bytes that each carries in a second.
    fn new(saving: EnergySaving, power: PowerSource, links: &[(&str, LinkClass, u64)]) -> Device {
        let mut scheduler = DeviceScheduler::new(SchedulerKind::D2Sched);
        scheduler.set_energy_saving(saving);
        scheduler.set_power_source(power);
        let radios = [("wlan0".to_owned(), FRUGAL), ("wwan0".to_owned(), HUNGRY)];
        scheduler.set_radio_power(radios.into(), Some(FRUGAL));
        let links = links
            .iter()
            .map(|(name, class, rate)| (link(name, *class), *rate));
        Device {
            scheduler,
            now: Time::ZERO + Span::from_secs(1),
            links: links.collect(),
        }
    }

    fn download(&mut self, remaining: u64, left_s: Option<u64>) -> Download {
        let left = left_s.map(Duration::from_secs);
        Download {
            id: (self.scheduler).join(self.now, TransferDirection::Down, 1),
            left,
            due: left.map(|left| self.now + left.into()),
            policy: CostPolicy::Any,
            remaining,
            together: true,
            carried: BTreeMap::new(),
        }
    }

    /// A second passes in which the links carry what the decision allows.
    fn second(&mut self, download: &mut Download) -> ClientDecision {
        let candidates: Vec<LinkCandidate> = self.links.iter().map(|(l, _)| l.clone()).collect();
        download.left = download.due.map(|due| due.since(self.now).into());
        let report = ClientReport {
            demand: FlowDemand {
                remaining_bytes: Some(download.remaining),
                left: download.left,
                policy: download.policy,
                if_late: DeadlineFallback::Cell,
                metered_bytes_left: None,
            },
            size_bytes: None,
            priority: 0,
            start: None,
            candidates: &candidates,
            carried: &download.carried,
            uses_several_links: download.together,
            always_pays: false,
            is_interactive: false,
            keeps_awake: true,
            source: SourceSupply::Ample,
        };
        let decision = self.scheduler.decide(self.now, download.id, &report);
        for (n, (link, rate)) in self.links.iter_mut().enumerate() {
            let chosen = matches!(decision.choice, LinkChoice::Use { index, .. } if index == n);
            let is_paid = matches!(decision.grant, Grant::Spend { .. });
            let carries = match link.class {
                LinkClass::Free => download.together || chosen,
                _ => is_paid && (download.together || chosen),
            };
            let carries = carries
                && matches!(decision.choice, LinkChoice::Use { .. })
                && !decision.resting.contains(&link.name);
            link.in_use = carries;
            if carries {
                let bytes = (*rate).min(download.remaining);
                download.remaining -= bytes;
                *download.carried.entry(link.name.clone()).or_default() += bytes;
            }
        }
        self.now += Span::from_secs(1);
        decision
    }

    fn seconds(&mut self, count: u32, download: &mut Download) -> ClientDecision {
        let mut last = self.second(download);
        for _ in 1..count {
            last = self.second(download);
        }
        last
    }
}

const BOTH: [(&str, LinkClass, u64); 2] = [
    ("wlan0", LinkClass::Free, 1_000_000),
    ("wwan0", LinkClass::Free, 500_000),
];

fn why(decision: &ClientDecision) -> String {
    match &decision.choice {
        LinkChoice::Use { why, .. } => why.clone(),
        LinkChoice::Wait { why, unblocks, .. } => format!("{why} | {unblocks}"),
    }
}

#[test]
fn on_battery_with_time_left_the_hungry_link_rests_and_the_reason_is_told() {
    let mut device = Device::new(EnergySaving::Auto, BATTERY, &BOTH);
    let mut download = device.download(500_000_000, Some(7_200));
    let decision = device.seconds(60, &mut download);
    assert_eq!(decision.resting, BTreeSet::from(["wwan0".to_owned()]));
    let told = why(&decision);
    assert!(
        told.contains("wwan0 rests to save energy (battery, 40 %)"),
        "{told}"
    );
    let tried = download.carried.get("wwan0").copied().unwrap_or(0);
    assert!(
        tried < download.carried["wlan0"] / 20,
        "{:?}",
        download.carried
    );
}

#[test]
fn on_mains_without_a_battery_and_without_saving_no_link_rests() {
    for (saving, power) in [
        (EnergySaving::Auto, PowerSource::External),
        (EnergySaving::Auto, PowerSource::Unknown),
        (EnergySaving::Never, BATTERY),
    ] {
        let mut device = Device::new(saving, power, &BOTH);
        let mut download = device.download(500_000_000, Some(7_200));
        let decision = device.seconds(30, &mut download);
        assert_eq!(decision.resting, BTreeSet::new(), "{saving} {power}");
        assert_eq!(download.carried["wwan0"], 30 * 500_000, "{saving} {power}");
    }
}

#[test]
fn a_deadline_that_needs_both_links_goes_before_energy() {
    let mut device = Device::new(EnergySaving::Always, BATTERY, &BOTH);
    // Both together need 267 s, and Wi-Fi alone 400.
    let mut download = device.download(400_000_000, Some(300));
    for second in 0..280 {
        let decision = device.second(&mut download);
        // In the end Wi-Fi alone is enough.
        let rests = !decision.resting.is_empty();
        assert!(!rests || second > 200, "{second} s: {decision:?}");
    }
    assert_eq!(download.remaining, 0, "{:?}", download.carried);
}

#[test]
fn when_the_time_becomes_short_what_rested_is_used_again() {
    let mut device = Device::new(EnergySaving::Always, BATTERY, &BOTH);
    let mut download = device.download(600_000_000, Some(3_600));
    assert!(!device.seconds(30, &mut download).resting.is_empty());
    device.links[0].1 = 50_000;
    device.seconds(3_000, &mut download);
    assert_eq!(download.remaining, 0, "{:?}", download.carried);
}

#[test]
fn without_a_deadline_it_rests_only_if_energy_is_always_saved() {
    for (saving, rests) in [(EnergySaving::Auto, false), (EnergySaving::Always, true)] {
        let mut device = Device::new(saving, BATTERY, &BOTH);
        let mut download = device.download(500_000_000, None);
        let decision = device.seconds(30, &mut download);
        assert_eq!(!decision.resting.is_empty(), rests, "{saving}");
    }
}

#[test]
fn a_client_that_does_not_save_keeps_the_links_of_all_awake() {
    let mut device = Device::new(EnergySaving::Always, BATTERY, &BOTH);
    let mut saving = device.download(500_000_000, None);
    assert!(!device.seconds(10, &mut saving).resting.is_empty());
    let mut urgent = device.download(500_000_000, None);
    (device.scheduler).set_client_energy_saving(urgent.id, Some(EnergySaving::Never));
    assert!(device.second(&mut urgent).resting.is_empty());
    assert!(device.second(&mut saving).resting.is_empty());
    device.scheduler.leave(urgent.id);
    assert!(!device.seconds(10, &mut saving).resting.is_empty());
}

#[test]
fn energy_never_spends_on_a_metered_link_that_was_not_granted() {
    // The Wi-Fi is so slow that cellular has more bits per joule by far.
    let links = [
        ("wlan0", LinkClass::Free, 20_000),
        ("wwan0", LinkClass::Metered, 5_000_000),
    ];
    let mut device = Device::new(EnergySaving::Always, BATTERY, &links);
    let mut download = device.download(100_000_000, Some(36_000));
    download.policy = CostPolicy::FreeOnly;
    for _ in 0..60 {
        let decision = device.second(&mut download);
        assert_eq!(decision.grant, Grant::None);
        assert!(!decision.resting.contains("wlan0"), "{decision:?}");
    }
}

#[test]
fn a_granted_metered_link_may_rest_and_then_the_grant_is_withheld() {
    let links = [
        ("wlan0", LinkClass::Free, 1_000_000),
        ("wwan0", LinkClass::Metered, 200_000),
    ];
    let mut device = Device::new(EnergySaving::Always, BATTERY, &links);
    let mut download = device.download(500_000_000, None);
    download.policy = CostPolicy::Fast;
    let decision = device.seconds(30, &mut download);
    assert_eq!(decision.resting, BTreeSet::from(["wwan0".to_owned()]));
    assert_eq!((decision.grant, decision.pays_because), (Grant::None, None));
}

/// Cellular, which the policy `any` pays for.
const CELL_ALONE: [(&str, LinkClass, u64); 1] = [("wwan0", LinkClass::Metered, 500_000)];

#[test]
fn with_much_time_a_download_waits_for_wifi_and_says_when_it_begins() {
    let mut device = Device::new(EnergySaving::Auto, BATTERY, &CELL_ALONE);
    let mut download = device.download(20_000_000, Some(6 * 3_600));
    let decision = device.second(&mut download);
    let LinkChoice::Wait { reason, .. } = &decision.choice else {
        panic!("{decision:?}");
    };
    assert_eq!(*reason, LinkWaitReason::SavesEnergy);
    let told = why(&decision);
    for part in [
        "saves energy (battery, 40 %)",
        "Wi-Fi needs less than half",
        "wwan0 in ",
    ] {
        assert!(told.contains(part), "{told}");
    }
    assert_eq!(decision.resting, BTreeSet::from(["wwan0".to_owned()]));
    assert_eq!(device.scheduler.waking_clients(device.now).waiting, [1]);
    let start = device
        .scheduler
        .latest_start(device.now)
        .expect("it will begin");
    assert!((3_600..6 * 3_600).contains(&start.as_secs()), "{start:?}");
}

#[test]
fn a_flat_rate_is_no_reason_to_wake_cellular_where_wifi_was_lately() {
    let mut device = Device::new(EnergySaving::Auto, BATTERY, &BOTH);
    let mut download = device.download(60_000_000, Some(6 * 3_600));
    device.seconds(20, &mut download);
    device.links.remove(0);
    let decision = device.second(&mut download);
    assert!(
        why(&decision).contains("wlan0 needs less than half"),
        "{decision:?}"
    );
}

#[test]
fn a_wait_for_energy_ends_in_time_for_the_deadline_and_is_not_begun_again() {
    let mut device = Device::new(EnergySaving::Auto, BATTERY, &CELL_ALONE);
    let mut download = device.download(20_000_000, Some(3_600));
    let mut waited = Vec::new();
    while download.remaining > 0 && download.left != Some(Duration::ZERO) {
        let decision = device.second(&mut download);
        waited.push(matches!(decision.choice, LinkChoice::Wait { .. }));
    }
    assert_eq!(download.remaining, 0);
    let turns = waited.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert_eq!(turns, 1, "it waited once");
    let waits = waited.iter().filter(|waits| **waits).count();
    assert!(waits > 600, "{waits} s");
}

#[test]
fn a_download_of_unknown_size_does_not_wait_for_energy() {
    let mut device = Device::new(EnergySaving::Auto, BATTERY, &CELL_ALONE);
    let mut download = device.download(20_000_000, Some(6 * 3_600));
    let candidates = [link("wwan0", LinkClass::Metered)];
    let report = ClientReport {
        demand: FlowDemand {
            remaining_bytes: None,
            left: download.left,
            policy: CostPolicy::Any,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        },
        size_bytes: None,
        priority: 0,
        start: None,
        candidates: &candidates,
        carried: &BTreeMap::new(),
        uses_several_links: true,
        always_pays: false,
        is_interactive: false,
        keeps_awake: true,
        source: SourceSupply::Ample,
    };
    let decision = device.scheduler.decide(device.now, download.id, &report);
    assert!(
        matches!(decision.choice, LinkChoice::Use { .. }),
        "{decision:?}"
    );
    // Once it is known, it waits.
    assert!(matches!(
        device.second(&mut download).choice,
        LinkChoice::Wait { .. }
    ));
}

#[test]
fn a_client_on_one_link_is_on_that_with_the_most_bits_per_joule() {
    let links = [
        ("wwan0", LinkClass::Free, 1_500_000),
        ("wlan0", LinkClass::Free, 1_000_000),
    ];
    let mut device = Device::new(EnergySaving::Always, BATTERY, &links);
    let mut download = device.download(500_000_000, None);
    download.together = false;
    let decision = device.seconds(30, &mut download);
    assert!(
        matches!(decision.choice, LinkChoice::Use { index: 1, .. }),
        "{decision:?}"
    );
    assert_eq!(download.carried.get("wwan0"), None);
}

#[test]
fn a_link_whose_radio_is_not_known_never_rests() {
    let links = [
        ("tun0", LinkClass::Free, 10_000),
        ("wlan0", LinkClass::Free, 1_000_000),
    ];
    let mut device = Device::new(EnergySaving::Always, BATTERY, &links);
    let mut download = device.download(500_000_000, None);
    assert!(device.seconds(30, &mut download).resting.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whatever_happens_one_link_stays_for_a_client_that_does_not_wait(
        seconds in proptest::collection::vec(
            (any::<[bool; 2]>(), [0..3_000_000_u64, 0..3_000_000]),
            1..120,
        ),
        left_s in proptest::option::of(1..10_000_u64),
        together in any::<bool>(),
        policy in 0..5_usize,
        metered in any::<bool>(),
    ) {
        let class = if metered { LinkClass::Metered } else { LinkClass::Free };
        let links = [("wlan0", LinkClass::Free, 0), ("wwan0", class, 0)];
        let mut device = Device::new(EnergySaving::Always, BATTERY, &links);
        let mut download = device.download(300_000_000, left_s);
        (download.together, download.policy) = (together, CostPolicy::ALL[policy]);
        for (stalled, rates) in seconds {
            for n in 0..2 {
                device.links[n].0.stalled = stalled[n];
                device.links[n].1 = if stalled[n] { 0 } else { rates[n] };
            }
            let before = download.remaining;
            let decision = device.second(&mut download);
            if let LinkChoice::Use { index, .. } = decision.choice {
                let chosen = &device.links[index].0.name;
                prop_assert!(!decision.resting.contains(chosen), "{:?}", decision);
            }
            if before == 0 {
                break;
            }
        }
    }
}

#[test]
fn a_link_that_sleeps_carries_nothing_and_its_client_waits_where_there_is_no_other() {
    const RADIO: &str = "serial:/dev/ttyUSB0@115200,sleep";
    let links = [(RADIO, LinkClass::Free, 5_000)];
    let mut device = Device::new(EnergySaving::Never, BATTERY, &links);
    let mut download = device.download(10_000_000, None);
    let decision = device.second(&mut download);
    assert!(matches!(decision.choice, LinkChoice::Use { index: 0, .. }));
    device.scheduler.set_sleeping([RADIO.to_owned()].into());
    let decision = device.second(&mut download);
    assert_eq!(decision.resting, BTreeSet::from([RADIO.to_owned()]));
    assert!(why(&decision).contains("sleeps"), "{}", why(&decision));
    let is_waiting = matches!(
        decision.choice,
        LinkChoice::Wait {
            reason: LinkWaitReason::SavesEnergy,
            ..
        }
    );
    assert!(is_waiting, "{decision:?}");
    device
        .links
        .push((link("wlan0", LinkClass::Free), 1_000_000));
    let decision = device.second(&mut download);
    assert!(matches!(decision.choice, LinkChoice::Use { index: 1, .. }));
    assert_eq!(decision.resting, BTreeSet::from([RADIO.to_owned()]));
    device.scheduler.set_sleeping(BTreeSet::new());
    assert!(device.second(&mut download).resting.is_empty());
}
