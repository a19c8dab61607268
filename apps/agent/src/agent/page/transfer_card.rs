//! A transfer as the page shows it, from its JSON object (docs/agent.md).

use std::path::Path;

use cedos_text::escape_controls;
use jiff::Zoned;
use serde_json::Value;
use url::Url;

use super::frame::PageFact;
use crate::fetch::deadline_text::describe_deadline;
use crate::fetch::outcome::TransferReason;
use crate::fetch::report::human_bytes;
use crate::transfer_text::{
    carried_by_link, deadline_of, networks_used, promise_of, wake_plan_text,
};

/// A button of a transfer: its value in the form, and its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TransferButton {
    pub(super) value: &'static str,
    pub(super) text: &'static str,
}

/// A transfer, ready to be shown.
pub(super) struct TransferCard {
    pub(super) id: u64,
    pub(super) name: String,
    /// The state in a word, as in the JSON object.
    pub(super) state: String,
    pub(super) state_text: &'static str,
    /// Where the transfer comes from, or goes.
    pub(super) route: String,
    pub(super) percent: Option<u8>,
    /// Sizes, the rate, and mobile data.
    pub(super) figures: Option<String>,
    /// The deadline, and how likely it is met.
    pub(super) deadline: Option<String>,
    /// Why the transfer waits, or how it failed, and what would end that.
    pub(super) why: Option<String>,
    /// What a person can do about a transfer that is not the agent's.
    pub(super) elsewhere: Option<String>,
    /// Pause, resume or retry.
    pub(super) toggle: Option<TransferButton>,
    pub(super) is_unfinished: bool,
    /// Whether metered networks would end the wait.
    pub(super) may_use_any_network: bool,
}

/// Text of a transfer, with other hosts' controls made visible.
fn text_of(value: &Value) -> Option<String> {
    Some(escape_controls(value.as_str()?).into_owned())
}

/// What would end a wait, in the page's words.
fn ends_with(event: &Value) -> Option<String> {
    let what = text_of(&event["unblocks"])?
        .replace("--policy any", "“Use any network”")
        .replace(
            "a larger --max-cell or budget",
            "more mobile data (cedos edit --max-cell, cedos budget)",
        );
    Some(format!("It ends with {}.", what.replace(" | ", ", or ")))
}

impl TransferCard {
    /// The card of a transfer.
    pub(super) fn of(transfer: &Value, now: &Zoned) -> TransferCard {
        let event = &transfer["last"];
        let id = transfer["id"].as_u64().unwrap_or(0);
        let state = transfer["standing"].as_str().unwrap_or("gone");
        let is_upload = transfer["verb"] == "put";
        let state_text = match state {
            "running" if is_upload => "Uploading",
            "running" => "Downloading",
            "waiting" => "Waiting",
            "queued" => "Queued",
            "paused" => "Paused",
            "scheduled" => "Scheduled",
            "done" if event["deadline_met"] == false => "Complete, but late",
            "done" => "Complete",
            "failed" => "Failed",
            "cancelled" => "Cancelled",
            _ => "Interrupted",
        };
        let is_unfinished = matches!(
            state,
            "running" | "waiting" | "queued" | "paused" | "scheduled"
        );
        // Only the agent tells the priority.
        let is_agents = !transfer["priority"].is_null();
        let toggle = match state {
            "running" | "waiting" | "queued" | "scheduled" => Some(TransferButton {
                value: "pause",
                text: "Pause",
            }),
            "paused" => Some(TransferButton {
                value: "resume",
                text: "Resume",
            }),
            "failed" | "cancelled" => Some(TransferButton {
                value: "retry",
                text: "Try again",
            }),
            _ => None,
        };
        let elsewhere = match (is_agents, is_unfinished) {
            (false, true) => Some(format!(
                "It runs in a process of its own: cedos cancel {id} stops it."
            )),
            (false, false) => Some("An earlier agent or process carried it out.".to_owned()),
            (true, _) => None,
        };
        TransferCard {
            id,
            name: name_of(transfer),
            state: state.to_owned(),
            state_text,
            route: route_of(transfer, is_upload),
            percent: percent_of(transfer).filter(|_| is_unfinished),
            figures: figures_of(transfer, state),
            deadline: deadline_text(transfer, is_unfinished, now),
            why: why_of(transfer, state),
            elsewhere,
            toggle,
            is_unfinished,
            may_use_any_network: is_unfinished
                && (event["unblocks"].as_str()).is_some_and(|text| text.contains("--policy any")),
        }
    }
}

