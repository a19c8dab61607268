//! Mirroring of an application's own packets: datagrams that repair losses of other datagrams leave on another path.
//!
//! ```text
//!  device ◀════ 1 ═ 2 ═ ✕ ═ 4 ═ 5 ═════════ sender      the application knows that 3 is lost, and has a copy
//!         ◀───────────── 3 ───────────────              the other path, while it has room and may be paid for
//! ```
//!
//! The session does not keep what is in datagrams, so that the application detects losses and keeps copies. It asks for an offer
//! before it takes a copy out, because what finds no room on the other path leaves by the usual one at once. Choice of the path,
//! guard time and grants are those of mirroring for flows ([`crate::mirror`]). On a metered path, grants of a flow that the
//! application names pay.

use bytes::Bytes;
use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, PathId};

use crate::config::DATAGRAMS_MAX;
use crate::datagram_queue::{CONTEXTS, HEAD_MAX, QueuedDatagram, RepairRoute, room};
use crate::mirror_state::Mirroring;
use crate::path::SessionPath;
use crate::path_selection::PathSelection;
use crate::session::Session;
use crate::session_state::Role;

/// The room that the other path must have for an offer: a packet of 1,500 bytes, which may need two datagrams.
const OFFERED_BYTES: u64 = 1_500;

/// Where a packet that repairs a loss may leave now, in at most two datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepairOffer {
    /// The path on which the packet may leave.
    pub path: PathId,
    /// The flow whose grants pay on a gated path.
    pub flow: FlowId,
    /// Whether the path is gated: the packet costs money.
    pub is_gated: bool,
    /// The size of the largest datagram that fits there.
    pub datagram_max: usize,
    /// The smoothed round trip of that path.
    pub round_trip: Span,
    /// The smoothed round trip of the path that carries most datagrams.
    pub usual_round_trip: Span,
}

impl Session {
    /// R-MIRROR-4: where the application may send a packet again that a path lost, over another path. None: it leaves as other
    /// datagrams do. `flow`: the one whose grants pay on a gated path.
    pub fn repair_offer(&mut self, now: Time, flow: FlowId) -> Option<RepairOffer> {
        let is_off = self.config.mirroring == Mirroring::Never;
        let has_room =
            self.datagrams.len() + 2 <= DATAGRAMS_MAX && !self.datagrams.has_repairs(now);
        if is_off || self.paths.len() < 2 || !has_room {
            return None;
        }
        let carriers = self.paths.iter().filter(|path| path.takes_datagrams());
        let usual = carriers.min_by_key(|path| path.rank())?;
        let (usual_id, usual_rtt) = (usual.id, usual.recovery.rtt.smoothed());
        let fetches = |path: &SessionPath| {
            path.id != usual_id && path.fetches_for(usual_rtt) && !path.driver_frozen
        };
        let others = (0..self.paths.len()).filter(|slot| fetches(&self.paths[*slot]));
        let slot = others.min_by_key(|slot| self.paths[*slot].rank())?;
        let path = self.paths.at(slot);
        let has_queue = path.is_slow() && path.has_datagram_queue();
        if has_queue || path.room() < OFFERED_BYTES || !path.guard(now).has_room(now, OFFERED_BYTES)
        {
            return None;
        }
        let offer = RepairOffer {
            path: path.id,
            flow,
            is_gated: path.gated,
            datagram_max: room(path.mtu.current()) - HEAD_MAX,
            round_trip: path.recovery.rtt.smoothed(),
            usual_round_trip: usual_rtt,
        };
        let has_grant = !offer.is_gated || self.repair_grant(flow, offer.path) >= OFFERED_BYTES;
        if !has_grant {
            self.report_repairs(flow, offer.path, true);
        }
        has_grant.then_some(offer)
    }

    /// What the grants of a flow leave for repairs on a gated path.
    fn repair_grant(&self, flow: FlowId, path: PathId) -> u64 {
        let flow = self.flows.get(flow);
        flow.map_or(0, |flow| flow.grants_in.room(path))
    }

    /// Sends a datagram of a packet that repairs a loss, as an offer allows it; drops it if it could not leave by `expires`.
    ///
    /// # Panics
    /// If the context is not below [`CONTEXTS`].
    pub fn send_repair_datagram(
        &mut self,
        offer: &RepairOffer,
        context: u64,
        bytes: Bytes,
        expires: Time,
    ) {
        assert!(context < CONTEXTS, "context {context} of a datagram");
        self.datagrams.push(QueuedDatagram {
            context,
            bytes,
            expires,
            route: PathSelection::Any,
            left_on: Vec::new(),
            acknowledges: false,
            repairs: Some(RepairRoute {
                path: offer.path,
                flow: offer.flow,
            }),
        });
    }

    /// Whether a datagram waits that repairs a loss and may leave on this path now.
    pub(crate) fn takes_repair(&self, path: &SessionPath) -> bool {
        // First what costs nothing: most paths fetch nothing.
        let waiting = path.fetches().then(|| self.datagrams.repair_for(path.id));
        let Some((flow, bytes)) = waiting.flatten() else {
            return false;
        };
        !path.gated || self.repair_grant(flow, path.id) >= bytes as u64
    }

    /// Records that a datagram of so many bytes left on this path which repairs a loss.
    pub(crate) fn note_repair_datagram(&mut self, slot: usize, flow: FlowId, bytes: u64) {
        let path = self.paths.at(slot);
        path.fetched_out += bytes;
        if let Some(guard) = &mut path.mirror_guard {
            guard.left = guard.left.saturating_sub(bytes);
        }
        let (id, gated) = (path.id, path.gated);
        let Some(paying) = self.flows.get_mut(flow).filter(|_| gated) else {
            return;
        };
        paying.grants_in.on_sent(id, bytes);
        self.report_repairs(flow, id, false);
    }

    /// Tells the device what repairs spent: it does not know to which flow a datagram belongs. `runs_out`: the grant is too small for
    /// another one.
    fn report_repairs(&mut self, id: FlowId, path: PathId, runs_out: bool) {
        if self.role == Role::Responder
            && let Some(flow) = self.flows.get_mut(id)
            && flow.grants_in.report_spent(path, runs_out)
        {
            self.flows.touch(id);
        }
    }
}
