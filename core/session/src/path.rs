//! Paths of a session: their addresses, measurements, state, and control frames to be sent.
//!
//! ```text
//!  Opening ──RSP or any answer──▶ Active ──2 probe timeouts, another path lives──▶ Silent
//!     │                             ▲                                                │
//!     └── link down, GONE ──▶ removed └────────────── any packet received ◀──────┘
//! ```

use d2tp_time::{Span, Time};
use d2tp_wire::{Cid, DATA_HEADER_BYTES, Frame, PathId, PathStatus, ReasonCode, TAG_BYTES};

use crate::ack_offload_state::{AckOffloadState, CarriedAckBudget};
use crate::acks::AckTracker;
use crate::address_validation::AddressValidation;
use crate::config::{EndpointConfig, PATHS_MAX};
use crate::control_budget::ControlBudget;
use crate::drwa::Drwa;
use crate::link::Addresses;
use crate::mirror_state::{LentPath, MirrorGuard};
use crate::mtu::MtuDiscovery;
use crate::pacer::Pacer;
use crate::path_limit::{LIMIT_DATAGRAMS_MIN, PathLimits};
use crate::path_map::PathMap;
use crate::path_scheduler::{CopyProgress, PathCandidate, PathScheduler};
use crate::recovery::Recovery;
use crate::recovery::WindowRestore;
use crate::slow_path::DatagramQueueBound;
use crate::stream_path_state::StreamPathState;

/// The state of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathState {
    /// Nothing has arrived on the path yet.
    Opening,
    /// The path works.
    Active,
    /// The path stopped answering.
    Silent,
}

/// Control frames that a path has to send, one bit each.
pub(crate) mod want {
    pub(crate) const CHG: u16 = 1;
    pub(crate) const AUTH: u16 = 1 << 1;
    pub(crate) const STATUS: u16 = 1 << 2;
    pub(crate) const PING: u16 = 1 << 3;
    pub(crate) const ACK_RATE: u16 = 1 << 4;
    pub(crate) const CID: u16 = 1 << 5;
    pub(crate) const LIMIT: u16 = 1 << 6;
    pub(crate) const RSP: u16 = 1 << 7;
}

/// The number of ACKs for which the peer is asked per window of data. Fewer cost less, and let slow
/// start grow later.
const ACKS_PER_WINDOW: u64 = 8;
/// The most packets one ACK may wait for.
const ACK_EVERY_MAX: u64 = 64;

/// The shortest and longest interval at which a waiting device probes a path without packets. The first
/// is a guess between an outage too short to matter and a stall that users notice.
const ASK_AFTER_MIN: Span = Span::from_millis(250);
const ASK_AFTER_MAX: Span = Span::from_secs(30);
/// The shortest interval on a gated path that carries little: a program that sends a message now and then notices by
/// that message when nobody answers. Shorter: up to three probes of 250 bytes, with their answers, for each message.
const ASK_AFTER_GATED_MIN: Span = Span::from_secs(2); // measured: nearly_idle in apps/cedos/tests/measured
/// Payload since the last probe that makes a gated path one that carries much.
const ASK_WORTH_BYTES: u64 = 16 << 10; // a guess: a probe and its answer are 2 % of it
/// R-PATH-9: the number of probe timeouts of silence before a probe. Two more without an answer
/// make the path silent.
const ASK_AFTER_TIMEOUTS: u64 = 2;

/// How much later control frames may arrive on a free path than on a metered one.
const CONTROL_WAIT_MAX: Span = Span::from_secs(1); // a guess: a grant is for about a second

/// The smallest packet worth sending to an address that is not validated, in bytes: one that has room for any ACK, of one
/// range. With less room only bytes from there help, and no timer.
pub(crate) const SPEAK_MIN: u64 =
    (DATA_HEADER_BYTES + Frame::ACK_OF_ONE_RANGE_BYTES_MAX + TAG_BYTES) as u64;

