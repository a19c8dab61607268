//! Limits on the bytes that a path may have in flight (R-PATH-12): that of the peer, and that which
//! this host announces for its application or to keep the path's queue short.

use d2tp_wire::VARINT_MAX;

/// R-PATH-12: the lowest limit of a path, in datagrams. Below it a sender could not detect losses.
pub(crate) const LIMIT_DATAGRAMS_MIN: u64 = 4;
/// A limit as it is on the wire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentLimit {
    pub(crate) seq: u64,
    pub(crate) bytes: u64,
}

/// The limits of a path in both directions. Few paths have any.
#[derive(Debug)]
pub(crate) struct PathLimits {
    /// The limit that the peer announced.
    pub(crate) peer: SentLimit,
    /// The receive limit that we announced to the peer.
    pub(crate) announced: SentLimit,
    /// The limit that this host's application set.
    pub(crate) asked: u64,
}

impl Default for PathLimits {
    fn default() -> PathLimits {
        let none = SentLimit {
            seq: 0,
            bytes: VARINT_MAX,
        };
        PathLimits {
            peer: none,
            announced: none,
            asked: VARINT_MAX,
        }
    }
}
