//! Datagrams of the sockets that are not the core's: relayed packets, at either end of a relay, and
//! punches.
//!
//! ```text
//!  socket ─▶ take_in ─┬─ id of a relay of ours ──▶ hosting: on to a device or an address
//!                     ├─ id of a relay we use ───▶ core, as from the address that stands for it
//!                     ├─ id of a punch ──────────▶ the rendezvous it is for
//!                     └─ all else ───────────────▶ core
//! ```
//!
//! A device's sessions with others, beside the one with its server, live in the same core and leave by
//! the same sockets: so a relay knows them by the address, and a NAT's hole is where it was seen.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use d2tp_session::{
    Addresses, FlowId, IncomingDatagram, InterceptedDatagram, LINE_BYTES_MAX, LinkId, PUNCH_BYTES,
    PathId, PathState, PathStats, RELAY_HEADER_BYTES, RelayClient, RelayId, Rendezvous,
    SessionEvent, SessionId, Time, Transmit, relayed_id, wrap_relayed,
};
use d2tp_udp::LinkSocket;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;

use crate::clock;
use crate::engine::{Entry, Inner, Shared};
use crate::flow::Flow;
use crate::hosting::{self, Hosted};

/// What one system call takes at most.
const BATCH_BYTES_MAX: usize = 65_000;
/// Events of a session that its owner has not read.
const EVENTS_MAX: usize = 256;

/// A task that ends with whoever it is for.
pub(crate) struct Tied(pub(crate) JoinHandle<()>);

impl Drop for Tied {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A session beside the one with the server.
pub(crate) struct Beside {
    pub(crate) rendezvous: Rendezvous,
    /// The flow for the rendezvous' lines, if there is one.
    lines: Option<FlowId>,
    pub(crate) relay: Option<RelayId>,
    /// Whether a direct path answers.
    pub(crate) direct: watch::Sender<bool>,
    pub(crate) events: broadcast::Sender<(Time, SessionEvent)>,
    /// Reads those lines.
    _reading: Option<Tied>,
}

/// What this host relays, and what is relayed for it.
#[derive(Default)]
pub(crate) struct Relaying {
    /// As a relay.
    pub(crate) hosted: Option<Hosted>,
    /// As one who uses relays.
    pub(crate) guest: RelayClient,
    /// A device's session with its server, which is the relay.
    pub(crate) main: Option<SessionId>,
    pub(crate) beside: BTreeMap<SessionId, Beside>,
    /// Peers may open sessions and flows.
    pub(crate) listens: bool,
    /// Where the relay sees our paths.
    seen: BTreeMap<PathId, SocketAddr>,
    scratch: Vec<u8>,
}

impl Relaying {
    fn is_idle(&self) -> bool {
        let hosts_none = self.hosted.as_ref().is_none_or(|h| h.relays.is_empty());
        hosts_none && self.guest.is_idle()
    }

    /// Whether a peer begins a session with us by this flow: its first.
    pub(crate) fn begins(&self, session: SessionId, flow: FlowId) -> bool {
        self.hears(session) && flow.by_initiator() && flow.counter() == 0
    }

    /// Whether flows that are opened to us in this session are taken.
    pub(crate) fn hears(&self, session: SessionId) -> bool {
        self.listens && self.is_beside(session)
    }

    /// Whether it is not the session that this host's device is for.
    pub(crate) fn is_beside(&self, session: SessionId) -> bool {
        self.main.is_some_and(|main| main != session)
    }

