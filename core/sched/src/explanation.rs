//! Explains a decision for a flow: a reason code, a sentence, and what would change it.
//!
//! It is computed for one flow on request: for `cedos why`, a log or a metric.

use crate::capacity_forecast::CapacityForecast;
use crate::history::LinkHistory;
use crate::link_assignment::{LinkAssignment, ScheduledFlow, by_deadline};
use crate::link_choice::{LinkClass, LinkWaitReason, format_duration};
use crate::scheduler::{DeadlineOdds, DueBytes, Scheduler, deadline_odds};
use d2tp_time::Time;
use std::time::Duration;

/// The step of the search for the latest start: each step keeps this share of the remaining time.
const START_STEP: f64 = 0.85;
/// The precision of a predicted start.
const START_LEAST: Duration = Duration::from_secs(1);

/// The explanation of a decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowExplanation {
    /// The reason code; `None` unless the flow waits.
    pub reason: Option<LinkWaitReason>,
    /// The reason, as a sentence for people.
    pub because: String,
    /// What would change the decision, as a sentence for people.
    pub unblocks: String,
}

impl Scheduler {
    /// Explains the assignment of a flow. `names` are the names of the links.
    pub fn explain(
        &self,
        now: Time,
        flows: &[ScheduledFlow],
        assignment: &LinkAssignment,
        flow: usize,
        names: &[&str],
    ) -> FlowExplanation {
        let place = |of: &[usize]| of.iter().position(|n| *n == flow);
        let carrying = |class: LinkClass| {
            let of_class = move |(_, link): &(usize, &LinkHistory)| link.class() == class;
            let links = self.links().iter().enumerate().filter(of_class);
            links
                .filter(|(_, link)| link.carries())
                .map(|(n, _)| names[n])
        };
        let free: Vec<&str> = carrying(LinkClass::Free).collect();
        let metered: Vec<&str> = carrying(LinkClass::Metered).collect();
        let deadline_odds = self.odds_of(now, flows, flow);
        if let (Some(_), false) = (place(&assignment.payers), metered.is_empty()) {
            return FlowExplanation {
                reason: None,
                because: odds(deadline_odds, &metered),
                unblocks: "faster free networks | a later deadline".into(),
            };
        }
        if !free.is_empty() {
            let first = place(&assignment.order) == Some(0);
            let up = format!("{} is free", free.join(" and "));
            return FlowExplanation {
                reason: (!first).then_some(LinkWaitReason::QueuedBehind),
                because: if first {
                    up
                } else {
                    format!("{up}; transfers with earlier deadlines go first")
                },
                unblocks: if first {
                    String::new()
                } else {
                    "an earlier deadline".into()
                },
            };
        }
        let up = |class| (self.links().iter()).any(|link| link.class() == class && link.is_up());
        let (reason, because) = match (metered.is_empty(), up(LinkClass::Roaming)) {
            (true, true) => (
                LinkWaitReason::RoamingBlocked,
                "only a roaming network is up".to_owned(),
            ),
            (true, false) if up(LinkClass::Free) || up(LinkClass::Metered) => (
                LinkWaitReason::PathTooSlow,
                "the network carries no data".to_owned(),
            ),
            (true, false) => (LinkWaitReason::NoPath, "no network is up".to_owned()),
            (false, _) if flows[flow].need.metered_bytes_left == Some(0) => (
                LinkWaitReason::OverBudget,
                format!("the data limit of {} is used up", metered.join(" and ")),
            ),
            (false, _) => {
                let costs = format!("only {} (metered) is up", metered.join(" and "));
                (
                    LinkWaitReason::PathCost,
                    format!("{costs}; {}", odds(deadline_odds, &metered)),
                )
            }
        };
        let unblocks = match (reason, self.pays_in(now, flows, flow)) {
            (LinkWaitReason::PathCost, Some(span)) => {
                let link = metered.join(" and ");
                format!(
                    "a free network | {link} in {} if none appears",
                    format_duration(span)
                )
            }
            (LinkWaitReason::OverBudget, _) => "a free network | a larger budget".to_owned(),
            (LinkWaitReason::NoPath | LinkWaitReason::PathTooSlow, _) => {
                "a network that works".to_owned()
            }
            (LinkWaitReason::RoamingBlocked, _) => "another network".to_owned(),
            (
                LinkWaitReason::PathCost
                | LinkWaitReason::QueuedBehind
                | LinkWaitReason::SavesEnergy,
                _,
            ) => "a free network | another policy".to_owned(),
        };
        FlowExplanation {
            reason: Some(reason),
            because,
            unblocks,
        }
    }

    fn odds_of(&self, now: Time, flows: &[ScheduledFlow], flow: usize) -> Option<DeadlineOdds> {
        let left_s = flows[flow].left_s()?;
        let outlook = CapacityForecast::new(now, self.links(), std::iter::once(left_s));
        let due = due_until(flows, flow).until(&outlook, 0);
        Some(deadline_odds(&outlook, 0, due))
    }

