//! Which pairs of fault and state cannot occur, and why.

use crate::coverage::Pair;
use cedos_lab_scenario::State;

/// Why this pair cannot occur, if it cannot.
pub(crate) fn impossible(pair: Pair) -> Option<&'static str> {
    let Pair {
        fault,
        at_device,
        state,
    } = pair;
    match (fault, at_device, state) {
        (_, false, State::Handshaking) => {
            Some("a server has no session before its first handshake is complete")
        }
        (_, true, State::None) => Some("the device's session is never closed, only asleep or away"),
        _ => None,
    }
}
