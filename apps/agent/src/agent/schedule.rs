//! Decides for connections that other programs carry themselves, beside the agent's own transfers: with the
//! same scheduler, the same view of the links and the same budget.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{FlowClient, FlowClientReport};
use d2tp_sched::{FlowDemand, LinkCandidate};
use serde_json::json;
use tokio::io::BufReader;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::api::{error_response, ok_response};
use super::api_lines::{next_line, write_line};
use super::state::Agent;
use crate::fetch::outcome::TransferFailure;
use crate::proxy::{LinkPayload, SpendingBudget as _};
use crate::schedule_message::{
    FLOWS_MAX, LINKS_MAX, ReportedClass, ReportedDecision, ReportedFlow, ScheduleAnswer,
    ScheduleReport,
};

impl Agent {
    /// Answers a program's reports until it disconnects; its flows then leave the scheduler.
    pub(super) async fn schedule(
        self: &Arc<Agent>,
        write: &mut OwnedWriteHalf,
        lines: &mut BufReader<OwnedReadHalf>,
    ) -> std::io::Result<()> {
        write_line(write, &ok_response(json!({}))).await?;
        let mut clients = BTreeMap::new();
        while let Some(line) = next_line(lines).await? {
            let answer = match serde_json::from_str(&line) {
                Ok(report) => self.decide_reported(&mut clients, &report),
                Err(error) => Err(format!("not a report: {error}")),
            };
            let answer = match answer {
                Ok(answer) => json!(answer),
                Err(text) => error_response(&TransferFailure::usage(text)),
            };
            write_line(write, &answer).await?;
        }
        Ok(())
    }

    fn decide_reported(
        self: &Arc<Agent>,
        clients: &mut BTreeMap<u64, FlowClient>,
        report: &ScheduleReport,
    ) -> Result<ScheduleAnswer, String> {
        if report.flows.len() > FLOWS_MAX || report.links.len() > LINKS_MAX {
            return Err(format!(
                "at most {FLOWS_MAX} flows and {LINKS_MAX} links at a time"
            ));
        }
        let demands = report.flows.iter().map(demand);
        let demands = demands.collect::<Result<Vec<_>, _>>()?;
        // What a link costs is as this agent's user says, whatever the program was told.
        let links = self.link_view.links().borrow().clone();
        let class_of = |name: &str, reported: ReportedClass| {
            let known = links.iter().find(|link| link.name == name);
            known.map_or(reported.into(), |link| link.class.class)
        };
        let spent = report.spent.iter().map(|traffic| LinkPayload {
            link: traffic.link.clone(),
            class: class_of(&traffic.link, traffic.class),
            down: traffic.down,
            up: traffic.up,
        });
        self.record_spent(&spent.collect::<Vec<_>>());
        clients.retain(|id, _| report.flows.iter().any(|flow| flow.id == *id));
        let candidates = report.links.iter().map(|link| LinkCandidate {
            class: class_of(&link.name, link.class).into(),
            ..LinkCandidate::from(link)
        });
        let candidates: Vec<LinkCandidate> = candidates.collect();
        let decide = |(flow, demand): (&ReportedFlow, FlowDemand)| {
            let client = clients
                .entry(flow.id)
                .or_insert_with(|| FlowClient::new(&self.scheduler));
            let report = FlowClientReport {
                demand,
                size_bytes: None,
                buy_bytes: None,
                keeps_awake: false,
                links: &[],
                carried: &flow.carried,
            };
            let decision = client.decide_among(&report, &candidates);
            ReportedDecision {
                id: flow.id,
                grant: decision.grant.into(),
                recheck_ms: decision.recheck_after.map(|after| after.as_millis() as u64),
                resting: decision.resting,
            }
        };
        let decisions = report.flows.iter().zip(demands).map(decide).collect();
        Ok(ScheduleAnswer {
            ok: true,
            left: *self.watch_left().borrow(),
            decisions,
        })
    }
}

fn demand(flow: &ReportedFlow) -> Result<FlowDemand, String> {
    Ok(FlowDemand {
        remaining_bytes: flow.left_bytes,
        left: flow.left_ms.map(Duration::from_millis),
        policy: flow.policy.parse().map_err(|e| format!("policy: {e}"))?,
        if_late: flow.if_late.parse().map_err(|e| format!("if_late: {e}"))?,
        metered_bytes_left: None,
    })
}