/// A path of a session.
#[derive(Debug)]
pub(crate) struct SessionPath {
    pub(crate) id: PathId,
    pub(crate) addresses: Addresses,
    pub(crate) state: PathState,
    /// When the path fell silent.
    pub(crate) silent_since: Time,
    /// How the window is restored after the silence.
    pub(crate) window_restore: WindowRestore,
    /// How often the path fell silent.
    pub(crate) blackouts: u32,
    /// When the last packet before a silence arrived, if the first hop answered after that: the
    /// fault then lies beyond the hop. Only a device sets it.
    pub(crate) hop_answered: Option<Time>,
    /// Whether the driver froze the path: nothing is sent until it unfreezes it. Only a device sets
    /// it.
    pub(crate) driver_frozen: bool,
    /// When the last packet before a silence arrived, if the driver was informed of that silence.
    pub(crate) quiet_after: Option<Time>,
    /// Since when packets sent on the path are known not to arrive, although packets are received
    /// (R-PATH-15).
    pub(crate) one_way_since: Option<Time>,
    /// When a device probed the path at once because something arrived on it although it is one-way (R-PATH-15).
    pub(crate) one_way_asked: Option<Time>,
    /// Whether the path answered after a silence, and nothing that was sent on it since then was acknowledged. Only a
    /// device sets it (R-PATH-15).
    pub(crate) is_unproven: bool,
    /// Since when packets arrive again after a silence.
    pub(crate) heard_from: Time,
    /// Whether too little was measured on the path so far.
    pub(crate) is_new: bool,
    /// The time until which the pacer does not exceed one window per round trip.
    pub(crate) paced_evenly_until: Time,
    /// The device's status for the path: whether payload may use it.
    pub(crate) status: PathStatus,
    pub(crate) status_seq: u64,
    pub(crate) gated: bool,
    pub(crate) reason: ReasonCode,
    pub(crate) wants: u16,
    pub(crate) cid_remote: Cid,
    pub(crate) validated: bool,
    /// Challenges and answers; none on most paths that are validated.
    pub(crate) validation: Option<Box<AddressValidation>>,
    /// Limits on the bytes in flight; none on most paths.
    pub(crate) limits: Option<Box<PathLimits>>,
    /// The receiver's control of the queue, which computes another limit.
    pub(crate) drwa: Option<Box<Drwa>>,
    /// Bytes received from the address while it is not validated.
    pub(crate) rx_bytes: u64,
    /// Bytes sent to the address while it is not validated.
    pub(crate) tx_bytes: u64,
    pub(crate) recovery: Recovery,
    pub(crate) acks: AckTracker,
    pub(crate) pacer: Pacer,
    pub(crate) mtu: MtuDiscovery,
    pub(crate) opened_at: Time,
    pub(crate) last_rx: Time,
    /// When a packet was last sent, for the path's NAT binding.
    pub(crate) last_tx: Time,
    pub(crate) control: ControlBudget,
    pub(crate) probe_now: bool,
    pub(crate) ack_every: u32,
    /// Whether another path was alive when this one was opened.
    pub(crate) beside_another: bool,
    /// Whether the server answered UNKNOWN on the path.
    pub(crate) unknown: bool,
    /// When a DATAGRAM last arrived on the path.
    pub(crate) datagram_at: Option<Time>,
    /// How many DATAGRAMs are under way at most while the path is slow.
    pub(crate) datagram_bound: DatagramQueueBound,
    /// Payload bytes received on the path, for reports and the scheduler.
    pub(crate) payload_in: u64,
    /// Payload bytes sent on the path.
    pub(crate) payload_out: u64,
    /// Payload bytes sent here that repeat data of another path.
    pub(crate) copied_out: u64,
    /// For each other path, how far this path has repeated its packets.
    pub(crate) copy_progress: PathMap<CopyProgress>,
    pub(crate) first_packet_padded: bool,
    /// Consecutive liveness probes that were answered without payload.
    pub(crate) idle_probes: u32,
    /// Payload bytes received when such a probe last left.
    pub(crate) payload_at_probe: u64,
    /// Whether the next packet is padded, because it may come from an address that the peer has not
    /// seen.
    pub(crate) pad_next: bool,
    /// When the pacer allows the next packet.
    pub(crate) paced_until: Time,
    /// Which path carries this path's ACKs.
    pub(crate) ack_offload_state: Option<Box<AckOffloadState>>,
    /// The rate at which this path may carry ACKs of others.
    pub(crate) carried_acks: Option<Box<CarriedAckBudget>>,
    /// The device's loan of the path for repairs of others' losses.
    pub(crate) lent: Option<Box<LentPath>>,
    /// The rate of repairs of others' losses on the path.
    pub(crate) mirror_guard: Option<Box<MirrorGuard>>,
    pub(crate) fetched_out: u64,
    /// The state of a path over a reliable stream; none on datagrams.
    pub(crate) stream: Option<StreamPathState>,
}

