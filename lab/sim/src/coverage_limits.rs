//! Pairs of fault and state that cannot occur, and why.

use crate::coverage::CoveragePair;
use cedos_lab_scenario::ScenarioState;

/// Why this pair cannot occur; `None` if it can.
pub(crate) fn impossible(pair: CoveragePair) -> Option<&'static str> {
    let CoveragePair {
        fault,
        at_device,
        state,
    } = pair;
    match (fault, at_device, state) {
        (_, false, ScenarioState::Handshaking) => {
            Some("a server has no session before its first handshake is complete")
        }
        (_, true, ScenarioState::None) => {
            Some("the device's session is never closed, only asleep or away")
        }
        _ => None,
    }
}
