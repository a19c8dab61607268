//! The device's flows as clients of its scheduler: demands, grants and spending.
//!
//! ```text
//!  SimTransfer ── DuplexReport ──▶ DeviceScheduler ── ClientDecision ─┬─▶ FlowSpending ─▶ DeviceLinks
//!  DeviceLinks ── CarriedByLink, candidates ──▶ ▲                      └─▶ behind others: paused
//! ```
//!
//! All of this is the production code; the simulator supplies the time and the size of each flow. A
//! flow is a client like a download; one with a viewer is a client like a socket that reads ahead.

use std::collections::BTreeSet;
use std::time::Duration;

use cedos_lab_energy::radios;
use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::{Class, Direction, Policy, SaveEnergy, ScenarioEnergy};
use d2tp_device::{LinkUse, PaidLinks, TrackedStatus};
use d2tp_power::RadioProfile;
use d2tp_sched::{
    CarriedByLink, ClientDecision, CostPolicy, DeadlineFallback, DeviceScheduler, DuplexClient,
    DuplexReport, EnergySaving, FlowDemand, FlowSpending, Grant, KnownLink, LinkCandidate,
    LinkChoice, LinkClass, LinkSurroundings, LinkWaitReason, PowerSource, REPORT_EVERY,
    SchedulerKind, SpendingChange,
};
use d2tp_session::{FlowId, ReasonCode};

use crate::device::SimDevice;
use crate::fault::SimFault;
use crate::network::SimNetwork;

/// How long the path over metered links is kept after a flow paid for them, as for downloads.
const READY_FOR: Span = Span::from_secs(10);
/// The interval between decisions if a viewer watches the flow, as for sockets that read ahead.
const LOOK_EVERY: Span = Span::from_millis(200);

/// One flow as a client.
#[derive(Debug)]
struct SimFlowClient {
    client: DuplexClient,
    carried: CarriedByLink,
    spending: FlowSpending,
    /// The flow whose spending the device counts; a transfer may take several flows, one after
    /// another.
    counted: Option<FlowId>,
    /// Whether the flow is paused, because others go first.
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
    /// The links that were up at the last decision.
    up: Vec<usize>,
    /// At the last decision: the links that flows could use, and the flows under way.
    seen: (Vec<usize>, Vec<SeenLink>),
    /// When the flows report again, even if nothing changed.
    report_at: Time,
    /// The links that rest to save energy.
    pub(crate) resting: BTreeSet<String>,
}

impl FlowClients {
    /// The clients of a new process. `spent`: what each flow had spent on metered links before.
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
            resting: BTreeSet::new(),
        }
    }

    /// Tells the scheduler what radios need, what the device runs on, and when it saves energy.
    pub(crate) fn set_energy(&mut self, energy: &ScenarioEnergy, links: &[String]) {
        let model = |name: &str| radios::profile(name).map(RadioProfile::power_model);
        let of_link = |link: &String| Some((link.clone(), model(energy.radio(link)?)?));
        let known = links.iter().filter_map(of_link).collect();
        self.scheduler.set_radio_power(known, model(&energy.wifi));
        self.scheduler.set_energy_saving(match energy.save {
            SaveEnergy::Auto => EnergySaving::Auto,
            SaveEnergy::Always => EnergySaving::Always,
            SaveEnergy::Never => EnergySaving::Never,
        });
        self.scheduler.set_power_source(match energy.battery {
            true => PowerSource::Battery { percent: None },
            false => PowerSource::External,
        });
    }

    /// Handles a new session in place of the previous one: its peer is informed about flows again.
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

    /// Whether a flow may have payload on metered links.
    pub(crate) fn any_spends(&self) -> bool {
        let spends = |flow: &SimFlowClient| matches!(flow.grant, Grant::Spend { .. });
        self.flows.iter().any(spends)
    }
}

