//! What commands and the agent's page say of a transfer, from its JSON object (docs/agent.md).

use jiff::{Timestamp, Zoned};
use serde_json::Value;

use crate::fetch::deadline_text::describe_time;
use crate::fetch::report::{DeadlinePromise, human_bytes, link_label};

/// The deadline of a transfer.
pub fn deadline_of(transfer: &Value) -> Option<Timestamp> {
    transfer["deadline"].as_str()?.parse().ok()
}

/// The estimate for a transfer that has a deadline.
pub fn promise_of(transfer: &Value) -> Option<DeadlinePromise> {
    serde_json::from_value(transfer["promise"].clone()).ok()
}

/// Which networks the policy of a transfer lets it use, in words.
pub fn networks_used(transfer: &Value) -> String {
    let word = |field: &str| transfer[field].as_str().unwrap_or_default();
    let (policy, if_late) = (word("policy"), word("if_late"));
    let Some(deadline) = deadline_of(transfer) else {
        return match policy {
            "any" => "free ones, and metered ones when those do not work or are slow",
            "fast" => "all that are up",
            _ => "free ones only",
        }
        .to_owned();
    };
    let has_passed = deadline <= Timestamp::now();
    let networks = match (policy, if_late) {
        ("any", _) => "free ones, and metered ones when those do not work or are slow",
        ("fast", _) => "all that are up",
        ("free-first", "cell") => "free ones first, and metered ones if the deadline needs them",
        ("balanced", "cell") => {
            "free ones first, and metered ones in good time if the deadline needs them"
        }
        _ => "free ones only",
    };
    let at_the_deadline = match if_late {
        "fail" if !has_passed => "; it ends at the deadline, complete or not",
        "wait" if !has_passed && matches!(policy, "free-first" | "balanced") => {
            ", even if it will be late"
        }
        _ => "",
    };
    format!("{networks}{at_the_deadline}")
}

/// The bytes that each link carried, in all runs; none if nothing moved.
pub fn carried_by_link(transfer: &Value) -> Option<String> {
    let event = &transfer["last"];
    // The agent counts earlier runs, too.
    let carried = match event["carried_by_link"].is_object() {
        true => &event["carried_by_link"],
        false => &event["bytes_by_link"],
    };
    let show = |(link, bytes): (&String, &Value)| {
        let bytes = human_bytes(bytes.as_u64().unwrap_or(0));
        format!("{} {bytes}", link_label(link))
    };
    let links: Vec<String> = carried
        .as_object()
        .into_iter()
        .flatten()
        .map(show)
        .collect();
    (!links.is_empty()).then(|| links.join(", "))
}

/// When the machine is woken for a transfer, and whether it is kept awake.
pub fn wake_plan_text(plan: &Value) -> Option<String> {
    let at = |field: &str| {
        Some(describe_time(
            plan[field].as_str()?.parse().ok()?,
            &Zoned::now(),
        ))
    };
    // What is missing for it is in --json.
    let lacks = |what: &str| {
        let mut lacks = plan["lacks"].as_array().into_iter().flatten();
        lacks.any(|lack| lack.as_str().is_some_and(|lack| lack.starts_with(what)))
    };
    let unless_asleep = match lacks("it is not woken") {
        true => ", unless it is asleep then",
        false => "",
    };
    let look =
        at("look").map(|at| format!("the machine looks for networks again at {at}{unless_asleep}"));
    let start = at("start").map(|at| format!("the transfer begins at {at} at the latest"));
    let awake = (plan["awake"] == true).then(|| match lacks("it may sleep") {
        true => "the machine may fall asleep while data flows".to_owned(),
        false => "the machine is kept awake".to_owned(),
    });
    let words: Vec<String> = [look, start, awake].into_iter().flatten().collect();
    if words.is_empty() {
        return None;
    }
    Some(words.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_a_machine_cannot_do_asleep_is_said_without_the_systems_words() {
        let text = wake_plan_text(&json!({
            "look": "2030-01-31T07:30:00Z", "awake": true,
            "lacks": [
                "it is not woken to look for links: the machine has no clock that could wake it",
                "it may sleep while data flows: logind is not reached: failed to connect",
            ],
        }));
        let text = text.expect("it looks");
        let sentence = ", unless it is asleep then; the machine may fall asleep while data flows";
        assert!(text.ends_with(sentence), "{text}");
    }

    #[test]
    fn the_networks_of_a_transfer_are_said_in_words_that_fit_its_policy_and_deadline() {
        let words = |policy: &str, if_late: &str, deadline: Option<&str>| {
            networks_used(&json!({"policy": policy, "if_late": if_late, "deadline": deadline}))
        };
        let ahead = Some("2999-01-31T07:30:00Z");
        assert_eq!(words("free-only", "cell", ahead), "free ones only");
        assert_eq!(words("free-first", "cell", None), "free ones only");
        assert_eq!(
            words("free-first", "cell", ahead),
            "free ones first, and metered ones if the deadline needs them"
        );
        assert_eq!(
            words("free-first", "wait", ahead),
            "free ones only, even if it will be late"
        );
        assert_eq!(
            words("any", "fail", ahead),
            "free ones, and metered ones when those do not work or are slow; it ends at the deadline, \
             complete or not"
        );
        assert_eq!(
            words("free-first", "wait", Some("2000-01-31T07:30:00Z")),
            "free ones only"
        );
    }
}
