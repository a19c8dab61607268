//! Why a run is no result: the scenario asks for what the simulator cannot do, or an invariant of
//! the core broke.

use d2tp_session::{FlowId, SessionEnd};

/// What ended a run before its report.
#[derive(Debug, thiserror::Error)]
pub enum SimFault {
    /// The scenario asks for something only the lab has.
    #[error("flow {flow}: a url needs real sockets: use `cedos lab run`, or give bytes instead")]
    Url {
        /// The flow's id in the scenario.
        flow: String,
    },
    /// An application read something that was not written.
    #[error("the core is wrong: flow {flow:?} has a wrong byte at offset {offset}")]
    WrongByte {
        /// The flow that the fault is about.
        flow: FlowId,
        /// Where.
        offset: u64,
    },
    /// An application would have read on at another offset than where it stopped.
    #[error("the core is wrong: flow {flow:?} goes on at offset {got}, expected {expected}")]
    Skipped {
        /// The flow that the fault is about.
        flow: FlowId,
        /// Where the application is.
        expected: u64,
        /// Where the session is.
        got: u64,
    },
    /// An application read on after the end.
    #[error("the core is wrong: flow {flow:?} has bytes after its end at {offset}")]
    BeyondEnd {
        /// The flow that the fault is about.
        flow: FlowId,
        /// Its end.
        offset: u64,
    },
    /// An end never falls silent at one instant, or time does not advance.
    #[error("the core is wrong: live-lock at {at_s} s: {what}")]
    LiveLock {
        /// When.
        at_s: f64,
        /// What goes on without end.
        what: String,
    },
    /// Nothing moved for a long time although a permitted link carried packets.
    #[error(
        "the core is wrong: no progress from {since_s} s to {at_s} s over a good link: {state}"
    )]
    Stuck {
        /// The last progress, or when the link became good.
        since_s: f64,
        /// When it was given up.
        at_s: f64,
        /// Both ends in a few words.
        state: String,
    },
    /// An end went on below what the other knew to be durable there.
    #[error("the core is wrong: flow {flow:?} was rolled back and not refused")]
    RolledBack {
        /// The flow that the fault is about.
        flow: FlowId,
    },
    /// A journal without a lost commit did not hold what had been called durable.
    #[error("the core is wrong: the {who} called durable what its journal does not hold")]
    NotDurable {
        /// Which end.
        who: &'static str,
    },
    /// A flow ended for its deadline, before its deadline.
    #[error("the core is wrong: flow {flow:?} ended before its deadline")]
    EndedEarly {
        /// The flow that the fault is about.
        flow: FlowId,
    },
    /// A flow is still there after its deadline.
    #[error("the core is wrong: flow {flow:?} is still open at the {who} after its deadline")]
    Overdue {
        /// The flow that the fault is about.
        flow: FlowId,
        /// Which end.
        who: &'static str,
    },
    /// A session ended by a fault, though both ends are honest.
    #[error("the core is wrong: the {who}'s session ended: {end}")]
    Ended {
        /// Which end.
        who: &'static str,
        /// Why.
        end: SessionEnd,
    },
    /// An end holds more of something than it may.
    #[error("the core is wrong: a bound is broken at {at_s} s: {what}")]
    Bound {
        /// When.
        at_s: f64,
        /// Which, and by how much.
        what: String,
    },
    /// An end cannot read the record that it wrote itself.
    #[error("the core is wrong: a record does not come back: {0}")]
    Record(#[from] d2tp_session::RecordError),
    /// The log could not be written.
    #[error("the log cannot be written: {0}")]
    Log(#[from] std::io::Error),
}

impl SimFault {
    /// Whether a session may end like this between honest ends.
    pub(crate) fn of_end(who: &'static str, end: &SessionEnd) -> Result<(), SimFault> {
        match end {
            // A server that waited in vain, and what it answers then; early data nobody confirmed.
            SessionEnd::Local | SessionEnd::Unconfirmed => Ok(()),
            end => Err(SimFault::Ended {
                who,
                end: end.clone(),
            }),
        }
    }
}
