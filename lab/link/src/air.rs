//! The shared medium between a station and its access point: which of them sends next (802.11 DCF,
//! basic access).
//!
//! ```text
//!  free_at ── DIFS ── slot slot slot ┬─ only one counter at 0: its frame, its answer ─▶ free_at
//!                                    └─ both: a collision, both windows double ───────▶ free_at
//! ```
//!
//! Counters are drawn in advance, so the next event is a function of the state and of the queues,
//! and a late call changes nothing. A station whose counter ran out while its queue was empty sends
//! at once when it has a packet (post-backoff, IEEE Std 802.11-2016, 10.3.4.2). There are only
//! these two stations: no hidden ones, no other cells.

use crate::medium::Medium;
use crate::pipe::QueueHead;
use d2tp_time::{Span, Time};
use rand::Rng;
use rand_pcg::Pcg32;

/// The most attempts to send a frame. // dot11ShortRetryLimit, 802.11-2016 Annex C
const TRIES_MAX: u32 = 7;

/// The next exchange on the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AirExchange {
    begins: Time,
    /// When the frame, or the longer of two, ends: a packet that arrives does so then.
    pub(crate) ends: Time,
    /// Which of the two stations send.
    pub(crate) sends: [bool; 2],
}

/// A station that contends for the medium with another one.
#[derive(Debug)]
struct Station {
    /// The slots still to be counted down.
    backoff: u32,
    /// The contention window from which `backoff` was drawn.
    window: u32,
    tries: u32,
}

/// The state of the medium.
#[derive(Debug)]
pub(crate) struct SharedMedium {
    medium: Medium,
    rng: Pcg32,
    free_at: Time,
    stations: [Station; 2],
    pub(crate) collisions: u64,
}

impl SharedMedium {
    pub(crate) fn new(medium: Medium, now: Time, mut rng: Pcg32) -> SharedMedium {
        let (window, _) = medium.windows();
        let stations = [0, 1].map(|_| Station {
            backoff: rng.random_range(0..=window),
            window,
            tries: 0,
        });
        SharedMedium {
            medium,
            rng,
            free_at: now,
            stations,
            collisions: 0,
        }
    }

    pub(crate) fn medium(&self) -> Medium {
        self.medium
    }

    /// Records that nothing was sent before `now`, whatever was queued.
    pub(crate) fn hold(&mut self, now: Time) {
        self.free_at = self.free_at.max(now);
    }

    /// The next exchange, with these packets at the heads of the two queues.
    pub(crate) fn next(&self, heads: [Option<QueueHead>; 2]) -> Option<AirExchange> {
        let starts = [0, 1].map(|n| {
            let counted = self.slots_begin() + self.slots(self.stations[n].backoff);
            heads[n].map(|head| head.arrived.max(counted))
        });
        let begins = starts.into_iter().flatten().min()?;
        // Within a slot neither station detects that the other one begins.
        let deaf_until = begins + self.medium.slot();
        let sends = starts.map(|start| start.is_some_and(|start| start < deaf_until));
        let end = |n: usize| {
            let (head, start) = (heads[n]?, starts[n]?);
            sends[n].then(|| start + self.medium.frame(head.bytes))
        };
        let ends = [end(0), end(1)].into_iter().flatten().max()?;
        Some(AirExchange {
            begins,
            ends,
            sends,
        })
    }

    /// Applies an exchange that happened. Returns which packets are finished: delivered, or given
    /// up after a collision.
    pub(crate) fn take(&mut self, exchange: &AirExchange) -> [bool; 2] {
        let idle = exchange.begins.since(self.slots_begin());
        let counted = idle.as_nanos() / self.medium.slot().as_nanos();
        // After a collision both wait as long as for an answer (Bianchi 2000, T_c).
        self.free_at = exchange.ends + self.medium.answer();
        let collided = exchange.sends == [true, true];
        self.collisions += u64::from(collided);
        let (first, largest) = self.medium.windows();
        let mut done = [false; 2];
        for (n, station) in self.stations.iter_mut().enumerate() {
            if !exchange.sends[n] {
                let counted = u32::try_from(counted).unwrap_or(u32::MAX);
                station.backoff = station.backoff.saturating_sub(counted);
                continue;
            }
            station.tries += 1;
            done[n] = !collided || station.tries == TRIES_MAX;
            if done[n] {
                (station.tries, station.window) = (0, first);
            } else {
                station.window = (2 * station.window + 1).min(largest);
            }
            station.backoff = self.rng.random_range(0..=station.window);
        }
        done
    }

    fn slots_begin(&self) -> Time {
        self.free_at + self.medium.difs()
    }

    fn slots(&self, n: u32) -> Span {
        self.medium.slot().times(u64::from(n))
    }
}
