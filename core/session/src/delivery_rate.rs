//! The delivery rate of a path: a sample for each ACK (draft-ietf-ccwg-bbr-04 §4.1).
//!
//! ```text
//!  delivered when packet P left ──┐                   ┌── delivered when P's ACK came
//!                                 ▼                   ▼
//!  sample = (delivered now − delivered then) / max(time to send them, time to acknowledge them)
//! ```
//!
//! It is computed only for controllers that use it. A snapshot is taken for every packet, in step
//! with [`Recovery`](crate::recovery::Recovery)'s notes and under the same bound.

use std::collections::VecDeque;

use d2tp_time::{Span, Time};

/// The path's delivery state when a packet was sent.
#[derive(Clone, Copy, Debug)]
struct DeliverySnapshot {
    delivered: u64,
    delivered_at: Time,
    first_sent_at: Time,
    lost: u64,
    in_flight: u64,
    app_limited: bool,
}

/// A packet that was acknowledged or lost, as its controller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketFate {
    /// Size of the packet.
    pub(crate) bytes: u64,
    /// Bytes in flight after the packet was sent, the packet included.
    pub(crate) in_flight: u64,
    /// Bytes lost since the packet was sent, the packet included if it was lost.
    pub(crate) lost: u64,
    /// Whether the sender had nothing more to send when the packet left.
    pub(crate) app_limited: bool,
}

/// A delivery rate sample, taken from an ACK.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateSample {
    /// The rate in bytes per second; `None` if the interval was too short.
    pub(crate) rate: Option<u64>,
    /// Bytes delivered since the sampled packet was sent.
    pub(crate) delivered: u64,
    /// Bytes that the path had delivered when the sampled packet was sent.
    pub(crate) prior_delivered: u64,
    /// Bytes that the path has delivered by now.
    pub(crate) delivered_total: u64,
    /// The packet that the sample was taken from.
    pub(crate) packet: PacketFate,
    /// Bytes lost since the previous ACK.
    pub(crate) newly_lost: u64,
}

/// The packet of an ACK that was sent last.
#[derive(Clone, Copy, Debug)]
struct NewestAcked {
    snapshot: DeliverySnapshot,
    sent_at: Time,
    bytes: u64,
}

/// Bytes delivered and lost on one path.
#[derive(Debug)]
pub(crate) struct DeliveryRateEstimator {
    snapshots: VecDeque<DeliverySnapshot>,
    delivered: u64,
    delivered_at: Time,
    first_sent_at: Time,
    lost: u64,
    lost_reported: u64,
    /// The number of delivered bytes up to which samples are limited by the application, not by the
    /// path.
    app_limited_until: u64,
    newest: Option<NewestAcked>,
}

impl DeliveryRateEstimator {
    pub(crate) fn new() -> Self {
        DeliveryRateEstimator {
            snapshots: VecDeque::new(),
            delivered: 0,
            delivered_at: Time::ZERO,
            first_sent_at: Time::ZERO,
            lost: 0,
            lost_reported: 0,
            app_limited_until: 0,
            newest: None,
        }
    }

    /// Records that a packet is sent; `in_flight` includes it.
    pub(crate) fn on_sent(&mut self, now: Time, bytes: u64, in_flight: u64) {
        if in_flight <= bytes {
            self.first_sent_at = now;
            self.delivered_at = now;
        }
        self.snapshots.push_back(DeliverySnapshot {
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            first_sent_at: self.first_sent_at,
            lost: self.lost,
            in_flight,
            app_limited: self.app_limited_until > self.delivered,
        });
    }

    /// Records that a packet number is skipped.
    pub(crate) fn on_skipped(&mut self) {
        self.snapshots.push_back(DeliverySnapshot {
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            first_sent_at: self.first_sent_at,
            lost: self.lost,
            in_flight: 0,
            app_limited: true,
        });
    }

    /// Drops the snapshot of the oldest packet.
    pub(crate) fn on_forgotten(&mut self) {
        self.snapshots.pop_front();
    }

    /// Records that the application had nothing more to send, with `in_flight` bytes unacknowledged.
    pub(crate) fn on_nothing_to_send(&mut self, in_flight: u64) {
        self.app_limited_until = (self.delivered + in_flight).max(1);
    }

    /// Records that the packet with this index arrived.
    pub(crate) fn on_arrived(&mut self, now: Time, index: usize, sent_at: Time, bytes: u64) {
        self.delivered += bytes;
        self.delivered_at = now;
        let snapshot = self.snapshots[index];
        if self.newest.is_none_or(|newest| {
            (sent_at, snapshot.delivered) >= (newest.sent_at, newest.snapshot.delivered)
        }) {
            self.newest = Some(NewestAcked {
                snapshot,
                sent_at,
                bytes,
            });
        }
    }

