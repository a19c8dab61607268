//! The run's time and the core's: both count nanoseconds, the core's from one second earlier, so
//! that nothing in it can mistake the beginning of a run for "not set".

use cedos_lab_link::Time;

const HEAD_START_NS: u64 = 1_000_000_000;

/// The core's name for an instant of the run.
pub(crate) fn core(at: Time) -> d2tp_session::Time {
    d2tp_session::Time::from_nanos(at.as_nanos().saturating_add(HEAD_START_NS))
}

/// The run's name for an instant of the core.
pub(crate) fn run(at: d2tp_session::Time) -> Time {
    if at == d2tp_session::Time::NEVER {
        return Time::NEVER;
    }
    Time::from_nanos(at.as_nanos().saturating_sub(HEAD_START_NS))
}
