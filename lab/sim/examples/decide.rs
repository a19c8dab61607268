//! Measures how long a decision takes: `cargo run --release -p cedos-lab-sim --example decide`.

use d2tp_sched::{
    CostPolicy, DeadlineFallback, FlowDemand, LinkClass, LinkObservation, ScheduledFlow, Scheduler,
    SchedulerMode,
};
use d2tp_time::{Span, Time};
use std::hint::black_box;
use std::time::{Duration, Instant};

const TIMES: usize = 101;

fn main() {
    let (scheduler, now) = watched();
    for count in [1, 3, 100, 10_000] {
        let flows: Vec<ScheduledFlow> = (0..count).map(flow).collect();
        let mut took: Vec<Duration> = (0..TIMES)
            .map(|_| {
                let began = Instant::now();
                black_box(scheduler.decide(now, black_box(&flows)));
                began.elapsed()
            })
            .collect();
        took.sort_unstable();
        println!(
            "{count:>6} flows: median {:?}, fastest {:?}",
            took[TIMES / 2],
            took[0]
        );
    }
}

/// A scheduler that has observed for two hours: a Wi-Fi with outages, one that is down, and a
/// cellular link.
fn watched() -> (Scheduler, Time) {
    let classes = [LinkClass::Free, LinkClass::Free, LinkClass::Metered];
    let mut scheduler = Scheduler::new(SchedulerMode::Forecast, classes);
    let mut now = Time::ZERO;
    let used = |bytes| LinkObservation {
        up: true,
        bytes,
        busy: Span::from_secs(1),
    };
    for second in 0..7_200 {
        now += Span::from_secs(1);
        let wifi = if second % 97 < 50 {
            used(1_000_000)
        } else {
            LinkObservation::default()
        };
        scheduler.observe(now, &[wifi, LinkObservation::default(), used(500_000)]);
    }
    (scheduler, now)
}

/// A flow with a deadline; deadlines are spread over a day.
fn flow(n: u64) -> ScheduledFlow {
    let bytes = 100_000 + n * 7_919 % 1_000_000;
    ScheduledFlow {
        need: FlowDemand {
            remaining_bytes: Some(bytes),
            left: Some(Duration::from_millis(1_000 + n * 104_729 % 86_400_000)),
            policy: CostPolicy::FreeFirst,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        },
        size_bytes: bytes,
        priority: (n % 8) as u8,
        source: d2tp_sched::SourceSupply::Ample,
    }
}
