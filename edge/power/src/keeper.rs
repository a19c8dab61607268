//! Tells a machine what changed of what D-Lock asks, and counts how often it was woken.

use d2tp_sched::WakePlan;
use d2tp_time::Time;

use crate::machine::{Bell, Machine, Notice};

/// D-Lock, on a machine.
#[derive(Debug)]
pub struct Keeper<M> {
    machine: M,
    vigil: WakePlan,
    rings: u64,
}

impl<M: Machine> Keeper<M> {
    /// That asks for nothing yet.
    pub fn new(machine: M) -> Keeper<M> {
        Keeper {
            machine,
            vigil: WakePlan::default(),
            rings: 0,
        }
    }

    /// Asks for this from now on; why the machine is held awake, for people.
    pub async fn keep(&mut self, now: Time, vigil: WakePlan, why: &str) {
        let known = std::mem::replace(&mut self.vigil, vigil);
        let bells = [
            (Bell::Look, known.scan_at, vigil.scan_at),
            (Bell::Start, known.start_at, vigil.start_at),
        ];
        for (bell, known, at) in bells {
            if known != at {
                self.machine.set_alarm(bell, at.map(|at| at.since(now)));
            }
        }
        match (known.hold, vigil.hold) {
            (false, true) => self.machine.hold(why).await,
            (true, false) => self.machine.let_go(),
            _ => {}
        }
    }

    /// What happens next; after each of them [`Keeper::keep`] is due.
    pub async fn next(&mut self) -> Notice {
        let notice = self.machine.next().await;
        if let Notice::Rings(bell) = notice {
            self.rings += 1;
            // Rung off: the same time asked for again is a new alarm.
            match bell {
                Bell::Look => self.vigil.scan_at = None,
                Bell::Start => self.vigil.start_at = None,
            }
        }
        notice
    }

    /// How often an alarm rang: wake-ups, at most.
    pub fn rings(&self) -> u64 {
        self.rings
    }

    /// The machine.
    pub fn machine(&self) -> &M {
        &self.machine
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_sched::{ScanPeriods, WakeNeeds, WakePlanner};
    use d2tp_time::Span;

    /// Sleeps until the first alarm, and keeps a diary.
    #[derive(Default)]
    struct Sleeper {
        now: Time,
        alarms: Vec<(Bell, Time)>,
        diary: Vec<String>,
    }

    impl Machine for Sleeper {
        fn set_alarm(&mut self, bell: Bell, after: Option<Span>) {
            self.alarms.retain(|(other, _)| *other != bell);
            self.alarms
                .extend(after.map(|after| (bell, self.now + after)));
        }

        async fn hold(&mut self, why: &str) {
            self.diary.push(format!("held: {why}"));
        }

        fn let_go(&mut self) {
            self.diary.push("let go".to_owned());
        }

        async fn next(&mut self) -> Notice {
            let first = (0..self.alarms.len()).min_by_key(|n| self.alarms[*n].1);
            let (bell, at) = self.alarms.remove(first.expect("it would sleep for ever"));
            self.now = self.now.max(at);
            Notice::Rings(bell)
        }
    }

    #[tokio::test]
    async fn a_waiting_flow_is_looked_for_every_period_and_begun_at_its_latest_start() {
        let mut keeper = Keeper::new(Sleeper::default());
        let mut lock = WakePlanner::new(ScanPeriods::fixed(Span::from_secs(120)));
        let begin = Time::ZERO + Span::from_secs(500);
        let mut standby = WakeNeeds {
            waits: true,
            latest_start: Some(begin),
            ..WakeNeeds::default()
        };
        let mut looks = Vec::new();
        loop {
            let now = keeper.machine().now;
            let vigil = lock.plan(now, &standby, |_| 0.0);
            keeper.keep(now, vigil, "episode-118.mp3 is on wwan0").await;
            if standby.runs {
                break;
            }
            match keeper.next().await {
                Notice::Rings(Bell::Look) => {
                    let now = keeper.machine().now;
                    lock.on_scan(now);
                    looks.push(now.as_secs_f64());
                }
                Notice::Rings(Bell::Start) => {
                    standby = WakeNeeds {
                        runs: true,
                        ..WakeNeeds::default()
                    };
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(looks, [0.0, 120.0, 240.0, 360.0, 480.0]);
        assert_eq!((keeper.machine().now, keeper.rings()), (begin, 6));
        let now = keeper.machine().now;
        keeper.keep(now, WakePlan::default(), "").await;
        let machine = keeper.machine();
        assert_eq!(
            machine.diary,
            ["held: episode-118.mp3 is on wwan0", "let go"]
        );
        assert!(machine.alarms.is_empty());
    }
}
