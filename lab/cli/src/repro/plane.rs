//! M2: bits per joule and bits per second of the paper's strategies and ours, on one plane.
//!
//! ```text
//!  Mb/J ▲      × damped                 the courses of M1, and a walk like that of the paper's
//!       │   × Wi-Fi    ● ours           energy table ──▶ the same D2TP on other links ──▶ what
//!       │      × probe, then pick       passed the device ──▶ its radios ──▶ joules
//!       │  × 3G             × both
//!       └──────────────────────▶ Mb/s
//! ```
//!
//! A strategy dominates another one that has neither more bits per joule nor more bits per second.
//! The mark is on `lead`: for each of the paper's strategies the larger of our two ratios to it,
//! and the smallest of these. Below one, a strategy of the paper is better on both axes.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::mobility::{COVERAGES, DRIVING, MobilitySegment, Movement, WALKING, scenario_of_all};
use super::plot::{Chart, Series};
use super::runner::Measured;
use anyhow::Context;
use cedos_lab_energy::{RadioDirection, RadioEnergyMeter, Span, Time, radios};
use cedos_lab_scenario::SampleSummary;
use cedos_lab_scenario::{Scenario, ScenarioFault};
use cedos_lab_sim::PassedPacket;
use cedos_lab_sim::strategy::{
    FixedStrategy, Forecast, ForesightStrategy, ProbeThenPick, Strategy,
};
use d2tp_sched::energy_policy::RadioPowerModel;
use serde_json::{Map, Value, json};

/// The length of a run: three rounds of probing and picking.
const SECONDS: f64 = 330.0;
/// The seeds of walks and drives.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=4;
/// The time after which every radio sleeps again.
const AFTER: Span = Span::from_secs(30);
/// How far the damped omniscient strategy looks ahead.
const DAMPING: Span = Span::from_secs(30);
/// The paper's mean rate of Wi-Fi in its energy measurements, in Mb/s.
const WIFI_MEAN_MBPS: f64 = 1.55;
/// The lowest rate of Wi-Fi on those walks, in Mb/s.
const WIFI_LEAST_MBPS: f64 = 0.25; // a guess: nearly out of reach

/// Phones, each with its radios: Wi-Fi, cellular.
const PHONES: [(&str, &str, &str); 3] = [
    ("i997", "i997-wifi", "i997-3g"),
    ("g1", "g1-wifi", "g1-3g"),
    ("thunderbolt", "thunderbolt-wifi", "thunderbolt-3g"),
];

/// The strategies that download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlaneClient {
    Cell,
    Wifi,
    Both,
    ProbeThenPick,
    Omniscient,
    Damped,
    Ours,
    OnVehiclePower,
}

impl PlaneClient {
    /// The strategies of the paper.
    const THEIRS: [PlaneClient; 6] = [
        PlaneClient::Cell,
        PlaneClient::Wifi,
        PlaneClient::Both,
        PlaneClient::ProbeThenPick,
        PlaneClient::Omniscient,
        PlaneClient::Damped,
    ];

    fn word(self) -> &'static str {
        match self {
            PlaneClient::Cell => "one_path_cell",
            PlaneClient::Wifi => "one_path_wifi",
            PlaneClient::Both => "both",
            PlaneClient::ProbeThenPick => "probe_then_pick",
            PlaneClient::Omniscient => "omniscient",
            PlaneClient::Damped => "omniscient_damped",
            PlaneClient::Ours => "ours",
            PlaneClient::OnVehiclePower => "ours_on_vehicle_power",
        }
    }

    /// Whether the strategy depends on the power of the radios.
    fn looks_at_joules(self) -> bool {
        !matches!(
            self,
            PlaneClient::Cell | PlaneClient::Wifi | PlaneClient::Both | PlaneClient::OnVehiclePower
        )
    }

    /// The strategy that chooses links for the device; `None` where its own scheduler does.
    fn strategy(
        self,
        draws: [RadioPowerModel; 2],
        course: &[MobilitySegment],
    ) -> Option<Box<dyn Strategy>> {
        let foresight =
            |damping| ForesightStrategy::new(draws.to_vec(), forecasts(course), damping);
        Some(match self {
            PlaneClient::Cell => Box::new(FixedStrategy(vec![false, true])),
            PlaneClient::Wifi => Box::new(FixedStrategy(vec![true, false])),
            PlaneClient::Both => Box::new(FixedStrategy(vec![true, true])),
            PlaneClient::ProbeThenPick => Box::new(ProbeThenPick::new(draws.to_vec())),
            PlaneClient::Omniscient => Box::new(foresight(Span::ZERO)),
            PlaneClient::Damped => Box::new(foresight(DAMPING)),
            PlaneClient::Ours | PlaneClient::OnVehiclePower => return None,
        })
    }

    /// The `[energy]` table of the scenario: when the device's scheduler saves energy, and on which supply.
    fn energy(self, (_, wifi, cell): (&str, &str, &str)) -> String {
        let (save, battery) = match self {
            PlaneClient::Ours => ("always", true),
            PlaneClient::OnVehiclePower => ("auto", false),
            _ => ("never", true),
        };
        format!(
            "[energy]\nsave = \"{save}\"\nbattery = {battery}\nwifi = \"{wifi}\"\ncellular = \"{cell}\"\n"
        )
    }
}

