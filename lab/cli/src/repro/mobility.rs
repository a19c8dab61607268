//! M1: several paths at once beside a clairvoyant single path, at every Wi-Fi coverage.
//!
//! ```text
//!  wlan0         ┌──10 Mb/s──┐                 ┌────┐          comes and goes
//!  wwan0   ──────────────────────────────────────────────      always there, slower
//!
//!  sum           both, all the time: the total capacity
//!  ours          both paths, striped
//!  clairvoyant   ──wwan0─┤──wlan0────├─wwan0───┤wlan0├─        knows which is better, and when
//! ```
//!
//! The clairvoyant device has each link only while it is the better one, and gets the next one a
//! moment before the other ends, so that a change costs nothing. The possible gain is the sum minus
//! its result; the mark is a share of that. In the simulator all of them use D2TP, so that only the
//! number of paths differs; single paths stand for the paper's TCP.

use std::fmt::Write as _;

use super::emulated::{D2TP, StartedLabRun};
use super::over_seeds;
use super::runner::Measured;
use anyhow::Context;
use cedos_lab_scenario::{Scenario, ScenarioFault};
use serde_json::{Map, Value, json};

/// Wi-Fi coverage, in hundredths.
pub(super) const COVERAGES: [u32; 5] = [0, 25, 50, 75, 100];
/// The share of payload in a full packet of 1500 bytes: without IP, UDP, D2TP and its tag.
const PAYLOAD_SHARE: f64 = 1432.0 / 1500.0;
/// How long before leaving a link the clairvoyant device has the next one, in seconds.
const OVERLAP_S: f64 = 0.25;

/// How the device moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Movement {
    pub(super) name: &'static str,
    pub(super) seconds: f64,
    /// The mean length of a stay at an access point, in seconds.
    pub(super) contact_s: f64,
    /// The interval at which rates change, in seconds.
    pub(super) step_s: f64,
    pub(super) walking: bool,
}

pub(super) const WALKING: Movement = Movement {
    name: "walking",
    seconds: 300.0,
    contact_s: 100.0,
    step_s: 10.0,
    walking: true,
};

pub(super) const DRIVING: Movement = Movement {
    name: "driving",
    seconds: 300.0,
    contact_s: 13.0,
    step_s: 10.0,
    walking: false,
};

/// A period in which nothing changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MobilitySegment {
    pub(super) from_s: f64,
    pub(super) until_s: f64,
    /// The number of the stay at an access point, and the rate; `None` without Wi-Fi.
    pub(super) wifi: Option<(usize, f64)>,
    pub(super) cell_mbps: f64,
}

/// A repeatable random generator (xorshift64): equal seeds give equal walks.
// Not rand_pcg: the figures in docs/results/M1.sim.json are of these walks.
pub(super) struct WalkRng(pub(super) u64);

impl WalkRng {
    /// A number evenly distributed from 0 to 1, never 0.
    pub(super) fn even(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) as f64 + 1.0) / ((1u64 << 53) as f64 + 1.0)
    }
    /// A number from the exponential distribution with this mean.
    pub(super) fn span(&mut self, mean: f64) -> f64 {
        -mean * self.even().ln()
    }
}

