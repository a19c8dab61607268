//! All sessions of a host: whose datagram is it, who may come in, who sleeps as a record.
//!
//! ```text
//!  datagram ─▶ kind? ─▶ SYN, WAKE   sums ▸ load? cookie ▸ Noise ▸ admitted? ▸ epoch ▸ half-open
//!                       DATA     cid ▸ session | half-open (first packet: confirm) | UNKNOWN
//!                       SYN+ACK, COOKIE, UNKNOWN   cid ▸ the knocking session
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::Arc;

use d2tp_seal::{
    CookieJar, Holder, Macs, PacketKeys, PublicKey, Responder, Rng, SYN_ACK_OVERHEAD_BYTES,
    SecretKey, TICKET_BYTES, TicketPress,
};
use d2tp_time::{Span, Time};
use d2tp_wire::{
    CID_BYTES, Cid, DATA_HEADER_BYTES, DATAGRAM_FIRST_BYTES, FlowId, PacketKind, PathId, Reader,
    Reason, TAG_BYTES, VERSION, Writer,
};
use hashbrown::HashMap;
use slab::Slab;

use crate::asleep::{Key, Lapsed, Sleepers};
use crate::claim::{Claim, Claims};
use crate::config::{Config, EARLY_HEARD_MAX, SPARE_PATHS};
use crate::early::Early;
use crate::event::Event;
use crate::half_open::{HALF_OPEN_MAX, HalfOpen, HalfOpens, Repeated};
use crate::knock::PROLOGUE;
use crate::path::Addresses;
use crate::recent::Recent;
use crate::record::{Record, RecordError};
use crate::session::{CidChange, Life, Role, Session};
use crate::sought::{Sought, SoughtQueue};
use crate::syn::{Syn, SynAck, SynAckBody};
use crate::trace::{TRACE_RECORDS_MAX, Trace, TraceLevel, TraceRecord};
use crate::transmit::Transmit;

/// Stateless answers that wait to leave; more are dropped, their senders try again.
const ANSWERS_MAX: usize = 256;
/// "Unknown session" answers per second.
const UNKNOWN_PER_SECOND: u32 = 200;
/// How long a cookie secret is the newest.
const COOKIE_PERIOD: Span = Span::from_secs(120);
/// Sessions in line so few that each has its turn at once: at 1,000 Mb/s and 64 kB each it takes 30 ms.
const LINE_SHORT: usize = 64; // a guess

/// A session of an endpoint. Never refers to another one, even after the first is gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionId {
    index: u32,
    serial: u32,
}

/// There is no such session (any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such session")]
pub struct UnknownSession;

/// Why a session cannot sleep as a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HibernateError {
    /// There is no such session (any more).
    #[error(transparent)]
    Unknown(#[from] UnknownSession),
    /// The flow holds bytes that nobody could give again (R-SUSPEND-4).
    #[error("flow {0:?} holds bytes that only this process has: read or flush it first")]
    Bound(FlowId),
    /// Nobody confirmed the handshake its early data came with.
    #[error("the device has not confirmed its handshake yet")]
    Unconfirmed,
}

/// Who may open sessions.
#[derive(Clone, Debug, Default)]
pub enum Admission {
    /// Nobody: this host only calls others.
    #[default]
    Nobody,
    /// Anybody.
    Anybody,
    /// These hosts.
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

/// A datagram as the driver received it. It is opened in place.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// Where it came in and from.
    pub addresses: Addresses,
    /// Its bytes.
    pub bytes: &'a mut [u8],
}

#[derive(Clone, Copy, Debug)]
enum Route {
    Session {
        id: SessionId,
        path: PathId,
        generation: u32,
    },
    HalfOpen {
        index: usize,
        path: PathId,
    },
}

/// Connection ids are random and ours: eight of their bytes are hash enough.
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

struct Slot {
    session: Session,
    serial: u32,
    timer: Time,
    ready: bool,
    /// In line with an ACK that is due.
    hasty: bool,
    /// Flows booked for its client key.
    flows: usize,
}

/// All D2TP sessions of one host and process.
pub struct Endpoint {
    config: Arc<Config>,
    local: SecretKey,
    admission: Admission,
    rng: Rng,
    jar: CookieJar,
    jar_arc: Arc<CookieJar>,
    press: TicketPress,
    cookie_until: Time,
    sessions: Slab<Slot>,
    next_serial: u32,
    routes: HashMap<Cid, Route, BuildHasherDefault<CidHasher>>,
    /// A server's sessions by who they are with.
    by_key: BTreeMap<Key, SessionId>,
    asleep: Sleepers,
    /// There are more than those: whoever comes and is not known is sought first.
    sleepers_elsewhere: bool,
    sought: SoughtQueue,
    /// Sessions awake only for a handshake that is not confirmed; their records stand.
    thawed: BTreeSet<SessionId>,
    /// Flows, awake and asleep, of each client key that has a session awake (R-QUOTA-2).
    flows_by_key: BTreeMap<PublicKey, usize>,
    half_open: HalfOpens,
    /// Half-open handshakes that may have something to say.
    early: VecDeque<usize>,
    /// Who said something in a SYN before (R-EARLY-2).
    early_heard: Recent<Key, ()>,
    timers: BTreeSet<(Time, SessionId)>,
    ready: VecDeque<SessionId>,
    /// Those of a long line whose ACKs are due: for them the rest of the line is too long.
    hasty: VecDeque<SessionId>,
    answers: VecDeque<(Addresses, Vec<u8>)>,
    events: VecDeque<(SessionId, Event)>,
    syn_window: (Time, u32),
    unknown_window: (Time, u32),
    /// The session whose changes are not booked yet.
    touched: Option<SessionId>,
    trace_level: Option<TraceLevel>,
    traces: VecDeque<(SessionId, Time, TraceRecord)>,
}

