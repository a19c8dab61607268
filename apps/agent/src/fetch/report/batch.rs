//! Reports of several downloads of one command: their events under each other's names, and a summary.
//!
//! ```text
//!  download 1 ── events ──┐                    ┌─ JSON: each line with the download's `number`
//!  download 2 ── events ──┼─▶ BatchReporter ───┼─ a bar for each that moves, and one for all
//!  download 3 ── events ──┘        │           └─ lines, each with a name in front
//!                                  └─▶ summary, exit code
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cedos_text::escape_controls;
use d2tp_sched::format_duration;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use jiff::Zoned;
use serde::Serialize;
use serde_json::Value;

use super::observers::{BarObserver, PROGRESS_EVERY_S, event_line, report_line, waiting_line};
use super::progress_line::{ProgressLine, fit};
use super::{TransferEvent, TransferObserver, human_bytes, print_stderr, print_stdout};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::outcome::{TransferExit, TransferReason};

/// How the events of a batch are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchOutput {
    /// One JSON object per line on standard output.
    Json,
    /// Bars on the terminal behind standard error.
    Bars,
    /// Lines on standard error.
    Lines,
}

/// Failed downloads that a summary names; it counts the others.
const NAMED_MAX: usize = 20; // a guess: a screen

/// The columns of a name on a bar at most.
const NAME_COLUMNS_MAX: usize = 28; // a guess: a third of a terminal

/// Collects and shows the events of several downloads.
#[derive(Clone)]
pub struct BatchReporter(Arc<Mutex<BatchState>>);

struct BatchState {
    output: BatchOutput,
    begun: BootInstant,
    downloads: Vec<BatchDownload>,
    bars: Option<BatchBars>,
    /// The last line about the network, or about a wait, that stands for all downloads.
    said_of_all: Option<String>,
    said_proxy_hint: bool,
}

struct BatchDownload {
    url: String,
    name: String,
    end: Option<BatchEnd>,
    progress: ProgressLine,
    printed_s: f64,
    bar: Option<ProgressBar>,
    bytes: u64,
}

struct BatchBars {
    all: MultiProgress,
    total: ProgressBar,
}

/// How a download of a batch ended.
#[derive(Debug, Clone, PartialEq, Eq)]
struct BatchEnd {
    exit: TransferExit,
    is_skipped: bool,
    is_complete: bool,
    /// Why the download is not complete.
    text: Option<String>,
    resumable_bytes: u64,
    bytes: u64,
    metered_bytes: u64,
}

/// What became of the downloads of a batch.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BatchSummary {
    /// The number of URLs.
    pub urls: usize,
    /// Downloads that are complete, late ones included.
    pub done: usize,
    /// Complete downloads whose deadline had passed.
    pub late: usize,
    /// Downloads that were not begun because their file exists.
    pub skipped: usize,
    /// Downloads that failed.
    pub failed: usize,
    /// Downloads that were stopped, or not begun after a stop.
    pub stopped: usize,
    /// Bytes of the complete downloads.
    pub bytes: u64,
    /// Bytes that metered links carried.
    pub metered_bytes: u64,
    /// The time since the beginning, in seconds.
    pub duration_s: f64,
    /// The exit code: that of the first download that has another than 0.
    pub exit: u8,
}

impl BatchReporter {
    /// A reporter of downloads with these URLs, without credentials, and names.
    pub fn new(
        output: BatchOutput,
        downloads: impl IntoIterator<Item = (String, String)>,
    ) -> BatchReporter {
        let downloads = downloads.into_iter().map(|(url, name)| BatchDownload {
            url,
            name: escape_controls(&name).into_owned(),
            end: None,
            progress: ProgressLine::default(),
            printed_s: 0.0,
            bar: None,
            bytes: 0,
        });
        let bars = (output == BatchOutput::Bars).then(BatchBars::new);
        BatchReporter(Arc::new(Mutex::new(BatchState {
            output,
            begun: BootInstant::now(),
            downloads: downloads.collect(),
            bars,
            said_of_all: None,
            said_proxy_hint: false,
        })))
    }

