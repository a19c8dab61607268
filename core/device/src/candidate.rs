//! How the device's scheduler is told about a link.

use d2tp_sched::{CarryingLink, LinkCandidate, LinkClass};

use crate::health::LinkAnswers;
use crate::links::TrackedStatus;

/// Describes a link for the scheduler: its cost class, its rate in bytes per second, and whether
/// packets sent over it are answered.
pub fn link_candidate(
    name: &str,
    class: LinkClass,
    rate: Option<u64>,
    answers: LinkAnswers,
) -> LinkCandidate {
    LinkCandidate {
        name: name.to_owned(),
        class,
        rate_bytes_per_s: rate.map(|rate| rate as f64),
        metric: u32::MAX,
        // A link whose first answer is awaited may carry payload soon. A metered link has no path
        // until a flow may pay for it.
        stalled: answers.is_silent(),
        in_use: answers.is_up(),
    }
}

impl TrackedStatus {
    /// Describes the link for the scheduler, with this cost class.
    pub fn candidate(&self, class: LinkClass) -> LinkCandidate {
        link_candidate(&self.name, class, self.rate, self.answers)
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
