//! Kernel MPTCP (RFC 8684): one connection over several addresses, and what each subflow carried.
//!
//! ```text
//!                  ┌ subflow: wlan0's address ── bytes_received
//!  TcpStream ──────┤
//!                  └ subflow: wwan0's address ── bytes_received
//! ```
//!
//! An MPTCP listener accepts plain TCP as well. The kernel's path manager (`ip mptcp endpoint`)
//! decides which addresses a connection uses, not the socket.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;

use socket2::{Domain, Protocol, Socket, Type};

#[cfg(target_os = "linux")]
const MULTIPATH: Protocol = Protocol::MPTCP;
/// Other systems have another interface to MPTCP, or none.
#[cfg(not(target_os = "linux"))]
const MULTIPATH: Protocol = Protocol::TCP;

/// The most connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// One TCP connection of an MPTCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subflow {
    /// The address of this end.
    pub local: SocketAddr,
    /// The address of the other end.
    pub remote: SocketAddr,
    /// Payload bytes received, including bytes that another subflow carried as well.
    pub bytes_received: u64,
}

/// Listens for MPTCP and TCP; for TCP alone if the kernel has no MPTCP.
///
/// # Errors
/// The address cannot be bound.
pub fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let domain = Domain::for_address(at);
    let socket = match Socket::new(domain, Type::STREAM, Some(MULTIPATH)) {
        Ok(socket) => socket,
        Err(_) => Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?,
    };
    // A server that starts again may find old connections in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Connects by MPTCP. [`subflows`] shows whether the other end supports it.
///
/// # Errors
/// This kernel has no MPTCP, or the other end did not accept.
pub fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let domain = Domain::for_address(to);
    let socket = Socket::new(domain, Type::STREAM, Some(MULTIPATH))?;
    socket.connect(&to.into())?;
    Ok(socket.into())
}

/// Resets a connection of either kind, so that a truncated transfer never looks complete at the
/// other end. `SO_LINGER` does that only for TCP: an MPTCP connection would end normally.
///
/// # Errors
/// The socket is not connection-oriented.
#[cfg(target_os = "linux")]
pub fn reset(socket: BorrowedFd<'_>) -> io::Result<()> {
    crate::sockopt::disconnect(socket)
}

/// Resets a connection, so that a truncated transfer never looks complete at the other end.
///
/// # Errors
/// The socket is not connection-oriented.
#[cfg(not(target_os = "linux"))]
pub fn reset(socket: BorrowedFd<'_>) -> io::Result<()> {
    socket2::SockRef::from(&socket).set_linger(Some(std::time::Duration::ZERO))
}

/// The subflows that a connection has now; `None` if it is plain TCP.
///
/// # Errors
/// The socket is not connected, or its subflows change faster than they can be listed.
#[cfg(target_os = "linux")]
pub fn subflows(socket: BorrowedFd<'_>) -> io::Result<Option<Vec<Subflow>>> {
    crate::sockopt::subflows(socket)
}

/// The subflows of a connection: always `None` on this system, where every socket is plain TCP.
///
/// # Errors
/// There are none.
#[cfg(not(target_os = "linux"))]
pub fn subflows(_socket: BorrowedFd<'_>) -> io::Result<Option<Vec<Subflow>>> {
    Ok(None)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn a_listener_takes_mptcp_and_tcp_and_tells_them_apart() {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let at = listener.local_addr().unwrap();

        let mut plain = TcpStream::connect(at).unwrap();
        listener.accept().unwrap().0.write_all(b"plain").unwrap();
        plain.read_exact(&mut [0; 5]).unwrap();
        assert_eq!(subflows(plain.as_fd()).unwrap(), None);

        let mut several = match connect(at) {
            Ok(stream) => stream,
            Err(error) => {
                eprintln!("not tried, this kernel has no MPTCP: {error}");
                return;
            }
        };
        let (mut theirs, from) = listener.accept().unwrap();
        theirs.write_all(&[7; 100_000]).unwrap();
        several.read_exact(&mut vec![0; 100_000]).unwrap();
        let one = Subflow {
            local: from,
            remote: at,
            bytes_received: 100_000,
        };
        assert_eq!(subflows(several.as_fd()).unwrap(), Some(vec![one]));
    }

    #[test]
    fn a_reset_is_no_end_over_tcp_nor_over_mptcp() {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let at = listener.local_addr().unwrap();
        let connections = [TcpStream::connect(at), connect(at)];
        for (n, connected) in connections.into_iter().enumerate() {
            let Ok(mut stream) = connected else {
                assert_eq!(n, 1, "TCP is always there");
                continue;
            };
            let (mut theirs, _) = listener.accept().unwrap();
            theirs.write_all(b"half").unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
            reset(theirs.as_fd()).unwrap();
            drop(theirs);
            let read = stream.read(&mut [0; 1]);
            assert!(read.is_err(), "connection {n}: {read:?}");
        }
    }
}
