//! What the device's policy decides, told to the code that ships: `d2tp-device` opens and closes paths and
//! grants; its actions are carried out on simulated sockets.
//!
//! ```text
//!  network ──links──▶ DeviceLinks ──actions──▶ sockets (network.rs), session (core)
//!  policy ──uses, who may pay──▶ ▲
//! ```
//!
//! It looks when something happened to a link or a flow, as often as the driver does while packets move, and
//! every [`TICK`] while a link that costs something is up and its use may change; otherwise not at all, so
//! hours of waiting cost nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::Class;
use d2tp_device::{
    ActionScope, AttachedSocket, LinkAction, LinkFacts, LinkUse, PaidLinks, SessionPaths,
};
use d2tp_session::{FlowId, LinkId, PathState, PathStats, PathStatus, Session};

use crate::device::{SimDevice, link_of};
use crate::fault::SimFault;
use crate::log::Log;
use crate::network::SimNetwork;
use crate::policy::{GRANT_RENEWED, Need, Offer, SimDecision, decide};
use crate::transfer::Progress;

/// How long a first hop is waited for, as the driver does.
const HOP_PATIENCE: Span = Span::from_millis(100);
/// How often it is looked whether grants are to be renewed.
const TICK: Span = GRANT_RENEWED;

/// A session that is a record: it has no paths, and wakes for one.
struct AsleepPaths;

impl SessionPaths for AsleepPaths {
    fn is_over(&self) -> bool {
        false
    }

    fn path_stats(&self) -> Vec<PathStats> {
        Vec::new()
    }

    fn has_path(&self, _: LinkId) -> bool {
        false
    }

    fn spend(&self, _: FlowId, _: LinkId) -> Option<d2tp_device::LinkSpend> {
        None
    }
}

/// What the policy says of one link for all flows.
pub(crate) struct LinkPlan {
    pub(crate) usage: LinkUse,
    /// Flows that may pay for it, with the most to grant each at a time.
    pub(crate) pays: Vec<(usize, u64)>,
}

