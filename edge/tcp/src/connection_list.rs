//! The TCP connections of this network namespace, with the kernel's measurements of each (sock_diag(7)).

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use socket2::{Domain, Protocol, Socket, Type};

use crate::TcpInfo;
use crate::sockopt::{STATES_OPEN, parse_info};

/// The request for sockets of an address family (linux/sock_diag.h).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Bytes of a netlink message header (linux/netlink.h).
const HEAD_BYTES: usize = 16;
/// Bytes of `struct inet_diag_req_v2` (linux/inet_diag.h).
const REQUEST_BYTES: usize = 56;
/// Bytes of `struct inet_diag_msg`, after which attributes follow.
const ANSWER_BYTES: usize = 72;
/// Offsets of the addresses in it, after four bytes and two ports.
const LOCAL_AT: usize = 8;
const REMOTE_AT: usize = 24;
const COOKIE_AT: usize = 44;
const OWNER_AT: usize = 64;
const INODE_AT: usize = 68;
/// The attribute with `struct tcp_info`.
const INET_DIAG_INFO: u16 = 2;
/// The size of a read: the kernel fills at most this much at once.
const READ_BYTES: usize = 32 * 1024;

/// A TCP connection on which the peer may still send.
#[derive(Clone, Debug)]
pub(crate) struct ListedConnection {
    /// The number of the socket, as in `/proc/PID/fd`.
    pub(crate) inode: u32,
    /// What tells the socket from all others of the machine, before and after it (socket(7), SO_COOKIE).
    pub(crate) cookie: u64,
    /// The user who made it.
    pub(crate) owner: u32,
    /// The address of this end, which is that of a link.
    pub(crate) local: IpAddr,
    /// The other end.
    pub(crate) remote: IpAddr,
    /// The kernel's measurements.
    pub(crate) info: TcpInfo,
}

impl ListedConnection {
    /// Whether both ends are on this machine.
    pub(crate) fn is_local(&self) -> bool {
        self.remote.is_loopback() || self.local == self.remote
    }
}

/// Lists the connections that are open.
///
/// # Errors
/// The kernel does not list them.
pub(crate) fn open_connections() -> io::Result<Vec<ListedConnection>> {
    let protocol = Some(Protocol::from(libc::NETLINK_SOCK_DIAG));
    let mut kernel = Socket::new(Domain::from(libc::AF_NETLINK), Type::DGRAM, protocol)?;
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        kernel.write_all(&request(family as u8))?;
        let mut bytes = vec![0; READ_BYTES];
        loop {
            let length = kernel.read(&mut bytes)?;
            if !take_in(&bytes[..length], &mut found)? {
                break;
            }
        }
    }
    Ok(found)
}

fn request(family: u8) -> Vec<u8> {
    let mut request = Vec::with_capacity(HEAD_BYTES + REQUEST_BYTES);
    request.extend(((HEAD_BYTES + REQUEST_BYTES) as u32).to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_DUMP;
    request.extend((flags as u16).to_ne_bytes());
    request.extend([0; 8]);
    let attributes = 1 << (INET_DIAG_INFO - 1);
    request.extend([family, libc::IPPROTO_TCP as u8, attributes, 0]);
    let states: u32 = STATES_OPEN.iter().map(|state| 1 << state).sum();
    request.extend(states.to_ne_bytes());
    request.resize(HEAD_BYTES + REQUEST_BYTES, 0);
    request
}

/// Reads messages of the kernel. Returns whether more follow.
fn take_in(mut bytes: &[u8], found: &mut Vec<ListedConnection>) -> io::Result<bool> {
    while bytes.len() >= HEAD_BYTES {
        let length = word(bytes, 0).unwrap_or(0) as usize;
        let Some(message) = bytes.get(HEAD_BYTES..length) else {
            return Err(io::Error::other("the kernel's list of connections is cut"));
        };
        match i32::from(u16::from_ne_bytes([bytes[4], bytes[5]])) {
            libc::NLMSG_DONE => return Ok(false),
            libc::NLMSG_ERROR => {
                let code = word(message, 0).map_or(0, |code| (code as i32).wrapping_neg());
                return match code {
                    0 => Ok(false),
                    code => Err(io::Error::from_raw_os_error(code)),
                };
            }
            _ => found.extend(connection(message)),
        }
        bytes = bytes.get(aligned(length)..).unwrap_or_default();
    }
    Ok(true)
}

/// Reads `struct inet_diag_msg` with its attributes; none if the kernel does not tell the measurements.
fn connection(message: &[u8]) -> Option<ListedConnection> {
    let address = |at: usize| {
        let bytes = message.get(at..at + 16)?;
        Some(match i32::from(*message.first()?) {
            libc::AF_INET => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[..4]).ok()?)),
            _ => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)).to_canonical(),
        })
    };
    let (local, remote) = (address(LOCAL_AT)?, address(REMOTE_AT)?);
    let mut attributes = message.get(ANSWER_BYTES..)?;
    let info = loop {
        let length = usize::from(half(attributes, 0)?);
        let kind = half(attributes, 2)?;
        let value = attributes.get(4..length)?;
        if kind == INET_DIAG_INFO {
            break parse_info(value)?;
        }
        attributes = attributes.get(aligned(length)..)?;
    };
    Some(ListedConnection {
        inode: word(message, INODE_AT)?,
        cookie: cookie(message)?,
        owner: word(message, OWNER_AT)?,
        local,
        remote,
        info,
    })
}

/// The length of a message or an attribute with its padding.
fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// The two halves of a cookie, the lower one first.
fn cookie(message: &[u8]) -> Option<u64> {
    let (low, high) = (word(message, COOKIE_AT)?, word(message, COOKIE_AT + 4)?);
    Some(u64::from(high) << 32 | u64::from(low))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    let half = bytes.get(at..at + 2)?;
    Some(u16::from_ne_bytes(half.try_into().ok()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at + 4)?;
    Some(u32::from_ne_bytes(word.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    fn inode_of(stream: &TcpStream) -> u32 {
        let path = format!("/proc/self/fd/{}", stream.as_raw_fd());
        let link = std::fs::read_link(path).unwrap();
        let link = link.to_str().unwrap();
        let number = link.strip_prefix("socket:[").unwrap();
        number.trim_end_matches(']').parse().unwrap()
    }

    #[test]
    fn a_connection_is_listed_with_what_arrived_and_one_that_is_closed_is_not() {
        let listed = |inode| {
            let all = open_connections().unwrap();
            all.into_iter().find(|one| one.inode == inode)
        };
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                continue; // no IPv6 here
            };
            let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut theirs, _) = listener.accept().unwrap();
            theirs.write_all(&[7; 50_000]).unwrap();
            ours.read_exact(&mut vec![0; 50_000]).unwrap();
            let inode = inode_of(&ours);
            let found = listed(inode).unwrap();
            assert_eq!(found.info.bytes_received, 50_000);
            assert!(found.remote.is_loopback() && found.local == found.remote);
            assert!(found.info.min_rtt.is_some());
            drop(theirs);
            assert_eq!(ours.read(&mut [0; 1]).unwrap(), 0);
            assert!(listed(inode).is_none(), "nothing more will arrive");
        }
    }

    #[test]
    fn what_is_cut_is_no_connection() {
        let mut found = Vec::new();
        for bad in [
            &[0; 20][..],
            &[255; 40],
            &[200, 0, 0, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ] {
            assert!(
                take_in(bad, &mut found).is_err() || found.is_empty(),
                "{bad:?}"
            );
        }
        assert!(connection(&[2; 100]).is_none());
    }
}
