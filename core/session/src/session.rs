//! A session: its state, and the order in which inputs are handled.
//!
//! Packets and timers arrive through `handle_*`, requests of the application through the calls on
//! flows and paths. Both only change state and mark frames to be sent. [`Session::poll_transmit`]
//! sends them, [`Session::poll_event`] informs the driver.
//!
//! ```text
//!             open_path                  SYN+ACK                    all paths gone
//!  Suspended ───────────▶ Handshaking ───────────▶ Established ───────────────────▶ Suspended
//!   (no keys)                                        ▲    │                          (keys kept)
//!                                                    └────┼──── open_path, or a packet received
//!                                                         └──── close ──▶ Closed
//! ```

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use d2tp_seal::{CookieSecrets, PacketKeys, PublicKey, Rng, SecretKey, SessionSecret};
use d2tp_time::{Span, Time};
use d2tp_wire::{Cid, FlowId, PathId, PathStatus, ReasonCode, TOKEN_BYTES};

use crate::careful_resume_state::PathMetricsCache;
use crate::client_handshake::ClientHandshake;
use crate::config::{EVENTS_MAX, EndpointConfig};
use crate::datagram_queue::DatagramSendQueue;
use crate::event::FlowArrival;
use crate::event::{PeerFault, SessionEnd, SessionEvent};
use crate::flow::{FlowTable, want};
use crate::key_exchange_state::{HybridKeys, HybridPolicy, KeyExchange};
use crate::link::{Addresses, LinkId};
use crate::path::{self, PathState, Paths};
use crate::path_map::PathMap;
use crate::path_scheduler::{PathScheduler, path_scheduler};
use crate::ranges::RangeSet;
use crate::sent_packet::SentFrame;
use crate::session_state::{CidChange, Role, SessionState};
use crate::shared_bottleneck::SharedBottlenecks;
use crate::ticket::ClientTicket;
use crate::trace::SessionTrace;

/// Control frames that the session as a whole has to send, one bit each.
pub(crate) mod say {
    pub(crate) const CREDIT: u16 = 1;
    pub(crate) const RESUME_END: u16 = 1 << 1;
    pub(crate) const CLOSE: u16 = 1 << 2;
    /// The status of frozen paths, which they cannot carry themselves.
    pub(crate) const FROZEN: u16 = 1 << 3;
    /// The two halves of a KEY_SHARE.
    pub(crate) const SHARE_FIRST: u16 = 1 << 4;
    pub(crate) const SHARE_SECOND: u16 = 1 << 5;
}

/// A connection id issued to the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IssuedCid {
    pub(crate) cid: Cid,
    pub(crate) must_send: bool,
}

/// The final report on a path that was closed.
#[derive(Clone, Debug)]
pub(crate) struct GonePath {
    pub(crate) path: PathId,
    /// Packets received on the path, largest first.
    pub(crate) received: Vec<(u64, u64)>,
    pub(crate) must_send: bool,
}

/// Why a flow call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// There is no such flow, or it is over.
    #[error("the flow is over")]
    Gone,
    /// The peer reset the flow with this code.
    #[error("the peer reset the flow (code {0:#x})")]
    Reset(u64),
    /// The peer stopped this end's direction with this code.
    #[error("the peer stopped reading (code {0:#x})")]
    Stopped(u64),
    /// The flow's deadline passed.
    #[error("the deadline passed")]
    DeadlinePassed,
    /// The limit on open flows is reached.
    #[error("too many flows are open")]
    TooMany,
    /// The session is over.
    #[error("the session is over")]
    SessionOver,
}

/// The result of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The next bytes of the flow.
    Chunk(Bytes),
    /// The end: all that the peer sent was read.
    End,
    /// Nothing is available now.
    Pending,
}

