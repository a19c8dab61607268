//! Control of a session's paths by a device: opening, closing, loss, grants. Also closing the
//! session.
//!
//! ```text
//!  link up   ──▶ open_path ──▶ keys and a spare id? a new path : a handshake with the server
//!  link down ──▶ on_link_down ──▶ data in flight moves to other paths, the peer gets GONE on the next path
//! ```

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, PathId, PathStatus, ReasonCode, VARINT_MAX};

use crate::cid_share;
use crate::client_handshake::ClientHandshake;
use crate::config::{PATHS_MAX, SPARE_PATHS};
use crate::event::{FlowEnd, PathSwitchKind, PeerFault, SessionEnd, SessionEvent};
use crate::link::{Addresses, LinkId};
use crate::path::{self, PathState, Paths, SessionPath};
use crate::session::{ActivePath, GonePath, IssuedCid, Session, on_frame_fate, say};
use crate::session_state::{CidChange, Role, SessionState};
use crate::trace::TraceRecord;

/// The most connection ids that are issued and unused, beside those of live paths.
pub(crate) const ISSUED_MAX: u32 = 16;

/// How long a path may bring no payload while another one does, before it counts as no longer in
/// use, because two paths may be used in parallel. A guess: longer than a burst on the other path,
/// shorter than users' patience.
const SWITCHED_AFTER: Span = Span::from_secs(1);

impl Session {
    /// Begins to use a link: opens a path, or begins a handshake if there are no keys. `gated`:
    /// payload on the path needs grants (a metered link).
    pub fn open_path(&mut self, now: Time, addresses: Addresses, gated: bool) {
        if self.state == SessionState::Closed || self.role == Role::Responder {
            return;
        }
        if self
            .paths
            .iter()
            .any(|p| p.addresses == addresses && p.state != PathState::Silent)
        {
            return;
        }
        // R-HS-9: after an hour without a network, new keys are needed first.
        let fresh = now.since(self.keys_at) < self.config.keys_max;
        // R-RESUME-6: after a long silence the session may be hibernated at the server. A SYN
        // claims the flows in either case; a packet under old keys would cost a round trip to find
        // out.
        let away = self.paths.is_empty()
            && (self.suspended_for(now)).is_some_and(|span| span >= self.config.claim_after);
        // R-RESUME-6: do not use these keys again after the server has answered UNKNOWN. Claimed
        // flows must not move under the old keys either, because the claims may still be answered.
        let lost = self.paths.iter().any(|path| path.unknown)
            || self
                .handshake
                .as_ref()
                .is_some_and(|handshake| handshake.has_claimed());
        let fresh = fresh && !away && !lost;
        let spare = if self.keys.is_some() && fresh && !self.paths.is_full() {
            self.spare.pop_first()
        } else {
            None
        };
        let Some((id, cid)) = spare else {
            return self.start_handshake(now, addresses, gated);
        };
        if !self.issued.contains_key(&id) || !self.use_path_id(id) {
            return self.start_handshake(now, addresses, gated);
        }
        let mut path = SessionPath::new(now, id, addresses, &self.config, cid);
        path.gated = gated;
        path.status_seq = 1;
        path.wants |= path::want::STATUS;
        // The device knows the server already, so the path needs no proof of address, only an
        // answer.
        path.validated = true;
        path.beside_another = self.paths.iter().any(|p| p.state == PathState::Active);
        path.challenge(self.rng.array());
        if let Some(trace) = &mut self.trace {
            trace.at(now).note(TraceRecord::opened(&path));
        }
        self.report_silent_paths();
        self.paths.push(path);
        self.issue_ids(id.0 + SPARE_PATHS);
        self.wake(now);
        self.flows.touch_all();
    }

    /// Resumes the session at another node of the server, which has the server's key and its records but
    /// not the keys of this session (R-NODE-2): by a handshake, whatever paths there are. They carry data
    /// until it is answered, and end with it. Flows that are opened meanwhile wait for the answer (R-NODE-6).
    pub fn wake_at(&mut self, now: Time, addresses: Addresses, gated: bool) {
        if self.state == SessionState::Closed || self.role == Role::Responder {
            return;
        }
        // A ticket is the node's that issued it. Another may not open it, and cannot say so.
        self.ticket = None;
        // A node that does not answer may have lost the session: the flows are claimed at once.
        for path in self.paths.iter_mut() {
            path.unknown |= path.state == PathState::Silent;
        }
        // What is asked on a link with a path is asked of the node that is to be left.
        let paths = &self.paths;
        let former = |link: LinkId| paths.iter().any(|path| path.addresses.link == link);
        if let Some(handshake) = &mut self.handshake {
            let asked: Vec<LinkId> = handshake.links().map(|(to, _)| to.link).collect();
            for link in asked.into_iter().filter(|link| former(*link)) {
                handshake.drop_link(link);
            }
        }
        let leads_there = |path: &SessionPath| path.addresses.remote == addresses.remote;
        self.moves_to_node |= !self.paths.is_empty() && !self.paths.iter().any(leads_there);
        self.start_handshake(now, addresses, gated);
    }

