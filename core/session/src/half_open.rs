//! Half-open handshakes of a server: answered, but not confirmed by the device's first packet.
//! Until then nothing of an existing session changes.
//!
//! ```text
//!  SYN ─▶ answered ─▶ [ half open … ] ─▶ first packet: confirmed, its handshake remembered
//!          ▲               │
//!          └── again ──────┤ a later SYN of the same handshake, at most twice
//!                          └─▶ not confirmed in time: removed
//! ```

use std::collections::{BTreeMap, VecDeque};

use d2tp_seal::{PacketKeys, PublicKey};
use d2tp_time::Time;
use d2tp_wire::Cid;
use slab::Slab;

use crate::config::HALF_OPEN_PER_INSTANCE;
use crate::early_packets::EarlyPackets;
use crate::handshake_ownership::HandshakeOwnership;
use crate::hibernated::InstanceKey;
use crate::link::Addresses;
use crate::recent_map::RecentMap;
use crate::syn::SynAckBody;

/// The most half-open handshakes of a server.
pub(crate) const HALF_OPEN_MAX: usize = 4096;
/// The most entries of expiry times. Entries of handshakes that ended are then dropped.
const NOTES_MAX: usize = 2 * HALF_OPEN_MAX;
/// Confirmed handshakes that are remembered, so that their late SYNs cost nothing.
const CONFIRMED_MAX: usize = 4096;
/// How many later SYNs of the same handshake get the same answer.
const REPEATED_MAX: u8 = 2;

/// A handshake that was answered and is not confirmed yet.
pub(crate) struct HalfOpen {
    pub(crate) peer: PublicKey,
    pub(crate) instance: u64,
    pub(crate) epoch: u32,
    pub(crate) keys: PacketKeys,
    pub(crate) own_cids: Vec<Cid>,
    pub(crate) body: SynAckBody,
    pub(crate) addresses: Addresses,
    /// Whether nothing of flows is sent without hybrid keys (R-KEM-8).
    pub(crate) requires_hybrid: bool,
    /// The answer, which a copy of the same SYN gets again.
    pub(crate) answer: Vec<u8>,
    /// Whether a copy of the SYN caused the answer to be sent to another address as well. A host
    /// there has the keys, so a packet under them proves no address (R-PATH-16).
    pub(crate) answered_elsewhere: bool,
    /// The bytes of the SYN that its answer did not use up (R-PATH-2). Early packets count down a
    /// copy of this.
    pub(crate) room: u64,
    pub(crate) expires: Time,
    /// How many later SYNs of the same handshake got this answer.
    pub(crate) repeated: u8,
    /// Packets that are sent before the device confirms, if it claims flows of a known session.
    pub(crate) early: Option<Box<EarlyPackets>>,
    /// Whether this server owns the session, where servers share records.
    pub(crate) ownership: HandshakeOwnership,
}

/// The answer to a later SYN of a known handshake.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RepeatedSyn {
    /// The answer to the earlier SYN.
    Answer(Vec<u8>),
    /// No answer: the SYN arrived too late.
    Late,
}

/// All half-open handshakes of a server.
pub(crate) struct HalfOpenTable {
    all: Slab<HalfOpen>,
    by_key: BTreeMap<InstanceKey, VecDeque<usize>>,
    /// Expiry times, in order, with the index of the handshake.
    notes: VecDeque<(Time, usize)>,
    /// Handshakes by the device's connection id for path 0, which all SYNs of a handshake share.
    by_handshake_cid: BTreeMap<Cid, usize>,
    /// Addresses of confirmed handshakes, and until when their SYNs may still arrive.
    recently_confirmed: RecentMap<Cid, (Addresses, Time)>,
}

