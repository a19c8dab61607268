//! Estimates for a flow: how likely it completes in time, and what it will cost.
//!
//! ```text
//!  all links by its deadline ─▶ ready: the share of scenarios in which they carry it and all before it
//!  free links by then        ─▶ metered: what they leave over, on average and at worst
//! ```
//!
//! An estimate follows from the current forecast, so it changes when the links change.

use crate::capacity_forecast::CapacityForecast;
use crate::history::LinkHistory;
use crate::link_assignment::ScheduledFlow;
use crate::link_choice::{CostPolicy, LinkClass};
use crate::scheduler::Scheduler;
use crate::source_supply::SUPPLY_DOUBT;
use d2tp_time::{Span, Time};

/// The probability of success below which a deadline counts as infeasible. // a guess: users would
/// not wait for it
pub const INFEASIBLE_BELOW: f64 = 0.05;

/// The quantile of cost that is reported as the worst case.
pub const WORST: f64 = 0.95;

/// A flow that waits for free links misses its deadline more often than all links together would
/// need. This is the factor by which it does so, if all links nearly surely carry it in time.
// measured: of flows that need the time promised, docs/repro/score.md
const WAITING: f64 = 0.5;

/// The probability that a flow which waits for free links completes in time, given the share of
/// scenarios in which all links together carry it in time.
fn waiting(carried: f64) -> f64 {
    1.0 - (1.0 - carried) * (1.0 + WAITING * carried)
}

/// The uncertainty of all rates together, however long links were used: the standard deviation of the
/// logarithm of what they carry. Higher: forecasts are less sure, both ways.
// measured: docs/repro/score.md, forecasts compared with what happened
const RATE_DOUBT: f64 = 0.35;
/// The additional uncertainty while no link has been used.
const RATE_DOUBT_UNKNOWN: f64 = 1.0; // measured in the same way
/// The logarithm of the factor by which unused links carry more than their assumed rates.
const RATE_BIAS_UNKNOWN: f64 = 1.7; // measured in the same way

/// Quantiles of the normal distribution at the middle of nine parts of equal probability.
pub(crate) const NORMAL_NINTHS: [f64; 9] = [
    -1.593, -0.967, -0.589, -0.282, 0.0, 0.282, 0.589, 0.967, 1.593,
];

/// The uncertainty of a forecast: how much more or less links may carry than it says. The rate of
/// an unused link is assumed, and the rate of others is known only for the last minutes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RateDoubt {
    /// The logarithm of the median factor.
    bias: f64,
    /// The standard deviation of the factor's logarithm.
    spread: f64,
}

impl RateDoubt {
    /// The uncertainty about these links, each weighted by its rate.
    fn about<'a>(links: impl Iterator<Item = &'a LinkHistory>) -> RateDoubt {
        let (mut known, mut all) = (0.0, 0.0);
        for link in links.filter(|link| link.is_up() || link.confidence() > 0.0) {
            known += link.long_term_rate() * link.confidence();
            all += link.long_term_rate();
        }
        let known = if all > 0.0 { known / all } else { 0.0 };
        let unknown = 1.0 - known;
        let cube = unknown * unknown * unknown;
        RateDoubt {
            // The exponents are measured in the same way: how fast both values fall while links are
            // used.
            bias: RATE_BIAS_UNKNOWN * unknown * cube,
            spread: RATE_DOUBT + RATE_DOUBT_UNKNOWN * cube,
        }
    }

    /// The probability of carrying `bytes`, given `reach`, the probability without this
    /// uncertainty.
    fn reach(self, bytes: f64, reach: impl Fn(f64) -> f64) -> f64 {
        let scaled = NORMAL_NINTHS.map(|z| reach(bytes / exponential(self.bias + self.spread * z)));
        scaled.iter().sum::<f64>() / NORMAL_NINTHS.len() as f64
    }

    /// The mean of what links leave of `bytes`, given `left_over`, what they leave without this uncertainty. It is more than
    /// that: links that carry less than expected leave more, and those that carry more do not leave less than nothing.
    fn left_over(self, bytes: f64, left_over: impl Fn(f64) -> f64) -> f64 {
        let scaled = NORMAL_NINTHS.map(|z| {
            let factor = exponential(self.bias + self.spread * z);
            factor * left_over(bytes / factor)
        });
        scaled.iter().sum::<f64>() / NORMAL_NINTHS.len() as f64
    }
}

