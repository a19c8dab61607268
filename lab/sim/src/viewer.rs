//! A viewer of a flow: it reads bytes at a constant rate, and uses D2BufMgr to decide what is paid
//! for.
//!
//! ```text
//!  before ──a second is buffered─▶ plays ──all is shown──▶ done
//!                                │  ▲
//!                       empty ▼  │ a second is buffered again
//!                              paused
//! ```
//!
//! The thresholds and the decision are `d2tp_sched`'s; this module only simulates the player.

use cedos_lab_link::{Span, Time};
use d2tp_sched::{
    BufferedStream, FlowDemand, LinkCandidate, LinkClass, RefillThresholds, StreamBuffer,
    SwitchDelay,
};

use crate::device::SimDevice;

/// The time that a player buffers before it starts. // a guess: the least that players buffer
const START: Span = Span::from_secs(1);
/// How long the path over a metered link that is no longer paid for is kept, so that data in flight
/// arrives.
const READY_FOR: Span = Span::from_secs(1); // a guess
/// The interval at which the buffer level is recorded.
const LEVEL_EVERY: Span = Span::from_secs(1);

/// The rate of a stream and its buffer thresholds.
#[derive(Clone, Copy, Debug)]
pub struct ViewerConfig {
    /// The rate of the stream in bytes per second.
    pub bytes_per_s: u64,
    /// The levels at which metered links begin and end.
    pub thresholds: RefillThresholds,
    /// The delay until a metered link's first byte arrives.
    pub switching: SwitchDelay,
}

