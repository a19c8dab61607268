//! How a download ends, and the words for why it waits: exit codes and reason codes.

use std::process::ExitCode;

use serde::{Deserialize, Serialize};

/// How a command ended, for scripts. The numbers are part of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferExit {
    /// The object is whole, and in time.
    Done = 0,
    /// The transfer failed; the message says whose fault.
    Error = 1,
    /// The command line makes no sense.
    Usage = 2,
    /// Stopped by the user; the partial can be continued.
    Cancelled = 3,
    /// The deadline passed. The object may be whole all the same, only late.
    DeadlineMissed = 10,
    /// Links that cost carried all they may, and no other was there in time.
    BudgetExhausted = 11,
    /// The bytes are not those `--integrity` names.
    IntegrityMismatch = 12,
    /// The origin sent different bytes too often.
    OriginChanged = 13,
    /// No link may be used, and waiting was not wanted.
    NoPermittedPath = 14,
}

impl TransferExit {
    /// Every exit code.
    pub const ALL: [TransferExit; 9] = [
        TransferExit::Done,
        TransferExit::Error,
        TransferExit::Usage,
        TransferExit::Cancelled,
        TransferExit::DeadlineMissed,
        TransferExit::BudgetExhausted,
        TransferExit::IntegrityMismatch,
        TransferExit::OriginChanged,
        TransferExit::NoPermittedPath,
    ];

    /// The one with this number.
    pub fn of(number: u64) -> Option<TransferExit> {
        TransferExit::ALL
            .into_iter()
            .find(|exit| *exit as u64 == number)
    }
}

impl From<TransferExit> for ExitCode {
    fn from(exit: TransferExit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Why something waits or failed, for scripts and logs: the product's one list, of which these
/// are the ones a download can meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferReason {
    /// No link is up.
    NoPath,
    /// Only links that cost are up, and there is time.
    PathCost,
    /// Metered links carried what they may.
    OverBudget,
    /// Only a roaming link is up.
    RoamingBlocked,
    /// The origin does not answer, or asks us to come back.
    OriginWait,
    /// The origin's bytes are not those we began with.
    OriginChanged,
    /// The address worked before and does not any more.
    UrlExpired,
    /// The origin wants credentials.
    AuthRequired,
    /// The disk is full.
    StorageFull,
    /// The user stopped it.
    UserPaused,
    /// Flows with earlier deadlines go first.
    QueuedBehind,
    /// A link is up and carries nothing.
    PathTooSlow,
    /// A link asks to sign in before it carries anything.
    Portal,
    /// The proxy does not answer, or is not who its address says.
    ProxyUnreachable,
}

impl From<d2tp_sched::LinkWaitReason> for TransferReason {
    fn from(hold: d2tp_sched::LinkWaitReason) -> TransferReason {
        use d2tp_sched::LinkWaitReason;
        match hold {
            LinkWaitReason::NoPath => TransferReason::NoPath,
            LinkWaitReason::PathCost => TransferReason::PathCost,
            LinkWaitReason::OverBudget => TransferReason::OverBudget,
            LinkWaitReason::RoamingBlocked => TransferReason::RoamingBlocked,
            LinkWaitReason::QueuedBehind => TransferReason::QueuedBehind,
            LinkWaitReason::PathTooSlow => TransferReason::PathTooSlow,
        }
    }
}

impl TransferReason {
    /// The code as it is printed.
    pub fn code(self) -> String {
        serde_json::to_value(self)
            .ok()
            .and_then(|v| Some(v.as_str()?.to_owned()))
            .unwrap_or_default()
    }
}

/// How one goes on that stopped, without an agent.
pub(crate) const AGAIN_ALONE: &str = "run the same command to resume";

/// The end of a download that did not succeed.
#[derive(Debug, Clone)]
pub struct TransferFailure {
    /// The exit code.
    pub exit: TransferExit,
    /// The reason code, where one fits.
    pub reason: Option<TransferReason>,
    /// For people: whose fault it was, where, and what to do next.
    pub text: String,
}

impl TransferFailure {
    /// A failure without a reason code.
    pub fn error(text: impl Into<String>) -> TransferFailure {
        TransferFailure {
            exit: TransferExit::Error,
            reason: None,
            text: text.into(),
        }
    }

    /// A failure with its reason code.
    pub fn of(
        exit: TransferExit,
        reason: TransferReason,
        text: impl Into<String>,
    ) -> TransferFailure {
        TransferFailure {
            exit,
            reason: Some(reason),
            text: text.into(),
        }
    }

    /// A command line that makes no sense.
    pub fn usage(text: impl Into<String>) -> TransferFailure {
        TransferFailure {
            exit: TransferExit::Usage,
            ..TransferFailure::error(text)
        }
    }

    /// A disk that refused, in words that say what to do.
    pub fn storage(what: &str, error: &std::io::Error) -> TransferFailure {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        if matches!(error.kind(), StorageFull | QuotaExceeded) {
            let text = format!("{what}: {error}; make room, then {AGAIN_ALONE}");
            return TransferFailure::of(TransferExit::Error, TransferReason::StorageFull, text);
        }
        TransferFailure::error(format!(
            "{what}: {error}; check that disk, or name a file on another one with -o"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_interface() {
        assert_eq!(TransferReason::RoamingBlocked.code(), "roaming_blocked");
        assert_eq!(TransferReason::OriginChanged.code(), "origin_changed");
        assert_eq!(TransferExit::IntegrityMismatch as u8, 12);
        assert_eq!(TransferExit::NoPermittedPath as u8, 14);
    }
}
