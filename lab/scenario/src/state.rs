//! States of an end, for crashes that wait for a state, and for counting them.

use serde::Deserialize;

/// The state of an end: of its session, one of its paths or one of its flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScenarioState {
    /// The device has no session.
    #[serde(rename = "no-session")]
    None,
    /// The first handshake is under way.
    Handshaking,
    /// The session is established.
    Established,
    /// The session has no path.
    Suspended,
    /// The session is a record.
    Hibernated,
    /// The session repeats the handshake, or claims its flows.
    Waking,
    /// The process is not running.
    Away,
    /// A path on which nothing has been received yet.
    PathOpening,
    /// A path that works.
    PathActive,
    /// A path that stopped answering.
    PathSilent,
    /// A flow that waits to be claimed.
    FlowUnclaimed,
    /// A flow that is open in both directions.
    FlowOpen,
    /// A flow whose direction from this end has ended.
    FlowHalfClosedHere,
    /// A flow whose direction from the other end has ended.
    FlowHalfClosedThere,
    /// A flow both of whose directions have ended, with data still to be handled.
    FlowDraining,
}

impl ScenarioState {
    /// Every state.
    pub const ALL: [ScenarioState; 15] = [
        ScenarioState::None,
        ScenarioState::Handshaking,
        ScenarioState::Established,
        ScenarioState::Suspended,
        ScenarioState::Hibernated,
        ScenarioState::Waking,
        ScenarioState::Away,
        ScenarioState::PathOpening,
        ScenarioState::PathActive,
        ScenarioState::PathSilent,
        ScenarioState::FlowUnclaimed,
        ScenarioState::FlowOpen,
        ScenarioState::FlowHalfClosedHere,
        ScenarioState::FlowHalfClosedThere,
        ScenarioState::FlowDraining,
    ];

    /// The word used in files and reports.
    pub fn word(self) -> &'static str {
        match self {
            ScenarioState::None => "no-session",
            ScenarioState::Handshaking => "handshaking",
            ScenarioState::Established => "established",
            ScenarioState::Suspended => "suspended",
            ScenarioState::Hibernated => "hibernated",
            ScenarioState::Waking => "waking",
            ScenarioState::Away => "away",
            ScenarioState::PathOpening => "path-opening",
            ScenarioState::PathActive => "path-active",
            ScenarioState::PathSilent => "path-silent",
            ScenarioState::FlowUnclaimed => "flow-unclaimed",
            ScenarioState::FlowOpen => "flow-open",
            ScenarioState::FlowHalfClosedHere => "flow-half-closed-here",
            ScenarioState::FlowHalfClosedThere => "flow-half-closed-there",
            ScenarioState::FlowDraining => "flow-draining",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::IntoDeserializer as _;
    use serde::de::value::{Error, StrDeserializer};

    #[test]
    fn files_and_reports_say_the_same_words() {
        for state in ScenarioState::ALL {
            let word: StrDeserializer<'_, Error> = state.word().into_deserializer();
            assert_eq!(ScenarioState::deserialize(word), Ok(state));
        }
    }
}
