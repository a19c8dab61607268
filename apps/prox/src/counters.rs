//! What the proxy has counted since it started, for its metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::refusal::ProxRefusal;

/// A direction of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrafficDirection {
    /// Bytes to the client.
    Down,
    /// Bytes from the client.
    Up,
}

/// What a flow is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum TrafficKind {
    /// Heads that were not understood yet, refusals, and requests to be enrolled.
    Other,
    /// Requests of method GET or HEAD.
    Fetch,
    /// Requests with a body.
    Upload,
    /// Requests of method CONNECT.
    Tunnel,
    /// RELAY and LISTEN, and the packets that are relayed.
    Relay,
    /// The exchange of two clients in a mailbox.
    Mailbox,
    /// CONNECT-IP, and the packets of its tunnel.
    Packets,
}

impl TrafficKind {
    /// Every kind, in the order of their numbers.
    pub(crate) const ALL: [TrafficKind; 7] = [
        TrafficKind::Other,
        TrafficKind::Fetch,
        TrafficKind::Upload,
        TrafficKind::Tunnel,
        TrafficKind::Relay,
        TrafficKind::Mailbox,
        TrafficKind::Packets,
    ];

    /// The word for it in metrics and logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            TrafficKind::Other => "other",
            TrafficKind::Fetch => "fetch",
            TrafficKind::Upload => "upload",
            TrafficKind::Tunnel => "tunnel",
            TrafficKind::Relay => "relay",
            TrafficKind::Mailbox => "mailbox",
            TrafficKind::Packets => "packets",
        }
    }
}

/// How a request for an object was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheResult {
    /// The response came from the cache that all clients share.
    Hit,
    /// The response came from a copy of the client's own.
    Pinned,
    /// The response came from the origin.
    Miss,
}

/// What the proxy has counted since it started.
#[derive(Debug, Default)]
pub(crate) struct ProxCounters {
    pub(crate) bytes: [[AtomicU64; TrafficKind::ALL.len()]; 2],
    pub(crate) ended: Mutex<BTreeMap<&'static str, u64>>,
    pub(crate) refused: Mutex<BTreeMap<&'static str, u64>>,
    pub(crate) limited: Mutex<BTreeMap<&'static str, u64>>,
    pub(crate) lookups: [AtomicU64; 3],
    pub(crate) origin_requests: AtomicU64,
    pub(crate) origin_tunnels: AtomicU64,
    pub(crate) tunnel_packets_dropped: Mutex<BTreeMap<&'static str, u64>>,
    pub(crate) relayed_packets_dropped: AtomicU64,
    pub(crate) access_lines_lost: AtomicU64,
}

impl ProxCounters {
    pub(crate) fn add_bytes(&self, direction: TrafficDirection, kind: TrafficKind, bytes: u64) {
        self.bytes[direction as usize][kind as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn on_flow_ended(&self, outcome: &'static str) {
        *self.ended.lock().entry(outcome).or_default() += 1;
    }

    pub(crate) fn on_refusal(&self, refusal: &ProxRefusal) {
        *self.refused.lock().entry(refusal.token()).or_default() += 1;
        if let Some(limit) = refusal.limit() {
            self.on_limit(limit);
        }
    }

    /// Counts something that a limit with this name ended or refused.
    pub(crate) fn on_limit(&self, limit: &'static str) {
        *self.limited.lock().entry(limit).or_default() += 1;
    }

    pub(crate) fn on_cache_lookup(&self, lookup: CacheResult) {
        self.lookups[lookup as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn on_origin_request(&self) {
        self.origin_requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn on_origin_tunnel(&self) {
        self.origin_tunnels.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn on_relayed_packet_dropped(&self) {
        self.relayed_packets_dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts packets of a packet tunnel that were dropped for this reason.
    pub(crate) fn on_tunnel_packets_dropped(&self, reason: &'static str, packets: u64) {
        *self
            .tunnel_packets_dropped
            .lock()
            .entry(reason)
            .or_default() += packets;
    }

    /// Lines that the access log could not take.
    pub(crate) fn access_lines_lost(&self) -> u64 {
        self.access_lines_lost.load(Ordering::Relaxed)
    }

    pub(crate) fn on_access_line_lost(&self) {
        self.access_lines_lost.fetch_add(1, Ordering::Relaxed);
    }
}
