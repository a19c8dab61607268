//! State of relays that a host provides, and of relays that it uses. [`crate::relay_host`] and
//! [`crate::relay_dispatch`] operate on it.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use d2tp_session::{
    Addresses, CALLS_MAX, Endpoint, FlowId, MemoryCharge, PathId, RelayClient, RelayId,
    RelayLimits, RelayTable, Rendezvous, SessionEvent, SessionId, Time,
};
use d2tp_udp::LinkSocket;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinHandle;

use crate::relay_meter::RelayMeter;
use crate::source::HostKey;

/// The most events of a session that its owner has not read yet.
const EVENTS_MAX: usize = 256;

/// A task that ends when this is dropped.
pub(crate) struct AbortOnDrop(pub(crate) JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A session with a peer, beside the one with the server.
pub(crate) struct PeerSession {
    pub(crate) rendezvous: Rendezvous,
    /// The flow for the rendezvous' lines, if there is one.
    pub(crate) lines: Option<FlowId>,
    pub(crate) relay: Option<RelayId>,
    /// Whether a direct path answers.
    pub(crate) direct: watch::Sender<bool>,
    pub(crate) events: broadcast::Sender<(Time, SessionEvent)>,
    /// The task that reads those lines.
    pub(crate) reader_task: Option<AbortOnDrop>,
}

/// Relays in both roles: those this host provides, and those it uses.
#[derive(Default)]
pub(crate) struct RelayState {
    /// The relays that this host provides.
    pub(crate) host: Option<RelayHost>,
    /// The relays that this device uses.
    pub(crate) relay_client: RelayClient,
    /// A device's session with its server, which is its relay.
    pub(crate) server_session: Option<SessionId>,
    pub(crate) peer_sessions: BTreeMap<SessionId, PeerSession>,
    /// Whether peers may open sessions and flows.
    pub(crate) accepts_peers: bool,
    /// The addresses at which the relay sees this device's paths.
    pub(crate) observed_addresses: BTreeMap<PathId, SocketAddr>,
    pub(crate) scratch: Vec<u8>,
    /// Packets for devices of other workers, with the index of each one's worker.
    pub(crate) for_workers: Vec<(u16, RelayedPackets)>,
}

/// Packets of a call in their relayed form, for a device of another worker than the one that received them.
pub(crate) struct RelayedPackets {
    /// The device's half of the call.
    pub(crate) id: RelayId,
    pub(crate) bytes: Vec<u8>,
    /// The size of each; the last may be shorter.
    pub(crate) stride: usize,
}

impl RelayState {
    /// Whether this host neither provides nor uses relays.
    pub(crate) fn is_idle(&self) -> bool {
        let hosts_none = self.host.as_ref().is_none_or(|h| h.relays.is_empty());
        hosts_none && self.relay_client.is_idle()
    }

    /// Whether this is the first flow of a peer's session, which carries the rendezvous.
    pub(crate) fn is_rendezvous_flow(&self, session: SessionId, flow: FlowId) -> bool {
        self.accepts_flows(session) && flow.by_initiator() && flow.counter() == 0
    }

    /// Whether flows that the peer opens in this session are accepted.
    pub(crate) fn accepts_flows(&self, session: SessionId) -> bool {
        self.accepts_peers && self.is_peer_session(session)
    }

    /// Whether the session is not the one with the device's server.
    pub(crate) fn is_peer_session(&self, session: SessionId) -> bool {
        self.server_session.is_some_and(|main| main != session)
    }

    /// The channel for a session's events; `None` if no one receives them.
    pub(crate) fn event_sender<'a>(
        &'a self,
        session: SessionId,
        usual: &'a broadcast::Sender<(Time, SessionEvent)>,
    ) -> Option<&'a broadcast::Sender<(Time, SessionEvent)>> {
        if !self.is_peer_session(session) {
            return Some(usual);
        }
        self.peer_sessions.get(&session).map(|b| &b.events)
    }

    /// Handles an event of a session.
    pub(crate) fn note(&self, event: &SessionEvent) {
        if let (Some(hosted), SessionEvent::PathUp { .. } | SessionEvent::PathDown { .. }) =
            (&self.host, event)
        {
            hosted.addresses_changed.send_modify(|n| *n += 1);
        }
    }

    /// Removes a session that is over.
    pub(crate) fn forget(&mut self, session: SessionId) {
        self.relay_client.forget_punches(session);
        if let Some(relay) = self.peer_sessions.remove(&session).and_then(|b| b.relay) {
            self.relay_client.leave_relay(relay);
        }
    }

    /// Ends all tasks, because the host stops.
    pub(crate) fn stop(&mut self) {
        self.peer_sessions.clear();
        self.host = None;
    }

    /// Records the address at which the relay sees one of this device's paths.
    pub(crate) fn set_observed_address(&mut self, path: PathId, at: SocketAddr) {
        self.observed_addresses.insert(path, at);
        // Path ids only grow, so the oldest entries belong to closed paths.
        while self.observed_addresses.len() > 2 * d2tp_session::PATHS_MAX {
            self.observed_addresses.pop_first();
        }
    }

    /// When the next timer is due.
    pub(crate) fn next_at(&self) -> Option<Time> {
        let all = self.peer_sessions.values().map(|b| b.rendezvous.next_at());
        all.min().filter(|at| *at != Time::NEVER)
    }
}

