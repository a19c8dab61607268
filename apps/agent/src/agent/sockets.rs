//! Sockets of programs that use libd2tp: the library's own engine carries them in the agent, over
//! the agent's links, and the agent's scheduler decides for them as for transfers.
//!
//! ```text
//!  program ── libd2tp ── Unix socket, a descriptor ──▶ api_server ──▶ edge/capi ══ links ══▶
//!                                                                        │ each second
//!                                         AgentSocketScheduler ◀─────────┘ ──▶ scheduler, budget
//! ```

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use d2tp::agent_carrier::{self, AgentCall, AgentCarrier, ReopenClaim, VERSION};
use d2tp_driver::{FlowClient, FlowClientReport, LinkStatus};
use d2tp_links::CostClass;
use d2tp_sched::ClientDecision;
use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::api::error_response;
use super::api_lines::write_line;
use super::state::{Agent, lock};
use crate::fetch::outcome::TransferFailure;

/// Creates the carrier of sockets.
pub(super) fn carrier(agent: Arc<Agent>) -> std::io::Result<Rc<AgentCarrier>> {
    let links = agent.link_view.links();
    let scheduler = AgentSocketScheduler { agent };
    Ok(Rc::new(AgentCarrier::new(links, Rc::new(scheduler))?))
}

/// Carries a socket, or reports why not: then the program's library carries it.
pub(super) async fn carry_socket(
    carrier: &AgentCarrier,
    call: AgentCall,
    mut write: OwnedWriteHalf,
    lines: BufReader<OwnedReadHalf>,
) -> std::io::Result<()> {
    if let Some(why) = carrier.refusal(&call) {
        let mut answer = error_response(&TransferFailure::error(why));
        answer["version"] = VERSION.into();
        return write_line(&mut write, &answer).await;
    }
    if let Some(stream) = rejoined(write, lines).await? {
        carrier.carry(stream, call).await;
    }
    Ok(())
}

/// The connection of a process that opens a socket again; none if the request was refused.
pub(super) async fn reopened_connection(
    claim: &ReopenClaim,
    mut write: OwnedWriteHalf,
    lines: BufReader<OwnedReadHalf>,
) -> std::io::Result<Option<UnixStream>> {
    if let Some(why) = agent_carrier::version_mismatch(claim.version) {
        write_line(&mut write, &error_response(&TransferFailure::error(why))).await?;
        return Ok(None);
    }
    rejoined(write, lines).await
}

async fn rejoined(
    mut write: OwnedWriteHalf,
    lines: BufReader<OwnedReadHalf>,
) -> std::io::Result<Option<UnixStream>> {
    if !lines.buffer().is_empty() {
        // A descriptor may have been lost with it.
        let failure = TransferFailure::usage("the answer is to be waited for");
        write_line(&mut write, &error_response(&failure)).await?;
        return Ok(None);
    }
    let stream = lines.into_inner().reunite(write);
    stream.map(Some).map_err(std::io::Error::other)
}

struct AgentSocketScheduler {
    agent: Arc<Agent>,
}

impl agent_carrier::SocketScheduler for AgentSocketScheduler {
    fn join(&self) -> Box<dyn agent_carrier::SchedulerClient> {
        Box::new(AgentSocketClient {
            agent: self.agent.clone(),
            flow: FlowClient::new(&self.agent.scheduler),
            counted: BTreeMap::new(),
        })
    }
}

/// A socket of a program as a client of the agent's scheduler and of its budget.
struct AgentSocketClient {
    agent: Arc<Agent>,
    flow: FlowClient,
    /// Bytes that links carried for the socket and that were charged to the budget.
    counted: BTreeMap<String, (u64, u64)>,
}

impl agent_carrier::SchedulerClient for AgentSocketClient {
    fn decide(&mut self, report: &FlowClientReport<'_>) -> ClientDecision {
        self.report(report.links, report.carried);
        self.flow.decide(report)
    }

    fn pays_after(&self) -> Option<Duration> {
        self.flow.pays_after()
    }

    /// Charges what links carried for the socket since the last report.
    fn report(&mut self, links: &[LinkStatus], carried: &BTreeMap<String, (u64, u64)>) {
        let mut more = Vec::new();
        for link in links {
            let carried = carried.get(&link.name).copied();
            let (down, up) = carried.unwrap_or_default();
            let before = self.counted.insert(link.name.clone(), (down, up));
            let before = before.unwrap_or_default();
            let (down, up) = (down - before.0, up - before.1);
            if down + up > 0 {
                more.push((link.name.clone(), link.class, down, up));
            }
        }
        if more.is_empty() {
            return;
        }
        let spent: Vec<(String, CostClass, u64)> = more
            .iter()
            .map(|(name, class, down, up)| (name.clone(), *class, down + up))
            .collect();
        self.agent.record_spending(&spent);
        let mut meter = lock(&self.agent.meter);
        for (_, class, down, up) in more {
            meter.carried(class, true, down);
            meter.carried(class, false, up);
        }
    }
}
