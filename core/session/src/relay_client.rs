//! A device's side of relaying: the relays that it uses, and the punches that it expects.
//!
//! ```text
//!  core sends: to [100::relay id], link 3     ── relay_addresses ────▶ wrapped, over link 3 to the relay
//!  from the relay, 010rrrrr relay id …        ── classify_datagram ──▶ core receives: from [100::relay id], link 3
//! ```
//!
//! A listening device also has a link number that stands for the relay. Its session then does not
//! notice when the device moves, and its packets leave on the best path to the relay.

use std::collections::BTreeMap;

use crate::endpoint::Endpoint;
use crate::link::{Addresses, LinkId};
use crate::relay::{RELAY_HEADER_BYTES, RelayId, relayed_id};
use crate::session_id::SessionId;

/// R-RELAY-5: the most calls that a listening device accepts at once.
pub const CALLS_MAX: usize = 64; // a guess: far more than people make

/// A datagram that is not passed to the core unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InterceptedDatagram {
    /// A relayed packet: the core receives the inner packet as from these addresses.
    Relayed(Addresses),
    /// A punch for the rendezvous of this session.
    Punch(SessionId),
    /// A datagram to be dropped.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
struct UsedRelay {
    /// The device's session with the relaying host.
    by: SessionId,
    /// The link number that stands for the relay, if the path to the relay may change.
    floats: Option<LinkId>,
}

/// The relays that a device uses.
#[derive(Debug, Default)]
pub struct RelayClient {
    used: BTreeMap<RelayId, UsedRelay>,
    punches: BTreeMap<[u8; 8], SessionId>,
}

impl RelayClient {
    /// Whether datagrams need not be classified, because there is no relay and no punch is
    /// expected.
    pub fn is_idle(&self) -> bool {
        self.used.is_empty() && self.punches.is_empty()
    }

    /// Adds a relay that was opened in the device's session `by`.
    pub fn use_relay(&mut self, id: RelayId, by: SessionId) {
        self.used.insert(id, UsedRelay { by, floats: None });
    }

    /// Adds a relay on which a peer calls this device; `link` stands for it. Returns false if there
    /// are too many.
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

    /// Classifies a datagram; `None` if it is passed to the core unchanged.
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
        // R-RELAY-5: only from the relay itself.
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

    /// The real addresses for a packet to the address that stands for the relay; `None` if it
    /// cannot be sent now.
    pub fn relay_addresses(&self, core: &Endpoint, link: LinkId, id: RelayId) -> Option<Addresses> {
        let used = self.used.get(&id)?;
        let session = core.session(used.by)?;
        match used.floats {
            Some(_) => session.best_peer_address(),
            None => session.peer_address_over(link),
        }
    }
}
