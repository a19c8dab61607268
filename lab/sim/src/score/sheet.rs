//! The score table: a row for each trace, set of jobs and policy, and two figures for all rows.
//!
//! *Missed* is the share of jobs that were not complete at their deadline. The *avoidable share* of
//! a row is (metered bytes + bytes missing at deadlines − optimum) ÷ bytes of all its jobs. Only
//! sets that stay feasible at [`JUDGED_SHARE`](super::jobs::JUDGED_SHARE) of the rates count.

use super::course::LinkCourse;
use super::jobs::{self, ScoreJob};
use super::optimum::{self, Optimum};
use super::player::{self, PlaybackResult, PlayerStep};
use d2tp_sched::{FlowDemand, LinkClass, Scheduler, SchedulerMode};
use d2tp_time::Time;
use serde::Serialize;

/// One trace with one set of jobs, on which all policies are compared.
#[derive(Debug, Clone)]
pub struct ScoreCase {
    /// The trace's name.
    pub trace: String,
    /// The seed of the jobs.
    pub seed: u64,
    /// The links of the case.
    pub courses: Vec<LinkCourse>,
    /// The jobs of the case.
    pub jobs: Vec<ScoreJob>,
    /// Whether policies know the sizes of jobs.
    pub told: bool,
    /// Whether the case is evaluated.
    pub feasible: bool,
    /// The optimum; `None` if not all deadlines can be met.
    pub optimum: Option<Optimum>,
}

impl ScoreCase {
    /// Creates a case and computes its optimum.
    pub fn new(trace: &str, seed: u64, courses: Vec<LinkCourse>, jobs: Vec<ScoreJob>) -> ScoreCase {
        ScoreCase {
            trace: trace.to_owned(),
            seed,
            feasible: jobs::feasible(&courses, &jobs),
            optimum: optimum::solve(&courses, &jobs),
            courses,
            jobs,
            told: true,
        }
    }

    fn play(
        &self,
        mode: SchedulerMode,
        watch: &mut dyn FnMut(&Scheduler, PlayerStep<'_>),
    ) -> PlaybackResult {
        let classes = self.courses.iter().map(|course| course.class);
        let mut scheduler = Scheduler::new(mode, classes);
        let demand_of = |_, need: FlowDemand| FlowDemand {
            remaining_bytes: need.remaining_bytes.filter(|_| self.told),
            ..need
        };
        player::play_wishing(&self.courses, &self.jobs, &mut scheduler, &demand_of, watch)
    }

    /// The bytes that each link has carried over time, with a policy.
    pub fn course(&self, mode: SchedulerMode) -> Vec<(Time, Vec<f64>)> {
        let mut course = vec![(Time::ZERO, vec![0.0; self.courses.len()])];
        let played = self.play(mode, &mut |_, moment| {
            course.push((moment.at, moment.carried.to_vec()));
        });
        let last = self.jobs.iter().map(ScoreJob::due).max();
        course.extend(last.map(|last| (last, played.carried)));
        course
    }

    /// Simulates the case with a policy.
    pub fn score(&self, policy: &str, mode: SchedulerMode) -> ScoreRow {
        let played = self.play(mode, &mut |_, _| {});
        let links = self.courses.iter().zip(&played.carried);
        let metered: f64 = links
            .filter(|(course, _)| course.class != LinkClass::Free)
            .map(|(_, bytes)| bytes)
            .sum();
        let bytes: u64 = self.jobs.iter().map(|job| job.bytes).sum();
        let optimum = self.optimum.as_ref().map(|optimum| optimum.metered_bytes);
        ScoreRow {
            trace: self.trace.clone(),
            seed: self.seed,
            policy: policy.to_owned(),
            jobs: self.jobs.len(),
            feasible: if self.feasible { self.jobs.len() } else { 0 },
            met: played.met.iter().filter(|met| **met).count(),
            bytes,
            metered_bytes: metered.round() as u64,
            late_bytes: played.late_bytes.round() as u64,
            optimum_metered_bytes: optimum.map(|bytes| bytes.round() as u64),
            avoidable_share: optimum
                .map(|optimum| (metered + played.late_bytes - optimum) / bytes as f64),
        }
    }
}

/// The result of a policy in a case.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScoreRow {
    /// The trace's name.
    pub trace: String,
    /// The seed of its jobs.
    pub seed: u64,
    /// The policy's name.
    pub policy: String,
    /// The number of jobs.
    pub jobs: usize,
    /// The number of jobs that are evaluated: all or none.
    pub feasible: usize,
    /// The number of jobs that were complete at their deadline.
    pub met: usize,
    /// The bytes of all jobs.
    pub bytes: u64,
    /// Bytes carried by metered links.
    pub metered_bytes: u64,
    /// Bytes missing at deadlines.
    pub late_bytes: u64,
    /// The least bytes that metered links must carry; `None` if not all deadlines can be met.
    pub optimum_metered_bytes: Option<u64>,
    /// The share of bytes that could have been saved.
    pub avoidable_share: Option<f64>,
}

