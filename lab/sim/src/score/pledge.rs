//! Whether promises are kept: jobs of drawn sizes are promised a time at [`AT`], and played with it as
//! their deadline.
//!
//! The promise is the one given [`AFTER`] the job came, for links that were never used are measured
//! first. A time beyond the end of the record cannot be checked and is not counted as promised.

use super::course::{self, LinkCourse};
use super::jobs::ScoreJob;
use super::player;
use d2tp_sched::{Scheduler, SchedulerMode};
use d2tp_time::{Span, Time};
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde::Serialize;
use std::ops::AddAssign;

/// The probability promised.
pub const AT: f64 = 0.9;

/// When it is promised, after the job came.
pub const AFTER: Span = Span::from_secs(3);

/// What came of promises.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PromiseOutcome {
    /// Given, and within the record.
    pub promised: u64,
    /// Promises that were kept: the job was ready in time.
    pub kept: u64,
    /// Given for a time beyond the record.
    pub beyond: u64,
}

impl PromiseOutcome {
    /// The share that was ready in time.
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

/// Gives `count` promises, one at a time.
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

fn scheduler(courses: &[LinkCourse]) -> Scheduler {
    Scheduler::new(
        SchedulerMode::Forecast,
        courses.iter().map(|course| course.class),
    )
}

/// The time promised; nothing if the job is complete before it is, or nothing can be promised.
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
        let kept = keep(&courses, 20, 1);
        assert!(kept.promised > 10, "{kept:?}");
        assert!((0.7..=1.0).contains(&kept.share()), "{kept:?}");
        assert_eq!(keep(&courses, 20, 1), kept);
    }
}
