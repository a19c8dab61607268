//! All sessions of a host: dispatches datagrams to them, admits clients, and keeps hibernated
//! sessions.
//!
//! ```text
//!  datagram ─▶ kind? ─▶ SYN, WAKE   MACs ▸ load? cookie, source's part ▸ Noise ▸ admitted? ▸ epoch ▸ half-open
//!                       DATA     cid ▸ session | half-open (first packet: confirm) | UNKNOWN
//!                       SYN+ACK, COOKIE, UNKNOWN   cid ▸ the session in handshake
//! ```

mod enrolment;
pub(crate) mod handshakes;
mod memory;
mod ownership;
mod records;
mod restart;
mod workers;

pub use enrolment::UNADMITTED_WINDOW_BYTES;
pub use ownership::OWNERSHIP_REQUESTS_MAX;
pub use restart::RESTART_NOTICES_MAX;
pub use workers::Misdirected;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::Arc;

use d2tp_seal::{CookieSecrets, PublicKey, Rng, SecretKey, TicketIssuer};
use d2tp_time::{Span, Time};
use d2tp_wire::{CID_BYTES, Cid, FlowId, PacketKind, PathId, VERSION};
use hashbrown::HashMap;
use slab::Slab;

use crate::cid_share::CidShare;
use crate::config::{EARLY_SEEN_MAX, EndpointConfig};
use crate::event::SessionEvent;
use crate::half_open::HalfOpenTable;
use crate::handshake_budget::HandshakeBudget;
use crate::hibernated::{HibernatedSessions, InstanceKey};
use crate::link::Addresses;
use crate::memory_pool::MemoryCharge;
use crate::memory_waiters::MemoryWaiters;
use crate::pending_lookup::LookupQueue;
use crate::recent_map::RecentMap;
use crate::session::Session;
use crate::session_id::SessionId;
use crate::session_state::{CidChange, Role, SessionState};
use crate::stream_path_state::StreamPathId;
use crate::trace::{SessionTrace, TRACE_RECORDS_MAX, TraceLevel, TraceRecord};
use crate::transmit::Transmit;

/// The most stateless answers that wait to be sent. Further ones are dropped, and their senders try
/// again.
const ANSWERS_MAX: usize = 256;
/// The size of an UNKNOWN.
const UNKNOWN_BYTES: usize = 1 + CID_BYTES + 16;
/// The most UNKNOWN answers of a host per second.
const UNKNOWN_PER_SECOND: u32 = 200;
/// The length up to which the transmit queue serves sessions in order without exceptions for ACKs:
/// at 1,000 Mb/s and 64 kB each, one turn of this many sessions takes 30 ms.
const LINE_SHORT: usize = 64; // a guess

/// There is no such session, or not any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such session")]
pub struct UnknownSession;

/// Why a session cannot hibernate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HibernateError {
    /// There is no such session, or not any more.
    #[error(transparent)]
    Unknown(#[from] UnknownSession),
    /// The flow holds bytes that cannot be read again from their source (R-SUSPEND-4).
    #[error("flow {0:?} holds bytes that only this process has: read or flush it first")]
    FlowNotReplayable(FlowId),
    /// The handshake of the session's early data is not confirmed.
    #[error("the device has not confirmed its handshake yet")]
    Unconfirmed,
}

/// Which hosts may open sessions.
#[derive(Clone, Debug, Default)]
pub enum Admission {
    /// No host may connect: this endpoint only opens sessions itself.
    #[default]
    Nobody,
    /// Any host may connect.
    Anybody,
    /// Only these hosts may connect.
    Only(BTreeSet<PublicKey>),
}

impl Admission {
    pub(crate) fn admits(&self, key: &PublicKey) -> bool {
        match self {
            Admission::Nobody => false,
            Admission::Anybody => true,
            Admission::Only(keys) => keys.contains(key),
        }
    }
}

/// A datagram as the driver received it. It is decrypted in place.
#[derive(Debug)]
pub struct IncomingDatagram<'a> {
    /// The link and the addresses that the datagram came over.
    pub addresses: Addresses,
    /// The bytes of the UDP datagram.
    pub bytes: &'a mut [u8],
}

#[derive(Clone, Copy, Debug)]
enum CidRoute {
    Session {
        id: SessionId,
        path: PathId,
        generation: u32,
    },
    HalfOpen {
        index: u32,
        path: PathId,
    },
}

