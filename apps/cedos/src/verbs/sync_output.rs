//! What `cedos sync` prints: a line for each file that changes, the reasons for waits, and a summary, for people or as JSON
//! lines. It is the same whether this process or the agent carries the mirror out.

use cedos_agent::fetch::outcome::{TransferExit, TransferReason};
use cedos_agent::fetch::report::{
    TransferReport, done_to_files, human_bytes, print_stderr, print_stdout,
};
use cedos_agent::mirror::MirrorEvent;
use serde_json::{Value, json};

/// Prints the events of a mirror, and its end.
#[derive(Debug, Clone, Copy)]
pub struct SyncOutput {
    json: bool,
    dry_run: bool,
    /// `get` or `put`.
    verb: &'static str,
}

impl SyncOutput {
    /// Creates the output of a mirror by transfers of this verb.
    pub fn new(json: bool, dry_run: bool, verb: &'static str) -> SyncOutput {
        SyncOutput {
            json,
            dry_run,
            verb,
        }
    }

    /// Shows an event of the agent.
    pub fn show(&self, event: &Value) {
        if matches!(event["event"].as_str(), Some("done" | "error")) {
            if let Ok(report) = serde_json::from_value::<TransferReport>(event.clone()) {
                self.finish(&report);
            }
        } else if let Ok(event) = serde_json::from_value::<MirrorEvent>(event.clone()) {
            self.on_event(&event);
        }
    }

    /// Shows an event.
    pub fn on_event(&self, event: &MirrorEvent) {
        if self.json {
            let line = serde_json::to_string(event).expect("plain data");
            return print_stdout(&line);
        }
        match event {
            MirrorEvent::File {
                action,
                path,
                bytes,
                ..
            } => {
                let sign = if action == "deleted" { '-' } else { '+' };
                let size = bytes.map(|bytes| format!("   {}", human_bytes(bytes)));
                print_stdout(&format!("{sign} {path}{}", size.unwrap_or_default()));
            }
            MirrorEvent::Failed { path, text, .. } => {
                print_stderr(&format!("cedos sync: {path}: {text}"));
            }
            MirrorEvent::Note { text } => print_stderr(&format!("note: {text}")),
            MirrorEvent::Waiting { why, unblocks, .. } => {
                let ends = unblocks.replace(" | ", ", or ");
                print_stderr(&format!("note: waiting: {why}. Ends with: {ends}"));
            }
        }
    }

    /// Says what it came to.
    pub fn finish(&self, report: &TransferReport) {
        let counts = report.mirror.unwrap_or_default();
        let is_stopped = report.exit == TransferExit::Cancelled as u8;
        // A run that ended before it began has no files that failed.
        let is_early = report.mirror.is_none() && !is_stopped;
        if self.json {
            let mut event = json!(counts);
            event["event"] = "done".into();
            event["bytes"] = report.bytes.into();
            event["metered_bytes"] = report.metered_bytes.into();
            event["exit"] = report.exit.into();
            event["dry_run"] = self.dry_run.into();
            if let Some(text) = report.text.as_ref().filter(|_| is_early) {
                event["text"] = text.as_str().into();
            }
            return print_stdout(&event.to_string());
        }
        if let Some(text) = report.text.as_ref().filter(|_| is_early) {
            return print_stderr(&format!("cedos sync: {text}"));
        }
        let verb = done_to_files(self.verb);
        let mut text = counts.describe(verb, report.bytes, report.metered_bytes, self.dry_run);
        if is_stopped || report.reason == Some(TransferReason::UserPaused) {
            text += ". Stopped; run the same command to resume";
        }
        print_stderr(&text);
    }
}
