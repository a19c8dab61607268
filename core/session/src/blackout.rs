//! Outages of a path that worked before (freezing across blackouts). Its data in flight is sent on
//! other paths or waits, its window is kept, and it carries payload again as soon as it answers.
//!
//! ```text
//!  two probe timeouts ─▶ silent: data in flight is requeued, no payload, only probes
//!    a device with another path ── ACK, PATH_STATUS frozen ──▶ the server does the same at once
//!    probes: a probe timeout apart, later a 32nd of the silence;
//!               50 ms and a 512th if a flow waits for the path, more if it was a queue before
//!  a packet arrives ─▶ active. Was there another path all the time? the whole window
//!                            was this the only path?              half of it, the rest by slow start
//! ```
//!
//! With a single path an outage cannot be told from heavy congestion, so sending resumes carefully,
//! as RFC 9959 recommends for a path that was measured before. A device may know more from the
//! state of its link (`first_hop.rs`).

use d2tp_time::{Span, Time};
use d2tp_wire::{Frame, PathStatus, ReasonCode, WireWriter};

use crate::flow::SessionFlow;
use crate::path::{PathState, SessionPath, want};
use crate::recovery::{PROBE_INTERVAL_SLOW_MAX, WindowRestore};
use crate::sent_packet::{SentFrame, SentPacket};
use crate::session::{Session, on_frame_fate, say};
use crate::session_state::Role;
use crate::stream_path_state::STREAM_SILENCE_MIN;

/// Probe timeouts without an answer after which a path counts as silent.
const PROBES_BEFORE_SILENT: u32 = 2;
/// A device's probes of a silent path use at most this part (1/32) of the length of the silence so far.
const ASK_SHARE: u64 = 32;
/// Probes of a silent path while a flow waits use at most this part (1/512) of the length of the
/// silence so far. A stay on a network may be much shorter than the outage before it, and loses the
/// time until the next probe: 1 % of a stay of 4 s after 32 s. An outage of an hour takes 3,700
/// probes of 60 bytes, half of them in its first minutes.
const ASK_SHARE_WAITING: u64 = 512;
/// The shortest interval between two probes while a flow waits, beside a quarter of the round trip, so
/// that probes do not fill a narrow link. A guess: 13 kb/s on Wi-Fi.
const ASK_PAUSE_WAITING_MIN: Span = Span::from_millis(50);
const ASK_PAUSE_OF_RTT: u64 = 4;
/// Probe timeouts shorter than this are backed off from the first one on, because a radio may be
/// away for this long.
const ASK_PAUSE_EVEN_MIN: Span = Span::from_millis(250); // a guess: a scan of Wi-Fi takes 0.1 to 0.3 s
/// R-PATH-15: probe timeouts without an ACK of a server's packet, while the peer's packets still
/// arrive, after which the path counts as one-way.
const ONE_WAY_TIMEOUTS: u64 = 4;
const ONE_WAY_MIN: Span = Span::from_millis(500); // a guess: twice what an ACK may wait for
/// A pause in the packets of a device that counts as an outage: a device probes every 2 s at least.
const HOLE_MIN: Span = Span::from_secs(3);
/// How long packets that arrive on a path that was one-way prove nothing to a server, and how often a device asks at once
/// because of them. Higher: a device that does not report that it receives again waits longer. Lower: more is sent and lost.
const ONE_WAY_MAX: Span = Span::from_secs(10); // a guess
/// The longest PATH_STATUS frame.
const STATUS_BYTES_MAX: usize = 1 + 4 + 8 + 3;
/// Bytes of the ACK beside a PATH_STATUS, newest ranges first. The peer sends again what the ACK
/// does not contain: after slow start had overflowed a queue, 96 bytes had room for only a part of
/// the ranges, and 507 kB were sent twice (1.4 kB with 512). Higher: fewer paths fit into one
/// datagram. // measured: lab/scenarios/wifi-one-way.toml
const ACK_BYTES_MAX: usize = 512;

/// How often a silent path is probed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProbeFrequency {
    /// Probes back off: for a server, since only devices restore a path.
    Rarely,
    /// Probes are as frequent as a device on a free link needs them.
    Often,
    /// Probes are as frequent as while a flow waits on a free link.
    Waiting,
}