    /// The time until the flow would begin to pay if the links stayed as they are; `None` if it may
    /// not pay.
    pub fn pays_in(&self, now: Time, flows: &[ScheduledFlow], flow: usize) -> Option<Duration> {
        let left = flows[flow].need.left.filter(|_| flows[flow].may_pay())?;
        let due = due_until(flows, flow);
        let mut still = left;
        while still > START_LEAST {
            still = still.mul_f64(START_STEP);
            if self.pays_alone(now, &flows[flow], due, still.as_secs_f64()) {
                break;
            }
        }
        Some(left - still)
    }
}

/// The bytes of all flows that are due until a flow's deadline.
pub(crate) fn due_until(flows: &[ScheduledFlow], flow: usize) -> DueBytes {
    let order = by_deadline(flows);
    let until = order.iter().take_while(|n| **n != flow);
    let mut due = DueBytes::default();
    due.add(until.chain([&flow]).map(|n| &flows[*n]));
    due
}

/// A chance in whole per cent. None is called certain or impossible: a forecast never is.
pub fn likelihood(chance: f64) -> String {
    match (100.0 * chance).round() {
        percent if percent >= 100.0 => "over 99 %".to_owned(),
        percent if percent < 1.0 => "under 1 %".to_owned(),
        percent => format!("{percent} %"),
    }
}

fn odds(odds: Option<DeadlineOdds>, metered: &[&str]) -> String {
    match odds {
        None => "there is no deadline".to_owned(),
        Some(odds) => format!(
            "free networks alone {} likely to be on time, with {} {}",
            likelihood(odds.alone),
            metered.join(" and "),
            likelihood(1.0 - odds.late)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::LinkObservation;
    use crate::link_choice::{CostPolicy, DeadlineFallback, FlowDemand};
    use crate::scheduler::SchedulerMode;
    use crate::source_supply::SourceSupply;
    use d2tp_time::Span;

    const NAMES: [&str; 2] = ["wlan0", "wwan0"];

    fn flow(megabytes: u64, left_s: u64) -> ScheduledFlow {
        ScheduledFlow {
            need: FlowDemand {
                remaining_bytes: Some(megabytes * 1_000_000),
                left: Some(Duration::from_secs(left_s)),
                policy: CostPolicy::FreeFirst,
                if_late: DeadlineFallback::Cell,
                metered_bytes_left: None,
            },
            size_bytes: megabytes * 1_000_000,
            priority: 0,
            source: SourceSupply::Ample,
        }
    }

    /// A scheduler whose links were used for a minute at these rates, in bytes per second.
    fn scheduler(rates: [Option<u64>; 2]) -> (Scheduler, Time) {
        let mut scheduler = Scheduler::new(
            SchedulerMode::Forecast,
            [LinkClass::Free, LinkClass::Metered],
        );
        let mut now = Time::ZERO;
        for _ in 0..60 {
            now += Span::from_secs(1);
            let observation = |rate: Option<u64>| LinkObservation {
                up: rate.is_some(),
                bytes: rate.unwrap_or(0),
                busy: if rate.is_some() {
                    Span::from_secs(1)
                } else {
                    Span::ZERO
                },
            };
            scheduler.observe(now, &rates.map(observation));
        }
        (scheduler, now)
    }

    fn why(rates: [Option<u64>; 2], flows: &[ScheduledFlow], flow: usize) -> FlowExplanation {
        let (scheduler, now) = scheduler(rates);
        let assignment = scheduler.decide(now, flows);
        assert_eq!(assignment.shares.len(), 2);
        scheduler.explain(now, flows, &assignment, flow, &NAMES)
    }

    #[test]
    fn every_wait_has_a_reason_and_says_what_would_end_it() {
        let early = [flow(10, 36_000)];
        for (rates, reason) in [
            ([None, None], LinkWaitReason::NoPath),
            ([Some(0), None], LinkWaitReason::PathTooSlow),
            ([None, Some(1_000_000)], LinkWaitReason::PathCost),
        ] {
            let why = why(rates, &early, 0);
            assert_eq!(why.reason, Some(reason), "{why:?}");
            assert!(
                !why.because.is_empty() && !why.unblocks.is_empty(),
                "{why:?}"
            );
        }
        let broke = ScheduledFlow {
            need: FlowDemand {
                metered_bytes_left: Some(0),
                ..early[0].need.clone()
            },
            ..early[0].clone()
        };
        let why = why([None, Some(1_000_000)], &[broke], 0);
        assert_eq!(why.reason, Some(LinkWaitReason::OverBudget));
    }

    #[test]
    fn a_flow_behind_another_says_so_and_the_first_does_not_wait() {
        let flows = [flow(10, 900), flow(10, 600)];
        let rates = [Some(2_000_000), None];
        assert_eq!(
            why(rates, &flows, 0).reason,
            Some(LinkWaitReason::QueuedBehind)
        );
        assert_eq!(why(rates, &flows, 1).reason, None);
    }

    #[test]
    fn the_latest_start_is_before_the_deadline() {
        let why = why([None, Some(1_000_000)], &[flow(100, 3_600)], 0);
        assert!(why.unblocks.contains("wwan0 in"), "{why:?}");
    }

    #[test]
    fn no_chance_is_certain() {
        let told = [0.0, 0.004, 0.005, 0.214, 0.996, 1.0].map(likelihood);
        let expected = [
            "under 1 %",
            "under 1 %",
            "1 %",
            "21 %",
            "over 99 %",
            "over 99 %",
        ];
        assert_eq!(told, expected);
    }
}
