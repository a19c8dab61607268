//! Error numbers for C programs, with a table for each kind of the driver's errors.

use std::fmt;
use std::io;

use cedos_text::RemoteText;
use d2tp_driver::{FlowEnd, PublicKey, ReasonCode, ServerAddress, SessionEnd, refusal_text};
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

    /// The fault of what a session of `device` with `server` carried when it ended like this.
    pub(crate) fn of_session(
        end: &SessionEnd,
        server: &ServerAddress,
        device: &PublicKey,
    ) -> SocketFault {
        let text = match end {
            // A program may print the text, so the peer's must not control a terminal.
            SessionEnd::Peer { code, text } => {
                let (code, text) = (*code, RemoteText::new(text).into());
                SessionEnd::Peer { code, text }.to_string()
            }
            end => refusal_text(end, &format!("the server {}", server.host), device)
                .unwrap_or_else(|| end.to_string()),
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

    fn of_session(end: SessionEnd) -> SocketFault {
        let key = PublicKey([7; 32]);
        SocketFault::of_session(&end, &ServerAddress::new("p.example", 4433, key), &key)
    }

    #[test]
    fn the_text_of_a_peer_that_closes_is_one_short_line_without_controls() {
        let text = format!("bye\r\n\x1b]0;title\x07\u{202e} {}", "x".repeat(1000));
        let fault = of_session(SessionEnd::Peer { code: 3, text });
        let shown = "the peer closed the session (code 0x3): bye \\u001b]0;title\\u0007\\u202e x";
        assert!(fault.text.starts_with(shown), "{}", fault.text);
        assert!(!fault.text.contains(cedos_text::is_control));
        assert!(fault.text.ends_with("x…"), "{}", fault.text);
    }

    #[test]
    fn a_device_that_is_not_let_in_is_told_how_its_operator_lets_it_in() {
        let refused = of_session(SessionEnd::Refused(ReasonCode::NotAllowed)).while_connecting();
        assert_eq!(refused.errno, libc::ECONNREFUSED);
        let text = &refused.text;
        assert!(
            text.starts_with("the server p.example does not let this device in;"),
            "{text}"
        );
        assert!(text.contains("`cedos prox invite`"), "{text}");
        let key = PublicKey([7; 32]);
        assert!(text.ends_with(&format!("--allow-client {key}")), "{text}");
    }

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
