//! States of an end, by which a crash can choose its moment and runs are counted.

use serde::Deserialize;

/// Where a session, one of its paths or one of its flows is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// There is no session.
    #[serde(rename = "no-session")]
    None,
    /// A first handshake is under way.
    Handshaking,
    /// The session works.
    Established,
    /// It has no path.
    Suspended,
    /// It is a record.
    Hibernated,
    /// It knocks again, or claims its flows.
    Waking,
    /// The process is not there.
    Away,
    /// A path on which nothing was heard yet.
    PathOpening,
    /// A path that works.
    PathActive,
    /// A path that stopped answering.
    PathSilent,
    /// A flow that waits to be claimed.
    FlowUnclaimed,
    /// A flow that is open both ways.
    FlowOpen,
    /// A flow of which this end wrote its end.
    FlowHalfClosedHere,
    /// A flow of which the other end wrote its end.
    FlowHalfClosedThere,
    /// A flow of which both ends are known.
    FlowDraining,
}

impl State {
    /// All of them.
    pub const ALL: [State; 15] = [
        State::None,
        State::Handshaking,
        State::Established,
        State::Suspended,
        State::Hibernated,
        State::Waking,
        State::Away,
        State::PathOpening,
        State::PathActive,
        State::PathSilent,
        State::FlowUnclaimed,
        State::FlowOpen,
        State::FlowHalfClosedHere,
        State::FlowHalfClosedThere,
        State::FlowDraining,
    ];

    /// The word used in files and reports.
    pub fn word(self) -> &'static str {
        match self {
            State::None => "no-session",
            State::Handshaking => "handshaking",
            State::Established => "established",
            State::Suspended => "suspended",
            State::Hibernated => "hibernated",
            State::Waking => "waking",
            State::Away => "away",
            State::PathOpening => "path-opening",
            State::PathActive => "path-active",
            State::PathSilent => "path-silent",
            State::FlowUnclaimed => "flow-unclaimed",
            State::FlowOpen => "flow-open",
            State::FlowHalfClosedHere => "flow-half-closed-here",
            State::FlowHalfClosedThere => "flow-half-closed-there",
            State::FlowDraining => "flow-draining",
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
        for state in State::ALL {
            let word: StrDeserializer<'_, Error> = state.word().into_deserializer();
            assert_eq!(State::deserialize(word), Ok(state));
        }
    }
}
