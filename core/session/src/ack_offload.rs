//! ACK offloading: acknowledgements of a half-duplex path that travel on another path.
//!
//! ```text
//!           payload, half duplex (Wi-Fi)
//!  sender ════════════════════════════════▶ receiver
//!         ◀─ · ─ · ─ · ─ · ─ · ─ · ─ · ─ ·    one each 250 ms, and the end of a round
//!         ◀────────────────────────────────   the others, on the other path, as it has room
//!           the other path (cellular)
//! ```
//!
//! On Wi-Fi a small packet takes a third of the airtime of a large one, and both directions share
//! that airtime. The receiver decides, because it knows when an ACK is due and whether the other
//! path is idle. The wire format needs no change, since every ACK names its path. ACKs are
//! cumulative, so one that is sent replaces those that were not, and a late one does no harm.
//!
//! ACK offloading must not slow down the sender. Late answers would, so it is not used while the
//! sender's window is small or growing. A full path would, so the rate of ACKs on it follows its
//! round trip, as a window does. A path that died unnoticed would, so it is probed regularly, and
//! some ACKs always leave on their own path.

use d2tp_time::{Span, Time};
use d2tp_wire::{PathId, PathStatus, ReasonCode, WireWriter};

use crate::ack_offload_state::{AckOffload, AckOffloadState, CarriedAckBudget};
use crate::link::LinkId;
use crate::path::{self, PathState, SessionPath};
use crate::sent_packet::SentPacket;
use crate::session::Session;
use crate::session_state::Role;

/// The largest round trip of another path that may carry ACKs, in round trips of the path that they
/// acknowledge. ACKs over a slower path come too late.
const ROUND_TRIPS_MAX: u64 = 4; // a guess
/// The longest time for which every ACK of a path leaves on another one. An ACK on the path itself
/// measures its round trip, and arrives if the other path has failed. // a guess: a few hundredths of a
/// per cent of the airtime
const USUAL_WAY_EVERY: Span = Span::from_millis(250);
/// How often a path that carries ACKs of others gets a PING to measure its round trip.
const ASK_EVERY: Span = Span::from_millis(200); // a guess
/// IP, UDP, header and tag around the ACK of a packet that holds nothing else.
const AROUND_BYTES: i64 = 28 + 29;

impl Session {
    /// Declares that both directions of the paths over `link` share one medium, as on Wi-Fi. ACKs of
    /// either end may then leave on another path ([`crate::EndpointConfig::ack_offload`]).
    pub fn set_half_duplex(&mut self, link: LinkId) {
        let off = self.config.ack_offload == AckOffload::Never;
        if off || self.half_duplex.contains(&link) {
            return;
        }
        self.half_duplex.push(link);
        for path in self.paths.iter_mut().filter(|p| p.addresses.link == link) {
            path.status_seq += 1;
            path.wants |= path::want::STATUS;
        }
    }

    /// The reason that a device gives in PATH_STATUS for a path whose status has not changed.
    pub(crate) fn reason_of(&self, path: &SessionPath) -> ReasonCode {
        let used = matches!(path.status, PathStatus::Available | PathStatus::Standby);
        if !used || path.reason != ReasonCode::None {
            path.reason
        } else if self.is_half_duplex(path) {
            ReasonCode::HalfDuplex
        } else if path.gated && self.acks_pay() {
            ReasonCode::TakesAcks
        } else {
            ReasonCode::None
        }
    }

    /// Whether the user allows ACKs on metered paths (a device's setting).
    fn acks_pay(&self) -> bool {
        self.role == Role::Initiator && matches!(self.config.ack_offload, AckOffload::Paid { .. })
    }

    pub(crate) fn is_half_duplex(&self, path: &SessionPath) -> bool {
        match self.role {
            Role::Initiator => self.half_duplex.contains(&path.addresses.link),
            Role::Responder => {
                path.reason == ReasonCode::HalfDuplex
                    && self.config.ack_offload != AckOffload::Never
            }
        }
    }

    /// Records that packet `number`, with payload, arrived on this path.
    pub(crate) fn note_offload_payload(&mut self, now: Time, slot: usize, number: u64) {
        if self.paths.len() < 2 || !self.is_half_duplex(&self.paths[slot]) {
            return;
        }
        // A packet number that was skipped on purpose (R-ACK-4) leaves no gap in the received data.
        let gap = number > self.paths[slot].acks.expected()
            && self.flows.iter().any(|f| f.recv.has_gap());
        let path = self.paths.at(slot);
        let round = path.recovery.rtt.smoothed();
        let relief = path
            .ack_offload_state
            .get_or_insert_with(|| AckOffloadState::new(now).into());
        relief.on_payload(now, round, gap);
    }

    /// R-ACK-7: chooses the path for each ACK that is due on a half-duplex path.
    pub(crate) fn route_acks(&mut self, now: Time) {
        for slot in 0..self.paths.len() {
            let path = self.paths.at(slot);
            let (due, every) = (path.acks.due() <= now, path.acks.every());
            let round = path.recovery.rtt.smoothed();
            let Some(relief) = path.ack_offload_state.as_mut().filter(|_| due) else {
                continue;
            };
            // The other path may have been closed since it was chosen.
            relief.by = None;
            let steady = relief.is_steady(now, every) && now < relief.usual_at + USUAL_WAY_EVERY;
            if steady && let Some(other) = self.other_path(now, slot, round) {
                let id = self.paths[other].id;
                let path = self.paths.at(slot);
                path.ack_offload_state.as_mut().expect("it has one").by = Some(id);
                self.request_other_path(now, other);
            }
        }
    }

