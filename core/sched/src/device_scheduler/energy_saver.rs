//! The energy decision for all clients of a device: which links rest, and whether a client waits for a
//! link that needs less energy.
//!
//! ```text
//!  decision of the scheduler: free links, and metered ones that it granted
//!        │ a client that does not save energy runs? ─────────────────▶ nothing rests
//!        │ the links up need twice the energy of one that is away,
//!        │ which will probably be enough, and there is time? ────────▶ wait, nothing is sent
//!        ▼
//!  EnergyPolicy ─▶ the others rest, if those that stay are surely in time for every client
//! ```
//!
//! It only takes away: what rests is a link that the scheduler allowed. A deadline goes before energy.
//! All clients share the links, so a radio that is awake for one of them is used by all.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use d2tp_time::{Span, Time};

use super::direction_scheduler::DirectionScheduler;
use super::{ClientDecision, ClientId, ClientReport, Grant};
use crate::energy_policy::{EnergyPolicy, LinkSample, RadioPowerModel};
use crate::energy_saving::{EnergySaving, PowerSource};
use crate::link_choice::{
    FREE_RATE_FIRST_BYTES_PER_S, LinkCandidate, LinkChoice, LinkClass, LinkWaitReason,
    METERED_RATE_FIRST_BYTES_PER_S, format_duration,
};

/// A link is used if its bits per joule are at least this share of the mean. Lower: faster, and more
/// energy.
pub(super) const SHARE: f64 = 0.8; // chosen over 0.7, 0.9 and 1 on other walks than those of `cedos repro M2`

/// The shortest time between two decisions while the links stay the same: clients report each second.
const DECIDE_AFTER: Span = Span::from_millis(450); // just below the policy's interval

/// How often a client reports that has several links to choose from.
const LOOK_EVERY: Duration = Duration::from_secs(1); // as beside a metered link

/// How long after its last report a client counts as using links.
const REPORTED_WITHIN: Span = Span::from_secs(5); // a guess: several reports

/// The probability of being in time from which links may rest, and the one below which they are all
/// used again. Higher: less energy is saved, and fewer deadlines are missed for it.
const SURE: f64 = 0.95; // a guess: it is decided again each second
const UNSURE: f64 = 0.9; // a guess
/// The probability that a link which needs less energy carries all in time, from which it is waited for.
/// Higher: fewer waits in vain.
const LIKELY: f64 = 0.5; // a guess
/// The probability that all links are enough in a share of the time left, from which a client may wait.
/// Higher, and a smaller share: fewer deadlines are missed for a wait.
const SURE_TO_WAIT: f64 = 0.99; // a guess: one of the 128 scenarios of a forecast may fail
const LATER_SHARE: f64 = 0.5; // a guess

/// How many times the bits per joule of the links that are up another link must promise to be waited
/// for. Lower: more waits for smaller gains.
const WORTH_WAITING: f64 = 2.0; // a guess

/// The step of the search for the end of a wait: each step keeps this share of the time left.
const WAIT_STEP: f64 = 0.8; // a guess
/// How long a link that rested takes at most until it carries something. Who has less time left does not wait.
const START_MAX: Duration = Duration::from_secs(15); // a guess: attaching to a cell, and a handshake that is repeated

/// The energy decision of a device.
#[derive(Debug)]
pub(super) struct EnergySaver {
    saving: EnergySaving,
    power: PowerSource,
    /// The power of each link's radio, by the name of its device.
    radios: BTreeMap<String, RadioPowerModel>,
    /// The power of the radio of a free link that the device has not seen yet.
    expected: Option<RadioPowerModel>,
    policy: EnergyPolicy,
    links: Vec<SaverLink>,
    clients: BTreeMap<ClientId, ClientEnergy>,
    decided_at: Option<Time>,
}

/// A link in the policy's list.
#[derive(Debug)]
struct SaverLink {
    name: String,
    sample: LinkSample,
    network: Option<String>,
    is_used: bool,
}

/// What a client said last, as far as energy is concerned.
#[derive(Debug, Default)]
struct ClientEnergy {
    /// The client's own choice in place of the device's.
    own: Option<EnergySaving>,
    reported_at: Time,
    /// The links that the client may use.
    options: BTreeSet<String>,
    /// Whether the client needs all links that it may use.
    refuses: bool,
    /// The links whose rest would make it late.
    needed: BTreeSet<String>,
    /// Whether the client began on links that it did not want to use, since it could wait no
    /// longer.
    has_begun: bool,
}

impl EnergySaver {
    pub(super) fn new() -> EnergySaver {
        EnergySaver {
            saving: EnergySaving::default(),
            power: PowerSource::default(),
            radios: BTreeMap::new(),
            expected: None,
            policy: EnergyPolicy::new(SHARE, []),
            links: Vec::new(),
            clients: BTreeMap::new(),
            decided_at: None,
        }
    }

