//! Relaying: packets of a session that is not ours, passed on sealed.
//!
//! ```text
//!  device A ══ its session with the relay ══ relay ══ B's session with it ══ device B (listens)
//!     │                                        └────── UDP ──────▶ origin
//!     └ 010rrrrr │ relay id 8 │ packet of A's session with B ┘
//! ```
//!
//! A relayed packet looks like a DATA packet, with the relay's id where a connection id would be. It
//! is taken only from where the session that asked for the relay is proved to be, and what comes back
//! goes to such a place: knowing an id is worth nothing. Nothing is queued, opened or answered here.
//!
//! To a session's core a relayed path is one like any other, to the address that stands for the relay
//! ([`RelayId::address`]).

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::str::FromStr;

use d2tp_seal::{PublicKey, Rng};
use d2tp_wire::{CID_BYTES, PacketKind};

use crate::endpoint::{Admission, Endpoint, SessionId};
use crate::link::Addresses;

/// Bytes before a relayed packet: a first byte and the relay's id.
pub const RELAY_HEADER_BYTES: usize = 1 + CID_BYTES;
/// R-RELAY-3: packets forwarded to an address from which nothing came back yet. A device sends ten SYNs
/// before its interval grows.
pub const UNANSWERED_MAX: u32 = 16;
/// The size of the smallest packet, UNKNOWN.
const PACKET_BYTES_MIN: usize = 25;

/// The id of a relay on the wire: random, issued by the relaying host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelayId(pub [u8; CID_BYTES]);

impl RelayId {
    /// The address that stands for the relay in paths. No host has it: packets to this block are
    /// discarded. // RFC 6666
    pub fn address(self) -> SocketAddr {
        let [a, b, c, d, e, f, g, h] = self.0;
        let low = [[a, b], [c, d], [e, f], [g, h]].map(u16::from_be_bytes);
        let ip = Ipv6Addr::new(0x100, 0, 0, 0, low[0], low[1], low[2], low[3]);
        SocketAddr::from((ip, 0))
    }

    /// The relay that an address stands for, if it does.
    pub fn of(address: &SocketAddr) -> Option<RelayId> {
        let SocketAddr::V6(v6) = address else {
            return None;
        };
        let bytes = v6.ip().octets();
        let stands = v6.port() == 0 && bytes[..8] == [1, 0, 0, 0, 0, 0, 0, 0];
        stands.then(|| RelayId(bytes[8..].try_into().expect("eight of sixteen")))
    }
}

impl fmt::Display for RelayId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl fmt::Debug for RelayId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RelayId({self})")
    }
}

impl FromStr for RelayId {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(RelayId(u64::from_str_radix(text, 16)?.to_be_bytes()))
    }
}

/// The relay id in a datagram, in the place of a connection id, if the datagram could be a relayed
/// packet or a DATA packet.
pub fn relayed_id(datagram: &[u8]) -> Option<[u8; CID_BYTES]> {
    match PacketKind::split(datagram)? {
        (PacketKind::Data, _, cid, _) => Some(cid.0),
        _ => None,
    }
}

/// The packet within a relayed one; none if it is no D2TP packet.
pub fn unwrap_relayed(datagram: &mut [u8]) -> Option<&mut [u8]> {
    let packet = datagram.get_mut(RELAY_HEADER_BYTES..)?;
    is_packet(packet).then_some(packet)
}

fn is_packet(bytes: &[u8]) -> bool {
    bytes.len() >= PACKET_BYTES_MIN && PacketKind::split(bytes).is_some()
}

/// Appends a packet in its relayed form. Its low bits stand in for random ones.
pub fn wrap_relayed(id: RelayId, packet: &[u8], out: &mut Vec<u8>) {
    let low = packet.first().map_or(0, |first| first & 0x1f);
    out.push(PacketKind::Data.first_byte() | low);
    out.extend(id.0);
    out.extend(packet);
}

/// Why a relay was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RelayRefusal {
    /// The device has as many clients as it may.
    #[error("this client has {0} relays, which is its limit")]
    ClientFull(usize),
    /// The host has as many relays as it allows.
    #[error("there are {0} relays, which is the limit")]
    Full(usize),
    /// No device with that key listens, or not to this caller. Both get the same answer, so that
    /// callers cannot find out which devices are there.
    #[error("nobody of that name listens here to this client")]
    NobodyListens,
    /// The session is over.
    #[error("the session is over")]
    NoSession,
}

