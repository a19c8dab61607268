//! D-Locks: a program holds one while it has transfers for which the machine may be woken.
//!
//! ```text
//!  d2tp_dlock_acquire ─▶ HELD ─┬─ sockets that an agent carries: it is informed, and decides
//!                              └─ other sockets ─▶ WakeRegistry ─▶ wake_watch ─▶ alarms, inhibitor
//!                                                  new decisions ◀─ scans for links ◀─┘
//! ```
//!
//! D-Locks belong to a process: a child of `fork` holds none, and they end with the process.

use std::sync::atomic::{AtomicU64, Ordering};

use libc::c_int;

use crate::errno::{CallResult, Errno};

/// The number of D-Locks of the process after one was acquired or released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DlockChange {
    pub(crate) held: c_int,
    /// Whether this was the first acquired or the last released one.
    pub(crate) begins_or_ends: bool,
}

/// The process id, and in the lower bits the number of its D-Locks.
static HELD: AtomicU64 = AtomicU64::new(0);

const COUNT_BITS: u32 = 32;

fn count(held: u64) -> u32 {
    match held >> COUNT_BITS {
        of if of == u64::from(std::process::id()) => held as u32,
        // The count of a parent process.
        _ => 0,
    }
}

/// Whether this process holds a D-Lock.
pub(crate) fn is_held() -> bool {
    count(HELD.load(Ordering::Relaxed)) > 0
}

/// Acquires a D-Lock.
///
/// # Errors
/// ENOLCK: the process holds as many as can be counted.
pub(crate) fn acquire() -> CallResult<DlockChange> {
    change(|held| {
        held.checked_add(1)
            .filter(|held| c_int::try_from(*held).is_ok())
    })
    .map_err(|()| Errno(libc::ENOLCK))
}

/// Releases a D-Lock.
///
/// # Errors
/// EINVAL: the process holds none.
pub(crate) fn release() -> CallResult<DlockChange> {
    change(|held| held.checked_sub(1)).map_err(|()| Errno(libc::EINVAL))
}

fn change(to: impl Fn(u32) -> Option<u32>) -> Result<DlockChange, ()> {
    let of = u64::from(std::process::id()) << COUNT_BITS;
    let changed = HELD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
        Some(of | u64::from(to(count(held))?))
    });
    let before = count(changed.map_err(drop)?);
    let held = to(before).ok_or(())?;
    Ok(DlockChange {
        held: held as c_int,
        begins_or_ends: (before == 0) != (held == 0),
    })
}
