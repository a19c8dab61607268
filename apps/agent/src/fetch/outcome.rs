//! The outcomes of a download, and the reasons why it waits: exit codes and reason codes.

use std::process::ExitCode;

use serde::{Deserialize, Serialize};

/// The exit code of a command, for scripts. The numbers are part of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferExit {
    /// The object is complete, and in time.
    Done = 0,
    /// The transfer failed; the message says whose fault.
    Error = 1,
    /// The command line is invalid.
    Usage = 2,
    /// The user stopped the transfer; it can be continued.
    Cancelled = 3,
    /// The deadline passed. The object may be complete, but late.
    DeadlineMissed = 10,
    /// Metered links carried all they may, and no free one was up in time.
    BudgetExhausted = 11,
    /// The bytes do not have the digest that `--integrity` names.
    IntegrityMismatch = 12,
    /// The origin's object changed too often.
    OriginChanged = 13,
    /// No link may be used, and waiting was not allowed.
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

    /// The exit code with this number.
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

/// Why a transfer waits or failed, for scripts and logs: the product's common list, of which these are
/// the ones that a transfer can meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferReason {
    /// No link is up.
    NoPath,
    /// Only metered links are up, and there is time.
    PathCost,
    /// Metered links carried all they may.
    OverBudget,
    /// Only a roaming link is up.
    RoamingBlocked,
    /// The origin does not answer, or asks to wait.
    OriginWait,
    /// The origin's object changed.
    OriginChanged,
    /// The URL worked before and no longer does.
    UrlExpired,
    /// The origin asks for credentials.
    AuthRequired,
    /// The disk is full.
    StorageFull,
    /// The user paused the transfer.
    UserPaused,
    /// Transfers with earlier deadlines go first.
    QueuedBehind,
    /// A link is up and carries nothing.
    PathTooSlow,
    /// The links that are up need much energy, and there is time to wait for one that needs less.
    SavesEnergy,
    /// A link has a captive portal.
    Portal,
    /// The proxy does not answer, or has another key than its address says.
    ProxyUnreachable,
    /// The proxy or server answers, and accepts no session of this device.
    ProxyRefused,
    /// The proxy's host answers neither over UDP nor over TCP.
    NetworkBlocked,
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
            LinkWaitReason::SavesEnergy => TransferReason::SavesEnergy,
        }
    }
}

impl TransferReason {
    /// The reason in a few words, for a list of transfers; none for what the state says already.
    pub fn words(self) -> Option<&'static str> {
        Some(match self {
            TransferReason::NoPath => "no network is up",
            TransferReason::PathCost => "only metered networks are up",
            TransferReason::OverBudget => "the limit on metered data is used up",
            TransferReason::RoamingBlocked => "only a roaming network is up",
            TransferReason::OriginWait => "the server does not answer or asks to wait",
            TransferReason::OriginChanged => "the server changed the content",
            TransferReason::UrlExpired => "the server no longer has this URL",
            TransferReason::AuthRequired => "the server requires a password",
            TransferReason::StorageFull => "the disk is full",
            TransferReason::QueuedBehind => "other transfers go first",
            TransferReason::PathTooSlow => "the network carries nothing",
            TransferReason::SavesEnergy => "it saves energy until Wi-Fi is up",
            TransferReason::Portal => "the network requires a sign-in",
            TransferReason::ProxyUnreachable => "the proxy does not answer",
            TransferReason::ProxyRefused => "the proxy refuses this device",
            TransferReason::NetworkBlocked => "the network blocks the proxy, or its host is off",
            TransferReason::UserPaused => return None,
        })
    }

    /// The code as it is printed.
    pub fn code(self) -> String {
        serde_json::to_value(self)
            .ok()
            .and_then(|v| Some(v.as_str()?.to_owned()))
            .unwrap_or_default()
    }
}

/// How to continue a stopped transfer without an agent.
pub(crate) const AGAIN_ALONE: &str = "run the same command to resume";

/// How a transfer failed.
#[derive(Debug, Clone)]
pub struct TransferFailure {
    /// The exit code.
    pub exit: TransferExit,
    /// The reason code, if one applies.
    pub reason: Option<TransferReason>,
    /// A text for users: what failed, why, and what to do next.
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

    /// The failure of an invalid command line.
    pub fn usage(text: impl Into<String>) -> TransferFailure {
        TransferFailure {
            exit: TransferExit::Usage,
            ..TransferFailure::error(text)
        }
    }

    /// The failure of a disk operation, with what to do about it.
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
