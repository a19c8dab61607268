//! The scheduler of a device: every client reports what it needs and what links carried for it, and
//! receives a grant for what it may use now.
//!
//! ```text
//!  download ── report ─┐  demand, links, bytes                    Scheduler
//!  stream   ── report ─┼───────────▶ direction (down) ─ observations ─▶ link histories, forecast
//!  socket   ── report ─┘ ◀─ decision ─     │                            ─▶ link assignment
//!              (link or wait, Grant)  direction (up): the same; links are not as fast that way
//! ```
//!
//! A client is anything that needs links on its own behalf: a download, an upload, a stream, a
//! socket, the connections of a program. All of them share one budget ([`BudgetShares`]) and one
//! view of the links. The scheduler has no clock, no lock and no socket: each call is given the
//! time, which must count while the machine sleeps.
//!
//! A device that has seen no free link yet expects one: a free link that is down stands in the
//! scheduler's list from the start, and the first free link that comes up takes its entry. Without
//! that entry the list would contain only metered links, and all traffic would be paid for at once.

mod budget_shares;
mod carried_by_link;
mod client_decision;
mod client_report;
mod direction_scheduler;
mod duplex_client;
mod energy_saver;
mod flow_spending;
mod link_surroundings;
mod rate_measurement;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use d2tp_time::{Span, Time};

use crate::energy_policy::RadioPowerModel;
use crate::energy_saving::{EnergySaving, PowerSource};
use crate::{
    CompletionEstimate, ForecastHint, LinkCandidate, LinkChoice, LinkClass, LinkWaitReason,
    NetworkRates, SavedHistory, SchedulerMode,
};
use budget_shares::BudgetShares;
pub use carried_by_link::{CarriedByLink, CarryingLink};
pub use client_decision::{ClientDecision, Grant};
pub use client_report::{ClientId, ClientReport, ObjectStart, TransferDirection};
use direction_scheduler::DirectionScheduler;
pub use duplex_client::{DuplexClient, DuplexReport};
use energy_saver::EnergySaver;
pub use flow_spending::{FlowSpending, SpendingChange};
pub use link_surroundings::{KnownLink, LinkSurroundings, WakingClients};

/// The algorithm that decides when metered links are used, as users choose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SchedulerKind {
    /// Decides by a forecast of the links.
    #[default]
    D2Sched,
    /// Decides by Algorithm 1 of the Cedos paper, as published.
    AlgorithmOne,
}

impl SchedulerKind {
    /// Every algorithm.
    pub const ALL: [SchedulerKind; 2] = [SchedulerKind::D2Sched, SchedulerKind::AlgorithmOne];

    /// The name of the algorithm on a command line: `d2sched` or `algorithm-1`.
    pub fn as_str(self) -> &'static str {
        match self {
            SchedulerKind::D2Sched => "d2sched",
            SchedulerKind::AlgorithmOne => "algorithm-1",
        }
    }

    /// The mode of [`Scheduler`](crate::Scheduler) that implements the algorithm.
    pub fn mode(self) -> SchedulerMode {
        match self {
            SchedulerKind::D2Sched => SchedulerMode::Forecast,
            SchedulerKind::AlgorithmOne => SchedulerMode::AlgorithmOne { margin: 0.0 },
        }
    }
}

impl fmt::Display for SchedulerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for SchedulerKind {
    type Err = String;
    fn from_str(text: &str) -> Result<SchedulerKind, String> {
        let found = SchedulerKind::ALL
            .into_iter()
            .find(|kind| kind.as_str() == text);
        found.ok_or_else(|| format!("`{text}` is none of d2sched, algorithm-1"))
    }
}

/// How often a client reports while a metered link is up and its decision may change, or while payload
/// moves.
pub const REPORT_EVERY: Span = Span::from_secs(1);

/// How soon the decision for a client is made again that waits while a radio sleeps.
const LOOK_AGAIN: Duration = Duration::from_secs(1); // a guess: as often as an outage is judged

/// The saved history of the links in one direction: histories by link key, and rates by network.
pub type SavedLinkHistory = (
    BTreeMap<String, SavedHistory>,
    BTreeMap<String, NetworkRates>,
);

