//! Sockets of programs that use libd2tp: the library's own engine carries them here, over the agent's links,
//! and the agent's scheduler decides for them beside transfers.
//!
//! ```text
//!  program ── libd2tp ── Unix socket, a descriptor ──▶ door ──▶ Carrier (edge/capi) ══ links ══▶
//!                                                                  │ each second
//!                                                   Judge ◀────────┘  ──▶ scheduler, budget, figures
//! ```

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use d2tp::agent_carrier::{self, AgentCall, AgentCarrier, ReopenClaim, SocketDecision, VERSION};
use d2tp_driver::{LinkStatus, LinkUse, PathState};
use d2tp_links::CostClass;
use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::api::error_response;
use super::api_server::write_line;
use super::{Agent, lock};
use crate::fetch::outcome::TransferFailure;
use d2tp_driver::SpendHandle;
use d2tp_sched::{ClientReport, Grant, TransferDirection};

/// What carries them.
pub(super) fn carrier(agent: Arc<Agent>) -> std::io::Result<Rc<AgentCarrier>> {
    let links = agent.link_view.links();
    let judge = AgentSocketScheduler {
        agent,
        // Transfers count from 1 on.
        next: Cell::new(u64::MAX),
    };
    Ok(Rc::new(AgentCarrier::new(links, Rc::new(judge))?))
}

/// Carries one, or says why not: then its library does.
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

/// The connection of who asks about one that outlives its program; none where it is told why not.
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
    next: Cell<u64>,
}

impl agent_carrier::SocketScheduler for AgentSocketScheduler {
    fn join(&self) -> Box<dyn agent_carrier::SchedulerClient> {
        let number = self.next.get();
        self.next.set(number - 1);
        Box::new(AgentSocketSlot {
            agent: self.agent.clone(),
            number,
            seat: None,
            before: BTreeMap::new(),
            counted: BTreeMap::new(),
            up_and_down: (0, 0),
        })
    }
}

/// One socket's.
struct AgentSocketSlot {
    agent: Arc<Agent>,
    number: u64,
    seat: Option<(TransferDirection, SpendHandle)>,
    /// What links had carried for it that way when it took that.
    before: BTreeMap<String, u64>,
    /// What links carried for it, as far as that is taken down.
    counted: BTreeMap<String, (u64, u64)>,
    up_and_down: (u64, u64),
}

impl agent_carrier::SchedulerClient for AgentSocketSlot {
    fn decide(&mut self, standing: &agent_carrier::SocketDemand<'_>) -> SocketDecision {
        self.report(standing.ways, standing.carried);
        // Links are not as fast both ways, and most connections carry most one way.
        let direction = match self.up_and_down {
            (up, down) if up > down => TransferDirection::Up,
            _ => TransferDirection::Down,
        };
        let carried = standing.carried.iter().map(|(name, (down, up))| {
            let bytes = match direction {
                TransferDirection::Down => down,
                TransferDirection::Up => up,
            };
            (name.clone(), *bytes)
        });
        let mut carried: BTreeMap<String, u64> = carried.collect();
        let is_it = |seat: &(TransferDirection, SpendHandle)| seat.0 == direction;
        if !self.seat.as_ref().is_some_and(is_it) {
            let seat = self.agent.scheduler.join(direction, self.number);
            if self.seat.replace((direction, seat)).is_some() {
                self.before.clone_from(&carried);
            }
        }
        let Some((_, seat)) = &self.seat else {
            return SocketDecision::default();
        };
        for (name, bytes) in &mut carried {
            *bytes -= self.before.get(name).unwrap_or(&0);
        }
        let used = standing.ways.iter();
        let used = used.filter(|way| way.usage != LinkUse::Off);
        let ways: Vec<d2tp_sched::LinkCandidate> = used.map(way).collect();
        let verdict = seat.decide(&ClientReport {
            demand: standing.need.clone(),
            size_bytes: standing.size,
            priority: 0,
            candidates: &ways,
            carried: &carried,
            uses_several_links: true,
            always_pays: standing.buy_bytes.is_some_and(|bytes| bytes > 0),
            keeps_awake: standing.wakes,
        });
        for way in standing.ways {
            if let Some(path) = &way.path {
                seat.record_round_trip(&way.name, path.rtt.into());
            }
        }
        match standing.buy_bytes {
            // What is read now is not held back for what is due later, as with others' streams.
            Some(bytes) => {
                let bytes = bytes.min(verdict.limit.unwrap_or(u64::MAX));
                SocketDecision {
                    pays: false,
                    probe: (bytes > 0).then_some(bytes),
                }
            }
            None => match verdict.grant {
                Grant::Spend { up_to } => SocketDecision {
                    pays: up_to.is_none(),
                    probe: up_to,
                },
                Grant::Probe { bytes } => SocketDecision {
                    pays: false,
                    probe: Some(bytes),
                },
                Grant::None | Grant::Path => SocketDecision::default(),
            },
        }
    }

    /// Takes down what links carried for it since the last time.
    fn report(&mut self, ways: &[LinkStatus], carried: &BTreeMap<String, (u64, u64)>) {
        let mut more = Vec::new();
        for way in ways {
            let carried = carried.get(&way.name).copied();
            let (down, up) = carried.unwrap_or_default();
            let before = self.counted.insert(way.name.clone(), (down, up));
            let before = before.unwrap_or_default();
            let (down, up) = (down - before.0, up - before.1);
            if down + up > 0 {
                more.push((way.name.clone(), way.class, down, up));
                self.up_and_down.0 += up;
                self.up_and_down.1 += down;
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

fn way(way: &d2tp_driver::LinkStatus) -> d2tp_sched::LinkCandidate {
    let path = way.path.as_ref().map(|path| path.state);
    d2tp_sched::LinkCandidate {
        name: way.name.clone(),
        class: way.class.into(),
        rate_bytes_per_s: way.rate.map(|rate| rate as f64),
        metric: u32::MAX,
        // One without a path is not tried yet, or is one that costs.
        stalled: path == Some(PathState::Silent),
        in_use: path == Some(PathState::Active),
    }
}