impl SessionPath {
    pub(crate) fn new(
        now: Time,
        id: PathId,
        addresses: Addresses,
        config: &EndpointConfig,
        cid_remote: Cid,
    ) -> Self {
        let mtu = MtuDiscovery::new(config.mtu_max, addresses.remote.is_ipv6());
        let datagram = mtu.current() as u64;
        let mut path = SessionPath {
            id,
            addresses,
            state: PathState::Opening,
            silent_since: now,
            window_restore: WindowRestore::Half,
            blackouts: 0,
            hop_answered: None,
            driver_frozen: false,
            quiet_after: None,
            one_way_since: None,
            one_way_asked: None,
            is_unproven: false,
            heard_from: now,
            is_new: true,
            paced_evenly_until: now,
            status: PathStatus::Available,
            status_seq: 0,
            gated: false,
            reason: ReasonCode::None,
            wants: 0,
            cid_remote,
            validated: false,
            validation: None,
            limits: None,
            drwa: config.drwa.map(|lambda| {
                let drwa = Drwa::new(lambda, LIMIT_DATAGRAMS_MIN * datagram);
                Box::new(drwa.only_beyond(config.drwa_wait_min))
            }),
            rx_bytes: 0,
            tx_bytes: 0,
            recovery: Recovery::new(config.rtt_initial, config.new_controller(datagram)),
            acks: AckTracker::new(config.ack_delay_max),
            pacer: Pacer::new(now, datagram),
            mtu,
            opened_at: now,
            last_rx: now,
            last_tx: now,
            control: ControlBudget::new(now),
            probe_now: false,
            ack_every: 0,
            beside_another: false,
            unknown: false,
            datagram_at: None,
            datagram_bound: DatagramQueueBound::new(now),
            payload_in: 0,
            payload_out: 0,
            copied_out: 0,
            copy_progress: PathMap::default(),
            first_packet_padded: false,
            idle_probes: 0,
            payload_at_probe: 0,
            pad_next: false,
            paced_until: Time::NEVER,
            ack_offload_state: None,
            carried_acks: None,
            lent: None,
            mirror_guard: None,
            fetched_out: 0,
            stream: None,
        };
        path.set_carrier(config);
        path
    }

    /// Whether a challenge to an address that is not validated waits to be sent: it leaves before anything
    /// else does, as a probe.
    pub(crate) fn must_challenge(&self) -> bool {
        !self.validated && self.wants & want::CHG != 0
    }

    /// The number of bytes that may still be sent to an address that is not validated.
    pub(crate) fn unproved_room(&self) -> u64 {
        if self.validated {
            u64::MAX
        } else {
            self.rx_bytes.saturating_sub(self.tx_bytes)
        }
    }

    /// Whether the path's address may receive any packet now.
    pub(crate) fn may_send(&self) -> bool {
        let closed = self.stream.as_ref().is_some_and(|stream| stream.closed);
        !self.driver_frozen && !closed && self.unproved_room() >= SPEAK_MIN
    }

    /// The number of bytes that may still be put in flight: by the window, or the bytes that the
    /// driver accepts for a stream, and by the peer's limit (R-PATH-12).
    pub(crate) fn room(&self) -> u64 {
        let window = match &self.stream {
            Some(stream) => stream.room,
            None => self.recovery.room(),
        };
        window.min(self.allowed().saturating_sub(self.recovery.in_flight))
    }

    /// R-CC-2: whether an ACK of the data in flight proves nothing about the window, because less
    /// than half of the window is used, or the peer's limit leaves the rest empty.
    pub(crate) fn is_window_underused(&self, in_flight: u64) -> bool {
        let window = self.recovery.controller.window();
        in_flight * 2 < window || self.allowed() < window
    }

    /// Records a received packet that the peer counts as in flight. R-DRWA-2: if many arrive, the
    /// round trip is measured once per round.
    pub(crate) fn note_received(&mut self, bytes: u64) {
        if let Some(drwa) = &mut self.drwa {
            drwa.on_bytes(bytes);
            if drwa.wants_sample() && !self.recovery.is_waiting() {
                self.wants |= want::PING;
            }
        }
    }

