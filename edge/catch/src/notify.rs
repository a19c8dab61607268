//! Calls that the kernel holds until this process has answered: seccomp user notification
//! (seccomp_unotify(2)).
//!
//! ```text
//!  program ── connect(fd, …) ──▶ filter ──▶ held ──▶ next(): the process, the socket, the address
//!          ◀───────────── errno, or done ◀────────── answer()
//! ```
//!
//! The address is copied from the program, and the socket is duplicated from it (pidfd_getfd(2)).
//! Operations then use that socket and that address, whatever the program overwrites meanwhile. For
//! a call that continues by itself (SECCOMP_USER_NOTIF_FLAG_CONTINUE), the kernel reads the
//! arguments again, so a program can bypass the check on purpose. That is only used for addresses
//! on this machine, and a program in its own namespace still cannot reach the network.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use tokio::io::unix::AsyncFd;

use crate::caught_call::{
    CallAnswer, CallVerdict, CaughtCall, ProgramFd, address, is_resolver_socket,
};
use crate::fd_passing;

// linux/filter.h, linux/bpf_common.h
const LOAD: u16 = 0x20;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GE: u16 = 0x35;
const JUMP_SET: u16 = 0x45;
const AND: u16 = 0x54;
const RETURN: u16 = 0x06;

/// linux/net.h: the bits of a socket's type that are not flags.
const SOCK_TYPE_MASK: u32 = 0xf;

// struct seccomp_data: nr, arch, instruction_pointer, args[6]
const NR: u32 = 0;
const ARCH: u32 = 4;
const fn arg_low(n: u32) -> u32 {
    16 + 8 * n + if cfg!(target_endian = "big") { 4 } else { 0 }
}
const fn arg_high(n: u32) -> u32 {
    16 + 8 * n + if cfg!(target_endian = "big") { 0 } else { 4 }
}

/// The architecture of this program, as seccomp reports it. // linux/audit.h
#[cfg(target_arch = "x86_64")]
const ARCH_OURS: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH_OURS: u32 = 0xc000_00b7;

/// Calls of the x32 ABI have this bit (asm/unistd.h); no number is as large elsewhere.
const X32: u32 = 0x4000_0000;

// linux/seccomp.h; the sizes of the structures are in the numbers.
const NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const NOTIF_SEND: libc::c_ulong = 0xc018_2101;
const NOTIF_ID_VALID: libc::c_ulong = 0x4008_2102;
const NOTIF_ADDFD: libc::c_ulong = 0x4018_2103;
/// linux/seccomp.h: in the place of a descriptor that the program has.
const ADDFD_FLAG_SETFD: u32 = 1;

/// The longest address that is read: struct sockaddr_un.
const ADDRESS_BYTES_MAX: u64 = 110;

