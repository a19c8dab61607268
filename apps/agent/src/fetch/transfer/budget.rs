//! What is still needed, and what may still be spent on it: bytes, time, metered bytes.

use std::time::Duration;

use d2tp_links::CostClass;
use d2tp_sched::{FlowDemand, LinkCandidate};

use super::{ClientDecision, ClientReport, Dial, TransferRun};

impl<D: Dial> TransferRun<'_, D> {
    pub(super) fn demand(&self) -> FlowDemand {
        FlowDemand {
            remaining_bytes: self.length().map(|l| l.saturating_sub(self.done())),
            left: self.time_left(),
            policy: self.terms.policy,
            if_late: self.terms.if_late,
            metered_bytes_left: self.metered_bytes_worth_using(),
        }
    }

    pub(super) fn time_left(&self) -> Option<Duration> {
        self.terms.time_left()
    }

    /// Asks the scheduler what may be used now. `together`: it can be on several links at once.
    pub(super) fn decide(&mut self, ways: &[LinkCandidate], together: bool) -> ClientDecision {
        self.take_new_terms();
        self.seat.decide(&ClientReport {
            demand: self.demand(),
            size_bytes: self.length(),
            priority: self.terms.priority,
            candidates: ways,
            carried: &self.bytes_by_link,
            uses_several_links: together,
            always_pays: false,
            is_interactive: false,
            keeps_awake: true,
        })
    }

    /// Goes by other terms from now on, if they came. True if they did.
    pub(super) fn take_new_terms(&mut self) -> bool {
        let Some(orders) = &mut self.orders else {
            return false;
        };
        // An agent that is gone leaves the last word standing.
        if !orders.has_changed().unwrap_or(false) {
            return false;
        }
        let terms = orders.borrow_and_update().clone();
        let changed = terms != self.terms;
        if changed {
            self.terms = terms;
            self.said_waiting = None;
            self.note(None, "its terms have changed".into());
        }
        changed
    }

    /// What metered links carried.
    pub(super) fn metered_bytes(&self) -> u64 {
        let links = self.bytes_by_link.iter();
        let metered = links.filter(|(link, _)| self.is_metered(link));
        metered.map(|(_, bytes)| bytes).sum()
    }

    /// What metered links may still carry.
    pub(super) fn metered_bytes_left(&self) -> Option<u64> {
        let max = self.terms.metered_bytes_max?;
        Some(max.saturating_sub(self.metered_bytes()))
    }

    /// What metered links may still carry, as an argument for using one: nothing, if a new request
    /// would spend it on overlap alone.
    pub(super) fn metered_bytes_worth_using(&self) -> Option<u64> {
        let left = self.metered_bytes_left()?;
        let wasted = !self.receiving && left <= self.sink.tail().len() as u64;
        Some(if wasted { 0 } else { left })
    }

    pub(super) fn is_metered(&self, link: &str) -> bool {
        self.classes
            .get(link)
            .is_some_and(|class| *class != CostClass::Free)
    }

    /// Half old, half new: one epoch of silence does not make a link worthless.
    pub(super) fn record_rate(&mut self, link: &str, rate_bytes_per_s: f64) {
        let rate = self
            .rates
            .entry(link.to_owned())
            .or_insert(rate_bytes_per_s);
        *rate = (*rate + rate_bytes_per_s) / 2.0;
    }
}
