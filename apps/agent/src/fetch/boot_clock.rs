//! The boot-time clock, which continues while the machine sleeps, for deadlines.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// A moment on the boot-time clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootInstant(Duration);

impl BootInstant {
    /// The present moment.
    pub fn now() -> BootInstant {
        let since_boot = clock_gettime(ClockId::CLOCK_BOOTTIME)
            .expect("Linux has had CLOCK_BOOTTIME since 2.6.39");
        BootInstant(since_boot.into())
    }

    /// The time from the start of the machine to here.
    pub fn since_boot(self) -> Duration {
        self.0
    }

    /// The moment this long after boot.
    pub fn from_boot(span: Duration) -> BootInstant {
        BootInstant(span)
    }

    /// The moment this much later, at most the end of time.
    pub fn after(self, span: Duration) -> BootInstant {
        BootInstant(self.0.saturating_add(span))
    }

    /// The time from `earlier` to this moment; zero if it is not earlier.
    pub fn since(self, earlier: BootInstant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}
