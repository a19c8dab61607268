//! The current state of D-Lock: when the machine is to wake, and why it is kept awake.

use std::time::Duration;

use d2tp_sched::WakePlan;
use d2tp_time::{Span, Time};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::fetch::boot_clock::BootInstant;

/// The current requests to the machine.
#[derive(Debug, Default)]
pub struct WakeStatus {
    pub(super) vigil: WakePlan,
    pub(super) lacks: Vec<String>,
}

impl WakeStatus {
    /// The state as JSON, for `cedos` and its users.
    pub fn to_json(&self) -> Value {
        let now = time();
        let clock = |at: Option<Time>| {
            let after = SignedDuration::try_from(Duration::from(at?.since(now))).ok()?;
            let at = Timestamp::now().checked_add(after).ok()?;
            Some(super::queue::whole_seconds(at))
        };
        json!({
            "look": clock(self.vigil.scan_at),
            "start": clock(self.vigil.start_at),
            "awake": self.vigil.hold,
            "lacks": self.lacks,
        })
    }
}

/// The time of wake-ups: since boot, including sleep.
pub(super) fn time() -> Time {
    Time::ZERO + Span::from(BootInstant::now().since_boot())
}