    /// R-NODE-6: the session goes on at a node, that which was asked or the one before.
    pub(crate) fn on_node_settled(&mut self) {
        if std::mem::take(&mut self.moves_to_node) {
            self.flows.release_waiting();
        }
    }

    /// Registers a path id. False if it was used under these keys before.
    pub(crate) fn use_path_id(&mut self, id: PathId) -> bool {
        let n = u64::from(id.0);
        self.used_paths.insert(n, n + 1) == 1
    }

    pub(crate) fn start_handshake(&mut self, now: Time, addresses: Addresses, gated: bool) {
        match &mut self.handshake {
            Some(handshake) => handshake.add(now, addresses, gated),
            None => {
                // R-LONG-1
                let round_trip = self.config.rtt_initial.max(self.round_trip_known);
                let handshake =
                    ClientHandshake::new(now, addresses, gated, round_trip, &mut self.rng);
                self.cid_changes
                    .extend(handshake.routes(self.generation + 1));
                self.handshake = Some(Box::new(handshake));
                if self.state != SessionState::Established {
                    self.state = SessionState::Handshaking;
                }
            }
        }
    }

    /// Issues connection ids for all path ids up to `last`.
    pub(crate) fn issue_ids(&mut self, last: u32) {
        for n in self.issued_to..=last {
            let shares = [self.config.cid_share, self.config.worker];
            let cid = cid_share::draw(shares, &mut self.rng);
            let path = PathId(n);
            let must_send = true;
            self.issued.insert(path, IssuedCid { cid, must_send });
            self.cid_changes.push(CidChange::Add {
                cid,
                path,
                generation: self.generation,
            });
        }
        self.issued_to = self.issued_to.max(last + 1);
        // R-PATH-11: ids that a device skipped are withdrawn, with some tolerance for reordering.
        let stale: Vec<PathId> = self
            .issued
            .keys()
            .copied()
            .filter(|p| p.0 + ISSUED_MAX <= last && self.paths.get(*p).is_none())
            .collect();
        for path in stale {
            self.withdraw_id(path);
        }
        if let Some(end) = (last + 1).checked_sub(ISSUED_MAX) {
            // None of these ids can be used any more, and one range takes less memory than their gaps.
            self.used_paths.insert(0, u64::from(end));
        }
    }

    /// Forgets a path id that was not used, with all that either end said about a path of that number.
    pub(crate) fn withdraw_id(&mut self, id: PathId) {
        if let Some(issued) = self.issued.remove(&id) {
            self.cid_changes.push(CidChange::Remove(issued.cid));
        }
        self.spare.remove(&id);
        self.unknown_tokens.remove(&id);
        for flow in self.flows.iter_mut() {
            flow.grants_in.forget_path(id);
            flow.grants_out.forget_path(id);
        }
    }

    /// Handles the loss of a link: data in flight on it is sent on other paths, or waits.
    pub fn on_link_down(&mut self, now: Time, link: LinkId) {
        if let Some(trace) = &mut self.trace {
            trace.at(now);
        }
        if let Some(handshake) = &mut self.handshake
            && !handshake.drop_link(link)
        {
            self.drop_handshake();
        }
        loop {
            let slot = self.paths.iter().position(|p| p.addresses.link == link);
            let Some(slot) = slot else { break };
            let path = self.remove_path(slot);
            self.announce_gone(path);
        }
        self.suspend_if_idle(now, ReasonCode::NoPath);
    }

    /// R-PATH-8: informs the peer on another path that this one is closed, and which packets
    /// arrived on it.
    pub(crate) fn announce_gone(&mut self, path: SessionPath) {
        if self.gone.len() == PATHS_MAX {
            self.gone.remove(0);
        }
        self.gone.push(GonePath {
            path: path.id,
            received: path.acks.ranges().collect(),
            must_send: true,
        });
    }

