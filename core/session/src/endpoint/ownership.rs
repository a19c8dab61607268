//! Sessions whose records several servers share: before a handshake is confirmed, its server must own the session.
//!
//! ```text
//!  first packet under the new keys ─▶ [ held ] ─▶ owner asks the store ─▶ owned: the packet confirms the handshake
//!                                                                     ├▶ lost: the handshake is dropped, UNKNOWN
//!                                                                     └▶ no answer: dropped; the device repeats it
//! ```
//!
//! R-HS-20: the first packet proves that the device is there (R-HS-12), so a copied SYN moves no session to another server.

use std::collections::VecDeque;

use d2tp_seal::PublicKey;
use d2tp_time::Time;
use d2tp_wire::PathId;

use super::Endpoint;
use crate::half_open::HalfOpen;
use crate::handshake_ownership::{HandshakeOwnership, OwnershipAnswer, OwnershipRequest};
use crate::link::Addresses;
use crate::session_id::SessionId;

/// The most handshakes that wait at once for the ownership of their sessions. The devices of others repeat their
/// packets.
pub const OWNERSHIP_REQUESTS_MAX: usize = 256;
/// The most packets of a handshake that wait for the ownership of its session.
const HELD_PACKETS_MAX: usize = 16; // a guess: a device's first window

/// Handshakes whose ownership the server's owner has not been asked for yet.
pub(crate) type OwnershipQueue = VecDeque<OwnershipRequest>;

impl Endpoint {
    /// Sets whether other servers with the same key share this one's records. If so, every SYN of an admitted device
    /// waits for [`Endpoint::poll_lookup`], and every handshake for [`Endpoint::poll_ownership`].
    pub fn set_records_shared(&mut self, shared: bool) {
        self.records_shared = shared;
    }

    /// The next session that this server must own. Pass the answer to [`Endpoint::finish_ownership`].
    pub fn poll_ownership(&mut self) -> Option<OwnershipRequest> {
        self.ownership_requests.pop_front()
    }

    /// Whether the packet must wait until this server owns the session of the half-open handshake.
    pub(super) fn awaits_ownership(&mut self, index: usize) -> bool {
        let half = self.half_open.get_mut(index);
        self.records_shared
            && half.is_some_and(|half| {
                !matches!(half.ownership, HandshakeOwnership::Owned)
                    && self.admission.admits(&half.peer)
            })
    }

    /// Holds a packet that would confirm a handshake, and asks for the ownership of its session.
    pub(super) fn hold_for_ownership(
        &mut self,
        from: Addresses,
        index: usize,
        path: PathId,
        bytes: &[u8],
    ) {
        let (asked, requests_max) = (
            self.ownership_asked,
            self.part_of_host(OWNERSHIP_REQUESTS_MAX),
        );
        let Some(half) = self.half_open.get_mut(index) else {
            return;
        };
        // It is opened where it confirms; here a copy proves that it is the device's.
        if half.keys.open(path, 0, &mut bytes.to_vec()).is_err() {
            return;
        }
        match &mut half.ownership {
            HandshakeOwnership::Asked(held) => {
                if held.len() < HELD_PACKETS_MAX {
                    held.push((from, bytes.to_vec()));
                }
            }
            HandshakeOwnership::Unasked if asked < requests_max => {
                half.ownership = HandshakeOwnership::Asked(vec![(from, bytes.to_vec())]);
                self.ownership_asked += 1;
                self.ownership_requests.push_back(OwnershipRequest {
                    peer: half.peer,
                    instance: half.instance,
                    epoch: half.epoch,
                });
            }
            HandshakeOwnership::Unasked | HandshakeOwnership::Owned => {}
        }
    }

    /// Handles the answer to a request, and the packets that waited for it.
    pub fn finish_ownership(
        &mut self,
        now: Time,
        request: OwnershipRequest,
        answer: OwnershipAnswer,
    ) {
        self.ownership_asked = self.ownership_asked.saturating_sub(1);
        let key = (request.peer, request.instance);
        let mut found = self.half_open.of(&key);
        let epoch_of = |half: Option<&mut HalfOpen>| half.map(|half| half.epoch);
        let Some(index) =
            found.find(|i| epoch_of(self.half_open.get_mut(*i)) == Some(request.epoch))
        else {
            return; // It was not confirmed in time.
        };
        let Some(half) = self.half_open.get_mut(index) else {
            return;
        };
        let now_is = match answer {
            OwnershipAnswer::Owned => HandshakeOwnership::Owned,
            OwnershipAnswer::Lost | OwnershipAnswer::Unknown => HandshakeOwnership::Unasked,
        };
        let HandshakeOwnership::Asked(held) = std::mem::replace(&mut half.ownership, now_is) else {
            return;
        };
        match answer {
            OwnershipAnswer::Owned => {}
            OwnershipAnswer::Lost => {
                self.drop_half_open(index);
                self.revert_to_record(now, key);
            }
            OwnershipAnswer::Unknown => return,
        }
        for (from, mut bytes) in held {
            self.handle_one(now, from, &mut bytes);
        }
        if let Some(id) = self.touched.take() {
            self.book_changes(id);
        }
    }

    /// The session of this device that is awake, or restored for a handshake.
    pub fn awake_session(&self, peer: PublicKey, instance: u64) -> Option<SessionId> {
        self.by_key.get(&(peer, instance)).copied()
    }

    /// Drops all that this endpoint knows of a session without telling anybody: another server has it.
    pub fn forget_session(&mut self, peer: PublicKey, instance: u64) {
        let key = (peer, instance);
        if let Some(id) = self.by_key.get(&key).copied() {
            self.drop_session(id);
        }
        self.drop_hibernated(key);
    }
}
