//! The round-trip time of a path (RFC 9002 §5), and its probe timeout.

use d2tp_time::Span;

use crate::long_round_trip::LONG_ROUND_TRIP_MIN;

/// The round trip estimate of a path.
#[derive(Clone, Debug)]
pub(crate) struct RttEstimator {
    latest: Span,
    smoothed: Option<Span>,
    variance: Span,
    min: Span,
    initial: Span,
    /// No answer is late before this: the expected round trip, where it is long.
    answer_min: Span,
}

/// The timer granularity (RFC 9002 §6.1.2).
pub(crate) const GRANULARITY: Span = Span::from_millis(1);

impl RttEstimator {
    pub(crate) fn new(initial: Span) -> Self {
        RttEstimator {
            latest: initial,
            smoothed: None,
            variance: initial.divided(2),
            min: initial,
            initial,
            answer_min: Span::ZERO,
        }
    }

    /// An estimator for a path on which answers are expected to take as long as `initial`, if that is long.
    pub(crate) fn expecting(initial: Span) -> Self {
        RttEstimator {
            answer_min: match initial >= LONG_ROUND_TRIP_MIN {
                true => initial,
                false => Span::ZERO,
            },
            ..RttEstimator::new(initial)
        }
    }

    /// Assumes a longer round trip than before, as long as none was measured.
    pub(crate) fn assume_at_least(&mut self, round_trip: Span) {
        if self.smoothed.is_none() && self.initial < round_trip {
            let answer_min = self.answer_min;
            *self = RttEstimator::new(round_trip);
            self.answer_min = answer_min;
        }
    }

    /// Handles a sample and the ACK delay that the peer reports. Returns the sample without that
    /// delay.
    pub(crate) fn on_sample(&mut self, sample: Span, ack_delay: Span) -> Span {
        let sample = sample.max(Span::from_nanos(1));
        self.latest = sample;
        let Some(smoothed) = self.smoothed else {
            self.smoothed = Some(sample);
            self.variance = sample.divided(2);
            self.min = sample;
            return sample;
        };
        self.min = self.min.min(sample);
        let adjusted = if sample >= self.min + ack_delay {
            sample.saturating_sub(ack_delay)
        } else {
            sample
        };
        let deviation = smoothed.abs_diff(adjusted);
        self.variance = self.variance.scaled(3, 4) + deviation.divided(4);
        self.smoothed = Some(smoothed.scaled(7, 8) + adjusted.divided(8));
        adjusted
    }

    /// The smoothed round trip; the assumed one before the first sample.
    pub(crate) fn smoothed(&self) -> Span {
        self.smoothed.unwrap_or(self.initial)
    }
    pub(crate) fn latest(&self) -> Span {
        self.latest
    }
    pub(crate) fn variance(&self) -> Span {
        self.variance
    }
    pub(crate) fn min(&self) -> Span {
        self.min
    }
    pub(crate) fn is_measured(&self) -> bool {
        self.smoothed.is_some()
    }
    /// The probe timeout before backoff (RFC 9002 §6.2.1). R-LONG-2: packets may have waited for a scheduled link,
    /// however regularly the last answers came.
    pub(crate) fn probe_timeout(&self, peer_ack_delay: Span) -> Span {
        let measured = self.smoothed() + self.variance.times(4).max(GRANULARITY);
        measured.max(self.answer_min) + peer_ack_delay
    }
}
