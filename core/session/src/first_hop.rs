//! What a device knows of a link besides received packets: whether its first hop answers, and
//! whether it has a carrier.
//!
//! ```text
//!  200 ms of silence ─▶ PathQuiet ─▶ the driver asks the first hop ─▶ on_link_silent
//!     no answer: an outage of the radio ── frozen at once, unfrozen when the path answers, window kept
//!     an answer: the fault lies further on ── probe timeouts decide, and it resumes with half the window
//!     unknown: probe timeouts decide
//!
//!  carrier lost, or the application decides ─▶ freeze_path: no packet until unfreeze_path
//! ```
//!
//! The core communicates only with its peer and knows neither gateways nor radios. It reports when
//! a path has become quiet, and the driver reports the first hop's answer (Super-aggregation §3.2,
//! proxying-blackout-freeze).

use d2tp_time::{Span, Time};
use d2tp_wire::{PathStatus, ReasonCode};

use crate::event::SessionEvent;
use crate::link::LinkId;
use crate::path::{self, PathState, SessionPath};
use crate::recovery::WindowRestore;
use crate::session::{Session, say};
use crate::session_state::Role;

/// How long a path must be quiet before its first hop is asked, unless a probe timeout is longer.
/// // Super-aggregation §3.2
const QUIET: Span = Span::from_millis(200);
/// The number of probe timeouts after which a path counts as silent. A path that was frozen by
/// another sign counts as having had this many.
const PROBES_OF_A_SIGN: u32 = 2;

/// The result of asking a link's first hop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FirstHopStatus {
    /// The first hop answered: the link works.
    Answers,
    /// The first hop did not answer, although it had answered before.
    Silent,
    /// The first hop cannot be asked, or never answered.
    Unknown,
}

impl SessionPath {
    /// How the window is restored after a silence. `alone`: there was no other path.
    pub(crate) fn window_restore_if(&self, alone: bool) -> WindowRestore {
        if alone || self.is_fault_beyond_hop() {
            WindowRestore::Half
        } else {
            WindowRestore::Full
        }
    }

    /// Whether the fault lies beyond the link's first hop.
    pub(crate) fn is_fault_beyond_hop(&self) -> bool {
        self.hop_answered == Some(self.last_rx)
    }

    /// Probes the path at once, and then at the usual rate for silent paths.
    fn ask_now(&mut self) {
        self.recovery.probes = self.recovery.probes.max(PROBES_OF_A_SIGN);
        self.probe_now = true;
        self.wants |= path::want::PING;
        // The path's NAT may use another address by now.
        self.pad_next = true;
    }
}

impl Session {
    /// R-HOP-1: when a path has been quiet long enough that its first hop should be probed. It must
    /// have unacknowledged data, or have received payload until now. If probe timeouts were
    /// quicker, it is now.
    pub(crate) fn quiet_at(&self, path: &SessionPath) -> Time {
        let reports = self.role == Role::Initiator
            && self.config.freezing
            && path.state != PathState::Opening
            && !path.driver_frozen
            && path.recovery.rtt.is_measured()
            && path.quiet_after != Some(path.last_rx);
        if !reports {
            return Time::NEVER;
        }
        if path.state == PathState::Silent {
            return path.silent_since;
        }
        let since = match path.recovery.oldest() {
            Some(oldest) => oldest.at.max(path.last_rx),
            None if path.idle_probes == 0 && path.payload_in > 0 && self.expects_payload(path) => {
                path.last_rx
            }
            None => return Time::NEVER,
        };
        let timeout = path.recovery.rtt.probe_timeout(self.config.ack_delay_max);
        since + timeout.max(QUIET)
    }

    /// Informs the driver, once for each path, that the path became quiet.
    pub(crate) fn note_quiet(&mut self, now: Time) {
        for slot in 0..self.paths.len() {
            if self.quiet_at(&self.paths[slot]) > now {
                continue;
            }
            let path = self.paths.at(slot);
            path.quiet_after = Some(path.last_rx);
            let (path, link) = (path.id, path.addresses.link);
            self.emit(SessionEvent::PathQuiet { path, link });
        }
    }

    /// Handles the answer of a link's first hop, which the device asked at `since`, because a path
    /// was quiet ([`SessionEvent::PathQuiet`]) or for another sign of the link. Packets that
    /// arrived since then take precedence.
    pub fn on_link_silent(&mut self, now: Time, link: LinkId, since: Time, hop: FirstHopStatus) {
        if self.role == Role::Responder || !self.config.freezing || self.closing.is_some() {
            return;
        }
        for slot in 0..self.paths.len() {
            let path = &self.paths[slot];
            let counts =
                path.addresses.link == link && path.last_rx <= since && !path.driver_frozen;
            match (hop, path.state) {
                (FirstHopStatus::Silent, PathState::Active) if counts => {
                    self.freeze_by_link_sign(now, slot)
                }
                (FirstHopStatus::Silent, PathState::Silent) if counts => self.locate(slot, false),
                (FirstHopStatus::Answers, PathState::Active | PathState::Silent) if counts => {
                    self.locate(slot, true);
                    self.ask_beyond_hop(slot);
                }
                _ => {}
            }
        }
    }

