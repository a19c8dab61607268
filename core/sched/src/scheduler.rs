//! D2Sched for all flows of a device: decides which links carry them now, so that they meet their
//! deadlines and metered links carry as little as possible.
//!
//! ```text
//!  for the flows up to each deadline, earliest first:
//!    regret = how likely free links alone suffice       paying now was not needed
//!    risk   = how likely all links just do not suffice   what is not paid for now is missing
//!  PRICE × flows × risk > (bytes ÷ size of a large flow)^5/4 × regret² ─▶ they pay, else they wait
//!  and at the limit, where all links carry just what is needed, the same again without the powers
//! ```
//!
//! So a flow that free links will hardly complete alone pays early, because it will pay anyway. One
//! that they will probably complete waits as long as metered links can still carry the rest. Small
//! flows and the last bytes of large ones are paid for sooner, because they cost little and decide
//! as much.

use crate::algorithm_one;
use crate::capacity_forecast::CapacityForecast;
use crate::forecast::ForecastHint;
use crate::history::{LinkHistory, LinkObservation, NetworkRates};
use crate::link_assignment::{LinkAssignment, LinkShare, ScheduledFlow, by_deadline};
use crate::link_choice::{CostPolicy, LinkClass};
use d2tp_time::{Span, Time};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::ops::Range;

/// The rule by which the scheduler decides which flows pay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SchedulerMode {
    /// No flow pays.
    FreeOnly,
    /// All flows pay whenever no free link carries.
    FreeFirst,
    /// All flows always pay.
    Always,
    /// Algorithm 1 of the Cedos paper, with this share of the time needed as a margin.
    AlgorithmOne {
        /// The margin, 0 as published.
        margin: f64,
    },
    /// The forecast of the links decides.
    Forecast,
}

/// The cost of a missed deadline, in units of one large flow paid for in vain. Higher: fewer
/// misses, more paid bytes.
pub const PRICE: f64 = 0.4; // tuned, as all the numbers below: docs/repro/score.md describes the data

/// The number of recent flows that, with the current ones, define the size of a large flow: that of
/// the largest.
const LATELY: usize = 8; // a guess: what a person does changes

/// The cost of a missed deadline at the limit of the links' capacity, and the bounds of that limit, as
/// for [`HOPELESS`] and [`JUST`].
const PRICE_AT_BRINK: f64 = 1.2;
const BRINK: f64 = 1.2;
/// The share of the needed bytes from which free links count as sufficient, because the rest costs
/// little.
const NEARLY: f64 = 0.83;

/// A flow pays at any odds in this many seconds before its deadline: no later decision could
/// correct a wait, and little is left, or the deadline is missed anyway.
const LAST_LOOKS_S: f64 = 2.0; // two epochs

/// The price of a byte for flows whose policy is `balanced`.
const PRICE_BALANCED: f64 = 2.0 * PRICE;

/// The multiple of the needed bytes below which the links' capacity counts as only just sufficient.
const JUST: f64 = 2.0;
/// The probability of success below which paying now does not help.
const HOPELESS: f64 = 0.95;

/// The largest share of the links' expected capacity that flows of unknown size are assumed to need
/// beside others. Above [`HOPELESS`] they would be given up.
const REACH: f64 = 0.7; // tuned: docs/repro/score.md

/// The risk that no history shows, added to that of the forecast, for a flow that needs the whole
/// expected capacity. It is proportionally less for others.
const RISK_UNSEEN: f64 = 0.05;

/// Paying counts as regretted if free links alone carry this share of what was needed, because paid
/// bytes have replaced some of it.
const ALONE: f64 = 0.45;

/// The probability of missing a deadline over all links from which some flows count as late.
const CROWDED: f64 = 0.95; // a guess

/// The risk from which a flow pays at any regret.
const RISK_MAX: f64 = 0.9;

/// The bytes of a probe of a metered link: what slow start sends in four round trips. Higher: more
/// accurate rates, more metered bytes.
pub const PROBE_BYTES: u64 = 100_000; // a guess

/// How long a metered link may be unused before it is probed, in seconds. Rates hold for about that
/// time.
const PROBE_AFTER_S: f64 = 10.0; // measured on half of the recorded cellular links
/// The share of the remaining slack after which a link is probed again, if that is longer than the
/// shortest interval. Higher: fewer bytes for probes, and a lower rate is noticed later.
const PROBE_SLACK: f64 = 0.03; // tuned: docs/repro/score.md

/// The demand from which a link that was never used is probed, so that the probe is small beside it.
const PROBE_FIRST_BYTES: f64 = 20.0 * PROBE_BYTES as f64; // a guess

/// The share of the links' expected capacity that flows must need before a link is probed again.
const PROBE_SHARE: f64 = 0.1; // a guess
/// The probability of success on free links from which no probe is made.
const PROBE_REGRET: f64 = 0.98; // a guess
/// How long a free link must have carried data before its probability of success can justify a
/// probe of a metered link, in seconds. Higher: fewer probes beside a good free link, and the
/// metered link is known later.
const PROBE_FREE_KNOWN_S: f64 = 2.0; // a guess: slow start over a long path takes less

/// The share of the time to the earliest deadline after which the decision is repeated, at least
/// each second and at most every ten.
const EPOCH_SHARE: f64 = 1.0 / 400.0;
const EPOCH_S: (f64, f64) = (1.0, 10.0);

