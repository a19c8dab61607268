//! One direction of a device's links, and the clients on it.
//!
//! ```text
//!  ClientReport ─▶ ClientState ─▶ LinkTable: histories, rates ─▶ Scheduler ─▶ ClientDecision
//!                        └──────▶ TransferQueue: who goes first ──────────────────┘
//! ```

mod client_state;
mod link_table;
mod slow_free_links;
mod transfer_queue;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::{
    CompletionEstimate, CostPolicy, ForecastHint, LinkCandidate, LinkChoice, LinkClass, LinkShare,
    LinkWaitReason, ScheduledFlow, SchedulerMode,
};
use d2tp_time::{Span, Time};

use super::client_decision::{ClientDecision, Grant, MeteredUse, fit_to_links};
use super::rate_measurement::RateMeasurement;
use super::{ClientReport, KnownLink, LinkSurroundings, SavedLinkHistory, WakingClients};
use client_state::{ClientPhase, ClientState, last_phase};
use link_table::{COUNTED_AFTER, LinkTable};
use transfer_queue::TransferQueue;

/// How long a transfer may carry nothing before it no longer keeps the machine awake.
const RUNS_WITHIN: Span = Span::from_secs(30); // a guess: a slow origin

/// The scheduler for one direction of all links.
#[derive(Debug)]
pub(super) struct DirectionScheduler {
    links: LinkTable,
    queue: TransferQueue,
    clients: BTreeMap<u64, ClientState>,
    next_client: u64,
    /// Bytes that metered links may carry for all clients together.
    allowed: Option<u64>,
    promised: Option<(Time, BTreeMap<u64, CompletionEstimate>)>,
    /// Payload bytes that each link carried for all clients.
    carried: BTreeMap<String, u64>,
}

impl DirectionScheduler {
    pub(super) fn new(mode: SchedulerMode) -> DirectionScheduler {
        DirectionScheduler {
            links: LinkTable::new(mode),
            queue: TransferQueue::default(),
            clients: BTreeMap::new(),
            next_client: 0,
            allowed: None,
            promised: None,
            carried: BTreeMap::new(),
        }
    }

    pub(super) fn register(&mut self, now: Time, transfer: u64) -> u64 {
        self.next_client += 1;
        let client = ClientState::new(now, transfer);
        self.clients.insert(self.next_client, client);
        self.queue.on_join();
        self.next_client
    }

    pub(super) fn unregister(&mut self, number: u64) {
        self.clients.remove(&number);
        self.promised = None;
    }

    pub(super) fn has_clients(&self) -> bool {
        !self.clients.is_empty()
    }

    pub(super) fn set_metered_limit(&mut self, metered_bytes: Option<u64>) {
        self.allowed = metered_bytes;
    }

