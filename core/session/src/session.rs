//! One session: the order of things.
//!
//! Inputs come in through `handle_*`, the application's wishes through the calls on flows and
//! paths; both only change state and mark what is to be said. [`Session::poll_transmit`] says it,
//! [`Session::poll_event`] tells the driver.
//!
//! ```text
//!             open_path                  SYN+ACK                    all paths gone
//!  Suspended ───────────▶ Handshaking ───────────▶ Established ───────────────────▶ Suspended
//!   (no keys)                                        ▲    │                          (keys kept)
//!                                                    └────┼──── open_path, or anything heard
//!                                                         └──── close ──▶ Closed
//! ```

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use d2tp_seal::{PacketKeys, PublicKey, Rng, SecretKey};
use d2tp_time::{Span, Time};
use d2tp_wire::{Cid, FlowId, PathId, PathStatus, Reason, TOKEN_BYTES};

use crate::config::{Config, DATAGRAMS_MAX, EVENTS_MAX, PATHS_MAX, SPARE_PATHS};
use crate::event::{Event, FlowEnd, PeerFault, SessionEnd, SwitchKind};
use crate::flow::{Flow, FlowOptions, Flows, want};
use crate::knock::Knock;
use crate::path::{self, Addresses, LinkId, Path, PathState, Paths};
use crate::ranges::RangeSet;
use crate::recovery::Said;
use crate::recv_half::RecvHalf;
use crate::send_half::SendHalf;

/// What the session as a whole still has to say.
pub(crate) mod say {
    pub(crate) const CREDIT: u16 = 1;
    pub(crate) const RESUME_END: u16 = 1 << 1;
}

/// Who began the session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The device.
    Initiator,
    /// The server.
    Responder,
}

/// Where a session is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Life {
    /// It has no path, or nothing answers: it sends nothing.
    Suspended,
    /// A handshake is under way.
    Handshaking,
    /// It works.
    Established,
    /// It is over.
    Closed,
}

/// A change to the connection ids that lead to this session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CidChange {
    Add {
        cid: Cid,
        path: PathId,
        generation: u32,
    },
    Remove(Cid),
}

/// A connection id issued to the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Issued {
    pub(crate) cid: Cid,
    pub(crate) token: [u8; TOKEN_BYTES],
    pub(crate) tell: bool,
}

/// The last word on a path that is no more.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) path: PathId,
    /// Packets received on it, largest first.
    pub(crate) received: Vec<(u64, u64)>,
    pub(crate) tell: bool,
}

/// Why a flow call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// There is no such flow, or it is over.
    #[error("the flow is over")]
    Gone,
    /// The peer reset it with this code.
    #[error("the peer reset the flow (code {0})")]
    Reset(u64),
    /// The peer wants no more bytes.
    #[error("the peer stopped reading (code {0})")]
    Stopped(u64),
    /// Its deadline passed.
    #[error("the deadline passed")]
    DeadlinePassed,
    /// As many flows as allowed are open.
    #[error("too many flows are open")]
    TooMany,
    /// The session is over.
    #[error("the session is over")]
    SessionOver,
}

/// Outcome of reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// Bytes, in order.
    Chunk(Bytes),
    /// The end: everything the peer sent was read.
    End,
    /// Nothing now.
    Pending,
}

/// Figures about one path.
#[derive(Clone, Debug, PartialEq)]
pub struct PathStats {
    /// Its number.
    pub id: PathId,
    /// Its addresses.
    pub addresses: Addresses,
    /// How far it got.
    pub state: PathState,
    /// Whether payload needs grants.
    pub gated: bool,
    /// Smoothed round trip.
    pub rtt: Span,
    /// Smallest round trip seen.
    pub rtt_min: Span,
    /// Bytes allowed in flight.
    pub window: u64,
    /// Bytes in flight.
    pub in_flight: u64,
    /// Datagram size in use.
    pub mtu: usize,
    /// Payload bytes received.
    pub payload_in: u64,
    /// Payload bytes sent, re-sends included.
    pub payload_out: u64,
    /// Packets that counted as lost.
    pub lost: u64,
    /// Of those, how many arrived after all.
    pub spurious: u64,
}

/// Credit of the session as a whole.
#[derive(Debug, Default)]
pub(crate) struct Credit {
    pub(crate) sent: u64,
    pub(crate) peer_max: u64,
    pub(crate) received: u64,
    pub(crate) consumed: u64,
    pub(crate) told: u64,
}

/// An unreliable datagram that waits to leave.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) context: u64,
    pub(crate) bytes: Bytes,
    pub(crate) expires: Time,
}

