//! The lab's clock: real time since the run began, for the link models.

use cedos_lab_link::Time;
use std::time::{Duration, Instant};

/// Real time since the run began.
#[derive(Clone, Copy, Debug)]
pub struct EmuClock {
    start: Instant,
}

impl EmuClock {
    /// A clock that starts now.
    pub fn start() -> EmuClock {
        EmuClock {
            start: Instant::now(),
        }
    }

    /// The current time of the run.
    pub fn now(&self) -> Time {
        Time::from_nanos(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The time until `at`; zero if it has passed.
    pub fn until(&self, at: Time) -> Duration {
        Duration::from_nanos(at.since(self.now()).as_nanos())
    }
}
