//! Measures at which rate a stream is played, and how much data the player holds beyond the
//! position it has shown.
//!
//! ```text
//!  shown ────────┬──────────────┬───────────────────┬──────────── to come
//!                │ in the player│ held on the disk  │
//!                └──────── ahead of the watcher ────┘
//!            taken at once, played at its rate
//! ```
//!
//! A player fills its own buffer as fast as data arrives. If the rate is known (stated, or size
//! divided by duration), bytes that it took and cannot have shown yet count as ahead, so a player
//! with a large buffer is no reason to pay. If not, the rate is the player's average rate of
//! reading, and only data on the disk counts.

use std::collections::VecDeque;
use std::time::Duration;

/// The rate assumed until a stream is measured, in bytes per second.
pub const RATE_FIRST: f64 = 250_000.0; // 2 Mb/s, a guess: video on a small screen

/// How long a player fills its own buffer before its rate can be measured.
const MEASURED_AFTER: Duration = Duration::from_secs(20); // a guess

/// The window over which the rate is averaged.
const WINDOW: Duration = Duration::from_secs(60); // a guess: several of a player's own refills

/// The length of the slots in which the window is summed up.
const SLOT: Duration = Duration::from_secs(1);

/// Measures how fast the player of one stream reads.
#[derive(Debug, Clone)]
pub struct PlaybackMeter {
    /// The rate in bytes per second, if it is known and need not be measured.
    known: Option<f64>,
    /// When playback began, and the last update.
    begun: Option<(Duration, Duration)>,
    in_player: f64,
    /// The start of each slot, and the bytes read in it.
    slots: VecDeque<(Duration, u64)>,
    dry: Option<Duration>,
    dry_for: Duration,
    dry_times: u32,
}

impl PlaybackMeter {
    /// Creates a meter for a stream of this many bytes per second, if that is known.
    pub fn new(known: Option<f64>) -> PlaybackMeter {
        PlaybackMeter {
            known: known.filter(|rate| *rate > 0.0),
            begun: None,
            in_player: 0.0,
            slots: VecDeque::new(),
            dry: None,
            dry_for: Duration::ZERO,
            dry_times: 0,
        }
    }

    /// Sets a rate that became known.
    pub fn set_rate(&mut self, rate: f64) {
        if rate > 0.0 {
            self.known = Some(rate);
        }
    }

    /// Whether the rate is known and not measured.
    pub fn is_known(&self) -> bool {
        self.known.is_some()
    }

    /// Records that the player read `bytes` at `now`.
    pub fn on_read(&mut self, now: Duration, bytes: u64) {
        self.advance(now);
        self.begun.get_or_insert((now, now));
        self.in_player += bytes as f64;
        match self.slots.back_mut() {
            Some((begun, sum)) if now.saturating_sub(*begun) < SLOT => *sum += bytes,
            _ => self.slots.push_back((now, bytes)),
        }
        while (self.slots.front()).is_some_and(|(begun, _)| now.saturating_sub(*begun) > WINDOW) {
            self.slots.pop_front();
        }
    }

    /// Records a seek, which makes the player's buffer useless.
    pub fn on_seek(&mut self, now: Duration) {
        self.advance(now);
        self.in_player = 0.0;
        self.dry = None;
    }

    /// Advances the time: bytes that have been played no longer count as ahead.
    pub fn advance(&mut self, now: Duration) {
        let Some((_, last)) = &mut self.begun else {
            return;
        };
        let passed = now.saturating_sub(*last).as_secs_f64();
        *last = now.max(*last);
        let played = passed * self.known.unwrap_or(0.0);
        self.in_player = (self.in_player - played).max(0.0);
    }

    /// The rate in bytes per second: known, measured or assumed.
    pub fn rate(&self, now: Duration) -> f64 {
        if let Some(known) = self.known {
            return known;
        }
        let Some((begun, _)) = self.begun else {
            return RATE_FIRST;
        };
        let watched = now.saturating_sub(begun);
        if watched < MEASURED_AFTER {
            return RATE_FIRST;
        }
        let since = |slot: &&(Duration, u64)| now.saturating_sub(slot.0) <= WINDOW;
        let taken: u64 = self.slots.iter().filter(since).map(|(_, sum)| sum).sum();
        (taken as f64 / watched.min(WINDOW).as_secs_f64()).max(1.0)
    }

    /// Bytes that the player has read and not played yet.
    pub fn in_player(&self) -> u64 {
        match self.known {
            Some(_) => self.in_player as u64,
            None => 0,
        }
    }

    /// Records whether the player has run out of data while it waits for more.
    pub fn note_starvation(&mut self, now: Duration, waits: bool) {
        let is_dry = waits && self.known.is_some() && self.begun.is_some() && self.in_player < 1.0;
        match (self.dry, is_dry) {
            (None, true) => {
                self.dry = Some(now);
                self.dry_times += 1;
            }
            (Some(since), _) => {
                self.dry_for += now.saturating_sub(since);
                self.dry = is_dry.then_some(now);
            }
            (None, false) => {}
        }
    }

    /// How often playback stalled, and for how long in total, if the player plays at the stream's rate.
    pub fn stalls(&self) -> (u32, Duration) {
        (self.dry_times, self.dry_for)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn what_a_greedy_player_took_counts_until_it_can_be_shown() {
        let mut pace = PlaybackMeter::new(Some(1_000.0));
        pace.on_read(s(0), 10_000);
        pace.advance(s(4));
        assert_eq!(pace.in_player(), 6_000);
        pace.on_read(s(5), 1_000);
        assert_eq!(pace.in_player(), 6_000);
        pace.advance(s(60));
        assert_eq!(pace.in_player(), 0);
        pace.on_read(s(61), 5_000);
        pace.on_seek(s(61));
        assert_eq!(pace.in_player(), 0);
    }

    #[test]
    fn a_rate_nobody_told_is_measured_after_the_players_first_gulp() {
        let mut pace = PlaybackMeter::new(None);
        pace.on_read(s(0), 40_000);
        assert_eq!(pace.rate(s(5)), RATE_FIRST);
        (1..200).for_each(|t| pace.on_read(s(t), 1_000));
        let rate = pace.rate(s(200));
        assert!((950.0..1_050.0).contains(&rate), "{rate}");
        assert_eq!(pace.in_player(), 0);
        assert!(pace.rate(s(900)) < 2.0, "nobody watches any more");
    }

    #[test]
    fn a_pause_is_counted_once_and_for_as_long_as_it_lasts() {
        let mut pace = PlaybackMeter::new(Some(1_000.0));
        pace.note_starvation(s(0), true);
        assert_eq!(pace.stalls().0, 0, "nothing was shown yet");
        pace.on_read(s(1), 2_000);
        for t in 1..10 {
            pace.advance(s(t));
            pace.note_starvation(s(t), true);
        }
        pace.on_read(s(10), 9_000);
        pace.note_starvation(s(10), true);
        assert_eq!(pace.stalls(), (1, s(7)));
        pace.advance(s(30));
        pace.note_starvation(s(30), false);
        assert_eq!(pace.stalls(), (1, s(7)), "it waits for nothing");
    }
}