/// The power model of a radio, as a strategy gets it.
fn draw_of(radio: &str) -> RadioPowerModel {
    let profile = radios::profile(radio);
    profile
        .expect("the phones' radios have profiles")
        .power_model()
}

fn forecasts(course: &[MobilitySegment]) -> Vec<Forecast> {
    let of = |stretch: &MobilitySegment| Forecast {
        from: Time::from_secs_f64(stretch.from_s),
        bits_per_s: vec![
            stretch.wifi.map_or(0.0, |(_, mbps)| mbps * 1e6),
            stretch.cell_mbps * 1e6,
        ],
    };
    course.iter().map(of).collect()
}

/// The movement of the device.
#[derive(Clone, Copy, Debug)]
enum PlaneRoute {
    /// The movement of M1, with this Wi-Fi coverage.
    Covered(Movement, u32),
    /// A walk with full coverage and varying signal, whose mean rate is that of the paper's energy
    /// table.
    Varying,
    /// A walk with full coverage and one access point, whose signal varies three times as slowly.
    VaryingSlowly,
}

impl PlaneRoute {
    fn all() -> Vec<PlaneRoute> {
        let mut places = vec![PlaneRoute::Varying, PlaneRoute::VaryingSlowly];
        for movement in [WALKING, DRIVING] {
            let movement = Movement {
                seconds: SECONDS,
                ..movement
            };
            places.extend(COVERAGES.map(|coverage| PlaneRoute::Covered(movement, coverage)));
        }
        places
    }

    fn movement(self) -> &'static str {
        match self {
            PlaneRoute::Covered(movement, _) => movement.name,
            PlaneRoute::Varying | PlaneRoute::VaryingSlowly => WALKING.name,
        }
    }

    fn word(self) -> String {
        match self {
            PlaneRoute::Covered(_, coverage) => format!("coverage_{coverage}"),
            PlaneRoute::Varying => "signal_varies".to_owned(),
            PlaneRoute::VaryingSlowly => "signal_varies_slowly".to_owned(),
        }
    }

    fn course(self, seed: u64) -> Vec<MobilitySegment> {
        match self {
            PlaneRoute::Covered(movement, coverage) => movement.course(coverage, seed),
            PlaneRoute::Varying => varying(seed, WALKING.contact_s),
            PlaneRoute::VaryingSlowly => varying(seed, SECONDS),
        }
    }
}

/// A walk with full coverage, which is good only near access points.
fn varying(seed: u64, contact_s: f64) -> Vec<MobilitySegment> {
    let movement = Movement {
        seconds: SECONDS,
        contact_s,
        step_s: 5.0,
        ..WALKING
    };
    let course = movement.course(100, seed);
    let point = |stretch: &MobilitySegment| stretch.wifi.map_or(0, |(point, _)| point);
    // How close the middle of a segment is to the middle of its stay: 1 in the middle, 0 at the
    // ends.
    let height = |stretch: &MobilitySegment| {
        let stay = course.iter().filter(|s| point(s) == point(stretch));
        let (from, until) = stay.fold((f64::MAX, 0.0_f64), |(from, until), s| {
            (from.min(s.from_s), until.max(s.until_s))
        });
        let middle = (stretch.from_s + stretch.until_s) / 2.0;
        ((middle - from) / (until - from) * std::f64::consts::PI).sin()
    };
    let heights: Vec<f64> = course.iter().map(height).collect();
    let rate = |height: f64, steep: f64| (10.0 * height.powf(steep)).max(WIFI_LEAST_MBPS);
    let mean = |steep: f64| {
        let mbit = std::iter::zip(&course, &heights)
            .map(|(s, height)| (s.until_s - s.from_s) * rate(*height, steep));
        mbit.sum::<f64>() / SECONDS
    };
    // Steeper means less: bisection until the mean has the required value.
    let (mut low, mut high) = (0.0, 1_000.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if mean(middle) > WIFI_MEAN_MBPS {
            low = middle;
        } else {
            high = middle;
        }
    }
    let rates = heights.iter().map(|height| rate(*height, low));
    std::iter::zip(&course, rates)
        .map(|(stretch, rate)| MobilitySegment {
            wifi: Some((point(stretch), rate)),
            ..*stretch
        })
        .collect()
}

