//! Relaying: forwards sealed packets of sessions between other hosts.
//!
//! ```text
//!  device A ══ its session with the relay ══ relay ══ B's session with it ══ device B (listens)
//!     │                                        └────── UDP ──────▶ origin
//!     └ 010rrrrr │ relay id 8 │ packet of A's session with B ┘
//! ```
//!
//! A relayed packet looks like a DATA packet, with the relay's id where a connection id would be.
//! It is accepted only from a validated address of the session that requested the relay, and
//! answers are sent only to such an address, so that knowing an id is not enough. Packets are not
//! queued, decrypted or answered here.
//!
//! For a session a relayed path is like any other path, with an address that stands for the relay
//! ([`RelayId::address`]).
//!
//! A host with several workers has a table in each, for the relays of that worker's clients. A relay's id leads to its
//! worker, as connection ids do. The halves of a call may be in two workers: the caller's forwards a packet to the
//! listener's, which knows where the listener is.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::str::FromStr;

use d2tp_seal::{PublicKey, Rng};
use d2tp_wire::{CID_BYTES, PacketKind};

use crate::cid_share;
use crate::endpoint::{Admission, Endpoint};
use crate::link::Addresses;
use crate::session_id::SessionId;

/// Bytes before a relayed packet: a first byte and the relay's id.
pub const RELAY_HEADER_BYTES: usize = 1 + CID_BYTES;
/// R-RELAY-3: the most packets that are forwarded to an address without an answer from there. A
/// device sends ten SYNs before its interval grows.
pub const UNANSWERED_MAX: u32 = 16;
/// The size of the smallest packet, UNKNOWN.
const PACKET_BYTES_MIN: usize = 25;

/// The id of a relay on the wire: random, issued by the relaying host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelayId(pub [u8; CID_BYTES]);

impl RelayId {
    /// The address that stands for the relay in paths. No host has it, because packets to this
    /// block are discarded. // RFC 6666
    pub fn address(self) -> SocketAddr {
        let [a, b, c, d, e, f, g, h] = self.0;
        let low = [[a, b], [c, d], [e, f], [g, h]].map(u16::from_be_bytes);
        let ip = Ipv6Addr::new(0x100, 0, 0, 0, low[0], low[1], low[2], low[3]);
        SocketAddr::from((ip, 0))
    }

    /// The relay that an address stands for; `None` for other addresses.
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

/// The relay id in a datagram, at the position of a connection id, if the datagram could be a
/// relayed packet or a DATA packet.
pub fn relayed_id(datagram: &[u8]) -> Option<[u8; CID_BYTES]> {
    match PacketKind::split(datagram)? {
        (PacketKind::Data, _, cid, _) => Some(cid.0),
        _ => None,
    }
}

/// The packet within a relayed one; `None` if it is no D2TP packet.
pub fn unwrap_relayed(datagram: &mut [u8]) -> Option<&mut [u8]> {
    let packet = datagram.get_mut(RELAY_HEADER_BYTES..)?;
    is_packet(packet).then_some(packet)
}

fn is_packet(bytes: &[u8]) -> bool {
    bytes.len() >= PACKET_BYTES_MIN && PacketKind::split(bytes).is_some()
}

/// Appends a packet in its relayed form. The low bits of the packet's first byte serve as random
/// bits.
pub fn wrap_relayed(id: RelayId, packet: &[u8], out: &mut Vec<u8>) {
    let low = packet.first().map_or(0, |first| first & 0x1f);
    out.push(PacketKind::Data.first_byte() | low);
    out.extend(id.0);
    out.extend(packet);
}

/// Why a relay was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RelayRefusal {
    /// The device has as many relays as one client may have; the limit is given.
    #[error("this client has {0} relays, which is its limit")]
    ClientFull(usize),
    /// The host has as many relays as it allows; the limit is given.
    #[error("there are {0} relays, which is the limit")]
    Full(usize),
    /// The device has no memory left for a relay.
    #[error("there is no memory for another relay of this client")]
    NoMemory,
    /// No device with that key listens, or it does not admit this caller. Both get the same answer,
    /// so that callers cannot find out which devices are there.
    #[error("nobody of that name listens here to this client")]
    NobodyListens,
    /// The session is over.
    #[error("the session is over")]
    NoSession,
}

/// The most relays that a host allows (R-RELAY-4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelayLimits {
    /// The most relays of one client key.
    pub client: usize,
    /// The most relays of all clients together.
    pub all: usize,
}