impl SessionPath {
    /// When the next probe of the path is due, if nothing arrives before.
    pub(crate) fn probe_at(
        &self,
        asking: ProbeFrequency,
        ack_delay_max: Span,
        interval_max: Span,
    ) -> Time {
        let recovery = &self.recovery;
        if self.is_stream() {
            // R-STREAM-3: the connection repeats what is lost by itself, which also makes round trips vary. Until the
            // path counts as silent there is neither back-off nor a margin for that: otherwise it would count as silent
            // only seconds after the first probe.
            let share = STREAM_SILENCE_MIN.divided(u64::from(PROBES_BEFORE_SILENT));
            if self.state != PathState::Silent {
                let twice = recovery.return_rtt().smoothed().times(2);
                let usual = recovery.probe_at(ack_delay_max, interval_max);
                let soon = recovery.probe_after(twice + ack_delay_max);
                return usual.min(soon).max(recovery.probe_after(share));
            }
            return recovery
                .probe_at(ack_delay_max, interval_max)
                .max(recovery.probe_after(share));
        }
        if asking == ProbeFrequency::Rarely || self.gated {
            return recovery.probe_at(ack_delay_max, interval_max);
        }
        if recovery.probes < PROBES_BEFORE_SILENT {
            // R-PATH-6: no back-off before the path counts as silent, so that a link that died is left soon.
            let pause = recovery.return_rtt().probe_timeout(ack_delay_max);
            let usual = recovery.probe_at(ack_delay_max, interval_max);
            return match recovery.late_blackouts {
                0 => usual.min(recovery.probe_after(pause.max(ASK_PAUSE_EVEN_MIN))),
                // R-PATH-14: earlier silences of this path were queues.
                _ => usual,
            };
        }
        let silence = recovery.last_eliciting_at().since(self.last_rx);
        if asking == ProbeFrequency::Often {
            // Probes are never faster than the path could answer.
            let least = recovery.rtt.probe_timeout(ack_delay_max);
            let least = least.min(PROBE_INTERVAL_SLOW_MAX.max(interval_max));
            return recovery.probe_after(silence.divided(ASK_SHARE).min(interval_max).max(least));
        }
        let least = recovery.rtt.smoothed().divided(ASK_PAUSE_OF_RTT);
        let least = least
            .max(ASK_PAUSE_WAITING_MIN)
            .times(1 << recovery.late_blackouts);
        let least = least.min(PROBE_INTERVAL_SLOW_MAX.max(interval_max));
        recovery.probe_after(
            silence
                .divided(ASK_SHARE_WAITING)
                .min(interval_max)
                .max(least),
        )
    }

    /// Whether probes are not answered and nothing else arrives. A path with a full queue answers
    /// late, so it is not in a blackout.
    pub(crate) fn is_in_blackout(&self, now: Time, ack_delay_max: Span) -> bool {
        let mut least = self.recovery.rtt.probe_timeout(ack_delay_max);
        if self.is_stream() {
            least = least.max(STREAM_SILENCE_MIN);
        }
        self.recovery.probes >= PROBES_BEFORE_SILENT && now.since(self.last_rx) >= least
    }

    /// R-PATH-15: when the path counts as one-way, if nothing that was sent on it is acknowledged
    /// before: the peer's packets arrive, and the oldest packet sent has no answer.
    fn one_way_at(&self, ack_delay_max: Span) -> Time {
        if self.is_stream() {
            // A connection that repeats a lost segment delivers nothing behind it meanwhile.
            return Time::NEVER;
        }
        let timeout = self.recovery.return_rtt().probe_timeout(ack_delay_max);
        let oldest = self.recovery.oldest();
        // Packets that were sent during an outage that is over prove nothing.
        let since = oldest.map(|oldest| oldest.at.max(self.heard_from));
        match since.filter(|at| self.state == PathState::Active && self.last_rx > *at + timeout) {
            Some(at) => at + timeout.times(ONE_WAY_TIMEOUTS).max(ONE_WAY_MIN),
            None => Time::NEVER,
        }
    }

    /// Whether arriving packets do not prove yet that the path works in both directions.
    pub(crate) fn is_one_way(&self, now: Time) -> bool {
        self.one_way_since
            .is_some_and(|since| now.since(since) < ONE_WAY_MAX)
    }

