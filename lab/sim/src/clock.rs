//! The run's time and a core's: both count nanoseconds, each from its own beginning.
//!
//! A core's clock is the boot clock of its machine: it begins anew when the machine does, which is
//! what every crash here is, so that nothing that must survive one can lean on it. It begins one
//! second late, so that nothing in the core can mistake the beginning for "not set".

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

    /// The core's name for an instant of the run; what was before its beginning is its beginning.
    pub(crate) fn core(self, at: Time) -> Time {
        Time::ZERO + HEAD_START + at.since(self.booted)
    }

    /// The run's name for an instant of the core.
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
