//! Telling people and scripts what happens: a bar, plain lines, or one JSON object per line.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use d2tp_sched::{CompletionEstimate, format_duration};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use super::clock::Moment;
use super::mode::Mode;
use super::outcome::{Failure, Reason};
use crate::terms::Terms;

/// What happens while a download runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The first: the place for the bytes is open.
    Begun {
        /// The URL asked for, without credentials.
        url: String,
        /// Where the object goes; `-` for standard output.
        file: String,
        /// Who speaks to the origin.
        mode: Mode,
        /// Bytes of it from an earlier run.
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
        mode: Mode,
        /// What can be promised; none without a deadline.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        promise: Option<Promised>,
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
        reason: Reason,
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
        reason: Option<Reason>,
        /// In words.
        text: String,
    },
    /// The end: the object is whole.
    Done(Report),
    /// The end: it is not.
    Error(Report),
}

/// From this chance on a transfer is called on track.
pub const ON_TRACK: f64 = 0.8; // a guess

/// What was promised of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Promised {
    /// How likely it is ready in time.
    pub p: f64,
    /// So unlikely that there is no point in waiting for it.
    pub infeasible: bool,
    /// Bytes on metered links that are still to come, on average.
    pub metered_bytes_expected: u64,
    /// And in one case of twenty it is more than this.
    pub metered_bytes_95: u64,
    /// More it never is.
    pub metered_bytes_worst: u64,
    /// Seconds until the deadline.
    pub left_s: f64,
}

impl Promised {
    /// As the scheduler gives it, with so much time left. It hopes for links that are not there:
    /// where none may cost, nothing of that is promised.
    pub fn of(promise: &CompletionEstimate, left: Duration, may_cost: bool) -> Promised {
        let paid = |bytes: u64| if may_cost { bytes } else { 0 };
        Promised {
            p: (promise.ready * 1e3).round() / 1e3,
            infeasible: promise.is_infeasible(),
            metered_bytes_expected: paid(promise.expected_metered_bytes),
            metered_bytes_95: paid(promise.worst_metered_bytes),
            metered_bytes_worst: paid(promise.most_metered_bytes),
            left_s: left.as_secs_f64(),
        }
    }

    /// For people.
    pub fn in_words(&self) -> String {
        let chance = self.chance();
        if self.metered_bytes_worst == 0 {
            return format!("{chance}; nothing on links that cost");
        }
        format!(
            "{chance}; expected cellular {}, worst {}",
            human_bytes(self.metered_bytes_expected),
            human_bytes(self.metered_bytes_worst)
        )
    }
}

impl Promised {
    /// How likely it is, for people.
    pub fn chance(&self) -> String {
        match self.p {
            _ if self.infeasible => "not feasible".to_owned(),
            p if p >= ON_TRACK => format!("on track (p={p:.2})"),
            p => format!("at risk (p={p:.2})"),
        }
    }
}

/// The last object of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// `get` or `put`.
    pub verb: Cow<'static, str>,
    /// The URL asked for, without credentials.
    pub url: String,
    /// Who spoke to the origin.
    pub mode: Mode,
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
    pub promise: Option<Promised>,
    /// Times the transfer moved from one link to another.
    pub switches: u32,
    /// Payload bytes received that were held already, or thrown away.
    pub duplicate_bytes: u64,
    /// A coding of the bytes the origin applied unasked; they are stored as they came.
    pub content_encoding: Option<String>,
    /// The exit code.
    pub exit: u8,
    /// The reason code of a failure, where one fits.
    pub reason: Option<Reason>,
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

impl Report {
    /// Of one that ended before anything could be moved.
    pub fn failed(
        verb: &'static str,
        (url, file): (String, String),
        mode: Mode,
        terms: &Terms,
        failure: &Failure,
    ) -> Report {
        Report {
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
            deadline_s: terms.left().map(|left| left.as_secs_f64()),
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
pub trait Observer: Send {
    /// Called in order, from the transfer itself: must not block for long.
    fn tell(&mut self, event: &Event);
}

/// One JSON object per line.
pub struct JsonLines<W>(pub W);

impl<W: Write + Send> Observer for JsonLines<W> {
    fn tell(&mut self, event: &Event) {
        if let Ok(line) = serde_json::to_string(event) {
            // A reader that went away must not stop the download.
            let _ = writeln!(self.0, "{line}").and_then(|()| self.0.flush());
        }
    }
}

/// A line per change on standard error, for logs and pipes.
#[derive(Default)]
pub struct Lines;

impl Observer for Lines {
    fn tell(&mut self, event: &Event) {
        if let Some(line) = line(event) {
            complain(&line);
        }
    }
}

/// A line on standard error. Nobody may be listening any more (`2>&1 | head`, a terminal that is
/// gone): that must not stop a download, as the panic of `eprintln!` would.
pub fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A line on standard output, with the same patience.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// A bar on a terminal, with the lines of [`Lines`] above it.
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// A new one.
    pub fn on_stderr() -> Bar {
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(200));
        Bar { bar }
    }
}

impl Observer for Bar {
    fn tell(&mut self, event: &Event) {
        match event {
            Event::Progress {
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
                let link = called(link);
                let shares = shares(bytes_by_link);
                let sealed = match mode {
                    Mode::Sealed => " · sealed",
                    Mode::Direct | Mode::ProxyFetch => "",
                };
                self.bar
                    .set_message(format!("{rate}/s on {link} · {shares} · {why}{sealed}"));
            }
            Event::Waiting {
                reason,
                why,
                unblocks,
                ..
            } => {
                let code = reason.code();
                self.bar
                    .set_message(format!("WAITING ({code}) {why}; ends with: {unblocks}"));
            }
            Event::Done(_) | Event::Error(_) => {
                self.bar.finish_and_clear();
                Lines.tell(event);
            }
            Event::Begun { .. } | Event::Switch { .. } | Event::Note { .. } => {
                if let Some(line) = line(event) {
                    self.bar.suspend(|| complain(&line));
                }
            }
        }
    }
}

/// Says how far the reading of a file is, before anything of it is sent: on a terminal and for
/// programs, and only once it takes a while.
pub struct Reading {
    begun: Moment,
    said: Option<Moment>,
    bar: Option<ProgressBar>,
    json: bool,
}

/// A file that is read within so long is not spoken of.
const READING_SAID_AFTER: Duration = Duration::from_millis(500);
/// How often it is said.
const READING_SAID_EVERY: Duration = Duration::from_secs(1);

impl Reading {
    /// As a bar, as JSON, or in lines.
    pub fn new(bar: bool, json: bool) -> Reading {
        Reading {
            begun: Moment::now(),
            said: None,
            bar: (bar && !json).then(ProgressBar::hidden),
            json,
        }
    }