impl SimDevice {
    /// Looks at links and flows, and acts. True if some permitted link carries packets.
    pub(crate) fn conduct(
        &mut self,
        now: Time,
        network: &mut SimNetwork,
        log: &mut Log,
    ) -> Result<bool, SimFault> {
        self.look_at = Time::NEVER;
        if self.host.is_away() {
            return Ok(false);
        }
        // What the session's events asked for.
        self.carry_out(now, network, log)?;
        self.hear_hops(now, network);
        let links = self.classes.len();
        let active: Vec<usize> = (0..self.transfers.len())
            .filter(|n| self.transfers[*n].progress == Progress::Active)
            .collect();
        self.measure(now, network, !active.is_empty());
        let free_rate = (0..links)
            .filter(|l| self.classes[*l] == Class::Free && network.is_up(*l))
            // Waiting a moment for the first figure loses no deadline, but may save paid bytes.
            .map(|l| self.meters[l].rate().unwrap_or(u64::MAX / 1024))
            .sum();
        let (picked, mut again) = if active.is_empty() {
            (vec![true; links], Time::NEVER)
        } else {
            self.picked(now, network)
        };
        self.show(now);
        if self.viewer.is_some() && !active.is_empty() {
            again = again.min(now + TICK);
        }
        let mut usable = false;
        let mut plans = Vec::new();
        for link in 0..links {
            if !network.is_up(link) {
                // Nothing is used that is not there; what it may be used for is said when it is.
                let usage = LinkUse::Off;
                plans.push(LinkPlan {
                    usage,
                    pays: Vec::new(),
                });
                continue;
            }
            let in_use = self.links.is_in_use(&self.names[link]);
            if !picked[link] {
                plans.push(self.leave(link, &picked, in_use));
                continue;
            }
            let offer = Offer {
                class: self.classes[link],
                rate: self.meters[link].rate(),
                round_trip: self.round_trip(link),
            };
            let viewed = match offer.class {
                Class::Free => None,
                _ => self.viewed(link, TICK),
            };
            let verdict = |n: usize| match viewed {
                Some(verdict) if n == 0 => verdict,
                _ => decide(&self.need(now, n), &offer, free_rate),
            };
            let verdicts: Vec<(usize, SimDecision)> =
                active.iter().map(|n| (*n, verdict(*n))).collect();
            let used = verdicts
                .iter()
                .any(|(_, v)| matches!(v, SimDecision::Use { .. }));
            usable |= used && network.is_good(link);
            if offer.class == Class::Free {
                let usage = if used || in_use {
                    LinkUse::Free
                } else {
                    LinkUse::Off
                };
                plans.push(LinkPlan {
                    usage,
                    pays: Vec::new(),
                });
                continue;
            }
            let parked = self.is_parked(now, used);
            let carries_acks = self.acks_pay && !active.is_empty() && self.contends();
            let lends = self.lends.is_some() && !used && !active.is_empty();
            let keeps = used || carries_acks || lends || (in_use && !parked);
            let mut pays = Vec::new();
            for (flow, verdict) in verdicts {
                match verdict {
                    SimDecision::Use { grant } => pays.push((flow, grant)),
                    SimDecision::Hold { again: next, .. } => {
                        if let Some(next) = next {
                            again = again.min(now + Span::from_nanos(next.as_nanos()));
                        }
                        // Its path stays: it may be needed again soon. Lent, it stays by itself.
                        if in_use && !parked && self.lends.is_none() {
                            pays.push((flow, 0));
                        }
                    }
                }
            }
            if lends {
                again = again.min(now + TICK);
            }
            // While a free link is in use, its rate decides too, and may change at any moment.
            if used || (free_rate > 0 && !active.is_empty()) {
                again = again.min(now + TICK);
            }
            let usage = if keeps { LinkUse::Paid } else { LinkUse::Off };
            plans.push(LinkPlan { usage, pays });
        }
        self.tell_links(now, network, &plans);
        self.carry_out(now, network, log)?;
        let due = self.links_due();
        if due <= now {
            (self.stirred, self.ticked_at) = (false, now);
            self.with_links(now, |links, now, session| links.on_time(now, session));
            self.carry_out(now, network, log)?;
        }
        let due = self.links_due().max(now + Span::from_nanos(1));
        self.look_at = self.look_at.min(again).min(due);
        Ok(usable)
    }

    /// When time is to pass for the links: as the driver's tick does it.
    fn links_due(&self) -> Time {
        let due = self.links.next_timeout();
        let due = due.map_or(Time::NEVER, |at| self.host.clock.run(at));
        match self.stirred {
            true => due.min(self.ticked_at + d2tp_device::TICK),
            false => due,
        }
    }

