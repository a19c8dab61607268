//! What `cedos sync` says: a line for each file that changed, why it waits, and a summary.

use std::sync::{Mutex, PoisonError};

use cedos_agent::fetch::outcome::{TransferExit, TransferFailure, TransferReason};
use cedos_agent::fetch::report::{
    TransferEvent, TransferObserver, TransferReport, human_bytes, print_stderr, print_stdout,
};
use serde::Serialize;
use serde_json::json;

use super::relative_path::RelativePath;

/// How many files ended like this.
#[derive(Debug, Default, Clone, Serialize)]
struct SyncCounts {
    transferred: u64,
    unchanged: u64,
    deleted: u64,
    failed: u64,
    late: u64,
    /// Bytes of the files that were transferred.
    bytes: u64,
    metered_bytes: u64,
}

#[derive(Debug, Default)]
struct ReporterState {
    counts: SyncCounts,
    exit: Option<TransferExit>,
    /// The reason for a wait that was shown last.
    waits: Option<TransferReason>,
}

/// Tells people or scripts what happens, and counts it.
#[derive(Debug)]
pub struct SyncReporter {
    json: bool,
    dry_run: bool,
    verb: &'static str,
    state: Mutex<ReporterState>,
}

impl SyncReporter {
    /// Creates a reporter. `verb`: what happens to files, `downloaded` or `uploaded`.
    pub fn new(json: bool, dry_run: bool, verb: &'static str) -> SyncReporter {
        SyncReporter {
            json,
            dry_run,
            verb,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, ReporterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, sign: char, action: &str, path: &RelativePath, bytes: Option<u64>) {
        if self.json {
            let dry = self.dry_run;
            let event = json!({"event": "file", "action": action, "path": path.text(),
                               "bytes": bytes, "dry_run": dry});
            return print_stdout(&event.to_string());
        }
        let size = bytes.map(|bytes| format!("   {}", human_bytes(bytes)));
        print_stdout(&format!("{sign} {path}{}", size.unwrap_or_default()));
    }

    /// A file was transferred.
    pub fn transferred(&self, path: &RelativePath, report: &TransferReport) {
        {
            let mut state = self.state();
            state.counts.transferred += 1;
            state.counts.bytes += report.bytes;
            state.counts.late += u64::from(report.deadline_met == Some(false));
        }
        self.say('+', self.verb, path, Some(report.bytes));
    }

    /// A file would be transferred.
    pub fn would_transfer(&self, path: &RelativePath, bytes: Option<u64>) {
        let mut state = self.state();
        state.counts.transferred += 1;
        state.counts.bytes += bytes.unwrap_or(0);
        drop(state);
        self.say('+', self.verb, path, bytes);
    }

    /// A file is as it was.
    pub fn unchanged(&self) {
        self.state().counts.unchanged += 1;
    }

    /// A file was deleted, or would be.
    pub fn deleted(&self, path: &RelativePath) {
        self.state().counts.deleted += 1;
        self.say('-', "deleted", path, None);
    }

    /// A file or a folder failed.
    pub fn failed(&self, what: &str, failure: &TransferFailure) {
        let mut state = self.state();
        // What was stopped with the whole is none of its own faults.
        if failure.exit != TransferExit::Cancelled {
            state.counts.failed += 1;
        }
        let _ = state.exit.get_or_insert(failure.exit);
        drop(state);
        if failure.exit == TransferExit::Cancelled {
            return;
        }
        if self.json {
            let event = json!({"event": "failed", "path": what, "exit": failure.exit as u8,
                               "reason": failure.reason, "text": failure.text});
            return print_stdout(&event.to_string());
        }
        print_stderr(&format!("cedos sync: {what}: {}", failure.text));
    }

    /// A note for people.
    pub fn note(&self, text: &str) {
        if self.json {
            return print_stdout(&json!({"event": "note", "text": text}).to_string());
        }
        print_stderr(&format!("note: {text}"));
    }

    fn spent(&self, metered_bytes: u64) {
        self.state().counts.metered_bytes += metered_bytes;
    }

    /// Bytes that metered links carried so far.
    pub fn metered_bytes(&self) -> u64 {
        self.state().counts.metered_bytes
    }

    /// Whether anything failed.
    pub fn has_failures(&self) -> bool {
        self.state().exit.is_some()
    }

    /// Says what it came to. Returns the exit code.
    pub fn finish(&self) -> TransferExit {
        let state = self.state();
        let counts = &state.counts;
        let exit = state.exit.unwrap_or(match counts.late {
            0 => TransferExit::Done,
            _ => TransferExit::DeadlineMissed,
        });
        if self.json {
            let mut event = json!(counts);
            event["event"] = "done".into();
            event["exit"] = (exit as u8).into();
            event["dry_run"] = self.dry_run.into();
            print_stdout(&event.to_string());
            return exit;
        }
        let would = if self.dry_run { "would be " } else { "" };
        let mut text = format!(
            "{} {would}{} ({}), {} unchanged, {} {would}deleted",
            counts.transferred,
            self.verb,
            human_bytes(counts.bytes),
            counts.unchanged,
            counts.deleted
        );
        if counts.failed > 0 {
            text += &format!(", {} failed", counts.failed);
        }
        if counts.late > 0 {
            text += &format!(", {} late", counts.late);
        }
        if counts.metered_bytes > 0 {
            text += &format!("; mobile data {}", human_bytes(counts.metered_bytes));
        }
        if exit == TransferExit::Cancelled {
            text += ". Stopped; run the same command to resume";
        }
        print_stderr(&text);
        exit
    }
}

/// The observer of one transfer.
pub struct FileObserver<'a> {
    reporter: &'a SyncReporter,
    /// The report of the end.
    pub report: Option<TransferReport>,
}

impl<'a> FileObserver<'a> {
    /// Creates an observer of a transfer that has not begun.
    pub fn new(reporter: &'a SyncReporter) -> FileObserver<'a> {
        FileObserver {
            reporter,
            report: None,
        }
    }
}

impl TransferObserver for FileObserver<'_> {
    fn on_event(&mut self, event: &TransferEvent) {
        match event {
            TransferEvent::Waiting {
                reason,
                why,
                unblocks,
                ..
            } => {
                let mut state = self.reporter.state();
                // The others wait for the same.
                if state.waits.replace(*reason) != Some(*reason) {
                    drop(state);
                    let ends = unblocks.replace(" | ", ", or ");
                    self.reporter
                        .note(&format!("waiting: {why}. Ends with: {ends}"));
                }
            }
            TransferEvent::Progress { .. } => self.reporter.state().waits = None,
            TransferEvent::Done(report) | TransferEvent::Error(report) => {
                self.reporter.spent(report.metered_bytes);
                self.report = Some(report.clone());
            }
            TransferEvent::Begun { .. }
            | TransferEvent::Switch { .. }
            | TransferEvent::Note { .. } => {}
        }
    }
}
