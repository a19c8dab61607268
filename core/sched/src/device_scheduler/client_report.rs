//! Reports of a scheduler's clients, and their identifiers.

use std::collections::BTreeMap;

use crate::{FlowDemand, LinkCandidate, SourceSupply};

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TransferDirection {
    /// Bytes towards this device: downloads.
    Down,
    /// Bytes from this device: uploads.
    Up,
}

/// Whether the beginning of an object is here, for objects of which it is wanted before the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectStart {
    /// A part of the beginning is still to be carried.
    Missing,
    /// The beginning was carried.
    Here,
}

/// What a client needs, and what links carried for it.
#[derive(Debug, Clone)]
pub struct ClientReport<'a> {
    /// Bytes still to be carried, time left, policy, and the client's own budget.
    pub demand: FlowDemand,
    /// Bytes of the whole object, when known.
    pub size_bytes: Option<u64>,
    /// Priority, 0 to 7; higher goes first.
    pub priority: u8,
    /// Whether the beginning of the object is here; none if it is wanted no sooner than the rest. While there is
    /// time, clients whose beginning is missing go before those whose beginning is here.
    pub start: Option<ObjectStart>,
    /// The links that the client can use.
    pub candidates: &'a [LinkCandidate],
    /// Payload bytes that each link has carried for the client since it joined.
    pub carried: &'a BTreeMap<String, u64>,
    /// Whether the client can be on several links at once.
    pub uses_several_links: bool,
    /// Whether the client always pays because its own rule demands it, whatever is decided for
    /// others.
    pub always_pays: bool,
    /// Whether a program controls the client's traffic, as over a socket. Its pauses then say
    /// nothing about links, and it never waits for other clients.
    pub is_interactive: bool,
    /// How the server supplies the client.
    pub source: SourceSupply,
    /// Whether the machine is woken and kept awake for the client.
    pub keeps_awake: bool,
}

/// Identifies a client of a [`DeviceScheduler`](super::DeviceScheduler) from [`join`](super::DeviceScheduler::join) to
/// [`leave`](super::DeviceScheduler::leave).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientId {
    pub(super) direction: TransferDirection,
    pub(super) number: u64,
}
