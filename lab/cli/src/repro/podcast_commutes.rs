//! `readycast-learning`: weeks of commutes by the clock, with and without what was learnt on the days before.
//!
//! ```text
//!  scenario: a way there, a way back ─▶ five days a week, times and rates drawn ─┬─▶ each day anew
//!                                                                                ├─▶ lengths of stays and gaps
//!                                                                                ├─▶ and by place and hour
//!                                                                                └─▶ the clairvoyant optimum
//! ```
//!
//! `readycast-week` leaves the hours out in which nothing moves, so that there is no time of day in it. Here they are in.
//! The first two commutes of its scenario are the way to work and the way home, a second as a minute and a half.

use super::experiment::source_files::SourceFiles;
use super::runner::Measured;
use crate::lab::podcasts::link_courses;
use anyhow::{Context, ensure};
use cedos_lab_link::{Span, Time, seeded};
use cedos_lab_scenario::Scenario;
use cedos_lab_sim::score::course::{CourseSegment, LinkCourse};
use cedos_lab_sim::score::jobs::ScoreJob;
use cedos_lab_sim::score::optimum;
use cedos_lab_sim::score::player::{PlaybackResult, PlayerStep, play_learning};
use d2tp_sched::{
    CostPolicy, DeadlineFallback, DeviceLocation, FlowDemand, LinkForecast, LinkObservation,
    NetworkRates, ScheduledFlow, Scheduler, SchedulerMode, SourceSupply,
};
use rand::Rng;
use rand_pcg::Pcg32;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The scenario that describes a commute.
const SCENARIO: &str = "readycast-week.toml";
/// The seeds. The schedulers were not changed on their account.
const SEEDS: std::ops::Range<u64> = 1..9;
/// The weeks of each seed.
const WEEKS: u32 = 5;
/// The weeks at the beginning that do not count: in them all learn.
const WEEKS_BEFORE: u32 = 2;
/// The seconds of the scenario in which a commute is.
const COMMUTE_S: f64 = 40.0;
/// How many of the scenario's seconds a second is: a commute is an hour, of which half an hour is on the way.
const STRETCH: f64 = 90.0;
/// The random stream of the weeks.
const STREAM: u64 = 1 << 37;
/// How much shorter or longer a stay or a gap may be than in the scenario.
const LENGTHS: std::ops::Range<f64> = 0.5..1.5; // as in `readycast-week`
/// How much slower or faster a network may be.
const RATES: std::ops::Range<f64> = 0.6..1.4; // as in `readycast-week`
/// How much earlier or later a commute may begin, in seconds.
const STARTS_S: std::ops::Range<f64> = -300.0..300.0; // a guess
/// When the ways begin, in seconds of the day.
const WAYS_AT_S: [f64; 2] = [7.25 * 3_600.0, 17.25 * 3_600.0];
/// How often the hotspot of the bus carries nothing, and how often Wi-Fi is missing at the end: as in the scenario.
const FULL_BUS: f64 = 1.0 / 3.0;
const NO_WIFI: f64 = 1.0 / 8.0;
/// The names of the networks on the way to work, in their order.
const NETWORKS: [&str; 3] = ["home", "bus", "work"];
/// Draws of a week until one is found whose deadlines can all be met.
const DRAWS_MAX: usize = 1_000;
/// Seconds of a day.
const DAY_S: f64 = 86_400.0;
/// A day that is new begins at this second: nobody is on the way.
const DAY_BEGINS_S: f64 = 4.0 * 3_600.0;
/// The interval at which the device notes rates and renews the forecasts.
const LOOK_S: f64 = 10.0;

/// When the episode of a commute is due.
#[derive(Clone, Copy, Debug)]
struct Publication {
    name: &'static str,
    /// Seconds of the scenario from its publication to its deadline.
    due_in_s: f64,
}

/// The episode of the scenario's news, and the same due before Wi-Fi is there again.
const PUBLICATIONS: [Publication; 2] = [
    Publication {
        name: "after_the_way",
        due_in_s: 65.0,
    },
    Publication {
        name: "on_the_way",
        due_in_s: 26.0,
    },
];

/// The scenario's second of a commute at which its episode is published.
const PUBLISHED_S: f64 = 2.0;
/// Bytes of the scenario's news, and of an episode that is published in the evening for the next morning.
const NEWS_BYTES: f64 = 4e6;
const NIGHT_BYTES: f64 = 7e6;
/// When the latter is published, and how long it may take.
const NIGHT_AT_S: f64 = 20.0 * 3_600.0;
const NIGHT_SPAN_S: f64 = 11.5 * 3_600.0;

