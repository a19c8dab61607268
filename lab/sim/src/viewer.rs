//! Who watches what a flow brings: takes bytes at a constant rate, and has D2BufMgr say what is paid for.
//!
//! ```text
//!  before ──a second is held──▶ plays ──all is shown──▶ done
//!                                │  ▲
//!                       runs dry ▼  │ a second is held again
//!                              paused
//! ```
//!
//! The thresholds and the decision are `d2tp_sched`'s; here is only what a player does.

use cedos_lab_link::{Span, Time};
use cedos_lab_scenario::Class;
use d2tp_sched::{BufferedStream, RefillThresholds, StreamBuffer, SwitchDelay};
use d2tp_session::{PathState, ReasonCode};

use crate::device::{SimDevice, link_of};
use crate::policy::{GRANT_BYTES_MIN, RATE_FIRST_BYTES, SimDecision};

/// A player shows nothing before it has this much. // a guess: what players buffer at the least
const START: Span = Span::from_secs(1);
/// A link that costs and is not paid for any more is left when what was under way has arrived. // a guess
const PARK_AFTER: Span = Span::from_secs(1);
/// How often the level is written down.
const LEVEL_EVERY: Span = Span::from_secs(1);

/// What is watched, and how it may be bought.
#[derive(Clone, Copy, Debug)]
pub struct Watching {
    /// The bytes of one second.
    pub bytes_per_s: u64,
    /// When paid links begin, and stop.
    pub thresholds: RefillThresholds,
    /// How long a paid link takes to bring its first byte.
    pub switching: SwitchDelay,
}

