//! Links that may be out of order without a lost address: questions to their first hop, counters of
//! their radio, and the freezing of their paths.

use d2tp_session::LinkId;
use d2tp_time::Time;

use super::{DeviceLinks, drop_all};
use crate::action::LinkAction;
use crate::facts::SessionPaths;

impl DeviceLinks {
    /// Stops using a link until [`DeviceLinks::unfreeze`], and keeps its sockets.
    pub fn freeze(&mut self, now: Time, name: &str) {
        if let Some(link) = self.links.get_mut(name) {
            link.health.frozen_by_program = true;
        }
        self.apply_freezes(now);
    }

    /// Resumes a link that was frozen by [`DeviceLinks::freeze`].
    pub fn unfreeze(&mut self, now: Time, session: &dyn SessionPaths, name: &str) {
        if let Some(link) = self.links.get_mut(name) {
            link.health.frozen_by_program = false;
        }
        self.apply_freezes(now);
        self.observe(now, session);
        self.update_paths(now);
    }

    /// Handles a path that has received nothing for a while, although an answer was due.
    pub fn on_path_quiet(&mut self, now: Time, socket: LinkId) {
        self.ask_hop_of(now, socket, true);
    }

    /// Answers [`LinkAction::AskFirstHop`]; `None` if the first hop cannot be asked.
    pub fn on_hop_answer(&mut self, name: &str, ticket: u64, answer: Option<bool>) {
        let Some(link) = self.links.get_mut(name) else {
            return;
        };
        let Some((question, hop)) = link.health.end_question(ticket, answer) else {
            return;
        };
        if question.quiet {
            let said = |socket| LinkAction::FirstHopSaid {
                socket,
                since: question.since,
                hop,
            };
            self.actions.extend(link.socket_ids().map(said));
        }
    }

    /// Answers [`LinkAction::ReadRadio`]: whether transmissions failed since the previous reading;
    /// `None` if the radio does not report it.
    pub fn on_radio(&mut self, now: Time, name: &str, fails: Option<bool>) {
        let Some(link) = self.links.get_mut(name) else {
            return;
        };
        link.health.reading_radio = false;
        match fails {
            None => link.health.radio_unsupported = true,
            Some(false) => {}
            Some(true) => self.ask_hop(now, name, true),
        }
    }

    /// Reads radio counters while payload moves, because failed transmissions show an outage before
    /// silence does.
    pub(super) fn read_radios(&mut self) {
        if !self.is_moving {
            return;
        }
        for link in self.links.values_mut() {
            let health = &mut link.health;
            let readable = link.facts.half_duplex && !link.sockets.is_empty();
            let barred = health.radio_unsupported || health.reading_radio || health.keeps_sockets();
            if !readable || barred {
                continue;
            }
            health.reading_radio = true;
            let first = !std::mem::replace(&mut health.radio_read, true);
            let link = link.facts.name.clone();
            self.actions
                .push_back(LinkAction::ReadRadio { link, first });
        }
    }

    /// Applies requests to freeze and unfreeze links.
    pub(super) fn apply_freezes(&mut self, now: Time) {
        for link in self.links.values_mut() {
            let freeze = link.health.keeps_sockets() && !link.sockets.is_empty();
            if freeze == link.health.frozen {
                continue;
            }
            link.health.frozen = freeze;
            if !freeze {
                // The link's paths have to answer again from now on.
                link.opened_at = now;
            }
            let action = |socket| match freeze {
                true => LinkAction::Freeze { socket },
                false => LinkAction::Unfreeze { socket },
            };
            self.actions.extend(link.socket_ids().map(action));
        }
    }

    /// Drops links whose carrier has been lost for too long.
    pub(super) fn drop_lost_carriers(&mut self, now: Time) {
        for link in self.links.values_mut() {
            if link.health.given_up_at().is_some_and(|at| at <= now) {
                drop_all(&mut self.actions, link.take_sockets());
            }
        }
    }

    pub(super) fn ask_hop_of(&mut self, now: Time, socket: LinkId, quiet: bool) {
        let mut links = self.links.values();
        if let Some(link) = links.find(|link| link.has_socket(socket)) {
            let name = link.facts.name.clone();
            self.ask_hop(now, &name, quiet);
        }
    }

    fn ask_hop(&mut self, now: Time, name: &str, quiet: bool) {
        let ticket = self.ticket();
        let Some(link) = self.links.get_mut(name) else {
            return;
        };
        if link.health.begin_question(now, ticket, quiet) {
            let link = link.facts.name.clone();
            self.actions
                .push_back(LinkAction::AskFirstHop { link, ticket });
        }
    }
}
