//! A flow in a session as a client of the device's scheduler: for sockets, and for connections of
//! programs. [`DuplexClient`] computes reports and results; this module adds the lock and the
//! clock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use d2tp_device::link_candidate;
use d2tp_sched::{
    CarryingLink, ClientDecision, ClientId, DuplexClient, DuplexReport, FlowDemand, LinkCandidate,
    LinkChoice,
};

use crate::{LinkStatus, LinkUse, SchedulerHandle};

/// The demand of a flow, and what links carried for it.
#[derive(Debug)]
pub struct FlowClientReport<'a> {
    /// Bytes still to be carried, time left, policy, and the flow's own budget.
    pub demand: FlowDemand,
    /// Total bytes in both directions, if known.
    pub size_bytes: Option<u64>,
    /// For a flow that reads ahead: bytes that may be paid for now, even if a free link is expected
    /// soon. `demand` then describes the read-ahead.
    pub buy_bytes: Option<u64>,
    /// Whether the machine is woken and kept awake for the flow.
    pub keeps_awake: bool,
    /// The links of the flow's session.
    pub links: &'a [LinkStatus],
    /// Payload bytes that each link carried for the flow, towards this device and from it.
    pub carried: &'a BTreeMap<String, (u64, u64)>,
}

/// A client of the scheduler for a flow in both directions. It leaves the scheduler when it is dropped.
#[derive(Debug)]
pub struct FlowClient {
    scheduler: Arc<SchedulerHandle>,
    client: DuplexClient,
    /// The client's number, whether it waits, and whether the machine is woken for it, as announced
    /// last.
    announced: Option<(ClientId, bool, bool)>,
}

impl FlowClient {
    /// Creates a client, which joins with its first report.
    pub fn new(scheduler: &Arc<SchedulerHandle>) -> FlowClient {
        FlowClient {
            scheduler: scheduler.clone(),
            client: DuplexClient::new(scheduler.next_flow_number()),
            announced: None,
        }
    }

    /// Reports, and returns what the flow may use until the next report.
    pub fn decide(&mut self, report: &FlowClientReport<'_>) -> ClientDecision {
        let used = report.links.iter();
        let used = used.filter(|link| link.usage != LinkUse::Off);
        let candidates: Vec<LinkCandidate> = used.map(LinkCandidate::from).collect();
        self.decide_among(report, &candidates)
    }

    /// Reports and decides like [`FlowClient::decide`], for a flow of another process, which
    /// describes its links itself.
    pub fn decide_among(
        &mut self,
        report: &FlowClientReport<'_>,
        candidates: &[LinkCandidate],
    ) -> ClientDecision {
        let (decision, id) = self.scheduler.with(|now, scheduler| {
            for link in report.links {
                scheduler.record_udp_obstacle(&link.name, link.stream.udp_obstacle());
                if let Some(path) = &link.path {
                    scheduler.record_round_trip(&link.name, path.rtt.into());
                }
            }
            let duplex = DuplexReport {
                demand: report.demand.clone(),
                size_bytes: report.size_bytes,
                buy_bytes: report.buy_bytes,
                is_interactive: true,
                keeps_awake: report.keeps_awake,
                candidates,
                carried: report.carried,
            };
            let decision = self.client.decide(now, scheduler, &duplex);
            (decision, self.client.id())
        });
        let waits = matches!(decision.choice, LinkChoice::Wait { .. });
        let announcement = id.map(|id| (id, waits, report.keeps_awake));
        if std::mem::replace(&mut self.announced, announcement) != announcement {
            self.scheduler.announce_change();
        }
        decision
    }

    /// The time until metered links would carry the flow, if links stayed as they are; `None` if they
    /// never would.
    pub fn pays_after(&self) -> Option<Duration> {
        let client = &self.client;
        (self.scheduler).with(|now, scheduler| client.pays_after(now, scheduler))
    }
}

impl Drop for FlowClient {
    fn drop(&mut self) {
        let client = &mut self.client;
        self.scheduler.with(|_, scheduler| client.leave(scheduler));
        self.scheduler.announce_change();
    }
}

impl CarryingLink for LinkStatus {
    fn name(&self) -> &str {
        &self.name
    }

    fn payload(&self) -> (u64, u64) {
        self.payload
    }
}

impl From<&LinkStatus> for LinkCandidate {
    fn from(link: &LinkStatus) -> LinkCandidate {
        let class = link.class.into();
        link_candidate(&link.name, class, link.rate, link.answers)
    }
}