/// A hasher for connection ids. This host chose them at random, so their eight bytes serve as the
/// hash.
#[derive(Default)]
struct CidHasher(u64);
impl Hasher for CidHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut b = [0; 8];
            b[..chunk.len()].copy_from_slice(chunk);
            self.0 = self.0.rotate_left(5) ^ u64::from_le_bytes(b);
        }
        self.0 = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    fn write_usize(&mut self, _: usize) {}
}

struct SessionSlot {
    session: Session,
    serial: u32,
    timer: Time,
    ready: bool,
    /// Whether the session is in the queue of due ACKs.
    in_ack_due_queue: bool,
    /// Flows that are charged to the session's client key.
    flows: usize,
}

/// All D2TP sessions of a host in one process.
pub struct Endpoint {
    config: Arc<EndpointConfig>,
    local: SecretKey,
    admission: Admission,
    rng: Rng,
    cookie_secrets: CookieSecrets,
    shared_cookie_secrets: Arc<CookieSecrets>,
    ticket_issuer: TicketIssuer,
    cookie_until: Time,
    handshake_budget: HandshakeBudget,
    sessions: Slab<SessionSlot>,
    next_serial: u32,
    routes: HashMap<Cid, CidRoute, BuildHasherDefault<CidHasher>>,
    /// A server's sessions by client key and instance.
    by_key: BTreeMap<InstanceKey, SessionId>,
    hibernated: HibernatedSessions,
    /// Whether the owner has records that are not loaded. Sessions of unknown devices are looked up
    /// there first.
    records_elsewhere: bool,
    pending_lookups: LookupQueue,
    /// Whether other servers share the records, so that every handshake needs the ownership of its session.
    records_shared: bool,
    ownership_requests: ownership::OwnershipQueue,
    /// Handshakes that wait for the ownership of their sessions.
    ownership_asked: usize,
    /// What arrived here and belongs to other workers of the host.
    misdirected: VecDeque<(u16, Misdirected)>,
    /// Handshakes that were passed to other workers, by the device's connection id.
    passed_handshakes: RecentMap<Cid, workers::PassedHandshake>,
    /// The seed from which workers of one host derive the same cookie secrets.
    cookie_seed: Option<[u8; 32]>,
    /// How many sessions clients that are not admitted may have (R-HS-19).
    unadmitted_max: usize,
    /// Sessions of clients that were not admitted when they connected, and since when they exist.
    unadmitted: BTreeMap<SessionId, Time>,
    /// Sessions that were restored for a handshake that is not confirmed. Their records remain.
    tentative: BTreeSet<SessionId>,
    /// Flows, awake and hibernated, of each client key that has an awake session and any flow
    /// (R-QUOTA-2).
    flows_by_key: BTreeMap<PublicKey, usize>,
    half_open: HalfOpenTable,
    /// Half-open handshakes that may have packets to send.
    early: VecDeque<usize>,
    /// Sessions whose early data was accepted (R-EARLY-2).
    early_seen: RecentMap<InstanceKey, ()>,
    timers: BTreeSet<(Time, SessionId)>,
    ready: VecDeque<SessionId>,
    /// Sessions with a due ACK in a long transmit queue: ACKs cannot wait for the rest of it.
    ack_due_queue: VecDeque<SessionId>,
    answers: VecDeque<(Addresses, Vec<u8>)>,
    /// The packets that announce a restart; they leave last.
    restart_notices: VecDeque<(Addresses, Vec<u8>)>,
    events: VecDeque<(SessionId, SessionEvent)>,
    syn_window: (Time, u32),
    unknown_window: (Time, u32),
    /// WAKEs of this second that may be replays (R-TICKET-4).
    wake_window: (Time, u32),
    /// The client that was refused last, until the owner takes it.
    pub(super) refused_client: Option<PublicKey>,
    /// The session whose changes are not yet registered.
    touched: Option<SessionId>,
    /// The memory charged for all sessions, without their flows.
    sessions_charge: MemoryCharge,
    memory_waiters: MemoryWaiters<SessionId>,
    /// Sessions that have sent by each stream.
    streams: BTreeMap<StreamPathId, BTreeSet<SessionId>>,
    trace_level: Option<TraceLevel>,
    traces: VecDeque<(SessionId, Time, TraceRecord)>,
}