fn op(code: u16, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// The seccomp filter, which is the only one: exec.c requests it.
pub(crate) fn filter() -> Vec<libc::sock_filter> {
    let errno = |errno: i32| libc::SECCOMP_RET_ERRNO | errno as u32;
    let nr = |nr: libc::c_long| nr as u32;
    vec![
        /* 0 */ op(LOAD, ARCH, 0, 0),
        // Calls of another architecture have other numbers and are not checked, so they fail.
        /* 1 */
        op(JUMP_EQUAL, ARCH_OURS, 0, 21),
        /* 2 */ op(LOAD, NR, 0, 0),
        /* 3 */ op(JUMP_GE, X32, 19, 0),
        /* 4 */ op(JUMP_EQUAL, nr(libc::SYS_connect), 16, 0),
        /* 5 */ op(JUMP_EQUAL, nr(libc::SYS_listen), 15, 0),
        // io_uring can connect without passing the filter; programs work without it.
        /* 6 */
        op(JUMP_EQUAL, nr(libc::SYS_io_uring_setup), 16, 0),
        /* 7 */ op(JUMP_EQUAL, nr(libc::SYS_socket), 7, 0),
        /* 8 */ op(JUMP_EQUAL, nr(libc::SYS_sendto), 0, 13),
        // Data in the SYN: another form of connect.
        /* 9 */
        op(LOAD, arg_low(3), 0, 0),
        /* 10 */ op(JUMP_SET, libc::MSG_FASTOPEN as u32, 13, 0),
        /* 11 */ op(LOAD, arg_low(4), 0, 0),
        /* 12 */ op(JUMP_EQUAL, 0, 0, 8),
        /* 13 */ op(LOAD, arg_high(4), 0, 0),
        /* 14 */ op(JUMP_EQUAL, 0, 7, 6),
        // Datagram sockets are caught when they are created, because datagrams are sent by more
        // calls than a filter can check.
        /* 15 */
        op(LOAD, arg_low(0), 0, 0),
        /* 16 */ op(JUMP_EQUAL, libc::AF_INET as u32, 1, 0),
        /* 17 */ op(JUMP_EQUAL, libc::AF_INET6 as u32, 0, 4),
        /* 18 */ op(LOAD, arg_low(1), 0, 0),
        /* 19 */ op(AND, SOCK_TYPE_MASK, 0, 0),
        /* 20 */ op(JUMP_EQUAL, libc::SOCK_DGRAM as u32, 0, 1),
        /* 21 */ op(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0),
        /* 22 */ op(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        /* 23 */ op(RETURN, errno(libc::ENOSYS), 0, 0),
        /* 24 */ op(RETURN, errno(libc::EOPNOTSUPP), 0, 0),
    ]
}

/// The filter as the kernel takes it, for exec.c.
pub(crate) fn filter_bytes() -> Vec<u8> {
    let bytes = |op: libc::sock_filter| {
        let mut bytes = op.code.to_ne_bytes().to_vec();
        bytes.extend([op.jt, op.jf]);
        bytes.extend(op.k.to_ne_bytes());
        bytes
    };
    filter().into_iter().flat_map(bytes).collect()
}

/// Installs the filter on this process and the programs it executes, which then cannot gain
/// privileges (no setuid). Held calls are received on the returned descriptor.
pub(crate) fn install() -> io::Result<OwnedFd> {
    let program = filter();
    let whole = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    nix::sys::prctl::set_no_new_privs()?;
    let listen = |flags: libc::c_ulong| {
        // SAFETY: the kernel copies the program before it returns.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                &raw const whole,
            )
        };
        match fd {
            // SAFETY: the kernel has just created it for this process.
            fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) }),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // Linux 5.19: signals wait until the call is answered, so that no call is carried out twice.
    listen(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | WAIT_KILLABLE)
        .or_else(|_| listen(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER))
}

/// A caught call waits in a state that only a fatal signal interrupts:
/// SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV. // linux/seccomp.h
const WAIT_KILLABLE: libc::c_ulong = 1 << 5;

/// Receives the calls that the kernel holds.
#[derive(Debug)]
pub struct SeccompSupervisor {
    listener: Arc<OwnedFd>,
    ready: AsyncFd<OwnedFd>,
}

impl SeccompSupervisor {
    pub(crate) fn new(listener: OwnedFd) -> io::Result<SeccompSupervisor> {
        let listener = Arc::new(listener);
        Ok(SeccompSupervisor {
            ready: fd_passing::watch(listener.try_clone()?)?,
            listener,
        })
    }

    /// A supervisor for a listener that a program passed. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The descriptor is not a filter's listener.
    pub(crate) fn of(passed: OwnedFd) -> io::Result<SeccompSupervisor> {
        let nobody = 0_u64;
        match is_valid(&passed, nobody) {
            // The kernel does not know this call id, so the descriptor is a listener.
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => SeccompSupervisor::new(passed),
        }
    }

