//! The states of a transfer and their transitions.
//!
//! ```text
//!  Choosing ── link granted ──▶ Asking ── answered ──▶ Moving ── completed ──▶ Whole
//!   ▲ │ ▲ ▲                      │  │                   │  │
//!   │ │ │ └──────── left ────────┴──┼───────────────────┘  │
//!   │ │ └── wait over ─ BackingOff ◀┴───── faulted ────────┘
//!   │ └ link denied ─▶ Waiting
//!   └── wait over ───────┘           gave up: from every state before the end ──▶ Failed
//! ```
//!
//! A flow through a proxy that is paused or has no network stays in `Moving`: it stays in its
//! session and continues from there.

/// The state of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TransferState {
    /// The transfer chooses a link, or opens a session.
    Choosing,
    /// No link may be used now.
    Waiting,
    /// A request was sent; the head of the answer has not arrived.
    Asking,
    /// Bytes of the object are moving.
    Moving,
    /// A try failed, and the next one is not due yet.
    BackingOff,
    /// Every byte is at its destination.
    Whole,
    /// The transfer ended before it was complete.
    Failed,
}

/// An event that changes the state of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TransferTrigger {
    /// A link, or a session, may be used.
    LinkGranted,
    /// No link may be used.
    LinkDenied,
    /// The head of an answer that continues the object came.
    Answered,
    /// The transfer leaves its link, or needs another request.
    Left,
    /// The try failed, and another one may succeed.
    Faulted,
    /// A link changed, or enough time passed.
    WaitOver,
    /// There is no byte left to move.
    Completed,
    /// Another try is pointless or not wanted.
    GaveUp,
}

/// Every permitted change of state; no other pair of state and trigger ever occurs.
const TRANSITIONS: [(TransferState, TransferTrigger, TransferState); 16] = {
    use TransferState::{Asking, BackingOff, Choosing, Failed, Moving, Waiting, Whole};
    use TransferTrigger::{
        Answered, Completed, Faulted, GaveUp, Left, LinkDenied, LinkGranted, WaitOver,
    };
    [
        (Choosing, LinkGranted, Asking),
        (Choosing, LinkDenied, Waiting),
        (Choosing, Completed, Whole),
        (Choosing, GaveUp, Failed),
        (Waiting, WaitOver, Choosing),
        (Waiting, GaveUp, Failed),
        (Asking, Answered, Moving),
        (Asking, Left, Choosing),
        (Asking, Faulted, BackingOff),
        (Asking, GaveUp, Failed),
        (Moving, Completed, Whole),
        (Moving, Left, Choosing),
        (Moving, Faulted, BackingOff),
        (Moving, GaveUp, Failed),
        (BackingOff, WaitOver, Choosing),
        (BackingOff, GaveUp, Failed),
    ]
};

impl TransferState {
    /// The state after `trigger`; none if that cannot happen.
    pub(super) fn after(self, trigger: TransferTrigger) -> Option<TransferState> {
        let row = TRANSITIONS
            .iter()
            .find(|(from, by, _)| (*from, *by) == (self, trigger));
        row.map(|(_, _, to)| *to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TransferState::{Asking, BackingOff, Choosing, Failed, Moving, Waiting, Whole};
    use TransferTrigger::{
        Answered, Completed, Faulted, GaveUp, Left, LinkDenied, LinkGranted, WaitOver,
    };

    const STATES: [TransferState; 7] =
        [Choosing, Waiting, Asking, Moving, BackingOff, Whole, Failed];
    const TRIGGERS: [TransferTrigger; 8] = [
        LinkGranted,
        LinkDenied,
        Answered,
        Left,
        Faulted,
        WaitOver,
        Completed,
        GaveUp,
    ];

    /// Written out once more, a row for each state: what the table says must be meant.
    #[rustfmt::skip]
    const EXPECTED: [[Option<TransferState>; 8]; 7] = [
        // LinkGranted  LinkDenied     Answered      Left            Faulted           WaitOver        Completed    GaveUp
        [Some(Asking), Some(Waiting), None,         None,           None,             None,           Some(Whole), Some(Failed)], // Choosing
        [None,         None,          None,         None,           None,             Some(Choosing), None,        Some(Failed)], // Waiting
        [None,         None,          Some(Moving), Some(Choosing), Some(BackingOff), None,           None,        Some(Failed)], // Asking
        [None,         None,          None,         Some(Choosing), Some(BackingOff), None,           Some(Whole), Some(Failed)], // Moving
        [None,         None,          None,         None,           None,             Some(Choosing), None,        Some(Failed)], // BackingOff
        [None,         None,          None,         None,           None,             None,           None,        None],         // Whole
        [None,         None,          None,         None,           None,             None,           None,        None],         // Failed
    ];

    #[test]
    fn every_pair_of_state_and_trigger_leads_where_it_is_meant_to() {
        for (state, row) in STATES.into_iter().zip(EXPECTED) {
            for (trigger, expected) in TRIGGERS.into_iter().zip(row) {
                assert_eq!(state.after(trigger), expected, "{state:?} on {trigger:?}");
            }
        }
    }

    #[test]
    fn no_pair_stands_in_the_table_twice() {
        for (at, (state, trigger, _)) in TRANSITIONS.iter().enumerate() {
            let again = TRANSITIONS[at + 1..].iter();
            let mut same = again.filter(|(from, by, _)| (from, by) == (state, trigger));
            assert_eq!(same.next(), None);
        }
    }

    #[test]
    fn every_state_can_be_reached_and_each_but_the_last_two_left() {
        for state in STATES {
            let reached = TRANSITIONS.iter().any(|(_, _, to)| *to == state);
            assert!(reached, "{state:?}");
            let left = TRANSITIONS.iter().any(|(from, _, _)| *from == state);
            assert_eq!(left, !matches!(state, Whole | Failed), "{state:?}");
        }
    }
}