/// Statistics of a path.
#[derive(Clone, Debug, PartialEq)]
pub struct PathStats {
    /// The path's number.
    pub id: PathId,
    /// Local and remote address of the path.
    pub addresses: Addresses,
    /// The path's state.
    pub state: PathState,
    /// The status that the device gave the path.
    pub status: PathStatus,
    /// Whether payload needs grants.
    pub gated: bool,
    /// The smoothed round trip.
    pub rtt: Span,
    /// The smallest round trip measured.
    pub rtt_min: Span,
    /// The number of bytes that may be in flight.
    pub window: u64,
    /// The number of bytes in flight.
    pub in_flight: u64,
    /// The limit on bytes in flight that the peer announced (PATH_LIMIT).
    pub limit: Option<u64>,
    /// The datagram size in use, in bytes.
    pub mtu: usize,
    /// Payload bytes received.
    pub payload_in: u64,
    /// Payload bytes sent, retransmissions included.
    pub payload_out: u64,
    /// Payload bytes sent that are copies of data sent on another path.
    pub copied_out: u64,
    /// Payload bytes sent to repair losses of another path (mirroring).
    pub fetched_out: u64,
    /// Bytes sent that are not payload: headers, ACKs, frames about flows and paths.
    pub control_out: u64,
    /// Bytes of control packets received.
    pub control_in: u64,
    /// Whether the peer's address is validated.
    pub proved: bool,
    /// When a packet last arrived on the path.
    pub heard_at: Time,
    /// The number of packets that counted as lost.
    pub lost: u64,
    /// The number of packets that counted as lost but arrived.
    pub spurious: u64,
    /// The number of lost packets that were classified as random and caused no congestion response.
    pub random: u64,
}

/// Flow control credit of the session as a whole.
#[derive(Debug, Default)]
pub(crate) struct SessionCredit {
    pub(crate) sent: u64,
    pub(crate) peer_max: u64,
    pub(crate) received: u64,
    pub(crate) consumed: u64,
    pub(crate) advertised: u64,
}

/// The path on which payload arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActivePath {
    pub(crate) path: PathId,
    pub(crate) link: LinkId,
    /// When payload last arrived on this path.
    pub(crate) at: Time,
    /// The time from then to the first payload on another path, if any has arrived.
    pub(crate) gap: Option<Span>,
}