    /// The next held call; `None` when no process has the filter any more.
    ///
    /// # Errors
    /// The system's error.
    pub async fn next(&self) -> io::Result<Option<CaughtCall>> {
        loop {
            let mut ready = self.ready.readable().await?;
            // Receives only if a call is pending, because it would block otherwise.
            let mut look = libc::pollfd {
                fd: self.listener.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one entry, which lives during the call.
            unsafe { libc::poll(&raw mut look, 1, 0) };
            if look.revents & libc::POLLIN == 0 {
                if look.revents & libc::POLLHUP != 0 {
                    return Ok(None);
                }
                ready.clear_ready();
                continue;
            }
            // SAFETY: the structure consists of plain numbers, which the kernel requires to be
            // zero.
            let mut notice: libc::seccomp_notif = unsafe { std::mem::zeroed() };
            // SAFETY: the buffer has the size that is encoded in the number.
            let took =
                unsafe { libc::ioctl(self.listener.as_raw_fd(), NOTIF_RECV as _, &raw mut notice) };
            if took < 0 {
                let error = io::Error::last_os_error();
                match error.raw_os_error() {
                    // The program was killed meanwhile.
                    Some(libc::ENOENT | libc::EINTR) => continue,
                    _ => return Err(error),
                }
            }
            let fd = program_fd(&notice);
            let answer = CallAnswer::to_notice(self.listener.clone(), notice.id, fd);
            match self.read(&notice) {
                Ok(HeldCall::Nothing) => answer.give(CallVerdict::Continue),
                // As where no such resolver runs: the C library then asks name servers itself.
                Ok(HeldCall::Resolver) => answer.give(CallVerdict::Failed(libc::ECONNREFUSED)),
                Ok(HeldCall::Open(domain)) => {
                    let flags = notice.data.args[1] as libc::c_int;
                    return Ok(Some(CaughtCall::Open {
                        domain,
                        nonblocking: flags & libc::SOCK_NONBLOCK != 0,
                        answer,
                    }));
                }
                Ok(HeldCall::Connect(socket, to)) => {
                    return Ok(Some(CaughtCall::Connect { socket, to, answer }));
                }
                Ok(HeldCall::Send(socket, to)) => {
                    return Ok(Some(CaughtCall::Send { socket, to, answer }));
                }
                Ok(HeldCall::Listen(socket)) => {
                    return Ok(Some(CaughtCall::Listen { socket, answer }));
                }
                Err(error) => {
                    tracing::warn!(pid = notice.pid, %error, "a call cannot be inspected and \
                        fails");
                    answer.give(CallVerdict::of(&error));
                }
            }
        }
    }

    fn read(&self, notice: &libc::seccomp_notif) -> io::Result<HeldCall> {
        let args = notice.data.args;
        let is = |nr: libc::c_long| libc::c_long::from(notice.data.nr) == nr;
        let found = if is(libc::SYS_connect) {
            let bytes = self.address_bytes(notice, args[1], args[2])?;
            match address(&bytes) {
                Some(to) => HeldCall::Connect(fetch(notice.pid, args[0])?, to),
                None if is_resolver_socket(&bytes) => HeldCall::Resolver,
                None => HeldCall::Nothing,
            }
        } else if is(libc::SYS_sendto) {
            match address(&self.address_bytes(notice, args[4], args[5])?) {
                Some(to) => HeldCall::Send(fetch(notice.pid, args[0])?, to),
                None => HeldCall::Nothing,
            }
        } else if is(libc::SYS_socket) {
            match args[2] as libc::c_int {
                0 | libc::IPPROTO_UDP => HeldCall::Open((args[0] as libc::c_int).into()),
                _ => HeldCall::Nothing,
            }
        } else {
            HeldCall::Listen(fetch(notice.pid, args[0])?)
        };
        // Another process may have the same id by now.
        is_valid(&self.listener, notice.id)?;
        Ok(found)
    }

    /// The address that a held call was given, in the kernel's form; empty if it cannot be read.
    fn address_bytes(
        &self,
        notice: &libc::seccomp_notif,
        at: u64,
        len: u64,
    ) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len.min(ADDRESS_BYTES_MAX) as usize];
        let memory = std::fs::File::open(format!("/proc/{}/mem", notice.pid))?;
        is_valid(&self.listener, notice.id)?;
        match memory.read_exact_at(&mut bytes, at) {
            Ok(()) => Ok(bytes),
            // The kernel will report the error.
            Err(_) => Ok(Vec::new()),
        }
    }
}

