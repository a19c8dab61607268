//! Frames of paths: acknowledgements, the status that the peer reports, and answers to challenges.

use d2tp_time::{Span, Time};
use d2tp_wire::{PathId, PathStatus, ReasonCode};

use crate::config::SPARE_PATHS;
use crate::congestion::SiblingPath;
use crate::event::{PeerFault, SessionEnd};
use crate::link::Addresses;
use crate::path;
use crate::sent_packet::SentFrame;
use crate::session::{Session, on_frame_fate, say};
use crate::session_state::Role;

impl Session {
    pub(super) fn on_ack(
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
        let siblings: Vec<SiblingPath> = if self.paths.len() > 1 {
            self.paths
                .iter()
                // A path that carries no payload does not compete with others.
                .filter(|p| p.id == id || (p.takes_payload() && !p.is_stream()))
                .map(|p| SiblingPath {
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
        let in_flight = path.recovery.in_flight;
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
            path.bound_datagram_queue(now, rtt, in_flight);
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
            && path.mtu.on_loss(now, outcome.lost_size)
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
        if let Some(sent_at) = outcome.reduced_for {
            self.share_reduction(now, slot, sent_at);
        }
        if outcome.rtt.is_some() {
            self.round_trip_known = self.paths[slot].recovery.rtt.min();
            self.resume_known_path(now, slot);
            self.note_queue_delay(now, slot);
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

    pub(super) fn on_path_status(
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
    pub(super) fn retire_unopened_path(&mut self, id: PathId) {
        if self.issued.contains_key(&id) && self.use_path_id(id) {
            self.withdraw_id(id);
            self.issue_ids(id.0 + SPARE_PATHS);
        }
    }

    pub(super) fn on_rsp(&mut self, now: Time, slot: usize, from: Addresses, nonce: [u8; 16]) {
        let path = self.paths.at(slot);
        if !path.take_challenge(nonce, from.remote) {
            return;
        }
        if from.remote == path.addresses.remote {
            path.validated = true;
            if self.role == Role::Responder {
                path.wants |= path::want::AUTH;
            }
        } else if let Some(previous) = path.take_previous_at(from.remote) {
            // R-PATH-4: the previous address still answers, so another host caused the move.
            path.addresses = previous;
            path.set_carrier(&self.config);
            path.validated = true;
        }
        self.on_heard_by_peer(now, slot);
    }
}
