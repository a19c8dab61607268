//! Finds the user who owns the peer of a local connection.
//!
//! The kernel's list of TCP sockets (proc(5), `/proc/net/tcp`) has the user of each. A socket that waits
//! for the end of its time has none there, and neither has one in another network namespace: then it
//! cannot be told.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::TcpStream;

/// Finds the user whose socket is bound to `theirs` and connected to `ours`; none if that cannot be told.
///
/// # Errors
/// The list cannot be read.
pub fn owner_of(theirs: SocketAddr, ours: SocketAddr) -> io::Result<Option<u32>> {
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
