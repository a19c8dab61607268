//! The budget of control bytes, which are all bytes that are not payload: counted on every path,
//! limited on gated ones.
//!
//! ```text
//!  a little each second, a share of the payload ──▶ bucket ──▶ headers, ACKs, frames about flows
//! ```
//!
//! A path with a grant gains the bytes that its payload needs for ACKs and headers. A path without
//! a grant can cost no more than a small rate, whatever answers the peer asks for. Probes are
//! counted but not limited, because they are rare and a path needs them to stay usable (R-GRANT-6).

use d2tp_time::{Span, Time};

/// The control bytes that a gated path may always spend in each second: at most 3.6 MB an hour, and
/// only if the peer keeps asking for answers. A guess.
const PER_SECOND: u64 = 1_000;
/// The control bytes that a gated path may spend at once: claims of some hundred flows, and the
/// frames of a handshake.
const BURST: i64 = 32 * 1024;
/// Payload bytes for which one more control byte is allowed: three times what ACKs of every second
/// packet take.
const PAYLOAD_PER_BYTE: u64 = 4;
/// Control bytes allowed for each packet with payload, sent or received: its header and its
/// acknowledgement.
const PER_PAYLOAD_PACKET: u64 = 64;

/// The control bytes of one path.
#[derive(Debug)]
pub(crate) struct ControlBudget {
    bucket: i64,
    /// The bytes that the budget gains in each second.
    per_second: u64,
    filled_at: Time,
    payload_out: u64,
    payload_in: u64,
    /// Bytes sent and received that were not payload.
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

impl ControlBudget {
    pub(crate) fn new(now: Time) -> Self {
        ControlBudget {
            bucket: BURST,
            per_second: PER_SECOND,
            filled_at: now,
            payload_out: 0,
            payload_in: 0,
            sent: 0,
            received: 0,
        }
    }

    /// Raises the rate, because the user allows ACKs of other paths to cost this much here.
    pub(crate) fn raise_rate(&mut self, more_per_second: u64) {
        self.per_second = PER_SECOND + more_per_second;
    }

    /// Whether a packet without payload may leave. It may exceed the rest of the budget; the next
    /// ones then wait.
    pub(crate) fn may_send(&mut self, now: Time) -> bool {
        let gained = now
            .since(self.filled_at)
            .as_micros()
            .saturating_mul(self.per_second)
            / 1_000_000;
        if gained > 0 {
            self.bucket = (self.bucket + gained.min(BURST as u64) as i64).min(BURST);
            self.filled_at = now;
        }
        self.bucket > 0
    }

    /// When the next packet without payload may leave.
    pub(crate) fn next_send_at(&self) -> Time {
        let debt = u64::try_from(1 - self.bucket).unwrap_or(0);
        self.filled_at + Span::from_micros((debt * 1_000_000).div_ceil(self.per_second))
    }

    fn earn(&mut self, payload: u64) {
        if payload > 0 {
            let earned = payload / PAYLOAD_PER_BYTE + PER_PAYLOAD_PACKET;
            self.bucket = (self.bucket + earned as i64).min(BURST);
        }
    }

    /// Records a packet that was sent; `payload_out` counts the path's payload so far.
    #[inline]
    pub(crate) fn on_sent(&mut self, now: Time, bytes: u64, payload_out: u64, gated: bool) {
        let payload = payload_out - self.payload_out;
        self.payload_out = payload_out;
        let control = bytes.saturating_sub(payload);
        self.sent += control;
        if gated {
            self.may_send(now);
            self.earn(payload);
            self.bucket -= control as i64;
        }
    }

    /// Records a packet that arrived; `payload_in` counts the path's payload so far.
    #[inline]
    pub(crate) fn on_received(&mut self, bytes: u64, payload_in: u64, gated: bool) {
        let payload = payload_in - self.payload_in;
        self.payload_in = payload_in;
        self.received += bytes.saturating_sub(payload);
        if gated {
            self.earn(payload);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chatter_is_held_to_the_trickle_and_payload_pays_for_its_answers() {
        // R-GRANT-6
        let mut control = ControlBudget::new(Time::ZERO);
        let mut now = Time::ZERO;
        let until = Time::ZERO + Span::from_secs(100);
        while now < until {
            if control.may_send(now) {
                control.on_sent(now, 300, 0, true);
            } else {
                assert!(control.next_send_at() > now);
                now = control.next_send_at();
                assert!(control.may_send(now), "the timer means what it says");
            }
        }
        let most = BURST as u64 + 100 * PER_SECOND + 300;
        assert!(control.sent <= most, "{} of {most}", control.sent);
        assert!(control.sent >= 100 * PER_SECOND);
        // An ACK of 60 bytes for each packet of 1,200 never waits.
        let mut payload = 0;
        for _ in 0..10_000 {
            payload += 1_150;
            control.on_received(1_200, payload, true);
            assert!(control.may_send(now));
            control.on_sent(now, 60, 0, true);
        }
        assert_eq!(control.received, 500_000);
        // The bytes that the user allows for ACKs of other paths are additional.
        let mut control = ControlBudget::new(Time::ZERO);
        control.on_sent(Time::ZERO, BURST as u64, 0, true);
        control.raise_rate(4_000);
        assert!(!control.may_send(Time::ZERO));
        control.on_sent(until, 0, 0, true);
        assert_eq!(control.bucket, BURST);
        control.on_sent(until, BURST as u64 + 5_000, 0, true);
        assert!(!control.may_send(until + Span::from_secs(1)));
        assert!(control.may_send(until + Span::from_millis(1_001)));
    }
}
