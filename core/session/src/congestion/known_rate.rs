//! The congestion controller of paths whose rate is known beforehand: it neither searches for it nor responds to losses.

use d2tp_time::{Span, Time};

use super::{AckEvent, Controller, SiblingPaths, WINDOW_INITIAL_DATAGRAMS};

/// Bytes of IP and UDP headers before each datagram, with IPv6.
const HEADER_BYTES: u64 = 48;

/// A rate, and the bytes that are on their way at that rate.
#[derive(Debug)]
pub(crate) struct KnownRate {
    /// Bytes a second of whole IP packets.
    bytes_per_second: u64,
    window: u64,
    datagram: u64,
}

impl KnownRate {
    pub(crate) fn new(bytes_per_second: u64, window: u64, datagram: u64) -> Self {
        KnownRate {
            bytes_per_second,
            window,
            datagram,
        }
    }
}

impl Controller for KnownRate {
    fn on_ack(&mut self, _: AckEvent, _: SiblingPaths<'_>) {}
    fn on_loss(&mut self, _: Time, _: Time) {}
    fn on_persistent_congestion(&mut self) {}
    fn on_blackout(&mut self, _: Span, _: bool) {}
    fn on_spurious(&mut self) {}
    fn set_datagram(&mut self, bytes: u64) {
        self.datagram = bytes;
    }
    fn window(&self) -> u64 {
        self.window.max(WINDOW_INITIAL_DATAGRAMS * self.datagram)
    }
    fn in_slow_start(&self) -> bool {
        false
    }
    fn pacing_rate(&self) -> Option<u64> {
        // A 32nd is left to packets that are not paced: ACKs and probes.
        let share = u128::from(self.bytes_per_second) * 31 / 32 * u128::from(self.datagram)
            / u128::from(self.datagram + HEADER_BYTES);
        Some(u64::try_from(share).unwrap_or(u64::MAX).max(1))
    }
}