impl Endpoint {
    /// An endpoint of the host `local`. `seed` must be fresh; `token_seed` should survive restarts
    /// of a server, so that old sessions can be told they are unknown.
    pub fn new(
        config: Config,
        local: SecretKey,
        admission: Admission,
        seed: [u8; 32],
        token_seed: [u8; 32],
    ) -> Self {
        let mut rng = Rng::new(seed);
        let public = local.public();
        let jar = CookieJar::new(&public, rng.array(), token_seed);
        let jar_arc = Arc::new(CookieJar::new(&public, [0; 32], token_seed));
        let salt = rng.fork().array();
        Endpoint {
            config: config.into(),
            local,
            admission,
            rng,
            jar,
            jar_arc,
            press: TicketPress::new(token_seed),
            cookie_until: Time::ZERO,
            sessions: Slab::new(),
            next_serial: 0,
            routes: HashMap::default(),
            by_key: BTreeMap::new(),
            asleep: Sleepers::new(salt),
            sleepers_elsewhere: false,
            sought: SoughtQueue::default(),
            thawed: BTreeSet::new(),
            flows_by_key: BTreeMap::new(),
            half_open: HalfOpens::new(),
            early: VecDeque::new(),
            early_heard: Recent::new(EARLY_HEARD_MAX),
            timers: BTreeSet::new(),
            ready: VecDeque::new(),
            hasty: VecDeque::new(),
            answers: VecDeque::new(),
            events: VecDeque::new(),
            syn_window: (Time::ZERO, 0),
            unknown_window: (Time::ZERO, 0),
            touched: None,
            trace_level: None,
            traces: VecDeque::new(),
        }
    }

