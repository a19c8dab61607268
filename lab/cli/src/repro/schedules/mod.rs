//! C4a, C4b, C4c: downloads of 100 MB with deadlines, scheduled together and separately.
//!
//! ```text
//!  D2Sched, all flows at once: lab/sim/src/score, a fluid model    each flow alone: here, also a fluid model
//! ```

pub mod lab;

use super::runner::Measured;
use cedos_lab_link::{Span, Time};
use cedos_lab_sim::score::course::{CourseSegment, LinkCourse};
use cedos_lab_sim::score::jobs::ScoreJob;
use cedos_lab_sim::score::player::play;
use d2tp_sched::{
    CostPolicy, DeadlineFallback, FlowDemand, LinkClass, LinkObservation, LinkShare, Scheduler,
    SchedulerMode,
};
use serde_json::{Value, json};
use std::time::Duration;

const BYTES: u64 = 100_000_000;
const MINUTE: Span = Span::from_secs(60);

/// How long the links were used before, in seconds.
const USED_BEFORE_S: u32 = 60;

/// The interval between decisions of a flow that is scheduled alone, in seconds.
const STEP_S: f64 = 0.1;

/// The reserve of a flow that is scheduled alone, as a share of the time needed, so that nothing is
/// lost between two decisions.
const MARGIN: f64 = 0.02;

/// A link with a constant rate.
#[derive(Clone, Copy)]
struct Line {
    name: &'static str,
    class: LinkClass,
    mbps: f64,
}

const POOR_WIFI: Line = Line {
    name: "wifi",
    class: LinkClass::Free,
    mbps: 0.8,
};
const WIFI: Line = Line {
    mbps: 6.3,
    ..POOR_WIFI
};
const CELL: Line = Line {
    name: "cell",
    class: LinkClass::Metered,
    mbps: 4.7,
};

/// Runs C4a in virtual time.
pub fn poor_wifi() -> anyhow::Result<Measured> {
    let lines = [POOR_WIFI, CELL];
    let due = [MINUTE.times(5)];
    let both = together(&lines, &due);
    let one = by_itself(&lines, &due);
    let wifi_only = by_itself(&[POOR_WIFI], &due);
    let ours = json!({
        "one_link_at_a_time": figures(&one),
        "both_links": figures(&both),
    });
    let baseline = json!({
        "wifi_only": figures(&wifi_only),
        "optimum": { "one_link_at_a_time_percent": 15.6, "both_links_percent": 30.0 },
    });
    Ok(Measured::figures(ours, baseline, 1))
}

/// Runs C4b in virtual time.
pub fn cellular_alone() -> anyhow::Result<Measured> {
    Ok(contended(&[CELL], &[MINUTE.times(30); 10]))
}

/// Runs C4c in virtual time.
pub fn one_urgent() -> anyhow::Result<Measured> {
    let mut due = vec![MINUTE.times(30); 9];
    due.push(MINUTE.times(5));
    Ok(contended(&[WIFI], &due))
}

fn contended(lines: &[Line], due: &[Span]) -> Measured {
    let ours = json!({
        "together": figures(&together(lines, due)),
        "each_by_itself": figures(&by_itself(lines, due)),
    });
    Measured::figures(ours, Value::Null, 1)
}