impl SimDevice {
    /// Lets the scheduler decide which links flows may use, if the decision may have changed.
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
            let LinkChoice::Wait { reason, .. } = &decision.choice else {
                self.apply(now, *number, &decision)?;
                continue;
            };
            if *reason == LinkWaitReason::SavesEnergy {
                let span = decision.recheck_after.map_or(REPORT_EVERY, Span::from);
                again = again.min(now + span.max(REPORT_EVERY));
            }
            self.apply(now, *number, &decision)?;
        }
        self.clients.report_at = again;
        Ok(())
    }

    /// Passes changed links to the scheduler.
    fn observe_links(&mut self, now: Time, network: &SimNetwork) {
        let up: Vec<usize> = (0..self.classes.len())
            .filter(|link| network.is_up(*link))
            .collect();
        if self.clients.up == up {
            return;
        }
        let known = |link: &usize| KnownLink {
            device: self.names[*link].clone(),
            slot: self.names[*link].clone(),
            class: class_of(self.classes[*link]),
            carries: true,
            rate: None,
        };
        let around = LinkSurroundings {
            links: up.iter().map(known).collect(),
            ..LinkSurroundings::default()
        };
        let now = self.host.clock.core(now);
        self.clients.scheduler.observe(now, &around);
        self.clients.up = up;
    }

    /// Lets flows that are over leave the scheduler. Their links find by themselves that they pay no more.
    fn leave_those_over(&mut self, now: Time, active: &[usize]) {
        for number in 0..self.clients.flows.len() {
            if active.contains(&number) || self.clients.flows[number].client.id().is_none() {
                continue;
            }
            self.stop_counting(now, number);
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

    /// Reports a flow's demand. Returns the decision, and whether it can change by time alone.
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
            // Received data shows for how long a link carried; for sent data that is unknown.
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

    /// When a flow reports again if nothing changes. `weighed`: the time after which its decision
    /// may change beside a metered link.
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

    /// Applies the decision for a flow to the device.
    fn apply(
        &mut self,
        now: Time,
        number: usize,
        decision: &ClientDecision,
    ) -> Result<(), SimFault> {
        let Some(id) = self.transfers[number].id else {
            return Ok(());
        };
        self.with_links(now, |links, now, session| {
            links.set_resting(now, session, &decision.resting);
        });
        self.clients.resting.clone_from(&decision.resting);
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

    /// Asks the sender of a flow to pause because others go first, or to continue.
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

    /// Counts what a flow has paid until now. A transfer that continues in another flow has paid
    /// for the previous one.
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

    /// Ends the spending of the flow that a transfer has paid for so far.
    fn forbid(&mut self, now: Time, number: usize) {
        if let Some(id) = self.stop_counting(now, number) {
            self.with_links(now, |links, now, session| {
                links.forbid_paid(now, session, id);
            });
        }
    }

    /// Counts for the last time what the flow of a transfer has paid. Returns the flow.
    fn stop_counting(&mut self, now: Time, number: usize) -> Option<FlowId> {
        let id = self.clients.flows[number].counted.take()?;
        let paid = self.with_links(now, |links, now, session| {
            links.observe(now, session);
            links.paid_bytes(id)
        });
        let spending = &mut self.clients.flows[number].spending;
        spending.count(paid);
        spending.apply(Grant::None, None);
        Some(id)
    }
}

/// The scheduler's cost class for a link.
fn class_of(class: Class) -> LinkClass {
    match class {
        Class::Free => LinkClass::Free,
        Class::Metered => LinkClass::Metered,
        Class::Roaming => LinkClass::Roaming,
    }
}

/// The scheduler's policy for a flow.
fn policy_of(policy: Policy) -> CostPolicy {
    match policy {
        Policy::FreeOnly => CostPolicy::FreeOnly,
        Policy::FreeFirst => CostPolicy::FreeFirst,
        Policy::Balanced => CostPolicy::Balanced,
        Policy::Fast => CostPolicy::Fast,
        Policy::Any => CostPolicy::Any,
    }
}
