//! Waiting on descriptors, and notices about the program's environment.

use libc::{c_int, fd_set, nfds_t, pollfd, timeval};

use super::answer;
use crate::dlock::{self, DlockChange};
use crate::engine_handle;
use crate::errno::{CallResult, check};

/// select(2), over any descriptors.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the kernel checks the pointers.
    answer(|| check(unsafe { libc::select(count, read, write, except, timeout) }))
}

/// poll(2), over any descriptors.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_poll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int {
    // SAFETY: the kernel checks the pointers.
    answer(|| check(unsafe { libc::poll(fds, count, timeout_ms) }))
}

/// Tells the library that the networks changed in a way that it may not have seen: every link is
/// tried at once.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_network_changed() -> c_int {
    answer(|| {
        if let Some(engine) = engine_handle::running() {
            engine.post(|home| home.network_changed());
        }
        Ok(0)
    })
}

/// Acquires a D-Lock. While one is held, the machine is woken for connections of this process that
/// wait for a network, and kept awake while they move data. Returns how many are held.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_dlock_acquire() -> c_int {
    answer(|| change_status(dlock::acquire()?))
}

/// Releases a D-Lock. Returns how many are still held.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_dlock_release() -> c_int {
    answer(|| change_status(dlock::release()?))
}

/// Informs the engine whether the process holds a D-Lock, if that changed.
fn change_status(change: DlockChange) -> CallResult<c_int> {
    if change.begins_or_ends
        && let Some(engine) = engine_handle::running()
    {
        engine.post(|home| home.on_dlock_changed());
    }
    Ok(change.held)
}
