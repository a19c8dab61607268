//! Reading and writing: the kernel's calls without SIGPIPE, and with the connection's own errors.

use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use libc::{c_int, c_void, iovec, msghdr, size_t, sockaddr, socklen_t, ssize_t};

use super::{answer, counted, datagram};
use crate::connection_status::ConnectionStatus;
use crate::engine;
use crate::errno::{CallResult, Errno, check};
use crate::table;

/// Flags that would affect the loopback pair only, and not the peer.
const NOT_CARRIED: c_int = libc::MSG_OOB | libc::MSG_FASTOPEN;

fn with_conn_error(fd: RawFd, moved: ssize_t) -> CallResult<ssize_t> {
    if moved < 0 {
        return Err(table::translate(fd, Errno::last()));
    }
    Ok(moved)
}

fn carried(fd: RawFd, flags: c_int) -> CallResult<()> {
    if flags & NOT_CARRIED != 0 && table::find(fd)?.is_some() {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    Ok(())
}

/// send(2)
///
/// # Safety
/// The same as that of the kernel's call: `buffer` has `len` bytes; otherwise the kernel returns
/// EFAULT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_send(
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    counted(|| {
        carried(fd, flags)?;
        if let Some(messages) = datagram::find(fd)? {
            return messages.send_to(buffer, len, flags, ptr::null(), 0);
        }
        // SAFETY: the kernel checks the memory.
        with_conn_error(fd, unsafe {
            libc::send(fd, buffer, len, flags | libc::MSG_NOSIGNAL)
        })
    })
}

/// recv(2)
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_recv(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    counted(|| {
        carried(fd, flags)?;
        if let Some(messages) = datagram::find(fd)? {
            return messages.receive_from(buffer, len, flags, ptr::null_mut(), ptr::null_mut());
        }
        // SAFETY: the kernel checks the memory.
        with_conn_error(fd, unsafe { libc::recv(fd, buffer, len, flags) })
    })
}

/// sendto(2); a connected stream ignores the address, like the kernel's.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_sendto(
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    counted(|| {
        carried(fd, flags)?;
        if let Some(messages) = datagram::find(fd)? {
            return messages.send_to(buffer, len, flags, to, to_len);
        }
        let flags = flags | libc::MSG_NOSIGNAL;
        // SAFETY: the kernel checks the memory.
        with_conn_error(fd, unsafe {
            libc::sendto(fd, buffer, len, flags, to, to_len)
        })
    })
}

/// recvfrom(2)
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    counted(|| {
        carried(fd, flags)?;
        if let Some(messages) = datagram::find(fd)? {
            return messages.receive_from(buffer, len, flags, from, from_len);
        }
        // SAFETY: the kernel checks the memory.
        with_conn_error(fd, unsafe {
            libc::recvfrom(fd, buffer, len, flags, from, from_len)
        })
    })
}

/// sendmsg(2)
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    counted(|| {
        carried(fd, flags)?;
        if let Some(messages) = datagram::find(fd)? {
            return messages.send_message(message, flags);
        }
        // SAFETY: the kernel checks the memory.
        with_conn_error(fd, unsafe {
            libc::sendmsg(fd, message, flags | libc::MSG_NOSIGNAL)
        })
    })
}

/// recvmsg(2)
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    counted(|| {
        carried(fd, flags)?;
        if let Some(messages) = datagram::find(fd)? {
            return messages.receive_message(message, flags);
        }
        // SAFETY: the kernel checks the memory.
        with_conn_error(fd, unsafe { libc::recvmsg(fd, message, flags) })
    })
}

/// read(2)
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_read(fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    counted(|| {
        if let Some(messages) = datagram::find(fd)? {
            return messages.receive_from(buffer, len, 0, ptr::null_mut(), ptr::null_mut());
        }
        // SAFETY: the kernel checks the memory.
        with_conn_error(fd, unsafe { libc::read(fd, buffer, len) })
    })
}

/// write(2), without SIGPIPE for sockets.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_write(fd: c_int, buffer: *const c_void, len: size_t) -> ssize_t {
    counted(|| {
        if let Some(messages) = datagram::find(fd)? {
            return messages.send_to(buffer, len, 0, ptr::null(), 0);
        }
        // SAFETY: the kernel checks the memory.
        let sent = with_conn_error(fd, unsafe {
            libc::send(fd, buffer, len, libc::MSG_NOSIGNAL)
        });
        match sent {
            Err(Errno(libc::ENOTSOCK)) => {
                // SAFETY: the same as above.
                with_conn_error(fd, unsafe { libc::write(fd, buffer, len) })
            }
            sent => sent,
        }
    })
}

