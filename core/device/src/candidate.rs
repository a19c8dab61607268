//! A link as the device's scheduler is told of it.

use d2tp_sched::{CarryingLink, LinkCandidate, LinkClass};
use d2tp_session::{PathState, PathStats};

use crate::links::TrackedStatus;

/// Describes a link for the scheduler: what it costs, its rate in bytes per second, and its path if it
/// has one.
pub fn link_candidate(
    name: &str,
    class: LinkClass,
    rate: Option<u64>,
    path: Option<&PathStats>,
) -> LinkCandidate {
    let path = path.map(|path| path.state);
    LinkCandidate {
        name: name.to_owned(),
        class,
        rate_bytes_per_s: rate.map(|rate| rate as f64),
        metric: u32::MAX,
        // One without a path is not tried yet, or is one that costs.
        stalled: path == Some(PathState::Silent),
        in_use: path == Some(PathState::Active),
    }
}

impl TrackedStatus {
    /// Describes the link for the scheduler; `class` is what it costs.
    pub fn candidate(&self, class: LinkClass) -> LinkCandidate {
        link_candidate(&self.name, class, self.rate, self.path.as_ref())
    }
}

impl CarryingLink for TrackedStatus {
    fn name(&self) -> &str {
        &self.name
    }

    fn payload(&self) -> (u64, u64) {
        self.payload
    }
}