    /// Who is told of a session's events; none if nobody wants to know.
    pub(crate) fn teller<'a>(
        &'a self,
        session: SessionId,
        usual: &'a broadcast::Sender<(Time, SessionEvent)>,
    ) -> Option<&'a broadcast::Sender<(Time, SessionEvent)>> {
        if !self.is_beside(session) {
            return Some(usual);
        }
        self.beside.get(&session).map(|b| &b.events)
    }

    /// Something happened in a session.
    pub(crate) fn note(&self, event: &SessionEvent) {
        if let (Some(hosted), SessionEvent::PathUp { .. } | SessionEvent::PathDown { .. }) =
            (&self.hosted, event)
        {
            hosted.moved.send_modify(|n| *n += 1);
        }
    }

    /// A session is over.
    pub(crate) fn forget(&mut self, session: SessionId) {
        self.guest.forget_punches(session);
        if let Some(relay) = self.beside.remove(&session).and_then(|b| b.relay) {
            self.guest.leave_relay(relay);
        }
    }

    /// The host stops: tasks that hold on to it end.
    pub(crate) fn stop(&mut self) {
        self.beside.clear();
        self.hosted = None;
    }

    /// The relay sees a path of ours there.
    pub(crate) fn see(&mut self, path: PathId, at: SocketAddr) {
        self.seen.insert(path, at);
        // Path ids grow: of the oldest there is none any more.
        while self.seen.len() > 2 * d2tp_session::PATHS_MAX {
            self.seen.pop_first();
        }
    }

    /// When something is to be done by itself.
    pub(crate) fn next_at(&self) -> Option<Time> {
        let all = self.beside.values().map(|b| b.rendezvous.next_at());
        all.min().filter(|at| *at != Time::NEVER)
    }
}

impl Beside {
    pub(crate) fn new(rendezvous: Rendezvous) -> Beside {
        Beside {
            rendezvous,
            lines: None,
            relay: None,
            direct: watch::channel(false).0,
            events: broadcast::channel(EVENTS_MAX).0,
            _reading: None,
        }
    }

    /// With a flow for the rendezvous' lines.
    pub(crate) fn with_lines(mut self, shared: &Arc<Shared>, flow: Flow) -> Beside {
        self.lines = Some(flow.flow_id());
        let shared = Arc::downgrade(shared);
        self._reading = Some(Tied(tokio::spawn(read_lines(shared, flow))));
        self
    }
}

/// Whether an error of a send to this address says something about the link: an address that is only
/// tried may have no route.
pub(crate) fn blames_link(inner: &Inner, transmit: &Transmit) -> bool {
    let relaying = &inner.relaying;
    let Some(main) = relaying.main.filter(|_| !relaying.beside.is_empty()) else {
        return true;
    };
    let paths = inner.core.session(main).map(|s| s.path_stats());
    let mut paths = paths.into_iter().flatten();
    paths.any(|p| p.addresses.remote == transmit.remote)
}

