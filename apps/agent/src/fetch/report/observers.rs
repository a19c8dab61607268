//! Observers that tell people and scripts: JSON lines, plain lines, a bar, or two of them.

use std::collections::BTreeMap;
use std::time::Duration;

use cedos_text::escape_controls;
use d2tp_sched::format_duration;
use indicatif::{ProgressBar, ProgressStyle};

use super::{
    TransferEvent, TransferObserver, TransferReason, human_bytes, link_label, percent, print_stderr,
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

/// Prints a line per change on standard error, for logs and pipes.
#[derive(Default)]
pub struct LineObserver;

impl TransferObserver for LineObserver {
    fn on_event(&mut self, event: &TransferEvent) {
        if let Some(line) = line(event) {
            print_stderr(&line);
        }
    }
}

/// Shows a bar on a terminal, with the lines of [`LineObserver`] above it.
pub struct BarObserver {
    bar: ProgressBar,
}

impl BarObserver {
    /// Creates a bar on standard error.
    pub fn on_stderr() -> BarObserver {
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(200));
        BarObserver { bar }
    }

    /// Shows a message beside the bar, on its line.
    fn show(&self, message: &str) {
        let message = escape_controls(message).replace('\n', " ");
        self.bar.set_message(message);
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
                self.show(&format!("{rate}/s on {link} · {shares} · {why}{sealed}"));
            }
            TransferEvent::Waiting {
                reason,
                why,
                unblocks,
                ..
            } => {
                self.show(&waiting_line(*reason, why, unblocks));
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

/// Passes events to two observers.
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
                "the proxy opens a tunnel, but http is not encrypted: the proxy can read it, and so can everybody between the proxy and the server"
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

fn shares(bytes_by_link: &BTreeMap<String, u64>) -> String {
    let shares: Vec<String> = bytes_by_link
        .iter()
        .map(|(link, bytes)| format!("{} {}", link_label(link), human_bytes(*bytes)))
        .collect();
    shares.join(", ")
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
}