    /// The links as they are, what each may be used for, and which flows may pay.
    fn tell_links(&mut self, now: Time, network: &SimNetwork, plans: &[LinkPlan]) {
        let present: Vec<(LinkFacts, LinkUse)> = (0..self.classes.len())
            .filter(|link| network.is_up(*link))
            .map(|link| (self.facts(link, network), plans[link].usage))
            .collect();
        // Who may pay comes first: a link that costs is opened only for somebody.
        let mut allowed = BTreeSet::new();
        for number in 0..self.transfers.len() {
            let Some(id) = self.transfers[number].id else {
                continue;
            };
            let of_flow = |link: usize| {
                let pays = plans[link].pays.iter().find(|(n, _)| *n == number);
                pays.map(|(_, grant)| (link, *grant))
            };
            let on: Vec<(usize, u64)> = (0..plans.len()).filter_map(of_flow).collect();
            if on.is_empty() {
                continue;
            }
            allowed.insert(id);
            let left = self.need(now, number).budget;
            let most = *self.budgets.entry(id).or_insert(left);
            let grant = on
                .iter()
                .fold(0u64, |sum, (_, grant)| sum.saturating_add(*grant));
            let budget = match grant {
                0 => Some(self.links.paid_bytes(id)),
                // Somebody who watches wants no more than fills the buffer.
                grant if number == 0 && self.viewer.is_some() => {
                    let next = self.links.paid_bytes(id).saturating_add(grant);
                    Some(next.min(most.unwrap_or(u64::MAX)))
                }
                _ => most,
            };
            let names: BTreeSet<Arc<str>> = (on.iter().filter(|(_, grant)| *grant > 0))
                .map(|(link, _)| self.names[*link].as_str().into())
                .collect();
            self.with_links(now, |links, now, session| {
                links.allow_paid(now, session, id, budget, PaidLinks::Only(names));
            });
        }
        let over: Vec<FlowId> = (self.budgets.keys().copied())
            .filter(|id| !allowed.contains(id))
            .collect();
        for id in over {
            self.budgets.remove(&id);
            self.with_links(now, |links, now, session| {
                links.forbid_paid(now, session, id)
            });
        }
        if present != self.told {
            self.with_links(now, |links, now, session| {
                links.on_links(now, session, &present);
            });
            self.told = present;
        }
    }

    fn facts(&self, link: usize, network: &SimNetwork) -> LinkFacts {
        LinkFacts {
            name: self.names[link].as_str().into(),
            index: self.attachments[link] as u32,
            up: true,
            carrier: true,
            addresses: vec![network.address(link)],
            routes_v4: true,
            routes_v6: true,
            half_duplex: self.half_duplex[link],
        }
    }

    /// Gives the links an input, with the session as it is.
    pub(crate) fn with_links<R>(
        &mut self,
        now: Time,
        input: impl FnOnce(&mut d2tp_device::DeviceLinks, Time, &dyn SessionPaths) -> R,
    ) -> R {
        let core_now = self.host.clock.core(now);
        let asleep = self.is_asleep();
        let session = self.session.and_then(|id| self.host.endpoint.session(id));
        match session {
            Some(session) => input(&mut self.links, core_now, session),
            None if asleep => input(&mut self.links, core_now, &AsleepPaths),
            None => input(&mut self.links, core_now, &()),
        }
    }

    /// Carries out what the links want done.
    fn carry_out(
        &mut self,
        now: Time,
        network: &mut SimNetwork,
        log: &mut Log,
    ) -> Result<(), SimFault> {
        while let Some(action) = self.links.poll_action() {
            let lends = matches!(
                action,
                LinkAction::Lend { .. } | LinkAction::EndLending { .. }
            );
            if let LinkAction::Grant { socket, bytes, .. } = action {
                log.note(now, "device", || {
                    format!("grants {bytes} on link {}", link_of(socket))
                });
            } else if !lends && !matches!(action, LinkAction::ReadRadio { .. }) {
                log.note(now, "device", || format!("{action:?}"));
            }
            if matches!(action, LinkAction::OpenPath { .. }) && self.is_asleep() {
                self.wake(now, log)?;
            }
            let core_now = self.host.clock.core(now);
            if action.scope() != ActionScope::Sockets
                && let Some(id) = self.session
            {
                // A session that is over has no paths to act on.
                let _ = (self.host.endpoint).with(id, |s| action.apply(core_now, s));
            }
            match &action {
                LinkAction::Attach { link, ticket } => {
                    let made = self.attach(link, network);
                    self.links.on_socket(core_now, link, *ticket, made);
                }
                LinkAction::DropSocket { socket } => {
                    let current = &mut self.sockets[link_of(*socket)];
                    if *current == Some(*socket) {
                        *current = None;
                    }
                }
                LinkAction::AskFirstHop { link, ticket } => {
                    let number = self.names.iter().position(|name| **name == **link);
                    if let Some(number) = number {
                        self.asked[number] = Some((now, *ticket));
                        self.look_at = now;
                    }
                }
                LinkAction::ReadRadio { link, .. } => self.links.on_radio(core_now, link, None),
                _ => {}
            }
        }
        Ok(())
    }