impl HalfOpenTable {
    pub(crate) fn new() -> Self {
        HalfOpenTable {
            all: Slab::new(),
            by_key: BTreeMap::new(),
            notes: VecDeque::new(),
            by_handshake_cid: BTreeMap::new(),
            recently_confirmed: RecentMap::new(CONFIRMED_MAX),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut HalfOpen> {
        self.all.get_mut(index)
    }

    /// The half-open handshakes of an instance, by index.
    pub(crate) fn of(&self, key: &InstanceKey) -> impl ExactSizeIterator<Item = usize> + use<> {
        let line = self.by_key.get(key).cloned();
        line.unwrap_or_default().into_iter()
    }

    /// The sessions of a client that have half-open handshakes.
    pub(crate) fn sessions_of(&self, peer: PublicKey) -> impl Iterator<Item = &InstanceKey> {
        let all = self.by_key.range((peer, 0)..=(peer, u64::MAX));
        all.map(|(key, _)| key)
    }

    /// The peers of all half-open handshakes; one for each of its instances.
    pub(crate) fn peers(&self) -> impl Iterator<Item = &PublicKey> {
        self.by_key.keys().map(|(peer, _)| peer)
    }

    /// The handshake of which this SYN is a copy.
    pub(crate) fn original(&mut self, key: &InstanceKey, epoch: u32) -> Option<&mut HalfOpen> {
        let mut line = self.by_key.get(key)?.iter();
        let index = line.find(|i| self.all.get(**i).is_some_and(|h| h.epoch == epoch))?;
        self.all.get_mut(*index)
    }

    /// Adds a half-open handshake; returns its index.
    pub(crate) fn insert(&mut self, half: HalfOpen) -> usize {
        let (key, handshake_cid) = ((half.peer, half.instance), half.body.cid);
        let expires = half.expires;
        let index = self.all.insert(half);
        self.by_handshake_cid.insert(handshake_cid, index);
        self.by_key.entry(key).or_default().push_back(index);
        let at = self.notes.partition_point(|(at, _)| *at <= expires);
        self.notes.insert(at, (expires, index));
        if self.notes.len() > NOTES_MAX {
            let stands = |(at, i): &(Time, usize)| {
                let half = self.all.get(*i);
                half.is_some_and(|h| h.expires == *at)
            };
            self.notes.retain(stands);
        }
        index
    }

    /// R-HS-8: the oldest half-open handshake of an instance if it has too many.
    pub(crate) fn excess(&self, key: &InstanceKey) -> Option<usize> {
        let line = self.by_key.get(key)?;
        line.front()
            .filter(|_| line.len() > HALF_OPEN_PER_INSTANCE)
            .copied()
    }

    pub(crate) fn remove(&mut self, index: usize) -> Option<HalfOpen> {
        let half = self.all.try_remove(index)?;
        if self.by_handshake_cid.get(&half.body.cid) == Some(&index) {
            self.by_handshake_cid.remove(&half.body.cid);
        }
        let key = (half.peer, half.instance);
        if let Some(line) = self.by_key.get_mut(&key) {
            line.retain(|i| *i != index);
            if line.is_empty() {
                self.by_key.remove(&key);
            }
        }
        Some(half)
    }

    /// The next handshake that has expired.
    pub(crate) fn next_expired(&mut self, now: Time) -> Option<usize> {
        while let Some((expires, index)) = self.notes.front().copied() {
            if expires > now {
                break;
            }
            self.notes.pop_front();
            if self.all.get(index).is_some_and(|h| h.expires == expires) {
                return Some(index);
            }
        }
        None
    }

    /// When the first handshake expires.
    pub(crate) fn next_expiry(&self) -> Time {
        self.notes.front().map_or(Time::NEVER, |(at, _)| *at)
    }

    /// Remembers a confirmed handshake, whose SYNs may arrive until then.
    pub(crate) fn remember(&mut self, half: &HalfOpen, until: Time) {
        self.recently_confirmed
            .insert(half.body.cid, (half.addresses, until));
    }

    /// R-HS-18: answers a SYN of a known handshake. If the handshake was answered to the same
    /// address, the SYN gets the same answer; if it was confirmed, the SYN was under way too long
    /// and gets none. Neither costs a public-key operation. After several repetitions the device
    /// may have lost the state that fits the answer, so the SYN is handled like a new one.
    pub(crate) fn answer_repeated(
        &mut self,
        now: Time,
        from: Addresses,
        handshake_cid: Cid,
    ) -> Option<RepeatedSyn> {
        let Some(index) = self.by_handshake_cid.get(&handshake_cid) else {
            let (at, until) = self.recently_confirmed.get(&handshake_cid)?;
            return (*at == from && now < *until).then_some(RepeatedSyn::Late);
        };
        let half = self.all.get_mut(*index)?;
        // R-HS-17: an expired handshake cannot be confirmed.
        let over = half.expires <= now || half.repeated >= REPEATED_MAX;
        if half.addresses != from || over {
            return None;
        }
        half.repeated += 1;
        Some(RepeatedSyn::Answer(half.answer.clone()))
    }
}