/// What it was like.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ViewingReport {
    /// When the first second was held.
    pub begun_s: Option<f64>,
    /// When all was shown.
    pub ended_s: Option<f64>,
    /// How often nothing was left to show.
    pub pauses: u32,
    /// For how long playback was paused, in seconds in all.
    pub paused_s: f64,
    /// Bytes ahead of the viewer, by seconds of the run.
    pub levels: Vec<(f64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shows {
    NotYet,
    Plays,
    Paused { since: Time },
    Done,
}

/// Watches the first flow.
#[derive(Clone, Debug)]
pub(crate) struct SimViewer {
    watching: Watching,
    buffer: StreamBuffer,
    size: u64,
    received: u64,
    shown: f64,
    at: Time,
    shows: Shows,
    level_at: Time,
    /// Since when links that cost are not paid for.
    saves_since: Option<Time>,
    pub(crate) watched: ViewingReport,
}

impl SimViewer {
    pub(crate) fn new(watching: Watching, size: u64) -> SimViewer {
        SimViewer {
            buffer: StreamBuffer::new(watching.thresholds, watching.switching),
            watching,
            size,
            received: 0,
            shown: 0.0,
            at: Time::ZERO,
            shows: Shows::NotYet,
            level_at: Time::ZERO,
            saves_since: None,
            watched: ViewingReport::default(),
        }
    }

    /// Time has passed, and `received` bytes are here by now.
    pub(crate) fn advance(&mut self, now: Time, received: u64) {
        let rate = self.watching.bytes_per_s as f64;
        if self.shows == Shows::Plays {
            let wants = self.shown + now.since(self.at).as_secs_f64() * rate;
            let has = self.received as f64;
            if wants < has {
                self.shown = wants;
            } else {
                // It ran dry somewhere since, or showed the last byte.
                let lasted = Span::from_secs_f64((has - self.shown) / rate);
                self.shown = has;
                let since = self.at + lasted;
                if self.received >= self.size {
                    self.shows = Shows::Done;
                    self.watched.ended_s = Some(since.as_secs_f64());
                } else {
                    self.shows = Shows::Paused { since };
                    self.watched.pauses += 1;
                }
            }
        }
        (self.at, self.received) = (now, received);
        let held = received as f64 - self.shown;
        let is_ready = held >= rate * START.as_secs_f64() || received >= self.size;
        match self.shows {
            Shows::NotYet if is_ready => {
                self.shows = Shows::Plays;
                self.watched.begun_s = Some(now.as_secs_f64());
            }
            Shows::Paused { since } if is_ready => {
                self.shows = Shows::Plays;
                self.watched.paused_s += now.since(since).as_secs_f64();
            }
            _ => {}
        }
        if now >= self.level_at {
            self.level_at = now + LEVEL_EVERY;
            let level = (now.as_secs_f64(), held as u64);
            self.watched.levels.push(level);
        }
    }

    /// A run is over: a pause that lasts is one as long as it lasted.
    pub(crate) fn end(&mut self, now: Time) {
        if let Shows::Paused { since } = self.shows {
            self.watched.paused_s += now.since(since).as_secs_f64();
        }
    }

    /// How many bytes may be paid for now; `free_rate`: what free links that answer carry.
    fn pays(&mut self, free_rate: Option<f64>) -> Option<u64> {
        let ahead_bytes = self.received - self.shown as u64;
        let need = self.buffer.need(&BufferedStream {
            bytes_per_s: self.watching.bytes_per_s,
            ahead_bytes,
            to_come_bytes: Some(self.size - self.received),
            quota_bytes: u64::MAX,
            free_bytes_per_s: free_rate,
        });
        let wanted = need?.remaining_bytes?;
        self.buffer.is_filling().then_some(wanted)
    }
}

impl SimDevice {
    /// Has this watched from now on.
    pub(crate) fn watch(&mut self, watching: Watching) {
        let size = self.specs[0].bytes.unwrap_or(0);
        self.viewer = Some(SimViewer::new(watching, size));
    }

    /// Tells the viewer how much is here.
    pub(crate) fn show(&mut self, now: Time) {
        if let Some(viewer) = &mut self.viewer {
            viewer.advance(now, self.transfers[0].sink.content_bytes());
        }
    }

    /// What free links whose paths answer carry: one that was never measured gets its chance, the buffer
    /// bridges it.
    fn free_rate(&self) -> Option<f64> {
        let paths = self.core()?.path_stats();
        let answers = |link: usize| {
            let on = |path: &&d2tp_session::PathStats| link_of(path.addresses.link) == link;
            let mut on = paths.iter().filter(on);
            on.any(|path| path.state == PathState::Active)
        };
        let free = (0..self.classes.len()).filter(|l| self.classes[*l] == Class::Free);
        let rates: Vec<f64> = free
            .filter(|link| answers(*link))
            .map(|link| {
                self.meters[link]
                    .rate()
                    .map_or(f64::MAX / 16.0, |r| r as f64)
            })
            .collect();
        (!rates.is_empty()).then(|| rates.iter().sum())
    }

    /// Whether a link that costs has not been paid for so long that it is left: a path that sleeps for an hour
    /// would have to be asked first.
    pub(crate) fn is_parked(&mut self, now: Time, pays: bool) -> bool {
        let Some(viewer) = &mut self.viewer else {
            return false;
        };
        if pays {
            viewer.saves_since = None;
            return false;
        }
        let since = *viewer.saves_since.get_or_insert(now);
        now >= since + PARK_AFTER
    }

    /// What the viewer says of a link that costs, if there is a viewer.
    pub(crate) fn viewed(&mut self, link: usize, again: Span) -> Option<SimDecision> {
        let free_rate = self.free_rate();
        let rate = self.meters[link].rate().unwrap_or(RATE_FIRST_BYTES);
        let viewer = self.viewer.as_mut()?;
        Some(match viewer.pays(free_rate) {
            Some(wanted) => SimDecision::Use {
                // A link that was short of grants, not of rate, measures little.
                grant: rate.max(RATE_FIRST_BYTES).min(wanted).max(GRANT_BYTES_MIN),
            },
            None => SimDecision::Hold {
                reason: ReasonCode::PathCost,
                again: Some(again),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn viewer() -> SimViewer {
        let watching = Watching {
            bytes_per_s: 1_000,
            thresholds: RefillThresholds {
                low_bytes: 2_000,
                high_bytes: 5_000,
            },
            switching: SwitchDelay {
                interface: Duration::from_millis(300),
                challenge: Duration::from_millis(40),
                first_packet: Duration::from_millis(40),
            },
        };
        SimViewer::new(watching, 10_000)
    }

    fn s(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    #[test]
    fn it_plays_pauses_where_it_runs_dry_and_ends_with_the_last_byte() {
        let mut viewer = viewer();
        viewer.advance(s(1.0), 500);
        assert_eq!(viewer.watched.begun_s, None);
        viewer.advance(s(2.0), 3_000);
        viewer.advance(s(8.0), 3_500);
        // 3 kB last until 5 s; half a second is not enough to go on.
        assert_eq!(viewer.watched.pauses, 1);
        viewer.advance(s(9.0), 10_000);
        assert!((viewer.watched.paused_s - 4.0).abs() < 1e-6);
        viewer.advance(s(30.0), 10_000);
        assert_eq!(viewer.watched.pauses, 1);
        let ended = viewer.watched.ended_s.unwrap();
        assert!((ended - 16.0).abs() < 1e-6, "{ended}");
    }

    #[test]
    fn it_pays_at_low_until_high_unless_a_free_link_keeps_up() {
        let mut viewer = viewer();
        assert_eq!(viewer.pays(None), Some(5_000));
        viewer.advance(s(1.0), 4_000);
        assert_eq!(viewer.pays(None), Some(1_000));
        assert_eq!(viewer.pays(Some(2_000.0)), None);
        assert_eq!(viewer.pays(None), None);
        viewer.advance(s(3.5), 4_000);
        assert!(
            viewer.pays(Some(500.0)).is_some(),
            "too weak counts as absent"
        );
    }
}