    pub(super) fn decide(
        &mut self,
        now: Time,
        number: u64,
        report: &ClientReport,
    ) -> ClientDecision {
        self.take_down(now, number, report);
        let (flows, me) = self.flows(number);
        let assignment = self.links.scheduler.decide(now, &flows);
        let is_payer = assignment.payers.contains(&me);
        let slow_free_rate = self.links.slow_free_rate();
        let is_held = self.links.scheduler.is_held_by_source(&flows[me]);
        let is_slow =
            flows[me].need.policy == CostPolicy::Any && slow_free_rate.is_some() && !is_held;
        let is_free_up = (report.candidates.iter())
            .any(|link| link.class == LinkClass::Free && link.in_use && !link.stalled);
        let awaits_size =
            (self.clients.get(&number)).is_some_and(|client| client.awaits_size(now, is_free_up));
        let is_payer = is_payer && !awaits_size;
        let pays = is_payer && assignment.shares.contains(&LinkShare::Paid) || is_slow;
        let mine = |n: usize| {
            let name = self.links.names[n].as_deref();
            report
                .candidates
                .iter()
                .any(|link| Some(&*link.name) == name)
        };
        let probe = assignment
            .shares
            .iter()
            .enumerate()
            .find_map(|(n, share)| match share {
                LinkShare::Probe(bytes) if assignment.probed == Some(me) && mine(n) => Some(*bytes),
                _ => None,
            });
        let scheduler = &self.links.scheduler;
        let metered = MeteredUse {
            pays,
            share: pays
                .then(|| scheduler.paid_share(now, &flows, me))
                .flatten(),
            slow_free_rate,
            probe,
            source_limit: flows[me].source.limit().filter(|_| is_held),
        };
        let why = scheduler.explain(now, &flows, &assignment, me, &self.links.shown());
        let load = || scheduler.load(now, &flows);
        let order = (&*assignment.order, &flows[..]);
        let leaves_room =
            |n: usize| flows[n].source.limit().is_some() && scheduler.is_held_by_source(&flows[n]);
        let behind =
            (self.queue).is_behind(now, number, &mut self.clients, order, load, leaves_room);
        let need = &flows[me].need;
        let capped = |device: &str| self.links.is_capped(device);
        let mut decision = fit_to_links(need, report, metered, why, behind, &capped);
        let costs = |link: &LinkCandidate| link.class == LinkClass::Metered;
        if report.is_interactive
            && need.policy == CostPolicy::Fast
            && is_payer
            && decision.grant == Grant::None
            && !report.candidates.iter().any(costs)
        {
            // The first byte of a program must not wait for a decision when a metered link comes
            // up. With other policies it waits: a free link may come up at the same time, and would
            // carry it.
            decision.grant = Grant::Spend { up_to: None };
        }
        decision.recheck_after = need.left.map(|_| assignment.valid_for.into());
        decision.lacks_budget = !pays && self.would_pay(now, flows, me);
        if let Some(client) = self.clients.get_mut(&number) {
            client.wakes = report.keeps_awake;
            client.last_phase = Some(match &decision.choice {
                LinkChoice::Use { .. } => ClientPhase::Runs,
                LinkChoice::Wait {
                    reason: LinkWaitReason::QueuedBehind,
                    ..
                } => ClientPhase::Behind,
                LinkChoice::Wait { .. } => ClientPhase::Waits,
            });
        }
        decision
    }

    /// Whether metered links would carry a flow if it had any budget.
    fn would_pay(&self, now: Time, mut flows: Vec<ScheduledFlow>, me: usize) -> bool {
        let left = &mut flows[me].need.metered_bytes_left;
        if *left != Some(0) {
            return false;
        }
        *left = None;
        self.links
            .scheduler
            .decide(now, &flows)
            .payers
            .contains(&me)
    }

    /// Handles the links and networks around the device.
    pub(super) fn observe(&mut self, now: Time, around: &LinkSurroundings) {
        self.links.set_surroundings(now, around);
        self.see(now);
    }

    /// Restores the history of links and networks.
    pub(super) fn restore(&mut self, now: Time, (pasts, rates): SavedLinkHistory) {
        self.links.restore(now, pasts, rates);
    }

    /// The history of links and networks to be saved.
    pub(super) fn saved(&self, now: Time) -> SavedLinkHistory {
        self.links.saved(now)
    }

    /// Sets the forecast for a link at the current place and time.
    pub(super) fn set_hint(&mut self, slot: &str, hint: &ForecastHint) {
        self.links.set_hint(slot, hint);
    }

    /// The status of all links.
    pub(super) fn known_links(&self) -> Vec<KnownLink> {
        self.links.known_links()
    }

    /// The probability that a free link comes back within a span.
    pub(super) fn free_link_chance(&self, now: Time, span: Span) -> f64 {
        self.links.free_link_chance(now, span)
    }

    pub(super) fn link_rate(&self, name: &str) -> Option<(f64, bool)> {
        self.links.link_rate(name)
    }

    /// The clients for which the machine is woken or kept awake.
    pub(super) fn waking_clients(&self, now: Time) -> WakingClients {
        let mut waits = WakingClients::default();
        for client in self.clients.values().filter(|client| client.wakes) {
            let moves = now.since(client.moved_at) < RUNS_WITHIN;
            match client.last_phase {
                Some(ClientPhase::Runs) if moves => waits.running.push(client.transfer),
                Some(ClientPhase::Runs | ClientPhase::Waits) => waits.waiting.push(client.transfer),
                Some(ClientPhase::Behind) | None => {}
            }
        }
        waits
    }

