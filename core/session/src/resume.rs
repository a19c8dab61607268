//! Resuming: after a new handshake the device claims each flow, and the server resumes or refuses
//! it.
//!
//! ```text
//!  device                                   server
//!   SYN with claims             ──────▶      knows the flows: early_packets.rs sends behind the SYN+ACK
//!   first packet                ──────▶      the claims of the SYN are valid
//!   RESUME flow, received r     ──────▶      flow is known: sends from r on
//!   …                           ◀──────      RESUMED flow, received s     (device sends from s on)
//!   RESUME_END                  ──────▶      flows without a claim are dropped
//!                               ◀──────      REFUSED flow, reason         (the server does not know the flow)
//! ```

use d2tp_time::Time;
use d2tp_wire::{FlowId, Frame, ReasonCode, VARINT_MAX};

use crate::claim::{CLAIMS_MAX, FlowClaim};
use crate::event::{FlowEnd, PeerFault, SessionEvent};
use crate::flow::{SessionFlow, want};
use crate::record::{FlowRecord, SessionRecord};
use crate::recv_half::RecvHalf;
use crate::send_half::SendHalf;
use crate::session::{Session, say};
use crate::session_state::Role;
use crate::ticket::ClientTicket;

/// RESET and STOP code of a flow whose peer lost data that it had called durable.
pub(crate) const CODE_ROLLED_BACK: u64 = 0xd002;

impl Session {
    /// The session as a record. With `safe` it contains only data that both ends made durable, for
    /// a journal that must survive a crash; without it, data that the application has read.
    pub fn record(&self, now: Time, safe: bool) -> SessionRecord {
        let flows = self
            .flows
            .iter()
            .map(|f| {
                let received_to = if safe && f.options.durable {
                    f.recv.durable()
                } else {
                    f.recv.read_to()
                };
                // For a direction that was reset the peer needs only the number of bytes.
                // R-CRASH-1: bytes that are only acknowledged may be needed again after a crash.
                let sent_to = match f.send.reset {
                    Some(_) => f.send.next(),
                    // Data that the peer called durable has arrived, although its ACK may not have.
                    None if f.options.durable => f.send.safe_to().max(f.peer_durable),
                    None => f.send.safe_to(),
                };
                let at_end = f.recv.final_size() == Some(received_to);
                FlowRecord {
                    id: f.id,
                    options: crate::flow_options::FlowOptions {
                        deadline: None,
                        ..f.options
                    },
                    deadline_left: f.options.deadline.map(|d| d.since(now)),
                    deadline_seq: f.deadline_seq,
                    sent_to,
                    send_end: f.send.is_finished().then(|| f.send.end()),
                    send_complete: f.send.is_complete(),
                    received_to,
                    receive_end: f.recv.final_size().filter(|_| at_end),
                    receive_complete: at_end && f.recv.is_complete(),
                    // R-CLOSE-4: also one that was acknowledged.
                    reset: f.send.reset,
                    stopped: f.recv.stopped,
                }
            })
            .collect();
        let (seen_floor, seen) = self.flows.seen_record();
        SessionRecord {
            role: self.role,
            peer: self.peer,
            instance: self.instance,
            epoch: self.epoch,
            seen_floor,
            seen,
            closing: self
                .closing
                .as_deref()
                .map(|(code, _)| (*code, self.closing_until.since(now))),
            ticket: self.ticket.as_ref().map(|held| held.ticket().clone()),
            secret: self.session_secret.as_deref().cloned(),
            flows,
        }
    }

    /// Whether every flow may hibernate, because its bytes can be read again.
    pub fn may_hibernate(&self) -> bool {
        self.unhibernatable_flow().is_none()
    }

    /// R-SUSPEND-4: a flow that cannot hibernate, if there is one. It holds bytes that cannot be
    /// recovered: written here without another copy, or acknowledged to the peer but not yet read
    /// by the application.
    pub(crate) fn unhibernatable_flow(&self) -> Option<FlowId> {
        let bound = |f: &&SessionFlow| {
            let sends = !f.send.is_complete() && f.send.buffered() > 0;
            // The sender of a durable flow still has the bytes that were not called durable.
            let reads = !f.options.durable && !f.recv.is_complete() && f.recv.readable() > 0;
            !f.options.hibernates && (sends || reads)
        };
        self.flows.iter().find(bound).map(|f| f.id)
    }

    /// Whether bytes, or an end, arrived that the application has not read.
    pub fn has_unread(&self, id: FlowId) -> bool {
        self.flows
            .get(id)
            .is_some_and(|f| f.recv.stopped.is_none() && f.recv.reached() > f.recv.read_to())
    }

