//! The links of one direction: their histories in the scheduler, the networks behind them, and
//! their traffic.
//!
//! ```text
//!  names      None    wlan0    wwan0        None: the expected free link
//!  scheduler   ·        ·        ·          a history each, in the same order
//!  pending     ·        ·        ·          carried since the last epoch
//! ```

use std::collections::BTreeMap;

use d2tp_time::{Span, Time};

use super::super::rate_measurement::MEASURED_BYTES_MIN;
use super::super::{KnownLink, LinkSurroundings};
use super::client_state::ClientState;
use super::slow_free_links::{EpochTraffic, SlowFreeLinks};
use crate::{
    ForecastHint, LinkCandidate, LinkClass, LinkHistory, LinkObservation, NetworkRates,
    SavedHistory, Scheduler, SchedulerMode,
};

/// The shortest time over which carried bytes are turned into a rate.
pub(super) const COUNTED_AFTER: Span = Span::from_millis(900); // a little less than an epoch

/// The shortest busy time that is counted: sessions report it in steps of this.
const BUSY_MIN: Span = Span::from_millis(100); // the driver's tick

/// Networks whose rates are remembered; when there are more, the one used longest ago is dropped.
const NETWORKS_MAX: usize = 256;

/// The key for the history of a radio that has no device yet.
const HOPED_FOR: &str = "Wi-Fi";

/// Bytes that a link carried, and for how long. The time may exceed the elapsed time if several
/// clients shared the link.
#[derive(Debug, Clone, Copy, Default)]
struct PendingTraffic {
    bytes: u64,
    busy: Span,
    /// The longest of the measurements that are summed up here.
    longest: Span,
    /// Whether a client had more for the link than the link carried.
    is_loaded: bool,
}

impl PendingTraffic {
    /// Whether the traffic shows the rate of the link. If servers were too slow for it, it shows
    /// only that the link is no slower than that, or that it works.
    fn measures(&self, link: &LinkHistory, busy: Span) -> bool {
        let rate = self.bytes as f64 / busy.as_secs_f64();
        self.is_loaded || !link.carries() || rate >= link.best_known_rate()
    }
}

/// The links in one direction.
#[derive(Debug)]
pub(super) struct LinkTable {
    pub(super) scheduler: Scheduler,
    /// The devices of the scheduler's links; `None` for a link that is only expected.
    pub(super) names: Vec<Option<String>>,
    /// The network behind each link, if known.
    networks: Vec<Option<String>>,
    around: LinkSurroundings,
    /// Saved histories of radios that have no device yet.
    pasts: BTreeMap<String, SavedHistory>,
    /// Rates of networks that no link is on at present, with a counter of their last use.
    rates: BTreeMap<String, (u64, NetworkRates)>,
    met: u64,
    /// Traffic since the last update, for each link.
    pending: Vec<PendingTraffic>,
    up: Vec<bool>,
    /// Whether a link's rate is that of a session: nothing that it carried has measured it yet.
    assumed: Vec<bool>,
    counted_at: Option<Time>,
    slow_free: SlowFreeLinks,
    /// Whether some client uses metered links beside free ones that are too slow.
    pub(super) pays_if_free_is_slow: bool,
}

impl LinkTable {
    /// The links of a device that has none yet, with one free link that is expected.
    pub(super) fn new(mode: SchedulerMode) -> LinkTable {
        LinkTable {
            scheduler: Scheduler::new(mode, [LinkClass::Free]),
            names: vec![None],
            networks: vec![None],
            around: LinkSurroundings::default(),
            pasts: BTreeMap::new(),
            rates: BTreeMap::new(),
            met: 0,
            pending: vec![PendingTraffic::default()],
            up: vec![false],
            assumed: vec![false],
            counted_at: None,
            slow_free: SlowFreeLinks::default(),
            pays_if_free_is_slow: false,
        }
    }

    /// The rate of the free links, in bytes per second, while they are too slow for the policy `any`.
    pub(super) fn slow_free_rate(&self) -> Option<f64> {
        self.slow_free.rate()
    }

    /// Handles the links and networks around the device.
    pub(super) fn set_surroundings(&mut self, now: Time, around: &LinkSurroundings) {
        self.around = around.clone();
        for radio in &around.links {
            self.know(now, &radio.device, radio.class);
        }
    }

    /// Restores the history of links and networks.
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

    /// The history of links and networks to be saved.
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

    /// Sets the forecast for a link at the current place and time.
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