/// A D2TP session: its paths, flows, keys and loss recovery.
pub struct Session {
    pub(crate) role: Role,
    pub(crate) config: Arc<EndpointConfig>,
    pub(crate) local: SecretKey,
    pub(crate) peer: PublicKey,
    pub(crate) instance: u64,
    /// The epoch of the current handshake.
    pub(crate) epoch: u32,
    /// Epochs that the initiator reserved in its journal and has not used.
    pub(crate) epochs: std::ops::Range<u32>,
    pub(crate) state: SessionState,
    pub(crate) rng: Rng,
    pub(crate) keys: Option<PacketKeys>,
    /// The number of completed handshakes, to recognize packets of an older one.
    pub(crate) generation: u32,
    /// The running handshake. It is boxed, like other state that an idle session lacks, because a
    /// server has many idle sessions.
    pub(crate) handshake: Option<Box<ClientHandshake>>,
    /// Whether the running handshake is with another node than the one to which the paths lead.
    pub(crate) moves_to_node: bool,
    /// A device's ticket for the next handshake without a path.
    pub(crate) ticket: Option<Box<ClientTicket>>,
    /// The secret of the last exchange by ML-KEM.
    pub(crate) session_secret: Option<Box<SessionSecret>>,
    /// The exchange by ML-KEM under the keys in force.
    pub(crate) key_exchange: Option<Box<KeyExchange>>,
    pub(crate) hybrid: HybridKeys,
    /// Whether nothing of flows is sent without hybrid keys (R-KEM-8).
    pub(crate) requires_hybrid: bool,
    pub(crate) paths: Paths,
    pub(crate) path_scheduler: Box<dyn PathScheduler>,
    pub(crate) flows: FlowTable,
    pub(crate) credit: SessionCredit,
    pub(crate) wants: u16,
    /// Closed paths of which the peer does not know yet.
    pub(crate) gone: Vec<GonePath>,
    pub(crate) path_metrics_cache: PathMetricsCache,
    pub(crate) issued: PathMap<IssuedCid>,
    /// Connection ids that the peer issued, of path ids that are not used yet.
    pub(crate) spare: PathMap<Cid>,
    /// The tokens of those ids and of the paths' ids. Only a device keeps them: they prove a server's
    /// UNKNOWN (R-UNKNOWN-1).
    pub(crate) unknown_tokens: PathMap<[u8; TOKEN_BYTES]>,
    /// Path ids that were used under these keys. None is used again (R-SEAL-2).
    pub(crate) used_paths: RangeSet,
    /// The next connection id to issue.
    pub(crate) issued_to: u32,
    /// The epoch of ids of flows opened here, at least that of the handshake that was in force when
    /// the id was last used (R-FLOW-8).
    pub(crate) flow_epoch: u32,
    pub(crate) next_flow: u32,
    pub(crate) cid_changes: Vec<CidChange>,
    pub(crate) events: VecDeque<SessionEvent>,
    /// Events of this session that wait in the endpoint's queue.
    pub(crate) events_out: usize,
    pub(crate) datagrams: DatagramSendQueue,
    /// Code and text of the CLOSE that the peer has not acknowledged (R-CLOSE-3).
    pub(crate) closing: Option<Box<(u64, String)>>,
    pub(crate) close_sent: u32,
    pub(crate) closing_until: Time,
    /// Whether the peer may know of this session.
    pub(crate) known_to_peer: bool,
    /// Whether another process used the instance before. If the peer knows it, new flows wait until
    /// the peer has dropped the flows of that process.
    pub(crate) inherits_instance: bool,
    /// The session end by a CLOSE in the packet that is being handled.
    pub(crate) received_close: Option<Box<SessionEnd>>,
    /// The answer to a CLOSE, for the endpoint to send after the session ended.
    pub(crate) close_ack: Option<Box<(Addresses, Vec<u8>)>>,
    /// The reason in the SUSPEND that a device is sending.
    pub(crate) suspending: Option<ReasonCode>,
    /// Whether a server has received SUSPEND.
    pub(crate) paused: bool,
    /// The furthest deadline that a device may move a flow to, if that is nearer than for others.
    pub(crate) moved_deadline_max: Option<Span>,
    /// A device's links whose two directions share one medium.
    pub(crate) half_duplex: Vec<LinkId>,
    /// Whether a path is kept open for the server, with or without flows.
    pub(crate) reachable: bool,
    /// Flows of the same client key in other sessions of this server.
    pub(crate) flows_elsewhere: usize,
    /// The rule that the peer broke, if the session closes because of that.
    pub(crate) peer_fault: Option<Box<PeerFault>>,
    pub(crate) suspended_at: Option<Time>,
    pub(crate) last_rx: Time,
    pub(crate) active_path: Option<ActivePath>,
    pub(crate) rx_key_drop_at: Time,
    pub(crate) sealed_packets: u64,
    /// Whether the packet that is being handled contained data that could not be stored.
    pub(crate) unretained: bool,
    /// Whether a writer found no room in memory, until the endpoint has registered that.
    pub(crate) awaits_memory: bool,
    /// When the keys in force were agreed.
    pub(crate) keys_at: Time,
    /// The shortest round trip of the path that last measured one; zero before that. Handshakes expect it.
    pub(crate) round_trip_known: Span,
    /// Which paths share a bottleneck, of a session that had several at once.
    pub(crate) shared_bottlenecks: Option<Box<SharedBottlenecks>>,
    /// A server's secrets, from which it makes the tokens of the ids that it issues when it sends
    /// them.
    pub(crate) cookie_secrets: Option<Arc<CookieSecrets>>,
    pub(crate) initial_flow_credit: u64,
    /// Bytes that were received more than once, for reports.
    pub(crate) duplicate_bytes: u64,
    /// Trace records of the session, if tracing is on.
    pub(crate) trace: Option<Box<SessionTrace>>,
    /// Payload per flow of the datagram handled last.
    pub(crate) arrivals: Vec<FlowArrival>,
}

