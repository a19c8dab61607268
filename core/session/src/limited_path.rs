//! Which limits a path keeps and announces (R-PATH-12).
//!
//! ```text
//!  application, DRWA ──▶ announce_limit ──▶ PATH_LIMIT to the peer, if it changed by enough
//!  PATH_LIMIT of the peer ──▶ on_peer_limit ──▶ allowed: bytes in flight
//! ```

use d2tp_wire::VARINT_MAX;

use crate::path::{SessionPath, want};
use crate::path_limit::{LIMIT_DATAGRAMS_MIN, SentLimit};

/// The part by which a receive limit must change to be announced again: each announcement costs a
/// frame.
const LIMIT_GRAIN: u64 = 16;

impl SessionPath {
    /// The limit on bytes in flight that the peer announced; `None` without a limit.
    pub(crate) fn limit(&self) -> Option<u64> {
        let bytes = self.limits.as_ref()?.peer.bytes;
        (bytes < VARINT_MAX).then_some(bytes)
    }

    /// The number of bytes in flight that the peer's limit allows, at least the lowest limit
    /// (R-PATH-12).
    pub(crate) fn allowed(&self) -> u64 {
        let floor = LIMIT_DATAGRAMS_MIN * self.mtu.current() as u64;
        self.limit().map_or(u64::MAX, |limit| limit.max(floor))
    }

    /// R-PATH-12: handles a limit of the peer. The newest counts.
    pub(crate) fn on_peer_limit(&mut self, seq: u64, bytes: u64) {
        let limits = self.limits.get_or_insert_default();
        if seq > limits.peer.seq {
            limits.peer = SentLimit { seq, bytes };
            self.fit_datagrams_to_limit();
        }
    }

    /// Sets the application's limit on the bytes that the peer may have in flight on this path.
    pub(crate) fn set_app_limit(&mut self, bytes: u64) {
        self.limits.get_or_insert_default().asked = bytes;
        self.announce_limit();
    }

    /// The receive limit to announce, if there ever was one.
    pub(crate) fn announced_limit(&self) -> Option<SentLimit> {
        Some(self.limits.as_ref()?.announced)
    }

    /// Announces the receive limit if it changed by enough.
    pub(crate) fn announce_limit(&mut self) {
        let own = self.drwa.as_ref().and_then(|drwa| drwa.limit());
        if own.is_none() && self.limits.is_none() {
            return;
        }
        let limits = self.limits.get_or_insert_default();
        let bytes = own.unwrap_or(VARINT_MAX).min(limits.asked);
        let announced = limits.announced.bytes;
        let exact = bytes == limits.asked || announced == limits.asked;
        if bytes.abs_diff(announced) > if exact { 0 } else { announced / LIMIT_GRAIN } {
            let seq = limits.announced.seq + 1;
            limits.announced = SentLimit { seq, bytes };
            self.wants |= want::LIMIT;
        }
    }
}
