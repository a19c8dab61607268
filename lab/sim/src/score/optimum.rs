//! The clairvoyant optimum: the least metered bytes with all deadlines met.
//!
//! ```text
//!  between two arrivals or deadlines the set of open jobs is the same:
//!    x[job, interval, link] ≥ 0                 bytes
//!    Σ over intervals, links = size             for each job
//!    Σ over jobs ≤ what the link can carry      for each interval and link
//!    least Σ over metered links
//! ```

use super::course::Course;
use super::jobs::Job;
use d2tp_sched::Class;
use d2tp_time::Time;
use microlp::{ComparisonOp, Error, OptimizationDirection, Problem};

/// The program counts in these: its numbers stay near one. Bytes.
const UNIT: f64 = 1e6;

/// A share of a job carried in an interval over a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Part {
    /// Which job.
    pub job: usize,
    /// Which link.
    pub link: usize,
    /// From when.
    pub from: Time,
    /// Until when.
    pub to: Time,
    /// How much.
    pub bytes: f64,
}

/// The optimum.
#[derive(Debug, Clone)]
pub struct Optimum {
    /// The least metered bytes.
    pub metered_bytes: f64,
    /// One way to do it.
    pub parts: Vec<Part>,
}

/// Solves it; nothing if not all deadlines can be met.
pub fn solve(courses: &[Course], jobs: &[Job]) -> Option<Optimum> {
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
                Class::Free => 0.0,
                Class::Metered | Class::Roaming => 1.0,
            };
            let mut together = Vec::new();
            for (job, one) in jobs.iter().enumerate() {
                if one.arrival > from || one.due() < to || room <= 0.0 {
                    continue;
                }
                let variable = problem.add_var(cost, (0.0, f64::INFINITY));
                let part = Part {
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
        .map(|(variable, part)| Part {
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
