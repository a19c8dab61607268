//! Measures when a flow's bytes arrived: the first one, the last one, and the longest pause in
//! between.
//!
//! ```text
//!  start ── first byte ─▮▮▮▮▮▮────── silence ──────▮▮▮▮▮▮─ last byte
//! ```
//!
//! It is given the number of bytes at each check, so it works in the same way for every client: for
//! a download the size of its file, for an upload the bytes that the origin has received.

use cedos_lab_link::{Span, Time};

/// The arrivals of one flow.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArrivalMeter {
    bytes: u64,
    first: Option<Time>,
    last: Option<Time>,
    longest: Span,
}

impl ArrivalMeter {
    /// Records the current number of bytes. A lower number than before counts as no change.
    pub fn on_bytes(&mut self, now: Time, bytes: u64) {
        if bytes <= self.bytes {
            return;
        }
        self.bytes = bytes;
        self.first = self.first.or(Some(now));
        if let Some(last) = self.last.replace(now) {
            self.longest = self.longest.max(now.since(last));
        }
    }

    /// When the first byte arrived, in seconds of the run.
    pub fn first_byte_s(&self) -> Option<f64> {
        self.first.map(Time::as_secs_f64)
    }

    /// When the last new byte arrived, in seconds of the run.
    pub fn last_byte_s(&self) -> Option<f64> {
        self.last.map(Time::as_secs_f64)
    }

    /// The longest time between two arrivals. If the content is not `whole`, the time until `now`
    /// counts as well.
    pub fn silence_max_s(&self, now: Time, whole: bool) -> Option<f64> {
        let since_last = now.since(self.last?);
        let open = if whole { Span::ZERO } else { since_last };
        Some(self.longest.max(open).as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_the_longest_time_between_arrivals_and_to_an_early_end() {
        let at = |ms| Time::ZERO + Span::from_millis(ms);
        let mut meter = ArrivalMeter::default();
        assert_eq!(meter.silence_max_s(at(10), false), None);
        for (ms, bytes) in [
            (100, 0),
            (250, 10),
            (350, 20),
            (600, 15),
            (850, 30),
            (900, 31),
        ] {
            meter.on_bytes(at(ms), bytes);
        }
        assert_eq!(meter.first_byte_s(), Some(0.25));
        assert_eq!(meter.last_byte_s(), Some(0.9));
        assert_eq!(meter.silence_max_s(at(5_900), true), Some(0.5));
        assert_eq!(meter.silence_max_s(at(5_900), false), Some(5.0));
    }
}