impl Endpoint {
    /// An endpoint of the host with the key `local`. `seed` must be fresh. `token_seed` should
    /// survive restarts of a server, so that UNKNOWN for old sessions has the right token.
    pub fn new(
        config: EndpointConfig,
        local: SecretKey,
        admission: Admission,
        seed: [u8; 32],
        token_seed: [u8; 32],
    ) -> Self {
        let mut rng = Rng::new(seed);
        let public = local.public();
        let jar = CookieSecrets::new(&public, rng.array(), token_seed);
        let jar_arc = Arc::new(CookieSecrets::new(&public, [0; 32], token_seed));
        let salt = rng.fork().array();
        Endpoint {
            sessions_charge: config.memory.account(public).charge(),
            memory_waiters: MemoryWaiters::new(),
            streams: BTreeMap::new(),
            config: config.into(),
            local,
            admission,
            rng,
            cookie_secrets: jar,
            shared_cookie_secrets: jar_arc,
            ticket_issuer: TicketIssuer::new(token_seed),
            cookie_until: Time::ZERO,
            handshake_budget: HandshakeBudget::new(),
            sessions: Slab::new(),
            next_serial: 0,
            routes: HashMap::default(),
            by_key: BTreeMap::new(),
            hibernated: HibernatedSessions::new(salt),
            records_elsewhere: false,
            pending_lookups: LookupQueue::default(),
            records_shared: false,
            ownership_requests: ownership::OwnershipQueue::new(),
            ownership_asked: 0,
            misdirected: VecDeque::new(),
            passed_handshakes: RecentMap::new(workers::PASSED_HANDSHAKES_MAX),
            cookie_seed: None,
            unadmitted_max: 0,
            unadmitted: BTreeMap::new(),
            tentative: BTreeSet::new(),
            flows_by_key: BTreeMap::new(),
            half_open: HalfOpenTable::new(),
            early: VecDeque::new(),
            early_seen: RecentMap::new(EARLY_SEEN_MAX),
            timers: BTreeSet::new(),
            ready: VecDeque::new(),
            ack_due_queue: VecDeque::new(),
            answers: VecDeque::new(),
            restart_notices: VecDeque::new(),
            events: VecDeque::new(),
            syn_window: (Time::ZERO, 0),
            unknown_window: (Time::ZERO, 0),
            wake_window: (Time::ZERO, 0),
            refused_client: None,
            touched: None,
            trace_level: None,
            traces: VecDeque::new(),
        }
    }

    /// This host's public key.
    pub fn public_key(&self) -> PublicKey {
        self.local.public()
    }
    /// Changes which hosts may connect. Existing sessions remain.
    pub fn set_admission(&mut self, admission: Admission) {
        self.admission = admission;
    }
    /// The client that was refused last because it is not admitted, for the operator's log. Each is
    /// returned once.
    pub fn take_refused_client(&mut self) -> Option<PublicKey> {
        self.refused_client.take()
    }
    /// Sets the key material of tickets, which must survive restarts if sessions do. Without it, it is
    /// derived from the seed of the tokens.
    pub fn set_ticket_seed(&mut self, seed: [u8; 32]) {
        self.ticket_issuer = TicketIssuer::new(seed);
    }
    /// The numbers of awake, hibernated and half-open sessions.
    pub fn counts(&self) -> (usize, usize, usize) {
        (
            self.sessions.len(),
            self.hibernated.len(),
            self.half_open.len(),
        )
    }

    /// Creates a session with a server. Its handshake begins when [`Session::open_path`] gives it a
    /// link. `epochs` were reserved in the device's journal before (R-HS-2). If they do not begin
    /// at 1, another process used the instance before, and the server drops the flows that it still
    /// has of that process.
    pub fn connect(
        &mut self,
        now: Time,
        server: PublicKey,
        instance: u64,
        epochs: Range<u32>,
    ) -> SessionId {
        let is_new = epochs.start <= 1;
        let mut session = self.new_session(now, Role::Initiator, server, instance, epochs);
        session.inherits_instance = !is_new;
        self.insert(session)
    }

    /// Closes a session, with or without a network: see [`Session::close`]. The session is removed
    /// once [`SessionEvent::Closed`] was taken.
    ///
    /// # Errors
    /// There is no such session.
    pub fn close(&mut self, id: SessionId, code: u64, text: &str) -> Result<(), UnknownSession> {
        self.with(id, |s| s.close(code, text))
    }

