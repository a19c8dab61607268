//! The path that is least likely to fail, for what an application wants there ([`PathSelection::Steadiest`]).

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, PathId};

use crate::path::{PathState, SessionPath};
use crate::path_selection::PathSelection;
use crate::session::{FlowError, Session};

/// A path that had a hole so lately is less steady than one that had none.
const SHAKEN: Span = Span::from_secs(60); // a guess: a walk past a few access points
/// A path that loses more than one packet in so many is less steady than one that does not.
const LOSSY: u64 = 128; // a guess: below what makes a difference to a frame of ten packets

/// Between DATAGRAMs of a stream there is no more than this. // a guess: two pictures a second
const STREAM: Span = Span::from_millis(500);

impl SessionPath {
    /// Whether messages may travel here: those that nothing is granted to.
    pub(crate) fn takes_datagrams(&self) -> bool {
        self.takes_payload() && !self.gated && self.validated && !self.driver_frozen
    }

    /// DATAGRAMs came until it fell silent, if it did: more would come if it were not.
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
    /// The steadiest of the paths that answer and take messages.
    pub(crate) fn steadiest(&self, now: Time) -> Option<PathId> {
        let able = |p: &&SessionPath| p.takes_datagrams() && p.state == PathState::Active;
        let shaky = |p: &&SessionPath| {
            let rtt = p.recovery.rtt.smoothed();
            (p.is_shaken(now), self.is_half_duplex(p), p.is_lossy(), rtt)
        };
        let steadiest = self.paths.iter().filter(able).min_by_key(shaky);
        steadiest.map(|p| p.id)
    }

    /// Says which paths carry what is sent here of a flow; its peer decides for what it sends. With
    /// [`PathSelection::Each`] a path that costs money carries copies only as far as it is granted.
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

    /// Looks up the steadiest path, if some flow wants to know.
    pub(crate) fn update_steadiest(&mut self, now: Time) {
        if self.flows.routed {
            self.flows.steadiest = self.steadiest(now);
        }
    }
}
