//! What a host relays, and what is relayed for it. What is done with it is in [`crate::relay_host`] and
//! [`crate::relay_dispatch`].

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use d2tp_session::{
    Addresses, FlowId, PathId, RelayClient, RelayId, RelayLimits, RelayTable, Rendezvous,
    SessionEvent, SessionId, Time,
};
use d2tp_udp::LinkSocket;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinHandle;

use crate::source::HostKey;

/// Events of a session that its owner has not read.
const EVENTS_MAX: usize = 256;

/// A task that ends with whoever it is for.
pub(crate) struct AbortOnDrop(pub(crate) JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A session beside the one with the server.
pub(crate) struct PeerSession {
    pub(crate) rendezvous: Rendezvous,
    /// The flow for the rendezvous' lines, if there is one.
    pub(crate) lines: Option<FlowId>,
    pub(crate) relay: Option<RelayId>,
    /// Whether a direct path answers.
    pub(crate) direct: watch::Sender<bool>,
    pub(crate) events: broadcast::Sender<(Time, SessionEvent)>,
    /// Reads those lines; ends with this.
    pub(crate) reader_task: Option<AbortOnDrop>,
}

/// What this host relays, and what is relayed for it.
#[derive(Default)]
pub(crate) struct RelayState {
    /// This device's part as a relay.
    pub(crate) host: Option<RelayHost>,
    /// This device's part as a client of relays.
    pub(crate) relay_client: RelayClient,
    /// A device's session with its server, which is the relay.
    pub(crate) server_session: Option<SessionId>,
    pub(crate) peer_sessions: BTreeMap<SessionId, PeerSession>,
    /// Peers may open sessions and flows.
    pub(crate) accepts_peers: bool,
    /// Where the relay sees our paths.
    pub(crate) observed_addresses: BTreeMap<PathId, SocketAddr>,
    pub(crate) scratch: Vec<u8>,
}

impl RelayState {
    /// Whether nothing is relayed, by this host or for it.
    pub(crate) fn is_idle(&self) -> bool {
        let hosts_none = self.host.as_ref().is_none_or(|h| h.relays.is_empty());
        hosts_none && self.relay_client.is_idle()
    }

    /// Whether a peer begins a session with us by this flow: its first.
    pub(crate) fn is_rendezvous_flow(&self, session: SessionId, flow: FlowId) -> bool {
        self.accepts_flows(session) && flow.by_initiator() && flow.counter() == 0
    }

    /// Whether flows that are opened to us in this session are taken.
    pub(crate) fn accepts_flows(&self, session: SessionId) -> bool {
        self.accepts_peers && self.is_peer_session(session)
    }

    /// Whether it is not the session that this host's device is for.
    pub(crate) fn is_peer_session(&self, session: SessionId) -> bool {
        self.server_session.is_some_and(|main| main != session)
    }

    /// Who is told of a session's events; none if nobody wants to know.
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

    /// Something happened in a session.
    pub(crate) fn note(&self, event: &SessionEvent) {
        if let (Some(hosted), SessionEvent::PathUp { .. } | SessionEvent::PathDown { .. }) =
            (&self.host, event)
        {
            hosted.addresses_changed.send_modify(|n| *n += 1);
        }
    }

    /// A session is over.
    pub(crate) fn forget(&mut self, session: SessionId) {
        self.relay_client.forget_punches(session);
        if let Some(relay) = self.peer_sessions.remove(&session).and_then(|b| b.relay) {
            self.relay_client.leave_relay(relay);
        }
    }

    /// The host stops: tasks that hold on to it end.
    pub(crate) fn stop(&mut self) {
        self.peer_sessions.clear();
        self.host = None;
    }

    /// The relay sees a path of ours there.
    pub(crate) fn set_observed_address(&mut self, path: PathId, at: SocketAddr) {
        self.observed_addresses.insert(path, at);
        // Path ids grow: of the oldest there is none any more.
        while self.observed_addresses.len() > 2 * d2tp_session::PATHS_MAX {
            self.observed_addresses.pop_first();
        }
    }

    /// When something is to be done by itself.
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

/// The relays of a server.
pub(crate) struct RelayHost {
    pub(crate) relays: RelayTable,
    pub(crate) external: BTreeMap<RelayId, ExternalRelay>,
    pub(crate) listeners: BTreeMap<SessionId, mpsc::UnboundedSender<CallEvent>>,
    /// Counts what may have changed where some device is.
    pub(crate) addresses_changed: watch::Sender<u64>,
}

/// A relay to an address outside, with a socket of its own.
pub(crate) struct ExternalRelay {
    pub(crate) io: Arc<LinkSocket>,
    pub(crate) to: SocketAddr,
    pub(crate) _return_task: AbortOnDrop,
}

impl RelayHost {
    pub(crate) fn new(limits: RelayLimits, seed: [u8; 32]) -> RelayHost {
        RelayHost {
            relays: RelayTable::new(limits, seed),
            external: BTreeMap::new(),
            listeners: BTreeMap::new(),
            addresses_changed: watch::channel(0).0,
        }
    }
}

/// What a listener hears from its relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallEvent {
    /// The relay's id for the listener, and who calls.
    Call(RelayId, HostKey),
    /// The relayed connection is over.
    HungUp(RelayId),
}

/// Puts datagrams of one size on a socket, as far as it takes them.
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

/// What one system call takes at most.
const BATCH_BYTES_MAX: usize = 65_000;
