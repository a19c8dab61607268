//! What the kernel says of a descriptor.

use std::os::fd::RawFd;

use libc::{c_int, socklen_t};

use crate::errno::{CallResult, check};

/// An option's value as the kernel writes it.
///
/// # Safety
/// Any bytes are one.
pub(crate) unsafe trait SockoptValue: Copy {}

// SAFETY: numbers, and structures of nothing but numbers.
unsafe impl SockoptValue for c_int {}
// SAFETY: as above.
unsafe impl SockoptValue for u64 {}
// SAFETY: as above.
unsafe impl SockoptValue for libc::linger {}
// SAFETY: as above.
unsafe impl SockoptValue for libc::timeval {}

/// An option of a socket (SOL_SOCKET).
pub(crate) fn socket_option<T: SockoptValue>(fd: RawFd, name: c_int) -> CallResult<T> {
    // SAFETY: any bytes are one.
    let mut value: T = unsafe { std::mem::zeroed() };
    let mut len = size_of::<T>() as socklen_t;
    // SAFETY: the place has the length that is said.
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
