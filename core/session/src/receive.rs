//! Receiving: decrypts a packet, decodes its frames, and hands each frame to its owner.

use d2tp_seal::{CipherSuite, PacketKeys, open_cookie, verify_unknown_token};
use d2tp_time::{Span, Time};
use d2tp_wire::{
    Cid, DATA_HEADER_BYTES, FlowId, Frame, FrameIter, PathId, PathStatus, ReasonCode, WireReader,
};

use crate::config::SPARE_PATHS;
use crate::congestion::Sibling;
use crate::event::FlowArrival;
use crate::event::{FlowEnd, PeerFault, SessionEnd, SessionEvent};
use crate::flow::{SessionFlow, want};
use crate::flow_api::CODE_DEADLINE;
use crate::flow_options::FlowOptions;
use crate::key_exchange_state::HybridAnswer;
use crate::link::Addresses;
use crate::path::{self, PathState, PreviousAddress, SessionPath};
use crate::recv_half::FLOW_BYTES;
use crate::resume::CODE_ROLLED_BACK;
use crate::sent_packet::SentFrame;
use crate::session::{Session, on_frame_fate, say};
use crate::session_state::{Role, SessionState};
use crate::syn::{SynAck, SynAckBody};
use crate::ticket::ClientTicket;
use crate::trace::TraceRecord;

/// The most answers to challenges that wait to be sent. Further challenges are dropped.
const ANSWERS_MAX: usize = 4;
/// How long packets of the previous key generation are still accepted, in probe timeouts.
const KEY_KEPT_PROBE_TIMEOUTS: u64 = 3;

/// Whether a frame concerns paths and the session, not flows.
fn is_of_paths(frame: &Frame<'_>) -> bool {
    matches!(
        frame,
        Frame::Ack { .. }
            | Frame::Ping
            | Frame::KeyShare { .. }
            | Frame::Chg { .. }
            | Frame::Rsp { .. }
            | Frame::Auth { .. }
            | Frame::PathStatus { .. }
            | Frame::PathCid { .. }
            | Frame::Close { .. }
    )
}

/// The flow end that a RESET or STOP code stands for.
fn end_of(code: u64) -> FlowEnd {
    match code {
        CODE_DEADLINE => FlowEnd::DeadlinePassed,
        CODE_ROLLED_BACK => FlowEnd::Refused(ReasonCode::RolledBack),
        code => FlowEnd::Reset(code),
    }
}

impl Session {
    /// R-SEAL-1: handles a DATA packet for path `path` of handshake `generation`. A packet that does
    /// not authenticate, or is a replay, changes nothing.
    pub(crate) fn handle_data(
        &mut self,
        now: Time,
        path: PathId,
        generation: u32,
        from: Addresses,
        packet: &mut [u8],
    ) {
        self.arrivals.clear();
        if generation != self.generation || self.state == SessionState::Closed {
            return;
        }
        let Some(keys) = &mut self.keys else { return };
        let known = self.paths.get(path);
        let expected = known.map_or(0, |p| p.acks.expected());
        let Ok(opened) = keys.open(path, expected, packet) else {
            let limit = keys.suite().integrity_limit();
            if keys.failed() >= limit.min(self.config.failed_openings_max) {
                self.give_up_keys(now);
            }
            return;
        };
        if known.is_some_and(|p| p.acks.is_replay(opened.number)) {
            return;
        }
        if opened.key_advanced {
            if let Some(trace) = &mut self.trace {
                trace.at(now).note(TraceRecord::KeysUpdated { sent: false });
            }
            let pto = known.map_or(Span::from_secs(1), |p| {
                p.recovery.rtt.probe_timeout(self.config.ack_delay_max)
            });
            self.rx_key_drop_at = now + pto.times(KEY_KEPT_PROBE_TIMEOUTS);
        }
        let is_known = known.is_some();
        if opened.key_advanced {
            self.on_keys_advanced();
        }
        if !is_known && !self.accept_path(now, path, from) {
            return;
        }
        self.handle_opened(
            now,
            path,
            opened.number,
            from,
            packet.len(),
            &packet[DATA_HEADER_BYTES..opened.end],
        );
    }

