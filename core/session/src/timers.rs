//! The timers of a session: what happens when time passes, and the next time something is due.
//!
//! Each timer in one sentence. A flow's deadline ends the flow. An unanswered SYN is repeated. Keys
//! that are an hour old are replaced. The peer's previous keys are forgotten. A delayed ACK is
//! sent. Packets that were overtaken long ago count as lost. A path without answers is probed and
//! then marked silent; if it never answered and is the only one, a new handshake begins. A device
//! that waits for payload on a quiet path probes it. A path that must stay reachable is used before
//! a NAT drops its binding. A server frees memory that a quiet session does not need, and stops
//! sending if it receives nothing. A CLOSE without an answer is given up.

use d2tp_seal::PacketKeys;
use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, PathStatus, ReasonCode};

use crate::config::EndpointConfig;
use crate::event::{SessionEnd, SessionEvent};
use crate::path::{self, PathState, SessionPath};
use crate::sent_packet::SentFrame;
use crate::session::{Session, on_frame_fate};
use crate::session_state::{Role, SessionState};

/// The number of probe timeouts after which probes use small packets. // RFC 8899 §4.3 leaves the
/// number open
const PROBES_BEFORE_SMALL: u32 = 3;
/// How long a session may have no packet before a server counts it as idle.
const COOL_AFTER: Span = Span::from_millis(250); // a guess: to allocate its memory again costs a few microseconds
/// How long a session without a flow may have no packet before a server counts it as idle: it has nothing to send. Longer: where many devices
/// connect at once, the memory that all of them need for their handshakes at the same time grows.
const COOL_WITHOUT_FLOW_AFTER: Span = Span::from_millis(50); // measured: docs/benchmarks.md
/// Probe timeouts on a path that never answered after which a device begins a new handshake.
const PROBES_BEFORE_KNOCK: u32 = 5;

impl Session {
    /// When [`Session::handle_timeouts`] wants to be called next.
    pub fn next_timeout(&mut self) -> Time {
        if self.state == SessionState::Closed {
            return Time::NEVER;
        }
        let mut at = self.flows.next_deadline();
        if self.closing.is_some() {
            at = at.min(self.closing_until);
        }
        if let Some(handshake) = &self.handshake {
            at = at.min(handshake.next_at());
        }
        if self.state == SessionState::Suspended {
            return at.min(self.absence_at());
        }
        at = at.min(self.rx_key_drop_at);
        if self.role == Role::Initiator && self.handshake.is_none() {
            at = at.min(self.keys_at + self.config.keys_max);
        }
        let (delay, interval) = (self.config.ack_delay_max, self.config.probe_interval_max);
        let (waits, asking) = (self.role == Role::Initiator, self.probe_frequency());
        for (slot, path) in self.paths.iter().enumerate() {
            if waits && self.expects_payload(path) {
                at = at.min(path.liveness_probe_at(delay, interval));
            }
            at = at.min(path.recovery.loss_at()).min(self.quiet_at(path));
            at = at.min(self.one_way_at(slot));
            if self.closing.is_some() {
                // Such a path neither acknowledges nor paces anything any more.
                if path.may_send() {
                    at = at.min(path.probe_at(asking, delay, interval));
                }
                continue;
            }
            // If nothing may be sent to an address that is not validated, only bytes from there
            // help, not time.
            if path.may_send() {
                at = at
                    .min(path.probe_at(asking, delay, interval))
                    .min(path.ack_at())
                    .min(path.paced_until);
            } else if path.recovery.in_flight > 0 {
                at = at.min(path.probe_at(asking, delay, interval));
            }
        }
        if self.role == Role::Responder {
            at = at.min(self.last_rx + self.silence_max());
            if self.keys.as_ref().is_some_and(PacketKeys::has_ciphers) {
                at = at.min(self.cool_at());
            }
        } else if let Some(path) = self.kept_alive() {
            at = at.min(path.last_tx + self.config.keepalive);
        }
        at
    }

    /// When a server frees memory that only a busy session needs. A device has few sessions, and
    /// would be woken for it.
    fn cool_at(&self) -> Time {
        let spoke = self.paths.iter().map(|p| p.last_tx).max();
        let after = match self.flows.len() {
            0 => COOL_WITHOUT_FLOW_AFTER,
            _ => COOL_AFTER,
        };
        self.last_rx.max(spoke.unwrap_or(Time::ZERO)) + after
    }

