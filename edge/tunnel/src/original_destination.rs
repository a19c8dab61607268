//! Where a connection was to go before nftables redirected it.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use nix::sys::socket::{getsockopt, sockopt};
use std::os::fd::AsFd;

/// The destination of a redirected TCP connection, as the program that made it named it.
///
/// # Errors
/// The connection was not redirected, or the kernel no longer knows.
pub fn original_destination(socket: &impl AsFd, is_ipv6: bool) -> io::Result<SocketAddr> {
    if is_ipv6 {
        let to = getsockopt(socket, sockopt::Ip6tOriginalDst)?;
        let ip = Ipv6Addr::from(to.sin6_addr.s6_addr);
        return Ok((ip, u16::from_be(to.sin6_port)).into());
    }
    let to = getsockopt(socket, sockopt::OriginalDst)?;
    let ip = Ipv4Addr::from(u32::from_be(to.sin_addr.s_addr));
    Ok((ip, u16::from_be(to.sin_port)).into())
}