    /// Handles a round trip sample of the path, with the peer's ACK delay subtracted.
    pub(crate) fn note_rtt(&mut self, now: Time, rtt: Span) {
        if let Some(drwa) = &mut self.drwa {
            drwa.on_rtt(now, rtt);
            self.announce_limit();
        }
    }

    /// R-DRWA-3: forgets RTTmin, because the path has another route now.
    pub(crate) fn forget_rtt_min(&mut self, now: Time) {
        self.recovery.forget_queue(now);
        if let Some(drwa) = &mut self.drwa {
            drwa.reset();
            self.announce_limit();
        }
    }

    /// When an ACK must leave.
    pub(crate) fn ack_at(&self) -> Time {
        if self.gated {
            self.acks.due().max(self.control.next_send_at())
        } else {
            self.acks.due()
        }
    }

    /// Whether the path may carry payload.
    pub(crate) fn takes_payload(&self) -> bool {
        self.status == PathStatus::Available && self.state != PathState::Silent
    }

    /// The pacer's rate in bytes per second: the window divided by the round trip, slightly
    /// increased so that the pacer is never the bottleneck (RFC 9002 §7.7), and doubled in slow
    /// start.
    pub(crate) fn pacing_rate(&self, now: Time) -> u64 {
        if let Some(rate) = self.recovery.controller.pacing_rate() {
            return rate.min(u64::MAX >> 8);
        }
        let rtt = self
            .recovery
            .return_rtt()
            .smoothed()
            .max(Span::from_micros(10));
        let controller = &self.recovery.controller;
        let (num, den) = if now < self.paced_evenly_until {
            // A whole window at once after an outage could exceed the queue.
            (1, 1)
        } else if controller.in_slow_start() {
            (2, 1)
        } else {
            (5, 4)
        };
        let window = u128::from(controller.window());
        let bytes = (window * num / den).min(u128::from(controller.resumed_window()).max(window));
        (bytes * 1_000_000_000 / u128::from(rtt.as_nanos())).min(u128::from(u64::MAX >> 8)) as u64
    }

    /// R-PATH-9: when a device that waits for payload probes the path, because it sends nothing
    /// else whose loss would show a failure.
    ///
    /// `interval_max`: the longest interval between probes of silent paths, which is long where round trips are.
    pub(crate) fn liveness_probe_at(&self, ack_delay_max: Span, interval_max: Span) -> Time {
        if self.recovery.is_waiting() || self.state == PathState::Opening {
            return Time::NEVER;
        }
        let least = match self.gated && !self.carries_much() {
            true => ASK_AFTER_GATED_MIN,
            false => ASK_AFTER_MIN,
        };
        let base = self
            .recovery
            .rtt
            .probe_timeout(ack_delay_max)
            .times(ASK_AFTER_TIMEOUTS)
            .max(least);
        self.last_rx
            + base
                .times(1 << self.idle_probes.min(10))
                .min(ASK_AFTER_MAX.max(interval_max))
    }

    /// Whether so much payload arrived since the last liveness probe that another one costs little beside it.
    fn carries_much(&self) -> bool {
        self.payload_in.saturating_sub(self.payload_at_probe) >= ASK_WORTH_BYTES
    }

    /// R-PATH-9: records that payload arrived. On a gated path a little of it does not make probes frequent
    /// again: each costs money.
    pub(crate) fn note_payload_arrived(&mut self) {
        if !self.gated || self.carries_much() {
            self.idle_probes = 0;
        }
    }

    /// Asks the peer for fewer ACKs as the window grows: eight per window.
    pub(crate) fn want_ack_rate(&mut self) {
        let packets = self.recovery.controller.window() / self.mtu.current() as u64;
        let every = (packets / ACKS_PER_WINDOW).clamp(2, ACK_EVERY_MAX) as u32;
        if every >= self.ack_every * 2 || every * 2 <= self.ack_every || self.ack_every == 0 {
            self.ack_every = every;
            self.wants |= want::ACK_RATE;
        }
    }

    /// The path's rank for the next packet, lower is better: free before gated paths, then by round
    /// trip.
    pub(crate) fn rank(&self) -> (bool, bool, bool, bool, Span) {
        let (silent, unproved, unavailable) = self.last_resort_flags();
        let rtt = self.recovery.rtt.smoothed();
        (silent, unproved, unavailable, self.gated, rtt)
    }