/// The scheduler of a device: one for all its clients.
#[derive(Debug)]
pub struct DeviceScheduler {
    directions: [DirectionScheduler; 2],
    /// The shares of clients in what is left of the device's budget.
    shares: BudgetShares,
    /// Which links rest to save energy.
    energy: EnergySaver,
    /// The latest round trip of each link, as sessions measured it.
    round_trips: BTreeMap<String, Duration>,
    /// Links on which sessions found an obstacle for UDP.
    udp_obstacles: BTreeMap<String, UdpObstacle>,
    /// Links whose radios are not worth waking.
    sleeping: BTreeSet<String>,
}

/// What keeps packets from travelling over UDP on a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UdpObstacle {
    /// The network carries no UDP to the server: packets travel in a stream.
    Blocked,
    /// UDP is not answered, and another host answers in place of the server: a sign-in page or a
    /// filter.
    Intercepted,
    /// The server answers neither over UDP nor over TCP.
    Unreachable,
}

impl UdpObstacle {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            UdpObstacle::Blocked => "blocked",
            UdpObstacle::Intercepted => "intercepted",
            UdpObstacle::Unreachable => "unreachable",
        }
    }
}

impl DeviceScheduler {
    /// Creates a scheduler for a device whose links are not known yet.
    pub fn new(kind: SchedulerKind) -> DeviceScheduler {
        DeviceScheduler {
            directions: [0, 1].map(|_| DirectionScheduler::new(kind.mode())),
            shares: BudgetShares::default(),
            energy: EnergySaver::new(),
            round_trips: BTreeMap::new(),
            udp_obstacles: BTreeMap::new(),
            sleeping: BTreeSet::new(),
        }
    }

    /// Adds a client. `number` identifies it to others, as in [`WakingClients`].
    pub fn join(&mut self, now: Time, direction: TransferDirection, number: u64) -> ClientId {
        ClientId {
            direction,
            number: self.directions[direction as usize].register(now, number),
        }
    }

    /// Removes a client and returns its grant to the budget.
    pub fn leave(&mut self, client: ClientId) {
        self.shares.stop_paying(client);
        self.energy.leave(client);
        self.of(client).unregister(client.number);
    }

    /// Whether there are any clients.
    pub fn has_clients(&self) -> bool {
        self.directions.iter().any(DirectionScheduler::has_clients)
    }

    /// Handles a client's report and decides what it may use until the next one. Clients report
    /// once a second and at every change of their links or needs.
    pub fn decide(&mut self, now: Time, client: ClientId, report: &ClientReport) -> ClientDecision {
        let carried = report.carried.values().sum();
        let offer = self.shares.offer(now, client, carried);
        let own = report.demand.metered_bytes_left;
        let limit = offer.map(|offer| offer.min(own.unwrap_or(u64::MAX)));
        let mut decision = self.of(client).decide(now, client.number, report);
        let begins_in = (self.energy).apply(now, client, report, &mut decision, &self.directions);
        self.of(client)
            .set_energy_wait(now, client.number, begins_in);
        self.let_sleep(report, &mut decision);
        decision.limit = limit;
        decision.grant = match decision.grant {
            _ if report.always_pays => Grant::Spend { up_to: limit },
            Grant::Spend { up_to } => Grant::Spend {
                up_to: up_to.into_iter().chain(limit).min(),
            },
            Grant::Probe { bytes } => Grant::Probe {
                bytes: bytes.min(limit.unwrap_or(u64::MAX)),
            },
            without_payload @ (Grant::None | Grant::Path) => without_payload,
        };
        let granted = match decision.grant {
            Grant::Spend { up_to } => up_to.filter(|_| limit.is_some()),
            Grant::Probe { bytes } => limit.map(|_| bytes),
            Grant::None | Grant::Path => None,
        };
        match granted {
            Some(bytes) => self.shares.start_paying(now, client, carried, bytes),
            None => self.shares.stop_paying(client),
        }
        decision
    }

    /// Sets the links whose radios sleep although no other link may work, by the names of their devices: the others are back before
    /// one of these could answer.
    pub fn set_sleeping(&mut self, names: BTreeSet<String>) {
        self.sleeping = names;
    }

