//! Telling people and scripts what happens: a bar, plain lines, or one JSON object per line.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use d2tp_sched::{CompletionEstimate, format_duration};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use super::boot_clock::BootInstant;
use super::mode::FetchMode;
use super::outcome::{TransferFailure, TransferReason};
use crate::terms::TransferTerms;

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

/// One JSON object per line.
pub struct JsonObserver<W>(pub W);

impl<W: Write + Send> TransferObserver for JsonObserver<W> {
    fn on_event(&mut self, event: &TransferEvent) {
        if let Ok(line) = serde_json::to_string(event) {
            // A reader that went away must not stop the download.
            let _ = writeln!(self.0, "{line}").and_then(|()| self.0.flush());
        }
    }
}

/// A line per change on standard error, for logs and pipes.
#[derive(Default)]
pub struct LineObserver;

impl TransferObserver for LineObserver {
    fn on_event(&mut self, event: &TransferEvent) {
        if let Some(line) = line(event) {
            print_stderr(&line);
        }
    }
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

/// A bar on a terminal, with the lines of [`LineObserver`] above it.
pub struct BarObserver {
    bar: ProgressBar,
}

impl BarObserver {
    /// A new one.
    pub fn on_stderr() -> BarObserver {
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(200));
        BarObserver { bar }
    }
}

impl TransferObserver for BarObserver {
    fn on_event(&mut self, event: &TransferEvent) {
        match event {
            TransferEvent::Progress {
                bytes,
                length,
                rate_bytes_per_s,
                bytes_by_link,
                link,
                why,
                mode,
                ..
            } => {
                let template = match length {
                    Some(length) => {
                        self.bar.set_length(*length);
                        "{bar:24} {decimal_bytes}/{decimal_total_bytes} {msg}"
                    }
                    None => "{spinner} {decimal_bytes} {msg}",
                };
                if let Ok(style) = ProgressStyle::with_template(template) {
                    self.bar.set_style(style);
                }
                self.bar.set_position(*bytes);
                let rate = human_bytes(*rate_bytes_per_s as u64);
                let link = link_label(link);
                let shares = shares(bytes_by_link);
                let sealed = match mode {
                    FetchMode::Sealed => " · sealed",
                    FetchMode::Direct | FetchMode::ProxyFetch => "",
                };
                self.bar
                    .set_message(format!("{rate}/s on {link} · {shares} · {why}{sealed}"));
            }
            TransferEvent::Waiting {
                reason,
                why,
                unblocks,
                ..
            } => {
                self.bar.set_message(waiting_line(*reason, why, unblocks));
            }
            TransferEvent::Done(_) | TransferEvent::Error(_) => {
                self.bar.finish_and_clear();
                LineObserver.on_event(event);
            }
            TransferEvent::Begun { .. }
            | TransferEvent::Switch { .. }
            | TransferEvent::Note { .. } => {
                if let Some(line) = line(event) {
                    self.bar.suspend(|| print_stderr(&line));
                }
            }
        }
    }
}

/// Says how far the reading of a file is, before anything of it is sent: on a terminal and for
/// programs, and only once it takes a while.
pub struct DigestProgress {
    begun: BootInstant,
    said: Option<BootInstant>,
    bar: Option<ProgressBar>,
    json: bool,
}

/// A file that is read within so long is not spoken of.
const READING_SAID_AFTER: Duration = Duration::from_millis(500);
/// How often it is said.
const READING_SAID_EVERY: Duration = Duration::from_secs(1);

impl DigestProgress {
    /// Shows the progress of reading a file: as a bar, as JSON, or in lines.
    pub fn new(bar: bool, json: bool) -> DigestProgress {
        DigestProgress {
            begun: BootInstant::now(),
            said: None,
            bar: (bar && !json).then(ProgressBar::hidden),
            json,
        }
    }

    /// Shows that `bytes` of `of` bytes are read.
    pub fn update(&mut self, bytes: u64, of: u64) {
        let now = BootInstant::now();
        if let Some(bar) = &self.bar
            && bytes >= of
        {
            bar.finish_and_clear();
            return;
        }
        let soon = now.since(self.begun) < READING_SAID_AFTER;
        let lately = (self.said).is_some_and(|at| now.since(at) < READING_SAID_EVERY);
        if soon || lately {
            return;
        }
        let first = self.said.replace(now).is_none();
        if self.json {
            let event = serde_json::json!({"event": "reading", "bytes": bytes, "length": of});
            print_stdout(&event.to_string());
        } else if let Some(bar) = &self.bar {
            if first {
                bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
                bar.set_length(of);
                if let Ok(style) = ProgressStyle::with_template(
                    "reading {bar:24} {decimal_bytes}/{decimal_total_bytes}",
                ) {
                    bar.set_style(style);
                }
            }
            bar.set_position(bytes);
        } else if first {
            print_stderr(&format!(
                "reading {} to compute the digest",
                human_bytes(of)
            ));
        }
    }
}

/// Tells two.
pub struct ObserverPair(pub Box<dyn TransferObserver>, pub Box<dyn TransferObserver>);