    /// Limits the bytes that the peer may have in flight on a link: see
    /// [`Session::set_path_limit`].
    ///
    /// # Errors
    /// There is no such session.
    pub fn set_path_limit(
        &mut self,
        id: SessionId,
        link: crate::link::LinkId,
        bytes: Option<u64>,
    ) -> Result<(), UnknownSession> {
        self.with(id, |s| s.set_path_limit(link, bytes))
    }

    /// The number of a client's sessions: awake, hibernated and half open.
    fn instances_of(&self, peer: PublicKey) -> usize {
        let new = self.half_open.sessions_of(peer);
        let new = new.filter(|k| !self.by_key.contains_key(k) && !self.hibernated.contains(k));
        let awake = self.by_key.range((peer, 0)..=(peer, u64::MAX));
        let awake = awake.filter(|(k, _)| !self.hibernated.contains(k));
        self.hibernated.len_of(&peer) + awake.count() + new.count()
    }

    fn new_session(
        &mut self,
        now: Time,
        role: Role,
        peer: PublicKey,
        instance: u64,
        epochs: Range<u32>,
    ) -> Session {
        let mut session = Session::new(
            role,
            self.config.clone(),
            self.local.clone(),
            peer,
            instance,
            epochs,
            self.rng.fork(),
            now,
        );
        let trace = |level| Box::new(SessionTrace::new(level, now));
        session.trace = self.trace_level.map(trace);
        if role == Role::Responder {
            session.cookie_secrets = Some(self.shared_cookie_secrets.clone());
        }
        session
    }

    fn insert(&mut self, session: Session) -> SessionId {
        let serial = self.next_serial;
        self.next_serial = self.next_serial.wrapping_add(1);
        let index = self.sessions.insert(SessionSlot {
            session,
            serial,
            timer: Time::NEVER,
            ready: false,
            in_ack_due_queue: false,
            flows: 0,
        }) as u32;
        SessionId { index, serial }
    }

    fn slot(&mut self, id: SessionId) -> Option<&mut SessionSlot> {
        self.sessions
            .get_mut(id.index as usize)
            .filter(|s| s.serial == id.serial)
    }

    /// A session for reading; `None` if there is no such session.
    pub fn session(&self, id: SessionId) -> Option<&Session> {
        self.sessions
            .get(id.index as usize)
            .filter(|s| s.serial == id.serial)
            .map(|s| &s.session)
    }

    /// Calls `f` with a session, and then registers what changed, such as new packets to send.
    ///
    /// # Errors
    /// There is no such session.
    pub fn with<R>(
        &mut self,
        id: SessionId,
        f: impl FnOnce(&mut Session) -> R,
    ) -> Result<R, UnknownSession> {
        let slot = self.slot(id).ok_or(UnknownSession)?;
        let r = f(&mut slot.session);
        self.book_changes(id);
        Ok(r)
    }

    /// Registers a session's changes: its ids, its timer, its events and its place in the queue.
    fn book_changes(&mut self, id: SessionId) {
        let Some(slot) = self.sessions.get_mut(id.index as usize) else {
            return;
        };
        for change in slot.session.cid_changes.drain(..) {
            match change {
                CidChange::Add {
                    cid,
                    path,
                    generation,
                } => {
                    self.routes.insert(
                        cid,
                        CidRoute::Session {
                            id,
                            path,
                            generation,
                        },
                    );
                }
                CidChange::Remove(cid) => {
                    self.routes.remove(&cid);
                }
            }
        }
        // Events that wait here still count against the session's own limit.
        while let Some(event) = slot.session.poll_event() {
            slot.session.events_out += 1;
            self.events.push_back((id, event));
        }
        if let Some(trace) = &mut slot.session.trace {
            let room = TRACE_RECORDS_MAX.saturating_sub(self.traces.len());
            let mut taken = trace.take();
            self.traces
                .extend(taken.by_ref().take(room).map(|(at, r)| (id, at, r)));
            // A count of dropped records that finds no room is added to the next one.
            let dropped: u64 = taken.map(|(_, record)| record.record_count()).sum();
            trace.dropped += dropped;
        }
        let timer = slot.session.next_timeout();
        if timer != slot.timer {
            self.timers.remove(&(slot.timer, id));
            slot.timer = timer;
            if timer != Time::NEVER {
                self.timers.insert((timer, id));
            }
        }
        if std::mem::take(&mut slot.session.awaits_memory) {
            self.memory_waiters.push(id);
        }
        if !slot.ready {
            slot.ready = true;
            self.ready.push_back(id);
        }
        let key = (slot.session.peer, slot.session.instance);
        for index in self.half_open.of(&key) {
            if let Some(half) = self.half_open.get_mut(index)
                && let Some(early) = half.early.as_mut().filter(|e| !e.queued)
            {
                early.queued = true;
                self.early.push_back(index);
            }
        }
        // R-CLOSE-1: a session that the peer closed has one last packet to send, which it cannot
        // send itself.
        let leave = slot.session.close_ack.take();
        let (was, is) = (slot.flows, slot.session.flows.len());
        // The record counts for a tentatively restored session.
        let record = self.tentative.contains(&id) && !slot.session.is_unconfirmed();
        if was != is && slot.session.role == Role::Responder && !record {
            slot.flows = is;
            let peer = slot.session.peer;
            self.book_flows(peer, was, is);
        }
        if let Some((to, bytes)) = leave.map(|answer| *answer) {
            self.answer(to, bytes);
        }
    }

