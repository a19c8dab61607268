//! Finds the user who owns the peer of a local connection.
//!
//! The kernel knows the user of each TCP socket. It is asked about a single one (sock_diag(7)), so that the answer takes
//! no longer when other users have many sockets; where that is not possible, its list of all of them is read (proc(5),
//! `/proc/net/tcp`). A socket that waits for the end of its time has no user, and neither has one in another network
//! namespace: then it cannot be told.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};
use tokio::net::TcpStream;

/// Who opened a connection, as far as this host can tell: the unit by which places are shared out fairly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConnectionOwner {
    /// A user of this machine.
    User(u32),
    /// Another host, or a program whose user is not known: an address, of IPv6 the /64 network, which one host has to
    /// itself.
    Host(IpAddr),
}

impl ConnectionOwner {
    /// The owner of the other end of a connection that was accepted here.
    pub fn of(accepted: &TcpStream) -> ConnectionOwner {
        let (Ok(theirs), Ok(ours)) = (accepted.peer_addr(), accepted.local_addr()) else {
            // It is closed already.
            return ConnectionOwner::Host(Ipv4Addr::UNSPECIFIED.into());
        };
        match owner_of(theirs, ours) {
            Ok(Some(user)) => ConnectionOwner::User(user),
            Ok(None) | Err(_) => ConnectionOwner::of_host(theirs.ip()),
        }
    }

    fn of_host(address: IpAddr) -> ConnectionOwner {
        ConnectionOwner::Host(match address.to_canonical() {
            IpAddr::V4(address) => address.into(),
            IpAddr::V6(address) => {
                let network = u128::from(address) & (u128::MAX << 64);
                Ipv6Addr::from(network).into()
            }
        })
    }
}

/// Finds the user whose socket is bound to `theirs` and connected to `ours`; none if that cannot be told.
///
/// # Errors
/// The list cannot be read.
fn owner_of(theirs: SocketAddr, ours: SocketAddr) -> io::Result<Option<u32>> {
    match ask_kernel(theirs, ours) {
        Ok(owner) => Ok(owner),
        // A kernel without the diagnostics of TCP sockets, or a sandbox without netlink.
        Err(_) => find_in_tables(theirs, ours),
    }
}

/// Asks the kernel for the user of the socket that is bound to `theirs` and connected to `ours`.
fn ask_kernel(theirs: SocketAddr, ours: SocketAddr) -> nix::Result<Option<u32>> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkSockDiag,
    )?;
    send(
        socket.as_raw_fd(),
        &diagnostic_request(theirs, ours),
        MsgFlags::empty(),
    )?;
    let mut answer = [0; 1024];
    // The kernel has answered before the request's call returns.
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT)?;
    user_in_answer(&answer[..length])
}

