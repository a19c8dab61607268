//! Reading options of the kernel's sockets.

use std::os::fd::RawFd;

use libc::{c_int, socklen_t};

use crate::errno::{CallResult, check};

/// The value of an option, as the kernel writes it.
///
/// # Safety
/// Any bit pattern must be a valid value.
pub(crate) unsafe trait SockoptValue: Copy {}

// SAFETY: numbers, and structures that only consist of numbers.
unsafe impl SockoptValue for c_int {}
// SAFETY: the same as above.
unsafe impl SockoptValue for u64 {}
// SAFETY: the same as above.
unsafe impl SockoptValue for libc::linger {}
// SAFETY: the same as above.
unsafe impl SockoptValue for libc::timeval {}

/// An option of a socket (SOL_SOCKET).
pub(crate) fn socket_option<T: SockoptValue>(fd: RawFd, name: c_int) -> CallResult<T> {
    // SAFETY: any bit pattern is a valid value.
    let mut value: T = unsafe { std::mem::zeroed() };
    let mut len = size_of::<T>() as socklen_t;
    // SAFETY: the buffer has the length that is passed.
    let result = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &mut len,
        )
    };
    check(result)?;
    Ok(value)
}
