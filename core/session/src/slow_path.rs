//! Slow paths: radios of some ten kilobits a second beside Wi-Fi. What they do to datagrams.
//!
//! ```text
//!  a far faster path works      datagrams leave on that one alone: here they would arrive seconds later
//!  it fell silent               they leave here, and as few are under way as queue for a second
//! ```
//!
//! TCP within datagrams takes what arrives seconds late for lost, and a queue of seconds for a round trip.

use d2tp_time::{Span, Time};

use crate::path::SessionPath;
use crate::path_limit::LIMIT_DATAGRAMS_MIN;

/// Below this rate, in bytes per second, a path is slow: a full packet takes longer than 40 ms on it. Higher: links that carry video
/// get little beside a faster one, and hold senders in its outages. Lower: radios of some hundred kb/s delay and reorder what
/// goes beside them.
const SLOW_RATE: u64 = 32_000; // a guess: between a radio of 115 kb/s and LTE at the edge of a cell

/// How many times as fast as a slow path another one is beside which the slow one carries no datagrams. Higher: datagrams arrive out
/// of order by seconds. Lower: more of what a slow path carries is given up.
pub(crate) const FAR_FASTER: u64 = 8; // a guess: at most an eighth of the rate is given up

/// How many times as fast a silent path was as the slow ones that are left. Fewer than above: at the end its window may have been
/// halved.
pub(crate) const WAS_FAR_FASTER: u64 = 4; // a guess

/// How long a datagram waits on a slow path for others, about. Higher: a call, or an answer, waits for longer. Lower: the path idles
/// where its rate varies.
const QUEUE_MAX: Span = Span::from_secs(1); // a guess: four full packets at 48 kb/s

/// How many bytes datagrams may have in flight on a path, so that they do not queue for long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DatagramQueueBound {
    bytes: u64,
    /// What was sent before that is known only then.
    next_at: Time,
}

impl DatagramQueueBound {
    pub(crate) fn new(now: Time) -> DatagramQueueBound {
        DatagramQueueBound {
            bytes: u64::MAX,
            next_at: now,
        }
    }

    /// Handles a sample of the round trip: what is in flight is carried in that time.
    fn on_rtt(&mut self, now: Time, rtt: Span, rtt_min: Span, in_flight: u64, datagram: u64) {
        if now < self.next_at {
            return;
        }
        self.next_at = now + rtt;
        let most = rtt_min + QUEUE_MAX;
        self.bytes = match rtt > most {
            true => {
                let carried = u128::from(in_flight) * u128::from(most.as_nanos());
                (carried / u128::from(rtt.as_nanos().max(1))) as u64
            }
            false => self.bytes.saturating_add(datagram),
        };
        self.bytes = self.bytes.max(LIMIT_DATAGRAMS_MIN * datagram);
    }
}

impl SessionPath {
    /// Whether the path is known to carry little.
    pub(crate) fn is_slow(&self) -> bool {
        let rtt = &self.recovery.rtt;
        if let Some(line) = self.serial() {
            // Its window is a second of the line, however short its round trip is.
            return rtt.is_measured() && u64::from(line.bytes_per_second) < SLOW_RATE;
        }
        let carries = self
            .recovery
            .controller
            .window()
            .saturating_mul(1_000_000_000);
        rtt.is_measured() && carries < SLOW_RATE.saturating_mul(rtt.smoothed().as_nanos())
    }

    /// Whether this path carries so many times as much as `other`, with a much shorter round trip, as far as both were measured.
    pub(crate) fn is_faster_than(&self, other: &SessionPath, times: u64) -> bool {
        let (own, theirs) = (&self.recovery, &other.recovery);
        let (rtt, their_rtt) = (own.rtt.smoothed(), theirs.rtt.smoothed());
        let product = |window: u64, rtt: Span| u128::from(window) * u128::from(rtt.as_nanos());
        own.rtt.is_measured()
            && rtt.times(2) <= their_rtt
            && product(own.controller.window(), their_rtt)
                >= product(theirs.controller.window(), rtt) * u128::from(times)
    }

    /// Handles a sample of the path's round trip, with so many bytes in flight before the ACK.
    pub(crate) fn bound_datagram_queue(&mut self, now: Time, rtt: Span, in_flight: u64) {
        if self.is_slow() {
            let (rtt_min, datagram) = (self.recovery.rtt.min(), self.mtu.current() as u64);
            self.datagram_bound
                .on_rtt(now, rtt, rtt_min, in_flight, datagram);
        }
    }

    /// Whether so many datagrams are under way, if the path is slow, that further ones would wait for long.
    pub(crate) fn has_datagram_queue(&self) -> bool {
        self.recovery.in_flight >= self.datagram_bound.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link of 6,000 bytes a second and half a second, which holds what is in flight.
    fn settled(mut window: u64) -> (u64, u64) {
        let (mut now, rtt_min) = (Time::ZERO, Span::from_millis(500));
        let mut bound = DatagramQueueBound::new(now);
        let mut seen = (u64::MAX, 0);
        for round in 0..60 {
            let in_flight = window.min(bound.bytes);
            let rtt = rtt_min.max(Span::from_micros(in_flight * 1_000_000 / 6_000));
            now += rtt;
            bound.on_rtt(now, rtt, rtt_min, in_flight, 1_280);
            window += 1_280;
            if round > 10 {
                seen = (seen.0.min(in_flight), seen.1.max(in_flight));
            }
        }
        seen
    }

    #[test]
    fn what_is_in_flight_on_a_slow_path_settles_where_it_queues_for_a_second() {
        for window in [12_000, 40_000, 200_000] {
            let (least, most) = settled(window);
            assert!(least >= 8_000 && most <= 11_000, "{least} to {most}");
        }
    }
}
