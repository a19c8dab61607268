//! A field study: people who request podcasts with an allowed delay, on networks that come and go,
//! for weeks.
//!
//! ```text
//!  seed ─▶ User: Wi-Fi and cellular as fluids, downloads ─▶ score/player.rs ◀─▶ d2tp_sched::Scheduler
//!                                                                │
//!                                                   FieldDownload: over which link, when, interrupted how often
//! ```
//!
//! The model is coarse: a fluid without round trips, handshakes and switching times; Wi-Fi is used
//! at the moment when it is available. The device's own scheduler decides, one for each person, and
//! learns from the first download to the last.

use crate::score::course::{CourseSegment, LinkCourse};
use crate::score::jobs::ScoreJob;
use crate::score::player::{JobResult, play_wishing};
use cedos_lab_link::seeded;
use d2tp_sched::{CostPolicy, FlowDemand, LinkClass, Scheduler, SchedulerMode};
use d2tp_time::{Span, Time};
use rand::Rng;
use rand_pcg::Pcg32;
use std::time::Duration;

/// The random stream from which people are drawn.
const STREAM: u64 = 1 << 35;

/// The interval at which the rates of a link change.
const MINUTE: Span = Span::from_secs(60);

/// The longest time of a download for which no delay is allowed.
const AT_ONCE_MAX: Span = Span::from_secs(86_400);

/// A log-normal distribution, by its median and the deviation of its logarithm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogNormal {
    /// The median of the distribution.
    pub median: f64,
    /// Standard deviation of the natural logarithm.
    pub deviation: f64,
}

impl LogNormal {
    /// The log-normal distribution with this mean.
    pub fn of_mean(mean: f64, deviation: f64) -> LogNormal {
        let median = mean * (-0.5 * deviation * deviation).exp();
        LogNormal { median, deviation }
    }

    fn draw(self, rng: &mut Pcg32) -> f64 {
        // The sum of twelve even draws is close enough to a normal one.
        let normal = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
        self.median * (self.deviation * normal).exp()
    }
}

/// A class of downloads by their allowed delay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelayClass {
    /// The percentage of downloads in this class.
    pub share: f64,
    /// The shortest delay in hours.
    pub from_h: f64,
    /// The longest delay in hours.
    pub until_h: f64,
}

/// The parameters of a study: people, requests and networks.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldStudy {
    /// The number of people.
    pub people: u64,
    /// The length of the study.
    pub length: Span,
    /// The number of downloads of all people together.
    pub downloads: u64,
    /// The size of a download in bytes.
    pub size: LogNormal,
    /// The delay classes; all shares together are 100.
    pub delays: Vec<DelayClass>,
    /// The percentage of downloads without allowed delay that are requested while on Wi-Fi.
    pub at_once_on_wifi: f64,
    /// The length of Wi-Fi stays in seconds.
    pub stays: LogNormal,
    /// The length of most Wi-Fi gaps in seconds.
    pub gaps: LogNormal,
    /// The percentage of long gaps, and their length.
    pub long_gaps: (f64, LogNormal),
    /// The rate of Wi-Fi during a stay, in bytes per second.
    pub wifi: LogNormal,
    /// The rate of cellular during a minute, in bytes per second.
    pub cell: LogNormal,
    /// The factor by which a minute of Wi-Fi differs from its stay, with median 1.
    pub minutes: LogNormal,
}

/// One person of the study.
pub struct StudyParticipant {
    /// The links over time: Wi-Fi, then cellular.
    pub courses: Vec<LinkCourse>,
    /// The requested downloads.
    pub jobs: Vec<ScoreJob>,
    /// The delay class of each download.
    pub classes: Vec<usize>,
}

impl StudyParticipant {
    /// The share of a study's length with Wi-Fi.
    pub fn wifi_share(&self, length: Span) -> f64 {
        let near = up_between(&self.courses[0], Time::ZERO, Time::ZERO + length);
        near.as_secs_f64() / length.as_secs_f64()
    }
}

/// The result of a download.
pub struct FieldDownload {
    /// The delay class of the download.
    pub class: usize,
    /// The requested download.
    pub job: ScoreJob,
    /// Details of the download; links are Wi-Fi, then cellular.
    pub of_job: JobResult,
    /// How long the download was under way.
    pub under_way: Span,
    /// How much of the time under way Wi-Fi was available.
    pub near_wifi: Span,
}

impl FieldStudy {
    /// Draws a person.
    pub fn person(&self, seed: u64, number: u64) -> StudyParticipant {
        let mut rng = seeded(seed, STREAM + number);
        let end = Time::ZERO + self.length + AT_ONCE_MAX;
        let courses = vec![self.wifi(&mut rng, end), self.cell(&mut rng, end)];
        let fair = self.downloads / self.people;
        let count = fair + u64::from(number < self.downloads % self.people);
        let mut drawn: Vec<(ScoreJob, usize)> = (0..count)
            .map(|_| self.download(&courses[0], &mut rng))
            .collect();
        drawn.sort_by_key(|(job, _)| job.arrival);
        let (jobs, classes) = drawn.into_iter().unzip();
        StudyParticipant {
            courses,
            jobs,
            classes,
        }
    }