    /// This host's public key.
    pub fn public_key(&self) -> PublicKey {
        self.local.public()
    }
    /// Changes who may come in; sessions that exist stand.
    pub fn set_admission(&mut self, admission: Admission) {
        self.admission = admission;
    }
    /// What tickets are made of: to survive restarts where sessions do. Without it they follow from
    /// the tokens' seed.
    pub fn set_ticket_seed(&mut self, seed: [u8; 32]) {
        self.press = TicketPress::new(seed);
    }
    /// Sessions awake, asleep, and half open.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.sessions.len(), self.asleep.len(), self.half_open.len())
    }

    /// A session with a server. It knocks when [`Session::open_path`] gives it a link. `epochs`
    /// were reserved in the device's journal before (R-HS-2).
    pub fn connect(
        &mut self,
        now: Time,
        server: PublicKey,
        instance: u64,
        epochs: Range<u32>,
    ) -> SessionId {
        let session = self.new_session(now, Role::Initiator, server, instance, epochs);
        self.insert(session)
    }

    /// A device's session from its record, with epochs beyond all used before.
    ///
    /// # Errors
    /// The record is damaged.
    pub fn restore(
        &mut self,
        now: Time,
        record: &[u8],
        epochs: Range<u32>,
    ) -> Result<SessionId, RecordError> {
        let record = Record::decode(record)?;
        let first = epochs.start.max(record.epoch.saturating_add(1));
        let mut session = self.new_session(
            now,
            record.role,
            record.peer,
            record.instance,
            first..epochs.end,
        );
        session.restore(now, &record);
        let id = self.insert(session);
        // Its deadlines are timers, whether there is a link or not.
        self.settle(id);
        Ok(id)
    }

    /// A server takes in the record of a session asleep, of which nobody knows for how long.
    ///
    /// # Errors
    /// The record is damaged, or not a server's.
    pub fn adopt(&mut self, record: &[u8]) -> Result<(), RecordError> {
        self.take_in_record(None, &Record::decode(record)?, record.into())
    }

    /// The same with a record that its owner has read, and as if it had been made now: its
    /// deadlines run from here.
    ///
    /// # Errors
    /// It is not a server's.
    pub fn adopt_at(&mut self, now: Time, record: &Record) -> Result<(), RecordError> {
        self.take_in_record(Some(now), record, record.encode().into())
    }

    fn take_in_record(
        &mut self,
        since: Option<Time>,
        record: &Record,
        bytes: Box<[u8]>,
    ) -> Result<(), RecordError> {
        if record.role != Role::Responder {
            return Err(RecordError::Damaged);
        }
        self.put_to_sleep((record.peer, record.instance), record, bytes, since);
        Ok(())
    }

    /// Whether the owner has records of sleepers that it has not given to [`Endpoint::adopt_at`]
    /// yet. Until it says no, a SYN of an unknown session waits for [`Endpoint::poll_sought`].
    pub fn set_sleepers_elsewhere(&mut self, elsewhere: bool) {
        self.sleepers_elsewhere = elsewhere;
    }

    /// The next device at the door whose session may sleep in a record that is elsewhere. Give the
    /// record to [`Endpoint::adopt_at`] if there is one, then go on with [`Endpoint::go_on`].
    pub fn poll_sought(&mut self) -> Option<Sought> {
        self.sought.next()
    }

    /// Whoever was sought was found and adopted, or is new: the SYN is answered.
    pub fn go_on(&mut self, now: Time, sought: Sought) {
        let Sought {
            from,
            cid,
            len,
            syn,
            responder,
            ..
        } = sought;
        self.answer_syn(now, from, cid, len, syn, responder);
    }

    /// Whether this session is here, awake or asleep.
    pub fn knows(&self, peer: PublicKey, instance: u64) -> bool {
        let key = (peer, instance);
        self.by_key.contains_key(&key) || self.asleep.contains(&key)
    }

    /// Whether there is room for one more session asleep.
    pub fn has_room_asleep(&self) -> bool {
        self.asleep.len() < self.config.asleep_max
    }

    /// What of the sessions asleep is over since this was last asked.
    pub fn poll_lapsed(&mut self) -> Option<Lapsed> {
        self.asleep.poll_lapsed()
    }

    /// Puts a session to sleep: from now on it is its record, which is also returned. A server
    /// keeps it and wakes it when the device knocks; a device gives it back to
    /// [`Endpoint::restore`].
    ///
    /// # Errors
    /// There is no such session, or it has a flow that cannot sleep ([`Session::may_hibernate`]).
    pub fn hibernate(&mut self, now: Time, id: SessionId) -> Result<Vec<u8>, HibernateError> {
        let session = self.session(id).ok_or(UnknownSession)?;
        if session.is_unconfirmed() {
            return Err(HibernateError::Unconfirmed);
        }
        // R-SUSPEND-4
        if let Some(flow) = session.bound_awake() {
            return Err(HibernateError::Bound(flow));
        }
        let mut record = session.record(now, false);
        let (key, role) = ((session.peer(), session.instance()), session.role());
        if self.thawed.contains(&id)
            && let Some(before) = self.asleep.get(&key).and_then(|a| a.thaw(now))
        {
            // R-RESUME-8: nobody confirmed where sending goes on.
            record.keep_sending_of(&before);
            let ends = |id| !record.flows.iter().any(|f| f.id == id);
            self.asleep.lapse(&key, &before, ends);
        }
        let bytes = record.encode();
        self.drop_session(id);
        if role == Role::Responder {
            self.put_to_sleep(key, &record, bytes.clone().into(), Some(now));
        }
        Ok(bytes)
    }

    /// Ends a session, with a network or without: see [`Session::close`]. It is gone when
    /// [`Event::Closed`] was taken.
    ///
    /// # Errors
    /// There is no such session.
    pub fn close(&mut self, id: SessionId, code: u64, text: &str) -> Result<(), UnknownSession> {
        self.with(id, |s| s.close(code, text))
    }

    /// What the peer may have in flight on a link: see [`Session::set_path_limit`].
    ///
    /// # Errors
    /// There is no such session.
    pub fn set_path_limit(
        &mut self,
        id: SessionId,
        link: crate::path::LinkId,
        bytes: Option<u64>,
    ) -> Result<(), UnknownSession> {
        self.with(id, |s| s.set_path_limit(link, bytes))
    }

    fn put_to_sleep(&mut self, key: Key, record: &Record, bytes: Box<[u8]>, since: Option<Time>) {
        let absence = self.config.rest_max;
        let was = self.asleep.insert(key, record, bytes, since, absence);
        self.book_flows(key.0, was.map_or(0, |a| a.flows()), record.flows.len());
    }

    /// A session asleep is no more, and neither are its flows.
    fn let_go(&mut self, key: Key) {
        if let Some(asleep) = self.asleep.remove(&key) {
            self.book_flows(key.0, asleep.flows(), 0);
        }
    }

    /// R-QUOTA-2: a session of this client has `is` flows, it had `was`. Its others are told.
    fn book_flows(&mut self, peer: PublicKey, was: usize, is: usize) {
        if was == is {
            return;
        }
        // Of a client that only sleeps nobody asks.
        let Some(total) = self.flows_by_key.get_mut(&peer) else {
            return;
        };
        *total = *total + is - was;
        let total = *total;
        for (_, id) in self.by_key.range((peer, 0)..=(peer, u64::MAX)) {
            if let Some(slot) = self.sessions.get_mut(id.index as usize) {
                slot.session.flows_beside = total - slot.flows;
            }
        }
    }

    /// Sessions of a client: awake, asleep, and about to be.
    fn instances_of(&self, peer: PublicKey) -> usize {
        let new = self.half_open.sessions_of(peer);
        let new = new.filter(|k| !self.by_key.contains_key(k) && !self.asleep.contains(k));
        let awake = self.by_key.range((peer, 0)..=(peer, u64::MAX));
        let awake = awake.filter(|(k, _)| !self.asleep.contains(k));
        self.asleep.len_of(&peer) + awake.count() + new.count()
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
        let trace = |level| Box::new(Trace::new(level, now));
        session.trace = self.trace_level.map(trace);
        if role == Role::Responder {
            let jar = self.jar_arc.clone();
            session.make_token = Some(Arc::new(move |cid| jar.token(cid)));
        }
        session
    }

    fn insert(&mut self, session: Session) -> SessionId {
        let serial = self.next_serial;
        self.next_serial = self.next_serial.wrapping_add(1);
        let index = self.sessions.insert(Slot {
            session,
            serial,
            timer: Time::NEVER,
            ready: false,
            hasty: false,
            flows: 0,
        }) as u32;
        SessionId { index, serial }
    }

    fn slot(&mut self, id: SessionId) -> Option<&mut Slot> {
        self.sessions
            .get_mut(id.index as usize)
            .filter(|s| s.serial == id.serial)
    }

    /// Looks at a session.
    pub fn session(&self, id: SessionId) -> Option<&Session> {
        self.sessions
            .get(id.index as usize)
            .filter(|s| s.serial == id.serial)
            .map(|s| &s.session)
    }

    /// Does something with a session; afterwards it is asked what it wants to send.
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
        self.settle(id);
        Ok(r)
    }

    /// Books what a session changed: its ids, its timer, its events, its place in line.
    fn settle(&mut self, id: SessionId) {
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
                        Route::Session {
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
        // What waits here still counts against the session's own limit.
        while let Some(event) = slot.session.poll_event() {
            slot.session.events_out += 1;
            self.events.push_back((id, event));
        }
        if let Some(trace) = &mut slot.session.trace {
            let room = TRACE_RECORDS_MAX.saturating_sub(self.traces.len());
            let mut taken = trace.take();
            self.traces
                .extend(taken.by_ref().take(room).map(|(at, r)| (id, at, r)));
            // A count that finds no room is part of the next one.
            let dropped: u64 = taken.map(|(_, record)| record.stands_for()).sum();
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
        // R-CLOSE-1: a session that was closed has one word left, and no packets of its own.
        let leave = slot.session.leave.take();
        let (was, is) = (slot.flows, slot.session.flows.len());
        // Of a thawed session the record counts.
        let record = self.thawed.contains(&id) && !slot.session.is_unconfirmed();
        if was != is && slot.session.role == Role::Responder && !record {
            slot.flows = is;
            let peer = slot.session.peer;
            self.book_flows(peer, was, is);
        }
        if let Some((to, bytes)) = leave {
            self.answer(to, bytes);
        }
    }

    fn drop_session(&mut self, id: SessionId) {
        if self.slot(id).is_none() {
            return;
        }
        let slot = self.sessions.remove(id.index as usize);
        self.timers.remove(&(slot.timer, id));
        self.thawed.remove(&id);
        for issued in slot.session.issued.values() {
            self.routes.remove(&issued.cid);
        }
        if let Some(knock) = &slot.session.knock {
            for cid in &knock.cids {
                self.routes.remove(cid);
            }
        }
        let key = (slot.session.peer, slot.session.instance);
        self.book_flows(key.0, slot.flows, 0);
        if self.by_key.get(&key) == Some(&id) {
            self.by_key.remove(&key);
            let mut others = self.by_key.range((key.0, 0)..=(key.0, u64::MAX));
            if others.next().is_none() {
                self.flows_by_key.remove(&key.0);
            }
        }
    }

    /// A session of a client is awake, or about to be.
    fn enlist(&mut self, key: Key, id: SessionId) {
        let Endpoint {
            flows_by_key,
            asleep,
            ..
        } = self;
        flows_by_key
            .entry(key.0)
            .or_insert_with(|| asleep.flows_of(&key.0));
        self.by_key.insert(key, id);
    }

    /// The next event of any session. After [`Event::Closed`] the session is gone.
    pub fn poll_event(&mut self) -> Option<(SessionId, Event)> {
        let (id, event) = self.events.pop_front()?;
        if let Some(slot) = self.slot(id) {
            slot.session.events_out -= 1;
        }
        if matches!(event, Event::Closed(_))
            && let Some(session) = self.session(id).filter(|s| s.life() == Life::Closed)
        {
            let key = (session.peer, session.instance);
            if self.thawed.contains(&id) {
                if let Some(record) = self.asleep.get(&key).and_then(|a| a.decode()) {
                    self.asleep.lapse_all(&key, &record);
                }
                self.let_go(key);
            }
            self.drop_session(id);
        }
        if let Event::SendFrom { flow, .. } = event
            && let Some(slot) = self.slot(id)
        {
            slot.session.on_send_from_taken(flow);
        }
        Some((id, event))
    }

    /// Has sessions tell everything they do, or no longer. They are told apart by their ids; take
    /// what they tell with [`Endpoint::poll_trace`].
    pub fn set_trace(&mut self, now: Time, level: Option<TraceLevel>) {
        self.trace_level = level;
        for (_, slot) in &mut self.sessions {
            slot.session.trace = level.map(|level| Box::new(Trace::new(level, now)));
        }
    }

    /// The next thing a session told, and when it happened.
    pub fn poll_trace(&mut self) -> Option<(SessionId, Time, TraceRecord)> {
        self.traces.pop_front()
    }

    /// Whether [`Endpoint::poll_event`] has something.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    // ---- datagrams in ----

    /// Takes in one datagram.
    pub fn handle_datagram(&mut self, now: Time, incoming: Incoming<'_>) {
        let stride = incoming.bytes.len().max(1);
        self.handle_datagrams(now, incoming, stride);
    }

    /// Takes in datagrams of one sender that lie back to back, `stride` bytes each (the last may
    /// be shorter). Sessions are asked what they want to send once, at the end.
    pub fn handle_datagrams(&mut self, now: Time, incoming: Incoming<'_>, stride: usize) {
        let Incoming { addresses, bytes } = incoming;
        for datagram in bytes.chunks_mut(stride.max(1)) {
            self.take_in(now, addresses, datagram);
        }
        if let Some(id) = self.touched.take() {
            self.settle(id);
        }
    }

    /// Books a session's changes later, but before any other session's.
    fn touch(&mut self, id: SessionId) {
        if let Some(before) = self.touched.replace(id)
            && before != id
        {
            self.settle(before);
        }
    }

    #[inline]
    fn take_in(&mut self, now: Time, addresses: Addresses, bytes: &mut [u8]) {
        let Some((kind, version, cid, _)) = PacketKind::split(bytes) else {
            return;
        };
        // R-WIRE-4: of another version only a SYN has a meaning for us.
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
                let Some(Route::Session {
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
                self.settle(id);
            }
            PacketKind::Version => {}
        }
    }

    /// UNKNOWN names the id it was sent to, which is the peer's, not one of ours: find the path.
    fn on_stray_unknown(&mut self, now: Time, kind: PacketKind, cid: Cid, bytes: &[u8]) {
        // A host with servers' sessions only knows all of them by key: nothing to look for, so a
        // flood of strays costs nothing (R-UNKNOWN-3).
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
            self.settle(id);
        }
    }

    #[inline]
    fn on_data(&mut self, now: Time, from: Addresses, cid: Cid, bytes: &mut [u8]) {
        match self.routes.get(&cid).copied() {
            Some(Route::Session {
                id,
                path,
                generation,
            }) => {
                // What other sessions of the client did before counts for this one (R-QUOTA-2).
                if let Some(before) = self.touched.take_if(|before| *before != id) {
                    self.settle(before);
                }
                let Some(slot) = self.slot(id) else { return };
                slot.session.handle_data(now, path, generation, from, bytes);
                if slot.session.cid_changes.is_empty() {
                    self.touch(id);
                } else {
                    self.settle(id);
                }
            }
            Some(Route::HalfOpen { index, path }) => self.confirm(now, from, index, path, bytes),
            None => self.answer_unknown(now, from, cid, bytes.len()),
        }
    }

    /// R-UNKNOWN-2: smaller than what asked for it, and not too often.
    fn answer_unknown(&mut self, now: Time, from: Addresses, cid: Cid, trigger: usize) {
        const ANSWER: usize = 1 + CID_BYTES + 16;
        if matches!(self.admission, Admission::Nobody) || trigger <= ANSWER {
            return;
        }
        if now.since(self.unknown_window.0) >= Span::from_secs(1) {
            self.unknown_window = (now, 0);
        }
        self.unknown_window.1 += 1;
        if self.unknown_window.1 > UNKNOWN_PER_SECOND {
            return;
        }
        let mut out = Vec::with_capacity(ANSWER);
        out.push(PacketKind::Unknown.first_byte());
        out.extend(cid.0);
        out.extend(self.jar_arc.token(cid));
        self.answer(from, out);
    }

    fn answer(&mut self, to: Addresses, bytes: Vec<u8>) {
        if self.answers.len() < ANSWERS_MAX {
            self.answers.push_back((to, bytes));
        }
    }

    fn on_syn(
        &mut self,
        now: Time,
        from: Addresses,
        kind: PacketKind,
        version: u8,
        cid: Cid,
        bytes: &[u8],
    ) {
        if matches!(self.admission, Admission::Nobody) {
            return;
        }
        // R-HS-5: a SYN has its full size, so that no answer is larger.
        if bytes.len() < DATAGRAM_FIRST_BYTES {
            return;
        }
        // R-HS-10
        if version != VERSION {
            let mut out = vec![PacketKind::Version.first_byte()];
            out.extend(cid.0);
            out.push(VERSION);
            return self.answer(from, out);
        }
        // R-HS-6: who does not know our key costs one hash and hears nothing.
        if !self.jar.knows_us(bytes) {
            return;
        }
        if now >= self.cookie_until {
            self.cookie_until = now + COOKIE_PERIOD;
            let seed = self.rng.array();
            self.jar.rotate(seed);
        }
        if now.since(self.syn_window.0) >= Span::from_secs(1) {
            self.syn_window = (now, 0);
        }
        self.syn_window.1 += 1;
        match self.half_open.repeated(now, from, cid) {
            Some(Repeated::Answer(answer)) => return self.answer(from, answer),
            Some(Repeated::Late) => return,
            None => {}
        }
        let loaded = self.syn_window.1 > self.config.cookie_above
            || self.half_open.len() >= HALF_OPEN_MAX / 2;
        // A ticket is dearer to have than an address: who shows a true one costs nothing before that.
        let suspect = kind == PacketKind::Syn && !self.jar.proved(bytes, from.remote);
        if loaded && suspect {
            // R-HS-7: under load the address is proved first: no state, no public-key work.
            let Some(mac1) = Macs::mac1(bytes) else {
                return;
            };
            let nonce: [u8; 12] = self.rng.array();
            let mut out = vec![PacketKind::Cookie.first_byte()];
            out.extend(cid.0);
            out.extend(nonce);
            out.extend(self.jar.seal_cookie(mac1, from.remote, nonce));
            return self.answer(from, out);
        }
        self.expire_half_open(now);
        if self.half_open.len() >= HALF_OPEN_MAX {
            return;
        }
        let message = &bytes[1 + CID_BYTES..bytes.len() - Macs::BYTES];
        let mut payload = [0; 2048];
        if message.len() > payload.len() {
            return;
        }
        let read = match kind {
            PacketKind::Wake => self.read_wake(message, &mut payload),
            _ => self.read_syn(message, &mut payload),
        };
        let Some((responder, syn)) = read else {
            return;
        };
        let key = (responder.peer(), syn.instance);
        // Whoever is not admitted is refused, whatever lies elsewhere.
        if self.sleepers_elsewhere && self.admission.admits(&key.0) && !self.knows(key.0, key.1) {
            let len = bytes.len();
            return self.sought.ask(Sought {
                key,
                from,
                cid,
                len,
                syn,
                responder,
            });
        }
        self.answer_syn(now, from, cid, bytes.len(), syn, responder);
    }

    fn read_syn(&mut self, message: &[u8], payload: &mut [u8]) -> Option<(Responder, Syn)> {
        let seed = self.rng.array();
        let (responder, n) = Responder::read(&self.local, PROLOGUE, seed, message, payload).ok()?;
        let syn = Syn::decode(&mut Reader::new(&payload[..n]))?;
        Some((responder, syn))
    }

    /// R-TICKET-1: who comes by ticket is who holds it.
    fn read_wake(&mut self, body: &[u8], payload: &mut [u8]) -> Option<(Responder, Syn)> {
        let (ticket, message) = body.split_first_chunk::<TICKET_BYTES>()?;
        let (holder, ticket) = self.press.open(ticket).ok()?;
        let seed = self.rng.array();
        let (responder, n) = Responder::read_by_ticket(
            &self.local,
            holder.peer,
            &ticket,
            PROLOGUE,
            seed,
            message,
            payload,
        )
        .ok()?;
        let mut syn = Syn::decode(&mut Reader::new(&payload[..n]))?;
        syn.ticket_of = Some(holder.epoch);
        (syn.instance == holder.instance).then_some((responder, syn))
    }

    /// Answers a SYN that was read.
    fn answer_syn(
        &mut self,
        now: Time,
        from: Addresses,
        cid: Cid,
        len: usize,
        syn: Syn,
        responder: Responder,
    ) {
        let key = (responder.peer(), syn.instance);
        let peer = key.0;
        // R-HS-8: a copy of a SYN gets the answer of its original and no state of its own, so that
        // copies do not push the original out.
        if let Some(half) = self.half_open.original(&key, syn.epoch) {
            let answer = half.answer.clone();
            return self.answer(from, answer);
        }
        let Some(answer) = self.judge(&syn, key) else {
            return;
        };
        let mut out = vec![0; 1 + CID_BYTES + SYN_ACK_OVERHEAD_BYTES + 400];
        out[0] = PacketKind::SynAck.first_byte();
        out[1..1 + CID_BYTES].copy_from_slice(&cid.0);
        let mut body = [0; 400];
        let mut w = Writer::new(&mut body);
        answer.encode(&mut w);
        let n = w.written();
        let Ok((secrets, n)) = responder.answer(&body[..n], &mut out[1 + CID_BYTES..]) else {
            return;
        };
        out.truncate(1 + CID_BYTES + n);
        let room = (len as u64).saturating_sub(out.len() as u64);
        self.answer(from, out.clone());
        if let SynAck::Welcome(body) = answer {
            let suite = d2tp_seal::Suite::from_code(body.suite).expect("we chose it");
            let keys = PacketKeys::new(suite, &secrets, false);
            // The body kept is the peer's view turned round: what the *device* told us.
            let own_cids: Vec<Cid> = std::iter::once(body.cid)
                .chain(body.spare.iter().map(|s| s.0))
                .collect();
            let theirs = SynAckBody {
                cid,
                token: [0; 16],
                suite: body.suite,
                resumed: body.resumed,
                session_credit: syn.session_credit,
                flow_credit: syn.flow_credit,
                spare: syn.spare.iter().map(|c| (*c, [0; 16])).collect(),
                ticket: None,
            };
            let expires = now + self.config.half_open_max;
            let index = self.half_open.insert(HalfOpen {
                peer,
                instance: syn.instance,
                epoch: syn.epoch,
                keys,
                own_cids: own_cids.clone(),
                body: theirs,
                addresses: from,
                answer: out,
                expires,
                repeated: 0,
                early: None,
            });
            // The device's first packet may come on any of its links.
            for (cid, n) in own_cids.iter().zip(0..) {
                self.routes.insert(
                    *cid,
                    Route::HalfOpen {
                        index,
                        path: PathId(n),
                    },
                );
            }
            if let Some(oldest) = self.half_open.supernumerary(&key) {
                self.drop_half_open(oldest);
            }
            let Syn {
                claims, early_data, ..
            } = syn;
            self.speak_early(now, index, claims, early_data, room);
        }
    }

    /// Has a half-open handshake answer its claims before it is confirmed, if they are of a session
    /// we know.
    fn speak_early(
        &mut self,
        now: Time,
        index: usize,
        claims: Claims,
        early_data: Option<Vec<u8>>,
        room: u64,
    ) {
        let Some(half) = self.half_open.get_mut(index) else {
            return;
        };
        let (key, epoch) = ((half.peer, half.instance), half.epoch);
        let (cid, credit) = (half.body.cid, half.body.session_credit);
        let mut opened = Vec::new();
        let id = if !claims.list.is_empty() {
            self.thaw(now, key, epoch)
        } else if let Some(early_data) = early_data.filter(|_| self.config.early_data) {
            let credits = (half.body.session_credit, half.body.flow_credit);
            self.hear_early(now, key, epoch, credits, &early_data, &mut opened)
        } else {
            None
        };
        let Some(id) = id else { return };
        let early = Early::new(id, cid, claims, opened, room, credit, &self.config);
        if let Some(slot) = self.slot(id) {
            for claim in early.claims() {
                slot.session.prepare(&claim);
            }
        }
        if let Some(half) = self.half_open.get_mut(index) {
            half.early = Some(Box::new(early));
        }
        self.settle(id);
    }

    /// The session of this device, out of its record if need be; the record stands until a
    /// handshake is confirmed (R-HS-12).
    fn thaw(&mut self, now: Time, key: Key, epoch: u32) -> Option<SessionId> {
        if let Some(id) = self.by_key.get(&key).copied()
            && self.session(id).is_some()
        {
            return Some(id);
        }
        if self.sessions.len() >= self.config.sessions_max {
            return None;
        }
        let record = self.asleep.get(&key)?.thaw(now)?;
        // From here the session's own timers are the ones that count.
        self.asleep.hold(&key);
        let mut session = self.new_session(now, Role::Responder, key.0, key.1, epoch..epoch);
        session.restore(now, &record);
        let id = self.insert(session);
        self.enlist(key, id);
        self.thawed.insert(id);
        Some(id)
    }

    /// R-EARLY-2: takes in the early data of a device that is not known, in a session that lives as
    /// long as its handshakes may be confirmed. `opened`: its flows, and what they may be sent.
    fn hear_early(
        &mut self,
        now: Time,
        key: Key,
        epoch: u32,
        (session_credit, flow_credit): (u64, u64),
        early_data: &[u8],
        opened: &mut Vec<Claim>,
    ) -> Option<SessionId> {
        let id = match self.by_key.get(&key).copied() {
            Some(id) if self.session(id)?.is_unconfirmed() => id,
            Some(_) => return None,
            None => {
                let room = self.sessions.len() < self.config.sessions_max;
                if !room || self.asleep.contains(&key) || self.early_heard.get(&key).is_some() {
                    return None;
                }
                self.early_heard.insert(key, ());
                let mut session =
                    self.new_session(now, Role::Responder, key.0, key.1, epoch..epoch);
                session.begin_unconfirmed(session_credit, flow_credit);
                let id = self.insert(session);
                self.enlist(key, id);
                self.thawed.insert(id);
                id
            }
        };
        let beside = self.flows_by_key.get(&key.0).copied().unwrap_or(0);
        let slot = self.slot(id)?;
        slot.session.flows_beside = beside.saturating_sub(slot.flows);
        match slot.session.take_early_data(now, early_data) {
            Ok(flows) => {
                let claim = |flow| Claim {
                    flow,
                    received: 0,
                    credit: flow_credit,
                    flags: 0,
                };
                opened.extend(flows.into_iter().map(claim));
            }
            // What is wrong with it, the device hears when it says it again.
            Err(_) => slot.session.end_unconfirmed(),
        }
        Some(id)
    }

    /// May this device come in, and with what? None: not now.
    fn judge(&mut self, syn: &Syn, key: Key) -> Option<SynAck> {
        // R-HS-11
        if !self.admission.admits(&key.0) {
            return Some(SynAck::Refused(Reason::NotAllowed));
        }
        let existing = self.by_key.get(&key).and_then(|id| self.session(*id));
        let existing = existing.filter(|s| !s.is_unconfirmed());
        let sleeping = self.asleep.get(&key).and_then(|a| a.decode());
        let confirmed = existing
            .map(|s| s.epoch)
            .or(sleeping.as_ref().map(|r| r.epoch));
        // R-HS-1: an epoch counts once; a replayed SYN finds its own epoch used.
        if let Some(confirmed) = confirmed
            && syn.epoch <= confirmed
        {
            return Some(SynAck::Stale { confirmed });
        }
        // R-TICKET-1: what came before the last handshake is over, whoever holds it.
        if let Some(of) = syn.ticket_of
            && confirmed.is_none_or(|confirmed| of < confirmed)
        {
            return Some(SynAck::NoTicket);
        }
        let own = self.half_open.of(&key).len();
        let full = self.sessions.len() + self.half_open.len() - own >= self.config.sessions_max;
        if confirmed.is_none() {
            // R-QUOTA-1, R-QUOTA-4
            let crowd = self.asleep.len() >= self.config.asleep_max;
            let own_crowd = self.instances_of(key.0) >= self.config.sessions_per_key_max;
            let again = own > 0;
            if full || crowd || (own_crowd && !again) {
                return Some(SynAck::Refused(Reason::LimitReached));
            }
        } else if full && existing.is_none() {
            // R-QUOTA-4: to refuse would end what only sleeps; the device knocks again.
            return None;
        }
        let Some(suite) = self
            .config
            .suites
            .iter()
            .map(|s| s.code())
            .find(|s| syn.suites.contains(s))
        else {
            return Some(SynAck::NoSuite);
        };
        let holder = Holder {
            peer: key.0,
            instance: key.1,
            epoch: syn.epoch,
        };
        let cid = Cid(self.rng.array());
        let spare = (0..SPARE_PATHS)
            .map(|_| {
                let cid = Cid(self.rng.array());
                (cid, self.jar_arc.token(cid))
            })
            .collect();
        Some(SynAck::Welcome(SynAckBody {
            cid,
            token: self.jar_arc.token(cid),
            suite,
            resumed: confirmed.is_some(),
            session_credit: self.config.session_window,
            flow_credit: self.config.flow_window,
            spare,
            ticket: Some(self.press.issue(self.rng.array(), &holder)),
        }))
    }

    fn drop_half_open(&mut self, index: usize) -> Option<HalfOpen> {
        let half = self.half_open.remove(index)?;
        for cid in &half.own_cids {
            self.routes.remove(cid);
        }
        Some(half)
    }

    fn expire_half_open(&mut self, now: Time) {
        while let Some(index) = self.half_open.next_expired(now) {
            if let Some(half) = self.drop_half_open(index) {
                self.sleep_again(now, (half.peer, half.instance));
            }
        }
    }

    /// R-RESUME-8: the last handshake a session was thawed for is gone: it is its record again.
    fn sleep_again(&mut self, now: Time, key: Key) {
        let Some(id) = self.by_key.get(&key).copied() else {
            return;
        };
        if !self.thawed.contains(&id) || self.half_open.of(&key).len() > 0 {
            return;
        }
        if self.session(id).is_some_and(Session::is_unconfirmed) {
            if let Some(slot) = self.slot(id) {
                slot.session.end_unconfirmed();
            }
            self.settle(id);
        } else if self.hibernate(now, id).is_ok() {
            self.events.push_back((id, Event::Asleep));
        }
    }

    /// A thawed session is awake for good: its record is no more, and its flows count as awake.
    fn wake_up(&mut self, id: SessionId, key: Key) {
        if let Some(asleep) = self.asleep.get(&key)
            && let Some(session) = self.session(id)
            && asleep.flows() != session.flows.len()
            && let Some(before) = asleep.decode()
        {
            let left: BTreeSet<FlowId> = session.flows.iter().map(|f| f.id).collect();
            self.asleep.lapse(&key, &before, |id| !left.contains(&id));
        }
        self.let_go(key);
        let beside = self.flows_by_key.get(&key.0).copied().unwrap_or(0);
        if let Some(slot) = self.slot(id) {
            slot.session.flows_beside = beside.saturating_sub(slot.flows);
        }
    }

    /// R-HS-12: the device's first packet under the new keys: now, and only now, the session is theirs.
    fn confirm(
        &mut self,
        now: Time,
        from: Addresses,
        index: usize,
        path: PathId,
        bytes: &mut [u8],
    ) {
        let Some(half) = self.half_open.get_mut(index) else {
            return;
        };
        if bytes.len() < DATA_HEADER_BYTES + TAG_BYTES {
            return;
        }
        // R-HS-17: a handshake nobody confirmed in time is no more, whether or not a timer fired.
        if half.expires <= now {
            self.expire_half_open(now);
            return;
        }
        let Ok(opened) = half.keys.open(path, 0, bytes) else {
            return;
        };
        let half = self.drop_half_open(index).expect("it was just there");
        self.half_open
            .remember(&half, now + self.config.half_open_max);
        let key = (half.peer, half.instance);
        for index in self.half_open.of(&key) {
            let other = self.half_open.get_mut(index);
            if let Some(early) = other.and_then(|h| h.early.as_mut()) {
                early.fall_silent();
            }
        }
        let id = match self.thaw(now, key, half.epoch) {
            Some(id) => id,
            None => {
                let epochs = half.epoch..half.epoch;
                let mut session =
                    self.new_session(now, Role::Responder, half.peer, half.instance, epochs);
                if let Some(record) = self.asleep.get(&key).and_then(|a| a.thaw(now)) {
                    session.restore(now, &record);
                }
                let id = self.insert(session);
                self.enlist(key, id);
                self.thawed.insert(id);
                id
            }
        };
        if self.thawed.remove(&id) {
            self.wake_up(id, key);
        }
        let slot = self.slot(id).expect("it was just found or made");
        let session = &mut slot.session;
        if half.epoch <= session.epoch && session.generation > 0 {
            return;
        }
        session.begin_generation(now, half.keys, half.epoch, &half.own_cids, &half.body);
        session.accept_path(now, path, from);
        if path != PathId(0) && half.early.as_ref().is_some_and(|e| e.has_spoken()) {
            // Numbers of path 0 are used up already, whichever path confirms (R-SEAL-2).
            session.accept_path(now, PathId(0), half.addresses);
        }
        if from.remote == half.addresses.remote
            && let Some(path) = session.paths.get_mut(path)
        {
            // The device's keys depend on our answer, so it received it where we sent it.
            path.validated = true;
            path.challenges.clear();
            path.wants = 0;
        }
        session.after_handshake(now, half.body.resumed);
        if let Some(early) = half.early {
            session.adopt_early(*early);
        }
        let plaintext = &bytes[DATA_HEADER_BYTES..opened.end];
        session.handle_opened(now, path, opened.number, from, bytes.len(), plaintext);
        self.settle(id);
    }

    // ---- datagrams out, time ----

    /// Fills `buf` with the next batch of any session. `None`: nothing to send now.
    pub fn poll_transmit(&mut self, now: Time, buf: &mut [u8]) -> Option<Transmit> {
        if let Some((to, bytes)) = self.answers.pop_front() {
            buf[..bytes.len()].copy_from_slice(&bytes);
            return Some(Transmit {
                link: to.link,
                local: to.local,
                remote: to.remote,
                len: bytes.len(),
                segment: bytes.len(),
            });
        }
        if let Some(transmit) = self.poll_early(now, buf) {
            return Some(transmit);
        }
        while let Some(id) = self.hasty.pop_front() {
            let Some(slot) = self.slot(id) else { continue };
            slot.hasty = false;
            if let Some(transmit) = slot.session.poll_due_ack(now, buf) {
                return Some(transmit);
            }
        }
        while let Some(id) = self.ready.pop_front() {
            let Some(slot) = self.slot(id) else { continue };
            slot.ready = false;
            let transmit = slot.session.poll_transmit(now, buf);
            if transmit.is_some() {
                // There may be more: to the end of the line, so that sessions take turns.
                self.settle(id);
                return transmit;
            }
            self.settle(id);
            if self.ready.back() == Some(&id) {
                self.ready.pop_back();
                if let Some(slot) = self.slot(id) {
                    slot.ready = false;
                }
            }
        }
        None
    }

    /// What half-open handshakes have to say.
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
        let timer = timer.min(self.asleep.next_timeout());
        if self.thawed.is_empty() {
            timer
        } else {
            timer.min(self.half_open.next_expiry())
        }
    }

    /// Lets time pass.
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
            self.settle(id);
            // What is due still is something to send, and the session is in line for that. Until it
            // had its turn time has no news for it: with thousands in line each call would visit all.
            if let Some(slot) = self.sessions.get_mut(id.index as usize)
                && slot.ready
                && slot.timer <= now
            {
                self.timers.remove(&(slot.timer, id));
                slot.timer = Time::NEVER;
                if self.ready.len() > LINE_SHORT && !slot.hasty {
                    slot.hasty = true;
                    self.hasty.push_back(id);
                }
            }
        }
        self.expire_half_open(now);
        for (peer, was, is) in self.asleep.expire(now, self.config.rest_max) {
            self.book_flows(peer, was, is);
        }
    }

    /// The socket of a link refused a datagram of `size` bytes.
    pub fn on_too_big(&mut self, now: Time, link: crate::path::LinkId, size: usize) {
        let ids: Vec<SessionId> = self.ids();
        for id in ids {
            if let Some(slot) = self.slot(id) {
                slot.session.on_too_big(now, link, size);
            }
        }
    }

    /// All sessions awake.
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
