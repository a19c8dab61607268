//! What the endpoint as a whole holds in memory, and sessions that wait for room there.
//!
//! Flows charge their own buffers ([`crate::MemoryPool`]). What is left is charged here as one sum:
//! sessions, half-open handshakes and hibernated sessions, each with a flat figure. A writer that found
//! no room in memory is told later when there is some: memory becomes free elsewhere, so that only time
//! can ask.

use std::ops::Bound;

use d2tp_seal::PublicKey;
use d2tp_time::{Span, Time};

use super::{Endpoint, SessionId};
use crate::event::SessionEvent;
use crate::flow::SessionFlow;
use crate::memory_pool::{MemoryCharge, MemoryPool};
use crate::session::Session;

/// What an awake session costs without flows.
// measured: 3.9 kB when idle (docs/benchmarks.md); a busy one has ciphers and records of packets too
pub(crate) const SESSION_BYTES: u64 = 8 * 1024;
/// What a half-open handshake costs.
const HALF_OPEN_BYTES: u64 = 4 * 1024; // a guess: keys of a generation, and a first flight
/// What a hibernated session costs. // measured: 248 B (docs/benchmarks.md)
const HIBERNATED_BYTES: u64 = 256;
/// How often sessions whose writers wait for memory are asked again.
const MEMORY_CHECK_EVERY: Span = Span::from_millis(25); // a guess
/// Sessions asked at once.
const CHECKED_AT_ONCE: usize = 64; // a guess

/// Sessions whose writers wait for room in memory.
#[derive(Debug, Default)]
pub(super) struct MemoryWaiters {
    waiting: std::collections::BTreeSet<SessionId>,
    /// The session asked last: all have their turn.
    last: Option<SessionId>,
    check_at: Time,
}

impl MemoryWaiters {
    pub(super) fn push(&mut self, id: SessionId) {
        self.waiting.insert(id);
    }

    pub(super) fn remove(&mut self, id: SessionId) {
        self.waiting.remove(&id);
    }

    pub(super) fn next_timeout(&self) -> Time {
        if self.waiting.is_empty() {
            Time::NEVER
        } else {
            self.check_at
        }
    }

    /// The sessions to be asked now.
    fn due(&mut self, now: Time) -> Vec<SessionId> {
        if self.waiting.is_empty() || now < self.check_at {
            return Vec::new();
        }
        self.check_at = now + MEMORY_CHECK_EVERY;
        let after = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let behind = self.waiting.range((after, Bound::Unbounded));
        let due: Vec<SessionId> = behind
            .chain(&self.waiting)
            .take(CHECKED_AT_ONCE.min(self.waiting.len()))
            .copied()
            .collect();
        self.last = due.last().copied();
        due
    }
}

impl Endpoint {
    /// The memory that peers' bytes are charged to.
    pub fn memory(&self) -> &MemoryPool {
        &self.config.memory
    }

    /// The charge that stands for all sessions of this endpoint.
    pub(super) fn sessions_charge(
        config: &crate::EndpointConfig,
        local: PublicKey,
    ) -> MemoryCharge {
        config.memory.account(local).charge()
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

impl Session {
    /// Tells writers that wait for memory that there is some.
    fn offer_memory(&mut self) {
        let limit = self.config.send_buffer;
        let mut writable = Vec::new();
        for flow in self.flows.iter_mut().filter(|f| f.wants_writable) {
            if flow.send.memory_room() == 0 {
                self.awaits_memory = true;
            } else if is_writable(flow, limit) {
                flow.wants_writable = false;
                writable.push(flow.id);
            }
        }
        for id in writable {
            self.emit(SessionEvent::Writable(id));
        }
    }

    /// R-FLOW-9: the session credit to announce. Beyond what has arrived it promises only what the
    /// peer's key finds room for in memory, and [`CREDIT_BYTES_MIN`], so that a reader makes progress.
    pub(crate) fn session_credit_max(&self) -> u64 {
        let full = self.credit.consumed + self.config.session_window;
        if self.config.memory.max().is_none() {
            return full;
        }
        let room = self.config.memory.account(self.peer).room();
        let least = self.credit.consumed + CREDIT_BYTES_MIN.min(self.config.session_window);
        full.min(self.credit.received.saturating_add(room))
            .max(least)
    }
}

/// Session credit that a peer gets without room in memory.
const CREDIT_BYTES_MIN: u64 = 64 * 1024; // a guess: some packets of each round trip

/// Whether a writer of this flow is worth waking.
pub(crate) fn is_writable(flow: &SessionFlow, send_buffer: u64) -> bool {
    flow.send.room(send_buffer) >= send_buffer / crate::receive::WRITABLE_PART
        && flow.send.memory_room() > 0
}