    /// Records that the packet with this index counts as lost.
    pub(crate) fn on_lost(&mut self, index: usize, bytes: u64) -> PacketFate {
        self.lost += bytes;
        self.fate(self.snapshots[index], bytes)
    }

    fn fate(&self, snapshot: DeliverySnapshot, bytes: u64) -> PacketFate {
        PacketFate {
            bytes,
            in_flight: snapshot.in_flight,
            lost: self.lost - snapshot.lost,
            app_limited: snapshot.app_limited,
        }
    }

    /// The sample of an ACK whose packets were all passed to [`DeliveryRateEstimator::on_arrived`];
    /// `None` if none of them was new. An interval below `rtt_min` is not plausible and gives no
    /// sample.
    pub(crate) fn sample(&mut self, rtt_min: Span) -> Option<RateSample> {
        let NewestAcked {
            snapshot,
            sent_at,
            bytes,
        } = self.newest.take()?;
        self.first_sent_at = sent_at;
        let delivered = self.delivered - snapshot.delivered;
        let sending = sent_at.since(snapshot.first_sent_at);
        let hearing = self.delivered_at.since(snapshot.delivered_at);
        let interval = sending.max(hearing);
        let rate = (interval >= rtt_min && interval > Span::ZERO).then(|| {
            let rate = u128::from(delivered) * 1_000_000_000 / u128::from(interval.as_nanos());
            u64::try_from(rate).unwrap_or(u64::MAX)
        });
        let newly_lost = self.lost - self.lost_reported;
        self.lost_reported = self.lost;
        Some(RateSample {
            rate,
            delivered,
            prior_delivered: snapshot.delivered,
            delivered_total: self.delivered,
            packet: self.fate(snapshot, bytes),
            newly_lost,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Span = Span::from_millis(1);

    fn at(ms: u64) -> Time {
        Time::ZERO + MS.times(ms)
    }

    #[test]
    fn a_steady_stream_is_measured_at_its_rate() {
        // 1,000 bytes every millisecond, acknowledged 20 ms later.
        let mut delivery = DeliveryRateEstimator::new();
        let mut last = None;
        for ms in 0..100 {
            delivery.on_sent(at(ms), 1_000, 1_000 * ms.min(20) + 1_000);
            if let Some(acked) = ms.checked_sub(20) {
                delivery.on_arrived(at(ms), acked as usize, at(acked), 1_000);
                last = delivery.sample(MS.times(20));
            }
        }
        let sample = last.unwrap();
        let rate = sample.rate.unwrap();
        assert!((950_000..=1_050_000).contains(&rate), "{rate}");
        assert!(!sample.packet.app_limited);
    }

    #[test]
    fn a_burst_of_acks_does_not_raise_the_rate_above_that_of_sending() {
        let mut delivery = DeliveryRateEstimator::new();
        for ms in 0..40 {
            delivery.on_sent(at(ms), 1_000, 1_000 * (ms + 1));
        }
        for i in 0..40 {
            delivery.on_arrived(at(60), i, at(i as u64), 1_000);
        }
        let rate = delivery.sample(MS).unwrap().rate.unwrap();
        assert!(rate <= 1_000_000, "{rate}");
    }

    #[test]
    fn a_sender_without_more_to_send_marks_what_follows() {
        let mut delivery = DeliveryRateEstimator::new();
        delivery.on_sent(at(0), 1_000, 1_000);
        delivery.on_nothing_to_send(1_000);
        delivery.on_sent(at(5), 1_000, 2_000);
        delivery.on_arrived(at(30), 1, at(5), 1_000);
        assert!(delivery.sample(MS).unwrap().packet.app_limited);
    }

    #[test]
    fn losses_are_counted_from_when_a_packet_left() {
        let mut delivery = DeliveryRateEstimator::new();
        (0..3).for_each(|ms| delivery.on_sent(at(ms), 1_000, 1_000 * (ms + 1)));
        assert_eq!(delivery.on_lost(0, 1_000).lost, 1_000);
        let second = delivery.on_lost(1, 1_000);
        assert_eq!((second.lost, second.in_flight), (2_000, 2_000));
        delivery.on_arrived(at(30), 2, at(2), 1_000);
        assert_eq!(delivery.sample(MS).unwrap().newly_lost, 2_000);
    }
}
