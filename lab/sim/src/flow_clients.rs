//! The device's flows as clients of its scheduler: what each needs, what it is granted, what it spends.
//!
//! ```text
//!  SimTransfer ── DuplexReport ──▶ DeviceScheduler ── ClientDecision ─┬─▶ FlowSpending ─▶ DeviceLinks
//!  DeviceLinks ── CarriedByLink, candidates ──▶ ▲                      └─▶ behind others: held back
//! ```
//!
//! All of it is the code that ships; the simulator gives the time, and says how large a flow is. A flow
//! is a client as a download is; one that somebody watches is one as a socket that reads ahead is.

use std::time::Duration;

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::{Class, Direction, Policy};
use d2tp_device::{LinkUse, PaidLinks, TrackedStatus};
use d2tp_sched::{
    CarriedByLink, ClientDecision, CostPolicy, DeadlineFallback, DeviceScheduler, DuplexClient,
    DuplexReport, FlowDemand, FlowSpending, Grant, LinkCandidate, LinkChoice, LinkClass,
    LinkSurroundings, LinkWaitReason, REPORT_EVERY, RadioStatus, SchedulerKind, SpendingChange,
};
use d2tp_session::{FlowId, ReasonCode};

use crate::device::SimDevice;
use crate::fault::SimFault;
use crate::network::SimNetwork;

/// How long the path over metered links is kept after a flow paid for them, as downloads do.
const READY_FOR: Span = Span::from_secs(10);
/// Between two decisions where somebody watches what comes, as sockets that read ahead do.
const LOOK_EVERY: Span = Span::from_millis(200);

/// One flow as a client.
#[derive(Debug)]
struct SimFlowClient {
    client: DuplexClient,
    carried: CarriedByLink,
    spending: FlowSpending,
    /// The flow that the device counts what is paid of; a transfer may take several, one after another.
    counted: Option<FlowId>,
    /// The flow is held back, because others go first.
    is_behind: bool,
    grant: Grant,
}

/// A link as decisions see it: name, class, whether it is silent, whether it carries.
type SeenLink = (String, LinkClass, bool, bool);

/// All flows of a device as clients of its scheduler.
#[derive(Debug)]
pub(crate) struct FlowClients {
    scheduler: DeviceScheduler,
    flows: Vec<SimFlowClient>,
    /// The links that were up, and what flows could use and which were under way at the last decision.
    up: Vec<usize>,
    seen: (Vec<usize>, Vec<SeenLink>),
    /// When they report again though nothing changed.
    report_at: Time,
}

impl FlowClients {
    /// The clients of a new process. `spent`: what each flow spent on metered links before.
    pub(crate) fn new(spent: impl Iterator<Item = u64>) -> FlowClients {
        let flow = |(number, spent)| SimFlowClient {
            client: DuplexClient::new(number as u64),
            carried: CarriedByLink::default(),
            spending: FlowSpending::new(spent),
            counted: None,
            is_behind: false,
            grant: Grant::None,
        };
        FlowClients {
            scheduler: DeviceScheduler::new(SchedulerKind::D2Sched),
            flows: spent.enumerate().map(flow).collect(),
            up: Vec::new(),
            seen: (Vec::new(), Vec::new()),
            report_at: Time::ZERO,
        }
    }

    /// Another session took the place of the one before: what its peer was told of flows is told again.
    pub(crate) fn on_session_began(&mut self) {
        for flow in &mut self.flows {
            flow.is_behind = false;
        }
        self.report_at = Time::ZERO;
    }

    /// When flows report again.
    pub(crate) fn next_at(&self) -> Time {
        self.report_at
    }

    /// Whether some flow may have payload on metered links.
    pub(crate) fn any_spends(&self) -> bool {
        let spends = |flow: &SimFlowClient| matches!(flow.grant, Grant::Spend { .. });
        self.flows.iter().any(spends)
    }
}

