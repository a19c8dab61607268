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

/// R-RELAY-5: calls that a listening device accepts at once.
pub const CALLS_MAX: usize = 64; // a guess: far more than people make

/// A datagram that is not for the core as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InterceptedDatagram {
    /// A relayed packet: for the core, the packet within came from these addresses.
    Relayed(Addresses),
    /// A punch for the rendezvous of this session.
    Punch(SessionId),
    /// A datagram to be dropped.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
struct UsedRelay {
    /// Our session with the relaying host.
    by: SessionId,
    /// The link number that stands for the relay, if the relay moves with us.
    floats: Option<LinkId>,
}

/// The relays that a device uses.
#[derive(Debug, Default)]
pub struct RelayClient {
    used: BTreeMap<RelayId, UsedRelay>,
    punches: BTreeMap<[u8; 8], SessionId>,
}

impl RelayClient {
    /// Whether datagrams need not be classified: there is no relay and no punch to expect.
    pub fn is_idle(&self) -> bool {
        self.used.is_empty() && self.punches.is_empty()
    }

    /// Adds a relay that was given to us in our session `by`.
    pub fn use_relay(&mut self, id: RelayId, by: SessionId) {
        self.used.insert(id, UsedRelay { by, floats: None });
    }

    /// Adds a relay by which a peer calls us; `link` stands for it. False if there are too many.
    pub fn take_call(&mut self, id: RelayId, by: SessionId, link: LinkId) -> bool {
        let calls = self.used.values().filter(|u| u.floats.is_some()).count();
        let takes = calls < CALLS_MAX && !self.used.contains_key(&id);
        if takes {
            let floats = Some(link);
            self.used.insert(id, UsedRelay { by, floats });
        }
        takes
    }

    /// Stops using a relay.
    pub fn leave_relay(&mut self, id: RelayId) {
        self.used.remove(&id);
    }

    /// Registers the punch id of a session's rendezvous.
    pub fn await_punch(&mut self, punch: [u8; 8], session: SessionId) {
        self.punches.insert(punch, session);
    }

    /// Stops taking punches for the rendezvous of a session.
    pub fn forget_punches(&mut self, session: SessionId) {
        self.punches.retain(|_, of| *of != session);
    }

    /// Classifies a datagram; none if it is for the core.
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

    /// The real addresses of a packet to the address that stands for the relay; none if it cannot be
    /// sent now.
    pub fn relay_addresses(&self, core: &Endpoint, link: LinkId, id: RelayId) -> Option<Addresses> {
        let used = self.used.get(&id)?;
        let session = core.session(used.by)?;
        match used.floats {
            Some(_) => session.best_peer_address(),
            None => session.peer_address_over(link),
        }
    }
}