/// readv(2)
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_readv(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
    counted(|| {
        if let Some(messages) = datagram::find(fd)? {
            let mut message = message_of(pieces, count)?;
            return messages.receive_message(&mut message, 0);
        }
        // SAFETY: the kernel checks the memory.
        with_conn_error(fd, unsafe { libc::readv(fd, pieces, count) })
    })
}

/// writev(2), without SIGPIPE for sockets.
///
/// # Safety
/// The same as that of the kernel's call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn d2tp_writev(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
    counted(|| {
        let message = message_of(pieces, count)?;
        if let Some(messages) = datagram::find(fd)? {
            return messages.send_message(&message, 0);
        }
        // SAFETY: the kernel checks the memory.
        let sent = with_conn_error(fd, unsafe {
            libc::sendmsg(fd, &message, libc::MSG_NOSIGNAL)
        });
        match sent {
            Err(Errno(libc::ENOTSOCK)) => {
                // SAFETY: the same as above.
                with_conn_error(fd, unsafe { libc::writev(fd, pieces, count) })
            }
            sent => sent,
        }
    })
}

fn message_of(pieces: *const iovec, count: c_int) -> CallResult<msghdr> {
    // SAFETY: msghdr consists of plain numbers and pointers.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.cast_mut();
    // A negative count is EINVAL for writev, and too much for sendmsg.
    message.msg_iovlen = usize::try_from(count).map_err(|_| Errno(libc::EINVAL))? as _;
    Ok(message)
}

/// Waits until the peer has received everything written so far: at most `timeout_ms` milliseconds,
/// or without limit if that is negative. EAGAIN: not yet.
#[unsafe(no_mangle)]
pub extern "C" fn d2tp_flush(fd: c_int, timeout_ms: c_int) -> c_int {
    answer(|| {
        let (_, socket) = table::find(fd)?.ok_or(Errno(libc::EOPNOTSUPP))?;
        if !socket.is_ours() || socket.datagrams.is_some() {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let conn_status = socket.status.ok_or(Errno(libc::ENOTCONN))?;
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        flush(fd, &conn_status, timeout)?;
        Ok(0)
    })
}

/// Waits until the peer has received everything, or the time is over.
pub(super) fn flush(
    fd: RawFd,
    conn_status: &Arc<ConnectionStatus>,
    timeout: Option<Duration>,
) -> CallResult<()> {
    let bytes = written(fd)?;
    let serial = conn_status.serial;
    let flushed = engine::get()?.request(move |home, reply| {
        let held = home.flows.borrow().get(&serial).cloned();
        let handed = home.agent_connections.borrow().get(&serial).cloned();
        if held.is_none() && handed.is_none() {
            let _ = reply.send(None);
            return;
        }
        let flushed = async move {
            match (held, handed) {
                (Some(held), _) => Some(held.flush(bytes).await),
                // A connection that is gone does not answer; its status has the reason.
                (None, handed) => Some(match handed?.flush(bytes).await?.fault {
                    Some(fault) => Err(fault),
                    None => Ok(()),
                }),
            }
        };
        tokio::task::spawn_local(async move {
            let flushed = match timeout {
                Some(timeout) => tokio::time::timeout(timeout, flushed).await,
                None => Ok(flushed.await),
            };
            let late = |_| Some(Err(crate::errno::SocketFault::new(libc::EAGAIN, "not yet")));
            let _ = reply.send(flushed.unwrap_or_else(late));
        });
    })?;
    match flushed {
        Some(flushed) => flushed.map_err(|fault| Errno(fault.errno)),
        // The connection is over: without an error, unless one is known.
        None => match (conn_status.fault.get(), bytes) {
            (Some(fault), _) => Err(Errno(fault.errno)),
            (None, 0) => Ok(()),
            (None, _) if conn_status.over.load(std::sync::atomic::Ordering::Relaxed) => Ok(()),
            (None, _) => Err(Errno(libc::ENOTCONN)),
        },
    }
}

/// The number of bytes that the program has written to its socket: sent by the kernel, without
/// retransmissions, and still in its buffer.
fn written(fd: RawFd) -> CallResult<u64> {
    // linux/tcp.h; libc's own tcp_info ends before these.
    const NOTSENT: usize = 144;
    const SENT: usize = 200;
    const SENT_AGAIN: usize = 208;
    let mut info = [0u8; 256];
    let mut len = info.len() as socklen_t;
    // SAFETY: the buffer has the length that is passed.
    check(unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut len,
        )
    })?;
    if (len as usize) < SENT_AGAIN + 8 {
        return Err(Errno(libc::ENOSYS));
    }
    let long = |at: usize| u64::from_ne_bytes(info[at..at + 8].try_into().expect("eight"));
    let word = |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().expect("four"));
    Ok(long(SENT) - long(SENT_AGAIN) + u64::from(word(NOTSENT)))
}
