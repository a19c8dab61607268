//! What a fork leaves: the child has the sockets and not the engine.
//!
//! The engine's descriptors are its thread's own, so the child does not inherit them, and its sockets
//! work on as the kernel's do, served by the parent's engine. What it asks for anew gets an engine of its
//! own.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, MutexGuard, OnceLock};

use crate::engine_handle::{self, SocketEngine};
use crate::kernel::socket_option;
use crate::table::{self, SocketTable};

type ForkLocks = (
    MutexGuard<'static, Option<Arc<SocketEngine>>>,
    MutexGuard<'static, Option<SocketTable>>,
);

thread_local! {
    /// Both locks, while this thread forks. std's own, which need nothing but their word of memory: the
    /// child can open them.
    static HELD: RefCell<Option<ForkLocks>> = const { RefCell::new(None) };
}

/// Registers fork handlers that hold our locks, so that no child inherits a locked one.
pub(crate) fn watch() {
    // SAFETY: the handlers are functions of this library, which is never unloaded (build.rs).
    let failed = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    assert_eq!(failed, 0, "no memory for three pointers");
}

unsafe extern "C" fn before() {
    HELD.with_borrow_mut(|held| *held = Some((engine_handle::lock(), table::lock())));
}

unsafe extern "C" fn after() {
    HELD.with_borrow_mut(Option::take);
}

/// The runtime has a pair of sockets for signals, once in a process and whether it is asked for signals or
/// not, and every runtime begins with a copy of one. A child remembers it and does not have it.
static SIGNAL_PAIR: OnceLock<Vec<RawFd>> = OnceLock::new();

/// The first numbers that the engine's descriptors may have: the runtime's are among them.
const FIRST_NUMBERS: std::ops::Range<RawFd> = 3..32;

/// Notes where the runtime has its pair, when there is nothing else of its kind in this thread's table.
pub(crate) fn note_signal_pair() {
    let is_unix = |fd: &RawFd| socket_option(*fd, libc::SO_DOMAIN) == Ok(libc::AF_UNIX);
    SIGNAL_PAIR.get_or_init(|| FIRST_NUMBERS.filter(is_unix).collect());
}

/// Puts a pair where that of a parent was. No signal is ever waited for with it.
pub(crate) fn restore_signal_pair() -> io::Result<()> {
    let Some(numbers) = SIGNAL_PAIR.get() else {
        return Ok(());
    };
    let (one, other) = UnixStream::pair()?;
    one.set_nonblocking(true)?;
    // Both live as long as the process, out of the way: a pair with one end would look like one that ended.
    let kept = |end: &UnixStream| {
        // SAFETY: plain numbers.
        let fd = unsafe { libc::fcntl(end.as_raw_fd(), libc::F_DUPFD_CLOEXEC, FIRST_NUMBERS.end) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(fd)
    };
    let one_kept = kept(&one)?;
    kept(&other)?;
    drop((one, other));
    for number in numbers {
        // SAFETY: plain numbers, in this thread's own table, which holds nothing else yet.
        if unsafe { libc::dup2(one_kept, *number) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
