//! Error numbers for C programs, with a table for each kind of the driver's errors.

use std::fmt;
use std::io;

use d2tp_driver::{FlowEnd, ReasonCode, SessionEnd};
use libc::c_int;

/// An error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

/// The result of a call.
pub(crate) type CallResult<T> = Result<T, Errno>;

impl Errno {
    /// The error of this thread's last system call.
    pub(crate) fn last() -> Errno {
        // SAFETY: the location belongs to this thread.
        Errno(unsafe { *libc::__errno_location() })
    }

    /// Sets `errno` for the caller.
    pub(crate) fn set(self) {
        // SAFETY: the same as above.
        unsafe { *libc::__errno_location() = self.0 }
    }
}

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Errno {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Turns the return value of a system call into a result.
pub(crate) fn check(result: c_int) -> CallResult<c_int> {
    if result < 0 {
        return Err(Errno::last());
    }
    Ok(result)
}

/// Why a socket broke: what its reader gets as `errno`, and the cause in words (`D2TP_SO_ERROR`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SocketFault {
    pub(crate) errno: c_int,
    pub(crate) text: String,
}

impl SocketFault {
    pub(crate) fn new(errno: c_int, text: impl fmt::Display) -> SocketFault {
        SocketFault {
            errno,
            text: text.to_string(),
        }
    }

    /// The fault of a flow that ended before both of its directions.
    pub(crate) fn of_flow(end: FlowEnd) -> SocketFault {
        let errno = match end {
            FlowEnd::DeadlinePassed => libc::ETIME,
            FlowEnd::Refused(ReasonCode::LimitReached) => libc::ENOBUFS,
            _ => libc::ECONNRESET,
        };
        SocketFault::new(errno, end)
    }

    /// The fault of a session that is over.
    pub(crate) fn of_session(end: &SessionEnd) -> SocketFault {
        let text = match end {
            SessionEnd::Refused(ReasonCode::NotAllowed) => {
                "the server does not allow this device. Its operator can add its key \
                 (D2TP_SO_HOSTKEY, `cedos key show`) with --allow-client"
                    .to_owned()
            }
            end => end.to_string(),
        };
        SocketFault::new(libc::ECONNRESET, text)
    }

    /// The fault as a connection attempt reports it: a reset becomes a refusal.
    pub(crate) fn while_connecting(self) -> SocketFault {
        match self.errno {
            libc::ECONNRESET => SocketFault {
                errno: libc::ECONNREFUSED,
                ..self
            },
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_takes_no_more_is_no_reset_and_says_what_counts() {
        let full =
            SocketFault::of_flow(FlowEnd::Refused(ReasonCode::LimitReached)).while_connecting();
        assert_eq!(full.errno, libc::ENOBUFS);
        assert!(full.text.contains("as many connections"), "{}", full.text);
        let gone =
            SocketFault::of_flow(FlowEnd::Refused(ReasonCode::UnknownFlow)).while_connecting();
        assert_eq!(gone.errno, libc::ECONNREFUSED);
    }
}