impl Session {
    pub(crate) fn new(
        role: Role,
        config: impl Into<Arc<EndpointConfig>>,
        local: SecretKey,
        peer: PublicKey,
        instance: u64,
        epochs: std::ops::Range<u32>,
        rng: Rng,
        now: Time,
    ) -> Self {
        let flow_epoch = epochs.start;
        let config = config.into();
        Session {
            role,
            path_scheduler: path_scheduler(config.path_scheduler),
            session_secret: None,
            key_exchange: None,
            hybrid: HybridKeys::Unused,
            requires_hybrid: role == Role::Initiator && config.hybrid == HybridPolicy::Required,
            config,
            local,
            peer,
            instance,
            epoch: epochs.start,
            epochs,
            state: SessionState::Suspended,
            rng,
            keys: None,
            generation: 0,
            handshake: None,
            moves_to_node: false,
            ticket: None,
            paths: Paths::default(),
            flows: FlowTable::default(),
            credit: SessionCredit::default(),
            wants: 0,
            gone: Vec::new(),
            path_metrics_cache: PathMetricsCache::default(),
            issued: PathMap::default(),
            spare: PathMap::default(),
            unknown_tokens: PathMap::default(),
            used_paths: RangeSet::default(),
            issued_to: 0,
            flow_epoch,
            next_flow: 0,
            cid_changes: Vec::new(),
            events: VecDeque::new(),
            events_out: 0,
            datagrams: DatagramSendQueue::default(),
            closing: None,
            close_sent: 0,
            closing_until: Time::NEVER,
            known_to_peer: false,
            inherits_instance: false,
            received_close: None,
            close_ack: None,
            suspending: None,
            paused: false,
            moved_deadline_max: None,
            half_duplex: Vec::new(),
            reachable: false,
            flows_elsewhere: 0,
            peer_fault: None,
            suspended_at: None,
            last_rx: now,
            active_path: None,
            rx_key_drop_at: Time::NEVER,
            sealed_packets: 0,
            unretained: false,
            awaits_memory: false,
            keys_at: now,
            round_trip_known: Span::ZERO,
            shared_bottlenecks: None,
            cookie_secrets: None,
            initial_flow_credit: 0,
            duplicate_bytes: 0,
            trace: None,
            arrivals: Vec::new(),
        }
    }

    // ---- queries ----

