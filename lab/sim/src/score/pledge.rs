//! Checks whether estimates of completion times hold: jobs of random sizes get an estimate with the
//! probability [`AT`], and are simulated with it as their deadline.
//!
//! The estimate is the one made [`AFTER`] the job's arrival, because links that were never used are
//! measured first. A time beyond the end of the record cannot be checked and does not count.

use super::course::{self, LinkCourse};
use super::jobs::ScoreJob;
use super::player;
use d2tp_sched::{
    CostPolicy, DeadlineFallback, FlowDemand, ScheduledFlow, Scheduler, SchedulerMode,
};
use d2tp_time::{Span, Time};
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde::Serialize;
use std::ops::AddAssign;

/// The probability of the estimates.
pub const AT: f64 = 0.9;

/// When the estimate is made, after the job's arrival.
pub const AFTER: Span = Span::from_secs(3);

/// The results of estimates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PromiseOutcome {
    /// Estimates within the record.
    pub promised: u64,
    /// Estimates that held: the job was complete in time.
    pub kept: u64,
    /// Estimates beyond the end of the record.
    pub beyond: u64,
}

impl PromiseOutcome {
    /// The share of estimates that held.
    pub fn share(&self) -> f64 {
        self.kept as f64 / self.promised.max(1) as f64
    }
}

impl AddAssign for PromiseOutcome {
    fn add_assign(&mut self, other: PromiseOutcome) {
        self.promised += other.promised;
        self.kept += other.kept;
        self.beyond += other.beyond;
    }
}

/// Makes and checks `count` estimates, one at a time.
pub fn keep(courses: &[LinkCourse], count: u64, seed: u64) -> PromiseOutcome {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let end = course::end(courses);
    let mut kept = PromiseOutcome::default();
    for _ in 0..count {
        let arrival = Time::from_secs_f64(end.as_secs_f64() * rng.random_range(0.0..0.6));
        let room: f64 = courses.iter().map(|c| c.bytes_between(arrival, end)).sum();
        let share = 0.01 * 30.0_f64.powf(rng.random_range(0.0..1.0));
        let bytes = (room * share).max(1.0) as u64;
        match promised(courses, arrival, bytes, end) {
            None => {}
            Some(deadline) if arrival + deadline > end => kept.beyond += 1,
            Some(deadline) => {
                let job = ScoreJob {
                    arrival,
                    bytes,
                    deadline,
                };
                let mut scheduler = scheduler(courses);
                let played = player::play(courses, &[job], &mut scheduler);
                kept.promised += 1;
                kept.kept += u64::from(played.met[0]);
            }
        }
    }
    kept
}

/// Forecasts with probabilities within the same tenth, and how many of their jobs were complete in
/// time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CalibrationBin {
    /// The number of forecasts.
    pub forecasts: u64,
    /// The sum of their probabilities.
    pub probability_sum: f64,
    /// The number of jobs that were complete in time.
    pub ready: u64,
}

impl AddAssign for CalibrationBin {
    fn add_assign(&mut self, other: CalibrationBin) {
        self.forecasts += other.forecasts;
        self.probability_sum += other.probability_sum;
        self.ready += other.ready;
    }
}

impl CalibrationBin {
    /// The mean of the forecast probabilities.
    pub fn forecast(&self) -> f64 {
        self.probability_sum / self.forecasts.max(1) as f64
    }

    /// The share of jobs that were complete in time.
    pub fn share(&self) -> f64 {
        self.ready as f64 / self.forecasts.max(1) as f64
    }
}

