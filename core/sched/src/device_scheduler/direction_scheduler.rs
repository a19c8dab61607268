//! One direction of a device's links, and the transfers on it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::{
    CompletionEstimate, ForecastHint, LinkAssignment, LinkCandidate, LinkChoice, LinkClass,
    LinkHistory, LinkObservation, LinkShare, LinkWaitReason, NetworkRates, SavedHistory,
    ScheduledFlow, Scheduler, SchedulerMode,
};
use d2tp_time::{Span, Time};

use super::client_decision::{ClientDecision, Grant, fit_to_links};
use super::rate_measurement::{MEASURED_BYTES_MIN, RateMeasurement};
use super::{ClientReport, LinkSurroundings, RadioStatus, WakingClients};

/// What links carried is taken down after so long: a shorter time says little of a rate.
const COUNTED_AFTER: Span = Span::from_millis(900); // a little less than an epoch

/// What came in less time came in this: the time is told in steps of it.
const BUSY_MIN: Span = Span::from_millis(100); // the driver's tick

/// From this load on there is no time to lose: the earliest deadline goes alone.
const PRESSED: f64 = 0.35; // a guess: rates fall to a third

/// How many transfers go side by side while there is time.
const ABREAST: usize = 4; // a guess: what download managers do

/// Another transfer starts beside the others while links carry less than this share of what they
/// could.
const IDLE_BELOW: f64 = 0.5; // a guess
/// One transfer less goes beside the others when links carry more than this share of what they
/// could.
const FULL_ABOVE: f64 = 0.8; // a guess

/// Another transfer starts only after this many looks in a row found links idle: a transfer that
/// begins is slow at first.
const IDLE_LOOKS: u32 = 3; // a guess

/// A transfer that carried nothing for so long does not keep those behind it waiting.
const MOVES_WITHIN: Span = Span::from_secs(5); // a guess: a slow start over a long way

/// A transfer that carried nothing for so long does not keep the machine awake.
const RUNS_WITHIN: Span = Span::from_secs(30); // a guess: an origin that thinks

/// Networks whose rates are remembered; the one met longest ago is forgotten for another.
const NETWORKS_MAX: usize = 256;

/// Where the past of a radio is that no device of this start has shown yet.
const HOPED_FOR: &str = "Wi-Fi";

/// One direction of all links.
#[derive(Debug)]
pub(super) struct DirectionScheduler {
    scheduler: Scheduler,
    /// The names of the scheduler's links; one that is hoped for has none.
    names: Vec<Option<String>>,
    /// The network behind each, where that was told.
    networks: Vec<Option<String>>,
    around: LinkSurroundings,
    /// What is known of radios that no device has shown yet.
    pasts: BTreeMap<String, SavedHistory>,
    /// How fast networks were that no link is on now, and which was met when.
    rates: BTreeMap<String, (u64, NetworkRates)>,
    met: u64,
    /// Carried since that was last taken down.
    pending: Vec<PendingTraffic>,
    up: Vec<bool>,
    counted_at: Option<Time>,
    seats: BTreeMap<u64, ClientState>,
    next_seat: u64,
    /// Transfers that go beside those that would fill the links.
    extra: usize,
    /// Looks in a row that found room.
    idle_looks: u32,
    /// What links that cost may carry for all together.
    allowed: Option<u64>,
    promised: Option<(Time, BTreeMap<u64, CompletionEstimate>)>,
}

/// What a link carried, and for how long; longer than all of the time where several shared it.
#[derive(Debug, Clone, Copy, Default)]
struct PendingTraffic {
    bytes: u64,
    busy: Span,
    /// The longest of the measurements that are part of it.
    longest: Span,
}

/// What one transfer last reported, and what it was told.
#[derive(Debug)]
struct ClientState {
    /// The number that others know the client by.
    transfer: u64,
    flow: Option<ScheduledFlow>,
    /// The links it could use, and whether they carry as far as it knows.
    ways: Vec<(String, bool)>,
    carried: BTreeMap<String, u64>,
    /// For how long links have carried it, as far as it says; and as far as that is taken down.
    busy: BTreeMap<String, (Span, Span)>,
    /// What links carried of it that no rate was measured by yet; of an interactive client.
    measurements: BTreeMap<String, RateMeasurement>,
    is_interactive: bool,
    moved_at: Time,
    /// Nobody is before it since then.
    goes_since: Option<Time>,
    /// What it was told last.
    told: Option<ClientPhase>,
    /// The machine is woken and kept awake for it.
    wakes: bool,
}

/// How a transfer stands by what it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientPhase {
    Runs,
    /// For a link.
    Waits,
    /// For another transfer.
    Behind,
}

impl DirectionScheduler {
    pub(super) fn new(mode: SchedulerMode) -> DirectionScheduler {
        DirectionScheduler {
            scheduler: Scheduler::new(mode, [LinkClass::Free]),
            names: vec![None],
            networks: vec![None],
            around: LinkSurroundings::default(),
            pasts: BTreeMap::new(),
            rates: BTreeMap::new(),
            met: 0,
            pending: vec![PendingTraffic::default()],
            up: vec![false],
            counted_at: None,
            seats: BTreeMap::new(),
            next_seat: 0,
            extra: 0,
            idle_looks: 0,
            allowed: None,
            promised: None,
        }
    }

    pub(super) fn register(&mut self, now: Time, transfer: u64) -> u64 {
        self.next_seat += 1;
        let guest = ClientState {
            transfer,
            flow: None,
            ways: Vec::new(),
            carried: BTreeMap::new(),
            busy: BTreeMap::new(),
            measurements: BTreeMap::new(),
            is_interactive: false,
            moved_at: now,
            goes_since: None,
            told: None,
            wakes: false,
        };
        self.seats.insert(self.next_seat, guest);
        // Room that others left is first for whoever is first now.
        (self.extra, self.idle_looks) = (0, 0);
        self.next_seat
    }