    /// The public key of the peer; for the initiator, of the expected peer.
    pub fn peer(&self) -> PublicKey {
        self.peer
    }
    /// The device's instance.
    pub fn instance(&self) -> u64 {
        self.instance
    }
    /// The epoch of the current handshake.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }
    /// The state of the session.
    pub fn state(&self) -> SessionState {
        self.state
    }
    /// Our role in the session.
    pub fn role(&self) -> Role {
        self.role
    }
    /// Statistics of every path.
    pub fn path_stats(&self) -> Vec<PathStats> {
        self.paths
            .iter()
            .map(|p| PathStats {
                id: p.id,
                addresses: p.addresses,
                state: p.state,
                status: p.status,
                gated: p.gated,
                rtt: p.recovery.rtt.smoothed(),
                rtt_min: p.recovery.rtt.min(),
                window: p.recovery.controller.window(),
                in_flight: p.recovery.in_flight,
                limit: p.limit(),
                mtu: p.mtu.current(),
                payload_in: p.payload_in,
                payload_out: p.payload_out,
                copied_out: p.copied_out,
                fetched_out: p.fetched_out,
                control_out: p.control.sent,
                control_in: p.control.received,
                proved: p.validated,
                heard_at: p.last_rx,
                lost: p.recovery.lost_total,
                spurious: p.recovery.spurious_total,
                random: p.recovery.random_total,
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

    /// Keeps a connection id that the peer issued, for a path that may be opened later.
    pub(crate) fn keep_peer_id(&mut self, path: PathId, cid: Cid, token: [u8; TOKEN_BYTES]) {
        self.spare.insert(path, cid);
        if self.role == Role::Initiator {
            self.unknown_tokens.insert(path, token);
        }
    }

    pub(crate) fn emit(&mut self, event: SessionEvent) {
        if let Some(trace) = &mut self.trace {
            trace.event(&event);
        }
        // A driver that does not take events is faulty; dropping the newest ones keeps their order.
        // The end is never dropped, because the owner of the session waits for it (R-CLOSE-1).
        if self.events.len() + self.events_out < EVENTS_MAX
            || matches!(event, SessionEvent::Closed(_))
        {
            self.events.push_back(event);
        }
    }
    /// The next event for the driver.
    pub fn poll_event(&mut self) -> Option<SessionEvent> {
        let event = self.events.pop_front();
        if self.events.is_empty() && self.state == SessionState::Suspended {
            // The event of the suspension came after the buffers were released.
            self.events = VecDeque::new();
        }
        event
    }
}

/// Tells the owner of a frame whether the frame arrived or was lost.
#[inline]
pub(crate) fn on_frame_fate(
    said: SentFrame,
    arrived: bool,
    flows: &mut FlowTable,
    own_path: Option<(PathId, &mut u16)>,
    issued: &mut PathMap<IssuedCid>,
    says: &mut u16,
    gone: &mut Vec<GonePath>,
) {
    match said {
        SentFrame::Data(d) => {
            if let Some(flow) = flows.get_mut(d.flow) {
                if arrived {
                    // DATA opens a flow as well as OPEN does.
                    flow.announced = true;
                    flow.send.on_acked(d.offset, u64::from(d.len), d.fin);
                    flows.note_acked(d.flow);
                } else {
                    flow.lost_on = own_path.map(|(id, _)| id);
                    flow.send.on_lost(d.offset, u64::from(d.len), d.fin);
                    flows.touch(d.flow);
                }
            }
        }
        SentFrame::Copy(d) if arrived => {
            if let Some(flow) = flows.get_mut(d.flow) {
                flow.announced = true;
                flow.send.on_acked(d.offset, u64::from(d.len), d.fin);
                flows.note_acked(d.flow);
            }
        }
        SentFrame::Flow { flow: id, what } if arrived => {
            if what & (want::OPEN | want::RESET | want::RESUME) != 0
                && let Some(flow) = flows.get_mut(id)
            {
                flow.announced |= what & want::OPEN != 0;
                flow.opened |= what & want::OPEN != 0;
                flow.reset_acked |= what & want::RESET != 0;
                let claimed = flow.claiming && what & want::RESUME != 0;
                flow.claiming &= !claimed;
                flows.claims_delivered += u64::from(claimed);
                flows.note_acked(id);
            }
        }
        SentFrame::Gone(path) if arrived => gone.retain(|g| g.path != path),
        SentFrame::Refused(flow) => flows.on_refusal(flow, arrived),
        _ if arrived => {}
        // The original of a copy is still in flight, or is itself sent again.
        SentFrame::Ack { .. } | SentFrame::Copy(_) => {}
        SentFrame::Flow { flow, what } => {
            flows.want(flow, what);
        }
        SentFrame::Gone(path) => gone
            .iter_mut()
            .filter(|g| g.path == path)
            .for_each(|g| g.must_send = true),
        SentFrame::Session { what } => *says |= what,
        SentFrame::Path { path, what } => {
            if what == path::want::CID {
                if let Some(issued) = issued.get_mut(&path) {
                    issued.must_send = true;
                }
            } else if let Some((id, wants)) = own_path
                && id == path
            {
                *wants |= what;
            }
        }
        SentFrame::Grant { flow, path } => {
            if let Some(f) = flows.get_mut(flow) {
                f.grants_out.on_lost(path);
                flows.touch(flow);
            }
        }
        SentFrame::Spent { flow, path } => {
            if let Some(f) = flows.get_mut(flow) {
                f.grants_in.on_lost(path);
                flows.touch(flow);
            }
        }
    }
}
