//! The clocks of the system that the library reads.

use std::time::Duration;

use d2tp_time::Time;

/// Time since the machine was started, including sleep.
pub(crate) fn since_boot() -> Duration {
    read(libc::CLOCK_BOOTTIME)
}

/// The time used for links and flows: since boot, including sleep.
pub(crate) fn now() -> Time {
    Time::from_nanos(u64::try_from(since_boot().as_nanos()).unwrap_or(u64::MAX))
}

/// The time of day, since 1970.
pub(crate) fn time_of_day() -> Duration {
    read(libc::CLOCK_REALTIME)
}

fn read(which: libc::clockid_t) -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a timespec; these clocks exist.
    unsafe { libc::clock_gettime(which, &mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
