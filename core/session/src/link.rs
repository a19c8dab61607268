//! Links of this machine, and the addresses of paths over them.

use std::net::{IpAddr, SocketAddr};

/// A link of this machine, numbered by the driver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkId(pub u32);

/// Where a path's datagrams come from and go to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Addresses {
    /// The link they leave by.
    pub link: LinkId,
    /// The source address, where a socket has several.
    pub local: Option<IpAddr>,
    /// The peer.
    pub remote: SocketAddr,
}