impl PeerSession {
    pub(crate) fn new(rendezvous: Rendezvous) -> PeerSession {
        PeerSession {
            rendezvous,
            lines: None,
            relay: None,
            direct: watch::channel(false).0,
            events: broadcast::channel(EVENTS_MAX).0,
            reader_task: None,
        }
    }
}

/// The relays that a server provides.
pub(crate) struct RelayHost {
    pub(crate) relays: RelayTable,
    pub(crate) external: BTreeMap<RelayId, ExternalRelay>,
    pub(crate) listeners: BTreeMap<SessionId, mpsc::Sender<CallEvent>>,
    /// Counts possible changes of devices' addresses.
    pub(crate) addresses_changed: watch::Sender<u64>,
    /// The meter that counts forwarded packets, and decides whether they are forwarded.
    pub(crate) meter: Option<Arc<dyn RelayMeter>>,
}

/// A relay to an external address, with its own socket.
pub(crate) struct ExternalRelay {
    pub(crate) io: Arc<LinkSocket>,
    pub(crate) to: SocketAddr,
    pub(crate) _return_task: AbortOnDrop,
    /// The memory of the task, charged to the device.
    pub(crate) _memory: MemoryCharge,
}

impl RelayHost {
    pub(crate) fn new(limits: RelayLimits, seed: [u8; 32]) -> RelayHost {
        RelayHost {
            relays: RelayTable::new(limits, seed),
            external: BTreeMap::new(),
            listeners: BTreeMap::new(),
            addresses_changed: watch::channel(0).0,
            meter: None,
        }
    }

    /// Whether the client of a relay may have a packet of this many bytes forwarded. `is_from_device`: it came from a
    /// device, not from an external address.
    pub(crate) fn admits(
        &self,
        core: &Endpoint,
        id: RelayId,
        is_from_device: bool,
        bytes: usize,
    ) -> bool {
        let Some(meter) = &self.meter else {
            return true;
        };
        let Some((client, is_own)) = self.relays.client(core, id) else {
            return false;
        };
        meter.admits(client.0, is_own && is_from_device, bytes)
    }
}

/// The most events that a listening device has not read yet: calls, and room for the end of each. A device
/// that reads nothing gets no more calls.
pub(crate) const CALL_EVENTS_MAX: usize = 2 * CALLS_MAX;

/// An event of a listening device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallEvent {
    /// A call: the relay's id for the listener, and the caller.
    Call(RelayId, HostKey),
    /// The relayed connection is over.
    HungUp(RelayId),
}

/// Sends datagrams of one size, as many as the socket accepts.
pub(crate) fn put(io: &LinkSocket, to: &Addresses, bytes: &[u8], stride: usize) -> io::Result<()> {
    let segments = io.max_gso_segments().min(BATCH_BYTES_MAX / stride).max(1);
    for piece in bytes.chunks(segments * stride) {
        io.try_send(&d2tp_udp::UdpTransmit {
            dst: to.remote,
            src_ip: to.local,
            ecn: None,
            contents: piece,
            segment_size: (piece.len() > stride).then_some(stride),
        })?;
    }
    Ok(())
}

/// The most bytes of one system call.
const BATCH_BYTES_MAX: usize = 65_000;
