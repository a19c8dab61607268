//! `readycast-week`: weeks of podcasts as `lab/scenarios/readycast-week.toml` describes one, drawn from seeds.
//!
//! ```text
//!  scenario: links, feeds ─▶ times and rates drawn ─▶ eight weeks ─┬─▶ D2Sched, Wi-Fi alone, at once
//!                                                                  └─▶ the clairvoyant optimum
//! ```
//!
//! The scenario's seconds are half-minutes here, and its episodes as much larger: the week in the lab is shortened,
//! this one takes the time that commutes take.

use super::experiment::source_files::SourceFiles;
use super::runner::Measured;
use crate::lab::podcasts::link_courses;
use anyhow::{Context, ensure};
use cedos_lab_link::{Span, Time, seeded};
use cedos_lab_scenario::{Podcasts, Scenario};
use cedos_lab_sim::score::course::{CourseSegment, LinkCourse};
use cedos_lab_sim::score::jobs::ScoreJob;
use cedos_lab_sim::score::optimum;
use cedos_lab_sim::score::player::{PlaybackResult, play_wishing};
use cedos_text::{parse_span, parse_time_of_day};
use d2tp_sched::{CostPolicy, FlowDemand, LinkClass, Scheduler, SchedulerMode};
use rand::Rng;
use rand_pcg::Pcg32;
use serde_json::{Value, json};

/// The scenario that describes a week.
const SCENARIO: &str = "readycast-week.toml";
/// The seeds. The schedulers were not changed on their account.
const SEEDS: std::ops::Range<u64> = 1..25;
/// The weeks of each seed, in which a scheduler learns.
const WEEKS: u64 = 8;
/// How many of the scenario's seconds a second is.
const STRETCH: f64 = 30.0;
/// How much larger the episodes are in the second case, where a commute without Wi-Fi is nearly too much for the
/// cellular network alone.
const HEAVIER: f64 = 1.4;
/// The random stream of the weeks.
const STREAM: u64 = 1 << 36;
/// How much shorter or longer a stay or a gap may be than in the scenario.
const LENGTHS: std::ops::Range<f64> = 0.5..1.5; // a guess
/// How much slower or faster a network may be.
const RATES: std::ops::Range<f64> = 0.6..1.4; // a guess
/// Draws of a week until one is found whose deadlines can all be met.
const DRAWS_MAX: usize = 1_000;

/// Links and downloads of a week that was drawn from a seed.
struct DrawnWeek {
    courses: Vec<LinkCourse>,
    jobs: Vec<ScoreJob>,
    /// The least bytes that metered links must carry.
    metered_bytes: f64,
    /// Draws before this one with a deadline that nobody could meet.
    refused: usize,
}

/// Runs the row in virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let files = SourceFiles::default();
    let mut open = |name: &str| files.open(name);
    let scenario = Scenario::parse(SCENARIO, &files.read(SCENARIO)?, &mut open)?;
    let (mut ours, baseline, refused) = weeks(&scenario, 1.0)?;
    let (heavier, of_heavier, refused_heavier) = weeks(&scenario, HEAVIER)?;
    ours["heavier"] = heavier;
    let mut baseline = baseline;
    baseline["heavier"] = of_heavier;
    let mut measured = Measured::figures(ours, baseline, SEEDS.count());
    measured.conditions.push(format!(
        "weeks with a deadline that no scheduler could have met were drawn again: {refused}, of the heavier ones \
         {refused_heavier}"
    ));
    Ok(measured)
}

/// Our figures, those for comparison, and the draws that were refused. Episodes are `factor` times as large.
fn weeks(scenario: &Scenario, factor: f64) -> anyhow::Result<(Value, Value, usize)> {
    let podcasts = scenario
        .podcasts
        .as_ref()
        .context("the scenario has no podcasts")?;
    let jobs = jobs(podcasts, factor)?;
    let courses = link_courses(scenario);
    let length = Span::from_secs_f64(scenario.duration_s * STRETCH);
    let mut sums = [
        WeekSums::default(),
        WeekSums::default(),
        WeekSums::default(),
    ];
    let (mut bytes, mut least, mut refused) = (0.0, 0.0, 0);
    for seed in SEEDS {
        let mut rng = seeded(seed, STREAM);
        let weeks: Vec<DrawnWeek> = (0..WEEKS)
            .map(|_| drawn(&courses, &jobs, length, &mut rng))
            .collect::<anyhow::Result<_>>()?;
        let (course, all) = in_a_row(&weeks, length);
        bytes += all.iter().map(|job| job.bytes as f64).sum::<f64>();
        least += weeks.iter().map(|week| week.metered_bytes).sum::<f64>();
        refused += weeks.iter().map(|week| week.refused).sum::<usize>();
        let modes = [
            (SchedulerMode::Forecast, CostPolicy::FreeFirst),
            (SchedulerMode::FreeOnly, CostPolicy::FreeOnly),
            (SchedulerMode::Forecast, CostPolicy::Any),
        ];
        for (sum, (mode, policy)) in sums.iter_mut().zip(modes) {
            sum.add(&played(&course, &all, mode, policy));
        }
    }
    let [mut ours, alone, at_once] = sums.map(|sum| sum.told(bytes));
    let optimum = 100.0 * (1.0 - least / bytes);
    ours["optimum_wifi_percent"] = json!(optimum);
    ours["at_once_wifi_percent"] = at_once["wifi_percent"].clone();
    ours["weeks"] = json!(WEEKS * SEEDS.count() as u64);
    let baseline = json!({
        "optimum": { "wifi_percent": optimum, "in_time_percent": 100.0 },
        "wifi_alone": alone,
        "at_once": at_once,
    });
    Ok((ours, baseline, refused))
}