/// What a scheduler knows of the days before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Knowledge {
    /// Nothing.
    EachDayAnew,
    /// How long links carried and were away, and their rates.
    Lengths,
    /// How long links carried and were away, their rates, and forecasts.
    More(LearntForecast),
}

/// Which forecasts a scheduler has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LearntForecast {
    /// How long a link is away by the place where it was lost, and the rate of each network.
    by_place: bool,
    /// What a link carries in each ten minutes of the day.
    by_hour: bool,
}

/// A commute: parts of each link's course, with its first second as the beginning.
type Way = Vec<Vec<CourseSegment>>;

/// A part of the Wi-Fi's course in which it is on one network.
#[derive(Clone, Copy, Debug)]
struct NetworkStay {
    from: Time,
    network: usize,
}

/// Links and downloads of all weeks of a seed.
struct Weeks {
    courses: Vec<LinkCourse>,
    /// The network of the Wi-Fi over time.
    stays: Vec<NetworkStay>,
    jobs: Vec<ScoreJob>,
    /// The least bytes that metered links must carry in weeks that count.
    metered_bytes: f64,
    refused: usize,
}

/// Runs the row in virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let files = SourceFiles::default();
    let mut open = |name: &str| files.open(name);
    let scenario = Scenario::parse(SCENARIO, &files.read(SCENARIO)?, &mut open)?;
    let ways = ways(&scenario)?;
    let (mut ours, mut baseline, mut refused) = (json!({}), json!({}), 0);
    for publication in PUBLICATIONS {
        let (learnt, others, again) = compare(&ways, publication)?;
        ours[publication.name] = learnt;
        baseline[publication.name] = others;
        refused += again;
    }
    let mut measured = Measured::figures(ours, baseline, SEEDS.count());
    measured.conditions.push(format!(
        "weeks with a deadline that no scheduler could have met were drawn again: {refused}"
    ));
    Ok(measured)
}

/// Figures with all that was learnt, those for comparison, and the draws that were refused.
fn compare(ways: &[Way], publication: Publication) -> anyhow::Result<(Value, Value, usize)> {
    let more =
        |by_place: bool, by_hour: bool| Knowledge::More(LearntForecast { by_place, by_hour });
    let ours = ("by_place_and_hour", more(true, true), CostPolicy::FreeFirst);
    let modes = [
        ours,
        ("by_place", more(true, false), CostPolicy::FreeFirst),
        ("by_hour", more(false, true), CostPolicy::FreeFirst),
        ("lengths_alone", Knowledge::Lengths, CostPolicy::FreeFirst),
        (
            "each_day_anew",
            Knowledge::EachDayAnew,
            CostPolicy::FreeFirst,
        ),
        ("wifi_alone", Knowledge::Lengths, CostPolicy::FreeOnly),
        ("at_once", Knowledge::Lengths, CostPolicy::Any),
    ];
    let mut sums = [CommuteSums::default(); 7];
    let (mut bytes, mut least, mut refused) = (0.0, 0.0, 0);
    for seed in SEEDS {
        let weeks = weeks(ways, publication, seed)?;
        let counted = weeks.jobs.iter().filter(|job| counts(job));
        bytes += counted.map(|job| job.bytes as f64).sum::<f64>();
        least += weeks.metered_bytes;
        refused += weeks.refused;
        for (sum, (_, knowledge, policy)) in sums.iter_mut().zip(modes) {
            sum.add(&weeks, knowledge, policy);
        }
    }
    let told = modes
        .iter()
        .zip(sums)
        .map(|((name, ..), sum)| (*name, sum.told(bytes)));
    let mut told: BTreeMap<&str, Value> = told.collect();
    let mut ours = told.remove(ours.0).context("it was run")?;
    for (name, of) in &told {
        for figure in ["in_time_percent", "paid_percent"] {
            ours[format!("{name}_{figure}")] = of[figure].clone();
        }
    }
    ours["optimum_paid_percent"] = json!(100.0 * least / bytes);
    let mut baseline = json!(told);
    baseline["optimum"] = json!({
        "in_time_percent": 100.0,
        "paid_percent": 100.0 * least / bytes,
    });
    Ok((ours, baseline, refused))
}

