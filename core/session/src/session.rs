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

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use d2tp_seal::{CookieSecrets, PacketKeys, PublicKey, Rng, SecretKey};
use d2tp_time::{Span, Time};
use d2tp_wire::{Cid, FlowId, PathId, PathStatus, ReasonCode, TOKEN_BYTES};

use crate::careful_resume_state::PathMetricsCache;
use crate::client_handshake::ClientHandshake;
use crate::config::{EVENTS_MAX, EndpointConfig};
use crate::datagram_queue::DatagramSendQueue;
use crate::event::FlowArrival;
use crate::event::{PeerFault, SessionEnd, SessionEvent};
use crate::flow::{FlowTable, want};
use crate::link::{Addresses, LinkId};
use crate::path::{self, PathState, Paths};
use crate::path_map::PathMap;
use crate::path_scheduler::{PathScheduler, path_scheduler};
use crate::ranges::RangeSet;
use crate::sent_packet::SentFrame;
use crate::session_state::{CidChange, Role, SessionState};
use crate::ticket::ClientTicket;
use crate::trace::SessionTrace;

/// What the session as a whole still has to say.
pub(crate) mod say {
    pub(crate) const CREDIT: u16 = 1;
    pub(crate) const RESUME_END: u16 = 1 << 1;
    pub(crate) const CLOSE: u16 = 1 << 2;
    /// The status of paths that are frozen, which cannot say it themselves.
    pub(crate) const FROZEN: u16 = 1 << 3;
}

/// A connection id issued to the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IssuedCid {
    pub(crate) cid: Cid,
    pub(crate) token: [u8; TOKEN_BYTES],
    pub(crate) must_send: bool,
}

/// The last word on a path that is no more.
#[derive(Clone, Debug)]
pub(crate) struct GonePath {
    pub(crate) path: PathId,
    /// Packets received on it, largest first.
    pub(crate) received: Vec<(u64, u64)>,
    pub(crate) must_send: bool,
}

/// Why a flow call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// There is no such flow, or it is over.
    #[error("the flow is over")]
    Gone,
    /// The peer reset it with this code.
    #[error("the peer reset the flow (code {0:#x})")]
    Reset(u64),
    /// The peer wants no more bytes.
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

/// Outcome of reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
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
    /// Local and remote address of the path.
    pub addresses: Addresses,
    /// How far it got.
    pub state: PathState,
    /// What the device says of it.
    pub status: PathStatus,
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
    /// How many the peer allows, if it said so (PATH_LIMIT).
    pub limit: Option<u64>,
    /// Datagram size in use.
    pub mtu: usize,
    /// Payload bytes received.
    pub payload_in: u64,
    /// Payload bytes sent, re-sends included.
    pub payload_out: u64,
    /// Payload bytes sent that are copies of what another path carried.
    pub copied_out: u64,
    /// Payload bytes sent that another path had lost (mirroring).
    pub fetched_out: u64,
    /// Bytes sent and received that were not payload: headers, ACKs, frames about flows and paths.
    pub control_out: u64,
    /// Bytes of control packets received.
    pub control_in: u64,
    /// The peer proved that it is at the address.
    pub proved: bool,
    /// When a packet last came on it.
    pub heard_at: Time,
    /// Packets that counted as lost.
    pub lost: u64,
    /// Packets counted as lost that arrived after all.
    pub spurious: u64,
    /// Lost packets that were taken for random and met no congestion response.
    pub random: u64,
}

/// Credit of the session as a whole.
#[derive(Debug, Default)]
pub(crate) struct SessionCredit {
    pub(crate) sent: u64,
    pub(crate) peer_max: u64,
    pub(crate) received: u64,
    pub(crate) consumed: u64,
    pub(crate) advertised: u64,
}

/// The path payload arrives on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActivePath {
    pub(crate) path: PathId,
    pub(crate) link: LinkId,
    /// When payload last arrived on it.
    pub(crate) at: Time,
    /// From then to the first payload on another path, if there was any.
    pub(crate) gap: Option<Span>,
}