    /// The time until the first waiting client must begin, on a metered link or on one that needs much energy.
    pub(super) fn latest_start(&self, now: Time) -> Option<Duration> {
        let flows: Vec<ScheduledFlow> = self
            .clients
            .values()
            .filter_map(|g| g.flow.clone())
            .collect();
        let waiting = last_phase(&self.clients).enumerate();
        let mut waiting: Vec<usize> = waiting
            .filter(|(n, number)| {
                let client = &self.clients[number];
                (client.wakes && client.last_phase == Some(ClientPhase::Waits))
                    && flows[*n].need.left.is_some_and(|left| !left.is_zero())
            })
            .map(|(n, _)| n)
            .collect();
        // The first flow that may pay. Others begin later, or their own report finds it.
        waiting.sort_by_key(|n| flows[*n].need.left);
        let pays = (waiting.into_iter()).find_map(|n| self.links.scheduler.pays_in(now, &flows, n));
        let saving = self.clients.values().filter(|client| client.wakes);
        let begins = saving.filter_map(|client| client.begins_at);
        let begins = begins.map(|at| Duration::from(at.since(now)));
        pays.into_iter().chain(begins).min()
    }

    /// Payload bytes that a link carried for all clients.
    pub(super) fn carried(&self, link: &str) -> u64 {
        self.carried.get(link).copied().unwrap_or(0)
    }

    /// Bytes per second of a link that was measured.
    pub(super) fn known_rate(&self, link: &str) -> Option<f64> {
        self.links.link_rate(link).map(|(rate, _)| rate)
    }

    /// The free links, each with its rate in bytes per second, measured or assumed; one that is only
    /// expected has no name.
    pub(super) fn free_links(&self) -> Vec<(Option<&str>, f64)> {
        let links = self.links.names.iter().zip(self.links.scheduler.links());
        let free = links.filter(|(_, link)| link.class() == LinkClass::Free);
        free.map(|(name, link)| (name.as_deref(), link.long_term_rate()))
            .collect()
    }

    /// The probability that those links which `is_used` names carry in `left_s` seconds all that is due
    /// until a client's deadline. Zero before its first report, and while its size is unknown.
    pub(super) fn odds_over(
        &self,
        now: Time,
        number: u64,
        left_s: f64,
        is_used: &dyn Fn(Option<&str>) -> bool,
    ) -> f64 {
        if (self.clients.get(&number)).is_none_or(|client| client.flow.is_none()) {
            return 0.0;
        }
        let (flows, me) = self.flows(number);
        let names = &self.links.names;
        let is_used = |n: usize| is_used(names[n].as_deref());
        (self.links.scheduler).odds_over(now, &flows, me, left_s, &is_used)
    }

    /// Records that a client waits to save energy, and will begin after this time; `None` if it does not
    /// wait for that.
    pub(super) fn set_energy_wait(&mut self, now: Time, number: u64, begins_in: Option<Duration>) {
        if let Some(client) = self.clients.get_mut(&number) {
            client.begins_at = begins_in.map(|span| now + span.into());
            if begins_in.is_some() {
                client.last_phase = Some(ClientPhase::Waits);
            }
        }
    }

    pub(super) fn pays_after(&self, now: Time, number: u64) -> Option<Duration> {
        self.clients.get(&number)?.flow.as_ref()?;
        let (flows, me) = self.flows(number);
        self.links.scheduler.pays_in(now, &flows, me)
    }

    /// Records whether the server refuses a client at present.
    pub(super) fn set_refused(&mut self, number: u64, is_refused: bool) {
        if let Some(client) = self.clients.get_mut(&number) {
            client.is_refused = is_refused;
        }
    }

    pub(super) fn promise(&mut self, now: Time, number: u64) -> Option<CompletionEstimate> {
        if self.clients.get(&number)?.is_refused {
            return None;
        }
        let fresh = |at: &Time| now.since(*at) < COUNTED_AFTER;
        if !self.promised.as_ref().is_some_and(|(at, _)| fresh(at)) {
            let (flows, _) = self.flows(number);
            let promises = self.links.scheduler.estimates(now, &flows);
            let promised = last_phase(&self.clients).zip(promises).collect();
            self.promised = Some((now, promised));
        }
        let (_, promised) = self.promised.as_ref()?;
        promised.get(&number).copied()
    }

