//! The flows of a session: their table, the control frames that each has to send, and the order in
//! which they send data.

use std::collections::{BTreeMap, VecDeque};

use d2tp_time::Time;
use d2tp_wire::{FlowId, PathId, ReasonCode};

use crate::config::{REFUSALS_MAX, SEEN_RANGES_AWAKE_MAX};
use crate::event::FlowEnd;
use crate::flow_options::{FlowOptions, PRIORITY_LAST};
use crate::grant::{IssuedGrants, ReceivedGrants};
use crate::memory_pool::MemoryCharge;
use crate::path_selection::PathSelection;
use crate::ranges::RangeSet;
use crate::record::{SEEN_EPOCHS_MAX, SEEN_RANGES_MAX, UsedFlowIds};
use crate::recv_half::RecvHalf;
use crate::send_half::SendHalf;

/// The part of the send buffer that must be free before a waiting writer is woken. With one half, a
/// writer would sleep until half of a long path's data has left; a smaller part wakes it more
/// often.
const WRITABLE_PART: u64 = 8; // a guess
/// Packets that one flow may fill before the next flow has its turn.
const TURN_PACKETS: u32 = 32;
/// How many queued flows are searched for lost bytes beside the next one.
const LOST_LOOKED_AT: usize = 32;
/// The number of flows and gated paths of which a device knows what an ended flow carried there.
const ENDED_SPENDING_MAX: usize = 64; // a guess: a device reads it within a tenth of a second

/// Control frames that a flow has to send, one bit each. A bit is set when the state changes, and
/// cleared when the frame leaves.
pub(crate) mod want {
    pub(crate) const OPEN: u16 = 1;
    pub(crate) const RESET: u16 = 1 << 1;
    pub(crate) const STOP: u16 = 1 << 2;
    pub(crate) const CREDIT: u16 = 1 << 3;
    pub(crate) const DEADLINE: u16 = 1 << 4;
    pub(crate) const DURABLE: u16 = 1 << 5;
    pub(crate) const COMMITTED: u16 = 1 << 6;
    pub(crate) const PAUSE: u16 = 1 << 7;
    pub(crate) const RESUME: u16 = 1 << 8;
    pub(crate) const RESUMED: u16 = 1 << 9;
}

/// A flow of a session.
#[derive(Debug)]
pub(crate) struct SessionFlow {
    pub(crate) id: FlowId,
    pub(crate) options: FlowOptions,
    pub(crate) deadline_seq: u64,
    pub(crate) send: SendHalf,
    pub(crate) recv: RecvHalf,
    pub(crate) wants: u16,
    pub(crate) grants_in: ReceivedGrants,
    pub(crate) grants_out: IssuedGrants,
    /// The path that lost bytes last.
    pub(crate) lost_on: Option<PathId>,
    pub(crate) committed: u64,
    pub(crate) peer_durable: u64,
    /// The last FLOW_PAUSE that we sent: sequence number, whether paused, and why.
    pub(crate) pause_out: (u64, bool, ReasonCode),
    /// The last FLOW_PAUSE that the peer sent: sequence number, whether paused, and why.
    pub(crate) pause_in: (u64, bool, ReasonCode),
    /// Whether the flow still has to be claimed or confirmed after a resume. Until then it sends
    /// nothing (R-RESUME-3).
    pub(crate) unclaimed: bool,
    /// The offset from which the application of a tentatively restored session was asked for bytes.
    pub(crate) requested_from: Option<u64>,
    pub(crate) end: Option<FlowEnd>,
    /// Whether the peer knows of the flow.
    pub(crate) announced: bool,
    /// Whether the peer received our OPEN, not only data of the flow.
    pub(crate) opened: bool,
    /// Whether the flow's RESUME is in flight.
    pub(crate) claiming: bool,
    /// Whether the peer received our RESET.
    pub(crate) reset_acked: bool,
    /// Whether the application was informed of the end.
    pub(crate) end_reported: bool,
    queued: bool,
    dirty: bool,
    turn: u32,
    pub(crate) readable_reported: bool,
    pub(crate) wants_writable: bool,
    /// Whether the bytes come from a source, which can be read again.
    pub(crate) has_source: bool,
    /// Whether a SendFrom event waits for the application. Bytes that it writes before taking the
    /// event belong to the old offset, and will be written again.
    pub(crate) rewinding: bool,
    /// Whether the flow comes from a record and its application does not know yet from which offset to
    /// write.
    pub(crate) restored: bool,
    /// Whether a SYN opened the flow and the device has not repeated the OPEN yet.
    pub(crate) opened_by_syn: bool,
    /// Whether the peer opened the flow again, and may not know how much of it arrived.
    pub(crate) reopened: bool,
    /// Whether a server received neither OPEN nor DATA of the flow so far, only frames that overtook them.
    pub(crate) is_opened_early: bool,
    /// Whether the flow was opened while the session moves to another node: it is opened there, since the node before may
    /// not be able to pass it on.
    pub(crate) waits_for_node: bool,
    /// The paths that the application selected for the flow.
    pub(crate) path_selection: PathSelection,
    /// What the application holds for the flow ([`crate::EndpointConfig::flow_memory`]), charged to the peer.
    pub(crate) application: MemoryCharge,
}

