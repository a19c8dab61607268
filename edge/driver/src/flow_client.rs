//! A flow in a session as a client of the device's scheduler: sockets, and connections of programs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use d2tp_sched::{
    ClientDecision, ClientReport, FlowDemand, Grant, LinkCandidate, TransferDirection,
};

use crate::{LinkStatus, LinkUse, SchedulerHandle, SpendHandle};

/// What a flow needs, and what links carried for it.
#[derive(Debug)]
pub struct FlowClientReport<'a> {
    /// Bytes still to be carried, time left, policy, and the flow's own budget.
    pub demand: FlowDemand,
    /// Bytes both ways, when known.
    pub size_bytes: Option<u64>,
    /// For a flow that reads ahead: bytes that may be paid for now, however soon a free link may
    /// come. `demand` is then that of what is ahead of its program.
    pub buy_bytes: Option<u64>,
    /// Whether the machine is woken and kept awake for the flow.
    pub keeps_awake: bool,
    /// The links of its session.
    pub links: &'a [LinkStatus],
    /// Payload bytes that each link carried for the flow, towards this device and from it.
    pub carried: &'a BTreeMap<String, (u64, u64)>,
}

/// A flow that carries both ways. Links are not as fast both ways, and most flows carry most one way:
/// the scheduler has it in the direction that carried more.
#[derive(Debug)]
pub struct FlowClient {
    scheduler: Arc<SchedulerHandle>,
    number: u64,
    client: Option<(TransferDirection, SpendHandle)>,
    /// What links had carried for it that way when it joined in that direction.
    before: BTreeMap<String, u64>,
}

impl FlowClient {
    /// A client that joins with its first report.
    pub fn new(scheduler: &Arc<SchedulerHandle>) -> FlowClient {
        FlowClient {
            scheduler: scheduler.clone(),
            number: scheduler.next_flow_number(),
            client: None,
            before: BTreeMap::new(),
        }
    }

    /// Reports, and returns what the flow may use until it reports again.
    pub fn decide(&mut self, report: &FlowClientReport<'_>) -> ClientDecision {
        let used = report.links.iter();
        let used = used.filter(|link| link.usage != LinkUse::Off);
        let candidates: Vec<LinkCandidate> = used.map(LinkCandidate::from).collect();
        self.decide_among(report, &candidates)
    }

    /// Reports and decides as [`FlowClient::decide`] does, for a flow of another process, which
    /// describes its links itself.
    pub fn decide_among(
        &mut self,
        report: &FlowClientReport<'_>,
        candidates: &[LinkCandidate],
    ) -> ClientDecision {
        let sums = report.carried.values();
        let (down, up) = sums.fold((0, 0), |sum, (down, up)| (sum.0 + down, sum.1 + up));
        let direction = match up > down {
            true => TransferDirection::Up,
            false => TransferDirection::Down,
        };
        let carried = report.carried.iter().map(|(name, (down, up))| {
            let bytes = match direction {
                TransferDirection::Down => down,
                TransferDirection::Up => up,
            };
            (name.clone(), *bytes)
        });
        let mut carried: BTreeMap<String, u64> = carried.collect();
        let known = self.client.take();
        let client = match known {
            Some((known, client)) if known == direction => client,
            other => {
                if other.is_some() {
                    self.before.clone_from(&carried);
                }
                self.scheduler.join(direction, self.number)
            }
        };
        for (name, bytes) in &mut carried {
            *bytes = bytes.saturating_sub(*self.before.get(name).unwrap_or(&0));
        }
        let mut decision = client.decide(&ClientReport {
            demand: report.demand.clone(),
            size_bytes: report.size_bytes,
            priority: 0,
            candidates,
            carried: &carried,
            uses_several_links: true,
            always_pays: report.buy_bytes.is_some_and(|bytes| bytes > 0),
            is_interactive: true,
            keeps_awake: report.keeps_awake,
        });
        for link in report.links {
            if let Some(path) = &link.path {
                client.record_round_trip(&link.name, path.rtt.into());
            }
        }
        self.client = Some((direction, client));
        // What is read ahead is paid for by its own rule, and no more than that.
        if let Some(bytes) = report.buy_bytes {
            let bytes = bytes.min(decision.limit.unwrap_or(u64::MAX));
            decision.grant = match bytes {
                0 => Grant::None,
                bytes => Grant::Spend { up_to: Some(bytes) },
            };
        }
        decision
    }

    /// The time until links that cost would carry the flow, if links stayed as they are; none if they
    /// never would.
    pub fn pays_after(&self) -> Option<Duration> {
        self.client.as_ref()?.1.pays_after()
    }
}

impl From<&LinkStatus> for LinkCandidate {
    fn from(link: &LinkStatus) -> LinkCandidate {
        LinkCandidate {
            name: link.name.clone(),
            class: link.class.into(),
            rate_bytes_per_s: link.rate.map(|rate| rate as f64),
            metric: u32::MAX,
            // A link whose first answer is awaited may carry soon; one that costs has no path until it is paid for.
            stalled: link.answers.is_silent(),
            in_use: link.answers.is_up(),
        }
    }
}
