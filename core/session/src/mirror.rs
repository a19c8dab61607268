//! Mirroring: data that was lost on one path at random is sent again on another path.
//!
//! ```text
//!  device ◀════ 1 ═ 2 ═ ✕ ═ 4 ═ 5 ═════════ sender      3 is lost at random: no response, window kept
//!         ◀───────────── 3 ───────────────              the other path, while it has room
//! ```
//!
//! The sender classifies losses in `loss_classifier.rs`. It hides random losses from the path's
//! congestion control while another path is alive that could repair them. A path that is alone
//! responds to every loss.
//!
//! The other path is slow and carries data of its own, so it repairs only as much as it can carry
//! without a queue: one segment in each *guard* time. The guard time begins at 256 ms; it is halved
//! while round trips on that path show no queue, and doubled when they show one. Losses that find
//! no room there are sent again at once on the path that lost them. A path in *standby* carries
//! only repairs, so that a metered link can be used for this alone.

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, Frame, PathId, PathStatus, ReasonCode, WireWriter};

use crate::link::LinkId;
use crate::mirror_state::{LentPath, MirrorGuard, Mirroring, bytes};
use crate::path::{self, PathState, SessionPath};
use crate::sent_packet::{SentData, SentFrame, SentPacket};
use crate::session::Session;

/// A path repairs losses of another only if its round trip is at most this many times the other's,
/// plus [`LATE`].
const ROUND_TRIPS_MAX: u64 = 4; // a guess, the same as in ack_offload.rs
const LATE: Span = Span::from_millis(100); // a guess: an application hardly notices it
/// The smallest piece of data that is put at the end of a packet, in bytes.
const DATA_MIN: usize = 32;

impl SessionPath {
    /// R-MIRROR-2: whether this path may repair losses of other paths.
    pub(crate) fn fetches(&self) -> bool {
        let said = match self.status {
            PathStatus::Available => !self.gated,
            // A server treats a path as in standby until it receives the path's status.
            PathStatus::Standby => self.status_seq > 0,
            PathStatus::Frozen | PathStatus::Gone => false,
        };
        said && self.state == PathState::Active && self.validated
    }

    /// R-MIRROR-2: whether this path may repair losses of a path with this round trip.
    pub(crate) fn fetches_for(&self, own: Span) -> bool {
        // Queueing delay on that path is limited by the guard time, and its last measurement may be
        // old.
        let rtt = &self.recovery.rtt;
        self.fetches() && rtt.is_measured() && rtt.min() <= own.times(ROUND_TRIPS_MAX) + LATE
    }

    pub(crate) fn guard(&mut self, now: Time) -> &mut MirrorGuard {
        let datagram = self.mtu.current() as u64;
        self.mirror_guard
            .get_or_insert_with(|| MirrorGuard::new(now, datagram).into())
    }
}

impl Session {
    /// Lends the path over a metered `link` to repair losses of other paths, at a limited rate. The
    /// path is then in standby, and flows get grants on it as they use them up. A device calls this
    /// about every 100 ms while it lends.
    pub fn lend_path(&mut self, now: Time, link: LinkId, bytes_per_second: u64) {
        let of_link = |path: &&mut SessionPath| {
            path.addresses.link == link && path.gated && path.recovery.rtt.is_measured()
        };
        let Some(path) = self.paths.iter_mut().find(of_link) else {
            return;
        };
        let (id, delay_max) = (path.id, self.config.ack_delay_max);
        let mut lent = path.lent.take().unwrap_or_else(|| {
            Box::new(LentPath {
                left: bytes_per_second,
                filled_at: now,
                from: now,
            })
        });
        let gained = bytes(bytes_per_second, now.since(lent.filled_at));
        if gained > 0 {
            lent.left = (lent.left + gained).min(bytes_per_second);
            lent.filled_at = now;
        }
        if path.status == PathStatus::Available {
            lent.from = now + path.recovery.rtt.probe_timeout(delay_max);
            self.set_path_status(link, PathStatus::Standby, true, ReasonCode::None);
        }
        let flows = match now < lent.from {
            true => Vec::new(),
            false => self.flow_ids(),
        };
        let each = bytes_per_second / flows.len().max(1) as u64;
        for flow in flows {
            let Some(f) = self.flows.get(flow) else {
                continue;
            };
            // A grant is for both directions; the one that is used runs low.
            let unused = f.grants_out.left(id).min(f.grants_in.room(id));
            if unused < each / 2 && lent.left >= each - unused {
                lent.left -= each - unused;
                self.grant(flow, link, each);
            }
        }
        if let Some(path) = self.paths.get_mut(id) {
            path.lent = Some(lent);
        }
    }

