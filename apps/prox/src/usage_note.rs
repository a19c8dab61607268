//! What the store has of a client that several nodes serve: its note, and what may be changed in it.
//!
//! ```text
//!  bytes of the month = base + bytes of each process        a process replaces its own entry, and no other
//!  base               = what processes counted that run no more
//! ```
//!
//! A process says all that it has counted, and not what it counted since it said so last: a note that is written or read
//! twice, or late, says the same.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::client_traffic::MonthBytes;
use crate::traffic_table::Month;

/// The flows of a client at one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeFlows {
    /// The process that has them.
    pub(crate) run: String,
    pub(crate) flows: u32,
}

/// The bytes that one process has counted in the month.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RunBytes {
    node: String,
    down: u64,
    up: u64,
}

/// What the store has of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UsageNote {
    pub(crate) month: Month,
    /// The base: bytes to the client that processes counted which run no more.
    down: u64,
    /// The base: bytes from the client that processes counted which run no more.
    up: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) seen_s: Option<u64>,
    /// The bytes that each process has counted; none in a note of a version that knew only the sum.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    bytes: BTreeMap<String, RunBytes>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) flows: BTreeMap<String, NodeFlows>,
}

impl UsageNote {
    pub(crate) fn new(month: Month) -> UsageNote {
        UsageNote {
            month,
            down: 0,
            up: 0,
            seen_s: None,
            bytes: BTreeMap::new(),
            flows: BTreeMap::new(),
        }
    }

    /// The note in this month: one of an earlier month, or of one that a wrong clock told, counts nothing.
    pub(crate) fn in_month(mut self, month: Month) -> UsageNote {
        if self.month < month || self.month.is_wrong(month) {
            (self.month, self.down, self.up) = (month, 0, 0);
            self.bytes.clear();
        }
        self
    }

    pub(crate) fn base(&self) -> MonthBytes {
        MonthBytes {
            down: self.down,
            up: self.up,
        }
    }

    /// What a process has counted; `None` if the note has nothing of it.
    pub(crate) fn of_run(&self, run: &str) -> Option<MonthBytes> {
        let of_run = self.bytes.get(run)?;
        Some(MonthBytes {
            down: of_run.down,
            up: of_run.up,
        })
    }

    /// The base and what all processes but this one have counted.
    pub(crate) fn without_run(&self, run: &str) -> MonthBytes {
        let others = self.bytes.iter().filter(|(other, _)| *other != run);
        others.fold(self.base(), |sum, (_, of_run)| MonthBytes {
            down: sum.down.saturating_add(of_run.down),
            up: sum.up.saturating_add(of_run.up),
        })
    }

    /// Sets the bytes that a process of this node has counted.
    pub(crate) fn set_run(&mut self, run: &str, node: &str, bytes: MonthBytes) {
        let of_run = RunBytes {
            node: node.to_owned(),
            down: bytes.down,
            up: bytes.up,
        };
        self.bytes.insert(run.to_owned(), of_run);
    }

    /// Adds to the base what processes have counted that are gone, by their names and their nodes'. The sum stays.
    pub(crate) fn fold(&mut self, is_gone: impl Fn(&str, &str) -> bool) {
        let (down, up) = (&mut self.down, &mut self.up);
        self.bytes.retain(|run, of_run| {
            let is_gone = is_gone(run, &of_run.node);
            if is_gone {
                *down = down.saturating_add(of_run.down);
                *up = up.saturating_add(of_run.up);
            }
            !is_gone
        });
    }

    /// The nodes that the note names.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &String> {
        let of_bytes = self.bytes.values().map(|of_run| &of_run.node);
        self.flows.keys().chain(of_bytes)
    }
}