fn counts(job: &ScoreJob) -> bool {
    job.arrival >= Time::from_secs_f64(f64::from(WEEKS_BEFORE) * 7.0 * DAY_S)
}

/// The way to work and the way home of the scenario, in the time of this row.
fn ways(scenario: &Scenario) -> anyhow::Result<Vec<Way>> {
    let courses = link_courses(scenario);
    ensure!(courses.len() == 2, "a Wi-Fi and a cellular network");
    let way = |n: usize| -> Way {
        let (from, to) = (n as f64 * COMMUTE_S, (n + 1) as f64 * COMMUTE_S);
        let of = |course: &LinkCourse| {
            let at = |segment: &CourseSegment| segment.at.as_secs_f64();
            let began = course.stretches.iter().rposition(|s| at(s) <= from);
            let within = course.stretches[began.unwrap_or(0)..].iter();
            let within = within.take_while(|s| at(s) < to);
            within
                .map(|segment| CourseSegment {
                    at: Time::from_secs_f64((at(segment) - from).max(0.0) * STRETCH),
                    ..*segment
                })
                .collect()
        };
        courses.iter().map(of).collect()
    };
    Ok(vec![way(0), way(1)])
}

/// Draws the weeks of a seed, one after another.
fn weeks(ways: &[Way], publication: Publication, seed: u64) -> anyhow::Result<Weeks> {
    let mut rng = seeded(seed, STREAM);
    let mut all = Weeks {
        courses: Vec::new(),
        stays: Vec::new(),
        jobs: Vec::new(),
        metered_bytes: 0.0,
        refused: 0,
    };
    for week in 0..WEEKS {
        let mut draws = 0..DRAWS_MAX;
        let (drawn, least) = draws
            .find_map(|_| {
                let drawn = week_of(ways, publication, f64::from(week) * 7.0 * DAY_S, &mut rng);
                let best = optimum::solve(&drawn.courses, &drawn.jobs);
                all.refused += usize::from(best.is_none());
                best.map(|best| (drawn, best.metered_bytes))
            })
            .with_context(|| format!("no week in {DRAWS_MAX} has deadlines that can be met"))?;
        if week >= WEEKS_BEFORE {
            all.metered_bytes += least;
        }
        all.stays.extend(drawn.stays);
        all.jobs.extend(drawn.jobs);
        if all.courses.is_empty() {
            all.courses = drawn.courses;
            continue;
        }
        for (course, more) in all.courses.iter_mut().zip(drawn.courses) {
            course.stretches.pop();
            course.stretches.extend(more.stretches);
            course.end = more.end;
        }
    }
    Ok(all)
}

/// Draws a week that begins at this second.
fn week_of(ways: &[Way], publication: Publication, begins_s: f64, rng: &mut Pcg32) -> Weeks {
    let end = Time::from_secs_f64(begins_s + 7.0 * DAY_S);
    let links = ["wlan0", "wwan0"]
        .iter()
        .zip([d2tp_sched::LinkClass::Free, d2tp_sched::LinkClass::Metered]);
    let mut courses: Vec<LinkCourse> = links
        .enumerate()
        .map(|(link, (name, class))| LinkCourse {
            name: (*name).to_owned(),
            class,
            // As at the end of the way home, until the first commute.
            stretches: vec![CourseSegment {
                at: Time::from_secs_f64(begins_s),
                ..ways[0][link][0]
            }],
            end,
        })
        .collect();
    let mut stays = vec![NetworkStay {
        from: Time::from_secs_f64(begins_s),
        network: 0,
    }];
    let mut jobs = Vec::new();
    let mut has_wifi = true;
    for day in 0..5 {
        let day_s = begins_s + f64::from(day) * DAY_S;
        for (way, at_s) in WAYS_AT_S.iter().enumerate() {
            let at_s = day_s + at_s + rng.random_range(STARTS_S);
            let is_full = rng.random_bool(FULL_BUS);
            let will_have_wifi = !rng.random_bool(NO_WIFI);
            for (link, course) in courses.iter_mut().enumerate() {
                let mut parts = varied(&ways[way][link], rng);
                if link == 0 {
                    let mut network = 0;
                    let mut was_up = false;
                    for part in &mut parts {
                        network += usize::from(part.up && !was_up && part.at > Time::ZERO);
                        was_up = part.up;
                        let is_there = match network {
                            0 => has_wifi,
                            1 => true,
                            _ => will_have_wifi,
                        };
                        part.up &= is_there;
                        if !part.up || (network == 1 && is_full) {
                            part.rate = 0.0;
                        }
                        if part.up {
                            let network = if way == 0 { network } else { 2 - network };
                            let from = Time::from_secs_f64(at_s + part.at.as_secs_f64());
                            stays.push(NetworkStay { from, network });
                        }
                    }
                }
                course
                    .stretches
                    .extend(parts.iter().map(|part| CourseSegment {
                        at: Time::from_secs_f64(at_s + part.at.as_secs_f64()),
                        ..*part
                    }));
            }
            has_wifi = will_have_wifi;
            jobs.push(ScoreJob {
                arrival: Time::from_secs_f64(at_s + PUBLISHED_S * STRETCH),
                bytes: (NEWS_BYTES * STRETCH) as u64,
                deadline: Span::from_secs_f64(publication.due_in_s * STRETCH),
            });
        }
        jobs.push(ScoreJob {
            arrival: Time::from_secs_f64(day_s + NIGHT_AT_S),
            bytes: (NIGHT_BYTES * STRETCH) as u64,
            deadline: Span::from_secs_f64(NIGHT_SPAN_S),
        });
    }
    for course in &mut courses {
        course.stretches.push(CourseSegment {
            at: end,
            up: false,
            rate: 0.0,
        });
    }
    Weeks {
        courses,
        stays,
        jobs,
        metered_bytes: 0.0,
        refused: 0,
    }
}