    /// Takes links from a decision whose radios sleep.
    fn let_sleep(&self, report: &ClientReport, decision: &mut ClientDecision) {
        let sleeps = |link: &LinkCandidate| self.sleeping.contains(&link.name);
        let names = report.candidates.iter().filter(|link| sleeps(link));
        decision.resting.extend(names.map(|link| link.name.clone()));
        let LinkChoice::Use { index, .. } = &decision.choice else {
            return;
        };
        let chosen = &report.candidates[*index];
        if !sleeps(chosen) {
            return;
        }
        let mut others = report.candidates.iter();
        let is_other =
            |link: &LinkCandidate| !sleeps(link) && !link.stalled && link.class == LinkClass::Free;
        let why = format!(
            "{} sleeps: another network is expected before it could answer",
            chosen.name
        );
        decision.choice = match others.position(is_other) {
            Some(index) => LinkChoice::Use { index, why },
            None => LinkChoice::Wait {
                reason: LinkWaitReason::SavesEnergy,
                why,
                unblocks: "a network that works | a longer outage".to_owned(),
            },
        };
        let again = decision.recheck_after.unwrap_or(LOOK_AGAIN);
        decision.recheck_after = Some(again.min(LOOK_AGAIN));
    }

    /// Handles the links and networks around the device, so that links have a history even without
    /// a client.
    pub fn observe(&mut self, now: Time, around: &LinkSurroundings) {
        self.energy.set_networks(&around.networks);
        for direction in &mut self.directions {
            direction.observe(now, around);
        }
    }

    /// Sets when clients save energy that do not choose themselves.
    pub fn set_energy_saving(&mut self, saving: EnergySaving) {
        self.energy.set_saving(saving);
    }

    /// When clients save energy that do not choose themselves.
    pub fn energy_saving(&self) -> EnergySaving {
        self.energy.saving()
    }

    /// Sets when a client saves energy; `None` is as the device does.
    pub fn set_client_energy_saving(&mut self, client: ClientId, saving: Option<EnergySaving>) {
        self.energy.set_own(client, saving);
    }

    /// Sets what the device runs on.
    pub fn set_power_source(&mut self, power: PowerSource) {
        self.energy.set_power(power);
    }

    /// What the device runs on.
    pub fn power_source(&self) -> PowerSource {
        self.energy.power()
    }

    /// Sets the power of the radios of links, by the names of their devices, and of the radio of a free
    /// link that the device has not seen yet. A link whose radio is not known never rests.
    pub fn set_radio_power(
        &mut self,
        radios: BTreeMap<String, RadioPowerModel>,
        expected: Option<RadioPowerModel>,
    ) {
        self.energy.set_radios(radios, expected);
    }

    /// Restores the saved history of links: for the direction towards this device, and from it.
    pub fn restore(&mut self, now: Time, saved: [SavedLinkHistory; 2]) {
        for (direction, saved) in self.directions.iter_mut().zip(saved) {
            direction.restore(now, saved);
        }
    }

    /// The history of links to be saved: for the direction towards this device, and from it.
    pub fn saved(&self, now: Time) -> [SavedLinkHistory; 2] {
        [0, 1].map(|direction| self.directions[direction].saved(now))
    }

    /// The links, with their rates towards this device.
    pub fn known_links(&self) -> Vec<KnownLink> {
        self.directions[TransferDirection::Down as usize].known_links()
    }

    /// Bytes per second that all free links which are up carry together, towards this device and
    /// from it. Links that were never used do not count.
    pub fn free_rates(&self) -> [f64; 2] {
        [0, 1].map(|direction| {
            let links = self.directions[direction].known_links();
            let free = links
                .iter()
                .filter(|link| link.class == LinkClass::Free && link.carries);
            free.filter_map(|link| link.rate).sum()
        })
    }

    /// Sets the forecast of a link for the current place and time. Its rates are those towards this
    /// device.
    pub fn set_hint(&mut self, slot: &str, hint: &ForecastHint) {
        self.directions[TransferDirection::Down as usize].set_hint(slot, hint);
        let up = ForecastHint {
            days: Vec::new(),
            ..hint.clone()
        };
        self.directions[TransferDirection::Up as usize].set_hint(slot, &up);
    }

