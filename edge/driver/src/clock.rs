//! The clock for the core: the boot-time clock, which also counts while the machine sleeps.

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

/// A number that identifies this boot of the machine; zero if the system has none.
pub fn boot() -> u32 {
    static BOOT: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *BOOT.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let first = id.split('-').next().unwrap_or_default();
        u32::from_str_radix(first, 16).unwrap_or(0)
    })
}

/// Milliseconds since 1970 by the wall clock, which may be set at any time.
pub(crate) fn wall_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_millis() as u64)
}
