//! The deadline of a flow: passed to the driver and the proxy, corrected when the clock is set, and
//! removed if the transfer may be late.

use std::time::Duration;

use d2tp_sched::DeadlineFallback;

use crate::fetch::boot_clock::BootInstant;

/// How long before the deadline a flow that may be late loses it, so that neither end drops the flow.
const LIFT_DEADLINE: Duration = Duration::from_secs(3); // a guess: more than a slow link's delay

/// The smallest shift of a deadline that is attributed to a change of the clock.
const CLOCK_SET: Duration = Duration::from_secs(2); // a guess: more than a clock is slewed in an hour

/// The deadline of the current flow, as it was set last.
#[derive(Debug, Default)]
pub(super) struct FlowDeadline {
    /// The deadline that the flow has.
    due: Option<BootInstant>,
    is_lifted: bool,
}

impl FlowDeadline {
    /// Records a new flow, with this much time left.
    pub(super) fn on_new_flow(&mut self, left: Option<Duration>) {
        self.is_lifted = left.is_none_or(|left| left.is_zero());
        self.due = None;
    }

    /// Records that the transfer has new terms.
    pub(super) fn on_new_terms(&mut self) {
        *self = FlowDeadline::default();
    }

    /// The time left to set on the flow if its deadline must be corrected: one at a time of day moves
    /// when the clock is set.
    pub(super) fn correction(
        &mut self,
        left: Option<Duration>,
        now: BootInstant,
    ) -> Option<Duration> {
        let left = left.filter(|left| !left.is_zero() && !self.is_lifted)?;
        let due = now.after(left);
        let known = *self.due.get_or_insert(due);
        if due.since(known).max(known.since(due)) <= CLOCK_SET {
            return None;
        }
        self.due = Some(due);
        Some(left)
    }

    /// Whether the flow loses its deadline now. Returns true once.
    pub(super) fn lift(&mut self, left: Option<Duration>, if_late: DeadlineFallback) -> bool {
        let lifts = !self.is_lifted && is_here(left) && if_late != DeadlineFallback::Fail;
        self.is_lifted |= lifts;
        lifts
    }
}

/// Whether the deadline has been reached: either end may have noticed a moment earlier.
pub(super) fn is_here(left: Option<Duration>) -> bool {
    left.is_some_and(|left| left <= LIFT_DEADLINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_flow_is_told_again_only_where_the_clock_was_set() {
        let mut deadline = FlowDeadline::default();
        let now = |seconds| BootInstant::from_boot(s(seconds));
        deadline.on_new_flow(Some(s(100)));
        assert_eq!(deadline.correction(Some(s(100)), now(10)), None);
        assert_eq!(deadline.correction(Some(s(90)), now(20)), None);
        assert_eq!(deadline.correction(Some(s(50)), now(30)), Some(s(50)));
        assert_eq!(deadline.correction(Some(s(40)), now(40)), None);
    }

    #[test]
    fn a_flow_that_may_be_late_loses_its_deadline_once() {
        let mut deadline = FlowDeadline::default();
        deadline.on_new_flow(Some(s(100)));
        assert!(!deadline.lift(Some(s(4)), DeadlineFallback::Cell));
        assert!(!deadline.lift(Some(s(1)), DeadlineFallback::Fail));
        assert!(deadline.lift(Some(s(1)), DeadlineFallback::Wait));
        assert!(!deadline.lift(Some(s(0)), DeadlineFallback::Wait));
        deadline.on_new_flow(None);
        assert!(!deadline.lift(None, DeadlineFallback::Cell));
    }
}
