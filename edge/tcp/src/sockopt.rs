//! Socket options of Linux: measurements, the window clamp, subflows, and resetting a connection.

use std::io;
use std::mem::offset_of;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use d2tp_session::Span;

use crate::TcpInfo;
use crate::multipath::Subflow;

/// The number of bytes of `struct tcp_info` that are read: up to tcpi_min_rtt (Linux 4.9,
/// linux/tcp.h). The struct of the libc crate ends before it.
const INFO_BYTES: usize = 152;
const STATE_AT: usize = 0;
const LAST_DATA_RECV_AT: usize = 52;
const RCV_RTT_AT: usize = 92;
const BYTES_RECEIVED_AT: usize = 128;
const MIN_RTT_AT: usize = 148;
/// TCP_ESTABLISHED, FIN_WAIT1 and FIN_WAIT2 (net/tcp_states.h): the peer may still send.
pub(crate) const STATES_OPEN: [u8; 3] = [1, 4, 5];
/// The value for no clamp: more than any window (RFC 7323 §2.3 allows up to a gigabyte).
pub(crate) const NO_CLAMP: u64 = 1 << 30;

/// Reads the kernel's measurements of a connection.
pub(crate) fn info(socket: BorrowedFd<'_>) -> io::Result<TcpInfo> {
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
    parse_info(&bytes[..length as usize])
        .ok_or_else(|| io::Error::other("this kernel tells too little of its connections"))
}

/// Reads `struct tcp_info`; none if the kernel tells too little.
pub(crate) fn parse_info(bytes: &[u8]) -> Option<TcpInfo> {
    let bytes = bytes.get(..INFO_BYTES)?;
    let micros = |at: usize| Span::from_micros(u64::from(word(bytes, at)));
    Some(TcpInfo {
        since_arrival: Span::from_millis(u64::from(word(bytes, LAST_DATA_RECV_AT))),
        rcv_rtt: micros(RCV_RTT_AT),
        // All ones mean that there is no measurement yet.
        min_rtt: (word(bytes, MIN_RTT_AT) != u32::MAX).then(|| micros(MIN_RTT_AT)),
        bytes_received: long(bytes, BYTES_RECEIVED_AT),
        open: STATES_OPEN.contains(&bytes[STATE_AT]),
    })
}

/// Connects to an address of the family AF_UNSPEC, which resets the connection.
pub(crate) fn disconnect(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: all zeros are an address, of the family AF_UNSPEC.
    let nobody: libc::sockaddr = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live address of the size that is passed.
    let failed = unsafe {
        libc::connect(
            socket.as_raw_fd(),
            &raw const nobody,
            size_of::<libc::sockaddr>() as libc::socklen_t,
        )
    };
    match failed {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Socket option level of Multipath TCP, from linux/socket.h and linux/mptcp.h (Linux 5.16).
const SOL_MPTCP: libc::c_int = 284;
const MPTCP_TCPINFO: libc::c_int = 2;
const MPTCP_SUBFLOW_ADDRS: libc::c_int = 3;
/// Size of struct mptcp_subflow_data, which precedes the kernel's answer: its own size, the number
/// of subflows, and the size of an element for the kernel and for this program.
const PREFIX_BYTES: usize = 16;
/// struct mptcp_subflow_addrs: both ends, as struct sockaddr_storage.
const ADDRESS_BYTES: usize = 128;
/// The most subflows that are read: more than the path manager creates (MPTCP_SUBFLOWS_MAX is 8,
/// and the first one).
const SUBFLOWS_MAX: usize = 16;
/// How often to repeat the request if a subflow came or went between two calls.
const TRIES: usize = 5;

/// The subflows of a connection; `None` if it is not MPTCP.
pub(crate) fn subflows(socket: BorrowedFd<'_>) -> io::Result<Option<Vec<Subflow>>> {
    for _ in 0..TRIES {
        let Some(before) = elements(socket, MPTCP_SUBFLOW_ADDRS, 2 * ADDRESS_BYTES)? else {
            return Ok(None);
        };
        let infos = elements(socket, MPTCP_TCPINFO, INFO_BYTES)?;
        let after = elements(socket, MPTCP_SUBFLOW_ADDRS, 2 * ADDRESS_BYTES)?;
        let Some(infos) = infos.filter(|_| after.as_ref() == Some(&before)) else {
            continue;
        };
        let subflow = |(ends, info): (&Vec<u8>, &Vec<u8>)| {
            Some(Subflow {
                local: address(&ends[..ADDRESS_BYTES])?,
                remote: address(&ends[ADDRESS_BYTES..])?,
                bytes_received: long(info, BYTES_RECEIVED_AT),
            })
        };
        return Ok(Some(
            before.iter().zip(&infos).filter_map(subflow).collect(),
        ));
    }
    Err(io::Error::other(
        "the subflows change while they are listed",
    ))
}

/// The value of a socket option with one element for each subflow; `None` if the connection is not
/// MPTCP.
fn elements(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    bytes: usize,
) -> io::Result<Option<Vec<Vec<u8>>>> {
    let mut answer = vec![0u8; PREFIX_BYTES + SUBFLOWS_MAX * bytes];
    answer[..4].copy_from_slice(&(PREFIX_BYTES as u32).to_ne_bytes());
    answer[12..16].copy_from_slice(&(bytes as u32).to_ne_bytes());
    let mut length = answer.len() as libc::socklen_t;
    // SAFETY: the pointers are to a live buffer and its length.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            SOL_MPTCP,
            option,
            answer.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if failed != 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP) => Ok(None),
            _ => Err(error),
        };
    }
    let count = (word(&answer, 4) as usize).min(SUBFLOWS_MAX);
    let all = answer[PREFIX_BYTES..].chunks_exact(bytes).take(count);
    Ok(Some(all.map(<[u8]>::to_vec).collect()))
}

/// The address in a `struct sockaddr_storage`; `None` if it is of neither family.
fn address(storage: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes([storage[0], storage[1]]);
    // The port is at the same place in both.
    let at = offset_of!(libc::sockaddr_in, sin_port);
    let port = u16::from_be_bytes([storage[at], storage[at + 1]]);
    match i32::from(family) {
        libc::AF_INET => {
            let at = offset_of!(libc::sockaddr_in, sin_addr);
            let octets: [u8; 4] = storage[at..at + 4].try_into().ok()?;
            Some((Ipv4Addr::from(octets), port).into())
        }
        libc::AF_INET6 => {
            let at = offset_of!(libc::sockaddr_in6, sin6_addr);
            let octets: [u8; 16] = storage[at..at + 16].try_into().ok()?;
            Some((Ipv6Addr::from(octets), port).into())
        }
        _ => None,
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
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

/// The bound of the window that is offered.
#[cfg(test)]
pub(crate) fn window_clamp(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let (mut clamp, mut length) = (0u32, size_of::<u32>() as libc::socklen_t);
    // SAFETY: the pointers are to a live integer and its length.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_WINDOW_CLAMP,
            (&raw mut clamp).cast(),
            &raw mut length,
        )
    };
    match failed {
        0 => Ok(clamp),
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
