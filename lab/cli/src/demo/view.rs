//! The view of a running demonstration: two bars and the links on a terminal, otherwise a line for
//! each change.

use cedos_terminal::print_stderr;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cedos_lab_emu::WorldEvent;
use cedos_lab_scenario::EventKind;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::Value;

/// How the state of a link that has an address begins.
const UP: &str = "up";

/// The view of one run.
pub(super) struct DemoView {
    bars: Option<DemoBars>,
    states: Mutex<BTreeMap<String, String>>,
    deadline_s: f64,
}

struct DemoBars {
    all: MultiProgress,
    links: ProgressBar,
    ours: ProgressBar,
    theirs: ProgressBar,
}

impl DemoView {
    pub(super) fn new(bytes: u64, deadline_s: f64) -> DemoView {
        print_stderr(&format!(
            "Downloading {} MB within {deadline_s:.0} s, with a plain TCP download beside it. Wi-Fi \
             (wlan0, free)\nand mobile data (wwan0, metered) come and go.",
            bytes / 1_000_000
        ));
        let bars = std::io::stderr().is_terminal().then(|| {
            let all = MultiProgress::new();
            let line = |bar: ProgressBar, template: &str| {
                let style = ProgressStyle::with_template(template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar());
                all.add(bar).with_style(style)
            };
            let bar = "{prefix:4} {bar:30} {decimal_bytes:>10}/{decimal_total_bytes} {msg}";
            DemoBars {
                links: line(ProgressBar::new(1), "{msg}"),
                ours: line(ProgressBar::new(bytes), bar).with_prefix("D2TP"),
                theirs: line(ProgressBar::new(bytes), bar).with_prefix("TCP"),
                all,
            }
        });
        DemoView {
            bars,
            states: Mutex::default(),
            deadline_s,
        }
    }

    fn states(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows that a link changed.
    pub(super) fn happened(&self, happening: &WorldEvent) {
        let state = match (happening.event.kind, happening.addresses) {
            (EventKind::Changed | EventKind::Rebind, _) => return,
            (EventKind::Attaching, _) => "joining".to_owned(),
            (_, Some(at)) => format!("{UP} as {}", at.v4),
            (_, None) => "LOST".to_owned(),
        };
        let before = self.states().insert(happening.link.clone(), state.clone());
        if before.as_ref() != Some(&state) {
            self.say(
                happening.at.as_secs_f64(),
                &format!("{} {state}", happening.link),
            );
        }
    }

    /// Prints a permanent line.
    pub(super) fn say(&self, t_s: f64, what: &str) {
        let line = format!("{t_s:6.2} s  {what}");
        match &self.bars {
            Some(bars) => bars.all.suspend(|| print_stderr(&line)),
            None => print_stderr(&line),
        }
    }

    /// Updates the bars.
    pub(super) fn update(&self, t_s: f64, ours: u64, last: &Value, theirs: u64) {
        let Some(bars) = &self.bars else { return };
        let states: Vec<String> = self
            .states()
            .iter()
            .map(|(link, state)| {
                let bytes = last["bytes_by_link"][link].as_u64().unwrap_or(0);
                format!("{link}: {state}, {:.1} MB", bytes as f64 / 1e6)
            })
            .collect();
        bars.links.set_message(format!(
            "{t_s:5.1} of {:.0} s · {}",
            self.deadline_s,
            states.join(" · ")
        ));
        bars.ours.set_position(ours);
        let is_up = self.states().values().any(|state| state.starts_with(UP));
        // The reason concerned the link that is now lost, so it is not shown.
        let why = match is_up {
            true => last["why"].as_str().unwrap_or_default().to_owned(),
            false => "waiting for a network".to_owned(),
        };
        bars.ours.set_message(why);
        bars.theirs.set_position(theirs);
    }

    /// Clears the bars.
    pub(super) fn end(&self) {
        if let Some(bars) = &self.bars {
            let _ = bars.all.clear();
        }
    }
}

/// The line for an event of a download, if it is worth one.
pub(super) fn news(event: &Value) -> Option<String> {
    let text = |key: &str| event[key].as_str().unwrap_or_default();
    match text("event") {
        "switch" if event["from"].is_null() => Some(format!("D2TP: using {}", text("to"))),
        "switch" => Some(format!(
            "D2TP: {} → {} after {:.0} ms of silence: {}",
            text("from"),
            text("to"),
            event["silence_ms"].as_f64().unwrap_or(0.0),
            text("why")
        )),
        "waiting" => Some(format!("D2TP: waiting, {}", text("why"))),
        "note" => Some(format!("D2TP: {}", text("text"))),
        "done" => Some("D2TP: finished".to_owned()),
        "error" => Some(format!("D2TP failed: {}", text("text"))),
        _ => None,
    }
}
