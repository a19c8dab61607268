//! The assignment of flows to links, decided for all flows of a device at once.
//!
//! ```text
//!  flows, earliest deadline first   A B C D E
//!  wlan0  free                      ─────────▶ all of them, in this order
//!  wwan0  metered                   ───▶ those that pay; or a few bytes, as a probe; or none
//! ```
//!
//! A link carries the first of its flows that is not complete; several links may carry the same
//! one. Serving the earliest deadline first meets all deadlines if any order does, and leaves no
//! more to metered links than another order (Liu and Layland, 1973, show the first for one
//! processor; a fluid that may be split is the same case).

use crate::link_choice::{CostPolicy, DeadlineFallback, FlowDemand, SIZE_UNKNOWN_BYTES};
use crate::source_supply::SourceSupply;
use d2tp_time::Span;
use std::time::Duration;

/// A flow in the scheduler's list.
#[derive(Debug, Clone)]
pub struct ScheduledFlow {
    /// The flow's demand.
    pub need: FlowDemand,
    /// Total size in bytes; if the remaining bytes are unknown, the bytes received so far.
    pub size_bytes: u64,
    /// Priority, 0 to 7; higher goes first. It decides only the order when not all flows can be in
    /// time.
    pub priority: u8,
    /// How the server supplies the flow.
    pub source: SourceSupply,
}

impl ScheduledFlow {
    /// Whether the remaining bytes are known.
    pub(crate) fn is_sized(&self) -> bool {
        self.need.remaining_bytes.is_some()
    }

    /// The total size in bytes; an estimate if it is unknown.
    pub(crate) fn size(&self) -> u64 {
        match self.is_sized() {
            true => self.size_bytes,
            false => self.size_bytes.max(SIZE_UNKNOWN_BYTES),
        }
    }

    /// The remaining bytes. If they are unknown, as many as were carried so far, since sizes have a
    /// heavy tail.
    pub(crate) fn bytes(&self) -> f64 {
        self.need.remaining_bytes.unwrap_or(self.size()) as f64
    }

    /// The bytes that links have to carry until the deadline: no more than the source supplies by then.
    pub(crate) fn due_bytes(&self) -> f64 {
        match (self.source.limit(), self.left_s()) {
            (Some(rate), Some(left_s)) => self.bytes().min(rate * left_s),
            _ => self.bytes(),
        }
    }

    /// Seconds until the deadline.
    pub(crate) fn left_s(&self) -> Option<f64> {
        self.need.left.map(|left| left.as_secs_f64())
    }

    /// Whether the deadline may make the flow use metered links.
    pub(crate) fn may_pay(&self) -> bool {
        self.need.metered_bytes_left != Some(0)
            && match self.need.policy {
                CostPolicy::FreeOnly => false,
                CostPolicy::FreeFirst | CostPolicy::Balanced => {
                    self.need.if_late == DeadlineFallback::Cell
                }
                CostPolicy::Fast | CostPolicy::Any => true,
            }
    }
}

/// The flows that a link carries until the next decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkShare {
    /// The link carries nothing.
    Nothing,
    /// Every flow is assigned.
    All,
    /// The flows that pay.
    Paid,
    /// The link carries this many bytes of the first flow that may pay, to be measured.
    Probe(u64),
}

/// The scheduler's decision for all flows and links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkAssignment {
    /// The indices of the flows, in the order in which links carry them.
    pub order: Vec<usize>,
    /// The flows that pay, in the order of `order`.
    pub payers: Vec<usize>,
    /// The first flow that may pay, whether it does or not.
    pub probed: Option<usize>,
    /// What each link carries, in the order of the links.
    pub shares: Vec<LinkShare>,
    /// How long the assignment is valid if nothing changes.
    pub valid_for: Span,
}

impl LinkAssignment {
    /// The flows that a link carries, in order, and the most bytes that it may carry for them.
    pub fn carried_by(&self, link: usize) -> (&[usize], u64) {
        match self.shares[link] {
            LinkShare::Nothing => (&[], 0),
            LinkShare::All => (&self.order, u64::MAX),
            LinkShare::Paid => (&self.payers, u64::MAX),
            LinkShare::Probe(bytes) => (self.probed.as_slice(), bytes),
        }
    }
}

/// Bits of an index in the sort key; the priority has three.
const PLACE_BITS: u32 = 27;
/// The deadline in milliseconds from which a flow counts as having none: half a year.
const LEFT_MAX_MS: u64 = (1 << (64 - PLACE_BITS - 3)) - 1;

/// Orders flows by deadline, to the millisecond, those without one last; then by priority, then by
/// arrival.
pub(crate) fn by_deadline(flows: &[ScheduledFlow]) -> Vec<usize> {
    assert!(flows.len() < 1 << PLACE_BITS);
    // Each flow's key is one number: ten thousand are sorted in a fifth of a millisecond.
    let key = |(place, flow): (usize, &ScheduledFlow)| {
        let left = flow.need.left.unwrap_or(Duration::MAX).as_millis();
        let left_ms = u64::try_from(left).unwrap_or(u64::MAX).min(LEFT_MAX_MS);
        let behind = u64::from(7 - flow.priority.min(7));
        (left_ms << 3 | behind) << PLACE_BITS | place as u64
    };
    let mut keys: Vec<u64> = flows.iter().enumerate().map(key).collect();
    keys.sort_unstable();
    let place = (1 << PLACE_BITS) - 1;
    keys.into_iter().map(|key| (key & place) as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(left_s: Option<u64>, priority: u8) -> ScheduledFlow {
        ScheduledFlow {
            need: FlowDemand {
                remaining_bytes: Some(1),
                left: left_s.map(Duration::from_secs),
                policy: CostPolicy::FreeFirst,
                if_late: DeadlineFallback::Cell,
                metered_bytes_left: None,
            },
            size_bytes: 1,
            priority,
            source: SourceSupply::Ample,
        }
    }

    #[test]
    fn the_earliest_deadline_is_first_then_the_highest_priority() {
        let flows = [
            flow(None, 7),
            flow(Some(20), 0),
            flow(Some(10), 1),
            flow(Some(10), 2),
            flow(None, 7),
        ];
        assert_eq!(by_deadline(&flows), [3, 2, 1, 0, 4]);
    }
}
