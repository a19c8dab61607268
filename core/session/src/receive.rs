//! Receiving: decrypts a packet, decodes its frames, and hands each frame to its owner.

mod flow_frames;
mod handshake_answers;
mod path_frames;

use d2tp_time::{Span, Time};
use d2tp_wire::{DATA_HEADER_BYTES, Frame, FrameIter, PathId, PathStatus, ReasonCode};

use crate::config::SPARE_PATHS;
use crate::event::{FlowEnd, PeerFault, SessionEnd, SessionEvent};
use crate::flow::{SessionFlow, want};
use crate::flow_api::CODE_DEADLINE;
use crate::link::Addresses;
use crate::path;
use crate::path::{PathState, SessionPath};
use crate::resume::CODE_ROLLED_BACK;
use crate::session::Session;
use crate::session_state::{Role, SessionState};
use crate::trace::TraceRecord;

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
        self.unknown_tokens.clear();
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
        let Some(cid) = self.spare.remove(&id) else {
            return false;
        };
        if !self.use_path_id(id) {
            return false;
        }
        let mut path = SessionPath::new(now, id, from, &self.config, cid);
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
                path.note_previous_address();
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
                if self.open_for_early_frame(flow)?
                    && let Some(f) = self.flows.get_mut(flow)
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
                let deadline = self.cut_moved_deadline(now, asked);
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
                if self.role == Role::Responder
                    && self.issued.contains_key(&path)
                    && self.open_for_early_frame(flow)?
                    && let Some(f) = self.flows.get_mut(flow)
                {
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
                if let Some(path) = self.paths.get_mut(path) {
                    path.on_peer_limit(seq, bytes);
                }
            }
            Frame::FlowPause {
                flow,
                seq,
                paused,
                reason,
            } => {
                if self.open_for_early_frame(flow)?
                    && let Some(f) = self.flows.get_mut(flow)
                    && seq > f.pause_in.0
                {
                    f.pause_in = (seq, paused, reason);
                    self.flows.touch(flow);
                }
            }
            Frame::Chg { nonce } => {
                self.paths.at(slot).on_challenged(nonce, from);
            }
            Frame::Rsp { nonce } => self.on_rsp(now, slot, from, nonce),
            Frame::Auth { path } => {
                if let Some(path) = self.paths.get_mut(path) {
                    path.on_accepted();
                }
            }
            Frame::PathCid { path, cid, token } => {
                // R-PATH-7: ids are kept for a limited number of paths ahead, whatever the peer
                // sends.
                let ahead =
                    self.used_paths.last().map_or(0, |(_, end)| end) + 2 * u64::from(SPARE_PATHS);
                let n = u64::from(path.0);
                let is_ours = path.0 >= self.issued_to || self.issued.contains_key(&path);
                if n <= ahead && is_ours && !self.used_paths.contains(n) {
                    self.keep_peer_id(path, cid, token);
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
                let asked = |f: &&SessionFlow| f.unclaimed || (!f.end_reported && silent(f));
                let sent = self.flows.get(flow).filter(asked).map(|f| f.send.next());
                if let Some(sent) = sent {
                    if reason == ReasonCode::LimitReached {
                        // R-QUOTA-2: the server did not count bytes that it refused.
                        self.credit.sent = self.credit.sent.saturating_sub(sent);
                    }
                    self.deliver_remaining(flow);
                    self.end_flow(flow, FlowEnd::Refused(reason));
                }
            }
            Frame::ResumeEnd { flows } => self.on_resume_end(flows)?,
            Frame::Datagram { context, bytes } => {
                let path = self.paths.at(slot);
                path.payload_in += bytes.len() as u64;
                path.datagram_at = Some(now);
                self.on_datagram(slot, context, bytes);
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

    // ---- answers to a handshake ----
}