    pub(super) fn unregister(&mut self, number: u64) {
        self.seats.remove(&number);
        self.promised = None;
    }

    pub(super) fn set_metered_limit(&mut self, metered_bytes: Option<u64>) {
        self.allowed = metered_bytes;
    }

    pub(super) fn decide(
        &mut self,
        now: Time,
        number: u64,
        standing: &ClientReport,
    ) -> ClientDecision {
        self.take_down(now, number, standing);
        let (flows, me) = self.flows(number);
        let roster = self.scheduler.decide(now, &flows);
        let is_payer = roster.payers.contains(&me);
        let pays = is_payer && roster.shares.contains(&LinkShare::Paid);
        let mine = |n: usize| {
            let name = self.names[n].as_deref();
            standing
                .candidates
                .iter()
                .any(|way| Some(&*way.name) == name)
        };
        let probe = roster
            .shares
            .iter()
            .enumerate()
            .find_map(|(n, share)| match share {
                LinkShare::Probe(bytes) if roster.probed == Some(me) && mine(n) => Some(*bytes),
                _ => None,
            });
        let why = self
            .scheduler
            .explain(now, &flows, &roster, me, &self.shown());
        let behind = self.is_behind(now, number, &flows, &roster);
        let need = &flows[me].need;
        let capped = |device: &str| self.around.capped.contains(device);
        let mut verdict = fit_to_links(need, standing, pays, probe, why, behind, &capped);
        let costs = |way: &LinkCandidate| way.class == LinkClass::Metered;
        if standing.is_interactive
            && is_payer
            && verdict.grant == Grant::None
            && !standing.candidates.iter().any(costs)
        {
            // A program's first byte is not to wait for a decision when such a link comes up.
            verdict.grant = Grant::Spend { up_to: None };
        }
        verdict.recheck_after = need.left.map(|_| roster.valid_for.into());
        verdict.lacks_budget = !pays && self.would_pay(now, flows, me);
        if let Some(guest) = self.seats.get_mut(&number) {
            guest.wakes = standing.keeps_awake;
            guest.told = Some(match &verdict.choice {
                LinkChoice::Use { .. } => ClientPhase::Runs,
                LinkChoice::Wait {
                    reason: LinkWaitReason::QueuedBehind,
                    ..
                } => ClientPhase::Behind,
                LinkChoice::Wait { .. } => ClientPhase::Waits,
            });
        }
        verdict
    }

    /// Whether links that cost would carry a flow, had it any budget.
    fn would_pay(&self, now: Time, mut flows: Vec<ScheduledFlow>, me: usize) -> bool {
        let left = &mut flows[me].need.metered_bytes_left;
        if *left != Some(0) {
            return false;
        }
        *left = None;
        self.scheduler.decide(now, &flows).payers.contains(&me)
    }

    /// Takes in what is around: devices that are there whether a transfer asks or not, and the networks
    /// behind them.
    pub(super) fn observe(&mut self, now: Time, around: &LinkSurroundings) {
        self.around = around.clone();
        for radio in &around.radios {
            self.know(now, &radio.device, radio.class);
        }
        self.see(now);
    }

    /// What is known of radios from before.
    pub(super) fn restore(
        &mut self,
        now: Time,
        pasts: BTreeMap<String, SavedHistory>,
        rates: BTreeMap<String, NetworkRates>,
    ) {
        self.pasts = pasts;
        for (network, rates) in rates.into_iter().take(NETWORKS_MAX) {
            self.met += 1;
            self.rates.insert(network, (self.met, rates));
        }
        if let Some(past) = self.pasts.get(HOPED_FOR) {
            let history = LinkHistory::recall(now, LinkClass::Free, past);
            self.scheduler.restore_history(0, history);
        }
    }

    /// What is to be kept of radios and networks.
    pub(super) fn saved(
        &self,
        now: Time,
    ) -> (
        BTreeMap<String, SavedHistory>,
        BTreeMap<String, NetworkRates>,
    ) {
        let mut pasts = self.pasts.clone();
        let mut rates: BTreeMap<String, NetworkRates> = self
            .rates
            .iter()
            .map(|(name, (_, rates))| (name.clone(), *rates))
            .collect();
        let links = self.names.iter().zip(self.scheduler.links());
        for ((name, link), network) in links.zip(&self.networks) {
            let Some(name) = name.as_ref().filter(|name| !is_here(name)) else {
                continue;
            };
            pasts.insert(self.around.slot(name), link.saved(now));
            if let Some(network) = network.clone().filter(|_| link.confidence() > 0.0) {
                rates.insert(network, link.rates());
            }
        }
        (pasts, rates)
    }

    /// What a forecast says of a radio, here and now.
    pub(super) fn set_hint(&mut self, slot: &str, hint: &ForecastHint) {
        for link in 0..self.names.len() {
            let known = match &self.names[link] {
                Some(name) => self.around.slot(name),
                None => HOPED_FOR.to_owned(),
            };
            if known == slot {
                self.scheduler.set_hint(link, hint.clone());
            }
        }
    }

    /// What is known of radios now.
    pub(super) fn radios(&self) -> Vec<RadioStatus> {
        let links = self.names.iter().zip(self.scheduler.links());
        let radio = |(name, link): (&Option<String>, &LinkHistory)| {
            let name = name.as_ref().filter(|name| !is_here(name))?;
            Some(RadioStatus {
                device: name.clone(),
                slot: self.around.slot(name),
                class: link.class(),
                carries: link.carries(),
                rate: (link.confidence() > 0.0).then(|| link.long_term_rate()),
            })
        };
        links.filter_map(radio).collect()
    }

