//! The clairvoyant optimum: the least metered bytes with all deadlines met.
//!
//! ```text
//!  between two arrivals or deadlines the set of open jobs is the same:
//!    x[job, interval, link] ≥ 0                 bytes
//!    Σ over intervals, links = size             for each job
//!    Σ over jobs ≤ what the link can carry      for each interval and link
//!    least Σ over metered links
//! ```

use super::course::LinkCourse;
use super::jobs::ScoreJob;
use d2tp_sched::LinkClass;
use d2tp_time::Time;
use microlp::{ComparisonOp, Error, OptimizationDirection, Problem};

/// The unit of the linear program in bytes, so that its numbers are near one.
const UNIT: f64 = 1e6;

/// Bytes of a job that a link carries in an interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobShare {
    /// The index of the job.
    pub job: usize,
    /// The index of the link.
    pub link: usize,
    /// The start of the interval.
    pub from: Time,
    /// The end of the interval.
    pub to: Time,
    /// The number of bytes.
    pub bytes: f64,
}

/// The best result that any policy could have had on a course.
#[derive(Debug, Clone)]
pub struct Optimum {
    /// The least metered bytes.
    pub metered_bytes: f64,
    /// A schedule that carries the least metered bytes.
    pub parts: Vec<JobShare>,
}

/// Solves the linear program; `None` if not all deadlines can be met.
pub fn solve(courses: &[LinkCourse], jobs: &[ScoreJob]) -> Option<Optimum> {
    let mut moments: Vec<Time> = jobs.iter().flat_map(|j| [j.arrival, j.due()]).collect();
    moments.sort_unstable();
    moments.dedup();
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let mut parts = Vec::new();
    let mut of_job = vec![Vec::new(); jobs.len()];
    for pair in moments.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        for (link, course) in courses.iter().enumerate() {
            let room = course.bytes_between(from, to);
            let cost = match course.class {
                LinkClass::Free => 0.0,
                LinkClass::Metered | LinkClass::Roaming => 1.0,
            };
            let mut together = Vec::new();
            for (job, one) in jobs.iter().enumerate() {
                if one.arrival > from || one.due() < to || room <= 0.0 {
                    continue;
                }
                let variable = problem.add_var(cost, (0.0, f64::INFINITY));
                let part = JobShare {
                    job,
                    link,
                    from,
                    to,
                    bytes: 0.0,
                };
                parts.push((variable, part));
                of_job[job].push((variable, 1.0));
                together.push((variable, 1.0));
            }
            if !together.is_empty() {
                problem.add_constraint(&together[..], ComparisonOp::Le, room / UNIT);
            }
        }
    }
    for (of_job, job) in of_job.iter().zip(jobs) {
        if of_job.is_empty() {
            return None;
        }
        problem.add_constraint(&of_job[..], ComparisonOp::Eq, job.bytes as f64 / UNIT);
    }
    let solution = match problem.solve() {
        Ok(outcome) => outcome.into_solution().ok()?,
        Err(Error::Infeasible) => return None,
        Err(fault) => panic!("the optimum's program is bounded and well formed: {fault}"),
    };
    let parts = parts
        .into_iter()
        .map(|(variable, part)| JobShare {
            bytes: solution.var_value(variable) * UNIT,
            ..part
        })
        .filter(|part| part.bytes > 0.0)
        .collect();
    Some(Optimum {
        metered_bytes: solution.objective() * UNIT,
        parts,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::course::CourseSegment;
    use d2tp_time::Span;

    /// 1 MB/s over Wi-Fi from 10 to 20 s, 2 MB/s over a cellular link until 40 s.
    fn courses() -> Vec<LinkCourse> {
        let course = |class, steps: &[(u64, f64)]| LinkCourse {
            name: format!("{class:?}"),
            class,
            stretches: steps
                .iter()
                .map(|(at_s, rate)| CourseSegment {
                    at: Time::ZERO + Span::from_secs(*at_s),
                    up: *rate > 0.0,
                    rate: *rate,
                })
                .collect(),
            end: Time::ZERO + Span::from_secs(40),
        };
        vec![
            course(LinkClass::Free, &[(0, 0.0), (10, 1e6), (20, 0.0)]),
            course(LinkClass::Metered, &[(0, 2e6), (40, 0.0)]),
        ]
    }

    fn job(arrival_s: u64, bytes: u64, deadline_s: u64) -> ScoreJob {
        ScoreJob {
            arrival: Time::ZERO + Span::from_secs(arrival_s),
            bytes,
            deadline: Span::from_secs(deadline_s),
        }
    }

    #[test]
    fn the_free_link_carries_what_it_can_by_then_and_the_other_the_rest() {
        let metered = |jobs: &[ScoreJob]| solve(&courses(), jobs).map(|o| o.metered_bytes.round());
        assert_eq!(metered(&[job(0, 8_000_000, 30)]), Some(0.0));
        assert_eq!(metered(&[job(0, 12_000_000, 30)]), Some(2e6));
        assert_eq!(metered(&[job(0, 12_000_000, 15)]), Some(7e6));
        // Two share the free link.
        assert_eq!(
            metered(&[job(0, 6_000_000, 15), job(5, 9_000_000, 30)]),
            Some(5e6)
        );
    }

    #[test]
    fn what_cannot_be_met_has_no_optimum() {
        assert!(solve(&courses(), &[job(0, 71_000_000, 30)]).is_none());
        assert!(solve(&courses(), &[job(50, 1, 10)]).is_none());
    }

    #[test]
    fn the_parts_are_the_jobs_and_within_what_the_links_can_carry() {
        let jobs = [job(0, 20_000_000, 25), job(3, 30_000_000, 30)];
        let courses = courses();
        let optimum = solve(&courses, &jobs).expect("feasible");
        for (n, job) in jobs.iter().enumerate() {
            let of_job = optimum.parts.iter().filter(|part| part.job == n);
            let carried: f64 = of_job.clone().map(|part| part.bytes).sum();
            assert!((carried - job.bytes as f64).abs() < 1.0, "{carried}");
            assert!(of_job.clone().all(|part| part.from >= job.arrival));
            assert!(of_job.clone().all(|part| part.to <= job.due()));
        }
        for part in &optimum.parts {
            let same = |other: &&JobShare| other.link == part.link && other.from == part.from;
            let carried: f64 = optimum
                .parts
                .iter()
                .filter(same)
                .map(|part| part.bytes)
                .sum();
            let room = courses[part.link].bytes_between(part.from, part.to);
            assert!(carried <= room + 1.0, "{carried} of {room}");
        }
    }
}