/// A run: the strategy, the movement, the walk, and the phone whose radios are assumed.
#[derive(Clone, Copy, Debug)]
struct PlaneRun {
    who: PlaneClient,
    place: PlaneRoute,
    seed: u64,
    phone: usize,
}

/// A point on the plane, from one run and one phone.
#[derive(Clone, Copy, Debug)]
struct PlanePoint {
    mbit: f64,
    joules: f64,
}

fn jobs() -> Vec<PlaneRun> {
    let mut jobs = Vec::new();
    for place in PlaneRoute::all() {
        for seed in SEEDS {
            let mut whos = PlaneClient::THEIRS.to_vec();
            whos.extend([PlaneClient::Ours, PlaneClient::OnVehiclePower]);
            for who in whos {
                let phones = if who.looks_at_joules() {
                    PHONES.len()
                } else {
                    1
                };
                jobs.extend((0..phones).map(|phone| PlaneRun {
                    who,
                    place,
                    seed,
                    phone,
                }));
            }
        }
    }
    jobs
}

/// Megabits and, for each phone, joules.
fn run(job: PlaneRun) -> anyhow::Result<Vec<PlanePoint>> {
    let course = job.place.course(job.seed);
    let (_, wifi, cell) = PHONES[job.phone];
    let text = scenario_of_all(&course) + &job.who.energy(PHONES[job.phone]);
    let scenario = Scenario::parse("M2", &text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    let strategy = job.who.strategy([draw_of(wifi), draw_of(cell)], &course);
    let ran = match strategy {
        Some(strategy) => cedos_lab_sim::run_by(&scenario, strategy),
        None => cedos_lab_sim::run_watched(&scenario),
    };
    let (outcome, passages) = ran.with_context(|| format!("{job:?}"))?;
    let mbit = outcome.report.flows.first().map_or(0, |flow| flow.bytes) as f64 * 8e-6;
    let point = |(_, wifi, cell): (&str, &str, &str)| PlanePoint {
        mbit,
        joules: joules(wifi, 0, &passages) + joules(cell, 1, &passages),
    };
    Ok(PHONES.map(point).to_vec())
}

/// The energy of a radio above idle, its last tail included.
fn joules(radio: &str, link: usize, passages: &[PassedPacket]) -> f64 {
    let end = Time::from_secs_f64(SECONDS);
    let mut meter = RadioEnergyMeter::new(radios::radio(radio), Time::ZERO);
    for passage in passages.iter().filter(|p| p.link == link && p.at <= end) {
        let way = match passage.way {
            cedos_lab_link::LinkDirection::Down => RadioDirection::Down,
            cedos_lab_link::LinkDirection::Up => RadioDirection::Up,
        };
        meter.on_bytes(passage.at, u64::from(passage.bytes), way);
    }
    let energy = meter.until(end + AFTER);
    energy.total() - energy.idle
}

/// Carries out all runs, on all cores.
fn run_all(jobs: &[PlaneRun]) -> anyhow::Result<Vec<Vec<PlanePoint>>> {
    let next = AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut done: Vec<Option<Vec<PlanePoint>>> = vec![None; jobs.len()];
    let results = std::thread::scope(|scope| {
        let work = || {
            let mut mine = Vec::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(n) else { break mine };
                mine.push((n, run(*job)));
            }
        };
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let joined = workers.into_iter().map(|w| w.join());
        joined
            .flat_map(|mine| mine.expect("a run's thread does not panic"))
            .collect::<Vec<_>>()
    });
    for (n, points) in results {
        done[n] = Some(points?);
    }
    Ok(done.into_iter().flatten().collect())
}