/// A commute with other lengths of its parts and other rates, in all as long.
fn varied(parts: &[CourseSegment], rng: &mut Pcg32) -> Vec<CourseSegment> {
    let ends = parts.iter().skip(1).map(|part| part.at.as_secs_f64());
    let ends = ends.chain([COMMUTE_S * STRETCH]);
    let lengths: Vec<f64> = parts
        .iter()
        .zip(ends)
        .map(|(part, end)| (end - part.at.as_secs_f64()) * rng.random_range(LENGTHS))
        .collect();
    let scale = COMMUTE_S * STRETCH / lengths.iter().sum::<f64>();
    let mut at_s = 0.0;
    let varied = parts.iter().zip(lengths).map(|(part, length)| {
        let at = Time::from_secs_f64(at_s);
        at_s += length * scale;
        CourseSegment {
            at,
            rate: part.rate * rng.random_range(RATES),
            ..*part
        }
    });
    varied.collect()
}

/// What a device learns by place and hour, as the agent does.
struct DeviceMemory<'a> {
    weeks: &'a Weeks,
    uses: LearntForecast,
    forecasts: [LinkForecast; 2],
    /// The rates of the networks that the Wi-Fi is not on.
    networks: BTreeMap<usize, NetworkRates>,
    network: usize,
    noted_at: Time,
    /// What each link carried at that time, in bytes a second; none where that is not known.
    rates: [Option<f64>; 2],
}

impl DeviceMemory<'_> {
    fn of(weeks: &Weeks, uses: LearntForecast) -> DeviceMemory<'_> {
        DeviceMemory {
            weeks,
            uses,
            forecasts: [LinkForecast::new(), LinkForecast::new()],
            networks: BTreeMap::new(),
            network: 0,
            noted_at: Time::ZERO,
            rates: [None; 2],
        }
    }

    fn learn(&mut self, scheduler: &mut Scheduler, now: Time) {
        let stays = &self.weeks.stays;
        let stay = stays.partition_point(|stay| stay.from <= now);
        let network = stays[stay.saturating_sub(1)].network;
        let has_changed = scheduler
            .links()
            .iter()
            .zip(self.rates)
            .any(|(link, rate)| link.carries() != rate.is_some_and(|rate| rate > 0.0));
        let passed_s = now.since(self.noted_at).as_secs_f64();
        if passed_s < LOOK_S && !has_changed && network == self.network {
            return;
        }
        if network != self.network {
            let known = self.networks.get(&network).copied().unwrap_or_default();
            if self.uses.by_place {
                let before = scheduler.switch_network(0, known);
                self.networks.insert(self.network, before);
            }
            self.network = network;
        }
        let spot = DeviceLocation::named(NETWORKS[network]);
        let (day, second) = day_and_second(now);
        for (link, forecast) in self.forecasts.iter_mut().enumerate() {
            if let Some(rate) = self.rates[link] {
                note(forecast, self.noted_at, now, rate);
            }
            let history = &scheduler.links()[link];
            let carries = history.carries();
            forecast.observe(now, &spot, carries);
            self.rates[link] = match carries {
                false => Some(0.0),
                true => (history.confidence() > 0.0).then(|| history.long_term_rate()),
            };
            let mut hint = forecast.hint(now, day, second);
            if !self.uses.by_place {
                hint.away_s.clear();
            }
            if !self.uses.by_hour {
                hint.days.clear();
            }
            scheduler.set_hint(link, hint);
        }
        self.noted_at = now;
    }
}