/// The destination of a relayed packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForwardTarget {
    /// The packet is sent unchanged to the external address of its relay.
    Outside(RelayId),
    /// The packet is sent to a device, with another relay id.
    Device(RelayId, Addresses),
    /// The packet is passed to the worker of the device, which sends it with this other relay id.
    Worker(CallHalf),
}

/// A relay that is a half of a call between devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallHalf {
    /// The index of the worker in whose table the relay is; 0 where there is only one.
    pub worker: u16,
    /// The id of the relay.
    pub id: RelayId,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RelayDestination {
    /// An external address, which the owner of the table knows. `unanswered`: packets sent there
    /// without an answer.
    Outside { unanswered: Option<u32> },
    /// The other half of a call between two devices; `None` until the listener's worker has answered.
    Device(Option<CallHalf>),
}

#[derive(Debug)]
struct OpenRelay {
    device: SessionId,
    client: PublicKey,
    toward: RelayDestination,
    /// The addresses from which the device's last packet came.
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

    /// The number of relays. A call between two devices has two.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether the table has no relays.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether the table has a relay with this id.
    pub fn contains(&self, id: RelayId) -> bool {
        self.open.contains_key(&id)
    }

    /// Opens a relay from a device to an external address.
    ///
    /// # Errors
    /// The device or the host has too many relays.
    pub fn open(&mut self, core: &Endpoint, device: SessionId) -> Result<RelayId, RelayRefusal> {
        let client = self.admit(core, device, 1)?;
        let toward = RelayDestination::Outside {
            unanswered: Some(0),
        };
        Ok(self.insert(core, device, client, toward))
    }

    /// Registers this device as a listener: other devices, if it admits them, may call it by its
    /// key. An earlier session of the same key stops listening.
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

    /// Opens a relay between a calling device and one that listens, both of this worker. Returns the caller's id, the
    /// listener's id, and the listener's session.
    ///
    /// # Errors
    /// No device with that key listens to this caller, or there are too many relays.
    pub fn call(
        &mut self,
        core: &Endpoint,
        device: SessionId,
        to: PublicKey,
    ) -> Result<(RelayId, RelayId, SessionId), RelayRefusal> {
        let (caller, own) = self.begin_call(core, device)?;
        let answered = self.answer_call(core, caller, own, to);
        let (theirs, listener) = answered.inspect_err(|_| {
            self.open.remove(&own.id);
        })?;
        self.complete_call(own.id, theirs);
        Ok((own.id, theirs.id, listener))
    }

    /// Opens the caller's half of a call, which [`RelayTable::answer_call`] of the listener's worker answers and
    /// [`RelayTable::complete_call`] of this one completes. Returns the caller's key and the half, which the caller of
    /// this function closes if the call is refused.
    ///
    /// # Errors
    /// The device or the host has too many relays, or the session is over.
    pub fn begin_call(
        &mut self,
        core: &Endpoint,
        device: SessionId,
    ) -> Result<(PublicKey, CallHalf), RelayRefusal> {
        let caller = self.admit(core, device, 2)?;
        let id = self.insert(core, device, caller, RelayDestination::Device(None));
        let worker = core.worker_index();
        Ok((caller, CallHalf { worker, id }))
    }

    /// Opens the listener's half of a call from the device with the key `caller`, whose own half is `calling`. Returns the
    /// half and the listener's session.
    ///
    /// # Errors
    /// No device with the key `to` listens to this caller, or there are too many relays.
    pub fn answer_call(
        &mut self,
        core: &Endpoint,
        caller: PublicKey,
        calling: CallHalf,
        to: PublicKey,
    ) -> Result<(CallHalf, SessionId), RelayRefusal> {
        let (listener, callers) = self.listeners.get(&to).ok_or(RelayRefusal::NobodyListens)?;
        if !callers.admits(&caller) || core.session(*listener).is_none() {
            return Err(RelayRefusal::NobodyListens);
        }
        if self.open.len() >= self.limits.all {
            return Err(RelayRefusal::Full(self.limits.all));
        }
        let listener = *listener;
        // Both halves count for the caller, so that callers cannot use up a listener's relays.
        let destination = RelayDestination::Device(Some(calling));
        let id = self.insert(core, listener, caller, destination);
        let worker = core.worker_index();
        Ok((CallHalf { worker, id }, listener))
    }

    /// Joins the caller's half of a call to the listener's.
    pub fn complete_call(&mut self, own: RelayId, theirs: CallHalf) {
        if let Some(relay) = self.open.get_mut(&own) {
            relay.toward = RelayDestination::Device(Some(theirs));
        }
    }

