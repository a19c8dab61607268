//! What a device knows of a link besides the packets that come: whether its first hop answers, and
//! whether it is there at all.
//!
//! ```text
//!  200 ms of silence ─▶ PathQuiet ─▶ the driver asks the first hop ─▶ on_link_silent
//!     no answer: a hole in the air ── frozen at once, thawed when the path answers, its window whole
//!     an answer: the fault lies further on ── probe timeouts find out, and it goes on with half
//!     nobody knows: probe timeouts find out
//!
//!  carrier lost, or the application says so ─▶ freeze_path: not a packet until thaw_path
//! ```
//!
//! The core asks nobody but its peer, and knows neither gateways nor radios: it says when a path has become
//! quiet, and is told what came of asking (Super-aggregation §3.2, proxying-blackout-freeze).

use d2tp_time::{Span, Time};
use d2tp_wire::{PathStatus, ReasonCode};

use crate::event::SessionEvent;
use crate::link::LinkId;
use crate::path::{self, PathState, SessionPath};
use crate::recovery::WindowRestore;
use crate::session::{Session, say};
use crate::session_state::Role;

/// How long a path must be quiet before its first hop is asked, if a probe timeout is not longer. //
/// Super-aggregation §3.2
const QUIET: Span = Span::from_millis(200);
/// Probe timeouts after which a path counts as silent. A path frozen by another sign counts as having
/// had as many.
const PROBES_OF_A_SIGN: u32 = 2;

/// The result of asking a link's first hop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FirstHopStatus {
    /// The first hop answered: the link works.
    Answers,
    /// The first hop did not answer, and has done so before.
    Silent,
    /// The first hop cannot be asked, or never answered.
    Unknown,
}

impl SessionPath {
    /// How the window is restored after a silence; `alone`: there was no other path.
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

    /// Probes the path at once, and then at the usual pace of silent paths.
    fn ask_now(&mut self) {
        self.recovery.probes = self.recovery.probes.max(PROBES_OF_A_SIGN);
        self.probe_now = true;
        self.wants |= path::want::PING;
        // By now its NAT may show another address.
        self.pad_next = true;
    }
}

impl Session {
    /// R-HOP-1: when a path has been quiet for so long that its first hop should be asked: data is
    /// unacknowledged, or payload arrived until now. Immediately, if probe timeouts were quicker.
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

    /// Informs the driver once of each path that became quiet.
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

    /// Handles a device's result of asking the first hop of a link, from `since` on, because a path was
    /// quiet ([`SessionEvent::PathQuiet`]) or by another sign of the link. Packets that arrived since
    /// then outweigh it.
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

    /// R-HOP-2: records whether the fault lies beyond the first hop, for a path that is quiet or
    /// silent.
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

    /// R-HOP-2: how the window of a path that its device called frozen is restored: the device knows
    /// whether the link was the cause.
    pub(crate) fn on_peer_frozen(&mut self, slot: usize, reason: ReasonCode) {
        let freezing = self.config.freezing;
        let path = self.paths.at(slot);
        path.window_restore = match reason {
            _ if !freezing => WindowRestore::Reset,
            ReasonCode::NoPath => WindowRestore::Half,
            _ => WindowRestore::Full,
        };
    }

    /// Freezes what leads over `link` until [`Session::unfreeze_path`]: its carrier is lost, or the application
    /// knows that it is about to be. Not a packet leaves there, what is in flight travels elsewhere or waits,
    /// the peer hears of it on another path if there is one, and the window stays (R-HOP-3). A device's.
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
                // Whoever freezes it knows why.
                path.window_restore = WindowRestore::Full;
            }
            if known != PathState::Silent {
                self.emit(SessionEvent::PathSilent { path: id, link });
            }
        }
        self.flows.touch_all();
    }

    /// Allows paths over `link` again: each is probed at once, and carries data when it answers.
    pub fn unfreeze_path(&mut self, link: LinkId) {
        for path in self.paths.iter_mut() {
            if path.addresses.link == link && std::mem::take(&mut path.driver_frozen) {
                path.ask_now();
            }
        }
    }

    /// R-HOP-3: handles a packet on a path that we reported as frozen: the peer missed the report, or
    /// sent before it. The report is repeated, once per probe timeout.
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