    /// R-ALIVE-1, R-ALIVE-2: the path that is kept open, if the session must stay reachable.
    fn kept_alive(&self) -> Option<&SessionPath> {
        let wanted = self.role == Role::Initiator
            && self.closing.is_none()
            && (self.reachable || self.flows.any_reachable());
        let paths = self.paths.iter().filter(|_| wanted);
        paths
            .filter(|p| p.state == PathState::Active && p.status == PathStatus::Available)
            .min_by_key(|p| p.rank())
    }

    /// How long a device may be silent before a server considers it away (R-SUSPEND-2).
    fn silence_max(&self) -> Span {
        let EndpointConfig {
            silence_max,
            silence_reachable_max,
            ..
        } = *self.config;
        if self.flows.any_reachable() {
            silence_max.max(silence_reachable_max)
        } else {
            silence_max
        }
    }

    /// Whether payload could arrive on this path at any moment.
    pub(crate) fn expects_payload(&self, path: &SessionPath) -> bool {
        !path.driver_frozen
            && matches!(path.status, PathStatus::Available | PathStatus::Standby)
            && (path.receives_datagrams()
                || self.flows.iter().any(|f| {
                    !f.recv.is_complete()
                        && !f.recv.is_all_received()
                        && !f.pause_out.1
                        && (!path.gated || f.grants_out.left(path.id) > 0)
                }))
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

    /// Handles all timers that are due.
    pub fn handle_timeouts(&mut self, now: Time) {
        if self.state == SessionState::Closed {
            return;
        }
        if let Some(trace) = &mut self.trace {
            trace.at(now);
        }
        if self.closing.is_some() && self.closing_until <= now {
            // R-CLOSE-3: the peer has forgotten the session by now.
            return self.end(SessionEnd::LocalUnheard);
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
        // R-HS-9: a long-running session gets new keys by a handshake every hour.
        if self.role == Role::Initiator
            && self.state == SessionState::Established
            && self.handshake.is_none()
            && self.keys_at + self.config.keys_max <= now
        {
            let best = self.paths.iter().min_by_key(|p| p.rank());
            if let Some((addresses, gated)) = best.map(|p| (p.addresses, p.gated)) {
                self.start_handshake(now, addresses, gated);
            }
        }
        if self.state == SessionState::Suspended {
            if self.absence_at() <= now {
                self.end(SessionEnd::Local);
            }
            return;
        }
        if self.role == Role::Responder && self.cool_at() <= now {
            self.release_buffers();
        }
        let (delay, interval) = (self.config.ack_delay_max, self.config.probe_interval_max);
        let resting = self
            .kept_alive()
            .filter(|p| p.last_tx + self.config.keepalive <= now)
            .map(|p| p.id);
        if let Some(path) = resting.and_then(|id| self.paths.get_mut(id)) {
            path.last_tx = now;
            path.probe_now = true;
            path.wants |= path::want::PING;
        }
        self.note_quiet(now);
        let asking = self.probe_frequency();
        let mut handshake = None;
        for slot in 0..self.paths.len() {
            if self.role == Role::Initiator
                && self.paths.iter().nth(slot).is_some_and(|p| {
                    p.liveness_probe_at(delay, interval) <= now && self.expects_payload(p)
                })
            {
                let path = self.paths.at(slot);
                path.idle_probes += 1;
                path.payload_at_probe = path.payload_in;
                path.pad_next = true;
                path.probe_now = true;
                path.wants |= path::want::PING;
            }
            if self.paths[slot].recovery.loss_at() <= now {
                self.classify_losses(now, slot);
            }
            let live_besides = self.paths.has_other_live(slot);
            if self.one_way_at(slot) <= now {
                let path = self.paths.at(slot);
                path.one_way_since = Some(now);
                let (id, link) = (path.id, path.addresses.link);
                if self.freeze(now, slot, false) {
                    self.emit(SessionEvent::PathSilent { path: id, link });
                }
            }
            let Session {
                paths,
                flows,
                issued,
                wants: says,
                gone,
                ..
            } = self;
            let path = paths.at(slot);
            let mut reduced_for = None;
            if path.recovery.loss_at() <= now {
                let mut own = path.wants;
                let outcome = path.recovery.on_loss_timeout(now, delay, |said, arrived| {
                    on_frame_fate(
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
                if outcome.lost_size > 0 && path.mtu.on_loss(now, outcome.lost_size) {
                    path.recovery
                        .controller
                        .set_datagram(path.mtu.current() as u64);
                }
                if outcome.mtu_lost {
                    path.mtu.on_probe_lost(now);
                }
                reduced_for = outcome.reduced_for;
            }
            let mut silent = false;
            if path.may_send() && path.probe_at(asking, delay, interval) <= now {
                path.recovery.on_probe_timeout(now);
                if path.recovery.probes >= PROBES_BEFORE_SMALL && path.mtu.on_silence() {
                    path.recovery
                        .controller
                        .set_datagram(path.mtu.current() as u64);
                }
                path.probe_now = true;
                path.wants |= path::want::PING;
                let handshakes = self.role == Role::Initiator
                    && path.recovery.probes >= PROBES_BEFORE_KNOCK
                    && !path.recovery.ever_answered()
                    && !live_besides;
                if handshakes {
                    // The server may lack an id of ours that it needs to accept this path. It then
                    // receives our packets and cannot answer.
                    handshake = Some((path.addresses, path.gated));
                }
                // R-PATH-6: a new path that is the only one may be slow; it has a few more probes.
                let judged = live_besides || path.recovery.ever_answered() || handshakes;
                if path.is_in_blackout(now, delay) && judged {
                    self.note_silent_again(now, slot);
                    // A server cannot do anything about its only path; a device may have another
                    // link.
                    silent = self.freeze(now, slot, !live_besides)
                        && (live_besides || self.role == Role::Initiator);
                } else if path.is_stream() {
                    // R-STREAM-3
                } else if let Some(oldest) = path.recovery.oldest() {
                    let again: Vec<SentFrame> = oldest.frames().collect();
                    let mut own = path.wants;
                    for said in again {
                        on_frame_fate(
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
            if let Some(sent_at) = reduced_for {
                self.share_reduction(now, slot, sent_at);
            }
            let path = self.paths.at(slot);
            if !path.may_send()
                && path.recovery.in_flight > 0
                && path.probe_at(asking, delay, interval) <= now
            {
                // The path may not be probed, and its peer may be gone: its data moves to other
                // paths.
                self.freeze(now, slot, false);
            }
            let path = self.paths.at(slot);
            let (id, link) = (path.id, path.addresses.link);
            if let Some(trace) = &mut self.trace {
                trace.note_path_changes(path);
            }
            if silent {
                self.emit(SessionEvent::PathSilent { path: id, link });
            }
        }
        if let Some((addresses, gated)) = handshake {
            self.start_handshake(now, addresses, gated);
        }
        if self.role == Role::Responder
            && self.last_rx + self.silence_max() <= now
            && self.state == SessionState::Established
        {
            // R-SUSPEND-2: only a device can resume, so a server that receives nothing sends
            // nothing.
            self.stop_until_answered(now, ReasonCode::NoPath);
        }
    }

    /// Stops sending until the device sends again. Data in flight will be repeated.
    pub(crate) fn stop_until_answered(&mut self, now: Time, reason: ReasonCode) {
        self.state = SessionState::Suspended;
        self.suspended_at = Some(now);
        for slot in 0..self.paths.len() {
            self.freeze(now, slot, true);
            let path = self.paths.at(slot);
            path.wants = 0;
            path.probe_now = false;
        }
        self.release_buffers();
        self.emit(SessionEvent::Suspended(reason));
    }

    /// Frees memory that only a busy session needs, because nothing will be sent for a long time.
    /// The next packet allocates it again.
    pub(crate) fn release_buffers(&mut self) {
        if let Some(keys) = &mut self.keys {
            keys.drop_ciphers();
        }
        self.events.shrink_to_fit();
        self.cid_changes.shrink_to_fit();
        self.arrivals = Vec::new();
        self.gone.shrink_to_fit();
        for path in self.paths.iter_mut() {
            path.recovery.shrink();
            path.shrink_validation();
        }
        self.flows.shrink();
    }
}
