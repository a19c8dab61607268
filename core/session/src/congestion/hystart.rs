//! HyStart++ (RFC 9406): leaves slow start when the round trip grows, before the queue overflows.
//!
//! A round trip grows as well when data in the other direction delays the ACKs, as an upload does to a
//! download. RFC 9406 then ends slow start far below the path's rate. Therefore conservative slow start
//! ends slow start only if the delivery rate has stopped growing with the window; otherwise slow start
//! goes on, and the longer round trip counts as the path's own.

use d2tp_time::{Span, Time};

use super::AckEvent;

const RTT_THRESHOLD_MIN: Span = Span::from_millis(4); // RFC 9406 §4.3
const RTT_THRESHOLD_MAX: Span = Span::from_millis(16); // RFC 9406 §4.3
const RTT_DIVISOR: u64 = 8; // RFC 9406 §4.3
const SAMPLES: u32 = 8; // RFC 9406 §4.3 N_RTT_SAMPLE
const CSS_GROWTH_DIVISOR: u64 = 4; // RFC 9406 §4.3
const CSS_ROUNDS: u32 = 5; // RFC 9406 §4.3
/// From which round on of conservative slow start the delivery rate is compared with that of two rounds before. Its first
/// round acknowledges what was sent before it, so it counts as slow on every path.
const RATE_ROUNDS: u32 = 4;
/// Over two rounds conservative slow start grows the window by (5/4)², 1.56. On a path that is full the
/// delivery rate does not follow; if it grew by this factor, the path was not full. // a guess: half of the growth
const RATE_GROWTH: (u64, u64) = (5, 4);

/// How many bytes were acknowledged in a round, and how long it took.
#[derive(Clone, Copy, Debug, Default)]
struct RoundDelivery {
    bytes: u64,
    took: Span,
}

impl RoundDelivery {
    /// Whether this round's rate exceeds that of `earlier` by [`RATE_GROWTH`].
    fn is_much_faster_than(self, earlier: RoundDelivery) -> bool {
        let (num, den) = RATE_GROWTH;
        // bytes / took ≥ num/den · earlier.bytes / earlier.took, without a division.
        let product = |bytes: u64, span: Span, factor: u64| {
            u128::from(bytes) * u128::from(span.as_nanos()) * u128::from(factor)
        };
        earlier.bytes > 0
            && product(self.bytes, earlier.took, den) >= product(earlier.bytes, self.took, num)
    }
}

/// The state of slow start. It takes memory from the first ACK on that may enlarge the window: most
/// paths of a server with many sessions have none.
#[derive(Clone, Debug)]
pub(super) struct HyStart(Option<Box<SlowStartRounds>>);

/// The rounds of slow start, in its two phases.
#[derive(Clone, Debug)]
struct SlowStartRounds {
    round_end: u64,
    last_min: Span,
    current_min: Span,
    samples: u32,
    css_baseline: Option<Span>,
    css_rounds: u32,
    /// When the current round began, and what has been acknowledged since.
    round_start: Option<Time>,
    round_bytes: u64,
    /// The last three rounds, the newest last.
    delivered: [RoundDelivery; 3],
}

impl HyStart {
    pub(super) fn new() -> Self {
        HyStart(None)
    }

    /// The bytes to add to the window for this ACK, and whether slow start is over.
    pub(super) fn on_ack(&mut self, acked: &AckEvent) -> (u64, bool) {
        let rounds = self.0.get_or_insert_with(|| SlowStartRounds::new().into());
        rounds.on_ack(acked)
    }
}

impl SlowStartRounds {
    fn new() -> Self {
        SlowStartRounds {
            round_end: 0,
            last_min: Span::MAX,
            current_min: Span::MAX,
            samples: 0,
            css_baseline: None,
            css_rounds: 0,
            round_start: None,
            round_bytes: 0,
            delivered: [RoundDelivery::default(); 3],
        }
    }

    fn on_ack(&mut self, acked: &AckEvent) -> (u64, bool) {
        if acked.largest >= self.round_end {
            self.last_min = self.current_min;
            self.current_min = Span::MAX;
            self.samples = 0;
            self.round_end = acked.next_number;
            self.delivered.rotate_left(1);
            self.delivered[2] = RoundDelivery {
                bytes: std::mem::take(&mut self.round_bytes),
                took: self
                    .round_start
                    .map_or(Span::ZERO, |at| acked.now.since(at)),
            };
            self.round_start = Some(acked.now);
            if self.css_baseline.is_some() {
                self.css_rounds += 1;
            }
            let [before, _, last] = self.delivered;
            if self.css_rounds >= RATE_ROUNDS && last.is_much_faster_than(before) {
                self.css_baseline = None;
                self.css_rounds = 0;
            }
        }
        self.round_bytes += acked.bytes;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs slow start over a path of 12.5 MB/s and 30 ms, whose ACKs are delayed by up to 60 ms from the fourth
    /// round on if `reverse_queue`, and returns the window at its end, or after 40 rounds.
    fn window_after_slow_start(reverse_queue: bool) -> u64 {
        const RATE: u64 = 12_500; // bytes per millisecond
        const DATAGRAM: u64 = 1_000;
        let mut hystart = HyStart::new();
        let (mut window, mut now, mut number) = (10 * DATAGRAM, Time::ZERO, 0);
        for round in 0..40_u64 {
            let delay = match reverse_queue {
                true => round.saturating_sub(2).min(3) * 20,
                false => 0,
            };
            // What exceeds the path's capacity waits in its queue.
            let queued = window.saturating_sub(RATE * (30 + delay)) / RATE;
            let rtt = Span::from_millis(30 + delay + queued);
            let packets = window / DATAGRAM;
            let step = rtt.divided(packets);
            let last = number + packets;
            for largest in number..last {
                now += step;
                let (gain, done) = hystart.on_ack(&AckEvent {
                    now,
                    bytes: DATAGRAM,
                    sent_at: now - rtt,
                    smoothed: rtt,
                    rtt,
                    fresh: true,
                    app_limited: false,
                    largest,
                    next_number: last,
                    in_flight: window,
                    sample: None,
                });
                window += gain;
                if done {
                    return window;
                }
            }
            number = last;
        }
        window
    }

    #[test]
    fn slow_start_ends_soon_after_the_path_is_full() {
        // The bandwidth-delay product is 375 kB. The round after the one that exceeds it shows the queue, when the window has
        // at most doubled, and conservative slow start triples that.
        let window = window_after_slow_start(false);
        assert!(
            (375_000..6 * 375_000 + 50_000).contains(&window),
            "{window}"
        );
    }

    #[test]
    fn delayed_acks_of_a_path_with_room_do_not_end_slow_start() {
        // With the delay of the ACKs the bandwidth-delay product is 1,125 kB.
        let window = window_after_slow_start(true);
        assert!((1_125_000..6 * 1_125_000).contains(&window), "{window}");
    }
}
