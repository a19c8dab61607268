//! Observers that report to people and scripts: JSON lines, plain lines, a bar, or two of them.

use std::time::Duration;

use cedos_text::escape_controls;
use d2tp_sched::{format_duration, likelihood};
use indicatif::{ProgressBar, ProgressStyle};
use jiff::Zoned;

use super::progress_line::{ProgressLine, columns as columns_of, fit};
use super::{
    TransferEvent, TransferObserver, TransferReason, TransferReport, done_to_files, human_bytes,
    link_label, print_stderr,
};
use crate::fetch::mode::FetchMode;

/// Prints each event as a JSON object on a line, by [`print_stdout`](super::print_stdout) or
/// [`print_stderr`].
pub struct JsonObserver(pub fn(&str));

impl TransferObserver for JsonObserver {
    fn on_event(&mut self, event: &TransferEvent) {
        if let Ok(line) = serde_json::to_string(event) {
            self.0(&line);
        }
    }
}

/// The interval of progress lines where there is no terminal.
pub(super) const PROGRESS_EVERY_S: f64 = 10.0; // a guess: a log that can be read

/// Prints a line per change on standard error, for logs and pipes, and the progress every ten seconds.
pub struct LineObserver {
    /// The progress so far; none if it is not printed.
    progress: Option<ProgressLine>,
    /// When the progress was printed last, in seconds since the start.
    printed_s: f64,
}

impl LineObserver {
    /// Creates an observer that prints the progress, too.
    pub fn with_progress() -> LineObserver {
        LineObserver {
            progress: Some(ProgressLine::default()),
            printed_s: 0.0,
        }
    }

    /// Creates an observer that prints changes only, for a log that is kept while a transfer takes days.
    pub fn of_changes() -> LineObserver {
        LineObserver {
            progress: None,
            printed_s: 0.0,
        }
    }

    /// The line for an event, if it is due.
    fn line(&mut self, event: &TransferEvent) -> Option<String> {
        let TransferEvent::Progress { t_s, .. } = event else {
            return event_line(event);
        };
        let parts = (self.progress.as_mut())?.parts(event, &Zoned::now())?;
        // A transfer that an agent runs again counts from zero, so its line is due.
        if (0.0..PROGRESS_EVERY_S).contains(&(t_s - self.printed_s)) {
            return None;
        }
        self.printed_s = *t_s;
        Some(fit(&parts, usize::MAX))
    }
}

impl TransferObserver for LineObserver {
    fn on_event(&mut self, event: &TransferEvent) {
        if let Some(line) = self.line(event) {
            print_stderr(&line);
        }
    }
}

/// Shows a bar on a terminal, with the lines of [`LineObserver`] above it.
pub struct BarObserver {
    bar: ProgressBar,
    /// Whether the bar is on the terminal. Before the first event other lines are printed without regard to it.
    is_drawn: bool,
    progress: ProgressLine,
}

/// The widths of the bar; the first that leaves room for the text is used, or none.
const BAR_COLUMNS: [usize; 2] = [24, 10];

/// The columns that are assumed where the terminal does not tell.
const TERMINAL_COLUMNS: usize = 80;

impl BarObserver {
    /// Creates a bar on standard error.
    pub fn on_stderr() -> BarObserver {
        BarObserver {
            bar: ProgressBar::new_spinner(),
            is_drawn: false,
            progress: ProgressLine::default(),
        }
    }

    /// The columns of the terminal. The last one stays free: some terminals break the line after it.
    pub(super) fn columns() -> usize {
        let size = console::Term::stderr().size_checked();
        let columns = size.map_or(TERMINAL_COLUMNS, |(_, columns)| columns.into());
        columns.saturating_sub(1)
    }

    /// Shows a text on the bar's line. `template`: how, with `{msg}` for the text.
    fn show(&self, template: &str, text: &str) {
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
        let text = escape_controls(text).replace('\n', " ");
        self.bar.set_message(text);
    }
}

