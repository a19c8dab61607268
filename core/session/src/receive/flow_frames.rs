//! Frames of flows: opening, data, deadlines and resets.

use d2tp_time::Time;
use d2tp_wire::{FlowId, Frame, PathId, ReasonCode};

use super::end_of;
use crate::event::{FlowArrival, FlowEnd, PeerFault, SessionEvent};
use crate::flow::want;
use crate::flow_options::FlowOptions;
use crate::recv_half::FLOW_BYTES;
use crate::session::{Session, say};
use crate::session_state::Role;

impl Session {
    #[inline]
    pub(super) fn on_data(
        &mut self,
        slot: usize,
        id: FlowId,
        offset: u64,
        bytes: &[u8],
        fin: bool,
    ) -> Result<(), PeerFault> {
        let path = self.paths.at(slot);
        path.payload_in += bytes.len() as u64;
        let (path_id, gated) = (path.id, path.gated);
        let at = self.arrivals.len();
        self.arrivals.push(FlowArrival {
            flow: id,
            bytes: bytes.len() as u64,
            new: 0,
        });
        let new = self.take_bytes(gated.then_some(path_id), id, offset, bytes, fin)?;
        self.arrivals[at].new = new;
        Ok(())
    }

    /// Handles received bytes of a flow, and the gated path on which they arrived. Returns how many
    /// were new.
    #[inline]
    pub(crate) fn take_bytes(
        &mut self,
        gated: Option<PathId>,
        id: FlowId,
        offset: u64,
        bytes: &[u8],
        fin: bool,
    ) -> Result<u64, PeerFault> {
        if self.flows.get(id).is_none() {
            // The first packets of a flow may be reordered, so DATA opens it with default options.
            if !self.accept_flow(id, FlowOptions::default())? {
                return Ok(0);
            }
        }
        let flow = self
            .flows
            .get_mut(id)
            .expect("it was just accepted or known before");
        flow.announced = true;
        flow.is_opened_early = false;
        if let Some(path) = gated {
            flow.grants_out.on_received(path, bytes.len() as u64);
        }
        let arrival = flow.recv.on_data(id, offset, bytes, fin)?;
        if arrival.unkept {
            self.unretained = true;
            return Ok(0);
        }
        let ended = flow.recv.stopped.is_some();
        let notify = arrival.readable && !flow.readable_reported;
        flow.readable_reported |= notify;
        self.credit.received += arrival.advanced;
        if ended {
            self.credit.consumed += arrival.advanced;
        }
        // R-FLOW-3: the credit that was announced is the limit, also for all flows together.
        let advertised = self.credit.advertised;
        if self.credit.received > advertised {
            return Err(PeerFault::OverCredit {
                flow: None,
                end: self.credit.received,
                credit: advertised,
            });
        }
        if notify {
            self.emit(SessionEvent::Readable(id));
        }
        Ok(arrival.new)
    }

    /// Handles OPEN: the peer opened a flow, or repeats its OPEN.
    pub(crate) fn on_open(&mut self, now: Time, opening: &Frame<'_>) -> Result<(), PeerFault> {
        let Some((flow, mut options)) = FlowOptions::from_open_frame(now, opening) else {
            return Ok(());
        };
        let deadline = options.deadline;
        options.deadline = self.cut_deadline(now, deadline);
        self.reopen_claimed(flow);
        if self.accept_flow(flow, options)? {
            if let Some(f) = self.flows.get_mut(flow) {
                f.is_opened_early = false;
            }
        } else {
            // R-FLOW-5: the id was used, or is too old to tell. A peer that restarted after a crash
            // may not know that the flow is over, and must be informed; for others the answer is
            // redundant.
            self.unretained |= !self.flows.may_refuse(flow);
            self.flows.refuse(flow, ReasonCode::UnknownFlow);
        }
        if options.deadline != deadline {
            self.announce_deadline(flow, options.deadline);
        }
        Ok(())
    }

    /// R-FLOW-1: whether the peer may open a flow with this id.
    pub(super) fn may_peer_open(&self, id: FlowId) -> bool {
        id.by_initiator() == (self.role == Role::Responder)
    }

