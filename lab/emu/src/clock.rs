//! The lab's clock: real time since the run began, as the link models count it.

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

    /// Now, in the run's time.
    pub fn now(&self) -> Time {
        Time::from_nanos(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// How long it is until `at`; nothing if it is past.
    pub fn until(&self, at: Time) -> Duration {
        Duration::from_nanos(at.since(self.now()).as_nanos())
    }
}
