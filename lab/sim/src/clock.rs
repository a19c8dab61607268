//! The clocks of the run and of a core: both count nanoseconds, each from its own start.
//!
//! A core's clock is the boot clock of its machine: it starts again with the machine, which is what
//! every crash means here, so that nothing that must survive a crash depends on it. It starts one
//! second late, so that the core cannot mistake the start for "not set".

use cedos_lab_link::{Span, Time};

const HEAD_START: Span = Span::from_secs(1);

/// The clock of one machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimClock {
    booted: Time,
}

impl SimClock {
    /// The clock of a machine that boots now.
    pub(crate) fn boot(now: Time) -> SimClock {
        SimClock { booted: now }
    }

    /// The core's time for a time of the run; times before its start become its start.
    pub(crate) fn core(self, at: Time) -> Time {
        Time::ZERO + HEAD_START + at.since(self.booted)
    }

    /// The run's time for a time of the core.
    pub(crate) fn run(self, at: Time) -> Time {
        if at == Time::NEVER {
            return Time::NEVER;
        }
        self.booted + at.since(Time::ZERO + HEAD_START)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_boots_again_counts_from_the_same_beginning() {
        let at = |s| Time::ZERO + Span::from_secs(s);
        let (first, second) = (SimClock::boot(at(0)), SimClock::boot(at(50)));
        assert_eq!(first.core(at(0)), second.core(at(50)));
        assert_eq!(second.core(at(60)), at(11));
        assert_eq!(second.run(second.core(at(60))), at(60));
        assert_eq!(second.run(Time::NEVER), Time::NEVER);
    }
}