impl Movement {
    /// Rates over time at this coverage. Stays and gaps are drawn, then both are scaled so that the
    /// coverage is exact.
    ///
    /// Different seeds give different walks.
    pub(super) fn course(&self, coverage: u32, seed: u64) -> Vec<MobilitySegment> {
        let share = f64::from(coverage) / 100.0;
        let salt = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut dice = WalkRng(0x5deece66d ^ u64::from(coverage + 1) << 20 ^ salt);
        let stays = (self.seconds * share / self.contact_s).round().max(1.0) as usize;
        let mut draw = |n: usize, sum: f64| {
            let spans: Vec<f64> = (0..n).map(|_| dice.span(1.0)).collect();
            let all: f64 = spans.iter().sum();
            spans.iter().map(|s| s * sum / all).collect::<Vec<f64>>()
        };
        let stays = draw(stays, self.seconds * share);
        let gaps = draw(stays.len() + 1, self.seconds * (1.0 - share));
        let mut dice = WalkRng((0x1234_5678 + u64::from(coverage)) ^ salt);
        let mut cell = Vec::new();
        let steps = (self.seconds / self.step_s) as usize;
        for _ in 0..steps {
            cell.push(if self.walking {
                0.4 + 1.68 * dice.even()
            } else {
                0.6
            });
        }
        let cell_at = |t: f64| cell[((t / self.step_s + 1e-9) as usize).min(steps - 1)];
        let mut course = Vec::new();
        let mut put = |from: f64, until: f64, wifi: &dyn Fn(f64) -> Option<(usize, f64)>| {
            let mut at = from;
            while at < until - 1e-6 {
                let next = ((at / self.step_s + 1e-9).floor() + 1.0) * self.step_s;
                let end = next.min(until);
                course.push(MobilitySegment {
                    from_s: at,
                    until_s: end,
                    wifi: wifi((at + end) / 2.0),
                    cell_mbps: cell_at(at),
                });
                at = end;
            }
        };
        let mut at = 0.0;
        for (n, gap) in gaps.iter().enumerate() {
            put(at, at + gap, &|_| None);
            at += gap;
            let Some(stay) = stays.get(n).filter(|_| coverage > 0) else {
                continue;
            };
            let begin = at;
            put(at, at + stay, &|middle| {
                // Closer to the access point in the middle of the stay, up to the rate of its
                // uplink.
                let height = ((middle - begin) / stay * std::f64::consts::PI).sin();
                let rate = if self.walking {
                    (12.0 * height).clamp(1.0, 10.0)
                } else {
                    1.0
                };
                Some((n, rate))
            });
            at += stay;
        }
        course
    }
}

/// The clients that download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MobilityClient {
    Ours,
    Clairvoyant,
    Cell,
    Wifi,
    WifiFirst,
}

/// When a link is available for a client: from, until, the access point.
type LinkPeriods = Vec<(f64, f64, usize)>;

/// The periods for which `uses` is true, joined if nothing changes between them.
fn presence(
    course: &[MobilitySegment],
    uses: impl Fn(&MobilitySegment) -> Option<usize>,
) -> LinkPeriods {
    let mut out: LinkPeriods = Vec::new();
    for stretch in course {
        let Some(point) = uses(stretch) else { continue };
        match out.last_mut() {
            Some((_, until, at)) if *at == point && (*until - stretch.from_s).abs() < 1e-6 => {
                *until = stretch.until_s;
            }
            _ => out.push((stretch.from_s, stretch.until_s, point)),
        }
    }
    out
}

/// When the links are available for this client: Wi-Fi, cellular.
fn links_of(who: MobilityClient, course: &[MobilitySegment]) -> (LinkPeriods, LinkPeriods) {
    let end = course.last().map_or(0.0, |s| s.until_s);
    let always = vec![(0.0, end, 0)];
    let covered = presence(course, |s| s.wifi.map(|(point, _)| point));
    let better = |s: &MobilitySegment| s.wifi.filter(|(_, rate)| *rate > s.cell_mbps);
    let without = |cell: LinkPeriods| {
        // The next link is available a moment before the other ends, and both overlap for the same
        // time.
        let lap = |(from, until, n): (f64, f64, usize)| {
            let from: f64 = if from > 0.0 { from - OVERLAP_S } else { from };
            (from.max(0.0), (until + OVERLAP_S).min(end), n)
        };
        join(cell.into_iter().map(lap).collect())
    };
    match who {
        MobilityClient::Ours => (covered, always),
        MobilityClient::Cell => (Vec::new(), always),
        MobilityClient::Wifi => (covered, Vec::new()),
        MobilityClient::WifiFirst => {
            let cell = presence(course, |s| s.wifi.is_none().then_some(0));
            (covered, without(cell))
        }
        MobilityClient::Clairvoyant => {
            let wifi = presence(course, |s| better(s).map(|(point, _)| point));
            let cell = presence(course, |s| better(s).is_none().then_some(0));
            (wifi, without(cell))
        }
    }
}

