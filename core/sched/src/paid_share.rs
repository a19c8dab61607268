//! The share of a flow that metered links carry once the flow pays to meet its deadline.
//!
//! ```text
//!  due by the deadline  ├──── free links carry this much until then ────┼── metered links: the rest ──┤
//! ```
//!
//! Both kinds of links carry at once. A fast metered link alone would carry all of the flow in its
//! first seconds, so bytes that free links could have carried until the deadline would be paid for,
//! too. The share is computed again with each decision, so it grows when free links carry less than
//! was expected.

use crate::capacity_forecast::CapacityForecast;
use crate::completion_estimate::WORST;
use crate::explanation::due_until;
use crate::link_assignment::ScheduledFlow;
use crate::link_choice::CostPolicy;
use crate::scheduler::{PROBE_BYTES, Scheduler};
use d2tp_time::Time;

/// The multiple of the bytes due that all links must be able to carry, so that a wrong share can be
/// corrected later. Higher: more is paid for early.
const CORRECTABLE: f64 = 2.0; // a guess: then half of the time is left for the correction
/// The highest accepted probability that a wrong share cannot be corrected.
const CORRECTABLE_RISK: f64 = 0.05; // a guess
/// The time before a deadline in which metered links carry all that is left, in seconds.
const UNSHARED_S: f64 = 4.0; // a guess: two epochs, and a slow start

impl Scheduler {
    /// The bytes of a flow that metered links should carry until its deadline: what free links are
    /// expected to leave, or, if an error could not be corrected in time, the worst case of what
    /// they leave. `None` if metered links should carry as much as they can.
    pub(crate) fn paid_share(
        &self,
        now: Time,
        flows: &[ScheduledFlow],
        flow: usize,
    ) -> Option<u64> {
        let own = &flows[flow];
        let by_deadline = matches!(
            own.need.policy,
            CostPolicy::FreeFirst | CostPolicy::Balanced
        );
        let left_s = own.left_s().filter(|left_s| *left_s > UNSHARED_S)?;
        if !by_deadline || !own.is_sized() {
            return None;
        }
        let outlook = CapacityForecast::new(now, self.links(), std::iter::once(left_s));
        let until = due_until(flows, flow).until(&outlook, 0);
        let before = (until - own.due_bytes()).max(0.0);
        let is_correctable = outlook.all_short_of(0, until * CORRECTABLE) <= CORRECTABLE_RISK;
        let left_over = |bytes: f64| match is_correctable {
            true => outlook.left_over(0, bytes),
            false => outlook.left_over_at_most(0, bytes, WORST),
        };
        let share = (left_over(until) - left_over(before)).clamp(0.0, own.due_bytes());
        Some((share as u64).max(PROBE_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::LinkObservation;
    use crate::link_choice::{DeadlineFallback, FlowDemand, LinkClass};
    use crate::scheduler::SchedulerMode;
    use crate::source_supply::SourceSupply;
    use d2tp_time::Span;
    use std::time::Duration;

    /// Simulates a flow until it is complete or its deadline passes. Returns the bytes carried by
    /// free links, by metered links, and missing. Rates are in bytes per second; the scheduler
    /// decides each second.
    fn carried(bytes: u64, left_s: u64, free: u64, metered: u64) -> [u64; 3] {
        let classes = [LinkClass::Free, LinkClass::Metered];
        let mut scheduler = Scheduler::new(SchedulerMode::Forecast, classes);
        let (mut by_free, mut by_metered) = (0, 0);
        let mut last = [0, 0];
        let is_free_up = free > 0;
        for second in 0..left_s {
            let now = Time::from_secs_f64(second as f64);
            let mut observations = last.map(|bytes| LinkObservation {
                up: true,
                bytes,
                busy: Span::from_secs(u64::from(bytes > 0)),
            });
            observations[0].up = is_free_up;
            scheduler.observe(now, &observations);
            let remaining = bytes - by_free - by_metered;
            if remaining == 0 {
                break;
            }
            let flow = ScheduledFlow {
                need: FlowDemand {
                    remaining_bytes: Some(remaining),
                    left: Some(Duration::from_secs(left_s - second)),
                    policy: CostPolicy::FreeFirst,
                    if_late: DeadlineFallback::Cell,
                    metered_bytes_left: None,
                },
                size_bytes: bytes,
                priority: 0,
                source: SourceSupply::Ample,
            };
            let flows = [flow];
            let pays = !scheduler.decide(now, &flows).payers.is_empty();
            let share = scheduler.paid_share(now, &flows, 0).unwrap_or(u64::MAX);
            let free = free.min(remaining);
            let paid = match pays {
                true => metered.min(share).min(remaining - free),
                false => 0,
            };
            (by_free, by_metered) = (by_free + free, by_metered + paid);
            last = [free, paid];
        }
        [by_free, by_metered, bytes - by_free - by_metered]
    }

    #[test]
    fn metered_links_carry_only_what_free_ones_cannot_until_the_deadline() {
        // 0.4 Mb/s of Wi-Fi for 40 s carry 2 MB of 6.
        let [free, metered, missing] = carried(6_000_000, 40, 50_000, 1_500_000);
        assert_eq!(missing, 0);
        assert!(free >= 1_700_000, "{free} by free links, {metered} paid");
        let [free, metered, missing] = carried(60_000_000, 120, 200_000, 2_500_000);
        assert_eq!(missing, 0);
        assert!(free >= 20_000_000, "{free} by free links, {metered} paid");
    }

    #[test]
    fn where_both_links_only_just_suffice_the_metered_one_carries_all_it_can() {
        let [_, _, missing] = carried(38_000_000, 40, 50_000, 1_000_000);
        assert_eq!(missing, 0);
        // No free link is up: the whole flow is paid for.
        let [_, metered, missing] = carried(20_000_000, 60, 0, 1_000_000);
        assert_eq!((metered, missing), (20_000_000, 0));
    }
}