fn day_and_second(at: Time) -> (u32, u32) {
    let s = at.as_secs_f64() as u64;
    ((s / 86_400) as u32, (s % 86_400) as u32)
}

/// Notes a rate between two times.
fn note(forecast: &mut LinkForecast, from: Time, to: Time, rate: f64) {
    let ((first, from), (last, to)) = (day_and_second(from), day_and_second(to));
    for day in first..=last {
        let begin = if day == first { from } else { 0 };
        let end = if day == last { to } else { 86_400 };
        if begin < end {
            forecast.daily_rates().note(day, begin..end, rate);
        }
    }
}

/// What a device promises when it is asked for an episode.
#[derive(Clone, Copy, Debug)]
struct PodcastPromise {
    ready: f64,
    paid_bytes: f64,
}

/// The downloads of a device, and what it promised of each.
fn played(
    weeks: &Weeks,
    knowledge: Knowledge,
    policy: CostPolicy,
) -> (PlaybackResult, Vec<Option<PodcastPromise>>) {
    let mode = match policy {
        CostPolicy::FreeOnly => SchedulerMode::FreeOnly,
        _ => SchedulerMode::Forecast,
    };
    let courses = &weeks.courses;
    let fresh = || Scheduler::new(mode, courses.iter().map(|course| course.class));
    // At once, it knows no deadline.
    let wish = |need: FlowDemand| match policy {
        CostPolicy::Any => FlowDemand {
            left: None,
            policy,
            ..need
        },
        _ => FlowDemand { policy, ..need },
    };
    let mut memory = match knowledge {
        Knowledge::More(uses) => Some(DeviceMemory::of(weeks, uses)),
        _ => None,
    };
    let mut day = 0;
    let mut learn = |scheduler: &mut Scheduler, now: Time| match knowledge {
        Knowledge::Lengths => {}
        Knowledge::More(_) => {
            if let Some(memory) = &mut memory {
                memory.learn(scheduler, now);
            }
        }
        Knowledge::EachDayAnew => {
            let today = ((now.as_secs_f64() - DAY_BEGINS_S) / DAY_S).floor() as i64;
            if today > day {
                day = today;
                *scheduler = fresh();
                let is_up = |course: &LinkCourse| LinkObservation {
                    up: is_up(course, now),
                    ..LinkObservation::default()
                };
                let seen: Vec<LinkObservation> = courses.iter().map(is_up).collect();
                scheduler.observe(now, &seen);
            }
        }
    };
    let mut promises: Vec<Option<PodcastPromise>> = vec![None; weeks.jobs.len()];
    let mut watch = |scheduler: &Scheduler, step: PlayerStep<'_>| {
        if step.open.iter().all(|(job, _)| promises[*job].is_some()) {
            return;
        }
        let flows: Vec<ScheduledFlow> = step
            .open
            .iter()
            .map(|(job, left)| ScheduledFlow {
                need: wish(FlowDemand {
                    remaining_bytes: Some(left.ceil() as u64),
                    left: Some(weeks.jobs[*job].due().since(step.at).into()),
                    policy,
                    if_late: DeadlineFallback::Cell,
                    metered_bytes_left: None,
                }),
                size_bytes: weeks.jobs[*job].bytes,
                priority: 0,
                source: SourceSupply::Ample,
            })
            .collect();
        let estimates = scheduler.estimates(step.at, &flows);
        for ((job, _), estimate) in step.open.iter().zip(estimates) {
            promises[*job].get_or_insert(PodcastPromise {
                ready: estimate.ready,
                paid_bytes: estimate.expected_metered_bytes as f64,
            });
        }
    };
    let mut scheduler = fresh();
    let played = play_learning(
        courses,
        &weeks.jobs,
        &mut scheduler,
        &|_, need| wish(need),
        &mut learn,
        &mut watch,
    );
    (played, promises)
}

