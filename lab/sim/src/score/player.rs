//! Simulates jobs over recorded links with a policy.
//!
//! ```text
//!  update: what did each link carry? ─▶ Scheduler::observe ─▶ decide ─▶ carry until the next update:
//!  a second later, or when the plan ends, a job comes, completes or is due, a link comes or goes
//! ```
//!
//! Changes of rates between updates are not visible to the policy.

use super::course::LinkCourse;
use super::jobs::ScoreJob;
use d2tp_sched::{
    CostPolicy, DeadlineFallback, FlowDemand, LinkAssignment, LinkObservation, ScheduledFlow,
    Scheduler,
};
use d2tp_time::{Span, Time};

/// The interval at which the goodput of a link in use is measured.
const LOOK: Span = Span::from_secs(1);

/// A remainder below this many bytes is a rounding error.
const ROUNDING: f64 = 0.5;

/// The result of simulating jobs with a policy.
#[derive(Debug, Clone, PartialEq)]
pub struct PlaybackResult {
    /// For each job, whether it was complete at its deadline.
    pub met: Vec<bool>,
    /// The bytes carried by each link, in the order of the courses.
    pub carried: Vec<f64>,
    /// The bytes that were missing at deadlines.
    pub late_bytes: f64,
    /// The result of each job.
    pub of_job: Vec<JobResult>,
    /// The number of decisions.
    pub decisions: u64,
}

/// The result of one job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct JobResult {
    /// The bytes of the job that each link carried.
    pub carried: Vec<f64>,
    /// When the job was complete; `None` if it never was.
    pub complete: Option<Time>,
    /// How often another link than before continued it.
    pub switches: u32,
    /// The bytes it had when it was last interrupted, by a switch or by the loss of its link: a
    /// client that starts again has fetched them in vain.
    pub interrupted_at: f64,
    /// The link that last carried it.
    last: Option<usize>,
}

impl JobResult {
    fn bytes(&self) -> f64 {
        self.carried.iter().sum()
    }

    /// Continues the job over these links.
    fn go_on(&mut self, links: impl Iterator<Item = usize> + Clone) {
        let Some(first) = links.clone().next() else {
            return;
        };
        match self.last {
            Some(last) if links.clone().any(|link| link == last) => {}
            Some(_) => {
                self.switches += 1;
                self.interrupted_at = self.bytes();
                self.last = Some(first);
            }
            None => self.last = Some(first),
        }
    }
}

/// The state of an open job.
#[derive(Debug, Clone, Copy)]
struct OpenJob {
    job: usize,
    left: f64,
}

/// The state that an observer gets after each step.
pub struct PlayerStep<'a> {
    /// When the step began.
    pub at: Time,
    /// The decision for the step.
    pub assignment: &'a LinkAssignment,
    /// The open jobs, and the bytes that they lacked.
    pub open: Vec<(usize, f64)>,
    /// The bytes that each link had carried by then.
    pub carried: &'a [f64],
}

/// Simulates `jobs` over `courses` with the decisions of `scheduler`.
pub fn play(
    courses: &[LinkCourse],
    jobs: &[ScoreJob],
    scheduler: &mut Scheduler,
) -> PlaybackResult {
    play_watched(courses, jobs, scheduler, &mut |_, _| {})
}

