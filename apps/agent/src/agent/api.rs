//! What is said on the agent's socket: one JSON object a line each way.
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

use crate::fetch::outcome::{TransferExit, TransferFailure};
use crate::order::{Deadline, TransferOrder};
use crate::stream::stream_service::StreamOrder;

/// Bytes of a line at most.
pub const LINE_BYTES_MAX: usize = 1 << 20;

/// What a program asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum AgentRequest {
    /// Who answers here.
    Hello,
    /// Take an order.
    Add {
        /// The order; its paths begin at the root.
        order: Box<TransferOrder>,
        /// Try what may pass again until the deadline.
        #[serde(default = "yes")]
        patient: bool,
        /// Tell what happens to it on this connection until it ends.
        #[serde(default)]
        follow: bool,
    },
    /// All transfers.
    List,
    /// One transfer.
    Status {
        /// Its number.
        id: u64,
    },
    /// Why it is where it is.
    Why {
        /// Its number.
        id: u64,
    },
    /// Stop it for now.
    Pause {
        /// Its number.
        id: u64,
    },
    /// Go on with it.
    Resume {
        /// Its number.
        id: u64,
    },
    /// Stop it; what is there stays.
    Cancel {
        /// Its number.
        id: u64,
    },
    /// Begin again with one that failed or was cancelled.
    Retry {
        /// Its number.
        id: u64,
    },
    /// Other terms for it.
    Edit {
        /// Its number.
        id: u64,
        /// What is to be different.
        terms: TermsChange,
    },
    /// Tell what happens to one, or to all, from now on.
    Watch {
        /// Its number; none is all of them.
        #[serde(default)]
        id: Option<u64>,
    },
    /// Serve links for players, as long as this connection lasts; how that stands is told each second.
    Stream {
        /// What, and how; paths begin at the root.
        ordered: Box<StreamOrder>,
    },
    /// Carry a program's socket; from the answer on this connection is that socket's
    /// (`edge/capi/src/agent_message.rs`).
    Socket(Box<AgentCall>),
    /// Take a program's descriptor whose connection is to be opened again by another process.
    Keep(ReopenClaim),
    /// Give a connection that was kept to this process.
    Reopen(ReopenClaim),
    /// Give the descriptor of a connection that was kept to this process.
    Descriptor(ReopenClaim),
    /// Decide for connections that this program carries itself, beside everything else: from the answer on
    /// each line is a report (`schedule_message`), and each answer a decision.
    Schedule,
    /// The links, and what they carried.
    Net,
    /// Say what a link costs.
    NetSet {
        /// The device's name, or the network's: an SSID, `wifi:SSID`, `carrier:CODE`.
        link: String,
        /// `free`, `metered`, `roaming` or `auto`.
        class: String,
    },
    /// The device's allowance on links that cost.
    Budget,
    /// Another allowance.
    BudgetSet {
        /// Bytes in a period.
        #[serde(default)]
        cap: Option<u64>,
        /// No limit.
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

/// What is to be different; what is left out stays.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TermsChange {
    /// By when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Deadline>,
    /// No deadline any more.
    #[serde(default)]
    pub no_deadline: bool,
    /// Money against time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// What to do when free links are not enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_late: Option<String>,
    /// Bytes that metered links may carry, in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cell: Option<u64>,
    /// No limit for those any more.
    #[serde(default)]
    pub no_max_cell: bool,
    /// 0 to 7, higher is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
}

impl TermsChange {
    /// True when nothing is to be different.
    pub fn is_empty(&self) -> bool {
        *self == TermsChange::default()
    }

    /// Makes it so. The deadline is not the order's any more once it is taken: see `queue::Kept`.
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
    }
}

/// An answer that says yes.
pub fn ok_response(more: Value) -> Value {
    let mut answer = json!({"ok": true});
    if let (Some(into), Value::Object(more)) = (answer.as_object_mut(), more) {
        into.extend(more);
    }
    answer
}

/// An answer that says no.
pub fn error_response(failure: &TransferFailure) -> Value {
    json!({
        "ok": false,
        "exit": failure.exit as u8,
        "reason": failure.reason,
        "text": failure.text,
    })
}

/// What an answer that says no meant.
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