impl SessionFlow {
    /// Whether the flow's OPEN has not arrived. Until it arrives, DURABLE may have set one of the
    /// flow's options.
    pub(crate) fn awaits_open(&self) -> bool {
        let durable = self.options.durable;
        self.options
            == FlowOptions {
                durable,
                ..FlowOptions::default()
            }
    }

    /// Keeps sent bytes until the peer has made them durable.
    pub(crate) fn make_durable(&mut self) {
        self.options.durable = true;
        self.send.make_durable();
    }

    pub(crate) fn new(id: FlowId, options: FlowOptions, send: SendHalf, recv: RecvHalf) -> Self {
        SessionFlow {
            id,
            options,
            deadline_seq: 0,
            send,
            recv,
            wants: 0,
            grants_in: ReceivedGrants::default(),
            grants_out: IssuedGrants::default(),
            lost_on: None,
            committed: 0,
            peer_durable: 0,
            pause_out: (0, false, ReasonCode::None),
            pause_in: (0, false, ReasonCode::None),
            unclaimed: false,
            requested_from: None,
            end: None,
            announced: false,
            opened: false,
            claiming: false,
            reset_acked: false,
            end_reported: false,
            queued: false,
            dirty: false,
            turn: 0,
            readable_reported: false,
            wants_writable: false,
            has_source: false,
            rewinding: false,
            restored: false,
            opened_by_syn: false,
            reopened: false,
            is_opened_early: false,
            waits_for_node: false,
            path_selection: PathSelection::Any,
            application: MemoryCharge::default(),
        }
    }

    /// Whether both directions are over for the application.
    pub(crate) fn is_over(&self) -> bool {
        self.send.is_complete() && self.recv.is_complete()
    }

    /// R-FLOW-7: whether the flow needs no more communication: the peer has our RESET, and we know
    /// how many bytes it sent, so that both ends agree on the session's credit.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_over() && (self.send.reset.is_none() || self.reset_acked) && self.recv.is_counted()
    }

    /// Whether the application waits for bytes, or this end waits for an acknowledgement.
    pub(crate) fn awaits_data(&self) -> bool {
        (!self.recv.is_complete() && !self.pause_out.1)
            || (!self.send.is_complete() && self.send.buffered() > 0)
    }

    /// Whether these sent bytes may be sent again on another path.
    pub(crate) fn may_copy(&self, offset: u64, len: u64) -> bool {
        !self.unclaimed && !self.pause_in.1 && self.send.is_unacked(offset, len)
    }

    /// Whether a writer waits that has enough room now. It does not wait any more then.
    pub(crate) fn take_writable(&mut self, send_buffer: u64) -> bool {
        let is_writable = self.wants_writable && self.is_writable(send_buffer);
        self.wants_writable &= !is_writable;
        is_writable
    }

    /// Whether the flow has enough room to wake its writer.
    fn is_writable(&self, send_buffer: u64) -> bool {
        let has_room = if self.has_source {
            self.send.wants_source(send_buffer)
        } else {
            self.send.room(send_buffer) >= send_buffer / WRITABLE_PART
        };
        has_room && self.send.memory_room() > 0
    }

    fn may_send(&self, session_room: u64) -> bool {
        !self.unclaimed
            && !self.waits_for_node
            && !self.pause_in.1
            && self.send.has_data(session_room)
    }
}

