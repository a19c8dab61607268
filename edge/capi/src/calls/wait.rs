//! Waiting, and what a program knows of its surroundings.

use std::sync::atomic::{AtomicU32, Ordering};

use libc::{c_int, fd_set, nfds_t, pollfd, timeval};

use super::answer;
use crate::engine;
use crate::errno::{Errno, check};

/// select(2), over any descriptors.
///
/// # Safety
/// As for the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the kernel checks.
    answer(|| check(unsafe { libc::select(count, read, write, except, timeout) }))
}

/// poll(2), over any descriptors.
///
/// # Safety
/// As for the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_poll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int {
    // SAFETY: the kernel checks.
    answer(|| check(unsafe { libc::poll(fds, count, timeout_ms) }))
}

/// The networks changed in a way that this process may not see: every link is tried at once.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_network_changed() -> c_int {
    answer(|| {
        if let Some(engine) = engine::running() {
            engine.tell(|home| home.network_changed());
        }
        Ok(0)
    })
}

/// How many D-Locks this process holds.
static LOCKS: AtomicU32 = AtomicU32::new(0);

/// Takes a D-Lock: while one is held, the process has transfers that the machine may be woken for. Returns
/// how many are held.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_dlock_acquire() -> c_int {
    answer(|| {
        let more = LOCKS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
            held.checked_add(1)
                .filter(|more| *more <= c_int::MAX as u32)
        });
        let before = more.map_err(|_| Errno(libc::ENOLCK))?;
        Ok(before as c_int + 1)
    })
}

/// Gives one back. Returns how many are still held.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_dlock_release() -> c_int {
    answer(|| {
        let less = LOCKS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
            held.checked_sub(1)
        });
        let before = less.map_err(|_| Errno(libc::EINVAL))?;
        Ok(before as c_int - 1)
    })
}
