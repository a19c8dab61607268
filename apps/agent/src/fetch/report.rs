//! Reports of progress for people and scripts: a bar, plain lines, or one JSON object per line.

mod batch;
mod digest_progress;
mod mirror_counts;
mod observers;
mod progress_line;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use d2tp_sched::{CompletionEstimate, likelihood};
use serde::{Deserialize, Serialize};

use super::mode::FetchMode;
use super::object_version::ObjectVersion;
use super::outcome::{TransferFailure, TransferReason};
use crate::terms::TransferTerms;

pub use batch::{BatchObserver, BatchOutput, BatchReporter, BatchSummary};
pub use digest_progress::DigestProgress;
pub use mirror_counts::{MirrorCounts, done_to_files};
pub use observers::{BarObserver, JsonObserver, LineObserver, ObserverPair};

pub use cedos_terminal::{print_stderr, print_stdout};

/// An event of a running transfer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TransferEvent {
    /// The first event: the destination is open.
    Begun {
        /// The URL asked for, without credentials.
        url: String,
        /// The destination of the object; `-` for standard output.
        file: String,
        /// Which host talks to the origin.
        mode: FetchMode,
        /// Bytes of the object that an earlier run left.
        held_bytes: u64,
    },
    /// The progress, once a second while bytes arrive.
    Progress {
        /// Seconds since the start.
        t_s: f64,
        /// Bytes received so far.
        bytes: u64,
        /// Size of the object, if known.
        length: Option<u64>,
        /// Rate over the last second, bytes per second.
        rate_bytes_per_s: f64,
        /// The link in use.
        link: String,
        /// Payload bytes by link so far.
        bytes_by_link: BTreeMap<String, u64>,
        /// Payload bytes that metered links carried so far.
        #[serde(default)]
        metered_bytes: u64,
        /// Why this link is used, in words.
        why: String,
        /// Which host talks to the origin.
        mode: FetchMode,
        /// The estimate for the deadline; none without one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        promise: Option<DeadlinePromise>,
    },
    /// The transfer continues over another link.
    Switch {
        /// Seconds since the start.
        t_s: f64,
        /// The link left; none at the start.
        from: Option<String>,
        /// The link taken.
        to: String,
        /// The reason in words.
        why: String,
        /// `make-before-break` or `break-before-make`, if the transport reports it.
        kind: Option<Cow<'static, str>>,
        /// Milliseconds between the last byte before the switch and the first after it, if known.
        silence_ms: Option<f64>,
    },
    /// Nothing moves, and why.
    Waiting {
        /// Seconds since the start.
        t_s: f64,
        /// The reason code.
        reason: TransferReason,
        /// The reason in words.
        why: String,
        /// What would end the wait.
        unblocks: String,
    },
    /// Information that does not affect the transfer.
    Note {
        /// Seconds since the start.
        t_s: f64,
        /// The reason code, if one applies.
        reason: Option<TransferReason>,
        /// The text of the information.
        text: String,
    },
    /// The end: the object is complete.
    Done(TransferReport),
    /// The end: the object is not complete.
    Error(TransferReport),
}

/// The probability from which a transfer counts as on track.
pub const ON_TRACK: f64 = 0.8; // a guess

/// The estimate of a transfer that has a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DeadlinePromise {
    /// The probability that the transfer is ready in time.
    pub p: f64,
    /// Whether success is so unlikely that waiting is pointless.
    pub infeasible: bool,
    /// Expected bytes still to come on metered links.
    pub metered_bytes_expected: u64,
    /// The 95th percentile of the bytes still to come on metered links.
    pub metered_bytes_95: u64,
    /// The maximum of the bytes still to come on metered links.
    pub metered_bytes_worst: u64,
    /// Seconds until the deadline.
    pub left_s: f64,
}

impl DeadlinePromise {
    /// The estimate that follows from the scheduler's, with this much time left. The scheduler also
    /// counts on links that are not up: where metered links are not allowed, none of their bytes are
    /// included.
    pub fn of(promise: &CompletionEstimate, left: Duration, may_cost: bool) -> DeadlinePromise {
        let paid = |bytes: u64| if may_cost { bytes } else { 0 };
        DeadlinePromise {
            p: (promise.ready * 1e3).round() / 1e3,
            infeasible: promise.is_infeasible(),
            metered_bytes_expected: paid(promise.expected_metered_bytes),
            metered_bytes_95: paid(promise.worst_metered_bytes),
            metered_bytes_worst: paid(promise.most_metered_bytes),
            left_s: left.as_secs_f64(),
        }
    }

    /// The estimate in words.
    pub fn describe(&self) -> String {
        let chance = self.chance();
        if self.metered_bytes_worst == 0 {
            return format!("{chance}; no metered data");
        }
        format!(
            "{chance}; metered data: {} expected, {} at most",
            human_bytes(self.metered_bytes_expected),
            human_bytes(self.metered_bytes_worst)
        )
    }
}