    /// How long the session has been without a network or an answer, if it is suspended.
    pub fn suspended_for(&self, now: Time) -> Option<d2tp_time::Span> {
        self.suspended_at.map(|at| now.since(at))
    }

    /// Fills a fresh session with the flows of a record.
    pub(crate) fn restore(&mut self, now: Time, record: &SessionRecord) {
        self.epoch = record.epoch;
        self.ticket = record.ticket.clone().map(ClientTicket::boxed);
        self.session_secret = record.secret.clone().map(Box::new);
        let account = self.config.memory.account(self.peer);
        for r in &record.flows {
            let send = SendHalf::restored(
                r.sent_to,
                r.send_end,
                r.send_complete,
                r.options.durable,
                account.charge(),
            );
            let mut recv = RecvHalf::restored(
                self.config.flow_windows(),
                account.charge(),
                r.received_to,
                r.receive_end,
                r.receive_complete,
            );
            if self.role == Role::Initiator {
                recv.renew_credit();
            }
            let mut options = r.options;
            options.deadline = r.deadline_left.map(|left| now + left);
            let mut flow = SessionFlow::new(r.id, options, send, recv);
            flow.application = self.charge_application(&account);
            flow.deadline_seq = r.deadline_seq;
            flow.unclaimed = true;
            flow.restored = true;
            flow.opened = true;
            // R-RESUME-5: if no byte of a flow has arrived yet, it is unknown whether the server
            // knows the flow.
            let ours = r.id.by_initiator() == (self.role == Role::Initiator);
            let untouched = r.sent_to == 0 && r.received_to == 0 && r.receive_end.is_none();
            flow.announced = self.role == Role::Responder || !(ours && untouched);
            flow.peer_durable = r.sent_to;
            // R-CLOSE-4: sent on the next path, to a peer that did not receive them or does not know of them any more.
            if r.reset.is_some() {
                flow.send.reset = r.reset;
                flow.wants |= want::RESET;
            }
            if r.stopped.is_some() {
                flow.recv.stopped = r.stopped;
                flow.wants |= want::STOP;
            }
            flow.end_reported = flow.is_over();
            self.flows.insert(flow);
        }
        if let Some((code, left)) = record.closing {
            self.closing = Some(Box::new((code, String::new())));
            self.closing_until = now + left;
            self.wants |= say::CLOSE;
        }
        self.known_to_peer = true;
        self.flows.restore_seen(record.seen_floor, &record.seen);
        self.suspended_at = Some(now);
    }

    /// R-RESUME-6: the claims for a device's SYN, the most urgent first. There are none while the
    /// server may know one of the paths: the session then continues, and the claims would be
    /// outdated when the SYN is answered.
    pub(crate) fn claims(&mut self) -> Vec<FlowClaim> {
        if self.paths.iter().any(|path| !path.unknown) {
            return Vec::new();
        }
        let mut order: Vec<(u8, FlowId)> = self
            .flows
            .iter()
            .filter(|f| f.announced && !f.is_over())
            .map(|f| (f.options.priority, f.id))
            .collect();
        order.sort_unstable();
        order.truncate(CLAIMS_MAX);
        let claim = |(_, id): (u8, FlowId)| {
            let recv = &mut self.flows.get_mut(id)?.recv;
            let received = recv.contiguous();
            let max = recv.take_credit().min(VARINT_MAX);
            let flags = if recv.is_all_received() {
                Frame::RESUME_COMPLETE
            } else {
                0
            };
            Some(FlowClaim {
                flow: id,
                received,
                credit: max.saturating_sub(received),
                flags,
            })
        };
        order.into_iter().filter_map(claim).collect()
    }

    /// The flow of a claim, if the claim will be accepted once the handshake is confirmed.
    pub(crate) fn flow_to_resume(&self, claim: &FlowClaim) -> Option<&SessionFlow> {
        let flow = self.flows.get(claim.flow)?;
        if flow.send.reset.is_some() {
            return Some(flow);
        }
        // R-CRASH-1
        if flow.options.durable && claim.received < flow.peer_durable {
            return None;
        }
        let held = flow.options.hibernates || flow.send.holds(claim.received);
        (held || claim.is_complete()).then_some(flow)
    }

