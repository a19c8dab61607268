//! What the endpoint as a whole holds in memory, and sessions that wait for room there.
//!
//! Flows charge their own buffers ([`crate::MemoryPool`]). What is left is charged here as one sum:
//! sessions, half-open handshakes and hibernated sessions, each with a flat figure. A writer that found
//! no room in memory is told later when there is some: memory becomes free elsewhere, so that only time
//! can ask.

use d2tp_time::Time;

use super::Endpoint;
use crate::memory_pool::MemoryPool;

/// What an awake session costs without flows.
// measured: 3.9 kB when idle (docs/benchmarks.md); a busy one has ciphers and records of packets too
const SESSION_BYTES: u64 = 8 * 1024;
/// What a half-open handshake costs.
const HALF_OPEN_BYTES: u64 = 4 * 1024; // a guess: keys of a generation, and a first flight
/// What a hibernated session costs. // measured: 248 B (docs/benchmarks.md)
const HIBERNATED_BYTES: u64 = 256;

impl Endpoint {
    /// The memory that peers' bytes are charged to.
    pub fn memory(&self) -> &MemoryPool {
        &self.config.memory
    }

    /// Whether there is room for one more hibernated session. Hibernated sessions fill half of the memory
    /// at most: those that wake need room too.
    pub fn has_room_hibernated(&self) -> bool {
        let count = self.hibernated.len();
        let memory = self.config.memory.max().unwrap_or(u64::MAX);
        count < self.config.hibernated_max && count as u64 * HIBERNATED_BYTES < memory / 2
    }

    /// Whether there is room for one more awake session, where `others` wait to be one.
    pub(super) fn has_room_awake(&self, others: usize) -> bool {
        self.sessions.len() + others < self.config.sessions_max
            && self.config.memory.has_room(SESSION_BYTES)
    }

    /// Charges sessions as many as there are.
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

    /// Asks sessions whose writers wait for memory whether they find room now.
    pub(super) fn check_memory_waiters(&mut self, now: Time) {
        for id in self.memory_waiters.due(now) {
            self.memory_waiters.remove(id);
            if let Some(slot) = self.slot(id) {
                slot.session.offer_memory();
                // A session that still waits is registered again.
                self.book_changes(id);
            }
        }
    }
}
