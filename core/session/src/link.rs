//! Links of this machine, and the addresses of paths over them.

use std::net::{IpAddr, SocketAddr};

/// A link of this machine, numbered by the driver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkId(pub u32);

/// The link and the addresses of a path's datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Addresses {
    /// The link on which the datagrams leave.
    pub link: LinkId,
    /// The local address, if the socket has several.
    pub local: Option<IpAddr>,
    /// The address of the peer.
    pub remote: SocketAddr,
}
