//! D2BufMgr: turns the state of a reader's buffer into a demand: how many bytes to fetch, and by
//! when.
//!
//! ```text
//!  quota ┬ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ a free link fills up to here
//!        │
//!  high  ┼ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ a metered link stops here ─────┐ saving: nothing is paid
//!        │     ▲ filling: up to high, before it runs dry      │
//!  low   ┼ ────┴──────────────────────────────────────────────┘ and begins again here
//!  empty ┴
//! ```
//!
//! The thresholds of section III.C of the Cedos paper. A free link that is slower than the stream
//! counts as none. Each stream has its own buffer; the scheduler gets the demands of all of them.

use crate::link_choice::{CostPolicy, DeadlineFallback, FlowDemand};
use std::time::Duration;

/// The default low threshold as a multiple of the switching delay.
const LOW_SWITCHES: u32 = 3; // a guess: one, another that fails, and one more

/// The playing time between the low and the high threshold. Higher: more is paid for that a free
/// link might have carried. Lower: more switches.
const HIGH_ABOVE: Duration = Duration::from_secs(10); // a guess

/// How long an interface takes until it has an address.
const INTERFACE_UP: Duration = Duration::from_millis(1_500); // measured: association and DHCP of a phone

/// The assumed round trip of a challenge on a new path, until one was measured.
const CHALLENGE_FIRST: Duration = Duration::from_millis(300); // a guess: three round trips of cellular

/// The delay until a link's first byte arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwitchDelay {
    /// Time until the interface has an address.
    pub interface: Duration,
    /// Time of the path challenge on the new path.
    pub challenge: Duration,
    /// Time of the first packet after the challenge.
    pub first_packet: Duration,
}

impl SwitchDelay {
    /// The delay with a measured challenge; an assumed one if there is none.
    pub fn measured(challenge: Option<Duration>) -> SwitchDelay {
        let challenge = challenge.unwrap_or(CHALLENGE_FIRST);
        SwitchDelay {
            interface: INTERFACE_UP,
            challenge,
            first_packet: challenge,
        }
    }

    /// Interface, challenge and first packet together.
    pub fn total(&self) -> Duration {
        self.interface + self.challenge + self.first_packet
    }
}

/// The buffer levels at which the use of metered links begins and ends, in bytes ahead of the
/// reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefillThresholds {
    /// The level at which the use of metered links begins.
    pub low_bytes: u64,
    /// The level at which the use of metered links ends.
    pub high_bytes: u64,
}

impl RefillThresholds {
    /// The default levels for a stream of this rate.
    pub fn derived(bytes_per_s: u64, switching: &SwitchDelay) -> RefillThresholds {
        let low = switching.total() * LOW_SWITCHES;
        let bytes = |span: Duration| (span.as_secs_f64() * bytes_per_s as f64).ceil() as u64;
        RefillThresholds {
            low_bytes: bytes(low),
            high_bytes: bytes(low + HIGH_ABOVE),
        }
    }
}

/// The current state of a stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BufferedStream {
    /// The rate of the reader in bytes per second.
    pub bytes_per_s: u64,
    /// Bytes buffered ahead of the reader.
    pub ahead_bytes: u64,
    /// Bytes still to be fetched, if known.
    pub to_come_bytes: Option<u64>,
    /// The most bytes that may be buffered.
    pub quota_bytes: u64,
    /// The total rate of the free links, if any works.
    pub free_bytes_per_s: Option<f64>,
}

/// Decides whether a stream uses metered links.
#[derive(Debug, Clone)]
pub struct StreamBuffer {
    thresholds: RefillThresholds,
    switching: SwitchDelay,
    filling: bool,
}

impl StreamBuffer {
    /// Creates the buffer control with these levels and this switching delay.
    pub fn new(thresholds: RefillThresholds, switching: SwitchDelay) -> StreamBuffer {
        StreamBuffer {
            thresholds,
            switching,
            filling: false,
        }
    }

    /// Changes the levels.
    pub fn set_thresholds(&mut self, thresholds: RefillThresholds, switching: SwitchDelay) {
        self.thresholds = thresholds;
        self.switching = switching;
    }

    /// The stream's current demand; `None` if its buffer is full or everything was fetched.
    pub fn need(&mut self, stream: &BufferedStream) -> Option<FlowDemand> {
        let low = self.thresholds.low_bytes;
        let high = self.thresholds.high_bytes.max(low);
        let free = stream.free_bytes_per_s;
        let free_keeps_up = free.is_some_and(|rate| rate >= stream.bytes_per_s as f64);
        if stream.ahead_bytes <= low {
            self.filling = true;
        } else if stream.ahead_bytes >= high || free_keeps_up {
            self.filling = false;
        }
        let to_come = stream.to_come_bytes.unwrap_or(u64::MAX);
        let room = stream.quota_bytes.saturating_sub(stream.ahead_bytes);
        let (wanted, left) = if self.filling {
            (high - stream.ahead_bytes.min(high), self.until_dry(stream))
        } else if free_keeps_up {
            (room, None)
        } else {
            // Bytes that are read while a link comes up must be buffered before.
            let switch_bytes = self.switching.total().as_secs_f64() * stream.bytes_per_s as f64;
            let above = stream.ahead_bytes - low;
            let left = self.switching.total() + reading(above, stream);
            (switch_bytes.ceil() as u64, Some(left))
        };
        let bytes = wanted.min(to_come).min(room);
        (bytes > 0).then_some(FlowDemand {
            remaining_bytes: Some(bytes),
            left,
            policy: CostPolicy::FreeFirst,
            if_late: DeadlineFallback::Cell,
            metered_bytes_left: None,
        })
    }