    /// The probability, 0 to 1, that a free link comes back within a span.
    pub fn free_link_chance(&self, now: Time, span: Span) -> f64 {
        self.directions[TransferDirection::Down as usize].free_link_chance(now, span)
    }

    /// The clients for which the machine is woken: those that wait, and those that move data.
    pub fn waking_clients(&self, now: Time) -> WakingClients {
        let mut all = WakingClients::default();
        for direction in &self.directions {
            let waits = direction.waking_clients(now);
            all.waiting.extend(waits.waiting);
            all.running.extend(waits.running);
        }
        all
    }

    /// The time until the first waiting client must begin on a metered link; `None` if no client
    /// will.
    pub fn latest_start(&self, now: Time) -> Option<Duration> {
        let directions = self.directions.iter();
        directions.filter_map(|d| d.latest_start(now)).min()
    }

    /// Records the round trip that a session measured on a link.
    pub fn record_round_trip(&mut self, device: &str, round_trip: Duration) {
        self.round_trips.insert(device.to_owned(), round_trip);
    }

    /// The round trip of a link, as a session last measured it.
    pub fn round_trip(&self, device: &str) -> Option<Duration> {
        self.round_trips.get(device).copied()
    }

    /// Takes in whether a session found an obstacle for UDP on a link.
    pub fn record_udp_obstacle(&mut self, device: &str, obstacle: Option<UdpObstacle>) {
        match obstacle {
            Some(obstacle) => self.udp_obstacles.insert(device.to_owned(), obstacle),
            None => self.udp_obstacles.remove(device),
        };
    }

    /// The obstacle for UDP on a link, as a session found it last.
    pub fn udp_obstacle(&self, device: &str) -> Option<UdpObstacle> {
        self.udp_obstacles.get(device).copied()
    }

    /// Records how long in total a session has carried a client's data on a link. Without such
    /// reports a link counts as having carried data all the time.
    pub fn record_busy_time(&mut self, client: ClientId, device: &str, busy: Span) {
        self.of(client)
            .record_busy_time(client.number, device, busy);
    }

    /// Records whether the server refuses a client at present: then no estimate is given.
    pub fn set_refused(&mut self, client: ClientId, is_refused: bool) {
        self.of(client).set_refused(client.number, is_refused);
    }

    /// Sets how many bytes metered links may carry for all clients together from now on; `None`
    /// means no limit.
    pub fn set_metered_limit(&mut self, metered_bytes: Option<u64>) {
        for direction in &mut self.directions {
            direction.set_metered_limit(metered_bytes);
        }
        self.shares.set_limit(metered_bytes);
    }

    /// The estimate of when a client completes and what it costs, by its last report; `None` before
    /// the first one.
    pub fn promise(&mut self, now: Time, client: ClientId) -> Option<CompletionEstimate> {
        self.of(client).promise(now, client.number)
    }

    /// The time until metered links would carry a client's payload, if links stayed as they are;
    /// `None` if they never would, or before its first report.
    pub fn pays_after(&self, now: Time, client: ClientId) -> Option<Duration> {
        self.directions[client.direction as usize].pays_after(now, client.number)
    }

    /// The estimate for the client with this number, and the time until its deadline; `None` if it
    /// has no deadline or an unknown size, if the server refuses it, or before its first report.
    pub fn promise_of(&mut self, now: Time, number: u64) -> Option<(CompletionEstimate, Duration)> {
        let mut directions = self.directions.iter_mut();
        directions.find_map(|direction| direction.promise_of(now, number))
    }

    /// The rate of a link towards this device in bytes per second, and whether it carries data as
    /// far as is known; `None` before the link was used.
    pub fn link_rate(&self, link: &str) -> Option<(f64, bool)> {
        self.directions[TransferDirection::Down as usize].link_rate(link)
    }

    fn of(&mut self, client: ClientId) -> &mut DirectionScheduler {
        &mut self.directions[client.direction as usize]
    }
}
