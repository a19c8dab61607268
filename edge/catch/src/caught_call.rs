//! Caught system calls and their answers.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::notify::SeccompSupervisor;
use crate::{notify, preload};

/// A program's system call that waits for an answer.
#[derive(Debug)]
pub enum CaughtCall {
    /// The program wants to connect this socket.
    Connect {
        /// The program's own socket: operations on it take effect in the program.
        socket: OwnedFd,
        /// The destination.
        to: SocketAddr,
        /// The handle to answer the call.
        answer: CallAnswer,
    },
    /// The program wants to create a datagram socket.
    Open {
        /// The address family.
        domain: socket2::Domain,
        /// Whether calls on the socket do not block.
        nonblocking: bool,
        /// The handle to answer the call.
        answer: CallAnswer,
    },
    /// The program wants to send a datagram on a socket that is not connected.
    Send {
        /// The program's own socket.
        socket: OwnedFd,
        /// The destination.
        to: SocketAddr,
        /// The handle to answer the call.
        answer: CallAnswer,
    },
    /// The program listens with this socket, or is about to.
    Listen {
        /// The program's own socket.
        socket: OwnedFd,
        /// The handle to answer the call.
        answer: CallAnswer,
    },
    /// The process executes a program whose calls the kernel holds.
    Supervised {
        /// The supervisor of its calls.
        supervisor: SeccompSupervisor,
        /// The handle to answer the call.
        answer: CallAnswer,
    },
    /// The process executes a program whose calls are not caught.
    Unsupervised {
        /// The path in the call.
        program: String,
        /// The reason.
        because: UncaughtReason,
        /// The handle to answer the call.
        answer: CallAnswer,
    },
}

/// Why a program that another one started is not caught.
#[derive(Debug)]
pub enum UncaughtReason {
    /// Its calls cannot be held, because of this error.
    System(io::Error),
    /// Its calls are held, but `cedos run` does not receive them, so they fail.
    Unheard(io::Error),
    /// With a filter, the program would lose the privileges that its file gives it.
    Privileged,
    /// The program is of another architecture.
    Foreign,
}

/// The answer to a caught call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallVerdict {
    /// The kernel carries the call out.
    Continue,
    /// The call was carried out.
    Done,
    /// The call failed with this errno.
    Failed(i32),
}

impl CallVerdict {
    /// The result of a call that failed with this error.
    pub fn of(error: &io::Error) -> CallVerdict {
        CallVerdict::Failed(error.raw_os_error().unwrap_or(libc::ENETUNREACH))
    }
}

#[derive(Debug)]
enum AnswerChannel {
    Notified(Arc<OwnedFd>, u64, ProgramFd),
    Asked(OwnedFd),
}

/// The program's descriptor that a held call refers to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ProgramFd {
    /// The descriptor's number; `None` if the call creates one.
    pub(crate) number: Option<u32>,
    /// Whether the descriptor is closed when the process executes another program.
    pub(crate) close_on_exec: bool,
}

/// A handle to answer a call. If it is dropped, the call fails with ENETUNREACH.
#[derive(Debug)]
pub struct CallAnswer(Option<AnswerChannel>);

impl CallAnswer {
    pub(crate) fn to_notice(listener: Arc<OwnedFd>, id: u64, fd: ProgramFd) -> CallAnswer {
        CallAnswer(Some(AnswerChannel::Notified(listener, id, fd)))
    }

    pub(crate) fn to_question(question: OwnedFd) -> CallAnswer {
        CallAnswer(Some(AnswerChannel::Asked(question)))
    }

    /// Sends the answer. The program may have ended before.
    pub fn give(mut self, verdict: CallVerdict) {
        self.say(verdict);
    }

    /// Replaces the program's own socket by `socket`, on which the call is then carried out. If the
    /// call creates a socket, it returns this one.
    pub fn give_socket(mut self, socket: &OwnedFd) {
        match self.0.take() {
            Some(AnswerChannel::Notified(listener, id, fd)) => {
                notify::answer_with_socket(&listener, id, fd, socket);
            }
            Some(AnswerChannel::Asked(question)) => preload::answer_with_socket(&question, socket),
            None => {}
        }
    }

    fn say(&mut self, verdict: CallVerdict) {
        match self.0.take() {
            Some(AnswerChannel::Notified(listener, id, _)) => {
                notify::answer(&listener, id, verdict);
            }
            Some(AnswerChannel::Asked(question)) => preload::answer(&question, verdict, b""),
            None => {}
        }
    }
}

impl Drop for CallAnswer {
    fn drop(&mut self) {
        self.say(CallVerdict::Failed(libc::ENETUNREACH));
    }
}

/// Whether an address is on this machine.
pub fn is_local(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_loopback() || ip == Ipv4Addr::UNSPECIFIED,
        IpAddr::V6(ip) => ip.is_loopback() || ip == Ipv6Addr::UNSPECIFIED,
    }
}

/// Unix sockets of resolvers on this machine, which would query servers for names: nscd of the C
/// library, by both of its paths, and systemd-resolved. preload.c has the same list.
const RESOLVER_SOCKETS: [&[u8]; 3] = [
    b"/var/run/nscd/socket",
    b"/run/nscd/socket",
    b"/run/systemd/resolve/io.systemd.Resolve",
];

/// Whether an address in the kernel's form is that of a resolver's Unix socket.
pub(crate) fn is_resolver_socket(bytes: &[u8]) -> bool {
    let Some((family, path)) = bytes.split_at_checked(2) else {
        return false;
    };
    let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
    family == (libc::AF_UNIX as u16).to_ne_bytes() && RESOLVER_SOCKETS.contains(&path)
}

/// An address in the kernel's form; `None` for other families.
pub(crate) fn address(bytes: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    match i32::from(family) {
        libc::AF_INET => {
            let ip: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            Some((ip, port).into())
        }
        libc::AF_INET6 => {
            let ip: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            Some((ip, port).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_resolvers_are_known_by_their_paths() {
        let unix = |path: &[u8]| [&(libc::AF_UNIX as u16).to_ne_bytes(), path].concat();
        assert!(is_resolver_socket(&unix(b"/var/run/nscd/socket")));
        assert!(is_resolver_socket(&unix(
            b"/run/nscd/socket\0and what was there"
        )));
        for other in [
            &b"/run/nscd/socket2"[..],
            b"\0/run/nscd/socket",
            b"",
            b"/run/user/bus",
        ] {
            assert!(!is_resolver_socket(&unix(other)), "{other:?}");
        }
        assert!(!is_resolver_socket(&[1]));
    }

    #[test]
    fn addresses_are_read_as_the_kernel_has_them() {
        let mut four = vec![0; 16];
        four[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        four[2..8].copy_from_slice(&[0x1f, 0x90, 192, 0, 2, 1]);
        assert_eq!(address(&four), Some("192.0.2.1:8080".parse().unwrap()));
        let mut six = vec![0; 28];
        six[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
        six[3] = 80;
        six[23] = 1;
        assert_eq!(address(&six), Some("[::1]:80".parse().unwrap()));
        for cut in [0, 1, 3, 7] {
            assert_eq!(address(&four[..cut]), None);
        }
        assert!(is_local("::ffff:127.0.0.1".parse().unwrap()));
        assert!(!is_local("192.0.2.1".parse().unwrap()));
    }
}