    /// R-RESUME-8: asks the application of a tentatively restored session for bytes from the
    /// claimed offset on. The flow is not resumed by that.
    pub(crate) fn prepare_claimed(&mut self, claim: &FlowClaim) {
        let meets = self
            .flow_to_resume(claim)
            .is_some_and(|f| f.send.reset.is_none() && f.options.hibernates);
        if !meets || claim.is_complete() || !self.is_tentative() {
            return;
        }
        let Some(flow) = self.flows.get_mut(claim.flow) else {
            return;
        };
        if flow.requested_from == Some(claim.received) {
            return;
        }
        if !flow.send.rewind(claim.received) {
            flow.send.forget(claim.received);
        }
        flow.requested_from = Some(claim.received);
        if flow.send.buffered() == 0 && !flow.send.is_finished() {
            flow.rewinding = true;
            let (flow, offset) = (flow.id, claim.received);
            self.emit(SessionEvent::SendFrom { flow, offset });
        }
    }

    /// Whether the session is a server's restored record without a confirmed handshake.
    pub fn is_tentative(&self) -> bool {
        self.role == Role::Responder && self.generation == 0
    }

    /// Handles a completed handshake: a device claims its existing flows; a server waits for the
    /// claims.
    pub(crate) fn after_handshake(&mut self, now: Time, resumed: bool) {
        let claims = self.role == Role::Initiator;
        let credit = self.initial_flow_credit;
        let mut any = false;
        let mut from_the_start = Vec::new();
        for flow in self.flows.iter_mut() {
            flow.grants_in.forget_all();
            flow.grants_out.forget_all();
            // The peer may have forgotten that it asked for a pause, and its last frame may be
            // lost, so a pause must be asked for again.
            flow.pause_in = (0, false, ReasonCode::None);
            if flow.pause_out.1 {
                flow.wants |= want::PAUSE;
            }
            // A flow that was never announced is opened now: it, or its application, still has all
            // its bytes.
            if !flow.announced && flow.send.reset.is_none() {
                flow.send.rewind(0);
                if flow.restored && flow.send.buffered() == 0 && !flow.send.is_finished() {
                    flow.rewinding = true;
                    from_the_start.push(flow.id);
                }
                flow.unclaimed = false;
                flow.restored = false;
                flow.send.set_credit(credit);
                flow.wants |= want::OPEN;
                continue;
            }
            flow.announced = true;
            flow.unclaimed = true;
            any = true;
            flow.recv.forget_gaps();
            flow.recv.resend_credit();
            // R-RESUME-3: a RESET waits for the claim, which contains the peer's byte count.
            flow.wants &= want::STOP | want::DEADLINE | want::DURABLE | want::PAUSE;
            flow.wants |= want::CREDIT;
            if !flow.recv.is_counted() {
                flow.wants |= want::STOP;
            }
            if claims {
                flow.wants |= want::RESUME;
                flow.claiming = true;
            }
        }
        if claims && (any || resumed) && self.closing.is_none() {
            self.wants |= say::RESUME_END;
        }
        self.flows.touch_all();
        for flow in from_the_start {
            self.emit(SessionEvent::SendFrom { flow, offset: 0 });
        }
        let peer = self.peer;
        self.wake(now);
        if self.closing.is_none() {
            self.emit(SessionEvent::Established {
                peer,
                resumed: resumed || self.generation > 1,
            });
        }
    }

    /// R-RESUME-1: resumes sending at `offset`. False if that is impossible.
    fn take_up(&mut self, id: FlowId, offset: u64) -> bool {
        let limit = self.config.send_buffer;
        let Some(flow) = self.flows.get_mut(id) else {
            return false;
        };
        if flow.send.reset.is_some() {
            // R-FLOW-4: after a crash either end may remember more of the flow than the other. The
            // length that is announced now is valid for both.
            flow.send.forget(offset);
            flow.unclaimed = false;
            flow.reset_acked = false;
            self.flows.want(id, want::RESET);
            return true;
        }
        if flow.options.durable && offset < flow.peer_durable {
            // R-CRASH-1: a receiver cannot be behind the data that it called durable.
            return false;
        }
        if !flow.send.rewind(offset) {
            if !flow.options.hibernates {
                return false;
            }
            flow.send.forget(offset);
            flow.rewinding = true;
            self.emit(SessionEvent::SendFrom { flow: id, offset });
        } else if (flow.options.hibernates || flow.restored)
            && flow.send.buffered() == 0
            && !flow.send.is_finished()
            && flow.requested_from != Some(offset)
        {
            flow.rewinding = true;
            self.emit(SessionEvent::SendFrom { flow: id, offset });
        }
        let ours = id.by_initiator() == (self.role == Role::Initiator);
        if let Some(flow) = self.flows.get_mut(id) {
            flow.unclaimed = false;
            flow.requested_from = None;
            flow.restored = false;
            if ours && !flow.opened {
                // The peer knows the flow's bytes, but not its options.
                flow.wants |= want::OPEN;
            }
            // What the peer has may have freed all that was held, and no ACK will come for it.
            if flow.take_writable(limit) {
                self.emit(SessionEvent::Writable(id));
            }
        }
        self.flows.touch(id);
        true
    }

