//! D2Sched for all flows of a device: which links carry them now, so that they are in time and links
//! that cost carry as little as can be.
//!
//! ```text
//!  for the flows up to each deadline, earliest first:
//!    regret = how likely free links alone will do       what is paid for now was not needed
//!    risk   = how likely all links will just not do     what is not paid for now is missing
//!  PRICE × flows × risk > bytes ÷ mean size × regret ─▶ these flows pay, else they wait
//! ```
//!
//! So a flow that free links will hardly ever complete alone pays early, for it will pay anyway; one
//! that they probably will complete waits as long as the others can still do the rest; and the last
//! bytes of a flow are paid for sooner than its first, for they cost little and decide as much.

use crate::choice::{Class, Policy};
use crate::history::{History, Sight};
use crate::outlook::{HORIZONS_MAX, Outlook};
use crate::published;
use crate::roster::{Flow, Roster, Share, by_deadline};
use d2tp_time::{Span, Time};

/// How it is decided who pays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mode {
    /// Nobody.
    FreeOnly,
    /// All, whenever no free link carries.
    FreeFirst,
    /// All, always.
    Always,
    /// Algorithm 1 of the Cedos paper, with this share of the time needed as a margin.
    AlgorithmOne {
        /// 0 as published.
        margin: f64,
    },
    /// What the outlook on the links says.
    Outlook,
}

/// What a missed deadline is worth, in flows of mean size paid for in vain. Higher: fewer are missed,
/// more is paid.
pub const PRICE: f64 = 2.5; // tuned, as all the numbers below: docs/repro/score.md says on what

/// And for flows whose policy is to be balanced.
const PRICE_BALANCED: f64 = 2.0 * PRICE;

/// Links *just* do not do when they carry less than this many times what is needed …
const JUST: f64 = 1.3;
/// … and more than this: where they carry still less, paying now does not help either.
const HOPELESS: f64 = 0.95;

/// What no history shows: the risk, beside that of the outlook, of a flow that needs all the links
/// are expected to carry. Less for one that needs less.
const RISK_UNSEEN: f64 = 0.05;

/// Free links alone will do when they carry this share of what is needed: the rest is little to pay.
const ALONE: f64 = 0.83;

/// From this risk on a flow pays whatever the regret.
const RISK_MAX: f64 = 0.9;

/// What a probe of a metered link carries: what slow start sends in four round trips. Higher: truer
/// rates, more bytes that cost.
pub const PROBE_BYTES: u64 = 100_000; // a guess

/// A metered link not used for so long is probed before it is relied upon, seconds.
const PROBE_AFTER_S: f64 = 10.0; // half of the recorded cellular links: rates hold about so long

/// No probe for flows that need less than this share of what the links are expected to carry, …
const PROBE_SHARE: f64 = 0.1; // a guess
/// … or that free links will so probably complete.
const PROBE_REGRET: f64 = 0.98; // a guess

/// It is decided again after this share of the time to the earliest deadline, at least each second
/// at most every ten.
const EPOCH_SHARE: f64 = 1.0 / 400.0;
const EPOCH_S: (f64, f64) = (1.0, 10.0);

/// Links, and what is known of them.
#[derive(Debug, Clone)]
pub struct Scheduler {
    mode: Mode,
    links: Vec<History>,
}

/// How things stand for the flows up to a deadline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Standing {
    /// How likely free links alone will do.
    pub(crate) regret: f64,
    /// How likely all links together just will not.
    pub(crate) risk: f64,
    /// The share of what all links are expected to carry that is needed.
    pub(crate) load: f64,
}

impl Scheduler {
    /// For links of these classes.
    pub fn new(mode: Mode, classes: impl IntoIterator<Item = Class>) -> Scheduler {
        Scheduler {
            mode,
            links: classes.into_iter().map(History::new).collect(),
        }
    }

    /// What is known of the links.
    pub fn links(&self) -> &[History] {
        &self.links
    }

    /// Takes down what is seen of the links, in their order: at each of their changes, and each second
    /// in which they are used.
    pub fn see(&mut self, now: Time, sights: &[Sight]) {
        for (link, sight) in self.links.iter_mut().zip(sights) {
            link.see(now, sight);
        }
    }

