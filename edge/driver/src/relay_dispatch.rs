//! Received datagrams that are not for the core: relayed packets, at either end of a relay, and
//! punches.
//!
//! ```text
//!  socket ─▶ receive_run ─┬─ id of our own relay ──▶ forwarded to a device or an address
//!                     ├─ id of a relay we use ─▶ core, as from the address that stands for it
//!                     ├─ id of a punch ────────▶ the rendezvous with that id
//!                     └─ all others ───────────▶ core
//! ```
//!
//! All sessions of a device use the same core and the same sockets. So a relay recognizes them by
//! the address, and the NAT binding that the relay sees is valid for direct paths.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use d2tp_session::{
    Addresses, FlowId, IncomingDatagram, InterceptedDatagram, LINE_BYTES_MAX, LinkId, PUNCH_BYTES,
    PathState, PathStats, RELAY_HEADER_BYTES, RelayId, Rendezvous, RendezvousReach, SessionId,
    StreamPathId, Time, Transmit, relayed_id, wrap_relayed,
};

use crate::clock;
use crate::device_sender::put_relayed;
use crate::driver_core::{DriverCore, DriverShared, FlowEntry};
use crate::flow::Flow;
use crate::relay_host;
use crate::relay_state::{AbortOnDrop, PeerSession, put};

/// Whether an error of a send to this address concerns the link. An address that is only tried may
/// have no route.
pub(crate) fn is_link_fault(inner: &DriverCore, transmit: &Transmit) -> bool {
    let relaying = &inner.relays;
    let Some(main) = relaying
        .server_session
        .filter(|_| !relaying.peer_sessions.is_empty())
    else {
        return true;
    };
    let paths = inner.core.session(main).map(|s| s.path_stats());
    let mut paths = paths.into_iter().flatten();
    paths.any(|p| p.addresses.remote == transmit.remote)
}

/// Handles datagrams of one sender that follow each other in a buffer.
pub(crate) fn receive_run(
    inner: &mut DriverCore,
    now: Time,
    from: Addresses,
    run: &mut [u8],
    stride: usize,
) {
    if inner.relays.is_idle() {
        return to_core(inner, now, from, run, stride);
    }
    let stride = stride.max(1);
    let mut rest = run;
    while !rest.is_empty() {
        let id = relayed_id(&rest[..stride.min(rest.len())]);
        let same = rest.chunks(stride).take_while(|d| relayed_id(d) == id);
        let bytes = same.map(<[u8]>::len).sum();
        let (group, more) = rest.split_at_mut(bytes);
        match id {
            Some(id) => take_group(inner, now, from, RelayId(id), group, stride),
            None => to_core(inner, now, from, group, stride),
        }
        rest = more;
    }
}

fn to_core(
    inner: &mut DriverCore,
    now: Time,
    addresses: Addresses,
    bytes: &mut [u8],
    stride: usize,
) {
    let incoming = IncomingDatagram { addresses, bytes };
    inner.core.handle_datagrams(now, incoming, stride);
}

/// Whether a datagram that another worker received is a packet by one of this worker's relays.
pub(crate) fn is_relayed(inner: &DriverCore, datagram: &[u8]) -> bool {
    let hosted = inner.relays.host.as_ref().filter(|h| !h.relays.is_empty());
    let id = relayed_id(datagram).map(RelayId);
    hosted
        .zip(id)
        .is_some_and(|(hosted, id)| hosted.relays.contains(id))
}

/// Handles datagrams that have the same id.
fn take_group(
    inner: &mut DriverCore,
    now: Time,
    from: Addresses,
    id: RelayId,
    group: &mut [u8],
    stride: usize,
) {
    let hosted = inner.relays.host.as_ref();
    if hosted.is_some_and(|h| h.relays.contains(id)) {
        return relay_host::forward(inner, id, &from, group, stride);
    }
    let first = &group[..stride.min(group.len())];
    match inner
        .relays
        .relay_client
        .classify_datagram(&inner.core, &from, first)
    {
        None => to_core(inner, now, from, group, stride),
        Some(InterceptedDatagram::Nothing) => {}
        Some(InterceptedDatagram::Punch(session)) => {
            if let Some(beside) = inner.relays.peer_sessions.get_mut(&session) {
                beside.rendezvous.on_punch(from.link, from.remote);
            }
        }
        Some(InterceptedDatagram::Relayed(stands)) => {
            // The inner packets are moved together, so that the core handles them as one run.
            let mut end = 0;
            let mut at = 0;
            while at + RELAY_HEADER_BYTES < group.len() {
                let next = (at + stride).min(group.len());
                group.copy_within(at + RELAY_HEADER_BYTES..next, end);
                end += next - at - RELAY_HEADER_BYTES;
                at = next;
            }
            let within = stride - RELAY_HEADER_BYTES;
            to_core(inner, now, stands, &mut group[..end], within);
        }
    }
}

/// Sends a batch of the core to the address that stands for a relay. Datagrams for which the socket
/// has no room are dropped, as on any path.
pub(crate) fn send(
    inner: &mut DriverCore,
    now: Time,
    relay: RelayId,
    transmit: &Transmit,
    bytes: &[u8],
) {
    let route = inner
        .relays
        .relay_client
        .relay_addresses(&inner.core, transmit.link, relay);
    let Some(route) = route else { return };
    let mut wrapped = std::mem::take(&mut inner.relays.scratch);
    wrapped.clear();
    for packet in bytes.chunks(transmit.segment) {
        wrap_relayed(relay, packet, &mut wrapped);
    }
    let stride = transmit.segment + RELAY_HEADER_BYTES;
    let DriverCore {
        sockets, streams, ..
    } = inner;
    if let Err(error) = put_relayed(sockets, streams, &route, &wrapped, stride)
        && d2tp_udp::is_too_big(&error)
    {
        inner.core.on_too_big(now, transmit, transmit.segment);
    }
    inner.relays.scratch = wrapped;
}