    fn drop_session(&mut self, id: SessionId) {
        if self.slot(id).is_none() {
            return;
        }
        let slot = self.sessions.remove(id.index as usize);
        self.timers.remove(&(slot.timer, id));
        self.tentative.remove(&id);
        self.memory_waiters.remove(id);
        for issued in slot.session.issued.values() {
            self.routes.remove(&issued.cid);
        }
        if let Some(handshake) = &slot.session.handshake {
            for cid in &handshake.cids {
                self.routes.remove(cid);
            }
        }
        let key = (slot.session.peer, slot.session.instance);
        self.book_flows(key.0, slot.flows, 0);
        if self.by_key.get(&key) == Some(&id) {
            self.by_key.remove(&key);
            if !self.is_client_awake(key.0) {
                self.flows_by_key.remove(&key.0);
            }
        }
    }

    /// Registers a client's session that is awake or about to be.
    fn enlist(&mut self, key: InstanceKey, id: SessionId) {
        let asleep = self.hibernated.flows_of(&key.0);
        if asleep > 0 && !self.is_client_awake(key.0) {
            self.flows_by_key.insert(key.0, asleep);
        }
        self.by_key.insert(key, id);
    }

    /// Whether a client has a session that is awake or about to be.
    fn is_client_awake(&self, client: PublicKey) -> bool {
        let mut awake = self.by_key.range((client, 0)..=(client, u64::MAX));
        awake.next().is_some()
    }

    /// The next event of any session. [`SessionEvent::Closed`] is the last one of its session.
    pub fn poll_event(&mut self) -> Option<(SessionId, SessionEvent)> {
        let (id, event) = self.events.pop_front()?;
        if let Some(slot) = self.slot(id) {
            slot.session.events_out -= 1;
        }
        if matches!(event, SessionEvent::Closed(_))
            && let Some(session) = self
                .session(id)
                .filter(|s| s.state() == SessionState::Closed)
        {
            let key = (session.peer, session.instance);
            if self.tentative.contains(&id) {
                if let Some(record) = self.hibernated.get(&key).and_then(|a| a.decode()) {
                    self.hibernated.expire_all_flows(&key, &record);
                }
                self.drop_hibernated(key);
            }
            self.drop_session(id);
        }
        if let SessionEvent::SendFrom { flow, .. } = event
            && let Some(slot) = self.slot(id)
        {
            slot.session.on_send_from_taken(flow);
        }
        Some((id, event))
    }

    /// Starts or stops tracing of all sessions. Records carry the session's id; take them with
    /// [`Endpoint::poll_trace`].
    pub fn set_trace(&mut self, now: Time, level: Option<TraceLevel>) {
        self.trace_level = level;
        for (_, slot) in &mut self.sessions {
            slot.session.trace = level.map(|level| Box::new(SessionTrace::new(level, now)));
        }
    }

    /// The next trace record, with its session and time.
    pub fn poll_trace(&mut self) -> Option<(SessionId, Time, TraceRecord)> {
        self.traces.pop_front()
    }

    /// Whether [`Endpoint::poll_event`] has an event.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    // ---- received datagrams ----

