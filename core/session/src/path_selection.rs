//! Which paths an application wants its messages or a flow's bytes on, where a session has several.
//!
//! ```text
//!  reports   ── steadiest ─▶ the path that has had no hole, though others may be faster
//!  commands  ── each ──────▶ every path: the first copy to arrive counts
//!  the rest  ── any ───────▶ as the path scheduler has it
//! ```
//!
//! These are the generic principles of Super-aggregation (Tsao and Sivakumar, CoNEXT 2009, §5.1): what is small
//! and must come in time leaves by the link that is there, what must not be lost by all of them. Each end
//! decides for what it sends; no path carries more than it may.

use d2tp_time::{Span, Time};
use d2tp_wire::{FlowId, PathId};

use crate::path::{PathState, SessionPath};
use crate::session::{FlowError, Session};

/// A path that had a hole so lately is less steady than one that had none.
const SHAKEN: Span = Span::from_secs(60); // a guess: a walk past a few access points
/// A path that loses more than one packet in so many is less steady than one that does not.
const LOSSY: u64 = 128; // a guess: below what makes a difference to a frame of ten packets

/// Between DATAGRAMs of a stream there is no more than this. // a guess: two pictures a second
const STREAM: Span = Span::from_millis(500);

/// Which paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathSelection {
    /// Whichever the path scheduler chooses.
    #[default]
    Any,
    /// The one that is least likely to fail: no hole in the last minute, not half duplex, few losses, then
    /// the shortest round trip.
    Steadiest,
    /// A copy on every path.
    Each,
}

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
