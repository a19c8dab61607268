//! Telling people and scripts what happens: a bar, plain lines, or one JSON object per line.

mod digest_progress;
mod observers;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use d2tp_sched::CompletionEstimate;
use serde::{Deserialize, Serialize};

use super::mode::FetchMode;
use super::outcome::{TransferFailure, TransferReason};
use crate::terms::TransferTerms;

pub use digest_progress::DigestProgress;
pub use observers::{BarObserver, JsonObserver, LineObserver, ObserverPair};

/// What happens while a download runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TransferEvent {
    /// The first: the place for the bytes is open.
    Begun {
        /// The URL asked for, without credentials.
        url: String,
        /// Where the object goes; `-` for standard output.
        file: String,
        /// Who speaks to the origin.
        mode: FetchMode,
        /// Bytes of the object that an earlier run left.
        held_bytes: u64,
    },
    /// Once a second while bytes come.
    Progress {
        /// Seconds since the start.
        t_s: f64,
        /// Bytes held.
        bytes: u64,
        /// Bytes of the object, when known.
        length: Option<u64>,
        /// Rate over the last second, bytes per second.
        rate_bytes_per_s: f64,
        /// The link in use.
        link: String,
        /// Payload bytes by link so far.
        bytes_by_link: BTreeMap<String, u64>,
        /// Why this link, in words.
        why: String,
        /// Who speaks to the origin.
        mode: FetchMode,
        /// What can be promised; none without a deadline.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        promise: Option<DeadlinePromise>,
    },
    /// The transfer goes on over another link.
    Switch {
        /// Seconds since the start.
        t_s: f64,
        /// The link left; none at the start.
        from: Option<String>,
        /// The link taken.
        to: String,
        /// Why, in words.
        why: String,
        /// `make-before-break` or `break-before-make`, where the transport tells.
        kind: Option<Cow<'static, str>>,
        /// From the last byte before to the first one after, in milliseconds, where it tells.
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
    /// Something worth knowing that stops nothing.
    Note {
        /// Seconds since the start.
        t_s: f64,
        /// A reason code, where one fits.
        reason: Option<TransferReason>,
        /// In words.
        text: String,
    },
    /// The end: the object is whole.
    Done(TransferReport),
    /// The end: it is not.
    Error(TransferReport),
}

/// From this chance on a transfer is called on track.
pub const ON_TRACK: f64 = 0.8; // a guess

/// What was promised of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DeadlinePromise {
    /// How likely it is ready in time.
    pub p: f64,
    /// Whether success is so unlikely that there is no point in waiting for it.
    pub infeasible: bool,
    /// Bytes on metered links that are still to come, on average.
    pub metered_bytes_expected: u64,
    /// Bytes on links that cost that are exceeded in one case of twenty.
    pub metered_bytes_95: u64,
    /// More it never is.
    pub metered_bytes_worst: u64,
    /// Seconds until the deadline.
    pub left_s: f64,
}

impl DeadlinePromise {
    /// The promise that the scheduler's estimate makes with so much time left. The scheduler hopes
    /// for links that are not there: where none may cost, nothing of that is promised.
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

    /// For people.
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
    /// How likely it is, for people.
    pub fn chance(&self) -> String {
        match self.p {
            p if self.infeasible => format!("not feasible, {} likely to be on time", percent(p)),
            p if p >= ON_TRACK => format!("on track, {} likely to be on time", percent(p)),
            p => format!("at risk, {} likely to be on time", percent(p)),
        }
    }
}

/// The last object of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TransferReport {
    /// `get` or `put`.
    pub verb: Cow<'static, str>,
    /// The URL asked for, without credentials.
    pub url: String,
    /// Who spoke to the origin.
    pub mode: FetchMode,
    /// Where the object is, or would have been; `-` for standard output.
    pub file: String,
    /// Bytes of the object held, from now or earlier runs.
    pub bytes: u64,
    /// Digest of those bytes, in hex.
    pub sha256: String,
    /// Payload bytes received in this run, by link; their sum is what the networks carried.
    pub bytes_by_link: BTreeMap<String, u64>,
    /// Length of this run, in seconds.
    pub duration_s: f64,
    /// When the first byte that was not held came, in seconds from the start; none if none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_byte_s: Option<f64>,
    /// When the last did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_byte_s: Option<f64>,
    /// The deadline, in seconds from the start; none if there was none.
    pub deadline_s: Option<f64>,
    /// The object was whole by then.
    pub deadline_met: Option<bool>,
    /// What was promised first; none without a deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promise: Option<DeadlinePromise>,
    /// Times the transfer moved from one link to another.
    pub switches: u32,
    /// Payload bytes received that were held already, or thrown away.
    pub duplicate_bytes: u64,
    /// A coding of the bytes the origin applied unasked; they are stored as they came.
    pub content_encoding: Option<String>,
    /// The exit code.
    pub exit: u8,
    /// The reason code of a failure, where one fits.
    pub reason: Option<TransferReason>,
    /// What went wrong and what to do, in words.
    pub text: Option<String>,
    /// Bytes a later run can continue from.
    pub resumable_bytes: u64,
    /// What a proxy would have added to this run.
    pub proxy_would_add: Option<String>,
    /// The status the origin answered an upload with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// What the origin said to an upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
}

impl TransferReport {
    /// The report of a transfer that ended before anything could be moved.
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
            duration_s: 0.0,
            first_byte_s: None,
            last_byte_s: None,
            deadline_s: terms.time_left().map(|left| left.as_secs_f64()),
            deadline_met: terms.due.map(|_| false),
            promise: None,
            switches: 0,
            duplicate_bytes: 0,
            content_encoding: None,
            exit: failure.exit as u8,
            reason: failure.reason,
            text: Some(failure.text.clone()),
            resumable_bytes: 0,
            proxy_would_add: None,
            status: None,
            answer: None,
        }
    }
}

/// Hears what happens.
pub trait TransferObserver: Send {
    /// Called in order, from the transfer itself: must not block for long.
    fn on_event(&mut self, event: &TransferEvent);
}

/// A line on standard error. Nobody may be listening any more (`2>&1 | head`, a terminal that is
/// gone): that must not stop a download, as the panic of `eprintln!` would.
pub fn print_stderr(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A line on standard output, with the same patience.
pub fn print_stdout(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// What stands for a link where the system's routes decide: a proxy on this machine, or in its network.
pub const NO_LINK: &str = "any";
/// Why it is used.
pub const NO_LINK_WHY: &str = "the proxy is on this machine or a local network";

/// A link's name for people.
pub fn link_label(link: &str) -> &str {
    match link {
        NO_LINK => "the system's routes",
        name => name,
    }
}

/// A count of bytes as people read it.
pub fn human_bytes(bytes: u64) -> String {
    indicatif::DecimalBytes(bytes).to_string()
}

/// A chance for people.
pub fn percent(p: f64) -> String {
    match (100.0 * p).round() {
        _ if p >= 1.0 => "100 %".to_owned(),
        percent if percent >= 100.0 => "over 99 %".to_owned(),
        percent if percent < 1.0 => "under 1 %".to_owned(),
        percent => format!("{percent} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chance_is_certain_only_where_it_is() {
        let told = [0.0, 0.004, 0.005, 0.214, 0.996, 1.0].map(percent);
        let expected = [
            "under 1 %",
            "under 1 %",
            "1 %",
            "21 %",
            "over 99 %",
            "100 %",
        ];
        assert_eq!(told, expected);
    }
}