    /// Handles one received datagram.
    pub fn handle_datagram(&mut self, now: Time, incoming: IncomingDatagram<'_>) {
        let stride = incoming.bytes.len().max(1);
        self.handle_datagrams(now, incoming, stride);
    }

    /// Handles datagrams of one sender that follow each other in a buffer, `stride` bytes each (the
    /// last may be shorter). The sessions' changes are registered once, at the end.
    pub fn handle_datagrams(&mut self, now: Time, incoming: IncomingDatagram<'_>, stride: usize) {
        let IncomingDatagram { addresses, bytes } = incoming;
        for datagram in bytes.chunks_mut(stride.max(1)) {
            self.handle_one(now, addresses, datagram);
        }
        if let Some(id) = self.touched.take() {
            self.book_changes(id);
        }
        self.charge_sessions();
    }

    /// Defers registering a session's changes until another session is handled.
    fn touch(&mut self, id: SessionId) {
        if let Some(before) = self.touched.replace(id)
            && before != id
        {
            self.book_changes(before);
        }
    }

    #[inline]
    fn handle_one(&mut self, now: Time, addresses: Addresses, bytes: &mut [u8]) {
        let Some((kind, version, cid, _)) = PacketKind::split(bytes) else {
            return;
        };
        // R-WIRE-4: of other versions only a SYN is answered.
        if version != VERSION
            && !matches!(kind, PacketKind::Data | PacketKind::Syn | PacketKind::Wake)
        {
            return;
        }
        match kind {
            PacketKind::Data => self.on_data(now, addresses, cid, bytes),
            PacketKind::Syn | PacketKind::Wake => {
                self.on_syn(now, addresses, kind, version, cid, bytes);
            }
            PacketKind::SynAck | PacketKind::Cookie | PacketKind::Unknown => {
                let Some(CidRoute::Session {
                    id,
                    path,
                    generation,
                }) = self.routes.get(&cid).copied()
                else {
                    return self.on_stray_unknown(now, kind, cid, bytes);
                };
                let Some(slot) = self.slot(id) else { return };
                let body = &bytes[1 + CID_BYTES..];
                match kind {
                    PacketKind::SynAck => slot.session.handle_syn_ack(now, addresses, body),
                    PacketKind::Cookie => slot.session.handle_cookie(now, body),
                    _ => slot.session.handle_unknown(now, path, generation, body),
                }
                self.book_changes(id);
            }
            PacketKind::Version => {}
        }
    }

    /// Handles an UNKNOWN that carries the peer's connection id, to which the packet was sent,
    /// instead of this host's: finds the path.
    fn on_stray_unknown(&mut self, now: Time, kind: PacketKind, cid: Cid, bytes: &[u8]) {
        // A host that is only a server finds all sessions by key and need not search, so that a
        // flood of stray packets costs nothing (R-UNKNOWN-3).
        if kind != PacketKind::Unknown || self.by_key.len() == self.sessions.len() {
            return;
        }
        let found = self.sessions.iter().find_map(|(index, s)| {
            let path = s.session.paths.iter().find(|p| p.cid_remote == cid)?.id;
            Some((
                SessionId {
                    index: index as u32,
                    serial: s.serial,
                },
                path,
                s.session.generation,
            ))
        });
        if let Some((id, path, generation)) = found
            && let Some(slot) = self.slot(id)
        {
            slot.session
                .handle_unknown(now, path, generation, &bytes[1 + CID_BYTES..]);
            self.book_changes(id);
        }
    }

    #[inline]
    fn on_data(&mut self, now: Time, from: Addresses, cid: Cid, bytes: &mut [u8]) {
        match self.routes.get(&cid).copied() {
            Some(CidRoute::Session {
                id,
                path,
                generation,
            }) => {
                // Changes of the client's other sessions count for this one (R-QUOTA-2).
                if let Some(before) = self.touched.take_if(|before| *before != id) {
                    self.book_changes(before);
                }
                let Some(slot) = self.slot(id) else { return };
                slot.session.handle_data(now, path, generation, from, bytes);
                if slot.session.cid_changes.is_empty() {
                    self.touch(id);
                } else {
                    self.book_changes(id);
                }
            }
            Some(CidRoute::HalfOpen { index, path }) => {
                self.confirm(now, from, index as usize, path, bytes);
            }
            None if self.pass_datagram(from, cid, bytes) => {}
            None => self.answer_unknown(now, from, cid, bytes.len()),
        }
    }