/// Joins periods that touch or overlap.
fn join(spans: LinkPeriods) -> LinkPeriods {
    let mut out: LinkPeriods = Vec::new();
    for (from, until, n) in spans {
        match out.last_mut() {
            Some((_, last, _)) if from <= *last + 1e-6 => *last = last.max(until),
            _ => out.push((from, until, n)),
        }
    }
    out
}

/// The scenario of one run.
fn scenario(who: MobilityClient, course: &[MobilitySegment]) -> String {
    scenario_of(links_of(who, course), course)
}

/// A download that is longer than the walk, over links that are available as in the walk.
pub(super) fn scenario_of_all(course: &[MobilitySegment]) -> String {
    scenario_of(links_of(MobilityClient::Ours, course), course)
}

fn scenario_of((wifi, cell): (LinkPeriods, LinkPeriods), course: &[MobilitySegment]) -> String {
    let end = course.last().map_or(1.0, |s| s.until_s);
    let wifi_rates = course
        .iter()
        .filter_map(|s| Some((s.from_s, s.wifi?.1)))
        .collect();
    let cell_rates = course.iter().map(|s| (s.from_s, s.cell_mbps)).collect();
    let mut text = format!("seed = 11\nduration_s = {end}\n");
    put_link(&mut text, ("wlan0", 40.0), end, &wifi, wifi_rates);
    put_link(&mut text, ("wwan0", 120.0), end, &cell, cell_rates);
    let _ = write!(
        text,
        "[[flow]]\nbytes = {}\npolicy = \"any\"\n",
        // More than the links can carry.
        (end * 13e6 / 8.0) as u64
    );
    text
}

