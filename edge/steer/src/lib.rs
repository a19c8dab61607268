//! Whether one connection pays for links: D2Sched's decision for a flow that is alone, by what was seen of
//! the links since it began.
//!
//! For programs' sockets and the agent's local proxy, whose connections know nothing of each other.
//! Transfers of the agent are decided together.
#![forbid(unsafe_code)]

use d2tp_driver::{LinkStatus, LinkUse, PathState};
use d2tp_sched::{FlowDemand, LinkObservation, ScheduledFlow, Scheduler, SchedulerMode};
use d2tp_time::{Span, Time};
use std::time::Duration;

/// What was carried since the last look moved in no more time than this: links are looked at every second while they
/// carry, and who rests is woken by the first byte.
const LOOKED_WITHIN: Span = Span::from_millis(1_500);

/// What is carried in less time, or less than this without a pause of that time, says how fast programs speak and not
/// how fast links are.
const MEASURED_OVER: Span = Span::from_millis(500); // a guess
const MEASURED_BY_BYTES: u64 = 14_600; // an initial window, RFC 6928

/// What was seen of the links since a connection began.
#[derive(Debug)]
pub struct SingleFlowScheduler {
    scheduler: Scheduler,
    /// In the scheduler's order.
    links: Vec<LinkProgress>,
}

#[derive(Debug)]
struct LinkProgress {
    name: String,
    /// What it had carried at the last look.
    carried: u64,
    /// What of that is not measured yet, and since when it moves.
    moved: u64,
    since: Time,
    moved_at: Time,
}

impl LinkProgress {
    fn new(now: Time, way: &LinkStatus) -> LinkProgress {
        LinkProgress {
            name: way.name.clone(),
            carried: carried(way),
            moved: 0,
            since: now,
            moved_at: now,
        }
    }

    /// What it carried and in what time, once that is a measure.
    fn measure(&mut self, now: Time, way: &LinkStatus) -> Option<(u64, Span)> {
        let before = std::mem::replace(&mut self.carried, carried(way));
        let more = self.carried.saturating_sub(before);
        if more == 0 {
            if now.since(self.moved_at) >= MEASURED_OVER {
                (self.moved, self.since) = (0, now);
            }
            return None;
        }
        if self.moved == 0 {
            self.since = now - now.since(self.since).min(LOOKED_WITHIN);
        }
        self.moved += more;
        self.moved_at = now;
        let took = now.since(self.since);
        (self.moved >= MEASURED_BY_BYTES && took >= MEASURED_OVER).then(|| {
            self.since = now;
            (std::mem::take(&mut self.moved), took)
        })
    }
}

fn carried(way: &LinkStatus) -> u64 {
    way.payload.0 + way.payload.1
}

/// Whether links that cost carry a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpendDecision {
    /// They do.
    pub spends: bool,
    /// After this time it may be otherwise, though nothing moved; none if only what happens decides.
    pub recheck_after: Option<Duration>,
}

impl Default for SingleFlowScheduler {
    /// Nothing yet.
    fn default() -> SingleFlowScheduler {
        SingleFlowScheduler {
            scheduler: Scheduler::new(SchedulerMode::Forecast, []),
            links: Vec::new(),
        }
    }
}

impl SingleFlowScheduler {
    /// Takes down what links carried since the last look.
    pub fn observe(&mut self, now: Time, ways: &[LinkStatus]) {
        let mut sights = vec![LinkObservation::default(); self.links.len()];
        for way in ways.iter().filter(|way| way.usage != LinkUse::Off) {
            let class = way.class.into();
            let known = self.links.iter().position(|link| link.name == way.name);
            let (place, measured) = match known {
                Some(place) => (place, self.links[place].measure(now, way)),
                None => {
                    self.links.push(LinkProgress::new(now, way));
                    sights.push(LinkObservation::default());
                    // The first look takes the link's word for a second.
                    let rate = way.rate.filter(|rate| *rate >= MEASURED_BY_BYTES);
                    let said = rate.map(|rate| (rate, Span::from_secs(1)));
                    (self.scheduler.add_link(class), said)
                }
            };
            self.scheduler.set_class(place, class);
            let answers = way
                .path
                .as_ref()
                .is_none_or(|p| p.state != PathState::Silent);
            let (bytes, busy) = measured.unwrap_or_default();
            sights[place] = LinkObservation {
                up: answers,
                bytes,
                busy,
            };
        }
        self.scheduler.observe(now, &sights);
    }