/// The most relays of a host (R-RELAY-4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelayLimits {
    /// Relays of one client key.
    pub client: usize,
    /// Relays of all clients.
    pub all: usize,
}

/// The destination of a relayed packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForwardTarget {
    /// The packet goes out unchanged, to the address that its relay leads to.
    Outside(RelayId),
    /// The packet goes to a device, under another relay id.
    Device(RelayId, Addresses),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RelayDestination {
    /// An address that the owner of the table knows, and packets to it without an answer.
    Outside { unanswered: Option<u32> },
    /// The other half of a call between two devices.
    Device(RelayId),
}

#[derive(Debug)]
struct OpenRelay {
    device: SessionId,
    client: PublicKey,
    toward: RelayDestination,
    /// Where the device's last packet came from.
    at: Option<Addresses>,
}

/// The open relays of a host, and the devices that listen.
pub struct RelayTable {
    limits: RelayLimits,
    rng: Rng,
    open: BTreeMap<RelayId, OpenRelay>,
    listeners: BTreeMap<PublicKey, (SessionId, Admission)>,
    moved: bool,
}

impl RelayTable {
    /// A table without relays. `seed` must be fresh.
    pub fn new(limits: RelayLimits, seed: [u8; 32]) -> RelayTable {
        RelayTable {
            limits,
            rng: Rng::new(seed),
            open: BTreeMap::new(),
            listeners: BTreeMap::new(),
            moved: false,
        }
    }

    /// The number of relays; a call has two.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether there are no relays.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether the id is one of these relays.
    pub fn contains(&self, id: RelayId) -> bool {
        self.open.contains_key(&id)
    }

    /// A relay for a device to an address outside.
    ///
    /// # Errors
    /// It has too many, or there are.
    pub fn open(&mut self, core: &Endpoint, device: SessionId) -> Result<RelayId, RelayRefusal> {
        let client = self.admit(core, device, 1)?;
        let toward = RelayDestination::Outside {
            unanswered: Some(0),
        };
        Ok(self.insert(device, client, toward))
    }

    /// From now on others may call this device by its key, those whom it admits. An earlier session of
    /// the same key listens no more.
    ///
    /// # Errors
    /// The session is over.
    pub fn listen(
        &mut self,
        core: &Endpoint,
        device: SessionId,
        callers: Admission,
    ) -> Result<(), RelayRefusal> {
        let client = core.session(device).ok_or(RelayRefusal::NoSession)?.peer();
        self.listeners.insert(client, (device, callers));
        Ok(())
    }

    /// Ends a device's registration as a listener. Relayed connections continue.
    pub fn stop_listening(&mut self, device: SessionId) {
        self.listeners.retain(|_, (session, _)| *session != device);
    }

    /// A relay between a device and one that listens: the caller's id and the listener's, and whose
    /// session that is.
    ///
    /// # Errors
    /// Nobody of that key listens to this caller, or there are too many.
    pub fn call(
        &mut self,
        core: &Endpoint,
        device: SessionId,
        to: PublicKey,
    ) -> Result<(RelayId, RelayId, SessionId), RelayRefusal> {
        let caller = self.admit(core, device, 2)?;
        let (listener, callers) = self.listeners.get(&to).ok_or(RelayRefusal::NobodyListens)?;
        if !callers.admits(&caller) || core.session(*listener).is_none() {
            return Err(RelayRefusal::NobodyListens);
        }
        let listener = *listener;
        let theirs = RelayId(self.rng.array());
        let own = self.insert(device, caller, RelayDestination::Device(theirs));
        let relay = OpenRelay {
            device: listener,
            // Both halves are the caller's: whoever listens cannot be filled up by others.
            client: caller,
            toward: RelayDestination::Device(own),
            at: None,
        };
        self.open.insert(theirs, relay);
        Ok((own, theirs, listener))
    }

    /// R-RELAY-4: checks whether a device may open that many more relays.
    fn admit(
        &self,
        core: &Endpoint,
        device: SessionId,
        more: usize,
    ) -> Result<PublicKey, RelayRefusal> {
        let client = core.session(device).ok_or(RelayRefusal::NoSession)?.peer();
        if self.open.len() + more > self.limits.all {
            return Err(RelayRefusal::Full(self.limits.all));
        }
        let own = self.open.values().filter(|r| r.client == client).count();
        if own + more > self.limits.client {
            return Err(RelayRefusal::ClientFull(self.limits.client));
        }
        Ok(client)
    }

