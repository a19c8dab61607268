//! HyStart++ (RFC 9406): leaves slow start when the round trip grows, before the queue overflows.

use d2tp_time::Span;

use super::AckEvent;

const RTT_THRESHOLD_MIN: Span = Span::from_millis(4); // RFC 9406 §4.3
const RTT_THRESHOLD_MAX: Span = Span::from_millis(16); // RFC 9406 §4.3
const RTT_DIVISOR: u64 = 8; // RFC 9406 §4.3
const SAMPLES: u32 = 8; // RFC 9406 §4.3 N_RTT_SAMPLE
const CSS_GROWTH_DIVISOR: u64 = 4; // RFC 9406 §4.3
const CSS_ROUNDS: u32 = 5; // RFC 9406 §4.3

/// The state of slow start in its two phases.
#[derive(Clone, Debug)]
pub(super) struct HyStart {
    round_end: u64,
    last_min: Span,
    current_min: Span,
    samples: u32,
    css_baseline: Option<Span>,
    css_rounds: u32,
}

impl HyStart {
    pub(super) fn new() -> Self {
        HyStart {
            round_end: 0,
            last_min: Span::MAX,
            current_min: Span::MAX,
            samples: 0,
            css_baseline: None,
            css_rounds: 0,
        }
    }

    /// The bytes to add to the window for this ACK, and whether slow start is over.
    pub(super) fn on_ack(&mut self, acked: &AckEvent) -> (u64, bool) {
        if acked.largest >= self.round_end {
            self.last_min = self.current_min;
            self.current_min = Span::MAX;
            self.samples = 0;
            self.round_end = acked.next_number;
            if self.css_baseline.is_some() {
                self.css_rounds += 1;
            }
        }
        if acked.fresh {
            self.current_min = self.current_min.min(acked.rtt);
            self.samples += 1;
        }
        let judged =
            self.samples >= SAMPLES && self.current_min != Span::MAX && self.last_min != Span::MAX;
        match self.css_baseline {
            None if judged => {
                let threshold = self
                    .last_min
                    .divided(RTT_DIVISOR)
                    .clamp(RTT_THRESHOLD_MIN, RTT_THRESHOLD_MAX);
                if self.current_min >= self.last_min + threshold {
                    self.css_baseline = Some(self.current_min);
                    self.css_rounds = 0;
                }
            }
            Some(baseline) if judged && self.current_min < baseline => {
                self.css_baseline = None;
            }
            _ => {}
        }
        match self.css_baseline {
            None => (acked.bytes, false),
            Some(_) => (
                acked.bytes / CSS_GROWTH_DIVISOR,
                self.css_rounds >= CSS_ROUNDS,
            ),
        }
    }
}