/// The exponential function for small numbers, computed with equal results on every platform.
pub(crate) fn exponential(x: f64) -> f64 {
    const SQUARINGS: u32 = 10;
    let part = x / f64::from(1 << SQUARINGS);
    let root = 1.0 + part + 0.5 * part * part;
    (0..SQUARINGS).fold(root, |power, _| power * power)
}

/// The probability that the source supplies the whole flow by its deadline.
fn supplied_in_time(flow: &ScheduledFlow) -> f64 {
    let (Some(rate), Some(left_s)) = (flow.source.limit(), flow.left_s()) else {
        return 1.0;
    };
    let supplies = |z: &&f64| rate * left_s * exponential(SUPPLY_DOUBT * **z) >= flow.bytes();
    NORMAL_NINTHS.iter().filter(supplies).count() as f64 / NORMAL_NINTHS.len() as f64
}

/// The longest predicted time in seconds: a week.
const PROMISED_MAX_S: f64 = 604_800.0;

/// An estimate of when a flow completes and what it costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompletionEstimate {
    /// The probability that the flow is complete at its deadline; 1 if it has no deadline.
    pub ready: f64,
    /// Expected metered bytes.
    pub expected_metered_bytes: u64,
    /// The 95th percentile of metered bytes.
    pub worst_metered_bytes: u64,
    /// The maximum of metered bytes: all remaining bytes within the budget, or zero if the flow
    /// must not pay.
    pub most_metered_bytes: u64,
}

impl CompletionEstimate {
    /// Whether the flow will so probably miss its deadline that it counts as infeasible.
    pub fn is_infeasible(&self) -> bool {
        self.ready < INFEASIBLE_BELOW
    }
}

impl Scheduler {
    /// Estimates for all flows, in their order.
    pub fn estimates(&self, now: Time, flows: &[ScheduledFlow]) -> Vec<CompletionEstimate> {
        let (order, late) = self.in_order(now, flows);
        let mut promises: Vec<CompletionEstimate> =
            flows.iter().map(|flow| self.without_end(flow)).collect();
        let links = || {
            self.links()
                .iter()
                .filter(|link| link.class() != LinkClass::Roaming)
        };
        let of_all = RateDoubt::about(links());
        let of_free = RateDoubt::about(links().filter(|link| link.class() == LinkClass::Free));
        let mut before = 0.0;
        for n in order {
            let flow = &flows[n];
            let left_s = flow.left_s().unwrap_or(0.0);
            let outlook = CapacityForecast::new(now, self.links(), std::iter::once(left_s));
            let until = before + flow.due_bytes();
            let supplied = supplied_in_time(flow);
            let by_free = |bytes| of_free.reach(bytes, |bytes| outlook.free_reach(0, bytes));
            let by_all = |bytes| of_all.reach(bytes, |bytes| 1.0 - outlook.all_short_of(0, bytes));
            let own = |of: &dyn Fn(f64) -> f64| (of(until) - of(before)).max(0.0) as u64;
            let most = promises[n].most_metered_bytes;
            let left_over = |bytes| of_free.left_over(bytes, |bytes| outlook.left_over(0, bytes));
            let expected = own(&left_over).min(most);
            promises[n] = CompletionEstimate {
                ready: supplied
                    * match (flow.may_pay(), flow.need.policy) {
                        (false, _) => by_free(until),
                        (true, CostPolicy::Any | CostPolicy::Fast) => by_all(until),
                        (true, _) => waiting(by_all(until)),
                    },
                expected_metered_bytes: expected,
                worst_metered_bytes: own(&|bytes| outlook.left_over_at_most(0, bytes, WORST))
                    .max(expected)
                    .min(most),
                most_metered_bytes: most,
            };
            // A flow that will be late is carried after the others. Without a size there is no
            // estimate.
            if !late.has(n) && flow.is_sized() {
                before = until;
            }
        }
        promises
    }