/// Whether a call is still held.
fn is_valid(listener: &OwnedFd, id: u64) -> io::Result<()> {
    // SAFETY: the buffer has the size that is encoded in the number.
    let valid = unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_ID_VALID as _, &raw const id) };
    match valid {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

enum HeldCall {
    Nothing,
    /// A connection to a resolver of this machine.
    Resolver,
    Open(socket2::Domain),
    Connect(OwnedFd, std::net::SocketAddr),
    Send(OwnedFd, std::net::SocketAddr),
    Listen(OwnedFd),
}

/// Duplicates the program's own descriptor.
fn fetch(thread: u32, fd: u64) -> io::Result<OwnedFd> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"))?;
    let group = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    let group: i32 = group
        .and_then(|text| text.trim().parse().ok())
        .ok_or(io::ErrorKind::NotFound)?;
    let made = |fd: libc::c_long| match fd {
        // SAFETY: the kernel has just created it for this process.
        fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) }),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: the arguments are plain numbers.
    let process = made(unsafe { libc::syscall(libc::SYS_pidfd_open, group, 0) })?;
    // SAFETY: the arguments are plain numbers.
    made(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd as i32, 0) })
}

/// The descriptor that a held call refers to, and whether execve closes it.
fn program_fd(notice: &libc::seccomp_notif) -> ProgramFd {
    let args = notice.data.args;
    if libc::c_long::from(notice.data.nr) == libc::SYS_socket {
        return ProgramFd {
            number: None,
            close_on_exec: args[1] as libc::c_int & libc::SOCK_CLOEXEC != 0,
        };
    }
    let number = args[0] as u32;
    // proc(5): the flags are octal, close-on-exec among them.
    let info = std::fs::read_to_string(format!("/proc/{}/fdinfo/{number}", notice.pid));
    let flags = info.ok().and_then(|info| {
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        libc::c_int::from_str_radix(flags.trim(), 8).ok()
    });
    ProgramFd {
        number: Some(number),
        close_on_exec: flags.is_none_or(|flags| flags & libc::O_CLOEXEC != 0),
    }
}

/// Puts a socket into the program: in place of the one that the held call refers to, on which the
/// kernel then carries out the call, or as the result of the call.
pub(crate) fn answer_with_socket(listener: &OwnedFd, id: u64, fd: ProgramFd, socket: &OwnedFd) {
    let added = libc::seccomp_notif_addfd {
        id,
        flags: fd.number.map_or(0, |_| ADDFD_FLAG_SETFD),
        srcfd: socket.as_raw_fd() as u32,
        newfd: fd.number.unwrap_or_default(),
        newfd_flags: match fd.close_on_exec {
            true => libc::O_CLOEXEC as u32,
            false => 0,
        },
    };
    // SAFETY: the buffer has the size that is encoded in the number. It fails if the program is
    // gone.
    let number = unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_ADDFD as _, &raw const added) };
    if number < 0 {
        let error = io::Error::last_os_error();
        return answer(listener, id, CallVerdict::of(&error));
    }
    match fd.number {
        Some(_) => answer(listener, id, CallVerdict::Continue),
        None => respond(listener, id, number.into(), 0, 0),
    }
}

/// Answers a call that is held.
pub(crate) fn answer(listener: &OwnedFd, id: u64, verdict: CallVerdict) {
    let (error, flags) = match verdict {
        CallVerdict::Continue => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        CallVerdict::Done => (0, 0),
        CallVerdict::Failed(errno) => (-errno, 0),
    };
    respond(listener, id, 0, error, flags);
}

fn respond(listener: &OwnedFd, id: u64, val: i64, error: i32, flags: u32) {
    let said = libc::seccomp_notif_resp {
        id,
        val,
        error,
        flags,
    };
    // SAFETY: the buffer has the size that is encoded in the number. It fails if the program is
    // gone.
    unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_SEND as _, &raw const said) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_jump_of_the_filter_ends_at_a_return() {
        let filter = filter();
        for (at, op) in filter.iter().enumerate() {
            if op.code & 0x07 == 0x05 {
                let last = at + 1 + usize::from(op.jt.max(op.jf));
                assert!(last < filter.len(), "{at}");
            }
        }
        assert_eq!(filter.last().map(|op| op.code), Some(RETURN));
        assert_eq!(
            size_of::<libc::seccomp_notif>() as u64,
            NOTIF_RECV >> 16 & 0x3fff
        );
        assert_eq!(
            size_of::<libc::seccomp_notif_resp>() as u64,
            NOTIF_SEND >> 16 & 0x3fff
        );
        assert_eq!(
            size_of::<libc::seccomp_notif_addfd>() as u64,
            NOTIF_ADDFD >> 16 & 0x3fff
        );
    }
}
