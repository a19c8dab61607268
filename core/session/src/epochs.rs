//! Epochs a device may still use: its journal reserved them before (R-HS-2).
//!
//! A journal that is synced for every SYN would be synced every 30 s on a dead network, so epochs
//! are reserved in steps; what is left of a step when the process dies is never used.

use std::ops::Range;

use crate::session::{Life, Session};

impl Session {
    /// Epochs not used yet.
    pub fn epochs_left(&self) -> Range<u32> {
        self.epochs.clone()
    }

    /// The journal has reserved everything below `end` now. A handshake that had run out of epochs
    /// goes on.
    pub fn extend_epochs(&mut self, end: u32) {
        if self.life == Life::Closed {
            return;
        }
        self.epochs.end = self.epochs.end.max(end);
        if let Some(knock) = &mut self.knock
            && !self.epochs.is_empty()
        {
            knock.failed = false;
        }
    }
}