/// All flows of a session.
#[derive(Debug, Default)]
pub(crate) struct FlowTable {
    /// Each flow has memory of its own: a node of the map has room for eleven, and most sessions have one.
    table: BTreeMap<FlowId, Box<SessionFlow>>,
    /// The number of flows whose window is larger than that of a new one.
    grown: u64,
    /// Flows that may have data to send, in the order of their turns.
    ready: VecDeque<FlowId>,
    /// The lowest value of all priorities in `ready`: no flow there is sent before one with this
    /// priority.
    first_priority: u8,
    /// Flows with control frames to send.
    dirty: VecDeque<FlowId>,
    /// The flow ids that the peer used, by epoch.
    seen: BTreeMap<u32, RangeSet>,
    seen_floor: u32,
    next_deadline: Option<Time>,
    /// Whether a flow must stay reachable; updated together with the deadlines.
    any_reachable: bool,
    deadline_stale: bool,
    /// Flows with newly acknowledged bytes, until they are taken.
    acked: Vec<FlowId>,
    /// Claims to be answered with a refusal, until the peer has the answer.
    refused: VecDeque<RefusedClaim>,
    /// The number of claims of this resume that the peer received. Both ends count them.
    pub(crate) claims_delivered: u64,
    pub(crate) claims_received: u64,
    /// Payload bytes that flows which ended lately carried on gated paths.
    ended_spending: Vec<(FlowId, PathId, u64)>,
    /// Whether a flow has a path selection, so that the steadiest path must be known.
    pub(crate) routed: bool,
    pub(crate) steadiest: Option<PathId>,
}

/// A claim that was refused.
#[derive(Debug)]
struct RefusedClaim {
    flow: FlowId,
    reason: ReasonCode,
    /// Whether the REFUSED frame waits to be sent. Otherwise it is in flight.
    waits: bool,
}