/// A D2TP session.
pub struct Session {
    pub(crate) role: Role,
    pub(crate) config: Config,
    pub(crate) local: SecretKey,
    pub(crate) peer: PublicKey,
    pub(crate) instance: u64,
    /// Of the handshake in force.
    pub(crate) epoch: u32,
    /// Epochs the initiator may still use: reserved in its journal before.
    pub(crate) epochs: std::ops::Range<u32>,
    pub(crate) life: Life,
    pub(crate) rng: Rng,
    pub(crate) keys: Option<PacketKeys>,
    /// Handshakes done so far: tells packets of an older one apart.
    pub(crate) generation: u32,
    pub(crate) knock: Option<Knock>,
    pub(crate) paths: Paths,
    pub(crate) flows: Flows,
    pub(crate) credit: Credit,
    pub(crate) says: u16,
    /// Paths that are no more and of which the peer does not know it yet.
    pub(crate) gone: Vec<Gone>,
    pub(crate) issued: BTreeMap<PathId, Issued>,
    pub(crate) spare: BTreeMap<PathId, (Cid, [u8; TOKEN_BYTES])>,
    /// Path ids ever in use under these keys: none comes back (R-SEAL-2).
    pub(crate) used_paths: RangeSet,
    /// Ids issued so far, the next one.
    pub(crate) issued_to: u32,
    /// Flows opened here get ids of this epoch, never below that of the handshake in force
    /// when the id was used before (R-FLOW-8).
    pub(crate) flow_epoch: u32,
    pub(crate) next_flow: u32,
    pub(crate) cid_changes: Vec<CidChange>,
    pub(crate) events: VecDeque<Event>,
    pub(crate) datagrams: VecDeque<Waiting>,
    pub(crate) closing: Option<(u64, String)>,
    /// Why it is closing, if the peer broke a rule.
    pub(crate) broken: Option<PeerFault>,
    pub(crate) suspended_at: Option<Time>,
    pub(crate) last_rx: Time,
    pub(crate) last_payload: Option<(PathId, LinkId, Time)>,
    pub(crate) rx_key_drop_at: Time,
    pub(crate) sealed_packets: u64,
    /// The packet being handled held something that could not be kept.
    pub(crate) unkept: bool,
    /// When the keys in force were agreed.
    pub(crate) keys_at: Time,
    /// Tokens for the ids we issue (a server's).
    pub(crate) make_token: Option<std::sync::Arc<dyn Fn(Cid) -> [u8; TOKEN_BYTES] + Send + Sync>>,
    pub(crate) initial_flow_credit: u64,
    /// Highest absolute number of bytes delivered twice, for reports.
    pub(crate) duplicate_bytes: u64,
}

impl Session {
    pub(crate) fn new(
        role: Role,
        config: Config,
        local: SecretKey,
        peer: PublicKey,
        instance: u64,
        epochs: std::ops::Range<u32>,
        rng: Rng,
        now: Time,
    ) -> Self {
        let flow_epoch = epochs.start;
        Session {
            role,
            config,
            local,
            peer,
            instance,
            epoch: epochs.start,
            epochs,
            life: Life::Suspended,
            rng,
            keys: None,
            generation: 0,
            knock: None,
            paths: Paths::default(),
            flows: Flows::default(),
            credit: Credit::default(),
            says: 0,
            gone: Vec::new(),
            issued: BTreeMap::new(),
            spare: BTreeMap::new(),
            used_paths: RangeSet::default(),
            issued_to: 0,
            flow_epoch,
            next_flow: 0,
            cid_changes: Vec::new(),
            events: VecDeque::new(),
            datagrams: VecDeque::new(),
            closing: None,
            broken: None,
            suspended_at: None,
            last_rx: now,
            last_payload: None,
            rx_key_drop_at: Time::NEVER,
            sealed_packets: 0,
            unkept: false,
            keys_at: now,
            make_token: None,
            initial_flow_credit: 0,
            duplicate_bytes: 0,
        }
    }

    // ---- what it is ----

    /// Who the peer is (for the initiator: who it must be).
    pub fn peer(&self) -> PublicKey {
        self.peer
    }
    /// The device's instance.
    pub fn instance(&self) -> u64 {
        self.instance
    }
    /// The epoch of the handshake in force.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }
    /// Where the session is in its life.
    pub fn life(&self) -> Life {
        self.life
    }
    /// Who began it.
    pub fn role(&self) -> Role {
        self.role
    }
    /// Figures of every path.
    pub fn path_stats(&self) -> Vec<PathStats> {
        self.paths
            .iter()
            .map(|p| PathStats {
                id: p.id,
                addresses: p.addresses,
                state: p.state,
                gated: p.gated,
                rtt: p.recovery.rtt.smoothed(),
                rtt_min: p.recovery.rtt.min(),
                window: p.recovery.controller.window(),
                in_flight: p.recovery.in_flight,
                mtu: p.mtu.current(),
                payload_in: p.payload_in,
                payload_out: p.payload_out,
                lost: p.recovery.lost_total,
                spurious: p.recovery.spurious_total,
            })
            .collect()
    }
    /// Payload bytes that arrived more than once, over the session's life.
    pub fn duplicate_bytes(&self) -> u64 {
        self.duplicate_bytes + self.flows.iter().map(|f| f.recv.duplicate()).sum::<u64>()
    }
    /// Ids of all open flows.
    pub fn flow_ids(&self) -> Vec<FlowId> {
        self.flows.ids()
    }

    pub(crate) fn emit(&mut self, event: Event) {
        // A driver that does not take events is our own mistake; dropping the newest keeps order.
        // The end is never dropped: whoever keeps the session waits for it (R-CLOSE-1).
        if self.events.len() < EVENTS_MAX || matches!(event, Event::Closed(_)) {
            self.events.push_back(event);
        }
    }
    /// The next thing the driver should know.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    // ---- flows ----