/// Makes forecasts for `count` jobs, one at a time, `after` their arrival, and simulates the jobs.
/// Returns one bin for each tenth of probability.
pub fn calibrate(
    courses: &[LinkCourse],
    count: u64,
    seed: u64,
    after: Span,
) -> [CalibrationBin; 10] {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let end = course::end(courses);
    let mut bins = [CalibrationBin::default(); 10];
    for _ in 0..count {
        let arrival = Time::from_secs_f64(end.as_secs_f64() * rng.random_range(0.0..0.6));
        let deadline =
            Span::from_secs_f64(end.since(arrival).as_secs_f64() * rng.random_range(0.1..1.0_f64));
        let due = arrival + deadline;
        let room: f64 = courses.iter().map(|c| c.bytes_between(arrival, due)).sum();
        // From easy jobs to half more than all links carry.
        let share = 1.5 * 30.0_f64.powf(-rng.random_range(0.0..1.0_f64));
        let job = ScoreJob {
            arrival,
            bytes: (room * share).max(1.0) as u64,
            deadline,
        };
        let mut forecast = None;
        let mut watch = |scheduler: &Scheduler, moment: player::PlayerStep<'_>| {
            if forecast.is_none() && moment.at >= arrival + after && moment.at < due {
                let Some((_, left)) = moment.open.first() else {
                    return;
                };
                let flow = ScheduledFlow {
                    need: FlowDemand {
                        remaining_bytes: Some(left.ceil() as u64),
                        left: Some(due.since(moment.at).into()),
                        policy: CostPolicy::FreeFirst,
                        if_late: DeadlineFallback::Cell,
                        metered_bytes_left: None,
                    },
                    size_bytes: job.bytes,
                    priority: 0,
                    source: d2tp_sched::SourceSupply::Ample,
                };
                forecast = Some(scheduler.estimates(moment.at, &[flow])[0].ready);
            }
        };
        let played = player::play_watched(courses, &[job], &mut scheduler(courses), &mut watch);
        if let Some(ready) = forecast {
            bins[((ready * 10.0) as usize).min(9)] += CalibrationBin {
                forecasts: 1,
                probability_sum: ready,
                ready: u64::from(played.met[0]),
            };
        }
    }
    bins
}

fn scheduler(courses: &[LinkCourse]) -> Scheduler {
    Scheduler::new(
        SchedulerMode::Forecast,
        courses.iter().map(|course| course.class),
    )
}

/// The estimated time; `None` if the job is complete before, or no estimate is possible.
fn promised(courses: &[LinkCourse], arrival: Time, bytes: u64, end: Time) -> Option<Span> {
    let deadline = end.since(arrival);
    let job = ScoreJob {
        arrival,
        bytes,
        deadline,
    };
    let mut promised = None;
    let mut watch = |scheduler: &Scheduler, moment: player::PlayerStep<'_>| {
        if promised.is_none() && moment.at >= arrival + AFTER {
            let left = moment.open[0].1.ceil() as u64;
            let span = scheduler.ready_by(moment.at, left, AT);
            promised = Some(span.map(|span| moment.at.since(arrival) + span));
        }
    };
    player::play_watched(courses, &[job], &mut scheduler(courses), &mut watch);
    promised.flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::course::{JobDirection, courses};
    use cedos_lab_link::trace::{CSV_HEADER, Trace};

    #[test]
    fn promises_are_mostly_kept_and_the_same_for_the_same_seed() {
        let mut rows = String::new();
        let mut cell = 4.0;
        let mut rng = Pcg64Mcg::seed_from_u64(5);
        for s in 0..600 {
            cell = (cell * rng.random_range(0.8..1.25_f64)).clamp(0.5, 20.0);
            let wifi = u8::from((s / 37) % 3 == 0);
            rows += &format!("{s},wifi,{wifi},10,,,\n{s},cell,1,{cell},,,\n");
        }
        let trace = Trace::from_csv(&format!("{CSV_HEADER}\n{rows}")).expect("a trace");
        let courses = courses(&trace, JobDirection::Down);
        // Events that were forecast a few seconds after a job's arrival occur about as often.
        let bins = calibrate(&courses, 200, 2, AFTER);
        let off: f64 = (bins.iter())
            .map(|bin| bin.forecasts as f64 * (bin.forecast() - bin.share()).abs())
            .sum();
        let count: u64 = bins.iter().map(|bin| bin.forecasts).sum();
        assert!(count > 100, "{bins:?}");
        assert!(off / count as f64 <= 0.15, "{bins:?}");
        let kept = keep(&courses, 20, 1);
        assert!(kept.promised > 10, "{kept:?}");
        assert!((0.7..=1.0).contains(&kept.share()), "{kept:?}");
        assert_eq!(keep(&courses, 20, 1), kept);
    }
}