impl SimDevice {
    /// Has the scheduler decide what flows may use, where that may be another decision than the last.
    /// `statuses`: the links as the device uses them.
    pub(crate) fn schedule(
        &mut self,
        now: Time,
        network: &SimNetwork,
        active: &[usize],
        statuses: &[TrackedStatus],
    ) -> Result<(), SimFault> {
        self.observe_links(now, network);
        self.leave_those_over(now, active);
        let candidates = self.candidates(statuses);
        let link = |c: &LinkCandidate| (c.name.clone(), c.class, c.stalled, c.in_use);
        let seen = (active.to_vec(), candidates.iter().map(link).collect());
        if self.clients.seen == seen && now < self.clients.report_at {
            return Ok(());
        }
        self.clients.seen = seen;
        let mut again = Time::NEVER;
        for number in active {
            let (decision, is_weighed) = self.decide(now, *number, statuses, &candidates);
            let weighed = decision.recheck_after.filter(|_| is_weighed);
            again = again.min(self.next_report(now, *number, weighed, &candidates));
            self.apply(now, *number, &decision)?;
        }
        self.clients.report_at = again;
        Ok(())
    }

    /// Tells the scheduler which links are there, when others are.
    fn observe_links(&mut self, now: Time, network: &SimNetwork) {
        let up: Vec<usize> = (0..self.classes.len())
            .filter(|link| network.is_up(*link))
            .collect();
        if self.clients.up == up {
            return;
        }
        let radio = |link: &usize| RadioStatus {
            device: self.names[*link].clone(),
            slot: self.names[*link].clone(),
            class: class_of(self.classes[*link]),
            carries: true,
            rate: None,
        };
        let around = LinkSurroundings {
            radios: up.iter().map(radio).collect(),
            ..LinkSurroundings::default()
        };
        let now = self.host.clock.core(now);
        self.clients.scheduler.observe(now, &around);
        self.clients.up = up;
    }

    /// Flows that are over pay no more, and leave the scheduler.
    fn leave_those_over(&mut self, now: Time, active: &[usize]) {
        for number in 0..self.clients.flows.len() {
            if active.contains(&number) || self.clients.flows[number].client.id().is_none() {
                continue;
            }
            self.forbid(now, number);
            let clients = &mut self.clients;
            let flow = &mut clients.flows[number];
            flow.client.leave(&mut clients.scheduler);
            (flow.grant, flow.is_behind) = (Grant::None, false);
            flow.carried = CarriedByLink::default();
        }
    }

    /// The links that flows could use.
    fn candidates(&self, statuses: &[TrackedStatus]) -> Vec<LinkCandidate> {
        let used = statuses.iter().filter(|link| link.usage != LinkUse::Off);
        used.filter_map(|link| {
            let number = self.names.iter().position(|name| **name == *link.name)?;
            Some(link.candidate(class_of(self.classes[number])))
        })
        .collect()
    }

    /// Reports a flow's needs. Returns what it may use, and whether time alone can change that.
    fn decide(
        &mut self,
        now: Time,
        number: usize,
        statuses: &[TrackedStatus],
        candidates: &[LinkCandidate],
    ) -> (ClientDecision, bool) {
        self.count_paid(now, number);
        let (spec, transfer) = (&self.specs[number], &self.transfers[number]);
        let remaining = self.remaining(number);
        let core_now = self.host.clock.core(now);
        let clients = &mut self.clients;
        let flow = &mut clients.flows[number];
        let moved = (transfer.sink.content_bytes(), transfer.acked);
        flow.carried.assign(moved, statuses);
        let own = FlowDemand {
            remaining_bytes: Some(remaining),
            left: (spec.deadline_s).map(|by| Time::from_secs_f64(by).since(now).into()),
            policy: policy_of(spec.policy),
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: flow.spending.left(spec.metered_bytes_max),
        };
        let viewer = self.viewer.as_mut().filter(|_| number == 0);
        let watched = viewer.map(|viewer| viewer.demand(&own, candidates));
        let report = DuplexReport {
            buy_bytes: watched.as_ref().map(|(_, buy_bytes)| *buy_bytes),
            is_interactive: watched.is_some(),
            demand: watched.map_or(own, |(demand, _)| demand),
            size_bytes: spec.bytes,
            keeps_awake: true,
            candidates,
            carried: flow.carried.bytes(),
        };
        for link in statuses {
            if let Some(path) = &link.path {
                let trip = path.rtt.into();
                clients.scheduler.record_round_trip(&link.name, trip);
            }
            // What arrives says for how long a link carried; of what leaves nobody can say that.
            if let Some(id) = flow
                .client
                .id()
                .filter(|_| spec.direction == Direction::Down)
            {
                (clients.scheduler).record_busy_time(id, &link.name, link.busy);
            }
        }
        let decision = (flow.client).decide(core_now, &mut clients.scheduler, &report);
        (decision, report.demand.is_weighed())
    }