    /// Opens a flow. It may be written to at once; its bytes leave when there is a path.
    ///
    /// # Errors
    /// The session is over, or `flows_max` flows are open.
    pub fn open(&mut self, options: FlowOptions) -> Result<FlowId, FlowError> {
        if self.life == Life::Closed || self.closing.is_some() {
            return Err(FlowError::SessionOver);
        }
        if self.flows.len() >= self.config.flows_max || self.next_flow > FlowId::COUNTER_MAX {
            return Err(FlowError::TooMany);
        }
        let id = FlowId::new(
            self.flow_epoch,
            self.next_flow,
            self.role == Role::Initiator,
        );
        self.next_flow += 1;
        let send = SendHalf::new(self.initial_flow_credit, options.durable);
        let mut flow = Flow::new(id, options, send, RecvHalf::new(self.config.flow_window));
        flow.wants = want::OPEN;
        self.flows.insert(flow);
        Ok(id)
    }

    fn flow(&mut self, id: FlowId) -> Result<&mut Flow, FlowError> {
        self.flows.get_mut(id).ok_or(FlowError::Gone)
    }

    /// Bytes [`Session::write`] would take now.
    pub fn write_room(&mut self, id: FlowId) -> Result<u64, FlowError> {
        let room = self.config.send_buffer;
        let flow = self.flow(id)?;
        if let Some(code) = flow.send.reset {
            return Err(FlowError::Stopped(code));
        }
        let room = room.saturating_sub(flow.send.buffered());
        if room == 0 {
            flow.wants_writable = true;
        }
        Ok(room)
    }

    /// Hands bytes over to be sent. More than [`Session::write_room`] is taken too: the limit is
    /// the caller's to keep.
    pub fn write(&mut self, id: FlowId, bytes: Bytes) -> Result<(), FlowError> {
        let flow = self.flow(id)?;
        if let Some(code) = flow.send.reset {
            return Err(FlowError::Stopped(code));
        }
        if flow.send.is_finished() {
            return Err(FlowError::Gone);
        }
        flow.send.write(bytes);
        self.flows.touch(id);
        Ok(())
    }

    /// No more bytes will be written: the peer reads an end after the last one.
    pub fn finish(&mut self, id: FlowId) -> Result<(), FlowError> {
        let flow = self.flow(id)?;
        if let Some(code) = flow.send.reset {
            return Err(FlowError::Stopped(code));
        }
        flow.send.finish();
        self.flows.touch(id);
        Ok(())
    }

    /// Offset of the next byte to be written, and of the first the peer has not acknowledged.
    pub fn send_offsets(&self, id: FlowId) -> Option<(u64, u64)> {
        self.flows
            .get(id)
            .map(|f| (f.send.end(), f.send.acked_to()))
    }

    /// Whether everything written so far, the end included, was acknowledged.
    pub fn is_flushed(&self, id: FlowId) -> bool {
        self.flows.get(id).is_none_or(|f| {
            f.send.acked_to() == f.send.end() && (!f.send.is_finished() || f.send.is_fin_acked())
        })
    }

    /// Reads the next bytes, at most `max` of them.
    pub fn read(&mut self, id: FlowId, max: usize) -> Result<Read, FlowError> {
        let Some(flow) = self.flows.get_mut(id) else {
            return Err(FlowError::Gone);
        };
        flow.told_readable = false;
        if flow.end == Some(FlowEnd::DeadlinePassed) {
            return Err(FlowError::DeadlinePassed);
        }
        if let Some(code) = flow.recv.reset {
            return Err(FlowError::Reset(code));
        }
        let chunk = flow.recv.read_chunk(max);
        let at_end = flow.recv.is_at_end();
        let n = chunk.as_ref().map_or(0, Bytes::len) as u64;
        self.on_read(id, n);
        Ok(match chunk {
            Some(chunk) => Read::Chunk(chunk),
            None if at_end => Read::End,
            None => Read::Pending,
        })
    }

    /// Reads into `out`; `Ok(None)` is the end, `Ok(Some(0))` nothing now.
    pub fn read_into(&mut self, id: FlowId, out: &mut [u8]) -> Result<Option<usize>, FlowError> {
        let Some(flow) = self.flows.get_mut(id) else {
            return Err(FlowError::Gone);
        };
        flow.told_readable = false;
        if flow.end == Some(FlowEnd::DeadlinePassed) {
            return Err(FlowError::DeadlinePassed);
        }
        if let Some(code) = flow.recv.reset {
            return Err(FlowError::Reset(code));
        }
        let n = flow.recv.read(out);
        let at_end = flow.recv.is_at_end();
        self.on_read(id, n as u64);
        Ok(if n == 0 && at_end { None } else { Some(n) })
    }

    /// R-FLOW-9: whatever frees session credit, a reader or an end, tells the peer in time.
    pub(crate) fn offer_credit(&mut self) {
        let window = self.config.session_window;
        if self.credit.consumed + window - self.credit.told >= window / 4 {
            self.says |= say::CREDIT;
        }
    }