    /// R-PATH-15: a packet arrived on a device's path that carries towards the device only. An answer to a probe would show
    /// that this is over; the next one may be due much later.
    pub(crate) fn ask_if_still_one_way(&mut self, now: Time) {
        if self
            .one_way_asked
            .is_none_or(|at| now.since(at) >= ONE_WAY_MAX)
        {
            self.one_way_asked = Some(now);
            self.probe_now = true;
            self.wants |= want::PING;
        }
    }

    /// Marks the path as silent: it carries no payload until it answers.
    fn mark_silent(&mut self, now: Time, comeback: WindowRestore) {
        if self.state != PathState::Silent {
            self.state = PathState::Silent;
            self.silent_since = now;
            self.blackouts = self.blackouts.saturating_add(1);
            self.window_restore = comeback;
        }
    }

    /// R-PATH-15: records that a packet arrived, before the path's time of reception is updated.
    pub(crate) fn note_heard(&mut self, now: Time) {
        if now.since(self.last_rx) > HOLE_MIN {
            self.heard_from = now;
        }
    }

    /// Marks the path as answering again.
    pub(crate) fn unfreeze(&mut self, now: Time) {
        if self.state == PathState::Silent {
            self.heard_from = now;
            self.recovery
                .on_blackout(now, self.silent_since, self.window_restore);
            self.paced_evenly_until = now + self.recovery.rtt.smoothed();
        }
        self.state = PathState::Active;
        self.one_way_since = None;
        self.recovery.probes = 0;
    }
}

impl Session {
    /// R-PATH-14: how often silent paths of this session are probed.
    pub(crate) fn probe_frequency(&self) -> ProbeFrequency {
        if self.role == Role::Responder || !self.config.freezing {
            return ProbeFrequency::Rarely;
        }
        let counts = |p: &SessionPath| p.recovery.probes >= PROBES_BEFORE_SILENT;
        // R-CLOSE-3: a closing session sends a limited number of CLOSE frames, and spreads them
        // over time.
        let waits = self.closing.is_none()
            && self.paths.iter().any(counts)
            && (self.flows.iter().any(SessionFlow::awaits_data)
                || self
                    .paths
                    .iter()
                    .any(|p| counts(p) && p.receives_datagrams()));
        if waits {
            ProbeFrequency::Waiting
        } else {
            ProbeFrequency::Often
        }
    }

    /// Returns the data in flight on a path to its owners, without a congestion response.
    pub(crate) fn requeue_in_flight(&mut self, slot: usize) {
        let Session {
            paths,
            flows,
            issued,
            wants: says,
            gone,
            ..
        } = self;
        let path = paths.at(slot);
        let (id, mut own) = (path.id, path.wants);
        path.recovery.abandon(|said, arrived| {
            on_frame_fate(
                said,
                arrived,
                flows,
                Some((id, &mut own)),
                issued,
                says,
                gone,
            );
        });
        path.wants = own;
        path.mtu.on_abandoned();
    }

    /// R-PATH-6: marks a path as silent and sends its data on another path, if there is one. Returns
    /// whether the path was not silent before.
    pub(crate) fn freeze(&mut self, now: Time, slot: usize, alone: bool) -> bool {
        let path = self.paths.at(slot);
        if path.recovery.in_flight > 0 && path.mtu.on_silence() {
            let datagram = path.mtu.current() as u64;
            path.recovery.controller.set_datagram(datagram);
        }
        if !alone || !self.paths[slot].is_stream() {
            // R-STREAM-3: a connection may still deliver all of it, and there is no other path for it.
            self.requeue_in_flight(slot);
        }
        let (initiator, freezing) = (self.role == Role::Initiator, self.config.freezing);
        let path = self.paths.at(slot);
        let news = path.state != PathState::Silent;
        path.mark_silent(
            now,
            if freezing {
                path.window_restore_if(alone)
            } else {
                WindowRestore::Reset
            },
        );
        if news && freezing && initiator && !alone {
            self.report_frozen(slot);
        }
        news
    }