    pub(super) fn set_saving(&mut self, saving: EnergySaving) {
        self.saving = saving;
    }

    pub(super) fn saving(&self) -> EnergySaving {
        self.saving
    }

    pub(super) fn set_power(&mut self, power: PowerSource) {
        self.power = power;
    }

    pub(super) fn power(&self) -> PowerSource {
        self.power
    }

    /// Sets the power of the links' radios, and of that of a free link that is expected. Links that are
    /// away keep theirs.
    pub(super) fn set_radios(
        &mut self,
        radios: BTreeMap<String, RadioPowerModel>,
        expected: Option<RadioPowerModel>,
    ) {
        self.expected = expected;
        for (name, draw) in radios {
            match self.links.iter().position(|link| link.name == name) {
                Some(n) => self.policy.set_draw(n, draw),
                None => self.add_link(&name, draw),
            }
            self.radios.insert(name, draw);
        }
    }

    fn add_link(&mut self, name: &str, draw: RadioPowerModel) {
        // What is free is Wi-Fi most of the time; the first measurement replaces the assumption.
        self.policy
            .add_link(draw, 8.0 * FREE_RATE_FIRST_BYTES_PER_S);
        self.links.push(SaverLink {
            name: name.to_owned(),
            sample: LinkSample::default(),
            network: None,
            is_used: true,
        });
    }

    /// Takes in the network behind each link: another one is another attachment.
    pub(super) fn set_networks(&mut self, networks: &BTreeMap<String, String>) {
        for link in &mut self.links {
            let network = networks.get(&link.name);
            if network.is_some() && link.network.as_ref() != network {
                link.sample.attachment += u64::from(link.network.is_some());
                link.network = network.cloned();
            }
        }
    }

    pub(super) fn set_own(&mut self, client: ClientId, own: Option<EnergySaving>) {
        self.clients.entry(client).or_default().own = own;
    }

    pub(super) fn leave(&mut self, client: ClientId) {
        self.clients.remove(&client);
    }

    /// Takes from a decision what the client does not need. Returns the time until a client that waits
    /// for energy will begin.
    pub(super) fn apply(
        &mut self,
        now: Time,
        client: ClientId,
        report: &ClientReport,
        decision: &mut ClientDecision,
        directions: &[DirectionScheduler; 2],
    ) -> Option<Duration> {
        let direction = &directions[client.direction as usize];
        let pays = matches!(decision.grant, Grant::Spend { .. });
        let may_use = |link: &&LinkCandidate| {
            let is_allowed = match link.class {
                LinkClass::Free => true,
                LinkClass::Metered => pays || report.always_pays,
                LinkClass::Roaming => false,
            };
            is_allowed && !link.stalled && self.radios.contains_key(&link.name)
        };
        let options: Vec<&LinkCandidate> = report.candidates.iter().filter(may_use).collect();
        let names: BTreeSet<String> = options.iter().map(|link| link.name.clone()).collect();
        // A link whose radio is not known carries at no cost that could be counted.
        let is_modelled = |link: &LinkCandidate| {
            link.stalled || link.class != LinkClass::Free || names.contains(&link.name)
        };
        let all_modelled = report.candidates.iter().all(is_modelled);
        let runs = matches!(decision.choice, LinkChoice::Use { .. }) && !names.is_empty();
        let state = self.clients.entry(client).or_default();
        state.reported_at = now;
        let saving = state.own.unwrap_or(self.saving);
        let saves = saving.is_active(self.power, report.demand.left) && !report.always_pays;
        state.options = if runs { names } else { BTreeSet::new() };
        state.refuses = runs && !saves;
        if !runs || !saves {
            state.needed.clear();
            self.decide(now, directions);
            return None;
        }
        if all_modelled && let Some(wait) = self.wait(now, client, report, &options, direction) {
            let begins = wait.begins_in;
            self.clients.entry(client).or_default().options.clear();
            self.decide(now, directions);
            decision.grant = Grant::None;
            decision.pays_because = None;
            decision.recheck_after = Some(begins.min(Duration::from_secs(10)));
            decision.resting = report.candidates.iter().map(|l| l.name.clone()).collect();
            decision.choice = LinkChoice::Wait {
                reason: LinkWaitReason::SavesEnergy,
                why: wait.why,
                unblocks: wait.unblocks,
            };
            return Some(begins);
        }
        self.decide(now, directions);
        if options.len() > 1 {
            let again = decision
                .recheck_after
                .map_or(LOOK_EVERY, |again| again.min(LOOK_EVERY));
            decision.recheck_after = Some(again);
        }
        let resting = match report.uses_several_links {
            true => self.resting(now, &options),
            false => self.all_but_the_best(now, &options, direction),
        };
        let resting = self.guard(now, client, report, resting, direction);
        if resting.is_empty() {
            return None;
        }
        self.take_away(&resting, &options, report, decision);
        None
    }