    /// Whether links that cost carry a flow that needs this. `size_bytes`: as [`ScheduledFlow`] has it.
    pub fn spends(&self, now: Time, need: FlowDemand, size_bytes: u64) -> bool {
        self.decide(now, need, size_bytes).spends
    }

    /// The same, and when that is to be asked again, should links not change and nothing move.
    pub fn decide(&self, now: Time, need: FlowDemand, size_bytes: u64) -> SpendDecision {
        let is_timed = need.left.is_some();
        let flow = ScheduledFlow {
            need,
            size_bytes,
            priority: 0,
        };
        let roster = self.scheduler.decide(now, &[flow]);
        SpendDecision {
            spends: !roster.payers.is_empty(),
            recheck_after: is_timed.then(|| roster.valid_for.into()),
        }
    }

    /// In how long links that cost would, if links stayed as they are. None: never.
    pub fn spends_after(&self, now: Time, need: FlowDemand, size_bytes: u64) -> Option<Duration> {
        let flow = ScheduledFlow {
            need,
            size_bytes,
            priority: 0,
        };
        self.scheduler.pays_in(now, &[flow], 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_links::CostClass;
    use d2tp_sched::{CostPolicy, DeadlineFallback};

    fn way(class: CostClass, usage: LinkUse) -> LinkStatus {
        LinkStatus {
            name: format!("{class:?}"),
            class,
            usage,
            payload: (0, 0),
            busy: Default::default(),
            rate: Some(1_000_000),
            answers: d2tp_driver::LinkAnswers::Answering,
            path: None,
        }
    }

    #[test]
    fn any_pays_only_while_nothing_free_is_there_and_free_only_never() {
        let both = [
            way(CostClass::Free, LinkUse::Free),
            way(CostClass::Metered, LinkUse::Paid),
        ];
        let need = |policy| FlowDemand {
            remaining_bytes: None,
            left: None,
            policy,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        };
        let after = |seconds| Time::ZERO + Span::from_secs(seconds);
        let mut seen = SingleFlowScheduler::default();
        seen.observe(after(1), &both);
        assert!(!seen.spends(after(1), need(CostPolicy::Any), 0));
        assert!(seen.spends(after(1), need(CostPolicy::Fast), 0));
        seen.observe(after(2), &both[1..]);
        assert!(seen.spends(after(2), need(CostPolicy::Any), 0));
        assert!(!seen.spends(after(2), need(CostPolicy::FreeOnly), 0));
        // Time alone changes nothing, but for who has a deadline.
        assert_eq!(
            seen.decide(after(2), need(CostPolicy::FreeFirst), 0)
                .recheck_after,
            None
        );
        let timed = |seconds| FlowDemand {
            left: Some(Duration::from_secs(seconds)),
            ..need(CostPolicy::FreeFirst)
        };
        let again = |seconds| seen.decide(after(2), timed(seconds), 0).recheck_after;
        assert_eq!(again(60), Some(Duration::from_secs(1)));
        assert_eq!(again(86_400), Some(Duration::from_secs(10)));
    }

    #[test]
    fn a_rest_does_not_make_a_link_slow() {
        let mut ways = [
            way(CostClass::Free, LinkUse::Free),
            way(CostClass::Metered, LinkUse::Paid),
        ];
        let need = || FlowDemand {
            remaining_bytes: Some(30_000_000),
            left: Some(Duration::from_secs(60)),
            policy: CostPolicy::FreeFirst,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        };
        let after = |seconds| Time::ZERO + Span::from_secs(seconds);
        let mut seen = SingleFlowScheduler::default();
        seen.observe(after(1), &ways);
        assert!(!seen.spends(after(1), need(), 30_000_000));
        ways[0].payload.0 = 1_000_000;
        seen.observe(after(3_600), &ways);
        assert!(!seen.spends(after(3_600), need(), 30_000_000));
        // Nor do a few bytes a moment after a look, or what a person types.
        ways[0].payload.0 += 60;
        seen.observe(after(3_600) + Span::from_millis(1), &ways);
        assert!(!seen.spends(after(3_601), need(), 30_000_000));
        for second in (1..60).filter(|second| second % 10 != 0) {
            ways[0].payload.0 += 500;
            seen.observe(after(3_600 + second), &ways);
            seen.observe(after(3_600 + second) + Span::from_millis(700), &ways);
        }
        assert!(!seen.spends(after(3_660), need(), 30_000_000));
        // While a link that is looked at carries little it is slow.
        for second in 1..60 {
            ways[0].payload.0 += 1_000;
            seen.observe(after(3_660 + second), &ways);
        }
        assert!(seen.spends(after(3_720), need(), 30_000_000));
    }
}
