//! Holes: a path that worked and does not answer any more. What it held goes elsewhere or waits, its
//! window stays, and it goes on the moment the path answers (freezing across blackouts).
//!
//! ```text
//!  two probe timeouts ─▶ silent: gives back what is in flight, no payload, questions only
//!    a device with another path ── PATH_STATUS frozen ──▶ the server does the same at once
//!    questions: a probe timeout apart, later a 32nd of the silence
//!  anything heard ─▶ active. Was there another path all the time? the whole window
//!                            was this the only one?               half of it, the rest by slow start
//! ```
//!
//! Whoever has but one path cannot tell a hole from a network that is choked, so it goes on carefully,
//! as RFC 9959 has it for a path that was measured before.

use d2tp_time::{Span, Time};
use d2tp_wire::{Frame, PathStatus, Reason, Writer};

use crate::path::{Path, PathState};
use crate::recovery::{Said, Sent};
use crate::session::{Role, Session, on_said, say};

/// Probe timeouts without an answer after which a path counts as silent.
const PROBES_BEFORE_SILENT: u32 = 2;
/// A device that waits asks again after this part of the silence so far: what the hole costs beyond
/// itself stays below 1/32 of it.
const ASK_SHARE: u64 = 32;
/// A PATH_STATUS at its longest.
const STATUS_BYTES_MAX: usize = 1 + 4 + 8 + 3;

impl Path {
    /// When to ask whether the path lives, if nothing is heard until then. `dense`: as a device does on
    /// a link that costs nothing, where it alone can bring the peer back.
    pub(crate) fn probe_at(&self, dense: bool, ack_delay_max: Span, interval_max: Span) -> Time {
        if !dense || self.gated || self.recovery.probes < PROBES_BEFORE_SILENT {
            return self.recovery.probe_at(ack_delay_max, interval_max);
        }
        let silence = self.recovery.last_asked().since(self.last_rx);
        let pause = silence.divided(ASK_SHARE).min(interval_max);
        self.recovery.probe_after(pause, ack_delay_max)
    }

    /// Questions are not answered, and nothing else is heard: a full queue answers late, but speaks.
    pub(crate) fn is_in_hole(&self, now: Time, ack_delay_max: Span) -> bool {
        self.recovery.probes >= PROBES_BEFORE_SILENT
            && now.since(self.last_rx) >= self.recovery.rtt.probe_timeout(ack_delay_max)
    }

    /// It does not answer: no payload until it does.
    fn fall_silent(&mut self, now: Time, alone: bool) {
        if self.state != PathState::Silent {
            self.state = PathState::Silent;
            self.silent_since = now;
            self.alone = alone;
        }
    }

    /// Something was heard on it.
    pub(crate) fn thaw(&mut self, now: Time) {
        if self.state == PathState::Silent {
            let hole = now.since(self.silent_since);
            self.recovery.on_hole(now, hole, self.alone);
            self.even_until = now + self.recovery.rtt.smoothed();
        }
        self.state = PathState::Active;
        self.recovery.probes = 0;
    }
}

impl Session {
    /// What a path holds is given back to its owners, without a congestion response.
    pub(crate) fn give_back(&mut self, slot: usize) {
        let Session {
            paths,
            flows,
            issued,
            says,
            gone,
            ..
        } = self;
        let path = paths.at(slot);
        let (id, mut own) = (path.id, path.wants);
        path.recovery.abandon(|said, arrived| {
            on_said(
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
    }

    /// R-PATH-6: what a silent path holds travels elsewhere, if there is an elsewhere. Whether it was
    /// not silent before.
    pub(crate) fn freeze(&mut self, now: Time, slot: usize, alone: bool) -> bool {
        let path = self.paths.at(slot);
        if path.recovery.in_flight > 0 && path.mtu.on_silence() {
            let datagram = path.mtu.current() as u64;
            path.recovery.controller.set_datagram(datagram);
        }
        self.give_back(slot);
        let initiator = self.role == Role::Initiator;
        let path = self.paths.at(slot);
        let news = path.state != PathState::Silent;
        path.fall_silent(now, alone);
        // R-PATH-14
        if news && initiator && !alone && path.status == PathStatus::Available {
            path.status = PathStatus::Frozen;
            path.status_seq += 1;
            self.says |= say::FROZEN;
        }
        news
    }

    /// R-PATH-14: which paths are frozen, said on another.
    pub(crate) fn write_frozen(&mut self, w: &mut Writer<'_>, sent: &mut Sent) {
        self.says &= !say::FROZEN;
        let frozen = |p: &&Path| p.status == PathStatus::Frozen;
        for path in self.paths.iter().filter(frozen) {
            if w.room() < STATUS_BYTES_MAX {
                self.says |= say::FROZEN;
                return;
            }
            let status = Frame::PathStatus {
                path: path.id,
                seq: path.status_seq,
                status: path.status,
                gated: path.gated,
                reason: Reason::None,
            };
            status.encode(w);
            sent.eliciting = true;
            sent.note(Said::Session { what: say::FROZEN });
        }
    }

    /// A path that was silent, or had not been heard, is heard.
    pub(crate) fn thaw(&mut self, now: Time, slot: usize) {
        let initiator = self.role == Role::Initiator;
        let path = self.paths.at(slot);
        path.thaw(now);
        // R-PATH-14: each end knows by the packet itself.
        if path.status == PathStatus::Frozen {
            path.status = PathStatus::Available;
            if initiator {
                path.status_seq += 1;
                path.wants |= crate::path::want::STATUS;
            }
        }
        self.flows.touch_all();
    }
}