    /// R-SEAL-5: gives up keys under which too many packets failed to authenticate, with their
    /// connection ids. The device then receives UNKNOWN and begins a new handshake; flows remain.
    fn give_up_keys(&mut self, now: Time) {
        let best = self.paths.iter().min_by_key(|p| p.rank());
        let best = best.map(|p| (p.addresses, p.gated));
        while !self.paths.is_empty() {
            self.remove_path(0);
        }
        for (_, issued) in std::mem::take(&mut self.issued) {
            self.cid_changes
                .push(crate::session_state::CidChange::Remove(issued.cid));
        }
        self.keys = None;
        self.spare.clear();
        if self.role == Role::Initiator {
            self.state = SessionState::Handshaking;
            if let (None, Some((addresses, gated))) = (&self.handshake, best) {
                self.start_handshake(now, addresses, gated);
            }
        }
        self.suspend_if_idle(now, ReasonCode::Protocol);
    }

    /// Accepts a path that the device opened with an issued id (R-PATH-1).
    pub(crate) fn accept_path(&mut self, now: Time, id: PathId, from: Addresses) -> bool {
        if self.role == Role::Initiator || self.paths.is_full() {
            return false;
        }
        if !self.issued.contains_key(&id) {
            return false;
        }
        let Some((cid, token)) = self.spare.remove(&id) else {
            return false;
        };
        if !self.use_path_id(id) {
            return false;
        }
        let mut path = SessionPath::new(now, id, from, &self.config, (cid, token));
        path.beside_another = self.paths.iter().any(|p| p.state == PathState::Active);
        // R-PATH-10: the device decides what the path may carry; until it does, nothing.
        path.status = PathStatus::Standby;
        if let Some(trace) = &mut self.trace {
            trace.at(now).note(TraceRecord::opened(&path));
        }
        // R-PATH-2: no host is assumed to be at an address before it has answered from there.
        path.challenge(self.rng.array());
        self.paths.push(path);
        self.issue_ids(id.0 + SPARE_PATHS);
        true
    }

    /// Handles the frames of a packet that authenticated and is new.
    pub(crate) fn handle_opened(
        &mut self,
        now: Time,
        id: PathId,
        number: u64,
        from: Addresses,
        datagram_bytes: usize,
        plaintext: &[u8],
    ) {
        self.arrivals.clear();
        let Some(slot) = self.paths.slot(id) else {
            return;
        };
        self.last_rx = now;
        if let Some(trace) = &mut self.trace {
            trace
                .at(now)
                .packet(false, id, number, datagram_bytes, plaintext);
        }
        // R-SUSPEND-3: packets that were sent before SUSPEND and arrive after it do not end the
        // pause.
        let late = self.paused && number < self.paths.at(slot).acks.expected();
        if self.state == SessionState::Suspended && !late {
            self.wake(now);
            self.flows.touch_all();
        }
        let challenge = self.rng_if_moved(slot, from, number);
        let path = self.paths.at(slot);
        path.note_heard(now);
        path.last_rx = now;
        // R-PATH-2: a late packet from another address adds no bytes to the current address's
        // allowance.
        if !path.validated && path.addresses.remote == from.remote {
            path.rx_bytes += datagram_bytes as u64;
        }
        if let Some(nonce) = challenge {
            // R-PATH-4: the newest packet shows where the peer is now; both addresses are
            // challenged. Only a validated address may win, because another one could be a victim's
            // (R-PATH-2).
            if path.validated {
                path.previous = Some(Box::new(PreviousAddress {
                    addresses: path.addresses,
                    ask: true,
                }));
            }
            path.addresses = from;
            path.set_carrier(&self.config);
            path.forget_rtt_min(now);
            path.one_way_since = None;
            path.validated = false;
            path.rx_bytes = datagram_bytes as u64;
            path.tx_bytes = 0;
            path.challenge(nonce);
        }
        if !path.validated && path.wants & path::want::CHG == 0 && !path.recovery.is_waiting() {
            // The challenge was lost, or forgotten in a long silence.
            let nonce = self.rng.array();
            self.paths.at(slot).challenge(nonce);
        }
        let path = self.paths.at(slot);
        if path.driver_frozen {
            self.on_heard_while_frozen(now, slot);
        } else if self.role == Role::Initiator
            && path.state == PathState::Silent
            && path.one_way_since.is_some()
        {
            path.ask_if_still_one_way(now);
        } else if path.state != PathState::Active && !path.is_one_way(now) {
            if path.state == PathState::Opening {
                let took = now.since(path.opened_at);
                let link = path.addresses.link;
                self.emit(SessionEvent::PathUp {
                    path: id,
                    link,
                    took,
                });
            }
            let was_silent = self.paths[slot].state == PathState::Silent;
            self.unfreeze(now, slot);
            self.paths.at(slot).is_unproven = was_silent && self.role == Role::Initiator;
        }

        let mut eliciting = false;
        let mut payload = false;
        for frame in FrameIter::new(plaintext) {
            let frame = match frame {
                Ok(frame) => frame,
                Err(e) => return self.fault(PeerFault::BadFrame(e)),
            };
            eliciting |= frame.is_ack_eliciting();
            payload |= matches!(frame, Frame::Data { .. } | Frame::Datagram { .. });
            // A frame may remove paths, also this one. The rest of its packet is then ignored.
            let Some(slot) = self.paths.slot(id) else {
                return;
            };
            // For a session that closes, only frames about paths and its end matter.
            if self.closing.is_some() && !is_of_paths(&frame) {
                continue;
            }
            if let Err(fault) = self.handle_frame(now, slot, from, frame) {
                return self.fault(fault);
            }
            if let Some(end) = self.received_close.take() {
                // R-CLOSE-1
                if let Some(slot) = self.paths.slot(id) {
                    self.answer_close(now, slot, number);
                }
                self.end(*end);
            }
            if self.state == SessionState::Closed {
                return;
            }
        }
        let Some(slot) = self.paths.slot(id) else {
            return;
        };
        let path = self.paths.at(slot);
        path.control
            .on_received(datagram_bytes as u64, path.payload_in, path.gated);
        if payload {
            self.paths.at(slot).note_payload_arrived();
            self.note_payload(now, slot);
            self.note_offload_payload(now, slot, number);
        }
        if std::mem::take(&mut self.unretained) {
            // The packet counts as lost; the rest of it has done no harm and will arrive again.
            return;
        }
        let path = self.paths.at(slot);
        path.acks.on_packet(now, number, eliciting);
        if eliciting {
            path.note_received(datagram_bytes as u64);
        }
    }