    /// The estimate of a flow without a deadline. It pays only if its policy uses metered links at
    /// once.
    fn without_end(&self, flow: &ScheduledFlow) -> CompletionEstimate {
        let carries = |class| {
            let mut links = self.links().iter();
            links.any(|link| link.class() == class && link.carries())
        };
        let budget = flow.need.metered_bytes_left.unwrap_or(u64::MAX);
        let may_pay = match flow.need.policy {
            CostPolicy::FreeFirst | CostPolicy::Balanced => {
                flow.may_pay() && flow.need.left.is_some()
            }
            _ => flow.may_pay(),
        };
        let most = if may_pay {
            (flow.bytes() as u64).min(budget)
        } else {
            0
        };
        let likely = match flow.need.policy {
            CostPolicy::Any | CostPolicy::Fast if !carries(LinkClass::Free) => most,
            _ => 0,
        };
        CompletionEstimate {
            ready: 1.0,
            expected_metered_bytes: likely,
            worst_metered_bytes: most,
            most_metered_bytes: most,
        }
    }

    /// The time until `bytes` are complete with this probability, if no other flow is carried and
    /// the flow waits for free links; `None` if it is longer than a week.
    pub fn ready_by(&self, now: Time, bytes: u64, chance: f64) -> Option<Span> {
        let (mut low, mut high) = (0.0, PROMISED_MAX_S);
        let likely = |left_s: f64| {
            let outlook = CapacityForecast::new(now, self.links(), std::iter::once(left_s));
            waiting(1.0 - outlook.all_short_of(0, bytes as f64)) >= chance
        };
        if !likely(high) {
            return None;
        }
        // To a precision of one percent, or a tenth of a second.
        while high - low > (0.01 * high).max(0.1) {
            let middle = if low == 0.0 {
                high / 8.0
            } else {
                0.5 * (low + high)
            };
            if likely(middle) {
                high = middle;
            } else {
                low = middle;
            }
        }
        Some(Span::from_secs_f64(high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::LinkObservation;
    use crate::link_choice::{DeadlineFallback, FlowDemand};
    use crate::scheduler::SchedulerMode;
    use crate::source_supply::SourceSupply;
    use std::time::Duration;

    /// A scheduler with one metered link that carried 1 MB/s for a minute.
    fn scheduler() -> (Scheduler, Time) {
        let mut scheduler = Scheduler::new(
            SchedulerMode::Forecast,
            [LinkClass::Free, LinkClass::Metered],
        );
        let mut now = Time::ZERO;
        for _ in 0..60 {
            now += Span::from_secs(1);
            let cell = LinkObservation {
                up: true,
                bytes: 1_000_000,
                busy: Span::from_secs(1),
            };
            scheduler.observe(now, &[LinkObservation::default(), cell]);
        }
        (scheduler, now)
    }

    fn flow(bytes: u64, left_s: Option<u64>) -> ScheduledFlow {
        ScheduledFlow {
            need: FlowDemand {
                remaining_bytes: Some(bytes),
                left: left_s.map(Duration::from_secs),
                policy: CostPolicy::FreeFirst,
                if_late: DeadlineFallback::Cell,
                metered_bytes_left: None,
            },
            size_bytes: bytes,
            priority: 0,
            source: SourceSupply::Ample,
        }
    }

    #[test]
    fn what_cannot_be_in_time_is_said_at_once_and_what_surely_is_too() {
        let (scheduler, now) = scheduler();
        let flows = [
            flow(100_000_000, Some(10)),
            flow(5_000_000, Some(100)),
            flow(1, None),
        ];
        let promises = scheduler.estimates(now, &flows);
        assert!(promises[0].is_infeasible(), "{promises:?}");
        // No other flow waits for it.
        assert!(promises[1].ready > 0.95, "{promises:?}");
        let behind = [flow(90_000_000, Some(99)), flow(5_000_000, Some(100))];
        let behind = scheduler.estimates(now, &behind);
        assert!(behind[1].ready < 0.8, "{behind:?}");
        assert_eq!(promises[2].ready, 1.0);
        let alone = scheduler.estimates(now, &flows[1..]);
        assert!(alone[0].ready > 0.95, "{alone:?}");
        assert!(alone[0].expected_metered_bytes <= alone[0].worst_metered_bytes);
        assert!(alone[0].worst_metered_bytes <= 5_000_000);
    }

    #[test]
    fn a_forecast_of_links_that_were_never_used_is_not_sure() {
        let classes = [LinkClass::Free, LinkClass::Metered];
        let mut scheduler = Scheduler::new(SchedulerMode::Forecast, classes);
        let up = LinkObservation {
            up: true,
            ..LinkObservation::default()
        };
        scheduler.observe(Time::ZERO, &[up, up]);
        let ready =
            |bytes, left_s| scheduler.estimates(Time::ZERO, &[flow(bytes, Some(left_s))])[0].ready;
        // Four times what is assumed of both links: a Wi-Fi of 50 Mb/s is nothing unusual.
        let in_doubt = ready(60_000_000, 10);
        assert!((0.25..0.75).contains(&in_doubt), "{in_doubt}");
        assert!(ready(1_000_000, 3_600) > 0.95);
        // A hundred times as much is beyond any link.
        assert!(ready(6_000_000_000, 10) < INFEASIBLE_BELOW);
    }

    #[test]
    fn what_links_leave_is_more_where_their_rates_are_in_doubt() {
        let (sure, unsure) = (
            RateDoubt {
                bias: 0.0,
                spread: 0.0,
            },
            RateDoubt {
                bias: 0.0,
                spread: RATE_DOUBT,
            },
        );
        // Links that carry 10 MB.
        let left_over =
            |doubt: RateDoubt, bytes| doubt.left_over(bytes, |bytes| (bytes - 10e6).max(0.0));
        assert_eq!(left_over(sure, 10e6), 0.0);
        let doubted = left_over(unsure, 10e6);
        assert!((0.5e6..2.5e6).contains(&doubted), "{doubted}");
        // Far beyond and far below what they carry, doubt changes little.
        assert!((left_over(unsure, 100e6) / 90e6 - 1.0).abs() < 0.02);
        assert_eq!(left_over(unsure, 1e6), 0.0);
    }

    #[test]
    fn the_exponential_is_near_enough() {
        for (x, value) in [
            (0.0, 1.0),
            (1.0, std::f64::consts::E),
            (-2.0, 0.135_335),
            (4.0, 54.598_2),
        ] {
            assert!((exponential(x) / value - 1.0).abs() < 1e-4, "{x}");
        }
    }

    #[test]
    fn waiting_takes_nothing_where_it_is_sure_and_never_makes_likelier() {
        assert_eq!((waiting(0.0), waiting(1.0)), (0.0, 1.0));
        let steps: Vec<f64> = (0..=100).map(|n| f64::from(n) / 100.0).collect();
        assert!(steps.iter().all(|share| waiting(*share) <= *share));
        assert!(steps.is_sorted_by(|less, more| waiting(*less) <= waiting(*more)));
    }

    #[test]
    fn who_must_not_pay_is_promised_what_free_links_do_and_no_metered_byte() {
        let (scheduler, now) = scheduler();
        let mut never = flow(5_000_000, Some(100));
        never.need.policy = CostPolicy::FreeOnly;
        let mut poor = flow(5_000_000, Some(100));
        poor.need.metered_bytes_left = Some(1_000);
        let estimate =
            |flow: &ScheduledFlow| scheduler.estimates(now, std::slice::from_ref(flow))[0];
        let (payer, never, poor) = (
            estimate(&flow(5_000_000, Some(100))),
            estimate(&never),
            estimate(&poor),
        );
        assert!(never.ready < payer.ready, "{never:?} {payer:?}");
        assert_eq!(never.most_metered_bytes, 0);
        assert_eq!(never.worst_metered_bytes, 0);
        assert_eq!(poor.most_metered_bytes, 1_000);
        assert!(poor.worst_metered_bytes <= 1_000);
        assert_eq!(payer.most_metered_bytes, 5_000_000);
        let mut timeless = flow(5_000_000, None);
        assert_eq!(estimate(&timeless).most_metered_bytes, 0);
        timeless.need.policy = CostPolicy::Any;
        assert_eq!(estimate(&timeless).expected_metered_bytes, 5_000_000);
    }

    #[test]
    fn a_time_promised_at_nine_in_ten_is_later_than_at_one_in_two() {
        let (scheduler, now) = scheduler();
        let by = |chance| {
            scheduler
                .ready_by(now, 100_000_000, chance)
                .unwrap()
                .as_secs_f64()
        };
        assert!(by(0.9) > by(0.5));
        assert!((50.0..200.0).contains(&by(0.5)), "{}", by(0.5));
        let never = Scheduler::new(SchedulerMode::Forecast, []);
        assert_eq!(never.ready_by(now, 1, 0.5), None);
    }
}
