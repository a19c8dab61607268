//! The messages on the agent's socket: one JSON object per line in both directions.
//!
//! ```text
//!  {"do":"why","id":42}            ▶
//!                                  ◀ {"ok":true,"id":42,"standing":"waiting","reason":"path_cost",…}
//!  {"do":"watch","id":42}          ▶
//!                                  ◀ {"ok":true}
//!                                  ◀ {"id":42,"event":"progress","bytes":61000000,…}   and so on
//! ```

use d2tp::agent_carrier::{AgentCall, ReopenClaim};
use d2tp_links::CapCutoff;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use super::podcasts::podcast_request::{INDEX_DOWNLOAD_FILE, PodcastRequest};
use crate::fetch::outcome::{TransferExit, TransferFailure};
use crate::order::{Deadline, TransferOrder};
use crate::stream::stream_service::StreamOrder;

/// The most bytes of a line.
pub const LINE_BYTES_MAX: usize = 1 << 20;

/// A request of a program to the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum AgentRequest {
    /// Asks the agent to identify itself.
    Hello,
    /// Adds a transfer.
    Add {
        /// The order; its paths are absolute.
        order: Box<TransferOrder>,
        /// Whether transient failures are retried until the deadline.
        #[serde(default = "yes")]
        patient: bool,
        /// Whether the transfer's events are sent on this connection until it ends.
        #[serde(default)]
        follow: bool,
    },
    /// Lists all transfers.
    List,
    /// Forgets the transfers that have ended, and returns them.
    Clear,
    /// Returns one transfer.
    Status {
        /// The transfer's number.
        id: u64,
    },
    /// Explains the state of a transfer.
    Why {
        /// The transfer's number.
        id: u64,
    },
    /// Pauses a transfer.
    Pause {
        /// The transfer's number.
        id: u64,
    },
    /// Resumes a transfer.
    Resume {
        /// The transfer's number.
        id: u64,
    },
    /// Cancels a transfer; the bytes received stay.
    Cancel {
        /// The transfer's number.
        id: u64,
    },
    /// Restarts a transfer that failed or was cancelled.
    Retry {
        /// The transfer's number.
        id: u64,
    },
    /// Changes the terms of a transfer.
    Edit {
        /// The transfer's number.
        id: u64,
        /// The terms that change.
        terms: TermsChange,
    },
    /// Sends the events of one transfer, or of all, from now on.
    Watch {
        /// The transfer's number; none is all of them.
        #[serde(default)]
        id: Option<u64>,
    },
    /// Serves links for players while this connection lasts; the state is sent each second.
    Stream {
        /// The stream order; its paths are absolute.
        ordered: Box<StreamOrder>,
    },
    /// Carries a program's socket; after the answer the connection belongs to it
    /// (`edge/capi/src/agent_message.rs`).
    Socket(Box<AgentCall>),
    /// Takes the descriptor of a program whose connection another process may open again.
    Keep(ReopenClaim),
    /// Hands a kept connection to this process.
    Reopen(ReopenClaim),
    /// Returns the descriptor of a connection that was handed to this process.
    Descriptor(ReopenClaim),
    /// Schedules connections that this program carries itself, together with everything else: after the
    /// answer each line is a report (`schedule_message`), and each answer a decision.
    Schedule,
    /// Opens the page for browsers of this machine, and returns its link.
    Page {
        /// Whether the link that was known until now no longer works.
        #[serde(default)]
        new_link: bool,
        /// Whether a link that works once is returned, too.
        #[serde(default)]
        entry: bool,
    },
    /// Closes the page.
    PageClose,
    /// Podcasts: subscriptions, episodes, rules.
    Cast(PodcastRequest),
    /// Returns the links, and what they carried.
    Net,
    /// Sets the cost class of a link.
    NetSet {
        /// The name of the device or of the network: an SSID, `wifi:SSID`, `carrier:CODE`.
        link: String,
        /// `free`, `metered`, `roaming` or `auto`.
        class: String,
    },
    /// Returns the device's allowance on metered links.
    Budget,
    /// Changes the allowance.
    BudgetSet {
        /// The allowance in bytes per period.
        #[serde(default)]
        cap: Option<u64>,
        /// Whether the limit is removed.
        #[serde(default)]
        no_cap: bool,
        /// The day of the month on which a period begins.
        #[serde(default)]
        reset_day: Option<i8>,
        /// `hard`, `soft` or `cautious`: what happens at the cap.
        #[serde(default)]
        cutoff: Option<CapCutoff>,
    },
}

fn yes() -> bool {
    true
}