    fn state(&self) -> MutexGuard<'_, BatchState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The observer of download `number`, counted from 1.
    pub fn observer(&self, number: usize) -> BatchObserver {
        BatchObserver {
            batch: self.clone(),
            number,
        }
    }

    /// Shows an event of download `number` as an agent sent it, with what only an agent knows.
    pub fn on_agent_event(&self, number: usize, event: &Value) {
        let mut state = self.state();
        if state.output == BatchOutput::Json {
            state.print_json(number, event.clone());
        }
        match serde_json::from_value::<TransferEvent>(event.clone()) {
            Ok(event) => state.on_event(number, &event),
            Err(_) if event["event"] == "paused" => {
                let id = &event["id"];
                let text = format!("paused; resume it with `cedos resume {id}`");
                state.say_of(number, &text);
            }
            Err(_) => {}
        }
    }

    /// Records that download `number` is not begun because its file exists.
    pub fn on_skipped(&self, number: usize, file: &str) {
        let mut state = self.state();
        if state.output == BatchOutput::Json {
            let event = serde_json::json!({"event": "skipped", "file": file,
                                           "url": state.downloads[number - 1].url});
            state.print_json(number, event);
        } else {
            state.say_of(number, "exists already, so it is not downloaded");
        }
        state.end(
            number,
            BatchEnd {
                exit: TransferExit::Done,
                is_skipped: true,
                is_complete: false,
                text: None,
                resumable_bytes: 0,
                bytes: 0,
                metered_bytes: 0,
            },
        );
    }

    /// Records that download `number` has failed before it began, or has been given up.
    pub fn on_failure(&self, number: usize, exit: TransferExit, text: &str) {
        let mut state = self.state();
        if state.output == BatchOutput::Json {
            let event = serde_json::json!({"event": "error", "exit": exit as u8, "text": text,
                                           "url": state.downloads[number - 1].url});
            state.print_json(number, event);
        } else if exit != TransferExit::Cancelled {
            state.say_of(number, text);
        }
        state.end(
            number,
            BatchEnd {
                exit,
                is_skipped: false,
                is_complete: false,
                text: Some(text.to_owned()),
                resumable_bytes: 0,
                bytes: 0,
                metered_bytes: 0,
            },
        );
    }

    /// Whether download `number` has ended.
    pub fn has_ended(&self, number: usize) -> bool {
        self.state().downloads[number - 1].end.is_some()
    }

    /// The exit code of those that have ended: that of the first with another than 0.
    pub fn exit_code(&self) -> u8 {
        let state = self.state();
        let mut codes = (state.downloads.iter())
            .filter_map(|download| download.end.as_ref())
            .map(|end| end.exit as u8);
        codes.find(|code| *code != 0).unwrap_or(0)
    }

    /// Prints the summary, once all have ended. Returns the exit code.
    pub fn finish(&self) -> u8 {
        let mut state = self.state();
        if let Some(bars) = state.bars.take() {
            bars.total.finish_and_clear();
        }
        let summary = state.summary();
        if state.output == BatchOutput::Json {
            let mut event = serde_json::to_value(&summary).unwrap_or_default();
            event["event"] = "summary".into();
            print_stdout(&event.to_string());
        } else {
            state
                .summary_lines(&summary)
                .iter()
                .for_each(|line| print_stderr(line));
        }
        summary.exit
    }
}

/// The observer of one download of a batch.
pub struct BatchObserver {
    batch: BatchReporter,
    number: usize,
}

impl TransferObserver for BatchObserver {
    fn on_event(&mut self, event: &TransferEvent) {
        let mut state = self.batch.state();
        if state.output == BatchOutput::Json
            && let Ok(value) = serde_json::to_value(event)
        {
            state.print_json(self.number, value);
        }
        state.on_event(self.number, event);
    }
}

impl BatchBars {
    fn new() -> BatchBars {
        let all = MultiProgress::new();
        let total = all.add(ProgressBar::new_spinner());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            total.set_style(style);
        }
        total.enable_steady_tick(Duration::from_millis(200));
        BatchBars { all, total }
    }

    fn add(&self) -> ProgressBar {
        let bar = self
            .all
            .insert_before(&self.total, ProgressBar::new_spinner());
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            bar.set_style(style);
        }
        bar
    }
}