    /// The chance that a free link comes back within a span.
    pub(super) fn free_link_chance(&self, now: Time, span: Span) -> f64 {
        let away = self.scheduler.links().iter();
        let away = away.filter(|link| link.class() == LinkClass::Free && !link.carries());
        let none = away.map(|link| 1.0 - link.returns_within(now, span));
        1.0 - none.product::<f64>()
    }

    /// How transfers stand towards the machine's sleep.
    pub(super) fn waking_clients(&self, now: Time) -> WakingClients {
        let mut waits = WakingClients::default();
        for guest in self.seats.values().filter(|guest| guest.wakes) {
            let moves = now.since(guest.moved_at) < RUNS_WITHIN;
            match guest.told {
                Some(ClientPhase::Runs) if moves => waits.running.push(guest.transfer),
                Some(ClientPhase::Runs | ClientPhase::Waits) => waits.waiting.push(guest.transfer),
                Some(ClientPhase::Behind) | None => {}
            }
        }
        waits
    }

    /// In how long the first of those that wait must begin on a link that costs.
    pub(super) fn latest_start(&self, now: Time) -> Option<Duration> {
        let flows: Vec<ScheduledFlow> =
            self.seats.values().filter_map(|g| g.flow.clone()).collect();
        let told = self.told().enumerate();
        let mut waiting: Vec<usize> = told
            .filter(|(n, number)| {
                let guest = &self.seats[number];
                (guest.wakes && guest.told == Some(ClientPhase::Waits))
                    && flows[*n].need.left.is_some_and(|left| !left.is_zero())
            })
            .map(|(n, _)| n)
            .collect();
        // The first of those that may pay; the others' is later, or their own look finds it.
        waiting.sort_by_key(|n| flows[*n].need.left);
        waiting
            .into_iter()
            .find_map(|n| self.scheduler.pays_in(now, &flows, n))
    }

    pub(super) fn pays_after(&self, now: Time, number: u64) -> Option<Duration> {
        self.seats.get(&number)?.flow.as_ref()?;
        let (flows, me) = self.flows(number);
        self.scheduler.pays_in(now, &flows, me)
    }

    pub(super) fn promise(&mut self, now: Time, number: u64) -> Option<CompletionEstimate> {
        let fresh = |at: &Time| now.since(*at) < COUNTED_AFTER;
        if !self.promised.as_ref().is_some_and(|(at, _)| fresh(at)) {
            let (flows, _) = self.flows(number);
            let promises = self.scheduler.estimates(now, &flows);
            let told = self.told().zip(promises).collect();
            self.promised = Some((now, told));
        }
        let (_, promised) = self.promised.as_ref()?;
        promised.get(&number).copied()
    }

    pub(super) fn promise_of(
        &mut self,
        now: Time,
        transfer: u64,
    ) -> Option<(CompletionEstimate, Duration)> {
        let mut seats = self.seats.iter();
        let (number, guest) = seats.find(|(_, guest)| guest.transfer == transfer)?;
        let (number, need) = (*number, &guest.flow.as_ref()?.need);
        // Of a size that is not known nothing can be promised.
        let left = need.left.filter(|_| need.remaining_bytes.is_some())?;
        Some((self.promise(now, number)?, left))
    }

    pub(super) fn link_rate(&self, name: &str) -> Option<(f64, bool)> {
        let place = self.names.iter().position(|n| n.as_deref() == Some(name))?;
        let link = &self.scheduler.links()[place];
        (link.confidence() > 0.0).then(|| (link.long_term_rate(), link.carries()))
    }

    /// The numbers of the clients that have reported a need, in the order of the scheduler's list.
    fn told(&self) -> impl Iterator<Item = u64> {
        let told = self.seats.iter().filter(|(_, guest)| guest.flow.is_some());
        told.map(|(number, _)| *number)
    }

    /// What all clients need, and the index of one of them.
    fn flows(&self, number: u64) -> (Vec<ScheduledFlow>, usize) {
        let flows = self.seats.values().filter_map(|guest| guest.flow.clone());
        let me = self.told().take_while(|other| *other != number).count();
        (flows.collect(), me)
    }

    fn shown(&self) -> Vec<&str> {
        let hoped_for = "a free network";
        let names = self.names.iter().map(Option::as_deref);
        names.map(|name| name.unwrap_or(hoped_for)).collect()
    }

    /// For how long a link has carried a transfer.
    pub(super) fn record_busy_time(&mut self, number: u64, device: &str, busy: Span) {
        if let Some(guest) = self.seats.get_mut(&number) {
            guest.busy.entry(device.to_owned()).or_default().0 = busy;
        }
    }

