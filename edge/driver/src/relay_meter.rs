//! Who decides whether a relay may forward a packet now.

use crate::source::HostKey;

/// Counts the packets that relays forward, and drops those that are beyond a client's limits. The ends of the relayed
/// session notice a dropped packet as on any path.
pub trait RelayMeter: Send + Sync + 'static {
    /// Whether to forward a packet of this many bytes. `client`: whoever opened the relay. `is_from_client`: whether it
    /// sent the packet; otherwise the packet goes to it. Called while the server's lock is held.
    fn admits(&self, client: HostKey, is_from_client: bool, bytes: usize) -> bool;
}
