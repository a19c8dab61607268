//! Finds the path that is least likely to fail, for [`PathSelection::Steadiest`].

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, PathId};

use crate::path::{PathState, SessionPath};
use crate::path_selection::PathSelection;
use crate::session::{FlowError, Session};

/// An outage within this time makes a path less steady than one without.
const SHAKEN: Span = Span::from_secs(60); // a guess: a walk past a few access points
/// A path that loses more than one packet in this many is less steady than others.
const LOSSY: u64 = 128; // a guess: below the rate that matters for a video frame of ten packets

/// The longest pause between DATAGRAMs of one stream. // a guess: two pictures a second
const STREAM: Span = Span::from_millis(500);

impl SessionPath {
    /// Whether DATAGRAMs may use this path: gated paths carry none.
    pub(crate) fn takes_datagrams(&self) -> bool {
        self.takes_payload() && !self.gated && self.validated && !self.driver_frozen
    }

    /// Whether DATAGRAMs were arriving when the path last received a packet, so that their absence
    /// is a sign of an outage.
    pub(crate) fn receives_datagrams(&self) -> bool {
        self.datagram_at
            .is_some_and(|at| at + STREAM >= self.last_rx)
    }

    fn is_shaken(&self, now: Time) -> bool {
        self.blackouts > 0 && now.since(self.silent_since) < SHAKEN
    }

    fn is_lossy(&self) -> bool {
        let recovery = &self.recovery;
        let lost = recovery.lost_total.saturating_sub(recovery.spurious_total);
        lost * LOSSY > recovery.next_number()
    }
}

impl Session {
    /// The steadiest of the paths that answer and carry DATAGRAMs.
    pub(crate) fn steadiest(&self, now: Time) -> Option<PathId> {
        let able = |p: &&SessionPath| p.takes_datagrams() && p.state == PathState::Active;
        let shaky = |p: &&SessionPath| {
            let rtt = p.recovery.rtt.smoothed();
            (p.is_shaken(now), self.is_half_duplex(p), p.is_lossy(), rtt)
        };
        let steadiest = self.paths.iter().filter(able).min_by_key(shaky);
        steadiest.map(|p| p.id)
    }

    /// Selects the paths that carry data which this end sends on a flow; the peer decides for its
    /// own direction. With [`PathSelection::Each`] a metered path carries copies only within its
    /// grant.
    ///
    /// # Errors
    /// There is no such flow.
    pub fn set_path_selection(
        &mut self,
        id: FlowId,
        route: PathSelection,
    ) -> Result<(), FlowError> {
        let flow = self.flows.get_mut(id).ok_or(FlowError::Gone)?;
        flow.path_selection = route;
        self.flows.routed |= route != PathSelection::Any;
        self.flows.touch(id);
        Ok(())
    }

    /// Updates the steadiest path, if a flow depends on it.
    pub(crate) fn update_steadiest(&mut self, now: Time) {
        if self.flows.routed {
            self.flows.steadiest = self.steadiest(now);
        }
    }
}
