//! Identifiers of flows.

/// The identifier of a flow, never used twice between two instances: `epoch (32) ‖ counter (24) ‖
/// opener (1)`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FlowId(pub u64);

impl FlowId {
    /// The largest flow id: the 57 bits of epoch, counter and opener (R-FLOW-10).
    pub const MAX: u64 = (1 << 57) - 1;
    /// The number of flows that one side may open in one epoch.
    pub const COUNTER_MAX: u32 = (1 << 24) - 1;

    /// The `counter`-th flow of `epoch`, opened by the session's initiator or by its responder.
    pub fn new(epoch: u32, counter: u32, by_initiator: bool) -> Self {
        assert!(counter <= Self::COUNTER_MAX);
        FlowId(u64::from(epoch) << 25 | u64::from(counter) << 1 | u64::from(!by_initiator))
    }
    /// Whether the session's initiator opened this flow.
    pub fn by_initiator(self) -> bool {
        self.0 & 1 == 0
    }
    /// The epoch in which the flow was opened.
    pub fn epoch(self) -> u32 {
        (self.0 >> 25) as u32
    }
    /// The flow's number among the flows that its opener opened in that epoch.
    pub fn counter(self) -> u32 {
        (self.0 >> 1) as u32 & Self::COUNTER_MAX
    }
}
