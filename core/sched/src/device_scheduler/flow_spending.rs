//! Bytes that a flow spent on metered links, and the changes that a new grant makes at its device.
//!
//! ```text
//!  Grant ─▶ FlowSpending ─▶ SpendingChange ─▶ the device, which counts from when the flow was allowed
//!               ▲ └──▶ spent, left                                 │
//!               └──────────────── count ───────────────────────────┘
//! ```
//!
//! A device counts a flow's spending from when the flow was last allowed to pay. A flow's budget
//! covers all such periods together.

use d2tp_time::{Span, Time};

use super::Grant;

/// A change to what the device allows a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpendingChange {
    /// The flow may pay.
    Allow {
        /// The most bytes, counted since the flow was allowed to pay; `None` means no limit.
        budget: Option<u64>,
    },
    /// The flow may no longer pay.
    Forbid,
}

/// What a flow has spent, and what its device allows it.
#[derive(Debug, Clone, Default)]
pub struct FlowSpending {
    /// Bytes spent in earlier periods in which the flow could pay.
    before: u64,
    /// Bytes spent in the current period.
    since_allowed: u64,
    /// The budget set at the device; `None` while the flow may not pay.
    allowed: Option<Option<u64>>,
    /// When the flow was last granted payload.
    granted_at: Option<Time>,
}

impl FlowSpending {
    /// The spending of a flow that may not pay yet and has spent this much before.
    pub fn new(spent: u64) -> FlowSpending {
        FlowSpending {
            before: spent,
            ..FlowSpending::default()
        }
    }

    /// Sets the bytes that metered links have carried since the flow was allowed to pay.
    pub fn count(&mut self, paid_bytes: u64) {
        if self.allowed.is_some() {
            self.since_allowed = paid_bytes;
        }
    }

    /// Payload bytes spent in total.
    pub fn spent(&self) -> u64 {
        self.before + self.since_allowed
    }

    /// Bytes left of a budget; `None` means no limit.
    pub fn left(&self, budget: Option<u64>) -> Option<u64> {
        budget.map(|budget| budget.saturating_sub(self.spent()))
    }

    /// Whether the device currently allows the flow to pay.
    pub fn is_allowed(&self) -> bool {
        self.allowed.is_some()
    }

    /// Returns the grant. If it is nothing and payload was granted less than `span` ago, returns an
    /// open path instead, because the path may be needed again soon.
    pub fn keep_path(&mut self, now: Time, grant: Grant, span: Span) -> Grant {
        match grant {
            Grant::Spend { .. } => self.granted_at = Some(now),
            Grant::None if self.granted_at.is_some_and(|at| now.since(at) < span) => {
                return Grant::Path;
            }
            Grant::None | Grant::Path | Grant::Probe { .. } => {}
        }
        grant
    }

    /// Applies a grant, and the flow's total budget. Returns the change to make at the device, if any.
    /// Call [`FlowSpending::count`] before.
    pub fn apply(&mut self, grant: Grant, budget: Option<u64>) -> Option<SpendingChange> {
        let within = |bytes: u64| {
            let most = self.spent().saturating_add(bytes);
            Some(budget.map_or(most, |budget| budget.min(most)))
        };
        let allowed = match grant {
            Grant::Spend { up_to: None } => Some(budget),
            Grant::Spend { up_to: Some(bytes) } | Grant::Probe { bytes } => Some(within(bytes)),
            Grant::Path => Some(Some(0)),
            Grant::None => None,
        };
        if allowed.is_none() {
            self.before += std::mem::take(&mut self.since_allowed);
        }
        let told = allowed.map(|budget| budget.map(|budget| budget.saturating_sub(self.before)));
        if told == self.allowed {
            return None;
        }
        self.allowed = told;
        Some(match told {
            Some(budget) => SpendingChange::Allow { budget },
            None => SpendingChange::Forbid,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Grant = Grant::Spend { up_to: None };

    fn allow(budget: u64) -> Option<SpendingChange> {
        Some(SpendingChange::Allow {
            budget: Some(budget),
        })
    }

    #[test]
    fn what_was_spent_before_is_not_to_be_spent_again() {
        let mut spending = FlowSpending::new(100);
        assert_eq!(spending.left(Some(1_000)), Some(900));
        assert_eq!(spending.apply(ALL, Some(1_000)), allow(900));
        spending.count(300);
        assert_eq!(spending.apply(ALL, Some(1_000)), None);
        assert_eq!(spending.left(Some(1_000)), Some(600));
        let forbid = Some(SpendingChange::Forbid);
        assert_eq!(spending.apply(Grant::None, Some(1_000)), forbid);
        // The device counts from zero again.
        assert_eq!(spending.apply(ALL, Some(1_000)), allow(600));
        spending.count(0);
        assert_eq!(spending.spent(), 400);
        assert_eq!(spending.left(None), None);
        assert_eq!(spending.left(Some(300)), Some(0));
    }

    #[test]
    fn a_grant_is_of_what_comes_and_within_the_budget() {
        let mut spending = FlowSpending::default();
        let up_to = |bytes| Grant::Spend { up_to: Some(bytes) };
        assert_eq!(spending.apply(up_to(100), None), allow(100));
        spending.count(70);
        assert_eq!(spending.apply(up_to(100), None), allow(170));
        assert_eq!(spending.apply(up_to(100), Some(120)), allow(120));
        assert_eq!(
            spending.apply(Grant::Probe { bytes: 10 }, Some(120)),
            allow(80)
        );
        assert_eq!(spending.apply(Grant::Path, Some(120)), allow(0));
    }

    #[test]
    fn a_path_stays_for_a_while_after_it_was_paid_for() {
        let at = |seconds| Time::ZERO + Span::from_secs(seconds);
        let ten = Span::from_secs(10);
        let mut spending = FlowSpending::default();
        assert_eq!(spending.keep_path(at(1), Grant::None, ten), Grant::None);
        assert_eq!(spending.keep_path(at(2), ALL, ten), ALL);
        assert_eq!(spending.keep_path(at(11), Grant::None, ten), Grant::Path);
        assert_eq!(spending.keep_path(at(12), Grant::None, ten), Grant::None);
    }
}