    /// A fresh nonce, if this packet shows that the peer moved.
    fn rng_if_moved(&mut self, slot: usize, from: Addresses, number: u64) -> Option<[u8; 16]> {
        let path = self.paths.at(slot);
        let moved = self.role == Role::Responder
            && path.addresses.remote != from.remote
            && number >= path.acks.expected();
        moved.then(|| self.rng.array())
    }

    #[inline]
    fn handle_frame(
        &mut self,
        now: Time,
        slot: usize,
        from: Addresses,
        frame: Frame<'_>,
    ) -> Result<(), PeerFault> {
        match frame {
            Frame::Data {
                flow,
                offset,
                bytes,
                fin,
            } => {
                return self.on_data(slot, flow, offset, bytes, fin);
            }
            Frame::Ack {
                path,
                delay_us,
                ranges,
            } => {
                let on_own_path = self.paths[slot].id == path;
                let delay = Span::from_micros(delay_us);
                return self.on_ack(now, path, on_own_path, delay, ranges);
            }
            Frame::Ping => {}
            Frame::KeyShare { half, bytes } => self.on_key_share(half, bytes)?,
            Frame::AckRate {
                path,
                every,
                delay_us,
            } => {
                let max = self.config.ack_delay_max;
                if let Some(path) = self.paths.get_mut(path) {
                    path.acks.set_rate(every, Span::from_micros(delay_us), max);
                }
            }
            Frame::Open { .. } => self.on_open(now, &frame)?,
            Frame::Reset {
                flow,
                code,
                final_size,
            } => self.on_reset(flow, code, final_size)?,
            Frame::Stop { flow, code } => {
                if let Some(f) = self.flows.get_mut(flow)
                    && f.send.reset.is_none()
                    && !f.send.is_complete()
                {
                    f.send.reset = Some(code);
                    f.end.get_or_insert(end_of(code));
                    if !f.unclaimed {
                        f.wants |= want::RESET;
                    }
                    self.flows.touch(flow);
                    self.emit(SessionEvent::Writable(flow));
                }
            }
            Frame::FlowCredit { flow, max } => {
                if let Some(f) = self.flows.get_mut(flow) {
                    f.send.set_credit(max);
                    let has_source = f.has_source;
                    self.flows.touch(flow);
                    if has_source {
                        self.after_send_progress(flow);
                    }
                }
            }
            Frame::SessionCredit { max } => {
                self.credit.peer_max = self.credit.peer_max.max(max);
            }
            Frame::Deadline {
                flow,
                seq,
                remaining_ms,
            } => {
                let asked = remaining_ms.map(|ms| now + Span::from_millis(ms));
                let deadline = self.cut_deadline(now, asked);
                if let Some(f) = self.flows.get_mut(flow)
                    && seq > f.deadline_seq
                {
                    f.deadline_seq = seq;
                    f.options.deadline = deadline;
                    self.flows.on_deadline_changed();
                    self.emit(SessionEvent::DeadlineChanged(flow));
                    if deadline != asked {
                        self.announce_deadline(flow, deadline);
                    }
                }
            }
            Frame::Durable { flow, offset } => {
                let is_theirs = self.may_peer_open(flow);
                if let Some(f) = self.flows.get_mut(flow) {
                    // R-DURABLE-2: nothing can be durable that was never sent.
                    let offset = offset.min(f.send.next());
                    // The side that opened the flow knows its options, although OPEN may not have
                    // arrived here yet.
                    if is_theirs && f.awaits_open() {
                        f.make_durable();
                    }
                    f.peer_durable = f.peer_durable.max(offset);
                    f.send.on_durable(offset);
                    self.emit(SessionEvent::PeerDurable { flow, offset });
                    self.after_send_progress(flow);
                }
            }
            Frame::Committed { flow, offset } => {
                if let Some(f) = self.flows.get_mut(flow) {
                    f.peer_durable = f.peer_durable.max(offset.min(f.send.next()));
                }
            }
            Frame::Grant {
                seq,
                flow,
                path,
                max_sent,
            } => {
                // R-GRANT-1: only the device decides what its links may cost. R-GRANT-5: a GRANT
                // may arrive before the flow's OPEN and before the first packet of its path.
                let is_new = self.flows.get(flow).is_none();
                if self.role == Role::Responder
                    && self.issued.contains_key(&path)
                    && self.accept_flow(flow, FlowOptions::default())?
                    && let Some(f) = self.flows.get_mut(flow)
                {
                    f.only_granted |= is_new;
                    f.grants_in.on_grant(path, seq, max_sent);
                    self.flows.touch(flow);
                }
            }
            Frame::Spent { flow, path, sent } => {
                if self.paths.get(path).is_some()
                    && let Some(f) = self.flows.get_mut(flow)
                {
                    f.grants_out.on_spent(path, sent);
                }
            }
            Frame::PathStatus {
                path,
                seq,
                status,
                gated,
                reason,
            } => {
                self.on_path_status(now, path, seq, status, gated, reason);
            }
            Frame::PathLimit { path, seq, bytes } => {
                // R-PATH-12: the newest limit counts.
                if let Some(path) = self.paths.get_mut(path)
                    && seq > path.limit_in.0
                {
                    path.limit_in = (seq, bytes);
                    path.fit_datagrams_to_limit();
                }
            }
            Frame::FlowPause {
                flow,
                seq,
                paused,
                reason,
            } => {
                if let Some(f) = self.flows.get_mut(flow)
                    && seq > f.pause_in.0
                {
                    f.pause_in = (seq, paused, reason);
                    self.flows.touch(flow);
                }
            }
            Frame::Chg { nonce } => {
                let path = self.paths.at(slot);
                if path.answers.len() < ANSWERS_MAX {
                    // R-PATH-3: an answer is valid only from the address that was challenged.
                    let foreign =
                        from.remote != path.addresses.remote || from.link != path.addresses.link;
                    // R-PATH-2: one answer to an address that is not the path's, no larger than the
                    // challenge's packet.
                    if !foreign || path.answers.iter().all(|(_, at)| at.is_none()) {
                        path.answers.push((nonce, foreign.then_some(from)));
                    }
                }
            }
            Frame::Rsp { nonce } => self.on_rsp(now, slot, from, nonce),
            Frame::Auth { path } => {
                // R-PATH-13: the server accepts the address, so a lost answer need not be repeated.
                if let Some(path) = self.paths.get_mut(path) {
                    path.answered = None;
                }
            }
            Frame::PathCid { path, cid, token } => {
                // R-PATH-7: ids are kept for a limited number of paths ahead, whatever the peer
                // sends.
                let ahead =
                    self.used_paths.last().map_or(0, |(_, end)| end) + 2 * u64::from(SPARE_PATHS);
                let n = u64::from(path.0);
                if n <= ahead && !self.used_paths.contains(n) {
                    self.spare.insert(path, (cid, token));
                }
            }
            Frame::Resume {
                flow,
                received,
                flags,
            } => self.on_resume(flow, received, flags),
            Frame::Resumed { flow, received } => self.on_resumed(flow, received),
            Frame::Refused { flow, reason } => {
                // A flow of which bytes arrived cannot be refused: this answers an OPEN that
                // arrived twice.
                let silent =
                    |f: &SessionFlow| f.recv.reached() == 0 && f.recv.final_size().is_none();
                let asked = |f: &&SessionFlow| !f.end_reported && (f.unclaimed || silent(f));
                let sent = self.flows.get(flow).filter(asked).map(|f| f.send.next());
                if let Some(sent) = sent {
                    if reason == ReasonCode::LimitReached {
                        // R-QUOTA-2: the server did not count bytes that it refused.
                        self.credit.sent = self.credit.sent.saturating_sub(sent);
                    }
                    self.end_flow(flow, FlowEnd::Refused(reason));
                }
            }
            Frame::ResumeEnd { flows } => self.on_resume_end(flows)?,
            Frame::Datagram { context, bytes } => {
                let path = self.paths.at(slot);
                path.payload_in += bytes.len() as u64;
                path.datagram_at = Some(now);
                self.on_datagram(context, bytes);
            }
            Frame::Suspend { reason } => {
                // R-SUSPEND-3: only a device can resume a session, so only a device may suspend it.
                if self.role == Role::Responder && self.state == SessionState::Established {
                    self.paused = true;
                    self.stop_until_answered(now, reason);
                }
            }
            Frame::Close { code, text } => {
                // The text is shown within a line of ours, so it must not contain line breaks.
                let text = String::from_utf8_lossy(text);
                let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
                self.received_close = Some(Box::new(SessionEnd::Peer { code, text }));
            }
        }
        Ok(())
    }

