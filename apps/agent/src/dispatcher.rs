//! The one scheduler of a device: every transfer tells it what it needs and what links carried for
//! it, and is told what it may use now.
//!
//! ```text
//!  transfer ─ Seat ─┐  needs, links, bytes                     d2tp_sched::Scheduler
//!  transfer ─ Seat ─┼──────────────────▶ lane (down) ─ sights ─▶ histories, outlook ─▶ roster
//!  transfer ─ Seat ─┘ ◀── Verdict ──────      │
//!                                        lane (up): the same, since links are not as fast that way
//! ```
//!
//! A `cedos get` alone has one of its own; in an agent all transfers share it.
//!
//! A device that has seen no free link yet hopes for one: its place in the scheduler's list is there
//! from the start, as a link that is away, and the first free link that comes takes it. Without that
//! nothing but links that cost would exist, and all would be paid for at once.

mod budget_shares;
mod direction_scheduler;
mod transfer_decision;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use d2tp_sched::{
    CompletionEstimate, FlowDemand, ForecastHint, LinkCandidate, LinkChoice, LinkClass,
    NetworkRates, SavedHistory, SchedulerMode,
};
use d2tp_time::Span;
use tokio::sync::watch;

use crate::fetch::boot_clock::BootInstant;
use budget_shares::BudgetShares;
use direction_scheduler::DirectionScheduler;
pub use transfer_decision::TransferDecision;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferDirection {
    /// To this device.
    Down,
    /// From it.
    Up,
}

/// How it is decided, as people choose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SchedulerKind {
    /// By what the outlook on the links says.
    #[default]
    D2Sched,
    /// By Algorithm 1 of the Cedos paper, as published.
    AlgorithmOne,
}

impl SchedulerKind {
    /// All of them.
    pub const ALL: [SchedulerKind; 2] = [SchedulerKind::D2Sched, SchedulerKind::AlgorithmOne];

    /// As people write it.
    pub fn as_str(self) -> &'static str {
        match self {
            SchedulerKind::D2Sched => "d2sched",
            SchedulerKind::AlgorithmOne => "algorithm-1",
        }
    }

    fn mode(self) -> SchedulerMode {
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

/// How a transfer stands, as it sees it.
#[derive(Debug, Clone)]
pub struct TransferDemand<'a> {
    /// What it needs.
    pub demand: FlowDemand,
    /// Bytes of the whole of it, when known.
    pub size_bytes: Option<u64>,
    /// 0 to 7, higher is more.
    pub priority: u8,
    /// The links it could use.
    pub candidates: &'a [LinkCandidate],
    /// Payload that each carried for it so far.
    pub carried: &'a BTreeMap<String, u64>,
    /// It can be on several links at once.
    pub uses_several_links: bool,
    /// It pays now, whatever is decided about others.
    pub always_pays: bool,
    /// The machine is woken and kept awake for it.
    pub keeps_awake: bool,
}

/// A link as the scheduler has it.
#[derive(Debug, Clone, PartialEq)]
pub struct RadioStatus {
    /// The device.
    pub device: String,
    /// What its past is kept under: a device's name may change, that it is the Wi-Fi does not.
    pub slot: String,
    /// What it costs.
    pub class: LinkClass,
    /// It is up, and carries as far as is known.
    pub carries: bool,
    /// The rate of its network, where that was used.
    pub rate: Option<f64>,
}

/// What is around a device, whether a transfer asks or not.
#[derive(Debug, Clone, Default)]
pub struct LinkSurroundings {
    /// The links that can be used.
    pub radios: Vec<RadioStatus>,
    /// The network behind each device.
    pub networks: BTreeMap<String, String>,
    /// What the past of each device is kept under.
    pub slots: BTreeMap<String, String>,
    /// Devices on networks whose cap is used up.
    pub capped: BTreeSet<String>,
}

impl LinkSurroundings {
    fn slot(&self, device: &str) -> String {
        let known = self.slots.get(device).cloned();
        known.unwrap_or_else(|| device.to_owned())
    }
}

/// Those that the machine is woken for, by how they stand towards its sleep.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WakingTransfers {
    /// Those that wait for a link.
    pub waiting: Vec<u64>,
    /// Those that move on a link they were given.
    pub running: Vec<u64>,
}

/// What is kept of the links of one direction: radios by what they are, rates by network.
pub type SavedLinkHistory = (
    BTreeMap<String, SavedHistory>,
    BTreeMap<String, NetworkRates>,
);