impl BatchState {
    fn print_json(&self, number: usize, mut event: Value) {
        event["number"] = number.into();
        print_stdout(&event.to_string());
    }

    /// Prints a line for people, above the bars if there are some.
    fn say(&self, text: &str) {
        match (&self.bars, self.output) {
            (_, BatchOutput::Json) => {}
            (Some(bars), _) => bars.all.suspend(|| print_stderr(text)),
            (None, _) => print_stderr(text),
        }
    }

    fn say_of(&self, number: usize, text: &str) {
        let name = &self.downloads[number - 1].name;
        self.say(&format!("{name}: {text}"));
    }

    /// Prints what is true of all downloads, unless it was printed last.
    fn say_of_all(&mut self, text: String) {
        if self.said_of_all.as_ref() != Some(&text) {
            self.say(&text);
            self.said_of_all = Some(text);
        }
    }

    fn on_event(&mut self, number: usize, event: &TransferEvent) {
        match event {
            TransferEvent::Progress { t_s, bytes, .. } => {
                self.on_progress(number, *t_s, *bytes, event)
            }
            TransferEvent::Waiting {
                reason,
                why,
                unblocks,
                ..
            } => {
                self.hide_bar(number);
                let text = waiting_line(*reason, why, unblocks);
                match reason {
                    // Those that move are shown.
                    TransferReason::QueuedBehind => {}
                    TransferReason::OriginWait => self.say_of(number, &text),
                    _ => self.say_of_all(text),
                }
            }
            TransferEvent::Switch { from: None, .. } => {
                event_line(event)
                    .into_iter()
                    .for_each(|text| self.say_of_all(text));
            }
            TransferEvent::Begun { .. }
            | TransferEvent::Switch { .. }
            | TransferEvent::Note { .. } => {
                event_line(event)
                    .into_iter()
                    .for_each(|text| self.say_of(number, &text));
            }
            TransferEvent::Done(report) => {
                let late = match report.deadline_met {
                    Some(false) => ", finished late",
                    _ => "",
                };
                self.say(&format!("{}{late}", report_line(report)));
                if let Some(hint) = &report.proxy_would_add
                    && !std::mem::replace(&mut self.said_proxy_hint, true)
                {
                    self.say(&format!("note: {hint}"));
                }
                self.end(
                    number,
                    BatchEnd {
                        exit: TransferExit::of(report.exit.into()).unwrap_or(TransferExit::Done),
                        is_skipped: false,
                        is_complete: true,
                        text: None,
                        resumable_bytes: 0,
                        bytes: report.bytes,
                        metered_bytes: report.metered_bytes,
                    },
                );
            }
            TransferEvent::Error(report) => {
                let text = report.text.clone().unwrap_or_else(|| "failed".to_owned());
                let kept = match report.resumable_bytes {
                    0 => String::new(),
                    bytes => format!(" ({} kept)", human_bytes(bytes)),
                };
                self.say_of(number, &format!("{text}{kept}"));
                self.end(
                    number,
                    BatchEnd {
                        exit: TransferExit::of(report.exit.into()).unwrap_or(TransferExit::Error),
                        is_skipped: false,
                        is_complete: false,
                        text: Some(text),
                        resumable_bytes: report.resumable_bytes,
                        bytes: report.bytes,
                        metered_bytes: report.metered_bytes,
                    },
                );
            }
        }
        self.show_total();
    }