/// A request for one TCP socket: `struct nlmsghdr`, then `struct inet_diag_req_v2` (linux/inet_diag.h).
fn diagnostic_request(theirs: SocketAddr, ours: SocketAddr) -> Vec<u8> {
    const LENGTH: u32 = 16 + 56;
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const NLM_F_REQUEST: u16 = 1;
    const IPPROTO_TCP: u8 = 6;
    let address = |address: SocketAddr| -> [u8; 16] {
        match address.ip().to_canonical() {
            IpAddr::V4(v4) => {
                let mut bytes = [0; 16];
                bytes[..4].copy_from_slice(&v4.octets());
                bytes
            }
            IpAddr::V6(v6) => v6.octets(),
        }
    };
    // A socket of IPv6 that calls an address of IPv4 is found under IPv4, too.
    let (family, scope) = match (theirs.ip().to_canonical(), theirs) {
        (IpAddr::V6(_), SocketAddr::V6(theirs)) => (nix::libc::AF_INET6, theirs.scope_id()),
        _ => (nix::libc::AF_INET, 0),
    };
    let mut request = Vec::with_capacity(LENGTH as usize);
    request.extend(LENGTH.to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    request.extend([0; 8]); // sequence number, port
    request.extend([family as u8, IPPROTO_TCP, 0, 0]);
    request.extend(u32::MAX.to_ne_bytes()); // in any state
    request.extend(theirs.port().to_be_bytes());
    request.extend(ours.port().to_be_bytes());
    request.extend(address(theirs));
    request.extend(address(ours));
    request.extend(scope.to_ne_bytes());
    request.extend([0xff; 8]); // no cookie
    request
}

/// The user in the kernel's answer: `struct nlmsghdr`, then `struct inet_diag_msg` or an error number.
fn user_in_answer(answer: &[u8]) -> nix::Result<Option<u32>> {
    const NLMSG_ERROR: u16 = 2;
    const HEADER: usize = 16;
    const USER: usize = HEADER + 64;
    const INODE: usize = HEADER + 68;
    let word = |at: usize| -> nix::Result<u32> {
        let bytes = answer.get(at..at + 4).ok_or(Errno::EBADMSG)?;
        Ok(u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
    };
    let kind = answer.get(4..6).ok_or(Errno::EBADMSG)?;
    if kind == NLMSG_ERROR.to_ne_bytes() {
        return match Errno::from_raw(word(HEADER)?.cast_signed().wrapping_neg()) {
            // There is no such socket here.
            Errno::ENOENT => Ok(None),
            error => Err(error),
        };
    }
    // Without an inode nobody holds it any more, and the user is not known.
    let (user, inode) = (word(USER)?, word(INODE)?);
    Ok((inode != 0).then_some(user))
}

/// Reads the kernel's list of all TCP sockets.
fn find_in_tables(theirs: SocketAddr, ours: SocketAddr) -> io::Result<Option<u32>> {
    // A socket of IPv6 may have called an address of IPv4.
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = match std::fs::read_to_string(table) {
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text?,
        };
        if let Some(owner) = find(&text, theirs, ours) {
            return Ok(Some(owner));
        }
    }
    Ok(None)
}

/// Whether a connection that was accepted here is one of this user's programs; warns if it is not.
pub fn is_this_users(accepted: &TcpStream) -> bool {
    let me = nix::unistd::getuid().as_raw();
    let (theirs, ours) = match (accepted.peer_addr(), accepted.local_addr()) {
        (Ok(theirs), Ok(ours)) => (theirs, ours),
        // It is closed already.
        _ => return false,
    };
    match owner_of(theirs, ours) {
        Ok(Some(owner)) if owner == me => return true,
        Ok(Some(owner)) => {
            tracing::warn!(from = %theirs, owner, "refused a connection of another user");
        }
        Ok(None) => {
            tracing::warn!(from = %theirs, "refused a connection whose user is not known");
        }
        Err(error) => {
            tracing::warn!(from = %theirs, %error, "refused a connection whose user is not known");
        }
    }
    false
}

fn find(table: &str, theirs: SocketAddr, ours: SocketAddr) -> Option<u32> {
    let same = |a: SocketAddr, b: SocketAddr| {
        a.port() == b.port() && a.ip().to_canonical() == b.ip().to_canonical()
    };
    table.lines().skip(1).find_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, local, remote, _, _, _, _, uid, _, inode, ..] = words[..] else {
            return None;
        };
        let is_it = same(address(local)?, theirs) && same(address(remote)?, ours);
        // Without an inode nobody holds it any more, and the user is not known.
        (is_it && inode != "0").then(|| uid.parse().ok()).flatten()
    })
}

