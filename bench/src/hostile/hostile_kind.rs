//! The kinds of hostile clients, and what the proxy needs for each.

/// The keys of the attack by slow origins: it makes 10,000 requests, and one key may have 1,024 flows.
pub const SLOW_ORIGIN_KEYS: u64 = 10;

/// A kind of hostile client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostileKind {
    /// Objects that are requested and never read.
    UnreadFlows,
    /// Objects of which no packet is acknowledged.
    Unacknowledged,
    /// Single bytes with gaps between them, in every flow.
    SparsePieces,
    /// The maximum number of flows, with one byte each.
    ManyFlows,
    /// The maximum number of sessions.
    ManySessions,
    /// Handshakes that are never confirmed.
    HalfOpen,
    /// Tunnels whose bytes are never read.
    UnreadTunnels,
    /// Uploads that never end.
    EndlessUploads,
    /// Request heads without an end.
    EndlessRequestHeads,
    /// Requests to origins whose response heads have no end.
    EndlessResponseHeads,
    /// Requests to origins whose bodies have no end, unread.
    EndlessBodies,
    /// Requests to origins that never complete a TLS handshake.
    StalledTls,
    /// Readers of a kilobyte per second.
    SlowReaders,
    /// Requests to origins that send a byte of their head or body per second.
    SlowOrigins,
    /// The maximum number of relays, and more.
    Relays,
    /// SYNs of keys that are not admitted, from forged addresses.
    SynFlood,
    /// Captured WAKEs, replayed from forged addresses.
    WakeReplay,
    /// Datagrams of arbitrary bytes, from forged addresses.
    Garbage,
    /// Datagrams of sessions that nobody reads.
    UnreadDatagrams,
    /// Packet tunnels that are asked for answers which nobody takes.
    PacketTunnels,
    /// Strangers' connections for streams that begin and say nothing more.
    SilentStreams,
    /// Strangers' connections for streams that send what is none, without an end.
    GarbageStreams,
    /// Strangers' streams with packets of no session, and SYNs of keys that are not admitted.
    StrangePackets,
    /// Strangers' streams that ask for answers which they do not read.
    StreamPings,
    /// Requests by HTTP/2 that are reset at once, by either end.
    Http2Resets,
    /// Heads by HTTP/2 that have no end, or are much larger when they are unpacked.
    Http2Heads,
    /// Answers by HTTP/2 for which there is never room.
    Http2Windows,
    /// Control frames of HTTP/2 whose answers are not read.
    Http2Control,
    /// Devices that nobody invited, while an invitation is open.
    EnrolmentGuests,
    /// More objects than the shared cache has room for, each read once.
    CacheChurn,
    /// Objects of the shared cache that are never read.
    CacheUnread,
    /// Variants of objects without number, with large heads.
    CacheVariants,
    /// Bodies that are a thousand times as large when they are unpacked.
    CompressedBombs,
    /// All limits of a client at once.
    EveryQuota,
}

impl HostileKind {
    /// Every kind with its name, in the order in which they run.
    pub const ALL: [(HostileKind, &'static str); 34] = [
        (HostileKind::UnreadFlows, "unread-flows"),
        (HostileKind::Unacknowledged, "unacknowledged"),
        (HostileKind::SparsePieces, "sparse-pieces"),
        (HostileKind::ManyFlows, "many-flows"),
        (HostileKind::ManySessions, "many-sessions"),
        (HostileKind::HalfOpen, "half-open"),
        (HostileKind::UnreadTunnels, "unread-tunnels"),
        (HostileKind::EndlessUploads, "endless-uploads"),
        (HostileKind::EndlessRequestHeads, "endless-request-heads"),
        (HostileKind::EndlessResponseHeads, "endless-response-heads"),
        (HostileKind::EndlessBodies, "endless-bodies"),
        (HostileKind::StalledTls, "stalled-tls"),
        (HostileKind::SlowReaders, "slow-readers"),
        (HostileKind::SlowOrigins, "slow-origins"),
        (HostileKind::Relays, "relays"),
        (HostileKind::SynFlood, "syn-flood"),
        (HostileKind::WakeReplay, "wake-replay"),
        (HostileKind::Garbage, "garbage"),
        (HostileKind::UnreadDatagrams, "unread-datagrams"),
        (HostileKind::PacketTunnels, "packet-tunnels"),
        (HostileKind::SilentStreams, "silent-streams"),
        (HostileKind::GarbageStreams, "garbage-streams"),
        (HostileKind::StrangePackets, "strange-packets"),
        (HostileKind::StreamPings, "stream-pings"),
        (HostileKind::Http2Resets, "http2-resets"),
        (HostileKind::Http2Heads, "http2-heads"),
        (HostileKind::Http2Windows, "http2-windows"),
        (HostileKind::Http2Control, "http2-control"),
        (HostileKind::EnrolmentGuests, "enrolment-guests"),
        (HostileKind::CacheChurn, "cache-churn"),
        (HostileKind::CacheUnread, "cache-unread"),
        (HostileKind::CacheVariants, "cache-variants"),
        (HostileKind::CompressedBombs, "compressed-bombs"),
        (HostileKind::EveryQuota, "every-quota"),
    ];

    /// Whether the attack makes the proxy hold copies or upload bodies, which the quota of copies
    /// limits.
    pub fn pins_copies(self) -> bool {
        use HostileKind::{
            CompressedBombs, EndlessBodies, EndlessUploads, EveryQuota, Http2Resets, Http2Windows,
            SlowOrigins, SlowReaders, Unacknowledged, UnreadFlows,
        };
        matches!(
            self,
            UnreadFlows
                | Unacknowledged
                | EndlessUploads
                | EndlessBodies
                | SlowReaders
                | SlowOrigins
                | Http2Resets
                | Http2Windows
                | CompressedBombs
                | EveryQuota
        ) || self.fills_cache()
    }

    /// Whether the attack fills the cache that all clients share.
    pub fn fills_cache(self) -> bool {
        use HostileKind::{CacheChurn, CacheUnread, CacheVariants};
        matches!(self, CacheChurn | CacheUnread | CacheVariants)
    }

    /// Whether the proxy needs its port for streams.
    pub fn uses_streams(self) -> bool {
        use HostileKind::{GarbageStreams, SilentStreams, StrangePackets, StreamPings};
        matches!(
            self,
            SilentStreams | GarbageStreams | StrangePackets | StreamPings
        )
    }

    /// Whether the proxy needs its port for clients without D2TP.
    pub fn uses_http2(self) -> bool {
        use HostileKind::{Http2Control, Http2Heads, Http2Resets, Http2Windows};
        matches!(self, Http2Resets | Http2Heads | Http2Windows | Http2Control)
    }

    /// Whether the proxy makes a network for packets: then all is in a namespace of its own.
    pub fn uses_tunnels(self) -> bool {
        self == HostileKind::PacketTunnels
    }

    /// Whether an invitation of the proxy is open.
    pub fn invites(self) -> bool {
        self == HostileKind::EnrolmentGuests
    }

    /// The admitted keys that the attack needs, of which an attacker has `keys` otherwise.
    pub fn keys(self, keys: u64) -> u64 {
        match self {
            HostileKind::SlowOrigins => keys.max(SLOW_ORIGIN_KEYS),
            _ => keys,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::HostileKind;
    use std::collections::BTreeSet;

    #[test]
    fn every_kind_has_a_name_of_its_own() {
        let names: BTreeSet<&str> = HostileKind::ALL.iter().map(|(_, name)| *name).collect();
        assert_eq!(names.len(), HostileKind::ALL.len());
    }
}