/// Up to this many deadlines are evaluated one by one.
const DEADLINES_EACH: usize = 24;
/// With more deadlines, those within this ratio are evaluated as one. Higher: faster, coarser.
const ABOUT: f64 = 1.6;

/// Schedules flows over links, from the links' histories.
#[derive(Debug, Clone)]
pub struct Scheduler {
    mode: SchedulerMode,
    links: Vec<LinkHistory>,
    /// Sizes in bytes of recent flows.
    sizes: VecDeque<u64>,
}

/// The probabilities for the flows up to one deadline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DeadlineOdds {
    /// The probability that free links alone are in time.
    pub(crate) alone: f64,
    /// The probability that all links together are too late.
    pub(crate) late: f64,
    /// The probability that paying now turns out to be unnecessary.
    pub(crate) regret: f64,
    /// The probability that all links together are only just too slow.
    pub(crate) risk: f64,
    /// The probabilities that all links carry nearly the needed bytes, and that free links nearly
    /// suffice alone.
    brink: (f64, f64),
    /// The needed bytes as a share of the links' expected capacity.
    pub(crate) load: f64,
}

impl Scheduler {
    /// Creates a scheduler for links of these classes.
    pub fn new(mode: SchedulerMode, classes: impl IntoIterator<Item = LinkClass>) -> Scheduler {
        Scheduler {
            mode,
            links: classes.into_iter().map(LinkHistory::new).collect(),
            sizes: VecDeque::new(),
        }
    }

    /// Adds a link. Returns its index.
    pub fn add_link(&mut self, class: LinkClass) -> usize {
        self.links.push(LinkHistory::new(class));
        self.links.len() - 1
    }

    /// Records the size of a new flow.
    pub fn note_size(&mut self, bytes: u64) {
        self.sizes.truncate(LATELY - 1);
        self.sizes.push_front(bytes);
    }

    /// Sets a link's cost class.
    pub fn set_class(&mut self, link: usize, class: LinkClass) {
        self.links[link].set_class(class);
    }

    /// The histories of the links.
    pub fn links(&self) -> &[LinkHistory] {
        &self.links
    }

    /// Handles observations of the links, in their order: at each of their changes, and each second
    /// while they are used.
    pub fn observe(&mut self, now: Time, observations: &[LinkObservation]) {
        for (link, observation) in self.links.iter_mut().zip(observations) {
            link.observe(now, observation);
        }
    }

    /// Replaces a link's history by a restored one.
    pub fn restore_history(&mut self, link: usize, history: LinkHistory) {
        self.links[link] = history;
    }

    /// Records that a link is on another network, and sets that network's rate. Returns the rate of
    /// the previous network.
    pub fn switch_network(&mut self, link: usize, rates: NetworkRates) -> NetworkRates {
        let before = self.links[link].rates();
        self.links[link].switch_network(rates);
        before
    }

    /// Sets the forecast of a link.
    pub fn set_hint(&mut self, link: usize, hint: ForecastHint) {
        self.links[link].set_hint(hint);
    }

    /// Decides which links carry which flows.
    pub fn decide(&self, now: Time, flows: &[ScheduledFlow]) -> LinkAssignment {
        let order = by_deadline(flows);
        if let SchedulerMode::AlgorithmOne { margin } = self.mode {
            return algorithm_one::assign(&self.links, flows, order, margin);
        }
        let no_free =
            !(self.links.iter()).any(|link| link.class() == LinkClass::Free && link.carries());
        let found = match self.mode {
            SchedulerMode::Forecast => self.by_outlook(now, flows, order),
            SchedulerMode::Always => PayDecision::all(order),
            SchedulerMode::FreeFirst if no_free => PayDecision::all(order),
            SchedulerMode::FreeFirst
            | SchedulerMode::FreeOnly
            | SchedulerMode::AlgorithmOne { .. } => PayDecision::none(order),
        };
        let order = found.order;
        let pays = |place: usize, flow: &ScheduledFlow| {
            let by_deadline = place < found.paying || found.late.contains(&place);
            let at_once = match flow.need.policy {
                CostPolicy::Fast => true,
                CostPolicy::Any => no_free,
                CostPolicy::FreeOnly | CostPolicy::FreeFirst | CostPolicy::Balanced => false,
            };
            flow.may_pay() && (by_deadline || at_once) && !self.is_held_by_source(flow)
        };
        let payers: Vec<usize> = (order.iter().enumerate())
            .filter(|(place, n)| pays(*place, &flows[**n]))
            .map(|(_, n)| *n)
            .collect();
        let shares = self.shares(now, !payers.is_empty(), found.probe_after_s);
        let shortest_s = order.first().and_then(|n| flows[*n].left_s());
        let again_s = shortest_s.map_or(EPOCH_S.1, |left_s| left_s * EPOCH_SHARE);
        LinkAssignment {
            probed: order.iter().copied().find(|n| {
                let flow = &flows[*n];
                flow.may_pay() && !self.is_held_by_source(flow)
            }),
            order,
            payers,
            shares,
            valid_for: Span::from_secs_f64(again_s.clamp(EPOCH_S.0, EPOCH_S.1)),
        }
    }