    fn on_progress(&mut self, number: usize, t_s: f64, bytes: u64, event: &TransferEvent) {
        // A wait that comes again is another one.
        self.said_of_all = self
            .said_of_all
            .take()
            .filter(|said| !said.starts_with("Waiting"));
        let download = &mut self.downloads[number - 1];
        download.bytes = bytes;
        let Some(mut parts) = download.progress.parts(event, &Zoned::now()) else {
            return;
        };
        match (&self.bars, self.output) {
            (Some(bars), _) => {
                let columns = BarObserver::columns();
                let room = NAME_COLUMNS_MAX.min(columns / 2);
                let name = console::truncate_str(&download.name, room, "…");
                parts[0] = format!("{name}: {}", parts[0]);
                let text = fit(&parts, columns);
                let bar = download.bar.get_or_insert_with(|| bars.add());
                bar.set_message(escape_controls(&text).into_owned());
            }
            (None, BatchOutput::Lines) => {
                // A transfer that an agent runs again counts from zero, so its line is due.
                if (0.0..PROGRESS_EVERY_S).contains(&(t_s - download.printed_s)) {
                    return;
                }
                download.printed_s = t_s;
                let text = fit(&parts, usize::MAX);
                self.say_of(number, &text);
            }
            (None, _) => {}
        }
    }

    fn hide_bar(&mut self, number: usize) {
        if let (Some(bars), Some(bar)) = (&self.bars, self.downloads[number - 1].bar.take()) {
            bar.finish_and_clear();
            bars.all.remove(&bar);
        }
    }

    fn end(&mut self, number: usize, end: BatchEnd) {
        self.hide_bar(number);
        let download = &mut self.downloads[number - 1];
        download.bytes = end.bytes;
        download.end.get_or_insert(end);
        self.show_total();
    }

    fn show_total(&self) {
        let Some(bars) = &self.bars else { return };
        let ended = self
            .downloads
            .iter()
            .filter_map(|download| download.end.as_ref());
        let (mut done, mut failed) = (0, 0);
        for end in ended {
            match end.exit {
                TransferExit::Done | TransferExit::DeadlineMissed if end.text.is_none() => {
                    done += 1
                }
                _ => failed += 1,
            }
        }
        let bytes: u64 = self.downloads.iter().map(|download| download.bytes).sum();
        let mut parts = vec![format!("{done} of {} done", self.downloads.len())];
        if failed > 0 {
            parts.push(format!("{failed} failed"));
        }
        parts.push(human_bytes(bytes));
        let columns = BarObserver::columns().saturating_sub(2);
        bars.total.set_message(fit(&parts, columns));
    }

    fn summary(&self) -> BatchSummary {
        let ends: Vec<&BatchEnd> = self
            .downloads
            .iter()
            .filter_map(|d| d.end.as_ref())
            .collect();
        let count = |is: &dyn Fn(&BatchEnd) -> bool| ends.iter().filter(|end| is(end)).count();
        let unfinished = self.downloads.len() - ends.len();
        let is_stopped = |end: &BatchEnd| !end.is_complete && end.exit == TransferExit::Cancelled;
        let code = self.downloads.iter().map(|download| match &download.end {
            Some(end) => end.exit as u8,
            None => TransferExit::Cancelled as u8,
        });
        BatchSummary {
            urls: self.downloads.len(),
            done: count(&|end| end.is_complete),
            late: count(&|end| end.is_complete && end.exit == TransferExit::DeadlineMissed),
            skipped: count(&|end| end.is_skipped),
            failed: count(&|end| end.text.is_some() && !is_stopped(end)),
            stopped: count(&is_stopped) + unfinished,
            bytes: (ends.iter())
                .filter(|end| end.is_complete)
                .map(|end| end.bytes)
                .sum(),
            metered_bytes: ends.iter().map(|end| end.metered_bytes).sum(),
            duration_s: BootInstant::now().since(self.begun).as_secs_f64(),
            exit: code.into_iter().find(|code| *code != 0).unwrap_or(0),
        }
    }