    /// Takes down what a transfer tells of itself and of links.
    fn take_down(&mut self, now: Time, number: u64, standing: &ClientReport) {
        for way in standing.candidates {
            self.know(now, &way.name, way.class);
            if standing.is_interactive {
                self.assume_rate(now, way);
            }
        }
        let allowed = self.allowed;
        let Some(guest) = self.seats.get_mut(&number) else {
            return;
        };
        let mut need = standing.demand.clone();
        if let Some(allowed) = allowed {
            let own = need.metered_bytes_left.unwrap_or(u64::MAX);
            need.metered_bytes_left = Some(own.min(allowed));
        }
        let size = standing.size_bytes.or(need.remaining_bytes);
        let known = |flow: &ScheduledFlow| flow.need.remaining_bytes.is_some();
        if let Some(size) = size.filter(|_| !guest.flow.as_ref().is_some_and(known)) {
            self.scheduler.note_size(size);
        }
        let works = |way: &LinkCandidate| (way.name.clone(), !way.stalled);
        guest.ways = standing.candidates.iter().map(works).collect();
        guest.flow = Some(ScheduledFlow {
            size_bytes: size.unwrap_or_else(|| standing.carried.values().sum()),
            priority: standing.priority,
            need,
        });
        guest.is_interactive = standing.is_interactive;
        for (name, bytes) in standing.carried {
            let before = guest.carried.insert(name.clone(), *bytes).unwrap_or(0);
            let more = bytes.saturating_sub(before);
            if more > 0 {
                guest.moved_at = now;
            }
            if standing.is_interactive {
                let measurement = (guest.measurements.entry(name.clone()))
                    .or_insert_with(|| RateMeasurement::new(now));
                let measured = measurement.record(now, more);
                let known = self.names.iter().position(|n| n.as_ref() == Some(name));
                if let (Some((bytes, took)), Some(link)) = (measured, known) {
                    let pending = &mut self.pending[link];
                    pending.bytes += bytes;
                    pending.busy = pending.busy + took;
                    pending.longest = pending.longest.max(took);
                }
            } else if more > 0 {
                let known = self.names.iter().position(|n| n.as_ref() == Some(name));
                let busy = guest.busy.get_mut(name).map(|(said, taken)| {
                    // Another session counts anew.
                    let more = if *said < *taken {
                        *said
                    } else {
                        said.saturating_sub(*taken)
                    };
                    *taken = *said;
                    more
                });
                if let Some(link) = known {
                    let pending = &mut self.pending[link];
                    pending.bytes += more;
                    pending.busy = pending.busy + busy.unwrap_or(Span::MAX);
                }
            }
        }
        self.see(now);
    }

    /// Takes a session's word for the rate of a link that was never measured.
    fn assume_rate(&mut self, now: Time, candidate: &LinkCandidate) {
        let is_it = |name: &Option<String>| name.as_ref() == Some(&candidate.name);
        let Some(link) = self.names.iter().position(is_it) else {
            return;
        };
        let known = self.scheduler.links()[link].confidence() > 0.0;
        let rate = candidate.rate_bytes_per_s.unwrap_or(0.0) as u64;
        if known || rate < MEASURED_BYTES_MIN {
            return;
        }
        let mut measured = LinkHistory::new(candidate.class);
        measured.observe(
            now,
            &LinkObservation {
                up: true,
                bytes: rate,
                busy: Span::from_secs(1),
            },
        );
        self.scheduler.switch_network(link, measured.rates());
    }

    /// Takes a link up that was not known, or costs something else now, or is on another network.
    fn know(&mut self, now: Time, device: &str, class: LinkClass) {
        let is_it = |name: &Option<String>| name.as_deref() == Some(device);
        let link = match self.names.iter().position(is_it) {
            Some(link) => link,
            None => self.take_up(now, device, class),
        };
        if self.scheduler.links()[link].class() != class {
            self.scheduler.set_class(link, class);
        }
        let network = self.around.networks.get(device);
        if network.is_some() && self.networks[link].as_ref() != network {
            self.meet(link, network.cloned());
        }
    }

    fn take_up(&mut self, now: Time, device: &str, class: LinkClass) -> usize {
        let past = self.pasts.remove(&self.around.slot(device));
        let hoped_for = self.names.iter().position(Option::is_none);
        let link = match hoped_for.filter(|_| class == LinkClass::Free) {
            Some(link) => {
                self.names[link] = Some(device.to_owned());
                link
            }
            None => {
                self.names.push(Some(device.to_owned()));
                self.networks.push(None);
                self.pending.push(PendingTraffic::default());
                self.up.push(false);
                self.scheduler.add_link(class)
            }
        };
        if let Some(past) = past {
            let history = LinkHistory::recall(now, class, &past);
            self.scheduler.restore_history(link, history);
        }
        link
    }

    /// A link is on another network now, which has a rate of its own.
    fn meet(&mut self, link: usize, network: Option<String>) {
        let known = network
            .as_ref()
            .and_then(|network| self.rates.remove(network));
        let rates = known.map(|(_, rates)| rates).unwrap_or_default();
        let was_used = self.scheduler.links()[link].confidence() > 0.0;
        let named = self.networks[link].take();
        if named.is_none() && was_used && known.is_none() {
            // It was used before anybody told which network it is.
            self.networks[link] = network;
            return;
        }
        let before = self.scheduler.switch_network(link, rates);
        if let Some(left) = named.filter(|_| was_used) {
            self.met += 1;
            self.rates.insert(left, (self.met, before));
            if self.rates.len() > NETWORKS_MAX {
                let oldest = self.rates.iter().min_by_key(|(_, (met, _))| *met);
                if let Some(oldest) = oldest.map(|(name, _)| name.clone()) {
                    self.rates.remove(&oldest);
                }
            }
        }
        self.networks[link] = network;
    }