    /// Accepts a flow that the peer opened. False if the flow is over already.
    pub(super) fn accept_flow(
        &mut self,
        id: FlowId,
        options: FlowOptions,
    ) -> Result<bool, PeerFault> {
        let is_theirs = self.may_peer_open(id);
        if let Some(flow) = self.flows.get_mut(id) {
            if is_theirs && flow.awaits_open() {
                let was_durable = std::mem::replace(&mut flow.options, options).durable;
                if was_durable || options.durable {
                    flow.make_durable();
                }
                self.flows.on_deadline_changed();
            }
            return Ok(true);
        }
        if !is_theirs {
            return if id.epoch() < self.flow_epoch
                || (id.epoch() == self.flow_epoch && id.counter() < self.next_flow)
            {
                Ok(false)
            } else {
                Err(PeerFault::FlowId(id))
            };
        }
        if id.epoch() > self.epoch {
            return Err(PeerFault::FlowId(id));
        }
        if self.flows.was_used(id) {
            return Ok(false);
        }
        if self.flows.len() >= self.config.flows_max {
            return Err(PeerFault::TooManyFlows(self.config.flows_max));
        }
        // R-QUOTA-2: a device cannot know which flows its other programs opened, so the flow is
        // refused without a fault.
        if self.role == Role::Responder
            && (self.flows.len() + self.flows_elsewhere >= self.config.flows_per_key_max
                || self.config.memory.account(self.peer).room()
                    < FLOW_BYTES + self.config.flow_memory)
        {
            if self.flows.may_refuse(id) {
                self.flows.use_id(id);
                self.flows.refuse(id, ReasonCode::LimitReached);
            } else {
                self.unretained = true;
            }
            return Ok(false);
        }
        self.flows.use_id(id);
        let mut flow = self.new_flow(id, options);
        flow.announced = true;
        self.flows.insert(flow);
        self.emit(SessionEvent::Opened(id));
        Ok(true)
    }

    /// R-QUOTA-3: cuts a deadline to the furthest one that a device may set at a server.
    pub(super) fn cut_deadline(&self, now: Time, deadline: Option<Time>) -> Option<Time> {
        match self.role {
            Role::Responder => deadline.map(|d| d.min(now + self.config.deadline_max)),
            Role::Initiator => deadline,
        }
    }

    /// R-QUOTA-3: cuts a deadline that a device moves; its session may have a limit of its own.
    pub(super) fn cut_moved_deadline(&self, now: Time, deadline: Option<Time>) -> Option<Time> {
        let cut = self.cut_deadline(now, deadline);
        match self.moved_deadline_max {
            Some(max) => cut.map(|d| d.min(now + max)),
            None => cut,
        }
    }

    /// R-QUOTA-3: informs the peer of a deadline that was cut, so that both ends use the same one.
    pub(super) fn announce_deadline(&mut self, id: FlowId, deadline: Option<Time>) {
        if let Some(flow) = self.flows.get_mut(id)
            && flow.options.deadline == deadline
        {
            flow.deadline_seq = (flow.deadline_seq + 1).min(d2tp_wire::VARINT_MAX);
            self.flows.want(id, want::DEADLINE);
        }
    }

    /// R-FLOW-12: opens a flow for a frame that overtook its OPEN and will not be sent again. False if there is no such
    /// flow, because it is over, or of this side.
    pub(super) fn open_for_early_frame(&mut self, id: FlowId) -> Result<bool, PeerFault> {
        if self.flows.get(id).is_some() {
            return Ok(true);
        }
        if !self.accept_flow(id, FlowOptions::default())? {
            return Ok(false);
        }
        if let Some(flow) = self.flows.get_mut(id) {
            flow.is_opened_early = self.role == Role::Responder;
        }
        Ok(true)
    }

    pub(super) fn on_reset(
        &mut self,
        id: FlowId,
        code: u64,
        final_size: u64,
    ) -> Result<(), PeerFault> {
        if !self.open_for_early_frame(id)? {
            return Ok(());
        }
        let Some(flow) = self.flows.get_mut(id) else {
            return Ok(());
        };
        if flow.recv.reset.is_some() {
            return Ok(());
        }
        let reached = flow.recv.reached();
        // R-CRASH-1: a peer that lost data which it had called durable does not know how much that
        // was, and may end the flow before it repeats that data.
        let refused = flow.end == Some(FlowEnd::Refused(ReasonCode::RolledBack));
        let rolled_back = refused || flow.reopened || flow.unclaimed;
        let final_size = final_size.max(if rolled_back { reached } else { 0 });
        // R-FLOW-4
        let known = flow.recv.final_size().filter(|_| !rolled_back);
        if final_size < reached || known.is_some_and(|known| known != final_size) {
            return Err(PeerFault::FinalSize {
                flow: id,
                was: known.unwrap_or(reached),
                now: final_size,
            });
        }
        // Bytes that were sent and never arrived have used session credit as well.
        let missing = final_size - reached;
        self.credit.received += missing;
        self.credit.consumed += missing;
        if flow.recv.stopped.is_none() {
            self.credit.consumed += reached - flow.recv.read_to();
        }
        self.wants |= say::CREDIT;
        flow.recv.end_by_reset(code, final_size);
        flow.end.get_or_insert(end_of(code));
        let (end, credit) = (self.credit.received, self.credit.advertised);
        if end > credit {
            return Err(PeerFault::OverCredit {
                flow: None,
                end,
                credit,
            });
        }
        self.emit(SessionEvent::Readable(id));
        self.retire_if_complete(id);
        Ok(())
    }

    /// Handles acknowledged bytes of a flow: there may be room to write, or the flow may be complete.
    pub(super) fn after_send_progress(&mut self, id: FlowId) {
        let limit = self.config.send_buffer;
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.wants_writable {
            match flow.take_writable(limit) {
                true => self.emit(SessionEvent::Writable(id)),
                false => self.awaits_memory |= flow.send.memory_room() == 0,
            }
        }
        self.retire_if_complete(id);
    }
}