/// The result of a strategy over all walks: bits per joule and per second, for all of them together
/// and for each.
#[derive(Clone, Debug)]
struct StrategyResult {
    points: Vec<PlanePoint>,
}

impl StrategyResult {
    fn mbps(&self) -> f64 {
        let mbit: f64 = self.points.iter().map(|p| p.mbit).sum();
        mbit / SECONDS / self.points.len() as f64
    }

    /// Megabits per joule; `None` if no energy was used, because nothing was carried.
    fn mbit_per_joule(&self) -> Option<f64> {
        let (mbit, joules) = self.points.iter().fold((0.0, 0.0), |(mbit, joules), p| {
            (mbit + p.mbit, joules + p.joules)
        });
        (joules > 0.0).then(|| mbit / joules)
    }

    fn figures(&self) -> Value {
        let seen = |spread: SampleSummary| json!([spread.min, spread.max]);
        let per_joule = |p: &PlanePoint| (p.joules > 0.0).then(|| p.mbit / p.joules);
        json!({
            "mbit_per_joule": self.mbit_per_joule(),
            "mbps": self.mbps(),
            "mbit_per_joule_range": seen(SampleSummary::of(self.points.iter().filter_map(per_joule))),
            "mbps_range": seen(SampleSummary::of(self.points.iter().map(|p| p.mbit / SECONDS))),
        })
    }

    /// Our ratio to the other strategy, by joule and by second.
    fn over(&self, other: &StrategyResult) -> [f64; 2] {
        // A strategy that carries nothing is worse by any measure.
        let ratio = |ours: f64, theirs: f64| {
            if theirs > 0.0 {
                ours / theirs
            } else {
                f64::MAX
            }
        };
        [
            ratio(
                self.mbit_per_joule().unwrap_or(0.0),
                other.mbit_per_joule().unwrap_or(0.0),
            ),
            ratio(self.mbps(), other.mbps()),
        ]
    }
}

/// Runs the row in virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let jobs = jobs();
    let points = run_all(&jobs)?;
    let standing = |place: PlaneRoute, who: PlaneClient, phone: usize| StrategyResult {
        points: std::iter::zip(&jobs, &points)
            .filter(|(job, _)| {
                (job.place.movement(), job.place.word()) == (place.movement(), place.word())
                    && job.who == who
                    && (!who.looks_at_joules() || job.phone == phone)
            })
            .map(|(_, points)| points[phone])
            .collect(),
    };
    let (mut ours, mut baseline) = (Map::new(), Map::new());
    for place in PlaneRoute::all() {
        let mut figures = Map::new();
        let mut beside = Map::new();
        for (phone, (name, ..)) in PHONES.iter().enumerate() {
            let us = standing(place, PlaneClient::Ours, phone);
            let theirs = PlaneClient::THEIRS.map(|who| (who, standing(place, who, phone)));
            let mut here = us.figures();
            let lead = theirs.iter().map(|(_, other)| {
                let [by_joule, by_second] = us.over(other);
                by_joule.max(by_second)
            });
            here["lead"] = json!(lead.fold(f64::MAX, f64::min));
            let probing = standing(place, PlaneClient::ProbeThenPick, phone);
            let [by_joule, by_second] = us.over(&probing);
            here["by_probe_then_pick"] = json!({
                "mbit_per_joule": by_joule, "mbps": by_second,
            });
            figures.insert((*name).to_owned(), here);
            let of_phone =
                theirs.map(|(who, standing)| (who.word().to_owned(), standing.figures()));
            beside.insert((*name).to_owned(), Value::Object(Map::from_iter(of_phone)));
        }
        if place.movement() == DRIVING.name {
            let plugged = standing(place, PlaneClient::OnVehiclePower, 0).mbps();
            let most = (0..PHONES.len()).flat_map(|phone| {
                PlaneClient::THEIRS.map(|who| standing(place, who, phone).mbps())
            });
            figures.insert(
                "on_vehicle_power".to_owned(),
                json!({ "mbps": plugged, "most_of_theirs_mbps": most.fold(0.0, f64::max) }),
            );
        }
        for (all, figures) in [(&mut ours, figures), (&mut baseline, beside)] {
            let of_movement = all.entry(place.movement()).or_insert_with(|| json!({}));
            of_movement[place.word()] = Value::Object(figures);
        }
    }
    ours.insert("claim".to_owned(), claim(&standing));
    let (ours, baseline) = (Value::Object(ours), Value::Object(baseline));
    Ok(Measured::figures(ours, baseline, SEEDS.count()))
}