    /// Tells the scheduler, when a link came or went and once an epoch.
    fn see(&mut self, now: Time) {
        // One that is on this machine alone says nothing of links.
        let told = |guest: &&ClientState| {
            let mut ways = guest.ways.iter().map(|(way, _)| &**way);
            guest.flow.is_some() && (guest.ways.is_empty() || ways.any(|way| !is_here(way)))
        };
        let is_told = self.seats.values().any(|guest| told(&guest));
        let works = |name: &Option<String>| {
            let Some(name) = name else {
                return false;
            };
            if !is_told && !is_here(name) {
                // Nobody uses links: as the system has them, where that is known.
                return self.around.radios.iter().any(|radio| radio.device == *name);
            }
            // What no transfer lists leads nowhere, whatever the system says.
            let mut ways = self.seats.values().flat_map(|guest| &guest.ways);
            ways.any(|(way, works)| *works && way == name)
        };
        let up: Vec<bool> = self.names.iter().map(works).collect();
        let counted = now.since(*self.counted_at.get_or_insert(now));
        let is_time = counted >= COUNTED_AFTER;
        if !is_time && up == self.up {
            return;
        }
        let sights: Vec<LinkObservation> = (up.iter().zip(&self.pending))
            .map(|(up, pending)| match is_time && pending.bytes > 0 {
                true => LinkObservation {
                    up: *up,
                    bytes: pending.bytes,
                    busy: pending.busy.max(BUSY_MIN).min(counted.max(pending.longest)),
                },
                false => LinkObservation {
                    up: *up,
                    ..LinkObservation::default()
                },
            })
            .collect();
        self.scheduler.observe(now, &sights);
        self.up = up;
        if is_time {
            self.look_for_room(counted);
            self.counted_at = Some(now);
            self.pending.fill(PendingTraffic::default());
        }
    }

    /// Lets one more go beside the others, or one less, by how much of the links was used.
    fn look_for_room(&mut self, counted: Span) {
        let used: u64 = self.pending.iter().map(|pending| pending.bytes).sum();
        let links = self.scheduler.links().iter().zip(&self.pending);
        let in_use = links.filter(|(link, pending)| {
            link.carries() && (link.class() == LinkClass::Free || pending.bytes > 0)
        });
        let could: f64 = in_use.map(|(link, _)| link.long_term_rate()).sum();
        let share = used as f64 / (could * counted.as_secs_f64()).max(1.0);
        self.idle_looks = match share < IDLE_BELOW {
            true => self.idle_looks + 1,
            false => 0,
        };
        if self.idle_looks >= IDLE_LOOKS {
            self.idle_looks = 0;
            self.extra = (self.extra + 1).min(self.seats.len());
        } else if share > FULL_ABOVE {
            self.extra = self.extra.saturating_sub(1);
        }
    }

    /// Whether others go first: as many as go side by side move, or have just been let go.
    fn is_behind(
        &mut self,
        now: Time,
        number: u64,
        flows: &[ScheduledFlow],
        roster: &LinkAssignment,
    ) -> bool {
        let is_interactive = |client: &ClientState| client.is_interactive;
        if self.seats.len() < 2 || self.seats.get(&number).is_some_and(is_interactive) {
            return false;
        }
        let abreast = match self.scheduler.load(now, flows) >= PRESSED {
            true => 1,
            false => ABREAST,
        };
        let numbers: Vec<u64> = self.told().collect();
        let (mut going, mut asking) = (0, 0);
        for n in &roster.order {
            let Some(guest) = self.seats.get_mut(&numbers[*n]) else {
                continue;
            };
            if guest.is_interactive {
                continue;
            }
            // How much it is has to be asked before anything can be promised.
            let asks = flows[*n].need.remaining_bytes.is_none() && asking < ABREAST;
            asking += usize::from(asks);
            let goes = going < abreast + self.extra || asks;
            guest.goes_since = match goes {
                true => guest.goes_since.or(Some(now)),
                false => None,
            };
            let lately = |moment: &Time| now.since(*moment) < MOVES_WITHIN;
            let begins = guest.goes_since.as_ref().is_some_and(lately);
            let begins = begins && guest.told != Some(ClientPhase::Waits);
            going += usize::from(begins || lately(&guest.moved_at));
            if numbers[*n] == number {
                return !goes;
            }
        }
        false
    }
}

