//! Devices whose SYN waits because the server has not read all its records yet: the record of each
//! device is looked up first.
//!
//! ```text
//!  SYN ─▶ known? ─▶ answered
//!            └ no, and records are elsewhere ─▶ [ pending … ] ─▶ owner looks it up ─▶ adopt, answer
//! ```
//!
//! An answer at once would treat a device with a hibernated session as a new one, and drop its
//! flows.

use std::collections::VecDeque;

use d2tp_seal::{PublicKey, Responder};

use crate::hibernated::InstanceKey;
use crate::syn::{Syn, SynOrigin};

/// The most devices that wait for a lookup at once. Others get no answer and try again.
pub const PENDING_LOOKUPS_MAX: usize = 256;

/// A device whose record may be elsewhere, and its SYN.
pub struct PendingLookup {
    pub(crate) key: InstanceKey,
    pub(crate) origin: SynOrigin,
    pub(crate) syn: Syn,
    pub(crate) responder: Responder,
}

impl PendingLookup {
    /// The public key of the device.
    pub fn peer(&self) -> PublicKey {
        self.key.0
    }
    /// The device's instance number.
    pub fn instance(&self) -> u64 {
        self.key.1
    }
}

impl std::fmt::Debug for PendingLookup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PendingLookup({:?}, {:#x})", self.key.0, self.key.1)
    }
}

#[derive(Default)]
pub(crate) struct LookupQueue(VecDeque<PendingLookup>);

impl LookupQueue {
    /// Adds a lookup. Only the newest SYN of each instance waits: the device accepts its answer for
    /// the longest time, and a replay is never newer.
    pub(crate) fn push(&mut self, sought: PendingLookup) {
        if let Some(waiting) = self.0.iter_mut().find(|s| s.key == sought.key) {
            if waiting.syn.epoch < sought.syn.epoch {
                *waiting = sought;
            }
        } else if self.0.len() < PENDING_LOOKUPS_MAX {
            self.0.push_back(sought);
        }
    }

    pub(crate) fn pop(&mut self) -> Option<PendingLookup> {
        self.0.pop_front()
    }
}