/// The name of a transfer's file; its URL if it has none.
pub(super) fn name_of(transfer: &Value) -> String {
    let file = transfer["file"].as_str().unwrap_or_default();
    let name = Path::new(file).file_name().unwrap_or_default();
    let name = match name.is_empty() {
        true => transfer["url"].as_str().unwrap_or("?").into(),
        false => name.to_string_lossy(),
    };
    escape_controls(&name).into_owned()
}

fn route_of(transfer: &Value, is_upload: bool) -> String {
    let url = transfer["url"].as_str().and_then(|url| url.parse().ok());
    let host = url.and_then(|url: Url| url.host_str().map(str::to_owned));
    match (host, is_upload) {
        (Some(host), true) => format!("to {host}"),
        (Some(host), false) => format!("from {host}"),
        (None, _) => String::new(),
    }
}

fn percent_of(transfer: &Value) -> Option<u8> {
    let (bytes, length) = (transfer["bytes"].as_u64()?, transfer["length"].as_u64()?);
    let percent = bytes.saturating_mul(100).checked_div(length)?;
    Some(percent.min(100) as u8)
}

fn figures_of(transfer: &Value, state: &str) -> Option<String> {
    let mut words = Vec::new();
    match (transfer["bytes"].as_u64(), transfer["length"].as_u64()) {
        (Some(bytes), Some(length)) if bytes < length => {
            words.push(format!("{} of {}", human_bytes(bytes), human_bytes(length)));
        }
        (Some(bytes), _) => words.push(human_bytes(bytes)),
        (None, _) => {}
    }
    let event = &transfer["last"];
    if state == "running"
        && let Some(rate) = event["rate_bytes_per_s"].as_f64()
    {
        let link = text_of(&event["link"]).unwrap_or_default();
        words.push(format!("{}/s over {link}", human_bytes(rate as u64)));
    }
    if let Some(bytes) = transfer["metered_bytes"]
        .as_u64()
        .filter(|bytes| *bytes > 0)
    {
        words.push(format!("{} of that mobile data", human_bytes(bytes)));
    }
    (!words.is_empty()).then(|| words.join(", "))
}

fn deadline_text(transfer: &Value, is_unfinished: bool, now: &Zoned) -> Option<String> {
    let at = deadline_of(transfer).filter(|_| is_unfinished)?;
    let promise = promise_of(transfer).map(|promise| format!(": {}", promise.describe()));
    // In the words of those who pay for it.
    let promise = promise
        .unwrap_or_default()
        .replace("metered data", "mobile data");
    Some(format!("By {}{promise}", describe_deadline(at, now)))
}

fn why_of(transfer: &Value, state: &str) -> Option<String> {
    let event = &transfer["last"];
    let reason: Option<TransferReason> = serde_json::from_value(transfer["reason"].clone()).ok();
    let reason = reason.and_then(TransferReason::words).map(str::to_owned);
    let because = match state {
        "waiting" => text_of(&event["why"]).or(reason),
        "failed" => text_of(&event["text"]).or(reason),
        "gone" => Some(
            "its process was killed, or the machine restarted; the same command resumes it"
                .to_owned(),
        ),
        _ => None,
    }?;
    let because = sentence(&because);
    match ends_with(event).filter(|_| state == "waiting") {
        Some(ends) => Some(format!("{because} {ends}")),
        None => Some(because),
    }
}

/// Words with a full stop. Their first may be the name of a device, so it stays as it is.
fn sentence(words: &str) -> String {
    let end = if words.ends_with(['.', '!', '?']) {
        ""
    } else {
        "."
    };
    format!("{words}{end}")
}