/// The scenario's episodes as jobs, in the time of this row.
fn jobs(podcasts: &Podcasts, factor: f64) -> anyhow::Result<Vec<ScoreJob>> {
    let mut jobs = Vec::new();
    for feed in &podcasts.feeds {
        for episode in &feed.episodes {
            let deadline_s = match feed.rule.strip_prefix("in ") {
                Some(span) => parse_span(span).map_err(anyhow::Error::msg)?.as_secs_f64(),
                None => {
                    until(&feed.rule, podcasts).with_context(|| format!("rule {}", feed.rule))?
                        - episode.t_s
                }
            };
            ensure!(
                deadline_s > 0.0,
                "feed {}: an episode after its deadline",
                feed.id
            );
            jobs.push(ScoreJob {
                arrival: Time::from_secs_f64(episode.t_s * STRETCH),
                bytes: (episode.bytes as f64 * STRETCH * factor) as u64,
                deadline: Span::from_secs_f64(deadline_s * STRETCH),
            });
        }
    }
    jobs.sort_by_key(|job| job.arrival);
    Ok(jobs)
}

/// Seconds of the run at which a rule of a time of day is due.
fn until(rule: &str, podcasts: &Podcasts) -> Option<f64> {
    let time = parse_time_of_day(rule.split_once(' ')?.1)?;
    let at_s = i64::from(time.hour()) * 3_600 + i64::from(time.minute()) * 60;
    let ahead_s = (at_s - i64::from(podcasts.clock_s()?)).rem_euclid(86_400);
    Some(ahead_s as f64)
}

/// Draws a week in which all deadlines can be met.
fn drawn(
    courses: &[LinkCourse],
    jobs: &[ScoreJob],
    length: Span,
    rng: &mut Pcg32,
) -> anyhow::Result<DrawnWeek> {
    for refused in 0..DRAWS_MAX {
        let courses: Vec<LinkCourse> = courses
            .iter()
            .map(|course| altered(course, length, rng))
            .collect();
        if let Some(best) = optimum::solve(&courses, jobs) {
            return Ok(DrawnWeek {
                courses,
                jobs: jobs.to_vec(),
                metered_bytes: best.metered_bytes,
                refused,
            });
        }
    }
    anyhow::bail!("no week in {DRAWS_MAX} has deadlines that can be met")
}

/// A course with other lengths of its parts and other rates, in all as long as a week.
fn altered(course: &LinkCourse, length: Span, rng: &mut Pcg32) -> LinkCourse {
    let pairs: Vec<(CourseSegment, f64)> = course
        .stretches
        .windows(2)
        .map(|pair| {
            let s = pair[1].at.since(pair[0].at).as_secs_f64() * rng.random_range(LENGTHS);
            (pair[0], s)
        })
        .collect();
    let all: f64 = pairs.iter().map(|(_, s)| s).sum();
    let scale = length.as_secs_f64() / all.max(1.0);
    let mut at_s = 0.0;
    let mut stretches = Vec::new();
    for (segment, s) in pairs {
        let rate = segment.rate * rng.random_range(RATES);
        let at = Time::from_secs_f64(at_s);
        stretches.push(CourseSegment {
            at,
            rate,
            ..segment
        });
        at_s += s * scale;
    }
    LinkCourse {
        stretches,
        end: Time::ZERO + length,
        ..course.clone()
    }
}

/// The weeks one after another.
fn in_a_row(weeks: &[DrawnWeek], length: Span) -> (Vec<LinkCourse>, Vec<ScoreJob>) {
    let mut courses: Vec<LinkCourse> = Vec::new();
    let mut jobs = Vec::new();
    let mut begun = Time::ZERO;
    for week in weeks {
        let moved = |at: Time| begun + at.since(Time::ZERO);
        if courses.is_empty() {
            let empty = |course: &LinkCourse| LinkCourse {
                stretches: Vec::new(),
                ..course.clone()
            };
            courses = week.courses.iter().map(empty).collect();
        }
        for (all, course) in courses.iter_mut().zip(&week.courses) {
            let stretches = course.stretches.iter();
            all.stretches.extend(stretches.map(|s| CourseSegment {
                at: moved(s.at),
                ..*s
            }));
        }
        jobs.extend(week.jobs.iter().map(|job| ScoreJob {
            arrival: moved(job.arrival),
            ..*job
        }));
        begun += length;
    }
    for course in &mut courses {
        course.end = begun;
        course.stretches.push(CourseSegment {
            at: begun,
            up: false,
            rate: 0.0,
        });
    }
    (courses, jobs)
}