    #[inline]
    fn on_data(
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
        flow.only_granted = false;
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
                f.only_granted = false;
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
    fn may_peer_open(&self, id: FlowId) -> bool {
        id.by_initiator() == (self.role == Role::Responder)
    }

    /// Accepts a flow that the peer opened. False if the flow is over already.
    fn accept_flow(&mut self, id: FlowId, options: FlowOptions) -> Result<bool, PeerFault> {
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
    fn cut_deadline(&self, now: Time, deadline: Option<Time>) -> Option<Time> {
        match self.role {
            Role::Responder => deadline.map(|d| d.min(now + self.config.deadline_max)),
            Role::Initiator => deadline,
        }
    }

    /// R-QUOTA-3: informs the peer of a deadline that was cut, so that both ends use the same one.
    fn announce_deadline(&mut self, id: FlowId, deadline: Option<Time>) {
        if let Some(flow) = self.flows.get_mut(id)
            && flow.options.deadline == deadline
        {
            flow.deadline_seq = (flow.deadline_seq + 1).min(d2tp_wire::VARINT_MAX);
            self.flows.want(id, want::DEADLINE);
        }
    }

    fn on_reset(&mut self, id: FlowId, code: u64, final_size: u64) -> Result<(), PeerFault> {
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
        if final_size < reached {
            return Err(PeerFault::FinalSize {
                flow: id,
                was: reached,
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
        flow.recv.discard();
        flow.recv.reset = Some(code);
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

    fn on_ack(
        &mut self,
        now: Time,
        id: PathId,
        on_own_path: bool,
        delay: Span,
        ranges: d2tp_wire::AckRanges<'_>,
    ) -> Result<(), PeerFault> {
        let Some(slot) = self.paths.slot(id) else {
            return Ok(());
        };
        let siblings: Vec<Sibling> = if self.paths.len() > 1 {
            self.paths
                .iter()
                // A path that carries no payload does not compete with others.
                .filter(|p| p.id == id || (p.takes_payload() && !p.is_stream()))
                .map(|p| Sibling {
                    window: p.recovery.controller.window(),
                    rtt: p.recovery.rtt.smoothed(),
                    interval: p.recovery.controller.interval(),
                })
                .collect()
        } else {
            Vec::new()
        };
        let delay_max = self.config.ack_delay_max;
        self.classify_losses(now, slot);
        let Session {
            paths,
            flows,
            issued,
            wants: says,
            gone,
            ..
        } = self;
        let path = paths.at(slot);
        let mut own = path.wants;
        let mut acked_ack = None;
        let mut acked_elsewhere = Vec::new();
        let mut session_acked = 0;
        let outcome = path.recovery.on_ack(
            now,
            id,
            ranges,
            on_own_path,
            delay,
            delay_max,
            &siblings,
            |said, arrived| {
                match (said, arrived) {
                    (SentFrame::Ack { path, largest }, true) if path == id => {
                        acked_ack = acked_ack.max(Some(largest));
                    }
                    (SentFrame::Ack { path, largest }, true) => {
                        acked_elsewhere.push((path, largest))
                    }
                    (SentFrame::Session { what }, true) => session_acked |= what,
                    _ => {}
                }
                on_frame_fate(
                    said,
                    arrived,
                    flows,
                    Some((id, &mut own)),
                    issued,
                    says,
                    gone,
                );
            },
        )?;
        path.wants = own;
        if let Some(largest) = acked_ack {
            path.acks.on_ack_acked(largest);
        }
        if let Some(rtt) = outcome.rtt {
            path.note_rtt(now, rtt);
        }
        if let Some(size) = outcome.mtu_acked {
            path.mtu.on_probe_acked(size);
            path.recovery
                .controller
                .set_datagram(path.mtu.current() as u64);
        }
        if outcome.mtu_lost {
            path.mtu.on_probe_lost(now);
        }
        let is_reached = outcome.acked_size > 0;
        if is_reached {
            path.mtu.on_ack(now, outcome.acked_size);
        }
        if outcome.lost_size > 0
            && outcome.acked_size < outcome.lost_size
            && path.mtu.on_loss(outcome.lost_size)
        {
            path.recovery
                .controller
                .set_datagram(path.mtu.current() as u64);
        }
        if outcome.rtt.is_some()
            && let Some(share) = &mut path.carried_acks
        {
            share.on_round_trip(path.recovery.rtt.latest(), path.recovery.rtt.min());
        }
        if outcome.rtt.is_some()
            && let Some(guard) = &mut path.mirror_guard
        {
            guard.on_round_trip(now, path.recovery.rtt.latest(), path.recovery.rtt.min());
        }
        if outcome.progress && self.config.thin_acks && !path.only_carries_acks() {
            path.want_ack_rate();
        }
        if let Some(trace) = &mut self.trace {
            trace.at(now).note_path_changes(path);
        }
        if outcome.rtt.is_some() {
            self.resume_known_path(now, slot);
        }
        if is_reached {
            self.on_path_reaches_peer(now, slot, on_own_path);
        }
        for (path, largest) in acked_elsewhere {
            if let Some(path) = self.paths.get_mut(path) {
                path.acks.on_ack_acked(largest);
            }
        }
        for flow in self.flows.take_acked() {
            self.after_send_progress(flow);
        }
        if session_acked & say::RESUME_END != 0 {
            self.inherits_instance = false;
        }
        if session_acked & say::CLOSE != 0 {
            // R-CLOSE-3
            self.end(SessionEnd::Local);
        }
        Ok(())
    }

    /// Handles acknowledged bytes of a flow: there may be room to write, or the flow may be complete.
    fn after_send_progress(&mut self, id: FlowId) {
        let limit = self.config.send_buffer;
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.wants_writable {
            if flow.is_writable(limit) {
                flow.wants_writable = false;
                self.emit(SessionEvent::Writable(id));
            } else {
                self.awaits_memory |= flow.send.memory_room() == 0;
            }
        }
        self.retire_if_complete(id);
    }

    fn on_path_status(
        &mut self,
        now: Time,
        id: PathId,
        seq: u64,
        status: PathStatus,
        gated: bool,
        reason: ReasonCode,
    ) {
        // R-PATH-5: only the device knows the state of its links.
        if self.role == Role::Initiator {
            return;
        }
        let Some(slot) = self.paths.slot(id) else {
            if status == PathStatus::Gone {
                self.retire_unopened_path(id);
            }
            return;
        };
        let path = self.paths.at(slot);
        if seq <= path.status_seq {
            return;
        }
        (path.status_seq, path.status, path.gated, path.reason) = (seq, status, gated, reason);
        match status {
            PathStatus::Gone => {
                self.remove_path(slot);
                self.suspend_if_idle(now, reason);
            }
            PathStatus::Frozen => {
                self.freeze(now, slot, false);
                self.on_peer_frozen(slot, reason);
            }
            PathStatus::Available | PathStatus::Standby => self.on_heard_by_peer(now, slot),
        }
        self.flows.touch_all();
    }

    /// Retires a path that was closed before anything arrived on it: late packets must not open it.
    fn retire_unopened_path(&mut self, id: PathId) {
        let Some(issued) = self.issued.get(&id).copied() else {
            return;
        };
        if self.use_path_id(id) {
            self.issued.remove(&id);
            self.spare.remove(&id);
            self.cid_changes
                .push(crate::session_state::CidChange::Remove(issued.cid));
            self.issue_ids(id.0 + SPARE_PATHS);
        }
    }

    fn on_rsp(&mut self, now: Time, slot: usize, from: Addresses, nonce: [u8; 16]) {
        let path = self.paths.at(slot);
        let asked = path.challenges.iter().find(|c| c.nonce == nonce).copied();
        let Some(challenge) = asked.filter(|c| c.remote == from.remote) else {
            return;
        };
        path.challenges.retain(|c| c.nonce != nonce);
        if challenge.remote == path.addresses.remote {
            path.validated = true;
            if self.role == Role::Responder {
                path.wants |= path::want::AUTH;
            }
        } else if let Some(before) = &path.previous
            && before.addresses.remote == challenge.remote
        {
            // R-PATH-4: the previous address still answers, so another host caused the move.
            path.addresses = before.addresses;
            path.set_carrier(&self.config);
            path.validated = true;
            path.previous = None;
        }
        self.on_heard_by_peer(now, slot);
    }

    // ---- answers to a handshake ----

    /// Handles a SYN+ACK for our handshake.
    pub(crate) fn handle_syn_ack(&mut self, now: Time, from: Addresses, message: &[u8]) {
        let Some(handshake) = &mut self.handshake else {
            return;
        };
        if let Some(trace) = &mut self.trace {
            trace.at(now);
        }
        let mut payload = [0; 1500];
        // R-HS-14: the answer must come from the address to which the SYN was sent.
        let asked = handshake.open.iter_mut().rev();
        let asked = asked.filter(|o| o.addresses.link == from.link);
        let mut asked = asked.filter(|o| o.addresses.remote == from.remote);
        let answered = asked.find_map(|open| {
            let answer = open.initiator.finish(message, &mut payload).ok()?;
            Some((open, answer))
        });
        let Some((open, (secrets, n))) = answered else {
            return;
        };
        let Some(mut answer) = SynAck::decode(&mut WireReader::new(&payload[..n])) else {
            return;
        };
        // R-KEM-1: what was not offered is not agreed.
        if let SynAck::Accepted(body) = &mut answer
            && !open.offers_hybrid
        {
            body.hybrid = HybridAnswer::Unused;
        }
        let (epoch, sent_at, gated) = (open.epoch, open.sent_at, open.gated);
        let (by_ticket, sent_once_at) = (open.by_ticket, open.sent_once_at());
        let secret = open.secret.clone();
        match answer {
            SynAck::Stale { confirmed } => {
                // R-HS-4: the server has confirmed a later epoch of this instance, so continue
                // above it.
                self.epochs.start = self.epochs.start.max(confirmed.saturating_add(1));
                handshake.open.clear();
                handshake.retry_now(now, from.link);
            }
            SynAck::Refused(reason) => self.end(SessionEnd::Refused(reason)),
            SynAck::NoSuite => self.end(SessionEnd::NoCommonVersion),
            // R-HS-21: the device tries again at the pace of its timer, with another SYN, since this one has had its
            // answer.
            SynAck::Later => handshake.open.retain(|open| open.epoch != epoch),
            SynAck::NoTicket if !by_ticket => {}
            SynAck::NoTicket => {
                self.ticket = None;
                handshake.open.clear();
                handshake.retry_now(now, from.link);
            }
            // R-CLOSE-3: the server does not know the session that is being closed.
            SynAck::Accepted(body) if self.closing.is_some() && !body.resumed => {
                self.end(SessionEnd::Local);
            }
            // R-KEM-8
            SynAck::Accepted(body)
                if self.requires_hybrid && body.hybrid == HybridAnswer::Unused =>
            {
                self.end(SessionEnd::NoHybridKeys);
            }
            SynAck::Accepted(body) => {
                let Some(suite) = CipherSuite::from_code(body.suite) else {
                    return;
                };
                if !self.config.suites.contains(&suite) {
                    return;
                }
                // R-KEM-6
                let secret = match (body.hybrid, &secret) {
                    (HybridAnswer::SecretUsed, None) => return,
                    (HybridAnswer::SecretUsed, secret) => secret.as_deref(),
                    _ => None,
                };
                let handshake = self.handshake.take().expect("it is being answered");
                let mut keys = PacketKeys::with_secret(suite, &secrets, secret, true);
                if body.hybrid == HybridAnswer::Exchange {
                    keys.await_exchange(&secrets);
                }
                let waiting: Vec<_> = handshake.links().collect();
                let cids = handshake.cids;
                self.begin_generation(now, keys, epoch, &cids, &body);
                self.ticket = body.ticket.map(ClientTicket::boxed);
                let mut path =
                    SessionPath::new(now, PathId(0), from, &self.config, (body.cid, body.token));
                path.validated = true;
                path.gated = gated;
                path.state = PathState::Active;
                if let Some(sent_at) = sent_once_at {
                    path.recovery.rtt.on_sample(now.since(sent_at), Span::ZERO);
                }
                path.status_seq = 1;
                path.wants |= path::want::STATUS | path::want::PING;
                let link = from.link;
                if let Some(trace) = &mut self.trace {
                    trace.note(TraceRecord::opened(&path));
                }
                self.spare.remove(&PathId(0));
                self.use_path_id(PathId(0));
                self.paths.push(path);
                self.after_handshake(now, body.resumed);
                self.emit(SessionEvent::PathUp {
                    path: PathId(0),
                    link,
                    took: now.since(sent_at),
                });
                // Links that waited for keys open their paths now.
                for (addresses, gated) in waiting {
                    if addresses.link != link {
                        self.open_path(now, addresses, gated);
                    }
                }
            }
        }
    }

    /// Replaces keys, paths and ids with those of a new handshake.
    pub(crate) fn begin_generation(
        &mut self,
        now: Time,
        keys: PacketKeys,
        epoch: u32,
        own_cids: &[Cid],
        peer: &SynAckBody,
    ) {
        while !self.paths.is_empty() {
            self.remove_path(0);
        }
        for (_, issued) in std::mem::take(&mut self.issued) {
            self.cid_changes
                .push(crate::session_state::CidChange::Remove(issued.cid));
        }
        self.generation += 1;
        for (cid, n) in own_cids.iter().zip(0..) {
            let token = self
                .cookie_secrets
                .as_ref()
                .map_or([0; 16], |secrets| secrets.token(*cid));
            let issued = crate::session::IssuedCid {
                cid: *cid,
                token,
                must_send: false,
            };
            self.issued.insert(PathId(n), issued);
            self.cid_changes.push(crate::session_state::CidChange::Add {
                cid: *cid,
                path: PathId(n),
                generation: self.generation,
            });
        }
        self.spare = peer
            .spare
            .iter()
            .zip(1..)
            .map(|(s, n)| (PathId(n), *s))
            .collect();
        self.spare.insert(PathId(0), (peer.cid, peer.token));
        self.issued_to = own_cids.len() as u32;
        self.gone.clear();
        self.flows.forget_claims();
        self.used_paths.clear();
        self.keys = Some(keys);
        self.keys_at = now;
        self.sealed_packets = 0;
        self.rx_key_drop_at = Time::NEVER;
        if epoch != self.flow_epoch {
            self.flow_epoch = epoch;
            self.next_flow = 0;
        }
        self.epoch = epoch;
        self.credit = crate::session::SessionCredit {
            peer_max: peer.session_credit,
            advertised: self.config.session_window,
            ..Default::default()
        };
        self.initial_flow_credit = peer.flow_credit;
        self.last_rx = now;
        self.inherits_instance = (self.inherits_instance || !self.known_to_peer) && peer.resumed;
        self.known_to_peer = true;
        self.paused = false;
        self.wants = if self.closing.is_some() {
            say::CLOSE
        } else {
            0
        };
        self.begin_key_exchange(peer.hybrid);
    }

    /// Handles a server's request to prove the device's address.
    pub(crate) fn handle_cookie(&mut self, now: Time, body: &[u8]) {
        let peer = self.peer;
        let Some(handshake) = &mut self.handshake else {
            return;
        };
        let Some((nonce, sealed)) = body.split_first_chunk::<12>() else {
            return;
        };
        let mut asked = handshake.open.iter().rev();
        let cookie = asked.find_map(|o| {
            let cookie = open_cookie(&peer, o.mac1, *nonce, sealed).ok()?;
            Some((o.addresses.link, cookie))
        });
        if let Some((link, cookie)) = cookie {
            handshake.on_cookie(now, link, cookie);
        }
    }

    /// Handles a server's UNKNOWN for this session.
    pub(crate) fn handle_unknown(
        &mut self,
        now: Time,
        path: PathId,
        generation: u32,
        token: &[u8],
    ) {
        if generation != self.generation || self.role == Role::Responder {
            return;
        }
        let Some(p) = self.paths.get_mut(path) else {
            return;
        };
        // R-UNKNOWN-1: only the host that issued the id knows its token.
        if !verify_unknown_token(&p.token, token) {
            return;
        }
        p.unknown = true;
        let (addresses, gated) = (p.addresses, p.gated);
        if self.closing.is_some() {
            // R-CLOSE-3: a server that does not know the session need not be informed of its end.
            return self.end(SessionEnd::Local);
        }
        // Also while a handshake runs on other links: the link that answered may be the only one
        // that works.
        self.start_handshake(now, addresses, gated);
    }
}
