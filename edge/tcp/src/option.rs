//! The two socket options of Linux: what it measured, and the bound it takes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use d2tp_session::Span;

use crate::Info;

/// As much of struct tcp_info as is read: up to tcpi_min_rtt (Linux 4.9, linux/tcp.h). The struct of
/// the libc crate ends before.
const INFO_BYTES: usize = 152;
const STATE_AT: usize = 0;
const RCV_RTT_AT: usize = 92;
const BYTES_RECEIVED_AT: usize = 128;
const MIN_RTT_AT: usize = 148;
/// TCP_ESTABLISHED, FIN_WAIT1 and FIN_WAIT2 (net/tcp_states.h): the peer may still send.
const STATES_OPEN: [u8; 3] = [1, 4, 5];
/// No clamp: more than any window (RFC 7323 §2.3 ends at a gigabyte).
const NO_CLAMP: u64 = 1 << 30;

/// Asks the kernel.
pub(crate) fn info(socket: BorrowedFd<'_>) -> io::Result<Info> {
    let mut bytes = [0u8; INFO_BYTES];
    let mut length = INFO_BYTES as libc::socklen_t;
    // SAFETY: the pointers are to a live buffer and its length.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            bytes.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    if (length as usize) < INFO_BYTES {
        return Err(io::Error::other(
            "this kernel tells too little of its connections",
        ));
    }
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let long = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let micros = |at: usize| Span::from_micros(u64::from(word(at)));
    Ok(Info {
        rcv_rtt: micros(RCV_RTT_AT),
        // All ones: none yet.
        min_rtt: (word(MIN_RTT_AT) != u32::MAX).then(|| micros(MIN_RTT_AT)),
        bytes_received: long(BYTES_RECEIVED_AT),
        open: STATES_OPEN.contains(&bytes[STATE_AT]),
    })
}

/// Bounds the window that is offered.
pub(crate) fn set_window_clamp(socket: BorrowedFd<'_>, limit: Option<u64>) -> io::Result<()> {
    let bytes = limit.unwrap_or(NO_CLAMP).min(NO_CLAMP) as libc::c_int;
    // SAFETY: the pointer is to a live integer of the size given.
    let failed = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_WINDOW_CLAMP,
            (&raw const bytes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    match failed {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_kernel_says_what_arrived_and_takes_a_clamp() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        let before = info(ours.as_fd()).unwrap();
        assert_eq!(before.bytes_received, 0);
        assert!(before.open && before.min_rtt.is_some(), "{before:?}");
        theirs.write_all(&[7; 100_000]).unwrap();
        ours.read_exact(&mut vec![0; 100_000]).unwrap();
        assert_eq!(info(ours.as_fd()).unwrap().bytes_received, 100_000);

        set_window_clamp(ours.as_fd(), Some(20_000)).unwrap();
        set_window_clamp(ours.as_fd(), None).unwrap();
        drop(theirs);
        assert_eq!(ours.read(&mut [0; 1]).unwrap(), 0);
        assert!(!info(ours.as_fd()).unwrap().open);
    }

    #[test]
    fn what_is_not_tcp_is_refused() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(info(socket.as_fd()).is_err());
    }
}