/// All that is known of a transfer beside its card: what `cedos why` and `cedos status` say.
pub(super) fn facts_of(transfer: &Value, now: &Zoned) -> Vec<PageFact> {
    let card = TransferCard::of(transfer, now);
    let event = &transfer["last"];
    let mut facts = Vec::new();
    let mut add = |label, text: Option<String>| {
        facts.extend(text.map(|text| PageFact::new(label, &text)));
    };
    add("Deadline", card.deadline);
    let running = (card.state == "running")
        .then(|| text_of(&event["why"]))
        .flatten();
    add("Why", card.why.or(running.map(|why| sentence(&why))));
    let policy = transfer["policy"].is_string() && card.is_unfinished;
    add("Networks", policy.then(|| networks_used(transfer)));
    let limit = transfer["max_cell"].as_u64();
    let limit = limit.map(|bytes| format!("{} at most", human_bytes(bytes)));
    add("Mobile data", limit);
    add("Carried", carried_by_link(transfer));
    add("Sleep", wake_plan_text(&transfer["vigil"]));
    let (url, file) = (text_of(&transfer["url"]), text_of(&transfer["file"]));
    let (from, to) = match transfer["verb"] == "put" {
        true => (file, url),
        false => (url, file),
    };
    add("From", from);
    add("To", to);
    add("Mode", text_of(&transfer["mode"]));
    facts
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn waiting() -> Value {
        json!({
            "id": 42, "standing": "waiting", "reason": "path_cost", "verb": "get", "priority": 0,
            "url": "https://example.org/a.mp3", "file": "/home/me/episode.mp3",
            "bytes": 61_000_000, "length": 94_000_000, "metered_bytes": 1_000_000,
            "deadline": "2999-01-31T07:30:00Z",
            "last": {"why": "only lte0 (metered) is up", "unblocks": "a free network | --policy any"},
        })
    }

    #[test]
    fn a_card_says_why_a_transfer_waits_and_what_would_end_that() {
        let card = TransferCard::of(&waiting(), &Zoned::now());
        assert_eq!(
            (&*card.name, card.state_text, &*card.route),
            ("episode.mp3", "Waiting", "from example.org")
        );
        assert_eq!(card.percent, Some(64));
        assert_eq!(
            card.figures.as_deref(),
            Some("61.00 MB of 94.00 MB, 1.00 MB of that mobile data")
        );
        assert_eq!(
            card.why.as_deref(),
            Some("only lte0 (metered) is up. It ends with a free network, or “Use any network”.")
        );
        assert!(card.may_use_any_network && card.is_unfinished && card.elsewhere.is_none());
        assert_eq!(card.toggle.map(|toggle| toggle.value), Some("pause"));
    }

    #[test]
    fn a_card_offers_what_can_be_done_in_each_state() {
        let offered = |state: &str| {
            let mut transfer = waiting();
            transfer["standing"] = json!(state);
            let card = TransferCard::of(&transfer, &Zoned::now());
            (card.toggle.map(|toggle| toggle.value), card.is_unfinished)
        };
        assert_eq!(offered("queued"), (Some("pause"), true));
        assert_eq!(offered("running"), (Some("pause"), true));
        assert_eq!(offered("paused"), (Some("resume"), true));
        assert_eq!(offered("scheduled"), (Some("pause"), true));
        assert_eq!(offered("failed"), (Some("retry"), false));
        assert_eq!(offered("cancelled"), (Some("retry"), false));
        assert_eq!(offered("done"), (None, false));
    }

    #[test]
    fn a_transfer_of_a_process_of_its_own_is_left_to_it() {
        let mut transfer = waiting();
        transfer["priority"] = Value::Null;
        let card = TransferCard::of(&transfer, &Zoned::now());
        let text = card.elsewhere.expect("said");
        assert!(text.contains("cedos cancel 42"), "{text}");
    }

    #[test]
    fn what_other_hosts_say_is_shown_without_controls() {
        let mut transfer = waiting();
        transfer["file"] = json!("/home/me/exe\u{202e}3pm.\r");
        transfer["last"]["why"] = json!("the server says \u{1b}[31mno");
        let card = TransferCard::of(&transfer, &Zoned::now());
        let shown = format!("{} {:?}", card.name, card.why);
        assert!(!shown.chars().any(cedos_text::is_control), "{shown}");
    }
}