impl TransferObserver for BarObserver {
    fn on_event(&mut self, event: &TransferEvent) {
        if !std::mem::replace(&mut self.is_drawn, true) {
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
        match event {
            TransferEvent::Progress { bytes, length, .. } => {
                let Some(parts) = self.progress.parts(event, &Zoned::now()) else {
                    return;
                };
                let columns = BarObserver::columns();
                let text = columns_of(&parts);
                let bar = (BAR_COLUMNS.iter()).find(|bar| *bar + 1 + text <= columns);
                match (length, bar) {
                    (Some(length), Some(bar)) => {
                        self.bar.set_length(*length);
                        self.bar.set_position(*bytes);
                        let template = format!("{{bar:{bar}}} {{msg}}");
                        self.show(&template, &fit(&parts, columns));
                    }
                    (Some(_), None) => self.show("{msg}", &fit(&parts, columns)),
                    (None, _) => {
                        let text = fit(&parts, columns.saturating_sub(2));
                        self.show("{spinner} {msg}", &text);
                    }
                }
            }
            TransferEvent::Waiting {
                reason,
                why,
                unblocks,
                ..
            } => {
                // A wait may need more than one line to say what ends it.
                self.show("{spinner} {msg}", &waiting_line(*reason, why, unblocks));
            }
            TransferEvent::Done(_) | TransferEvent::Error(_) => {
                self.bar.finish_and_clear();
                LineObserver::of_changes().on_event(event);
            }
            TransferEvent::Begun { .. }
            | TransferEvent::Switch { .. }
            | TransferEvent::Note { .. } => {
                if let Some(line) = event_line(event) {
                    self.bar.suspend(|| print_stderr(&line));
                }
            }
        }
    }
}

/// Passes events to two observers.
pub struct ObserverPair(pub Box<dyn TransferObserver>, pub Box<dyn TransferObserver>);

impl TransferObserver for ObserverPair {
    fn on_event(&mut self, event: &TransferEvent) {
        self.0.on_event(event);
        self.1.on_event(event);
    }
}

/// The line for an event that is no progress, if it has one.
pub(super) fn event_line(event: &TransferEvent) -> Option<String> {
    Some(match event {
        TransferEvent::Progress { .. } => return None,
        TransferEvent::Begun {
            mode: FetchMode::Sealed,
            url,
            ..
        } => {
            match url.starts_with("https:") {
                true => "Sealed: the proxy sees only the host and the port",
                false => {
                    "Sealed, but http is not encrypted: the proxy, and everybody between it and the server, \
                     can read the content. Use https to keep it private"
                }
            }
            .to_owned()
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
            let mut text = report_line(report);
            let promised = report.promise.map(|promise| promise.p);
            match (report.deadline_met, promised) {
                (Some(false), Some(p)) => {
                    text += &format!("\nFinished late; the forecast was {} likely", likelihood(p));
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
                0 if report.starts_over => {
                    "Stopped. The server cannot resume, so the same command starts from zero"
                        .to_owned()
                }
                0 => "Stopped".to_owned(),
                kept => format!(
                    "Stopped ({} kept). Run the same command to resume",
                    human_bytes(kept)
                ),
            }
        }
        TransferEvent::Error(report) => {
            let text = report.text.as_deref().unwrap_or("failed");
            let verb = match report.mirror {
                Some(_) => "sync",
                None => &*report.verb,
            };
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

/// The line for a complete object: its size, how long it took, what carried it, and its digest.
pub(super) fn report_line(report: &TransferReport) -> String {
    if report.unchanged {
        return format!("{}: unchanged, so nothing was transferred", report.file);
    }
    if let Some(counts) = &report.mirror {
        let verb = done_to_files(&report.verb);
        let text = counts.describe(verb, report.bytes, report.metered_bytes, false);
        return format!("{}: {text}", report.file);
    }
    format!(
        "{}: {} in {}{}, sha256 {}",
        report.file,
        human_bytes(report.bytes),
        format_duration(Duration::from_secs_f64(report.duration_s)),
        carried_by(report),
        report.sha256,
    )
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
pub(super) fn waiting_line(reason: TransferReason, why: &str, unblocks: &str) -> String {
    let (missing, needs_why) = match reason {
        TransferReason::NoPath => (" for a network", false),
        TransferReason::PathCost | TransferReason::OverBudget => (" for a free network", true),
        TransferReason::RoamingBlocked => (" for another network", true),
        TransferReason::PathTooSlow => (" for a network that works", true),
        TransferReason::SavesEnergy => (" for Wi-Fi", true),
        TransferReason::Portal => (" for a sign-in", true),
        TransferReason::ProxyUnreachable | TransferReason::ProxyRefused => (" for the proxy", true),
        TransferReason::NetworkBlocked => (" for another network", true),
        TransferReason::OriginWait => (" for the server", true),
        TransferReason::QueuedBehind => (" for its turn", true),
        TransferReason::OriginChanged
        | TransferReason::UrlExpired
        | TransferReason::AuthRequired
        | TransferReason::StorageFull
        | TransferReason::UserPaused => ("", true),
    };
    let mut line = format!("Waiting{missing}");
    if needs_why {
        line += &format!(": {why}");
    }
    // What the line says already is not said again.
    let ends = unblocks.split(" | ").filter(|end| !missing.ends_with(end));
    let ends = ends.filter(|end| *end != "any network" || reason != TransferReason::NoPath);
    let mut others = Vec::new();
    for end in ends {
        if let Some(time) = end.strip_prefix("the next try in ") {
            line += &format!(". Next try in {time}");
        } else if end.ends_with(" if none appears") {
            line += &format!(". Will use {end}");
        } else if end.starts_with("--") {
            line += &format!(". To start now: {end}");
        } else {
            others.push(end);
        }
    }
    if !others.is_empty() {
        line += &format!(". Ends with: {}", others.join(", or "));
    }
    line
}

/// What carried an object, in brackets: earlier runs, and each link in this one.
fn carried_by(report: &TransferReport) -> String {
    let links = report.bytes_by_link.iter();
    let links = links.map(|(link, bytes)| format!("{} {}", link_label(link), human_bytes(*bytes)));
    let earlier = (report.held_bytes > 0)
        .then(|| format!("{} from an earlier run", human_bytes(report.held_bytes)));
    let mobile = (report.metered_bytes > 0)
        .then(|| format!("mobile data {}", human_bytes(report.metered_bytes)));
    let parts: Vec<String> = earlier.into_iter().chain(links).chain(mobile).collect();
    match parts.is_empty() {
        true => String::new(),
        false => format!(" ({})", parts.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_terminal_the_progress_is_a_line_every_ten_seconds() {
        let at = |t_s| TransferEvent::Progress {
            t_s,
            bytes: 5,
            length: Some(10),
            rate_bytes_per_s: 1.0,
            link: "wlan0".into(),
            bytes_by_link: std::collections::BTreeMap::new(),
            metered_bytes: 0,
            why: String::new(),
            mode: FetchMode::Direct,
            promise: None,
        };
        let mut observer = LineObserver::with_progress();
        let printed: Vec<bool> = [1.0, 9.9, 10.1, 11.0, 20.2, 0.5, 1.5]
            .map(|t_s| observer.line(&at(t_s)).is_some())
            .into();
        assert_eq!(printed, [false, false, true, false, true, true, false]);
        let mut changes = LineObserver::of_changes();
        assert!(changes.line(&at(60.0)).is_none());
    }

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
            "Waiting for a free network: only wwan0 (metered) is up. To start now: --policy any"
        );
        assert_eq!(
            waiting_line(
                TransferReason::PathCost,
                "only wwan0 (metered) is up, 3 h 00 min left",
                "a free network | wwan0 in 2 h 10 min if none appears | --policy any"
            ),
            "Waiting for a free network: only wwan0 (metered) is up, 3 h 00 min left. Will use wwan0 in \
             2 h 10 min if none appears. To start now: --policy any"
        );
        assert_eq!(
            waiting_line(TransferReason::NoPath, "no network is up", "any network"),
            "Waiting for a network"
        );
        assert_eq!(
            waiting_line(
                TransferReason::OriginWait,
                "example.org refuses connections",
                "the next try in 2.0 s"
            ),
            "Waiting for the server: example.org refuses connections. Next try in 2.0 s"
        );
    }
}