    /// The status of all links.
    pub(super) fn known_links(&self) -> Vec<KnownLink> {
        let links = self.names.iter().zip(self.scheduler.links());
        let radio = |(name, link): (&Option<String>, &LinkHistory)| {
            let name = name.as_ref().filter(|name| !is_here(name))?;
            Some(KnownLink {
                device: name.clone(),
                slot: self.around.slot(name),
                class: link.class(),
                carries: link.carries(),
                rate: (link.confidence() > 0.0).then(|| link.long_term_rate()),
            })
        };
        links.filter_map(radio).collect()
    }

    /// The probability that a free link comes back within a span.
    pub(super) fn free_link_chance(&self, now: Time, span: Span) -> f64 {
        let away = self.scheduler.links().iter();
        let away = away.filter(|link| link.class() == LinkClass::Free && !link.carries());
        let none = away.map(|link| 1.0 - link.returns_within(now, span));
        1.0 - none.product::<f64>()
    }

    pub(super) fn link_rate(&self, name: &str) -> Option<(f64, bool)> {
        let place = self.names.iter().position(|n| n.as_deref() == Some(name))?;
        let link = &self.scheduler.links()[place];
        (link.confidence() > 0.0).then(|| (link.long_term_rate(), link.carries()))
    }

    /// The names of the links as shown to users.
    pub(super) fn shown(&self) -> Vec<&str> {
        let hoped_for = "a free network";
        let names = self.names.iter().map(Option::as_deref);
        names.map(|name| name.unwrap_or(hoped_for)).collect()
    }

    /// Whether the cap of a device's network is used up.
    pub(super) fn is_capped(&self, device: &str) -> bool {
        self.around.capped.contains(device)
    }

    /// Adds what a link carried, and for how long.
    pub(super) fn add_carried(&mut self, name: &str, bytes: u64, busy: Span) {
        if let Some(pending) = self.pending_of(name) {
            pending.bytes += bytes;
            pending.busy = pending.busy + busy;
        }
    }

    /// Records that a client had more for a link than the link carried.
    pub(super) fn mark_loaded(&mut self, name: &str) {
        if let Some(pending) = self.pending_of(name) {
            pending.is_loaded = true;
        }
    }

    /// Adds a measurement of a link, which may have taken longer than an epoch.
    pub(super) fn add_measured(&mut self, name: &str, bytes: u64, took: Span) {
        self.add_carried(name, bytes, took);
        if let Some(pending) = self.pending_of(name) {
            pending.longest = pending.longest.max(took);
        }
    }

    fn pending_of(&mut self, name: &str) -> Option<&mut PendingTraffic> {
        let link = self.names.iter().position(|n| n.as_deref() == Some(name))?;
        self.pending.get_mut(link)
    }