    /// The largest ratio of needed bytes to the links' expected capacity, over all deadlines. Near
    /// one there is no time to lose; zero without deadlines.
    pub fn load(&self, now: Time, flows: &[ScheduledFlow]) -> f64 {
        let order = by_deadline(flows);
        let due = order.iter().map_while(|n| flows[*n].left_s()).count();
        let places = looked_at(due, |place| flows[order[place]].left_s().unwrap_or(0.0));
        let horizons = places
            .iter()
            .filter_map(|place| flows[order[*place]].left_s());
        let outlook = CapacityForecast::new(now, &self.links, horizons);
        let (mut due, mut next, mut load) = (DueBytes::default(), 0, 0.0_f64);
        for (horizon, place) in places.into_iter().enumerate() {
            due.add(order[next..=place].iter().map(|n| &flows[*n]));
            next = place + 1;
            load = load.max(due.until(&outlook, horizon) / outlook.all_median(horizon).max(1.0));
        }
        load
    }

    /// The flows with a deadline, earliest first, and those that would be late.
    pub(crate) fn in_order(&self, now: Time, flows: &[ScheduledFlow]) -> (Vec<usize>, LateFlows) {
        let mut order = by_deadline(flows);
        order.truncate(order.iter().map_while(|n| flows[*n].left_s()).count());
        let left_s = |place: usize| flows[order[place]].left_s().unwrap_or(0.0);
        let places = looked_at(order.len(), left_s);
        let horizons = places.iter().map(|place| left_s(*place));
        let outlook = CapacityForecast::new(now, &self.links, horizons);
        let late = late_flows(flows, &order, &places, &outlook);
        (order, late)
    }

    /// The size of a large flow in bytes, to which other flows are compared.
    fn large(&self, flows: &[ScheduledFlow]) -> f64 {
        let sizes = flows.iter().map(ScheduledFlow::size);
        let largest = sizes.chain(self.sizes.iter().copied()).max();
        largest.unwrap_or(1).max(1) as f64
    }

    /// Whether a single flow with these bytes due would pay with this much time left.
    pub(crate) fn pays_alone(
        &self,
        now: Time,
        flow: &ScheduledFlow,
        due: DueBytes,
        left_s: f64,
    ) -> bool {
        let outlook = CapacityForecast::new(now, self.links(), std::iter::once(left_s));
        let odds = deadline_odds(&outlook, 0, due.until(&outlook, 0));
        let sizes = due.in_all() / self.large(std::slice::from_ref(flow));
        left_s <= LAST_LOOKS_S || is_worth(&odds, odds.risk, sizes, false)
    }

    fn shares(&self, now: Time, paying: bool, probe_after_s: f64) -> Vec<LinkShare> {
        let share = |link: &LinkHistory| match link.class() {
            LinkClass::Free => LinkShare::All,
            LinkClass::Metered if paying => LinkShare::Paid,
            LinkClass::Metered if link.unused_s(now) > probe_after_s => {
                LinkShare::Probe(PROBE_BYTES)
            }
            LinkClass::Metered | LinkClass::Roaming => LinkShare::Nothing,
        };
        self.links.iter().map(share).collect()
    }

    fn by_outlook(&self, now: Time, flows: &[ScheduledFlow], order: Vec<usize>) -> PayDecision {
        let due = order.iter().map_while(|n| flows[*n].left_s()).count();
        let left_s = |n: usize| flows[n].left_s().unwrap_or(0.0);
        let places = looked_at(due, |place| left_s(order[place]));
        let horizons: Vec<f64> = places.iter().map(|place| left_s(order[*place])).collect();
        let outlook = CapacityForecast::new(now, &self.links, horizons.iter().copied());
        let late = late_flows(flows, &order, &places, &outlook);
        let large = self.large(flows);
        let unknown = |link: &LinkHistory| {
            link.class() == LinkClass::Free
                && link.carries()
                && link.rates().known_s < PROBE_FREE_KNOWN_S
        };
        let is_free_unknown = self.links.iter().any(unknown);
        let mut found = PayDecision::none(Vec::with_capacity(order.len()));
        let (mut due_by, mut at_risk, mut next) = (DueBytes::default(), 0.0, 0);
        for (horizon, place) in places.into_iter().enumerate() {
            let all = order[next..=place].iter().copied();
            next = place + 1;
            let before = found.order.len();
            found.order.extend(all.filter(|n| !late.has(*n)));
            let group = found.order[before..].iter().map(|n| &flows[*n]);
            due_by.add(group.clone());
            let may_pay = group.filter(|flow| flow.may_pay() && !self.is_held_by_source(flow));
            let balanced = may_pay
                .clone()
                .any(|flow| flow.need.policy == CostPolicy::Balanced);
            let count = may_pay.count();
            if count == 0 {
                continue;
            }
            let left_s = horizons[horizon];
            let odds = deadline_odds(&outlook, horizon, due_by.until(&outlook, horizon));
            at_risk += odds.risk * count as f64;
            let is_last = left_s <= LAST_LOOKS_S;
            if is_last || is_worth(&odds, at_risk, due_by.in_all() / large, balanced) {
                found.paying = found.order.len();
            }
            let is_in_doubt = odds.regret < PROBE_REGRET;
            if !is_in_doubt || (is_free_unknown && left_s > PROBE_AFTER_S) {
                continue;
            }
            if due_by.in_all() > PROBE_FIRST_BYTES {
                // The time since a link was used is infinite if it never was, so the limit must be
                // finite.
                found.probe_after_s = found.probe_after_s.min(f64::MAX);
            }
            if odds.load > PROBE_SHARE {
                let slack_s = left_s * (1.0 - odds.load);
                let after_s = PROBE_AFTER_S.max(PROBE_SLACK * slack_s);
                found.probe_after_s = found.probe_after_s.min(after_s);
            }
        }
        let in_time = found.order.len();
        let those_late = order[..due].iter().copied().filter(|n| late.has(*n));
        found.order.extend(those_late);
        found.late = in_time..found.order.len();
        found.order.extend(&order[due..]);
        found
    }
}