    /// Lets the policy decide, if it is time or the links changed.
    fn decide(&mut self, now: Time, directions: &[DirectionScheduler; 2]) {
        let live = |client: &&ClientEnergy| now.since(client.reported_at) < REPORTED_WITHIN;
        let clients = || self.clients.values().filter(live);
        let up: BTreeSet<&String> = clients().flat_map(|client| &client.options).collect();
        let is_refused = clients().any(|client| client.refuses);
        let changed = (self.links.iter()).any(|l| l.sample.up != up.contains(&l.name));
        let is_due = (self.decided_at).is_none_or(|at| now.since(at) >= DECIDE_AFTER);
        if !changed && !is_due {
            return;
        }
        self.decided_at = Some(now);
        for link in &mut self.links {
            let is_up = up.contains(&link.name);
            link.sample.attachment += u64::from(is_up && !link.sample.up);
            link.sample.up = is_up;
            link.sample.bytes = directions.iter().map(|d| d.carried(&link.name)).sum();
        }
        let samples: Vec<LinkSample> = self.links.iter().map(|link| link.sample).collect();
        let used = match is_refused {
            true => self.policy.use_all(now, &samples),
            false => self.policy.pick(now, &samples),
        };
        for (link, used) in self.links.iter_mut().zip(used) {
            link.is_used = used;
        }
    }

    /// The client's links that the policy leaves, unless some client needs all.
    fn resting(&self, now: Time, options: &[&LinkCandidate]) -> BTreeSet<String> {
        let live = |client: &&ClientEnergy| now.since(client.reported_at) < REPORTED_WITHIN;
        if self.clients.values().filter(live).any(|c| c.refuses) {
            return BTreeSet::new();
        }
        let rests = |name: &&String| {
            (self.links.iter()).any(|link| link.name == **name && link.sample.up && !link.is_used)
        };
        let names = options.iter().map(|link| &link.name);
        names.filter(rests).cloned().collect()
    }

    /// All links but the one with the most bits per joule, for a client that uses one at a time.
    fn all_but_the_best(
        &self,
        now: Time,
        options: &[&LinkCandidate],
        direction: &DirectionScheduler,
    ) -> BTreeSet<String> {
        let live = |client: &&ClientEnergy| now.since(client.reported_at) < REPORTED_WITHIN;
        if self.clients.values().filter(live).any(|c| c.refuses) {
            return BTreeSet::new();
        }
        let worth = |link: &LinkCandidate| {
            // A switch interrupts the client, so the link in use stays unless another is clearly better.
            let stay = if link.in_use { 1.2 } else { 1.0 };
            stay * self.worth(
                Some(&link.name),
                direction.known_rate(&link.name),
                link.class,
            )
        };
        let best = (options.iter()).max_by(|a, b| worth(a).total_cmp(&worth(b)));
        let others = options
            .iter()
            .filter(|link| best.is_some_and(|b| b.name != link.name));
        others.map(|link| link.name.clone()).collect()
    }

    /// Bits per joule of a link at a rate in bytes per second; `None` is a free link that is expected.
    /// Infinite if the radio is not known.
    fn worth(&self, name: Option<&str>, rate: Option<f64>, class: LinkClass) -> f64 {
        let draw = match name {
            Some(name) => self.radios.get(name),
            None => self.expected.as_ref(),
        };
        let rate = rate.unwrap_or(match class {
            LinkClass::Free => FREE_RATE_FIRST_BYTES_PER_S,
            LinkClass::Metered | LinkClass::Roaming => METERED_RATE_FIRST_BYTES_PER_S,
        });
        draw.map_or(f64::INFINITY, |draw| draw.bits_per_joule(8.0 * rate))
    }

    /// Which of the links that would rest can do so without making the client miss its deadline.
    fn guard(
        &mut self,
        now: Time,
        client: ClientId,
        report: &ClientReport,
        resting: BTreeSet<String>,
        direction: &DirectionScheduler,
    ) -> BTreeSet<String> {
        let state = self.clients.entry(client).or_default();
        state.needed = &state.needed & &state.options;
        let (asked, bar) = match state.needed.is_empty() {
            true => (&resting, UNSURE),
            false => (&state.needed, SURE),
        };
        let Some(left) = report.demand.left.filter(|_| !asked.is_empty()) else {
            return resting;
        };
        let stays = |name: Option<&str>| {
            name.is_some_and(|name| state.options.contains(name) && !asked.contains(name))
        };
        let odds = direction.odds_over(now, client.number, left.as_secs_f64(), &stays);
        if odds >= bar {
            state.needed.clear();
            return resting;
        }
        if state.needed.is_empty() {
            state.needed = resting;
        }
        state.refuses = true;
        BTreeSet::new()
    }

