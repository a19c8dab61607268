//! The connections of a session, and what each may spend on metered links. Connections with the same options
//! are one client of the scheduler, of this process's or of the agent's.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use d2tp_driver::{
    CarriedByLink, Device, Flow, FlowClient, FlowClientReport, LinkStatus, LinkUse, SchedulerHandle,
};
use d2tp_links::CostClass;
use d2tp_sched::{FlowDemand, Grant};

use super::super::agent_scheduler::AgentScheduler;
use super::super::conn_options::ConnOptions;
use crate::schedule_message::{
    FLOWS_MAX, ReportedFlow, ReportedLink, ReportedTraffic, ScheduleAnswer, ScheduleReport,
};

pub(super) fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Payload of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkPayload {
    /// The link's name.
    pub link: String,
    /// The link's cost class.
    pub class: CostClass,
    /// Bytes to this device.
    pub down: u64,
    /// Bytes from this device.
    pub up: u64,
}

/// Bytes read and written by a connection.
#[derive(Default)]
pub(super) struct ConnTraffic {
    pub(super) down: AtomicU64,
    pub(super) up: AtomicU64,
}

/// Connections with the same options, which are one client of the scheduler: a program opens many, and
/// a decision applies to all of them.
pub(super) struct ConnGroup {
    pub(super) id: u64,
    pub(super) conn_options: ConnOptions,
    pub(super) moved: Arc<ConnTraffic>,
    pub(super) client: Option<FlowClient>,
    pub(super) carried: CarriedByLink,
    /// The last decided grant of metered links for all its connections.
    pub(super) grant: Grant,
}

pub(super) struct SteeredFlow {
    pub(super) flow: Arc<Mutex<Flow>>,
    pub(super) conn_options: ConnOptions,
    /// The applied permission to pay: the most bytes if limited, or none.
    pub(super) pays: Option<Option<u64>>,
}

#[derive(Default)]
pub(super) struct SessionFlows {
    pub(super) next: u64,
    pub(super) all: BTreeMap<u64, SteeredFlow>,
    pub(super) groups: Vec<ConnGroup>,
}

impl SessionFlows {
    /// Removes groups without connections from the scheduler. Returns the others, with what links
    /// carried for them.
    fn current_groups(&mut self, links: &[LinkStatus]) -> &mut [ConnGroup] {
        let all = &self.all;
        (self.groups).retain(|group| {
            all.values()
                .any(|flow| flow.conn_options == group.conn_options)
        });
        for group in &mut self.groups {
            let moved = &group.moved;
            let moved = (moved.down.load(Relaxed), moved.up.load(Relaxed));
            group.carried.assign(moved, links);
        }
        &mut self.groups
    }

    /// Decides with a scheduler of this process. Returns the time after which the decision may change
    /// although nothing else does.
    pub(super) fn decide(
        &mut self,
        links: &[LinkStatus],
        scheduler: &Arc<SchedulerHandle>,
        left: Option<u64>,
    ) -> Option<Duration> {
        let mut again: Option<Duration> = None;
        for group in self.current_groups(links) {
            let client = group
                .client
                .get_or_insert_with(|| FlowClient::new(scheduler));
            let decision = client.decide(&FlowClientReport {
                demand: FlowDemand {
                    metered_bytes_left: left,
                    ..group.conn_options.demand()
                },
                size_bytes: None,
                buy_bytes: None,
                keeps_awake: false,
                links,
                carried: group.carried.bytes(),
            });
            group.grant = decision.grant;
            again = again.into_iter().chain(decision.recheck_after).min();
        }
        again
    }

    /// Reports to the agent, whose answer arrives later.
    pub(super) fn report(
        &mut self,
        links: &[LinkStatus],
        spent: &[LinkPayload],
        agent: &AgentScheduler,
    ) {
        let used = links.iter().filter(|link| link.usage != LinkUse::Off);
        let reported = |link: &LinkStatus| ReportedLink {
            name: link.name.clone(),
            class: link.class.into(),
            rate: link.rate.map(|rate| rate as f64),
            stalled: link.answers.is_silent(),
            in_use: link.answers.is_up(),
        };
        let flow = |group: &mut ConnGroup| {
            // The agent's scheduler knows it now, and this process's no longer.
            group.client = None;
            let demand = group.conn_options.demand();
            ReportedFlow {
                id: group.id,
                policy: demand.policy.as_str().to_owned(),
                if_late: demand.if_late.as_str().to_owned(),
                left_ms: demand.left.map(|left| left.as_millis() as u64),
                carried: group.carried.bytes().clone(),
            }
        };
        let groups = self.current_groups(links);
        agent.report(ScheduleReport {
            links: used.map(reported).collect(),
            flows: groups.iter_mut().take(FLOWS_MAX).map(flow).collect(),
            spent: spent
                .iter()
                .map(|more| ReportedTraffic {
                    link: more.link.clone(),
                    class: more.class.into(),
                    down: more.down,
                    up: more.up,
                })
                .collect(),
        });
    }

    /// Applies the agent's decisions. Returns the time after which they may change although nothing
    /// else does.
    pub(super) fn take_answer(&mut self, answer: &ScheduleAnswer) -> Option<Duration> {
        let mut again: Option<Duration> = None;
        for decision in &answer.decisions {
            let mut groups = self.groups.iter_mut();
            if let Some(group) = groups.find(|group| group.id == decision.id) {
                group.grant = decision.grant.into();
                again = again.into_iter().chain(decision.recheck_after()).min();
            }
        }
        again
    }

    /// Applies the decisions to the device.
    pub(super) fn apply(&mut self, device: &Device) {
        for group in &self.groups {
            let flows = self
                .all
                .values()
                .filter(|flow| flow.conn_options == group.conn_options);
            let count = flows.count().max(1) as u64;
            let (may, share) = match group.grant {
                Grant::Spend { up_to } => (true, up_to.map(|bytes| bytes / count)),
                Grant::Probe { bytes } => (true, Some(bytes / count)),
                // A connection's first byte opens a path when it may be paid for.
                Grant::None | Grant::Path => (false, None),
            };
            let flows = self.all.values_mut();
            for steered in flows.filter(|flow| flow.conn_options == group.conn_options) {
                let flow = lock(&steered.flow);
                let pays = may.then(|| share.map(|share| device.paid_bytes(&flow) + share));
                if pays != steered.pays {
                    steered.pays = pays;
                    device.allow_paid(&flow, may, pays.flatten());
                }
            }
        }
    }
}
