//! Time for the core: the boot-time clock, which goes on while the machine sleeps.

use d2tp_session::Time;

/// Nanoseconds since boot, sleep included.
pub(crate) fn now() -> Time {
    read(libc::CLOCK_BOOTTIME)
}

/// Nanoseconds the machine has been awake since boot.
pub(crate) fn awake() -> Time {
    read(libc::CLOCK_MONOTONIC)
}

fn read(clock: libc::clockid_t) -> Time {
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `ts` is a valid place for the result; both clocks exist on every Linux ≥ 2.6.39.
    let r = unsafe { libc::clock_gettime(clock, &mut ts) };
    assert_eq!(r, 0, "the system's clocks cannot be read");
    Time::from_nanos(ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64)
}
