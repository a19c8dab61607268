//! How fast each link carries payload, as the device's policy knows it.

use cedos_lab_link::{Span, Time};

/// One sample is the mean over this long. // a guess: several round trips, a fraction of a grant
const PERIOD: Span = Span::from_millis(500);

/// The rate of one attachment of a link.
#[derive(Clone, Debug, Default)]
pub(crate) struct RateMeter {
    since: Option<Time>,
    bytes: u64,
    samples: u32,
    rate: u64,
}

impl RateMeter {
    /// Payload arrived over the link.
    pub(crate) fn on_payload(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// A moment at which the link was in use all the time since the one before. What arrives within a
    /// round trip comes in one piece where grants run out, so a sample holds a whole one.
    pub(crate) fn tick(&mut self, now: Time, round_trip: Span) {
        let since = *self.since.get_or_insert(now);
        let over = now.since(since);
        if over < round_trip.max(PERIOD) {
            return;
        }
        let sample = (u128::from(self.bytes) * 1_000_000_000 / u128::from(over.as_nanos())) as u64;
        self.samples += 1;
        // The first period holds the handshake and slow start: it says little, unless it is all
        // there was. Later ones count a quarter.
        // Over a long round trip what is measured may be the grant: then it rises at once, so that
        // grants soon are no hindrance any more.
        let rises = round_trip > PERIOD && sample > self.rate;
        self.rate = if self.samples <= 2 || rises {
            sample
        } else {
            (3 * self.rate + sample) / 4
        };
        self.since = Some(now);
        self.bytes = 0;
    }

    /// The link is not in use: what it carries now says nothing of what it could.
    pub(crate) fn rest(&mut self) {
        self.since = None;
        self.bytes = 0;
    }

    /// Bytes per second, once measured.
    pub(crate) fn rate(&self) -> Option<u64> {
        (self.samples > 1 || (self.samples == 1 && self.rate > 0)).then_some(self.rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEAR: Span = Span::from_millis(40);

    #[test]
    fn over_a_long_round_trip_a_rise_counts_at_once_and_a_fall_slowly() {
        let far = Span::from_secs(2);
        let mut meter = RateMeter::default();
        let mut at = Time::ZERO;
        meter.tick(at, far);
        for bytes in [1_000, 2_000, 20_000, 80_000, 8_000] {
            // It comes at the end of a round trip, all at once.
            for _ in 0..20 {
                at += Span::from_millis(100);
                meter.on_payload(bytes / 20);
                meter.tick(at, far);
            }
        }
        assert_eq!(meter.rate(), Some((3 * 40_000 + 4_000) / 4));
    }

    #[test]
    fn a_steady_link_is_measured_and_a_resting_one_keeps_its_figure() {
        let mut meter = RateMeter::default();
        assert_eq!(meter.rate(), None);
        for n in 0..40 {
            meter.tick(Time::ZERO + Span::from_millis(100 * n), NEAR);
            meter.on_payload(10_000);
        }
        assert_eq!(meter.rate(), Some(100_000));
        meter.rest();
        meter.tick(Time::from_secs_f64(100.0), NEAR);
        meter.tick(Time::from_secs_f64(100.1), NEAR);
        assert_eq!(meter.rate(), Some(100_000));
    }

    #[test]
    fn a_link_that_carries_nothing_is_soon_known_for_it() {
        let mut meter = RateMeter::default();
        for n in 0..=10 {
            meter.tick(Time::ZERO + Span::from_millis(100 * n), NEAR);
        }
        assert_eq!(meter.rate(), Some(0));
    }
}