/// The jobs as a device fetches them that has this policy; at once, it knows no deadline.
fn played(
    courses: &[LinkCourse],
    jobs: &[ScoreJob],
    mode: SchedulerMode,
    policy: CostPolicy,
) -> PlaybackResult {
    let classes = courses.iter().map(|course| course.class);
    let mut scheduler = Scheduler::new(mode, classes);
    let wish = |_: usize, need: FlowDemand| match policy {
        CostPolicy::Any => FlowDemand {
            left: None,
            policy,
            ..need
        },
        _ => FlowDemand { policy, ..need },
    };
    debug_assert_eq!(courses[0].class, LinkClass::Free);
    play_wishing(courses, jobs, &mut scheduler, &wish, &mut |_, _| {})
}

/// What the weeks of all seeds came to.
#[derive(Clone, Copy, Default)]
struct WeekSums {
    downloads: usize,
    in_time: usize,
    wifi: f64,
    cellular: f64,
    again: f64,
}

impl WeekSums {
    fn add(&mut self, played: &PlaybackResult) {
        self.downloads += played.met.len();
        self.in_time += played.met.iter().filter(|met| **met).count();
        for of_job in &played.of_job {
            self.wifi += of_job.carried[0];
            self.cellular += of_job.carried[1];
            self.again += of_job.interrupted_at;
        }
    }

    fn told(self, bytes: f64) -> Value {
        json!({
            "downloads": self.downloads,
            "in_time_percent": 100.0 * self.in_time as f64 / self.downloads.max(1) as f64,
            "wifi_percent": 100.0 * self.wifi / bytes,
            "cellular_percent": 100.0 * self.cellular / bytes,
            "again_percent": 100.0 * self.again / bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario() -> Scenario {
        let files = SourceFiles::default();
        let text = files.read(SCENARIO).unwrap();
        Scenario::parse(SCENARIO, &text, &mut |name| files.open(name)).unwrap()
    }

    #[test]
    fn deadlines_are_those_of_the_rules() {
        let podcasts = scenario().podcasts.unwrap();
        let jobs = jobs(&podcasts, 1.0).unwrap();
        let episodes: usize = podcasts.feeds.iter().map(|feed| feed.episodes.len()).sum();
        assert_eq!(jobs.len(), episodes);
        // 07:30 is two minutes after the clock's 07:28.
        assert_eq!(until("daily 07:30", &podcasts), Some(120.0));
        assert_eq!(until("daily 07:27", &podcasts), Some(86_340.0));
    }

    #[test]
    fn a_drawn_week_is_as_long_as_the_scenario_and_of_its_seed() {
        let scenario = scenario();
        let length = Span::from_secs_f64(scenario.duration_s * STRETCH);
        let courses = link_courses(&scenario);
        let altered = |seed| altered(&courses[0], length, &mut seeded(seed, STREAM));
        let (one, again) = (altered(1), altered(1));
        assert_eq!(one.stretches, again.stretches);
        assert_ne!(one.stretches, altered(2).stretches);
        assert_eq!(one.end, Time::ZERO + length);
        assert_eq!(one.stretches.len() + 1, courses[0].stretches.len());
        assert!(
            one.stretches
                .windows(2)
                .all(|pair| pair[0].at <= pair[1].at)
        );
        assert!(one.stretches.last().unwrap().at < one.end);
    }

    #[test]
    fn who_knows_the_week_needs_no_more_of_cellular_than_who_does_not() {
        let scenario = scenario();
        let length = Span::from_secs_f64(scenario.duration_s * STRETCH);
        let jobs = jobs(&scenario.podcasts.clone().unwrap(), 1.0).unwrap();
        let mut rng = seeded(5, STREAM);
        let week = drawn(&link_courses(&scenario), &jobs, length, &mut rng).unwrap();
        let best = week.metered_bytes;
        let (course, all) = in_a_row(&[week], length);
        let ours = played(
            &course,
            &all,
            SchedulerMode::Forecast,
            CostPolicy::FreeFirst,
        );
        let at_once = played(&course, &all, SchedulerMode::Forecast, CostPolicy::Any);
        assert!(ours.met.iter().all(|met| *met));
        assert!(
            ours.carried[1] >= best - 1e6,
            "{} < {best}",
            ours.carried[1]
        );
        assert!(
            at_once.carried[1] > ours.carried[1],
            "{} {}",
            at_once.carried[1],
            ours.carried[1]
        );
    }
}
