//! Access to memory that a C program points at. It is accessed through the kernel, which returns
//! EFAULT where a dereference would crash the process.

use libc::{c_void, socklen_t};

use crate::errno::{CallResult, Errno};

/// Copies `len` bytes from the program's `from`.
pub(crate) fn read(from: *const c_void, len: usize) -> CallResult<Vec<u8>> {
    let mut bytes = vec![0u8; len];
    move_bytes(bytes.as_mut_ptr().cast(), from.cast_mut(), len, true)?;
    Ok(bytes)
}

/// Copies `bytes` to the program's `to`.
pub(crate) fn write(to: *mut c_void, bytes: &[u8]) -> CallResult<()> {
    move_bytes(bytes.as_ptr().cast_mut().cast(), to, bytes.len(), false)
}

/// A C string of at most `max` bytes.
pub(crate) fn read_text(from: *const libc::c_char, max: usize) -> CallResult<String> {
    let mut bytes: Vec<u8> = Vec::new();
    while bytes.len() <= max {
        // Byte by byte, because the next page after the string may not be mapped.
        let at = from.wrapping_add(bytes.len());
        match read(at.cast(), 1)?[0] {
            0 => return String::from_utf8(bytes).map_err(|_| Errno(libc::EINVAL)),
            byte => bytes.push(byte),
        }
    }
    Err(Errno(libc::ENAMETOOLONG))
}

fn move_bytes(ours: *mut c_void, theirs: *mut c_void, len: usize, to_us: bool) -> CallResult<()> {
    if len == 0 {
        return Ok(());
    }
    if theirs.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    let local = libc::iovec {
        iov_base: ours,
        iov_len: len,
    };
    let remote = libc::iovec {
        iov_base: theirs,
        iov_len: len,
    };
    // SAFETY: `ours` has `len` bytes; the kernel checks `theirs`.
    let moved = unsafe {
        let pid = libc::getpid();
        match to_us {
            true => libc::process_vm_readv(pid, &local, 1, &remote, 1, 0),
            false => libc::process_vm_writev(pid, &local, 1, &remote, 1, 0),
        }
    };
    if moved == len as isize {
        return Ok(());
    }
    match Errno::last().0 {
        libc::ENOSYS | libc::EPERM if moved < 0 => {
            // A sandbox does not allow the call, so the pointer is trusted. SAFETY: the caller of
            // the C function guarantees it, as for the kernel's own calls.
            unsafe {
                match to_us {
                    true => std::ptr::copy_nonoverlapping(theirs.cast::<u8>(), ours.cast(), len),
                    false => std::ptr::copy_nonoverlapping(ours.cast::<u8>(), theirs.cast(), len),
                }
            }
            Ok(())
        }
        _ => Err(Errno(libc::EFAULT)),
    }
}

/// Returns a value like `getsockopt` and `getsockname`: writes as much as fits, and the full
/// length.
pub(crate) fn answer(
    bytes: &[u8],
    to: *mut c_void,
    len: *mut socklen_t,
    told: usize,
) -> CallResult<()> {
    let room = read(len.cast(), size_of::<socklen_t>())?;
    let room = socklen_t::from_ne_bytes(room.try_into().map_err(|_| Errno(libc::EFAULT))?) as usize;
    // The kernel treats a length as an int.
    if room > i32::MAX as usize {
        return Err(Errno(libc::EINVAL));
    }
    write(to, &bytes[..bytes.len().min(room)])?;
    write(len.cast(), &(told as socklen_t).to_ne_bytes())
}