impl FlowTable {
    /// Records that bytes of this flow were acknowledged.
    #[inline]
    pub(crate) fn note_acked(&mut self, id: FlowId) {
        if self.acked.last() != Some(&id) {
            self.acked.push(id);
        }
    }
    /// Releases unused memory.
    pub(crate) fn shrink(&mut self) {
        self.ready.shrink_to_fit();
        self.dirty.shrink_to_fit();
        self.acked.shrink_to_fit();
        self.refused.shrink_to_fit();
        self.ended_spending.shrink_to_fit();
    }
    /// Keeps what a flow carried on gated paths, because it is forgotten before its device has read that.
    pub(crate) fn note_ended_spending(&mut self, flow: &SessionFlow) {
        let both = flow.grants_in.spending().chain(flow.grants_out.spending());
        let spent = both.filter(|(_, bytes)| *bytes > 0);
        let spent = spent.map(|(path, bytes)| (flow.id, path, bytes));
        self.ended_spending.extend(spent);
        let surplus = self.ended_spending.len().saturating_sub(ENDED_SPENDING_MAX);
        self.ended_spending.drain(..surplus);
    }
    /// Payload bytes that an ended flow carried on a gated path, in both directions.
    pub(crate) fn ended_spending(&self, id: FlowId, path: PathId) -> Option<u64> {
        let of_flow = |(flow, on, _): &&(FlowId, PathId, u64)| (*flow, *on) == (id, path);
        let spent = self.ended_spending.iter().filter(of_flow);
        spent.map(|(.., bytes)| *bytes).reduce(|a, b| a + b)
    }
    pub(crate) fn take_acked(&mut self) -> Vec<FlowId> {
        std::mem::take(&mut self.acked)
    }
    /// Whether another claim can be refused now. Otherwise it must be repeated later.
    pub(crate) fn may_refuse(&self, id: FlowId) -> bool {
        self.refused.len() < REFUSALS_MAX || self.refused.iter().any(|r| r.flow == id)
    }
    /// Refuses a claim. A repeated claim gets the first reason again (R-RESUME-9).
    pub(crate) fn refuse(&mut self, id: FlowId, reason: ReasonCode) {
        if let Some(refusal) = self.refused.iter_mut().find(|r| r.flow == id) {
            refusal.waits = true;
        } else if self.refused.len() < REFUSALS_MAX {
            self.refused.push_back(RefusedClaim {
                flow: id,
                reason,
                waits: true,
            });
        }
    }
    pub(crate) fn next_refusal(&mut self) -> Option<(FlowId, ReasonCode)> {
        let refusal = self.refused.iter_mut().find(|r| r.waits)?;
        refusal.waits = false;
        Some((refusal.flow, refusal.reason))
    }
    pub(crate) fn has_refusals(&self) -> bool {
        self.refused.iter().any(|r| r.waits)
    }
    /// Handles a REFUSED frame that was acknowledged, or that was lost and is sent again unchanged
    /// (R-RESUME-9).
    pub(crate) fn on_refusal(&mut self, id: FlowId, arrived: bool) {
        if arrived {
            self.refused.retain(|r| r.flow != id);
        } else if let Some(refusal) = self.refused.iter_mut().find(|r| r.flow == id) {
            refusal.waits = true;
        }
    }
    /// Forgets claims and refusals, because the keys changed: flows must be claimed again.
    pub(crate) fn forget_claims(&mut self) {
        self.refused.clear();
        self.claims_delivered = 0;
        self.claims_received = 0;
        // Path ids stand for other paths from now on.
        self.ended_spending.clear();
    }

