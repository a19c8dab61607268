//! Which packets may leave over metered links, decided by the crate's callers.

use std::fmt::Debug;

/// Decides which packets of a [`crate::PacketSource`] may leave over metered links, and counts them. Others wait for free links,
/// and are dropped while there are only metered ones.
pub trait MeteredFilter: Debug + Send + Sync {
    /// Whether a packet may leave over metered links. If not, it is dropped now, and counted.
    fn admits(&self, packet: &[u8]) -> bool;

    /// Whether a packet may leave over metered links beside free ones, as a repair. Nothing is counted: otherwise it leaves over free
    /// ones.
    fn lets_pay(&self, packet: &[u8]) -> bool;

    /// Counts a packet that left, over metered links or over free ones.
    fn on_left(&self, packet: &[u8], is_metered: bool);
}