/// Simulates jobs and reports each step to an observer.
pub fn play_watched(
    courses: &[LinkCourse],
    jobs: &[ScoreJob],
    scheduler: &mut Scheduler,
    watch: &mut dyn FnMut(&Scheduler, PlayerStep<'_>),
) -> PlaybackResult {
    play_wishing(courses, jobs, scheduler, &|_, need| need, watch)
}

/// Simulates jobs with given demands: `demand_of` gets a job's index and its default demand, which
/// is free links first until the deadline.
pub fn play_wishing(
    courses: &[LinkCourse],
    jobs: &[ScoreJob],
    scheduler: &mut Scheduler,
    demand_of: &dyn Fn(usize, FlowDemand) -> FlowDemand,
    watch: &mut dyn FnMut(&Scheduler, PlayerStep<'_>),
) -> PlaybackResult {
    play_learning(courses, jobs, scheduler, demand_of, &mut |_, _| {}, watch)
}

/// Simulates jobs with given demands: after each observation of the links, `learn` may tell the scheduler more, or
/// replace it.
pub fn play_learning(
    courses: &[LinkCourse],
    jobs: &[ScoreJob],
    scheduler: &mut Scheduler,
    demand_of: &dyn Fn(usize, FlowDemand) -> FlowDemand,
    learn: &mut dyn FnMut(&mut Scheduler, Time),
    watch: &mut dyn FnMut(&Scheduler, PlayerStep<'_>),
) -> PlaybackResult {
    let mut table = PlaybackTable::new(courses, jobs);
    let last = jobs.iter().map(ScoreJob::due).max().unwrap_or_default();
    let mut assignment: Option<(LinkAssignment, Time)> = None;
    while table.now < last {
        let changed = table.turn_over();
        scheduler.observe(table.now, &table.samples());
        learn(scheduler, table.now);
        if table.open.is_empty() {
            assignment = None;
        } else if changed
            || assignment
                .as_ref()
                .is_none_or(|(_, until)| *until <= table.now)
        {
            let flows = table.flows(demand_of);
            let fresh = flows.iter().rev().take(std::mem::take(&mut table.arrived));
            for flow in fresh.rev() {
                if flow.need.remaining_bytes.is_some() {
                    scheduler.note_size(flow.size_bytes);
                }
            }
            let decided = scheduler.decide(table.now, &flows);
            table.played.decisions += 1;
            let until = table.now + decided.valid_for;
            assignment = Some((decided, until));
        }
        let mut until = table.next_event();
        if let Some((assignment, again)) = &assignment {
            until = until.min(*again).min(table.now + LOOK);
            let open = table
                .open
                .iter()
                .map(|open| (open.job, open.left))
                .collect();
            watch(
                scheduler,
                PlayerStep {
                    at: table.now,
                    assignment,
                    open,
                    carried: &table.played.carried,
                },
            );
            table.carry(assignment, until);
        }
        table.now = until;
    }
    table.turn_over();
    table.played
}

struct PlaybackTable<'a> {
    courses: &'a [LinkCourse],
    jobs: &'a [ScoreJob],
    now: Time,
    /// Open jobs, in order of arrival.
    open: Vec<OpenJob>,
    /// Jobs that have not arrived yet, the latest first.
    coming: Vec<usize>,
    /// How many of the last jobs arrived since the last decision.
    arrived: usize,
    /// The bytes and the time since the last update, for each link.
    seen: Vec<(f64, Span)>,
    /// Which links looked up at the last update.
    up: Vec<bool>,
    /// Whether a job was completed since then.
    completed: bool,
    played: PlaybackResult,
}

impl<'a> PlaybackTable<'a> {
    fn new(courses: &'a [LinkCourse], jobs: &'a [ScoreJob]) -> PlaybackTable<'a> {
        let mut coming: Vec<usize> = (0..jobs.len()).collect();
        coming.sort_by_key(|n| std::cmp::Reverse(jobs[*n].arrival));
        PlaybackTable {
            courses,
            jobs,
            now: Time::ZERO,
            open: Vec::new(),
            coming,
            arrived: 0,
            seen: vec![(0.0, Span::ZERO); courses.len()],
            up: vec![false; courses.len()],
            completed: false,
            played: PlaybackResult {
                met: vec![false; jobs.len()],
                carried: vec![0.0; courses.len()],
                late_bytes: 0.0,
                of_job: vec![
                    JobResult {
                        carried: vec![0.0; courses.len()],
                        ..JobResult::default()
                    };
                    jobs.len()
                ],
                decisions: 0,
            },
        }
    }

    fn stretch(&self, link: usize) -> (bool, f64) {
        let stretches = &self.courses[link].stretches;
        let n = stretches.partition_point(|s| s.at <= self.now);
        match n.checked_sub(1) {
            Some(n) => (stretches[n].up, stretches[n].rate),
            None => (false, 0.0),
        }
    }

    /// Removes jobs that are due and adds those that arrive. Returns whether anything changed for
    /// the policy.
    fn turn_over(&mut self) -> bool {
        let mut changed = std::mem::take(&mut self.completed);
        let (now, jobs) = (self.now, self.jobs);
        let late: f64 = (self.open.iter())
            .filter(|open| jobs[open.job].due() <= now)
            .map(|open| open.left)
            .sum();
        let before = self.open.len();
        self.open.retain(|open| jobs[open.job].due() > now);
        changed |= self.open.len() < before;
        self.played.late_bytes += late;
        while let Some(job) = self.coming.pop_if(|n| jobs[*n].arrival <= now) {
            let left = jobs[job].bytes as f64;
            self.open.push(OpenJob { job, left });
            self.arrived += 1;
            changed = true;
        }
        for link in 0..self.courses.len() {
            let (up, _) = self.stretch(link);
            changed |= up != self.up[link];
            if self.up[link] && !up {
                for open in &self.open {
                    let of_job = &mut self.played.of_job[open.job];
                    if of_job.last == Some(link) {
                        of_job.interrupted_at = of_job.bytes();
                    }
                }
            }
            self.up[link] = up;
        }
        changed
    }

    fn samples(&mut self) -> Vec<LinkObservation> {
        let seen = self.seen.iter_mut().map(std::mem::take);
        let sample = |((bytes, busy), up): ((f64, Span), &bool)| LinkObservation {
            up: *up,
            bytes: bytes as u64,
            busy,
        };
        seen.zip(&self.up).map(sample).collect()
    }

    fn flows(&self, demand_of: &dyn Fn(usize, FlowDemand) -> FlowDemand) -> Vec<ScheduledFlow> {
        let need = |open: &OpenJob| FlowDemand {
            remaining_bytes: Some(open.left.ceil() as u64),
            left: Some(self.jobs[open.job].due().since(self.now).into()),
            policy: CostPolicy::FreeFirst,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        };
        let flow = |open: &OpenJob| {
            let (need, whole) = (demand_of(open.job, need(open)), self.jobs[open.job].bytes);
            let came = whole - (open.left.ceil() as u64).min(whole);
            ScheduledFlow {
                size_bytes: need.remaining_bytes.map_or(came, |_| whole),
                need,
                priority: 0,
                source: d2tp_sched::SourceSupply::Ample,
            }
        };
        self.open.iter().map(flow).collect()
    }

    /// When a job arrives or is due, or a link comes or goes.
    fn next_event(&self) -> Time {
        let due = self.open.iter().map(|open| self.jobs[open.job].due());
        let arrival = self.coming.last().map(|n| self.jobs[*n].arrival);
        let last = self.jobs.iter().map(ScoreJob::due).max();
        let of_jobs = due.chain(arrival).chain(last).filter(|at| *at > self.now);
        let mut next = of_jobs.min().unwrap_or(Time::NEVER);
        for (course, up) in self.courses.iter().zip(&self.up) {
            let n = course.stretches.partition_point(|s| s.at <= self.now);
            let before = course.stretches[n..].iter().take_while(|s| s.at < next);
            next = before
                .filter(|s| s.up != *up)
                .map(|s| s.at)
                .fold(next, Time::min);
        }
        next
    }

    /// Lets links carry until then, or until a job is complete.
    fn carry(&mut self, assignment: &LinkAssignment, until: Time) {
        // The order refers to `open` as it was at the decision: no job was removed since.
        let links = 0..self.courses.len();
        let bounds = links.map(|link| assignment.carried_by(link).1 as f64);
        let mut budgets: Vec<f64> = bounds.collect();
        while self.now < until {
            let mut lines: Vec<(usize, usize, f64)> = Vec::new();
            for (link, budget) in budgets.iter().enumerate() {
                let (up, rate) = self.stretch(link);
                let flows = assignment.carried_by(link).0;
                let target = flows.iter().copied().find(|n| self.open[*n].left > 0.0);
                if let (true, Some(target)) = (up && *budget > 0.0, target) {
                    lines.push((link, target, rate));
                }
            }
            let mut step = until.since(self.now).as_secs_f64();
            for course in self.courses {
                let n = course.stretches.partition_point(|s| s.at <= self.now);
                if let Some(next) = course.stretches.get(n) {
                    step = step.min(next.at.since(self.now).as_secs_f64());
                }
            }
            for (place, open) in self.open.iter().enumerate() {
                let rate: f64 = lines.iter().filter(|l| l.1 == place).map(|l| l.2).sum();
                if rate > 0.0 {
                    step = step.min(open.left / rate);
                }
            }
            for (link, _, rate) in &lines {
                if *rate > 0.0 {
                    step = step.min(budgets[*link] / rate);
                }
            }
            // At least a nanosecond, because time must advance.
            let span = Span::from_nanos(((step * 1e9).ceil() as u64).max(1));
            let span = span.min(until.since(self.now));
            for place in 0..self.open.len() {
                let of = lines.iter().filter(|l| l.1 == place && l.2 > 0.0);
                let of_job = &mut self.played.of_job[self.open[place].job];
                of_job.go_on(of.map(|l| l.0));
            }
            for (link, target, rate) in lines {
                let bytes = (rate * step).min(self.open[target].left);
                self.open[target].left -= bytes;
                budgets[link] -= bytes;
                if budgets[link] < ROUNDING {
                    budgets[link] = 0.0;
                }
                self.seen[link].0 += bytes;
                self.seen[link].1 = self.seen[link].1 + span;
                self.played.carried[link] += bytes;
                self.played.of_job[self.open[target].job].carried[link] += bytes;
            }
            for open in &mut self.open {
                if open.left > 0.0 && open.left < ROUNDING {
                    open.left = 0.0;
                }
            }
            self.now += span;
        }
        let completed = self.open.iter().filter(|open| open.left == 0.0);
        for open in completed {
            self.played.met[open.job] = true;
            self.played.of_job[open.job].complete = Some(self.now);
            self.completed = true;
        }
        self.open.retain(|open| open.left > 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::course::{CourseSegment, JobDirection, courses};
    use crate::score::{jobs, optimum};
    use cedos_lab_link::trace::{CSV_HEADER, Trace};
    use d2tp_sched::{LinkClass, SchedulerMode};

    const MODES: [SchedulerMode; 5] = [
        SchedulerMode::FreeOnly,
        SchedulerMode::FreeFirst,
        SchedulerMode::Always,
        SchedulerMode::AlgorithmOne { margin: 0.5 },
        SchedulerMode::Forecast,
    ];

    /// Links for tests: a Wi-Fi that comes and goes, dead in every third stay, and a cellular link
    /// with a varying rate.
    fn links() -> Vec<LinkCourse> {
        let mut rows = String::new();
        for s in 0..900 {
            let (stay, on) = (s / 75, s % 75 < 40);
            let loss = u8::from(stay % 3 == 2);
            let cell = 2 + (s / 20) % 7;
            rows += &format!(
                "{s},wifi,{},12,,,{loss}\n{s},cell,1,{cell},,,\n",
                u8::from(on)
            );
        }
        let trace = Trace::from_csv(&format!("{CSV_HEADER}\n{rows}"));
        courses(&trace.expect("a trace"), JobDirection::Down)
    }

    fn scheduler(mode: SchedulerMode, courses: &[LinkCourse]) -> Scheduler {
        Scheduler::new(mode, courses.iter().map(|course| course.class))
    }

    #[test]
    fn every_byte_is_carried_once_or_late_and_no_policy_beats_the_optimum() {
        let courses = links();
        for seed in 0..20 {
            let drawn = jobs::draw(&courses, jobs::MIXES[0], 3, seed).expect("a set");
            let least = optimum::solve(&courses, &drawn)
                .expect("feasible")
                .metered_bytes;
            let bytes: f64 = drawn.iter().map(|job| job.bytes as f64).sum();
            for mode in MODES {
                let played = play(&courses, &drawn, &mut scheduler(mode, &courses));
                let carried: f64 = played.carried.iter().sum();
                let sum = carried + played.late_bytes;
                // Rounding of half a byte at each completion.
                assert!(
                    (sum - bytes).abs() < 10.0,
                    "seed {seed} {mode:?}: {sum} of {bytes}"
                );
                let spent = played.carried[1] + played.late_bytes;
                assert!(
                    spent > least - 10.0,
                    "seed {seed} {mode:?}: {spent} < {least}"
                );
                let all_met = played.met.iter().all(|met| *met);
                assert_eq!(all_met, played.late_bytes < 1.0, "seed {seed} {mode:?}");
            }
        }
    }

    #[test]
    fn free_only_pays_nothing_and_always_misses_nothing() {
        let courses = links();
        for seed in 0..20 {
            let drawn = jobs::draw(&courses, jobs::MIXES[1], 3, seed).expect("a set");
            let free = play(
                &courses,
                &drawn,
                &mut scheduler(SchedulerMode::FreeOnly, &courses),
            );
            assert_eq!(free.carried[1], 0.0);
            let always = play(
                &courses,
                &drawn,
                &mut scheduler(SchedulerMode::Always, &courses),
            );
            assert_eq!(always.met, [true; 3], "seed {seed}");
        }
    }

    #[test]
    fn a_job_is_complete_at_the_moment_its_bytes_are_there_and_not_before() {
        let courses = [LinkCourse {
            name: "wifi".to_owned(),
            class: LinkClass::Free,
            stretches: vec![CourseSegment {
                at: Time::ZERO,
                up: true,
                rate: 1_000.0,
            }],
            end: Time::NEVER,
        }];
        let met = |bytes| {
            let job = ScoreJob {
                arrival: Time::from_secs_f64(2.5),
                bytes,
                deadline: Span::from_secs(10),
            };
            let mut scheduler = scheduler(SchedulerMode::Forecast, &courses);
            let played = play(&courses, &[job], &mut scheduler);
            (played.met[0], played.late_bytes.round())
        };
        assert_eq!(met(9_999), (true, 0.0));
        assert_eq!(met(10_100), (false, 100.0));
    }

    #[test]
    fn the_device_is_told_what_it_can_measure_and_no_more() {
        let courses = links();
        let drawn = jobs::draw(&courses, jobs::MIXES[0], 3, 3).expect("a set");
        let arrival = drawn.iter().map(|job| job.arrival).min().expect("jobs");
        let mut first = true;
        let mut watch = |scheduler: &Scheduler, moment: PlayerStep<'_>| {
            if std::mem::take(&mut first) {
                assert_eq!(moment.at, arrival);
                // No link was used yet, so nothing was measured, even after an hour.
                assert!(
                    scheduler
                        .links()
                        .iter()
                        .all(|link| link.confidence() == 0.0)
                );
                assert!(
                    scheduler
                        .links()
                        .iter()
                        .all(|link| link.up_periods().is_empty())
                );
            }
        };
        let mut scheduler = scheduler(SchedulerMode::Forecast, &courses);
        play_watched(&courses, &drawn, &mut scheduler, &mut watch);
        assert!(!first);
    }
}