    fn gap_s(&self, rng: &mut Pcg32) -> f64 {
        let long = rng.random::<f64>() * 100.0 < self.long_gaps.0;
        if long { self.long_gaps.1 } else { self.gaps }.draw(rng)
    }

    fn wifi(&self, rng: &mut Pcg32, end: Time) -> LinkCourse {
        let mut stretches = vec![CourseSegment {
            at: Time::ZERO,
            up: false,
            rate: 0.0,
        }];
        // From a random time within a gap on.
        let mut at = Time::ZERO + seconds(self.gap_s(rng) * rng.random::<f64>());
        while at < end {
            let until = at + seconds(self.stays.draw(rng));
            let of_stay = self.wifi.draw(rng);
            while at < until {
                let rate = of_stay * self.minutes.draw(rng);
                stretches.push(CourseSegment { at, up: true, rate });
                at = (at + MINUTE).min(until);
            }
            stretches.push(CourseSegment {
                at,
                up: false,
                rate: 0.0,
            });
            at = until + seconds(self.gap_s(rng));
        }
        course("wifi", LinkClass::Free, stretches, end)
    }

    fn cell(&self, rng: &mut Pcg32, end: Time) -> LinkCourse {
        let mut stretches = Vec::new();
        let mut at = Time::ZERO;
        while at < end {
            let rate = self.cell.draw(rng);
            stretches.push(CourseSegment { at, up: true, rate });
            at += MINUTE;
        }
        course("cell", LinkClass::Metered, stretches, end)
    }

    fn download(&self, wifi: &LinkCourse, rng: &mut Pcg32) -> (ScoreJob, usize) {
        let bytes = self.size.draw(rng).max(1.0) as u64;
        let mut of_hundred = rng.random::<f64>() * 100.0;
        let class = self.delays.iter().position(|delays| {
            of_hundred -= delays.share;
            of_hundred < 0.0
        });
        let class = class.unwrap_or(self.delays.len() - 1);
        let DelayClass {
            from_h, until_h, ..
        } = self.delays[class];
        let delay_s = 3_600.0 * (from_h + (until_h - from_h) * rng.random::<f64>());
        let moment =
            |rng: &mut Pcg32| Time::from_secs_f64(self.length.as_secs_f64() * rng.random::<f64>());
        let mut arrival = moment(rng);
        if delay_s == 0.0 {
            let on_wifi = rng.random::<f64>() * 100.0 < self.at_once_on_wifi;
            while is_up(wifi, arrival) != on_wifi {
                arrival = moment(rng);
            }
        }
        let deadline = match delay_s {
            0.0 => AT_ONCE_MAX,
            s => seconds(s),
        };
        let job = ScoreJob {
            arrival,
            bytes,
            deadline,
        };
        (job, class)
    }

    /// Whether downloads of a class may not be delayed.
    pub fn is_at_once(&self, class: usize) -> bool {
        self.delays[class].until_h == 0.0
    }

    /// Simulates the downloads that a person requested, with a scheduler of this mode.
    pub fn fetch(&self, person: &StudyParticipant, mode: SchedulerMode) -> Vec<FieldDownload> {
        let classes = person.courses.iter().map(|course| course.class);
        let mut scheduler = Scheduler::new(mode, classes);
        let wish = |n: usize, need: FlowDemand| match mode {
            _ if !self.is_at_once(person.classes[n]) => need,
            // It can only express that by a deadline that has already come.
            SchedulerMode::AlgorithmOne { .. } => FlowDemand {
                left: Some(Duration::ZERO),
                ..need
            },
            _ => FlowDemand {
                left: None,
                policy: CostPolicy::Any,
                ..need
            },
        };
        let (courses, jobs) = (&person.courses, &person.jobs);
        let played = play_wishing(courses, jobs, &mut scheduler, &wish, &mut |_, _| {});
        let fetched = |(n, of_job): (usize, JobResult)| {
            let job = jobs[n];
            let until = of_job.complete.unwrap_or(job.due());
            FieldDownload {
                class: person.classes[n],
                job,
                of_job,
                under_way: until.since(job.arrival),
                near_wifi: up_between(&courses[0], job.arrival, until),
            }
        };
        played.of_job.into_iter().enumerate().map(fetched).collect()
    }
}

fn seconds(s: f64) -> Span {
    Span::from_secs_f64(s.max(1.0))
}

