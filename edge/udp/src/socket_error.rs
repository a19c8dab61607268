//! Classification of errors of UDP sockets.

use std::io;

use crate::bind::BindError;

/// Whether the error says that the link is gone: its network, its device or the local address no
/// longer exists. The socket does not recover by itself in general; close it, and bind a new one
/// when the link monitor reports an address again.
pub fn is_link_gone(error: &io::Error) -> bool {
    match errno_within(error) {
        Some(errno) => matches!(
            errno,
            libc::ENETUNREACH | libc::ENETDOWN | libc::ENODEV | libc::ENXIO | libc::EADDRNOTAVAIL
        ),
        None => false,
    }
}

/// Whether the datagram (or one segment of it) is larger than the link's MTU, or than UDP supports.
/// The link is not at fault; send smaller datagrams.
pub fn is_too_big(error: &io::Error) -> bool {
    errno_within(error) == Some(libc::EMSGSIZE)
}

/// Whether the error concerns the socket or its permissions, not a single datagram or a temporary
/// shortage. Several in a row mean that the socket is no longer of use (a firewall or a sandbox
/// blocks it, its descriptor was closed, its address became invalid).
pub fn is_socket_unfit(error: &io::Error) -> bool {
    matches!(
        errno_within(error),
        Some(
            libc::EPERM
                | libc::EACCES
                | libc::EBADF
                | libc::ENOTSOCK
                | libc::EINVAL
                | libc::EAFNOSUPPORT
                | libc::ENOTCONN
                | libc::EDESTADDRREQ
                | libc::EPIPE
        )
    )
}

/// The system's error number, also if it is inside a [`BindError`].
fn errno_within(error: &io::Error) -> Option<i32> {
    error.raw_os_error().or_else(|| {
        let inner = error.get_ref()?.downcast_ref::<BindError>()?;
        inner.cause.raw_os_error()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_a_vanished_link_are_told_from_others() {
        for errno in [
            libc::ENETUNREACH,
            libc::ENETDOWN,
            libc::ENODEV,
            libc::EADDRNOTAVAIL,
        ] {
            assert!(
                is_link_gone(&io::Error::from_raw_os_error(errno)),
                "errno {errno}"
            );
        }
        for errno in [
            libc::EAGAIN,
            libc::EMSGSIZE,
            libc::EPERM,
            libc::ECONNREFUSED,
        ] {
            assert!(
                !is_link_gone(&io::Error::from_raw_os_error(errno)),
                "errno {errno}"
            );
        }
        for errno in [libc::EPERM, libc::EBADF, libc::EINVAL] {
            assert!(is_socket_unfit(&io::Error::from_raw_os_error(errno)));
        }
        for errno in [
            libc::EAGAIN,
            libc::ENOBUFS,
            libc::EMSGSIZE,
            libc::ECONNREFUSED,
        ] {
            assert!(
                !is_socket_unfit(&io::Error::from_raw_os_error(errno)),
                "errno {errno}"
            );
        }
        assert!(is_too_big(&io::Error::from_raw_os_error(libc::EMSGSIZE)));
        assert!(!is_too_big(&io::Error::other(
            "EMSGSIZE in words is not an errno"
        )));
    }
}