    /// R-HOP-1: freezes a path because its link reports an outage.
    fn freeze_by_link_sign(&mut self, now: Time, slot: usize) {
        let alone = !self.paths.has_other_live(slot);
        self.paths.at(slot).hop_answered = None;
        self.freeze(now, slot, alone);
        let path = self.paths.at(slot);
        path.quiet_after = Some(path.last_rx);
        path.window_restore = WindowRestore::Full;
        path.ask_now();
        let (path, link) = (path.id, path.addresses.link);
        self.emit(SessionEvent::PathSilent { path, link });
    }

    /// R-HOP-2: records for a quiet or silent path whether the fault lies beyond the first hop.
    fn locate(&mut self, slot: usize, beyond: bool) {
        let path = self.paths.at(slot);
        if path.is_fault_beyond_hop() == beyond
            && path.window_restore == path.window_restore_if(false)
        {
            return;
        }
        path.hop_answered = beyond.then_some(path.last_rx);
        if path.state == PathState::Silent {
            path.window_restore = path.window_restore_if(false);
        }
        if path.status == PathStatus::Frozen {
            path.status_seq += 1;
            self.wants |= say::FROZEN;
        }
    }

    /// R-HOP-2: probes a path on which payload was due, and whose first hop answers, at once: only
    /// probe timeouts can find the fault now. Not on a metered link, where each probe costs money.
    fn ask_beyond_hop(&mut self, slot: usize) {
        let path = &self.paths[slot];
        let due = path.state == PathState::Active
            && path.idle_probes == 0
            && !path.gated
            && !path.recovery.is_waiting()
            && self.expects_payload(path);
        if due {
            let path = self.paths.at(slot);
            path.idle_probes += 1;
            path.probe_now = true;
            path.wants |= path::want::PING;
        }
    }

    /// R-HOP-2: decides how the window of a path is restored that the device reported as frozen.
    /// The device knows whether the link was the cause.
    pub(crate) fn on_peer_frozen(&mut self, slot: usize, reason: ReasonCode) {
        let freezing = self.config.freezing;
        let path = self.paths.at(slot);
        path.window_restore = match reason {
            _ if !freezing => WindowRestore::Reset,
            ReasonCode::NoPath => WindowRestore::Half,
            _ => WindowRestore::Full,
        };
    }

    /// Freezes the paths over `link` until [`Session::unfreeze_path`], because its carrier is lost
    /// or the application expects that. A device calls it. No packet leaves on them, data in flight
    /// is sent on other paths or waits, the peer is informed on another path if there is one, and
    /// the window is kept (R-HOP-3).
    pub fn freeze_path(&mut self, now: Time, link: LinkId) {
        if self.role == Role::Responder || self.closing.is_some() {
            return;
        }
        for slot in 0..self.paths.len() {
            let path = self.paths.at(slot);
            if path.addresses.link != link || path.driver_frozen {
                continue;
            }
            path.driver_frozen = true;
            path.probe_now = false;
            let (id, known) = (path.id, path.state);
            self.freeze(now, slot, !self.paths.has_other_live(slot));
            let path = self.paths.at(slot);
            if path.window_restore == WindowRestore::Half {
                // The caller that freezes a path knows that the link is the cause.
                path.window_restore = WindowRestore::Full;
            }
            if known != PathState::Silent {
                self.emit(SessionEvent::PathSilent { path: id, link });
            }
        }
        self.flows.touch_all();
    }

    /// Unfreezes the paths over `link`: each is probed at once, and carries data when it answers.
    pub fn unfreeze_path(&mut self, link: LinkId) {
        for path in self.paths.iter_mut() {
            if path.addresses.link == link && std::mem::take(&mut path.driver_frozen) {
                path.ask_now();
            }
        }
    }

    /// R-HOP-3: handles a packet on a path that we reported as frozen. The peer missed the report,
    /// or sent the packet before it. The report is repeated once per probe timeout.
    pub(crate) fn on_heard_while_frozen(&mut self, now: Time, slot: usize) {
        let pause = self.paths[slot]
            .recovery
            .rtt
            .probe_timeout(self.config.ack_delay_max);
        let path = self.paths.at(slot);
        let said = path
            .quiet_after
            .map_or(path.silent_since, |at| at.max(path.silent_since));
        if path.status == PathStatus::Frozen && now >= said + pause {
            path.quiet_after = Some(now);
            path.status_seq += 1;
            self.wants |= say::FROZEN;
        }
    }
}