    fn on_read(&mut self, id: FlowId, n: u64) {
        self.credit.consumed += n;
        self.offer_credit();
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.recv.wants_credit() {
            flow.wants |= want::CREDIT;
        }
        self.flows.touch(id);
        self.retire_if_complete(id);
    }

    /// Whether our direction's end was written.
    pub fn is_finishing(&self, id: FlowId) -> bool {
        self.flows.get(id).is_none_or(|f| f.send.is_finished())
    }

    /// How many bytes of a flow were read so far, and its length if known.
    pub fn received(&self, id: FlowId) -> Option<(u64, Option<u64>)> {
        self.flows
            .get(id)
            .map(|f| (f.recv.read_to(), f.recv.final_size()))
    }

    /// Abandons our direction; the peer's reader sees `code`.
    pub fn reset(&mut self, id: FlowId, code: u64) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.send.is_complete() {
            return;
        }
        flow.send.reset = Some(code);
        flow.end.get_or_insert(FlowEnd::Local(code));
        flow.wants |= want::RESET;
        self.flows.touch(id);
        self.retire_if_complete(id);
    }

    /// Asks the peer to stop its direction; what still arrives is dropped.
    pub fn stop(&mut self, id: FlowId, code: u64) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.recv.is_complete() {
            return;
        }
        let unread = flow.recv.reached() - flow.recv.read_to();
        self.credit.consumed += unread;
        self.says |= say::CREDIT;
        flow.recv.stopped = Some(code);
        flow.recv.discard();
        flow.end.get_or_insert(FlowEnd::Local(code));
        flow.wants |= want::STOP;
        self.flows.touch(id);
        self.retire_if_complete(id);
    }

    /// Changes a flow's deadline; the peer learns it.
    pub fn set_deadline(&mut self, id: FlowId, deadline: Option<Time>) -> Result<(), FlowError> {
        let flow = self.flow(id)?;
        if flow.options.deadline != deadline {
            flow.options.deadline = deadline;
            // R-DEADLINE-2: a peer may have used the last number there is.
            flow.deadline_seq = (flow.deadline_seq + 1).min(d2tp_wire::VARINT_MAX);
            flow.wants |= want::DEADLINE;
            self.flows.on_deadline_changed();
            self.flows.touch(id);
        }
        Ok(())
    }
    /// A flow's deadline.
    pub fn deadline(&self, id: FlowId) -> Option<Time> {
        self.flows.get(id).and_then(|f| f.options.deadline)
    }
    /// What a flow was opened with.
    pub fn options(&self, id: FlowId) -> Option<FlowOptions> {
        self.flows.get(id).map(|f| f.options)
    }

    /// The application made everything read below `offset` safe on disk.
    pub fn set_durable(&mut self, id: FlowId, offset: u64) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.recv.set_durable(offset) {
            self.flows.want(id, want::DURABLE);
        }
    }
    /// The application is done with everything below `offset`: it is never delivered again.
    pub fn set_committed(&mut self, id: FlowId, offset: u64) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if offset > flow.committed {
            flow.committed = offset;
            self.flows.want(id, want::COMMITTED);
        }
    }

    /// Asks the peer to hold back this flow, or to go on.
    pub fn pause(&mut self, id: FlowId, paused: bool, reason: Reason) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.pause_out.1 != paused || flow.pause_out.2 != reason {
            flow.pause_out = (flow.pause_out.0 + 1, paused, reason);
            self.flows.want(id, want::PAUSE);
        }
    }

    /// Sends an unreliable datagram, unless it is still here at `expires`.
    pub fn send_datagram(&mut self, context: u64, bytes: Bytes, expires: Time) {
        if self.datagrams.len() == DATAGRAMS_MAX {
            self.datagrams.pop_front();
        }
        self.datagrams.push_back(Waiting {
            context,
            bytes,
            expires,
        });
    }

    pub(crate) fn retire_if_complete(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get_mut(id).filter(|f| f.is_over()) else {
            return;
        };
        if !flow.told_end {
            flow.told_end = true;
            let end = flow.end.unwrap_or(FlowEnd::Complete);
            self.emit(Event::Ended { flow: id, end });
        }
        if self.flows.get(id).is_some_and(Flow::is_settled) {
            self.forget_flow(id);
        }
    }

    fn forget_flow(&mut self, id: FlowId) {
        if let Some(flow) = self.flows.remove(id) {
            if flow.recv.stopped.is_none() && flow.recv.reset.is_none() {
                self.credit.consumed += flow.recv.reached() - flow.recv.read_to();
            }
            self.offer_credit();
            self.duplicate_bytes += flow.recv.duplicate();
        }
    }

    /// Ends a flow here and now, without a word to the peer.
    pub(crate) fn end_flow(&mut self, id: FlowId, end: FlowEnd) {
        let Some(flow) = self.flows.get(id) else {
            return;
        };
        if !flow.told_end {
            self.emit(Event::Ended { flow: id, end });
        }
        self.forget_flow(id);
    }

    // R-DEADLINE-1
    /// Ends a flow here and now; the peer, which does the same by itself, is told how many bytes
    /// were sent as soon as there is a path, so that both agree on the session's credit.
    fn expire_flow(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        flow.end.get_or_insert(FlowEnd::DeadlinePassed);
        flow.options.deadline = None;
        flow.send.drop_bytes();
        self.flows.on_deadline_changed();
        self.reset(id, CODE_DEADLINE);
        self.stop(id, CODE_DEADLINE);
        self.retire_if_complete(id);
    }

    // ---- paths ----

    /// Begins to use a link: a new path, or the first packet of a handshake where there are no
    /// keys. `gated`: payload on it needs grants (a metered link).
    pub fn open_path(&mut self, now: Time, addresses: Addresses, gated: bool) {
        if self.life == Life::Closed || self.role == Role::Responder {
            return;
        }
        if self
            .paths
            .iter()
            .any(|p| p.addresses == addresses && p.state != PathState::Silent)
        {
            return;
        }
        // R-HS-9: after an hour asleep new keys come first.
        let fresh = now.since(self.keys_at) < self.config.keys_max;
        let spare = if self.keys.is_some() && fresh && !self.paths.is_full() {
            self.spare.pop_first()
        } else {
            None
        };
        let Some((id, (cid, token))) = spare else {
            return self.knock_at(now, addresses, gated);
        };
        if !self.issued.contains_key(&id) || !self.use_path_id(id) {
            return self.knock_at(now, addresses, gated);
        }
        let mut path = Path::new(now, id, addresses, &self.config, (cid, token));
        path.gated = gated;
        path.status_seq = 1;
        path.wants |= path::want::STATUS;
        // Our side needs no proof of a server we already know, only that the path works.
        path.validated = true;
        path.beside_another = self.paths.iter().any(|p| p.state == PathState::Active);
        path.challenge(self.rng.array());
        self.paths.push(path);
        self.issue_ids(id.0 + SPARE_PATHS);
        self.wake(now);
        self.flows.touch_all();
    }

    /// True if this path id was never used under these keys; now it is.
    pub(crate) fn use_path_id(&mut self, id: PathId) -> bool {
        let n = u64::from(id.0);
        self.used_paths.insert(n, n + 1) == 1
    }

    pub(crate) fn knock_at(&mut self, now: Time, addresses: Addresses, gated: bool) {
        match &mut self.knock {
            Some(knock) => knock.add(now, addresses, gated),
            None => {
                let knock = Knock::new(now, addresses, gated, &mut self.rng);
                self.cid_changes.extend(knock.routes(self.generation + 1));
                self.knock = Some(knock);
                if self.life != Life::Established {
                    self.life = Life::Handshaking;
                }
            }
        }
    }

    /// Issues connection ids for all path ids up to `last`.
    pub(crate) fn issue_ids(&mut self, last: u32) {
        for n in self.issued_to..=last {
            let cid = Cid(self.rng.array());
            let token = self
                .make_token
                .as_ref()
                .map_or([0; TOKEN_BYTES], |make| make(cid));
            let path = PathId(n);
            self.issued.insert(
                path,
                Issued {
                    cid,
                    token,
                    tell: true,
                },
            );
            self.cid_changes.push(CidChange::Add {
                cid,
                path,
                generation: self.generation,
            });
        }
        self.issued_to = self.issued_to.max(last + 1);
        // R-PATH-10: ids a device skipped are taken back, with some patience for reordering.
        let stale: Vec<PathId> = self
            .issued
            .keys()
            .copied()
            .filter(|p| p.0 + ISSUED_MAX <= last && self.paths.get(*p).is_none())
            .collect();
        for path in stale {
            if let Some(issued) = self.issued.remove(&path) {
                self.cid_changes.push(CidChange::Remove(issued.cid));
            }
        }
    }

    /// The link is gone: everything in flight on it travels elsewhere, or waits.
    pub fn on_link_down(&mut self, now: Time, link: LinkId) {
        if let Some(knock) = &mut self.knock
            && !knock.drop_link(link)
        {
            self.drop_knock();
        }
        loop {
            let slot = self.paths.iter().position(|p| p.addresses.link == link);
            let Some(slot) = slot else { break };
            let path = self.remove_path(slot);
            self.tell_gone(path);
        }
        self.suspend_if_idle(now, Reason::NoPath);
    }

    /// R-PATH-8: the peer learns on whatever path comes next that this one is no more, and what
    /// arrived on it to the last.
    pub(crate) fn tell_gone(&mut self, path: Path) {
        if self.gone.len() == PATHS_MAX {
            self.gone.remove(0);
        }
        self.gone.push(Gone {
            path: path.id,
            received: path.acks.ranges().collect(),
            tell: true,
        });
    }

    /// Stops using a link that is still up: the peer is told on the very path, which then goes.
    pub fn close_path(&mut self, now: Time, link: LinkId, reason: Reason) {
        if self.keys.is_none() || self.paths.iter().all(|p| p.addresses.link != link) {
            return self.on_link_down(now, link);
        }
        for path in self.paths.iter_mut().filter(|p| p.addresses.link == link) {
            path.status = PathStatus::Gone;
            path.status_seq = u64::from(u32::MAX);
            path.reason = reason;
            path.wants |= path::want::STATUS;
            path.probe_now = true;
        }
    }

    /// Whether there is something to say that no ACK or timer brings up.
    pub fn has_news(&self) -> bool {
        self.says != 0 || self.flows.has_dirty()
    }

    pub(crate) fn drop_knock(&mut self) {
        if let Some(knock) = self.knock.take() {
            let routes = knock.routes(self.generation + 1);
            self.cid_changes
                .extend(routes.into_iter().filter_map(|r| match r {
                    CidChange::Add { cid, .. } => Some(CidChange::Remove(cid)),
                    CidChange::Remove(_) => None,
                }));
        }
    }

    pub(crate) fn remove_path(&mut self, slot: usize) -> Path {
        let Session {
            paths,
            flows,
            issued,
            says,
            gone,
            ..
        } = self;
        let mut path = paths.remove(slot);
        path.recovery.abandon(|said, arrived| {
            on_said(said, arrived, flows, None, issued, says, gone);
        });
        for flow in flows.iter_mut() {
            flow.grants_in.forget_path(path.id);
            flow.grants_out.forget_path(path.id);
        }
        flows.touch_all();
        if let Some(issued) = self.issued.remove(&path.id) {
            self.cid_changes.push(CidChange::Remove(issued.cid));
        }
        self.emit(Event::PathDown {
            path: path.id,
            link: path.addresses.link,
        });
        path
    }

    pub(crate) fn suspend_if_idle(&mut self, now: Time, reason: Reason) {
        if self.life == Life::Closed || !self.paths.is_empty() || self.knock.is_some() {
            return;
        }
        if self.life != Life::Suspended || self.suspended_at.is_none() {
            self.life = Life::Suspended;
            self.suspended_at = Some(now);
            self.emit(Event::Suspended(reason));
        }
    }

    pub(crate) fn wake(&mut self, now: Time) {
        if let Some(at) = self.suspended_at.take() {
            self.emit(Event::Woken {
                after: now.since(at),
            });
        }
        if self.keys.is_some() && self.life != Life::Closed {
            self.life = Life::Established;
        }
    }

    /// Says what the path over `link` may be used for.
    pub fn set_path_status(
        &mut self,
        link: LinkId,
        status: PathStatus,
        gated: bool,
        reason: Reason,
    ) {
        for path in self.paths.iter_mut().filter(|p| p.addresses.link == link) {
            if (path.status, path.gated) != (status, gated) {
                (path.status, path.gated, path.reason) = (status, gated, reason);
                path.status_seq += 1;
                path.wants |= path::want::STATUS;
            }
        }
        self.flows.touch_all();
    }

    /// Lets a flow spend `more` payload bytes on the gated path over `link` from now on; zero
    /// revokes. Counts for both directions, each with its own budget.
    pub fn grant(&mut self, id: FlowId, link: LinkId, more: u64) {
        let Some(path) = self
            .paths
            .iter()
            .find(|p| p.addresses.link == link)
            .map(|p| p.id)
        else {
            return;
        };
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        flow.grants_out.grant(path, more);
        flow.grants_in.set_local(path, more);
        self.flows.touch(id);
    }

    /// What the peer may still send of a flow over `link`, and what it spent there.
    pub fn grant_left(&self, id: FlowId, link: LinkId) -> Option<(u64, u64)> {
        let path = self.paths.iter().find(|p| p.addresses.link == link)?.id;
        let flow = self.flows.get(id)?;
        Some((flow.grants_out.left(path), flow.grants_out.spent(path)))
    }

    /// Whether there is a path over this link.
    pub fn has_path(&self, link: LinkId) -> bool {
        self.paths.iter().any(|p| p.addresses.link == link)
            || self.knock.as_ref().is_some_and(|k| k.has_link(link))
    }

    /// The socket refused a datagram of this size.
    pub fn on_too_big(&mut self, now: Time, link: LinkId, size: usize) {
        for path in self.paths.iter_mut().filter(|p| p.addresses.link == link) {
            path.mtu
                .on_too_big(now, size.min(usize::from(u16::MAX)) as u16);
            let datagram = path.mtu.current() as u64;
            path.recovery.controller.set_datagram(datagram);
        }
    }

    /// Ends the session: the peer is told on every path that works, once.
    pub fn close(&mut self, code: u64, text: &str) {
        if self.life == Life::Closed || self.closing.is_some() {
            return;
        }
        self.closing = Some((code, text.chars().take(80).collect()));
        if self.keys.is_none() || self.paths.is_empty() {
            self.end(SessionEnd::Local);
        }
    }

    pub(crate) fn end(&mut self, end: SessionEnd) {
        if self.life == Life::Closed {
            return;
        }
        self.life = Life::Closed;
        self.drop_knock();
        for id in self.flows.ids() {
            self.end_flow(id, FlowEnd::SessionEnded);
        }
        for (_, issued) in std::mem::take(&mut self.issued) {
            self.cid_changes.push(CidChange::Remove(issued.cid));
        }
        self.paths = Paths::default();
        self.keys = None;
        self.emit(Event::Closed(end));
    }

    /// The peer broke the protocol: tell it, end the session.
    pub(crate) fn fault(&mut self, fault: PeerFault) {
        // R-CLOSE-2: the first fault is the one that is told.
        if self.closing.is_some() {
            return;
        }
        let text = fault.to_string();
        self.closing = Some((u64::from(Reason::Protocol as u8), text));
        self.broken = Some(fault);
    }

    /// Payload arrived on a path: is it another one than before?
    pub(crate) fn note_payload(&mut self, now: Time, slot: usize) {
        let path = self.paths.at(slot);
        let (id, link, beside) = (path.id, path.addresses.link, path.beside_another);
        match self.last_payload {
            Some((before, _, _)) if before == id => {}
            Some((_, from, at)) => {
                let kind = if beside {
                    SwitchKind::MakeBeforeBreak
                } else {
                    SwitchKind::BreakBeforeMake
                };
                self.emit(Event::Switched {
                    from: Some(from),
                    to: link,
                    kind,
                    silence: now.since(at),
                });
            }
            None => {}
        }
        self.last_payload = Some((id, link, now));
    }

    // ---- time ----

    /// When [`Session::handle_timeouts`] wants to be called next.
    pub fn next_timeout(&mut self) -> Time {
        if self.life == Life::Closed {
            return Time::NEVER;
        }
        let mut at = self.flows.next_deadline();
        if let Some(knock) = &self.knock {
            at = at.min(knock.next_at());
        }
        if self.life == Life::Suspended {
            return at.min(self.absence_at());
        }
        at = at.min(self.rx_key_drop_at);
        if self.role == Role::Initiator && self.knock.is_none() {
            at = at.min(self.keys_at + self.config.keys_max);
        }
        let (delay, interval) = (self.config.ack_delay_max, self.config.probe_interval_max);
        let waits = self.role == Role::Initiator;
        for path in self.paths.iter() {
            if waits && self.expects_payload(path) {
                at = at.min(path.ask_at(delay));
            }
            at = at.min(path.recovery.loss_at());
            // What may not be sent to an unproved address waits for bytes from there, not for time.
            if path.may_speak() {
                at = at
                    .min(path.recovery.probe_at(delay, interval))
                    .min(path.acks.due())
                    .min(path.paced_until);
            }
        }
        if self.role == Role::Responder {
            at = at.min(self.last_rx + self.config.silence_max);
        }
        at
    }

    /// Whether payload could arrive on this path at any moment.
    fn expects_payload(&self, path: &Path) -> bool {
        path.status == PathStatus::Available
            && self.flows.iter().any(|f| {
                !f.recv.is_complete()
                    && !f.pause_out.1
                    && (!path.gated || f.grants_out.left(path.id) > 0)
            })
    }

    fn absence_at(&self) -> Time {
        match (self.role, self.suspended_at) {
            (Role::Responder, Some(at))
                if self.flows.iter().all(|f| f.options.deadline.is_none()) =>
            {
                at + self.config.absence_max
            }
            _ => Time::NEVER,
        }
    }

    /// Lets time pass.
    pub fn handle_timeouts(&mut self, now: Time) {
        if self.life == Life::Closed {
            return;
        }
        while self.flows.next_deadline() <= now {
            let late: Vec<FlowId> = self
                .flows
                .iter()
                .filter(|f| f.options.deadline.is_some_and(|d| d <= now))
                .map(|f| f.id)
                .collect();
            for id in late {
                self.expire_flow(id);
            }
        }
        if self.rx_key_drop_at <= now {
            self.rx_key_drop_at = Time::NEVER;
            if let Some(keys) = &mut self.keys {
                keys.forget_previous();
            }
        }
        // R-HS-9: a session that goes on gets a fresh handshake every hour.
        if self.role == Role::Initiator
            && self.life == Life::Established
            && self.knock.is_none()
            && self.keys_at + self.config.keys_max <= now
        {
            let best = self.paths.iter().min_by_key(|p| p.rank());
            if let Some((addresses, gated)) = best.map(|p| (p.addresses, p.gated)) {
                self.knock_at(now, addresses, gated);
            }
        }
        if self.life == Life::Suspended {
            if self.absence_at() <= now {
                self.end(SessionEnd::Local);
            }
            return;
        }
        let (delay, interval) = (self.config.ack_delay_max, self.config.probe_interval_max);
        for slot in 0..self.paths.len() {
            if self.role == Role::Initiator
                && self
                    .paths
                    .iter()
                    .nth(slot)
                    .is_some_and(|p| p.ask_at(delay) <= now && self.expects_payload(p))
            {
                let path = self.paths.at(slot);
                path.quiet += 1;
                path.pad_next = true;
                path.probe_now = true;
                path.wants |= path::want::PING;
            }
            let Session {
                paths,
                flows,
                issued,
                says,
                gone,
                ..
            } = self;
            let live_besides = paths.has_live_besides(slot);
            let path = paths.at(slot);
            if path.recovery.loss_at() <= now {
                let mut own = path.wants;
                let outcome = path.recovery.on_loss_timeout(now, delay, |said, arrived| {
                    on_said(
                        said,
                        arrived,
                        flows,
                        Some((path.id, &mut own)),
                        issued,
                        says,
                        gone,
                    );
                });
                path.wants = own;
                if outcome.lost_size > 0 && path.mtu.on_loss(outcome.lost_size) {
                    path.recovery
                        .controller
                        .set_datagram(path.mtu.current() as u64);
                }
                if outcome.mtu_lost {
                    path.mtu.on_probe_lost(now);
                }
            }
            let mut silent = false;
            if path.may_speak() && path.recovery.probe_at(delay, interval) <= now {
                path.recovery.on_probe_timeout(now);
                path.probe_now = true;
                path.wants |= path::want::PING;
                if path.recovery.probes >= PROBES_BEFORE_SILENT && live_besides {
                    // R-PATH-6: what it holds travels elsewhere at once; it stays, probed.
                    silent = path.state != PathState::Silent;
                    path.state = PathState::Silent;
                    let mut own = path.wants;
                    path.recovery.abandon(|said, arrived| {
                        on_said(
                            said,
                            arrived,
                            flows,
                            Some((path.id, &mut own)),
                            issued,
                            says,
                            gone,
                        );
                    });
                    path.wants = own;
                } else if let Some(oldest) = path.recovery.oldest() {
                    let again: Vec<Said> = oldest.said().collect();
                    let mut own = path.wants;
                    for said in again {
                        on_said(
                            said,
                            false,
                            flows,
                            Some((path.id, &mut own)),
                            issued,
                            says,
                            gone,
                        );
                    }
                    path.wants = own;
                }
            }
            let (id, link) = (path.id, path.addresses.link);
            if silent {
                self.emit(Event::PathSilent { path: id, link });
            }
        }
        if self.role == Role::Responder
            && self.last_rx + self.config.silence_max <= now
            && self.life == Life::Established
        {
            // R-SUSPEND-2: only devices wake; a server that hears nothing says nothing.
            self.life = Life::Suspended;
            self.suspended_at = Some(now);
            for slot in 0..self.paths.len() {
                let Session {
                    paths,
                    flows,
                    issued,
                    says,
                    gone,
                    ..
                } = self;
                let path = paths.at(slot);
                path.state = PathState::Silent;
                path.recovery.abandon(|said, arrived| {
                    on_said(said, arrived, flows, None, issued, says, gone);
                });
                path.wants = 0;
                path.probe_now = false;
            }
            self.emit(Event::Suspended(Reason::NoPath));
        }
    }
}

