//! Turns on a line that only one station can use at a time: each listens before it sends.
//!
//! ```text
//!  heard ─────┐ quiet for a gap │ slot │ slot │ slot │ …
//!             └─────────────────┴──────┴──── sends ──▶  the slot is drawn at random
//! ```

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::line::SerialLine;

/// How long the line must be quiet before it counts as free, in bytes: the pause that a sender may make
/// between two frames of a packet.
const GAP_BYTES: usize = 6; // a guess
/// The slots among which one is drawn, and the length of a slot in bytes: what it takes to hear another
/// station begin.
const SLOTS: u8 = 8; // a guess
const SLOT_BYTES: usize = 4; // a guess
/// The shortest gap and slot: timers of hosts are not more exact.
const SLOT_MIN: Duration = Duration::from_millis(4); // a guess

/// When a line was last heard.
#[derive(Debug)]
pub(crate) struct SharedAir {
    half_duplex: bool,
    gap: Duration,
    slot: Duration,
    heard: Mutex<Option<Instant>>,
}

impl SharedAir {
    pub(crate) fn new(line: &SerialLine) -> SharedAir {
        SharedAir {
            half_duplex: line.half_duplex,
            gap: line.time_of(GAP_BYTES).max(SLOT_MIN),
            slot: line.time_of(SLOT_BYTES).max(SLOT_MIN),
            heard: Mutex::default(),
        }
    }

    /// Records that bytes arrived.
    pub(crate) fn on_heard(&self, now: Instant) {
        if self.half_duplex {
            *self.heard.lock() = Some(now);
        }
    }

    /// Waits until the line has been quiet for a gap and a few slots.
    pub(crate) async fn wait_for_turn(&self) {
        if !self.half_duplex {
            return;
        }
        let quiet = self.gap + self.slot * u32::from(draw_byte() % SLOTS);
        loop {
            let now = Instant::now();
            let free_at = self.heard.lock().map_or(now, |heard| heard + quiet);
            if free_at <= now {
                return;
            }
            tokio::time::sleep_until(free_at.into()).await;
        }
    }
}

/// A random number by which stations choose slots.
pub(crate) fn draw_byte() -> u8 {
    let mut byte = [0];
    // Without randomness the first slot is as good as any.
    let _ = getrandom::fill(&mut byte);
    byte[0]
}