    /// When a flow reports again if nothing changes. `weighed`: after this time its decision may be
    /// another one beside a metered link.
    fn next_report(
        &self,
        now: Time,
        number: usize,
        weighed: Option<Duration>,
        candidates: &[LinkCandidate],
    ) -> Time {
        let costs = candidates.iter().any(|link| link.class != LinkClass::Free);
        if costs && number == 0 && self.viewer.is_some() {
            return now + LOOK_EVERY;
        }
        if candidates.iter().any(|link| link.in_use) {
            return now + REPORT_EVERY;
        }
        let again = weighed.filter(|_| costs);
        again.map_or(Time::NEVER, |span| now + Span::from(span).max(REPORT_EVERY))
    }

    /// Has the device go by what was decided for a flow.
    fn apply(
        &mut self,
        now: Time,
        number: usize,
        decision: &ClientDecision,
    ) -> Result<(), SimFault> {
        let Some(id) = self.transfers[number].id else {
            return Ok(());
        };
        let budget = self.specs[number].metered_bytes_max;
        let stays = match &self.viewer {
            Some(viewer) if number == 0 => viewer.keeps_path_for(),
            _ => READY_FOR,
        };
        let flow = &mut self.clients.flows[number];
        flow.grant = flow.spending.keep_path(now, decision.grant, stays);
        flow.counted = Some(id);
        match flow.spending.apply(flow.grant, budget) {
            Some(SpendingChange::Allow { budget }) => {
                self.with_links(now, |links, now, session| {
                    links.allow_paid(now, session, id, budget, PaidLinks::All);
                })
            }
            Some(SpendingChange::Forbid) => self.with_links(now, |links, now, session| {
                links.forbid_paid(now, session, id);
            }),
            None => {}
        }
        let behind = matches!(
            decision.choice,
            LinkChoice::Wait {
                reason: LinkWaitReason::QueuedBehind,
                ..
            }
        );
        self.hold_back(now, number, id, behind)
    }

    /// Has whoever sends hold a flow back because others go first, or go on.
    fn hold_back(
        &mut self,
        now: Time,
        number: usize,
        id: FlowId,
        behind: bool,
    ) -> Result<(), SimFault> {
        let Some(session) = self.session else {
            return Ok(());
        };
        let was_behind = std::mem::replace(&mut self.clients.flows[number].is_behind, behind);
        if self.specs[number].direction == Direction::Up {
            self.transfers[number].source.held = behind;
            return self.use_flow(now, session, id);
        }
        if was_behind != behind {
            let reason = ReasonCode::QueuedBehind;
            let _ = (self.host.endpoint).with(session, |s| s.pause(id, behind, reason));
        }
        Ok(())
    }

    /// Counts what a flow paid, up to this moment. A transfer that goes on in another flow has paid for
    /// the one before.
    fn count_paid(&mut self, now: Time, number: usize) {
        let flow = &self.clients.flows[number];
        if flow.counted != self.transfers[number].id {
            self.forbid(now, number);
            self.clients.flows[number].is_behind = false;
        }
        if let Some(id) = self.transfers[number].id {
            let paid = self.with_links(now, |links, now, session| {
                links.observe(now, session);
                links.paid_bytes(id)
            });
            self.clients.flows[number].spending.count(paid);
        }
    }

    /// The flow that a transfer paid for so far pays no more.
    fn forbid(&mut self, now: Time, number: usize) {
        let Some(id) = self.clients.flows[number].counted.take() else {
            return;
        };
        let paid = self.with_links(now, |links, now, session| {
            links.observe(now, session);
            let paid = links.paid_bytes(id);
            links.forbid_paid(now, session, id);
            paid
        });
        let spending = &mut self.clients.flows[number].spending;
        spending.count(paid);
        spending.apply(Grant::None, None);
    }
}

/// What a link costs, in the scheduler's words.
fn class_of(class: Class) -> LinkClass {
    match class {
        Class::Free => LinkClass::Free,
        Class::Metered => LinkClass::Metered,
        Class::Roaming => LinkClass::Roaming,
    }
}

/// What a flow may cost, in the scheduler's words.
fn policy_of(policy: Policy) -> CostPolicy {
    match policy {
        Policy::FreeOnly => CostPolicy::FreeOnly,
        Policy::FreeFirst => CostPolicy::FreeFirst,
        Policy::Balanced => CostPolicy::Balanced,
        Policy::Fast => CostPolicy::Fast,
        Policy::Any => CostPolicy::Any,
    }
}