fn is_up(course: &LinkCourse, at: Time) -> bool {
    let n = course.stretches.partition_point(|s| s.at <= at);
    n.checked_sub(1).is_some_and(|n| course.stretches[n].up)
}

/// What the weeks that count came to, of all seeds.
#[derive(Clone, Copy, Default)]
struct CommuteSums {
    downloads: usize,
    in_time: usize,
    paid: f64,
    promised: usize,
    ready: f64,
    kept: usize,
    off: f64,
    promised_paid: f64,
    promised_paid_off: f64,
}

impl CommuteSums {
    fn add(&mut self, weeks: &Weeks, knowledge: Knowledge, policy: CostPolicy) {
        let (played, promises) = played(weeks, knowledge, policy);
        for (n, job) in weeks.jobs.iter().enumerate().filter(|(_, job)| counts(job)) {
            let paid = played.of_job[n].carried[1];
            debug_assert!(paid <= job.bytes as f64 + 1.0);
            self.downloads += 1;
            self.in_time += usize::from(played.met[n]);
            self.paid += paid;
            if let Some(promise) = promises[n] {
                let came = if played.met[n] { 1.0 } else { 0.0 };
                self.promised += 1;
                self.ready += promise.ready;
                self.kept += usize::from(played.met[n]);
                self.off += (promise.ready - came) * (promise.ready - came);
                self.promised_paid += promise.paid_bytes;
                self.promised_paid_off += (promise.paid_bytes - paid).abs();
            }
        }
    }

    fn told(self, bytes: f64) -> Value {
        let of = |sum: f64| sum / self.promised.max(1) as f64;
        json!({
            "downloads": self.downloads,
            "in_time_percent": 100.0 * self.in_time as f64 / self.downloads.max(1) as f64,
            "paid_percent": 100.0 * self.paid / bytes,
            "promised_in_time_percent": 100.0 * of(self.ready),
            "kept_percent": 100.0 * of(self.kept as f64),
            // The mean square of the difference between the promised chance and what came of it.
            "promise_error": of(self.off),
            "promised_paid_percent": 100.0 * self.promised_paid / bytes,
            "promised_paid_off_percent": 100.0 * self.promised_paid_off / bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(seed: u64) -> Weeks {
        let files = SourceFiles::default();
        let text = files.read(SCENARIO).unwrap();
        let scenario = Scenario::parse(SCENARIO, &text, &mut |name| files.open(name)).unwrap();
        let ways = ways(&scenario).unwrap();
        weeks(&ways, PUBLICATIONS[1], seed).unwrap()
    }

    #[test]
    fn a_week_has_ten_commutes_by_the_clock_and_its_networks_in_their_order() {
        let weeks = drawn(1);
        assert_eq!(weeks.jobs.len(), WEEKS as usize * 15);
        let end = Time::from_secs_f64(f64::from(WEEKS) * 7.0 * DAY_S);
        for course in &weeks.courses {
            assert_eq!(course.end, end);
            let mut pairs = course.stretches.windows(2);
            assert!(pairs.all(|pair| pair[0].at <= pair[1].at));
        }
        // On each way the bus comes between the two others.
        let way: Vec<usize> = weeks.stays.iter().map(|stay| stay.network).collect();
        let buses = way.iter().filter(|network| **network == 1).count();
        assert_eq!(buses, WEEKS as usize * 10);
        assert!(way.windows(2).all(|pair| pair[0].abs_diff(pair[1]) <= 1));
        // Nobody is on the way at noon or at night.
        let wifi = &weeks.courses[0];
        let changes = wifi.stretches.iter().map(|s| day_and_second(s.at).1);
        assert!(changes.filter(|s| *s > 0).all(|s| {
            let hour = f64::from(s) / 3_600.0;
            (7.0..8.5).contains(&hour) || (17.0..18.5).contains(&hour)
        }));
    }

    #[test]
    fn a_rate_is_noted_on_both_days_of_a_night() {
        let mut forecast = LinkForecast::new();
        let at = |hours: f64| Time::from_secs_f64(hours * 3_600.0);
        note(&mut forecast, at(22.0), at(31.0), 1e6);
        let mut days = LinkForecast::new();
        days.daily_rates().note(0, 79_200..86_400, 1e6);
        days.daily_rates().note(1, 0..25_200, 1e6);
        assert_eq!(forecast, days);
    }
}
