//! The bytes that metered links may carry for a flow: the grant passed to the driver, and the bytes
//! spent.

use std::time::Duration;

use d2tp_sched::Grant;

use crate::fetch::boot_clock::BootInstant;

/// How long the path over a metered link is kept after it was last used: it may be needed again soon.
const READY_FOR: Duration = Duration::from_secs(10); // a guess: as long as a radio stays awake

/// The driver's permission to use metered links for a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PaidLimit {
    /// Whether the flow may use them.
    pub(super) may_pay: bool,
    /// The most payload that metered links may carry for the flow; `None`: no limit.
    pub(super) at_most: Option<u64>,
}

/// The grant of a flow.
#[derive(Debug, Default)]
pub(super) struct PaidGrant {
    /// The grant that the driver applied in this flow.
    applied: Option<Grant>,
    /// Whether new terms require applying the grant again.
    is_outdated: bool,
    /// When metered links were last paid for.
    spent_at: Option<BootInstant>,
    /// Metered bytes at the time when the driver began to count.
    counted_from: u64,
}

impl PaidGrant {
    /// Records a new flow, for which the driver has no grant.
    pub(super) fn on_new_flow(&mut self) {
        self.applied = None;
    }

    /// Records that the transfer has new terms.
    pub(super) fn on_new_terms(&mut self) {
        self.is_outdated = true;
    }

    /// Whether the grant pays for payload.
    pub(super) fn spends(&self) -> bool {
        matches!(
            self.applied,
            Some(Grant::Spend { .. } | Grant::Probe { .. })
        )
    }

    /// Whether the driver counts bytes on metered links.
    pub(super) fn is_counted(&self) -> bool {
        !matches!(self.applied, None | Some(Grant::None))
    }

    /// Metered bytes that the driver counted and that are not part of the object: requests, and lost
    /// bytes. `metered_bytes`: payload that came over metered links.
    pub(super) fn paid_besides(&self, counted: u64, metered_bytes: u64) -> u64 {
        (self.counted_from + counted).saturating_sub(metered_bytes)
    }

    /// The grant to apply when the scheduler gave `granted`: a recently used path is kept if it
    /// `may_pay_again`.
    pub(super) fn extend(
        &mut self,
        granted: Grant,
        may_pay_again: bool,
        now: BootInstant,
    ) -> Grant {
        if matches!(granted, Grant::Spend { .. }) {
            self.spent_at = Some(now);
        }
        let lately = self.spent_at.is_some_and(|at| now.since(at) < READY_FOR);
        match granted {
            Grant::None if lately && may_pay_again => Grant::Path,
            granted => granted,
        }
    }

    /// The permission to give to the driver for `grant`, unless it is already applied. `carried`:
    /// metered bytes so far; `at_most`: what the transfer may spend in all.
    pub(super) fn limit(
        &mut self,
        grant: Grant,
        carried: u64,
        at_most: Option<u64>,
    ) -> Option<PaidLimit> {
        if self.applied == Some(grant) && !self.is_outdated {
            return None;
        }
        let own = at_most.map(|most| most.saturating_sub(carried));
        if !self.is_counted() {
            self.counted_from = carried;
        }
        // The driver counts from when it was first told that the flow may pay.
        let counted = carried.saturating_sub(self.counted_from);
        let within = |most: Option<u64>| {
            let least = own.into_iter().chain(most).min();
            least.map(|bytes| counted + bytes)
        };
        let (may_pay, at_most) = match grant {
            Grant::None => (false, None),
            Grant::Path => (true, Some(0)),
            Grant::Probe { bytes } => (true, within(Some(bytes))),
            Grant::Spend { up_to } => (true, within(up_to)),
        };
        Some(PaidLimit { may_pay, at_most })
    }

    /// Records that the driver applied `grant`. True if that is of another kind than before, or the
    /// terms changed.
    pub(super) fn set_applied(&mut self, grant: Grant) -> bool {
        let again = std::mem::take(&mut self.is_outdated);
        let before = self.applied.replace(grant);
        again || before.map(word) != Some(word(grant))
    }
}

/// The word for a grant in the session's log.
pub(super) fn word(grant: Grant) -> &'static str {
    match grant {
        Grant::None => "no",
        Grant::Path => "ready",
        Grant::Probe { .. } => "probe",
        Grant::Spend { .. } => "spend",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootInstant {
        BootInstant::from_boot(Duration::from_secs(seconds))
    }

    const SPEND: Grant = Grant::Spend { up_to: None };

    #[test]
    fn a_path_that_was_paid_for_is_kept_for_a_while_if_it_may_be_paid_for_again() {
        let mut grant = PaidGrant::default();
        assert_eq!(grant.extend(Grant::None, true, at(1)), Grant::None);
        assert_eq!(grant.extend(SPEND, true, at(2)), SPEND);
        assert_eq!(grant.extend(Grant::None, true, at(11)), Grant::Path);
        assert_eq!(grant.extend(Grant::None, false, at(11)), Grant::None);
        assert_eq!(grant.extend(Grant::None, true, at(12)), Grant::None);
    }

    #[test]
    fn the_driver_is_told_a_grant_once_and_again_after_new_terms() {
        let mut grant = PaidGrant::default();
        let unlimited = PaidLimit {
            may_pay: true,
            at_most: None,
        };
        assert_eq!(grant.limit(SPEND, 0, None), Some(unlimited));
        assert!(grant.set_applied(SPEND));
        assert_eq!(grant.limit(SPEND, 10, None), None);
        grant.on_new_terms();
        assert!(grant.limit(SPEND, 10, None).is_some());
        assert!(grant.set_applied(SPEND));
        grant.on_new_flow();
        assert!(grant.limit(SPEND, 10, None).is_some());
    }

    #[test]
    fn a_limit_counts_from_when_the_flow_began_to_pay() {
        let mut grant = PaidGrant::default();
        let limit = |limit: Option<PaidLimit>| limit.and_then(|limit| limit.at_most);
        let probe = |bytes| Grant::Probe { bytes };
        assert_eq!(limit(grant.limit(probe(50), 100, Some(1000))), Some(50));
        grant.set_applied(probe(50));
        // 40 of them were carried since, and 860 of the transfer's own are left.
        let spend = Grant::Spend { up_to: Some(9000) };
        assert_eq!(limit(grant.limit(spend, 140, Some(1000))), Some(40 + 860));
        assert_eq!(grant.paid_besides(45, 130), 15);
    }
}
