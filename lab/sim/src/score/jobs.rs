//! Jobs, read from a file or drawn.

use super::course::{self, LinkCourse};
use super::optimum;
use d2tp_time::{Span, Time};
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// A transfer with a deadline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreJob {
    /// When the job becomes known.
    pub arrival: Time,
    /// The size of the job in bytes.
    pub bytes: u64,
    /// The time from its arrival to its deadline.
    pub deadline: Span,
}

impl ScoreJob {
    /// The deadline as a point in time.
    pub fn due(&self) -> Time {
        self.arrival + self.deadline
    }
}

/// The share of every link's rate at which a set of jobs must still be feasible to be evaluated.
pub const JUDGED_SHARE: f64 = 0.7;

/// Whether all deadlines can be met with every link at that share of its rate.
pub fn feasible(courses: &[LinkCourse], jobs: &[ScoreJob]) -> bool {
    let scaled: Vec<LinkCourse> = courses.iter().map(|c| c.scaled(JUDGED_SHARE)).collect();
    optimum::solve(&scaled, jobs).is_some()
}

/// How jobs are drawn. All of them arrive in the first seven tenths of a trace, evenly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobMix {
    /// The name on the command line.
    pub name: &'static str,
    /// The deadline as a share of the rest of the trace, drawn evenly.
    pub deadline: (f64, f64),
    /// The size as a share of what all links can carry until the deadline, drawn evenly over its
    /// logarithm.
    pub size: (f64, f64),
}

/// Every mix; the first one is the default.
pub const MIXES: [JobMix; 3] = [
    JobMix {
        name: "mixed",
        deadline: (0.1, 1.0),
        size: (0.04, 0.5),
    },
    JobMix {
        name: "large",
        deadline: (0.2, 1.0),
        size: (0.1, 0.6),
    },
    JobMix {
        name: "short",
        deadline: (0.05, 0.3),
        size: (0.05, 0.7),
    },
];

/// Draws a set of `count` jobs that can be evaluated; `None` if a thousand draws give none.
pub fn draw(courses: &[LinkCourse], mix: JobMix, count: usize, seed: u64) -> Option<Vec<ScoreJob>> {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let end_s = course::end(courses).as_secs_f64();
    (0..1000)
        .map(|_| {
            (0..count)
                .map(|_| one(courses, end_s, mix, &mut rng))
                .collect()
        })
        .find(|jobs: &Vec<ScoreJob>| feasible(courses, jobs))
}

fn one(courses: &[LinkCourse], end_s: f64, mix: JobMix, rng: &mut Pcg64Mcg) -> ScoreJob {
    let arrival_s = rng.random_range(0.0..0.7) * end_s;
    let deadline_s = rng.random_range(mix.deadline.0..mix.deadline.1) * (end_s - arrival_s);
    let arrival = Time::from_secs_f64(arrival_s);
    let deadline = Span::from_secs_f64(deadline_s);
    let capacity: f64 = courses
        .iter()
        .map(|course| course.bytes_between(arrival, arrival + deadline))
        .sum();
    let (least, most) = mix.size;
    let share = least * (most / least).powf(rng.random_range(0.0..1.0));
    ScoreJob {
        arrival,
        bytes: (share * capacity).max(1.0) as u64,
        deadline,
    }
}

/// Parses `arrival_s,size_bytes,deadline_s`, with or without that header.
///
/// # Errors
/// The faulty line, and the error in it.
pub fn from_csv(text: &str) -> Result<Vec<ScoreJob>, String> {
    let mut jobs = Vec::new();
    for (n, line) in text.lines().map(str::trim).enumerate() {
        if line.is_empty() || line.starts_with('#') || (n == 0 && line == CSV_HEADER) {
            continue;
        }
        let why = |what: &str| format!("line {}: {what}", n + 1);
        let number = |cell: &str| {
            let text = cell.trim();
            let none = |_| why(&format!("`{text}` is no number; expected `{CSV_HEADER}`"));
            text.parse::<f64>().map_err(none)
        };
        let cells: Vec<f64> = line.split(',').map(number).collect::<Result<_, _>>()?;
        let [arrival, size, deadline] = cells[..] else {
            return Err(why(&format!("expected `{CSV_HEADER}`")));
        };
        if !(arrival >= 0.0 && size >= 1.0 && deadline > 0.0 && cells.iter().all(|c| *c < 1e15)) {
            return Err(why("a job begins at 0 or later, has a byte and a deadline"));
        }
        jobs.push(ScoreJob {
            arrival: Time::from_secs_f64(arrival),
            bytes: size as u64,
            deadline: Span::from_secs_f64(deadline),
        });
    }
    if jobs.is_empty() {
        return Err("no jobs".to_owned());
    }
    Ok(jobs)
}

/// The header of a file of jobs.
pub const CSV_HEADER: &str = "arrival_s,size_bytes,deadline_s";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::course::JobDirection;
    use cedos_lab_link::trace::{CSV_HEADER as TRACE_HEADER, Trace};

    fn courses() -> Vec<LinkCourse> {
        let rows: String = (0..300)
            .map(|s| format!("{s},wifi,{},8,,,\n{s},cell,1,4,,,\n", u8::from(s % 60 < 30)))
            .collect();
        let trace = Trace::from_csv(&format!("{TRACE_HEADER}\n{rows}"));
        course::courses(&trace.expect("a trace"), JobDirection::Down)
    }

    #[test]
    fn a_seed_draws_the_same_feasible_jobs_and_another_seed_others() {
        let courses = courses();
        for mix in MIXES {
            let jobs = draw(&courses, mix, 3, 7).expect("a set");
            assert_eq!(jobs.len(), 3);
            assert!(feasible(&courses, &jobs));
            assert_eq!(draw(&courses, mix, 3, 7), Some(jobs.clone()));
            assert_ne!(draw(&courses, mix, 3, 8), Some(jobs));
        }
    }

    #[test]
    fn what_needs_more_than_seven_tenths_of_the_rates_is_not_judged() {
        // 1 MB/s and 0.5 MB/s for 30 s.
        let job = |bytes| ScoreJob {
            arrival: Time::ZERO,
            bytes,
            deadline: Span::from_secs(30),
        };
        assert!(feasible(&courses(), &[job(31_000_000)]));
        assert!(!feasible(&courses(), &[job(32_000_000)]));
    }

    #[test]
    fn a_file_of_jobs_is_read_and_its_faults_are_named() {
        let jobs = from_csv("arrival_s,size_bytes,deadline_s\n1.5,1000,20\n# later\n2,7,0.5\n");
        let jobs = jobs.expect("two jobs");
        assert_eq!(jobs.len(), 2);
        assert_eq!(jobs[0].due(), Time::from_secs_f64(21.5));
        assert_eq!(jobs[1].bytes, 7);
        for (text, fault) in [
            ("", "no jobs"),
            (
                "a,b,c\n1,2,3\n",
                "line 1: `a` is no number; expected `arrival_s,size_bytes,deadline_s`",
            ),
            ("1,2\n", "line 1"),
            ("1,2,3\n1,x,3\n", "line 2"),
            ("1,0,3\n", "line 1"),
            ("-1,5,3\n", "line 1"),
        ] {
            let why = from_csv(text).expect_err(text);
            assert!(why.contains(fault), "{text:?}: {why}");
        }
    }
}