fn put_link(
    text: &mut String,
    (name, rtt_ms): (&str, f64),
    end_s: f64,
    there: &LinkPeriods,
    rates: Vec<(f64, f64)>,
) {
    let up = there.first().is_some_and(|(from, ..)| *from == 0.0);
    let first = rates.first().map_or(1.0, |(_, rate)| *rate);
    let _ = write!(
        text,
        "[[link]]\nname = \"{name}\"\nup = {up}\ndown_mbps = {first}\nup_mbps = 1\n\
         rtt_ms = {rtt_ms}\nqueue_bytes = 64_000\n"
    );
    let mut rate = first;
    let mut changes: Vec<(f64, String)> = Vec::new();
    for (at, next) in rates {
        if next != rate {
            changes.push((at, format!("down_mbps = {next}")));
            rate = next;
        }
    }
    let mut before: Option<f64> = None;
    for (from, until, _) in there {
        match before {
            Some(left) if (left - from).abs() < 1e-6 => {
                // From one access point to the next, without an outage between them.
                changes.retain(|(at, what)| *at != left || what != "up = false");
                changes.push((*from, "new_address = true".to_owned()));
            }
            _ if *from > 0.0 => changes.push((*from, "up = true".to_owned())),
            _ => {}
        }
        if *until < end_s - 1e-6 {
            changes.push((*until, "up = false".to_owned()));
        }
        before = Some(*until);
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (at, what) in changes {
        let _ = writeln!(text, "[[link.at]]\nt_s = {at}\n{what}");
    }
}

/// The most that the links of a walk can carry, in Mb/s of payload over its whole length.
fn sum_mbps(course: &[MobilitySegment]) -> f64 {
    let end = course.last().map_or(1.0, |s| s.until_s);
    let mbit = |s: &MobilitySegment| {
        (s.until_s - s.from_s) * (s.cell_mbps + s.wifi.map_or(0.0, |(_, rate)| rate))
    };
    course.iter().map(mbit).sum::<f64>() / end * PAYLOAD_SHARE
}

/// The seeds of walks and drives in virtual time.
const SEEDS: std::ops::Range<u64> = 0..20;

/// Runs all coverages in virtual time, with courses of each seed.
pub fn simulate() -> anyhow::Result<Measured> {
    let each = SEEDS.map(simulated).collect::<anyhow::Result<_>>()?;
    Ok(over_seeds::combined(each))
}

/// Runs all coverages in virtual time, with courses of this seed.
fn simulated(seed: u64) -> anyhow::Result<Measured> {
    let mut ours = Map::new();
    let mut baseline = Map::new();
    for movement in [WALKING, DRIVING] {
        let mut figures = Map::new();
        let mut beside = Map::new();
        for coverage in COVERAGES {
            let course = movement.course(coverage, seed);
            let whos = [
                MobilityClient::Ours,
                MobilityClient::Clairvoyant,
                MobilityClient::Cell,
                MobilityClient::Wifi,
                MobilityClient::WifiFirst,
            ];
            let course_here = &course;
            let got = std::thread::scope(|scope| {
                let runs = whos.map(|who| scope.spawn(move || in_simulator(who, course_here)));
                let mut got = Vec::new();
                for run in runs {
                    got.push(run.join().expect("a run's thread does not panic")?);
                }
                anyhow::Ok(got)
            })?;
            let sum = sum_mbps(&course);
            let key = format!("coverage_{coverage}");
            figures.insert(key.clone(), judged(got[0], got[1], sum));
            beside.insert(
                key.clone(),
                json!({
                    "one_path_cell_mbps": got[2],
                    "one_path_wifi_mbps": got[3],
                    "wifi_first_mbps": got[4],
                }),
            );
        }
        ours.insert(movement.name.to_owned(), Value::Object(figures));
        baseline.insert(movement.name.to_owned(), Value::Object(beside));
    }
    let (ours, baseline) = (Value::Object(ours), Value::Object(baseline));
    Ok(Measured::figures(ours, baseline, 1))
}

/// Walks at once on real sockets: ten labs, none of which carries more than 12 Mb/s.
const AT_ONCE: usize = 2;

/// Runs all coverages on real sockets, with the kernel's TCP and MPTCP for comparison.
pub fn on_real_sockets() -> anyhow::Result<Measured> {
    let mut ours = Map::new();
    let mut baseline = Map::new();
    let all: Vec<(Movement, u32)> = COVERAGES
        .iter()
        .flat_map(|coverage| [WALKING, DRIVING].map(|movement| (movement, *coverage)))
        .collect();
    for some in all.chunks(AT_ONCE) {
        let begun: Vec<WalkRuns> = some
            .iter()
            .map(|(movement, coverage)| WalkRuns::begin(movement, *coverage))
            .collect::<anyhow::Result<_>>()?;
        for ((movement, coverage), rides) in some.iter().zip(begun) {
            let key = format!("coverage_{coverage}");
            let (figures, beside) = rides.end()?;
            for (of, what) in [(&mut ours, figures), (&mut baseline, beside)] {
                let here = of
                    .entry(movement.name)
                    .or_insert_with(|| Value::Object(Map::new()));
                here[&key] = what;
            }
        }
    }
    let (ours, baseline) = (Value::Object(ours), Value::Object(baseline));
    Ok(Measured::figures(ours, baseline, 1))
}

/// The runs of all clients over one walk, each in a separate lab, all at once.
struct WalkRuns {
    course: Vec<MobilitySegment>,
    ours: StartedLabRun,
    clairvoyant: StartedLabRun,
    beside: Vec<(&'static str, StartedLabRun)>,
}

impl WalkRuns {
    fn begin(movement: &Movement, coverage: u32) -> anyhow::Result<WalkRuns> {
        let course = movement.course(coverage, 0);
        let begin = |who, options: &[&str]| {
            let text = format!("origin = \"builtin\"\n{}", scenario(who, &course));
            StartedLabRun::begin(&text, options)
        };
        let over = |who: &'static str| ["--over", who];
        let beside = [
            ("tcp_cell_mbps", over("tcp:wwan0")),
            ("tcp_wifi_mbps", over("tcp-first:wlan0")),
            ("tcp_wifi_first_mbps", over("tcp-first:wlan0,wwan0")),
            ("mptcp_mbps", over("mptcp")),
        ];
        Ok(WalkRuns {
            ours: begin(MobilityClient::Ours, D2TP)?,
            clairvoyant: begin(MobilityClient::Clairvoyant, D2TP)?,
            beside: beside
                .into_iter()
                .map(|(name, options)| Ok((name, begin(MobilityClient::Ours, &options)?)))
                .collect::<anyhow::Result<_>>()?,
            course,
        })
    }

    /// Our figures, and those for comparison.
    fn end(self) -> anyhow::Result<(Value, Value)> {
        let seconds = self.course.last().map_or(1.0, |s| s.until_s);
        let mbps = |run: StartedLabRun| {
            let report = run.report()?;
            let bytes = report.flows.first().map_or(0, |flow| flow.bytes);
            anyhow::Ok(bytes as f64 * 8e-6 / seconds)
        };
        let (ours, clairvoyant) = (mbps(self.ours)?, mbps(self.clairvoyant)?);
        let mut beside = Map::new();
        for (name, run) in self.beside {
            let got = mbps(run).with_context(|| name)?;
            beside.insert(name.to_owned(), json!(got));
        }
        let figures = judged(ours, clairvoyant, sum_mbps(&self.course));
        Ok((figures, Value::Object(beside)))
    }
}

fn judged(ours: f64, clairvoyant: f64, sum: f64) -> Value {
    let gain = sum - clairvoyant;
    json!({
        "mbps": ours,
        "clairvoyant_mbps": clairvoyant,
        "sum_mbps": sum,
        "by_clairvoyant": ours / clairvoyant,
        "share_of_gain": (gain > 0.0).then(|| (ours - clairvoyant) / gain),
    })
}

/// Payload in Mb/s over the whole walk.
fn in_simulator(who: MobilityClient, course: &[MobilitySegment]) -> anyhow::Result<f64> {
    let text = scenario(who, course);
    let scenario = Scenario::parse("M1", &text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    let report = cedos_lab_sim::run(&scenario, None)
        .with_context(|| format!("{who:?}"))?
        .report;
    let bytes = report.flows.first().map_or(0, |flow| flow.bytes);
    Ok(bytes as f64 * 8e-6 / scenario.duration_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coverage_of_a_course_is_what_was_asked_for() {
        for movement in [WALKING, DRIVING] {
            for coverage in COVERAGES {
                let course = movement.course(coverage, 0);
                let covered: f64 = course
                    .iter()
                    .filter(|s| s.wifi.is_some())
                    .map(|s| s.until_s - s.from_s)
                    .sum();
                let share = covered / movement.seconds * 100.0;
                assert!((share - f64::from(coverage)).abs() < 0.01, "{share}");
                let end = course.last().map(|s| s.until_s).unwrap();
                assert!((end - movement.seconds).abs() < 1e-3);
            }
        }
    }

    #[test]
    fn the_clairvoyant_has_the_better_link_and_for_a_moment_both() {
        let stretch = |from_s, until_s, wifi| MobilitySegment {
            from_s,
            until_s,
            wifi,
            cell_mbps: 2.0,
        };
        // Wi-Fi from 10 to 30 s, but slower than 3G from 20 s on.
        let course = [
            stretch(0.0, 10.0, None),
            stretch(10.0, 20.0, Some((0, 5.0))),
            stretch(20.0, 30.0, Some((0, 1.0))),
            stretch(30.0, 40.0, None),
        ];
        let (wifi, cell) = links_of(MobilityClient::Clairvoyant, &course);
        assert_eq!(wifi, [(10.0, 20.0, 0)]);
        assert_eq!(cell, [(0.0, 10.25, 0), (19.75, 40.0, 0)]);
        let (wifi, cell) = links_of(MobilityClient::WifiFirst, &course);
        assert_eq!(wifi, [(10.0, 30.0, 0)]);
        assert_eq!(cell.len(), 2);
    }

    #[test]
    fn what_is_gained_is_measured_against_what_there_is() {
        let figures = judged(9.0, 8.0, 10.0);
        assert_eq!(figures["share_of_gain"], 0.5);
        assert_eq!(judged(8.0, 8.0, 8.0)["share_of_gain"], Value::Null);
    }
}
