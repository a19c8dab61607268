//! Connects the simulated links with the production code: `d2tp-device` opens and closes paths and
//! issues grants, as the scheduler decides; its actions are carried out on simulated sockets.
//!
//! ```text
//!  network ──links──▶ DeviceLinks ──actions──▶ sockets (network.rs), session (core)
//!  scheduler (flow_clients.rs) ──spending──▶ ▲
//! ```
//!
//! It runs after an event of a link or a flow, as often as the driver while packets move, and when
//! flows have to report again; otherwise not at all, so hours of waiting cost nothing.

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::Class;
use d2tp_device::{ActionScope, AttachedSocket, LinkAction, LinkFacts, LinkUse, SessionPaths};
use d2tp_session::{FlowId, LinkId, PathStats};

use crate::device::{SimDevice, link_of};
use crate::fault::SimFault;
use crate::log::Log;
use crate::network::SimNetwork;
use crate::transfer::Progress;

/// How long an answer of a first hop is waited for, as in the driver.
const HOP_PATIENCE: Span = Span::from_millis(100);

/// The paths of a hibernated session: none, and it resumes when one is opened.
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

    fn is_carried(&self, _: FlowId) -> bool {
        false
    }
}

impl SimDevice {
    /// Updates links and flows, and carries out actions. Returns true if a permitted link carries
    /// packets.
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
        // Actions that the session's events caused.
        self.carry_out(now, network, log)?;
        self.hear_hops(now, network);
        let active: Vec<usize> = (0..self.transfers.len())
            .filter(|n| self.transfers[*n].progress == Progress::Active)
            .collect();
        self.show(now);
        let again = self.report_links(now, network, &active);
        self.carry_out(now, network, log)?;
        let statuses = self.with_links(now, |links, now, session| {
            links.observe(now, session);
            links.statuses(session)
        });
        self.schedule(now, network, &active, &statuses)?;
        self.carry_out(now, network, log)?;
        let due = self.links_due();
        if due <= now {
            (self.stirred, self.ticked_at) = (false, now);
            self.with_links(now, |links, now, session| links.on_time(now, session));
            self.carry_out(now, network, log)?;
        }
        let due = self.links_due().max(now + Span::from_nanos(1));
        let reports = self.clients.next_at().max(now + Span::from_nanos(1));
        self.look_at = self.look_at.min(again).min(due).min(reports);
        let spends = self.clients.any_spends();
        let permitted = |(facts, usage): &(LinkFacts, LinkUse)| match usage {
            _ if self.clients.resting.contains(&*facts.name) => false,
            LinkUse::Off => false,
            LinkUse::Free => self.is_good(network, facts),
            LinkUse::Paid => spends && self.is_good(network, facts),
        };
        Ok(!active.is_empty() && self.last_links.iter().any(permitted))
    }

    fn is_good(&self, network: &SimNetwork, facts: &LinkFacts) -> bool {
        let number = self.names.iter().position(|name| **name == *facts.name);
        number.is_some_and(|link| network.is_good(link))
    }

    /// When the links' timers are due, as with the driver's tick.
    fn links_due(&self) -> Time {
        let due = self.links.next_timeout();
        let due = due.map_or(Time::NEVER, |at| self.host.clock.run(at));
        match self.stirred {
            true => due.min(self.ticked_at + d2tp_device::TICK),
            false => due,
        }
    }

    /// Passes the links and the use of each to the state machine; all are off before the first
    /// flow. Returns when the strategy, if there is one, has to be called again.
    fn report_links(&mut self, now: Time, network: &SimNetwork, active: &[usize]) -> Time {
        let (picked, again) = match active.is_empty() {
            true => (vec![true; self.classes.len()], Time::NEVER),
            false => self.picked(now, network),
        };
        let usage = |link: usize| {
            let in_use = self.links.is_in_use(&self.names[link]);
            if !picked[link] {
                return self.leave(link, &picked, in_use);
            }
            match self.classes[link] {
                _ if active.is_empty() && !in_use => LinkUse::Off,
                Class::Free => LinkUse::Free,
                Class::Metered => LinkUse::Paid,
                // Roaming links are used only on request, which no scenario makes.
                Class::Roaming => LinkUse::Off,
            }
        };
        let present: Vec<(LinkFacts, LinkUse)> = (0..self.classes.len())
            .filter(|link| network.is_up(*link))
            .map(|link| (self.facts(link, network), usage(link)))
            .collect();
        if present != self.last_links {
            self.with_links(now, |links, now, session| {
                links.on_links(now, session, &present);
            });
            self.last_links = present;
        }
        again
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
            serial_rate: None,
            sleeps: false,
        }
    }

    /// Passes an input to the links' state machine, with the session's current state.
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

    /// Carries out the actions of the links' state machine.
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
                // A session that is over has no paths.
                let _ = (self.host.endpoint).with(id, |s| action.apply(core_now, s));
            }
            match &action {
                LinkAction::Attach { link, ticket } => {
                    let made = self.attach(link, network);
                    self.links.on_socket(core_now, link, *ticket, made);
                }
                LinkAction::DropSocket { socket } => {
                    if let Some(stream) = self.streams.remove(socket) {
                        network.streams.drop_now(stream);
                        continue;
                    }
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
                LinkAction::ClosePath { socket } if self.streams.contains_key(socket) => {
                    self.closing.push(*socket);
                }
                LinkAction::OpenStream { link, ticket } => {
                    let number = self.names.iter().position(|name| **name == **link);
                    match number.filter(|number| network.is_up(*number)) {
                        Some(number) => network.open_stream(now, number, *ticket),
                        None => {
                            let failure = d2tp_device::StreamFailure::Unreachable;
                            self.links.on_stream(core_now, link, *ticket, Err(failure));
                        }
                    }
                }
                LinkAction::ReadRadio { link, .. } => self.links.on_radio(core_now, link, None),
                _ => {}
            }
        }
        Ok(())
    }

    /// Opens a new socket on a link that is up.
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

    /// Delivers the answers of first hops that were asked, or their silence.
    fn hear_hops(&mut self, now: Time, network: &SimNetwork) {
        for link in 0..self.asked.len() {
            let Some((since, ticket)) = self.asked[link] else {
                continue;
            };
            // At once, or when the outage is over by then.
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
}