    /// Decides for all flows.
    pub fn decide(&self, now: Time, flows: &[Flow]) -> Roster {
        let order = by_deadline(flows);
        if let Mode::AlgorithmOne { margin } = self.mode {
            return published::roster(&self.links, flows, order, margin);
        }
        let no_free =
            !(self.links.iter()).any(|link| link.class() == Class::Free && link.carries());
        let (by_deadline, doubt) = match self.mode {
            Mode::Outlook => self.by_outlook(now, flows, &order),
            Mode::Always => (order.len(), false),
            Mode::FreeFirst if no_free => (order.len(), false),
            Mode::FreeFirst | Mode::FreeOnly | Mode::AlgorithmOne { .. } => (0, false),
        };
        let pays = |place: usize, flow: &Flow| {
            let at_once = match flow.need.policy {
                Policy::Fast => true,
                Policy::Any => no_free,
                Policy::FreeOnly | Policy::FreeFirst | Policy::Balanced => false,
            };
            flow.may_pay() && (place < by_deadline || at_once)
        };
        let payers: Vec<usize> = (order.iter().enumerate())
            .filter(|(place, n)| pays(*place, &flows[**n]))
            .map(|(_, n)| *n)
            .collect();
        let shares = self.shares(now, !payers.is_empty(), doubt);
        let shortest_s = order.first().and_then(|n| flows[*n].left_s());
        let again_s = shortest_s.map_or(EPOCH_S.1, |left_s| left_s * EPOCH_SHARE);
        Roster {
            probed: order.iter().copied().find(|n| flows[*n].may_pay()),
            order,
            payers,
            shares,
            again: Span::from_secs_f64(again_s.clamp(EPOCH_S.0, EPOCH_S.1)),
        }
    }

    fn shares(&self, now: Time, paying: bool, doubt: bool) -> Vec<Share> {
        let share = |link: &History| match link.class() {
            Class::Free => Share::All,
            Class::Metered if paying => Share::Paid,
            Class::Metered if doubt && link.unused_s(now) > PROBE_AFTER_S => {
                Share::Probe(PROBE_BYTES)
            }
            Class::Metered | Class::Roaming => Share::Nothing,
        };
        self.links.iter().map(share).collect()
    }

    /// How many flows of the order pay for their deadlines' sake, and whether links that cost have to
    /// be measured.
    fn by_outlook(&self, now: Time, flows: &[Flow], order: &[usize]) -> (usize, bool) {
        let due = order.iter().map_while(|n| flows[*n].left_s()).count();
        // Each deadline where they are few, else some, the last among them.
        let step = due.div_ceil(HORIZONS_MAX).max(1);
        let places: Vec<usize> = (0..due)
            .filter(|place| (place + 1) % step == 0 || place + 1 == due)
            .collect();
        let horizons = places
            .iter()
            .filter_map(|place| flows[order[*place]].left_s());
        let outlook = Outlook::new(now, &self.links, horizons);
        let mean_size = flows.iter().map(|flow| flow.size_bytes as f64).sum::<f64>()
            / flows.len().max(1) as f64;
        let (mut paying, mut doubt, mut bytes, mut at_risk) = (0, false, 0.0, 0.0);
        let mut next = 0;
        for (horizon, place) in places.into_iter().enumerate() {
            let group = order[next..=place].iter().map(|n| &flows[*n]);
            bytes += group.clone().map(Flow::bytes).sum::<f64>();
            let may_pay = group.clone().filter(|flow| flow.may_pay());
            let balanced = may_pay
                .clone()
                .any(|flow| flow.need.policy == Policy::Balanced);
            let count = may_pay.count();
            next = place + 1;
            if count == 0 {
                continue;
            }
            let standing = standing(&outlook, horizon, bytes);
            at_risk += standing.risk * count as f64;
            if is_worth(&standing, at_risk, bytes / mean_size, balanced) {
                paying = place + 1;
            }
            doubt |= standing.regret < PROBE_REGRET && standing.load > PROBE_SHARE;
        }
        (paying, doubt)
    }
}

/// How it stands for `bytes` until a horizon of the outlook.
pub(crate) fn standing(outlook: &Outlook, horizon: usize, bytes: f64) -> Standing {
    let load = bytes / outlook.all_median(horizon).max(1.0);
    let short = |times: f64| outlook.all_short_of(horizon, bytes * times);
    Standing {
        regret: outlook.free_reach(horizon, bytes * ALONE),
        risk: short(JUST) - short(HOPELESS) + RISK_UNSEEN * load.min(1.0),
        load,
    }
}

/// Whether to pay now: `at_risk` is the risk of all flows so far together, `sizes` what they still
/// need, in flows of mean size.
fn is_worth(standing: &Standing, at_risk: f64, sizes: f64, balanced: bool) -> bool {
    let price = if balanced { PRICE_BALANCED } else { PRICE };
    price * at_risk > sizes * standing.regret || standing.risk > RISK_MAX
}