/// Parses `0100007F:1F90`: words of 32 bits in this machine's byte order.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok();
    let ip: IpAddr = match ip.len() {
        8 => Ipv4Addr::from(word(0)?.to_ne_bytes()).into(),
        32 => {
            let mut bytes = [0; 16];
            for at in 0..4 {
                bytes[at * 4..at * 4 + 4].copy_from_slice(&word(at)?.to_ne_bytes());
            }
            Ipv6Addr::from(bytes).into()
        }
        _ => return None,
    };
    Some((ip, port).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_of_this_process_is_this_users() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = listener.local_addr().unwrap();
        let client = std::net::TcpStream::connect(ours).unwrap();
        let theirs = client.local_addr().unwrap();
        let me = nix::unistd::getuid().as_raw();
        assert_eq!(owner_of(theirs, ours).unwrap(), Some(me));
        let nobodys = SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(owner_of(nobodys, ours).unwrap(), None);
        assert_eq!(find_in_tables(theirs, ours).unwrap(), Some(me));
        assert_eq!(find_in_tables(nobodys, ours).unwrap(), None);
    }

    #[test]
    fn the_kernel_is_asked_about_one_socket_of_either_family() {
        let me = nix::unistd::getuid().as_raw();
        for (listen, call) in [
            ("127.0.0.1:0", "127.0.0.1"),
            ("[::1]:0", "::1"),
            ("[::]:0", "::ffff:127.0.0.1"),
        ] {
            let Ok(listener) = std::net::TcpListener::bind(listen) else {
                eprintln!("skipped {listen}: there is no IPv6");
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            let call = SocketAddr::new(call.parse().unwrap(), port);
            let client = std::net::TcpStream::connect(call).unwrap();
            let (accepted, _) = listener.accept().unwrap();
            let theirs = accepted.peer_addr().unwrap();
            let ours = accepted.local_addr().unwrap();
            match ask_kernel(theirs, ours) {
                Ok(owner) => assert_eq!(owner, Some(me), "{listen}"),
                Err(error) => eprintln!("skipped {listen}: no diagnostics ({error})"),
            }
            drop(client);
        }
    }

    #[test]
    fn an_answer_is_a_user_nobody_or_an_error() {
        let answer = |kind: u16, words: &[(usize, u32)]| {
            let mut answer = vec![0; 88];
            answer[4..6].copy_from_slice(&kind.to_ne_bytes());
            for (at, word) in words {
                answer[*at..at + 4].copy_from_slice(&word.to_ne_bytes());
            }
            user_in_answer(&answer)
        };
        assert_eq!(answer(20, &[(80, 1000), (84, 777)]), Ok(Some(1000)));
        assert_eq!(answer(20, &[(80, 0), (84, 0)]), Ok(None));
        let error = |errno: Errno| answer(2, &[(16, (errno as i32).wrapping_neg() as u32)]);
        assert_eq!(error(Errno::ENOENT), Ok(None));
        assert_eq!(error(Errno::EPERM), Err(Errno::EPERM));
        assert_eq!(user_in_answer(&[0; 3]), Err(Errno::EBADMSG));
        assert_eq!(user_in_answer(&[0; 20]), Err(Errno::EBADMSG));
    }

    #[test]
    fn a_host_is_an_address_or_its_network_of_ipv6() {
        let host = |text: &str| ConnectionOwner::of_host(text.parse().unwrap());
        assert_eq!(host("2001:db8::1"), host("2001:db8::ffff:0:0:2"));
        assert_ne!(host("2001:db8::1"), host("2001:db8:0:1::1"));
        assert_eq!(host("::ffff:192.0.2.1"), host("192.0.2.1"));
        assert_ne!(host("192.0.2.2"), host("192.0.2.1"));
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn the_list_is_read_in_both_families_and_a_socket_nobody_holds_is_nobodys() {
        let head = "  sl  local_address rem_address st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode\n";
        let v4 = "   0: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 777 1\n";
        let v6 = "   0: 0000000000000000FFFF00000100007F:9C40 0000000000000000FFFF00000100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 778 1\n";
        let waits = v4.replace(" 777 ", " 0 ");
        let (theirs, ours) = (
            "127.0.0.1:40000".parse().unwrap(),
            "127.0.0.1:8080".parse().unwrap(),
        );
        assert_eq!(find(&format!("{head}{v4}"), theirs, ours), Some(1000));
        assert_eq!(find(&format!("{head}{v6}"), theirs, ours), Some(1001));
        assert_eq!(find(&format!("{head}{waits}"), theirs, ours), None);
    }
}