/// The figures of the paper's own claim: probing and picking beside each link alone, on the i997.
fn claim(standing: &dyn Fn(PlaneRoute, PlaneClient, usize) -> StrategyResult) -> Value {
    let by = |place: PlaneRoute, other: PlaneClient| {
        let probing = standing(place, PlaneClient::ProbeThenPick, 0);
        let [by_joule, by_second] = probing.over(&standing(place, other, 0));
        json!({
            "mbit_per_joule": probing.mbit_per_joule(), "mbps": probing.mbps(),
            "by_joule": by_joule, "by_second": by_second,
        })
    };
    let driving = Movement {
        seconds: SECONDS,
        ..DRIVING
    };
    json!({
        "walking_by_wifi": by(PlaneRoute::Varying, PlaneClient::Wifi),
        "walking_slowly_by_wifi": by(PlaneRoute::VaryingSlowly, PlaneClient::Wifi),
        "driving_by_cell": by(PlaneRoute::Covered(driving, 50), PlaneClient::Cell),
    })
}

/// The plane for each phone: three charts of the row's figures.
pub fn charts(ours: &Value, baseline: &Value) -> Vec<Chart> {
    let places = [
        ("walking", "signal_varies", "walking, signal varies"),
        ("walking", "coverage_50", "walking, coverage 50 %"),
        ("driving", "coverage_50", "driving, coverage 50 %"),
    ];
    let mut charts = Vec::new();
    for (phone, ..) in PHONES {
        for (movement, place, title) in places {
            let at = |figures: &Value| {
                let point = (figures["mbps"].as_f64(), figures["mbit_per_joule"].as_f64());
                match point {
                    (Some(x), Some(y)) => vec![(x, y)],
                    _ => Vec::new(),
                }
            };
            let beside = &baseline[movement][place][phone];
            let mut series: Vec<Series> = PlaneClient::THEIRS
                .iter()
                .map(|who| Series::dots(who.word(), at(&beside[who.word()])))
                .collect();
            series.push(Series::dots(
                PlaneClient::Ours.word(),
                at(&ours[movement][place][phone]),
            ));
            charts.push(Chart {
                title: format!("{title}; {phone}"),
                x: "Mb/s".to_owned(),
                y: "Mb/J".to_owned(),
                series,
            });
        }
    }
    charts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(mbit: f64, joules: f64) -> StrategyResult {
        StrategyResult {
            points: vec![PlanePoint { mbit, joules }],
        }
    }

    #[test]
    fn the_walk_of_the_energy_table_has_its_mean_and_is_mostly_poor() {
        for seed in SEEDS {
            let course = varying(seed, WALKING.contact_s);
            let (mut mbit, mut poor_s) = (0.0, 0.0);
            for stretch in &course {
                let span = stretch.until_s - stretch.from_s;
                let (_, rate) = stretch.wifi.expect("Wi-Fi is everywhere");
                assert!((WIFI_LEAST_MBPS..=10.0).contains(&rate));
                mbit += rate * span;
                poor_s += if rate < stretch.cell_mbps { span } else { 0.0 };
            }
            assert!((mbit / SECONDS - WIFI_MEAN_MBPS).abs() < 0.01);
            assert!((0.5..0.95).contains(&(poor_s / SECONDS)), "{poor_s}");
        }
    }

    #[test]
    fn who_is_behind_on_both_axes_has_a_lead_below_one() {
        let us = standing(100.0, 50.0);
        let dominating = us.over(&standing(110.0, 50.0));
        assert!(dominating.iter().all(|ratio| *ratio < 1.0));
        let faster = us.over(&standing(110.0, 80.0));
        assert!(faster[0] > 1.0 && faster[1] < 1.0);
        let nothing = us.over(&standing(0.0, 0.0));
        assert!(nothing.iter().all(|ratio| *ratio > 1.0));
    }

    #[test]
    fn a_radio_is_described_by_what_it_draws() {
        let draw = draw_of("i997-3g");
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(draw.wake_joules, 1.3) && close(draw.work_watts, 1.3));
        assert!(close(draw.tail_joules, 8.2), "{draw:?}");
    }

    #[test]
    fn every_place_has_a_name_of_its_own() {
        let mut names: Vec<_> = PlaneRoute::all()
            .into_iter()
            .map(|place| (place.movement(), place.word()))
            .collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