    /// Assumes a session's rate for a link that was never measured: the highest so far, because a
    /// session that carried little, like a first request, had no higher rate.
    pub(super) fn assume_rate(&mut self, now: Time, candidate: &LinkCandidate) {
        let is_it = |name: &Option<String>| name.as_ref() == Some(&candidate.name);
        let Some(link) = self.names.iter().position(is_it) else {
            return;
        };
        let before = &self.scheduler.links()[link];
        let is_measured = before.confidence() > 0.0 && !self.assumed[link];
        let rate = candidate.rate_bytes_per_s.unwrap_or(0.0) as u64;
        let is_higher = !self.assumed[link] || rate as f64 > before.long_term_rate();
        if is_measured || rate < MEASURED_BYTES_MIN || !is_higher {
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
        self.assumed[link] = true;
    }

    /// Adds a link, or updates its cost class and its network.
    pub(super) fn know(&mut self, now: Time, device: &str, class: LinkClass) {
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
                self.assumed.push(false);
                self.scheduler.add_link(class)
            }
        };
        if let Some(past) = past {
            let history = LinkHistory::recall(now, class, &past);
            self.scheduler.restore_history(link, history);
        }
        link
    }

    /// Records that a link is on another network, which has its own rate.
    fn meet(&mut self, link: usize, network: Option<String>) {
        let known = network
            .as_ref()
            .and_then(|network| self.rates.remove(network));
        let rates = known.map(|(_, rates)| rates).unwrap_or_default();
        let was_used = self.scheduler.links()[link].confidence() > 0.0;
        let named = self.networks[link].take();
        if named.is_none() && was_used && known.is_none() {
            // The link was used before its network was known.
            self.networks[link] = network;
            return;
        }
        let before = self.scheduler.switch_network(link, rates);
        self.assumed[link] = false;
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

    /// Updates the scheduler when a link came or went, and once per epoch. Returns, once per epoch, the
    /// share of the links' capacity that was used.
    pub(super) fn see(&mut self, now: Time, clients: &BTreeMap<u64, ClientState>) -> Option<f64> {
        // A client that uses only this machine says nothing about links.
        let last_phase = |client: &&ClientState| {
            let mut links = client.links.iter().map(|(link, _)| &**link);
            client.flow.is_some() && (client.links.is_empty() || links.any(|link| !is_here(link)))
        };
        let is_awaited = clients.values().any(|client| last_phase(&client));
        let works = |name: &Option<String>| {
            let Some(name) = name else {
                return false;
            };
            if !is_awaited && !is_here(name) {
                // No client uses links, so the system's view counts, where it is known.
                return self.around.links.iter().any(|radio| radio.device == *name);
            }
            // A link that no transfer lists leads nowhere, even if the system considers it up.
            let works_for = |client: &ClientState| {
                let mut links = client.links.iter();
                links
                    .find(|(link, _)| link == name)
                    .map(|(_, works)| *works)
            };
            let is_silent = clients
                .values()
                .any(|client| works_for(client) == Some(false));
            // A client that sends nothing does not notice that a link died. If one client noticed,
            // its report counts, unless the link carries for another client.
            let mut works = clients
                .values()
                .filter(|client| works_for(client) == Some(true));
            works.any(|client| !is_silent || client.moved_lately(now, name))
        };
        let up: Vec<bool> = self.names.iter().map(works).collect();
        let counted = now.since(*self.counted_at.get_or_insert(now));
        let is_time = counted >= COUNTED_AFTER;
        if !is_time && up == self.up {
            return None;
        }
        let links = self.scheduler.links().iter().zip(&self.pending);
        let observations: Vec<LinkObservation> = up
            .iter()
            .zip(links)
            .map(|(up, (link, pending))| {
                let busy = pending.busy.max(BUSY_MIN).min(counted.max(pending.longest));
                match is_time && pending.bytes > 0 && pending.measures(link, busy) {
                    true => LinkObservation {
                        up: *up,
                        bytes: pending.bytes,
                        busy,
                    },
                    false => LinkObservation {
                        up: *up,
                        ..LinkObservation::default()
                    },
                }
            })
            .collect();
        self.scheduler.observe(now, &observations);
        for (assumed, observation) in self.assumed.iter_mut().zip(&observations) {
            *assumed &= observation.bytes == 0;
        }
        self.up = up;
        if !is_time {
            return None;
        }
        let used = self.used_share(counted);
        match self.pays_if_free_is_slow {
            true => self.slow_free.observe(now, &self.epoch_traffic(counted)),
            false => self.slow_free = SlowFreeLinks::default(),
        }
        self.counted_at = Some(now);
        self.pending.fill(PendingTraffic::default());
        Some(used)
    }

    /// The links' traffic and rates in the epoch that ends now.
    fn epoch_traffic(&self, counted: Span) -> EpochTraffic {
        let of = |class: LinkClass| {
            let links = self.scheduler.links().iter();
            links.filter(move |link| link.class() == class && link.carries())
        };
        let free: Vec<f64> = of(LinkClass::Free)
            .filter_map(LinkHistory::recent_rate)
            .collect();
        let metered: Vec<f64> = of(LinkClass::Metered)
            .map(LinkHistory::long_term_rate)
            .collect();
        EpochTraffic {
            length: counted,
            bytes: self.pending.iter().map(|pending| pending.bytes).sum(),
            free_rate: (!free.is_empty()).then(|| free.iter().sum()),
            metered_rate: (!metered.is_empty()).then(|| metered.iter().sum()),
        }
    }

    /// The share of the capacity of the links in use that was used.
    fn used_share(&self, counted: Span) -> f64 {
        let used: u64 = self.pending.iter().map(|pending| pending.bytes).sum();
        let links = self.scheduler.links().iter().zip(&self.pending);
        let in_use = links.filter(|(link, pending)| {
            link.carries() && (link.class() == LinkClass::Free || pending.bytes > 0)
        });
        let could: f64 = in_use.map(|(link, _)| link.long_term_rate()).sum();
        used as f64 / (could * counted.as_secs_f64()).max(1.0)
    }
}

/// Whether a name stands for this machine or for the system's routes, not for a link.
fn is_here(name: &str) -> bool {
    matches!(name, "lo" | "any")
}