/// The result of a run: flows in time, and what each link carried.
struct ScheduleRunEnd {
    met: usize,
    carried: Vec<(&'static str, f64)>,
}

fn figures(ended: &ScheduleRunEnd) -> Value {
    let all: f64 = ended.carried.iter().map(|(_, bytes)| bytes).sum();
    let wifi = ended.carried.iter().filter(|(name, _)| *name == "wifi");
    // An empty sum of floating-point numbers is -0.0.
    let wifi: f64 = wifi.map(|(_, bytes)| bytes).sum::<f64>() + 0.0;
    json!({ "met": ended.met, "wifi_percent": 100.0 * wifi / all.max(1.0) })
}

fn together(lines: &[Line], due: &[Span]) -> ScheduleRunEnd {
    let last = due.iter().max().copied().unwrap_or(Span::ZERO) + MINUTE;
    let course = |line: &Line| {
        let at = |at, up, rate| CourseSegment { at, up, rate };
        let rate = line.mbps * 1e6 / 8.0;
        LinkCourse {
            name: line.name.to_owned(),
            class: line.class,
            stretches: vec![
                at(Time::ZERO, true, rate),
                at(Time::ZERO + last, false, 0.0),
            ],
            end: Time::ZERO + last,
        }
    };
    let courses: Vec<LinkCourse> = lines.iter().map(course).collect();
    let job = |due: &Span| ScoreJob {
        arrival: Time::ZERO,
        bytes: BYTES,
        deadline: *due,
    };
    let jobs: Vec<ScoreJob> = due.iter().map(job).collect();
    let mut scheduler = who_used(lines, SchedulerMode::Forecast);
    let played = play(&courses, &jobs, &mut scheduler);
    ScheduleRunEnd {
        met: played.met.iter().filter(|met| **met).count(),
        carried: lines
            .iter()
            .map(|line| line.name)
            .zip(played.carried)
            .collect(),
    }
}

/// A scheduler that has used the links for this time: it knows their rates, but nothing about their
/// changes.
fn who_used(lines: &[Line], mode: SchedulerMode) -> Scheduler {
    let mut scheduler = Scheduler::new(mode, lines.iter().map(|line| line.class));
    let sample = |line: &Line| LinkObservation {
        up: true,
        bytes: (line.mbps * 1e6 / 8.0) as u64,
        busy: Span::from_secs(1),
    };
    let samples: Vec<LinkObservation> = lines.iter().map(sample).collect();
    for _ in 0..USED_BEFORE_S {
        scheduler.observe(Time::ZERO, &samples);
    }
    scheduler
}

/// Each flow decides alone, on one link at a time.
fn by_itself(lines: &[Line], due: &[Span]) -> ScheduleRunEnd {
    struct Flow {
        left: f64,
        due_s: f64,
        on: Option<usize>,
    }
    let scheduler = who_used(lines, SchedulerMode::AlgorithmOne { margin: MARGIN });
    let flow = |due: &Span| Flow {
        left: BYTES as f64,
        due_s: due.as_secs_f64(),
        on: None,
    };
    let mut flows: Vec<Flow> = due.iter().map(flow).collect();
    let mut carried = vec![0.0; lines.len()];
    let (mut met, mut steps) = (0, 0u32);
    while !flows.is_empty() {
        let now_s = f64::from(steps) * STEP_S;
        flows.retain(|flow| flow.due_s > now_s);
        for flow in &mut flows {
            flow.on = decide(&scheduler, flow.left, flow.due_s - now_s);
        }
        for (n, line) in lines.iter().enumerate() {
            let on = flows.iter().filter(|flow| flow.on == Some(n)).count();
            let share = line.mbps * 1e6 / 8.0 * STEP_S / on.max(1) as f64;
            for flow in flows.iter_mut().filter(|flow| flow.on == Some(n)) {
                let bytes = share.min(flow.left);
                flow.left -= bytes;
                carried[n] += bytes;
            }
        }
        let before = flows.len();
        flows.retain(|flow| flow.left > 0.0);
        met += before - flows.len();
        steps += 1;
    }
    ScheduleRunEnd {
        met,
        carried: lines.iter().map(|line| line.name).zip(carried).collect(),
    }
}

/// The link that Algorithm 1 chooses for a flow that is scheduled alone.
fn decide(scheduler: &Scheduler, left: f64, left_s: f64) -> Option<usize> {
    let flow = d2tp_sched::ScheduledFlow {
        need: FlowDemand {
            remaining_bytes: Some(left.ceil() as u64),
            left: Some(Duration::from_secs_f64(left_s)),
            policy: CostPolicy::FreeFirst,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        },
        size_bytes: BYTES,
        priority: 0,
        source: d2tp_sched::SourceSupply::Ample,
    };
    let shares = scheduler.decide(Time::ZERO, &[flow]).shares;
    shares.iter().position(|share| *share != LinkShare::Nothing)
}
