//! Devices that are not admitted: how many may connect to request admission, and how admission is
//! withdrawn.
//!
//! ```text
//!  SYN of an unknown key ─▶ set_unadmitted_max(0): refused            (R-HS-11)
//!                        └▶ set_unadmitted_max(n): a session, small,  (R-HS-19)
//!                           without early data; its owner serves no more than the request to be admitted
//!                             ├─ set_admission with that key ─▶ an ordinary session
//!                             └─ end_unadmitted(after) ───────▶ closed
//! ```

use d2tp_seal::PublicKey;
use d2tp_time::{Span, Time};
use d2tp_wire::ReasonCode;

use super::Endpoint;
use crate::session_id::SessionId;

/// R-HS-19: bytes that a device without admission may send before the owner reads some: one
/// request.
pub const UNADMITTED_WINDOW_BYTES: u64 = 16 * 1024;

impl Endpoint {
    /// Sets how many sessions devices without admission may have at once at this host, including half-open
    /// handshakes. 0, the default, refuses all of them in the handshake. The owner of the endpoint
    /// must accept nothing but the request for admission from these sessions
    /// ([`Endpoint::is_admitted`]).
    pub fn set_unadmitted_max(&mut self, sessions: usize) {
        self.unadmitted_max = self.part_of_host(sessions);
    }

    /// Whether this client is admitted.
    pub fn is_admitted(&self, client: &PublicKey) -> bool {
        self.admission.admits(client)
    }

    /// Closes sessions of clients that are not admitted and have been connected for `after`.
    /// Sessions of clients that were admitted meanwhile stay. Returns the number of closed
    /// sessions.
    pub fn end_unadmitted(&mut self, now: Time, after: Span) -> usize {
        self.forget_admitted();
        let due = |(_, since): &(&SessionId, &Time)| now.since(**since) >= after;
        let ids: Vec<SessionId> = (self.unadmitted.iter().filter(due))
            .map(|(id, _)| *id)
            .collect();
        for id in &ids {
            let _ = self.close(
                *id,
                ReasonCode::NotAllowed as u64,
                "this client is not admitted",
            );
            self.unadmitted.remove(id);
        }
        ids.len()
    }

    /// Ends all sessions of a client: those that are awake are closed with this code, its
    /// handshakes are dropped, and the flows of its hibernated sessions expire
    /// ([`Endpoint::poll_expired`]). To prevent new sessions, call [`Endpoint::set_admission`]
    /// before.
    pub fn end_client(&mut self, now: Time, client: PublicKey, code: u64, text: &str) {
        let keys: Vec<_> = self.half_open.sessions_of(client).copied().collect();
        for key in keys {
            for index in self.half_open.of(&key) {
                self.drop_half_open(index);
            }
            self.revert_to_record(now, key);
        }
        let awake = self.by_key.range((client, 0)..=(client, u64::MAX));
        let awake: Vec<SessionId> = awake.map(|(_, id)| *id).collect();
        for id in awake {
            let _ = self.close(id, code, text);
        }
        for flows in self.hibernated.expire_client(&client) {
            self.book_flows(client, flows, 0);
        }
    }

    /// Whether another client without admission may connect.
    pub(super) fn has_room_unadmitted(&mut self) -> bool {
        if self.unadmitted_max == 0 {
            return false;
        }
        self.forget_admitted();
        let handshakes = self.half_open.peers();
        let unadmitted = handshakes.filter(|peer| !self.admission.admits(peer));
        let room = self.unadmitted_max.saturating_sub(self.unadmitted.len());
        unadmitted.take(room).count() < room
    }

    /// Records a new session if its client is not admitted.
    pub(super) fn note_unadmitted(&mut self, now: Time, id: SessionId, client: PublicKey) {
        if !self.admission.admits(&client) {
            self.unadmitted.insert(id, now);
        }
    }

    /// Removes sessions that have ended or whose clients have been admitted.
    fn forget_admitted(&mut self) {
        let mut unadmitted = std::mem::take(&mut self.unadmitted);
        unadmitted.retain(|id, _| {
            let session = self.session(*id);
            session.is_some_and(|session| !self.admission.admits(&session.peer()))
        });
        self.unadmitted = unadmitted;
    }
}