    /// R-ACK-8: chooses the path for datagrams that acknowledge what arrives in datagrams on half-duplex paths. Now and then one
    /// leaves on the path itself.
    pub(crate) fn route_ack_datagrams(&mut self, now: Time) {
        self.datagrams.ack_carrier = None;
        if self.paths.len() < 2 || !self.datagrams.has_acks() {
            return;
        }
        for slot in 0..self.paths.len() {
            let path = self.paths.at(slot);
            let (every, round) = (path.acks.every(), path.recovery.rtt.smoothed());
            let steady = path.ack_offload_state.as_ref().is_some_and(|relief| {
                relief.is_steady(now, every)
                    && relief.is_recent(now, round)
                    && now < relief.datagram_usual_at + USUAL_WAY_EVERY
            });
            if !steady {
                continue;
            }
            let Some(other) = self.other_path(now, slot, round) else {
                continue;
            };
            let carrier = self.paths.at(other);
            let is_full = carrier.room() < carrier.mtu.current() as u64;
            if is_full || carrier.is_slow() || carrier.driver_frozen {
                continue;
            }
            let id = carrier.id;
            self.datagrams.ack_carrier = Some(id);
            // An ACK that waits rides along, so that no packet of its own follows on the path itself.
            let path = self.paths.at(slot);
            if path.acks.is_wanted()
                && let Some(relief) = &mut path.ack_offload_state
                && now < relief.usual_at + USUAL_WAY_EVERY
            {
                relief.by = Some(id);
            }
            self.request_other_path(now, other);
            return;
        }
    }

    /// Records that a datagram of so many bytes left on this path which acknowledges what arrives on others.
    pub(crate) fn note_ack_datagram(&mut self, now: Time, slot: usize, bytes: usize) {
        let is_carrier = self.datagrams.ack_carrier == Some(self.paths[slot].id);
        let path = self.paths.at(slot);
        if !is_carrier {
            if let Some(relief) = &mut path.ack_offload_state {
                relief.datagram_usual_at = now;
            }
        } else if let Some(share) = &mut path.carried_acks {
            share.left -= bytes as i64 + AROUND_BYTES;
        }
    }

    /// The slot of another path that has room for an ACK now and is not much slower.
    fn other_path(&mut self, now: Time, slot: usize, round: Span) -> Option<usize> {
        let may_cost = self.acks_pay();
        let limit = round.times(ROUND_TRIPS_MAX);
        let other = (0..self.paths.len())
            .filter(|other| *other != slot)
            .filter(|other| {
                let p = &self.paths[*other];
                p.state == PathState::Active
                    && p.validated
                    && matches!(p.status, PathStatus::Available | PathStatus::Standby)
                    && (may_cost || !p.gated || p.reason == ReasonCode::TakesAcks)
                    && p.recovery.rtt.is_measured()
                    && p.recovery.rtt.smoothed() <= limit
                    && !self.is_half_duplex(p)
            })
            .min_by_key(|other| self.paths[*other].rank())?;
        if let AckOffload::Paid { bytes_per_second } = self.config.ack_offload
            && may_cost
        {
            self.paths.at(other).control.raise_rate(bytes_per_second);
        }
        let path = self.paths.at(other);
        let share = path
            .carried_acks
            .get_or_insert_with(|| CarriedAckBudget::new().into());
        let room = share.has_room(now, round) && (!path.gated || path.control.may_send(now));
        room.then_some(other)
    }

    fn request_other_path(&mut self, now: Time, other: usize) {
        let path = self.paths.at(other);
        let waits = path.recovery.is_waiting();
        if let Some(share) = &mut path.carried_acks
            && !waits
            && now >= share.asked_at + ASK_EVERY
        {
            share.asked_at = now;
            path.wants |= path::want::PING;
            if path.only_carries_acks() && path.ack_every != 1 {
                // A PING's answer measures the round trip, so it must not wait for another packet.
                path.ack_every = 1;
                path.wants |= path::want::ACK_RATE;
            }
        }
    }

    /// Whether the ACK that is due on this path leaves on another.
    pub(crate) fn is_ack_rerouted(&self, slot: usize) -> bool {
        let relief = self.paths[slot].ack_offload_state.as_ref();
        relief.is_some_and(|relief| relief.by.is_some())
    }

    /// Whether ACKs of other paths leave on this one.
    pub(crate) fn carries_acks(&self, id: PathId) -> bool {
        let mut reliefs = self
            .paths
            .iter()
            .filter_map(|p| p.ack_offload_state.as_ref());
        reliefs.any(|relief| relief.by == Some(id))
    }

    /// Writes the ACKs of other paths that leave on this one.
    pub(crate) fn write_carried_acks(
        &mut self,
        now: Time,
        slot: usize,
        w: &mut WireWriter<'_>,
        sent: &mut SentPacket,
    ) {
        let carrier = self.paths[slot].id;
        let before = w.written();
        for path in self.paths.iter_mut() {
            let Some(relief) = path
                .ack_offload_state
                .as_mut()
                .filter(|r| r.by == Some(carrier))
            else {
                continue;
            };
            relief.by = None;
            if path.acks.write(path.id, now, w, sent) {
                path.acks.on_ack_sent();
            }
        }
        let bytes = (w.written() - before) as i64 + AROUND_BYTES;
        if let Some(share) = &mut self.paths.at(slot).carried_acks {
            share.left -= bytes;
        }
    }
}

impl SessionPath {
    /// Whether this end sends nothing but ACKs of other paths on this path.
    pub(crate) fn only_carries_acks(&self) -> bool {
        self.carried_acks.is_some() && self.payload_out == 0
    }

    /// Records that an ACK of this path left on the path itself.
    pub(crate) fn on_direct_ack_sent(&mut self, now: Time) {
        if let Some(relief) = &mut self.ack_offload_state {
            (relief.usual_at, relief.by) = (now, None);
        }
    }
}