    /// The conditions under which every scheduler uses a path only as a last resort.
    fn last_resort_flags(&self) -> (bool, bool, bool) {
        (
            self.state == PathState::Silent,
            self.state == PathState::Opening && !self.validated,
            self.status != PathStatus::Available,
        )
    }

    /// The path as a candidate for path schedulers.
    pub(crate) fn candidate(&self) -> PathCandidate {
        PathCandidate {
            rtt: self.recovery.rtt.smoothed(),
            variance: self.recovery.rtt.variance(),
            window: self.recovery.controller.window(),
            in_flight: self.recovery.in_flight,
        }
    }
}

/// All paths of a session, in the order they were opened.
#[derive(Debug, Default)]
pub(crate) struct Paths {
    list: Vec<SessionPath>,
}

impl Paths {
    pub(crate) fn push(&mut self, path: SessionPath) {
        assert!(self.list.len() < PATHS_MAX);
        // Most sessions have one path. A list with room for four would be the largest part of their
        // memory.
        self.list.reserve_exact(1);
        self.list.push(path);
    }
    pub(crate) fn is_full(&self) -> bool {
        self.list.len() >= PATHS_MAX
    }
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }
    pub(crate) fn slot(&self, id: PathId) -> Option<usize> {
        self.list.iter().position(|p| p.id == id)
    }
    pub(crate) fn get_mut(&mut self, id: PathId) -> Option<&mut SessionPath> {
        self.list.iter_mut().find(|p| p.id == id)
    }
    pub(crate) fn get(&self, id: PathId) -> Option<&SessionPath> {
        self.list.iter().find(|p| p.id == id)
    }
    /// The path in this slot, mutable; use `paths[slot]` to read it.
    pub(crate) fn at(&mut self, slot: usize) -> &mut SessionPath {
        &mut self.list[slot]
    }
    pub(crate) fn remove(&mut self, slot: usize) -> SessionPath {
        self.list.remove(slot)
    }
    pub(crate) fn iter(&self) -> impl Iterator<Item = &SessionPath> {
        self.list.iter()
    }
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut SessionPath> {
        self.list.iter_mut()
    }
    /// Slots from the best path to the worst.
    pub(crate) fn order(&self, out: &mut [usize; PATHS_MAX]) -> usize {
        let n = self.list.len();
        for (i, slot) in out[..n].iter_mut().enumerate() {
            *slot = i;
        }
        if n > 1 {
            out[..n].sort_by_key(|i| self.list[*i].rank());
        }
        n
    }
    /// Slots in the order in which a scheduler asks the paths for payload.
    pub(crate) fn scheduling_order(
        &self,
        by: &dyn PathScheduler,
        out: &mut [usize; PATHS_MAX],
    ) -> usize {
        let n = self.order(out);
        if n > 1 {
            out[..n].sort_by_key(|i| {
                let path = &self.list[*i];
                let rank = by.rank(path.gated, path.recovery.rtt.smoothed());
                (path.last_resort_flags(), rank)
            });
        }
        n
    }
    pub(crate) fn nth(&self, slot: usize) -> &SessionPath {
        &self.list[slot]
    }
    /// The path for control frames of session and flows, from paths in order: the first that can
    /// carry them, unless another one is so much faster that slow grants and credit would delay
    /// payload.
    pub(crate) fn for_control(&self, order: &[usize]) -> Option<usize> {
        let able = |slot: &&usize| {
            let path = &self.list[**slot];
            path.state != PathState::Silent && path.may_send()
        };
        let rtt = |slot: &usize| self.list[*slot].recovery.rtt.smoothed();
        let first = order.iter().find(able)?;
        let quicker = |slot: &&usize| rtt(slot) + CONTROL_WAIT_MAX < rtt(first);
        let mut quick = order.iter().filter(able).filter(quicker);
        Some(*quick.next().unwrap_or(first))
    }
    /// Whether another live path could carry this path's data.
    pub(crate) fn has_other_live(&self, slot: usize) -> bool {
        self.list.iter().enumerate().any(|(i, p)| {
            i != slot
                && p.state == PathState::Active
                && matches!(p.status, PathStatus::Available | PathStatus::Standby)
                && p.validated
        })
    }
}

impl std::ops::Index<usize> for Paths {
    type Output = SessionPath;
    fn index(&self, slot: usize) -> &SessionPath {
        &self.list[slot]
    }
}
