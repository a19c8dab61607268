//! The addresses by which a host identifies relays, streams and serial lines in paths: no host on a network has them.

use std::net::SocketAddr;

use crate::relay::RelayId;
use crate::serial_path::SerialPathId;
use crate::stream_path_state::StreamPathId;

/// Whether an address identifies a relay, a stream or a serial line, so that no datagram of a network may come from there.
///
/// ```
/// use d2tp_session::{StreamPathId, is_reserved_address};
/// assert!(is_reserved_address(&StreamPathId(7).address()));
/// assert!(!is_reserved_address(&"[2001:db8::7]:1".parse().unwrap()));
/// ```
pub fn is_reserved_address(address: &SocketAddr) -> bool {
    StreamPathId::of(address).is_some()
        || RelayId::of(address).is_some()
        || SerialPathId::of(address).is_some()
}
