//! Handlers for fork: the child has the sockets, but not the engine.
//!
//! The engine's descriptors belong to its thread, so the child does not inherit them. Its sockets
//! continue to work, as the parent's engine serves them. New sockets of the child get an engine in
//! the child.

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
    /// Both locks, while this thread forks. They are locks of std, which are only memory, so the
    /// child can unlock them.
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

/// The descriptors of the runtime's socket pair for signals. The runtime creates it once per
/// process, whether or not it handles signals, and every runtime starts with a copy of it. A child
/// remembers the pair but does not have it.
static SIGNAL_PAIR: OnceLock<Vec<RawFd>> = OnceLock::new();

/// The descriptor numbers that the engine's first descriptors may have; the runtime's pair is among
/// them.
const FIRST_NUMBERS: std::ops::Range<RawFd> = 3..32;

/// Records the runtime's socket pair, while there is no other one in this thread's table.
pub(crate) fn note_signal_pair() {
    let is_unix = |fd: &RawFd| socket_option(*fd, libc::SO_DOMAIN) == Ok(libc::AF_UNIX);
    SIGNAL_PAIR.get_or_init(|| FIRST_NUMBERS.filter(is_unix).collect());
}

/// Puts a new pair in the place of the parent's. No signal is ever received by it.
pub(crate) fn restore_signal_pair() -> io::Result<()> {
    let Some(numbers) = SIGNAL_PAIR.get() else {
        return Ok(());
    };
    let (one, other) = UnixStream::pair()?;
    one.set_nonblocking(true)?;
    // Both ends stay open as long as the process, with high numbers: a pair with one end closed
    // would look ended.
    let kept = |end: &UnixStream| {
        // SAFETY: the arguments are plain numbers.
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
