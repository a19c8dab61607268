//! Telling devices that this process ends and another continues.
//!
//! ```text
//!  device                    this process                 the next one, on the same sockets
//!    │ ◀──── UNKNOWN ──────────── │ records, journal; ends
//!    │ ───── SYN with claims ───────────────────────────────▶ │ waits in the socket until it starts
//!    │ ◀──── SYN+ACK, early data ──────────────────────────── │
//! ```
//!
//! Without the notice a device that only receives has nothing to send, and notices the change by silence.

use super::Endpoint;
use crate::path::PathState;
use crate::reserved_address::is_reserved_address;
use crate::session_state::{Role, SessionState};

/// The most paths on which a restart is announced. All of these devices send a SYN at once, and a socket's
/// buffer holds them until the next process reads it. Other devices find out by a packet of theirs.
pub const RESTART_NOTICES_MAX: usize = 1_000; // a guess: 1,200 bytes each, in a buffer of 4 MB

impl Endpoint {
    /// Queues an UNKNOWN for the paths of awake sessions with flows (R-UNKNOWN-4), so that their devices begin a
    /// handshake at once. It leaves when nothing else can be sent. Call this before sessions hibernate, and only
    /// if another process receives what these devices send. Returns the number of paths.
    pub fn announce_restart(&mut self) -> usize {
        let mut paths = Vec::new();
        for (_, slot) in &self.sessions {
            let session = &slot.session;
            if session.role() != Role::Responder
                || session.state() != SessionState::Established
                || session.flow_ids().is_empty()
            {
                continue;
            }
            let reachable = session.paths.iter().filter(|path| {
                path.validated
                    && path.state == PathState::Active
                    && !is_reserved_address(&path.addresses.remote)
            });
            for path in reachable {
                if let Some(issued) = session.issued.get(&path.id) {
                    paths.push((path.addresses, issued.cid));
                }
            }
        }
        paths.truncate(self.part_of_host(RESTART_NOTICES_MAX));
        for (to, cid) in &paths {
            let notice = self.unknown_packet(*cid);
            self.restart_notices.push_back((*to, notice));
        }
        paths.len()
    }
}