    /// R-UNKNOWN-2: answers an unknown connection id with a smaller packet, at a limited rate. R-UNKNOWN-5: an id that
    /// another host issued gets no answer, because that host may have the session.
    fn answer_unknown(&mut self, now: Time, from: Addresses, cid: Cid, trigger: usize) {
        let is_anothers = |share: CidShare| !share.contains(cid.0);
        if matches!(self.admission, Admission::Nobody)
            || trigger <= UNKNOWN_BYTES
            || self.config.cid_share.is_some_and(is_anothers)
        {
            return;
        }
        if now.since(self.unknown_window.0) >= Span::from_secs(1) {
            self.unknown_window = (now, 0);
        }
        self.unknown_window.1 += 1;
        if self.unknown_window.1 as usize > self.part_of_host(UNKNOWN_PER_SECOND as usize) {
            return;
        }
        let out = self.unknown_packet(cid);
        self.answer(from, out);
    }

    /// The UNKNOWN that says that this host has no session for a connection id.
    fn unknown_packet(&self, cid: Cid) -> Vec<u8> {
        let mut out = Vec::with_capacity(UNKNOWN_BYTES);
        out.push(PacketKind::Unknown.first_byte());
        out.extend(cid.0);
        out.extend(self.shared_cookie_secrets.token(cid));
        out
    }

    fn answer(&mut self, to: Addresses, bytes: Vec<u8>) {
        if self.answers.len() < ANSWERS_MAX {
            self.answers.push_back((to, bytes));
        }
    }

    // ---- transmission and timers ----

    /// Writes the next batch of any session into `buf`; `None` if there is nothing to send now.
    pub fn poll_transmit(&mut self, now: Time, buf: &mut [u8]) -> Option<Transmit> {
        if let Some((to, bytes)) = self.answers.pop_front() {
            return Some(stateless(to, &bytes, buf));
        }
        if let Some(transmit) = self.poll_early(now, buf) {
            return Some(transmit);
        }
        while let Some(id) = self.ack_due_queue.pop_front() {
            let Some(slot) = self.slot(id) else { continue };
            slot.in_ack_due_queue = false;
            if let Some(transmit) = slot.session.poll_due_ack(now, buf) {
                self.note_stream(id, &transmit);
                return Some(Transmit {
                    session: Some(id),
                    ..transmit
                });
            }
        }
        while let Some(id) = self.ready.pop_front() {
            let Some(slot) = self.slot(id) else { continue };
            slot.ready = false;
            let transmit = slot.session.poll_transmit(now, buf);
            if let Some(transmit) = &transmit {
                self.note_stream(id, transmit);
                // The session may have more to send: it moves to the end of the queue, so that
                // sessions take turns.
                self.book_changes(id);
                return Some(Transmit {
                    session: Some(id),
                    ..*transmit
                });
            }
            self.book_changes(id);
            if self.ready.back() == Some(&id) {
                self.ready.pop_back();
                if let Some(slot) = self.slot(id) {
                    slot.ready = false;
                }
            }
        }
        let (to, notice) = self.restart_notices.pop_front()?;
        Some(stateless(to, &notice, buf))
    }

    /// Records which session sends by a stream.
    fn note_stream(&mut self, id: SessionId, transmit: &Transmit) {
        if let Some(stream) = StreamPathId::of(&transmit.remote) {
            self.streams.entry(stream).or_default().insert(id);
        }
    }

    /// Records that the driver accepts `room` more bytes for a stream.
    pub fn on_stream_room(&mut self, stream: StreamPathId, room: u64) {
        let sessions = self.streams.get(&stream).cloned().unwrap_or_default();
        for id in sessions {
            if self.with(id, |s| s.set_stream_room(stream, room)).is_err()
                && let Some(sessions) = self.streams.get_mut(&stream)
            {
                sessions.remove(&id);
            }
        }
    }

    /// Handles the end of a stream, which makes its paths unusable (R-STREAM-4).
    pub fn on_stream_closed(&mut self, now: Time, stream: StreamPathId) {
        for id in self.streams.remove(&stream).unwrap_or_default() {
            let _ = self.with(id, |s| s.on_stream_closed(now, stream));
        }
    }