/// A D2TP session.
pub struct Session {
    pub(crate) role: Role,
    pub(crate) config: Arc<EndpointConfig>,
    pub(crate) local: SecretKey,
    pub(crate) peer: PublicKey,
    pub(crate) instance: u64,
    /// The epoch of the handshake in force.
    pub(crate) epoch: u32,
    /// Epochs the initiator may still use: reserved in its journal before.
    pub(crate) epochs: std::ops::Range<u32>,
    pub(crate) state: SessionState,
    pub(crate) rng: Rng,
    pub(crate) keys: Option<PacketKeys>,
    /// Handshakes done so far: tells packets of an older one apart.
    pub(crate) generation: u32,
    /// Boxed, as other state that a quiet session lacks: a server holds many of those.
    pub(crate) handshake: Option<Box<ClientHandshake>>,
    /// For the next handshake without a path (a device's).
    pub(crate) ticket: Option<Box<ClientTicket>>,
    pub(crate) paths: Paths,
    pub(crate) path_scheduler: Box<dyn PathScheduler>,
    pub(crate) flows: FlowTable,
    pub(crate) credit: SessionCredit,
    pub(crate) wants: u16,
    /// Paths that are no more and of which the peer does not know it yet.
    pub(crate) gone: Vec<GonePath>,
    pub(crate) path_metrics_cache: PathMetricsCache,
    pub(crate) issued: PathMap<IssuedCid>,
    pub(crate) spare: PathMap<(Cid, [u8; TOKEN_BYTES])>,
    /// Path ids ever in use under these keys: none comes back (R-SEAL-2).
    pub(crate) used_paths: RangeSet,
    /// Ids issued so far, the next one.
    pub(crate) issued_to: u32,
    /// Flows opened here get ids of this epoch, never below that of the handshake in force
    /// when the id was used before (R-FLOW-8).
    pub(crate) flow_epoch: u32,
    pub(crate) next_flow: u32,
    pub(crate) cid_changes: Vec<CidChange>,
    pub(crate) events: VecDeque<SessionEvent>,
    /// Events of this session that wait in the endpoint's queue.
    pub(crate) events_out: usize,
    pub(crate) datagrams: DatagramSendQueue,
    /// Code and words of the CLOSE that is still to be heard (R-CLOSE-3), how often it was said, and
    /// when that is given up.
    pub(crate) closing: Option<Box<(u64, String)>>,
    pub(crate) close_sent: u32,
    pub(crate) closing_until: Time,
    /// The peer may know of this session.
    pub(crate) known_to_peer: bool,
    /// The instance was another process's: until the peer, if it knows the instance, has dropped that one's flows ours wait.
    pub(crate) inherits_instance: bool,
    /// A CLOSE arrived in the packet being handled.
    pub(crate) received_close: Option<Box<SessionEnd>>,
    /// The answer to a CLOSE, for the endpoint to send: the session is no more.
    pub(crate) close_ack: Option<Box<(Addresses, Vec<u8>)>>,
    /// SUSPEND is being said (a device's).
    pub(crate) suspending: Option<ReasonCode>,
    /// SUSPEND was heard (a server's).
    pub(crate) paused: bool,
    /// Links on which both directions contend (a device's).
    pub(crate) half_duplex: Vec<LinkId>,
    /// A path is kept open for the server, flows or not.
    pub(crate) reachable: bool,
    /// Flows of the same client key in other sessions of this server.
    pub(crate) flows_elsewhere: usize,
    /// Why it is closing, if the peer broke a rule.
    pub(crate) peer_fault: Option<Box<PeerFault>>,
    pub(crate) suspended_at: Option<Time>,
    pub(crate) last_rx: Time,
    pub(crate) active_path: Option<ActivePath>,
    pub(crate) rx_key_drop_at: Time,
    pub(crate) sealed_packets: u64,
    /// The packet being handled held something that could not be kept.
    pub(crate) unretained: bool,
    /// When the keys in force were agreed.
    pub(crate) keys_at: Time,
    /// Tokens for the ids we issue (a server's).
    pub(crate) cookie_secrets: Option<Arc<CookieSecrets>>,
    pub(crate) initial_flow_credit: u64,
    /// Highest absolute number of bytes delivered twice, for reports.
    pub(crate) duplicate_bytes: u64,
    /// Where everything is told, if somebody wants to know.
    pub(crate) trace: Option<Box<SessionTrace>>,
    /// Payload of the datagram handled last.
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
            ticket: None,
            paths: Paths::default(),
            flows: FlowTable::default(),
            credit: SessionCredit::default(),
            wants: 0,
            gone: Vec::new(),
            path_metrics_cache: PathMetricsCache::default(),
            issued: PathMap::default(),
            spare: PathMap::default(),
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
            keys_at: now,
            cookie_secrets: None,
            initial_flow_credit: 0,
            duplicate_bytes: 0,
            trace: None,
            arrivals: Vec::new(),
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
    pub fn state(&self) -> SessionState {
        self.state
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

    pub(crate) fn emit(&mut self, event: SessionEvent) {
        if let Some(trace) = &mut self.trace {
            trace.event(&event);
        }
        // A driver that does not take events is our own mistake; dropping the newest keeps order.
        // The end is never dropped: whoever keeps the session waits for it (R-CLOSE-1).
        if self.events.len() + self.events_out < EVENTS_MAX
            || matches!(event, SessionEvent::Closed(_))
        {
            self.events.push_back(event);
        }
    }
    /// The next thing the driver should know.
    pub fn poll_event(&mut self) -> Option<SessionEvent> {
        self.events.pop_front()
    }
}

/// Something said on a path arrived or was lost: tells its owner.
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
                    // Bytes open a flow as well as an OPEN does.
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
        // The original of a copy is still under way, or sent again itself.
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