/// Starts the rendezvous with a peer that opened a session: `flow` carries both sides' addresses.
pub(crate) fn start_rendezvous(
    shared: &Arc<DriverShared>,
    inner: &mut DriverCore,
    session: SessionId,
    flow: FlowId,
) {
    let Some(peer) = inner.core.session(session).map(|s| s.peer()) else {
        return;
    };
    inner.flows.insert((session, flow), FlowEntry::default());
    let flow = Flow::new(shared.clone(), session, flow, peer.0);
    let beside = PeerSession::new(Rendezvous::listener()).with_lines(shared, flow);
    inner.relays.peer_sessions.insert(session, beside);
    shared.notify_activity();
}

/// Handles the lines in which a peer states its addresses.
async fn read_lines(shared: Weak<DriverShared>, mut flow: Flow) {
    let session = flow.session_id();
    let mut text: Vec<u8> = Vec::new();
    while let Ok(Some(chunk)) = flow.read_chunk().await {
        text.extend_from_slice(&chunk);
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let mut inner = shared.inner.lock();
        while let Some(end) = text.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line[..end]);
            if let Some(beside) = inner.relays.peer_sessions.get_mut(&session) {
                beside.rendezvous.handle_line(clock::now(), &line);
            }
        }
        update_rendezvous(&mut inner, clock::now());
        drop(inner);
        shared.wake();
        shared.notify_activity();
        if text.len() > LINE_BYTES_MAX {
            return;
        }
    }
}

/// Updates the paths of all peer sessions from this device's current addresses. Returns whether there
/// are any.
pub(crate) fn update_rendezvous(inner: &mut DriverCore, now: Time) -> bool {
    let Some(main) = inner.relays.server_session else {
        return false;
    };
    if inner.relays.peer_sessions.is_empty() {
        return false;
    }
    let stats = inner.core.session(main).map(|s| s.path_stats());
    let free = |p: &PathStats| p.state == PathState::Active && !p.gated;
    let mut paths: Vec<PathStats> = stats.into_iter().flatten().filter(free).collect();
    let is_stream = |p: &PathStats| StreamPathId::of(&p.addresses.remote).is_some();
    // R-RELAY-8: a stream is the last choice.
    paths.sort_by_key(|p| (is_stream(p), p.rtt));
    let seen = paths
        .iter()
        .filter(|p| !is_stream(p))
        .filter_map(|p| inner.relays.observed_addresses.get(&p.id));
    let mut addresses: Vec<SocketAddr> = seen.copied().collect();
    // Before the relay has reported the address that it sees, this device's own addresses are only
    // half of the answer, and would delay the rest.
    let is_seen = !addresses.is_empty();
    let mut links: Vec<(LinkId, RendezvousReach)> = Vec::new();
    for path in &paths {
        let link = path.addresses.link;
        if is_stream(path) {
            links.push((link, RendezvousReach::RelayOnly));
            continue;
        }
        let Some(socket) = inner.sockets.get(&link) else {
            continue;
        };
        let own = socket.io.local_addr();
        links.push((link, RendezvousReach::of_socket(&own)));
        if is_seen && !own.ip().is_unspecified() && !addresses.contains(&own) {
            addresses.push(own);
        }
    }
    let mut beside = std::mem::take(&mut inner.relays.peer_sessions);
    for (session, beside) in &mut beside {
        let rendezvous = &mut beside.rendezvous;
        rendezvous.set_local_addresses(now, links.clone(), addresses.clone());
        let _ = inner
            .core
            .with(*session, |s| rendezvous.update_paths(now, s));
        if let Some(flow) = beside.lines
            && let Some(line) = rendezvous.poll_line()
        {
            let _ = inner.core.with(*session, |s| s.write(flow, line.into()));
        }
        while let Some((link, to, punch)) = rendezvous.poll_punch(now) {
            if let Some(socket) = inner.sockets.get(&link) {
                let to = Addresses {
                    link,
                    local: None,
                    remote: to,
                };
                let bytes = punch_packet(punch);
                // A punch that cannot be sent counts as lost.
                let _ = put(&socket.io, &to, &bytes, bytes.len());
            }
        }
        let direct = rendezvous.is_direct();
        beside
            .direct
            .send_if_modified(|was| std::mem::replace(was, direct) != direct);
    }
    inner.relays.peer_sessions = beside;
    true
}

/// A punch packet, which has the form of the shortest DATA packet.
fn punch_packet(id: [u8; 8]) -> Vec<u8> {
    let mut bytes = vec![0; PUNCH_BYTES];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system has randomness");
    bytes[0] = 0b010 << 5 | bytes[0] & 0x1f;
    bytes[1..9].copy_from_slice(&id);
    bytes
}

impl PeerSession {
    /// Adds the flow for the lines of the rendezvous.
    pub(crate) fn with_lines(mut self, shared: &Arc<DriverShared>, flow: Flow) -> PeerSession {
        self.lines = Some(flow.flow_id());
        let shared = Arc::downgrade(shared);
        self.reader_task = Some(AbortOnDrop(tokio::spawn(read_lines(shared, flow))));
        self
    }
}
