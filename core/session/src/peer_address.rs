//! The address of a session's peer, for packets beside the session: relayed packets are sent to the
//! address of the session's own packets, and are accepted only from there.

use d2tp_time::Time;
use d2tp_wire::ReasonCode;

use crate::link::{Addresses, LinkId};
use crate::path::{PathState, SessionPath};
use crate::session::Session;
use crate::session_state::Role;

impl SessionPath {
    fn leads_from(&self, at: &Addresses) -> bool {
        (self.addresses.link, self.addresses.remote) == (at.link, at.remote)
    }

    /// Whether the path's address is validated and the path answers.
    fn is_sound(&self) -> bool {
        self.validated && self.state == PathState::Active
    }
}

impl Session {
    /// Whether the peer is proved to be at these addresses: the session has a validated path there
    /// that answers.
    pub fn is_validated_at(&self, addresses: &Addresses) -> bool {
        let mut paths = self.paths.iter();
        paths.any(|p| p.is_sound() && p.leads_from(addresses))
    }

    /// The addresses of the best free path to the peer that answers, if there is one.
    pub fn best_peer_address(&self) -> Option<Addresses> {
        let free = self.paths.iter().filter(|p| p.is_sound() && !p.gated);
        free.min_by_key(|p| p.rank()).map(|p| p.addresses)
    }

    /// The addresses of the path over one link, if it answers and is free.
    pub fn peer_address_over(&self, link: LinkId) -> Option<Addresses> {
        let mut free = self.paths.iter().filter(|p| p.is_sound() && !p.gated);
        free.find(|p| p.addresses.link == link).map(|p| p.addresses)
    }

    /// The number of paths that can be opened before the peer has issued further ids.
    pub fn spare_paths(&self) -> usize {
        self.spare.len()
    }

    /// Closes the path with these addresses, whatever other paths its link has. The peer is
    /// informed on another path (R-PATH-8).
    pub fn abandon_path_at(&mut self, now: Time, addresses: &Addresses) {
        if self.role == Role::Responder {
            return;
        }
        if let Some(trace) = &mut self.trace {
            trace.at(now);
        }
        loop {
            let slot = self.paths.iter().position(|p| p.leads_from(addresses));
            let Some(slot) = slot else { break };
            let path = self.remove_path(slot);
            self.announce_gone(path);
        }
        self.suspend_if_idle(now, ReasonCode::NoPath);
    }
}