/// What is no link: this machine itself, and wherever its own routes lead.
fn is_here(name: &str) -> bool {
    matches!(name, "lo" | "any")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CostPolicy, DeadlineFallback, FlowDemand, LinkChoice, LinkWaitReason};

    fn way(name: &str, class: LinkClass) -> LinkCandidate {
        LinkCandidate {
            name: name.into(),
            class,
            rate_bytes_per_s: None,
            metric: 0,
            stalled: false,
            in_use: true,
        }
    }

    fn wifi() -> LinkCandidate {
        way("wlan0", LinkClass::Free)
    }

    fn cell() -> LinkCandidate {
        way("wwan0", LinkClass::Metered)
    }

    fn need(bytes: u64, left_s: u64) -> FlowDemand {
        FlowDemand {
            remaining_bytes: Some(bytes),
            left: Some(Duration::from_secs(left_s)),
            policy: CostPolicy::FreeFirst,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        }
    }

    /// A device, second by second.
    struct Device {
        lane: DirectionScheduler,
        now: Time,
        carried: BTreeMap<u64, BTreeMap<String, u64>>,
        is_interactive: bool,
    }

    impl Device {
        fn new() -> Device {
            Device {
                lane: DirectionScheduler::new(SchedulerMode::Forecast),
                now: Time::ZERO + Span::from_secs(1_000),
                carried: BTreeMap::new(),
                is_interactive: false,
            }
        }

        fn ask(
            &mut self,
            number: u64,
            need: &FlowDemand,
            ways: &[LinkCandidate],
        ) -> ClientDecision {
            let carried = self.carried.entry(number).or_default();
            let standing = ClientReport {
                demand: need.clone(),
                size_bytes: need.remaining_bytes,
                priority: 0,
                candidates: ways,
                carried,
                uses_several_links: true,
                always_pays: false,
                is_interactive: self.is_interactive,
                keeps_awake: true,
            };
            self.lane.decide(self.now, number, &standing)
        }

        fn carry(&mut self, number: u64, link: &str, bytes: u64) {
            let links = self.carried.entry(number).or_default();
            *links.entry(link.into()).or_default() += bytes;
        }

        fn wait(&mut self, seconds: u64) {
            self.now += Span::from_secs(seconds);
        }
    }

    fn waits(verdict: &ClientDecision) -> Option<LinkWaitReason> {
        match &verdict.choice {
            LinkChoice::Wait { reason, .. } => Some(*reason),
            LinkChoice::Use { .. } => None,
        }
    }

    #[test]
    fn with_a_free_link_hoped_for_nothing_is_paid_early_and_without_time_all_is() {
        let mut device = Device::new();
        let seat = device.lane.register(device.now, 0);
        let early = device.ask(seat, &need(1_000_000, 6 * 3_600), &[cell()]);
        assert!(early.pays_because.is_none(), "{early:?}");
        assert_eq!(waits(&early), Some(LinkWaitReason::PathCost));
        device.wait(1);
        let late = device.ask(seat, &need(50_000_000, 10), &[cell()]);
        assert!(late.pays_because.is_some(), "{late:?}");
        assert_eq!(waits(&late), None);
    }

    #[test]
    fn the_first_free_link_takes_the_place_of_the_one_hoped_for() {
        let mut device = Device::new();
        let seat = device.lane.register(device.now, 0);
        device.ask(seat, &need(1_000_000, 100), &[cell()]);
        assert_eq!(device.lane.names.len(), 2);
        device.ask(seat, &need(1_000_000, 100), &[cell(), wifi()]);
        assert_eq!(device.lane.names.len(), 2);
        assert_eq!(device.lane.names[0].as_deref(), Some("wlan0"));
        assert!(device.lane.scheduler.links()[0].carries());
    }

    #[test]
    fn what_came_in_a_moment_is_not_spread_over_the_second() {
        let mut device = Device::new();
        let (one, other) = (
            device.lane.register(device.now, 0),
            device.lane.register(device.now, 0),
        );
        let ask = |device: &mut Device| {
            for seat in [one, other] {
                device.ask(seat, &need(50_000_000, 6 * 3_600), &[cell()]);
            }
            let links = device.lane.scheduler.links();
            links.iter().find_map(|link| link.recent_rate())
        };
        ask(&mut device);
        device.wait(1);
        device.carry(one, "wwan0", 100_000);
        device
            .lane
            .record_busy_time(one, "wwan0", Span::from_millis(200));
        assert_eq!(ask(&mut device), Some(500_000.0));
        // Both at once, for longer than there was time.
        for second in 1..=30 {
            device.wait(1);
            for seat in [one, other] {
                device.carry(seat, "wwan0", 250_000);
                let busy = Span::from_millis(200 + second * 900);
                device.lane.record_busy_time(seat, "wwan0", busy);
            }
            ask(&mut device);
        }
        let rate = ask(&mut device).unwrap();
        assert!((495_000.0..510_000.0).contains(&rate), "{rate}");
        // Another session, which was as fast for half a second.
        let mut fresh = Device::new();
        let seat = fresh.lane.register(fresh.now, 0);
        fresh.ask(seat, &need(50_000_000, 6 * 3_600), &[cell()]);
        for busy_ms in [900, 500] {
            fresh.wait(1);
            fresh.carry(seat, "wwan0", busy_ms * 500);
            fresh
                .lane
                .record_busy_time(seat, "wwan0", Span::from_millis(busy_ms));
            fresh.ask(seat, &need(50_000_000, 6 * 3_600), &[cell()]);
            let links = fresh.lane.scheduler.links();
            let rate = links.iter().find_map(|link| link.recent_rate()).unwrap();
            assert!((rate - 500_000.0).abs() < 1.0, "{rate} after {busy_ms} ms");
        }
    }

    #[test]
    fn rates_are_those_of_all_transfers_together() {
        let mut device = Device::new();
        let (one, other) = (
            device.lane.register(device.now, 0),
            device.lane.register(device.now, 0),
        );
        for _ in 0..30 {
            device.wait(1);
            for seat in [one, other] {
                device.carry(seat, "wlan0", 500_000);
                device.ask(seat, &need(900_000_000, 6 * 3_600), &[wifi()]);
            }
        }
        let rate = device.lane.scheduler.links()[0].long_term_rate();
        assert!((900_000.0..1_100_000.0).contains(&rate), "{rate}");
    }

    #[test]
    fn a_link_that_carries_nothing_for_those_on_it_counts_as_away() {
        let mut device = Device::new();
        let seat = device.lane.register(device.now, 0);
        device.ask(seat, &need(1_000, 3_600), &[wifi()]);
        device.wait(1);
        let silent = LinkCandidate {
            stalled: true,
            ..wifi()
        };
        let verdict = device.ask(seat, &need(1_000, 3_600), std::slice::from_ref(&silent));
        assert!(!device.lane.scheduler.links()[0].is_up());
        // It is tried on all the same: there is nothing else.
        assert_eq!(waits(&verdict), None);
    }

    #[test]
    fn where_time_is_short_the_earliest_deadline_goes_alone_and_else_side_by_side() {
        let mut device = Device::new();
        let seats = [
            device.lane.register(device.now, 0),
            device.lane.register(device.now, 0),
        ];
        let mut held = [0, 0];
        for _ in 0..20 {
            device.wait(1);
            for (n, seat) in seats.into_iter().enumerate() {
                let left_s = [300, 100][n];
                if held[n] == 0 {
                    device.carry(seat, "wlan0", 1_000_000);
                }
                let need = need(80_000_000, left_s);
                let verdict = device.ask(seat, &need, &[wifi()]);
                held[n] = usize::from(waits(&verdict) == Some(LinkWaitReason::QueuedBehind));
            }
        }
        assert_eq!(held, [1, 0]);
        device.wait(1);
        let patient = need(1_000_000, 36_000);
        device.ask(seats[1], &patient, &[wifi()]);
        for seat in seats {
            let verdict = device.ask(seat, &patient, &[wifi()]);
            assert_eq!(waits(&verdict), None);
        }
    }

    #[test]
    fn room_that_the_first_leaves_goes_to_the_next_and_a_newcomer_is_asked_first() {
        let mut device = Device::new();
        let seats = [
            device.lane.register(device.now, 0),
            device.lane.register(device.now, 0),
        ];
        let step = |device: &mut Device, rate: u64| {
            device.wait(1);
            device.carry(seats[0], "wlan0", rate);
            device.ask(seats[0], &need(80_000_000, 90), &[wifi()]);
            device.ask(seats[1], &need(80_000_000, 100), &[wifi()])
        };
        for _ in 0..20 {
            assert_eq!(
                waits(&step(&mut device, 1_000_000)),
                Some(LinkWaitReason::QueuedBehind)
            );
        }
        // Its origin gets slow; one slow second is none.
        step(&mut device, 100_000);
        assert_eq!(
            waits(&step(&mut device, 1_000_000)),
            Some(LinkWaitReason::QueuedBehind)
        );
        for _ in 0..3 {
            step(&mut device, 100_000);
        }
        assert_eq!(waits(&step(&mut device, 100_000)), None);
        device.lane.register(device.now, 0);
        assert_eq!(device.lane.extra, 0);
    }

    #[test]
    fn when_the_first_ends_the_next_goes_alone_and_not_all_that_waited() {
        let mut device = Device::new();
        let seats = [0, 1, 2, 3].map(|_| device.lane.register(device.now, 0));
        let ask = |device: &mut Device, n: usize| {
            let need = need(8_000_000, 10 * (n as u64 + 1));
            waits(&device.ask(seats[n], &need, &[wifi()]))
        };
        for round in 0..10 {
            device.wait(1);
            device.carry(seats[0], "wlan0", 1_000_000);
            for n in [3, 2, 1, 0] {
                let behind = (n > 0).then_some(LinkWaitReason::QueuedBehind);
                let told = ask(&mut device, n);
                assert!(
                    round == 0 || told == behind,
                    "{n} in round {round}: {told:?}"
                );
            }
        }
        device.lane.unregister(seats[0]);
        // Whoever asks first: the second has not moved yet, but it is its turn.
        for n in [3, 2, 1] {
            let behind = (n > 1).then_some(LinkWaitReason::QueuedBehind);
            assert_eq!(ask(&mut device, n), behind);
        }
        // It never moves; so the third does.
        for _ in 0..6 {
            device.wait(1);
            for n in [3, 2, 1] {
                ask(&mut device, n);
            }
        }
        assert_eq!(ask(&mut device, 2), None);
    }

    #[test]
    fn how_large_it_is_is_asked_before_its_turn() {
        let mut device = Device::new();
        let (first, next) = (
            device.lane.register(device.now, 0),
            device.lane.register(device.now, 0),
        );
        let mut unknown = need(0, 100);
        unknown.remaining_bytes = None;
        for _ in 0..10 {
            device.wait(1);
            device.carry(first, "wlan0", 1_000_000);
            device.ask(first, &need(80_000_000, 90), &[wifi()]);
            assert_eq!(waits(&device.ask(next, &unknown, &[wifi()])), None);
        }
        let known = device.ask(next, &need(80_000_000, 100), &[wifi()]);
        assert_eq!(waits(&known), Some(LinkWaitReason::QueuedBehind));
    }

    #[test]
    fn one_that_does_not_move_lets_those_behind_it_go() {
        let mut device = Device::new();
        let (stuck, other) = (
            device.lane.register(device.now, 0),
            device.lane.register(device.now, 0),
        );
        for _ in 0..8 {
            device.wait(1);
            device.ask(stuck, &need(80_000_000, 90), &[wifi()]);
            device.ask(other, &need(80_000_000, 100), &[wifi()]);
        }
        let verdict = device.ask(other, &need(80_000_000, 100), &[wifi()]);
        assert_eq!(waits(&verdict), None);
    }

    fn around(devices: &[&str]) -> LinkSurroundings {
        let radio = |device: &&str| RadioStatus {
            device: (*device).to_owned(),
            slot: (*device).to_owned(),
            class: LinkClass::Free,
            carries: true,
            rate: None,
        };
        LinkSurroundings {
            radios: devices.iter().map(radio).collect(),
            ..LinkSurroundings::default()
        }
    }

    #[test]
    fn a_link_that_the_system_has_and_every_transfer_leaves_out_is_away() {
        let mut device = Device::new();
        device.lane.observe(device.now, &around(&["wlan0"]));
        assert!(device.lane.scheduler.links()[0].is_up());
        // It leads to a page to sign in: the transfer does not list it.
        let seat = device.lane.register(device.now, 0);
        device.wait(1);
        device.ask(seat, &need(1_000, 3_600), &[cell()]);
        assert!(!device.lane.scheduler.links()[0].is_up());
        // Another needs no link and says nothing of them.
        device.lane.unregister(seat);
        let seat = device.lane.register(device.now, 0);
        let here = LinkCandidate {
            name: "lo".into(),
            ..wifi()
        };
        device.wait(1);
        device.ask(seat, &need(1_000, 3_600), &[here]);
        assert!(device.lane.scheduler.links()[0].is_up());
    }

    #[test]
    fn who_waits_for_a_link_and_who_moves_are_told_apart() {
        let mut device = Device::new();
        let (waiting, moving) = (
            device.lane.register(device.now, 1),
            device.lane.register(device.now, 2),
        );
        let patient = FlowDemand {
            policy: CostPolicy::FreeOnly,
            ..need(1_000_000, 3_600)
        };
        device.ask(waiting, &patient, &[cell()]);
        device.ask(moving, &patient, &[wifi(), cell()]);
        let waits = device.lane.waking_clients(device.now);
        assert_eq!((waits.waiting, waits.running), (vec![1], vec![2]));
        // One that brings nothing for a while keeps nobody awake.
        device.wait(60);
        let waits = device.lane.waking_clients(device.now);
        assert_eq!((waits.waiting, waits.running), (vec![1, 2], vec![]));
        // Who may pay must begin at some time, who may not never.
        assert_eq!(device.lane.latest_start(device.now), None);
        // (One of 2 MB and more would measure the link first, and so not wait.)
        device.ask(waiting, &need(1_000_000, 6 * 3_600), &[cell()]);
        let start = device.lane.latest_start(device.now).expect("it may pay");
        assert!(start < Duration::from_secs(6 * 3_600), "{start:?}");
    }

    #[test]
    fn what_the_device_may_spend_binds_every_transfer() {
        let mut device = Device::new();
        let seat = device.lane.register(device.now, 0);
        device.lane.set_metered_limit(Some(0));
        let verdict = device.ask(seat, &need(50_000_000, 10), &[cell()]);
        assert!(verdict.pays_because.is_none());
        assert_eq!(waits(&verdict), Some(LinkWaitReason::OverBudget));
        device.lane.set_metered_limit(None);
        let verdict = device.ask(seat, &need(50_000_000, 10), &[cell()]);
        assert!(verdict.pays_because.is_some());
    }

    #[test]
    fn a_pause_of_a_program_does_not_make_a_link_slow() {
        let mut device = Device::new();
        device.is_interactive = true;
        let ways = [
            LinkCandidate {
                rate_bytes_per_s: Some(1e6),
                ..wifi()
            },
            LinkCandidate {
                rate_bytes_per_s: Some(1e6),
                ..cell()
            },
        ];
        let client = device.lane.register(device.now, 0);
        let pays = |device: &mut Device| {
            let decision = device.ask(client, &need(30_000_000, 60), &ways);
            decision.pays_because.is_some()
        };
        assert!(!pays(&mut device), "the session's word is taken");
        device.wait(3_600);
        device.carry(client, "wlan0", 1_000_000);
        assert!(!pays(&mut device));
        // Nor do a few bytes a moment after a report, or what a person types.
        device.carry(client, "wlan0", 60);
        device.now += Span::from_millis(1);
        assert!(!pays(&mut device));
        for second in 1..60 {
            device.wait(1);
            if second % 10 != 0 {
                device.carry(client, "wlan0", 500);
            }
            assert!(!pays(&mut device), "after {second} s");
        }
        // A link that carries little without a pause is slow.
        let mut paid = false;
        for _ in 0..120 {
            device.wait(1);
            device.carry(client, "wlan0", 1_000);
            paid = pays(&mut device);
        }
        assert!(paid);
    }

    #[test]
    fn connections_of_programs_are_never_behind_and_hold_nobody_back() {
        let mut device = Device::new();
        device.is_interactive = true;
        let connections: Vec<u64> = (0..20)
            .map(|n| device.lane.register(device.now, n))
            .collect();
        let transfer = device.lane.register(device.now, 99);
        for _ in 0..10 {
            device.wait(1);
            device.is_interactive = true;
            for connection in &connections {
                device.carry(*connection, "wlan0", 100_000);
                let decision = device.ask(*connection, &need(80_000_000, 90), &[wifi()]);
                assert_eq!(waits(&decision), None);
            }
            device.is_interactive = false;
            let decision = device.ask(transfer, &need(80_000_000, 100), &[wifi()]);
            assert_eq!(waits(&decision), None);
        }
    }

    #[test]
    fn a_program_may_use_a_link_that_costs_from_the_moment_it_is_up() {
        let mut device = Device::new();
        let client = device.lane.register(device.now, 0);
        let fast = FlowDemand {
            policy: CostPolicy::Fast,
            ..need(1_000, 3_600)
        };
        assert_eq!(device.ask(client, &fast, &[]).grant, Grant::None);
        device.is_interactive = true;
        let spends = Grant::Spend { up_to: None };
        assert_eq!(device.ask(client, &fast, &[]).grant, spends);
        let patient = FlowDemand {
            policy: CostPolicy::FreeOnly,
            ..fast.clone()
        };
        assert_eq!(device.ask(client, &patient, &[]).grant, Grant::None);
        let broke = FlowDemand {
            metered_bytes_left: Some(0),
            ..fast
        };
        assert_eq!(device.ask(client, &broke, &[]).grant, Grant::None);
    }

    #[test]
    fn who_has_no_budget_left_lacks_it_only_where_links_that_cost_would_carry_it() {
        let mut device = Device::new();
        let client = device.lane.register(device.now, 0);
        let mut lacks = |policy, left| {
            let demand = FlowDemand {
                policy,
                metered_bytes_left: left,
                ..need(50_000_000, 10)
            };
            device.ask(client, &demand, &[cell()]).lacks_budget
        };
        assert!(lacks(CostPolicy::Fast, Some(0)));
        assert!(lacks(CostPolicy::FreeFirst, Some(0)));
        assert!(!lacks(CostPolicy::FreeOnly, Some(0)));
        assert!(!lacks(CostPolicy::Fast, Some(1)));
        assert!(!lacks(CostPolicy::Fast, None));
    }
}
