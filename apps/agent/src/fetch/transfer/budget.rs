//! What is still needed, and what may still be spent on it: bytes, time, metered bytes.

use std::time::Duration;

use d2tp_links::Class;
use d2tp_sched::Need;

use super::{Dial, Moment, Transfer};

impl<D: Dial> Transfer<'_, D> {
    pub(super) fn need(&self) -> Need {
        Need {
            remaining_bytes: self.length().map(|l| l.saturating_sub(self.done())),
            left: self.left(),
            policy: self.job.policy,
            if_late: self.job.if_late,
            metered_bytes_left: self.metered_bytes_worth_using(),
        }
    }

    pub(super) fn left(&self) -> Option<Duration> {
        let within = self.job.within?;
        Some(within.saturating_sub(Moment::now().since(self.start)))
    }

    /// What metered links may still carry.
    pub(super) fn metered_bytes_left(&self) -> Option<u64> {
        let max = self.job.metered_bytes_max?;
        let metered = self
            .bytes_by_link
            .iter()
            .filter(|(link, _)| self.is_metered(link));
        Some(max.saturating_sub(metered.map(|(_, bytes)| bytes).sum()))
    }

    /// The same as an argument for using a metered link: nothing, if a new request would spend it
    /// on overlap alone.
    pub(super) fn metered_bytes_worth_using(&self) -> Option<u64> {
        let left = self.metered_bytes_left()?;
        let wasted = !self.receiving && left <= self.sink.tail().len() as u64;
        Some(if wasted { 0 } else { left })
    }

    pub(super) fn is_metered(&self, link: &str) -> bool {
        self.classes
            .get(link)
            .is_some_and(|class| *class != Class::Free)
    }

    /// Half old, half new: one epoch of silence does not make a link worthless.
    pub(super) fn measure(&mut self, link: &str, rate_bytes_per_s: f64) {
        let rate = self
            .rates
            .entry(link.to_owned())
            .or_insert(rate_bytes_per_s);
        *rate = (*rate + rate_bytes_per_s) / 2.0;
    }
}