impl TransferObserver for ObserverPair {
    fn on_event(&mut self, event: &TransferEvent) {
        self.0.on_event(event);
        self.1.on_event(event);
    }
}

fn line(event: &TransferEvent) -> Option<String> {
    Some(match event {
        TransferEvent::Progress { .. } => return None,
        TransferEvent::Begun {
            mode: FetchMode::Sealed,
            url,
            ..
        } => {
            let reads = if url.starts_with("https:") {
                "the proxy opens a tunnel and sees host and port only"
            } else {
                "the proxy opens a tunnel, but http is not encrypted: the proxy can read it, and so can \
                 everybody between the proxy and the server"
            };
            format!("sealed: {reads}")
        }
        TransferEvent::Begun { .. } => return None,
        TransferEvent::Switch {
            from: None,
            to,
            why,
            ..
        } => using_line(to, why),
        TransferEvent::Switch {
            from: Some(from),
            to,
            why,
            silence_ms,
            ..
        } => match silence_ms {
            Some(silence_ms) => {
                format!("{from} → {to} (after {silence_ms:.0} ms of silence): {why}")
            }
            None => format!("{from} → {to}: {why}"),
        },
        TransferEvent::Waiting {
            reason,
            why,
            unblocks,
            ..
        } => waiting_line(*reason, why, unblocks),
        TransferEvent::Note { text, .. } => format!("note: {text}"),
        TransferEvent::Done(report) => {
            let mut text = format!(
                "{}: {} in {}{}, sha256 {}",
                report.file,
                human_bytes(report.bytes),
                format_duration(Duration::from_secs_f64(report.duration_s)),
                if report.bytes_by_link.is_empty() {
                    String::new()
                } else {
                    format!(" ({})", shares(&report.bytes_by_link))
                },
                report.sha256,
            );
            let promised = report.promise.map(|promise| promise.p);
            match (report.deadline_met, promised) {
                (Some(false), Some(p)) => {
                    text += &format!("\nFinished late; the forecast was {} likely", percent(p));
                }
                (Some(false), None) => text += "\nFinished late",
                (Some(true), _) => text += "\nFinished on time",
                (None, _) => {}
            }
            if let Some(add) = &report.proxy_would_add {
                text += &format!("\nnote: {add}");
            }
            text
        }
        TransferEvent::Error(report) if report.reason == Some(TransferReason::UserPaused) => {
            match report.resumable_bytes {
                0 => "Stopped".to_owned(),
                kept => format!(
                    "Stopped ({} kept). Run the same command to resume",
                    human_bytes(kept)
                ),
            }
        }
        TransferEvent::Error(report) => {
            let text = report.text.as_deref().unwrap_or("failed");
            let verb = &report.verb;
            match report.resumable_bytes {
                0 => format!("cedos {verb}: {text}"),
                kept => format!(
                    "cedos {verb}: {text}\n{} kept. Run the same command to resume",
                    human_bytes(kept)
                ),
            }
        }
    })
}

/// The line for the first network that carries a transfer.
fn using_line(to: &str, why: &str) -> String {
    let name = link_label(to);
    match why.strip_prefix(to) {
        Some(" is free") => format!("Using {name} (free)"),
        _ => format!("Using {name}: {why}"),
    }
}

/// The line for a wait: what is missing, why, and what ends it.
fn waiting_line(reason: TransferReason, why: &str, unblocks: &str) -> String {
    let missing = match reason {
        TransferReason::NoPath => " for a network",
        TransferReason::PathCost | TransferReason::OverBudget => " for a free network",
        TransferReason::RoamingBlocked => " for another network",
        TransferReason::PathTooSlow => " for a network that works",
        TransferReason::Portal => " for a sign-in",
        TransferReason::ProxyUnreachable => " for the proxy",
        TransferReason::OriginWait => " for the server",
        TransferReason::QueuedBehind => " for its turn",
        TransferReason::OriginChanged
        | TransferReason::UrlExpired
        | TransferReason::AuthRequired
        | TransferReason::StorageFull
        | TransferReason::UserPaused => "",
    };
    let ends = unblocks.replace(" | ", ", or ");
    format!("Waiting{missing}: {why}. Ends with: {ends}")
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

fn shares(bytes_by_link: &BTreeMap<String, u64>) -> String {
    let shares: Vec<String> = bytes_by_link
        .iter()
        .map(|(link, bytes)| format!("{} {}", link_label(link), human_bytes(*bytes)))
        .collect();
    shares.join(", ")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_which_network_is_used_or_what_a_wait_is_for() {
        assert_eq!(using_line("wlan0", "wlan0 is free"), "Using wlan0 (free)");
        let why = "free networks alone 21 % likely to be on time, with wwan0 70 %";
        assert_eq!(using_line("wwan0", why), format!("Using wwan0: {why}"));
        assert_eq!(
            waiting_line(
                TransferReason::PathCost,
                "only wwan0 (metered) is up",
                "a free network | --policy any"
            ),
            "Waiting for a free network: only wwan0 (metered) is up. Ends with: a free network, or \
             --policy any"
        );
    }

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
