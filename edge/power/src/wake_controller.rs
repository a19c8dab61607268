//! Applies the wake plans of D-Lock to a machine, and counts its alarms.

use d2tp_sched::WakePlan;
use d2tp_time::Time;

use crate::machine::{PowerEvent, SleepingMachine, WakeReason};

/// Carries out wake plans (D-Lock) on a machine.
#[derive(Debug)]
pub struct WakeController<M> {
    machine: M,
    plan: WakePlan,
    alarm_count: u64,
}

impl<M: SleepingMachine> WakeController<M> {
    /// A controller without requests to the machine.
    pub fn new(machine: M) -> WakeController<M> {
        WakeController {
            machine,
            plan: WakePlan::default(),
            alarm_count: 0,
        }
    }

    /// Applies a plan; `why`: why the machine is kept awake, for users.
    pub async fn apply(&mut self, now: Time, plan: WakePlan, why: &str) {
        let known = self.plan;
        // A request that is dropped while it waits for an answer is made again by the next plan.
        self.plan = WakePlan {
            hold: known.hold,
            ..plan
        };
        let bells = [
            (WakeReason::ScanLinks, known.scan_at, plan.scan_at),
            (WakeReason::StartFlow, known.start_at, plan.start_at),
        ];
        for (bell, known, at) in bells {
            if known != at {
                self.machine.set_alarm(bell, at.map(|at| at.since(now)));
            }
        }
        match (known.hold, plan.hold) {
            (false, true) => self.machine.inhibit_sleep(why).await,
            (true, false) => self.machine.allow_sleep(),
            _ => {}
        }
        self.plan.hold = plan.hold;
    }

    /// Changes what the machine can do. The next plan asks again to keep it awake.
    pub fn change_machine(&mut self, change: impl FnOnce(&mut M)) {
        change(&mut self.machine);
        self.plan.hold = false;
    }

    /// The next event; call [`WakeController::apply`] after each.
    pub async fn next_event(&mut self) -> PowerEvent {
        let notice = self.machine.next_event().await;
        if let PowerEvent::AlarmFired(bell) = notice {
            self.alarm_count += 1;
            // The alarm has fired, so the same time set again is a new alarm.
            match bell {
                WakeReason::ScanLinks => self.plan.scan_at = None,
                WakeReason::StartFlow => self.plan.start_at = None,
            }
        }
        notice
    }

    /// How often an alarm fired: the most wake-ups it caused.
    pub fn alarm_count(&self) -> u64 {
        self.alarm_count
    }

    /// The machine that is controlled.
    pub fn machine(&self) -> &M {
        &self.machine
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_sched::{ScanPeriods, WakeNeeds, WakePlanner};
    use d2tp_time::Span;
    use futures_util::FutureExt as _;

    /// A machine that sleeps until the first alarm, and records what happens.
    #[derive(Default)]
    struct Sleeper {
        now: Time,
        alarms: Vec<(WakeReason, Time)>,
        diary: Vec<String>,
        /// Whether requests to stay awake are not answered.
        is_silent: bool,
    }

    impl SleepingMachine for Sleeper {
        fn set_alarm(&mut self, bell: WakeReason, after: Option<Span>) {
            self.alarms.retain(|(other, _)| *other != bell);
            self.alarms
                .extend(after.map(|after| (bell, self.now + after)));
        }

        async fn inhibit_sleep(&mut self, why: &str) {
            if self.is_silent {
                std::future::pending::<()>().await;
            }
            self.diary.push(format!("held: {why}"));
        }

        fn allow_sleep(&mut self) {
            self.diary.push("let go".to_owned());
        }

        async fn next_event(&mut self) -> PowerEvent {
            let first = (0..self.alarms.len()).min_by_key(|n| self.alarms[*n].1);
            let (bell, at) = self.alarms.remove(first.expect("it would sleep for ever"));
            self.now = self.now.max(at);
            PowerEvent::AlarmFired(bell)
        }
    }

    #[tokio::test]
    async fn a_request_to_stay_awake_that_was_not_answered_in_time_is_made_again() {
        let mut keeper = WakeController::new(Sleeper {
            is_silent: true,
            ..Sleeper::default()
        });
        let plan = WakePlan {
            hold: true,
            start_at: Some(Time::ZERO + Span::from_secs(50)),
            ..WakePlan::default()
        };
        let applied = keeper.apply(Time::ZERO, plan, "a flow runs");
        assert!(applied.now_or_never().is_none());
        assert_eq!(keeper.machine().alarms.len(), 1);
        keeper.machine.is_silent = false;
        for _ in 0..2 {
            keeper.apply(Time::ZERO, plan, "a flow runs").await;
            assert_eq!(keeper.machine().diary, ["held: a flow runs"]);
        }
        // Another service keeps nothing awake yet.
        keeper.change_machine(|machine| machine.diary.clear());
        keeper.apply(Time::ZERO, plan, "a flow runs").await;
        assert_eq!(keeper.machine().diary, ["held: a flow runs"]);
    }

    #[tokio::test]
    async fn a_waiting_flow_is_looked_for_every_period_and_begun_at_its_latest_start() {
        let mut keeper = WakeController::new(Sleeper::default());
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
            let plan = lock.plan(now, &standby, |_| 0.0);
            keeper.apply(now, plan, "episode-118.mp3 is on wwan0").await;
            if standby.runs {
                break;
            }
            match keeper.next_event().await {
                PowerEvent::AlarmFired(WakeReason::ScanLinks) => {
                    let now = keeper.machine().now;
                    lock.on_scan(now);
                    looks.push(now.as_secs_f64());
                }
                PowerEvent::AlarmFired(WakeReason::StartFlow) => {
                    standby = WakeNeeds {
                        runs: true,
                        ..WakeNeeds::default()
                    };
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(looks, [0.0, 120.0, 240.0, 360.0, 480.0]);
        assert_eq!((keeper.machine().now, keeper.alarm_count()), (begin, 6));
        let now = keeper.machine().now;
        keeper.apply(now, WakePlan::default(), "").await;
        let machine = keeper.machine();
        assert_eq!(
            machine.diary,
            ["held: episode-118.mp3 is on wwan0", "let go"]
        );
        assert!(machine.alarms.is_empty());
    }
}