/// The scheduler of a device.
#[derive(Debug)]
pub struct Dispatcher {
    kind: SchedulerKind,
    directions: Mutex<[DirectionScheduler; 2]>,
    /// What is left for all who pay.
    shares: Mutex<BudgetShares>,
    /// Round trips by device, as sessions measured them last.
    round_trips: Mutex<BTreeMap<String, Duration>>,
    /// Counts transfers that came and went, and those that begin or cease to wait.
    changed: watch::Sender<u64>,
}

impl Dispatcher {
    /// Of a device whose links are not known yet.
    pub fn new(kind: SchedulerKind) -> Arc<Dispatcher> {
        let lanes = [
            DirectionScheduler::new(kind.mode()),
            DirectionScheduler::new(kind.mode()),
        ];
        Arc::new(Dispatcher {
            kind,
            directions: Mutex::new(lanes),
            shares: Mutex::default(),
            round_trips: Mutex::default(),
            changed: watch::channel(0).0,
        })
    }

    /// Takes in what is around; without a transfer too, links have a past.
    pub fn observe(&self, around: &LinkSurroundings) {
        for lane in self.lanes().iter_mut() {
            lane.observe(BootInstant::now(), around);
        }
    }

    /// What is known from before, to this device and from it.
    pub fn restore(&self, kept: [SavedLinkHistory; 2]) {
        for (lane, (pasts, rates)) in self.lanes().iter_mut().zip(kept) {
            lane.restore(BootInstant::now(), pasts, rates);
        }
    }

    /// What is to be kept.
    pub fn saved(&self) -> [SavedLinkHistory; 2] {
        let lanes = self.lanes();
        [0, 1].map(|direction| lanes[direction].saved(BootInstant::now()))
    }

    /// The links as they are to this device.
    pub fn radios(&self) -> Vec<RadioStatus> {
        self.lanes()[TransferDirection::Down as usize].radios()
    }

    /// What free links that are up carry, bytes a second to this device and from it, as far as they were
    /// used.
    pub fn free_rates(&self) -> [f64; 2] {
        let lanes = self.lanes();
        [0, 1].map(|direction| {
            let radios = lanes[direction].radios();
            let free = radios
                .iter()
                .filter(|radio| radio.class == LinkClass::Free && radio.carries);
            free.filter_map(|radio| radio.rate).sum()
        })
    }

    /// What a forecast says of a radio, here and now. The rates in it are those towards this device.
    pub fn set_hint(&self, slot: &str, hint: &ForecastHint) {
        let mut lanes = self.lanes();
        lanes[TransferDirection::Down as usize].set_hint(slot, hint);
        let up = ForecastHint {
            days: Vec::new(),
            ..hint.clone()
        };
        lanes[TransferDirection::Up as usize].set_hint(slot, &up);
    }

    /// The chance that a free link comes back within a span.
    pub fn free_link_chance(&self, span: Span) -> f64 {
        self.lanes()[TransferDirection::Down as usize].free_link_chance(BootInstant::now(), span)
    }

    /// How transfers stand towards the machine's sleep.
    pub fn waking_transfers(&self) -> WakingTransfers {
        let lanes = self.lanes();
        let mut all = WakingTransfers::default();
        for lane in lanes.iter() {
            let waits = lane.waking_transfers(BootInstant::now());
            all.waiting.extend(waits.waiting);
            all.running.extend(waits.running);
        }
        all
    }

    /// In how long the first of those that wait must begin on a link that costs.
    pub fn latest_start(&self) -> Option<Duration> {
        let lanes = self.lanes();
        let starts = lanes
            .iter()
            .filter_map(|lane| lane.latest_start(BootInstant::now()));
        starts.min()
    }

    /// Told when a transfer comes, goes, begins to wait or ceases to.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn stir(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// A session measured a link.
    pub fn record_round_trip(&self, device: &str, round_trip: Duration) {
        let mut known = self
            .round_trips
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        known.insert(device.to_owned(), round_trip);
    }

    /// The round trip of a link, as a session measured it last.
    pub fn round_trip(&self, device: &str) -> Option<Duration> {
        let known = self
            .round_trips
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        known.get(device).copied()
    }

    /// How it decides.
    pub fn kind(&self) -> SchedulerKind {
        self.kind
    }

