//! State of paths for mirroring ([`crate::mirror`]).

use d2tp_time::{Span, Time};

/// Which paths may repair the random losses of another path without a congestion response there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mirroring {
    /// No path: every loss causes a congestion response.
    Never,
    /// Free paths, and those that the device lends for this.
    #[default]
    Free,
    /// Free paths and, at a device, also metered paths at a limited rate: its driver lends them by
    /// [`crate::Session::lend_path`].
    Paid {
        /// The most bytes per second of repairs on a metered path, which the user pays for a faster
        /// Wi-Fi.
        bytes_per_second: u64,
    },
}

/// R-MIRROR-3: a segment's guard time before anything is known of the path. // Super-aggregation §3.3
const GUARD: Span = Span::from_millis(256);

/// The initial and the smallest rate of repairs on a path, in bytes per second: one small datagram
/// in each guard time.
const RATE_MIN: u64 = 1_200 * 1_000 / 256;

/// How much a round trip may exceed the minimum without a sign of a queue: the delay of one ACK.
const QUEUE_SLACK: Span = Span::from_millis(20);

/// The rate at which a path repairs losses of others.
#[derive(Debug)]
pub(crate) struct MirrorGuard {
    /// The rate in bytes per second.
    rate: u64,
    /// The number of bytes that may be sent now.
    pub(crate) left: u64,
    filled_at: Time,
    /// Whether the rate was too small since the last round trip was measured.
    short: bool,
    /// Whether a queue was seen. From then on the rate grows slowly.
    found: bool,
    /// When the rate last changed. Packets sent before prove nothing about the new rate.
    changed_at: Time,
}

impl MirrorGuard {
    pub(crate) fn new(now: Time, datagram: u64) -> MirrorGuard {
        MirrorGuard {
            rate: RATE_MIN,
            left: datagram,
            filled_at: now,
            short: false,
            found: false,
            changed_at: now,
        }
    }

    /// Whether a datagram may leave now.
    pub(crate) fn has_room(&mut self, now: Time, datagram: u64) -> bool {
        let most = datagram.max(bytes(self.rate, GUARD));
        let gained = bytes(self.rate, now.since(self.filled_at));
        if gained > 0 {
            self.left = (self.left + gained).min(most);
            self.filled_at = now;
        }
        self.short |= self.left < datagram;
        self.left >= datagram
    }

    /// When a datagram may leave next.
    pub(crate) fn opens_at(&self, datagram: u64) -> Time {
        let missing = u128::from(datagram.saturating_sub(self.left));
        let nanos = (missing * 1_000_000_000).div_ceil(u128::from(self.rate));
        self.filled_at + Span::from_nanos(nanos as u64)
    }

    /// Handles a round trip sample of the path.
    pub(crate) fn on_round_trip(&mut self, now: Time, latest: Span, least: Span) {
        if now < self.changed_at + latest {
            return;
        }
        if latest > least + least.divided(2) + QUEUE_SLACK {
            self.rate = (self.rate / 2).max(RATE_MIN);
            (self.found, self.changed_at) = (true, now);
        } else if std::mem::take(&mut self.short) {
            self.rate += if self.found { self.rate / 8 } else { self.rate };
            self.changed_at = now;
        }
    }
}

/// A metered path that a device lends, with the bytes that may be granted now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LentPath {
    pub(crate) left: u64,
    pub(crate) filled_at: Time,
    /// The time from which grants may be issued. Before, the peer does not know the purpose of the
    /// path, and would send new data on it.
    pub(crate) from: Time,
}

/// The bytes that a rate carries in a span of time.
pub(crate) fn bytes(rate: u64, span: Span) -> u64 {
    (u128::from(rate) * u128::from(span.as_nanos()) / 1_000_000_000) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Span = Span::from_millis(150);

    fn ms(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    /// The number of bytes that leave within a second, one datagram at a time.
    fn second_from(guard: &mut MirrorGuard, from: u64) -> u64 {
        let leaves = (from..from + 1_000).filter(|at| {
            let room = guard.has_room(ms(*at), 1_200);
            guard.left -= if room { 1_200 } else { 0 };
            room
        });
        leaves.count() as u64 * 1_200
    }

    #[test]
    fn a_path_nothing_is_known_of_takes_a_segment_in_256_ms() {
        // R-MIRROR-3
        let mut guard = MirrorGuard::new(ms(0), 1_200);
        assert_eq!(second_from(&mut guard, 0), 4 * 1_200);
        let (left, opens_at) = (guard.left, guard.opens_at(1_200));
        assert!(left < 1_200 && opens_at > ms(1_000) && opens_at < ms(1_300));
        assert!(guard.has_room(opens_at, 1_200));
    }

    #[test]
    fn it_takes_more_while_it_is_asked_for_more_and_shows_no_queue() {
        // R-MIRROR-3
        let mut guard = MirrorGuard::new(ms(0), 1_200);
        let mut now = ms(1_000);
        let mut hear = |guard: &mut MirrorGuard, latest: Span| {
            now += latest;
            guard.on_round_trip(now, latest, LEAST);
        };
        hear(&mut guard, LEAST);
        assert_eq!(guard.rate, RATE_MIN, "nobody wanted more");
        for _ in 0..4 {
            guard.short = true;
            hear(&mut guard, LEAST + Span::from_millis(60));
        }
        assert_eq!(guard.rate, 16 * RATE_MIN);
        guard.short = true;
        guard.on_round_trip(guard.changed_at + LEAST.divided(2), LEAST, LEAST);
        assert_eq!(guard.rate, 16 * RATE_MIN, "it left before");
        let carried = second_from(&mut guard, 10_000);
        assert!(
            carried > 15 * RATE_MIN && carried < 21 * RATE_MIN,
            "{carried}"
        );
        hear(&mut guard, LEAST.times(2));
        assert_eq!(guard.rate, 8 * RATE_MIN);
        guard.short = true;
        hear(&mut guard, LEAST);
        assert_eq!(guard.rate, 9 * RATE_MIN);
        (0..20).for_each(|_| hear(&mut guard, LEAST.times(3)));
        assert_eq!(guard.rate, RATE_MIN);
    }
}
