//! Why a run has no result: the scenario needs something that the simulator does not support, or an
//! invariant of the core is violated.

use d2tp_session::{FlowId, SessionEnd};

/// What ended a run before its report.
#[derive(Debug, thiserror::Error)]
pub enum SimFault {
    /// The scenario needs something that only the lab supports.
    #[error("flow {flow}: a url needs real sockets: use `cedos lab run`, or give bytes instead")]
    Url {
        /// The flow's id in the scenario.
        flow: String,
    },
    /// The scenario has podcasts, which are fetched by a program.
    #[error("podcasts need real sockets: use `cedos lab run`, or `cedos repro readycast-week`")]
    Podcasts,
    /// An application read a byte that was not written.
    #[error("the core is wrong: flow {flow:?} has a wrong byte at offset {offset}")]
    WrongByte {
        /// The flow that the fault is about.
        flow: FlowId,
        /// The offset of the byte.
        offset: u64,
    },
    /// An application would have continued to read at another offset than where it stopped.
    #[error("the core is wrong: flow {flow:?} goes on at offset {got}, expected {expected}")]
    Skipped {
        /// The flow that the fault is about.
        flow: FlowId,
        /// The offset of the application.
        expected: u64,
        /// The offset of the session.
        got: u64,
    },
    /// An application could read beyond the end.
    #[error("the core is wrong: flow {flow:?} has bytes after its end at {offset}")]
    BeyondEnd {
        /// The flow that the fault is about.
        flow: FlowId,
        /// The offset of the end.
        offset: u64,
    },
    /// An end never becomes idle at one point in time, or time does not advance.
    #[error("the core is wrong: live-lock at {at_s} s: {what}")]
    LiveLock {
        /// The time of the fault.
        at_s: f64,
        /// What repeats without end.
        what: String,
    },
    /// No progress for a long time although a permitted link carried packets.
    #[error(
        "the core is wrong: no progress from {since_s} s to {at_s} s over a good link: {state}"
    )]
    Stuck {
        /// The time of the last progress, or when the link became good.
        since_s: f64,
        /// When the run was given up.
        at_s: f64,
        /// The state of both ends in a few words.
        state: String,
    },
    /// An end continued a flow below an offset that its peer knew to be durable.
    #[error("the core is wrong: flow {flow:?} was rolled back and not refused")]
    RolledBack {
        /// The flow that the fault is about.
        flow: FlowId,
    },
    /// A journal without a lost commit lacked data that had been reported as durable.
    #[error("the core is wrong: the {who} called durable what its journal does not hold")]
    NotDurable {
        /// The end at fault: device or proxy.
        who: &'static str,
    },
    /// A flow ended because of its deadline, before its deadline.
    #[error("the core is wrong: flow {flow:?} ended before its deadline")]
    EndedEarly {
        /// The flow that the fault is about.
        flow: FlowId,
    },
    /// A flow still exists after its deadline.
    #[error("the core is wrong: flow {flow:?} is still open at the {who} after its deadline")]
    Overdue {
        /// The flow that the fault is about.
        flow: FlowId,
        /// The end at fault: device or proxy.
        who: &'static str,
    },
    /// A session ended by a fault, although both ends are correct.
    #[error("the core is wrong: the {who}'s session ended: {end}")]
    Ended {
        /// The end at fault: device or proxy.
        who: &'static str,
        /// The reason for which the session ended.
        end: SessionEnd,
    },
    /// An end exceeds a limit.
    #[error("the core is wrong: a bound is broken at {at_s} s: {what}")]
    Bound {
        /// The time of the fault.
        at_s: f64,
        /// The limit, and the excess.
        what: String,
    },
    /// An end cannot read its own record.
    #[error("the core is wrong: a record does not come back: {0}")]
    Record(#[from] d2tp_session::RecordError),
    /// The log could not be written.
    #[error("the log cannot be written: {0}")]
    Log(#[from] std::io::Error),
}

impl SimFault {
    /// Checks whether a session may end like this between correct ends.
    pub(crate) fn of_end(who: &'static str, end: &SessionEnd) -> Result<(), SimFault> {
        match end {
            // A server that waited in vain, and its later answer; early data that was never
            // confirmed.
            SessionEnd::Local | SessionEnd::Unconfirmed => Ok(()),
            end => Err(SimFault::Ended {
                who,
                end: end.clone(),
            }),
        }
    }
}
