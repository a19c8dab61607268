//! What was lost on one path, fetched over another (mirroring).
//!
//! ```text
//!  device ◀════ 1 ═ 2 ═ ✕ ═ 4 ═ 5 ═════════ sender      the air ate 3: no response, the window stays
//!         ◀───────────── 3 ───────────────              the other path, as it has room
//! ```
//!
//! Whether a loss was random is judged in `loss_classifier.rs`, by the sender. It hides such losses from the
//! path's congestion control while another path lives that could fetch them; alone, a path responds to
//! every loss.
//!
//! The other path is slow and has work of its own, so it takes no more than comes through it without a
//! queue: a segment in each *guard* time, which begins at 256 ms, and is halved and doubled as round trips
//! there show no queue, or one. What finds no room is sent again where it was lost, at once. A path in
//! *standby* takes nothing else, so that a link that costs money can serve this alone.

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, Frame, PathId, PathStatus, ReasonCode, WireWriter};

use crate::path::{self, LinkId, PathState, SessionPath};
use crate::recovery::{SentData, SentFrame, SentPacket};
use crate::session::Session;

/// Where what was lost at random may be fetched, without a congestion response on the path that lost it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mirroring {
    /// Nowhere: a loss is a loss.
    Never,
    /// On paths that cost nothing, or that the device lends for this.
    #[default]
    Free,
    /// At a device, on metered ones too, for at most so many bytes a second: its driver lends them
    /// by [`Session::lend_path`].
    Paid {
        /// The user's price of a faster Wi-Fi.
        bytes_per_second: u64,
    },
}

/// R-MIRROR-3: a segment's guard time before anything is known of the path. // Super-aggregation §3.3
const GUARD: Span = Span::from_millis(256);
/// Bytes a second of lost ones given to a path at first, and at least: a small datagram each.
const RATE_MIN: u64 = 1_200 * 1_000 / 256;
/// What a round trip may be longer by without a queue: an ACK's delay.
const QUEUE_SLACK: Span = Span::from_millis(20);
/// What comes over the other path comes too late if its round trip is so many of the path that lost it, and so
/// much longer.
const ROUND_TRIPS_MAX: u64 = 4; // a guess, as offload.rs has it
const LATE: Span = Span::from_millis(100); // a guess: hardly anybody waits for it
/// A piece of data smaller than this is not squeezed into the end of a packet.
const DATA_MIN: usize = 32;

/// What a path takes of others' losses.
#[derive(Debug)]
pub(crate) struct MirrorGuard {
    /// Bytes a second.
    rate: u64,
    /// Bytes that may leave now.
    left: u64,
    filled_at: Time,
    /// Whether the window was too small since the last round trip was measured.
    short: bool,
    /// A queue was seen: from then on it grows slowly.
    found: bool,
    /// What left before tells nothing of the rate as it is.
    changed_at: Time,
}

impl MirrorGuard {
    fn new(now: Time, datagram: u64) -> MirrorGuard {
        MirrorGuard {
            rate: RATE_MIN,
            left: datagram,
            filled_at: now,
            short: false,
            found: false,
            changed_at: now,
        }
    }

    /// Whether a datagram may leave now.
    fn has_room(&mut self, now: Time, datagram: u64) -> bool {
        let most = datagram.max(bytes(self.rate, GUARD));
        let gained = bytes(self.rate, now.since(self.filled_at));
        if gained > 0 {
            self.left = (self.left + gained).min(most);
            self.filled_at = now;
        }
        self.short |= self.left < datagram;
        self.left >= datagram
    }

    /// When a datagram may leave.
    fn opens_at(&self, datagram: u64) -> Time {
        let missing = u128::from(datagram.saturating_sub(self.left));
        let nanos = (missing * 1_000_000_000).div_ceil(u128::from(self.rate));
        self.filled_at + Span::from_nanos(nanos as u64)
    }

    /// The path's round trip was measured.
    pub(crate) fn on_round_trip(&mut self, now: Time, latest: Span, least: Span) {
        if now < self.changed_at + latest {
            return;
        }
        if latest > least + least.divided(2) + QUEUE_SLACK {
            self.rate = (self.rate / 2).max(RATE_MIN);
            (self.found, self.changed_at) = (true, now);
        } else if std::mem::take(&mut self.short) {
            self.rate += if self.found { self.rate / 8 } else { self.rate };
            self.changed_at = now;
        }
    }
}

/// What a device lends of a metered path: bytes that may be granted now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LentPath {
    left: u64,
    filled_at: Time,
    /// No grant before the peer has heard what the path is for: it would take it for new bytes.
    from: Time,
}

fn bytes(rate: u64, span: Span) -> u64 {
    (u128::from(rate) * u128::from(span.as_nanos()) / 1_000_000_000) as u64
}

impl SessionPath {
    /// R-MIRROR-2: whether what was lost on other paths may be sent here.
    fn fetches(&self) -> bool {
        let said = match self.status {
            PathStatus::Available => !self.gated,
            // A server takes a path for one in standby until it hears what it is.
            PathStatus::Standby => self.status_seq > 0,
            PathStatus::Frozen | PathStatus::Gone => false,
        };
        said && self.state == PathState::Active && self.validated
    }