/// Terms to change; absent ones stay.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TermsChange {
    /// The new deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Deadline>,
    /// Whether the deadline is removed.
    #[serde(default)]
    pub no_deadline: bool,
    /// The new cost policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// What to do when free links are too slow for the deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_late: Option<String>,
    /// The most bytes that metered links may carry, in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cell: Option<u64>,
    /// Whether the limit for metered data is removed.
    #[serde(default)]
    pub no_max_cell: bool,
    /// The new priority: 0 to 7, higher is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    /// The bytes at the beginning that are wanted before the rest of others; 0 is no sooner than the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_bytes: Option<u64>,
    /// When the transfer saves energy: `auto`, `always` or `never`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save_energy: Option<String>,
}

impl TermsChange {
    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        *self == TermsChange::default()
    }

    /// Applies the change to an order. A deadline is set in the queue instead: see `queue::SavedTransfer`.
    pub fn apply(&self, order: &mut TransferOrder) {
        if let Some(policy) = &self.policy {
            order.policy.clone_from(policy);
        }
        if let Some(if_late) = &self.if_late {
            order.if_late.clone_from(if_late);
        }
        if self.no_max_cell {
            order.max_cell = None;
        }
        order.max_cell = self.max_cell.or(order.max_cell);
        order.priority = self.priority.unwrap_or(order.priority);
        order.start_bytes = self.start_bytes.or(order.start_bytes);
        if self.save_energy.is_some() {
            order.save_energy.clone_from(&self.save_energy);
        }
    }
}

/// A response to a successful request.
pub fn ok_response(more: Value) -> Value {
    let mut answer = json!({"ok": true});
    if let (Some(into), Value::Object(more)) = (answer.as_object_mut(), more) {
        into.extend(more);
    }
    answer
}

/// A response that reports a failure.
pub fn error_response(failure: &TransferFailure) -> Value {
    json!({
        "ok": false,
        "exit": failure.exit as u8,
        "reason": failure.reason,
        "text": failure.text,
    })
}

/// The failure that a response reports.
pub fn failure_from(answer: &Value) -> TransferFailure {
    let exit = answer["exit"].as_u64().and_then(TransferExit::of);
    let text = answer["text"].as_str().unwrap_or("the agent refused");
    TransferFailure {
        exit: exit.unwrap_or(TransferExit::Error),
        reason: serde_json::from_value(answer["reason"].clone()).ok(),
        text: text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::TransferVerb;

    #[test]
    fn requests_are_read_as_they_are_documented() {
        let read = |text: &str| serde_json::from_str::<AgentRequest>(text);
        assert_eq!(
            read(r#"{"do":"why","id":42}"#).unwrap(),
            AgentRequest::Why { id: 42 }
        );
        assert_eq!(
            read(r#"{"do":"watch"}"#).unwrap(),
            AgentRequest::Watch { id: None }
        );
        let set = read(r#"{"do":"net-set","link":"wwan0","class":"free"}"#).unwrap();
        assert!(matches!(set, AgentRequest::NetSet { .. }));
        let add = read(r#"{"do":"add","order":{"verb":"get","url":"http://h/a"}}"#).unwrap();
        let AgentRequest::Add {
            order,
            patient,
            follow,
        } = add
        else {
            panic!("{add:?}");
        };
        assert_eq!(
            (order.verb, patient, follow),
            (TransferVerb::Get, true, false)
        );
        let rule = read(r#"{"do":"cast","cast":"rule","channel":"news","schedule":"in 2h"}"#);
        assert!(matches!(
            rule.unwrap(),
            AgentRequest::Cast(PodcastRequest::Rule { keep: None, .. })
        ));
        assert!(read(r#"{"do":"dance"}"#).is_err());
        assert!(read(r#"{"do":"edit","id":1,"terms":{"polcy":"any"}}"#).is_err());
    }

    #[test]
    fn a_change_changes_what_it_names_and_nothing_else() {
        let mut order = TransferOrder::new(TransferVerb::Get, "http://h/a");
        order.max_cell = Some(5);
        let before = order.clone();
        TermsChange::default().apply(&mut order);
        assert_eq!(order, before);
        let change = TermsChange {
            policy: Some("any".into()),
            no_max_cell: true,
            priority: Some(3),
            ..TermsChange::default()
        };
        change.apply(&mut order);
        assert_eq!(
            (&*order.policy, order.max_cell, order.priority),
            ("any", None, 3)
        );
    }

    #[test]
    fn a_no_comes_through_as_it_was_meant() {
        let failure = TransferFailure::of(
            TransferExit::NoPermittedPath,
            crate::fetch::outcome::TransferReason::PathCost,
            "because",
        );
        let again = failure_from(&error_response(&failure));
        assert_eq!((again.exit, again.reason), (failure.exit, failure.reason));
        assert_eq!(again.text, "because");
    }
}
