//! Reports of a program that carries its own connections, such as `cedos run`, to the agent's
//! scheduler, and the answers: one JSON object per line in both directions (`docs/agent.md`,
//! "Connections of other programs").
//!
//! ```text
//!  {"do":"schedule"}                                  ▶
//!                                                     ◀ {"ok":true}
//!  {"links":[…],"flows":[{"id":1,…}],"spent":[…]}     ▶
//!                                                     ◀ {"ok":true,"left":3000000,"decisions":[{"id":1,…}]}
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use d2tp_links::CostClass;
use d2tp_sched::{Grant, LinkCandidate};
use serde::{Deserialize, Serialize};

/// The most flows in one report.
pub const FLOWS_MAX: usize = 256;

/// The most links in one report.
pub const LINKS_MAX: usize = 64;

/// A report: the links of the program's session, its flows, and what was spent since the last report.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ScheduleReport {
    /// The links that the session could use.
    pub links: Vec<ReportedLink>,
    /// The flows, each a client of the scheduler. One that is missing has left.
    pub flows: Vec<ReportedFlow>,
    /// Payload that links carried since the last report, for all flows together.
    pub spent: Vec<ReportedTraffic>,
}

/// A link as a program's session sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportedLink {
    /// The name of the network device.
    pub name: String,
    /// What a byte on it costs.
    pub class: ReportedClass,
    /// Bytes per second, as measured lately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Whether a path over it no longer answers.
    pub stalled: bool,
    /// Whether a path over it answers.
    pub in_use: bool,
}

/// The cost class of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportedClass {
    /// The link costs nothing.
    Free,
    /// Money, within a plan.
    Metered,
    /// More money, while roaming.
    Roaming,
}

/// A flow, or several with the same needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportedFlow {
    /// The program's number for the flow.
    pub id: u64,
    /// The cost policy: `free-only`, `free-first`, `balanced`, `fast` or `any`.
    pub policy: String,
    /// What to do when free links are too slow for the deadline: `cell`, `wait` or `fail`.
    pub if_late: String,
    /// Milliseconds until the deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_ms: Option<u64>,
    /// Bytes still to be carried, both ways, if they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_bytes: Option<u64>,
    /// Payload bytes that each link has carried for the flow, towards this device and from it.
    pub carried: BTreeMap<String, (u64, u64)>,
}

/// Payload that a link carried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedTraffic {
    /// The name of the network device.
    pub link: String,
    /// What a byte on it cost.
    pub class: ReportedClass,
    /// Bytes towards this device.
    pub down: u64,
    /// Bytes from this device.
    pub up: u64,
}

/// The answer to a report.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ScheduleAnswer {
    /// Always true: marks the message as an answer that is no error.
    pub ok: bool,
    /// Bytes that metered links may still carry for the device; none is no limit.
    #[serde(default)]
    pub left: Option<u64>,
    /// A decision for each flow of the report.
    pub decisions: Vec<ReportedDecision>,
}

/// The decision for a flow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportedDecision {
    /// The program's number for the flow.
    pub id: u64,
    /// What metered links may carry for the flow until the next report.
    pub grant: ReportedGrant,
    /// Milliseconds after which the decision may change although nothing else does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recheck_ms: Option<u64>,
    /// The links that rest to save energy. A program that does not know this member uses them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub resting: BTreeSet<String>,
}

/// A [`Grant`] in a message between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportedGrant {
    /// No packet may use metered links.
    None,
    /// A path that carries no payload.
    Path,
    /// Payload up to this many bytes, to measure the link.
    Probe(u64),
    /// Payload as needed, up to this many bytes if there is a limit.
    Spend(Option<u64>),
}

impl ReportedDecision {
    /// The time after which the decision may change although nothing else does.
    pub fn recheck_after(&self) -> Option<Duration> {
        self.recheck_ms.map(Duration::from_millis)
    }
}

impl From<Grant> for ReportedGrant {
    fn from(grant: Grant) -> ReportedGrant {
        match grant {
            Grant::None => ReportedGrant::None,
            Grant::Path => ReportedGrant::Path,
            Grant::Probe { bytes } => ReportedGrant::Probe(bytes),
            Grant::Spend { up_to } => ReportedGrant::Spend(up_to),
        }
    }
}

impl From<ReportedGrant> for Grant {
    fn from(grant: ReportedGrant) -> Grant {
        match grant {
            ReportedGrant::None => Grant::None,
            ReportedGrant::Path => Grant::Path,
            ReportedGrant::Probe(bytes) => Grant::Probe { bytes },
            ReportedGrant::Spend(up_to) => Grant::Spend { up_to },
        }
    }
}

impl From<CostClass> for ReportedClass {
    fn from(class: CostClass) -> ReportedClass {
        match class {
            CostClass::Free => ReportedClass::Free,
            CostClass::Metered => ReportedClass::Metered,
            CostClass::Roaming => ReportedClass::Roaming,
        }
    }
}

impl From<ReportedClass> for CostClass {
    fn from(class: ReportedClass) -> CostClass {
        match class {
            ReportedClass::Free => CostClass::Free,
            ReportedClass::Metered => CostClass::Metered,
            ReportedClass::Roaming => CostClass::Roaming,
        }
    }
}

impl From<&ReportedLink> for LinkCandidate {
    fn from(link: &ReportedLink) -> LinkCandidate {
        LinkCandidate {
            name: link.name.clone(),
            class: CostClass::from(link.class).into(),
            rate_bytes_per_s: link.rate,
            metric: u32::MAX,
            stalled: link.stalled,
            in_use: link.in_use,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_and_its_answer_are_as_documented() {
        let report: ScheduleReport = serde_json::from_str(
            r#"{"links":[{"name":"wwan0","class":"metered","rate":250000.0,"stalled":false,"in_use":true}],
                "flows":[{"id":1,"policy":"free-first","if_late":"cell","left_ms":60000,"carried":{"wwan0":[900,80]}}],
                "spent":[{"link":"wwan0","class":"metered","down":900,"up":80}]}"#,
        )
        .expect("as documented");
        assert_eq!(report.flows[0].carried["wwan0"], (900, 80));
        let answer = ScheduleAnswer {
            ok: true,
            left: Some(3_000_000),
            decisions: vec![ReportedDecision {
                id: 1,
                grant: Grant::Spend { up_to: Some(500) }.into(),
                recheck_ms: Some(1_000),
                resting: BTreeSet::new(),
            }],
        };
        assert_eq!(
            serde_json::to_string(&answer).expect("plain data"),
            r#"{"ok":true,"left":3000000,"decisions":[{"id":1,"grant":{"spend":500},"recheck_ms":1000}]}"#
        );
        for grant in [
            Grant::None,
            Grant::Path,
            Grant::Probe { bytes: 7 },
            Grant::Spend { up_to: None },
        ] {
            assert_eq!(Grant::from(ReportedGrant::from(grant)), grant);
        }
    }
}