    fn insert(
        &mut self,
        device: SessionId,
        client: PublicKey,
        toward: RelayDestination,
    ) -> RelayId {
        let id = RelayId(self.rng.array());
        let relay = OpenRelay {
            device,
            client,
            toward,
            at: None,
        };
        self.open.insert(id, relay);
        id
    }

    /// Closes a relay, and the other half of its call. Returns the id of that half and its session.
    pub fn close(&mut self, id: RelayId) -> Option<(RelayId, SessionId)> {
        let RelayDestination::Device(other) = self.open.remove(&id)?.toward else {
            return None;
        };
        Some((other, self.open.remove(&other)?.device))
    }

    /// Whether a device's packets came from a new address since the last call.
    pub fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    /// The destination of a packet from a device, if there is one. `datagram` is the relayed form,
    /// `from` its source.
    pub fn forward_from_device(
        &mut self,
        core: &Endpoint,
        id: RelayId,
        from: &Addresses,
        packet: &[u8],
    ) -> Option<ForwardTarget> {
        let relay = self.open.get_mut(&id)?;
        // R-RELAY-1: ids are no proof; the place is, and only the session it belongs to.
        if !core.session(relay.device)?.is_validated_at(from) {
            return None;
        }
        // R-RELAY-2: nothing but D2TP goes through.
        if !is_packet(packet) {
            return None;
        }
        self.moved |= relay.at != Some(*from);
        relay.at = Some(*from);
        match &mut relay.toward {
            RelayDestination::Outside { unanswered } => {
                if let Some(said) = unanswered {
                    // R-RELAY-3: who does not answer is not bothered on.
                    if *said >= UNANSWERED_MAX {
                        return None;
                    }
                    *said += 1;
                }
                Some(ForwardTarget::Outside(id))
            }
            RelayDestination::Device(other) => {
                let other = *other;
                let to = self.place_of(core, other)?;
                Some(ForwardTarget::Device(other, to))
            }
        }
    }

    /// The destination of a packet that came back from outside.
    pub fn forward_to_device(
        &mut self,
        core: &Endpoint,
        id: RelayId,
        packet: &[u8],
    ) -> Option<Addresses> {
        // R-RELAY-2
        if !is_packet(packet) {
            return None;
        }
        let relay = self.open.get_mut(&id)?;
        let RelayDestination::Outside { unanswered } = &mut relay.toward else {
            return None;
        };
        // R-RELAY-3: nobody speaks first to a device that asked for nothing.
        if *unanswered == Some(0) {
            return None;
        }
        *unanswered = None;
        self.place_of(core, id)
    }

    /// R-RELAY-1: the address of the device that owns a relay: where it last used the relay from, if
    /// the device is still there, else the best free path.
    fn place_of(&self, core: &Endpoint, id: RelayId) -> Option<Addresses> {
        let relay = self.open.get(&id)?;
        let session = core.session(relay.device)?;
        let at = relay.at.filter(|at| session.is_validated_at(at));
        at.or_else(|| session.best_peer_address())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relays_address_names_it_and_nobody_else_has_one() {
        let id = RelayId([1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(id.address().to_string(), "[100::102:304:506:708]:0");
        assert_eq!(RelayId::of(&id.address()), Some(id));
        assert_eq!(id.to_string().parse(), Ok(id));
        for other in [
            "[100::1]:1",
            "[100:0:0:1::1]:0",
            "192.0.2.1:0",
            "[2001:db8::1]:0",
        ] {
            assert_eq!(RelayId::of(&other.parse().unwrap()), None, "{other}");
        }
    }

    #[test]
    fn packets_come_out_as_they_went_in() {
        let id = RelayId([9; 8]);
        let packets: Vec<u8> = (0..70u8).map(|n| 0b010_00000 | n & 0x1f).collect();
        let mut out = Vec::new();
        packets
            .chunks(30)
            .for_each(|p| wrap_relayed(id, p, &mut out));
        assert_eq!(out.len(), 70 + 3 * RELAY_HEADER_BYTES);
        let (mut first, last) = (out[..39].to_vec(), &mut out[78..].to_vec());
        assert_eq!(relayed_id(&first), Some(id.0));
        assert_eq!(
            unwrap_relayed(&mut first),
            Some(&mut packets[..30].to_vec()[..])
        );
        assert_eq!(unwrap_relayed(last), None, "ten bytes are no packet");
    }
}