    pub(crate) fn get(&self, id: FlowId) -> Option<&SessionFlow> {
        self.table.get(&id).map(Box::as_ref)
    }
    pub(crate) fn get_mut(&mut self, id: FlowId) -> Option<&mut SessionFlow> {
        self.table.get_mut(&id).map(Box::as_mut)
    }
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }
    pub(crate) fn iter(&self) -> impl Iterator<Item = &SessionFlow> {
        self.table.values().map(Box::as_ref)
    }
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut SessionFlow> {
        self.table.values_mut().map(Box::as_mut)
    }
    pub(crate) fn ids(&self) -> Vec<FlowId> {
        self.table.keys().copied().collect()
    }

    /// The number of flows whose window is larger than that of a new one.
    pub(crate) fn grown(&self) -> u64 {
        self.grown
    }

    /// R-FLOW-13: sets how many bytes of a flow may be in flight or unread. Returns the flow, if it is there.
    pub(crate) fn set_share(&mut self, id: FlowId, share: u64) -> Option<&mut SessionFlow> {
        let flow = self.table.get_mut(&id)?;
        let had_grown = flow.recv.has_grown();
        flow.recv.set_share(share);
        self.grown += u64::from(!had_grown && flow.recv.has_grown());
        Some(flow)
    }

    pub(crate) fn insert(&mut self, flow: SessionFlow) {
        self.deadline_stale = true;
        self.grown += u64::from(flow.recv.has_grown());
        let id = flow.id;
        self.table.insert(id, Box::new(flow));
        self.touch(id);
    }
    pub(crate) fn remove(&mut self, id: FlowId) -> Option<Box<SessionFlow>> {
        self.deadline_stale = true;
        let flow = self.table.remove(&id)?;
        self.grown -= u64::from(flow.recv.has_grown());
        if flow.queued {
            self.ready.retain(|f| *f != id);
        }
        if flow.dirty {
            self.dirty.retain(|f| *f != id);
        }
        Some(flow)
    }

    /// Marks a flow id of the peer as used.
    pub(crate) fn use_id(&mut self, id: FlowId) {
        let n = u64::from(id.counter());
        let set = self.seen.entry(id.epoch()).or_default();
        set.insert(n, n + 1);
        // R-FLOW-11
        if set.len() > SEEN_RANGES_AWAKE_MAX {
            set.close_first_gap();
        }
        while self.seen.len() > SEEN_EPOCHS_MAX {
            if let Some((epoch, _)) = self.seen.pop_first() {
                self.seen_floor = epoch + 1;
            }
        }
    }
    /// R-FLOW-5: whether the peer used this id before.
    pub(crate) fn was_used(&self, id: FlowId) -> bool {
        self.is_too_old(id)
            || self
                .seen
                .get(&id.epoch())
                .is_some_and(|s| s.contains(u64::from(id.counter())))
    }
    /// Whether the id is so old that it must count as used.
    pub(crate) fn is_too_old(&self, id: FlowId) -> bool {
        id.epoch() < self.seen_floor
    }
    /// The used ids for a record. If there are too many gaps, the lowest ones are closed.
    pub(crate) fn seen_record(&self) -> (u32, UsedFlowIds) {
        let seen = self.seen.iter().map(|(epoch, set)| {
            let mut ranges: Vec<(u64, u64)> = set.iter().collect();
            while ranges.len() > SEEN_RANGES_MAX {
                ranges[1].0 = ranges[0].0;
                ranges.remove(0);
            }
            (*epoch, ranges)
        });
        (self.seen_floor, seen.collect())
    }
    /// Restores the used ids of a record.
    pub(crate) fn restore_seen(&mut self, floor: u32, seen: &UsedFlowIds) {
        self.seen_floor = floor;
        for (epoch, ranges) in seen {
            let set = self.seen.entry(*epoch).or_default();
            for (start, end) in ranges {
                set.insert(*start, *end);
            }
        }
    }

    /// Updates whether the flow has something to send.
    pub(crate) fn touch(&mut self, id: FlowId) {
        let Some(flow) = self.table.get_mut(&id) else {
            return;
        };
        if !flow.queued && flow.may_send(u64::MAX) {
            flow.queued = true;
            self.first_priority = self.first_priority.min(flow.options.priority);
            self.ready.push_back(id);
        }
        let wants = flow.wants != 0 || flow.grants_in.wants() || flow.grants_out.wants();
        if !flow.dirty && wants && !flow.waits_for_node {
            flow.dirty = true;
            self.dirty.push_back(id);
        }
    }

    /// Marks a control frame of the flow to be sent.
    pub(crate) fn want(&mut self, id: FlowId, what: u16) {
        if let Some(flow) = self.table.get_mut(&id) {
            flow.wants |= what;
            self.touch(id);
        }
    }

    /// Lets flows be opened that waited for another node.
    pub(crate) fn release_waiting(&mut self) {
        for flow in self.iter_mut() {
            flow.waits_for_node = false;
        }
        self.touch_all();
    }

    pub(crate) fn touch_all(&mut self) {
        for id in self.ids() {
            self.touch(id);
        }
    }

    /// Whether the peer received every claim and every OPEN.
    pub(crate) fn are_claimed(&self) -> bool {
        self.table.values().all(|f| f.announced && !f.claiming)
    }

    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }
    pub(crate) fn front_dirty(&self) -> Option<FlowId> {
        self.dirty.front().copied()
    }
    /// Removes the first dirty flow, whose frames have all been written.
    pub(crate) fn pop_dirty(&mut self) {
        if let Some(id) = self.dirty.pop_front()
            && let Some(flow) = self.table.get_mut(&id)
        {
            flow.dirty = false;
        }
    }

    /// The next flow to send data on a path. Removes flows without data from the queue.
    #[inline]
    pub(crate) fn next_for(
        &mut self,
        path: PathId,
        gated: bool,
        session_room: u64,
    ) -> Option<FlowId> {
        let mut i = 0;
        let mut best: Option<(u8, usize, FlowId)> = None;
        let mut first_priority = PRIORITY_LAST;
        while i < self.ready.len() {
            let id = self.ready[i];
            let flow = self
                .table
                .get_mut(&id)
                .expect("flows in line are in the table");
            if !flow.may_send(u64::MAX) {
                flow.queued = false;
                self.ready.remove(i);
                continue;
            }
            first_priority = first_priority.min(flow.options.priority);
            let elsewhere = flow.path_selection == PathSelection::Steadiest
                && self.steadiest.is_some_and(|steadiest| steadiest != path);
            let allowed = flow.may_send(session_room)
                && !elsewhere
                && (!gated || flow.grants_in.room(path) > 0);
            if gated && !allowed {
                flow.grants_in.on_blocked(path);
                if !flow.dirty && flow.grants_in.wants() {
                    flow.dirty = true;
                    self.dirty.push_back(id);
                }
            }
            if allowed && best.is_none_or(|(p, ..)| flow.options.priority < p) {
                best = Some((flow.options.priority, i, id));
                if self.ready.len() == 1 || flow.options.priority <= self.first_priority {
                    return Some(id);
                }
            }
            i += 1;
        }
        // All flows were searched.
        self.first_priority = first_priority;
        best.map(|(_, _, id)| id)
    }

    /// A flow with lost bytes that another path lost; at least `granted` bytes of its grant on this
    /// path must be left.
    pub(crate) fn next_lost(&self, path: PathId, granted: Option<u64>) -> Option<FlowId> {
        let mut lost = self.ready.iter().take(LOST_LOOKED_AT).filter(|id| {
            self.table.get(id).is_some_and(|flow| {
                flow.send.has_lost()
                    && flow.may_send(0)
                    && flow.lost_on != Some(path)
                    && granted.is_none_or(|least| flow.grants_in.room(path) >= least)
            })
        });
        lost.next().copied()
    }

    /// Bytes of all flows that wait to be sent, counted up to `most`.
    pub(crate) fn unsent(&self, most: u64) -> u64 {
        let mut sum = 0;
        for flow in self.ready.iter().filter_map(|id| self.table.get(id)) {
            if sum >= most {
                break;
            }
            sum += flow.send.unsent();
        }
        sum
    }

    /// Records that the flow filled a packet; after several of them the next flow has its turn.
    #[inline]
    pub(crate) fn on_packet_filled(&mut self, id: FlowId) {
        if self.ready.len() < 2 {
            return;
        }
        let Some(flow) = self.table.get_mut(&id).filter(|f| f.queued) else {
            return;
        };
        flow.turn += 1;
        if flow.turn >= TURN_PACKETS {
            flow.turn = 0;
            self.ready.retain(|f| *f != id);
            self.ready.push_back(id);
        }
    }

    /// Records that a flow's deadline changed.
    pub(crate) fn on_deadline_changed(&mut self) {
        self.deadline_stale = true;
    }

    /// The next deadline of any flow.
    pub(crate) fn next_deadline(&mut self) -> Time {
        if self.deadline_stale {
            self.deadline_stale = false;
            self.next_deadline = self.table.values().filter_map(|f| f.options.deadline).min();
            self.any_reachable = self.table.values().any(|f| f.options.reachable);
        }
        self.next_deadline.unwrap_or(Time::NEVER)
    }
    /// Whether a flow must stay reachable, as of the last [`FlowTable::next_deadline`].
    pub(crate) fn any_reachable(&self) -> bool {
        self.any_reachable
    }
}