    /// Whether metered links may carry the stream now.
    pub fn is_filling(&self) -> bool {
        self.filling
    }

    fn until_dry(&self, stream: &BufferedStream) -> Option<Duration> {
        Some(reading(stream.ahead_bytes, stream))
    }
}

/// How long the reader takes to read this many bytes.
fn reading(bytes: u64, stream: &BufferedStream) -> Duration {
    Duration::from_secs_f64(bytes as f64 / stream.bytes_per_s.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWITCHING: SwitchDelay = SwitchDelay {
        interface: Duration::from_millis(1_500),
        challenge: Duration::from_millis(100),
        first_packet: Duration::from_millis(400),
    };
    const THRESHOLDS: RefillThresholds = RefillThresholds {
        low_bytes: 500_000,
        high_bytes: 2_000_000,
    };

    fn stream(ahead_bytes: u64, free_bytes_per_s: Option<f64>) -> BufferedStream {
        BufferedStream {
            bytes_per_s: 100_000,
            ahead_bytes,
            to_come_bytes: None,
            quota_bytes: 50_000_000,
            free_bytes_per_s,
        }
    }

    fn wanted(buffer: &mut StreamBuffer, stream: &BufferedStream) -> (u64, Option<u64>) {
        let need = buffer.need(stream).expect("it wants something");
        let left_ms = need.left.map(|left| left.as_millis() as u64);
        (need.remaining_bytes.expect("known"), left_ms)
    }

    #[test]
    fn it_pays_from_low_to_high_and_then_saves_down_to_low_again() {
        let mut buffer = StreamBuffer::new(THRESHOLDS, SWITCHING);
        let mut level = 1_000_000u64;
        let (mut low, mut high, mut turns) = (u64::MAX, 0, 0);
        let mut was = buffer.is_filling();
        for _ in 0..2_000 {
            buffer.need(&stream(level, None));
            // In a tenth of a second 10 kB are read, and 100 kB can be paid for.
            level = level - 10_000 + if buffer.is_filling() { 100_000 } else { 0 };
            turns += usize::from(buffer.is_filling() != was);
            was = buffer.is_filling();
            (low, high) = (low.min(level), high.max(level));
        }
        assert!(low >= THRESHOLDS.low_bytes - 10_000, "{low}");
        assert!(high <= THRESHOLDS.high_bytes + 100_000, "{high}");
        assert!(turns > 10, "{turns}");
    }

    #[test]
    fn while_saving_it_wants_what_is_read_during_a_switch_when_low_is_reached() {
        let mut buffer = StreamBuffer::new(THRESHOLDS, SWITCHING);
        // 10 s above the low level, and 2 s for the switch.
        assert_eq!(
            wanted(&mut buffer, &stream(1_500_000, None)),
            (200_000, Some(12_000))
        );
        // At the low level the state changes: fill up to the high level before the buffer is empty.
        assert_eq!(
            wanted(&mut buffer, &stream(500_000, None)),
            (1_500_000, Some(5_000))
        );
        assert_eq!(
            wanted(&mut buffer, &stream(1_500_000, None)),
            (500_000, Some(15_000))
        );
    }

    #[test]
    fn a_free_link_fills_up_to_the_quota_and_one_too_weak_counts_as_none() {
        let mut buffer = StreamBuffer::new(THRESHOLDS, SWITCHING);
        let strong = stream(10_000_000, Some(200_000.0));
        assert_eq!(wanted(&mut buffer, &strong), (40_000_000, None));
        assert_eq!(buffer.need(&stream(50_000_000, Some(200_000.0))), None);
        let weak = stream(1_500_000, Some(90_000.0));
        assert_eq!(wanted(&mut buffer, &weak).0, 200_000);
    }

    #[test]
    fn no_more_is_wanted_than_there_is() {
        let mut buffer = StreamBuffer::new(THRESHOLDS, SWITCHING);
        let end = BufferedStream {
            to_come_bytes: Some(7),
            ..stream(100_000, None)
        };
        assert_eq!(wanted(&mut buffer, &end).0, 7);
        let over = BufferedStream {
            to_come_bytes: Some(0),
            ..stream(100_000, None)
        };
        assert_eq!(buffer.need(&over), None);
    }

    #[test]
    fn other_thresholds_leave_it_as_it_was() {
        let mut buffer = StreamBuffer::new(THRESHOLDS, SWITCHING);
        buffer.need(&stream(400_000, None));
        let thresholds = RefillThresholds {
            low_bytes: 100_000,
            high_bytes: 900_000,
        };
        buffer.set_thresholds(thresholds, SWITCHING);
        assert_eq!(wanted(&mut buffer, &stream(400_000, None)).0, 500_000);
        buffer.need(&stream(900_000, None));
        assert!(!buffer.is_filling());
    }

    #[test]
    fn derived_thresholds_outlast_a_switch() {
        let thresholds = RefillThresholds::derived(100_000, &SWITCHING);
        assert_eq!(thresholds.low_bytes, 600_000);
        assert_eq!(thresholds.high_bytes, 1_600_000);
    }
}
