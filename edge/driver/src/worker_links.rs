//! How a worker reaches the other workers of its server, and what they passed to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, Weak};

use d2tp_session::Misdirected;
use parking_lot::Mutex;

use crate::driver_core::DriverShared;
use crate::relay_state::RelayedPackets;

/// The most packets of other workers that wait for one. More are dropped, as if the network had lost them.
const INBOX_MAX: usize = 1_024; // a guess
/// The most bytes of relayed packets that wait for a worker beside those. More are dropped (R-RELAY-2).
const RELAYED_BYTES_MAX: usize = 1024 * 1024; // a guess: some milliseconds of a fast network

/// What other workers passed to a worker.
#[derive(Default)]
pub(crate) struct WorkerInbox {
    /// What they received for its sessions.
    pub(crate) misdirected: Vec<Misdirected>,
    /// Packets of calls to its devices.
    pub(crate) relayed: Vec<RelayedPackets>,
    relayed_bytes: usize,
}

/// What a worker knows of the others.
#[derive(Default)]
pub(crate) struct WorkerLinks {
    /// All workers of the server by index, this one included; unset if there is only one.
    others: OnceLock<Vec<Weak<DriverShared>>>,
    inbox: Mutex<WorkerInbox>,
    /// The number of packets that other workers passed to this one.
    passed: AtomicU64,
}

impl WorkerLinks {
    /// Makes these the workers of the server, this one included.
    pub(crate) fn connect(&self, all: Vec<Weak<DriverShared>>) {
        let _ = self.others.set(all);
    }

    /// All workers by index; `None` if there is only one.
    pub(crate) fn others(&self) -> Option<&[Weak<DriverShared>]> {
        self.others.get().map(Vec::as_slice)
    }

    /// Puts a packet that another worker received into the inbox. Returns whether there was room.
    pub(crate) fn accept(&self, packet: Misdirected) -> bool {
        let mut inbox = self.inbox.lock();
        let has_room = inbox.misdirected.len() < INBOX_MAX;
        if has_room {
            inbox.misdirected.push(packet);
            self.passed.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    /// Puts packets of a call, whose other half another worker has, into the inbox, if there is room.
    pub(crate) fn accept_relayed(&self, packets: RelayedPackets) {
        let mut inbox = self.inbox.lock();
        let bytes = inbox.relayed_bytes + packets.bytes.len();
        if bytes <= RELAYED_BYTES_MAX {
            inbox.relayed_bytes = bytes;
            inbox.relayed.push(packets);
        }
    }

    /// What other workers passed to this one since the last call.
    pub(crate) fn take_received(&self) -> WorkerInbox {
        std::mem::take(&mut *self.inbox.lock())
    }

    /// The number of packets that other workers passed to this one.
    pub(crate) fn passed(&self) -> u64 {
        self.passed.load(Ordering::Relaxed)
    }
}