    /// The admitted client whose session sends by the stream, if there is one.
    pub fn client_of_stream(&self, stream: StreamPathId) -> Option<PublicKey> {
        let sessions = self.streams.get(&stream)?.iter();
        let mut clients = sessions.filter_map(|id| Some(self.session(*id)?.peer()));
        clients.find(|client| self.is_admitted(client))
    }

    /// The streams by which sessions of this client send, and sessions of nobody else.
    pub fn streams_of(&self, client: PublicKey) -> Vec<StreamPathId> {
        let is_its = |id: &SessionId| self.session(*id).is_some_and(|s| s.peer() == client);
        let streams = self.streams.iter();
        let its =
            streams.filter(|(_, sessions)| !sessions.is_empty() && sessions.iter().all(is_its));
        its.map(|(stream, _)| *stream).collect()
    }

    /// Writes the next early packet of a half-open handshake.
    fn poll_early(&mut self, now: Time, buf: &mut [u8]) -> Option<Transmit> {
        while let Some(index) = self.early.front().copied() {
            let half = self.half_open.get_mut(index);
            if let Some(half) = half
                && let Some(early) = &mut half.early
                && let Some(slot) = self.sessions.get_mut(early.session.index as usize)
                && slot.serial == early.session.serial
            {
                let len = early.write(now, &mut half.keys, &mut slot.session, buf);
                if len > 0 {
                    return Some(Transmit {
                        session: None,
                        link: half.addresses.link,
                        local: half.addresses.local,
                        remote: half.addresses.remote,
                        len,
                        segment: len,
                    });
                }
                early.queued = false;
            }
            self.early.pop_front();
        }
        None
    }

    /// When [`Endpoint::handle_timeouts`] wants to be called next.
    pub fn next_timeout(&self) -> Time {
        let timer = self.timers.first().map_or(Time::NEVER, |(at, _)| *at);
        let timer = timer.min(self.hibernated.next_timeout());
        let timer = timer.min(self.memory_waiters.next_timeout());
        if self.tentative.is_empty() {
            timer
        } else {
            timer.min(self.half_open.next_expiry())
        }
    }

    /// Handles all timers that are due.
    pub fn handle_timeouts(&mut self, now: Time) {
        let due: Vec<SessionId> = self
            .timers
            .iter()
            .take_while(|(at, _)| *at <= now)
            .map(|(_, id)| *id)
            .collect();
        for id in due {
            let Some(slot) = self.slot(id) else { continue };
            slot.session.handle_timeouts(now);
            self.book_changes(id);
            // A timer that is still due means that there is something to send, and the session is
            // in the queue for that. Until its turn its timers need no attention; otherwise each
            // call would visit thousands of sessions.
            if let Some(slot) = self.sessions.get_mut(id.index as usize)
                && slot.ready
                && slot.timer <= now
            {
                self.timers.remove(&(slot.timer, id));
                slot.timer = Time::NEVER;
                if self.ready.len() > LINE_SHORT && !slot.in_ack_due_queue {
                    slot.in_ack_due_queue = true;
                    self.ack_due_queue.push_back(id);
                }
            }
        }
        self.check_memory_waiters(now);
        self.expire_half_open(now);
        self.charge_sessions();
        for (peer, was, is) in self.hibernated.expire(now, self.config.hibernated_age_max) {
            self.book_flows(peer, was, is);
        }
    }

    /// Handles the error of a link's socket that refused a datagram of `size` bytes of this batch. The refusal is about the
    /// way to the batch's destination, and says nothing of other sessions.
    pub fn on_too_big(&mut self, now: Time, transmit: &Transmit, size: usize) {
        if let Some(slot) = transmit.session.and_then(|id| self.slot(id)) {
            slot.session.on_too_big(now, transmit.link, size);
        }
    }

    /// The ids of all awake sessions.
    pub fn ids(&self) -> Vec<SessionId> {
        self.sessions
            .iter()
            .map(|(index, s)| SessionId {
                index: index as u32,
                serial: s.serial,
            })
            .collect()
    }
}

/// Writes a packet that belongs to no session.
fn stateless(to: Addresses, bytes: &[u8], buf: &mut [u8]) -> Transmit {
    buf[..bytes.len()].copy_from_slice(bytes);
    Transmit {
        session: None,
        link: to.link,
        local: to.local,
        remote: to.remote,
        len: bytes.len(),
        segment: bytes.len(),
    }
}
