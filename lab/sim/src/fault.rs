//! Why a run is no result: the scenario asks for what the simulator cannot do, or an invariant of
//! the core broke.

use d2tp_session::FlowId;

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
        /// The flow.
        flow: FlowId,
        /// Where.
        offset: u64,
    },
    /// An application would have read on at another offset than where it stopped.
    #[error("the core is wrong: flow {flow:?} goes on at offset {got}, expected {expected}")]
    Skipped {
        /// The flow.
        flow: FlowId,
        /// Where the application is.
        expected: u64,
        /// Where the session is.
        got: u64,
    },
    /// An application read on after the end.
    #[error("the core is wrong: flow {flow:?} has bytes after its end at {offset}")]
    BeyondEnd {
        /// The flow.
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
    /// An end cannot read the record that it wrote itself.
    #[error("the core is wrong: a record does not come back: {0}")]
    Record(#[from] d2tp_session::RecordError),
    /// The log could not be written.
    #[error("the log cannot be written: {0}")]
    Log(#[from] std::io::Error),
}