/// The result of viewing a stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ViewingReport {
    /// When the first second was buffered.
    pub begun_s: Option<f64>,
    /// When everything was shown.
    pub ended_s: Option<f64>,
    /// How often the buffer was empty.
    pub pauses: u32,
    /// How long playback was paused in total, in seconds.
    pub paused_s: f64,
    /// Bytes buffered ahead of the viewer, over time in seconds.
    pub levels: Vec<(f64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ViewerState {
    NotYet,
    Plays,
    Paused { since: Time },
    Done,
}

/// The viewer of the first flow.
#[derive(Clone, Debug)]
pub(crate) struct SimViewer {
    watching: ViewerConfig,
    buffer: StreamBuffer,
    size: u64,
    received: u64,
    shown: f64,
    at: Time,
    shows: ViewerState,
    level_at: Time,
    pub(crate) watched: ViewingReport,
}

impl SimViewer {
    /// How long the path over a metered link is kept after it was paid for.
    pub(crate) fn keeps_path_for(&self) -> Span {
        READY_FOR
    }

    pub(crate) fn new(watching: ViewerConfig, size: u64) -> SimViewer {
        SimViewer {
            buffer: StreamBuffer::new(watching.thresholds, watching.switching),
            watching,
            size,
            received: 0,
            shown: 0.0,
            at: Time::ZERO,
            shows: ViewerState::NotYet,
            level_at: Time::ZERO,
            watched: ViewingReport::default(),
        }
    }

    /// Advances the time to `now`, when `received` bytes have arrived.
    pub(crate) fn advance(&mut self, now: Time, received: u64) {
        let rate = self.watching.bytes_per_s as f64;
        if self.shows == ViewerState::Plays {
            let wants = self.shown + now.since(self.at).as_secs_f64() * rate;
            let has = self.received as f64;
            if wants < has {
                self.shown = wants;
            } else {
                // The buffer became empty since then, or the last byte was shown.
                let lasted = Span::from_secs_f64((has - self.shown) / rate);
                self.shown = has;
                let since = self.at + lasted;
                if self.received >= self.size {
                    self.shows = ViewerState::Done;
                    self.watched.ended_s = Some(since.as_secs_f64());
                } else {
                    self.shows = ViewerState::Paused { since };
                    self.watched.pauses += 1;
                }
            }
        }
        (self.at, self.received) = (now, received);
        let held = received as f64 - self.shown;
        let is_ready = held >= rate * START.as_secs_f64() || received >= self.size;
        match self.shows {
            ViewerState::NotYet if is_ready => {
                self.shows = ViewerState::Plays;
                self.watched.begun_s = Some(now.as_secs_f64());
            }
            ViewerState::Paused { since } if is_ready => {
                self.shows = ViewerState::Plays;
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

    /// Ends the run: an ongoing pause counts with its length so far.
    pub(crate) fn end(&mut self, now: Time) {
        if let ViewerState::Paused { since } = self.shows {
            self.watched.paused_s += now.since(since).as_secs_f64();
        }
    }

    /// The current demand on links, and how many bytes may be paid for. `own`: the flow's demand
    /// without a viewer.
    pub(crate) fn demand(
        &mut self,
        own: &FlowDemand,
        links: &[LinkCandidate],
    ) -> (FlowDemand, u64) {
        let need = self.buffer.need(&BufferedStream {
            bytes_per_s: self.watching.bytes_per_s,
            ahead_bytes: self.received - self.shown as u64,
            to_come_bytes: Some(self.size - self.received),
            quota_bytes: u64::MAX,
            free_bytes_per_s: free_rate(links),
        });
        let Some(need) = need else {
            return (own.clone(), 0);
        };
        let wanted = need.remaining_bytes.filter(|_| self.buffer.is_filling());
        let demand = FlowDemand {
            policy: own.policy,
            metered_bytes_left: own.metered_bytes_left,
            ..need
        };
        (demand, wanted.unwrap_or(0))
    }
}

/// The rate of free links that are not silent. A link that was never measured gets a chance,
/// because the buffer bridges an error.
fn free_rate(links: &[LinkCandidate]) -> Option<f64> {
    let free = |link: &&LinkCandidate| link.class == LinkClass::Free && link.in_use;
    let rates: Vec<f64> = links
        .iter()
        .filter(free)
        .map(|link| link.rate_bytes_per_s.unwrap_or(f64::MAX / 16.0))
        .collect();
    (!rates.is_empty()).then(|| rates.iter().sum())
}

impl SimDevice {
    /// Adds a viewer from now on.
    pub(crate) fn watch(&mut self, watching: ViewerConfig) {
        let size = self.specs[0].bytes.unwrap_or(0);
        self.viewer = Some(SimViewer::new(watching, size));
    }

    /// Informs the viewer how many bytes have arrived.
    pub(crate) fn show(&mut self, now: Time) {
        if let Some(viewer) = &mut self.viewer {
            viewer.advance(now, self.transfers[0].sink.content_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_sched::{CostPolicy, DeadlineFallback};
    use std::time::Duration;

    fn viewer() -> SimViewer {
        let watching = ViewerConfig {
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
        // 3 kB last until 5 s; half a second is not enough to continue.
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
        let own = FlowDemand {
            remaining_bytes: Some(10_000),
            left: None,
            policy: CostPolicy::FreeFirst,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        };
        let wifi = |rate: f64| LinkCandidate {
            name: "wlan0".into(),
            class: LinkClass::Free,
            rate_bytes_per_s: Some(rate),
            metric: 0,
            stalled: false,
            in_use: true,
        };
        let mut viewer = viewer();
        let pays = |viewer: &mut SimViewer, links: &[LinkCandidate]| viewer.demand(&own, links).1;
        assert_eq!(pays(&mut viewer, &[]), 5_000);
        viewer.advance(s(1.0), 4_000);
        assert_eq!(pays(&mut viewer, &[]), 1_000);
        assert_eq!(pays(&mut viewer, &[wifi(2_000.0)]), 0);
        assert_eq!(pays(&mut viewer, &[]), 0);
        viewer.advance(s(3.5), 4_000);
        assert!(
            pays(&mut viewer, &[wifi(500.0)]) > 0,
            "too weak counts as absent"
        );
    }
}