    /// Ends lending of the path over `link`: it carries flows of its own again, as they are granted.
    pub fn end_lending(&mut self, link: LinkId) {
        let lent = |p: &SessionPath| p.addresses.link == link && p.status == PathStatus::Standby;
        let gated = self.paths.iter().find(|p| lent(p)).map(|p| p.gated);
        let Some(gated) = gated else { return };
        self.set_path_status(link, PathStatus::Available, gated, ReasonCode::None);
        // The rest of the lent bytes must not be used for new data.
        for flow in self.flow_ids() {
            self.grant(flow, link, 0);
        }
    }

    /// R-MIRROR-1: hides random losses of a path from its congestion control while another path
    /// could repair them.
    pub(crate) fn classify_losses(&mut self, now: Time, slot: usize) {
        if self.config.mirroring == Mirroring::Never {
            return;
        }
        let own = self.paths[slot].recovery.rtt.smoothed();
        for path in self.paths.iter_mut().filter(|p| p.fetches()) {
            if !path.recovery.rtt.is_measured() && !path.recovery.is_waiting() {
                path.wants |= path::want::PING;
            }
        }
        if self.paths[slot].payload_out == 0 {
            // Before the first payload there is nothing to repair. Many paths of a server never carry any.
            return;
        }
        let hides = (0..self.paths.len()).any(|n| n != slot && self.paths[n].fetches_for(own));
        self.paths.at(slot).recovery.classify_losses(now, hides);
    }

    /// Whether a flow's bytes that were lost on this path are left for another path to send.
    pub(crate) fn leaves_lost_to_other(&mut self, now: Time, slot: usize, id: FlowId) -> bool {
        if self.paths.len() < 2 || self.config.mirroring == Mirroring::Never {
            return false;
        }
        let own = self.paths.nth(slot);
        let Some(flow) = self.flows.get(id) else {
            return false;
        };
        // At the end of a transfer no other data hides the longer delay of the other path.
        let may = flow.send.has_lost() && flow.send.has_unsent() && flow.lost_on == Some(own.id);
        if !may {
            return false;
        }
        let (offer, window) = (own.candidate(), flow.send.window());
        for n in (0..self.paths.len()).filter(|n| *n != slot) {
            let path = self.paths.at(n);
            let (id, gated) = (path.id, path.gated);
            let datagram = path.mtu.current() as u64;
            let takes = path.fetches_for(offer.rtt)
                && path.room() >= datagram
                && !path.candidate().would_block(&offer, window)
                && path.guard(now).has_room(now, datagram);
            if takes && (!gated || flow.grants_in.room(id) >= datagram) {
                return true;
            }
        }
        false
    }

    /// A flow whose bytes were lost on another path and should be repaired on this one.
    pub(crate) fn next_lost(&mut self, now: Time, slot: usize) -> Option<FlowId> {
        let path = self.paths.nth(slot);
        if self.config.mirroring == Mirroring::Never || !path.fetches() {
            return None;
        }
        let (id, datagram) = (path.id, path.mtu.current() as u64);
        let granted = path.gated.then_some(datagram);
        let flow = self.flows.next_lost(id, granted)?;
        let lost_on = self.flows.get(flow).and_then(|flow| flow.lost_on);
        // If a path does not answer any more, any other path may repair its losses.
        let own = lost_on.and_then(|id| self.paths.get(id));
        let own = own.filter(|own| own.state == PathState::Active);
        if own.is_some_and(|own| !path.fetches_for(own.recovery.rtt.smoothed())) {
            return None;
        }
        let guard = self.paths.at(slot).guard(now);
        if guard.has_room(now, datagram) {
            return Some(flow);
        }
        let opens_at = guard.opens_at(datagram);
        let path = self.paths.at(slot);
        path.paced_until = path.paced_until.min(opens_at);
        None
    }

    /// Writes as many of a flow's lost bytes as fit.
    pub(crate) fn write_lost(
        &mut self,
        slot: usize,
        id: FlowId,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) {
        let (path, gated): (PathId, bool) = (self.paths[slot].id, self.paths[slot].gated);
        let flow = self
            .flows
            .get_mut(id)
            .expect("looked at when it was chosen");
        let mut out = 0;
        loop {
            let head = Frame::data_head_len(id, flow.send.end(), w.room());
            if w.room() < head + DATA_MIN {
                break;
            }
            let mut max = w.room() - head;
            if gated {
                max = max.min(flow.grants_in.room(path) as usize);
            }
            let Some((offset, len, fin)) = flow.send.take_lost(max) else {
                break;
            };
            Frame::encode_data_head(w, id, offset, len, fin);
            flow.send.copy(offset, w.reserve(len));
            if gated {
                flow.grants_in.on_sent(path, len as u64);
            }
            out += len as u64;
            sent.eliciting = true;
            sent.note(SentFrame::Data(SentData {
                flow: id,
                offset,
                len: len as u16,
                fin,
            }));
        }
        let path = self.paths.at(slot);
        path.payload_out += out;
        path.fetched_out += out;
        if let Some(guard) = &mut path.mirror_guard {
            guard.left = guard.left.saturating_sub(out);
        }
    }
}
