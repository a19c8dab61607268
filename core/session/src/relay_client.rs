//! A device's side of relaying: which relays it uses, and whose punches it waits for.
//!
//! ```text
//!  core says: to [100::relay id], link 3   ── way_out ──▶ wrapped, over link 3 to the relay
//!  from the relay, 010rrrrr relay id …     ── take_in ──▶ core hears: from [100::relay id], link 3
//! ```
//!
//! Who listens has a link that stands for the relay as well: then its session does not notice that it
//! moves, and what it says leaves by the best way there is.

use std::collections::BTreeMap;

use crate::endpoint::{Endpoint, SessionId};
use crate::link::{Addresses, LinkId};
use crate::relay::{RELAY_HEADER_BYTES, RelayId, relayed_id};

/// R-RELAY-5: calls a listening device takes at once.
pub const CALLS_MAX: usize = 64; // a guess: far more than people make

/// What a datagram is that is not the core's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InterceptedDatagram {
    /// The packet was relayed: the one within came from there, as far as the core is concerned.
    Relayed(Addresses),
    /// A punch for the rendezvous of this session.
    Punch(SessionId),
    /// Nobody's.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
struct UsedRelay {
    /// Our session with the relay.
    by: SessionId,
    /// The link that stands for it, if it moves with us.
    floats: Option<LinkId>,
}

/// What relays a device uses.
#[derive(Debug, Default)]
pub struct RelayClient {
    used: BTreeMap<RelayId, UsedRelay>,
    punches: BTreeMap<[u8; 8], SessionId>,
}

impl RelayClient {
    /// Whether there is nothing to look for in datagrams.
    pub fn is_idle(&self) -> bool {
        self.used.is_empty() && self.punches.is_empty()
    }

    /// A relay that was given to us in our session `by`.
    pub fn use_relay(&mut self, id: RelayId, by: SessionId) {
        self.used.insert(id, UsedRelay { by, floats: None });
    }

    /// A relay by which somebody calls us; `link` stands for it. False if there are too many.
    pub fn take_call(&mut self, id: RelayId, by: SessionId, link: LinkId) -> bool {
        let calls = self.used.values().filter(|u| u.floats.is_some()).count();
        let takes = calls < CALLS_MAX && !self.used.contains_key(&id);
        if takes {
            let floats = Some(link);
            self.used.insert(id, UsedRelay { by, floats });
        }
        takes
    }

    /// A relay is used no more.
    pub fn leave_relay(&mut self, id: RelayId) {
        self.used.remove(&id);
    }

    /// Punches with this id are for the rendezvous of a session.
    pub fn await_punch(&mut self, punch: [u8; 8], session: SessionId) {
        self.punches.insert(punch, session);
    }

    /// Stops taking punches for the rendezvous of a session.
    pub fn forget_punches(&mut self, session: SessionId) {
        self.punches.retain(|_, of| *of != session);
    }

    /// What a datagram is; none: the core's.
    pub fn classify_datagram(
        &self,
        core: &Endpoint,
        from: &Addresses,
        datagram: &[u8],
    ) -> Option<InterceptedDatagram> {
        let id = relayed_id(datagram)?;
        if let Some(session) = self.punches.get(&id) {
            return Some(InterceptedDatagram::Punch(*session));
        }
        let used = self.used.get(&RelayId(id))?;
        // R-RELAY-5: from the relay itself, and nobody else.
        let session = core.session(used.by);
        let fits = datagram.len() > RELAY_HEADER_BYTES;
        if !fits || !session.is_some_and(|s| s.is_validated_at(from)) {
            return Some(InterceptedDatagram::Nothing);
        }
        Some(InterceptedDatagram::Relayed(Addresses {
            link: used.floats.unwrap_or(from.link),
            local: None,
            remote: RelayId(id).address(),
        }))
    }

    /// How a packet to the address that stands for a relay really leaves; none: not at all, for now.
    pub fn relay_addresses(&self, core: &Endpoint, link: LinkId, id: RelayId) -> Option<Addresses> {
        let used = self.used.get(&id)?;
        let session = core.session(used.by)?;
        match used.floats {
            Some(_) => session.best_peer_address(),
            None => session.peer_address_over(link),
        }
    }
}