    /// R-RELAY-4: checks whether a device may open this many more relays.
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
        // The other half of a call may be in another worker.
        let count = |relay: &OpenRelay| match relay.toward {
            RelayDestination::Device(Some(other)) if other.worker != core.worker_index() => 2,
            _ => 1,
        };
        let relays = self.open.values().filter(|r| r.client == client);
        let own: usize = relays.map(count).sum();
        if own + more > self.limits.client {
            return Err(RelayRefusal::ClientFull(self.limits.client));
        }
        Ok(client)
    }

    fn insert(
        &mut self,
        core: &Endpoint,
        device: SessionId,
        client: PublicKey,
        toward: RelayDestination,
    ) -> RelayId {
        // R-RELAY-9
        let id = RelayId(cid_share::draw(core.cid_shares(), &mut self.rng).0);
        let relay = OpenRelay {
            device,
            client,
            toward,
            at: None,
        };
        self.open.insert(id, relay);
        id
    }

    /// The number of open calls in which a device takes part.
    pub fn calls(&self, device: SessionId) -> usize {
        let is_call = |relay: &&OpenRelay| {
            relay.device == device && matches!(relay.toward, RelayDestination::Device(_))
        };
        self.open.values().filter(is_call).count()
    }

    /// Who opened a relay, and whether this half of it is that client's own: the other half of a call belongs to the
    /// device that was called.
    pub fn client(&self, core: &Endpoint, id: RelayId) -> Option<(PublicKey, bool)> {
        let relay = self.open.get(&id)?;
        let is_own = match relay.toward {
            RelayDestination::Outside { .. } => true,
            RelayDestination::Device(_) => core.session(relay.device)?.peer() == relay.client,
        };
        Some((relay.client, is_own))
    }

    /// Closes a relay. Returns the other half of its call, which [`RelayTable::hang_up`] closes in its worker's table.
    pub fn close(&mut self, id: RelayId) -> Option<CallHalf> {
        match self.open.remove(&id)?.toward {
            RelayDestination::Device(other) => other,
            RelayDestination::Outside { .. } => None,
        }
    }

    /// Closes the half of a call whose other half was closed. Returns the session of its device.
    pub fn hang_up(&mut self, id: RelayId) -> Option<SessionId> {
        Some(self.open.remove(&id)?.device)
    }

    /// Whether a device's packets came from a new address since the last call.
    pub fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    /// Where to forward a packet from a device; `None` drops it. `datagram` is the relayed form,
    /// `from` its source.
    pub fn forward_from_device(
        &mut self,
        core: &Endpoint,
        id: RelayId,
        from: &Addresses,
        packet: &[u8],
    ) -> Option<ForwardTarget> {
        let relay = self.open.get_mut(&id)?;
        // R-RELAY-1: an id proves nothing. Only a validated address of the session that owns the
        // relay does.
        if !core.session(relay.device)?.is_validated_at(from) {
            return None;
        }
        // R-RELAY-2: only D2TP packets are forwarded.
        if !is_packet(packet) {
            return None;
        }
        self.moved |= relay.at != Some(*from);
        relay.at = Some(*from);
        match &mut relay.toward {
            RelayDestination::Outside { unanswered } => {
                if let Some(said) = unanswered {
                    // R-RELAY-3: a host that does not answer gets no further packets.
                    if *said >= UNANSWERED_MAX {
                        return None;
                    }
                    *said += 1;
                }
                Some(ForwardTarget::Outside(id))
            }
            RelayDestination::Device(other) => {
                let other = (*other)?;
                if other.worker != core.worker_index() {
                    return Some(ForwardTarget::Worker(other));
                }
                let to = self.owner_address(core, other.id)?;
                Some(ForwardTarget::Device(other.id, to))
            }
        }
    }

    /// Where to forward a packet that an external host sent back; `None` drops it.
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
        // R-RELAY-3: a host may not send to a device that has sent it nothing.
        if *unanswered == Some(0) {
            return None;
        }
        *unanswered = None;
        self.owner_address(core, id)
    }

    /// Where to send packets of a call that another worker of this host forwarded, to the device of this half; `None`
    /// drops them.
    pub fn forward_from_worker(&self, core: &Endpoint, id: RelayId) -> Option<Addresses> {
        match self.open.get(&id)?.toward {
            RelayDestination::Device(_) => self.owner_address(core, id),
            RelayDestination::Outside { .. } => None,
        }
    }

    /// R-RELAY-1: the address of the device that owns a relay: where it last used the relay, if it
    /// is still there, else its best free path.
    fn owner_address(&self, core: &Endpoint, id: RelayId) -> Option<Addresses> {
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