    /// Takes resting links from a decision.
    fn take_away(
        &self,
        resting: &BTreeSet<String>,
        options: &[&LinkCandidate],
        report: &ClientReport,
        decision: &mut ClientDecision,
    ) {
        let rests = |link: &LinkCandidate| resting.contains(&link.name);
        let metered = || {
            options
                .iter()
                .filter(|link| link.class == LinkClass::Metered)
        };
        if metered().next().is_some() && metered().all(|link| rests(link)) {
            decision.grant = Grant::None;
            decision.pays_because = None;
        }
        let names: Vec<&str> = resting.iter().map(String::as_str).collect();
        let verb = if names.len() == 1 { "rests" } else { "rest" };
        let saved = format!(
            "{} {verb} to save energy ({})",
            names.join(" and "),
            self.power
        );
        if let LinkChoice::Use { index, why } = &mut decision.choice {
            let chosen = &report.candidates[*index];
            if rests(chosen) {
                let by = |link: &LinkCandidate| report.candidates.iter().position(|c| c == link);
                let kept = options.iter().find(|link| !rests(link)).and_then(|l| by(l));
                let Some(kept) = kept else {
                    return;
                };
                *index = kept;
                *why = format!("{} needs the least energy", report.candidates[kept].name);
            }
            *why = format!("{why}; {saved}");
        }
        decision.resting.clone_from(resting);
    }

    /// Whether a client waits for a link that needs less energy.
    fn wait(
        &mut self,
        now: Time,
        client: ClientId,
        report: &ClientReport,
        options: &[&LinkCandidate],
        direction: &DirectionScheduler,
    ) -> Option<EnergyWait> {
        let left = report.demand.left.filter(|_| !report.is_interactive)?;
        let worth = |link: &&LinkCandidate| {
            self.worth(
                Some(&link.name),
                direction.known_rate(&link.name),
                link.class,
            )
        };
        let best = options.iter().map(worth).fold(0.0, f64::max);
        let known = direction.free_links();
        let is_frugal = |(name, rate): &(Option<&str>, f64)| {
            let worth = self.worth(*name, Some(*rate), LinkClass::Free);
            worth.is_finite() && worth >= WORTH_WAITING * best
        };
        let frugal: BTreeSet<Option<&str>> = known
            .into_iter()
            .filter(is_frugal)
            .map(|(name, _)| name)
            .collect();
        let is_live = |(id, c): &(&ClientId, &ClientEnergy)| {
            **id != client && c.refuses && now.since(c.reported_at) < REPORTED_WITHIN
        };
        let is_awake_anyway = self.clients.iter().any(|c| is_live(&c));
        let state = self.clients.entry(client).or_default();
        if frugal.is_empty() {
            state.has_begun = false;
            return None;
        }
        let is_sized = report.demand.remaining_bytes.is_some();
        if state.has_begun || is_awake_anyway || !is_sized {
            return None;
        }
        let odds = |left_s: f64, is_used: &dyn Fn(Option<&str>) -> bool| {
            direction.odds_over(now, client.number, left_s, is_used)
        };
        let is_frugal = |name: Option<&str>| frugal.contains(&name);
        let is_any = |name: Option<&str>| {
            is_frugal(name) || options.iter().any(|link| name == Some(&*link.name))
        };
        // What is up now must be enough later, and what is awaited is likely to be.
        let may_wait = |left: Duration| {
            // Until a link that rested carries something.
            let left_s = left.saturating_sub(START_MAX).as_secs_f64();
            odds(left_s, &is_frugal) >= LIKELY
                && odds(left_s * LATER_SHARE, &is_any) >= SURE_TO_WAIT
        };
        if left <= START_MAX || !may_wait(left) {
            state.has_begun = true;
            return None;
        }
        let mut still = left;
        while still > START_MAX && may_wait(still) {
            still = still.mul_f64(WAIT_STEP);
        }
        let begins_in = left - still;
        let names = |all: Vec<&str>| all.join(" and ");
        let up = names(options.iter().map(|link| &*link.name).collect());
        let awaited = frugal.iter().map(|name| name.unwrap_or("Wi-Fi")).collect();
        let awaited = names(awaited);
        Some(EnergyWait {
            begins_in,
            why: format!(
                "saves energy ({}): {awaited} needs less than half of what {up} does, and there is time",
                self.power
            ),
            unblocks: format!(
                "{awaited} | {up} in {} if that does not come | --save-energy never",
                format_duration(begins_in)
            ),
        })
    }
}

/// A wait for a link that needs less energy.
struct EnergyWait {
    begins_in: Duration,
    why: String,
    unblocks: String,
}

#[cfg(test)]
mod tests;
