//! Pacing: spreads a congestion window over its round trip, with a token bucket that fills at the
//! path's rate.

use d2tp_time::{Span, Time};

/// The number of datagrams that may always be sent in a burst (RFC 9002 §7.7).
const BURST_DATAGRAMS: u64 = 10;
/// The part of its rate that a path may send at once: the granularity of timers and GSO batches.
const BURST_SPAN: Span = Span::from_millis(1);

/// The token bucket of one path.
#[derive(Clone, Debug)]
pub(crate) struct Pacer {
    rate: u64, // bytes per second
    bucket: u64,
    filled_at: Time,
    datagram: u64,
}

impl Pacer {
    pub(crate) fn new(now: Time, datagram: u64) -> Self {
        Pacer {
            rate: 0,
            bucket: BURST_DATAGRAMS * datagram,
            filled_at: now,
            datagram,
        }
    }

    fn capacity(&self) -> u64 {
        let span =
            (u128::from(self.rate) * u128::from(BURST_SPAN.as_nanos()) / 1_000_000_000) as u64;
        (BURST_DATAGRAMS * self.datagram).max(span)
    }

    /// Sets the path's rate in bytes per second and its datagram size.
    pub(crate) fn set_rate(&mut self, now: Time, rate: u64, datagram: u64) {
        self.fill(now);
        // A pacer without a rate would be due at all times, and let nothing leave.
        self.rate = rate.max(1);
        self.datagram = datagram;
    }

    fn fill(&mut self, now: Time) {
        let span = now.since(self.filled_at).as_nanos();
        let gained = (u128::from(self.rate) * u128::from(span) / 1_000_000_000) as u64;
        if gained > 0 {
            self.bucket = (self.bucket + gained).min(self.capacity());
            self.filled_at = now;
        }
    }

    /// The number of bytes that may leave now.
    pub(crate) fn allowance(&mut self, now: Time) -> u64 {
        self.fill(now);
        self.bucket
    }

    /// When the next datagram may leave.
    pub(crate) fn next_send(&self) -> Time {
        if self.bucket >= self.datagram || self.rate == 0 {
            return self.filled_at;
        }
        // Wait for a batch of reasonable size instead of for each datagram.
        let wanted = (self.capacity() / 2).max(self.datagram) - self.bucket;
        self.filled_at
            + Span::from_nanos((u128::from(wanted) * 1_000_000_000 / u128::from(self.rate)) as u64)
    }

    pub(crate) fn on_sent(&mut self, bytes: u64) {
        self.bucket = self.bucket.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_of_less_than_a_byte_a_second_lets_packets_wait_and_leave() {
        let mut pacer = Pacer::new(Time::ZERO, 1_000);
        pacer.set_rate(Time::ZERO, 0, 1_000);
        pacer.on_sent(10_000);
        let next = pacer.next_send();
        assert!(next > Time::ZERO);
        assert!(pacer.allowance(next) >= 1_000);
    }

    #[test]
    fn over_a_second_no_more_leaves_than_the_rate_and_one_burst() {
        let mut pacer = Pacer::new(Time::ZERO, 1_000);
        pacer.set_rate(Time::ZERO, 1_000_000, 1_000);
        let (mut now, mut sent) = (Time::ZERO, 0);
        let end = Time::ZERO + Span::from_secs(1);
        while now < end {
            while pacer.allowance(now) >= 1_000 {
                pacer.on_sent(1_000);
                sent += 1_000;
            }
            now = pacer.next_send().max(now + Span::from_micros(1));
        }
        assert!((1_000_000..=1_012_000).contains(&sent), "{sent}");
    }
}