    pub(crate) fn on_resume(&mut self, id: FlowId, received: u64, flags: u8) {
        if self.role == Role::Initiator {
            return;
        }
        if !self.flows.may_refuse(id) {
            // R-RESUME-9: the packet counts as lost, and arrives again when there is room.
            self.unretained = true;
            return;
        }
        self.flows.claims_received += 1;
        let Some(flow) = self.flows.get_mut(id) else {
            // R-RESUME-2: a frame that arrives after the claim must not open the flow either.
            if id.by_initiator() && id.epoch() <= self.epoch {
                self.flows.use_id(id);
            }
            return self.flows.refuse(id, ReasonCode::UnknownFlow);
        };
        if flow.is_opened_early {
            // R-RESUME-2: a frame that overtook the claim does not make the flow known.
            self.flows.refuse(id, ReasonCode::UnknownFlow);
            return self.end_flow(id, FlowEnd::Refused(ReasonCode::UnknownFlow));
        }
        if !flow.unclaimed {
            // R-RESUME-4: claimed once already; a repeated claim is only answered again.
            return self.flows.want(id, want::RESUMED);
        }
        let complete = flags & d2tp_wire::Frame::RESUME_COMPLETE != 0;
        if complete {
            flow.send.complete_at(received);
        }
        if self.take_up(id, received) {
            if let Some(flow) = self.flows.get_mut(id).filter(|_| complete) {
                // Resuming marks every end as unconfirmed; this one was just confirmed.
                flow.send.complete_at(received);
            }
            self.flows.want(id, want::RESUMED);
            self.retire_if_complete(id);
        } else {
            self.flows.refuse(id, ReasonCode::RolledBack);
            self.end_flow(id, FlowEnd::Refused(ReasonCode::RolledBack));
        }
    }

    /// R-RESUME-5: opens a flow again after a resume, because the device has no sign that the
    /// server knows it. Both directions start at zero, also for the session's credit.
    pub(crate) fn reopen_claimed(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get(id).filter(|f| f.unclaimed) else {
            return;
        };
        let (reached, read_to) = (flow.recv.reached(), flow.recv.read_to());
        if !self.flows.may_refuse(id) {
            self.unretained = true;
            return;
        }
        let credit = self.initial_flow_credit;
        if let Some(flow) = self.flows.get_mut(id) {
            flow.reopened = !flow.opened_by_syn;
            flow.opened_by_syn = false;
            flow.send.set_credit(credit);
        }
        if self.take_up(id, 0) {
            self.credit.received += reached;
            self.credit.consumed += read_to;
        } else {
            self.flows.refuse(id, ReasonCode::RolledBack);
            self.end_flow(id, FlowEnd::Refused(ReasonCode::RolledBack));
        }
    }

    pub(crate) fn on_resumed(&mut self, id: FlowId, received: u64) {
        if self.role == Role::Responder || !self.flows.get(id).is_some_and(|f| f.unclaimed) {
            return;
        }
        if !self.take_up(id, received) {
            // The server knows the flow and would keep it, so it is informed that the flow is over.
            return self.refuse_here(id, ReasonCode::RolledBack);
        }
        if let Some(flow) = self.flows.get_mut(id) {
            // The claim in the SYN was answered, so nothing is left to claim.
            flow.wants &= !want::RESUME;
            flow.claiming = false;
        }
    }

    /// Ends a flow that the peer still knows, and informs the peer.
    fn refuse_here(&mut self, id: FlowId, reason: ReasonCode) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        flow.unclaimed = false;
        flow.end.get_or_insert(FlowEnd::Refused(reason));
        self.reset(id, CODE_ROLLED_BACK);
        self.stop(id, CODE_ROLLED_BACK);
    }

    pub(crate) fn on_resume_end(&mut self, said: u64) -> Result<(), PeerFault> {
        if self.role == Role::Initiator {
            return Ok(());
        }
        // R-RESUME-10: a claim may have arrived twice, but not less often than stated, because
        // RESUME_END was sent last.
        let heard = self.flows.claims_received;
        if said > heard {
            return Err(PeerFault::Claims { said, heard });
        }
        let unclaimed: Vec<FlowId> = self
            .flows
            .iter()
            // R-EARLY-3: a flow that a SYN opened is not claimed but opened again.
            .filter(|f| f.unclaimed && !f.opened_by_syn)
            .map(|f| f.id)
            .collect();
        for id in unclaimed {
            self.deliver_remaining(id);
            self.end_flow(id, FlowEnd::Refused(ReasonCode::UnknownFlow));
        }
        Ok(())
    }
}