impl DeadlinePromise {
    /// Whether the transfer is likely to be on time.
    pub fn is_on_track(&self) -> bool {
        !self.infeasible && self.p >= ON_TRACK
    }

    /// The probability in words.
    pub fn chance(&self) -> String {
        match self.p {
            p if self.infeasible => format!("not feasible, {} likely to be on time", likelihood(p)),
            p if p >= ON_TRACK => format!("on track, {} likely to be on time", likelihood(p)),
            p => format!("at risk, {} likely to be on time", likelihood(p)),
        }
    }
}

/// The report of a finished transfer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TransferReport {
    /// `get` or `put`.
    pub verb: Cow<'static, str>,
    /// The URL asked for, without credentials.
    pub url: String,
    /// Which host talked to the origin.
    pub mode: FetchMode,
    /// The destination of the object; `-` for standard output.
    pub file: String,
    /// Bytes of the object received, in this run or earlier ones.
    pub bytes: u64,
    /// The digest of the object's bytes, in hex.
    pub sha256: String,
    /// Payload bytes received in this run, by link; their sum is what the networks carried.
    pub bytes_by_link: BTreeMap<String, u64>,
    /// The payload bytes that metered links carried.
    #[serde(default)]
    pub metered_bytes: u64,
    /// Bytes of the object that earlier runs left.
    #[serde(default)]
    pub held_bytes: u64,
    /// Length of this run, in seconds.
    pub duration_s: f64,
    /// Seconds from the start to the first new byte; none if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_byte_s: Option<f64>,
    /// Seconds from the start to the last new byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_byte_s: Option<f64>,
    /// The deadline, in seconds from the start; none if there was none.
    pub deadline_s: Option<f64>,
    /// Whether the object was complete by the deadline; none without one, or if the transfer failed before it.
    pub deadline_met: Option<bool>,
    /// The first estimate; none without a deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promise: Option<DeadlinePromise>,
    /// Times the transfer moved from one link to another.
    pub switches: u32,
    /// Payload bytes that were received more than once, or discarded.
    pub duplicate_bytes: u64,
    /// A content coding that the origin applied without request; the bytes are stored encoded.
    pub content_encoding: Option<String>,
    /// The exit code.
    pub exit: u8,
    /// The reason code of a failure, if one applies.
    pub reason: Option<TransferReason>,
    /// What failed and what to do, in words.
    pub text: Option<String>,
    /// Bytes from which a later run can continue.
    pub resumable_bytes: u64,
    /// Whether a later run starts from zero because the server cannot resume.
    #[serde(default, skip_serializing_if = "is_false")]
    pub starts_over: bool,
    /// What a proxy would have improved in this run.
    pub proxy_would_add: Option<String>,
    /// The status of the origin's answer to an upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The text of the origin's answer to an upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    /// Whether the object was there already in its current version, so that nothing was transferred.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unchanged: bool,
    /// The version of the object as the origin names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<ObjectVersion>,
    /// How the files ended, if a folder was mirrored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<MirrorCounts>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_false(value: &bool) -> bool {
    !*value
}

impl TransferReport {
    /// The report of a transfer that failed before it started.
    pub fn failed(
        verb: &'static str,
        (url, file): (String, String),
        mode: FetchMode,
        terms: &TransferTerms,
        failure: &TransferFailure,
    ) -> TransferReport {
        TransferReport {
            verb: verb.into(),
            url,
            mode,
            file,
            bytes: 0,
            sha256: String::new(),
            bytes_by_link: BTreeMap::new(),
            metered_bytes: 0,
            held_bytes: 0,
            duration_s: 0.0,
            first_byte_s: None,
            last_byte_s: None,
            deadline_s: terms.time_left().map(|left| left.as_secs_f64()),
            deadline_met: match terms.time_left() {
                Some(Duration::ZERO) => Some(false),
                _ => None,
            },
            promise: None,
            switches: 0,
            duplicate_bytes: 0,
            content_encoding: None,
            exit: failure.exit as u8,
            reason: failure.reason,
            text: Some(failure.text.clone()),
            resumable_bytes: 0,
            starts_over: false,
            proxy_would_add: None,
            status: None,
            answer: None,
            unchanged: false,
            version: None,
            mirror: None,
        }
    }
}

/// An observer of a transfer's events.
pub trait TransferObserver: Send {
    /// Handles an event. Called in order, from the transfer itself, so it must not block for long.
    fn on_event(&mut self, event: &TransferEvent);
}

/// The link name where the system's routes decide: for a proxy on this machine or a local network.
pub const NO_LINK: &str = "any";
/// The reason that is shown for [`NO_LINK`].
pub const NO_LINK_WHY: &str = "the proxy is on this machine or a local network";

/// A link's name for users.
pub fn link_label(link: &str) -> &str {
    match link {
        NO_LINK => "the local network",
        name => name,
    }
}

/// A number of bytes for users.
pub fn human_bytes(bytes: u64) -> String {
    indicatif::DecimalBytes(bytes).to_string()
}