/// Ids that may be issued and unused, beside those of live paths.
const ISSUED_MAX: u32 = 16;

/// RESET and STOP code of a flow whose deadline passed; the codes 0xd000 to 0xd0ff are D2TP's own.
pub(crate) const CODE_DEADLINE: u64 = 0xd001;

/// Probe timeouts after which a path's data goes elsewhere.
const PROBES_BEFORE_SILENT: u32 = 2;

/// Something said on a path arrived or was lost: tells its owner.
#[inline]
pub(crate) fn on_said(
    said: Said,
    arrived: bool,
    flows: &mut Flows,
    own_path: Option<(PathId, &mut u16)>,
    issued: &mut BTreeMap<PathId, Issued>,
    says: &mut u16,
    gone: &mut Vec<Gone>,
) {
    match said {
        Said::Data(d) => {
            if let Some(flow) = flows.get_mut(d.flow) {
                if arrived {
                    flow.send.on_acked(d.offset, u64::from(d.len), d.fin);
                    flows.note_acked(d.flow);
                } else {
                    flow.send.on_lost(d.offset, u64::from(d.len), d.fin);
                    flows.touch(d.flow);
                }
            }
        }
        Said::Flow { flow: id, what } if arrived => {
            if what & (want::OPEN | want::RESET | want::RESUME) != 0
                && let Some(flow) = flows.get_mut(id)
            {
                flow.announced |= what & want::OPEN != 0;
                flow.reset_acked |= what & want::RESET != 0;
                flow.claiming &= what & want::RESUME == 0;
                flows.note_acked(id);
            }
        }
        Said::Gone(path) if arrived => gone.retain(|g| g.path != path),
        _ if arrived => {}
        Said::Ack { .. } => {}
        Said::Flow { flow, what } => {
            flows.want(flow, what);
        }
        Said::Gone(path) => gone
            .iter_mut()
            .filter(|g| g.path == path)
            .for_each(|g| g.tell = true),
        Said::Refused(flow) => flows.refuse(flow, Reason::UnknownFlow),
        Said::Session { what } => *says |= what,
        Said::Path { path, what } => {
            if what == path::want::CID {
                if let Some(issued) = issued.get_mut(&path) {
                    issued.tell = true;
                }
            } else if let Some((id, wants)) = own_path
                && id == path
            {
                *wants |= what;
            }
        }
        Said::Grant { flow, path } => {
            if let Some(f) = flows.get_mut(flow) {
                f.grants_out.on_lost(path);
                flows.touch(flow);
            }
        }
        Said::Spent { flow, path } => {
            if let Some(f) = flows.get_mut(flow) {
                f.grants_in.on_lost(path);
                flows.touch(flow);
            }
        }
    }
}