    /// So many bytes of so many are read.
    pub fn tell(&mut self, bytes: u64, of: u64) {
        let now = Moment::now();
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
            say(&event.to_string());
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
            complain(&format!("reading {} to know its digest", human_bytes(of)));
        }
    }
}

/// Tells two.
pub struct Both(pub Box<dyn Observer>, pub Box<dyn Observer>);

impl Observer for Both {
    fn tell(&mut self, event: &Event) {
        self.0.tell(event);
        self.1.tell(event);
    }
}

fn line(event: &Event) -> Option<String> {
    Some(match event {
        Event::Progress { .. } => return None,
        Event::Begun {
            mode: Mode::Sealed,
            url,
            ..
        } => {
            let reads = if url.starts_with("https:") {
                "the proxy opens a tunnel and sees host and port only"
            } else {
                "the proxy opens a tunnel, but http is not encrypted: it can read along, and so can \
                 everybody between it and the origin"
            };
            format!("sealed: {reads}")
        }
        Event::Begun { .. } => return None,
        Event::Switch {
            from: None,
            to,
            why,
            ..
        } => format!("on {}: {why}", called(to)),
        Event::Switch {
            from: Some(from),
            to,
            why,
            silence_ms,
            ..
        } => match silence_ms {
            Some(silence_ms) => format!("{from} → {to} ({silence_ms:.0} ms silent): {why}"),
            None => format!("{from} → {to}: {why}"),
        },
        Event::Waiting {
            reason,
            why,
            unblocks,
            ..
        } => {
            format!("WAITING ({}): {why}; ends with: {unblocks}", reason.code())
        }
        Event::Note {
            reason: Some(reason),
            text,
            ..
        } => format!("{}: {text}", reason.code()),
        Event::Note { text, .. } => format!("note: {text}"),
        Event::Done(report) => {
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
                    text += &format!("\nlate: the deadline had passed (promised with p={p:.2})");
                }
                (Some(false), None) => text += "\nlate: the deadline had passed",
                (Some(true), Some(p)) => text += &format!("\nin time, as promised with p={p:.2}"),
                (Some(true) | None, _) => {}
            }
            if let Some(add) = &report.proxy_would_add {
                text += &format!("\nnote: {add}");
            }
            text
        }
        Event::Error(report) => {
            let code = report
                .reason
                .map(|r| format!(" ({})", r.code()))
                .unwrap_or_default();
            let text = report.text.as_deref().unwrap_or("failed");
            let verb = &report.verb;
            match report.resumable_bytes {
                0 => format!("cedos {verb}:{code} {text}"),
                kept => format!(
                    "cedos {verb}:{code} {text}\n{} kept; the same command continues",
                    human_bytes(kept)
                ),
            }
        }
    })
}

fn shares(bytes_by_link: &BTreeMap<String, u64>) -> String {
    let shares: Vec<String> = bytes_by_link
        .iter()
        .map(|(link, bytes)| format!("{} {}", called(link), human_bytes(*bytes)))
        .collect();
    shares.join(", ")
}

/// What stands for a link where the system's routes decide: a proxy on this machine, or in its network.
pub const NO_LINK: &str = "any";
/// Why it is used.
pub const NO_LINK_WHY: &str = "the proxy is reached by the system's routes";

/// A link's name for people.
pub fn called(link: &str) -> &str {
    match link {
        NO_LINK => "the system's routes",
        name => name,
    }
}

/// A count of bytes as people read it.
pub fn human_bytes(bytes: u64) -> String {
    indicatif::DecimalBytes(bytes).to_string()
}