    /// Stops using a link that is still up: the peer is informed on the path itself, which is then
    /// closed.
    pub fn close_path(&mut self, now: Time, link: LinkId, reason: ReasonCode) {
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

    /// Whether there is a frame to send that neither an ACK nor a timer triggers.
    pub fn has_pending_frames(&self) -> bool {
        self.wants != 0 || self.flows.has_dirty()
    }

    pub(crate) fn drop_handshake(&mut self) {
        self.on_node_settled();
        if let Some(handshake) = self.handshake.take() {
            let routes = handshake.routes(self.generation + 1);
            self.cid_changes
                .extend(routes.into_iter().filter_map(|r| match r {
                    CidChange::Add { cid, .. } => Some(CidChange::Remove(cid)),
                    CidChange::Remove(_) => None,
                }));
        }
    }

    pub(crate) fn remove_path(&mut self, slot: usize) -> SessionPath {
        let Session {
            paths,
            flows,
            issued,
            wants: says,
            gone,
            path_metrics_cache: metrics_cache,
            ..
        } = self;
        let mut path = paths.remove(slot);
        if let Some(known) = path.measured_metrics() {
            metrics_cache.note(known);
        }
        path.recovery.abandon(|said, arrived| {
            on_frame_fate(said, arrived, flows, None, issued, says, gone);
        });
        for flow in flows.iter_mut() {
            flow.grants_in.forget_path(path.id);
            flow.grants_out.forget_path(path.id);
        }
        flows.touch_all();
        if let Some(issued) = self.issued.remove(&path.id) {
            self.cid_changes.push(CidChange::Remove(issued.cid));
        }
        self.unknown_tokens.remove(&path.id);
        self.emit(SessionEvent::PathDown {
            path: path.id,
            link: path.addresses.link,
        });
        path
    }

    pub(crate) fn suspend_if_idle(&mut self, now: Time, reason: ReasonCode) {
        if self.state == SessionState::Closed || !self.paths.is_empty() || self.handshake.is_some()
        {
            return;
        }
        if self.state != SessionState::Suspended || self.suspended_at.is_none() {
            self.state = SessionState::Suspended;
            self.suspended_at = Some(now);
            self.release_buffers();
            self.emit(SessionEvent::Suspended(reason));
        }
    }

    pub(crate) fn wake(&mut self, now: Time) {
        self.paused = false;
        if let Some(at) = self.suspended_at.take() {
            self.emit(SessionEvent::Woken {
                after: now.since(at),
            });
        }
        if self.keys.is_some() && self.state != SessionState::Closed {
            self.state = SessionState::Established;
        }
    }

    /// Sets what the path over `link` may be used for.
    pub fn set_path_status(
        &mut self,
        link: LinkId,
        status: PathStatus,
        gated: bool,
        reason: ReasonCode,
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

    /// Allows a flow to spend `more` payload bytes on the gated path over `link` from now on; zero
    /// revokes. Each direction has its own budget of this size.
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

    /// The number of bytes of a flow that the peer may still send over `link`, and that it has
    /// spent there.
    pub fn grant_left(&self, id: FlowId, link: LinkId) -> Option<(u64, u64)> {
        let path = self.paths.iter().find(|p| p.addresses.link == link)?.id;
        let flow = self.flows.get(id)?;
        Some((flow.grants_out.left(path), flow.grants_out.spent(path)))
    }

    /// The number of bytes of a flow that this host may still send over `link`, and that it has
    /// spent there.
    pub fn own_grant_left(&self, id: FlowId, link: LinkId) -> Option<(u64, u64)> {
        let path = self.paths.iter().find(|p| p.addresses.link == link)?.id;
        let flow = self.flows.get(id)?;
        Some((flow.grants_in.room(path), flow.grants_in.spent(path)))
    }

    /// Payload bytes that a flow carried over a gated path on `link`, in both directions, until it ended. It is known of those
    /// that ended last.
    pub fn ended_spending(&self, id: FlowId, link: LinkId) -> Option<u64> {
        let path = self.paths.iter().find(|p| p.addresses.link == link)?.id;
        self.flows.ended_spending(id, path)
    }

    /// Whether there is a path over this link.
    pub fn has_path(&self, link: LinkId) -> bool {
        self.paths.iter().any(|p| p.addresses.link == link)
            || self.handshake.as_ref().is_some_and(|k| k.has_link(link))
    }

    /// Handles the error of a socket that refused a datagram of this size.
    pub fn on_too_big(&mut self, now: Time, link: LinkId, size: usize) {
        for path in self.paths.iter_mut().filter(|p| p.addresses.link == link) {
            let size = size.min(usize::from(u16::MAX)) as u16;
            // A probe of another size, on another path of the link, may still be answered.
            if path.mtu.on_too_big(now, size) {
                path.recovery.retract_mtu_probe();
            }
            let datagram = path.mtu.current() as u64;
            path.recovery.controller.set_datagram(datagram);
        }
    }

    /// Closes the session and all its flows. The session itself remains, without data, until the
    /// peer has acknowledged that or must have forgotten the session. Without a path now, the peer
    /// is informed on the next one. [`SessionEvent::Closed`] reports the result:
    /// [`SessionEnd::Local`] if the peer was informed, [`SessionEnd::LocalUnheard`] if that was
    /// given up (R-CLOSE-3).
    pub fn close(&mut self, code: u64, text: &str) {
        if self.state == SessionState::Closed || self.closing.is_some() {
            return;
        }
        // The peer keeps flows with a deadline until then, and others for a limited time.
        let heard = self.suspended_at.unwrap_or(self.last_rx);
        let deadlines = self.flows.iter().filter_map(|f| f.options.deadline);
        let latest = deadlines.max().unwrap_or(heard);
        self.closing_until = (heard + self.config.closing_max)
            .max(latest)
            .min(heard + self.config.deadline_max);
        self.closing = Some(Box::new((code, text.chars().take(80).collect())));
        self.wants = say::CLOSE;
        self.paths
            .iter_mut()
            .for_each(|path| path.driver_frozen = false);
        self.datagrams.clear();
        for id in self.flows.ids() {
            self.end_flow(id, FlowEnd::SessionEnded);
        }
        if !self.known_to_peer {
            self.end(SessionEnd::Local);
        }
    }

    /// Whether the session is closed and only waits for the peer to receive CLOSE.
    pub fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// Suspends the session: the server is informed once on each path and stops sending at once,
    /// then all paths are closed. [`Session::open_path`] resumes it (R-SUSPEND-3).
    pub fn suspend(&mut self, now: Time, reason: ReasonCode) {
        if self.state == SessionState::Closed
            || self.role == Role::Responder
            || self.closing.is_some()
        {
            return;
        }
        self.drop_handshake();
        if self.keys.is_some() && !self.paths.is_empty() {
            self.suspending = Some(reason);
        } else {
            self.suspend_if_idle(now, reason);
        }
    }

    /// Limits the bytes that the peer may have in flight on the path over `link`; `None`: only its
    /// congestion control does. Less than four datagrams count as four. The limit affects new
    /// packets only, and lasts as long as the path (R-PATH-12).
    pub fn set_path_limit(&mut self, link: LinkId, bytes: Option<u64>) {
        let bytes = bytes.unwrap_or(VARINT_MAX).min(VARINT_MAX);
        for path in self.paths.iter_mut().filter(|p| p.addresses.link == link) {
            path.set_app_limit(bytes);
        }
    }

    /// Keeps one path open for the server, with or without flows. Flows that are opened from now on
    /// are opened as reachable (R-ALIVE-1).
    pub fn set_reachable(&mut self, reachable: bool) {
        self.reachable = reachable;
    }

    pub(crate) fn end(&mut self, end: SessionEnd) {
        if self.state == SessionState::Closed {
            return;
        }
        self.state = SessionState::Closed;
        self.drop_handshake();
        for id in self.flows.ids() {
            if matches!(end, SessionEnd::Peer { .. }) {
                self.deliver_remaining(id);
            }
            self.end_flow(id, FlowEnd::SessionEnded);
        }
        for (_, issued) in std::mem::take(&mut self.issued) {
            self.cid_changes.push(CidChange::Remove(issued.cid));
        }
        self.paths = Paths::default();
        self.keys = None;
        self.emit(SessionEvent::Closed(end));
    }

    /// Ends the session because the peer broke the protocol, and informs the peer.
    pub(crate) fn fault(&mut self, fault: PeerFault) {
        // R-CLOSE-2: only the first fault is reported.
        if self.closing.is_some() {
            return;
        }
        let text = fault.to_string();
        self.closing = Some(Box::new((u64::from(ReasonCode::Protocol as u8), text)));
        self.wants |= say::CLOSE;
        self.peer_fault = Some(Box::new(fault));
    }

    /// Records payload on a path, and reports if it is another path than before.
    pub(crate) fn note_payload(&mut self, now: Time, slot: usize) {
        let path = self.paths.at(slot);
        let (id, link, beside) = (path.id, path.addresses.link, path.beside_another);
        let used = ActivePath {
            path: id,
            link,
            at: now,
            gap: None,
        };
        match &mut self.active_path {
            Some(before) if before.path == id => {}
            Some(before)
                if now.since(before.at) < SWITCHED_AFTER
                    && self
                        .paths
                        .get(before.path)
                        .is_some_and(|p| p.status == PathStatus::Available) =>
            {
                // Both paths may be in use, in parallel.
                let gap = now.since(before.at);
                before.gap.get_or_insert(gap);
                return;
            }
            Some(before) => {
                let (from, silence) = (before.link, now.since(before.at));
                let silence = before.gap.unwrap_or(silence);
                let kind = if beside {
                    PathSwitchKind::MakeBeforeBreak
                } else {
                    PathSwitchKind::BreakBeforeMake
                };
                self.emit(SessionEvent::Switched {
                    from: Some(from),
                    to: link,
                    kind,
                    silence,
                });
            }
            None => {}
        }
        self.active_path = Some(used);
    }
}
