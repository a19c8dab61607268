//! Decides when the traffic of a program shows the rate of a link.
//!
//! A program sends when it has data. A few bytes, or a pause between two answers, show how fast the
//! program is; only data that moves without a pause shows how fast the link is.

use d2tp_time::{Span, Time};

/// The longest time in which the bytes of one report moved. A client reports each second while data
/// moves, and at once when the first byte after a pause moves.
const REPORTED_WITHIN: Span = Span::from_millis(1_500);

/// The shortest time over which a rate is measured, and the pause after which bytes measure no
/// rate.
const MEASURED_OVER: Span = Span::from_millis(500); // a guess

/// The fewest bytes that measure a rate.
pub(super) const MEASURED_BYTES_MIN: u64 = 14_600; // an initial window, RFC 6928

/// Bytes that one link carried for one client and that are not part of a measured rate yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct RateMeasurement {
    bytes: u64,
    since: Time,
    moved_at: Time,
}

impl RateMeasurement {
    pub(super) fn new(now: Time) -> RateMeasurement {
        RateMeasurement {
            bytes: 0,
            since: now,
            moved_at: now,
        }
    }

    /// Adds what the link carried since the last report. Returns bytes and the time they took, once
    /// they suffice for a measurement.
    pub(super) fn record(&mut self, now: Time, more: u64) -> Option<(u64, Span)> {
        if more == 0 {
            if now.since(self.moved_at) >= MEASURED_OVER {
                (self.bytes, self.since) = (0, now);
            }
            return None;
        }
        if self.bytes == 0 {
            self.since = now - now.since(self.since).min(REPORTED_WITHIN);
        }
        self.bytes += more;
        self.moved_at = now;
        let took = now.since(self.since);
        (self.bytes >= MEASURED_BYTES_MIN && took >= MEASURED_OVER).then(|| {
            self.since = now;
            (std::mem::take(&mut self.bytes), took)
        })
    }
}
