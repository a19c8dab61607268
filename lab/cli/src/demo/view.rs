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
        let states = self.states();
        let links = links_line(&states, last);
        let deadline_s = self.deadline_s;
        let line = format!("{t_s:5.1} of {deadline_s:.0} s · {links}");
        bars.links.set_message(line);
        bars.ours.set_position(ours);
        bars.ours.set_message(reason_line(&states, last).to_owned());
        bars.theirs.set_position(theirs);
    }

    /// Clears the bars.
    pub(super) fn end(&self) {
        if let Some(bars) = &self.bars {
            let _ = bars.all.clear();
        }
    }
}

/// The links with their states, and the bytes that each has carried.
fn links_line(states: &BTreeMap<String, String>, last: &Value) -> String {
    let links = states.iter().map(|(link, state)| {
        let bytes = last["bytes_by_link"][link].as_u64().unwrap_or(0);
        format!("{link}: {state}, {:.1} MB", bytes as f64 / 1e6)
    });
    links.collect::<Vec<_>>().join(" · ")
}

/// Why the download uses the link that it uses. While no link has an address the last reason is not shown: it concerned
/// a link that is lost now.
fn reason_line<'a>(states: &BTreeMap<String, String>, last: &'a Value) -> &'a str {
    match states.values().any(|state| state.starts_with(UP)) {
        true => last["why"].as_str().unwrap_or_default(),
        false => "waiting for a network",
    }
}

/// A time without data, for people.
pub(super) fn silence_text(ms: f64) -> String {
    match ms < 1_000.0 {
        true => format!("{ms:.0} ms"),
        false => format!("{:.1} s", ms / 1e3),
    }
}

/// The line for an event of a download, if it is worth one.
pub(super) fn news(event: &Value) -> Option<String> {
    let text = |key: &str| event[key].as_str().unwrap_or_default();
    match text("event") {
        "switch" if event["from"].is_null() => Some(format!("D2TP: using {}", text("to"))),
        "switch" => {
            let silence = silence_text(event["silence_ms"].as_f64().unwrap_or(0.0));
            let (from, to, why) = (text("from"), text("to"), text("why"));
            Some(match from == to {
                true => format!("D2TP: on {to} again after {silence}, from another address"),
                false => format!("D2TP: {from} → {to} after {silence} of silence: {why}"),
            })
        }
        "waiting" => Some(format!("D2TP: waiting: {}", text("why"))),
        "note" => Some(format!("D2TP: {}", text("text"))),
        "done" => Some("D2TP: finished".to_owned()),
        "error" => Some(format!("D2TP failed: {}", text("text"))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn states(of: [(&str, &str); 2]) -> BTreeMap<String, String> {
        of.map(|(link, state)| (link.to_owned(), state.to_owned()))
            .into()
    }

    #[test]
    fn while_every_link_is_lost_the_line_says_so_and_no_older_reason() {
        let last = json!({
            "why": "wlan0 is up and free",
            "bytes_by_link": {"wlan0": 18_600_000, "wwan0": 0},
        });
        let lost = states([("wlan0", "LOST"), ("wwan0", "LOST")]);
        assert_eq!(reason_line(&lost, &last), "waiting for a network");
        assert_eq!(
            links_line(&lost, &last),
            "wlan0: LOST, 18.6 MB · wwan0: LOST, 0.0 MB"
        );
        let joining = states([("wlan0", "joining"), ("wwan0", "LOST")]);
        assert_eq!(reason_line(&joining, &last), "waiting for a network");
        let up = states([("wlan0", "up as 127.64.3.2"), ("wwan0", "LOST")]);
        assert_eq!(reason_line(&up, &last), "wlan0 is up and free");
        // Before anything was carried.
        assert_eq!(reason_line(&up, &Value::Null), "");
        assert_eq!(
            reason_line(&BTreeMap::new(), &last),
            "waiting for a network"
        );
    }

    #[test]
    fn what_happens_to_a_download_is_told_in_a_line() {
        let told = |event: Value| news(&event).unwrap_or_default();
        let first = json!({"event": "switch", "from": null, "to": "wlan0"});
        assert_eq!(told(first), "D2TP: using wlan0");
        let switch = json!({
            "event": "switch", "from": "wlan0", "to": "wwan0", "silence_ms": 91.6, "why": "wlan0 is lost",
        });
        assert_eq!(
            told(switch),
            "D2TP: wlan0 → wwan0 after 92 ms of silence: wlan0 is lost"
        );
        let back = json!({
            "event": "switch", "from": "wlan0", "to": "wlan0", "silence_ms": 4_038, "why": "wlan0 is free",
        });
        assert_eq!(
            told(back),
            "D2TP: on wlan0 again after 4.0 s, from another address"
        );
        let waiting = json!({"event": "waiting", "why": "no network is up"});
        assert_eq!(told(waiting), "D2TP: waiting: no network is up");
        let note = json!({"event": "note", "text": "resumed after 1.2 s without a network"});
        assert_eq!(told(note), "D2TP: resumed after 1.2 s without a network");
        assert_eq!(news(&json!({"event": "progress"})), None);
    }
}