/// Bytes that are due by a deadline.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DueBytes {
    sized: f64,
    /// Bytes of flows of unknown size, which are guesses.
    guessed: f64,
}

impl DueBytes {
    pub(crate) fn add<'a>(&mut self, flows: impl Iterator<Item = &'a ScheduledFlow>) {
        for flow in flows {
            match flow.is_sized() {
                true => self.sized += flow.due_bytes(),
                false => self.guessed += flow.due_bytes(),
            }
        }
    }

    fn in_all(self) -> f64 {
        self.sized + self.guessed
    }

    /// The bytes that count as needed until a horizon: guessed bytes are limited, so that a flow is not
    /// given up because of a guess.
    pub(crate) fn until(self, outlook: &CapacityForecast, horizon: usize) -> f64 {
        let reach = REACH * outlook.all_median(horizon) - self.sized;
        self.sized + self.guessed.min(reach.max(PROBE_BYTES as f64))
    }
}

/// The flows that would be late beside the others.
#[derive(Debug, Default)]
pub(crate) struct LateFlows {
    /// One entry for each flow of the list; empty if no flow is late.
    flows: Vec<bool>,
}

impl LateFlows {
    pub(crate) fn has(&self, flow: usize) -> bool {
        self.flows.get(flow).is_some_and(|late| *late)
    }
}

/// Which flows use metered links, and how soon an unused one must be probed.
#[derive(Debug, Clone)]
struct PayDecision {
    /// The flows in the order in which links carry them.
    order: Vec<usize>,
    /// How many of the flows, from the first, pay because of their deadlines.
    paying: usize,
    /// The indices of flows that would be late, or are late already: they pay too.
    late: Range<usize>,
    /// How long a metered link may be unused before it must be probed.
    probe_after_s: f64,
}

impl PayDecision {
    fn none(order: Vec<usize>) -> PayDecision {
        PayDecision {
            order,
            paying: 0,
            late: 0..0,
            probe_after_s: f64::INFINITY,
        }
    }

    fn all(order: Vec<usize>) -> PayDecision {
        PayDecision {
            paying: order.len(),
            ..PayDecision::none(order)
        }
    }
}

/// Chooses the flows that are late, so that the others with a deadline can be in time. Where all
/// links surely do not carry what is due, the flow of the lowest priority is late first, and among
/// equals the one that needs most (Moore, 1968, with Hodgson's rule: as few flows as possible are
/// late). No other flow waits for them.
fn late_flows(
    flows: &[ScheduledFlow],
    order: &[usize],
    places: &[usize],
    outlook: &CapacityForecast,
) -> LateFlows {
    // An unknown size becomes known when the flow begins.
    let own = |n: &usize| match flows[*n].is_sized() {
        true => flows[*n].due_bytes() as u64,
        false => 0,
    };
    let is_crowded = |horizon, bytes: u64| outlook.all_short_of(horizon, bytes as f64) > CROWDED;
    let (mut bytes, mut next) = (0, 0);
    let is_any = places.iter().enumerate().any(|(horizon, place)| {
        bytes += order[next..=*place].iter().map(own).sum::<u64>();
        next = place + 1;
        is_crowded(horizon, bytes)
    });
    let mut late = LateFlows::default();
    if !is_any {
        return late;
    }
    (bytes, next) = (0, 0);
    let mut kept: BinaryHeap<(Reverse<u8>, u64, usize)> = BinaryHeap::new();
    for (horizon, place) in places.iter().enumerate() {
        for n in &order[next..=*place] {
            bytes += own(n);
            if flows[*n].is_sized() {
                kept.push((Reverse(flows[*n].priority), own(n), *n));
            }
        }
        next = place + 1;
        while is_crowded(horizon, bytes) {
            let Some((_, own, n)) = kept.pop() else {
                break;
            };
            bytes -= own;
            late.flows.resize(flows.len(), false);
            late.flows[n] = true;
        }
    }
    late
}

/// The indices of those of the first `due` flows that are evaluated: all if they are few, else the
/// last one of each group with similar deadlines.
fn looked_at(due: usize, left_s: impl Fn(usize) -> f64) -> Vec<usize> {
    if due <= DEADLINES_EACH {
        return (0..due).collect();
    }
    let mut places = Vec::new();
    let mut first_s = left_s(0).max(1.0);
    for place in 1..due {
        if left_s(place) > first_s * ABOUT {
            places.push(place - 1);
            first_s = left_s(place);
        }
    }
    places.push(due - 1);
    places
}

/// The probabilities of carrying `bytes` until a horizon of the forecast.
pub(crate) fn deadline_odds(
    outlook: &CapacityForecast,
    horizon: usize,
    bytes: f64,
) -> DeadlineOdds {
    let load = bytes / outlook.all_median(horizon).max(1.0);
    let short = |times: f64| outlook.all_short_of(horizon, bytes * times);
    DeadlineOdds {
        alone: outlook.free_reach(horizon, bytes),
        late: short(1.0),
        regret: outlook.free_reach(horizon, bytes * ALONE),
        risk: short(JUST) - short(HOPELESS) + RISK_UNSEEN * load.min(1.0),
        brink: (
            short(BRINK) - short(HOPELESS),
            outlook.free_reach(horizon, bytes * NEARLY),
        ),
        load,
    }
}

