//! What happens to the files of a folder that is mirrored, for people, scripts and clients of the agent.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::fetch::outcome::TransferReason;
use crate::fetch::report::TransferEvent;

/// An event of a folder that is mirrored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum MirrorEvent {
    /// A file was transferred or deleted.
    File {
        /// `downloaded`, `uploaded` or `deleted`.
        action: Cow<'static, str>,
        /// The path of the file below the folder.
        path: String,
        /// The length of the file, if known.
        bytes: Option<u64>,
        /// Whether nothing was done yet.
        dry_run: bool,
    },
    /// A file or a folder could not be transferred.
    Failed {
        /// The path below the folder.
        path: String,
        /// The exit code of the failure.
        exit: u8,
        /// The reason code, if one applies.
        reason: Option<TransferReason>,
        /// The failure in words.
        text: String,
    },
    /// Information that affects no file.
    Note {
        /// The text of the information.
        text: String,
    },
    /// Nothing moves, and why.
    Waiting {
        /// The reason code.
        reason: TransferReason,
        /// The reason in words.
        why: String,
        /// What would end the wait.
        unblocks: String,
    },
}

/// Who is told of a folder that is mirrored.
pub trait MirrorObserver: Send + Sync {
    /// Handles an event. It is called from a transfer, so it must not block for long.
    fn on_event(&self, event: &MirrorEvent);

    /// Handles the progress of all files together: once a second while bytes move, and as soon as metered links
    /// carried some.
    fn on_progress(&self, _progress: &TransferEvent) {}
}