    /// The summary for people.
    fn summary_lines(&self, summary: &BatchSummary) -> Vec<String> {
        let mut counts = vec![format!("{} of {} downloaded", summary.done, summary.urls)];
        for (count, words) in [
            (summary.late, "late"),
            (summary.skipped, "skipped"),
            (summary.failed, "failed"),
            (summary.stopped, "stopped"),
        ] {
            if count > 0 {
                counts.push(format!("{count} {words}"));
            }
        }
        let took = format_duration(Duration::from_secs_f64(summary.duration_s));
        let mut line = format!(
            "{}: {} in {took}",
            counts.join(", "),
            human_bytes(summary.bytes)
        );
        if summary.metered_bytes > 0 {
            line += &format!(", mobile data {}", human_bytes(summary.metered_bytes));
        }
        let mut lines = vec![line];
        let is_failed = |end: &BatchEnd| end.text.is_some() && end.exit != TransferExit::Cancelled;
        let failed = self.downloads.iter().filter_map(|download| {
            let end = download.end.as_ref().filter(|end| is_failed(end))?;
            Some((download, end.text.as_deref().unwrap_or_default()))
        });
        let failed: Vec<_> = failed.collect();
        let named = failed.iter().take(NAMED_MAX);
        lines.extend(named.map(|(download, text)| format!("Failed: {}: {text}", download.url)));
        if failed.len() > NAMED_MAX {
            lines.push(format!("and {} more", failed.len() - NAMED_MAX));
        }
        let resumes = |download: &BatchDownload| match &download.end {
            Some(end) => end.exit == TransferExit::Cancelled || end.resumable_bytes > 0,
            None => true,
        };
        if self.downloads.iter().any(resumes) {
            lines.push("To resume: run the same command with --skip-existing".to_owned());
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::mode::FetchMode;
    use crate::fetch::outcome::TransferFailure;
    use crate::fetch::report::TransferReport;
    use crate::terms::TransferTerms;

    fn reporter(count: usize) -> BatchReporter {
        let named = (1..=count).map(|n| (format!("http://h/{n}.bin"), format!("{n}.bin")));
        BatchReporter::new(BatchOutput::Lines, named)
    }

    fn report(exit: TransferExit, bytes: u64, kept: u64) -> TransferReport {
        let failure = TransferFailure {
            exit,
            ..TransferFailure::error("the server is gone")
        };
        let asked = ("http://h/1.bin".to_owned(), "1.bin".to_owned());
        let terms = TransferTerms::default();
        let mut report = TransferReport::failed("get", asked, FetchMode::Direct, &terms, &failure);
        (report.bytes, report.resumable_bytes) = (bytes, kept);
        report
    }

    fn done(exit: TransferExit, bytes: u64) -> TransferEvent {
        let mut report = report(exit, bytes, 0);
        report.text = None;
        TransferEvent::Done(report)
    }

    #[test]
    fn a_summary_counts_every_download_once_and_its_code_is_that_of_the_first_failure() {
        let batch = reporter(6);
        batch.observer(1).on_event(&done(TransferExit::Done, 5));
        batch.on_skipped(2, "2.bin");
        batch
            .observer(3)
            .on_event(&done(TransferExit::DeadlineMissed, 7));
        let failed = TransferEvent::Error(report(TransferExit::Error, 3, 2));
        batch.observer(4).on_event(&failed);
        batch.on_failure(5, TransferExit::Usage, "5.bin exists");
        let summary = batch.state().summary();
        assert_eq!(
            (summary.urls, summary.done, summary.late, summary.skipped),
            (6, 2, 1, 1)
        );
        assert_eq!((summary.failed, summary.stopped), (2, 1));
        assert_eq!(
            (summary.bytes, summary.exit),
            (12, TransferExit::DeadlineMissed as u8)
        );
        let lines = batch.state().summary_lines(&summary);
        assert!(
            lines[0].starts_with("2 of 6 downloaded, 1 late, 1 skipped, 2 failed, 1 stopped: 12 B"),
            "{lines:?}"
        );
        assert_eq!(lines[1], "Failed: http://h/4.bin: the server is gone");
        assert_eq!(lines[2], "Failed: http://h/5.bin: 5.bin exists");
        assert!(lines[3].contains("--skip-existing"));
    }

    #[test]
    fn a_batch_that_is_whole_has_nothing_to_resume() {
        let batch = reporter(1);
        batch.observer(1).on_event(&done(TransferExit::Done, 5));
        let summary = batch.state().summary();
        assert_eq!((summary.exit, summary.done), (0, 1));
        assert_eq!(batch.state().summary_lines(&summary).len(), 1);
    }
}