    /// A new socket on a link that is up.
    fn attach(&mut self, name: &str, network: &mut SimNetwork) -> Vec<AttachedSocket> {
        let number = self.names.iter().position(|known| known == name);
        let Some(link) = number.filter(|link| network.is_up(*link)) else {
            return Vec::new();
        };
        network.open_socket(link);
        let socket = self.new_socket(link);
        vec![AttachedSocket {
            socket,
            remote: network.proxy_address(link),
        }]
    }

    /// First hops answer those that were asked, or are found silent.
    fn hear_hops(&mut self, now: Time, network: &SimNetwork) {
        for link in 0..self.asked.len() {
            let Some((since, ticket)) = self.asked[link] else {
                continue;
            };
            // At once, or when the hole is over by then.
            let answers =
                (now == since || now >= since + HOP_PATIENCE) && network.hop_answers(now, link);
            if !answers && now < since + HOP_PATIENCE {
                self.look_at = self.look_at.min(since + HOP_PATIENCE);
                continue;
            }
            self.asked[link] = None;
            let name = &self.names[link];
            self.links.on_hop_answer(name, ticket, Some(answers));
        }
    }

    /// Whether a half-duplex link carries: only then there are ACKs to be relieved of.
    fn contends(&self) -> bool {
        let paths = self.core().map(Session::path_stats).unwrap_or_default();
        let carries = |p: &PathStats| {
            p.state == PathState::Active && self.half_duplex[link_of(p.addresses.link)]
        };
        paths.iter().any(carries)
    }

    fn need(&self, now: Time, number: usize) -> Need {
        let spec = &self.specs[number];
        let spent: u64 = (0..self.classes.len())
            .filter(|l| self.classes[*l] != Class::Free)
            .map(|l| self.accounts[number].of_link(l))
            .sum();
        Need {
            remaining: self.remaining(number),
            left: spec.deadline_s.map(|by| Time::from_secs_f64(by).since(now)),
            policy: spec.policy,
            budget: spec.metered_bytes_max.map(|max| max.saturating_sub(spent)),
        }
    }

    /// The smoothed round trip over a link; zero before there is one.
    fn round_trip(&self, link: usize) -> Span {
        let stats = self.core().map(Session::path_stats).unwrap_or_default();
        let on_link = |path: &&PathStats| link_of(path.addresses.link) == link;
        let longest = stats.iter().filter(on_link).map(|path| path.rtt).max();
        longest.unwrap_or(Span::ZERO)
    }

    /// Meters run while their link is in use.
    fn measure(&mut self, now: Time, network: &SimNetwork, active: bool) {
        for link in 0..self.classes.len() {
            let granted = self
                .core()
                .zip(self.sockets[link])
                .is_some_and(|(s, socket)| {
                    let mut ids = self.transfers.iter().filter_map(|t| t.id);
                    s.has_path(socket)
                        && (self.classes[link] == Class::Free
                            || ids.any(|id| {
                                s.grant_left(id, socket).is_some_and(|(left, _)| left > 0)
                            }))
                });
            if active && network.is_up(link) && granted && !self.is_lent(link) {
                let round_trip = self.round_trip(link);
                self.meters[link].tick(now, round_trip);
            } else {
                self.meters[link].rest();
            }
        }
    }

    /// Whether a link carries but what others lose: that says nothing of its rate.
    fn is_lent(&self, link: usize) -> bool {
        let is_it =
            |p: &PathStats| link_of(p.addresses.link) == link && p.status == PathStatus::Standby;
        self.lends.is_some() && (self.core()).is_some_and(|s| s.path_stats().iter().any(is_it))
    }
}
