//! The progress of reading a file, whose digest is computed before it is sent.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::observers::BarObserver;
use super::{human_bytes, print_stderr, print_stdout};
use crate::fetch::boot_clock::BootInstant;

/// Shows the progress of reading a file before an upload, on a terminal or for programs, if that takes
/// a while.
pub struct DigestProgress {
    begun: BootInstant,
    said: Option<BootInstant>,
    bar: Option<ProgressBar>,
    json: bool,
}

/// How long reading a file may take without being reported.
const READING_SAID_AFTER: Duration = Duration::from_millis(500);
/// The interval of reports.
const READING_SAID_EVERY: Duration = Duration::from_secs(1);

/// The columns of a terminal from which there is room for a bar.
const WITH_BAR_COLUMNS: usize = 60; // `reading`, a bar of 24, and two sizes

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
                let text = "reading {decimal_bytes}/{decimal_total_bytes}";
                let template = match BarObserver::columns() {
                    columns if columns >= WITH_BAR_COLUMNS => text.replace(' ', " {bar:24} "),
                    _ => text.to_owned(),
                };
                if let Ok(style) = ProgressStyle::with_template(&template) {
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