    pub(super) fn promise_of(
        &mut self,
        now: Time,
        transfer: u64,
    ) -> Option<(CompletionEstimate, Duration)> {
        let mut clients = self.clients.iter();
        let (number, client) = clients.find(|(_, client)| client.transfer == transfer)?;
        let (number, need) = (*number, &client.flow.as_ref()?.need);
        // Without a known size there is no estimate.
        let left = need.left.filter(|_| need.remaining_bytes.is_some())?;
        Some((self.promise(now, number)?, left))
    }

    /// The demands of all clients, and the index of one of them.
    fn flows(&self, number: u64) -> (Vec<ScheduledFlow>, usize) {
        let flows = self
            .clients
            .values()
            .filter_map(|client| client.flow.clone());
        let me = last_phase(&self.clients)
            .take_while(|other| *other != number)
            .count();
        (flows.collect(), me)
    }

    /// Records how long a link has carried a transfer.
    pub(super) fn record_busy_time(&mut self, number: u64, device: &str, busy: Span) {
        if let Some(client) = self.clients.get_mut(&number) {
            client.busy.entry(device.to_owned()).or_default().0 = busy;
        }
    }

    /// Handles a client's report.
    fn take_down(&mut self, now: Time, number: u64, report: &ClientReport) {
        for link in report.candidates {
            self.links.know(now, &link.name, link.class);
            if report.is_interactive {
                self.links.assume_rate(now, link);
            }
        }
        let allowed = self.allowed;
        let Some(client) = self.clients.get_mut(&number) else {
            return;
        };
        let mut need = report.demand.clone();
        if let Some(allowed) = allowed {
            let own = need.metered_bytes_left.unwrap_or(u64::MAX);
            need.metered_bytes_left = Some(own.min(allowed));
        }
        let size = report.size_bytes.or(need.remaining_bytes);
        let known = |flow: &ScheduledFlow| flow.need.remaining_bytes.is_some();
        if let Some(size) = size.filter(|_| !client.flow.as_ref().is_some_and(known)) {
            self.links.scheduler.note_size(size);
        }
        let works = |link: &LinkCandidate| (link.name.clone(), !link.stalled);
        client.links = report.candidates.iter().map(works).collect();
        client.flow = Some(ScheduledFlow {
            size_bytes: size.unwrap_or_else(|| report.carried.values().sum()),
            priority: report.priority,
            source: report.source,
            need,
        });
        client.is_interactive = report.is_interactive;
        client.start = report.start;
        client.due_at = report.demand.left.map(|left| now + left.into());
        for (name, bytes) in report.carried {
            let before = client.carried.insert(name.clone(), *bytes).unwrap_or(0);
            let more = bytes.saturating_sub(before);
            if more > 0 {
                client.moved_at = now;
                *self.carried.entry(name.clone()).or_default() += more;
            }
            if report.is_interactive {
                let measurement = (client.measurements.entry(name.clone()))
                    .or_insert_with(|| RateMeasurement::new(now));
                if let Some((bytes, took)) = measurement.record(now, more) {
                    self.links.add_measured(name, bytes, took);
                    self.links.mark_loaded(name);
                }
            } else if more > 0 {
                let busy = client.take_busy(name).unwrap_or(Span::MAX);
                self.links.add_carried(name, more, busy);
                if report.source.measures_links() {
                    self.links.mark_loaded(name);
                }
            }
        }
        self.see(now);
    }

    /// Updates the scheduler's links, and tells the queue which share of their capacity was used.
    fn see(&mut self, now: Time) {
        let any = |client: &ClientState| client.flow.as_ref().is_some_and(pays_if_free_is_slow);
        self.links.pays_if_free_is_slow = self.clients.values().any(any);
        if let Some(used) = self.links.see(now, &self.clients) {
            self.queue.on_use(used, self.clients.len());
        }
    }
}

/// Whether a flow uses metered links beside free ones that are too slow.
fn pays_if_free_is_slow(flow: &ScheduledFlow) -> bool {
    flow.need.policy == CostPolicy::Any && flow.may_pay()
}

#[cfg(test)]
mod tests;
