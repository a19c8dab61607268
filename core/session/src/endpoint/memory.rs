//! Memory that the endpoint charges as a whole, and sessions whose writers wait for memory.
//!
//! Flows charge their own buffers ([`crate::MemoryPool`]). Sessions, half-open handshakes and
//! hibernated sessions are charged here as one sum, each with a fixed size. Memory becomes free
//! elsewhere, without an event of the session, so a writer that found no room is checked again
//! after some time.

use d2tp_time::Time;

use super::Endpoint;
use crate::memory_pool::MemoryPool;

/// The memory charged for an awake session without flows, in bytes.
// measured: 3.1 kB when idle, and what the allocator keeps (docs/benchmarks.md); a busy session also
// has ciphers and records of packets
const SESSION_BYTES: u64 = 8 * 1024;
/// The memory charged for a half-open handshake, in bytes.
const HALF_OPEN_BYTES: u64 = 4 * 1024; // a guess: keys of one generation, and the first packets
/// The memory charged for a hibernated session, in bytes. // measured: 248 B (docs/benchmarks.md)
const HIBERNATED_BYTES: u64 = 256;

impl Endpoint {
    /// The memory pool to which peers' bytes are charged.
    pub fn memory(&self) -> &MemoryPool {
        &self.config.memory
    }

    /// Whether there is room for one more hibernated session. Hibernated sessions of all workers use at most half
    /// of the memory, because those that wake need room, too.
    pub fn has_room_hibernated(&self) -> bool {
        let count = self.hibernated.len();
        let memory = self.config.memory.max().unwrap_or(u64::MAX);
        let used = count as u64 * HIBERNATED_BYTES * u64::from(self.workers());
        count < self.part_of_host(self.config.hibernated_max) && used < memory / 2
    }

    /// Whether there is room for one more awake session while `others` wait to become awake.
    pub(super) fn has_room_awake(&self, others: usize) -> bool {
        self.sessions.len() + others < self.part_of_host(self.config.sessions_max)
            && self.config.memory.has_room(SESSION_BYTES)
    }

    /// Charges the memory of all current sessions.
    pub(super) fn charge_sessions(&mut self) {
        if self.sessions_charge.is_counted() {
            let (awake, hibernated, half_open) = self.counts();
            self.sessions_charge.resize(
                awake as u64 * SESSION_BYTES
                    + hibernated as u64 * HIBERNATED_BYTES
                    + half_open as u64 * HALF_OPEN_BYTES,
            );
        }
    }

    /// Checks whether sessions whose writers wait for memory find room now.
    pub(super) fn check_memory_waiters(&mut self, now: Time) {
        for id in self.memory_waiters.due(now) {
            self.memory_waiters.remove(id);
            if let Some(slot) = self.slot(id) {
                slot.session.offer_room();
                // A session that still waits is registered again.
                self.book_changes(id);
            }
        }
    }
}