fn course(
    name: &str,
    class: LinkClass,
    mut stretches: Vec<CourseSegment>,
    end: Time,
) -> LinkCourse {
    stretches.push(CourseSegment {
        at: stretches.last().map_or(end, |last| last.at.max(end)),
        up: false,
        rate: 0.0,
    });
    LinkCourse {
        name: name.to_owned(),
        class,
        stretches,
        end,
    }
}

fn is_up(course: &LinkCourse, at: Time) -> bool {
    let n = course.stretches.partition_point(|s| s.at <= at);
    n.checked_sub(1).is_some_and(|n| course.stretches[n].up)
}

fn up_between(course: &LinkCourse, from: Time, until: Time) -> Span {
    let first = course.stretches.partition_point(|s| s.at <= from);
    let pairs = course.stretches[first.saturating_sub(1)..].windows(2);
    pairs
        .take_while(|pair| pair[0].at < until)
        .filter(|pair| pair[0].up)
        .map(|pair| pair[1].at.min(until).since(pair[0].at.max(from)))
        .fold(Span::ZERO, |sum, span| sum + span)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A study for tests: three people, a week.
    fn study() -> FieldStudy {
        let class = |share, from_h, until_h| DelayClass {
            share,
            from_h,
            until_h,
        };
        FieldStudy {
            people: 3,
            length: Span::from_secs(7 * 86_400),
            downloads: 61,
            size: LogNormal::of_mean(25e6, 0.8),
            delays: vec![class(30.0, 0.0, 0.0), class(70.0, 0.5, 6.0)],
            at_once_on_wifi: 80.0,
            stays: LogNormal::of_mean(1_200.0, 1.0),
            gaps: LogNormal::of_mean(600.0, 1.0),
            long_gaps: (1.0, LogNormal::of_mean(10_000.0, 0.4)),
            wifi: LogNormal::of_mean(335e3, 0.5),
            cell: LogNormal::of_mean(100e3, 0.5),
            minutes: LogNormal {
                median: 1.0,
                deviation: 0.2,
            },
        }
    }

    fn all(mode: SchedulerMode) -> Vec<FieldDownload> {
        let study = study();
        let of = |n| study.fetch(&study.person(7, n), mode);
        (0..study.people).flat_map(of).collect()
    }

    #[test]
    fn every_download_is_somebodys_and_of_a_class() {
        let fetched = all(SchedulerMode::FreeOnly);
        assert_eq!(fetched.len(), 61);
        let at_once = fetched.iter().filter(|f| f.class == 0).count();
        assert!((5..35).contains(&at_once), "{at_once}");
        for one in &fetched {
            assert!(one.near_wifi <= one.under_way);
            assert_eq!(one.class == 0, one.job.deadline == AT_ONCE_MAX);
        }
    }

    #[test]
    fn who_may_not_wait_does_not_and_who_may_is_spared_cellular() {
        let fetched = all(SchedulerMode::Forecast);
        let share = |class| {
            let of = || fetched.iter().filter(|f| f.class == class);
            let wifi: f64 = of().map(|f| f.of_job.carried[0]).sum();
            let cell: f64 = of().map(|f| f.of_job.carried[1]).sum();
            wifi / (wifi + cell)
        };
        assert!(share(1) > share(0), "{} {}", share(1), share(0));
        let slow = |f: &FieldDownload| {
            // A fifth of cellular's rate, and other downloads that go first.
            let at_most_s = 600.0 + f.job.bytes as f64 / 20e3;
            f.class == 0 && f.under_way.as_secs_f64() > at_most_s
        };
        assert!(!fetched.iter().any(slow));
    }

    #[test]
    fn the_same_seed_is_the_same_study() {
        let (study, again) = (study(), study());
        let (one, other) = (study.person(3, 1), again.person(3, 1));
        assert_eq!(one.jobs, other.jobs);
        assert_eq!(one.courses[0].stretches, other.courses[0].stretches);
        assert_ne!(one.jobs, study.person(4, 1).jobs);
    }

    #[test]
    fn time_near_wifi_is_counted_in_part() {
        let at = |s, up| CourseSegment {
            at: Time::from_secs_f64(s),
            up,
            rate: 1.0,
        };
        let stretches = vec![at(0.0, false), at(10.0, true), at(20.0, true)];
        let course = course(
            "wifi",
            LinkClass::Free,
            stretches,
            Time::from_secs_f64(30.0),
        );
        let up = |from, until| {
            up_between(
                &course,
                Time::from_secs_f64(from),
                Time::from_secs_f64(until),
            )
        };
        assert_eq!(up(0.0, 15.0), Span::from_secs(5));
        assert_eq!(up(12.0, 25.0), Span::from_secs(13));
        assert_eq!(up(25.0, 99.0), Span::from_secs(5));
        assert!(is_up(&course, Time::from_secs_f64(10.0)));
        assert!(!is_up(&course, Time::from_secs_f64(9.0)));
    }
}