/// Whether to pay now. `at_risk`: the total risk of the flows so far; `sizes`: what they still
/// need, in units of one large flow.
fn is_worth(odds: &DeadlineOdds, at_risk: f64, sizes: f64, balanced: bool) -> bool {
    let price = if balanced { PRICE_BALANCED } else { PRICE };
    // A small amount counts less than its share, and an unsure regret less than its probability.
    let regret = sizes * sizes.sqrt().sqrt() * odds.regret * odds.regret;
    let (just, nearly) = odds.brink;
    price * at_risk > regret || PRICE_AT_BRINK * just > sizes * nearly || odds.risk > RISK_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::LinkForecast;
    use crate::link_choice::{DeadlineFallback, FlowDemand};
    use crate::source_supply::SourceSupply;
    use std::time::Duration;

    const CLASSES: [LinkClass; 2] = [LinkClass::Free, LinkClass::Metered];

    fn flow(bytes: u64, left_s: f64, policy: CostPolicy) -> ScheduledFlow {
        ScheduledFlow {
            need: FlowDemand {
                remaining_bytes: Some(bytes),
                left: Some(Duration::from_secs_f64(left_s)),
                policy,
                if_late: DeadlineFallback::Cell,
                metered_bytes_left: None,
            },
            size_bytes: bytes,
            priority: 0,
            source: SourceSupply::Ample,
        }
    }

    fn free_first(bytes: u64, left_s: f64) -> ScheduledFlow {
        flow(bytes, left_s, CostPolicy::FreeFirst)
    }

    /// A scheduler whose links were used at these rates for these times, in seconds. `None`: the
    /// link is down.
    fn after(mode: SchedulerMode, stays: &[(u64, [Option<u64>; 2])]) -> (Scheduler, Time) {
        let mut scheduler = Scheduler::new(mode, CLASSES);
        let mut now = Time::ZERO;
        for (seconds, rates) in stays {
            for _ in 0..*seconds {
                let observation = |rate: Option<u64>| LinkObservation {
                    up: rate.is_some(),
                    bytes: rate.unwrap_or(0),
                    busy: Span::from_secs(u64::from(rate.is_some())),
                };
                now += Span::from_secs(1);
                scheduler.observe(now, &rates.map(observation));
            }
        }
        (scheduler, now)
    }

    fn pays(stays: &[(u64, [Option<u64>; 2])], flows: &[ScheduledFlow]) -> usize {
        let (scheduler, now) = after(SchedulerMode::Forecast, stays);
        scheduler.decide(now, flows).payers.len()
    }

    const CELL: Option<u64> = Some(1_000_000);
    const WIFI: Option<u64> = Some(2_000_000);

    #[test]
    fn with_time_in_hand_it_waits_and_without_it_pays() {
        let stays = [(60, [WIFI, CELL]), (5, [None, CELL])];
        assert_eq!(pays(&stays, &[free_first(20_000_000, 3_600.0)]), 0);
        assert_eq!(pays(&stays, &[free_first(20_000_000, 16.0)]), 1);
    }

    #[test]
    fn what_free_links_can_never_do_alone_is_paid_for_early() {
        // No Wi-Fi for two hours: the flow will pay anyway, although there is twice the time.
        let stays = [(7_200, [None, CELL])];
        assert_eq!(pays(&stays, &[free_first(200_000_000, 400.0)]), 1);
        // With Wi-Fi that comes back every minute the flow waits.
        let mut often = Vec::new();
        for _ in 0..20 {
            often.extend([(40, [WIFI, CELL]), (20, [None, CELL])]);
        }
        assert_eq!(pays(&often, &[free_first(200_000_000, 400.0)]), 0);
    }

    /// Five mornings: Wi-Fi is left at 07:40 and is there again at 08:30.
    fn five_commutes() -> LinkForecast {
        let mut wifi = LinkForecast::new();
        for day in 0..5 {
            for (seconds, rate) in [
                (0..27_600, 2e6),
                (27_600..30_600, 0.0),
                (30_600..86_400, 2e6),
            ] {
                wifi.daily_rates().note(day, seconds, rate);
            }
        }
        wifi
    }

    #[test]
    fn a_commute_is_foreseen_while_its_wifi_is_still_there() {
        let wifi = five_commutes();
        let (unknowing, now) = after(SchedulerMode::Forecast, &[(3_600, [WIFI, CELL])]);
        let by_20_past_8 = [free_first(2_600_000_000, 2_700.0)];
        let at = |day: u32, second: u32| {
            let mut scheduler = unknowing.clone();
            scheduler.set_hint(0, wifi.hint(now, day, second));
            let promised = scheduler.estimates(now, &by_20_past_8)[0];
            let pays = !scheduler.decide(now, &by_20_past_8).payers.is_empty();
            (pays, promised.expected_metered_bytes)
        };
        // At 07:35 there are five minutes of Wi-Fi left, and the rest is paid for in time and promised to cost.
        let (pays, metered) = at(5, 27_300);
        assert!(pays && metered > 1_000_000_000, "{metered}");
        // Later in the morning, and without a past, Wi-Fi will do.
        let (pays, metered) = at(5, 36_000);
        assert!(!pays && metered < 300_000_000, "{metered}");
        assert!(unknowing.decide(now, &by_20_past_8).payers.is_empty());
    }

    #[test]
    fn the_end_of_a_commute_is_foreseen_while_its_wifi_is_away() {
        // No outage has ended since the device began.
        let wifi = five_commutes();
        let stays = [(600, [WIFI, CELL]), (2_700, [None, CELL])];
        let (unknowing, now) = after(SchedulerMode::Forecast, &stays);
        let within_25_min = [free_first(1_400_000_000, 1_500.0)];
        let at = |second: u32| {
            let mut scheduler = unknowing.clone();
            scheduler.set_hint(0, wifi.hint(now, 5, second));
            let promised = scheduler.estimates(now, &within_25_min)[0];
            let pays = !scheduler.decide(now, &within_25_min).payers.is_empty();
            (pays, promised.expected_metered_bytes)
        };
        // At 08:25 the Wi-Fi is five minutes away, and has time enough.
        let (pays, metered) = at(30_300);
        assert!(!pays && metered < 300_000_000, "{metered}");
        // Half an hour earlier, and without a past, it is not expected in time.
        let (pays, metered) = at(28_500);
        assert!(pays && metered > 1_000_000_000, "{metered}");
        assert!(!unknowing.decide(now, &within_25_min).payers.is_empty());
    }

    #[test]
    fn the_rest_of_a_flow_is_paid_for_sooner_than_its_beginning() {
        let stays = [(60, [WIFI, CELL]), (60, [None, CELL])];
        let whole = free_first(30_000_000, 120.0);
        let rest = ScheduledFlow {
            size_bytes: 3_000_000_000,
            ..whole.clone()
        };
        assert!(pays(&stays, std::slice::from_ref(&rest)) > pays(&stays, &[whole]));
    }

    #[test]
    fn flows_that_must_not_pay_never_do() {
        let stays = [(60, [None, CELL])];
        let broke = ScheduledFlow {
            need: FlowDemand {
                metered_bytes_left: Some(0),
                ..free_first(1, 1.0).need
            },
            ..free_first(1, 1.0)
        };
        let patient = ScheduledFlow {
            need: FlowDemand {
                if_late: DeadlineFallback::Wait,
                ..free_first(1, 1.0).need
            },
            ..free_first(1, 1.0)
        };
        let never = flow(50_000_000, 10.0, CostPolicy::FreeOnly);
        let urgent = free_first(50_000_000, 30.0);
        let flows = [never, broke, patient, urgent];
        let (scheduler, now) = after(SchedulerMode::Forecast, &stays);
        let assignment = scheduler.decide(now, &flows);
        assert_eq!(assignment.payers, [3]);
        assert_eq!(assignment.carried_by(1).0, [3]);
        assert_eq!(assignment.carried_by(0).0.len(), 4);
    }

    #[test]
    fn fast_pays_at_once_and_any_when_no_free_link_carries() {
        let flows = [
            flow(1, 3_600.0, CostPolicy::Fast),
            flow(1, 3_600.0, CostPolicy::Any),
        ];
        assert_eq!(pays(&[(60, [WIFI, CELL])], &flows), 1);
        assert_eq!(pays(&[(60, [None, CELL])], &flows), 2);
    }

    #[test]
    fn a_roaming_link_carries_nothing() {
        let mut scheduler = Scheduler::new(SchedulerMode::Forecast, [LinkClass::Roaming]);
        let observation = LinkObservation {
            up: true,
            ..LinkObservation::default()
        };
        scheduler.observe(Time::ZERO, &[observation]);
        let assignment = scheduler.decide(Time::ZERO, &[free_first(1_000_000_000, 1.0)]);
        assert_eq!(assignment.carried_by(0), (&[][..], 0));
    }

    #[test]
    fn a_link_that_was_never_used_is_probed_before_it_is_needed() {
        let mut scheduler = Scheduler::new(SchedulerMode::Forecast, CLASSES);
        let up = LinkObservation {
            up: true,
            ..LinkObservation::default()
        };
        scheduler.observe(Time::ZERO, &[LinkObservation::default(), up]);
        let early = [free_first(100_000_000, 900.0)];
        let assignment = scheduler.decide(Time::ZERO, &early);
        assert_eq!(assignment.carried_by(1), (&[0][..], PROBE_BYTES));
        let probed = LinkObservation {
            bytes: PROBE_BYTES,
            busy: Span::from_millis(50),
            ..up
        };
        scheduler.observe(
            Time::from_secs_f64(1.0),
            &[LinkObservation::default(), probed],
        );
        let assignment = scheduler.decide(Time::from_secs_f64(1.0), &early);
        assert_eq!(assignment.carried_by(1).1, 0);
    }

    #[test]
    fn no_metered_link_is_probed_while_free_links_meet_the_deadline() {
        let up = LinkObservation {
            up: true,
            ..LinkObservation::default()
        };
        let wifi = |bytes: u64| LinkObservation {
            bytes,
            busy: Span::from_secs(u64::from(bytes > 0)),
            ..up
        };
        let probes = |rate: u64, bytes: u64, left_s: f64| {
            let mut scheduler = Scheduler::new(SchedulerMode::Forecast, CLASSES);
            let mut probes = 0;
            for second in 0..30_u64 {
                let now = Time::from_secs_f64(second as f64);
                let carried = if second == 0 { 0 } else { rate };
                scheduler.observe(now, &[wifi(carried), up]);
                let left = free_first(bytes - (rate * second).min(bytes - 1), left_s);
                let assignment = scheduler.decide(now, &[left]);
                probes += usize::from(matches!(assignment.shares[1], LinkShare::Probe(_)));
            }
            probes
        };
        // A good Wi-Fi, from its first second on, and a slow one with hours of time.
        assert_eq!(probes(5_000_000, 200_000_000, 6.0 * 3_600.0), 0);
        assert_eq!(probes(2_000_000, 60_000_000, 30.0 * 3_600.0), 0);
        assert_eq!(probes(5_000_000, 150_000_000, 300.0), 0);
        assert_eq!(probes(50_000, 5_000_000, 6.0 * 3_600.0), 0);
        // A Wi-Fi that may be too slow for the deadline: the probe is worth its bytes.
        assert!(probes(300_000, 60_000_000, 240.0) > 0);
    }

    #[test]
    fn load_is_near_one_where_there_is_no_time_to_lose() {
        let (scheduler, now) = after(SchedulerMode::Forecast, &[(60, [None, CELL])]);
        let load = |flows: &[ScheduledFlow]| scheduler.load(now, flows);
        assert_eq!(load(&[]), 0.0);
        let one = free_first(50_000_000, 60.0);
        assert!((0.6..1.1).contains(&load(std::slice::from_ref(&one))));
        assert!(load(&[one.clone(), one.clone()]) > 1.3);
        assert!(load(&[free_first(1_000_000, 3_600.0)]) < 0.01);
        // The load is that of the deadline that is hardest to meet.
        assert!(load(&[one, free_first(1_000_000, 36_000.0)]) > 0.6);
    }

    #[test]
    fn a_link_may_come_later_and_cost_something_else_then() {
        let mut scheduler = Scheduler::new(SchedulerMode::Forecast, []);
        let link = scheduler.add_link(LinkClass::Metered);
        let up = LinkObservation {
            up: true,
            ..LinkObservation::default()
        };
        scheduler.observe(Time::ZERO, &[up]);
        let urgent = [free_first(50_000_000, 10.0)];
        assert_eq!(scheduler.decide(Time::ZERO, &urgent).payers, [0]);
        scheduler.set_class(link, LinkClass::Free);
        let assignment = scheduler.decide(Time::ZERO, &urgent);
        assert_eq!(assignment.shares, [LinkShare::All]);
    }

    #[test]
    fn algorithm_one_is_on_one_link_and_looks_at_the_metered_rate_alone() {
        let stays = [(60, [WIFI, CELL])];
        let shares = |left_s| {
            let (scheduler, now) = after(SchedulerMode::AlgorithmOne { margin: 0.0 }, &stays);
            scheduler
                .decide(now, &[free_first(20_000_000, left_s)])
                .shares
        };
        assert_eq!(shares(21.0), [LinkShare::All, LinkShare::Nothing]);
        // The flow is urgent, and Wi-Fi is the faster link.
        assert_eq!(shares(19.0), [LinkShare::All, LinkShare::Nothing]);
        let (scheduler, now) = after(
            SchedulerMode::AlgorithmOne { margin: 0.0 },
            &[(60, [Some(100_000), CELL])],
        );
        let urgent = scheduler.decide(now, &[free_first(20_000_000, 19.0)]);
        assert_eq!(urgent.shares, [LinkShare::Nothing, LinkShare::Paid]);
    }

    #[test]
    fn when_not_all_can_be_in_time_the_highest_priority_goes_first() {
        let stays = [(60, [None, CELL])];
        let (scheduler, now) = after(SchedulerMode::Forecast, &stays);
        let first = |bytes: u64| {
            let low = free_first(bytes, 50.0);
            let high = ScheduledFlow {
                priority: 5,
                ..free_first(30_000_000, 60.0)
            };
            scheduler.decide(now, &[low, high]).order
        };
        assert_eq!(first(20_000_000), [0, 1]);
        assert_eq!(first(400_000_000), [1, 0]);
    }

    #[test]
    fn nobody_waits_for_a_flow_that_cannot_be_in_time() {
        let (scheduler, now) = after(SchedulerMode::Forecast, &[(60, [WIFI, None])]);
        let order = |flows: &[ScheduledFlow]| scheduler.decide(now, flows).order;
        let [huge, small, tiny] = [
            free_first(200_000_000, 20.0),
            free_first(10_000_000, 60.0),
            free_first(1_000_000, 30.0),
        ];
        let undated = ScheduledFlow {
            need: FlowDemand {
                left: None,
                ..tiny.need.clone()
            },
            ..tiny.clone()
        };
        let flows = [huge, small, tiny, undated];
        assert_eq!(order(&flows), [2, 1, 0, 3]);
        // A flow whose deadline is over causes no probe either.
        let mut flows = flows;
        flows[0] = free_first(1_000_000, 0.0);
        assert_eq!(order(&flows), [2, 1, 0, 3]);
        // Of flows that together need too much, only as many are late as needed.
        let many = [30.0, 31.0, 32.0].map(|left_s| free_first(100_000_000, left_s));
        let less = free_first(9_000_000, 33.0);
        let [a, b, c] = many;
        let assignment = order(&[a, b, c, less]);
        assert!(assignment[..2].contains(&3), "{assignment:?}");
        // The size becomes known when the flow has begun.
        let unknown = ScheduledFlow {
            need: FlowDemand {
                remaining_bytes: None,
                ..free_first(1, 5.0).need
            },
            ..free_first(1, 5.0)
        };
        assert_eq!(order(&[unknown, free_first(1_000_000, 30.0)]), [0, 1]);
    }

    /// The seconds before its deadline from which a flow pays. Wi-Fi carries for five seconds until
    /// 45 s are left; a metered link is up and was never used.
    fn begins_to_pay(remaining_bytes: Option<u64>, size_bytes: u64) -> u64 {
        let (mut scheduler, now) = after(SchedulerMode::Forecast, &[(5, [WIFI, None])]);
        let mut flow = free_first(size_bytes, 0.0);
        flow.need.remaining_bytes = remaining_bytes;
        let unused = LinkObservation {
            up: true,
            ..LinkObservation::default()
        };
        let mut pays_from = (1..=45_u64).rev().filter(|left_s| {
            let now = now + Span::from_secs(46 - left_s);
            scheduler.observe(now, &[LinkObservation::default(), unused]);
            flow.need.left = Some(Duration::from_secs(*left_s));
            !scheduler
                .decide(now, std::slice::from_ref(&flow))
                .payers
                .is_empty()
        });
        pays_from.next().unwrap_or(0)
    }

    #[test]
    fn a_flow_of_unknown_size_is_not_given_up_when_what_it_may_need_is_beyond_reach() {
        // For half of the remaining time the flow waits for Wi-Fi, then it pays.
        let left_s = begins_to_pay(None, 10_000_000);
        assert!((15..=30).contains(&left_s), "{left_s}");
        // While free links carry the flow, nothing is paid for.
        let stays = [(600, [WIFI, CELL])];
        for left_s in [3_600.0, 600.0, 60.0, 20.0, 5.0] {
            let mut flow = free_first(0, left_s);
            flow.need.remaining_bytes = None;
            assert_eq!(pays(&stays, &[flow]), 0, "{left_s}");
        }
    }

    #[test]
    fn what_brought_much_is_taken_to_bring_as_much_again() {
        let (scheduler, now) = after(
            SchedulerMode::Forecast,
            &[(600, [WIFI, CELL]), (900, [None, CELL])],
        );
        let left_s_at_start = |came: u64| {
            let mut flow = free_first(came, 3_600.0);
            flow.need.remaining_bytes = None;
            let span = scheduler.pays_in(now, &[flow], 0).unwrap();
            3_600.0 - span.as_secs_f64()
        };
        let (little, much) = (left_s_at_start(0), left_s_at_start(1_000_000_000));
        assert_eq!(little, left_s_at_start(100_000_000));
        assert!(much > 2.0 * little, "{little} {much}");
    }

    #[test]
    fn beside_large_flows_small_ones_are_paid_for_sooner() {
        let stays = [(60, [WIFI, CELL]), (60, [None, CELL])];
        let (mut scheduler, now) = after(SchedulerMode::Forecast, &stays);
        let small = [free_first(5_000_000, 25.0)];
        assert!(scheduler.decide(now, &small).payers.is_empty());
        scheduler.note_size(500_000_000);
        assert_eq!(scheduler.decide(now, &small).payers, [0]);
        // A flow that was large some time ago no longer counts.
        (0..LATELY).for_each(|_| scheduler.note_size(5_000_000));
        assert!(scheduler.decide(now, &small).payers.is_empty());
    }

    #[test]
    fn the_last_looks_leave_nothing_to_chance() {
        // The link was never measured, so a few bytes would look safe until it is too late.
        let (scheduler, now) = after(SchedulerMode::Forecast, &[(1, [None, Some(0)])]);
        for bytes in [2_000, 150_000] {
            let assignment = scheduler.decide(now, &[free_first(bytes, 1.5)]);
            assert_eq!(assignment.payers, [0], "{bytes}");
        }
    }

    #[test]
    fn the_same_history_decides_the_same() {
        let stays = [(90, [WIFI, CELL]), (30, [None, CELL])];
        let flows: Vec<ScheduledFlow> = (1..50u32)
            .map(|n| free_first(u64::from(n) * 100_000, f64::from(n) * 7.0))
            .collect();
        let (a, now) = after(SchedulerMode::Forecast, &stays);
        let (b, _) = after(SchedulerMode::Forecast, &stays);
        assert_eq!(a.decide(now, &flows), b.decide(now, &flows));
    }

    #[test]
    fn of_many_flows_an_urgent_one_pays_and_those_far_behind_it_do_not() {
        let stays = [(600, [WIFI, CELL])];
        let mut flows: Vec<ScheduledFlow> = (0..10_000u32)
            .map(|n| free_first(1_000, 100_000.0 + f64::from(n)))
            .collect();
        assert_eq!(pays(&stays, &flows), 0);
        flows.push(free_first(70_000_000, 26.0));
        let (scheduler, now) = after(SchedulerMode::Forecast, &stays);
        let assignment = scheduler.decide(now, &flows);
        assert!(assignment.payers.contains(&10_000));
        assert!(
            assignment.payers.len() < 1_000,
            "{}",
            assignment.payers.len()
        );
    }
}