/// Takes in datagrams of one sender that lie back to back.
pub(crate) fn take_in(
    inner: &mut Inner,
    now: Time,
    from: Addresses,
    run: &mut [u8],
    stride: usize,
) {
    if inner.relaying.is_idle() {
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

fn to_core(inner: &mut Inner, now: Time, addresses: Addresses, bytes: &mut [u8], stride: usize) {
    let incoming = IncomingDatagram { addresses, bytes };
    inner.core.handle_datagrams(now, incoming, stride);
}

/// Datagrams that have one id.
fn take_group(
    inner: &mut Inner,
    now: Time,
    from: Addresses,
    id: RelayId,
    group: &mut [u8],
    stride: usize,
) {
    let hosted = inner.relaying.hosted.as_ref();
    if hosted.is_some_and(|h| h.relays.contains(id)) {
        return hosting::pass_on(inner, id, &from, group, stride);
    }
    let first = &group[..stride.min(group.len())];
    match inner
        .relaying
        .guest
        .classify_datagram(&inner.core, &from, first)
    {
        None => to_core(inner, now, from, group, stride),
        Some(InterceptedDatagram::Nothing) => {}
        Some(InterceptedDatagram::Punch(session)) => {
            if let Some(beside) = inner.relaying.beside.get_mut(&session) {
                beside.rendezvous.on_punch(from.link, from.remote);
            }
        }
        Some(InterceptedDatagram::Relayed(stands)) => {
            // The packets within, back to back again: the core takes them as one run.
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

/// Sends a batch of the core's to the address that stands for a relay. What the socket does not take
/// is lost, as on any way.
pub(crate) fn send(
    inner: &mut Inner,
    now: Time,
    relay: RelayId,
    transmit: &Transmit,
    bytes: &[u8],
) {
    let way = inner
        .relaying
        .guest
        .relay_addresses(&inner.core, transmit.link, relay);
    let Some(way) = way else { return };
    let mut wrapped = std::mem::take(&mut inner.relaying.scratch);
    wrapped.clear();
    for packet in bytes.chunks(transmit.segment) {
        wrap_relayed(relay, packet, &mut wrapped);
    }
    let stride = transmit.segment + RELAY_HEADER_BYTES;
    if let Some(socket) = inner.sockets.get(&way.link)
        && let Err(error) = put(&socket.io, &way, &wrapped, stride)
        && d2tp_udp::is_too_big(&error)
    {
        inner.core.on_too_big(now, transmit.link, transmit.segment);
    }
    inner.relaying.scratch = wrapped;
}

/// Puts datagrams of one size on a socket, as far as it takes them.
pub(crate) fn put(io: &LinkSocket, to: &Addresses, bytes: &[u8], stride: usize) -> io::Result<()> {
    let segments = io.max_gso_segments().min(BATCH_BYTES_MAX / stride).max(1);
    for piece in bytes.chunks(segments * stride) {
        io.try_send(&d2tp_udp::Transmit {
            dst: to.remote,
            src_ip: to.local,
            ecn: None,
            contents: piece,
            segment_size: (piece.len() > stride).then_some(stride),
        })?;
    }
    Ok(())
}

/// A peer begins a session with us: `flow` is for what the two tell each other about where they are.
pub(crate) fn meet(shared: &Arc<Shared>, inner: &mut Inner, session: SessionId, flow: FlowId) {
    let Some(peer) = inner.core.session(session).map(|s| s.peer()) else {
        return;
    };
    inner.flows.insert((session, flow), Entry::default());
    let flow = Flow::new(shared.clone(), session, flow, peer.0);
    let beside = Beside::new(Rendezvous::listener()).with_lines(shared, flow);
    inner.relaying.beside.insert(session, beside);
    shared.stir();
}

/// Hears what a peer says of where it is.
async fn read_lines(shared: Weak<Shared>, mut flow: Flow) {
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
            if let Some(beside) = inner.relaying.beside.get_mut(&session) {
                beside.rendezvous.handle_line(clock::now(), &line);
            }
        }
        tend(&mut inner, clock::now());
        drop(inner);
        shared.wake();
        shared.stir();
        if text.len() > LINE_BYTES_MAX {
            return;
        }
    }
}

/// Brings the ways of all sessions beside the main one in line with where this device is. Whether
/// there are any.
pub(crate) fn tend(inner: &mut Inner, now: Time) -> bool {
    let Some(main) = inner.relaying.main else {
        return false;
    };
    if inner.relaying.beside.is_empty() {
        return false;
    }
    let stats = inner.core.session(main).map(|s| s.path_stats());
    let free = |p: &PathStats| p.state == PathState::Active && !p.gated;
    let mut paths: Vec<PathStats> = stats.into_iter().flatten().filter(free).collect();
    paths.sort_by_key(|p| p.rtt);
    let seen = paths.iter().filter_map(|p| inner.relaying.seen.get(&p.id));
    let mut addresses: Vec<SocketAddr> = seen.copied().collect();
    // Before the relay has said where it sees us, our own addresses are half an answer: a peer that heard
    // them would hear the rest later than it could.
    let is_seen = !addresses.is_empty();
    let mut links: Vec<(LinkId, bool)> = Vec::new();
    for path in &paths {
        let link = path.addresses.link;
        let Some(socket) = inner.sockets.get(&link) else {
            continue;
        };
        let own = socket.io.local_addr();
        links.push((link, own.is_ipv6()));
        if is_seen && !own.ip().is_unspecified() && !addresses.contains(&own) {
            addresses.push(own);
        }
    }
    let mut beside = std::mem::take(&mut inner.relaying.beside);
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
                // One that does not leave is one that is lost.
                let _ = put(&socket.io, &to, &bytes, bytes.len());
            }
        }
        let direct = rendezvous.is_direct();
        beside
            .direct
            .send_if_modified(|was| std::mem::replace(was, direct) != direct);
    }
    inner.relaying.beside = beside;
    true
}

/// A punch looks like the shortest DATA packet there is.
fn punch_packet(id: [u8; 8]) -> Vec<u8> {
    let mut bytes = vec![0; PUNCH_BYTES];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system has randomness");
    bytes[0] = 0b010 << 5 | bytes[0] & 0x1f;
    bytes[1..9].copy_from_slice(&id);
    bytes
}