    /// R-MIRROR-2: whether what a path with this round trip lost may be.
    fn fetches_for(&self, own: Span) -> bool {
        // What waits there is the guard's business, and was measured who knows when.
        let rtt = &self.recovery.rtt;
        self.fetches() && rtt.is_measured() && rtt.min() <= own.times(ROUND_TRIPS_MAX) + LATE
    }

    fn guard(&mut self, now: Time) -> &mut MirrorGuard {
        let datagram = self.mtu.current() as u64;
        self.mirror_guard
            .get_or_insert_with(|| MirrorGuard::new(now, datagram).into())
    }
}

impl Session {
    /// Lends the path over a metered `link` to what other paths lose, for at most so many bytes a second:
    /// it is in standby then, and flows get grants there as they use them up. For a device to call every
    /// 100 ms or so while it lends.
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
            // A grant is for both directions; the one in use runs low.
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

    /// The path over `link`, if it was lent, carries flows of its own again, as they are granted.
    pub fn end_lending(&mut self, link: LinkId) {
        let lent = |p: &SessionPath| p.addresses.link == link && p.status == PathStatus::Standby;
        let gated = self.paths.iter().find(|p| lent(p)).map(|p| p.gated);
        let Some(gated) = gated else { return };
        self.set_path_status(link, PathStatus::Available, gated, ReasonCode::None);
        // What was lent was not for new bytes.
        for flow in self.flow_ids() {
            self.grant(flow, link, 0);
        }
    }

    /// R-MIRROR-1: random losses of a path are hidden from its congestion control while another path
    /// could fetch them.
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
        let hides = (0..self.paths.len()).any(|n| n != slot && self.paths[n].fetches_for(own));
        self.paths.at(slot).recovery.classify_losses(now, hides);
    }

    /// Whether a flow's lost bytes are left to another path than this one, which lost them.
    pub(crate) fn leaves_lost_to_other(&mut self, now: Time, slot: usize, id: FlowId) -> bool {
        if self.paths.len() < 2 || self.config.mirroring == Mirroring::Never {
            return false;
        }
        let own = self.paths.nth(slot);
        let Some(flow) = self.flows.get(id) else {
            return false;
        };
        // At the end of a transfer nothing hides how much longer the other way takes.
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

    /// A flow whose bytes were lost on another path and are to be fetched on this one.
    pub(crate) fn next_lost(&mut self, now: Time, slot: usize) -> Option<FlowId> {
        let path = self.paths.nth(slot);
        if self.config.mirroring == Mirroring::Never || !path.fetches() {
            return None;
        }
        let (id, datagram) = (path.id, path.mtu.current() as u64);
        let granted = path.gated.then_some(datagram);
        let flow = self.flows.next_lost(id, granted)?;
        let lost_on = self.flows.get(flow).and_then(|flow| flow.lost_on);
        // What a path lost that answers no more comes from anywhere.
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

    /// Writes what fits of a flow's lost bytes.
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

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Span = Span::from_millis(150);

    fn ms(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    /// Bytes that leave in a second, a datagram at a time.
    fn second_from(guard: &mut MirrorGuard, from: u64) -> u64 {
        let leaves = (from..from + 1_000).filter(|at| {
            let room = guard.has_room(ms(*at), 1_200);
            guard.left -= if room { 1_200 } else { 0 };
            room
        });
        leaves.count() as u64 * 1_200
    }

    #[test]
    fn a_path_nothing_is_known_of_takes_a_segment_in_256_ms() {
        // R-MIRROR-3
        let mut guard = MirrorGuard::new(ms(0), 1_200);
        assert_eq!(second_from(&mut guard, 0), 4 * 1_200);
        let (left, opens_at) = (guard.left, guard.opens_at(1_200));
        assert!(left < 1_200 && opens_at > ms(1_000) && opens_at < ms(1_300));
        assert!(guard.has_room(opens_at, 1_200));
    }

    #[test]
    fn it_takes_more_while_it_is_asked_for_more_and_shows_no_queue() {
        // R-MIRROR-3
        let mut guard = MirrorGuard::new(ms(0), 1_200);
        let mut now = ms(1_000);
        let mut hear = |guard: &mut MirrorGuard, latest: Span| {
            now += latest;
            guard.on_round_trip(now, latest, LEAST);
        };
        hear(&mut guard, LEAST);
        assert_eq!(guard.rate, RATE_MIN, "nobody wanted more");
        for _ in 0..4 {
            guard.short = true;
            hear(&mut guard, LEAST + Span::from_millis(60));
        }
        assert_eq!(guard.rate, 16 * RATE_MIN);
        guard.short = true;
        guard.on_round_trip(guard.changed_at + LEAST.divided(2), LEAST, LEAST);
        assert_eq!(guard.rate, 16 * RATE_MIN, "it left before");
        let carried = second_from(&mut guard, 10_000);
        assert!(
            carried > 15 * RATE_MIN && carried < 21 * RATE_MIN,
            "{carried}"
        );
        hear(&mut guard, LEAST.times(2));
        assert_eq!(guard.rate, 8 * RATE_MIN);
        guard.short = true;
        hear(&mut guard, LEAST);
        assert_eq!(guard.rate, 9 * RATE_MIN);
        (0..20).for_each(|_| hear(&mut guard, LEAST.times(3)));
        assert_eq!(guard.rate, RATE_MIN);
    }
}