    /// What links that cost may carry for all transfers together from now on; none is no limit.
    pub fn set_metered_limit(&self, metered_bytes: Option<u64>) {
        for lane in self.lanes().iter_mut() {
            lane.set_metered_limit(metered_bytes);
        }
        self.shares().set_limit(metered_bytes);
    }

    /// A place for a transfer, which it keeps until it is dropped.
    /// `transfer` is the number others know it by.
    pub fn register(
        self: &Arc<Dispatcher>,
        direction: TransferDirection,
        transfer: u64,
    ) -> TransferSlot {
        let number = self.lanes()[direction as usize].register(transfer);
        self.stir();
        TransferSlot {
            dispatcher: self.clone(),
            direction,
            number,
            waited: AtomicBool::new(false),
            wakes: AtomicBool::new(false),
        }
    }

    /// What can be promised of a transfer, and in how long that is; none without a deadline, or
    /// before it told what it needs.
    pub fn promise_of(&self, transfer: u64) -> Option<(CompletionEstimate, Duration)> {
        let mut lanes = self.lanes();
        lanes
            .iter_mut()
            .find_map(|lane| lane.promise_of(BootInstant::now(), transfer))
    }

    /// The rate of a link towards this device, if it was used, and whether it carries as far as is
    /// known.
    pub fn link_rate(&self, link: &str) -> Option<(f64, bool)> {
        self.lanes()[TransferDirection::Down as usize].link_rate(link)
    }

    fn shares(&self) -> MutexGuard<'_, BudgetShares> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lanes(&self) -> MutexGuard<'_, [DirectionScheduler; 2]> {
        self.directions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one transfer.
#[derive(Debug)]
pub struct TransferSlot {
    dispatcher: Arc<Dispatcher>,
    direction: TransferDirection,
    number: u64,
    /// It was told to wait.
    waited: AtomicBool,
    /// The machine is woken for it.
    wakes: AtomicBool,
}

impl TransferSlot {
    /// Tells how the transfer stands, and asks what it may use.
    pub fn decide(&self, standing: &TransferDemand) -> TransferDecision {
        let now = BootInstant::now();
        let payer = (self.direction as usize, self.number);
        let carried = standing.carried.values().sum();
        let offer = self.dispatcher.shares().offer(now, payer, carried);
        let own = standing.demand.metered_bytes_left;
        let mut verdict = {
            let mut lanes = self.dispatcher.lanes();
            lanes[self.direction as usize].decide(now, self.number, standing)
        };
        verdict.grant = offer.map(|offer| offer.min(own.unwrap_or(u64::MAX)));
        let pays = verdict.pays.is_some() || standing.always_pays;
        let granted = match verdict.probe.filter(|_| !pays) {
            Some(probe) => verdict.grant.map(|grant| grant.min(probe)),
            None => verdict.grant.filter(|_| pays),
        };
        match granted {
            Some(bytes) => (self.dispatcher.shares()).start_paying(now, payer, carried, bytes),
            None => self.dispatcher.shares().stop_paying(payer),
        }
        let waits = matches!(verdict.choice, LinkChoice::Wait { .. });
        let others = [
            self.waited.swap(waits, Ordering::Relaxed) != waits,
            self.wakes.swap(standing.keeps_awake, Ordering::Relaxed) != standing.keeps_awake,
        ];
        if others.contains(&true) {
            self.dispatcher.stir();
        }
        verdict
    }

    /// Tells what a session measured of a link.
    pub fn record_round_trip(&self, device: &str, round_trip: Duration) {
        self.dispatcher.record_round_trip(device, round_trip);
    }

    /// Tells for how long a session has been carried by a link. Without that a link is taken to have
    /// carried all the time.
    pub fn record_busy_time(&self, device: &str, busy: Duration) {
        let mut lanes = self.dispatcher.lanes();
        lanes[self.direction as usize].record_busy_time(self.number, device, busy);
    }

    /// What can be promised of it, by what it told last; none before it told anything.
    pub fn promise(&self) -> Option<CompletionEstimate> {
        let mut lanes = self.dispatcher.lanes();
        lanes[self.direction as usize].promise(BootInstant::now(), self.number)
    }
}

impl Drop for TransferSlot {
    fn drop(&mut self) {
        let payer = (self.direction as usize, self.number);
        self.dispatcher.shares().stop_paying(payer);
        self.dispatcher.lanes()[self.direction as usize].unregister(self.number);
        self.dispatcher.stir();
    }
}