/// Figures over all evaluated rows of a policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScoreFigures {
    /// The policy's name.
    pub policy: String,
    /// The number of evaluated rows.
    pub sets: usize,
    /// The number of evaluated jobs.
    pub jobs: usize,
    /// The share of jobs that were not complete in time.
    pub missed: f64,
    /// The mean avoidable share of the rows.
    pub avoidable_mean: f64,
    /// The avoidable share that one row in twenty exceeds.
    pub avoidable_p95: f64,
    /// The share of all bytes delivered in time that free links carried.
    pub offloaded: f64,
}

/// The figures of each policy, in the order in which they appear.
pub fn figures(rows: &[ScoreRow]) -> Vec<ScoreFigures> {
    let mut policies: Vec<&str> = Vec::new();
    for row in rows {
        if !policies.contains(&row.policy.as_str()) {
            policies.push(&row.policy);
        }
    }
    policies
        .into_iter()
        .filter_map(|policy| of_policy(policy, rows))
        .collect()
}

fn of_policy(policy: &str, rows: &[ScoreRow]) -> Option<ScoreFigures> {
    let judged = || {
        rows.iter()
            .filter(|row| row.policy == policy && row.feasible > 0)
    };
    let mut avoidable: Vec<f64> = judged().filter_map(|row| row.avoidable_share).collect();
    if avoidable.is_empty() {
        return None;
    }
    avoidable.sort_unstable_by(f64::total_cmp);
    let sum = |of: fn(&ScoreRow) -> f64| judged().map(of).sum::<f64>();
    let jobs = sum(|row| row.jobs as f64);
    let delivered = sum(|row| (row.bytes - row.late_bytes.min(row.bytes)) as f64);
    Some(ScoreFigures {
        policy: policy.to_owned(),
        sets: avoidable.len(),
        jobs: jobs as usize,
        missed: 1.0 - sum(|row| row.met as f64) / jobs,
        avoidable_mean: avoidable.iter().sum::<f64>() / avoidable.len() as f64,
        avoidable_p95: percentile(&avoidable, 0.95),
        offloaded: 1.0 - sum(|row| row.metered_bytes as f64) / delivered.max(1.0),
    })
}

/// The smallest value that is at least as large as this share of an ascending list.
fn percentile(ascending: &[f64], share: f64) -> f64 {
    let rank = (share * ascending.len() as f64).ceil() as usize;
    ascending[rank.clamp(1, ascending.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::course::{JobDirection, courses};
    use d2tp_time::Span;

    fn row(policy: &str, met: usize, feasible: usize, avoidable: f64) -> ScoreRow {
        ScoreRow {
            trace: "t".to_owned(),
            seed: 0,
            policy: policy.to_owned(),
            jobs: 3,
            feasible,
            met,
            bytes: 100,
            metered_bytes: 40,
            late_bytes: 0,
            optimum_metered_bytes: Some(0),
            avoidable_share: Some(avoidable),
        }
    }

    #[test]
    fn who_is_told_no_size_takes_a_small_job_for_a_large_one() {
        // Cellular from the beginning, Wi-Fi after ten seconds.
        let csv = "t_s,iface,up,down_mbps,up_mbps,rtt_ms,loss\n0,wwan0,1,8,,,\n0,wlan0,0,0,,,\n10,wlan0,1,16,,,\n\
                   100,wwan0,1,8,,,\n100,wlan0,1,16,,,\n";
        let trace = cedos_lab_link::trace::Trace::from_csv(csv).unwrap();
        let job = ScoreJob {
            arrival: Time::ZERO,
            bytes: 1_000_000,
            deadline: Span::from_secs(90),
        };
        let mut case = ScoreCase::new("t", 0, courses(&trace, JobDirection::Down), vec![job]);
        let mut paid = |told| {
            case.told = told;
            let row = case.score("algorithm-1", SchedulerMode::AlgorithmOne { margin: 0.0 });
            assert_eq!(row.met, 1);
            row.metered_bytes
        };
        assert_eq!((paid(true), paid(false)), (0, 1_000_000));
    }

    #[test]
    fn figures_are_over_the_judged_rows_of_each_policy() {
        let mut rows: Vec<ScoreRow> = (0..20)
            .map(|n| row("a", 3, 3, f64::from(n) / 100.0))
            .collect();
        rows.push(row("b", 2, 3, 0.5));
        rows.push(row("b", 0, 0, 9.0));
        let figures = figures(&rows);
        assert_eq!(figures.len(), 2);
        let (a, b) = (&figures[0], &figures[1]);
        assert_eq!((a.sets, a.jobs, a.missed), (20, 60, 0.0));
        assert!((a.avoidable_mean - 0.095).abs() < 1e-9);
        assert_eq!(a.avoidable_p95, 0.18);
        assert_eq!((b.sets, b.jobs, b.avoidable_mean), (1, 3, 0.5));
        assert!((b.missed - 1.0 / 3.0).abs() < 1e-9);
        assert!((b.offloaded - 0.6).abs() < 1e-9);
    }
}