    /// R-PATH-14: has another path report that this one is frozen.
    fn report_frozen(&mut self, slot: usize) {
        let path = self.paths.at(slot);
        if path.status == PathStatus::Available {
            path.status = PathStatus::Frozen;
            path.status_seq += 1;
            self.wants |= say::FROZEN;
        }
    }

    /// R-PATH-14: has a path that is being opened, or answers again, report the silent ones: when they
    /// fell silent there may have been no other path to do so. The last ACKs were lost there, so without
    /// the report the server would first send again what arrived.
    pub(crate) fn report_silent_paths(&mut self) {
        for slot in 0..self.paths.len() {
            if self.config.freezing && self.paths[slot].state == PathState::Silent {
                self.report_frozen(slot);
            }
        }
    }

    /// R-PATH-14: reports frozen paths on another path, with the latest ACKs of each: ACKs sent before
    /// the outage were lost in it, and the peer would send the acknowledged data again.
    pub(crate) fn write_frozen(&mut self, w: &mut WireWriter<'_>, sent: &mut SentPacket) {
        self.wants &= !say::FROZEN;
        let frozen = |p: &&SessionPath| p.status == PathStatus::Frozen;
        for path in self.paths.iter().filter(frozen) {
            if w.room() < STATUS_BYTES_MAX + ACK_BYTES_MAX {
                self.wants |= say::FROZEN;
                return;
            }
            let mut ranges = [0; ACK_BYTES_MAX];
            let mut ack = WireWriter::new(&mut ranges);
            Frame::encode_ack(&mut ack, path.id, 0, path.acks.ranges());
            let n = ack.written();
            w.bytes(&ranges[..n]);
            let status = Frame::PathStatus {
                path: path.id,
                seq: path.status_seq,
                status: path.status,
                gated: path.gated,
                // R-HOP-2
                reason: if path.is_fault_beyond_hop() {
                    ReasonCode::NoPath
                } else {
                    ReasonCode::None
                },
            };
            status.encode(w);
            sent.eliciting = true;
            sent.note(SentFrame::Session { what: say::FROZEN });
        }
    }

    /// R-PATH-15: when a server finds that a path is one-way. A session without another path has no
    /// remedy for it.
    pub(crate) fn one_way_at(&self, slot: usize) -> Time {
        match self.role == Role::Responder && self.paths.has_other_live(slot) {
            true => self.paths[slot].one_way_at(self.config.ack_delay_max),
            false => Time::NEVER,
        }
    }

    /// R-PATH-15: marks a device's path that falls silent again, although packets arrived on it since its last silence,
    /// as one that carries towards the device only.
    pub(crate) fn note_silent_again(&mut self, now: Time, slot: usize) {
        let path = self.paths.at(slot);
        if std::mem::take(&mut path.is_unproven) {
            path.one_way_since = Some(now);
            path.one_way_asked = None;
        }
    }

    /// R-PATH-15: the peer acknowledged what a device sent on a path; `on_own_path`: on the path itself.
    pub(crate) fn on_path_reaches_peer(&mut self, now: Time, slot: usize, on_own_path: bool) {
        if self.role == Role::Responder {
            return;
        }
        let path = self.paths.at(slot);
        path.is_unproven = false;
        let was_one_way = path.one_way_since.take().is_some();
        if was_one_way && on_own_path && path.state == PathState::Silent && !path.driver_frozen {
            self.unfreeze(now, slot);
        }
    }

    /// R-PATH-15: the device reported that it receives on the path again.
    pub(crate) fn on_heard_by_peer(&mut self, now: Time, slot: usize) {
        if self.paths.at(slot).one_way_since.is_some() {
            self.unfreeze(now, slot);
        }
    }

    /// Restores a path that was silent, or that the peer had not received on.
    pub(crate) fn unfreeze(&mut self, now: Time, slot: usize) {
        let initiator = self.role == Role::Initiator;
        let path = self.paths.at(slot);
        path.unfreeze(now);
        // R-PATH-14: the arriving packet itself informs each end.
        if path.status == PathStatus::Frozen {
            path.status = PathStatus::Available;
            if initiator {
                path.status_seq += 1;
                path.wants |= crate::path::want::STATUS;
            }
        }
        if initiator {
            self.report_silent_paths();
        }
        self.flows.touch_all();
    }
}
