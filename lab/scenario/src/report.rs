//! The report of a run: the one object that `lab run --json` and `sim run --json` print.
//!
//! All times are seconds of the run's own clock. Bytes of links are bytes of IP packets, counted
//! where the link hands them over.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// One per flow, in the scenario's order.
    pub flows: Vec<FlowReport>,
    /// One per link, in the scenario's order.
    pub links: Vec<LinkReport>,
    /// Changes of the link that carries the data, in order of time.
    pub switches: Vec<Switch>,
    /// The scenario's expectations, judged.
    pub expectations: Vec<Expectation>,
}

/// What became of a flow.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowReport {
    /// Its id in the scenario.
    pub id: String,
    /// Bytes delivered to the application.
    pub bytes: u64,
    /// Whether everything arrived and its digest equals the origin's.
    pub sha256_ok: bool,
    /// When it was complete; `null` if it never was.
    pub finished_s: Option<f64>,
    /// When its first byte of content came; `null` if none did, or nobody could see it.
    pub first_byte_s: Option<f64>,
    /// When the last that was new came.
    pub last_byte_s: Option<f64>,
    /// The longest time between two arrivals of new bytes; `null` if none came, or nobody could see it.
    #[serde(default)]
    pub silence_max_s: Option<f64>,
    /// By when it should have been; `null` if there was no deadline.
    pub deadline_s: Option<f64>,
    /// Complete in time; without a deadline, complete.
    pub deadline_met: bool,
    /// Payload bytes by the link they came over, re-sent ones included.
    pub bytes_by_link: BTreeMap<String, u64>,
    /// Payload bytes that arrived more than once.
    pub duplicate_bytes: u64,
}

/// What a link carried.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// Name of the link.
    pub name: String,
    /// `free`, `metered` or `roaming`.
    pub class: String,
    /// Bytes of IP packets handed to the device.
    pub bytes_down: u64,
    /// Bytes of IP packets the device put on it.
    pub bytes_up: u64,
    /// Packets the device tried to send on it while it was down.
    pub packets_while_down: u64,
    /// How long packets to the device were in the queue, their airtime included: the mean.
    pub wait_down_ms: f64,
    /// How long packets from the device were in the queue, their airtime included: the mean.
    pub wait_up_ms: f64,
    /// The longest wait of a packet to the device.
    pub wait_down_max_ms: f64,
}

/// How the data moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SwitchKind {
    /// Another link was up when the old one was left.
    MakeBeforeBreak,
    /// No path was up in between.
    BreakBeforeMake,
}

/// The data moved from one link to another, or to a new address of the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// When the old link was lost, or the new one came up beside it.
    pub at_s: f64,
    /// The link that carried the data before.
    pub from: String,
    /// The link that carried it next.
    pub to: String,
    /// Make before break, or break before make.
    pub kind: SwitchKind,
    /// How long no data arrived: make before break, from the last before to the first after;
    /// break before make, from the new address to the first data.
    pub silence_ms: f64,
}

/// An expectation, judged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Expectation {
    /// The expectation as the scenario gives it.
    pub text: String,
    /// Whether it is true of this report.
    pub holds: bool,
    /// Why it does not hold, in words; not part of the object that is printed.
    #[serde(skip)]
    pub why: String,
}

impl RunReport {
    /// Whether every expectation holds.
    pub fn holds(&self) -> bool {
        self.expectations
            .iter()
            .all(|expectation| expectation.holds)
    }
}
